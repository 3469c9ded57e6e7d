"""The difference between the tables that a file wants and the existing ones, as steps. Pure.

Nothing is read and nothing is changed here. A step that cannot be done is refused with the reason and an alternative;
the rest of the plan is still computed, so that all of it can be seen at once. Tables that the file does not name are
left alone, except for what a reference writes into the table that it points to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, FloatType, NestedField, PrimitiveType

from floodmark.catalog.upkeep import Policy
from floodmark.commit.fills import Fill, fill_property
from floodmark.errors import Invalid
from floodmark.maintenance.policy import check_policy, read_rule
from floodmark.model import SEQ_COLUMN
from floodmark.schema.columns import ColumnsDiff, diff_columns, renamed_back
from floodmark.schema.file import NO_RETENTION, WantedTable
from floodmark.schema.kinds import type_text
from floodmark.schema.layout import changed_sort, changed_spec
from floodmark.schema.links import diff_links
from floodmark.schema.step import (
    ADD_KEY,
    CHANGE_PARTITION,
    CHANGE_SORT,
    COMMENT,
    CREATE_TABLE,
    DESTRUCTIVE,
    DROP_TABLE,
    REFUSED,
    SAFE,
    SET_RETENTION,
    Step,
    refused,
)
from floodmark.schema.tables import Current, TablePlan


def diff(wanted: Sequence[WantedTable], current: Mapping[str, Current]) -> tuple[TablePlan, ...]:
    """The plan of each wanted table, and of those that references touch. `current`: tables by their names."""
    by_name = {name.lower(): name for name in current}
    plans = []
    for table in wanted:
        there = current.get(table.name)
        other = by_name.get(table.name.lower())
        if there is None and other is not None:
            reason = f"there is a table {other}, and names do not differ by case only"
            step = refused(
                table.name, CREATE_TABLE, None, f"make {table.name}", reason, f"Call it {other} in the file."
            )
            plans.append(TablePlan(table.name, table, None, (step,)))
        elif table.drop:
            plans.append(_dropped(table, there))
        elif there is None:
            plans.append(_created(table))
        else:
            plans.append(_changed(table, there))
    return diff_links(plans, current)


# ── a new table, a dropped table ──


def _created(wanted: WantedTable) -> TablePlan:
    text = f"make {wanted.name} with {_columns_text(wanted)}"
    if not wanted.columns:
        step = refused(wanted.name, CREATE_TABLE, None, text, "there is no such table", "Give it `columns`.")
        return TablePlan(wanted.name, wanted, None, (step,))
    shape = wanted.shape()
    fills = [
        Fill(column.field_id, column.name, want.literal)
        for column, want in zip(shape.schema.fields, wanted.columns, strict=False)
        if want.default is not None
    ]
    shape = replace(shape, properties={**shape.properties, **dict(fill_property(fill) for fill in fills)})
    policy = None
    if wanted.retention not in (None, NO_RETENTION):
        policy = check_policy(str(wanted.retention), wanted.retention_column, shape.schema, shape.spec)
    words = [
        text,
        f"key {', '.join(wanted.key)}" if wanted.key else "",
        f"partition {', '.join(wanted.partition)}" if wanted.partition else "",
        f"sort {', '.join(wanted.sort)}" if wanted.sort else "",
        f"keeps {policy.retention}{f' by {policy.column}' if policy.column else ''}" if policy else "",
    ]
    step = Step(wanted.name, CREATE_TABLE, None, SAFE, "; ".join(word for word in words if word))
    return TablePlan(wanted.name, wanted, None, (step,), shape=shape, policy=policy)


def _columns_text(wanted: WantedTable) -> str:
    """The columns in words: a plan is read before it is agreed to."""
    found = []
    for column in wanted.columns:
        never = " not null" if column.required or column.name in (wanted.key or ()) else ""
        default = "" if column.default is None else f" default {column.literal}"
        found.append(f"{column.name} {type_text(column.kind)}{never}{default}")
    return ", ".join(found) or "no columns"


def _dropped(wanted: WantedTable, current: Current | None) -> TablePlan:
    if current is None:
        return TablePlan(wanted.name, wanted, None)
    text = f"drop {wanted.name} ({current.head.rows} rows); `undrop` brings it back until older versions expire"
    users = current.users
    problem = None
    if users.sinks:
        names = sorted(users.sinks)
        problem = (f"sinks follow it: {', '.join(names)}", _without_sinks(names))
    elif users.jobs:
        problem = (f"backfills are not at their end: {', '.join(users.jobs)}", "Let them end, or cancel them.")
    elif users.branches:
        problem = (f"branches have it: {', '.join(users.branches)}", "Merge or delete the branches first.")
    if problem is not None:
        step = refused(wanted.name, DROP_TABLE, None, text, *problem)
        return TablePlan(wanted.name, wanted, current, (step,))
    step = Step(wanted.name, DROP_TABLE, None, DESTRUCTIVE, text)
    return TablePlan(wanted.name, wanted, current, (step,), drop=True)


def _without_sinks(names: Sequence[str]) -> str:
    """The tables of a sink are fixed when it is added: a sink that follows others too must be added again for those."""
    commands = ", ".join(f"`floodmark sink remove {name} --apply`" for name in names)
    return (
        f"Remove what follows it: {commands}. A sink that follows other tables too comes back for those by"
        " `floodmark sink add`, with `--start` at the mark that `floodmark sink status` shows before."
    )


# ── a table that stays ──


@dataclass
class _Draft:
    """A table's plan under construction."""

    wanted: WantedTable
    current: Current
    columns: ColumnsDiff
    identifiers: list[int]
    plan: TablePlan

    def add(self, *steps: Step) -> None:
        self.plan = replace(self.plan, steps=(*self.plan.steps, *steps))

    @property
    def schema(self) -> Schema:
        """The columns after the plan, with the id of the table's next schema."""
        hidden = [field for field in self.current.schema.fields if field.name == SEQ_COLUMN]
        return Schema(
            *self.columns.fields,
            *hidden,
            schema_id=self.current.next_schema_id,
            identifier_field_ids=self.identifiers,
        )


