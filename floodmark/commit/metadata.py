"""Iceberg table metadata as data: small changes made by pure functions, and the files that hold it.

Only a few snapshots stay in a table's metadata (commits stay fast however many there were); the catalog's history keeps
the manifest list of every version, so older ones can still be read. PyIceberg's own commit and retry are not used: it
reads and writes the formats, the publisher decides.
"""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, TypedDict

from cachetools import LRUCache
from pyiceberg.manifest import ManifestContent, ManifestEntry, ManifestFile, read_manifest_list
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema, index_name_by_id
from pyiceberg.serializers import FromInputFile
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil, new_table_metadata
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import MetadataLogEntry, Operation, Snapshot, SnapshotLogEntry, Summary
from pyiceberg.table.sorting import SortOrder

from floodmark.commit.seal import Edit
from floodmark.errors import Corrupt, NotFound
from floodmark.model import MAIN, SNAPSHOTS_KEPT, TARGET_FILE_BYTES, Head
from floodmark.storage import Storage
from floodmark.storage.fileio import LakeFileIO

if TYPE_CHECKING:
    from floodmark.commit.file_columns import FileColumns

METADATA_LOG_KEPT = 10
ENTRIES_REMEMBERED = 50_000
# Of all lists together: one takes about a kilobyte.
LISTED_REMEMBERED = 20_000
SNAPSHOT_ID_MAX = 2**63 - 1
# Iceberg's switch for clean-up by other engines, and what the table had there before it was the lake's ("": nothing).
GC_ENABLED, GC_OFF = "gc.enabled", "false"
GC_BEFORE = "floodmark.gc-enabled-before"


class _Changes(TypedDict, total=False):
    """Fields of a table's metadata that a commit changes."""

    last_sequence_number: int | None
    last_updated_ms: int
    current_snapshot_id: int | None
    snapshots: list[Snapshot]
    snapshot_log: list[SnapshotLogEntry]
    metadata_log: list[MetadataLogEntry]
    refs: dict[str, SnapshotRef]


def new_snapshot_id() -> int:
    return secrets.randbelow(SNAPSHOT_ID_MAX) + 1


def new_metadata(
    location: str, table_id: str, schema: Schema, spec: PartitionSpec, sort: SortOrder, properties: dict[str, str]
) -> TableMetadata:
    """The first metadata of a table: no snapshot, so no rows."""
    return new_table_metadata(
        schema, spec, sort, location, {"format-version": "2", **properties}, table_uuid=uuid.UUID(table_id)
    )


def add_snapshot(
    metadata: TableMetadata,
    snapshot: Snapshot,
    *,
    branch: str,
    previous_location: str | None,
    keep: Collection[int] = (),
    base: Snapshot | None = None,
    live_refs: Mapping[str, int] | None = None,
) -> TableMetadata:
    """The metadata after `snapshot` became the head of `branch`.

    Keeps the newest few snapshots, those in `keep` (heads and bases of branches), and drops the rest: their versions
    are read through the catalog's history. A branch's first snapshot is a fork: its ref is created on `base`, which is
    added again if it was dropped, and then moved. `live_refs` are the existing branches and their snapshots: other refs
    are of deleted branches, or of a deleted one whose name an existing branch has.
    """
    if live_refs is not None:
        living = {
            name: ref
            for name, ref in metadata.refs.items()
            if (name == MAIN and MAIN in live_refs) or live_refs.get(name) == ref.snapshot_id
        }
        without: _Changes = {"refs": living, "snapshots": _without_gone(metadata, living, keep)}
        if MAIN not in live_refs:
            # Main dropped the table, and a branch that was created before goes on with it.
            without |= {"current_snapshot_id": None, "snapshot_log": []}
        metadata = metadata.model_copy(update=without)
    if base is not None and branch not in metadata.refs:
        metadata = with_ref(metadata, branch, base)
    head = SnapshotRef.model_validate({"snapshot-id": snapshot.snapshot_id, "type": SnapshotRefType.BRANCH})
    refs = {**metadata.refs, branch: head}
    wanted = {ref.snapshot_id for ref in refs.values()} | set(keep)
    newest = [*metadata.snapshots, snapshot]
    kept = [
        one for place, one in enumerate(newest) if one.snapshot_id in wanted or place >= len(newest) - SNAPSHOTS_KEPT
    ]
    ids = {one.snapshot_id for one in kept}
    log = [entry for entry in metadata.snapshot_log if entry.snapshot_id in ids]
    if branch == MAIN:
        log.append(SnapshotLogEntry(snapshot_id=snapshot.snapshot_id, timestamp_ms=snapshot.timestamp_ms))
    changed: _Changes = {
        "last_sequence_number": snapshot.sequence_number,
        "last_updated_ms": snapshot.timestamp_ms,
        "snapshots": [_without_lost_parent(one, ids) for one in kept],
        "snapshot_log": log,
        "refs": refs,
    }
    if previous_location is not None:
        entry = MetadataLogEntry(metadata_file=previous_location, timestamp_ms=metadata.last_updated_ms)
        changed["metadata_log"] = [*metadata.metadata_log[1 - METADATA_LOG_KEPT :], entry]
    if branch == MAIN:
        changed["current_snapshot_id"] = snapshot.snapshot_id
    return metadata.model_copy(update=changed)


