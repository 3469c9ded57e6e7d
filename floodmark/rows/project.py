"""Data files read with Arrow, their columns matched by field id: the table's schema now, whatever it was then.

A column that the file does not have is null; a narrower type is widened; order and names in the file do not matter.
Structs, lists and maps are matched inside in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types
from pyiceberg.types import ListType, MapType, NestedField, StructType

from floodmark.errors import Corrupt, NotFound
from floodmark.rows.arrays import Numbers, list_of, map_of, map_parts, struct_of
from floodmark.rows.schema import FIELD_ID, arrow_type
from floodmark.storage import Storage
from floodmark.storage.streams import RangeReader

READ_BATCH_ROWS = 65536
# Rows may be large: after the first row group a batch has as many as fit into this.
READ_BATCH_BYTES = 32 * 1024 * 1024
_FIRST_BATCH_ROWS = 4096


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
    storage: Storage, location: str, fields: Sequence[NestedField], batch_rows: int = READ_BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The rows of one data file, with these columns of its table."""
    return (batch for _, batch in _read(storage, location, fields, batch_rows))


def take_rows(storage: Storage, location: str, fields: Sequence[NestedField], positions: Numbers) -> pa.Table:
    """The rows at these ascending positions; row groups without one are not read."""
    parts = [pa.RecordBatch.from_pylist([], schema=read_schema(fields))]
    for start, batch in _read(storage, location, fields, READ_BATCH_ROWS, positions):
        first, last = np.searchsorted(positions, [start, start + len(batch)])
        if last > first:
            parts.append(batch.take(pa.array(positions[first:last] - start)))
    return pa.Table.from_batches(parts)


def held_fields(storage: Storage, location: str) -> frozenset[int]:
    """The field ids of the file's columns, from its footer."""
    try:
        with _opened(storage, location) as stream, pq.ParquetFile(stream) as parquet:
            return frozenset(_by_id(parquet.schema_arrow))
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt("a data file cannot be read", file=location, cause=error) from error


def row_bytes(storage: Storage, location: str, fields: Sequence[NestedField]) -> int:
    """About how much memory a row of the file takes."""
    first = next(read_file(storage, location, fields, batch_rows=1024), None)
    return 1 if first is None or not len(first) else max(1, first.nbytes // len(first))


def _read(
    storage: Storage,
    location: str,
    fields: Sequence[NestedField],
    batch_rows: int,
    positions: Numbers | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    try:
        yield from _read_whole(storage, location, fields, batch_rows, positions)
    except (pa.ArrowInvalid, OSError) as error:
        raise Corrupt(
            "a data file cannot be read", file=location, cause=error, advice="Run `floodmark doctor`; restore the file."
        ) from error


def _read_whole(
    storage: Storage,
    location: str,
    fields: Sequence[NestedField],
    batch_rows: int,
    positions: Numbers | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches with the position of their first row."""
    target = read_schema(fields)
    with (
        _opened(storage, location) as stream,
        # Pages that have a checksum are compared with it: corrupted bytes must not be read as rows.
        pq.ParquetFile(stream, page_checksum_verification=True) as parquet,
    ):
        sources = _by_id(parquet.schema_arrow)
        if len(sources) < len(parquet.schema_arrow):
            raise Corrupt("a data file has columns without a field id", file=location)
        wanted = [sources[field.field_id].name for field in fields if field.field_id in sources]
        # A dot would be read as a path into a struct: then every column is read.
        columns = wanted if not any("." in name for name in parquet.schema_arrow.names) else None
        for start, batch in _batches(parquet, columns, batch_rows, positions):
            arrays = []
            for field, goal in zip(fields, target, strict=True):
                source = sources.get(field.field_id)
                array = None if source is None else batch.column(batch.schema.get_field_index(source.name))
                arrays.append(_project(array, source, field, goal.type, len(batch)))
            yield start, pa.RecordBatch.from_arrays(arrays, schema=target)


@contextmanager
def _opened(storage: Storage, location: str) -> Iterator[RangeReader]:
    try:
        stream = storage.open_input(location)
    except NotFound as error:
        raise Corrupt("a data file is gone", file=location, advice="Run `floodmark doctor`; restore it.") from error
    with stream:
        yield stream


def _batches(
    parquet: pq.ParquetFile, columns: list[str] | None, rows_max: int, positions: Numbers | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of at most so many rows, and about so many bytes: earlier rows show how much memory a row takes."""
    rows = min(rows_max, _FIRST_BATCH_ROWS)
    start = 0
    for group in range(parquet.num_row_groups):
        end = start + parquet.metadata.row_group(group).num_rows
        if positions is not None and np.searchsorted(positions, start) == np.searchsorted(positions, end):
            start = end
            continue
        row_bytes = 1
        for batch in parquet.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
            row_bytes = max(row_bytes, batch.nbytes // max(1, len(batch)))
            yield start, batch
            start += len(batch)
            rows = max(1, min(rows_max, READ_BATCH_BYTES // row_bytes))
            # From the next batch of this group on: small files have one group only.
            parquet.reader.set_batch_size(rows)


def _by_id(fields: Iterable[pa.Field]) -> dict[int, pa.Field]:
    found = {}
    for field in fields:
        if field.metadata and FIELD_ID in field.metadata:
            found[int(field.metadata[FIELD_ID])] = field
    return found


def _project(
    array: pa.Array | None, source: pa.Field | None, field: NestedField, goal: pa.DataType, rows: int
) -> pa.Array:
    if array is None or source is None:
        return pa.nulls(rows, goal)
    kind = field.field_type
    if isinstance(kind, StructType):
        # Without parents' nulls, which the struct keeps itself.
        by_id = _by_id(source.type)
        children = []
        for at, child in enumerate(kind.fields):
            found = by_id.get(child.field_id)
            part = None if found is None else array.field(source.type.get_field_index(found.name))
            children.append(_project(part, found, child, goal.field(at).type, len(array)))
        return struct_of(array, children, goal)
    if isinstance(kind, ListType):
        values = array.flatten()
        element = _project(values, source.type.value_field, kind.element_field, goal.value_type, len(values))
        return list_of(array, element, goal)
    if isinstance(kind, MapType):
        keys, items = map_parts(array)
        keys = _project(keys, source.type.key_field, kind.key_field, goal.key_type, len(keys))
        items = _project(items, source.type.item_field, kind.value_field, goal.item_type, len(items))
        return map_of(array, keys, items, goal)
    return array if array.type.equals(goal) else array.cast(goal)
