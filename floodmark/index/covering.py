"""Which data files of a state the segments of an index cover, and which of their rows may have a value.

A segment that cannot be opened or read covers nothing: if the catalog still records it, it is marked as broken, and
maintenance makes it anew; if a fold and a sweep removed it meanwhile, the newer segments are used. What a later
Floodmark wrote covers nothing either. So damage, lag and clean-up cost time, never an answer (I11): files that are not
covered are for the caller to scan.

Open segments are shared by all threads of the process. A large local one holds a file descriptor, a small one its
bytes; both are bounded (I14).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from cachetools import LRUCache

from floodmark import log
from floodmark.catalog.indexes import KEY, IndexRow, SegmentRow
from floodmark.commit.catalog import Catalog
from floodmark.errors import Corrupt, NotFound
from floodmark.rows.arrays import Numbers
from floodmark.rows.index.hashing import ENCODERS, Secret, ValueHashes
from floodmark.rows.index.probe import probe
from floodmark.rows.index.segment import IndexForm, NotCovered, Section, open_segment, open_whole
from floodmark.rows.mixing import Hashes
from floodmark.storage import Storage

T = TypeVar("T")

# Segments whose tails are in memory, by their bytes; of those with an open file so many.
REMEMBERED_BYTES_MAX = 96 * 1024 * 1024
OPEN_FILES_MAX = 200
# A segment of so many bytes is read whole: its tail is most of it.
WHOLE_BYTES_MAX = 64 * 1024
# States whose coverage is remembered.
STATES_MAX = 64
# Segments may be damaged, or folded away, while they are used: so often they are asked for anew.
TRIES_MAX = 8
_OBJECT_BYTES = 2_000


@lru_cache(maxsize=1024)
def form_of(index: IndexRow) -> IndexForm | None:
    """How the segments of an index are made; None if a later Floodmark made the index."""
    encoder = ENCODERS.get(index.encoder)
    if encoder is None:
        return None
    return IndexForm(index.id, Secret(index.secret), index.wide, index.kind == KEY, encoder)


@dataclass(frozen=True)
class Covering:
    """The sections that cover some files: `places` has for each file number of a section its place in the files.

    -1: another section covers it, or it is not among them. `uncovered` are places of files that no section covers.
    """

    sections: tuple[Section, ...]
    places: tuple[Numbers, ...]
    uncovered: tuple[int, ...]


@dataclass(frozen=True)
class IndexHits:
    """Rows that may have one of the values: `values` says which one, `files` the place of its file among those asked.

    `uncovered` are the places of files that may hold more.
    """

    values: Numbers
    files: Numbers
    positions: Numbers
    uncovered: tuple[int, ...]
    segments: int = 0
    fingerprints: Hashes | None = None

    def __len__(self) -> int:
        return len(self.values)


class _OpenSegments:
    """Sections that were opened, by segment and index."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[tuple[str, str], Section | NotCovered] = LRUCache(REMEMBERED_BYTES_MAX, getsizeof=_size_of)
        self._files: LRUCache[tuple[str, str], Section] = LRUCache(OPEN_FILES_MAX)

    def section(self, storage: Storage, row: SegmentRow, form: IndexForm) -> Section | NotCovered:
        key = (row.location, row.index_id)
        with self._lock:
            found = self._kept.get(key, self._files.get(key))
        if found is None:
            found = _open(storage, row, form)
            with self._lock:
                if isinstance(found, Section) and row.size_bytes > WHOLE_BYTES_MAX:
                    # Its file is closed with the last section that reads it.
                    self._files[key] = found
                else:
                    self._kept[key] = found
        return found

    def forget(self, location: str) -> None:
        with self._lock:
            for kept in (self._kept, self._files):
                for key in [key for key in kept if key[0] == location]:
                    kept.pop(key, None)


def _size_of(one: Section | NotCovered) -> int:
    return _OBJECT_BYTES + (one.tail_bytes if isinstance(one, Section) else 0)


def _open(storage: Storage, row: SegmentRow, form: IndexForm) -> Section | NotCovered:
    if row.size_bytes <= WHOLE_BYTES_MAX:
        opened = open_whole(row.location, storage.read(row.location), row.size_bytes, row.digest)
    else:
        opened = open_segment(
            storage, row.location, size_bytes=row.size_bytes, tail_bytes=row.tail_bytes, digest=row.digest
        )
    return opened if isinstance(opened, NotCovered) else opened.section(form)


_OPEN = _OpenSegments()