def _without_gone(metadata: TableMetadata, living: Mapping[str, SnapshotRef], keep: Collection[int]) -> list[Snapshot]:
    """The snapshots without those that only refs of deleted branches led to: a sweep may have deleted their files."""
    by_id = {one.snapshot_id: one for one in metadata.snapshots}

    def reached(refs: Iterable[SnapshotRef]) -> set[int]:
        found: set[int] = set()
        for ref in refs:
            one = by_id.get(ref.snapshot_id)
            while one is not None and one.snapshot_id not in found:
                found.add(one.snapshot_id)
                one = None if one.parent_snapshot_id is None else by_id.get(one.parent_snapshot_id)
        return found

    gone = [ref for name, ref in metadata.refs.items() if name not in living]
    lost = reached(gone) - reached(living.values()) - set(keep) if gone else set()
    return [one for one in metadata.snapshots if one.snapshot_id not in lost]


def with_ref(metadata: TableMetadata, branch: str, snapshot: Snapshot) -> TableMetadata:
    """The metadata with a branch on this snapshot, which is added again, as the oldest, if it was dropped."""
    known = {one.snapshot_id for one in metadata.snapshots}
    snapshots = list(metadata.snapshots)
    if snapshot.snapshot_id not in known:
        snapshots.insert(0, _without_lost_parent(snapshot, known))
    ref = SnapshotRef.model_validate({"snapshot-id": snapshot.snapshot_id, "type": SnapshotRefType.BRANCH})
    return metadata.model_copy(update={"snapshots": snapshots, "refs": {**metadata.refs, branch: ref}})


def seen_from(metadata: TableMetadata, schema_id: int, spec_id: int | None = None) -> TableMetadata:
    """The metadata as a branch with this shape sees it: the current shape in a table's metadata is main's."""
    if metadata.schema_by_id(schema_id) is None:
        raise Corrupt("the table's schema is not in its metadata", location=metadata.location, schema_id=schema_id)
    changed = {"current_schema_id": schema_id}
    if spec_id is not None:
        changed["default_spec_id"] = spec_id
    return metadata.model_copy(update=changed)


def schema_of(metadata: TableMetadata, head: Head) -> Schema:
    """The schema that a table had at this state."""
    schema = metadata.schema_by_id(head.schema_id)
    if schema is None:
        raise Corrupt("the table's schema is not in its metadata", table=head.table, schema_id=head.schema_id)
    return schema


