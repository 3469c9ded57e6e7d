"""Spools in the catalog: how far each is fed, and which of its rows are in quarantine.

A table's row records its spool and how many of its records are published. It changes in the publish of the rows
(SpoolRider), so that a record is in the table, or in quarantine, exactly when the position is above it (I9): a feed
that crashed after its publish finds the position, one that crashed before finds the records. Both riders are
identities: recovery may finish a feed whose process died after its seal, and the next feed finds the position moved. No
record is fed twice: the precondition names the position that the feed began at, and is checked under the lake's lock.

A spool with another id, or one that is older than its position, is refused before it is read, and by the rider once
more: a replaced spool would lose its rows, or bring others instead. Only an operator settles that
(`floodmark spool accept`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from sqlalchemy import Connection, delete, insert, select, update

from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.errors import Conflict, NotFound
from floodmark.json_form import Json

HELD = "held"
RETRIED = "retried"
DROPPED = "dropped"


@dataclass(frozen=True)
class SpoolRow:
    """A spool as the catalog has it. `spool_id` is empty while the table waits for a new one."""

    table_id: str
    table: str
    spool_id: str
    host: str
    folder: str
    position: int
    version: int | None
    rows: int
    quarantined: int
    registered_ms: int
    updated_ms: int


@dataclass(frozen=True)
class PutAside:
    """Rows in quarantine: the catalog's record of one object. `reason` is JSON."""

    id: str
    table_id: str
    table: str
    spool_id: str
    record: int
    rows: int
    reason: str
    location: str
    at_ms: int
    state: str
    version: int | None

    @property
    def error(self) -> dict[str, Json]:
        """Why the first of them did not fit, in the form of every error."""
        return {name: value for name, value in json.loads(self.reason).items() if name != "records"}

    @property
    def bad(self) -> dict[int, int]:
        """How many rows of which record; of very many records only the first."""
        return {int(record): rows for record, rows in json.loads(self.reason).get("records", {}).items()}


