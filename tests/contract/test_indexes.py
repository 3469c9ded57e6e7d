"""Declaring, dropping and listing indexes, on every database: intent without a version, the same rows with and without.

What each index covers is compared with the files that were written after it was declared.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.database import SQLITE_NAME
from floodmark.catalog.indexes import KEY, VALUE, WantedIndex
from floodmark.errors import FloodmarkError
from floodmark.index.status import table_indexes
from floodmark.json_form import as_json
from floodmark.testing.children import Child
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.contract.test_catalog_lifecycle import content, database_of, settle_wal

EVENTS = "id long, customer string, country string, tags array<string>, n int, x double, m map<string,int>"


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "customer": f"c{number}",
        "country": "DE",
        "tags": ["a", None],
        "n": number,
        "x": 0.5,
        "m": {},
        **more,
    }


@pytest.fixture
def shop(place: Place) -> Any:
    """A lake with a table without a key and one with a key."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("users", "id long, name string", key=["id"])
        yield lake
        check_lake(lake.catalog)


def secrets(place: Place) -> list[str]:
    with database_of(place) as database:
        return [row.secret for row in database.ask(select(tables.indexes.c.secret))]


def on(lake: fm.Lake, table: str | None = None) -> list[tuple[str, tuple[str, ...], str]]:
    return [(one.table, one.on, one.state) for one in lake.indexes.list(table)]


def covered(lake: fm.Lake, table: str) -> dict[tuple[str, ...], tuple[int, int, int, int]]:
    found = lake.indexes.status(table)
    return {one.on: (one.files_covered, one.files, one.rows_covered, one.rows) for one in found}


# ── declaring ──


def test_declaring_makes_no_version_and_writers_cover_what_they_add_from_then_on(shop: fm.Lake) -> None:
    shop.append("events", [row(1), row(2)])
    version = shop.status()["version"]
    made = shop.indexes.create("events", on="customer")
    assert (made.table, made.on, made.kind, made.outcome) == ("events", ("customer",), "value", "created")
    assert shop.status()["version"] == version
    assert covered(shop, "events") == {("customer",): (0, 1, 0, 2)}
    shop.append("events", [row(3)])
    assert covered(shop, "events") == {("customer",): (1, 2, 1, 3)}
    (status,) = shop.indexes.status("events")
    assert (status.state, status.segments, status.broken) == ("live", 1, 0)
    assert status.bytes > 0
    assert "maintain index events" in status.advice


def test_creating_twice_is_a_no_op_that_says_so(shop: fm.Lake) -> None:
    assert shop.indexes.create("events", on=["customer", "country"]).outcome == "created"
    # In any order: lookups compare all of the columns.
    assert shop.indexes.create("events", on=["country", "customer"]).outcome == "nothing_to_do"
    assert on(shop, "events") == [("events", ("customer", "country"), "live")]


