"""Sinks in the catalog: what they are, which tables they follow, how far they are, and which run holds them.

A sink's marks are rows of fm_consumers under the name `sink:NAME`, so retention and deletions wait for them like for
any consumer. Beside them are the incarnations of the table and of the lake that they belong to. One run holds a sink at
a time, by a lease that lives as long as its process: a run that finds a dead holder takes over, and writes an audit row
for every unit that was left open (I16).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow
from floodmark.catalog.leases import SINK, Heartbeat, Runs, to_holder
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.riders import AuditRider
from floodmark.catalog.sink_state import (
    ACTIVE,
    BODY_BYTES_MAX,
    CONSUMER,
    GIVEN_UP,
    LOOKING,
    LOOKING_FOR_ONE,
    NOT_BEFORE_MS,
    OPEN,
    ROWS_LOST,
    ROWS_LOST_SAID,
    Sink,
    forget_notes,
    put_note,
    read_notes,
    to_sink,
)
from floodmark.errors import Busy, Conflict, Invalid, NotFound
from floodmark.model import BEGINNING, MAIN, SEQ_COLUMN, Head


class Sinks:
    def __init__(self, database: Database, heartbeat: Heartbeat) -> None:
        self._database = database
        self._heartbeat = heartbeat
        self._runs = Runs(SINK, heartbeat)

    # ── looking ──

    def find(self, name: str) -> Sink:
        """A sink with all that decides whether it has anything to do: one view, no write."""
        with self._database.read() as tx:
            rows = tx.execute(LOOKING_FOR_ONE, {"name": name}).all()
            if not rows:
                raise _no_sink(tx, name)
            return to_sink(rows)

    def all(self) -> list[Sink]:
        with self._database.read() as tx:
            rows = tx.execute(LOOKING).all()
            return [to_sink(list(mine)) for _, mine in groupby(rows, key=lambda row: row.name)]

    def notes(self, sink: str) -> dict[tuple[str, str], int]:
        """What a sink learned and lost, by table id (empty: of the whole sink) and name."""
        with self._database.read() as tx:
            return read_notes(tx, sink)

    def take_lost(self, sink: str) -> dict[str, int]:
        """Rows that retention removed before they were sent, by table id, if no run reported them; now one does."""
        notes = self.notes(sink)
        lost = {table: rows for (table, note), rows in notes.items() if note == ROWS_LOST}
        unsaid = {table: rows - notes.get((table, ROWS_LOST_SAID), 0) for table, rows in lost.items()}
        found = {table: rows for table, rows in unsaid.items() if rows > 0}
        if found:
            with self._database.write() as tx:
                self._database.lock_lake(tx)
                now = self._database.now_ms(tx)
                for table in found:
                    put_note(tx, sink, table, ROWS_LOST_SAID, lost[table], now)
        return found

    def waits_ms(self, sink: str) -> int:
        """How much longer the destination has asked not to be called."""
        until = self.notes(sink).get(("", NOT_BEFORE_MS))
        if until is None:
            return 0
        with self._database.read() as tx:
            return max(0, until - self._database.now_ms(tx))

    # ── changing ──

    def add(
        self, name: str, kind: str, settings: str, heads: Sequence[Head], marks: dict[str, int], protected: bool
    ) -> None:
        """Register a sink of the branch that the heads are of, and its marks, one per table, in one transaction."""
        with self._database.write() as tx:
            lake = self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            if tx.execute(select(tables.sinks.c.id).where(tables.sinks.c.name == name)).first() is not None:
                raise Invalid(
                    "there is a sink of this name", sink=name, advice="`floodmark sink set` changes its settings."
                )
            _check_names(tx, name, heads)
            sink = clock.new_id()
            tx.execute(
                insert(tables.sinks).values(
                    name=name,
                    id=sink,
                    kind=kind,
                    table_names=json.dumps([head.table for head in heads]),
                    settings=settings,
                    state=ACTIVE,
                    created_ms=now,
                    updated_ms=now,
                )
            )
            line = Lineages.read(tx).live(heads[0].branch)
            if line.id != MAIN:
                tx.execute(insert(tables.sink_lines).values(sink=sink, line=line.id))
            for head in heads:
                _follow(tx, sink, head.table, head.table_id, lake.incarnation)
                _put_mark(tx, name, head.table_id, 0, marks.get(head.table, BEGINNING), protected, now)

    def set(self, name: str, known: str, settings: str, protected: bool) -> None:
        """Replace the known settings, from the next unit on."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            if self._locked(tx, name).settings != known:
                raise Conflict("another process changed the sink's settings meanwhile", sink=name, advice="Try again.")
            now = self._database.now_ms(tx)
            mine = tables.sinks.c.name == name
            tx.execute(update(tables.sinks).where(mine).values(settings=settings, updated_ms=now))
            # Another address or part size may fix a limit that was learned: it is learned again.
            forget_notes(tx, self._locked(tx, name).id, NOT_BEFORE_MS, BODY_BYTES_MAX)
            consumer = tables.consumers
            tx.execute(update(consumer).where(consumer.c.name == CONSUMER + name).values(protected=int(protected)))

    def set_state(self, name: str, state: str) -> bool:
        """Pause or resume; False if it already is. A current run notices before its next write."""
        with self._database.write() as tx:
            row = self._locked(tx, name)
            values = {"state": state, "updated_ms": self._database.now_ms(tx)}
            tx.execute(update(tables.sinks).where(tables.sinks.c.id == row.id).values(**values))
            return bool(row.state != state)

    def remove(self, name: str) -> None:
        """Delete a sink, its marks, units, pins and quarantine. What it sent stays at the destination."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            row = self._unheld(tx, name)
            give_up_units(tx, tables.units.c.sink == row.id, self._database.now_ms(tx))
            for table in (tables.quarantine, tables.units, tables.sink_tables, tables.sink_lines, tables.sink_notes):
                tx.execute(delete(table).where(table.c.sink == row.id))
            tx.execute(delete(tables.consumers).where(tables.consumers.c.name == CONSUMER + name))
            tx.execute(delete(tables.sinks).where(tables.sinks.c.id == row.id))

    def replay(
        self, name: str, head: Head, choose: Callable[[int | None], int], protected: bool, witnessed: int = 0
    ) -> int:
        """Open a new epoch of one table; an open unit is given up, and so are refused rows that are sent again anyway.

        `choose` returns where it begins, given the mark under the lock. `witnessed`: the newest epoch that storage has.
        Returns the epoch.
        """
        with self._database.write() as tx:
            lake = self._database.lock_lake(tx)
            row = self._unheld(tx, name)
            now = self._database.now_ms(tx)
            followed, unit = tables.sink_tables, tables.units
            state = _followed(tx, row.id, head)
            if state is None:
                if head.table not in json.loads(row.table_names):
                    raise NotFound("the sink does not follow this table", sink=name, table=head.table)
                _follow(tx, row.id, head.table, head.table_id, lake.incarnation)
                state = _followed(tx, row.id, head)
            assert state is not None
            old = state.table_id
            mine = and_(followed.c.sink == row.id, followed.c.table_name == state.table_name)
            give_up_units(tx, and_(unit.c.sink == row.id, unit.c.table_id.in_((old, head.table_id))), now)
            consumer = tables.consumers
            consumers = and_(consumer.c.name == CONSUMER + name, consumer.c.table_id.in_((old, head.table_id)))
            mine_now = and_(consumers, consumer.c.table_id == head.table_id)
            mark = choose(tx.execute(select(consumer.c.mark).where(mine_now)).scalar())
            _drop_refused(tx, row.id, old, None if old != head.table_id else mark)
            known = tx.execute(select(func.max(consumer.c.epoch)).where(consumers)).scalar()
            used = tx.execute(select(func.max(unit.c.epoch)).where(unit.c.sink == row.id)).scalar()
            # Whatever was lost of these, no epoch is used twice: a destination would take its rows for known ones.
            epoch = max(known or 0, used or 0, state.replays, state.epoch_seen or 0, witnessed) + 1
            tx.execute(delete(consumer).where(consumers))
            _put_mark(tx, name, head.table_id, epoch, mark, protected, now)
            tx.execute(
                update(followed)
                .where(mine)
                .values(
                    table_id=head.table_id,
                    incarnation=lake.incarnation,
                    destination=None,
                    replays=followed.c.replays + 1,
                    retries=0,
                )
            )
            return int(epoch)

    # ── one run at a time ──

    def take(self, name: str, run: str) -> bool:
        """Hold the sink for this run, or Busy. True if its last holder died; the audit has the units it left open."""
        with self._runs.taking(run), self._database.write() as tx:
            now = self._database.now_ms(tx)
            self._heartbeat.beat(tx, now)
            row = self._unheld(tx, name)
            died = row.runner_run is not None
            if died:
                left = select(tables.units.c.id).where(tables.units.c.sink == row.id, tables.units.c.state == OPEN)
                for unit in tx.execute(left).scalars().all():
                    _audit_resumed(tx, unit, name, now)
            tx.execute(update(tables.sinks).where(tables.sinks.c.id == row.id).values(self._runs.held_by(run)))
        return died

    def disown(self, run: str) -> None:
        """This run is over, whatever the catalog records."""
        self._runs.disown(run)

    def release(self, sink: str, run: str, error: str | None, wait_ms: int | None = None) -> None:
        """Release the sink, with the run's result. No-op if another run took it over meanwhile.

        `wait_ms`: the destination asked not to be called for so long; None: its earlier request still counts.
        """
        row = tables.sinks
        with self._database.write() as tx:
            now = self._database.now_ms(tx)
            values = {**SINK.held_by(None, None), "error": error, "error_ms": now if error else None}
            mine = update(row).where(row.c.id == sink, row.c.runner_run == run)
            if tx.execute(mine.values(**values)).rowcount == 1 and wait_ms is not None:
                forget_notes(tx, sink, NOT_BEFORE_MS)
                if wait_ms:
                    put_note(tx, sink, "", NOT_BEFORE_MS, now + wait_ms, now)
        self._runs.ended(run)

    def refuse(self, sink: str, error: str) -> None:
        """Show why a sink sends nothing, unless a current run has newer information."""
        row = tables.sinks
        with self._database.write() as tx:
            now = self._database.now_ms(tx)
            idle = (row.c.id == sink) & row.c.runner_run.is_(None)
            tx.execute(update(row).where(idle).values(error=error, error_ms=now))

    def forget_error(self, sink: str) -> None:
        """The failure is resolved: remove it, unless a current run has newer information."""
        row = tables.sinks
        with self._database.write() as tx:
            idle = (row.c.id == sink) & row.c.runner_run.is_(None)
            tx.execute(update(row).where(idle).values(error=None, error_ms=None))

    def holder(self, name: str) -> str | None:
        """The current holder of the sink: host and pid, or None."""
        with self._database.read() as tx:
            row = tx.execute(_HOLDER.where(tables.sinks.c.name == name)).first()
            holder = None if row is None else to_holder(row)
            return holder.shown if holder and self._runs.is_held(holder, self._database.now_ms(tx)) else None

    def _unheld(self, tx: Connection, name: str) -> SqlRow:
        """The sink's row, locked, if no living run holds it; else Busy."""
        row = self._locked(tx, name)
        if row.runner_run is None:
            return row
        holder = to_holder(tx.execute(_HOLDER.where(tables.sinks.c.name == name)).one())
        if self._runs.is_held(holder, self._database.now_ms(tx)):
            raise Busy("another run of this sink is at work", sink=name, holder=holder.shown, advice="Try later.")
        return row

    def _locked(self, tx: Connection, name: str) -> SqlRow:
        row = tx.execute(select(tables.sinks).where(tables.sinks.c.name == name).with_for_update()).first()
        if row is None:
            raise _no_sink(tx, name)
        return row


