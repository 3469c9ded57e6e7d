"""The checksum of rows: the same multiset, the same sum, and no damage that it does not show."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import types

from floodmark.rows.checksum import RowChecksum
from floodmark.rows.mixing import mix, mixed
from tests.unit.test_compare import garbage, kinds, laid_out, plain, some_value


def checksum(rows: pa.Table | Iterable[pa.RecordBatch]) -> RowChecksum:
    total = RowChecksum()
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else rows:
        total.add(batch)
    return total


def of(values: Iterable[Any], kind: pa.DataType | None = None) -> RowChecksum:
    return checksum(pa.table({"x": pa.array(list(values), kind)}))


def multiset(values: list[Any]) -> Counter[str]:
    return Counter(repr(plain(value)) for value in values)


# ── the same rows ──


@pytest.mark.parametrize(("name", "kind"), kinds())
def test_the_sums_of_random_values_are_equal_if_and_only_if_their_multisets_are(name: str, kind: pa.DataType) -> None:
    chance = random.Random(f"checksum {name}")
    equal = different = 0
    for _ in range(30):
        left = [some_value(kind, chance) for _ in range(chance.randrange(1, 40))]
        right = chance.sample(left, len(left))
        if chance.random() < 0.5:
            right[chance.randrange(len(right))] = some_value(kind, chance)
        one, other = (pa.table({name: laid_out(values, kind, chance)}) for values in (left, right))
        same = multiset(one[name].to_pylist()) == multiset(other[name].to_pylist())
        assert (checksum(one) == checksum(other)) is same
        assert (checksum(one).hexdigest() == checksum(other).hexdigest()) is same
        equal, different = equal + same, different + (not same)
    assert equal >= 5
    assert different >= 3


def every_type(rows: int, seed: str = "rows") -> pa.Table:
    chance = random.Random(seed)
    return pa.table(
        {name: pa.array([some_value(kind, chance) for _ in range(rows)], kind) for name, kind in kinds()}
        | {"at": range(rows)}
    )


def test_rows_in_another_order_and_other_batches_have_the_same_sum() -> None:
    table = every_type(600)
    order = list(range(len(table)))
    random.Random(1).shuffle(order)
    whole = checksum(table)
    assert whole.rows == 600
    assert checksum(table.take(order)) == whole
    for size in (7, 64, 599):
        pieces = [table.slice(start, size) for start in range(0, 600, size)]
        assert checksum(batch for piece in reversed(pieces) for batch in piece.to_batches()) == whole


def test_blocks_within_a_large_batch_do_not_show() -> None:
    numbers = pa.table({"n": np.arange(100_000), "s": [str(n) for n in range(100_000)]})
    wide = pa.table({"s": ["x" * 3000 + str(n) for n in range(5000)]})
    for table in (numbers, wide):
        cut = checksum(batch for batch in table.to_batches(max_chunksize=777))
        assert checksum(table.combine_chunks()) == cut


@pytest.mark.parametrize("size", [*range(36), 63, 64, 65, *range(1016, 1034), 5000])
def test_a_text_counts_the_same_among_few_and_among_many_others(size: int) -> None:
    text = "ab\x00é東"[: size or 1].encode().ljust(size, b"z")[:size]
    alone, others = of([text], pa.binary()), [b"y" * (n % 90) for n in range(3000)]
    assert of([*others, text], pa.binary()) == of(others, pa.binary()) + alone
    assert of([text] * 1000, pa.binary()) == of([text] * 10, pa.binary()) + of([text] * 990, pa.binary())
    assert of([text], pa.large_binary()) == alone


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int32(), [1, 2, 3]),
        (pa.float32(), [1.5, 2.5, 3.5]),
        (pa.decimal128(38, 2), [Decimal("1.25"), Decimal("2.25"), Decimal("3.25")]),
        (pa.bool_(), [True, True, False]),
        (pa.date32(), [1, 2, 3]),
        (pa.string(), ["a", "bb", ""]),
        (pa.binary(5), [b"aaaaa", b"bbbbb", b"ccccc"]),
    ],
)
def test_what_lies_in_the_buffers_below_a_null_does_not_count(kind: pa.DataType, values: list[Any]) -> None:
    full, clean = pa.array(values, kind), pa.array([values[0], None, values[2]], kind)
    hiding = pa.Array.from_buffers(kind, 3, [pa.py_buffer(bytes([0b101])), *full.buffers()[1:]])
    assert hiding.equals(clean)
    assert checksum(pa.table({"x": hiding})) == checksum(pa.table({"x": clean}))
    assert checksum(pa.table({"x": hiding})) != checksum(pa.table({"x": full}))


def test_encoded_values_count_as_the_values_they_stand_for() -> None:
    values = ["a", None, "bb", "a"]
    encoded = pa.DictionaryArray.from_arrays(pa.array([1, None, 0, 1], pa.int8()), pa.array(["bb", "a"]))
    assert checksum(pa.table({"x": encoded})) == of(values)
    ids = [bytes(range(n, n + 16)) for n in range(4)]
    assert checksum(pa.table({"x": pa.array(ids, pa.uuid())})) == of(ids, pa.binary(16))
    assert of(values, pa.large_string()) == of(values)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int8(), [-128, 0, 127]),
        (pa.int16(), [-1, 0, 1]),
        (pa.time32("ms"), [0, 1, 86_399_999]),
        (pa.time64("us"), [0, 1, 86_399_999_999]),
        (pa.timestamp("ns"), [-1, 0, 2**62]),
        (pa.duration("s"), [-1, 0, 1]),
        (pa.date64(), [0, 86_400_000, -86_400_000]),
        (pa.decimal128(5, 2), [Decimal("-1.00"), Decimal("0.00"), Decimal("1.00")]),
        (pa.large_list(pa.int8()), [[], [1], [1, 2]]),
    ],
)
def test_other_types_that_files_may_bring_are_told_apart_too(kind: pa.DataType, values: list[Any]) -> None:
    array = pa.array([*values, None], kind)
    sums = {checksum(pa.table({"x": array.slice(at, 1)})).hexdigest() for at in range(4)}
    assert len(sums) == 4
    order = pa.array([2, 3, 0, 1])
    assert checksum(pa.table({"x": array.take(order)})) == checksum(pa.table({"x": array}))


def test_one_number_is_mixed_as_many_are() -> None:
    numbers = [0, 1, 2**63, 2**64 - 1, *(random.Random(n).getrandbits(64) for n in range(50))]
    assert [mixed(number) for number in numbers] == mix(np.array(numbers, np.uint64)).tolist()
    assert mixed(numbers[-1] + 2**64) == mixed(numbers[-1])


# ── damage ──


@pytest.mark.parametrize(("name", "kind"), kinds())
def test_one_value_that_changed_in_one_of_many_rows_changes_the_sum(name: str, kind: pa.DataType) -> None:
    chance = random.Random(f"damage {name}")
    table = every_type(700)
    before = checksum(table)
    position = table.schema.get_field_index(name)
    values = table[name].to_pylist()
    for at in (0, 350, 699):
        for changed in (None, garbage(kind, chance), garbage(kind, chance)):
            damaged = [*values[:at], changed, *values[at + 1 :]]
            array = pa.array(damaged, kind)
            same = plain(array[at].as_py()) == plain(values[at])
            assert (checksum(table.set_column(position, name, array)) == before) is same


@pytest.mark.parametrize(("name", "kind"), kinds())
def test_two_values_of_a_column_that_changed_places_change_the_sum(name: str, kind: pa.DataType) -> None:
    table = every_type(300)
    values = table[name].to_pylist()
    first = next(at for at, value in enumerate(values) if value is not None)
    second = next(at for at, value in enumerate(values) if value is not None and plain(value) != plain(values[first]))
    values[first], values[second] = values[second], values[first]
    swapped = table.set_column(table.schema.get_field_index(name), name, pa.array(values, kind))
    assert checksum(swapped) != checksum(table)


def test_a_row_that_was_lost_and_another_that_came_twice_change_the_sum() -> None:
    table = every_type(500)
    rows = list(range(500))
    assert checksum(table.take([*rows[:100], *rows[101:]])) != checksum(table)
    assert checksum(table.take([*rows, 7])) != checksum(table)
    assert checksum(table.take([*rows[:100], *rows[101:], 7])) != checksum(table)
    # Two copies for two: no sum that only adds bits up without carrying would see it.
    assert checksum(table.take([*rows[2:], 2, 2])) != checksum(table)


def test_values_that_moved_to_another_column_change_the_sum() -> None:
    one = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]})
    assert checksum(one.rename_columns(["b", "a"]).select(["a", "b"])) != checksum(one)
    assert checksum(pa.table({"a": [1, None], "b": [None, 2]})) != checksum(pa.table({"a": [None, 2], "b": [1, None]}))
    assert checksum(pa.table({"a": [1, None], "b": [None, 2]})) != checksum(pa.table({"a": [1, 2], "b": [None, None]}))
    assert checksum(pa.table({"a": [5], "b": [5]})) != checksum(pa.table({"a": [6], "b": [4]}))


LISTS = pa.list_(pa.int64())
TEXTS = pa.list_(pa.string())
MAPS = pa.map_(pa.string(), pa.int64())
PAIRS = pa.struct([("a", pa.int64()), ("b", pa.int64())])


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        (pa.string(), [""], [None]),
        (pa.string(), ["", None], ["", ""]),
        (pa.string(), ["a"], ["a\x00"]),
        (pa.string(), [""], ["\x00"]),
        (pa.string(), ["ab", "c"], ["a", "bc"]),
        (pa.string(), ["12345678" * 2], ["12345678"]),
        (pa.string(), ["abcdefgh12345678"], ["12345678abcdefgh"]),
        (pa.string(), ["x" * 2000], ["x" * 1999 + "y"]),
        (pa.int64(), [0], [None]),
        (pa.int64(), [1, 3], [2, 2]),
        (pa.bool_(), [False], [None]),
        (pa.float64(), [0.0], [-0.0]),
        (pa.float64(), [math.nan], [None]),
        (LISTS, [[]], [None]),
        (LISTS, [[]], [[None]]),
        (LISTS, [[0]], [[]]),
        (LISTS, [[1], [2]], [[1, 2], []]),
        (LISTS, [[1, 2]], [[2, 1]]),
        (LISTS, [[1, 2], [3]], [[1], [2, 3]]),
        (LISTS, [[1, 1]], [[1]]),
        (LISTS, [[None, 1]], [[1, None]]),
        (TEXTS, [["a", "b"]], [["ab"]]),
        (pa.list_(LISTS), [[[1], [2]]], [[[1, 2]]]),
        (pa.list_(LISTS), [[[], [1]]], [[[1], []]]),
        (pa.list_(LISTS), [[[]]], [[]]),
        (PAIRS, [{"a": None, "b": None}], [None]),
        (PAIRS, [{"a": 1, "b": 2}], [{"a": 2, "b": 1}]),
        (PAIRS, [{"a": 1, "b": 2}, {"a": 3, "b": 4}], [{"a": 1, "b": 4}, {"a": 3, "b": 2}]),
        (MAPS, [[]], [None]),
        (MAPS, [[("a", None)]], [[]]),
        (MAPS, [[("a", 1), ("b", 2)]], [[("a", 2), ("b", 1)]]),
        (MAPS, [[("a", 1)], [("b", 2)]], [[("a", 1), ("b", 2)], []]),
    ],
)
def test_what_looks_alike_is_told_apart(kind: pa.DataType, left: list[Any], right: list[Any]) -> None:
    assert of(left, kind) != of(right, kind)
    # Also among others, and behind an offset.
    others = [*left, *right, None] * 5
    one, other = (pa.table({"x": pa.array([*others, *values], kind).slice(3)}) for values in (left, right))
    assert checksum(one) != checksum(other)


def test_a_nan_counts_by_its_bits() -> None:
    quiet, other = (np.array([bits], np.uint64).view(np.float64) for bits in (0x7FF8000000000000, 0x7FF8000000000001))
    sums = [checksum(pa.table({"x": pa.array(values)})) for values in (quiet, other, quiet.copy())]
    assert sums[0] != sums[1]
    assert sums[0] == sums[2]


def test_many_rows_that_differ_little_have_different_sums() -> None:
    """Numbers in a row and texts that share all but a letter: what a weak hash would mix up."""
    numbers = {of([n], pa.int64()).hexdigest() for n in range(-500, 500)}
    shifted = {of([n << 40], pa.int64()).hexdigest() for n in range(-500, 500) if n}
    texts = {of([f"{n:0{size}d}"]).hexdigest() for n in range(100) for size in (3, 8, 9, 16, 17, 40)}
    assert (len(numbers), len(shifted), len(texts)) == (1000, 999, 600)
    assert not numbers & shifted


# ── the record ──


def test_sums_of_parts_add_up_to_the_sum_of_all() -> None:
    table = every_type(900)
    parts = [checksum(table.slice(start, 300)) for start in (600, 0, 300)]
    total = parts[0] + parts[1] + parts[2]
    assert total == checksum(table)
    assert total.rows == 900
    assert parts[0].rows == 300


def test_no_rows_have_the_sum_of_nothing() -> None:
    empty = checksum(every_type(5).slice(0, 0).to_batches() or [every_type(5).to_batches()[0].slice(0, 0)])
    assert empty == RowChecksum()
    assert (empty.rows, empty.hexdigest()) == (0, "0" * 32)


def test_the_sum_is_the_same_in_every_process_and_version() -> None:
    """Sums travel from tasks to the driver as text; one that depended on the process would prove nothing."""
    table = pa.table({"n": [1, None, -3], "s": ["a", "", None], "l": pa.array([[1], [], None], LISTS)})
    assert checksum(table).hexdigest() == "ca8ab0cc5ef81d46af8bb6e4c4e016cc"


def test_a_type_that_no_table_holds_is_refused_not_left_out() -> None:
    for kind in (pa.list_view(pa.int64()), pa.string_view(), pa.list_(pa.int64(), 2)):
        array = pa.array([[1, 2]] if types.is_nested(kind) else ["a"], kind)
        with pytest.raises(TypeError, match="checksum"):
            checksum(pa.table({"x": array}))
