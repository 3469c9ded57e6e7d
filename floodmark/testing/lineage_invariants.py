"""Invariants of branches and of every lineage of commits: from the rows alone, by following each commit's parent.

It computes what a version sees in its own way, on purpose: expiry, sweep and readers use catalog/lineage.py, and a
mistake there must not confirm itself here.
"""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata

from floodmark.catalog.history import LIVE
from floodmark.catalog.lineage import Lineage
from floodmark.commit.metadata import last_sequence
from floodmark.model import MAIN
from floodmark.testing.catalog_rows import BranchRow, CommitRow, HeadRow, StateRow

# By version, then by table id, the row of the state that the version sees; tombstones too.
Seen = dict[int, dict[str, StateRow]]


def seen_by_versions(commits: list[CommitRow], states: list[StateRow]) -> Seen:
    """What every version sees of every table: what the commit before it in its lineage saw, and what it did itself."""
    own: Seen = {}
    for row in states:
        own.setdefault(row.version, {})[row.table_id] = row
    seen: Seen = {0: {}}
    for commit in commits:
        seen[commit.version] = {**seen[commit.parent], **own.get(commit.version, {})}
    return seen


def check_lineages(
    commits: list[CommitRow], branches: list[BranchRow], lines: list[Lineage], broken: list[str]
) -> None:
    """Branches and lineages agree, and every commit is in a lineage, on top of the one before it there."""
    living = {line.name: line for line in lines if line.ended_version is None}
    by_id = {line.id: line for line in lines}
    if set(living) != {row.name for row in branches} or len(living) != sum(one.ended_version is None for one in lines):
        broken.append(f"branches {sorted(row.name for row in branches)} are not the living lineages {sorted(living)}")
    newest = {line.id: line.base_version for line in lines}
    for commit in commits:
        owners = [
            line
            for line in lines
            if line.name == commit.branch
            and line.born_version < commit.version
            and (line.ended_version is None or commit.version <= line.ended_version)
        ]
        if len(owners) != 1:
            broken.append(f"version {commit.version} on {commit.branch} is in lineages {[one.id for one in owners]}")
            continue
        if commit.parent != newest[owners[0].id]:
            broken.append(f"version {commit.version} is not on top of {newest[owners[0].id]} but of {commit.parent}")
        newest[owners[0].id] = commit.version
    state_of = {commit.version: commit.state for commit in commits}
    for row in branches:
        line = living.get(row.name)
        if line is None:
            continue
        if row.head_version != newest[line.id]:
            broken.append(f"the head of {row.name} is {row.head_version}, its newest commit {newest[line.id]}")
        parent = None if line.parent is None else by_id[line.parent]
        if (row.base_version, row.parent) != (line.base_version, None if parent is None else parent.name):
            broken.append(f"{row.name}: its branch and its lineage do not agree where it began")
        if parent is not None and parent.ended_version is not None:
            broken.append(f"{row.name} lives, its parent {parent.name} does not")
        for version in (
            row.head_version,
            line.base_version,
            line.common_version,
            line.sent_version,
            line.taken_version,
        ):
            if version and state_of.get(version) != LIVE:
                broken.append(f"{row.name} needs version {version}, which is {state_of.get(version)}")


def check_seen(seen: Seen, commits: list[CommitRow], swept: set[tuple[int, str]], broken: list[str]) -> None:
    """Nothing that a readable version sees was ever swept."""
    for commit in commits:
        if commit.state != LIVE:
            continue
        for table_id, row in seen[commit.version].items():
            if row.metadata_location and (row.version, table_id) in swept:
                broken.append(f"version {commit.version} sees {row.table_name}@{row.version}, which was swept")


def check_heads(seen: Seen, branches: list[BranchRow], heads: list[HeadRow], broken: list[str]) -> None:
    """The heads of every branch are what its newest version sees."""
    for branch in branches:
        expected = {
            (row.table_id, row.metadata_location, row.snapshot, row.version)
            for row in seen[branch.head_version].values()
            if row.metadata_location
        }
        found = {
            (row.table_id, row.metadata_location, row.snapshot, row.version)
            for row in heads
            if row.branch == branch.name
        }
        if found != expected:
            broken.append(f"heads of {branch.name} are {sorted(found)}, its newest commits left {sorted(expected)}")
    if extra := {row.branch for row in heads} - {branch.name for branch in branches}:
        broken.append(f"heads name branches that do not exist: {sorted(extra)}")


def check_totals(seen: Seen, commits: list[CommitRow], states: list[StateRow], broken: list[str]) -> None:
    """Sequences rise over all branches; rows are those of the previous state in the lineage plus the commit's."""
    parents = {commit.version: commit.parent for commit in commits}
    sequences: dict[str, int] = {}
    for row in states:
        if not row.metadata_location:
            continue  # a tombstone has the sequence of the state that it ends, which other branches may have passed
        if row.sequence <= sequences.get(row.table_id, -1):
            broken.append(f"sequence of {row.table_name} does not rise at version {row.version}")
        sequences[row.table_id] = row.sequence
        last = seen[parents[row.version]].get(row.table_id)
        expected = (0 if last is None else last.rows_total) + row.rows_added - row.rows_deleted
        if row.rows_total != expected:
            broken.append(f"{row.table_name}@{row.version}: {row.rows_total} rows, but {expected} by its counts")


def check_refs(metadata: TableMetadata, heads: list[HeadRow], bases: dict[str, int], broken: list[str]) -> None:
    """What other engines find in a table's metadata: main, and every branch that wrote, at its head; unique ids."""
    name, snapshots = heads[0].table_name, {one.snapshot_id for one in metadata.snapshots}
    main = next((head for head in heads if head.branch == MAIN), None)
    written = any(head.version > bases.get(head.branch, 0) for head in heads)
    # Of a table that main dropped, a branch from before shows what main had, until it writes to it.
    if (main is not None or written) and metadata.current_snapshot_id != (None if main is None else main.snapshot):
        broken.append(f"metadata of {name} disagrees with its head")
    if main is not None and metadata.current_schema_id != main.schema_id:
        broken.append(f"metadata of {name} shows schema {metadata.current_schema_id}, main has {main.schema_id}")
    for head in heads:
        ref = metadata.refs.get(head.branch)
        forked = head.version > bases.get(head.branch, 0)
        if forked and head.snapshot is not None and (ref is None or ref.snapshot_id != head.snapshot):
            broken.append(f"{name}: the ref {head.branch} is {ref}, its head {head.snapshot}")
        if last_sequence(metadata) < head.sequence:
            broken.append(f"metadata of {name} is behind the head of {head.branch}")
        if metadata.schema_by_id(head.schema_id) is None:
            broken.append(f"metadata of {name} has no schema {head.schema_id}, which {head.branch} has")
    if lost := [ref for ref, one in metadata.refs.items() if one.snapshot_id not in snapshots]:
        broken.append(f"{name}: refs dangle: {lost}")
    ids = [schema.schema_id for schema in metadata.schemas]
    if len(ids) != len(set(ids)):
        broken.append(f"{name}: a schema id was given twice: {ids}")
    if any(schema.highest_field_id > metadata.last_column_id for schema in metadata.schemas):
        broken.append(f"{name}: a column's id is above the last that was given, {metadata.last_column_id}")
