"""The difference between the tables that a file wants and the existing ones, as steps. Pure.

Nothing is read and nothing is changed here. A step that cannot be done is refused with the reason and an alternative;
the rest of the plan is still computed, so that all of it can be seen at once. Tables that the file does not name are
left alone, except for what a reference writes into the table that it points to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pyiceberg.partitioning import PARTITION_FIELD_ID_START, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.sorting import SortDirection, SortOrder
from pyiceberg.types import NestedField

from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.fills import Fill, fill_property
from floodmark.errors import Invalid
from floodmark.maintenance.policy import check_policy, read_rule
from floodmark.model import MAIN, SEQ_COLUMN
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.primitives import KEY_ADVICE, can_identify
from floodmark.schema.column_types import type_text
from floodmark.schema.columns import ColumnsDiff, diff_columns, renamed_back, with_column_change
from floodmark.schema.file import NO_RETENTION, WantedTable
from floodmark.schema.index_steps import with_indexes
from floodmark.schema.references import diff_references
from floodmark.schema.step import (
    ADD_KEY,
    CHANGE_PARTITION,
    CHANGE_SORT,
    COMMENT,
    CREATE_TABLE,
    DESTRUCTIVE,
    DROP_TABLE,
    RENAME_TABLE,
    SAFE,
    SET_RETENTION,
    Step,
    refused,
)
from floodmark.schema.table_plan import TablePlan
from floodmark.write.current import Current, Problem

Part = TypeVar("Part", PartitionSpec, SortOrder)


def diff(wanted: Sequence[WantedTable], current: Mapping[str, Current]) -> tuple[TablePlan, ...]:
    """The plan of each wanted table, and of those that references touch. `current`: tables by their names."""
    by_name = {name.lower(): name for name in current}
    plans = []
    for table in wanted:
        there = current.get(table.name)
        other = by_name.get(table.name.lower())
        if there is None and other is not None:
            reason = f"a table {other} exists, and names must differ by more than case"
            step = refused(
                table.name, CREATE_TABLE, None, f"make {table.name}", reason, f"Use the name {other} in the file."
            )
            plans.append(TablePlan(table.name, table, None, (step,)))
        elif table.drop:
            plans.append(_dropped(table, there))
        elif table.rename_to is not None:
            plans.append(_renamed(table, there, by_name.get(table.rename_to.lower())))
        elif there is None:
            plans.append(_created(table))
        else:
            plans.append(_changed(table, there))
    return tuple(map(with_indexes, diff_references(plans, current)))


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
    back = "`undrop` brings it back until older versions expire"
    if current.head.branch != MAIN:
        back = f"older versions of {current.head.branch} keep it until they expire"
    text = f"drop {wanted.name} ({current.head.rows} rows); {back}"
    dependents = current.dependents
    problem = None
    if dependents.settings:
        names = sorted(dependents.settings)
        problem = (f"sinks follow it: {', '.join(names)}", _without_sinks(names))
    elif dependents.jobs:
        problem = (f"backfills have not ended: {', '.join(dependents.jobs)}", "Let them end, or cancel them.")
    elif dependents.branches:
        problem = _others_have_it(current)
    if problem is not None:
        step = refused(wanted.name, DROP_TABLE, None, text, *problem)
        return TablePlan(wanted.name, wanted, current, (step,))
    step = Step(wanted.name, DROP_TABLE, None, DESTRUCTIVE, text)
    return TablePlan(wanted.name, wanted, current, (step,), drop=True)


def _renamed(wanted: WantedTable, current: Current | None, taken: str | None) -> TablePlan:
    new = str(wanted.rename_to)
    text = f"rename {wanted.name} to {new}; older versions have it under its old name"
    problem: Problem | None = None
    if current is None:
        problem = ("there is no such table", "`floodmark tables` lists them.")
    elif taken is not None and taken != wanted.name:
        problem = (f"a table {taken} exists, and names must differ by more than case", "Choose another name.")
    elif current.dependents.jobs:
        problem = (f"backfills have not ended: {', '.join(current.dependents.jobs)}", "Let them end, or cancel them.")
    elif current.dependents.histories:
        reason = f"histories recorded its chunks by its name: {', '.join(current.dependents.histories)}"
        problem = (reason, "Load the history into a new table instead.")
    elif current.dependents.branches:
        problem = _others_have_it(current)
    if problem is not None:
        return TablePlan(wanted.name, wanted, current, (refused(wanted.name, RENAME_TABLE, None, text, *problem),))
    if current is not None and (sinks := sorted(current.dependents.settings)):
        text += f"; at the destinations of {', '.join(sinks)} it keeps the name that it has there"
    step = Step(wanted.name, RENAME_TABLE, None, SAFE, text)
    return TablePlan(wanted.name, wanted, current, (step,), rename_to=new)


def _others_have_it(current: Current) -> Problem:
    """A table has one name and one pointer in the lake, whatever branches have it (docs/decisions/0044)."""
    branches = current.dependents.branches
    if MAIN not in branches:
        return f"branches have it: {', '.join(branches)}", "Merge or delete the branches first."
    way = "A table has one name in the lake: do it on main, when no other branch has the table."
    return f"other branches have it: {', '.join(branches)}", way


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
    wanted = with_column_change(wanted, current)
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
    text = f"{text}; its rows are checked first"
    if current.dependents.branches:
        # Those branches have no key, so they cannot decide which rows are the same row.
        text = (
            f"{text}; it cannot be merged any more with branches that have it: {', '.join(current.dependents.branches)}"
        )
    draft.add(Step(wanted.name, ADD_KEY, None, SAFE, text))


def _key_problem(
    wanted: WantedTable, fields: Sequence[NestedField], current: Current, have: set[str]
) -> Problem | None:
    if have:
        return f"a table keeps its key ({', '.join(sorted(have))})", "Make a new table with the other key and load it."
    by_name = {field.name: field for field in fields}
    known = {field.field_id for field in current.schema.fields}
    for name in wanted.key or ():
        field = by_name.get(name)
        if field is None:
            return f"there is no column {name}", f"The columns are: {', '.join(by_name)}."
        if not can_identify(field.field_type):
            return f"{name} is a {field.field_type}", KEY_ADVICE
        if field.field_id not in known and current.head.rows:
            return f"the existing rows do not have {name} yet", "Add the column and fill it, then add the key."
    if len(set(wanted.key or ())) != len(wanted.key or ()):
        return "a column is named twice", "Name each column once."
    return None


def _diff_layout(draft: _Draft) -> None:
    wanted, current, metadata = draft.wanted, draft.current, draft.current.metadata
    if wanted.partition is not None:
        partition = wanted.partition
        text = f"partition {', '.join(partition) or 'nothing'}; new data only"
        spec = _changed_part(
            draft, CHANGE_PARTITION, text, lambda: _changed_spec(metadata, current.spec, draft.schema, partition)
        )
        draft.plan = replace(draft.plan, spec=spec)
    if wanted.sort is not None:
        sort = wanted.sort
        text = f"sort {', '.join(sort) or 'nothing'}; new data only"
        order = _changed_part(
            draft, CHANGE_SORT, text, lambda: _changed_sort(metadata, current.sort, draft.schema, sort)
        )
        draft.plan = replace(draft.plan, sort=order)


def _changed_part(draft: _Draft, action: str, text: str, change: Callable[[], Part | None]) -> Part | None:
    """What `change` finds different, with a step for it."""
    try:
        found = change()
    except Invalid as error:
        draft.add(refused(draft.wanted.name, action, None, text, str(error), error.advice))
        return None
    if found is not None:
        draft.add(Step(draft.wanted.name, action, None, SAFE, text))
    return found


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


# ── the layout of new rows ──
#
# Compared by their meaning (source and transform, source and direction), never by names or ids. A spec or order that
# the table had before is used again; a partition field that it had keeps its id and its name.


def _changed_spec(
    metadata: TableMetadata, current: PartitionSpec, schema: Schema, wanted: Sequence[str]
) -> PartitionSpec | None:
    """The spec with its ids, if it differs from the present one; `Invalid` if such a spec cannot exist."""
    spec = partition_spec(schema, wanted)
    if _parts(spec) == _parts(current):
        return None
    for known in metadata.specs().values():
        if _parts(known) == _parts(spec):
            return known
    fields = [part for known in metadata.specs().values() for part in known.fields]
    known_fields = {(part.source_id, str(part.transform)): part for part in reversed(fields)}
    next_id = max([PARTITION_FIELD_ID_START - 1, metadata.last_partition_id or 0, *(one.field_id for one in fields)])
    taken = {part.name: (part.source_id, str(part.transform)) for part in fields}
    made: list[PartitionField] = []
    for part in spec.fields:
        same = known_fields.get((part.source_id, str(part.transform)))
        if same is not None and all(same.name != one.name for one in made):
            made.append(same)
            continue
        next_id += 1
        name, mine = part.name, (part.source_id, str(part.transform))
        number = 2
        while taken.get(name, mine) != mine or any(one.name == name for one in made):
            name, number = f"{part.name}_{number}", number + 1
        made.append(PartitionField(part.source_id, next_id, part.transform, name))
    return PartitionSpec(*made, spec_id=max(metadata.specs()) + 1)


def _parts(spec: PartitionSpec) -> list[tuple[int, str]]:
    return [(part.source_id, str(part.transform)) for part in spec.fields]


def _changed_sort(
    metadata: TableMetadata, current: SortOrder, schema: Schema, wanted: Sequence[str]
) -> SortOrder | None:
    """The order with its id, if it differs from the present one."""
    order = sort_order(schema, wanted)
    if _keys(order) == _keys(current):
        return None
    for known in metadata.sort_orders:
        if _keys(known) == _keys(order):
            return known
    if not order.fields:
        return SortOrder(order_id=0)
    return SortOrder(*order.fields, order_id=max(1, *(known.order_id + 1 for known in metadata.sort_orders)))


def _keys(order: SortOrder) -> list[tuple[int, SortDirection, str]]:
    return [(part.source_id, part.direction, str(part.transform)) for part in order.fields]
