"""The journal: every operation from its first byte to its last.

States: staging (files may exist, nothing refers to them) → staged (the seal is durable) → published (by the publisher
only) or abandoned (fenced: its writer can never publish it, so its files may be deleted). Each change is conditional on
the state before it, in one transaction; a process that comes late reads the row and obeys it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, literal_column, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import NOW_MS, Database, SqlRow
from floodmark.catalog.history import publish_facts
from floodmark.catalog.leases import OPERATION, Heartbeat, Holder, Runs, to_holder
from floodmark.catalog.riders import AuditRider, Rider
from floodmark.catalog.tables import CLEANED, LOOK_ONCE_MORE
from floodmark.catalog.turns import Turns, end_turns, end_waiting, waiting
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
class UnfinishedOperation:
    """The journal's row of an operation that has not ended, or that may have files left; with its holder.

    `folders` is the column's text: recovery must get past a row that cannot be understood.
    """

    id: str
    kind: str
    state: str
    branch: str
    actor: str
    message: str
    base_version: int
    folders: str
    version: int | None
    cleaned: int
    ended_ms: int | None
    seal_hash: str | None
    holder: Holder

    @property
    def judged(self) -> JudgedState:
        return JudgedState(self.state, self.seal_hash)


@dataclass(frozen=True)
class JudgedState:
    """What a recovering process judged: the operation's state, and the seal it had then (each seal is distinct)."""

    state: str
    seal_hash: str | None


@dataclass(frozen=True)
class Sealed:
    """How an operation was sealed. `apart`: its seal is an object, which must be deleted when the operation ends."""

    apart: bool = False
    has_turn: bool = False
    waits: bool = False


class OperationChanged(Exception):
    """The operation changed after it was judged: its writer lives, or another process settles it. Judge it again."""


@dataclass(frozen=True)
class JoiningOperation:
    """An operation that waits, and may be published by another process: its seal, and its hash to check it by."""

    operation: Operation
    seal: str
    seal_hash: str
    leftovers: bool


@dataclass(frozen=True)
class EndedOperation:
    """How an operation is published. `version`: if it makes one. `leader`: whose process did it, if not its own."""

    id: str
    version: int | None
    cleaned: bool
    leader: str | None = None


