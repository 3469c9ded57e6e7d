"""Keys of every type, in every kind of partition: found again by a process that reads all of it from disk."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

VALUES: dict[str, tuple[list[Any], list[str]]] = {
    "int": ([-(2**31), 0, 7, 2**31 - 1], ["k", "bucket(3, k)", "truncate(10, k)"]),
    "long": ([-(2**63), -1, 0, 2**63 - 1], ["k", "bucket(3, k)", "truncate(10, k)"]),
    "boolean": ([True, False], ["k"]),
    "string": (
        ["", "a", "ä", "a" * 40, "a" * 40 + "b", "\U0010ffff" * 20, "日本"],
        ["k", "bucket(3, k)", "truncate(3, k)"],
    ),
    "binary": ([b"", b"\x00", b"\xff" * 20, b"\xff" * 20 + b"\x00"], ["bucket(3, k)", "truncate(2, k)"]),
    "date": ([date(1, 1, 1), date(1969, 12, 31), date(2026, 11, 15)], ["k", "day(k)", "month(k)", "year(k)"]),
    "decimal(20,4)": ([Decimal("-1.5"), Decimal(0), Decimal("9999999999999999.9999")], ["k", "bucket(3, k)"]),
    "timestamp_ntz": (
        [datetime(1969, 12, 31, 23, 59, 59, 999999), datetime(2026, 11, 15, 1, 2, 3)],
        ["k", "hour(k)", "day(k)"],
    ),
    "timestamp": (
        [datetime(1969, 12, 31, 23, 59, 59, 999999, UTC), datetime(2026, 11, 15, tzinfo=UTC)],
        ["k", "hour(k)", "day(k)", "month(k)"],
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_keys_of_every_type_are_found_again_in_every_partition(new_place: Callable[[str], Place], kind: str) -> None:
    values, layouts = VALUES[kind]
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        for number, layout in enumerate([None, *layouts]):
            partition = [] if layout is None else [layout]
            lake.create_table(f"t{number}", f"k {kind} not null, part string, n int", key=["k"], partition=partition)
            for value in values:  # a file each, so that pruning has something to leave out
                lake.append(f"t{number}", [{"k": value, "part": "x", "n": 1}])
    for number in range(len(layouts) + 1):
        with place.open() as lake:  # nothing is remembered
            table = f"t{number}"
            with pytest.raises(fm.Invalid):
                lake.append(table, [{"k": values[-1], "part": "y", "n": 2}])
            commit = lake.merge(table, [{"k": value, "part": "x", "n": 1 + (value == values[0])} for value in values])
            assert (commit.rows_added, commit.tables[0].rows_updated) == (0, 1)
            lake.merge(table, [{"k": value, "part": "z", "n": 3} for value in values])
        with place.open() as lake:
            rows = lake.read_arrow(table, with_seq=True).read_all().to_pylist()
            assert [row["n"] for row in rows] == [3] * len(values)
            assert {row["k"] for row in rows} == set(values)
            assert len(lake.changes(table, len(values) + 1).arrow().read_all()) == len(values)
            check_lake(lake.catalog)


def test_a_key_of_several_columns_is_one_key(new_place: Callable[[str], Place]) -> None:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table(
            "t", "v int, day date not null, id string not null", key=["id", "day"], partition=["day", "bucket(2, id)"]
        )
        days = [date(2026, 11, day) for day in (1, 2, 3)]
        lake.append("t", [{"v": 1, "day": day, "id": name} for day in days for name in "ab"])
        commit = lake.merge("t", [{"v": 2, "day": days[1], "id": "a"}, {"v": 2, "day": days[1], "id": "c"}])
        assert (commit.rows_added, commit.tables[0].rows_updated) == (1, 1)
        lake.delete("t", "day = '2026-11-02' and id = 'a'")
        deleted = [row for row in lake.changes("t", 2).arrow().read_all().to_pylist() if row["_change"] == "delete"]
        assert [(row["day"], row["id"], row["v"]) for row in deleted] == [(days[1], "a", None)]
        with pytest.raises(fm.Invalid) as caught:
            lake.append("t", [{"v": 3, "day": days[0], "id": "b"}])
        assert "id=b" in str(caught.value)
        assert "day=2026-11-01" in str(caught.value)
        check_lake(lake.catalog)
