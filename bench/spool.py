"""The spool alone, without HTTP: how many appends a second are durable, how many share a sync, and how fast it is fed.

Appenders are threads that send one record of 100 rows after the other, each waiting for its answer, as requests do.
The feed is measured with the real intake: rows that wait already are brought into the table, judged and committed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Line, Samples, rate, timed
from bench.workshop import Workshop
from floodmark.ingest.intake import Intake, IntakeLimits
from floodmark.spool.folder import Calls
from floodmark.spool.spool import Spool
from tests.load.clients import APPENDED, COLUMNS, KEYED, Load, body_of

ROWS = 100
APPENDERS = (1, 8, 32)
APPENDS_S, QUICK_S = 5.0, 0.5
FEED_ROWS, QUICK_ROWS = 500_000, 20_000
TABLE = "load"
NEVER = 1 << 40


def run(shop: Workshop) -> Iterator[Line]:
    quick = shop.sizes.bulk_rows < 1_000_000
    for appenders in APPENDERS:
        yield from _appends(shop.new_path("spool"), appenders, QUICK_S if quick else APPENDS_S)
    for kind in (APPENDED, KEYED):
        yield _feed(shop, kind, QUICK_ROWS if quick else FEED_ROWS)


@dataclass
class Counted:
    fsyncs: int = 0

    def fsync(self, file: int) -> None:
        self.fsyncs += 1
        os.fsync(file)


def _appends(folder: Path, appenders: int, seconds: float) -> Iterator[Line]:
    counted = Counted()
    limits = IntakeLimits()
    calls = Calls(fsync=counted.fsync)
    spool = Spool.open(folder, table_id="t", incarnation="i", limits=limits, create=True, calls=calls)
    counted.fsyncs = 0
    times: list[list[float]] = [[] for _ in range(appenders)]
    body, end_s = _body(APPENDED, 0), time.monotonic() + seconds

    def work(place: int) -> None:
        while time.monotonic() < end_s:
            begun_s = time.perf_counter()
            spool.append(body, ROWS, key=f"{place}-{len(times[place])}", evolve=False).result()
            times[place].append(time.perf_counter() - begun_s)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(appenders)]
    took_s = timed(lambda: _together(threads))
    spool.close()
    found = sorted(value for some in times for value in some)
    name = f"{appenders} appender{'s' if appenders > 1 else ''}"
    note = f"{ROWS} rows, {len(body):,} bytes"
    yield Line(f"durable appends in a second, {name}", "", len(found) / took_s, note=note)
    median, p99 = found[len(found) // 2] * 1000, found[int(len(found) * 0.99)] * 1000
    spread = (found[0] * 1000, found[-1] * 1000, len(found))
    yield Line(f"an append, {name}", " ms", median, *spread, note=f"p99 {p99:.3g} ms")
    yield Line(f"appends that share a sync, {name}", "", len(found) / max(1, counted.fsyncs))


def _together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _feed(shop: Workshop, kind: str, rows: int) -> Line:
    with shop.new_lake("fed") as lake:
        lake.create_table(TABLE, COLUMNS[kind], key=["id"] if kind == KEYED else [])
        table_id = lake.heads()[0].table_id
        folder = shop.new_path("fed-spool")
        # Taken by an intake whose feed waits for more than there is; fed by the next one.
        never = IntakeLimits(group_wait_ms=3_600_000, group_rows_max=NEVER, group_bytes_max=NEVER)
        waiting = Intake(lake.engine, folder, never)
        taken = [waiting.take(TABLE, table_id, _body(kind, number), ROWS) for number in range(rows // ROWS)]
        last = max(one.result().record for one in taken)
        waiting.close()
        if lake.tables()[0]["rows"]:
            raise RuntimeError("rows were fed before the clock started")
        intake = Intake(lake.engine, folder)
        took_s = timed(lambda: _fed(intake, table_id, last))
        intake.close()
    name = "merged by key, few keys" if kind == KEYED else "appended"
    return rate(f"feed, {name}", Samples((took_s,)), rows, f"{rows:,} rows in {rows // ROWS:,} records, from the spool")


def _fed(intake: Intake, table_id: str, record: int) -> None:
    intake.start()
    intake.wait(table_id, record, 600.0)


def _body(kind: str, number: int) -> bytes:
    return body_of(Load("", 0, TABLE, kind, requests=0, per_s=1, rows=ROWS, start_s=0), number)
