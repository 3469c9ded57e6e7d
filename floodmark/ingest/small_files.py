"""The rows of one file that is small enough to be read in this process: bytes to an Arrow table, without Spark. Pure.

It has the same rules as files.py: nothing is guessed and nothing is filled in; a value that does not fit refuses the
file, and so does a column that the table does not have. JSON lines are judged as those that come over HTTP, CSV by
csv_rows.py. The error names the line, and in CSV the column.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyiceberg.schema import Schema

from floodmark.errors import Invalid
from floodmark.ingest.csv_rows import read_text
from floodmark.ingest.files import COMPRESSIONS, CORRECT_ADVICE
from floodmark.ingest.judge import Judge, with_all_columns
from floodmark.rows.convert import Column, table_shape
from floodmark.rows.reading.changes import CHANGE_COLUMN

ROWS_MAX = 20_000_000
_GZIP_BITS = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 1024 * 1024
# A block of zstd is at least 4 bytes and at most 128 KiB of text: this bounds what is unpacked before it is counted.
_ZSTD_PIECE_BYTES = 1024
_ZSTD_WINDOW_BYTES_MAX = 128 * 1024 * 1024


class NeedsSpark(Exception):
    """Unpacked, the file is more than may be held in memory here, or its compression is one that only Spark reads."""


def read_rows(
    name: str,
    data: bytes,
    file_format: str,
    schema: Schema,
    filled: Collection[str],
    *,
    bytes_max: int,
    merged: bool = False,
) -> pa.Table:
    """The rows of a file with the columns of the table. `Invalid`: they do not fit. NeedsSpark: not read here.

    `merged`: they replace rows of the table, so every line has every column.
    """
    if file_format == "parquet":
        return _parquet(data)
    text = unpack(name, data, bytes_max)
    columns = table_shape(schema.model_dump_json()).columns
    if file_format == "csv":
        return read_text(text, columns, filled)
    return _json(text, schema, columns, filled, merged=merged)


# ── unpacking ──


def unpack(name: str, data: bytes, bytes_max: int) -> bytes:
    """The text of a file, by the end of its name."""
    ending = name.lower().rpartition(".")[2]
    if ending in COMPRESSIONS and ending not in _UNPACK:
        raise NeedsSpark
    text = bytearray()
    try:
        for piece in _UNPACK.get(ending, _plain)(data):
            if len(text) + len(piece) > bytes_max:
                raise NeedsSpark
            text += piece
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise Invalid("the file cannot be unpacked", cause=error, advice=CORRECT_ADVICE) from error
    return bytes(text)


def _plain(data: bytes) -> Iterator[bytes]:
    yield data


def _gunzip(data: bytes) -> Iterator[bytes]:
    """All members, one after the other, in pieces of bounded size."""
    rest = data
    while rest:
        member = zlib.decompressobj(_GZIP_BITS)
        yield member.decompress(rest, _PIECE_BYTES)
        while member.unconsumed_tail:
            yield member.decompress(member.unconsumed_tail, _PIECE_BYTES)
        if not member.eof:
            raise EOFError("it is truncated")
        rest = member.unused_data


def _unzstd(data: bytes) -> Iterator[bytes]:
    view, start = memoryview(data), 0
    while start < len(data):
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX).decompressobj()
        while not frame.eof:
            given = view[start : start + _ZSTD_PIECE_BYTES]
            if not given:
                raise EOFError("it is truncated")
            start += len(given)
            yield frame.decompress(given)
        start -= len(frame.unused_data)


_UNPACK = {"gz": _gunzip, "zst": _unzstd}


# ── Parquet, JSON lines ──


def _parquet(data: bytes) -> pa.Table:
    try:
        # Data that does not fit the table is refused where all Arrow data is: by name and type, never silently.
        return pq.read_table(io.BytesIO(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise Invalid("the file is not Parquet, or damaged", cause=str(error)[:200], advice=CORRECT_ADVICE) from error


def _json(text: bytes, schema: Schema, columns: Sequence[Column], filled: Collection[str], *, merged: bool) -> pa.Table:
    found = Judge(schema, tuple(filled), whole=merged).read(text, ROWS_MAX).table
    if CHANGE_COLUMN in found.column_names:
        raise Invalid(
            "the files have a column that the table does not have",
            column=CHANGE_COLUMN,
            advice="Changes are sent over HTTP; a file holds rows.",
        )
    return with_all_columns(found, [one for one in columns if one.name in found.column_names or one.name not in filled])
