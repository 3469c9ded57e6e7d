"""Ranges of a file in few requests: every byte that is wanted, little that is not."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from floodmark.storage.streams import _GAP_BYTES_MAX, _MERGED_BYTES_MAX, merged


@pytest.mark.parametrize(
    ("ranges", "found"),
    [
        ([], []),
        ([(5, 0)], []),
        ([(5, 3)], [(5, 3)]),
        ([(8, 2), (5, 3)], [(5, 5)]),
        ([(5, 3), (5, 10), (6, 1)], [(5, 10)]),
        ([(0, 10), (10 + _GAP_BYTES_MAX, 5)], [(0, 15 + _GAP_BYTES_MAX)]),
        ([(0, 10), (11 + _GAP_BYTES_MAX, 5)], [(0, 10), (11 + _GAP_BYTES_MAX, 5)]),
        # Close to a large one, but not touching it.
        ([(0, _MERGED_BYTES_MAX), (_MERGED_BYTES_MAX + 1, 5)], [(0, _MERGED_BYTES_MAX), (_MERGED_BYTES_MAX + 1, 5)]),
        ([(0, _MERGED_BYTES_MAX), (_MERGED_BYTES_MAX, 5)], [(0, _MERGED_BYTES_MAX + 5)]),
    ],
)
def test_ranges_that_touch_or_are_close_together_are_one(
    ranges: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    assert merged(ranges) == found


def test_every_wanted_byte_is_in_exactly_one_range() -> None:
    chance = random.Random(3)
    for _ in range(200):
        wanted = [(chance.randrange(40_000_000), chance.randrange(2_000_000)) for _ in range(chance.randrange(30))]
        found = merged(wanted)
        assert found == sorted(found)
        for (start, length), (following, _) in pairwise(found):
            assert start + length < following
        for start, length in wanted:
            assert not length or any(at <= start and start + length <= at + size for at, size in found)
        assert {at for at, _ in found} <= {at for at, _ in wanted}
