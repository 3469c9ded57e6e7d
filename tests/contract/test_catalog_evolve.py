"""Columns that come with rows: added when asked for, beside other writers, undone with the step that brought them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import floodmark as fm
from floodmark import failpoints
from tests.conftest import Place
from tests.contract.test_catalog_keyed import at_point, lake, other, people

__all__ = ["lake", "other"]  # the same lake with people, and another writer of it


def columns(lake: fm.Lake, table: str = "people") -> list[str]:
    return [name for name in lake.schema(table).column_names if name != "_seq"]


def test_additive_columns_and_wider_numbers_come_when_asked_for(lake: fm.Lake) -> None:
    lake.create_table("events", "id int, n float")
    lake.append("events", [{"id": 1, "n": 0.5}])
    more = pa.table({"id": pa.array([2**40]), "n": pa.array([0.1]), "tag": ["x"], "at": [{"lat": 1.5, "lon": 2.5}]})
    with pytest.raises(fm.Invalid):
        lake.append("events", more)
    lake.append("events", more, evolve=True)
    rows = lake.read_arrow("events").read_all().to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "n": 0.5, "tag": None, "at": None},
        {"id": 2**40, "n": 0.1, "tag": "x", "at": {"lat": 1.5, "lon": 2.5}},
    ]
    # A version from before reads with the columns of then.
    assert lake.read_arrow("events", version=4).read_all().to_pylist() == [{"id": 1, "n": 0.5}]


@pytest.mark.parametrize(
    "rows",
    [
        pa.table({"id": ["one"], "name": ["x"], "more": [1]}),
        pa.table({"name": ["x"], "more": [1]}),
        pa.table({"id": [5], "name": [7], "more": [1]}),
        pa.table({"id": [5], "name": ["x"], "NAME": [1]}),
        pa.table({"id": [5], "name": ["x"], "_seq": [1]}),
    ],
    ids=["text for a number", "no key", "number for text", "name by case", "reserved"],
)
def test_everything_else_is_refused_before_a_row_is_staged(lake: fm.Lake, rows: pa.Table) -> None:
    passed: list[str] = []
    failpoints.observer = passed.append
    try:
        with pytest.raises(fm.Invalid):
            lake.merge("people", rows, evolve=True)
    finally:
        failpoints.observer = None
    assert "merge.staged" not in passed
    assert lake.schema("people").column_names == ["id", "name", "_seq"]


def test_rows_staged_before_an_evolution_are_staged_again(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", "id int, name string")

    def evolve() -> None:
        other.append("events", pa.table({"id": pa.array([2**40]), "name": ["wide"], "tag": ["t"]}), evolve=True)

    with at_point("append.sealed", evolve):
        commit = lake.append("events", [{"id": 1, "name": "early"}])
    assert commit.outcome == "committed"
    rows = lake.read_arrow("events", with_seq=True).read_all().to_pylist()
    assert sorted((row["id"], row["name"], row["tag"], row["_seq"]) for row in rows) == [
        (1, "early", None, 2),
        (2**40, "wide", "t", 1),
    ]
    # Really staged again: every file of the head is in the new shape.
    for path in lake.catalog.files.data_files(lake.catalog.history.head("events")):
        with lake.catalog.storage.open_input(path) as file:
            assert pq.read_schema(file).field("id").type == pa.int64()
            assert "tag" in pq.read_schema(file).names


def test_two_writers_that_bring_columns_at_once_both_get_them(lake: fm.Lake, other: fm.Lake) -> None:
    def evolve() -> None:
        other.merge("people", [{"id": 2, "name": "b", "city": "Oslo"}], evolve=True)

    with at_point("merge.sealed", evolve):
        lake.merge("people", [{"id": 3, "name": "c", "age": 7, "city": "Rome"}], evolve=True)
    rows = lake.read_arrow("people").read_all().to_pylist()
    assert sorted((row["id"], row["city"], row["age"]) for row in rows) == [
        (1, None, None),
        (2, "Oslo", None),
        (3, "Rome", 7),
    ]
    ids = [field.field_id for field in lake.schema("people").fields]
    assert len(set(ids)) == len(ids)


def test_a_column_that_two_writers_bring_with_two_types_is_invalid_for_the_second(
    lake: fm.Lake, other: fm.Lake
) -> None:
    def evolve() -> None:
        other.merge("people", [{"id": 7, "name": "g", "more": "text"}], evolve=True)

    with at_point("merge.sealed", evolve), pytest.raises(fm.Invalid) as caught:
        lake.merge("people", [{"id": 8, "name": "h", "more": 8}], evolve=True)
    assert "more" in str(caught.value)
    assert sorted(row["id"] for row in lake.read_arrow("people").read_all().to_pylist()) == [1, 2, 3, 7]


def test_a_step_that_was_refused_leaves_no_column(lake: fm.Lake) -> None:
    with lake.transaction("rest") as tx:
        with pytest.raises(fm.Invalid):
            tx.append("people", [{"id": 1, "name": "there", "more": 1}], evolve=True)
        tx.append("people", people(k7="g"))
    assert columns(lake) == ["id", "name"]


def test_columns_of_two_fillers_of_one_transaction_do_not_undo_each_other(lake: fm.Lake) -> None:
    """The first is still staging when the second is done, and fails then."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("left", pa.int64())])

    def breaks() -> Iterator[pa.RecordBatch]:
        tx.append("people", [{"id": 8, "name": "h", "right": "kept"}], evolve=True)
        raise RuntimeError("the source broke")

    with lake.transaction("both") as tx, pytest.raises(RuntimeError):
        tx.append("people", pa.RecordBatchReader.from_batches(schema, breaks()), evolve=True)
    rows = {row["id"]: row for row in lake.read_arrow("people").read_all().to_pylist()}
    assert rows[8]["right"] == "kept"
    assert columns(lake) == ["id", "name", "right"]


