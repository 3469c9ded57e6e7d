"""Maintenance of indexes beside writers, drops, expiries and sweeps: all orders of their steps, up to a bound.

Without any grace, so that what nothing holds goes at once. Whatever the order was: the index finds every key that the
head and an older version have, or does not cover its file; nothing is left over after a last recovery and sweep; and no
data commit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.maintenance import folds
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.crash.test_index_maintain_kills import drop_indexes, found_by_key, in_use, segments

pytestmark = pytest.mark.mostly_sqlite

LAKES_LAST = 12
CLEAR_EVERY = 4
DONE = {"indexed", "nothing_to_do", "conflict", "partial", "swept", "expired", "compacted", "below_threshold"}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three segments are due for a fold."""
    monkeypatch.setattr(folds, "SEGMENTS_MAX", 2)
    monkeypatch.setattr(folds, "TIER", 2)


class World:
    """A damaged segment, a retired one, and so many that a fold is due."""

    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._key = 0
        self._lakes: dict[str, fm.Lake] = {}

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0 or "drop" in self._scenario:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                lake.create_table("people", EVENTS, key=["id"])
            lease = {"lease_ms": -60_000} if "heal" in self._scenario else {}
            self._lakes = {name: place.open(recover=False, **lease) for name in (*self._scenario, "judge")}
            self._key = 0
        self._runs += 1
        judge = self._lakes["judge"]
        for _ in range(3):
            judge.append("people", rows(self._key))
            self._key += 1
        judge.maintain.index()
        self._older = judge.status()["version"]
        for _ in range(3):
            judge.append("people", rows(self._key))
            self._key += 1
        judge.catalog.indexes.mark_broken(in_use(judge)[-1].location)
        return {name: getattr(self, name) for name in self._scenario}

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    # ── actors ──

    def index(self) -> str:
        return self._lakes["index"].maintain.index("people").outcome

    def second(self) -> str:
        return self._lakes["second"].maintain.index("people").outcome

    def sweep(self) -> str:
        return self._lakes["sweep"].maintain.sweep(grace="0s").outcome

    def deep(self) -> str:
        return self._lakes["deep"].maintain.sweep(grace="0s", deep=True).outcome

    def expire(self) -> str:
        return self._lakes["expire"].maintain.expire(keep="0s").outcome

    def compact(self) -> str:
        return self._lakes["compact"].maintain.compact("people", files_min=2).outcome

    def append(self) -> str:
        lake = self._lakes["append"]
        lake.append("people", rows(1_000_000 + self._runs), if_version=lake.status()["version"])
        return "indexed"

    def drop(self) -> str:
        drop_indexes(self._lakes["drop"])
        return "indexed"

    def heal(self) -> str:
        self._lakes["heal"].recover()
        return "indexed"

    # ── what must hold ──

    def check(self, run: ExploredRun[str]) -> None:
        judge = self._lakes["judge"]
        for name, actor in run.actors.items():
            fenced = "heal" in run.actors and name != "heal"
            assert actor.error is None or (fenced and isinstance(actor.error, fm.Fenced)), f"{name}: {actor.error!r}"
            assert actor.result in (DONE | {"failed"} if fenced else DONE) or actor.error, f"{name}: {actor.result}"
        judge.recover()
        expected = ids(judge, "people")
        assert set(range(self._key)) <= set(expected)
        if "drop" not in self._scenario:
            assert found_by_key(judge, *expected, -1) >= set(expected)
            if "expire" not in self._scenario:
                older = ids(judge, "people", version=self._older)
                assert found_by_key(judge, *older, version=self._older) >= set(older)
        if self._runs % CLEAR_EVERY == 0 or "drop" in self._scenario:
            self._clear(judge)

    def _clear(self, judge: fm.Lake) -> None:
        expected = ids(judge, "people")
        assert judge.maintain.index().outcome in ("indexed", "nothing_to_do")
        judge.maintain.expire(keep="0s")
        assert judge.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
        assert judge.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
        check_lake(judge.catalog)
        if "drop" in self._scenario:
            assert segments(judge) == []
        else:
            assert found_by_key(judge, *expected, -1) == set(expected)


# Actors, and how many orders there must be at least with one preemption.
SCENARIOS = [
    (("index", "append"), 10),
    (("index", "second"), 10),
    (("index", "sweep", "append"), 30),
    (("index", "compact", "sweep"), 30),
    (("index", "expire", "deep"), 20),
    (("index", "drop", "sweep"), 20),
    (("index", "heal"), 8),
]


@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS)
def test_every_order_leaves_an_index_that_finds_all_or_does_not_cover_it(
    new_place: Callable[[str], Place], scenario: tuple[str, ...], at_least: int
) -> None:
    world = World(lambda: new_place("sqlite"), scenario)
    count = explore(world.make, preemptions=1, check=world.check)
    world.close()
    assert count >= at_least, count
