"""What a branch has and its parent does not: its head against the last state that both had. Reads only.

Rows of a keyed table are compared by key, with their values before. Of a table without a key the added rows are known,
by their sequences; of the removed rows only the number, from the branch's commits. No operation, no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from floodmark.branches.records import ADDED, CHANGED, CREATED, GONE, RESHAPED, BranchDiff, RowDiff, TableDiff
from floodmark.branches.rows import Counted, KeyedRows, samples
from floodmark.branches.unkeyed import count_new, find_new, rows_of
from floodmark.branches.view import SideFiles, TableSides, look, schema_at
from floodmark.catalog.merge_base import MergeBase
from floodmark.commit.catalog import Catalog
from floodmark.errors import Invalid
from floodmark.rows.json.ndjson import dicts
from floodmark.rows.reading.arrow_reader import arrow_batches
from floodmark.write.prune import key_fields


def diff(catalog: Catalog, branch: str, *, table: str | None = None, limit: int = 20) -> BranchDiff:
    """Per table what differs, with the first rows of each."""
    parent = catalog.branches.get(branch).parent
    if parent is None:
        raise Invalid("this branch was not made from another", branch=branch, advice="Name a branch of it.")
    view = look(catalog, branch, parent)
    if table is not None and table not in {one.facts.table for one in view.tables}:
        # Neither on the branch now nor in the common state: NotFound, with the existing names.
        catalog.history.head(table, branch)
    wanted = [one for one in view.tables if table in (None, one.facts.table)]
    found = [_table(catalog, view.edge, one, limit) for one in wanted]
    tables = tuple(one for one in found if one is not None)
    return BranchDiff(branch, parent, view.edge.common_version, view.edge.source_head, tables)


def _table(catalog: Catalog, edge: MergeBase, sides: TableSides, limit: int) -> TableDiff | None:
    facts = sides.facts
    if facts.source is None:
        rows = 0 if facts.common is None else facts.common.rows
        return TableDiff(facts.table, GONE, rows_deleted=rows)
    if facts.own_source is None:
        return None
    files = SideFiles(catalog, edge, sides, schema_at(catalog, facts.source))
    if facts.common is None:
        batches = arrow_batches(catalog.storage, files.whole_source, files.schema, with_seq=False)
        shown = tuple(_added(batches, limit))
        return TableDiff(facts.table, CREATED, rows_added=facts.source.rows, samples=shown)
    reshaped = (facts.source.schema_id, facts.source.spec_id) != (facts.common.schema_id, facts.common.spec_id)
    keyed = bool(key_fields(files.schema))
    counted, shown = (_keyed if keyed else _unkeyed)(catalog, files, limit)
    if not counted and not reshaped:
        return None
    change = RESHAPED if reshaped else CHANGED
    return TableDiff(facts.table, change, counted.added, counted.updated, counted.deleted, shown)


def _keyed(catalog: Catalog, files: SideFiles, limit: int) -> tuple[Counted, tuple[RowDiff, ...]]:
    counted = Counted()
    shown: list[RowDiff] = []
    rows = KeyedRows(catalog.storage, files, against_common=True)
    for part in (rows.rows(), rows.deleted()):
        for judged in part:
            taken = judged.common.there[judged.decisions.take]
            counted.updated += int(taken.sum())
            counted.added += int((~taken).sum())
            counted.deleted += len(judged.decisions.delete)
            shown += islice(samples(judged, limit), max(0, limit - len(shown)))
    return counted, tuple(shown)


def _unkeyed(catalog: Catalog, files: SideFiles, limit: int) -> tuple[Counted, tuple[RowDiff, ...]]:
    own = files.sides.facts.own_source
    gone = 0 if own is None else own.rows_deleted
    found = find_new(files)
    batches = rows_of(catalog, files, [*found.whole, *found.mixed])
    return Counted(added=count_new(catalog, files), deleted=gone), tuple(_added(batches, limit))


def _added(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[RowDiff]:
    if limit > 0:
        rows = (row for batch in batches for row in dicts(batch))
        yield from (RowDiff(change=ADDED, row=row, before=None) for row in islice(rows, limit))
