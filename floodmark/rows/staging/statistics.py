"""A data file's record from the footer its writer just wrote: counts, sizes and bounds, without reading it again.

Bounds prune files, so a wrong one loses rows. They are taken from the raw Parquet statistics and left out whenever one
row group has values but no minimum and maximum (Arrow drops them for long values). A bound is never NaN. NaNs are
counted by the writer: an evaluator that finds no count may take a column of floats for one without NaN.
Fields inside lists and maps have sizes and value counts only.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types
from pyiceberg.conversions import to_bytes
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    PrimitiveType,
    StringType,
    StructType,
)
from pyiceberg.utils.decimal import decimal_to_bytes, unscaled_to_decimal

from floodmark.model import FileRecord
from floodmark.rows.column_chunks import chunk_start
from floodmark.rows.convert import table_shape
from floodmark.rows.staging.partition import PartitionKey

# A value as Parquet's statistics and bounds have it.
Bound = bool | int | float | str | bytes

BOUND_LENGTH_MAX = 16
SPLIT_BYTES = 64 * 1024 * 1024
_SURROGATES = range(0xD800, 0xE000)
_CODE_POINT_MAX = 0x10FFFF


@dataclass(frozen=True)
class Leaf:
    """One Parquet column and its field in the table's schema."""

    field_id: int
    kind: PrimitiveType
    repeated: bool


@lru_cache(maxsize=256)
def leaves(schema_json: str, settled: bool = False) -> tuple[Leaf, ...]:
    """The Parquet columns of a data file, fresh or settled, in file order."""
    return tuple(leaf for field in table_shape(schema_json, settled).fields for leaf in field_leaves(field))


def field_leaves(field: NestedField, repeated: bool = False) -> Iterator[Leaf]:
    """The Parquet columns of one field, in file order."""
    kind: IcebergType = field.field_type
    if isinstance(kind, StructType):
        for child in kind.fields:
            yield from field_leaves(child, repeated)
    elif isinstance(kind, ListType):
        yield from field_leaves(kind.element_field, True)
    elif isinstance(kind, MapType):
        yield from field_leaves(kind.key_field, True)
        yield from field_leaves(kind.value_field, True)
    elif isinstance(kind, PrimitiveType):
        yield Leaf(field.field_id, kind, repeated)


def file_record(
    path: str,
    metadata: pq.FileMetaData,
    size_bytes: int,
    columns: tuple[Leaf, ...],
    *,
    partition: PartitionKey = (),
    nan_counts: Mapping[int, int] | None = None,
) -> FileRecord:
    """The record of a file whose Parquet columns are `columns`."""
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    record = FileRecord(
        path=path,
        rows=metadata.num_rows,
        size_bytes=size_bytes,
        partition=partition,
        nan_counts=dict(nan_counts or {}),
        split_offsets=split_offsets(sorted(chunk_start(group.column(0)) for group in groups)),
    )
    for position, leaf in enumerate(columns):
        chunks = [group.column(position) for group in groups]
        record.column_sizes[leaf.field_id] = sum(chunk.total_compressed_size for chunk in chunks)
        record.value_counts[leaf.field_id] = sum(chunk.num_values for chunk in chunks)
        if leaf.repeated:
            continue
        statistics = [chunk.statistics for chunk in chunks if chunk.is_stats_set and chunk.statistics.has_null_count]
        if len(statistics) == len(chunks):
            record.null_counts[leaf.field_id] = sum(found.null_count for found in statistics)
            _add_bounds(record, leaf, chunks, statistics)
    return record


def split_offsets(starts: Sequence[int]) -> tuple[int, ...]:
    """Where engines may split the file: starts of row groups that are far enough apart to be worth a task."""
    chosen: list[int] = []
    for start in starts:
        if not chosen or start - chosen[-1] >= SPLIT_BYTES:
            chosen.append(start)
    return tuple(chosen)


def _add_bounds(
    record: FileRecord, leaf: Leaf, chunks: list[pq.ColumnChunkMetaData], statistics: list[pq.Statistics]
) -> None:
    lows: list[Bound] = []
    highs: list[Bound] = []
    floats = isinstance(leaf.kind, FloatType | DoubleType)
    for chunk, found in zip(chunks, statistics, strict=True):
        if found.has_min_max:
            lows.append(_value(leaf.kind, found.min_raw))
            highs.append(_value(leaf.kind, found.max_raw))
        elif found.null_count < chunk.num_values and not floats:
            return  # values without bounds; only for floats that means that all of them are NaN
    if not lows or (floats and any(isinstance(value, float) and isnan(value) for value in lows + highs)):
        return
    low, high = min(lows), max(highs)
    lower = low[:BOUND_LENGTH_MAX] if isinstance(low, str | bytes) else low
    upper = truncate_upper(high)
    record.lower_bounds[leaf.field_id] = _encode(leaf.kind, lower)
    if upper is not None:
        record.upper_bounds[leaf.field_id] = _encode(leaf.kind, upper)


def _value(kind: PrimitiveType, raw: Bound) -> Bound:
    """A value that compares the way Iceberg orders the type, from Parquet's raw statistics."""
    if isinstance(kind, DecimalType):
        return int.from_bytes(raw, "big", signed=True) if isinstance(raw, bytes) else int(raw)
    if isinstance(kind, StringType):
        return raw.decode() if isinstance(raw, bytes) else raw
    return raw


def _encode(kind: PrimitiveType, value: Bound) -> str:
    if isinstance(kind, DecimalType) and isinstance(value, int):
        raw = decimal_to_bytes(unscaled_to_decimal(value, kind.scale))
    else:
        raw = to_bytes(kind, value)
    return base64.b64encode(raw).decode("ascii")


def truncate_upper(value: Bound) -> Bound | None:
    """A short value that is not below the given one, if that is text or bytes; None if there is none."""
    if not isinstance(value, str | bytes) or len(value) <= BOUND_LENGTH_MAX:
        return value
    if isinstance(value, bytes):
        kept = value[:BOUND_LENGTH_MAX].rstrip(b"\xff")
        return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
    text = value[:BOUND_LENGTH_MAX].rstrip(chr(_CODE_POINT_MAX))
    if not text:
        return None
    following = ord(text[-1]) + 1
    # Half of a surrogate pair is no character: the next one after them is.
    return text[:-1] + chr(_SURROGATES.stop if following in _SURROGATES else following)


def count_nans(table: pa.Table, columns: tuple[NestedField, ...], counts: dict[int, int]) -> None:
    """Add the NaNs of the table's float columns, also those inside structs, to `counts`."""
    for position, field in enumerate(columns):
        _count_nans(table.column(position), field, counts)


def _count_nans(values: pa.ChunkedArray | pa.Array, field: NestedField, counts: dict[int, int]) -> None:
    if types.is_floating(values.type):
        found = pc.sum(pc.is_nan(values), min_count=0).as_py()
        counts[field.field_id] = counts.get(field.field_id, 0) + int(found or 0)
    elif isinstance(field.field_type, StructType):
        for child, array in zip(field.field_type.fields, values.flatten(), strict=True):
            _count_nans(array, child, counts)
