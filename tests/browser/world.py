"""Lakes that are worth a look: with jobs in every state, ways in and out, tasks, and something that was healed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import update

import floodmark as fm
from floodmark import clock, failpoints
from floodmark.catalog import tables
from floodmark.catalog.jobs import CHUNKS, DONE, FAILED, HISTORY
from floodmark.ingest.intake import Intake, default_folder
from floodmark.testing.children import run_killed
from tests.conftest import Place, rows
from tests.history_world import Numbers, history, number_rows, run

ERROR = {"kind": "Unavailable", "message": "the source does not answer", "facts": {"chunk": "20..30"}, "advice": ""}
COLUMNS = "id long not null, name string"


def start_job(lake: fm.Lake, name: str = "years", table: str = "events", processed: int = 3, total: int = 9) -> Any:
    held = lake.catalog.jobs.start(name, HISTORY, [table], {"first": 0}, {}, CHUNKS, "ana")
    lake.catalog.jobs.progress(held, processed, total, first=True)
    return held


def fail_job(lake: fm.Lake, name: str = "years", error: dict[str, Any] = ERROR) -> None:
    lake.catalog.jobs.end(start_job(lake, name), FAILED, 3, 9, error)


def set_job(lake: fm.Lake, **values: Any) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.jobs).values(**values))


def now_ms(lake: fm.Lake) -> int:
    with lake.catalog.database.read() as tx:
        return lake.catalog.database.now_ms(tx)


def append(place: Place, table: str, *numbers: int) -> None:
    with place.open() as lake:
        lake.append(table, rows(*numbers), actor="another process")


@contextmanager
def job_at_work(lake: fm.Lake) -> Iterator[threading.Event]:
    """A history that is loaded by this process, and stops inside its second chunk until the event is set.

    It stops in the publish, when its progress is recorded: a run that waits for its source notices a cancel and ends,
    before anyone can see that it is stopping.
    """
    go_on = threading.Event()
    sealed = iter(range(50))

    def when_recorded(chunk: Any) -> Any:
        while not lake.backfill.show("years")["processed"]:
            time.sleep(0.02)
        return number_rows(chunk)

    def wait(point: str) -> None:
        if point == "chunk.sealed" and next(sealed) == 1:
            go_on.wait(60)

    source = Numbers(tip=50, act={"10..20": when_recorded})
    thread = threading.Thread(target=lambda: run(lake, history(source, order="oldest")))
    failpoints.observer = wait
    thread.start()
    try:
        yield go_on
    finally:
        go_on.set()
        thread.join()
        failpoints.observer = None


# ── all of it ──


@contextmanager
def fill(lake: fm.Lake) -> Iterator[Intake]:
    for name, key in (("customers", ["id"]), ("events", []), ("orders", []), ("packets_by_hour_of_all_sites", [])):
        lake.create_table(name, COLUMNS, key=key)
    for number in range(4):
        lake.append("events", rows(*range(number * 100, number * 100 + 100)), actor="http")
    lake.append("orders", rows(*range(2345)), actor="etl", message="nightly load of 2026-11-15")
    lake.merge("customers", rows(*range(345)), actor="crm")
    _add_sinks(lake)
    assert run_killed(_append_and_die, lake.location, failpoint="append.sealed")
    lake.recover()
    lake.catalog.jobs.end(start_job(lake, "packets", "packets_by_hour_of_all_sites"), DONE, 9, 9)
    fail_job(lake, "days")
    start_job(lake, "years", "orders", 1570, 3650)
    folder = default_folder(lake.location)
    assert folder is not None
    lake.catalog.daemon.take("http://127.0.0.1:8787")
    lake.catalog.daemon.report(tasks=_tasks())
    intake = Intake(lake.engine, folder)
    intake.start()
    try:
        table_id = lake.catalog.history.head("events").table_id
        text = "".join(json.dumps(row) + "\n" for row in rows(*range(1000, 1200))).encode()
        taken = intake.take("events", table_id, text, 200).result(30)
        intake.wait(table_id, taken.record, 30)
        yield intake
    finally:
        intake.close()


def _add_sinks(lake: fm.Lake) -> None:
    lake.sinks.add("warehouse", "files", tables=["events", "orders"], path="out")
    lake.sinks.run("warehouse")
    lake.append("events", rows(*range(900, 957)), actor="http")
    lake.sinks.add("mart", "files", tables=["customers"], path="mart")
    error = {**ERROR, "message": "the destination did not answer", "facts": {}}
    with lake.catalog.database.write() as tx:
        failed = update(tables.sinks).where(tables.sinks.c.name == "mart")
        tx.execute(failed.values(error=json.dumps(error), error_ms=clock.now_ms() - 40_000))


def _append_and_die(location: str) -> None:
    with fm.open(location, actor="etl") as lake:
        lake.append("orders", rows(9_000))


def _tasks() -> list[dict[str, Any]]:
    now = clock.now_ms()

    def task(name: str, kind: str, state: str, every_s: float | None, failures: int = 0) -> dict[str, Any]:
        return {
            "name": name,
            "kind": kind,
            "state": state,
            "every_s": every_s,
            "last_started": clock.format_time(now - 31_000),
            "last_ended": clock.format_time(now - 30_000),
            "last_outcome": "failed" if failures else "nothing_to_do",
            "last_error": ERROR if failures else None,
            "failures": failures,
            "set_aside": 0,
            "next_at": clock.format_time(now + 41_000),
        }

    return [
        task("feed events", "feed", "running", None),
        task("files drop", "files", "waiting", 5),
        task("sink mart", "sink", "failed", 10, failures=4),
        task("maintain", "maintain", "waiting", 600),
    ]
