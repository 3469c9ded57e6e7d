"""A merge whose rows leave columns out: refused for every kind of data, or, if partial, an update of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.ingest.drop import Drop
from floodmark.testing.invariants import check_lake
from tests.conftest import Place

pytestmark = pytest.mark.mostly_sqlite

PEOPLE = "id long not null, name string not null, age int, home struct<city: string, zip: string>"
HOME = {"city": "Delft", "zip": "2611"}
ANN = {"id": 1, "name": "Ann", "age": 30, "home": HOME}
BEN = {"id": 2, "name": "Ben", "age": 40, "home": None}
KINDS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "dicts": lambda rows: rows,
    "arrow": pa.Table.from_pylist,
    "reader": lambda rows: pa.Table.from_pylist(rows).to_reader(),
    "pandas": pd.DataFrame,
}


@pytest.fixture
def people(place: Place) -> Any:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.append("people", [ANN, BEN])
        yield lake


def rows_of(lake: fm.Lake, table: str = "people", **options: Any) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in lake.read_arrow(table, **options).read_all().to_pylist()}


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_that_leaves_a_column_out_is_refused_with_the_advice(people: fm.Lake, kind: str) -> None:
    given = KINDS[kind]([{"id": 1, "name": "Anna", "home": HOME}])
    with pytest.raises(fm.Invalid, match="missing in the rows") as refused:
        people.merge("people", given)
    assert refused.value.facts["column"] == "age"
    assert "partial=True" in refused.value.advice
    assert rows_of(people) == {1: ANN, 2: BEN}
    check_lake(people.catalog)


def test_dicts_are_judged_row_by_row_and_the_rows_without_a_column_are_counted(people: fm.Lake) -> None:
    with pytest.raises(fm.Invalid) as refused:
        people.merge("people", [ANN, {"id": 2, "name": "Ben", "home": None}, {"id": 3, "name": "Cid", "home": None}])
    assert (refused.value.facts["column"], refused.value.facts["count"]) == ("age", 2)


def test_a_row_without_several_columns_does_not_look_like_several_rows(people: fm.Lake) -> None:
    with pytest.raises(fm.Invalid) as refused:
        people.merge("people", [{"id": 1}])
    assert (refused.value.facts["column"], "count" in refused.value.facts) == ("age, home, name", False)
    assert refused.value.message.count("(count=1)") == 3


def test_a_misspelt_column_is_named_beside_the_one_that_is_missing(people: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="no such column") as refused:
        people.merge("people", [{"id": 1, "name": "Ann", "aeg": 3, "home": None}])
    assert "age" in str(refused.value)


@pytest.mark.parametrize("evolve", [False, True])
@pytest.mark.parametrize("kind", ["dicts", "arrow"])
def test_a_struct_that_leaves_a_field_out_is_refused_also_in_a_partial_merge(
    people: fm.Lake, kind: str, evolve: bool
) -> None:
    given = [{"id": 1, "name": "Ann", "age": 30, "home": {"city": "Leiden"}}]
    for partial in (False, True):
        with pytest.raises(fm.Invalid, match="missing in the rows") as refused:
            people.merge("people", KINDS[kind](given), evolve=evolve, partial=partial)
        assert refused.value.facts["column"] == "home.zip"
    assert rows_of(people)[1] == ANN


@pytest.mark.parametrize("kind", ["dicts", "arrow"])
def test_a_merge_that_brings_new_columns_is_refused_for_the_old_ones_it_leaves_out(people: fm.Lake, kind: str) -> None:
    given = [{"id": 1, "name": "Anna", "home": HOME, "mail": "a@b"}]
    with pytest.raises(fm.Invalid, match="missing in the rows"):
        people.merge("people", KINDS[kind](given), evolve=True)
    people.merge("people", KINDS[kind](given), evolve=True, partial=True)
    assert rows_of(people) == {1: {**ANN, "name": "Anna", "mail": "a@b"}, 2: {**BEN, "mail": None}}


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_a_partial_merge_updates_only_the_columns_that_are_named(people: fm.Lake, kind: str) -> None:
    commit = people.merge("people", KINDS[kind]([{"id": 1, "age": 31}, {"id": 2, "age": 41}]), partial=True)
    assert (commit.rows_added, commit.tables[0].rows_updated) == (0, 2)
    assert rows_of(people) == {1: {**ANN, "age": 31}, 2: {**BEN, "age": 41}}
    assert {row["id"] for row in people.changes("people", 1).arrow().read_all().to_pylist()} == {1, 2}
    check_lake(people.catalog)


def test_each_dict_of_a_partial_merge_updates_its_own_columns(people: fm.Lake) -> None:
    given = [{"id": 1, "name": "Anna"}, {"id": 2, "home": HOME, "age": None}, {"id": 3, "name": "Cid", "age": 5}]
    commit = people.merge("people", given, partial=True)
    assert (commit.rows_added, commit.tables[0].rows_updated) == (1, 2)
    assert rows_of(people) == {
        1: {**ANN, "name": "Anna"},
        2: {**BEN, "home": HOME, "age": None},
        3: {"id": 3, "name": "Cid", "age": 5, "home": None},
    }
    check_lake(people.catalog)


@pytest.mark.parametrize("kind", ["dicts", "arrow"])
def test_new_rows_of_a_partial_merge_need_the_required_columns(people: fm.Lake, kind: str) -> None:
    with pytest.raises(fm.Invalid, match="required") as refused:
        people.merge("people", KINDS[kind]([{"id": 1, "age": 31}, {"id": 7, "age": 1}]), partial=True)
    assert (refused.value.facts["columns"], refused.value.facts["examples"]) == ("name", "id=7")
    assert rows_of(people) == {1: ANN, 2: BEN}
    check_lake(people.catalog)


def test_a_partial_merge_needs_the_key_and_each_key_once(people: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="missing") as refused:
        people.merge("people", [{"age": 31}], partial=True)
    assert refused.value.facts["column"] == "id"
    with pytest.raises(fm.Invalid, match="more than once"):
        people.merge("people", [{"id": 1, "age": 31}, {"id": 1, "name": "Anna"}], partial=True)
    with pytest.raises(fm.Invalid, match="no such column") as refused:
        people.merge("people", [{"id": 1, "aeg": 31}], partial=True)
    assert "age" in refused.value.advice
    people.create_table("plain", "id long, age int")
    with pytest.raises(fm.Invalid, match="with a key"):
        people.merge("plain", [{"id": 1}], partial=True)


def test_a_partial_merge_of_what_is_there_already_changes_nothing(people: fm.Lake) -> None:
    assert (
        people.merge("people", [{"id": 1, "age": 30}, {"id": 2, "name": "Ben"}], partial=True).outcome
        == "nothing_to_do"
    )
    commit = people.merge("people", [{"id": 1, "age": 30}, {"id": 2, "name": "Bob"}], partial=True)
    assert [row["id"] for row in people.changes("people", commit.version - 2).arrow().read_all().to_pylist()] == [2]


def test_a_partial_merge_moves_rows_between_partitions_and_finds_them_there(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("t", "id long not null, day string, n int", key=["id"], partition=["day"])
        lake.create_table("k", "id long not null, day string, n int", key=["id"], partition=["bucket(2, id)"])
        for table in ("t", "k"):
            lake.append(table, [{"id": number, "day": "mo", "n": number} for number in range(6)])
            lake.merge(table, [{"id": 1, "day": "tu"}, {"id": 2, "n": 20}], partial=True)
            lake.merge(table, [{"id": 1, "n": 10}, {"id": 9, "n": 9}], partial=True)
            found = {key: (row["day"], row["n"]) for key, row in rows_of(lake, table).items()}
            assert found == {
                **{number: ("mo", number) for number in range(6)},
                1: ("tu", 10),
                2: ("mo", 20),
                9: (None, 9),
            }
        check_lake(lake.catalog)


def test_a_partial_merge_in_a_transaction_sees_earlier_steps_and_later_steps_see_it(people: fm.Lake) -> None:
    with people.transaction("several") as tx:
        tx.merge("people", [{"id": 3, "name": "Cid", "age": 1, "home": None}])
        assert tx.merge("people", [{"id": 3, "age": 2}, {"id": 1, "home": None}], partial=True) == 2
        tx.delete("people", "age = 40")
        tx.merge("people", [{"id": 3, "home": HOME}], partial=True)
    assert rows_of(people) == {1: {**ANN, "home": None}, 3: {"id": 3, "name": "Cid", "age": 2, "home": HOME}}
    check_lake(people.catalog)


def meddle(point: str, place: Place, change: Callable[[fm.Lake], Any]) -> None:
    """Let another writer do this when the point is passed."""

    def observe(name: str) -> None:
        if name == point:
            failpoints.observer = None
            with place.open(recover=False) as other:
                change(other)

    failpoints.observer = observe


MEDDLERS: dict[str, tuple[Callable[[fm.Lake], Any], dict[int, dict[str, Any]]]] = {
    "another column of the row is updated": (
        lambda lake: lake.merge("people", [{"id": 1, "name": "Anna"}], partial=True),
        {1: {**ANN, "name": "Anna", "age": 31}, 2: BEN},
    ),
    "the row is replaced": (
        lambda lake: lake.merge("people", [{**ANN, "home": None}]),
        {1: {**ANN, "age": 31, "home": None}, 2: BEN},
    ),
    "a column is added": (
        lambda lake: lake.merge("people", [{"id": 2, "mail": "b@c"}], partial=True, evolve=True),
        {1: {**ANN, "age": 31, "mail": None}, 2: {**BEN, "mail": "b@c"}},
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("point", ["merge.staged", "merge.sealed"])
@pytest.mark.parametrize("case", MEDDLERS)
def test_planning_again_keeps_what_others_wrote_into_the_columns_left_out(
    people: fm.Lake, place: Place, point: str, case: str
) -> None:
    change, expected = MEDDLERS[case]
    meddle(point, place, change)
    people.merge("people", [{"id": 1, "age": 31}], partial=True)
    assert failpoints.observer is None
    assert rows_of(people) == expected
    check_lake(people.catalog)


def test_a_partial_merge_whose_row_went_meanwhile_is_refused_as_a_new_row(people: fm.Lake, place: Place) -> None:
    meddle("merge.sealed", place, lambda lake: lake.delete("people", "id = 1"))
    with pytest.raises(fm.FloodmarkError, match="required"):
        people.merge("people", [{"id": 1, "age": 31}], partial=True)
    assert rows_of(people) == {2: BEN}
    check_lake(people.catalog)


def test_a_column_renamed_while_a_partial_merge_runs_is_still_the_one_that_is_updated(
    people: fm.Lake, place: Place
) -> None:
    kinds = {"id": {"type": "long", "required": True}, "name": {"type": "string", "required": True}}
    years = {"type": "int", "renamed_from": "age"}
    home = "struct<city: string, zip: string>"
    shape = {"people": {"columns": {**kinds, "years": years, "home": home}, "key": ["id"]}}
    meddle("merge.sealed", place, lambda lake: lake.apply(shape))
    people.merge("people", [{"id": 1, "age": 31}], partial=True)
    assert {key: row["years"] for key, row in rows_of(people).items()} == {1: 31, 2: 40}


def test_a_batch_of_a_partial_merge_comes_in_once(people: fm.Lake) -> None:
    given = [{"id": 1, "age": 31}]
    assert people.merge("people", given, partial=True, batch="monday").outcome == "committed"
    people.merge("people", [{"id": 1, "age": 32}], partial=True)
    assert people.merge("people", given, partial=True, batch="monday").outcome == "already_committed"
    assert rows_of(people)[1]["age"] == 32


def test_rows_that_a_sender_leaves_columns_out_of_are_whole_by_contract(people: fm.Lake) -> None:
    """Over HTTP a column that is left out is null, as documented there."""
    people.receive("people", [{"id": 1, "name": "Ann"}], key="one")
    assert rows_of(people)[1] == {"id": 1, "name": "Ann", "age": None, "home": None}


def test_last_of_each_key_counts_in_a_partial_merge_too(people: fm.Lake) -> None:
    given = [{"id": 1, "age": 31, "at": 1}, {"id": 1, "age": 32, "at": 2}]
    people.merge("people", given, partial=True, on_duplicate="last", order="at")
    assert rows_of(people)[1] == {**ANN, "age": 32}


def test_a_dropped_file_that_leaves_a_column_out_is_refused_where_its_rows_are_merged(
    people: fm.Lake, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(ANN) + "\n" + '{"id": 2, "name": "Bob", "home": null}\n')
    done = Drop(people, "src", folder, "people", settle_s=0.0).run()
    assert done.loaded == 0
    told = json.loads((folder / ".failed" / "a.jsonl.reason.json").read_text())
    assert "a column is missing" in told["text"]
    assert "age" in told["text"]
    assert rows_of(people) == {1: ANN, 2: BEN}


def test_a_column_that_an_expression_fills_is_computed_from_the_completed_row(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("t", "id long not null, a long, b long", key=["id"])
        lake.append("t", [{"id": 1, "a": 1, "b": 10}, {"id": 2, "a": 2, "b": 20}])
        lake.backfill.column("t", "c", "a")
        given = [{"id": 1, "a": 5}, {"id": 2, "c": 0}, {"id": 3, "b": 7}, {"id": 4, "a": 1, "b": 1, "c": 9}]
        lake.merge("t", given, partial=True)
        found = {key: (row["a"], row["b"], row["c"]) for key, row in rows_of(lake, "t").items()}
        assert found == {1: (5, 10, 5), 2: (2, 20, 0), 3: (None, 7, None), 4: (1, 1, 9)}
        check_lake(lake.catalog)


@pytest.mark.whole
def test_a_filled_column_is_kept_unless_the_row_brings_what_it_is_computed_from(place: Place) -> None:
    """A default is computed from nothing, and the key of a row never changes."""
    with place.open(create=True) as lake:
        lake.create_table("t", "id long not null, a long, b long", key=["id"])
        lake.append("t", [{"id": number, "a": number, "b": 10 * number} for number in (1, 2)])
        lake.add_column("t", "status", "string", default="a")
        lake.backfill.column("t", "c", "a")
        lake.backfill.column("t", "d", "id")
        lake.merge("t", [{"id": 1, "status": "closed", "c": 7, "d": 8}], partial=True)
        lake.merge("t", [{"id": 1, "b": 11}, {"id": 2, "a": 5}, {"id": 3, "b": 30}], partial=True)
        assert rows_of(lake, "t") == {
            1: {"id": 1, "a": 1, "b": 11, "status": "closed", "c": 7, "d": 8},
            2: {"id": 2, "a": 5, "b": 20, "status": "a", "c": 5, "d": 2},
            3: {"id": 3, "a": None, "b": 30, "status": "a", "c": None, "d": 3},
        }
        lake.merge("t", [{"id": 1, "a": 9}], partial=True)
        assert rows_of(lake, "t")[1] == {"id": 1, "a": 9, "b": 11, "status": "closed", "c": 9, "d": 8}
        check_lake(lake.catalog)