_HOLDER = SINK.select()


def give_up_units(tx: Connection, which: ColumnElement[bool], now_ms: int) -> None:
    """End open units that will never be settled: their pins and parts go, their quarantine waits for another try."""
    unit = tables.units
    for row in tx.execute(select(unit.c.id, unit.c.pin).where(which, unit.c.state == OPEN)).all():
        tx.execute(delete(tables.pins).where(tables.pins.c.id == row.pin))
        tx.execute(delete(tables.parts).where(tables.parts.c.unit == row.id))
        entries = tables.quarantine.c.retry_unit == row.id
        tx.execute(update(tables.quarantine).where(entries).values(retry_unit=None, retry_position=None))
        tx.execute(update(unit).where(unit.c.id == row.id).values(state=GIVEN_UP, pin=None, ended_ms=now_ms))


def _drop_refused(tx: Connection, sink: str, table_id: str, mark: int | None) -> None:
    """Refused rows of a table above a mark (None: all) are sent again anyway, or belong to a table that is gone."""
    bad = tables.quarantine
    for row in tx.execute(select(bad.c.id, bad.c.line).where(bad.c.sink == sink, bad.c.table_id == table_id)).all():
        if mark is None or json.loads(row.line).get(SEQ_COLUMN, mark + 1) > mark:
            tx.execute(delete(bad).where(bad.c.id == row.id))


