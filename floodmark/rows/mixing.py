"""Hashes of many values at once, by numpy over Arrow's buffers: what checksums and fingerprints of rows are made of.

Fast, and good against faults. Not against somebody who searches for collisions, unless the step between words is a
secret; keys have a hash of their own for that (`floodmark.rows.index.siphash`).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from floodmark.rows.arrays import Mask, Numbers

Hashes = npt.NDArray[np.uint64]

BITS = 2**64 - 1
WORD_BYTES = 8
# An odd number without a pattern: the step between salts and places.
STEP = 0x9E3779B97F4A7C15
# Longer values are digested one by one: for them that is quicker.
_LENGTH_MAX = 1024
# So many values are worth a round of their own.
_MANY = 256
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# TAILS[n] keeps the first n bytes of a word.
TAILS = np.array([(1 << 8 * size) - 1 for size in range(WORD_BYTES + 1)], np.uint64)

if sys.byteorder != "little":
    raise ImportError("Floodmark reads Arrow's buffers in little-endian order only")


def mix(hashes: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the hash, and no two results are equal; in place."""
    shifted = np.right_shift(hashes, 30)
    np.bitwise_xor(hashes, shifted, out=hashes)
    np.multiply(hashes, _MIX_1, out=hashes)
    np.right_shift(hashes, 27, out=shifted)
    np.bitwise_xor(hashes, shifted, out=hashes)
    np.multiply(hashes, _MIX_2, out=hashes)
    np.right_shift(hashes, 31, out=shifted)
    return np.bitwise_xor(hashes, shifted, out=hashes)


@lru_cache(maxsize=4096)
def mixed(number: int) -> int:
    """The same of one number."""
    number &= BITS
    number = (number ^ number >> 30) * _MIX_1 & BITS
    number = (number ^ number >> 27) * _MIX_2 & BITS
    return number ^ number >> 31


def inner(salt: int, place: int) -> int:
    """The salt of the child at this place: a value counts as another one in another column."""
    return mixed(salt + (place + 1) * STEP)


def salted(hashes: Hashes, salt: int) -> Hashes:
    hashes += np.uint64(salt)
    return mix(hashes)


def bits(buffer: pa.Buffer, offset: int, size: int) -> Mask:
    packed = np.frombuffer(buffer, np.uint8)[offset // 8 : (offset + size + 7) // 8]
    return np.unpackbits(packed, bitorder="little")[offset % 8 : offset % 8 + size].view(np.bool_)


def words_of(data: npt.NDArray[np.uint8]) -> Hashes:
    """The word that begins at each byte; the last ones reach into zeros."""
    padded = np.zeros(len(data) + WORD_BYTES, np.uint8)
    padded[: len(data)] = data
    return np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))


def hash_bytes(data: npt.NDArray[np.uint8], starts: Numbers, lengths: Numbers, salt: int, step: int = STEP) -> Hashes:
    """The hashes of values that lie in `data`: by their words, each with its place, and their length."""
    words = words_of(data)
    hashes = lengths.astype(np.uint64)
    long = np.flatnonzero(lengths > _LENGTH_MAX) if lengths.max() > _LENGTH_MAX else lengths[:0]
    some = None if lengths.min() and not len(long) else np.flatnonzero((lengths > 0) & (lengths <= _LENGTH_MAX))
    _add_words(hashes, some, words, starts, lengths, step)
    key = b"" if step == STEP else step.to_bytes(WORD_BYTES, "little")
    for at, start, size in zip(long.tolist(), starts[long].tolist(), lengths[long].tolist(), strict=True):
        digest = blake2b(data[start : start + size].data, digest_size=WORD_BYTES, key=key).digest()
        hashes[at] = int.from_bytes(digest, "little")
    return salted(hashes, salt)


def _add_words(
    hashes: Hashes, some: Numbers | None, words: Hashes, starts: Numbers, lengths: Numbers, step: int
) -> None:
    """Add to some of the hashes, or all, those of their values' words.

    As long as many values are long enough, a word of each at a time; then all that is left of the few others.
    """
    place = 0
    while some is None or len(some) >= _MANY:
        behind, place = place * WORD_BYTES, place + 1
        left = (lengths if some is None else lengths[some]) - behind
        if some is None:
            hashes += _hash_words(words[starts + behind], left, np.uint64(place * step & BITS))
        else:
            hashes[some] += _hash_words(words[starts[some] + behind], left, np.uint64(place * step & BITS))
        more = left > WORD_BYTES
        if not more.all():
            some = np.flatnonzero(more) if some is None else some[more]
    if len(some):
        counts = -(-lengths[some] // WORD_BYTES) - place
        numbers = places(counts) + place
        behinds = numbers * WORD_BYTES
        owner = np.repeat(some, counts)
        salts = (numbers + 1).astype(np.uint64) * np.uint64(step)
        hashes[some] += sums(_hash_words(words[starts[owner] + behinds], lengths[owner] - behinds, salts), counts)


def _hash_words(words: Hashes, left: Numbers, salts: Hashes | np.uint64) -> Hashes:
    """The hashes of words at their places; `left` bytes of the value start with each word."""
    if left.min() < WORD_BYTES:
        words &= TAILS[np.minimum(left, WORD_BYTES)]
    words += salts
    return mix(words)


def places(counts: Numbers) -> Numbers:
    """0, 1, 2 … for each of these counts, one after the other."""
    ends = np.cumsum(counts)
    numbers: Numbers = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    numbers -= np.repeat(ends - counts, counts)
    return numbers


def sums(hashes: Hashes, counts: Numbers) -> Hashes:
    """The sum of each so many hashes, one after the other; none of them: 0."""
    totals = np.zeros(len(hashes) + 1, np.uint64)
    np.cumsum(hashes, out=totals[1:])
    ends = np.cumsum(counts)
    found: Hashes = totals[ends] - totals[ends - counts]
    return found
