"""Repair: what another writer did past the door is taken in as a commit of `external`, or the table is put back.

Whatever is chosen, followers get every row once, sequences only rise, other engines see one line of snapshots, and
the audit says what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.table import Table
from pyiceberg.types import StringType

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at
from tests.foreign_writer import by_another, foreign_catalog, theirs

PEOPLE = "id long not null, name string"


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    """Two tables of the same rows, in two files: `people` has a key."""
    with place.open(create=True, actor="test") as lake:
        for table, key in (("people", ["id"]), ("events", [])):
            lake.create_table(table, PEOPLE, key=key)
            lake.append(table, named(k1="a", k2="b"))
            lake.append(table, named(k3="c"))
        yield lake


def named(**names: str) -> list[dict[str, Any]]:
    return [{"id": int(key[1:]), "name": name} for key, name in names.items()]


def state(lake: fm.Lake, table: str = "people", **moment: Any) -> dict[int, str]:
    found = lake.read_arrow(table, **moment).read_all().to_pylist()
    assert len(found) == len({row["id"] for row in found}), "a row is there twice"
    return {row["id"]: row["name"] for row in found}


def feed(lake: fm.Lake, table: str, since: int) -> set[tuple[int, str]]:
    found = [(row["id"], row["_change"]) for row in lake.changes(table, since).arrow().read_all().to_pylist()]
    assert len(found) == len(set(found)), "a change is told twice"
    return set(found)


def seen_by_another(place: Place, table: str) -> dict[int, str]:
    with foreign_catalog(place) as catalog:
        found = catalog.load_table(f"default.{table}").scan(selected_fields=("id", "name")).to_arrow().to_pylist()
    return {row["id"]: row["name"] for row in found}


def goes_on(lake: fm.Lake, place: Place, table: str) -> None:
    """The table is a table like any other again."""
    check_lake(lake.catalog)
    assert lake.repair() == []
    assert lake.status()["drifted"] == []
    before = state(lake, table)
    lake.append(table, named(k100="new"))
    assert state(lake, table) == {**before, 100: "new"} == seen_by_another(place, table)


BEFORE = {1: "a", 2: "b", 3: "c"}
FOREIGN: dict[str, tuple[Callable[[Table], object], str, dict[int, str], set[int]]] = {
    "append": (lambda table: table.append(theirs(k8="h", k9="i")), "appended", {**BEFORE, 8: "h", 9: "i"}, set()),
    "delete of a file": (lambda table: table.delete("id = 3"), "deleted", {1: "a", 2: "b"}, {3}),
    "delete of a row": (lambda table: table.delete("id = 1"), "overwritten", {2: "b", 3: "c"}, {1}),
    "delete of everything": (lambda table: table.delete("id > 0"), "deleted", {}, {1, 2, 3}),
    "overwrite": (lambda table: table.overwrite(theirs(k1="x", k9="i")), "overwritten", {1: "x", 9: "i"}, {2, 3}),
}


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("table", ["people", "events"])
@pytest.mark.parametrize("case", FOREIGN)
def test_what_another_writer_did_is_taken_in_as_a_commit_of_external(
    lake: fm.Lake, place: Place, case: str, table: str
) -> None:
    act, happened, after, deleted = FOREIGN[case]
    mark, version = lake.changes(table).until, lake.status()["version"]
    by_another(place, table, act)
    with foreign_catalog(place) as catalog:
        their_sequence = catalog.load_table(f"default.{table}").metadata.last_sequence_number
    (planned,) = lake.repair()
    assert (planned.table, planned.happened, planned.outcome, planned.choice) == (table, happened, "planned", "accept")
    assert len(planned.ways) == 2
    assert lake.status()["version"] == version, "a preview changes nothing"
    (done,) = lake.repair(table, apply=True)
    assert (done.outcome, done.version) == ("accepted", version + 1)
    assert state(lake, table) == after == seen_by_another(place, table)
    assert state(lake, table, version=version) == BEFORE
    commit = lake.history(limit=1)[0]
    assert (commit.kind, commit.actor, commit.tables[0].rows_total) == ("repair", "external", len(after))
    assert "test" in commit.message, "who asked for it"
    assert commit.tables[0].sequence > their_sequence
    (row,) = lake.audit()
    assert (row.kind, row.found, row.outcome, row.version) == ("repair", "drifted", "accepted", done.version)
    # A follower gets all of it, once. Of an unkeyed table nobody is told what went.
    came = {key for key in after if key not in BEFORE or after[key] != BEFORE[key]}
    told = feed(lake, table, mark)
    assert {key for key, change in told if change == "upsert"} >= came
    assert {key for key, change in told if change == "delete"} == (deleted if table == "people" else set())
    goes_on(lake, place, table)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("case", FOREIGN)
def test_the_table_is_put_back_if_that_is_chosen(lake: fm.Lake, place: Place, case: str) -> None:
    act, happened, *_ = FOREIGN[case]
    mark, version = lake.changes("people").until, lake.status()["version"]
    by_another(place, "people", act)
    (done,) = lake.repair("people", choice="revert", apply=True)
    assert (done.happened, done.outcome, done.version) == (happened, "reverted", version + 1)
    assert state(lake) == BEFORE == seen_by_another(place, "people")
    assert feed(lake, "people", mark) == set()
    assert lake.history(limit=1)[0].actor == "test"
    assert [row.outcome for row in lake.audit()] == ["reverted"]
    goes_on(lake, place, "people")


def test_rows_that_carry_our_sequences_are_written_anew_so_that_no_follower_passes_them_by(
    lake: fm.Lake, place: Place
) -> None:
    """PyIceberg carries `_seq` along when it rewrites a file of ours that has it."""
    lake.merge("people", named(k2="bee"))
    mark = lake.changes("people").until
    by_another(place, "people", lambda table: table.overwrite(theirs(k1="changed"), "id = 1"))
    lake.repair("people", apply=True)
    assert state(lake) == {1: "changed", 2: "bee", 3: "c"} == seen_by_another(place, "people")
    assert (1, "upsert") in feed(lake, "people", mark)
    goes_on(lake, place, "people")


def test_a_dropped_table_comes_back(lake: fm.Lake, place: Place) -> None:
    with foreign_catalog(place) as catalog:
        catalog.drop_table("default.people")
    (planned,) = lake.repair("people")
    assert (planned.happened, planned.outcome, planned.choice) == ("dropped", "planned", "revert")
    with pytest.raises(fm.Invalid):
        lake.repair("people", choice="accept", apply=True)
    (done,) = lake.repair("people", apply=True)
    assert done.outcome == "reverted"
    assert state(lake) == BEFORE
    goes_on(lake, place, "people")


@pytest.mark.mostly_sqlite
def test_settings_of_another_writer_are_put_back(lake: fm.Lake, place: Place) -> None:
    by_another(place, "people", lambda table: table.transaction().set_properties(theirs="yes").commit_transaction())
    (planned,) = lake.repair("people")
    assert (planned.happened, planned.choice) == ("changed", "revert")
    lake.repair("people", apply=True)
    with foreign_catalog(place) as catalog:
        assert "theirs" not in catalog.load_table("default.people").properties
    goes_on(lake, place, "people")


def add_column(place: Place) -> None:
    def act(table: Table) -> None:
        with table.update_schema() as update:
            update.add_column("land", StringType())

    by_another(place, "people", act)


def roll_back(place: Place) -> None:
    def act(table: Table) -> None:
        first = table.metadata.snapshots[0].snapshot_id
        table.manage_snapshots().set_current_snapshot(snapshot_id=first).commit()

    by_another(place, "people", act)


def bring_a_key_again(place: Place) -> None:
    by_another(place, "people", lambda table: table.append(theirs(k2="double")))


def bring_a_key_twice(place: Place) -> None:
    by_another(place, "people", lambda table: (table.append(theirs(k7="x")), table.append(theirs(k7="y"))))


UNCLEAR: dict[str, tuple[Callable[[Place], None], str, bool]] = {
    "column": (add_column, "columns were changed", False),
    "rolled back": (roll_back, "not in the table's history", True),
    "key again": (bring_a_key_again, "1 key(s) that the table has", False),
    "key twice": (bring_a_key_twice, "a key more than once", False),
}


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("case", UNCLEAR)
def test_what_is_not_clear_is_said_with_the_reason_and_both_ways(lake: fm.Lake, place: Place, case: str) -> None:
    act, why, can_take = UNCLEAR[case]
    version = lake.status()["version"]
    act(place)
    (planned,) = lake.repair()
    assert (planned.outcome, planned.choice, len(planned.ways)) == ("unclear", None, 2)
    assert why in planned.detail
    for choice in (None, *(() if can_take else ("accept",))):
        with pytest.raises(fm.Invalid) as caught:
            lake.repair("people", choice=choice, apply=True)
        assert why in str(caught.value)
        assert "--revert" in str(caught.value)
    assert lake.status()["version"] == version
    lake.repair("people", choice="revert", apply=True)
    assert state(lake) == BEFORE
    goes_on(lake, place, "people")


@pytest.mark.mostly_sqlite
def test_a_table_that_was_rolled_back_can_be_taken_in_if_that_is_chosen(lake: fm.Lake, place: Place) -> None:
    mark = lake.changes("people").until
    roll_back(place)
    lake.repair("people", choice="accept", apply=True)
    assert state(lake) == {1: "a", 2: "b"} == seen_by_another(place, "people")
    assert feed(lake, "people", mark) == {(3, "delete")}
    goes_on(lake, place, "people")


@pytest.mark.mostly_sqlite
def test_another_writer_that_goes_on_is_a_conflict_and_changes_nothing(lake: fm.Lake, place: Place) -> None:
    by_another(place, "people", lambda table: table.append(theirs(k8="h")))
    version = lake.status()["version"]
    again = at("repair.sealed", lambda: by_another(place, "people", lambda table: table.append(theirs(k9="i"))))
    with again, pytest.raises(fm.Conflict):
        lake.repair("people", apply=True)
    assert (lake.status()["version"], lake.audit()) == (version, [])
    (done,) = lake.repair("people", apply=True)
    assert done.rows_added == 2
    assert state(lake) == {**BEFORE, 8: "h", 9: "i"}
    goes_on(lake, place, "people")


def test_two_repairs_at_once_are_one(lake: fm.Lake, place: Place) -> None:
    by_another(place, "people", lambda table: table.append(theirs(k8="h")))
    with place.open(actor="other", recover=False) as other:
        first = at("repair.sealed", lambda: other.repair("people", apply=True))
        with first, pytest.raises(fm.Conflict):
            lake.repair("people", apply=True)
    assert [row.outcome for row in lake.audit()] == ["accepted"]
    goes_on(lake, place, "people")


@pytest.mark.mostly_sqlite
def test_repair_apply_does_what_is_clear_and_lists_the_rest(lake: fm.Lake, place: Place) -> None:
    by_another(place, "events", lambda table: table.append(theirs(k8="h")))
    add_column(place)
    done = lake.repair(apply=True)
    assert [(one.table, one.outcome) for one in done] == [("events", "accepted"), ("people", "unclear")]
    assert done[1].ways
    assert lake.status()["drifted"] == ["people"]
    with pytest.raises(fm.Invalid):
        lake.repair("people", apply=True)
    (last,) = lake.repair(choice="revert", apply=True)
    assert (last.table, last.outcome) == ("people", "reverted")
    goes_on(lake, place, "people")


@pytest.mark.mostly_sqlite
def test_a_dead_batch_on_a_drifted_table_blocks_writes_to_this_table_only(place: Place) -> None:
    """It waits for the repair. Every write recovers first, and passes it by."""
    from floodmark.testing.children import run_child, run_killed

    run_child(make_people, place)
    assert run_killed(append_a_batch, place, failpoint="append.sealed")
    by_another(place, "people", lambda table: table.append(theirs(k8="h")))
    with place.open() as lake:
        lake.create_table("others", PEOPLE)
        lake.append("others", named(k1="a"))
        with lake.transaction() as tx:
            tx.append("others", named(k2="b"))
        assert state(lake, "others") == {1: "a", 2: "b"}
        for batch in (None, "other", "monday"):
            with pytest.raises(fm.Corrupt, match="changed by another writer"):
                lake.append("people", named(k9="i"), batch=batch)
        with pytest.raises(fm.Corrupt, match="changed by another writer"):
            lake.recover()
        assert len(lake.recover(pass_drifted=True).waiting) == 1
        before = set(Path(place.path, "tables").rglob("*.*"))
        lake.recover(pass_drifted=True)
        assert set(Path(place.path, "tables").rglob("*.*")) == before, "waiting leaves nothing behind"
        assert lake.audit() == []
    with place.open(recover=False) as lake:
        lake.repair("people", apply=True)
        assert lake.recover().outcome == "recovered"
        assert state(lake) == {1: "a", 7: "g", 8: "h"}
        assert sorted(row.outcome for row in lake.audit()) == ["accepted", "rolled_forward"]
        goes_on(lake, place, "people")


def make_people(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", PEOPLE)
        lake.append("people", named(k1="a"))


def append_a_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("people", named(k7="g"), batch="monday")


@pytest.mark.mostly_sqlite
def test_a_read_only_lake_only_says_what_it_would_do(lake: fm.Lake, place: Place) -> None:
    by_another(place, "people", lambda table: table.append(theirs(k8="h")))
    with place.open(read_only=True) as reader:
        assert [one.outcome for one in reader.repair()] == ["planned"]
        with pytest.raises(fm.Invalid):
            reader.repair(apply=True)


@pytest.mark.mostly_sqlite
def test_a_table_that_is_as_we_left_it_needs_nothing(lake: fm.Lake) -> None:
    assert lake.repair() == []
    assert [one.outcome for one in lake.repair("people", apply=True)] == ["nothing_to_do"]
    with pytest.raises(fm.NotFound):
        lake.repair("nobody")
    with pytest.raises(fm.Invalid):
        lake.repair("people", choice="both")


# ── beside branches and references ──


@pytest.mark.mostly_sqlite
def test_a_table_with_branches_is_repaired_where_it_was_written(lake: fm.Lake, place: Place) -> None:
    lake.branches.create("dev")
    lake.append("people", named(k5="dev"), branch="dev")
    by_another(place, "people", lambda table: table.append(theirs(k8="h")))
    for branch in ("main", "dev"):
        with pytest.raises(fm.Corrupt):
            lake.append("people", named(k6="f"), branch=branch)
    (done,) = lake.repair("people", apply=True)
    assert (done.branch, done.outcome) == ("main", "accepted")
    assert state(lake) == {**BEFORE, 8: "h"}
    assert state(lake, branch="dev") == {**BEFORE, 5: "dev"}
    lake.append("people", named(k6="f"), branch="dev")
    goes_on(lake, place, "people")


def test_what_another_writer_did_on_a_branch_is_taken_in_there(lake: fm.Lake, place: Place) -> None:
    lake.branches.create("dev")
    lake.append("people", named(k5="dev"), branch="dev")
    by_another(place, "people", lambda table: table.append(theirs(k8="h"), branch="dev"))
    (planned,) = lake.repair()
    assert (planned.branch, planned.happened, planned.choice) == ("dev", "appended", "accept")
    lake.repair("people", apply=True)
    assert state(lake) == BEFORE
    assert state(lake, branch="dev") == {**BEFORE, 5: "dev", 8: "h"}
    assert lake.branches.merge("dev").outcome == "merged"
    assert state(lake) == {**BEFORE, 5: "dev", 8: "h"}
    goes_on(lake, place, "people")


@pytest.mark.mostly_sqlite
def test_rows_of_another_writer_on_two_branches_at_once_are_not_taken_in(lake: fm.Lake, place: Place) -> None:
    lake.branches.create("dev")
    lake.append("people", named(k5="dev"), branch="dev")
    by_another(place, "people", lambda table: table.append(theirs(k8="h"), branch="dev"))
    by_another(place, "people", lambda table: table.append(theirs(k9="i")))
    (planned,) = lake.repair()
    assert (planned.outcome, planned.choice) == ("unclear", None)
    assert "dev" in planned.detail
    lake.repair("people", choice="revert", apply=True)
    assert (state(lake), state(lake, branch="dev")) == (BEFORE, {**BEFORE, 5: "dev"})
    goes_on(lake, place, "people")


@pytest.fixture
def referring(lake: fm.Lake) -> fm.Lake:
    """orders.id refers to people.id: the same columns, another meaning."""
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    lake.apply({"orders": {"columns": columns, "references": {"id": "people.id"}}})
    lake.append("orders", named(k1="first"))
    return lake


@pytest.mark.mostly_sqlite
def test_rows_that_refer_to_nothing_are_not_taken_in(referring: fm.Lake, place: Place) -> None:
    by_another(place, "orders", lambda table: table.append(theirs(k3="fits")))
    assert referring.repair("orders", apply=True)[0].outcome == "accepted"
    by_another(place, "orders", lambda table: table.append(theirs(k77="lost")))
    (planned,) = referring.repair()
    assert (planned.outcome, planned.choice) == ("unclear", None)
    assert "77" in planned.detail
    referring.repair("orders", choice="revert", apply=True)
    assert state(referring, "orders") == {1: "first", 3: "fits"}
    goes_on(referring, place, "events")


@pytest.mark.mostly_sqlite
def test_keys_that_are_referred_to_do_not_go(referring: fm.Lake, place: Place) -> None:
    by_another(place, "people", lambda table: table.delete("id = 1"))
    (planned,) = referring.repair()
    assert (planned.outcome, planned.choice) == ("unclear", None)
    assert "orders.id" in planned.detail
    referring.repair("people", choice="revert", apply=True)
    by_another(place, "people", lambda table: table.delete("id = 2"))
    assert referring.repair("people", apply=True)[0].outcome == "accepted"
    assert state(referring) == {1: "a", 3: "c"}


@pytest.mark.mostly_sqlite
def test_a_table_that_was_looked_at_for_references_must_stay_as_it_was(referring: fm.Lake, place: Place) -> None:
    by_another(place, "people", lambda table: table.delete("id = 2"))
    with pytest.raises(fm.Corrupt):
        referring.append("orders", named(k2="late"))  # nothing can come to refer to a table that drifted
    with at("repair.sealed", lambda: referring.delete("orders", "id = 1")), pytest.raises(fm.Conflict):
        referring.repair("people", apply=True)
    assert state(referring) == BEFORE
    assert referring.repair("people", apply=True)[0].outcome == "accepted"
    goes_on(referring, place, "people")


@pytest.mark.parametrize(("earlier", "outcome"), [("take_in", "accepted"), ("put_back", "reverted")])
def test_earlier_names_of_the_choices_are_still_accepted(
    lake: fm.Lake, place: Place, earlier: str, outcome: str
) -> None:
    by_another(place, "people", lambda table: table.append(theirs(k8="h")))
    (done,) = lake.repair("people", choice=earlier, apply=True)
    assert done.outcome == outcome
    assert state(lake, "people") == (BEFORE if outcome == "reverted" else {**BEFORE, 8: "h"})
