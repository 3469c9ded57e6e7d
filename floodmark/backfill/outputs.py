"""A chunk's rows and what comes of them: for each output table, once, without asking the source twice.

`chunk` stands for the chunk's rows. If a table takes them as they are, they are staged for it first, and everything
else is computed from those files: so all tables of a chunk come from one reading of the source, and look the same when
a table is added later and the rows are read from the lake. Views are named for one chunk of one try, and dropped with
it; threads that share a session never meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from floodmark import clock
from floodmark.backfill.spec import CHUNK, Definition, references
from floodmark.errors import Invalid
from floodmark.rows.failures import spark_job
from floodmark.rows.query import named_tables, run_query
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame, SparkSession


def is_frame(data: Any) -> bool:
    return hasattr(data, "mapInArrow")  # a Spark DataFrame, classic or Connect


class Outputs:
    """What comes into each table, by its definition, for one chunk. Used in a `with` block."""

    def __init__(self, definitions: Mapping[str, Definition], data: Any, sessions: Sessions, uses: int) -> None:
        """`uses`: how often the rows are asked for, at most; if more than once, they are computed once."""
        self._definitions = definitions
        self._sessions = sessions
        self._data = _reusable(data) if uses > 1 else data
        self._kept: DataFrame | None = None
        self._frames: dict[str, DataFrame] = {}
        self._views: list[str] = []
        self._token = clock.new_id().lower()
        if uses > 1 and is_frame(data):
            self._data = self._kept = data.persist()

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        for view in self._views:
            self._sessions.get().catalog.dropTempView(view)
        if self._kept is not None:
            self._kept.unpersist()

    def of(self, table: str) -> Any:
        """The rows that come into a table: the chunk's own in whatever form they came, else a DataFrame."""
        if self._definitions[table] is None:
            return self._data
        return self._frame(table)

    def staged(self, rows: DataFrame) -> None:
        """The chunk's rows are staged: these are them, read from there."""
        self._frames[CHUNK] = rows
        if is_frame(self._data):
            self._data = rows

    def count(self, column: str | None = None) -> int:
        """How many rows the chunk has; with `column`, how many values there are in it, each counted once."""
        if not is_frame(self._data):
            rows = to_table(self._data)
            return int(rows.num_rows if column is None else pc.count_distinct(rows[column]).as_py())
        with spark_job(self._data.sparkSession, "Spark could not count the rows of a chunk"):
            return int((self._data if column is None else self._data.select(column).dropna().distinct()).count())

    def _frame(self, table: str) -> DataFrame:
        if table not in self._frames:
            self._frames[table] = self._computed(table)
        return self._frames[table]

    def _computed(self, table: str) -> DataFrame:
        definition = CHUNK if table == CHUNK else self._definitions[table]
        if table == CHUNK:
            return self._data if is_frame(self._data) else to_frame(self._sessions.get(), self._data)
        if definition is None:
            return self._frame(CHUNK)
        if callable(definition):
            return definition(self._frame(CHUNK))
        named = references(table, definition, self._definitions, self._sessions)
        named += named_tables(definition, {CHUNK: None})
        # By their places, since not every name of a table can be part of a view's name.
        tables = {name: (f"{self._token}{len(self._views) + place}", None) for place, name in enumerate(named)}
        self._views += [f"_floodmark_{token}_0" for token, _ in tables.values()]
        return run_query(self._sessions.get(), definition, tables, self._frame)


def _reusable(data: Any) -> Any:
    """Rows that can be read more than once; whatever else gives them as Arrow may do so only once."""
    known = is_frame(data) or isinstance(data, list | tuple | pa.Table | pa.RecordBatch) or hasattr(data, "iloc")
    return data if known else to_table(data)


def to_table(data: Any) -> pa.Table:
    """Rows in memory as an Arrow table; their types are those of their values."""
    if isinstance(data, list | tuple):
        return pa.Table.from_pylist(list(data))
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data).read_all()
    raise Invalid(
        "these are not rows",
        given=type(data).__name__,
        advice="Return a Spark DataFrame, an Arrow table or reader, a pandas DataFrame or a list of dicts.",
    )


def to_frame(spark: SparkSession, data: Any) -> DataFrame:
    table = to_table(data)
    if not table.num_columns:
        raise Invalid(
            "rows that are none have no columns to compute from",
            advice="Return an Arrow table or a DataFrame, or let a table take the rows as they are.",
        )
    return spark.createDataFrame(table)


def order_of(tables: Sequence[str], definitions: Mapping[str, Definition]) -> list[str]:
    """The tables that take the rows as they are come first: the others are computed from what was staged for them."""
    return sorted(tables, key=lambda table: definitions[table] is not None)
