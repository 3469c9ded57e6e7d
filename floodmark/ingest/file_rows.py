"""The rows of one file that is small enough to be read in this process: bytes to an Arrow table, without Spark. Pure.

It means what `ingest/files.py` means: nothing is guessed and nothing is filled in, a value that does not fit refuses
the file, and so does a column that the table does not have. JSON lines are judged as those that come over HTTP. CSV is
that of RFC 4180 with a header; empty text is null, and a time without a zone is UTC where the table has a zone. The
error names the line, and in CSV the column.
"""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import zstandard
from pyarrow import types
from pyiceberg.schema import Schema

from floodmark.errors import Invalid
from floodmark.ingest.files import COMPRESSIONS
from floodmark.ingest.judge import Judge
from floodmark.rows.changes import CHANGE_COLUMN
from floodmark.rows.convert import Column, table_shape
from floodmark.rows.schema import nearest

ROWS_MAX = 20_000_000
_GZIP_BITS = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 1024 * 1024
# A block of zstd is at least 4 bytes and at most 128 KiB of text: so little is unpacked before it is counted.
_ZSTD_PIECE_BYTES = 1024
_ZSTD_WINDOW_BYTES_MAX = 128 * 1024 * 1024
# What one row of CSV may be. Python's reader and Arrow's have lower bounds of their own (128 KiB, about 1 MiB).
CSV_ROW_BYTES_MAX = 16 * 1024 * 1024
_CSV_ROW = re.compile(r"Row #(\d+): (.*)", re.DOTALL)
_EXAMPLE_CHARACTERS_MAX = 60
# A time that says its zone ends like this.
_ZONE = r"([Zz]|[+-]\d{2}(:?\d{2})?)$"
_ADVICE = "Correct the file and drop it again; nothing was loaded."


class NeedsSpark(Exception):
    """Unpacked, the file is more than may be held in memory here, or it is packed as nobody unpacks it here."""


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
        return _csv(text, columns, filled)
    return _json(text, schema, columns, filled, merged=merged)


# ── packed ──


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
        raise Invalid("the file cannot be unpacked", cause=error, advice=_ADVICE) from error
    return bytes(text)


def _plain(data: bytes) -> Iterator[bytes]:
    yield data


def _gunzip(data: bytes) -> Iterator[bytes]:
    """All members, one after the other, in pieces that are no larger than they may be."""
    rest = data
    while rest:
        member = zlib.decompressobj(_GZIP_BITS)
        yield member.decompress(rest, _PIECE_BYTES)
        while member.unconsumed_tail:
            yield member.decompress(member.unconsumed_tail, _PIECE_BYTES)
        if not member.eof:
            raise EOFError("it ends too early")
        rest = member.unused_data


def _unzstd(data: bytes) -> Iterator[bytes]:
    view, start = memoryview(data), 0
    while start < len(data):
        frame = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX).decompressobj()
        while not frame.eof:
            given = view[start : start + _ZSTD_PIECE_BYTES]
            if not given:
                raise EOFError("it ends too early")
            start += len(given)
            yield frame.decompress(given)
        start -= len(frame.unused_data)


_UNPACK = {"gz": _gunzip, "zst": _unzstd}


# ── Parquet, JSON lines ──


