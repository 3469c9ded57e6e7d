"""History backfill with Spark: tables that are computed from others, tables added later, and reading ranges."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.backfill.chunks.coverage import read_range
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.history import HistorySpec, run_history
from floodmark.backfill.chunks.sources import TableSource, to_source
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, ids
from tests.history_world import Numbers, chunk_rows, history, number_rows, room_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from floodmark.jobs.record import BackfillRun


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, actor="test", spark=spark) as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("counts", "start long, n long")
        lake.create_table("even", EVENTS, key=["id"])
        yield lake
        assert [table.name for table in spark.catalog.listTables() if table.name.startswith("_floodmark_")] == []
        check_lake(lake.catalog)


def run(lake: fm.Lake, spec: HistorySpec) -> BackfillRun:
    return run_history(room_of(lake, lake.sessions), spec, "test")


class Frames(Numbers):
    """Rows as lazy DataFrames; counts how often Spark computes a chunk's rows."""

    def __init__(self, spark: SparkSession, folder: Path, **options: Any) -> None:
        super().__init__(rows=self._frame, **options)
        self._spark = spark
        self._folder = str(folder)
        folder.mkdir()

    def _frame(self, chunk: Chunk) -> DataFrame:
        folder, name = self._folder, chunk.name

        def computed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import os
            import uuid

            os.makedirs(f"{folder}/{name}", exist_ok=True)
            open(f"{folder}/{name}/{uuid.uuid4()}", "w").close()
            yield from batches

        numbers = self._spark.range(chunk.start, chunk.end, 1, 1).selectExpr("id", "concat('row ', id) name")
        return numbers.mapInArrow(computed, "id long, name string")

    def computed(self) -> dict[str, int]:
        return {folder.name: len(list(folder.iterdir())) for folder in sorted(Path(self._folder).iterdir())}


COUNTS = "select min(id) div 10 * 10 as start, count(*) as n from chunk"
EVEN = "select * from events where id % 2 = 0"


def counts(lake: fm.Lake) -> list[tuple[int, int]]:
    return sorted((row["start"], row["n"]) for row in lake.read_arrow("counts").read_all().to_pylist())


@pytest.mark.parametrize("workers", [1, 3])
def test_tables_are_computed_from_one_reading_of_the_source(
    lake: fm.Lake, spark: SparkSession, tmp_path: Path, workers: int
) -> None:
    source = Frames(spark, tmp_path / "computed")
    lake.create_table("copy", EVENTS)
    spec = history(source, {"counts": COUNTS, "events": None, "even": EVEN, "copy": None}, workers=workers)
    found = run(lake, spec)
    assert (found.outcome, found.job["publishes"], found.job["rows"]) == ("done", 5, 50 + 25 + 5 + 50)
    assert ids(lake) == ids(lake, "copy") == list(range(50))
    assert ids(lake, "even") == list(range(0, 50, 2))
    assert counts(lake) == [(start, 10) for start in range(0, 50, 10)]
    assert source.computed() == {f"{start}..{start + 10}": 1 for start in range(0, 50, 10)}
    assert {rows for (table, _), (_, rows) in chunk_rows(lake).items() if table == "even"} == {5}
    assert run(lake, spec).outcome == "nothing_to_do"


def test_without_a_table_that_takes_the_rows_they_are_computed_once_too(
    lake: fm.Lake, spark: SparkSession, tmp_path: Path
) -> None:
    source = Frames(spark, tmp_path / "computed")
    even = "select id, name from chunk where id % 2 = 0"
    spec = history(source, {"counts": COUNTS, "even": even}, column=None, rows_exact=True, last=20)
    assert run(lake, spec).outcome == "done"
    assert source.computed() == {"0..10": 1, "10..20": 1}
    assert (counts(lake), ids(lake, "even")) == ([(0, 10), (10, 10)], list(range(0, 20, 2)))
    short = Numbers(rows=lambda chunk: number_rows(chunk)[1:])
    found = run(lake, history(short, {"counts": COUNTS}, column=None, rows_exact=True, name="short"))
    assert found.error is not None
    assert (found.error["kind"], found.error["facts"]["chunk"]) == ("Invalid", "40..50")


