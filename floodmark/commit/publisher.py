"""The publisher: the only code that moves a table's pointer (I1).

A publish is one short SQL transaction without file I/O. It locks fm_lake's row (a total order, so no deadlock), checks
that the operation is still staged (a fenced writer stops here), that every table still is where the builder found it,
and that the riders' preconditions hold; then pointers, heads, history, riders and the journal change together (I2).

Interleaving that this order excludes: a writer W is paused after its build; recovery R fences W and deletes its files;
W continues. W's publish reads its own row under the lock, finds `abandoned`, and stops before it touches a pointer.

Publishing together: the leader has the turn of its tables. It builds the snapshots of appends that wait for them
after its own, and publishes all in one transaction, each with its own version, riders and row in the journal. One that
ended or is refused meanwhile is taken out, and the rest is built again. Crash of a leader: nothing of its attempt was
published, or all of it; its files are in its own folders, recovery settles its operation, others publish those that
wait. Crash of one that waits: its seal is complete; the leader publishes it, or recovery fences it first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from sqlalchemy import Connection, bindparam, insert, select, update
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from floodmark import clock, log
from floodmark.catalog import tables
from floodmark.catalog.database import Database, ReplyLost
from floodmark.catalog.history import History, publish_facts
from floodmark.catalog.indexes import Indexes
from floodmark.catalog.lineage import ENDED, Lineages
from floodmark.catalog.pointers import TableMove, drop_table, insert_table, move_tables, rename_table, take_table
from floodmark.catalog.riders import AlreadyCommitted, AuditRider, PlanAgain, Rider
from floodmark.catalog.turns import NotYourTurn, end_turns, end_waiting, refuse_join
from floodmark.commit.build import Attempt, Builder, BuiltTable, Chain, Recheck
from floodmark.commit.dropped import current_dropped, taken_by
from floodmark.commit.journal import (
    ABANDONED,
    PUBLISHED,
    STAGED,
    EndedOperation,
    Journal,
    JudgedState,
    Operation,
    OperationChanged,
    Sealed,
    all_files,
    fenced,
)
from floodmark.commit.metadata import MetadataFiles, small_files_change
from floodmark.commit.seal import CREATE, DROP, RENAME, TAKE, UNDROP, WRITE, Edit, Seal
from floodmark.errors import Conflict, Corrupt, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.model import Commit, CurrentTable, TableCommit
from floodmark.storage import Storage

# Statements of every publish, made once. Parameters that no condition has are new values.
_COMMIT = insert(tables.commits)
_COMMIT_TABLES = insert(tables.commit_tables)
_BRANCH = update(tables.branches).where(tables.branches.c.name == bindparam("branch"))
_LAKE = update(tables.lake).where(tables.lake.c.id == 1)
_OPERATION = select(
    tables.operations.c.id, tables.operations.c.state, tables.operations.c.version, tables.operations.c.seal_hash
).with_for_update()
_OPERATION_ONE = _OPERATION.where(tables.operations.c.id == bindparam("operation"))
_OPERATION_MANY = _OPERATION.where(tables.operations.c.id.in_(bindparam("operations", expanding=True)))
_STATES = select(*(tables.heads.c[name] for name in ("branch", "table_id", "snapshot", "schema_id", "spec_id")))
_HEAD = _STATES.where(tables.heads.c.branch == bindparam("branch"), tables.heads.c.table_id == bindparam("table_id"))
_HEADS = _STATES.where(tables.heads.c.table_id.in_(bindparam("table_ids", expanding=True)))


@dataclass
class Publishing:
    """One operation of a group, from its seal to its version.

    `judged`: what its process judged of it; of one that joins, the seal that was read. `cleaned`: its folders hold no
    file that its commit does not name. `version`: once it has one; of one that makes none, the lake's.
    """

    operation: Operation
    seal: Seal
    builder: Builder
    riders: tuple[Rider, ...]
    judged: JudgedState | None
    cleaned: bool
    waited: bool = False
    leader: str | None = None
    attempt: Attempt = field(default_factory=lambda: Attempt(""))
    version: int = 0

    def writes_into(self, edit: Edit) -> bool:
        """Whether the journal has the table's folders as the operation's own."""
        return self.operation.folder(edit.location, "metadata") in self.operation.folders


@dataclass
class Leading(Publishing):
    """The operation of this process, over its tries. `left_out`: those that it cannot publish with its own."""

    sealed: Sealed = field(default_factory=Sealed)
    has_turn: bool = False
    waits: bool = False
    tries: int = 0
    left_out: set[str] = field(default_factory=set)

    def lost(self) -> None:
        """This try was lost: its files are left."""
        self.tries += 1
        self.cleaned = False


def record_commits(tx: Connection, group: Sequence[Publishing], parent: int, committed_ms: int) -> None:
    """The history, the branch's head, and the lake's version. A dropped table's row has no metadata location."""
    commits = [
        {
            "version": one.version,
            "parent": before,
            "branch": one.operation.branch,
            "operation": one.operation.id,
            "kind": one.operation.kind,
            "actor": one.operation.actor,
            "message": one.operation.message,
            "committed_ms": committed_ms,
            "state": "live",
        }
        for one, before in zip(group, (parent, *(one.version for one in group)), strict=False)
    ]
    tx.execute(_COMMIT, commits)
    rows = [
        {
            "version": one.version,
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
        for one in group
        for built in one.attempt.moved
    ]
    if rows:
        tx.execute(_COMMIT_TABLES, rows)
    _record_deletions(tx, group)
    version = group[-1].version
    tx.execute(_BRANCH, {"branch": group[-1].operation.branch, "head_version": version})
    tx.execute(_LAKE, {"version": version})


def _record_deletions(tx: Connection, group: Sequence[Publishing]) -> None:
    deletions = [
        {
            "table_id": built.new.table_id,
            "sequence": built.new.sequence,
            "location": file.path,
            "version": one.version,
            "rows_total": file.rows,
            "size_bytes": file.size_bytes,
        }
        for one in group
        for built in one.attempt.moved
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
# Operations that are published together: the last one's riders wait for all of them.
GROUP_MAX = 32
GROUP_S_MAX = 1.0
# After so many that had to be left out, only operations without riders join: nothing can refuse those.
LEFT_OUT_MAX = 2
# How often an operation that waits asks: often if it is next, since most waits are short. The more are ahead of it, the
# less often: what all that wait ask for together must not slow the one that publishes.
ASK_S_MIN, NEXT_ASK_S_MAX, ASK_GROWS, ASK_S_MAX = 0.008, 0.025, 1.3, 0.2
# How often the one that is next looks whether the holder of the turn is dead; those behind it less often.
LOOK_S, LOOK_S_MAX = 0.25, 1.0
WAIT_S_MAX = 600.0


class Publisher:
    def __init__(
        self,
        database: Database,
        journal: Journal,
        history: History,
        indexes: Indexes,
        files: MetadataFiles,
        storage: Storage,
    ) -> None:
        self._database = database
        self._indexes = indexes
        self._journal = journal
        self._history = history
        self._files = files
        self._storage = storage
        self.turns = journal.turns

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
        sealed: Sealed | None = None,
    ) -> Commit:
        """Build and publish a sealed operation; again from the new heads if it lost a race. Bounded, then Conflict.

        `points` prefixes the failpoints: the operation's kind, or `heal`. `leftovers`: the operation may have files
        that the seal does not name. `recheck` checks whether a checked edit fits a head that moved; without `recheck`
        it does not fit. `judged`: a recovering process publishes this seal only; raises OperationChanged if the writer
        has sealed another since. `sealed`: whether it has the turn of its tables, or waits for it. Returns the commit,
        also if another process published the operation meanwhile. Raises AlreadyCommitted for a batch that another
        operation published, and PlanAgain if an edit must be planned again; then nothing has happened.
        """
        riders: tuple[Rider, ...] = seal.riders if audit is None else (*seal.riders, audit)
        builder = Builder(self._storage, operation, seal, recheck)
        own = Leading(operation, seal, builder, riders, judged, cleaned=not leftovers, sealed=sealed or Sealed())
        own.has_turn, own.waits = own.sealed.has_turn, own.sealed.waits
        # An append fits every head: it never fails because other writers are quicker.
        while own.tries < TRIES_MAX or seal.is_plain:
            commit = self._wait(own) if own.waits else None
            commit = commit or self._try(own, points)
            if commit is not None:
                return self._finish(own, commit, points)
        raise Conflict(
            "the tables kept changing under this operation",
            tries=TRIES_MAX,
            tables=",".join(edit.table for edit in seal.edits),
            advice="Run it again when there are fewer writers.",
        )

    def _try(self, own: Leading, points: str) -> Commit | None:
        """One attempt: build and publish. None: it was lost, and the next one may win, or must wait for its turn."""
        try:
            group = self._build(own)
            # Crash here: this attempt's files exist, nothing refers to them; recovery settles the operation.
            hit(f"{points}.built")
            commit = self._transact(group, points, own.left_out, hands_over=own.waited or len(group) > 1)
            self._remember(group)
        except _HeadMoved:
            own.lost()
            if own.tries >= LOST_BEFORE_TURN and not own.has_turn:
                self._wait_in_line(own)
        except NotYourTurn:
            own.lost()
            self._wait_in_line(own)
        except PlanAgain:
            if own.waited or own.has_turn:
                self._leave_line(own.operation)
            raise
        except _LeftOut as other:
            own.cleaned = False
            own.left_out.add(other.operation)
        except ReplyLost:
            own.lost()
            return self._ask(own.operation)
        except _Settled as settled:
            own.cleaned = False
            return self._settled(settled.operation)
        else:
            return commit
        return None

    def _finish(self, own: Publishing, commit: Commit, points: str) -> Commit:
        # Crash here: the commit is true; if files of lost attempts are left, its row shows it (`cleaned` is 0).
        hit(f"{points}.published")
        if not own.cleaned:
            self.clean(own.operation, commit.version if own.seal.makes_version else None)
        hit(f"{points}.cleaned")
        return commit

    # ── waiting for a turn ──

    def _wait_in_line(self, own: Leading) -> None:
        """Wait for the turn from now on. Unless it only appends, its own process must check it on the new heads."""
        joins = own.seal.is_plain and not own.sealed.apart
        with self._database.write() as tx:
            row = tx.execute(_OPERATION_ONE, {"operation": own.operation.id}).first()
            # If it has ended meanwhile, it finds that when it asks.
            if row is not None and row.state == STAGED:
                self.turns.wait_in_line(tx, own.operation.id, own.seal.table_ids, joins=joins, leftovers=True)
        own.has_turn, own.waits = False, True

    def _leave_line(self, operation: Operation) -> None:
        """It is planned again, which may take long: others do not wait for it, and it waits anew afterwards."""
        with self._database.write() as tx:
            end_turns(tx, [operation.id])
            end_waiting(tx, [operation.id])

    def _wait(self, own: Leading) -> Commit | None:
        """Wait until the operation has the turn of its tables (None), or another process published it (its commit)."""
        operation, seal, own.waited = own.operation, own.seal, True
        # Crash here: it is sealed and waits; a leader publishes it, or recovery settles it.
        hit("turn.queued")
        began = time.monotonic()
        end, looked, delay, was_free = began + WAIT_S_MAX, began, ASK_S_MIN, False
        while time.monotonic() < end:
            standing = self.turns.ask(operation.id, seal.table_ids)
            if standing.state != STAGED:
                found = self._journal.find(operation.id)
                if found is None:
                    raise Corrupt("the operation vanished from the journal", operation=operation.id)
                return self._settled(found)
            has_turn = standing.has_turn
            # A free turn is for the one that is next. If it stays free, those ahead may be dead; so may its holder be.
            looks = standing.free and (was_free or not standing.ahead)
            was_free = standing.free
            if not has_turn and (looks or time.monotonic() - looked >= min(LOOK_S * (1 + standing.ahead), LOOK_S_MAX)):
                looked = time.monotonic()
                # Read first: all that wait ask, and only one may write.
                is_next = self.turns.is_next(operation.id, seal.table_ids)
                has_turn = is_next and self.turns.take_next(operation.id, seal.table_ids)
            if has_turn:
                # Crash here: it has the turn; others see its death, or wait until its lease ends.
                hit("turn.taken")
                own.has_turn, own.waits = True, False
                return None
            hit("turn.waiting")
            time.sleep(min(delay * (1 + standing.ahead), ASK_S_MAX))
            delay = min(delay * ASK_GROWS, NEXT_ASK_S_MAX)
        raise Unavailable(
            "other writers of these tables did not finish",
            operation=operation.id,
            tables=",".join(edit.table for edit in seal.edits),
            advice="`floodmark status` shows who waits; retry.",
        )

    # ── building ──

    def _build(self, own: Leading) -> list[Publishing]:
        """Build the operation, and after it, if it has their turn, those that wait for the same tables.

        One that cannot be built is left out: it publishes itself, and its own process raises what is wrong with it.
        """
        # Recovery publishes what it judged, alone.
        leads = own.has_turn and own.judged is None
        with self._database.read() as tx:
            chain = Chain(self._files, self._current(tx, own.operation, own.seal))
            joining = self._joining(tx, own) if leads else ()
        if leads:
            # Crash here: the seals of others were read, nothing was written for them.
            hit("turn.joined")
        group: list[Publishing] = [own]
        # One barrier for all files of this attempt: nothing reads them before it ends. An error ends the operation or
        # its plan, so no later attempt counts on a file that was dropped.
        with self._storage.together():
            own.attempt = own.builder.build(chain)
            chain.add(own.attempt)
            end = time.monotonic() + GROUP_S_MAX
            for one in joining:
                if time.monotonic() > end:
                    break
                try:
                    one.attempt = one.builder.build(chain)
                except Unavailable:
                    raise
                except (PlanAgain, FloodmarkError) as error:
                    log.get(one.operation.id).info("not published together with others", cause=str(error))
                    own.cleaned = False
                    own.left_out.add(one.operation.id)
                    continue
                chain.add(one.attempt)
                group.append(one)
            chain.write()
        return group

    def _joining(self, tx: Connection, own: Leading) -> list[Publishing]:
        if any(edit.action != WRITE or edit.pointer_found is not None for edit in own.seal.edits):
            return []
        # The journal knows where the leader writes; a table that it only depends on is not among that.
        written = {edit.table_id for edit in own.seal.edits if own.writes_into(edit)}
        joining = []
        for one in self._journal.joining(tx, own.operation.branch, written, GROUP_MAX):
            if one.operation.id in own.left_out or one.operation.id == own.operation.id:
                continue
            try:
                seal = Seal.from_text(one.operation.id, one.seal, one.seal_hash)
            except Corrupt:
                continue  # recovery refuses it by name
            if seal.riders and len(own.left_out) >= LEFT_OUT_MAX:
                continue  # each refusal costs a build of all others
            builder = Builder(self._storage, one.operation, seal, leader=own.operation)
            judged = JudgedState(STAGED, one.seal_hash)
            leader, cleaned = own.operation.id, not one.leftovers
            joining.append(
                Publishing(one.operation, seal, builder, seal.riders, judged, cleaned, waited=True, leader=leader)
            )
        return joining[: GROUP_MAX - 1]

    def _current(self, tx: Connection, operation: Operation, seal: Seal) -> dict[str, CurrentTable]:
        """The tables as the branch has them; a table that it takes from another branch, as that branch has it.

        A table that comes back: as the branch had it last.
        """
        wanted: dict[str, list[str]] = {}
        found: dict[str, CurrentTable] = {}
        for edit in seal.edits:
            if edit.action == UNDROP:
                found[edit.table] = current_dropped(tx, edit.table_id)
                continue
            taken_from = edit.source_branch if edit.action == TAKE else None
            wanted.setdefault(taken_from or operation.branch, []).append(edit.table)
        for branch, names in wanted.items():
            found.update(self._history.current_in(tx, branch, names))
        return found

    # ── the transaction ──

    def _transact(
        self, group: Sequence[Publishing], points: str, left_out: Collection[str], *, hands_over: bool
    ) -> Commit:
        """Publish all operations of the group, or none. Returns the commit of the first one, which leads."""
        own = group[0]
        operation = own.operation
        with self._database.write() as tx:
            lake = self._database.lock_lake(tx)
            hit(f"{points}.locked")
            self._check_operations(tx, group)
            facts = publish_facts(tx, operation.branch, lake.version)
            parent, now = self._check_branch(tx, operation.branch, facts.head_version), facts.now_ms
            self.turns.check(tx, operation.id, sorted(own.seal.table_ids), now)
            self._check_tables(tx, own.attempt.tables)
            committed_ms = max(now, facts.committed_ms)
            for place, one in enumerate(group, start=1):
                one.version = lake.version + (place if one.seal.makes_version else 0)
            moved: set[str] = set()
            for run in _runs(group):
                # The riders of an operation see what the operations before it wrote.
                self._check_riders(tx, run[0], own)
                self._move_tables(tx, run, moved)
                if run[0].seal.makes_version:
                    record_commits(tx, run, parent, committed_ms)
                self._end(tx, run, committed_ms)
                parent = run[-1].version
                for rider in run[0].riders:
                    rider.apply(tx, run[0].operation.id, run[0].version, now)
            if left_out:
                refuse_join(tx, left_out)
            if hands_over:
                self.turns.hand_over(tx, own.seal.table_ids, now)
            # Crash here: COMMIT was not sent, so the database undoes all of it.
            hit(f"{points}.moved")
        return Commit(
            version=own.version,
            outcome="committed",
            operation=operation.id,
            kind=operation.kind,
            branch=operation.branch,
            actor=operation.actor,
            message=operation.message,
            committed_ms=committed_ms,
            tables=tuple(table_commit(built) for built in own.attempt.moved),
        )

    def _check_operations(self, tx: Connection, group: Sequence[Publishing]) -> None:
        """Each may still be published, from the seal that was built."""
        own = group[0].operation
        if len(group) == 1:
            found = tx.execute(_OPERATION_ONE, {"operation": own.id})
        else:
            found = tx.execute(_OPERATION_MANY, {"operations": [one.operation.id for one in group]})
        rows = {row.id: row for row in found}
        if own.id not in rows:
            raise Corrupt("the operation vanished from the journal", operation=own.id)
        for one in group:
            row = rows.get(one.operation.id)
            if one.operation is own and row is not None and row.state != STAGED:
                raise _Settled(replace(own, state=row.state, version=row.version))
            if row is None or (one.judged is not None and one.judged != JudgedState(row.state, row.seal_hash)):
                raise OperationChanged(own.id) if one.operation is own else _LeftOut(one.operation.id)

    def _check_branch(self, tx: Connection, branch: str, head_version: int | None) -> int:
        """The branch exists. Returns its head version."""
        if head_version is None:
            if Lineages.read(tx).state(branch) == ENDED:
                raise Conflict("the branch was deleted meanwhile", branch=branch)
            raise Corrupt("the branch has no row in the catalog", branch=branch)
        return head_version

    def _check_riders(self, tx: Connection, one: Publishing, own: Publishing) -> None:
        try:
            for rider in one.riders:
                rider.check(tx)
        except (AlreadyCommitted, PlanAgain, FloodmarkError) as error:
            if one is own:
                raise
            raise _LeftOut(one.operation.id) from error

    def _move_tables(self, tx: Connection, run: Sequence[Publishing], moved: set[str]) -> None:
        """Move each table once, to what the last of these operations leaves. `moved`: pointers that moved already."""
        last = {built.edit.table_id: (built, one.version) for one in run for built in one.attempt.moved}
        small: Counter[str] = Counter()
        for one in run:
            for built in one.attempt.moved:
                small[built.edit.table_id] += small_files_change(built.edit, built.metadata)
        moves = []
        for table_id, (built, version) in last.items():
            pointer = None if table_id in moved else built.old_pointer
            if table_id in moved or built.is_moved:
                moves.append(TableMove(built.new, version, pointer, small[table_id]))
            else:
                self._make_or_drop(tx, built, version, small[table_id])
            moved.add(table_id)
        if not move_tables(tx, moves):
            raise _HeadMoved()

    def _end(self, tx: Connection, run: Sequence[Publishing], committed_ms: int) -> None:
        """The journal; and turns and places in line, also if no table moved: others must not wait for a lease."""
        ended = [
            EndedOperation(one.operation.id, one.version if one.seal.makes_version else None, one.cleaned, one.leader)
            for one in run
        ]
        self._journal.mark_published(tx, ended, committed_ms)
        end_turns(tx, [one.operation.id for one in run])
        # One that is planned again may have waited for its plan of before; so may one that recovery publishes.
        if waited := [one.operation.id for one in run if one.waited or one.judged or not one.seal.is_plain]:
            end_waiting(tx, waited)

    def _check_tables(self, tx: Connection, built_tables: Sequence[BuiltTable]) -> None:
        """Every table still is where the builder found it; a new one's name is free."""
        head, expected = tables.heads, {}
        for built in built_tables:
            table_id, old, branch = built.edit.table_id, built.old, built.new.branch
            if built.edit.action == CREATE:
                _check_name(tx, built.edit.table)
                continue
            if built.edit.action == UNDROP:
                # Its rider checks that it is still dropped, and held.
                _check_name(tx, built.edit.table, table_id)
                continue
            if old is None:
                raise _HeadMoved()
            if built.edit.action == RENAME:
                _check_name(tx, built.new.table, table_id)
            if built.edit.action == TAKE:
                mine = select(head.c.table_id).where(head.c.branch == branch, head.c.table_id == table_id)
                if tx.execute(mine).scalar() is not None:
                    raise PlanAgain(built.edit.table, "the branch got the table meanwhile")
                branch = old.branch
            expected[branch, table_id] = (old.snapshot, old.schema_id, old.spec_id)
        if not expected:
            return
        if len(expected) == 1:
            ((branch, table_id),) = expected
            rows = tx.execute(_HEAD, {"branch": branch, "table_id": table_id}).all()
        else:
            rows = tx.execute(_HEADS, {"table_ids": [table_id for _, table_id in expected]}).all()
        found = {(row.branch, row.table_id): (row.snapshot, row.schema_id, row.spec_id) for row in rows}
        if any(found.get(place) != state for place, state in expected.items()):
            raise _HeadMoved()

    def _make_or_drop(self, tx: Connection, built: BuiltTable, version: int, small_change: int) -> None:
        """A table that the branch gets or loses, or that gets another name: Iceberg's pointer, and our head."""
        edit, new = built.edit, built.new
        if built.old_pointer is None:
            # The small files of an adopted table were never counted.
            insert_table(tx, new, version, None if edit.adopted_files else small_change)
            return
        if edit.action == RENAME:
            moved = rename_table(tx, edit.table, new, version, built.old_pointer)
        elif edit.action == DROP:
            moved = drop_table(tx, new, built.old_pointer)
        else:
            moved = take_table(tx, new, version, built.old_pointer)
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
        if found.state == PUBLISHED:
            return self.commit_of(found)
        if found.state == ABANDONED:
            raise fenced(found.id)
        raise Corrupt("the operation is in an unknown state", operation=found.id, state=found.state)

    def commit_of(self, published: Operation) -> Commit:
        """What an operation's caller gets once it is published. One that makes no version: the branch's head."""
        if published.version is not None:
            return self._history.commit(published.version)
        return Commit(
            version=self._history.resolve(branch=published.branch),
            outcome="committed",
            operation=published.id,
            kind=published.kind,
            branch=published.branch,
            actor=published.actor,
            message=published.message,
            committed_ms=clock.now_ms(),
        )

    def _remember(self, group: Sequence[Publishing]) -> None:
        moved = [built for one in group for built in one.attempt.moved if built.edit.action != DROP]
        # Of one table only the last one's metadata is what its file holds.
        for location, metadata in {built.new.metadata_location: built.metadata for built in moved}.items():
            self._files.remember_metadata(location, metadata)
        for built in moved:
            if built.manifests and built.new.manifest_list is not None:
                self._files.remember_manifests(built.new.manifest_list, built.manifests)
                for path, entries in built.added:
                    self._files.remember_entries(path, entries)

    def named_in_folders(self, operation: Operation, version: int | None) -> set[str]:
        """What a published operation's folders may hold: files of its commit, and of those that it published too.

        One that made no version has segments only.
        """
        segments = self._indexes.of_operation(operation.id)
        if version is None:
            return segments
        versions = [version, *self._journal.versions_led_by(operation.id)]
        touched = [head for one in versions for head in self._history.touched(one)]
        deletions = {file.location for file in self._history.deletions_of(version)}
        return self._files.own_files(touched) | deletions | segments

    def clean(self, operation: Operation, version: int | None, *, last: bool = False) -> int:
        """Best effort: delete the files in a published operation's own folders that its commit does not name.

        Safe by state (I10): the operation is published, so no other attempt of it can ever be. Its row keeps track of
        files that cannot be deleted now, and of files that executors still write after this moment: a sweep checks once
        more, long after (`last`), while the commit's own files can still be identified.
        """
        try:
            named = self.named_in_folders(operation, version)
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


class _LeftOut(Exception):
    """An operation that waits cannot be published by this process: build again without it."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        super().__init__()


def _runs(group: Sequence[Publishing]) -> list[list[Publishing]]:
    """The group in order, cut so that an operation with riders is the only one of its part."""
    runs: list[list[Publishing]] = []
    for one in group:
        if runs and not one.riders and not runs[-1][-1].riders:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


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
