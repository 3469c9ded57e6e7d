"""Merge a branch into the one that it was made from, or back: all of its changes in one publish, or none.

    look       read both branches while neither moves; nothing new: up to date, without an operation
    begin      on the target; the common state and the source's head are held like a pin
    stage      table by table: rows judged three-way (rows.py), or taken, appended, replaced (plan.py)
    publish    strict: no table that was read has moved, nor the source, nor their merge base

A conflict changes nothing: the operation is undone and the conflicts are returned. If something moved, all of it is
undone and begun again, a limited number of times. If the source is deleted meanwhile it ends in Conflict, at any step.
Crash before the publish: recovery rolls it back, because no caller got an answer; after it: a commit like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
from pyiceberg.schema import Schema

from floodmark.branches.fit import misfit, own_files
from floodmark.branches.plan import (
    APPEND_ROWS,
    BY_KEY,
    CONFLICT,
    KEEP,
    NEEDED,
    NOTHING,
    OURS,
    OVERWRITE_ALL,
    REFERENCE,
    REPLACE,
    RESHAPE,
    SCHEMA,
    TAKE_TABLE,
    THEIRS,
    TableMerge,
    plan_table,
)
from floodmark.branches.records import (
    CHANGED,
    CREATED,
    IN_CONFLICT,
    MERGED,
    PLANNED,
    RESHAPED,
    UP_TO_DATE,
    Merged,
    RowConflict,
    TableDiff,
)
from floodmark.branches.rows import Conflicts, Counted, KeyedMerge, KeyedRows, Unseen, Writer, written_values
from floodmark.branches.unkeyed import append_rows, overwrite_rows, replace_rows
from floodmark.branches.view import BranchView, SideFiles, TableSides, look, same_ground, schema_at
from floodmark.catalog.merge_base import KEPT, REPLACED, MergeBase, MergeRider, merged_sequences, since_sequence
from floodmark.catalog.riders import PlanAgain, VersionRider
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import new_snapshot_id
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, check_riders, publish
from floodmark.commit.seal import TAKE, Edit
from floodmark.commit.shape_riders import PolicyRider
from floodmark.engine import Engine
from floodmark.errors import Conflict, Corrupt, NotFound
from floodmark.failpoints import hit
from floodmark.model import Head
from floodmark.rows.rewriting.three_way import row_schema
from floodmark.rows.schema import user_fields
from floodmark.write.change import Change
from floodmark.write.current import CurrentTables, needed, used_by_name
from floodmark.write.options import WriteOptions
from floodmark.write.prune import key_fields
from floodmark.write.refusals import Offends
from floodmark.write.step import DELETE_KEYS, MERGE
from floodmark.write.table import TableChange

KIND = "branch_merge"
TRIES_MAX = 5
# Rows of the source come with new sequences, also where the target has equal ones.
REWRITE_EQUAL = WriteOptions(skip_unchanged=False)


@dataclass(frozen=True)
class MergeRequest:
    """What to merge, and how: `prefer` (ours, theirs) settles conflicts; `limit` of them are returned as data."""

    source: str
    target: str
    prefer: str | None = None
    limit: int = 1000


def merge(engine: Engine, request: MergeRequest, intent: Intent) -> Merged:
    catalog = engine.catalog
    plan = _Merge(engine, request, intent, catalog.branches.merge_base(request.source, request.target))
    with _deletion_is_conflict(catalog, plan.first):
        commit = publish(catalog, intent, plan)
    merged = plan.merged
    return replace(merged, commit=commit) if merged.outcome == MERGED else merged


def plan_merge(catalog: Catalog, request: MergeRequest, intent: Intent) -> Merged:
    """What a merge would do now: counted, not done. Writes nothing (I17)."""
    view = look(catalog, request.source, request.target)
    check_riders(catalog, intent, _expected(intent, view, request))
    if _is_known(view):
        return Merged(UP_TO_DATE, request.source, request.target)
    with _deletion_is_conflict(catalog, view.edge):
        return _outcome(PLANNED, request, *_Stage(catalog, view, request, None).run())


# ── one try ──


class _Merge(PublishPlan):
    stages_again = True
    plans_max = TRIES_MAX

    def __init__(self, engine: Engine, request: MergeRequest, intent: Intent, first: MergeBase) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._request = request
        self._intent = intent
        # The two branches as they were when the merge was requested: later ones with the same names do not count.
        self.first = first
        self.merged = Merged(UP_TO_DATE, request.source, request.target)
        self._view: BranchView
        self._change: Change | None = None

    def start(self) -> Start | None:
        request, first = self._request, self.first
        self._view = view = look(self._catalog, request.source, request.target)
        if (view.edge.source.id, view.edge.target.id) != (first.source.id, first.target.id):
            raise Conflict(
                "a branch was deleted and created again meanwhile", source=request.source, target=request.target
            )
        check_riders(self._catalog, self._intent, _expected(self._intent, view, request))
        if _is_known(view):
            self.merged = Merged(UP_TO_DATE, request.source, request.target)
            return None
        table_ids = [one.facts.source.table_id for one in view.tables if one.facts.source is not None]
        return Start(held_version=min(view.edge.common_version, view.edge.source_head), turn=table_ids)

    def stage(self, work: Publication) -> None:
        request, edge = self._request, self._view.edge
        # From begin on the versions are held that this view was read at; if it is still true, it stays so.
        if not same_ground(self._catalog.branches.merge_base(request.source, request.target), edge):
            raise PlanAgain(request.source, "the branch moved before the operation was begun")
        self._change = change = Change(self._engine, self._intent)
        change.stage(work)
        stage = _Stage(self._catalog, self._view, request, change)
        tables, conflicts = stage.run()
        if not conflicts.total:
            _look_for_orphans(change, conflicts)
        self.merged = _outcome(MERGED, request, tables, conflicts)
        change.ride(
            MergeRider(
                source=edge.source.id,
                source_name=edge.source.name,
                source_version=edge.source_head,
                target=edge.target.id,
                child=edge.child.id,
                common_version=edge.common_version,
                source_since=edge.source_since,
                settled=stage.settled,
            )
        )

    def plan(self) -> Planned:
        # With conflicts nothing is published: the conflicts are returned.
        if self._change is None or self.merged.outcome == IN_CONFLICT:
            return Planned()
        return self._change.plan()

    def expected(self, intent: Intent, planned: Planned) -> tuple[VersionRider, ...]:
        return _expected(intent, self._view, self._request)

    def kept_changing(self) -> Conflict:
        return Conflict(
            "the branches kept changing during this merge",
            source=self._request.source,
            target=self._request.target,
            tries=TRIES_MAX,
            advice="Run it again when there are fewer writers.",
        )

    @property
    def used_spark(self) -> bool:
        return self._change is not None and self._change.used_spark

    @property
    def leftovers(self) -> bool:
        return self._change is not None and self._change.leftovers


def _is_known(view: BranchView) -> bool:
    """The source has nothing that the target does not have."""
    if view.edge.source_head == view.edge.source_since:
        return True
    return all(plan_table(one.facts).kind == NOTHING for one in view.tables)


def _expected(intent: Intent, view: BranchView, request: MergeRequest) -> tuple[VersionRider, ...]:
    """A caller who expects a version expects it of both branches: of each table that the merge does something about."""
    touched = [one.facts for one in view.tables if plan_table(one.facts, request.prefer).kind != NOTHING]
    ours, theirs = (
        [(head.table_id, head.table) for head in heads if head is not None]
        for heads in ([one.target for one in touched], [one.source for one in touched])
    )
    return (*intent.expecting(ours), *intent.expecting(theirs, branch=request.source))


def _look_for_orphans(change: Change, conflicts: Conflicts) -> None:
    """References that the merge would orphan are conflicts too: one side deleted what the other refers to."""
    try:
        change.check()
    except Offends as error:
        for offence in error.offences:
            for value in offence.values.to_pylist():
                key = {offence.column: value}
                conflicts.add(RowConflict(offence.table, REFERENCE, key, about=offence.other))


def _outcome(outcome: str, request: MergeRequest, tables: list[TableDiff], conflicts: Conflicts) -> Merged:
    if conflicts.total:
        found = tuple(conflicts.found)
        return Merged(IN_CONFLICT, request.source, request.target, conflicts=found, conflicts_total=conflicts.total)
    return Merged(outcome, request.source, request.target, tables=tuple(tables))


@contextmanager
def _deletion_is_conflict(catalog: Catalog, edge: MergeBase) -> Iterator[None]:
    """If a file or a branch is gone, and the branch is gone too, another process deleted the branch meanwhile."""
    try:
        yield
    except (NotFound, Corrupt, FileNotFoundError) as error:
        source, target = edge.source.name, edge.target.name
        try:
            now = catalog.branches.merge_base(source, target)
            gone = (now.source.id, now.target.id) != (edge.source.id, edge.target.id)
        except NotFound:
            gone = True
        if gone:
            raise Conflict("a branch was deleted while it was merged", source=source, target=target) from error
        raise


# ── tables ──


class _Stage:
    """Stages all tables of a merge; without a change it only counts."""

    def __init__(self, catalog: Catalog, view: BranchView, request: MergeRequest, change: Change | None) -> None:
        self._catalog = catalog
        self._view = view
        self._request = request
        self._change = change
        self._conflicts = Conflicts(request.limit)
        # By table id, how conflicts of whole tables are settled.
        self.settled: dict[str, str] = {}
        self._current: CurrentTables | None = None

    def run(self) -> tuple[list[TableDiff], Conflicts]:
        """What each table gets; the staged files are useless once a conflict is found."""
        plans = [(one, plan_table(one.facts, self._request.prefer)) for one in self._view.tables]
        for sides, plan in plans:
            if plan.kind == CONFLICT:
                self._conflicts.add(RowConflict(plan.table, plan.reason))
            if plan.settled and sides.facts.source is not None:
                self.settled[sides.facts.source.table_id] = plan.settled
        diffs = [self._table(sides, plan) for sides, plan in plans if plan.kind not in (NOTHING, CONFLICT, KEEP)]
        return [diff for diff in diffs if diff is not None], self._conflicts

    def _table(self, sides: TableSides, plan: TableMerge) -> TableDiff | None:
        if plan.kind == TAKE_TABLE:
            return self._take(sides)
        facts = sides.facts
        assert facts.source is not None
        assert facts.target is not None
        schema = schema_at(self._catalog, facts.source if plan.theirs_shape else facts.target)
        files = SideFiles(self._catalog, self._view.edge, sides, schema)
        self._look_for_lost(sides, plan, schema)
        if plan.theirs_shape and plan.kind in (APPEND_ROWS, RESHAPE):
            plan = self._fitting(files, facts.target, plan)
            if plan.kind == KEEP:
                return None
        if plan.theirs_shape:
            self._look_for_users(facts.target, schema)
        table = self._planned_on(facts.target)
        if table is not None and plan.theirs_shape:
            table.reshape(schema, facts.source.spec_id)
            if plan.kind in (BY_KEY, APPEND_ROWS, RESHAPE):
                table.fill_files(own_files(files, files.target))
                # Crash here: filled files in the operation's own folder; recovery deletes them.
                hit(f"{KIND}.rewritten")
        counted = Counted()
        if plan.kind == BY_KEY:
            counted = self._keyed(files, table, facts.target, plan)
        elif plan.kind == APPEND_ROWS:
            counted = append_rows(self._catalog, files, self._change, table)
        elif plan.kind == REPLACE:
            counted = replace_rows(self._catalog, files, table)
        elif plan.kind == OVERWRITE_ALL:
            counted = overwrite_rows(self._catalog, files, self._change)
        elif plan.kind != RESHAPE:
            raise Corrupt("a merge has no such plan", table=plan.table, plan=plan.kind)
        change = RESHAPED if plan.theirs_shape else CHANGED
        diff = TableDiff(plan.table, change, counted.added, counted.updated, counted.deleted)
        return diff if counted or plan.theirs_shape else None

    def _look_for_lost(self, sides: TableSides, plan: TableMerge, schema: Schema) -> None:
        """A column that one side dropped, and into which the other wrote: a conflict, unless the drop is preferred."""
        ours = plan.theirs_shape
        head = sides.facts.target if ours else sides.facts.source
        if head is None or sides.facts.common is None or self._request.prefer == (THEIRS if ours else OURS):
            return
        own = schema_at(self._catalog, head)
        filled = fills_of(self._catalog.files.metadata(head.metadata_location).properties, own)
        known = schema_at(self._catalog, sides.facts.common).field_ids
        gone = set(known) - set(schema.field_ids) - {fill.field_id for fill in filled}
        lost = [column.name for column in user_fields(own) if column.field_id in gone]
        if not lost:
            return
        edge = self._view.edge.turned() if ours else self._view.edge
        with self._catalog.database.read() as tx:
            since, merged = since_sequence(tx, edge, head.table_id), merged_sequences(tx, edge, head.table_id)
        writer = Writer(head, own, since, frozenset(merged))
        wrote = live_files(self._catalog.files, head, own, since)
        common = live_files(self._catalog.files, sides.facts.common, own)
        key = [column.name for column in key_fields(own)]
        for rows, base in written_values(self._catalog.storage, writer, wrote, common, lost):
            self._conflicts.add_column(plan.table, ", ".join(lost), key, rows, base, ours=ours)

    def _look_for_users(self, target: Head, schema: Schema) -> None:
        """Columns that go, or get other names, and what uses them on the target: a conflict, whatever is preferred.

        A rider checks in the publish that nothing began to use one meanwhile. Main's retention follows a rename.
        """
        names = {column.field_id: column.name for column in user_fields(schema)}
        own = user_fields(schema_at(self._catalog, target))
        moved = [column for column in own if names.get(column.field_id) != column.name]
        if not moved:
            return
        self._current = self._current or CurrentTables(self._catalog)
        table = self._current.read(target)
        # Those that the table will still have.
        fills = fills_of(table.metadata.properties, schema)
        for column in moved:
            if column.field_id in names:
                problem = used_by_name(table, column, fills)
            else:
                problem = needed(table, column, fills=fills)
            if problem is not None:
                reason, way = problem
                self._conflicts.add(RowConflict(target.table, NEEDED, about=f"{column.name}: {reason}. {way}"))
        if self._change is None or self._conflicts.total:
            return
        self._change.ride(table.names_rider())
        policy = table.policy
        renamed = {column.name: names[column.field_id] for column in moved if column.field_id in names}
        if policy.column in renamed:
            was = (policy.retention, policy.column)
            self._change.ride(PolicyRider(target.table_id, policy.retention, renamed[policy.column], was))

    def _fitting(self, files: SideFiles, target: Head, plan: TableMerge) -> TableMerge:
        """The plan, if the target's own files fit into the source's shape. Else it is a conflict, or that side wins."""
        if misfit(self._catalog, files, target, files.target) is None:
            return plan
        if self._request.prefer == THEIRS:
            self.settled[target.table_id] = REPLACED
            return replace(plan, kind=OVERWRITE_ALL)
        if self._request.prefer == OURS:
            self.settled[target.table_id] = KEPT
        else:
            self._conflicts.add(RowConflict(plan.table, SCHEMA))
        return replace(plan, kind=KEEP)

    def _keyed(self, files: SideFiles, table: TableChange | None, target: Head, plan: TableMerge) -> Counted:
        """Merge by key. Rows that only the target has may lack what the source's shape requires: then no side wins."""
        if table is None or not plan.theirs_shape:
            return self._by_key(files, table)
        try:
            counted = self._by_key(files, table)
            lacks = misfit(self._catalog, files, target, table.working_files()) is not None
        except Corrupt:
            # Such rows cannot even be carried into a file of the new shape.
            if misfit(self._catalog, files, target, files.target) is None:
                raise
            counted, lacks = Counted(), True
        if lacks:
            self._conflicts.add(RowConflict(target.table, SCHEMA))
        return counted

    def _planned_on(self, head: Head) -> TableChange | None:
        """The working state of the target's table, which must be at the planned head; None if nothing is staged."""
        if self._change is None or self._conflicts.total:
            return None
        table = self._change.table(head.table)
        if table.head is None or (table.head.table_id, table.head.snapshot) != (head.table_id, head.snapshot):
            raise PlanAgain(head.table, "the table moved before anything was staged")
        table.strict = True
        return table

    def _take(self, sides: TableSides) -> TableDiff:
        head = sides.facts.source
        assert head is not None
        if self._change is not None and not self._conflicts.total:
            location = self._catalog.files.metadata(head.metadata_location).location
            self._change.give(
                replace(
                    Edit.at(head, location, new_snapshot_id(), action=TAKE, checked=True),
                    rows_added=head.rows,
                    source_branch=self._view.edge.source.name,
                ),
                taken=head,
            )
        return TableDiff(head.table, CREATED, rows_added=head.rows)

    def _by_key(self, files: SideFiles, table: TableChange | None) -> Counted:
        unseen = self._unseen(files)
        lacking = () if unseen is None else unseen.columns
        rows = KeyedRows(self._catalog.storage, files, unseen=unseen)
        merge = KeyedMerge(files.head.table, rows, self._request.prefer, self._conflicts)
        if table is None or self._change is None:
            _drain(merge.upserts())
            _drain(merge.deletions())
            return merge.counted
        schema = row_schema(files.schema)
        names = [name for name in schema.names if name not in lacking]
        self._change.write(MERGE, table.name, _reader(schema, names, merge.upserts()), REWRITE_EQUAL)
        self._change.write(DELETE_KEYS, table.name, _reader(schema, list(table.key), merge.deletions()))
        if self._request.prefer == OURS:
            kept = _reader(schema, schema.names, merge.kept(table.report_deleted))
            self._change.write(MERGE, table.name, kept, REWRITE_EQUAL)
        return merge.counted

    def _unseen(self, files: SideFiles) -> Unseen | None:
        columns = _filled_by_target(self._catalog, files)
        if not columns:
            return None
        back, table_id = self._view.edge.turned(), files.head.table_id
        with self._catalog.database.read() as tx:
            return Unseen(tuple(columns), since_sequence(tx, back, table_id), merged_sequences(tx, back, table_id))


def _filled_by_target(catalog: Catalog, files: SideFiles) -> list[str]:
    """The columns that the target fills by an expression and the source does not have."""
    target = files.sides.facts.target
    assert target is not None
    known = schema_at(catalog, files.head).field_ids
    fills = fills_of(catalog.files.metadata(target.metadata_location).properties, files.schema)
    return [fill.column for fill in fills if fill.field_id not in known]


def _reader(schema: pa.Schema, names: list[str], parts: Iterator[pa.Table]) -> pa.RecordBatchReader:
    kept = pa.schema([schema.field(name) for name in names])
    return pa.RecordBatchReader.from_batches(kept, (b for part in parts for b in part.select(names).to_batches()))


def _drain(parts: Iterator[pa.Table]) -> None:
    for _ in parts:
        pass
