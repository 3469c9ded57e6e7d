"""A source or a clock that goes back: the floor and the frontier of a history only rise, and no gap is called done."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.coverage import coverage
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.history import HistorySpec, plan
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids
from tests.history_world import Numbers, chunk_rows, history, room_of, run

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        yield lake
        check_lake(lake.catalog)


def states(lake: fm.Lake, table: str = "events") -> dict[int, str]:
    return {chunk: state for (name, chunk), (state, _) in chunk_rows(lake).items() if name == table}


def covered(lake: fm.Lake) -> dict[str, Any]:
    return coverage(room_of(lake), lake.catalog.jobs.find("years"))


def test_the_floor_does_not_fall_when_the_tip_goes_back(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    spec = history(source, last=None, keep=20)
    run(lake, spec)
    source.now = 75
    run(lake, spec)
    assert states(lake) == {3: "pruned", 4: "pruned", 5: "done", 6: "done"}
    source.now = 45
    assert plan(room_of(lake), spec)["floor"] == "50"
    found = run(lake, spec)
    assert (found.outcome, found.job["processed"], found.job["total"]) == ("nothing_to_do", 2, 2)
    assert states(lake) == {3: "pruned", 4: "pruned", 5: "done", 6: "done"}
    assert ids(lake) == list(range(50, 70)), "what was pruned came again"
    assert (covered(lake)["floor"], covered(lake)["tables"]["events"]["gaps"]) == ("50", [])


def test_the_floor_of_a_range_with_an_end_does_not_fall_either(lake: fm.Lake) -> None:
    source = Numbers(tip=40)
    spec = history(source, keep=20)
    assert run(lake, spec).outcome == "timed_out"
    source.now = 25
    assert run(lake, spec).outcome == "timed_out"
    assert states(lake) == {2: "done", 3: "done"}
    assert covered(lake)["floor"] == "20"


def test_no_run_is_done_over_a_gap_below_what_is_committed(lake: fm.Lake) -> None:
    """Newest first: the chunk that fails lies below one that is loaded."""
    source = Numbers(tip=50, act={("30..40", 1): lambda chunk: None})
    spec = history(source, last=None)
    assert run(lake, spec).outcome == "failed"
    assert states(lake) == {4: "done"}
    source.now = 30
    found = run(lake, spec)
    assert found.error is not None
    assert (found.outcome, found.job["status"]) == ("timed_out", "failed")
    assert (found.job["processed"], found.job["total"]) == (4, 5)
    assert found.error["facts"]["waiting_for"] == "30..40"
    assert covered(lake)["tables"]["events"]["gaps"] == [["30", "40"]]
    source.now = 50
    assert run(lake, spec).outcome == "done"
    assert ids(lake) == list(range(50))


def test_no_run_is_done_below_a_tip_that_was_seen(lake: fm.Lake) -> None:
    """Oldest first: nothing above the gap is loaded, and the source was there already."""
    source = Numbers(tip=50, act={("30..40", 1): lambda chunk: None})
    spec = history(source, last=None, order="oldest")
    assert run(lake, spec).outcome == "failed"
    source.now = 30
    assert covered(lake)["tables"]["events"]["gaps"] == [["30", "50"]]
    found = run(lake, spec)
    assert found.error is not None
    assert (found.outcome, found.error["facts"]["waiting_for"]) == ("timed_out", "30..40 and 1 more")
    assert plan(room_of(lake), spec)["chunks"] == 5


def test_a_chunk_above_the_present_tip_is_not_read(lake: fm.Lake) -> None:
    source = Numbers(tip=50, act={("30..40", 1): lambda chunk: None})
    spec = history(source, last=None)
    run(lake, spec)
    source.now = 35
    assert run(lake, spec).outcome == "timed_out"
    assert source.asked["30..40"] == 1, "it is not complete there"


def test_all_of_a_range_is_done_though_its_source_went_back(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    spec = history(source)
    assert run(lake, spec).outcome == "done"
    source.now = 20
    found = run(lake, spec)
    assert (found.outcome, found.job["processed"], found.job["total"]) == ("nothing_to_do", 5, 5)


def test_a_follower_waits_where_it_is_until_its_source_comes_back(lake: fm.Lake, place: Place) -> None:
    tips = iter([50, 30, 30, 45, 60])
    source = Numbers(tip=lambda: next(tips))
    totals: list[int | None] = []

    def stop(processed: int, total: int | None) -> None:
        totals.append(total)
        if processed == 6:
            with place.open(actor="other") as other:
                other.catalog.jobs.cancel("years")

    assert run(lake, history(source, last=None, follow=True), stop).outcome == "cancelled"
    assert ids(lake) == list(range(60))
    assert max(source.asked.values()) == 1, "a chunk was loaded twice"
    assert totals == sorted(total for total in totals if total is not None)


def test_the_floor_of_times_does_not_fall_when_the_clock_is_set_back(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.create_table("times", "t timestamp, name string")

    def one(chunk: Chunk) -> list[dict[str, Any]]:
        return [{"t": chunk.start, "name": chunk.name}]

    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=12)
    geometry = Geometry.of(start - timedelta(days=6), None, "1d", align=start)
    source = Numbers(tip=datetime.now(UTC) - timedelta(hours=13), rows=one)
    spec = HistorySpec("years", source, {"times": None}, geometry, column="t", workers=1, keep="60h")
    assert run(lake, spec).outcome == "done"
    floor, loaded = covered(lake)["floor"], states(lake, "times")
    now = lake.catalog.database.now_ms
    with monkeypatch.context() as patch:
        patch.setattr(lake.catalog.database, "now_ms", lambda tx: now(tx) - 72 * 3_600_000)
        assert run(lake, spec).outcome == "nothing_to_do"
        assert (covered(lake)["floor"], states(lake, "times")) == (floor, loaded)


def test_a_tip_that_was_wrong_is_forgotten_by_a_start_that_says_so(lake: fm.Lake) -> None:
    source = Numbers(tip=90, act={"80..90": lambda chunk: None})
    spec = history(source, last=None)
    assert run(lake, spec).outcome == "failed"
    source.now = 30
    found = run(lake, spec)
    assert found.error is not None
    assert (found.outcome, "--forget-tip" in found.error["advice"]) == ("timed_out", True)
    assert run(lake, spec, forget_tip=True).outcome == "nothing_to_do"
    assert run(lake, spec).outcome == "nothing_to_do", "it is forgotten for good"
    assert ids(lake) == list(range(30))
