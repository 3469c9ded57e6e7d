"""Expressions that would give another value at another try, for another writer or in another session are refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.errors import Invalid
from floodmark.testing.invariants import check_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LATE = datetime(2024, 1, 1, 23, 30, tzinfo=UTC)
MOMENT, ORDER, FUNCTIONS = "the moment", "the order of rows", "Spark's own functions"
REFUSED = {
    "timestamp('now')": MOMENT,
    "date('now')": MOMENT,
    "to_date('today')": MOMENT,
    "to_timestamp('now')": MOMENT,
    "'now'::timestamp": MOMENT,
    "`now`()": MOMENT,
    "now/**/()": MOMENT,
    "cast(concat('n','ow') as timestamp)": MOMENT,
    "cast(concat('yester','day') as date) > date(ts)": MOMENT,
    "(select max(cast(concat('to', 'day') as date)) from notes n where n.id = events.id)": MOMENT,
    "version()": MOMENT,
    "mine(name)": FUNCTIONS,
    "mine_too + 1": "variables",
    "(select max(e.id) from EVENTS e)": "other rows",
    "(select first(v) from notes n where n.id = events.id)": ORDER,
    "(select v from notes n where n.id = events.id limit 1)": ORDER,
    "(select max(id) + rand() from notes)": "chance",
}
TAKEN = {
    "case when name = 'today' then 'now()' end": "string",
    "date_add(date'2024-01-31', 1) > date(ts)": "boolean",
    "(select v from notes n where n.id = events.id order by v limit 1)": "long",
    "(select array_sort(collect_list(v)) from notes n where n.id = events.id)": "list<long>",
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[fm.Lake]:
    """Only to be asked."""
    spark.udf.register("mine", lambda text: text)
    spark.sql("declare or replace variable mine_too int default 5")
    with made(tmp_path_factory.mktemp("asked"), spark) as lake:
        yield lake
    spark.sql("drop temporary variable mine_too")
    spark.sql("drop temporary function mine")


def made(folder: Path, spark: SparkSession) -> fm.Lake:
    lake = fm.open(str(folder / "lake"), create=True, spark=spark, actor="test")
    lake.create_table("events", "id long not null, name string, ts timestamp")
    lake.create_table("notes", "id long, v long")
    lake.append("events", [event(1, "1"), event(2, "abc")])
    return lake


def event(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name, "ts": LATE}


def content(lake: fm.Lake, column: str) -> dict[int, Any]:
    return {row["id"]: row[column] for row in lake.read_arrow("events").read_all().to_pylist()}


def planned(lake: fm.Lake, expression: str) -> str:
    return str(lake.backfill.plan(lake.backfill.column_spec("events", "c", expression))["type"])


@pytest.mark.parametrize("expression", REFUSED)
def test_what_differs_from_try_to_try_is_refused(asked: fm.Lake, expression: str) -> None:
    with pytest.raises(Invalid) as refused:
        planned(asked, expression)
    assert REFUSED[expression] in str(refused.value)
    assert refused.value.advice


@pytest.mark.parametrize("expression", TAKEN)
def test_what_only_looks_like_it_is_not(asked: fm.Lake, expression: str) -> None:
    assert planned(asked, expression) == TAKEN[expression]


def test_a_row_that_cannot_be_computed_keeps_no_writer_out(tmp_path: Path, spark: SparkSession) -> None:
    with made(tmp_path, spark) as lake:
        failed = lake.backfill.column("events", "num", "cast(name as int)", pause="0ms")
        assert (failed.outcome, failed.exit_code, lake.filled_columns("events")) == ("failed", 2, ())
        done = lake.backfill.column("events", "num", "try_cast(name as int)", pause="0ms")
        assert (done.outcome, done.job["rows"], done.job["unfilled"]) == ("done", 2, 1)
        lake.append("events", [event(3, "xyz"), event(4, "4")])
        assert content(lake, "num") == {1: 1, 2: None, 3: None, 4: 4}
        check_lake(lake.catalog)


def test_time_is_computed_in_utc_whatever_the_session_has(tmp_path: Path, spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    with made(tmp_path, spark) as lake:
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        try:
            assert lake.backfill.column("events", "day", "cast(ts as date)", pause="0ms").outcome == "done"
            lake.append("events", [event(3, "c")])
            assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
        finally:
            spark.conf.set("spark.sql.session.timeZone", str(before))
        assert set(content(lake, "day").values()) == {date(2024, 1, 1)}
