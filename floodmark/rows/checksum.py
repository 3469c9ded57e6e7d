"""A checksum of rows that does not depend on their order: the same multiset of rows, the same sum.

It proves that a rewrite kept its rows (I6): a value that changed, moved to another row or column, became null or is no
longer null, and a row that was lost or doubled, change it. Each row is hashed with all its columns; two sums of 64 bits
are taken over differently mixed row hashes. Only what a reader can see counts, not slices, batches, or values in the
buffers below a null. Floats count by their bits, maps by the order of their entries. It guards against faults, not
against an attacker who searches for collisions.

Numpy computes everything over Arrow's buffers, in blocks that stay in the processor's cache. A column of a type that no
table holds is a bug of the caller and a TypeError, never a sum that leaves it out.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from floodmark.rows.arrays import Mask, Numbers

Hashes = npt.NDArray[np.uint64]

_BLOCK_ROWS = 32 * 1024
_BLOCK_BYTES = 2 * 1024 * 1024
_WORD_BYTES = 8
# Longer values are digested one by one: for them that is quicker.
_LENGTH_MAX = 1024
# So many values are worth a round of their own.
_MANY = 256
_BITS = 2**64 - 1
# Odd numbers without a pattern: steps between salts and places, and what a null counts as.
_STEP = 0x9E3779B97F4A7C15
_NULL = 0xD1B54A32D192ED03
_SECOND = 0x8CB92BA72F3D8DD7
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROW_SALT = 0xA0761D6478BD642F
# _TAILS[n] keeps the first n bytes of a word.
_TAILS = np.array([(1 << 8 * size) - 1 for size in range(_WORD_BYTES + 1)], np.uint64)

if sys.byteorder != "little":
    raise ImportError("Floodmark reads Arrow's buffers in little-endian order only")


def row_hashes(batch: pa.RecordBatch, salt: int = _ROW_SALT) -> Hashes:
    """A hash of every row of a batch: the same values, the same hash. Another salt gives other hashes."""
    block = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * len(batch) // max(1, batch.nbytes)))
    parts = [
        _combine([column.slice(start, block) for column in batch.columns], salt, min(block, len(batch) - start))
        for start in range(0, len(batch), block)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


class RowChecksum:
    """The checksum of all rows added so far, in any order and in batches of any size."""

    __slots__ = ("_sums", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self._sums = (0, 0)

    def add(self, batch: pa.RecordBatch) -> None:
        block = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * len(batch) // max(1, batch.nbytes)))
        for start in range(0, len(batch), block):
            columns = [column.slice(start, block) for column in batch.columns]
            hashes = _combine(columns, _ROW_SALT, min(block, len(batch) - start))
            first = int(hashes.sum(dtype=np.uint64))
            hashes += np.uint64(_SECOND)
            second = int(_mix(hashes).sum(dtype=np.uint64))
            self._sums = ((self._sums[0] + first) & _BITS, (self._sums[1] + second) & _BITS)
        self.rows += len(batch)

    def __add__(self, other: RowChecksum) -> RowChecksum:
        """The checksum of the rows of both."""
        total = RowChecksum()
        total.rows = self.rows + other.rows
        total._sums = ((self._sums[0] + other._sums[0]) & _BITS, (self._sums[1] + other._sums[1]) & _BITS)
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowChecksum) and (self.rows, self._sums) == (other.rows, other._sums)

    __hash__ = None  # type: ignore[assignment]  # It changes with every row.

    def __repr__(self) -> str:
        return f"RowChecksum(rows={self.rows}, {self.hexdigest()})"

    def hexdigest(self) -> str:
        return f"{self._sums[0]:016x}{self._sums[1]:016x}"


def _mix(hashes: Hashes) -> Hashes:
    """Every bit of the result depends on every bit of the hash; in place."""
    shifted = np.right_shift(hashes, 30)
    np.bitwise_xor(hashes, shifted, out=hashes)
    np.multiply(hashes, _MIX_1, out=hashes)
    np.right_shift(hashes, 27, out=shifted)
    np.bitwise_xor(hashes, shifted, out=hashes)
    np.multiply(hashes, _MIX_2, out=hashes)
    np.right_shift(hashes, 31, out=shifted)
    return np.bitwise_xor(hashes, shifted, out=hashes)


@lru_cache(maxsize=4096)
def _mixed(number: int) -> int:
    return int(_mix(np.array([number & _BITS], np.uint64))[0])


def _inner(salt: int, place: int) -> int:
    """The salt of the child at this place: a value counts as another one in another column."""
    return _mixed(salt + (place + 1) * _STEP)


def _combine(columns: list[pa.Array], salt: int, rows: int) -> Hashes:
    """The hashes of rows, or structs, from those of their fields. The sum alone would not hold the fields together."""
    hashes = np.full(rows, salt, np.uint64)
    for place, column in enumerate(columns):
        hashes += _hash(column, _inner(salt, place))
    return _mix(hashes)


def _hash(array: pa.Array, salt: int) -> Hashes:
    """A hash for each value of the array; nulls have one of their own."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _hash(array.storage, salt)
    if types.is_dictionary(kind):
        return _hash(array.dictionary_decode(), salt)
    if types.is_null(kind) or array.null_count == len(array):
        return np.full(len(array), _mixed(salt ^ _NULL), np.uint64)
    if types.is_struct(kind):
        hashes = _combine([array.field(at) for at in range(kind.num_fields)], salt, len(array))
    elif types.is_map(kind):
        hashes = _hash_lists(array, [array.keys, array.items], salt)
    elif types.is_list(kind) or types.is_large_list(kind):
        hashes = _hash_lists(array, [array.values], salt)
    elif types.is_boolean(kind):
        hashes = _salted(_bits(array.buffers()[1], array.offset, len(array)).astype(np.uint64), salt)
    elif types.is_fixed_size_binary(kind) or types.is_decimal(kind):
        hashes = _hash_fixed(array, salt)
    elif types.is_primitive(kind):
        hashes = _salted(_numbers(array), salt)
    elif types.is_string(kind) or types.is_binary(kind):
        hashes = _hash_texts(array, np.int32, salt)
    elif types.is_large_string(kind) or types.is_large_binary(kind):
        hashes = _hash_texts(array, np.int64, salt)
    else:
        raise TypeError(f"there is no checksum of rows with values of {kind}")
    if array.null_count:
        valid = _bits(array.buffers()[0], array.offset, len(array))
        hashes[~valid] = _mixed(salt ^ _NULL)
    return hashes


