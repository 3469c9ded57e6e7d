"""Row groups: what a reader skips of large files. Read in this process, so that all bytes pass the lake's counters.

A point: rows of one value of the column that a table is sorted by, against all rows. A change: what one commit of
10,000 rows changed, asked at the version before a compaction and at the one after it, in turns: at the first the rows
are a file of their own, at the second they are somewhere in a file of all rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
from pyiceberg.manifest import clear_manifest_cache

import floodmark
from bench.measure import Goal, Line, not_measured, ratio, timed, times_in_turns, took
from bench.workshop import SCHEMA, TABLE, Workshop
from floodmark.lake import Lake
from floodmark.testing.s3 import s3_environment, s3_stand_in

POINT = "id = {}"
FILES = 4
COMMITS = 8
BUCKETS = 16
NARROW = "id long, n int, k string"
WIDE_COLUMNS = 200
WIDE_ROWS = 100_000
MB = 1_000_000


def run(shop: Workshop) -> Iterator[Line]:
    # First: Spark's workers get their environment, and so the credentials, when it starts.
    yield from _in_s3(shop)
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
        by_spark = list(_by_spark(shop, lake, rows))
    note = f"{sizes[0] / MB:.2f} MB of {sizes[1] / MB:.0f} MB read"
    yield took(f"one id of {_short(rows)} sorted rows", point, note=note, goal=Goal(30.0))
    yield took(f"all {_short(rows)} rows", whole)
    yield ratio("one id against all rows", point, whole, goal=Goal(0.1))
    yield from by_spark


def _by_spark(shop: Workshop, lake: Lake, rows: int) -> Iterator[Line]:
    """The same filter as a DataFrame, against Spark's own read of the same files, whose columns it is given."""
    files = lake.catalog.files.data_files(lake.catalog.history.head(TABLE))
    columns = lake.read(TABLE).schema
    places = iter(range(2, rows, max(1, rows // 1000)))

    def ours() -> None:
        if len(lake.read(TABLE, where=POINT.format(next(places))).collect()) != 1:
            raise RuntimeError("a filter by id did not find one row")

    def plain() -> None:
        found = shop.spark.read.schema(columns).parquet(*files).where(POINT.format(next(places)))
        if len(found.collect()) != 1:
            raise RuntimeError("a filter by id did not find one row")

    ours()
    plain()
    frame, spark = times_in_turns(shop.sizes.read_repeats, lambda: timed(ours), lambda: timed(plain))
    yield took(f"one id of {_short(rows)} sorted rows, df", frame)
    yield took("the same files and filter by Spark alone", spark)
    yield ratio("df against Spark alone", frame, spark, goal=Goal(1.3))


def _in_s3(shop: Workshop) -> Iterator[Line]:
    """One key of a bucketed table in S3, asked by a new process: every request counts, metadata included."""
    rows = shop.sizes.keyed_rows * 12 // 5
    case = f"where id = 5, {_short(rows)} rows in S3, new process"
    with ExitStack() as stack:
        try:
            server = stack.enter_context(s3_stand_in())
            stack.enter_context(s3_environment())
            place = f"s3://{server.make_bucket()}/lake"
        except (ImportError, OSError) as error:
            yield not_measured(case, f"no stand-in: {type(error).__name__}: {error}")
            return
        shop.say(f"a table of {rows:,} rows in S3")
        catalog = f"sqlite:///{shop.new_path('groups-catalog')}.db"
        options = {"catalog": catalog, "storage_options": server.options}
        with floodmark.open(place, create=True, spark=shop.spark, **options) as lake:
            lake.create_table(TABLE, NARROW, key=["id"], partition=[f"bucket({BUCKETS}, id)"], sort=["id"])
            for start in range(0, rows, rows // COMMITS):
                ids = range(start, start + rows // COMMITS)
                lake.append(
                    TABLE, pa.table({"id": ids, "n": pa.array(ids, pa.int32()), "k": [f"{one:x}" for one in ids]})
                )
            yield _asked(f"requests, {case}, as loaded", place, catalog, server.options, None)
            if lake.maintain.compact(TABLE, files_min=2).records[0].outcome != "compacted":
                raise RuntimeError("the table in S3 was not compacted")
            yield _asked(f"requests, {case}, compacted", place, catalog, server.options, Goal(10.0))


def _asked(name: str, place: str, catalog: str, options: Mapping[str, str], goal: Goal | None) -> Line:
    command = [sys.executable, "-m", "bench.groups", place, catalog, json.dumps(options)]
    asked = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    calls = ", ".join(f"{verb} {count}" for verb, count in asked["calls"].items())
    return Line(name, "", asked["requests"], goal=goal, note=f"{calls}; {asked['bytes'] / MB:.2f} MB")


def _ask(place: str, catalog: str, options: str) -> None:
    with floodmark.open(place, read_only=True, catalog=catalog, storage_options=json.loads(options)) as lake:
        if [row["id"] for row in lake.scan(TABLE, where="id = 5").to_arrow().to_pylist()] != [5]:
            raise RuntimeError("the key was not found")
        counters = lake.catalog.storage.counters
        found = {"requests": counters.total, "calls": counters.calls, "bytes": counters.bytes_read}
    sys.stdout.write(json.dumps(found) + "\n")


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


if __name__ == "__main__":
    _ask(*sys.argv[1:])
