"""A column that is filled by its expression no more: the way out of one that cannot be computed for somebody's rows.

One publish; the column's job is held meanwhile, so that no run of it goes on with what is unbound. What is filled
stays, what is not is null, and writers compute nothing. Crash after the publish: the job is interrupted, and started
again it finds the column unbound.
"""

from __future__ import annotations

import json

from floodmark.backfill.run import Room
from floodmark.catalog.chunks import FillRider
from floodmark.catalog.job import CANCELLED, DONE
from floodmark.catalog.metadata import schema_of
from floodmark.errors import Invalid, NotFound
from floodmark.model import MAIN, Commit, Head
from floodmark.write.add_column import bound_column, unbind_column
from floodmark.write.intent import Intent


def unbind(room: Room, table: str, column: str, actor: str) -> Commit:
    """`Invalid` if no expression fills it, `Busy` if a run is filling it. A job that is not done ends as cancelled."""
    room.get_ready()
    jobs = room.catalog.jobs

    def known_as(head: Head) -> str:
        metadata = room.catalog.files.metadata(head.metadata_location)
        return bound_column(metadata, schema_of(metadata, head), head, column).name

    column = room.catalog.at_head(table, known_as)
    intent = Intent("add_column", MAIN, actor, f"unbind {table}.{column}")
    try:
        job = jobs.find(f"{table}.{column}")
    except NotFound:
        return unbind_column(room.catalog, intent, table, column)
    spec = json.loads(job.spec)
    held = jobs.start(job.name, job.kind, job.table_names, spec["pinned"], spec["settings"], job.unit, job.actor)
    try:
        commit = unbind_column(room.catalog, intent, table, column, (FillRider(held.id, held.run, 0, 0),))
    except BaseException:
        jobs.end(held, job.state if job.is_over else CANCELLED, None, None, job.error)
        raise
    if job.state == DONE:
        jobs.end(held, DONE, None, None)
    else:
        told = Invalid("the column was unbound from its expression", table=table, column=column)
        jobs.end(held, CANCELLED, None, None, {**told.as_dict(), "exit_code": told.exit_code})
    return commit
