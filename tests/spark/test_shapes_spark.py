"""Tables whose shape changed, under Spark: read, sql and changes find what Arrow finds; much is filled by tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.rows import tasks
from floodmark.testing.invariants import check_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEFORE: dict[str, Any] = {
    "columns": {"id": "long", "name": "string", "n": "int", "f": "float", "note": "string"},
    "partition": ["bucket(2, id)"],
    "key": ["id"],
}
AFTER: dict[str, Any] = {
    "columns": {
        "id": "long",
        "title": {"type": "string", "renamed_from": "name"},
        "n": "long",
        "f": "double",
        "level": {"type": "int", "default": 7},
    },
    "dropped": ["note"],
    "partition": ["truncate(2, title)"],
    "sort": ["n desc"],
}


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.apply({"events": BEFORE}, allow_destructive=True)
        for start in (0, 4):
            lake.append(
                "events",
                [
                    {"id": one, "name": f"row {one}", "n": one, "f": one / 4, "note": "x"}
                    for one in range(start, start + 4)
                ],
            )
        yield lake
        check_lake(lake.catalog)


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def by_arrow(lake: fm.Lake) -> list[dict[str, Any]]:
    return by_id(lake.read_arrow("events").read_all().to_pylist())


def test_spark_reads_the_new_shape_and_the_old_versions(lake: fm.Lake) -> None:
    before, mark = by_arrow(lake), lake.catalog.history.head("events").sequence
    version = lake.status()["version"]
    lake.apply({"events": AFTER}, allow_destructive=True)
    assert lake.changes("events", mark).df.count() == 0, "nothing is new to a follower"
    frame = lake.spark.createDataFrame([(9, "nine", 2**40, 0.1)], "id long, title string, n long, f double")
    lake.append("events", frame)
    lake.merge("events", [{"id": 1, "title": "one", "n": 2**40, "f": 0.1, "level": 1}])
    now = by_arrow(lake)
    assert [row["level"] for row in now] == [7, 1, 7, 7, 7, 7, 7, 7, 7]
    assert by_id([row.asDict() for row in lake.read("events").collect()]) == now
    assert by_id([row.asDict() for row in lake.sql("select * from events").collect()]) == now
    found = lake.sql("select id from events where title like 'row%' and n < 100 order by id").collect()
    assert [row["id"] for row in found] == [0, 2, 3, 4, 5, 6, 7]
    changed = lake.changes("events", mark).df.collect()
    assert sorted((row["id"], row["_change"], row["title"]) for row in changed) == [
        (1, "upsert", "one"),
        (9, "upsert", "nine"),
    ]
    assert by_id([row.asDict() for row in lake.read("events", version=version).collect()]) == before


def test_much_is_filled_by_tasks(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)
    before = lake.read_arrow("events", with_seq=True).read_all()
    lake.apply({"events": AFTER}, allow_destructive=True)
    after = lake.read_arrow("events", with_seq=True).read_all()
    assert {row["level"] for row in after.to_pylist()} == {7}
    for name in ("id", "_seq"):
        assert sorted(after[name].to_pylist()) == sorted(before[name].to_pylist())
