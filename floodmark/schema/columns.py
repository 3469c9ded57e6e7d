"""The columns of a table, wanted against existing: pure.

A column is identified by its field id: a rename keeps it, so old files and old versions are read as before. A dropped
column is not in the new schema, and its id is never given again; the rows in older versions keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from pyiceberg.types import NestedField

from floodmark.commit.fills import Fill, fill_property
from floodmark.errors import Invalid
from floodmark.rows.schema import fresh_field, nearest, user_fields
from floodmark.rows.sql.expression import parse_plain
from floodmark.schema.column_types import Unfit, fitted_type, type_text
from floodmark.schema.file import WantedColumn, WantedTable
from floodmark.schema.step import (
    ADD_COLUMN,
    COMMENT,
    DESTRUCTIVE,
    DROP_COLUMN,
    NEEDS_REWRITE,
    RELAX_REQUIRED,
    RENAME_COLUMN,
    REQUIRE,
    SAFE,
    SET_DEFAULT,
    WIDEN_TYPE,
    Step,
    refused,
)
from floodmark.write.current import Current, Problem, names_column, needed, used_by_name


@dataclass
class ColumnsDiff:
    """The columns after the plan, and the steps to get there. `renamed`: old names to new ones."""

    fields: list[NestedField] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    no_nulls: list[int] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)


def with_column_change(wanted: WantedTable, current: Current) -> WantedTable:
    """A table of which one column is to change, with all columns that it has now; `Invalid` if it cannot change."""
    change = wanted.change
    if change is None:
        return wanted
    fields = user_fields(current.schema)
    by_name = {field.name: field for field in fields}
    old = change.drop if change.rename is None else change.rename[0]
    new = change.rename[1] if change.rename is not None else None if change.add is None else change.add.name
    if old is not None and old not in by_name:
        advice = nearest(old, list(by_name))
        raise Invalid("the table has no such column", table=wanted.name, column=old, advice=advice)
    taken = next((one for one in fields if new is not None and one.name.lower() == new.lower()), None)
    if taken is not None and (taken.name != old or new == old):
        advice = "Choose another name: names must differ by more than case."
        raise Invalid("the table has a column of this name", table=wanted.name, column=taken.name, advice=advice)
    columns = [
        WantedColumn(one.name, one.field_type, one.required)
        if one.name != old
        else WantedColumn(str(new), one.field_type, one.required, renamed_from=old)
        for one in fields
        if one.name != change.drop
    ]
    dropped: frozenset[str] = frozenset() if change.drop is None else frozenset([change.drop])
    if change.add is not None:
        columns.append(change.add)
    if not columns:
        raise Invalid("a table keeps at least one column", table=wanted.name, column=old, advice="Drop the table.")
    for one in columns:
        if one.name == new:
            replace(wanted, columns=(one,)).shape()  # a name that no column can have is Invalid
    return replace(wanted, columns=tuple(columns), dropped=dropped)


def diff_columns(wanted: WantedTable, current: Current) -> ColumnsDiff:
    """The difference. A refused change becomes a refused step, and leaves the column as it is."""
    found = ColumnsDiff()
    columns = user_fields(current.schema)
    if not wanted.columns:
        found.fields = columns
        return found
    ids = count(current.metadata.last_column_id + 1)
    matched = _match(wanted, columns, found)
    taken = {column.name for column in matched.values()}
    new = [column for column in wanted.columns if column.name not in taken]
    for have in columns:
        if have.field_id in matched:
            _keep(wanted, current, have, matched[have.field_id], ids, found)
        else:
            _drop(wanted, current, have, new, found)
    for column in new:
        _add(wanted, current, column, ids, found)
    return found


def _match(wanted: WantedTable, columns: list[NestedField], found: ColumnsDiff) -> dict[int, WantedColumn]:
    """By field id, the wanted column for a column of the table: by its name, else by its declared former name."""
    by_name = {column.name: column for column in columns}
    matched = {by_name[column.name].field_id: column for column in wanted.columns if column.name in by_name}
    for column in wanted.columns:
        old = by_name.get(column.renamed_from or "")
        if old is None:
            continue
        text = f"rename {old.name} to {column.name}"
        if column.name in by_name:
            if old.field_id not in matched and old.name not in wanted.dropped:
                reason = f"the table has both {old.name} and {column.name}"
                way = f"Leave renamed_from out; dropped = [{old.name!r}] lets the other one go."
                found.steps.append(refused(wanted.name, RENAME_COLUMN, column.name, text, reason, way))
        elif old.field_id in matched:
            reason = f"another column of the file is {old.name}"
            found.steps.append(
                refused(wanted.name, RENAME_COLUMN, column.name, text, reason, "Rename in two applies, one by one.")
            )
        else:
            matched[old.field_id] = column
    return matched


# ── a column that stays ──


def _keep(
    wanted: WantedTable, current: Current, have: NestedField, want: WantedColumn, ids: Iterator[int], found: ColumnsDiff
) -> None:
    name, kind, required, doc = have.name, have.field_type, have.required, have.doc
    table = wanted.name
    if want.name != have.name:
        name = _renamed(wanted, current, have, want, found)
    try:
        kind = fitted_type(have.field_type, want.kind, ids)
    except Unfit as unfit:
        text = f"{have.name}: {type_text(have.field_type)} to {type_text(want.kind)}"
        way = "Make a new column, fill it with `floodmark backfill column`, then drop this one."
        found.steps.append(refused(table, WIDEN_TYPE, name, text, f"not a wider type: {unfit}", way))
    else:
        if type_text(kind) != type_text(have.field_type):
            text = f"{name}: {type_text(have.field_type)} to {type_text(kind)}"
            found.steps.append(_checked_widening(current, table, have, name, text))
        elif kind != have.field_type:
            found.steps.append(Step(table, COMMENT, name, SAFE, f"comments inside {name}"))
    is_key = have.field_id in current.schema.identifier_field_ids or name in (wanted.key or ())
    if want.required and not have.required and name not in (wanted.key or ()):
        required = True
        found.no_nulls.append(have.field_id)
        found.steps.append(Step(table, REQUIRE, name, SAFE, f"{name} is never null; its rows are checked first"))
    elif have.required and not want.required and not is_key:
        required = False
        found.steps.append(Step(table, RELAX_REQUIRED, name, SAFE, f"{name} may be null"))
    if want.comment is not None and (want.comment or None) != (have.doc or None):
        doc = want.comment or None
        found.steps.append(Step(table, COMMENT, name, SAFE, f"comment of {name}"))
    if want.default is not None:
        refers = wanted.references is None and any(one.field_id == have.field_id for one in current.references)
        _set_default(table, current, have, want, refers, found)
    found.fields.append(NestedField(have.field_id, name, kind, required=required, doc=doc))


def _renamed(wanted: WantedTable, current: Current, have: NestedField, want: WantedColumn, found: ColumnsDiff) -> str:
    """The column's name after the plan: the new one, unless the rename is refused."""
    text = f"rename {have.name} to {want.name}; files keep the old name, and reading them takes longer"
    problem = _name_taken(current, want.name, have.field_id) or used_by_name(current, have)
    if problem is not None:
        found.steps.append(refused(wanted.name, RENAME_COLUMN, want.name, text, *problem))
        return have.name
    found.steps.append(Step(wanted.name, RENAME_COLUMN, want.name, SAFE, text))
    found.renamed[have.name] = want.name
    return want.name


