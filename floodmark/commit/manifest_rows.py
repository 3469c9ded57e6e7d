"""The entries of a manifest, read for planning: the values of each field, in the order of the entries.

A manifest is an Avro file whose fields are known by their Iceberg ids, whatever their names and order are: any engine's
manifest is read, one of format v1 too. Values are decoded by PyIceberg's compiled decoder, field by field: to make
its objects, or with another reader a dict of each entry, takes several times longer.
A file that cannot be decoded to its last byte is `Corrupt`.
"""

from __future__ import annotations

import bz2
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard
from pyiceberg.avro.decoder import BinaryDecoder, new_decoder
from pyiceberg.avro.resolver import construct_reader
from pyiceberg.types import BinaryType, IcebergType, IntegerType, LongType, MapType, NestedField, StructType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from floodmark.errors import Corrupt

_MAGIC = b"Obj\x01"
_SYNC_BYTES = 16
_DATA_FILE = 2
# Zeros behind the last entry: the compiled decoder does not check where its input ends.
_SLACK = bytes(64 * 1024)

_Reader: TypeAlias = Callable[[BinaryDecoder], object]
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    MemoryError,
    SystemError,
    OSError,
    zlib.error,
    zstandard.ZstdError,
)


@dataclass(frozen=True)
class ManifestRows:
    """A field that the file does not have is in neither map. Maps of whole numbers are keys and values in turns."""

    count: int
    values: dict[int, list[object]]
    types: dict[int, IcebergType]


def read_manifest(data: bytes, location: str) -> ManifestRows:
    """All entries of a manifest file, with the fields of their data file beside their own."""
    try:
        return _read(data)
    except _DAMAGE as error:
        raise Corrupt(
            "a manifest of the lake is damaged",
            file=location,
            cause=f"{type(error).__name__}: {error}",
            advice="Run `floodmark doctor`; restore the file from a copy.",
        ) from error


def pairs(maps: Sequence[object]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of maps of whole numbers, or None: the place of the map, the key and the value of every pair."""
    parts = [one if isinstance(one, array) else array("q") for one in maps]
    sizes = np.fromiter(map(len, parts), np.int64, len(parts)) // 2
    flat = np.frombuffer(b"".join(parts), np.int64)
    return np.repeat(np.arange(len(parts)), sizes), flat[0::2], flat[1::2]


def _read(data: bytes) -> ManifestRows:
    meta, position = _header(data)
    decompress = _CODECS[meta.get("avro.codec", b"null").decode()]
    count, blocks = 0, []
    for entries, block in _blocks(data, position):
        count += entries
        blocks.append(decompress(block))
    body = b"".join(blocks)
    schema = AvroSchemaConversion().avro_to_iceberg(json.loads(meta["avro.schema"]))
    fields = list(_flat(schema.as_struct()))
    readers = [_optional(field) for field in fields]
    decoder = new_decoder(body + _SLACK)
    rows = [[read(decoder) for read in readers] for _ in range(count)]
    if decoder.tell() != len(body):
        raise ValueError(f"the last entry ends at byte {decoder.tell()}, not {len(body)}")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(fields)
    return ManifestRows(
        count,
        {field.field_id: list(column) for field, column in zip(fields, columns, strict=True)},
        {field.field_id: field.field_type for field in fields},
    )


# ── the file: header and blocks ──


def _long(data: bytes, position: int) -> tuple[int, int]:
    found, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), position
        shift += 7


def _bytes(data: bytes, position: int) -> tuple[bytes, int]:
    size, position = _long(data, position)
    if not 0 <= size <= len(data) - position:
        raise EOFError(f"{size} bytes wanted, the file has {len(data) - position}")
    return data[position : position + size], position + size


def _header(data: bytes) -> tuple[dict[str, bytes], int]:
    if not data.startswith(_MAGIC):
        raise ValueError("it is not an Avro file")
    meta: dict[str, bytes] = {}
    count, position = _long(data, len(_MAGIC))
    while count:
        if count < 0:
            count = -count
            _, position = _long(data, position)
        for _ in range(count):
            key, position = _bytes(data, position)
            meta[key.decode()], position = _bytes(data, position)
        count, position = _long(data, position)
    return meta, position


def _blocks(data: bytes, position: int) -> Iterator[tuple[int, bytes]]:
    """How many entries each block has, and its bytes as they are in the file."""
    sync = data[position : position + _SYNC_BYTES]
    position += _SYNC_BYTES
    while position < len(data):
        count, position = _long(data, position)
        block, position = _bytes(data, position)
        if count < 0 or data[position : position + _SYNC_BYTES] != sync:
            raise ValueError(f"a block does not end at byte {position}")
        position += _SYNC_BYTES
        yield count, block


def _inflate(block: bytes) -> bytes:
    return zlib.decompress(block, -zlib.MAX_WBITS)


def _snappy(block: bytes) -> bytes:
    """Snappy's own length, without a sign, leads; the last four bytes are Avro's checksum."""
    size, shift = 0, 0
    for byte in block:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    found: bytes = pa.decompress(block[:-4], decompressed_size=size, codec="snappy", asbytes=True)
    if zlib.crc32(found) != int.from_bytes(block[-4:], "big"):
        raise ValueError("the checksum of a block is wrong")
    return found


def _zstandard(block: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(block)


_CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": _inflate,
    "snappy": _snappy,
    "zstandard": _zstandard,
    "bzip2": bz2.decompress,
}


# ── the fields of an entry ──


def _flat(struct: StructType) -> Iterator[NestedField]:
    for field in struct.fields:
        if field.field_id == _DATA_FILE and field.required and isinstance(field.field_type, StructType):
            yield from field.field_type.fields
        else:
            yield field


def _optional(field: NestedField) -> _Reader:
    read = _reader(field.field_type)
    if field.required:
        return read

    def read_optional(decoder: BinaryDecoder) -> object:
        branch = decoder.read_int()
        if branch == 0:
            return None
        if branch != 1:
            raise ValueError(f"a field has no type {branch}")
        return read(decoder)

    return read_optional


def _reader(kind: IcebergType) -> _Reader:
    if isinstance(kind, MapType) and isinstance(kind.key_type, IntegerType) and kind.value_required:
        if isinstance(kind.value_type, IntegerType | LongType):
            return _read_numbers
        if isinstance(kind.value_type, BinaryType):
            return _read_bounds
    reader: _Reader = construct_reader(kind).read
    return reader


def _read_numbers(decoder: BinaryDecoder) -> array[int]:
    found = array("q")
    while count := decoder.read_int():
        if count < 0:
            count = -count
            decoder.skip_int()
        part = array("q", decoder.read_ints(2 * count))
        found = found + part if found else part
    return found


def _read_bounds(decoder: BinaryDecoder) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while count := decoder.read_int():
        if count < 0:
            count = -count
            decoder.skip_int()
        decoder.read_int_bytes_dict(count, found)
    return found
