"""Recovery: at open for writing and at the entry of every write, one query; it touches only dead operations.

Recovery settles each by the same conditional steps that its own writer would have taken, so a second recovering
process, or the writer waking up, finds it settled and obeys. Every state change carries its audit row in the same
transaction: exactly one per operation (I16). Each is conditional on the state and the seal that were judged. Without
that: R reads W's row as `staging`; W seals its batch; R fences W as "not sealed", and a sealed batch is lost for a
false reason. So R judges again. Files are deleted only after fencing (I10). An operation on a deleted branch is
discarded; if the catalog does not show whether a branch exists, that is an error, and the branch never counts as
deleted. Crash in here: an operation is either as it was or settled; if files of it are left over, the next recovery
finds it by its row (`cleaned` is 0) and deletes them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from floodmark import log
from floodmark.catalog.lineage import ENDED, Lineages
from floodmark.catalog.riders import AlreadyCommitted, AuditRider, PlanAgain
from floodmark.commit.catalog import Catalog
from floodmark.commit.journal import (
    ABANDONED,
    PUBLISHED,
    STAGED,
    STAGING,
    STATES,
    OperationChanged,
    UnfinishedOperation,
    to_operation,
)
from floodmark.commit.seal import Seal
from floodmark.errors import Busy, Conflict, Corrupt, Incomplete, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.model import Commit, RecoveryReport

# Executors may outlive their driver and write into an abandoned folder: recovery checks it again for this long.
QUIET_MS = 10 * 60_000
LOOK_EVERY_S = 5.0
# How often recovery judges an operation again whose state changes while it is judged.
JUDGEMENTS_MAX = 5
BRANCH_GONE = "its branch is gone"


class Recovery:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._looked: dict[str, float] = {}

    def recover(
        self, *, look_again: bool = False, discard: Collection[str] = (), pass_drifted: bool = True
    ) -> RecoveryReport:
        """Settle every dead operation. One that cannot be understood is kept, named, and refused with Corrupt.

        An operation on a table that another writer moved waits until the table is repaired. Writes to this table are
        refused on their own; writes to other tables go on. Only with `pass_drifted=False` recovery refuses it here.
        `look_again`: also check the folders of operations that were abandoned a while ago, even if they were checked
        recently. `discard`: operations that an operator gives up although they cannot be understood.
        """
        rows, now = self._catalog.journal.unfinished()
        report = _Report(pass_drifted)
        self._check_discard(rows, now, discard)
        for _ in range(JUDGEMENTS_MAX):
            moved: set[str] = set()
            for row in rows:
                try:
                    self._recover_operation(row, now, report, look_again=look_again, given_up=row.id in discard)
                except Corrupt as error:
                    report.refused[row.id] = error
                except OperationChanged:
                    moved.add(row.id)
            if not moved:
                break
            # They changed since they were read: judge their new state. One that still changes after that is alive.
            rows, now = self._catalog.journal.unfinished()
            rows = [row for row in rows if row.id in moved]
            self._check_discard(rows, now, moved & set(discard))
        if report.refused:
            raise next(iter(report.refused.values()))
        return report.done()

    def _recover_operation(
        self, row: UnfinishedOperation, now: int, report: _Report, *, look_again: bool, given_up: bool
    ) -> None:
        if row.state == ABANDONED:
            self._look(row, now, report, look_again)
        elif row.state == PUBLISHED:
            if self._catalog.journal.is_dead(row, now):
                report.files_deleted += self._catalog.publisher.clean(to_operation(row), row.version)
        elif given_up:
            self._roll_back(row, "discarded", "given up by an operator", report, given_up=True)
        elif row.state not in STATES:
            raise Corrupt(
                "the journal has an operation in an unknown state",
                operation=row.id,
                state=row.state,
                advice="It is kept as it is. Upgrade Floodmark, or `floodmark recover --discard OPERATION --apply`.",
            )
        elif self._catalog.journal.is_dead(row, now):
            hit("heal.found")
            self._settle(row, report)

    def _check_discard(self, rows: Sequence[UnfinishedOperation], now: int, discard: Collection[str]) -> None:
        """Only a stuck operation may be given up: not one that still runs, and not one that has ended."""
        unfinished = {row.id: row for row in rows if row.state not in (ABANDONED, PUBLISHED)}
        for operation in discard:
            row = unfinished.get(operation)
            if row is None:
                raise NotFound(
                    "no unfinished operation has this id", operation=operation, advice="`floodmark status` lists them."
                )
            if not self._catalog.journal.is_dead(row, now):
                pid, host = (None, None) if row.holder.row is None else (row.holder.row.pid, row.holder.row.host)
                raise Busy("this operation is still at work", operation=operation, pid=pid, host=host)

    def _settle(self, row: UnfinishedOperation, report: _Report) -> None:
        if self._branch_is_gone(row):
            self._roll_back(row, "discarded", BRANCH_GONE, report)
            return
        if row.state == STAGING:
            self._roll_back(row, "rolled_back", "it died before its files were sealed", report)
            return
        seal = self._catalog.journal.read_seal(row.id)
        if seal is None:
            return  # its writer, or another recovering process, was quicker
        if not seal.repeatable:
            # Its caller got no answer and will run it again: publishing it here would double its rows.
            self._roll_back(row, "rolled_back", "it died before its publish", report)
            return
        if self._waits_for_repair(row, seal, report):
            return
        self._roll_forward(row, seal, report)

    def _waits_for_repair(self, row: UnfinishedOperation, seal: Seal, report: _Report) -> bool:
        """Whether a table of the operation drifted. Checked before anything is built: every write checks again."""
        # Imported late: finding that nothing is dead does not need Iceberg's code.
        from floodmark.commit.drift import check_not_drifted

        found = self._catalog.history.current_tables(row.branch, [edit.table for edit in seal.edits])
        drifted = [one for one in found.values() if one.pointer != one.pointer_known]
        if drifted and not report.pass_drifted:
            check_not_drifted(self._catalog.files, drifted[0])
        if drifted:
            report.waiting.append(row.id)
        return bool(drifted)

    def _roll_forward(self, row: UnfinishedOperation, seal: Seal, report: _Report) -> None:
        operation = to_operation(row)
        audit = AuditRider(row.kind, STAGED, "rolled_forward", "sealed with an identity; published by recovery")
        try:
            commit = self._catalog.publisher.publish(
                operation, seal, points="heal", audit=audit, leftovers=True, judged=row.judged
            )
        except AlreadyCommitted as already:
            self._roll_back(row, "rolled_back", f"its batch was committed as version {already.version}", report)
            return
        except Unavailable:
            # Another recovering process may have finished it and deleted the files of this attempt meanwhile.
            found = self._catalog.journal.find(row.id)
            if found is not None and found.state in (PUBLISHED, ABANDONED):
                return
            raise
        except (Conflict, Invalid) as error:
            if self._branch_is_gone(row):  # deleted since this recovery checked
                self._roll_back(row, "discarded", BRANCH_GONE, report)
                return
            self._roll_back(row, "rolled_back", f"it does not fit the tables any more: {error.message}", report)
            return
        except PlanAgain as again:
            # Only its writer could plan it again; its caller's retry does.
            self._roll_back(row, "rolled_back", f"it does not fit the tables any more: {again.reason}", report)
            return
        report.rolled_forward.append(row.id)
        log.get(row.id).warning("recovered", outcome="rolled_forward", version=commit.version, kind=row.kind)

    def _roll_back(
        self, row: UnfinishedOperation, outcome: str, detail: str, report: _Report, *, given_up: bool = False
    ) -> None:
        operation, was_us = self._catalog.journal.abandon(
            row.id, AuditRider(row.kind, row.state, outcome, detail), given_up=given_up, judged=row.judged
        )
        # Crash here: fenced, with its audit row; the next recovery deletes its files.
        hit("heal.fenced")
        if operation is None or operation.state != ABANDONED:
            return  # its writer was quicker
        report.files_deleted += self._catalog.journal.delete_files(operation)
        hit("heal.files_deleted")
        if was_us:
            (report.discarded if outcome == "discarded" else report.rolled_back).append(row.id)
            log.get(row.id).warning("recovered", outcome=outcome, detail=detail, kind=row.kind)

    def _look(self, row: UnfinishedOperation, now: int, report: _Report, look_again: bool) -> None:
        """Delete the files that appeared in an abandoned operation's folders. Age only ends the checks."""
        if not look_again and time.monotonic() - self._looked.get(row.id, float("-inf")) < LOOK_EVERY_S:
            return
        self._looked[row.id] = time.monotonic()
        operation = to_operation(row, given_up=True)
        deleted = self._catalog.journal.delete_files(operation)
        report.files_deleted += deleted
        if deleted:
            self._catalog.journal.mark_restless(row.id, now)
        elif now - (row.ended_ms or now) > QUIET_MS:
            self._catalog.journal.mark_cleaned(row.id, look_once_more=True)
            self._looked.pop(row.id, None)

    def _branch_is_gone(self, row: UnfinishedOperation) -> bool:
        """Whether the branch ended, by its row. No row, or rows that disagree: Corrupt, and the operation is kept."""
        try:
            with self._catalog.database.read() as tx:
                return Lineages.read(tx).state(row.branch) == ENDED
        except Corrupt as error:
            raise Corrupt(
                "the catalog does not show whether the branch of this operation exists",
                operation=row.id,
                branch=row.branch,
                cause=error.message,
                advice="It is kept as it is. Restore the catalog, or `floodmark recover --discard OPERATION --apply`.",
            ) from error


