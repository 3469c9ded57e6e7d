"""A lake with real Spark: rows in as DataFrames, rows out at the head, at a version, at a moment, and by SQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

import floodmark as fm
from floodmark import clock
from floodmark.storage import Storage
from floodmark.testing.invariants import check_lake
from floodmark.testing.s3 import s3_stand_in
from tests.conftest import Place, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TYPES = (
    "id long not null, name string, tags array<string>, m map<string,struct<a:int,b:decimal(20,4)>>, d decimal(38,10),"
    " b binary, ts timestamp, ntz timestamp_ntz, day date, ok boolean, f float, x double, n int"
)


@pytest.fixture
def lake(new_place: Callable[[str], Place], spark: SparkSession) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, spark=spark, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.create_table("notes", "id long not null, event long")
        yield lake


def numbers(spark: SparkSession, first: int, end: int) -> DataFrame:
    return spark.range(first, end).selectExpr("id", "concat('row ', id) AS name")


def found(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


def test_every_type_comes_back_as_it_went_in(lake: fm.Lake, spark: SparkSession) -> None:
    from pyspark.sql.functions import expr

    frame = spark.range(50).selectExpr(
        "id",
        "if(id % 7 = 0, null, concat('é', id)) AS name",
        "array('a', cast(id AS string), null) AS tags",
        "map(cast(id AS string), named_struct('a', cast(id AS int), 'b', cast(id / 3 AS decimal(20,4)))) AS m",
        "cast(id * 1.0000000001 AS decimal(38,10)) AS d",
        "cast(repeat('x', cast(id AS int)) AS binary) AS b",
        "timestamp'2026-11-15 10:00:00.123456Z' + make_dt_interval(0, 0, cast(id AS int), 0) AS ts",
        "timestamp_ntz'2026-03-29 02:30:00' AS ntz",
        "date_add(date'1969-12-20', cast(id AS int)) AS day",
        "id % 2 = 0 AS ok",
        "cast(id / 7 AS float) AS f",
        "if(id = 3, double('NaN'), id / 7) AS x",
        "cast(-id AS int) AS n",
    )
    lake.create_table(
        "everything", TYPES, partition=["day(ts)", "bucket(4, id)", "truncate(2, name)"], sort=["id desc"]
    )
    commit = lake.append("everything", frame)
    assert commit.rows_added == 50
    back = lake.read("everything")
    assert back.columns == frame.columns, "the hidden column stays hidden"
    # Spark compares no maps: their entries stand for them.
    there, here = (one.withColumn("m", expr("map_entries(m)")) for one in (back, frame))
    assert there.exceptAll(here).count() == 0
    assert here.exceptAll(there).count() == 0
    check_lake(lake.catalog)


def test_rows_are_read_at_the_head_a_version_and_a_moment(lake: fm.Lake, spark: SparkSession) -> None:
    first = lake.append("events", numbers(spark, 0, 5))
    time.sleep(0.01)
    second = lake.append("events", numbers(spark, 5, 9))
    assert found(lake.read("events")) == list(range(9))
    assert found(lake.read("events", version=first.version)) == list(range(5))
    assert found(lake.read("events", at=clock.format_time(first.committed_ms))) == list(range(5))
    assert found(lake.read("events", at=clock.format_time(second.committed_ms))) == list(range(9))
    assert found(lake.read("events", version=1)) == []
    with pytest.raises(fm.NotFound, match="no such version"):
        lake.read("events", version=99)
    with pytest.raises(fm.NotFound, match="no such version"):
        lake.read("events", at="1999-01-01T00:00:00Z")
    with pytest.raises(fm.NotFound, match="no such table"):
        lake.read("notes", version=1)
    with pytest.raises(fm.Invalid):
        lake.read("events", at="yesterday")


def test_an_old_version_is_read_after_hundreds_of_commits_until_its_window_ends(
    lake: fm.Lake, spark: SparkSession
) -> None:
    old = lake.append("events", numbers(spark, 0, 3))
    for number in range(250):
        lake.append("events", rows(100 + number))
    assert found(lake.read("events", version=old.version)) == [0, 1, 2]
    assert lake.read("events").count() == 253
    metadata = lake.catalog.files.metadata(lake.show("events")["metadata_location"])
    assert len(metadata.snapshots) < 10, "commits stay fast because metadata stays small"
    lake.catalog.expiry.expire(before_ms=2**60)
    with pytest.raises(fm.BelowRetention):
        lake.read("events", version=old.version)
    assert lake.read("events").count() == 253


def test_sql_reads_every_table_at_one_version(lake: fm.Lake, spark: SparkSession) -> None:
    with lake.transaction("pair") as tx:
        tx.append("events", numbers(spark, 0, 4))
        tx.append("notes", [{"id": 1, "event": 1}])
    assert tx.commit is not None
    lake.append("notes", [{"id": 2, "event": 3}])
    query = """
        -- a comment that names no table
        WITH joined AS (SELECT e.id FROM events e JOIN `notes` n ON e.id = n.event)
        SELECT id FROM joined ORDER BY id;
    """
    assert [row.id for row in lake.sql(query).collect()] == [1, 3]
    assert [row.id for row in lake.sql(query, version=tx.commit.version).collect()] == [1]
    # An answer that was asked for earlier stays at its version, whatever is read or written later.
    late = lake.sql("SELECT count(*) AS c FROM NOTES")
    lake.append("notes", [{"id": 3, "event": 3}])
    lake.sql("SELECT count(*) AS c FROM notes").collect()
    assert late.collect()[0].c == 2
    assert lake.sql("SELECT 'events' AS word").collect()[0].word == "events"
    with pytest.raises(fm.Invalid, match="only a query"):
        lake.sql("DROP TABLE events")


def test_a_dataframe_that_does_not_fit_changes_nothing(lake: fm.Lake, spark: SparkSession) -> None:
    lake.append("events", numbers(spark, 0, 2))
    before = lake.status()["version"]
    with pytest.raises(fm.Invalid, match="extra"):
        lake.append("events", numbers(spark, 2, 4).selectExpr("*", "1 AS extra"))
    with pytest.raises(fm.Invalid, match="name"):
        lake.append("events", numbers(spark, 2, 4).select("id"))
    with pytest.raises(fm.Invalid, match="name"):
        lake.append("events", spark.range(3).selectExpr("id", "id AS name"))
    with pytest.raises(fm.Invalid) as refused:
        lake.append("events", spark.range(10).selectExpr("if(id < 4, null, id) AS id", "'x' AS name"))
    assert refused.value.facts == {"column": "id", "count": 4}
    assert lake.status()["version"] == before
    assert found(lake.read("events")) == [0, 1]
    check_lake(lake.catalog)


def test_an_empty_dataframe_makes_no_version_but_its_batch_is_known(lake: fm.Lake, spark: SparkSession) -> None:
    empty = numbers(spark, 0, 0)
    before = lake.status()["version"]
    assert lake.append("events", empty).outcome == "nothing_to_do"
    assert lake.status()["version"] == before
    assert lake.append("events", empty, batch="none today").outcome == "committed"
    assert lake.append("events", numbers(spark, 0, 5), batch="none today").outcome == "already_committed"
    assert lake.read("events").count() == 0
    check_lake(lake.catalog)


def test_progress_is_told_while_rows_are_staged(lake: fm.Lake, spark: SparkSession) -> None:
    told: list[tuple[int, int]] = []
    lake.append("events", numbers(spark, 0, 1000), progress=lambda files, size: told.append((files, size)))
    assert told[-1][0] > 0
    assert told[-1][1] > 0


def test_questions_of_state_start_no_session(new_place: Callable[[str], Place]) -> None:
    with new_place("sqlite").open(create=True, settings={"master": "local[no such master]"}) as lake:
        lake.create_table("events", "id long")
        lake.append("events", [{"id": 1}])
        lake.tables(), lake.show("events"), lake.history(), lake.status(), lake.audit(), lake.recover()
        assert lake.sessions._spark is None


def test_a_lake_in_s3_with_a_shared_catalog(new_place: Callable[[str], Place], spark: SparkSession) -> None:
    with s3_stand_in() as server:
        bucket = server.make_bucket()
        place = new_place("postgresql")
        options = dict(server.options)
        with fm.open(
            f"s3://{bucket}/lake", create=True, catalog=place.catalog, spark=spark, storage_options=options
        ) as lake:
            lake.create_table("events", "id long not null, name string")
            lake.append("events", rows(1, 2))
            lake.append("events", numbers(spark, 3, 6))
            assert found(lake.read("events")) == [1, 2, 3, 4, 5]
            check_lake(lake.catalog)
        assert Storage(options).exists(lake.catalog.history.heads()[0].metadata_location)


def test_a_lake_in_s3_needs_a_shared_catalog() -> None:
    with pytest.raises(fm.Invalid, match="shared catalog"):
        fm.open("s3://bucket/lake", create=True)
