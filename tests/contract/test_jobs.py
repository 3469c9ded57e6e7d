"""Jobs in the catalog: one run at a time, what they are for good, how far they are, and every way in which they end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.chunks import ChunkRider, FillRider, LoadedChunk, LoadedTable, PruneRider
from floodmark.catalog.jobs import (
    CANCELLED,
    COLUMN,
    DONE,
    END_TRIES_MAX,
    FAILED,
    HISTORY,
    NAME_CHARACTERS_MAX,
    SHOWN_MS,
    HeldJob,
    Job,
)
from floodmark.catalog.riders import AlreadyCommitted
from floodmark.commit.intent import Intent
from floodmark.commit.seal import rider_from_dict
from floodmark.errors import Busy, Conflict, Corrupt, Fenced, Invalid, NotFound, Unavailable
from floodmark.jobs.progress import LOOK_EVERY_S, WRITE_EVERY_S, Cancelled, JobProgress
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import TEXT_CHARACTERS_MAX, TimedOut, run_job
from floodmark.model import MAIN
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from floodmark.write.verbs import write
from tests.conftest import Place, at, ids, rows

pytestmark = pytest.mark.mostly_sqlite(3)

PINNED = {"size": 10, "column": "id", "last": None}


def start(lake: fm.Lake, name: str = "years", kind: str = HISTORY, **changes: Any) -> HeldJob:
    pinned = {**PINNED, **changes.pop("pinned", {})}
    settings = changes.pop("settings", {"workers": 2})
    return lake.catalog.jobs.start(name, kind, ["events"], pinned, settings, "chunks", "test", **changes)


def find(lake: fm.Lake, name: str = "years") -> Job:
    return lake.catalog.jobs.find(name)


def change(lake: fm.Lake, *statements: Any) -> None:
    with lake.catalog.database.write() as tx:
        for statement in statements:
            tx.execute(statement)


def set_job(lake: fm.Lake, **values: Any) -> None:
    change(lake, update(tables.jobs).values(**values))


def now_ms(lake: fm.Lake) -> int:
    with lake.catalog.database.read() as tx:
        return lake.catalog.database.now_ms(tx)


def ran(
    lake: fm.Lake, work: Callable[[JobProgress], bool], callback: Any = None, held: HeldJob | None = None
) -> BackfillRun:
    return run_job(lake.backfill._context, held or start(lake), callback, work)


def start_and_die(place: Place) -> None:
    """A run that is killed, or that its process forgets to end."""
    with place.open() as lake:
        held = start(lake)
        lake.catalog.jobs.progress(held, 3, 9, first=True)
        lake.close = lambda: None  # type: ignore[method-assign]  # the heartbeat's row stays, as after a kill


# ── starting ──


def test_a_job_is_made_once_and_gone_on_with_after_its_end(lake: fm.Lake) -> None:
    held = start(lake)
    job = find(lake)
    assert (job.id, job.run, job.state, job.status, job.alive) == (held.id, held.run, "running", "running", True)
    assert (job.table_names, job.actor, job.unit, job.processed, job.total) == (("events",), "test", "chunks", 0, None)
    assert (job.created_ms <= (job.started_ms or 0) <= job.updated_ms, held.resumed) == (True, False)
    lake.catalog.jobs.end(held, CANCELLED, 4, 9)
    again = start(lake, settings={"workers": 1})
    assert (again.id, again.resumed, again.run != held.run) == (held.id, True, True)
    job = find(lake)
    assert (job.ended_ms, job.cancel_ms, job.error, job.settings["workers"]) == (None, None, None, 1)
    # Nobody died: there is nothing to report.
    assert lake.audit() == []


def test_a_job_is_found_by_its_name_before_its_id(lake: fm.Lake) -> None:
    first = start(lake, "one")
    second = start(lake, first.id)
    assert find(lake, first.id).id == second.id
    assert find(lake, second.id).id == second.id
    assert find(lake, "one").id == first.id
    # And a run that ends means its own job.
    lake.catalog.jobs.end(second, DONE, 1, 1)
    assert [find(lake, "one").state, find(lake, second.id).state] == ["running", "done"]
    lake.catalog.jobs.end(first, FAILED, 0, 1, {"kind": "X", "message": "x"})
    assert [find(lake, "one").state, find(lake, second.id).state] == ["failed", "done"]


@pytest.mark.parametrize("name", ["", "x" * (NAME_CHARACTERS_MAX + 1), "two\nlines", "a\x00b", "a\ud800b"])
def test_a_name_that_nobody_could_read_makes_no_job(lake: fm.Lake, name: str) -> None:
    with pytest.raises(Invalid, match="a job's name"):
        start(lake, name)
    assert lake.catalog.jobs.all() == []


@pytest.mark.parametrize("name", ["x" * NAME_CHARACTERS_MAX, "水位 'x'; drop table fm_jobs", "-n"])
def test_any_other_name_is_a_name(lake: fm.Lake, name: str) -> None:
    assert find(lake, name if start(lake, name) else "").name == name


def test_a_living_run_is_busy_for_threads_and_processes(place: Place, lake: fm.Lake) -> None:
    held = start(lake)
    with pytest.raises(Busy, match="another run") as caught:
        start(lake)
    assert caught.value.facts["holder"]
    with place.open() as other:
        with pytest.raises(Busy) as caught:
            start(other)
        assert ":" in caught.value.facts["holder"]
        assert find(other).status == "running"
    lake.catalog.jobs.end(held, DONE, 1, 1)
    with place.open() as other:
        assert start(other).resumed


def test_of_many_who_start_a_job_at_once_one_has_it(place: Place, lake: fm.Lake) -> None:
    others = [place.open() for _ in range(3)]
    got: list[Any] = []
    together = threading.Barrier(4)

    def try_it(one: fm.Lake) -> None:
        together.wait()
        try:
            got.append(start(one))
        except Busy as busy:
            got.append(busy)

    threads = [threading.Thread(target=try_it, args=(one,)) for one in (lake, *others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [one for one in got if isinstance(one, HeldJob)]
    assert (len(got), len(held), len(lake.catalog.jobs.all())) == (4, 1, 1)
    assert find(lake).run == held[0].run
    for other in others:
        other.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pinned": {"size": 20}}, "size: 20, was 10"),
        ({"pinned": {"more": "x"}}, "more: 'x', was None"),
        ({"pinned": {"last": 5}}, "last: 5, was None"),
        ({"kind": COLUMN}, "kind: 'column', was 'history'"),
        ({"kind": COLUMN, "pinned": {"size": 1}}, "kind: 'column', was 'history'; size: 1, was 10"),
    ],
    ids=["another", "more", "nothing-before", "kind", "both"],
)
def test_what_a_job_is_does_not_change(lake: fm.Lake, changes: dict[str, Any], said: str) -> None:
    lake.catalog.jobs.end(start(lake), DONE, 1, 1)
    before = find(lake)
    with pytest.raises(Invalid, match="another job has") as caught:
        start(lake, **changes)
    assert caught.value.facts["different"] == said
    assert find(lake) == before


def test_nothing_said_is_the_same_as_nothing(lake: fm.Lake) -> None:
    lake.catalog.jobs.end(start(lake), DONE, 1, 1)
    assert start(lake, pinned={"something new": None}).resumed


def test_a_job_that_begins_anew_may_be_another_one_as_long_as_no_row_is_done(place: Place, lake: fm.Lake) -> None:
    held = start(lake)
    with place.open() as other, pytest.raises(Invalid, match="another job has"):
        start(other, pinned={"size": 20}, anew=True)  # of one that is at work
    lake.catalog.jobs.end(held, FAILED, 0, 9, {"kind": "X", "message": "x"})
    held = start(lake, pinned={"size": 20}, anew=True)
    assert (find(lake).settings["size"], held.pinned["size"]) == (20, 20)
    apply(lake, FillRider(held.id, held.run, 1, 0))
    lake.catalog.jobs.end(held, CANCELLED, 1, 9)
    with pytest.raises(Invalid, match="another job has"):
        start(lake, pinned={"size": 30}, anew=True)
    assert start(lake, pinned={"size": 20}, anew=True).resumed


@pytest.mark.parametrize("before", ["new", "cancelled"])
def test_a_cancel_while_a_job_is_started_is_not_lost(place: Place, lake: fm.Lake, before: str) -> None:
    with place.open() as other:
        if before == "cancelled":
            lake.catalog.jobs.end(start(lake), CANCELLED, 1, 9)

        def meanwhile() -> None:
            if before == "cancelled":
                other.catalog.jobs.end(start(other), CANCELLED, 2, 9)
            else:
                other.catalog.jobs.cancel("years")

        with at("job.made", meanwhile), pytest.raises(Conflict, match="cancelled while it was started"):
            start(lake)
        assert find(lake).status == "cancelled"
        # Who starts it now knows that.
        assert start(lake).id == find(lake).id


# ── runs that die ──


@pytest.mark.parametrize("point", ["job.made", "job.held", None])
def test_the_next_run_goes_on_after_a_kill_and_says_so_once(place: Place, lake: fm.Lake, point: str | None) -> None:
    if point is None:
        run_child(start_and_die, place)
    else:
        assert run_killed(start_and_die, place, failpoint=point)
    was = find(lake)
    # Before anything of it was done nobody has died at it.
    assert (was.state, was.status) == (("pending",) * 2 if point == "job.made" else ("running", "interrupted"))
    held = start(lake)
    assert (held.id, held.resumed) == (was.id, point != "job.made")
    told = [(row.operation, row.kind, row.found, row.outcome) for row in lake.audit()]
    assert told == ([] if point == "job.made" else [(was.run, "job", "running", "resumed")])
    lake.catalog.jobs.end(held, DONE, 1, 1)
    lake.catalog.jobs.end(start(lake), DONE, 1, 1)
    assert len(lake.audit()) == len(told)
    check_lake(lake.catalog)


def start_and_end(place: Place) -> None:
    with place.open() as lake:
        lake.catalog.jobs.end(start(lake), DONE, 5, 5)


def test_a_kill_after_the_end_leaves_an_ended_job(place: Place, lake: fm.Lake) -> None:
    assert run_killed(start_and_end, place, failpoint="job.ended")
    job = find(lake)
    assert (job.status, job.processed, job.alive, job.run) == ("done", 5, False, None)


def test_a_lease_that_has_run_out_is_taken_over_and_the_late_one_is_fenced(place: Place, lake: fm.Lake) -> None:
    with place.open() as late:
        mine = start(late)
        # As if it had been paused for longer than its lease.
        late.catalog.heartbeat._stop.set()
        change(
            lake, update(tables.processes).where(tables.processes.c.id == late.catalog.heartbeat.id).values(beat_ms=0)
        )
        assert find(lake).status == "interrupted"
        held = start(lake)
        jobs = late.catalog.jobs
        for act in (
            lambda: jobs.progress(mine, 1, 2),
            lambda: jobs.wants_cancel(mine),
            lambda: jobs.end(mine, DONE, 2, 2),
        ):
            with pytest.raises(Fenced, match="taken this job over"):
                act()
        # Also after the other one's end, which is not this one's.
        lake.catalog.jobs.end(held, DONE, 7, 7)
        with pytest.raises(Fenced):
            jobs.end(mine, DONE, 2, 2)
        assert (find(lake).processed, len(lake.audit())) == (7, 1)


def test_a_run_whose_work_was_fenced_leaves_the_job_to_others(place: Place, lake: fm.Lake) -> None:
    def work(progress: JobProgress) -> bool:
        raise Fenced("its operation was undone")

    with pytest.raises(Fenced):
        ran(lake, work)
    # This process knows it at once; others when the heartbeat has said so.
    assert find(lake).status == "interrupted"
    assert start(lake).resumed
    assert [row.outcome for row in lake.audit()] == ["resumed"]


# ── progress ──


class Clock:
    """Time as a test wants it: a sleep is over at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []
        passing = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr("floodmark.jobs.progress.time", passing)

    def _sleep(self, wait_s: float) -> None:
        self.sleeps.append(wait_s)
        self.now_s += wait_s


