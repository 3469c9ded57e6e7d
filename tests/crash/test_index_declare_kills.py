"""Killed around what is done to indexes: declared or not, dropped or not, and the same call again does the rest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids

pytestmark = [pytest.mark.mostly_sqlite, pytest.mark.whole]

WANTED: dict[str, Any] = {
    "events": {"index": ["customer", ["id", "customer"]]},
    "orders": {"columns": {"id": "long", "customer": "string"}, "key": ["id"], "index": ["customer"]},
}
APPLY_POINTS = [name for name, kind in FAILPOINTS.items() if kind == "apply" and not name.endswith("planned_again")]
DONE = {"apply.published", "apply.cleaned"}


@pytest.fixture
def made(place: Place) -> Place:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long, customer string")
        lake.append("events", [{"id": 1, "customer": "a"}])
    return place


def create(place: Place) -> str:
    with place.open() as lake:
        return lake.indexes.create("events", on="customer").outcome


def drop(place: Place) -> str:
    with place.open() as lake:
        return lake.indexes.drop("events", on="customer").outcome


def apply(place: Place) -> str:
    with place.open() as lake:
        return lake.apply(WANTED).outcome


def append(place: Place) -> str:
    with place.open() as lake:
        return lake.append("events", [{"id": 2, "customer": "b"}]).outcome


def on(place: Place) -> list[tuple[str, tuple[str, ...]]]:
    with place.open(read_only=True) as lake:
        return [(one.table, one.on) for one in lake.indexes.list() if one.kind == "value"]


def segments(place: Place) -> list[str]:
    return [name for _, _, names in os.walk(Path(place.path)) for name in names if name.endswith(".index")]


def test_killed_once_an_index_is_declared_or_dropped_the_same_call_has_nothing_to_do(made: Place) -> None:
    assert run_killed(create, made, failpoint="index.declared")
    assert on(made) == [("events", ("customer",))]
    assert run_child(create, made) == "nothing_to_do"
    assert run_child(append, made) == "committed"
    assert run_killed(drop, made, failpoint="index.dropped")
    assert on(made) == []
    with made.open() as lake:
        with pytest.raises(Exception, match="no such index"):
            lake.indexes.drop("events", on="customer")
        lake.append("events", [{"id": 3, "customer": "c"}])
        check_lake(lake.catalog)
    assert len(segments(made)) == 1  # retired: a sweep deletes it


@pytest.mark.parametrize("point", APPLY_POINTS)
def test_an_apply_has_declared_the_indexes_of_what_it_published_and_no_others(made: Place, point: str) -> None:
    if not run_killed(apply, made, failpoint=point):
        return  # not a step of this apply
    before = on(made)
    assert len(before) == (3 if point in DONE else 0)
    assert run_child(apply, made) == ("nothing_to_do" if point in DONE else "committed")
    assert on(made) == [("events", ("customer",)), ("events", ("id", "customer")), ("orders", ("customer",))]
    with made.open() as lake:
        assert len(lake.audit()) == (0 if point in DONE else 1)
        check_lake(lake.catalog)


def test_an_apply_of_indexes_alone_is_all_or_nothing(made: Place) -> None:
    run_child(apply, made)
    with made.open() as lake:
        lake.indexes.drop("events", on="customer")
        lake.indexes.drop("orders", on="customer")
        version = lake.status()["version"]
    assert run_killed(apply, made, failpoint="index.declared")
    assert len(on(made)) == 3
    assert run_child(apply, made) == "nothing_to_do"
    with made.open() as lake:
        assert lake.status()["version"] == version
        assert lake.audit() == []


def test_a_writer_that_dies_with_its_segments_written_leaves_none(made: Place) -> None:
    run_child(create, made)
    assert run_killed(append, made, failpoint="index.written")
    assert len(segments(made)) == 1
    with made.open() as lake:
        assert ids(lake) == [1]
        assert [row.outcome for row in lake.audit()] == ["rolled_back"]
        assert segments(made) == []
        check_lake(lake.catalog)
    assert run_child(append, made) == "committed"
    assert len(segments(made)) == 1
