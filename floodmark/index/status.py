"""The indexes of a table as they are: on which columns, in which state, with which segments, and what they cover.

Read from the catalog, the table's metadata and the heads of segments; no rows. Coverage is what a lookup would find
now: a damaged segment counts as not covering, and is noted (I11).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField

from floodmark.catalog.indexes import KEY, IndexRow, SegmentRow, WantedIndex
from floodmark.commit.catalog import Catalog
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import schema_of
from floodmark.index.covering import Coverings, form_of
from floodmark.index.records import DROPPED, LIVE, UNUSABLE, IndexLine, IndexStatus
from floodmark.index.wanted import names_of, wanted_key
from floodmark.index.writing import columns_on, holds
from floodmark.model import Head
from floodmark.rows.schema import user_fields


@dataclass(frozen=True)
class TableIndex:
    """An index of a table, its row (None: the first write makes it), its columns, and what is reported of it.

    `columns` None: the table has lost one of them; `line` names them as they were called last.
    """

    wanted: WantedIndex
    row: IndexRow | None
    columns: tuple[NestedField, ...] | None
    line: IndexLine


def table_indexes(catalog: Catalog, head: Head) -> list[TableIndex]:
    """The indexes of a table, the key's first; those that were dropped or are unusable, too."""
    if not catalog.indexes.known:
        return []
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    rows = catalog.indexes.of_table(head.table_id)
    segments = catalog.indexes.segments(head.table_id)
    found = [_table_index(head, metadata, schema, row, segments) for row in rows]
    key = wanted_key(schema)
    if key is not None and not any((row.kind, row.field_ids) == (KEY, key.field_ids) for row in rows):
        line = IndexLine(head.table, names_of(schema, key.field_ids), KEY, LIVE, None, 0, 0, 0)
        found.append(TableIndex(key, None, columns_on(schema, key.field_ids), line))
    return sorted(found, key=lambda one: (one.line.kind != KEY, one.line.on))


def index_status(catalog: Catalog, coverings: Coverings, head: Head) -> list[IndexStatus]:
    """The indexes of a table, and how much of this state each covers."""
    indexes = table_indexes(catalog, head)
    if not indexes:
        return []
    schema = schema_of(catalog.files.metadata(head.metadata_location), head)
    files = live_files(catalog.files, head, schema) if head.manifest_list else []
    return [_status(coverings, one, files) for one in indexes]


def uncovered_files(catalog: Catalog, coverings: Coverings, head: Head) -> tuple[list[LiveFile], list[LiveFile]] | None:
    """The data files of a state, and those that some index in use does not cover; None: no index is in use."""
    used = [one for one in table_indexes(catalog, head) if one.row is not None and one.line.state == LIVE]
    if not used:
        return None
    schema = schema_of(catalog.files.metadata(head.metadata_location), head)
    files = live_files(catalog.files, head, schema) if head.manifest_list else []
    left: set[str] = set()
    for one in used:
        left |= {file.path for file in _uncovered(coverings, one, files)}
    return files, [file for file in files if file.path in left]


def _uncovered(coverings: Coverings, index: TableIndex, files: Sequence[LiveFile]) -> list[LiveFile]:
    if index.row is None or index.line.state != LIVE or not files:
        return list(files)
    left = coverings.use(index.row, [file.path for file in files], lambda covering: covering.uncovered)
    return [files[place] for place in left]


def _table_index(
    head: Head, metadata: TableMetadata, schema: Schema, row: IndexRow, segments: Sequence[SegmentRow]
) -> TableIndex:
    columns = columns_on(schema, row.field_ids)
    state, reason = LIVE, None
    if not row.is_live:
        state = DROPPED
    elif columns is None:
        state, reason = UNUSABLE, "the table has lost a column of it"
    elif form_of(row) is None:
        state, reason = UNUSABLE, "a newer Floodmark made it"
    mine = [one for one in segments if one.index_id == row.id and one.retired_ms is None]
    used = [one for one in mine if not one.broken]
    line = IndexLine(
        table=head.table,
        on=_names(metadata, schema, row.field_ids),
        kind=row.kind,
        state=state,
        reason=reason,
        segments=len(used),
        broken=len(mine) - len(used),
        bytes=sum(one.size_bytes for one in used),
    )
    return TableIndex(row.wanted, row, columns, line)


def _names(metadata: TableMetadata, schema: Schema, field_ids: Sequence[int]) -> tuple[str, ...]:
    """The columns by their names, of those that are gone the last ones."""
    names = {}
    for known in (*sorted(metadata.schemas, key=lambda one: one.schema_id), schema):
        names.update({field.field_id: field.name for field in user_fields(known)})
    return tuple(names.get(one, f"column {one}") for one in field_ids)


def _status(coverings: Coverings, index: TableIndex, files: Sequence[LiveFile]) -> IndexStatus:
    uncovered = _uncovered(coverings, index, files)
    rows = sum(file.rows for file in files)
    return IndexStatus(
        **asdict(index.line),
        files=len(files),
        files_covered=len(files) - len(uncovered),
        rows=rows,
        rows_covered=rows - sum(file.rows for file in uncovered),
        advice=_advice(index, uncovered),
    )


def _advice(index: TableIndex, uncovered: Sequence[LiveFile]) -> str:
    line, on = index.line, ",".join(index.line.on)
    if line.state == DROPPED:
        return f"`{shlex.join(['floodmark', 'index', 'create', line.table, '--on', on])}` creates it again."
    if index.columns is None:
        return f"`{shlex.join(['floodmark', 'index', 'drop', line.table, '--on', on, '--apply'])}` drops it."
    if line.state == UNUSABLE:
        return "Upgrade Floodmark."
    columns = index.columns
    if any(holds(file, columns) for file in uncovered):
        return f"`floodmark maintain index {line.table}` covers the other files; until then lookups scan them."
    if uncovered:
        return "The other files are older than a column of it: lookups scan them until they are rewritten."
    return ""
