"""One commit of another catalog's table: new files, removed files, a wider schema and properties, all or nothing.

Every commit adds exactly one snapshot on the one that it was built on, and asks the catalog to refuse it if the table's
lineage has moved: so of two commits on the same state at most one succeeds, and a late one never does. That also
fences: once the lineage has moved, files that were staged for an older state can never be named any more (I10).
PyIceberg's own retries are not used. Crash anywhere in here: manifests that nothing refers to, beside the staged files.
A lost reply is `UNKNOWN`: the commit may still succeed until the lineage moves, so nothing is deleted meanwhile (I13).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.manifest import ManifestFile
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertDefaultSpecId,
    AssertLastAssignedFieldId,
    AssertRefSnapshotId,
    AssertTableUUID,
    SetCurrentSchemaUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)

from floodmark import clock
from floodmark.commit.live_files import LiveFile
from floodmark.commit.manifests import plan_merges, write_added, write_list, write_merged, write_rest
from floodmark.commit.metadata import add_schema, last_sequence
from floodmark.errors import FloodmarkError, Invalid
from floodmark.model import FileRecord
from floodmark.sinks.iceberg.table import IcebergPlace, IcebergState
from floodmark.storage import join

COMMITTED, LOST, UNKNOWN = "committed", "lost", "unknown"
# In the summary of each snapshot that a sink makes: the sink that owns it, for maintenance.
SINK_NOTE = "floodmark-sink-id"
_TOTALS = (
    ("total-data-files", "added-data-files", "deleted-data-files"),
    ("total-records", "added-records", "deleted-records"),
    ("total-files-size", "added-files-size", "removed-files-size"),
)


@dataclass(frozen=True)
class PlannedCommit:
    """What one commit does. `schema` is the table's next schema, if it gets wider; `same_rows`: only files change.

    `snapshot` is the id of the snapshot that it makes; its manifests go into `folder`, under fresh names.
    """

    snapshot: int
    folder: str
    added: tuple[FileRecord, ...] = ()
    removed: tuple[LiveFile, ...] = ()
    schema: Schema | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    same_rows: bool = False
    # For people who look at the table's history.
    note: Mapping[str, str] = field(default_factory=dict)

    @property
    def operation(self) -> Operation:
        if self.same_rows:
            return Operation.REPLACE
        if self.removed:
            return Operation.OVERWRITE if self.added else Operation.DELETE
        return Operation.APPEND


@dataclass(frozen=True)
class Built:
    """A prepared commit: its manifests are written, the catalog was not called yet."""

    state: IcebergState
    requirements: tuple[TableRequirement, ...]
    updates: tuple[TableUpdate, ...]


def build_commit(place: IcebergPlace, state: IcebergState, change: PlannedCommit) -> Built:
    """Write the manifests of a change, for this state of the table and no other."""
    # One barrier for the folder of all of them: durable before the catalog names them.
    with place.storage.batch():
        snapshot = _write_snapshot(place, state, change)
    updates: list[TableUpdate] = []
    if change.schema is not None:
        # The last one that was added: another catalog may assign another id.
        updates += [AddSchemaUpdate(schema_=change.schema), SetCurrentSchemaUpdate(schema_id=-1)]
    updates += [AddSnapshotUpdate(snapshot=snapshot), _head_update(state, snapshot)]
    if change.properties:
        updates.append(SetPropertiesUpdate(updates=dict(change.properties)))
    return Built(state, _requirements(state, change), tuple(updates))


def commit(place: IcebergPlace, built: Built) -> tuple[str, Exception | None]:
    """Call the catalog, once. Returns the outcome, and the error if the outcome is unknown."""
    try:
        answer = place.catalog.commit_table(built.state.table, built.requirements, built.updates)
    except (CommitFailedException, NoSuchTableError):
        return LOST, None
    except Exception as error:  # noqa: BLE001 - a foreign catalog fails in its own ways; what is true is read
        return UNKNOWN, error
    _drop_old_metadata(place, built.state.metadata, answer.metadata)
    return COMMITTED, None


def _drop_old_metadata(place: IcebergPlace, before: TableMetadata, after: TableMetadata) -> None:
    """Delete metadata files that the table's log dropped, if its properties ask for it: PyIceberg does not do it.

    Best effort. Crash here: files that nothing names, for a sweep of the destination.
    """
    if after.properties.get("write.metadata.delete-after-commit.enabled", "false").lower() != "true":
        return
    kept = {entry.metadata_file for entry in after.metadata_log}
    with suppress(FloodmarkError):
        place.storage.delete_many(
            [entry.metadata_file for entry in before.metadata_log if entry.metadata_file not in kept]
        )


def next_sequence(state: IcebergState) -> int:
    """The sequence that the table's next commit gets."""
    return last_sequence(state.metadata) + 1


def _requirements(state: IcebergState, change: PlannedCommit) -> tuple[TableRequirement, ...]:
    """The table is the one that was read, at the same snapshot and with the same schema."""
    metadata = state.metadata
    requirements: list[TableRequirement] = [
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertRefSnapshotId(ref=MAIN_BRANCH, snapshot_id=None if state.head is None else state.head.snapshot_id),
        AssertCurrentSchemaId(current_schema_id=metadata.current_schema_id),
        AssertDefaultSpecId(default_spec_id=metadata.default_spec_id),
    ]
    if change.schema is not None:
        # No other writer assigned the ids of the new columns.
        requirements.append(AssertLastAssignedFieldId(last_assigned_field_id=metadata.last_column_id))
    return tuple(requirements)