class Spools:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ── looking ──

    def all(self) -> list[SpoolRow]:
        """Every spool, by the name of its table."""
        with self._database.read() as tx:
            row = tables.spools
            return [_to_spool(one) for one in tx.execute(select(row).order_by(row.c.table_name, row.c.table_id))]

    def get(self, table_id: str) -> SpoolRow | None:
        with self._database.read() as tx:
            return _find(tx, table_id)

    def quarantine(self, table_id: str | None = None, *, state: str | None = HELD) -> list[PutAside]:
        """The rows in quarantine, the oldest first; of one table or all, in one state or all (None)."""
        row = tables.spool_quarantine
        query = select(row).order_by(row.c.id)
        if table_id is not None:
            query = query.where(row.c.table_id == table_id)
        if state is not None:
            query = query.where(row.c.state == state)
        with self._database.read() as tx:
            return [_to_aside(one) for one in tx.execute(query)]

    def put_aside(self, entry: str) -> PutAside:
        """One of them by its id."""
        row = tables.spool_quarantine
        with self._database.read() as tx:
            found = tx.execute(select(row).where(row.c.id == entry)).first()
        if found is None:
            raise NotFound(
                "nothing in quarantine has this id",
                id=entry,
                advice="`floodmark spool quarantine list TABLE` lists the entries.",
            )
        return _to_aside(found)

    # ── changing ──

    def register(self, table_id: str, table: str, spool_id: str, host: str, folder: str) -> SpoolRow:
        """Make this spool the table's, if it has none; update its folder, if it is. Conflict if another one is."""
        row = tables.spools
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            found = _find(tx, table_id)
            place = {"table_name": table, "host": host, "folder": folder}
            if found is None:
                zero = {"position": 0, "version": None, "rows_fed": 0, "quarantined": 0}
                made = {"table_id": table_id, "spool_id": spool_id, "registered_ms": now, "updated_ms": now}
                tx.execute(insert(row).values(**made, **place, **zero))
            elif not found.spool_id:
                fresh = {"spool_id": spool_id, "position": 0, "registered_ms": now, "updated_ms": now}
                tx.execute(update(row).where(row.c.table_id == table_id).values(**place, **fresh))
            elif found.spool_id != spool_id:
                raise replaced(found, spool_id)
            elif (found.table, found.host, found.folder) != (table, host, folder):
                tx.execute(update(row).where(row.c.table_id == table_id).values(**place))
            made_row = _find(tx, table_id)
        assert made_row is not None
        return made_row

    def accept(self, known: SpoolRow, spool_id: str, position: int) -> SpoolRow:
        """Continue with this spool from this record, instead of the known one; an empty id waits for a new one."""
        row = tables.spools
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            self._check_known(tx, known)
            values = {"spool_id": spool_id, "position": position, "updated_ms": self._database.now_ms(tx)}
            tx.execute(update(row).where(row.c.table_id == known.table_id).values(**values))
            made = _find(tx, known.table_id)
        assert made is not None
        return made

    def forget(self, known: SpoolRow) -> None:
        """The table is gone, and its spool is given up: delete the spool's row."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            self._check_known(tx, known)
            tx.execute(delete(tables.spools).where(tables.spools.c.table_id == known.table_id))

    def drop(self, entry: str) -> PutAside:
        """Give rows in quarantine up for good. Conflict if a retry published them."""
        row = tables.spool_quarantine
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            found = tx.execute(select(row).where(row.c.id == entry)).first()
            if found is None or found.state == RETRIED:
                raise Conflict("these rows are not in quarantine any more", id=entry)
            if found.state == HELD:
                tx.execute(update(row).where(row.c.id == entry).values(state=DROPPED))
                count_out(tx, found.table_id, found.rows_held)
            return _to_aside(tx.execute(select(row).where(row.c.id == entry)).one())

    def _check_known(self, tx: Connection, known: SpoolRow) -> None:
        found = _find(tx, known.table_id)
        if found is None or (found.spool_id, found.position) != (known.spool_id, known.position):
            raise Conflict("the spool changed meanwhile", table=known.table, advice="Look again.")


def count_out(tx: Connection, table_id: str, rows: int) -> None:
    """So many rows of a table are not in quarantine any more."""
    row = tables.spools
    tx.execute(update(row).where(row.c.table_id == table_id).values(quarantined=row.c.quarantined - rows))


def _find(tx: Connection, table_id: str) -> SpoolRow | None:
    found = tx.execute(select(tables.spools).where(tables.spools.c.table_id == table_id)).first()
    return None if found is None else _to_spool(found)


def _to_spool(row: SqlRow) -> SpoolRow:
    return SpoolRow(
        row.table_id,
        row.table_name,
        row.spool_id,
        row.host,
        row.folder,
        row.position,
        row.version,
        row.rows_fed,
        row.quarantined,
        row.registered_ms,
        row.updated_ms,
    )


def _to_aside(row: SqlRow) -> PutAside:
    return PutAside(
        row.id,
        row.table_id,
        row.table_name,
        row.spool_id,
        row.record,
        row.rows_held,
        row.reason,
        row.location,
        row.at_ms,
        row.state,
        row.version,
    )


def replaced(known: SpoolRow, spool_id: str) -> Conflict:
    return Conflict(
        "this table has another spool",
        table=known.table,
        spool=spool_id,
        spool_known=known.spool_id or "none",
        host=known.host,
        folder=known.folder,
        advice=f"Restore the recorded spool, or see `floodmark spool accept {known.table}`.",
    )


@dataclass(frozen=True)
class HeldRows:
    """Rows in quarantine, in an object that exists and is durable. `reason` is JSON."""

    id: str
    record: int
    rows: int
    reason: str
    location: str


class SealedHeld(TypedDict):
    """`Held` in a seal."""

    id: str
    record: int
    rows: int
    reason: str
    location: str


@dataclass(frozen=True)
class SpoolRider:
    """The records [since, until) of a spool are published: `rows` of them in the table, `held` in quarantine."""

    table_id: str
    spool_id: str
    since: int
    until: int
    rows: int
    held: tuple[HeldRows, ...] = ()

    @property
    def quarantined(self) -> int:
        return sum(one.rows for one in self.held)

    def check(self, tx: Connection) -> None:
        row = tx.execute(select(tables.spools).where(tables.spools.c.table_id == self.table_id)).first()
        if row is None or row.spool_id != self.spool_id:
            known = "none" if row is None else row.spool_id or "none"
            raise self._refused("this spool does not belong to the table", spool_known=known)
        if row.position >= self.until:
            raise AlreadyCommitted(row.version)
        if row.position != self.since:
            raise self._refused("the spool was fed up to another record", position=row.position)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row = tables.spools
        tx.execute(
            update(row)
            .where(row.c.table_id == self.table_id)
            .values(
                position=self.until,
                version=version,
                rows_fed=row.c.rows_fed + self.rows,
                quarantined=row.c.quarantined + self.quarantined,
                updated_ms=now_ms,
            )
        )
        name = tx.execute(select(row.c.table_name).where(row.c.table_id == self.table_id)).scalar_one()
        for one in self.held:
            tx.execute(
                insert(tables.spool_quarantine).values(
                    id=one.id,
                    table_id=self.table_id,
                    table_name=name,
                    spool_id=self.spool_id,
                    record=one.record,
                    rows_held=one.rows,
                    reason=one.reason,
                    location=one.location,
                    at_ms=now_ms,
                    state=HELD,
                    version=None,
                )
            )

    def _refused(self, message: str, **facts: str | int) -> Conflict:
        return Conflict(
            message,
            table_id=self.table_id,
            spool=self.spool_id,
            records=f"{self.since}..{self.until}",
            **facts,
            advice="Check whether a copy of the spool is in use: `floodmark spool list` shows the recorded one.",
        )

    def as_dict(self) -> dict[str, Json]:
        return {"type": "spool", **asdict(self)}

    @classmethod
    def sealed(
        cls, table_id: str, spool_id: str, since: int, until: int, rows: int, held: Sequence[SealedHeld]
    ) -> SpoolRider:
        return cls(table_id, spool_id, since, until, rows, tuple(HeldRows(**one) for one in held))


@dataclass(frozen=True)
class RetryRider:
    """Rows of the quarantine are published into their table after all, once."""

    id: str

    def check(self, tx: Connection) -> None:
        row = tables.spool_quarantine
        found = tx.execute(select(row.c.state, row.c.version).where(row.c.id == self.id)).first()
        if found is not None and found.state == RETRIED:
            raise AlreadyCommitted(found.version)
        if found is None or found.state == DROPPED:
            raise Conflict("these rows are not in quarantine any more", id=self.id)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row = tables.spool_quarantine
        tx.execute(update(row).where(row.c.id == self.id).values(state=RETRIED, version=version))
        found = tx.execute(select(row.c.table_id, row.c.rows_held).where(row.c.id == self.id)).one()
        count_out(tx, found.table_id, found.rows_held)

    def as_dict(self) -> dict[str, Json]:
        return {"type": "spool_retry", "id": self.id}
