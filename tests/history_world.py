"""A history in memory for tests: a source that counts how it is asked and fails where it is told to, and its job."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.history import HistorySpec, run_history
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import JobContext
from floodmark.rows.session import Sessions
from floodmark.runs import JobCallback
from tests.without_spark import NO_SPARK

Row = dict[str, Any]


def room_of(lake: fm.Lake, sessions: Sessions = NO_SPARK) -> JobContext:
    return JobContext(replace(lake.engine, sessions=sessions, actor="test"))


def number_rows(chunk: Chunk) -> list[Row]:
    """One row for every number of the chunk."""
    assert isinstance(chunk.start, int)
    assert isinstance(chunk.end, int)
    return [{"id": number, "name": f"row {number}"} for number in range(chunk.start, chunk.end)]


class Numbers:
    """A source of rows in memory. `act`: what happens instead at the nth reading of a chunk, by (name, n) or name."""

    def __init__(
        self,
        tip: Any = None,
        rows: Callable[[Chunk], Any] = number_rows,
        act: Mapping[Any, Callable[[Chunk], Any]] | None = None,
    ) -> None:
        self.now = tip
        self._rows = rows
        self._act = act or {}
        self._lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.order: list[str] = []

    def tip(self) -> Any:
        return self.now() if callable(self.now) else self.now

    def read(self, chunk: Chunk) -> Any:
        with self._lock:
            self.asked[chunk.name] += 1
            self.order.append(chunk.name)
            number = self.asked[chunk.name]
        act = self._act.get((chunk.name, number)) or self._act.get(chunk.name)
        return self._rows(chunk) if act is None else act(chunk)


def history(
    source: Any,
    tables: str | Mapping[str, Any] = "events",
    *,
    first: Any = 0,
    last: Any = 50,
    chunk: Any = 10,
    column: str | None = "id",
    **options: Any,
) -> HistorySpec:
    """A job of five chunks of ten rows, unless told otherwise; impatient."""
    outputs: Mapping[str, Any] = {tables: None} if isinstance(tables, str) else tables
    geometry = Geometry.of(first, last, chunk)
    quick: dict[str, Any] = {"name": "years", "workers": 1, "retry_s": 0.01, "poll_s": 0.01, **options}
    return HistorySpec(source=source, tables=outputs, geometry=geometry, column=column, **quick)


def run(lake: fm.Lake, spec: HistorySpec, progress: JobCallback | None = None, **changes: Any) -> BackfillRun:
    return run_history(room_of(lake), replace(spec, **changes) if changes else spec, "test", progress)


def chunk_rows(lake: fm.Lake, job: str = "years") -> dict[tuple[str, int], tuple[str, int]]:
    """Per table and chunk, its state and rows."""
    found = lake.catalog.chunks.of(lake.catalog.jobs.find(job).id)
    return {(state.table, state.chunk): (state.state, state.rows) for state in found}


def numbers_done(lake: fm.Lake, table: str = "events", job: str = "years") -> list[int]:
    return sorted(chunk for name, chunk in chunk_rows(lake, job) if name == table)


def steps_of() -> tuple[list[tuple[int, int | None]], JobCallback]:
    told: list[tuple[int, int | None]] = []
    return told, lambda processed, total: told.append((processed, total))