def _changed(wanted: WantedTable, current: Current) -> TablePlan:
    columns = diff_columns(wanted, current)
    plan = TablePlan(
        wanted.name,
        wanted,
        current,
        tuple(columns.steps),
        properties=dict(columns.properties),
        fills=tuple(columns.fills),
        no_nulls=tuple(columns.no_nulls),
    )
    draft = _Draft(wanted, current, columns, list(current.schema.identifier_field_ids), plan)
    _diff_key(draft)
    _diff_layout(draft)
    _diff_retention(draft)
    _diff_comment(draft)
    schema = draft.schema
    # Also if only a fill expression changed: files staged for the old schema must not pass for the new one.
    if not _same_schema(schema, current.schema) or draft.columns.properties:
        draft.plan = replace(draft.plan, schema=schema)
    return draft.plan


def _same_schema(one: Schema, other: Schema) -> bool:
    keys = (set(one.identifier_field_ids), set(other.identifier_field_ids))
    return one.fields == other.fields and keys[0] == keys[1]


def _diff_key(draft: _Draft) -> None:
    wanted, current = draft.wanted, draft.current
    if wanted.key is None:
        return
    names = {field.field_id: field.name for field in draft.columns.fields}
    have = {names.get(field_id, "") for field_id in current.schema.identifier_field_ids}
    if have == set(wanted.key):
        return
    text = f"key {', '.join(wanted.key)}" if wanted.key else "no key"
    problem = _key_problem(wanted, draft.columns.fields, current, have)
    if problem is not None:
        draft.add(refused(wanted.name, ADD_KEY, None, text, *problem))
        return
    ids = [field.field_id for field in draft.columns.fields if field.name in wanted.key]
    draft.columns.fields = [
        NestedField(one.field_id, one.name, one.field_type, required=True, doc=one.doc) if one.field_id in ids else one
        for one in draft.columns.fields
    ]
    draft.identifiers = ids
    draft.plan = replace(draft.plan, unique=True, no_nulls=(*draft.plan.no_nulls, *ids))
    text = f"{text}; its rows are looked at first"
    if current.users.branches:
        # Those branches have no key, so they cannot decide which rows are the same row.
        text = f"{text}; it cannot be merged any more with branches that have it: {', '.join(current.users.branches)}"
    draft.add(Step(wanted.name, ADD_KEY, None, SAFE, text))


