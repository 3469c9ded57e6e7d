"""Branches merge: what each side did is in the target once, and conflicts are data and change nothing."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.types import StringType

import floodmark as fm
from floodmark.commit.intent import Intent
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.testing.invariants import check_lake
from floodmark.write.add_column import add_column
from tests.conftest import Place, at

USERS = "id long not null, name string"


@pytest.fixture
def lake(lake: fm.Lake) -> fm.Lake:
    """Users 1 to 4 by key, events 1 to 3 without a key; and a branch dev of it."""
    lake.create_table("users", USERS, key=["id"])
    lake.append("users", people(1, 2, 3, 4))
    lake.append("events", people(1, 2, 3))
    lake.branches.create("dev")
    return lake


def people(*ids: int, name: str = "old") -> list[dict[str, Any]]:
    return [{"id": one, "name": name} for one in ids]


def state(lake: fm.Lake, table: str = "users", branch: str = "main") -> dict[int, Any] | list[tuple[int, Any]]:
    """A keyed table as a dict, another as a list."""
    rows = lake.read_arrow(table, branch=branch).read_all().to_pylist()
    found = sorted((row["id"], row["name"]) for row in rows)
    return dict(found) if table == "users" else found


def ids(lake: fm.Lake, branch: str = "main", table: str = "events") -> list[int]:
    return [number for number, _ in state(lake, table, branch)]


def paths(lake: fm.Lake, table: str, branch: str = "main") -> set[str]:
    return set(lake.catalog.files.data_files(lake.catalog.history.head(table, branch)))


def version(lake: fm.Lake, branch: str = "main") -> int:
    return lake.catalog.history.resolve(branch=branch)


# ── rows ──


def test_appends_of_both_sides_go_together(lake: fm.Lake) -> None:
    lake.append("events", people(10, 11, name="dev"), branch="dev")
    lake.append("events", people(20, name="main"))
    merged = lake.branches.merge("dev", message="ready", actor="ann")
    assert merged.outcome == "merged"
    assert [(one.table, one.change, one.rows_added) for one in merged.tables] == [("events", "changed", 2)]
    assert merged.commit is not None
    assert (merged.commit.kind, merged.commit.branch, merged.commit.actor) == ("branch_merge", "main", "ann")
    assert ids(lake) == [1, 2, 3, 10, 11, 20]
    assert ids(lake, "dev") == [1, 2, 3, 10, 11]
    # No copy: the same file, with main's next sequence.
    assert paths(lake, "events", "dev") - paths(lake, "events") == set()
    rows = lake.read_arrow("events", with_seq=True).read_all().to_pylist()
    newest = merged.commit.table("events").sequence
    assert sorted(row["id"] for row in rows if row["_seq"] == newest) == [10, 11]
    check_lake(lake.catalog)


def test_a_merge_is_new_to_whoever_follows_main(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    lake.merge("users", people(1, 9, name="dev"), branch="dev")
    lake.delete("users", "id = 2", branch="dev")
    lake.append("events", people(20))
    marks = {name: lake.catalog.history.head(name).sequence for name in ("events", "users")}
    lake.branches.merge("dev")
    events = lake.changes("events", since=marks["events"]).arrow().read_all().to_pylist()
    assert [(row["id"], row["_change"]) for row in events] == [(10, "upsert")]
    users = lake.changes("users", since=marks["users"]).arrow().read_all().to_pylist()
    assert sorted((row["id"], row["_change"], row["name"]) for row in users) == [
        (1, "upsert", "dev"),
        (2, "delete", None),
        (9, "upsert", "dev"),
    ]
    assert all(row["_seq"] > marks["users"] for row in users)


# name: what dev does, what main does, main's rows after the merge; None where they conflict.
ROWS: dict[str, tuple[dict[int, str | None], dict[int, str | None], dict[int, str] | None]] = {
    "only theirs": ({1: "dev"}, {}, {1: "dev", 2: "old"}),
    "only ours": ({2: "dev"}, {1: "main"}, {1: "main", 2: "dev"}),
    "both the same": ({1: "new"}, {1: "new"}, {1: "new", 2: "old"}),
    "both inserted the same": ({9: "new"}, {9: "new"}, {1: "old", 2: "old", 9: "new"}),
    "both deleted": ({1: None}, {1: None}, {2: "old"}),
    "theirs deleted": ({1: None}, {2: "main"}, {2: "main"}),
    "ours deleted": ({2: "dev"}, {1: None}, {2: "dev"}),
    "changed and back": ({1: "old"}, {1: "main"}, {1: "main", 2: "old"}),
    "both changed": ({1: "dev"}, {1: "main"}, None),
    "both inserted": ({9: "dev"}, {9: "main"}, None),
    "updated, we deleted": ({1: "dev"}, {1: None}, None),
    "deleted, we updated": ({1: None}, {1: "main"}, None),
}


def act(lake: fm.Lake, branch: str, changes: dict[int, str | None]) -> None:
    for number, name in changes.items():
        if name is None:
            lake.delete("users", f"id = {number}", branch=branch)
        else:
            # Written even if it is there just so: it has a new sequence.
            lake.merge("users", people(number, name=name), skip_unchanged=False, branch=branch)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("case", ROWS)
def test_rows_merge_by_key(lake: fm.Lake, case: str) -> None:
    theirs, ours, expected = ROWS[case]
    act(lake, "dev", theirs)
    act(lake, "main", ours)
    before, newest = state(lake), version(lake)
    planned = lake.branches.merge("dev", dry_run=True)
    merged = lake.branches.merge("dev", on_conflict="return")
    if expected is not None:
        assert (planned.outcome, merged.outcome) == ("planned", "merged")
        assert planned.tables == merged.tables
        assert state(lake) == {3: "old", 4: "old", **expected}
    else:
        (number,) = theirs
        assert (planned.outcome, merged.outcome) == ("conflict", "conflict")
        assert planned.conflicts == merged.conflicts
        (conflict,) = merged.conflicts
        assert merged.conflicts_total == 1
        values = [None if row is None else row["name"] for row in (conflict.base, conflict.ours, conflict.theirs)]
        assert values == [None if number == 9 else "old", ours[number], theirs[number]]
        assert (conflict.table, conflict.key) == ("users", {"id": number})
        assert conflict.reason == ("deleted" if None in values[1:] else "changed")
        assert (state(lake), version(lake)) == (before, newest)
        json.dumps(merged.as_dict())
    check_lake(lake.catalog)


@pytest.mark.parametrize("prefer", ["ours", "theirs"])
def test_a_side_is_preferred_and_the_other_learns_it(lake: fm.Lake, prefer: str) -> None:
    theirs: dict[int, str | None] = {1: "dev", 2: None, 3: "dev", 9: "dev"}
    ours: dict[int, str | None] = {1: "main", 2: "main", 3: None, 4: "main"}
    act(lake, "dev", theirs)
    act(lake, "main", ours)
    assert lake.branches.merge("dev", on_conflict="return").conflicts_total == 3
    assert lake.branches.merge("dev", prefer=prefer).outcome == "merged"
    kept = {1: "main", 2: "main"} if prefer == "ours" else {1: "dev", 3: "dev"}
    assert state(lake) == {**kept, 4: "main", 9: "dev"}
    # The other way round there is nothing left to decide.
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert state(lake, branch="dev") == state(lake)
    assert lake.branches.merge("dev").outcome in ("merged", "up_to_date")
    assert state(lake) == {**kept, 4: "main", 9: "dev"}
    check_lake(lake.catalog)


def test_conflicts_are_counted_beyond_the_limit(lake: fm.Lake) -> None:
    for branch in ("dev", "main"):
        lake.merge("users", people(1, 2, 3, name=branch), branch=branch)
    merged = lake.branches.merge("dev", limit=2, on_conflict="return")
    assert (len(merged.conflicts), merged.conflicts_total) == (2, 3)


def test_a_conflict_of_one_table_leaves_the_others_alone(lake: fm.Lake) -> None:
    for branch in ("dev", "main"):
        lake.merge("users", people(1, name=branch), branch=branch)
    lake.append("events", people(10), branch="dev")
    lake.create_table("extra", USERS, branch="dev")
    assert lake.branches.merge("dev", on_conflict="return").outcome == "conflict"
    assert ids(lake) == [1, 2, 3]
    assert "extra" not in [table["table"] for table in lake.tables()]
    check_lake(lake.catalog)


# ── tables without a key ──


def test_an_overwrite_comes_to_a_target_that_is_as_it_was(lake: fm.Lake) -> None:
    lake.delete("events", "id = 2", branch="dev")
    lake.append("events", people(10), branch="dev")
    mark = lake.catalog.history.head("events").sequence
    merged = lake.branches.merge("dev")
    assert [(one.rows_added, one.rows_deleted) for one in merged.tables] == [(1, 1)]
    assert ids(lake) == [1, 3, 10]
    # Rows that main had keep their sequences.
    news = lake.changes("events", since=mark).arrow().read_all().to_pylist()
    assert [row["id"] for row in news] == [10]
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("where", ["dev", "main"])
def test_a_compaction_beside_an_overwrite_ships_nothing_again(lake: fm.Lake, where: str) -> None:
    lake.append("events", people(4, 5, 6))
    lake.branches.create("other")
    lake.delete("events", "id = 2", branch="other")
    lake.append("events", people(10), branch="other")
    if where == "main":
        assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
    mark = lake.catalog.history.head("events").sequence
    planned = lake.branches.merge("other", dry_run=True)
    merged = lake.branches.merge("other")
    assert planned.tables == merged.tables
    assert [(one.rows_added, one.rows_deleted) for one in merged.tables] == [(1, 1)]
    assert ids(lake) == [1, 3, 4, 5, 6, 10]
    news = lake.changes("events", since=mark).arrow().read_all().to_pylist()
    assert [row["id"] for row in news] == [10]
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("prefer", ["ours", "theirs"])
@pytest.mark.parametrize("ours", ["append", "delete"])
def test_an_overwrite_stands_against_anything(lake: fm.Lake, ours: str, prefer: str) -> None:
    lake.overwrite("events", people(10), branch="dev")
    if ours == "append":
        lake.append("events", people(20))
    else:
        lake.delete("events", "id = 1")
    before = ids(lake)
    merged = lake.branches.merge("dev", on_conflict="return")
    assert [(one.table, one.reason, one.key) for one in merged.conflicts] == [("events", "overwritten", None)]
    assert ids(lake) == before
    assert lake.branches.merge("dev", prefer=prefer).outcome == "merged"
    assert ids(lake) == (before if prefer == "ours" else [10])
    assert lake.branches.merge("dev").outcome == "up_to_date"
    check_lake(lake.catalog)


def test_an_append_against_an_overwrite_is_a_conflict(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    lake.delete("events", "id = 1")
    assert [one.reason for one in lake.branches.merge("dev", on_conflict="return").conflicts] == ["overwritten"]


def test_one_batch_on_both_sides_is_a_conflict(lake: fm.Lake) -> None:
    lake.append("events", people(10), batch="b1", branch="dev")
    lake.append("events", people(10), batch="b1")
    assert [one.reason for one in lake.branches.merge("dev", on_conflict="return").conflicts] == ["batch"]
    assert lake.branches.merge("dev", prefer="ours").outcome == "merged"
    assert ids(lake) == [1, 2, 3, 10]


def test_a_batch_comes_with_its_rows(lake: fm.Lake) -> None:
    lake.append("events", people(10), batch="b1", branch="dev")
    lake.branches.merge("dev")
    assert lake.append("events", people(10), batch="b1").outcome == "already_committed"
    assert ids(lake) == [1, 2, 3, 10]


# ── again and again ──


def test_a_merge_again_is_up_to_date(lake: fm.Lake) -> None:
    assert lake.branches.merge("dev").outcome == "up_to_date"
    lake.append("events", people(10), branch="dev")
    lake.branches.merge("dev")
    newest = version(lake)
    assert lake.branches.merge("dev").outcome == "up_to_date"
    assert lake.branches.merge("main", into="dev").outcome == "up_to_date"
    lake.maintain.compact("events", files_min=2)
    assert lake.branches.merge("main", into="dev").outcome == "up_to_date"
    assert version(lake, "dev") < newest
    check_lake(lake.catalog)


def test_back_and_forth_nothing_doubles(lake: fm.Lake) -> None:
    events, users = {1, 2, 3}, dict.fromkeys((1, 2, 3, 4), "old")
    for turn in range(1, 4):
        for branch, number in (("dev", turn * 10), ("main", turn * 10 + 1)):
            lake.append("events", people(number), branch=branch)
            lake.merge("users", people(number, turn, name=f"{branch} {turn}"), branch=branch)
            events.add(number)
            users |= {number: f"{branch} {turn}", turn: f"{branch} {turn}"}
            pair = ("dev", "main") if branch == "dev" else ("main", "dev")
            merged = lake.branches.merge(pair[0], into=pair[1])
            assert merged.outcome == "merged"
            for side in ("dev", "main"):
                assert ids(lake, side) == sorted(events)
                assert state(lake, branch=side) == users
        lake.maintain.compact("events", files_min=2)
        lake.maintain.compact("users", files_min=2)
    assert "compact" in [commit.kind for commit in lake.history(table="events")]
    check_lake(lake.catalog)


def test_a_table_made_on_a_branch_comes_whole_and_goes_on_from_there(lake: fm.Lake) -> None:
    lake.create_table("made", USERS, branch="dev")
    lake.create_table("empty", USERS, branch="dev")
    lake.append("made", people(1, 2), branch="dev")
    merged = lake.branches.merge("dev")
    assert [(one.table, one.change, one.rows_added) for one in merged.tables] == [
        ("empty", "created", 0),
        ("made", "created", 2),
    ]
    assert ids(lake, table="made") == [1, 2]
    assert ids(lake, table="empty") == []
    lake.append("made", people(3))
    lake.append("made", people(4), branch="dev")
    lake.append("empty", people(5))
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert lake.branches.merge("dev").outcome == "merged"
    for branch in ("main", "dev"):
        assert ids(lake, branch, "made") == [1, 2, 3, 4]
        assert ids(lake, branch, "empty") == [5]
    check_lake(lake.catalog)


def test_a_branch_of_a_branch_merges_step_by_step(lake: fm.Lake) -> None:
    lake.branches.create("deep", source="dev")
    lake.append("events", people(10), branch="deep")
    lake.merge("users", people(1, name="deep"), branch="deep")
    with pytest.raises(fm.Invalid):
        lake.branches.merge("deep", into="main")
    lake.branches.merge("deep")
    assert ids(lake) == [1, 2, 3]
    lake.branches.merge("dev")
    lake.append("events", people(20))
    lake.branches.merge("main", into="dev")
    lake.branches.merge("dev", into="deep")
    for branch in ("main", "dev", "deep"):
        assert ids(lake, branch) == [1, 2, 3, 10, 20]
        assert state(lake, branch=branch) == {1: "deep", 2: "old", 3: "old", 4: "old"}
    check_lake(lake.catalog)


# ── shapes ──


def test_a_shape_comes_with_its_rows(lake: fm.Lake) -> None:
    lake.append("events", [{"id": 10, "name": "x", "extra": 5}], evolve=True, branch="dev")
    lake.merge("users", [{"id": 1, "name": "x", "extra": 5}], evolve=True, branch="dev")
    lake.append("events", people(20))
    lake.merge("users", people(2, name="main"))
    merged = lake.branches.merge("dev")
    assert [(one.table, one.change) for one in merged.tables] == [("events", "reshaped"), ("users", "reshaped")]
    rows = lake.read_arrow("events").read_all().to_pylist()
    assert {row["id"]: row["extra"] for row in rows} == {1: None, 2: None, 3: None, 10: 5, 20: None}
    rows = lake.read_arrow("users").read_all().to_pylist()
    assert {row["id"]: (row["name"], row["extra"]) for row in rows} == {
        1: ("x", 5),
        2: ("main", None),
        3: ("old", None),
        4: ("old", None),
    }
    check_lake(lake.catalog)


def test_rows_come_into_the_shape_that_main_took_meanwhile(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    lake.merge("users", people(1, name="dev"), branch="dev")
    lake.append("events", [{"id": 20, "name": "x", "extra": 5}], evolve=True)
    lake.merge("users", [{"id": 2, "name": "x", "extra": 5}], evolve=True)
    assert lake.branches.merge("dev").outcome == "merged"
    rows = lake.read_arrow("events").read_all().to_pylist()
    assert {row["id"]: row["extra"] for row in rows} == {1: None, 2: None, 3: None, 10: None, 20: 5}
    assert state(lake) == {1: "dev", 2: "x", 3: "old", 4: "old"}


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("prefer", ["ours", "theirs"])
def test_two_shapes_are_a_conflict(lake: fm.Lake, prefer: str) -> None:
    for branch, column in (("dev", "theirs"), ("main", "ours")):
        lake.append("events", [{"id": 10, "name": branch, column: 5}], evolve=True, branch=branch)
    assert [one.reason for one in lake.branches.merge("dev", on_conflict="return").conflicts] == ["schema"]
    assert lake.branches.merge("dev", prefer=prefer).outcome == "merged"
    table = lake.read_arrow("events").read_all()
    assert table.column_names == ["id", "name", prefer]
    assert sorted(table.column("name").to_pylist()) == ["dev", "main", "old", "old", "old"]
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_a_column_that_main_fills_is_filled_on_the_way(lake: fm.Lake) -> None:
    lake.append("events", people(10, name="dev"), branch="dev")
    lake.merge("users", people(1, 9, name="dev"), branch="dev")
    for table in ("events", "users"):
        add_column(lake.catalog, Intent("add_column", "main", "test", ""), table, "copy", StringType(), "name")
    # Rows that are carried to another file have the column, which the branch knows nothing of: that is no conflict.
    lake.merge("users", people(2, name="main"))
    lake.maintain.compact("users", files_min=2)
    assert lake.branches.merge("dev").outcome == "merged"
    for table in ("events", "users"):
        rows = lake.read_arrow(table).read_all().to_pylist()
        assert {row["id"]: row["copy"] for row in rows if row["id"] in (1, 9, 10) and row["name"] == "dev"} == (
            {10: "dev"} if table == "events" else {1: "dev", 9: "dev"}
        )
    check_lake(lake.catalog)


def test_deletions_that_are_not_known_any_more_are_not_merged(lake: fm.Lake) -> None:
    base = version(lake)
    lake.branches.delete("dev")
    lake.catalog.history.pin(base, holder="test", reason="an old version to start from")
    lake.delete("users", "id = 2")
    lake.append("users", people(9))
    lake.append("users", people(10))
    lake.maintain.expire(keep="0s")
    lake.branches.create("late", version=base)
    with pytest.raises(fm.BelowRetention):
        lake.branches.merge("main", into="late")
    # What the branch itself did is known.
    lake.merge("users", people(1, name="late"), branch="late")
    assert lake.branches.merge("late").outcome == "merged"
    assert state(lake) == {1: "late", 3: "old", 4: "old", 9: "old", 10: "old"}
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_values_of_every_kind_are_compared_and_told(lake: fm.Lake) -> None:
    text = "k string not null, day date, part struct<a: long, b: array<string>>, m map<string, double>"
    lake.create_table("rich", text, key=["k"], partition=["day"])

    def row(key: str, value: float) -> dict[str, Any]:
        part = {"a": 1, "b": ["x", None]}
        return {"k": key, "day": date(2026, 11, 15), "part": part, "m": {"v": value, "nan": float("nan")}}

    lake.append("rich", [row("a", 1.0), row("b", 1.0)])
    lake.branches.create("other")
    lake.merge("rich", [row("a", 2.0), row("c", 1.0)], branch="other")
    lake.merge("rich", [row("b", 3.0)])
    assert lake.branches.merge("other").outcome == "merged"
    rows = lake.read_arrow("rich").read_all().to_pylist()
    assert {one["k"]: dict(one["m"])["v"] for one in rows} == {"a": 2.0, "b": 3.0, "c": 1.0}
    for branch, value in (("other", 5.0), ("main", 6.0)):
        lake.merge("rich", [row("a", value)], branch=branch)
    (conflict,) = lake.branches.merge("other", on_conflict="return").conflicts
    told = json.loads(json.dumps(conflict.as_dict()))
    assert told["ours"]["day"] == "2026-11-15"
    assert (told["theirs"]["m"]["v"], told["theirs"]["part"]) == (5.0, {"a": 1, "b": ["x", None]})


# ── looking ──


def test_a_diff_tells_what_the_branch_did(lake: fm.Lake) -> None:
    lake.merge("users", people(1, 9, name="dev"), branch="dev")
    lake.delete("users", "id = 2", branch="dev")
    lake.append("events", people(10, 11), branch="dev")
    lake.delete("events", "id = 1", branch="dev")
    lake.create_table("made", USERS, branch="dev")
    lake.merge("users", people(3, name="main"))  # not the branch's doing
    found = lake.branches.diff("dev", limit=2)
    assert [(one.table, one.change, one.rows_added, one.rows_updated, one.rows_deleted) for one in found.tables] == [
        ("events", "changed", 2, 0, 1),
        ("made", "created", 0, 0, 0),
        ("users", "changed", 1, 1, 1),
    ]
    users = found.tables[2].samples
    assert len(users) == 2
    whole = lake.branches.diff("dev", table="users").tables[0].samples
    by_change = {one["change"]: (one["row"], one["before"]) for one in whole}
    assert by_change == {
        "added": ({"id": 9, "name": "dev"}, None),
        "updated": ({"id": 1, "name": "dev"}, {"id": 1, "name": "old"}),
        "deleted": (None, {"id": 2, "name": "old"}),
    }
    json.dumps(found.as_dict())
    lake.branches.merge("dev")
    assert lake.branches.diff("dev").tables == ()
    lake.branches.merge("main", into="dev")
    assert lake.branches.diff("dev").tables == ()
    with pytest.raises(fm.NotFound):
        lake.branches.diff("dev", table="nothing")
    with pytest.raises(fm.Invalid):
        lake.branches.diff("main")


def test_looking_writes_nothing(lake: fm.Lake, place: Place) -> None:
    lake.append("events", people(10), branch="dev")
    with place.open(read_only=True) as reader:
        assert reader.branches.diff("dev").tables[0].rows_added == 1
        planned = reader.branches.merge("dev", dry_run=True)
        assert (planned.outcome, planned.tables[0].rows_added, planned.commit) == ("planned", 1, None)
        with pytest.raises(fm.Invalid):
            reader.branches.merge("dev")
    assert ids(lake) == [1, 2, 3]


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize(
    "wrong", [{"prefer": "mine"}, {"limit": -1}, {"into": "dev"}, {"into": "nothing"}], ids=lambda one: str(one)
)
def test_a_wrong_wish_is_refused(lake: fm.Lake, wrong: dict[str, Any]) -> None:
    with pytest.raises((fm.Invalid, fm.NotFound)):
        lake.branches.merge("dev", **wrong)
    with pytest.raises(fm.Invalid):
        lake.branches.merge("main")


# ── while others are at work ──


def test_a_merge_holds_what_the_target_wrote_meanwhile(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    lake.merge("users", people(1, name="dev"), branch="dev")
    with at("branch_merge.sealed", lambda: lake.merge("users", people(2, name="main"))):
        merged = lake.branches.merge("dev")
    assert merged.outcome == "merged"
    assert state(lake) == {1: "dev", 2: "main", 3: "old", 4: "old"}
    assert ids(lake) == [1, 2, 3, 10]
    check_lake(lake.catalog)


def test_a_merge_holds_what_the_source_wrote_meanwhile(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    with at("branch_merge.staged", lambda: lake.append("notes", people(1), branch="dev")):
        lake.merge("users", people(1, name="dev"), branch="dev")
        assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake, table="notes") == [1]
    assert lake.branches.merge("dev").outcome == "up_to_date"
    check_lake(lake.catalog)


def test_a_conflict_that_came_meanwhile_is_found(lake: fm.Lake) -> None:
    lake.merge("users", people(1, name="dev"), branch="dev")
    with at("branch_merge.built", lambda: lake.merge("users", people(1, name="main"))):
        assert lake.branches.merge("dev", on_conflict="return").conflicts_total == 1
    assert state(lake)[1] == "main"
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("point", ["begun", "staged", "rewritten", "sealed", "built"])
def test_a_branch_deleted_while_it_is_merged_ends_in_conflict(lake: fm.Lake, point: str) -> None:
    lake.merge("users", people(1, name="dev"), branch="dev")
    before = version(lake)
    with at(f"branch_merge.{point}", lambda: lake.branches.delete("dev")), pytest.raises(fm.Conflict):
        lake.branches.merge("dev")
    assert (state(lake)[1], version(lake)) == ("old", before)
    check_lake(lake.catalog)


def test_two_merges_at_once_are_one(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    found: list[str] = []
    with at("branch_merge.sealed", lambda: found.append(lake.branches.merge("dev").outcome)):
        found.append(lake.branches.merge("dev").outcome)
    assert found == ["merged", "up_to_date"]
    assert ids(lake) == [1, 2, 3, 10]
    check_lake(lake.catalog)


# ── what is left behind ──


def test_a_merged_file_outlives_its_branch(lake: fm.Lake) -> None:
    lake.append("events", people(10), branch="dev")
    lake.delete("events", "id = 10", branch="dev")
    lake.append("events", people(11), branch="dev")
    lake.merge("users", people(1, name="dev"), branch="dev")
    lake.branches.merge("dev")
    lake.branches.delete("dev")
    lake.maintain.expire(keep="0s")
    assert lake.maintain.sweep(grace="0s").outcome == "swept"
    assert ids(lake) == [1, 2, 3, 11]
    assert state(lake)[1] == "dev"
    check_lake(lake.catalog)


def test_deletions_reach_a_sink_of_main(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="users", path=str(tmp_path / "out"))

    def run() -> list[tuple[int, str]]:
        before = len(shipped())
        assert lake.sinks.run("out").error is None
        return sorted(shipped()[before:])

    def shipped() -> list[tuple[int, str]]:
        units = read_units(str(tmp_path / "out"), table="users")
        rows = [row for unit in units for batch in read_rows(unit) for row in batch.to_pylist()]
        return [(row["id"], row["_change"]) for row in rows]

    assert run() == [(number, "upsert") for number in (1, 2, 3, 4)]
    lake.delete("users", "id = 2", branch="dev")
    lake.merge("users", people(1, name="dev"), branch="dev")
    assert run() == []
    lake.branches.merge("dev")
    assert run() == [(1, "upsert"), (2, "delete")]
    assert run() == []


def test_a_merge_that_would_break_a_reference_is_refused(lake: fm.Lake, tmp_path: Path) -> None:
    shape = tmp_path / "schema.toml"
    shape.write_text(
        """
        [tables.customers]
        key = ["id"]
        columns = { id = "long" }
        [tables.orders]
        columns = { number = "long", customer = "long" }
        references = { customer = "customers.id" }
        """
    )
    lake.apply(shape)
    lake.append("customers", [{"id": 1}, {"id": 2}])
    lake.branches.create("other")
    lake.delete("customers", "id = 2", branch="other")
    lake.append("orders", [{"number": 1, "customer": 2}])
    before = version(lake)
    with pytest.raises(fm.MergeConflict, match="reference"):
        lake.branches.merge("other")
    assert version(lake) == before
    check_lake(lake.catalog)
