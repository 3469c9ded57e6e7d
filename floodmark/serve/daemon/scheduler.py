"""The daemon's tasks: each in a thread of its own, on its schedule, never two runs of one task at once.

A failure stays with its task: the task backs off (floodmark/settings/schedule.py) and reports the failure in its state,
and the others continue. A task holds no truth: what it did is in the catalog before it reports it, and one that is cut
off is like one that crashed. Every run gets `stop`, so that long ones end at their next step.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from floodmark import clock, log
from floodmark.errors import FloodmarkError, cause_text
from floodmark.json_form import JsonObject, StoredError
from floodmark.report.daemon import TaskReport
from floodmark.settings import schedule
from floodmark.settings.schedule import Schedule

WAITING, RUNNING, FAILED, PAUSED, STOPPED = "waiting", "running", "failed", "paused", "stopped"
MESSAGE_CHARACTERS_MAX = 1_000


@dataclass(frozen=True)
class Ran:
    """The result of one run. `error`: it failed. `again_s`: run again after this time, earlier than scheduled."""

    outcome: str
    error: FloodmarkError | None = None
    again_s: float | None = None
    paused: bool = False
    # The task has nothing to do any more, ever.
    over: bool = False
    # Bad files that stay set aside until an operator removes them, and the newest of them by name.
    set_aside: int = 0
    bad_files: tuple[JsonObject, ...] = field(default=(), compare=False)


class Task(Protocol):
    """Something to do now and then."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def pace(self) -> Schedule: ...

    def run(self, stop: threading.Event) -> Ran: ...


@dataclass
class _Runner:
    """One task and its thread."""

    task: Task
    stop: threading.Event
    changed: Callable[[], None]
    turn: schedule.Turn = field(init=False)
    state: str = WAITING
    started_ms: int | None = None
    ended_ms: int | None = None
    outcome: str | None = None
    error: StoredError | None = None
    set_aside: int = 0
    bad_files: tuple[JsonObject, ...] = ()
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.turn = schedule.first_turn(self.task.pace, time.monotonic())
        self.thread = threading.Thread(target=self._loop, name=f"floodmark-task-{self.task.name}", daemon=True)

    def _loop(self) -> None:
        while not self._wait():
            self.turn = schedule.begin(self.turn, time.monotonic())
            self.state, self.started_ms = RUNNING, clock.now_ms()
            self.changed()
            ran = self._run()
            self._end(ran)
            self.changed()
            if self.turn.due_s is None:
                return
        self.state = STOPPED
        self.changed()

    def _wait(self) -> bool:
        """Wait until the task is due; True if it is to stop."""
        while not self.stop.is_set():
            left_s = (self.turn.due_s or 0.0) - time.monotonic()
            if left_s <= 0:
                return False
            self.stop.wait(left_s)
        return True

    def _run(self) -> Ran:
        try:
            return self.task.run(self.stop)
        except FloodmarkError as error:
            return Ran(FAILED, error)
        except Exception as error:  # noqa: BLE001 - the edge of a task: the next run tries again
            log.get(task=self.task.name).exception("a task failed")
            return Ran(FAILED, FloodmarkError(cause_text(error), advice="See the daemon's log."))

    def _end(self, ran: Ran) -> None:
        failed = ran.error is not None
        pace = Schedule(None) if ran.over else self.task.pace
        self.turn = schedule.end(
            self.turn, pace, time.monotonic(), failed=failed, chance=random.random(), again_s=ran.again_s
        )
        self.ended_ms, self.outcome = clock.now_ms(), ran.outcome
        if ran.error is None:
            # A failed run has no new count: keep the last one.
            self.set_aside, self.bad_files = ran.set_aside, ran.bad_files
        self.error = None if ran.error is None else _stored_error(ran.error)
        self.state = FAILED if failed else PAUSED if ran.paused else WAITING
        if ran.error is not None:
            log.get(task=self.task.name).warning(
                "a task failed", kind=ran.error.kind, cause=str(ran.error), failures=self.turn.failures
            )

    def report(self) -> TaskReport:
        due_s = self.turn.due_s
        waits = self.state != RUNNING and due_s is not None
        next_ms = clock.now_ms() + round(1000 * ((due_s or 0.0) - time.monotonic())) if waits else None
        return TaskReport(
            name=self.task.name,
            kind=self.task.kind,
            state=self.state,
            every_s=self.task.pace.every_s,
            last_started=_time(self.started_ms),
            last_ended=_time(self.ended_ms),
            last_outcome=self.outcome,
            last_error=self.error,
            failures=self.turn.failures,
            set_aside=self.set_aside,
            bad_files=self.bad_files,
            about=JsonObject(getattr(self.task, "about", {})),
            next_at=_time(next_ms),
        )


class Tasks:
    """All tasks of one daemon. `stop` ends them; `changed` is set whenever one of them says something new."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._runners: dict[str, _Runner] = {}

    def start(self, task: Task) -> bool:
        """Run this task from now on; False if a task of this name exists and has not ended."""
        with self._lock:
            known = self._runners.get(task.name)
            if self.stop.is_set() or (known is not None and known.thread.is_alive()):
                return False
            runner = self._runners[task.name] = _Runner(task, self.stop, self.changed.set)
            runner.thread.start()
        self.changed.set()
        return True

    def reports(self) -> list[TaskReport]:
        with self._lock:
            # A task that was to run once, and did, no longer has a line.
            over = [name for name, one in self._runners.items() if one.turn.due_s is None and not one.thread.is_alive()]
            for name in over:
                del self._runners[name]
            return [runner.report() for runner in self._runners.values()]

    def join(self, until_s: float) -> list[str]:
        """Wait up to this moment (of time.monotonic) for all of them; returns the names of those that still run."""
        with self._lock:
            runners = list(self._runners.values())
        for runner in runners:
            runner.thread.join(max(0.0, until_s - time.monotonic()))
        return [runner.task.name for runner in runners if runner.thread.is_alive()]


def _stored_error(error: FloodmarkError) -> StoredError:
    return StoredError({"kind": error.kind, "message": str(error)[:MESSAGE_CHARACTERS_MAX]})


def _time(time_ms: int | None) -> str | None:
    return None if time_ms is None else clock.format_time(time_ms)
