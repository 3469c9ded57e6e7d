"""Maintenance of a lake: every verb, each run with an unambiguous named outcome (I12).

Nothing starts before recovery has run: if recovery is refused, so is maintenance. One table's failure does not stop the
others. Every outcome goes into the catalog's record, to the caller, and into the exit code. Planning changes nothing,
and `dry_run` ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from floodmark import clock, log
from floodmark.catalog.history import drifted_tables
from floodmark.catalog.indexes import KEY, IndexRow
from floodmark.catalog.maintenance_state import Maintenance, Policy
from floodmark.commit.intent import Intent
from floodmark.engine import Engine
from floodmark.errors import Conflict, Corrupt, FloodmarkError, Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.maintenance.record import COMPACT, EXPIRE, INDEX, RETAIN, SWEEP, SWEEP_DEEP, MaintenanceRun, VerbRun
from floodmark.model import MAIN, Head
from floodmark.runs import (
    BELOW_THRESHOLD,
    CONFLICT,
    EXPIRED,
    FAILED,
    INDEXED,
    NOTHING_TO_DO,
    PLANNED,
    PROTECTED,
    REFUSED,
    MaintenanceCallback,
    Report,
    for_maintenance,
)
from floodmark.settings.settings import MaintainSettings

if TYPE_CHECKING:
    from floodmark.maintenance.sweep import Doomed, Swept

DEFAULTS = MaintainSettings()
T = TypeVar("T")


class LakeMaintenance:
    """`lake.maintain`: what a user holds. `ready` runs recovery, and refuses a lake that cannot be written."""

    def __init__(
        self,
        engine: Engine,
        keeping: MaintainSettings = DEFAULTS,
    ) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        # The defaults of a call.
        self._keeping = keeping

    def __repr__(self) -> str:
        return f"<lake.maintain of {self._catalog.location}: run, compact, retain, index, expire, sweep>"

    # ── the verbs ──

    def compact(
        self,
        table: str | None = None,
        *,
        files_min: int | None = None,
        dry_run: bool = False,
        progress: MaintenanceCallback | None = None,
    ) -> MaintenanceRun:
        """Compact small files, in partitions that have at least `files_min` of them."""
        files_min = self._keeping.compact_files if files_min is None else files_min
        _check_files_min(files_min)
        report = for_maintenance(progress)
        return self._each(
            COMPACT, self._heads(table), dry_run, lambda run: self._compact(run, files_min, dry_run, report)
        )

    def retain(
        self,
        table: str | None = None,
        *,
        force: bool = False,
        dry_run: bool = False,
        now: str | None = None,
        progress: MaintenanceCallback | None = None,
    ) -> MaintenanceRun:
        """Remove rows that a table's policy does not keep; rows that a protected consumer has not seen stay.

        `force`: they are removed too, and the record has how many rows each consumer lost. `now`: as if it were that
        time.
        """
        now_ms = self._now_ms() if now is None else clock.parse_time_ms(now)
        heads = self._heads(table)
        policies = {head.table_id: self._catalog.maintenance.policy(head.table_id) for head in heads}
        if table is not None and policies[heads[0].table_id].retention is None:
            raise Invalid(
                "this table has no retention policy",
                table=table,
                advice="`floodmark maintain policy TABLE --retention 90d` sets one.",
            )
        report = for_maintenance(progress)
        chosen = [head for head in heads if policies[head.table_id].retention is not None]
        return self._each(
            RETAIN,
            chosen,
            dry_run,
            lambda run: self._retain(run, policies, now_ms, force, dry_run, report),
        )

    def index(
        self,
        table: str | None = None,
        *,
        verify: bool = False,
        dry_run: bool = False,
        progress: MaintenanceCallback | None = None,
    ) -> MaintenanceRun:
        """Make segments for files that the tables' indexes do not cover, fold small ones, retire what is not needed.

        Of every table with an index that some branch has. It makes no version. `verify`: compare every segment with the
        rows of its files first, and make those again that differ.
        """
        heads = self._indexed() if table is None else self._heads(table)
        report = for_maintenance(progress)
        done = self._each(INDEX, heads, dry_run, lambda run: self._index(run, verify, dry_run, report))
        if table is not None or not self._catalog.indexes.gone():
            return done
        gone = self._each(INDEX, [None], dry_run, lambda run: self._remove_indexes(run, dry_run))
        return MaintenanceRun((*done.records, *gone.records))

    def expire(self, *, keep: str | None = None, dry_run: bool = False) -> MaintenanceRun:
        """Expire versions older than `keep` that nothing holds; their files stay until a sweep."""
        window_ms = clock.parse_duration_ms(self._keeping.keep_versions if keep is None else keep)
        return self._each(EXPIRE, [None], dry_run, lambda run: self._expire(run, window_ms, dry_run))

    def sweep(
        self,
        table: str | None = None,
        *,
        grace: str | None = None,
        deep: bool = False,
        dry_run: bool = False,
        progress: MaintenanceCallback | None = None,
    ) -> MaintenanceRun:
        """Delete files that nothing can refer to any more: of versions that expired longer than `grace` ago, and
        leftovers of dead executors. `deep` lists the whole lake for files that no record leads to.
        """
        grace_ms = clock.parse_duration_ms(self._keeping.grace if grace is None else grace)
        if deep and table is not None:
            raise Invalid("a deep sweep covers the whole lake", table=table, advice="Leave out the table, or --deep.")
        if table is not None:
            self._catalog.history.head(table)

        def dead() -> list[Head | None]:
            retired = self._catalog.indexes.retired(grace_ms)
            found = {
                states.table_id: states.head
                for states in self._catalog.expiry.all_states(grace_ms, table)
                if states.dead or states.deletions or states.table_id in retired
            }
            # A table whose last sweep failed is swept again even if nothing is left to do, so that its record shows it.
            failed = {
                one.table_id
                for one in self._catalog.maintenance.newest()
                if one.verb == SWEEP and one.outcome in (FAILED, CONFLICT)
            }
            # So is a drifted table: its record shows the drift.
            again = failed - set(found)
            drifted = drifted_tables(self._catalog.database)
            more = (head for head in self._heads(table) if head.table_id in again or head.table in drifted)
            return [*found.values(), *(head for head in more if head.table_id not in found)]

        report = for_maintenance(progress)
        # Leftovers of executors first: while they may exist, the states of their operations are not dead.
        looked = self._each(SWEEP, [None], dry_run, lambda run: self._last_look(run, grace_ms, dry_run))
        # A call for one table does not report that the lake had nothing to do.
        done = [] if table is not None and looked.outcome == NOTHING_TO_DO else [looked]
        done += [self._each(SWEEP, dead, dry_run, lambda run: self._sweep(run, grace_ms, dry_run, report))]
        if deep:
            done += [self._each(SWEEP_DEEP, [None], dry_run, lambda run: self._sweep_deep(run, grace_ms, dry_run))]
        return MaintenanceRun(tuple(record for one in done for record in one.records))

    def run(
        self,
        table: str | None = None,
        *,
        files_min: int | None = None,
        keep: str | None = None,
        grace: str | None = None,
        dry_run: bool = False,
        progress: MaintenanceCallback | None = None,
    ) -> MaintenanceRun:
        """All verbs in order: remove due rows, compact small files, index, expire old versions, sweep their files."""
        records: list[Maintenance] = []
        heads = self._heads(table)
        files_min = self._keeping.compact_files if files_min is None else files_min
        keep, grace = keep or self._keeping.keep_versions, grace or self._keeping.grace
        # Refused before anything is changed.
        _check_files_min(files_min)
        for text in (keep, grace):
            clock.parse_duration_ms(text)
        if table is None or self._catalog.maintenance.policy(heads[0].table_id).retention is not None:
            records += self.retain(table, dry_run=dry_run, progress=progress).records
        records += self.compact(table, files_min=files_min, dry_run=dry_run, progress=progress).records
        records += self.index(table, dry_run=dry_run, progress=progress).records
        records += self.expire(keep=keep, dry_run=dry_run).records
        records += self.sweep(table, grace=grace, dry_run=dry_run, progress=progress).records
        return MaintenanceRun(tuple(records))

    def policy(self, table: str) -> Policy:
        """The table's retention policy."""
        return self._catalog.maintenance.policy(self._catalog.history.head(table).table_id)

    def set_policy(self, table: str, retention: str | None, *, column: str | None = None) -> Policy:
        """Keep rows of the last `90d` (by a time column), the newest `1000000 rows`, or `10 GB`; None: everything."""
        from floodmark.commit.metadata import schema_of
        from floodmark.commit.references import referrers_of
        from floodmark.maintenance.policy import check_policy
        from floodmark.write import refusals

        self._engine.get_ready()
        head = self._catalog.history.head(table)
        metadata = self._catalog.files.metadata(head.metadata_location)
        referrers = referrers_of(metadata.properties) if retention is not None else ()
        if referrers:
            raise refusals.referred_to(table, referrers[0].table)
        policy = (
            Policy()
            if retention is None
            else check_policy(retention, column, schema_of(metadata, head), metadata.spec())
        )
        self._catalog.maintenance.set_policy(head.table_id, policy)
        return policy

    def history(self, table: str | None = None, *, limit: int = 20) -> list[Maintenance]:
        """What maintenance did, newest first."""
        table_id = None if table is None else self._catalog.history.head(table).table_id
        return self._catalog.maintenance.records(table_id=table_id, limit=limit)

    # ── one verb on one table ──

    def _compact(self, run: VerbRun, files_min: int, dry_run: bool, report: Report | None) -> None:
        from floodmark.maintenance.compact import Compacted, compact, plan_table

        head, plan = self._at_head(run, lambda head: (head, plan_table(self._catalog, head, files_min=files_min)))
        run.detail = {**plan.as_dict(), "files_min": files_min, "hopeless": list(plan.hopeless)}
        if dry_run:
            run.outcome = PLANNED if plan.groups else (BELOW_THRESHOLD if plan.below_threshold else NOTHING_TO_DO)
            return
        self._catalog.maintenance.counted_small_files(head, plan.small_files)
        intent = self._intent(COMPACT, f"compact {head.table}")
        done = Compacted(hopeless=list(plan.hopeless))
        try:
            compact(self._engine, intent, head, plan, done, report)
        finally:
            run.outcome = done.outcome(plan)
            run.detail |= done.as_dict()

    def _retain(
        self,
        run: VerbRun,
        policies: dict[str, Policy],
        now_ms: int,
        force: bool,
        dry_run: bool,
        report: Report | None,
    ) -> None:
        from floodmark.maintenance.retain import plan_retention, retain

        assert run.head is not None
        table, policy = run.head.table, policies[run.head.table_id]
        if dry_run:
            plan = self._at_head(
                run, lambda head: plan_retention(self._engine, head, policy, now_ms=now_ms, force=force)
            )
            run.detail = plan.as_dict()
            run.outcome = PLANNED if plan.rows_going else (PROTECTED if plan.rows_protected else NOTHING_TO_DO)
            return
        intent = self._intent(RETAIN, f"retain {policy.retention} of {table}")
        # When it raises, it has been undone, so it may be run again on a head that moved.
        run.outcome, run.detail = self._at_head(
            run,
            lambda head: retain(self._engine, intent, head, policy, now_ms=now_ms, force=force, report=report),
        )

    def _index(self, run: VerbRun, verify: bool, dry_run: bool, report: Report | None) -> None:
        from floodmark.maintenance.index import Indexed, find_damaged, maintain_index, plan_index

        assert run.head is not None
        head = run.head
        damaged = find_damaged(self._engine, head.table_id) if verify else {}
        if dry_run:
            plan = plan_index(self._engine, head.table_id, without=damaged)
            if plan is not None:
                run.outcome, run.detail = plan.outcome, plan.as_dict()
            return
        done = Indexed(damaged=len(damaged))
        for location in damaged:
            self._catalog.indexes.mark_broken(location)
        try:
            maintain_index(self._engine, self._intent(INDEX, f"index {head.table}"), head.table_id, done, report)
        finally:
            run.outcome, run.detail = done.outcome, done.as_dict()

    def _indexed(self) -> list[Head]:
        """A head of every table that has an index, or a key whose index does not exist yet; main's if it has one."""
        found = {head.table_id: head for head in reversed(self._catalog.history.all_heads())}
        indexes = self._catalog.indexes.of_tables(found)
        heads = sorted(found.values(), key=lambda head: head.table)
        return [
            head
            for head in heads
            if any(one.is_live for one in indexes.get(head.table_id, ()))
            or self._lacks_key_index(head, indexes.get(head.table_id, ()))
        ]

    def _lacks_key_index(self, head: Head, indexes: Sequence[IndexRow]) -> bool:
        from floodmark.commit.metadata import schema_of

        try:
            key = frozenset(schema_of(self._catalog.files.metadata(head.metadata_location), head).identifier_field_ids)
        except (Corrupt, NotFound, FileNotFoundError):
            return True  # the run of the table reports what is wrong with it
        return bool(key) and not any(one.kind == KEY and frozenset(one.field_ids) == key for one in indexes)

    def _remove_indexes(self, run: VerbRun, dry_run: bool) -> None:
        """Remove indexes of tables that do not exist any more."""
        gone = self._catalog.indexes.gone()
        run.detail = {"indexes": len(gone)}
        run.outcome = NOTHING_TO_DO if not gone else PLANNED if dry_run else INDEXED
        if not dry_run:
            self._catalog.indexes.remove(gone)

    def _expire(self, run: VerbRun, window_ms: int, dry_run: bool) -> None:
        before_ms = self._now_ms() - window_ms
        expiry = self._catalog.expiry
        gone = expiry.expirable(before_ms) if dry_run else expiry.expire(before_ms)
        run.detail = {"before": clock.format_time(before_ms), "versions": len(gone)}
        if gone:
            run.detail |= {"first": gone[0], "last": gone[-1]}
        run.outcome = NOTHING_TO_DO if not gone else PLANNED if dry_run else EXPIRED

    def _last_look(self, run: VerbRun, grace_ms: int, dry_run: bool) -> None:
        from floodmark.maintenance.sweep import Swept, plan_leftovers, sweep_leftovers
        from floodmark.maintenance.sweep_segments import plan_without_table, sweep_segments

        found = plan_leftovers(self._catalog, grace_ms)
        segments = plan_without_table(self._catalog)
        doomed = [*(file for _, files in found for file in files), *segments]
        done = Swept()

        def work() -> None:
            sweep_leftovers(self._catalog, found, done)
            sweep_segments(self._catalog, segments, done)

        self._swept(run, doomed, dry_run, done, work)
        if not dry_run:
            self._catalog.expiry.forget_bare(grace_ms)

    def _sweep(self, run: VerbRun, grace_ms: int, dry_run: bool, report: Report | None) -> None:
        from floodmark.maintenance.sweep import Swept, plan_table, sweep_table
        from floodmark.maintenance.sweep_segments import plan_segments, sweep_segments

        assert run.head is not None
        head = run.head
        plan = plan_table(self._catalog, head.table, head.table_id, grace_ms)
        segments = plan_segments(self._engine, head.table, head.table_id, grace_ms)
        if plan is None and not segments:
            return  # another sweep was quicker, or older versions still need what was retired
        done = Swept()

        def work() -> None:
            # Segments first: the last state of a dropped table is what leads here.
            sweep_segments(self._catalog, segments, done)
            if plan is not None:
                sweep_table(self._catalog, plan, done, report)

        self._swept(run, [*segments, *(plan.doomed if plan is not None else ())], dry_run, done, work)

    def _sweep_deep(self, run: VerbRun, grace_ms: int, dry_run: bool) -> None:
        from floodmark.maintenance.sweep import Swept, plan_deep, sweep_deep

        doomed, unknown = plan_deep(self._catalog, grace_ms)
        done = Swept(unknown=len(unknown))
        self._swept(run, doomed, dry_run, done, lambda: sweep_deep(self._catalog, doomed, done))

    def _swept(
        self, run: VerbRun, doomed: Sequence[Doomed], dry_run: bool, done: Swept, work: Callable[[], None]
    ) -> None:
        """Do the work, or list what it would delete; records the result even if it fails half-way."""
        if dry_run:
            from floodmark.maintenance.sweep import with_sizes

            listing = list(with_sizes(self._catalog, doomed))
            size_bytes = sum(file.size_bytes or 0 for file in listing)
            figures: dict[str, Json] = {
                "files": len(listing),
                "bytes": size_bytes,
                "listing": [file.as_dict() for file in listing],
            }
            run.outcome, run.detail = PLANNED if listing else NOTHING_TO_DO, {**done.as_dict(), **figures}
            return
        try:
            work()
        finally:
            run.outcome, run.detail = done.outcome, done.as_dict()

    # ── what they share ──

    def _heads(self, table: str | None) -> list[Head]:
        history = self._catalog.history
        return history.heads() if table is None else [history.head(table)]

    def _at_head(self, run: VerbRun, read: Callable[[Head], T]) -> T:
        """The table as it is when its turn comes: those before it may have taken long."""
        assert run.head is not None
        table_id = run.head.table_id

        def same_table(head: Head) -> T:
            if head.table_id != table_id:
                raise Conflict(
                    "the table was dropped or created again meanwhile", table=head.table, advice="Run it again."
                )
            return read(head)

        return self._catalog.at_head(run.head.table, same_table)

    def _each(
        self,
        verb: str,
        heads: Sequence[Head | None] | Callable[[], Sequence[Head | None]],
        dry_run: bool,
        work: Callable[[VerbRun], None],
    ) -> MaintenanceRun:
        """Run recovery, then the verb on every table; an error in one table is its outcome, and the next one follows.

        A table that another writer moved is refused: until its repair, it is undecided what its files mean.
        """
        if not dry_run:
            try:
                self._engine.get_ready()
            except Corrupt as error:
                return MaintenanceRun((self._record(VerbRun(verb, None).failed(error, REFUSED), self._now_ms()),))
        records = []
        drifted = drifted_tables(self._catalog.database)
        for head in heads() if callable(heads) else heads:
            run = VerbRun(verb, head)
            started_ms = self._now_ms()
            if head is not None and head.table in drifted:
                run.failed(_drifted(head), REFUSED)
            else:
                with run.recorded():
                    work(run)
            if dry_run:
                records.append(run.maintenance(self._engine.actor, started_ms))
            else:
                records.append(self._record(run, started_ms))
        return MaintenanceRun(tuple(records))

    def _record(self, run: VerbRun, started_ms: int) -> Maintenance:
        record = run.maintenance(self._engine.actor, started_ms)
        try:
            record = replace(record, ended_ms=self._now_ms())
            self._catalog.maintenance.record(record)
        except FloodmarkError as error:
            # The work is done, and in the history; only the record of this run is missing.
            log.get().error("the record of maintenance could not be written", verb=run.verb, cause=str(error))
            return replace(record, detail={**record.detail, "unrecorded": str(error)})
        hit("maintain.recorded")
        return record

    def _now_ms(self) -> int:
        with self._catalog.database.read() as tx:
            return self._catalog.database.now_ms(tx)

    def _intent(self, kind: str, message: str) -> Intent:
        return Intent(kind, MAIN, self._engine.actor, message)


def _drifted(head: Head) -> Corrupt:
    return Corrupt(
        "another writer changed the table",
        table=head.table,
        advice=f"It was not changed. `floodmark repair {head.table}` shows what happened and what to do.",
    )


def _check_files_min(files_min: int) -> None:
    if files_min < 2:
        raise Invalid("a compaction needs at least two files", files_min=files_min)
