"""Build: the files of one attempt to publish sealed operations, one after the other, against the heads it found.

Operations that are published together (`Chain`) have a snapshot, a manifest list and a version each, and one metadata
file per table. All of it is in the folders of the operation that leads, so nothing is left in another one's folders if
the leader dies. Outside any transaction. Names carry the operation and a fresh attempt, and are claimed put-if-absent,
so an attempt never overwrites another's. Crash anywhere in here: files in the operation's own metadata folder that
nothing refers to; the process that settles the operation deletes them (I3).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import ManifestEntry, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import SortOrder

from floodmark import clock
from floodmark.catalog.riders import PlanAgain
from floodmark.commit.drift import check_not_drifted
from floodmark.commit.journal import Operation
from floodmark.commit.live_files import LiveFile, manifest_name, seq_field_id
from floodmark.commit.manifests import (
    data_file,
    live_files,
    plan_merges,
    with_sequence,
    write_added,
    write_list,
    write_merged,
    write_rest,
)
from floodmark.commit.metadata import (
    MetadataFiles,
    add_properties,
    add_schema,
    add_snapshot,
    add_sort,
    add_spec,
    fits_ids,
    last_sequence,
    parse_metadata,
    schema_of,
    seen_from,
    summary,
    totals_after,
    without_foreign_cleanup,
)
from floodmark.commit.seal import CREATE, DROP, RENAME, TAKE, UNDROP, Edit, Seal
from floodmark.errors import Conflict, Corrupt
from floodmark.model import MAIN, CurrentTable, Head
from floodmark.storage import Storage, join

IDS_GIVEN = "another branch gave the ids of this shape meanwhile"

# Checks whether a checked edit is still right on a head that moved; raises PlanAgain if not. It may read rows.
Recheck = Callable[[Edit, Head], None]


@dataclass(frozen=True)
class BuiltTable:
    """One table's new state, on disk, waiting for the publish that makes it true.

    `old_pointer` is None for a table that is created, and empty for one without a pointer: it comes back, or another
    writer dropped it. `old` is the head that it was built on; of a table that is taken, the other branch's. A dropped
    one has no metadata location.
    """

    edit: Edit
    old_pointer: str | None
    old: Head | None
    new: Head
    metadata: TableMetadata
    manifests: tuple[ManifestFile, ...] = ()
    # The manifests of this commit's own files, and their entries: what a reader of them will find.
    added: tuple[tuple[str, list[ManifestEntry]], ...] = ()

    @property
    def is_moved(self) -> bool:
        """Whether the branch had the table before, and has it after, under the same name."""
        return self.old_pointer is not None and self.edit.action not in (DROP, TAKE, UNDROP, RENAME)


@dataclass
class Attempt:
    """One operation of an attempt. `tables`: all that it touched or depends on; `moved`: those that get a new state."""

    id: str
    tables: list[BuiltTable] = field(default_factory=list)

    @property
    def moved(self) -> list[BuiltTable]:
        return [built for built in self.tables if built.edit.changes_table]


class Chain:
    """Tables as the operations of one attempt leave them, one after the other, before any of it is published.

    What is not published yet is kept here and never in the caches of `MetadataFiles`: an attempt may lose its race.
    """

    def __init__(self, files: MetadataFiles, current: Mapping[str, CurrentTable]) -> None:
        self.id = str(uuid.uuid4())
        self.files = files
        self.tables = dict(current)
        # By the pointer that the attempt found, and by list.
        self._metadata: dict[str, TableMetadata] = {}
        self._lists: dict[str, tuple[ManifestFile, ...]] = {}
        self._to_write: dict[str, TableMetadata] = {}

    def is_changed(self, pointer: str) -> bool:
        """Whether an earlier operation of this attempt changed the table with this pointer."""
        return pointer in self._metadata

    def metadata(self, pointer: str) -> TableMetadata:
        return self._metadata[pointer] if pointer in self._metadata else self.files.metadata(pointer)

    def manifests(self, manifest_list: str | None) -> tuple[ManifestFile, ...]:
        known = self._lists.get(manifest_list or "")
        return self.files.manifests(manifest_list) if known is None else known

    def add(self, attempt: Attempt) -> None:
        """An operation is part of the attempt: the next one is built on the tables that it leaves."""
        for built in attempt.moved:
            if built.new.metadata_location:
                self._to_write[built.new.metadata_location] = built.metadata
            current = self.tables.get(built.edit.table)
            if current is None:
                continue
            self._metadata[current.pointer_known] = built.metadata
            if built.new.manifest_list is not None:
                self._lists[built.new.manifest_list] = built.manifests
            snapshots = {built.new.snapshot} if built.new.snapshot is not None else set()
            self.tables[built.edit.table] = replace(
                current,
                head=built.new,
                kept_snapshots=current.kept_snapshots | snapshots,
                refs={**current.refs, built.new.branch: built.new.snapshot or 0},
            )

    def write(self) -> None:
        """The metadata of each table, as the last operation of the attempt leaves it."""
        for location, metadata in self._to_write.items():
            ToOutputFile.table_metadata(metadata, self.files.io.new_output(location))


class Builder:
    """Builds attempts of one operation. It writes the manifest of a table's added files once; all attempts use it.

    `leader`: the operation in whose folders the files go; by default its own.
    """

    def __init__(
        self,
        storage: Storage,
        operation: Operation,
        seal: Seal,
        recheck: Recheck | None = None,
        leader: Operation | None = None,
    ) -> None:
        self._storage = storage
        self._operation = operation
        self._leader = leader or operation
        self._seal = seal
        self._recheck = recheck
        self._added: dict[str, list[tuple[ManifestFile, list[ManifestEntry]]]] = {}
        self._chain: Chain

    def build(self, chain: Chain) -> Attempt:
        """The operation on the tables of the chain. The metadata is written with the chain, once for all of it."""
        self._chain = chain
        attempt = Attempt(id=chain.id)
        for edit in self._seal.edits:
            if edit.action == CREATE:
                attempt.tables.append(self._build_create(edit, attempt))
            else:
                attempt.tables.append(self._build_change(edit, chain.tables.get(edit.table), attempt))
        return attempt

    def _build_create(self, edit: Edit, attempt: Attempt) -> BuiltTable:
        """A new table: its first metadata, with its first rows if the same commit adds or adopts some."""
        if edit.metadata is None:
            raise Corrupt("a table's creation has no metadata", operation=self._operation.id, table=edit.table)
        metadata = without_foreign_cleanup(parse_metadata(edit.metadata))
        # Durable with the table: a later writer need not check whether the table's creator got that far.
        self._storage.make_folder(join(edit.location, "data"))
        empty = Head(
            branch=self._operation.branch,
            table=edit.table,
            table_id=edit.table_id,
            snapshot=None,
            sequence=0,
            schema_id=edit.schema_id,
            spec_id=edit.spec_id,
            manifest_list=None,
            metadata_location="",
            version=0,
            rows=0,
            files=0,
            size_bytes=0,
        )
        if edit.added:
            return self._build_snapshot(edit, empty, metadata, None, attempt)
        location = self._metadata_location(edit, attempt, 0)
        new = replace(empty, metadata_location=location)
        snapshot = metadata.current_snapshot()
        if snapshot is not None:
            new = replace(
                new,
                snapshot=snapshot.snapshot_id,
                sequence=snapshot.sequence_number or 0,
                manifest_list=snapshot.manifest_list,
                rows=edit.rows_added,
                files=edit.adopted_files,
                size_bytes=edit.adopted_bytes,
            )
        return BuiltTable(edit, None, None, new, metadata)

    def _build_change(self, edit: Edit, current: CurrentTable | None, attempt: Attempt) -> BuiltTable:
        """An existing table after one more commit; `current`: as the branch has it, or the branch it is taken from."""
        current = self._check_still_right(edit, current)
        head = current.head
        if edit.action == DROP:
            metadata = self._chain.metadata(current.pointer_known)
            gone = replace(head, snapshot=None, manifest_list=None, metadata_location="", rows=0, files=0, size_bytes=0)
            return BuiltTable(edit, current.pointer, head, gone, metadata)
        # A repair starts from our own state; in every other case the pointer is where we put it.
        metadata = seen_from(self._chain.metadata(current.pointer_known), head.schema_id, head.spec_id)
        if not edit.changes_table:
            return BuiltTable(edit, current.pointer, head, head, metadata)  # only a dependency: it does not change
        return self._build_snapshot(edit, head, self._reshaped(edit, head, metadata), current, attempt)

    def _reshaped(self, edit: Edit, head: Head, metadata: TableMetadata) -> TableMetadata:
        """The metadata with the edit's schema, layout and properties; PlanAgain if they do not fit later changes."""
        known, schema = schema_of(metadata, head), None
        if edit.schema is not None:
            schema = Schema.model_validate_json(edit.schema)
            if not fits_ids(metadata, schema, known):
                raise PlanAgain(edit.table, IDS_GIVEN)
            metadata = add_schema(metadata, schema)
        if edit.spec is not None:
            spec = PartitionSpec.model_validate_json(edit.spec)
            if metadata.specs().get(spec.spec_id, spec) != spec:
                raise PlanAgain(edit.table, IDS_GIVEN)
            metadata = add_spec(metadata, spec)
        if edit.sort is not None:
            order = SortOrder.model_validate_json(edit.sort)
            if any(one.order_id == order.order_id and one != order for one in metadata.sort_orders):
                raise PlanAgain(edit.table, "another sort order was given this id meanwhile")
            metadata = add_sort(metadata, order)
        if schema is not None:
            self._check_gone(edit, head, metadata, known.field_ids - schema.field_ids)
        return add_properties(metadata, edit.properties) if edit.properties else metadata

    def _check_gone(self, edit: Edit, head: Head, metadata: TableMetadata, gone: Collection[int]) -> None:
        """Check that no live file is partitioned, and no new file is sorted, by a column that is dropped."""
        if not gone:
            return
        if self._operation.branch == MAIN and any(part.source_id in gone for part in metadata.sort_order().fields):
            raise PlanAgain(edit.table, "the table is sorted by a column that was to go")
        live = {one.partition_spec_id for one in self._chain.manifests(head.manifest_list) if live_files(one)}
        specs = metadata.specs()
        if any(part.source_id in gone for spec_id in {*live, edit.spec_id} for part in specs[spec_id].fields):
            raise PlanAgain(edit.table, "a file is partitioned by a column that was to go")

    def _build_snapshot(
        self, edit: Edit, head: Head, metadata: TableMetadata, current: CurrentTable | None, attempt: Attempt
    ) -> BuiltTable:
        """The table after one more snapshot on `head`: manifests, list and metadata."""
        assert edit.snapshot is not None
        sequence = max(last_sequence(metadata), edit.sequence_above) + 1
        chained = current is not None and self._chain.is_changed(current.pointer_known)
        manifests = self._kept_manifests(edit, head, metadata, attempt, chained=chained)
        own = self._added_manifests(edit, metadata)
        manifests = [*(manifest for manifest, _ in own), *manifests]
        seen = tuple((manifest.manifest_path, with_sequence(entries, sequence)) for manifest, entries in own)
        list_location = self._name(edit, f"{attempt.id}-snap-{edit.snapshot}.avro")
        listed = write_list(self._chain.files.io, list_location, edit.snapshot, head.snapshot, sequence, manifests)
        snapshot = Snapshot(
            snapshot_id=edit.snapshot,
            parent_snapshot_id=head.snapshot,
            sequence_number=sequence,
            timestamp_ms=max(clock.now_ms(), metadata.last_updated_ms),
            manifest_list=list_location,
            summary=summary(edit, head, self._operation.id),
            schema_id=edit.schema_id,
        )
        # A table that is older than this rule gets it here, with its next commit.
        changed, number = self._with_snapshot(without_foreign_cleanup(metadata), snapshot, head, current)
        location = self._metadata_location(edit, attempt, number)
        rows, files, size_bytes = totals_after(edit, head)
        new = replace(
            head,
            branch=self._operation.branch,
            table=edit.renamed_to or head.table,
            snapshot=edit.snapshot,
            sequence=sequence,
            schema_id=edit.schema_id,
            spec_id=edit.spec_id,
            manifest_list=list_location,
            metadata_location=location,
            rows=rows,
            files=files,
            size_bytes=size_bytes,
        )
        if current is None:
            return BuiltTable(edit, None, None, new, changed, listed, seen)
        return BuiltTable(edit, current.pointer or "", head, new, changed, listed, seen)

    def _with_snapshot(
        self, metadata: TableMetadata, snapshot: Snapshot, head: Head, current: CurrentTable | None
    ) -> tuple[TableMetadata, int]:
        """The metadata with one more snapshot on the branch, and the number of its file."""
        branch = self._operation.branch
        if current is None:
            return add_snapshot(metadata, snapshot, branch=branch, previous_location=None), 0
        changed = add_snapshot(
            metadata,
            snapshot,
            branch=branch,
            # Of operations that are published together, only the last one's metadata is ever a file.
            previous_location=None if self._chain.is_changed(current.pointer_known) else current.pointer_known,
            keep=current.kept_snapshots,
            base=self._base(metadata, head),
            live_refs=current.refs,
        )
        if branch != MAIN:
            # Other engines read main's shape as the table's own.
            main = self._chain.metadata(current.pointer_known)
            changed = changed.model_copy(
                update={
                    "current_schema_id": main.current_schema_id,
                    "default_spec_id": main.default_spec_id,
                    "default_sort_order_id": main.default_sort_order_id,
                }
            )
        return changed, _metadata_number(current.pointer_known) + 1

    def _base(self, metadata: TableMetadata, head: Head) -> Snapshot | None:
        """The head's snapshot; a branch may be based on one that the newest metadata no longer has."""
        if head.snapshot is None:
            return None
        found = metadata.snapshot_by_id(head.snapshot)
        if found is None:
            found = self._chain.files.metadata(head.metadata_location).snapshot_by_id(head.snapshot)
        if found is None:
            raise Corrupt("a branch's snapshot is not in its metadata", table=head.table, snapshot=head.snapshot)
        return found

    def _check_still_right(self, edit: Edit, current: CurrentTable | None) -> CurrentTable:
        """The table of conflicts: may this edit be published on the present head?

        Plain appends may, on any head of the same shape. An edit that depends on other rows (a key, a condition) may if
        the files that it read are live and no file added meanwhile holds a row that matters to it.
        """
        if current is None or current.head.table_id != edit.table_id:
            raise Conflict("the table was dropped or made again meanwhile", table=edit.table, advice="Run it again.")
        if edit.action == UNDROP and current.pointer is None:
            pass  # no branch has it; the publish checks that its name is free
        elif edit.pointer_found is None:
            check_not_drifted(self._chain.files, current)
        elif edit.pointer_found != (current.pointer or ""):
            raise Conflict("the table was changed again meanwhile", table=edit.table, advice="Look at it again.")
        head = current.head
        if (head.schema_id, head.spec_id) != edit.shape_before:
            raise PlanAgain(edit.table, "the table's shape changed while rows were staged")
        if edit.checked and head.snapshot != edit.base_snapshot:
            if self._recheck is None or edit.action == TAKE:
                raise PlanAgain(edit.table, "the table changed while rows were staged")
            live = set(self._chain.files.data_files(head))
            if not live.issuperset([*(file.path for file in edit.removed), *edit.needed]):
                raise PlanAgain(edit.table, "a file that was read is not live any more")
            self._recheck(edit, head)
        return current

    def _kept_manifests(
        self, edit: Edit, head: Head, metadata: TableMetadata, attempt: Attempt, *, chained: bool
    ) -> list[ManifestFile]:
        """The head's manifests without the removed files, merged if they are many.

        `chained`: an earlier operation of this attempt changed the table. Only plain appends come after it.
        """
        assert edit.snapshot is not None
        removed = {file.path for file in edit.removed}
        whole: list[ManifestFile] = []
        cut: list[ManifestFile] = []
        for manifest in self._chain.manifests(head.manifest_list):
            if live_files(manifest) == 0:
                continue  # it only listed what an earlier commit removed
            entries = self._chain.files.entries(manifest) if removed else []
            if removed.isdisjoint(entry.data_file.file_path for entry in entries):
                whole.append(manifest)
                continue
            rest = [entry for entry in entries if entry.data_file.file_path not in removed]
            location = self._manifest(edit, f"{attempt.id}-d{len(cut)}", rest, metadata)
            spec_id = manifest.partition_spec_id
            cut.append(write_rest(self._chain.files.io, location, metadata, spec_id, edit.snapshot, entries, removed))
        if sum(manifest.deleted_files_count or 0 for manifest in cut) != len(removed):
            raise PlanAgain(edit.table, "a file that was to be replaced is not live any more")
        # New manifests have no sequence yet, so they are never merged into others. An earlier operation of this attempt
        # has merged what is published.
        return [*cut, *(whole if chained else self._merged(whole, edit, metadata, attempt))]

    def _added_manifests(self, edit: Edit, metadata: TableMetadata) -> list[tuple[ManifestFile, list[ManifestEntry]]]:
        """New rows and carried rows in separate manifests, so that readers of new rows open only the first."""
        if edit.table not in self._added:
            assert edit.snapshot is not None
            seq_id = seq_field_id(metadata.schema())
            written = []
            for fresh in (True, False):
                records = [record for record in edit.added if (seq_id not in record.value_counts) is fresh]
                if records:
                    files = [LiveFile(data_file(one, metadata, edit.spec_id), None, seq_id) for one in records]
                    location = self._name(edit, manifest_name(f"{uuid.uuid4()}-{'m0' if fresh else 'c0'}", files))
                    written.append(
                        write_added(self._chain.files.io, location, metadata, edit.spec_id, edit.snapshot, records)
                    )
            self._added[edit.table] = written
        return self._added[edit.table]

    def _merged(
        self, manifests: Sequence[ManifestFile], edit: Edit, metadata: TableMetadata, attempt: Attempt
    ) -> list[ManifestFile]:
        assert edit.snapshot is not None
        manifests = list(manifests)
        for number, group in enumerate(plan_merges(manifests), start=1):
            entries = [entry for manifest in group for entry in self._chain.files.entries(manifest)]
            location = self._manifest(edit, f"{attempt.id}-m{number}", entries, metadata)
            spec_id = group[0].partition_spec_id
            merged = write_merged(self._chain.files.io, location, metadata, spec_id, edit.snapshot, entries)
            gone = {manifest.manifest_path for manifest in group}
            manifests = [one for one in manifests if one.manifest_path not in gone] + [merged]
        return manifests

    def _metadata_location(self, edit: Edit, attempt: Attempt, number: int) -> str:
        """Where the table's metadata will be: the same for all operations of the attempt."""
        return self._name(edit, f"{number:05d}-{attempt.id}.metadata.json")

    def _manifest(self, edit: Edit, name: str, entries: Sequence[ManifestEntry], metadata: TableMetadata) -> str:
        """The path of a manifest of existing files; its name shows how new their rows are."""
        seq_id = seq_field_id(metadata.schema())
        files = (LiveFile(entry.data_file, entry.sequence_number, seq_id) for entry in entries)
        return self._name(edit, manifest_name(name, files))

    def _name(self, edit: Edit, name: str) -> str:
        return join(self._leader.folder(edit.location, "metadata"), name)


def _metadata_number(location: str) -> int:
    found = re.match(r"(\d+)-", location.rpartition("/")[2])
    return int(found.group(1)) if found else 0
