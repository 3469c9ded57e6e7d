"""When workers stop, and how often a step is tried: an operator cancelled, or a worker failed for good.

Checked between two chunks and in every wait, never in the middle of a publish. If the catalog does not answer the
question for a cancel, no worker stops: the next publish finds out whether it is back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from floodmark import log
from floodmark.catalog.jobs import PASSING
from floodmark.errors import Corrupt, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.jobs.progress import LOOK_EVERY_S, JobProgress
from floodmark.runs import Stopped

RETRY_S_MAX = 30.0
# The longest pause of a follower whose source does not answer.
PAUSE_S_MAX = 600.0
T = TypeVar("T")


class OtherFailed(Stopped):
    """Another worker failed: this one stops where it is."""


class WorkerStop:
    def __init__(self, progress: JobProgress | None) -> None:
        """Without progress: for work that cannot be cancelled."""
        self._progress = progress
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        """Allow the stopped work to be tried again."""
        self._event.clear()

    def check(self) -> None:
        """Raise Stopped if the work has to end here: OtherFailed, or Cancelled."""
        if self._event.is_set():
            raise OtherFailed
        if self._progress is None:
            return
        try:
            self._progress.check()
        except Unavailable as error:
            log.get().warning("the catalog did not answer whether to cancel", cause=str(error))

    def wait(self, wait_s: float) -> None:
        end_s = time.monotonic() + wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            self._event.wait(min(left_s, LOOK_EVERY_S))
            self.check()


class Outage:
    """How long a follower waits during an outage: pauses that double, until it gives up. The time is passed in."""

    def __init__(self, give_up_s: float, first_s: float) -> None:
        self._give_up_s = give_up_s
        self._first_s = first_s
        self._since_s: float | None = None
        self.tries = 0

    def pause_s(self, now_s: float) -> float | None:
        """It failed again: how long to wait before the next try; None to give up."""
        self._since_s = now_s if self._since_s is None else self._since_s
        left_s = self._give_up_s - (now_s - self._since_s)
        if left_s <= 0:
            return None
        self.tries += 1
        return min(self._first_s * 2.0 ** min(self.tries - 1, 30), PAUSE_S_MAX, left_s)

    def away_s(self, now_s: float) -> float:
        return 0.0 if self._since_s is None else now_s - self._since_s

    def over(self) -> None:
        self._since_s, self.tries = None, 0


def is_worth_a_retry(error: BaseException) -> bool:
    """Whether an error may be temporary: a part that does not answer, a lost race, any error of foreign code."""
    if isinstance(error, FloodmarkError):
        return error.kind in PASSING
    return isinstance(error, Exception) and not isinstance(error, Stopped)


def retrying(worker_stop: WorkerStop, tries: int, first_wait_s: float, what: str) -> Retrying:
    """Try so many times, with waits that double; the last error is raised unchanged."""

    def log_retry(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        log.get().warning("trying again", what=what, tries=state.attempt_number, cause=str(error))

    return Retrying(
        retry=retry_if_exception(is_worth_a_retry),
        stop=stop_after_attempt(tries),
        wait=wait_exponential(multiplier=first_wait_s, max=RETRY_S_MAX),
        sleep=worker_stop.wait,
        before_sleep=log_retry,
        reraise=True,
    )


def call_source(what: str, deadline_s: float, worker_stop: WorkerStop, call: Callable[[], T]) -> T:
    """The result of a call of the source, if it answers in time; `what` names the call in errors.

    The call runs in a thread of its own, which is abandoned at the deadline: a foreign function cannot be stopped, but
    it holds nothing of ours. Its errors become Unavailable, unless they state that a retry would not help.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    answered = threading.Event()

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)
        answered.set()

    threading.Thread(target=run, name=f"floodmark-source-{what}", daemon=True).start()
    end_s = time.monotonic() + deadline_s
    while not answered.wait(min(LOOK_EVERY_S, max(0.0, end_s - time.monotonic()))):
        if time.monotonic() >= end_s:
            raise Unavailable("the source did not answer in time", call=what, deadline_s=deadline_s)
        worker_stop.check()
    if answers:
        return answers[0]
    error = errors[0]
    if isinstance(error, Invalid | Corrupt | NotFound):
        raise error
    raise Unavailable("the source failed", call=what, cause=error) from error
