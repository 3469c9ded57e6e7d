"""The real `floodmark run` under load: killed by SIGKILL at random moments, started again at the same address.

A kill may hit it while it starts, heals or feeds, as any power cut would. When it was down is written down, so that a
client's time can be told from the daemon's; memory and processor time are sampled from outside.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.load.clients import Load, Sent, start_clients, wait_for_clients

START_S_MAX = 60.0
SAMPLE_S = 0.1


@dataclass(frozen=True)
class Sample:
    """What one life of the daemon had taken at a moment."""

    at_s: float
    life: int
    rss_bytes: int
    cpu_s: float


@dataclass
class Life:
    """A process from its start to its end."""

    process: subprocess.Popen[str]
    started_s: float
    up_s: float | None = None
    ended_s: float | None = None
    announced: threading.Event = field(default_factory=threading.Event)
    address: dict[str, Any] = field(default_factory=dict)


class LoadDaemon:
    """`floodmark run` of a lake at one port, whatever happens to its processes."""

    def __init__(self, folder: Path, arguments: Sequence[str], *, environment: dict[str, str] | None = None) -> None:
        """`arguments` come before `run`: the lake, and the settings if there are any."""
        self.port = _free_port()
        self.lives: list[Life] = []
        self.samples: list[Sample] = []
        self.errors = folder / "daemon.err"
        bind = f"127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "floodmark.cli.main", *arguments, "--json", "run", "--bind", bind]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLOODMARK_")}
        self._environment = {**kept, **(environment or {})}
        self._folder = folder
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="floodmark-load-samples", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> LoadDaemon:
        self._sampler.start()
        self.start()
        try:
            self.wait_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._sampler.join()
        if self.lives[-1].process.poll() is None:
            self.kill()

    def start(self) -> None:
        """A new life; it is not up yet."""
        with self.errors.open("ab") as errors:
            process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        life = Life(process, time.monotonic())
        self.lives.append(life)
        threading.Thread(target=_hear, args=(life,), daemon=True).start()

    def wait_up(self) -> None:
        life = self.lives[-1]
        if not life.announced.wait(START_S_MAX) or life.up_s is None:
            raise RuntimeError(f"the daemon did not come up: {self.errors.read_text()[-2000:]}")

    def check_alive(self) -> None:
        code = self.lives[-1].process.poll()
        if code is not None:
            raise RuntimeError(f"the daemon ended by itself: {code}: {self.errors.read_text()[-2000:]}")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self, within_s: float = START_S_MAX) -> int:
        """As an operator ends it; its exit code."""
        self._end(signal.SIGTERM, within_s)
        return int(self.lives[-1].process.returncode)

    def _end(self, how: signal.Signals, within_s: float = START_S_MAX) -> None:
        life = self.lives[-1]
        life.ended_s = time.monotonic()
        life.process.send_signal(how)
        life.process.wait(within_s)
        if life.process.stdout is not None:
            life.process.stdout.close()

    @property
    def downs(self) -> list[tuple[float, float]]:
        """When nobody answered: from the end of a life that was up to the moment at which a later one was."""
        lives = [(life.up_s, life.ended_s) for life in self.lives if life.up_s is not None]
        return [(ended_s, up_s) for (_, ended_s), (up_s, _) in pairwise(lives) if ended_s is not None]

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            number = len(self.lives) - 1
            if number < 0:
                continue
            try:
                process = psutil.Process(self.lives[number].process.pid)
                with process.oneshot():
                    times, rss = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue  # just killed
            self.samples.append(Sample(time.monotonic(), number, rss, times.user + times.system))


def _hear(life: Life) -> None:
    """Its first line says that it answers; a closed pipe says that it never will."""
    try:
        line = life.process.stdout.readline() if life.process.stdout else ""
        if line:
            life.address = json.loads(line)
            life.up_s = time.monotonic()
    except ValueError:
        pass  # the pipe was closed by whoever ended it, or the line was cut by a kill
    life.announced.set()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# ── a run ──


@dataclass(frozen=True)
class Kills:
    """So many, at random moments between two times after the start."""

    count: int
    seed: int
    from_s: float
    to_s: float

    def moments_s(self) -> list[float]:
        chance = random.Random(self.seed)
        return sorted(chance.uniform(self.from_s, self.to_s) for _ in range(self.count))


NO_KILLS = Kills(0, 0, 0.0, 0.0)


def run_load(daemon: LoadDaemon, loads: Sequence[Load], kills: Kills, folder: Path) -> dict[str, list[Sent]]:
    """Send it all, and kill meanwhile; what became of the requests of every table. The daemon is up at the end."""
    started = [(load, start_clients(load, folder)) for load in loads]
    begin_s = min(load.start_s for load in loads)
    try:
        for moment_s in kills.moments_s():
            time.sleep(max(0.0, begin_s + moment_s - time.monotonic()))
            daemon.check_alive()
            daemon.kill()
            daemon.start()
        daemon.wait_up()
        found = {load.table: wait_for_clients(load, clients) for load, clients in started}
        daemon.check_alive()
        return found
    finally:
        for process in (process for _, clients in started for process, _ in clients):
            if process.poll() is None:
                process.kill()
                process.wait()


# ── what it took ──


def between_kills(sent: Sequence[Sent], downs: Sequence[tuple[float, float]]) -> list[Sent]:
    """The acknowledged requests that were answered at their first try, with the daemon up from when they were due."""
    return [
        one
        for one in sent
        if one.state == "acknowledged"
        and one.tries == 1
        and not any(one.due_s < up_s and one.answered_s > down_s for down_s, up_s in downs)
    ]


def share_of(values: Sequence[float], share: float) -> float:
    """The value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(frozen=True)
class Halves:
    """The highest resident size before and after a moment, in one life."""

    first_bytes: int
    second_bytes: int

    @property
    def ratio(self) -> float:
        return self.second_bytes / self.first_bytes


def memory_of(samples: Sequence[Sample], from_s: float, middle_s: float, to_s: float) -> Halves:
    found = [one for one in samples if from_s <= one.at_s <= to_s]
    if not found or len({one.life for one in found}) != 1:
        raise ValueError("memory is compared within one life")
    return Halves(
        max(one.rss_bytes for one in found if one.at_s <= middle_s),
        max(one.rss_bytes for one in found if one.at_s > middle_s),
    )
