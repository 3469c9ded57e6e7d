"""What sections share: sizes, a folder, a warm Spark session, and a lake that has seen hundreds of commits.

The aged lake is made once, when the first section asks for it: one table, small in-memory appends, each one timed and
its storage requests counted. So "around commit 10" and "around commit 500" are the same table in the same run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

import floodmark
from bench.measure import Samples, timed
from floodmark.lake import Lake
from floodmark.storage.counters import Counters

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MASTER = "local[2]"
TABLE = "events"
SCHEMA = "id long, ts timestamp, k string, amount double, n int"
KEYS = 1000
FIRST_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Sizes:
    bulk_rows: int = 5_000_000
    bulk_repeats: int = 5
    batch_rows: int = 1_000
    window: int = 50
    early_at: int = 10
    late_at: int = 500
    publish_repeats: int = 30
    cold_repeats: int = 9
    files: int = 1_000
    read_repeats: int = 9
    keyed_rows: int = 5_000_000
    merge_rows: int = 100_000
    merge_repeats: int = 5
    keyed_repeats: int = 21
    feed_rows: tuple[int, int] = (1_000_000, 20_000_000)
    change_rows: int = 10_000
    feed_repeats: int = 7
    writers_s: float = 10.0
    writers_age: int = 2_000

    @property
    def early(self) -> slice:
        """The commits right after commit `early_at`, by place in a list."""
        return slice(self.early_at, self.early_at + self.window)

    @property
    def late(self) -> slice:
        """As many commits, around commit `late_at`."""
        start = self.late_at - self.window // 2
        return slice(start, start + self.window)


QUICK = Sizes(
    bulk_rows=100_000,
    bulk_repeats=2,
    window=6,
    early_at=4,
    late_at=30,
    publish_repeats=4,
    cold_repeats=2,
    files=40,
    read_repeats=2,
    keyed_rows=100_000,
    merge_rows=2_000,
    merge_repeats=2,
    keyed_repeats=3,
    feed_rows=(20_000, 100_000),
    change_rows=1_000,
    feed_repeats=2,
    writers_s=2.0,
    writers_age=20,
)


@dataclass(frozen=True)
class AgedLake:
    path: Path
    lake: Lake
    commit_s: tuple[float, ...]
    requests: tuple[Counters, ...]
    first_version: int

    def window(self, part: slice) -> Samples:
        return Samples(self.commit_s[part])


class Workshop:
    def __init__(self, folder: Path, sizes: Sizes, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.sizes = sizes
        self.say = say
        self._names = itertools.count()

    def new_path(self, name: str) -> Path:
        return self.folder / f"{name}-{next(self._names)}"

    def new_lake(self, name: str, *, catalog: str | None = None) -> Lake:
        return self.open_lake(self.new_path(name), catalog=catalog)

    def open_lake(self, path: Path, *, catalog: str | None = None) -> Lake:
        return floodmark.open(path, create=True, catalog=catalog, actor="bench")

    @cached_property
    def spark(self) -> SparkSession:
        self.say("starting Spark")
        from floodmark.rows.session import Sessions

        return Sessions({"master": MASTER, "spark.sql.shuffle.partitions": "2"}).get()

    @cached_property
    def batch(self) -> pa.Table:
        """Rows that are in memory already."""
        return arrow_rows(self.sizes.batch_rows)

    def frame(self, rows: int, partitions: int) -> DataFrame:
        """Rows of the same kind as a DataFrame, made by Spark's own expressions. No column repeats a pattern."""
        return self.spark.range(0, rows, 1, partitions).selectExpr(
            "id",
            f"timestamp_millis({FIRST_MS} + id * 10) AS ts",
            f"concat('key-', pmod(xxhash64(id, 1), {KEYS})) AS k",
            "pmod(xxhash64(id, 2), 1000003) / 100.0D AS amount",
            "CAST(pmod(xxhash64(id, 3), 97) AS INT) AS n",
        )

    @cached_property
    def aged(self) -> AgedLake:
        commits = self.sizes.late.stop
        self.say(f"making a lake of {commits} commits")
        lake = self.new_lake("aged")
        first = lake.create_table(TABLE, SCHEMA).version + 1
        commit_s: list[float] = []
        requests: list[Counters] = []
        for _ in range(commits):
            before = lake.catalog.storage.counters.snapshot()
            commit_s.append(timed(lambda: lake.append(TABLE, self.batch)))
            requests.append(lake.catalog.storage.counters.difference(before))
        return AgedLake(Path(lake.location.removeprefix("file://")), lake, tuple(commit_s), tuple(requests), first)

    def close(self) -> None:
        for name, part in list(self.__dict__.items()):
            if name == "aged":
                part.lake.close()
            elif name == "spark":
                part.stop()


def arrow_rows(rows: int, keys: int = KEYS, first: int = 0) -> pa.Table:
    """Rows in memory; the same ones every time. Every key occurs, if there are enough rows."""
    ids, chance = range(first, first + rows), random.Random(rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "ts": pa.array([(FIRST_MS + at * 10) * 1000 for at in ids], pa.timestamp("us", tz="UTC")),
            "k": pa.array([f"key-{at % keys}" for at in ids], pa.string()),
            "amount": pa.array([chance.randrange(1000003) / 100.0 for _ in ids], pa.float64()),
            "n": pa.array([chance.randrange(97) for _ in ids], pa.int32()),
        }
    )