class Journal:
    def __init__(self, database: Database, storage: Storage, heartbeat: Heartbeat, location: str) -> None:
        self._database = database
        self._storage = storage
        self._heartbeat = heartbeat
        self._location = location
        self._runs = Runs(OPERATION, heartbeat)
        # Operations that run in this process right now.
        self.active = self._runs.active
        self.turns = Turns(database, self._runs.is_held)

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
                lake = self._database.lock_lake(tx)
                if batch is not None:
                    batch.check(tx)
                facts = publish_facts(tx, branch, lake.version)
                if facts.head_version is None:
                    raise NotFound("there is no such branch", branch=branch)
                now, base = facts.now_ms, facts.head_version
                self._heartbeat.beat(tx, now)
                base = base if held_version is None else min(base, held_version)
                begun = {
                    "id": operation,
                    "kind": kind,
                    "state": STAGING,
                    "branch": branch,
                    "actor": actor,
                    "message": message,
                    "process": self._heartbeat.id,
                    "base_version": base,
                    "begun_ms": now,
                    "folders": json.dumps(folders),
                    "cleaned": 0,
                }
                tx.execute(_BEGIN, begun)
        except BaseException:
            self.active.discard(operation)
            raise
        return Operation(operation, kind, STAGING, branch, actor, message, base, folders)

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

    def seal(self, operation: Operation, seal: Seal, *, leftovers: bool = False) -> Sealed:
        """Make the operation's record durable. From here on recovery may finish a repeatable operation.

        An operation that was planned again is sealed again: the new record replaces the old one in one statement. One
        that only appends takes the turn of its tables in the same transaction, or waits for it from there on: then
        another process may publish it. Any other waits if another operation has the turn: what it would build now, that
        one's publish would make out of date. `leftovers`: its folders may hold files that the seal does not name.
        """
        text = seal.to_text()
        values: dict[str, str | None] = {"state": STAGED, "seal_hash": seal_hash(text), "seal": text}
        sealed_apart = len(text) > INLINE_BYTES_MAX
        if sealed_apart:
            # A name of its own: the record that it replaces stays whole until it is replaced.
            location = join(operation.folders[0], f"seal-{clock.new_id()}.json")
            values |= {"seal": None, "seal_location": location}
            # Crash here: the object is in the operation's own folder, which recovery deletes.
            with self._storage.batch():
                self._storage.put(location, text.encode())
        has_turn = waits = False
        with self._database.write() as tx:
            changed = tx.execute(_SEAL, {"operation": operation.id, **values}).rowcount
            if changed:
                if seal.is_plain:
                    has_turn = self.turns.take_if_free(tx, operation.id, seal.table_ids)
                    waits = not has_turn
                else:
                    waits = self.turns.is_anothers(tx, operation.id, seal.table_ids)
                if waits:
                    joins = seal.is_plain and not sealed_apart
                    self.turns.wait_in_line(tx, operation.id, seal.table_ids, joins=joins, leftovers=leftovers)
        if changed == 0:
            raise fenced(operation.id)
        return Sealed(sealed_apart, has_turn, waits)

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

    def _sealed_row(self, operation: str) -> SqlRow | None:
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
        judged: JudgedState | None = None,
    ) -> tuple[Operation | None, bool]:
        """Fence an operation that is not published: from now on its writer cannot publish it. Idempotent.

        Returns its row after that (None: it was never begun; `published`: the writer was quicker), and whether this
        call fenced it. `given_up`: an operator gives it up, even if its row cannot be understood. `judged`: what the
        caller judged; raises OperationChanged if the operation changed since.
        """
        with self._database.write() as tx:
            query = select(tables.operations).where(tables.operations.c.id == operation)
            row = tx.execute(query.with_for_update()).first()
            if row is None or row.state in (PUBLISHED, ABANDONED):
                return (None if row is None else to_operation(row)), False
            if judged is not None and judged != JudgedState(row.state, row.seal_hash):
                raise OperationChanged(operation)
            now = self._database.now_ms(tx)
            tx.execute(
                update(tables.operations)
                .where(tables.operations.c.id == operation)
                .values(state=ABANDONED, ended_ms=now, seal=None)
            )
            end_turns(tx, [operation])
            end_waiting(tx, [operation])
            if audit is not None:
                audit.apply(tx, operation, None, now)
            return to_operation(row, state=ABANDONED, given_up=given_up), True

    def delete_files(self, operation: Operation) -> int:
        """Delete all files in the folders of an abandoned operation: it is fenced, nothing can refer to them (I10)."""
        with self._storage.batch():
            return sum(self._storage.delete_prefix(folder) for folder in operation.folders)

    def joining(
        self, tx: Connection, branch: str, table_ids: Collection[str], count_max: int
    ) -> list[JoiningOperation]:
        """The operations on this branch that wait for these tables only, and may be published by another process.

        Not those of dead processes: recovery decides about them.
        """
        wanted = [one for one in waiting(tx) if one.joins and one.table_ids <= set(table_ids)]
        now = self._database.now_ms(tx) if wanted else 0
        wanted = [one for one in wanted if self._runs.is_held(one.holder, now)][:count_max]
        if not wanted:
            return []
        query = select(tables.operations).where(
            tables.operations.c.id.in_([one.operation for one in wanted]),
            tables.operations.c.state == STAGED,
            tables.operations.c.branch == branch,
        )
        rows = {row.id: row for row in tx.execute(query)}
        return [
            JoiningOperation(to_operation(row), row.seal, row.seal_hash or "", one.leftovers)
            for one in wanted
            # Sealed again since it waits: the seal may be an object now.
            if (row := rows.get(one.operation)) is not None and row.seal is not None
        ]

    def mark_published(self, tx: Connection, ended: Sequence[EndedOperation], ended_ms: int) -> None:
        """Inside the publish transaction only: the operations are true from its COMMIT on."""
        rows = [
            {
                "operation": one.id,
                "state": PUBLISHED,
                "version": one.version,
                "ended_ms": ended_ms,
                "seal": None,
                "cleaned": int(one.cleaned),
            }
            for one in ended
        ]
        tx.execute(_CHANGE, rows)
        led = [{"operation": one.id, "leader": one.leader, "version": one.version} for one in ended if one.leader]
        if led:
            tx.execute(_LED, led)

    def versions_led_by(self, operation: str) -> list[int]:
        """The versions of other operations whose metadata files are in this one's folders."""
        with self._database.read() as tx:
            return list(tx.execute(select(tables.led.c.version).where(tables.led.c.leader == operation)).scalars())

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

    def unfinished(self) -> tuple[list[UnfinishedOperation], int]:
        """Every operation that has not ended, with its holder's heartbeat, and the database's time: one query."""
        rows = self._database.ask(_UNFINISHED[self._database.dialect])
        return [_to_unfinished(row) for row in rows], rows[0].now_ms if rows else 0

    def is_own(self, operation: UnfinishedOperation) -> bool:
        """Whether this process began it."""
        return self._runs.is_own(operation.holder)

    def is_dead(self, operation: UnfinishedOperation, now_ms: int) -> bool:
        """Whether no process works on it any more."""
        return not self._runs.is_held(operation.holder, now_ms)


# Statements of every commit, made once. Other parameters than the row's id are its new values.
_BEGIN = insert(tables.operations)
_LED = insert(tables.led)
_CHANGE = update(tables.operations).where(tables.operations.c.id == bindparam("operation"))
_SEAL = _CHANGE.where(tables.operations.c.state.in_((STAGING, STAGED)))
_UNFINISHED = {
    # Without the seals: every write asks this, and they are by far the largest part of a row.
    dialect: OPERATION.select(
        *(column for column in tables.operations.c if column is not tables.operations.c.seal),
        literal_column(now).label("now_ms"),
    )
    .where(tables.unfinished)
    .order_by(tables.operations.c.id)
    for dialect, now in NOW_MS.items()
}


def _to_unfinished(row: SqlRow) -> UnfinishedOperation:
    return UnfinishedOperation(
        row.id,
        row.kind,
        row.state,
        row.branch,
        row.actor,
        row.message,
        row.base_version,
        row.folders,
        row.version,
        row.cleaned,
        row.ended_ms,
        row.seal_hash,
        to_holder(row),
    )


def all_files(storage: Storage, folder: str) -> Iterator[Entry]:
    """Every file below a folder, including temporary files of crashed or unfinished writes."""
    yield from storage.list(folder)
    yield from storage.list(folder, temporary=True)


def own_folders(operation: str, table_locations: Sequence[str]) -> tuple[str, ...]:
    """The folders that only this operation writes into: <table>/data/<operation> and <table>/metadata/<operation>."""
    return tuple(join(location, part, operation) for location in table_locations for part in ("data", "metadata"))


def fenced(operation: str) -> Fenced:
    return Fenced(
        "this operation was undone by recovery",
        operation=operation,
        advice="Nothing of it is left; run it again if its rows are still wanted.",
    )


def to_operation(row: SqlRow | UnfinishedOperation, state: str | None = None, *, given_up: bool = False) -> Operation:
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
