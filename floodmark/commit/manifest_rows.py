"""The entries of a manifest, read for planning: the values of each field, in the order of the entries.

A manifest is an Avro file whose fields are known by their Iceberg ids, whatever their names and order are: any engine's
manifest is read, one of format v1 too. PyIceberg's objects, or a dict of each entry as other readers make, take several
times longer; and PyIceberg's compiled decoder does not check where its input ends, so that a damaged file ends the
process. Here only values that planning needs become Python objects: maps of counts stay as they are in the file until
all of them are decoded at once. A file that cannot be decoded to its last byte is `Corrupt`.
"""

from __future__ import annotations

import bz2
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard
from pyiceberg import types as it
from pyiceberg.utils.decimal import bytes_to_decimal, decimal_required_bytes
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from floodmark.errors import Corrupt

_MAGIC = b"Obj\x01"
_SYNC_BYTES = 16
_DATA_FILE = 2
# A whole number has at most 64 bits, seven in each byte.
_NUMBER_BYTES_MAX = 10

# The value at a position, and where the next one is.
_Reader: TypeAlias = Callable[[int], tuple[object, int]]
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    MemoryError,
    OSError,
    struct.error,
    zlib.error,
    zstandard.ZstdError,
)
_Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ManifestRows:
    """A field that the file does not have is in neither map. Maps of whole numbers are bytes, for `pairs`."""

    count: int
    values: dict[int, list[object]]
    types: dict[int, it.IcebergType]


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


