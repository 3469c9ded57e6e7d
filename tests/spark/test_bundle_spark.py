"""Chunks of DataFrames that are loaded several at once: each once, checked as if it were alone, and named if wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks import chunk_workers
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.history import HistorySpec, run_history
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, ids
from tests.history_world import Numbers, chunk_rows, history, room_of, steps_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from floodmark.jobs.record import BackfillRun
    from floodmark.runs import JobCallback

CHUNKS = 12


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[fm.Lake]:
    # How many come together must not depend on how quick this machine is.
    monkeypatch.setattr(chunk_workers, "BUNDLE_S", 600.0)
    with fm.open(tmp_path / "lake", create=True, actor="test", spark=spark) as lake:
        lake.create_table("events", EVENTS)
        yield lake
        check_lake(lake.catalog)


def frames(spark: SparkSession, *columns: str) -> Callable[[Chunk], DataFrame]:
    def frame(chunk: Chunk) -> DataFrame:
        assert isinstance(chunk.start, int)
        assert isinstance(chunk.end, int)
        return spark.range(chunk.start, chunk.end, 1, 2).selectExpr(*(columns or ("id", "concat('row ', id) AS name")))

    return frame


def run(lake: fm.Lake, spec: HistorySpec, progress: JobCallback | None = None) -> BackfillRun:
    return run_history(room_of(lake, lake.sessions), spec, "test", progress)


def many(source: Any, **options: Any) -> HistorySpec:
    return history(source, last=10 * CHUNKS, order="oldest", **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_small_chunks_share_a_publish_and_each_comes_once(lake: fm.Lake, spark: SparkSession, workers: int) -> None:
    source = Numbers(rows=frames(spark))
    steps, tell = steps_of()
    found = run(lake, many(source, workers=workers, rows_exact=True), tell)
    assert (found.outcome, found.job["processed"], found.job["rows"]) == ("done", CHUNKS, 10 * CHUNKS)
    assert found.job["publishes"] < CHUNKS
    assert ids(lake) == list(range(10 * CHUNKS))
    assert chunk_rows(lake) == {("events", number): ("done", 10) for number in range(CHUNKS)}
    assert set(source.asked.values()) == {1}
    assert steps[0] == (0, CHUNKS)
    assert steps[-1] == (CHUNKS, CHUNKS)
    assert len(set(steps)) == len(steps)
    assert run(lake, many(source)).outcome == "nothing_to_do"


def test_files_of_a_chunk_are_its_own(lake: fm.Lake, spark: SparkSession) -> None:
    run(lake, many(Numbers(rows=frames(spark))))
    found = lake.backfill.read("years", 50, 60)
    assert sorted(row["id"] for row in found.collect()) == list(range(50, 60))
    # By its name: the file's rows are read, so that no statistics are trusted.
    for path in lake.catalog.files.data_files(lake.catalog.history.head("events")):
        numbers = {row["id"] // 10 for row in spark.read.parquet(path).collect()}
        assert len(numbers) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("id + 3 AS id", "outside of its range"),
        ("id - id % 2 AS id", "several rows for one number"),
        ("CAST(NULL AS BIGINT) AS id", "null in a required column"),
    ],
    ids=["range", "double", "null"],
)
def test_the_chunk_that_is_wrong_is_named_and_the_others_stay(
    lake: fm.Lake, spark: SparkSession, wrong: str, says: str
) -> None:
    bad = frames(spark, wrong, "concat('row ', id) AS name")
    source = Numbers(rows=frames(spark), act={"60..70": bad})
    found = run(lake, many(source, rows_exact=True))
    assert found.error is not None
    assert (found.outcome, found.error["kind"], found.error["facts"]["chunk"]) == ("failed", "Invalid", "60..70")
    assert says in found.error["message"]
    assert ids(lake) == list(range(60))
    assert chunk_rows(lake) == {("events", number): ("done", 10) for number in range(6)}
    assert run(lake, many(Numbers(rows=frames(spark)))).outcome == "done"
    assert ids(lake) == list(range(10 * CHUNKS))


def test_chunks_without_rows_and_of_other_columns_are_loaded_too(lake: fm.Lake, spark: SparkSession) -> None:
    source = Numbers(
        rows=frames(spark),
        act={
            "30..40": lambda chunk: frames(spark)(chunk).where("id < 0"),
            "70..80": frames(spark, "CAST(id AS INT) AS id", "concat('row ', id) AS name"),
            "90..100": lambda chunk: frames(spark)(chunk).toArrow(),
        },
    )
    assert run(lake, many(source)).outcome == "done"
    kept = [number for number in range(10 * CHUNKS) if not 30 <= number < 40]
    assert ids(lake) == kept
    assert chunk_rows(lake) == {("events", number): ("done", 0 if number == 3 else 10) for number in range(CHUNKS)}


def test_a_table_that_fills_a_column_is_filled_chunk_by_chunk(lake: fm.Lake, spark: SparkSession) -> None:
    assert lake.backfill.column("events", "twice", "id * 2").outcome in ("done", "nothing_to_do")
    assert run(lake, many(Numbers(rows=frames(spark)))).outcome == "done"
    rows = lake.read_arrow("events").read_all().to_pylist()
    assert sorted((row["id"], row["twice"]) for row in rows) == [(number, 2 * number) for number in range(10 * CHUNKS)]


def test_a_bundle_whose_reply_was_lost_is_not_loaded_twice(
    lake: fm.Lake, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floodmark.backfill.chunks.load import Loader

    real, lost = Loader.load_bundle, [1]

    def load_bundle(self: Loader, *arguments: Any) -> bool:
        found = real(self, *arguments)
        if lost:
            lost.clear()
            raise fm.CommitUnknown("the connection died in COMMIT", operation="1")
        return found

    monkeypatch.setattr(Loader, "load_bundle", load_bundle)
    source = Numbers(rows=frames(spark))
    assert run(lake, many(source)).outcome == "done"
    assert not lost
    assert set(source.asked.values()) == {1}
    assert ids(lake) == list(range(10 * CHUNKS))
    assert lake.backfill.show("years")["rows"] == 10 * CHUNKS
