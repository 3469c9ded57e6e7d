"""Recording: the rows that a publish leaves in the history, inside the door's transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, update

from floodmark.catalog import tables
from floodmark.catalog.build import BuiltTable
from floodmark.catalog.journal import Operation
from floodmark.model import TableCommit


def record_commit(
    tx: Connection,
    operation: Operation,
    built_tables: Sequence[BuiltTable],
    version: int,
    parent: int,
    committed_ms: int,
) -> None:
    """History, the branch's head, and the lake's version. A dropped table's row has no metadata location."""
    tx.execute(
        insert(tables.commits).values(
            version=version,
            parent=parent,
            branch=operation.branch,
            operation=operation.id,
            kind=operation.kind,
            actor=operation.actor,
            message=operation.message,
            committed_ms=committed_ms,
            state="live",
        )
    )
    rows = [
        {
            "version": version,
            "table_id": built.new.table_id,
            "table_name": built.new.table,
            "snapshot": built.new.snapshot,
            "sequence": built.new.sequence,
            "schema_id": built.new.schema_id,
            "spec_id": built.new.spec_id,
            "manifest_list": built.new.manifest_list,
            "metadata_location": built.new.metadata_location,
            "rows_added": built.edit.rows_added,
            "rows_updated": built.edit.rows_updated,
            "rows_deleted": built.edit.rows_deleted,
            "rows_total": built.new.rows,
            "files_total": built.new.files,
            "bytes_total": built.new.size_bytes,
        }
        for built in built_tables
    ]
    if rows:
        tx.execute(insert(tables.commit_tables), rows)
    # Also if no table moved: who waits for the turn must not wait for its lease.
    tx.execute(delete(tables.turns).where(tables.turns.c.operation == operation.id))
    _record_deletions(tx, built_tables, version)
    tx.execute(update(tables.branches).where(tables.branches.c.name == operation.branch).values(head_version=version))
    tx.execute(update(tables.lake).where(tables.lake.c.id == 1).values(version=version))


def _record_deletions(tx: Connection, built_tables: Sequence[BuiltTable], version: int) -> None:
    deletions = [
        {
            "table_id": built.new.table_id,
            "sequence": built.new.sequence,
            "location": file.path,
            "version": version,
            "rows_total": file.rows,
            "size_bytes": file.size_bytes,
        }
        for built in built_tables
        for file in built.edit.deletions
    ]
    if deletions:
        tx.execute(insert(tables.deletions), deletions)


def table_commit(built: BuiltTable) -> TableCommit:
    """What the commit did to a table, for whoever made it."""
    new = built.new
    return TableCommit(
        table=new.table,
        table_id=new.table_id,
        snapshot=new.snapshot,
        sequence=new.sequence,
        rows_added=built.edit.rows_added,
        rows_updated=built.edit.rows_updated,
        rows_deleted=built.edit.rows_deleted,
        rows_total=new.rows,
        files_total=new.files,
    )
