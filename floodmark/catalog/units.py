"""Units in the catalog: opened before their first effect outside, settled with the mark, in one transaction each.

`open` and `settle` are the two ends of protocol 4. Between them a unit's parts are recorded before they are sent and
acknowledged after (I8). Every write checks that the run still holds the sink: a run that lost it stops (Fenced), and a
run whose sink was paused stops too. A row that the destination refused for good is quarantined in the same transaction
that passes it.

Crash anywhere: an open unit with its pin; the next run of the sink finishes that same unit. Parts that are sealed and
not acknowledged may be at the destination or not, and are sent again under the same names. A lost reply to COMMIT is
Unavailable: the next run reads what is true (I13).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow, SqlValue
from floodmark.catalog.history import LIVE
from floodmark.catalog.lineage import Lineages, on_parts
from floodmark.catalog.sink_state import (
    BODY_BYTES_MAX,
    CONSUMER,
    GIVEN_UP,
    OPEN,
    PAUSED,
    ROWS_DOUBTFUL,
    SETTLED,
    Followed,
    Sink,
    add_to_note,
    put_note,
    read_notes,
)
from floodmark.catalog.unit import ACKNOWLEDGED, QUARANTINED, RETRY, ROWS, SEALED, Part, Rules, Settled, Unit
from floodmark.errors import BelowRetention, Conflict, Corrupt, Fenced, NotFound
from floodmark.model import BEGINNING, MAIN
from floodmark.runs import Stopped


def check_held(tx: Connection, sink: str, run: str, *, paused: bool = False) -> None:
    """The run still holds the sink, and the sink is not paused (`paused`: finished work may still be recorded)."""
    row = tx.execute(select(tables.sinks).where(tables.sinks.c.id == sink).with_for_update()).first()
    if row is None or row.runner_run != run:
        raise Fenced("another run took this sink over, or it was removed", advice="Nothing is lost: stop here.")
    if row.state == PAUSED and not paused:
        raise Stopped


def open_row(tx: Connection, unit: Unit) -> SqlRow:
    row = tx.execute(select(tables.units).where(tables.units.c.id == unit.id)).first()
    if row is None or row.state != OPEN:
        raise Fenced("another process ended this unit", unit=unit.id)
    return row


class Log:
    """The parts of one open unit, written by the run that ships it (catalog/unit.py, UnitLog)."""

    def __init__(self, database: Database, unit: Unit, run: str) -> None:
        self._database = database
        self._unit = unit
        self._run = run

    def parts(self) -> list[Part]:
        row = tables.parts
        with self._database.read() as tx:
            found = tx.execute(select(row).where(row.c.unit == self._unit.id).order_by(row.c.first))
            return [Part(one.first, one.last, one.digest, one.state, one.detail) for one in found]

    def destination(self) -> str | None:
        state = tables.sink_tables
        mine = and_(state.c.sink == self._unit.sink_id, state.c.table_id == self._unit.table_id)
        with self._database.read() as tx:
            return tx.execute(select(state.c.destination).where(mine)).scalar()

    def settled_until(self) -> int | None:
        """The end of the last settled unit of this epoch; ranges without rows may have been passed since."""
        row, unit = tables.units, self._unit
        mine = and_(row.c.sink == unit.sink_id, row.c.table_id == unit.table_id, row.c.lane == unit.lane)
        query = select(func.max(row.c.until)).where(mine, row.c.epoch == unit.epoch, row.c.state == SETTLED)
        with self._database.read() as tx:
            return tx.execute(query).scalar()

    def settled_units(self) -> list[Settled]:
        row, unit = tables.units, self._unit
        mine = and_(row.c.sink == unit.sink_id, row.c.table_id == unit.table_id, row.c.lane == unit.lane)
        done = and_(mine, row.c.epoch == unit.epoch, row.c.state == SETTLED, row.c.rows_sent > 0)
        with self._database.read() as tx:
            found = tx.execute(select(row).where(done).order_by(row.c.until.desc()))
            return [Settled(one.id, one.since, one.until) for one in found]

    def knows(self, unit: str, epoch: int) -> bool:
        row, state = tables.units, tables.sink_tables
        known = select(row.c.id).where(row.c.id == unit, row.c.sink == self._unit.sink_id)
        with self._database.read() as tx:
            if tx.execute(known).first() is not None:
                return True
        # Only the run that holds the sink may refuse: an overtaken run may find a unit that was opened since.
        with self._writing(paused=True) as tx:
            if tx.execute(known).first() is not None:
                return True
            mine = and_(state.c.sink == self._unit.sink_id, state.c.table_id == self._unit.table_id)
            seen = tx.execute(select(state.c.epoch_seen).where(mine)).scalar() or 0
            tx.execute(update(state).where(mine).values(epoch_seen=max(seen, epoch)))
        return False

    def seal(self, parts: Sequence[Part]) -> None:
        with self._writing() as tx:
            self._insert(tx, parts)

    def acknowledge(self, parts: Sequence[Part], destination: str | None = None) -> None:
        row = tables.parts
        # Also if the sink was paused meanwhile: the rows are at the destination.
        with self._writing(paused=True) as tx:
            if parts or destination is not None:
                self._check_destination(tx, destination)
            for part in parts:
                mine = and_(row.c.unit == self._unit.id, row.c.first == part.first, row.c.last == part.last)
                done = and_(mine, row.c.state == SEALED)
                if tx.execute(update(row).where(done).values(state=ACKNOWLEDGED, detail=part.detail)).rowcount == 1:
                    self._add_up(tx, part)
                    self._deliver(tx, part)

    def quarantined(self) -> int:
        """How many rows of the sink are in quarantine, over all its tables and units."""
        bad = tables.quarantine
        with self._database.read() as tx:
            return int(tx.execute(select(func.count()).where(bad.c.sink == self._unit.sink_id)).scalar_one())

    def body_bytes_max(self) -> int | None:
        with self._database.read() as tx:
            return read_notes(tx, self._unit.sink_id).get(("", BODY_BYTES_MAX))

    def remember_bytes_max(self, size_bytes: int) -> None:
        with self._writing() as tx:
            put_note(tx, self._unit.sink_id, "", BODY_BYTES_MAX, size_bytes, self._database.now_ms(tx))

    def note(self, part: Part) -> None:
        """Record a part's detail while it is not done; its sealed fields stay (I8)."""
        row = tables.parts
        with self._writing() as tx:
            mine = and_(row.c.unit == self._unit.id, row.c.first == part.first, row.c.last == part.last)
            if tx.execute(update(row).where(mine, row.c.state == SEALED).values(detail=part.detail)).rowcount != 1:
                raise Corrupt("a part does not exist, or is done", unit=self._unit.id, part=f"{part.first}-{part.last}")

    def split(self, whole: Part, halves: Sequence[Part], *, doubtful: int = 0) -> None:
        row = tables.parts
        with self._writing() as tx:
            self._doubt(tx, doubtful)
            mine = and_(row.c.unit == self._unit.id, row.c.first == whole.first, row.c.last == whole.last)
            if tx.execute(delete(row).where(mine, row.c.state == SEALED)).rowcount != 1:
                raise Corrupt("a part to split does not exist", unit=self._unit.id, first=whole.first)
            self._insert(tx, halves)

    def quarantine(
        self, part: Part, data: bytes, reason: str | None, *, doubtful: int = 0, passed: bool = False
    ) -> None:
        row, bad = tables.parts, tables.quarantine
        with self._writing() as tx:
            now = self._database.now_ms(tx)
            mine = and_(row.c.unit == self._unit.id, row.c.first == part.first, row.c.last == part.last)
            if tx.execute(update(row).where(mine, row.c.state == SEALED).values(state=QUARANTINED)).rowcount != 1:
                return  # recorded by an earlier try
            self._doubt(tx, doubtful)
            unit = tables.units
            rows = part.last - part.first
            more: dict[str, SqlValue] = {"quarantined": unit.c.quarantined + rows}
            if passed:
                more["passed"] = func.coalesce(unit.c.passed, 0) + rows
            tx.execute(update(unit).where(unit.c.id == self._unit.id).values(**more))
            if self._unit.lane == RETRY:
                entry = and_(bad.c.retry_unit == self._unit.id, bad.c.retry_position == part.first)
                again = {"tries": bad.c.tries + 1, "reason": bad.c.reason if reason is None else reason}
                tx.execute(update(bad).where(entry).values(**again, last_ms=now))
                return
            same = {"sink": self._unit.sink_id, "table_id": self._unit.table_id, "unit": self._unit.id}
            fields = {**same, "reason": reason, "tries": 1, "first_ms": now, "last_ms": now}
            entries = [
                {**fields, "id": clock.new_id(), "position": position, "line": line.decode()}
                for position, line in enumerate(data.splitlines(keepends=True), part.first)
            ]
            tx.execute(insert(bad), entries)

    def _doubt(self, tx: Connection, rows: int) -> None:
        """So many rows may be at the destination, and may arrive once more under another key."""
        unit = self._unit
        add_to_note(tx, unit.sink_id, unit.table_id, ROWS_DOUBTFUL, rows, self._database.now_ms(tx))

    @contextmanager
    def _writing(self, *, paused: bool = False) -> Iterator[Connection]:
        with self._database.write() as tx:
            check_held(tx, self._unit.sink_id, self._run, paused=paused)
            open_row(tx, self._unit)
            yield tx

    def _insert(self, tx: Connection, parts: Sequence[Part]) -> None:
        if parts:
            tx.execute(insert(tables.parts), [{"unit": self._unit.id, **asdict(part)} for part in parts])

    def _add_up(self, tx: Connection, part: Part) -> None:
        """Add what a part delivered, from its detail: rows, deletions, bytes."""
        detail = json.loads(part.detail) if part.detail else {"rows": part.last - part.first}
        unit = tables.units
        tx.execute(
            update(unit)
            .where(unit.c.id == self._unit.id)
            .values(
                rows_sent=unit.c.rows_sent + detail.get("rows", 0),
                deletions_sent=unit.c.deletions_sent + detail.get("deletions", 0),
                bytes_sent=unit.c.bytes_sent + detail.get("bytes", 0),
            )
        )

    def _deliver(self, tx: Connection, part: Part) -> None:
        """A bad row that was sent again has arrived: it is not bad any more."""
        if self._unit.lane == RETRY:
            bad = tables.quarantine
            entry = and_(bad.c.retry_unit == self._unit.id, bad.c.retry_position == part.first)
            tx.execute(delete(bad).where(entry))

    def _check_destination(self, tx: Connection, destination: str | None) -> None:
        """The destination must identify itself as before; one that stopped doing so is another one, such as a proxy."""
        state = tables.sink_tables
        mine = and_(state.c.sink == self._unit.sink_id, state.c.table_id == self._unit.table_id)
        known = tx.execute(select(state.c.destination).where(mine)).scalar()
        if known is None and destination is not None:
            tx.execute(update(state).where(mine).values(destination=destination))
        elif known != destination:
            raise stranger(self._unit, known, destination)