def _checked_widening(current: Current, table: str, have: NestedField, name: str, text: str) -> Step:
    """Safe, unless an expression computes with the old type."""
    for fill in current.fills:
        if names_column(fill.expression, have, current):
            way = f"Unbind {fill.column} first, or make a new column."
            return refused(table, WIDEN_TYPE, name, text, f"{fill.column} is filled by an expression over it", way)
    return Step(table, WIDEN_TYPE, name, SAFE, text)


def _set_default(
    table: str, current: Current, have: NestedField, want: WantedColumn, refers: bool, found: ColumnsDiff
) -> None:
    fill = next((fill for fill in current.fills if fill.field_id == have.field_id), None)
    if fill is not None and fill.expression.strip() == want.literal:
        return
    text = f"{want.name}: rows that do not bring it get {want.literal}"
    if fill is not None and not _is_literal(fill.expression, current):
        reason, way = f"it is filled by an expression: {fill.expression}", "Unbind the column from it first."
        found.steps.append(refused(table, SET_DEFAULT, want.name, text, reason, way))
    elif refers:
        reason, way = "it refers to another table", "Take it out of `references`, or leave the default out."
        found.steps.append(refused(table, SET_DEFAULT, want.name, text, reason, way))
    elif have.field_id in current.dependents.lacking:
        reason = "some files do not have this column, and their rows would get the default too"
        way = "Leave the default out, or run `floodmark maintain compact` after the rows were filled."
        found.steps.append(refused(table, SET_DEFAULT, want.name, text, reason, way))
    else:
        found.steps.append(Step(table, SET_DEFAULT, want.name, SAFE, text))
        found.properties.update([fill_property(Fill(have.field_id, want.name, want.literal))])


