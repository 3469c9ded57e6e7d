"""Compaction on Spark: many small files through the lake, against Spark reading and writing the same ones; and memory.

Speed: the lake is made once. Before each turn its folder is put back as it was, data files by hard links: both sides
read the very same files, from the page cache. Spark's side is the line that a user would write, with the codec and
level of the lake and as many files as the lake makes of it: it keeps no sequences, proves no rows, and makes nothing
durable. Its reading of footers and the lake's planning, recovery and publishing are both on the clock.

Memory: a process of its own with a session of its own compacts, so nothing is warm. The processes below it are looked
at every 50 ms; what counts is each one's highest resident size as the kernel kept it, not only at these moments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import clear_manifest_cache

import floodmark
from bench.keyed import ZSTD
from bench.machine import own_busy_s
from bench.measure import Goal, Line, Samples, rate, ratio, timed, times_in_turns
from bench.workshop import FIRST_MS, KEYS, MASTER, QUICK, TABLE, Workshop
from floodmark.lake import Lake
from floodmark.rows import tasks
from floodmark.rows.rewriting import gather

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EVENTS = "id long, n long, amount double, k string, ts timestamp"
WIDE = f"{EVENTS}, line string"
TARGET_SIZE = "write.target-file-size-bytes"
ROOT = Path(__file__).parent.parent
LOOK_EVERY_S = 0.05
MB = 2**20
JVM, DRIVER, WORKER = "JVM", "driver's Python", "Python worker"
SAME = Goal(1.25)


@dataclass(frozen=True)
class Sizes:
    files: int = 200
    file_rows: int = 40_000
    # Small enough for more groups than cores.
    target_bytes: int = 24 * MB
    warm_up: int = 3
    repeats: int = 5
    sorted_repeats: int = 3
    memory_rows: tuple[int, int] = (1_000_000, 20_000_000)
    # As many rows with a long text as make 20 times what a sort may hold.
    wide_bytes: int = 20 * gather.SORT_BYTES_MAX
    wide_file_rows: int = 100_000


FULL = Sizes()
LITTLE = Sizes(
    files=20,
    file_rows=5_000,
    target_bytes=MB,
    warm_up=1,
    repeats=2,
    sorted_repeats=1,
    memory_rows=(40_000, 80_000),
    wide_bytes=10 * MB,
    wide_file_rows=10_000,
)


def run(shop: Workshop) -> Iterator[Line]:
    sizes = _sizes(shop)
    yield from _speed(shop, sizes.repeats, goal=Goal(2.0, at_least=True))
    yield from _speed(shop, sizes.sorted_repeats, sort="k")


def _sizes(shop: Workshop) -> Sizes:
    return LITTLE if shop.sizes is QUICK else FULL


# ── rows ──


def events(first: int, rows: int) -> pa.Table:
    """Narrow events; the same ones for the same place."""
    chance = np.random.default_rng(first)
    ids = np.arange(first, first + rows)
    keys = pa.DictionaryArray.from_arrays(
        pa.array(chance.integers(0, KEYS, rows), pa.int32()), pa.array([f"key-{at}" for at in range(KEYS)])
    )
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "n": pa.array(chance.integers(0, 1_000_000, rows), pa.int64()),
            "amount": pa.array(chance.integers(0, 1_000_003, rows) / 100.0, pa.float64()),
            "k": keys.cast(pa.string()),
            "ts": pa.array((FIRST_MS + ids * 10) * 1000, pa.timestamp("us", tz="UTC")),
        }
    )


def wide_events(first: int, rows: int) -> pa.Table:
    """The same with a line of text each, as logs have it: long in memory, short when compressed."""
    found = events(first, rows)
    ids = found["id"].cast(pa.string())
    start = "2023-11-14T22:13:20Z INFO gateway request finished method=GET path=/api/v1/customers/"
    end = "/orders status=200 protocol=HTTP/1.1 region=eu-central-1 agent=Mozilla/5.0 (X11; Linux x86_64) cache=miss"
    return found.append_column("line", pc.binary_join_element_wise(start, ids, end, ""))


@dataclass(frozen=True)
class _Made:
    rows: int
    files: int
    size_bytes: int


def _fill(lake: Lake, files: int, file_rows: int, make: Callable[[int, int], pa.Table] = events) -> _Made:
    """Small appends, each a file; how large their rows are in memory, with their sequences."""
    size_bytes = 0
    for number in range(files):
        rows = make(number * file_rows, file_rows)
        lake.append(TABLE, rows)
        size_bytes += rows.nbytes + 8 * len(rows)
    return _Made(files * file_rows, files, size_bytes)


# ── speed ──


def _speed(shop: Workshop, repeats: int, *, sort: str | None = None, goal: Goal | None = None) -> Iterator[Line]:
    case = "" if sort is None else ", sorted"
    both = _Both(shop, sort)
    # The first ones compile code and start Python workers; what is asked for is a session at work.
    times_in_turns(_sizes(shop).warm_up, both.compact, both.plain)
    both.cpu_s = {name: [] for name in both.cpu_s}
    ours, plain = times_in_turns(repeats, both.compact, both.plain)
    yield rate(f"lake.maintain.compact{case}", ours, both.rows, both.note())
    yield rate(f"Spark read, coalesce, write{case}", plain, both.rows, both.plain_note)
    # Rows in a second, so the quicker one is below.
    yield ratio(f"rows/s, compaction against Spark{case}", plain, ours, goal=goal, note=f"{both.rows:,} rows")
    cpu = [Samples(tuple(both.cpu_s[name])) for name in ("plain", "ours")]
    note = f"{cpu[0].median:.1f} s and {cpu[1].median:.1f} s"
    yield ratio(f"rows per CPU second, compaction against Spark{case}", *cpu, note=f"Spark and the lake took {note}")


@dataclass
class _Both:
    """The two sides of a comparison, each measured as often as asked, from the same files every time."""

    shop: Workshop
    sort: str | None
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "plain": []})
    detail: dict[str, Any] = field(default_factory=dict)
    plain_note: str = ""
    _replaced: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = _sizes(self.shop)
        self.shop.say(f"a table of {sizes.files} small files{', to be sorted' if self.sort else ''}")
        self._path, self._kept = self.shop.new_path("compaction"), self.shop.new_path("compaction-kept")
        with floodmark.open(self._path, create=True) as lake:
            sort = [] if self.sort is None else [self.sort]
            lake.create_table(TABLE, EVENTS, sort=sort, properties={TARGET_SIZE: str(sizes.target_bytes)})
            _fill(lake, sizes.files, sizes.file_rows)
        _copy(self._path, self._kept)

    @property
    def rows(self) -> int:
        return int(self.detail["rows"])

    def compact(self) -> float:
        shutil.rmtree(self._path)
        _copy(self._kept, self._path)
        clear_manifest_cache()
        with floodmark.open(self._path, spark=self.shop.spark) as lake, _through_spark():
            before = _files(lake)
            records: list[Any] = []
            took_s = self._timed("ours", lambda: records.extend(lake.maintain.compact(TABLE, files_min=2).records))
            self.detail = _compacted(records)
            self._replaced = sorted(before - _files(lake))
        if not self.sort and self.detail["groups"] < (os.cpu_count() or 1) and self.shop.sizes is not QUICK:
            raise RuntimeError(f"{self.detail['groups']} groups do not keep all cores at work")
        return took_s

    def plain(self) -> float:
        """Spark does the same to the files that the compaction has replaced."""
        path, files = self.shop.new_path("compaction-plain"), int(self.detail["files_out"])

        def write() -> None:
            frame: DataFrame = self.shop.spark.read.parquet(*self._replaced).coalesce(files)
            frame = frame if self.sort is None else frame.sortWithinPartitions(self.sort)
            frame.write.options(**ZSTD).parquet(str(path))

        took_s = self._timed("plain", write)
        written = [file.stat().st_size for file in path.glob("*.parquet")]
        self.plain_note = f"{len(written)} files, {sum(written) / MB:.0f} MB, same codec and level, not durable"
        shutil.rmtree(path)
        return took_s

    def note(self) -> str:
        parts = ("files_in", "bytes_in", "groups", "files_out", "bytes_out")
        files_in, bytes_in, groups, files_out, bytes_out = (int(self.detail[part]) for part in parts)
        sizes = f"{bytes_in / MB:.0f} MB → {files_out}, {bytes_out / MB:.0f} MB"
        return f"{files_in} files, {sizes}, in {groups} groups; proved, durable"

    def _timed(self, name: str, action: Callable[[], object]) -> float:
        """Seconds of one call, with nothing left to flush; what it took of the cores is kept beside."""
        os.sync()
        before = own_busy_s()
        took_s = timed(action)
        self.cpu_s[name].append(own_busy_s() - before)
        return took_s


def _copy(source: Path, target: Path) -> None:
    """A folder as it is: data files never change, so that a second name will do."""
    shutil.copytree(source, target, copy_function=lambda one, other: _linked(Path(one), Path(other)))


def _linked(source: Path, target: Path) -> None:
    if source.suffix == ".parquet":
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def _through_spark() -> AbstractContextManager[object]:
    """Whatever its size, the work is done by Spark's tasks: small sizes must take the way of large ones here."""
    return patch.object(tasks, "IN_PROCESS_ROWS_MAX", 0)


