"""Kill a process at every step of making, deleting and merging branches: the old lake or the new, never a mixture.

A lake that is open in another process all the while goes on with what is true then, without opening it again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, at, ids, rows

pytestmark = pytest.mark.whole

preload(
    "tests.conftest",
    "floodmark.branches.merge",
    "floodmark.branches.diff",
    "floodmark.branches.branches",
    "floodmark.maintenance.sweep",
)

MERGE_POINTS = [point for point, kind in FAILPOINTS.items() if kind == "branch_merge"]
HAPPENED = ("branch_merge.published", "branch_merge.cleaned")
State = dict[str, list[tuple[int, str]]]


def prepare(place: Place) -> None:
    """On dev: rows changed, deleted and added in a keyed table, rows appended to another, and a table of its own."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        lake.create_table("events", EVENTS)
        lake.append("people", rows(1, 2, 3, 4))
        lake.append("events", rows(1))
        lake.branches.create("dev")
        lake.merge("people", [{"id": 1, "name": "dev"}, {"id": 9, "name": "new"}], branch="dev")
        lake.delete("people", "id = 2", branch="dev")
        lake.append("events", rows(2, 3), branch="dev")
        lake.create_table("side", EVENTS, branch="dev")
        lake.append("side", rows(7), branch="dev")
        lake.merge("people", [{"id": 3, "name": "main"}])
        lake.append("events", rows(4))


def pair(number: int, name: str | None = None) -> tuple[int, str]:
    return number, name or f"row {number}"


OLD: State = {
    "people": [pair(1), pair(2), pair(3, "main"), pair(4)],
    "events": [pair(1), pair(4)],
}
DEV: State = {
    "people": [pair(1, "dev"), pair(3), pair(4), pair(9, "new")],
    "events": [pair(1), pair(2), pair(3)],
    "side": [pair(7)],
}
NEW: State = {
    "people": [pair(1, "dev"), pair(3, "main"), pair(4), pair(9, "new")],
    "events": [pair(1), pair(2), pair(3), pair(4)],
    "side": [pair(7)],
}


def state(lake: fm.Lake, branch: str = "main") -> State:
    found: State = {}
    for head in lake.heads(branch):
        table = lake.read_arrow(head.table, branch=branch).read_all().to_pylist()
        found[head.table] = sorted((row["id"], row["name"]) for row in table)
    return found


def outcomes(lake: fm.Lake) -> list[str]:
    return sorted(row.outcome for row in lake.audit())


# ── making and deleting ──


def create(place: Place) -> None:
    with place.open() as lake:
        lake.branches.create("more", source="dev")


def remove(place: Place) -> None:
    with place.open() as lake:
        lake.branches.delete("dev")


@pytest.mark.parametrize("point", ["branch.creating", "branch.created"])
def test_a_killed_maker_of_a_branch_made_it_or_not(place: Place, point: str) -> None:
    run_child(prepare, place)
    with place.open() as open_lake:
        assert run_killed(create, place, failpoint=point)
        made = point == "branch.created"
        with place.open() as lake:
            assert ("more" in {branch.name for branch in lake.branches.list()}) is made
            assert outcomes(lake) == []
            check_lake(lake.catalog)
        if made:
            with pytest.raises(fm.Invalid):
                open_lake.branches.create("more", source="dev")
        else:
            open_lake.branches.create("more", source="dev")
        assert state(open_lake, "more") == DEV
        open_lake.append("events", rows(30), branch="more")
        assert state(open_lake, "dev") == DEV
        check_lake(open_lake.catalog)


@pytest.mark.parametrize("point", ["branch.deleting", "branch.deleted"])
def test_a_killed_deleter_of_a_branch_deleted_it_or_not(place: Place, point: str) -> None:
    run_child(prepare, place)
    with place.open() as open_lake:
        assert run_killed(remove, place, failpoint=point)
        with place.open() as lake:
            assert outcomes(lake) == []
            check_lake(lake.catalog)
        if point == "branch.deleting":
            assert state(open_lake, "dev") == DEV
            open_lake.append("events", rows(30), branch="dev")
            assert open_lake.branches.merge("dev").outcome == "merged"
            open_lake.branches.delete("dev")
        with pytest.raises(fm.NotFound):
            open_lake.append("events", rows(31), branch="dev")
        with pytest.raises(fm.NotFound):
            open_lake.branches.merge("dev")
        open_lake.branches.create("dev")
        assert state(open_lake, "dev") == state(open_lake)
        check_lake(open_lake.catalog)


# ── merging ──


def merge(place: Place) -> str:
    with place.open() as lake:
        return lake.branches.merge("dev").outcome


def merge_moved(place: Place) -> str:
    """The target moves under the merge, so that all of it is planned again."""
    with (
        place.open() as lake,
        place.open() as other,
        at("branch_merge.sealed", lambda: other.append("events", rows(5))),
    ):
        return lake.branches.merge("dev").outcome


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", [point for point in MERGE_POINTS if not point.endswith("planned_again")])
def test_a_killed_merge_happens_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    with place.open() as open_lake:
        mark = open_lake.catalog.history.head("people").sequence
        assert run_killed(merge, place, failpoint=point), f"{point} was never passed"
        happened = point in HAPPENED
        expected, audit = (NEW, []) if happened else (OLD, ["rolled_back"])
        # Before anything is healed: whoever reads sees one or the other.
        assert state(open_lake) == expected
        for _ in range(2):
            with place.open() as lake:
                assert (state(lake), state(lake, "dev")) == (expected, DEV)
                assert outcomes(lake) == audit
                check_lake(lake.catalog)
        assert open_lake.branches.merge("dev").outcome == ("up_to_date" if happened else "merged")
        assert (state(open_lake), state(open_lake, "dev")) == (NEW, DEV)
        found = open_lake.changes("people", mark).arrow().read_all().to_pylist()
        assert {(row["id"], row["_change"]) for row in found} == {(1, "upsert"), (9, "upsert"), (2, "delete")}
        assert open_lake.branches.merge("main", into="dev").outcome == "merged"
        assert state(open_lake, "dev") == NEW
        assert outcomes(open_lake) == audit
        check_lake(open_lake.catalog)