def test_the_catalog_hears_at_most_once_a_second_and_the_last_word_always(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    seen: list[int] = []
    written: list[tuple[float, int]] = []

    def work(progress: JobProgress) -> bool:
        for number in range(100):
            clock.now_s = number / 10
            progress.step(number, 120)
            if find(lake).processed not in seen:
                seen.append(find(lake).processed)
                written.append((clock.now_s, find(lake).processed))
        assert (progress.writes, WRITE_EVERY_S) == (10, 1.0)
        progress.step(120, 120)
        return True

    done = ran(lake, work)
    assert written == [(float(second), second * 10) for second in range(10)]
    assert (done.outcome, done.job["processed"], done.job["total"], done.job["percent"]) == ("done", 120, 120, 100.0)


def test_a_word_that_came_too_soon_is_written_while_the_run_goes_on(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    progress = JobProgress(lake.catalog.jobs, start(lake))
    progress.step(1, 9)
    progress.step(2, 9)
    assert find(lake).processed == 1
    # A long chunk, in which nothing is told.
    progress.wait(WRITE_EVERY_S + 0.5)
    assert (find(lake).processed, progress.writes) == (2, 2)
    progress.wait(5)
    assert (progress.writes, find(lake).resumed_from) == (2, 1)
    assert clock.now_s > 6


def test_the_caller_hears_every_step_and_none_twice_in_a_row(lake: fm.Lake) -> None:
    told: list[tuple[int, int | None]] = []

    def work(progress: JobProgress) -> bool:
        for step in [(0, None), (0, 9), (0, 9), (4, 9), (4, 9), (9, 9), (9, 9)]:
            progress.step(*step)
        return True

    ran(lake, work, lambda processed, total: told.append((processed, total)))
    assert told == [(0, None), (0, 9), (4, 9), (9, 9)]


def test_the_first_word_of_a_retry_is_the_truth_and_its_rate_its_own(lake: fm.Lake) -> None:
    first = start(lake)
    lake.catalog.jobs.progress(first, 0, 1000, first=True)
    lake.catalog.jobs.progress(first, 900, 1000)
    set_job(lake, started_ms=now_ms(lake) - 10_000)
    assert 80 < (find(lake).rate() or 0) < 91
    lake.catalog.jobs.end(first, FAILED, 900, 1000, {"kind": "X", "message": "x"})
    held = start(lake)
    # Nothing was said yet: the figures are the last run's, and no pace.
    assert (find(lake).processed, find(lake).rate(), find(lake).eta_ms()) == (900, None, None)
    set_job(lake, updated_ms=now_ms(lake) + 60_000)
    assert find(lake).rate() is None
    progress = JobProgress(lake.catalog.jobs, held)
    progress.step(400, 1000)
    assert (find(lake).processed, find(lake).resumed_from, find(lake).rate()) == (400, 400, None)
    progress.step(500, 1000)
    lake.catalog.jobs.progress(held, 500, 1000)
    set_job(lake, started_ms=1, updated_ms=10_001)
    assert (find(lake).rate(), find(lake).eta_ms()) == (10.0, 50_000)
    assert (find(lake).as_dict()["rate"], find(lake).as_dict()["eta_s"]) == (10.0, 50.0)


def test_a_retry_that_ends_before_its_first_word_leaves_the_figures(lake: fm.Lake) -> None:
    lake.catalog.jobs.end(start(lake), CANCELLED, 900, 1000)

    def work(progress: JobProgress) -> bool:
        raise ConnectionError("the source does not answer")

    done = ran(lake, work)
    assert (done.job["status"], done.job["processed"], done.job["total"]) == ("failed", 900, 1000)
    assert done.job["rate"] is None


def test_a_first_word_that_did_not_get_through_is_said_again_as_the_first(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.catalog.jobs.end(start(lake), CANCELLED, 900, 1000)
    clock = Clock(monkeypatch)
    progress = JobProgress(lake.catalog.jobs, start(lake))
    faults = DatabaseFaults(lake.catalog.database, fail_at=2, mode="before")
    try:
        progress.step(400, 1000)
    finally:
        faults.remove()
    assert (find(lake).processed, progress.writes, progress.errors) == (900, 0, 1)
    clock.now_s += WRITE_EVERY_S
    progress.step(401, 1000)
    assert (find(lake).processed, find(lake).resumed_from, progress.writes) == (401, 401, 1)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("no such screen"), "ValueError", "no such screen"),
        (Invalid("not this", chunk="1..2"), "Invalid", "not this"),
        (RuntimeError("long " * 10_000), "RuntimeError", "long " * 3),
        (RuntimeError("strange \x00\ud800"), "RuntimeError", "strange \x00\ud800"),
        (KeyError(), "KeyError", ""),
    ],
    ids=["ours", "known", "long", "strange", "empty"],
)
def test_a_callback_that_raises_fails_the_job_with_its_text(
    lake: fm.Lake, error: Exception, kind: str, message: str
) -> None:
    def callback(processed: int, total: int | None) -> None:
        if processed == 2:
            raise error

    def work(progress: JobProgress) -> bool:
        for number in range(9):
            progress.step(number, 9)
        return True

    done = ran(lake, work, callback)
    job = find(lake)
    assert (done.outcome, job.status, job.processed, job.total) == ("failed", "failed", 2, 9)
    assert job.error == done.error == done.job["error"]
    assert job.error is not None
    assert (job.error["kind"], job.error["message"].startswith(message)) == (kind, True)
    assert len(job.error["message"]) <= TEXT_CHARACTERS_MAX
    assert done.exit_code == (2 if kind == "Invalid" else 1)
    if kind == "Invalid":
        assert job.error["facts"] == {"chunk": "1..2"}