def _head_update(state: IcebergState, snapshot: Snapshot) -> SetSnapshotRefUpdate:
    """The new head of the main branch, with the retention rules that its owner set."""
    known = state.metadata.refs.get(MAIN_BRANCH)
    return SetSnapshotRefUpdate(
        ref_name=MAIN_BRANCH,
        type=SnapshotRefType.BRANCH,
        snapshot_id=snapshot.snapshot_id,
        max_ref_age_ms=None if known is None else known.max_ref_age_ms,
        max_snapshot_age_ms=None if known is None else known.max_snapshot_age_ms,
        min_snapshots_to_keep=None if known is None else known.min_snapshots_to_keep,
    )


def _write_snapshot(place: IcebergPlace, state: IcebergState, change: PlannedCommit) -> Snapshot:
    metadata = state.metadata if change.schema is None else add_schema(state.metadata, change.schema)
    name = clock.new_id()
    manifests = _kept(place, state, metadata, change, name)
    if change.added:
        location = join(change.folder, f"{name}-m0.avro")
        spec_id = metadata.default_spec_id
        added, _ = write_added(place.files.io, location, metadata, spec_id, change.snapshot, change.added)
        manifests = [added, *manifests]
    parent = None if state.head is None else state.head.snapshot_id
    sequence = next_sequence(state)
    location = join(change.folder, f"{name}-snap.avro")
    write_list(place.files.io, location, change.snapshot, parent, sequence, manifests)
    return Snapshot(
        snapshot_id=change.snapshot,
        parent_snapshot_id=parent,
        sequence_number=sequence,
        # Above the last one, not equal to it: PyIceberg would replace an unchanged time by the clock's, and a clock
        # that went back makes a table that other engines refuse.
        timestamp_ms=max(clock.now_ms(), metadata.last_updated_ms + 1),
        manifest_list=location,
        summary=_summary(state, change),
        schema_id=metadata.current_schema_id,
    )


def _kept(
    place: IcebergPlace, state: IcebergState, metadata: TableMetadata, change: PlannedCommit, name: str
) -> list[ManifestFile]:
    """The table's manifests without the removed files; many small ones become one, so that lists stay short."""
    io, removed = place.files.io, {file.path for file in change.removed}
    whole: list[ManifestFile] = []
    cut: list[ManifestFile] = []
    for manifest in state.manifests():
        if (manifest.added_files_count, manifest.existing_files_count) == (0, 0):
            continue  # it only lists what an earlier commit removed
        entries = place.files.entries(manifest) if removed else []
        if removed.isdisjoint(entry.data_file.file_path for entry in entries):
            whole.append(manifest)
            continue
        spec_id = manifest.partition_spec_id
        _check_spec(state, metadata, spec_id)
        location = join(change.folder, f"{name}-d{len(cut)}.avro")
        cut.append(write_rest(io, location, metadata, spec_id, change.snapshot, entries, removed))
    for number, group in enumerate(plan_merges(whole), start=1):
        spec_id = group[0].partition_spec_id
        if not _has_sources(metadata, spec_id):
            continue
        together = [entry for manifest in group for entry in place.files.entries(manifest)]
        location = join(change.folder, f"{name}-m{number}.avro")
        gone = {manifest.manifest_path for manifest in group}
        merged = write_merged(io, location, metadata, spec_id, change.snapshot, together)
        whole = [*(one for one in whole if one.manifest_path not in gone), merged]
    return [*cut, *whole]


def _has_sources(metadata: TableMetadata, spec_id: int) -> bool:
    """Whether the source columns of a partition spec exist, so that their types are known."""
    columns = set(metadata.schema()._lazy_id_to_name)
    return all(field.source_id in columns for field in metadata.specs()[spec_id].fields)


def _check_spec(state: IcebergState, metadata: TableMetadata, spec_id: int) -> None:
    if not _has_sources(metadata, spec_id):
        raise Invalid(
            "files of the destination's table are partitioned by a column that was dropped",
            table=state.name,
            spec_id=spec_id,
            advice="Rewrite those files with the engine that made them, then run the sink again.",
        )


def _summary(state: IcebergState, change: PlannedCommit) -> Summary:
    """The commit's summary, which Iceberg's tools show. Totals follow from the previous ones, if these are known."""
    counts = {
        **_counted("added-data-files", "added-records", "added-files-size", _sizes(change.added)),
        **_counted("deleted-data-files", "deleted-records", "removed-files-size", _sizes(change.removed)),
    }
    before: Mapping[str, str] = {} if state.head is None or state.head.summary is None else state.head.summary
    totals: dict[str, str] = {}
    for total, plus, minus in _TOTALS:
        known = "0" if state.head is None else str(before.get(total))
        if known.isdecimal():
            totals[total] = str(max(0, int(known) + counts[plus] - counts[minus]))
    shown = {name: str(count) for name, count in counts.items() if count or name.startswith("added")}
    none = dict.fromkeys(("total-delete-files", "total-position-deletes", "total-equality-deletes"), "0")
    return Summary(change.operation, **shown, **totals, **none, **change.note)


def _sizes(files: Sequence[FileRecord | LiveFile]) -> Iterable[tuple[int, int]]:
    return [(file.rows, file.size_bytes) for file in files]


def _counted(files: str, rows: str, size: str, sizes: Iterable[tuple[int, int]]) -> dict[str, int]:
    found = list(sizes)
    return {files: len(found), rows: sum(one for one, _ in found), size: sum(one for _, one in found)}
