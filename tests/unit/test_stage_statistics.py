"""Counts and bounds of a file: right for every type, left out where they cannot be known."""

from __future__ import annotations

import base64
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from pyiceberg.conversions import from_bytes, to_bytes

from floodmark.model import FileRecord
from floodmark.rows.convert import table_shape
from floodmark.rows.layout import partition_spec
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.rows.staging.statistics import truncate_upper
from floodmark.storage import Storage


def stage_one(text: str, rows: list[dict[str, Any]], **properties: str) -> FileRecord:
    schema = table_schema(text)
    spec = partition_spec(schema, [])
    target = StageTarget(
        "memory://lake/t/data/op", schema.model_dump_json(), spec.model_dump_json(), properties=properties
    )
    (record,) = stage_in_process(target, rows, Storage({}))
    return record


def bounds(record: FileRecord, text: str, field_id: int = 1) -> tuple[Any, Any]:
    kind = table_schema(text).find_field(field_id).field_type

    def decode(value: str | None) -> Any:
        return None if value is None else from_bytes(kind, base64.b64decode(value))

    return decode(record.lower_bounds.get(field_id)), decode(record.upper_bounds.get(field_id))


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        ("boolean", False, True),
        ("int", -5, 7),
        ("long", -(2**63), 2**63 - 1),
        ("float", -1.5, 2.5),
        ("double", -math.inf, 1e300),
        ("decimal(9,2)", Decimal("-1.25"), Decimal("3.00")),
        ("decimal(18,3)", Decimal("-123456789012345.678"), Decimal("0.001")),
        ("decimal(38,10)", Decimal("-9999999999999999999999999999.9999999999"), Decimal("1.0000000000")),
        ("string", "a", "zé"),
        ("binary", b"", b"\xff\x00"),
        ("date", date(1900, 1, 1), date(2030, 12, 31)),
        ("timestamp", datetime(1900, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, 1, 2, 3, 456789, tzinfo=UTC)),
        ("timestamp_ntz", datetime(1900, 1, 1), datetime(2030, 1, 1, 1, 2, 3, 456789)),
    ],
)
def test_bounds_and_counts_of_every_type(kind: str, low: Any, high: Any) -> None:
    record = stage_one(f"c {kind}", [{"c": high}, {"c": None}, {"c": low}])
    schema = table_schema(f"c {kind}")
    iceberg = schema.find_field("c").field_type
    expected = [base64.b64encode(to_bytes(iceberg, value)).decode() for value in (low, high)]  # type: ignore[arg-type]
    assert [record.lower_bounds[1], record.upper_bounds[1]] == expected
    assert (record.rows, record.value_counts, record.null_counts) == (3, {1: 3}, {1: 1})
    assert record.column_sizes[1] > 0
    assert record.split_offsets


def test_no_bound_is_nan_and_nans_are_counted() -> None:
    nan = float("nan")
    record = stage_one("x double, y double, s struct<f:float>", [{"x": nan, "y": 1.0, "s": {"f": nan}}, {"y": nan}])
    assert bounds(record, "x double") == (None, None)
    assert bounds(record, "x double, y double", 2) == (1.0, 1.0)
    leaf = table_schema("x double, y double, s struct<f:float>").find_field("s.f").field_id
    assert record.nan_counts == {1: 1, 2: 1, leaf: 1}


def test_long_text_is_cut_to_a_bound_that_still_holds() -> None:
    text, data = "é" * 30, b"\x01" * 30
    record = stage_one("s string, b binary", [{"s": text, "b": data}])
    low, high = bounds(record, "s string, b binary")
    assert low == "é" * 16
    assert len(high) == 16
    assert high > text
    assert bounds(record, "s string, b binary", 2) == (b"\x01" * 16, b"\x01" * 15 + b"\x02")


def test_an_upper_bound_that_cannot_be_cut_is_left_out() -> None:
    record = stage_one("s string, b binary", [{"s": "\U0010ffff" * 17, "b": b"\xff" * 17}])
    assert record.upper_bounds == {}
    assert bounds(record, "s string, b binary") == ("\U0010ffff" * 16, None)


@pytest.mark.parametrize(
    "value", ["a" * 15 + "\ud7ff" + "z", "a" * 15 + "\U0010ffff" + "z", b"a" * 15 + b"\xff" + b"z", "short", b""]
)
def test_a_cut_upper_bound_is_never_below_the_value_and_is_real_text(value: Any) -> None:
    cut = truncate_upper(value)
    assert cut >= value
    assert len(cut) <= 16
    assert isinstance(cut, bytes) or cut.encode()


def test_a_row_group_without_bounds_takes_the_files_bounds_away() -> None:
    # Arrow writes no minimum and maximum for values of many KB: a bound from other row groups would hide these rows.
    rows = [{"s": "m"}, {"s": "z" * 10_000}, {"s": "m"}]
    grouped = stage_one("s string", rows, **{"write.parquet.row-group-size-bytes": "1"})
    assert (grouped.lower_bounds, grouped.upper_bounds) == ({}, {})
    assert grouped.null_counts == {1: 0}


def test_fields_inside_lists_and_maps_have_no_bounds() -> None:
    text = "l array<int>, m map<string,double>, s struct<a:int>"
    record = stage_one(text, [{"l": [1, 2], "m": {"a": 1.0}, "s": {"a": 3}}, {"l": [], "m": None, "s": None}])
    schema = table_shape(table_schema(text).model_dump_json()).schema
    leaf = schema.find_field("s.a").field_id
    assert set(record.lower_bounds) == set(record.upper_bounds) == {leaf}
    assert record.null_counts == {leaf: 1}
    repeated = {schema.find_field(name).field_id for name in ("l.element", "m.key", "m.value")}
    assert set(record.column_sizes) == repeated | {leaf}


def test_a_record_survives_json() -> None:
    record = stage_one("id long, s string", [{"id": 1, "s": "x"}])
    assert FileRecord.from_json(record.to_json()) == record
