"""Tables that evolve, under Spark: DataFrames that bring more, and old files read with the schema of today."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema

from floodmark.errors import Invalid
from floodmark.rows.convert import table_shape
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.layout import partition_spec
from floodmark.rows.reading.scan import scan
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.stage import StageTarget, incoming_schema, stage_dataframe, stage_in_process
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OLD = table_schema(
    "id int, f float, d decimal(4,2), big decimal(15,2), wide decimal(20,2), s struct<a:int,b:string>, "
    "l array<struct<a:int>>, m map<string,struct<a:int>>, note string"
)
OLD_ROWS: list[dict[str, Any]] = [
    {
        "id": 1,
        "f": 0.5,
        "d": Decimal("-1.25"),
        "big": Decimal("1234567890123.45"),
        "wide": Decimal("-123456789012345678.01"),
        "s": {"a": 5, "b": "x"},
        "l": [{"a": 1}, None],
        "m": {"k": {"a": 1}, "none": None},
        "note": "first",
    },
    {"id": 2, "s": {"a": None, "b": None}, "l": []},
    {"id": 3},
]
# What the rows of the old file are under the new schema.
OLD_NOW: list[dict[str, Any]] = [
    {
        **OLD_ROWS[0],
        "s": {"a": 5, "b": "x", "c": None},
        "l": [{"a": 1, "c": None}, None],
        "m": {"k": {"a": 1, "c": None}, "none": None},
        "new": None,
    },
    {
        **dict.fromkeys(("f", "d", "big", "wide", "m", "note", "new")),
        "id": 2,
        "s": {"a": None, "b": None, "c": None},
        "l": [],
    },
    {**dict.fromkeys(("f", "d", "big", "wide", "s", "l", "m", "note", "new")), "id": 3},
]
MORE = """
    select 3000000000 id, 0.1d f, cast('123456.78' as decimal(30,2)) d, cast(1 as decimal(16,2)) big,
      cast('-1.5' as decimal(38,2)) wide, named_struct('c', array(1), 'a', 4000000000) s,
      array(named_struct('a', 1L, 'c', 'y')) l, map('k', named_struct('c', 1.5d, 'a', 1)) m,
      named_struct('x', 1, 'y', 'z') new
