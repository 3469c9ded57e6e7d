"""The threads that use the lake for requests, how many at once, and for how long (I14).

Writers, queries of state, and callers that wait for a commit have threads of their own: none makes the others wait. A
thread's work is not stopped: at the end the server waits for it, and cutting it off then is like a crash.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent import futures
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from floodmark.errors import Busy, Unavailable
from floodmark.serve.http.body import HeldMemory, MemoryBudget, RequestLimits
from floodmark.serve.http.readiness import ANSWER_S_MAX

T = TypeVar("T")
P = ParamSpec("P")
# Threads for queries of state.
ASKERS = 2


class Workers:
    """The threads that touch the lake, and who may use them when."""

    def __init__(self, limits: RequestLimits) -> None:
        self._pool = futures.ThreadPoolExecutor(limits.workers, thread_name_prefix="floodmark-serve")
        self._askers = futures.ThreadPoolExecutor(ASKERS, thread_name_prefix="floodmark-ask")
        self._waiters = futures.ThreadPoolExecutor(limits.waiters_max, thread_name_prefix="floodmark-wait")
        self._limits = limits
        self._room = MemoryBudget(limits.bytes_max)
        self._under_way = 0
        self._waiting = 0
        self._running: set[futures.Future[Any]] = set()
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def under_way(self) -> int:
        """How many requests hold a place now."""
        return self._under_way

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[HeldMemory]:
        """A place for one request, with the memory that it takes."""
        if self._under_way >= self._limits.requests_max:
            raise _busy("too many requests at once", requests_max=self._limits.requests_max)
        self._under_way += 1
        try:
            with self._room.held() as held:
                yield held
        finally:
            self._under_way -= 1

    @asynccontextmanager
    async def patient(self) -> AsyncIterator[None]:
        """A place for a request that will wait for a commit, once its rows are taken and their memory is free again."""
        if self._waiting >= self._limits.waiters_max:
            raise _busy("too many requests wait for their commit", waiters_max=self._limits.waiters_max)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @asynccontextmanager
    async def turn(self, table_id: str) -> AsyncIterator[None]:
        """One request after the other for one table: concurrent merges would make each other plan again."""
        async with self._turns[table_id]:
            yield

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await self._begun(self._pool, partial(function, *arguments, **named))

    async def wait(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """For calls that block until other threads have done something; it has its own bound, and holds nothing."""
        return await asyncio.wrap_future(self._waiters.submit(function, *arguments, **named))

    async def ask(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """A query that changes nothing; `Unavailable` if there is no answer in time."""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await self._begun(self._askers, partial(function, *arguments, **named))
        except TimeoutError as error:
            raise Unavailable("no answer in time", seconds=ANSWER_S_MAX, advice="Ask again.") from error

    async def _begun(self, pool: futures.Executor, act: Callable[[], T]) -> T:
        future = pool.submit(act)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(future)

    def close(self, wait_s: float) -> bool:
        """Whether all that was begun ended in this time."""
        for pool in (self._pool, self._askers, self._waiters):
            pool.shutdown(wait=False, cancel_futures=True)
        return not futures.wait(list(self._running), timeout=wait_s).not_done


def _busy(message: str, **limit: int) -> Busy:
    return Busy(message, **limit, advice="Send it again.")


class SharedAnswer(Generic[T]):
    """A question that many ask at once is asked of the catalog once: they all get the same answer.

    So a caller that asks without end costs one thread, not all of them. An answer goes to all who asked while it was
    made, and is not kept: the next caller asks again.
    """

    def __init__(self, workers: Workers, question: Callable[[], T]) -> None:
        self._workers = workers
        self._question = question
        self._asked: asyncio.Task[T] | None = None

    async def ask(self) -> T:
        """The answer; `Unavailable` if there is none in time. All callers get the same error, too."""
        loop = asyncio.get_running_loop()
        if self._asked is None or self._asked.done() or self._asked.get_loop() is not loop:
            self._asked = loop.create_task(self._workers.ask(self._question))
            # The callers may have left before an error came: mark it as retrieved.
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A caller that leaves does not cancel the answer of the others.
        return await asyncio.shield(self._asked)