class Coverings:
    """The segments of one lake, and what they say of the files of its tables."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        # By index and the count of its changes: its segments. By these and a state: what they cover of it.
        self._rows: LRUCache[tuple[str, int], list[SegmentRow]] = LRUCache(STATES_MAX)
        self._states: LRUCache[tuple[str, int, str], Covering] = LRUCache(STATES_MAX)
        # What a read-only lake found to be damaged.
        self._broken: set[str] = set()

    def find(
        self,
        index: IndexRow,
        paths: Sequence[str],
        hashes: ValueHashes,
        *,
        state: str | None = None,
        fingerprints: bool = False,
    ) -> IndexHits:
        """Which rows of these data files may have one of these values. `state` names the files of a table's state."""

        def look(covering: Covering) -> IndexHits:
            some = covering.sections
            candidates = probe(some, hashes, fingerprints=fingerprints)
            at = np.full(len(candidates), -1, np.int64)
            for number, places in enumerate(covering.places):
                mine = np.flatnonzero(candidates.sections == number) if len(some) > 1 else slice(None)
                at[mine] = places[candidates.files[mine]]
            live = at >= 0
            marks = None if candidates.fingerprints is None else candidates.fingerprints[live]
            positions: Numbers = candidates.positions[live].astype(np.int64)
            return IndexHits(candidates.values[live], at[live], positions, covering.uncovered, len(some), marks)

        return self.use(index, paths, look, state=state)

    def use(
        self, index: IndexRow, paths: Sequence[str], work: Callable[[Covering], T], *, state: str | None = None
    ) -> T:
        """The result of `work` with the index's sections; again without those that turn out to be damaged or gone."""
        for _ in range(TRIES_MAX):
            opened: set[str] = set()
            try:
                covering = self._covering(index, paths, state, opened)
                opened.update(one.location for one in covering.sections)
                return work(covering)
            except (Corrupt, NotFound, FileNotFoundError) as error:
                location = _damaged_file(error)
                if location not in opened:
                    raise
                index = self._give_up(index, location, error)
        return work(Covering((), (), tuple(range(len(paths)))))

    def covered(self, index: IndexRow, paths: Sequence[str]) -> int:
        """How many of these files the index covers."""
        return len(paths) - len(self.use(index, paths, lambda covering: covering).uncovered)

    def open_sections(self, index: IndexRow, rows: Iterable[SegmentRow]) -> dict[str, Section]:
        """The index's sections in these segments, by location, without those that are damaged or say nothing of it."""
        form = form_of(index)
        found: dict[str, Section] = {}
        for row in rows:
            if form is None:
                break
            try:
                section = _OPEN.section(self._catalog.storage, row, form)
            except (Corrupt, NotFound, FileNotFoundError) as error:
                self._give_up(index, row.location, error)
                continue
            if isinstance(section, Section):
                found[row.location] = section
        return found

    def mark_damaged(self, index: IndexRow, locations: Container[str], error: Exception) -> bool:
        """Do without the segment that an error names; False if it names none of these."""
        location = _damaged_file(error)
        if location not in locations:
            return False
        self._give_up(index, location, error)
        return True

    # ── inside ──

    def _covering(self, index: IndexRow, paths: Sequence[str], state: str | None, opened: set[str]) -> Covering:
        key = None if state is None else (index.id, index.changes, state)
        if key is not None and (known := self._states.get(key)) is not None:
            return known
        form = form_of(index)
        sections = self._sections(index, form, opened) if form is not None and paths else ()
        found = cover(sections, {path: place for place, path in enumerate(paths)})
        if key is not None:
            with self._lock:
                self._states[key] = found
        return found

    def _sections(self, index: IndexRow, form: IndexForm, opened: set[str]) -> Iterator[Section]:
        """Opened as they are asked for: retired ones come last, and are needed for old versions only."""
        for row in self._segments(index):
            if row.location in self._broken:
                continue
            opened.add(row.location)
            try:
                section = _OPEN.section(self._catalog.storage, row, form)
            except (NotFound, FileNotFoundError) as error:
                raise NotFound("a segment of an index is gone", file=row.location) from error
            if isinstance(section, Section):
                yield section

    def _segments(self, index: IndexRow) -> list[SegmentRow]:
        key = (index.id, index.changes)
        found = self._rows.get(key)
        if found is None:
            found = self._catalog.indexes.usable_segments(index.id)
            with self._lock:
                self._rows[key] = found
        return found

    def _give_up(self, index: IndexRow, location: str, error: Exception) -> IndexRow:
        """Do without a segment from now on. Returns the index as the catalog has it now."""
        _OPEN.forget(location)
        indexes = self._catalog.indexes
        if indexes.is_recorded(location):
            log.get().warning("a segment of an index is not usable", file=location, cause=str(error))
            self._broken.add(location)
            if not self._catalog.database.read_only:
                indexes.mark_broken(location)
        with self._lock:
            self._states.clear()
            self._rows.clear()
        return next((one for one in indexes.of_table(index.table_id) if one.id == index.id), index)


def _damaged_file(error: Exception) -> str:
    """The file that an error is about. An object store reports at a read, by `location`, that an open one is gone."""
    facts = getattr(error, "facts", {})
    return str(facts.get("file") or facts.get("location", ""))


def cover(sections: Iterable[Section], paths: Mapping[str, int]) -> Covering:
    """Which of the files, by their places, each section covers; a file that several cover is the first one's."""
    left = dict(paths)
    used: list[Section] = []
    places: list[Numbers] = []
    for section in sections if left else ():
        here: Numbers = np.array([left.pop(file.path, -1) for file in section.files], np.int64)
        if (here >= 0).any():
            used.append(section)
            places.append(here)
        if not left:
            break
    return Covering(tuple(used), tuple(places), tuple(sorted(left.values())))
