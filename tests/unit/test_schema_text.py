"""Spark DDL text becomes a table's schema without Spark."""

from __future__ import annotations

import pytest
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from floodmark.errors import Invalid
from floodmark.rows.schema import table_schema


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("boolean", BooleanType()),
        ("tinyint", IntegerType()),
        ("BYTE", IntegerType()),
        ("smallint", IntegerType()),
        ("short", IntegerType()),
        ("Int", IntegerType()),
        ("integer", IntegerType()),
        ("bigint", LongType()),
        ("LONG", LongType()),
        ("float", FloatType()),
        ("real", FloatType()),
        ("double", DoubleType()),
        ("decimal", DecimalType(10, 0)),
        ("DECIMAL(38, 18)", DecimalType(38, 18)),
        ("numeric(5)", DecimalType(5, 0)),
        ("string", StringType()),
        ("binary", BinaryType()),
        ("date", DateType()),
        ("timestamp", TimestamptzType()),
        ("timestamp_ltz", TimestamptzType()),
        ("timestamp_ntz", TimestampType()),
    ],
)
def test_a_plain_type_is_read_in_any_case(text: str, kind: object) -> None:
    assert table_schema(f"c {text}").find_field("c").field_type == kind


def test_nested_types_not_null_comments_and_quoted_names() -> None:
    schema = table_schema(
        "id long NOT NULL, `a``b.c` array<string>, "
        "m map<string,struct<a:int,b:decimal(10,2) not null comment 'in\\'side'>> not null comment \"x, y\""
    )
    assert [field.name for field in schema.fields] == ["id", "a`b.c", "m", "_seq"]
    assert schema.find_field("id").required
    assert isinstance(schema.fields[1].field_type, ListType)
    nested = schema.fields[2]
    assert nested.required
    assert nested.doc == "x, y"
    assert isinstance(nested.field_type, MapType)
    value = nested.field_type.value_type
    assert isinstance(value, StructType)
    assert [(f.name, f.required, f.doc) for f in value.fields] == [("a", False, None), ("b", True, "in'side")]


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("id lng", 3, "lng"),
        ("id long,, x int", 8, "name"),
        ("a int b int", 6, "comma"),
        ("a map<int>", 9, "','"),
        ("a array<int", 11, "'>'"),
        ("a decimal(39,1)", 2, "decimal(39,1)"),
        ("a decimal(4,5)", 2, "decimal(4,5)"),
        ("a int comment x", 14, "COMMENT"),
        ("a int; drop", 5, "read"),
        ("", 0, "no columns"),
        ("a varchar(10)", 2, "varchar"),
        ("a time", 2, "time"),
        ("a interval", 2, "interval"),
        ("a void", 2, "void"),
    ],
)
def test_wrong_text_is_refused_with_its_position(text: str, position: int, word: str) -> None:
    with pytest.raises(Invalid) as refused:
        table_schema(text)
    assert refused.value.facts["position"] == position
    assert word in refused.value.message
    assert refused.value.advice
