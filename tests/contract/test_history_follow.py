"""A history backfill beside others: one run at a time, waiting for the tip, following it, cancelled, resumed, and with
other writers in the same tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.backfill.chunks.history import spec_from_job
from floodmark.backfill.chunks.sources import to_source
from floodmark.testing.children import run_child
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.history_world import Numbers, chunk_rows, history, number_rows, numbers_done, run, steps_of

pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    """Another writer of the same lake."""
    with place.open(actor="other") as other:
        yield other


@contextmanager
def at_every(point: str, act: Callable[[], object]) -> Iterator[None]:
    """Act whenever the failpoint is passed in this process."""
    failpoints.observer = lambda name: act() if name == point else None
    try:
        yield
    finally:
        failpoints.observer = None


# ── one run at a time ──


def start_years(place: Place) -> str:
    with place.open(actor="child") as lake:
        try:
            return run(lake, history(Numbers())).outcome
        except fm.Busy as busy:
            return f"busy: {busy.facts['job']}"


def test_of_two_that_start_the_same_job_one_is_told_that_it_is_busy(
    lake: fm.Lake, other: fm.Lake, place: Place
) -> None:
    told: list[str] = []

    def meanwhile(chunk: Any) -> Any:
        with pytest.raises(fm.Busy):
            run(other, history(Numbers()))
        told.append(run_child(start_years, place))
        return number_rows(chunk)

    source = Numbers(act={"20..30": meanwhile})
    assert run(lake, history(source)).outcome == "done"
    assert told == ["busy: years"]
    assert ids(lake) == list(range(50))
    assert run_child(start_years, place) == "nothing_to_do"


# ── the tip ──


def test_the_end_of_the_range_is_waited_for(lake: fm.Lake) -> None:
    tips = iter([20, 20, 35, None, 35, 50])
    source, (told, step) = Numbers(tip=lambda: next(tips)), steps_of()
    spec = history(source, order="oldest", tip_wait_s=60)
    assert run(lake, spec, step).outcome == "done"
    assert told == [(done, 5) for done in range(6)]
    assert ids(lake) == list(range(50))


def test_a_tip_that_does_not_come_is_not_waited_for_longer_than_told(lake: fm.Lake) -> None:
    for tip_wait_s in (0, 0.1):
        found = run(lake, history(Numbers(tip=24), tip_wait_s=tip_wait_s))
        assert found.error is not None
        assert (found.outcome, found.job["status"], found.exit_code) == ("timed_out", "failed", 4)
        assert found.error["facts"]["waiting_for"] == "20..30 and 2 more"
        assert (found.job["processed"], found.job["total"]) == (2, 5)
    assert ids(lake) == list(range(20))
    assert run(lake, history(Numbers(tip=50))).outcome == "done"


def test_a_tip_that_hangs_is_given_up_call_by_call(lake: fm.Lake) -> None:
    never, asked = threading.Event(), []

    def hang() -> int:
        asked.append(1)
        return 24 if len(asked) == 1 else bool(never.wait(60)) and 24

    found = run(lake, history(Numbers(tip=hang), tip_wait_s=0.4, call_deadline_s=0.05))
    assert found.error is not None
    assert (found.outcome, len(asked) > 2) == ("timed_out", True)
    assert "did not answer" in found.error["facts"]["cause"]
    found = run(lake, history(Numbers(tip=lambda: never.wait(60)), call_deadline_s=0.05, retries=2))
    never.set()
    assert found.error is not None
    assert (found.outcome, found.error["kind"], found.error["facts"]["call"]) == ("failed", "Unavailable", "tip")


def test_a_tip_that_fails_for_a_while_is_asked_again(lake: fm.Lake) -> None:
    tips: Iterator[Any] = iter([OSError("hiccup"), fm.Unavailable("not now"), 30])

    def tip() -> Any:
        found = next(tips)
        if isinstance(found, Exception):
            raise found
        return found

    assert run(lake, history(Numbers(tip=tip), last=None)).outcome == "done"
    assert ids(lake) == list(range(30))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_history_is_followed_until_it_is_cancelled(lake: fm.Lake, other: fm.Lake, workers: int) -> None:
    tips = iter([None, 25, 25, 30, 47, *range(50, 1000, 10)])
    source, (told, step) = Numbers(tip=lambda: next(tips)), steps_of()

    def stop(processed: int, total: int | None) -> None:
        step(processed, total)
        if processed >= 7:
            other.catalog.jobs.cancel("years")

    found = run(lake, history(source, last=None, order="oldest", follow=True, workers=workers), stop)
    assert (found.outcome, found.job["status"], found.exit_code) == ("cancelled", "cancelled", 0)
    done = numbers_done(lake)
    assert done == list(range(len(done)))
    assert len(done) >= 7
    assert ids(lake) == list(range(len(done) * 10))
    assert [processed for processed, _ in told] == sorted(processed for processed, _ in told)
    totals = [total for _, total in told if total is not None]
    assert totals == sorted(totals)
    assert totals[:2] == [0, 2]


def test_following_ends_where_the_range_ends(lake: fm.Lake) -> None:
    tips = iter([25, 30, 47, 50])
    assert run(lake, history(Numbers(tip=lambda: next(tips)), follow=True)).outcome == "done"
    assert ids(lake) == list(range(50))


# ── stopped, and gone on with ──


@pytest.mark.parametrize("workers", [1, 4])
def test_a_cancel_ends_the_run_and_what_is_done_stays(lake: fm.Lake, other: fm.Lake, workers: int) -> None:
    def cancel(processed: int, total: int | None) -> None:
        if processed == 3:
            other.catalog.jobs.cancel("years")

    # More chunks than anybody loads before the cancel is noticed.
    found = run(lake, history(Numbers(), last=100_000, workers=workers), cancel)
    assert (found.outcome, found.job["status"], found.exit_code) == ("cancelled", "cancelled", 0)
    done = numbers_done(lake)
    assert (found.job["processed"], found.job["rows"]) == (len(done), 10 * len(done))
    assert 3 <= len(done) < 10_000
    assert ids(lake) == sorted(number for chunk in done for number in range(chunk * 10, chunk * 10 + 10))


def test_a_cancel_is_noticed_while_a_chunk_waits_for_its_next_try(lake: fm.Lake, other: fm.Lake) -> None:
    def fail(chunk: Any) -> Any:
        other.catalog.jobs.cancel("years")
        raise OSError("the disk is gone")

    found = run(lake, history(Numbers(act={"20..30": fail}), retry_s=3600.0))
    assert found.outcome == "cancelled"
    assert numbers_done(lake) == [3, 4]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupt_leaves_what_is_done(lake: fm.Lake, workers: int) -> None:
    def interrupt(processed: int, total: int | None) -> None:
        if processed == 2:
            raise KeyboardInterrupt

    spec = history(Numbers(), workers=workers)
    with pytest.raises(KeyboardInterrupt):
        run(lake, spec, interrupt)
    assert lake.catalog.jobs.find("years").status == "cancelled"
    assert 2 <= len(numbers_done(lake)) < 5
    assert run(lake, spec).outcome == "done"
    assert ids(lake) == list(range(50))


def test_a_job_is_gone_on_with_from_what_the_catalog_keeps(lake: fm.Lake) -> None:
    spec = history(to_source("tests.history_world:number_rows"), rows_exact=True, keep=None, order="oldest")

    def interrupt(processed: int, total: int | None) -> None:
        if processed == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(lake, spec, interrupt)
    kept = spec_from_job(lake.catalog.jobs.find("years"))
    assert (kept.geometry, kept.column, kept.order, kept.rows_exact) == (spec.geometry, "id", "oldest", True)
    assert kept.settings() == spec.settings()
    assert run(lake, kept).outcome == "done"
    assert ids(lake) == list(range(50))


@pytest.mark.parametrize(
    ("source", "tables"),
    [(Numbers(), {"events": None}), ("tests.history_world:number_rows", {"events": None, "people": lambda rows: rows})],
    ids=["source", "definition"],
)
def test_what_the_catalog_cannot_keep_is_said(lake: fm.Lake, source: Any, tables: Any) -> None:
    spec = history(to_source(source), tables)
    lake.catalog.jobs.start("years", "history", list(tables), spec.pinned(), spec.settings(), "chunks", "test")
    with pytest.raises(fm.Invalid) as caught:
        spec_from_job(lake.catalog.jobs.find("years"))
    assert "with the same call" in caught.value.advice


# ── other writers ──


def write_beside(other: fm.Lake, table: str, number: int) -> None:
    """Bring a row, change one, and delete one: all of them outside of the history's range."""
    if table == "people":
        other.merge(table, [{"id": 1000 + number, "name": "new"}, {"id": 2000 + number, "name": "changed"}])
    else:
        other.append(table, rows(1000 + number))
    other.delete(table, f"id = {2020 + number}")


