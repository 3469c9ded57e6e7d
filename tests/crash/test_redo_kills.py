"""Kill a redo at every failpoint, let its calls fail in turn: rows and record of a chunk go together, and come once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS
from floodmark.jobs.record import BackfillRun
from floodmark.testing.children import preload, run_killed
from floodmark.testing.database_faults import DatabaseFaults
from tests.conftest import Place
from tests.crash.backfill_world import (
    CHUNK_ROWS,
    CHUNKS,
    EVENTS,
    HISTORY_JOB,
    PEOPLE,
    TABLES,
    Contents,
    audited,
    before,
    check_at_rest,
    chunk_states,
    chunks_done,
    contents,
    history,
    loaded,
    make_loaded,
    meddle,
    meddled,
    planned_again,
)
from tests.crash.test_backfill_faults import HistoryTrial, fail_database_calls, fail_storage_calls
from tests.crash.test_backfill_kills import points_of, with_chunks
from tests.crash.test_kill_at_every_step import BEFORE_COMMIT, BEFORE_SEAL, heal
from tests.crash.test_sink_faults import CommitFaults

preload("tests.crash.test_redo_kills", "floodmark.backfill.chunks.redo")

REDONE = 1
FIRST, LAST = REDONE * CHUNK_ROWS, (REDONE + 1) * CHUNK_ROWS
AGAIN = "redo.planned_again"
REDO_KILLS = ["job.held", *points_of("redo"), "chunk.begun", "chunk.sealed", "chunk.published", "job.ended"]


def redo_chunk(place: Place) -> str:
    with place.open(actor="fixer") as lake:
        return lake.backfill.redo(HISTORY_JOB, FIRST, LAST).outcome


def reports(point: str) -> Counter[tuple[str, str]]:
    """What the audit has after healing: the redo itself, if it was published, and what died."""
    kind, _, step = point.partition(".")
    found: Counter[tuple[str, str]] = Counter()
    if kind == "chunk" or point == "job.ended":
        found["redo", "redone"] += 1
    if step in (*BEFORE_SEAL, "planned_again"):
        found[kind, "rolled_back"] += 1
    elif step in BEFORE_COMMIT:
        found[kind, "rolled_forward"] += 1
    if kind == "redo" and step not in (*BEFORE_SEAL, "planned_again"):
        found["redo", "redone"] += 1
    return found


def taken_out(wanted: Contents) -> None:
    """All rows of the chunk go: others have written none into its range."""
    gone = range(FIRST, LAST)
    wanted.events = Counter({row: count for row, count in wanted.events.items() if row[2] not in gone})
    wanted.people = {number: row for number, row in wanted.people.items() if row[1] not in gone}


def kill_redo(
    place: Place, point: str, run: Callable[..., Any] = redo_chunk, *, gone: int | None = None,
    heal_point: str | None = None,
) -> None:  # fmt: skip
    """`gone`: an event that another writer took out meanwhile. `heal_point`: where a healer died too."""
    make_loaded(place)
    assert run_killed(run, place, failpoint=point), f"{point} was never passed"
    assert heal_point is None or run_killed(heal, place, failpoint=heal_point), f"{heal_point} was never passed"
    with place.open(actor="test") as lake:
        assert Counter(audited(lake)) == reports(point)
        done = chunks_done(lake)
        wanted = with_chunks(before(), done)
        if gone is not None and REDONE in done:
            wanted.events = Counter({row: count for row, count in wanted.events.items() if row[0] != gone})
        assert contents(lake) == wanted, "rows and records go together"
        job = lake.backfill.show(HISTORY_JOB)
        assert job["status"] == ("done" if point == "job.ended" else "interrupted")
        assert job["rows"] == len(done) * CHUNK_ROWS * len(TABLES)
        gaps = lake.backfill.coverage(HISTORY_JOB)["tables"][EVENTS]["gaps"]
        assert gaps == ([] if REDONE in done else [[str(FIRST), str(LAST)]])
        meddle(lake)
        meddled(wanted)
        finish(lake, point, wanted, done)


def finish(lake: fm.Lake, point: str, wanted: Contents, done: set[int]) -> None:
    """The caller's retry, or somebody who resumes the job: either ends with all of it, once."""
    if point.endswith(("built", "published", "begun")):
        assert lake.backfill.resume(HISTORY_JOB).outcome == ("nothing_to_do" if REDONE in done else "done")
        if REDONE not in done:
            loaded(wanted, REDONE)
    else:
        assert lake.backfill.redo(HISTORY_JOB, FIRST, LAST).outcome == "redone"
        taken_out(wanted)
        loaded(wanted, REDONE)
    assert contents(lake) == wanted
    version = lake.catalog.history.resolve()
    assert history(lake).outcome == "nothing_to_do"
    assert lake.catalog.history.resolve() == version
    assert {state for state, _ in chunk_states(lake).values()} == {"done"}
    assert lake.backfill.show(HISTORY_JOB)["rows"] == CHUNKS * CHUNK_ROWS * len(TABLES)
    check_at_rest(lake)


