"""Queries that leave out files give the answers of queries that read all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.errors import FloodmarkError
from floodmark.rows.schema import spark_schema, table_schema
from floodmark.rows.sql.pushdown import Need, needs
from floodmark.rows.sql.query import Source, run_query
from tests.conftest import Place
from tests.random_queries import DAYS, TABLES, Queries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMAS = {table: table_schema(columns) for table, columns in TABLES.items()}
# Small queries over small rows: one task, and nothing is compiled.
QUICK = {
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}


@contextmanager
def settings(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in wanted}
    try:
        for name, value in wanted.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def some_rows(chance: random.Random, table: str, count: int) -> list[dict[str, Any]]:
    """Rows of few values, so that joins and conditions match, and with nulls in every column."""
    moments = [datetime.fromisoformat(day) + timedelta(hours=hour) for day in DAYS for hour in (0, 12, 23)]
    values: dict[str, list[Any]] = {
        "string": ["a", "b", "ab", "", "1", "2026-01-01"],
        "date": [date.fromisoformat(day) for day in DAYS],
        "boolean": [True, False],
        "timestamp": moments,
        "timestamp_ntz": moments,
    }

    def value(kind: str) -> Any:
        if chance.random() < 0.2:
            return None
        if kind.startswith("struct"):
            return {"k": value("int"), "day": value("date")}
        return chance.choice(values.get(kind, [0, 1, 2, 3]))

    columns = [part.split(" ", 1) for part in TABLES[table].split(", ")]
    return [{name: value(kind) for name, kind in columns} for _ in range(count)]


def answer(run: Callable[[], DataFrame]) -> Counter[str] | None:
    """The rows of a query; None if it fails, also if Spark's optimizer does."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        return Counter(map(repr, run().collect()))
    except (PySparkException, Py4JJavaError, FloodmarkError):
        return None


class Twice:
    """Runs queries over all rows of three tables, and over those rows only that each query needs."""

    def __init__(self, spark: SparkSession, seed: object) -> None:
        chance = random.Random(str(seed))
        self._spark = spark
        self._number = 0
        self._frames = {}
        for table, schema in SCHEMAS.items():
            rows = [tuple(row.values()) for row in some_rows(chance, table, 14)]
            self._frames[table] = spark.createDataFrame(rows, spark_schema(schema, all_nullable=True)).cache()

    def all_rows(self, query: str) -> Counter[str] | None:
        tables = {table: Source(f"all{table}", 0) for table in TABLES}
        return answer(lambda: run_query(self._spark, query, tables, lambda table: self._frames[table]))

    def needed_rows(self, query: str, needed: Mapping[str, Need]) -> Counter[str] | None:
        self._number += 1
        tables = {table: Source(f"some{table}", 0, str(self._number)) for table in TABLES}

        def read(table: str) -> DataFrame:
            need, frame = needed.get(table, Need()), self._frames[table]
            frame = frame if need.where is None else frame.where(need.where.text)
            return frame if need.columns is None else frame.select(*need.columns)

        return answer(lambda: run_query(self._spark, query, tables, read))


def compared(spark: SparkSession, seed: object, count: int) -> Counter[str]:
    """How many random queries ran, and how many of them had something left out."""
    twice, queries, seen = Twice(spark, seed), Queries(seed), Counter[str]()
    for _ in range(count):
        query = queries.one()
        needed = needs(query, SCHEMAS)
        seen["all"] += 1
        if all(need.where is None for need in needed.values()):
            continue
        expected = twice.all_rows(query)
        if expected is None:
            seen["failed"] += 1
            continue
        seen["pruned"] += 1
        seen["with rows"] += bool(expected)
        seen["narrow"] += any(need.columns is not None for need in needed.values())
        found = twice.needed_rows(query, needed)
        wheres = {table: (need.where and need.where.text, need.columns) for table, need in needed.items()}
        assert found == expected, f"{query}\n{wheres}"
    return seen