def has_renamed_columns(metadata: TableMetadata) -> bool:
    """Whether a column once had another name, or a name was another column's: the table's files disagree on names."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    for schema in metadata.schemas:
        for field_id, name in index_name_by_id(schema).items():
            if names.setdefault(field_id, name) != name or ids.setdefault(name, field_id) != field_id:
                return True
    return False


def last_sequence(metadata: TableMetadata) -> int:
    """The highest sequence of any commit of the table; 0 for format v1, which has none."""
    return int(getattr(metadata, "last_sequence_number", 0))


def _without_lost_parent(snapshot: Snapshot, ids: set[int]) -> Snapshot:
    if snapshot.parent_snapshot_id is None or snapshot.parent_snapshot_id in ids:
        return snapshot
    return snapshot.model_copy(update={"parent_snapshot_id": None})


def add_schema(metadata: TableMetadata, schema: Schema) -> TableMetadata:
    """The metadata after `schema`, which has its id already, became the table's current one.

    One that the table has already, of the same columns, is not added again.
    """
    there = metadata.schema_by_id(schema.schema_id) is not None
    return metadata.model_copy(
        update={
            "schemas": metadata.schemas if there else [*metadata.schemas, schema],
            "current_schema_id": schema.schema_id,
            "last_column_id": max(metadata.last_column_id, schema.highest_field_id),
        }
    )


def fits_ids(metadata: TableMetadata, schema: Schema, known: Schema) -> bool:
    """Whether `schema`, made from `known`, assigns no id that the table assigned to something else meanwhile."""
    there = metadata.schema_by_id(schema.schema_id)
    if there is not None:
        return there == schema and there.identifier_field_ids == schema.identifier_field_ids
    new = schema.field_ids - known.field_ids
    return all(field_id > metadata.last_column_id for field_id in new)


def add_spec(metadata: TableMetadata, spec: PartitionSpec) -> TableMetadata:
    """The metadata after `spec`, which has its ids already, became the default; one that it has is not added again."""
    there = spec.spec_id in metadata.specs()
    last = max((metadata.last_partition_id or 0, *(field.field_id for field in spec.fields)))
    return metadata.model_copy(
        update={
            "partition_specs": metadata.partition_specs if there else [*metadata.partition_specs, spec],
            "default_spec_id": spec.spec_id,
            "last_partition_id": last,
        }
    )


def add_sort(metadata: TableMetadata, order: SortOrder) -> TableMetadata:
    """The metadata after `order`, which has its id already, became the default; one that it has is not added again."""
    there = any(known.order_id == order.order_id for known in metadata.sort_orders)
    return metadata.model_copy(
        update={
            "sort_orders": metadata.sort_orders if there else [*metadata.sort_orders, order],
            "default_sort_order_id": order.order_id,
        }
    )


def add_properties(metadata: TableMetadata, properties: Mapping[str, str]) -> TableMetadata:
    return metadata.model_copy(update={"properties": {**metadata.properties, **properties}})


def without_foreign_cleanup(metadata: TableMetadata) -> TableMetadata:
    """The metadata with clean-up by other engines switched off; the earlier setting is recorded.

    A table's metadata names a few snapshots, the catalog's history all of them: an engine that expires snapshots or
    removes orphan files by the metadata would delete files of versions that can still be read.
    """
    had = metadata.properties.get(GC_ENABLED)
    if had == GC_OFF and GC_BEFORE in metadata.properties:
        return metadata
    return add_properties(metadata, {GC_ENABLED: GC_OFF, GC_BEFORE: had or ""})


def allows_foreign_cleanup(metadata: TableMetadata) -> bool:
    return metadata.properties.get(GC_ENABLED, "true").lower() != GC_OFF


def totals_after(edit: Edit, head: Head) -> tuple[int, int, int]:
    """Rows, files and bytes of the table once the edit is done on this head."""
    return (
        head.rows + sum(file.rows for file in edit.added) - sum(file.rows for file in edit.removed),
        head.files + len(edit.added) - len(edit.removed),
        head.size_bytes + sum(file.size_bytes for file in edit.added) - sum(file.size_bytes for file in edit.removed),
    )


def target_file_bytes(metadata: TableMetadata) -> int:
    """How large the table's files should be."""
    return int(metadata.properties.get("write.target-file-size-bytes", TARGET_FILE_BYTES))


def small_file_bytes(metadata: TableMetadata) -> int:
    """A file below this is small: worth compacting with others."""
    return target_file_bytes(metadata) * 3 // 4


def small_files_change(edit: Edit, metadata: TableMetadata) -> int:
    """How many small files more (or fewer) the table has after the edit."""
    limit = small_file_bytes(metadata)
    return sum(file.size_bytes < limit for file in edit.added) - sum(file.size_bytes < limit for file in edit.removed)


def summary(edit: Edit, head: Head, operation: str) -> Summary:
    """The snapshot's summary: what Iceberg's tools show, and which operation wrote it."""
    rows, files, size_bytes = totals_after(edit, head)
    kind = Operation.APPEND
    if edit.removed:
        kind = Operation.OVERWRITE if edit.added else Operation.DELETE
    if edit.same_rows:
        kind = Operation.REPLACE
    removed = {
        "deleted-data-files": str(len(edit.removed)),
        "deleted-records": str(sum(file.rows for file in edit.removed)),
        "removed-files-size": str(sum(file.size_bytes for file in edit.removed)),
    }
    return Summary(
        kind,
        **{
            "added-data-files": str(len(edit.added)),
            "added-records": str(sum(file.rows for file in edit.added)),
            "added-files-size": str(sum(file.size_bytes for file in edit.added)),
            **(removed if edit.removed else {}),
            "total-data-files": str(files),
            "total-records": str(rows),
            "total-files-size": str(size_bytes),
            "total-delete-files": "0",
            "total-position-deletes": "0",
            "total-equality-deletes": "0",
            "floodmark-operation": operation,
        },
    )


