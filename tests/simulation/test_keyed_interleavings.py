"""Two writers of the same keys, and a healer between them: all orders of their steps, up to a bound.

Whatever the order was, doing what the commits say to a dict, in the order of the versions, gives the rows, the
sequences and the feed; and who was told that it happened is in the history, who was told that it did not is not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.simulation import feed

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite

LAKES_LAST = 12


def merge(*rows: list[Any]) -> dict[str, Any]:
    return {"verb": "merge", "rows": list(rows)}


def partial(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"verb": "partial", "rows": list(rows)}


def append(*rows: list[Any]) -> dict[str, Any]:
    return {"verb": "append", "rows": list(rows)}


def delete(*condition: Any) -> dict[str, Any]:
    return {"verb": "delete", "where": list(condition)}


def update(condition: list[Any], **values: Any) -> dict[str, Any]:
    return {"verb": "update", "set": values, "where": condition}


def overwrite(condition: list[Any] | None, *rows: list[Any]) -> dict[str, Any]:
    return {"verb": "overwrite", "where": condition, "rows": list(rows)}


def rollback(back: int) -> dict[str, Any]:
    return {"verb": "rollback", "back": back}


# The rows that are there at first: key, value, part; in two files.
THERE = (append([1, 1, "a"], [2, 2, "b"]), append([3, 3, "a"]))
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two inserts of a new key": (append([9, 1, "a"]), append([9, 2, "b"])),
    "two merges of a new key": (merge([9, 1, "a"]), merge([9, 2, "b"], [1, 5, "a"])),
    "a merge that changes nothing, and the row goes": (merge([1, 1, "a"], [9, 9, "c"]), delete("id", "=", 1)),
    "an insert of what is being deleted": (append([3, 7, "c"]), delete("value", "=", 3)),
    "a delete, and a row comes that it matches": (delete("part", "=", "a"), append([8, 8, "a"])),
    "a delete, and a row comes that it does not match": (delete("part", "=", "a"), append([8, 8, "b"])),
    "an update, and a row comes that it matches": (update(["part", "=", "a"], value=5), append([8, 8, "a"])),
    "two updates of other columns of a row": (
        update(["id", "=", 1], value=5),
        update(["value", "<", 4], part="c"),
    ),
    "an update, and its row goes": (update(["part", "=", "a"], value=5), delete("id", "=", 1)),
    "an overwrite, and a row comes into its part": (overwrite(["part", "=", "a"], [1, 0, "a"]), merge([7, 7, "a"])),
    "an overwrite of all, and a merge": (overwrite(None, [5, 5, "b"]), merge([1, 8, "c"], [6, 6, "c"])),
    "two deletes of one row": (delete("id", "=", 1), delete("value", "<", 2)),
    "a rollback, and a row of it changes": (rollback(1), merge([1, 8, "c"], [9, 9, "a"])),
    "a rollback, and its rows go": (rollback(1), delete("part", "=", "a")),
    "two rollbacks": (rollback(1), rollback(2)),
    "two partial merges of other columns of a row": (
        partial({"id": 1, "value": 7}),
        partial({"id": 1, "part": "c"}),
    ),
    "a partial merge, and its row goes": (partial({"id": 1, "value": 7}), delete("id", "=", 1)),
    "a partial merge of a new key, and the key comes": (partial({"id": 9, "value": 7}), append([9, 1, "b"])),
    "a transaction that takes back what it merged": (
        {"verb": "transaction", "steps": [merge([1, 6, "b"], [9, 9, "b"]), delete("part", "=", "b")]},
        merge([2, 6, "a"], [1, 1, "a"]),
    ),
}


class World:
    """A lake and its actors. With a healer leases end at once, so that it takes over any writer that it meets."""

    def __init__(self, new_place: Callable[[], Place], operations: tuple[dict[str, Any], ...], *, heal: bool) -> None:
        self._new_place = new_place
        self._operations = operations
        self._heal = heal
        self._runs = 0
        self._lakes: list[fm.Lake] = []
        self._version = 0

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            with place.open(create=True) as lake:
                feed.make(lake, [])
            lease = {"lease_ms": -60_000} if self._heal else {}
            self._lakes = [place.open(recover=False, **lease) for _ in range(len(self._operations) + 2)]
        self._runs += 1
        judge = self._lakes[-1]
        # The same rows before every run.
        judge.overwrite(feed.TABLE, [], message=json.dumps(overwrite(None)))
        for operation in THERE:
            feed.perform(judge, operation)
        self._version = judge.status()["version"]
        actors: dict[str, Callable[[], Any]] = {}
        for number, operation in enumerate(self._operations):
            actors[f"writer{number}"] = lambda lake=self._lakes[number], operation=operation: feed.perform(
                lake, operation
            )
        if self._heal:
            actors["healer"] = self._lakes[-2].recover
        return actors

    def close(self) -> None:
        for lake in self._lakes:
            lake.close()
        self._lakes = []

    def check(self, run: ExploredRun) -> None:
        judge = self._lakes[-1]
        judge.recover()
        check_lake(judge.catalog)
        feed.check_history(judge, random.Random(len(run.choices)))
        told = [
            # Which rows a rollback returns to depends on the order: its own message has them.
            actor.result.message if operation["verb"] == "rollback" else json.dumps(operation)
            for number, operation in enumerate(self._operations)
            if (actor := run.actors[f"writer{number}"]).error is None and actor.result.outcome == "committed"
        ]
        there = [commit.message for commit in judge.history(limit=9) if commit.version > self._version]
        assert sorted(told) == sorted(there), "what was told is not what happened"
        for number in range(len(self._operations)):
            error = run.actors[f"writer{number}"].error
            if error is not None:
                allowed = (fm.Invalid, fm.Fenced) if self._heal else (fm.Invalid,)
                assert isinstance(error, allowed), repr(error)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_order_of_two_keyed_writers_is_one_after_the_other(new_place: Callable[[str], Place], pair: str) -> None:
    world = World(lambda: new_place("sqlite"), PAIRS[pair], heal=False)
    count = explore(world.make, preemptions=1, check=world.check)
    world.close()
    assert count > 10


@pytest.mark.parametrize(
    "operation",
    [merge([1, 6, "b"], [9, 9, "b"]), delete("part", "=", "a"), rollback(1)],
    ids=["merge", "delete", "rollback"],
)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_healer_beside_a_keyed_writer_undoes_it_or_comes_too_late(
    new_place: Callable[[str], Place], database: str, operation: dict[str, Any]
) -> None:
    world = World(lambda: new_place(database), (operation,), heal=True)
    count = explore(world.make, preemptions=1, check=world.check)
    world.close()
    assert count > 5


@pytest.mark.soak
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("pair", PAIRS)
def test_soak_more_orders(new_place: Callable[[str], Place], database: str, pair: str) -> None:
    world = World(lambda: new_place(database), PAIRS[pair], heal=False)
    assert explore(world.make, preemptions=2, check=world.check) > 50
    world.close()
