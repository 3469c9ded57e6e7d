"""What a lookup asks for: values of columns, and which of some rows have them. Exact; indexes only name candidates.

Values are compared as a table stores them: null is a value, NaN is one value, 0.0 and -0.0 are equal. A list has each
of its values; one that is null has null.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types
from pyiceberg.types import ListType, NestedField, PrimitiveType

from floodmark.commit.live_files import LiveFile
from floodmark.errors import Invalid
from floodmark.model import Row, Value
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.convert import Column, Conformer, Shape
from floodmark.rows.misfits import Misfits
from floodmark.rows.project import GroupTest
from floodmark.rows.reading.selection import overlapping
from floodmark.rows.sql.file_test import Span, listed_span, value_spans
from floodmark.rows.sql.groups import group_spans
from floodmark.rows.staging.dicts import values_to_array

# One key: a value, the values in the table's order, or the values by column.
Key: TypeAlias = Value
# Several: a list of such keys, or a table with the key's columns.
Keys: TypeAlias = "Iterable[Key] | pa.Table | pa.RecordBatch"


class Text(str):
    """A value as text, as a command or a URL has it: it is read as the type of its column."""


@dataclass(frozen=True)
class _Step:
    """One column of the values: the different ones, and the numbers of all combinations up to it."""

    distinct: pa.Array
    known: Numbers


class Match:
    """Rows whose columns have one of some values, compared column by column.

    `values` has a column for each field, and no row twice; `asked` says which of its rows each given one is.
    """

    def __init__(self, fields: Sequence[NestedField], given: pa.Table) -> None:
        self.fields = tuple(fields)
        if len(given) == 1:
            # One key is the most frequent question: no distinct values to find.
            own = [_comparable(column.combine_chunks()) for column in given.columns]
            self._steps: tuple[_Step, ...] = tuple(_Step(values, _FIRST) for values in own)
            self.asked, self.values = _FIRST, given
            return
        steps: list[_Step] = []
        codes: Numbers = np.zeros(len(given), np.int64)
        for column in given.columns:
            values = _comparable(column.combine_chunks())
            distinct = values.unique()
            codes = codes * len(distinct) + _places(values, distinct)
            known, codes = np.unique(codes, return_inverse=True)
            steps.append(_Step(distinct, known))
        self._steps = tuple(steps)
        self.asked = codes
        _, first = np.unique(codes, return_index=True)
        self.values = given if len(first) == len(given) and _ascends(codes) else given.take(pa.array(first))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_list(self) -> bool:
        return isinstance(self.fields[0].field_type, ListType)

    def which(self, columns: Sequence[pa.Array]) -> Numbers:
        """For each row of these columns the place of its values, or -1."""
        if self.is_list:
            return self._in_lists(columns[0])
        codes: Numbers = np.zeros(len(columns[0]), np.int64)
        wanted: Mask = np.ones(len(codes), np.bool_)
        for step, column in zip(self._steps, columns, strict=True):
            if not len(step.known):
                return np.full(len(codes), -1)
            places = _places(_comparable(column), step.distinct)
            codes = codes * len(step.distinct) + places
            at = np.minimum(step.known.searchsorted(codes), len(step.known) - 1)
            wanted &= (places >= 0) & (step.known[at] == codes)
            codes = at
        return np.where(wanted, codes, -1)

    def _in_lists(self, column: pa.Array) -> Numbers:
        """The place of one of the values that a list has; the rest of them does not matter."""
        (step,) = self._steps
        found = np.full(len(column), -1)
        if not len(step.known):
            return found
        inside = _places(_comparable(column.flatten()), step.distinct)
        owners = pc.list_parent_indices(column).to_numpy()
        hits = inside >= 0
        found[owners[hits]] = step.known.searchsorted(inside[hits])
        null = _places(pa.nulls(1, step.distinct.type), step.distinct)[0]
        if null >= 0 and column.null_count:
            found[np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))] = step.known.searchsorted(null)
        return found

    # ── what cannot hold one of the values ──

    def files(self, files: Sequence[LiveFile]) -> Mask:
        """Which files may hold such a row, by their bounds."""
        if self.is_list:
            return np.ones(len(files), np.bool_)
        spans = [listed_span([file.data_file for file in files], field) for field in self.fields]
        return overlapping(spans, self._ranges, len(self), len(files))

    @property
    def group_test(self) -> GroupTest | None:
        """Which row groups of a file may hold such a row, by its footer."""
        if self.is_list:
            return None

        def test(metadata: pq.FileMetaData, names: Mapping[int, str]) -> Sequence[bool]:
            span = group_spans(metadata, names)
            spans = [span(field) or Span(None, None, _NO, _NO, _NO) for field in self.fields]
            found: list[bool] = overlapping(spans, self._ranges, len(self), metadata.num_row_groups).tolist()
            return found

        return test

    @property
    def _ranges(self) -> list[Span]:
        return [value_spans(column, field) for column, field in zip(self.values.columns, self.fields, strict=True)]


_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
_FIRST: Numbers = np.zeros(1, np.int64)
_NO: Mask = np.zeros(1, np.bool_)


def _ascends(codes: Numbers) -> bool:
    return bool((codes[1:] > codes[:-1]).all())


def _places(values: pa.Array, among: pa.Array) -> Numbers:
    """Where each value is among others, or -1."""
    found: Numbers = pc.index_in(values, value_set=among).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _comparable(values: pa.Array) -> pa.Array:
    """The values with one zero and one NaN."""
    if not types.is_floating(values.type):
        return values
    doubles = pc.add(values.cast(pa.float64()), 0.0)
    return pc.if_else(pc.is_nan(doubles), float("nan"), doubles)


# ── values that were given ──


def match_key(table: str, shape: Shape, key: Key) -> Match:
    """One key. `Invalid` if it is not one of the table's. `shape`: that of the key's columns."""
    return _match_rows(table, shape, [key])


def match_keys(table: str, shape: Shape, keys: Keys) -> Match:
    """Several keys. `Invalid` if one of them is not one of the table's."""
    if isinstance(keys, pa.Table | pa.RecordBatch):
        return Match(shape.fields, _conformed(table, shape, keys))
    if isinstance(keys, str | bytes | Mapping) or not hasattr(keys, "__iter__"):
        raise Invalid(
            "keys must be a list of keys, or an Arrow table",
            table=table,
            given=type(keys).__name__,
            advice="One key: lake.get(table, key). Several: lake.get_many(table, [key, key]).",
        )
    return _match_rows(table, shape, list(keys))


