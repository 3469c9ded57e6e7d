"""Plain expressions are read strictly: one literal or one column, and whatever is not certain is left to Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.types import BooleanType, IcebergType, IntegerType, LongType, StringType

from floodmark.rows.schema import table_schema
from floodmark.rows.sql.expression import Plain, may_name, parse_plain

SCHEMA = table_schema(
    "id long not null, Name string, user string, `odd na.me` int, `tick``s` int, pair struct<a:int>, größe int"
)
COLUMN_TYPES = {field.name: field.field_type for field in SCHEMA.fields}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("'x'", StringType(), "x"),
        ("  ''\n", StringType(), ""),
        ("'ä \U0001f40b \"x\" -- /* `'", StringType(), 'ä \U0001f40b "x" -- /* `'),
        ("0", IntegerType(), 0),
        ("-7", IntegerType(), -7),
        ("2147483647", IntegerType(), 2**31 - 1),
        ("-2147483648", IntegerType(), -(2**31)),
        ("2147483648", LongType(), 2**31),
        ("-2147483649", LongType(), -(2**31) - 1),
        ("9223372036854775807", LongType(), 2**63 - 1),
        ("-9223372036854775808", LongType(), -(2**63)),
        ("true", BooleanType(), True),
        ("FALSE", BooleanType(), False),
    ],
)
def test_a_literal_has_its_value_and_its_type(text: str, kind: IcebergType, value: Any) -> None:
    assert parse_plain(text, SCHEMA) == Plain(kind, value=value)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("id", "id"),
        (" ID ", "id"),
        ("name", "Name"),
        ("`name`", "Name"),
        ("`odd na.me`", "odd na.me"),
        ("pair", "pair"),
        ("`user`", "user"),
        ("`größe`", "größe"),
    ],
)
def test_a_column_is_found_as_spark_finds_it(text: str, column: str) -> None:
    assert parse_plain(text, SCHEMA) == Plain(COLUMN_TYPES[column], column=column)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "nope", "_seq", "pair.a", "users.id", "id + 1", "(id)", "id --", "id as x", "'a' 'b'", "'it''s'"),
        *(r"'a\n'", "'${x}'", "'a", '"a"', "r'a'", "1.5", "1e3", "1L", "+1", "- 1", "007", "0x1", "1_000"),
        *("9223372036854775808", "-9223372036854775809", "99999999999999999999"),
        *("null", "user", "current_date", "now()", "`tick``s`", "``", "größe", "`GRÖSSE`", "'a\nb'", "'\x00'", "id;"),
    ],
)
def test_anything_else_is_left_to_spark(text: str) -> None:
    assert parse_plain(text, SCHEMA) is None


def test_names_that_differ_in_case_only_are_left_to_spark() -> None:
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField

    schema = Schema(NestedField(1, "a", StringType()), NestedField(2, "A", StringType()))
    assert parse_plain("a", schema) is None


def test_a_literal_is_the_same_for_every_row_and_a_column_is_itself() -> None:
    batch = pa.record_batch({"id": pa.array([1, None, 3], pa.int64())})
    number, column, missing = (parse_plain(text, SCHEMA) for text in ("5", "ID", "name"))
    assert number is not None
    assert column is not None
    assert missing is not None
    assert number.evaluate(batch).equals(pa.array([5, 5, 5], pa.int32()))
    assert column.evaluate(batch).equals(batch.column(0))
    assert missing.evaluate(batch).null_count == 3


@pytest.mark.parametrize(
    ("text", "column", "named"),
    [
        ("id", "id", True),
        ("NAME", "Name", True),
        ("id", "Name", False),
        ("upper(name)", "Name", True),
        ("upper(surname)", "Name", False),
        ("t.Name || 'x'", "Name", True),
        ("`tick``s` + 1", "tick`s", True),
        ("`odd na.me` + 1", "odd na.me", True),
        ("concat('the name')", "Name", True),
        ("'name'", "Name", False),
        ("'it''s the name'", "Name", False),
        ("'it\\'s the name'", "Name", False),
        ("'a' || name || 'b'", "Name", True),
        (" timestamp '2024-01-01 00:00:00'\n", "timestamp", False),
        ("date'2024-01-01'", "date", False),
        ("date('2024-01-01')", "date", True),
        ("-1.5e3", "e3", False),
        ("1.5BD", "bd", False),
    ],
)
def test_an_expression_may_use_the_columns_that_it_names(text: str, column: str, named: bool) -> None:
    assert may_name(text, column, SCHEMA) is named
