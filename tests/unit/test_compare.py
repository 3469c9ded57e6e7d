"""Rows compared without a loop: the answer of a slow comparison of Python values, whatever the buffers look like."""

from __future__ import annotations

import math
import random
import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import types

from floodmark.rows.compare import same_rows
from floodmark.rows.project import nullable_type
from floodmark.rows.schema import arrow_type, table_schema, user_fields

EVERY_TYPE = (
    "ok boolean, n int, id long, f float, x double, d decimal(9,2), big decimal(38,6), s string, b binary, day date, "
    "ts timestamp, ntz timestamp_ntz, l array<int>, m map<string,double>, st struct<a:int,b:string>, "
    "ll array<array<string>>, ls array<struct<a:float,l:array<long>>>, ml map<int,array<map<string,float>>>, "
    "deep struct<s:struct<m:map<string,struct<x:double,l:array<binary>>>>,l:array<array<array<boolean>>>>"
)
LEAVES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int32": [-1, 0, 1],
    "int64": [-(2**63), 0, 2**63 - 1],
    "float": [0.0, -0.0, 1.5, math.nan, math.inf],
    "double": [0.0, -0.0, 1.5, math.nan, -math.inf],
    "decimal128(9, 2)": [Decimal("0.00"), Decimal("-1.25")],
    "decimal128(38, 6)": [Decimal("0.000000"), Decimal("12345678901234567890123456789012.123456")],
    "string": ["", "é", "東京"],
    "binary": [b"", b"\x00", b"\xff\x00"],
    "date32[day]": [date(1, 1, 1), date(2026, 11, 15)],
    "timestamp[us]": [datetime(1900, 1, 1), datetime(2026, 11, 15) + timedelta(microseconds=1)],
    "timestamp[us, tz=UTC]": [datetime(1900, 1, 1, tzinfo=UTC), datetime(2026, 11, 15, tzinfo=UTC)],
}


def kinds() -> list[tuple[str, pa.DataType]]:
    fields = user_fields(table_schema(EVERY_TYPE))
    return [(field.name, nullable_type(arrow_type(field.field_type))) for field in fields]


def some_value(kind: pa.DataType, chance: random.Random) -> Any:
    if chance.random() < 0.2:
        return None
    if types.is_struct(kind):
        return {field.name: some_value(field.type, chance) for field in kind}
    if types.is_list(kind):
        return [some_value(kind.value_type, chance) for _ in range(chance.choice([0, 1, 1, 2]))]
    if types.is_map(kind):
        keys = [some_value(kind.key_type, chance) for _ in range(chance.choice([0, 1, 2]))]
        return [(key, some_value(kind.item_type, chance)) for key in keys if key is not None]
    return chance.choice(LEAVES[str(kind)])


def garbage(kind: pa.DataType, chance: random.Random) -> Any:
    while (value := some_value(kind, chance)) is None:
        pass
    return value


def build(values: list[Any], kind: pa.DataType, chance: random.Random) -> pa.Array:
    """An array of these values, with other values hidden below its nulls."""
    if not types.is_nested(kind):
        return pa.array(values, kind)
    filled = [garbage(kind, chance) if value is None else value for value in values]
    mask = pa.array([value is None for value in values], pa.bool_())
    if types.is_struct(kind):
        children = [build([value[field.name] for value in filled], field.type, chance) for field in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    offsets = pa.array(np.cumsum([0, *(len(value) for value in filled)]), pa.int32())
    flat = [element for value in filled for element in value]
    if types.is_list(kind):
        return pa.ListArray.from_arrays(offsets, build(flat, kind.value_type, chance), type=kind, mask=mask)
    keys = build([key for key, _ in flat], kind.key_type, chance)
    items = build([item for _, item in flat], kind.item_type, chance)
    return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=mask)


def laid_out(values: list[Any], kind: pa.DataType, chance: random.Random) -> pa.ChunkedArray:
    """The same values in chunks of any size, each of them a slice of a longer array; some are empty."""
    chunks, start = [], 0
    while start < len(values):
        length = chance.randrange(len(values) + 1)
        before, after = ([some_value(kind, chance) for _ in range(chance.randrange(3))] for _ in range(2))
        part = values[start : start + length]
        chunks.append(build([*before, *part, *after], kind, chance).slice(len(before), len(part)))
        start += len(part)
    return pa.chunked_array(chunks, kind)


