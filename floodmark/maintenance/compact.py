"""Compaction: many small files become few, while readers and writers continue.

One publication per batch of groups. Row counts and a multiset checksum of the rows are compared by reading the new
files back. Rows and their sequences stay (I6). After an append or a write to other files meanwhile, the new list is
built on it. If an input file was removed, that group ends in conflict, its staged files are deleted, and the others are
published; nothing is retried blindly. Crash anywhere: the old files or the new, never both, never neither; recovery
undoes what was not published.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from floodmark.catalog.riders import PlanAgain
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import absent_fields, fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.journal import Operation
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import new_snapshot_id, schema_of, small_file_bytes, target_file_bytes
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, publish
from floodmark.commit.seal import Edit
from floodmark.engine import Engine
from floodmark.errors import Conflict
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.maintenance.plan import CompactionPlan, FileGroup, plan_compaction
from floodmark.maintenance.record import COMPACT
from floodmark.model import Commit, FileRecord, Head
from floodmark.runs import BELOW_THRESHOLD, COMPACTED, CONFLICT, NOTHING_TO_DO, PARTIAL, Progress, Report
from floodmark.write.table import check_records

KIND = COMPACT
# The size of one publish: a long run makes progress, and a lost race costs this much.
BATCH_BYTES_MAX = 2 * 1024 * 1024 * 1024
BATCH_GROUPS_MAX = 64


@dataclass
class Compacted:
    """The result for one table."""

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
            return COMPACTED
        if self.conflicts:
            return CONFLICT
        return BELOW_THRESHOLD if plan.below_threshold and not plan.groups else NOTHING_TO_DO

    def as_dict(self) -> dict[str, Json]:
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
    tried = catalog.maintenance.records(table_id=head.table_id, verb=KIND, limit=1)
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
    engine: Engine,
    intent: Intent,
    head: Head,
    plan: CompactionPlan,
    done: Compacted,
    report: Report | None = None,
) -> None:
    """Rewrite the planned groups, batch by batch, and count in `done`."""
    finished = 0
    for batch in _batches(plan.groups):
        work = _Batch(engine, intent, head, batch, done)
        work.count(publish(engine.catalog, intent, work))
        finished += len(batch)
        if report is not None:
            report(Progress(finished, len(plan.groups), COMPACT, head.table))


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


class _Batch(PublishPlan):
    """One operation: some groups rewritten and published together."""

    # Writers do not wait for it: a group that lost a race is left to the next run.
    takes_turn = False

    def __init__(
        self, engine: Engine, intent: Intent, planned_on: Head, groups: Sequence[FileGroup], done: Compacted
    ) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._branch = intent.branch
        self._table = planned_on.table
        self._table_id = planned_on.table_id
        self._wanted = groups
        self._done = done
        self._snapshot = new_snapshot_id()
        self._head: Head
        # What is left to publish: the last seal, if the reply of its publish was lost.
        self._groups: Sequence[_Rewritten] = ()
        self._used_spark = False
        self._leftovers = False

    def start(self) -> Start:
        read = self._catalog.files.metadata
        return Start([self._catalog.at_head(self._table, lambda head: read(head.metadata_location).location)])

    def stage(self, work: Publication) -> None:
        # Read after begin: from then on the operation holds what it reads.
        self._head = self._look()
        files = set(self._catalog.files.data_files(self._head))
        live = [group for group in self._wanted if group.paths <= files]
        self._done.conflicts += len(self._wanted) - len(live)
        rewritten = self._rewrite(work.operation, live)
        # Crash here: files in the operation's own folder; recovery deletes them (I3, I10).
        hit("compact.rewritten")
        self._groups = [one for one in rewritten if len(one.records) < len(one.group.files)]
        self._done.hopeless += [one.group.fingerprint for one in rewritten if one not in self._groups]
        self._leftovers = len(self._groups) < len(rewritten)

    def plan(self) -> Planned:
        return Planned((self._edit(),) if self._groups else ())

    def recheck(self, edit: Edit, head: Head) -> None:
        """Any rows may have been added meanwhile: the replaced files are live, and their rows are the same."""

    def plan_again(self, lost: PlanAgain) -> None:
        """Continue without the groups whose files were removed meanwhile."""
        before, self._head = self._head, self._look()
        # After a schema change, the staged files differ from what a new write would make: all groups conflict.
        same = (self._head.schema_id, self._head.spec_id) == (before.schema_id, before.spec_id)
        files = set(self._catalog.files.data_files(self._head)) if same else set()
        live = [one for one in self._groups if one.group.paths <= files]
        self._done.conflicts += len(self._groups) - len(live)
        if len(live) == len(self._groups):
            raise Conflict("the table kept changing during this compaction", table=self._table) from lost
        self._groups = live

    @property
    def used_spark(self) -> bool:
        return self._used_spark

    @property
    def leftovers(self) -> bool:
        return self._leftovers

    def count(self, commit: Commit) -> None:
        if commit.operation is None:
            return  # nothing was left to publish
        groups, done = self._groups, self._done
        done.groups += len(groups)
        done.files_in += sum(len(one.group.files) for one in groups)
        done.files_out += sum(len(one.records) for one in groups)
        done.bytes_in += sum(one.group.size_bytes for one in groups)
        done.bytes_out += sum(record.size_bytes for one in groups for record in one.records)
        done.rows += sum(one.group.rows for one in groups)
        done.versions.append(commit.version)

    def _look(self) -> Head:
        head = self._catalog.history.head(self._table, self._branch)
        if head.table_id != self._table_id:
            raise Conflict(
                "the table was dropped or created again meanwhile", table=self._table, advice="Run it again."
            )
        return head

    def _rewrite(self, operation: Operation, groups: Sequence[FileGroup]) -> list[_Rewritten]:
        # Imported late: a caller that only plans does not wait for the code that moves rows.
        from floodmark.rows.rewriting.gather import Group, run_groups
        from floodmark.rows.rewriting.rewrite import InputFile
        from floodmark.rows.staging.stage import StageTarget

        head = self._head
        metadata = self._catalog.files.metadata(head.metadata_location)
        schema = schema_of(metadata, head)
        fills = fills_of(metadata.properties, schema)
        folder = operation.folder(metadata.location, "data")
        spec = metadata.specs()[head.spec_id]
        target = StageTarget.of(metadata, folder, self._catalog.storage, schema=schema, spec=spec, settled=True)
        work = [
            Group(at, tuple(InputFile.of(file, absent=absent_fields(file, fills, schema)) for file in group.files))
            for at, group in enumerate(groups)
        ]
        self._used_spark = True  # until known: an error in the middle must not report that it was unused
        gathered, self._used_spark = run_groups(
            self._catalog.storage, self._engine.sessions, f"floodmark-{operation.id}", target, work
        )
        check_records([record for one in gathered for record in one.records], folder)
        return [_Rewritten(groups[one.number], one.records) for one in gathered]

    def _edit(self) -> Edit:
        head, groups = self._head, self._groups
        metadata = self._catalog.files.metadata(head.metadata_location)
        return Edit.at(head, metadata.location, self._snapshot, checked=True).exchange(
            (record for one in groups for record in one.records),
            (file for one in groups for file in one.group.files),
            same_rows=True,
        )
