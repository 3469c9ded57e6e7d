"""Faults of a real database connection: the Nth statement or COMMIT fails, before its effect or after it.

Works below SQLAlchemy's dialect, on the real driver and the real database: "before" means that the call never reached
the database, "after" that it was done and the reply was lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from floodmark.catalog.database import Database

Arguments = ParamSpec("Arguments")


class DatabaseFaults:
    """Count the calls of a database, and make the Nth fail. `calls_seen` and `fired` show when N is past the run."""

    def __init__(self, database: Database, *, fail_at: int, mode: str, stay_broken: bool = False) -> None:
        if mode not in ("before", "after"):
            raise ValueError(f"unknown mode {mode!r}")
        self._dialect = database.engine.dialect
        self._fail_at = fail_at
        self._mode = mode
        self._stay_broken = stay_broken
        self.calls_seen = 0
        self.fired = False
        self._real = {name: getattr(self._dialect, name) for name in ("do_execute", "do_executemany", "do_commit")}
        for name in self._real:
            setattr(self._dialect, name, self._wrapped(name))

    def remove(self) -> None:
        for name in self._real:
            delattr(self._dialect, name)

    def _wrapped(self, name: str) -> Callable[..., None]:
        return self._counted(self._real[name])

    def _counted(self, real: Callable[Arguments, None]) -> Callable[Arguments, None]:
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
            self.calls_seen += 1
            due = self.calls_seen == self._fail_at
            if (due and self._mode == "before") or (self.fired and self._stay_broken):
                self.fired = True
                raise self._error()
            real(*arguments, **named)
            if due:
                self.fired = True
                raise self._error()

        return call

    def _error(self) -> Exception:
        error: Exception = self._dialect.loaded_dbapi.OperationalError("injected: the connection was lost")
        return error
