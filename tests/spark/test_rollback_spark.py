"""A rollback through Spark tasks: the earlier contents, and the sequences of the rows that never went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import floodmark as fm
from floodmark.rows import tasks
from floodmark.testing.invariants import check_lake
from floodmark.write import table as write_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = [{"id": one, "name": f"n{one}", "tags": None if one % 3 else [f"t{one}", None]} for one in range(60)]


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fm.Lake]:
    monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)  # everything is too much for this process
    monkeypatch.setattr(write_table, "POSITIONS_BYTES_MAX", 0)
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        yield lake


@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
def test_rows_return_in_their_partitions_with_filled_columns(lake: fm.Lake, key: list[str]) -> None:
    lake.create_table("events", "id long not null, name string, tags array<string>", key=key)
    lake.append("events", ROWS[:30])
    lake.append("events", ROWS[30:])
    then = lake.catalog.history.resolve()
    kept = {row["id"]: row["_seq"] for row in lake.read_arrow("events", with_seq=True).read_all().to_pylist()}
    done = lake.backfill.column("events", "loud", "upper(name)")
    assert done.outcome == "done"
    lake.delete("events", "id % 4 = 1")
    lake.append("events", [{"id": 100, "name": "new", "tags": []}])
    lake.maintain.compact("events", files_min=2)
    back = lake.rollback("events", to=then).table("events")
    assert (back.rows_added, back.rows_updated, back.rows_deleted) == (15, 0, 1)
    found = sorted(lake.read_arrow("events", with_seq=True).read_all().to_pylist(), key=lambda row: row["id"])
    expected = [
        {**row, "loud": f"N{row['id']}", "_seq": back.sequence if row["id"] % 4 == 1 else kept[row["id"]]}
        for row in ROWS
    ]
    assert found == expected
    assert lake.read("events").count() == 60
    # Only Spark computes `loud`: rows that returned count as written since, by their sequences (decision 0040).
    differs = lake.diff(then, lake.catalog.history.resolve()).tables[0]
    assert (differs.rows_added, differs.rows_updated, differs.rows_deleted) == ((0, 15, 0) if key else (15, 0, 15))
    check_lake(lake.catalog)
