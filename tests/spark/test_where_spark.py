"""Conditions with Spark: plain ones mean what they mean for Spark, and Spark finds the rows of all others."""

from __future__ import annotations

import os
import random
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from floodmark.errors import Invalid
from floodmark.rows.project import read_schema
from floodmark.rows.schema import arrow_schema, spark_schema, table_schema, user_fields
from floodmark.rows.sql.where import Searched, Where, check_where, count_positions, spark_positions
from tests.unit.test_where import PLAIN, SCHEMA, Staged, random_condition, random_rows
from tests.unit.test_where_moments import COLUMNS, micros, rows_of, without_bounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def settings(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name) for name in wanted}
    try:
        for name, value in wanted.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)


def all_of(frames: Sequence[DataFrame]) -> list[Any]:
    """The rows of all frames by one job, each with the number of its frame in front."""
    numbered = [frame.selectExpr(f"{number} number", "*") for number, frame in enumerate(frames)]
    return list(reduce(lambda left, right: left.unionAll(right), numbered).collect())


# ── plain conditions ──


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_a_plain_condition_matches_the_rows_that_spark_says(spark: SparkSession, ansi: str) -> None:
    chance = random.Random(ansi)
    fields = user_fields(SCHEMA)
    rows = [{**row, "Mixed": chance.choice([None, 5, 6])} for row in random_rows(chance, 60)]
    batch = pa.RecordBatch.from_pylist(rows, schema=read_schema(fields))
    values = [tuple(row.get(field.name) for field in fields) for row in rows]
    df = spark.createDataFrame(values, spark_schema(SCHEMA, all_nullable=True)).coalesce(1)
    texts = [*PLAIN, *(random_condition(chance)[0] for _ in range(30))]
    filters = texts[-3:]
    with settings(spark, {"spark.sql.ansi.enabled": ansi}):
        answers = df.selectExpr(*texts).collect()
        filtered = Counter(filters[row.number] for row in all_of([df.where(text).select("id") for text in filters]))
    for place, text in enumerate(texts):
        where = Where.parse(text, SCHEMA)
        mask = where.mask(batch.select([field.name for field in where.fields]))
        assert mask.to_pylist() == [answer[place] is True for answer in answers], text
        assert text not in filters or filtered[text] == mask.true_count


def words_of_spark() -> list[str]:
    """The words of its grammar, out of the lexer. `sql_keywords()` has them too, but works on them for seconds."""
    import pyspark

    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-sql-api_*.jar")
    with zipfile.ZipFile(jar) as classes:
        lexer = classes.read("org/apache/spark/sql/catalyst/parser/SqlBaseLexer.class")
    return sorted({word.decode().lower() for word in re.findall(rb"'([A-Z_]+)'", lexer)})


def test_a_column_named_like_a_word_of_sql_is_plain_only_if_it_is_that_column_for_spark(spark: SparkSession) -> None:
    words = words_of_spark()
    assert {"date", "timestamp", "between", "qualify"} < set(words)
    # The word at the start, after operators and in parentheses; each value but 1 and null fails one part only.
    form = "{0} > 0 and 3 > {0} and not {0} = 2 or ({0} is null)"
    values, matching = (0, 1, 2, 3, None), [False, True, False, False, True]
    column = pa.array(values, pa.int64())
    # From Arrow, so that Spark has the rows in its plan and compiles nothing for hundreds of columns.
    df = spark.createDataFrame(pa.table([column] * len(words), names=[f"c{at}" for at in range(len(words))]))
    plain = []
    for word in words:
        where = Where.parse(form.format(word), table_schema(f"`{word}` long"))
        if where.plain:
            plain.append(where.text)
            assert where.mask(pa.record_batch({word: column})).to_pylist() == matching
    assert len(plain) > 0.9 * len(words)
    answers = df.toDF(*words).selectExpr(*plain).collect()
    for place, text in enumerate(plain):
        assert [row[place] is True for row in answers] == matching, text


# ── timestamps ──

