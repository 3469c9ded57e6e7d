"""Rows to one file: JSON lines, CSV or Parquet, streaming; the file appears whole or not at all."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from floodmark.errors import Invalid
from floodmark.storage import Storage

FORMATS = {"jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "csv": "csv", "parquet": "parquet"}


def format_for(path: str, wanted: str | None) -> str:
    """The format of a file to be written: as asked for, or by its name."""
    found = FORMATS.get((wanted or path.rpartition(".")[2]).lower())
    if found is None:
        raise Invalid(
            "the file's format is not known",
            path=path,
            format=wanted,
            advice="Name it .jsonl, .csv or .parquet, or give --format.",
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
    nested = [field.name for field in reader.schema if pa.types.is_nested(field.type)]
    if file_format == "csv" and nested:
        raise Invalid("CSV cannot hold this column", column=nested[0], advice="Write JSON lines or Parquet.")
    rows = 0
    with storage.writer(location) as stream, writers[file_format](stream, reader.schema) as write:
        for batch in reader:
            write(batch)
            rows += len(batch)
            if progress is not None:
                progress(rows)
    return rows


Write = Callable[[pa.RecordBatch], None]


@contextmanager
def _jsonl(stream: Any, schema: pa.Schema) -> Iterator[Write]:
    def write(batch: pa.RecordBatch) -> None:
        lines = [json.dumps(row, default=plain_value, ensure_ascii=False) + "\n" for row in _dicts(batch)]
        stream.write("".join(lines).encode())

    yield write


@contextmanager
def _csv(stream: Any, schema: pa.Schema) -> Iterator[Write]:
    def write(batch: pa.RecordBatch) -> None:
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        for row in batch.to_pylist():
            lines.writerow([_csv_value(value) for value in row.values()])
        stream.write(text.getvalue().encode())

    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow(schema.names)
    stream.write(header.getvalue().encode())
    yield write


@contextmanager
def _parquet(stream: Any, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        yield writer.write_batch


def _dicts(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as dicts; Arrow gives maps as lists of pairs."""
    maps = [field.name for field in batch.schema if _holds_map(field.type)]
    rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict") if maps else batch.to_pylist()
    return rows


def _holds_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_holds_map(kind.field(at).type) for at in range(kind.num_fields))


def plain_value(value: Any) -> Any:
    """A value that JSON does not know, as text: times in ISO 8601, bytes in base64, decimals in full."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _csv_value(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str | int | float) else plain_value(value)