def test_rows_in_memory_and_functions_of_frames(lake: fm.Lake) -> None:
    source = Numbers(act={"10..20": lambda chunk: pa.Table.from_pylist(number_rows(chunk))})
    tables = {"even": lambda chunk: chunk.where("id % 2 = 0"), "counts": COUNTS}
    assert run(lake, history(source, tables, column=None, last=20)).outcome == "done"
    assert (counts(lake), ids(lake, "even")) == ([(0, 10), (10, 10)], list(range(0, 20, 2)))


def test_a_definition_that_spark_does_not_understand_fails_by_its_chunk(lake: fm.Lake) -> None:
    found = run(lake, history(Numbers(), {"events": None, "counts": "select nothing from chunk"}))
    assert found.error is not None
    assert (found.outcome, found.error["kind"], found.error["facts"]["chunk"]) == ("failed", "Invalid", "40..50")
    assert ids(lake) == []


# ── a table added later ──


def test_a_table_added_later_is_filled_from_the_lake(lake: fm.Lake) -> None:
    source = Numbers()
    assert run(lake, history(source)).outcome == "done"
    lake.create_table("copy", EVENTS)
    source.asked.clear()
    tables = {"events": None, "counts": COUNTS, "even": EVEN, "copy": None}
    found = run(lake, history(source, tables, workers=2))
    assert (found.outcome, found.job["publishes"]) == ("done", 10)
    assert source.asked == {}, "the rows are there already"
    assert counts(lake) == [(start, 10) for start in range(0, 50, 10)]
    assert ids(lake, "even") == list(range(0, 50, 2))
    assert ids(lake, "copy") == ids(lake) == list(range(50))


def test_a_source_is_asked_again_for_chunks_that_others_changed(lake: fm.Lake) -> None:
    source = Numbers()
    run(lake, history(source))
    lake.delete("events", "id = 5")
    lake.append("events", number_rows(Chunk(0, 33, 34)))
    lake.maintain.compact("events", files_min=2)
    source.asked.clear()
    assert run(lake, history(source, {"events": None, "counts": COUNTS})).outcome == "done"
    assert source.asked == {"0..10": 1, "30..40": 1}
    assert counts(lake) == [(start, 10) for start in range(0, 50, 10)]


def test_without_a_range_column_the_source_is_asked(lake: fm.Lake) -> None:
    source = Numbers()
    run(lake, history(source, column=None))
    assert run(lake, history(source, {"events": None, "counts": COUNTS}, column=None)).outcome == "done"
    assert set(source.asked.values()) == {2}
    assert ids(lake) == list(range(50))


# ── reading ranges, other sources ──


