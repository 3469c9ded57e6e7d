"""Keys that come twice: found among any number of files in bounded memory, or settled by an order column."""

from __future__ import annotations

import math
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import NestedField

from floodmark import clock
from floodmark.errors import Invalid
from floodmark.rows.layout import partition_spec
from floodmark.rows.schema import arrow_schema, table_schema
from floodmark.rows.staging import duplicates
from floodmark.rows.staging.duplicates import find_duplicates, last_of_table
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage


class Files:
    """Staged files of one table, in memory."""

    def __init__(self, text: str, key: list[str]) -> None:
        self.storage = Storage({})
        self.schema = table_schema(text, key)
        self.fields: list[NestedField] = [self.schema.find_field(name) for name in key]

    def write(self, rows: list[dict[str, Any]] | pa.Table) -> str:
        spec = partition_spec(self.schema, []).model_dump_json()
        target = StageTarget(f"memory://lake/{clock.new_id()}", self.schema.model_dump_json(), spec)
        (record,) = stage_in_process(target, rows, self.storage)
        return record.path

    def write_foreign(self, table: pa.Table) -> str:
        """A file of another writer, which may have no rows, or nulls where none should be."""
        location = f"memory://lake/{clock.new_id()}/foreign.parquet"
        schema = pa.schema([field.with_nullable(True) for field in arrow_schema(self.schema)])
        with self.storage.writer(location) as sink:
            pq.write_table(table.cast(schema), sink)
        return location

    def find(self, files: list[str], **options: Any) -> list[str]:
        return find_duplicates(self.storage, files, self.fields, **options)


EACH_TYPE: list[tuple[str, list[Any], str]] = [
    ("boolean", [True, False], "true"),
    ("int", [-(2**31), 0, 2**31 - 1], "-2147483648"),
    ("long", [-(2**63), 0, 2**63 - 1], "-9223372036854775808"),
    ("decimal(9,2)", [Decimal("-1.25"), Decimal("0.00"), Decimal("1.25")], "-1.25"),
    # Numbers that differ in the upper half of their 16 bytes only.
    ("decimal(38,0)", [Decimal(2**64), Decimal(2**65), Decimal(0), Decimal(-1), Decimal(-(2**64) - 1)], str(2**64)),
    ("string", ["é", "", "e\u0301", "東京"], "é"),
    ("binary", [b"\x00", b"", b"\x00\x00"], "0x00"),
    ("date", [date(1969, 12, 31), date(1, 1, 1), date(9999, 12, 31)], "1969-12-31"),
    ("timestamp_ntz", [datetime(1900, 1, 1), datetime(2026, 1, 1, 0, 0, 0, 1)], "1900-01-01 00:00:00"),
    ("timestamp", [datetime(1900, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)], "1900-01-01 00:00:00Z"),
]


@pytest.mark.parametrize(("kind", "values", "shown"), EACH_TYPE)
def test_keys_of_every_type_are_found_twice_or_not(kind: str, values: list[Any], shown: str) -> None:
    files = Files(f"k {kind} not null, v int", ["k"])
    once = files.write([{"k": value, "v": 1} for value in values])
    assert files.find([once]) == []
    assert files.find([once, files.write([{"k": values[0], "v": 2}])]) == [f"k={shown}"]


def test_a_composite_key_is_double_only_in_all_its_columns() -> None:
    files = Files("a string not null, b string not null, n int not null", ["a", "b", "n"])
    rows = [("x", "yz", 1), ("xy", "z", 1), ("x", "yz", 2), ("yz", "x", 1), ("", "", 0), ("", "", 1)]
    locations = [files.write([{"a": a, "b": b, "n": n}]) for a, b, n in rows]
    assert files.find(locations) == []
    assert files.find([*locations, files.write([{"a": "xy", "b": "z", "n": 1}])]) == ["a=xy, b=z, n=1"]


@pytest.mark.parametrize("pass_rows", [1, 2, 3, 10, 64, 1000])
def test_passes_of_any_size_give_the_same_answer(pass_rows: int) -> None:
    chance = random.Random(pass_rows)
    files = Files("id long not null, name string not null", ["id", "name"])
    keys = [(number, f"n{number % 7}") for number in range(150)]
    chance.shuffle(keys)

    def written(keys: list[tuple[int, str]]) -> str:
        return files.write([{"id": number, "name": name} for number, name in keys])

    once = [written(keys[:70]), written(keys[70:71]), written(keys[71:])]
    assert files.find(once, pass_rows=pass_rows) == []
    doubled = keys[33]
    found = files.find([*once, written([doubled])], pass_rows=pass_rows)
    assert found == [f"id={doubled[0]}, name={doubled[1]}"]


@pytest.mark.parametrize("pass_rows", [2, 5, 1000])
def test_one_key_more_often_than_a_pass_holds_is_found(pass_rows: int) -> None:
    files = Files("id long not null", ["id"])
    location = files.write([{"id": number} for number in [*range(20), *[777] * 100, *range(20, 40)]])
    assert files.find([location], pass_rows=pass_rows) == ["id=777"]


