"""Sections merged into one: what many small segments say in one large one, without the files that are not live.

The result is that of building anew from the rows of the files that stay, in their order: the same bytes. The sections
are read, and entries are returned, as streams, with a bounded number of entries in memory (I14), even if most rows have
the same value. A file that several sections cover is taken from the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from floodmark.rows.index.entries import Entries, joined, sort_entries
from floodmark.rows.index.segment import CoveredFile, IndexForm, Section, SectionPlan

# Entries of all sections that are in memory at once, about.
WINDOW_ENTRIES = 256 * 1024
_GONE = 2**32 - 1


def fold(
    form: IndexForm, sections: Sequence[Section], is_live: Callable[[str], bool], window: int = WINDOW_ENTRIES
) -> SectionPlan:
    """The section that says what these say of the files that are live: files in the order of the sections."""
    files: list[CoveredFile] = []
    taken: set[str] = set()
    numbers: list[npt.NDArray[np.uint32]] = []
    for section in sections:
        kept = [one.path not in taken and is_live(one.path) for one in section.files]
        places = len(files) + np.cumsum([0, *kept])[:-1]
        numbers.append(np.where(kept, places, _GONE).astype(np.uint32))
        files += [one for one, keep in zip(section.files, kept, strict=True) if keep]
        taken |= {one.path for one, keep in zip(section.files, kept, strict=True) if keep}
    return SectionPlan(form, files, _merged(sections, numbers, window))


def _nothing(form: IndexForm) -> Entries:
    words, places = np.empty(0, np.uint64), np.empty(0, np.uint32)
    return Entries(words, words if form.wide else None, places, places, words if form.fingerprints else None)


def _last(entries: Entries) -> tuple[np.uint64, np.uint64]:
    return entries.high[-1], np.uint64(0) if entries.low is None else entries.low[-1]


class _Stream:
    """The entries of one section that are left: `held` are loaded, at least one unless there are no more."""

    def __init__(self, section: Section, numbers: npt.NDArray[np.uint32], blocks: int) -> None:
        self._section = section
        self._numbers = numbers
        self._blocks = blocks
        self._next = 0
        self._all_stay = not (numbers == _GONE).any()
        self.held = self._read()

    @property
    def ended(self) -> bool:
        return self._next >= self._section.blocks

    def fill(self) -> None:
        while not len(self.held) and not self.ended:
            self.held = self._read()

    def take(self, count: int) -> Entries:
        found = self.held.take(slice(0, count))
        self.held = self.held.take(slice(count, None))
        return found

    def count_up_to(self, high: np.uint64, low: np.uint64, *, with_equal: bool) -> int:
        """How many held entries come before this hash, or have it."""
        start, end = (int(self.held.high.searchsorted(high, side)) for side in ("left", "right"))
        if self.held.low is not None:
            return start + int(self.held.low[start:end].searchsorted(low, "right" if with_equal else "left"))
        return end if with_equal else start

    def _read(self) -> Entries:
        end = min(self._section.blocks, self._next + self._blocks)
        blocks, self._next = range(self._next, end), end
        if not blocks:
            return _nothing(self._section.form)
        found = self._section.read(blocks, fingerprints=True)
        files = self._numbers[found.files]
        found = Entries(found.high, found.low, files, found.positions, found.fingerprints)
        return found if self._all_stay else found.take(files != _GONE)


def _merged(sections: Sequence[Section], numbers: Sequence[npt.NDArray[np.uint32]], window: int) -> Iterator[Entries]:
    """Each round returns what no entry that is not loaded can precede: up to the lowest of the last loaded ones.

    Entries with that hash come first in earlier sections, whose files have lower numbers, and later in others.
    """
    blocks = max(1, window // 1024 // max(1, len(sections)))
    streams = [_Stream(section, number, blocks) for section, number in zip(sections, numbers, strict=True)]
    while True:
        for stream in streams:
            stream.fill()
        streams = [stream for stream in streams if len(stream.held)]
        if not streams:
            return
        ends = [(_last(stream.held), at) for at, stream in enumerate(streams) if not stream.ended]
        if ends:
            (high, low), last = min(ends)
            parts = [
                stream.take(stream.count_up_to(high, low, with_equal=at <= last)) for at, stream in enumerate(streams)
            ]
        else:
            parts = [stream.take(len(stream.held)) for stream in streams]
        yield sort_entries(joined([part for part in parts if len(part)]))
