"""Maintenance of a table that an Iceberg sink ships to: expire the sink's old snapshots, sweep what it left.

The table may have other writers, so only files and snapshots of this sink are touched. Expiry removes snapshots of this
sink that no rule of the table keeps (`history.expire.*`, branches, tags); `gc.enabled = false` stops it. Sweep deletes
files of this sink's past units that no snapshot of the table names, and its past metadata files.

A past unit is fenced (I10): the table's property names a later unit of this sink, whose commit moved the table on, and
an attempt is committed on the state that it read, or never. Open units are not past. Order of reading: list the files,
ask the catalog for open units, then load the table; files that are staged later are not in the list.
Crash anywhere: the table is whole; the next run finds the remaining files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyiceberg.serializers import FromInputFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    TableRequirement,
)

from floodmark import clock
from floodmark.catalog.maintenance_state import Maintenance
from floodmark.errors import Conflict, FloodmarkError, Unavailable
from floodmark.failpoints import hit
from floodmark.maintenance.record import SINK_EXPIRE, SINK_SWEEP, VerbRun
from floodmark.runs import PLANNED, PROTECTED
from floodmark.sinks.iceberg.clean import sink_folder, sweep_compactions
from floodmark.sinks.iceberg.commit import COMMITTED, LOST, SINK_NOTE, Built, commit
from floodmark.sinks.iceberg.table import IcebergPlace, IcebergState, SentUnit, answering, read_manifests, unit_property
from floodmark.storage.location import split

if TYPE_CHECKING:
    from floodmark.sinks.iceberg.destination import IcebergDestination

EXPIRED, SWEPT = "expired", "swept"

_AGE, _LEAST = "history.expire.max-snapshot-age-ms", "history.expire.min-snapshots-to-keep"
_METADATA = ".metadata.json"
# Metadata files that one run reads to find their owner (I14).
METADATA_FILES_MAX = 1000


@dataclass(frozen=True)
class Owner:
    """The owner of files: a sink and one table of the lake."""

    sink: str
    sink_id: str
    table_id: str

    @property
    def record_id(self) -> str:
        """The id under which the records of its maintenance are kept."""
        return f"{self.sink_id}-{self.table_id[:8]}"

    @property
    def unit_property(self) -> str:
        return unit_property(self.sink_id, self.table_id)

    @property
    def mark(self) -> str:
        """The property that marks a metadata file made by an expiry of this sink: the one after the file it names."""
        return f"floodmark.{self.sink_id}.{self.table_id}.expired-after"

    def wrote(self, snapshot: Snapshot) -> bool:
        """Whether a unit or a compaction of this sink made the snapshot."""
        return snapshot.summary is not None and snapshot.summary[SINK_NOTE] == self.sink_id


# ── which snapshots may expire ──


def plan_expiry(metadata: TableMetadata, owner: Owner, now_ms: int, keep_ms: int, *, at_least_ms: int = 0) -> list[int]:
    """The snapshots of this sink that no rule of the table keeps, oldest first.

    The table's own age has precedence over the sink's `keep_ms`; an explicit `at_least_ms` is a minimum for both.
    """
    properties = metadata.properties
    age_ms = max(at_least_ms, _number(properties.get(_AGE), keep_ms))
    least = max(1, _number(properties.get(_LEAST), 1))
    by_id = {one.snapshot_id: one for one in metadata.snapshots}
    kept: set[int] = set()
    reached: set[int] = set()
    for ref in metadata.refs.values():
        for place, snapshot in enumerate(_line(by_id, ref)):
            reached.add(snapshot.snapshot_id)
            own_age_ms = max(at_least_ms, ref.max_snapshot_age_ms or age_ms)
            if place < (ref.min_snapshots_to_keep or least) or snapshot.timestamp_ms >= now_ms - own_age_ms:
                kept.add(snapshot.snapshot_id)
    kept |= {one.snapshot_id for one in metadata.snapshots if one.timestamp_ms >= now_ms - age_ms} - reached
    return [one.snapshot_id for one in metadata.snapshots if one.snapshot_id not in kept and owner.wrote(one)]


def _line(by_id: dict[int, Snapshot], ref: SnapshotRef) -> Iterator[Snapshot]:
    """The snapshots that a ref keeps: of a tag the one, of a branch its ancestors, newest first."""
    found = by_id.get(ref.snapshot_id)
    while found is not None:
        yield found
        parent = found.parent_snapshot_id
        is_branch = ref.snapshot_ref_type == SnapshotRefType.BRANCH
        found = by_id.get(parent) if is_branch and parent is not None else None


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdecimal() else default


# ── the verbs ──


class IcebergMaintenance:
    """Expires and sweeps one table that a sink ships to."""

    def __init__(self, destination: IcebergDestination, table: str, owner: Owner, actor: str) -> None:
        self._place: IcebergPlace = destination.place
        self._keep_ms = clock.parse_duration_ms(destination.settings.keep_snapshots)
        self._table = table
        self._owner = owner
        self._actor = actor

    def expire(self, *, keep: str | None = None, dry_run: bool = False) -> Maintenance:
        return self._run(SINK_EXPIRE, lambda run: self._expire(run, keep, dry_run))

    def sweep(self, open_units: Callable[[], set[str]], *, dry_run: bool = False) -> Maintenance:
        """`open_units` asks the lake's catalog which units of the sink are open."""
        return self._run(SINK_SWEEP, lambda run: self._sweep(run, open_units, dry_run))

    def _run(self, verb: str, work: Callable[[VerbRun], None]) -> Maintenance:
        started_ms = clock.now_ms()
        run = VerbRun(verb, None)
        name = ".".join(self._place.identifier(self._table))
        with run.recorded(), closing(self._place):
            state = self._place.load(self._table)
            if state is not None:
                if state.collects:
                    work(run)
                else:
                    run.outcome, run.detail = PROTECTED, {"reason": "gc.enabled is false in the table's properties"}
        run.detail["sink"] = self._owner.sink
        return replace(run.maintenance(self._actor, started_ms), table=name, ended_ms=clock.now_ms())

    def _load(self) -> IcebergState:
        state = self._place.load(self._table)
        if state is None:
            raise Conflict("the destination's table was dropped meanwhile", table=self._table, advice="Run it again.")
        return state

    # ── snapshots ──

    def _expire(self, run: VerbRun, keep: str | None, dry_run: bool) -> None:
        state = self._load()
        now_ms, metadata = clock.now_ms(), state.metadata
        given_ms = 0 if keep is None else clock.parse_duration_ms(keep)
        keep_ms = self._keep_ms if keep is None else given_ms
        if any(state.went_back(sent) for sent in _all_sent(state)):
            # Its old snapshots are the proof, and the sink waits for an operator to choose.
            run.outcome = PROTECTED
            run.detail = {
                "reason": "the table was rolled back to a state before a unit of a sink; see `floodmark sink status`"
            }
            return
        gone = plan_expiry(metadata, self._owner, now_ms, keep_ms, at_least_ms=given_ms)
        run.detail = {"snapshots": len(gone), "snapshots_kept": len(metadata.snapshots) - len(gone)}
        if gone and now_ms <= metadata.last_updated_ms:
            # The catalog would put this time into the metadata, where times must not decrease.
            run.detail |= {"snapshots": 0, "reason": "the clock is behind the table's last commit"}
            return
        if not gone:
            return
        run.outcome = PLANNED
        if dry_run:
            return
        self._remove(state, gone)
        hit("destination.expired")
        run.outcome = EXPIRED

    def _remove(self, state: IcebergState, gone: Sequence[int]) -> None:
        """One commit, on the refs that were judged; a lost reply is resolved by reading (I13)."""
        refs: list[TableRequirement] = [
            AssertRefSnapshotId(ref=name, snapshot_id=ref.snapshot_id) for name, ref in state.metadata.refs.items()
        ]
        mark = SetPropertiesUpdate(updates={self._owner.mark: state.table.metadata_location})
        updates = (RemoveSnapshotsUpdate(snapshot_ids=list(gone)), mark)
        outcome, error = commit(
            self._place, Built(state, (AssertTableUUID(uuid=state.metadata.table_uuid), *refs), updates)
        )
        if outcome == COMMITTED:
            return
        now = self._load()
        if all(now.metadata.snapshot_by_id(one) is None for one in gone):
            return
        if outcome == LOST or now.metadata.refs != state.metadata.refs:
            raise Conflict("the destination's table changed meanwhile", table=state.name, advice="Run it again.")
        raise Unavailable(
            "the destination's catalog did not confirm that it expired the snapshots, and still has them",
            table=state.name,
            cause=type(error).__name__,
            advice="No row was changed. Run it again.",
        ) from error

    # ── files ──

    def _sweep(self, run: VerbRun, open_units: Callable[[], set[str]], dry_run: bool) -> None:
        state = self._load()
        listed = self._listed(state)
        metadata_files = self._metadata_files(state)
        still_open = open_units()
        state = self._load()
        sent = state.sent(self._owner.unit_property)
        past = {
            location: size
            for location, (unit, size) in listed.items()
            if _is_past(unit, sent) and unit not in still_open
        }
        # By location, not by spelling: another engine may have changed how the table's folder is written.
        named = set(map(split, _named(state))) if past else set()
        doomed = {location: size for location, size in past.items() if split(location) not in named}
        doomed |= self._past_metadata(state, metadata_files)
        left = 0 if dry_run else sweep_compactions(self._place.storage, state)
        run.detail = {"files": len(doomed) + left, "bytes": sum(doomed.values()), "states": 0}
        if not doomed:
            run.outcome = SWEPT if left else run.outcome
            return
        run.outcome = PLANNED
        if dry_run:
            run.detail["listing"] = [{"file": one, "bytes": size} for one, size in sorted(doomed.items())]
            return
        self._delete(doomed)
        hit("destination.swept")
        run.outcome = SWEPT

    def _delete(self, doomed: dict[str, int]) -> None:
        # Data before what names it; newer metadata files before older ones, which prove their owner.
        order = sorted(doomed, key=lambda one: (one.endswith(_METADATA), one.endswith(".avro")))
        self._place.storage.delete_many(order)
        for folder in {one.rpartition("/")[0] for one in order}:
            self._place.storage.drop_empty_folder(folder)

    def _listed(self, state: IcebergState) -> dict[str, tuple[str, int]]:
        """Files in folders of this sink's units, with the unit and the size."""
        found: dict[str, tuple[str, int]] = {}
        storage = self._place.storage
        for root in sink_folder(state, self._owner.sink_id, self._owner.table_id):
            for entry in (*storage.list(root), *storage.list(root, temporary=True)):
                unit = entry.location.removeprefix(root + "/").partition("/")[0]
                found[entry.location] = (unit, entry.size_bytes)
        return found

    def _metadata_files(self, state: IcebergState) -> dict[str, int]:
        """Metadata files in the table's folder, oldest first by their number; bounded."""
        entries = self._place.storage.list(state.metadata_folder)
        found = {
            entry.location: entry.size_bytes
            for entry in entries
            if entry.location.endswith(_METADATA) and entry.location.rpartition("/")[0] == state.metadata_folder
        }
        return {one: found[one] for one in sorted(found)[:METADATA_FILES_MAX]}

    def _past_metadata(self, state: IcebergState, files: dict[str, int]) -> dict[str, int]:
        """Metadata files that commits of this sink made, older than its window, that nothing names any more."""
        current = split(state.table.metadata_location)
        named = {current, *(split(one.metadata_file) for one in state.metadata.metadata_log)}
        before_ms = clock.now_ms() - self._keep_ms
        past: dict[str, int] = {}
        for location in (one for one in files if split(one) not in named):
            try:
                with answering("the destination's storage"):
                    metadata = FromInputFile.table_metadata(self._place.files.io.new_input(location))
            except (FloodmarkError, ValueError):
                continue  # gone meanwhile, or of another format: leave it alone
            is_old = metadata.table_uuid == state.metadata.table_uuid and metadata.last_updated_ms < before_ms
            # A metadata file becomes current only over the one that it was made from: while that one is current, a
            # running commit may still name it (I10).
            base = metadata.metadata_log[-1].metadata_file if metadata.metadata_log else None
            if is_old and base is not None and split(base) != current and self._made(metadata):
                past[location] = files[location]
        return past

    def _made(self, metadata: TableMetadata) -> bool:
        """Whether a commit of this sink made the metadata file: one of a snapshot, or an expiry on the file before."""
        head = metadata.current_snapshot()
        if head is not None and head.timestamp_ms == metadata.last_updated_ms and self._owner.wrote(head):
            return True
        before = metadata.metadata_log[-1].metadata_file if metadata.metadata_log else None
        return before is not None and metadata.properties.get(self._owner.mark) == before


def _all_sent(state: IcebergState) -> Iterator[SentUnit]:
    """The last unit of each sink that ships into the table."""
    for name in state.metadata.properties:
        if name.startswith("floodmark.") and name.count(".") == 2:
            sent = state.sent(name)
            if sent is not None:
                yield sent


def _is_past(unit: str, sent: SentUnit | None) -> bool:
    """Whether the table has a later unit of this sink: ids of units rise, even if the clock went back."""
    return sent is not None and unit < sent.unit


def _named(state: IcebergState) -> set[str]:
    """Every list, manifest and live file of every snapshot that the table retains, on any ref or on none."""
    named: set[str] = set()
    seen: set[str] = set()
    for snapshot in state.metadata.snapshots:
        named.add(snapshot.manifest_list)
        for manifest in read_manifests(state.files, snapshot):
            if manifest.manifest_path in seen:
                continue
            seen.add(manifest.manifest_path)
            with answering("the destination's storage"):
                named.update(entry.data_file.file_path for entry in state.files.entries(manifest))
    return named | seen
