"""Retention through Spark tasks: the same rows go, the same are counted, and the plan is what is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark import clock
from floodmark.catalog.maintenance_state import Consumer, Policy
from floodmark.commit.intent import Intent
from floodmark.maintenance.compact import Compacted, compact, plan_table
from floodmark.maintenance.retain import plan_retention, retain
from floodmark.model import MAIN
from floodmark.rows import tasks
from floodmark.testing.invariants import check_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 3000
# Row n is of the nth hour of 1970; the last commit is at hour 3000.
NOW = clock.parse_time_ms("1970-01-01T00:00:00Z") + ROWS * 3_600_000


@pytest.fixture(params=["a commit a file", "all commits in one"])
def lake(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[fm.Lake]:
    """A table of three commits; whatever is done to its files is done by tasks."""
    from pyspark.sql import functions as F

    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("events", "id long not null, at timestamp, tags array<string>", key=["id"])
        for third in range(3):
            # Every commit has rows of all times.
            rows = spark.range(third, ROWS, 3, 2)
            at, tags = F.timestamp_seconds(F.col("id") * 3600), F.array(F.col("id").cast("string"))
            lake.append("events", rows.select("id", at.alias("at"), tags.alias("tags")))
        if request.param == "all commits in one":
            head, intent = lake.catalog.history.head("events"), Intent("compact", MAIN, "test", "")
            plan = plan_table(lake.catalog, head, files_min=2)
            compact(lake.engine, intent, head, plan, Compacted())
            assert lake.catalog.history.head("events").files == 1
        monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)
        yield lake
        check_lake(lake.catalog)


def run(lake: fm.Lake, retention: str, *, force: bool = False) -> tuple[str, dict[str, Any]]:
    head, policy = lake.catalog.history.head("events"), Policy(retention)
    plan = plan_retention(lake.engine, head, policy, now_ms=NOW, force=force)
    intent = Intent("retain", MAIN, "test", "")
    outcome, detail = retain(lake.engine, intent, head, policy, now_ms=NOW, force=force)
    assert detail == {**plan.as_dict(), "version": detail["version"], "rows_removed": plan.rows_going}
    return outcome, detail


def follow(lake: fm.Lake, name: str, mark: int) -> None:
    table_id = lake.catalog.history.head("events").table_id
    lake.catalog.maintenance.put_consumer(Consumer(name, table_id, mark))


def state(lake: fm.Lake) -> dict[int, int]:
    return {row["id"]: row["_seq"] for row in lake.read("events", with_seq=True).collect()}


def test_tasks_take_out_what_is_due_and_nobody_waits_for(lake: fm.Lake, spark: SparkSession) -> None:
    follow(lake, "behind", 2)
    outcome, detail = run(lake, "1000h")
    everything = {number: number % 3 + 1 for number in range(ROWS)}
    due = {number for number in everything if number < ROWS - 1000}
    going = {number for number in due if everything[number] <= 2}
    assert (outcome, detail["rows_due"], detail["rows_removed"]) == ("retained", len(due), len(going))
    left = {number: sequence for number, sequence in everything.items() if number not in going}
    assert state(lake) == left
    assert lake.changes("events", 3).df.count() == 0, "there is no trace of it in what changed"

    # As many rows stay as the newer commits have; then it is forced.
    outcome, detail = run(lake, f"{sum(sequence > 1 for sequence in left.values())} rows")
    assert (outcome, detail["cut"], detail["rows_removed"]) == ("retained", 1, sum(one == 1 for one in left.values()))
    outcome, detail = run(lake, "1000h", force=True)
    late = {number for number, sequence in left.items() if sequence == 3 and number in due}
    assert (outcome, detail["rows_removed"], detail["lost"]) == ("retained", len(late), {"behind": len(late)})
    assert state(lake) == {number: sequence for number, sequence in left.items() if sequence > 1 and number not in late}