def test_a_row_that_vanished_is_an_error(lake: fm.Lake) -> None:
    held = start(lake)
    change(lake, delete(tables.jobs))
    jobs = lake.catalog.jobs
    for act in (
        lambda: jobs.progress(held, 1, 2),
        lambda: jobs.wants_cancel(held),
        lambda: jobs.end(held, DONE, 2, 2),
    ):
        with pytest.raises(Corrupt, match="vanished"):
            act()
    # Another job of the same name is not this one.
    start(lake)
    with pytest.raises(Corrupt, match="vanished"):
        jobs.end(held, DONE, 2, 2)
    assert find(lake).status == "running"


def test_a_run_whose_row_vanished_does_not_end_well(lake: fm.Lake) -> None:
    def work(progress: JobProgress) -> bool:
        change(lake, delete(tables.jobs))
        return True

    with pytest.raises(Corrupt, match="vanished"):
        ran(lake, work)


# ── the end ──


def test_an_interrupt_ends_the_job_as_cancelled_and_goes_on(lake: fm.Lake) -> None:
    def work(progress: JobProgress) -> bool:
        progress.step(3, 9)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ran(lake, work)
    job = find(lake)
    assert (job.status, job.processed, job.run) == ("cancelled", 3, None)


def test_a_tip_that_did_not_come_has_an_outcome_of_its_own(lake: fm.Lake) -> None:
    def work(progress: JobProgress) -> bool:
        raise TimedOut("the tip did not come", waited="10m")

    done = ran(lake, work)
    assert (done.outcome, done.job["status"], done.exit_code) == ("timed_out", "failed", 4)
    assert done.error is not None
    assert done.error["facts"] == {"waited": "10m"}


