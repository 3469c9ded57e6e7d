"""Apply: all steps of a plan in one publish; the old schema of every table or the new one, never a mixture (I2).

A straight line of the protocol's steps. Checks of rows, and fills, hold for the files that were live then: if other
files were added, the publish is refused, and only those are checked or filled before the next try. Steps without a
check are built on newer rows unchanged: rows are read by field id, so they fit the new schema. Crash anywhere: nothing
of it is published; recovery rolls it back, because it has no identity that would make it repeatable. A turn that it
held ends with its recovery, or with its lease.

Indexes are declared by riders of the publish. They are intent and no state: a plan of nothing else is one transaction
of the catalog and makes no version, and what another process did to indexes meanwhile makes no plan stale.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from floodmark.catalog.indexes import DeclareRider
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import absent_fields, fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.journal import Operation
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import new_metadata, new_snapshot_id, schema_of
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, check_expected, publish, unchanged
from floodmark.commit.references import Reference, reference_property, referrer_property
from floodmark.commit.seal import DROP, RENAME, Edit
from floodmark.commit.shape_riders import DropRider, PolicyRider, RenameRider
from floodmark.engine import Engine
from floodmark.errors import Conflict, Invalid
from floodmark.failpoints import hit
from floodmark.model import DECLARED, MAIN, Commit, FileRecord, Head
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.staging.stage import StageTarget
from floodmark.rows.tasks import is_little
from floodmark.schema.plan import Plan, Seen, make_plan, seen
from floodmark.schema.row_checks import refused_by_rows
from floodmark.schema.step import ADD_INDEX, DROP_INDEX, Step
from floodmark.schema.table_plan import TablePlan
from floodmark.storage import join
from floodmark.write.table import check_records, tables_at_head

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame

KIND = "apply"


def apply_plan(
    engine: Engine,
    intent: Intent,
    plan: Plan,
    *,
    again: Callable[[], Plan] | None = None,
    fill_later: bool = False,
    allow_destructive: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
) -> Commit:
    """Do the steps of the plan, in one version; `nothing_to_do` if it has none.

    `again` makes the plan anew: if tables moved meanwhile, and it has the same steps, they are done on the new state.
    Without it a plan is stale as soon as a table that it read moved: `Conflict`. `fill_later` leaves older rows without
    the defaults of new columns. Without `allow_destructive` a plan that loses data is `Invalid`. `on_plan` gets
    the plan that was done, or that had no steps.
    """
    _check_steps(plan.refused)
    _check_destructive(plan, allow_destructive)
    applied = _Apply(engine, intent, plan, again, fill_later, allow_destructive)
    if plan.outcome == "nothing_to_do" or plan.only_indexes:
        check_expected(engine.catalog, intent, _existing(plan))
        applied.check_fresh()
        commit = unchanged(engine.catalog, intent)
    else:
        if fill_later:
            _check_fill_later(plan, {one.name: one.current.head for one in plan.tables if one.current is not None})
        commit = publish(engine.catalog, intent, applied)
    if commit.outcome != "committed" and applied.declare():
        commit = replace(commit, outcome=DECLARED)
    applied.forget()
    if on_plan is not None:
        on_plan(applied.wanted)
    return commit


class _Apply(PublishPlan):
    def __init__(
        self,
        engine: Engine,
        intent: Intent,
        plan: Plan,
        again: Callable[[], Plan] | None,
        fill_later: bool,
        allow_destructive: bool,
    ) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._intent = intent
        # The newest plan.
        self.wanted = plan
        self._again = again
        self._fill_later = fill_later
        self._allow_destructive = allow_destructive
        # Chosen once: every try makes the same tables and the same snapshots.
        self._made = {
            table.name: _new_table(self._catalog, table.name) for table in plan.tables if table.shape is not None
        }
        self._snapshots = {table.name: new_snapshot_id() for table in plan.tables}
        self._runner: Runner
        self._filling: _Filling | None = None
        self._is_first = True
        # By table, the files that the newest try checked or filled.
        self._known: dict[str, frozenset[str]] = {}

    def start(self) -> Start:
        existing = [table.current.metadata.location for table in self.wanted.tables if table.current is not None]
        return Start([*existing, *(made.location for made in self._made.values())])

    def stage(self, work: Publication) -> None:
        sessions = self._engine.sessions
        self._runner = Runner(self._catalog.storage, sessions, work.operation.id)
        if not self._fill_later:
            others = tables_at_head(self._catalog, sessions, self._intent.branch)
            self._filling = _Filling(self._catalog, self._runner, work.operation, others)

    def plan(self) -> Planned:
        first, self._is_first = self._is_first, False
        heads = self._heads()
        # It is planned anew at every try: heads do not show everything that it depends on.
        if self._moved(heads, rows_matter=first) or not first:
            if not self._plan_anew() or self.wanted.only_indexes:
                check_expected(self._catalog, self._intent, _existing(self.wanted))
                return Planned()
            heads = self._heads()
            if self._moved(heads, rows_matter=False):
                raise PlanAgain(self.wanted.tables[0].name, "the tables changed while they were planned again")
        edits = self._look_and_fill(heads)
        # Crash here: files in the operation's own folders; recovery deletes them (I3, I10).
        hit("apply.rewritten")
        return Planned(edits, tuple(_make_riders(self.wanted, heads, self._made)))

    def kept_changing(self) -> Conflict:
        return Conflict(
            "the tables kept changing while this plan was applied",
            plans=self.plans_max,
            advice="Run it again when there are fewer writers.",
        )

    @property
    def used_spark(self) -> bool:
        return self._runner.used_spark

    # ── indexes ──

    def declare(self) -> bool:
        """Change the indexes as the plan wants, without a version; whether any changed."""
        riders = self._index_riders()
        changed = bool(riders) and self._catalog.indexes.change(riders)
        if riders:
            # Crash here: they are declared; another apply has nothing to do.
            hit("index.declared")
        return changed

    def forget(self) -> None:
        """The next write of this process makes segments for the new indexes."""
        for rider in self._index_riders():
            self._engine.segments.forget(rider.table_id)

    def _index_riders(self) -> tuple[DeclareRider, ...]:
        if not any(table.declared or table.undeclared for table in self.wanted.tables):
            return ()
        return _index_riders(self.wanted, self._heads(), self._made)

    def check_fresh(self) -> None:
        """Conflict if a plan that an operator agreed to is stale."""
        if self._again is None and self.wanted.steps:
            self._moved(self._heads(), rows_matter=True)

    # ── the state it depends on ──

    def _heads(self) -> dict[str, Head]:
        return {head.table: head for head in self._catalog.history.heads(self._intent.branch)}

    def _moved(self, heads: dict[str, Head], *, rows_matter: bool) -> bool:
        """Whether a table that the plan read has changed; from the second try on, only its schema and layout count.

        The next try checks and fills rows that were added since. A table to be dropped must be unchanged to the last
        row.
        """
        gone = {table.name for table in self.wanted.tables if table.drop}
        for planned in self.wanted.heads:
            now = seen(planned[0], heads.get(planned[0]))
            whole = rows_matter or planned[0] in gone
            if now != planned and (whole or _shape(now) != _shape(planned)):
                return self._is_stale(planned[0], _seen_text(planned), _seen_text(now))
        # A table that removes rows by age cannot be referred to.
        parents = {link.parent for table in self.wanted.tables for link in table.links}
        for table in self.wanted.tables:
            matters = table.policy is not None or table.moves_names or table.name in parents
            if matters and table.current is not None and self.wanted.branch == MAIN:
                planned_policy, policy = (
                    table.current.policy,
                    self._catalog.maintenance.policy(table.current.head.table_id),
                )
                if policy != planned_policy:
                    return self._is_stale(table.name, f"keeps {planned_policy.retention}", f"keeps {policy.retention}")
        return False

    def _is_stale(self, table: str, planned: str, now: str) -> bool:
        if self._again is not None:
            return True
        raise Conflict(
            "the lake changed since the plan was created",
            table=table,
            planned=planned,
            now=now,
            advice="Create the plan again and check it.",
        )

    def _plan_anew(self) -> bool:
        """Plan on the current state; False if another process has done it, so that nothing is left to do."""
        if self._again is None:
            self.wanted = self._the_same_again()
            return True
        plan = self._again()
        if plan.outcome == "nothing_to_do":
            self.wanted = plan
            return False
        _check_steps(plan.refused)
        _check_destructive(plan, self._allow_destructive)
        if _actions(plan) != _actions(self.wanted) or _places(plan) != _places(self.wanted):
            raise Conflict("the plan changed while it was applied", advice="Run it again.")
        self.wanted = plan
        return True

    def _the_same_again(self) -> Plan:
        """A plan that an operator agreed to, on the current state; stale if it would differ now."""
        wanted = [table.wanted for table in self.wanted.tables if table.wanted is not None]
        plan = make_plan(self._catalog, wanted, self.wanted.origin, self.wanted.branch)
        if plan.refused:
            first = plan.refused[0]
            self._is_stale(first.table, "all steps can be done", f"{first.text}: {first.reason}")
        _check_destructive(plan, self._allow_destructive)
        if plan.contents != self.wanted.contents:
            before = {table.name: table.contents() for table in self.wanted.tables if table.changes}
            after = {table.name: table.contents() for table in plan.tables if table.changes}
            name = next(one for one in sorted({*before, *after}) if before.get(one) != after.get(one))
            self._is_stale(name, f"plan {self.wanted.contents}", f"plan {plan.contents}")
        # Keep the state that the operator agreed to.
        return replace(plan, heads=self.wanted.heads)

    # ── rows ──

    def _look_and_fill(self, heads: dict[str, Head]) -> tuple[Edit, ...]:
        if self._filling is None:
            _check_fill_later(self.wanted, heads)
        files = {table.name: self._live(heads[table.name]) for table in self.wanted.tables if table.current is not None}
        parents = {link.parent for table in self.wanted.tables for link in table.links}
        looked = {table.name for table in self.wanted.tables if table.looks} | parents
        before = {name: known for name, known in self._known.items() if name in looked}
        self._known = {name: frozenset(file.path for file in files[name]) for name in looked & set(files)}
        if self._known != before:
            _check_steps(refused_by_rows(self._catalog.storage, self.wanted, files))
        filled = {
            table.name: self._filling.fill(table, heads[table.name], files[table.name])
            for table in self.wanted.tables
            if table.fills and table.current is not None and self._filling is not None
        }
        return _make_edits(self.wanted, heads, self._made, self._snapshots, filled, frozenset(self._known))

    def _live(self, head: Head) -> list[LiveFile]:
        metadata = self._catalog.files.metadata(head.metadata_location)
        return live_files(self._catalog.files, head, schema_of(metadata, head))

    def recheck(self, edit: Edit, head: Head) -> None:
        """Refused if a table whose rows were checked, or that is to be dropped, has another snapshot now."""
        if edit.action == DROP:
            raise PlanAgain(edit.table, "rows were added to a table that was to be dropped")
        if frozenset(self._catalog.files.data_files(head)) != self._known.get(edit.table):
            raise PlanAgain(edit.table, "files were added that were not checked")


def _new_table(catalog: Catalog, name: str) -> _NewTable:
    table_id = str(uuid.uuid4())
    return _NewTable(table_id, join(catalog.location, "tables", f"{name}.{table_id[:8]}"))


def _existing(plan: Plan) -> list[tuple[str, str]]:
    """The tables that were asked for, by id and name, without new ones."""
    asked = (table for table in plan.tables if table.wanted is not None)
    return [(table.current.head.table_id, table.name) for table in asked if table.current is not None]


def _actions(plan: Plan) -> list[tuple[str, str, str | None]]:
    """The steps of the plan, without the number of rows that they affect, and without indexes."""
    indexes = (ADD_INDEX, DROP_INDEX)
    return [(step.table, step.action, step.column) for step in plan.steps if step.action not in indexes]


def _places(plan: Plan) -> list[tuple[str, str | None]]:
    """The location of each table: the operation has claimed its folders there."""
    return [(one.name, None if one.current is None else one.current.metadata.location) for one in plan.tables]


def _shape(state: Seen) -> tuple[str | None, int, int]:
    return state[1], state[3], state[4]


def _seen_text(state: Seen) -> str:
    return "none" if state[1] is None else f"snapshot {state[2]}, schema {state[3]}, spec {state[4]}"


def _check_steps(refused: Sequence[Step]) -> None:
    if refused:
        first = refused[0]
        raise Invalid(
            "the plan has steps that cannot be done" if len(refused) > 1 else "the plan has a step that cannot be done",
            steps="; ".join(f"{step.table}: {step.text}: {step.reason}" for step in refused),
            advice=first.way,
        )


def _check_destructive(plan: Plan, allowed: bool) -> None:
    if plan.destructive and not allowed:
        flag = "--allow-destructive"
        # Tables from settings have no known file here; a command without the file could mean another one.
        again = f"`{shlex.join(['floodmark', 'apply', plan.file, flag])}`" if plan.file else f"{flag} with the command"
        raise Invalid(
            "the plan has steps that lose data" if len(plan.destructive) > 1 else "the plan has a step that loses data",
            steps="; ".join(f"{step.table}: {step.text}" for step in plan.destructive),
            advice=f"If that is what you want: {again}, allow_destructive=True in Python.",
        )


def _check_fill_later(plan: Plan, heads: Mapping[str, Head]) -> None:
    for table in plan.tables:
        for fill in table.fills:
            column = table.final_schema.find_field(fill.field_id)
            if column.required and table.current is not None and heads[table.name].rows:
                raise Invalid(
                    "a column that is never null cannot be filled later",
                    table=table.name,
                    column=column.name,
                    advice="Leave `required` out until it is filled, or fill it now.",
                )


# ── edits and riders, pure ──


@dataclass(frozen=True)
class _NewTable:
    """The identity and the location of a table to be created."""

    table_id: str
    location: str


@dataclass(frozen=True)
class _FilledFiles:
    """Files of a table that were rewritten with their new columns: the old files, and their replacements."""

    removed: tuple[LiveFile, ...] = ()
    added: tuple[FileRecord, ...] = ()


def _make_edits(
    plan: Plan,
    heads: Mapping[str, Head],
    made: Mapping[str, _NewTable],
    snapshots: Mapping[str, int],
    filled: Mapping[str, _FilledFiles],
    looked: Collection[str],
) -> tuple[Edit, ...]:
    """The plan in the publisher's form, one edit per table.

    `looked`: tables whose edits are valid only with the rows that were checked.
    """
    references = _reference_properties(plan, heads, made)
    edits = []
    for table in plan.tables:
        properties = {**table.properties, **references.get(table.name, {})}
        if table.shape is not None:
            edits.append(_create(table, made[table.name], properties))
        elif table.drop:
            edits.append(_drop(table, heads[table.name]))
        elif table.rename_to is not None:
            edit = _write(table, heads[table.name], snapshots[table.name], properties, _FilledFiles(), checked=False)
            edits.append(replace(edit, action=RENAME, renamed_to=table.rename_to))
        elif table.current is not None and (table.changes or properties):
            rows = filled.get(table.name, _FilledFiles())
            edits.append(
                _write(table, heads[table.name], snapshots[table.name], properties, rows, checked=table.name in looked)
            )
    return tuple(edits)


def _create(table: TablePlan, made: _NewTable, properties: Mapping[str, str]) -> Edit:
    shape = table.shape
    assert shape is not None
    metadata = new_metadata(
        made.location, made.table_id, shape.schema, shape.spec, shape.sort, {**shape.properties, **properties}
    )
    return Edit.create(table.name, metadata)


def _drop(table: TablePlan, head: Head) -> Edit:
    assert table.current is not None
    return Edit.at(head, table.current.metadata.location, action=DROP, checked=True)


def _write(
    table: TablePlan, head: Head, snapshot: int, properties: Mapping[str, str], rows: _FilledFiles, *, checked: bool
) -> Edit:
    assert table.current is not None
    edit = Edit.at(head, table.current.metadata.location, snapshot, checked=checked)
    edit = edit.reshape(table.schema, spec=table.spec, sort=table.sort, properties=properties)
    return edit.exchange(rows.added, rows.removed, same_rows=bool(rows.removed))


def _reference_properties(
    plan: Plan, heads: Mapping[str, Head], made: Mapping[str, _NewTable]
) -> dict[str, dict[str, str]]:
    """By table, the properties that new references write: in the referring table, and in the one it refers to."""

    def table_id(name: str) -> str:
        return made[name].table_id if name in made else heads[name].table_id

    found: dict[str, dict[str, str]] = {}
    for table in plan.tables:
        for link in table.links:
            parent_id = table_id(link.parent)
            reference = Reference(table_id(table.name), link.field_id, link.parent, parent_id, link.parent_field_id)
            found.setdefault(table.name, {}).update([reference_property(reference)])
            found.setdefault(link.parent, {}).update([referrer_property(reference, table.name)])
    return found


def _index_riders(plan: Plan, heads: Mapping[str, Head], made: Mapping[str, _NewTable]) -> tuple[DeclareRider, ...]:
    """What the plan changes of indexes, of tables that exist or are made."""
    # A table that another process made meanwhile is that one.
    ids = {name: new.table_id for name, new in made.items()} | {name: head.table_id for name, head in heads.items()}
    changed = (table for table in plan.tables if table.declared or table.undeclared)
    return tuple(DeclareRider(ids[one.name], one.declared, one.undeclared) for one in changed if one.name in ids)


def _make_riders(plan: Plan, heads: Mapping[str, Head], made: Mapping[str, _NewTable]) -> tuple[Rider, ...]:
    riders: list[Rider] = [*_index_riders(plan, heads, made)]
    for table in plan.tables:
        if table.drop:
            head = heads[table.name]
            riders.append(DropRider(head.table_id, table.name, head.branch))
            continue
        if table.rename_to is not None:
            head = heads[table.name]
            riders.append(RenameRider(head.table_id, table.name, table.rename_to, head.branch))
            continue
        if table.policy is not None:
            was: tuple[str | None, str | None] = (None, None)
            if table.current is not None:
                was = (table.current.policy.retention, table.current.policy.column)
            table_id = made[table.name].table_id if table.name in made else heads[table.name].table_id
            riders.append(PolicyRider(table_id, table.policy.retention, table.policy.column, was))
        if table.moves_names and table.current is not None:
            riders.append(table.current.names_rider())
    return tuple(riders)


# ── files with the defaults of new columns ──


@dataclass(frozen=True)
class _Group:
    """Files that were filled together: they are replaced together, or not."""

    files: tuple[LiveFile, ...]
    records: tuple[FileRecord, ...]

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(file.path for file in self.files)


class _Filling:
    """What one operation has filled so far, by table: each file once, however often the plan is made.

    Rows keep their sequences (I6). A crash leaves files in the operation's own folder that nothing refers to (I3).
    """

    def __init__(
        self, catalog: Catalog, runner: Runner, operation: Operation, tables: Callable[[str], DataFrame]
    ) -> None:
        self._catalog = catalog
        self._runner = runner
        self._operation = operation
        self._tables = tables
        self._done: dict[str, tuple[StageTarget, list[_Group]]] = {}

    def fill(self, table: TablePlan, head: Head, files: Sequence[LiveFile]) -> _FilledFiles:
        """All these files with the table's new columns; files that were filled before are not filled again."""
        target = self._target(table)
        known, groups = self._done.get(table.name, (target, []))
        live = {file.path for file in files}
        # Schema or layout changed, or a file is not live any more: the fill cannot be used.
        groups = [group for group in groups if known == target and group.paths <= live]
        done = frozenset(path for group in groups for path in group.paths)
        for unit in _units([file for file in files if file.path not in done]):
            groups.append(_Group(unit, self._fill(table, target, unit)))
        self._done[table.name] = (target, groups)
        records = tuple(record for group in groups for record in group.records)
        check_records(records, target.folder)
        return _FilledFiles(tuple(file for group in groups for file in group.files), records)

    def _target(self, table: TablePlan) -> StageTarget:
        assert table.current is not None
        metadata = table.current.metadata
        target = StageTarget.of(
            metadata,
            self._operation.folder(metadata.location, "data"),
            self._catalog.storage,
            schema=table.final_schema,
            spec=table.spec or table.current.spec,
            sort=table.sort or table.current.sort,
            settled=True,
        )
        return replace(target, properties={**metadata.properties, **table.properties})

    def _fill(self, table: TablePlan, target: StageTarget, files: Sequence[LiveFile]) -> tuple[FileRecord, ...]:
        schema = table.final_schema
        fills = fills_of(target.properties, schema)
        return self._runner.fill(
            target,
            [InputFile.of(file, absent=absent_fields(file, fills, schema)) for file in files],
            table.fills,
            table=table.name,
            source_schema=schema,
            tables=self._tables,
        )


def _units(files: Sequence[LiveFile]) -> list[tuple[LiveFile, ...]]:
    """Few rows are filled here, a file at a time; many are one job for Spark."""
    if not files:
        return []
    rows, size_bytes = sum(file.rows for file in files), sum(file.size_bytes for file in files)
    if is_little(rows, size_bytes):
        return [(file,) for file in files]
    return [tuple(files)]