def test_no_more_than_three_examples_are_given_in_the_order_of_the_rows() -> None:
    files = Files("id long not null", ["id"])
    location = files.write([{"id": number} for number in [9, 1, 8, 2, 7, 7, 2, 8, 1, 9]])
    assert files.find([location]) == ["id=9", "id=1", "id=8"]


def test_equal_hashes_of_different_keys_are_no_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worst case of hashing that no data can be made to reach: half of all keys collide.
    monkeypatch.setattr(duplicates, "_mixed", lambda words: words >> np.uint64(1) << np.uint64(1))
    files = Files("id long not null", ["id"])
    once = files.write([{"id": number} for number in range(100)])
    assert files.find([once]) == []
    assert files.find([once], pass_rows=16) == []
    assert files.find([once, files.write([{"id": 41}])], pass_rows=16) == ["id=41"]


def test_a_key_that_comes_very_often_is_not_held_that_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "KEY_BYTES_PER_CHUNK", 1000)
    files = Files("id long not null", ["id"])
    often, other = (files.write(pa.table({"id": np.full(20_000, number)})) for number in (7, 8))
    before = files.storage.counters.snapshot()
    assert files.find([often, other]) == ["id=7"]
    # Both for the hashes; then the first is enough.
    assert files.storage.counters.difference(before).calls["open_input"] == 3


def test_more_suspects_than_are_looked_at_together_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_SUSPECTS_MAX", 1)
    monkeypatch.setattr(duplicates, "_mixed", lambda words: words >> np.uint64(1) << np.uint64(1))
    files = Files("id long not null", ["id"])
    once = files.write([{"id": number} for number in range(20)])
    assert files.find([once]) == []
    assert files.find([once, files.write([{"id": 19}])]) == ["id=19"]


def test_no_files_and_empty_files_hold_no_duplicates() -> None:
    files = Files("id long not null, d decimal(9,2) not null", ["id", "d"])
    empty = files.write_foreign(pa.table({"id": pa.array([], pa.int64()), "d": pa.array([], pa.decimal128(9, 2))}))
    assert files.find([]) == []
    assert files.find([empty, empty]) == []
    one = files.write([{"id": 1, "d": Decimal(1)}])
    assert files.find([empty, one, empty], pass_rows=1) == []
    assert files.find([one, empty, one]) == ["id=1, d=1.00"]


def test_null_keys_of_a_foreign_file_do_no_harm() -> None:
    files = Files("k string not null, n long not null, d decimal(9,2) not null", ["k", "n", "d"])
    values = {"k": ["a", None, "a", "a"], "n": [1, 1, None, 1], "d": [None, Decimal(1), Decimal(1), Decimal(1)]}
    table = pa.table(values)
    assert files.find([files.write_foreign(table)]) == []
    twice = pa.concat_tables([table, table.slice(3)])
    assert files.find([files.write_foreign(twice)]) == ["k=a, n=1, d=1.00"]


def last(rows: list[dict[str, Any]], key: list[str], order: str = "v", schema: pa.Schema | None = None) -> list[Any]:
    return list(last_of_table(pa.Table.from_pylist(rows, schema), key, order).to_pylist())


def test_the_highest_row_of_each_key_stays_in_its_place() -> None:
    table = pa.table({"x": ["a", "b", "c", "d", "e"], "id": [1, 2, 1, 3, 2], "v": [5, 1, 9, 0, 2]})
    kept = last_of_table(table, ["id"], "v")
    assert kept.to_pydict() == {"x": ["c", "d", "e"], "id": [1, 3, 2], "v": [9, 0, 2]}
    assert kept.schema.equals(table.schema)


