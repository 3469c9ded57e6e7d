"""Which tables drifted: their pointer is not where the publisher left it, and what else the catalog has for them.

One query each, no file; drift.py finds out what happened. Apart from it because it reads metadata, and a question about
state must not wait for Iceberg's code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sqlalchemy import and_, select

from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.model import MAIN

if TYPE_CHECKING:
    from floodmark.commit.drift import Drift


def drifted_tables(database: Database) -> dict[str, list[str]]:
    """The tables whose pointer is not where the publisher left it, each with the branches that have it; main first."""
    head, pointer, commit = tables.heads, tables.iceberg_tables, tables.commit_tables
    newest = (
        select(commit.c.metadata_location)
        # Not a drop on another branch: the pointer is where the table's last metadata is.
        .where(commit.c.table_id == head.c.table_id, commit.c.metadata_location != "")
        .order_by(commit.c.version.desc())
        .limit(1)
        .scalar_subquery()
    )
    named = and_(
        pointer.c.table_name == head.c.table_name,
        pointer.c.catalog_name == tables.CATALOG_NAME,
        pointer.c.table_namespace == tables.NAMESPACE,
    )
    query = (
        select(head.c.table_name, head.c.branch, pointer.c.metadata_location, newest.label("known"))
        .join(pointer, named, isouter=True)
        .order_by(head.c.table_name)
    )
    found: dict[str, list[str]] = {}
    with database.read() as tx:
        for row in tx.execute(query):
            if row.metadata_location != row.known:
                found.setdefault(row.table_name, []).append(row.branch)
    return {table: sorted(branches, key=lambda name: (name != MAIN, name)) for table, branches in found.items()}


def with_names(database: Database, drift: Drift, location: str) -> Drift:
    """Of a table that was dropped: under which other names the catalog has it. `location` is its folder."""
    # Late: a question about which tables drifted does not wait for Iceberg's code.
    from floodmark.commit.drift import DROPPED

    if drift.happened != DROPPED:
        return drift
    row = tables.iceberg_tables
    query = select(row.c.table_namespace, row.c.table_name, row.c.metadata_location)
    with database.read() as tx:
        rows = [one for one in tx.execute(query) if str(one.metadata_location or "").startswith(location + "/")]
    names = (
        one.table_name if one.table_namespace == tables.NAMESPACE else f"{one.table_namespace}.{one.table_name}"
        for one in rows
    )
    return replace(drift, other_names=tuple(sorted(names)))
