"""What jobs have done, written in the publishes that did it: chunks of history, and rows that were filled (I2).

A chunk is `done` for a table exactly when the table has its rows: the row of fm_chunks and the rows of the table become
true together, whether the run itself or recovery publishes them. A chunk belongs to an incarnation of its table: a
table that was created again has no chunk done. Below a retention floor it becomes `pruned` with the rows that go; if
the floor is lowered, it is loaded again like a new chunk. A chunk that is to be loaded again loses its row together
with its rows: it is missing, and the next run loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.history import line_of
from floodmark.catalog.jobs import check_job
from floodmark.catalog.lineage import on_parts
from floodmark.catalog.riders import AlreadyCommitted, AuditRider
from floodmark.catalog.sink_state import CONSUMER, OPEN
from floodmark.errors import Conflict, Invalid
from floodmark.json_form import Json

DONE, PRUNED = "done", "pruned"


@dataclass(frozen=True)
class ChunkState:
    chunk: int
    table: str
    table_id: str
    state: str
    rows: int
    version: int
    done_ms: int
    operation: str


class Chunks:
    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, job: str, within: range | None = None) -> list[ChunkState]:
        """All chunks that a job has loaded, whatever happened to their tables since; by number and table."""
        row = tables.chunks
        query = select(row).where(_of_job(job, within)).order_by(row.c.chunk, row.c.table_name)
        with self._database.read() as tx:
            return [
                ChunkState(
                    one.chunk,
                    one.table_name,
                    one.table_id,
                    one.state,
                    one.rows_total,
                    one.version,
                    one.done_ms,
                    one.operation,
                )
                for one in tx.execute(query)
            ]

    def done(self, job: str, within: range | None = None) -> list[tuple[str, str, int]]:
        """Table, its incarnation and number of every chunk whose rows the table has: possibly millions."""
        row = tables.chunks
        query = select(row.c.table_name, row.c.table_id, row.c.chunk).where(_of_job(job, within), row.c.state == DONE)
        with self._database.read() as tx:
            return [(one[0], one[1], one[2]) for one in tx.execute(query)]

    def done_on_line(self, job: str, table_id: str, version: int, within: range) -> set[int]:
        """The chunks whose rows a table has at a version: loaded by a commit of its lineage, and not gone since."""
        row, commit = tables.chunks, tables.commits
        with self._database.read() as tx:
            parts = line_of(tx, version)
            if not parts:
                return set()
            done = (row.c.table_id == table_id) & (row.c.state == DONE) & on_parts(parts)
            query = select(row.c.chunk).join(commit, commit.c.version == row.c.version)
            return set(tx.execute(query.where(_of_job(job, within), done)).scalars())

    def newest(self, job: str, table: str, table_id: str) -> int | None:
        """The highest number of a chunk that was loaded into this incarnation of a table."""
        row = tables.chunks
        mine = _of_job(job) & (row.c.table_name == table) & (row.c.table_id == table_id)
        with self._database.read() as tx:
            return tx.execute(select(func.max(row.c.chunk)).where(mine)).scalar()

    def has_done(self, job: str, table: str, table_id: str) -> bool:
        """Whether any chunk of a job is done for this incarnation of a table."""
        row = tables.chunks
        mine = (row.c.table_name == table) & (row.c.table_id == table_id) & (row.c.state == DONE)
        query = select(row.c.chunk).where(_of_job(job), mine).limit(1)
        with self._database.read() as tx:
            return tx.execute(query).first() is not None


def _of_job(job: str, within: range | None = None) -> ColumnElement[bool]:
    row = tables.chunks
    mine = row.c.job == job
    return mine if within is None else mine & (row.c.chunk >= within.start) & (row.c.chunk < within.stop)


@dataclass(frozen=True)
class LoadedTable:
    """A table that a chunk is loaded into: its identity, and the number of rows."""

    table: str
    table_id: str
    rows: int


@dataclass(frozen=True)
class LoadedChunk:
    """A chunk and the tables that it is loaded into. Their row counts are known once they are staged."""

    chunk: int
    tables: tuple[LoadedTable, ...]

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.tables)


class SealedChunk(TypedDict):
    """A loaded chunk in a seal: of each table its name, its id and the rows."""

    chunk: int
    tables: list[tuple[str, str, int]]


@dataclass(frozen=True)
class ChunkRider:
    """Chunks of a job are loaded into their tables once: one, or several that were loaded together."""

    job: str
    chunks: tuple[LoadedChunk, ...]

    @classmethod
    def of(cls, job: str, chunk: int, into: tuple[LoadedTable, ...]) -> ChunkRider:
        return cls(job, (LoadedChunk(chunk, into),))

    def check(self, tx: Connection) -> None:
        check_job(tx, self.job)
        wanted = {(one.chunk, into.table, into.table_id) for one in self.chunks for into in one.tables}
        row = tables.chunks
        found = tx.execute(select(row).where(row.c.job == self.job, self._numbers)).all()
        # The rows of a pruned chunk are gone: a job that loads it again has a lower floor.
        there = [one for one in found if (one.chunk, one.table_name, one.table_id) in wanted and one.state == DONE]
        if there and len(there) == len(wanted):
            raise AlreadyCommitted(max(one.version for one in there))
        if there:
            raise Conflict(
                "another run has loaded some of this already",
                chunks=",".join(str(number) for number in sorted({one.chunk for one in there})),
                tables=",".join(sorted({one.table_name for one in there})),
            )

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row = tables.chunks
        names = {into.table for one in self.chunks for into in one.tables}
        # Of an earlier incarnation of the table, or pruned.
        tx.execute(delete(row).where(row.c.job == self.job, self._numbers, row.c.table_name.in_(names)))
        loaded = [
            {
                "job": self.job,
                "chunk": one.chunk,
                "table_name": into.table,
                "table_id": into.table_id,
                "state": DONE,
                "rows_total": into.rows,
                "version": version,
                "operation": operation,
                "done_ms": now_ms,
            }
            for one in self.chunks
            for into in one.tables
        ]
        tx.execute(insert(row), loaded)
        _count(tx, self.job, sum(one.rows for one in self.chunks), 0, now_ms)

    @property
    def _numbers(self) -> ColumnElement[bool]:
        return tables.chunks.c.chunk.in_([one.chunk for one in self.chunks])

    def as_dict(self) -> dict[str, Json]:
        loaded: list[Json] = [
            {"chunk": one.chunk, "tables": [[into.table, into.table_id, into.rows] for into in one.tables]}
            for one in self.chunks
        ]
        return {"type": "chunk", "job": self.job, "chunks": loaded}

    @classmethod
    def sealed(cls, job: str, chunks: Sequence[SealedChunk]) -> ChunkRider:
        return cls(
            job,
            tuple(LoadedChunk(one["chunk"], tuple(LoadedTable(*loaded) for loaded in one["tables"])) for one in chunks),
        )


@dataclass(frozen=True)
class PruneRider:
    """The rows of a table's chunks go; the chunks record it. `chunks`: ranges of numbers, the upper one exclusive.

    A chunk loaded after `version`, at which this was planned, is not marked: its rows may exist.
    """

    job: str
    table: str
    table_id: str
    version: int
    chunks: tuple[tuple[int, int], ...]

    def check(self, tx: Connection) -> None:
        check_job(tx, self.job)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row = tables.chunks
        mine = (row.c.table_name == self.table) & (row.c.table_id == self.table_id) & (row.c.state == DONE)
        for low, high in self.chunks:
            planned = _of_job(self.job, range(low, high)) & mine & (row.c.version <= self.version)
            tx.execute(update(row).where(planned).values(state=PRUNED))

    def as_dict(self) -> dict[str, Json]:
        known = {"type": "prune", "job": self.job, "table": self.table, "table_id": self.table_id}
        return {**known, "version": self.version, "chunks": [list(one) for one in self.chunks]}

    @classmethod
    def sealed(cls, job: str, table: str, table_id: str, version: int, chunks: Sequence[tuple[int, int]]) -> PruneRider:
        return cls(job, table, table_id, version, tuple((low, high) for low, high in chunks))


@dataclass(frozen=True)
class RedoneChunk:
    """A chunk of one table that goes: as it was loaded."""

    chunk: int
    table: str
    table_id: str
    version: int
    rows: int


@dataclass(frozen=True)
class RedoRider:
    """Remove chunks from their tables to load them again; from then on they are missing. The audit has a row for it.

    Checked under the lake's lock: the run still holds the job (*else: a run that took it over sees them as done, and
    ends over a gap*), they are as they were planned on, and no consumer has shipped, or is about to ship, rows of a
    table without a key. `unshipped`: the lowest sequence of such rows by table id. `id` is the audit row's, since
    recovery that finishes this writes a row of its own for the operation (I16).
    """

    id: str
    job: str
    run: str
    chunks: tuple[RedoneChunk, ...]
    unshipped: tuple[tuple[str, int], ...] = ()
    detail: str = ""

    def check(self, tx: Connection) -> None:
        if check_job(tx, self.job).run != self.run:
            raise Conflict("another run has taken this job over", advice="Run the redo again.")
        row = tables.chunks
        for one in self.chunks:
            mine = _of_job(self.job, range(one.chunk, one.chunk + 1)) & (row.c.table_name == one.table)
            found = tx.execute(select(row).where(mine)).first()
            if found is None or (found.table_id, found.state, found.version) != (one.table_id, DONE, one.version):
                raise Conflict("a chunk changed meanwhile", chunk=one.chunk, table=one.table, advice="Run it again.")
        for table_id, sequence in self.unshipped:
            if names := shipped_to(tx, table_id, sequence):
                raise shipped(next(one.table for one in self.chunks if one.table_id == table_id), names)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row = tables.chunks
        for one in self.chunks:
            mine = _of_job(self.job, range(one.chunk, one.chunk + 1)) & (row.c.table_name == one.table)
            tx.execute(delete(row).where(mine))
        # They count again when they are loaded again.
        _count(tx, self.job, -sum(one.rows for one in self.chunks), 0, now_ms)
        AuditRider("redo", DONE, "redone", self.detail).apply(tx, self.id, version, now_ms)

    def as_dict(self) -> dict[str, Json]:
        known = {"id": self.id, "job": self.job, "run": self.run, "detail": self.detail}
        chunks: list[Json] = [[one.chunk, one.table, one.table_id, one.version, one.rows] for one in self.chunks]
        return {"type": "redo", **known, "chunks": chunks, "unshipped": [list(one) for one in self.unshipped]}

    @classmethod
    def sealed(
        cls,
        id: str,
        job: str,
        run: str,
        chunks: Sequence[tuple[int, str, str, int, int]],
        unshipped: Sequence[tuple[str, int]],
        detail: str,
    ) -> RedoRider:
        redone = tuple(RedoneChunk(*one) for one in chunks)
        return cls(id, job, run, redone, tuple((table_id, sequence) for table_id, sequence in unshipped), detail)


def shipped_to(tx: Connection, table_id: str, sequence: int) -> list[str]:
    """The consumers that have shipped rows of this sequence, or have them in an open unit."""
    consumer, unit, sink = tables.consumers, tables.units, tables.sinks
    past = select(consumer.c.name).where(consumer.c.table_id == table_id, consumer.c.mark >= sequence)
    holds = (unit.c.since < sequence) & (unit.c.until >= sequence) & (unit.c.state == OPEN)
    under_way = select(sink.c.name).where(sink.c.id == unit.c.sink, unit.c.table_id == table_id, holds)
    found = {*tx.execute(past).scalars(), *(f"{CONSUMER}{name}" for name in tx.execute(under_way).scalars())}
    return sorted(found)


def shipped(table: str, names: Sequence[str]) -> Invalid:
    return Invalid(
        "rows of this chunk have been shipped, and the table has no key to replace them by",
        table=table,
        consumers=",".join(names),
        advice="Loaded again, they arrive there a second time. --force (force=True) does it all the same; "
        "take them out there first.",
    )


@dataclass(frozen=True)
class FillRider:
    """One run of a job fills a new column in rows of a table; each row once, so that counts add up.

    Checked under the lake's lock: a run that lost the job while it rewrote files publishes nothing more.
    """

    job: str
    run: str
    rows: int
    unfilled: int

    def check(self, tx: Connection) -> None:
        check_job(tx, self.job, self.run)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        _count(tx, self.job, self.rows, self.unfilled, now_ms)

    def as_dict(self) -> dict[str, Json]:
        return {"type": "fill", "job": self.job, "run": self.run, "rows": self.rows, "unfilled": self.unfilled}


def _count(tx: Connection, job: str, rows: int, unfilled: int, now_ms: int) -> None:
    row = tables.jobs
    counted = {
        "rows_done": row.c.rows_done + rows,
        "unfilled": row.c.unfilled + unfilled,
        "publishes": row.c.publishes + 1,
        "updated_ms": now_ms,
    }
    tx.execute(update(row).where(row.c.id == job).values(counted))
