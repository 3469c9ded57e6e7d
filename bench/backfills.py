"""Backfills: what chunks, batches and progress cost, and whether others wait for a job that is live.

History: the same rows as chunks of a job and as one plain Spark write: from Parquet files, a file for each chunk, and
computed by the same expressions. Each chunk is checked, comes once and is durable; Spark's write is one job that leaves
the disk to the system. Spark compiles code for every range of numbers that it computes, and runs it cold: computed
chunks pay for that, one plain write once. A function that returns Arrow tables, read from the files, needs no Spark.

A column: the job, on a lake that is put back before each turn, and the line that a user would write: read these files,
add the column, write them, with the lake's codec and level; besides, the same through `lake.overwrite`.

Progress: the time inside of it, as a share of the run's. The probe (tests/simulation/probe.py) calls from this process
while the job runs in another: in all is what a user would see, the other figure is without waiting for a core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import clear_manifest_cache
from sqlalchemy.exc import SQLAlchemyError

import floodmark
from bench.compaction import events
from bench.keyed import ZSTD
from bench.machine import own_busy_s
from bench.measure import Goal, Line, Samples, not_measured, rate, ratio, timed, times_in_turns, took
from bench.workshop import FIRST_MS, KEYS, QUICK, SCHEMA, TABLE, Workshop
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.jobs.progress import JobProgress
from floodmark.jobs.record import BackfillRun
from floodmark.lake import Lake
from floodmark.testing.postgres import postgres_server
from tests.conftest import Place
from tests.simulation import probe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OVERHEAD = Goal(2.0)


@dataclass(frozen=True)
class Sizes:
    rows: int = 5_000_000
    # How many chunks, and the least part of a plain write's rows in a second that they come to.
    chunks: tuple[tuple[int, float], ...] = ((10, 0.7), (100, 0.35))
    repeats: int = 3
    probe_files: int = 40
    probe_file_rows: int = 2_000
    probes: int = 3


FULL = Sizes()
LITTLE = Sizes(rows=40_000, chunks=((2, 0.7), (4, 0.35)), repeats=1, probe_files=6, probe_file_rows=200, probes=1)


def run(shop: Workshop) -> Iterator[Line]:
    # Before there is a JVM to share the cores with.
    yield from _probed(shop)
    for chunks, least in _sizes(shop).chunks:
        yield from _history(shop, chunks, Goal(least, at_least=True))
    table = _Table(shop)
    yield from _column(table, "upper(k)", Goal(2.0))
    yield from _column(table, "amount * 1.19D + n", Goal(2.0))
    yield from _column(table, "k", Goal(2.0))


def _sizes(shop: Workshop) -> Sizes:
    return LITTLE if shop.sizes is QUICK else FULL


# ── what is measured of a run ──


@dataclass
class _Sides:
    """Seconds of the cores that each side took, and the share of a run that was progress, at every turn."""

    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    progress: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, name: str, action: Callable[[], object]) -> float:
        """Seconds of one call, with nothing left to flush."""
        os.sync()
        before = own_busy_s()
        with _inside_progress() as inside_s:
            took_s = timed(action)
        self.cpu_s.setdefault(name, []).append(own_busy_s() - before)
        self.progress.setdefault(name, []).append(100 * sum(inside_s) / took_s)
        return took_s

    def cpu(self, name: str, repeats: int) -> Samples:
        return Samples(tuple(self.cpu_s[name][-repeats:]))

    def overhead(self, what: str, name: str, repeats: int) -> Line:
        shares = self.progress[name][-repeats:]
        figure = Samples(tuple(shares)).median
        return Line(f"progress, {what}", " %", figure, min(shares), max(shares), len(shares), OVERHEAD)


@contextmanager
def _inside_progress() -> Iterator[list[float]]:
    """What each call of a run's progress took; pauses are none of it."""
    found: list[float] = []
    here = threading.local()

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            outermost, started_s = not getattr(here, "inside", False), time.perf_counter()
            here.inside = True
            try:
                method(*arguments, **options)
            finally:
                if outermost:
                    here.inside = False
                    found.append(time.perf_counter() - started_s)

        return call

    step, check = watched(JobProgress.step), watched(JobProgress.check)
    with patch.object(JobProgress, "step", step), patch.object(JobProgress, "check", check):
        yield found


