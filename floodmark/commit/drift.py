"""Drift: another writer, not the publisher, moved a table's pointer; what it did is found from metadata alone.

The catalog records where it left every pointer, so a foreign commit is detected at once, and Floodmark neither builds
on it nor follows it. What the commit did is the difference of two lists of files: those of our newest state, and those
of the state that the pointer names now. If that is not certain, the drift is `unclear`, with the reason; nothing is
guessed. Foreign files are read again each time and never cached: another writer may reuse their names. Nothing is
written here, so a crash leaves nothing; storage that does not answer is Unavailable.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pyiceberg.manifest import (
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    read_manifest_list,
)
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot, ancestors_of
from sqlalchemy import select

from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.commit.metadata import (
    GC_ENABLED,
    MetadataFiles,
    allows_foreign_cleanup,
    last_sequence,
    parse_metadata,
)
from floodmark.errors import Corrupt, FloodmarkError, NotFound, Unavailable
from floodmark.model import MAIN, CurrentTable

APPENDED, DELETED, OVERWRITTEN, REWRITTEN = "appended", "deleted", "overwritten", "rewritten"
CHANGED, DROPPED, ROLLED_BACK, UNCLEAR = "changed", "dropped", "rolled_back", "unclear"
NAME_MAPPING = "schema.name-mapping.default"
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Drift:
    """What another writer did to a table since our newest state of it.

    `added` and `removed` are its files against that state. `unclear` is the reason why Floodmark cannot decide by
    itself; `takeable`: an operator can choose to accept the other state all the same. `sequence`: the highest that the
    other writer assigned.
    """

    table: str
    branch: str
    happened: str
    pointer: str | None
    added: tuple[ManifestEntry, ...] = field(default=(), repr=False)
    removed: tuple[ManifestEntry, ...] = field(default=(), repr=False)
    snapshots: int = 0
    sequence: int = 0
    unclear: str = ""
    takeable: bool = False
    # It is unclear on this branch only: the other writer wrote to another branch.
    elsewhere: bool = False
    # Of a dropped table: the names that the catalog has for it now.
    other_names: tuple[str, ...] = ()
    # Some of its snapshots claim that they only rewrote files; of one that is `rewritten`, all of them do.
    rewrote: bool = False
    # It let other engines delete files that only the lake's history names.
    allowed_cleanup: bool = False

    @property
    def rows_added(self) -> int:
        return sum(int(entry.data_file.record_count) for entry in self.added)

    @property
    def rows_removed(self) -> int:
        return sum(int(entry.data_file.record_count) for entry in self.removed)


class _Unclear(Exception):
    """What happened is not certain, and this is why. `elsewhere`: on one other branch, where it may be certain."""

    def __init__(self, why: str, *, elsewhere: bool = False) -> None:
        super().__init__(why)
        self.elsewhere = elsewhere


def classify(files: MetadataFiles, current: CurrentTable) -> Drift | None:
    """What another writer did to a table; None if nothing. Reads metadata and manifests, no rows."""
    if current.pointer == current.pointer_known:
        return None
    head = current.head
    if not current.pointer:
        return Drift(head.table, head.branch, DROPPED, None)
    known = files.metadata(current.pointer_known)
    sequence, allowed = 0, False
    try:
        theirs = _read_metadata(files, current.pointer)
        allowed = allows_foreign_cleanup(theirs) and not allows_foreign_cleanup(known)
        if theirs.table_uuid != known.table_uuid:
            raise _Unclear("another table has this name")
        sequence = last_sequence(theirs)
        _check_shape(known, theirs)
        _check_refs(known, theirs, head.branch)
        return replace(_difference(files, current, known, theirs), allowed_cleanup=allowed)
    except _Unclear as why:
        unclear = Drift(head.table, head.branch, UNCLEAR, current.pointer, unclear=str(why))
        return replace(unclear, sequence=sequence, elsewhere=why.elsewhere, allowed_cleanup=allowed)


def _difference(files: MetadataFiles, current: CurrentTable, known: TableMetadata, theirs: TableMetadata) -> Drift:
    head = current.head
    if _snapshot_id(known, head.branch) == _snapshot_id(theirs, head.branch):
        drift = Drift(head.table, head.branch, CHANGED, current.pointer)
        return replace(drift, sequence=last_sequence(theirs))
    newest = _ref_of(theirs, head.branch)
    there = {entry.data_file.file_path: entry for entry in _entries(files, newest)}
    ours = {
        entry.data_file.file_path: entry
        for manifest in files.manifests(head.manifest_list)
        for entry in files.entries(manifest)
    }
    added = tuple(entry for path, entry in there.items() if path not in ours)
    removed = tuple(entry for path, entry in ours.items() if path not in there)
    for path in there.keys() & ours.keys():
        if there[path].sequence_number != ours[path].sequence_number:
            raise _Unclear(f"a file of the table was removed and added again: {path}")
    line = _line_since(theirs, newest, head.snapshot)
    rewrites = [_is_rewrite(theirs, snapshot) for snapshot in line or ()]
    drift = Drift(
        head.table,
        head.branch,
        REWRITTEN if added and removed and all(rewrites) else _name(added, removed),
        current.pointer,
        added,
        removed,
        snapshots=len(line or ()),
        sequence=last_sequence(theirs),
        rewrote=any(rewrites),
    )
    for entry in added:
        _check_entry(entry, head.spec_id)
    if line is None:
        why = "Floodmark's newest snapshot is not in the table's history any more: it was rolled back or rewritten"
        return replace(drift, happened=ROLLED_BACK, unclear=why, takeable=True)
    return drift


def _name(added: tuple[ManifestEntry, ...], removed: tuple[ManifestEntry, ...]) -> str:
    if added and removed:
        return OVERWRITTEN
    return APPENDED if added else DELETED if removed else CHANGED


def moved_branches(files: MetadataFiles, current: CurrentTable) -> set[str]:
    """The branches whose newest snapshot is not the one that we left; empty if that cannot be determined."""
    if not current.pointer or current.pointer == current.pointer_known:
        return set()
    try:
        theirs = _read_metadata(files, current.pointer)
    except _Unclear:
        return set()
    known = files.metadata(current.pointer_known)
    return {name for name in {MAIN, *known.refs} if _snapshot_id(known, name) != _snapshot_id(theirs, name)}


# ── the checks, each with its reason ──


def _check_shape(known: TableMetadata, theirs: TableMetadata) -> None:
    if theirs.format_version != known.format_version:
        raise _Unclear(f"the table's format version is {theirs.format_version} now, and was {known.format_version}")
    if not _same_schemas(known, theirs):
        raise _Unclear("its columns were changed")
    if (theirs.default_spec_id, len(theirs.partition_specs)) != (known.default_spec_id, len(known.partition_specs)):
        raise _Unclear("its partitions were changed")
    if (theirs.default_sort_order_id, len(theirs.sort_orders)) != (known.default_sort_order_id, len(known.sort_orders)):
        raise _Unclear("its sort order was changed")
    if theirs.location != known.location:
        raise _Unclear(f"its folder was changed: {theirs.location}")
    if theirs.properties.get(NAME_MAPPING) != known.properties.get(NAME_MAPPING):
        raise _Unclear("files without field ids may have been added, by a name mapping")


def _same_schemas(known: TableMetadata, theirs: TableMetadata) -> bool:
    def shapes(metadata: TableMetadata) -> dict[int, tuple[Schema, tuple[int, ...]]]:
        return {one.schema_id: (one, tuple(one.identifier_field_ids)) for one in metadata.schemas}

    return theirs.current_schema_id == known.current_schema_id and shapes(theirs) == shapes(known)


def _check_refs(known: TableMetadata, theirs: TableMetadata, branch: str) -> None:
    moved = sorted(
        name for name in {MAIN, *known.refs} - {branch} if _snapshot_id(known, name) != _snapshot_id(theirs, name)
    )
    if moved:
        also = "" if _snapshot_id(known, branch) == _snapshot_id(theirs, branch) else f", not only on {branch}"
        raise _Unclear(f"it was written on the branch {', '.join(moved)}{also}", elsewhere=not also and len(moved) == 1)
    snapshots = {one.snapshot_id for one in known.snapshots}
    new = theirs.refs.keys() - known.refs.keys() - {branch}
    made = sorted(name for name in new if _snapshot_id(theirs, name) not in snapshots)
    if made:
        raise _Unclear(f"another writer committed to refs that Floodmark did not create: {', '.join(made)}")


def _check_entry(entry: ManifestEntry, spec_id: int) -> None:
    file = entry.data_file
    if file.content != DataFileContent.DATA:
        raise _Unclear(f"it has delete files, which Floodmark does not read: {file.file_path}")
    if file.file_format != FileFormat.PARQUET:
        raise _Unclear(f"a file is not Parquet: {file.file_path}")
    if file.spec_id != spec_id:
        raise _Unclear(f"a file has another partition layout than the table: {file.file_path}")


# ── what another writer left ──


@contextmanager
def _reading(location: str) -> Iterator[None]:
    """Bytes of another writer: a decoder may raise any error on them, and then the drift is unclear."""
    try:
        yield
    except (Unavailable, _Unclear):
        raise
    except (NotFound, FileNotFoundError) as error:
        raise _Unclear(f"a file of it is gone: {location}") from error
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        raise _Unclear(f"a file of it cannot be parsed: {location} ({reason})") from error


def _read_metadata(files: MetadataFiles, location: str) -> TableMetadata:
    with _reading(location):
        data = files.io.storage.read(location)
        return parse_metadata((gzip.decompress(data) if data.startswith(_GZIP) else data).decode())


def _entries(files: MetadataFiles, snapshot: Snapshot | None) -> list[ManifestEntry]:
    """The live files of a foreign snapshot."""
    if snapshot is None:
        return []
    with _reading(snapshot.manifest_list):
        manifests = list(read_manifest_list(files.io.new_input(snapshot.manifest_list)))
    if any(manifest.content != ManifestContent.DATA for manifest in manifests):
        raise _Unclear("it has delete files, which Floodmark does not read")
    found: dict[str, ManifestEntry] = {}
    for manifest in manifests:
        with _reading(manifest.manifest_path):
            entries = manifest.fetch_manifest_entry(files.io, discard_deleted=True)
        for entry in entries:
            if entry.data_file.file_path in found:
                raise _Unclear(f"it lists a file twice: {entry.data_file.file_path}")
            found[entry.data_file.file_path] = entry
    return list(found.values())


def _snapshot_id(metadata: TableMetadata, branch: str) -> int | None:
    if branch == MAIN:
        return metadata.current_snapshot_id
    ref = metadata.refs.get(branch)
    return None if ref is None else ref.snapshot_id


def _ref_of(metadata: TableMetadata, branch: str) -> Snapshot | None:
    wanted = _snapshot_id(metadata, branch)
    if wanted is None:
        return None
    found = metadata.snapshot_by_id(wanted)
    if found is None:
        raise _Unclear(f"its metadata does not have its newest snapshot, {wanted}")
    return found


def _is_rewrite(metadata: TableMetadata, snapshot: int) -> bool:
    """Whether a snapshot claims the rows of the one before, in other files. Only reading them proves it."""
    found = metadata.snapshot_by_id(snapshot)
    return found is not None and found.summary is not None and found.summary.operation == Operation.REPLACE


def _line_since(metadata: TableMetadata, newest: Snapshot | None, ours: int | None) -> list[int] | None:
    """The snapshots on top of ours, newest first; None if ours is not their ancestor."""
    line: list[int] = []
    for one in ancestors_of(newest, metadata):
        if one.snapshot_id == ours:
            return line
        line.append(one.snapshot_id)
        if one.parent_snapshot_id is None:
            break
    return line if ours is None else None


# ── saying it ──


def drift_text(drift: Drift) -> str:
    """What happened, and what a repair would do; for errors, `doctor` and the preview."""
    text, table = f"changed by another writer: {happened_text(drift)}", drift.table
    if drift.elsewhere:
        return f"{text}; `floodmark repair {table}` shows the changes, and what can be done"
    if drift.unclear:
        return f"{text}; you must choose: {ways_text(drift)}"
    if drift.happened == REWRITTEN:
        return (
            f"{text}; `floodmark repair {table} --apply` compares the rows, and if they are the same reverts the table "
            "to the state that Floodmark left: rows keep their sequences"
        )
    if drift.happened in (CHANGED, DROPPED):
        back = f"{text}; `floodmark repair {table} --apply` would revert the table to the state that Floodmark left"
        return f"{back}; {other_names_text(drift)}" if drift.other_names else back
    return (
        f"{text}; `floodmark repair {table} --apply` would accept it as a commit of `external`, if its rows fit; "
        "with --revert it would revert the table to the state that Floodmark left"
    )


def other_names_text(drift: Drift) -> str:
    return (
        f"the name {', '.join(drift.other_names)} stays, over the same files: remove it from the catalog with the "
        "engine that made it, without deleting files"
    )


def ways_text(drift: Drift) -> str:
    table = drift.table
    back = f"`floodmark repair {table} --revert --apply` reverts the table to Floodmark's state"
    if drift.takeable:
        return f"{back}, `floodmark repair {table} --accept --apply` accepts the other state"
    return (
        f"{back}; the other state cannot be accepted as it is: change it back with the engine that made it, "
        "or revert the table, then change its shape with `floodmark apply` and load its rows with `floodmark load`"
    )


def happened_text(drift: Drift) -> str:
    text = _happened(drift)
    if not drift.allowed_cleanup:
        return text
    return f"{text}; it set {GC_ENABLED} back, so other engines may delete files of the lake's history"


def _happened(drift: Drift) -> str:
    added, removed = len(drift.added), len(drift.removed)
    came = f"{drift.rows_added} row(s) in {added} file(s) were added"
    went = f"{drift.rows_removed} row(s) in {removed} file(s) were removed"
    texts: Mapping[str, str] = {
        APPENDED: f"another writer appended: {came}",
        DELETED: f"another writer deleted: {went}",
        OVERWRITTEN: f"another writer overwrote or deleted: {went}, {came}",
        REWRITTEN: f"another writer rewrote files: {went}, {came}",
        CHANGED: "another writer changed its settings or refs, but no row",
        DROPPED: "another writer dropped or renamed it",
    }
    if drift.happened == CHANGED and drift.rewrote:
        return "another writer rewrote its manifests, but changed no row"
    if drift.other_names:
        return f"another writer renamed it: the catalog has it as {', '.join(drift.other_names)}"
    if drift.unclear:
        known = f" ({went}, {came})" if added or removed else ""
        return f"it is not clear what another writer did: {drift.unclear}{known}"
    return texts[drift.happened]


def check_not_drifted(files: MetadataFiles, current: CurrentTable) -> None:
    """Refuse a table whose pointer another writer moved: its rows and sequences are not those in the catalog."""
    if current.pointer == current.pointer_known:
        return
    try:
        drift = classify(files, current)
        happened = "" if drift is None else drift_text(drift)
        kind = None if drift is None else drift.happened
    except FloodmarkError as error:
        # Only the description is missing; that the table drifted is certain.
        happened, kind = f"the change cannot be determined now ({error.kind})", UNCLEAR
    raise Corrupt(
        "another writer changed the table",
        table=current.head.table,
        happened=kind,
        pointer=current.pointer or "none",
        pointer_expected=current.pointer_known,
        advice=(
            f"Nothing was read or written. It was {happened}. Stop the writer that commits to this catalog directly, "
            "then repair it (docs/operations.md)."
        ),
    )


def with_names(database: Database, drift: Drift, location: str) -> Drift:
    """Of a table that was dropped: under which other names the catalog has it. `location` is its folder."""
    if drift.happened != DROPPED:
        return drift
    row = tables.iceberg_tables
    query = select(row.c.table_namespace, row.c.table_name, row.c.metadata_location)
    with database.read() as tx:
        rows = [one for one in tx.execute(query) if str(one.metadata_location or "").startswith(location + "/")]
    names = (
        one.table_name if one.table_namespace == tables.NAMESPACE else f"{one.table_namespace}.{one.table_name}"
        for one in rows
    )
    return replace(drift, other_names=tuple(sorted(names)))
