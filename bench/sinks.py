"""Sinks over HTTP, and a tick with nothing new.

The receiver is another process: one that reads and throws away, then a lake behind `floodmark run`. Every round is a
new sink that ships the whole table from the beginning: planning, intent, parts sealed before they are sent,
acknowledgement and settling are all on the clock, on both sides durable. Both share the machine's cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import floodmark
from bench.measure import Goal, Line, Samples, rate, timed, took
from bench.workshop import SCHEMA, TABLE, Workshop, arrow_rows
from floodmark.lake import Lake
from floodmark.testing.receiver import receiver_process, stats_of

HTTP_ROWS_PER_BATCH = 50_000
TICKS = 200


def run(shop: Workshop) -> Iterator[Line]:
    lake = shop.new_lake("sinks")
    lake.create_table(TABLE, SCHEMA)
    batches = max(2, shop.sizes.bulk_rows // 10 // HTTP_ROWS_PER_BATCH)
    shop.say(f"a table of {batches * HTTP_ROWS_PER_BATCH:,} rows for sinks over HTTP")
    for number in range(batches):
        lake.append(TABLE, arrow_rows(HTTP_ROWS_PER_BATCH, first=number * HTTP_ROWS_PER_BATCH))
    yield from _discarding(shop, lake, batches * HTTP_ROWS_PER_BATCH)
    yield from _tick(lake)
    lake.close()
    yield from _lake_to_lake(shop)


def _discarding(shop: Workshop, lake: Lake, rows: int) -> Iterator[Line]:
    with receiver_process("--discard") as url:
        samples = Samples(tuple(_ship(lake, url, rows) for _ in range(shop.sizes.bulk_repeats)))
        stats = stats_of(url)
    if stats["rows"] != rows * shop.sizes.bulk_repeats:
        raise RuntimeError(f"the receiver saw {stats['rows']} rows")
    line = rate("HTTP sink to a receiver that discards", samples, rows, f"{rows:,} rows, parts of 5,000, gzip")
    yield replace(line, goal=Goal(50, at_least=True))


def _ship(lake: Lake, url: str, rows: int) -> float:
    lake.sinks.add("bench", "http", tables=TABLE, url=url)
    found = []
    took_s = timed(lambda: found.append(lake.sinks.run("bench")))
    if found[0].rows != rows:
        raise RuntimeError(f"the sink shipped {found[0].rows} rows of {rows}: {found[0].error}")
    lake.sinks.remove("bench")
    return took_s


def _tick(lake: Lake) -> Iterator[Line]:
    lake.sinks.add("quiet", "http", tables=TABLE, url="http://127.0.0.1:9/", start="head")
    lake.sinks.run("quiet")
    samples = Samples(tuple(timed(lambda: lake.sinks.run("quiet")) for _ in range(TICKS)))
    yield took("a tick with nothing new", samples, goal=Goal(2), note="one query of the catalog")


def _lake_to_lake(shop: Workshop) -> Iterator[Line]:
    rows = max(20_000, shop.sizes.bulk_rows // 50)
    source = shop.new_lake("sender")
    source.create_table(TABLE, SCHEMA)
    source.append(TABLE, arrow_rows(rows))
    source.create_table("keyed", SCHEMA.replace("id long", "id long not null"), key=["id"])
    source.merge("keyed", arrow_rows(rows))
    for table, goal in ((TABLE, Goal(10, at_least=True)), ("keyed", None)):
        times = []
        for _ in range(shop.sizes.bulk_repeats):
            target = shop.new_path("receiver")
            with floodmark.open(target, create=True) as lake:
                columns = SCHEMA if table == TABLE else SCHEMA.replace("id long", "id long not null")
                lake.create_table(table, columns, key=[] if table == TABLE else ["id"])
            with _served(target) as address:
                url = f"{address}/api/tables/{{table}}/rows?wait=committed"
                source.sinks.add("bench", "http", tables=table, url=url)
                found = []
                times.append(timed(lambda found=found: found.append(source.sinks.run("bench"))))
                source.sinks.remove("bench")
            if found[0].rows != rows:
                raise RuntimeError(f"the sink shipped {found[0].rows} rows of {rows}: {found[0].error}")
            with floodmark.open(target, read_only=True) as lake:
                if lake.tables()[0]["rows"] != rows:
                    raise RuntimeError(f"the receiving lake has {lake.tables()[0]['rows']} rows of {rows}")
        kind = "appended" if table == TABLE else "merged by key"
        line = rate(f"lake to lake over HTTP, {kind}", Samples(tuple(times)), rows, f"{rows:,} rows, committed")
        yield replace(line, goal=goal)
    source.close()


@contextmanager
def _served(path: Path) -> Iterator[str]:
    """A lake behind HTTP in a process of its own; gives its address."""
    command = [
        sys.executable,
        "-m",
        "floodmark.cli.main",
        "--lake",
        str(path),
        "--json",
        "run",
        "--bind",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise RuntimeError(f"the lake was not served: {process.stderr.read() if process.stderr else ''}")
            yield json.loads(line)["address"]
        finally:
            process.terminate()
            process.wait(60)