@pytest.mark.whole
@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", range(32))
def test_rows_that_a_query_does_not_need_change_no_answer(spark: SparkSession, seed: int) -> None:
    with settings(spark, QUICK | {"spark.sql.ansi.enabled": str(seed // 16 % 2 == 0).lower()}):
        seen = compared(spark, seed, 60)
    assert seen["pruned"] > 5, seen
    assert seen["with rows"] > 2, seen
    assert seen["narrow"] > 2, seen


# ── files of a lake ──


PARTS = [date(2026, 1, 1) + timedelta(days=number) for number in range(20)]


@pytest.fixture
def lake(new_place: Callable[[str], Place], spark: SparkSession) -> Iterator[fm.Lake]:
    """A table of 60 files in 20 partitions, and a small one."""
    with new_place("sqlite").open(create=True, spark=spark, actor="test") as lake:
        lake.create_table("events", "id long, day date, ts timestamp, word string", partition=["day"])
        lake.create_table("words", "word string, n int")
        for number in range(3):
            lake.append(
                "events",
                [
                    {
                        "id": number * 100 + place,
                        "day": day,
                        "ts": datetime(day.year, day.month, day.day, 12, tzinfo=UTC),
                        "word": "a",
                    }
                    for place, day in enumerate(PARTS)
                ],
            )
        lake.append("words", [{"word": "a", "n": 1}, {"word": "b", "n": 2}])
        yield lake


def opened(frame: DataFrame) -> int:
    """How many data files the frame reads."""
    return len(frame.inputFiles())


THIRD = "(select * from events where day = '2026-01-03')"
OPENED = [
    ("select id from events", 60, 60),
    ("select id from events where day = '2026-01-03'", 3, 3),
    ("select id from events where day = date '2026-01-03' and word = 'a'", 3, 3),
    ("select id from events where day between '2026-01-03' and date '2026-01-05' and id < 100", 3, 3),
    ("select id from events where day in ('2026-01-03', '2026-01-04') or id = 219", 7, 7),
    ("select id from events where cast(ts as date) = '2026-01-10'", 9, 3),
    ("with e as (select * from events where word = 'a') select id from e where day >= '2026-01-20'", 3, 3),
    ("select e.id from events e left join words w on e.word = w.word and w.n = 7 where e.day = '2026-01-03'", 3, 3),
    ("select w.word from words w left join events e on e.word = w.word and e.day = '2026-01-03'", 4, 4),
    ("select w.word from words w left join events e on e.word = w.word where e.day is null", 61, 1),
    ("select count(*) from events where day = '2027-01-01'", 0, 1),
    ("select id from events where upper(word) = 'A'", 60, 60),
    (f"select id from events e join {THIRD} f using (id) where id < 50", 20, 1),
    (f"select id from events e left join {THIRD} f using (id) where id < 5", 7, 5),
    (f"select id from {THIRD} e right join events f using (id) where id < 5", 7, 5),
    (f"select id from events e full join {THIRD} f using (id) where id < 5", 60, 5),
    ("select id from events where id = 5; ", 1, 1),
]


def test_a_query_opens_the_files_of_its_conditions(lake: fm.Lake) -> None:
    for query, files, rows in OPENED:
        frame = lake.sql(query)
        assert (opened(frame), frame.count()) == (files, rows), query


def test_files_that_a_query_does_not_need_are_not_touched(lake: fm.Lake) -> None:
    (head,) = [head for head in lake.heads() if head.table == "events"]
    needed = {
        path.rpartition("/")[2] for path in lake.sql("select * from events where day = '2026-01-03'").inputFiles()
    }
    for path in lake.catalog.files.data_files(head):
        if path.rpartition("/")[2] not in needed:
            lake.catalog.storage.delete(path)
    found = lake.sql("select id from events where day = '2026-01-03' order by id").collect()
    assert [row.id for row in found] == [2, 102, 202]
    with pytest.raises(Exception, match=r"missing|damaged|not exist"):
        lake.sql("select id from events").collect()


def test_two_queries_never_share_what_only_one_of_them_needs(lake: fm.Lake) -> None:
    days = [lake.sql(f"select id from events where day = '{day}'") for day in PARTS[:3]]
    everything = lake.sql("select id from events")
    again = lake.sql(f"select id from events where day = '{PARTS[0]}' or id = 1")
    sequences = lake.sql(f"select id, _seq from events where day = '{PARTS[0]}' and _seq > 1", with_seq=True)
    assert [sorted(row.id for row in frame.collect()) for frame in days] == [[n, 100 + n, 200 + n] for n in range(3)]
    assert everything.count() == 60
    assert sorted(row.id for row in again.collect()) == [0, 1, 100, 200]
    assert [row.id for row in sequences.orderBy("id").collect()] == [100, 200]
    assert opened(sequences) == 3


UNUSUAL = {
    "spark.sql.caseSensitive": "true",
    "spark.sql.legacy.ctePrecedencePolicy": "LEGACY",
    "spark.sql.parser.quotedRegexColumnNames": "true",
    "spark.sql.ansi.relationPrecedence": "true",
}


def test_with_a_setting_that_changes_what_a_query_means_every_file_is_read(lake: fm.Lake, spark: SparkSession) -> None:
    query = "select id from events where day = '2026-01-03'"
    for name, value in UNUSUAL.items():
        with settings(spark, {name: value}):
            assert opened(lake.sql(query)) == 60, name
    assert opened(lake.sql(query)) == 3


def test_tasks_that_read_files_get_the_columns_and_the_condition(
    lake: fm.Lake, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    lake.rename_column("events", "id", "number")
    frame = lake.sql("select number from events where day = '2026-01-03' and number > 50")
    frame.explain()
    plan = capsys.readouterr().out
    assert "MapInArrow" in plan
    assert "number" in plan
    assert "word" not in plan
    assert sorted(row.number for row in frame.collect()) == [102, 202]
    assert lake.sql("select * from events where number = 102").collect()[0].word == "a"
    assert lake.sql("select count(*) c from events").collect()[0].c == 60
    sequences = lake.sql("select number, _seq from events where day = '2026-01-03'", with_seq=True).collect()
    assert sorted(row.number for row in sequences) == [2, 102, 202]
    assert len({row._seq for row in sequences}) == 3


def test_views_of_parts_do_not_pile_up(lake: fm.Lake, spark: SparkSession) -> None:
    def views() -> int:
        return sum(one.name.startswith("_floodmark_") for one in spark.catalog.listTables())

    lake.sql("select id from events")
    before = views()
    frames = [lake.sql(f"select id from events where id = {number} or id = 7") for number in range(5)]
    assert views() == before
    assert [sorted(row.id for row in frame.collect()) for frame in frames] == [[number, 7] for number in range(5)]
    with pytest.raises(fm.Invalid, match="understand"):
        lake.sql("select nothing from events where id = 5")
    assert views() == before


def test_threads_with_the_same_query_do_not_take_each_others_view(lake: fm.Lake) -> None:
    def ask(_: int) -> list[int]:
        return sorted(row.id for row in lake.sql("select id from events where day = '2026-01-03'").collect())

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(24))) == [[2, 102, 202]] * 24