def _done(run: BackfillRun) -> BackfillRun:
    if run.outcome != "done":
        raise RuntimeError(f"the backfill did not end well: {run.as_dict()}")
    return run


# ── history ──


def rows_between(spark: SparkSession, first: int, last: int) -> DataFrame:
    """A row for every number, made by Spark's own expressions."""
    return spark.range(first, last).selectExpr(
        "id",
        f"timestamp_millis({FIRST_MS} + id * 10) AS ts",
        f"concat('key-', pmod(xxhash64(id, 1), {KEYS})) AS k",
        "pmod(xxhash64(id, 2), 1000003) / 100.0D AS amount",
        "CAST(pmod(xxhash64(id, 3), 97) AS INT) AS n",
    )


def _history(shop: Workshop, chunks: int, goal: Goal) -> Iterator[Line]:
    sizes, sides, spark = _sizes(shop), _Sides(), shop.spark
    case, folder = f"{chunks} × {sizes.rows // chunks:,}", shop.new_path("history-input")
    shop.say(f"a history of {case} rows")
    _write_files(folder, sizes.rows, chunks)

    def load(name: str, source: Read | str) -> float:
        with shop.new_lake("history") as lake:
            lake.create_table(TABLE, SCHEMA)
            took_s = sides.timed(name, lambda: _load(lake, source, sizes.rows, chunks))
            if lake.tables()[0]["rows"] != sizes.rows:
                raise RuntimeError(f"the history has {lake.tables()[0]['rows']} rows of {sizes.rows}")
        shutil.rmtree(lake.location.removeprefix("file://"))
        return took_s

    def write(name: str, frame: Callable[[], DataFrame]) -> float:
        path = shop.new_path("history-plain")
        took_s = sides.timed(name, lambda: frame().write.parquet(str(path)))
        shutil.rmtree(path)
        return took_s

    def read_arrow(chunk: Chunk) -> pa.Table:
        return pq.read_table(folder / f"{chunk.start}.parquet")

    forms = {
        "files": "Parquet files",
        "computed": "computed by Spark",
        "arrow": "Parquet files, by a function as Arrow",
    }
    measures = (
        partial(load, "files", f"{folder}/{{start}}.parquet"),
        partial(load, "computed", _frames(spark)),
        partial(load, "arrow", read_arrow),
        partial(write, "plain files", lambda: spark.read.parquet(str(folder))),
        partial(write, "plain computed", lambda: rows_between(spark, 0, sizes.rows)),
    )
    # The first ones compile code and start Python workers; what is asked for is a session at work.
    times_in_turns(2, *measures)
    *ours, plain_files, plain_computed = times_in_turns(sizes.repeats, *measures)
    shutil.rmtree(folder)
    for name, times in zip(forms, ours, strict=True):
        yield rate(f"history, {case}, {forms[name]}", times, sizes.rows, "2 workers, each chunk once, durable")
    note = "snappy (Spark's default), not durable"
    yield rate(f"one plain Spark write, {forms['files']}, beside {case}", plain_files, sizes.rows, note)
    yield rate(f"one plain Spark write, {forms['computed']}, beside {case}", plain_computed, sizes.rows, note)
    for (name, form), times in zip(forms.items(), ours, strict=True):
        against, plain = ("plain computed", plain_computed) if name == "computed" else ("plain files", plain_files)
        # Rows in a second, so the quicker one is below.
        wanted = None if name == "arrow" else goal
        yield ratio(f"rows/s, history against plain, {case}, {form}", plain, times, goal=wanted)
        plain_cpu, cpu = sides.cpu(against, sizes.repeats), sides.cpu(name, sizes.repeats)
        note = f"{plain_cpu.median:.1f} s and {cpu.median:.1f} s"
        yield ratio(f"rows per CPU second, history against plain, {case}, {form}", plain_cpu, cpu, note=note)
        yield sides.overhead(f"history, {case}, {form}", name, sizes.repeats)


