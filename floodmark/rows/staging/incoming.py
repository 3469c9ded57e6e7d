"""Incoming rows: which of several with one key counts, if the caller named an order column; which of them bring the
columns that an expression would fill; and which columns merged rows leave out.

A merge has one rule for all kinds of data: a column that the rows leave out is never written as null over a value. The
rows are refused, or, in a partial merge, only the columns that they bring are updated. Dicts are checked row by row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from floodmark.commit.fills import Fill, lacking
from floodmark.errors import Invalid
from floodmark.model import Row, Value
from floodmark.rows.convert import MISSING, Column, Conformer, Shape
from floodmark.rows.frames import RowsLike, is_dataframe
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.schema import nearest
from floodmark.rows.staging.duplicates import last_of_dataframe, last_of_table
from floodmark.rows.staging.stage import StageTarget, in_memory_batches, incoming_schema

# Rows that bring the same columns are staged together: with more different sets of columns there are too many files.
PARTS_MAX = 256
LEFT_OUT_ADVICE = (
    "Send every column, with null where none is meant, or update only the columns that the rows have: "
    "partial=True (load --partial)."
)
_KEY = "A partial merge finds its rows by the key: send all of its columns."
_INSIDE = "A struct is replaced as a whole: send every field, with null where none is meant."


@dataclass(frozen=True)
class Parts:
    """Rows of a partial merge in several frames, each with the columns that its rows bring."""

    frames: tuple[RowsLike, ...]


def last_of(
    data: RowsLike | Parts, key: Sequence[str], order: str, target: StageTarget, *, partial: bool = False
) -> RowsLike:
    """The rows with only the last row of each key, by an order column, which is dropped if the table does not have it.

    Rows of one key with the same order both stay, unless they are equal: they are refused later, with examples. Data in
    memory stays in memory; a reader is read to its end.
    """
    kept = order in {column.name for column in target.shape().columns}
    if isinstance(data, Parts):
        raise Invalid(
            "rows with different columns cannot be ordered",
            column=order,
            advice="Send each key once, or rows that all have the same columns.",
        )
    if is_dataframe(data):
        last = last_of_dataframe(data, key, order)
        names = [name for name in last.columns if name != order]
        return last if kept else last.select(*(f"`{name.replace('`', '``')}`" for name in names))
    if isinstance(data, list | tuple) and all(isinstance(row, dict) for row in data):
        if partial:
            _check_same_columns(data, key, order)
        rows = _last_of_dicts(data, key, order)
        return rows if kept else [{name: value for name, value in row.items() if name != order} for row in rows]
    schema, batches = in_memory_batches(data, target.shape())
    table = last_of_table(pa.Table.from_batches(batches, schema), key, order)
    return table if kept else table.drop_columns([order])


def _check_same_columns(rows: Sequence[Row], key: Sequence[str], order: str) -> None:
    """Of a partial merge: the last row of a key would drop columns that only an earlier one brings."""
    columns: dict[tuple[Value, ...], frozenset[str]] = {}
    for row in rows:
        if columns.setdefault(tuple(row.get(name) for name in key), frozenset(row)) != frozenset(row):
            raise Invalid(
                "rows of one key have different columns, so none of them can be chosen as the last",
                column=order,
                advice="Send each key once, or rows that all have the same columns.",
            )


def _last_of_dicts(rows: Sequence[Row], key: Sequence[str], order: str) -> list[Row]:
    last: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        if order not in row:
            raise Invalid("there is no such column for the order", column=order, advice=nearest(order, list(row)))
        best = last.setdefault(tuple(row.get(name) for name in key), [row])
        try:
            if _before(best[0][order], row[order]):
                best[:] = [row]
            elif best[0][order] == row[order] and row not in best:
                best.append(row)
        except TypeError as error:
            raise Invalid("the values of the order column cannot be compared", column=order, cause=error) from error
    return [row for best in last.values() for row in best]


def _before(one: Any, other: Any) -> bool:
    """Null is the lowest."""
    return other is not None and (one is None or bool(one < other))


def by_lacking(data: RowsLike, fills: Sequence[Fill], target: StageTarget) -> list[tuple[RowsLike, tuple[Fill, ...]]]:
    """The rows in parts, with the fills whose columns the rows of a part do not bring. A sent null counts as brought.

    Dicts are separated one by one, other rows by their columns. Stage what is returned: the given rows may be used up.
    """
    if not fills:
        return [(data, ())]
    if isinstance(data, list | tuple):
        if not data or not all(isinstance(row, dict) for row in data):
            return [(data, ())]
        parts: dict[tuple[Fill, ...], list[Row]] = {}
        for row in data:
            parts.setdefault(lacking(fills, row), []).append(row)
        return [(rows, missing) for missing, rows in parts.items()]
    schema, rows = incoming_schema(data, target.shape())
    return [(rows, lacking(fills, schema.names))]


# ── columns that are left out ──


def check_whole(data: RowsLike, shape: Shape, filled: Collection[str], *, evolve: bool) -> RowsLike:
    """Refuse rows to be merged that leave out a column of the table, but for those that the table fills by itself.

    Returns the rows: the given ones may be used up.
    """
    names = [column.name for column in shape.columns if column.name not in filled]
    return _checked(data, shape, names, evolve=evolve, advice=LEFT_OUT_ADVICE)


def by_columns(
    data: RowsLike | Parts, shape: Shape, *, evolve: bool
) -> tuple[pa.Schema, list[tuple[tuple[str, ...], RowsLike]]]:
    """The rows of a partial merge, by the columns that they bring: all columns, and (names, rows) of each part."""
    key = [column.name for column in shape.columns if _field_id(shape, column) in shape.schema.identifier_field_ids]
    if isinstance(data, Parts):
        found = [by_columns(frame, shape, evolve=evolve) for frame in data.frames]
        return pa.unify_schemas([schema for schema, _ in found]), [part for _, parts in found for part in parts]
    data = _checked(data, shape, key, evolve=evolve, advice=_KEY)
    schema, rows = incoming_schema(data, shape)
    if not isinstance(rows, list | tuple):
        return schema, [(tuple(schema.names), rows)]
    parts: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        parts.setdefault(frozenset(row), []).append(row)
    if len(parts) > PARTS_MAX:
        raise Invalid(
            "the rows have too many different sets of columns",
            sets=len(parts),
            most=PARTS_MAX,
            advice="Merge them in several calls, or send the same columns in every row.",
        )
    return schema, [(tuple(name for name in schema.names if name in names), some) for names, some in parts.items()]


def _field_id(shape: Shape, column: Column) -> int:
    return int(shape.schema.find_field(column.name).field_id)


def _checked(data: RowsLike, shape: Shape, needed: Sequence[str], *, evolve: bool, advice: str) -> RowsLike:
    if isinstance(data, list | tuple):
        problems = _dict_problems(data, shape, needed, evolve=evolve, advice=advice)
    else:
        schema, data = incoming_schema(data, shape)
        problems = []
        for problem in Conformer(shape, schema).problems.all():
            if problem.problem != MISSING:
                problems += [] if evolve else [problem]
            elif "." in problem.column and problem.column not in shape.file_schema.names:
                problems.append(replace(problem, advice=_INSIDE))
            elif problem.column in needed:
                problems.append(replace(problem, advice=advice))
    # Other problems alone are left to staging, which sees the values too; a part is staged without the other columns.
    if advice == _KEY or any(problem.problem == MISSING for problem in problems):
        Misfits(problems).raise_invalid(in_all=False)
    return data


def _dict_problems(
    rows: Sequence[Row], shape: Shape, needed: Sequence[str], *, evolve: bool, advice: str
) -> list[Problem]:
    names = {column.name for column in shape.columns}
    structs = [column for column in shape.columns if column.children]
    required, problems = frozenset(needed), Misfits()
    # Rows of one source mostly have the same columns: each set of them is checked once.
    counts: dict[frozenset[str], int] = {}
    for row in rows:
        if not isinstance(row, dict):
            return []  # staging reports it
        brought = frozenset(row)
        counts[brought] = counts.get(brought, 0) + 1
        for column in structs:
            for path in _left_out_inside(row.get(column.name), column):
                problems.add(Problem(path, MISSING, 1, _INSIDE))
    for brought, count in counts.items():
        for name in (name for name in needed if name not in brought) if not required <= brought else ():
            problems.add(Problem(name, MISSING, count, advice))
        for name in () if evolve else brought - names:
            hint = nearest(str(name), sorted(names)) + " Leave it out, or add the column to the table first."
            problems.add(Problem(str(name), "the table has no such column", count, hint))
    return list(problems.all())


def _left_out_inside(value: Value, column: Column) -> Iterator[str]:
    """The fields that structs inside a value leave out. A value that does not fit the column is left to staging."""
    kind = column.field.type
    if pa.types.is_struct(kind) and isinstance(value, dict):
        for child in column.children:
            if child.name not in value:
                yield child.path
            else:
                yield from _left_out_inside(value[child.name], child)
    elif pa.types.is_map(kind) and isinstance(value, dict):
        for item in value.values():
            yield from _left_out_inside(item, column.children[1])
    elif pa.types.is_list(kind) and isinstance(value, list | tuple):
        for element in value:
            yield from _left_out_inside(element, column.children[0])
