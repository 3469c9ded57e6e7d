"""Keyed writes and the change feed through Spark: the same answers as in the caller's process, from executors too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.rows import tasks
from floodmark.testing.invariants import check_lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

PEOPLE = "id long not null, name string, score double, tags array<string>, at timestamp"


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        yield lake
        check_lake(lake.catalog)


@pytest.fixture(params=["in process", "on executors"])
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Little work is done in the caller's process; with a limit of nothing, all of it runs as Spark tasks."""
    if request.param == "on executors":
        monkeypatch.setattr(tasks, "IN_PROCESS_BYTES_MAX", 0)
    return str(request.param)


def people(spark: SparkSession, start: int, stop: int, word: str = "n") -> DataFrame:
    from pyspark.sql import functions as F

    return spark.range(start, stop, 1, 2).select(
        "id",
        F.concat(F.lit(word), "id").alias("name"),
        (F.col("id") / 2).alias("score"),
        F.array(F.lit("a"), F.col("id").cast("string")).alias("tags"),
        F.timestamp_seconds(F.col("id") * 86400).alias("at"),
    )


def by_id(frame: DataFrame) -> dict[int, Row]:
    rows = frame.collect()
    found = {row["id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def folded(lake: fm.Lake, table: str, *marks: int) -> dict[int, dict[str, Any]]:
    """The changes read by Spark, piece by piece, put together by key."""
    state: dict[int, dict[str, Any]] = {}
    since: int | None = None
    for until in (*marks, None):
        part = lake.changes(table, since, until)
        for row in sorted(part.df.collect(), key=lambda row: row["_seq"]):
            values = row.asDict(recursive=True)
            if values.pop("_change") == "upsert":
                state[row["id"]] = values
            else:
                state.pop(row["id"], None)
        since = part.until
    return state


def test_a_frame_is_merged_deleted_from_and_overwritten(lake: fm.Lake, spark: SparkSession, everywhere: str) -> None:
    lake.create_table("people", PEOPLE, key=["id"], partition=["bucket(2, id)"])
    first = lake.append("people", people(spark, 0, 100))
    merged = lake.merge("people", people(spark, 50, 90).union(people(spark, 90, 120, "new")))
    (counts,) = merged.tables
    assert (counts.rows_added, counts.rows_updated, counts.rows_total) == (20, 10, 120)
    rows = by_id(lake.read("people", with_seq=True))
    assert rows[60]["_seq"] == first.tables[0].sequence, "an equal row kept its sequence"
    assert {rows[key]["_seq"] for key in range(90, 120)} == {counts.sequence}
    assert (rows[95]["name"], rows[95]["tags"]) == ("new95", ["a", "95"])

    gone = lake.delete("people", "id % 10 = 3 and at < timestamp '1970-02-20 00:00:00'")  # only Spark understands it
    assert gone.tables[0].rows_deleted == 5
    assert set(by_id(lake.read("people"))) == set(range(120)) - {3, 13, 23, 33, 43}
    whole = lake.overwrite("people", people(spark, 110, 130, "last"), where="id >= 110")
    (counts,) = whole.tables
    assert (counts.rows_added, counts.rows_updated, counts.rows_deleted) == (10, 10, 0)

    expected = {key: row.asDict(recursive=True) for key, row in by_id(lake.read("people", with_seq=True)).items()}
    assert folded(lake, "people") == expected
    assert folded(lake, "people", 1, 3) == expected
    assert folded(lake, "people", 2) == expected


def test_spark_and_arrow_tell_the_same_changes(lake: fm.Lake, spark: SparkSession) -> None:
    lake.create_table("people", PEOPLE, key=["id"])
    for start in (0, 10, 20):
        lake.append("people", people(spark, start, start + 10).coalesce(1))
    lake.merge("people", people(spark, 5, 25, "m").coalesce(1))
    lake.delete("people", "id < 3 or id = 24")
    lake.append("people", people(spark, 1, 2))
    for since, until in ((None, None), (0, 3), (3, None), (4, 5), (5, 6)):
        changes = lake.changes("people", since, until)
        from_arrow = changes.arrow().read_all().to_pylist()
        from_spark = [row.asDict(recursive=True) for row in changes.df.collect()]
        assert [_plain(row) for row in from_spark] == [_plain(row) for row in from_arrow] or sorted(
            map(_plain, from_spark)
        ) == sorted(map(_plain, from_arrow))
        assert changes.df.columns == changes.arrow().schema.names
    assert lake.changes("people", 6).empty


def _plain(row: dict[str, Any]) -> str:
    shown = {name: value for name, value in row.items() if name != "at"}
    at = None if row["at"] is None else row["at"].replace(tzinfo=None)
    return repr([*shown.items(), at])


def test_sequences_are_hidden_unless_asked_for(lake: fm.Lake, spark: SparkSession) -> None:
    lake.create_table("people", "id long not null, name string", key=["id"])
    lake.append("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
    lake.merge("people", [{"id": 2, "name": "c"}])
    assert lake.read("people").columns == ["id", "name"]
    assert lake.sql("select * from people").columns == ["id", "name"]
    with pytest.raises(fm.Invalid):
        lake.sql("select _seq from people")
    seen = lake.sql("select id, _seq from people order by id", with_seq=True).collect()
    assert [(row["id"], row["_seq"]) for row in seen] == [(1, 1), (2, 2)]
    assert by_id(lake.read("people", version=2, with_seq=True))[2]["_seq"] == 1


def test_identical_rows_of_a_table_without_a_key_stay_as_many_as_they_were(
    lake: fm.Lake, spark: SparkSession, everywhere: str
) -> None:
    lake.create_table("events", "kind string, n int")
    lake.append("events", [{"kind": "a", "n": 1}] * 5 + [{"kind": "b", "n": 1}] * 3)
    lake.append("events", [{"kind": "a", "n": 1}] * 2)
    lake.delete("events", "kind = 'b'")
    rows = lake.read("events", with_seq=True).collect()
    assert sorted((row["kind"], row["_seq"]) for row in rows) == [("a", 1)] * 5 + [("a", 2)] * 2
    assert lake.changes("events", 1).df.count() == 2
    assert lake.changes("events").df.count() == 7


def test_of_rows_with_one_key_the_last_counts_if_asked_for(lake: fm.Lake, spark: SparkSession) -> None:
    lake.create_table("people", "id long not null, name string, version int", key=["id"])
    twice = spark.createDataFrame([(1, "old", 1), (1, "new", 2), (2, "b", 1)], "id long, name string, version int")
    with pytest.raises(fm.Invalid) as caught:
        lake.merge("people", twice)
    assert "id=1" in str(caught.value)
    lake.merge("people", twice, on_duplicate="last", order="version")
    assert sorted(map(tuple, lake.read("people").collect())) == [(1, "new", 2), (2, "b", 1)]
    from pyspark.sql import functions as F

    offset = twice.withColumn("offset", F.monotonically_increasing_id()).drop("version").withColumn("version", F.lit(9))
    lake.merge("people", offset, on_duplicate="last", order="offset")
    assert sorted(map(tuple, lake.read("people").collect())) == [(1, "new", 9), (2, "b", 9)]


def test_a_bad_condition_is_invalid_and_nothing_is_lost(lake: fm.Lake, spark: SparkSession) -> None:
    lake.create_table("people", "id long not null, name string", key=["id"])
    lake.append("people", [{"id": 1, "name": "a"}])
    version = lake.status()["version"]
    for where in ("nmae = 'a'", "upper(nmae) = 'A'", "id +", "id + 1", "count(*) > 0", "", "id in (select 1)"):
        with pytest.raises(fm.Invalid):
            lake.delete("people", where)
        with pytest.raises(fm.Invalid):
            lake.plan_delete("people", where)
    assert lake.status()["version"] == version
    assert lake.plan_delete("people", "upper(name) = 'A'")["rows"] == 1
    assert lake.plan_delete("people", "name = 'b'")["rows"] == 0


# ── streams ──


def stream(spark: SparkSession, folder: Path, checkpoint: Path, writer: Any) -> Any:
    query = (
        spark.readStream.schema("id long, name string")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder))
        .writeStream.foreachBatch(writer)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


def put(folder: Path, name: str, *rows: tuple[int, str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(f'{{"id": {key}, "name": "{text}"}}\n' for key, text in rows))


def test_a_replayed_micro_batch_is_a_no_op(lake: fm.Lake, spark: SparkSession, tmp_path: Path) -> None:
    lake.create_table("events", "id long, name string")
    put(tmp_path / "in", "1.json", (1, "a"), (2, "b"))
    writer = lake.stream_writer("events")
    stream(spark, tmp_path / "in", tmp_path / "check", writer)
    assert writer.last is not None
    assert writer.last.outcome == "committed"
    # A crash after the rows were committed and before Spark's own commit log was: the batch runs again.
    (tmp_path / "check" / "commits" / "0").unlink()
    (tmp_path / "check" / "commits" / ".0.crc").unlink(missing_ok=True)
    put(tmp_path / "in", "2.json", (3, "c"))
    again = lake.stream_writer("events")
    outcomes: list[str] = []

    def watched(df: DataFrame, batch_id: int) -> None:
        again(df, batch_id)
        assert again.last is not None
        outcomes.append(again.last.outcome)

    stream(spark, tmp_path / "in", tmp_path / "check", watched)
    assert outcomes == ["already_committed", "committed"]
    assert sorted(row["id"] for row in lake.read("events").collect()) == [1, 2, 3]


def test_two_streams_into_one_table_do_not_share_their_batches(
    lake: fm.Lake, spark: SparkSession, tmp_path: Path
) -> None:
    lake.create_table("people", "id long not null, name string", key=["id"])
    put(tmp_path / "in1", "1.json", (1, "a"))
    put(tmp_path / "in2", "1.json", (1, "z"), (2, "b"))
    stream(spark, tmp_path / "in1", tmp_path / "check1", lake.stream_writer("people", mode="merge"))
    named = lake.stream_writer("people", mode="merge", query="second")
    stream(spark, tmp_path / "in2", tmp_path / "check2", named)
    assert sorted(map(tuple, lake.read("people").collect())) == [(1, "z"), (2, "b")]


def test_a_stream_writer_refuses_what_it_cannot_do(lake: fm.Lake, spark: SparkSession) -> None:
    lake.create_table("events", "id long")
    with pytest.raises(fm.Invalid):
        lake.stream_writer("events", mode="upsert")
    with pytest.raises(fm.Invalid):
        lake.stream_writer("events", order="id")
    with pytest.raises(fm.NotFound):
        lake.stream_writer("nothing")
    with pytest.raises(fm.Invalid):
        lake.stream_writer("events")(spark.range(1), 0)  # outside a stream there is no query id


# ── evolution ──


def test_columns_come_with_a_frame_when_asked_for(lake: fm.Lake, spark: SparkSession) -> None:
    lake.create_table("events", "id int, name string")
    lake.append("events", [{"id": 1, "name": "a"}])
    more = spark.createDataFrame([(2**40, "b", "se")], "id long, name string, country string")
    with pytest.raises(fm.Invalid):
        lake.append("events", more)
    lake.append("events", more, evolve=True)
    lake.append("events", spark.createDataFrame([(3,)], "id int"), evolve=True)
    rows = sorted(map(tuple, lake.read("events").collect()))
    assert rows == [(1, "a", None), (3, None, None), (2**40, "b", "se")]
    assert lake.read("events").schema["id"].dataType.typeName() == "long"
    assert sorted(map(tuple, lake.read("events", version=2).collect())) == [(1, "a")]