def pairs(maps: Sequence[object]) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Of maps of whole numbers, or None: the place of the map, the key and the value of every pair."""
    parts = [one if isinstance(one, bytes) else b"" for one in maps]
    flat = np.frombuffer(b"".join(parts), np.uint8)
    last = np.flatnonzero(flat < 0x80)
    first = np.concatenate([np.zeros(min(1, len(last)), np.int64), last[:-1] + 1])
    shifts = np.arange(len(flat)) - np.repeat(first, last - first + 1)
    bits = (flat & 0x7F).astype(np.uint64) << (7 * shifts).astype(np.uint64)
    found = np.bitwise_or.reduceat(bits, first) if len(first) else bits
    numbers = (found >> np.uint64(1)).astype(np.int64) ^ -(found & np.uint64(1)).astype(np.int64)
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.repeat(np.arange(len(parts)), sizes)[last][0::2], numbers[0::2], numbers[1::2]


def _read(data: bytes) -> ManifestRows:
    meta, start = _header(data)
    decompress = _CODECS[meta.get("avro.codec", b"null").decode()]
    count, blocks = 0, []
    for entries, block in _blocks(data, start):
        count += entries
        blocks.append(decompress(block))
    fields = _fields(meta["avro.schema"])
    body = _Body(b"".join(blocks))
    if count > len(body.data):
        raise EOFError(f"{count} entries in {len(body.data)} bytes")
    values: dict[int, list[object]] = {field.field_id: [] for field in fields}
    steps = [(body.reader(field), values[field.field_id].append) for field in fields]
    position = 0
    for _ in range(count):
        for read, keep in steps:
            value, position = read(position)
            keep(value)
    if position != len(body.data):
        raise EOFError(f"the last entry ends at byte {position}, not {len(body.data)}")
    return ManifestRows(count, values, {field.field_id: field.field_type for field in fields})


# ── the file: header and blocks ──


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
    if len(sync) < _SYNC_BYTES:
        raise EOFError("it ends in its header")
    position += _SYNC_BYTES
    while position < len(data):
        count, position = _long(data, position)
        block, position = _bytes(data, position)
        if count < 0 or data[position : position + _SYNC_BYTES] != sync:
            raise ValueError(f"a block does not end at byte {position}")
        position += _SYNC_BYTES
        yield count, block


def _long(data: bytes, position: int) -> tuple[int, int]:
    found = data[position]
    position += 1
    if found >= 0x80:
        found &= 0x7F
        for shift in range(7, 7 * _NUMBER_BYTES_MAX, 7):
            byte = data[position]
            position += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        else:
            raise ValueError(f"the number before byte {position} is too long")
    return (found >> 1) ^ -(found & 1), position


def _bytes(data: bytes, position: int) -> tuple[bytes, int]:
    size, position = _long(data, position)
    if not 0 <= size <= len(data) - position:
        raise EOFError(f"{size} bytes at byte {position} of {len(data)}")
    return data[position : position + size], position + size


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


@lru_cache(maxsize=64)
def _fields(schema_json: bytes) -> tuple[it.NestedField, ...]:
    """The fields of an entry, in the order of the file; manifests of a table mostly have the same ones."""
    return tuple(_flat(AvroSchemaConversion().avro_to_iceberg(json.loads(schema_json)).as_struct()))


def _flat(struct_type: it.StructType) -> Iterator[it.NestedField]:
    for field in struct_type.fields:
        if field.field_id == _DATA_FILE and field.required and isinstance(field.field_type, it.StructType):
            yield from field.field_type.fields
        else:
            yield field


class _Body:
    """The entries of a file, one after the other, and readers of their values.

    `ends` are the bytes that end a number, if they belong to one; `before` is how many of them precede a byte.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        is_end = np.frombuffer(data, np.uint8) < 0x80
        self.ends = np.flatnonzero(is_end)
        self.before: _Numbers = np.cumsum(is_end) - is_end

    def reader(self, field: it.NestedField) -> _Reader:
        read, data = self._reader(field.field_type), self.data
        if field.required:
            return read

        def read_optional(position: int) -> tuple[object, int]:
            branch = data[position]
            if branch == 0:
                return None, position + 1
            if branch != 2:
                raise ValueError(f"a field has no type {branch} at byte {position}")
            return read(position + 1)

        return read_optional

    def _reader(self, kind: it.IcebergType) -> _Reader:
        data = self.data
        match kind:
            case it.BooleanType():
                return lambda position: (data[position] != 0, position + 1)
            case (
                it.IntegerType() | it.LongType() | it.DateType() | it.TimeType() | it.TimestampType()
                | it.TimestamptzType() | it.TimestampNanoType() | it.TimestamptzNanoType()
            ):  # fmt: skip
                return lambda position: _long(data, position)
            case it.FloatType():
                return lambda position: (struct.unpack_from("<f", data, position)[0], position + 4)
            case it.DoubleType():
                return lambda position: (struct.unpack_from("<d", data, position)[0], position + 8)
            case it.StringType():
                return self._read_text
            case it.BinaryType():
                return lambda position: _bytes(data, position)
            case it.FixedType():
                return self._fixed(len(kind), bytes)
            case it.UUIDType():
                return self._fixed(16, lambda raw: UUID(bytes=raw))
            case it.DecimalType(precision=precision, scale=scale):
                return self._fixed(decimal_required_bytes(precision), lambda raw: bytes_to_decimal(raw, scale))
            case it.StructType():
                return self._struct([self.reader(field) for field in kind.fields])
            case it.ListType():
                return self._list(self.reader(kind.element_field))
            case it.MapType() if kind.value_required and isinstance(kind.key_type, it.IntegerType):
                if isinstance(kind.value_type, it.IntegerType | it.LongType):
                    return self._read_numbers
                if isinstance(kind.value_type, it.BinaryType):
                    return self._read_bounds
        raise TypeError(f"no manifest has a field of type {kind}")

    def _read_text(self, position: int) -> tuple[str, int]:
        raw, position = _bytes(self.data, position)
        return raw.decode(), position

    def _fixed(self, size: int, value: Callable[[bytes], object]) -> _Reader:
        def read_fixed(position: int) -> tuple[object, int]:
            raw = self.data[position : position + size]
            if len(raw) < size:
                raise EOFError(f"{size} bytes at byte {position} of {len(self.data)}")
            return value(raw), position + size

        return read_fixed

    def _struct(self, readers: Sequence[_Reader]) -> _Reader:
        def read_struct(position: int) -> tuple[tuple[object, ...], int]:
            found = []
            for read in readers:
                value, position = read(position)
                found.append(value)
            return tuple(found), position

        return read_struct

    def _list(self, read: _Reader) -> _Reader:
        def read_list(position: int) -> tuple[list[object], int]:
            found = []
            count, position = self._count(position)
            while count:
                for _ in range(count):
                    value, position = read(position)
                    found.append(value)
                count, position = self._count(position)
            return found, position

        return read_list

    def _count(self, position: int) -> tuple[int, int]:
        """How many items follow; 0 after the last ones."""
        if self.data[position] == 0:
            return 0, position + 1
        count, position = _long(self.data, position)
        if count < 0:
            _, position = _long(self.data, position)
            count = -count
        if count > len(self.data) - position:
            raise EOFError(f"{count} values at byte {position} of {len(self.data)}")
        return count, position

    def _read_numbers(self, position: int) -> tuple[bytes, int]:
        """The bytes of all keys and values: where they end follows from how many they are."""
        found = b""
        count, position = self._count(position)
        while count:
            end = self.ends.item(self.before.item(position) + 2 * count - 1) + 1
            found = found + self.data[position:end] if found else self.data[position:end]
            count, position = self._count(end)
        return found, position

    def _read_bounds(self, position: int) -> tuple[dict[int, bytes], int]:
        data, found = self.data, dict[int, bytes]()
        count, position = self._count(position)
        while count:
            for _ in range(count):
                key, size = data[position], data[position + 1]
                if (key | size) & 0x81:
                    key, position = _long(data, position)
                    found[key], position = _bytes(data, position)
                else:
                    # Two numbers of a byte each; a value that is cut short is noticed at the end of the entries.
                    start = position + 2
                    position = start + (size >> 1)
                    found[key >> 1] = data[start:position]
            count, position = self._count(position)
        return found, position