"""
MORE_ROW: dict[str, Any] = {
    "id": 3000000000,
    "f": 0.1,
    "d": Decimal("123456.78"),
    "big": Decimal("1.00"),
    "wide": Decimal("-1.50"),
    "s": {"a": 4000000000, "b": None, "c": [1]},
    "l": [{"a": 1, "c": "y"}],
    "m": {"k": {"a": 1, "c": 1.5}},
    "note": None,
    "new": {"x": 1, "y": "z"},
}


def target_of(schema: Schema, folder: Path, **extra: Any) -> StageTarget:
    spec = partition_spec(schema, [])
    return StageTarget(f"file://{folder}", schema.model_dump_json(), spec.model_dump_json(), **extra)


def evolve(schema: Schema, df: DataFrame) -> Schema | None:
    incoming, data = incoming_schema(df, table_shape(schema.model_dump_json()))
    assert data is df
    return evolve_schema(schema, incoming, schema.highest_field_id, 1)


def rows_of(df: DataFrame) -> list[dict[str, Any]]:
    return sorted((row.asDict(recursive=True) for row in df.collect()), key=lambda row: row["id"])


@pytest.fixture(scope="module")
def table(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Schema, list[str]]:
    """A table with a file older than its schema, and one that a DataFrame with more columns brought."""
    folder = tmp_path_factory.mktemp("evolved")
    old = stage_in_process(target_of(OLD, folder), OLD_ROWS, Storage({}))
    df = spark.sql(MORE)
    now = evolve(OLD, df)
    assert now is not None
    new = stage_dataframe(target_of(now, folder, fill_missing=True), df, "op")
    return now, [record.path for record in (*old, *new)]


def test_a_dataframe_says_what_the_table_becomes(table: tuple[Schema, list[str]]) -> None:
    now, _ = table
    assert [field.name for field in now.fields] == [f.name for f in OLD.fields[:-1]] + ["new", "_seq"]
    names = ("id", "f", "d", "big", "wide", "s.a", "l.element.a", "m.value.a", "s.c", "m.value.c", "new.x")
    assert [str(now.find_type(name)) for name in names] == [
        "long",
        "double",
        "decimal(30, 2)",
        "decimal(16, 2)",
        "decimal(38, 2)",
        "long",
        "long",
        "int",
        "list<int>",
        "double",
        "int",
    ]
    # Spark calls literals not null; the table does not take that for a rule.
    assert not any(now.find_field(name).required for name in ("new", "new.x", "s.c", "s.c.element"))


@pytest.mark.parametrize("arrow", [False, True])
def test_old_and_new_files_read_together_with_the_evolved_schema(
    spark: SparkSession, table: tuple[Schema, list[str]], arrow: bool
) -> None:
    now, files = table
    found = scan(spark, files, now, arrow=arrow)
    assert found.columns == [field.name for field in now.fields[:-1]]
    assert rows_of(found) == [*OLD_NOW, MORE_ROW]


@pytest.mark.parametrize(
    ("condition", "ids"),
    [
        ("id > 2147483647", [3000000000]),
        ("id < 3000000000", [1, 2, 3]),
        ("id = 2", [2]),
        ("id in (1L, 3000000000L)", [1, 3000000000]),
        ("f = 0.5d", [1]),
        ("f < 0.2d", [3000000000]),
        ("d = -1.25", [1]),
        ("d > 99.99", [3000000000]),
        ("big > 1000000000000", [1]),
        ("wide < -1.5", [1]),
        ("s.a = 4000000000", [3000000000]),
        ("s.a = 5", [1]),
        ("s.c is null and s is not null", [1, 2]),
        ("new is null", [1, 2, 3]),
        ("new.x = 1", [3000000000]),
        ("get(l, 0).a = 1 and get(l, 0).c is null", [1]),
        ("size(l.c) = 2", [1]),
        ("size(l.c) = 0", [2]),
        ("m['k'].c is null and m['k'] is not null", [1]),
    ],
)
def test_conditions_on_widened_and_new_columns_find_rows_of_every_age(
    spark: SparkSession, table: tuple[Schema, list[str]], condition: str, ids: list[int]
) -> None:
    # Spark's reader tests conditions against the statistics and dictionaries of files that hold narrower types.
    now, files = table
    found = scan(spark, files, now, arrow=False).where(condition).select("id")
    assert sorted(row.id for row in found.collect()) == ids


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("new", [None, None, None, {"x": 1, "y": "z"}]),
        ("s.c", [None, None, None, [1]]),
        ("concat(s is null, s.c is null)", ["falsetrue", "falsetrue", "truetrue", "falsefalse"]),
        ("l.c", [[None, None], [], None, ["y"]]),
        ("map_values(m).c", [[None, None], None, None, [1.5]]),
    ],
)
@pytest.mark.parametrize("arrow", [False, True])
def test_new_columns_alone_give_a_value_for_rows_of_every_age(
    spark: SparkSession, table: tuple[Schema, list[str]], column: str, expected: list[Any], arrow: bool
) -> None:
    # The old file has none of what is asked for: its rows must come all the same, and empty is not null.
    now, files = table
    rows = scan(spark, files, now, arrow=arrow).selectExpr(f"{column} c").collect()
    assert sorted((row.asDict(recursive=True)["c"] for row in rows), key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("query", "column"),
    [
        ("select 'x' id, 1 new", "id"),
        ("select 5L id, timestamp '2026-01-01' note, 1 new", "note"),
        ("select 5L id, array(1) s, 1 new", "s"),
    ],
)
def test_one_wrong_column_refuses_a_dataframe_before_a_job(
    spark: SparkSession, tmp_path: Path, query: str, column: str
) -> None:
    df = spark.sql(query)
    now = evolve(OLD, df)
    assert now is not None
    with pytest.raises(Invalid, match="do not fit the table") as refused:
        stage_dataframe(target_of(now, tmp_path, fill_missing=True), df, "op")
    assert refused.value.facts["column"] == column
    assert list(tmp_path.iterdir()) == []


def test_a_missing_required_column_stays_refused(spark: SparkSession, tmp_path: Path) -> None:
    schema = table_schema("id long not null, a string")
    df = spark.sql("select 'x' a, 1 new")
    now = evolve(schema, df)
    assert now is not None
    with pytest.raises(Invalid, match="missing") as refused:
        stage_dataframe(target_of(now, tmp_path, fill_missing=True), df, "op")
    assert refused.value.facts["column"] == "id"


@pytest.mark.parametrize("arrow", [False, True])
def test_settled_files_of_both_makes_read_with_their_sequences(
    spark: SparkSession, tmp_path: Path, arrow: bool
) -> None:
    schema = table_schema("id long, k string")
    target = target_of(schema, tmp_path, settled=True)
    records = stage_dataframe(target, spark.range(0, 4, 1, 2).selectExpr("id + 100 _seq", "'spark' k", "id"), "op")
    records += stage_in_process(target, pa.table({"id": [9], "k": ["here"], "_seq": [7]}), Storage({}))
    seq = schema.find_field("_seq").field_id
    assert all(record.null_counts[seq] == 0 and seq in record.lower_bounds for record in records)
    found = scan(spark, [record.path for record in records], schema, True, arrow=arrow)
    assert rows_of(found) == [
        *({"id": i, "k": "spark", "_seq": 100 + i} for i in range(4)),
        {"id": 9, "k": "here", "_seq": 7},
    ]
