"""Indexes in a file that declares tables, on every database: steps of a plan, declared with the tables or alone."""

from __future__ import annotations

from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.children import Child, run_child
from tests.conftest import Place
from tests.contract.test_catalog_lifecycle import content
from tests.contract.test_indexes import covered, on, row, shop

__all__ = ["shop"]


def test_a_file_declares_indexes_without_a_version_and_twice_is_nothing(shop: fm.Lake) -> None:
    shop.append("events", [row(1)])
    wanted = {"events": {"index": ["customer", ["country", "n"], "tags"]}}
    version = shop.status()["version"]
    plan = shop.plan(wanted)
    assert [(step.action, step.column, step.kind) for step in plan.steps] == [
        ("add_index", "customer", "safe"),
        ("add_index", "country, n", "safe"),
        ("add_index", "tags", "safe"),
    ]
    commit = shop.apply(wanted)
    assert (commit.outcome, commit.version, commit.operation) == ("declared", version, None)
    assert shop.status()["version"] == version
    assert shop.apply(wanted).outcome == "nothing_to_do"
    assert shop.plan(wanted).outcome == "nothing_to_do"
    shop.append("events", [row(2)])
    assert covered(shop, "events")["tags",] == (1, 2, 1, 2)
    # Without the key indexes stay; one that is not listed goes; an empty list removes all.
    assert shop.plan({"events": {"comment": ""}}).outcome == "nothing_to_do"
    assert shop.apply({"events": {"index": ["customer", ["n", "country"]]}}).outcome == "declared"
    assert [one.on for one in shop.indexes.list("events")] == [("country", "n"), ("customer",)]
    assert [step.text for step in shop.plan({"events": {"index": []}}).steps] == [
        "no index on customer",
        "no index on country, n",
    ]
    empty = shop.plan({"events": {"index": []}})
    secrets = [one.secret for one in shop.catalog.indexes.all()]
    assert not any(secret in f"{empty} {empty.tables} {empty.as_dict()}" for secret in secrets)
    assert shop.apply({"events": {"index": []}}).outcome == "declared"
    assert on(shop, "events") == []


def test_indexes_are_declared_in_the_publish_of_the_tables_that_are_made_with_them(shop: fm.Lake) -> None:
    orders = {"columns": {"id": "long", "customer": "string"}, "key": ["id"], "index": ["customer", "id"]}
    commit = shop.apply({"orders": orders, "events": {"index": ["n"], "comment": "what happened"}})
    assert (commit.outcome, {one.table for one in commit.tables}) == ("committed", {"events", "orders"})
    assert on(shop) == [
        ("events", ("n",), "live"),
        ("orders", ("id",), "live"),
        ("orders", ("customer",), "live"),
        ("users", ("id",), "live"),
    ]
    shop.append("orders", [{"id": 1, "customer": "a"}])
    assert covered(shop, "orders") == {("id",): (1, 1, 1, 1), ("customer",): (1, 1, 1, 1)}
    # A list without the key's index does not drop it, and one with it makes it again.
    assert shop.plan({"orders": {"index": ["customer"]}}).outcome == "nothing_to_do"
    shop.indexes.drop("orders", on="id")
    assert shop.plan({"orders": {"index": ["customer"]}}).outcome == "nothing_to_do"
    assert shop.apply({"orders": {"index": ["customer", "id"]}}).outcome == "declared"
    assert [one.state for one in shop.indexes.list("orders")] == ["live", "live"]


def test_an_index_that_cannot_be_is_a_refused_step_and_nothing_is_done(shop: fm.Lake) -> None:
    wanted = {"events": {"index": ["customer", "m", "nope"], "comment": "new"}}
    plan = shop.plan(wanted)
    assert [(step.column, step.kind) for step in plan.steps if step.action == "add_index"] == [
        ("m", "refused"),
        ("nope", "refused"),
        ("customer", "safe"),
    ]
    with pytest.raises(fm.Invalid, match="cannot be done"):
        shop.apply(wanted)
    assert shop.catalog.indexes.all() == []
    assert shop.show("events")["comment"] == ""


def test_a_plan_is_not_stale_because_another_process_declared_its_index(shop: fm.Lake) -> None:
    plan = shop.plan({"events": {"index": ["customer"], "comment": "new"}})
    shop.indexes.create("events", on="customer")
    assert shop.apply(plan).outcome == "committed"
    plan = shop.plan({"events": {"index": ["customer", "n"]}})
    shop.append("events", [row(1)])
    with pytest.raises(fm.Conflict, match="the lake changed since"):
        shop.apply(plan)
    assert shop.apply({"events": {"index": ["customer", "n"]}}, expect=None).outcome == "declared"


def test_a_column_that_refers_to_a_table_gets_an_index_and_keeps_it(shop: fm.Lake) -> None:
    orders: dict[str, Any] = {"columns": {"id": "long", "user": "long"}}
    shop.apply({"orders": orders})
    shop.apply({"orders": {"references": {"user": "users.id"}}})
    assert on(shop, "orders") == [("orders", ("user",), "live")]
    shop.append("users", [{"id": 1, "name": "x"}])
    shop.append("orders", [{"id": 1, "user": 1}])
    assert covered(shop, "orders") == {("user",): (1, 1, 1, 1)}
    assert shop.plan({"orders": {"index": []}}).outcome == "nothing_to_do"
    # One that was dropped by hand stays away until it is named.
    shop.indexes.drop("orders", on="user")
    assert shop.plan({"orders": {"references": {"user": "users.id"}}}).outcome == "nothing_to_do"
    assert shop.apply({"orders": {"index": ["user"]}}).outcome == "declared"
    assert shop.apply({"orders": {"references": {}, "index": []}}).outcome == "committed"
    assert on(shop, "orders") == []


def declare_in_child(place: Place) -> str:
    with place.open() as lake:
        return lake.apply(
            {"orders": {"columns": {"id": "long", "customer": "string"}, "index": ["customer", "id"]}}
        ).outcome


def test_two_processes_that_apply_the_same_file_do_it_once(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("orders", "id long")
    children = [Child(declare_in_child, place) for _ in range(2)]
    assert sorted(str(child.wait()) for child in children) == ["committed", "nothing_to_do"]
    assert run_child(declare_in_child, place) == "nothing_to_do"
    assert len(content(place)["fm_indexes"]) == 2
