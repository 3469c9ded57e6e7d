"""References of a table that another writer changed: do its rows still refer to what is there, and nobody to what went?

The other tables are looked at as they are now, on the same branch; whoever publishes depends on them staying so. Reads
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField

from floodmark.catalog.catalog import Catalog
from floodmark.catalog.live import LiveFile, live_files
from floodmark.catalog.metadata import schema_of
from floodmark.catalog.references import references_of, referrers_of
from floodmark.errors import NotFound
from floodmark.model import Head
from floodmark.rows.references import held_values, missing_values
from floodmark.write.prune import key_fields


@dataclass(frozen=True)
class TableFiles:
    """A table with the files that it has, or would have."""

    head: Head
    metadata: TableMetadata
    schema: Schema
    files: Sequence[LiveFile] = field(repr=False)


@dataclass(frozen=True)
class Looked:
    """Why rows do not fit, empty if they do; and the other tables that this rests on."""

    reason: str = ""
    others: tuple[Head, ...] = ()


def look_at_references(catalog: Catalog, after: TableFiles, came: Sequence[str], went: Sequence[str]) -> Looked:
    """`after` is the table with the other writer's rows; `came` and `went` are the files that differ from ours."""
    others: dict[str, Head] = {}
    reason = _children(catalog, after, came, others) if came else ""
    if not reason and went and after.schema.identifier_field_ids:
        reason = _parents(catalog, after, went, others)
    return Looked(reason, tuple(others.values()))


def _children(catalog: Catalog, child: TableFiles, came: Sequence[str], others: dict[str, Head]) -> str:
    for reference in references_of(child.metadata.properties, child.schema, child.head.table_id):
        parent = _table(catalog, child, reference.parent, reference.parent_id)
        # A branch that is older than the key is older than the reference, and does not check it.
        if parent is None or [one.field_id for one in key_fields(parent.schema)] != [reference.parent_field_id]:
            continue
        column, key = child.schema.find_field(reference.field_id), key_fields(parent.schema)[0]
        missing = missing_values(catalog.storage, came, column, parent.files, key)
        if missing.count:
            examples = ", ".join(missing.examples[:3])
            return f"{missing.count} value(s) of {column.name} are no {parent.head.table}.{key.name}: {examples}"
        _remember(child, parent, others)
    return ""


def _parents(catalog: Catalog, parent: TableFiles, went: Sequence[str], others: dict[str, Head]) -> str:
    key: NestedField = key_fields(parent.schema)[0]
    for referrer in referrers_of(parent.metadata.properties):
        child = _table(catalog, parent, referrer.table, referrer.table_id)
        known = None if child is None else {column.field_id: column for column in child.schema.fields}
        if child is None or known is None or referrer.field_id not in known:
            continue
        column = known[referrer.field_id]
        held = held_values(catalog.storage, went, key, child.files, column, stay=parent.files)
        if held.count:
            examples = ", ".join(held.examples[:3])
            return f"{held.count} key(s) went to which {child.head.table}.{column.name} refers: {examples}"
        _remember(parent, child, others)
    return ""


def _table(catalog: Catalog, looked_at: TableFiles, name: str, table_id: str) -> TableFiles | None:
    """The other table, which may be the same one; None if it is not on this branch."""
    if table_id == looked_at.head.table_id:
        return looked_at
    try:
        head = catalog.history.head(name, looked_at.head.branch)
    except NotFound:
        return None
    if head.table_id != table_id:
        return None
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    return TableFiles(head, metadata, schema, live_files(catalog.files, head, schema))


def _remember(table: TableFiles, other: TableFiles, others: dict[str, Head]) -> None:
    if other.head.table_id != table.head.table_id:
        others[other.head.table] = other.head
