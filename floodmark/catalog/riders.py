"""Riders: rows of the catalog that become true in the same transaction as the rows of the tables, or not at all.

A rider has a precondition, checked inside the publish, and an effect. Riders are sealed with the operation, so recovery
that rolls it forward carries them too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.sink_state import CONSUMER, ROWS_LOST, add_to_note
from floodmark.errors import Conflict, NotFound
from floodmark.json_form import Json
from floodmark.model import MAIN

# The scope of a batch that is named for a table begins with this.
TABLE_SCOPE = "table:"


class AlreadyCommitted(Exception):
    """An operation with the same identity was published before, as `version`. Not an error to a caller."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"published before as version {version}")


class PlanAgain(Exception):
    """An edit was planned on a state that is gone: rows came or went that it depends on, or the table's shape changed.

    Not an error to a caller: its planner plans again, from the same staged rows, on the new state.
    """

    def __init__(self, table: str, reason: str) -> None:
        self.table = table
        self.reason = reason
        super().__init__(f"{table}: {reason}")


class Rider(Protocol):
    def check(self, tx: Connection) -> None:
        """Raise AlreadyCommitted or a FloodmarkError if this must not be published now."""

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None: ...

    def as_dict(self) -> dict[str, Json]:
        """As it is sealed: its type, and the arguments that commit/seal.py makes it from."""


@dataclass(frozen=True)
class BatchRider:
    """A batch's identity: (scope, id) is published once. The scope is the table's name, or a name for a transaction.

    A branch has the batch if it was published there, or in the branch's lineage. `table_id`: the table that the scope
    named when the operation began. If another one or none has that name when it is published, it is refused: a rename
    took the scope's batches along, and a retry by the new name would not find this one.
    """

    scope: str
    id: str
    branch: str = MAIN
    table_id: str | None = None

    @property
    def names_table(self) -> bool:
        return self.scope.startswith(TABLE_SCOPE)

    def bound(self, tx: Connection) -> BatchRider:
        """The same, of the table that its scope names now. For operations that may not write to that table."""
        return replace(self, table_id=self._named(tx))

    def check(self, tx: Connection) -> None:
        if self.table_id is not None and self._named(tx) != self.table_id:
            raise Conflict(
                "the table that the batch is named for was renamed or dropped meanwhile",
                table=self.scope.removeprefix(TABLE_SCOPE),
                batch=self.id,
                advice="Nothing was changed. Try again, with the name that the table has now.",
            )
        found = find_batch(tx, self.scope, self.id, self.branch)
        if found is not None:
            raise AlreadyCommitted(found)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        scope = own_scope(tx, self.scope, self.branch)
        tx.execute(insert(tables.sources).values(scope=scope, id=self.id, version=version, operation=operation))

    def as_dict(self) -> dict[str, Json]:
        table = {} if self.table_id is None else {"table_id": self.table_id}
        return {"type": "batch", "scope": self.scope, "id": self.id, **_branch(self.branch), **table}

    def _named(self, tx: Connection) -> str | None:
        """The id of the table that has the scope's name now."""
        if not self.names_table:
            return None
        head, table = tables.heads, self.scope.removeprefix(TABLE_SCOPE)
        query = select(head.c.table_id).where(head.c.branch == self.branch, head.c.table_name == table)
        return tx.execute(query).scalar()


@dataclass(frozen=True)
class StreamRider:
    """A stream's micro-batch: its numbers only rise, so one row per stream, table and branch holds the newest.

    A new branch copies the rows of its base, since those move on.
    """

    scope: str
    id: str
    position: int
    branch: str = MAIN

    def check(self, tx: Connection) -> None:
        row = tables.sources
        mine = (row.c.scope == own_scope(tx, self.scope, self.branch)) & (row.c.id == self.id)
        found = tx.execute(select(row.c.version, row.c.position).where(mine)).first()
        if found is not None and self.position <= found.position:
            raise AlreadyCommitted(found.version)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row, scope = tables.sources, own_scope(tx, self.scope, self.branch)
        tx.execute(delete(row).where(row.c.scope == scope, row.c.id == self.id))
        tx.execute(
            insert(row).values(scope=scope, id=self.id, version=version, operation=operation, position=self.position)
        )

    def as_dict(self) -> dict[str, Json]:
        own = {"type": "stream", "scope": self.scope, "id": self.id}
        return {**own, "position": self.position, **_branch(self.branch)}


