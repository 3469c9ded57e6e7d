"""The statistics of a Parquet file's row groups, as the test of files takes them (rows/sql/file_test.py).

What is not certain is left out, and proves nothing: a statistic of another type or unit, a column whose name may be a
path. A column that the file does not have is null in every row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pyarrow.parquet as pq
from pyiceberg.types import (
    BooleanType,
    DateType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)

from floodmark.rows.sql.file_test import Span, Spans, raw_values

_NO, _YES = np.zeros(1, np.bool_), np.ones(1, np.bool_)
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


def group_spans(metadata: pq.FileMetaData, names: Mapping[int, str]) -> Spans:
    """What is known of a column in each row group; `names` are the file's, by field id."""
    places = {metadata.schema.column(place).path: place for place in range(len(metadata.schema))}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]

    def span(field: NestedField) -> Span:
        name = names.get(field.field_id)
        if name is None:
            return Span(None, None, _NO, _YES, _NO)
        place = None if "." in name else places.get(name)
        if place is None:
            return Span(None, None, _NO, _NO, _NO)
        found = [group.column(place).statistics for group in groups]
        counted = [None if one is None or not one.has_null_count else one.null_count for one in found]
        nulls = np.array([-1 if count is None else count for count in counted], np.int64)
        only_nulls = nulls == np.array([group.num_rows for group in groups], np.int64)
        if not _is_comparable(metadata.schema.column(place), field):
            return Span(None, None, nulls == 0, only_nulls, _NO)
        known = [one if one is not None and one.has_min_max else None for one in found]
        low = raw_values(field.field_type, [None if one is None else one.min_raw for one in known])
        high = raw_values(field.field_type, [None if one is None else one.max_raw for one in known])
        return Span(low, high, nulls == 0, only_nulls, _NO)

    return span


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
