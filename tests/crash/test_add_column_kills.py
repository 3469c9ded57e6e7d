"""Killed at every step of adding a column, and while rows are filled: the old shape or the new, nothing left over."""

from __future__ import annotations

import pytest
from pyiceberg.types import StringType

import floodmark as fm
from floodmark.catalog.riders import BatchRider
from floodmark.commit.intent import Intent
from floodmark.failpoints import FAILPOINTS
from floodmark.model import MAIN
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from floodmark.write.add_column import add_column
from tests.conftest import EVENTS, Place, at, rows

pytestmark = pytest.mark.mostly_sqlite

POINTS = [name for name, kind in FAILPOINTS.items() if kind == "add_column"]
# From here on it has happened.
DONE = {"add_column.published", "add_column.cleaned"}
# A healer finishes what has an identity, unless it was sealed for a shape that the table does not have any more.
FINISHED = {*DONE, "add_column.sealed", "add_column.built", "add_column.locked", "add_column.moved"}


@pytest.fixture
def made(place: Place) -> Place:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
    return place


def add(lake: fm.Lake, batch: str | None = None) -> None:
    rider = None if batch is None else BatchRider("table:events", batch)
    intent = Intent("add_column", MAIN, "child", "", rider)
    add_column(lake.catalog, intent, "events", "copy", StringType(), "name")


def add_in_child(place: Place, batch: str | None, shape_changes: bool) -> None:
    with place.open(actor="child") as lake:
        if not shape_changes:
            add(lake, batch)
            return
        with at("add_column.sealed", lambda: lake.append("events", [{"id": 3, "more": 1}], evolve=True)):
            add(lake, batch)


def append_in_child(place: Place) -> None:
    with place.open(actor="child") as lake:
        lake.append("events", rows(3), batch="b")


def columns(lake: fm.Lake) -> set[str]:
    return {field.name for field in lake.schema("events").fields}


@pytest.mark.parametrize("batch", [None, "once"], ids=["without identity", "with identity"])
@pytest.mark.parametrize("point", POINTS)
def test_the_table_has_the_old_shape_or_the_new(made: Place, point: str, batch: str | None) -> None:
    again = point == "add_column.planned_again"
    assert run_killed(add_in_child, made, batch, again, failpoint=point)
    with made.open(actor="test") as lake:
        check_lake(lake.catalog)
        there = point in (DONE if batch is None else FINISHED)
        assert ("copy" in columns(lake)) is there
        if not there:
            add(lake, batch)
        lake.append("events", [{"id": 9, "name": "nine", **({"more": None} if again else {})}])
        found = {row["id"]: row["copy"] for row in lake.read_arrow("events").read_all().to_pylist()}
        assert found == {1: None, 2: None, 9: "nine", **({3: None} if again else {})}
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["append.staged", "append.sealed", "append.published"])
def test_rows_that_are_filled_leave_nothing_over(made: Place, point: str) -> None:
    with made.open(actor="test") as lake:
        add(lake)
    assert run_killed(append_in_child, made, failpoint=point)
    with made.open(actor="test") as lake:
        check_lake(lake.catalog)
        outcome = lake.append("events", rows(3), batch="b").outcome
        assert outcome == ("committed" if point == "append.staged" else "already_committed")
        found = {row["id"]: row["copy"] for row in lake.read_arrow("events").read_all().to_pylist()}
        assert found == {1: None, 2: None, 3: "row 3"}
        check_lake(lake.catalog)