def test_a_range_is_read_when_all_of_it_is_there(lake: fm.Lake) -> None:
    source = Numbers(act={"20..30": lambda chunk: []})
    run(lake, history(source))
    job, room = lake.catalog.jobs.find("years"), room_of(lake, lake.sessions)
    assert sorted(row.id for row in read_range(room, job, 5, 35).collect()) == [*range(5, 20), *range(30, 35)]
    assert read_range(room, job, 20, 30).collect() == [], "an empty chunk is there, and empty"
    lake.append("events", number_rows(Chunk(0, 60, 61)))
    assert sorted(row.id for row in read_range(room, job, 40, 50, "events").collect()) == list(range(40, 50))


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz", "date"])
def test_a_range_of_time_is_read_whatever_the_zone(lake: fm.Lake, spark: SparkSession, kind: str) -> None:
    lake.create_table("times", f"t {kind}, n long")
    step = timedelta(days=1) if kind == "date" else timedelta(hours=8)
    zone = UTC if kind == "timestamp" else None
    size = timedelta(days=2)

    def moments(chunk: Chunk) -> list[dict[str, Any]]:
        assert isinstance(chunk.start, datetime)
        found = [chunk.start + step * number for number in range(size // step)]
        return [{"t": one.date() if kind == "date" else one.replace(tzinfo=zone), "n": 1} for one in found]

    first = date(2024, 3, 30)
    geometry = Geometry.of(first, first + 3 * size, "2d", align=first)
    spec = HistorySpec("years", Numbers(rows=moments), {"times": None}, geometry, column="t", workers=1)
    before = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "America/New_York")
        assert run(lake, spec).outcome == "done"
        job, room = lake.catalog.jobs.find("years"), room_of(lake, lake.sessions)
        assert read_range(room, job, "2024-03-31", "2024-04-03").count() == timedelta(days=3) // step
        assert read_range(room, job, first, first + 3 * size).count() == 3 * (size // step)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_files_and_tables_are_sources(lake: fm.Lake, tmp_path: Path) -> None:
    for start in range(0, 50, 10):
        lines = [f'{{"id": {number}, "name": "row {number}"}}\n' for number in range(start, start + 10)]
        (tmp_path / f"part-{start}.jsonl").write_text("".join(lines))
    files = to_source(str(tmp_path / "part-{start}.jsonl"))
    assert run(lake, history(files, name="files", rows_exact=True)).outcome == "done"
    assert ids(lake) == list(range(50))
    lake.create_table("copy", EVENTS)
    source = TableSource("events", "id")
    assert run(lake, history(source, "copy", name="copy", rows_exact=True, last=None)).outcome == "done"
    assert ids(lake, "copy") == list(range(50))


def test_a_record_that_does_not_fit_is_named_with_its_chunk(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "part-0.jsonl").write_text('{"id": 1, "name": "row 1"}\n{"id": "two", "name": "row 2"}\n')
    found = run(lake, history(to_source(str(tmp_path / "part-{start}.jsonl")), last=10))
    assert found.error is not None
    assert (found.error["kind"], found.error["facts"]["chunk"]) == ("Invalid", "0..10")
    assert "two" in found.error["facts"]["example"]
    assert chunk_rows(lake) == {}


@pytest.mark.parametrize(
    "definition",
    [
        "select id div 100 * 100 as id, 'x' as name from chunk group by 1",
        "select max(id) + 1 as id, 'x' as name from chunk",
        "select id + 5 as id, name from chunk",
    ],
    ids=["below", "at-the-end", "across"],
)
def test_computed_rows_that_say_where_they_are_must_be_there(lake: fm.Lake, definition: str) -> None:
    """A floor would take them out with another chunk, or leave them when their own goes."""
    lake.create_table("marks", EVENTS)
    found = run(lake, history(Numbers(), {"events": None, "marks": definition}, order="oldest", first=20, last=90))
    assert found.error is not None
    assert (found.outcome, found.error["kind"]) == ("failed", "Invalid")
    assert "outside of its range" in found.error["message"]
    assert found.error["facts"]["table"] == "marks"
    assert "give this value another column name" in found.error["advice"]
    assert (ids(lake), ids(lake, "marks")) == ([], [])


def test_a_table_added_later_does_without_columns_that_are_filled(lake: fm.Lake) -> None:
    source = Numbers()
    assert run(lake, history(source)).outcome == "done"
    lake.backfill.column("events", "copied", "id")
    lake.create_table("later", EVENTS)
    source.asked.clear()
    assert run(lake, history(source, {"events": None, "later": None})).outcome == "done"
    assert (source.asked, ids(lake, "later")) == ({}, list(range(50)))


def test_a_source_is_asked_if_the_table_has_columns_that_it_never_brought(lake: fm.Lake) -> None:
    source = Numbers()
    assert run(lake, history(source)).outcome == "done"
    lake.append("events", [{"id": 500, "name": "of another", "place": "here"}], evolve=True)
    lake.create_table("later", EVENTS)
    source.asked.clear()
    assert run(lake, history(source, {"events": None, "later": None})).outcome == "done"
    assert (sum(source.asked.values()), ids(lake, "later")) == (5, list(range(50)))


def test_older_rows_of_others_are_not_taken_for_those_that_are_gone(lake: fm.Lake) -> None:
    lake.append("events", [{"id": 3, "name": "of another"}])
    source = Numbers()
    assert run(lake, history(source, last=20)).outcome == "done"
    lake.delete("events", "id = 7")
    lake.create_table("later", EVENTS)
    source.asked.clear()
    assert run(lake, history(source, {"events": None, "later": None}, last=20)).outcome == "done"
    assert source.asked == {"0..10": 1}
    rows = lake.read_arrow("later").read_all().to_pylist()
    assert sorted((row["id"], row["name"]) for row in rows) == [(number, f"row {number}") for number in range(20)]
