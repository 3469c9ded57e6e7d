"""Columns that are filled by an expression: which, and which data files lack one.

A table's property holds the expression that fills a column. A data file without counts of the column is not filled, one
with them is (decision 0019); nothing else is recorded. So every rewrite that carries rows leaves the column out where
its input lacked it, and a file that has it holds filled rows only. A property with an empty text: the column is
unbound, and an ordinary one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.schema import Schema
from pyiceberg.types import ListType, MapType, NestedField, PrimitiveType, StructType

from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt
from floodmark.model import FileRecord

FILL_PREFIX = "floodmark.fill."


@dataclass(frozen=True)
class Fill:
    """A column and the expression that fills it."""

    field_id: int
    column: str
    expression: str


def fill_property(fill: Fill) -> tuple[str, str]:
    """The property of the table that holds it: key and value."""
    return f"{FILL_PREFIX}{fill.field_id}", json.dumps({"column": fill.column, "expression": fill.expression})


def unbound_property(field_id: int) -> tuple[str, str]:
    """The property of a column that is not filled any more: an ordinary one from then on, null if a file lacks it."""
    return f"{FILL_PREFIX}{field_id}", ""


def is_unbound(properties: Mapping[str, str], field_id: int) -> bool:
    """Whether an expression filled the column, and does not any more."""
    return properties.get(f"{FILL_PREFIX}{field_id}") == ""


def fills_of(properties: Mapping[str, str], schema: Schema) -> tuple[Fill, ...]:
    """The columns of this schema that are filled, the oldest first, under their present names."""
    names = {column.field_id: column.name for column in schema.fields}
    found = []
    for key, text in properties.items():
        if key.startswith(FILL_PREFIX) and text:
            try:
                field_id, expression = int(key.removeprefix(FILL_PREFIX)), str(json.loads(text)["expression"])
            except (ValueError, KeyError, TypeError) as error:
                raise Corrupt("a table's property about a column cannot be read", property=key, cause=error) from error
            if field_id in names:
                found.append(Fill(field_id, names[field_id], expression))
    return tuple(sorted(found, key=lambda fill: fill.field_id))


def absent_fields(file: LiveFile | FileRecord, fills: Sequence[Fill], schema: Schema) -> tuple[int, ...]:
    """The columns of these fills that the file does not hold, by their field ids.

    Files of our writers have counts of every column. A file without any is older than the column.
    """
    if not fills:
        return ()
    counts = (file.data_file if isinstance(file, LiveFile) else file).value_counts or {}
    return tuple(
        fill.field_id
        for fill in fills
        if all(field_id not in counts for field_id in _leaf_ids(schema.find_field(fill.field_id)))
    )


def _leaf_ids(field: NestedField) -> Iterator[int]:
    """The fields that a data file has counts of: of a struct, list or map those inside it."""
    kind = field.field_type
    if isinstance(kind, PrimitiveType):
        yield field.field_id
        return
    inside: Sequence[NestedField] = ()
    if isinstance(kind, StructType):
        inside = kind.fields
    elif isinstance(kind, ListType):
        inside = (kind.element_field,)
    elif isinstance(kind, MapType):
        inside = (kind.key_field, kind.value_field)
    for child in inside:
        yield from _leaf_ids(child)


def lacking(fills: Sequence[Fill], names: Collection[str]) -> tuple[Fill, ...]:
    """The fills whose columns are not among these columns of the rows."""
    return tuple(fill for fill in fills if fill.column not in names)
