"""Whether "not found" would be a guess: a key that is not in a table may come with a chunk that is not loaded yet.

Judged for the state that was read: a chunk counts as loaded if a commit in the lineage of its version loaded it. A
branch from before a chunk, or an older version, lacks it, whatever main has now. How far the history reaches, the
catalog records (frontier.py); the source is never asked. Below the floor nothing is loaded, and nothing will be: there
a key that is not found does not exist.
"""

from __future__ import annotations

from floodmark.backfill.chunks.coverage import Reach
from floodmark.backfill.chunks.geometry import gaps, range_text, value_text
from floodmark.backfill.chunks.prune import database_now_ms
from floodmark.backfill.chunks.spec import stored_history
from floodmark.catalog.jobs import Job
from floodmark.commit.catalog import Catalog
from floodmark.errors import Incomplete
from floodmark.model import Head

GAPS_SHOWN_MAX = 5


def check_complete(catalog: Catalog, head: Head, version: int) -> None:
    """`Incomplete` if a history of this table lacks a chunk at this version."""
    for job in catalog.jobs.histories_of(head.table):
        _check_history(catalog, job, head, version)


def _check_history(catalog: Catalog, job: Job, head: Head, version: int) -> None:
    stored = stored_history(job)
    geometry = stored.geometry
    ids = {one.table: one.table_id for one in catalog.history.heads()} | {head.table: head.table_id}
    known = [catalog.chunks.newest(job.id, name, ids[name]) for name in stored.tables if name in ids]
    newest = max((number for number in known if number is not None), default=None)
    reach = Reach.of(stored, newest, database_now_ms(catalog))
    if not reach.knows_end:
        raise _incomplete(job, head, version, "all of it", None)
    done = catalog.chunks.done_on_line(job.id, head.table_id, version, reach.wanted)
    missing = gaps(reach.wanted, reach.floor, {head.table: done}, [head.table], geometry)
    if missing:
        shown = [" to ".join(range_text(start, end)) for start, end in missing[:GAPS_SHOWN_MAX]]
        shown += [f"and {len(missing) - len(shown)} more"] if len(missing) > len(shown) else []
        first = value_text(missing[0][0])
        raise _incomplete(job, head, version, ", ".join(shown), first)


def _incomplete(job: Job, head: Head, version: int, gaps: str, first: str | None) -> Incomplete:
    return Incomplete(
        "the key was not found, but a part of the table's history is not loaded",
        table=head.table,
        version=version,
        job=job.name,
        gaps=gaps,
        first_gap=first,
        advice=f"Ask again when `floodmark backfill show {job.name}` reports no gaps.",
    )
