"""Real processes for crash tests: started quickly, killed by SIGKILL.

A fork server imports Floodmark once; each child is forked from it in milliseconds, and shares nothing with the test's
own process: no connections, no threads. A child dies by SIGKILL at a failpoint, like any killed process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, TypeVar, TypeVarTuple, Unpack

from floodmark.failpoints import VARIABLE

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_CONTEXT = multiprocessing.get_context("forkserver")
# Everything that a write imports late; importing starts no thread, so forking from there is safe.
_PRELOADED = [
    "floodmark.opening",
    "floodmark.write.transaction",
    "floodmark.rows.reading.arrow_reader",
    "floodmark.rows.reading.changes",
    "floodmark.commit.publisher",
    "floodmark.rows.staging.stage",
    "floodmark.rows.layout",
    "floodmark.index.keys",
    "floodmark.index.writing",
    "alembic.command",
    "alembic.config",
    "pandas",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "structlog",
    "pytest",
    "floodmark.testing.invariants",
    "pyiceberg.table.locations",
    "zstandard",
]


def preload(*modules: str) -> None:
    """Import these too before children are forked; only before the first child."""
    _PRELOADED.extend(one for one in modules if one not in _PRELOADED)
    _CONTEXT.set_forkserver_preload(_PRELOADED)


preload()


class Child(Generic[T]):
    def __init__(
        self,
        function: Callable[[Unpack[Arguments]], T],
        *arguments: *Arguments,
        failpoint: str | None = None,
    ) -> None:
        self._receiver, sender = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_run, args=(sender, failpoint, function, arguments), daemon=True)
        self.process.start()
        sender.close()

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def wait(self, timeout_s: float = 60) -> T | None:
        """The function's result; raises if it raised. None and `killed` if it died by SIGKILL."""
        answer: tuple[str, T] | None = None
        if self._receiver.poll(timeout_s):
            try:
                answer = self._receiver.recv()
            except EOFError:
                answer = None
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError("the child did not end")
        if answer is None:
            return None
        kind, value = answer
        if kind == "error":
            raise AssertionError(f"the child failed:\n{value}")
        return value

    @property
    def killed(self) -> bool:
        return self.process.exitcode == -signal.SIGKILL


def run_killed(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments, failpoint: str) -> bool:
    """Run a function in a child that dies at a failpoint; False if it never reached it and ended well."""
    child = Child(function, *arguments, failpoint=failpoint)
    child.wait()
    return child.killed


def run_child(function: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T | None:
    return Child(function, *arguments).wait()


def _run(
    sender: Connection,
    failpoint: str | None,
    function: Callable[[Unpack[Arguments]], T],
    arguments: tuple[*Arguments],
) -> None:
    # What the fork server imported is never garbage. A full collection would visit all of it and copy its pages: it
    # stops the child for a sixth of a second, at any point, also while it holds the catalog's lock.
    gc.freeze()
    # Like a program started from a terminal, however the tests were started: nohup and some runners ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop(VARIABLE, None)
    if failpoint is not None:
        os.environ[VARIABLE] = failpoint
    try:
        sender.send(("ok", function(*arguments)))
    except BaseException:  # noqa: BLE001 - sent to the parent, which raises it
        sender.send(("error", traceback.format_exc()))
    finally:
        sender.close()
