"""Compaction: many small files become few, while everybody reads and writes on.

One operation per batch of groups, through the same door as every write: begin, rewrite (row counts and a multiset
checksum of the rows are compared by reading the new files back), seal, publish. Rows and their sequences stay (I6). An
append or a write to other files meanwhile: the new list is built on it. An input file gone: that group ends in
conflict, its staged files are deleted, the others are published; nothing is retried blindly. Crash anywhere: the old
files or the new, never both, never neither; a healer undoes what was not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from floodmark import log
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.fills import absent_fields, fills_of
from floodmark.catalog.journal import Operation
from floodmark.catalog.live import live_files
from floodmark.catalog.metadata import new_snapshot_id, schema_of, small_file_bytes, target_file_bytes
from floodmark.catalog.riders import PlanAgain
from floodmark.catalog.seal import WRITE, Edit, RemovedFile, Seal
from floodmark.errors import Conflict
from floodmark.failpoints import hit
from floodmark.maintain.plan import CompactionPlan, FileGroup, plan_compaction
from floodmark.maintain.record import BELOW_THRESHOLD, COMPACT, CONFLICT, NOTHING_TO_DO, PARTIAL
from floodmark.model import Commit, FileRecord, Head
from floodmark.write.intent import Intent
from floodmark.write.undo import delete_files, undo
from floodmark.write.working import check_records

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KIND = COMPACT
# What one publish brings: a long run makes progress, and a lost race costs this much.
BATCH_BYTES_MAX = 2 * 1024 * 1024 * 1024
BATCH_GROUPS_MAX = 64


@dataclass
class Compacted:
    """What became of one table."""

    groups: int = 0
    files_in: int = 0
    files_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    rows: int = 0
    conflicts: int = 0
    hopeless: list[str] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def outcome(self, plan: CompactionPlan) -> str:
        if self.groups and self.conflicts:
            return PARTIAL
        if self.groups:
            return "compacted"
        if self.conflicts:
            return CONFLICT
        return BELOW_THRESHOLD if plan.below_threshold and not plan.groups else NOTHING_TO_DO

    def as_dict(self) -> dict[str, Any]:
        return {
            "groups": self.groups,
            "files_in": self.files_in,
            "files_out": self.files_out,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "rows": self.rows,
            "conflicts": self.conflicts,
            "could_not_improve": len(self.hopeless),
            "hopeless": list(self.hopeless),
            "versions": list(self.versions),
        }


def plan_table(catalog: Catalog, head: Head, *, files_min: int) -> CompactionPlan:
    """What a compaction of this head would do: from metadata and the record of earlier runs alone."""
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    files = live_files(catalog.files, head, schema)
    fills = fills_of(metadata.properties, schema)
    tried = catalog.upkeep.records(table_id=head.table_id, verb=KIND, limit=1)
    return plan_compaction(
        files,
        spec_id=head.spec_id,
        target_bytes=target_file_bytes(metadata),
        small_bytes=small_file_bytes(metadata),
        files_min=max(2, files_min),
        is_sorted=bool(metadata.sort_order().fields),
        hopeless=frozenset(tried[0].detail.get("hopeless", ())) if tried else frozenset(),
        absent=lambda file: absent_fields(file, fills, schema),
    )


def compact(
    catalog: Catalog,
    get_spark: Callable[[], SparkSession],
    intent: Intent,
    head: Head,
    plan: CompactionPlan,
    done: Compacted,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Rewrite the planned groups, batch by batch, and count in `done`. `progress(groups done, groups in all)`."""
    finished = 0
    for batch in _batches(plan.groups):
        _Batch(catalog, get_spark, intent, head).run(batch, done)
        finished += len(batch)
        if progress is not None:
            progress(finished, len(plan.groups))


def _batches(groups: Sequence[FileGroup]) -> Iterator[list[FileGroup]]:
    batch: list[FileGroup] = []
    size = 0
    for group in groups:
        if batch and (size + group.size_bytes > BATCH_BYTES_MAX or len(batch) == BATCH_GROUPS_MAX):
            yield batch
            batch, size = [], 0
        batch.append(group)
        size += group.size_bytes
    if batch:
        yield batch


@dataclass(frozen=True)
class _Rewritten:
    group: FileGroup
    records: tuple[FileRecord, ...]


