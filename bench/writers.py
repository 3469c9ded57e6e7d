"""Many writers: processes of their own that append to one table, or to a table each, for some seconds.

Each writer opens the lake, appends once, reports that it is ready, and then appends 100 rows from memory until the time
is over. They start together when all are ready: starting so many processes takes the machine longer than the run. The
figure is acknowledged commits per second; a writer that gets an error counts it and goes on. After each run the rows of
the tables are counted: what was acknowledged must be there once. One writer alone is the same program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from bench.measure import Goal, Line, Samples, in_turns, not_measured, ratio, took
from bench.workshop import SCHEMA, Workshop, arrow_rows
from floodmark.lake import Lake
from floodmark.testing.postgres import postgres_server

ROWS = 100
READY = "ready\n"
ONE_MS = {"SQLite": Goal(10), "PostgreSQL": Goal(25)}
# Writers, tables, the least commits in a second.
RUNS = {
    "SQLite": ((1, 1, None), (8, 1, Goal(60, at_least=True))),
    "PostgreSQL": (
        (1, 1, None),
        (8, 1, Goal(60, at_least=True)),
        (16, 1, Goal(60, at_least=True)),
        (32, 1, Goal(60, at_least=True)),
        (20, 20, Goal(90, at_least=True)),
    ),
}
P99 = Goal(600)


@dataclass(frozen=True)
class Written:
    """What one writer did: seconds that each acknowledged commit took, and the errors it got."""

    commit_s: list[float]
    errors: list[str]


def run(shop: Workshop) -> Iterator[Line]:
    yield from _database(shop, "SQLite", None)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(postgres_server(shop.new_path("postgres")))
            catalog = server.url(server.new_database())
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError, SQLAlchemyError) as error:
            yield not_measured("PostgreSQL", f"no server: {type(error).__name__}: {error}")
            return
        yield from _database(shop, "PostgreSQL", catalog)


def _database(shop: Workshop, database: str, catalog: str | None) -> Iterator[Line]:
    path = shop.new_path("writers")
    with shop.open_lake(path, catalog=catalog) as lake:
        for number in range(20):
            lake.create_table(f"t{number}", SCHEMA)
        yield from _alone(shop, lake, database)
        yield from _age(shop, lake, database)
        alone = None
        for writers, tables, goal in RUNS[database]:
            shop.say(f"{writers} writers on {tables} tables, {database}")
            written = _writers(shop, lake, str(path), catalog, writers, tables)
            name = f"{database}, {writers} writer{'s' * (writers > 1)} on {tables} table{'s' * (tables > 1)}"
            line = _rate(shop, name, written, goal)
            yield line
            alone = alone or line.figure
            if writers > 1:
                yield from _fair(name, written, line, alone)


def _alone(shop: Workshop, lake: Lake, database: str) -> Iterator[Line]:
    """Commits of 1,000 rows by one writer, in turns: to one table, to two, to ten."""
    rows, repeats = shop.batch, shop.sizes.publish_repeats

    def publish(tables: int) -> None:
        with lake.transaction() as change:
            for number in range(tables):
                change.append(f"t{number}", rows)

    in_turns(3, lambda: lake.append("t0", rows), lambda: publish(2), lambda: publish(10))
    one, two, ten = in_turns(repeats, lambda: lake.append("t0", rows), lambda: publish(2), lambda: publish(10))
    yield took(f"{database}, one commit, p50", one, goal=ONE_MS[database], note=f"{shop.sizes.batch_rows:,} rows")
    yield ratio(f"{database}, commit of two tables against one", two, one, goal=Goal(1.4))
    yield ratio(f"{database}, commit of ten tables against one", ten, one, note="the publish alone: section publish")


def _age(shop: Workshop, lake: Lake, database: str) -> Iterator[Line]:
    """A table of many commits against a young one, in turns."""
    for _ in range(shop.sizes.writers_age):
        lake.append("t19", shop.batch)
    for _ in range(shop.sizes.early_at):
        lake.append("t18", shop.batch)
    old, young = in_turns(
        shop.sizes.publish_repeats, lambda: lake.append("t19", shop.batch), lambda: lake.append("t18", shop.batch)
    )
    ages = f"after {shop.sizes.writers_age:,} commits against after {shop.sizes.early_at}"
    yield ratio(f"{database}, one commit, old against young", old, young, goal=Goal(1.2), note=ages)


def _writers(shop: Workshop, lake: Lake, path: str, catalog: str | None, writers: int, tables: int) -> list[Written]:
    before = {f"t{number}": _rows(lake, f"t{number}") for number in range(tables)}
    task = {"path": path, "catalog": catalog, "seconds": shop.sizes.writers_s}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.writers", json.dumps({**task, "table": f"t{number % tables}"})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(writers)
    ]
    for child in children:
        if child.stdout is None or child.stdout.readline() != READY:
            raise AssertionError("a writer did not get ready")
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    written = [Written(**json.loads(child.communicate()[0])) for child in children]
    # Each one's first commit was before the start.
    committed = sum(1 + len(one.commit_s) for one in written) * ROWS
    after = sum(_rows(lake, table) - rows for table, rows in before.items())
    if after != committed:
        raise AssertionError(f"{committed} rows were acknowledged, {after} are in the tables")
    return written


def _rows(lake: Lake, table: str) -> int:
    return lake.catalog.history.head(table).rows


def _rate(shop: Workshop, name: str, written: list[Written], goal: Goal | None) -> Line:
    commits = sum(len(one.commit_s) for one in written)
    failed = sum(len(one.errors) for one in written)
    note = f"{commits} commits of {ROWS} rows, {failed} failed"
    kinds = sorted({error for one in written for error in one.errors})
    return Line(name, " commits/s", commits / shop.sizes.writers_s, goal=goal, note=note, details={"errors": kinds})


def _fair(name: str, written: list[Written], line: Line, alone: float | None) -> Iterator[Line]:
    times_s = [one for some in written for one in some.commit_s]
    if len(times_s) < 2:
        return
    p99 = quantiles(times_s, n=100)[98] * 1000
    yield took(f"{name}, p50", Samples(tuple(times_s)))
    yield Line(f"{name}, p99", " ms", p99, goal=P99 if "20 tables" in name else None)
    fewest, mean = min(len(one.commit_s) for one in written), len(times_s) / len(written)
    yield Line(f"{name}, the slowest writer against the mean", "x", fewest / mean, goal=Goal(1 / 3, at_least=True))
    failed = sum(len(one.errors) for one in written)
    yield Line(f"{name}, failed", "", failed, goal=Goal(0))
    if alone and line.figure is not None:
        yield Line(f"{name}, against one writer", "x", line.figure / alone, goal=Goal(1, at_least=True))


def write(task: dict[str, Any]) -> Written:
    """One writer, in a process of its own."""
    import floodmark

    rows = arrow_rows(ROWS)
    written = Written([], [])
    with floodmark.open(task["path"], catalog=task["catalog"], actor="bench") as lake:
        lake.append(task["table"], rows)  # imports what an append needs
        sys.stdout.write(READY)
        sys.stdout.flush()
        sys.stdin.readline()
        end = time.monotonic() + task["seconds"]
        while time.monotonic() < end:
            began = time.perf_counter()
            try:
                lake.append(task["table"], rows)
            except floodmark.FloodmarkError as error:
                written.errors.append(f"{type(error).__name__}: {error}"[:200])
            else:
                written.commit_s.append(time.perf_counter() - began)
    return written


if __name__ == "__main__":
    done = write(json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps({"commit_s": done.commit_s, "errors": done.errors}))