def test_the_key_has_an_index_by_itself(shop: fm.Lake) -> None:
    assert on(shop) == [("users", ("id",), "live")]
    for ways in ({"on": "id"}, {"on": "id", "kind": "key"}, {"kind": "key"}):
        assert shop.indexes.create("users", **ways).outcome == "nothing_to_do"
    shop.append("users", [{"id": 1, "name": "one"}])
    assert shop.indexes.create("users", on="id").outcome == "nothing_to_do"
    assert covered(shop, "users") == {("id",): (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"on": "m"}, "a column of this type cannot be indexed"),
        ({"on": ["tags", "id"]}, "a column of this type cannot be indexed"),
        ({"on": "custmer"}, "the table has no such column"),
        ({"on": "_seq"}, "the table has no such column"),
        ({"on": []}, "at least one column"),
        ({}, "at least one column"),
        ({"on": ["id", "id"]}, "a column is named twice"),
        ({"on": "id", "kind": "key"}, "a key index is on the columns of the key"),
        ({"on": "id", "kind": "tree"}, "unknown kind of index"),
    ],
)
@pytest.mark.mostly_sqlite
def test_what_cannot_be_indexed_is_invalid_before_anything_is_recorded(
    shop: fm.Lake, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(fm.Invalid, match=message):
        shop.indexes.create("events", **wanted)
    assert shop.catalog.indexes.all() == []


def test_of_a_table_with_a_key_the_key_itself_cannot_have_a_value_index(shop: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="which has an index by itself"):
        shop.indexes.create("users", on="id", kind="value")
    with pytest.raises(fm.NotFound, match="nope"):
        shop.indexes.create("nope", on="id")
    with pytest.raises(fm.NotFound, match="no such index"):
        shop.indexes.drop("users", on="name")


def create_in_child(place: Place) -> str:
    with place.open() as lake:
        return lake.indexes.create("events", on=["country", "customer"]).outcome


def test_two_processes_that_create_the_same_index_make_one(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
    children = [Child(create_in_child, place) for _ in range(4)]
    assert sorted(str(child.wait()) for child in children) == ["created", *["nothing_to_do"] * 3]
    assert len(content(place)["fm_indexes"]) == 1


def test_an_index_is_of_the_table_on_every_branch(shop: fm.Lake) -> None:
    shop.indexes.create("events", on="customer")
    shop.branches.create("dev")
    shop.append("events", [row(1)], branch="dev")
    shop.append("events", [row(2)])
    assert covered(shop, "events") == {("customer",): (1, 1, 1, 1)}
    assert [(one["on"], one["files_covered"]) for one in shop.show("events", branch="dev")["indexes"]] == [
        (["customer"], 1)
    ]
    shop.branches.merge("dev")
    assert covered(shop, "events")["customer",][2:] == (2, 2)


# ── columns that change ──


def test_an_index_stays_with_its_column_when_that_is_renamed_or_widened(shop: fm.Lake) -> None:
    shop.indexes.create("events", on=["n", "country"])
    shop.append("events", [row(1)])
    shop.rename_column("events", "country", "land")
    columns = {"id": "long", "customer": "string", "land": "string", "tags": "array<string>", "n": "long"}
    shop.apply({"events": {"columns": {**columns, "x": "double", "m": "map<string,int>"}}})
    assert shop.indexes.create("events", on=["land", "n"]).outcome == "nothing_to_do"
    data = [{**{k: v for k, v in row(2**40).items() if k != "country"}, "land": "FR"}]
    shop.append("events", data)
    assert covered(shop, "events") == {("land", "n"): (2, 2, 2, 2)}


def test_a_column_that_goes_makes_its_index_unusable_and_it_can_be_dropped(shop: fm.Lake) -> None:
    shop.indexes.create("events", on="country")
    shop.append("events", [row(1)])
    shop.drop_column("events", "country")
    (status,) = shop.indexes.status("events")
    assert (status.on, status.state, status.files_covered) == (("country",), "unusable", 0)
    assert status.reason == "the table has lost a column of it"
    assert status.advice == "`floodmark index drop events --on country --apply` drops it."
    rows = [{k: v for k, v in row(2).items() if k != "country"}]
    shop.append("events", rows)
    # A new column of the name is another column.
    shop.add_column("events", "country", "string")
    assert shop.indexes.create("events", on="country").outcome == "created"
    assert [one.state for one in shop.indexes.status("events")] == ["unusable", "live"]
    assert shop.indexes.drop("events", on="country").outcome == "dropped"
    assert shop.indexes.drop("events", on="country").outcome == "dropped"
    assert on(shop, "events") == []


def test_files_from_before_a_column_are_scanned_until_they_are_rewritten(shop: fm.Lake) -> None:
    shop.append("events", [row(1)])
    shop.add_column("events", "city", "string")
    shop.indexes.create("events", on="city")
    (status,) = shop.indexes.status("events")
    assert status.advice.startswith("The other files are older than a column of it")


def test_a_renamed_or_restored_table_has_its_indexes(shop: fm.Lake) -> None:
    shop.indexes.create("events", on="customer")
    shop.append("events", [row(1)])
    shop.rename_table("events", "facts")
    assert covered(shop, "facts") == {("customer",): (1, 1, 1, 1)}
    shop.drop_table("facts")
    assert on(shop) == [("users", ("id",), "live")]
    shop.undrop("facts")
    assert covered(shop, "facts") == {("customer",): (1, 1, 1, 1)}


# ── dropping ──


def test_a_dropped_index_is_gone_and_can_be_created_again(shop: fm.Lake, place: Place) -> None:
    shop.indexes.create("events", on="customer")
    shop.append("events", [row(1)])
    before = secrets(place)
    assert shop.indexes.drop("events", on="customer", dry_run=True).outcome == "planned"
    assert on(shop, "events") == [("events", ("customer",), "live")]
    assert shop.indexes.drop("events", on="customer").outcome == "dropped"
    assert on(shop, "events") == []
    shop.append("events", [row(2)])
    assert shop.indexes.create("events", on="customer").outcome == "created"
    assert set(before) & set(secrets(place)) == set()
    shop.append("events", [row(3)])
    # The segments of before are of another index.
    assert covered(shop, "events") == {("customer",): (1, 3, 1, 3)}


def test_keyed_writes_work_without_the_keys_index_with_the_same_results(shop: fm.Lake) -> None:
    shop.append("users", [{"id": n, "name": "x"} for n in range(10)])
    assert shop.indexes.drop("users", on="id").outcome == "dropped"
    assert shop.indexes.drop("users", on="id").outcome == "nothing_to_do"
    for step in (shop, shop):
        with pytest.raises(fm.Invalid):
            step.append("users", [{"id": 3, "name": "again"}])
    merged = shop.merge("users", [{"id": 3, "name": "new"}, {"id": 4, "name": "x"}, {"id": 99, "name": "y"}])
    assert (merged.rows_added, merged.rows_updated) == (1, 1)
    (status,) = shop.indexes.status("users")
    assert (status.state, status.segments, status.files_covered) == ("dropped", 0, 0)
    assert status.advice == "`floodmark index create users --on id` creates it again."
    assert shop.indexes.create("users", kind="key").outcome == "created"
    with pytest.raises(fm.Invalid):
        shop.append("users", [{"id": 99, "name": "again"}])
    shop.append("users", [{"id": 100, "name": "z"}])
    assert covered(shop, "users")["id",][0] == 1
    with pytest.raises(fm.Invalid):
        shop.append("users", [{"id": 100, "name": "again"}])


def test_a_key_index_that_is_dropped_before_the_first_row_stays_dropped(shop: fm.Lake) -> None:
    assert shop.indexes.drop("users", on="id").outcome == "dropped"
    shop.append("users", [{"id": 1, "name": "x"}])
    assert shop.catalog.indexes.count(shop.catalog.history.head("users").table_id) == 0
    assert on(shop, "users") == [("users", ("id",), "dropped")]


def test_where_a_file_is_gone_the_coverage_is_unknown_and_the_rest_is_shown(shop: fm.Lake, place: Place) -> None:
    shop.append("events", [row(1)])
    shop.indexes.create("events", on="customer")
    listed = Path(str(shop.catalog.history.head("events").manifest_list).removeprefix("file://"))
    kept = listed.read_bytes()
    listed.unlink()
    with place.open(read_only=True) as lake:
        assert lake.show("events")["indexes"] is None
        assert lake.show("events")["rows"] == 1
    listed.write_bytes(kept)


# ── read-only, older formats, backups, secrets ──


def test_a_read_only_lake_shows_indexes_and_writes_nothing(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.indexes.create("events", on="customer")
        lake.append("events", [row(1)])
        segment = lake.catalog.indexes.segments(lake.catalog.history.head("events").table_id)[0]
    settle_wal(place)
    Path(segment.location.removeprefix("file://")).write_bytes(b"damaged")
    before = content(place)
    with place.open(read_only=True) as lake:
        assert lake.indexes.drop("events", on="customer", dry_run=True).outcome == "planned"
        (status,) = lake.indexes.status()
        assert (status.files_covered, status.files) == (0, 1)
        for change in (lake.indexes.create, lake.indexes.drop):
            with pytest.raises(fm.Invalid, match="read-only"):
                change("events", on="customer")
    assert content(place) == before


def test_a_lake_of_the_format_before_has_no_indexes_until_it_is_opened_for_writing(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("users", "id long, name string", key=["id"])
        lake.append("users", [{"id": 1, "name": "x"}])
    with database_of(place) as database, database.write() as tx:
        for name in ("fm_segments", "fm_indexes"):
            tx.execute(text(f"DROP TABLE {name}"))
        tx.execute(update(tables.lake).values(format=tables.INDEXES_FORMAT - 1))
        tx.execute(text("UPDATE fm_migrations SET version_num = 'f0011'"))
    with place.open(read_only=True) as lake:
        assert lake.indexes.list() == lake.indexes.status("users") == []
        assert lake.show("users")["indexes"] == []
        assert lake.status()["indexes"] == {"indexes": 0, "segments": 0, "broken": 0, "bytes": 0}
        assert lake.tables()[0]["rows"] == 1
    with place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT
        assert covered(lake, "users") == {("id",): (0, 1, 0, 1)}
        lake.merge("users", [{"id": 1, "name": "y"}, {"id": 2, "name": "z"}])
        assert covered(lake, "users")["id",][2:] == (2, 2)


def test_a_backup_has_the_indexes(place: Place, new_place: Callable[[str], Place], tmp_path: Path) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.indexes.create("events", on="customer")
        lake.append("events", [row(1)])
        before = lake.indexes.status()
        lake.backup(tmp_path / "backup")
    for left in Path(place.path).glob(f"{SQLITE_NAME}*"):
        left.unlink()
    lost = Place(place.path, new_place("postgresql").catalog if place.catalog else None)
    fm.restore(tmp_path / "backup", lost.path, catalog=lost.catalog)
    with lost.open() as lake:
        assert lake.indexes.status() == before
        lake.append("events", [row(2)])
        assert covered(lake, "events") == {("customer",): (2, 2, 2, 2)}
        check_lake(lake.catalog)


def test_the_secret_is_in_no_answer_plan_or_error(shop: fm.Lake, place: Place) -> None:
    shop.indexes.create("events", on="customer")
    shop.append("events", [row(1)])
    shop.append("users", [{"id": 1, "name": "x"}])
    plan = shop.plan({"events": {"comment": "new"}})
    head = shop.catalog.history.head("events")
    shown: list[Any] = [
        *(shop.indexes.list(), shop.indexes.status(), shop.show("events"), shop.status(), shop.tables()),
        *(plan, plan.tables, plan.as_dict(), table_indexes(shop.catalog, head), shop.catalog.indexes.all()),
        [as_json(one) for one in shop.indexes.status()],
    ]
    # A database that fails while it records an index.
    long = WantedIndex(VALUE, (1,), False, None)  # type: ignore[arg-type]
    with pytest.raises((FloodmarkError, Exception)) as caught:
        shop.catalog.indexes.declare(head.table_id, long)
    shown.append("".join(traceback.format_exception(caught.value)))
    assert "hide_parameters" in shown[-1]
    said = repr(shown) + json.dumps([as_json(one) for one in shop.indexes.status()])
    found = secrets(place)
    assert len(found) == 2
    assert [one for one in found if one in said] == []


def test_what_is_wanted_is_what_is_recorded(shop: fm.Lake) -> None:
    head = shop.catalog.history.head("users")
    wanted = WantedIndex(KEY, (1,), False, 1)
    assert shop.catalog.indexes.declare(head.table_id, wanted)[0].wanted == wanted
