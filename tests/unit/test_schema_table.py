"""What becomes a table's schema, and what is refused by its column's name."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import FixedType, LongType, NestedField, TimestampNanoType, TimeType, UnknownType, UUIDType

from floodmark.errors import Invalid
from floodmark.rows.schema import FIELD_ID, arrow_schema, table_schema, user_fields


class SparkLike:
    """What a Spark StructType offers without Spark: its JSON form."""

    def __init__(self, *fields: tuple[str, Any, bool]) -> None:
        self._fields = fields

    def jsonValue(self) -> dict[str, Any]:
        fields = [{"name": n, "type": t, "nullable": opt, "metadata": {}} for n, t, opt in self._fields]
        return {"type": "struct", "fields": fields}


TEXT = "id long not null, l array<struct<a:int>>, m map<string,decimal(10,2)>, t timestamp, n timestamp_ntz"


def test_text_spark_arrow_and_iceberg_say_the_same() -> None:
    expected = table_schema(TEXT)
    struct = {"type": "struct", "fields": [{"name": "a", "type": "integer", "nullable": True, "metadata": {}}]}
    spark = SparkLike(
        ("id", "long", False),
        ("l", {"type": "array", "elementType": struct, "containsNull": True}, True),
        ("m", {"type": "map", "keyType": "string", "valueType": "decimal(10,2)", "valueContainsNull": True}, True),
        ("t", "timestamp", True),
        ("n", "timestamp_ntz", True),
    )
    assert table_schema(spark) == expected
    assert table_schema(arrow_schema(expected)) == expected
    assert table_schema(Schema(*user_fields(expected))) == expected


def test_field_ids_are_fresh_top_level_first_and_seq_is_last() -> None:
    schema = table_schema(TEXT)
    assert [field.field_id for field in schema.fields] == [1, 2, 3, 4, 5, 6]
    assert schema.fields[-1].name == "_seq"
    assert not schema.fields[-1].required
    assert schema.find_field("l.element").field_id == 7


def test_a_key_makes_its_columns_required_identifiers() -> None:
    schema = table_schema("id long, name string, x double", key=["id", "name"])
    assert schema.identifier_field_ids == [1, 2]
    assert schema.find_field("id").required
    assert schema.find_field("name").required
    assert not schema.find_field("x").required


@pytest.mark.parametrize(
    ("key", "column"),
    [(["x"], "x"), (["Id"], "Id"), (["l"], "l"), (["s.a"], "s.a"), ("id", None), (["id", "id"], None)],
)
def test_a_key_that_cannot_be_one_is_refused(key: Any, column: str | None) -> None:
    with pytest.raises(Invalid) as refused:
        table_schema("id long, x double, l array<int>, s struct<a:int>", key=key)
    assert refused.value.facts.get("column") == column


def test_a_wrong_key_column_is_told_the_nearest_name() -> None:
    with pytest.raises(Invalid, match="Did you mean customer"):
        table_schema("customer long", key=["custmer"])


@pytest.mark.parametrize("name", ["_seq", "_SEQ", "_change", "_File", "_pos"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(Invalid, match="reserved") as refused:
        table_schema(f"id long, {name} long")
    assert refused.value.facts["column"] == name


@pytest.mark.parametrize("text", ["a int, A int", "a int, a int", "s struct<x:int, X:int>"])
def test_names_that_spark_cannot_tell_apart_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match="same name"):
        table_schema(text)


def test_an_empty_name_and_an_empty_schema_are_refused() -> None:
    with pytest.raises(Invalid, match="no name"):
        table_schema("` ` int")
    with pytest.raises(Invalid, match="at least one column"):
        table_schema(pa.schema([]))


@pytest.mark.parametrize(
    "kind",
    [
        pa.time64("us"),
        pa.timestamp("ns"),
        pa.uint64(),
        pa.null(),
        pa.duration("s"),
        pa.binary(16),
        pa.decimal256(50, 2),
        pa.uuid(),
        pa.struct([]),
    ],
)
def test_arrow_types_that_a_table_cannot_hold_are_refused_by_column(kind: pa.DataType) -> None:
    with pytest.raises(Invalid) as refused:
        table_schema(pa.schema([pa.field("outer", pa.struct([pa.field("inner", kind)]))]))
    assert refused.value.facts["column"] == "outer.inner"
    assert refused.value.advice


@pytest.mark.parametrize("kind", [UUIDType(), FixedType(4), TimeType(), TimestampNanoType(), UnknownType()])
def test_iceberg_types_that_a_table_cannot_hold_are_refused_by_column(kind: Any) -> None:
    with pytest.raises(Invalid) as refused:
        table_schema(Schema(NestedField(1, "c", kind), NestedField(2, "d", LongType())))
    assert refused.value.facts["column"] == "c"
    assert refused.value.advice


@pytest.mark.parametrize("kind", ["void", "variant", "interval day to second", "varchar(5)", "time(6)"])
def test_spark_types_that_a_table_cannot_hold_are_refused_by_column(kind: str) -> None:
    with pytest.raises(Invalid) as refused:
        table_schema(SparkLike(("c", kind, True)))
    assert refused.value.facts["column"] == "c"


def test_what_is_no_schema_is_refused() -> None:
    with pytest.raises(Invalid, match="unsupported kind of schema"):
        table_schema(42)


def test_small_and_unsigned_integers_widen() -> None:
    schema = table_schema(pa.schema([("a", pa.int8()), ("b", pa.uint16()), ("c", pa.uint32())]))
    assert [str(field.field_type) for field in user_fields(schema)] == ["int", "int", "long"]


def test_every_level_of_the_files_schema_has_its_field_id_and_seq_is_left_out() -> None:
    schema = arrow_schema(table_schema(TEXT))
    assert schema.names == ["id", "l", "m", "t", "n"]
    element = schema.field("l").type.value_field
    mapped = schema.field("m").type
    found = [element, element.type.field(0), mapped.key_field, mapped.item_field]
    assert all(field.metadata[FIELD_ID] for field in found)
    assert len({field.metadata[FIELD_ID] for field in [*schema, *found]}) == 9
