"""Build: the files of one attempt to publish a sealed operation, against the heads it found.

Outside any transaction. Names carry the operation and a fresh attempt, and are claimed put-if-absent, so an attempt
never overwrites another's. Crash anywhere in here: files in the operation's own metadata folder that nothing refers
to; whoever settles the operation deletes them (I3).
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import ManifestEntry, ManifestFile
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot

from floodmark import clock
from floodmark.catalog.journal import Operation
from floodmark.catalog.manifests import plan_merges, with_sequence, write_added, write_list, write_merged
from floodmark.catalog.metadata import MetadataFiles, add_snapshot, append_summary, last_sequence, parse_metadata
from floodmark.catalog.seal import CREATE, Edit, Seal
from floodmark.errors import Conflict, Corrupt
from floodmark.model import CurrentTable, Head
from floodmark.storage import Storage, join


@dataclass(frozen=True)
class BuiltTable:
    """One table's new state, on disk, waiting for the publish that makes it true."""

    edit: Edit
    old_pointer: str | None
    old_snapshot: int | None
    new: Head
    metadata: TableMetadata
    manifests: tuple[ManifestFile, ...] = ()
    # The manifest of this commit's own files, and its entries: what a reader of it will find.
    added_path: str = ""
    added: tuple[ManifestEntry, ...] = ()


@dataclass
class Attempt:
    id: str
    tables: list[BuiltTable] = field(default_factory=list)


