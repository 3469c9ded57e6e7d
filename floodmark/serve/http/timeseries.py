"""The figures of the last ten minutes, for charts: rows per second, the lag of sinks, rows that wait in spools.

Rows come from the commits themselves, so they are right also after a restart. The past state of sinks and spools is
stored nowhere: the server samples it every few seconds, and where it did not, nothing is known. Bounded: a ring of
steps, of a bounded number of names.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import and_, func, select

from floodmark import log
from floodmark.catalog import tables
from floodmark.commit.catalog import Catalog
from floodmark.json_form import Reported
from floodmark.model import MAIN
from floodmark.report.sinks import read_sinks
from floodmark.report.spools import read_spools
from floodmark.serve.http.workers import Workers

STEP_S = 5
STEPS = 120
# This many tables or sinks have a line of their own: those with the largest figures.
NAMES_MAX = 50
CHANGES = ("added", "updated", "deleted")
_STEP_MS = STEP_S * 1000


@dataclass(frozen=True)
class RecentFigures(Reported):
    """The last ten minutes, by the name of a table or sink: a figure for each of the moments `at_ms`, None if unknown.

    A moment is the end of a step of `step_s` seconds.
    """

    step_s: int
    at_ms: tuple[int, ...]
    rows_per_s: Mapping[str, tuple[float | None, ...]]
    lag_rows: Mapping[str, tuple[float | None, ...]]
    lag_s: Mapping[str, tuple[float | None, ...]]
    waiting_rows: Mapping[str, tuple[float | None, ...]]


class Tail:
    """The commits of main since a moment, each counted once: `totals` by table and change, `steps` by their time."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._version: int | None = None
        self.totals: Counter[tuple[str, str]] = Counter()
        self.steps: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def catch_up(self) -> int:
        """Count the commits since the last call; returns the time, by the database's clock."""
        commit, touched = tables.commits, tables.commit_tables
        with self._catalog.database.read() as tx:
            now_ms = self._catalog.database.now_ms(tx)
            if self._version is None:
                old = select(func.max(commit.c.version)).where(commit.c.committed_ms < now_ms - STEPS * _STEP_MS)
                self._version = tx.execute(old).scalar() or 0
            counts = [touched.c[f"rows_{change}"] for change in CHANGES]
            query = (
                select(commit.c.version, commit.c.committed_ms, commit.c.kind, touched.c.table_name, *counts)
                .join(touched, touched.c.version == commit.c.version)
                # Rows that retention deletes are not the work of writers.
                .where(and_(commit.c.version > self._version, commit.c.branch == MAIN, commit.c.kind != "retain"))
            )
            rows = tx.execute(query).all()
        for row in rows:
            self._version = max(self._version, row.version)
            step = _step(row.committed_ms)
            for change in CHANGES:
                number = getattr(row, f"rows_{change}")
                self.totals[row.table_name, change] += number
                self.steps[step][row.table_name] += number
        for step in [step for step in self.steps if step <= _step(now_ms) - STEPS]:
            del self.steps[step]
        return now_ms


class Figures:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._tail = Tail(catalog)
        self._lock = threading.Lock()
        # By step: the name of a figure, and then that of a sink or table.
        self._samples: dict[int, dict[str, dict[str, float | None]]] = {}

    async def run(self, workers: Workers) -> None:
        """Sample for as long as the server runs."""
        while True:
            try:
                await workers.ask(self.sample)
            except Exception as error:  # noqa: BLE001 - the chart gets a gap; requests for the state report the error
                log.get().info("figures could not be sampled", cause=str(error))
            await asyncio.sleep(STEP_S)

    def sample(self) -> None:
        sinks, spools = read_sinks(self._catalog, ()), read_spools(self._catalog)
        found: dict[str, dict[str, float | None]] = {
            "lag_rows": {one.sink: one.lag_rows for one in sinks[:NAMES_MAX]},
            "lag_s": {one.sink: one.lag_ms / 1000 for one in sinks[:NAMES_MAX]},
            "waiting_rows": {one.table: one.waiting_rows for one in spools[:NAMES_MAX]},
        }
        with self._lock:
            step = _step(self._tail.catch_up())
            self._samples[step] = found
            self._samples = {one: kept for one, kept in self._samples.items() if one > step - STEPS}

    def totals(self) -> dict[tuple[str, str], int]:
        """Rows committed since this process began to count, by table and change."""
        with self._lock:
            self._tail.catch_up()
            return dict(self._tail.totals)

    def series(self) -> RecentFigures:
        """The current step is left out: it is not complete yet."""
        with self._lock:
            last = _step(self._tail.catch_up())
            wanted = range(last - STEPS, last)
            return RecentFigures(
                step_s=STEP_S,
                at_ms=tuple((step + 1) * _STEP_MS for step in wanted),
                rows_per_s=self._rates(wanted),
                lag_rows=self._sampled("lag_rows", wanted),
                lag_s=self._sampled("lag_s", wanted),
                waiting_rows=self._sampled("waiting_rows", wanted),
            )

    def _rates(self, wanted: range) -> dict[str, tuple[float | None, ...]]:
        by_table: Counter[str] = Counter()
        for step in wanted:
            by_table.update(self._tail.steps.get(step, {}))
        names = sorted(name for name, _ in by_table.most_common(NAMES_MAX))
        none: Counter[str] = Counter()
        return {name: tuple(self._tail.steps.get(step, none)[name] / STEP_S for step in wanted) for name in names}

    def _sampled(self, figure: str, wanted: range) -> dict[str, tuple[float | None, ...]]:
        found = {step: self._samples[step][figure] for step in wanted if step in self._samples}
        names = sorted({name for one in found.values() for name in one})[:NAMES_MAX]
        return {name: tuple(found.get(step, {}).get(name) for step in wanted) for name in names}


def _step(time_ms: int) -> int:
    return time_ms // _STEP_MS