def stranger(unit: Unit, known: str | None, found: str | None) -> Corrupt:
    return Corrupt(
        "the destination is not the same as before: it was created again, or restored from a backup",
        sink=unit.sink,
        table=unit.table,
        known=known,
        found=found,
        advice=refill(unit.sink, unit.table, None),
    )


def rolled_back(unit: Unit, has: str, **facts: str | int | None) -> Corrupt:
    """The destination has a unit that this catalog has no record of opening."""
    return Corrupt(
        "the destination has a unit that this catalog does not know: the catalog was rolled back, or is a copy",
        sink=unit.sink,
        table=unit.table,
        unit=unit.id,
        has_unit=has,
        **facts,
        advice=after_rollback(unit.sink, unit.table),
    )


def after_rollback(sink: str, table: str) -> str:
    """What an operator can do about a catalog that was rolled back. None of it loses a row that the catalog has."""
    command = f"floodmark sink replay {sink!r} --table {table!r} --from"
    return (
        "Restore the newer catalog if it exists. Else nothing is sent until you choose:"
        f" `{command} mark` sends what this catalog has after its mark, `{command} beginning` sends every row (again)."
        " Rows that only the newer catalog had stay at the destination: empty it first, and begin at the beginning, if"
        " they must go."
    )


def refill(sink: str, table: str, until: int | None) -> str:
    """What an operator can do when a destination lost what was sent to it. None of it loses a row.

    `until`: where the destination's rows end, if that is certain.
    """
    command = f"floodmark sink replay {sink!r} --table {table!r} --from"
    there = "" if until is None else f" `{command} {until}` sends what it does not have;"
    return (
        f"Nothing is sent until you choose:{there} `{command} beginning` sends every row (again); empty the destination"
        " first if it has rows that must not be doubled, or that are gone here."
    )


