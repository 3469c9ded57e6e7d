"""Partitions and sort orders from text."""

from __future__ import annotations

import pytest

from floodmark.errors import Invalid
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.schema import table_schema

SCHEMA = table_schema("id long, ts timestamp, name string, country string, x double, l array<int>, `odd (name)` int")


def test_every_transform_is_read() -> None:
    texts = ["day(ts)", "bucket(16, id)", "TRUNCATE(4, name)", "country", "year(ts)", "month( ts )", "hour(ts)"]
    spec = partition_spec(SCHEMA, [*texts, "void(name)", "identity(id)", "`odd (name)`"])
    assert [(field.name, str(field.transform)) for field in spec.fields] == [
        ("ts_day", "day"),
        ("id_bucket", "bucket[16]"),
        ("name_trunc", "truncate[4]"),
        ("country", "identity"),
        ("ts_year", "year"),
        ("ts_month", "month"),
        ("ts_hour", "hour"),
        ("name_null", "void"),
        ("id", "identity"),
        ("odd (name)", "identity"),
    ]
    assert [field.field_id for field in spec.fields] == list(range(1000, 1010))


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("day(tss)", "Did you mean ts"),
        ("contry", "Did you mean country"),
        ("week(ts)", "no such partition transform"),
        ("bucket(id)", "wrong arguments"),
        ("bucket(0, id)", "wrong arguments"),
        ("day(3, ts)", "wrong arguments"),
        ("day(name)", "does not fit the type"),
        ("truncate(4, ts)", "does not fit the type"),
        ("x", "does not fit the type"),
        ("l", "does not fit the type"),
        ("_seq", "no such column"),
    ],
)
def test_a_wrong_partition_is_refused(text: str, needle: str) -> None:
    with pytest.raises(Invalid) as refused:
        partition_spec(SCHEMA, [text])
    assert needle in str(refused.value)


def test_the_same_partition_twice_or_named_like_a_column_is_refused() -> None:
    with pytest.raises(Invalid, match="twice"):
        partition_spec(SCHEMA, ["day(ts)", "day(ts)"])
    with pytest.raises(Invalid, match="name of a column"):
        partition_spec(table_schema("ts timestamp, ts_day int"), ["day(ts)"])
    with pytest.raises(Invalid, match="is a list"):
        partition_spec(SCHEMA, "day(ts)")


def test_sort_directions_are_read() -> None:
    order = sort_order(SCHEMA, ["ts", "id DESC", "name asc"])
    assert [(field.source_id, field.direction.value) for field in order.fields] == [(2, "asc"), (1, "desc"), (3, "asc")]
    assert sort_order(SCHEMA, []).order_id == 0


@pytest.mark.parametrize("text", ["tz", "l", "id down"])
def test_a_wrong_sort_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        sort_order(SCHEMA, [text])
    assert refused.value.facts["column"] in text
