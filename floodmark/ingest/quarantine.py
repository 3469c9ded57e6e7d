"""The quarantine of a spool: rows that do not fit their table any more, kept as sent, to be retried or dropped.

An object beside the tables holds rows. It is written, whole and durable, before the publish that counts it; the publish
writes its row (SpoolRider). Its name has the spool, the first record of its rows, and an id, and is never used again:
nothing that a sealed operation refers to is ever overwritten. An object that no row in state `held` names is a
leftover, of a feed that died between the two, or of rows that were retried or dropped. It is deleted once nothing can
refer to it any more: its row is at its end, or its record is below the spool's position, or the spool is not the
table's. Until then recovery may still finish the feed that wrote it.

A retry receives all rows of an object once, by the id of its row (RetryRider). By key, the last arrival wins: a retry
with rows whose key was written or deleted since, or in the publish that put them aside, is refused, unless the caller
says which rows count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from floodmark import clock, log
from floodmark.catalog.spools import HELD, HeldRows, PutAside, RetryRider
from floodmark.commit.catalog import Catalog
from floodmark.engine import Engine
from floodmark.errors import BelowRetention, Conflict, Corrupt, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.feed_group import BadRow, RecordReader, SpooledRows, head_of
from floodmark.ingest.judge import Judges
from floodmark.ingest.receive import receive
from floodmark.model import Commit, Head
from floodmark.reading import ReadMoment
from floodmark.rows.keys import render_keys
from floodmark.storage import Storage, join

FOLDER = "quarantine"
RECORDS_SHOWN_MAX = 1000
EXAMPLES_MAX = 10
# A row's place among those that are retried; no column of a table has this name.
_PLACE = "_pos"
_NAME = re.compile(r"([0-9A-Z]{26})\.(\d{20})\.([0-9A-Z]{26})\.jsonl")


def put_aside(catalog: Catalog, table_id: str, spool_id: str, bad: Sequence[BadRow]) -> tuple[HeldRows, ...]:
    """Write rows that do not fit into an object; returns what the publish records of it. Empty if there are none."""
    if not bad:
        return ()
    entry, record = clock.new_id(), min(one.record for one in bad)
    location = join(folder_of(catalog, table_id), f"{spool_id}.{record:020d}.{entry}.jsonl")
    lines = [json.dumps(asdict(one), ensure_ascii=True).encode() + b"\n" for one in bad]
    catalog.storage.put(location, b"".join(lines))
    # Crash here: an object that nothing refers to. The records are fed again, and it is deleted after that.
    hit("feed.quarantined")
    counts = Counter(str(one.record) for one in bad)
    shown = dict(list(counts.items())[:RECORDS_SHOWN_MAX])
    return (HeldRows(entry, record, len(bad), json.dumps({**bad[0].error, "records": shown}), location),)


def read_aside(storage: Storage, location: str) -> list[BadRow]:
    """The rows of an object, in their order."""
    try:
        return [BadRow(**json.loads(line)) for line in storage.read(location).splitlines()]
    except (ValueError, TypeError) as error:
        raise Corrupt("an object of the quarantine cannot be read", location=location, cause=error) from error


def leftovers(catalog: Catalog, table_id: str) -> list[str]:
    """Objects of a table that nothing refers to, and nothing can any more."""
    # First the objects, then the catalog's rows: a row that comes in between is seen.
    found = [entry.location for entry in catalog.storage.list(folder_of(catalog, table_id) + "/")]
    if not found:
        return []
    # The position before the rows: a publish in between moves both, and then its object is known.
    spool = catalog.spools.get(table_id)
    known = {one.id: one.state for one in catalog.spools.quarantine(table_id, state=None)}
    gone = []
    for location in found:
        match = _NAME.fullmatch(location.rpartition("/")[2])
        if match is None:
            continue
        spool_id, record, entry = match[1], int(match[2]), match[3]
        passed = spool is None or spool.spool_id != spool_id or record < spool.position
        if known.get(entry) != HELD if entry in known else passed:
            gone.append(location)
    return gone


def clean(catalog: Catalog, table_id: str) -> int:
    """Delete leftovers; best effort: what cannot be deleted now is found the next time."""
    try:
        gone = leftovers(catalog, table_id)
        for location in gone:
            catalog.storage.delete(location)
    except Unavailable as error:
        log.get().warning("leftovers of a quarantine stay until the next run", table_id=table_id, cause=str(error))
        return 0
    return len(gone)


def folder_of(catalog: Catalog, table_id: str) -> str:
    return join(catalog.location, FOLDER, table_id)


# ── retry, and giving up ──


@dataclass(frozen=True)
class Retried:
    """The result of a retry; `left_out` rows stayed out, since the table has newer ones of their keys."""

    commit: Commit
    left_out: int = 0


def retry(
    engine: Engine, entry: str, *, evolve: bool = False, overwrite: bool = False, keep_newer: bool = False
) -> Retried:
    """Receive these rows, all of them or none. Invalid if one of them still does not fit; Conflict if its key was
    written since, unless the caller wants to `overwrite` that, or to leave the row out for good (`keep_newer`)."""
    catalog = engine.catalog
    aside = catalog.spools.put_aside(entry)
    if aside.state != HELD:
        clean(catalog, aside.table_id)
        if aside.version is None:
            raise Conflict("these rows were given up", id=entry)
        return Retried(catalog.history.commit(aside.version, outcome="already_committed"))
    head = head_of(catalog, aside.table_id)
    lines = read_aside(catalog.storage, aside.location)
    evolve, group = evolve or _may_evolve(lines), RecordReader(Judges(catalog).of(head.table)[1])
    rows = _read(group, lines, evolve)
    older = set[int]() if overwrite or not group.key else _older(engine, head, aside, rows, group.key)
    if older and not keep_newer:
        raise _superseded(aside, rows, group.key, older)
    if older:
        rows = _read(group, [line for place, line in enumerate(lines) if place not in older], evolve)
    commit = receive(
        engine,
        engine.actor,
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


def _read(group: RecordReader, lines: Sequence[BadRow], evolve: bool) -> SpooledRows:
    return group.read([line.text.encode(errors="surrogateescape") for line in lines], len(lines), evolve=evolve)


def _older(engine: Engine, head: Head, aside: PutAside, rows: SpooledRows, key: Sequence[str]) -> set[int]:
    """The places of rows whose key was written or deleted in the publish that set them aside, or after it."""
    keys = rows.judged.select(key).append_column(_PLACE, pa.array(range(rows.count), pa.int64()))
    try:
        # The newest state that is certainly from before.
        before = engine.catalog.history.tables_at(engine.catalog.history.resolve(at_ms=aside.at_ms - 1))
        since = next(old.sequence for old in before.values() if old.table_id == aside.table_id)
        found = set[int]()
        for batch in engine.reader.changes(head.table, since, None, ReadMoment()).arrow():
            changed = pa.Table.from_batches([batch]).select(key).cast(keys.select(key).schema)
            found.update(keys.join(changed, keys=list(key), join_type="left semi").column(_PLACE).to_pylist())
    except (BelowRetention, NotFound, StopIteration) as error:
        raise Conflict(
            "it is not known any more whether the keys of these rows were written since they were set aside",
            id=aside.id,
            advice="Look at the rows and at the table; then retry with --overwrite, or drop them.",
        ) from error
    return found


def _superseded(aside: PutAside, rows: SpooledRows, key: Sequence[str], older: Collection[int]) -> Conflict:
    examples = rows.judged.select(key).take(pa.array(sorted(older)[:EXAMPLES_MAX]))
    return Conflict(
        "keys of these rows were written or deleted since they were set aside",
        id=aside.id,
        rows=len(older),
        examples="; ".join(render_keys(examples)),
        advice="--keep-newer discards these rows and loads the others; --overwrite loads all.",
    )


def drop(catalog: Catalog, entry: str) -> PutAside:
    """Give these rows up for good."""
    aside = catalog.spools.drop(entry)
    hit("spool_quarantine.dropped")
    clean(catalog, aside.table_id)
    return aside


def _may_evolve(lines: list[BadRow]) -> bool:
    """True only if the sender of each row allowed it."""
    return all(line.evolve for line in lines)
