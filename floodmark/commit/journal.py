"""The journal: every operation from its first byte to its last.

States: staging (files may exist, nothing refers to them) → staged (the seal is durable) → published (by the publisher
only) or abandoned (fenced: its writer can never publish it, so its files may be deleted). Each change is conditional on
the state before it, in one transaction; a process that comes late reads the row and obeys it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.processes import Heartbeat
from floodmark.catalog.riders import AuditRider, Rider
from floodmark.catalog.tables import CLEANED, LOOK_ONCE_MORE
from floodmark.commit.seal import INLINE_BYTES_MAX, Seal, seal_hash
from floodmark.errors import Corrupt, Fenced, NotFound
from floodmark.storage import Entry, Storage, join

STAGING, STAGED, PUBLISHED, ABANDONED = "staging", "staged", "published", "abandoned"
STATES = frozenset({STAGING, STAGED, PUBLISHED, ABANDONED})


@dataclass(frozen=True)
class Operation:
    """One row of the journal."""

    id: str
    kind: str
    state: str
    branch: str
    actor: str
    message: str
    base_version: int
    folders: tuple[str, ...]
    version: int | None = None
    cleaned: bool = False

    def folder(self, table_location: str, part: str) -> str:
        """The folder that only this operation writes into: <table>/data/<operation> or <table>/metadata/<operation>."""
        return join(table_location, part, self.id)


@dataclass(frozen=True)
class Judged:
    """What a recovering process judged: the operation's state, and the seal it had then (each seal is distinct)."""

    state: str
    seal_hash: str | None

    @classmethod
    def of(cls, row: Any) -> Judged:
        return cls(row.state, row.seal_hash)


class Moved(Exception):
    """The operation changed after it was judged: its writer lives, or another process settles it. Judge it again."""


