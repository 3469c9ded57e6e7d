"""Rows on their way in: which of several with one key counts, if the caller named a column that tells their order; and
which of them bring the columns that an expression would fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from floodmark.catalog.fills import Fill, lacking
from floodmark.errors import Invalid
from floodmark.rows.duplicates import last_of_dataframe, last_of_table
from floodmark.rows.schema import nearest
from floodmark.rows.stage import StageTarget, in_memory_batches, incoming_schema


def last_of(data: Any, key: Sequence[str], order: str, target: StageTarget) -> Any:
    """The rows with, of each key, only the last in the order of a column. An order column that is not the table's goes.

    Rows of one key with the same order stay both, unless they are equal: they are refused later, with examples. Data in
    memory stays there; a reader is read to its end.
    """
    kept = order in {column.name for column in target.shape().columns}
    if hasattr(data, "mapInArrow"):
        last = last_of_dataframe(data, key, order)
        names = [name for name in last.columns if name != order]
        return last if kept else last.select(*(f"`{name.replace('`', '``')}`" for name in names))
    if isinstance(data, list | tuple) and all(isinstance(row, dict) for row in data):
        rows = _last_of_dicts(data, key, order)
        return rows if kept else [{name: value for name, value in row.items() if name != order} for row in rows]
    schema, batches = in_memory_batches(data, target.shape())
    table = last_of_table(pa.Table.from_batches(batches, schema), key, order)
    return table if kept else table.drop_columns([order])


def _last_of_dicts(rows: Sequence[dict[str, Any]], key: Sequence[str], order: str) -> list[dict[str, Any]]:
    last: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
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


def by_lacking(data: Any, fills: Sequence[Fill], target: StageTarget) -> list[tuple[Any, tuple[Fill, ...]]]:
    """The rows in parts, with the fills whose columns the rows of a part do not bring. A null that is sent is brought.

    Dicts are told apart one by one, other rows by their columns. Stage what is returned: the given rows may be used up.
    """
    if not fills:
        return [(data, ())]
    if isinstance(data, list | tuple):
        if not data or not all(isinstance(row, dict) for row in data):
            return [(data, ())]
        parts: dict[tuple[Fill, ...], list[Any]] = {}
        for row in data:
            parts.setdefault(lacking(fills, row), []).append(row)
        return [(rows, missing) for missing, rows in parts.items()]
    schema, rows = incoming_schema(data, target.shape())
    return [(rows, lacking(fills, schema.names))]
