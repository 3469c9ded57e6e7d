"""Compaction of a table that a sink ships to: never during a ship, always with a named outcome (I12).

Small files of a partition become few, with the same rows: copied, read back and verified by a checksum, then committed
as one `replace` snapshot on the state that was read; properties stay. A ship or another writer that commits meanwhile
wins: the staged files are deleted and the groups are tried again one by one, a few times; then the outcome is a
conflict. Files are staged under the sequence of the state that they were made for: once the table's lineage has moved
past it, they can never be committed any more, so the next compaction may delete what a crash left (I10). A lost reply
is resolved by reading (I13); as long as the commit may still succeed, its files stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from floodmark import clock
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.commit.metadata import new_snapshot_id, small_file_bytes, target_file_bytes
from floodmark.errors import Corrupt, FloodmarkError, Unavailable
from floodmark.failpoints import hit
from floodmark.maintenance.compact import Compacted
from floodmark.maintenance.plan import CompactionPlan, FileGroup, plan_compaction
from floodmark.maintenance.record import SINK_COMPACT, VerbRun
from floodmark.model import FileRecord
from floodmark.rows.checksum import RowChecksum
from floodmark.rows.project import read_file
from floodmark.rows.rewriting.gather import SORT_BYTES_MAX, Group, _cut, _larger
from floodmark.rows.rewriting.merge_sort import sorted_batches
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.schema import user_fields
from floodmark.rows.session import Sessions
from floodmark.rows.staging.stage import StageTarget, stage_batches
from floodmark.rows.tasks import run_files
from floodmark.runs import BELOW_THRESHOLD, NOTHING_TO_DO, PLANNED, Progress, Report
from floodmark.sinks.iceberg.clean import compaction_folders, delete_unnamed, sweep_compactions
from floodmark.sinks.iceberg.commit import COMMITTED, LOST, SINK_NOTE, UNKNOWN, PlannedCommit, build_commit, commit
from floodmark.sinks.iceberg.stage import check_parquet
from floodmark.sinks.iceberg.table import IcebergPlace, IcebergState
from floodmark.storage import Storage
from floodmark.write.table import check_records

if TYPE_CHECKING:
    from floodmark.sinks.iceberg.destination import IcebergDestination

# The size of one commit: the smaller it is, the less work a concurrent ship undoes.
BATCH_BYTES_MAX = 512 * 1024 * 1024
# How many lost races in one run make a conflict.
LOST_MAX = 3


def compact_destination(
    destination: IcebergDestination,
    table: str,
    file_count: int | None = None,
    dry_run: bool = False,
    *,
    hopeless: Collection[str] = (),
    sink: tuple[str, str] = ("", ""),
    actor: str = "",
    report: Report | None = None,
) -> Maintenance:
    """Compact small files of the table that this sink ships `table` to, in partitions with at least `file_count` of
    them.

    `sink`: its name and id. `hopeless`: fingerprints of groups that an earlier run could not improve.
    Never raises for a problem with the table: that is the record's outcome (compacted, nothing_to_do, below_threshold,
    conflict, partial, failed; planned for a dry run).
    """
    started_ms = clock.now_ms()
    files_min = max(2, destination.settings.compact_file_count if file_count is None else file_count)
    run = VerbRun(SINK_COMPACT, None)
    name, table_id = table, ""
    with run.recorded(), closing(destination.place) as place:
        name = ".".join(place.identifier(table))
        state = place.load(table)
        if state is not None:
            table_id = state.id
            work = _Compaction(place, table, destination.sessions, report, sink[1])
            work.run(run, state, files_min, dry_run, hopeless)
    run.detail["sink"] = sink[0]
    record = run.maintenance(actor, started_ms)
    return replace(record, table=name, table_id=table_id, ended_ms=clock.now_ms())


@dataclass(frozen=True)
class _Rewritten:
    group: FileGroup
    records: tuple[FileRecord, ...]


class _Compaction:
    def __init__(
        self,
        place: IcebergPlace,
        table: str,
        sessions: Sessions,
        report: Report | None,
        sink_id: str,
    ) -> None:
        self._place = place
        self._sink_id = sink_id
        self._table = table
        self._sessions = sessions
        self._report = report

    def run(self, run: VerbRun, state: IcebergState, files_min: int, dry_run: bool, hopeless: Collection[str]) -> None:
        plan = _plan(state, files_min, hopeless)
        run.detail = {**plan.as_dict(), "files_min": files_min, "hopeless": list(plan.hopeless)}
        if dry_run:
            run.outcome = PLANNED if plan.groups else (BELOW_THRESHOLD if plan.below_threshold else NOTHING_TO_DO)
            return
        run.detail["leftovers_deleted"] = sweep_compactions(self._place.storage, state) if state.collects else 0
        done = Compacted(hopeless=list(plan.hopeless))
        try:
            self._compact(plan, done)
        finally:
            run.outcome = done.outcome(plan)
            run.detail |= done.as_dict()

    def _compact(self, plan: CompactionPlan, done: Compacted) -> None:
        """Batch by batch; after a lost race one group at a time."""
        waiting = list(plan.groups)
        lost = 0
        while waiting:
            batch = _first(waiting, BATCH_BYTES_MAX if not lost else 0)
            state = self._place.load(self._table)
            files = set() if state is None else {file.path for file in state.live()}
            gone = [group for group in waiting if not group.paths <= files]
            if state is None or gone:
                # Another writer rewrote or removed their files meanwhile.
                done.conflicts += len(gone)
                waiting = [group for group in waiting if group not in gone]
                continue
            if self._batch(state, batch, done) == LOST:
                lost += 1
                if lost == LOST_MAX:
                    done.conflicts += len(waiting)
                    return
                continue
            waiting = waiting[len(batch) :]
            if self._report is not None:
                done_groups = len(plan.groups) - len(waiting)
                self._report(Progress(done_groups, len(plan.groups), SINK_COMPACT, self._table))

    def _batch(self, state: IcebergState, groups: Sequence[FileGroup], done: Compacted) -> str:
        """Rewrite these groups and commit them together; LOST if another writer committed meanwhile."""
        data, metadata = folders = compaction_folders(state, clock.new_id())
        keep = False
        try:
            rewritten = self._rewrite(state, data, groups)
            # Crash here: files that nothing refers to; the next compaction deletes them once the lineage has moved.
            hit("compact.rewritten")
            better = [one for one in rewritten if len(one.records) < len(one.group.files)]
            done.hopeless += [one.group.fingerprint for one in rewritten if one not in better]
            if not better:
                return COMMITTED
            change = PlannedCommit(
                snapshot=new_snapshot_id(),
                folder=metadata,
                added=tuple(record for one in better for record in one.records),
                removed=tuple(file for one in better for file in one.group.files),
                same_rows=True,
                note={"floodmark-compaction": data.rpartition("/")[2], SINK_NOTE: self._sink_id},
            )
            built = build_commit(self._place, state, change)
            keep = True  # until the commit is known to have failed
            outcome, error = commit(self._place, built)
            if outcome == UNKNOWN:
                outcome = self._read_outcome(state, change, error)
            keep = outcome == COMMITTED
        finally:
            if not keep:
                self._delete(folders)
        if outcome == COMMITTED:
            hit("compact.published")
            _count(done, better, change)
            # Files of tasks that ran twice, and of groups that did not improve.
            delete_unnamed(self._place.storage, data, (record.path for record in change.added))
        return outcome

    def _read_outcome(self, state: IcebergState, change: PlannedCommit, error: Exception | None) -> str:
        """Resolve a commit whose reply was lost."""
        now = self._place.load(self._table)
        if now is not None and now.metadata.snapshot_by_id(change.snapshot) is not None:
            return COMMITTED
        before = None if state.head is None else state.head.snapshot_id
        if now is None or now.id != state.id or now.head is None or now.head.snapshot_id != before:
            return LOST  # it was for a past state
        raise Unavailable(
            "the destination's catalog did not confirm the compaction, and does not have it",
            table=state.name,
            staged=change.folder,
            cause=error,
            advice="No row was changed. Run it again.",
        ) from error

    def _rewrite(self, state: IcebergState, folder: str, groups: Sequence[FileGroup]) -> list[_Rewritten]:
        metadata = state.metadata
        check_parquet(file for group in groups for file in group.files)
        target = StageTarget.of(metadata, folder, self._place.storage)
        work = [Group(at, tuple(map(InputFile.of, group.files))) for at, group in enumerate(groups)]
        found = self._gather_all(target, work)
        check_records([record for records in found.values() for record in records], folder)
        return [_Rewritten(group, found[at]) for at, group in enumerate(groups)]

    def _gather_all(self, target: StageTarget, groups: Sequence[Group]) -> dict[int, tuple[FileRecord, ...]]:
        found, _ = run_files(
            self._sessions,
            groups,
            partial(_gather_groups, target, self._place.storage, in_task=False),
            partial(_gather_in_task, target),
            tag=f"floodmark-{clock.new_id()}",
            message="Spark could not gather the table's files",
            tasks_max=max(1, len(groups)),
        )
        records = dict(found)
        if len(found) != len(groups) or set(records) != {group.number for group in groups}:
            raise Corrupt("Spark did not give one result for every group", groups=len(groups), results=len(found))
        return records

    def _delete(self, folders: Sequence[str]) -> None:
        """Best effort: the next compaction deletes what remains."""
        for folder in folders:
            try:
                self._place.storage.delete_prefix(folder)
            except FloodmarkError:
                return


def _gather_groups(
    target: StageTarget, storage: Storage, groups: Sequence[Group], *, in_task: bool
) -> Iterator[tuple[int, tuple[FileRecord, ...]]]:
    for group in groups:
        yield group.number, gather_plain(target, group, storage, in_task=in_task)


def _gather_in_task(target: StageTarget, groups: Sequence[Group]) -> Iterator[tuple[int, tuple[FileRecord, ...]]]:
    return _gather_groups(target, Storage(target.storage_options), groups, in_task=True)


def gather_plain(
    target: StageTarget, group: Group, storage: Storage, *, in_task: bool = False
) -> tuple[FileRecord, ...]:
    """The rows of all sources in as few files as their size allows, read back and verified; rows have no sequences."""
    shape = target.shape()
    fields = user_fields(shape.schema)
    before, after = RowChecksum(), RowChecksum()

    def taken() -> Iterator[pa.RecordBatch]:
        for source in group.sources:
            for batch in read_file(storage, source.path, fields):
                before.add(batch)
                yield batch

    rows: Iterator[pa.RecordBatch] = _larger(taken())
    options = target.options(shape)
    if options.sort:
        names = dict(zip(shape.file_schema.names, (field.name for field in shape.fields), strict=True))
        keys = [(names[column], direction) for column, direction in options.sort]
        # Rows are held twice while one run of them is sorted; from here on they are in order.
        rows, target = sorted_batches(rows, keys, SORT_BYTES_MAX // 2), replace(target, sort_json=None)
    pieces = _cut(rows, options.row_group_bytes)
    staged = stage_batches(target, pieces, clock.new_id(), storage=storage, in_task=in_task)
    for record in staged.records:
        for batch in read_file(storage, record.path, fields):
            after.add(batch)
    expected = sum(source.rows for source in group.sources)
    if staged.problems or after != before or before.rows != expected:
        raise Corrupt(
            "the written rows differ from the rows of the files that were read",
            file=group.sources[0].path,
            files=len(group.sources),
            rows=after.rows,
            rows_read=before.rows,
            rows_expected=expected,
            cause=staged.problems[0].problem if staged.problems else None,
            advice="Nothing was changed. Look at the destination's files with the engine that wrote them.",
        )
    return staged.records


def _plan(state: IcebergState, files_min: int, hopeless: Collection[str]) -> CompactionPlan:
    metadata = state.metadata
    return plan_compaction(
        state.live(),
        spec_id=metadata.default_spec_id,
        target_bytes=target_file_bytes(metadata),
        small_bytes=small_file_bytes(metadata),
        files_min=files_min,
        is_sorted=bool(metadata.sort_order().fields),
        hopeless=hopeless,
    )


def _first(groups: Sequence[FileGroup], bytes_max: int) -> list[FileGroup]:
    """The first groups of at most so many bytes, at least one."""
    batch = [groups[0]]
    for group in groups[1:]:
        if sum(one.size_bytes for one in batch) + group.size_bytes > bytes_max:
            break
        batch.append(group)
    return batch


def _count(done: Compacted, groups: Sequence[_Rewritten], change: PlannedCommit) -> None:
    done.groups += len(groups)
    done.files_in += len(change.removed)
    done.files_out += len(change.added)
    done.bytes_in += sum(file.size_bytes for file in change.removed)
    done.bytes_out += sum(record.size_bytes for record in change.added)
    done.rows += sum(one.group.rows for one in groups)
    done.versions.append(change.snapshot)