# ── a new column, a dropped column ──


def _add(wanted: WantedTable, current: Current, want: WantedColumn, ids: Iterator[int], found: ColumnsDiff) -> None:
    table, rows = wanted.name, current.head.rows
    text = f"add {want.name} {type_text(want.kind)}"
    problem = _name_taken(current, want.name, None)
    if problem is not None:
        found.steps.append(refused(table, ADD_COLUMN, want.name, text, *problem))
        return
    column = fresh_field(want.to_field(), ids)
    if want.required:
        text += ", never null"
        # Rows that are added before the publish do not have it.
        if want.default is None:
            found.no_nulls.append(column.field_id)
    if want.required and want.default is None and rows:
        way = "Leave `required` out, or give the column a default."
        found.steps.append(refused(table, ADD_COLUMN, want.name, text, "the existing rows have no value", way))
        return
    kind = SAFE
    if want.default is not None:
        fill = Fill(column.field_id, want.name, want.literal)
        found.fills.append(fill)
        found.properties.update([fill_property(fill)])
        kind = NEEDS_REWRITE if current.head.files else SAFE
        text += f", {want.literal} in {'every row' if current.head.files else 'rows that do not bring it'}"
    found.fields.append(column)
    found.steps.append(Step(table, ADD_COLUMN, want.name, kind, text))


def _drop(
    wanted: WantedTable, current: Current, have: NestedField, new: list[WantedColumn], found: ColumnsDiff
) -> None:
    table, text = wanted.name, f"drop {have.name}; older versions keep it"
    problem = None
    if have.name not in wanted.dropped and new:
        names = ", ".join(column.name for column in new)
        problem = (
            f"it may be one of the new columns ({names}) under its old name",
            f"Write renamed_from = {have.name!r} there, or dropped = [{have.name!r}] in the table.",
        )
    problem = problem or needed(
        current,
        have,
        respecified=wanted.partition is not None,
        resorted=wanted.sort is not None,
        kept_otherwise=wanted.retention is not None,
        unreferred=wanted.references is not None,
    )
    if problem is not None:
        found.fields.append(have)
        found.steps.append(refused(table, DROP_COLUMN, have.name, text, *problem))
        return
    # What filled it stays in the table's properties, which are those of all branches: another one may have the column.
    found.steps.append(Step(table, DROP_COLUMN, have.name, DESTRUCTIVE, text))


def _name_taken(current: Current, name: str, field_id: int | None) -> Problem | None:
    """Why a column cannot have this name."""
    for column in user_fields(current.schema):
        if column.field_id != field_id and column.name.lower() == name.lower():
            return f"a column {column.name} exists, and names must differ by more than case", "Choose another name."
    for spec in current.metadata.specs().values():
        for part in spec.fields:
            if part.name.lower() == name.lower() and part.source_id != field_id:
                return f"the table has a partition of this name: {part.name}", "Choose another name."
    return None


def _is_literal(expression: str, current: Current) -> bool:
    plain = parse_plain(expression, current.schema)
    return plain is not None and plain.column is None


def renamed_back(renamed: Mapping[str, str], name: str | None) -> str | None:
    """The future name of a column that has this name today."""
    return None if name is None else renamed.get(name, name)
