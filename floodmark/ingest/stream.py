"""Structured Streaming into a table: each micro-batch exactly once.

Spark may run a micro-batch again (a crash after its rows were committed and before its checkpoint was): the query's id
and the batch's number are committed with the rows, so the second run is a no-op, also after a restart, also if the old
driver is still alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from floodmark.errors import Invalid
from floodmark.model import Commit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODES = ("append", "merge", "overwrite")
_OPTIONS = {
    "append": {"evolve"},
    "merge": {"evolve", "order", "partial", "skip_unchanged"},
    "overwrite": {"evolve", "where"},
}
_QUERY_ID = "sql.streaming.queryId"


class StreamWriter:
    """Hand it to `writeStream.foreachBatch`. `last` is the newest batch's commit."""

    def __init__(
        self,
        write: Callable[[DataFrame, str, int, int | None], Commit],
        mode: str,
        query: str | None,
        options: Collection[str],
        expected: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise Invalid(
                "a stream cannot be written in this mode", mode=mode, advice=f"Use one of {', '.join(MODES)}."
            )
        if unknown := set(options) - _OPTIONS[mode]:
            raise Invalid("this mode has no such option", mode=mode, option=sorted(unknown)[0])
        self._write = write
        self._query = query
        # At which version the table has to be unchanged since.
        self._expected = expected
        self.last: Commit | None = None

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        query = self._query or _query_id(df)
        if query is None:
            raise Invalid(
                "the stream's id is not known here",
                advice='Give it: lake.stream_writer(table, query="…"), the same at every start of this stream.',
            )
        self.last = self._write(df, query, batch_id, self._expected)
        # Of a batch that is replayed the version is an earlier one, and others may have written since.
        if self._expected is not None and self.last.outcome == "committed":
            self._expected = self.last.version


def _query_id(df: DataFrame) -> str | None:
    """The id that Spark gave the query and keeps in its checkpoint; a remote session has none."""
    try:
        context = df.sparkSession.sparkContext
    except Exception:  # noqa: BLE001 - Spark Connect has none, and says so with an error of its own
        return None
    found = context.getLocalProperty(_QUERY_ID)
    return str(found) if found else None
