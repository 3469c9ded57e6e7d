"""Let the calls of an apply fail in turn: an error means that nothing changed, and the next apply does all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.faults import WRITES, FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.faults import fail_commits, fail_storage

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


class Applies:
    """Applies one file after the other; each may fail: then everything is as it was, or all of it has happened."""

    def __init__(self, new_place: Callable[[str], Place]) -> None:
        self._new_place = new_place
        self._storage = FaultyStorage()
        self._begin()

    def _begin(self) -> None:
        self.lake = self._new_place("sqlite").open(create=True, actor="test", storage=self._storage)
        self.lake.apply(wanted(0), allow_destructive=True)
        self.lake.append("users", [{"id": 1, "name0": "one"}])
        self.number, self.before = 0, self.shape()

    def shape(self) -> dict[str, tuple[str, ...]]:
        return {head.table: tuple(self.lake.schema(head.table).column_names) for head in self.lake.heads()}

    def act(self) -> fm.Commit:
        return self.lake.apply(wanted(self.number + 1), allow_destructive=True)

    def finish(self, outcome: str) -> None:
        """Without a fault the same file is applied, or has been."""
        self.number += 1
        assert outcome != "raised" or self.shape() == self.before
        assert self.lake.apply(wanted(self.number), allow_destructive=True).outcome == (
            "nothing_to_do" if outcome == "committed" else "committed"
        )
        (row,) = self.lake.read_arrow("users").read_all().to_pylist()
        filled = {f"c{one}": one for one in range(1, self.number + 1)}
        assert row == {"id": 1, f"name{self.number}": "one", **filled}
        assert set(self.shape()) == {"users", f"new{self.number}"}
        check_lake(self.lake.catalog)
        self.before = self.shape()
        if self.number == ROUNDS_PER_LAKE:
            self.lake.close()
            self._begin()


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_whichever_write_fails_an_error_means_undone(new_place: Callable[[str], Place], mode: str) -> None:
    outcomes = fail_storage(Applies(new_place), mode, WRITES)
    assert "raised" in outcomes
    assert len(outcomes) > 4, "hardly any write was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    assert len(fail_commits(Applies(new_place), mode)) > 2, "hardly any COMMIT was counted"
