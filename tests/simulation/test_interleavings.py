"""Two publishers, a healer, a pin and an expiry against the real door: all orders of their steps, up to a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.model import Commit
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows

LAKES_LAST = 20  # schedules on one lake before the next one is made: checks stay cheap


class World:
    """A lake and its actors. Leases end at once, so a healer takes over any publisher that it meets half-way."""

    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._lakes: dict[str, fm.Lake] = {}
        self.number = 0
        self.pinned: int | None = None
        self.expired: list[int] = []
        self.before: dict[str, list[int]] = {}

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                lake.create_table("events", EVENTS)
                lake.create_table("notes", EVENTS)
                lake.append("events", rows(0))
            self._lakes = {name: place.open(lease_ms=-60_000, recover=False) for name in (*self._scenario, "judge")}
        self._runs += 1
        self.number += 10
        self.pinned, self.expired = None, []
        judge = self._lakes["judge"]
        self.before = {table: ids(judge, table) for table in ("events", "notes")}
        return {name: getattr(self, name) for name in self._scenario}

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    # ── actors ──

    def batch(self) -> Commit:
        return self._lakes["batch"].append("events", rows(self.number + 1), batch=str(self.number))

    def same_batch(self) -> Commit:
        return self._lakes["same_batch"].append("events", rows(self.number + 1), batch=str(self.number))

    def pair(self) -> Commit | None:
        with self._lakes["pair"].transaction("pair") as tx:
            tx.append("events", rows(self.number + 2))
            tx.append("notes", rows(self.number + 3))
        return tx.commit

    def heal(self) -> Any:
        return self._lakes["heal"].recover()

    def pin(self) -> int:
        lake = self._lakes["pin"]
        version = lake.catalog.history.resolve()
        lake.catalog.history.pin(version, holder="test", reason="explored")
        self.pinned = version
        return version

    def expire(self) -> None:
        self.expired = self._lakes["expire"].catalog.expiry.expire(before_ms=2**60)

    # ── what must hold, whatever the order was ──

    def check(self, run: ExploredRun) -> None:
        judge = self._lakes["judge"]
        judge.recover()
        facts = check_lake(judge.catalog)
        events, notes = ids(judge, "events"), ids(judge, "notes")
        new_events = [one for one in events if one not in self.before["events"]]
        assert len(events) == len(set(events)), "a row is doubled"
        batches = [actor for name, actor in run.actors.items() if name in ("batch", "same_batch")]
        came_in = self.number + 1 in new_events
        for actor in batches:
            if actor.error is None:
                assert came_in, "an acknowledged batch is lost"
            else:
                # A healer took it over: undone before its seal, or finished after it.
                assert isinstance(actor.error, fm.Fenced), repr(actor.error)
        if batches and all(actor.error is not None for actor in batches):
            assert not came_in, "everybody was told that nothing happened"
        if "pair" in run.actors:
            pair = run.actors["pair"]
            both = (self.number + 2 in new_events, self.number + 3 in notes)
            if pair.error is None:
                assert both == (True, True)
            else:
                assert isinstance(pair.error, fm.Fenced), repr(pair.error)
                assert both == (False, False)
        if self.pinned is not None:
            assert self.pinned not in self.expired
            judge.catalog.history.resolve(version=self.pinned)
        if "expire" in run.actors:
            assert run.actors["expire"].error is None
            assert facts.version not in self.expired
        if "pin" in run.actors and run.actors["pin"].error is not None:
            assert isinstance(run.actors["pin"].error, fm.BelowRetention)


# Actors; how many times an actor may be stopped for another although it could go on, on SQLite and on PostgreSQL; how
# many orders there must be at least. `make soak` allows one more each.
SCENARIOS = [
    (("batch", "pair"), 2, 1, 50),
    (("batch", "heal"), 3, 2, 40),  # three: the batch is sealed between the look of a healer and its fence
    (("pair", "heal"), 2, 1, 15),
    (("batch", "same_batch"), 2, 1, 50),
    (("batch", "pin", "expire"), 1, 1, 40),
    (("batch", "pair", "heal", "pin", "expire"), 0, 0, 100),
]


@pytest.mark.whole
@pytest.mark.mostly_sqlite(3)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize(("scenario", "on_sqlite", "on_postgresql", "at_least"), SCENARIOS[:-1])
def test_every_order_of_steps_keeps_the_promises(
    new_place: Callable[[str], Place],
    database: str,
    scenario: tuple[str, ...],
    on_sqlite: int,
    on_postgresql: int,
    at_least: int,
) -> None:
    bound = on_sqlite if database == "sqlite" else on_postgresql
    assert explored(lambda: new_place(database), scenario, bound) >= (at_least if bound == on_sqlite else 8)


def test_every_order_of_all_five_keeps_the_promises(new_place: Callable[[str], Place]) -> None:
    scenario, bound, _, at_least = SCENARIOS[-1]
    assert explored(lambda: new_place("sqlite"), scenario, bound) >= at_least


@pytest.mark.soak
def test_soak_all_five_on_postgresql(new_place: Callable[[str], Place]) -> None:
    scenario, _, bound, _ = SCENARIOS[-1]
    assert explored(lambda: new_place("postgresql"), scenario, bound) >= 8


@pytest.mark.soak
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("scenario", [scenario for scenario, *_ in SCENARIOS[:-1]])
def test_soak_more_orders(new_place: Callable[[str], Place], database: str, scenario: tuple[str, ...]) -> None:
    bound = 1 + next(on_sqlite for known, on_sqlite, *_ in SCENARIOS if known == scenario)
    assert explored(lambda: new_place(database), scenario, bound) > 50


def explored(new_place: Callable[[], Place], scenario: tuple[str, ...], bound: int) -> int:
    world = World(new_place, scenario)
    count = explore(world.make, preemptions=bound, check=world.check)
    world.close()
    print(f"{'+'.join(scenario)}: {count} orders within {bound} preemptions")
    return count