def _compacted(records: list[Any]) -> dict[str, Any]:
    (record,) = records
    if record.outcome != "compacted":
        raise RuntimeError(f"the table was not compacted: {record.as_dict()}")
    found: dict[str, Any] = record.detail
    return found


def _files(lake: Lake) -> set[str]:
    return set(lake.catalog.files.data_files(lake.catalog.history.head(TABLE)))


# ── memory ──


def memory(shop: Workshop) -> Iterator[Line]:
    sizes = _sizes(shop)
    small, large = sizes.memory_rows
    peaks = [_peaks(shop, rows) for rows in sizes.memory_rows]
    sorting, answer = _sorted_peaks(shop)
    idle = answer["idle_bytes"]
    for kind in (WORKER, DRIVER, JVM):
        found = [peak[kind] for peak, _ in peaks]
        for rows, size_bytes, (_, done) in zip(sizes.memory_rows, found, peaks, strict=True):
            note = f"{done['files_in']} files, {done['groups']} groups, rows of {done['held_bytes'] / MB:.0f} MB"
            yield Line(f"peak of a {kind}, {_short(rows)} rows", " MB", size_bytes / MB, note=note)
        above = " → ".join(f"{(size_bytes - idle) / MB:.0f}" for size_bytes in found)
        note = f"above an idle one of {idle / MB:.0f} MB: {above} MB" if kind == WORKER else ""
        goal = None if kind == JVM else SAME
        name = f"peak of a {kind}, {_short(large)} against {_short(small)} rows"
        yield Line(name, "x", found[1] / found[0], goal=goal, note=note)
    limit = gather.SORT_BYTES_MAX
    goal = None if shop.sizes is QUICK else Goal(20.0, at_least=True)
    note = f"{answer['held_bytes'] / MB:.0f} MB of rows, {limit / MB:.0f} MB to sort in"
    yield Line(
        "rows sorted at once, against the sort's memory", "x", answer["held_bytes"] / limit, goal=goal, note=note
    )
    note = f"{sorting[WORKER] / MB:.0f} MB; idle {idle / MB:.0f} MB"
    figure = (sorting[WORKER] - idle) / limit
    yield Line("peak of the worker above idle, against the sort's memory", "x", figure, goal=Goal(3.0), note=note)


