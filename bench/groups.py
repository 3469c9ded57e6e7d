"""Row groups: what a reader skips of large files. Read in this process, so that all bytes pass the lake's counters.

A point: rows of one value of the column that a table is sorted by, against all rows. A change: what one commit of
10,000 rows changed, asked at the version before a compaction and at the one after it, in turns: at the first the rows
are a file of their own, at the second they are somewhere in a file of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyiceberg.manifest import clear_manifest_cache

import floodmark
from bench.measure import Goal, Line, ratio, timed, times_in_turns, took
from bench.workshop import SCHEMA, TABLE, Workshop
from floodmark.lake import Lake

POINT = "id = {}"
FILES = 4
COMMITS = 8
NARROW = "id long, n int, k string"
WIDE_COLUMNS = 200
WIDE_ROWS = 100_000
MB = 1_000_000


def run(shop: Workshop) -> Iterator[Line]:
    yield from _point(shop)
    for rows in shop.sizes.feed_rows:
        yield from _change(shop, f"{_short(rows)} rows", NARROW, rows)
    wide = ", ".join(
        f"c{number} {('long', 'double', 'string', 'int')[number % 4]}" for number in range(WIDE_COLUMNS - 1)
    )
    rows = min(WIDE_ROWS, shop.sizes.feed_rows[0])
    yield from _change(shop, f"{_short(rows)} rows of {WIDE_COLUMNS} columns", f"id long, {wide}", rows)


def _point(shop: Workshop) -> Iterator[Line]:
    rows = shop.sizes.keyed_rows
    shop.say(f"a table of {rows:,} rows, sorted")
    with shop.new_lake("groups") as lake:
        lake.create_table(TABLE, SCHEMA, sort=["id"])
        lake.append(TABLE, shop.frame(rows, FILES))
        places = iter(range(1, rows, max(1, rows // 1000)))

        def one() -> None:
            if lake.scan(TABLE, where=POINT.format(next(places))).to_arrow().num_rows != 1:
                raise RuntimeError("a filter by id did not find one row")

        def every() -> None:
            if lake.scan(TABLE).to_arrow().num_rows != rows:
                raise RuntimeError("a scan did not find all rows")

        # The first ones import what reads.
        one()
        every()
        point, whole = times_in_turns(shop.sizes.read_repeats, lambda: timed(one), lambda: timed(every))
        sizes = [_bytes(lake, action) for action in (one, every)]
    note = f"{sizes[0] / MB:.2f} MB of {sizes[1] / MB:.0f} MB read"
    yield took(f"one id of {_short(rows)} sorted rows", point, note=note)
    yield took(f"all {_short(rows)} rows", whole)
    yield ratio("one id against all rows", point, whole, goal=Goal(0.1))


def _change(shop: Workshop, case: str, schema: str, rows: int) -> Iterator[Line]:
    shop.say(f"a table of {case}, compacted")
    change = shop.sizes.change_rows
    path = shop.new_path("groups")
    with floodmark.open(path, create=True, spark=shop.spark) as lake:
        lake.create_table(TABLE, schema)
        # A column's values follow from the id, and do not repeat a pattern.
        names = [field.name for field in lake.read(TABLE).schema.fields]
        kinds = [field.dataType.simpleString() for field in lake.read(TABLE).schema.fields]
        values = ["id", *map(_value, names[1:], kinds[1:])]
        first = rows - change * COMMITS
        lake.append(TABLE, shop.spark.range(0, first, 1, FILES).selectExpr(*values))
        sequences = []
        for start in range(first, rows, change):
            found = shop.spark.range(start, start + change, 1, 1).selectExpr(*values).toArrow()
            sequences.append(lake.append(TABLE, found).tables[0].sequence)
        before = lake.history()[0].version
        if lake.maintain.compact(TABLE, files_min=2).records[0].outcome != "compacted":
            raise RuntimeError("the table was not compacted")
        after = lake.history()[0].version
        left = lake.catalog.history.head(TABLE).files
    # In the middle of those that are new.
    since = sequences[COMMITS // 2 - 1]
    turns = [_Turn(path, since, version, change) for version in (before, after)]
    plain, gathered = times_in_turns(shop.sizes.feed_repeats, *(turn.seconds for turn in turns))
    yield took(f"changes before compaction, {case}", plain, note=turns[0].note())
    yield took(f"changes after compaction, {case}", gathered, note=f"{turns[1].note()} of {left}")
    yield ratio(f"time, after against before, {case}", gathered, plain, goal=Goal(3.0))
    # Wide rows that changed take more than 5 MB by themselves.
    bytes_max = max(5.0, 2 * turns[0].size_bytes / MB)
    yield Line(f"bytes read after compaction, {case}", " MB", turns[1].size_bytes / MB, goal=Goal(bytes_max))


class _Turn:
    """A change as a lake that was just opened reads it, at one version."""

    def __init__(self, path: Path, since: int, version: int, rows: int) -> None:
        self._path, self._since, self._version, self._rows = path, since, version, rows
        self.size_bytes = 0
        self.files = 0

    def seconds(self) -> float:
        clear_manifest_cache()
        with floodmark.open(self._path, read_only=True) as lake:
            before = lake.catalog.storage.counters.snapshot()
            found: list[pa.Table] = []
            took_s = timed(lambda: found.append(self._read(lake)))
            cost = lake.catalog.storage.counters.difference(before)
        if found[0].num_rows != self._rows:
            raise RuntimeError(f"{found[0].num_rows} changes, not {self._rows}")
        self.size_bytes, self.files = cost.bytes_read, cost.calls.get("open_input", 0)
        return took_s

    def _read(self, lake: Lake) -> pa.Table:
        return lake.changes(TABLE, since=self._since, until=self._since + 1, version=self._version).arrow().read_all()

    def note(self) -> str:
        return f"{self.size_bytes / MB:.2f} MB, {self.files} data files"


def _value(name: str, kind: str) -> str:
    chance = f"xxhash64(id, '{name}')"
    made = {"string": f"concat('key-', pmod({chance}, 1000))", "int": f"CAST(pmod({chance}, 97) AS INT)"}
    made |= {"bigint": f"pmod({chance}, 1000000)", "double": f"pmod({chance}, 1000003) / 100.0D"}
    return f"{made[kind]} AS {name}"


def _bytes(lake: Lake, action: Callable[[], None]) -> int:
    before = lake.catalog.storage.counters.snapshot()
    action()
    return lake.catalog.storage.counters.difference(before).bytes_read


def _short(rows: int) -> str:
    return f"{rows // 1_000_000} M" if rows >= 1_000_000 else f"{rows // 1000} k"
