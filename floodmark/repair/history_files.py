"""The files of every readable version: do they exist, with the recorded sizes?

Another engine's clean-up, or a person, may delete files that only the lake's history names. Nothing notices that until
a reader opens the version, so this checks a sample of states and files, or all of them. Versions that cannot be read
any more are named. They can be given up, which only marks them as expired; no file is deleted here. Checking writes
nothing (I17). A sweep may delete files of a state that expired meanwhile: a missing file counts only if its state can
still be read afterwards. Giving up is one transaction: a crash leaves all of it or none.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from floodmark.commit.catalog import Catalog
from floodmark.commit.expiry import Readable
from floodmark.errors import Corrupt, NotFound, Unavailable
from floodmark.json_form import Json
from floodmark.model import BEGINNING, Head

if TYPE_CHECKING:
    from pyiceberg.manifest import ManifestFile

T = TypeVar("T")

# The sample size without `deep`: older states of each table, and files that they name.
STATES_SAMPLED = 32
FILES_SAMPLED = 256


@dataclass(frozen=True)
class FileFault:
    """A file that a state of a table needs, and what is wrong with it. `head`: a branch has this state as its head."""

    table: str
    table_id: str
    version: int
    location: str
    problem: str
    head: bool = False

    def __str__(self) -> str:
        return f"{self.location} ({self.problem})"


@dataclass(frozen=True)
class HistoryCheck:
    """The findings. `versions` are those that cannot be read completely any more, oldest first."""

    states: int = 0
    states_looked: int = 0
    files_looked: int = 0
    faults: tuple[FileFault, ...] = field(default=(), repr=False)
    versions: tuple[int, ...] = ()

    @property
    def gone_from_heads(self) -> tuple[FileFault, ...]:
        return tuple(fault for fault in self.faults if fault.head)


@dataclass(frozen=True)
class GivenUp:
    """outcome: nothing_to_do, planned or given_up. `held` cannot be given up: a branch, a pin or a run needs them."""

    outcome: str
    versions: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Json]:
        return {
            "outcome": self.outcome,
            "versions": list(self.versions),
            "held": list(self.held),
            "faults": list(self.faults),
        }


def look_at_history(
    catalog: Catalog,
    table: str | None = None,
    *,
    deep: bool = False,
    states_max: int = STATES_SAMPLED,
    files_max: int = FILES_SAMPLED,
) -> HistoryCheck:
    """The files of the readable versions; of one table, or of all. `deep`: every one of them."""
    found = catalog.expiry.readable(table)
    faults: list[FileFault] = []
    looked = files = 0
    for one in found:
        states = one.states if deep else _sample(one.states, states_max)
        wanted = _WantedFiles(catalog, one)
        wanted.collect(states)
        locations = list(wanted.sizes) if deep else _sample(list(wanted.sizes), files_max)
        wanted.check(locations, _listed(catalog, one) if deep else {})
        faults += wanted.faults()
        looked, files = looked + len(states), files + len(locations)
    if faults:
        # Expired since, so a sweep may have deleted its files.
        found = catalog.expiry.readable(table)
        alive = {(one.table_id, state.version) for one in found for state in one.states}
        faults = [fault for fault in faults if (fault.table_id, fault.version) in alive]
    broken: dict[str, set[int]] = {}
    for fault in faults:
        broken.setdefault(fault.table_id, set()).add(fault.version)
    versions = {version for one in found for version in one.versions(broken.get(one.table_id, ()))}
    return HistoryCheck(sum(len(one.states) for one in found), looked, files, tuple(faults), tuple(sorted(versions)))


def look_at_head(catalog: Catalog, head: Head) -> list[FileFault]:
    """Every file of the head of a branch."""
    wanted = _WantedFiles(catalog, Readable(head.table_id, head.table, (head,), frozenset({head.version})))
    wanted.collect([head])
    wanted.check(list(wanted.sizes), {})
    return list(wanted.faults())


def give_up(catalog: Catalog, actor: str, *, apply: bool) -> GivenUp:
    """Give up every version that cannot be read: a deep check, and with `apply` they expire, with an audit row."""
    looked = look_at_history(catalog, deep=True)
    if not looked.versions:
        return GivenUp("nothing_to_do")
    faults = tuple(dict.fromkeys(f"{fault.table}: {fault}" for fault in looked.faults))
    if not apply:
        free = catalog.expiry.unheld(looked.versions)
        return GivenUp("planned", tuple(free), _without(looked.versions, free), faults)
    detail = f"version(s) {versions_text(looked.versions)} cannot be read: {faults[0]} (asked by {actor})"
    gone = catalog.expiry.give_up(looked.versions, detail)
    outcome = "given_up" if gone else "nothing_to_do"
    return GivenUp(outcome, tuple(gone), _without(looked.versions, gone), faults)


def _without(versions: Iterable[int], others: Iterable[int]) -> tuple[int, ...]:
    gone = set(others)
    return tuple(version for version in versions if version not in gone)


def versions_text(versions: Sequence[int]) -> str:
    """3, 5-9"""
    runs: list[list[int]] = []
    for version in sorted(versions):
        if runs and version == runs[-1][1] + 1:
            runs[-1][1] = version
        else:
            runs.append([version, version])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _sample(of: Sequence[T], most: int) -> list[T]:
    """The first and the last, and some between them, in their order."""
    if len(of) <= most:
        return list(of)
    chosen = {0, len(of) - 1, *random.sample(range(1, len(of) - 1), max(most - 2, 0))}
    return [of[place] for place in sorted(chosen)]


def _listed(catalog: Catalog, table: Readable) -> Mapping[str, int]:
    """The sizes of all files below a table's folder, in few requests; files elsewhere are checked one by one."""
    for state in reversed(table.states):
        try:
            folder = catalog.files.metadata(state.metadata_location).location
        except Corrupt:
            continue
        return {entry.location: entry.size_bytes for entry in catalog.storage.list(folder)}
    return {}


