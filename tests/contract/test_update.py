"""`update` on both databases: new values for some rows, sequences and feed, alone and beside others at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at, rows

SCHEMA = "id long not null, name string, country string, age int"
State = dict[int, tuple[str | None, str | None, int | None, int]]
BEFORE: State = {
    1: ("a", "DE", 10, 1),
    2: ("b", "DE", 20, 1),
    3: ("c", "NL", 30, 1),
    4: ("d", "DE", 40, 2),
    5: ("e", "FR", 50, 2),
    6: ("f", "FR", 60, 2),
}


def people(*numbers: int) -> list[dict[str, Any]]:
    return [dict(zip(("id", "name", "country", "age"), (one, *BEFORE[one][:3]), strict=True)) for one in numbers]


@pytest.fixture(params=["key", "no key"])
def lake(place: Place, request: pytest.FixtureRequest) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", SCHEMA, key=["id"] if request.param == "key" else [])
        lake.append("people", people(1, 2, 3))
        lake.append("people", people(4, 5, 6))
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


def state(lake: fm.Lake, **moment: Any) -> State:
    found = lake.read_arrow("people", with_seq=True, **moment).read_all().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: (row["name"], row["country"], row["age"], row["_seq"]) for row in found}


def files(lake: fm.Lake) -> set[str]:
    return set(lake.catalog.files.data_files(lake.catalog.history.head("people")))


# ── what it does ──


def test_rows_that_match_get_the_values_and_a_new_sequence(lake: fm.Lake) -> None:
    before = files(lake)
    commit = lake.update("people", set={"country": "'NL'", "Age": "null"}, where="id = 2 or id = 3", message="moved")
    (touched,) = commit.tables
    assert (commit.kind, commit.message, commit.actor) == ("update", "moved", "test")
    assert (touched.rows_added, touched.rows_updated, touched.rows_deleted, touched.rows_total) == (0, 2, 0, 6)
    changed = {2: ("b", "NL", None, 3), 3: ("c", "NL", None, 3)}
    assert state(lake) == {**BEFORE, **changed}
    assert state(lake, version=commit.version - 1) == BEFORE
    assert len(before - files(lake)) == 1, "only the file that held them is replaced"
    found = lake.changes("people", 2).arrow().read_all().to_pylist()
    assert sorted((row["id"], row["_change"], row["_seq"]) for row in found) == [(2, "upsert", 3), (3, "upsert", 3)]


def test_rows_that_have_the_values_already_stay_as_they_are(lake: fm.Lake) -> None:
    commit = lake.update("people", {"country": "'DE'"}, "id < 4")
    assert commit.tables[0].rows_updated == 1
    assert state(lake) == {**BEFORE, 3: ("c", "DE", 30, 3)}
    again = lake.update("people", {"country": "'DE'"}, "id < 4")
    assert (again.outcome, again.version) == ("nothing_to_do", commit.version)
    assert lake.update("people", {"country": "'XX'"}, "id = 77").outcome == "nothing_to_do"
    assert lake.update("people", {"name": "name", "age": "age"}, "true").outcome == "nothing_to_do"


def test_expressions_see_the_row_as_it_was(lake: fm.Lake) -> None:
    lake.update("people", {"name": "country", "country": "name"}, where="id = 1")
    assert state(lake)[1] == ("DE", "a", 10, 3)


def test_all_rows_are_updated_only_if_that_is_asked_for(lake: fm.Lake) -> None:
    for where in (None, "", "  "):
        with pytest.raises(fm.Invalid, match="condition") as caught:
            lake.update("people", {"age": "1"}, where)
        if where is None:
            assert 'where="true"' in str(caught.value)
    assert lake.update("people", {"age": "1"}, where="true").tables[0].rows_updated == 6
    assert {row[2:] for row in state(lake).values()} == {(1, 3)}


@pytest.mark.parametrize(
    ("assigned", "word"),
    [
        ({}, "without a new value"),
        ({"cuntry": "'NL'"}, "country"),
        ({"_seq": "1"}, "no such column"),
        ({"age": ""}, "expression"),
        ({"age": None}, "expression"),
        ({"age": 7}, "expression"),
        ({"age": "1", "AGE": "2"}, "two new values"),
        ({"age": "'x'"}, "age"),
        ({"age": "99999999999"}, "age"),
        ({"id": "null"}, "id"),
    ],
)
def test_what_cannot_be_assigned_is_invalid_and_changes_nothing(
    lake: fm.Lake, assigned: dict[str, Any], word: str
) -> None:
    version = lake.status()["version"]
    with pytest.raises(fm.Invalid, match=word):
        lake.update("people", assigned, "true")
    assert (lake.status()["version"], state(lake)) == (version, BEFORE)


def test_a_key_is_not_updated_and_the_error_says_how_else(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=["id"])
        with pytest.raises(fm.Invalid, match="cannot change the key") as caught:
            lake.update("people", {"ID": "7"}, "true")
        assert "Delete the row and append it" in caught.value.advice
        lake.create_table("plain", SCHEMA)
        lake.append("plain", people(1))
        lake.update("plain", {"id": "7"}, "id = 1")
        assert [row["id"] for row in lake.read_arrow("plain").read_all().to_pylist()] == [7]


def test_a_wrong_type_is_found_also_if_no_row_matches(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="age"):
        lake.update("people", {"age": "'x'"}, "id = 77")


def test_a_batch_is_updated_once(lake: fm.Lake) -> None:
    first = lake.update("people", {"age": "1"}, "id = 1", batch="b")
    lake.update("people", {"age": "2"}, "id = 1")
    again = lake.update("people", {"age": "1"}, "id = 1", batch="b", if_version=first.version - 1)
    assert (again.outcome, again.version) == ("already_committed", first.version)
    assert state(lake)[1] == ("a", "DE", 2, 4)
    nothing = lake.update("people", {"age": "1"}, "id = 77", batch="c")
    assert (nothing.outcome, nothing.tables) == ("committed", ())
    assert lake.update("people", {"age": "1"}, "true", batch="c").outcome == "already_committed"


def test_on_a_branch_and_merged(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=["id"])
        lake.append("people", people(1, 2, 3))
        lake.branches.create("dev")
        lake.update("people", {"country": "'XX'"}, "id = 1", branch="dev")
        assert (state(lake)[1][1], state(lake, branch="dev")[1][1]) == ("DE", "XX")
        lake.update("people", {"age": "99"}, "id = 2")
        lake.branches.merge("dev")
        assert {key: row[:3] for key, row in state(lake).items()} == {
            1: ("a", "XX", 10),
            2: ("b", "DE", 99),
            3: ("c", "NL", 30),
        }
        check_lake(lake.catalog)


def test_in_a_transaction_it_sees_earlier_steps_and_later_ones_see_it(lake: fm.Lake) -> None:
    with lake.transaction("several") as tx:
        tx.append("people", [{"id": 9, "name": "i", "country": "DE", "age": 90}])
        tx.update("people", {"country": "'XX'"}, "id = 9 or id = 1")
        tx.update("people", {"age": "0"}, "country = 'XX'")
        tx.delete("people", "id = 1")
    assert tx.commit is not None
    (touched,) = tx.commit.tables
    assert touched.rows_total == 6
    assert state(lake) == {**{key: row for key, row in BEFORE.items() if key != 1}, 9: ("i", "XX", 0, 3)}
    with pytest.raises(fm.Invalid), lake.transaction() as tx:
        tx.update("people", {"age": "1"})
    with lake.transaction() as tx:
        tx.update("people", {"age": "77"}, "id = 2")
        with pytest.raises(fm.Invalid):
            tx.update("people", {"nosuch": "77"}, "id = 3")
    assert state(lake)[2] == ("b", "DE", 77, 4)


def test_rows_go_to_the_partition_of_their_new_values(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, partition=["country"], sort=["age"])
        lake.append("people", people(1, 2, 3, 4, 5))
        lake.update("people", {"country": "'NL'", "age": "id"}, "country = 'DE'")
        assert {key: row[:3] for key, row in state(lake).items()} == {
            1: ("a", "NL", 1),
            2: ("b", "NL", 2),
            3: ("c", "NL", 30),
            4: ("d", "NL", 4),
            5: ("e", "FR", 50),
        }
        assert {one["partition"] for one in lake.contents("people")["partitions"]} == {"country=NL", "country=FR"}
        check_lake(lake.catalog)


def test_columns_that_an_expression_fills_follow_the_new_values(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=["id"])
        lake.append("people", people(1, 2))
        lake.backfill.column("people", "label", "name")
        lake.update("people", {"name": "'new'"}, "id = 1")
        found = {row["id"]: (row["name"], row["label"]) for row in lake.read_arrow("people").read_all().to_pylist()}
        assert found == {1: ("new", "new"), 2: ("b", "b")}
        lake.update("people", {"label": "'own'"}, "id = 2")
        found = {row["id"]: (row["name"], row["label"]) for row in lake.read_arrow("people").read_all().to_pylist()}
        assert found == {1: ("new", "new"), 2: ("b", "own")}
        check_lake(lake.catalog)


def test_files_without_a_filled_column_get_it_for_updated_rows_only(place: Place) -> None:
    """A rewrite leaves the column out where its input lacked it, and a file that has it is filled."""
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA)
        lake.append("people", people(1, 2))
        lake.add_column("people", "level", "int", default=7, fill_later=True)
        lake.update("people", {"name": "'new'"}, "id = 1")
        found = {row["id"]: row["level"] for row in lake.read_arrow("people").read_all().to_pylist()}
        assert found[1] == 7
        assert lake.backfill.column("people", "level", "7").outcome == "done"
        assert {row["level"] for row in lake.read_arrow("people").read_all().to_pylist()} == {7}
        check_lake(lake.catalog)


def found_in(lake: fm.Lake, *columns: str) -> dict[int, tuple[Any, ...]]:
    found = lake.read_arrow("people").read_all().to_pylist()
    return {row["id"]: tuple(row[name] for name in columns) for row in found}


@pytest.mark.whole
@pytest.mark.parametrize("default", ["open", "age", "it is the name"])
@pytest.mark.parametrize("key", [["id"], []], ids=["key", "no key"])
def test_a_row_keeps_what_it_has_in_a_column_with_a_default(place: Place, default: str, key: list[str]) -> None:
    """A default names no column, also if it is the name of one: nothing that is assigned changes it."""
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=key)
        lake.append("people", people(1, 2, 3))
        lake.add_column("people", "status", "string", default=default)
        lake.update("people", {"status": "'closed'"}, "id = 1")
        lake.update("people", {"status": "null"}, "id = 2")
        lake.update("people", {"age": "2", "name": "'new'"}, "true")
        assert found_in(lake, "age", "status") == {1: (2, "closed"), 2: (2, None), 3: (2, default)}
        with lake.transaction() as tx:
            tx.update("people", {"status": "'again'"}, "id = 3")
            tx.update("people", {"age": "3"}, "id = 3")
        assert found_in(lake, "age", "status")[3] == (3, "again")
        check_lake(lake.catalog)


@pytest.mark.whole
def test_a_row_keeps_what_it_has_in_a_filled_column_whose_inputs_are_not_assigned(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=["id"])
        lake.append("people", people(1, 2))
        lake.backfill.column("people", "label", "name")
        lake.backfill.column("people", "title", "label")
        lake.update("people", {"title": "'own'"}, "id = 1")
        lake.update("people", {"age": "1"}, "true")
        assert found_in(lake, "age", "label", "title") == {1: (1, "a", "own"), 2: (1, "b", "b")}
        lake.update("people", {"name": "'new'"}, "id = 1")
        assert found_in(lake, "label", "title") == {1: ("new", "new"), 2: ("b", "b")}, "by an input's input too"
        lake.update("people", {"name": "'newer'", "label": "'kept'"}, "id = 1")
        assert found_in(lake, "name", "label", "title")[1] == ("newer", "kept", "kept")
        check_lake(lake.catalog)


@pytest.mark.whole
def test_rows_of_files_with_and_without_a_default_are_updated_together(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=["id"])
        lake.append("people", people(1, 2))
        lake.add_column("people", "level", "int", default=7, fill_later=True)
        lake.append("people", [{**people(3)[0], "level": 1}, {**people(4)[0], "level": None}])
        lake.update("people", {"age": "0"}, "id <> 2")
        expected: dict[int, tuple[Any, ...]] = {1: (0, 7), 2: (20, None), 3: (0, 1), 4: (0, None)}
        assert found_in(lake, "age", "level") == expected
        assert lake.backfill.column("people", "level", "7").outcome == "done"
        assert found_in(lake, "age", "level") == {**expected, 2: (20, 7)}
        check_lake(lake.catalog)


@pytest.mark.whole
@pytest.mark.parametrize("write", ["update", "update with another column", "partial merge", "merge"])
def test_a_null_that_is_given_to_a_row_that_waits_for_a_default_stays_null(place: Place, write: str) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, key=["id"])
        lake.append("people", people(1, 2))
        lake.add_column("people", "level", "int", default=7, fill_later=True)
        if write == "merge":
            commit = lake.merge("people", [{**people(1)[0], "level": None}])
        elif write == "partial merge":
            commit = lake.merge("people", [{"id": 1, "level": None}], partial=True)
        else:
            same = {"name": "name"} if "another" in write else {}
            commit = lake.update("people", {"level": "null", **same}, "id = 1")
        assert (commit.outcome, commit.tables[0].rows_updated) == ("committed", 1)
        assert lake.backfill.column("people", "level", "7").outcome == "done"
        assert found_in(lake, "name", "level") == {1: ("a", None), 2: ("b", 7)}
        check_lake(lake.catalog)


def test_references_are_checked(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.apply(
            {
                "users": {"columns": {"id": "long", "name": "string"}, "key": ["id"]},
                "orders": {"columns": {"id": "long", "user": "long"}, "references": {"user": "users.id"}},
            }
        )
        lake.append("users", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        lake.append("orders", [{"id": 1, "user": 1}])
        with pytest.raises(fm.Invalid, match="refer to keys"):
            lake.update("orders", {"user": "77"}, "id = 1")
        lake.update("orders", {"user": "2"}, "id = 1")
        lake.update("users", {"name": "'z'"}, "true")
        with pytest.raises(fm.Invalid, match="refer to keys"):
            lake.delete("users", "id = 2")
        check_lake(lake.catalog)


def test_a_plan_counts_and_changes_nothing(lake: fm.Lake, place: Place) -> None:
    with place.open(read_only=True) as reader:
        plan = reader.plan_update("people", {"COUNTRY": "'NL'"}, "country = 'DE'")
        assert {name: plan[name] for name in ("rows", "rows_total", "files", "files_total", "version", "set")} == {
            "rows": 3,
            "rows_total": 6,
            "files": 2,
            "files_total": 2,
            "version": 3,
            "set": {"country": "'NL'"},
        }
        with pytest.raises(fm.Invalid):
            reader.plan_update("people", {"nosuch": "1"}, "true")
        with pytest.raises(fm.Invalid):
            reader.plan_update("people", {"age": "1"})
        with pytest.raises(fm.Invalid):
            reader.update("people", {"age": "1"}, "true")
    assert state(lake) == BEFORE


# ── beside others ──

POINTS = ["update.begun", "update.rewritten", "update.sealed", "update.built"]


@pytest.mark.parametrize("point", POINTS)
def test_a_row_that_comes_and_matches_is_updated_too(lake: fm.Lake, other: fm.Lake, point: str) -> None:
    new = [{"id": 9, "name": "i", "country": "DE", "age": 90}]
    with at(point, lambda: other.append("people", new)):
        lake.update("people", {"country": "'XX'"}, "country = 'DE'")
    assert {key: row[1] for key, row in state(lake).items()} == {
        1: "XX",
        2: "XX",
        3: "NL",
        4: "XX",
        5: "FR",
        6: "FR",
        9: "XX",
    }
    assert {row[3] for key, row in state(lake).items() if key in (1, 2, 4, 9)} == {4}


@pytest.mark.parametrize("point", POINTS)
def test_a_row_that_comes_and_does_not_match_costs_no_second_plan(lake: fm.Lake, other: fm.Lake, point: str) -> None:
    passed: list[str] = []

    def observe(name: str) -> None:
        first = name == point and name not in passed
        passed.append(name)
        if first:
            failpoints.observer = None
            other.append("people", [{"id": 9, "name": "i", "country": "PL", "age": 90}])
            failpoints.observer = observe

    failpoints.observer = observe
    try:
        lake.update("people", {"age": "1"}, "country = 'DE'")
    finally:
        failpoints.observer = None
    assert "update.planned_again" not in passed
    assert state(lake)[9][3] == 3
    assert [state(lake)[key][2:] for key in (1, 2, 4)] == [(1, 4)] * 3


ACTS: dict[str, tuple[Callable[[fm.Lake], Any], State]] = {
    "a matching row goes": (
        lambda other: other.delete("people", "id = 1"),
        {2: ("b", "XX", 20, 4), 3: BEFORE[3], 4: ("d", "XX", 40, 4), 5: BEFORE[5], 6: BEFORE[6]},
    ),
    "a row stops matching": (
        lambda other: other.update("people", {"country": "'PL'"}, "id = 1"),
        {1: ("a", "PL", 10, 3), 2: ("b", "XX", 20, 4), 3: BEFORE[3], 4: ("d", "XX", 40, 4), 5: BEFORE[5], 6: BEFORE[6]},
    ),
    "a row begins to match": (
        lambda other: other.update("people", {"country": "'DE'"}, "id = 5"),
        {**BEFORE, **{key: (BEFORE[key][0], "XX", BEFORE[key][2], 4) for key in (1, 2, 4, 5)}},
    ),
    "another column of a row changes": (
        lambda other: other.update("people", {"age": "11"}, "id = 1"),
        {1: ("a", "XX", 11, 4), 2: ("b", "XX", 20, 4), 3: BEFORE[3], 4: ("d", "XX", 40, 4), 5: BEFORE[5], 6: BEFORE[6]},
    ),
    "the same update": (
        lambda other: other.update("people", {"country": "'XX'"}, "country = 'DE'"),
        {1: ("a", "XX", 10, 3), 2: ("b", "XX", 20, 3), 3: BEFORE[3], 4: ("d", "XX", 40, 3), 5: BEFORE[5], 6: BEFORE[6]},
    ),
    "the files are compacted": (
        lambda other: other.maintain.compact("people", files_min=2),
        {1: ("a", "XX", 10, 4), 2: ("b", "XX", 20, 4), 3: BEFORE[3], 4: ("d", "XX", 40, 4), 5: BEFORE[5], 6: BEFORE[6]},
    ),
    "a column comes": (
        lambda other: other.append(
            "people", [{"id": 9, "name": "i", "country": "DE", "age": 9, "more": 1}], evolve=True
        ),
        {
            **{key: (row[0], "XX", row[2], 4) for key, row in BEFORE.items() if key in (1, 2, 4)},
            3: BEFORE[3],
            5: BEFORE[5],
            6: BEFORE[6],
            9: ("i", "XX", 9, 4),
        },
    ),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("point", POINTS)
def test_beside_another_writer_it_is_as_if_one_came_after_the_other(
    lake: fm.Lake, other: fm.Lake, act: str, point: str
) -> None:
    """The other one is first, whatever this one had planned by then."""
    meddle, after = ACTS[act]
    with at(point, lambda: meddle(other)):
        lake.update("people", {"country": "'XX'"}, "country = 'DE'")
    assert state(lake) == after


@pytest.mark.parametrize("point", POINTS[1:])
@pytest.mark.parametrize(
    "meddle",
    [
        lambda other: other.rename_column("people", "age", "years"),
        lambda other: other.rename_column("people", "country", "land"),
        lambda other: other.rename_column("people", "name", "title"),
        lambda other: other.drop_column("people", "age"),
        lambda other: other.drop_table("people"),
        lambda other: other.rename_table("people", "folk"),
    ],
    ids=["value", "condition", "expression", "dropped", "table dropped", "table renamed"],
)
def test_a_name_that_means_something_else_now_is_a_conflict(
    lake: fm.Lake, other: fm.Lake, meddle: Callable[[fm.Lake], Any], point: str
) -> None:
    with at(point, lambda: meddle(other)), pytest.raises(fm.Conflict):
        lake.update("people", {"age": "7", "country": "name"}, "country = 'DE'")
    assert lake.history(limit=1)[0].actor == "other"


def test_an_empty_table_has_nothing_to_update(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA)
        assert lake.update("people", {"age": "1"}, "true").outcome == "nothing_to_do"
        with pytest.raises(fm.NotFound):
            lake.update("nowhere", {"age": "1"}, "true")
        lake.create_table("events", "id long not null, name string")
        lake.append("events", rows(1))
        with pytest.raises(fm.Invalid, match="required"):
            lake.update("events", {"id": "null"}, "true")
        check_lake(lake.catalog)