ZONED = [
    "'{day}'",
    "timestamp '{day}'",
    "date '{day}'",
    "timestamp_ntz '{day}'",
    "'{day} 10:00:00.5'",
    "'{day}T10:00:00'",
    "'{day}T23:00:00-18:00'",
    "'{day} 01:00:00+18:00'",
    "timestamp '{day}T10:00:00.000001Z'",
    "timestamp '{day} 00:00:00+18:00'",
    "timestamp_ntz '{day}T10:00:00'",
]
ZONE, ANSI = "spark.sql.session.timeZone", "spark.sql.ansi.enabled"
LEGACY = "spark.sql.legacy.typeCoercion.datetimeToString.enabled"


def test_a_row_that_matches_in_the_zone_of_the_session_is_not_ruled_out(spark: SparkSession, tmp_path: Path) -> None:
    # Around two days, one of which Apia left out.
    values = [
        micros(day) + hours * 3_600_000_000 + step
        for day in ("2011-12-30", "2024-01-01")
        for hours in (-61, -43, -24, -18, -10, 0, 10, 18, 24, 43, 61, 75)
        for step in (-1, 0)
    ]
    literals = [form.format(day=day) for form in ZONED for day in ("2011-12-30", "2011-12-31", "2024-01-01")]
    texts = [f"{column} {sign} {at}" for column in ("at", "local") for sign in "<=>" for at in literals]
    texts += [f"{column} between {at} and {at}" for column in ("at", "local") for at in literals]
    df = spark.createDataFrame(rows_of(list(values)), spark_schema(table_schema(COLUMNS), all_nullable=True))
    matching: set[tuple[str, int]] = set()
    for zone in ("-18:00", "+18:00", "Pacific/Apia"):
        for ansi, legacy in (("true", "false"), ("false", "true")):
            with settings(spark, {ZONE: zone, ANSI: ansi, LEGACY: legacy}):
                answers = df.selectExpr(*texts).collect()
            assert len(answers) == len(values)
            matching |= {
                (text, at) for at, row in enumerate(answers) for text, yes in zip(texts, row, strict=True) if yes
            }
    table = Staged(tmp_path, COLUMNS, ("day(at)", "day(local)"))
    records = [table.stage(rows_of([value]))[0] for value in values]
    files = [(at, version) for at, one in enumerate(records) for version in (one, without_bounds(one))]
    live = [(at, table.live(version)) for at, version in files]
    wheres = [Where.parse(text, table.schema) for text in texts]
    ruled_out = {(where.text, at) for where in wheres for at, file in live if not where.may_match(file, table.metadata)}
    assert ruled_out & matching == set()
    assert len(ruled_out) > len(texts) * len(values) / 5


# ── positions ──

ODD = "id long, s string, x double, file string, pos long, _metadata struct<row_index:long>, `odd `` name.x` int"


class Files:
    """A table's files, with three rows to a row group."""

    def __init__(self, folder: Path, columns: str) -> None:
        self.folder = folder
        self.schema = table_schema(columns)
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def add(self, name: str, rows: list[dict[str, Any]]) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        schema = arrow_schema(self.schema, file_names=True)
        names = [field.name for field in user_fields(self.schema)]
        columns = [
            pa.array([row.get(name) for row in rows], field.type) for name, field in zip(names, schema, strict=True)
        ]
        pq.write_table(pa.table(columns, schema=schema), path, row_group_size=3, write_page_index=True)
        self.rows[f"file://{path}"] = [{name: row.get(name) for name in names} for row in rows]
        return f"file://{path}"

    def matching(self, test: Callable[[dict[str, Any]], Any]) -> list[tuple[str, int]]:
        return sorted(
            (file, at) for file, rows in self.rows.items() for at, row in enumerate(rows) if test(row) is True
        )

    def positions(self, spark: SparkSession, text: str, arrow: bool | None) -> DataFrame:
        where = Where.parse(text, self.schema)
        df = spark_positions(spark, where, Searched(list(self.rows), self.schema, arrow=arrow))
        assert df.dtypes == [("file", "string"), ("pos", "bigint")]
        return df

    def found(self, spark: SparkSession, text: str, arrow: bool | None) -> list[tuple[str, int]]:
        return sorted((row.file, row.pos) for row in self.positions(spark, text, arrow).collect())