class Journal:
    def __init__(self, database: Database, storage: Storage, heartbeat: Heartbeat, location: str) -> None:
        self._database = database
        self._storage = storage
        self._heartbeat = heartbeat
        self._location = location
        # Operations that run in this process right now. One of this process that is missing here ended without an
        # answer (CommitUnknown), and is as dead as one of a killed process.
        self.active: set[str] = set()

    def begin(
        self,
        kind: str,
        *,
        branch: str,
        actor: str,
        message: str,
        batch: Rider | None = None,
        table_locations: Sequence[str] = (),
        held_version: int | None = None,
    ) -> Operation:
        """Record the operation before its first byte. Raises AlreadyCommitted for a batch that is already published.

        It keeps the branch's head and all later versions from expiry, and all from `held_version` on if that is older.
        """
        operation = clock.new_id()
        folders = (join(self._location, "operations", operation), *own_folders(operation, table_locations))
        self._heartbeat.start()
        self.active.add(operation)
        try:
            with self._database.write() as tx:
                self._database.lock_lake(tx)
                if batch is not None:
                    batch.check(tx)
                now = self._database.now_ms(tx)
                self._heartbeat.beat(tx, now)
                base = self._branch_head(tx, branch)
                base = base if held_version is None else min(base, held_version)
                tx.execute(
                    insert(tables.operations).values(
                        id=operation,
                        kind=kind,
                        state=STAGING,
                        branch=branch,
                        actor=actor,
                        message=message,
                        process=self._heartbeat.id,
                        base_version=base,
                        begun_ms=now,
                        folders=json.dumps(folders),
                        cleaned=0,
                    )
                )
        except BaseException:
            self.active.discard(operation)
            raise
        return Operation(operation, kind, STAGING, branch, actor, message, base, folders)

    def _branch_head(self, tx: Connection, branch: str) -> int:
        head = tx.execute(select(tables.branches.c.head_version).where(tables.branches.c.name == branch)).scalar()
        if head is None:
            raise NotFound("there is no such branch", branch=branch)
        return int(head)

    def add_table(self, operation: Operation, table_location: str) -> Operation:
        """Record the folders that the operation is about to write into, so that recovery finds them."""
        named = operation.folders + own_folders(operation.id, [table_location])
        with self._database.write() as tx:
            changed = tx.execute(
                update(tables.operations)
                .where(tables.operations.c.id == operation.id, tables.operations.c.state == STAGING)
                .values(folders=json.dumps(named))
            ).rowcount
        if changed == 0:
            raise fenced(operation.id)
        return Operation(**{**operation.__dict__, "folders": named})

    def seal(self, operation: Operation, seal: Seal) -> bool:
        """Make the operation's record durable. From here on recovery may finish a repeatable operation.

        An operation that was planned again is sealed again: the new record replaces the old one in one statement.
        Returns whether the seal is a separate object, which must be deleted when the operation ends.
        """
        text = seal.to_text()
        values: dict[str, Any] = {"state": STAGED, "seal_hash": seal_hash(text), "seal": text}
        if len(text) > INLINE_BYTES_MAX:
            # A name of its own: the record that it replaces stays whole until it is replaced.
            values["seal"], values["seal_location"] = None, join(operation.folders[0], f"seal-{clock.new_id()}.json")
            # Crash here: the object is in the operation's own folder, which recovery deletes.
            with self._storage.batch():
                self._storage.put(values["seal_location"], text.encode())
        with self._database.write() as tx:
            changed = tx.execute(
                update(tables.operations)
                .where(tables.operations.c.id == operation.id, tables.operations.c.state.in_((STAGING, STAGED)))
                .values(**values)
            ).rowcount
        if changed == 0:
            raise fenced(operation.id)
        return values["seal"] is None

    def read_seal(self, operation: str) -> Seal | None:
        """What a staged operation will do; None if it is not staged any more, because another process settled it."""
        row = self._sealed_row(operation)
        if row is None:
            return None
        text = row.seal
        if text is None and row.seal_location is not None:
            try:
                text = self._storage.read(row.seal_location).decode()
            except (NotFound, UnicodeDecodeError) as error:
                if self._sealed_row(operation) is None:
                    return None  # settled, and its folder deleted, between the two reads
                raise Corrupt(
                    "the record of this operation is gone", operation=operation, location=row.seal_location
                ) from error
        return Seal.from_text(operation, text or "", row.seal_hash or "")

    def _sealed_row(self, operation: str) -> Any:
        query = select(tables.operations).where(
            tables.operations.c.id == operation, tables.operations.c.state == STAGED
        )
        with self._database.read() as tx:
            return tx.execute(query).first()

    def find(self, operation: str) -> Operation | None:
        """Read an operation's row under its lock: this waits for a server that is still committing it (I13)."""
        query = select(tables.operations).where(tables.operations.c.id == operation)
        if self._database.read_only:
            with self._database.read() as tx:
                row = tx.execute(query).first()
        else:
            with self._database.write() as tx:
                row = tx.execute(query.with_for_update()).first()
        return None if row is None else to_operation(row)

    def abandon(
        self,
        operation: str,
        audit: AuditRider | None = None,
        *,
        given_up: bool = False,
        judged: Judged | None = None,
    ) -> tuple[Operation | None, bool]:
        """Fence an operation that is not published: from now on its writer cannot publish it. Idempotent.

        Returns its row after that (None: it was never begun; `published`: the writer was quicker), and whether this
        call fenced it. `given_up`: an operator gives it up, even if its row cannot be understood. `judged`: what the
        caller judged; raises Moved if the operation changed since.
        """
        with self._database.write() as tx:
            query = select(tables.operations).where(tables.operations.c.id == operation)
            row = tx.execute(query.with_for_update()).first()
            if row is None or row.state in (PUBLISHED, ABANDONED):
                return (None if row is None else to_operation(row)), False
            if judged is not None and judged != Judged.of(row):
                raise Moved(operation)
            now = self._database.now_ms(tx)
            tx.execute(
                update(tables.operations)
                .where(tables.operations.c.id == operation)
                .values(state=ABANDONED, ended_ms=now, seal=None)
            )
            tx.execute(delete(tables.turns).where(tables.turns.c.operation == operation))
            if audit is not None:
                audit.apply(tx, operation, None, now)
            return to_operation(row, state=ABANDONED, given_up=given_up), True

    def delete_files(self, operation: Operation) -> int:
        """Delete all files in the folders of an abandoned operation: it is fenced, nothing can refer to them (I10)."""
        with self._storage.batch():
            return sum(self._storage.delete_prefix(folder) for folder in operation.folders)

    def mark_published(self, tx: Connection, operation: str, version: int, ended_ms: int, *, cleaned: bool) -> None:
        """Inside the publish transaction only: the operation is true from its COMMIT on."""
        tx.execute(
            update(tables.operations)
            .where(tables.operations.c.id == operation)
            .values(state=PUBLISHED, version=version, ended_ms=ended_ms, seal=None, cleaned=int(cleaned))
        )

    def mark_restless(self, operation: str, now_ms: int) -> None:
        """Files appeared again in an abandoned operation's folders: its quiet time starts again."""
        with self._database.write() as tx:
            tx.execute(update(tables.operations).where(tables.operations.c.id == operation).values(ended_ms=now_ms))

    def mark_cleaned(self, operation: str, *, look_once_more: bool = False) -> None:
        """On disk are only the files that its commit names; `look_once_more`: its executors may still write."""
        values = {"cleaned": LOOK_ONCE_MORE if look_once_more else CLEANED}
        with self._database.write() as tx:
            tx.execute(update(tables.operations).where(tables.operations.c.id == operation).values(**values))

    def to_look_at(self, quiet_ms: int) -> list[Operation]:
        """Operations that ended so long ago that their executors have finished writing."""
        table = tables.operations
        with self._database.read() as tx:
            over = self._database.now_ms(tx) - quiet_ms
            query = (
                select(table).where(table.c.cleaned == LOOK_ONCE_MORE, table.c.ended_ms <= over).order_by(table.c.id)
            )
            return [to_operation(row, given_up=True) for row in tx.execute(query)]

    def states_of(self, operations: Sequence[str]) -> dict[str, str]:
        """The states of these operations; ids that the journal does not have are left out."""
        table = tables.operations
        found: dict[str, str] = {}
        with self._database.read() as tx:
            for start in range(0, len(operations), 500):
                some = select(table.c.id, table.c.state).where(table.c.id.in_(operations[start : start + 500]))
                found.update({row.id: row.state for row in tx.execute(some)})
        return found

    def unfinished(self) -> tuple[list[Any], int]:
        """Every operation that has not ended, with its holder's heartbeat, and the database's time: one query."""
        table, process = tables.operations, tables.processes
        query = (
            select(
                table,
                process.c.host,
                process.c.boot_id,
                process.c.pid_namespace,
                process.c.pid,
                process.c.started,
                process.c.beat_ms,
                process.c.lease_ms,
            )
            .join(process, process.c.id == table.c.process, isouter=True)
            .where(tables.unfinished)
            .order_by(table.c.id)
        )
        with self._database.read() as tx:
            rows = list(tx.execute(query))
            return rows, self._database.now_ms(tx) if rows else 0

    def is_own(self, row: Any) -> bool:
        return bool(row.process == self._heartbeat.id)


