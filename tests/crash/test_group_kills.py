"""Kill the process that leads, or one that waits, at every step of publishing together; the others go on by themselves.

The leader stops after its seal until three others wait in line: so each kill hits a group of four. Nobody recovers
before the others have ended: they must notice the death of the leader themselves.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.turns import end_turns
from floodmark.testing.children import Child, preload
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows
from tests.publishing import wait_for_line

preload("tests.crash.test_group_kills", "tests.publishing")

BEHIND = 3
# Before COMMIT nothing of the group is true, after it all of it is.
LEADER_BEFORE = ("append.sealed", "turn.joined", "append.built", "append.locked", "append.moved")
LEADER_AFTER = ("append.published", "append.cleaned")
WAITING = ("turn.queued", "turn.waiting", "turn.taken")


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1))


def lead(place: Place, batch: str | None, behind: int) -> str:
    """An append that goes on after its seal only when so many others wait."""
    with place.open(actor="leader") as lake:

        def stop(point: str) -> None:
            if point == "append.sealed":
                wait_for_line(lake, behind)

        failpoints.observer = stop
        return lake.append("events", rows(2), batch=batch).outcome


def follow(place: Place, number: int, batch: str | None = None) -> int:
    with place.open(actor=f"follower {number}") as lake:
        return lake.append("events", rows(number), batch=batch).version


def wait_until(place: Place, condition: Callable[[set[str]], bool]) -> None:
    """Until the journal has an operation in such a state."""
    with place.open(read_only=True) as lake:
        for _ in range(5_000):
            with lake.catalog.database.read() as tx:
                if condition(set(tx.execute(select(tables.operations.c.state)).scalars())):
                    return
            time.sleep(0.002)
    raise AssertionError("it did not come that far")


def run_group(
    place: Place, *, batch: str | None, leader_dies_at: str | None, follower_dies_at: str | None
) -> list[Child]:
    # One that dies while it waits may be undone, by recovery at the entry of another write, before the last one comes.
    behind = BEHIND if follower_dies_at in (None, "turn.taken") else BEHIND - 1
    leader = Child(lead, place, batch, behind, failpoint=leader_dies_at)
    # It has the turn before the first of the others comes.
    wait_until(place, lambda states: "staged" in states)
    followers = [Child(follow, place, 10, failpoint=follower_dies_at)]
    if follower_dies_at == "turn.taken":
        # The one that waits longest.
        with place.open(read_only=True) as lake:
            wait_for_line(lake, 1)
    followers += [Child(follow, place, 10 + number) for number in range(1, BEHIND)]
    return [leader, *followers]


@pytest.mark.mostly_sqlite(3)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("batch", [None, "monday"])
@pytest.mark.parametrize("point", [*LEADER_BEFORE, *LEADER_AFTER])
def test_a_leader_that_is_killed_leaves_all_of_its_group_or_none_and_the_others_go_on(
    new_place: Callable[[str], Place], database: str, point: str, batch: str | None
) -> None:
    place = new_place(database)
    prepare(place)
    leader, *followers = run_group(place, batch=batch, leader_dies_at=point, follower_dies_at=None)
    leader.wait()
    assert leader.killed, f"{point} was never passed"
    versions = [one.wait() for one in followers]
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        came = point in LEADER_AFTER or batch is not None
        assert ids(lake) == [1, *([2] if came else []), 10, 11, 12]
        # Create, first append, the leader's if it came, and the three.
        assert facts.version == 5 + came
        assert len(set(versions)) == BEHIND
        if point in LEADER_AFTER:
            assert set(versions) == {4, 5, 6}
        recovered = [] if point in LEADER_AFTER else ["rolled_forward" if batch is not None else "rolled_back"]
        assert sorted(facts.audit.values()) == recovered
        assert lake.status()["health"] == "fine"
        assert list(lake.status()["waiting"]) == []
    with place.open() as lake:
        assert check_lake(lake.catalog) == facts, "recovering twice changed something"


@pytest.mark.mostly_sqlite(3)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", WAITING[:2])
def test_one_that_is_killed_while_it_waits_comes_in_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    prepare(place)
    leader, dead, *followers = run_group(place, batch=None, leader_dies_at=None, follower_dies_at=point)
    dead.wait()
    assert dead.killed, f"{point} was never passed"
    assert leader.wait() == "committed"
    for one in followers:
        one.wait()
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        found = ids(lake)
        # Its place in line is all that a leader needs; or recovery was quicker, at the entry of another write.
        assert found in ([1, 2, 10, 11, 12], [1, 2, 11, 12])
        assert sorted(facts.audit.values()) == ([] if 10 in found else ["rolled_back"])
        assert lake.status()["health"] == "fine"


@pytest.mark.mostly_sqlite(3)
@pytest.mark.parametrize("database", DATABASES)
def test_one_that_is_killed_when_it_gets_the_turn_keeps_nobody_waiting(
    new_place: Callable[[str], Place], database: str
) -> None:
    place = new_place(database)
    prepare(place)
    # The leader dies, so the one that waits longest takes the turn, and dies too.
    leader, dead, *followers = run_group(
        place, batch=None, leader_dies_at="append.built", follower_dies_at="turn.taken"
    )
    for one in (leader, dead):
        one.wait()
        assert one.killed
    versions = [one.wait() for one in followers]
    assert len(set(versions)) == 2
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert [one for one in ids(lake) if one not in (10,)] == [1, 11, 12]
        assert set(facts.audit.values()) <= {"rolled_back"}
        assert lake.status()["health"] == "fine"


def stop_with_the_turn(place: Place) -> None:
    """A leader that never goes on after its seal."""
    failpoints.observer = lambda point: time.sleep(600) if point == "append.sealed" else None
    with place.open(actor="leader") as lake:
        lake.append("events", rows(10))


@pytest.mark.parametrize("database", DATABASES)
def test_a_dead_leader_whose_death_can_be_seen_keeps_nobody_waiting_for_its_lease(
    new_place: Callable[[str], Place], database: str
) -> None:
    place = new_place(database)
    prepare(place)
    with place.open() as lake:
        leader = Child(stop_with_the_turn, place)
        wait_until(place, lambda states: "staged" in states)
        with lake.catalog.database.write() as tx:
            # Nothing in this test lives until it ends.
            assert tx.execute(update(tables.turns).values(until_ms=2**60)).rowcount == 1

        def die(point: str) -> None:
            if point == "turn.queued":
                leader.process.kill()
                leader.process.join()

        failpoints.observer = die
        try:
            assert lake.append("events", rows(2)).outcome == "committed"
        finally:
            failpoints.observer = None
        assert leader.process.exitcode == -signal.SIGKILL
    with place.open() as lake:
        assert ids(lake) == [1, 2]
        assert set(check_lake(lake.catalog).audit.values()) == {"rolled_back"}


def stand_in_line(place: Place, count: int) -> None:
    """So many appends, each in a thread of its own, that never ask."""
    failpoints.observer = lambda point: time.sleep(600) if point == "turn.queued" else None
    with place.open(actor="waits") as lake:
        threads = [threading.Thread(target=lake.append, args=("events", rows(100 + at))) for at in range(count)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()


@pytest.mark.parametrize("database", DATABASES)
def test_a_batch_that_is_killed_while_it_waits_leaves_no_place_in_line_after_recovery(
    new_place: Callable[[str], Place], database: str
) -> None:
    """Its row of fm_waiting goes with its publish: one that stayed would keep every later append waiting."""
    place = new_place(database)
    prepare(place)
    with place.open() as lake:
        lake.catalog.publisher.turns.take("another", [lake.catalog.history.head("events").table_id])
    child = Child(follow, place, 10, "monday", failpoint="turn.queued")
    child.wait()
    assert child.killed
    with place.open() as lake:
        assert ids(lake) == [1, 10]
        assert set(check_lake(lake.catalog).audit.values()) == {"rolled_forward"}
        with lake.catalog.database.read() as tx:
            assert tx.execute(select(tables.waiting.c.operation)).all() == []


@pytest.mark.parametrize("database", DATABASES)
def test_one_that_waits_behind_the_dead_goes_past_all_of_them_at_once(
    new_place: Callable[[str], Place], database: str
) -> None:
    """A free turn that stays free is not theirs, however many they are."""
    place = new_place(database)
    prepare(place)
    asked = []
    with place.open() as lake:
        table_id = lake.catalog.history.head("events").table_id
        lake.catalog.publisher.turns.take("another", [table_id], 600_000)
        dead = Child(stand_in_line, place, 12)
        wait_for_line(lake, 12)

        def watch(point: str) -> None:
            if point == "turn.queued":
                dead.process.kill()
                dead.process.join()
                with lake.catalog.database.write() as tx:
                    end_turns(tx, ["another"])
            elif point == "turn.waiting":
                asked.append(point)

        failpoints.observer = watch
        try:
            lake.append("events", rows(2))
        finally:
            failpoints.observer = None
    assert len(asked) <= 3
    with place.open() as lake:
        assert ids(lake) == [1, 2]
        check_lake(lake.catalog)
