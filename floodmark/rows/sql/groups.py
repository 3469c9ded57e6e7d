"""The statistics of a Parquet file's row groups, in the form in which Iceberg keeps those of whole files.

So one test of statistics serves files and their row groups. What is not certain is left out, and proves nothing: a
statistic of another type or unit, a column whose name cannot be told from a path. A column that the file does not have
is null in every row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.manifest import DataFile
from pyiceberg.types import (
    BooleanType,
    DateType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

# The physical types of the values that can be compared, and the logical types that give them that meaning.
_PHYSICAL: dict[type[IcebergType], tuple[str, ...]] = {
    BooleanType: ("BOOLEAN",),
    IntegerType: ("INT32",),
    LongType: ("INT32", "INT64"),
    DateType: ("INT32",),
    StringType: ("BYTE_ARRAY",),
    TimestampType: ("INT64",),
    TimestamptzType: ("INT64",),
}


def group_statistics(
    metadata: pq.FileMetaData, names: Mapping[int, str], fields: Sequence[NestedField]
) -> Iterator[DataFile]:
    """What is known of these columns in each row group; `names` are the file's, by field id."""
    places = {metadata.schema.column(place).path: place for place in range(len(metadata.schema))}
    absent = [field.field_id for field in fields if field.field_id not in names]
    found = [
        (
            field,
            places[names[field.field_id]],
            _is_comparable(metadata.schema.column(places[names[field.field_id]]), field),
        )
        for field in fields
        if names.get(field.field_id) in places and "." not in names[field.field_id]
    ]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        counts, nulls = dict.fromkeys(absent, group.num_rows), dict.fromkeys(absent, group.num_rows)
        lows: dict[int, bytes] = {}
        highs: dict[int, bytes] = {}
        for field, place, comparable in found:
            statistics = group.column(place).statistics
            if statistics is None:
                continue
            if statistics.has_null_count:
                counts[field.field_id], nulls[field.field_id] = group.num_rows, statistics.null_count
            if comparable and statistics.has_min_max:
                lows[field.field_id] = _as_bytes(field, statistics.min_raw)
                highs[field.field_id] = _as_bytes(field, statistics.max_raw)
        yield DataFile.from_args(
            record_count=group.num_rows,
            value_counts=counts,
            null_value_counts=nulls,
            lower_bounds=lows,
            upper_bounds=highs,
        )


def _is_comparable(column: pq.ColumnSchema, field: NestedField) -> bool:
    """Whether the file's values are ordered as the table's are, in the same unit."""
    if column.physical_type not in _PHYSICAL.get(type(field.field_type), ()):
        return False
    logical = json.loads(column.logical_type.to_json())
    match field.field_type:
        case IntegerType() | LongType():
            return logical["Type"] == "None" or (logical["Type"] == "Int" and bool(logical["isSigned"]))
        case DateType():
            return bool(logical["Type"] == "Date")
        case StringType():
            return bool(logical["Type"] == "String")
        case TimestampType() | TimestamptzType():
            return bool(logical["Type"] == "Timestamp" and logical["timeUnit"] == "microseconds")
    return True


def _as_bytes(field: NestedField, value: bool | int | bytes) -> bytes:
    if isinstance(value, bytes) or not isinstance(field.field_type, PrimitiveType):
        return bytes(value)
    return to_bytes(field.field_type, value)