Read = Callable[[Chunk], Any]


def _frames(spark: SparkSession) -> Read:
    def read(chunk: Chunk) -> DataFrame:
        assert isinstance(chunk.start, int)
        assert isinstance(chunk.end, int)
        return rows_between(spark, chunk.start, chunk.end)

    return read


def _load(lake: Lake, source: Read | str, rows: int, chunks: int) -> None:
    _done(lake.backfill.history("bench", source, TABLE, chunk=rows // chunks, first=0, last=rows, column="id"))


def _write_files(folder: Path, rows: int, chunks: int) -> None:
    """A file for every chunk, with rows of the same kind."""
    folder.mkdir()
    size = rows // chunks
    for first in range(0, rows, size):
        found = events(first, size)
        found = found.set_column(found.schema.get_field_index("n"), "n", found["n"].cast(pa.int32()))
        pq.write_table(found, folder / f"{first}.parquet")


# ── a column ──


class _Table:
    """A lake with a table that a history has loaded; put back before each turn."""

    def __init__(self, shop: Workshop) -> None:
        self.shop, self.rows = shop, _sizes(shop).rows
        shop.say(f"a table of {self.rows:,} rows for a new column")
        self.path, self._kept = shop.new_path("column"), shop.new_path("column-kept")
        with floodmark.open(self.path, create=True, actor="bench") as lake:
            lake.create_table(TABLE, SCHEMA)
            _load(lake, _frames(shop.spark), self.rows, _sizes(shop).chunks[0][0])
            self.files = sorted(lake.catalog.files.data_files(lake.catalog.history.head(TABLE)))
        _copy(self.path, self._kept)

    @contextmanager
    def put_back(self) -> Iterator[Lake]:
        shutil.rmtree(self.path)
        _copy(self._kept, self.path)
        clear_manifest_cache()
        with floodmark.open(self.path, spark=self.shop.spark, actor="bench") as lake:
            yield lake


def _copy(source: Path, target: Path) -> None:
    """A folder as it is: data files never change, so that a second name will do."""

    def copy(one: str, other: str) -> None:
        (os.link if one.endswith(".parquet") else shutil.copyfile)(one, other)

    shutil.copytree(source, target, copy_function=copy)


def _column(table: _Table, expression: str, goal: Goal) -> Iterator[Line]:
    shop, repeats, sides = table.shop, _sizes(table.shop).repeats, _Sides()
    shop.say(f"a column of {expression}")

    def fill(name: str, **options: Any) -> float:
        with table.put_back() as lake:
            runs: list[BackfillRun] = []
            took_s = sides.timed(name, lambda: runs.append(lake.backfill.column(TABLE, "added", expression, **options)))
            if _done(runs[0]).job["rows"] != table.rows:
                raise RuntimeError(f"{runs[0].job['rows']} rows filled of {table.rows}")
        return took_s

    def rewrite() -> float:
        path = shop.new_path("column-plain")

        def write() -> None:
            frame = shop.spark.read.parquet(*table.files).selectExpr("*", f"{expression} AS added")
            frame.write.options(**ZSTD).parquet(str(path))

        with table.put_back():
            took_s = sides.timed("plain", write)
        shutil.rmtree(path)
        return took_s

    def overwrite() -> float:
        with table.put_back() as lake:
            frame = lake.read(TABLE).selectExpr("*", f"{expression} AS added")
            return sides.timed("overwrite", lambda: lake.overwrite(TABLE, frame, evolve=True))

    measures = (partial(fill, "ours"), partial(fill, "hasty", pause="0s"), rewrite, overwrite)
    times_in_turns(1, *measures)
    ours, hasty, plain, over = times_in_turns(repeats, *measures)
    yield took(f"column of {expression}", ours, unit=" s", note=f"{table.rows:,} rows, {len(table.files)} files")
    yield took(f"column of {expression}, no pauses", hasty, unit=" s")
    yield took(f"Spark read, add, write: {expression}", plain, unit=" s", note="same codec and level, not durable")
    yield took(f"lake.overwrite: {expression}", over, unit=" s", note="loses sequences, one publish")
    yield ratio(f"column against Spark's rewrite: {expression}", ours, plain, goal=goal)
    yield ratio(f"the same without pauses: {expression}", hasty, plain)
    yield ratio(f"column against lake.overwrite: {expression}", ours, over)
    yield ratio(
        f"CPU time, column against Spark's rewrite: {expression}", sides.cpu("ours", repeats),
        sides.cpu("plain", repeats), note="moved less by others at work",
    )  # fmt: skip
    yield sides.overhead(f"column of {expression}", "ours", repeats)


# ── the probe ──


def _probed(shop: Workshop) -> Iterator[Line]:
    yield from _probes(shop, "SQLite", None)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(postgres_server(shop.new_path("postgres")))
            catalog = server.url(server.new_database())
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError, SQLAlchemyError) as error:
            yield not_measured("probe, PostgreSQL", f"no server: {type(error).__name__}: {error}")
            return
        yield from _probes(shop, "PostgreSQL", catalog)


def _probes(shop: Workshop, database: str, catalog: str | None) -> Iterator[Line]:
    """Of several probes the best, by their worst ratio: what others did on the machine only adds."""
    sizes = _sizes(shop)
    shop.say(f"a live job, probed on {database}")
    place = Place(str(shop.new_path("probe")), catalog)
    with place.open(create=True) as lake:
        probe.make_table(lake, sizes.probe_files, sizes.probe_file_rows)
    rows = sizes.probe_file_rows
    found = [
        probe.probe(place, probe.fill, f"copy_{number}", batch_rows=rows, rounds=60) for number in range(sizes.probes)
    ]
    best = min(found, key=lambda one: max(compared.slower_in_all for compared in one.calls.values()))
    for kind, compared in best.calls.items():
        ratios = [one.calls[kind].slower_in_all for one in found]
        owns = [one.calls[kind].slower for one in found]
        note = f"p95 {compared.live.all_s * 1000:.1f} ms, idle {compared.idle.all_s * 1000:.1f} ms"
        yield Line(
            f"{kind} while a job is live, {database}", "x", compared.slower_in_all, min(ratios), max(ratios),
            len(ratios), Goal(probe.SLOWER_MAX), f"{note}; {compared.live_calls} live calls", ratios,
        )  # fmt: skip
        note = f"p95 {compared.live.own_s * 1000:.1f} ms, idle {compared.idle.own_s * 1000:.1f} ms"
        yield Line(
            f"the same without waiting for a core, {kind}, {database}", "x", compared.slower, min(owns), max(owns),
            len(owns), None, note, owns,
        )  # fmt: skip
    longest = [1000 * max(hold.all_s for hold in one.told.holds) for one in found]
    note = f"{len(best.told.holds)} transactions; without waiting for a core {best.hold_s_max * 1000:.1f} ms"
    yield Line(
        f"longest hold of the catalog, {database}", " ms", 1000 * max(hold.all_s for hold in best.told.holds),
        min(longest), max(longest), len(longest), Goal(1000 * probe.HOLD_S_MAX), note, longest,
    )  # fmt: skip
    errors = [error for one in found for error in one.errors]
    yield Line(f"calls that ended in an error, {database}", "", len(errors), goal=Goal(0), note="; ".join(errors[:3]))
