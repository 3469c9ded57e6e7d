"""Values of one column looked up among the keys of other files: do rows refer to existing keys?

Distinct values are held in chunks of bounded size (I14); the files to search are read one column and one file at a
time, and only those whose bounds may include a value, and that an index of the column does not leave out. Null refers
to nothing. Reads only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types
from pyiceberg.conversions import from_bytes
from pyiceberg.types import IntegerType, LongType, NestedField, StringType

from floodmark.commit.live_files import LiveFile
from floodmark.model import Scalar
from floodmark.rows.keys import KEY_BATCH_ROWS, KEY_BYTES_PER_CHUNK, KEYS_PER_CHUNK, read_keys, render_keys
from floodmark.rows.project import read_file, read_schema
from floodmark.storage import Storage

EXAMPLES_MAX = 10
# At most this many are returned as values; a caller that needs all repeats the search without these.
VALUES_MAX = 100_000
_WAITING_ROWS = 64 * 1024
# Bounds of these types equal the values, in the same order.
_COMPARED = (IntegerType, LongType, StringType)
# Those of some files that may hold one of these values in a column, as an index of the column says.
FilesHolding: TypeAlias = Callable[[Sequence[LiveFile], pa.Array], Sequence[LiveFile]]


@dataclass(frozen=True)
class Missing:
    """How many values violate the reference, some of them as text, more of them as values, and the files in which
    values were found."""

    count: int
    examples: tuple[str, ...]
    found_in: frozenset[str]
    values: pa.Array


def missing_values(
    storage: Storage,
    children: Sequence[str],
    child_field: NestedField,
    parents: Sequence[LiveFile],
    parent_field: NestedField,
    *,
    holding: FilesHolding | None = None,
    chunk_rows: int = KEYS_PER_CHUNK,
) -> Missing:
    """The values in a column of some files that no parent file has; `found_in` lists the files that have the others."""
    count, examples, found_in = 0, list[str](), set[str]()
    shown = pa.array([], _compared_type(child_field, parent_field))
    for values in _chunks(storage, children, child_field, parent_field, chunk_rows):
        some = parents if holding is None else holding(parents, values)
        rest, here = _not_in(storage, values, some, parent_field, child_field)
        found_in |= here
        count += len(rest)
        examples += _rendered(rest, child_field, EXAMPLES_MAX - len(examples))
        shown = _more(shown, rest)
    return Missing(count, tuple(examples), frozenset(found_in), shown)


def held_values(
    storage: Storage,
    keys: Sequence[str],
    key_field: NestedField,
    children: Sequence[LiveFile],
    child_field: NestedField,
    *,
    stay: Sequence[LiveFile] = (),
    holding: FilesHolding | None = None,
    stay_holding: FilesHolding | None = None,
    chunk_rows: int = KEYS_PER_CHUNK,
) -> Missing:
    """The keys in some files that a child's column still holds, without those that are in the files `stay`."""
    count, examples, found_in = 0, list[str](), set[str]()
    shown = pa.array([], _compared_type(child_field, key_field))
    for values in _chunks(storage, keys, key_field, child_field, chunk_rows):
        staying = stay if stay_holding is None else stay_holding(stay, values)
        gone, _ = _not_in(storage, values, staying, key_field, child_field)
        some = children if holding is None or not len(gone) else holding(children, gone)
        rest, here = _not_in(storage, gone, some, child_field, key_field)
        found_in |= here
        count += len(gone) - len(rest)
        held = gone if not len(rest) else gone.filter(pc.invert(pc.is_in(gone, value_set=rest)))
        examples += _rendered(held, child_field, EXAMPLES_MAX - len(examples))
        shown = _more(shown, held)
    return Missing(count, tuple(examples), frozenset(found_in), shown)


def _chunks(
    storage: Storage, files: Sequence[str], field: NestedField, other: NestedField, chunk_rows: int
) -> Iterator[pa.Array]:
    """The distinct values of a column, so many at a time, in the type in which both columns are compared."""
    kind = _compared_type(field, other)
    held, waiting, rows = pa.array([], kind), list[pa.Array](), 0
    for location in files:
        for batch in read_file(storage, location, [field], KEY_BATCH_ROWS):
            column = batch.column(0).drop_null().cast(kind)
            waiting, rows = [*waiting, column], rows + len(column)
            # Frequent values are held once; making values distinct costs as much as holding them.
            if rows < max(len(held), _WAITING_ROWS) and rows < chunk_rows:
                continue
            held, waiting, rows = pc.unique(pa.concat_arrays([held, *waiting])), [], 0
            if len(held) >= chunk_rows or held.nbytes >= KEY_BYTES_PER_CHUNK:
                yield held
                held = pa.array([], kind)
    held = pc.unique(pa.concat_arrays([held, *waiting]))
    if len(held):
        yield held


def _not_in(
    storage: Storage, values: pa.Array, files: Sequence[LiveFile], field: NestedField, other: NestedField
) -> tuple[pa.Array, set[str]]:
    """The values that no file has in the column; and the files that have others."""
    kind, found_in = _compared_type(field, other), set[str]()
    for file in files:
        if not len(values):
            break
        if not _may_hold(file, field, values):
            continue
        column = read_keys(storage, file.path, [field]).column(0).combine_chunks().drop_null().cast(kind)
        found = pc.is_in(values, value_set=column)
        if pc.any(found).as_py():
            found_in.add(file.path)
            values = values.filter(pc.invert(found))
    return values, found_in


def _may_hold(file: LiveFile, field: NestedField, values: pa.Array) -> bool:
    """Decided by the file's bounds; a file without certain bounds is read."""
    low = _bound(file.data_file.lower_bounds, field)
    high = _bound(file.data_file.upper_bounds, field)
    if low is None or high is None:
        return True
    ends = pc.min_max(values)
    return bool(ends["min"].as_py() <= high and low <= ends["max"].as_py())


def _bound(bounds: dict[int, bytes] | None, field: NestedField) -> Scalar:
    raw = (bounds or {}).get(field.field_id)
    if raw is None or not isinstance(field.field_type, _COMPARED):
        return None
    # A bound of a narrower type, or cut inside a character, cannot be read: it counts as none.
    with suppress(ValueError, struct.error):
        return from_bytes(field.field_type, raw)
    return None


def _compared_type(one: NestedField, other: NestedField) -> pa.DataType:
    """The type that holds values of both columns without loss: one of them may be wider by now."""
    kinds = [read_schema([field]).field(0).type for field in (one, other)]
    if kinds[0].equals(kinds[1]):
        return kinds[0]
    if all(types.is_integer(kind) for kind in kinds):
        return pa.int64()
    return max(kinds, key=lambda kind: kind.precision if types.is_decimal(kind) else 0)


def _more(shown: pa.Array, values: pa.Array) -> pa.Array:
    return pa.concat_arrays([shown, values[: VALUES_MAX - len(shown)]])


def _rendered(values: pa.Array, field: NestedField, limit: int) -> list[str]:
    return render_keys(pa.table([values[: max(0, limit)]], names=[field.name]))
