"""History into a table with a key: never in the place of a newer row, whatever comes first."""

from __future__ import annotations

from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.testing.invariants import check_lake
from tests.history_world import Numbers, history, room_of, run

pytestmark = pytest.mark.mostly_sqlite

STATES = "id long not null, at long, name string"


def states(chunk: Chunk) -> list[dict[str, Any]]:
    """At every moment one of three people changes."""
    found = []
    for at in range(int(chunk.start), int(chunk.end)):  # type: ignore[arg-type]
        found.append({"id": at % 3, "at": at, "name": f"at {at}"})
    return found


def people(lake: fm.Lake) -> dict[int, tuple[int, str]]:
    return {row["id"]: (row["at"], row["name"]) for row in lake.read_arrow("people").read_all().to_pylist()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_by_the_range_column_the_newest_row_of_a_key_counts(lake: fm.Lake, order: str, workers: int) -> None:
    lake.create_table("people", STATES, key=["id"])
    lake.merge("people", [{"id": 1, "at": 1_000, "name": "live"}, {"id": 9, "at": 3, "name": "another"}])
    spec = history(Numbers(rows=states), "people", column="at", order=order, workers=workers)
    assert run(lake, spec).outcome == "done"
    assert people(lake) == {0: (48, "at 48"), 1: (1_000, "live"), 2: (47, "at 47"), 9: (3, "another")}
    check_lake(lake.catalog)
    assert run(lake, spec).outcome == "nothing_to_do"


def test_a_newer_row_that_comes_while_a_chunk_is_loaded_stays(lake: fm.Lake) -> None:
    lake.create_table("people", STATES, key=["id"])

    def late(chunk: Chunk) -> list[dict[str, Any]]:
        lake.merge("people", [{"id": 0, "at": 99, "name": "live"}])
        return states(chunk)

    spec = history(Numbers(rows=states, act={"20..30": late}), "people", column="at", order="oldest")
    assert run(lake, spec).outcome == "done"
    assert people(lake)[0] == (99, "live")


def test_without_a_range_column_what_is_there_stays_if_the_newest_come_first(lake: fm.Lake) -> None:
    lake.create_table("people", STATES, key=["id"])
    lake.merge("people", [{"id": 1, "at": 1_000, "name": "live"}])

    def one(chunk: Chunk) -> list[dict[str, Any]]:
        return states(chunk)[:3]

    first = history(Numbers(rows=one), "people", column=None, order="newest")
    assert run(lake, first).outcome == "done"
    assert people(lake) == {0: (42, "at 42"), 1: (1_000, "live"), 2: (41, "at 41")}
    again = history(Numbers(rows=one), "people", column=None, order="oldest", name="again")
    assert run(lake, again).outcome == "done"
    assert people(lake) == {0: (42, "at 42"), 1: (40, "at 40"), 2: (41, "at 41")}
    assert room_of(lake).catalog.jobs.find("again").rows == 15