@pytest.mark.parametrize("state", [DONE, FAILED, CANCELLED])
@pytest.mark.parametrize("mode", ["before", "after"])
def test_an_end_whose_reply_was_lost_is_written_once(lake: fm.Lake, state: str, mode: str) -> None:
    error = {"kind": "X", "message": "x"} if state == FAILED else None
    for fail_at in range(1, 20):
        held = start(lake)
        faults = DatabaseFaults(lake.catalog.database, fail_at=fail_at, mode=mode)
        try:
            lake.catalog.jobs.end(held, state, fail_at, 20, error)
        finally:
            faults.remove()
        job = find(lake)
        assert (job.state, job.processed, job.error, job.run) == (state, fail_at, error, None)
        if not faults.fired:
            break
    else:
        raise AssertionError("the end takes too many statements")
    assert fail_at > 3
    assert lake.audit() == []


def test_an_end_that_cannot_be_written_is_raised_and_the_job_is_interrupted(place: Place, lake: fm.Lake) -> None:
    held = start(lake)
    faults = DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True)
    try:
        with pytest.raises(Unavailable):
            lake.catalog.jobs.end(held, DONE, 2, 2)
    finally:
        faults.remove()
    # A try begins its transaction, and fails there.
    assert faults.calls_seen <= 3 * END_TRIES_MAX
    assert find(lake).status == "interrupted"
    assert start(lake).resumed


