"""A question that many ask at once is asked of the catalog once: they all get the same answer.

So whoever asks without end costs one thread, not all of them. An answer is given to those who asked while it was made,
and kept for nobody: the next one asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from floodmark.serve.work import Work

T = TypeVar("T")


class Shared(Generic[T]):
    def __init__(self, work: Work, question: Callable[[], T]) -> None:
        self._work = work
        self._question = question
        self._asked: asyncio.Task[T] | None = None

    async def ask(self) -> T:
        """The answer; `Unavailable` if there is none in time. An error is everybody's too."""
        loop = asyncio.get_running_loop()
        if self._asked is None or self._asked.done() or self._asked.get_loop() is not loop:
            self._asked = loop.create_task(self._work.ask(self._question))
            # Who asked may have left before an error came: it was told then, to nobody.
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Whoever leaves does not take the answer away from the others.
        return await asyncio.shield(self._asked)
