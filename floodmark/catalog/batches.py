"""The identities of batches on two branches: which came in on both, and what a merge brings along.

A branch keeps what came in on it under scopes of its own (Line.scope); what it stands on is under those of the branches
below it, up to where it left them. Streams are one row each, which moves on: a branch has copies from when it was made.
All of it is a few statements, however many batches there are: a merge asks under the lake's lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    not_,
    or_,
    select,
    true,
)
from sqlalchemy.sql import FromClause
from sqlalchemy.sql.elements import ColumnElement

from floodmark.catalog import tables
from floodmark.catalog.edges import Edge, merge_versions
from floodmark.catalog.lines import Line, Lines, Part
from floodmark.model import MAIN


def doubled_tables(
    tx: Connection, edge: Edge, source_after: Mapping[str, int], target_after: Mapping[str, int], lines: Lines
) -> set[str]:
    """The ids of the tables into which both sides put one batch since they last met: its rows would be there twice.

    `source_after`, `target_after`: versions of tables whose rows of then are not there any more.
    """
    theirs, ours = tables.sources.alias(), tables.sources.alias()
    brought, had = tables.commit_tables.alias(), tables.commit_tables.alias()
    from_target, from_source = (merge_versions(tx, *pair) for pair in _ways(edge))
    found: set[str] = set()
    for one in _parts_after(lines, edge.source, edge.source_since):
        for other in _parts_after(lines, edge.target, edge.target_since):
            query = (
                select(brought.c.table_id, theirs.c.version, ours.c.version.label("ours"))
                .distinct()
                .select_from(theirs)
                .join(ours, and_(ours.c.id == theirs.c.id, ours.c.scope == _renamed(theirs, one.line, other.line)))
                .join(brought, brought.c.version == theirs.c.version)
                .join(had, and_(had.c.version == ours.c.version, had.c.table_id == brought.c.table_id))
                .where(_came(theirs, one, edge.source_since), _came(ours, other, edge.target_since))
            )
            for table_id, version, there in tx.execute(query):
                # What a merge brought is the other side's own.
                mine = version not in from_target and version > source_after.get(table_id, 0)
                if mine and there not in from_source and there > target_after.get(table_id, 0):
                    found.add(table_id)
    return found


def copy_batches(
    tx: Connection,
    lines: Lines,
    source: Line,
    target: Line,
    since: int,
    *,
    kept: Collection[str],
    operation: str,
    version: int,
) -> None:
    """What came in on the source after a version is known on the target from now on, as this version.

    Not what put rows into `kept` tables only: those rows did not come.
    """
    row = tables.sources
    below = lines.parts(target)
    for part in _parts_after(lines, source, since):
        new = _came(row, part, since)
        there = row.alias()
        known = or_(*(and_(there.c.scope == _renamed(row, part.line, one.line), *_upto(there, one)) for one in below))
        brought = select(
            _renamed(row, part.line, target),
            row.c.id,
            literal(version, BigInteger),
            literal(operation),
            row.c.position,
        ).where(
            new,
            row.c.position.is_(None),
            _brought_rows(row, kept),
            not_(exists(select(there.c.id).where(there.c.id == row.c.id, known))),
        )
        columns = ["scope", "id", "version", "operation", "position"]
        tx.execute(insert(row).from_select(columns, brought))
    _copy_streams(tx, source, target, since, kept, operation, version)


def _copy_streams(
    tx: Connection, source: Line, target: Line, since: int, kept: Collection[str], operation: str, version: int
) -> None:
    """Of a stream, the further of both positions."""
    row, there = tables.sources, tables.sources.alias()
    scope = _renamed(row, source, target)
    query = (
        select(scope.label("scope"), row.c.id, row.c.position)
        .join(there, and_(there.c.id == row.c.id, there.c.scope == scope), isouter=True)
        .where(_came(row, Part(source, since, None), since), row.c.position.is_not(None), _brought_rows(row, kept))
        .where(or_(there.c.position.is_(None), there.c.position < row.c.position))
    )
    moved: list[dict[str, Any]] = [dict(one) for one in tx.execute(query).mappings()]
    if not moved:
        return
    names = [{"a_scope": one["scope"], "an_id": one["id"]} for one in moved]
    tx.execute(delete(row).where(row.c.scope == bindparam("a_scope"), row.c.id == bindparam("an_id")), names)
    tx.execute(insert(row), [{**one, "version": version, "operation": operation} for one in moved])


def _ways(edge: Edge) -> tuple[tuple[Line, Line], tuple[Line, Line]]:
    return (edge.target, edge.source), (edge.source, edge.target)


def _parts_after(lines: Lines, line: Line, since: int) -> Sequence[Part]:
    """What a branch stands on, without the branches below it that it left before this version."""
    return [part for part in lines.parts(line) if part.upto is None or part.upto > since]


def _prefix(line: Line) -> str:
    return line.scope("")


def _came(row: FromClause, part: Part, since: int) -> ColumnElement[bool]:
    """A row of fm_sources that came in on this part after a version."""
    prefix = _prefix(part.line)
    own = row.c.scope.not_like("%/%") if part.line.id == MAIN else row.c.scope.like(f"{prefix}%")
    return and_(own, row.c.version > since, *_upto(row, part))


def _upto(row: FromClause, part: Part) -> list[ColumnElement[bool]]:
    return [] if part.upto is None else [row.c.version <= part.upto]


def _renamed(row: FromClause, line: Line, other: Line) -> ColumnElement[str]:
    """A row's scope on one line, as another line calls it."""
    bare = func.substr(row.c.scope, len(_prefix(line)) + 1)
    return literal(_prefix(other)).concat(bare) if _prefix(other) else bare


def _brought_rows(row: FromClause, kept: Collection[str]) -> ColumnElement[bool]:
    """Not all tables that the batch's commit touched are these."""
    touched = tables.commit_tables
    if not kept:
        return true()
    of_it = select(touched.c.version).where(touched.c.version == row.c.version)
    return or_(exists(of_it.where(touched.c.table_id.not_in(kept))), not_(exists(of_it)))