def _key_problem(
    wanted: WantedTable, fields: Sequence[NestedField], current: Current, have: set[str]
) -> tuple[str, str] | None:
    if have:
        return f"a table keeps its key ({', '.join(sorted(have))})", "Make a new table with the other key and load it."
    by_name = {field.name: field for field in fields}
    known = {field.field_id for field in current.schema.fields}
    for name in wanted.key or ():
        field = by_name.get(name)
        if field is None:
            return f"there is no column {name}", f"The columns are: {', '.join(by_name)}."
        if not isinstance(field.field_type, PrimitiveType) or isinstance(field.field_type, FloatType | DoubleType):
            return f"{name} is a {field.field_type}", "A key is made of plain columns that are not float or double."
        if field.field_id not in known and current.head.rows:
            return f"the rows that are there do not have {name} yet", "Add the column and fill it, then add the key."
    if len(set(wanted.key or ())) != len(wanted.key or ()):
        return "a column is named twice", "Name each column once."
    return None


def _diff_layout(draft: _Draft) -> None:
    wanted, current, metadata = draft.wanted, draft.current, draft.current.metadata
    if wanted.partition is not None:
        partition = wanted.partition
        _diff_part(
            draft,
            CHANGE_PARTITION,
            f"partition {', '.join(partition) or 'nothing'}; new data only",
            lambda: {"spec": changed_spec(metadata, current.spec, draft.schema, partition)},
        )
    if wanted.sort is not None:
        sort = wanted.sort
        _diff_part(
            draft,
            CHANGE_SORT,
            f"sort {', '.join(sort) or 'nothing'}; new data only",
            lambda: {"sort": changed_sort(metadata, current.sort, draft.schema, sort)},
        )


def _diff_part(draft: _Draft, action: str, text: str, changed: Callable[[], dict[str, Any]]) -> None:
    """A step for a part that `changed` finds different, if it does."""
    try:
        found = changed()
    except Invalid as error:
        draft.add(refused(draft.wanted.name, action, None, text, str(error), error.advice))
        return
    if all(value is not None for value in found.values()):
        draft.plan = replace(draft.plan, **found)
        draft.add(Step(draft.wanted.name, action, None, SAFE, text))


def _diff_retention(draft: _Draft) -> None:
    wanted, current = draft.wanted, draft.current
    now = Policy(current.policy.retention, renamed_back(draft.columns.renamed, current.policy.column))
    if wanted.retention is None or (wanted.retention == NO_RETENTION and now.retention is None):
        if now != current.policy:
            draft.plan = replace(draft.plan, policy=now)  # the rename step shows it
        return
    if wanted.retention == NO_RETENTION:
        draft.plan = replace(draft.plan, policy=Policy())
        draft.add(Step(wanted.name, SET_RETENTION, None, SAFE, "keep every row"))
        return
    column, spec = wanted.retention_column, draft.plan.spec or current.spec
    text = f"keep {wanted.retention}{f' by {column}' if column else ''}"
    try:
        # The column of the present policy stays with the new policy, if that is of the same kind.
        policy = check_policy(wanted.retention, column or _column_so_far(wanted.retention, now), draft.schema, spec)
    except Invalid as error:
        draft.add(refused(wanted.name, SET_RETENTION, column, text, error.message, error.advice))
        return
    if policy != now:
        kind = DESTRUCTIVE if current.head.rows and not _keeps_all(policy, now, draft.schema, spec) else SAFE
        draft.add(Step(wanted.name, SET_RETENTION, policy.column, kind, text))
    if policy != current.policy:
        draft.plan = replace(draft.plan, policy=policy)


def _keeps_all(policy: Policy, before: Policy, schema: Schema, spec: PartitionSpec) -> bool:
    """Whether the new policy keeps every row that the present policy keeps."""
    if before.retention is None:
        return False
    try:
        new, old = read_rule(policy, schema, spec), read_rule(before, schema, spec)
    except Invalid:
        return False  # its column does not exist any more
    amounts = ((new.age_ms, old.age_ms), (new.rows, old.rows), (new.size_bytes, old.size_bytes))
    return new.column == old.column and all((one or 0) >= (other or 0) for one, other in amounts)


def _column_so_far(retention: str, now: Policy) -> str | None:
    is_age = retention.strip()[-1:] in "mhdwy"
    return now.column if is_age else None


def _diff_comment(draft: _Draft) -> None:
    wanted = draft.wanted
    if wanted.comment is None or wanted.comment == draft.current.metadata.properties.get("comment", ""):
        return
    draft.plan = replace(draft.plan, properties={**draft.plan.properties, "comment": wanted.comment})
    draft.add(Step(wanted.name, COMMENT, None, SAFE, f"comment of {wanted.name}"))


def is_refused(plans: Sequence[TablePlan]) -> bool:
    return any(step.kind == REFUSED for plan in plans for step in plan.steps)
