"""The daemon's lifecycle: acquires the lake, binds, opens the intake, starts tasks, serves, and ends in bounded time.

One daemon per lake, by the lease of its process (catalog/daemon.py): a second one gets Busy, which names the holder.
SIGTERM or SIGINT ends the daemon: it accepts nothing new, answers requests under way, feeds the rows that it took, and
stops tasks at their next step. What is not done by then is cut off, which is like a crash: everything that was
acknowledged is in the catalog or in a spool, and the next daemon continues. A daemon that finds that another one took
over (it was paused for longer than its lease) stops at once, without draining: the other one now owns its work.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from floodmark import clock, log
from floodmark.errors import Fenced, FloodmarkError
from floodmark.ingest.drop import Drop
from floodmark.ingest.intake import Intake, default_folder
from floodmark.json_form import StoredError, as_json
from floodmark.lake import Lake
from floodmark.report.daemon import TaskReport
from floodmark.serve.app import create_app
from floodmark.serve.daemon.declaration import Declaration, make_new, source_path
from floodmark.serve.daemon.scheduler import FAILED, RUNNING, WAITING, Tasks
from floodmark.serve.daemon.tasks import MAINTAIN_FIRST_S, DropTask, MaintainTask, WorkFinder, every
from floodmark.serve.http.access import Access, AccessToken
from floodmark.serve.http.server import CUT_OFF_CODE, Server, bound, url_of
from floodmark.serve.http.service import Service
from floodmark.settings.schedule import Schedule
from floodmark.settings.settings import OFF, Settings
from floodmark.shown import count_of
from floodmark.storage import root_location

# The recorded state of the tasks is at most this old, and is written at most this often.
REPORT_S, REPORT_S_MIN = 5.0, 0.5
# The part of the drain time that is reserved for closing the spools.
CLOSE_S = 1.0
# How soon a computing thread gives the interpreter to others.
SWITCH_S = 0.0005
# A daemon that lost its lake does not wait for the work that it began.
LOST_S = 2.0


def spool_folder(lake: str, settings: Settings) -> Path | None:
    """The folder of the spools: as set, else in the lake's folder; None for a lake that is not on a local disk."""
    if settings.serve.spool is not None:
        return Path(os.path.expanduser(settings.serve.spool)).resolve()
    return default_folder(root_location(lake))


def tokens_of(settings: Settings) -> list[AccessToken]:
    """The tokens that callers may use: the one that may do everything, and those with names and roles."""
    single = settings.serve.token_sha256
    named = [AccessToken(name, token.sha256, token.role) for name, token in settings.serve.tokens.items()]
    return named if single is None else [AccessToken("token", single, "admin"), *named]


