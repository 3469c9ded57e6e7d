"""Columns filled by Spark SQL: types, other tables, odd names, what is refused; and plain ones mean Spark's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyiceberg.types import IcebergType

import floodmark as fm
from floodmark.commit.fills import Fill, absent_fields, fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.errors import Invalid
from floodmark.model import MAIN
from floodmark.rows import tasks
from floodmark.rows.reading.scan import quoted
from floodmark.rows.rewriting.fill import Filled, expression_type, run_fill
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.sql.expression import parse_plain
from floodmark.rows.staging.stage import StageTarget
from floodmark.rows.translate import struct_from_spark
from floodmark.testing.invariants import check_lake
from floodmark.write.add_column import add_column
from floodmark.write.table import tables_at_head

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

USERS = "id long not null, name string, `odd na.me` int, user string, pair struct<a:int,b:string>, ts timestamp"
LAST_ORDER = "(select max(o.ts) from orders o where o.user_id = users.id)"


def person(number: int, **other: Any) -> dict[str, Any]:
    row = {"id": number, "name": f"n{number}", "odd na.me": number * 2, "user": "u", "pair": {"a": number, "b": None}}
    return {**row, "ts": "2026-01-01T00:00:00Z", **other}


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    yield from lake_of_users(tmp_path, spark)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[fm.Lake]:
    """The same, only to be asked."""
    yield from lake_of_users(tmp_path_factory.mktemp("asked"), spark)


def lake_of_users(folder: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    with fm.open(str(folder / "lake"), create=True, spark=spark, actor="test") as lake:
        lake.create_table("users", USERS, key=["id"])
        lake.create_table("orders", "user_id long, ts int, `odd col` string")
        lake.append("users", [person(1), person(2)])
        lake.append("users", [person(3, name=None, ts=None)])
        lake.append(
            "orders",
            [{"user_id": 1, "ts": 5, "odd col": "a"}, {"user_id": 1, "ts": 7, "odd col": "b"}, {"user_id": 2, "ts": 1}],
        )
        yield lake


def kind_of(lake: fm.Lake, expression: str, table: str = "users") -> IcebergType:
    others = tables_at_head(lake.catalog, lake.sessions)
    return expression_type(lake.sessions, lake.schema(table), table, expression, others)


def add(lake: fm.Lake, name: str, expression: str, table: str = "users") -> Fill:
    kind = kind_of(lake, expression, table)
    add_column(lake.catalog, Intent("add_column", MAIN, "test", ""), table, name, kind, expression)
    return next(fill for fill in fills(lake, table) if fill.column == name)


def fills(lake: fm.Lake, table: str = "users") -> tuple[Fill, ...]:
    head = lake.catalog.history.head(table)
    return fills_of(lake.catalog.files.metadata(head.metadata_location).properties, lake.schema(table))


def unfilled(lake: fm.Lake, table: str = "users") -> list[LiveFile]:
    schema, known = lake.schema(table), fills(lake, table)
    files = live_files(lake.catalog.files, lake.catalog.history.head(table), schema)
    return [file for file in files if absent_fields(file, known, schema)]


def fill_files(
    lake: fm.Lake, folder: Path, wanted: list[Fill], table: str = "users", *, settled: bool = True
) -> tuple[Filled, bool]:
    """Fill all files that lack a column, into a folder of their own: nothing is published."""
    head, schema = lake.catalog.history.head(table), lake.schema(table)
    metadata = lake.catalog.files.metadata(head.metadata_location)
    target = StageTarget(
        folder.as_uri(),
        schema.model_dump_json(),
        metadata.spec().model_dump_json(),
        properties=dict(metadata.properties),
        settled=settled,
    )
    sources = [
        InputFile.of(file, absent=absent_fields(file, fills(lake, table), schema)) for file in unfilled(lake, table)
    ]
    return run_fill(
        lake.catalog.storage,
        lake.sessions,
        "test",
        target,
        sources,
        wanted,
        table=table,
        source_schema=schema,
        tables=tables_at_head(lake.catalog, lake.sessions),
    )


def rows_of(filled: Filled) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    found = [row for one in filled.records for row in pq.read_table(one.path.removeprefix("file://")).to_pylist()]
    return sorted(found, key=lambda row: row["id"])


# ── plain expressions are Spark's ──


@pytest.mark.parametrize(
    "text",
    [
        *("'x'", "''", "'ä \U0001f40b \"x\" -- /* `'", "0", "-0", "-7", "2147483647", "-2147483648", "2147483648"),
        *("-2147483649", "9223372036854775807", "-9223372036854775808", "true", "FALSE", " 5\n"),
        *("id", "ID", "`name`", "`odd na.me`", "pair", "`user`", "ts"),
    ],
)
def test_a_plain_expression_has_the_value_and_the_type_that_spark_gives(asked: fm.Lake, text: str) -> None:
    schema = asked.schema("users")
    plain = parse_plain(text, schema)
    assert plain is not None
    found = asked.read("users").selectExpr(f"({text}\n) as value")
    (kind,) = struct_from_spark(found.schema.jsonValue()).fields
    batch = asked.read_arrow("users").read_all().combine_chunks().to_batches()[0]
    assert str(plain.kind).split("<")[0] == str(kind.field_type).split("<")[0]
    ours = plain.evaluate(batch).to_pylist()
    theirs = [row["value"] for row in found.toArrow().to_pylist()]
    assert sorted(map(repr, ours)) == sorted(map(repr, theirs))


# ── types ──


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("id + 1", "long"),
        ("upper(name)", "string"),
        ("`odd na.me` / 2", "double"),
        ("users.`odd na.me`", "int"),
        ("cast(1 as tinyint)", "int"),
        ("1.50", "decimal(3, 2)"),
        ("date(ts)", "date"),
        ("user", "string"),
        ("id -- the id", "long"),
        ("case when name = 'today' then now end", None),
        ("case when name = 'today' then 'now()' end", "string"),
        (LAST_ORDER, "int"),
        ("(select max(`odd col`) from ORDERS where user_id = id)", "string"),
        ("(with x as (select * from orders) select max(ts) from x)", "int"),
        ("exists(select 1 from orders o where o.user_id = users.id)", "boolean"),
        ("(select count(*) from orders o where o.user_id = users.id)", "long"),
    ],
)
def test_the_type_of_the_column_is_that_of_the_expression(asked: fm.Lake, expression: str, kind: str | None) -> None:
    if kind is None:
        with pytest.raises(Invalid):
            kind_of(asked, expression)
    else:
        assert str(kind_of(asked, expression)) == kind


REFUSED = {
    "": "no expression",
    "nope": "nope",
    "_seq": "_seq",
    "users": "users",
    "id +": "yntax",
    "1), (2": "yntax",
    "1 as x": "yntax",
    "null": "type",
    "interval 1 day": "type",
    "rand()": "every try",
    "uuid()": "every try",
    "monotonically_increasing_id()": "every try",
    "now()": "moment",
    "current_date": "moment",
    "concat(name, CURRENT_USER ())": "moment",
    "unix_timestamp()": "moment",
    "timestamp 'now'": "moment",
    "(select max(o.ts) from orders o where o.ts < unix_timestamp( ))": "moment",
    "max(id)": "query",
    "id + max(id)": "query",
    "explode(array(1, 2))": "one value",
    "row_number() over (order by id)": "window functions",
    "struct(*)": "star",
    "${x}": "variables",
    "(select max(x) from nope)": "nope",
    "(select max(id) from session_view)": "session_view",
    "(select 1 from parquet.`/x`)": "parquet",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_what_no_column_can_be_filled_by_is_invalid_with_its_reason(asked: fm.Lake, expression: str) -> None:
    asked.spark.range(3).createOrReplaceTempView("session_view")
    with pytest.raises(Invalid) as refused:
        kind_of(asked, expression)
    assert REFUSED[expression] in str(refused.value)
    assert refused.value.advice
    assert [view.name for view in asked.spark.catalog.listTables() if view.name.startswith("_floodmark")] == []


# ── files that lack the column ──


def test_files_are_filled_with_types_nulls_and_sequences(lake: fm.Lake, tmp_path: Path) -> None:
    expressions = {
        "n": "id + 1",
        "upper": "upper(name)",
        "made": "named_struct('x', id, 'y', array(name))",
        "words": "if(name is null, null, array(name, 'w'))",
        "counts": "map('id', id)",
        "day": "date(ts)",
        "ratio": "`odd na.me` / 4",
    }
    wanted = [add(lake, name, text) for name, text in expressions.items()]
    filled, used_spark = fill_files(lake, tmp_path / "out", wanted)
    assert used_spark
    assert filled.rows == 3
    nulls = {fill.column: filled.unfilled[fill.field_id] for fill in wanted}
    assert nulls == {"n": 0, "upper": 1, "made": 0, "words": 1, "counts": 0, "day": 1, "ratio": 0}
    first, _, third = rows_of(filled)
    assert {name: first[name] for name in expressions} == {
        "n": 2,
        "upper": "N1",
        "made": {"x": 1, "y": ["n1"]},
        "words": ["n1", "w"],
        "counts": [("id", 1)],
        "day": first["ts"].date(),
        "ratio": 0.5,
    }
    assert (third["upper"], third["words"], third["_seq"]) == (None, None, 2)
    assert [row["_seq"] for row in rows_of(filled)] == [1, 1, 2]
    assert all(absent_fields(record, wanted, lake.schema("users")) == () for record in filled.records)


def test_fresh_files_have_no_sequences(lake: fm.Lake, tmp_path: Path) -> None:
    filled, _ = fill_files(lake, tmp_path / "out", [add(lake, "n", "id + 1")], settled=False)
    assert [(row["id"], row["n"], "_seq" in row) for row in rows_of(filled)] == [(n, n + 1, False) for n in (1, 2, 3)]


def test_matching_rows_of_another_table_are_joined_and_others_counted(lake: fm.Lake, tmp_path: Path) -> None:
    last = add(lake, "last order", LAST_ORDER)
    filled, _ = fill_files(lake, tmp_path / "out", [last])
    assert [row["last_order"] if "last_order" in row else row["last_x20order"] for row in rows_of(filled)] == [
        7,
        1,
        None,
    ]
    assert filled.unfilled == {last.field_id: 1}


def test_a_query_that_gives_several_values_is_invalid_with_advice(lake: fm.Lake, tmp_path: Path) -> None:
    one = add(lake, "one", "(select o.ts from orders o where o.user_id = users.id)")
    with pytest.raises(Invalid, match="more than one value") as refused:
        fill_files(lake, tmp_path / "out", [one])
    assert "max" in refused.value.advice


def test_a_column_that_is_not_to_be_filled_stays_absent(lake: fm.Lake, tmp_path: Path) -> None:
    add(lake, "one", "id + 1")
    two = add(lake, "two", "id + 2")
    filled, _ = fill_files(lake, tmp_path / "out", [two])
    assert [(row["two"], "one" in row) for row in rows_of(filled)] == [(3, False), (4, False), (5, False)]


def test_an_expression_sees_a_column_that_is_to_be_filled_as_filled(lake: fm.Lake, tmp_path: Path) -> None:
    plain, twice = add(lake, "plain", "5"), add(lake, "twice", "plain * 2 + id")
    filled, _ = fill_files(lake, tmp_path / "one", [twice])
    assert [(row["twice"], "plain" in row) for row in rows_of(filled)] == [(11, False), (12, False), (13, False)]
    filled, _ = fill_files(lake, tmp_path / "both", [plain, twice])
    assert [(row["twice"], row["plain"]) for row in rows_of(filled)] == [(11, 5), (12, 5), (13, 5)]


def test_much_that_is_plain_is_filled_by_tasks(lake: fm.Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = add(lake, "copy", "name")
    monkeypatch.setattr(tasks, "IN_PROCESS_ROWS_MAX", 0)
    filled, used_spark = fill_files(lake, tmp_path / "out", [copy])
    assert used_spark
    assert [(row["copy"], row["_seq"]) for row in rows_of(filled)] == [("n1", 1), ("n2", 1), (None, 2)]
    assert (filled.rows, filled.unfilled) == (3, {copy.field_id: 1})


# ── writes ──


def test_writes_that_lack_the_column_get_it_by_spark(lake: fm.Lake) -> None:
    add(lake, "n", "id + 1")
    add(lake, "last", LAST_ORDER)
    lake.append("users", [person(4)])
    frame = lake.spark.createDataFrame([(1, "new"), (5, "five")], "id long, name string")
    columns = [f"cast(null as {kind}) as {quoted(name)}" for name, kind in (("odd na.me", "int"), ("user", "string"))]
    columns += ["cast(null as struct<a:int,b:string>) as pair", "cast(null as timestamp) as ts"]
    lake.merge("users", frame.selectExpr("*", *columns))
    found = {row["id"]: (row["n"], row["last"]) for row in lake.read_arrow("users").read_all().to_pylist()}
    assert found == {1: (2, 7), 2: (None, None), 3: (None, None), 4: (5, None), 5: (6, None)}
    lake.append("users", frame.selectExpr("id + 5 as id", "0L as n", "9 as last", "name", *columns[:2], *columns[2:]))
    found = {row["id"]: (row["n"], row["last"]) for row in lake.read_arrow("users").read_all().to_pylist()}
    assert (found[6], found[10]) == ((0, 9), (0, 9)), "what rows bring is theirs"
    check_lake(lake.catalog)


def test_an_error_of_the_expression_is_an_error_of_the_write(lake: fm.Lake) -> None:
    add(lake, "number", "cast(name as int)")
    version = lake.catalog.history.resolve()
    with pytest.raises(Invalid):
        lake.append("users", [person(4)])
    assert lake.catalog.history.resolve() == version
    lake.append("users", [person(4, name="4")])
    assert {row["id"]: row["number"] for row in lake.read_arrow("users").read_all().to_pylist()}[4] == 4
    check_lake(lake.catalog)
