"""One run of a sink: finish the open unit, then ship what is new, table by table (protocol 4).

A question whether anything is new reads the catalog once and writes nothing. A range that no file holds anything of
moves the mark alone. Everything else is a unit: opened, shipped, settled, each step durable before the next (I7, I8,
I9). A crash, an error or a stop leaves an open unit; the next run finishes that same unit before anything newer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from floodmark import clock, log
from floodmark.catalog.sink_state import PAUSED as SINK_PAUSED
from floodmark.catalog.sink_state import Followed, Sink
from floodmark.catalog.unit import RETRY, ROWS, SEALED, Part, Shipped, Unit, UnitLog, Watch
from floodmark.catalog.units import RefusedRow, UnitLimit, choices
from floodmark.engine import Engine
from floodmark.errors import (
    BelowRetention,
    Busy,
    Conflict,
    Corrupt,
    FloodmarkError,
    Invalid,
    NotFound,
    Unavailable,
    cause_text,
)
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.model import BEGINNING, MAIN
from floodmark.reading import Changes, ReadMoment
from floodmark.rows.json.ndjson import holds
from floodmark.rows.reading.shipment import Body, Shipment, bodies, plan_shipment
from floodmark.rows.session import Sessions
from floodmark.runs import (
    BUSY,
    NOTHING_TO_DO,
    PAUSED,
    PLANNED,
    SHIPPED,
    STOPPED,
    WAITING,
    Progress,
    Report,
    Stopped,
)
from floodmark.sinks.http.policy import too_many_in_all
from floodmark.sinks.outcome import SinkRun, TableRun, outcome_of
from floodmark.sinks.quarantine import current_lines
from floodmark.sinks.settings import (
    AnySettings,
    FilesSettings,
    HttpSettings,
    WrongSetting,
    place_of,
    settings_from_json,
)
from floodmark.sinks.status import check_followed, is_current, lost_tables
from floodmark.storage import Storage

TEXT_FORMATS = frozenset({"ndjson", "jsonl"})
RELEASES_MAX = 2
# How often a table may get another name while it is looked at.
RENAMES_MAX = 5
# By table id: units that storage has and this catalog does not.
Lost = Mapping[str, Corrupt]
PARTS_SHOWN = 8
# A destination that asks for a longer pause is contacted once a day.
RETRY_AFTER_S_KEPT = 86_400.0
KEEPS_RULES = "The open unit keeps its columns and filter; `floodmark sink replay` abandons it."


@dataclass
class RunWatch:
    """How a caller stops a run and follows its progress."""

    stop: threading.Event = field(default_factory=threading.Event)
    report: Report | None = None
    table: str = ""
    rows: int = 0
    rows_max: int = 0
    size_bytes: int = 0

    def begin(self, table: str, rows_max: int) -> None:
        self.table, self.rows, self.rows_max, self.size_bytes = table, 0, rows_max, 0
        self.progress(0, 0)

    def progress(self, rows: int, size_bytes: int) -> None:
        self.rows, self.size_bytes = self.rows + rows, self.size_bytes + size_bytes
        if self.report is not None:
            self.report(Progress(self.rows, self.rows_max, table=self.table, size_bytes=self.size_bytes))

    def check(self) -> None:
        if self.stop.is_set():
            raise Stopped

    def wait(self, seconds: float) -> bool:
        return self.stop.wait(seconds)


class Destination(Protocol):
    def ship(self, unit: Unit, shipment: Shipment, log: UnitLog, watch: Watch) -> Shipped:
        """Ship every part of the unit that is not acknowledged yet, and acknowledge it."""


def open_destination(settings: AnySettings, storage: Storage, sessions: Sessions) -> Destination:
    if isinstance(settings, HttpSettings):
        from floodmark.sinks.http.destination import HttpDestination

        return HttpDestination(settings, storage, sessions)
    if isinstance(settings, FilesSettings):
        from floodmark.sinks.files.destination import FilesDestination

        return FilesDestination(settings, storage, sessions)
    from floodmark.sinks.iceberg.destination import IcebergDestination

    return IcebergDestination(settings, storage, sessions)


class SinkRunner:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._catalog = engine.catalog

    def _open_destination(self, settings: AnySettings) -> Destination:
        return open_destination(settings, self._catalog.storage, self._engine.sessions)

    # ── a run ──

    def run(self, name: str, watch: RunWatch, *, until_empty: bool = False, now: bool = False) -> SinkRun:
        """`now`: contact the destination even if it asked for a longer pause."""
        sink = self._catalog.sinks.find(name)
        if sink.state == SINK_PAUSED:
            return SinkRun(name, tuple(TableRun(one.table, PAUSED) for one in sink.tables))
        idle = is_current(sink) and sink.error is None
        if idle and self._catalog.witnesses.has_seen(sink):
            return _nothing(sink)
        if sink.error is not None and not now:
            waits_ms = self._catalog.sinks.waits_ms(sink.id)
            if waits_ms:
                return _waiting(sink, waits_ms)
        try:
            if idle and not self._catalog.witnesses.compare(sink):
                return _nothing(sink)
            self._engine.get_ready()
            # Before a mark moves: a catalog that was rolled back has fewer units than storage.
            return self._run(sink, watch, until_empty, self._catalog.witnesses.compare(sink, trim=True))
        except Invalid:
            raise  # a lake that is read-only
        except FloodmarkError as error:
            # The catalog failed between two steps: the next run resumes open units; finished units are settled.
            failed = (TableRun(one.table, outcome_of(error), since=one.mark, error=error) for one in sink.tables)
            return SinkRun(name, tuple(failed))

    def _run(self, sink: Sink, watch: RunWatch, until_empty: bool, lost: Lost) -> SinkRun:
        return self._with_lost(sink, self._run_held(sink, watch, until_empty, lost))

    def _with_lost(self, sink: Sink, run: SinkRun) -> SinkRun:
        """Report once which rows retention removed since the last run before the sink shipped them (I15)."""
        lost = self._catalog.sinks.take_lost(sink.id)
        if not lost:
            return run
        # A run has the sink's tables in their order, whatever they are called by now.
        reported = [
            replace(done, detail={**done.detail, "rows_lost": lost[one.table_id]}) if one.table_id in lost else done
            for one, done in zip(sink.tables, run.tables, strict=False)
        ]
        return SinkRun(run.sink, (*reported, *run.tables[len(reported) :]))

    def _run_held(self, sink: Sink, watch: RunWatch, until_empty: bool, lost: Lost) -> SinkRun:
        sink = self._pass_over(sink, lost)
        if is_current(sink) and not lost:
            if sink.error is not None:
                # The unit that failed then is done: its reply was lost, or an operator skipped it.
                self._catalog.sinks.forget_error(sink.id)
            return _nothing(sink)
        run = clock.new_id()
        try:
            self._catalog.sinks.take(sink.name, run)
        except Busy as error:
            return SinkRun(sink.name, tuple(TableRun(one.table, BUSY, error=error) for one in sink.tables))
        # Crash here: the lease has a dead owner; the next run takes over.
        hit("unit.held")
        try:
            # Read again: the previous owner may have worked until a moment ago.
            sink = self._catalog.sinks.find(sink.name)
            done: list[TableRun] = []
            for one in sink.tables:
                # One endpoint serves all tables: a pause that it asked for one table applies to the others.
                asked = next((table.error for table in done if table.error and _wait_ms(table.error)), None)
                done.append(
                    self._table(sink, one, run, watch, until_empty, lost) if asked is None else _left_alone(one, asked)
                )
            done += lost_tables(sink)
        except BaseException as error:
            self._release(sink, run, _shown_error(error))
            raise
        self._release(sink, run, _first_error(done), _waits_ms(done))
        return SinkRun(sink.name, tuple(done))

    def retry(self, sink: Sink, table_id: str, entries: Sequence[RefusedRow], watch: RunWatch) -> TableRun:
        """Send rows of the quarantine again. Busy if another run holds the sink."""
        run = clock.new_id()
        self._catalog.sinks.take(sink.name, run)
        try:
            # Crash here: the lease has a dead owner; the next run takes over.
            hit("unit.held")
            # By its id: it may have another name by now.
            sink = self._catalog.sinks.find(sink.name)
            done = self._retried(sink, sink.of(table_id), entries, run, watch)
        except BaseException as error:
            self._release(sink, run, _shown_error(error))
            raise
        self._release(sink, run, _first_error([done]), _waits_ms([done]))
        return done

    def _retried(
        self, sink: Sink, followed: Followed, entries: Sequence[RefusedRow], run: str, watch: RunWatch
    ) -> TableRun:
        tally = _Tally(followed)
        try:
            check_followed(sink, followed)
            _check_known(followed, self._catalog.witnesses.compare(sink))
            settings = settings_from_json(sink.kind, sink.settings)
            self._finish_open(sink, followed, run, watch, tally)
            # This run holds the sink: rows that are newer than these cannot overtake them.
            again = current_lines(
                self._engine.reader, self._catalog.storage, followed, settings, entries, sink.branch or MAIN
            )
            tally.replaced = self._catalog.units.drop_quarantined(sink, again.replaced)
            rules, units = settings.rules(), self._catalog.units
            unit = units.open_retry(sink, followed, rules, again.key, run, again.lines)
            if unit is not None:
                hit("unit.opened")
                tally.unheard = None  # of the unit that was open: its rows are in this one
                self._ship(unit, settings, run, watch, tally)
        except Stopped:
            return self._stopped(sink.name, tally)
        except FloodmarkError as error:
            if isinstance(error, WrongSetting):
                error.advise(sink.name)
            return tally.done(outcome_of(error), self._mark(sink.name, followed), error)
        return tally.finished(self._mark(sink.name, followed))

    def set_aside(self, sink: Sink, table_id: str, first: int, last: int, reason: str, watch: RunWatch) -> int:
        """Set a part of the open unit aside by hand, in the same epoch; returns its rows. Busy if a run
        holds the sink.
        """
        run = clock.new_id()
        self._catalog.sinks.take(sink.name, run)
        try:
            sink = self._catalog.sinks.find(sink.name)
            return self._set_aside(sink, sink.of(table_id), first, last, reason, run, watch)
        finally:
            # This does not resolve the failure: the error stays until a run succeeds.
            kept = None if sink.error is None else json.loads(sink.error)
            self._release(sink, run, kept)

    def _set_aside(
        self, sink: Sink, followed: Followed, first: int, last: int, reason: str, run: str, watch: RunWatch
    ) -> int:
        from floodmark.sinks.http.destination import HttpDestination

        settings = settings_from_json(sink.kind, sink.settings)
        destination = self._open_destination(settings)
        if not isinstance(destination, HttpDestination) or not isinstance(settings, HttpSettings):
            raise Invalid("only a sink over HTTP sets rows aside", sink=sink.name, kind=sink.kind)
        open_units = [self._catalog.units.read(one) for one in (followed.open_unit, followed.retry_unit) if one]
        for unit in open_units:
            unit_log = self._catalog.units.log(unit, run)
            parts = unit_log.parts()
            for part in parts:
                if (part.first, part.last, part.state) == (first, last, SEALED):
                    self._check_room(sink, followed, settings, last - first, unit)
                    data = self._text_of(unit, parts, part)
                    return destination.set_aside(unit, part, data, reason, unit_log, watch)
        waiting = [
            f"{part.first}-{part.last}"
            for unit in open_units
            for part in self._catalog.units.log(unit, run).parts()
            if part.state == SEALED
        ]
        raise Invalid(
            "no part with these rows waits to be sent",
            sink=sink.name,
            table=followed.table,
            part=f"{first}-{last}",
            waiting=", ".join(waiting[:PARTS_SHOWN]) or "none",
            advice="Use a part from the last error of the sink: `floodmark sink status` shows it.",
        )

    def _check_room(self, sink: Sink, followed: Followed, settings: HttpSettings, rows: int, unit: Unit) -> None:
        there = sum(self._catalog.units.count_quarantined(sink.id).values())
        if unit.lane != RETRY and there + rows > settings.quarantine_total_max:
            raise too_many_in_all(
                there, settings.quarantine_total_max, {"sink": sink.name, "table": followed.table, "rows": rows}
            )

    def _text_of(self, unit: Unit, parts: Sequence[Part], part: Part) -> bytes:
        """The rows of a sealed part, as they would be sent."""
        if unit.lane == RETRY:
            return b""
        known = [(one.first, one.last) for one in parts]
        mine = (part.first, part.last)
        others = [one for one in known if one != mine]
        rules = unit.rules
        found = bodies(self.shipment(unit), self._catalog.storage, rules.part_rows, rules.part_bytes, known, others)
        body = next((one for one in found if (one.first, one.last) == mine), None)
        if body is None or body.digest != part.digest:
            raise Corrupt("a part of a unit has other bytes than were recorded", unit=unit.id, part=mine)
        return body.data

    def _stopped(self, name: str, tally: _Tally) -> TableRun:
        try:
            paused = self._catalog.sinks.find(name).state == SINK_PAUSED
        except FloodmarkError:
            paused = False
        return tally.done(PAUSED if paused else STOPPED, self._mark(name, tally.followed))

    def _release(self, sink: Sink, run: str, error: Mapping[str, Json] | None, wait_ms: int | None = None) -> None:
        for _ in range(RELEASES_MAX):
            try:
                text = None if error is None else json.dumps(error)
                self._catalog.sinks.release(sink.id, run, text, wait_ms)
                return
            except Unavailable as problem:
                log.get().warning("a sink could not be released", sink=sink.name, cause=str(problem))
        # The lease of this run is not renewed any more: the next run takes the sink over.
        self._catalog.sinks.disown(run)

    def _table(
        self, sink: Sink, followed: Followed, run: str, watch: RunWatch, until_empty: bool, lost: Lost
    ) -> TableRun:
        """Ship one table of the run. Its failure does not stop the others."""
        tally = _Tally(followed)
        try:
            watch.check()
            check_followed(sink, followed)
            _check_known(followed, lost)
            settings = settings_from_json(sink.kind, sink.settings)
            self._finish_open(sink, followed, run, watch, tally)
            while self._take_new(sink.name, followed.table_id, settings, run, watch, tally) and until_empty:
                watch.check()
        except Stopped:
            return self._stopped(sink.name, tally)
        except FloodmarkError as error:
            if isinstance(error, WrongSetting):
                error.advise(sink.name)
            elif isinstance(error, Invalid) and tally.opened:
                error.advice = f"{error.advice} {KEEPS_RULES}".strip()
            return tally.done(outcome_of(error), self._mark(sink.name, followed), error)
        return tally.finished(self._mark(sink.name, followed))

    def _finish_open(self, sink: Sink, followed: Followed, run: str, watch: RunWatch, tally: _Tally) -> None:
        """Finish the unit that an earlier run left open, with the parts that it recorded."""
        settings = settings_from_json(sink.kind, sink.settings)
        for unit_id in (followed.open_unit, followed.retry_unit):
            if unit_id is not None:
                try:
                    unit = self._catalog.units.read(unit_id)
                except Corrupt as error:
                    error.advice = error.advice or choices(sink.name, followed.table)
                    raise
                tally.resumed += 1
                self._ship(unit, settings, run, watch, tally)

    def _take_new(
        self, name: str, table_id: str, settings: AnySettings, run: str, watch: RunWatch, tally: _Tally
    ) -> bool:
        """Open and ship one unit of the new rows; False if no row is new."""
        sink = self._catalog.sinks.find(name)
        # By its id: it may have another name by now.
        followed = sink.of(table_id)
        check_followed(sink, followed)
        if followed.current or self._passed_over(sink, followed):
            return False
        shipment = plan_shipment(self._new(sink, followed).plan, settings.columns, settings.where)
        check_text(shipment, settings, followed.table)
        limit = UnitLimit(settings.unit_rows, settings.unit_bytes)
        unit = self._catalog.units.open(sink, followed, settings.rules(), shipment.key, run, limit)
        if unit is None:
            return False
        # Crash here: an open unit and its pin; nothing was sent.
        hit("unit.opened")
        self._ship(unit, settings, run, watch, tally)
        return True

    def _ship(self, unit: Unit, settings: AnySettings, run: str, watch: RunWatch, tally: _Tally) -> None:
        tally.opened = True
        unit_log = self._catalog.units.log(unit, run)
        # Before the first effect outside the lake: a rollback of the catalog after this point is detected.
        self._catalog.witnesses.put(unit, place_of(settings))
        # Crash here: an open unit with its witness; nothing was sent.
        hit("unit.witnessed")
        destination = self._open_destination(settings)
        if unit.lane == RETRY:
            tally.unheard = self._ship_retry(unit, destination, unit_log, watch).error
        else:
            shipment = self.shipment(unit)
            watch.begin(unit.table, shipment.rows_max)
            destination.ship(unit, shipment, unit_log, watch)
        # Crash here: the destination has everything, the mark has not moved; the next run finds every part present.
        hit("unit.shipped")
        tally.add(self._catalog.units.settle(unit, run))
        tally.opened = False
        if unit.lane == ROWS:
            self._catalog.witnesses.saw(unit, unit.table_id, unit.epoch, unit.until)
        hit("unit.settled")
        log.get().info("settled", sink=unit.sink, table=unit.table, since=unit.since, until=unit.until, lane=unit.lane)

    def _ship_retry(self, unit: Unit, destination: Destination, unit_log: UnitLog, watch: Watch) -> Shipped:
        from floodmark.sinks.http.destination import HttpDestination

        if not isinstance(destination, HttpDestination):
            raise Invalid("this kind of sink refuses no rows, so there are none to send again", sink=unit.sink)
        lines = self._catalog.units.retry_lines(unit)
        found = (Body(place, place + 1, 0, line.encode()) for place, line in lines)
        return destination.ship_bodies(unit, found, unit_log, watch)

    # ── what is new ──

    def shipment(self, unit: Unit) -> Shipment:
        """The rows of a unit, from the version that it pinned."""
        since = None if unit.since == BEGINNING else unit.since
        # Its name at that version, which need not be the one that it is shipped under.
        heads = self._catalog.history.tables_at(unit.version).values()
        name = next((head.table for head in heads if head.table_id == unit.table_id), None)
        if name is None:
            raise Corrupt("the table of a unit does not exist at its version", unit=unit.id, table=unit.table)
        found = self._engine.reader.changes(name, since, unit.until, ReadMoment(version=unit.version))
        return plan_shipment(found.plan, unit.rules.columns, unit.rules.where)

    def plan(self, name: str) -> SinkRun:
        """What a run would do now. Changes nothing."""
        sink = self._catalog.sinks.find(name)
        lost = self._catalog.witnesses.compare(sink)
        return SinkRun(name, (*(self._planned(sink, one, lost) for one in sink.tables), *lost_tables(sink)))

    def _planned(self, sink: Sink, followed: Followed, lost: Lost) -> TableRun:
        here = TableRun(followed.table, NOTHING_TO_DO, since=followed.mark, until=followed.head_sequence)
        try:
            check_followed(sink, followed)
            _check_known(followed, lost)
            settings = settings_from_json(sink.kind, sink.settings)
            if followed.current:
                return here
            changes = self._new(sink, followed)
            if changes.empty and followed.open_unit is None:
                return here
            shipment = plan_shipment(changes.plan, settings.columns, settings.where)
        except FloodmarkError as error:
            return replace(here, outcome=outcome_of(error), error=error)
        detail = {"rows_max": shipment.rows_max, "files": len(shipment.plan.files), "open_unit": followed.open_unit}
        outcome = PAUSED if sink.state == SINK_PAUSED else PLANNED
        return replace(here, outcome=outcome, detail=detail)

    def _new(self, sink: Sink, followed: Followed) -> Changes:
        mark, moment = followed.mark if followed.mark is not None else BEGINNING, ReadMoment(branch=sink.branch or MAIN)
        since = None if mark == BEGINNING else mark
        for _ in range(RENAMES_MAX):
            try:
                found = self._engine.reader.changes(followed.table, since, None, moment)
            except BelowRetention as error:
                error.advice = choices(sink.name, followed.table, mark=False)
                raise
            except NotFound:
                found = None
            if found is not None and found.table_id == followed.table_id:
                return found
            # It has another name by now, and another table may have the one that it had a moment ago.
            sink = self._catalog.sinks.find(sink.name)
            followed = sink.of(followed.table_id)
            check_followed(sink, followed)
        raise Conflict("the table kept getting other names", sink=sink.name, table=followed.table, advice="Try again.")

    def _pass_over(self, sink: Sink, lost: Lost) -> Sink:
        """Move the marks of tables that have nothing new for any sink, for example after a compaction."""
        moved = False
        for followed in sink.tables:
            try:
                check_followed(sink, followed)
                _check_known(followed, lost)
            except FloodmarkError:
                continue  # reported by the run
            moved = (not followed.current and self._passed_over(sink, followed)) or moved
        return self._catalog.sinks.find(sink.name) if moved else sink

    def _passed_over(self, sink: Sink, followed: Followed) -> bool:
        if followed.open_unit is not None or followed.retry_unit is not None:
            return False
        try:
            changes = self._new(sink, followed)
        except FloodmarkError:
            return False  # reported by the run
        if not changes.empty or not self._catalog.units.pass_over(sink, followed, changes.until):
            return False
        if followed.epoch is not None:
            self._catalog.witnesses.saw(sink, followed.table_id, followed.epoch, changes.until)
        return True

    def _mark(self, name: str, followed: Followed) -> int | None:
        """The current mark; None if the catalog has none."""
        try:
            return self._catalog.sinks.find(name).of(followed.table_id).mark
        except FloodmarkError:
            return None


@dataclass
class _Tally:
    followed: Followed
    units: int = 0
    resumed: int = 0
    rows: int = 0
    deletions: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    replaced: int | None = None
    # A unit is open.
    opened: bool = False
    # Rows that were sent again are back in quarantine without an answer. Their unit is settled, so that they block no
    # newer rows; still, the run did not succeed.
    unheard: FloodmarkError | None = None

    def add(self, settled: dict[str, int]) -> None:
        self.units += 1
        self.rows += settled["rows"]
        self.deletions += settled["deletions"]
        self.size_bytes += settled["bytes"]
        self.quarantined += settled["quarantined"]

    def finished(self, mark: int | None) -> TableRun:
        if self.unheard is not None:
            return self.done(outcome_of(self.unheard), mark, self.unheard)
        return self.done(SHIPPED if self.units else NOTHING_TO_DO, mark)

    def done(self, outcome: str, mark: int | None, error: FloodmarkError | None = None) -> TableRun:
        return TableRun(
            self.followed.table,
            outcome,
            self.units,
            self.resumed,
            self.rows,
            self.deletions,
            self.size_bytes,
            self.quarantined,
            self.followed.mark,
            mark,
            {} if self.replaced is None else {"replaced": self.replaced},
            error,
        )


def _check_known(followed: Followed, lost: Lost) -> None:
    if followed.table_id in lost:
        raise lost[followed.table_id]


def check_text(shipment: Shipment, settings: AnySettings, table: str) -> None:
    """Check that the sink's format can represent every column, before a unit is opened that could never be shipped."""
    if settings.rules().format not in TEXT_FORMATS:
        return
    for column in shipment.schema:
        if not holds(column.type):
            raise Invalid(
                "JSON cannot hold this column",
                table=table,
                column=column.name,
                type=column.type,
                advice="Choose other columns, or a files sink with Parquet.",
            )


