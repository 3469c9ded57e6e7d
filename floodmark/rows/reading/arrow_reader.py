"""The rows of a table's data files read with Arrow: all of them, or those that match; with or without their sequences.

One reader for the caller's process and for Spark tasks, so that both give the same rows. A row's sequence is its own
`_seq` where it has one, else its file's. Rows come batch by batch: memory does not grow with files or their size. Row
groups that hold no wanted row, by their statistics, are not read. A file of the list that is missing or damaged is an
error, never fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.model import SEQ_COLUMN
from floodmark.rows.arrays import Numbers
from floodmark.rows.project import GroupTest, holding, read_numbered, read_schema
from floodmark.rows.schema import user_fields
from floodmark.storage import Storage

if TYPE_CHECKING:
    from floodmark.commit.live_files import LiveFile
    from floodmark.rows.sql.where import Where

# Sequences from the first, exclusive, to the second, inclusive.
Between = tuple[int, int]


@dataclass(frozen=True)
class RowsWanted:
    """What a read wants of each file: which columns, in this order (None: all), and which rows.

    `where` is a plain condition: Arrow evaluates it. Of another one only what it certainly implies is used, to leave
    out row groups: then the caller selects the rows.
    """

    columns: tuple[str, ...] | None = None
    with_seq: bool = False
    where: Where | None = None
    between: Between | None = None


def arrow_read_schema(schema: Schema, with_seq: bool, columns: Sequence[str] | None = None) -> pa.Schema:
    """What a read yields: the table's columns or these of them, all nullable, and `_seq` last if it was asked for."""
    found = read_schema(_fields(schema, columns))
    return found.append(pa.field(SEQ_COLUMN, pa.int64())) if with_seq else found


def arrow_batches(
    storage: Storage, files: Iterable[LiveFile], schema: Schema, with_seq: bool, between: Between | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of these files; with `between`, only those whose sequence is in that range."""
    wanted = RowsWanted(with_seq=with_seq, between=between)
    for file in files:
        yield from read_wanted(storage, file.path, schema, wanted, file.sequence, size_bytes=file.size_bytes)


def read_rows(
    storage: Storage,
    location: str,
    schema: Schema,
    with_seq: bool,
    sequence: int | None = None,
    between: Between | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of one file whose data sequence number is `sequence`; without one, `_seq` is as the file has it."""
    return read_wanted(storage, location, schema, RowsWanted(with_seq=with_seq, between=between), sequence)


def read_wanted(
    storage: Storage,
    location: str,
    schema: Schema,
    wanted: RowsWanted,
    sequence: int | None = None,
    positions: Numbers | None = None,
    *,
    size_bytes: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """The wanted rows of one file; with `positions`, ascending ones, only of those there."""
    target = arrow_read_schema(schema, wanted.with_seq, wanted.columns)
    fields = read_fields(schema, wanted)
    where = wanted.where if wanted.where is not None and wanted.where.plain else None
    places = {field.name: place for place, field in enumerate(fields)}
    own = places.get(SEQ_COLUMN)
    shown = [places[name] for name in target.names if name != SEQ_COLUMN]
    tests = group_tests(schema, wanted) + ([] if positions is None else [holding(positions)])
    for start, batch in read_numbered(storage, location, fields, tests=tests, size_bytes=size_bytes):
        if positions is not None:
            first, last = np.searchsorted(positions, [start, start + len(batch)])
            batch = batch.take(pa.array(positions[first:last] - start))
        columns = [batch.column(place) for place in shown]
        mask = None if where is None else where.mask(batch)
        if wanted.with_seq or wanted.between is not None:
            seq = _sequences(None if own is None else batch.column(own), sequence, len(batch))
            columns += [seq] if wanted.with_seq else []
            if wanted.between is not None:
                inside = pc.and_(pc.greater(seq, wanted.between[0]), pc.less_equal(seq, wanted.between[1]))
                mask = inside if mask is None else pc.and_(mask, inside)
        found = pa.RecordBatch.from_arrays(columns, schema=target)
        found = found if mask is None else found.filter(mask)
        if len(found):
            yield found


def read_fields(schema: Schema, wanted: RowsWanted) -> list[NestedField]:
    """The table's columns that such a read takes from a file: those that it shows, or decides by."""
    fields = _fields(schema, wanted.columns)
    if wanted.where is not None and wanted.where.plain:
        fields += [field for field in wanted.where.fields if field.field_id not in {one.field_id for one in fields}]
    if wanted.with_seq or wanted.between is not None:
        fields += [field for field in schema.fields if field.name == SEQ_COLUMN]
    return fields


def group_tests(schema: Schema, wanted: RowsWanted) -> list[GroupTest]:
    """What shows that a row group holds no wanted row."""
    tests: list[GroupTest] = [] if wanted.where is None else [wanted.where.group_test]
    own = next((field.field_id for field in schema.fields if field.name == SEQ_COLUMN), None)
    if wanted.between is not None and own is not None:
        tests.append(partial(_reaches, own, wanted.between))
    return tests


def _reaches(own: int, between: Between, metadata: pq.FileMetaData, names: Mapping[int, str]) -> Sequence[bool]:
    """The row groups that may hold a row of this range. A row without a `_seq` has its file's: that may be in it."""
    paths = [metadata.schema.column(place).path for place in range(len(metadata.schema))]
    if names.get(own) not in paths:
        return [True] * metadata.num_row_groups
    place = paths.index(names[own])
    found = []
    for number in range(metadata.num_row_groups):
        one = metadata.row_group(number).column(place).statistics
        known = one is not None and one.has_min_max and one.has_null_count and one.null_count == 0
        found.append(not known or (one.max > between[0] and one.min <= between[1]))
    return found


def _fields(schema: Schema, columns: Sequence[str] | None) -> list[NestedField]:
    fields = user_fields(schema)
    if columns is None:
        return fields
    by_name = {field.name: field for field in fields}
    return [by_name[name] for name in columns]


def _sequences(own: pa.Array | None, sequence: int | None, rows: int) -> pa.Array:
    if sequence is None:
        return pa.nulls(rows, pa.int64()) if own is None else own
    inherited = pa.scalar(sequence, pa.int64())
    if own is None or own.null_count == rows:
        return pa.repeat(inherited, rows)
    return own.fill_null(inherited) if own.null_count else own
