"""Publication: the only way to change the lake. Every verb is a plan that runs through here.

    begin      a row in the journal before the first byte; a batch that is already published ends here
    stage      the plan writes its files into the operation's own folders
    plan       its edits and riders, on the heads that it read; none: nothing to do, and the operation ends
    seal       edits and riders are durable; recovery finishes a repeatable operation from them alone
    publish    build, then one SQL transaction (publisher.py); a lost race builds again, unless the plan does not fit
    clean      files of lost attempts are deleted

Segments of indexes alone are published in the same way, but make no version and move no head (decision 0047).

A plan that does not fit the heads any more plans again from its staged files, or stages again in an operation of its
own (`stages_again`). After lost plans it takes the tables' turn. Nothing is visible before the publish (I3), all of it
is visible after (I2). An error at any step undoes the operation before the caller gets it, so a retry cannot meet a
second copy of itself. If that cannot be written, the outcome is unknown: CommitUnknown, resolved by `lake.resolve`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from floodmark import clock, log
from floodmark.catalog.riders import AlreadyCommitted, AuditRider, PlanAgain, Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.intent import Intent
from floodmark.commit.journal import PUBLISHED, Operation, fenced
from floodmark.commit.seal import CREATE, UNDROP, Edit, Seal
from floodmark.errors import CommitUnknown, Conflict, Fenced, Unavailable
from floodmark.failpoints import hit
from floodmark.model import Commit, Head

PLANS_MAX = 12
PLANS_BEFORE_TURN = 2
# Planning again reads files, which takes longer than building; recovery ends the turn of a dead holder sooner.
PLAN_TURN_MS = 60_000


@dataclass(frozen=True)
class Start:
    """What the journal records before the first byte: tables to write into, an old version that must not expire.

    `turn`: the tables whose turn a plan that stages again takes after lost tries.
    """

    locations: Sequence[str] = ()
    held_version: int | None = None
    turn: Sequence[str] = ()


@dataclass(frozen=True)
class Planned:
    """What to publish. `audit` is written in the publish and is not part of the seal."""

    edits: tuple[Edit, ...] = ()
    riders: tuple[Rider, ...] = ()
    audit: AuditRider | None = None


class PublishPlan(ABC):
    """A changing verb: what to stage, its edits, whether they still fit heads that moved, what follows if not."""

    plans_max = PLANS_MAX
    # A lost plan is undone, then begun and staged again.
    stages_again = False
    # After lost plans other writers wait for it.
    takes_turn = True
    # Without an identity: to publish it again changes nothing, so recovery may finish it.
    repeatable = False

    def start(self) -> Start | None:
        """Check before anything is recorded; None: nothing to do. Called again before it is staged again."""
        return Start()

    def stage(self, work: Publication) -> None:  # noqa: B027 - many plans write no file
        """Write files into the operation's folders. From here on the operation holds the versions that it reads."""

    @abstractmethod
    def plan(self) -> Planned:
        """What to publish, on the heads that were read last. May raise PlanAgain if they moved already."""

    def recheck(self, edit: Edit, head: Head) -> None:
        """The table of a checked edit is at another head than planned: raise PlanAgain if that matters."""
        raise PlanAgain(edit.table, "the table changed while rows were staged")

    def plan_again(self, lost: PlanAgain) -> None:  # noqa: B027 - `plan` may look at the heads itself
        """Read the new heads; the staged files stay. Raise an error if it cannot be planned again."""

    def touched(self, planned: Planned) -> Iterable[tuple[str, str]]:
        """The tables, by id and name, that must be as the caller expects them (`if_version`)."""
        there = (edit for edit in planned.edits if edit.changes_table and edit.action not in (CREATE, UNDROP))
        return [(edit.table_id, edit.table) for edit in there]

    def expected(self, intent: Intent, planned: Planned) -> Iterable[Rider]:
        """What holds of these tables if nothing came after the version that the caller expects."""
        created = [edit.table for edit in planned.edits if edit.action == CREATE]
        return intent.expecting(self.touched(planned), free=created)

    def kept_changing(self) -> Conflict:
        """What the caller gets after plans_max lost plans."""
        advice = "Run it again when there are fewer writers."
        return Conflict("the rows that this change depends on kept changing", plans=self.plans_max, advice=advice)

    @property
    def used_spark(self) -> bool:
        """Whether executors worked for it: they may outlive an error and leave files behind."""
        return False

    @property
    def leftovers(self) -> bool:
        """Whether it staged files that it does not publish."""
        return False


def publish(catalog: Catalog, intent: Intent, plan: PublishPlan) -> Commit:
    """Run a plan from begin to clean. Every error is undone before it is raised."""
    for tries in range(1, plan.plans_max + 1):
        start = plan.start()
        if start is None:
            return unchanged(catalog, intent)
        try:
            work = Publication.begin(catalog, intent, start)
        except AlreadyCommitted as already:
            return catalog.history.commit(already.version, outcome="already_committed")
        try:
            return work.run(plan, start.turn if tries > PLANS_BEFORE_TURN else ())
        except PlanAgain as lost:
            work.log_lost(lost, tries)
            # Crash here: the operation is undone, the next one is not begun.
            hit(f"{intent.kind}.planned_again")
    raise plan.kept_changing()


