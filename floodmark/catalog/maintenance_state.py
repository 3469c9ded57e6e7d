"""Maintenance of tables: retention policies, consumers' marks, and the record of what maintenance did.

All of it is catalog state, changed by single statements or short transactions; none of it is visible to readers of
rows. Of each table and verb the newest records stay, so the history of maintenance is bounded (I14).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow
from floodmark.model import Head

RECORDS_KEPT = 50
LAKE = ""


@dataclass(frozen=True)
class Policy:
    """What a table keeps: `retention` as its owner wrote it (None: everything), on a time column if it is an age."""

    retention: str | None = None
    column: str | None = None


@dataclass(frozen=True)
class Consumer:
    """A consumer that follows a table and is done up to `mark`. `protected`: retention waits for it."""

    name: str
    table_id: str
    mark: int
    protected: bool = True
    epoch: int = 0


@dataclass(frozen=True)
class Maintenance:
    """One verb of maintenance on one table ("" for the whole lake), with its named outcome."""

    verb: str
    table: str
    outcome: str
    # Each verb has figures of its own.
    detail: dict[str, Any] = field(default_factory=dict)
    table_id: str = LAKE
    actor: str = ""
    started_ms: int = 0
    ended_ms: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "verb": self.verb,
            "table": self.table or None,
            "outcome": self.outcome,
            "at": clock.format_time(self.ended_ms) if self.ended_ms else None,
            **self.detail,
        }


class MaintenanceState:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ── policies ──

    def policy(self, table_id: str) -> Policy:
        with self._database.read() as tx:
            row = tx.execute(select(tables.upkeep).where(tables.upkeep.c.table_id == table_id)).first()
        return Policy() if row is None else Policy(row.retention, row.retention_column)

    def set_policy(self, table_id: str, policy: Policy) -> None:
        with self._database.write() as tx:
            mine = tables.upkeep.c.table_id == table_id
            values = {"retention": policy.retention, "retention_column": policy.column}
            tx.execute(update(tables.upkeep).where(mine).values(**values))

    # ── small files ──

    def small_files(self) -> dict[str, int | None]:
        """Per table id how many small files its head has; None if they were not counted."""
        with self._database.read() as tx:
            rows = tx.execute(select(tables.upkeep.c.table_id, tables.upkeep.c.small_files))
            return {row.table_id: row.small_files for row in rows}

    def counted_small_files(self, head: Head, small: int) -> None:
        """Record a count made at this head, if it still is the head and no count exists."""
        upkeep, heads = tables.upkeep, tables.heads
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            snapshot = tx.execute(
                select(heads.c.snapshot).where(heads.c.branch == head.branch, heads.c.table_id == head.table_id)
            ).scalar()
            if snapshot == head.snapshot:
                mine = (upkeep.c.table_id == head.table_id) & upkeep.c.small_files.is_(None)
                tx.execute(update(upkeep).where(mine).values(small_files=small))

    # ── consumers ──

    def consumers(self, table_id: str) -> list[Consumer]:
        """The consumers of the table, the furthest behind first."""
        row = tables.consumers
        with self._database.read() as tx:
            found = tx.execute(select(row).where(row.c.table_id == table_id).order_by(row.c.mark, row.c.name))
            return [Consumer(one.name, one.table_id, one.mark, bool(one.protected), one.epoch) for one in found]

    def put_consumer(self, consumer: Consumer) -> None:
        """Register a consumer, or move its mark up; a mark never goes down within an epoch (I7)."""
        row = tables.consumers
        mine = (row.c.name == consumer.name) & (row.c.table_id == consumer.table_id)
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            values = {"protected": int(consumer.protected), "epoch": consumer.epoch, "updated_ms": now}
            known = tx.execute(select(row.c.mark, row.c.epoch).where(mine)).first()
            if known is None:
                names = {"name": consumer.name, "table_id": consumer.table_id}
                tx.execute(insert(row).values(**names, mark=consumer.mark, **values))
                return
            mark = max(known.mark, consumer.mark) if known.epoch == consumer.epoch else consumer.mark
            tx.execute(update(row).where(mine).values(mark=mark, **values))

    # ── records ──

    def record(self, done: Maintenance) -> None:
        row = tables.maintenance
        with self._database.write() as tx:
            tx.execute(
                insert(row).values(
                    id=clock.new_id(),
                    verb=done.verb,
                    table_id=done.table_id,
                    table_name=done.table,
                    outcome=done.outcome,
                    detail=json.dumps(done.detail),
                    actor=done.actor,
                    started_ms=done.started_ms,
                    ended_ms=done.ended_ms,
                )
            )
            self._forget_old(tx, done)

    def _forget_old(self, tx: Connection, done: Maintenance) -> None:
        row = tables.maintenance
        same = (row.c.table_id == done.table_id) & (row.c.verb == done.verb)
        oldest = tx.execute(
            select(row.c.id).where(same).order_by(row.c.id.desc()).offset(RECORDS_KEPT - 1).limit(1)
        ).scalar()
        if oldest is not None:
            tx.execute(delete(row).where(same, row.c.id < oldest))

    def records(self, *, table_id: str | None = None, verb: str | None = None, limit: int = 20) -> list[Maintenance]:
        """Newest first."""
        row = tables.maintenance
        query = select(row).order_by(row.c.id.desc()).limit(limit)
        query = query if table_id is None else query.where(row.c.table_id == table_id)
        query = query if verb is None else query.where(row.c.verb == verb)
        with self._database.read() as tx:
            return [_maintenance(one) for one in tx.execute(query)]

    def newest(self) -> list[Maintenance]:
        """The newest record of each verb and table."""
        row = tables.maintenance
        last = select(func.max(row.c.id)).group_by(row.c.table_id, row.c.verb)
        with self._database.read() as tx:
            return [_maintenance(one) for one in tx.execute(select(row).where(row.c.id.in_(last)).order_by(row.c.id))]

    def policies(self) -> dict[str, Policy]:
        """The policies of all tables that have one, by table id."""
        with self._database.read() as tx:
            rows = tx.execute(select(tables.upkeep).where(tables.upkeep.c.retention.is_not(None)))
            return {row.table_id: Policy(row.retention, row.retention_column) for row in rows}


def _maintenance(row: SqlRow) -> Maintenance:
    return Maintenance(
        row.verb,
        row.table_name,
        row.outcome,
        json.loads(row.detail),
        row.table_id,
        row.actor,
        row.started_ms,
        row.ended_ms,
    )
