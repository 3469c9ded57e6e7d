"""What the lake says about itself: from the catalog alone, without Spark. The command, HTTP and the page share it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import ABANDONED, PUBLISHED, STAGED, STATES, to_operation
from floodmark.catalog.processes import is_dead
from floodmark.errors import Corrupt
from floodmark.model import Head


def lake_status(catalog: Catalog) -> dict[str, Any]:
    row = catalog.lake_row()
    heads = catalog.history.heads()
    commits = catalog.history.commits(limit=1)
    running, pending, unknown = _unfinished(catalog)
    with catalog.database.read() as tx:
        query = select(tables.audit.c.outcome, func.count()).group_by(tables.audit.c.outcome)
        healed = {outcome: count for outcome, count in tx.execute(query)}  # noqa: C416 - rows are not pairs to mypy
    if unknown:
        health = f"refused: {len(unknown)} operation(s) cannot be understood; see `floodmark doctor`"
    elif pending:
        health = (
            f"recovery pending: {len(pending)} dead operation(s); the next write or `floodmark recover` settles them"
        )
    else:
        health = "fine"
    return {
        "lake": row.location,
        "catalog": catalog.database.shown_url,
        "format": row.format,
        "incarnation": row.incarnation,
        "version": row.version,
        "tables": len(heads),
        "rows": sum(head.rows for head in heads),
        "files": sum(head.files for head in heads),
        "bytes": sum(head.size_bytes for head in heads),
        "last_commit": clock.format_time(commits[0].committed_ms) if commits else None,
        "running": running,
        "pending": pending,
        "unknown": unknown,
        "pins": catalog.pin_count(),
        "healed": healed,
        "health": health,
    }


def _unfinished(catalog: Catalog) -> tuple[list[str], list[str], list[str]]:
    """Operations at work, dead ones that healing will settle, and ones that it cannot understand."""
    rows, now = catalog.journal.unfinished()
    running, pending, unknown = [], [], []
    for row in rows:
        if row.state in (ABANDONED, PUBLISHED):
            continue
        if row.state not in STATES:
            unknown.append(row.id)
        elif catalog.journal.is_own(row) or not is_dead(row, now):
            running.append(row.id)
        elif _is_understood(catalog, row):
            pending.append(row.id)
        else:
            unknown.append(row.id)
    return running, pending, unknown


def _is_understood(catalog: Catalog, row: Any) -> bool:
    """Can a healer settle this dead operation?"""
    try:
        to_operation(row)
        if row.state == STAGED:
            catalog.journal.read_seal(row.id)
    except Corrupt:
        return False
    return True


def table_details(catalog: Catalog, head: Head) -> dict[str, Any]:
    metadata = catalog.files.metadata(head.metadata_location)
    schema = metadata.schema()
    return {
        "table": head.table,
        "table_id": head.table_id,
        "location": metadata.location,
        "rows": head.rows,
        "files": head.files,
        "bytes": head.size_bytes,
        "sequence": head.sequence,
        "version": head.version,
        "snapshot": head.snapshot,
        "columns": [
            {"name": field.name, "type": str(field.field_type), "required": field.required, "comment": field.doc or ""}
            for field in schema.fields
            if not field.name.startswith("_")
        ],
        "key": [schema.find_column_name(field_id) for field_id in schema.identifier_field_ids],
        "partition": [_partition_text(schema, field) for field in metadata.spec().fields],
        "sort": [
            f"{schema.find_column_name(field.source_id)} {field.direction.name.lower()}"
            for field in metadata.sort_order().fields
        ],
        "metadata_location": head.metadata_location,
    }


def _partition_text(schema: Any, field: Any) -> str:
    column = schema.find_column_name(field.source_id)
    transform = str(field.transform)
    if transform == "identity":
        return str(column)
    name, _, rest = transform.partition("[")
    return f"{name}({rest.rstrip(']') + ', ' if rest else ''}{column})"
