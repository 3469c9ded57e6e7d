"""The file that declares tables: both forms of columns, every key, and what is refused before a lake is asked."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.types import DecimalType, ListType, LongType, StringType, TimestamptzType

from floodmark.errors import Invalid, NotFound
from floodmark.schema.file import WantedColumn, WantedTable, read_wanted, wanted_tables
from floodmark.settings.settings import check_settings

FILE = """
[tables.customers]
comment = "who buys"
key = ["id"]
[tables.customers.columns]
id   = "long"
name = { type = "string", required = true, comment = "as on the invoice" }
land = { type = "string", default = "XX", renamed_from = "country" }

[tables.orders]
schema = "id long not null, customer long, ts timestamp comment 'when', amount decimal(10,2), tags array<string>"
partition = ["day(ts)"]
sort = ["ts desc"]
retention = "90d"
retention_column = "ts"
references = { customer = "customers.id" }
dropped = ["note"]

[tables.old_orders]
drop = true
"""


def read(text: str) -> tuple[WantedTable, ...]:
    return wanted_tables(tomllib.loads(text)["tables"], "here")


def test_a_file_with_every_key_is_read_as_it_says() -> None:
    customers, orders, old = read(FILE)
    assert customers == WantedTable(
        "customers",
        (
            WantedColumn("id", LongType()),
            WantedColumn("name", StringType(), True, comment="as on the invoice"),
            WantedColumn("land", StringType(), default="XX", renamed_from="country"),
        ),
        key=("id",),
        comment="who buys",
    )
    assert [(column.name, column.required, column.comment) for column in orders.columns] == [
        ("id", True, None),
        ("customer", False, None),
        ("ts", False, "when"),
        ("amount", False, None),
        ("tags", False, None),
    ]
    kinds = [column.kind for column in orders.columns]
    assert kinds[2:4] == [TimestamptzType(), DecimalType(10, 2)]
    assert isinstance(kinds[4], ListType)
    assert (orders.partition, orders.sort) == (("day(ts)",), ("ts desc",))
    assert (orders.retention, orders.retention_column) == ("90d", "ts")
    assert orders.parents == {"customer": ("customers", "id")}
    assert orders.dropped == {"note"}
    assert (orders.key, orders.comment) == (None, None)
    assert old == WantedTable("old_orders", drop=True)


def test_both_forms_of_columns_say_the_same() -> None:
    (long,) = read("[tables.t.columns]\nid = 'long not null'\nname = { type = 'string', comment = 'c' }")
    (short,) = read("[tables.t]\nschema = \"id long not null, name string comment 'c'\"")
    assert long.columns == short.columns


def test_a_table_may_leave_its_columns_out() -> None:
    (table,) = read("[tables.events]\nretention = '30d'")
    assert table == WantedTable("events", retention="30d")


@pytest.mark.parametrize(
    ("default", "kind", "literal"),
    [
        ("XX", "string", "'XX'"),
        (7, "int", "7"),
        (2**40, "long", str(2**40)),
        (-1, "long", "-1"),
        (True, "boolean", "true"),
    ],
    ids=["text", "int", "large", "negative", "truth"],
)
def test_a_default_is_a_literal(default: Any, kind: str, literal: str) -> None:
    (table,) = wanted_tables({"t": {"columns": {"c": {"type": kind, "default": default}}}}, "here")
    assert table.columns[0].literal == literal


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key of a table": ({"t": {"keys": ["id"]}}, "Did you mean key?"),
    "unknown key of a column": ({"t": {"columns": {"a": {"type": "int", "defualt": 1}}}}, "Did you mean default?"),
    "rename of a table": ({"t": {"renamed_from": "s"}}, "floodmark rename"),
    "no table": ({"t": 1}, "[tables.NAME]"),
    "name": ({"1t": {"columns": {"a": "int"}}}, "invalid table name"),
    "names by case": ({"t": {"columns": {"a": "int"}}, "T": {"columns": {"a": "int"}}}, "differ by more than case"),
    "drop with more": ({"t": {"drop": True, "key": []}}, "alone in its table"),
    "drop false": ({"t": {"drop": False}}, "alone in its table"),
    "schema and columns": ({"t": {"schema": "a int", "columns": {"a": "int"}}}, "one of `schema` and `columns`"),
    "no columns": ({"t": {"columns": {}}}, "columns as name"),
    "type": ({"t": {"columns": {"a": "lnog"}}}, "unknown type lnog"),
    "two types": ({"t": {"columns": {"a": "int, b int"}}}, "one type"),
    "no type": ({"t": {"columns": {"a": {"required": True}}}}, "a type in Spark's words"),
    "required": ({"t": {"columns": {"a": {"type": "int", "required": "yes"}}}}, "true or false"),
    "column is a list": ({"t": {"columns": {"a": ["int"]}}}, "a type, or"),
    "same name before": ({"t": {"columns": {"a": {"type": "int", "renamed_from": "a"}}}}, "had before"),
    "one name twice before": (
        {"t": {"columns": {c: {"type": "int", "renamed_from": "x"} for c in "ab"}}},
        "two columns have renamed_from = x",
    ),
    "names swapped": (
        {"t": {"columns": {"a": {"type": "int", "renamed_from": "b"}, "b": {"type": "int", "renamed_from": "a"}}}},
        "take each other's names",
    ),
    "names around": (
        {"t": {"columns": {new: {"type": "int", "renamed_from": old} for new, old in ("ab", "bc", "ca")}}},
        "a, b, c take each other's names",
    ),
    "reserved column": ({"t": {"columns": {"_seq": "long"}}}, "reserved"),
    "key is a text": ({"t": {"columns": {"a": "int"}, "key": "a"}}, "a list of texts"),
    "key of no column": ({"t": {"columns": {"a": "int"}, "key": ["b"]}}, "no such column for the key"),
    "partition": ({"t": {"columns": {"a": "int"}, "partition": ["day(a)"]}}, "does not fit the type"),
    "sort": ({"t": {"columns": {"a": "int"}, "sort": ["b"]}}, "no such column for the sort"),
    "retention": ({"t": {"columns": {"a": "int"}, "retention": "soon"}}, "invalid retention policy"),
    "retention without a time": ({"t": {"columns": {"a": "int"}, "retention": "9d"}}, "needs a time column"),
    "column of no retention": ({"t": {"retention_column": "ts"}}, "goes with `retention`"),
    "comment": ({"t": {"comment": 1}}, "a text"),
    "reference": ({"t": {"columns": {"a": "int"}, "references": {"a": "s"}}}, "customers.id"),
    "reference of no column": ({"t": {"columns": {"a": "int"}, "references": {"b": "s.id"}}}, "no such column"),
    "reference with a default": (
        {"t": {"columns": {"a": {"type": "int", "default": 1}}, "references": {"a": "s.id"}}},
        "a column with a default cannot refer",
    ),
    "dropped and there": ({"t": {"columns": {"a": "int"}, "dropped": ["a"]}}, "is a column, too"),
    "default of a type": ({"t": {"columns": {"a": {"type": "date", "default": "2026-01-01"}}}}, "backfill.column"),
    "default of another type": ({"t": {"columns": {"a": {"type": "int", "default": "1"}}}}, "cannot have this default"),
    "truth is no number": ({"t": {"columns": {"a": {"type": "int", "default": True}}}}, "cannot have this default"),
    "default too large": ({"t": {"columns": {"a": {"type": "int", "default": 2**31}}}}, "fit the type"),
    "default with a quote": ({"t": {"columns": {"a": {"type": "string", "default": "it's"}}}}, "No quotes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_with_the_place(name: str) -> None:
    tables, words = REFUSED[name]
    with pytest.raises(Invalid) as caught:
        wanted_tables(tables, "schema.toml")
    assert words in str(caught.value)
    # A name that cannot be one is said as it is.
    assert caught.value.facts["file"] == "schema.toml"


def test_one_wrong_table_refuses_all() -> None:
    with pytest.raises(Invalid):
        wanted_tables({"good": {"columns": {"a": "int"}}, "bad": {"columns": {"a": "what"}}}, "here")


def test_a_file_holds_tables_only(tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    with pytest.raises(NotFound):
        read_wanted(file)
    file.write_text("[tables.t.columns]\na = 'int'\n")
    assert [table.name for table in read_wanted(file)] == ["t"]
    file.write_text("[table.t.columns]\na = 'int'\n")
    with pytest.raises(Invalid, match="Did you mean tables"):
        read_wanted(file)
    file.write_text("tables")
    with pytest.raises(Invalid, match="not TOML"):
        read_wanted(file)


def test_the_settings_take_the_same_tables() -> None:
    settings = check_settings(tomllib.loads(FILE), "floodmark.toml")
    assert [table.name for table in wanted_tables(settings.tables, "floodmark.toml")] == [
        "customers",
        "orders",
        "old_orders",
    ]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("customer", "a list of columns"),
        (7, "a list of columns"),
        ([7], "a list of texts"),
        ([["id", 7]], "a list of texts"),
        (["id", "id"], "two indexes on id"),
        ([["id", "n"], ["n", "id"]], "two indexes on id, n; n, id"),
        (["m"], "a column of this type cannot be indexed"),
        (["nope"], "the table has no such column"),
        ([["id", "id"]], "a column is named twice"),
        ([[]], "an index is on at least one column"),
    ],
)
def test_indexes_in_another_form_are_refused(value: Any, problem: str) -> None:
    entry = {"columns": {"id": "long", "n": "int", "m": "map<string,int>"}, "index": value}
    with pytest.raises(Invalid, match=problem):
        wanted_tables({"orders": entry}, "here")


def test_indexes_are_lists_of_columns() -> None:
    entry = {"columns": {"id": "long", "n": "int"}, "index": ["id", ["id", "n"]]}
    assert wanted_tables({"orders": entry}, "here")[0].indexes == (("id",), ("id", "n"))
    assert wanted_tables({"orders": {"index": []}}, "here")[0].indexes == ()
    assert wanted_tables({"orders": {}}, "here")[0].indexes is None
