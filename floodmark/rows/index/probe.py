"""Which rows may have a value: hashes looked up in sections. The answers are hints that the caller verifies.

One hash: each section's filter is asked in memory, and of the sections that may hold it a block is read, seldom two.
Many hashes: they are sorted, and every block that may hold one is read once, in order, some blocks at a time. A
candidate's file may not be live, its row deleted, its value another one with the same hash; but a row of a covered file
that has the value is always among the candidates. Damage is raised as `Corrupt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from floodmark.rows.arrays import Numbers
from floodmark.rows.index.entries import Entries, Places, hash_order, stable_order
from floodmark.rows.index.filter import mask_of, may_hold, word_of
from floodmark.rows.index.hashing import ValueHashes
from floodmark.rows.index.segment import Section
from floodmark.rows.mixing import Hashes, places

# So many blocks stay in the processor's cache while they are searched.
_BLOCKS_AT_ONCE = 32
# Where a read is a round trip, so many are under way at once. Locally threads cost more than they save.
_AHEAD = 4


@dataclass(frozen=True)
class Candidates:
    """Rows that may have one of the values; by value, section, file and position if they come from `probe`."""

    values: Numbers  # which of the values that were asked for
    sections: npt.NDArray[np.int32]  # which of the sections
    files: Places  # the file's number in that section
    positions: Places
    fingerprints: Hashes | None = None

    def __len__(self) -> int:
        return len(self.values)


def probe(sections: Sequence[Section], hashes: ValueHashes, *, fingerprints: bool = False) -> Candidates:
    """All candidates of some values in some sections of one index; with fingerprints if it has some."""
    fingerprints = fingerprints and all(section.form.fingerprints for section in sections)
    found: list[Candidates] = []
    if len(hashes) == 1:
        high = int(hashes.high[0])
        mask = mask_of(high)
        for number, section in enumerate(sections):
            words = section.words
            if not words or words[word_of(high, len(words))] & mask == mask:
                found += _probe_one(number, section, hashes, fingerprints)
        return found[0] if len(found) == 1 else _joined(found, fingerprints)
    for number, section in enumerate(sections):
        found += probe_section(number, section, hashes, fingerprints=fingerprints)
    joined = _joined(found, fingerprints)
    # Of one value the candidates are in order already: by section, file and position.
    return _chosen(joined, stable_order(joined.values, len(hashes)))


def probe_section(
    number: int, section: Section, hashes: ValueHashes, *, fingerprints: bool = False
) -> Iterator[Candidates]:
    """The candidates in one section, some blocks at a time: a value that many rows have is never in memory whole."""
    asked = np.arange(len(hashes), dtype=np.int64)
    high = hashes.high
    if len(section.words):
        asked = np.flatnonzero(may_hold(section.filter, high))
        high = high[asked]
    if not section.blocks or not len(asked):
        return
    order = hash_order(high)
    if (high[order][1:] < high[order][:-1]).any():
        order = np.argsort(high)
    asked, high = asked[order], high[order]
    low = None if hashes.low is None else hashes.low[asked]
    lasts = section.firsts.searchsorted(high, "right") - 1
    firsts = np.maximum(lasts, 0)
    # Entries with the hash of a fence may end the block before it.
    fence = np.flatnonzero(section.firsts[firsts] == high)
    firsts[fence] = np.maximum(section.firsts.searchsorted(high[fence], "left") - 1, 0)
    wanted = _blocks(firsts, lasts, section.blocks)
    for blocks, entries in _read_ahead(section, wanted.tolist(), fingerprints):
        part = slice(int(lasts.searchsorted(blocks[0])), int(firsts.searchsorted(blocks[-1], "right")))
        values, at = _search(entries, high[part], None if low is None else low[part])
        yield _candidates(asked[part][values], number, entries, at)


def _probe_one(number: int, section: Section, hashes: ValueHashes, fingerprints: bool) -> Iterator[Candidates]:
    """The same for one value, without what only many need."""
    if not section.blocks:
        return
    last = int(section.firsts.searchsorted(hashes.high, "right")[0]) - 1
    first = max(last, 0)
    if section.firsts[first] == hashes.high[0]:
        first = max(int(section.firsts.searchsorted(hashes.high)[0]) - 1, 0)
    for start in range(first, last + 1, _BLOCKS_AT_ONCE):
        blocks = range(start, min(start + _BLOCKS_AT_ONCE, last + 1))
        entries = section.read(blocks, fingerprints=fingerprints)
        begin = int(entries.high.searchsorted(hashes.high)[0])
        if begin < len(entries) and entries.high[begin] == hashes.high[0]:
            end = int(entries.high.searchsorted(hashes.high, "right")[0])
            at: Numbers = np.arange(begin, end)
            if entries.low is not None and hashes.low is not None:
                at = at[entries.low[begin:end] == hashes.low[0]]
            yield _candidates(np.zeros(len(at), np.int64), number, entries, at)


def _read_ahead(section: Section, wanted: list[int], fingerprints: bool) -> Iterator[tuple[list[int], Entries]]:
    """The entries of these blocks, some blocks at a time; from object storage the next ones are on their way."""
    pieces = [wanted[start : start + _BLOCKS_AT_ONCE] for start in range(0, len(wanted), _BLOCKS_AT_ONCE)]
    if len(pieces) < 2 or not section.is_remote:
        yield from ((blocks, section.read(blocks, fingerprints=fingerprints)) for blocks in pieces)
        return
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="floodmark-probe") as pool:
        reading = [pool.submit(section.read, blocks, fingerprints=fingerprints) for blocks in pieces[:_AHEAD]]
        for number, blocks in enumerate(pieces):
            entries = reading.pop(0).result()
            if number + _AHEAD < len(pieces):
                reading.append(pool.submit(section.read, pieces[number + _AHEAD], fingerprints=fingerprints))
            yield blocks, entries


def _blocks(firsts: Numbers, lasts: Numbers, blocks: int) -> Numbers:
    """All blocks from the first to the last one of any hash; a hash before all entries has none."""
    some = lasts >= firsts
    steps = np.bincount(firsts[some], minlength=blocks + 1) - np.bincount(lasts[some] + 1, minlength=blocks + 1)
    return np.flatnonzero(np.cumsum(steps[:-1]))


def _search(entries: Entries, high: Hashes, low: Hashes | None) -> tuple[Numbers, Numbers]:
    """Which of these ascending hashes equal the hash of an entry, and of which one, for each pair."""
    starts = entries.high.searchsorted(high)
    last = len(entries) - 1
    hit = np.flatnonzero(entries.high[np.minimum(starts, last)] == high)
    starts = starts[hit]
    counts = np.ones(len(hit), np.int64)
    # Seldom has a hash more than one entry.
    several = np.flatnonzero(entries.high[np.minimum(starts + 1, last)] == high[hit])
    counts[several] = entries.high.searchsorted(high[hit[several]], "right") - starts[several]
    values = np.repeat(hit, counts)
    at = places(counts) + np.repeat(starts, counts)
    if entries.low is not None and low is not None:
        same = entries.low[at] == low[values]
        values, at = values[same], at[same]
    return values, at


def _candidates(values: Numbers, number: int, entries: Entries, at: Numbers) -> Candidates:
    sections = np.full(len(values), number, np.int32)
    fingerprints = None if entries.fingerprints is None else entries.fingerprints[at]
    return Candidates(values, sections, entries.files[at], entries.positions[at], fingerprints)


def _chosen(found: Candidates, order: Numbers) -> Candidates:
    fingerprints = None if found.fingerprints is None else found.fingerprints[order]
    return Candidates(
        found.values[order], found.sections[order], found.files[order], found.positions[order], fingerprints
    )


def _joined(parts: Sequence[Candidates], fingerprints: bool) -> Candidates:
    kept = [part.fingerprints for part in parts if part.fingerprints is not None]
    return Candidates(
        np.concatenate([np.empty(0, np.int64), *(part.values for part in parts)]),
        np.concatenate([np.empty(0, np.int32), *(part.sections for part in parts)]),
        np.concatenate([np.empty(0, np.uint32), *(part.files for part in parts)]),
        np.concatenate([np.empty(0, np.uint32), *(part.positions for part in parts)]),
        np.concatenate([np.empty(0, np.uint64), *kept]) if fingerprints else None,
    )
