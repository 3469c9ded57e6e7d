"""Sources of history that read rows: files by a template, strictly, and another table of the lake by a column."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.backfill.chunks.sources import HistorySource, PathSource, SourceContext, TableSource, bind, explain
from floodmark.errors import Invalid, NotFound, Unavailable
from tests.without_spark import NO_SPARK

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAYS = Geometry.of("2024-01-01", "2024-01-05", "1d")
NUMBERS = Geometry.of(0, 400, 100)
START = datetime(2024, 1, 1, tzinfo=UTC)


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("events", "id long, name string")
        yield lake


def context(
    lake: fm.Lake, geometry: Geometry, *, table: str | None = "events", with_spark: bool = True
) -> SourceContext:
    sessions = lake.sessions if with_spark else NO_SPARK
    return SourceContext(lake.catalog, sessions, geometry, lambda: None if table is None else lake.schema(table))


def write(folder: Path, name: str, *rows: dict[str, Any] | str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def ids(frame: DataFrame) -> list[int]:
    return sorted(row["id"] for row in frame.collect())


def first(geometry: Geometry) -> Chunk:
    return geometry.chunk(geometry.wanted(None).start)


# ── files ──


def test_files_of_every_step_of_a_chunk_are_read_and_no_others(lake: fm.Lake, tmp_path: Path) -> None:
    for hour in range(0, 96, 12):
        moment = START + timedelta(hours=hour)
        write(tmp_path, f"in/{moment:%Y-%m-%d/%H}-x.jsonl", {"id": hour, "name": "a"}, {"id": hour + 1})
    template = f"{tmp_path}/in/{{start:%Y-%m-%d/%H}}-*.jsonl"
    source = bind(PathSource(template, step="12h"), context(lake, DAYS))
    read = [ids(source.read(DAYS.chunk(number))) for number in DAYS.wanted(None)]
    assert read == [[0, 1, 12, 13], [24, 25, 36, 37], [48, 49, 60, 61], [72, 73, 84, 85]]
    lake.append("events", source.read(first(DAYS)))
    assert ids(lake.read("events")) == read[0]


def test_missing_files_are_named_or_empty_as_was_said(lake: fm.Lake, tmp_path: Path) -> None:
    write(tmp_path, "0.csv", "id,name", "1,a")
    write(tmp_path, "50.csv", "id,name", "2,b")
    write(tmp_path, "150.csv", "id,name", "3,c")
    template = f"file://{tmp_path}/{{start}}.csv"
    strict, lenient = (
        bind(PathSource(template, step=50, missing=missing), context(lake, NUMBERS)) for missing in ("error", "empty")
    )
    assert ids(strict.read(NUMBERS.chunk(0))) == [1, 2]
    with pytest.raises(NotFound) as error:
        strict.read(NUMBERS.chunk(1))
    assert error.value.facts["path"] == f"file://{tmp_path}/100.csv"
    assert error.value.facts["chunk"] == "100..200"
    assert ids(lenient.read(NUMBERS.chunk(1))) == [3]
    nothing = lenient.read(NUMBERS.chunk(2))
    assert (nothing.columns, nothing.collect()) == (["id", "name"], [])
    pattern = bind(PathSource(f"{tmp_path}/{{start}}-*.csv"), context(lake, NUMBERS))
    with pytest.raises(NotFound):
        pattern.read(NUMBERS.chunk(3))


def test_what_does_not_fit_the_table_is_an_error_that_can_be_explained(lake: fm.Lake, tmp_path: Path) -> None:
    write(tmp_path, "0.jsonl", {"id": 1}, '{"id": "many", "name": "x"}')
    write(tmp_path, "100.jsonl", {"id": 1, "nmae": "x"})
    source = bind(PathSource(f"{tmp_path}/{{start}}.jsonl"), context(lake, NUMBERS))
    with pytest.raises(Invalid):
        lake.append("events", source.read(NUMBERS.chunk(0)))
    told = explain(source, NUMBERS.chunk(0))
    assert told is not None
    assert (told.facts["column"], told.facts["count"]) == ("id", 1)
    with pytest.raises(Invalid, match="does not have") as error:
        source.read(NUMBERS.chunk(1))
    assert error.value.facts["column"] == "nmae"
    assert ids(lake.read("events")) == []


def test_columns_may_be_told_where_no_table_tells_them(lake: fm.Lake, tmp_path: Path) -> None:
    write(tmp_path, "0.jsonl", {"a": 1, "b": "2024-01-01T00:00:00Z"})
    template = f"{tmp_path}/{{start}}.jsonl"
    told = bind(PathSource(template, columns="a int, b timestamp"), context(lake, NUMBERS, table=None))
    assert dict(told.read(NUMBERS.chunk(0)).dtypes) == {"a": "int", "b": "timestamp"}
    with pytest.raises(Invalid, match="columns of these files are unknown"):
        bind(PathSource(template), context(lake, NUMBERS, table=None)).read(NUMBERS.chunk(0))


@pytest.mark.parametrize("scheme", ["s3", "s3a", "memory"])
def test_a_path_that_spark_has_no_connector_for_says_so(lake: fm.Lake, scheme: str) -> None:
    source = bind(PathSource(f"{scheme}://bucket/{{start}}.jsonl"), context(lake, NUMBERS))
    with pytest.raises(Invalid, match="no connector"):
        source.read(NUMBERS.chunk(0))


def test_a_tip_may_be_in_a_file(lake: fm.Lake, tmp_path: Path) -> None:
    tip = tmp_path / "tip.txt"
    source = bind(PathSource("/d/{start:%d}.jsonl", tip=f"@{tip}"), context(lake, DAYS, with_spark=False))
    with pytest.raises(Unavailable, match="does not exist"):
        source.tip()
    tip.write_text("")  # in the middle of being written
    with pytest.raises(Unavailable, match="empty"):
        source.tip()
    tip.write_text("2024-01-03T06:00:00+06:00\n")
    assert source.tip() == datetime(2024, 1, 3, tzinfo=UTC)
    tip.write_text("soon")
    with pytest.raises(Invalid, match="contains no valid tip") as error:
        source.tip()
    assert error.value.facts["path"] == str(tip)


# ── another table ──

MOMENTS = [START + timedelta(hours=7 * number, microseconds=number % 3 - 1) for number in range(16)]


@pytest.fixture
def history(lake: fm.Lake) -> fm.Lake:
    """A table whose files overlap, with a null in every range column."""
    lake.create_table("old", "id long, small int, day date, at timestamp, local timestamp_ntz, name string")
    rows = [
        {
            "id": number * 25,
            "small": number * 25,
            "day": moment.date(),
            "at": moment,
            "local": moment.replace(tzinfo=None),
            "name": "x",
        }
        for number, moment in enumerate(MOMENTS)
    ]
    random.Random(1).shuffle(rows)
    for start in range(0, 16, 4):
        lake.append("old", rows[start : start + 4])
    lake.append("old", [{"name": "nowhere"}])
    return lake


def names_by_chunk(source: HistorySource, geometry: Geometry) -> list[list[int]]:
    return [ids(source.read(geometry.chunk(number))) for number in geometry.wanted(None)]


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles"])
@pytest.mark.parametrize("column", ["at", "local", "day"])
def test_rows_of_a_time_are_read_by_chunk_in_any_time_zone(history: fm.Lake, column: str, zone: str) -> None:
    geometry = Geometry.of("2023-12-31", "2024-01-07", "36h")
    source = bind(TableSource("old", column), context(history, geometry))
    spark = history.spark
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        found = names_by_chunk(source, geometry)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)

    def place(moment: datetime) -> datetime:
        return datetime(moment.year, moment.month, moment.day, tzinfo=UTC) if column == "day" else moment

    expected = [
        [at * 25 for at, moment in enumerate(MOMENTS) if chunk.start <= place(moment) < chunk.end]
        for chunk in map(geometry.chunk, geometry.wanted(None))
    ]
    assert found == expected
    assert sum(map(len, found)) == 16


@pytest.mark.parametrize("column", ["id", "small"])
def test_rows_of_a_number_are_read_by_chunk(history: fm.Lake, column: str) -> None:
    source = bind(TableSource("old", column), context(history, NUMBERS))
    assert names_by_chunk(source, NUMBERS) == [[base, base + 25, base + 50, base + 75] for base in range(0, 400, 100)]


@pytest.mark.parametrize(
    ("column", "geometry", "tip"),
    [
        ("id", NUMBERS, 376),
        ("small", NUMBERS, 376),
        ("at", DAYS, MOMENTS[-1] + timedelta(microseconds=1)),
        ("local", DAYS, MOMENTS[-1] + timedelta(microseconds=1)),
        ("day", DAYS, START + timedelta(days=4)),
    ],
)
def test_the_tip_is_just_behind_the_highest_value_and_known_without_spark(
    history: fm.Lake, column: str, geometry: Geometry, tip: Any
) -> None:
    asked = context(history, geometry, with_spark=False)
    assert bind(TableSource("old", column), asked).tip() == tip
    assert MOMENTS[-1].date() == date(2024, 1, 5)


def test_an_empty_table_has_no_tip_unless_it_is_said(history: fm.Lake) -> None:
    asked = context(history, NUMBERS, with_spark=False)
    assert bind(TableSource("events", "id"), asked).tip() is None
    assert bind(TableSource("events", "id", tip=300), asked).tip() == 300


def test_files_without_statistics_are_read_for_the_tip(lake: fm.Lake, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("other", uri=f"sqlite:///{tmp_path}/other.db", warehouse=f"file://{tmp_path}/other")
    catalog.create_namespace("there")
    rows = pa.table(
        {
            "id": pa.array([5, 170, None], pa.int64()),
            "at": pa.array([*MOMENTS[:2], None], pa.timestamp("us", tz="UTC")),
            "day": pa.array([date(2024, 1, 2), date(2024, 1, 3), None], pa.date32()),
            "local": pa.array([moment.replace(tzinfo=None) for moment in MOMENTS[:3]], pa.timestamp("us")),
        }
    )
    properties = {"write.metadata.metrics.default": "none"}
    foreign = catalog.create_table("there.old", rows.schema, properties=properties)
    foreign.append(rows)
    lake.adopt("old", foreign.metadata_location)
    catalog.close()
    tips = {
        column: bind(TableSource("old", column), context(lake, NUMBERS if column == "id" else DAYS)).tip()
        for column in rows.column_names
    }
    assert tips == {
        "id": 171,
        "at": MOMENTS[1] + timedelta(microseconds=1),
        "day": START + timedelta(days=2),
        "local": MOMENTS[2] + timedelta(microseconds=1),
    }
    assert ids(bind(TableSource("old", "id"), context(lake, NUMBERS)).read(NUMBERS.chunk(1))) == [170]


def test_files_that_have_nothing_of_a_range_are_not_opened(lake: fm.Lake) -> None:
    for start in (0, 100, 200):
        lake.append("events", [{"id": number, "name": "x"} for number in range(start, start + 100)])

    def at(spark: bool) -> TableRange:
        asked = context(lake, NUMBERS, with_spark=spark)
        return TableRange.at_head(lake.catalog, asked.sessions, NUMBERS, "events", "id")

    assert len(at(True).rows(100, 200).inputFiles()) == 1
    assert at(False).count(100, 300) == 200, "whole files are counted by their statistics"
    assert at(True).count(150, 299) == 149


@pytest.mark.parametrize(
    ("column", "geometry", "says"),
    [
        ("name", NUMBERS, "does not fit the range"),
        ("at", NUMBERS, "does not fit the range"),
        ("id", DAYS, "does not fit the range"),
        ("idd", NUMBERS, "Did you mean id"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(history: fm.Lake, column: str, geometry: Geometry, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        bind(TableSource("old", column), context(history, geometry, with_spark=False))


def test_a_table_that_is_not_there_is_not_found(lake: fm.Lake) -> None:
    with pytest.raises(NotFound):
        bind(TableSource("nowhere", "id"), context(lake, NUMBERS, with_spark=False))


def test_parquet_files_are_looked_into_by_spark_once_and_others_are_still_strict(lake: fm.Lake, tmp_path: Path) -> None:
    """Of files that are the same Spark is asked once; a file with other columns is not read as if it were like them."""
    kinds = {0: pa.int64(), 10: pa.int64(), 20: pa.int32(), 30: pa.int64()}
    for start, kind in kinds.items():
        columns = {"id": pa.array(range(start, start + 10), kind), "name": pa.array([str(start)] * 10)}
        if start == 30:
            columns["more"] = pa.array([1] * 10)
        pq.write_table(pa.table(columns), tmp_path / f"{start}.parquet")
    geometry = Geometry.of(0, 40, 10)
    source = bind(PathSource(f"{tmp_path}/{{start}}.parquet"), context(lake, geometry))
    tracker = lake.spark.sparkContext.statusTracker()
    lake.spark.sparkContext.setJobGroup("footers", "")
    found = []
    for number in range(4):
        before = len(tracker.getJobIdsForGroup("footers"))
        frame = source.read(geometry.chunk(number))
        jobs = len(tracker.getJobIdsForGroup("footers")) - before
        found.append((jobs, frame.dtypes, sorted(row["id"] for row in frame.collect())[0]))
    lake.spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
    long, short = [("id", "bigint"), ("name", "string")], [("id", "int"), ("name", "string")]
    assert found == [(1, long, 0), (0, long, 10), (1, short, 20), (1, [*long, ("more", "bigint")], 30)]
