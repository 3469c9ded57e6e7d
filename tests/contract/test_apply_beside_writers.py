"""`apply` beside writers: rows that come meanwhile are in the new shape; references hold whoever comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark.errors import Conflict, Invalid
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.contract.test_apply_writers import check_partitions
from tests.contract.test_catalog_keyed import at_point

pytestmark = pytest.mark.mostly_sqlite

LONG = {"type": "long", "required": True}
# Renamed, dropped, widened, added with a default; partitioned and sorted otherwise: all in one version.
WANTED: dict[str, Any] = {
    table: {
        "columns": {
            "id": LONG,
            "n": "long",
            "title": {"type": "string", "renamed_from": "name"},
            "land": {"type": "string", "default": "XX"},
        },
        "dropped": ["note"],
        "partition": ["bucket(4, id)"],
        "sort": ["n desc"],
    }
    for table in ("events", "people")
}


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, n int, name string, note string", partition=["bucket(2, n)"])
        lake.create_table("people", "id long not null, n int, name string, note string", key=["id"])
        for table in WANTED:
            lake.append(table, [sent(1), sent(2)])
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


def sent(number: int, name: str | None = None) -> dict[str, Any]:
    return {"id": number, "n": number * 10, "name": name or f"row {number}", "note": "gone"}


def shaped(number: int, name: str | None = None) -> dict[str, Any]:
    return {"id": number, "n": number * 10, "title": name or f"row {number}", "land": "XX"}


def content(lake: fm.Lake, table: str) -> list[dict[str, Any]]:
    return sorted(lake.read_arrow(table).read_all().to_pylist(), key=lambda one: one["id"])


def transact(lake: fm.Lake) -> None:
    with lake.transaction("both") as tx:
        tx.append("events", [sent(3)])
        tx.delete_keys("people", [{"id": 1}])
        tx.merge("people", [sent(2, "new"), sent(3)])


WRITES: dict[str, tuple[Callable[[fm.Lake], Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "append": (
        lambda lake: lake.append("events", [sent(3)]),
        [shaped(1), shaped(2), shaped(3)],
        [shaped(1), shaped(2)],
    ),
    "merge": (
        lambda lake: lake.merge("people", [sent(2, "new"), sent(3)]),
        [shaped(1), shaped(2)],
        [shaped(1), shaped(2, "new"), shaped(3)],
    ),
    "delete": (lambda lake: lake.delete("people", "id = 1"), [shaped(1), shaped(2)], [shaped(2)]),
    "overwrite": (lambda lake: lake.overwrite("events", [sent(9)]), [shaped(9)], [shaped(1), shaped(2)]),
    "transaction": (transact, [shaped(1), shaped(2), shaped(3)], [shaped(2, "new"), shaped(3)]),
}


@pytest.mark.parametrize("verb", WRITES)
def test_a_write_that_was_sealed_before_an_apply_ends_in_the_new_shape(
    lake: fm.Lake, other: fm.Lake, verb: str
) -> None:
    write, events, people = WRITES[verb]
    with at_point(f"{verb}.sealed", lambda: other.apply(WANTED, allow_destructive=True)):
        write(lake)
    assert (content(lake, "events"), content(lake, "people")) == (events, people)
    for table in WANTED:
        check_partitions(lake, table)


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize("point", ["apply.begun", "apply.sealed", "apply.built"])
def test_rows_that_come_while_an_apply_runs_are_in_the_new_shape(
    lake: fm.Lake, other: fm.Lake, verb: str, point: str
) -> None:
    write, events, people = WRITES[verb]
    with at_point(point, lambda: write(other)):
        assert lake.apply(WANTED, allow_destructive=True).outcome == "committed"
    assert (content(lake, "events"), content(lake, "people")) == (events, people)
    for table in WANTED:
        check_partitions(lake, table)


def test_a_writer_that_was_open_before_knows_the_new_shape_without_opening_again(lake: fm.Lake, other: fm.Lake) -> None:
    other.append("events", [sent(3)])
    lake.apply(WANTED, allow_destructive=True)
    with pytest.raises(Invalid):
        other.append("events", [sent(4)])
    other.append("events", [{"id": 4, "n": 2**40, "title": "four"}])
    assert content(lake, "events")[-1] == {"id": 4, "n": 2**40, "title": "four", "land": "XX"}


def test_a_table_that_was_dropped_under_a_write_is_a_conflict(lake: fm.Lake, other: fm.Lake) -> None:
    def drop() -> None:
        other.apply({"events": {"drop": True}}, allow_destructive=True)

    with at_point("append.sealed", drop), pytest.raises(Conflict):
        lake.append("events", [sent(3)])

    def again() -> None:
        other.apply({"people": {"drop": True}}, allow_destructive=True)
        other.create_table("people", "id long not null, n int, name string, note string", key=["id"])

    with at_point("merge.sealed", again), pytest.raises(Conflict):
        lake.merge("people", [sent(3)])
    assert content(lake, "people") == []


# ── references ──

ORDERS = {
    "events": {
        "columns": {"id": LONG, "n": "int", "name": "string", "note": "string"},
        "references": {"id": "people.id"},
    }
}


def test_a_reference_is_applied_checked_and_taken_back(lake: fm.Lake) -> None:
    assert lake.apply(ORDERS, allow_destructive=True).outcome == "committed"
    assert lake.apply(ORDERS, allow_destructive=True).outcome == "nothing_to_do"
    with pytest.raises(Invalid) as caught:
        lake.append("events", [sent(3), sent(1)])
    assert caught.value.facts["examples"] == "id=3"
    with pytest.raises(Invalid):
        lake.delete("people", "id = 2")
    for refused in ({"people": {"drop": True}}, {"people": {"columns": {"n": "int"}, "dropped": ["id"]}}):
        with pytest.raises(Invalid):
            lake.apply(refused, allow_destructive=True)
    # Its columns may be called otherwise.
    lake.apply(
        {"people": {"columns": {"key": {**LONG, "renamed_from": "id"}, "n": "int", "name": "string"}}},
        allow_destructive=True,
    )
    with pytest.raises(Invalid):
        lake.append("events", [sent(3)])
    lake.apply({"events": {**ORDERS["events"], "references": {}}}, allow_destructive=True)
    lake.append("events", [sent(3)])


def test_a_reference_that_rows_break_is_not_applied(lake: fm.Lake, other: fm.Lake) -> None:
    lake.append("events", [sent(7)])
    with pytest.raises(Invalid) as caught:
        lake.apply(ORDERS, allow_destructive=True)
    assert "id=7" in str(caught.value)
    lake.delete("events", "id = 7")
    # One that comes while the reference is being applied.
    with at_point("apply.sealed", lambda: other.append("events", [sent(7)])), pytest.raises(Invalid):
        lake.apply(ORDERS, allow_destructive=True)
    lake.delete("events", "id = 7")
    with at_point("apply.sealed", lambda: other.delete("people", "id = 1")), pytest.raises(Invalid):
        lake.apply(ORDERS, allow_destructive=True)


@pytest.mark.parametrize("point", ["sealed", "built"])
def test_a_write_that_breaks_a_reference_that_was_applied_meanwhile_is_invalid(
    lake: fm.Lake, other: fm.Lake, point: str
) -> None:
    with at_point(f"append.{point}", lambda: other.apply(ORDERS, allow_destructive=True)), pytest.raises(Invalid):
        lake.append("events", [sent(7)])
    assert content(lake, "events") == [sent(1), sent(2)]
    lake.apply({"events": {**ORDERS["events"], "references": {}}}, allow_destructive=True)
    with at_point(f"delete.{point}", lambda: other.apply(ORDERS, allow_destructive=True)), pytest.raises(Invalid):
        lake.delete("people", "id = 1")
    assert content(lake, "people") == [sent(1), sent(2)]


def test_columns_keep_their_ids(lake: fm.Lake) -> None:
    ids = {field.name: field.field_id for field in lake.schema("events").fields}
    lake.apply(WANTED, allow_destructive=True)
    now = {field.name: field.field_id for field in lake.schema("events").fields}
    assert (now["title"], now["n"], now["_seq"]) == (ids["name"], ids["n"], ids["_seq"])
    assert now["land"] > max(ids.values())
