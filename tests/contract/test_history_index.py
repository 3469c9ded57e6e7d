"""Which chunks of a history the indexes of its tables cover: what is not certain does not count."""

from __future__ import annotations

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.history_world import Numbers, history, run

pytestmark = pytest.mark.mostly_sqlite

PEOPLE = "id long not null, name string"


def indexed(lake: fm.Lake) -> list[list[str]] | None:
    return lake.backfill.coverage("years", index=True)["tables"]["people"]["indexed"]


def away(_: object) -> object:
    raise ValueError("the source is broken")


def test_chunks_are_covered_once_their_rows_are(lake: fm.Lake) -> None:
    lake.create_table("people", PEOPLE, key=["id"])
    source = Numbers(act={"20..30": away})
    assert run(lake, history(source, "people", order="oldest")).outcome == "failed"
    assert indexed(lake) == [["0", "20"]]
    assert "indexed" not in lake.backfill.coverage("years")["tables"]["people"]
    lake.indexes.drop("people", on="id")
    assert indexed(lake) is None
    lake.indexes.create("people", on="id")
    assert indexed(lake) == []
    assert run(lake, history(Numbers(), "people", order="oldest")).outcome == "done"
    assert indexed(lake) == [["20", "50"]]
    lake.maintain.index("people")
    assert indexed(lake) == [["0", "50"]]
    check_lake(lake.catalog)


def test_a_rewrite_that_is_not_covered_leaves_it_open_whose_rows_it_has(lake: fm.Lake) -> None:
    lake.create_table("people", PEOPLE, key=["id"])
    assert run(lake, history(Numbers(), "people")).outcome == "done"
    lake.maintain.compact("people", files_min=2)
    assert indexed(lake) == [["0", "50"]]
    lake.indexes.drop("people", on="id")
    lake.indexes.create("people", on="id")
    lake.append("people", [{"id": 1_000, "name": "not of the history"}])
    # The new row's file is covered, the rewritten one is not.
    assert indexed(lake) == []
    lake.maintain.index("people")
    assert indexed(lake) == [["0", "50"]]


def test_a_value_index_must_cover_them_too(lake: fm.Lake) -> None:
    lake.create_table("people", PEOPLE, key=["id"])
    assert run(lake, history(Numbers(), "people")).outcome == "done"
    lake.indexes.create("people", on="name")
    assert indexed(lake) == []
    lake.maintain.index("people")
    assert indexed(lake) == [["0", "50"]]
