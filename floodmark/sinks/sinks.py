"""`lake.sinks`: the sinks of a lake, as a user holds them.

Adding, changing and reading sinks are single transactions of the catalog; a run is `sinks/run.py`. What cannot be
undone (remove, replay, dropping refused rows) has a verb of its own and never happens by itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from floodmark import clock, log
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.catalog.sink_state import ACTIVE, PAUSED, Followed, Sink
from floodmark.catalog.units import RefusedRow
from floodmark.engine import Engine
from floodmark.errors import Busy, FloodmarkError, Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.json_form import as_json
from floodmark.maintenance.record import SINK_COMPACT, SINK_EXPIRE, SINK_VERBS, MaintenanceRun
from floodmark.model import BEGINNING, MAIN, Head
from floodmark.reading import ReadMoment
from floodmark.rows.reading.shipment import plan_shipment
from floodmark.runs import BUSY, MaintenanceCallback, Report, SinkCallback, for_maintenance, for_sink
from floodmark.runs import PAUSED as PAUSED_RUN
from floodmark.shown import Listing, SinkFacts
from floodmark.sinks.check import FAILED, READY, SinkCheck, TableCheck, check_destination
from floodmark.sinks.outcome import SinkRun, TableRun, outcome_of
from floodmark.sinks.run import RunWatch, SinkRunner, check_text
from floodmark.sinks.settings import (
    FILES,
    HTTP,
    ICEBERG,
    AnySettings,
    IcebergSettings,
    Setting,
    WrongSetting,
    check_name,
    parse_settings,
    place_of,
    settings_from_json,
    settled_paths,
)
from floodmark.sinks.status import check_followed, sink_report, sink_reports

if TYPE_CHECKING:
    from floodmark.sinks.iceberg.destination import IcebergDestination
    from floodmark.sinks.iceberg.maintain import Owner

# Where a sink starts: at the beginning, at the head (new rows only), at its mark, or after a sequence.
BEGINNING_NAME, HEAD_NAME, MARK_NAME = "beginning", "head", "mark"
# Settings that identify the destination: another value is another sink. An endpoint and a catalog may move, because
# they identify themselves.
PLACE = {HTTP: (), FILES: ("path",), ICEBERG: ("namespace", "table")}


class TableReplay(TypedDict):
    """What a replay of one table would do, in changes: to send, to send again, and never to send."""

    table: str
    mark: int | None
    start: int
    rows: int
    again: int
    skipped: int
    open_unit: str | None


class QuarantinedRow(TypedDict):
    """A row that the destination refused for good."""

    id: str
    table: str
    unit: str
    position: int
    line: str
    reason: str
    tries: int
    retry_unit: str | None
    first: str
    last: str


class LakeSinks:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._runner = SinkRunner(engine)

    def __repr__(self) -> str:
        return f"<lake.sinks of {self._catalog.location}: add, run, status, set, check, pause, resume, remove>"

    # ── definition ──

    def add(
        self,
        name: str,
        kind: str,
        *,
        tables: str | Sequence[str],
        start: str | int | None = None,
        branch: str = MAIN,
        **settings: Setting,
    ) -> SinkFacts:
        """Register a sink. Nothing is sent before its first run.

        kind: http (url, …), files (path, …) or iceberg (catalog, …). `start`: "beginning" ships all existing rows,
        "head" only new rows, a number the rows newer than that sequence. The default is the beginning; it is refused if
        a removed sink shipped to the same destination before. `branch`: the branch that it follows.
        """
        check_name(name)
        chosen = parse_settings(kind, settled_paths(settings))
        names = [tables] if isinstance(tables, str) else list(dict.fromkeys(tables))
        if not names:
            raise Invalid("a sink follows at least one table", sink=name)
        self._engine.get_ready()
        heads = [self._catalog.history.head(table, branch) for table in names]
        for head in heads:
            self._check_rows(head, chosen)
        self._check_names_there(name, chosen, {head.table: head.table_id for head in heads})
        if start is None:
            self._check_new_place(name, chosen, heads)
        begin = BEGINNING_NAME if start is None else start
        marks = {head.table: _mark_at(begin, head, None) for head in heads}
        self._catalog.sinks.add(name, kind, chosen.to_json(), heads, marks, chosen.protected)
        return self.about(name)

    def _check_names_there(self, name: str, settings: AnySettings, names: Mapping[str, str]) -> None:
        """Refuse a name under which another sink ships another table there. `names`: table ids by the name there."""
        place = place_of(settings)
        for other in self._catalog.sinks.all():
            if other.name == name or place_of(settings_from_json(other.kind, other.settings)) != place:
                continue
            for one in other.tables:
                # Tables of the lake differ by name: one of the two was renamed, and keeps its earlier name there.
                is_another = names.get(one.shipped_as, one.table_id) != one.table_id
                if is_another and one.head_id == one.table_id:
                    raise Invalid(
                        "another table is shipped there under this name",
                        sink=name,
                        table=one.shipped_as,
                        other_sink=other.name,
                        other_table=one.table,
                        advice="A table that was renamed goes on there under its earlier name. Use another destination,"
                        " or give the table another name before its sink is added.",
                    )

    def _check_new_place(self, name: str, settings: AnySettings, heads: Sequence[Head]) -> None:
        """Refuse a destination to which a removed sink shipped rows of these tables: they would arrive twice."""
        names = {head.table_id: head.table for head in heads}
        for one in self._catalog.witnesses.left(place_of(settings), names):
            again = (
                f", `--start {one.since}` its last unit again and what came after, if the catalog was not rolled back"
            )
            raise Invalid(
                "a sink that was removed, or that a rolled-back catalog lost, sent rows of this table there before",
                sink=name,
                table=names[one.table_id],
                sink_before=one.name,
                last_unit=f"{one.since}..{one.until}",
                advice=f"Add it by `floodmark sink add {name} …` with a choice where it begins: `--start beginning`"
                " sends every row (again), `--start head` only what comes from now on"
                f"{again if one.since is not None and one.since > BEGINNING else ''}.",
            )

    def set(self, name: str, **settings: Setting) -> SinkFacts:
        """Change settings; None resets one to its default.

        Settings of rows, format and parts apply from the next unit on. Settings of sending apply from the next run on,
        also to an open unit.
        """
        sink = self._catalog.sinks.find(name)
        known = json.loads(settings_from_json(sink.kind, sink.settings).to_json())
        chosen = parse_settings(
            sink.kind, {key: value for key, value in {**known, **settled_paths(settings)}.items() if value is not None}
        )
        moved = [key for key in PLACE[sink.kind] if json.loads(chosen.to_json()).get(key) != known.get(key)]
        if moved:
            raise Invalid(
                "the location of a sink cannot change",
                setting=moved[0],
                advice="Add a sink for the new location, with `--start head` if it has the rows already.",
            )
        self._engine.get_ready()
        for followed in sink.tables:
            if followed.head_id == followed.table_id:
                self._check_rows(self._head(sink, followed.table), chosen)
        if place_of(chosen) != place_of(settings_from_json(sink.kind, sink.settings)):
            self._check_names_there(name, chosen, {one.shipped_as: one.table_id for one in sink.tables})
        self._catalog.sinks.set(name, sink.settings, chosen.to_json(), chosen.protected)
        return self.about(name)

    def pause(self, name: str) -> bool:
        """Ship nothing until resumed; a running run stops at its next step. False: it was paused already."""
        self._engine.get_ready()
        return self._catalog.sinks.set_state(name, PAUSED)

    def resume(self, name: str) -> bool:
        """Let a paused sink ship again. False: it was not paused."""
        self._engine.get_ready()
        return self._catalog.sinks.set_state(name, ACTIVE)

    def remove(self, name: str) -> None:
        """Remove a sink, its marks and its quarantine; shipped rows stay at the destination. Busy while it runs."""
        self._engine.get_ready()
        self._catalog.sinks.remove(name)

    def replay(self, name: str, *, start: str | int, table: str | None = None) -> SinkFacts:
        """Open a new epoch of one table (or all): rows newer than `start` are sent again, and counted."""
        self._engine.get_ready()
        sink = self._catalog.sinks.find(name)
        settings = settings_from_json(sink.kind, sink.settings)
        names = self._names(sink, table)
        witnessed = self._catalog.witnesses.newest_epoch(sink)
        for one in names:
            head = self._head(sink, one)
            self._catalog.sinks.replay(name, head, partial(_mark_at, start, head), settings.protected, witnessed)
        return self.about(name)

    def plan_replay(self, name: str, *, start: str | int, table: str | None = None) -> list[TableReplay]:
        """What `replay` would do, per table: how many changes to send, to send again, or never to send. Changes
        nothing.
        """
        sink = self._catalog.sinks.find(name)
        known = {followed.table: followed for followed in sink.tables}
        names = self._names(sink, table)
        return [self._replayed(self._head(sink, one), start, known.get(one)) for one in names]

    def _names(self, sink: Sink, table: str | None) -> list[str]:
        """The tables of a sink as they are called now, or this one of them."""
        if table is None:
            return [*(followed.table for followed in sink.tables), *sink.lost]
        return [table] if table in sink.lost else [sink.table(table).table]

    def _replayed(self, head: Head, start: str | int, followed: Followed | None) -> TableReplay:
        mark = followed.mark if followed is not None and followed.table_id == head.table_id else None
        begin = _mark_at(start, head, mark)
        rows = self._catalog.units.lag(head.table_id, begin, head.branch).rows
        # Without a mark of this table, what was sent of it is unknown: count nothing as sent.
        waiting = rows if mark is None else self._catalog.units.lag(head.table_id, mark, head.branch).rows
        return {
            "table": head.table,
            "mark": mark,
            "start": begin,
            "rows": rows,
            "again": max(0, rows - waiting),
            "skipped": max(0, waiting - rows),
            "open_unit": None if followed is None else followed.open_unit or followed.retry_unit,
        }

    def _head(self, sink: Sink, table: str) -> Head:
        if sink.branch is None:
            raise NotFound("the branch that the sink follows was deleted", sink=sink.name, advice="Remove the sink.")
        return self._catalog.history.head(table, sink.branch)

    # ── status ──

    def status(self) -> Listing[SinkFacts]:
        """The status of every sink: see `about`."""
        return Listing(SinkFacts(as_json(report)) for report in sink_reports(self._catalog))

    def about(self, name: str) -> SinkFacts:
        """The status of a sink: mark and head, lag in rows and time, last unit, errors, quarantine, per table."""
        return SinkFacts(as_json(sink_report(self._catalog, self._catalog.sinks.find(name))))

    # ── running ──

    def check(self, name: str) -> SinkCheck:
        """Check the destination of every table of a sink, for example before its first run. Sends no row, moves no
        mark.

        Each table has an outcome, ready or failed, with the findings or the error.
        """
        sink = self._catalog.sinks.find(name)
        tables = [self._checked(sink, followed) for followed in sink.tables]
        outcome = READY if all(one["outcome"] == READY for one in tables) else FAILED
        return {"sink": name, "kind": sink.kind, "outcome": outcome, "tables": tables}

    def _checked(self, sink: Sink, followed: Followed) -> TableCheck:
        try:
            check_followed(sink, followed)
            settings = settings_from_json(sink.kind, sink.settings)
            self._check_rows(self._head(sink, followed.table), settings)
            found = check_destination(settings, self._catalog.storage, followed.shipped_as)
        except FloodmarkError as error:
            if isinstance(error, WrongSetting):
                error.advise(sink.name)
            shown = {**error.as_dict(), "exit_code": error.exit_code}
            return {"table": followed.table, "outcome": FAILED, "found": None, "error": shown}
        return {"table": followed.table, "outcome": READY, "found": found, "error": None}

    def run(
        self,
        name: str,
        *,
        until_empty: bool = False,
        dry_run: bool = False,
        now: bool = False,
        progress: SinkCallback | None = None,
        stop: threading.Event | None = None,
    ) -> SinkRun:
        """Ship new rows: first the open unit, if one exists, then one unit per table.

        With until_empty the run continues until no row is new. `stop` ends it at once; the next run resumes. A
        destination that asked for a pause is not contacted before its end, except with `now`. The record has every
        result: this raises only for a sink that does not exist and for a read-only lake.
        """
        if dry_run:
            return self._runner.plan(name)
        watch = RunWatch(stop or threading.Event(), for_sink(progress))
        return self._runner.run(name, watch, until_empty=until_empty, now=now)

    # ── tables at the destination ──

    def maintain(
        self,
        name: str,
        *,
        table: str | None = None,
        verbs: Sequence[str] = SINK_VERBS,
        files_min: int | None = None,
        keep: str | None = None,
        dry_run: bool = False,
        progress: MaintenanceCallback | None = None,
    ) -> MaintenanceRun:
        """Maintain the tables that an Iceberg sink ships to: compact, expire the sink's old snapshots, and sweep.

        `files_min`: how many small files a partition needs for a rewrite; `keep`: younger snapshots stay. Each verb on
        each table ends in a named outcome, which is recorded and not raised. A run of the sink may go on at the same
        time.
        """
        from floodmark.sinks.iceberg.destination import IcebergDestination

        sink = self._catalog.sinks.find(name)
        settings = settings_from_json(sink.kind, sink.settings)
        if not isinstance(settings, IcebergSettings):
            raise Invalid(
                "only tables that a sink of kind iceberg ships to can be maintained",
                sink=name,
                kind=sink.kind,
                advice="A files sink writes whole units that are never changed; an endpoint keeps its own rows.",
            )
        if keep is not None:
            clock.parse_duration_ms(keep)
        if not dry_run:
            self._engine.get_ready()
        destination = IcebergDestination(settings, self._catalog.storage, self._engine.sessions)
        records = [
            self._maintained(sink, one, destination, verb, files_min, keep, dry_run, for_maintenance(progress))
            for one in ([sink.table(table)] if table is not None else sink.tables)
            for verb in verbs
        ]
        return MaintenanceRun(tuple(records))

    def _maintained(
        self,
        sink: Sink,
        followed: Followed,
        destination: IcebergDestination,
        verb: str,
        files_min: int | None,
        keep: str | None,
        dry_run: bool,
        report: Report | None,
    ) -> Maintenance:
        from floodmark.sinks.iceberg.compact import compact_destination
        from floodmark.sinks.iceberg.maintain import IcebergMaintenance, Owner

        owner = Owner(sink.name, sink.id, followed.table_id)
        maintenance = IcebergMaintenance(destination, followed.shipped_as, owner, self._engine.actor)
        if verb == SINK_COMPACT:
            record = compact_destination(
                destination,
                followed.shipped_as,
                files_min,
                dry_run,
                hopeless=self._could_not_improve(owner),
                sink=(sink.name, sink.id),
                actor=self._engine.actor,
                report=report,
            )
        elif verb == SINK_EXPIRE:
            record = maintenance.expire(keep=keep, dry_run=dry_run)
        else:
            record = maintenance.sweep(lambda: self._catalog.units.open_ids(sink.id), dry_run=dry_run)
        # By sink and table, even if the destination did not identify its table: a later run replaces the record.
        record = replace(record, table_id=owner.record_id)
        if not dry_run:
            self._catalog.maintenance.record(record)
            log.get().info("maintained", verb=verb, sink=sink.name, table=record.table, outcome=record.outcome)
            hit("maintain.recorded")
        return record

    def _could_not_improve(self, owner: Owner) -> list[str]:
        """Groups of a destination's files that its last compaction could not improve."""
        last = self._catalog.maintenance.records(table_id=owner.record_id, verb=SINK_COMPACT, limit=1)
        return [str(one) for record in last for one in record.detail.get("hopeless", ())]

    # ── rows that were refused ──

    def quarantine(self, name: str, *, table: str | None = None, limit: int | None = None) -> list[QuarantinedRow]:
        """Rows that the destination refused for good, oldest first."""
        found = self._catalog.units.quarantined(self._catalog.sinks.find(name), table, limit)
        return [_quarantined_row(entry) for entry in found]

    def retry(self, name: str, *, ids: Sequence[str] | None = None, stop: threading.Event | None = None) -> SinkRun:
        """Send refused rows again, as they are now; those that a newer state replaced are dropped."""
        self._engine.get_ready()
        sink = self._catalog.sinks.find(name)
        found = self._chosen(sink, ids)
        watch = RunWatch(stop or threading.Event())
        return SinkRun(
            name,
            tuple(
                self._retry(sink, followed, mine, watch)
                for followed in sink.tables
                if (mine := [entry for entry in found if entry.table_id == followed.table_id])
            ),
        )

    def _retry(self, sink: Sink, followed: Followed, entries: Sequence[RefusedRow], watch: RunWatch) -> TableRun:
        if sink.state == PAUSED:
            return TableRun(followed.table, PAUSED_RUN)
        try:
            return self._runner.retry(sink, followed.table_id, entries, watch)
        except Busy as error:
            return TableRun(followed.table, BUSY, error=error)
        except FloodmarkError as error:
            return TableRun(followed.table, outcome_of(error), error=error)

    def set_aside(self, name: str, *, first: int, last: int, table: str | None = None, reason: str = "") -> int:
        """Put a part of the open unit, the rows [first, last), into quarantine by hand; returns how many rows.

        For a part that fails at every try. The epoch and the mark stay; the next run continues after it. If the
        destination is a lake, the sink first asks it to skip the rows; 0 if the lake has them already.
        """
        self._engine.get_ready()
        sink = self._catalog.sinks.find(name)
        if table is None:
            opened = [one.table for one in sink.tables if one.open_unit or one.retry_unit]
            if len(opened) != 1:
                known = ",".join(opened) or "none"
                raise Invalid("name the table of the part", sink=name, open=known, advice="Use --table.")
            table = opened[0]
        text = f"set aside by hand: {reason}" if reason else "set aside by hand"
        table_id = sink.table(table).table_id
        return self._runner.set_aside(sink, table_id, first, last, text, RunWatch(threading.Event()))

    def drop(self, name: str, *, ids: Sequence[str] | None = None) -> int:
        """Drop refused rows for good: all, or those with these ids. Returns how many."""
        self._engine.get_ready()
        sink = self._catalog.sinks.find(name)
        return self._catalog.units.drop_quarantined(sink, [entry.id for entry in self._chosen(sink, ids)])

    def _chosen(self, sink: Sink, ids: Sequence[str] | None) -> list[RefusedRow]:
        found = self._catalog.units.quarantined(sink)
        if ids is None:
            return found
        unknown = set(ids) - {entry.id for entry in found}
        if unknown:
            raise Invalid("no refused row has this id", sink=sink.name, id=sorted(unknown)[0])
        return [entry for entry in found if entry.id in ids]

    def _check_rows(self, head: Head, settings: AnySettings) -> None:
        """Check that columns and filter fit the table now, not in the middle of a run."""
        found = self._engine.reader.changes(head.table, None, BEGINNING, ReadMoment(branch=head.branch))
        check_text(plan_shipment(found.plan, settings.columns, settings.where), settings, head.table)


def _mark_at(start: str | int, head: Head, mark: int | None) -> int:
    """The mark to start from; `mark` is the one that the sink has on this incarnation of the table, if it has one."""
    if start == BEGINNING_NAME:
        return BEGINNING
    if start == HEAD_NAME:
        return head.sequence
    if start == MARK_NAME and mark is not None:
        if mark > head.sequence:
            raise Invalid("the mark is not of this table", table=head.table, advice="Use beginning, head or a number.")
        return mark
    if isinstance(start, int) and not isinstance(start, bool) and BEGINNING <= start <= head.sequence:
        return start
    raise Invalid(
        "invalid start",
        start=repr(start),
        table=head.table,
        newest=head.sequence,
        advice="Use beginning, head, or a sequence up to the newest; mark if there is one.",
    )


def _quarantined_row(entry: RefusedRow) -> QuarantinedRow:
    return {
        "id": entry.id,
        "table": entry.table,
        "unit": entry.unit,
        "position": entry.position,
        "line": entry.line,
        "reason": entry.reason,
        "tries": entry.tries,
        "retry_unit": entry.retry_unit,
        "first": clock.format_time(entry.first_ms),
        "last": clock.format_time(entry.last_ms),
    }
