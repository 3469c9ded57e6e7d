"""Entries of an index: the hash of a value, and the row that has it; in the order in which a segment stores them.

The order is that of (hash, file number, row position), and no entry comes twice: a list that holds a value twice, or
two values with the same hash, has one entry for it. So the same rows give the same entries, however they were gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from floodmark.errors import Invalid
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.index.hashing import ENCODER, Encoder, Secret, hash_values
from floodmark.rows.mixing import Hashes, places
from floodmark.rows.translate import is_list

Places = npt.NDArray[np.uint32]

ROWS_MAX = 2**32


@dataclass(frozen=True)
class Entries:
    """Entries one after the other; `low` for hashes of 128 bits, `fingerprints` in key indexes only."""

    high: Hashes
    low: Hashes | None
    files: Places
    positions: Places
    fingerprints: Hashes | None = None

    def __len__(self) -> int:
        return len(self.high)

    def take(self, chosen: Numbers | Mask | slice) -> Entries:
        return Entries(
            self.high[chosen],
            None if self.low is None else self.low[chosen],
            self.files[chosen],
            self.positions[chosen],
            None if self.fingerprints is None else self.fingerprints[chosen],
        )

    def arrays(self) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        yield from (self.high, self.files, self.positions)
        yield from (one for one in (self.low, self.fingerprints) if one is not None)


def joined(parts: Sequence[Entries]) -> Entries:
    """All entries of some parts of the same kind, at least one."""
    if len(parts) == 1:
        return parts[0]
    lows = [part.low for part in parts if part.low is not None]
    fingerprints = [part.fingerprints for part in parts if part.fingerprints is not None]
    if len(lows) not in (0, len(parts)) or len(fingerprints) not in (0, len(parts)):
        raise TypeError("entries of different kinds cannot be joined")
    return Entries(
        np.concatenate([part.high for part in parts]),
        np.concatenate(lows) if lows else None,
        np.concatenate([part.files for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate(fingerprints) if fingerprints else None,
    )


def make_entries(
    columns: Sequence[pa.Array | pa.ChunkedArray],
    secret: Secret,
    *,
    file: int,
    position: int,
    fingerprints: Hashes | None = None,
    encoder: Encoder = ENCODER,
) -> Entries:
    """The entries of rows of one data file, of which the first has this position; in the order of the rows.

    A single column of lists has an entry for each value in a list; a list that is null has one for null.
    """
    rows = len(columns[0])
    if position + rows > ROWS_MAX:
        raise Invalid("a data file has too many rows for an index", rows=position + rows, rows_max=ROWS_MAX)
    owners: Numbers = np.arange(rows, dtype=np.int64)
    if len(columns) == 1 and is_list(columns[0].type):
        owners, columns = _in_lists(columns[0])
    hashes = hash_values(columns, secret, encoder)
    if fingerprints is not None:
        fingerprints = encoder.cut(fingerprints)[owners]
    positions = (owners + position).astype(np.uint32)
    return Entries(hashes.high, hashes.low, np.full(len(owners), file, np.uint32), positions, fingerprints)


def _in_lists(column: pa.Array | pa.ChunkedArray) -> tuple[Numbers, list[pa.Array | pa.ChunkedArray]]:
    """The rows of values in lists, and the values; a null for each list that is null."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    owners: list[Numbers] = []
    values: list[pa.Array] = []
    kind, before = column.type.value_type, 0
    for chunk in chunks:
        absent = np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))
        # Not `list_parent_indices`: it counts values below a null too, and `list_flatten` leaves them out.
        counts = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
        owners += [np.repeat(np.arange(len(chunk)), counts) + before, absent + before]
        values += [pc.list_flatten(chunk), pa.nulls(len(absent), kind)]
        before += len(chunk)
    return np.concatenate([np.empty(0, np.int64), *owners]), [pa.chunked_array(values, kind)]


def sort_entries(entries: Entries) -> Entries:
    """The same entries in the order of a segment, each once."""
    order = hash_order(entries.high)
    found = entries.take(order)
    wrong = out_of_order(found)
    if wrong.any():
        _sort_ties(found, wrong)
    twice = _repeated(found)
    return found.take(~twice) if twice.any() else found


def hash_order(high: Hashes) -> Numbers:
    """The rows in the order of the first words of their hashes; equal ones as they come, but for the few last bits.

    The number of a row takes the place of the last bits of its hash: that sorts several times as fast as numbers of
    rows would be sorted by hashes. The caller looks for what these bits would have changed.
    """
    rows = len(high)
    mask = np.uint64((1 << _low_bits(rows)) - 1)
    packed = high & ~mask
    packed |= np.arange(rows, dtype=np.uint64)
    packed.sort()
    packed &= mask
    order: Numbers = packed.view(np.int64)
    return order


def stable_order(numbers: Numbers, limit: int) -> Numbers:
    """The rows in the order of numbers from 0 to `limit`; equal ones as they come."""
    rows_bits = _low_bits(len(numbers))
    if limit.bit_length() + rows_bits > 63:
        return np.argsort(numbers, kind="stable")
    packed = numbers << rows_bits
    packed |= np.arange(len(numbers), dtype=np.int64)
    packed.sort()
    packed &= (1 << rows_bits) - 1
    return packed


def _low_bits(rows: int) -> int:
    return max(1, max(0, rows - 1).bit_length())


def out_of_order(entries: Entries) -> Mask:
    """Which entries are followed by one that belongs before them."""
    high, low, files, positions = entries.high, entries.low, entries.files, entries.positions
    wrong = high[1:] < high[:-1]
    ties = np.flatnonzero(high[1:] == high[:-1])
    if len(ties):
        after = ties + 1
        same = np.ones(len(ties), np.bool_)
        if low is not None:
            wrong[ties] |= low[after] < low[ties]
            same = low[after] == low[ties]
        wrong[ties] |= same & (files[after] < files[ties])
        same &= files[after] == files[ties]
        wrong[ties] |= same & (positions[after] < positions[ties])
    return np.asarray(wrong, np.bool_)


def _sort_ties(entries: Entries, wrong: Mask) -> None:
    """Put the entries in order. Those that `hash_order` could not order lie side by side: only these are sorted."""
    groups = entries.high >> np.uint64(_low_bits(len(entries)))
    touched = np.unique(groups[:-1][wrong])
    starts, ends = np.searchsorted(groups, touched, "left"), np.searchsorted(groups, touched, "right")
    some = places(ends - starts) + np.repeat(starts, ends - starts)
    part = entries.take(some)
    lows = () if part.low is None else (part.low,)
    part = part.take(np.lexsort((part.positions, part.files, *lows, part.high)))
    for whole, sorted_part in zip(entries.arrays(), part.arrays(), strict=True):
        whole[some] = sorted_part


def _repeated(entries: Entries) -> Mask:
    """Which entries are the same as the one before them."""
    same = np.zeros(len(entries), np.bool_)
    if len(entries):
        same[1:] = entries.high[1:] == entries.high[:-1]
        ties = np.flatnonzero(same)
        before = ties - 1
        here = entries.positions[ties] == entries.positions[before]
        here &= entries.files[ties] == entries.files[before]
        if entries.low is not None:
            here &= entries.low[ties] == entries.low[before]
        same[ties] = here
    return same
