"""Rows to one file: JSON lines, CSV or Parquet, streaming; the file appears whole or not at all.

What is written can be loaded again and gives the same rows: what a format cannot hold is Invalid, never something near
it. The one exception is CSV itself, where no text and empty text are hardly told apart by anybody: the first is written
as nothing, the second as two quotes. JSON is strict: a number that JSON does not know (NaN, Infinity) is text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from math import isfinite, isnan
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from floodmark.errors import Invalid
from floodmark.storage import Storage

# What must be quoted in CSV: separators, quotes, and text that has no other sign of being there.
_QUOTED = re.compile(r'[",\r\n]|^$|^\s|\s$')
FORMATS = {"jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "csv": "csv", "parquet": "parquet"}


def format_for(path: str, wanted: str | None) -> str:
    """The format of a file to be written: as asked for, or by its name."""
    found = FORMATS.get((wanted or path.rpartition(".")[2]).lower())
    if found is None:
        raise Invalid(
            "the file's format is not known",
            path=path,
            format=wanted,
            advice="Use jsonl, csv or parquet." if wanted else "Name it .jsonl, .csv or .parquet, or give --format.",
        )
    return found


def write_file(
    storage: Storage,
    location: str,
    reader: pa.RecordBatchReader,
    file_format: str,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write all rows of the reader; returns how many."""
    writers = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
    for field in reader.schema:
        if not _held(field.type, file_format):
            advice = "Write Parquet, which holds everything."
            raise Invalid(f"{file_format} cannot hold this column", column=field.name, type=field.type, advice=advice)
    rows = 0
    with storage.writer(location) as stream, writers[file_format](stream, reader.schema) as write:
        for batch in reader:
            write(batch)
            rows += len(batch)
            if progress is not None:
                progress(rows)
    return rows


def _held(kind: pa.DataType, file_format: str) -> bool:
    """CSV has plain values only, and no agreed text for bytes; the keys of JSON's objects are text."""
    if file_format == "csv":
        return not pa.types.is_nested(kind) and not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind)
    if file_format == "jsonl" and pa.types.is_map(kind) and not _is_text(kind.key_type):
        return False
    return all(_held(kind.field(at).type, file_format) for at in range(kind.num_fields))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


Write = Callable[[pa.RecordBatch], None]


@contextmanager
def _jsonl(stream: Any, schema: pa.Schema) -> Iterator[Write]:
    def write(batch: pa.RecordBatch) -> None:
        stream.write("".join(f"{_json_text(row)}\n" for row in dicts(batch)).encode())

    yield write


@contextmanager
def _csv(stream: Any, schema: pa.Schema) -> Iterator[Write]:
    def write(batch: pa.RecordBatch) -> None:
        stream.write("".join(_csv_line(row.values()) for row in dicts(batch)).encode())

    stream.write(_csv_line(schema.names).encode())
    yield write


@contextmanager
def _parquet(stream: Any, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        yield writer.write_batch


def dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as dicts of Python's values; maps are dicts too."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except OverflowError as error:
        raise Invalid(
            "a time is beyond the years 1 to 9999", cause=error, advice="`floodmark export` writes it as Parquet."
        ) from error
    return rows


def _json_text(row: dict[str, Any]) -> str:
    try:
        return json.dumps(row, default=_plain, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json_value(row), ensure_ascii=False)


def json_value(value: Any) -> Any:
    """A value with all that JSON does not know as text, at any depth."""
    if isinstance(value, dict):
        return {str(json_value(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else _plain(value)
    return value if value is None or isinstance(value, str | int) else _plain(value)


def _csv_line(values: Iterable[Any]) -> str:
    # A line without anything on it would be taken for no row.
    return (",".join(_csv_text(value) for value in values) or '""') + "\n"


def _csv_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value if isinstance(value, str | int) else _plain(value))
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _plain(value: Any) -> str:
    """A value as text: times in ISO 8601, bytes in base64, decimals in full, floats as Java and Python read them."""
    if isinstance(value, float):
        return repr(value) if isfinite(value) else "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no form as text")
