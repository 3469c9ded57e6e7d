"""An undrop beside sweeps, expiries, drops, makers of tables and branches: all orders of their steps, up to a bound.

Without any grace, so that what nothing holds goes at once. Whatever the order was: the table is back with exactly its
rows and batch ids, or it is dropped and its undrop was refused; and a last expiry and sweep leave nothing over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.simulation.test_maintain_interleavings import Between

LAKES_LAST = 10
REFUSED = (fm.Invalid, fm.Conflict, fm.BelowRetention, fm.NotFound)


def fill(lake: fm.Lake, table: str) -> int:
    """A table of several states, which is dropped then. Returns the version before."""
    lake.create_table(table, EVENTS, key=["id"])
    lake.append(table, rows(1, 2), batch="once")
    lake.delete(table, "id = 1")
    lake.merge(table, [{"id": 3, "name": "three"}])
    return lake.drop_table(table).version - 1


def clear(lake: fm.Lake) -> None:
    for _ in range(2):
        lake.append("other", rows(1))
        lake.maintain.expire(keep="0s")
        assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
    assert lake.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
    check_lake(lake.catalog)


ACTS: dict[str, Callable[[fm.Lake, str, int], Any]] = {
    "undrop": lambda lake, table, before: lake.undrop(table),
    "second": lambda lake, table, before: lake.undrop(table),
    "expire": lambda lake, table, before: lake.maintain.expire(keep="0s"),
    "sweep": lambda lake, table, before: lake.maintain.sweep(grace="0s"),
    "create": lambda lake, table, before: lake.create_table(table, EVENTS),
    "branch": lambda lake, table, before: lake.branches.create(f"of-{table}", version=before),
}


class World:
    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._lakes: dict[str, fm.Lake] = {}
        self.table = ""

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                lake.create_table("other", EVENTS)
            self._lakes = {name: place.open(recover=False) for name in (*self._scenario, "judge")}
        self._runs += 1
        self.table = f"people{self._runs}"
        before = fill(self._lakes["judge"], self.table)
        return {
            name: lambda lake=self._lakes[name], act=ACTS[name]: act(lake, self.table, before)
            for name in self._scenario
        }

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    def check(self, run: ExploredRun) -> None:
        judge, done = self._lakes["judge"], {name for name, actor in run.actors.items() if actor.error is None}
        for name, actor in run.actors.items():
            assert name in done or isinstance(actor.error, REFUSED), f"{name}: {actor.error!r}"
        undrops = {"undrop", "second"} & done
        assert len(undrops) <= 1, "it came back twice"
        assert undrops or {"expire", "create"} & done, "nothing stood in its way"
        if undrops:
            assert ids(judge, self.table) == [2, 3]
            assert judge.append(self.table, rows(9), batch="once").outcome == "already_committed"
        elif "create" in done:
            assert ids(judge, self.table) == []
        if "branch" in done:
            branch = f"of-{self.table}"
            assert judge.append(self.table, rows(9), batch="once", branch=branch).outcome == "already_committed"
            assert sorted(judge.read_arrow(self.table, branch=branch).read_all()["id"].to_pylist()) == [2, 3]
            check_lake(judge.catalog)
            judge.branches.delete(branch)
        if self._runs % 4 == 0:
            clear(judge)
            if undrops:
                assert ids(judge, self.table) == [2, 3]


# Actors, and how many orders there must be at least with one preemption.
SCENARIOS = [
    (("undrop", "expire", "sweep"), 40),
    (("undrop", "second"), 10),
    (("undrop", "create"), 10),
    (("branch", "undrop", "expire"), 20),
]


@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS)
def test_every_order_of_an_undrop_and_others_brings_all_of_it_back_or_nothing(
    new_place: Callable[[str], Place], scenario: tuple[str, ...], at_least: int
) -> None:
    world = World(lambda: new_place("sqlite"), scenario)
    count = explore(world.make, preemptions=1, check=world.check)
    world.close()
    assert count >= at_least, count


def test_whatever_expires_and_is_swept_between_two_calls_an_undrop_is_whole_or_refused(
    new_place: Callable[[str], Place],
) -> None:
    """The versions that have the table may go before the undrop has begun, and not from then on."""
    place, outcomes = new_place("sqlite"), []
    with place.open(create=True) as judge:
        judge.create_table("other", EVENTS)
        for number in range(1, 100):
            table = f"people{number}"
            fill(judge, table)

            def act() -> None:
                judge.append("other", rows(1))
                judge.maintain.expire(keep="0s")
                assert judge.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")

            between = Between(number, act)
            with place.open(recover=False, storage=between) as lake:
                between.watch(lake)
                try:
                    lake.undrop(table)
                    outcomes.append("back")
                except fm.BelowRetention:
                    outcomes.append("expired")
            if outcomes[-1] == "back":
                assert ids(judge, table) == [2, 3]
                assert judge.append(table, rows(9), batch="once").outcome == "already_committed"
            if not between.acted:
                break
        clear(judge)
    assert outcomes[0] == "expired"
    assert outcomes[-1] == "back"
    assert outcomes == sorted(outcomes, key=["expired", "back"].index), "once it has begun, nothing stops it"
