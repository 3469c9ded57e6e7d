"""A Spark master, its workers, or a Connect server that goes away under a running job, and comes back without it.

Everything is real: a standalone cluster and a Connect server from PySpark's own jars, killed by SIGKILL, and the daemon
in front of one. The driver is a process of its own, since a process has one Spark.
"""

from __future__ import annotations

import bz2
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.errors import FloodmarkError, Unavailable
from floodmark.testing.children import Child
from floodmark.testing.connect import ConnectServer
from floodmark.testing.invariants import check_lake
from floodmark.testing.standalone import Cluster, standalone
from tests.acceptance.test_run_command import running

STALL_S = 8
# All executors register before the first task, however slow this machine is.
SETTINGS = {
    "stall": str(STALL_S),
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.cores.max": "1",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    # Longer than any task here: that a task runs must show by its start, not by the next heartbeat.
    "spark.executor.heartbeatInterval": "100s",
    "spark.network.timeout": "300s",
}


def slow_rows(lake: fm.Lake, first: int, seconds: float, begun: Path) -> Any:
    """A DataFrame of one row, whose task takes so long and says by a file that it began."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            begun.touch()
            time.sleep(seconds)
            yield pa.RecordBatch.from_arrays([batch.column(0)], names=["id"])

    return lake.spark.range(first, first + 1, 1, 1).mapInArrow(work, "id long")


def append_and_lose(lake: fm.Lake, folder: Path, lose: Any) -> FloodmarkError:
    """Append in a thread, lose Spark under the running task; what the append ends with."""
    errors: list[FloodmarkError] = []

    def append() -> None:
        try:
            lake.append("events", slow_rows(lake, 100, 600, folder / "lost"))
        except FloodmarkError as error:
            errors.append(error)

    appending = threading.Thread(target=append, daemon=True)
    appending.start()
    while not (folder / "lost").exists():
        assert appending.is_alive(), errors
        time.sleep(0.1)
    lose()
    appending.join(240)
    assert not appending.is_alive(), "the append hangs"
    (error,) = errors
    return error


def check_after(lake: fm.Lake, error: FloodmarkError, version: int, rows: int) -> None:
    """Undone, fenced, and the next call works."""
    assert isinstance(error, Unavailable), repr(error)
    assert lake.status()["version"] == version
    assert lake.status()["running"] == []
    assert lake.append("events", lake.spark.range(200, 203)).version == version + 1
    assert lake.status()["rows"] == rows + 3
    check_lake(lake.catalog, settled=False)


def restart(cluster: Cluster) -> None:
    """The master comes back without the application: its driver waits for executors that never come."""
    cluster.kill_workers()
    cluster.kill_master()
    cluster.start_master()
    cluster.start_worker()


def master_restarts(folder: str) -> None:
    where = Path(folder)
    with standalone(where) as cluster:
        lake = fm.open(where / "lake", create=True, settings={**SETTINGS, "master": cluster.master})
        lake.create_table("events", "id long")
        # A task longer than the stall is progress.
        assert lake.append("events", slow_rows(lake, 0, 1.5 * STALL_S, where / "long")).version == 2

        error = append_and_lose(lake, where, lambda: restart(cluster))
        assert "no live executor" in str(error), error
        assert error.facts["stall_s"] == STALL_S
        check_after(lake, error, version=2, rows=1)
        lake.sessions.stop()


def connect_goes_away(folder: str) -> None:
    where = Path(folder)
    server = ConnectServer(where)
    server.start()
    try:
        lake = fm.open(where / "lake", create=True, settings={"master": server.address, "stall": str(STALL_S)})
        lake.create_table("events", "id long")
        assert lake.append("events", slow_rows(lake, 0, 1.5 * STALL_S, where / "long")).version == 2
        error = append_and_lose(lake, where, server.kill)
        server.start()
        check_after(lake, error, version=2, rows=1)
        lake.sessions.stop()
    finally:
        server.kill()


@pytest.mark.timeout(600)
def test_a_master_that_restarts_ends_a_job_as_unavailable_and_the_next_one_works(tmp_path: Path) -> None:
    Child(master_restarts, str(tmp_path)).wait(timeout_s=580)


@pytest.mark.timeout(600)
def test_a_connect_server_that_goes_away_ends_a_job_as_unavailable_and_the_next_one_works(tmp_path: Path) -> None:
    Child(connect_goes_away, str(tmp_path)).wait(timeout_s=580)


def drop(folder: Path, number: int) -> None:
    """A file that only Spark unpacks."""
    data = bz2.compress(json.dumps({"id": number, "name": f"row {number}"}).encode() + b"\n")
    (folder / f".{number}.part").write_bytes(data)
    (folder / f".{number}.part").rename(folder / f"{number}.jsonl.bz2")


def until_loaded(lake: fm.Lake, rows: int) -> None:
    end = time.monotonic() + 240
    while lake.status()["rows"] != rows:
        assert time.monotonic() < end, lake.status()["daemon"]
        time.sleep(0.2)


def until_waiting(client: httpx.Client) -> None:
    end = time.monotonic() + 60
    while True:
        tasks = client.get("/api/status").json()["daemon"]["tasks"]
        (state,) = (one["state"] for one in tasks if one["name"] == "source drop")
        if state == "waiting":
            return
        assert time.monotonic() < end, tasks
        time.sleep(0.2)


@pytest.mark.timeout(600)
def test_a_daemon_goes_on_after_its_master_restarted(tmp_path: Path) -> None:
    (tmp_path / "drop").mkdir()
    with standalone(tmp_path) as cluster, fm.open(tmp_path / "lake", create=True) as lake:
        lake.create_table("events", "id long, name string")
        spark = {**SETTINGS, "master": cluster.master, "stall": f"{STALL_S}s"}
        (tmp_path / "floodmark.toml").write_text(
            "[spark]\n" + "".join(f"{json.dumps(name)} = {json.dumps(value)}\n" for name, value in spark.items()) +
            '[maintain]\nevery = "off"\n'
            '[sources.drop]\ntype = "files"\npath = "drop"\ntable = "events"\nevery = "1s"\nsettle = "0s"\n'
        )  # fmt: skip
        with running(tmp_path) as (child, client):
            drop(tmp_path / "drop", 1)
            until_loaded(lake, 1)
            restart(cluster)
            drop(tmp_path / "drop", 2)
            until_loaded(lake, 2)
            assert (client.get("/healthz").status_code, child.process.is_alive()) == (200, True)
            # Its rows are seen before the task has ended.
            until_waiting(client)
        (log,) = (one for one in tmp_path.glob("out-*.err"))
        assert "no live executor" in log.read_text()
        assert sorted(row["id"] for row in lake.read_arrow("events").read_all().to_pylist()) == [1, 2]
        check_lake(lake.catalog, settled=False)
