"""Delete what attempts left in another catalog's table and no commit names: by state, never by age (I10).

Every attempt of a unit stages under folders of its own, by sink, unit and attempt. Once the table has the unit, the
table's lineage has moved past every state that another attempt was built on, so none of them can ever be committed:
their folders are deleted. Of the committed attempt, everything that its snapshot names stays; if that snapshot does not
exist any more, all of it stays. A crash in here leaves some files to the next try, which finds the unit in the table
and cleans again.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyiceberg.manifest import ManifestEntryStatus
from pyiceberg.table.snapshots import Snapshot

from floodmark.catalog.unit import Unit
from floodmark.sinks.iceberg.table import IcebergState, SentUnit, answering, manifests_of, read_manifests
from floodmark.storage import Storage, join
from floodmark.storage.location import split

COMPACTIONS = "floodmark-compactions"


def sink_folder(state: IcebergState, sink_id: str, table_id: str) -> tuple[str, str]:
    """The folder in which only this sink stages data files and manifests of one table of the lake."""
    name = f"floodmark-{sink_id}-{table_id}"
    return join(state.data_folder, name), join(state.metadata_folder, name)


def unit_folders(state: IcebergState, unit: Unit, attempt: str | None = None) -> tuple[str, str]:
    """The folders of a unit's staged data files and manifests; with `attempt`, those of that attempt."""
    data, metadata = (join(folder, unit.id) for folder in sink_folder(state, unit.sink_id, unit.table_id))
    return (data, metadata) if attempt is None else (join(data, attempt), join(metadata, attempt))


def clean_unit(storage: Storage, state: IcebergState, sent: SentUnit, unit: Unit) -> None:
    """Delete the files of a committed unit that no commit can name any more."""
    if sent.unit != unit.id:
        return  # the table moved on: which attempt of this unit was committed is unknown now
    snapshot = state.metadata.snapshot_by_id(sent.snapshot)
    named: set[str] | None = None
    for folder in unit_folders(state, unit):
        for attempt in sorted(attempts_in(storage, folder)):
            if attempt != sent.attempt:
                storage.delete_prefix(join(folder, attempt))
            elif snapshot is not None:
                named = named_by(state, snapshot) if named is None else named
                delete_unnamed(storage, join(folder, attempt), named)


def attempts_in(storage: Storage, folder: str) -> set[str]:
    """The folders below a folder that hold files, whole ones or remains of crashed writes."""
    entries = [*storage.list(folder), *storage.list(folder, temporary=True)]
    return {entry.location.removeprefix(folder + "/").partition("/")[0] for entry in entries}


def delete_unnamed(storage: Storage, folder: str, named: Iterable[str]) -> int:
    """Delete the files in a folder that are not among these; returns how many."""
    # By location, not by spelling: s3a:// and s3:// are the same, and another engine may write the table's folder
    # otherwise.
    kept = set(map(split, named))
    found = [entry.location for entry in (*storage.list(folder), *storage.list(folder, temporary=True))]
    gone = [location for location in found if split(location) not in kept]
    if gone:
        storage.delete_many(gone)
    return len(gone)


def named_by(state: IcebergState, snapshot: Snapshot) -> set[str]:
    """What a snapshot added: its list, its own manifests, and their data files."""
    own = [
        manifest
        for manifest in manifests_of(state.files, snapshot, state.name)
        if manifest.added_snapshot_id == snapshot.snapshot_id
    ]
    with answering("the destination's storage"):
        added = {
            entry.data_file.file_path
            for manifest in own
            for entry in state.files.entries(manifest)
            if entry.status == ManifestEntryStatus.ADDED
        }
    return {snapshot.manifest_list, *(manifest.manifest_path for manifest in own), *added}


# ── leftovers of compactions ──


def compaction_folders(state: IcebergState, attempt: str) -> tuple[str, str]:
    """The folders of data files and manifests of a compaction of this state: the name contains the state."""
    name = f"{_sequence(state)}-{attempt}"
    return join(state.data_folder, COMPACTIONS, name), join(state.metadata_folder, COMPACTIONS, name)


def sweep_compactions(storage: Storage, state: IcebergState) -> int:
    """Delete what compactions of past states left and no snapshot of the table names; returns how many files.

    A compaction is committed on the state that it was made for, or never. A compaction of this state, or of a state
    newer than the one that was read, may still be running.
    """
    now = _sequence(state)
    unnamed: dict[tuple[str, str, str], str] = {}
    for root in (join(state.data_folder, COMPACTIONS), join(state.metadata_folder, COMPACTIONS)):
        for entry in (*storage.list(root), *storage.list(root, temporary=True)):
            sequence = entry.location.removeprefix(root + "/").partition("-")[0]
            if sequence.isdecimal() and int(sequence) < now:
                unnamed[split(entry.location)] = entry.location
    for snapshot in reversed(state.metadata.snapshots):
        if not unnamed:
            break
        manifests = read_manifests(state.files, snapshot)
        named = [snapshot.manifest_list, *(manifest.manifest_path for manifest in manifests)]
        with answering("the destination's storage"):
            for manifest in manifests:
                named += [entry.data_file.file_path for entry in state.files.entries(manifest)]
        for location in named:
            unnamed.pop(split(location), None)
    if unnamed:
        storage.delete_many(sorted(unnamed.values()))
    return len(unnamed)


def _sequence(state: IcebergState) -> int:
    return 0 if state.head is None else state.head.sequence_number or 0
