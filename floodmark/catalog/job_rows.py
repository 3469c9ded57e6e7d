"""Rows of fm_jobs: how they are found, and each as a Job.

What cannot be understood is Corrupt, by the name of its job, and kept.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, or_, select

from floodmark.catalog import tables
from floodmark.catalog.job import Job
from floodmark.errors import Corrupt, Fenced, NotFound


def _looking() -> Any:
    job, process = tables.jobs, tables.processes
    columns = [job.c.id.label("job_id"), *(column for column in job.c if column.name != "id")]
    return (
        select(*columns, *(column for column in process.c if column.name != "id"))
        .join(process, process.c.id == job.c.owner_process, isouter=True)
        .order_by(job.c.id.desc())
    )


LOOKING = _looking()


def to_job(row: Any, alive: bool, now_ms: int) -> Job:
    """A row of LOOKING as a job, looked at now; Corrupt if it cannot be understood."""
    try:
        spec = json.loads(row.spec)
        names = tuple(str(name) for name in json.loads(row.table_names))
        error = None if row.error is None else dict(json.loads(row.error))
        settings = {**spec["pinned"], **spec["settings"]}
    except (ValueError, TypeError, KeyError) as problem:
        raise Corrupt("a job's record cannot be understood", job=row.name, cause=problem) from problem
    return Job(
        row.job_id,
        row.name,
        row.kind,
        names,
        row.spec,
        row.state,
        row.processed,
        row.total,
        row.unit,
        row.resumed_from,
        row.rows_done,
        row.unfilled,
        row.publishes,
        error,
        row.actor,
        row.created_ms,
        row.updated_ms,
        row.started_ms,
        row.ended_ms,
        row.acknowledged_ms,
        row.cancel_ms,
        row.owner_run,
        alive,
        (f"{row.host}:{row.pid}" if row.pid is not None else "this process") if alive else None,
        settings,
        now_ms,
    )


def find_id(tx: Connection, name: str) -> str | None:
    """The id of a job by its name or, if none is called so, by its id."""
    job = tables.jobs
    mine = or_(job.c.name == name, job.c.id == name)
    found = {str(row.name): str(row.id) for row in tx.execute(select(job.c.name, job.c.id).where(mine))}
    return found.get(name, next(iter(found.values()), None))


def no_job(tx: Connection, name: str) -> NotFound:
    newest = select(tables.jobs.c.name).order_by(tables.jobs.c.id.desc()).limit(10)
    known = tx.execute(newest).scalars().all()
    return NotFound(
        "there is no such job", job=name, jobs=",".join(known) or "none", advice="`floodmark backfill list` shows them."
    )


def check_job(tx: Connection, job: str, run: str | None = None, *, name: str | None = None, lock: bool = False) -> Any:
    """The job's row: Corrupt if it is gone, Fenced unless `run`, where it is given, still holds the job."""
    row = tables.jobs
    query = select(row.c.owner_run, row.c.cancel_ms, row.c.started_ms).where(row.c.id == job)
    found = tx.execute(query.with_for_update() if lock else query).first()
    if found is None:
        raise vanished(name or job)
    if run is not None and found.owner_run != run:
        advice = "Look at `floodmark backfill show`."
        raise Fenced("another run has taken this job over", job=name or job, advice=advice)
    return found


def vanished(job: str) -> Corrupt:
    return Corrupt("the job vanished from the catalog", job=job, advice="Start it again: what is done stays.")
