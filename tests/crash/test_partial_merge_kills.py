"""Kill a partial merge at every step: recovery publishes whole rows with the columns that it left out, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.failpoints import FAILPOINTS, WRITE_STEPS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.test_kill_at_every_step import expected_outcome

pytestmark = pytest.mark.mostly_sqlite

State = dict[int, tuple[str | None, int | None, int]]
BEFORE: State = {1: ("a", 1, 1), 2: ("b", 2, 1), 3: ("c", 3, 1)}
PART: list[dict[str, Any]] = [{"id": 1, "name": "A"}, {"id": 2, "age": 20}, {"id": 3, "age": 3}, {"id": 9, "age": 90}]
AFTER: State = {1: ("A", 1, 2), 2: ("b", 20, 2), 3: ("c", 3, 1), 9: (None, 90, 2)}


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", "id long not null, name string, age int", key=["id"])
        rows = [{"id": key, "name": name, "age": age} for key, (name, age, _) in BEFORE.items()]
        lake.append("people", rows)


def merge(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.merge("people", PART, partial=True, batch=batch).outcome


def transaction(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        with lake.transaction("several", batch=batch) as tx:
            tx.merge("people", PART[:2], partial=True)
            tx.merge("people", PART[2:], partial=True)
        assert tx.commit is not None
        return tx.commit.outcome


WRITERS: dict[str, Callable[[Place, str | None], str]] = {"merge": merge, "transaction": transaction}
POINTS = [
    (kind, f"{kind}.{step}")
    for kind in WRITERS
    for step in WRITE_STEPS
    if f"{kind}.{step}" in FAILPOINTS and step != "planned_again"
]


def state(lake: fm.Lake) -> State:
    found = lake.read_arrow("people", with_seq=True).read_all().to_pylist()
    return {row["id"]: (row["name"], row["age"], row["_seq"]) for row in found}


def check(place: Place, outcome: str | None) -> None:
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert sorted(facts.audit.values()) == ([outcome] if outcome else [])
        assert state(lake) == (BEFORE if outcome == "rolled_back" else AFTER)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("database", "batch"), [("sqlite", None), ("sqlite", "monday"), ("postgresql", "monday")])
@pytest.mark.parametrize(("kind", "point"), POINTS)
def test_a_killed_partial_merge_happens_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, kind: str, point: str, batch: str | None
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(WRITERS[kind], place, batch, failpoint=point), f"{point} was never passed"
    outcome = expected_outcome(kind, point, batch)
    check(place, outcome)
    check(place, outcome)
    if batch is not None or outcome == "rolled_back":
        again = run_child(WRITERS[kind], place, batch)
        assert again == ("committed" if outcome == "rolled_back" else "already_committed")
    with place.open() as lake:
        assert state(lake) == AFTER
        check_lake(lake.catalog)


def merge_meddled(place: Place, point: str) -> None:
    """A partial merge beside which another one updates the other column of a row of it."""

    def observe(name: str) -> None:
        if name == point:
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.merge("people", [{"id": 2, "name": "bee"}], partial=True)

    failpoints.observer = observe
    merge(place, "monday")


def test_a_sealed_partial_merge_is_not_rolled_forward_over_a_column_that_changed_since(place: Place) -> None:
    run_child(prepare, place)
    assert run_killed(merge_meddled, place, "merge.rewritten", failpoint="merge.sealed:2")
    with place.open() as lake:
        assert list(check_lake(lake.catalog).audit.values()) == ["rolled_back"]
        assert state(lake) == {**BEFORE, 2: ("bee", 2, 2)}
    assert run_child(merge, place, "monday") == "committed"
    with place.open() as lake:
        assert state(lake) == {1: ("A", 1, 3), 2: ("bee", 20, 3), 3: ("c", 3, 1), 9: (None, 90, 3)}
        check_lake(lake.catalog)


@pytest.mark.parametrize(("point", "outcome"), [("sealed:3", "rolled_forward"), ("planned_again", "rolled_back")])
def test_a_partial_merge_killed_after_planning_again_has_the_newer_columns_or_did_nothing(
    place: Place, point: str, outcome: str
) -> None:
    run_child(prepare, place)
    assert run_killed(merge_meddled, place, "merge.sealed", failpoint=f"merge.{point}")
    with place.open() as lake:
        assert list(check_lake(lake.catalog).audit.values()) == [outcome]
        late = {1: ("A", 1, 3), 2: ("bee", 20, 3), 3: ("c", 3, 1), 9: (None, 90, 3)}
        assert state(lake) == (late if outcome == "rolled_forward" else {**BEFORE, 2: ("bee", 2, 2)})
