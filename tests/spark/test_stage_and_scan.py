"""DataFrames staged by tasks and read again: the same rows, or `Invalid` and no job."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from floodmark.errors import Corrupt, Invalid, Unavailable
from floodmark.rows.layout import partition_spec
from floodmark.rows.reading.scan import scan
from floodmark.rows.schema import spark_schema, table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_dataframe, stage_in_process
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVERYTHING = (
    "id long not null, n int, f float, x double, d decimal(10,2), big decimal(38,6), s string, b binary, ok boolean, "
    "day date, ts timestamp, ntz timestamp_ntz, l array<array<int>>, "
    "m map<string,struct<a:int not null,b:array<string>>>, st struct<x:struct<y:long not null> not null,z:string>, "
    "`odd name.with dot` string"
)
ROWS: list[tuple[Any, ...]] = [
    (
        1,
        -5,
        0.5,
        1e300,
        Decimal("1.25"),
        Decimal("-12345678901234567890123456789012.123456"),
        "é東",
        bytearray(b"\x00\xff" * 1_500_000),
        True,
        date(1969, 12, 31),
        datetime(2026, 11, 15, 10, 0, 0, 123456),
        datetime(1900, 1, 1, 0, 0, 0, 1),
        [[1, None], None, []],
        {"k": (1, ["x", None]), "none": None},
        ((5,), None),
        "dot",
    ),
    (2, *[None] * 15),
    (3, *[None] * 11, [], {}, ((0,), "z"), None),
]


def target_of(text: str, folder: Path | str, partition: tuple[str, ...] = (), **extra: Any) -> StageTarget:
    schema = table_schema(text)
    spec = partition_spec(schema, partition)
    return StageTarget(f"file://{folder}", schema.model_dump_json(), spec.model_dump_json(), **extra)


def everything(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(ROWS, spark_schema(table_schema(EVERYTHING)))


def rows_of(df: DataFrame) -> list[dict[str, Any]]:
    return sorted((row.asDict(recursive=True) for row in df.collect()), key=lambda row: row["id"])


@pytest.mark.parametrize("arrow", [False, True])
def test_rows_of_every_type_come_back_as_they_were(spark: SparkSession, tmp_path: Path, arrow: bool) -> None:
    df = everything(spark)
    records = stage_dataframe(target_of(EVERYTHING, tmp_path), df, "op")
    assert sum(record.rows for record in records) == 3
    found = scan(spark, [record.path for record in records], table_schema(EVERYTHING), arrow=arrow)
    assert found.columns == [field.name for field in user_fields(table_schema(EVERYTHING))]
    assert rows_of(found) == rows_of(df)


@pytest.mark.parametrize("arrow", [False, True])
def test_rows_staged_in_process_are_the_same_for_spark(spark: SparkSession, tmp_path: Path, arrow: bool) -> None:
    text = "id long, l array<struct<a:int>>, m map<string,int>, d decimal(38,2), ts timestamp, ntz timestamp_ntz"
    rows = [
        {"id": 1, "l": [{"a": 1}, None], "m": {"k": None}, "d": "1.25", "ts": "2026-01-01T00:00:00Z"},
        {"id": 2, "l": None, "m": {}, "d": None, "ntz": "0001-01-01T00:00:00"},
    ]
    records = stage_in_process(target_of(text, tmp_path), rows, Storage({}))
    found = rows_of(scan(spark, [record.path for record in records], table_schema(text), arrow=arrow))
    assert found == [
        {
            "id": 1,
            "l": [{"a": 1}, None],
            "m": {"k": None},
            "d": Decimal("1.25"),
            "ts": datetime(2026, 1, 1),
            "ntz": None,
        },
        {"id": 2, "l": None, "m": {}, "d": None, "ts": None, "ntz": datetime(1, 1, 1)},
    ]


def test_columns_go_by_name_and_narrow_types_widen(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.sql("select cast(7 as byte) n, cast(1.5 as float) x, cast(3 as bigint) i, 'a' s")
    text = "s string, i int, x double, n long"
    records = stage_dataframe(target_of(text, tmp_path), df, "op")
    (row,) = scan(spark, [record.path for record in records], table_schema(text)).collect()
    assert row.asDict() == {"s": "a", "i": 3, "x": 1.5, "n": 7}


@pytest.mark.parametrize(
    ("query", "column"),
    [
        ("select raise_error('a job ran') id", None),
        ("select id, id extra from range(1)", "extra"),
        ("select id as ID2, 1 x from range(1)", "ID2, id, x"),
        ("select 'x' id", "id"),
        ("select 1.5d id", "id"),
        ("select id, id as ID from range(1)", "ID"),
        ("select null id", "id"),
        ("select interval 1 day id", "id"),
    ],
)
def test_columns_that_cannot_fit_are_refused_before_a_job(
    spark: SparkSession, tmp_path: Path, query: str, column: str | None
) -> None:
    df = spark.sql(query)
    with pytest.raises(Invalid) as refused:
        stage_dataframe(target_of("id long", tmp_path), df, "op")
    if column is not None:
        assert refused.value.facts["column"] == column
        assert "a job ran" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_bad_values_are_counted_over_all_tasks_and_leave_no_file(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(0, 1000, 1, 4).selectExpr("if(id % 10 = 0, null, id) id", "id * 10000000 n")
    with pytest.raises(Invalid) as refused:
        stage_dataframe(target_of("id long not null, n int", tmp_path), df, "op")
    assert "id: null in a required column (count=100)" in refused.value.message
    assert "n: values of int64 do not fit the table's int32 (count=785)" in refused.value.message
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_rows_that_spark_cannot_compute_are_invalid(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(3).selectExpr("assert_true(id < 2) is null ok", "1 div (id - 2) id").select("id")
    with pytest.raises(Invalid, match="could not stage") as refused:
        stage_dataframe(target_of("id long", tmp_path), df, "op")
    assert "zero" in str(refused.value).lower()


def test_a_storage_that_fails_in_a_task_is_unavailable(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(Unavailable) as refused:
        stage_dataframe(target_of("id long", tmp_path / "file" / "data"), spark.range(3), "op")
    assert "floodmark.errors" in refused.value.facts["cause"]


def test_an_empty_dataframe_makes_no_file(spark: SparkSession, tmp_path: Path) -> None:
    assert stage_dataframe(target_of("id long", tmp_path), spark.range(0), "op") == []
    assert stage_dataframe(target_of("id long", tmp_path), spark.range(9).where("id < 0"), "op") == []


def test_partitions_and_file_sizes_hold_in_tasks(spark: SparkSession, tmp_path: Path) -> None:
    text = "id long, k string, ts timestamp"
    df = spark.range(0, 3000, 1, 3).selectExpr(
        "id", "if(id % 5 = 0, null, concat('k', id % 5)) k", "timestamp_seconds(id * 3600) ts"
    )
    target = target_of(text, tmp_path, ("k", "month(ts)", "bucket(2, id)"))
    records = stage_dataframe(target, df, "op")
    assert len({record.path for record in records}) == len(records)
    assert {record.partition[0] is None for record in records} == {True, False}
    schema = table_schema(text)
    assert scan(spark, [record.path for record in records], schema).exceptAll(df).count() == 0
    for record in records[:3]:
        found = scan(spark, [record.path], schema).selectExpr("k", "trunc(ts, 'month') m").distinct()
        assert found.count() == 1


def test_batch_sizes_of_the_session_are_put_back(spark: SparkSession, tmp_path: Path) -> None:
    keys = [f"spark.sql.execution.arrow.max{what}PerBatch" for what in ("Records", "Bytes")]
    before = [spark.conf.get(key) for key in keys]
    stage_dataframe(target_of("id long", tmp_path), spark.range(3), "op")
    assert [spark.conf.get(key) for key in keys] == before


@pytest.mark.parametrize("arrow", [False, True])
def test_paths_are_names_and_folders_are_not_columns(spark: SparkSession, tmp_path: Path, arrow: bool) -> None:
    folder = tmp_path / "a b é" / "id=7" / "day=[1-3]{x}*"
    records = stage_dataframe(target_of("id long", folder), spark.range(3), "op")
    found = scan(spark, [record.path for record in records], table_schema("id long"), arrow=arrow)
    assert found.columns == ["id"]
    assert sorted(row.id for row in found.collect()) == [0, 1, 2]


def test_no_files_give_no_rows_with_the_same_columns(spark: SparkSession, tmp_path: Path) -> None:
    schema = table_schema(EVERYTHING)
    empty = scan(spark, [], schema)
    records = stage_dataframe(target_of(EVERYTHING, tmp_path), everything(spark), "op")
    full = scan(spark, [record.path for record in records], schema)
    assert empty.collect() == []
    assert empty.schema.simpleString() == full.schema.simpleString()
    assert scan(spark, [], schema, True).columns[-1] == "_seq"


@pytest.mark.parametrize("arrow", [False, True])
def test_old_files_read_with_the_schema_of_today(spark: SparkSession, tmp_path: Path, arrow: bool) -> None:
    was = table_schema("id int, s struct<x:int>, gone string")
    now_json = was.model_dump_json()
    for before, after in (
        ('"name":"id","type":"int"', '"name":"renamed","type":"long"'),
        ('"name":"x","type":"int"', '"name":"xx","type":"long"'),
        ('"id":3,"name":"gone"', '"id":33,"name":"gone"'),
    ):
        assert before in now_json
        now_json = now_json.replace(before, after)
    now = type(was).model_validate_json(now_json)
    target = target_of("id int, s struct<x:int>, gone string", tmp_path)
    records = stage_in_process(target, [{"id": 1, "s": {"x": 2}, "gone": "old"}, {}], Storage({}))
    found = scan(spark, [record.path for record in records], now, True, arrow=arrow)
    rows = sorted((row.asDict(recursive=True) for row in found.collect()), key=lambda row: row["renamed"] or 0)
    # A column dropped and added again under its old name is another column: its old values stay gone.
    assert rows == [
        {"renamed": None, "s": None, "gone": None, "_seq": None},
        {"renamed": 1, "s": {"xx": 2}, "gone": None, "_seq": None},
    ]


@pytest.mark.parametrize("arrow", [False, True])
def test_a_missing_file_is_an_error_not_fewer_rows(spark: SparkSession, tmp_path: Path, arrow: bool) -> None:
    from pyspark.errors import PySparkException

    records = stage_dataframe(target_of("id long", tmp_path), spark.range(0, 10, 1, 2), "op")
    paths = [record.path for record in records]
    os.remove(paths[0].removeprefix("file://"))
    # Spark finds it while planning, a task while the user collects.
    with pytest.raises(PySparkException if arrow else Corrupt):
        scan(spark, paths, table_schema("id long"), arrow=arrow).collect()


KILLED = """
import sys
from floodmark.rows.layout import partition_spec
from floodmark.rows.reading.scan import scan
from floodmark.rows.schema import table_schema
from floodmark.rows.session import Sessions
from floodmark.rows.staging.stage import StageTarget, stage_dataframe

settings = {"master": "local[2,20]", "spark.executorEnv.FLOODMARK_FAILPOINT": "task.file_written:2"}
spark = Sessions(settings).get()
schema = table_schema("id long")
target = StageTarget(sys.argv[1], schema.model_dump_json(), partition_spec(schema, []).model_dump_json())
records = stage_dataframe(target, spark.range(0, 600, 1, 6), "op")
ids = sorted(row.id for row in scan(spark, [record.path for record in records], schema).collect())
assert ids == list(range(600)), ids
print("records", len({record.path for record in records}), sum(record.rows for record in records))
"""


def test_a_worker_killed_after_a_file_is_repeated_and_every_row_comes_once(tmp_path: Path) -> None:
    # A worker dies at its second file; the task runs again in a new one, under another name.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, f"file://{tmp_path}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert "records 6 600" in done.stdout, done.stderr[-2000:]
    # The killed attempts left whole files that no record names.
    assert len(list(tmp_path.glob("*.parquet"))) > 6
