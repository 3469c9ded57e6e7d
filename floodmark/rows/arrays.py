"""Arrays: numpy's by what they hold, and Arrow's nested ones taken apart and rebuilt with other children.

Slices, nulls and values below nulls are handled here once: the parts hold only what a reader can see.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# Positions, places and sequences; and which of some rows.
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def _mask(array: pa.Array, nullable: bool) -> pa.Array | None:
    return array.is_null() if nullable and array.null_count else None


def _offsets(lengths: pa.Array) -> pa.Array:
    sums = pc.cumulative_sum(pc.cast(pc.fill_null(lengths, 0), pa.int32()))
    return pa.concat_arrays([pa.array([0], pa.int32()), sums])


def struct_of(array: pa.Array, children: Sequence[pa.Array], kind: pa.DataType, nullable: bool = True) -> pa.Array:
    """A struct array like `array` with these children."""
    return pa.StructArray.from_arrays(list(children), fields=list(kind), mask=_mask(array, nullable))


def list_of(array: pa.Array, values: pa.Array, kind: pa.DataType, nullable: bool = True) -> pa.Array:
    """A list array like `array` with these values, which belong to `array.flatten()`."""
    offsets = _offsets(pc.list_value_length(array))
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=_mask(array, nullable))


def map_parts(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The keys and values of a map array that a reader can see."""
    valid = array.drop_null() if array.null_count else array
    start, end = (valid.offsets[0].as_py(), valid.offsets[-1].as_py()) if len(valid) else (0, 0)
    return valid.keys.slice(start, end - start), valid.items.slice(start, end - start)


def map_of(array: pa.Array, keys: pa.Array, items: pa.Array, kind: pa.DataType, nullable: bool = True) -> pa.Array:
    """A map array like `array` with these keys and values, which belong to `map_parts(array)`."""
    lengths = pc.subtract(array.offsets[1:], array.offsets[:-1])
    if array.null_count:
        lengths = pc.if_else(array.is_null(), pa.scalar(0, pa.int32()), lengths)
    return pa.MapArray.from_arrays(_offsets(lengths), keys, items, type=kind, mask=_mask(array, nullable))