def all_files(storage: Storage, folder: str) -> Iterator[Entry]:
    """Every file below a folder, including temporary files of crashed or unfinished writes."""
    yield from storage.list(folder)
    yield from storage.list(folder, temporary=True)


def own_folders(operation: str, table_locations: Sequence[str]) -> tuple[str, ...]:
    """The folders that only this operation writes into: <table>/data/<operation> and <table>/metadata/<operation>."""
    return tuple(join(location, part, operation) for location in table_locations for part in ("data", "metadata"))


def fenced(operation: str) -> Fenced:
    return Fenced(
        "this operation was taken over and undone by a healer",
        operation=operation,
        advice="Nothing of it is left; run it again if its rows are still wanted.",
    )


def to_operation(row: Any, state: str | None = None, *, given_up: bool = False) -> Operation:
    try:
        folders = tuple(str(folder) for folder in json.loads(row.folders))
    except (ValueError, TypeError) as error:
        if not given_up:
            raise Corrupt(
                "the journal's row cannot be understood",
                operation=row.id,
                column="folders",
                advice="It is kept. `floodmark recover --discard OPERATION --apply` gives it up; its files stay.",
            ) from error
        folders = ()
    return Operation(
        row.id,
        row.kind,
        state or row.state,
        row.branch,
        row.actor,
        row.message,
        row.base_version,
        folders,
        row.version,
        bool(row.cleaned),
    )
