"""Data files read with Arrow, their columns matched by field id: the table's schema now, whatever it was then.

A column that the file does not have is null; a narrower type is widened; order and names in the file do not matter.
Structs, lists and maps are matched inside in the same way. Row groups without a wanted row are not read; which these
are, the caller tests by the footer. Such a test leaves out only what is proven: the wanted rows are still selected from
what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types
from pyiceberg.types import ListType, MapType, NestedField, StructType

from floodmark.errors import Corrupt, NotFound
from floodmark.rows.arrays import Numbers, list_of, map_of, map_parts, struct_of
from floodmark.rows.column_chunks import prefetch
from floodmark.rows.schema import FIELD_ID, arrow_type
from floodmark.storage import Storage
from floodmark.storage.streams import RangeReader

# Which row groups of a file may hold a wanted row, by its footer and the names of its columns by field id.
GroupTest: TypeAlias = Callable[[pq.FileMetaData, Mapping[int, str]], Sequence[bool]]

READ_BATCH_ROWS = 65536
# Rows may be large: after the first row group a batch has as many as fit into this.
READ_BATCH_BYTES = 32 * 1024 * 1024
_FIRST_BATCH_ROWS = 4096
# Of one file about so much is fetched at once, and in memory until it is read.
RUN_BYTES = 16 * 1024 * 1024
# Columns of less are decoded in the caller's thread: handing them to others takes longer than decoding them.
_THREADS_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Groups:
    """What a read opens of one file: row groups, of how many, and the bytes of its columns in them."""

    kept: int
    all: int
    size_bytes: int


def nullable_type(kind: pa.DataType) -> pa.DataType:
    """The same type with every field in it nullable: files of any age may have nulls."""
    if types.is_struct(kind):
        return pa.struct([_nullable(field) for field in kind])
    if types.is_list(kind):
        return pa.list_(_nullable(kind.value_field))
    if types.is_map(kind):
        return pa.map_(nullable_type(kind.key_type), _nullable(kind.item_field))
    return kind


def _nullable(field: pa.Field) -> pa.Field:
    return pa.field(field.name, nullable_type(field.type))


def read_schema(fields: Sequence[NestedField]) -> pa.Schema:
    return pa.schema([pa.field(field.name, nullable_type(arrow_type(field.field_type))) for field in fields])


def read_file(
    storage: Storage,
    location: str,
    fields: Sequence[NestedField],
    batch_rows: int = READ_BATCH_ROWS,
    tests: Sequence[GroupTest] = (),
) -> Iterator[pa.RecordBatch]:
    """The rows of one data file, with these columns of its table; row groups that fail a test are left out."""
    return (batch for _, batch in read_numbered(storage, location, fields, batch_rows, tests))


def read_numbered(
    storage: Storage,
    location: str,
    fields: Sequence[NestedField],
    batch_rows: int = READ_BATCH_ROWS,
    tests: Sequence[GroupTest] = (),
    size_bytes: int | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The same with the position in the file of each batch's first row. A file of another size is `Corrupt`."""
    with damaged(location):
        yield from _read_whole(storage, location, fields, batch_rows, tests, size_bytes)


def holding(positions: Numbers) -> GroupTest:
    """The row groups that hold one of these ascending positions."""

    def test(metadata: pq.FileMetaData, _: Mapping[int, str]) -> Sequence[bool]:
        ends = np.cumsum([metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)])
        before = np.searchsorted(positions, ends)
        return [bool(count) for count in np.diff(before, prepend=0)]

    return test


def kept_groups(
    storage: Storage,
    location: str,
    fields: Sequence[NestedField],
    tests: Sequence[GroupTest],
    size_bytes: int | None = None,
) -> Groups:
    """What a read of these columns with these tests opens of a file, from its footer."""
    with (
        damaged(location),
        opened(storage, location, size_bytes) as stream,
        pq.ParquetFile(stream, pre_buffer=False) as parquet,
    ):
        names = _names(parquet.schema_arrow)
        kept = [number for number, keep in enumerate(_tested(parquet.metadata, names, tests)) if keep]
        wanted = {names[field.field_id] for field in fields if field.field_id in names}
        size = sum(
            chunk.total_compressed_size
            for number in kept
            for chunk in map(parquet.metadata.row_group(number).column, range(parquet.metadata.num_columns))
            if chunk.path_in_schema in wanted or chunk.path_in_schema.partition(".")[0] in wanted
        )
        return Groups(len(kept), parquet.metadata.num_row_groups, size)


def take_rows(storage: Storage, location: str, fields: Sequence[NestedField], positions: Numbers) -> pa.Table:
    """The rows at these ascending positions; row groups without one are not read."""
    parts = [pa.RecordBatch.from_pylist([], schema=read_schema(fields))]
    for start, batch in read_numbered(storage, location, fields, tests=[holding(positions)]):
        first, last = np.searchsorted(positions, [start, start + len(batch)])
        if last > first:
            parts.append(batch.take(pa.array(positions[first:last] - start)))
    return pa.Table.from_batches(parts)


def held_fields(storage: Storage, location: str) -> frozenset[int]:
    """The field ids of the file's columns, from its footer."""
    with damaged(location), opened(storage, location) as stream, pq.ParquetFile(stream, pre_buffer=False) as parquet:
        return frozenset(by_id(parquet.schema_arrow))


