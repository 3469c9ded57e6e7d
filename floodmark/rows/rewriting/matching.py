"""Existing rows beside incoming rows of the same key: which existing rows stay, and how rows are completed if only some
columns come in.

Compared piece by piece, so that memory follows the piece and not the match (I14). Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import NestedField

from floodmark.rows.keys import Matches
from floodmark.rows.project import row_bytes, take_rows
from floodmark.storage import Storage

# How many bytes of existing rows are held at once to be compared with incoming ones.
COMPARE_BYTES_MAX = 64 * 1024 * 1024
COMPARE_ROWS_MIN = 1024

Judge = Callable[[pa.Table, pa.Table], Any]


def judged(
    storage: Storage,
    path: str,
    incoming: Sequence[str],
    fields: Sequence[NestedField],
    matches: Matches,
    judge: Judge,
) -> np.ndarray[Any, Any]:
    """For each match the result of `judge` for the existing row and the incoming one, by these columns."""
    found = np.zeros(len(matches.positions), dtype=bool)
    piece = max(COMPARE_ROWS_MIN, COMPARE_BYTES_MAX // row_bytes(storage, path, fields))
    for start in range(0, len(found), piece):
        end = min(start + piece, len(found))
        there = take_rows(storage, path, fields, matches.positions[start:end])
        for number in np.unique(matches.files[start:end]):
            which = np.flatnonzero(matches.files[start:end] == number)
            places = matches.places[start:end][which]
            order = np.argsort(places, kind="stable")
            come = take_rows(storage, incoming[number], fields, places[order])
            found[start + which[order]] = judge(there.take(pa.array(which[order])), come)
    return found


Rows = tuple[str, Sequence[NestedField], np.ndarray[Any, Any]]


def completed_rows(storage: Storage, kept: Rows, come: Rows) -> Iterator[pa.RecordBatch]:
    """Rows with some columns of one file and the others of another: (file, columns, positions) of both, row by row.

    The positions of `kept` ascend, those of `come` need not.
    """
    kept_path, kept_fields, positions = kept
    come_path, come_fields, places = come
    row = row_bytes(storage, come_path, come_fields)
    row += row_bytes(storage, kept_path, kept_fields) if kept_fields else 0
    piece = max(COMPARE_ROWS_MIN, COMPARE_BYTES_MAX // row)
    for start in range(0, len(positions), piece):
        some = places[start : start + piece]
        order = np.argsort(some, kind="stable")
        new = take_rows(storage, come_path, come_fields, some[order]).take(pa.array(np.argsort(order)))
        old = take_rows(storage, kept_path, kept_fields, positions[start : start + piece]) if kept_fields else None
        whole = new if old is None else pa.table([*old.columns, *new.columns], [*old.column_names, *new.column_names])
        yield from whole.combine_chunks().to_batches()


def not_newer(there: pa.Table, come: pa.Table) -> np.ndarray[Any, Any]:
    """For each row whether the incoming one is not newer, by the only column; any value is newer than null."""
    old, new = there.column(0), come.column(0)
    newer = pc.if_else(pc.is_null(old), pc.is_valid(new), pc.fill_null(pc.greater(new, old), False))
    return ~np.asarray(newer.to_numpy())
