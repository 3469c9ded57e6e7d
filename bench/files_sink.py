"""A files sink: millions of rows into Parquet objects, against Spark reading and writing the same data files.

The table is made once. Each turn of the lake's is a new sink that ships all of it from the beginning: planning, intent,
objects, their acknowledgement, the manifest and the settling are all on the clock, everything durable. Spark's side is
the line that a user would write, with the codec and level of the sink: it writes the table's columns alone, without
`_change` and `_seq`, proves nothing and leaves the disk to the system. Both read the very same files, from the page
cache; what the disk still has to write is flushed before every measurement.

How much of the cores both took is shown beside the times: who else wants them moves it less. The sink's text format is
measured too, against Spark's own JSON writer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from bench.keyed import ZSTD
from bench.machine import own_busy_s
from bench.measure import Goal, Line, Samples, rate, ratio, timed, times_in_turns
from bench.workshop import SCHEMA, TABLE, Workshop
from floodmark.rows import tasks
from floodmark.sinks.files.units import read_units

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MB = 2**20
# As many as a table has that was loaded by a job of some size; each is a task's worth.
SOURCE_FILES = 8
WARM_UP = 2


def run(shop: Workshop) -> Iterator[Line]:
    both = _Both(shop)
    yield from _compared(both, "parquet", goal=Goal(0.8, at_least=True))
    yield from _compared(both, "jsonl")
    both.lake.close()


def _compared(both: _Both, file_format: str, goal: Goal | None = None) -> Iterator[Line]:
    ship, plain = partial(both.ship, file_format), partial(both.plain, file_format)
    # The first ones compile code and start Python workers; what is asked for is a session at work.
    times_in_turns(WARM_UP, ship, plain)
    both.cpu_s = {name: [] for name in both.cpu_s}
    ours, theirs = times_in_turns(both.shop.sizes.bulk_repeats, ship, plain)
    yield rate(f"lake.sinks.run, {file_format}", ours, both.rows, both.notes["ours"])
    yield rate(f"Spark read and write, {file_format}", theirs, both.rows, both.notes["plain"])
    # Rows in a second, so the quicker one is below.
    yield ratio(f"rows/s, sink against Spark, {file_format}", theirs, ours, goal=goal, note=f"{both.rows:,} rows")
    cpu = [Samples(tuple(both.cpu_s[name])) for name in ("plain", "ours")]
    note = f"Spark took {cpu[0].median:.1f} s, the sink {cpu[1].median:.1f} s"
    yield ratio(f"rows per CPU second, sink against Spark, {file_format}", *cpu, note=note)


@dataclass
class _Both:
    """The two sides of a comparison, from the same files every time."""

    shop: Workshop
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "plain": []})
    notes: dict[str, str] = field(default_factory=dict)
    turns: int = 0

    def __post_init__(self) -> None:
        self.rows = self.shop.sizes.bulk_rows
        self.shop.say(f"a table of {self.rows:,} rows for a sink")
        self.lake = self.shop.new_lake("files-sink")
        self.lake.create_table(TABLE, SCHEMA)
        self.lake.append(TABLE, self.shop.frame(self.rows, SOURCE_FILES))
        self.files = self.lake.catalog.files.data_files(self.lake.catalog.history.head(TABLE))

    def ship(self, file_format: str) -> float:
        path, name = self.shop.new_path("files-sink-out"), f"sink {self.turns}"
        self.turns += 1
        self.lake.sinks.add(name, "files", tables=TABLE, path=str(path), format=file_format)
        # Whatever its size, the work is done by Spark's tasks: small sizes must take the way of large ones here.
        with patch.object(tasks, "IN_PROCESS_ROWS_MAX", 0):
            took_s = self._timed("ours", lambda: self.lake.sinks.run(name))
        (unit,) = read_units(str(path))
        if unit.rows != self.rows:
            raise RuntimeError(f"the sink shipped {unit.rows} rows of {self.rows}")
        self.notes["ours"] = f"{len(unit.objects)} objects, {unit.size_bytes / MB:.0f} MB, with manifest, durable"
        self.lake.sinks.remove(name)
        shutil.rmtree(path)
        return took_s

    def plain(self, file_format: str) -> float:
        path = self.shop.new_path("files-sink-plain")

        def write() -> None:
            frame: DataFrame = self.shop.spark.read.parquet(*self.files)
            if file_format == "parquet":
                frame.write.options(**ZSTD).parquet(str(path))
            else:
                frame.write.json(str(path))

        took_s = self._timed("plain", write)
        sizes = [file.stat().st_size for file in _data_files(path)]
        self.notes["plain"] = f"{len(sizes)} files, {sum(sizes) / MB:.0f} MB, not durable"
        shutil.rmtree(path)
        return took_s

    def _timed(self, name: str, action: Callable[[], object]) -> float:
        """Seconds of one call, with nothing left to flush; what it took of the cores is kept beside."""
        os.sync()
        before = own_busy_s()
        took_s = timed(action)
        self.cpu_s[name].append(own_busy_s() - before)
        return took_s


def _data_files(path: Path) -> Iterator[Path]:
    return (file for file in path.iterdir() if file.name.startswith("part-"))
