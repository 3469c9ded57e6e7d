"""Columns filled by Spark SQL: over the row, from rows of another table that match, in any layout, beside a writer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.errors import Invalid
from floodmark.testing.invariants import check_lake
from tests.conftest import at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START = datetime(2026, 1, 1, tzinfo=UTC)
USERS = "id long not null, name string, country string"


def user(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"user {number}", "country": "ab"[number % 2]}


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[fm.Lake]:
    """Users by country, four files of each; orders of the first ten, two each."""
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("users", USERS, key=["id"], partition=["country"], sort=["id desc"])
        lake.create_table("orders", "user_id long, ts timestamp")
        for start in range(0, 16, 4):
            lake.append("users", [user(number) for number in range(start, start + 4)])
        lake.append("orders", [{"user_id": n % 10, "ts": START + timedelta(days=n)} for n in range(20)])
        yield lake


def content(lake: fm.Lake) -> list[dict[str, Any]]:
    found = lake.read_arrow("users", with_seq=True).read_all().to_pylist()
    return sorted(found, key=lambda row: row["id"])


def without(found: list[dict[str, Any]], column: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != column} for row in found]


def feed(lake: fm.Lake, since: int) -> list[tuple[str, int]]:
    found = lake.changes("users", since).arrow().read_all().to_pylist()
    return sorted((row["_change"], row["id"]) for row in found)


def test_an_expression_over_the_row_fills_a_partitioned_table_with_a_key(lake: fm.Lake) -> None:
    before, newest = content(lake), lake.catalog.history.head("users").sequence
    steps: list[tuple[int, int | None]] = []
    done = lake.backfill.column(
        "users",
        "label",
        "upper(users.name) || '/' || country",
        batch_rows=6,
        pause="0ms",
        progress=lambda processed, total: steps.append((processed, total)),
    )
    assert (done.outcome, done.error) == ("done", None)
    assert steps == [(0, 16), (6, 16), (12, 16), (16, 16)]
    after = content(lake)
    assert without(after, "label") == before
    assert [row["label"] for row in after] == [f"USER {n}/{'ab'[n % 2]}" for n in range(16)]
    assert feed(lake, newest) == []
    lake.merge("users", [{**user(3), "name": "x"}, user(16)])
    assert [content(lake)[number]["label"] for number in (3, 16)] == ["X/b", "USER 16/a"]
    lake.recover()
    check_lake(lake.catalog)


def test_rows_without_a_match_are_counted_once(lake: fm.Lake) -> None:
    options: dict[str, Any] = {"join": "orders o", "on": "o.user_id = users.id", "batch_rows": 6, "pause": "0ms"}
    done = lake.backfill.column("users", "last", "max(o.ts)", **options)
    assert (done.outcome, done.error) == ("done", None)
    assert (done.job["rows"], done.job["unfilled"]) == (16, 6)
    expected = [START + timedelta(days=n + 10) if n < 10 else None for n in range(16)]
    assert [row["last"] for row in content(lake)] == expected
    again = lake.backfill.column("users", "last", "max(o.ts)", **options)
    assert (again.outcome, again.job["rows"], again.job["unfilled"]) == ("nothing_to_do", 16, 6)
    lake.recover()
    check_lake(lake.catalog)


def test_announced_rows_come_to_consumers_once(lake: fm.Lake) -> None:
    newest = lake.catalog.history.head("users").sequence
    done = lake.backfill.column("users", "double", "id * 2", announce=True, batch_rows=10, pause="0ms")
    assert (done.outcome, done.error) == ("done", None)
    assert feed(lake, newest) == [("upsert", number) for number in range(16)]
    assert all(row["double"] == 2 * row["id"] and row["_seq"] > newest for row in content(lake))
    lake.recover()
    check_lake(lake.catalog)


def test_beside_a_writer_files_that_are_lost_are_filled_in_smaller_parts(lake: fm.Lake) -> None:
    before, newest = content(lake), lake.catalog.history.head("users").sequence
    with at("fill.sealed", lambda: lake.merge("users", [{**user(0), "name": "new"}])):
        done = lake.backfill.column("users", "double", "id * 2", pause="0ms")
    assert (done.outcome, done.error) == ("done", None)
    assert done.job["rows"] == 15
    after = content(lake)
    assert [row["double"] for row in after] == [2 * number for number in range(16)]
    assert without(after, "double")[1:] == before[1:]
    assert feed(lake, newest) == [("upsert", 0)]
    lake.recover()
    check_lake(lake.catalog)


@pytest.mark.parametrize("expression", ["nobody", "max(id)", "rand()", "(select ts from strangers)", "id +"])
def test_an_expression_that_cannot_be_filled_by_makes_no_job(lake: fm.Lake, expression: str) -> None:
    version = lake.status()["version"]
    with pytest.raises(Invalid):
        lake.backfill.column("users", "more", expression)
    assert (lake.status()["version"], lake.backfill.list()) == (version, [])