def rehearse(catalog: Catalog, intent: Intent, plan: PublishPlan) -> None:
    """Raise what `publish` would refuse the plan for. It is staged and undone: nothing is published."""
    work = Publication.begin(catalog, intent, plan.start() or Start())
    try:
        plan.stage(work)
        plan.plan()
    except BaseException as error:  # noqa: BLE001 - undo raises it again
        work.undo(plan, error)
    work.give_up(plan)


def check_expected(catalog: Catalog, intent: Intent, touched: Iterable[tuple[str, str]]) -> None:
    """Conflict if one of these tables already is not as the intent's caller expects it: nothing is staged in vain.

    Not for a batch that is published meanwhile: that is why the table moved, and the publish finds its commit.
    """
    check_riders(catalog, intent, intent.expecting(touched))


def check_riders(catalog: Catalog, intent: Intent, expected: Sequence[Rider]) -> None:
    """The same of expectations that are about more than the tables of one branch."""
    if not expected:
        return
    with catalog.database.read() as tx:
        try:
            if intent.batch is not None:
                intent.batch.check(tx)
        except AlreadyCommitted:
            return
        for rider in expected:
            rider.check(tx)


def unchanged(catalog: Catalog, intent: Intent) -> Commit:
    """What a verb returns that has nothing to do: no new version, so the branch's head."""
    return Commit(
        version=catalog.history.resolve(branch=intent.branch),
        outcome="nothing_to_do",
        operation=None,
        kind=intent.kind,
        branch=intent.branch,
        actor=intent.actor,
        message=intent.message,
        committed_ms=clock.now_ms(),
    )


