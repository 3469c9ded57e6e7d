"""The parts of an open unit in the catalog: written down before they are sent, acknowledged after (I8).

Every write asks whether the run still holds the sink: one that was taken over stops (Fenced), one whose sink was paused
stops too. A crash leaves parts that are sealed and not acknowledged: they may be at the destination or not, and are
sent again under the same names. A row that was refused for good is kept aside in the same transaction that passes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.sink_notes import BODY_BYTES_MAX, ROWS_DOUBTFUL, add_to_note, put_note, read_notes
from floodmark.catalog.sink_state import OPEN, PAUSED, SETTLED
from floodmark.catalog.unit import ACKNOWLEDGED, QUARANTINED, RETRY, SEALED, Part, Settled, Stopped, Unit
from floodmark.errors import Corrupt, Fenced


def check_held(tx: Connection, sink: str, run: str, *, paused: bool = False) -> None:
    """The run still holds the sink, and nobody paused it (`paused`: what is done may be written down still)."""
    row = tx.execute(select(tables.sinks).where(tables.sinks.c.id == sink).with_for_update()).first()
    if row is None or row.runner_run != run:
        raise Fenced("another run took this sink over, or it was removed", advice="Nothing is lost: stop here.")
    if row.state == PAUSED and not paused:
        raise Stopped


def open_row(tx: Connection, unit: Unit) -> Any:
    row = tx.execute(select(tables.units).where(tables.units.c.id == unit.id)).first()
    if row is None or row.state != OPEN:
        raise Fenced("this unit was ended by somebody else", unit=unit.id)
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
        """The end of the unit that was settled last in this epoch; ranges without rows may have been passed since."""
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
        # Only the run that holds the sink may say no: what an overtaken one finds may be a unit that was opened since.
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
        # Also if the sink was paused meanwhile: what is there is there.
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
        """How many rows of the sink are set aside, of all its tables and units."""
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
        """Write a part's detail down while it is not done; what is sealed of it stays (I8)."""
        row = tables.parts
        with self._writing() as tx:
            mine = and_(row.c.unit == self._unit.id, row.c.first == part.first, row.c.last == part.last)
            if tx.execute(update(row).where(mine, row.c.state == SEALED).values(detail=part.detail)).rowcount != 1:
                raise Corrupt("a part is not there, or done", unit=self._unit.id, part=f"{part.first}-{part.last}")

    def split(self, whole: Part, halves: Sequence[Part], *, doubtful: int = 0) -> None:
        row = tables.parts
        with self._writing() as tx:
            self._doubt(tx, doubtful)
            mine = and_(row.c.unit == self._unit.id, row.c.first == whole.first, row.c.last == whole.last)
            if tx.execute(delete(row).where(mine, row.c.state == SEALED)).rowcount != 1:
                raise Corrupt("a part to be halved is not there", unit=self._unit.id, first=whole.first)
            self._insert(tx, halves)

    def quarantine(
        self, part: Part, data: bytes, reason: str | None, *, doubtful: int = 0, passed: bool = False
    ) -> None:
        row, bad = tables.parts, tables.quarantine
        with self._writing() as tx:
            now = self._database.now_ms(tx)
            mine = and_(row.c.unit == self._unit.id, row.c.first == part.first, row.c.last == part.last)
            if tx.execute(update(row).where(mine, row.c.state == SEALED).values(state=QUARANTINED)).rowcount != 1:
                return  # written down by an earlier try
            self._doubt(tx, doubtful)
            unit = tables.units
            rows = part.last - part.first
            more: dict[str, Any] = {"quarantined": unit.c.quarantined + rows}
            if passed:
                more["passed"] = func.coalesce(unit.c.passed, 0) + rows
            tx.execute(update(unit).where(unit.c.id == self._unit.id).values(**more))
            if self._unit.lane == RETRY:
                entry = and_(bad.c.retry_unit == self._unit.id, bad.c.retry_position == part.first)
                again = {"tries": bad.c.tries + 1, "reason": bad.c.reason if reason is None else reason}
                tx.execute(update(bad).where(entry).values(**again, last_ms=now))
                return
            same = {"sink": self._unit.sink_id, "table_id": self._unit.table_id, "unit": self._unit.id}
            told = {**same, "reason": reason, "tries": 1, "first_ms": now, "last_ms": now}
            entries = [
                {**told, "id": clock.new_id(), "position": position, "line": line.decode()}
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
        """What a part brought is in its detail: rows, deletions, bytes."""
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
        """Who is there is who was there; one who does not say so any more is somebody else, such as a proxy."""
        state = tables.sink_tables
        mine = and_(state.c.sink == self._unit.sink_id, state.c.table_id == self._unit.table_id)
        known = tx.execute(select(state.c.destination).where(mine)).scalar()
        if known is None and destination is not None:
            tx.execute(update(state).where(mine).values(destination=destination))
        elif known != destination:
            raise stranger(self._unit, known, destination)


def stranger(unit: Unit, known: str | None, found: str | None) -> Corrupt:
    return Corrupt(
        "somebody else is at the other end than before: it was made again, or restored from a backup",
        sink=unit.sink,
        table=unit.table,
        known=known,
        found=found,
        advice=refill(unit.sink, unit.table, None),
    )


def rolled_back(unit: Unit, has: str, **facts: Any) -> Corrupt:
    """The destination has a unit that this catalog never opened, as far as it knows."""
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
        "Put the newer catalog back if it exists. Else nothing is sent until you choose:"
        f" `{command} mark` sends what this catalog has after its mark, `{command} beginning` sends every row (again)."
        " Rows that only the newer catalog had stay at the destination: empty it first, and begin at the beginning, if"
        " they must go."
    )


def refill(sink: str, table: str, until: int | None) -> str:
    """What an operator can do when a destination lost what was sent to it. None of it loses a row.

    `until`: where what the destination has ends, if that is certain.
    """
    command = f"floodmark sink replay {sink!r} --table {table!r} --from"
    there = "" if until is None else f" `{command} {until}` sends what it does not have;"
    return (
        f"Nothing is sent until you choose:{there} `{command} beginning` sends every row (again); empty the destination"
        " first if it has rows that must not be doubled, or that are gone here."
    )


def choices(sink: str, table: str, *, mark: bool = True) -> str:
    """What an operator can do when marks and the other end do not fit: each is a new epoch, none happens by itself.

    `mark`: going on where the mark is could help.
    """
    command = f"floodmark sink replay {sink!r} --table {table!r} --from"
    there = f" `{command} mark` goes on at the mark," if mark else ""
    return (
        f"Nothing is sent until you choose: `{command} beginning` sends every row (again); empty the destination first"
        f" if rows that are gone here must go there;{there} `{command} head` sends only what comes from now on; a"
        " number goes on after that sequence."
    )