def _first_error(done: Sequence[TableRun]) -> Mapping[str, Json] | None:
    return next((table.error.as_dict() for table in done if table.error is not None), None)


def _shown_error(error: BaseException) -> Mapping[str, Json] | None:
    """An error as the sink's status shows it, unexpected ones too; None for an interrupt, which a person caused."""
    if not isinstance(error, Exception):
        return None
    if isinstance(error, FloodmarkError):
        return error.as_dict()
    advice = "The log of that run has more; the next run resumes the unit."
    return {
        "kind": type(error).__name__,
        "message": "the run ended with an unexpected error",
        "facts": {"cause": cause_text(error)},
        "advice": advice,
    }


def _wait_ms(error: FloodmarkError) -> int:
    """The pause that the destination asked for, up to the longest one that a run waits for."""
    asked_s = error.facts.get("retry_after_s")
    return 0 if asked_s is None else round(min(float(asked_s), RETRY_AFTER_S_KEPT) * 1000)


def _waits_ms(done: Sequence[TableRun]) -> int:
    return max((_wait_ms(table.error) for table in done if table.error), default=0)


def _waiting(sink: Sink, waits_ms: int) -> SinkRun:
    until = clock.format_time(clock.now_ms() + waits_ms)
    error = Unavailable(
        "the destination asked for a longer pause",
        sink=sink.name,
        wait_s=round(waits_ms / 1000, 1),
        until=until,
        advice="The first run after that time continues; `floodmark sink run --now` sends at once.",
    )
    return SinkRun(sink.name, tuple(_left_alone(one, error) for one in sink.tables))


def _left_alone(followed: Followed, error: FloodmarkError) -> TableRun:
    return TableRun(followed.table, WAITING, since=followed.mark, until=followed.mark, error=error)


def _nothing(sink: Sink) -> SinkRun:
    return SinkRun(
        sink.name, tuple(TableRun(one.table, NOTHING_TO_DO, since=one.mark, until=one.mark) for one in sink.tables)
    )
