"""Maintenance without Spark: planning and sweeping thousands of files, and a lake that is kept while commits go on.

Planning: a new process plans the compaction of a table of many small files, all of them real, from metadata alone. Then
a reader selects the files of a condition: first with nothing remembered, then again. What is remembered is counted as
what Python and Arrow have allocated for it.
Sweep: the same files after a compaction, when only expired versions name them; and fewer of them in a stand-in for S3.
Requests are counted, to show that nothing of the lake is listed but the folders of operations that are due a last look.
Upkeep: small commits, and every so many of them `lake.maintain.run`, with nothing kept and no grace. What is on disk is
counted before and after each run of it: what grows without bound grows between the first windows and the last.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
from pyiceberg.manifest import clear_manifest_cache
from sqlalchemy import text

import floodmark
from bench import report
from bench.measure import Goal, Line, Samples, in_turns, not_measured, ratio, timed, times_in_turns, took
from bench.workshop import QUICK, SCHEMA, TABLE, Workshop, arrow_rows
from floodmark import clock
from floodmark.catalog.database import SQLITE_NAME
from floodmark.commit.file_columns import REMEMBERED
from floodmark.commit.metadata import MetadataFiles, schema_of
from floodmark.lake import Lake
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.rows.reading.selection import Selection, select_files
from floodmark.rows.sql.where import Where
from floodmark.storage.counters import FSYNCS
from floodmark.testing.s3 import s3_environment, s3_stand_in

ROOT = Path(__file__).parent.parent
OUT = Path(__file__).parent / "out"
BOUNDED = Goal(1.5)

# What the planning process runs; nothing is imported before its clock.
PLAN = """
import json, sys, time

def timed(action):
    started, cpu = time.perf_counter(), time.process_time()
    found = action()
    return found, time.perf_counter() - started, time.process_time() - cpu

def load():
    import floodmark
    return floodmark.open

