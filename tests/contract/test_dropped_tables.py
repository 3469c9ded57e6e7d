"""Dropped tables: read until their versions expire, then gone with all their files; and files that came back."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import func, select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.contract.test_drop import drop
from tests.foreign_writer import by_another


def files_of(lake: fm.Lake, location: str) -> set[str]:
    root = Path(location.removeprefix("file://"))
    return {str(path) for path in root.rglob("*") if path.is_file()}


def location_of(lake: fm.Lake, table: str) -> str:
    return lake.catalog.files.metadata(lake.catalog.history.head(table).metadata_location).location


def waiting(lake: fm.Lake, table_id: str) -> int:
    """Rows of the catalog that a later sweep would look at."""
    with lake.catalog.database.read() as tx:
        return sum(
            int(tx.execute(select(func.count()).select_from(row).where(row.c.table_id == table_id)).scalar_one())
            for row in (tables.expired, tables.deletions)
        )


def expire_and_sweep(lake: fm.Lake, *, deep: bool = False) -> None:
    lake.maintain.expire(keep="0s")
    done = lake.maintain.sweep(grace="0s", deep=deep)
    assert done.outcome in ("swept", "nothing_to_do"), done.as_dict()
    check_lake(lake.catalog)


@pytest.fixture
def people(lake: fm.Lake) -> fm.Lake:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(1, 2, 3))
    lake.delete("people", "id = 2")
    for number in range(10, 12 + SNAPSHOTS_KEPT):
        lake.append("people", rows(number))
    return lake


def test_a_dropped_table_is_read_by_its_versions_and_goes_with_them(people: fm.Lake) -> None:
    head, location = people.catalog.history.head("people"), location_of(people, "people")
    there = files_of(people, location)
    dropped = people.apply({"people": {"drop": True}}, allow_destructive=True).version
    pin = people.catalog.history.pin(dropped - 1, holder="test", reason="a look back")
    for _ in range(2):
        expire_and_sweep(people, deep=True)
        assert ids(people, "people", dropped - 1)[:2] == [1, 3]
        people.append("events", rows(1))
    assert files_of(people, location) < there, "older states are dead, the newest few of it too"
    people.catalog.history.unpin(pin)
    expire_and_sweep(people)
    assert {path for path in files_of(people, location) if path.endswith(".parquet")} == set()
    # The version that dropped it may be the newest that is old; one more, and nothing waits any more.
    people.append("events", rows(2))
    expire_and_sweep(people, deep=True)
    assert files_of(people, location) == set()
    assert waiting(people, head.table_id) == 0
    assert people.maintain.sweep(grace="0s").outcome == "nothing_to_do"
    assert people.catalog.expiry.count_dead(0) == 0
    assert ids(people) == [1, 1, 2]


def test_a_grace_that_is_not_over_keeps_a_dropped_table(people: fm.Lake) -> None:
    location = location_of(people, "people")
    there = files_of(people, location)
    people.apply({"people": {"drop": True}}, allow_destructive=True)
    people.append("events", rows(1))
    people.maintain.expire(keep="0s")
    assert people.maintain.sweep(grace="1h").outcome == "nothing_to_do"
    assert files_of(people, location) == there
    expire_and_sweep(people, deep=True)
    assert files_of(people, location) == set()


def test_a_table_that_is_made_again_is_not_touched_by_the_end_of_the_old_one(people: fm.Lake) -> None:
    old = location_of(people, "people")
    for number in range(3):
        people.apply({"people": {"drop": True}}, allow_destructive=True)
        people.create_table("people", EVENTS, key=["id"])
        people.append("people", rows(number, 5))
        people.delete("people", "id = 5")
        expire_and_sweep(people, deep=True)
        assert ids(people, "people") == [number]
    people.append("events", rows(1))
    expire_and_sweep(people, deep=True)
    if location_of(people, "people") != old:
        assert files_of(people, old) == set()
    assert ids(people, "people") == [2]


def test_a_table_that_a_branch_made_and_dropped_goes_while_the_branch_lives(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.create_table("side", EVENTS, branch="dev")
    lake.append("side", rows(1), branch="dev")
    head = lake.catalog.history.head("side", "dev")
    location = lake.catalog.files.metadata(head.metadata_location).location
    drop(lake, "side", "dev")
    expire_and_sweep(lake, deep=True)
    for number in range(2):
        lake.append("events", rows(number), branch="dev")
        lake.append("events", rows(number))
    expire_and_sweep(lake, deep=True)
    assert files_of(lake, location) == set()
    assert waiting(lake, head.table_id) == 0
    lake.branches.delete("dev")
    expire_and_sweep(lake, deep=True)


def prepare_dropped(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(1, 2))
        lake.delete("people", "id = 1")
        lake.apply({"people": {"drop": True}}, allow_destructive=True)
        lake.append("events", rows(1))
        lake.maintain.expire(keep="0s")


def sweep_all(place: Place) -> None:
    with place.open() as lake:
        lake.maintain.sweep(grace="0s")


@pytest.mark.parametrize("point", ["planned", "data_deleted", "metadata_deleted", "marked"])
def test_a_killed_sweep_of_a_dropped_table_is_ended_by_the_next_whatever_its_grace(place: Place, point: str) -> None:
    run_child(prepare_dropped, place)
    assert run_killed(sweep_all, place, failpoint=f"sweep.{point}")
    with place.open() as lake:
        # What was begun is not whole any more: no grace brings it back.
        assert lake.maintain.sweep(grace="1h").outcome in ("swept", "nothing_to_do")
        check_lake(lake.catalog)
        expire_and_sweep(lake, deep=True)
        assert [path for path in Path(place.path).rglob("*.parquet") if "people" in str(path)] == []
        assert ids(lake) == [1]


def test_rows_that_come_back_by_a_repair_outlive_the_states_before(lake: fm.Lake, place: Place) -> None:
    """Another engine rolled the table back, and that was taken in: what was removed is live again."""
    lake.append("events", rows(1))
    lake.append("events", rows(2))
    before = lake.catalog.history.head("events").snapshot
    assert before is not None
    between = lake.overwrite("events", rows(3)).version
    lake.catalog.history.pin(between, holder="test", reason="a state without them, between those that have them")
    by_another(place, "events", lambda table: table.manage_snapshots().set_current_snapshot(before).commit())
    lake.repair("events", choice="accept", apply=True)
    assert ids(lake) == [1, 2]
    for number in range(10, 10 + SNAPSHOTS_KEPT):
        lake.append("events", rows(number))
    expire_and_sweep(lake, deep=True)
    assert ids(lake) == [1, 2, *range(10, 10 + SNAPSHOTS_KEPT)]
    assert ids(lake, version=between) == [3]
