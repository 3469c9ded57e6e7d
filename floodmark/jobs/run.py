"""One run of a job, from its lease to its end: every result and every error becomes a named outcome (I12).

Crash anywhere: the job is `running` and its owner dead, which is shown as interrupted; finished work stays, and the
next run continues from there. If the end cannot be written, the error is raised: such a job has not ended well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from floodmark import clock, log, runs
from floodmark.catalog import jobs as states
from floodmark.catalog.jobs import FAILING_SINCE, PASSING, HeldJob
from floodmark.commit.catalog import Catalog
from floodmark.engine import Engine
from floodmark.errors import Fenced, FloodmarkError, Incomplete, without_secrets
from floodmark.jobs.progress import CallbackFailed, Cancelled, JobProgress, LeftOff
from floodmark.jobs.record import BackfillRun
from floodmark.json_form import Json
from floodmark.runs import JobCallback

TEXT_CHARACTERS_MAX = 2_000


@dataclass(frozen=True)
class JobContext:
    """What a backfill works with: the lake's engine, and its caller's wishes.

    `stop`, once it is set, ends a run after its current chunk or batch, and leaves the job interrupted. While its
    source does not answer, a run that follows it tries again for give_up_s.
    """

    engine: Engine
    stop: threading.Event | None = None
    give_up_s: float = 86_400.0

    @property
    def catalog(self) -> Catalog:
        return self.engine.catalog


class TimedOut(Incomplete):
    """A wait took too long; nothing was left behind."""


def run_job(
    context: JobContext,
    held: HeldJob,
    callback: JobCallback | None,
    work: Callable[[JobProgress], bool],
    end: Callable[[JobProgress], dict[str, Json]] | None = None,
) -> BackfillRun:
    """Do the work of a job that this run holds, and end the job. `work` returns whether there was anything to do.

    `end` writes the end of a run that finished its work, if the job has more work.
    """
    progress = JobProgress(context.catalog.jobs, held, callback, stop=context.stop)
    try:
        busy = work(progress)
    except LeftOff:
        # As if this process had died: the job was not cancelled, so the next daemon resumes it.
        context.catalog.jobs.disown(held.run)
        return BackfillRun(runs.LEFT_OFF, context.catalog.jobs.find(held.name).as_dict())
    except Cancelled:
        return BackfillRun(runs.CANCELLED, _end(context, held, states.CANCELLED, progress))
    except Fenced:
        context.catalog.jobs.disown(held.run)
        raise
    except Exception as raised:  # noqa: BLE001 - the edge of a run: its record has the error, and the log has the trace
        error = raised.error if isinstance(raised, CallbackFailed) else raised
        facts = {}
        if not isinstance(error, FloodmarkError):
            log.get().exception("a backfill failed", job=held.name)
        elif error.kind in PASSING and FAILING_SINCE not in error.facts:
            # A caller that retries counts from the first failure since the last progress.
            progressed = progress.processed is not None and progress.processed > held.processed
            since_ms = None if progressed else held.failing_since_ms
            facts[FAILING_SINCE] = clock.format_time(since_ms or clock.now_ms())
        stored_error = error_document(error, facts)
        try:
            job = _end(context, held, states.FAILED, progress, stored_error)
        except FloodmarkError as second:
            raise error from second
        outcome = runs.TIMED_OUT if isinstance(raised, TimedOut) else runs.FAILED
        return BackfillRun(outcome, job, stored_error)
    except BaseException:
        # Ctrl-C, or a signal to end the process: finished work stays, as after a cancel.
        _end(context, held, states.CANCELLED, progress)
        raise
    job = _end(context, held, states.DONE, progress) if end is None else end(progress)
    return BackfillRun(runs.DONE if busy else runs.NOTHING_TO_DO, job)


def _end(
    context: JobContext, held: HeldJob, state: str, progress: JobProgress, error: Mapping[str, Json] | None = None
) -> dict[str, Json]:
    """The job with its written end: a catalog that does not answer right after that fails no run."""
    return context.catalog.jobs.end(held, state, progress.processed, progress.total, error).as_dict()


def error_document(error: Exception, facts: Mapping[str, str]) -> dict[str, Json]:
    """An error as the job stores it, with these facts besides its own."""
    if not isinstance(error, FloodmarkError):
        return {
            "kind": type(error).__name__,
            "message": _shortened(without_secrets(str(error))),
            "facts": dict(facts),
            "advice": "",
            "exit_code": 1,
        }
    document = {**error.as_dict(), "exit_code": error.exit_code}
    own = {name: _shortened(text) for name, text in document["facts"].items()}
    return {**document, "message": _shortened(error.message), "facts": {**own, **facts}}


def _shortened(text: str) -> str:
    """Errors of Spark are as long as its plans: the log has all of it, the job enough to identify it."""
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
