"""Compaction through Spark tasks: the same rows with the same sequences, in few files, in order where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark.rows import tasks
from floodmark.testing.invariants import check_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fm.Lake]:
    monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)  # everything is too much for this process
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table(
            "events",
            "id long not null, part string, tags array<string>",
            key=["id"],
            partition=["part"],
            sort=["id desc"],
        )
        for number in range(8):
            rows = [
                {"id": number * 100 + one, "part": "ab"[one % 2], "tags": None if one % 3 else [f"t{one}", None]}
                for one in range(50)
            ]
            lake.append("events", rows)
        lake.merge("events", [{"id": 7, "part": "b", "tags": ["new"]}])
        lake.delete("events", "id = 101")
        yield lake


def content(lake: fm.Lake) -> list[str]:
    return sorted(map(repr, lake.read_arrow("events", with_seq=True).read_all().to_pylist()))


def test_rows_sequences_and_changes_stay_and_files_are_in_order(lake: fm.Lake) -> None:
    before = content(lake)
    changed = sorted(map(repr, lake.changes("events", 5).arrow().read_all().to_pylist()))
    done = lake.maintain.compact("events", files_min=2)
    assert done.outcome == "compacted"
    assert done.records[0].detail["groups"] == 2, "a task for each partition"
    assert content(lake) == before
    assert sorted(map(repr, lake.changes("events", 5).arrow().read_all().to_pylist())) == changed
    assert lake.read("events").count() == len(before)
    for path in lake.catalog.files.data_files(lake.catalog.history.head("events")):
        ids = pq.read_table(path.removeprefix("file://"), columns=["id"])["id"].to_pylist()
        assert ids == sorted(ids, reverse=True)
    check_lake(lake.catalog)


def test_a_damaged_file_fails_in_its_task_and_changes_nothing(lake: fm.Lake) -> None:
    before, head = content(lake), lake.catalog.history.head("events")
    path = Path(lake.catalog.files.data_files(head)[0].removeprefix("file://"))
    kept = path.read_bytes()
    path.write_bytes(kept[:100] + bytes(40) + kept[140:])
    done = lake.maintain.compact("events", files_min=2)
    assert (done.outcome, done.records[0].detail["error"], done.exit_code) == ("failed", "Corrupt", 5)
    path.write_bytes(kept)
    assert (content(lake), lake.catalog.history.head("events")) == (before, head)
    lake.recover()
    check_lake(lake.catalog)
