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

import numpy as np
import pyarrow as pa
from pyarrow import types

from floodmark.rows.mixing import BITS, STEP, Hashes, bits, hash_bytes, inner, mix, mixed, places, salted, sums

_BLOCK_ROWS = 32 * 1024
_BLOCK_BYTES = 2 * 1024 * 1024
# Numbers without a pattern: what a null counts as, the second sum of a row, and the salt of rows.
_NULL = 0xD1B54A32D192ED03
_SECOND = 0x8CB92BA72F3D8DD7
_ROW_SALT = 0xA0761D6478BD642F


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
            second = int(mix(hashes).sum(dtype=np.uint64))
            self._sums = ((self._sums[0] + first) & BITS, (self._sums[1] + second) & BITS)
        self.rows += len(batch)

    def __add__(self, other: RowChecksum) -> RowChecksum:
        """The checksum of the rows of both."""
        total = RowChecksum()
        total.rows = self.rows + other.rows
        total._sums = ((self._sums[0] + other._sums[0]) & BITS, (self._sums[1] + other._sums[1]) & BITS)
        return total

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowChecksum) and (self.rows, self._sums) == (other.rows, other._sums)

    __hash__ = None  # type: ignore[assignment]  # It changes with every row.

    def __repr__(self) -> str:
        return f"RowChecksum(rows={self.rows}, {self.hexdigest()})"

    def hexdigest(self) -> str:
        return f"{self._sums[0]:016x}{self._sums[1]:016x}"


def _combine(columns: list[pa.Array], salt: int, rows: int) -> Hashes:
    """The hashes of rows, or structs, from those of their fields. The sum alone would not hold the fields together."""
    hashes = np.full(rows, salt, np.uint64)
    for place, column in enumerate(columns):
        hashes += _hash(column, inner(salt, place))
    return mix(hashes)


def _hash(array: pa.Array, salt: int) -> Hashes:
    """A hash for each value of the array; nulls have one of their own."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _hash(array.storage, salt)
    if types.is_dictionary(kind):
        return _hash(array.dictionary_decode(), salt)
    if types.is_null(kind) or array.null_count == len(array):
        return np.full(len(array), mixed(salt ^ _NULL), np.uint64)
    if types.is_struct(kind):
        hashes = _combine([array.field(at) for at in range(kind.num_fields)], salt, len(array))
    elif types.is_map(kind):
        hashes = _hash_lists(array, [array.keys, array.items], salt)
    elif types.is_list(kind) or types.is_large_list(kind):
        hashes = _hash_lists(array, [array.values], salt)
    elif types.is_boolean(kind):
        hashes = salted(bits(array.buffers()[1], array.offset, len(array)).astype(np.uint64), salt)
    elif types.is_fixed_size_binary(kind) or types.is_decimal(kind):
        hashes = _hash_fixed(array, salt)
    elif types.is_primitive(kind):
        hashes = salted(_numbers(array), salt)
    elif types.is_string(kind) or types.is_binary(kind):
        hashes = _hash_texts(array, np.int32, salt)
    elif types.is_large_string(kind) or types.is_large_binary(kind):
        hashes = _hash_texts(array, np.int64, salt)
    else:
        raise TypeError(f"there is no checksum of rows with values of {kind}")
    if array.null_count:
        valid = bits(array.buffers()[0], array.offset, len(array))
        hashes[~valid] = mixed(salt ^ _NULL)
    return hashes


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
    return hash_bytes(data, starts, np.full(len(array), size, np.int64), salt)


def _hash_texts(array: pa.Array, width: type[np.int32 | np.int64], salt: int) -> Hashes:
    _, offsets_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offsets_buffer, width)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    return hash_bytes(data, offsets[:-1] - offsets[0], np.diff(offsets), salt)


def _hash_lists(array: pa.Array, parts: list[pa.Array], salt: int) -> Hashes:
    """The hashes of lists, or of maps as lists of entries: by their elements, each with its place, and length."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    counts = np.diff(offsets)
    elements = [part.slice(offsets[0], offsets[-1] - offsets[0]) for part in parts]
    hashes = _combine(elements, inner(salt, 0), int(offsets[-1] - offsets[0]))
    hashes += (places(counts) + 1).astype(np.uint64) * np.uint64(STEP)
    return salted(sums(mix(hashes), counts) + counts.view(np.uint64), salt)