def odd_rows(start: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": number if number % 4 else None,
            "s": f"text {number}",
            "x": number / 2,
            "file": "own" if number % 2 else None,
            "pos": -number,
            "_metadata": {"row_index": 1000 + number},
            "odd ` name.x": number % 3,
        }
        for number in range(start, start + count)
    ]


CONDITIONS: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("x > 9.5 or x = 3.0", lambda row: row["x"] > 9.5 or row["x"] == 3.0),
    ("upper(s) like '%TEXT 1%'", lambda row: "text 1" in row["s"]),
    ("file = 'own' and POS < -4", lambda row: row["file"] == "own" and row["pos"] < -4),
    ("_metadata.row_index >= 1010", lambda row: row["_metadata"]["row_index"] >= 1010),
    ("`odd `` name.x` = 2 and 1 = 1", lambda row: row["odd ` name.x"] == 2),
    ("x * 2 = pos *-1 and id is null", lambda row: row["id"] is None),
    ("1 = 1", lambda row: True),
    ("id = 5 -- and x > 100", lambda row: row["id"] == 5),
    ("nvl(id, 0) = 0 /* none */", lambda row: row["id"] is None),
    ("id = 5", lambda row: row["id"] == 5),
    ("1 = 2", lambda row: False),
]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Files:
    files = Files(tmp_path_factory.mktemp("where") / "a b" / "50%25 off", ODD)
    files.add("one/first.parquet", odd_rows(0, 11))
    files.add("one/second.parquet", odd_rows(11, 5))
    files.add("two/day=3/third.parquet", odd_rows(16, 1))
    return files


@pytest.mark.parametrize("arrow", [False, True])
def test_spark_finds_the_files_and_positions_of_matching_rows(spark: SparkSession, odd: Files, arrow: bool) -> None:
    found = all_of([odd.positions(spark, text, arrow) for text, _ in CONDITIONS])
    for number, (text, test) in enumerate(CONDITIONS):
        expected = odd.matching(test)
        assert sorted((row.file, row.pos) for row in found if row.number == number) == expected, text
        assert expected or text == "1 = 2"


def test_files_that_spark_cannot_tell_apart_by_name_are_found_too(spark: SparkSession, tmp_path: Path) -> None:
    cases = []
    for at, names in enumerate(
        (("a/same.parquet", "b/same.parquet"), ("a b%20é.parquet", "a b é.parquet"), ("_x", "y"))
    ):
        files = Files(tmp_path / str(at), ODD)
        for place, name in enumerate(names):
            files.add(name, odd_rows(place * 5, 5))
        cases += [(files, arrow) for arrow in (None, False, True)]
    found = all_of([files.positions(spark, "x >= 1.0", arrow) for files, arrow in cases])
    for number, (files, arrow) in enumerate(cases):
        expected = files.matching(lambda row: row["x"] >= 1)
        assert sorted((row.file, row.pos) for row in found if row.number == number) == expected, (files.folder, arrow)


def test_counts_are_by_file(spark: SparkSession, odd: Files) -> None:
    where = Where.parse("x > 4.5", odd.schema)
    counts = count_positions(spark, where, Searched(list(odd.rows), odd.schema))
    assert [count for _, count in sorted(counts.items())] == [1, 5, 1]
    assert set(counts) == set(odd.rows)


def test_no_files_have_no_positions(spark: SparkSession, odd: Files) -> None:
    found = spark_positions(spark, Where.parse("x > 1", odd.schema), Searched([], odd.schema))
    assert found.collect() == []
    assert found.dtypes == [("file", "string"), ("pos", "bigint")]


