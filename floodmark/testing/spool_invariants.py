"""Invariants of ingested rows: how far spools are fed, and what was put aside. A part of check_lake."""

from __future__ import annotations

from floodmark.catalog.spools import HELD
from floodmark.commit.catalog import Catalog
from floodmark.ingest.quarantine import FOLDER, leftovers, read_aside
from floodmark.storage import join


def check_spools(catalog: Catalog, version: int, broken: list[str]) -> None:
    spools = {row.table_id: row for row in catalog.spools.all()}
    entries = catalog.spools.quarantine(state=None)
    for row in spools.values():
        held = sum(one.rows for one in entries if one.table_id == row.table_id and one.state == HELD)
        if held != row.quarantined:
            broken.append(f"spool of {row.table}: {row.quarantined} rows in quarantine by its row, {held} really")
        if (row.version or 0) > version:
            broken.append(f"spool of {row.table} names version {row.version} of {version}")
    for one in entries:
        mine = spools.get(one.table_id)
        if mine is not None and mine.spool_id == one.spool_id and one.record >= mine.position:
            broken.append(f"quarantine {one.id} is of record {one.record}, which is not fed")
        if one.state == HELD:
            if not catalog.storage.exists(one.location):
                broken.append(f"quarantine {one.id}: its rows are gone")
            elif len(read_aside(catalog.storage, one.location)) != one.rows:
                broken.append(f"quarantine {one.id} does not hold {one.rows} rows")
    root = join(catalog.location, FOLDER)
    found = {entry.location.removeprefix(root + "/").partition("/")[0] for entry in catalog.storage.list(root + "/")}
    for table_id in sorted(found):
        # What a killed feed left may exist until the next feed has passed it; nothing else.
        if gone := leftovers(catalog, table_id):
            broken.append(f"objects of the quarantine are left over: {gone}")