def _parquet(data: bytes) -> pa.Table:
    try:
        # What does not fit the table is refused where all Arrow data is: by name and type, never silently.
        return pq.read_table(io.BytesIO(data), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise Invalid("the file is not Parquet, or damaged", cause=str(error)[:200], advice=_ADVICE) from error


def _json(text: bytes, schema: Schema, columns: Sequence[Column], filled: Collection[str], *, merged: bool) -> pa.Table:
    found = Judge(schema, tuple(filled), whole=merged).read(text, ROWS_MAX).table
    if CHANGE_COLUMN in found.column_names:
        raise Invalid(
            "the files have a column that the table does not have",
            column=CHANGE_COLUMN,
            advice="Changes are sent over HTTP; a file holds rows.",
        )
    for column in columns:
        if column.name not in found.column_names and column.name not in filled:
            found = found.append_column(column.name, pa.nulls(found.num_rows, column.field.type))
    return found


# ── CSV ──


def _csv(text: bytes, columns: Sequence[Column], filled: Collection[str]) -> pa.Table:
    header = _header(text)
    known = {column.name: column for column in columns}
    for name in header:
        if header.count(name) > 1:
            raise Invalid("a column comes twice in the header", column=name, line=1, advice=_ADVICE)
        if name not in known:
            advice = nearest(name, list(known))
            raise Invalid("the files have a column that the table does not have", column=name, line=1, advice=advice)
        if types.is_nested(known[name].field.type):
            raise Invalid("CSV cannot hold this column", column=name, type=known[name].field.type, advice="Use JSONL.")
    missing = [name for name in known if name not in header and name not in filled]
    if missing:
        raise Invalid(
            "the files lack columns of the table",
            columns=",".join(missing),
            line=1,
            advice="Add them to the header, with empty values if they are null.",
        )
    table = _texts(text, header)
    arrays = [_typed(text, table.column(name), known[name]) for name in header]
    return pa.table(arrays, names=header)


def _header(text: bytes) -> list[str]:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise Invalid("the file is not UTF-8", line=text.count(b"\n", 0, error.start) + 1, advice=_ADVICE) from error
    try:
        return next(_records(text), [])
    except csv.Error as error:
        raise Invalid("the header cannot be read as CSV", line=1, cause=error, advice=_ADVICE) from error


def _records(text: bytes, *, strict: bool = False) -> Any:
    """The rows as Python reads them, with the line that each ends in: slow, for the header and what is wrong."""
    # For the whole process, and always the same: nobody else reads CSV so.
    csv.field_size_limit(CSV_ROW_BYTES_MAX)
    return csv.reader(io.TextIOWrapper(io.BytesIO(text), "utf-8-sig", newline=""), strict=strict)


def _line_of(text: bytes, number: int) -> int | None:
    """The line in which the row of this number begins; the header is row 0. Empty lines are no rows.

    None if Python cannot read up to there: what Arrow found to be wrong is told all the same.
    """
    before, records = 0, _records(text)
    try:
        for row in records:
            if row:
                if number == 0:
                    break
                number -= 1
            before = records.line_num
    except csv.Error:
        return None
    return before + 1


def _check_quotes(text: bytes) -> None:
    """A quote that is never closed makes one value of the rest of the file, and readers take it without a word."""
    if text.count(b'"') % 2 == 0:
        return
    before, records = 0, _records(text, strict=True)
    try:
        for _ in records:
            before = records.line_num
    except csv.Error as error:
        if "unexpected end" in str(error):
            raise Invalid(
                "a quote is never closed: the rest of the file would be one value", line=before + 1, advice=_ADVICE
            ) from error


def _texts(text: bytes, header: Sequence[str]) -> pa.Table:
    """All values as text; empty ones are null."""
    _check_quotes(text)
    try:
        return pa_csv.read_csv(
            io.BytesIO(text),
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                column_names=list(header),
                skip_rows_after_names=1,
                # A row may go on in the next block, and not in the one after that.
                block_size=CSV_ROW_BYTES_MAX,
            ),
            parse_options=pa_csv.ParseOptions(newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.string() for name in header},
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid as error:
        found = _CSV_ROW.search(str(error))
        raise Invalid(
            "a row has more or fewer values than the header" if found else "a row is too long, or is no CSV",
            line=None if found is None else _line_of(text, int(found[1]) - 1),
            problem=(str(error) if found is None else found[2])[:200],
            advice=_ADVICE,
        ) from error


def _typed(text: bytes, texts: pa.ChunkedArray, column: Column) -> pa.ChunkedArray:
    try:
        return cast_texts(texts, column.field.type)
    except pa.ArrowInvalid as error:
        row = _first_bad(texts, column.field.type)
        example = repr(texts[row].as_py())
        raise Invalid(
            f"a value is not the table's {column.field.type}",
            column=column.name,
            line=_line_of(text, row + 1),
            value=example[:_EXAMPLE_CHARACTERS_MAX],
            advice=_ADVICE,
        ) from error


def cast_texts(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Texts of CSV as values of a column; ArrowInvalid if one does not fit."""
    if types.is_boolean(kind):
        lower = pc.utf8_lower(texts)
        if pc.all(pc.is_in(lower, pa.array(["true", "false", None])), min_count=0).as_py() is False:
            raise pa.ArrowInvalid("neither true nor false")
        return lower.cast(kind)
    if types.is_timestamp(kind) and kind.tz is not None:
        # A date has a minus too: without a time of day there is no zone.
        zoned = pc.and_(pc.match_substring(texts, ":"), pc.match_substring_regex(texts, _ZONE))
        nothing = pa.scalar(None, pa.string())
        plain = pc.if_else(zoned, nothing, texts).cast(pa.timestamp(kind.unit))
        return pc.if_else(zoned, pc.if_else(zoned, texts, nothing).cast(kind), pc.assume_timezone(plain, kind.tz))
    found = texts.cast(kind)
    if types.is_floating(kind):
        endless = pc.and_(pc.is_inf(found), pc.invert(pc.match_substring(pc.utf8_lower(texts), "inf")))
        if pc.any(endless, min_count=0).as_py():
            raise pa.ArrowInvalid("too large a number")
    return found


def _first_bad(texts: pa.ChunkedArray, kind: pa.DataType) -> int:
    """The number of the first value that does not fit, by halving."""
    start, length = 0, len(texts)
    while length > 1:
        half = length // 2
        try:
            cast_texts(texts.slice(start, half), kind)
        except pa.ArrowInvalid:
            length = half
        else:
            start, length = start + half, length - half
    return start
