"""Sweep: delete files that nothing can ever refer to again, by state and never by age alone (I10).

Four kinds are found without listing the lake: files that only dead states of a table name (table_states.py), deletions
files below every consumer, segments that indexes do not need any more (sweep_segments.py), files that executors wrote
for an operation that had ended. `deep` lists everything instead.

Why two neighbours are enough to know what a dead state shares with others, in a table that only main wrote: a file is
added by one commit, and once removed is never added again. So the states that name it are consecutive; if any kept
state names it, one of the two kept states nearest to the dead one does. For a tangled table (branches wrote to it, a
repair accepted another engine's state, or it was dropped and restored) none of this holds, because states form a tree
and a file may be added again: there every kept state is read.

Only files in the folder of an operation of this lake are ever deleted. Files of an adopted table stay.
Order: data files, then manifests, lists, metadata, then the catalog's rows. Crash anywhere: the rows still record what
is to be done; if some of the metadata is gone already, the data files that it named were deleted before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from floodmark.commit.catalog import Catalog
from floodmark.commit.journal import ABANDONED, PUBLISHED, Operation, all_files
from floodmark.commit.table_states import TableStates
from floodmark.errors import Conflict, Corrupt, NotFound
from floodmark.failpoints import hit
from floodmark.json_form import Json
from floodmark.maintenance.record import SWEEP
from floodmark.model import Head
from floodmark.runs import NOTHING_TO_DO, SWEPT, Progress, Report
from floodmark.storage import join, local_path

DATA, DELETIONS, MANIFEST, LIST, METADATA, LEFTOVER = "data", "deletions", "manifest", "list", "metadata", "leftover"
SEGMENT = "segment"
# Data before what names it.
_ORDER = (DATA, DELETIONS, MANIFEST, LIST, METADATA)
DELETES_AT_ONCE = 1000
PLANS_MAX = 10
# A file of ours: directly in the folder of the operation that wrote it.
_OPERATION_FILE = re.compile(r"/(?:data|metadata|operations)/([0-9A-HJKMNP-TV-Z]{26})/[^/]+$")


S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class Doomed:
    """A file to delete, and why. The size is None if no record has it."""

    location: str
    kind: str
    reason: str
    size_bytes: int | None = None

    def as_dict(self) -> dict[str, Json]:
        return {"file": self.location, "kind": self.kind, "bytes": self.size_bytes, "reason": self.reason}


@dataclass
class SweepPlan:
    """What a sweep of one table would delete: `versions` are the dead states that it settles. `foreign` files, which
    are older than the lake, stay.
    """

    table: TableStates
    doomed: list[Doomed] = field(default_factory=list)
    foreign: int = 0

    @property
    def versions(self) -> frozenset[int]:
        return self.table.settled

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.doomed)


@dataclass
class Swept:
    """What a sweep did."""

    files: int = 0
    size_bytes: int = 0
    states: int = 0
    leftovers: int = 0
    foreign: int = 0
    unknown: int = 0

    @property
    def outcome(self) -> str:
        return SWEPT if self.files or self.states or self.leftovers else NOTHING_TO_DO

    def as_dict(self) -> dict[str, Json]:
        return {
            "files": self.files + self.leftovers,
            "bytes": self.size_bytes,
            "states": self.states,
            "leftovers": self.leftovers,
            "foreign_files": self.foreign,
            "unknown_files": self.unknown,
        }


# ── plan ──


def plan_table(catalog: Catalog, table: str, table_id: str, grace_ms: int) -> SweepPlan | None:
    """The files of the table to delete; None if it has nothing to sweep."""

    def states() -> TableStates | None:
        found = catalog.expiry.states(grace_ms, table)
        return next((one for one in found if one.table_id == table_id), None)

    return _planned(states, lambda found: None if found is None else plan_sweep(catalog, found))


def _planned(look: Callable[[], S], plan: Callable[[S], T]) -> T:
    """Plan on the current state. If a file is missing because another sweep found its state dead, look again."""
    for _ in range(PLANS_MAX):
        found = look()
        try:
            return plan(found)
        except Corrupt:
            if look() == found:
                raise
    raise Conflict("other sweeps kept changing what this one planned on", advice="Run it again.")


def plan_sweep(catalog: Catalog, states: TableStates) -> SweepPlan:
    """The files that only dead states of the table name."""
    plan = SweepPlan(states)
    named: list[Doomed] = []
    for run, neighbours in _runs(states):
        reason = f"only expired versions name it ({run[0].version} to {run[-1].version})"
        # Skip what a kept manifest names as a whole, and a manifest that was read before.
        kept = {path for state in neighbours for path in _metadata_files(catalog, state)}
        seen = set(kept)
        doomed: dict[str, Doomed] = {}
        for state in run:
            for file in _named(catalog, state, reason, seen):
                if file.location not in kept:
                    doomed[file.location] = file
        if any(file.kind == DATA for file in doomed.values()):
            looked: set[str] = set()
            for state in neighbours:
                for location in _locations(catalog, state, looked):
                    doomed.pop(location, None)
        named += (file for file in doomed.values() if file.location != states.pointed)
    named += [
        Doomed(
            file.location,
            DELETIONS,
            f"deletions up to sequence {file.sequence} are below every reader",
            file.size_bytes,
        )
        for file in states.deletions
    ]
    # Files of an adopted table are not ours to delete: its old catalog, or another lake, may name them.
    owners = catalog.journal.states_of(sorted({_owner(file.location) for file in named} - {""}))
    ours = [file for file in named if owners.get(_owner(file.location)) == PUBLISHED]
    plan.foreign = len(named) - len(ours)
    # The size of a local file costs nothing; an object store needs a request for each.
    plan.doomed = list(with_sizes(catalog, ours)) if local_path(catalog.location) is not None else ours
    return plan


def _runs(states: TableStates) -> Iterator[tuple[list[Head], list[Head]]]:
    """Consecutive dead states, with the kept state before and the one after them.

    For a tangled table: all dead states at once, with all kept ones.
    """
    if states.tangled:
        dead = [state for state in states.states if state.version in states.dead]
        if dead:
            yield dead, [state for state in states.states if state.version not in states.dead]
        return
    run: list[Head] = []
    before: list[Head] = []
    for state in states.states:
        if state.version in states.dead:
            run.append(state)
            continue
        if run:
            yield run, [*before, state]
        run, before = [], [state]
    if run:
        yield run, before


def _metadata_files(catalog: Catalog, state: Head) -> set[str]:
    if not state.metadata_location:
        return set()
    try:
        return catalog.files.named_files([state])
    except (NotFound, FileNotFoundError) as error:
        raise _gone(state, error) from error


def _named(catalog: Catalog, state: Head, reason: str, seen: set[str]) -> Iterator[Doomed]:
    """Every file that a dead state names, except what an earlier sweep deleted; without manifests in `seen`."""
    if not state.metadata_location:
        return  # a tombstone: the table was dropped here
    yield Doomed(state.metadata_location, METADATA, reason)
    if state.manifest_list is None:
        return
    yield Doomed(state.manifest_list, LIST, reason)
    try:
        manifests = catalog.files.manifests(state.manifest_list)
    except (NotFound, FileNotFoundError):
        return  # an interrupted sweep had deleted it, after all that it named
    for manifest in manifests:
        if manifest.manifest_path in seen:
            continue
        seen.add(manifest.manifest_path)
        yield Doomed(manifest.manifest_path, MANIFEST, reason, manifest.manifest_length)
        try:
            entries = catalog.files.entries(manifest)
        except (NotFound, FileNotFoundError):
            continue
        for entry in entries:
            yield Doomed(entry.data_file.file_path, DATA, reason, entry.data_file.file_size_in_bytes)


def _locations(catalog: Catalog, state: Head, looked: set[str] | None = None) -> Iterator[str]:
    """Every file that a kept state names: all of it must exist. Manifests in `looked` are not opened."""
    looked = set() if looked is None else looked
    yield from _metadata_files(catalog, state)
    try:
        for manifest in catalog.files.manifests(state.manifest_list):
            if manifest.manifest_path not in looked:
                looked.add(manifest.manifest_path)
                yield from (entry.data_file.file_path for entry in catalog.files.entries(manifest))
    except (NotFound, FileNotFoundError) as error:
        raise _gone(state, error) from error


def keep_named(catalog: Catalog, states: TableStates, wanted: Mapping[str, Collection[str]]) -> set[str]:
    """Those of `wanted` (by any name: data files) of which a state that may still be read names a file."""
    left = {name: set(files) for name, files in wanted.items() if files}
    kept: set[str] = set()
    looked: set[str] = set()
    for state in states.states:
        if not left:
            break
        if state.version in states.dead or not state.metadata_location:
            continue
        named = set(_locations(catalog, state, looked))
        found = {name for name, files in left.items() if not named.isdisjoint(files)}
        kept |= found
        left = {name: files for name, files in left.items() if name not in found}
    return kept


def _gone(state: Head, error: Exception) -> Corrupt:
    return Corrupt(
        "a file of the table's history is gone, so nothing of this table is deleted",
        table=state.table,
        version=state.version,
        cause=error,
        advice="Run `floodmark doctor`; restore the file.",
    )


# ── effects ──


def sweep_table(catalog: Catalog, plan: SweepPlan, done: Swept, report: Report | None = None) -> None:
    """Delete what the plan names, then remove the rows of the states."""
    catalog.expiry.condemn(plan.table)
    # Crash here: nothing is deleted yet, and every later sweep knows that these states are not whole any more.
    hit("sweep.planned")
    for kind in _ORDER:
        files = [file for file in plan.doomed if file.kind == kind]
        for start in range(0, len(files), DELETES_AT_ONCE):
            part = files[start : start + DELETES_AT_ONCE]
            catalog.storage.delete_many([file.location for file in part])
            done.files += len(part)
            done.size_bytes += sum(file.size_bytes or 0 for file in part)
            if report is not None:
                report(Progress(done.files, len(plan.doomed), SWEEP, plan.table.head.table))
        if kind == DELETIONS:
            # Crash here: manifests that name deleted files, of states that no reader opens.
            hit("sweep.data_deleted")
    # Crash here: the catalog's rows name deleted files, of states that no reader opens; the next sweep finishes it.
    hit("sweep.metadata_deleted")
    catalog.expiry.mark_swept(plan.table, plan.versions)
    hit("sweep.marked")
    done.states += len(plan.versions)
    done.foreign += plan.foreign
    for folder in {file.location.rpartition("/")[0] for file in plan.doomed}:
        catalog.storage.drop_empty_folder(folder)


def plan_leftovers(catalog: Catalog, quiet_ms: int) -> list[tuple[Operation, list[Doomed]]]:
    """Operations that ended long enough ago for a last look, and what their executors wrote since."""
    found = []
    for operation in catalog.journal.to_look_at(quiet_ms):
        try:
            found.append((operation, _leftovers(catalog, operation)))
        except (NotFound, FileNotFoundError):
            # Another sweep has looked, and then swept the states of its commit.
            if any(one.id == operation.id for one in catalog.journal.to_look_at(quiet_ms)):
                raise
    return found


def _leftovers(catalog: Catalog, operation: Operation) -> list[Doomed]:
    named: set[str] = set()
    if operation.state == PUBLISHED:
        named = catalog.publisher.named_in_folders(operation, operation.version)
    reason = f"written for operation {operation.id} after it had ended ({operation.state})"
    return [
        Doomed(entry.location, LEFTOVER, reason, entry.size_bytes)
        for folder in operation.folders
        for entry in all_files(catalog.storage, folder)
        if entry.location not in named
    ]


def sweep_leftovers(catalog: Catalog, found: Sequence[tuple[Operation, list[Doomed]]], done: Swept) -> None:
    """The last look into the folders of ended operations: fenced or published, so what they do not name is deleted."""
    for operation, doomed in found:
        catalog.storage.delete_many([file.location for file in doomed])
        if operation.state == ABANDONED:
            catalog.journal.delete_files(operation)
        catalog.journal.mark_cleaned(operation.id)
        done.leftovers += len(doomed)
        done.size_bytes += sum(file.size_bytes or 0 for file in doomed)


# ── deep: list everything ──


def plan_deep(catalog: Catalog, grace_ms: int) -> tuple[list[Doomed], list[str]]:
    """Files below the lake that no record leads to, and files whose owner is unknown (kept).

    In this order: list, ask the journal, then read what is named. A file of an operation that had ended when the
    journal was asked is named by then or never: no commit can name a file from another operation's folder that is not
    live already.
    """
    listed = [entry for folder in _folders(catalog) for entry in all_files(catalog.storage, folder)]
    owners = {entry.location: _owner(entry.location) for entry in listed}
    states = catalog.journal.states_of(sorted(set(owners.values()) - {""}))
    named = _planned(lambda: catalog.expiry.all_states(grace_ms), lambda found: _everything_named(catalog, found))
    doomed, unknown = [], []
    for entry in listed:
        if entry.location in named:
            continue
        owner = owners[entry.location]
        state = states.get(owner)
        if state in (PUBLISHED, ABANDONED):
            reason = f"of operation {owner} ({state}), named by nothing"
            doomed.append(Doomed(entry.location, LEFTOVER, reason, entry.size_bytes))
        elif state is None:
            unknown.append(entry.location)
    return doomed, unknown


def sweep_deep(catalog: Catalog, doomed: Sequence[Doomed], done: Swept) -> None:
    for start in range(0, len(doomed), DELETES_AT_ONCE):
        part = doomed[start : start + DELETES_AT_ONCE]
        catalog.storage.delete_many([file.location for file in part])
        done.leftovers += len(part)
        done.size_bytes += sum(file.size_bytes or 0 for file in part)
    for folder in {file.location.rpartition("/")[0] for file in doomed}:
        catalog.storage.drop_empty_folder(folder)


def _owner(location: str) -> str:
    """The operation in whose folder a file is; empty if it is in no such folder."""
    found = _OPERATION_FILE.search(location)
    return "" if found is None else found[1]


def _folders(catalog: Catalog) -> list[str]:
    """The folders with files of the lake: its own folders, and tables that were adopted in place."""

    def adopted(heads: Sequence[Head]) -> list[str]:
        places = {catalog.files.metadata(head.metadata_location).location for head in heads}
        foreign = sorted(place for place in places if not place.startswith(catalog.location + "/"))
        return [join(place, part) for place in foreign for part in ("data", "metadata")]

    own = [join(catalog.location, "tables"), join(catalog.location, "operations")]
    return [*own, *_planned(catalog.history.heads, adopted)]


def _everything_named(catalog: Catalog, tables: Sequence[TableStates]) -> set[str]:
    """Every file that any state of any table names; dead states have a sweep of their own."""
    named = catalog.history.all_deletions() | catalog.indexes.all_locations()
    seen: set[str] = set()
    looked: set[str] = set()
    for table in tables:
        named.update(() if table.pointed is None else (table.pointed,))
        for state in table.states:
            if state.version in table.dead:
                # What an interrupted sweep has left of it is not lost: its rows still exist.
                named.update(file.location for file in _named(catalog, state, "", seen))
            else:
                named.update(_locations(catalog, state, looked))
    return named


def with_sizes(catalog: Catalog, doomed: Sequence[Doomed]) -> Iterator[Doomed]:
    """The same with every size, asked from storage where no record has it; files that are gone already are left out."""
    for file in doomed:
        try:
            known = file.size_bytes if file.size_bytes is not None else catalog.storage.size(file.location)
        except NotFound:
            continue
        yield replace(file, size_bytes=known)
