"""Killed or failed at every step of a rollback: all tables are as they were, or all have their earlier contents."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, at, rows
from tests.crash.faults import fail_commits, fail_statements, fail_storage

preload("tests.conftest", "floodmark.branches.rollback", "floodmark.maintenance.sweep")

POINTS = [name for name, kind in FAILPOINTS.items() if kind == "rollback"]
# From here on it has happened.
DONE = {"rollback.published", "rollback.cleaned"}
# Recovery finishes what is sealed from here on, if a batch id identifies it.
SEALED = {f"rollback.{step}" for step in ("sealed", "built", "locked", "moved")}
THEN = 4

State = dict[str, list[tuple[int, str]]]


def pair(number: int, name: str | None = None) -> tuple[int, str]:
    return number, name or f"row {number}"


OLD: State = {
    "events": [pair(1), pair(1), pair(2)],
    "people": [pair(1), pair(2), pair(3)],
}
NEW: State = {
    "events": [pair(1), pair(1), pair(5)],
    "people": [pair(1), pair(2, "new"), pair(4, "new")],
}


def prepare(place: Place) -> None:
    """Two tables with rows that were changed, deleted and added since a version."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        lake.create_table("events", EVENTS)
        lake.append("people", rows(1, 2, 3))
        assert lake.append("events", rows(1, 1, 2)).version == THEN
        change(lake)


def change(lake: fm.Lake) -> None:
    lake.merge("people", [{"id": 2, "name": "new"}, {"id": 4, "name": "new"}])
    lake.delete("people", "id = 3")
    lake.delete("events", "id = 2")
    lake.append("events", rows(5))


def roll_back(place: Place, batch: str | None = None) -> str:
    with place.open() as lake:
        return lake.rollback(to=THEN, batch=batch).outcome


def roll_back_moved(place: Place) -> str:
    """A table moves under the rollback, so that all of it is planned again."""
    with (
        place.open() as lake,
        place.open() as other,
        at("rollback.sealed", lambda: other.append("events", rows(9))),
    ):
        return lake.rollback(to=THEN).outcome


def state(lake: fm.Lake) -> State:
    found: State = {}
    for head in lake.heads():
        table = lake.read_arrow(head.table).read_all().to_pylist()
        found[head.table] = sorted((row["id"], row["name"]) for row in table)
    return found


def check_changes(lake: fm.Lake, mark: int) -> None:
    """From a mark before the rollback, the changes of the keyed table lead to its rows."""
    folded = dict(NEW["people"])
    for row in lake.changes("people", mark).arrow().read_all().to_pylist():
        folded.pop(row["id"], None)
        if row["_change"] == "upsert":
            folded[row["id"]] = row["name"]
    assert sorted(folded.items()) == OLD["people"]


@pytest.mark.whole
@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("batch", [None, "back"])
@pytest.mark.parametrize("point", [point for point in POINTS if not point.endswith("planned_again")])
def test_a_killed_rollback_happens_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, batch: str | None, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    with place.open() as open_lake:
        mark = open_lake.catalog.history.head("people").sequence
        assert run_killed(roll_back, place, batch, failpoint=point), f"{point} was never passed"
        assert state(open_lake) == (OLD if point in DONE else NEW)
        forward = batch is not None and point in SEALED
        happened = forward or point in DONE
        audit = [] if point in DONE else ["rolled_forward" if forward else "rolled_back"]
        for _ in range(2):
            with place.open() as lake:
                found = check_lake(lake.catalog)
                assert state(lake) == (OLD if happened else NEW)
                assert sorted(found.audit.values()) == audit
        again = {None: "nothing_to_do", "back": "already_committed"}[batch]
        assert run_child(roll_back, place, batch) == (again if happened else "committed")
        assert state(open_lake) == OLD
        check_changes(open_lake, mark)
        check_lake(open_lake.catalog)


@pytest.mark.whole
@pytest.mark.mostly_sqlite
def test_killed_while_it_is_planned_again_nothing_has_happened(place: Place) -> None:
    run_child(prepare, place)
    assert run_killed(roll_back_moved, place, failpoint="rollback.planned_again")
    with place.open() as lake:
        assert state(lake) == {**NEW, "events": [*NEW["events"], pair(9)]}
        # What lost was undone by its own process: recovery finds nothing to do.
        assert lake.audit() == []
        check_lake(lake.catalog)
    assert run_child(roll_back, place) == "committed"
    with place.open() as lake:
        assert state(lake) == OLD
        check_lake(lake.catalog)


# ── every call fails in turn ──


class Trial:
    """One lake, round after round: tables have changed, and a rollback meets a fault."""

    def __init__(self, place: Place) -> None:
        run_child(prepare, place)
        self.lake = place.open(actor="test", storage=FaultyStorage())

    def act(self) -> fm.Commit:
        return self.lake.rollback(to=THEN)

    def finish(self, outcome: str) -> None:
        """An error meant that nothing has changed: then the same call does it."""
        assert state(self.lake) == (OLD if outcome == "committed" else NEW), outcome
        if outcome != "committed":
            self.lake.rollback(to=THEN)
        assert state(self.lake) == OLD
        check_lake(self.lake.catalog)
        change(self.lake)


@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
def test_whichever_call_to_storage_fails_a_rollback_is_undone(new_place: Callable[[str], Place], mode: str) -> None:
    outcomes = fail_storage(Trial(new_place("sqlite")), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 5, "hardly any call was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_of_a_rollback_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    assert len(fail_commits(Trial(new_place("sqlite")), mode)) > 2, "hardly any COMMIT was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_statement_of_a_rollback_fails_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    assert len(fail_statements(Trial(new_place("sqlite")), mode)) > 10, "hardly any statement was counted"