def test_a_failure_whose_end_cannot_be_written_is_still_that_failure(lake: fm.Lake) -> None:
    def work(progress: JobProgress) -> bool:
        faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True))
        raise ValueError("what really happened")

    faults: list[DatabaseFaults] = []
    try:
        with pytest.raises(ValueError, match="what really happened"):
            ran(lake, work)
    finally:
        faults[0].remove()
    assert find(lake).status == "interrupted"


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_start_whose_reply_was_lost_leaves_a_job_that_can_be_started(lake: fm.Lake, mode: str) -> None:
    for fail_at in range(1, 60):
        faults = DatabaseFaults(lake.catalog.database, fail_at=fail_at, mode=mode)
        held = None
        try:
            with suppress(Unavailable):
                held = start(lake, f"job {fail_at}")
        finally:
            faults.remove()
        if held is None:
            held = start(lake, f"job {fail_at}")
        lake.catalog.jobs.end(held, DONE, 1, 1)
        if not faults.fired:
            break
    else:
        raise AssertionError("a start takes too many statements")
    assert {job.status for job in lake.catalog.jobs.all()} == {"done"}
    assert len(lake.catalog.jobs.all()) == fail_at > 8


def test_a_catalog_that_is_away_for_a_while_ends_no_run(lake: fm.Lake) -> None:
    told: list[int] = []

    def work(progress: JobProgress) -> bool:
        faults = DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True)
        try:
            for number in range(5):
                progress._tried_s = float("-inf")
                progress.step(number, 5)
        finally:
            faults.remove()
        assert (progress.errors, progress.writes) == (5, 0)
        return True

    done = ran(lake, work, lambda processed, total: told.append(processed))
    assert (done.outcome, done.job["processed"], told) == ("done", 4, [0, 1, 2, 3, 4])


def test_others_see_that_a_run_was_given_up_when_the_heartbeat_has_said_so(place: Place, lake: fm.Lake) -> None:
    with place.open(lease_ms=2_000) as holder:
        held = start(holder)
        assert find(lake).status == "running"
        holder.catalog.jobs.disown(held.run)
        end_s = time.monotonic() + 30
        while find(lake).status != "interrupted":
            assert time.monotonic() < end_s
        assert start(lake).resumed


def test_a_clock_that_is_set_back_makes_no_run_end_before_it_began(lake: fm.Lake) -> None:
    held = start(lake)
    ahead = now_ms(lake) + 3_600_000
    set_job(lake, started_ms=ahead)
    lake.catalog.jobs.progress(held, 5, 10, first=True)
    lake.catalog.jobs.progress(held, 7, 10)
    assert (find(lake).rate(), find(lake).updated_ms) == (None, ahead)
    lake.catalog.jobs.end(held, DONE, 10, 10)
    assert (find(lake).ended_ms, find(lake).rate()) == (ahead, None)
    held = start(lake)
    set_job(lake, started_ms=ahead, owner_process="")
    assert lake.catalog.jobs.cancel("years").ended_ms == ahead


# ── what people ask for ──


def test_a_cancel_is_found_at_the_next_step_and_what_is_done_stays(place: Place, lake: fm.Lake) -> None:
    def work(progress: JobProgress) -> bool:
        progress.step(1, 9)
        with place.open() as other:
            asked = other.catalog.jobs.cancel("years")
            assert (asked.status, asked.as_dict()["cancel_asked"], asked.alive) == ("running", True, True)
        progress._looked_s = float("-inf")
        progress.step(2, 9)
        raise AssertionError("it went on")

    done = ran(lake, work)
    assert (done.outcome, done.job["status"], done.job["processed"]) == ("cancelled", "cancelled", 2)
    assert done.job["cancel_asked"] is False
    # A cancel is for the run that it was asked of.
    assert ran(lake, lambda progress: bool(progress.step(9, 9)) or True).outcome == "done"


