"""The change feed: what changed costs what changed, whatever the table's size and history.

Two tables of very different size get the same change, in turns. Times are those of a warm session, from the question
to rows in Spark. Bytes and files are those of a lake just opened, that remembers nothing, reading the same changes in
this process, so that all of it passes the counters of its storage. Then the history is rewritten: a merge and a delete
of keys from all over replace every file, the rows of which keep their sequences. What changed then is asked for again:
what these two did, the change of before, the file of which was rewritten too, and a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyiceberg.manifest import clear_manifest_cache

import floodmark
from bench.measure import Goal, Line, Samples, in_turns, timed, times_in_turns, took
from bench.workshop import TABLE, Workshop
from floodmark.commit.file_columns import REMEMBERED
from floodmark.lake import Lake
from floodmark.storage.counters import Counters

NARROW = "id long, n int"
FILES = 4
WARM_UP = 2
SECOND = Goal(1.0)
SAME = Goal(1.2, low=0.8)


def run(shop: Workshop) -> Iterator[Line]:
    tables = [_Fed(shop, rows) for rows in shop.sizes.feed_rows]
    sizes = [_short(fed.rows) for fed in tables]
    change = f"{shop.sizes.change_rows:,} rows"
    times_in_turns(WARM_UP, *(fed.answer for fed in tables))
    for size, samples in zip(
        sizes, times_in_turns(shop.sizes.feed_repeats, *(fed.answer for fed in tables)), strict=True
    ):
        yield took(f"changes, table of {size} rows", samples, unit=" s", goal=SECOND, note=f"{change} appended")
    before = [fed.cost(fed.append()) for fed in tables]
    yield from _costs(before, sizes)
    for fed, size, cost in zip(tables, sizes, before, strict=True):
        shop.say(f"rewriting the history of {size} rows")
        yield from _rewritten(shop, fed, size, cost)
    yield from _nothing_new(shop, tables[-1])
    for fed in tables:
        fed.lake.close()


def _rewritten(shop: Workshop, fed: _Fed, size: str, before: Counters) -> Iterator[Line]:
    old, last = fed.paths(), fed.lake.catalog.history.head(TABLE).sequence
    for kind, change in (("merged", fed.merge_all_over), ("deleted", fed.delete_all_over)):
        since = change()
        samples = in_turns(shop.sizes.feed_repeats, partial(fed.collect, since))[0]
        rows = fed.lake.changes(TABLE, since=since).df.count()
        yield took(f"changes, {kind} all over {size} rows", samples, unit=" s", goal=SECOND, note=f"{rows:,} rows")
    if old & fed.paths():
        raise RuntimeError("a file of before was not rewritten")
    yield _against(f"bytes read, the same change, rewritten, {size} rows", fed.cost(last - 1, last), before)
    yield _against(f"bytes read, the next change, {size} rows", fed.cost(fed.append()), before)


def _costs(costs: list[Counters], sizes: list[str]) -> Iterator[Line]:
    for size, cost in zip(sizes, costs, strict=True):
        files = cost.calls.get("open_input", 0)
        yield Line(f"bytes read, table of {size} rows", " kB", cost.bytes_read / 1000, note=f"{files} data files")
    yield _against(f"bytes read, {sizes[1]} against {sizes[0]} rows", costs[1], costs[0])
    opened = [cost.calls.get("open_input", 0) for cost in costs]
    yield Line(f"data files opened, {sizes[1]} against {sizes[0]} rows", "x", opened[1] / opened[0], goal=SAME)


def _against(name: str, one: Counters, other: Counters) -> Line:
    files = one.calls.get("open_input", 0)
    note = f"{one.bytes_read / 1000:.0f} kB, {files} data files"
    return Line(name, "x", one.bytes_read / other.bytes_read, goal=SAME, note=note)


def _nothing_new(shop: Workshop, fed: _Fed) -> Iterator[Line]:
    head = fed.lake.catalog.history.head(TABLE).sequence
    if not _jobs(shop, lambda: fed.collect(head - 1)):
        raise RuntimeError("Spark jobs are not counted: reading changes took none")
    answers: list[bool] = []
    samples: list[Samples] = []

    def ask() -> None:
        answers.append(fed.lake.changes(TABLE, since=head).empty)

    jobs = _jobs(shop, lambda: samples.extend(in_turns(shop.sizes.feed_repeats, ask)))
    if not all(answers):
        raise RuntimeError("there is news after the newest sequence")
    yield took("nothing new", samples[0])
    yield Line("Spark jobs for nothing new", "", jobs, repeats=len(answers), goal=Goal(0))


def _jobs(shop: Workshop, action: Callable[[], object]) -> int:
    """How many Spark jobs an action runs."""
    context, group = shop.spark.sparkContext, str(shop.new_path("jobs"))
    context.setJobGroup(group, "counted")
    try:
        action()
    finally:
        context.setJobGroup("bench", "not counted")
    return len(context.statusTracker().getJobIdsForGroup(group))


@dataclass
class _Fed:
    """A keyed table of so many narrow rows, and the changes that it gets."""

    shop: Workshop
    rows: int

    def __post_init__(self) -> None:
        self.shop.say(f"a table of {self.rows:,} narrow keyed rows")
        self.lake: Lake = self.shop.new_lake("feed")
        self._change_rows, self._next_id = self.shop.sizes.change_rows, self.rows
        self.lake.create_table(TABLE, NARROW, key=["id"])
        ids = self.shop.spark.range(0, self.rows, 1, FILES)
        self.lake.append(TABLE, ids.selectExpr("id", "CAST(pmod(xxhash64(id), 97) AS INT) AS n"))

    def append(self) -> int:
        """One change of new rows; returns the sequence before it."""
        first, self._next_id = self._next_id, self._next_id + self._change_rows
        return self._changed(lambda: self.lake.append(TABLE, self._incoming(range(first, self._next_id))))

    def merge_all_over(self) -> int:
        ids = range(0, self._step * self._change_rows, self._step)
        return self._changed(lambda: self.lake.merge(TABLE, self._incoming(ids)))

    def delete_all_over(self) -> int:
        return self._changed(lambda: self.lake.delete(TABLE, where=f"id % {self._step} = 1"))

    @property
    def _step(self) -> int:
        """From one id to the next if a change is to meet every file."""
        return self._next_id // self._change_rows

    def _changed(self, change: Callable[[], object]) -> int:
        before = self.lake.catalog.history.head(TABLE).sequence
        change()
        return before

    def answer(self) -> float:
        """Seconds until Spark has the rows of a change that was just made."""
        since = self.append()
        return timed(lambda: self.collect(since))

    def collect(self, since: int) -> None:
        self.lake.changes(TABLE, since=since).df.write.format("noop").mode("append").save()

    def cost(self, since: int, until: int | None = None) -> Counters:
        """What a lake that was just opened reads for a change of the usual size."""
        clear_manifest_cache()
        REMEMBERED.clear()
        with floodmark.open(self.lake.location, read_only=True) as lake:
            before = lake.catalog.storage.counters.snapshot()
            rows = lake.changes(TABLE, since=since, until=until).arrow().read_all().num_rows
            cost = lake.catalog.storage.counters.difference(before)
        # Some were changed again since, if that is asked for.
        if not 0.9 * self._change_rows <= rows <= self._change_rows:
            raise RuntimeError(f"{rows} changes, not {self._change_rows}")
        return cost

    def _incoming(self, ids: range) -> pa.Table:
        # No row of the table has such an n, nor has the merge before.
        value = -1 - self.lake.catalog.history.head(TABLE).sequence
        return pa.table({"id": pa.array(ids, pa.int64()), "n": pa.array([value] * len(ids), pa.int32())})

    def paths(self) -> set[str]:
        return set(self.lake.catalog.files.data_files(self.lake.catalog.history.head(TABLE)))


def _short(rows: int) -> str:
    return f"{rows // 1_000_000} M" if rows >= 1_000_000 else f"{rows // 1000} k"
