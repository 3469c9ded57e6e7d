"""Bulk append: millions of rows through the lake, against Spark's own Parquet writer on the same DataFrame.

The input is Parquet files that were written before: both sides scan the same files with the same tasks, from the page
cache. A cached DataFrame would fill the heap of one side's run with the other's garbage, and rows made on the fly cost
more than a scan. What the scan itself takes is measured too, so that one sees how much of both sides it is.
What the disk still has to write is flushed before every measurement: Spark's writer leaves it to the system, the
lake makes it durable, and must not pay for the other.

The lake's tasks are a JVM thread and a Python process each, Spark's a JVM thread only. On a busy machine the system
gives more of the cores to the one with more threads, so the ratio of times is only fair on a quiet one. The ratio of
CPU time is shown beside it: both sides keep all cores at work, and who else wants them moves it much less.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.machine import own_busy_s
from bench.measure import Goal, Line, Samples, in_turns, rate, ratio, timed, times_in_turns
from bench.workshop import SCHEMA, TABLE, Workshop

INPUT_FILES = 4


def run(shop: Workshop) -> Iterator[Line]:
    rows = shop.sizes.bulk_rows
    source = shop.new_path("bulk-input")
    shop.frame(rows, INPUT_FILES).write.parquet(str(source))
    lake = shop.new_lake("bulk")
    lake.create_table(TABLE, SCHEMA)
    plain_paths: list[Path] = []

    lake_cpu_s: list[float] = []
    plain_cpu_s: list[float] = []

    def lake_append() -> float:
        os.sync()
        return _timed(lambda: lake.append(TABLE, shop.spark.read.parquet(str(source))), lake_cpu_s)

    def plain_write() -> float:
        os.sync()
        while plain_paths:
            shutil.rmtree(plain_paths.pop())
        plain_paths.append(shop.new_path("bulk-plain"))
        return _timed(lambda: shop.spark.read.parquet(str(source)).write.parquet(str(plain_paths[0])), plain_cpu_s)

    # The first runs compile code and start Python workers; what is asked for is a session at work.
    times_in_turns(1, lake_append, plain_write)
    ours, plain = times_in_turns(shop.sizes.bulk_repeats, lake_append, plain_write)
    (scan,) = in_turns(2, lambda: shop.spark.read.parquet(str(source)).write.format("noop").mode("append").save())
    head = lake.catalog.history.head(TABLE)
    our_mb = head.size_bytes / (shop.sizes.bulk_repeats + 1) / 2**20
    plain_mb = sum(file.stat().st_size for file in plain_paths[0].glob("*.parquet")) / 2**20
    if head.rows != rows * (shop.sizes.bulk_repeats + 1):
        raise RuntimeError(f"the lake has {head.rows} rows after {shop.sizes.bulk_repeats + 1} appends of {rows}")
    lake.close()
    yield rate("lake.append(DataFrame)", ours, rows, f"{our_mb:.0f} MB, zstd, durable")
    yield rate("DataFrame.write.parquet", plain, rows, f"{plain_mb:.0f} MB, snappy (Spark's default), not durable")
    yield rate("the scan of the input alone", scan, rows, "part of both")
    # Rows in a second, so the quicker one is below.
    yield ratio("rows/s, lake against plain", plain, ours, goal=Goal(0.8, at_least=True), note=f"{rows:,} rows")
    # Without the first, unmeasured ones.
    lake_cpu, plain_cpu = Samples(tuple(lake_cpu_s[1:])), Samples(tuple(plain_cpu_s[1:]))
    yield ratio("rows per CPU second, lake against plain", plain_cpu, lake_cpu, note="moved less by others at work")


def _timed(action: Callable[[], object], cpu_s: list[float]) -> float:
    """Seconds that one call takes; what it took of the cores, in all processes below this one, goes to `cpu_s`."""
    before = own_busy_s()
    took_s = timed(action)
    cpu_s.append(own_busy_s() - before)
    return took_s
