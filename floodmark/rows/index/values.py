"""Arrow columns as numpy arrays of their values: each as its widest type, whatever the column's layout is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.mixing import Hashes

UUID_BYTES = 16
_NAN = 0x7FF8000000000000
_TEXTS = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
_VIEWS = (types.is_string_view, types.is_binary_view)


def is_text(kind: pa.DataType) -> bool:
    """Whether its values are bytes of any length."""
    return any(test(kind) for test in (*_TEXTS, *_VIEWS))


def is_uuid(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return is_uuid(kind.storage_type)
    return bool(types.is_fixed_size_binary(kind)) and kind.byte_width == UUID_BYTES


def plain(column: pa.Array) -> pa.Array:
    """The values themselves: without a dictionary, a view or a type of an extension."""
    if isinstance(column, pa.ExtensionArray):
        return plain(column.storage)
    if types.is_dictionary(column.type):
        return plain(column.dictionary_decode())
    return column.cast(pa.large_binary()) if any(test(column.type) for test in _VIEWS) else column


def valid(column: pa.Array) -> Mask:
    """Which values are not null."""
    found: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return found


def texts(column: pa.Array) -> tuple[npt.NDArray[np.uint8], Numbers, Numbers]:
    """Bytes, and where each value starts in them and how long it is; those of nulls mean nothing."""
    wide = types.is_large_string(column.type) or types.is_large_binary(column.type)
    _, offsets_buffer, data_buffer = column.buffers()
    if not len(column):
        return np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    offsets = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    data = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets[:-1] - offsets[0], np.diff(offsets)


def words(column: pa.Array) -> list[Hashes]:
    """The words of values of a fixed width, lowest first; those of nulls mean nothing. Fresh arrays."""
    width = column.type.byte_width // 8
    found = np.frombuffer(column.buffers()[1] or b"", np.uint64)
    rows = found[column.offset * width : (column.offset + len(column)) * width].reshape(-1, width)
    return [rows[:, at].copy() for at in range(width)]


def numbers(column: pa.Array, *, one_zero: bool) -> Hashes:
    """Numbers, times and booleans as 64 bits, fresh; those of nulls mean nothing. `one_zero`: -0.0 is 0.0."""
    kind = column.type
    if types.is_floating(kind):
        doubles = np.array(column.cast(pa.float64()).fill_null(0).to_numpy(zero_copy_only=False))
        if one_zero:
            doubles += 0.0
        bits: Hashes = doubles.view(np.uint64)
        bits[np.isnan(doubles)] = _NAN
        return bits
    if types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif types.is_date(kind):
        column = column.cast(pa.date32()).cast(pa.int32())
    elif types.is_timestamp(kind):
        # The moment: a time zone only says how it is shown.
        column = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
    elif not types.is_integer(kind) or types.is_uint64(kind):
        raise TypeError(f"values of {kind} are not indexed")
    found: Numbers = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return found.view(np.uint64)
