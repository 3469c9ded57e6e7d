"""The schema that a table needs to take rows with more columns: additive, and pure.

A column or a struct's field that the table does not have becomes a new optional one, with optional fields in it: that
the first rows have no null is no rule for later ones. Numbers widen (int to long, float to double, decimals of the same
scale to more digits), which Iceberg allows for keys, partition sources and sort columns too: partition values and
bucket numbers stay the same. Map keys never change. Ids are fresh, never those of a dropped column.

Only new parts are checked here: `Invalid` if a table cannot hold them. A column that both have with incompatible types
stays as it is, and `convert.Conformer` refuses the rows before one of them is staged; nothing evolves then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import pyarrow as pa
from pyarrow import types
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StructType,
)

from floodmark.errors import Invalid
from floodmark.model import RESERVED_COLUMNS, SEQ_COLUMN
from floodmark.rows.primitives import is_decimal
from floodmark.rows.schema import _check_names, _check_type, fresh_field, user_fields
from floodmark.rows.translate import is_list, struct_from_arrow


def evolve_schema(schema: Schema, incoming: pa.Schema, last_column_id: int, next_schema_id: int) -> Schema | None:
    """The table's next schema, for rows with these columns (see `stage.incoming_schema`); None if it stays as it is."""
    columns = user_fields(schema)
    evolved = _evolve_fields(columns, list(incoming), "", count(last_column_id + 1))
    if evolved == columns:
        return None
    hidden = [field for field in schema.fields if field.name == SEQ_COLUMN]
    return Schema(*evolved, *hidden, schema_id=next_schema_id, identifier_field_ids=list(schema.identifier_field_ids))


def _evolve_fields(
    known: Sequence[NestedField], incoming: Sequence[pa.Field], path: str, ids: Iterator[int]
) -> list[NestedField]:
    sources = {field.name: field.type for field in incoming}
    names = {field.name for field in known}
    fields = []
    for field in known:
        source = sources.get(field.name)
        kind = field.field_type if source is None else _evolve(field.field_type, source, f"{path}{field.name}", ids)
        fields.append(field if kind == field.field_type else field.model_copy(update={"field_type": kind}))
    new = _new_fields([field for field in incoming if field.name not in names], path)
    if new:
        _check_names([*known, *new], path)
    return [*fields, *(fresh_field(field, ids, optional=True) for field in new)]


def _evolve(kind: IcebergType, source: pa.DataType, path: str, ids: Iterator[int]) -> IcebergType:
    """The type that holds the values of both; `kind` itself if there is no such type, or no need for one."""
    if types.is_dictionary(source):
        source = source.value_type
    match kind:
        case StructType() if types.is_struct(source):
            return StructType(*_evolve_fields(kind.fields, list(source), f"{path}.", ids))
        case ListType() if is_list(source):
            element = _evolve(kind.element_type, source.value_type, f"{path}.element", ids)
            return ListType(kind.element_id, element, kind.element_required)
        case MapType() if types.is_map(source):
            value = _evolve(kind.value_type, source.item_type, f"{path}.value", ids)
            return MapType(kind.key_id, kind.key_type, kind.value_id, value, kind.value_required)
        case IntegerType() if types.is_int64(source) or types.is_uint32(source):
            return LongType()
        case FloatType() if types.is_float64(source):
            return DoubleType()
        case DecimalType() if types.is_decimal(source) and source.scale == kind.scale:
            if source.precision > kind.precision and is_decimal(source.precision, source.scale):
                return DecimalType(source.precision, kind.scale)
    return kind


def _new_fields(incoming: Iterable[pa.Field], path: str) -> tuple[NestedField, ...]:
    """These columns as a new table would have them, or `Invalid` with the name of one that it cannot hold."""
    incoming = list(incoming)
    for field in incoming:
        if not path and field.name.lower() in RESERVED_COLUMNS:
            raise Invalid("this column name is reserved", column=field.name, advice="Give the column another name.")
        _check_typed(field.type, f"{path}{field.name}")
    fields = struct_from_arrow(incoming, path).fields
    for column in fields:
        _check_type(column.field_type, f"{path}{column.name}")
    return fields


def _check_typed(kind: pa.DataType, column: str) -> None:
    """Rows without a single value in a new column do not show the column's type."""
    if types.is_null(kind):
        raise Invalid(
            "a new column has no type: the rows have no value in it",
            column=column,
            advice="Give the column a type, or leave it out until there is a value.",
        )
    if types.is_struct(kind):
        for field in kind:
            _check_typed(field.type, f"{column}.{field.name}")
    elif types.is_map(kind):
        _check_typed(kind.key_type, f"{column}.key")
        _check_typed(kind.item_type, f"{column}.value")
    elif is_list(kind):
        _check_typed(kind.value_type, f"{column}.element")
