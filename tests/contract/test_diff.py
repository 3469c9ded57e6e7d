"""What differs between two versions: per table rows, columns, tables that came or went; nothing is written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

import floodmark as fm
from floodmark.clock import format_time
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, rows

pytestmark = pytest.mark.mostly_sqlite(2)


def named(*numbers: int, name: str) -> list[dict[str, Any]]:
    return [{"id": number, "name": name} for number in numbers]


def newest(lake: fm.Lake, branch: str = "main") -> int:
    return lake.catalog.history.resolve(branch=branch)


@pytest.fixture
def people(lake: fm.Lake) -> fm.Lake:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", named(1, 2, 3, name="old"))
    lake.append("events", rows(1, 1))
    return lake


def counts(found: fm.BranchDiff) -> dict[str, tuple[str, int, int, int]]:
    return {one.table: (one.change, one.rows_added, one.rows_updated, one.rows_deleted) for one in found.tables}


def shown(found: fm.BranchDiff, table: str) -> set[tuple[str, Any, Any]]:
    (one,) = (one for one in found.tables if one.table == table)
    return {
        (each["change"], *(None if row is None else row["id"] for row in (each["row"], each["before"])))
        for each in one.samples
    }


def test_rows_of_each_table_are_counted_and_shown_in_both_directions(people: fm.Lake) -> None:
    then = newest(people)
    people.merge("people", named(2, 4, name="new"))
    people.delete("people", "id = 3")
    people.append("events", rows(1, 5))
    people.delete("events", "id = 9")
    now = newest(people)
    found = people.diff(then, now)
    assert (found.branch, found.parent, found.common_version, found.head_version) == ("main", "main", then, now)
    assert counts(found) == {"events": ("changed", 2, 0, 0), "people": ("changed", 1, 1, 1)}
    assert shown(found, "people") == {("updated", 2, 2), ("added", 4, None), ("deleted", None, 3)}
    back = people.diff(now, then)
    assert counts(back) == {"events": ("changed", 0, 0, 2), "people": ("changed", 1, 1, 1)}
    assert shown(back, "people") == {("updated", 2, 2), ("added", 3, None), ("deleted", None, 4)}
    assert counts(people.diff(then, now, "events")) == {"events": ("changed", 2, 0, 0)}
    assert people.diff(now, now).tables == ()
    assert [len(one.samples) for one in people.diff(then, now, limit=1).tables] == [1, 1]
    assert [len(one.samples) for one in people.diff(then, now, limit=0).tables] == [0, 0]
    json.dumps(found.as_dict())


def test_what_compaction_and_a_fill_moved_is_no_difference(people: fm.Lake) -> None:
    for number in range(10, 14):
        people.append("people", named(number, name="old"))
    then = newest(people)
    assert people.maintain.compact("people", files_min=2).records[0].outcome == "compacted"
    assert people.diff(then, newest(people)).tables == ()
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    people.apply({"people": {"columns": {**columns, "extra": {"type": "int", "required": True, "default": 7}}}})
    (found,) = people.diff(then, newest(people)).tables
    assert (found.change, found.rows_added, found.rows_updated, found.rows_deleted) == ("reshaped", 0, 0, 0)
    assert found.columns == ("column extra added: int",)


@pytest.mark.parametrize("later", [True, False], ids=["later", "eager"])
def test_values_that_were_written_into_a_filled_column_are_a_difference(people: fm.Lake, later: bool) -> None:
    then = newest(people)
    people.add_column("people", "extra", "int", default=7, fill_later=later)
    people.add_column("events", "extra", "int", default=7, fill_later=later)
    added = newest(people)
    people.merge("people", [{"id": 1, "name": "old", "extra": 8}, {"id": 2, "name": "old", "extra": 7}])
    people.update("events", {"extra": "8"}, "true")
    for version in (then, added):
        found = {one.table: one for one in people.diff(version, newest(people)).tables}
        assert (found["people"].rows_added, found["people"].rows_updated, found["people"].rows_deleted) == (0, 1, 0)
        assert (found["events"].rows_added, found["events"].rows_updated, found["events"].rows_deleted) == (2, 0, 2)
    assert shown(people.diff(added, newest(people)), "people") == {("updated", 1, 1)}


def test_shapes_and_tables_that_came_or_went(people: fm.Lake) -> None:
    people.create_table("shaped", "id int not null, name string, gone string", key=["id"])
    people.append("shaped", [{"id": 1, "name": "a", "gone": "x"}])
    then = newest(people)
    columns = {
        "id": {"type": "long", "required": True},
        "label": {"type": "string", "renamed_from": "name"},
        "extra": "int",
    }
    people.apply(
        {"shaped": {"columns": columns, "dropped": ["gone"], "partition": ["bucket(2, id)"]}}, allow_destructive=True
    )
    people.merge("shaped", [{"id": 1, "label": "b", "extra": 1}, {"id": 2, "label": "c", "extra": None}])
    people.create_table("later", EVENTS)
    people.append("later", rows(1, 2))
    people.drop_table("notes")
    people.drop_table("events")
    people.create_table("events", EVENTS)
    now = newest(people)
    found = people.diff(then, now)
    assert sorted((one.table, one.change, one.rows_added, one.rows_deleted) for one in found.tables) == [
        ("events", "created", 0, 0),
        ("events", "dropped", 0, 2),
        ("later", "created", 2, 0),
        ("notes", "dropped", 0, 0),
        ("shaped", "reshaped", 1, 0),
    ]
    shaped = next(one for one in found.tables if one.table == "shaped")
    assert set(shaped.columns) == {
        "column extra added: int",
        "column gone dropped",
        "column name renamed to label",
        "column id was int, is long",
        "partitioned by id_bucket, before by nothing",
    }
    assert shaped.rows_updated == 1
    assert shaped.samples[0]["before"] == {"id": 1, "label": "a", "extra": None}
    # Backwards wide values are read as what they are.
    people.merge("shaped", [{"id": 2**40, "label": "wide", "extra": None}])
    (back,) = people.diff(newest(people), then, "shaped").tables
    assert (back.change, back.rows_deleted, back.rows_updated) == ("reshaped", 2, 1)
    assert "column id was long, is int" in back.columns


def test_times_branches_and_what_is_refused(people: fm.Lake) -> None:
    then = newest(people)
    moment = format_time(people.catalog.history.commit(then).committed_ms)
    people.branches.create("dev")
    people.append("people", named(9, name="dev"), branch="dev")
    on_dev = newest(people, "dev")
    found = people.diff(then, on_dev)
    assert (found.parent, found.branch, counts(found)) == ("main", "dev", {"people": ("changed", 1, 0, 0)})
    at_time = people.diff(moment, on_dev, branch="dev")
    assert at_time.common_version <= then
    for wrong in (
        lambda: people.diff(True, then),
        lambda: people.diff("soon", then),
        lambda: people.diff(then, then, limit=-1),
    ):
        with pytest.raises(fm.Invalid):
            wrong()
    with pytest.raises(fm.NotFound, match="neither version"):
        people.diff(then, then, "nothing")
    with pytest.raises(fm.NotFound, match="no such version"):
        people.diff(then, 999)
    people.maintain.expire(keep="0s")
    with pytest.raises(fm.BelowRetention):
        people.diff(1, then)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_versions_differ_as_their_rows_do(new_place: Any, seed: int) -> None:
    dice = random.Random(seed)
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("people", EVENTS, key=["id"])
        start = newest(lake)
        for _ in range(20):
            numbers = dice.sample(range(15), dice.randint(1, 5))
            if dice.random() < 0.6:
                lake.merge("people", named(*numbers, name=dice.choice("abc")))
            elif dice.random() < 0.5:
                lake.delete("people", f"id = {numbers[0]}")
            else:
                lake.maintain.compact(files_min=2)
        for _ in range(15):
            one, other = (dice.randint(start, newest(lake)) for _ in range(2))
            before, after = (
                {row["id"]: row["name"] for row in lake.read_arrow("people", version=version).read_all().to_pylist()}
                for version in (one, other)
            )
            both = before.keys() & after.keys()
            expected = (
                len(after.keys() - before.keys()),
                sum(before[key] != after[key] for key in both),
                len(before.keys() - after.keys()),
            )
            found = counts(lake.diff(one, other)).get("people", ("", 0, 0, 0))
            assert found[1:] == expected
        check_lake(lake.catalog)
