"""Kill a repair at every failpoint; heal: the table is as the other writer left it, or repaired, nothing between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.foreign_writer import by_another, foreign_catalog, theirs

pytestmark = [pytest.mark.mostly_sqlite, pytest.mark.whole]

POINTS = [("accept", name) for name, kind in FAILPOINTS.items() if kind == "repair"]
POINTS += [("revert", name) for name in ("repair.sealed", "repair.moved", "repair.published")]
DONE = ("repair.published", "repair.cleaned")
BEFORE = {1: "a", 2: "b", 3: "c"}
THEIRS = {2: "bee", 3: "c", 9: "i"}


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", "id long not null, name string", key=["id"])
        lake.append("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        lake.append("people", [{"id": 3, "name": "c"}])
    by_another(place, "people", lambda table: table.overwrite(theirs(k2="bee", k9="i"), "id < 3"))


def repair(place: Place, choice: str) -> str:
    with place.open(actor="operator", recover=False) as lake:
        return lake.repair("people", choice=choice, apply=True)[0].outcome


def pointer(place: Place) -> str:
    with foreign_catalog(place) as catalog:
        return catalog.load_table("default.people").metadata_location


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize(("choice", "point"), POINTS)
def test_a_killed_repair_has_happened_or_not(
    new_place: Callable[[str], Place], database: str, choice: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    foreign = pointer(place)
    assert run_killed(repair, place, choice, failpoint=point), f"{point} was never passed"
    with place.open(recover=False) as lake:
        lake.recover()
        happened = point in DONE
        assert (pointer(place) != foreign) is happened
        assert [one.outcome for one in lake.repair()] == ([] if happened else ["planned"])
        if not happened:
            assert [row.outcome for row in lake.audit()] == ["rolled_back"]
    done = "accepted" if choice == "accept" else "reverted"
    assert repair(place, choice) == ("nothing_to_do" if happened else done)
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert sorted(facts.audit.values()) == sorted([done, *([] if happened else ["rolled_back"])])
        rows = lake.read_arrow("people").read_all().to_pylist()
        assert {row["id"]: row["name"] for row in rows} == (THEIRS if choice == "accept" else BEFORE)
        feed = {(row["id"], row["_change"]) for row in lake.changes("people", 2).arrow().read_all().to_pylist()}
        expected = {(2, "upsert"), (9, "upsert"), (1, "delete")} if choice == "accept" else set()
        assert feed == expected
        lake.append("people", [{"id": 50, "name": "on"}])
        assert lake.status()["health"] == "fine"
