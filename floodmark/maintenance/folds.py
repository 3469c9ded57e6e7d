"""Which segments of an index are folded into one: pure planning, from the catalog's record of them alone.

Segments are in tiers by their entries, each eight times the one below. Once an index has more than sixteen, the lowest
tiers that have eight together are folded: so an entry is written again about once for each tier, and a lookup asks few
segments. A segment of the highest tier is never folded again, so that no fold is without bounds (I14).
"""

from __future__ import annotations

from collections.abc import Sequence

from floodmark.catalog.indexes import SegmentRow

TIER = 8
# More segments than this are due for a fold.
SEGMENTS_MAX = 16
# The lowest tier ends here.
ENTRIES_LOWEST = 8 * 1024
# What one fold writes at most; of segments that are larger than an eighth of it none is folded.
ENTRIES_MAX = 64 * 1024 * 1024
# That of floodmark/rows/index/segment.py, which loads what a status does not need.
FILES_MAX = 65_536
ENTRIES_FOLDED_MAX, FILES_FOLDED_MAX = ENTRIES_MAX // TIER, FILES_MAX // TIER
# Each takes a share of the memory of a fold.
FOLD_SEGMENTS_MAX = 64


def is_foldable(segment: SegmentRow) -> bool:
    return segment.entries <= ENTRIES_FOLDED_MAX and segment.files <= FILES_FOLDED_MAX


def tier_of(segment: SegmentRow) -> int:
    tier, end = 0, ENTRIES_LOWEST
    while segment.entries > end:
        tier, end = tier + 1, end * TIER
    return tier


def next_fold(segments: Sequence[SegmentRow]) -> list[SegmentRow]:
    """The segments in use that are folded next, in the order in which they were made; empty if none is due."""
    small = sorted(filter(is_foldable, segments), key=lambda one: (one.entries, one.location))
    if len(small) <= SEGMENTS_MAX:
        return []
    highest = tier_of(small[TIER - 1])
    chosen: list[SegmentRow] = []
    for one in small[:FOLD_SEGMENTS_MAX]:
        entries, files = (sum(getattr(each, name) for each in (*chosen, one)) for name in ("entries", "files"))
        if tier_of(one) > highest or entries > ENTRIES_MAX or files > FILES_MAX:
            break
        chosen.append(one)
    return sorted(chosen, key=lambda one: one.location)
