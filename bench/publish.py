"""Publish alone: the one SQL transaction, for 1, 2 and 10 tables, on SQLite and on PostgreSQL.

Timed between the failpoints right before and right after it, so staging and metadata files are not in it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from sqlalchemy.exc import SQLAlchemyError

from bench.measure import Goal, Line, not_measured, times_in_turns, took
from bench.workshop import SCHEMA, Workshop, arrow_rows
from floodmark import failpoints
from floodmark.lake import Lake
from floodmark.testing.postgres import postgres_server

TABLES = (1, 2, 10)
ROWS = 10
GOALS = {("SQLite", 2): Goal(12)}


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
    shop.say(f"publish on {database}")
    lake = shop.new_lake("publish", catalog=catalog)
    for number in range(max(TABLES)):
        lake.create_table(f"t{number}", SCHEMA)
    measures = [_measure(lake, tables) for tables in TABLES]
    times_in_turns(2, *measures)
    found = times_in_turns(shop.sizes.publish_repeats, *measures)
    lake.close()
    for tables, samples in zip(TABLES, found, strict=True):
        name = f"{database}, {tables} table{'s' if tables > 1 else ''}"
        yield took(name, samples, goal=GOALS.get((database, tables)))


def _measure(lake: Lake, tables: int) -> Callable[[], float]:
    rows = arrow_rows(ROWS)

    def publish() -> float:
        with _watched() as passed, lake.transaction() as change:
            for number in range(tables):
                change.append(f"t{number}", rows)
        return passed["transaction.published"] - passed["transaction.built"]

    return publish


@contextmanager
def _watched() -> Iterator[dict[str, float]]:
    """When each failpoint was passed, last."""
    passed: dict[str, float] = {}

    def watch(name: str) -> None:
        passed[name] = time.perf_counter()

    failpoints.observer = watch
    try:
        yield passed
    finally:
        failpoints.observer = None
