"""Rows that were staged for an earlier shape of a table, read in its present shape: by field id, not by name. Pure.

A table may get another shape while a write runs: columns renamed, dropped, widened, created again under an old name.
Its rows are in files whose columns have ids, so each column can still be identified. A name in the text of a condition
has no id: if it means another column now, or none, the write does not guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pyiceberg.schema import Schema, index_by_id, index_by_name, index_name_by_id
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, PrimitiveType, StructType

from floodmark.errors import Invalid
from floodmark.model import FileRecord


def translated(staged: Schema, planned: Schema, now: Schema) -> Schema:
    """`staged` with the table's present names; columns that the table dropped are left out.

    `planned` was the table's own schema then. Columns that the rows added are not in it: they keep their names, and are
    never matched by their ids, which the table may have assigned to other columns meanwhile.
    """
    present = index_by_id(now)
    own = set(index_by_id(planned))
    fields = list(_translate(staged.fields, own, present))
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Invalid("a column of the rows has the name of another column now", columns=", ".join(twice))
    keys = [field.field_id for field in fields if field.field_id in staged.identifier_field_ids]
    return Schema(*fields, schema_id=staged.schema_id, identifier_field_ids=keys)


def _translate(fields: Iterable[NestedField], own: set[int], present: dict[int, NestedField]) -> Iterable[NestedField]:
    for field in fields:
        if field.field_id in own and field.field_id not in present:
            continue
        kind = _translate_type(field.field_type, own, present)
        if isinstance(kind, StructType) and not kind.fields:
            continue  # all that it held was dropped
        name = present[field.field_id].name if field.field_id in own else field.name
        yield field.model_copy(update={"name": name, "field_type": kind})


def _translate_type(kind: IcebergType, own: set[int], present: dict[int, NestedField]) -> IcebergType:
    if isinstance(kind, StructType):
        return StructType(*_translate(kind.fields, own, present))
    if isinstance(kind, ListType):
        return ListType(kind.element_id, _translate_type(kind.element_type, own, present), kind.element_required)
    if isinstance(kind, MapType):
        value = _translate_type(kind.value_type, own, present)
        return MapType(kind.key_id, kind.key_type, kind.value_id, value, kind.value_required)
    return kind


def present_name(column: str, planned: Schema, now: Schema) -> str:
    """The present name of a column of the planned schema; `Invalid` if it is gone."""
    names = index_name_by_id(now)
    field_id = index_by_name(planned).get(column)
    if field_id is None:
        return column  # it came with the rows
    if field_id not in names:
        raise Invalid("a column that this write names was dropped", column=column)
    return names[field_id]


def check_condition(where: str, planned: Schema, now: Schema) -> None:
    """`Invalid` if a name in the condition does not mean the same column any more as when it was written."""
    present = index_by_name(now)
    for name, field_id in index_by_name(planned).items():
        word = re.escape(name.rsplit(".", 1)[-1])
        if present.get(name) != field_id and re.search(rf"(?<!\w){word}(?!\w)", where, re.IGNORECASE):
            raise Invalid("a column that the condition names was renamed or dropped", column=name, where=where)


def check_required(records: Sequence[FileRecord], source: Schema, wanted: Schema) -> None:
    """`Invalid` if a column is required now and staged rows may lack values. By their counts."""
    by_name = {field.name: field for field in source.fields}
    for column in wanted.fields:
        there = by_name.get(column.name)
        if not column.required or there is None or there.required:
            continue
        nulls = sum(record.null_counts.get(there.field_id, 0) for record in records)
        # Counts of a struct or list are those of the values inside it, which prove nothing here.
        if nulls or not isinstance(there.field_type, PrimitiveType):
            raise Invalid("rows lack a column that is required now", column=column.name, rows=nulls)
