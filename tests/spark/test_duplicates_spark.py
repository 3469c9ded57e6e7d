"""The last row of each key of a DataFrame: the same rows as for a table in memory, names and types unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from floodmark.errors import Invalid
from floodmark.rows.staging.duplicates import last_of_dataframe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def listed(df: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in df.collect()), key=repr)


def test_the_highest_row_of_each_key_stays(spark: SparkSession) -> None:
    rows = [(1, "a", 5), (1, "b", 9), (1, "c", 9), (2, "d", None), (2, "e", -1), (3, "f", None), (None, "g", 1)]
    df = spark.createDataFrame([*rows, (None, "h", 2)], "id long, s string, v int")
    # Two rows tie for key 1: nobody can say which is the last, both stay.
    assert listed(last_of_dataframe(df, ["id"], "v")) == sorted(
        [(1, "b", 9), (1, "c", 9), (2, "e", -1), (3, "f", None), (None, "h", 2)], key=repr
    )


def test_nan_is_the_highest_order(spark: SparkSession) -> None:
    df = spark.sql("select * from values (1, double('inf')), (1, double('nan')), (1, null) t(id, v)")
    assert repr(listed(last_of_dataframe(df, ["id"], "v"))) == "[(1, nan)]"


def test_rows_that_tie_are_one_if_they_are_the_same(spark: SparkSession) -> None:
    text = "a int, b string, v int, st struct<x:int,l:array<string>>"
    same: tuple[Any, ...] = (1, "é", 5, (1, ["x", None]))
    rows: list[tuple[Any, ...]] = [
        same,
        same,
        (1, "é", 4, None),
        (1, "e", 5, None),
        (2, "é", 5, None),
        (2, "é", 5, (1, None)),
    ]
    found = last_of_dataframe(spark.createDataFrame(rows, text), ["a", "b"], "v")
    assert [(row.a, row.b, row.v) for row in found.orderBy("a", "b").collect()] == [
        (1, "e", 5),
        (1, "é", 5),
        (2, "é", 5),
        (2, "é", 5),
    ]


@pytest.mark.parametrize("kind", ["map<string,int>", "array<struct<m:map<string,int>>>"])
def test_rows_that_tie_and_hold_a_map_stay(spark: SparkSession, kind: str) -> None:
    df = spark.createDataFrame([(1, 5, None), (1, 5, None), (1, 4, None)], f"id int, v int, m {kind}")
    assert [row.v for row in last_of_dataframe(df, ["id"], "v").collect()] == [5, 5]


def test_any_names_and_the_order_and_types_of_columns_are_kept(spark: SparkSession) -> None:
    df = spark.sql(
        "select struct(1 as x) as `c0`, 'p' as `a.b`, id % 2 as `i``d.x`, id as `ordre é`, "
        "cast(1.5 as decimal(9,2)) as `rank` from range(4)"
    )
    found = last_of_dataframe(df, ["i`d.x", "a.b"], "ordre é")
    assert found.schema.simpleString() == df.schema.simpleString()
    assert [field.nullable for field in found.schema] == [field.nullable for field in df.schema]
    assert sorted(row["ordre é"] for row in found.collect()) == [2, 3]


def test_columns_that_spark_cannot_tell_apart_are_left_for_staging_to_refuse(spark: SparkSession) -> None:
    df = spark.sql("select id, id as ID, 1 as v from range(2)")
    found = last_of_dataframe(df, ["id"], "v")
    assert found.columns == ["id", "ID", "v"]
    assert listed(found) == [(0, 0, 1), (1, 1, 1)]


def test_an_empty_dataframe_stays_empty(spark: SparkSession) -> None:
    df = spark.createDataFrame([], "id long, v timestamp")
    assert last_of_dataframe(df, ["id"], "v").collect() == []


@pytest.mark.parametrize(("key", "order", "advice"), [(["id"], "uptaded", "updated"), (["idd"], "updated", "id")])
def test_a_column_that_is_not_there_is_refused_with_the_nearest(
    spark: SparkSession, key: list[str], order: str, advice: str
) -> None:
    with pytest.raises(Invalid, match=f"Did you mean {advice}"):
        last_of_dataframe(spark.createDataFrame([(1, 1)], "id int, updated int"), key, order)


@pytest.mark.parametrize(("key", "order"), [(["id"], "m"), (["m"], "id")])
def test_a_map_is_neither_key_nor_order(spark: SparkSession, key: list[str], order: str) -> None:
    with pytest.raises(Invalid, match="cannot be compared") as refused:
        last_of_dataframe(spark.createDataFrame([], "id int, m map<string,int>"), key, order)
    assert refused.value.facts["column"] == "m"


def test_the_same_rows_as_for_a_table_in_memory(spark: SparkSession) -> None:
    from floodmark.rows.staging.duplicates import last_of_table

    df = spark.range(300).selectExpr(
        "id % 17 as a", "concat('n', id % 3) as b", "if(id % 11 = 0, null, id % 5) as v", "array(id % 4, null) as l"
    )
    expected = last_of_table(df.toArrow(), ["a", "b"], "v").to_pylist()
    found = [row.asDict(recursive=True) for row in last_of_dataframe(df, ["a", "b"], "v").collect()]
    # In memory only the copies of a key's first row go, which are enough to let a key pass: compare distinct rows.
    assert {repr(row) for row in found} == {repr(row) for row in expected}
    assert len(found) == len({repr(row) for row in found})
