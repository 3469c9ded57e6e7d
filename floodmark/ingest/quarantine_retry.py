"""Rows in a spool's quarantine come into their table after all, once; or are given up for good.

A retry is one receive of all rows of an object, with the row of the quarantine as its identity (RetryRider): a second
one, or one after a crash, finds it done. The object is deleted when its row is at its end; a crash before that leaves
an object that the next of these commands, or the next opening of the spool, deletes.

By key, the last arrival wins: a row whose key was written or deleted since it was put aside, or in the very publish
that put it aside, is older news. A retry that has such rows is refused, unless the caller says which shall count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.spool_rider import RetryRider
from floodmark.catalog.spools import HELD, PutAside
from floodmark.errors import BelowRetention, Conflict, NotFound
from floodmark.failpoints import hit
from floodmark.ingest.feed_group import Bad, Group, Rows
from floodmark.ingest.feed_publish import group_of, table_gone
from floodmark.ingest.feed_quarantine import clean, read_aside
from floodmark.model import Commit, Head
from floodmark.rows.keys import render_keys

if TYPE_CHECKING:
    from floodmark.lake import Lake

EXAMPLES_MAX = 10
# Where a row stands among those that are retried; no column of a table has this name.
_PLACE = "_pos"


@dataclass(frozen=True)
class Retried:
    """What came of a retry; `left_out` rows stayed out, since newer ones of their keys are there."""

    commit: Commit
    left_out: int = 0


def retry(
    lake: Lake, entry: str, *, evolve: bool = False, overwrite: bool = False, keep_newer: bool = False
) -> Retried:
    """Bring these rows in, all of them or none. Invalid if one of them still does not fit; Conflict if its key was
    written since, unless it is to `overwrite` that, or to be left out for good (`keep_newer`)."""
    catalog = lake.catalog
    aside = catalog.spools.put_aside(entry)
    if aside.state != HELD:
        clean(catalog, aside.table_id)
        if aside.version is None:
            raise Conflict("these rows were given up", id=entry)
        return Retried(catalog.history.commit(aside.version, outcome="already_committed"))
    head = _head(catalog, aside)
    lines = read_aside(catalog.storage, aside.location)
    evolve, group = evolve or _may_evolve(lines), group_of(catalog, head)
    rows = _read(group, lines, evolve)
    older = set[int]() if overwrite or not group.key else _older(lake, head, aside, rows, group.key)
    if older and not keep_newer:
        raise _superseded(aside, rows, group.key, older)
    if older:
        rows = _read(group, [line for place, line in enumerate(lines) if place not in older], evolve)
    commit = lake.receive(
        head.table,
        rows.data,
        rider=RetryRider(entry),
        table_id=aside.table_id,
        evolve=evolve,
        from_json=rows.from_json,
        message=f"retried from the quarantine: {entry}",
    )
    hit("spool_quarantine.retried")
    clean(catalog, aside.table_id)
    return Retried(commit, len(older))


def _read(group: Group, lines: Sequence[Bad], evolve: bool) -> Rows:
    return group.read([line.text.encode(errors="surrogateescape") for line in lines], len(lines), evolve=evolve)


def _older(lake: Lake, head: Head, aside: PutAside, rows: Rows, key: Sequence[str]) -> set[int]:
    """The places of rows whose key was written or deleted in the publish that put them aside, or after it."""
    keys = rows.judged.select(key).append_column(_PLACE, pa.array(range(rows.count), pa.int64()))
    try:
        # The newest state that is surely from before.
        before = lake.catalog.history.tables_at(lake.catalog.history.resolve(at_ms=aside.at_ms - 1))
        since = next(old.sequence for old in before.values() if old.table_id == aside.table_id)
        found = set[int]()
        for batch in lake.changes(head.table, since).arrow():
            changed = pa.Table.from_batches([batch]).select(key).cast(keys.select(key).schema)
            found.update(keys.join(changed, keys=list(key), join_type="left semi").column(_PLACE).to_pylist())
    except (BelowRetention, NotFound, StopIteration) as error:
        raise Conflict(
            "whether the keys of these rows were written since they were put aside is not known any more",
            id=aside.id,
            advice="Look at the rows and at the table; then retry with --overwrite, or drop them.",
        ) from error
    return found


def _superseded(aside: PutAside, rows: Rows, key: Sequence[str], older: Collection[int]) -> Conflict:
    examples = rows.judged.select(key).take(pa.array(sorted(older)[:EXAMPLES_MAX]))
    return Conflict(
        "keys of these rows were written or deleted since they were put aside",
        id=aside.id,
        rows=len(older),
        examples="; ".join(render_keys(examples)),
        advice="--keep-newer leaves these rows out for good, and brings in the others; --overwrite brings in all.",
    )


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