def row_bytes(storage: Storage, location: str, fields: Sequence[NestedField]) -> int:
    """About how much memory a row of the file takes."""
    first = next(read_file(storage, location, fields, batch_rows=1024), None)
    return 1 if first is None or not len(first) else max(1, first.nbytes // len(first))


def _read_whole(
    storage: Storage,
    location: str,
    fields: Sequence[NestedField],
    batch_rows: int,
    tests: Sequence[GroupTest],
    size_bytes: int | None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    target = read_schema(fields)
    with (
        opened(storage, location, size_bytes) as stream,
        # Pages that have a checksum are compared with it: corrupted bytes must not be read as rows. Arrow buffers
        # nothing: its threads would call this stream also while the interpreter ends, which aborts the process.
        pq.ParquetFile(stream, pre_buffer=False, page_checksum_verification=True) as parquet,
    ):
        sources = by_id(parquet.schema_arrow)
        if len(sources) < len(parquet.schema_arrow):
            raise Corrupt("a data file has columns without a field id", file=location)
        wanted = [sources[field.field_id].name for field in fields if field.field_id in sources]
        # A dot would be read as a path into a struct: then every column is read.
        columns = wanted if not any("." in name for name in parquet.schema_arrow.names) else None
        kept = _tested(parquet.metadata, _names(parquet.schema_arrow), tests)
        for start, batch in _batches(stream, parquet, columns, batch_rows, kept):
            arrays = []
            for field, goal in zip(fields, target, strict=True):
                source = sources.get(field.field_id)
                array = None if source is None else batch.column(batch.schema.get_field_index(source.name))
                arrays.append(project(array, source, field, goal.type, len(batch)))
            yield start, pa.RecordBatch.from_arrays(arrays, schema=target)


@contextmanager
def damaged(location: str) -> Iterator[None]:
    """Around everything that reads a data file: what cannot be read is `Corrupt`, and names the file."""
    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt(
            "a data file cannot be read", file=location, cause=error, advice="Run `floodmark doctor`; restore the file."
        ) from error


@contextmanager
def opened(storage: Storage, location: str, size_bytes: int | None = None) -> Iterator[RangeReader]:
    try:
        stream = storage.open_input(location, size_bytes)
    except NotFound as error:
        raise Corrupt("a data file is gone", file=location, advice="Run `floodmark doctor`; restore it.") from error
    with stream:
        yield stream


def _batches(
    stream: RangeReader, parquet: pq.ParquetFile, columns: list[str] | None, rows_max: int, kept: Sequence[bool]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of at most so many rows, and about so many bytes: earlier rows show how much memory a row takes.

    Row groups that follow each other are read together: a batch may hold rows of several.
    """
    rows = min(rows_max, _FIRST_BATCH_ROWS)
    ends = np.cumsum([parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)])
    for groups in _runs(parquet.metadata, kept):
        size_bytes = sum(parquet.metadata.row_group(number).total_byte_size for number in groups)
        start = int(ends[groups[0]]) - parquet.metadata.row_group(groups[0]).num_rows
        prefetch(stream, parquet.metadata, groups, columns)
        row_bytes = 1
        for batch in parquet.iter_batches(
            batch_size=rows, row_groups=groups, columns=columns, use_threads=size_bytes >= _THREADS_BYTES
        ):
            row_bytes = max(row_bytes, batch.nbytes // max(1, len(batch)))
            yield start, batch
            start += len(batch)
            rows = max(1, min(rows_max, READ_BATCH_BYTES // row_bytes))
            # From the next batch on: small files have one group only.
            parquet.reader.set_batch_size(rows)


def _runs(metadata: pq.FileMetaData, kept: Sequence[bool]) -> Iterator[list[int]]:
    """The kept row groups that follow each other, as many as have a bounded size: Arrow holds a run whole (I14)."""
    run: list[int] = []
    size_bytes = 0
    for number in range(metadata.num_row_groups):
        if run and (size_bytes >= RUN_BYTES or not kept[number]):
            yield run
            run, size_bytes = [], 0
        if kept[number]:
            run.append(number)
            size_bytes += metadata.row_group(number).total_byte_size
    if run:
        yield run


def _tested(metadata: pq.FileMetaData, names: Mapping[int, str], tests: Sequence[GroupTest]) -> list[bool]:
    answers = [test(metadata, names) for test in tests]
    return [all(answer[number] for answer in answers) for number in range(metadata.num_row_groups)]


def _names(schema: pa.Schema) -> dict[int, str]:
    return {field_id: field.name for field_id, field in by_id(schema).items()}


def by_id(fields: Iterable[pa.Field]) -> dict[int, pa.Field]:
    """The fields of a file, or of a struct in it, by their field ids."""
    found = {}
    for field in fields:
        if field.metadata and FIELD_ID in field.metadata:
            found[int(field.metadata[FIELD_ID])] = field
    return found


def project(
    array: pa.Array | None, source: pa.Field | None, field: NestedField, goal: pa.DataType, rows: int
) -> pa.Array:
    """A file's column as the table has it now; nulls if the file lacks it."""
    if array is None or source is None:
        return pa.nulls(rows, goal)
    kind = field.field_type
    if isinstance(kind, StructType):
        # Without parents' nulls, which the struct keeps itself.
        sources = by_id(source.type)
        children = []
        for at, child in enumerate(kind.fields):
            found = sources.get(child.field_id)
            part = None if found is None else array.field(source.type.get_field_index(found.name))
            children.append(project(part, found, child, goal.field(at).type, len(array)))
        return struct_of(array, children, goal)
    if isinstance(kind, ListType):
        values = array.flatten()
        element = project(values, source.type.value_field, kind.element_field, goal.value_type, len(values))
        return list_of(array, element, goal)
    if isinstance(kind, MapType):
        keys, items = map_parts(array)
        keys = project(keys, source.type.key_field, kind.key_field, goal.key_type, len(keys))
        items = project(items, source.type.item_field, kind.value_field, goal.item_type, len(items))
        return map_of(array, keys, items, goal)
    return array if array.type.equals(goal) else array.cast(goal)
