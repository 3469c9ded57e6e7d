"""Kill a change of a branch's columns, or a merge that brings one, at every step, or let calls fail: all or nothing.

Whatever happens to the branch, main has the columns that it had, for us and for other engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at
from tests.crash.faults import fail_commits, fail_storage
from tests.foreign_writer import foreign_catalog

pytestmark = pytest.mark.mostly_sqlite

preload("floodmark.branches.merge", "floodmark.schema.apply")

POINTS = [name for name, kind in FAILPOINTS.items() if kind == "apply"]
MERGE_POINTS = [name for name, kind in FAILPOINTS.items() if kind == "branch_merge"]
DONE = ("apply.published", "apply.cleaned", "branch_merge.published", "branch_merge.cleaned")
OLD = ["id", "name", "ts"]
# What each verb does on the branch: the call, and the columns after it.
VERBS: dict[str, tuple[Callable[[fm.Lake], fm.Commit], list[str]]] = {
    "add": (lambda lake: lake.add_column("events", "level", "int", default=7, branch="dev"), [*OLD, "level"]),
    "rename": (lambda lake: lake.rename_column("events", "name", "title", branch="dev"), ["id", "title", "ts"]),
    "drop": (lambda lake: lake.drop_column("events", "name", branch="dev"), ["id", "ts"]),
}
ROWS = [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}]


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string, ts timestamp")
        lake.append("events", ROWS)
        lake.apply({"events": {"retention": "100000d", "retention_column": "ts"}}, allow_destructive=True)
        lake.branches.create("dev")


def change(place: Place, verb: str) -> str:
    with place.open(actor="child") as lake:
        return VERBS[verb][0](lake).outcome


def change_beside_a_shape(place: Place, verb: str) -> str:
    """Another writer of the branch brings a column while it is built, so that it is planned again."""
    more = [{"id": 3, "name": "three", "more": 1}]
    with (
        place.open(actor="child") as lake,
        at("apply.sealed", lambda: lake.append("events", more, evolve=True, branch="dev")),
    ):
        return VERBS[verb][0](lake).outcome


def columns(lake: fm.Lake, branch: str) -> list[str]:
    names = lake.schema("events", branch=branch).column_names
    return [name for name in names if name not in ("_seq", "more")]


def check_main(place: Place, lake: fm.Lake, expected: list[str]) -> None:
    assert columns(lake, "main") == expected
    with foreign_catalog(place) as catalog:
        theirs = catalog.load_table("default.events").schema().column_names
        assert [name for name in theirs if name not in ("_seq", "more")] == expected
    check_lake(lake.catalog)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_killed_change_of_columns_happens_whole_or_not_at_all(place: Place, verb: str, point: str) -> None:
    run_child(prepare, place)
    child = change_beside_a_shape if point == "apply.planned_again" else change
    assert run_killed(child, place, verb, failpoint=point), f"{point} was never passed"
    done = point in DONE
    for _ in range(2):
        with place.open(actor="test") as lake:
            assert columns(lake, "dev") == (VERBS[verb][1] if done else OLD)
            check_main(place, lake, OLD)
            recovered = [row.outcome for row in lake.audit() if row.kind == "apply"]
            assert recovered == ([] if done else ["rolled_back"])
    if not done:
        assert run_child(change, place, verb) == "committed"
    with place.open(actor="test") as lake:
        assert columns(lake, "dev") == VERBS[verb][1]
        assert lake.branches.merge("dev").outcome == "merged"
        check_main(place, lake, VERBS[verb][1])
        found = lake.read_arrow("events").read_all().to_pylist()
        assert {row["id"] for row in found} >= {1, 2}
        assert {row.get("level", 7) for row in found} == {7}


# ── a merge that brings columns ──


def prepare_merge(place: Place) -> None:
    """On dev a column that main's retention goes by has another name, another has a default; both have new rows."""
    prepare(place)
    with place.open(actor="test") as lake:
        lake.rename_column("events", "ts", "moment", branch="dev")
        lake.drop_column("events", "name", branch="dev")
        lake.add_column("events", "level", "int", default=7, branch="dev")
        lake.append("events", [{"id": 3, "level": 1}], branch="dev")
        lake.append("events", [{"id": 4}])


def merge(place: Place) -> str:
    with place.open(actor="child") as lake:
        return lake.branches.merge("dev").outcome


def policy(lake: fm.Lake) -> Any:
    return lake.catalog.maintenance.policies()[lake.catalog.history.head("events").table_id].column


@pytest.mark.sampled(2)
@pytest.mark.parametrize("point", [point for point in MERGE_POINTS if not point.endswith(("planned_again", "staged"))])
def test_a_killed_merge_brings_columns_and_retention_or_neither(place: Place, point: str) -> None:
    run_child(prepare_merge, place)
    assert run_killed(merge, place, failpoint=point), f"{point} was never passed"
    done = point in DONE
    new = ["id", "moment", "level"]
    with place.open(actor="test") as lake:
        assert policy(lake) == ("moment" if done else "ts")
        check_main(place, lake, new if done else OLD)
        assert lake.branches.merge("dev").outcome == ("up_to_date" if done else "merged")
        assert policy(lake) == "moment"
        check_main(place, lake, new)
        found = {row["id"]: row["level"] for row in lake.read_arrow("events").read_all().to_pylist()}
        assert found == {1: 7, 2: 7, 3: 1, 4: 7}


# ── every call fails in turn ──


class Trial:
    """One lake, round after round: a column of the branch comes or goes, then reaches main, and calls meet a fault."""

    def __init__(self, place: Place, *, merges: bool) -> None:
        self.place = place
        run_child(prepare, place)
        self.lake = place.open(actor="test", storage=FaultyStorage())
        self.merges = merges
        self.number = 0
        self.prepare()

    def prepare(self) -> None:
        if self.merges:
            self.change()

    def change(self) -> fm.Commit:
        if self.number % 2 == 0:
            return self.lake.add_column("events", "level", "int", default=7, branch="dev")
        return self.lake.drop_column("events", "level", branch="dev")

    def act(self) -> fm.Commit:
        if not self.merges:
            return self.change()
        merged = self.lake.branches.merge("dev")
        assert merged.commit is not None
        return merged.commit

    def finish(self, outcome: str) -> None:
        """An error meant that nothing happened: then the same call does it."""
        before, after = (OLD, [*OLD, "level"]) if self.number % 2 == 0 else ([*OLD, "level"], OLD)
        side = "main" if self.merges else "dev"
        assert columns(self.lake, side) == (after if outcome == "committed" else before), outcome
        if outcome != "committed":
            assert self.act().outcome == "committed"
        assert columns(self.lake, side) == after
        check_main(self.place, self.lake, after if self.merges else OLD)
        self.number += 1
        self.prepare()


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("mode", ["before", "after", "torn"])
def test_whichever_call_to_storage_fails_it_is_undone(
    new_place: Callable[[str], Place], mode: str, merges: bool
) -> None:
    outcomes = fail_storage(Trial(new_place("sqlite"), merges=merges), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 2, "hardly any call was counted"


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_commit_fails_or_its_reply_is_lost_it_is_all_or_nothing(
    new_place: Callable[[str], Place], mode: str, merges: bool
) -> None:
    assert len(fail_commits(Trial(new_place("sqlite"), merges=merges), mode)) > 2, "hardly any COMMIT was counted"
