"""Killed or failed at every step of an undrop: the table is dropped as before, or back as it was; the next goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows
from tests.crash.test_sink_faults import CommitFaults

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

    def run(self) -> str:
        try:
            return self.lake.undrop("people").outcome
        except fm.CommitUnknown as unknown:
            return "unknown" if self.lake.resolve(unknown.operation) is None else "committed"
        except fm.Unavailable:
            return "raised"

    def finish(self, outcome: str) -> None:
        """An error meant that it is still dropped: then the same call brings it back."""
        there = "people" in {head.table for head in self.lake.heads()}
        assert there is (outcome == "committed"), outcome
        if not there:
            self.lake.undrop("people")
        check_back(self.lake)
        self.lake.drop_table("people")


def fail_in_turn(trial: Trial, lay: Callable[[int], Any], lift: Callable[[Any], bool]) -> list[str]:
    outcomes: list[str] = []
    while True:
        fault = lay(len(outcomes) + 1)
        try:
            outcome = trial.run()
        finally:
            fired = lift(fault)
        trial.finish(outcome)
        if not fired:
            assert outcome == "committed"
            trial.lake.close()
            return outcomes
        outcomes.append(outcome)


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_whichever_call_to_storage_fails_an_undrop_is_undone(new_place: Callable[[str], Place], mode: str) -> None:
    trial = Trial(new_place("sqlite"))
    storage = trial.lake.catalog.storage
    assert isinstance(storage, FaultyStorage)

    def lay(number: int) -> FaultyStorage:
        storage.fail_at, storage.mode, storage.calls_seen, storage.fired = number, mode, 0, False
        return storage

    def lift(storage: FaultyStorage) -> bool:
        fired, storage.fail_at, storage.fired = storage.fired, None, False
        return fired

    outcomes = fail_in_turn(trial, lay, lift)
    assert "raised" in outcomes
    assert len(outcomes) > 2, "hardly any call was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_of_an_undrop_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    trial = Trial(new_place("sqlite"))

    def lay(number: int) -> CommitFaults:
        return CommitFaults(trial.lake.catalog.database, fail_at=number, mode=mode)

    def lift(fault: CommitFaults) -> bool:
        fault.remove()
        return fault.fired

    assert len(fail_in_turn(trial, lay, lift)) > 2, "hardly any COMMIT was counted"
