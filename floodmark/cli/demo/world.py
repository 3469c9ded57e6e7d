"""The demo's world: two lakes with a daemon each, real processes that are killed, and a client that sends again.

The first lake takes rows in by HTTP and from a folder, and ships to a folder and to the second lake. Whatever a killed
daemon left is settled by its next start; the client does what any client would: the same request, the same key.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from floodmark.cli.demo import rows as demo_rows
from floodmark.errors import Unavailable
from floodmark.failpoints import VARIABLE

WAIT_S = 120.0
POLL_S = 0.1
COMMAND = (sys.executable, "-m", "floodmark.cli.main")
_QUIET = {"FLOODMARK_LOG": "error"}

_SETTINGS = """
[lake]
path = "{lake}"

[serve]
bind = "127.0.0.1:0"
"""

_FIRST = """
[sources.folder]
type = "files"
path = "{drop}"
table = "orders"
every = "500ms"
settle = "500ms"

[sinks.archive]
type = "files"
tables = ["orders", "customers"]
path = "{archive}"
every = "1s"

[sinks.copy]
type = "http"
tables = ["orders", "customers"]
url = "{copy}/api/tables/{{table}}/rows?wait=committed"
tries = 2
backoff_s_max = 0.2
every = "1s"
"""


class DemoDaemon:
    """`floodmark run` in a process of its own; it may be set to die at a failpoint."""

    def __init__(self, name: str, settings: Path) -> None:
        self.name = name
        self.kills = 0
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._failpoint: str | None = None
        self.url = ""

    def start(self, failpoint: str | None = None) -> None:
        self._failpoint = failpoint
        environment = {**os.environ, **_QUIET, **({VARIABLE: failpoint} if failpoint else {})}
        self._process = subprocess.Popen(
            [*COMMAND, "--config", str(self._settings), "--json", "run", *self._bind()],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            self.url = json.loads(line)["address"]
        # Without a line it died before it could say where it is: the caller notices that it ended.

    def _bind(self) -> list[str]:
        """After a kill at the address that it had: senders know no other."""
        return ["--bind", self.url.removeprefix("http://")] if self.url else []

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def is_armed(self) -> bool:
        return self._failpoint is not None

    def mend(self, report: Callable[[str], None], failpoint: str | None = None) -> None:
        """Start it again if it was killed; an end of any other kind is a failure of the demo."""
        if self.is_alive or self._process is None:
            return
        if self._process.returncode != -signal.SIGKILL:
            raise Unavailable("a daemon ended by itself", daemon=self.name, exit_code=self._process.returncode)
        self.kills += 1
        where = f" at {self._failpoint.partition(':')[0]}" if self._failpoint else ""
        report(f"the daemon of the {self.name} lake was killed{where}; starting it again")
        self.start(failpoint)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=WAIT_S)

    def close(self) -> None:
        if self.is_alive:
            self.kill()


class World:
    """Where everything is, and all processes at work."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder = folder
        self.report = report
        self.first_lake, self.second_lake = str(folder / "lake"), str(folder / "copy")
        self.drop, self.archive = folder / "drop", folder / "archive"
        self.drop.mkdir(parents=True, exist_ok=True)
        self.first = DemoDaemon("first", folder / "floodmark.toml")
        self.second = DemoDaemon("second", folder / "copy.toml")
        self.work_kills = 0
        # The day of the story, also if midnight comes in the middle of it.
        self.today = demo_rows.today()

    def write_second_settings(self) -> None:
        (self.folder / "copy.toml").write_text(_SETTINGS.format(lake=self.second_lake))

    def write_first_settings(self) -> None:
        """Once the second lake is served: the first one's sink gets its address."""
        more = _FIRST.format(drop=self.drop, archive=self.archive, copy=self.second.url)
        (self.folder / "floodmark.toml").write_text(_SETTINGS.format(lake=self.first_lake) + more)

    def mend(self, failpoint: str | None = None) -> None:
        self.first.mend(self.report, failpoint)
        self.second.mend(self.report)

    def send(self, table: str, text: str, key: str, next_failpoint: Callable[[], str | None]) -> None:
        """One request, again and again until it is answered with 202; daemons that were killed are started again."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if not self.first.is_alive:
                self.first.mend(self.report, next_failpoint())
            try:
                answer = httpx.post(
                    f"{self.first.url}/api/tables/{table}/rows",
                    content=text,
                    headers={"Idempotency-Key": key, "Content-Type": "application/x-ndjson"},
                    timeout=WAIT_S,
                )
            except httpx.TransportError:
                time.sleep(POLL_S)
                continue
            if answer.status_code == httpx.codes.ACCEPTED:
                return
            if answer.status_code not in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
                raise Unavailable("a request was refused", status=answer.status_code, answer=answer.text[:500])
            time.sleep(POLL_S)
        raise Unavailable("a request was not taken in time", table=table, key=key, seconds=WAIT_S)

    def ask(self, path: str) -> httpx.Response:
        self.mend()
        answer = httpx.get(f"{self.first.url}{path}", timeout=WAIT_S)
        answer.raise_for_status()
        return answer

    def wait_until(self, what: str, is_so: Callable[[], bool], *, mend: bool = True) -> None:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            if mend:
                self.mend()
            try:
                if is_so():
                    return
            except httpx.HTTPError:
                pass  # it was killed meanwhile: asked again after its restart
            time.sleep(POLL_S)
        raise Unavailable(f"{what} did not finish in time", seconds=WAIT_S)

    def work(self, what: str, *, failpoint: str | None = None) -> None:
        """A piece of work in a process of its own, killed at a failpoint if one is named."""
        done = subprocess.run(
            [sys.executable, "-m", "floodmark.cli.demo.killable", self.first_lake, what, self.today.isoformat()],
            env={**os.environ, **_QUIET, **({VARIABLE: failpoint} if failpoint else {})},
            check=False,
        )
        if done.returncode == -signal.SIGKILL:
            self.work_kills += 1
            self.report(f"{what} was killed at {failpoint}")
        elif done.returncode:
            raise Unavailable("a part of the demo failed", part=what, exit_code=done.returncode)

    @property
    def kills(self) -> int:
        return self.first.kills + self.second.kills + self.work_kills


@contextmanager
def new_world(folder: Path, report: Callable[[str], None]) -> Iterator[World]:
    world = World(folder, report)
    try:
        yield world
    finally:
        world.first.close()
        world.second.close()
