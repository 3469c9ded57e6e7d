"""The rows of a table's data files read with Arrow, with or without their sequences.

One reader for the caller's process and for Spark tasks, so that both give the same rows. A row's sequence is its own
`_seq` where it has one, else its file's. Rows come batch by batch: memory does not grow with files or their size. A
file of the list that is missing or damaged is an error, never fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema

from floodmark.model import SEQ_COLUMN
from floodmark.rows.project import read_file, read_schema
from floodmark.rows.schema import user_fields
from floodmark.storage import Storage

if TYPE_CHECKING:
    from floodmark.commit.live_files import LiveFile

# Sequences from the first, exclusive, to the second, inclusive.
Between = tuple[int, int]


def arrow_read_schema(schema: Schema, with_seq: bool) -> pa.Schema:
    """What `arrow_batches` yields: the table's columns, all nullable, and `_seq` last if it was asked for."""
    columns = read_schema(user_fields(schema))
    return columns.append(pa.field(SEQ_COLUMN, pa.int64())) if with_seq else columns


def arrow_batches(
    storage: Storage, files: Iterable[LiveFile], schema: Schema, with_seq: bool, between: Between | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of these files; with `between`, only those whose sequence is in that range."""
    for file in files:
        yield from read_rows(storage, file.path, schema, with_seq, file.sequence, between)


def read_rows(
    storage: Storage,
    location: str,
    schema: Schema,
    with_seq: bool,
    sequence: int | None = None,
    between: Between | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of one file whose data sequence number is `sequence`; without one, `_seq` is as the file has it."""
    fields = user_fields(schema)
    if not with_seq and between is None:
        yield from read_file(storage, location, fields)
        return
    target = arrow_read_schema(schema, with_seq)
    own = [field for field in schema.fields if field.name == SEQ_COLUMN]
    for batch in read_file(storage, location, [*fields, *own]):
        seq = _sequences(batch.column(len(fields)) if own else None, sequence, len(batch))
        columns = [*batch.columns[: len(fields)], *([seq] if with_seq else [])]
        found = pa.RecordBatch.from_arrays(columns, schema=target)
        if between is not None:
            found = found.filter(pc.and_(pc.greater(seq, between[0]), pc.less_equal(seq, between[1])))
        if len(found):
            yield found


def _sequences(own: pa.Array | None, sequence: int | None, rows: int) -> pa.Array:
    if sequence is None:
        return pa.nulls(rows, pa.int64()) if own is None else own
    inherited = pa.scalar(sequence, pa.int64())
    if own is None or own.null_count == rows:
        return pa.repeat(inherited, rows)
    return own.fill_null(inherited) if own.null_count else own