@dataclass(frozen=True)
class VersionRider:
    """The tables are on their branch as they were at a version: their caller's expectation, `if_version`.

    Any commit on a table makes it another one, also a compaction, which keeps its rows. A table that is gone, or that
    was created again, is another one too. `dropped`: tables that had been dropped at that version, and are restored.
    `free`: names of new tables, which no table of the branch has had since that version. Checked under the lake's lock,
    so no commit comes between it and the publish.
    """

    branch: str
    version: int
    tables: tuple[tuple[str, str], ...]
    dropped: tuple[tuple[str, str], ...] = ()
    free: tuple[str, ...] = ()

    def check(self, tx: Connection) -> None:
        newest = int(tx.execute(select(tables.lake.c.version)).scalar_one())
        if self.version > newest:
            raise NotFound("the lake has no such version", if_version=self.version, newest=newest)
        row, ids = tables.heads, [table_id for table_id, _ in self.tables]
        query = select(row.c.table_id, row.c.version).where(row.c.branch == self.branch, row.c.table_id.in_(ids))
        found = {one.table_id: int(one.version) for one in tx.execute(query)}
        for table_id, name in self.tables:
            actual = found.get(table_id)
            if actual is None or actual > self.version:
                raise self._moved(name, "dropped" if actual is None else actual)
        for table_id, name in self.dropped:
            # Its newest commit there is the one that dropped it.
            if (last := _last_commit(tx, self.branch, table_id)) > self.version:
                raise self._moved(name, last)
        for name in self.free:
            if (last := _last_commit_of_name(tx, self.branch, name, self.version)) > self.version:
                raise self._moved(name, last)

    def _moved(self, table: str, actual: int | str) -> Conflict:
        return Conflict(
            "a table is not as it was at the version that this write expects",
            table=table,
            **_branch(self.branch),
            expected=self.version,
            actual=actual,
            advice="Nothing was changed. Read the table again, and decide with its newest version.",
        )

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        """No effect: it only checks."""

    def as_dict(self) -> dict[str, Json]:
        known: dict[str, Json] = {"tables": [list(one) for one in self.tables]}
        known |= {"dropped": [list(one) for one in self.dropped]} if self.dropped else {}
        known |= {"free": list(self.free)} if self.free else {}
        return {"type": "version", "version": self.version, **known, **_branch(self.branch)}

    @classmethod
    def sealed(
        cls,
        version: int,
        tables: Sequence[tuple[str, str]],
        branch: str = MAIN,
        dropped: Sequence[tuple[str, str]] = (),
        free: Sequence[str] = (),
    ) -> VersionRider:
        known, gone = (tuple((table_id, name) for table_id, name in some) for some in (tables, dropped))
        return cls(branch, version, known, gone, tuple(free))


@dataclass(frozen=True)
class AuditRider:
    """Recovery's report, in the transaction of the state change: exactly one per operation (I16). Never sealed.

    Its time is after the newest one's, so that times order the reports: also of one millisecond, or of a clock that
    went back.
    """

    kind: str
    found: str
    outcome: str
    detail: str

    def check(self, tx: Connection) -> None:
        return

    def apply(self, tx: Connection, operation: str, version: int | None, now_ms: int) -> None:
        newest_ms = tx.execute(select(func.max(tables.audit.c.at_ms))).scalar()
        tx.execute(
            insert(tables.audit).values(
                operation=operation,
                kind=self.kind,
                found=self.found,
                outcome=self.outcome,
                detail=self.detail,
                version=version,
                at_ms=now_ms if newest_ms is None else max(now_ms, newest_ms + 1),
            )
        )

    def as_dict(self) -> dict[str, Json]:
        raise TypeError("an audit rider belongs to recovery and is never sealed")


