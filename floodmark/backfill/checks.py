"""What a chunk's rows must be before they are published: as many as were said, and of the chunk's range.

All is told by the records of what was staged, so rows are not read again; only that each number is there once takes a
look at one column. What is wrong is Invalid, and names the chunk.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

import numpy as np

from floodmark.backfill.geometry import Chunk, value_text
from floodmark.backfill.ranges import TableRange
from floodmark.backfill.run import Room
from floodmark.backfill.spec import HistorySpec, table_range
from floodmark.errors import Invalid
from floodmark.model import FileRecord
from floodmark.rows.project import read_file

_DAY_US = 86_400_000_000


class Checks:
    """Of the chunks of one job."""

    def __init__(self, room: Room, spec: HistorySpec) -> None:
        self._room = room
        self._spec = spec

    @property
    def are_counted(self) -> bool:
        """Whether anything was said about how many rows a chunk has."""
        return self._spec.rows_exact or self._spec.rows_min is not None or self._spec.rows_max is not None

    def rows(self, chunk: Chunk, rows: int) -> None:
        spec = self._spec
        low, high = spec.rows_min, spec.rows_max
        if spec.rows_exact:
            start, end = spec.geometry.ends(chunk.number)
            low = high = end - start
        if low is not None and rows < low:
            raise Invalid("a chunk has too few rows", chunk=chunk.name, rows=rows, rows_min=low)
        if high is not None and rows > high:
            raise Invalid("a chunk has too many rows", chunk=chunk.name, rows=rows, rows_max=high)

    def distinct(self, chunk: Chunk, table: str, records: Iterable[FileRecord]) -> None:
        """One row for every number means each number once: the one column of what was staged is read again."""
        spec = self._spec
        if not spec.rows_exact or spec.column is None:
            return
        column = table_range(self._room, spec.geometry, table, spec.column).column
        storage = self._room.catalog.storage
        batches = (batch for record in records for batch in read_file(storage, record.path, [column]))
        values = np.concatenate([np.empty(0, np.int64), *(batch.column(0).to_numpy() for batch in batches)])
        numbers = len(np.unique(values))
        if numbers != len(values):
            raise Invalid(
                "a chunk has several rows for one number",
                chunk=chunk.name,
                column=spec.column,
                rows=len(values),
                numbers=numbers,
            )

    def within(self, chunk: Chunk, table: str, records: Iterable[FileRecord]) -> None:
        """Rows belong to their chunk: by the statistics that were written with them, so nothing is read again."""
        spec = self._spec
        if spec.column is None:
            return
        start, end = spec.geometry.ends(chunk.number)
        column = table_range(self._room, spec.geometry, table, spec.column)
        for record in records:
            span = staged_span(column, record)
            if span is None:
                raise Invalid(
                    "rows of a chunk have no value in the range column",
                    chunk=chunk.name,
                    table=table,
                    column=spec.column,
                    advice=_advice(spec, table),
                    rows=record.null_counts.get(column.column.field_id),
                )
            if span[0] < start or span[1] >= end:
                raise Invalid(
                    "rows of a chunk are outside of its range",
                    chunk=chunk.name,
                    table=table,
                    column=spec.column,
                    lowest=value_text(spec.geometry.shown_within(span[0])),
                    highest=value_text(spec.geometry.shown_within(span[1])),
                    advice=_advice(spec, table),
                )


def _advice(spec: HistorySpec, table: str) -> str:
    if spec.tables[table] is None:
        return ""
    return "A floor takes rows out by this column: in a table that is computed, call such a value something else."


def staged_span(column: TableRange, record: FileRecord) -> tuple[int, int] | None:
    """The lowest and the highest inner value in a staged file; None if some row has none, or it cannot be told."""
    field = column.column.field_id
    low, high = record.lower_bounds.get(field), record.upper_bounds.get(field)
    if record.value_counts.get(field) != record.rows or record.null_counts.get(field) != 0 or not (low and high):
        return None
    unit = _DAY_US if column.by_day else 1
    found = [int.from_bytes(base64.b64decode(bound), "little", signed=True) * unit for bound in (low, high)]
    return found[0], found[1]
