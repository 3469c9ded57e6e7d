"""Riders of a new shape: a table's policy, the users of its column names, and what is kept of a dropped table.

Checked under fm_lake's lock, applied after the pointers: a policy may be that of a table created in the same publish.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, Select, delete, insert, select, update

from floodmark.catalog import tables
from floodmark.catalog.riders import PlanAgain, own_scope
from floodmark.commit.dropped import (
    check_chunks,
    check_one_name,
    last_state,
    park_batches,
    rename_batches,
    unpark_batches,
)
from floodmark.errors import BelowRetention, Conflict
from floodmark.json_form import Json
from floodmark.model import BEGINNING, MAIN


@dataclass(frozen=True)
class PolicyRider:
    """How long rows are kept: `retention` by `column`. `was` is what the plan saw, as (retention, column)."""

    table_id: str
    retention: str | None
    column: str | None
    was: tuple[str | None, str | None]

    def check(self, tx: Connection) -> None:
        _check_policy(tx, self.table_id, self.was)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row, values = tables.upkeep, {"retention": self.retention, "retention_column": self.column}
        if tx.execute(update(row).where(row.c.table_id == self.table_id).values(**values)).rowcount == 0:
            tx.execute(insert(row).values(table_id=self.table_id, deletions_floor=BEGINNING, **values))

    def as_dict(self) -> dict[str, Json]:
        return {
            "type": "policy",
            "table_id": self.table_id,
            "retention": self.retention,
            "column": self.column,
            "was": list(self.was),
        }

    @classmethod
    def sealed(cls, table_id: str, retention: str | None, column: str | None, was: Sequence[str | None]) -> PolicyRider:
        return cls(table_id, retention, column, _policy(was))


@dataclass(frozen=True)
class NamesRider:
    """Columns go, or get other names: all users of the table's column names are as the plan saw them.

    `was` is its retention, as (retention, column); `sinks` are those that follow it, each with a digest of its
    settings. No unfinished job works on it. A plan without one of these would not have been made. Retention and jobs
    are of main: on another branch they do not count.
    """

    table_id: str
    table: str
    was: tuple[str | None, str | None]
    sinks: tuple[tuple[str, str], ...]
    branch: str = MAIN

    def check(self, tx: Connection) -> None:
        if self.branch == MAIN:
            _check_policy(tx, self.table_id, self.was)
        sink, followed = tables.sinks, tables.sink_tables
        query = select(sink.c.name, sink.c.settings).join(followed, followed.c.sink == sink.c.id)
        rows = tx.execute(query.where(followed.c.table_id == self.table_id))
        if sorted((row.name, settings_digest(row.settings)) for row in rows) != sorted(self.sinks):
            raise PlanAgain(self.table, "a sink that follows the table was added, removed or changed meanwhile")
        if self.branch == MAIN and any(self.table in json.loads(job.table_names) for job in tx.execute(_at_work())):
            raise PlanAgain(self.table, "a job began to work on the table meanwhile")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        """No effect: it only checks."""

    def as_dict(self) -> dict[str, Json]:
        return {
            "type": "names",
            "table_id": self.table_id,
            "table": self.table,
            "was": list(self.was),
            "sinks": [list(one) for one in self.sinks],
            "branch": self.branch,
        }

    @classmethod
    def sealed(
        cls,
        table_id: str,
        table: str,
        was: Sequence[str | None],
        sinks: Sequence[tuple[str, str]],
        branch: str = MAIN,
    ) -> NamesRider:
        return cls(table_id, table, _policy(was), tuple((name, digest) for name, digest in sinks), branch)


def _policy(was: Sequence[str | None]) -> tuple[str | None, str | None]:
    retention, column = was
    return retention, column


def settings_digest(settings: str) -> str:
    """Shows whether a sink's settings are the same, without a copy of them in the journal."""
    return hashlib.sha256(settings.encode()).hexdigest()


def _check_policy(tx: Connection, table_id: str, was: tuple[str | None, str | None]) -> None:
    row = tables.upkeep
    query = select(row.c.retention, row.c.retention_column).where(row.c.table_id == table_id)
    found = tx.execute(query).first() or (None, None)  # a table that is created now has none yet
    if tuple(found) != was:
        raise PlanAgain(table_id, "the table's retention was changed meanwhile")


@dataclass(frozen=True)
class DropRider:
    """A table is dropped: no consumer may follow it, no job may work on it, no other branch may have it.

    A table that is created again must not find the old one's batches: those of main are parked, those of a branch go.
    Its marks stay for as long as the table can come back (dropped.py), by its id: also main may have dropped it before.
    """

    table_id: str
    table: str
    branch: str

    def check(self, tx: Connection) -> None:
        followed_by(tx, self.table_id, self.table, self.branch, "dropped")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        tx.execute(delete(tables.turns).where(tables.turns.c.table_id == self.table_id))
        if self.branch == MAIN:
            park_batches(tx, self.table_id, self.table, operation, version)
            return
        scopes = [own_scope(tx, f"{kind}:{self.table}", self.branch) for kind in ("table", "stream")]
        tx.execute(delete(tables.sources).where(tables.sources.c.scope.in_(scopes)))

    def as_dict(self) -> dict[str, Json]:
        return {"type": "drop", "table_id": self.table_id, "table": self.table, "branch": self.branch}


