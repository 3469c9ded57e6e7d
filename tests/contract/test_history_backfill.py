"""History backfill on every database: planning, each chunk once, failures that name themselves, waiting and following.

Sources are in memory, so that no test here needs Spark. What is asserted at the end of each: rows, chunks, figures, and
that the files on disk are exactly those that the catalog can reach.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.history import plan
from floodmark.backfill.chunks.sources import to_source
from floodmark.testing.children import Child
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids
from tests.history_world import (
    Numbers,
    chunk_rows,
    history,
    number_rows,
    numbers_done,
    room_of,
    run,
    steps_of,
)

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        yield lake
        check_lake(lake.catalog)


def raises(error: Exception) -> Callable[[Chunk], Any]:
    def act(chunk: Chunk) -> Any:
        raise error

    return act


def settled(lake: fm.Lake, spec: Any, numbers: Any = range(50)) -> None:
    """Nothing is missing, and a second run does nothing."""
    assert ids(lake) == list(numbers)
    version, asked = lake.status()["version"], dict(spec.source.asked)
    assert run(lake, spec).outcome == "nothing_to_do"
    assert plan(room_of(lake), spec)["to_load"] == 0
    assert (lake.status()["version"], spec.source.asked) == (version, asked)


# ── the plan ──


@pytest.mark.parametrize("workers", [1, 4])
def test_all_chunks_are_loaded_once(lake: fm.Lake, workers: int) -> None:
    source, (told, step) = Numbers(), steps_of()
    spec = history(source, workers=workers)
    found = run(lake, spec, step)
    assert (found.outcome, found.exit_code, found.error) == ("done", 0, None)
    assert told == [(done, 5) for done in range(6)]
    job = found.job
    assert (job["status"], job["processed"], job["total"], job["unit"]) == ("done", 5, 5, "chunks")
    assert (job["rows"], job["publishes"], job["percent"]) == (50, 5, 100.0)
    assert chunk_rows(lake) == {("events", number): ("done", 10) for number in range(5)}
    assert set(source.asked.values()) == {1}
    assert {commit.kind for commit in lake.history(limit=5)} == {"chunk"}
    settled(lake, spec)


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_chunks_come_in_the_order_that_is_wanted(lake: fm.Lake, order: str) -> None:
    source = Numbers()
    run(lake, history(source, order=order, last=45))
    expected = ["0..10", "10..20", "20..30", "30..40", "40..45"]
    assert source.order == (expected if order == "oldest" else expected[::-1])
    assert ids(lake) == list(range(45))


def test_a_history_without_an_end_goes_up_to_its_tip(lake: fm.Lake) -> None:
    source, (told, step) = Numbers(tip=27), steps_of()
    spec = history(source, last=None)
    assert run(lake, spec).job["total"] == 2
    assert ids(lake) == list(range(20))
    source.now = 40
    assert run(lake, spec, step).outcome == "done"
    assert told == [(2, 4), (3, 4), (4, 4)]
    settled(lake, spec, range(40))


def test_a_plan_says_what_a_run_would_do(lake: fm.Lake) -> None:
    source = Numbers(tip=32)
    spec = history(source)
    found = plan(room_of(lake), spec)
    assert (found["chunks"], found["done"], found["to_load"], found["not_complete_yet"]) == (5, 0, 3, 2)
    assert (found["tip"], found["next"], found["gaps"]) == ("32", ["20..30", "10..20", "0..10"], [["0", "30"]])
    assert source.order == []
    assert run(lake, spec).outcome == "timed_out"
    found = plan(room_of(lake), spec)
    assert (found["done"], found["to_load"], found["next"]) == (3, 0, [])


def test_gaps_are_filled_by_the_next_run(lake: fm.Lake) -> None:
    source = Numbers(
        act={("10..20", 1): raises(fm.Invalid("not today")), ("30..40", 1): raises(fm.Invalid("nor this"))}
    )
    spec = history(source, order="oldest")
    assert run(lake, spec).outcome == "failed"
    assert numbers_done(lake) == [0]
    assert run(lake, spec).outcome == "failed"
    assert numbers_done(lake) == [0, 1, 2]
    assert run(lake, spec).outcome == "done"
    settled(lake, spec)


def test_another_geometry_under_the_same_name_is_refused(lake: fm.Lake) -> None:
    run(lake, history(Numbers()))
    for changed in ({"chunk": 20}, {"last": 60}, {"first": 10}, {"column": None}):
        with pytest.raises(fm.Invalid, match="another job has") as caught:
            run(lake, history(Numbers(), **changed))
        assert "was" in caught.value.facts["different"]
    assert lake.catalog.jobs.find("years").status == "done"


# ── what is wrong makes no job ──


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tables": "nothing"}, "no such table"),
    ({"column": "nothing"}, "no such column"),
    ({"column": "name"}, "does not fit the range"),
    ({"tables": {"events": "delete from chunk"}}, "only a query"),
    ({"tables": {"events": "select * from notes", "notes": "select * from events"}}, "refers to itself"),
    ({"tables": {}}, "at least one table"),
    ({"order": "both"}, "newest or oldest"),
    ({"workers": 0}, "above 0"),
    ({"rows_min": 5, "rows_max": 4}, "so many rows"),
    ({"keep": 10, "column": None}, "range column"),
    ({"keep": 0}, "above zero"),
    ({"keep": "90d"}, "whole number"),
    ({"first": "2024-01-01", "last": "2024-01-02", "chunk": "1h", "column": None, "rows_exact": True}, "numbers"),
]


def test_what_is_wrong_makes_no_job(lake: fm.Lake) -> None:
    source = Numbers()
    for changed, message in WRONG:
        with pytest.raises((fm.Invalid, fm.NotFound), match=message):
            run(lake, history(source, **changed))
    assert lake.catalog.jobs.all() == []
    assert source.order == []


def test_an_open_history_needs_a_tip(lake: fm.Lake) -> None:
    found = run(lake, history(Numbers(), last=None))
    assert found.outcome == "failed"
    assert found.error is not None
    assert found.error["kind"] == "Invalid"
    assert "has no tip" in found.error["message"]
    with pytest.raises(fm.Invalid, match="has no tip"):
        run(lake, history(to_source(number_rows), last=None, name="known before"))
    assert [job.name for job in lake.catalog.jobs.all()] == ["years"]


# ── rows that do not belong ──


def short(chunk: Chunk) -> list[dict[str, Any]]:
    return number_rows(chunk)[:-1]


def long(chunk: Chunk) -> list[dict[str, Any]]:
    return [*number_rows(chunk), *number_rows(chunk)[:1]]


def late(chunk: Chunk) -> list[dict[str, Any]]:
    return [*number_rows(chunk)[:-1], {"id": chunk.end, "name": "the next one's"}]


def early(chunk: Chunk) -> list[dict[str, Any]]:
    return [{"id": int(str(chunk.start)) - 1, "name": "the last one's"}, *number_rows(chunk)[1:]]


@pytest.mark.parametrize(
    ("limits", "bad", "message", "workers"),
    [
        ({"rows_min": 10}, short, "too few", 1),
        ({"rows_max": 10}, long, "too many", 3),
        ({"rows_exact": True}, short, "too few", 3),
        ({"rows_exact": True}, long, "too many", 1),
        ({}, late, "outside", 1),
        ({}, early, "outside", 3),
    ],
    ids=["few", "many", "exact_few", "exact_many", "late", "early"],
)
def test_rows_that_do_not_belong_are_refused_by_their_chunk(
    lake: fm.Lake, limits: dict[str, Any], bad: Callable[[Chunk], Any], message: str, workers: int
) -> None:
    source = Numbers(act={("20..30", 1): bad})
    spec = history(source, order="oldest", workers=workers, **limits)
    found = run(lake, spec)
    assert (found.outcome, found.exit_code) == ("failed", 2)
    assert found.error is not None
    assert message in found.error["message"]
    assert (found.error["kind"], found.error["facts"]["chunk"]) == ("Invalid", "20..30")
    assert found.job["error"] == found.error
    assert source.asked["20..30"] == 1, "no second try would help"
    done = numbers_done(lake)
    assert 2 not in done
    assert done == [0, 1] or workers > 1
    assert ids(lake) == sorted(number for chunk in done for number in range(chunk * 10, chunk * 10 + 10))
    assert found.job["processed"] == len(done)
    assert run(lake, spec).outcome == "done"
    settled(lake, spec)


def test_a_row_without_a_place_in_the_range_is_refused(lake: fm.Lake) -> None:
    lake.create_table("loose", "n long, name string")

    def loose(chunk: Chunk) -> list[dict[str, Any]]:
        return [{"n": row["id"], "name": row["name"]} for row in number_rows(chunk)]

    def null(chunk: Chunk) -> list[dict[str, Any]]:
        return [{"n": None, "name": "?"}, *loose(chunk)[1:]]

    source = Numbers(rows=loose, act={"40..50": null})
    found = run(lake, history(source, "loose", column="n"))
    assert found.error is not None
    assert "no value in the range column" in found.error["message"]
    assert numbers_done(lake, "loose") == []


def test_an_empty_chunk_is_done_too(lake: fm.Lake) -> None:
    source = Numbers(act={"20..30": lambda chunk: []})
    spec = history(source)
    found = run(lake, spec)
    assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 40, 5)
    assert chunk_rows(lake)["events", 2] == ("done", 0)
    settled(lake, spec, [*range(20), *range(30, 50)])


def test_rows_may_come_as_arrow(lake: fm.Lake) -> None:
    def reader(chunk: Chunk) -> pa.RecordBatchReader:
        table = pa.Table.from_pylist(number_rows(chunk))
        return table.to_reader(max_chunksize=3)

    source = Numbers(act={"0..10": reader, "10..20": lambda chunk: pa.Table.from_pylist(number_rows(chunk))})
    spec = history(source, rows_exact=True)
    assert run(lake, spec).outcome == "done"
    settled(lake, spec)


def test_two_tables_get_their_rows_together(lake: fm.Lake) -> None:
    def reader(chunk: Chunk) -> pa.RecordBatchReader:
        return pa.Table.from_pylist(number_rows(chunk)).to_reader()

    source = Numbers(rows=reader)
    spec = history(source, {"events": None, "notes": None})
    found = run(lake, spec)
    assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 100, 5)
    assert ids(lake, "notes") == ids(lake) == list(range(50))
    for commit in lake.history(limit=5):
        assert {(part.table, part.rows_added) for part in commit.tables} == {("events", 10), ("notes", 10)}
    settled(lake, spec)


def test_a_table_with_a_key_is_merged_into(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", [{"id": 7, "name": "old"}, {"id": 70, "name": "another"}])
    spec = history(Numbers(), "people")
    assert run(lake, spec).outcome == "done"
    found = {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()}
    # A row that is there and no older, by the range column, stays.
    assert found == {**{number: f"row {number}" for number in range(50)}, 7: "old", 70: "another"}


# ── failures ──


def test_a_source_that_fails_for_a_while_is_asked_again(lake: fm.Lake) -> None:
    source = Numbers(
        act={
            ("0..10", 1): raises(OSError("the disk hiccups")),
            ("0..10", 2): raises(fm.Unavailable("not now")),
            ("10..20", 1): raises(fm.Busy("somebody else")),
            ("30..40", 1): raises(ZeroDivisionError("who knows")),
        }
    )
    spec = history(source, workers=2, retries=3)
    assert run(lake, spec).outcome == "done"
    assert source.asked == {"0..10": 3, "10..20": 2, "20..30": 1, "30..40": 2, "40..50": 1}
    settled(lake, spec)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_chunk_that_fails_for_good_names_itself_and_what_is_finished_stays(lake: fm.Lake, workers: int) -> None:
    source = Numbers(act={"20..30": raises(OSError("the disk is gone"))})
    spec = history(source, order="oldest", workers=workers, retries=2)
    found = run(lake, spec)
    assert (found.outcome, found.job["status"], found.exit_code) == ("failed", "failed", 4)
    assert found.error is not None
    assert found.error["facts"]["chunk"] == "20..30"
    assert "the disk is gone" in found.error["facts"]["cause"]
    assert source.asked["20..30"] == 2
    assert {0, 1}.issubset(numbers_done(lake))
    assert found.job["processed"] == len(numbers_done(lake))
    assert ids(lake) == sorted(number for chunk in numbers_done(lake) for number in range(chunk * 10, chunk * 10 + 10))


def test_a_source_that_does_not_answer_is_given_up(lake: fm.Lake) -> None:
    never = threading.Event()
    source = Numbers(act={("20..30", 1): lambda chunk: never.wait(60), ("10..20", 1): lambda chunk: never.wait(60)})
    spec = history(source, call_deadline_s=0.05, retries=2, workers=2)
    assert run(lake, spec).outcome == "done"
    stuck = Numbers(act={"0..10": lambda chunk: never.wait(60)})
    found = run(lake, history(stuck, "notes", name="stuck", call_deadline_s=0.05, retries=2))
    never.set()
    assert found.error is not None
    assert (found.error["kind"], found.error["facts"]["call"]) == ("Unavailable", "read(0..10)")
    assert found.error["facts"]["chunk"] == "0..10"
    settled(lake, spec)


def test_an_error_of_the_callback_fails_the_job_with_its_words(lake: fm.Lake) -> None:
    def step(processed: int, total: int | None) -> None:
        if processed == 2:
            raise RuntimeError("the bar broke")

    for workers in (1, 3):
        spec = history(Numbers(), workers=workers, name=f"years {workers}", tables={1: "events", 3: "notes"}[workers])
        found = run(lake, spec, step)
        assert found.error is not None
        assert (found.outcome, found.error["message"]) == ("failed", "the bar broke")
        assert 2 <= len(numbers_done(lake, "events" if workers == 1 else "notes", spec.name)) < 5


# ── exactly once ──


class Outage(DatabaseFaults):
    """The database is away from its next call on, and back after so many calls that failed."""

    def __init__(self, lake: fm.Lake, mode: str, failures: int) -> None:
        self.left = failures
        super().__init__(lake.catalog.database, fail_at=1, mode=mode, stay_broken=True)

    def _error(self) -> Exception:
        self.left -= 1
        if self.left == 0:
            self.remove()
        return super()._error()


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_chunk_whose_reply_was_lost_is_not_loaded_twice(lake: fm.Lake, mode: str) -> None:
    faults: list[DatabaseFaults] = []
    source = Numbers()
    spec = history(source)
    with at("chunk.moved", lambda: faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode))):
        found = run(lake, spec)
    faults[0].remove()
    assert faults[0].fired
    assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 50, 5)
    settled(lake, spec)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_chunk_whose_outcome_is_unknown_is_asked_for_before_it_is_loaded_again(lake: fm.Lake, mode: str) -> None:
    """The database is lost in COMMIT and is away for a while: the source's next reading finds it back."""
    faults: list[Outage] = []
    source = Numbers()
    spec = history(source, order="oldest", retries=50)
    with at("chunk.moved", lambda: faults.append(Outage(lake, mode, failures=12))):
        found = run(lake, spec)
    assert faults[0].left == 0
    assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 50, 5), found
    assert source.asked["0..10"] == 1, "it was sealed, so a healer finishes it"
    settled(lake, spec)


def test_a_run_that_died_is_gone_on_with(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
    child = Child(killed_run, place, failpoint="chunk.sealed:3")
    child.wait()
    assert child.killed
    with place.open(actor="test") as lake:
        assert lake.catalog.jobs.find("years").status == "interrupted"
        source = Numbers()
        spec = history(source, order="oldest")
        found = run(lake, spec)
        assert (found.outcome, found.job["rows"], found.job["publishes"]) == ("done", 50, 5)
        assert source.order == ["30..40", "40..50"], "the third was sealed: it was finished, not loaded again"
        settled(lake, spec)
        check_lake(lake.catalog)


def killed_run(place: Place) -> None:
    with place.open(actor="child") as lake:
        run(lake, history(Numbers(), order="oldest"))
