"""Keys found among millions: reads of one row and keyed writes, in a table of random keys and in one ten times as long.

Everything runs in this process, warm: files are in the system's cache, segments are open, and folded after the load.
A `get` reads one row group of one file; a miss reads none. After many small commits, and before any maintenance, a key
may be in any of as many segments. Keyed writes bring other rows each time, and are durable when they return. The memory
of a process that only looks up is that of a process of its own. DuckLake has the same rows sorted by the key, Lance has
them with a BTREE. Both are measured in turns with `get`, if they are installed (`pip install floodmark[bench]`).
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.measure import Goal, Line, Samples, not_measured, ratio, timed, times_in_turns, took
from bench.workshop import Workshop
from floodmark.lake import Lake

TABLE = "users"
COLUMNS = "id string not null, name string, amount double, a long, b long"
PIECE_ROWS = 500_000
LARGE = 10
GETS = 300
SMALL_COMMITS = 1_000
COMMIT_ROWS = 1_000
MERGE_ROWS = 10
KEY_CHARACTERS = 45
_LETTERS = np.frombuffer(b"0123456789abcdef", np.uint8)


def run(shop: Workshop) -> Iterator[Line]:
    small = _Keys(shop, shop.sizes.keyed_rows)
    yield from small.build()
    found = yield from small.reads(Goal(2.0), Goal(8.0))
    written = yield from small.writes(Goal(60.0))
    yield from _others(shop, small)
    yield from small.after_commits(found)
    small.close()
    large = _Keys(shop, shop.sizes.keyed_rows * LARGE)
    yield from large.build()
    found_large = yield from large.reads(None, None)
    written_large = yield from large.writes(None)
    yield ratio(f"get, {large.name} against {small.name}", found_large, found, goal=Goal(1.5))
    for what, over, under in zip(("append", "merge"), written_large, written, strict=True):
        yield ratio(f"keyed {what}, {large.name} against {small.name}", over, under, goal=Goal(1.3))
    yield large.memory()
    large.close()


def _short(rows: int) -> str:
    return f"{rows / 1_000_000:g} M" if rows >= 1_000_000 else f"{rows / 1000:g} k"


class _Keys:
    """A lake with one table of random keys."""

    def __init__(self, shop: Workshop, rows: int) -> None:
        self._shop = shop
        self._rows = rows
        self.name = f"{_short(rows)} rows"
        self.path = shop.new_path("lookups")
        self.lake: Lake = shop.open_lake(self.path)
        self._chance = np.random.default_rng(rows)
        # A thousandth of the keys, to be asked for.
        self.known: list[str] = []

    def close(self) -> None:
        self.lake.close()

    def build(self) -> Iterator[Line]:
        self._shop.say(f"a keyed table of {self._rows:,} rows")
        self.lake.create_table(TABLE, COLUMNS, key=["id"])
        cpu_s = time.process_time()
        for start in range(0, self._rows, PIECE_ROWS):
            rows = self._new(min(PIECE_ROWS, self._rows - start))
            self.known += rows["id"].take(pa.array(range(0, rows.num_rows, max(1, rows.num_rows // 500)))).to_pylist()
            self.lake.append(TABLE, rows)
        note = "processor time for a million rows, with the rows made and the keys checked"
        yield Line(f"load, {self.name}", " s", (time.process_time() - cpu_s) / self._rows * 1_000_000, note=note)
        folded = timed(lambda: self.lake.maintain.index(TABLE))
        table_id = self.lake.heads()[0].table_id
        used = self.lake.catalog.indexes.count(table_id)
        yield Line(f"maintenance of the index, {self.name}", " s", folded, note=f"{used} segments in use after it")
        segments = self.lake.catalog.indexes.segments(table_id)
        size = sum(row.size_bytes for row in segments if row.retired_ms is None)
        yield Line(f"bytes a row of the index, {self.name}", " B", size / self._rows, goal=Goal(32.0))

    def _new(self, rows: int) -> pa.Table:
        letters = _LETTERS[self._chance.integers(0, len(_LETTERS), rows * KEY_CHARACTERS, np.uint8)]
        offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(KEY_CHARACTERS)
        keys = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(letters))
        numbers = pa.array(np.arange(rows))
        names = pa.array([f"name {number}" for number in range(1000)]).take(pa.array(np.arange(rows) % 1000))
        amounts = pa.array(self._chance.random(rows))
        return pa.table([keys, names, amounts, numbers, numbers], ["id", "name", "amount", "a", "b"])

    def get(self) -> float:
        key = self.known[int(self._chance.integers(len(self.known)))]
        started = time.perf_counter()
        row = self.lake.get(TABLE, key)
        taken = time.perf_counter() - started
        if row is None or row["id"] != key:
            raise RuntimeError("a key that exists was not found")
        return taken

    def _miss(self) -> float:
        started = time.perf_counter()
        if self.lake.get(TABLE, "no such key") is not None:
            raise RuntimeError("a key was found that does not exist")
        return time.perf_counter() - started

    def reads(self, half: Goal | None, most: Goal | None) -> Iterator[Line]:
        for measure in (self.get, self._miss):
            for _ in range(20):
                measure()
        hits = Samples(tuple(self.get() for _ in range(GETS)))
        misses = Samples(tuple(self._miss() for _ in range(GETS)))
        yield took(f"get, {self.name}", hits, goal=half)
        late = sorted(hits.values)[int(GETS * 0.99)]
        yield Line(f"get, p99, {self.name}", " ms", late * 1000, goal=most)
        yield took(f"a key that does not exist, {self.name}", misses, goal=Goal(0.5))
        return hits

    def writes(self, goal: Goal | None) -> Iterator[Line]:
        appended = [self._new(COMMIT_ROWS) for _ in range(self._shop.sizes.keyed_repeats)]
        merged = [self._new(MERGE_ROWS) for _ in appended]
        self.lake.append(TABLE, self._new(COMMIT_ROWS))
        appends = Samples(tuple(timed(lambda rows=rows: self.lake.append(TABLE, rows)) for rows in appended))
        merges = Samples(tuple(timed(lambda rows=rows: self.lake.merge(TABLE, rows)) for rows in merged))
        yield took(f"append of {COMMIT_ROWS:,} rows, {self.name}", appends, goal=goal)
        yield took(f"merge of {MERGE_ROWS} new rows, {self.name}", merges, goal=goal)
        mine = iter(self.known[::7])
        changes = [pa.table({"id": [next(mine) for _ in range(MERGE_ROWS)]}) for _ in range(3)]
        changes = [
            rows.append_column("name", pa.array(["changed"] * MERGE_ROWS))
            .append_column("amount", pa.array([1.0] * MERGE_ROWS))
            .append_column("a", pa.array([1] * MERGE_ROWS))
            .append_column("b", pa.array([1] * MERGE_ROWS))
            for rows in changes
        ]
        rewriting = Samples(tuple(timed(lambda rows=rows: self.lake.merge(TABLE, rows)) for rows in changes))
        note = "each in another place: whole files are written again"
        yield took(f"merge of {MERGE_ROWS} rows that exist, {self.name}", rewriting, unit=" s", note=note)
        return appends, merges

    def after_commits(self, before: Samples) -> Iterator[Line]:
        """The same after many small commits, before any maintenance."""
        count = SMALL_COMMITS if self._rows >= 1_000_000 else 20
        for _ in range(count):
            self.lake.append(TABLE, self._new(10))
        for _ in range(20):
            self.get()
        hits = Samples(tuple(self.get() for _ in range(GETS)))
        yield took(f"get after {count:,} small commits, {self.name}", hits)
        yield ratio(f"get after {count:,} small commits against before", hits, before, goal=Goal(2.0))

    def memory(self) -> Line:
        done = subprocess.run(
            [sys.executable, "-c", _ASKER, str(self.path), TABLE, json.dumps(self.known[::50])],
            capture_output=True,
            text=True,
            check=True,
        )
        return Line(f"memory of a process that gets, {self.name}", " MB", float(done.stdout), goal=Goal(300.0))


_ASKER = """
import json, sys
import floodmark
with floodmark.open(sys.argv[1], read_only=True) as lake:
    for key in json.loads(sys.argv[3]):
        if lake.get(sys.argv[2], key) is None:
            raise SystemExit("a key that exists was not found")