def take_main(place: Place) -> str:
    with place.open() as lake:
        return lake.branches.merge("main", into="dev").outcome


def give_default(place: Place) -> None:
    """Main gets a column with a default in both tables: dev's own rows are filled when it comes down to them."""
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    wanted = {"columns": {**columns, "extra": {"type": "int", "required": True, "default": 7}}}
    with place.open() as lake:
        lake.apply({"people": wanted, "events": wanted})


def extras(lake: fm.Lake) -> set[tuple[str, int | None]]:
    return {
        (table, row.get("extra"))
        for table in ("people", "events")
        for row in lake.read_arrow(table, branch="dev").read_all().to_pylist()
    }


# The first time nothing but fills of one table, then those of the other, is on disk.
@pytest.mark.parametrize(
    "point",
    [*(point for point in MERGE_POINTS if not point.endswith("planned_again")), "branch_merge.rewritten:2"],
)
def test_a_killed_merge_that_fills_rows_fills_all_of_them_or_none(
    new_place: Callable[[str], Place], point: str
) -> None:
    place = new_place("sqlite")
    run_child(prepare, place)
    run_child(give_default, place)
    assert run_killed(take_main, place, failpoint=point), f"{point} was never passed"
    taken = {"people": [pair(1, "dev"), pair(3, "main"), pair(4), pair(9, "new")], "events": NEW["events"]}
    happened = point in HAPPENED
    with place.open() as lake:
        filled = {("people", 7), ("events", 7)} if happened else {("people", None), ("events", None)}
        assert (extras(lake), state(lake, "dev")) == (filled, {**DEV, **taken} if happened else DEV)
        assert outcomes(lake) == ([] if happened else ["rolled_back"])
        check_lake(lake.catalog)
        assert lake.branches.merge("main", into="dev").outcome == ("up_to_date" if happened else "merged")
        assert (extras(lake), state(lake, "dev")) == ({("people", 7), ("events", 7)}, {**DEV, **taken})
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["planned_again", "begun:2", "sealed:2", "published"])
def test_a_merge_that_is_killed_while_it_is_planned_again_happens_whole_or_not_at_all(place: Place, point: str) -> None:
    run_child(prepare, place)
    assert run_killed(merge_moved, place, failpoint=f"branch_merge.{point}")
    moved = {"events": [pair(5)]}
    with place.open() as lake:
        # The first try was undone by its own process, which needs no report.
        assert outcomes(lake) == (["rolled_back"] if point.endswith(":2") else [])
        base = NEW if point == "published" else OLD
        assert state(lake) == {**base, "events": sorted([*base["events"], *moved["events"]])}
        check_lake(lake.catalog)
        assert lake.branches.merge("dev").outcome == ("up_to_date" if point == "published" else "merged")
        assert state(lake) == {**NEW, "events": sorted([*NEW["events"], *moved["events"]])}
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["branch_merge.begun", "branch_merge.sealed", "branch_merge.moved"])
def test_a_killed_merge_whose_source_is_deleted_then_is_rolled_back(place: Place, point: str) -> None:
    run_child(prepare, place)
    assert run_killed(merge, place, failpoint=point)
    with place.open(recover=False) as lake:
        lake.catalog.branches.delete("dev")
    for _ in range(2):
        with place.open() as lake:
            assert (state(lake), outcomes(lake)) == (OLD, ["rolled_back"])
            check_lake(lake.catalog)
            with pytest.raises(fm.NotFound):
                lake.branches.merge("dev")


def three_at_once(place: Place) -> None:
    """A merge that has begun, in the middle of it an append that has staged, and in that one that is sealed."""
    with place.open() as one, place.open() as two, place.open() as three:

        def seal() -> None:
            three.append("events", rows(50), branch="dev", batch="monday")

        def stage() -> None:
            with at("append.staged", seal):
                two.append("events", rows(51), branch="dev")

        with at("branch_merge.begun", stage):
            one.branches.merge("main", into="dev")


def test_operations_of_a_deleted_branch_that_died_are_discarded_with_one_report_each(place: Place) -> None:
    run_child(prepare, place)
    assert run_killed(three_at_once, place, failpoint="append.sealed")
    with place.open(recover=False) as lake:
        lake.catalog.branches.delete("dev")
        with pytest.raises(fm.Busy):
            lake.catalog.branches.create("dev", actor="test")
    for _ in range(2):
        with place.open() as lake:
            assert outcomes(lake) == ["discarded"] * 3
            assert state(lake) == OLD
            check_lake(lake.catalog)
    with place.open() as lake:
        lake.branches.create("dev")
        # The identity belonged to the branch that is gone.
        assert lake.append("events", rows(50), branch="dev", batch="monday").outcome == "committed"
        assert ids(lake) == [1, 4]
        lake.maintain.expire(keep="0s")
        lake.maintain.sweep(grace="0s", deep=True)
        assert state(lake) == OLD
        check_lake(lake.catalog)


def test_every_failpoint_of_branches_is_killed_here() -> None:
    kinds = {point for point, kind in FAILPOINTS.items() if kind in ("branch", "branch_merge")}
    here = {"branch.creating", "branch.created", "branch.deleting", "branch.deleted", *MERGE_POINTS}
    assert kinds == here