def choices(sink: str, table: str, *, mark: bool = True) -> str:
    """What an operator can do when marks and the destination do not fit: each is a new epoch, none is automatic.

    `mark`: continuing from the mark could help.
    """
    command = f"floodmark sink replay {sink!r} --table {table!r} --from"
    there = f" `{command} mark` continues at the mark," if mark else ""
    return (
        f"Nothing is sent until you choose: `{command} beginning` sends every row (again); empty the destination first"
        f" if rows that are gone here must go there;{there} `{command} head` sends only what comes from now on; a"
        " number continues after that sequence."
    )


UNITS_KEPT = 20
IDS_PER_STATEMENT = 500


@dataclass(frozen=True)
class RefusedRow:
    """A row that its destination refused for good."""

    id: str
    table: str
    table_id: str
    unit: str
    position: int
    line: str
    reason: str
    tries: int
    first_ms: int
    last_ms: int
    retry_unit: str | None = None


@dataclass(frozen=True)
class Lag:
    rows: int
    age_ms: int


@dataclass(frozen=True)
class UnitLimit:
    """The maximum size of a unit; a commit of the lake is never split."""

    rows: int
    size_bytes: int


@dataclass(frozen=True)
class _Mark:
    mark: int
    epoch: int


class Units:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ── the two ends of a unit ──

    def open(
        self,
        sink: Sink,
        followed: Followed,
        rules: Rules,
        key: tuple[str, ...],
        run: str,
        limit: UnitLimit | None = None,
    ) -> Unit | None:
        """Record the next unit of a table, pin what it reads, and return it; None if nothing is new."""
        with self._database.write() as tx:
            lake = self._database.lock_lake(tx)
            check_held(tx, sink.id, run)
            mark = self._mark(tx, sink, followed)
            head, name = tables.heads, _followed_branch(tx, sink)
            same = and_(head.c.branch == name, head.c.table_id == followed.table_id)
            sequence = tx.execute(select(head.c.sequence).where(same)).scalar()
            if sequence is None:
                raise Conflict("the table does not exist any more", table=followed.table)
            if sequence <= mark.mark:
                return None
            if limit is not None:
                sequence = _bounded(tx, followed.table_id, name, mark.mark, sequence, limit)
            branch = tables.branches
            version = tx.execute(select(branch.c.head_version).where(branch.c.name == name)).scalar_one()
            unit = Unit(
                self._new_id(tx, sink, followed), lake.incarnation, sink.name, sink.id, mark.epoch, followed.shipped_as,
                followed.table_id, version, mark.mark, sequence, rules, key=key,
                after=self._last(tx, sink, followed, ROWS, mark.epoch),
            )  # fmt: skip
            self._insert(tx, unit, self._pin(tx, unit))
        return unit

    def settle(self, unit: Unit, run: str) -> dict[str, int]:
        """The unit is at its destination: mark, unit and pin change together, if the mark is where the unit began.

        Returns what all its tries together delivered: rows, deletions, bytes, quarantined.
        """
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            check_held(tx, unit.sink_id, run, paused=True)
            now = self._database.now_ms(tx)
            row = open_row(tx, unit)
            if unit.lane == ROWS:
                self._move_mark(tx, unit, now)
            ended = tables.units.c.id == unit.id
            tx.execute(update(tables.units).where(ended).values(state=SETTLED, ended_ms=now, pin=None))
            tx.execute(delete(tables.pins).where(tables.pins.c.id == row.pin))
            tx.execute(delete(tables.parts).where(tables.parts.c.unit == unit.id))
            entries = tables.quarantine.c.retry_unit == unit.id
            tx.execute(update(tables.quarantine).where(entries).values(retry_unit=None, retry_position=None))
            brought = {
                "rows": row.rows_sent,
                "deletions": row.deletions_sent,
                "bytes": row.bytes_sent,
                "quarantined": row.quarantined,
            }
            self._count(tx, unit, brought, now)
            self._forget_old(tx, unit)
        return brought

    def pass_over(self, sink: Sink, followed: Followed, until: int) -> bool:
        """No file holds anything of the range: the mark moves alone. False if another process was quicker."""
        consumer, unit = tables.consumers, tables.units
        mine = and_(
            consumer.c.name == sink.consumer,
            consumer.c.table_id == followed.table_id,
            consumer.c.epoch == followed.epoch,
            consumer.c.mark == followed.mark,
        )
        same = and_(unit.c.sink == sink.id, unit.c.table_id == followed.table_id, unit.c.lane == ROWS)
        with self._database.write() as tx:
            # Under the lock that opening takes: no unit can begin at the old mark meanwhile.
            self._database.lock_lake(tx)
            if tx.execute(select(unit.c.id).where(same, unit.c.state == OPEN)).first() is not None:
                return False
            now = self._database.now_ms(tx)
            return tx.execute(update(consumer).where(mine).values(mark=until, updated_ms=now)).rowcount == 1

    def read(self, unit: str) -> Unit:
        with self._database.read() as tx:
            text = tx.execute(select(tables.units.c.record).where(tables.units.c.id == unit)).scalar()
        if text is None:
            raise NotFound("there is no such unit", unit=unit)
        return Unit.from_json(text)

    def open_ids(self, sink_id: str) -> set[str]:
        """The units of a sink that are open, in any lane."""
        row = tables.units
        with self._database.read() as tx:
            return set(tx.execute(select(row.c.id).where(row.c.sink == sink_id, row.c.state == OPEN)).scalars())

    def lag(self, table_id: str, mark: int | None, branch: str | None = MAIN) -> Lag:
        """How many changes of the table on a branch are newer than a mark, and how old the oldest of them is."""
        if branch is None:
            return Lag(0, 0)  # it was deleted: no changes follow
        touched, commit = tables.commit_tables, tables.commits
        changed = touched.c.rows_added + touched.c.rows_updated + touched.c.rows_deleted
        newer = and_(touched.c.table_id == table_id, touched.c.sequence > (BEGINNING if mark is None else mark))
        query = (
            select(func.sum(changed).label("rows"), func.min(commit.c.committed_ms).label("oldest"))
            .join(commit, commit.c.version == touched.c.version)
            # Rows that retention removes are not shipped; a table that comes back has the rows that it had.
            .where(newer, changed > 0, commit.c.kind.not_in(("retain", "undrop")))
        )
        with self._database.read() as tx:
            row = tx.execute(query.where(_commits_of(tx, branch))).one()
            now = self._database.now_ms(tx)
        return Lag(int(row.rows or 0), 0 if row.oldest is None else max(0, now - row.oldest))

    def log(self, unit: Unit, run: str) -> Log:
        return Log(self._database, unit, run)

    # ── quarantine ──

    def quarantined(self, sink: Sink, table: str | None = None, limit: int | None = None) -> list[RefusedRow]:
        """Oldest first."""
        row, names = tables.quarantine, {one.table_id: one.table for one in sink.tables}
        query = select(row).where(row.c.sink == sink.id).order_by(row.c.id).limit(limit)
        if table is not None:
            query = query.where(row.c.table_id == sink.table(table).table_id)
        with self._database.read() as tx:
            return [
                RefusedRow(
                    one.id, names.get(one.table_id, ""), one.table_id, one.unit, one.position, one.line, one.reason,
                    one.tries, one.first_ms, one.last_ms, one.retry_unit,
                )
                for one in tx.execute(query)
            ]  # fmt: skip

    def count_quarantined(self, sink: str) -> dict[str, int]:
        """Rows in quarantine, by table id."""
        row = tables.quarantine
        with self._database.read() as tx:
            found = tx.execute(
                select(row.c.table_id, func.count().label("rows")).where(row.c.sink == sink).group_by(row.c.table_id)
            )
            return {one.table_id: one.rows for one in found}

    def drop_quarantined(self, sink: Sink, ids: Sequence[str]) -> int:
        """Delete bad rows for good; those that are being sent again stay."""
        row = tables.quarantine
        dropped = 0
        with self._database.write() as tx:
            # The lock that opening a unit takes: none of these rows can be sent meanwhile.
            self._database.lock_lake(tx)
            for start in range(0, len(ids), IDS_PER_STATEMENT):
                chosen = ids[start : start + IDS_PER_STATEMENT]
                mine = and_(row.c.sink == sink.id, row.c.id.in_(chosen), row.c.retry_unit.is_(None))
                dropped += tx.execute(delete(row).where(mine)).rowcount
        return dropped

    def open_retry(
        self,
        sink: Sink,
        followed: Followed,
        rules: Rules,
        key: tuple[str, ...],
        run: str,
        lines: Sequence[tuple[str, str]],
    ) -> Unit | None:
        """A unit that sends bad rows again, with these texts; (id, line) in the order of the unit."""
        with self._database.write() as tx:
            lake = self._database.lock_lake(tx)
            check_held(tx, sink.id, run)
            row, state = tables.quarantine, tables.sink_tables
            there = set(tx.execute(select(row.c.id).where(row.c.sink == sink.id)).scalars())
            lines = [(entry, line) for entry, line in lines if entry in there]
            if not lines:
                return None
            mine = and_(state.c.sink == sink.id, state.c.table_id == followed.table_id)
            number = tx.execute(select(state.c.retries).where(mine)).scalar_one()
            epoch = self._mark(tx, sink, followed).epoch
            unit = Unit(
                self._new_id(tx, sink, followed), lake.incarnation, sink.name, sink.id, epoch, followed.shipped_as,
                followed.table_id, lake.version, number, number + 1, rules, RETRY, key,
                self._last(tx, sink, followed, RETRY, epoch),
            )  # fmt: skip
            self._insert(tx, unit, None)
            for place, (entry, line) in enumerate(lines):
                again = {"line": line, "retry_unit": unit.id, "retry_position": place}
                tx.execute(update(row).where(row.c.id == entry).values(**again))
        return unit

    def retry_lines(self, unit: Unit) -> list[tuple[int, str]]:
        """The rows of an open unit of the lane `retry` that are not delivered yet, with their places."""
        row = tables.quarantine
        with self._database.read() as tx:
            found = tx.execute(
                select(row.c.retry_position, row.c.line)
                .where(row.c.retry_unit == unit.id)
                .order_by(row.c.retry_position)
            )
            return [(one.retry_position, one.line) for one in found]

    # ── inside ──

    def _mark(self, tx: Connection, sink: Sink, followed: Followed) -> _Mark:
        consumer = tables.consumers
        mine = and_(consumer.c.name == sink.consumer, consumer.c.table_id == followed.table_id)
        row = tx.execute(select(consumer).where(mine)).first()
        if row is None:
            raise Corrupt("the sink's mark is gone", sink=sink.name, table=followed.table)
        return _Mark(row.mark, row.epoch)

    def _new_id(self, tx: Connection, sink: Sink, followed: Followed) -> str:
        """Above every earlier id of the table: a destination compares ids to find which units are past (I10)."""
        row = tables.units
        mine = and_(row.c.sink == sink.id, row.c.table_id == followed.table_id)
        return clock.new_id(tx.execute(select(func.max(row.c.id)).where(mine)).scalar())

    def _last(self, tx: Connection, sink: Sink, followed: Followed, lane: str, epoch: int) -> str | None:
        """The last unit of the epoch recorded at a receiving lake: a unit without rows names the one before."""
        row = tables.units
        mine = and_(row.c.sink == sink.id, row.c.table_id == followed.table_id, row.c.lane == lane)
        settled = and_(mine, row.c.epoch == epoch, row.c.state == SETTLED)
        last = tx.execute(select(row).where(settled).order_by(row.c.until.desc()).limit(1)).first()
        if last is None:
            return None
        return str(last.id) if last.rows_sent or last.passed else json.loads(last.record).get("after")

    def _pin(self, tx: Connection, unit: Unit) -> str:
        state = tx.execute(select(tables.commits.c.state).where(tables.commits.c.version == unit.version)).scalar()
        if state != LIVE:
            raise BelowRetention("this version's window has ended", version=unit.version)
        pin = clock.new_id()
        tx.execute(
            insert(tables.pins).values(
                id=pin,
                version=unit.version,
                holder=CONSUMER + unit.sink,
                reason=f"unit {unit.id}",
                taken_ms=self._database.now_ms(tx),
            )
        )
        return pin

    def _insert(self, tx: Connection, unit: Unit, pin: str | None) -> None:
        zero = dict.fromkeys(("rows_sent", "deletions_sent", "bytes_sent", "quarantined"), 0)
        tx.execute(
            insert(tables.units).values(
                id=unit.id,
                sink=unit.sink_id,
                table_id=unit.table_id,
                lane=unit.lane,
                epoch=unit.epoch,
                since=unit.since,
                until=unit.until,
                pin=pin,
                record=unit.to_json(),
                state=OPEN,
                opened_ms=self._database.now_ms(tx),
                **zero,
            )
        )

    def _move_mark(self, tx: Connection, unit: Unit, now_ms: int) -> None:
        consumer = tables.consumers
        mine = and_(
            consumer.c.name == CONSUMER + unit.sink,
            consumer.c.table_id == unit.table_id,
            consumer.c.epoch == unit.epoch,
            consumer.c.mark == unit.since,
        )
        moved = tx.execute(update(consumer).where(mine).values(mark=unit.until, updated_ms=now_ms)).rowcount
        if moved != 1:
            raise Corrupt(
                "the sink's mark is not the start of its open unit",
                sink=unit.sink,
                table=unit.table,
                since=unit.since,
                advice=f"Open a new epoch: `floodmark sink replay {unit.sink} --table {unit.table} --from …`.",
            )

    def _count(self, tx: Connection, unit: Unit, brought: dict[str, int], now_ms: int) -> None:
        state = tables.sink_tables
        named = {"unit": unit.id, "since": unit.since, "until": unit.until, "version": unit.version}
        last = {**named, **brought, "settled_ms": now_ms}
        values: dict[str, SqlValue] = {
            "rows_sent": state.c.rows_sent + brought["rows"],
            "deletions_sent": state.c.deletions_sent + brought["deletions"],
            "bytes_sent": state.c.bytes_sent + brought["bytes"],
        }
        if unit.lane == RETRY:
            values["retries"] = state.c.retries + 1
        else:
            values |= {"units": state.c.units + 1, "last_unit": json.dumps(last)}
        mine = and_(state.c.sink == unit.sink_id, state.c.table_id == unit.table_id)
        tx.execute(update(state).where(mine).values(**values))

    def _forget_old(self, tx: Connection, unit: Unit) -> None:
        row = tables.units
        same = and_(row.c.sink == unit.sink_id, row.c.table_id == unit.table_id, row.c.lane == unit.lane)
        ended = and_(same, row.c.state.in_((SETTLED, GIVEN_UP)))
        # By state, not by id: clocks may go back.
        newest_first = select(row.c.id).where(ended).order_by(row.c.epoch.desc(), row.c.until.desc(), row.c.id.desc())
        old = tx.execute(newest_first.offset(UNITS_KEPT)).scalars().all()
        if old:
            tx.execute(delete(row).where(row.c.id.in_(old)))


