"""Rows in a spool's quarantine come into their table after all, once; or are given up for good.

A retry is one receive of all rows of an object, with the row of the quarantine as its identity (RetryRider): a second
one, or one after a crash, finds it done. The object is deleted when its row is at its end; a crash before that leaves
an object that the next of these commands, or the next opening of the spool, deletes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.spool_rider import RetryRider
from floodmark.catalog.spools import HELD, PutAside
from floodmark.errors import Conflict
from floodmark.failpoints import hit
from floodmark.ingest.feed_group import Bad
from floodmark.ingest.feed_publish import group_of, table_gone
from floodmark.ingest.feed_quarantine import clean, read_aside
from floodmark.model import Commit, Head

if TYPE_CHECKING:
    from floodmark.lake import Lake


def retry(lake: Lake, entry: str, *, evolve: bool = False) -> Commit:
    """Bring these rows in, all of them or none. Invalid if one of them still does not fit."""
    catalog = lake.catalog
    aside = catalog.spools.put_aside(entry)
    if aside.state != HELD:
        clean(catalog, aside.table_id)
        if aside.version is None:
            raise Conflict("these rows were given up", id=entry)
        return catalog.history.commit(aside.version, outcome="already_committed")
    head = _head(catalog, aside)
    lines = read_aside(catalog.storage, aside.location)
    rows = group_of(catalog, head).read(
        [line.text.encode(errors="surrogateescape") for line in lines], len(lines), evolve=evolve or _may_evolve(lines)
    )
    commit = lake.receive(
        head.table,
        rows.data,
        rider=RetryRider(entry),
        table_id=aside.table_id,
        evolve=evolve or _may_evolve(lines),
        from_json=rows.from_json,
        message=f"retried from the quarantine: {entry}",
    )
    hit("spool_quarantine.retried")
    clean(catalog, aside.table_id)
    return commit


def drop(catalog: Catalog, entry: str) -> PutAside:
    """Give these rows up for good."""
    aside = catalog.spools.drop(entry)
    hit("spool_quarantine.dropped")
    clean(catalog, aside.table_id)
    return aside


def _head(catalog: Catalog, aside: PutAside) -> Head:
    found = next((head for head in catalog.history.heads() if head.table_id == aside.table_id), None)
    if found is None:
        raise table_gone(aside.table_id)
    return found


def _may_evolve(lines: list[Bad]) -> bool:
    """Only if whoever sent each of them allowed it."""
    return all(line.evolve for line in lines)