def _match_rows(table: str, shape: Shape, keys: Sequence[Key]) -> Match:
    names = [column.name for column in shape.columns]
    rows = [_key_row(table, names, key) for key in keys]
    if any(value is None for row in rows for value in row.values()):
        raise Invalid("a value of a key is never null", table=table, key=", ".join(names))
    what = "a key does not fit the table"
    arrays = [
        values_to_array([_read(row[column.name], column) for row in rows], column, what) for column in shape.columns
    ]
    return Match(shape.fields, pa.table(arrays, names=names))


def _key_row(table: str, names: Sequence[str], key: Key) -> Row:
    """A key by its columns' names, whichever way it was given."""
    if isinstance(key, Mapping):
        if set(key) != set(names):
            given = ", ".join(map(str, key))
            raise _not_a_key(table, names, given, "Name each column of the key, and no other.")
        return key
    if isinstance(key, list | tuple):
        if len(key) != len(names):
            raise _not_a_key(
                table, names, f"{len(key)} values", "Give one value for each column, in the table's order."
            )
        return dict(zip(names, key, strict=True))
    if len(names) > 1:
        advice = f"Give a tuple in this order, or a dict: {', '.join(names)}."
        raise _not_a_key(table, names, type(key).__name__, advice)
    return {names[0]: key}


def _read(value: Value, column: Column) -> Value:
    """A text as its column's type reads it. One that cannot be read stays text, which the column then refuses."""
    if not isinstance(value, Text):
        return value
    kind, text = column.field.type, str(value)
    try:
        if types.is_integer(kind) and _WHOLE.fullmatch(text):
            return int(text)
        if types.is_floating(kind):
            return float(text)
        if types.is_boolean(kind):
            return {"true": True, "false": False}.get(text.lower(), text)
        if types.is_binary(kind):
            return base64.b64decode(text, validate=True)
    except ValueError:
        pass  # the text goes on, and is refused with the column's name and type
    return text


def _not_a_key(table: str, names: Sequence[str], given: str, advice: str) -> Invalid:
    return Invalid("this is not a key of the table", table=table, key=", ".join(names), given=given, advice=advice)


def _conformed(table: str, shape: Shape, keys: pa.Table | pa.RecordBatch) -> pa.Table:
    names = [column.name for column in shape.columns]
    missing = [name for name in names if name not in keys.schema.names]
    if missing:
        advice = "The table of keys needs a column for each column of the key."
        raise _not_a_key(table, names, ", ".join(keys.schema.names), advice)
    chosen = keys.select(names)
    problems = Misfits()
    conformer = Conformer(shape, chosen.schema)
    batches = chosen.to_batches() if isinstance(chosen, pa.Table) else [chosen]
    found = [conformer.conform(batch, problems) for batch in batches]
    (problems or conformer.problems).raise_invalid(what="a key does not fit the table")
    return pa.Table.from_batches(found, shape.file_schema)


def match_values(column: Column, field: NestedField, given: Value) -> Match:
    """The values that one column was asked for: one, or a list of several. Of a list column, those that it contains."""
    values = list(given) if isinstance(given, list | tuple | set | frozenset) else [given]
    kind = field.field_type
    if isinstance(kind, ListType) and isinstance(kind.element_type, PrimitiveType):
        (element,) = column.children
        column = replace(element, name=column.name, path=column.path)
    elif not isinstance(kind, PrimitiveType):
        raise Invalid(
            "rows cannot be looked up by a column of this type",
            column=field.name,
            type=kind,
            advice="Use a plain column, or a list of plain values; `floodmark scan --where` has conditions on others.",
        )
    array = values_to_array([_read(value, column) for value in values], column, "a value does not fit the column")
    return Match((field,), pa.table([array], names=[field.name]))
