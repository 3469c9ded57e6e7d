"""Which columns of a table can be indexed, and the index that names of columns mean.

Everything that cannot be is `Invalid` here, before anything is recorded. Names become field ids: an index keeps its
columns when they are renamed or widened. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, ListType, NestedField

from floodmark.catalog.indexes import KEY, VALUE, WantedIndex
from floodmark.errors import Invalid
from floodmark.index.writing import is_wide_on, key_columns
from floodmark.rows.index.hashing import ENCODER
from floodmark.rows.primitives import is_held
from floodmark.rows.schema import nearest, user_fields

KINDS = (KEY, VALUE)
COLUMNS_MAX = 16
TYPES_ADVICE = "An index is on plain columns, or on one column that is a list of plain values."


def wanted_index(table: str, schema: Schema, on: Sequence[str], kind: str | None = None) -> WantedIndex:
    """The index on these columns of a table: the table's key means its key index, others a value index.

    `kind`: which of both is meant, if the caller says.
    """
    if kind is not None and kind not in KINDS:
        raise Invalid("unknown kind of index", kind=kind, advice=f"Use {' or '.join(KINDS)}.")
    columns = _columns(table, schema, on)
    key = key_columns(schema)
    is_key = {column.field_id for column in columns} == {column.field_id for column in key}
    if kind == KEY and not is_key:
        names = ", ".join(column.name for column in key)
        advice = f"The key is {names}; other columns have value indexes." if key else "The table has no key."
        raise Invalid("a key index is on the columns of the key", table=table, columns=_text(on), advice=advice)
    if kind == VALUE and is_key:
        advice = "Lookups by the key use it. Leave `kind` out."
        raise Invalid("these columns are the key, which has an index by itself", table=table, advice=advice)
    return _wanted(KEY, key) if is_key else value_index(table, columns)


def wanted_key(schema: Schema) -> WantedIndex | None:
    """The index that a table with this key has by itself."""
    key = key_columns(schema)
    return _wanted(KEY, key) if key else None


def names_of(schema: Schema, field_ids: Sequence[int]) -> tuple[str, ...]:
    by_id = {field.field_id: field.name for field in schema.fields}
    return tuple(by_id[one] for one in field_ids)


def value_index(table: str, columns: Sequence[NestedField]) -> WantedIndex:
    """The value index on some columns of a table, in whatever order they are given."""
    for column in columns:
        if not _can_index(column.field_type, alone=len(columns) == 1):
            kind = str(column.field_type)
            raise Invalid(
                "a column of this type cannot be indexed",
                table=table,
                column=column.name,
                type=kind,
                advice=TYPES_ADVICE,
            )
    return _wanted(VALUE, sorted(columns, key=lambda column: column.field_id))


def _wanted(kind: str, columns: Sequence[NestedField]) -> WantedIndex:
    ids = tuple(column.field_id for column in columns)
    return WantedIndex(kind, ids, is_wide_on(columns), ENCODER.number)


def _can_index(kind: IcebergType, *, alone: bool) -> bool:
    return is_held(kind) or (alone and isinstance(kind, ListType) and is_held(kind.element_type))


def _columns(table: str, schema: Schema, on: Sequence[str]) -> list[NestedField]:
    if not on:
        raise Invalid("an index is on at least one column", table=table, advice="Name its columns.")
    if len(on) > COLUMNS_MAX:
        raise Invalid("an index has too many columns", table=table, columns=len(on), columns_max=COLUMNS_MAX)
    if len(set(on)) != len(on):
        raise Invalid("a column is named twice", table=table, columns=_text(on), advice="Name each column once.")
    by_name = {field.name: field for field in user_fields(schema)}
    for name in on:
        if name not in by_name:
            advice = nearest(name, list(by_name))
            raise Invalid("the table has no such column", table=table, column=name, advice=advice)
    return [by_name[name] for name in on]


def _text(names: Sequence[str]) -> str:
    return ", ".join(names)
