"""Types of columns that a file wants, against the types of a table: pure.

A type that was read from a file has placeholder ids; the resulting type keeps the ids of the table's type, and gives
fresh ones to new fields. Numbers widen (int to long, float to double, decimals to more digits), structs get new
optional fields and may make required ones optional; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyiceberg.types import (
    DecimalType,
    IcebergType,
    ListType,
    MapType,
    NestedField,
    StructType,
)

from floodmark.rows.primitives import SHOWN, widens
from floodmark.rows.schema import fresh_field


class Unfit(Exception):
    """The table's type cannot become the wanted one, for this reason."""


def fitted_type(have: IcebergType, want: IcebergType, ids: Iterator[int], path: str = "") -> IcebergType:
    """The type `have` after it became `want`; equal to `have` if they mean the same. Raises Unfit."""
    match have, want:
        case StructType(), StructType():
            return _fitted_struct(have, want, ids, path)
        case ListType(), ListType():
            element = fitted_type(have.element_type, want.element_type, ids, f"{path}.element")
            return ListType(have.element_id, element, have.element_required)
        case MapType(), MapType():
            if type_text(have.key_type) != type_text(want.key_type):
                raise Unfit(f"the keys of a map never change ({type_text(have)} to {type_text(want)})")
            value = fitted_type(have.value_type, want.value_type, ids, f"{path}.value")
            return MapType(have.key_id, have.key_type, have.value_id, value, have.value_required)
        case _ if widens(have, want):
            return want
    if have != want:
        raise Unfit(f"{type_text(have)} does not widen to {type_text(want)}{f' at {path[1:]}' if path else ''}")
    return have


def _fitted_struct(have: StructType, want: StructType, ids: Iterator[int], path: str) -> StructType:
    wanted = {field.name: field for field in want.fields}
    fields = []
    for field in have.fields:
        other = wanted.pop(field.name, None)
        place = f"{path}.{field.name}"
        if other is None:
            raise Unfit(f"a field inside a struct cannot be taken away ({place[1:]})")
        if other.required and not field.required:
            raise Unfit(f"a field inside a struct cannot become required ({place[1:]})")
        kind = fitted_type(field.field_type, other.field_type, ids, place)
        doc = field.doc if other.doc is None else other.doc or None
        fields.append(NestedField(field.field_id, field.name, kind, required=other.required, doc=doc))
    for field in wanted.values():
        if field.required:
            raise Unfit(f"a new field inside a struct cannot be required ({path[1:]}.{field.name})")
        fields.append(fresh_field(field, ids))
    return StructType(*fields)


def type_text(kind: IcebergType) -> str:
    """The type as files and people write it; without ids."""
    if isinstance(kind, StructType):
        inner = ", ".join(
            f"{field.name}: {type_text(field.field_type)}{' not null' if field.required else ''}"
            for field in kind.fields
        )
        return f"struct<{inner}>"
    if isinstance(kind, ListType):
        return f"array<{type_text(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{type_text(kind.key_type)}, {type_text(kind.value_type)}>"
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    return SHOWN.get(type(kind), str(kind))