def plain(value: Any) -> Any:
    """The value in a form in which == is what we mean by the same."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return {name: plain(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    return value


@pytest.mark.parametrize(("name", "kind"), kinds())
def test_random_values_of_every_type_compare_like_python_values(name: str, kind: pa.DataType) -> None:
    chance = random.Random(f"compare {name}")
    equal = different = 0
    for _ in range(30):
        left = [some_value(kind, chance) for _ in range(chance.randrange(1, 60))]
        # Much is the same, so that equal values under nulls, slices and lists are met as often as others.
        right = [value if chance.random() < 0.6 else some_value(kind, chance) for value in left]
        one = pa.table({name: laid_out(left, kind, chance)})
        other = pa.table({name: laid_out(right, kind, chance)})
        expected = [plain(a) == plain(b) for a, b in zip(one[name].to_pylist(), other[name].to_pylist(), strict=True)]
        assert same_rows(one, other).tolist() == expected
        equal, different = equal + sum(expected), different + len(expected) - sum(expected)
    assert equal > 50
    assert different > 20


def test_a_row_is_the_same_only_if_all_its_columns_are() -> None:
    left = pa.table({"a": [1, 1, 2, 2], "b": ["x", "x", "y", None]})
    right = pa.table({"a": [1, 1, 2, 3], "b": ["x", "z", "y", None]})
    assert same_rows(left, right).tolist() == [True, False, True, False]


def test_floats_are_the_same_by_their_bits_and_every_nan_is_nan() -> None:
    odd_nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    left = pa.table({"x": pa.array([0.0, math.nan, None, math.nan, 1.0, None])})
    right = pa.table({"x": pa.array([-0.0, odd_nan, None, None, 1.0, math.nan])})
    assert same_rows(left, right).tolist() == [False, True, True, False, True, False]


def test_a_map_in_another_order_is_another_map() -> None:
    kind = pa.map_(pa.string(), pa.int32())
    left = pa.table({"m": pa.array([[("a", 1), ("b", 2)], [("a", 1)]], kind)})
    right = pa.table({"m": pa.array([[("b", 2), ("a", 1)], [("a", 1)]], kind)})
    assert same_rows(left, right).tolist() == [False, True]


def test_a_map_over_a_slice_of_entries_is_read_where_its_entries_are() -> None:
    kind = pa.map_(pa.string(), pa.int32())
    entries = pa.array(
        [{"key": "no", "value": 0}, {"key": "a", "value": 1}, {"key": "b", "value": 2}], kind.field(0).type
    )
    offsets = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    sliced = pa.Array.from_buffers(kind, 2, [None, offsets], children=[entries.slice(1)])
    whole = pa.array([[("a", 1)], [("b", 2)]], kind)
    assert same_rows(pa.table({"m": sliced}), pa.table({"m": whole})).tolist() == [True, True]


def test_lists_of_every_layout_compare_by_their_elements() -> None:
    left, right = [[9, 9], [1, 2], None, [3, 4], [5, 6]], [[8, 8], [1, 2], None, [3, 5], None]
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 2), pa.list_view(pa.int32())):
        one, other = (pa.record_batch({"l": pa.array(values, kind).slice(1)}) for values in (left, right))
        assert same_rows(one, other).tolist() == [True, True, False, False], kind


def test_lists_that_lie_in_another_order_in_memory_are_read_where_they_are() -> None:
    offsets, sizes = pa.array([2, 0, 0], pa.int32()), pa.array([2, 2, 1], pa.int32())
    scattered = pa.ListViewArray.from_arrays(offsets, sizes, pa.array([3, 4, 1, 2], pa.int32()))
    in_order = pa.array([[1, 2], [3, 4], [9]], pa.list_view(pa.int32()))
    assert same_rows(pa.table({"l": scattered}), pa.table({"l": in_order})).tolist() == [True, True, False]


def test_values_compare_by_what_they_are_not_by_how_they_are_encoded() -> None:
    left = pa.chunked_array([pa.array(["a", "b"]).dictionary_encode(), pa.array(["b", None]).dictionary_encode()])
    right = pa.chunked_array([pa.array(["b", "b", "b", None]).dictionary_encode()])
    assert same_rows(pa.table({"s": left}), pa.table({"s": right})).tolist() == [False, True, True, True]
    nulls = pa.table({"n": pa.nulls(2)})
    assert same_rows(nulls, nulls).tolist() == [True, True]


def test_batches_and_tables_compare_with_each_other() -> None:
    batch = pa.record_batch({"a": [1, 2, 3], "l": [[1], None, []]})
    table = pa.Table.from_batches([batch.slice(0, 1), batch.slice(1, 0), batch.slice(1)])
    assert same_rows(batch, table).tolist() == [True, True, True]
    assert same_rows(table.slice(1), batch.slice(0, 2)).tolist() == [False, False]


def test_no_rows_and_no_columns_are_an_answer_too() -> None:
    empty = pa.table({"a": pa.array([], pa.list_(pa.int32()))})
    assert same_rows(empty, empty).tolist() == []
    assert same_rows(empty.slice(0, 0), pa.table({"a": pa.chunked_array([], empty.schema.types[0])})).tolist() == []


@pytest.mark.parametrize(
    "other",
    [
        pa.table({"a": pa.array([1], pa.int32())}),
        pa.table({"b": pa.array([1], pa.int64())}),
        pa.table({"a": pa.array([1], pa.int64()), "b": [1]}),
    ],
)
def test_other_columns_are_refused(other: pa.Table) -> None:
    with pytest.raises(TypeError, match="different columns"):
        same_rows(pa.table({"a": pa.array([1], pa.int64())}), other)


def test_other_types_deep_inside_are_refused_but_nullability_is_no_type() -> None:
    def of(kind: pa.DataType, nullable: bool = True) -> pa.Table:
        return pa.table({"l": pa.array([[{"x": 1}]], pa.list_(pa.struct([pa.field("x", kind, nullable=nullable)])))})

    with pytest.raises(TypeError):
        same_rows(of(pa.int32()), of(pa.int64()))
    assert same_rows(of(pa.int32()), of(pa.int32(), nullable=False)).tolist() == [True]


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        same_rows(pa.table({"a": [1, 2]}), pa.table({"a": [1]}))
