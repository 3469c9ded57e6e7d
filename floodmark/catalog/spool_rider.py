"""What becomes true in the publish of rows that came by a spool: how far it is fed, and what was put aside.

Both riders are identities: a healer may finish a feed whose process died after its seal, and the feed that comes after
it finds the position moved. Nobody can feed one record twice, since the precondition names the position that the feed
began at and is checked under the lake's lock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from floodmark.catalog import tables
from floodmark.catalog.riders import AlreadyCommitted, Rider
from floodmark.catalog.spools import DROPPED, HELD, RETRIED, count_out
from floodmark.errors import Conflict


@dataclass(frozen=True)
class Held:
    """Rows that were put aside, in an object that is there and durable. `reason` is JSON."""

    id: str
    record: int
    rows: int
    reason: str
    location: str


@dataclass(frozen=True)
class SpoolRider:
    """The records [since, until) of a spool are in: `rows` of them in the table, `held` in quarantine."""

    table_id: str
    spool_id: str
    since: int
    until: int
    rows: int
    held: tuple[Held, ...] = ()

    @property
    def quarantined(self) -> int:
        return sum(one.rows for one in self.held)

    def check(self, tx: Connection) -> None:
        row = tx.execute(select(tables.spools).where(tables.spools.c.table_id == self.table_id)).first()
        if row is None or row.spool_id != self.spool_id:
            known = "none" if row is None else row.spool_id or "none"
            raise self._refused("this spool is not the table's", spool_known=known)
        if row.position >= self.until:
            raise AlreadyCommitted(row.version)
        if row.position != self.since:
            raise self._refused("the spool is fed to another record", position=row.position)

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

    def _refused(self, message: str, **facts: Any) -> Conflict:
        return Conflict(
            message,
            table_id=self.table_id,
            spool=self.spool_id,
            records=f"{self.since}..{self.until}",
            **facts,
            advice="Is a copy of the spool at work? `floodmark spool list` shows the known one.",
        )

    def as_dict(self) -> dict[str, Any]:
        return {"type": "spool", **asdict(self)}


@dataclass(frozen=True)
class RetryRider:
    """Rows of the quarantine come into their table after all, once."""

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

    def as_dict(self) -> dict[str, Any]:
        return {"type": "spool_retry", "id": self.id}


def spool_rider_from_dict(data: dict[str, Any]) -> Rider:
    if data["type"] == "spool_retry":
        return RetryRider(data["id"])
    values = {name: value for name, value in data.items() if name not in ("type", "held")}
    return SpoolRider(**values, held=tuple(Held(**one) for one in data["held"]))
