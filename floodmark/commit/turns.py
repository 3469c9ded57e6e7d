"""A table's turn: after lost races one builder publishes alone, for as long as its lease lasts.

A turn is a hint for fairness, never a lock: the publish checks the heads in any case. A holder that dies keeps
others waiting until its lease ends or recovery abandons its operation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, delete, func, insert, or_, select

from floodmark.catalog import tables
from floodmark.catalog.database import Database

LEASE_MS = 5_000
_POLL_S = 0.02


class NotYourTurn(Exception):
    """Another operation has the turn of a table, for at most this long."""

    def __init__(self, operation: str, table_ids: Sequence[str], wait_ms: int) -> None:
        self.operation = operation
        self.table_ids = table_ids
        self.wait_ms = wait_ms
        super().__init__()


class Turns:
    def __init__(self, database: Database) -> None:
        self._database = database

    def take(self, operation: str, table_ids: Iterable[str], lease_ms: int = LEASE_MS) -> None:
        """Take the turns of all these tables, or none: two operations with a turn each would wait for each other."""
        turn, wanted = tables.turns, sorted(table_ids)
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            free = or_(turn.c.until_ms <= now, turn.c.operation == operation)
            tx.execute(delete(turn).where(free))
            if tx.execute(select(turn.c.operation).where(turn.c.table_id.in_(wanted))).first() is None:
                rows = [{"table_id": one, "operation": operation, "until_ms": now + lease_ms} for one in wanted]
                tx.execute(insert(turn), rows)

    def check(self, tx: Connection, operation: str, table_ids: Sequence[str], now_ms: int) -> None:
        """Inside a publish: raise NotYourTurn if another operation has the turn of one of these tables."""
        turn = tables.turns
        until = tx.execute(
            select(func.max(turn.c.until_ms)).where(
                turn.c.table_id.in_(table_ids), turn.c.operation != operation, turn.c.until_ms > now_ms
            )
        ).scalar()
        if until is not None:
            raise NotYourTurn(operation, table_ids, until - now_ms)

    def wait(self, other: NotYourTurn) -> None:
        """Wait for the holder. Bounded by its lease."""
        deadline = time.monotonic() + other.wait_ms / 1000
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            with self._database.read() as tx:
                query = select(func.count()).where(
                    tables.turns.c.table_id.in_(other.table_ids), tables.turns.c.operation != other.operation
                )
                if tx.execute(query).scalar() == 0:
                    return
