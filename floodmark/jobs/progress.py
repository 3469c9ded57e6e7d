"""Progress of a run of a job: reported to the caller at every step, written to the catalog at most once a second.

The first report of a run is written at once, so that figures of an earlier run do not remain. A report that comes too
soon after another is written at the next check for a cancel; the last one is written with the end of the job. While the
figures do not change, also in a wait, a run records now and then that it is alive: so a hanging run can be recognized.
An error of the caller's callback ends the run with that error; it is not swallowed. A catalog that does not answer for
a while ends no run here: the next publish, or the end of the run, finds out whether it is back. A request to cancel is
found between two steps and while waiting, never in the middle of a publish.
"""

from __future__ import annotations

import threading
import time

from floodmark import log
from floodmark.catalog.jobs import HeldJob, Jobs
from floodmark.errors import Unavailable
from floodmark.runs import JobCallback, Progress, Stopped, for_job

WRITE_EVERY_S = 1.0
LOOK_EVERY_S = 0.25
TOUCH_EVERY_S = 60.0


class Cancelled(Stopped):
    """A request to cancel stops the run here; finished work stays."""


class LeftOff(Cancelled):
    """This process is about to end: the job stays as it is, for the process that resumes it."""


class CallbackFailed(Exception):
    """The caller's callback raised this. No step failed, whatever the kind of the error: nothing is tried again."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class JobProgress:
    """Safe for several threads: steps of workers are reported in the order of their calls."""

    def __init__(
        self,
        jobs: Jobs,
        held: HeldJob,
        callback: JobCallback | None = None,
        every_s: float = WRITE_EVERY_S,
        stop: threading.Event | None = None,
    ) -> None:
        self._jobs = jobs
        self._held = held
        self._report = for_job(callback)
        self._every_s = every_s
        self._stop = stop
        self._lock = threading.RLock()
        # The last report, None until the first step; and the last one that the catalog has.
        self._now: Progress | None = None
        self._written: Progress | None = None
        self._tried_s = float("-inf")
        self._looked_s = float("-inf")
        # The catalog has recorded the start of the run a moment ago.
        self._touched_s = time.monotonic()
        # How often the catalog was written to, and how often it did not answer.
        self.writes = 0
        self.errors = 0

    def step(self, processed: int, total: int | None) -> None:
        """Report progress. Raises Cancelled after a request to cancel, CallbackFailed if the callback raises."""
        with self._lock:
            before, self._now = self._now, Progress(processed, total)
            if self._report is not None and self._now != before:
                try:
                    self._report(self._now)
                except Exception as error:
                    raise CallbackFailed(error) from error
            self.check()

    @property
    def processed(self) -> int | None:
        """None until the first step is reported."""
        return None if self._now is None else self._now.done

    @property
    def total(self) -> int | None:
        return None if self._now is None else self._now.total

    def check(self) -> None:
        """Raise Cancelled after a request to cancel; asks the catalog at most a few times a second."""
        if self._stop is not None and self._stop.is_set():
            raise LeftOff
        with self._lock:
            now_s = time.monotonic()
            is_due = self._now != self._written and now_s - self._tried_s >= self._every_s
            if not is_due and now_s - self._looked_s < LOOK_EVERY_S:
                return
            self._looked_s = now_s
            try:
                goes_on = self._write(now_s) if is_due else self._look(now_s)
            except Unavailable as error:
                # These figures are only for display. The last report is written later; at the end of the run it must
                # be.
                self.errors += 1
                log.get(job=self._held.name).warning("progress could not be written", cause=str(error))
                return
            if not goes_on:
                raise Cancelled

    def _write(self, now_s: float) -> bool:
        """Write the last report; False after a request to cancel."""
        assert self._now is not None
        self._tried_s = now_s
        goes_on = self._jobs.progress(self._held, self._now.done, self._now.total, first=self._written is None)
        self._written = self._now
        self._touched_s = now_s
        self.writes += 1
        return goes_on

    def _look(self, now_s: float) -> bool:
        """False after a request to cancel; now and then this also records that the run is alive."""
        if now_s - self._touched_s < TOUCH_EVERY_S:
            return not self._jobs.wants_cancel(self._held)
        self._touched_s = now_s
        return self._jobs.touch(self._held)

    def wait(self, wait_s: float) -> None:
        """Wait, and check for a cancel meanwhile."""
        end_s = time.monotonic() + wait_s
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, LOOK_EVERY_S))
            self.check()
