"""A column that is added without a row: one commit, seen by nobody who follows rows; and writes that fill it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.types import IcebergType, IntegerType, LongType, StringType
from sqlalchemy import select

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.riders import BatchRider
from floodmark.commit.fills import absent_fields, fills_of
from floodmark.commit.intent import Intent
from floodmark.commit.journal import ABANDONED
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import schema_of
from floodmark.commit.seal import Edit, Seal, seal_hash
from floodmark.errors import Conflict, Invalid, NotFound
from floodmark.ingest.receive import receive
from floodmark.model import MAIN, Commit
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from floodmark.write.add_column import add_column
from tests.conftest import Place, at, ids, rows
from tests.without_spark import without_spark

pytestmark = pytest.mark.mostly_sqlite

KEYED = "id long not null, name string"


def add(
    lake: fm.Lake,
    name: str = "copy",
    expression: str | None = "name",
    kind: IcebergType | None = None,
    table: str = "events",
    batch: str | None = None,
) -> Commit:
    rider = None if batch is None else BatchRider(f"table:{table}", batch)
    return add_column(
        lake.catalog, Intent("add_column", MAIN, "test", "", rider), table, name, kind or StringType(), expression
    )


@pytest.fixture
def keyed(lake: fm.Lake) -> fm.Lake:
    lake.create_table("users", KEYED, key=["id"])
    lake.append("users", rows(1, 2, 3))
    lake.append("users", rows(4, 5, 6))
    add(lake, table="users")
    return lake


def content(lake: fm.Lake, table: str) -> dict[int, Any]:
    """The new column of every row, by id."""
    return {row["id"]: row["copy"] for row in lake.read_arrow(table).read_all().to_pylist()}


def unfilled(lake: fm.Lake, table: str) -> list[int]:
    """The ids of rows in files that lack a column."""
    head = lake.catalog.history.head(table)
    metadata = lake.catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    fills = fills_of(metadata.properties, schema)
    found: list[int] = []
    for file in live_files(lake.catalog.files, head, schema):
        if absent_fields(file, fills, schema):
            with lake.catalog.storage.open_input(file.path) as stream:
                table_read = pq.read_table(stream)
            assert "copy" not in table_read.column_names
            found += table_read["id"].to_pylist()
    return sorted(found)


def sequences(lake: fm.Lake, table: str) -> dict[int, int]:
    return {row["id"]: row["_seq"] for row in lake.read_arrow(table, with_seq=True).read_all().to_pylist()}


# ── the commit ──


def test_the_column_is_there_and_null_and_no_row_was_touched(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    before, files = lake.catalog.history.head("events"), set(lake.catalog.files.data_files(lake.heads()[0]))
    seen = sequences(lake, "events")
    commit = add(lake)
    assert (commit.outcome, commit.kind, commit.version) == ("committed", "add_column", before.version + 1)
    after = lake.catalog.history.head("events")
    assert (after.rows, after.files, after.size_bytes) == (before.rows, before.files, before.size_bytes)
    assert (after.sequence, commit.table("events").rows_added) == (before.sequence + 1, 0)
    assert set(lake.catalog.files.data_files(after)) == files
    assert content(lake, "events") == {1: None, 2: None}
    assert sequences(lake, "events") == seen
    assert [field.name for field in lake.schema("events").fields] == ["id", "name", "copy", "_seq"]
    assert [column["name"] for column in lake.show("events")["columns"]] == ["id", "name", "copy"]
    assert lake.history(limit=1)[0].kind == "add_column"
    assert unfilled(lake, "events") == [1, 2]
    check_lake(lake.catalog)


def test_a_table_without_a_row_and_without_a_fill_gets_a_column_too(lake: fm.Lake) -> None:
    add(lake, expression=None)
    add(lake, "number", "5", IntegerType())
    lake.append("events", [{"id": 1, "name": "a"}])
    assert lake.read_arrow("events").read_all().to_pylist() == [{"id": 1, "name": "a", "copy": None, "number": 5}]
    assert unfilled(lake, "events") == []
    check_lake(lake.catalog)


def test_older_versions_have_their_own_columns(lake: fm.Lake) -> None:
    version = lake.append("events", rows(1)).version
    add(lake)
    assert lake.read_arrow("events", version=version).read_all().column_names == ["id", "name"]
    assert lake.read_arrow("events").read_all().column_names == ["id", "name", "copy"]


@pytest.mark.parametrize("name", ["name", "NAME", "_seq", "_Change", "", " "])
def test_a_name_that_is_taken_or_reserved_is_invalid_and_leaves_nothing(lake: fm.Lake, name: str) -> None:
    version = lake.catalog.history.resolve()
    with pytest.raises(Invalid):
        add(lake, name)
    assert lake.catalog.history.resolve() == version
    check_lake(lake.catalog)


def test_a_table_that_is_not_there_is_not_found(lake: fm.Lake) -> None:
    with pytest.raises(NotFound):
        add(lake, table="nope")


def test_the_same_identity_again_is_a_no_op(lake: fm.Lake) -> None:
    first = add(lake, batch="once")
    again = add(lake, batch="once")
    assert (again.outcome, again.version) == ("already_committed", first.version)


def test_readers_of_changes_and_sinks_see_nothing_new(lake: fm.Lake, tmp_path: Path) -> None:
    lake.append("events", rows(1, 2))
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
    assert lake.sinks.run("out").outcome == "shipped"
    shipped = sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file())
    mark = lake.catalog.history.head("events").sequence
    add(lake)
    changes = lake.changes("events", since=mark)
    assert changes.until == mark + 1
    assert changes.empty
    assert changes.arrow().read_all().num_rows == 0
    assert lake.sinks.run("out").outcome == "nothing_to_do"
    assert sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file()) == shipped
    (followed,) = lake.sinks.status()[0]["tables"]
    assert followed["mark"] == mark + 1, "the mark moved on"
    lake.append("events", rows(3))
    assert lake.sinks.run("out").outcome == "shipped"
    check_lake(lake.catalog)


# ── races and crashes ──


def test_another_shape_meanwhile_is_planned_again(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    with at("add_column.sealed", lambda: lake.append("events", [{"id": 2, "name": "b", "more": 1}], evolve=True)):
        add(lake)
    assert {"copy", "more"} < {field.name for field in lake.schema("events").fields}
    assert ids(lake) == [1, 2]
    assert unfilled(lake, "events") == [1, 2]
    lake.append("events", [{"id": 3, "name": "c", "more": None}])
    assert content(lake, "events")[3] == "c"
    check_lake(lake.catalog)


def test_rows_meanwhile_need_no_new_plan(lake: fm.Lake) -> None:
    with at("add_column.built", lambda: lake.append("events", rows(1))):
        add(lake)
    assert ids(lake) == [1]
    assert unfilled(lake, "events") == [1]
    check_lake(lake.catalog)


def test_the_same_column_meanwhile_is_invalid(lake: fm.Lake) -> None:
    with at("add_column.sealed", lambda: add(lake)), pytest.raises(Invalid, match="column of this name"):
        add(lake)
    check_lake(lake.catalog)


def test_a_table_whose_shape_keeps_changing_ends_in_conflict(lake: fm.Lake) -> None:
    numbers = itertools.count()

    def observe(name: str) -> None:
        if name == "add_column.sealed":
            failpoints.observer = None
            number = next(numbers)
            lake.append("events", [{"id": number, "name": None, f"c{number}": 1}], evolve=True)
            failpoints.observer = observe

    failpoints.observer = observe
    try:
        with pytest.raises(Conflict):
            add(lake)
    finally:
        failpoints.observer = None
    assert "copy" not in {field.name for field in lake.schema("events").fields}
    check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["sealed", "built"])
def test_an_error_leaves_nothing(lake: fm.Lake, point: str) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    version = lake.catalog.history.resolve()
    with at(f"add_column.{point}", fail), pytest.raises(RuntimeError):
        add(lake)
    assert lake.catalog.history.resolve() == version
    with lake.catalog.database.read() as tx:
        states = list(tx.execute(select(tables.operations.c.state).where(tables.operations.c.kind == "add_column")))
    assert [state for (state,) in states] == [ABANDONED]
    check_lake(lake.catalog)


def test_a_seal_holds_properties_and_older_ones_are_still_read() -> None:
    edit = Edit("write", "t", "id", "file:///t", 1, 0, snapshot=5, schema="{}", base_schema_id=0, properties={"a": "b"})
    text = Seal((edit,)).to_text()
    assert Seal.from_text("op", text, seal_hash(text)).edits == (edit,)
    older = json.loads(text)
    del older["edits"][0]["properties"]
    text = json.dumps(older)
    (read,) = Seal.from_text("op", text, seal_hash(text)).edits
    assert (read.properties, read.changes_table, read.changes_rows) == ({}, True, False)


# ── writes fill it ──


def arrow(given: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(given, pa.schema([("id", pa.int64()), ("name", pa.string())]))


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "dicts": lambda given: given,
    "arrow": arrow,
    "reader": lambda given: arrow(given).to_reader(),
    "pandas": lambda given: arrow(given).to_pandas(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("evolve", [False, True], ids=["as it is", "evolve"])
def test_rows_in_any_form_that_do_not_bring_the_column_get_it(lake: fm.Lake, form: str, evolve: bool) -> None:
    add(lake)
    commit = lake.append("events", FORMS[form](rows(1, 2)), evolve=evolve)
    assert commit.rows_added == 2
    assert content(lake, "events") == {1: "row 1", 2: "row 2"}
    assert unfilled(lake, "events") == []
    check_lake(lake.catalog)


@pytest.mark.parametrize("evolve", [False, True], ids=["as it is", "evolve"])
def test_rows_that_bring_the_column_are_taken_as_they_are(lake: fm.Lake, evolve: bool) -> None:
    add(lake)
    mixed = [*rows(1), {"id": 2, "name": "b", "copy": "mine"}, {"id": 3, "name": "c", "copy": None}]
    lake.append("events", mixed, evolve=evolve)
    lake.append("events", pa.table({"id": [4], "name": ["d"], "copy": pa.nulls(1)}), evolve=evolve)
    assert content(lake, "events") == {1: "row 1", 2: "mine", 3: None, 4: None}
    assert unfilled(lake, "events") == []
    check_lake(lake.catalog)


def test_rows_may_bring_new_columns_and_get_theirs(lake: fm.Lake) -> None:
    add(lake)
    lake.append("events", [{"id": 1, "name": "a", "more": {"x": 1}}], evolve=True)
    lake.append("events", pa.table({"id": [2], "other": [5]}), evolve=True)
    found = sorted(lake.read_arrow("events").read_all().to_pylist(), key=lambda row: row["id"])
    assert found == [
        {"id": 1, "name": "a", "copy": "a", "more": {"x": 1}, "other": None},
        {"id": 2, "name": None, "copy": None, "more": None, "other": 5},
    ]
    check_lake(lake.catalog)


def test_rows_that_do_not_fit_are_still_refused(lake: fm.Lake) -> None:
    add(lake)
    with pytest.raises(Invalid, match="wrong"):
        lake.append("events", [{"id": 1, "wrong": 1}])
    with pytest.raises(Invalid, match="name"):
        lake.append("events", pa.table({"id": [1]}))
    with pytest.raises(Invalid, match="not a dict"):
        lake.append("events", [1])
    assert ids(lake) == []
    check_lake(lake.catalog)


def test_no_rows_are_no_work(lake: fm.Lake) -> None:
    add(lake)
    assert lake.append("events", []).outcome == "nothing_to_do"
    assert lake.append("events", arrow([])).outcome == "nothing_to_do"


def test_a_batch_is_filled_once(lake: fm.Lake) -> None:
    add(lake)
    assert lake.append("events", rows(1), batch="b").outcome == "committed"
    assert lake.append("events", rows(1), batch="b").outcome == "already_committed"
    assert content(lake, "events") == {1: "row 1"}


def test_a_keyed_append_fills_and_still_knows_its_keys(keyed: fm.Lake) -> None:
    keyed.append("users", rows(7))
    with pytest.raises(Invalid):
        keyed.append("users", rows(1))
    assert content(keyed, "users")[7] == "row 7"
    assert unfilled(keyed, "users") == [1, 2, 3, 4, 5, 6]
    check_lake(keyed.catalog)


def test_a_merge_fills_its_rows_and_carries_the_others_without_the_column(keyed: fm.Lake) -> None:
    before = sequences(keyed, "users")
    commit = keyed.merge("users", [{"id": 2, "name": "new"}, {"id": 9, "name": "nine"}])
    assert (commit.table("users").rows_added, commit.table("users").rows_updated) == (1, 1)
    assert content(keyed, "users") == {1: None, 2: "new", 3: None, 4: None, 5: None, 6: None, 9: "nine"}
    assert unfilled(keyed, "users") == [1, 3, 4, 5, 6]
    assert {one: seq for one, seq in sequences(keyed, "users").items() if one not in (2, 9)} == {
        one: seq for one, seq in before.items() if one != 2
    }
    check_lake(keyed.catalog)


def test_a_merge_of_rows_that_are_there_changes_nothing_once_they_are_filled(keyed: fm.Lake) -> None:
    assert keyed.merge("users", rows(1, 7)).table("users").rows_updated == 1, "it is filled by that"
    assert keyed.merge("users", rows(1, 7)).outcome == "nothing_to_do"
    assert unfilled(keyed, "users") == [2, 3, 4, 5, 6]


def test_the_last_of_a_key_is_filled(keyed: fm.Lake) -> None:
    given = [{"id": 1, "name": "old", "at": 1}, {"id": 1, "name": "new", "at": 2}]
    keyed.merge("users", given, on_duplicate="last", order="at")
    keyed.merge("users", pa.Table.from_pylist(given), on_duplicate="last", order="at")
    assert content(keyed, "users")[1] == "new"


def test_deletes_carry_rows_without_the_column(keyed: fm.Lake) -> None:
    before = sequences(keyed, "users")
    keyed.delete("users", "id = 1")
    with keyed.transaction("by key") as tx:
        tx.delete_keys("users", [{"id": 4}])
    assert unfilled(keyed, "users") == [2, 3, 5, 6]
    assert sequences(keyed, "users") == {one: before[one] for one in (2, 3, 5, 6)}
    check_lake(keyed.catalog)


def test_overwriting_a_part_fills_what_comes_and_carries_the_rest(keyed: fm.Lake) -> None:
    keyed.overwrite("users", [{"id": 1, "name": "new"}], where="id < 3")
    assert content(keyed, "users") == {1: "new", 3: None, 4: None, 5: None, 6: None}
    assert unfilled(keyed, "users") == [3, 4, 5, 6]
    keyed.overwrite("users", rows(8))
    assert content(keyed, "users") == {8: "row 8"}
    assert unfilled(keyed, "users") == []
    check_lake(keyed.catalog)


def test_what_is_to_be_inside_may_be_the_filled_column(keyed: fm.Lake) -> None:
    keyed.overwrite("users", [{"id": 1, "name": "a"}], where="copy is null or copy = 'a'")
    assert content(keyed, "users") == {1: "a"}
    with pytest.raises(Invalid):
        keyed.overwrite("users", [{"id": 1, "name": "b"}], where="copy = 'a'")


def test_a_transaction_fills_in_every_step(keyed: fm.Lake) -> None:
    with keyed.transaction("several") as tx:
        tx.append("users", rows(7, 8))
        tx.merge("users", [{"id": 7, "name": "again"}, {"id": 1, "name": "first"}])
        tx.delete("users", "copy = 'row 8'")
        tx.append("events", rows(1))
    assert content(keyed, "users") == {1: "first", 2: None, 3: None, 4: None, 5: None, 6: None, 7: "again"}
    assert unfilled(keyed, "users") == [2, 3, 4, 5, 6]
    check_lake(keyed.catalog)


def test_received_rows_are_filled(keyed: fm.Lake) -> None:
    rows = [{"id": 1, "name": "got"}, {"id": 2, "_change": "delete"}]
    receive(without_spark(keyed), "sender", "users", rows)
    assert content(keyed, "users") == {1: "got", 3: None, 4: None, 5: None, 6: None}
    assert unfilled(keyed, "users") == [3, 4, 5, 6]
    check_lake(keyed.catalog)


def test_several_columns_are_filled_in_their_order(lake: fm.Lake) -> None:
    add(lake)
    add(lake, "again", "copy")
    add(lake, "number", "3000000000", LongType())
    lake.append("events", rows(1))
    lake.append("events", [{"id": 2, "name": "b", "copy": "mine"}])
    found = sorted(lake.read_arrow("events").read_all().to_pylist(), key=lambda row: row["id"])
    assert [(row["copy"], row["again"], row["number"]) for row in found] == [
        ("row 1", "row 1", 3_000_000_000),
        ("mine", "mine", 3_000_000_000),
    ]


# ── rows that were staged before the column came ──

STAGED: dict[str, Callable[[fm.Lake], Any]] = {
    "append": lambda lake: lake.append("users", rows(7)),
    "merge": lambda lake: lake.merge("users", [{"id": 1, "name": "new"}, *rows(7)]),
    "overwrite": lambda lake: lake.overwrite("users", rows(7), where="id > 3"),
}


@pytest.mark.parametrize("verb", STAGED)
@pytest.mark.parametrize("step", ["staged", "sealed", "built"])
def test_rows_that_were_staged_before_the_column_came_are_filled(lake: fm.Lake, verb: str, step: str) -> None:
    lake.create_table("users", KEYED, key=["id"])
    lake.append("users", rows(1, 2))
    with at(f"{verb}.{step}", lambda: add(lake, table="users")):
        STAGED[verb](lake)
    assert content(lake, "users")[7] == "row 7"
    assert content(lake, "users")[2] is None
    assert unfilled(lake, "users") == ([2] if verb == "merge" else [1, 2])
    check_lake(lake.catalog)


def test_a_delete_that_was_planned_before_carries_rows_without_the_column(lake: fm.Lake) -> None:
    lake.create_table("users", KEYED, key=["id"])
    lake.append("users", rows(1, 2, 3))
    with at("delete.built", lambda: add(lake, table="users")):
        lake.delete("users", "id = 2")
    assert unfilled(lake, "users") == [1, 3]
    check_lake(lake.catalog)


def test_a_batch_that_died_before_the_column_came_is_undone_and_its_retry_filled(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", KEYED)
        assert run_killed(append_batch, place, failpoint="append.sealed")
        add(lake)
        report = lake.recover()
        assert (len(report.rolled_back), report.rolled_forward) == (1, ())
        assert ids(lake) == []
        assert lake.append("events", rows(1), batch="b").outcome == "committed"
        assert content(lake, "events") == {1: "row 1"}
        check_lake(lake.catalog)


def append_batch(place: Place) -> None:
    with place.open(actor="child") as lake:
        lake.append("events", rows(1), batch="b")


# ── maintenance ──


def test_compaction_puts_unfilled_files_together_and_keeps_them_apart_from_filled_ones(keyed: fm.Lake) -> None:
    for number in (7, 8, 9):
        keyed.append("users", rows(number))
    before = sequences(keyed, "users")
    (record,) = keyed.maintain.compact("users", files_min=2).records
    assert (record.outcome, record.detail["groups"], record.detail["files_out"]) == ("compacted", 2, 2)
    assert unfilled(keyed, "users") == [1, 2, 3, 4, 5, 6]
    assert content(keyed, "users")[9] == "row 9"
    assert sequences(keyed, "users") == before
    (record,) = keyed.maintain.compact("users", files_min=2).records
    assert record.outcome == "nothing_to_do"
    check_lake(keyed.catalog)


def test_a_compaction_that_was_planned_before_the_column_came_ends_in_conflict(lake: fm.Lake) -> None:
    for number in range(4):
        lake.append("events", rows(number))
    with at("compact.rewritten", lambda: add(lake)):
        (record,) = lake.maintain.compact("events", files_min=2).records
    assert record.outcome == "conflict"
    (record,) = lake.maintain.compact("events", files_min=2).records
    assert record.outcome == "compacted"
    assert unfilled(lake, "events") == [0, 1, 2, 3]
    check_lake(lake.catalog)


def test_retention_carries_rows_without_the_column(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    lake.append("events", rows(3, 4))
    lake.maintain.compact("events", files_min=2)
    add(lake)
    lake.append("events", rows(5))
    lake.maintain.set_policy("events", "3 rows")
    (record,) = lake.maintain.retain("events").records
    assert record.outcome == "retained"
    assert unfilled(lake, "events") == [3, 4]
    assert content(lake, "events") == {3: None, 4: None, 5: "row 5"}
    check_lake(lake.catalog)
