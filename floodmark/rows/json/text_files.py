"""Rows to one file: JSON lines, CSV, Parquet or Arrow, streaming; the file appears whole or not at all.

A written file can be loaded again (but not Arrow's) and gives the same rows: what a format cannot hold is Invalid,
never approximated. The one exception is CSV, where most readers do not distinguish null from empty text: null is
written as nothing, empty text as two quotes. JSON is strict: a number that JSON does not have (NaN, Infinity) is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from floodmark.errors import Invalid
from floodmark.model import Value
from floodmark.rows.json.ndjson import dicts, encode_text, holds, json_value, plain_text
from floodmark.storage import Storage
from floodmark.storage.streams import OutputStream

__all__ = ["FORMATS", "dicts", "format_for", "json_value", "write_file", "write_text"]

# What must be quoted in CSV: separators, quotes, empty text, and text with blanks at an end.
_QUOTED = re.compile(r'[",\r\n]|^$|^\s|\s$')
FORMATS = {"jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "csv": "csv", "parquet": "parquet"}
# What `load` does not read.
ONLY_WRITTEN = {"arrow": "arrow"}


def format_for(path: str, wanted: str | None, *, loadable: bool = True) -> str:
    """The format of a file to be written: as given, or by its name. `loadable`: one that `load` can read."""
    known = FORMATS if loadable else FORMATS | ONLY_WRITTEN
    found = known.get((wanted or path.rpartition(".")[2]).lower())
    if found is None:
        names = list(dict.fromkeys(known.values()))
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        raise Invalid(
            "the file's format is not known",
            path=path,
            format=wanted,
            advice=f"Use {listed}."
            if wanted
            else f"Name it .{listed.replace(', ', ', .').replace('or ', 'or .')}, or give --format.",
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
    _check_held(reader.schema, file_format)
    with storage.writer(location) as stream:
        return _write(stream, reader.schema, reader, file_format, progress)


def write_text(stream: BinaryIO, schema: pa.Schema, batches: Iterable[pa.RecordBatch], file_format: str) -> int:
    """Write all rows as JSON lines or CSV to an open stream; returns how many."""
    _check_held(schema, file_format)
    return _write(stream, schema, batches, file_format, None)


def _check_held(schema: pa.Schema, file_format: str) -> None:
    for field in schema:
        if not _held(field.type, file_format):
            advice = "Write Parquet, which holds everything."
            raise Invalid(f"{file_format} cannot hold this column", column=field.name, type=field.type, advice=advice)


def _write(
    stream: Sink,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    file_format: str,
    progress: Callable[[int], None] | None,
) -> int:
    writers = {"jsonl": _jsonl, "csv": _csv, "parquet": _parquet, "arrow": _arrow}
    rows = 0
    with writers[file_format](stream, schema) as write:
        for batch in batches:
            write(batch)
            rows += len(batch)
            if progress is not None:
                progress(rows)
    return rows


def _held(kind: pa.DataType, file_format: str) -> bool:
    """CSV has plain values only, and no agreed text for bytes."""
    if file_format == "csv":
        return not pa.types.is_nested(kind) and not pa.types.is_binary(kind) and not pa.types.is_large_binary(kind)
    return file_format != "jsonl" or holds(kind)


Write = Callable[[pa.RecordBatch], None]
Sink: TypeAlias = "OutputStream | BinaryIO"


@contextmanager
def _jsonl(stream: Sink, schema: pa.Schema) -> Iterator[Write]:
    def write(batch: pa.RecordBatch) -> None:
        stream.write(encode_text(batch))

    yield write


@contextmanager
def _csv(stream: Sink, schema: pa.Schema) -> Iterator[Write]:
    def write(batch: pa.RecordBatch) -> None:
        stream.write("".join(_csv_line(row.values()) for row in dicts(batch)).encode())

    stream.write(_csv_line(schema.names).encode())
    yield write


@contextmanager
def _parquet(stream: Sink, schema: pa.Schema) -> Iterator[Write]:
    with pq.ParquetWriter(stream, schema, compression="zstd") as writer:
        yield writer.write_batch


@contextmanager
def _arrow(stream: Sink, schema: pa.Schema) -> Iterator[Write]:
    with pa.ipc.new_file(stream, schema) as writer:
        yield writer.write_batch


def _csv_line(values: Iterable[Value]) -> str:
    # Readers would take an empty line for no row.
    return (",".join(_csv_text(value) for value in values) or '""') + "\n"


def _csv_text(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value if isinstance(value, str | int) else plain_text(value))
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text
