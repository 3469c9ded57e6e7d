"""The state of the lake's jobs: those that matter now, and those that need an operator.

Fails closed: if the jobs cannot be read, or one of them cannot be understood, the rest of the lake's state is still
reported, and health says that the lake is not ready, and why. A job counts as well only if it is known to be well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from floodmark import clock, log
from floodmark.catalog.jobs import CANCELLED, FAILED, INTERRUPTED, RUNNING, UNKNOWN, Job
from floodmark.commit.catalog import Catalog
from floodmark.json_form import JsonObject, Reported, StoredError, stored_error

NOT_READY = "not ready"
TROUBLES_MAX = 5
REASON_CHARACTERS_MAX = 300


@dataclass(frozen=True)
class JobLine(Reported):
    """A job in short: `processed` of `total` `unit`s."""

    job: str
    id: str
    kind: str
    tables: tuple[str, ...]
    status: str
    processed: int
    total: int | None
    unit: str
    percent: float | None
    rate: float | None
    eta_s: float | None
    rows: int
    unfilled: int
    error: StoredError | None
    holder: str | None
    cancel_asked: bool
    started: str | None
    updated: str
    stalled_since: str | None
    ended: str | None


@dataclass(frozen=True)
class JobReport(JobLine):
    """A job with all that is known of it, as `floodmark backfill show --json`."""

    publishes: int
    actor: str
    created: str
    acknowledged: str | None
    settings: JsonObject


@dataclass(frozen=True)
class JobsState:
    """The jobs that matter now, in short; None if they cannot be read, and why. `troubles` need an operator.

    `every` job is of the same read: a second read could fail although the first one succeeded.
    """

    shown: tuple[JobLine, ...] | None
    error: str | None = None
    troubles: tuple[str, ...] = ()
    every: tuple[Job, ...] = ()


def read_jobs(catalog: Catalog) -> JobsState:
    try:
        every = catalog.jobs.all()
        jobs = shown_jobs(catalog, every)
        short = tuple(map(_in_short, jobs))
    except Exception as error:  # noqa: BLE001 - any error: a health answer that fails here must not look well
        log.get().warning("jobs cannot be read", cause=str(error))
        return JobsState(None, _reason(error))
    return JobsState(short, None, tuple(text for text in map(_trouble, jobs) if text), tuple(every))


def shown_jobs(catalog: Catalog, every: Sequence[Job]) -> list[Job]:
    """Jobs that run or wait, those that died or cannot be understood, and failures that are not acknowledged."""
    with catalog.database.read() as tx:
        now_ms = catalog.database.now_ms(tx)
    return [job for job in every if job.is_shown(now_ms)]


def not_ready(error: str) -> str:
    return f"{NOT_READY}: jobs cannot be read ({error})"


def trouble_text(troubles: Sequence[str]) -> list[str]:
    """The first few, and the number of the others."""
    left = len(troubles) - TROUBLES_MAX
    return [*troubles[:TROUBLES_MAX], *([f"{left} more jobs"] if left > 0 else [])]


def cancel_outcome(before: JobReport, after: JobReport) -> str:
    """The outcome of asking a job to stop: it is stopped, it will stop, or it had ended."""
    if after.cancel_asked:
        return "asked"
    return CANCELLED if after.status == CANCELLED != before.status else "nothing_to_do"


def ack_outcome(before: JobReport, after: JobReport) -> str:
    """The outcome of acknowledging a failure."""
    seen = after.acknowledged is not None and before.acknowledged is None
    return "acknowledged" if seen else "nothing_to_do"


def progress_of(job: JobLine) -> str:
    """How far a job is: 3 of 9 chunks. A job that follows a range without an end is never done."""
    if job.total is None:
        return f"{job.processed:,} {job.unit}"
    if job.percent is None:
        return f"{job.processed:,} {job.unit}, follows"
    return f"{job.processed:,} of {job.total:,} {job.unit}"


def rate_of(job: JobLine) -> str | None:
    """How fast a job is: 12.5 chunks/s; None if that is unknown."""
    if job.rate is None:
        return None
    return f"{job.rate:,.0f} {job.unit}/s" if job.rate >= 100 else f"{job.rate:.3g} {job.unit}/s"


def job_report(job: Job) -> JobReport:
    return report_of(job.as_dict())


def report_of(facts: Mapping[str, Any]) -> JobReport:
    """A job as `lake.backfill` returns it to a user."""
    typed = {
        "tables": tuple(facts["tables"]),
        "error": stored_error(facts["error"]),
        "settings": JsonObject(facts["settings"]),
    }
    return JobReport(**{**facts, **typed})


def _in_short(job: Job) -> JobLine:
    whole = job_report(job)
    return JobLine(**{one.name: getattr(whole, one.name) for one in fields(JobLine)})


def _trouble(job: Job) -> str | None:
    if job.status == FAILED:
        kind = (job.error or {}).get("kind", "unknown")
        return f"job {job.name} failed ({kind})"
    if job.status == INTERRUPTED:
        return f"job {job.name} interrupted"
    if job.status == RUNNING and job.failing_since_ms is not None:
        kind = (job.error or {}).get("kind", "unknown")
        return f"job {job.name} waits since {clock.format_time(job.failing_since_ms)} ({kind})"
    if job.stalled_since_ms is not None:
        return f"job {job.name} without progress since {clock.format_time(job.stalled_since_ms)}"
    return f"job {job.name} in an unknown state ({job.state})" if job.status == UNKNOWN else None


def _reason(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0] or type(error).__name__
    return text if len(text) <= REASON_CHARACTERS_MAX else f"{text[: REASON_CHARACTERS_MAX - 1]}…"
