"""Rows on their way in: which of several with one key counts, if the caller named a column that tells their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from floodmark.rows.duplicates import last_of_dataframe, last_of_table
from floodmark.rows.stage import StageTarget, in_memory_batches


def last_of(data: Any, key: Sequence[str], order: str, target: StageTarget) -> Any:
    """The rows with, of each key, only the last in the order of a column. An order column that is not the table's goes.

    Data in memory stays there; a reader is read to its end.
    """
    known = {column.name for column in target.shape().columns}
    if hasattr(data, "mapInArrow"):
        last = last_of_dataframe(data, key, order)
        names = [name for name in last.columns if name != order]
        return last if order in known else last.select(*(f"`{name.replace('`', '``')}`" for name in names))
    schema, batches = in_memory_batches(data, target.shape())
    table = last_of_table(pa.Table.from_batches(batches, schema), key, order)
    return table if order in known else table.drop_columns([order])
