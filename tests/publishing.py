"""Operations that wait for one that has the turn: the leader stops at a point until so many others wait in line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables

WAIT_S = 60


def waiting_count(lake: fm.Lake) -> int:
    with lake.catalog.database.read() as tx:
        return int(tx.execute(select(func.count()).select_from(tables.waiting)).scalar_one())


def wait_for_line(lake: fm.Lake, count: int) -> None:
    """Until so many operations wait for their turn."""
    end = time.monotonic() + WAIT_S
    while waiting_count(lake) < count:
        assert time.monotonic() < end, f"only {waiting_count(lake)} of {count} wait"
        time.sleep(0.002)


@contextmanager
def in_this_thread(point: str, act: Callable[[], Any], *, times: int = 1) -> Iterator[None]:
    """Call `act` when this thread passes the point; others pass it undisturbed."""
    thread, left = threading.get_ident(), [times]

    def observe(passed: str) -> None:
        if passed == point and threading.get_ident() == thread and left[0]:
            left[0] -= 1
            act()

    assert failpoints.observer is None
    failpoints.observer = observe
    try:
        yield
    finally:
        failpoints.observer = None
    assert left[0] == 0, f"{point} was not passed"


@contextmanager
def in_this_thread_too(point: str, act: Callable[[], Any]) -> Iterator[None]:
    """The same, for a further point."""
    outer = failpoints.observer
    assert outer is not None
    failpoints.observer = None
    try:
        with in_this_thread(point, act):
            inner = failpoints.observer
            assert inner is not None

            def both(passed: str) -> None:
                outer(passed)
                inner(passed)

            failpoints.observer = both
            yield
    finally:
        failpoints.observer = outer


@dataclass
class Behind:
    """Calls in threads of their own, begun one after the other: each waits in line before the next begins."""

    lake: fm.Lake
    calls: Sequence[Callable[[], Any]]
    results: list[Any] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        self.results = [None] * len(self.calls)
        for place, call in enumerate(self.calls):
            thread = threading.Thread(target=self._run, args=(place, call), daemon=True)
            self._threads.append(thread)
            thread.start()
            wait_for_line(self.lake, place + 1)

    def _run(self, place: int, call: Callable[[], Any]) -> None:
        try:
            self.results[place] = call()
        except BaseException as error:  # noqa: BLE001 - how a call ends is the result
            self.results[place] = error

    def wait(self) -> list[Any]:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "an operation that waits does not end"
        return self.results
