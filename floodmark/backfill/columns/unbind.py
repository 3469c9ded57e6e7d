"""Unbind a column from its expression: for an expression that cannot be computed for some rows.

One publish; it holds the column's job meanwhile, so that no run of it continues with an unbound column. Filled rows
stay, the others are null, and writers compute nothing. The job ends in that publish: after a crash before it, the
column is bound and its job interrupted; after a crash behind it, nothing is left to do.

A run of the job that unbinds its own column may die before its end: it cannot continue if files hold the column by
then. Such a job ends when an operator resumes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata

from floodmark import runs
from floodmark.catalog.jobs import CANCELLED, DONE, INTERRUPTED, EndRider, HeldJob, Job
from floodmark.commit.fills import is_unbound
from floodmark.commit.intent import Intent
from floodmark.commit.metadata import schema_of
from floodmark.errors import Fenced, Invalid, NotFound
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import JobContext
from floodmark.json_form import Json
from floodmark.model import MAIN, Commit, Head
from floodmark.write.add_column import bound_column, can_bind_anew, find_column, unbind_column

T = TypeVar("T")


def unbind(context: JobContext, table: str, column: str, actor: str) -> Commit:
    """`Invalid` if no expression fills it, `Busy` if a run is filling it. An unfinished job ends as cancelled."""
    context.engine.get_ready()
    jobs = context.catalog.jobs
    column = _at_head(context, table, lambda metadata, schema, head: bound_column(metadata, schema, head, column).name)
    intent = Intent("add_column", MAIN, actor, f"unbind {table}.{column}")
    try:
        job = jobs.find(f"{table}.{column}")
    except NotFound:
        return unbind_column(context.catalog, intent, table, column)
    held = _hold(context, job)
    state, error = (DONE, None) if job.state == DONE else (CANCELLED, _unbound_error(table, column))
    try:
        commit = unbind_column(context.catalog, intent, table, column, (EndRider(held.id, held.run, state, error),))
    except BaseException:
        with suppress(Fenced):  # then the publish succeeded although its reply was lost: it ended the job
            jobs.end(held, job.state if job.is_over else CANCELLED, None, None, job.error)
        raise
    jobs.ended(held)
    return commit


def end_unbound(context: JobContext, job: Job) -> BackfillRun | None:
    """End a job whose run died, if its column was unbound and cannot be bound again; None if it can continue."""
    if job.status != INTERRUPTED:
        return None
    table, column, table_id = (str(job.settings.get(name)) for name in ("table", "column", "table_id"))

    def is_over(metadata: TableMetadata, schema: Schema, head: Head) -> bool:
        field = find_column(schema, column)
        if field is None or head.table_id != table_id or not is_unbound(metadata.properties, field.field_id):
            return False
        return not can_bind_anew(context.catalog, metadata, head, field)

    context.engine.get_ready()
    try:
        if not _at_head(context, table, is_over):
            return None
    except NotFound:
        return None
    error = _unbound_error(table, column)
    ended = context.catalog.jobs.end(_hold(context, job), CANCELLED, None, None, error)
    return BackfillRun(runs.CANCELLED, ended.as_dict(), error)


def _at_head(context: JobContext, table: str, look: Callable[[TableMetadata, Schema, Head], T]) -> T:
    def read(head: Head) -> T:
        metadata = context.catalog.files.metadata(head.metadata_location)
        return look(metadata, schema_of(metadata, head), head)

    return context.catalog.at_head(table, read)


def _hold(context: JobContext, job: Job) -> HeldJob:
    """Hold a job with its last start settings. Busy if a living run holds it."""
    spec = json.loads(job.spec)
    return context.catalog.jobs.start(
        job.name, job.kind, job.table_names, spec["pinned"], spec["settings"], job.unit, job.actor
    )


def _unbound_error(table: str, column: str) -> dict[str, Json]:
    error = Invalid("the column was unbound from its expression", table=table, column=column)
    return {**error.as_dict(), "exit_code": error.exit_code}
