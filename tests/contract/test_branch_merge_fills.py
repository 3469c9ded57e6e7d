"""Merges and columns that one side fills: rows get values on the way, and what somebody wrote stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("users", EVENTS, key=["id"])
        for table in ("events", "users"):
            lake.append(table, people(1, 2))
        lake.branches.create("dev")
        yield lake


def people(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number, "name": f"row {number}"} for number in numbers]


@pytest.mark.parametrize("table", ["events", "users"])
def test_rows_of_a_branch_get_the_default_that_comes_down_to_it(lake: fm.Lake, table: str) -> None:
    lake.append(table, people(12, 13), branch="dev")
    if table == "users":
        # The rest of a file is written again on the branch, by nobody's wish.
        lake.merge(table, [{"id": 12, "name": "changed"}], branch="dev")
    before = [row for row in lake.changes(table, branch="dev").arrow().read_all().to_pylist() if row["id"] == 13]
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    lake.apply({table: {"columns": {**columns, "extra": {"type": "int", "required": True, "default": 7}}}})
    planned = lake.branches.merge("main", into="dev", dry_run=True)
    merged = lake.branches.merge("main", into="dev")
    assert (planned.outcome, merged.outcome) == ("planned", "merged")
    rows = lake.read_arrow(table, branch="dev").read_all().to_pylist()
    assert {row["id"] for row in rows} >= {1, 12, 13}
    assert {row["extra"] for row in rows} == {7}
    after = [row for row in lake.changes(table, branch="dev").arrow().read_all().to_pylist() if row["id"] == 13]
    assert [row["_seq"] for row in after] == [row["_seq"] for row in before], "a fill is no change"
    assert lake.branches.merge("dev").outcome == "merged"
    assert lake.branches.merge("main", into="dev").outcome == "up_to_date"
    check_lake(lake.catalog)


@pytest.mark.parametrize("deleted", [False, True], ids=["changed", "deleted"])
def test_what_main_wrote_into_a_new_column_with_a_default_is_not_lost(lake: fm.Lake, deleted: bool) -> None:
    if deleted:
        lake.delete("users", "id = 1", branch="dev")
    else:
        lake.merge("users", [{"id": 1, "name": "dev"}], branch="dev")
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    lake.apply({"users": {"columns": {**columns, "extra": {"type": "int", "default": 7}}}})
    mine = next(row for row in lake.read_arrow("users").read_all().to_pylist() if row["id"] == 1)
    lake.merge("users", [{**mine, "extra": 77}])
    (conflict,) = lake.branches.merge("dev", on_conflict="return").conflicts
    assert (conflict.reason, conflict.key) == ("deleted" if deleted else "changed", {"id": 1})
    assert conflict.ours == {**mine, "extra": 77}
    assert lake.branches.merge("dev", prefer="ours").outcome == "merged"
    assert {**mine, "extra": 77} in lake.read_arrow("users").read_all().to_pylist()
    # Rows that nobody but the fill touched are no conflict.
    lake.merge("users", [{"id": 2, "name": "dev"}], branch="dev")
    assert lake.branches.merge("dev").outcome == "merged"
    row = next(row for row in lake.read_arrow("users").read_all().to_pylist() if row["id"] == 2)
    assert row == {"id": 2, "name": "dev", "extra": 7}
    check_lake(lake.catalog)
