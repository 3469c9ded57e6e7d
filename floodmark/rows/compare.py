"""Are two rows the same? Compared column by column, for every type that a table can hold, without a loop over rows.

The same means that a reader sees no difference: null equals null, and one NaN equals another; but 0.0 and -0.0 differ,
and so do two maps with the same entries in another order. Only what a reader can see counts: slices, and values in the
buffers below a null, are no part of a row. Both sides have the same columns; if not, that is a bug of the caller and a
TypeError, never an answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.project import nullable_type
from floodmark.rows.translate import is_list

_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def same_rows(left: pa.Table | pa.RecordBatch, right: pa.Table | pa.RecordBatch) -> Mask:
    """For each row: whether the row of `left` and the row of `right` at that position are the same."""
    if _columns(left) != _columns(right):
        raise TypeError(f"the rows have different columns: {left.schema} and {right.schema}")
    if left.num_rows != right.num_rows:
        raise ValueError(f"{left.num_rows} rows cannot be compared with {right.num_rows} one by one")
    same = np.ones(left.num_rows, np.bool_)
    for at in range(left.num_columns):
        for start, one, other in _side_by_side(left.column(at), right.column(at)):
            same[start : start + len(one)] &= _same(one, other)
    return same


def _columns(rows: pa.Table | pa.RecordBatch) -> list[tuple[str, pa.DataType]]:
    # Whether a field may be null is a promise, not a value.
    return [(field.name, nullable_type(field.type)) for field in rows.schema]


def _side_by_side(
    left: pa.ChunkedArray | pa.Array, right: pa.ChunkedArray | pa.Array
) -> Iterator[tuple[int, pa.Array, pa.Array]]:
    """The same ranges of two columns. Chunks are cut, not joined: 2 GiB of text do not fit into one array."""
    bounds = [_bounds(left), _bounds(right)]
    cuts = np.unique(np.concatenate(bounds))
    for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        one, other = (_part(column, starts, start, end) for column, starts in zip((left, right), bounds, strict=True))
        yield start, one, other


def _bounds(column: pa.ChunkedArray | pa.Array) -> Numbers:
    lengths = [len(chunk) for chunk in column.chunks] if isinstance(column, pa.ChunkedArray) else [len(column)]
    return np.cumsum([0, *lengths], dtype=np.int64)


def _part(column: pa.ChunkedArray | pa.Array, bounds: Numbers, start: int, end: int) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column.slice(start, end - start)
    # The last of equal bounds: the chunks before it are empty.
    chunk = int(np.searchsorted(bounds, start, side="right")) - 1
    return column.chunk(chunk).slice(start - int(bounds[chunk]), end - start)


def _same(left: pa.Array, right: pa.Array) -> Mask:
    """Whether values are the same, one by one. Both arrays have the same type and length."""
    kind = left.type
    if types.is_null(kind) or not len(left):
        return np.ones(len(left), np.bool_)
    valid_left, valid_right = _valid(left), _valid(right)
    both = valid_left & valid_right
    if types.is_dictionary(kind):
        inside = _same(left.dictionary_decode(), right.dictionary_decode())
    elif types.is_struct(kind):
        inside = np.ones(len(left), np.bool_)
        for at in range(kind.num_fields):
            inside &= _same(left.field(at), right.field(at))
    elif types.is_map(kind) or is_list(kind):
        # A map is a list of its entries.
        inside = _same_lists(left, right, both)
    elif types.is_floating(kind):
        inside = _same_floats(left, right)
    else:
        inside = pc.equal(left, right).fill_null(False).to_numpy(zero_copy_only=False)
    # Values below a null are undefined: the result for them is not used.
    return np.where(both, inside, valid_left == valid_right)


def _valid(array: pa.Array) -> Mask:
    valid: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _same_floats(left: pa.Array, right: pa.Array) -> Mask:
    one, other = left.to_numpy(zero_copy_only=False), right.to_numpy(zero_copy_only=False)
    bits = _BITS[one.dtype.itemsize]
    same: Mask = (one.view(bits) == other.view(bits)) | (np.isnan(one) & np.isnan(other))
    return same


def _same_lists(left: pa.Array, right: pa.Array, both: Mask) -> Mask:
    starts_left, lengths = _ranges(left)
    starts_right, lengths_right = _ranges(right)
    same = lengths == lengths_right
    if same.all() and _gapless(starts_left, lengths) and _gapless(starts_right, lengths):
        # The usual case, without a copy: element for element, also those below nulls.
        rows = np.arange(len(left))
        size = int(lengths.sum())
        one = left.values.slice(int(starts_left[0]), size)
        other = right.values.slice(int(starts_right[0]), size)
    else:
        rows = np.flatnonzero(same & both)
        lengths = lengths[rows]
        one = left.values.take(pa.array(_positions(starts_left[rows], lengths)))
        other = right.values.take(pa.array(_positions(starts_right[rows], lengths)))
    differing = np.concatenate([[0], np.cumsum(~_same(one, other))])
    ends = np.cumsum(lengths)
    same[rows] = differing[ends] == differing[ends - lengths]
    return np.asarray(same, np.bool_)


def _ranges(array: pa.Array) -> tuple[Numbers, Numbers]:
    """Where each list's elements start in `array.values`, and how many there are."""
    kind = array.type
    if types.is_fixed_size_list(kind):
        lengths = np.full(len(array), kind.list_size, np.int64)
        return (array.offset + np.arange(len(array))) * kind.list_size, lengths
    offsets: Numbers = array.offsets.to_numpy().astype(np.int64)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return offsets, array.sizes.to_numpy().astype(np.int64)
    return offsets[:-1], np.diff(offsets)


def _gapless(starts: Numbers, lengths: Numbers) -> bool:
    return bool((starts[1:] == starts[:-1] + lengths[:-1]).all())


def _positions(starts: Numbers, lengths: Numbers) -> Numbers:
    """The numbers of all ranges, one range after the other."""
    shifts = starts - (np.cumsum(lengths) - lengths)
    return np.asarray(np.arange(lengths.sum()) + np.repeat(shifts, lengths), np.int64)