class Builder:
    """Builds attempts of one operation. The manifest of a table's added files is written once and used by all."""

    def __init__(self, files: MetadataFiles, storage: Storage, operation: Operation, seal: Seal) -> None:
        self._files = files
        self._storage = storage
        self._operation = operation
        self._seal = seal
        self._added: dict[str, tuple[ManifestFile, list[ManifestEntry]]] = {}

    def build(self, current: dict[str, CurrentTable]) -> Attempt:
        attempt = Attempt(id=str(uuid.uuid4()))
        # One barrier for the directories of all files of this attempt.
        with self._storage.batch():
            for edit in self._seal.edits:
                if edit.action == CREATE:
                    attempt.tables.append(self._build_create(edit, attempt))
                else:
                    attempt.tables.append(self._build_append(edit, current.get(edit.table), attempt))
        return attempt

    def _build_create(self, edit: Edit, attempt: Attempt) -> BuiltTable:
        """A new table: its first metadata, with its first rows if the same commit brings some."""
        if edit.metadata is None:
            raise Corrupt("a table's creation has no metadata", operation=self._operation.id, table=edit.table)
        metadata = parse_metadata(edit.metadata)
        # Durable with the table: whoever writes into it later need not wonder whether its maker was that far.
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
            return self._build_snapshot(edit, empty, metadata, None, frozenset(), attempt)
        location = self._write_metadata(edit, attempt, 0, metadata)
        return BuiltTable(edit, None, None, replace(empty, metadata_location=location), metadata)

    def _build_append(self, edit: Edit, current: CurrentTable | None, attempt: Attempt) -> BuiltTable:
        head = self._check_still_right(edit, current)
        assert current is not None
        metadata = self._files.metadata(current.pointer)
        return self._build_snapshot(edit, head, metadata, current.pointer, current.kept_snapshots, attempt)

    def _build_snapshot(
        self,
        edit: Edit,
        head: Head,
        metadata: TableMetadata,
        pointer: str | None,
        kept_snapshots: frozenset[int],
        attempt: Attempt,
    ) -> BuiltTable:
        """The table after one more snapshot on `head`: manifests, list and metadata."""
        assert edit.snapshot is not None
        sequence = last_sequence(metadata) + 1
        existing = self._files.manifests(head.manifest_list)
        added, entries = self._added_manifest(edit, metadata)
        manifests = self._merged([added, *existing], edit, metadata, attempt)
        list_location = self._name(edit, f"{attempt.id}-snap.avro")
        listed = write_list(self._files.io, list_location, edit.snapshot, head.snapshot, sequence, manifests)
        snapshot = Snapshot(
            snapshot_id=edit.snapshot,
            parent_snapshot_id=head.snapshot,
            sequence_number=sequence,
            timestamp_ms=max(clock.now_ms(), metadata.last_updated_ms),
            manifest_list=list_location,
            summary=append_summary(edit, head, self._operation.id),
            schema_id=edit.schema_id,
        )
        changed = add_snapshot(
            metadata, snapshot, branch=self._operation.branch, previous_location=pointer, keep=kept_snapshots
        )
        number = 0 if pointer is None else _metadata_number(pointer) + 1
        location = self._write_metadata(edit, attempt, number, changed)
        new = replace(
            head,
            snapshot=edit.snapshot,
            sequence=sequence,
            manifest_list=list_location,
            metadata_location=location,
            rows=head.rows + edit.rows_added,
            files=head.files + len(edit.added),
            size_bytes=head.size_bytes + sum(record.size_bytes for record in edit.added),
        )
        seen = tuple(with_sequence(entries, sequence))
        return BuiltTable(edit, pointer, head.snapshot, new, changed, listed, added.manifest_path, seen)

    def _check_still_right(self, edit: Edit, current: CurrentTable | None) -> Head:
        """An append rebases over anything, as long as its files were staged for the table's present shape."""
        if current is None or current.head.table_id != edit.table_id:
            raise Conflict("the table was dropped or made again meanwhile", table=edit.table, advice="Run it again.")
        if current.pointer != current.pointer_known:
            raise Corrupt(
                "the table was changed by another writer, past Floodmark's door",
                table=edit.table,
                pointer=current.pointer,
                pointer_expected=current.pointer_known,
                advice="Nothing was written. Find out who commits to this catalog directly, and have them stop.",
            )
        if (current.head.schema_id, current.head.spec_id) != (edit.schema_id, edit.spec_id):
            raise Conflict("the table's shape changed while rows were staged", table=edit.table, advice="Run it again.")
        return current.head

    def _added_manifest(self, edit: Edit, metadata: TableMetadata) -> tuple[ManifestFile, list[ManifestEntry]]:
        if edit.table not in self._added:
            assert edit.snapshot is not None
            location = self._name(edit, f"{uuid.uuid4()}-m0.avro")
            self._added[edit.table] = write_added(
                self._files.io, location, metadata, edit.spec_id, edit.snapshot, edit.added
            )
        return self._added[edit.table]

    def _merged(
        self, manifests: list[ManifestFile], edit: Edit, metadata: TableMetadata, attempt: Attempt
    ) -> list[ManifestFile]:
        assert edit.snapshot is not None
        # This commit's own manifest has no sequence yet, so it is never merged into another.
        for number, group in enumerate(plan_merges(manifests[1:]), start=1):
            location = self._name(edit, f"{attempt.id}-m{number}.avro")
            entries = (entry for manifest in group for entry in self._files.entries(manifest))
            spec_id = group[0].partition_spec_id
            merged = write_merged(self._files.io, location, metadata, spec_id, edit.snapshot, entries)
            gone = {manifest.manifest_path for manifest in group}
            manifests = [one for one in manifests if one.manifest_path not in gone] + [merged]
        return manifests

    def _write_metadata(self, edit: Edit, attempt: Attempt, number: int, metadata: TableMetadata) -> str:
        location = self._name(edit, f"{number:05d}-{attempt.id}.metadata.json")
        ToOutputFile.table_metadata(metadata, self._files.io.new_output(location))
        return location

    def _name(self, edit: Edit, name: str) -> str:
        return join(self._operation.folder(edit.location, "metadata"), name)


def _metadata_number(location: str) -> int:
    found = re.match(r"(\d+)-", location.rpartition("/")[2])
    return int(found.group(1)) if found else 0
