"""Rows of a spool that do not fit their table any more: kept as they were sent, in objects beside the tables.

An object is written, whole and durable, before the publish that counts it; the publish writes its row (SpoolRider).
Its name holds the spool, the first record that rows of it are of, and an id, and is never used again: so nothing that a
sealed operation refers to is ever overwritten. An object that no row in state `held` names is a leftover: of a feed
that was killed or failed between the two, or of rows that were retried or given up. It is deleted once nobody can refer
to it any more, which the catalog alone says: its row is at its end, or its record is below the position of its spool,
or its spool is not the table's. Until then a healer may still finish the feed that wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict

from floodmark import clock, log
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.spool_rider import Held
from floodmark.catalog.spools import HELD
from floodmark.errors import Corrupt, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.feed_group import Bad
from floodmark.storage import Storage, join

FOLDER = "quarantine"
RECORDS_TOLD_MAX = 1000
_NAME = re.compile(r"([0-9A-Z]{26})\.(\d{20})\.([0-9A-Z]{26})\.jsonl")


def put_aside(catalog: Catalog, table_id: str, spool_id: str, bad: Sequence[Bad]) -> tuple[Held, ...]:
    """Write rows that do not fit into an object; what the publish has to say of it. Nothing, if there are none."""
    if not bad:
        return ()
    entry, record = clock.new_id(), min(one.record for one in bad)
    location = join(folder_of(catalog, table_id), f"{spool_id}.{record:020d}.{entry}.jsonl")
    lines = [json.dumps(asdict(one), ensure_ascii=True).encode() + b"\n" for one in bad]
    catalog.storage.put(location, b"".join(lines))
    # Crash here: an object that nothing refers to. The records are fed again, and it is deleted after that.
    hit("feed.quarantined")
    counts: dict[str, int] = {}
    for one in bad:
        counts[str(one.record)] = counts.get(str(one.record), 0) + 1
    told = dict(list(counts.items())[:RECORDS_TOLD_MAX])
    return (Held(entry, record, len(bad), json.dumps({**bad[0].error, "records": told}), location),)


def read_aside(storage: Storage, location: str) -> list[Bad]:
    """The rows of an object, in their order."""
    try:
        return [Bad(**json.loads(line)) for line in storage.read(location).splitlines()]
    except (ValueError, TypeError) as error:
        raise Corrupt("an object of the quarantine cannot be read", location=location, cause=error) from error


def leftovers(catalog: Catalog, table_id: str) -> list[str]:
    """Objects of a table that nothing refers to, and nothing can any more."""
    # First what is there, then what the catalog says: a row that comes in between is seen.
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
        log.get().warning("leftovers of a quarantine stay for the next time", table_id=table_id, cause=str(error))
        return 0
    return len(gone)


def folder_of(catalog: Catalog, table_id: str) -> str:
    return join(catalog.location, FOLDER, table_id)