def test_two_fillers_of_one_transaction_may_bring_columns_at_once(lake: fm.Lake) -> None:
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("left", pa.int64())])

    def slowly() -> Iterator[pa.RecordBatch]:
        tx.append("people", [{"id": 8, "name": "h", "right": "r"}], evolve=True)
        yield pa.RecordBatch.from_pydict({"id": [9], "name": ["i"], "left": [1]}, schema=schema)

    with lake.transaction("both") as tx:
        tx.append("people", pa.RecordBatchReader.from_batches(schema, slowly()), evolve=True)
    rows = {row["id"]: row for row in lake.read_arrow("people").read_all().to_pylist()}
    assert (rows[8]["right"], rows[8]["left"]) == ("r", None)
    assert (rows[9]["right"], rows[9]["left"]) == (None, 1)


def test_a_table_that_is_made_and_evolved_in_one_transaction_can_be_read(lake: fm.Lake, place: Place) -> None:
    with lake.transaction("new") as tx:
        tx.create_table("new", "id long not null", key=["id"])
        tx.append("new", [{"id": 1, "more": "x"}], evolve=True)
        tx.merge("new", [{"id": 2, "more": None, "other": 5}], evolve=True)
    with place.open() as again:
        rows: list[dict[str, Any]] = again.read_arrow("new").read_all().to_pylist()
        assert sorted((row["id"], row["more"], row["other"]) for row in rows) == [(1, "x", None), (2, None, 5)]
        again.append("new", [{"id": 3, "more": "y", "other": 1}])


def test_the_order_column_of_a_merge_goes_if_the_table_does_not_have_it(lake: fm.Lake) -> None:
    twice = [{"id": 1, "name": "old", "offset": 1}, {"id": 1, "name": "new", "offset": 2}]
    for data in (twice, pa.Table.from_pylist(twice)):
        lake.merge("people", data, on_duplicate="last", order="offset", evolve=True, skip_unchanged=False)
        assert columns(lake) == ["id", "name"]
        rows = {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()}
        assert rows[1] == "new"