def _followed_branch(tx: Connection, sink: Sink) -> str:
    """The name of the branch that a sink follows, read under the lock."""
    row, line = tables.sink_lines, tables.lines
    query = select(line.c.name, line.c.ended_version).join(row, row.c.line == line.c.id).where(row.c.sink == sink.id)
    found = tx.execute(query).first()
    if found is None:
        return MAIN
    if found.ended_version is not None:
        raise NotFound("the branch that the sink follows was deleted", sink=sink.name, advice="Remove the sink.")
    return str(found.name)


def _bounded(tx: Connection, table_id: str, branch: str, since: int, newest: int, limit: UnitLimit) -> int:
    """The sequence at which a unit that begins after `since` ends: before the commit that makes it too large.

    Commits whose history has expired count with the first known one. Bytes are estimated from the average of the
    table's rows, as far as the catalog has it.
    """
    touched, commit = tables.commit_tables, tables.commits
    query = (
        select(
            *(touched.c.sequence, touched.c.rows_added, touched.c.rows_updated, touched.c.rows_deleted),
            *(touched.c.rows_total, touched.c.bytes_total),
        )
        .join(commit, commit.c.version == touched.c.version)
        .where(touched.c.table_id == table_id, touched.c.sequence > since, touched.c.sequence <= newest)
        .where(_commits_of(tx, branch))
        .order_by(touched.c.sequence)
    )
    rows, size_bytes, until = 0, 0.0, since
    for row in tx.execute(query):
        changed = row.rows_added + row.rows_updated + row.rows_deleted
        rows += changed
        size_bytes += changed * row.bytes_total / max(1, row.rows_total)
        if until > since and (rows > limit.rows or size_bytes > limit.size_bytes):
            return int(until)
        if changed:
            until = row.sequence
    return newest


def _commits_of(tx: Connection, branch: str) -> ColumnElement[bool]:
    """The commits in a branch's lineage."""
    if branch == MAIN:
        return tables.commits.c.branch == MAIN
    lines = Lineages.read(tx)
    return on_parts(lines.parts(lines.live(branch)))