def test_a_wait_ends_with_a_cancel_and_asks_a_few_times_a_second(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    held = start(lake)
    progress = JobProgress(lake.catalog.jobs, held)
    progress.wait(1.1)
    assert (sum(clock.sleeps), max(clock.sleeps)) == (pytest.approx(1.1), LOOK_EVERY_S)
    lake.catalog.jobs.cancel("years")
    with pytest.raises(Cancelled):
        progress.wait(60)
    assert sum(clock.sleeps) < 2


@pytest.mark.parametrize("found", ["pending", "interrupted"])
def test_a_job_that_nobody_is_at_is_cancelled_at_once(place: Place, lake: fm.Lake, found: str) -> None:
    if found == "pending":
        assert run_killed(start_and_die, place, failpoint="job.made")
    else:
        run_child(start_and_die, place)
    assert find(lake).status == found
    run = find(lake).run
    job = lake.catalog.jobs.cancel("years")
    assert (job.status, job.ended_ms is not None, job.run) == ("cancelled", True, None)
    told = [] if found == "pending" else [(run, "cancelled")]
    assert [(row.operation, row.outcome) for row in lake.audit()] == told
    # Nobody died since: the next run is no rescue.
    lake.catalog.jobs.end(start(lake), DONE, 1, 1)
    assert len(lake.audit()) == len(told)
    check_lake(lake.catalog)


@pytest.mark.parametrize("state", [DONE, FAILED, CANCELLED])
def test_a_job_that_is_over_cannot_be_cancelled(lake: fm.Lake, state: str) -> None:
    lake.catalog.jobs.end(start(lake), state, 1, 2)
    before = find(lake)
    assert lake.catalog.jobs.cancel("years") == before


def test_a_failure_is_shown_until_it_is_acknowledged_or_ten_minutes_old(lake: fm.Lake) -> None:
    lake.catalog.jobs.end(start(lake), FAILED, 1, 2, {"kind": "X", "message": "x"})
    job = find(lake)
    ended = job.ended_ms or 0
    assert [job.is_shown(ended + after) for after in (0, SHOWN_MS - 1, SHOWN_MS)] == [True, True, False]
    set_job(lake, ended_ms=None)
    assert find(lake).is_shown(2**60), "what has no end time is not over"
    job = lake.catalog.jobs.acknowledge("years")
    assert (job.status, job.is_shown(0)) == ("failed", False)
    assert job.as_dict()["acknowledged"]
    again = lake.catalog.jobs.acknowledge("years")
    assert again.acknowledged_ms == job.acknowledged_ms
    # The next failure is another one.
    lake.catalog.jobs.end(start(lake), FAILED, 1, 2, {"kind": "X", "message": "x"})
    assert find(lake).is_shown(now_ms(lake))


@pytest.mark.parametrize("state", [DONE, CANCELLED])
def test_only_a_failure_can_be_acknowledged(lake: fm.Lake, state: str) -> None:
    lake.catalog.jobs.end(start(lake), state, 1, 2)
    assert lake.catalog.jobs.acknowledge("years").acknowledged_ms is None
    assert not find(lake).is_shown(0)


@pytest.mark.parametrize("verb", ["cancel", "acknowledge", "find"])
def test_a_job_that_is_not_there_is_not_found_and_those_that_are_named(lake: fm.Lake, verb: str) -> None:
    start(lake)
    with pytest.raises(NotFound, match="no such job") as caught:
        getattr(lake.catalog.jobs, verb)("ages")
    assert (caught.value.facts["job"], caught.value.facts["jobs"]) == ("ages", "years")


# ── what cannot be understood ──


def test_a_state_that_nobody_knows_is_shown_as_unknown_and_left_alone(lake: fm.Lake) -> None:
    lake.catalog.jobs.end(start(lake), DONE, 2, 2)
    set_job(lake, state="paused")
    job = find(lake)
    assert (job.status, job.as_dict()["status"], job.is_shown(2**60), job.eta_ms()) == ("unknown",) * 2 + (True, None)
    for act in (lambda: start(lake), lambda: lake.catalog.jobs.cancel("years")):
        with pytest.raises(Corrupt, match="unknown state"):
            act()
    assert find(lake).state == "paused"


@pytest.mark.parametrize(
    "values",
    [{"spec": "{"}, {"spec": "[]"}, {"spec": "{}"}, {"table_names": "7"}, {"error": "7"}],
    ids=lambda values: "-".join(f"{name}-{text}" for name, text in values.items()),
)
def test_a_record_that_cannot_be_understood_is_corrupt_and_names_its_job(lake: fm.Lake, values: dict[str, str]) -> None:
    start(lake)
    set_job(lake, **values)
    for act in (lake.catalog.jobs.all, lambda: find(lake), lambda: lake.catalog.jobs.cancel("years")):
        with pytest.raises(Corrupt, match="cannot be parsed") as caught:
            act()
        assert caught.value.facts["job"] == "years"


def test_figures_of_every_kind_can_be_shown(lake: fm.Lake) -> None:
    start(lake)
    for processed, total, percent in [(0, None, None), (0, 0, 100.0), (9999, 10_000, 99.9), (10, 9, 100.0)]:
        set_job(lake, processed=processed, total=total)
        assert find(lake).as_dict()["percent"] == percent
    json.dumps(find(lake).as_dict())


# ── read-only ──


def test_a_read_only_lake_shows_jobs_and_changes_none(place: Place, lake: fm.Lake) -> None:
    held = start(lake)
    with place.open(read_only=True) as other:
        assert find(other).status == "running"
        for verb in (
            lambda: other.backfill.cancel("years"),
            lambda: other.backfill.ack("years"),
            lambda: other.backfill.column("events", "more", "1"),
            lambda: other.backfill.history("new", lambda chunk: [], "events", first=0, last=1, chunk=1),
        ):
            with pytest.raises(Invalid, match="read-only"):
                verb()
        with pytest.raises(Exception, match=r"(?i)read.?only"):
            other.catalog.jobs.cancel("years")
    assert not lake.catalog.jobs.wants_cancel(held)


# ── chunks, in the publishes that load them ──


def table_id(lake: fm.Lake, table: str = "events") -> str:
    return lake.catalog.history.head(table).table_id


def load_chunk(lake: fm.Lake, job: str, chunk: int, count: int, table: str = "events") -> str:
    rider = ChunkRider.of(job, chunk, (LoadedTable(table, table_id(lake, table), count),))
    intent = Intent("append", MAIN, "test", "", rider)
    data = rows(*range(chunk * 10, chunk * 10 + count))
    return write(lake.engine, intent, table, data).outcome


def load_in(place: Place, job: str) -> None:
    with place.open() as lake:
        load_chunk(lake, job, 1, 3)


def test_a_chunk_comes_once_and_is_counted_once(lake: fm.Lake) -> None:
    held = start(lake)
    assert [load_chunk(lake, held.id, 1, 3) for _ in range(2)] == ["committed", "already_committed"]
    (state,) = lake.catalog.chunks.of(held.id)
    assert (state.chunk, state.table, state.state, state.rows) == (1, "events", "done", 3)
    assert state.version == lake.status()["version"]
    assert (ids(lake), find(lake).rows, find(lake).publishes) == ([10, 11, 12], 3, 1)
    assert lake.catalog.chunks.done(held.id) == [("events", table_id(lake), 1)]
    assert lake.catalog.chunks.has_done(held.id, "events", table_id(lake))
    assert not lake.catalog.chunks.has_done(held.id, "events", "of another incarnation")
    assert lake.catalog.chunks.of("another") == []


@pytest.mark.parametrize("point", ["append.sealed", "append.published"])
def test_a_chunk_whose_process_died_is_finished_by_a_healer_and_counted_once(
    place: Place, lake: fm.Lake, point: str
) -> None:
    held = start(lake)
    assert run_killed(load_in, place, held.id, failpoint=point)
    lake.recover()
    assert load_chunk(lake, held.id, 1, 3) == "already_committed"
    assert (ids(lake), find(lake).rows, len(lake.catalog.chunks.of(held.id))) == ([10, 11, 12], 3, 1)
    check_lake(lake.catalog)


def test_a_chunk_that_another_loads_meanwhile_comes_once(place: Place, lake: fm.Lake) -> None:
    held = start(lake)
    with at("append.sealed", lambda: load_in(place, held.id)):
        assert load_chunk(lake, held.id, 1, 3) == "already_committed"
    assert (ids(lake), find(lake).rows) == ([10, 11, 12], 3)
    check_lake(lake.catalog)


def test_a_chunk_that_is_there_for_some_of_its_tables_is_a_conflict(lake: fm.Lake) -> None:
    held = start(lake)
    load_chunk(lake, held.id, 1, 3)
    both = ChunkRider.of(held.id, 1, tuple(LoadedTable(name, table_id(lake, name), 3) for name in ("events", "notes")))
    with lake.catalog.database.write() as tx, pytest.raises(Conflict, match="some of this already") as caught:
        both.check(tx)
    assert caught.value.facts["tables"] == "events"


def test_chunks_that_come_together_come_once(lake: fm.Lake) -> None:
    held = start(lake)
    into = table_id(lake)

    def together(*numbers: int) -> ChunkRider:
        loaded = (LoadedChunk(number, (LoadedTable("events", into, 2),)) for number in numbers)
        return ChunkRider(held.id, tuple(loaded))

    def load(*numbers: int) -> str:
        data = rows(*(number * 10 + place for number in numbers for place in range(2)))
        intent = Intent("append", MAIN, "test", "", together(*numbers))
        return write(lake.engine, intent, "events", data).outcome

    assert [load(1, 2, 4), load(1, 2, 4)] == ["committed", "already_committed"]
    assert [(state.chunk, state.rows) for state in lake.catalog.chunks.of(held.id)] == [(1, 2), (2, 2), (4, 2)]
    assert (ids(lake), find(lake).rows, find(lake).publishes) == ([10, 11, 20, 21, 40, 41], 6, 1)
    with pytest.raises(Conflict, match="some of this already") as caught:
        load(4, 5)
    assert caught.value.facts["chunks"] == "4"
    assert (ids(lake), len(lake.catalog.chunks.of(held.id))) == ([10, 11, 20, 21, 40, 41], 3)
    assert rider_from_dict(json.loads(json.dumps(together(1, 7).as_dict()))) == together(1, 7)


def test_a_chunk_of_a_job_that_vanished_changes_nothing(lake: fm.Lake) -> None:
    version = lake.status()["version"]
    with pytest.raises(Corrupt, match="vanished"):
        load_chunk(lake, "01ARZ3NDEKTSV4RRFFQ69G5FAV", 1, 3)
    assert (lake.status()["version"], ids(lake)) == (version, [])
    assert lake.status()["health"] == "fine"


def apply(lake: fm.Lake, rider: Any) -> None:
    with lake.catalog.database.write() as tx:
        rider.check(tx)
        rider.apply(tx, "operation", 7, lake.catalog.database.now_ms(tx))


def test_a_chunk_of_a_table_that_was_made_again_takes_the_old_ones_place(lake: fm.Lake) -> None:
    held = start(lake)
    apply(lake, ChunkRider.of(held.id, 4, (LoadedTable("events", "old", 5),)))
    load_chunk(lake, held.id, 4, 2)
    (state,) = lake.catalog.chunks.of(held.id)
    assert (state.table_id, state.rows, find(lake).rows) == (table_id(lake), 2, 7)


def test_chunks_below_a_floor_are_pruned_for_their_table_alone(lake: fm.Lake) -> None:
    held = start(lake)
    for number in range(-4, 1):
        apply(lake, ChunkRider.of(held.id, number, (LoadedTable("events", "e", 1), LoadedTable("notes", "n", 1))))

    def pruned() -> list[tuple[str, int]]:
        return [(one.table, one.chunk) for one in lake.catalog.chunks.of(held.id) if one.state == "pruned"]

    for rider in (
        PruneRider(held.id, "events", "of another incarnation", 7, ((-4, 1),)),
        PruneRider(held.id, "events", "e", 6, ((-4, 1),)),  # the chunks came after
    ):
        apply(lake, rider)
        assert pruned() == []
    apply(lake, PruneRider(held.id, "events", "e", 7, ((-4, -3), (-2, 0))))
    assert pruned() == [("events", -4), ("events", -2), ("events", -1)]
    assert sorted(lake.catalog.chunks.done(held.id, range(-2, 0))) == [("notes", "n", -2), ("notes", "n", -1)]
    # What was pruned may come again, what is there not.
    apply(lake, ChunkRider.of(held.id, -2, (LoadedTable("events", "e", 1),)))
    assert pruned() == [("events", -4), ("events", -1)]
    with pytest.raises(AlreadyCommitted):
        apply(lake, ChunkRider.of(held.id, -3, (LoadedTable("events", "e", 1),)))


def test_filled_rows_are_counted_by_the_run_that_has_the_job_and_no_other(lake: fm.Lake) -> None:
    held = start(lake, kind=COLUMN)
    apply(lake, FillRider(held.id, held.run, 5_000, 7))
    apply(lake, FillRider(held.id, held.run, 2_000, 1))
    job = find(lake)
    assert (job.rows, job.unfilled, job.publishes) == (7_000, 8, 2)
    lake.catalog.jobs.end(held, CANCELLED, 7_000, 12_000)
    for run in (held.run, start(lake, kind=COLUMN).run + "x"):
        with pytest.raises(Fenced, match="taken this job over"):
            apply(lake, FillRider(held.id, run, 1, 0))
    assert find(lake).rows == 7_000
    # Exact counts are those of all runs.
    assert find(lake).publishes == 2


@pytest.mark.parametrize(
    "rider",
    [
        ChunkRider.of("j", -3, (LoadedTable("a", "x", 1), LoadedTable("b", "y", 0))),
        PruneRider("j", "a", "x", 9, ((-3, -1), (2, 3))),
        FillRider("j", "r", 3, 2),
    ],
    ids=lambda rider: rider.as_dict()["type"],
)
def test_riders_of_jobs_come_back_from_a_seal_as_they_were(rider: Any) -> None:
    assert rider_from_dict(json.loads(json.dumps(rider.as_dict()))) == rider


def test_a_restored_lake_has_its_jobs_and_nobody_is_at_them(
    place: Place, lake: fm.Lake, tmp_path: Path, new_place: Callable[[str], Place]
) -> None:
    held = start(lake)
    load_chunk(lake, held.id, 1, 3)
    lake.backup(tmp_path / "copy")
    catalog = new_place("postgresql").catalog
    fm.restore(tmp_path / "copy", place.path, catalog=catalog)
    with Place(place.path, catalog).open() as restored:
        assert (find(restored).status, find(restored).rows) == ("interrupted", 3)
        assert restored.catalog.chunks.of(held.id) == lake.catalog.chunks.of(held.id)
        assert start(restored).resumed
        assert load_chunk(restored, held.id, 1, 3) == "already_committed"
