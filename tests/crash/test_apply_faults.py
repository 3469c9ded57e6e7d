"""Let the calls of an apply fail in turn: an error means that nothing changed, and the next apply does all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.faults import WRITES, FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.test_sink_faults import CommitFaults

# With every round a table has a column more; a new lake now and then keeps them few.
ROUNDS_PER_LAKE = 10


def wanted(number: int) -> dict[str, Any]:
    """Round after round: a table more and one less, a column renamed, one more with a default, another partition."""
    filled = {f"c{one}": {"type": "int", "default": one} for one in range(1, number + 1)}
    old = {} if number == 0 else {"renamed_from": f"name{number - 1}"}
    return {
        "users": {
            "columns": {"id": "long", f"name{number}": {"type": "string", **old}, **filled},
            "partition": [f"bucket({number + 2}, id)"],
            "key": ["id"],
        },
        f"new{number}": {"columns": {"id": "long"}, "key": ["id"], "references": {"id": "users.id"}},
        **({} if number == 0 else {f"new{number - 1}": {"drop": True}}),
    }


class Trial:
    def __init__(self, place: Place) -> None:
        self.lake = place.open(create=True, actor="test", storage=FaultyStorage())
        self.lake.apply(wanted(0), allow_destructive=True)
        self.lake.append("users", [{"id": 1, "name0": "one"}])
        self.number = 0

    def shape(self) -> dict[str, tuple[str, ...]]:
        return {head.table: tuple(self.lake.schema(head.table).column_names) for head in self.lake.heads()}

    def run(self) -> str:
        """One more apply, which may fail: then everything is as it was, or the catalog says that it has happened."""
        before = self.shape()
        file = wanted(self.number + 1)
        try:
            return self.lake.apply(file, allow_destructive=True).outcome
        except fm.CommitUnknown as unknown:
            return "unknown" if self.lake.resolve(unknown.operation) is None else "happened"
        except fm.Unavailable:
            assert self.shape() == before
            return "raised"

    def finish(self, outcome: str) -> None:
        """Without a fault the same file is applied, or has been."""
        self.number += 1
        done = outcome in ("committed", "happened")
        assert self.lake.apply(wanted(self.number), allow_destructive=True).outcome == (
            "nothing_to_do" if done else "committed"
        )
        (row,) = self.lake.read_arrow("users").read_all().to_pylist()
        filled = {f"c{one}": one for one in range(1, self.number + 1)}
        assert row == {"id": 1, f"name{self.number}": "one", **filled}
        assert set(self.shape()) == {"users", f"new{self.number}"}
        check_lake(self.lake.catalog)


def fail_in_turn(
    new_trial: Callable[[], Trial], lay: Callable[[Trial, int], Any], lift: Callable[[Any], bool]
) -> list[str]:
    """Let the first call fail, then the next, until an apply ends before its fault; what became of each."""
    outcomes: list[str] = []
    trial, at = new_trial(), 1
    while True:
        if len(outcomes) % ROUNDS_PER_LAKE == ROUNDS_PER_LAKE - 1:
            trial.lake.close()
            trial = new_trial()
        fault = lay(trial, at)
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
        at += 1


def lay_storage(mode: str) -> Callable[[Trial, int], FaultyStorage]:
    def lay(trial: Trial, number: int) -> FaultyStorage:
        storage = trial.lake.catalog.storage
        assert isinstance(storage, FaultyStorage)
        storage.fail_at, storage.mode, storage.verbs = number, mode, WRITES
        storage.calls_seen, storage.fired = 0, False
        return storage

    return lay


def lift_storage(storage: FaultyStorage) -> bool:
    fired = storage.fired
    storage.fail_at, storage.fired = None, False
    return fired


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_whichever_write_fails_an_error_means_undone(new_place: Callable[[str], Place], mode: str) -> None:
    outcomes = fail_in_turn(lambda: Trial(new_place("sqlite")), lay_storage(mode), lift_storage)
    assert "raised" in outcomes
    assert len(outcomes) > 4, "hardly any write was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    def lay(trial: Trial, number: int) -> CommitFaults:
        return CommitFaults(trial.lake.catalog.database, fail_at=number, mode=mode)

    def lift(fault: CommitFaults) -> bool:
        fault.remove()
        return fault.fired

    outcomes = fail_in_turn(lambda: Trial(new_place("sqlite")), lay, lift)
    assert len(outcomes) > 2, "hardly any COMMIT was counted"
