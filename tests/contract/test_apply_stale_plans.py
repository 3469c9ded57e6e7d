"""Schema as code against whoever changes the lake between the plan and its publish; and what a plan's id tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table.metadata import TableMetadata

import floodmark as fm
from floodmark.catalog.maintenance_state import Policy
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at

pytestmark = pytest.mark.mostly_sqlite

PAIR = {"columns": {"id": "long", "a": "int", "b": "int"}}


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        yield lake
        check_lake(lake.catalog)


def read(lake: fm.Lake, table: str = "t", **moment: Any) -> list[dict[str, Any]]:
    return sorted(lake.read_arrow(table, **moment).read_all().to_pylist(), key=lambda row: row["id"])


def metadata(lake: fm.Lake, table: str = "t") -> TableMetadata:
    return lake.catalog.files.metadata(lake.catalog.history.head(table).metadata_location)


def names(lake: fm.Lake, table: str = "t") -> list[str]:
    return [field.name for field in metadata(lake, table).schema().fields if not field.name.startswith("_")]


# ── what a plan's id tells ──

TIMES = {"columns": {**PAIR["columns"], "x": "timestamp", "y": "timestamp"}}
MADE = {"columns": {"id": "long", "v": "int"}}
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "columns of a new table": ({"new": MADE}, {"new": {"columns": {"x": "string", "y": "int"}}}),
    "type in a new table": ({"new": MADE}, {"new": {"columns": {"id": "long", "v": "long"}}}),
    "partition of a new table": ({"new": MADE}, {"new": {**MADE, "partition": ["v"]}}),
    "sort of a new table": ({"new": {**MADE, "sort": ["v"]}}, {"new": {**MADE, "sort": ["id"]}}),
    "default in a new table": (
        {"new": {"columns": {"id": "long", "v": {"type": "int", "default": 1}}}},
        {"new": {"columns": {"id": "long", "v": {"type": "int", "default": 2}}}},
    ),
    "comment of a table": ({"t": {"comment": "one"}}, {"t": {"comment": "two"}}),
    "comment of a column": (
        {"t": {"columns": {**PAIR["columns"], "a": {"type": "int", "comment": "one"}}}},
        {"t": {"columns": {**PAIR["columns"], "a": {"type": "int", "comment": "two"}}}},
    ),
    "column of the retention": (
        {"t": {**TIMES, "retention": "9d", "retention_column": "x"}},
        {"t": {**TIMES, "retention": "9d", "retention_column": "y"}},
    ),
}


@pytest.mark.parametrize("unlike", UNLIKE.values(), ids=UNLIKE.keys())
def test_plans_that_do_something_else_have_other_ids(lake: fm.Lake, unlike: tuple[Any, Any]) -> None:
    lake.apply({"t": PAIR}, allow_destructive=True)
    agreed, other = unlike
    plan = lake.plan(agreed)
    assert plan.id == lake.plan(agreed).id != lake.plan(other).id
    with pytest.raises(fm.Conflict, match="the plan is not the expected one"):
        lake.apply(other, expect=plan.id, allow_destructive=True)
    assert lake.apply(agreed, expect=plan.id, allow_destructive=True).outcome == "committed"


def test_a_new_table_is_told_with_its_columns_and_layout(lake: fm.Lake) -> None:
    columns = {"id": "long", "v": {"type": "string", "required": True}, "n": {"type": "int", "default": 7}}
    (step,) = lake.plan({"t": {"columns": columns, "key": ["id"], "partition": ["v"], "sort": ["n desc"]}}).steps
    for word in ("id long not null", "v string not null", "n int default 7", "key id", "partition v", "sort n desc"):
        assert word in step.text


# ── races ──


def test_two_sort_orders_at_once_one_is_told_that_it_is_late(lake: fm.Lake) -> None:
    lake.apply({"t": PAIR}, allow_destructive=True)
    plan = lake.plan({"t": {"sort": ["a"]}})
    with (
        pytest.raises(fm.Conflict, match="changed since"),
        at("apply.sealed", lambda: lake.apply({"t": {"sort": ["b"]}}, allow_destructive=True)),
    ):
        lake.apply(plan, allow_destructive=True)
    assert lake.plan({"t": {"sort": ["b"]}}).outcome == "nothing_to_do"
    # Of a file: one after the other.
    with at("apply.sealed", lambda: lake.apply({"t": {"sort": ["b", "a"]}}, allow_destructive=True)):
        assert lake.apply({"t": {"sort": ["a"]}}, allow_destructive=True).outcome == "committed"
    assert lake.plan({"t": {"sort": ["a"]}}).outcome == "nothing_to_do"


def test_a_column_that_rows_came_to_be_partitioned_by_stays(lake: fm.Lake) -> None:
    lake.create_table("t", "id long, part string, n int", partition=["part"])
    wanted = {"t": {"columns": {"id": "long", "n": "int"}, "partition": []}}
    row = {"id": 1, "part": "a", "n": 2}
    with pytest.raises(fm.Invalid, match="partitioned by it"), at("apply.sealed", lambda: lake.append("t", [row])):
        lake.apply(wanted, allow_destructive=True)
    assert read(lake) == [row]
    assert names(lake) == ["id", "part", "n"]
    assert lake.delete("t", "id = 1").outcome == "committed"


def test_a_column_that_the_table_came_to_be_sorted_by_stays(lake: fm.Lake) -> None:
    lake.apply({"t": PAIR}, allow_destructive=True)
    wanted = {"t": {"columns": {"id": "long", "b": "int"}}}
    with (
        pytest.raises(fm.Invalid, match="sorted by it"),
        at("apply.sealed", lambda: lake.apply({"t": {"sort": ["a"]}}, allow_destructive=True)),
    ):
        lake.apply(wanted, allow_destructive=True)
    assert names(lake) == ["id", "a", "b"]


@pytest.mark.parametrize("handed", [False, True], ids=["file", "plan"])
def test_retention_that_came_by_the_old_name_goes_with_the_rename_or_stops_it(lake: fm.Lake, handed: bool) -> None:
    lake.create_table("t", "id long, ts timestamp")
    wanted = {"t": {"columns": {"id": "long", "at": {"type": "timestamp", "renamed_from": "ts"}}}}
    source = lake.plan(wanted) if handed else wanted

    def keep() -> None:
        lake.apply({"t": {"retention": "90d", "retention_column": "ts"}}, allow_destructive=True)

    table_id = lake.catalog.history.head("t").table_id
    if handed:
        with pytest.raises(fm.Conflict), at("apply.sealed", keep):
            lake.apply(source, allow_destructive=True)
        assert lake.catalog.maintenance.policy(table_id) == Policy("90d", "ts")
        assert names(lake) == ["id", "ts"]
        return
    with at("apply.sealed", keep):
        assert lake.apply(source, allow_destructive=True).outcome == "committed"
    assert lake.catalog.maintenance.policy(table_id) == Policy("90d", "at")
    assert lake.plan({"t": {"retention": "90d"}}).outcome == "nothing_to_do"


@pytest.mark.parametrize(
    "wanted",
    [{"id": "long", "b": "int", "c": {"type": "int", "renamed_from": "a"}}, {"id": "long", "b": "int"}],
    ids=["rename", "drop"],
)
def test_a_sink_that_came_to_name_the_column_stops_it(lake: fm.Lake, tmp_path: Path, wanted: dict[str, Any]) -> None:
    lake.apply({"t": PAIR}, allow_destructive=True)

    def follow() -> None:
        lake.sinks.add("files", "files", tables="t", path=str(tmp_path / "out"), columns=["id", "a"])

    with pytest.raises(fm.Invalid, match="sink files names it"), at("apply.sealed", follow):
        lake.apply({"t": {"columns": wanted}}, allow_destructive=True)
    assert names(lake) == ["id", "a", "b"]
    # A sink that does not name it is no reason.
    lake.sinks.remove("files")
    other = {"tables": "t", "path": str(tmp_path / "other"), "columns": ["id"]}
    with at("apply.sealed", lambda: lake.sinks.add("other", "files", **other)):
        assert lake.apply({"t": {"columns": {"id": "long", "a": "int"}}}, allow_destructive=True).outcome == "committed"


def test_rows_that_came_are_not_left_without_a_value_that_is_never_null(lake: fm.Lake) -> None:
    lake.create_table("t", "id long")
    wanted = {"t": {"columns": {"id": "long", "x": {"type": "int", "required": True, "default": 5}}}}
    with pytest.raises(fm.Invalid, match="never null"), at("apply.sealed", lambda: lake.append("t", [{"id": 1}])):
        lake.apply(wanted, fill_later=True, allow_destructive=True)
    assert read(lake) == [{"id": 1}]
    assert lake.apply(wanted, allow_destructive=True).outcome == "committed"
    assert read(lake) == [{"id": 1, "x": 5}]


def test_the_plan_that_was_done_is_told(lake: fm.Lake) -> None:
    lake.create_table("t", "id long")
    wanted = {"t": {"columns": {"id": "long", "x": {"type": "int", "default": 5}}}}
    told: list[Any] = []
    with at("apply.sealed", lambda: lake.append("t", [{"id": 1}])):
        lake.apply(wanted, told=told.append, allow_destructive=True)
    (plan,) = told
    assert [(step.action, step.kind) for step in plan.steps] == [("add_column", "needs_rewrite")]
    lake.apply(wanted, told=told.append, allow_destructive=True)
    assert told[-1].outcome == "nothing_to_do"


# ── defaults, references ──


def test_a_rename_with_a_default_is_refused_like_the_default_alone(lake: fm.Lake) -> None:
    lake.create_table("t", "id long")
    lake.append("t", [{"id": 1}])
    lake.apply({"t": {"columns": {"id": "long", "a": "string"}}}, allow_destructive=True)
    renamed = {"type": "string", "renamed_from": "a", "default": "x"}
    plan = lake.plan({"t": {"columns": {"id": "long", "b": renamed}}})
    assert [step.action for step in plan.refused] == ["set_default"]
    assert read(lake) == [{"id": 1, "a": None}]


@pytest.fixture
def shop(lake: fm.Lake) -> fm.Lake:
    """A branch from before the key that orders refer to."""
    lake.create_table("customers", "id long not null, name string")
    lake.create_table("orders", "id long, customer long")
    before = lake.append("customers", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]).version
    lake.apply(
        {"customers": {"key": ["id"]}, "orders": {"references": {"customer": "customers.id"}}}, allow_destructive=True
    )
    lake.branches.create("dev", version=before)
    return lake


def test_a_branch_from_before_the_key_does_not_know_the_reference(shop: fm.Lake) -> None:
    assert shop.append("orders", [{"id": 1, "customer": 9}], branch="dev").outcome == "committed"
    assert shop.delete("customers", "id = 1", branch="dev").outcome == "committed"
    assert [row["id"] for row in read(shop, "customers", branch="dev")] == [2]
    # Main does.
    with pytest.raises(fm.Invalid):
        shop.append("orders", [{"id": 1, "customer": 9}])
    assert shop.append("orders", [{"id": 1, "customer": 1}]).outcome == "committed"
    with pytest.raises(fm.Invalid):
        shop.delete("customers", "id = 1")


def test_a_column_that_refers_is_not_bound_to_an_expression(shop: fm.Lake) -> None:
    columns = {"id": "long", "customer": "long", "second": {"type": "long", "default": 7}}
    shop.apply({"orders": {"columns": columns}}, allow_destructive=True)
    shop.backfill.unbind("orders", "second")
    shop.apply(
        {"orders": {"references": {"customer": "customers.id", "second": "customers.id"}}}, allow_destructive=True
    )
    with pytest.raises(fm.Invalid):
        shop.backfill.column("orders", "second", "9999999999")
    shop.append("orders", [{"id": 1, "customer": 1}])
    assert read(shop, "orders") == [{"id": 1, "customer": 1, "second": None}]


# ── tables that others refer to ──


@pytest.fixture
def related(lake: fm.Lake) -> fm.Lake:
    parent = {"columns": {"id": "long", "at": "timestamp"}, "key": ["id"]}
    lake.apply({"parents": parent, "children": {"columns": {"id": "long", "parent": "long"}}}, allow_destructive=True)
    return lake


REFERS = {"children": {"references": {"parent": "parents.id"}}}


def test_a_table_that_is_referred_to_gets_no_retention_by_command_either(related: fm.Lake) -> None:
    related.apply(REFERS)
    with pytest.raises(fm.Invalid, match="refers"):
        related.maintain.set_policy("parents", "9d", column="at")
    assert related.show("parents")["retention"] is None
    related.maintain.set_policy("parents", None)


def test_a_plan_of_a_reference_is_stale_once_its_parent_lets_rows_go(related: fm.Lake) -> None:
    plan = related.plan(REFERS)
    related.maintain.set_policy("parents", "9d", column="at")
    with pytest.raises(fm.Conflict):
        related.apply(plan)


def test_a_column_that_refers_gets_no_default(related: fm.Lake) -> None:
    related.apply(REFERS)
    columns = {"id": "long", "parent": {"type": "long", "default": 5}}
    (step,) = related.plan({"children": {"columns": columns}}).steps
    assert (step.action, step.kind) == ("set_default", "refused")
    both = related.plan({"children": {"columns": columns, "references": {}}})
    assert all(step.kind != "refused" for step in both.steps)


def test_a_key_names_the_branches_that_cannot_be_merged_any_more(related: fm.Lake) -> None:
    related.branches.create("dev")
    related.append("children", [{"id": 1, "parent": None}], branch="dev")
    plan = related.plan({"children": {"key": ["id"]}})
    assert (plan.steps[0].kind, plan.steps[0].text.endswith("any more with branches that have it: dev")) == (
        "safe",
        True,
    )
    related.apply(plan)
    assert [one.reason for one in related.branches.merge("dev", on_conflict="return").conflicts] == ["key"]


def test_what_was_declared_can_be_seen(related: fm.Lake) -> None:
    columns = {"id": "long", "parent": "long", "state": {"type": "string", "default": "new", "comment": "of what"}}
    wanted = {"columns": columns, "references": {"parent": "parents.id"}, "comment": "who follows whom"}
    related.apply({"children": wanted})
    shown = related.show("children")
    assert shown["comment"] == "who follows whom"
    told = {one["name"]: (one["refers_to"], one["filled"], one["comment"]) for one in shown["columns"]}
    assert told == {
        "id": (None, None, ""),
        "parent": ("parents", None, ""),
        "state": (None, "'new'", "of what"),
    }