class MetadataFiles:
    """Metadata files and manifest lists, read once: each name is written once and never changes.

    Only published files are ever read or cached: a manifest list that lost its race has sequence numbers that never
    became true.
    """

    def __init__(self, storage: Storage) -> None:
        self.io = LakeFileIO.over(storage)
        # Readers of equal storages see the same files. One of a kind of its own, as tests have, shares with no other.
        self._readers = frozenset(storage.options.items()) if type(storage) is Storage else object()
        self._lock = threading.Lock()
        self._metadata: LRUCache[str, TableMetadata] = LRUCache(maxsize=256)
        # Opening a manifest costs milliseconds however small it is, and commits share most of theirs.
        self._entries: LRUCache[str, list[ManifestEntry]] = LRUCache(maxsize=ENTRIES_REMEMBERED, getsizeof=len)
        self._lists: LRUCache[str, tuple[ManifestFile, ...]] = LRUCache(
            LISTED_REMEMBERED, getsizeof=lambda manifests: 1 + len(manifests)
        )

    def metadata(self, location: str) -> TableMetadata:
        with self._lock:
            found = self._metadata.get(location)
        if found is None:
            try:
                found = FromInputFile.table_metadata(self.io.new_input(location))
            except (NotFound, FileNotFoundError) as error:
                raise Corrupt(
                    "a table's metadata file is gone",
                    location=location,
                    advice="Run `floodmark doctor`; restore the file or the lake.",
                ) from error
            self.remember_metadata(location, found)
        return found

    def manifests(self, location: str | None) -> tuple[ManifestFile, ...]:
        """The manifests of a published list; None is the empty table's."""
        if location is None:
            return ()
        with self._lock:
            found = self._lists.get(location)
        if found is None:
            found = tuple(read_manifest_list(self.io.new_input(location)))
            self.remember_manifests(location, found)
        if any(manifest.content == ManifestContent.DELETES for manifest in found):
            raise Corrupt(
                "this table has delete files, which Floodmark does not read",
                location=location,
                advice="Another engine wrote them; rewrite the table there as copy-on-write, then try again.",
            )
        return found

    def entries(self, manifest: ManifestFile) -> list[ManifestEntry]:
        """The live files of a published manifest. The caller must not change them: they are cached."""
        with self._lock:
            found = self._entries.get(manifest.manifest_path)
        if found is None:
            found = manifest.fetch_manifest_entry(self.io, discard_deleted=True)
            self.remember_entries(manifest.manifest_path, found)
        return found

    def columns(self, manifest: ManifestFile) -> FileColumns:
        """The live files of a published manifest, to plan a read: all readers of the process share them."""
        from floodmark.commit.file_columns import REMEMBERED

        key = self._readers, manifest.manifest_path, manifest.manifest_length, manifest.sequence_number
        return REMEMBERED.of(key, manifest, self._read)

    def _read(self, location: str) -> bytes:
        with self.io.new_input(location).open() as stream:
            return stream.read()

    def named_files(self, touched: Iterable[Head]) -> set[str]:
        """The metadata files, lists and manifests that the commit which left these heads names."""
        named: set[str] = set()
        for head in touched:
            if not head.metadata_location:
                continue  # the table was dropped
            named.add(head.metadata_location)
            if head.manifest_list is not None:
                named.add(head.manifest_list)
            named.update(manifest.manifest_path for manifest in self.manifests(head.manifest_list))
        return named

    def own_files(self, touched: Iterable[Head]) -> set[str]:
        """The files that a commit names, and the data files that it added."""
        touched = list(touched)
        return self.named_files(touched) | {
            entry.data_file.file_path
            for head in touched
            for manifest in self.manifests(head.manifest_list)
            if manifest.added_snapshot_id == head.snapshot
            for entry in self.entries(manifest)
        }

    def data_files(self, head: Head) -> list[str]:
        """The data files of a table at a state, in the order of its manifests."""
        try:
            return [
                entry.data_file.file_path
                for manifest in self.manifests(head.manifest_list)
                for entry in self.entries(manifest)
            ]
        except (NotFound, FileNotFoundError) as error:
            raise Corrupt(
                "a file of the table's history is gone",
                table=head.table,
                list=head.manifest_list,
                advice="Run `floodmark doctor`.",
            ) from error

    def remember_metadata(self, location: str, metadata: TableMetadata) -> None:
        with self._lock:
            self._metadata[location] = metadata

    def remember_entries(self, path: str, entries: list[ManifestEntry]) -> None:
        with self._lock:
            if len(entries) <= ENTRIES_REMEMBERED:
                self._entries[path] = entries

    def remember_manifests(self, location: str, manifests: tuple[ManifestFile, ...]) -> None:
        with self._lock:
            if len(manifests) < LISTED_REMEMBERED:
                self._lists[location] = manifests


def parse_metadata(text: str) -> TableMetadata:
    return TableMetadataUtil.parse_raw(text)
