"""Edges: what passed between a branch and its parent, which is all that a merge of the two stands on.

A branch merges with its parent only, so everything that two branches share flows over such edges, and each keeps its
state on the child's line: which version of either side the other one has, and the state that both compare with.
Questions only; MergeRider moves an edge on, inside the publish of the merge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import Connection, select

from floodmark.catalog import tables
from floodmark.catalog.history import states_on
from floodmark.catalog.lines import Line, Lines, on_parts
from floodmark.errors import Invalid
from floodmark.model import BEGINNING

# Commits that change no row that a merge would bring: files put together, columns filled, rows that went by age.
QUIET_KINDS = frozenset({"compact", "retain", "prune", "fill"})
# What a merge did to a table whose conflict somebody settled: it stayed as it was, or became what the source had.
KEPT, REPLACED = "kept", "replaced"


@dataclass(frozen=True)
class Edge:
    """A merge's ground. `source_since`: the source's version that the target has; `target_since`: the target's version
    that the source has, which a merge this way does not move. `common_version` is compared with.
    """

    source: Line
    target: Line
    child: Line
    common_version: int
    source_since: int
    source_head: int
    target_head: int
    target_since: int

    def turned(self) -> Edge:
        """The same ground, as a merge the other way has it."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            source_since=self.target_since,
            source_head=self.target_head,
            target_head=self.source_head,
            target_since=self.source_since,
        )


@dataclass(frozen=True)
class OwnChanges:
    """What the commits of one side did to a table: the sums of their counts, and whether its shape changed."""

    rows_added: int
    rows_updated: int
    rows_deleted: int
    commits: int
    reshaped: bool


def find_edge(tx: Connection, source: str, target: str) -> Edge:
    """The edge between two branches that live. Invalid unless one was made from the other."""
    lines = Lines.read(tx)
    ours, theirs = lines.live(target), lines.live(source)
    if theirs.parent == ours.id:
        child, since, known = theirs, theirs.sent_version, theirs.taken_version
    elif ours.parent == theirs.id:
        child, since, known = ours, ours.taken_version, ours.sent_version
    else:
        raise Invalid(
            "a branch merges with the one that it was made from, and back",
            source=source,
            target=target,
            advice=f"{source} was made from {_parent_name(lines, theirs)}, {target} from {_parent_name(lines, ours)}.",
        )
    head = tables.branches
    heads = dict(tx.execute(select(head.c.name, head.c.head_version).where(head.c.name.in_((source, target)))).all())
    return Edge(
        source=theirs,
        target=ours,
        child=child,
        common_version=child.common_version,
        source_since=since,
        source_head=heads[source],
        target_head=heads[target],
        target_since=known,
    )


@dataclass(frozen=True)
class Settled:
    """The newest versions, 0 for none, at which a conflict of a table without a key was settled by choice over an edge.

    kept_target: the target stayed as it was, against the source; replaced_target: it became what the source had. The
    other two are those of merges the other way, which the source got.
    """

    kept_target: int = 0
    replaced_target: int = 0
    kept_source: int = 0
    replaced_source: int = 0

    @property
    def target_after(self) -> int:
        """Up to here, what the target did stands against nothing of the source any more."""
        return max(self.kept_target, self.replaced_target)

    def travels(self, edge: Edge) -> bool:
        """The source was kept against the target, and the target does not know it yet."""
        return self.kept_source > max(edge.source_since, self.replaced_source)


def settled_tables(tx: Connection, edge: Edge) -> dict[str, Settled]:
    """By table id, what was chosen in merges over this edge, either way."""
    row, ids = tables.merges, (edge.source.id, edge.target.id)
    query = (
        select(row.c.version, row.c.target, row.c.settled)
        .where(row.c.source.in_(ids), row.c.target.in_(ids), row.c.settled != "")
        .order_by(row.c.version)
    )
    found: dict[str, dict[str, int]] = {}
    for merge in tx.execute(query):
        side = "target" if merge.target == edge.target.id else "source"
        for table_id, choice in json.loads(merge.settled).items():
            found.setdefault(table_id, {})[f"{choice}_{side}"] = merge.version
    return {table_id: Settled(**versions) for table_id, versions in found.items()}


