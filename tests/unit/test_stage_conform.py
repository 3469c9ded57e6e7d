"""Arrow batches come to the table's schema without a silent null and without loss."""

from __future__ import annotations

import io
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from floodmark.errors import Invalid
from floodmark.rows.convert import conform
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.schema import table_schema


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def refusal(batch: pa.RecordBatch, text: str) -> Invalid:
    with pytest.raises(Invalid) as refused:
        conform(batch, table_schema(text))
    return refused.value


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        ("int", pa.array([1, None], pa.int64()), [1, None]),
        ("long", pa.array([1, 255], pa.uint8()), [1, 255]),
        ("long", pa.array([2**63 - 1], pa.uint64()), [2**63 - 1]),
        ("double", pa.array([2**53, -(2**53)], pa.int64()), [2.0**53, -(2.0**53)]),
        ("double", pa.array([0.5, None], pa.float32()), [0.5, None]),
        ("float", pa.array([0.5, float("inf"), None], pa.float64()), [0.5, float("inf"), None]),
        ("decimal(20,4)", pa.array([Decimal("1.25")], pa.decimal128(5, 2)), [Decimal("1.2500")]),
        ("decimal(4,1)", pa.array([Decimal("123.40")], pa.decimal128(10, 2)), [Decimal("123.4")]),
        ("string", pa.array(["a", None], pa.large_string()), ["a", None]),
        ("string", pa.array(["a", None], pa.string_view()), ["a", None]),
        ("string", pa.array(["a", None, "a"]).dictionary_encode(), ["a", None, "a"]),
        ("binary", pa.array([b"ab"], pa.binary(2)), [b"ab"]),
        ("binary", pa.array([b"ab"], pa.large_binary()), [b"ab"]),
        ("string", pa.nulls(2), [None, None]),
        ("array<long>", pa.array([[1], None, []], pa.large_list(pa.int32())), [[1], None, []]),
        ("array<int>", pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), [[1, 2], None]),
    ],
)
def test_what_fits_without_loss_is_taken(text: str, source: pa.Array, expected: list[Any]) -> None:
    result = conform(batch_of(c=source), table_schema(f"c {text}"))
    result.validate(full=True)
    assert result.column(0).to_pylist() == expected


def test_times_and_dates_come_to_microseconds_and_days() -> None:
    batch = batch_of(
        s=pa.array([1], pa.timestamp("s", tz="Europe/Paris")),
        n=pa.array([5000], pa.timestamp("ns")),
        d=pa.array([86_400_000], pa.date64()),
    )
    result = conform(batch, table_schema("s timestamp, n timestamp_ntz, d date"))
    assert result.column(0).cast(pa.int64()).to_pylist() == [1_000_000]
    assert result.column(1).cast(pa.int64()).to_pylist() == [5]
    assert result.column(2).cast(pa.int32()).to_pylist() == [1]


@pytest.mark.parametrize(
    ("text", "source", "count"),
    [
        ("int", pa.array([1, 2**31, -(2**31) - 1]), 2),
        ("long", pa.array([2**63, 1], pa.uint64()), 1),
        ("double", pa.array([2**53 + 1, 1]), 1),
        ("float", pa.array([0.1, 0.5]), 1),
        ("float", pa.array([2**24 + 1]), 1),
        ("decimal(4,1)", pa.array([Decimal("1.25"), Decimal("1.20")], pa.decimal128(5, 2)), 1),
        ("decimal(4,1)", pa.array([Decimal("12345.0")], pa.decimal128(10, 1)), 1),
        ("timestamp", pa.array([1, 1000, 1001], pa.timestamp("ns", tz="UTC")), 2),
        ("timestamp", pa.array([2**62], pa.timestamp("s", tz="UTC")), 1),
        ("date", pa.array([1, 86_400_000], pa.date64()), 1),
    ],
)
def test_values_that_do_not_fit_are_counted(text: str, source: pa.Array, count: int) -> None:
    error = refusal(batch_of(c=source), f"c {text}")
    assert (error.facts["column"], error.facts["count"]) == ("c", count)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("timestamp", pa.array([1], pa.timestamp("us"))),
        ("timestamp_ntz", pa.array([1], pa.timestamp("us", tz="UTC"))),
        ("int", pa.array([1.0])),
        ("int", pa.array([True])),
        ("boolean", pa.array([1])),
        ("string", pa.array([1])),
        ("string", pa.array([b"x"])),
        ("binary", pa.array(["x"])),
        ("decimal(10,2)", pa.array([1.5])),
        ("date", pa.array([1], pa.timestamp("us"))),
        ("array<int>", pa.array([1])),
        ("struct<a:int>", pa.array([[1]])),
    ],
)
def test_a_wrong_type_is_refused_with_both_types(text: str, source: pa.Array) -> None:
    error = refusal(batch_of(c=source), f"c {text}")
    assert error.facts["column"] == "c"
    assert str(source.type) in error.message


