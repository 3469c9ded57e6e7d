"""One run of a job, from its lease to its end: every result and every error becomes a named outcome (I12).

Crash anywhere: the job is `running` and its owner dead, which is shown as interrupted; finished work stays, and the
next run continues from there. If the end cannot be written, the error is raised: such a job has not ended well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from floodmark import clock, log
from floodmark.catalog import jobs as states
from floodmark.catalog.jobs import FAILING_SINCE, PASSING, Held
from floodmark.commit.catalog import Catalog
from floodmark.engine import Engine
from floodmark.errors import Fenced, FloodmarkError, Incomplete, without_secrets
from floodmark.jobs import record
from floodmark.jobs.progress import CallbackFailed, Cancelled, LeftOff, Progress, Step
from floodmark.jobs.record import BackfillRun

if TYPE_CHECKING:
    pass

TEXT_CHARACTERS_MAX = 2_000


@dataclass(frozen=True)
class Room:
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
    room: Room,
    held: Held,
    callback: Step | None,
    work: Callable[[Progress], bool],
    end: Callable[[Progress], dict[str, Any]] | None = None,
) -> BackfillRun:
    """Do the work of a job that this run holds, and end the job. `work` returns whether there was anything to do.

    `end` writes the end of a run that finished its work, if the job has more work.
    """
    progress = Progress(room.catalog.jobs, held, callback, stop=room.stop)
    try:
        busy = work(progress)
    except LeftOff:
        # As if this process had died: the job was not cancelled, so the next daemon resumes it.
        room.catalog.jobs.disown(held.run)
        return BackfillRun(record.LEFT_OFF, room.catalog.jobs.find(held.name).as_dict())
    except Cancelled:
        return BackfillRun(record.CANCELLED, _end(room, held, states.CANCELLED, progress))
    except Fenced:
        room.catalog.jobs.disown(held.run)
        raise
    except Exception as raised:  # noqa: BLE001 - the edge of a run: its record has the error, and the log has the trace
        error = raised.error if isinstance(raised, CallbackFailed) else raised
        told = told_of(error)
        if told["kind"] in PASSING:
            # A caller that retries counts from the first failure since the last progress.
            progressed = progress.processed is not None and progress.processed > held.processed
            since_ms = None if progressed else held.failing_since_ms
            told["facts"].setdefault(FAILING_SINCE, clock.format_time(since_ms or clock.now_ms()))
        if not isinstance(error, FloodmarkError):
            log.get().exception("a backfill failed", job=held.name)
        try:
            job = _end(room, held, states.FAILED, progress, told)
        except FloodmarkError as second:
            raise error from second
        outcome = record.TIMED_OUT if isinstance(raised, TimedOut) else record.FAILED
        return BackfillRun(outcome, job, told)
    except BaseException:
        # Ctrl-C, or a signal to end the process: finished work stays, as after a cancel.
        _end(room, held, states.CANCELLED, progress)
        raise
    job = _end(room, held, states.DONE, progress) if end is None else end(progress)
    return BackfillRun(record.DONE if busy else record.NOTHING_TO_DO, job)


def _end(
    room: Room, held: Held, state: str, progress: Progress, error: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The job with its written end: a catalog that does not answer right after that fails no run."""
    return room.catalog.jobs.end(held, state, progress.processed, progress.total, error).as_dict()


def told_of(error: Exception) -> dict[str, Any]:
    """An error as the job stores it; its facts include the name of the chunk."""
    if isinstance(error, FloodmarkError):
        told = {**error.as_dict(), "exit_code": error.exit_code}
    else:
        told = {
            "kind": type(error).__name__,
            "message": without_secrets(str(error)),
            "facts": {},
            "advice": "",
            "exit_code": 1,
        }
    told["message"] = _shortened(told["message"])
    told["facts"] = {name: _shortened(text) for name, text in told["facts"].items()}
    return told


def _shortened(text: str) -> str:
    """Errors of Spark are as long as its plans: the log has all of it, the job enough to identify it."""
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