class Publication:
    """One operation, from its row in the journal to its end."""

    def __init__(self, catalog: Catalog, intent: Intent, operation: Operation) -> None:
        self._catalog = catalog
        self.intent = intent
        self.operation = operation
        self._log = log.get(operation.id, kind=intent.kind)
        # The files that segments were made for, and their riders: a new plan may publish the same files.
        self._covered: tuple[frozenset[str], Sequence[Rider]] = frozenset(), ()

    @classmethod
    def begin(cls, catalog: Catalog, intent: Intent, start: Start) -> Publication:
        """Record the operation before its first byte. Raises AlreadyCommitted for a batch that is already published."""
        operation = catalog.journal.begin(
            intent.kind,
            branch=intent.branch,
            actor=intent.actor,
            message=intent.message,
            batch=intent.batch,
            table_locations=start.locations,
            held_version=start.held_version,
        )
        # Crash here: a row in the journal, no file; recovery rolls it back.
        hit(f"{intent.kind}.begun")
        return cls(catalog, intent, operation)

    # ── for the plan, while it stages ──

    def claim(self, table_location: str) -> None:
        """Record a table that is written into, so that recovery finds the folders."""
        if self.operation.folder(table_location, "data") not in self.operation.folders:
            self.operation = self._catalog.journal.add_table(self.operation, table_location)

    def identify(self, rider: Rider) -> None:
        """Replace the operation's identity: facts that are known only after its rows are staged are sealed with it."""
        self.intent = replace(self.intent, batch=rider)

    def take_turn(self, table_ids: Iterable[str]) -> None:
        """Make other writers of these tables wait until this operation ends."""
        self._catalog.publisher.turns.take(self.operation.id, table_ids, PLAN_TURN_MS)

    # ── seal and publish ──

    def run(self, plan: PublishPlan, turn: Sequence[str] = ()) -> Commit:
        """Stage and publish. Raises PlanAgain, with the operation undone, for a plan that stages again."""
        try:
            if turn:
                self.take_turn(turn)
            plan.stage(self)
        except BaseException as error:  # noqa: BLE001 - undone, then raised again
            return self._failed(plan, error)
        return self.publish(plan)

    def publish(self, plan: PublishPlan) -> Commit:
        """Publish what is staged; an operation that has nothing to publish ends. An error is undone, then raised."""
        try:
            commit = self._plan_and_publish(plan)
        except BaseException as error:  # noqa: BLE001 - undone, then raised again
            return self._failed(plan, error)
        return commit or self.give_up(plan) or unchanged(self._catalog, self.intent)

    def _plan_and_publish(self, plan: PublishPlan) -> Commit | None:
        """Plan, seal, build, publish, clean; again if the plan does not fit heads that moved. None: nothing to do."""
        for plans in range(1, plan.plans_max + 1):
            edits: tuple[Edit, ...] = ()
            try:
                planned = plan.plan()
                edits = planned.edits
                batch = () if self.intent.batch is None else (self.intent.batch,)
                riders = (*batch, *planned.riders)
                if not riders and not any(edit.changes_table for edit in edits):
                    return None
                riders = (*riders, *self._segments(plan, edits), *plan.expected(self.intent, planned))
                seal = Seal(edits, riders, repeatable=bool(batch) or plan.repeatable)
                return self._publish(plan, seal, planned.audit, plans)
            except PlanAgain as lost:
                if plan.stages_again:
                    raise
                self.log_lost(lost, plans)
                if edits and plan.takes_turn and plans >= PLANS_BEFORE_TURN:
                    self.take_turn(edit.table_id for edit in edits)
                plan.plan_again(lost)
                # Crash here: files of both plans, and the old plan's seal; recovery does not publish it on new heads.
                hit(f"{self.intent.kind}.planned_again")
        raise plan.kept_changing()

    def _segments(self, plan: PublishPlan, edits: Sequence[Edit]) -> Sequence[Rider]:
        """What the tables' indexes say of the files that come: true with them, or not at all."""
        maker = self._catalog.segment_maker
        paths = frozenset(file.path for edit in edits for file in edit.added)
        if maker is None or not paths:
            return ()
        if paths != self._covered[0]:
            # Tasks of Spark make some only for a plan that used it: what they leave is known as the plan's own.
            self._covered = paths, maker().riders(self.operation, edits, spark=plan.used_spark)
        return self._covered[1]

    def _publish(self, plan: PublishPlan, seal: Seal, audit: AuditRider | None, plans: int) -> Commit:
        kind = self.intent.kind
        # Task attempts that did not report to the driver may have left files that the seal does not name.
        leftovers = plan.used_spark or plan.leftovers or plans > 1
        sealed = self._catalog.journal.seal(self.operation, seal, leftovers=leftovers)
        # Crash here: recovery finishes a repeatable operation, and undoes any other.
        hit(f"{kind}.sealed")
        commit = self._catalog.publisher.publish(
            self.operation,
            seal,
            points=kind,
            audit=audit,
            leftovers=leftovers or sealed.apart,
            recheck=plan.recheck,
            sealed=sealed,
        )
        self._end()
        self._log.info("published", version=commit.version, rows=commit.rows_added)
        return commit

    def log_lost(self, lost: PlanAgain, plans: int) -> None:
        self._log.info("planning again", table=lost.table, reason=lost.reason, plans=plans)

    # ── ends without a publish ──

    def _failed(self, plan: PublishPlan, error: BaseException) -> Commit:
        if not isinstance(error, PlanAgain) or not plan.stages_again:
            return self.undo(plan, error)
        commit = self.give_up(plan)
        if commit is None:
            raise error
        return commit

    def give_up(self, plan: PublishPlan) -> Commit | None:
        """End an operation that publishes nothing: its files are deleted. Returns its commit if it is published."""
        try:
            return self.undo(plan, _GivenUp())
        except _GivenUp:
            return None

    def undo(self, plan: PublishPlan, error: BaseException) -> Commit:
        """Abandon the operation and raise `error`; return its commit if it turns out to be published."""
        try:
            return self._undo(plan, error)
        finally:
            self._end()

    def _undo(self, plan: PublishPlan, error: BaseException) -> Commit:
        catalog = self._catalog
        try:
            found, was_us = catalog.journal.abandon(self.operation.id)
            commit = self._published(found)
        except BaseException as unreachable:
            # For any reason: it was not abandoned, or it is published and cannot be read.
            catalog.heartbeat.disown(self.operation.id)
            if not isinstance(unreachable, Exception):
                raise
            raise CommitUnknown(
                "the outcome of this operation is unknown", operation=self.operation.id, cause=error
            ) from unreachable
        if commit is not None:
            if isinstance(error, Exception):
                return commit
            raise error
        hit("abandon.fenced")
        if found is not None:
            self._delete_files(found, plan)
        hit("abandon.files_deleted")
        if isinstance(error, AlreadyCommitted):
            return catalog.history.commit(error.version, outcome="already_committed")
        if found is not None and not was_us and not isinstance(error, Fenced | _GivenUp):
            raise fenced(self.operation.id) from error
        raise error

    def _published(self, found: Operation | None) -> Commit | None:
        if found is None or found.state != PUBLISHED:
            return None
        return self._catalog.publisher.commit_of(found)

    def _delete_files(self, operation: Operation, plan: PublishPlan) -> None:
        """Best effort: recovery finds what cannot be deleted now.

        If executors may still be writing, recovery checks the folders again until they stay quiet.
        """
        try:
            self._catalog.journal.delete_files(operation)
            if not plan.used_spark:
                self._catalog.journal.mark_cleaned(operation.id)
        except Unavailable as error:
            # Fenced and journalled: the next recovery deletes them.
            log.get(operation.id).warning("files of an abandoned operation stay for recovery", cause=str(error))

    def _end(self) -> None:
        self._catalog.journal.active.discard(self.operation.id)


class _GivenUp(Exception):
    """Not an error: the operation ends, and its caller goes on."""
