"""Segments that indexes do not need any more: which files a sweep deletes.

A segment goes once it is retired for longer than a reader's grace, and its index is gone, or it is damaged, or of every
file that it covers one of two holds: no state that may still be read names it, or a segment in use covers it too. So
old versions keep what serves them. The segments of a dropped table go with its last state.

A plan that is out of date when it is carried out costs time, never an answer (I11): a fold may retire the segment that
covers a file too, or a branch may begin at an old version. The file is then scanned, and maintenance covers it again.
Order: the files, durably, then their rows. Crash in between: rows of files that are gone; the next sweep removes them.
A reader that still has such a row finds the file gone, asks the catalog again and does without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from floodmark.catalog.indexes import IndexRow, SegmentRow
from floodmark.commit.catalog import Catalog
from floodmark.commit.table_states import TableStates
from floodmark.engine import Engine
from floodmark.failpoints import hit
from floodmark.maintenance.sweep import DELETES_AT_ONCE, SEGMENT, Doomed, Swept, keep_named

RETIRED = "a retired segment that no readable version needs"
TABLE_GONE = "a segment of a table of which nothing is left"


def plan_segments(engine: Engine, table: str, table_id: str, grace_ms: int) -> list[Doomed]:
    """The segments of a table that may go now."""
    catalog = engine.catalog
    states = next((one for one in catalog.expiry.all_states(grace_ms, table) if one.table_id == table_id), None)
    if states is None or _ends(catalog, states):
        return _doomed(catalog.indexes.segments(table_id), TABLE_GONE)
    retired = catalog.indexes.retired(grace_ms).get(table_id, [])
    return _doomed(_not_needed(engine, states, retired), RETIRED) if retired else []


def plan_without_table(catalog: Catalog) -> list[Doomed]:
    """Segments of tables of which nothing is left: their operation ended after the last state was swept."""
    found = catalog.indexes.without_table()
    return _doomed([row for rows in found.values() for row in rows], TABLE_GONE)


def sweep_segments(catalog: Catalog, doomed: Sequence[Doomed], done: Swept) -> None:
    """Delete the files, then the rows."""
    for start in range(0, len(doomed), DELETES_AT_ONCE):
        part = doomed[start : start + DELETES_AT_ONCE]
        locations = [file.location for file in part]
        catalog.storage.delete_many(locations)
        # Crash here: rows of segments whose files are gone; the next sweep deletes them again, and then the rows.
        hit("sweep.segments_deleted")
        catalog.indexes.forget(locations)
        hit("sweep.segments_forgotten")
        done.files += len(part)
        done.size_bytes += sum(file.size_bytes or 0 for file in part)
    for folder in {file.location.rpartition("/")[0] for file in doomed}:
        catalog.storage.drop_empty_folder(folder)


def _ends(catalog: Catalog, states: TableStates) -> bool:
    """Whether the sweep of these states leaves nothing of the table: no branch has it, and all of them are dead."""
    has_head = any(head.table_id == states.table_id for head in catalog.history.all_heads())
    return not has_head and states.settled == {state.version for state in states.states}


def _doomed(rows: Sequence[SegmentRow], reason: str) -> list[Doomed]:
    """A file for each location: several indexes may have a section in it."""
    sizes = {row.location: row.size_bytes for row in rows}
    return [Doomed(location, SEGMENT, reason, size) for location, size in sorted(sizes.items())]


def _not_needed(engine: Engine, states: TableStates, retired: Sequence[SegmentRow]) -> list[SegmentRow]:
    indexes = {one.id: one for one in engine.catalog.indexes.of_table(states.table_id) if one.is_live}
    # By location: files that no segment in use covers, which a version may still need.
    alone: dict[str, set[str]] = {row.location: set() for row in retired}
    by_index: dict[str, list[SegmentRow]] = defaultdict(list)
    for row in retired:
        if row.index_id in indexes and not row.broken:
            by_index[row.index_id].append(row)
    for index_id, rows in by_index.items():
        used = _covered(engine, indexes[index_id])
        for location, section in engine.coverings.open_sections(indexes[index_id], rows).items():
            alone[location] |= {file.path for file in section.files} - used
    needed = keep_named(engine.catalog, states, alone)
    return [row for row in retired if row.location not in needed]


def _covered(engine: Engine, index: IndexRow) -> set[str]:
    """The data files that segments in use cover."""
    rows = [row for row in engine.catalog.indexes.segments_of(index.id) if row.retired_ms is None and not row.broken]
    sections = engine.coverings.open_sections(index, rows)
    return {file.path for section in sections.values() for file in section.files}
