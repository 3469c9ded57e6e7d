"""Which hashes a section certainly does not hold, kept in memory: most sections are not read for a key they lack.

A Bloom filter of one word for about five entries: the first 32 bits of a hash choose the word, its last 24 bits choose
four bits of it. One hash in a hundred that is not held passes. A large section has none: it would take much memory,
there are few such sections, and they probably hold the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from floodmark.rows.arrays import Mask
from floodmark.rows.mixing import Hashes

ENTRIES_MAX = 8 * 1024 * 1024
_ENTRIES_PER_WORD = 5
_SHIFTS = (0, 6, 12, 18)
# So many hashes stay in the processor's cache.
_BLOCK = 16 * 1024


def filter_words(count: int) -> int:
    """How many words the filter of so many entries has; 0: none."""
    return -(-count // _ENTRIES_PER_WORD) if count <= ENTRIES_MAX else 0


def make_filter(parts: Sequence[Hashes]) -> Hashes:
    """The filter of ascending hashes, by their first words."""
    words = np.zeros(filter_words(sum(map(len, parts))), np.uint64)
    blocks = (part[start : start + _BLOCK] for part in parts for start in range(0, len(part), _BLOCK))
    for part in blocks:
        places = _places(part, len(words))
        starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
        words[places[starts]] |= np.bitwise_or.reduceat(_masks(part), starts)
    return words


def may_hold(words: Hashes, high: Hashes) -> Mask:
    masks = _masks(high)
    found: Mask = words[_places(high, len(words))] & masks == masks
    return found


def mask_of(high: int) -> int:
    """The bits of one hash in its word, which is `word_of`: as numbers, a hundred filters are asked in microseconds."""
    return 1 << (high & 63) | 1 << (high >> 6 & 63) | 1 << (high >> 12 & 63) | 1 << (high >> 18 & 63)


def word_of(high: int, words: int) -> int:
    return (high >> 32) * words >> 32


def _places(high: Hashes, words: int) -> Hashes:
    return (high >> np.uint64(32)) * np.uint64(words) >> np.uint64(32)


def _masks(high: Hashes) -> Hashes:
    masks, bits = np.zeros_like(high), np.empty_like(high)
    for shift in _SHIFTS:
        np.right_shift(high, shift, out=bits)
        np.bitwise_and(bits, 63, out=bits)
        np.left_shift(np.uint64(1), bits, out=bits)
        np.bitwise_or(masks, bits, out=masks)
    return masks
