"""Replies of the catalog that are lost in a backfill: nothing is done twice, and no job is held or ended wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.columns import column as column_backfill
from floodmark.testing.database_faults import DatabaseFaults
from tests.conftest import Place, at
from tests.crash.backfill_world import (
    COLUMN_JOB,
    HISTORY_JOB,
    JOBS,
    KEEP,
    audited,
    check_at_rest,
    check_done,
    check_loaded,
    fill,
    history,
    make_loaded,
    make_people,
    wait_for,
)

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_backfill, "BACKOFF_S", 0.001)


class CommitOf(DatabaseFaults):
    """The COMMIT of the first transaction with such a statement fails."""

    def __init__(
        self, database: Any, statement: Callable[[str], bool], *, mode: str, stay_broken: bool = False
    ) -> None:
        self._is_it = statement
        self._armed = False
        super().__init__(database, fail_at=1, mode=mode, stay_broken=stay_broken)

    def _wrapped(self, name: str) -> Any:
        counted, real = super()._wrapped(name), self._real[name]

        def call(*arguments: Any, **named: Any) -> Any:
            if name == "do_commit":
                return counted(*arguments, **named) if self._armed else real(*arguments, **named)
            if self.fired and self._stay_broken:
                raise self._error()
            self._armed = self._armed or (not self.fired and self._is_it(arguments[1]))
            return real(*arguments, **named)

        return call


def makes_the_job(statement: str) -> bool:
    return statement.startswith("INSERT INTO fm_jobs")


def takes_the_job(statement: str) -> bool:
    return statement.startswith("UPDATE fm_jobs") and "spec=" in statement


def ends_the_job(statement: str) -> bool:
    return statement.startswith("UPDATE fm_jobs") and "ended_ms=" in statement and "spec=" not in statement


@contextmanager
def faulty(lake: fm.Lake, statement: Callable[[str], bool], mode: str, **options: Any) -> Iterator[None]:
    faults = CommitOf(lake.catalog.database, statement, mode=mode, **options)
    try:
        yield
    finally:
        faults.remove()
    assert faults.fired


PUBLISHES = [
    (COLUMN_JOB, "add_column.moved"),
    (COLUMN_JOB, "fill.moved"),
    (HISTORY_JOB, "chunk.moved"),
]


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize(("job", "point"), PUBLISHES, ids=[point for _, point in PUBLISHES])
def test_a_publish_whose_reply_is_lost_is_not_done_twice(place: Place, job: str, point: str, mode: str) -> None:
    prepare, start = JOBS[job]
    prepare(place)
    with place.open(actor="test") as lake:
        faults: list[DatabaseFaults] = []
        with at(point, lambda: faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode))):
            done = start(lake)
        faults[0].remove()
        assert faults[0].fired
        assert done.outcome == "done", done.as_dict()
        check_done(lake, job, [])


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_pruning_whose_reply_is_lost_is_not_done_twice(place: Place, mode: str) -> None:
    make_loaded(place)
    with place.open(actor="test") as lake:
        faults: list[DatabaseFaults] = []
        with at("prune.moved", lambda: faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode))):
            done = history(lake, keep=KEEP)
        faults[0].remove()
        assert faults[0].fired
        assert done.outcome == "done", done.as_dict()
        check_loaded(lake, keep=True)
        assert [commit.kind for commit in lake.history(limit=100)].count("prune") == 2
        assert audited(lake) == []
        check_at_rest(lake)


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize(("job", "point"), PUBLISHES[1:], ids=[point for _, point in PUBLISHES[1:]])
def test_a_database_that_is_lost_in_a_publish_and_stays_away_leaves_work_for_the_next_run(
    new_place: Callable[[str], Place], job: str, point: str, mode: str
) -> None:
    """Nobody can tell what came of it, nor write down that the job failed; the next run can."""
    place = new_place("sqlite")
    prepare, start = JOBS[job]
    prepare(place)
    faults: list[DatabaseFaults] = []
    with place.open(actor="test") as lake:

        def lose() -> None:
            faults.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode=mode, stay_broken=True))

        with at(point, lose), pytest.raises((fm.CommitUnknown, fm.Unavailable)):
            start(lake)
        faults[0].remove()
    with place.open(actor="test") as lake:
        assert lake.backfill.show(job)["status"] == "interrupted"
        assert lake.backfill.resume(job).outcome == "done"
        healed = {"fill.moved": ("fill", "rolled_back"), "chunk.moved": ("chunk", "rolled_forward")}[point]
        check_done(lake, job, [*([healed] if mode == "before" else []), ("job", "resumed")])


# ── the job's own record ──


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("statement", [makes_the_job, takes_the_job])
@pytest.mark.parametrize("job", JOBS)
def test_a_start_whose_reply_is_lost_is_repeated_by_the_same_call(
    place: Place, job: str, statement: Callable[[str], bool], mode: str
) -> None:
    prepare, start = JOBS[job]
    prepare(place)
    with place.open(actor="test") as lake:
        with faulty(lake, statement, mode), pytest.raises(fm.Unavailable):
            start(lake)
        left = {
            (makes_the_job, "before"): [],
            (makes_the_job, "after"): ["pending"],
            (takes_the_job, "before"): ["pending"],
            (takes_the_job, "after"): ["interrupted"],
        }[statement, mode]
        assert [found.status for found in lake.catalog.jobs.all()] == left
        assert start(lake).outcome == "done"
        check_done(lake, job, [("job", "resumed")] if left == ["interrupted"] else [])


def test_a_start_whose_reply_is_lost_does_not_hold_the_job_while_its_process_lives(
    new_place: Callable[[str], Place],
) -> None:
    place = new_place("sqlite")
    make_people(place)
    with place.open(lease_ms=2_000) as lake:
        with faulty(lake, takes_the_job, "after"), pytest.raises(fm.Unavailable):
            fill(lake)
        with place.open() as other:
            wait_for(lambda: other.catalog.jobs.find(COLUMN_JOB).status == "interrupted")
            assert fill(other).outcome == "done"
            check_done(other, COLUMN_JOB, [("job", "resumed")])


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("job", JOBS)
def test_the_end_of_a_job_whose_reply_is_lost_is_written_once(place: Place, job: str, mode: str) -> None:
    prepare, start = JOBS[job]
    prepare(place)
    with place.open(actor="test") as lake:
        with faulty(lake, ends_the_job, mode):
            done = start(lake)
        assert (done.outcome, done.job["status"]) == ("done", "done")
        assert lake.backfill.resume(job).outcome == "nothing_to_do"
        check_done(lake, job, [])


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("job", JOBS)
def test_a_job_whose_end_cannot_be_written_has_not_ended(
    new_place: Callable[[str], Place], job: str, mode: str
) -> None:
    """It is an error, also if the end was written and only nobody can tell; what is done stays."""
    place = new_place("sqlite")
    prepare, start = JOBS[job]
    prepare(place)
    with place.open(actor="test") as lake:
        with faulty(lake, ends_the_job, mode, stay_broken=True), pytest.raises(fm.Unavailable):
            start(lake)
        status = lake.backfill.show(job)["status"]
        assert status == ("done" if mode == "after" else "interrupted")
        assert lake.backfill.resume(job).outcome == "nothing_to_do"
        check_done(lake, job, [] if mode == "after" else [("job", "resumed")])
