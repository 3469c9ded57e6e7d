"""Killed or failed at every step of an undrop: the table is dropped as before, or back as it was; the next goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows
from tests.crash.faults import fail_commits, fail_storage

POINTS = [name for name, kind in FAILPOINTS.items() if kind == "undrop"]
# From here on it has happened; before that nothing has, and recovery does not finish it.
DONE = {"undrop.published", "undrop.cleaned"}


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(1, 2), batch="once")
        lake.delete("people", "id = 1")
        lake.drop_table("people")


def undrop(place: Place) -> str:
    with place.open() as lake:
        return lake.undrop("people").outcome


def check_back(lake: fm.Lake) -> None:
    assert ids(lake, "people") == [2]
    assert lake.append("people", rows(2), batch="once").outcome == "already_committed"
    check_lake(lake.catalog)


@pytest.mark.whole
@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_undrop_leaves_the_table_dropped_or_back(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(undrop, place, failpoint=point), f"{point} was never passed"
    done = point in DONE
    for _ in range(2):
        with place.open() as lake:
            found = check_lake(lake.catalog)
            assert sorted(found.audit.values()) == ([] if done else ["rolled_back"])
            assert {head.table for head in lake.heads()} == ({"events", "people"} if done else {"events"})
            assert lake.status()["health"] == "fine"
    if not done:
        assert run_child(undrop, place) == "committed"
    with place.open() as lake:
        check_back(lake)


# ── every call fails in turn ──


class Trial:
    """One lake, round after round: the table is dropped, and an undrop meets a fault."""

    def __init__(self, place: Place) -> None:
        run_child(prepare, place)
        self.lake = place.open(actor="test", storage=FaultyStorage())

    def act(self) -> fm.Commit:
        return self.lake.undrop("people")

    def finish(self, outcome: str) -> None:
        """An error meant that it is still dropped: then the same call brings it back."""
        there = "people" in {head.table for head in self.lake.heads()}
        assert there is (outcome == "committed"), outcome
        if not there:
            self.lake.undrop("people")
        check_back(self.lake)
        self.lake.drop_table("people")


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_whichever_call_to_storage_fails_an_undrop_is_undone(new_place: Callable[[str], Place], mode: str) -> None:
    outcomes = fail_storage(Trial(new_place("sqlite")), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 2, "hardly any call was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_of_an_undrop_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    assert len(fail_commits(Trial(new_place("sqlite")), mode)) > 2, "hardly any COMMIT was counted"
