"""Conflicts of a branch merge: raised in Python with their data, and nothing that a side wrote is lost without one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

pytestmark = pytest.mark.mostly_sqlite

PEOPLE: dict[str, Any] = {"columns": {"id": "long", "name": "string", "age": "int"}, "key": ["id"]}
LOG: dict[str, Any] = {"columns": {"id": "long", "text": "string", "level": "string"}}
ORDERS: dict[str, Any] = {
    "columns": {"id": "long", "customer": "long"},
    "references": {"customer": "people.id"},
    "key": ["id"],
}


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.apply({"people": PEOPLE, "log": LOG})
        lake.append("people", [{"id": 1, "name": "Ann", "age": 1}, {"id": 2, "name": "Ben", "age": 2}])
        lake.append("log", [{"id": 1, "text": "a", "level": "low"}])
        lake.branches.create("dev")
        yield lake
        check_lake(lake.catalog)


def rows_of(lake: fm.Lake, table: str = "people", branch: str = "main") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lake.read_arrow(table, branch=branch).read_all().to_pylist()
    return sorted(found, key=lambda row: row["id"])


def without(table: dict[str, Any], column: str) -> dict[str, Any]:
    return {**table, "columns": {name: kind for name, kind in table["columns"].items() if name != column}}


def drop_column(lake: fm.Lake, table: str, shape: dict[str, Any], column: str) -> None:
    """On main: shapes are changed there, and reach a branch by a merge."""
    wanted = "allow_destructive" in inspect.signature(lake.apply).parameters
    lake.apply({table: without(shape, column)}, **({"allow_destructive": True} if wanted else {}))


def both_change(lake: fm.Lake) -> None:
    lake.merge("people", [{"id": 1, "age": 10}], partial=True)
    lake.merge("people", [{"id": 1, "age": 11}], partial=True, branch="dev")


def test_a_conflict_is_raised_with_the_conflicts_as_data_and_changes_nothing(lake: fm.Lake) -> None:
    both_change(lake)
    version = lake.status()["version"]
    with pytest.raises(fm.MergeConflict) as raised:
        lake.branches.merge("dev")
    error = raised.value
    assert isinstance(error, fm.Conflict)
    assert error.conflicts_total == 1
    (conflict,) = error.conflicts
    assert (conflict.table, conflict.reason, conflict.key) == ("people", "changed", {"id": 1})
    assert (conflict.base["age"], conflict.ours["age"], conflict.theirs["age"]) == (1, 10, 11)
    assert error.as_dict()["conflicts"] == [conflict.as_dict()]
    assert lake.status()["version"] == version


def test_a_conflict_is_a_value_where_the_caller_asks_for_it(lake: fm.Lake) -> None:
    both_change(lake)
    merged = lake.branches.merge("dev", on_conflict="return")
    assert (merged.outcome, merged.conflicts_total) == ("conflict", 1)
    assert lake.branches.merge("dev", dry_run=True).outcome == "conflict"
    assert lake.branches.merge("dev", prefer="ours").outcome == "merged"
    with pytest.raises(fm.Invalid, match="on_conflict"):
        lake.branches.merge("dev", on_conflict="ignore")


def test_a_reference_that_a_merge_would_orphan_is_conflict_data(lake: fm.Lake) -> None:
    lake.apply({"orders": ORDERS})
    lake.branches.create("side")
    lake.append("orders", [{"id": 7, "customer": 2}])
    lake.delete("people", "id = 2", branch="side")
    with pytest.raises(fm.MergeConflict) as raised:
        lake.branches.merge("side")
    (conflict,) = raised.value.conflicts
    assert (conflict.table, conflict.reason, conflict.key, conflict.about) == (
        "people",
        "reference",
        {"id": 2},
        "orders",
    )
    assert lake.branches.merge("side", prefer="theirs", on_conflict="return").outcome == "conflict"
    assert [row["id"] for row in rows_of(lake)] == [1, 2]


def test_rows_that_refer_to_what_the_other_side_deleted_are_conflict_data(lake: fm.Lake) -> None:
    lake.apply({"orders": ORDERS})
    lake.branches.create("side")
    lake.append("orders", [{"id": 7, "customer": 2}], branch="side")
    lake.delete("people", "id = 2")
    merged = lake.branches.merge("side", on_conflict="return")
    assert [(one.table, one.reason, one.key, one.about) for one in merged.conflicts] == [
        ("orders", "reference", {"customer": 2}, "people")
    ]
    assert rows_of(lake, "orders") == []


def test_a_column_dropped_on_the_branch_that_is_merged_and_updated_on_the_target_is_a_conflict(lake: fm.Lake) -> None:
    drop_column(lake, "people", PEOPLE, "age")
    lake.merge("people", [{"id": 1, "age": 10}], partial=True, branch="dev")
    with pytest.raises(fm.MergeConflict) as raised:
        lake.branches.merge("main", into="dev")
    (conflict,) = raised.value.conflicts
    assert (conflict.reason, conflict.about, conflict.key) == ("column", "age", {"id": 1})
    assert conflict.ours == {"id": 1, "name": "Ann", "age": 10}
    assert conflict.base["age"] == 1
    assert [row["age"] for row in rows_of(lake, branch="dev")] == [10, 2]
    assert lake.branches.merge("main", into="dev", prefer="ours", on_conflict="return").outcome == "conflict"
    assert lake.branches.merge("main", into="dev", prefer="theirs").outcome == "merged"
    assert rows_of(lake, branch="dev") == [{"id": 1, "name": "Ann"}, {"id": 2, "name": "Ben"}]


def test_a_column_dropped_on_the_target_and_updated_on_the_branch_is_a_conflict(lake: fm.Lake) -> None:
    drop_column(lake, "people", PEOPLE, "age")
    lake.merge("people", [{"id": 2, "age": 20}, {"id": 3, "age": 30}], partial=True, branch="dev")
    merged = lake.branches.merge("dev", on_conflict="return")
    assert [(one.reason, one.about, one.key) for one in merged.conflicts] == [
        ("column", "age", {"id": 2}),
        ("column", "age", {"id": 3}),
    ]
    assert [one.theirs["age"] for one in merged.conflicts] == [20, 30]
    assert lake.branches.merge("dev", prefer="ours").outcome == "merged"
    assert [row["id"] for row in rows_of(lake)] == [1, 2, 3]


WAYS = [("dev", "main"), ("main", "dev")]


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_other_columns_may_change_while_one_is_dropped(lake: fm.Lake, source: str, target: str) -> None:
    drop_column(lake, "people", PEOPLE, "age")
    lake.merge("people", [{"id": 1, "name": "Anna"}, {"id": 5, "name": "Eve"}], partial=True, branch="dev")
    assert lake.branches.merge(source, into=target).outcome == "merged"
    expected = [{"id": 1, "name": "Anna"}, {"id": 2, "name": "Ben"}, {"id": 5, "name": "Eve"}]
    assert rows_of(lake, branch=target) == expected


@pytest.mark.parametrize(("source", "target"), WAYS)
def test_rows_without_a_key_that_bring_values_of_a_dropped_column_are_a_conflict(
    lake: fm.Lake, source: str, target: str
) -> None:
    drop_column(lake, "log", LOG, "level")
    came = [{"id": 2, "text": "b", "level": None}, {"id": 3, "text": "c", "level": "high"}]
    lake.append("log", came, branch="dev")
    merged = lake.branches.merge(source, into=target, on_conflict="return")
    assert [(one.table, one.reason, one.about) for one in merged.conflicts] == [("log", "column", "level")]
    row = merged.conflicts[0].theirs if source == "dev" else merged.conflicts[0].ours
    assert row == came[1]
    assert lake.branches.merge(source, into=target, prefer="ours" if target == "main" else "theirs").outcome == "merged"
    assert [row["id"] for row in rows_of(lake, "log", target)] == [1, 2, 3]
