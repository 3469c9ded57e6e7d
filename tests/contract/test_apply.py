"""Schema as code on a real lake: every action in one version, twice is nothing, stale plans, races, drops, policies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

import floodmark as fm
from floodmark.catalog.maintenance_state import Policy
from floodmark.failpoints import FAILPOINTS
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at

TS = datetime(2026, 11, 15, tzinfo=UTC)
CUSTOMERS: dict[str, Any] = {"columns": {"id": "long", "name": "string", "country": "string"}, "key": ["id"]}
ORDERS: dict[str, Any] = {
    "columns": {"id": "long", "customer": "long", "ts": "timestamp", "n": "int", "note": "string"},
    "partition": ["day(ts)"],
}
OLD: dict[str, Any] = {"columns": {"id": "long"}}
LAND = {"type": "string", "renamed_from": "country"}


def columns(table: dict[str, Any], **changed: Any) -> dict[str, Any]:
    whole = {**table["columns"], **changed}
    return {"columns": {name: kind for name, kind in whole.items() if kind is not None}}


def order(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "customer": number, "ts": TS, "n": number, "note": "x", **more}


def customer(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"c{number}", "country": "DE"}


@pytest.fixture
def shop(place: Place) -> Any:
    """A lake with customers, orders and old_orders, each with rows."""
    with place.open(create=True, actor="test") as lake:
        assert (
            lake.apply({"customers": CUSTOMERS, "orders": ORDERS, "old_orders": OLD}, allow_destructive=True).version
            == 1
        )
        lake.append("customers", [customer(1), customer(2)])
        lake.append("orders", [order(1), order(2)])
        lake.append("old_orders", [{"id": 1}], batch="monday")
        yield lake
        check_lake(lake.catalog)


def read(lake: fm.Lake, table: str, version: int | None = None) -> list[dict[str, Any]]:
    rows = lake.read_arrow(table, version=version).read_all().to_pylist()
    return sorted(rows, key=lambda row: row["id"])


def schema_ids(lake: fm.Lake) -> dict[str, int]:
    return {head.table: head.schema_id for head in lake.heads()}


EVERYTHING: dict[str, Any] = {
    "customers": columns(CUSTOMERS, country=None, land=LAND, vip={"type": "boolean", "default": False}),
    "orders": {
        **columns(ORDERS, n="long", note=None),
        "key": ["id"],
        "partition": ["month(ts)"],
        "sort": ["ts desc"],
        "retention": "100000d",
        "references": {"customer": "customers.id"},
        "comment": "what they buy",
    },
    "old_orders": {"drop": True},
    "places": {"columns": {"id": "long", "city": {"type": "string", "default": "Ulm"}}, "key": ["id"]},
}


def test_all_kinds_in_one_version_and_twice_is_nothing(shop: fm.Lake) -> None:
    before = shop.catalog.history.resolve()
    commit = shop.apply(EVERYTHING, actor="ana", message="the new shape", allow_destructive=True)
    assert (commit.version, commit.outcome, commit.kind) == (before + 1, "committed", "apply")
    assert (commit.actor, commit.message) == ("ana", "the new shape")
    assert {table.table for table in commit.tables} == {"customers", "orders", "old_orders", "places"}
    assert read(shop, "customers") == [
        {"id": number, "name": f"c{number}", "land": "DE", "vip": False} for number in (1, 2)
    ]
    assert read(shop, "orders") == [{"id": n, "customer": n, "ts": TS, "n": n} for n in (1, 2)]
    assert read(shop, "places") == []
    assert shop.catalog.maintenance.policy(shop.catalog.history.head("orders").table_id) == Policy("100000d", "ts")
    assert shop.show("orders")["key"] == ["id"]
    with pytest.raises(fm.NotFound):
        shop.read_arrow("old_orders")
    # Every table as it was, at the version before: old or new, never a mixture.
    assert read(shop, "customers", before) == [customer(1), customer(2)]
    assert read(shop, "orders", before) == [order(1), order(2)]
    assert read(shop, "old_orders", before) == [{"id": 1}]
    again = shop.apply(EVERYTHING, allow_destructive=True)
    assert (again.version, again.outcome) == (before + 1, "nothing_to_do")
    assert shop.plan(EVERYTHING).outcome == "nothing_to_do"


@pytest.mark.mostly_sqlite
def test_rows_that_come_later_are_of_the_new_shape(shop: fm.Lake) -> None:
    shop.apply(EVERYTHING, allow_destructive=True)
    shop.append("places", [{"id": 1}])
    assert read(shop, "places") == [{"id": 1, "city": "Ulm"}]
    shop.merge("customers", [{"id": 2, "name": "two", "land": "FR"}, {"id": 3, "name": "three", "land": "IT"}])
    assert [(row["land"], row["vip"]) for row in read(shop, "customers")] == [
        ("DE", False),
        ("FR", False),
        ("IT", False),
    ]
    shop.append("orders", [{"id": 3, "customer": 3, "ts": TS, "n": 2**40}])
    with pytest.raises(fm.Invalid):
        shop.append("orders", [{"id": 3, "customer": 3, "ts": TS, "n": 1}])
    with pytest.raises(fm.Invalid):
        shop.append("orders", [{"id": 4, "customer": 99, "ts": TS, "n": 1}])
    assert [row["n"] for row in read(shop, "orders")] == [1, 2, 2**40]


def test_plan_changes_nothing_and_apply_of_it_does_exactly_that(shop: fm.Lake) -> None:
    before = shop.status()["version"]
    plan = shop.plan(EVERYTHING)
    assert plan.outcome == "planned"
    assert plan.as_dict()["plan"] == plan.id == shop.plan(EVERYTHING).id
    assert shop.status()["version"] == before
    assert shop.apply(plan, allow_destructive=True).version == before + 1
    with pytest.raises(fm.Conflict) as caught:
        shop.apply(plan, allow_destructive=True)
    assert "the plan" in str(caught.value)


# ── stale plans ──


def moves_rows(lake: fm.Lake) -> None:
    lake.append("customers", [customer(9)])


def moves_shape(lake: fm.Lake) -> None:
    lake.append("customers", [{**customer(9), "more": 1}], evolve=True)


def moves_policy(lake: fm.Lake) -> None:
    lake.maintain.set_policy("orders", "5 GB")


@pytest.mark.parametrize("move", [moves_rows, moves_shape], ids=["by rows", "by shape"])
def test_a_plan_is_stale_if_a_table_that_it_read_moved(shop: fm.Lake, move: Any) -> None:
    plan = shop.plan({"customers": columns(CUSTOMERS, more="string")})
    move(shop)
    before = shop.status()["version"]
    with pytest.raises(fm.Conflict, match="changed since the plan") as caught:
        shop.apply(plan, allow_destructive=True)
    assert caught.value.facts["table"] == "customers"
    assert shop.status()["version"] == before


@pytest.mark.mostly_sqlite
def test_a_plan_does_not_mind_other_tables(shop: fm.Lake) -> None:
    plan = shop.plan({"orders": {"sort": ["id"]}})
    moves_rows(shop)
    assert shop.apply(plan, allow_destructive=True).outcome == "committed"


def test_a_plan_from_a_file_must_be_the_expected_one(shop: fm.Lake) -> None:
    wanted = {"customers": columns(CUSTOMERS, more="string")}
    plan = shop.plan(wanted)
    moves_rows(shop)
    with pytest.raises(fm.Conflict, match="the plan is not the expected one"):
        shop.apply(wanted, expect=plan.id, allow_destructive=True)
    assert shop.apply(wanted, expect=shop.plan(wanted).id, allow_destructive=True).outcome == "committed"


def test_rows_that_come_while_a_plan_is_applied_are_in_the_new_shape(shop: fm.Lake) -> None:
    plan = shop.plan(EVERYTHING | {"old_orders": {}})
    seen: list[str] = []

    def write() -> None:
        seen.append("wrote")
        shop.append("customers", [customer(3)])
        shop.append("orders", [order(3)])

    with at("apply.sealed", write):
        shop.apply(plan, allow_destructive=True)
    assert seen == ["wrote"]
    assert [(row["land"], row["vip"]) for row in read(shop, "customers")] == [("DE", False)] * 3
    assert [row["id"] for row in read(shop, "orders")] == [1, 2, 3]


def test_a_table_that_got_rows_is_not_dropped_by_an_older_plan(shop: fm.Lake) -> None:
    plan = shop.plan({"old_orders": {"drop": True}})
    with pytest.raises(fm.Conflict), at("apply.sealed", lambda: shop.append("old_orders", [{"id": 2}])):
        shop.apply(plan, allow_destructive=True)
    assert [row["id"] for row in read(shop, "old_orders")] == [1, 2]
    # Of a file it goes with all its rows.
    with at("apply.sealed", lambda: shop.append("old_orders", [{"id": 3}])):
        assert shop.apply({"old_orders": {"drop": True}}, allow_destructive=True).outcome == "committed"


# ── two at once ──


@pytest.mark.parametrize("point", ["apply.begun", "apply.rewritten", "apply.sealed", "apply.built"])
def test_two_applies_of_one_file_commit_once(shop: fm.Lake, place: Place, point: str) -> None:
    before = shop.status()["version"]
    with place.open(actor="other") as other:
        outcomes: list[str] = []
        with at(point, lambda: outcomes.append(other.apply(EVERYTHING, allow_destructive=True).outcome)):
            outcomes.append(shop.apply(EVERYTHING, allow_destructive=True).outcome)
    assert outcomes == ["committed", "nothing_to_do"]
    assert shop.status()["version"] == before + 1


def test_two_applies_of_different_files_conflict_or_go_together(shop: fm.Lake, place: Place) -> None:
    with place.open(actor="other") as other:
        mine, theirs = columns(CUSTOMERS, mine="int"), columns(CUSTOMERS, theirs="int")
        with (
            at("apply.sealed", lambda: other.apply({"customers": theirs}, allow_destructive=True)),
            pytest.raises(fm.FloodmarkError) as caught,
        ):
            # The other's column is not in this file, and may have been meant by the new one.
            shop.apply({"customers": mine}, allow_destructive=True)
        assert isinstance(caught.value, fm.Conflict | fm.Invalid)
        assert set(read(shop, "customers")[0]) == {"id", "name", "country", "theirs"}
        with at("apply.sealed", lambda: other.apply({"orders": {"sort": ["id"]}}, allow_destructive=True)):
            shop.apply({"customers": {"comment": "who"}}, allow_destructive=True)
    assert shop.plan({"orders": {"sort": ["id"]}, "customers": {"comment": "who"}}).outcome == "nothing_to_do"


def test_a_policy_that_was_set_meanwhile_is_seen(shop: fm.Lake) -> None:
    plan = shop.plan({"orders": {"retention": "90d"}})
    with pytest.raises(fm.Conflict), at("apply.sealed", lambda: moves_policy(shop)):
        shop.apply(plan, allow_destructive=True)
    assert shop.catalog.maintenance.policy(shop.catalog.history.head("orders").table_id) == Policy("5 GB", None)
    assert shop.apply({"orders": {"retention": "90d"}}, allow_destructive=True).outcome == "committed"


# ── looking at rows ──


@pytest.mark.mostly_sqlite
def test_a_key_is_looked_at_first(shop: fm.Lake) -> None:
    shop.append("orders", [order(2, n=7)])
    plan = shop.plan({"orders": {"key": ["id"]}})
    assert plan.outcome == "refused"
    assert "more than once: id=2" in plan.refused[0].reason
    before = shop.status()["version"]
    with pytest.raises(fm.Invalid, match="more than once"):
        shop.apply({"orders": {"key": ["id"]}}, allow_destructive=True)
    assert shop.status()["version"] == before
    assert shop.apply({"orders": {"key": ["id", "n"]}}, allow_destructive=True).outcome == "committed"


def test_a_key_that_a_row_breaks_meanwhile_is_refused(shop: fm.Lake) -> None:
    with (
        pytest.raises(fm.Invalid, match="more than once"),
        at("apply.sealed", lambda: shop.append("orders", [order(2)])),
    ):
        shop.apply({"orders": {"key": ["id"]}}, allow_destructive=True)
    assert shop.show("orders")["key"] == []


@pytest.mark.mostly_sqlite
def test_nulls_are_looked_at_first(shop: fm.Lake) -> None:
    shop.append("orders", [order(3, note=None)])
    wanted = {"orders": columns(ORDERS, note="string not null")}
    assert [step.reason for step in shop.plan(wanted).refused] == ["note is null in 1 rows"]
    with pytest.raises(fm.Invalid, match="note is null"):
        shop.apply(wanted, allow_destructive=True)
    shop.append("orders", [order(4, customer=None)])
    with pytest.raises(fm.Invalid, match="customer is null"):
        shop.apply({"orders": {"key": ["customer"]}}, allow_destructive=True)
    shop.delete("orders", "id >= 3")
    assert shop.apply(wanted, allow_destructive=True).outcome == "committed"
    with pytest.raises(fm.Invalid):
        shop.append("orders", [order(5, note=None)])


@pytest.mark.mostly_sqlite
def test_references_of_rows_that_are_there_are_looked_at(shop: fm.Lake) -> None:
    wanted = {"orders": {"references": {"customer": "customers.id"}}}
    shop.append("orders", [order(7), order(8, customer=None)])
    (step,) = shop.plan(wanted).refused
    assert "1 values are not in customers" in step.reason
    assert "7" in step.reason
    with pytest.raises(fm.Invalid, match="not in customers"):
        shop.apply(wanted, allow_destructive=True)
    shop.append("customers", [customer(7)])
    commit = shop.apply(wanted, allow_destructive=True)
    assert {table.table for table in commit.tables} == {"orders", "customers"}
    with pytest.raises(fm.Invalid):
        shop.append("orders", [order(9)])
    with pytest.raises(fm.Invalid):
        shop.delete("customers", "id = 7")
    with pytest.raises(fm.Invalid, match="refer to it: orders"):
        shop.apply({"customers": {"drop": True}}, allow_destructive=True)
    shop.apply({"orders": {"references": {}}}, allow_destructive=True)
    shop.append("orders", [order(9)])
    shop.delete("customers", "id = 7")


@pytest.mark.parametrize("who", ["child", "parent"])
def test_a_reference_that_is_broken_meanwhile_is_refused(shop: fm.Lake, who: str) -> None:
    def breaks() -> None:
        if who == "child":
            shop.append("orders", [order(99)])
        else:
            shop.delete("customers", "id = 2")

    with pytest.raises(fm.Invalid, match="not in customers"), at("apply.sealed", breaks):
        shop.apply({"orders": {"references": {"customer": "customers.id"}}}, allow_destructive=True)
    shop.append("orders", [order(98)])


@pytest.mark.mostly_sqlite
def test_a_table_may_refer_to_itself(shop: fm.Lake) -> None:
    people = {"columns": {"id": "long", "boss": "long"}, "key": ["id"], "references": {"boss": "people.id"}}
    shop.apply({"people": people}, allow_destructive=True)
    shop.append("people", [{"id": 1, "boss": None}, {"id": 2, "boss": 1}])
    with pytest.raises(fm.Invalid):
        shop.append("people", [{"id": 3, "boss": 9}])
    assert shop.apply({"people": people}, allow_destructive=True).outcome == "nothing_to_do"


# ── defaults ──


@pytest.mark.mostly_sqlite
def test_rows_keep_their_sequences_when_they_are_filled(shop: fm.Lake) -> None:
    def sequences() -> list[tuple[int, int]]:
        rows = shop.read_arrow("customers", with_seq=True).read_all().to_pylist()
        return sorted((row["id"], row["_seq"]) for row in rows)

    shop.append("customers", [customer(3)])
    before = sequences()
    shop.apply(
        {"customers": columns(CUSTOMERS, vip={"type": "boolean", "default": True, "required": True})},
        allow_destructive=True,
    )
    assert sequences() == before
    assert {row["vip"] for row in read(shop, "customers")} == {True}


@pytest.mark.mostly_sqlite
def test_a_default_may_be_filled_later(shop: fm.Lake) -> None:
    wanted = {"customers": columns(CUSTOMERS, level={"type": "int", "default": 7})}
    files = set(shop.catalog.files.data_files(shop.catalog.history.head("customers")))
    shop.apply(wanted, fill_later=True, allow_destructive=True)
    assert set(shop.catalog.files.data_files(shop.catalog.history.head("customers"))) == files
    shop.append("customers", [customer(3)])
    assert [row["level"] for row in read(shop, "customers")] == [None, None, 7]
    assert shop.backfill.column("customers", "level", "7").outcome == "done"
    assert [row["level"] for row in read(shop, "customers")] == [7, 7, 7]
    assert shop.apply(wanted, allow_destructive=True).outcome == "nothing_to_do"
    required = {"customers": columns(CUSTOMERS, level="int", x={"type": "int", "default": 1, "required": True})}
    with pytest.raises(fm.Invalid, match="cannot be filled later"):
        shop.apply(required, fill_later=True, allow_destructive=True)


@pytest.mark.mostly_sqlite
def test_a_default_is_changed_for_rows_that_come(shop: fm.Lake) -> None:
    shop.apply({"customers": columns(CUSTOMERS, level={"type": "long", "default": 7})}, allow_destructive=True)
    shop.apply({"customers": columns(CUSTOMERS, level={"type": "long", "default": 8})}, allow_destructive=True)
    shop.append("customers", [customer(3)])
    assert [row["level"] for row in read(shop, "customers")] == [7, 7, 8]


# ── dropping ──


def test_a_table_is_dropped_and_made_again(shop: fm.Lake) -> None:
    before = shop.catalog.history.head("old_orders")
    version = shop.status()["version"]
    shop.apply({"old_orders": {"drop": True}}, allow_destructive=True)
    assert shop.apply({"old_orders": {"drop": True}}, allow_destructive=True).outcome == "nothing_to_do"
    for verb in (
        lambda: shop.append("old_orders", [{"id": 1}]),
        lambda: shop.read_arrow("old_orders"),
        lambda: shop.show("old_orders"),
    ):
        with pytest.raises(fm.NotFound):
            verb()
    shop.apply({"old_orders": {"columns": {"id": "long", "more": "int"}}}, allow_destructive=True)
    assert shop.catalog.history.head("old_orders").table_id != before.table_id
    # The same batch comes in: it is another table's.
    assert shop.append("old_orders", [{"id": 5, "more": 1}], batch="monday").outcome == "committed"
    assert read(shop, "old_orders") == [{"id": 5, "more": 1}]
    assert read(shop, "old_orders", version) == [{"id": 1}]


def test_a_writer_of_a_table_that_goes_gets_a_conflict(shop: fm.Lake, place: Place) -> None:
    with (
        place.open(actor="other") as other,
        pytest.raises((fm.Conflict, fm.NotFound)),
        at("append.sealed", lambda: other.apply({"old_orders": {"drop": True}}, allow_destructive=True)),
    ):
        shop.append("old_orders", [{"id": 2}])
    assert "old_orders" not in [head.table for head in shop.heads()]


# ── what is refused ──


@pytest.mark.mostly_sqlite
def test_refused_steps_change_nothing_and_all_are_told(shop: fm.Lake) -> None:
    wanted = {
        "customers": columns(CUSTOMERS, name="int"),
        "orders": {"key": ["id"], **columns(ORDERS, n="string")},
        "new": {"columns": {"a": "int"}},
    }
    before = shop.status()["version"]
    with pytest.raises(fm.Invalid) as caught:
        shop.apply(wanted, allow_destructive=True)
    assert "string does not widen to int" in caught.value.facts["steps"]
    assert "int does not widen to string" in caught.value.facts["steps"]
    assert shop.status()["version"] == before
    assert "new" not in [head.table for head in shop.heads()]


def test_a_read_only_lake_plans_and_does_not_apply(shop: fm.Lake, place: Place) -> None:
    with place.open(read_only=True) as lake:
        assert lake.plan(EVERYTHING).id == shop.plan(EVERYTHING).id
        with pytest.raises(fm.Invalid, match="read-only"):
            lake.apply(EVERYTHING, allow_destructive=True)


def test_the_points_of_apply_are_registered() -> None:
    assert "apply.sealed" in FAILPOINTS
    assert "apply.staged" not in FAILPOINTS


# ── branches ──


def test_ids_that_a_branch_gave_are_not_given_again(shop: fm.Lake) -> None:
    shop.branches.create("dev")
    wanted = {"customers": columns(CUSTOMERS, more="string")}

    def evolves(number: int) -> None:
        shop.append("customers", [{**customer(number), f"own{number}": 1}], evolve=True, branch="dev")

    evolves(7)
    with at(
        "apply.sealed",
        lambda: shop.append("customers", [{**customer(8), "own7": 1, "own8": 1}], evolve=True, branch="dev"),
    ):
        shop.apply(wanted, allow_destructive=True)
    assert read(shop, "customers")[0] == {**customer(1), "more": None}
    theirs = shop.read_arrow("customers", branch="dev").read_all().to_pylist()
    assert {row["id"]: (row["own7"], row["own8"]) for row in theirs} == {
        1: (None, None),
        2: (None, None),
        7: (1, None),
        8: (1, 1),
    }
    assert [step.reason for step in shop.plan({"customers": {"drop": True}}).refused] == ["branches have it: dev"]


def test_a_table_that_a_branch_has_is_not_dropped(shop: fm.Lake) -> None:
    plan = shop.plan({"old_orders": {"drop": True}})
    shop.branches.create("dev")
    with pytest.raises(fm.Conflict):
        shop.apply(plan, allow_destructive=True)
    with pytest.raises(fm.Invalid, match="branches have it: dev"):
        shop.apply({"old_orders": {"drop": True}}, allow_destructive=True)
    shop.branches.delete("dev")
    assert shop.apply({"old_orders": {"drop": True}}, allow_destructive=True).outcome == "committed"


# ── what is left of a table that went ──


def test_a_dropped_table_leaves_no_file_once_its_versions_expired(shop: fm.Lake, place: Place) -> None:
    from pathlib import Path

    folders = list(Path(place.path, "tables").glob("old_orders.*"))
    shop.apply({"old_orders": {"drop": True}}, allow_destructive=True)
    assert [path for folder in folders for path in folder.rglob("*.parquet")]
    shop.append("customers", [customer(3)])
    shop.maintain.expire(keep="0s")
    shop.maintain.sweep(grace="0s")
    assert [path for folder in folders for path in folder.rglob("*") if path.is_file()] == []


def test_a_column_that_a_sink_names_stays(shop: fm.Lake, tmp_path: Any) -> None:
    shop.sinks.add("out", "files", tables="customers", path=str(tmp_path / "out"), columns=["id", "name"])
    for changed in ({"name": None}, {"name": None, "title": {"type": "string", "renamed_from": "name"}}):
        (step,) = shop.plan({"customers": columns(CUSTOMERS, **changed)}).refused
        assert step.reason == "the sink out names it"
    with pytest.raises(fm.Invalid, match="sinks follow it: out") as followed:
        shop.apply({"customers": {"drop": True}}, allow_destructive=True)
    # What it advises can be done.
    assert "`floodmark sink remove out --apply`" in followed.value.advice
    assert '`lake.sinks.remove("out")`' in str(followed.value)
    assert shop.apply({"customers": columns(CUSTOMERS, country=None)}, allow_destructive=True).outcome == "committed"
    assert shop.sinks.run("out").outcome == "shipped"
