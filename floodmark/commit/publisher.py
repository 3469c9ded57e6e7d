"""The publisher: the only code that moves a table's pointer (I1).

A publish is one short SQL transaction without file I/O. It locks fm_lake's row (a total order, so no deadlock), checks
that the operation is still staged (a fenced writer stops here), that every table still is where the builder found it,
and that the riders' preconditions hold; then pointers, heads, history, riders and the journal change together (I2).

Interleaving that this order excludes: a writer W is paused after its build; recovery R fences W and deletes its files;
W continues. W's publish reads its own row under the lock, finds `abandoned`, and stops before it touches a pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import Connection, bindparam, insert, select, update
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from floodmark import log
from floodmark.catalog import tables
from floodmark.catalog.database import Database, ReplyLost
from floodmark.catalog.history import History, branch_head
from floodmark.catalog.leases import NotYourTurn, Turns, end_turns
from floodmark.catalog.lineage import ENDED, Lineages
from floodmark.catalog.pointers import drop_table, insert_table, move_table, take_table
from floodmark.catalog.riders import AuditRider, PlanAgain, Rider
from floodmark.commit.build import Attempt, Builder, BuiltTable, Recheck
from floodmark.commit.dropped import current_dropped, taken_by
from floodmark.commit.journal import (
    ABANDONED,
    PUBLISHED,
    STAGED,
    Journal,
    JudgedState,
    Operation,
    OperationChanged,
    all_files,
    fenced,
)
from floodmark.commit.metadata import MetadataFiles, small_files_change
from floodmark.commit.seal import CREATE, DROP, TAKE, UNDROP, Seal
from floodmark.errors import Conflict, Corrupt, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.model import Commit, CurrentTable, TableCommit
from floodmark.storage import Storage

# Statements of every publish, made once. Parameters that no condition has are new values.
_COMMIT = insert(tables.commits)
_COMMIT_TABLES = insert(tables.commit_tables)
_BRANCH = update(tables.branches).where(tables.branches.c.name == bindparam("branch"))
_LAKE = update(tables.lake).where(tables.lake.c.id == 1)
_OPERATION = (
    select(tables.operations.c.state, tables.operations.c.version, tables.operations.c.seal_hash)
    .where(tables.operations.c.id == bindparam("operation"))
    .with_for_update()
)
_HEAD = select(tables.heads.c.snapshot, tables.heads.c.schema_id, tables.heads.c.spec_id).where(
    tables.heads.c.branch == bindparam("branch"), tables.heads.c.table_id == bindparam("table_id")
)


def record_commit(
    tx: Connection,
    operation: Operation,
    built_tables: Sequence[BuiltTable],
    version: int,
    parent: int,
    committed_ms: int,
) -> None:
    """The history, the branch's head, and the lake's version. A dropped table's row has no metadata location."""
    commit = {
        "version": version,
        "parent": parent,
        "branch": operation.branch,
        "operation": operation.id,
        "kind": operation.kind,
        "actor": operation.actor,
        "message": operation.message,
        "committed_ms": committed_ms,
        "state": "live",
    }
    tx.execute(_COMMIT, commit)
    rows = [
        {
            "version": version,
            "table_id": built.new.table_id,
            "table_name": built.new.table,
            "snapshot": built.new.snapshot,
            "sequence": built.new.sequence,
            "schema_id": built.new.schema_id,
            "spec_id": built.new.spec_id,
            "manifest_list": built.new.manifest_list,
            "metadata_location": built.new.metadata_location,
            "rows_added": built.edit.rows_added,
            "rows_updated": built.edit.rows_updated,
            "rows_deleted": built.edit.rows_deleted,
            "rows_total": built.new.rows,
            "files_total": built.new.files,
            "bytes_total": built.new.size_bytes,
        }
        for built in built_tables
    ]
    if rows:
        tx.execute(_COMMIT_TABLES, rows)
    # Also if no table moved: writers that wait for the turn must not wait for its lease.
    end_turns(tx, operation.id)
    _record_deletions(tx, built_tables, version)
    tx.execute(_BRANCH, {"branch": operation.branch, "head_version": version})
    tx.execute(_LAKE, {"version": version})