def check_beside(lake: fm.Lake, table: str, written: int) -> None:
    expected = {*range(50), *range(1000, 1000 + written), *range(2000, 2040)} - set(range(2020, 2020 + written))
    assert ids(lake, table) == sorted(expected)
    assert set(chunk_rows(lake).values()) == {("done", 10)}


@pytest.mark.parametrize("table", ["events", "people"])
def test_writers_between_build_and_publish_of_a_chunk_lose_nothing(lake: fm.Lake, other: fm.Lake, table: str) -> None:
    lake.append(table, rows(*range(2000, 2040)))
    passed, written = iter(range(1000)), iter(range(1000))

    def write() -> None:
        # Not at every try: a chunk that lost thrice takes the table's turn, and nobody else could write meanwhile.
        if next(passed) % 2 == 0:
            write_beside(other, table, next(written))

    with at_every("chunk.built", write):
        found = run(lake, history(Numbers(), table))
    assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 50, 5)
    check_beside(lake, table, next(written))


@pytest.mark.parametrize("table", ["events", "people"])
def test_writers_beside_many_workers_lose_nothing(lake: fm.Lake, other: fm.Lake, table: str) -> None:
    lake.append(table, rows(*range(2000, 2040)))
    begun = threading.Event()

    def write() -> None:
        begun.wait(60)
        for number in range(5):
            write_beside(other, table, number)

    def rows_of(chunk: Any) -> Any:
        begun.set()
        return number_rows(chunk)

    writer = threading.Thread(target=write)
    writer.start()
    found = run(lake, history(Numbers(rows=rows_of), table, workers=3))
    writer.join()
    assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 50, 5)
    check_beside(lake, table, 5)


def test_a_merge_into_a_chunk_that_is_being_loaded_is_not_lost(lake: fm.Lake, other: fm.Lake) -> None:
    """A row that came while the chunk was loaded, and is no older by the range column, stays."""
    done: list[int] = []

    def write() -> None:
        if not done:
            done.append(1)
            other.merge("people", [{"id": 5, "name": "mine"}, {"id": 500, "name": "mine"}])

    with at_every("chunk.built", write):
        assert run(lake, history(Numbers(), "people", order="oldest")).outcome == "done"
    found = {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()}
    assert found == {**{number: f"row {number}" for number in range(50)}, 5: "mine", 500: "mine"}