def _peaks(shop: Workshop, rows: int) -> tuple[dict[str, int], dict[str, Any]]:
    shop.say(f"a table of {rows:,} rows, compacted by a process of its own")
    path, sizes = shop.new_path("memory"), _sizes(shop)
    with floodmark.open(path, create=True) as lake:
        lake.create_table(TABLE, EVENTS)
        made = _fill(lake, -(-rows // sizes.file_rows), sizes.file_rows)
    return _watched(path, made)


def _sorted_peaks(shop: Workshop) -> tuple[dict[str, int], dict[str, Any]]:
    """A table that is many times what a sort may hold, in one group, so that one task sorts all of it."""
    sizes, path = _sizes(shop), shop.new_path("memory-sorted")
    files = -(-sizes.wide_bytes // wide_events(0, sizes.wide_file_rows).nbytes)
    shop.say(f"a table of {files * sizes.wide_file_rows:,} wide rows, sorted by a process of its own")
    with floodmark.open(path, create=True) as lake:
        lake.create_table(TABLE, WIDE, sort=["n"], properties={TARGET_SIZE: str(512 * MB)})
        made = _fill(lake, files, sizes.wide_file_rows, wide_events)
    found, answer = _watched(path, made, "idle")
    if answer["groups"] != 1:
        raise RuntimeError(f"the rows were sorted in {answer['groups']} groups, not at once")
    return found, answer


def _watched(path: Path, made: _Made, *options: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Compact a lake in a new process; the highest resident size of each kind of process in it, and its answer."""
    command = [sys.executable, "-m", "bench.compaction", str(path), *options]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err)
        peaks: dict[str, int] = {JVM: 0, DRIVER: 0, WORKER: 0}
        try:
            while child.poll() is None:
                for kind, size_bytes in _resident(child.pid):
                    peaks[kind] = max(peaks[kind], size_bytes)
                time.sleep(LOOK_EVERY_S)
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise RuntimeError(f"the compacting process failed: {err.read().decode()[-2000:]}")
        answer: dict[str, Any] = json.loads(out.read().decode().splitlines()[-1])
    # The youngest files may stay as they are.
    if not 0.9 * made.rows <= answer["rows"] <= made.rows or not all(peaks.values()):
        raise RuntimeError(f"{answer['rows']} rows compacted of {made.rows}; seen {peaks}")
    shutil.rmtree(path)
    return peaks, {**answer, "held_bytes": made.size_bytes}


def _resident(pid: int) -> Iterator[tuple[str, int]]:
    """The processes of a tree by kind, with the highest resident size that each has had."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
                kind = DRIVER if process.pid == pid else _kind(process.cmdline())
                if kind is not None:
                    yield kind, _highest_bytes(process)


def _kind(command: list[str]) -> str | None:
    if command and Path(command[0]).name == "java":
        return JVM
    return WORKER if any("pyspark" in part and "daemon" in part for part in command) else None


def _highest_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(process.memory_info().rss)


def _short(rows: int) -> str:
    return f"{rows // 1_000_000} M" if rows >= 1_000_000 else f"{rows // 1000} k"


def main(path: str, *options: str) -> None:
    """The process that is watched: compact the lake's table on Spark, and say what was done as JSON."""
    with floodmark.open(path, settings={"master": MASTER}) as lake:
        idle = _idle_bytes(lake) if "idle" in options else None
        with _through_spark():
            (record,) = lake.maintain.compact(TABLE, files_min=2).records
        lake.sessions.stop()
    sys.stdout.write(json.dumps({**_compacted([record]), "idle_bytes": idle}) + "\n")


def _idle_bytes(lake: Lake) -> int:
    """What a worker takes that has loaded the code and done nothing."""
    from floodmark.rows.tasks import run_tasks

    def look(_: str) -> Iterator[str]:
        import psutil

        import floodmark.rows.rewriting.gather  # noqa: F401

        yield str(psutil.Process().memory_info().rss)

    found = run_tasks(lake.spark, look, ["", ""], tag="floodmark-bench", message="Spark could not start its workers")
    return max(map(int, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
