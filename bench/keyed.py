"""Keyed tables: a merge against the least that any rewrite costs, and small changes of a small table in this process.

The merge brings rows of which half are new into a table of millions. Its measure is plain Spark reading exactly the
files that the merge replaced and writing them again with the same codec: no keys looked for, nothing compared, nothing
made durable. Both run in turns; what comes in is Parquet that was written before the clock, other rows every time.

Scattered: keys from all over the table, so every file is rewritten. Clustered: all of them from its last file.
As for bulk appends, the ratio of CPU time is moved less by others at work than that of times.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import own_busy_s
from bench.measure import Goal, Line, Samples, ratio, timed, times_in_turns, took
from bench.workshop import FIRST_MS, SCHEMA, TABLE, Workshop, arrow_rows
from floodmark.lake import Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEYED = "id long, ts timestamp, name string, amount double"
FILES = 4
WARM_UP = 3
# A prime, larger than any table here: times this, modulo a size, no id comes twice and none is near the one before.
STRIDE = 2_654_435_761
# The lake's own level; Spark's default (3) would make it write slower.
ZSTD = {"compression": "zstd", "parquet.compression.codec.zstd.level": "1"}

SMALL_TABLE_ROWS = 10_000
SMALL_MERGE_ROWS = 10


def run(shop: Workshop) -> Iterator[Line]:
    yield from _in_process(shop)
    yield from _merge(shop, "scattered", 0, Goal(2.0))
    yield from _merge(shop, "clustered", shop.sizes.keyed_rows * (FILES - 1) // FILES)


def _merge(shop: Workshop, case: str, first: int, goal: Goal | None = None) -> Iterator[Line]:
    """Merges whose existing keys are those from `first` on."""
    shop.say(f"a table of {shop.sizes.keyed_rows:,} keyed rows, {case} merges")
    merges = _Merges(shop, shop.new_lake(f"keyed-{case}"), first)
    # The first ones compile code and start Python workers; what is asked for is a session at work.
    times_in_turns(WARM_UP, merges.merge, merges.rewrite)
    merges.merge_cpu_s.clear()
    merges.rewrite_cpu_s.clear()
    ours, plain = times_in_turns(shop.sizes.merge_repeats, merges.merge, merges.rewrite)
    merges.lake.close()
    note = f"{shop.sizes.merge_rows:,} rows, half new; {merges.touched_note()}"
    yield took(f"merge, {case}", ours, unit=" s", note=note)
    yield took(f"plain rewrite of the same files, {case}", plain, unit=" s", note="zstd, not durable")
    yield ratio(f"merge against plain rewrite, {case}", ours, plain, goal=goal)
    cpu = Samples(tuple(merges.merge_cpu_s)), Samples(tuple(merges.rewrite_cpu_s))
    yield ratio(f"CPU time, merge against plain rewrite, {case}", *cpu, note="moved less by others at work")


@dataclass
class _Merges:
    shop: Workshop
    lake: Lake
    first: int
    turn: int = 0
    touched: list[str] = field(default_factory=list)
    merge_cpu_s: list[float] = field(default_factory=list)
    rewrite_cpu_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        ids = self.shop.spark.range(0, self.shop.sizes.keyed_rows, 1, FILES)
        self.lake.create_table(TABLE, KEYED, key=["id"])
        self.lake.append(TABLE, _rows(ids, 0))

    def merge(self) -> float:
        """Seconds of one merge; remembers the files that it replaced."""
        incoming, before, half = self._incoming(), self._files(), self.shop.sizes.merge_rows // 2
        frame = self.shop.spark.read.parquet(str(incoming))
        took_s = _timed(lambda: self.lake.merge(TABLE, frame), self.merge_cpu_s)
        done = self.lake.history(limit=1)[0].table(TABLE)
        if (done.rows_updated, done.rows_added) != (half, half):
            raise RuntimeError(f"{done.rows_updated} rows updated, {done.rows_added} added, not {half} each")
        self.touched = sorted(before - self._files())
        return took_s

    def rewrite(self) -> float:
        """Seconds that Spark takes to write those files again."""
        path = self.shop.new_path("keyed-plain")
        frame = self.shop.spark.read.parquet(*self.touched)
        took_s = _timed(lambda: frame.write.options(**ZSTD).parquet(str(path)), self.rewrite_cpu_s)
        shutil.rmtree(path)
        return took_s

    def touched_note(self) -> str:
        size = sum(Path(path.removeprefix("file://")).stat().st_size for path in self.touched)
        return f"replaced {len(self.touched)} files, {size / 2**20:.0f} MB"

    def _files(self) -> set[str]:
        return set(self.lake.catalog.files.data_files(self.lake.catalog.history.head(TABLE)))

    def _incoming(self) -> Path:
        """Rows of their own for every turn: none exists by chance."""
        path, rows, first = self.shop.new_path("keyed-incoming"), self.shop.sizes.keyed_rows, self.first
        number = f"({self.turn * (self.shop.sizes.merge_rows // 2)} + id DIV 2)"
        there = f"{first} + pmod({number} * {STRIDE}, {rows - first})"
        ids = self.shop.spark.range(0, self.shop.sizes.merge_rows, 1, 2).selectExpr(
            f"if(id % 2 = 0, {there}, {rows} + {number}) AS id"
        )
        self.turn += 1
        _rows(ids, self.turn).write.parquet(str(path))
        return path


def _rows(ids: DataFrame, turn: int) -> DataFrame:
    """A row for each id, with other values at every turn. Names are as good as random: they do not shrink."""
    return ids.selectExpr(
        "id",
        f"timestamp_millis({FIRST_MS} + id * 10) AS ts",
        f"concat('name-', hex(xxhash64(id, {turn}, 1))) AS name",
        f"pmod(xxhash64(id, {turn}, 2), 1000003) / 100.0D AS amount",
    )


def _timed(action: Callable[[], object], cpu_s: list[float]) -> float:
    """Seconds that one call takes, with nothing left to flush; what it took of the cores goes to `cpu_s`."""
    os.sync()
    before = own_busy_s()
    took_s = timed(action)
    cpu_s.append(own_busy_s() - before)
    return took_s


def _in_process(shop: Workshop) -> Iterator[Line]:
    lake = shop.new_lake("keyed-small")
    lake.create_table(TABLE, SCHEMA, key=["id"])
    lake.append(TABLE, arrow_rows(SMALL_TABLE_ROWS))
    half, batch_rows = SMALL_MERGE_ROWS // 2, shop.sizes.batch_rows
    values = arrow_rows(SMALL_MERGE_ROWS).to_pylist()
    # Keys of their own for every one: half of a merge exists, with other values; all of an append is new.
    merges, appends, deletes = itertools.count(), itertools.count(), itertools.count()

    def merge() -> float:
        first = next(merges) * half
        there = range(first, first + half)
        keys = [*there, *(SMALL_TABLE_ROWS + key for key in there)]
        rows = [{**row, "id": key, "n": -1} for key, row in zip(keys, values, strict=True)]
        return timed(lambda: lake.merge(TABLE, rows))

    def append() -> float:
        rows = arrow_rows(batch_rows, first=2 * SMALL_TABLE_ROWS + next(appends) * batch_rows)
        return timed(lambda: lake.append(TABLE, rows))

    def delete() -> float:
        return timed(lambda: lake.delete(TABLE, where=f"id = {SMALL_TABLE_ROWS - 1 - next(deletes)}"))

    times_in_turns(2, merge, append, delete)
    merged, appended, deleted = times_in_turns(shop.sizes.keyed_repeats, merge, append, delete)
    lake.close()
    yield took("merge of 10 rows in memory, p50", merged, note=f"a table of {SMALL_TABLE_ROWS:,} rows")
    yield took("append to a table with a key, p50", appended, note=f"{shop.sizes.batch_rows:,} rows in memory")
    yield took("delete of one row, p50", deleted)
