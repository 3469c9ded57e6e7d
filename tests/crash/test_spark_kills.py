"""Kills while rows move through Spark: clients of a warm Connect server, and whole local drivers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.backfill.chunks import chunk_workers
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.failpoints import FAILPOINTS, VARIABLE
from floodmark.testing.children import Child, run_child, run_killed
from floodmark.testing.connect import connect_server
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids

ROWS = 200
# One writer alone is never planned again: test_keyed_kills does that, with a second writer.
POINTS = [point for point, kind in FAILPOINTS.items() if kind == "append" and not point.endswith(".planned_again")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with connect_server(tmp_path_factory.mktemp("connect")) as address:
        yield address


@pytest.fixture
def spark_place(tmp_path: Path) -> Place:
    place = Place(str(tmp_path / "lake"), None)
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
    return place


def append_rows(place: Place, master: str) -> str:
    with place.open(settings={"master": master}) as lake:
        frame = lake.spark.range(ROWS, numPartitions=2).selectExpr("id", "concat('row ', id) AS name")
        return lake.append("events", frame, batch="monday").outcome


def append_slowly(place: Place, master: str) -> None:
    def slow(batches):  # type: ignore[no-untyped-def]
        for batch in batches:
            time.sleep(3)
            yield batch

    with place.open(settings={"master": master}) as lake:
        frame = lake.spark.range(ROWS, numPartitions=2).selectExpr("id", "concat('row ', id) AS name")
        lake.append("events", frame.mapInArrow(slow, "id long, name string"), batch="monday")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_client_loses_and_doubles_nothing(spark_place: Place, server: str, point: str) -> None:
    assert run_killed(append_rows, spark_place, server, failpoint=point)
    sealed = not point.endswith((".begun", ".staged"))
    for _ in range(2):
        with spark_place.open() as lake:
            check_lake(lake.catalog)
            assert len(ids(lake)) == (ROWS if sealed else 0)
    assert run_child(append_rows, spark_place, server) == ("already_committed" if sealed else "committed")
    with spark_place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == list(range(ROWS))


CHUNKS, CHUNK = 12, 10


def load_history(place: Place, master: str) -> str:
    chunk_workers.BUNDLE_S = 600.0  # how many come together must not depend on how quick this machine is
    with place.open(settings={"master": master}) as lake:

        def read(chunk: Chunk):  # type: ignore[no-untyped-def]
            return lake.spark.range(chunk.start, chunk.end, 1, 2).selectExpr("id", "concat('row ', id) AS name")

        found = lake.backfill.history(
            "years", read, "events", chunk=CHUNK, first=0, last=CHUNKS * CHUNK, column="id", order="oldest", workers=1
        )
        return found.outcome


# The second passing is of several chunks at once.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", ["staged", "sealed", "moved", "published"])
def test_chunks_that_are_loaded_together_come_once(spark_place: Place, server: str, step: str) -> None:
    assert run_killed(load_history, spark_place, server, failpoint=f"chunk.{step}:2")
    with spark_place.open() as lake:
        check_lake(lake.catalog)
        done = len(lake.catalog.chunks.of(lake.catalog.jobs.find("years").id))
        assert done == 1 if step == "staged" else done > 2
        assert ids(lake) == list(range(done * CHUNK))
    assert run_child(load_history, spark_place, server) == "done"
    with spark_place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == list(range(CHUNKS * CHUNK))
        job = lake.catalog.jobs.find("years")
        assert (job.status, job.processed, job.rows) == ("done", CHUNKS, CHUNKS * CHUNK)


def test_executors_that_outlive_their_driver_leave_nothing_for_good(spark_place: Place, server: str) -> None:
    child = Child(append_slowly, spark_place, server)
    with spark_place.open(recover=False) as lake:
        deadline = time.monotonic() + 60
        while not lake.status()["running"] and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.5)  # its tasks are asleep in the middle of their work now
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert lake.recover().rolled_back
        # The tasks wake up and write into the folder of an operation that is fenced: never visible, found again.
        deadline = time.monotonic() + 60
        written = 0
        while written == 0 and time.monotonic() < deadline:
            time.sleep(0.2)
            written = lake.recover().files_deleted
        assert written > 0, "the executors did not outlive their driver: the test shows nothing"
        time.sleep(2)
        lake.recover()
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ["rolled_back"]
        assert ids(lake) == []


LOCAL = """
import sys
from tests.conftest import Place
from tests.crash.test_spark_kills import append_rows
print(append_rows(Place(sys.argv[1], None), "local[2]"))
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("point", ["append.sealed", "append.staged", "append.published"])
def test_a_killed_local_driver_loses_and_doubles_nothing(spark_place: Place, point: str) -> None:
    def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LOCAL, spark_place.path],
            env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
            capture_output=True,
            text=True,
            timeout=200,
        )

    killed = run({VARIABLE: point})
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    with fm.open(spark_place.path) as lake:
        check_lake(lake.catalog)
        assert len(ids(lake)) == (0 if point == "append.staged" else ROWS)
    if point == "append.staged":
        again = run({})
        assert "committed" in again.stdout, again.stderr[-2000:]
        with fm.open(spark_place.path) as lake:
            check_lake(lake.catalog)
            assert ids(lake) == list(range(ROWS))