def _salted(hashes: Hashes, salt: int) -> Hashes:
    hashes += np.uint64(salt)
    return _mix(hashes)


def _bits(buffer: pa.Buffer, offset: int, size: int) -> Mask:
    packed = np.frombuffer(buffer, np.uint8)[offset // 8 : (offset + size + 7) // 8]
    return np.unpackbits(packed, bitorder="little")[offset % 8 : offset % 8 + size].view(np.bool_)


def _numbers(array: pa.Array) -> Hashes:
    """The bits of numbers and times: whole numbers count by their value, floats by their bits."""
    size = array.type.bit_width // 8
    letter = "u" if types.is_floating(array.type) else "i"
    values = np.frombuffer(array.buffers()[1], f"<{letter}{size}")
    return values[array.offset : array.offset + len(array)].astype(np.int64).view(np.uint64)


def _hash_fixed(array: pa.Array, salt: int) -> Hashes:
    size = array.type.byte_width
    starts = np.arange(len(array), dtype=np.int64) * size
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)[array.offset * size : (array.offset + len(array)) * size]
    return _hash_bytes(data, starts, np.full(len(array), size, np.int64), salt)


def _hash_texts(array: pa.Array, width: type[np.int32 | np.int64], salt: int) -> Hashes:
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, width)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    return _hash_bytes(data, offsets[:-1] - offsets[0], np.diff(offsets), salt)