def test_no_order_value_is_lower_than_any_and_nan_is_the_highest() -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.float64())])
    rows = [(1, None), (1, -math.inf), (2, math.inf), (2, math.nan), (3, None), (4, math.nan), (4, None)]
    kept = last([{"id": number, "v": value} for number, value in rows], ["id"], schema=schema)
    assert repr([(row["id"], row["v"]) for row in kept]) == "[(1, -inf), (2, nan), (3, None), (4, nan)]"


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (False, True),
        (-1, 1),
        ("a", "é"),
        ("Z", "a"),
        (b"\x7f", b"\x80"),
        (Decimal("-1.5"), Decimal("1.25")),
        (date(1, 1, 1), date(9999, 1, 1)),
        (datetime(1900, 1, 1), datetime(2026, 1, 1)),
        (datetime(1900, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)
def test_every_plain_type_orders_and_is_a_key(low: Any, high: Any) -> None:
    assert last([{"id": 1, "v": low}, {"id": 1, "v": high}, {"id": 1, "v": low}], ["id"]) == [{"id": 1, "v": high}]
    assert last([{"id": low, "v": 1}, {"id": high, "v": 1}, {"id": low, "v": 2}], ["id"]) == [
        {"id": high, "v": 1},
        {"id": low, "v": 2},
    ]


def test_rows_that_tie_are_one_if_they_are_the_same_and_stay_if_they_are_not() -> None:
    def row(number: int, value: int, text: str | None, inside: list[int | None] | None) -> dict[str, Any]:
        return {"id": number, "v": value, "s": text, "l": inside}

    same, unlike = row(1, 5, None, [1, None]), row(1, 5, "x", [1, None])
    assert last([same, row(1, 4, "y", []), same, same], ["id"]) == [same]
    assert last([same, row(2, 1, "", []), unlike], ["id"]) == [same, row(2, 1, "", []), unlike]
    assert last([same, unlike, same], ["id"]) == [same, unlike]
    # Equal rows below the highest are gone with all the others.
    assert last([row(1, 4, "y", []), row(1, 4, "y", []), same], ["id"]) == [same]


def test_rows_with_maps_structs_and_nan_tie_too() -> None:
    kind = pa.map_(pa.string(), pa.struct([("x", pa.float64())]))
    maps = pa.array(
        [[("a", {"x": math.nan})], [("a", {"x": math.nan})], [("b", {"x": 0.0})], [("b", {"x": -0.0})]], kind
    )
    kept = last_of_table(pa.table({"id": [1, 1, 2, 2], "v": [0, 0, 0, 0], "m": maps}), ["id"], "v")
    assert kept["id"].to_pylist() == [1, 2, 2]


def test_composite_keys_with_nulls_in_encoded_and_chunked_columns() -> None:
    names = pa.chunked_array(
        [pa.array(["é", None]).dictionary_encode(), pa.array(["é", "b", None]).dictionary_encode()]
    )
    table = pa.table({"name": names, "n": pa.array([1, 1, 1, 1, 1], pa.int8()), "v": pa.array([1, 2, 3, 4, 5])})
    kept = last_of_table(table, ["n", "name"], "v")
    assert kept.select(["name", "v"]).to_pydict() == {"name": ["é", "b", None], "v": [3, 4, 5]}
    assert kept.schema.equals(table.schema)


def test_text_in_views_stays_in_views() -> None:
    view = pa.string_view()
    nested = [pa.list_(view), pa.large_list(view), pa.map_(pa.string(), view), pa.struct([("x", view)])]
    values: list[Any] = [["a"], ["a"], [("k", "a")], {"x": "a"}]
    columns = [pa.array([value] * 4, kind) for value, kind in zip(values, nested, strict=True)]
    table = pa.table(
        [pa.array(["é", "b", "é", "b"], view), pa.array([b"1", b"2", b"3", b"2"], pa.binary_view()), *columns],
        names=["k", "v", "l", "ll", "m", "s"],
    )
    kept = last_of_table(table, ["k"], "v")
    assert kept.schema.equals(table.schema)
    assert kept.select(["k", "v"]).to_pydict() == {"k": ["b", "é"], "v": [b"2", b"3"]}
    assert kept["s"].to_pylist() == [{"x": "a"}] * 2


def test_the_same_answer_as_a_slow_loop_over_random_rows() -> None:
    chance = random.Random(3)
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("v", pa.int32()), ("x", pa.list_(pa.int64()))])
    for _ in range(50):
        rows = [
            {
                "a": chance.randrange(4),
                "b": chance.choice(["", "x", "é"]),
                "v": chance.choice([None, 1, 2]),
                "x": chance.choice([None, [], [1]]),
            }
            for _ in range(chance.randrange(40))
        ]
        expected = []
        for at, row in enumerate(rows):
            rivals = [other for other in rows if (other["a"], other["b"]) == (row["a"], row["b"])]
            highest = max(other["v"] or 0 for other in rivals)
            tied = [other for other in rows[:at] if other in rivals and (other["v"] or 0) == highest]
            if (row["v"] or 0) == highest and (not tied or row != tied[0]):
                expected.append(row)
        assert last(rows, ["a", "b"], schema=schema) == expected


def test_no_rows_stay_no_rows() -> None:
    empty = pa.table({"id": pa.array([], pa.int64()), "v": pa.array([], pa.string())})
    assert last_of_table(empty, ["id"], "v").equals(empty)
    chunkless = pa.Table.from_batches([], schema=empty.schema)
    assert last_of_table(chunkless, ["id"], "v").schema.equals(empty.schema)


@pytest.mark.parametrize(("key", "order", "advice"), [(["id"], "uptaded", "updated"), (["idd"], "updated", "id")])
def test_a_column_that_is_not_there_is_refused_with_the_nearest(key: list[str], order: str, advice: str) -> None:
    with pytest.raises(Invalid, match=f"Did you mean {advice}"):
        last_of_table(pa.table({"id": [1], "updated": [1]}), key, order)


def test_a_column_that_cannot_be_compared_is_refused() -> None:
    table = pa.table({"id": [1], "l": [[1]], "s": [{"a": 1}]})
    for key, order, column in ((["id"], "l", "l"), (["s"], "id", "s")):
        with pytest.raises(Invalid, match="cannot be compared") as refused:
            last_of_table(table, key, order)
        assert refused.value.facts["column"] == column


def test_names_may_be_anything() -> None:
    table = pa.table([pa.array([1, 1]), pa.array([2, 1])], names=["a.b`c", "ordre é"])
    assert last_of_table(table, ["a.b`c"], "ordre é").to_pylist() == [{"a.b`c": 1, "ordre é": 2}]
