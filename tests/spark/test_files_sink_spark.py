"""A files sink through Spark's tasks: the same objects as without Spark, wave by wave, resumed, refused, read again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.rows import tasks
from floodmark.sinks.files import destination as files
from floodmark.sinks.files.units import FileUnit, read_rows, read_units
from floodmark.storage import Storage
from floodmark.testing.s3 import S3Server, s3_environment, s3_stand_in
from tests.conftest import at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = 11
PART_BYTES = 2048


class Crash(Exception):
    """What stands for a crash in this process."""


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("events", "id long not null, name string, at timestamp, tags array<string>", key=["id"])
        for number in range(FILES):
            rows: list[dict[str, Any]] = [
                {
                    "id": number * 100 + one,
                    "name": f"row {one}",
                    "at": f"2026-11-{one + 1:02d}T00:00:00Z",
                    "tags": [None],
                }
                for one in range(20)
            ]
            lake.append("events", rows)
        lake.merge("events", [{"id": 7, "name": "new", "at": None, "tags": None}])
        lake.delete("events", "id in (101, 203)")
        yield lake


@pytest.fixture
def in_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is too much for this process, and a few pieces are a wave."""
    monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)
    monkeypatch.setattr(files, "WAVE_PIECES_MIN", 4)
    monkeypatch.setattr(files, "WAVE_ROUNDS", 2)


def ship(lake: fm.Lake, name: str, path: str, **settings: Any) -> FileUnit:
    lake.sinks.add(name, "files", tables="events", path=path, part_bytes=PART_BYTES, **settings)
    run = lake.sinks.run(name)
    assert (run.outcome, run.error) == ("shipped", None)
    (unit,) = read_units(path, Storage(settings.get("storage")))
    return unit


def rows_of(unit: FileUnit, storage: Storage | None = None) -> list[str]:
    return sorted(repr(row) for batch in read_rows(unit, storage) for row in batch.to_pylist())


def changed(lake: fm.Lake) -> list[str]:
    return sorted(repr(row) for batch in lake.changes("events").arrow() for row in batch.to_pylist())


class passing:
    """Watch the steps of units in this process; crash at the Nth passing of one."""

    def __init__(self, crash_at: str = "", number: int = 1) -> None:
        self.steps: list[str] = []
        self._crash_at, self._number = crash_at, number

    def __enter__(self) -> passing:
        failpoints.observer = self._observe
        return self

    def __exit__(self, *_: object) -> None:
        failpoints.observer = None

    def _observe(self, name: str) -> None:
        self.steps.append(name)
        if name == self._crash_at and self.steps.count(name) == self._number:
            raise Crash


@pytest.mark.parametrize("file_format", ["parquet", "jsonl"])
def test_tasks_write_the_objects_that_this_process_would(
    lake: fm.Lake, tmp_path: Path, request: pytest.FixtureRequest, file_format: str
) -> None:
    here = ship(lake, "here", str(tmp_path / "here"), format=file_format)
    request.getfixturevalue("in_spark")
    with passing() as watched:
        there = ship(lake, "there", str(tmp_path / "there"), format=file_format)
    assert there.objects == here.objects
    assert rows_of(there) == changed(lake)
    assert watched.steps.count("unit.sent") == 4, "12 pieces in waves of 4, and the deletions"


@pytest.mark.usefixtures("in_spark")
@pytest.mark.parametrize("point", ["unit.sent", "unit.acknowledged"])
def test_the_next_run_goes_on_behind_the_waves_that_are_acknowledged(lake: fm.Lake, tmp_path: Path, point: str) -> None:
    whole = ship(lake, "whole", str(tmp_path / "whole"))
    path = str(tmp_path / "tried")
    lake.sinks.add("tried", "files", tables="events", path=path, part_bytes=PART_BYTES)
    with pytest.raises(Crash), passing(point, 2):
        lake.sinks.run("tried")
    assert read_units(path) == []
    assert len(list(Storage().list(f"file://{path}"))) == 8, "two waves of objects"
    with passing() as watched:
        run = lake.sinks.run("tried")
    assert (run.outcome, run.tables[0].resumed, run.rows) == ("shipped", 1, whole.rows)
    assert watched.steps.count("unit.sealed") == (2 if point == "unit.acknowledged" else 3)
    (unit,) = read_units(path)
    assert unit.objects == whole.objects


@pytest.mark.usefixtures("in_spark")
def test_something_else_under_a_name_stops_the_run_from_within_a_task(lake: fm.Lake, tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    lake.sinks.add("out", "files", tables="events", path=path, part_bytes=PART_BYTES)
    with pytest.raises(Crash), passing("unit.sent", 1):
        lake.sinks.run("out")
    first = min(entry.location for entry in Storage().list(f"file://{path}"))
    kept = Storage().read(first)
    Storage().put(first, b"something else")
    run = lake.sinks.run("out")
    assert (run.outcome, run.exit_code) == ("refused", 5)
    assert run.error is not None
    assert run.error.facts["object"] == first
    assert (Storage().read(first), read_units(path)) == (b"something else", [])
    Storage().put(first, kept)
    assert lake.sinks.run("out").outcome == "shipped"
    assert rows_of(read_units(path)[0]) == changed(lake)


@pytest.mark.usefixtures("in_spark")
def test_no_manifest_names_what_cannot_be_found_from_here(lake: fm.Lake, tmp_path: Path) -> None:
    """As on a cluster whose executors write into folders of their own."""
    path = str(tmp_path / "out")
    lake.sinks.add("out", "files", tables="events", path=path, part_bytes=PART_BYTES)
    with at("unit.acknowledged", lambda: shutil.rmtree(path)):
        run = lake.sinks.run("out")
    assert (run.outcome, run.error and run.error.kind, read_units(path)) == ("failed", "Unavailable", [])
    assert lake.sinks.run("out").outcome == "shipped"
    assert rows_of(read_units(path)[0]) == changed(lake)


@pytest.fixture
def s3_server() -> Iterator[S3Server]:
    with s3_stand_in() as server, s3_environment():
        yield server


@pytest.mark.usefixtures("in_spark")
def test_tasks_write_to_a_bucket_that_the_lake_knows_nothing_of(
    lake: fm.Lake, tmp_path: Path, s3_server: S3Server
) -> None:
    path = f"s3://{s3_server.make_bucket()}/out"
    unit = ship(lake, "bucket", path, storage=s3_server.options)
    assert rows_of(unit, Storage(s3_server.options)) == changed(lake)
    assert unit.objects == ship(lake, "folder", str(tmp_path / "out")).objects


def test_spark_reads_the_objects(lake: fm.Lake, spark: SparkSession, tmp_path: Path) -> None:
    unit = ship(lake, "out", str(tmp_path / "out"))
    frame = spark.read.parquet(*unit.locations)
    assert frame.columns == list(unit.columns)
    assert {row["_change"]: row["count"] for row in frame.groupBy("_change").count().collect()} == {
        "upsert": unit.rows - unit.deletions,
        "delete": unit.deletions,
    }
    assert dict(frame.dtypes)["at"] == "timestamp"
    assert frame.where("_change = 'upsert' and id = 102").first()["tags"] == [None]
    below = spark.read.option("recursiveFileLookup", "true").parquet(unit.folder)
    assert below.count() == unit.rows, "the manifest is no data file for Spark"