@pytest.mark.parametrize("point", REDO_KILLS)
def test_a_killed_redo_takes_rows_and_record_together_and_is_loaded_once(
    new_place: Callable[[str], Place], point: str
) -> None:
    kill_redo(new_place("sqlite"), point)


@pytest.mark.parametrize("point", ["redo.rewritten", "redo.moved", "redo.published"])
def test_a_killed_redo_goes_on_with_a_shared_database(new_place: Callable[[str], Place], point: str) -> None:
    kill_redo(new_place("postgresql"), point)


def take_event(lake: fm.Lake) -> None:
    lake.delete(EVENTS, f"id = {FIRST + 1}")


def test_a_redo_killed_after_planning_again_is_rolled_back(new_place: Callable[[str], Place]) -> None:
    run = partial(planned_again, "redo", take_event, redo_chunk)
    kill_redo(new_place("sqlite"), AGAIN, run, gone=FIRST + 1)


@pytest.mark.parametrize("heal_point", ["heal.moved", "heal.published"])
def test_a_redo_whose_healer_is_killed_too_happens_once(new_place: Callable[[str], Place], heal_point: str) -> None:
    kill_redo(new_place("sqlite"), "redo.sealed", heal_point=heal_point)


def test_every_failpoint_of_a_redo_is_killed_here() -> None:
    assert {name for name, kind in FAILPOINTS.items() if kind == "redo"} <= {*REDO_KILLS, AGAIN}


# ── faults ──


class RedoTrial(HistoryTrial):
    """The first of two chunks is loaded again, for two tables."""

    def prepare(self, number: int) -> None:
        assert super().start(number).outcome == "done"

    def start(self, number: int) -> BackfillRun:
        done = self.lake.backfill.redo(self.job(number), number * 10, number * 10 + 2)
        return replace(done, outcome="done") if done.outcome == "redone" else done

    def go_on(self, number: int) -> BackfillRun:
        return self.start(number) if number % 3 else self.lake.backfill.resume(self.job(number))

    def check(self, number: int) -> None:
        numbers = range(number * 10, number * 10 + 4)
        self._events.update(numbers)
        self._ids.update(numbers)
        found = [Counter(self.lake.read_arrow(table).read_all()["id"].to_pylist()) for table in (EVENTS, PEOPLE)]
        assert found == [self._events, self._ids], f"after fault {number}"
        job = self.lake.catalog.jobs.find(self.job(number))
        assert job.rows == 8, f"after fault {number}"
        states = [(one.table, one.state, one.rows) for one in self.lake.catalog.chunks.of(job.id)]
        assert sorted(states) == [(table, "done", 2) for table in (EVENTS, PEOPLE) for _ in range(2)]


@pytest.mark.parametrize(("mode", "kind", "first", "step"), [
    ("before", CommitFaults, 1, 3),
    ("after", CommitFaults, 2, 3),
    ("before", DatabaseFaults, 1, 47),
    ("after", DatabaseFaults, 19, 47),
])  # fmt: skip
def test_whichever_database_call_of_a_redo_fails_all_is_there_once(
    new_place: Callable[[str], Place], mode: str, kind: type[DatabaseFaults], first: int, step: int
) -> None:
    outcomes = fail_database_calls(lambda: RedoTrial(new_place("sqlite"), 1), mode, kind, first, step)
    assert len(outcomes) * step > 10, "hardly any call was counted"


@pytest.mark.parametrize(("mode", "step"), [("before", 11), ("after", 9), ("torn", 7), ("disk_full", 7)])
def test_whichever_storage_call_of_a_redo_fails_all_is_there_once(
    new_place: Callable[[str], Place], mode: str, step: int
) -> None:
    outcomes = fail_storage_calls(
        lambda: RedoTrial(new_place("sqlite"), 1), mode, step, writes=mode in ("torn", "disk_full")
    )
    assert len(outcomes) > 1, "hardly any call was counted"


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["before", "after"])
def test_soak_every_database_call_of_a_redo(new_place: Callable[[str], Place], mode: str) -> None:
    fail_database_calls(lambda: RedoTrial(new_place("sqlite"), 1), mode, DatabaseFaults)