@dataclass
class Daemon:
    """One run. `create`: tables that are declared and new are made. `announce` gets the address once requests are
    answered; `note` gets each difference between the lake and the file."""

    lake: Lake
    settings: Settings
    declaration: Declaration
    bind: str
    announce: Callable[[str], None]
    note: Callable[[str], None]
    create: bool = False
    tasks: Tasks = field(default_factory=Tasks, init=False)
    _intake: Intake | None = field(default=None, init=False)
    _server: Server | None = field(default=None, init=False)
    _until_s: float = field(default=math.inf, init=False)
    _lost: Fenced | None = field(default=None, init=False)

    def run(self) -> None:
        """Run until a signal comes. Busy if another daemon holds the lake, Fenced if one took over."""
        hold = self.lake.catalog.daemon
        with self._signals():
            hold.take(None)
            try:
                for difference in make_new(self.declaration, self.settings, self.lake, create=self.create):
                    self.note(difference)
                with bound(self.bind) as listening:
                    hold.report(address=url_of(listening))
                    folder = spool_folder(self.lake.location, self.settings)
                    if folder is not None:
                        self._intake = Intake(self.lake.engine, folder)
                        self._intake.start()
                    self._start_tasks()
                    if not self.tasks.stop.is_set():
                        self._serve(listening)
            except BaseException:
                self.stop()
                raise
            finally:
                self._end()
                self._release()
        if self._lost is not None:
            raise self._lost

    # ── at work ──

    def _serve(self, listening: socket.socket) -> None:
        service = Service(self.lake, Access(tokens_of(self.settings)), intake=self._intake)
        service.keeping = self.settings.maintain
        app = create_app(service)
        share_interpreter()
        self._server = _Ending(app, listening, self.announce, max(1, math.ceil(self.settings.serve.drain_s)))
        self._server.on_stop = self.stop
        if self.tasks.stop.is_set():
            return  # the signal came while the app was built
        uvloop.run(self._server.serve(sockets=[listening]))
        self.stop()
        if not service.workers.close(self._left_s()):
            self._cut_off(["requests"])

    def _start_tasks(self) -> None:
        settings = self.settings
        for name, source in self.declaration.sources.items():
            if source.every != OFF:
                settle_s = clock.parse_duration_ms(source.settle) / 1000
                drop = Drop(
                    self.lake, name, source_path(source), source.table,
                    settle_s=settle_s, file_format=source.format, mode=source.mode,
                )  # fmt: skip
                self.tasks.start(DropTask(drop, name, every(source.every), settle_s))
        paces = {name: sink.declared.every for name, sink in self.declaration.sinks.items()}
        self.tasks.start(WorkFinder(self.lake, self.tasks.start, paces, settings.jobs))
        if settings.maintain.every != OFF:
            pace = every(settings.maintain.every)
            first_s = min(MAINTAIN_FIRST_S, pace.every_s or 0.0)
            self.tasks.start(MaintainTask(self.lake, settings.maintain, Schedule(pace.every_s, first_s)))
        threading.Thread(target=self._report_tasks, name="floodmark-tasks", daemon=True).start()

    def _report_tasks(self) -> None:
        """Record the state of the tasks until the end, and detect that another daemon took over."""
        while True:
            self.tasks.changed.wait(REPORT_S)
            self.tasks.changed.clear()
            try:
                reports = [*self._feeds(), *self.tasks.reports()]
                self.lake.catalog.daemon.report(tasks=[as_json(report) for report in reports])
            except Fenced as lost:
                if not self.tasks.stop.is_set():
                    log.get().error("another daemon took over", cause=str(lost))
                    self._lose(lost)
                return
            except FloodmarkError as error:
                log.get().warning("the tasks could not be recorded", cause=str(error))
            if self.tasks.stop.wait(REPORT_S_MIN):
                return

    def _feeds(self) -> list[TaskReport]:
        """The feed of each spool as a task: it runs by itself whenever rows wait."""
        return [] if self._intake is None else [_feed_task(state) for state in self._intake.states()]

    # ── the end ──

    def stop(self) -> None:
        """Begin the end: the time limit counts from here. Signal handlers call it too, so it waits for nothing."""
        if self._until_s == math.inf:
            # First of all: a signal that arrives in the middle of this finds it done.
            self._until_s = time.monotonic() + self.settings.serve.drain_s
            self.tasks.stop.set()

    def _lose(self, lost: Fenced) -> None:
        self._lost = lost
        self.stop()
        self._until_s = time.monotonic() + LOST_S
        if self._server is not None:
            self._server.stop()
            self._server.stop()  # the second call makes it end sooner

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def _end(self) -> None:
        self.stop()
        running: list[str] = []
        if self._intake is not None:
            if self._lost is None and not self._intake.drain(self._left_s() - CLOSE_S):
                log.get().warning("rows wait in the spool; the next start feeds them")
            # A publish under way may take longer than the time that is left.
            closing = threading.Thread(target=self._intake.close, name="floodmark-close", daemon=True)
            closing.start()
            closing.join(max(CLOSE_S, self._left_s()))
            running += ["feed"] if closing.is_alive() else []
        if running := [*running, *self.tasks.join(self._until_s)]:
            self._cut_off(running)

    def _cut_off(self, what: list[str]) -> None:
        # A thread cannot be stopped. Its operation is in the journal; the next process that opens the lake recovers it.
        log.get().error("cut off", what=", ".join(what), drain=self.settings.serve.drain)
        sys.stderr.flush()
        os._exit(CUT_OFF_CODE if self._lost is None else Fenced.exit_code)

    def _release(self) -> None:
        try:
            self.lake.catalog.daemon.release()
        except FloodmarkError as error:
            # This process ends, and its lease with it.
            log.get().warning("the lease of the daemon could not be released", cause=str(error))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal that comes before or after the server handles signals ends the daemon in order, too."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals
            return
        before = {one: signal.signal(one, lambda *_: self.stop()) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


class _Ending(Server):
    """A server that says when its end begins."""

    on_stop: Callable[[], None]

    def stop(self) -> None:
        self.on_stop()
        super().stop()


def _feed_task(state: Mapping[str, Any]) -> TaskReport:
    """The figures of a spool as those of a task: it has no schedule, and runs whenever rows wait."""
    error = state["error"]
    last_error = None if error is None else StoredError({"kind": error["kind"], "message": error["message"]})
    fed = f"{count_of(state['fed_rows'], 'row')} fed, {state['waiting_rows'] or 0} waiting"
    return TaskReport(
        name=f"feed {state['table']}",
        kind="feed",
        state=FAILED if last_error is not None else RUNNING if state["waiting_records"] else WAITING,
        last_ended=state["fed_at"],
        last_outcome=fed if state["fed_records"] else None,
        last_error=last_error,
        failures=state["failures"],
    )


def share_interpreter() -> None:
    """Set how threads share the interpreter, once before serving, so that no request waits for the feed.

    Two things would delay requests. A garbage collection walks through all objects that imports made, a tenth of a
    second each time. A computing thread gives the interpreter away only every 5 ms, and a request needs the interpreter
    ten times for one answer. This changes no result, only who waits for whom.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # objects that exist now stay: collections skip them from now on