def own_changes(
    tx: Connection,
    edge: Edge,
    side: Literal["source", "target"],
    after: Mapping[str, int] | None = None,
    lines: Lines | None = None,
) -> dict[str, OwnChanges]:
    """By table id, what a side did since the other has seen it; without quiet commits and merges from the other.

    `after`: versions of tables up to which the rows that came and went are of no account any more.
    """
    commit, touched = tables.commits, tables.commit_tables
    if side == "source":
        line, other, since, upto = edge.source, edge.target, edge.source_since, edge.source_head
    else:
        line, other, since, upto = edge.target, edge.source, edge.target_since, edge.target_head
    lines = lines or Lines.read(tx)
    known = states_on(tx, lines.parts(line, since), line.name)
    shapes = {head.table_id: (head.schema_id, head.spec_id) for head in known}
    merged = merge_versions(tx, other, line)
    query = (
        select(touched, commit.c.kind)
        .join(commit, commit.c.version == touched.c.version)
        .where(on_parts(lines.parts(line, upto)), commit.c.version > since)
        .order_by(touched.c.version)
    )
    found: dict[str, OwnChanges] = {}
    for row in tx.execute(query):
        shape = (row.schema_id, row.spec_id)
        reshaped = shapes.get(row.table_id, shape) != shape
        shapes[row.table_id] = shape
        quiet = row.kind in QUIET_KINDS or (row.kind == "add_column" and not reshaped)
        if quiet or row.version in merged:
            continue
        before = found.get(row.table_id, OwnChanges(0, 0, 0, 0, False))
        if row.version > (after or {}).get(row.table_id, 0):
            found[row.table_id] = _sum(before, row, reshaped)
        elif reshaped:
            found[row.table_id] = replace(before, commits=before.commits + 1, reshaped=True)
    return found


def _sum(before: OwnChanges, row: Any, reshaped: bool) -> OwnChanges:
    return OwnChanges(
        before.rows_added + row.rows_added,
        before.rows_updated + row.rows_updated,
        before.rows_deleted + row.rows_deleted,
        before.commits + 1,
        before.reshaped or reshaped,
    )


def merge_versions(tx: Connection, source: Line, target: Line) -> frozenset[int]:
    """The versions of `target` that are merges of `source`."""
    row = tables.merges
    query = select(row.c.version).where(row.c.source == source.id, row.c.target == target.id)
    return frozenset(tx.execute(query).scalars())


def merged_tables(tx: Connection, edge: Edge) -> frozenset[str]:
    """The ids of the tables that some merge over this edge, either way, has touched."""
    row, touched = tables.merges, tables.commit_tables
    ids = (edge.source.id, edge.target.id)
    query = (
        select(touched.c.table_id)
        .distinct()
        .join(row, row.c.version == touched.c.version)
        .where(row.c.source.in_(ids), row.c.target.in_(ids))
    )
    return frozenset(tx.execute(query).scalars())


def merged_sequences(tx: Connection, edge: Edge, table_id: str) -> frozenset[int]:
    """The sequences that rows of a table have on the source because they came from the target."""
    row, touched = tables.merges, tables.commit_tables
    query = (
        select(touched.c.sequence)
        .join(row, row.c.version == touched.c.version)
        .where(row.c.source == edge.target.id, row.c.target == edge.source.id, touched.c.table_id == table_id)
    )
    return frozenset(tx.execute(query).scalars())


def since_sequence(tx: Connection, edge: Edge, table_id: str, lines: Lines | None = None) -> int:
    """Rows of the source's table above this sequence are new to the target.

    If the source took the whole table from the target since, those rows kept the sequences that they had there: new
    is what came after.
    """
    lines, commit, touched = lines or Lines.read(tx), tables.commits, tables.commit_tables
    known = states_on(tx, lines.parts(edge.source, edge.source_since), edge.source.name, [table_id])
    if known:
        return known[0].sequence
    first = tx.execute(
        select(touched.c.version, touched.c.sequence)
        .join(commit, commit.c.version == touched.c.version)
        .where(on_parts(lines.parts(edge.source, edge.source_head)), commit.c.version > edge.source_since)
        .where(touched.c.table_id == table_id)
        .order_by(touched.c.version)
        .limit(1)
    ).first()
    taken = first is not None and first.version in merge_versions(tx, edge.target, edge.source)
    return int(first.sequence) if first is not None and taken else BEGINNING


def _parent_name(lines: Lines, line: Line) -> str:
    return "nothing" if line.parent is None else lines.get(line.parent).name
