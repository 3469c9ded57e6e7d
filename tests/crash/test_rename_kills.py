"""Kill a rename of a table at every step, or let its calls fail: one name or the other, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at
from tests.crash.faults import fail_commits, fail_storage

pytestmark = pytest.mark.mostly_sqlite

POINTS = [name for name, kind in FAILPOINTS.items() if kind == "apply"]
DONE = {"apply.published", "apply.cleaned"}
DECLARED: Mapping[str, Any] = {
    "users": {"columns": {"id": "long", "name": "string"}, "key": ["id"]},
    "orders": {"columns": {"id": "long", "user": "long"}, "references": {"user": "users.id"}},
}
USERS = [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}]


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.apply(DECLARED)
        lake.append("users", USERS, batch="b")
        lake.append("orders", [{"id": 1, "user": 1}])


def rename(place: Place) -> str:
    with place.open(actor="child") as lake:
        return lake.rename_table("users", "people").outcome


def rename_beside_a_shape(place: Place) -> str:
    """Another writer brings a column while it is built, so that it is planned again."""
    with place.open(actor="child") as lake:
        more = [{"id": 3, "name": "three", "more": 1}]
        with at("apply.sealed", lambda: lake.append("users", more, evolve=True)):
            return lake.rename_table("users", "people").outcome


def check(lake: fm.Lake, *, renamed: bool) -> None:
    """All of it has one name: the pointer, the head, the batch ids, the references."""
    name, other = ("people", "users") if renamed else ("users", "people")
    assert sorted(head.table for head in lake.heads()) == sorted(["orders", name])
    check_lake(lake.catalog)
    found = lake.read_arrow(name, with_seq=True).read_all().to_pylist()
    assert [(row["id"], row["_seq"]) for row in found if row["id"] < 3] == [(1, 1), (2, 1)]
    assert lake.append(name, USERS, batch="b").outcome == "already_committed"
    with pytest.raises(fm.NotFound):
        lake.append(other, USERS, batch="b")
    with pytest.raises(fm.Invalid, match="refer to keys"):
        lake.append("orders", [{"id": 9, "user": 99}])
    with pytest.raises(fm.Invalid, match="refer to keys"):
        lake.delete(name, "id = 1")
    with lake.catalog.database.read() as tx:
        assert set(tx.execute(select(tables.sources.c.scope)).scalars()) == {f"table:{name}"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_rename_happens_whole_or_not_at_all(place: Place, point: str) -> None:
    run_child(prepare, place)
    child = rename_beside_a_shape if point == "apply.planned_again" else rename
    assert run_killed(child, place, failpoint=point), f"{point} was never passed"
    for _ in range(2):
        with place.open(actor="test") as lake:
            check(lake, renamed=point in DONE)
            recovered = [row.outcome for row in lake.audit() if row.kind == "apply"]
            assert recovered == ([] if point in DONE else ["rolled_back"])
    if point not in DONE:
        assert run_child(rename, place) == "committed"
    with place.open(actor="test") as lake:
        check(lake, renamed=True)


# ── every call fails in turn ──


class Trial:
    """One lake, round after round: a table gets another name, and its calls meet a fault."""

    def __init__(self, place: Place) -> None:
        run_child(prepare, place)
        self.lake = place.open(actor="test", storage=FaultyStorage())
        self.number = 0

    @property
    def names(self) -> tuple[str, str]:
        return ("users", "people") if self.number % 2 == 0 else ("people", "users")

    def act(self) -> fm.Commit:
        return self.lake.rename_table(*self.names)

    def finish(self, outcome: str) -> None:
        """An error meant that it has its old name: then the same call renames it."""
        old, new = self.names
        there = {head.table for head in self.lake.heads()}
        assert ((old in there), (new in there)) == ((outcome != "committed"), (outcome == "committed")), outcome
        if outcome != "committed":
            assert self.lake.rename_table(old, new).outcome == "committed"
        check(self.lake, renamed=new == "people")
        self.number += 1


@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_whichever_call_to_storage_fails_a_rename_is_undone(new_place: Callable[[str], Place], mode: str) -> None:
    outcomes = fail_storage(Trial(new_place("sqlite")), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 2, "hardly any call was counted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_of_a_rename_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str
) -> None:
    assert len(fail_commits(Trial(new_place("sqlite")), mode)) > 2, "hardly any COMMIT was counted"
