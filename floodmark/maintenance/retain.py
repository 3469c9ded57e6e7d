"""Retention: one publish of kind `retain` removes the rows that a table's policy does not keep any more.

Whole files are dropped by what the catalog records of them, unopened; files that hold due rows among others are
rewritten without them, and the rows that stay keep their sequences (I6). No deletions file is written: readers of
changes see nothing of it. A row with a sequence above the lowest mark of a protected consumer stays (I15). Marks are
read before the rewrite, and again under the lake's lock in the publish: a consumer that was added meanwhile is safe
too. With `force` such rows are removed, and the rows that each consumer will never see are counted; a consumer that
moved on while rows were rewritten lost fewer than that. Due rows that are added while it runs may wait for the next
run; what must stay is checked again on every new head. Crash anywhere: the old files or the new; recovery undoes what
was not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from floodmark.catalog.maintenance_state import Consumer, Policy
from floodmark.catalog.riders import MarksRider, PlanAgain, Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import schema_of
from floodmark.engine import Engine
from floodmark.errors import Conflict
from floodmark.json_form import Json, as_json
from floodmark.maintenance.policy import (
    SEQUENCE_MAX,
    CountAbove,
    Rule,
    Share,
    newest_rows_cut,
    oldest_files,
    read_rule,
    share_before,
    share_up_to,
    span,
)
from floodmark.model import BEGINNING, Head
from floodmark.rows.rewriting.rewrite import ALL, BY_TIME, Rewrite, Rewritten
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.staging.stage import StageTarget
from floodmark.runs import NOTHING_TO_DO, PROTECTED, RETAINED, Progress, Report
from floodmark.write.options import WriteOptions
from floodmark.write.step import RETAIN, Removed, TableState
from floodmark.write.verbs import write


@dataclass(frozen=True)
class RetentionPlan:
    """The plan of a retention. `cut`: the first time that stays, or the sequence up to which rows are due.

    rows_due: rows that the policy does not keep; rows_going of them are removed, rows_protected wait for a consumer.
    Dropped files are removed as a whole, with bytes_going bytes. lost: removed rows, by consumer that has not seen
    them. kept_without_time: rows without a time, if the table's statistics show them.
    """

    table: str
    policy: str
    column: str | None
    cut: str | int | None
    rows_due: int = 0
    rows_going: int = 0
    rows_protected: int = 0
    files_dropped: int = 0
    files_rewritten: int = 0
    bytes_going: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    kept_without_time: int | None = None

    @property
    def outcome(self) -> str:
        """Its outcome once it is done."""
        if self.rows_going:
            return RETAINED
        return PROTECTED if self.rows_protected else NOTHING_TO_DO

    def as_dict(self) -> dict[str, Json]:
        found = as_json(self)
        return {name: value for name, value in found.items() if name != "kept_without_time" or value is not None}


def plan_retention(
    engine: Engine,
    head: Head,
    policy: Policy,
    *,
    now_ms: int | None = None,
    force: bool = False,
) -> RetentionPlan:
    """What `retain` would do to the table at this head. Reads rows where statistics are not enough; writes nothing."""
    retention = Retention(engine.catalog, head.table_id, policy, now_ms, force)
    return retention.look(_state(engine, head))


def retain(
    engine: Engine,
    intent: Intent,
    head: Head,
    policy: Policy,
    *,
    now_ms: int | None = None,
    force: bool = False,
    report: Report | None = None,
) -> tuple[str, dict[str, Json]]:
    """Remove what the policy does not keep. Returns the outcome and what was done:

    retained: rows were removed. protected: rows are due, and all of them wait for a consumer. nothing_to_do: none is
    due. Reports files now and then while they are rewritten.
    """
    retention = Retention(engine.catalog, head.table_id, policy, now_ms, force)
    state = _state(engine, head)
    made: tuple[int, int] | None = None

    def staged(files: int, size_bytes: int) -> None:
        if report is not None:
            report(Progress(files, None, RETAIN, head.table, size_bytes))

    if retention.may_go(state):
        intent = replace(intent, kind=RETAIN)
        commit = write(
            engine,
            intent,
            head.table,
            None,
            WriteOptions(remover=retention, progress=None if report is None else staged),
        )
        if commit.tables:
            made = commit.version, commit.table(head.table).rows_deleted
    else:
        retention.look(state)
    # The version that it made; if none, the table's version that it read.
    version, rows = made or (retention.version, 0)
    plan = retention.planned
    return plan.outcome, {**plan.as_dict(), "version": version, "rows_removed": rows}


def _state(engine: Engine, head: Head) -> TableState:
    """The table to read, not to write."""
    catalog = engine.catalog
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    target = StageTarget.to_read(schema, catalog.storage)
    files = live_files(catalog.files, head, schema)
    return TableState(head, metadata, schema, files, Runner(engine.storage, engine.sessions, "plan"), target)


class Retention:
    """Removes from one table what its policy does not keep: a remover of one operation (write/step.py)."""

    def __init__(self, catalog: Catalog, table_id: str, policy: Policy, now_ms: int | None, force: bool) -> None:
        self._catalog = catalog
        self._table_id = table_id
        self._policy = policy
        self._force = force
        self._now_ms = _database_now_ms(catalog) if now_ms is None else now_ms
        self._removal = Removal()
        self._reach = BEGINNING
        # The last plan, and the version of the table that it is for.
        self.planned: RetentionPlan
        self.version: int

    def may_go(self, table: TableState) -> bool:
        """False if the catalog proves that no row is removed."""
        return self._sort_out(table)[1].may_go

    def look(self, table: TableState) -> RetentionPlan:
        self._take_out(table, look_only=True)
        return self.planned

    def remove(self, table: TableState) -> Removed:
        return self._take_out(table, look_only=False)

    def recheck(self, table: TableState) -> None:
        """The table changed since it was planned: the rows that were to stay must still be enough."""
        rule, cut = self._rule(table), self._removal.cut
        if rule.rows is not None and cut is not None:
            now = newest_rows_cut(table.files, rule.rows, _counter(table))
            if now is None or now < cut:
                raise PlanAgain(table.head.table, "rows to keep were deleted meanwhile")
        if rule.size_bytes is not None:
            gone = sum(file.size_bytes for file in self._removal.dropped)
            if sum(file.size_bytes for file in table.files) - gone < rule.size_bytes:
                raise PlanAgain(table.head.table, "files to keep were removed meanwhile")

    def riders(self) -> tuple[Rider, ...]:
        counted = {consumer.name: consumer.mark for consumer in self._removal.consumers}
        lost = sorted(self.planned.lost.items())
        return (MarksRider(self._table_id, self._reach, self._force, tuple(sorted(counted.items())), tuple(lost)),)

    def _rule(self, table: TableState) -> Rule:
        return read_rule(self._policy, table.schema, table.metadata.specs()[table.head.spec_id])

    def _sort_out(self, table: TableState) -> tuple[Rule, Removal]:
        if table.head.table_id != self._table_id:
            raise Conflict("the table was dropped or created again meanwhile", table=table.head.table)
        rule = self._rule(table)
        # Asked for every plan: a consumer may have been added since the last one.
        consumers = self._catalog.maintenance.consumers(self._table_id)
        return rule, sort_out(rule, table, consumers, now_ms=self._now_ms, force=self._force)

    def _take_out(self, table: TableState, *, look_only: bool) -> Removed:
        """Rewrite the files that are not dropped as a whole, and count; `look_only`: only count."""
        rule, removal = self._sort_out(table)
        marks = removal.marks
        seq_max = removal.seq_max if removal.seq_max in marks else None  # above all rows: no need to read sequences
        rewrite = Rewrite(table.target, ALL, look_only=look_only, seq_max=seq_max, marks=marks)
        results = [table.runner.run(rewrite, [table.source(file) for file in removal.opened])]
        if rule.column is not None:
            time = (rule.column.field_id, rule.before(self._now_ms))
            searched = [table.source(file) for file in removal.searched]
            results.append(table.runner.run(replace(rewrite, find=BY_TIME, time=time), searched))
        removed = Removed(removal.dropped, tuple(results))
        looked = [file for result in results for file in result.files]
        self._removal = removal
        self._reach = removal.reach(looked)
        self.planned, self.version = _plan(table, rule, removal, removed, self._now_ms), table.head.version
        return removed


# ── which files ──


@dataclass(frozen=True)
class Removal:
    """A table's files by what retention does to them, as far as the catalog determines it.

    dropped: every row is removed. kept: every row is due, and none is removed. opened: rows up to seq_max are removed.
    searched: of those, rows before a time are removed. cut: the sequence up to which rows are due, if that decides.
    seq_max: rows above it stay: the cut, or what a protected consumer has not seen.
    """

    consumers: tuple[Consumer, ...] = ()
    cut: int | None = None
    seq_max: int | None = None
    dropped: tuple[LiveFile, ...] = ()
    kept: tuple[LiveFile, ...] = ()
    opened: tuple[LiveFile, ...] = ()
    searched: tuple[LiveFile, ...] = ()

    @property
    def may_go(self) -> bool:
        highest = _or_highest(self.seq_max)
        return bool(self.dropped) or any(span(file)[0] <= highest for file in (*self.opened, *self.searched))

    @property
    def marks(self) -> tuple[int, ...]:
        """The sequences above which rows are counted in files that are read; no row is above any other mark."""
        newest = max((span(file)[1] for file in (*self.opened, *self.searched)), default=BEGINNING)
        wanted = {self.seq_max, self.cut, *(consumer.mark for consumer in self.consumers)}
        return tuple(sorted(mark for mark in wanted if mark is not None and mark < newest))

    def reach(self, looked: Sequence[Rewritten]) -> int:
        """No removed row has a sequence above this."""
        touched = {file.path for file in looked if file.removed} | {file.path for file in self.dropped}
        files = (*self.dropped, *self.opened, *self.searched)
        highest = max((span(file)[1] for file in files if file.path in touched), default=BEGINNING)
        return min(highest, _or_highest(self.seq_max))


def sort_out(rule: Rule, table: TableState, consumers: Sequence[Consumer], *, now_ms: int, force: bool) -> Removal:
    """Which files are dropped, kept or read. Reads sequences if it needs them to find the newest rows."""
    marks = [consumer.mark for consumer in consumers if consumer.protected and not force]
    cut: int | None = None
    due: dict[str, Share] = {}
    if rule.rows is not None:
        cut = newest_rows_cut(table.files, rule.rows, _counter(table))
        due = {file.path: Share.NONE if cut is None else share_up_to(file, cut) for file in table.files}
        marks += [] if cut is None else [cut]
    elif rule.size_bytes is not None:
        oldest = oldest_files(table.files, rule.size_bytes)
        cut = max((span(file)[1] for file in oldest), default=None)
        due = {file.path: Share.ALL for file in oldest}
    elif rule.column is not None:
        before = rule.before(now_ms)
        due = {file.path: share_before(file, rule.column, before, table.metadata) for file in table.files}
    seq_max = min(marks, default=None)
    # The oldest files are dropped whole or not at all.
    places = {Share.NONE: "kept", Share.SOME: "opened" if rule.size_bytes is None else "kept", Share.ALL: "dropped"}
    found: dict[str, list[LiveFile]] = {"dropped": [], "kept": [], "opened": [], "searched": []}
    for file in table.files:
        share = due.get(file.path, Share.NONE)
        if share is Share.SOME:
            found["opened" if rule.column is None else "searched"].append(file)
        elif share is Share.ALL:
            found[places[share_up_to(file, _or_highest(seq_max))]].append(file)
    return Removal(tuple(consumers), cut, seq_max, **{place: tuple(files) for place, files in found.items()})


def _or_highest(sequence: int | None) -> int:
    return SEQUENCE_MAX if sequence is None else sequence


# ── how many rows ──


def _counter(table: TableState) -> CountAbove:
    """Counts rows by their sequences, reading these alone."""

    def count_above(files: Sequence[LiveFile], edges: Sequence[int]) -> Sequence[int]:
        rewrite = Rewrite(table.target, ALL, look_only=True, marks=tuple(edges))
        found = table.runner.run(rewrite, [table.source(file) for file in files]).files
        return [sum(file.above[place] for file in found) for place in range(len(edges))]

    return count_above


def _plan(table: TableState, rule: Rule, removal: Removal, removed: Removed, now_ms: int) -> RetentionPlan:
    looked = [file for result in removed.results for file in result.files]
    rows = {file.path: file.rows for file in (*removal.opened, *removal.searched)}
    emptied = {file.path for file in looked if file.removed == rows[file.path]}
    whole = [file for file in (*removal.dropped, *removal.opened, *removal.searched) if file.path in emptied]
    whole += removal.dropped
    marks, cut = removal.marks, removal.cut if rule.rows is not None else None
    due = sum(file.rows for file in (*removal.dropped, *removal.kept))
    due += sum(file.found - _above(file, marks, cut) for file in looked)
    return RetentionPlan(
        table.head.table,
        rule.text,
        None if rule.column is None else rule.column.name,
        removal.cut if rule.column is None else rule.before_text(now_ms),
        rows_due=due,
        rows_going=removed.rows,
        rows_protected=due - removed.rows,
        files_dropped=len(whole),
        files_rewritten=sum(1 for file in looked if file.removed) - len(emptied),
        bytes_going=sum(file.size_bytes for file in whole),
        lost=_lost(table, removal, looked),
        kept_without_time=_without_time(table, rule),
    )


def _lost(table: TableState, removal: Removal, looked: Sequence[Rewritten]) -> dict[str, int]:
    """Per consumer, how many removed rows it has not seen. Dropped files are read only if bounds are not enough."""
    lost = {}
    for consumer in removal.consumers:
        mark = consumer.mark
        shares = {file.path: share_up_to(file, mark) for file in removal.dropped}
        unclear = [file for file in removal.dropped if shares[file.path] is Share.SOME]
        rows = sum(file.rows for file in removal.dropped if shares[file.path] is Share.NONE)
        rows += _counter(table)(unclear, [mark])[0]
        if mark < _or_highest(removal.seq_max):
            marks = removal.marks
            rows += sum(_above(file, marks, mark) - _above(file, marks, removal.seq_max) for file in looked)
        lost[consumer.name] = rows
    return {name: rows for name, rows in lost.items() if rows}


def _above(file: Rewritten, marks: Sequence[int], mark: int | None) -> int:
    return file.above[marks.index(mark)] if mark is not None and mark in marks else 0


def _without_time(table: TableState, rule: Rule) -> int | None:
    if rule.column is None:
        return None
    nulls = [(file.data_file.null_value_counts or {}).get(rule.column.field_id) for file in table.files]
    return None if None in nulls else sum(count for count in nulls if count is not None)


def _database_now_ms(catalog: Catalog) -> int:
    with catalog.database.read() as tx:
        return catalog.database.now_ms(tx)