class _Report:
    def __init__(self, pass_drifted: bool) -> None:
        self.pass_drifted = pass_drifted
        self.waiting: list[str] = []
        self.rolled_forward: list[str] = []
        self.rolled_back: list[str] = []
        self.discarded: list[str] = []
        self.refused: dict[str, Corrupt] = {}
        self.files_deleted = 0

    def done(self) -> RecoveryReport:
        return RecoveryReport(
            rolled_forward=tuple(self.rolled_forward),
            rolled_back=tuple(self.rolled_back),
            discarded=tuple(self.discarded),
            refused=tuple(self.refused),
            waiting=tuple(self.waiting),
            files_deleted=self.files_deleted,
        )


# ── one operation, for its caller ──


def resolve(catalog: Catalog, recovery: Recovery | None, operation: str) -> Commit | None:
    """After CommitUnknown: its commit, or None if it never happened and never will (I13).

    Without `recovery`, nothing is settled first.
    """
    found = catalog.journal.find(operation)
    if found is not None and found.state not in (PUBLISHED, ABANDONED) and recovery is not None:
        recovery.recover()
        found = catalog.journal.find(operation)
    if found is None or found.state == ABANDONED:
        return None
    if found.state == PUBLISHED:
        return catalog.publisher.commit_of(found)
    raise Incomplete(
        "the operation is still under way",
        operation=operation,
        state=found.state,
        advice="Retry when its process has ended.",
    )