open_lake, import_s, _ = timed(load)
lake, open_s, _ = timed(lambda: open_lake(sys.argv[1]))
before = lake.catalog.storage.counters.snapshot()
planned, plan_s, plan_cpu_s = timed(lambda: lake.maintain.compact(sys.argv[2], files_min=2, dry_run=True))
cost = lake.catalog.storage.counters.difference(before)
_, again_s, _ = timed(lambda: lake.maintain.compact(sys.argv[2], files_min=2, dry_run=True))
detail = planned.records[0].detail
print(json.dumps({
    "import_s": import_s, "open_s": open_s, "plan_s": plan_s, "plan_cpu_s": plan_cpu_s, "again_s": again_s,
    "files": detail["files"], "groups": detail["groups"], "requests": cost.total, "bytes_read": cost.bytes_read,
    "spark": "pyspark" in sys.modules,
}))
"""


@dataclass(frozen=True)
class Sizes:
    # Every commit writes a file into every partition.
    partitions: int = 100
    commits: int = 100
    s3_commits: int = 20
    planning_repeats: int = 5
    upkeep_commits: int = 2_000
    upkeep_every: int = 50
    # The windows that are compared have this many commits; the first of them starts with this one.
    upkeep_window: int = 200
    upkeep_rows: int = 100
    files_min: int = 16

    @property
    def files(self) -> int:
        return self.partitions * self.commits


FULL = Sizes()
LITTLE = Sizes(
    partitions=10,
    commits=10,
    s3_commits=3,
    planning_repeats=2,
    upkeep_commits=80,
    upkeep_every=10,
    upkeep_window=20,
    files_min=4,
)


def _sizes(shop: Workshop) -> Sizes:
    return LITTLE if shop.sizes is QUICK else FULL


# ── planning ──


def planning(shop: Workshop) -> Iterator[Line]:
    sizes, path = _sizes(shop), _many_files(shop)
    _plan_apart(shop, path)  # fills the folder of bytecode
    answers = [_plan_apart(shop, path) for _ in range(sizes.planning_repeats)]
    if any((answer["files"], answer["groups"]) != (sizes.files, sizes.partitions) for answer in answers):
        raise RuntimeError(f"not all {sizes.files} files were planned: {answers}")
    if any(answer["spark"] for answer in answers):
        raise RuntimeError("planning has imported pyspark")
    last = answers[-1]
    note = f"{sizes.partitions} partitions; {last['requests']} requests, {last['bytes_read'] / 1000:.0f} kB"
    name = f"plan of {sizes.files:,} files, cold process"
    yield took(name, _samples(answers, "plan_s"), unit=" s", goal=Goal(2.0), note=note)
    yield took("CPU time of it", _samples(answers, "plan_cpu_s"), unit=" s", note="moved less by others at work")
    started = _samples(answers, "import_s", "open_s", "plan_s")
    yield took("the same with import and open", started, unit=" s")
    yield took("the same again, warm", _samples(answers, "again_s"), unit=" s", note="manifests are remembered")
    little = shop.new_path("some-files")
    with floodmark.open(little, create=True) as lake:
        _fill(shop, lake, sizes.commits // 10)
    yield from _selections(shop, little, Goal(40), Goal(3))
    yield from _selections(shop, path, Goal(300), Goal(20))


def _selections(shop: Workshop, path: Path, first: Goal, again: Goal) -> Iterator[Line]:
    """Files that may hold a match of a condition on a partition and two other columns."""
    with floodmark.open(path, read_only=True) as lake:
        files, head = lake.catalog.files, lake.catalog.history.head(TABLE)
        schema = schema_of(files.metadata(head.metadata_location), head)
        where = Where.parse("k = 'key-7' and n > 5 and ts >= '2023-11-14 00:00:00'", schema)

        def select() -> Selection:
            return select_files(files, head, schema, where)

        def cold() -> float:
            REMEMBERED.clear()
            return timed(lambda: select_files(MetadataFiles(lake.catalog.storage), head, schema, where))

        select()
        cold_s, warm_s = times_in_turns(shop.sizes.read_repeats, cold, lambda: timed(select))
        kept_bytes, bounded = _remembered_bytes(select)
        (state_s,) = in_turns(shop.sizes.read_repeats, lambda: lake.changes(TABLE, head.sequence).empty)
    note = f"{len(select().files):,} selected, {select().manifests_read} manifests"
    yield took(f"files of a condition, {head.files:,} files, first", cold_s, goal=first, note=note)
    yield took(f"files of a condition, {head.files:,} files, again", warm_s, goal=again)
    per_file = kept_bytes / head.files - 24 * bounded
    shown = f"{kept_bytes / head.files:.0f} in all, {bounded} bounded columns"
    yield Line(
        "remembered of a file, beside 24 for each bounded column", " bytes", per_file, goal=Goal(200), note=shown
    )
    yield took("nothing new, asked for changes", state_s, goal=Goal(1), note="the catalog alone")


def _remembered_bytes(select: Callable[[], Selection]) -> tuple[int, int]:
    """What one selection leaves in memory, and how many columns have bounds."""
    REMEMBERED.clear()
    gc.collect()
    tracemalloc.start()
    before = pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0]
    bounds = select().files[0].data_file.lower_bounds
    gc.collect()
    after = pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before, len(bounds)


@cache
def _many_files(shop: Workshop) -> Path:
    """A lake with one table of many small files: made once, for planning and then for the sweep."""
    path = shop.new_path("many-files")
    with floodmark.open(path, create=True) as lake:
        _fill(shop, lake, _sizes(shop).commits)
    return path


def _fill(shop: Workshop, lake: Lake, commits: int) -> None:
    sizes = _sizes(shop)
    shop.say(f"making a table of {sizes.partitions * commits:,} files")
    lake.create_table(TABLE, SCHEMA, partition=["k"])
    for number in range(commits):
        lake.append(TABLE, arrow_rows(2 * sizes.partitions, keys=sizes.partitions, first=number * 2 * sizes.partitions))
    found = lake.catalog.history.head(TABLE).files
    if found != sizes.partitions * commits:
        raise RuntimeError(f"the table has {found} files, not {sizes.partitions * commits}")


def _plan_apart(shop: Workshop, path: Path) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PLAN, str(path), TABLE]
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(shop.folder / "bytecode")}
    done = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _samples(answers: list[dict[str, Any]], *names: str) -> Samples:
    return Samples(tuple(sum(answer[name] for name in names) for answer in answers))


# ── sweep ──


def sweep(shop: Workshop) -> Iterator[Line]:
    path, sizes = _many_files(shop), _sizes(shop)
    _many_files.cache_clear()  # from here on it is not that lake any more
    yield from _sweep(lambda: floodmark.open(path), sizes.files, "local", Goal(10.0))
    with ExitStack() as stack:
        try:
            server = stack.enter_context(s3_stand_in())
            stack.enter_context(s3_environment())
            bucket = server.make_bucket()
        except (ImportError, OSError) as error:
            yield not_measured("sweep, S3", f"no stand-in: {type(error).__name__}: {error}")
            return
        catalog = f"sqlite:///{shop.new_path('sweep-catalog')}.db"

        def open_lake(*, create: bool = False) -> Lake:
            return floodmark.open(f"s3://{bucket}/lake", create=create, catalog=catalog, storage_options=server.options)

        with open_lake(create=True) as lake:
            _fill(shop, lake, sizes.s3_commits)
        yield from _sweep(open_lake, sizes.partitions * sizes.s3_commits, "S3 stand-in")


def _sweep(open_lake: Callable[[], Lake], files: int, place: str, goal: Goal | None = None) -> Iterator[Line]:
    with open_lake() as lake:
        lake.overwrite(TABLE, arrow_rows(10, keys=1))
        # The newest states stay, for engines that read the table by themselves.
        for _ in range(SNAPSHOTS_KEPT):
            lake.append(TABLE, arrow_rows(10, keys=1))
        expired = timed(lambda: lake.maintain.expire(keep="0s"))
    clear_manifest_cache()
    with open_lake() as lake:
        folders = sum(len(operation.folders) for operation in lake.catalog.journal.to_look_at(0))
        before = lake.catalog.storage.counters.snapshot()
        records: list[Any] = []
        cpu_s = time.process_time()
        took_s = timed(lambda: records.extend(lake.maintain.sweep(grace="0s").records))
        cpu_s = time.process_time() - cpu_s
        cost = lake.catalog.storage.counters.difference(before)
        _check_swept(lake, records)
    deleted = sum(record.detail["files"] for record in records)
    if deleted < files:
        raise RuntimeError(f"{deleted} files were swept, not {files}")
    note = f"{deleted:,} files with metadata, {sum(record.detail['bytes'] for record in records) / 1000:.0f} kB"
    yield Line(f"sweep of {files:,} files, {place}", " s", took_s, repeats=1, goal=goal, note=note)
    # With the server's part, where that is a stand-in in this process.
    yield Line(f"CPU time of it, {place}", " s", cpu_s, repeats=1, note="moved less by others at work")
    yield Line(f"expiry of their versions, {place}", " ms", expired * 1000, repeats=1)
    note = ", ".join(f"{verb} {count}" for verb, count in sorted(cost.calls.items()) if verb not in FSYNCS)
    yield Line(f"requests of the sweep, {place}", "", cost.total, note=note)
    # Each folder is asked for its files, and for those under temporary names.
    lists = cost.calls.get("list", 0) - 2 * folders
    note = f"{folders} folders of operations were due a last look"
    yield Line(f"listings besides last looks, {place}", "", lists, goal=Goal(0), note=note)


def _check_swept(lake: Lake, records: list[Any]) -> None:
    """Nothing failed, and what is left of data are the files that are live."""
    failed = [record.as_dict() for record in records if record.outcome not in ("swept", "nothing_to_do")]
    left = {entry.location for entry in lake.catalog.storage.list(lake.location) if entry.location.endswith(".parquet")}
    if failed or left != set(lake.catalog.files.data_files(lake.catalog.history.head(TABLE))):
        raise RuntimeError(f"{len(left)} data files are left, and not those that are live; {failed}")


# ── upkeep ──


@dataclass(frozen=True)
class Disk:
    """What a lake takes, in files of all kinds and in bytes of those that are not data."""

    files: int
    metadata_bytes: int
    catalog_bytes: int
    live_files: int


@dataclass
class Watched:
    """A lake's life: what it took before and after each run of maintenance, and how long each commit took."""

    every: int
    commit_s: list[float] = field(default_factory=list)
    upkeep_s: list[float] = field(default_factory=list)
    before: list[Disk] = field(default_factory=list)
    after: list[Disk] = field(default_factory=list)

    def series(self, name: str) -> list[tuple[float, float]]:
        """(commits, value) before and after every run."""
        return [
            (at * self.every, float(getattr(disk, name)))
            for at, pair in enumerate(zip(self.before, self.after, strict=True), start=1)
            for disk in pair
        ]

    def commit_ms(self) -> list[tuple[float, float]]:
        """(commits, median time of those since the run before)."""
        parts = range(0, len(self.commit_s), self.every)
        return [(at + self.every, median(self.commit_s[at : at + self.every]) * 1000) for at in parts]

    def most(self, name: str, window: slice) -> Samples:
        """What it took right before maintenance, for each run in a window of commits."""
        part = self.before[window.start // self.every : window.stop // self.every]
        return Samples(tuple(float(getattr(disk, name)) for disk in part))


def run(shop: Workshop) -> Iterator[Line]:
    sizes = _sizes(shop)
    watched = _live(shop, sizes)
    early = slice(sizes.upkeep_window, 2 * sizes.upkeep_window)
    late = slice(sizes.upkeep_commits - sizes.upkeep_window, sizes.upkeep_commits)
    ages = f"commits {early.start + 1}–{early.stop} → {late.start + 1}–{late.stop}"
    for name, what, unit, scale, goal in (
        ("files", "files on disk", "", 1, BOUNDED),
        ("metadata_bytes", "metadata on disk", " kB", 1000, BOUNDED),
        ("live_files", "live data files", "", 1, None),
        ("catalog_bytes", "catalog on disk", " kB", 1000, None),
    ):
        values = [(at, value / scale) for at, value in watched.series(name)]
        shown = report.sparkline([value for _, value in values])
        found = [value for _, value in values]
        yield Line(what, unit, found[-1], min(found), max(found), len(watched.after), note=shown, details=values)
        over, under = watched.most(name, late), watched.most(name, early)
        yield ratio(f"{what}, late against early", over, under, goal=goal, note=ages)
    times = watched.commit_ms()
    shown = report.sparkline([value for _, value in times])
    yield took("commit", Samples(tuple(watched.commit_s)), note=shown)
    over, under = Samples(tuple(watched.commit_s[late])), Samples(tuple(watched.commit_s[early]))
    yield ratio("commit, late against early", over, under, goal=BOUNDED, note=ages)
    yield took("lake.maintain.run", Samples(tuple(watched.upkeep_s)), note=report.sparkline(watched.upkeep_s))
    runs = f"curves in {_plot(watched, sizes).relative_to(ROOT)}"
    yield Line("runs of maintenance", "", len(watched.upkeep_s), note=runs)


def _live(shop: Workshop, sizes: Sizes) -> Watched:
    shop.say(f"{sizes.upkeep_commits} commits, with maintenance every {sizes.upkeep_every}")
    watched, path = Watched(sizes.upkeep_every), shop.new_path("upkeep")
    with floodmark.open(path, create=True) as lake:
        lake.create_table(TABLE, SCHEMA)
        for number in range(1, sizes.upkeep_commits + 1):
            rows = arrow_rows(sizes.upkeep_rows, first=number * sizes.upkeep_rows)
            watched.commit_s.append(_append_s(lake, rows))
            if number % sizes.upkeep_every == 0:
                watched.before.append(_disk(lake, path))
                watched.upkeep_s.append(timed(lambda: _maintain(lake, sizes.files_min)))
                watched.after.append(_disk(lake, path))
        rows_there = lake.catalog.history.head(TABLE).rows
    if rows_there != sizes.upkeep_commits * sizes.upkeep_rows:
        raise RuntimeError(f"{rows_there} rows after {sizes.upkeep_commits} commits of {sizes.upkeep_rows}")
    return watched


def _append_s(lake: Lake, rows: pa.Table) -> float:
    return timed(lambda: lake.append(TABLE, rows))


def _maintain(lake: Lake, files_min: int) -> None:
    done = lake.maintain.run(keep="0s", grace="0s", files_min=files_min)
    if done.exit_code:
        raise RuntimeError(f"maintenance ended with {done.outcome}: {done.as_dict()}")


def _disk(lake: Lake, path: Path) -> Disk:
    found = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(SQLITE_NAME)]
    metadata_bytes = sum(file.stat().st_size for file in found if file.suffix != ".parquet")
    with lake.catalog.database.read() as tx:
        # Its own count: what is still in the log before it goes to the file is in it, what the log takes is not.
        pages, page_bytes = (tx.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("page_count", "page_size"))
    return Disk(len(found), metadata_bytes, int(pages) * int(page_bytes), lake.catalog.history.head(TABLE).files)


def _plot(watched: Watched, sizes: Sizes) -> Path:
    title = f"{sizes.upkeep_commits:,} commits of {sizes.upkeep_rows} rows; maintenance every {sizes.upkeep_every}"
    curves = {
        "files on disk": watched.series("files"),
        "live data files": watched.series("live_files"),
        "metadata on disk, kB": [(at, value / 1000) for at, value in watched.series("metadata_bytes")],
        "catalog on disk, kB": [(at, value / 1000) for at, value in watched.series("catalog_bytes")],
        "median commit, ms": watched.commit_ms(),
    }
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"maintenance-{clock.format_time(clock.now_ms()).replace(':', '').replace('-', '')}.svg"
    path.write_text(report.curves_svg(title, "commits", curves))
    return path