def _hash_bytes(data: npt.NDArray[np.uint8], starts: Numbers, lengths: Numbers, salt: int) -> Hashes:
    """The hashes of values that lie one after the other in `data`: by their words, each with its place, and length."""
    # A word may be read from any byte, so there must be some behind the last one.
    padded = np.zeros(len(data) + _WORD_BYTES, np.uint8)
    padded[: len(data)] = data
    words = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    hashes = lengths.astype(np.uint64)
    long = np.flatnonzero(lengths > _LENGTH_MAX) if lengths.max() > _LENGTH_MAX else lengths[:0]
    some = None if lengths.min() and not len(long) else np.flatnonzero((lengths > 0) & (lengths <= _LENGTH_MAX))
    _add_words(hashes, some, words, starts, lengths)
    for at, start, size in zip(long.tolist(), starts[long].tolist(), lengths[long].tolist(), strict=True):
        digest = blake2b(padded.data[start : start + size], digest_size=_WORD_BYTES).digest()
        hashes[at] = int.from_bytes(digest, "little")
    return _salted(hashes, salt)


def _add_words(hashes: Hashes, some: Numbers | None, words: Hashes, starts: Numbers, lengths: Numbers) -> None:
    """Add to some of the hashes, or all, those of their values' words.

    As long as many values are long enough, a word of each at a time; then all that is left of the few others.
    """
    place = 0
    while some is None or len(some) >= _MANY:
        behind, place = place * _WORD_BYTES, place + 1
        left = (lengths if some is None else lengths[some]) - behind
        if some is None:
            hashes += _hash_words(words[starts + behind], left, np.uint64(place * _STEP & _BITS))
        else:
            hashes[some] += _hash_words(words[starts[some] + behind], left, np.uint64(place * _STEP & _BITS))
        more = left > _WORD_BYTES
        if not more.all():
            some = np.flatnonzero(more) if some is None else some[more]
    if len(some):
        counts = -(-lengths[some] // _WORD_BYTES) - place
        places = _places(counts) + place
        behinds = places * _WORD_BYTES
        owner = np.repeat(some, counts)
        salts = (places + 1).astype(np.uint64) * np.uint64(_STEP)
        hashes[some] += _sums(_hash_words(words[starts[owner] + behinds], lengths[owner] - behinds, salts), counts)


def _hash_words(words: Hashes, left: Numbers, salts: Hashes | np.uint64) -> Hashes:
    """The hashes of words at their places; `left` bytes of the value start with each word."""
    if left.min() < _WORD_BYTES:
        words &= _TAILS[np.minimum(left, _WORD_BYTES)]
    words += salts
    return _mix(words)


def _places(counts: Numbers) -> Numbers:
    """0, 1, 2 … for each of these counts, one after the other."""
    ends = np.cumsum(counts)
    places: Numbers = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    places -= np.repeat(ends - counts, counts)
    return places


def _sums(hashes: Hashes, counts: Numbers) -> Hashes:
    """The sum of each so many hashes, one after the other; none of them: 0."""
    totals = np.zeros(len(hashes) + 1, np.uint64)
    np.cumsum(hashes, out=totals[1:])
    ends = np.cumsum(counts)
    sums: Hashes = totals[ends] - totals[ends - counts]
    return sums


def _hash_lists(array: pa.Array, parts: list[pa.Array], salt: int) -> Hashes:
    """The hashes of lists, or of maps as lists of entries: by their elements, each with its place, and length."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    counts = np.diff(offsets)
    elements = [part.slice(offsets[0], offsets[-1] - offsets[0]) for part in parts]
    hashes = _combine(elements, _inner(salt, 0), int(offsets[-1] - offsets[0]))
    hashes += (_places(counts) + 1).astype(np.uint64) * np.uint64(_STEP)
    return _salted(_sums(_mix(hashes), counts) + counts.view(np.uint64), salt)
