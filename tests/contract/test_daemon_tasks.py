"""The daemon's tasks in this process: each on its own, never beside itself, and what goes wrong with one is its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.history import run_history
from floodmark.backfill.chunks.sources import CallSource
from floodmark.ingest.drop import Drop
from floodmark.json_form import as_json
from floodmark.serve.daemon.scheduler import Ran, Task, Tasks
from floodmark.serve.daemon.tasks import DropTask, JobTask, MaintainTask, SinkTask, WorkFinder
from floodmark.settings.schedule import Schedule
from floodmark.settings.settings import MaintainSettings
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids, rows

WAIT_S = 60

pytestmark = pytest.mark.mostly_sqlite


@dataclass
class Scripted:
    """A task that does what a test says, and notes what it should never see: itself at work."""

    name: str
    act: Callable[[], Ran]
    pace: Schedule = field(default_factory=lambda: Schedule(0.01))
    kind: str = "sink"
    runs: int = 0
    beside: bool = False
    _busy: bool = False

    def run(self, stop: threading.Event) -> Ran:
        self.beside |= self._busy
        self._busy = True
        try:
            self.runs += 1
            return self.act()
        finally:
            self._busy = False


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def ended(tasks: Tasks) -> None:
    tasks.stop.set()
    assert tasks.join(time.monotonic() + WAIT_S) == []


def state(tasks: Tasks, name: str) -> dict[str, Any]:
    return next(as_json(one) for one in tasks.reports() if one.name == name)


def fail() -> Ran:
    raise fm.Unavailable("it is away", place="there")


def break_down() -> Ran:
    raise ZeroDivisionError("nobody thought of it")


# ── the runner ──


def test_one_that_fails_does_not_stop_the_others_backs_off_and_is_visible() -> None:
    tasks, good = Tasks(), Scripted("good", lambda: Ran("shipped"))
    bad, broken = Scripted("bad", fail, Schedule(30)), Scripted("broken", break_down, Schedule(30))
    for task in (bad, broken, good):
        assert tasks.start(task)
    until(lambda: good.runs > 5 and all(state(tasks, name)["state"] == "failed" for name in ("bad", "broken")))
    found = state(tasks, "bad")
    assert (found["state"], found["failures"], found["last_error"]["kind"]) == ("failed", 1, "Unavailable")
    assert "place=there" in found["last_error"]["message"]
    assert found["next_at"] > found["last_ended"] >= found["last_started"]
    assert "ZeroDivisionError" in state(tasks, "broken")["last_error"]["message"]
    assert state(tasks, "good")["last_error"] is None
    assert (bad.runs, broken.runs) == (1, 1)
    ended(tasks)
    assert not good.beside
    assert state(tasks, "good")["state"] == "stopped"


def test_a_failure_that_passes_is_over_with_the_next_good_run() -> None:
    tasks, answers = Tasks(), iter([fail, fail, lambda: Ran("shipped")])
    task = Scripted("sink", lambda: next(answers, lambda: Ran("nothing_to_do"))())
    tasks.start(task)
    until(lambda: task.runs > 4)
    ended(tasks)
    found = state(tasks, "sink")
    assert (found["failures"], found["last_error"], found["last_outcome"]) == (0, None, "nothing_to_do")


def test_a_name_runs_once_at_a_time_and_what_is_over_needs_no_line() -> None:
    tasks, go = Tasks(), threading.Event()

    def act() -> Ran:
        go.wait(WAIT_S)
        return Ran("done")

    once = Scripted("job", act, Schedule(None))
    assert tasks.start(once)
    assert not tasks.start(Scripted("job", fail))
    until(lambda: once.runs == 1)
    assert state(tasks, "job")["state"] == "running"
    go.set()
    until(lambda: tasks.reports() == [])
    assert tasks.start(Scripted("job", lambda: Ran("again"), Schedule(None)))
    ended(tasks)
    assert not tasks.start(Scripted("late", fail))


def test_one_that_does_not_end_is_named() -> None:
    tasks, go = Tasks(), threading.Event()

    def act() -> Ran:
        go.wait(WAIT_S)
        return Ran("done")

    slow = Scripted("slow", act)
    tasks.start(slow)
    until(lambda: slow.runs == 1)
    tasks.stop.set()
    assert tasks.join(time.monotonic()) == ["slow"]
    go.set()
    ended(tasks)


# ── what they do ──


def once(task: Task) -> Ran:
    return task.run(threading.Event())


def test_a_sink_is_shipped_until_nothing_is_new(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"), format="jsonl")
    lake.append("events", rows(1, 2))
    task = SinkTask(lake, "out", Schedule(1))
    assert [once(task).outcome for _ in range(2)] == ["shipped", "nothing_to_do"]
    lake.sinks.pause("out")
    assert once(task).paused
    lake.sinks.remove("out")
    assert once(task).over


def test_a_sink_whose_end_is_away_failed(lake: fm.Lake) -> None:
    lake.sinks.add("out", "http", tables="events", url="http://127.0.0.1:9/", tries=1)
    lake.append("events", rows(1))
    ran = once(SinkTask(lake, "out", Schedule(1)))
    assert ran.outcome == "failed"
    assert isinstance(ran.error, fm.Unavailable)


def test_maintenance_does_all_of_it_and_stops_between_two_parts(lake: fm.Lake) -> None:
    for number in range(3):
        lake.append("events", rows(number))
    task = MaintainTask(lake, MaintainSettings(compact_files=2), Schedule(600))
    assert once(task) == Ran("compacted")
    assert {record.verb for record in lake.maintain.history()} >= {"compact", "expire"}
    stop = threading.Event()
    stop.set()
    assert task.run(stop).outcome == "stopped"
    assert ids(lake) == [0, 1, 2]
    check_lake(lake.catalog)


def test_a_drop_folder_is_looked_at_again_when_what_is_there_may_be_complete(lake: fm.Lake, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"id": 1}')
    (folder / "b.jsonl").write_text("{")
    task = DropTask(Drop(lake, "src", folder, "events", settle_s=1000.0), "src", Schedule(60), 1000.0)
    assert once(task) == Ran("nothing_to_do", again_s=1000.0)
    task = DropTask(Drop(lake, "src", folder, "events", settle_s=0.0), "src", Schedule(60), 0.0)
    assert once(task).outcome == "loaded 1 file, 1 row; moved 1 bad file aside"
    assert once(task) == Ran("1 bad file in .failed", again_s=None, set_aside=1)


# ── jobs ──

STOP = threading.Event()
ASKED: list[str] = []


def numbers(chunk: Chunk) -> list[dict[str, Any]]:
    """The source of a job that any process can find by its name."""
    ASKED.append(chunk.name)
    if len(ASKED) == 2:
        STOP.set()
    assert isinstance(chunk.start, int)
    assert isinstance(chunk.end, int)
    return rows(*range(chunk.start, chunk.end))


def test_a_job_whose_process_is_gone_is_gone_on_with_and_left_as_it_is_when_the_daemon_ends(place: Place) -> None:
    """First daemon: told to stop in the middle. Second one: it finds the job interrupted, and ends it."""
    ASKED.clear()
    STOP.clear()
    source = CallSource(numbers, 50)
    options: dict[str, Any] = {"chunk": 10, "first": 0, "last": 50, "workers": 1, "order": "oldest"}
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        spec = lake.backfill.history_spec("years", source, "events", **options)
        run = run_stopped(lake, spec)
        assert run.outcome == "left_off"
        assert run.exit_code == 0
    done = len(ASKED)
    assert 2 <= done < 5
    with place.open() as lake:
        assert lake.backfill.show("years")["status"] == "interrupted"
        started: list[Task] = []
        lookout = WorkFinder(lake, lambda task: not started.append(task), {})
        assert once(lookout).outcome == "started 1 task"
        (task,) = started
        assert isinstance(task, JobTask)
        assert once(task).outcome == "done"
        assert once(task).outcome == "nothing_to_do"
        assert ids(lake) == list(range(50))
        assert len(ASKED) == 5
        check_lake(lake.catalog)


def run_stopped(lake: fm.Lake, spec: Any) -> Any:
    return run_history(replace(lake.backfill._context, stop=STOP), spec, "test", None)