def _record_deletions(tx: Connection, built_tables: Sequence[BuiltTable], version: int) -> None:
    deletions = [
        {
            "table_id": built.new.table_id,
            "sequence": built.new.sequence,
            "location": file.path,
            "version": version,
            "rows_total": file.rows,
            "size_bytes": file.size_bytes,
        }
        for built in built_tables
        for file in built.edit.deletions
    ]
    if deletions:
        tx.execute(insert(tables.deletions), deletions)


def table_commit(built: BuiltTable) -> TableCommit:
    """What the commit did to a table, for the caller that made it."""
    new = built.new
    return TableCommit(
        table=new.table,
        table_id=new.table_id,
        snapshot=new.snapshot,
        sequence=new.sequence,
        rows_added=built.edit.rows_added,
        rows_updated=built.edit.rows_updated,
        rows_deleted=built.edit.rows_deleted,
        rows_total=new.rows,
        files_total=new.files,
    )


TRIES_MAX = 30
LOST_BEFORE_TURN = 3


class Publisher:
    def __init__(
        self, database: Database, journal: Journal, history: History, files: MetadataFiles, storage: Storage
    ) -> None:
        self._database = database
        self._journal = journal
        self._history = history
        self._files = files
        self._storage = storage
        self.turns = Turns(database)

    def publish(
        self,
        operation: Operation,
        seal: Seal,
        *,
        points: str,
        audit: AuditRider | None = None,
        leftovers: bool = False,
        recheck: Recheck | None = None,
        judged: JudgedState | None = None,
    ) -> Commit:
        """Build and publish a sealed operation; again from the new heads if it lost a race. Bounded, then Conflict.

        `points` prefixes the failpoints: the operation's kind, or `heal`. `leftovers`: the operation may have files
        that the seal does not name. `recheck` checks whether a checked edit fits a head that moved; without `recheck`
        it does not fit. `judged`: a recovering process publishes this seal only; raises OperationChanged if the writer
        has sealed another since. Returns the commit, also if another process published the operation meanwhile. Raises
        AlreadyCommitted for a batch that another operation published, and PlanAgain if an edit must be planned again;
        then nothing has happened.
        """
        builder = Builder(self._files, self._storage, operation, seal, recheck)
        for tries in range(TRIES_MAX):
            if tries == LOST_BEFORE_TURN:
                self.turns.take(operation.id, [edit.table_id for edit in seal.edits])
            attempt = builder.build(self._current(operation, seal))
            # Crash here: this attempt's files exist, nothing refers to them; recovery settles the operation.
            hit(f"{points}.built")
            try:
                commit = self._transact(operation, seal, attempt, points, audit, judged, cleaned=not leftovers)
                self._remember(attempt)
            except _HeadMoved:
                leftovers = True
                continue
            except NotYourTurn as other:
                leftovers = True
                self.turns.wait(other)
                continue
            except ReplyLost:
                leftovers = True
                found = self._ask(operation)
                if found is None:
                    continue
                commit = found
            except _Settled as settled:
                leftovers = True
                commit = self._settled(settled.operation)
            # Crash here: the commit is true; if files of lost attempts are left, its row shows it (`cleaned` is 0).
            hit(f"{points}.published")
            if leftovers:
                self.clean(operation, commit)
            hit(f"{points}.cleaned")
            return commit
        raise Conflict(
            "the tables kept changing under this operation",
            tries=TRIES_MAX,
            tables=",".join(edit.table for edit in seal.edits),
            advice="Run it again when there are fewer writers.",
        )

    def _current(self, operation: Operation, seal: Seal) -> dict[str, CurrentTable]:
        """The tables as the branch has them; a table that it takes from another branch, as that branch has it.

        A table that comes back: as the branch had it last.
        """
        wanted: dict[str, list[str]] = {}
        found: dict[str, CurrentTable] = {}
        for edit in seal.edits:
            if edit.action == UNDROP:
                with self._database.read() as tx:
                    found[edit.table] = current_dropped(tx, edit.table_id)
                continue
            taken_from = edit.source_branch if edit.action == TAKE else None
            wanted.setdefault(taken_from or operation.branch, []).append(edit.table)
        for branch, names in wanted.items():
            found.update(self._history.current_tables(branch, names))
        return found

    # ── the transaction ──

    def _transact(
        self,
        operation: Operation,
        seal: Seal,
        attempt: Attempt,
        points: str,
        audit: AuditRider | None,
        judged: JudgedState | None,
        *,
        cleaned: bool,
    ) -> Commit:
        riders: tuple[Rider, ...] = seal.riders if audit is None else (*seal.riders, audit)
        with self._database.write() as tx:
            lake = self._database.lock_lake(tx)
            hit(f"{points}.locked")
            parent = self._check_operation(tx, operation, judged)
            now = self._database.now_ms(tx)
            self.turns.check(tx, operation.id, [built.edit.table_id for built in attempt.tables], now)
            for built in attempt.tables:
                self._check_table(tx, built)
            for rider in riders:
                rider.check(tx)
            version = lake.version + 1
            committed_ms = max(now, self._history.committed_ms(tx, lake.version))
            for built in attempt.moved:
                self._move(tx, built, version)
            record_commit(tx, operation, attempt.moved, version, parent, committed_ms)
            self._journal.mark_published(tx, operation.id, version, committed_ms, cleaned=cleaned)
            for rider in riders:
                rider.apply(tx, operation.id, version, now)
            # Crash here: COMMIT was not sent, so the database undoes all of it.
            hit(f"{points}.moved")
        return Commit(
            version=version,
            outcome="committed",
            operation=operation.id,
            kind=operation.kind,
            branch=operation.branch,
            actor=operation.actor,
            message=operation.message,
            committed_ms=committed_ms,
            tables=tuple(table_commit(built) for built in attempt.moved),
        )

    def _check_operation(self, tx: Connection, operation: Operation, judged: JudgedState | None) -> int:
        """The operation may still be published, and its branch exists. Returns the branch's head version."""
        row = tx.execute(_OPERATION, {"operation": operation.id}).first()
        if row is None:
            raise Corrupt("the operation vanished from the journal", operation=operation.id)
        if row.state != STAGED:
            raise _Settled(replace(operation, state=row.state, version=row.version))
        if judged is not None and judged != JudgedState(row.state, row.seal_hash):
            raise OperationChanged(operation.id)
        head = branch_head(tx, operation.branch)
        if head is None:
            if Lineages.read(tx).state(operation.branch) == ENDED:
                raise Conflict("the branch was deleted meanwhile", branch=operation.branch)
            raise Corrupt("the branch has no row in the catalog", branch=operation.branch)
        return head

    def _check_table(self, tx: Connection, built: BuiltTable) -> None:
        if built.edit.action == CREATE:
            _check_name(tx, built.edit.table)
            return
        head, old = tables.heads, built.old
        branch = built.new.branch
        if built.edit.action == UNDROP:
            # Its rider checks that it is still dropped, and held.
            _check_name(tx, built.edit.table, built.edit.table_id)
            return
        if built.edit.action == TAKE and old is not None:
            mine = select(head.c.table_id).where(head.c.branch == branch, head.c.table_id == built.edit.table_id)
            if tx.execute(mine).scalar() is not None:
                raise PlanAgain(built.edit.table, "the branch got the table meanwhile")
            branch = old.branch
        row = tx.execute(_HEAD, {"branch": branch, "table_id": built.edit.table_id}).first()
        if row is None or old is None or tuple(row) != (old.snapshot, old.schema_id, old.spec_id):
            raise _HeadMoved()

    def _move(self, tx: Connection, built: BuiltTable, version: int) -> None:
        """Move Iceberg's pointer from old to new, only if it still is old; and our head."""
        edit, new = built.edit, built.new
        if built.old_pointer is None:
            # The small files of an adopted table were never counted.
            small = None if edit.adopted_files else small_files_change(edit, built.metadata)
            insert_table(tx, new, version, small)
            return
        if edit.action == DROP:
            moved = drop_table(tx, new, built.old_pointer)
        elif edit.action in (TAKE, UNDROP):
            moved = take_table(tx, new, version, built.old_pointer)
        else:
            moved = move_table(tx, new, version, built.old_pointer, small_files_change(edit, built.metadata))
        if not moved:
            raise _HeadMoved()

    # ── races, unknown outcomes, leftovers ──

    def _ask(self, operation: Operation) -> Commit | None:
        """COMMIT's reply was lost: read the row under its lock, which waits for a server that is still committing."""
        retrying = Retrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_attempt(6),
            wait=wait_exponential_jitter(multiplier=0.05, max=2, jitter=0.05),
            reraise=True,
        )
        found = retrying(self._journal.find, operation.id)
        if found is None:
            raise Corrupt("the operation vanished from the journal", operation=operation.id)
        return None if found.state == STAGED else self._settled(found)

    def _settled(self, found: Operation) -> Commit:
        if found.state == PUBLISHED and found.version is not None:
            return self._history.commit(found.version)
        if found.state == ABANDONED:
            raise fenced(found.id)
        raise Corrupt("the operation is in an unknown state", operation=found.id, state=found.state)

    def _remember(self, attempt: Attempt) -> None:
        for built in attempt.moved:
            if built.edit.action == DROP:
                continue
            self._files.remember_metadata(built.new.metadata_location, built.metadata)
            if built.manifests and built.new.manifest_list is not None:
                self._files.remember_manifests(built.new.manifest_list, built.manifests)
                for path, entries in built.added:
                    self._files.remember_entries(path, entries)

    def clean(self, operation: Operation, commit: Commit, *, last: bool = False) -> int:
        """Best effort: delete the files in a published operation's own folders that its commit does not name.

        Safe by state (I10): the operation is published, so no other attempt of it can ever be. Its row keeps track of
        files that cannot be deleted now, and of files that executors still write after this moment: a sweep checks once
        more, long after (`last`), while the commit's own files can still be identified.
        """
        try:
            named = self._files.own_files(self._history.touched(commit.version))
            named |= {file.location for file in self._history.deletions_of(commit.version)}
            found = [entry.location for folder in operation.folders for entry in all_files(self._storage, folder)]
            extra = [location for location in found if location not in named]
            with self._storage.batch():
                self._storage.delete_many(extra)
                # The folder of the seal: nothing in it is needed any more.
                self._storage.delete_prefix(operation.folders[0])
            # Crash here: the files are gone for good, and the row still records that they may exist.
            self._journal.mark_cleaned(operation.id, look_once_more=not last)
        except (Unavailable, NotFound) as error:
            # Not found: another process has cleaned it, and then swept the state of its commit.
            log.get(operation.id).warning("files of lost attempts stay for recovery", cause=str(error))
            return 0
        return len(extra)


class _HeadMoved(Exception):
    """The builder's view is out of date: build again."""


class _Settled(Exception):
    """The operation is not staged any more: another process ended it."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        super().__init__()


def _check_name(tx: Connection, name: str, table_id: str = "") -> None:
    """Table names are unique in the lake, across branches: other engines see one table under each name."""
    head, taken = tables.heads, taken_by(tx, name, table_id)
    if taken is None:
        return
    known = select(head.c.branch).where(head.c.table_name == taken).order_by(head.c.branch)
    branches = tx.execute(known).scalars().all()
    if not branches:
        raise Invalid(
            "another engine made a table of this name in the catalog",
            table=taken,
            advice="Choose another name, or take it out of the catalog with the engine that made it.",
        )
    raise Invalid(
        "there is a table of this name",
        table=taken,
        branches=",".join(branches),
        advice="Names do not differ by case only, nor by branch.",
    )