# Not the maximum that the kernel gives for a process: it begins with that of the process that started it.
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
"""


def _others(shop: Workshop, ours: _Keys) -> Iterator[Line]:
    """The same rows with the key sorted or indexed by others, in turns with `get`."""
    rows = ours.lake.scan(TABLE).to_arrow().sort_by("id")
    for name, make, goal in (("DuckLake, sorted", _ducklake, Goal(1.0)), ("Lance BTREE", _lance, Goal(1.5))):
        try:
            ask = make(shop.new_path("others"), rows)
        except ImportError as error:
            yield not_measured(f"get against {name}", str(error))
            continue
        ask(ours.known[0])
        asked = map(ask, ours.known)
        mine, theirs = times_in_turns(100, ours.get, lambda asked=asked: timed(lambda: next(asked)))
        yield took(f"one key, {name}, {ours.name}", theirs)
        yield ratio(f"get against {name}", mine, theirs, goal=goal)


def _ducklake(path: Path, rows: pa.Table) -> Callable[[str], None]:
    import duckdb

    package = importlib.util.find_spec("duckdb_extension_ducklake")
    if package is None or package.origin is None:
        raise ImportError("duckdb-extension-ducklake")
    extension = Path(package.origin).parent / "extensions" / f"v{duckdb.__version__}" / "ducklake.duckdb_extension"
    path.mkdir()
    offline = {"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    connection = duckdb.connect(config=offline)
    connection.execute(f"LOAD '{extension}'")
    connection.execute(f"ATTACH 'ducklake:{path}/lake.ducklake' AS lake (DATA_PATH '{path}/data')")
    connection.register("rows", rows)
    connection.execute(f"CREATE TABLE lake.{TABLE} AS SELECT * FROM rows ORDER BY id")

    def ask(key: str) -> None:
        found = connection.execute(f"SELECT * FROM lake.{TABLE} WHERE id = ?", [key]).fetchall()
        if len(found) != 1:
            raise RuntimeError("a key that exists was not found")

    return ask


def _lance(path: Path, rows: pa.Table) -> Callable[[str], None]:
    import lance

    data = lance.write_dataset(rows, str(path))
    data.create_scalar_index("id", "BTREE")

    def ask(key: str) -> None:
        if data.to_table(filter=f"id = '{key}'").num_rows != 1:
            raise RuntimeError("a key that exists was not found")

    return ask
