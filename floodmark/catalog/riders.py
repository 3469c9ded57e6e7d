"""Riders: rows of the catalog that become true in the same transaction as the rows of the tables, or not at all.

A rider has a precondition, checked inside the publish, and an effect. Riders are sealed with the operation, so a
healer that rolls it forward carries them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Connection, delete, insert, select

from floodmark.catalog import tables


class AlreadyCommitted(Exception):
    """An operation with the same identity was published before, as `version`. Not an error to a caller."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"published before as version {version}")


class Rider(Protocol):
    def check(self, tx: Connection) -> None:
        """Raise AlreadyCommitted or a FloodmarkError if this must not be published now."""

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None: ...

    def as_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class BatchRider:
    """A batch's identity: (scope, id) comes in once. The scope is the table's name, or a name for a transaction."""

    scope: str
    id: str

    def check(self, tx: Connection) -> None:
        found = find_batch(tx, self.scope, self.id)
        if found is not None:
            raise AlreadyCommitted(found)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        tx.execute(insert(tables.sources).values(scope=self.scope, id=self.id, version=version, operation=operation))

    def as_dict(self) -> dict[str, Any]:
        return {"type": "batch", "scope": self.scope, "id": self.id}


@dataclass(frozen=True)
class StreamRider:
    """A stream's micro-batch: its numbers only rise, so one row per stream and table tells which are in."""

    scope: str
    id: str
    position: int

    def check(self, tx: Connection) -> None:
        row = tx.execute(
            select(tables.sources.c.version, tables.sources.c.position).where(
                tables.sources.c.scope == self.scope, tables.sources.c.id == self.id
            )
        ).first()
        if row is not None and self.position <= row.position:
            raise AlreadyCommitted(row.version)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        tx.execute(delete(tables.sources).where(tables.sources.c.scope == self.scope, tables.sources.c.id == self.id))
        tx.execute(
            insert(tables.sources).values(
                scope=self.scope, id=self.id, version=version, operation=operation, position=self.position
            )
        )

    def as_dict(self) -> dict[str, Any]:
        return {"type": "stream", "scope": self.scope, "id": self.id, "position": self.position}


@dataclass(frozen=True)
class AuditRider:
    """A healer's report, in the transaction of the state change: exactly one per operation (I16). Never sealed."""

    kind: str
    found: str
    outcome: str
    detail: str

    def check(self, tx: Connection) -> None:
        return

    def apply(self, tx: Connection, operation: str, version: int | None, now_ms: int) -> None:
        tx.execute(
            insert(tables.audit).values(
                operation=operation,
                kind=self.kind,
                found=self.found,
                outcome=self.outcome,
                detail=self.detail,
                version=version,
                at_ms=now_ms,
            )
        )

    def as_dict(self) -> dict[str, Any]:
        raise TypeError("an audit rider belongs to its healer and is never sealed")


def find_batch(tx: Connection, scope: str, batch: str) -> int | None:
    """The version that this batch was committed as, if it was."""
    query = select(tables.sources.c.version).where(tables.sources.c.scope == scope, tables.sources.c.id == batch)
    return tx.execute(query).scalar()


def rider_from_dict(data: dict[str, Any]) -> Rider:
    if data["type"] == "batch":
        return BatchRider(scope=data["scope"], id=data["id"])
    if data["type"] == "stream":
        return StreamRider(scope=data["scope"], id=data["id"], position=data["position"])
    raise ValueError(f"unknown rider {data['type']!r}")