@dataclass(frozen=True)
class MarksRider:
    """Rows up to `seq_max` go: no protected consumer may need one, and losses of the others were counted.

    Checked under the lake's lock: if a consumer was added, or its mark was moved back, while rows were rewritten, the
    operation is planned again. `counted`: the marks that losses were counted from; one that rose meanwhile loses fewer.
    The rows that a forced one removes (`lost`, rows by consumer) are recorded with it, so no crash can hide the loss
    (I15).
    """

    table_id: str
    seq_max: int
    forced: bool = False
    counted: tuple[tuple[str, int], ...] = ()
    lost: tuple[tuple[str, int], ...] = ()

    def check(self, tx: Connection) -> None:
        row, counted = tables.consumers, dict(self.counted)
        for consumer in tx.execute(select(row).where(row.c.table_id == self.table_id, row.c.mark < self.seq_max)):
            waits = bool(consumer.protected) and not self.forced
            if waits or consumer.mark < counted.get(consumer.name, self.seq_max):
                raise PlanAgain(self.table_id, f"consumer {consumer.name} has not seen rows that were to go")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        if not self.lost:
            return
        self._tell_sinks(tx, version, now_ms)
        if not self.forced:
            return
        name = select(tables.heads.c.table_name).where(tables.heads.c.table_id == self.table_id).limit(1)
        tx.execute(
            insert(tables.maintenance).values(
                id=clock.new_id(),
                verb="retain",
                table_id=self.table_id,
                table_name=tx.execute(name).scalar() or "",
                outcome="forced",
                detail=json.dumps({"lost": dict(self.lost), "version": version, "operation": operation}),
                actor="",
                started_ms=now_ms,
                ended_ms=now_ms,
            )
        )

    def _tell_sinks(self, tx: Connection, version: int, now_ms: int) -> None:
        """Record each sink's loss, in the sink and in the history, in the commit that removes the rows."""
        row, sink = tables.consumers, tables.sinks
        losses = []
        for name, rows in self.lost:
            behind = select(row.c.name).where(row.c.name == name, row.c.table_id == self.table_id)
            if tx.execute(behind.where(row.c.mark < self.seq_max)).first() is None:
                continue  # it received them meanwhile
            known = select(sink.c.id).where(sink.c.name == name.removeprefix(CONSUMER))
            found = tx.execute(known).scalar() if name.startswith(CONSUMER) else None
            if found is not None:
                add_to_note(tx, found, self.table_id, ROWS_LOST, rows, now_ms)
            losses.append(f"up to {rows} not sent by {name.replace(CONSUMER, 'sink ')}")
        if losses:
            commit = tables.commits
            before = tx.execute(select(commit.c.message).where(commit.c.version == version)).scalar() or ""
            message = "; ".join(part for part in (before, *losses) if part)
            tx.execute(update(commit).where(commit.c.version == version).values(message=message))

    def as_dict(self) -> dict[str, Json]:
        return {
            "type": "marks",
            "table_id": self.table_id,
            "seq_max": self.seq_max,
            "forced": self.forced,
            "counted": dict(self.counted),
            "lost": dict(self.lost),
        }

    @classmethod
    def sealed(
        cls, table_id: str, seq_max: int, forced: bool, counted: Mapping[str, int], lost: Mapping[str, int]
    ) -> MarksRider:
        return cls(table_id, seq_max, forced, tuple(sorted(counted.items())), tuple(sorted(lost.items())))


def find_batch(tx: Connection, scope: str, batch: str, branch: str = MAIN) -> int | None:
    """The version that committed this batch on the branch or in its lineage, if any did."""
    row = tables.sources
    if branch == MAIN:
        return tx.execute(select(row.c.version).where(row.c.scope == scope, row.c.id == batch)).scalar()
    lineages = Lineages.read(tx)
    for part in lineages.parts(lineages.live(branch)):
        query = select(row.c.version).where(row.c.scope == part.lineage.scope(scope), row.c.id == batch)
        found = tx.execute(query).scalar()
        if found is not None and (part.upto is None or found <= part.upto):
            return int(found)
    return None


def own_scope(tx: Connection, scope: str, branch: str) -> str:
    """The scope under which a branch records its own batches."""
    return scope if branch == MAIN else Lineages.read(tx).live(branch).scope(scope)


def _last_commit(tx: Connection, branch: str, table_id: str) -> int:
    """The newest version that a branch made of a table itself, be it the one that dropped it; 0: none."""
    commit, touched = tables.commits, tables.commit_tables
    query = (
        select(func.max(touched.c.version))
        .join(commit, commit.c.version == touched.c.version)
        .where(commit.c.branch == branch, touched.c.table_id == table_id)
    )
    return int(tx.execute(query).scalar() or 0)


def _last_commit_of_name(tx: Connection, branch: str, name: str, version: int) -> int:
    """The newest version that a branch made of a table that had this name then, or at `version`; 0: none."""
    commit, touched = tables.commits, tables.commit_tables
    named = func.lower(touched.c.table_name) == name.lower()
    then = (
        select(touched.c.table_id, func.max(touched.c.version).label("version"))
        .where(touched.c.version <= version, touched.c.table_id.in_(select(touched.c.table_id).where(named)))
        .group_by(touched.c.table_id)
        .subquery()
    )
    same = and_(then.c.table_id == touched.c.table_id, then.c.version == touched.c.version)
    had_it = select(touched.c.table_id).join(then, same).where(named)
    query = (
        select(func.max(touched.c.version))
        .join(commit, commit.c.version == touched.c.version)
        .where(commit.c.branch == branch, or_(named, touched.c.table_id.in_(had_it)))
    )
    return int(tx.execute(query).scalar() or 0)


def _branch(branch: str) -> dict[str, str]:
    return {} if branch == MAIN else {"branch": branch}
