"""A source that is away: a follower waits, says so and goes on; the daemon goes on with what failed for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import floodmark as fm
from floodmark import clock
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.history import run_history
from floodmark.backfill.chunks.retries import PAUSE_S_MAX, Outage
from floodmark.backfill.chunks.sources import CallSource
from floodmark.catalog.jobs import Job
from floodmark.jobs.record import BackfillRun
from floodmark.serve.daemon.tasks import JobTask, WorkFinder, is_resumed
from floodmark.settings.settings import JobsSettings, check_settings
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids
from tests.history_world import Numbers, history, number_rows, room_of

pytestmark = pytest.mark.mostly_sqlite

DAY_S = 86_400.0


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        yield lake
        check_lake(lake.catalog)


class Flaky:
    """A source that is away for so many calls, and has ten rows more with every tip, then is cancelled."""

    def __init__(self, lake: fm.Lake, tips: int = 0, reads: int = 0, act: Callable[[], object] = lambda: None) -> None:
        self._lake, self._tips, self._reads, self._act = lake, tips, reads, act
        self.now = 10

    def tip(self) -> int:
        if self.now == 30 and self._tips:
            self._tips -= 1
            self._act()
            raise OSError("no route to the source")
        if self.now == 40 and self._reads:
            return 30
        if self.now >= 70:
            self._lake.catalog.jobs.cancel("years")
        self.now += 10
        return self.now - 10

    def read(self, chunk: Chunk) -> Any:
        if chunk.start == 20 and self._reads:
            self._reads -= 1
            self._act()
            raise OSError("no route to the source")
        return number_rows(chunk)


def follow(lake: fm.Lake, source: Any, give_up_s: float = DAY_S, **options: Any) -> BackfillRun:
    settings = {"last": None, "order": "oldest", "follow": True, "retries": 1, "retry_s": 0.001, **options}
    room = replace(room_of(lake), give_up_s=give_up_s)
    return run_history(room, history(source, **settings), "test")


# ── the pauses ──


def test_pauses_grow_and_fill_a_day_and_then_it_is_given_up() -> None:
    outage, now_s, pauses = Outage(DAY_S, 30.0), 1000.0, list[float]()
    while (pause_s := outage.pause_s(now_s)) is not None:
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:6] == [30, 60, 120, 240, 480, PAUSE_S_MAX]
    assert pauses[:-1] == sorted(pauses[:-1])
    assert (sum(pauses), outage.away_s(now_s)) == (DAY_S, DAY_S)
    outage.over()
    assert outage.pause_s(now_s) == 30, "the next outage begins anew"


# ── a follower ──


@pytest.mark.parametrize(("tips", "reads"), [(5, 0), (0, 5), (3, 3)])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_follower_survives_an_outage_of_its_source(lake: fm.Lake, tips: int, reads: int, workers: int) -> None:
    found = follow(lake, Flaky(lake, tips, reads), workers=workers)
    assert (found.outcome, found.error) == ("cancelled", None)
    assert ids(lake) == list(range(len(ids(lake))))
    assert len(ids(lake)) >= 50, "it went on after the outage"


def test_a_follower_says_that_it_waits_and_since_when(lake: fm.Lake) -> None:
    seen: list[tuple[Job, str]] = []

    def look() -> None:
        seen.append((lake.catalog.jobs.find("years"), lake.status()["health"]))

    assert follow(lake, Flaky(lake, tips=3, act=look)).outcome == "cancelled"
    (first, fine), *_, (job, health) = seen
    assert (first.error, fine) == (None, "fine")
    assert job.error is not None
    assert (job.status, job.error["kind"], job.error["facts"]["tries"]) == ("running", "Unavailable", "2")
    assert job.error["facts"]["failing_since"] <= job.error["facts"]["next_try"]
    assert "no route to the source" in job.error["facts"]["cause"]
    assert health == (
        f"attention: job years waits since {job.error['facts']['failing_since']} (Unavailable); "
        "see `floodmark backfill list`"
    )
    assert lake.catalog.jobs.find("years").error is None, "it is back, and nothing is wrong any more"


def test_a_follower_gives_up_in_the_end_and_says_how_long_it_tried(lake: fm.Lake) -> None:
    found = follow(lake, Flaky(lake, tips=10**9), give_up_s=0.05)
    assert found.error is not None
    assert (found.outcome, found.job["status"], found.error["kind"]) == ("failed", "failed", "Unavailable")
    assert found.error["facts"].keys() >= {"failing_since", "gave_up_after_s"}
    assert ids(lake) == list(range(20))


def test_what_cannot_pass_fails_a_follower_at_once(lake: fm.Lake) -> None:
    source = Numbers(tip=30, act={"20..30": lambda chunk: [{"id": 999, "name": "elsewhere"}]})
    found = follow(lake, source)
    assert found.error is not None
    assert (found.outcome, found.error["kind"], source.asked["20..30"]) == ("failed", "Invalid", 1)


def test_who_does_not_follow_is_told_after_its_tries(lake: fm.Lake) -> None:
    found = follow(lake, Numbers(act={"20..30": away}), follow=False, last=50)
    assert found.error is not None
    assert (found.outcome, found.error["kind"]) == ("failed", "Unavailable")
    assert found.error["facts"]["failing_since"]


def test_a_cancel_is_noticed_in_a_long_pause(lake: fm.Lake) -> None:
    source = Flaky(lake, tips=10**9, act=lambda: lake.catalog.jobs.cancel("years"))
    assert follow(lake, source, retry_s=1000.0).outcome == "cancelled"


# ── the daemon ──


def away(chunk: Chunk) -> Any:
    raise OSError("no route to the source")


def once(chunk: Chunk) -> Any:
    """The newest chunk is there, and then the source is away again."""
    if chunk.start == 40:
        return number_rows(chunk)
    raise OSError("no route to the source")


def bad(chunk: Chunk) -> Any:
    return [{"id": 999, "name": "elsewhere"}]


def failed(lake: fm.Lake, read: str, name: str = "years") -> Job:
    source = CallSource(f"tests.contract.test_history_outage:{read}")
    spec = history(source, name=name, retries=1)
    assert run_history(room_of(lake), spec, "test").outcome == "failed"
    return lake.catalog.jobs.find(name)


def looked_at(lake: fm.Lake, jobs: JobsSettings | None = None) -> list[str]:
    started: list[str] = []

    def start(task: Any) -> bool:
        started.append(task.name)
        return True

    WorkFinder(lake, start, {}, jobs or JobsSettings()).run(threading.Event())
    return started


def test_the_daemon_goes_on_with_what_failed_for_a_reason_that_may_pass(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = failed(lake, "away")
    failed(lake, "bad", "wrong")
    assert looked_at(lake) == ["job years"]
    task = JobTask(lake, job.name, job.id)
    ran = task.run(threading.Event())
    assert ran.error is not None, "the task is tried again, with pauses that grow"
    assert (ran.outcome, ran.error.kind) == ("failed", "Unavailable")
    monkeypatch.setattr("tests.contract.test_history_outage.away", number_rows)
    ran = task.run(threading.Event())
    assert (ran.outcome, ran.error) == ("done", None)
    assert ids(lake) == list(range(50))
    assert task.run(threading.Event()).outcome == "nothing_to_do"


def test_what_a_person_has_seen_or_nobody_can_find_is_left_alone(lake: fm.Lake) -> None:
    job = failed(lake, "away")
    assert looked_at(lake, JobsSettings(resume=False)) == []
    lake.backfill.ack("years")
    assert looked_at(lake) == []
    assert JobTask(lake, job.name, job.id).run(threading.Event()).outcome == "nothing_to_do"
    spec = history(Numbers(act={"40..50": away}), name="object", retries=1)
    assert run_history(room_of(lake), spec, "test").outcome == "failed"
    assert looked_at(lake) == [], "an object in memory cannot be made again"


def test_without_progress_a_job_is_given_up_counted_from_its_first_failure(lake: fm.Lake) -> None:
    job = failed(lake, "away")
    since_ms = job.failing_since_ms
    assert since_ms is not None
    again = failed(lake, "away")
    assert again.failing_since_ms == since_ms, "a resume without progress begins no new day"
    hour_ms = 3_600_000
    assert is_resumed(again, "1d", since_ms + 23 * hour_ms)
    assert not is_resumed(again, "1d", since_ms + 24 * hour_ms)
    assert looked_at(lake, JobsSettings(give_up="0s")) == []


def test_progress_begins_the_count_anew(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    first = failed(lake, "away")
    monkeypatch.setattr("tests.contract.test_history_outage.away", once)
    later = clock.now_ms() + 5_000
    monkeypatch.setattr(clock, "now_ms", lambda: later)
    again = failed(lake, "away")
    assert ids(lake) == list(range(40, 50))
    assert first.failing_since_ms is not None
    assert again.failing_since_ms == later


def test_how_long_is_a_setting_that_is_checked() -> None:
    assert check_settings({}, "floodmark.toml").jobs.give_up == "1d"
    assert check_settings({"jobs": {"give_up": "2h"}}, "floodmark.toml").jobs.give_up == "2h"
    with pytest.raises(fm.Invalid, match=r"jobs\.give_up"):
        check_settings({"jobs": {"give_up": "long"}}, "floodmark.toml")
