"""How many indexes and segments there are, from the catalog alone: what they cover needs the segments themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from floodmark.catalog.indexes import SegmentTotals
from floodmark.json_form import Reported


@dataclass(frozen=True)
class IndexTotals(Reported):
    """Indexes that writers and lookups use, and their segments: usable ones, with their bytes, and broken ones."""

    indexes: int
    segments: int
    broken: int
    bytes: int


def totals_of(found: SegmentTotals | None) -> IndexTotals:
    one = found or SegmentTotals()
    return IndexTotals(one.indexes, one.files, one.broken, one.size_bytes)


def sum_totals(found: Mapping[str, SegmentTotals], table_ids: Collection[str]) -> IndexTotals:
    """Of these tables together."""
    some = [one for table_id, one in found.items() if table_id in table_ids]
    return IndexTotals(
        sum(one.indexes for one in some),
        sum(one.files for one in some),
        sum(one.broken for one in some),
        sum(one.size_bytes for one in some),
    )