class _WantedFiles:
    """What some states of one table need: each file once, with its size if known, and the states that need it."""

    def __init__(self, catalog: Catalog, table: Readable) -> None:
        self._catalog = catalog
        self._table = table
        self.sizes: dict[str, int | None] = {}
        self._needed_by: dict[str, list[Head]] = {}
        self._problems: dict[str, str] = {}

    def collect(self, states: Sequence[Head]) -> None:
        """Every file that these states name. A file that cannot be opened is a fault of its own."""
        files = self._catalog.files
        manifests: dict[str, tuple[ManifestFile, list[Head]]] = {}
        for state in states:
            self._want(state.metadata_location, None, [state])
            with self._opening(state.metadata_location):
                files.metadata(state.metadata_location)
            if state.manifest_list is None:
                continue
            self._want(state.manifest_list, None, [state])
            with self._opening(state.manifest_list):
                for one in files.manifests(state.manifest_list):
                    manifests.setdefault(one.manifest_path, (one, []))[1].append(state)
        for path, (manifest, needed_by) in manifests.items():
            self._want(path, manifest.manifest_length, needed_by)
            with self._opening(path):
                for entry in files.entries(manifest):
                    self._want(entry.data_file.file_path, entry.data_file.file_size_in_bytes, needed_by)
        for head in (state for state in states if state.version in self._table.heads):
            for file in self._catalog.history.deletions(head, BEGINNING, head.sequence):
                self._want(file.location, file.size_bytes, [head])

    def check(self, locations: Sequence[str], listed: Mapping[str, int]) -> None:
        """Compare with storage; `listed` are sizes that are known already."""
        for location in locations:
            expected, size_bytes = self.sizes[location], listed.get(location)
            try:
                if size_bytes is None:
                    size_bytes = self._catalog.storage.size(location)
            except NotFound:
                self._problems[location] = "missing"
                continue
            if expected is not None and size_bytes != expected:
                self._problems[location] = f"{size_bytes} bytes instead of {expected}"

    def faults(self) -> Iterator[FileFault]:
        for location, problem in self._problems.items():
            for state in self._needed_by[location]:
                head = state.version in self._table.heads
                yield FileFault(state.table, state.table_id, state.version, location, problem, head)

    def _want(self, location: str, size_bytes: int | None, needed_by: Sequence[Head]) -> None:
        self.sizes.setdefault(location, size_bytes)
        self._needed_by.setdefault(location, []).extend(needed_by)

    @contextmanager
    def _opening(self, location: str) -> Iterator[None]:
        try:
            yield
        except Unavailable:
            raise
        except (NotFound, FileNotFoundError):
            self._problems[location] = "missing"
        except Exception as error:  # noqa: BLE001 - a decoder raises whatever damaged bytes lead it into
            said = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
            self._problems[location] = f"cannot be understood: {said}"