def _audit_resumed(tx: Connection, unit: str, sink: str, now_ms: int) -> None:
    if tx.execute(select(tables.audit.c.operation).where(tables.audit.c.operation == unit)).first() is None:
        AuditRider("unit", OPEN, "resumed", f"the run of sink {sink} died; the next one finishes it").apply(
            tx, unit, None, now_ms
        )


def _followed(tx: Connection, sink: str, head: Head) -> SqlRow | None:
    """A sink's row of the table, or of one that is gone and had its name."""
    followed, there = tables.sink_tables, tables.heads
    mine = select(followed).where(followed.c.sink == sink)
    found = tx.execute(mine.where(followed.c.table_id == head.table_id)).first()
    gone = followed.c.table_id.not_in(select(there.c.table_id))
    return found or tx.execute(mine.where(followed.c.table_name == head.table, gone)).first()


def _check_names(tx: Connection, sink: str, heads: Sequence[Head]) -> None:
    """Refuse a table that was renamed or dropped since it was looked at: the sink's names would not be the lake's."""
    row = tables.heads
    for head in heads:
        now = select(row.c.table_name).where(row.c.branch == head.branch, row.c.table_id == head.table_id)
        if tx.execute(now).scalar() != head.table:
            raise Conflict(
                "the table was renamed or dropped meanwhile",
                sink=sink,
                table=head.table,
                advice="The sink was not added. Add it with the name that the table has now.",
            )


def _follow(tx: Connection, sink: str, table: str, table_id: str, incarnation: str) -> None:
    zero = dict.fromkeys(("units", "rows_sent", "deletions_sent", "bytes_sent", "replays", "retries"), 0)
    tx.execute(
        insert(tables.sink_tables).values(
            sink=sink, table_name=table, table_id=table_id, incarnation=incarnation, **zero
        )
    )


def _put_mark(tx: Connection, name: str, table_id: str, epoch: int, mark: int, protected: bool, now_ms: int) -> None:
    tx.execute(
        insert(tables.consumers).values(
            name=CONSUMER + name,
            table_id=table_id,
            epoch=epoch,
            mark=mark,
            protected=int(protected),
            updated_ms=now_ms,
        )
    )


def _no_sink(tx: Connection, name: str) -> NotFound:
    known = tx.execute(select(tables.sinks.c.name).order_by(tables.sinks.c.name)).scalars().all()
    return NotFound(
        "there is no such sink",
        sink=name,
        sinks=",".join(known) or "none",
        advice="`floodmark sink list` shows them; `floodmark sink add` makes one.",
    )