def test_columns_are_matched_by_name_in_any_order() -> None:
    result = conform(batch_of(b=pa.array(["x"]), a=pa.array([1])), table_schema("a long, b string"))
    assert result.to_pylist() == [{"a": 1, "b": "x"}]


def test_an_extra_and_a_missing_column_are_named_together() -> None:
    error = refusal(batch_of(a=pa.array([1]), bb=pa.array([1])), "a long, b long")
    assert error.facts["column"] == "b, bb"
    assert "Add the column with nulls" in error.advice
    assert "Did you mean b?" in error.advice


def test_a_column_that_differs_in_case_is_another_column() -> None:
    assert "ID" in refusal(batch_of(ID=pa.array([1])), "id long").facts["column"]


def test_a_column_that_comes_twice_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert "twice" in refusal(batch, "a long").message


def test_nested_fields_are_matched_by_name_and_problems_have_full_names() -> None:
    kind = pa.struct([("b", pa.int64()), ("a", pa.int64())])
    rows = [[{"a": 1, "b": 2}, None], None]
    result = conform(batch_of(c=pa.array(rows, pa.list_(kind))), table_schema("c array<struct<a:int,b:long>>"))
    assert result.column(0).to_pylist() == rows
    error = refusal(batch_of(c=pa.array([[{"a": 2**40, "b": 1}]], pa.list_(kind))), "c array<struct<a:int,b:long>>")
    assert error.facts == {"column": "c.element.a", "count": 1}
    error = refusal(batch_of(c=pa.array([{"a": 1}])), "c struct<a:long,b:long>")
    assert error.facts["column"] == "c.b"
    error = refusal(batch_of(c=pa.array([{"a": 1, "z": 1}])), "c struct<a:long>")
    assert error.facts["column"] == "c.z"


def test_null_in_a_required_column_is_counted() -> None:
    error = refusal(batch_of(c=pa.array([1, None, None])), "c long not null")
    assert error.facts == {"column": "c", "count": 2}
    assert "null" in error.message
    # Also where the null hides in a dictionary, or where a whole column has no type.
    hidden = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    assert refusal(batch_of(c=hidden), "c string not null").facts["count"] == 1
    assert refusal(batch_of(c=pa.nulls(3)), "c long not null").facts["count"] == 3


def test_null_in_a_required_nested_field_is_counted_only_where_its_parent_is_there() -> None:
    text = "s struct<a:int not null>, m map<string,struct<x:long not null>>"
    kinds = {"s": pa.struct([("a", pa.int32())]), "m": pa.map_(pa.string(), pa.struct([("x", pa.int64())]))}
    good = pa.RecordBatch.from_pylist(
        [{"s": {"a": 1}, "m": [("k", {"x": 1})]}, {"s": None, "m": None}, {"s": {"a": 2}, "m": [("k", None)]}],
        schema=pa.schema(list(kinds.items())),
    )
    result = conform(good, table_schema(text))
    assert result.to_pylist() == good.to_pylist()
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_batches([result]), sink)
    assert pq.read_table(io.BytesIO(sink.getvalue())).to_pylist() == good.to_pylist()

    bad = pa.RecordBatch.from_pylist(
        [{"s": {"a": None}, "m": None}, {"s": None, "m": [("k", {"x": None}), ("l", {"x": None})]}],
        schema=pa.schema(list(kinds.items())),
    )
    error = refusal(bad, text)
    assert error.facts == {"column": "m.value.x, s.a", "count": 3}


def test_slices_keep_their_rows() -> None:
    kinds = pa.schema(
        [
            ("l", pa.list_(pa.int64())),
            ("m", pa.map_(pa.string(), pa.int64())),
            ("s", pa.struct([("a", pa.list_(pa.int64()))])),
        ]
    )
    rows = [
        {"l": [i, None], "m": [(str(i), i)], "s": {"a": [i]}} if i % 3 else {"l": None, "m": None, "s": None}
        for i in range(10)
    ]
    whole = pa.RecordBatch.from_pylist(rows, schema=kinds)
    result = conform(whole.slice(4, 4), table_schema("l array<int>, m map<string,int>, s struct<a:array<int>>"))
    result.validate(full=True)
    assert result.to_pylist() == rows[4:8]


def test_equal_problems_of_many_tasks_are_added_up() -> None:
    problems = Misfits(
        [Problem("a", "bad", 2), Problem.from_json(Problem("a", "bad", 3).to_json()), Problem("b", "gone")]
    )
    problems.add(Problem("b", "gone"))
    assert problems.all() == (Problem("a", "bad", 5), Problem("b", "gone"))