@dataclass(frozen=True)
class RenameRider:
    """A table gets another name: nothing depends on the old one that cannot follow.

    Histories use the name for their chunks, other branches for the table itself, and a job at work asks for it again.
    Batches, streams, spools and sinks follow the table here; marks and units are by its id. At its destinations a sink
    goes on under the name that it began with (docs/decisions/0046).
    """

    table_id: str
    table: str
    new_name: str
    branch: str

    def check(self, tx: Connection) -> None:
        used_by(tx, self.table_id, self.table, self.branch, "renamed")
        histories = histories_of(tx, self.table_id)
        advice = "Its chunks are recorded by the table's name: load the history into a new table instead."
        _refuse("a history was loaded into the table", self.table, "renamed", jobs=histories, advice=advice)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        rename_batches(tx, self.table, self.new_name, self.branch)
        for row in (tables.spools, tables.spool_quarantine):
            tx.execute(update(row).where(row.c.table_id == self.table_id).values(table_name=self.new_name))
        sink, followed = tables.sinks, tables.sink_tables
        query = select(sink.c.id, sink.c.table_names).join(followed, followed.c.sink == sink.c.id)
        for one in tx.execute(query.where(followed.c.table_id == self.table_id)).all():
            names = [self.new_name if name == self.table else name for name in json.loads(one.table_names)]
            tx.execute(update(sink).where(sink.c.id == one.id).values(table_names=json.dumps(names)))

    def as_dict(self) -> dict[str, Json]:
        return {"type": "rename", **asdict(self)}


def histories_of(tx: Connection, table_id: str) -> list[str]:
    """The histories that loaded chunks into a table, by their names."""
    chunk, job = tables.chunks, tables.jobs
    query = select(job.c.name).distinct().join(chunk, chunk.c.job == job.c.id).where(chunk.c.table_id == table_id)
    return sorted(tx.execute(query).scalars())


@dataclass(frozen=True)
class UndropRider:
    """A table comes back as main had it last: it is still dropped, and the version that has it can still be read.

    No branch from before the drop has given it another name.
    """

    table_id: str
    table: str
    state_version: int
    dropped_version: int

    def check(self, tx: Connection) -> None:
        found = last_state(tx, self.table_id)
        if found is None or (found.state.version, found.dropped_version) != (self.state_version, self.dropped_version):
            raise Conflict("the table was restored meanwhile", table=self.table)
        if found.held_version is None:
            raise BelowRetention("the versions that had this table have expired", table=self.table)
        check_one_name(tx, self.table, self.table_id)
        check_chunks(tx, self.table, self.table_id)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        unpark_batches(tx, self.table_id, self.table)

    def as_dict(self) -> dict[str, Json]:
        return {"type": "undrop", **asdict(self)}


def _at_work() -> Select[str, str, str]:
    job = tables.jobs
    query = select(job.c.name, job.c.table_names, job.c.spec)
    return query.where(job.c.state.in_(("pending", "running"))).order_by(job.c.name)


def followed_by(tx: Connection, table_id: str, table: str, branch: str, done: str) -> None:
    """Refuse that the table is `done` (dropped) while a sink, a job at work or another branch has it."""
    sink, followed = tables.sinks, tables.sink_tables
    sinks = tx.execute(
        select(sink.c.name)
        .join(followed, followed.c.sink == sink.c.id)
        .where(followed.c.table_id == table_id)
        .order_by(sink.c.name)
    ).scalars()
    _refuse("a sink follows the table", table, done, sinks=list(sinks), advice="Remove the sink first.")
    used_by(tx, table_id, table, branch, done)


def used_by(tx: Connection, table_id: str, table: str, branch: str, done: str) -> None:
    """Refuse that the table is `done` (dropped, renamed) while a job at work or another branch has it."""
    head = tables.heads
    jobs = [one.name for one in tx.execute(_at_work()) if _is_of(table_id, table, one.spec, one.table_names)]
    _refuse("a job works on the table", table, done, jobs=jobs, advice="Cancel it, or wait for it.")
    others = select(head.c.branch).where(head.c.table_id == table_id, head.c.branch != branch)
    branches = sorted(tx.execute(others).scalars())
    advice = "Merge or delete the branch first."
    _refuse("another branch has the table", table, done, branches=branches, advice=advice)


def _is_of(table_id: str, table: str, spec: str, table_names: str) -> bool:
    """Whether a job of this spec is one of the table."""
    pinned = json.loads(spec).get("pinned") or {}
    return table in json.loads(table_names) or pinned.get("table_id") == table_id


def _refuse(why: str, table: str, done: str, *, advice: str, **names: list[str]) -> None:
    found = {role: ",".join(some) for role, some in names.items() if some}
    if found:
        raise Conflict(f"this table cannot be {done}: {why}", table=table, **found, advice=advice)