class _Batch:
    """One operation: some groups rewritten and published together."""

    def __init__(
        self, catalog: Catalog, get_spark: Callable[[], SparkSession], intent: Intent, planned_on: Head
    ) -> None:
        self._catalog = catalog
        self._get_spark = get_spark
        self._intent = intent
        self._table = planned_on.table
        self._table_id = planned_on.table_id
        self._used_spark = False
        # Files were staged that will not be published.
        self._leftovers = False
        # What was sealed last: what a publish whose reply was lost has brought.
        self._sealed: Sequence[_Rewritten] = ()

    def run(self, groups: Sequence[FileGroup], done: Compacted) -> None:
        read = self._catalog.files.metadata
        location = self._catalog.at_head(self._table, lambda head: read(head.metadata_location).location)
        operation = self._catalog.journal.begin(
            KIND,
            branch=self._intent.branch,
            actor=self._intent.actor,
            message=self._intent.message,
            table_locations=[location],
        )
        # Crash here: a row in the journal, no file; healing rolls it back.
        hit("compact.begun")
        try:
            # Read after begin: from there on the operation holds what it reads.
            head = self._head()
            files = set(self._catalog.files.data_files(head))
            live = [group for group in groups if group.paths <= files]
            done.conflicts += len(groups) - len(live)
            rewritten = self._rewrite(operation, head, live)
            # Crash here: files in the operation's own folder; healing deletes them (I3, I10).
            hit("compact.rewritten")
            better = [one for one in rewritten if len(one.records) < len(one.group.files)]
            done.hopeless += [one.group.fingerprint for one in rewritten if one not in better]
            self._leftovers = len(better) < len(rewritten)
            commit = self._publish(operation, head, better, done)
            if commit is None:
                self._give_up(operation)
                return
        except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
            # It returns if reading tells that the groups are published after all.
            commit = undo(self._catalog, operation, error, certain=not self._used_spark)
        finally:
            self._catalog.journal.active.discard(operation.id)
        _count(done, self._sealed, commit)

    def _head(self) -> Head:
        head = self._catalog.history.head(self._table, self._intent.branch)
        if head.table_id != self._table_id:
            raise Conflict("the table was dropped or made again meanwhile", table=self._table, advice="Run it again.")
        return head

    def _rewrite(self, operation: Operation, head: Head, groups: Sequence[FileGroup]) -> list[_Rewritten]:
        # Late: whoever only plans does not wait for what moves rows.
        from floodmark.rows.gather import Group, run_groups
        from floodmark.rows.rewrite import Source
        from floodmark.rows.stage import StageTarget

        metadata = self._catalog.files.metadata(head.metadata_location)
        schema = schema_of(metadata, head)
        fills = fills_of(metadata.properties, schema)
        folder = operation.folder(metadata.location, "data")
        target = StageTarget(
            folder=folder,
            schema_json=schema.model_dump_json(),
            spec_json=metadata.specs()[head.spec_id].model_dump_json(),
            sort_json=metadata.sort_order().model_dump_json(),
            properties=dict(metadata.properties),
            storage_options=self._catalog.storage.options,
            settled=True,
        )
        work = [
            Group(at, tuple(Source.of(file, absent=absent_fields(file, fills, schema)) for file in group.files))
            for at, group in enumerate(groups)
        ]
        self._used_spark = True  # until it is known that it was not: an error in the middle must not say so
        gathered, self._used_spark = run_groups(
            self._catalog.storage, self._get_spark, f"floodmark-{operation.id}", target, work
        )
        check_records([record for one in gathered for record in one.records], folder)
        return [_Rewritten(groups[one.number], one.records) for one in gathered]

    def _publish(
        self, operation: Operation, head: Head, groups: Sequence[_Rewritten], done: Compacted
    ) -> Commit | None:
        """Publish these groups; without those whose files went meanwhile. None if there is nothing left of it."""
        snapshot = new_snapshot_id()
        while groups:
            self._sealed = groups
            edit = self._edit(head, groups, snapshot)
            sealed_apart = self._catalog.journal.seal(operation, Seal((edit,)))
            hit("compact.sealed")
            leftovers = self._used_spark or self._leftovers or sealed_apart
            try:
                commit = self._catalog.door.publish(
                    operation, Seal((edit,)), points=KIND, leftovers=leftovers, recheck=_rows_do_not_matter
                )
            except PlanAgain as again:
                log.get(operation.id, kind=KIND).info("planning again", table=self._table, reason=again.reason)
                before, head = head, self._head()
                # Of another shape, the staged files are not what a new write would be: all of them conflict.
                same = (head.schema_id, head.spec_id) == (before.schema_id, before.spec_id)
                files = set(self._catalog.files.data_files(head)) if same else set()
                live = [one for one in groups if one.group.paths <= files]
                done.conflicts += len(groups) - len(live)
                # Crash here: the old seal, whose files are not all live; no healer publishes it.
                hit("compact.planned_again")
                if len(live) == len(groups):
                    raise Conflict("the table kept changing under this compaction", table=self._table) from again
                groups, self._leftovers = live, True
                continue
            return commit
        return None

    def _edit(self, head: Head, groups: Sequence[_Rewritten], snapshot: int) -> Edit:
        metadata = self._catalog.files.metadata(head.metadata_location)
        return Edit(
            WRITE,
            self._table,
            self._table_id,
            metadata.location,
            head.schema_id,
            head.spec_id,
            snapshot=snapshot,
            added=tuple(record for one in groups for record in one.records),
            removed=tuple(
                RemovedFile(file.path, file.rows, file.size_bytes) for one in groups for file in one.group.files
            ),
            checked=True,
            same_rows=True,
            base_snapshot=head.snapshot,
        )

    def _give_up(self, operation: Operation) -> None:
        """Nothing to publish: the staged files go at once."""
        fenced, _ = self._catalog.journal.abandon(operation.id)
        if fenced is not None:
            delete_files(self._catalog, fenced, certain=not self._used_spark)


def _rows_do_not_matter(edit: Edit, head: Head) -> None:
    """Whatever rows came meanwhile: the files that are replaced are live, and their rows are the same."""


def _count(done: Compacted, groups: Sequence[_Rewritten], commit: Commit) -> None:
    done.groups += len(groups)
    done.files_in += sum(len(one.group.files) for one in groups)
    done.files_out += sum(len(one.records) for one in groups)
    done.bytes_in += sum(one.group.size_bytes for one in groups)
    done.bytes_out += sum(record.size_bytes for one in groups for record in one.records)
    done.rows += sum(one.group.rows for one in groups)
    done.versions.append(commit.version)
