"""A merge of a branch beside writers of both sides, another merge, a deletion and a healer: all orders, up to a bound.

Whatever the order was: what was told is what happened, nothing is there twice, and nothing that a living branch was
told to hold is lost to its parent once it is merged again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place

LAKES_LAST = 10


class World:
    """A lake with a new branch for every run, on which one row was changed and one appended."""

    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._lakes: dict[str, fm.Lake] = {}
        self.number = 0
        self.dev = ""

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                lake.create_table("events", EVENTS)
                lake.create_table("users", EVENTS, key=["id"])
                lake.append("users", [{"id": 1, "name": "old"}, {"id": 2, "name": "old"}])
            # With a healer leases end at once, so that it takes over whatever it meets half-way.
            options = {"lease_ms": -60_000} if "heal" in self._scenario else {}
            self._lakes = {name: place.open(recover=False, **options) for name in (*self._scenario, "judge")}
        self._runs += 1
        self.number += 10
        judge, self.dev = self._lakes["judge"], f"dev{self._runs}"
        judge.branches.create(self.dev)
        with judge.transaction("dev", branch=self.dev) as tx:
            tx.merge("users", self._row(1, "dev"))
            tx.append("events", self._row(self.number))
        return {name: getattr(self, name) for name in self._scenario}

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    def _row(self, number: int, name: str = "x") -> list[dict[str, Any]]:
        return [{"id": number, "name": f"{name} {self.number}"}]

    # ── actors ──

    def merge(self) -> Any:
        return self._lakes["merge"].branches.merge(self.dev, on_conflict="return")

    def second(self) -> Any:
        return self._lakes["second"].branches.merge(self.dev, on_conflict="return")

    def delete(self) -> Any:
        return self._lakes["delete"].branches.delete(self.dev)

    def ours(self) -> Any:
        with self._lakes["ours"].transaction("ours") as tx:
            tx.merge("users", self._row(2, "main"))
            tx.append("events", self._row(self.number + 1))
        return tx.commit

    def against(self) -> Any:
        return self._lakes["against"].merge("users", self._row(1, "main"))

    def theirs(self) -> Any:
        return self._lakes["theirs"].append("events", self._row(self.number + 2), branch=self.dev)

    def heal(self) -> Any:
        return self._lakes["heal"].recover()

    # ── what must hold, whatever the order was ──

    def check(self, run: ExploredRun) -> None:
        judge = self._lakes["judge"]
        judge.recover()
        check_lake(judge.catalog)
        self._check_told(run)
        lives = "delete" not in run.actors
        outcome = judge.branches.merge(self.dev, on_conflict="return").outcome if lives else ""
        there = Counter(row["id"] for row in judge.read_arrow("events").read_all().to_pylist())
        assert max(there.values(), default=1) == 1, "a row is doubled"
        users = self._users()
        for name, number in (("ours", self.number + 1), ("theirs", self.number + 2)):
            actor = run.actors.get(name)
            if actor is not None and actor.error is not None:
                assert number not in there, "who was told that nothing happened"
            elif actor is not None and (name == "ours" or outcome not in ("", "conflict")):
                assert number in there, "an acknowledged row is lost"
        if "ours" in run.actors:
            assert users[2] == f"main {self.number}"
        if outcome == "conflict":
            assert users[1] == f"main {self.number}"
            assert "against" in run.actors
        elif lives:
            assert self.number in there
            check_lake(judge.catalog)
        self._end(lives)

    def _check_told(self, run: ExploredRun) -> None:
        """What each merge said is what is in main."""
        users = self._users()
        merges = [run.actors[name] for name in ("merge", "second") if name in run.actors]
        for actor in merges:
            if actor.error is not None:
                allowed = {"delete": (fm.Conflict, fm.NotFound), "heal": (fm.Fenced,)}
                kinds = tuple(kind for name in allowed if name in run.actors for kind in allowed[name])
                assert isinstance(actor.error, kinds), repr(actor.error)
        outcomes = [actor.result.outcome for actor in merges if actor.error is None]
        commits = self._lakes["judge"].catalog.history.commits(limit=9, branch="main")
        merged = [commit for commit in commits if commit.kind == "branch_merge" and commit.message == ""]
        mine = [commit for commit in merged if commit.version > self._base()]
        if "theirs" not in run.actors:
            assert outcomes.count("merged") == len(mine)
        if "merged" not in outcomes and "theirs" not in run.actors:
            assert users[1] != f"dev {self.number}", "nobody was told that it is merged"
        if outcomes == ["conflict"]:
            assert run.actors["against"].error is None

    def _base(self) -> int:
        lines = {line.name: line for line in self._lines()}
        return int(lines[self.dev].base_version)

    def _lines(self) -> list[Any]:
        from floodmark.catalog.lineage import Lineages

        with self._lakes["judge"].catalog.database.read() as tx:
            return Lineages.read(tx).all()

    def _users(self) -> dict[int, str]:
        rows = self._lakes["judge"].read_arrow("users").read_all().to_pylist()
        assert len({row["id"] for row in rows}) == len(rows), "a key is doubled"
        return {row["id"]: row["name"] for row in rows}

    def _end(self, lives: bool) -> None:
        if lives:
            self._lakes["judge"].branches.delete(self.dev)


# Actors, and how many orders there must be at least.
SCENARIOS = [
    (("merge", "ours"), 10),
    (("merge", "against"), 10),
    (("merge", "theirs"), 10),
    (("merge", "second"), 10),
    (("merge", "delete"), 8),
    (("merge", "heal"), 8),
]


def explored(new_place: Callable[[], Place], scenario: tuple[str, ...], preemptions: int) -> int:
    world = World(new_place, scenario)
    try:
        return explore(world.make, preemptions=preemptions, check=world.check)
    finally:
        world.close()


@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS, ids=["-".join(one) for one, _ in SCENARIOS])
def test_every_order_of_a_merge_and_another_keeps_the_promises(
    new_place: Callable[[str], Place], scenario: tuple[str, ...], at_least: int
) -> None:
    assert explored(lambda: new_place("sqlite"), scenario, 1) >= at_least


@pytest.mark.soak
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize(("scenario", "at_least"), SCENARIOS)
def test_soak_more_orders(
    new_place: Callable[[str], Place], database: str, scenario: tuple[str, ...], at_least: int
) -> None:
    assert explored(lambda: new_place(database), scenario, 2) >= at_least


@pytest.mark.soak
def test_soak_three_at_once(new_place: Callable[[str], Place]) -> None:
    for other in ("theirs", "second", "delete"):
        assert explored(lambda: new_place("sqlite"), ("merge", "ours", other), 1) > 50
