"""Schemas of other systems as Iceberg types: Spark's JSON form and Arrow's.

Field ids are placeholders; `schema.table_schema` assigns the real ones. A type that a table cannot hold is `Invalid`
with the column's full name and what to use instead: a column is never silently stored as something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NotRequired, TypedDict

from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from floodmark.errors import Invalid
from floodmark.rows.ddl import UNSUPPORTED
from floodmark.rows.primitives import BY_NAME, DECIMAL_ADVICE, is_decimal

if TYPE_CHECKING:
    import pyarrow as pa


class SparkField(TypedDict):
    """A field in the JSON form of a Spark StructType."""

    name: str
    type: str | SparkForm
    nullable: bool
    metadata: NotRequired[dict[str, str]]


class SparkForm(TypedDict):
    """A type with others in it, in the same form: a struct, an array or a map."""

    type: str
    fields: NotRequired[list[SparkField]]
    elementType: NotRequired[str | SparkForm]
    containsNull: NotRequired[bool]
    keyType: NotRequired[str | SparkForm]
    valueType: NotRequired[str | SparkForm]
    valueContainsNull: NotRequired[bool]


_DECIMAL = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")


def unsupported(column: str, kind: str, advice: str) -> Invalid:
    return Invalid("a table cannot hold this type", column=column, type=kind, advice=advice)


def struct_from_spark(value: SparkForm, path: str = "") -> StructType:
    """An Iceberg struct from the JSON form of a Spark StructType."""
    return StructType(*(_field_from_spark(field, path) for field in value["fields"]))


def _field_from_spark(field: SparkField, path: str) -> NestedField:
    column = f"{path}{field['name']}"
    return NestedField(
        field_id=-1,
        name=field["name"],
        field_type=_type_from_spark(field["type"], column),
        required=not field["nullable"],
        doc=field.get("metadata", {}).get("comment"),
    )


def _type_from_spark(kind: str | SparkForm, column: str) -> IcebergType:
    if isinstance(kind, dict):
        return _nested_from_spark(kind, column)
    if kind in BY_NAME:
        return BY_NAME[kind]
    if decimal := _DECIMAL.fullmatch(kind):
        return _decimal(int(decimal[1]), int(decimal[2]), column)
    word = re.split(r"\W", kind)[0]
    raise unsupported(column, kind, UNSUPPORTED.get(word, "Use a type of Spark SQL that Iceberg has too."))


def _nested_from_spark(kind: SparkForm, column: str) -> IcebergType:
    match kind["type"]:
        case "struct":
            return struct_from_spark(kind, f"{column}.")
        case "array":
            element = _type_from_spark(kind["elementType"], f"{column}.element")
            return ListType(element_id=-1, element_type=element, element_required=not kind["containsNull"])
        case "map":
            return MapType(
                key_id=-1,
                key_type=_type_from_spark(kind["keyType"], f"{column}.key"),
                value_id=-1,
                value_type=_type_from_spark(kind["valueType"], f"{column}.value"),
                value_required=not kind["valueContainsNull"],
            )
    raise unsupported(column, str(kind["type"]), "Cast it to a type of Spark SQL first.")


def _decimal(precision: int, scale: int, column: str) -> IcebergType:
    if not is_decimal(precision, scale):
        raise unsupported(column, f"decimal({precision},{scale})", DECIMAL_ADVICE)
    return DecimalType(precision, scale)


def struct_from_arrow(fields: Iterable[pa.Field], path: str = "") -> StructType:
    """An Iceberg struct from an Arrow schema, or from the fields of an Arrow struct."""
    return StructType(
        *(
            NestedField(
                field_id=-1,
                name=field.name,
                field_type=_type_from_arrow(field.type, f"{path}{field.name}"),
                required=not field.nullable,
            )
            for field in fields
        )
    )


def _type_from_arrow(kind: pa.DataType, column: str) -> IcebergType:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _type_from_arrow(kind.value_type, column)
    if types.is_struct(kind):
        return struct_from_arrow(kind, f"{column}.")
    if types.is_map(kind):
        return MapType(
            key_id=-1,
            key_type=_type_from_arrow(kind.key_type, f"{column}.key"),
            value_id=-1,
            value_type=_type_from_arrow(kind.item_type, f"{column}.value"),
            value_required=not kind.item_field.nullable,
        )
    if is_list(kind):
        element = _type_from_arrow(kind.value_type, f"{column}.element")
        return ListType(element_id=-1, element_type=element, element_required=not kind.value_field.nullable)
    return _primitive_from_arrow(kind, column)


def is_list(kind: pa.DataType) -> bool:
    from pyarrow import types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(is_kind(kind) for is_kind in lists)


def _primitive_from_arrow(kind: pa.DataType, column: str) -> IcebergType:
    from pyarrow import types

    if types.is_decimal(kind):
        return _decimal(kind.precision, kind.scale, column)
    if types.is_timestamp(kind):
        if kind.unit == "ns":
            raise unsupported(column, str(kind), "Use microseconds: pa.timestamp('us').")
        return TimestamptzType() if kind.tz else TimestampType()
    if types.is_uint64(kind):
        raise unsupported(column, str(kind), "Use int64, or decimal128(20, 0).")
    if types.is_uint32(kind):
        return LongType()
    known: list[tuple[Callable[[pa.DataType], bool], IcebergType]] = [
        (types.is_boolean, BooleanType()),
        (types.is_int64, LongType()),
        (types.is_integer, IntegerType()),
        (types.is_float64, DoubleType()),
        (types.is_floating, FloatType()),
        (types.is_date, DateType()),
        (types.is_string, StringType()),
        (types.is_large_string, StringType()),
        (types.is_string_view, StringType()),
        (types.is_binary, BinaryType()),
        (types.is_large_binary, BinaryType()),
        (types.is_binary_view, BinaryType()),
    ]
    for is_kind, iceberg in known:
        if is_kind(kind):
            return iceberg
    raise unsupported(column, str(kind), _arrow_advice(kind))


def _arrow_advice(kind: pa.DataType) -> str:
    from pyarrow import types

    if types.is_time(kind):
        return UNSUPPORTED["time"]
    if types.is_null(kind):
        return UNSUPPORTED["null"]
    if types.is_fixed_size_binary(kind):
        return UNSUPPORTED["fixed"]
    if types.is_duration(kind) or types.is_interval(kind):
        return UNSUPPORTED["interval"]
    return "Use a string, or binary."
