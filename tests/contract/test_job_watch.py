"""Jobs that somebody has to look at: runs that hang, ends that cannot be asked for, and what doctor says of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.jobs import (
    CANCELLED,
    COLUMN,
    DONE,
    FAILED,
    HISTORY,
    SHOWN_MS,
    STALLED_MS,
    EndRider,
    HeldJob,
    Job,
)
from floodmark.cli.backfill import job_fields, job_line, job_row, next_step
from floodmark.cli.main import main
from floodmark.clock import new_id
from floodmark.commit.seal import rider_from_dict
from floodmark.errors import Corrupt, Fenced, Invalid
from floodmark.jobs.progress import TOUCH_EVERY_S, Cancelled, JobProgress
from floodmark.repair.examine import Check, examine_lake
from floodmark.report.jobs import job_report
from floodmark.testing.children import run_killed
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows
from tests.contract.test_job_health import ERROR, ready, served
from tests.contract.test_jobs import Clock, change, find, now_ms, ran, set_job, start, start_and_die

pytestmark = pytest.mark.mostly_sqlite


# ── the end of a run ──


@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled"])
def test_a_catalog_that_is_away_right_after_the_end_fails_no_run(lake: fm.Lake, outcome: str) -> None:
    def work(progress: JobProgress) -> bool:
        progress.step(4, 9)
        if outcome == "failed":
            raise Invalid("not this")
        if outcome == "cancelled":
            raise Cancelled
        return True

    away: list[DatabaseFaults] = []

    def go_away() -> None:
        away.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True))

    held = start(lake)
    try:
        with at("job.ended", go_away):
            done = ran(lake, work, held=held)
    finally:
        for faults in away:
            faults.remove()
    assert (done.outcome, done.job["status"], done.job["processed"], done.job["total"]) == (outcome, outcome, 4, 9)
    assert done.job == lake.backfill.show("years")
    assert done.job["ended"] is not None


# ── runs that hang ──


def let_pass(lake: fm.Lake, ms: int) -> None:
    """As if nothing was heard of the job for so long."""
    set_job(lake, started_ms=now_ms(lake) - 10 * ms, updated_ms=now_ms(lake) - ms)


def test_a_run_that_says_nothing_for_long_in_a_living_process_is_told(lake: fm.Lake) -> None:
    held = start(lake)
    lake.catalog.jobs.progress(held, 3, 9, first=True)
    let_pass(lake, STALLED_MS - 60_000)
    assert (find(lake).stalled_since_ms, lake.status()["health"]) == (None, "fine")
    let_pass(lake, STALLED_MS)
    (job,) = lake.status()["jobs"]
    assert (job["status"], job["stalled_since"]) == ("running", job["updated"])
    said = f"attention: job years without progress since {job['updated']}; see `floodmark backfill list`"
    assert lake.status()["health"] == said
    with served(lake) as client:
        assert ready(client, 200)["health"] == said, "it may be at work: that makes no lake unready"
    shown = job_report(find(lake))
    assert job_row(shown)["status"] == "stalled"
    assert f"no progress since {job['updated']}" in job_line(shown)
    assert job_fields(shown, None)["stalled_since"] == job["updated"]
    assert str(shown.holder) in str(next_step(shown))
    lake.catalog.jobs.progress(held, 4, 9)
    assert (lake.backfill.show("years")["stalled_since"], lake.status()["health"]) == (None, "fine")
    lake.catalog.jobs.end(held, DONE, 9, 9)
    let_pass(lake, STALLED_MS)
    assert lake.backfill.show("years")["stalled_since"] is None, "it is over"


def test_a_dead_run_is_interrupted_however_long_ago(place: Place, lake: fm.Lake) -> None:
    assert run_killed(start_and_die, place, failpoint="job.held")
    let_pass(lake, STALLED_MS)
    assert (find(lake).status, find(lake).stalled_since_ms) == ("interrupted", None)


@pytest.mark.parametrize("told", [True, False], ids=["after a step", "before the first"])
def test_a_run_that_waits_says_so(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    Clock(monkeypatch)
    held = start(lake)
    progress = JobProgress(lake.catalog.jobs, held)
    if told:
        progress.step(3, 9)
    let_pass(lake, STALLED_MS)
    progress.wait(TOUCH_EVERY_S / 2)
    assert find(lake).stalled_since_ms is not None, "not all the time"
    progress.wait(TOUCH_EVERY_S)
    job = find(lake)
    assert (job.stalled_since_ms, job.processed, progress.writes) == (None, 3 if told else 0, int(told))
    let_pass(lake, STALLED_MS)
    lake.backfill.cancel("years")
    with pytest.raises(Cancelled):
        progress.wait(2 * TOUCH_EVERY_S)


# ── doctor ──


def examined(lake: fm.Lake) -> dict[str, Check]:
    found = [check for check in examine_lake(lake.catalog) if check.name.startswith("job")]
    assert len({check.name for check in found}) == len(found)
    return {check.name: check for check in found}


def fail(lake: fm.Lake, name: str = "years") -> None:
    lake.catalog.jobs.end(start(lake, name), FAILED, 3, 9, ERROR)


def test_doctor_has_nothing_to_say_of_jobs_that_are_well(lake: fm.Lake) -> None:
    assert examined(lake) == {"jobs": Check("jobs", True, "none")}
    for name, state in (("a", DONE), ("b", DONE), ("c", CANCELLED)):
        lake.catalog.jobs.end(start(lake, name), state, 9, 9)
    start(lake, "d")
    assert examined(lake) == {"jobs": Check("jobs", True, "1 running, 1 cancelled, 2 done")}


def test_doctor_names_a_failed_job_until_it_is_acknowledged(lake: fm.Lake) -> None:
    fail(lake, "my years")
    check = examined(lake)["job my years"]
    assert not check.passed
    for part in ("Unavailable: the source is away", "backfill resume 'my years'`", "backfill ack 'my years'`"):
        assert part in check.detail
    set_job(lake, ended_ms=now_ms(lake) - SHOWN_MS)
    assert examined(lake)["job my years"].passed, "as in the health of the lake"
    lake.backfill.ack("my years")
    assert list(examined(lake)) == ["jobs"]


def test_doctor_names_a_job_whose_process_died(place: Place, lake: fm.Lake) -> None:
    assert run_killed(start_and_die, place, failpoint="job.held")
    check = examined(lake)["job years"]
    assert (check.passed, "interrupted" in check.detail) == (False, True)
    assert "floodmark backfill resume years" in check.detail
    assert "floodmark backfill cancel years" in check.detail


def test_doctor_names_a_job_that_hangs_and_one_of_the_future(lake: fm.Lake) -> None:
    start(lake)
    let_pass(lake, STALLED_MS)
    check = examined(lake)["job years"]
    assert (check.passed, "no progress since" in check.detail) == (False, True)
    assert lake.backfill.show("years")["holder"] in check.detail
    set_job(lake, state="paused")
    check = examined(lake)["job years"]
    assert (check.passed, "unknown state (paused)" in check.detail) == (False, True)


def of_table(lake: fm.Lake, name: str, table: str, kind: str = HISTORY, **pinned: Any) -> HeldJob:
    return lake.catalog.jobs.start(name, kind, [table], pinned, {}, "chunks", "test")


@pytest.mark.parametrize(
    ("state", "passed", "advice"),
    [(None, False, "backfill cancel x`"), (FAILED, False, "backfill ack x`"), (DONE, True, "done")],
    ids=["running", "failed", "done"],
)
def test_doctor_names_a_job_whose_table_is_gone(lake: fm.Lake, state: str | None, passed: bool, advice: str) -> None:
    held = of_table(lake, "x", "away")
    if state is not None:
        lake.catalog.jobs.end(held, state, 0, 9, ERROR if state == FAILED else None)
    check = examined(lake)["job x"]
    assert check.passed is passed
    assert "its table away is gone" in check.detail
    assert "resume" not in check.detail, "that could not go on"
    assert advice in check.detail


def test_doctor_names_a_column_of_a_table_that_was_made_again(lake: fm.Lake) -> None:
    of_table(lake, "events.nick", "events", COLUMN, table_id="of another incarnation")
    here = lake.catalog.history.head("events").table_id
    of_table(lake, "events.name", "events", COLUMN, table_id=here)
    found = examined(lake)
    assert list(found) == ["jobs", "job events.nick"]
    assert "its table events was dropped and created again" in found["job events.nick"].detail


def drop_jobs(lake: fm.Lake) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(text("DROP TABLE fm_jobs"))


@pytest.mark.parametrize(
    "spoil", [drop_jobs, lambda lake: set_job(lake, spec="{")], ids=["no table", "a record that is damaged"]
)
def test_doctor_fails_closed_and_looks_at_the_rest(lake: fm.Lake, spoil: Callable[[fm.Lake], None]) -> None:
    fail(lake)
    spoil(lake)
    checks = {check.name: check for check in examine_lake(lake.catalog)}
    assert (checks["jobs"].passed, "cannot be read" in checks["jobs"].detail) == (False, True)
    assert checks["table events"].passed


def test_the_command_ends_with_1_and_says_what_to_do(
    new_place: Callable[[str], Place], capsys: pytest.CaptureFixture[str]
) -> None:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("events", EVENTS)
        fail(lake)
        code: Any = 0
        try:
            main(["--lake", lake.location, "--json", "doctor"])
        except SystemExit as end:
            code = end.code
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert (code, checks["job years"]["result"]) == (1, "FAILED")
    assert "floodmark backfill resume years" in checks["job years"]["detail"]


# ── unbinding ──


def half_filled(lake: fm.Lake) -> None:
    """A column of which one file is filled, and another is not."""
    for number in (1, 2):
        lake.append("events", rows(number))
    with at("fill.published", lambda: lake.backfill.cancel("events.nick")):
        done = lake.backfill.column("events", "nick", "name", batch_rows=1, pause="0ms")
    assert (done.outcome, done.job["rows"]) == ("cancelled", 1)


def died_running(lake: fm.Lake, name: str = "events.nick") -> None:
    """As a run leaves the job that died right after it had unbound its column."""
    left = {"state": "running", "ended_ms": None, "error": None, "owner_process": new_id(), "owner_run": new_id()}
    change(lake, update(tables.jobs).where(tables.jobs.c.name == name).values(left))


def test_unbinding_ends_the_job_in_its_publish(lake: fm.Lake) -> None:
    half_filled(lake)
    seen: list[Job] = []
    with at("add_column.published", lambda: seen.append(find(lake, "events.nick"))):
        lake.backfill.unbind("events", "nick")
    assert [(job.status, job.run, job.publishes) for job in seen] == [("cancelled", None, 3)]
    assert seen[0].as_dict() == lake.backfill.show("events.nick")
    assert "unbound" in lake.backfill.show("events.nick")["error"]["message"]
    check_lake(lake.catalog)


def test_unbinding_whose_reply_is_lost_for_good_leaves_the_job_at_its_end(lake: fm.Lake) -> None:
    half_filled(lake)
    away: list[DatabaseFaults] = []

    def go_away() -> None:
        away.append(DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True))

    try:
        with at("add_column.published", go_away), suppress(fm.FloodmarkError):
            lake.backfill.unbind("events", "nick")
    finally:
        for faults in away:
            faults.remove()
    assert lake.backfill.show("events.nick")["status"] == "cancelled"
    assert lake.status()["health"] == "fine"


def test_resuming_ends_a_job_whose_run_died_after_it_unbound_its_column(lake: fm.Lake) -> None:
    half_filled(lake)
    lake.backfill.unbind("events", "nick")
    died_running(lake)
    assert "interrupted" in lake.status()["health"]
    done = lake.backfill.resume("events.nick")
    assert (done.outcome, done.job["status"], done.job["rows"]) == ("cancelled", "cancelled", 1)
    assert done.error == done.job["error"]
    assert "unbound" in str(done.error)
    assert lake.status()["health"] == "fine"
    assert [(row.kind, row.outcome) for row in lake.audit()] == [("job", "resumed")]
    with pytest.raises(Invalid, match="was unbound"):
        lake.backfill.resume("events.nick")


def test_resuming_goes_on_where_the_column_is_bound_or_can_be(lake: fm.Lake) -> None:
    half_filled(lake)
    died_running(lake)
    assert lake.backfill.resume("events.nick").outcome == "done", "it was never unbound"
    lake.append("notes", rows(1))
    with at("add_column.published", lambda: lake.backfill.cancel("notes.nick")):
        assert lake.backfill.column("notes", "nick", "name").outcome == "cancelled"
    lake.backfill.unbind("notes", "nick")
    died_running(lake, "notes.nick")
    assert lake.backfill.resume("notes.nick").outcome == "done", "no file held it: it is bound anew"


def test_the_end_in_a_publish_is_of_the_run_that_has_the_job(lake: fm.Lake) -> None:
    held = start(lake)
    rider = rider_from_dict(json.loads(json.dumps(EndRider(held.id, held.run, CANCELLED, ERROR).as_dict())))
    assert rider == EndRider(held.id, held.run, CANCELLED, ERROR)
    with lake.catalog.database.write() as tx:
        rider.check(tx)
        for other, error in ((EndRider(held.id, "other", DONE), Fenced), (EndRider("none", held.run, DONE), Corrupt)):
            with pytest.raises(error):
                other.check(tx)
        rider.apply(tx, "operation", 1, 0)
    job = find(lake)
    assert (job.status, job.error, job.run, job.publishes) == ("cancelled", ERROR, None, 1)
    assert job.ended_ms == job.started_ms, "by a clock that was set back"
