"""Killed at every step of an apply: the old shape of all tables or the new one, and whoever comes next goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import select

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.database import SQLITE_NAME
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at

pytestmark = [pytest.mark.mostly_sqlite, pytest.mark.whole]

POINTS = [name for name, kind in FAILPOINTS.items() if kind == "apply"]
# From here on it has happened; before that nothing has, and a healer does not finish it.
DONE = {"apply.published", "apply.cleaned"}
BEFORE: dict[str, Any] = {
    "users": {"columns": {"id": "long", "name": "string"}, "key": ["id"]},
    "orders": {"columns": {"id": "long", "user": "long"}},
    "scrap": {"columns": {"id": "long"}},
}
AFTER: dict[str, Any] = {
    "users": {
        "columns": {
            "id": "long",
            "title": {"type": "string", "renamed_from": "name"},
            "level": {"type": "int", "default": 7, "required": True},
        }
    },
    "orders": {
        "columns": {"id": "long", "user": "long"},
        "partition": ["bucket(2, id)"],
        "key": ["id"],
        "references": {"user": "users.id"},
        "retention": "1000000 rows",
    },
    "scrap": {"drop": True},
    "places": {"columns": {"id": "long"}},
}
OLD = {"users": {"id", "name"}, "orders": {"id", "user"}, "scrap": {"id"}}
NEW = {"users": {"id", "title", "level"}, "orders": {"id", "user"}, "places": {"id"}}


@pytest.fixture
def made(place: Place) -> Place:
    with place.open(create=True, actor="test") as lake:
        lake.apply(BEFORE, allow_destructive=True)
        lake.append("users", [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}])
        lake.append("orders", [{"id": 1, "user": 1}])
        lake.append("scrap", [{"id": 1}])
    return place


def apply_in_child(place: Place, rows_come: bool) -> str:
    with place.open(actor="child") as lake:
        if not rows_come:
            return lake.apply(AFTER, allow_destructive=True).outcome
        with at("apply.sealed", lambda: lake.append("users", [{"id": 3, "name": "three"}])):
            return lake.apply(AFTER, allow_destructive=True).outcome


def shape(lake: fm.Lake) -> dict[str, set[str]]:
    """The tables and their columns, by the catalog and by the files that it names."""
    heads = lake.catalog.history.tables_at(lake.catalog.history.resolve())
    assert set(heads) == {head.table for head in lake.heads()}
    return {name: set(lake.read_arrow(name).schema.names) for name in heads}


def seen_by_pyiceberg(place: Place) -> dict[str, set[str]]:
    uri = place.catalog or f"sqlite:///{Path(place.path, SQLITE_NAME)}"
    catalog = SqlCatalog("floodmark", uri=uri, warehouse=f"file://{place.path}")
    try:
        names = [name for _, name in catalog.list_tables("default")]
        return {
            name: set(catalog.load_table(f"default.{name}").scan().to_arrow().column_names) - {"_seq"} for name in names
        }
    finally:
        catalog.engine.dispose()


def check_new(lake: fm.Lake, users: int) -> None:
    rows = sorted(lake.read_arrow("users").read_all().to_pylist(), key=lambda row: row["id"])
    assert [row["level"] for row in rows] == [7] * users
    head = lake.catalog.history.head("orders")
    assert (head.spec_id, lake.show("orders")["key"]) == (1, ["id"])
    assert lake.catalog.maintenance.policy(head.table_id).retention == "1000000 rows"
    with pytest.raises(fm.Invalid):
        lake.append("orders", [{"id": 9, "user": 99}])


@pytest.mark.parametrize("point", POINTS)
def test_the_old_shape_or_the_new_and_never_a_mixture(made: Place, point: str) -> None:
    again = point == "apply.planned_again"
    assert run_killed(apply_in_child, made, again, failpoint=point), f"{point} was never passed"
    users = 3 if again else 2
    for _ in range(2):
        with made.open(actor="test") as lake:
            check_lake(lake.catalog)
            done = point in DONE
            assert shape(lake) == (NEW if done else OLD)
            assert seen_by_pyiceberg(made) == (NEW if done else OLD)
            assert len(lake.read_arrow("users").read_all()) == users
            healed = [row for row in lake.audit() if row.kind == "apply"]
            assert [row.outcome for row in healed] == ([] if done else ["rolled_back"])
            if done:
                check_new(lake, users)
    with made.open(actor="test") as lake:
        assert lake.apply(AFTER, allow_destructive=True).outcome == ("nothing_to_do" if done else "committed")
        assert shape(lake) == NEW
        assert seen_by_pyiceberg(made) == NEW
        check_new(lake, users)
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", [point for point in POINTS if point != "apply.planned_again"])
def test_a_writer_that_has_the_lake_open_goes_on_in_the_recovered_shape(made: Place, point: str) -> None:
    with made.open(actor="writer") as lake:
        # It knows the table as it was, and has its files and metadata at hand.
        lake.merge("users", [{"id": 2, "name": "zwei"}])
        assert run_killed(apply_in_child, made, False, failpoint=point)
        old, new = {"id": 3, "name": "three"}, {"id": 4, "title": "four"}
        right, wrong = (new, old) if point in DONE else (old, new)
        with pytest.raises(fm.Invalid):
            lake.append("users", [wrong])
        lake.append("users", [right])
        assert shape(lake) == (NEW if point in DONE else OLD)
        found = {row["id"]: row.get("level") for row in lake.read_arrow("users").read_all().to_pylist()}
        assert set(found) == {1, 2, right["id"]}
        assert set(found.values()) == ({7} if point in DONE else {None})
        assert lake.apply(AFTER, allow_destructive=True).outcome == ("nothing_to_do" if point in DONE else "committed")
        check_lake(lake.catalog)


def apply_with_a_turn(place: Place) -> None:
    """Rows come at every try, so that the second one takes the tables' turn."""
    numbers = iter(range(3, 100))
    with place.open(actor="child") as lake:

        def observe(name: str) -> None:
            if name == "apply.sealed":
                lake.append("users", [{"id": next(numbers), "name": "more"}])

        failpoints.observer = observe
        lake.apply(AFTER, allow_destructive=True)


def turns(lake: fm.Lake) -> int:
    with lake.catalog.database.read() as tx:
        return len(tx.execute(select(tables.turns)).all())


def test_an_apply_that_died_with_the_turn_does_not_stop_the_next(made: Place) -> None:
    assert run_killed(apply_with_a_turn, made, failpoint="apply.planned_again:2")
    with made.open(read_only=True) as lake:
        assert turns(lake) > 0, "it did not hold a turn"
    # Each in a process of its own: the lease of a turn is longer than this may take.
    assert run_child(apply_in_child, made, False) == "committed"
    with made.open(actor="test") as lake:
        assert turns(lake) == 0
        assert shape(lake) == NEW
        check_new(lake, 4)
        check_lake(lake.catalog)