def test_a_column_added_since_is_null_in_old_files(spark: SparkSession, tmp_path: Path) -> None:
    files = Files(tmp_path, "id long")
    old = files.add("old.parquet", [{"id": 1}, {"id": 2}])
    files.schema = table_schema("id long, added string")
    new = files.add("new.parquet", [{"id": 3, "added": "a"}, {"id": 4}])
    texts = ("nvl(added, 'none') = 'none'", "upper(added) = 'A'")
    found = all_of([files.positions(spark, text, arrow) for arrow in (False, True) for text in texts])
    expected = [(0, new, 1), (0, old, 0), (0, old, 1), (1, new, 0)]
    assert sorted(map(tuple, found)) == [*expected, *((number + 2, file, pos) for number, file, pos in expected)]


@pytest.mark.parametrize("arrow", [False, True])
def test_a_missing_file_is_an_error_not_fewer_positions(spark: SparkSession, tmp_path: Path, arrow: bool) -> None:
    from pyspark.errors import PySparkException

    from floodmark.errors import Corrupt

    files = Files(tmp_path, "id long, x double")
    files.add("a.parquet", [{"id": 1, "x": 1.0}])
    gone = files.add("b.parquet", [{"id": 2, "x": 1.0}])
    os.remove(gone.removeprefix("file://"))
    with pytest.raises(PySparkException if arrow else Corrupt):
        files.found(spark, "x = 1.0", arrow)


# ── what is no condition ──

REFUSED = [
    "x",
    "id",
    "null",
    "'true'",
    "*",
    "x > 1, id",
    "hash(*) > 5",
    "x * 2 > 1 or struct(x, *) is null",
    "nope(x) = 1",
    "`nope` > 1.5",
    "s.nope = 1",
    "x >",
    "x > 1;",
    "x > 1 as y",
    "x > 1 y",
    "1=1) or (1=1",
    "(1=1",
    "x > 1 /*",
    "x > ?",
    "x > :y",
    "count(*) > 1",
    "max(x) > 1.5",
    "row_number() over (order by x) = 1",
    "explode(array(true))",
    "x in (select 1.5d)",
    "exists (select 1)",
    "(select true)",
    "x > (select max(id) from range(3))",
    "x in (values 1.5d, 2.5d)",
    "x in (from range(3))",
    "(with t as (select 1 a) select a > 0 from t)",
    "_metadata.file_name = 'a' and x > 1",
    "_file || 'a' = 'a' and x > 1",
    "_pos + 0 = 1",
    "_seq + 0 = 1",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_condition_on_the_rows_is_invalid(spark: SparkSession, text: str) -> None:
    schema = table_schema("id long, x double, s string")
    where = Where.parse(text, schema)
    assert not where.plain
    with pytest.raises(Invalid) as refused:
        check_where(spark, where, schema)
    assert refused.value.advice


def test_what_is_no_condition_is_found_before_any_file_is_read(spark: SparkSession, tmp_path: Path) -> None:
    schema = table_schema("id long, x double, s string")
    for text in ("x", "x in (select 1.5d)"):
        where = Where.parse(text, schema)
        with pytest.raises(Invalid):
            spark_positions(spark, where, Searched([f"file://{tmp_path}/there-is-no-such-file"], schema))


def test_columns_below_the_table_are_not_seen(spark: SparkSession, tmp_path: Path) -> None:
    # Where there is no `id`, one that Spark made for itself must not be taken for it.
    files = Files(tmp_path, "k long")
    files.add("a.parquet", [{"k": 1}])
    for arrow in (False, True):
        with pytest.raises(Invalid, match="does not understand") as refused:
            files.found(spark, "abs(id) >= 0", arrow)
        assert "`id`" in refused.value.facts["cause"]


def test_a_check_runs_no_job_and_leaves_python_functions_alone(spark: SparkSession) -> None:
    schema = table_schema("id long, x double")
    check_where(spark, Where.parse("if(x > 1, raise_error('a job ran'), true)", schema), schema)
    spark.udf.register("where_test_half", lambda value: None if value is None else value / 2, "double")
    check_where(spark, Where.parse("where_test_half(x) > 1", schema), schema)
