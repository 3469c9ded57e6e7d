"""Appends that lead, join and wait, beside recovery, a checked edit, a new column, a drop and a fence: all orders of
their steps, up to a bound. Their processes are alive, so an operation that finds a turn taken waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sqlalchemy import select, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows

LAKES_LAST = 8


class World:
    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._lakes: dict[str, fm.Lake] = {}
        self.number = 0
        self.joined = 0
        self.fenced: list[str] = []

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                lake.create_table("events", EVENTS)
                lake.create_table("notes", EVENTS)
            self._lakes = {name: place.open(recover=False) for name in (*self._scenario, "judge")}
        judge = self._lakes["judge"]
        if "events" not in {head.table for head in judge.heads()}:
            judge.create_table("events", EVENTS)
        self._runs += 1
        self.number += 10
        self.fenced = []
        return {name: getattr(self, name) for name in self._scenario}

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    # ── actors ──

    def one(self) -> Any:
        return self._lakes["one"].append("events", rows(self.number + 1))

    def two(self) -> Any:
        return self._lakes["two"].append("events", rows(self.number + 2), batch=f"two {self.number}")

    def three(self) -> Any:
        return self._lakes["three"].append("events", rows(self.number + 3))

    def same(self) -> Any:
        return self._lakes["same"].append("events", rows(self.number + 2), batch=f"two {self.number}")

    def pair(self) -> Any:
        with self._lakes["pair"].transaction() as tx:
            tx.append("events", rows(self.number + 4))
            tx.append("notes", rows(self.number + 4))
        return tx.commit

    def remove(self) -> Any:
        """It depends on other rows: checked again on every head that it meets."""
        return self._lakes["remove"].delete("events", f"id > {self.number} and id < {self.number + 3}")

    def widen(self) -> Any:
        """Rows with a new column: what was staged before is staged again, in the table's new shape."""
        row = {**rows(self.number + 5)[0], f"more{self.number}": self.number}
        return self._lakes["widen"].append("events", [row], evolve=True)

    def drop(self) -> Any:
        return self._lakes["drop"].drop_table("events")

    def fence(self) -> None:
        """Recovery that takes a process for dead which is only slow: whatever is unfinished now is undone."""
        lake = self._lakes["fence"]
        rows, _ = lake.catalog.journal.unfinished()
        for row in rows:
            if row.state not in ("staging", "staged") or lake.catalog.journal.is_own(row):
                continue
            operation, was_us = lake.catalog.journal.abandon(row.id)
            if was_us and operation is not None:
                lake.catalog.journal.delete_files(operation)
                self.fenced.append(row.id)

    def late(self) -> None:
        """Every lease of a turn runs out here: its holder was paused."""
        with self._lakes["late"].catalog.database.write() as tx:
            tx.execute(update(tables.turns).values(until_ms=1))

    # ── what must hold, whatever the order was ──

    def check(self, run: ExploredRun[Any]) -> None:
        judge = self._lakes["judge"]
        # A fenced writer that was slow may have written after its folder was deleted.
        judge.recover()
        check_lake(judge.catalog)
        with judge.catalog.database.read() as tx:
            assert tx.execute(select(tables.waiting)).all() == []
            assert tx.execute(select(tables.turns)).all() == []
            self.joined += len(tx.execute(select(tables.led)).all())
        dropped = run.actors["drop"].result if "drop" in run.actors else None
        assert ("events" in {head.table for head in judge.heads()}) is (dropped is None)
        events, notes = [] if dropped else ids(judge), ids(judge, "notes")
        assert len(events) == len(set(events)), "a row is doubled"
        removed = run.actors.get("remove")
        gone = set(range(self.number + 1, self.number + 3)) if removed is not None and removed.error is None else set()
        brought = {"one": 1, "two": 2, "same": 2, "three": 3, "pair": 4, "widen": 5}
        for name, offset in brought.items():
            if name not in run.actors:
                continue
            actor, number = run.actors[name], self.number + offset
            if dropped is not None:
                # It came before the drop and went with it, or was refused.
                refused = isinstance(actor.error, fm.Conflict | fm.NotFound)
                assert refused or (actor.result and actor.result.version < dropped.version), repr(actor.error)
            elif actor.error is not None:
                assert isinstance(actor.error, fm.Fenced), repr(actor.error)
                other = run.actors.get({"two": "same", "same": "two"}.get(name, ""))
                assert number not in events or (other is not None and other.error is None)
            elif number not in events:
                assert number in gone, f"an acknowledged row of {name} is lost"
            if name == "pair":
                assert (number in notes) is (number in events)
        if "widen" in run.actors:
            more = {row["id"]: row[f"more{self.number}"] for row in judge.read_arrow("events").read_all().to_pylist()}
            assert {number: more[number] for number in more if more[number] is not None} == {
                self.number + 5: self.number
            }
        versions = [actor.result.version for name, actor in run.actors.items() if name in brought and actor.result]
        outcomes = [actor.result.outcome for name, actor in run.actors.items() if name in brought and actor.result]
        assert len(set(versions)) == len(versions) - outcomes.count("already_committed")


# Actors, and how many orders there are at least with one preemption. `make soak`: with two, and on PostgreSQL.
SCENARIOS = [
    (("one", "two", "three"), 100),
    (("one", "two", "same"), 100),
    (("one", "two", "fence"), 80),
    (("one", "three", "late"), 80),
    (("one", "pair", "three"), 100),
    (("one", "remove", "two"), 100),
    (("one", "widen", "two"), 100),
    (("one", "drop", "two"), 100),
]


@pytest.mark.whole
@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS)
def test_every_order_of_steps_is_one_after_the_other(
    new_place: Callable[[str], Place], scenario: tuple[str, ...], at_least: int
) -> None:
    count, joined = explored(lambda: new_place("sqlite"), scenario, 1)
    assert count >= at_least
    assert joined > 0, "no order published two operations together"


def test_every_order_of_two_is_one_after_the_other_on_postgresql(new_place: Callable[[str], Place]) -> None:
    count, joined = explored(lambda: new_place("postgresql"), ("one", "two"), 1)
    assert count >= 15
    assert joined > 0, "no order published two operations together"


@pytest.mark.soak
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("scenario", [scenario for scenario, *_ in SCENARIOS])
def test_soak_more_orders(new_place: Callable[[str], Place], database: str, scenario: tuple[str, ...]) -> None:
    assert explored(lambda: new_place(database), scenario, 2 if database == "sqlite" else 1)[0] > 80


def explored(new_place: Callable[[], Place], scenario: tuple[str, ...], bound: int) -> tuple[int, int]:
    world = World(new_place, scenario)
    count = explore(world.make, preemptions=bound, check=world.check)
    world.close()
    print(f"{'+'.join(scenario)}: {count} orders within {bound} preemptions, {world.joined} joined")
    return count, world.joined
