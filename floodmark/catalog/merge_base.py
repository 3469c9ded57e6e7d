"""Merge bases: what was merged between a branch and its parent, which is all that a merge of the two depends on.

A branch merges with its parent only, so all that two branches share passes between a child and its parent. The child's
lineage records it: which version of either side the other one has, and the state that both compare with. A branch keeps
the identities of its batches under scopes of its own; a stream is one row, of which a branch has a copy from when it
was created. All of it is a few statements, however many batches there are: a merge asks under the lake's lock.

MergeRider advances a merge base, inside the publish of the merge. Interleaving that it excludes: a merge M has staged
the rows of `dev`; `dev` is written to, merged by another process, or deleted; M publishes. M would record that all of
`dev` is in the target, and the rows that came meanwhile would never be merged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

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
    update,
)
from sqlalchemy.sql import FromClause
from sqlalchemy.sql.elements import ColumnElement

from floodmark.catalog import tables
from floodmark.catalog.database import SqlRow
from floodmark.catalog.history import states_on
from floodmark.catalog.lineage import Lineage, LineagePart, Lineages, on_parts
from floodmark.catalog.riders import PlanAgain
from floodmark.errors import Conflict, Invalid
from floodmark.json_form import Json
from floodmark.model import BEGINNING, MAIN

# Commits that change no row that a merge would bring: compaction, filled columns, rows that retention removed.
QUIET_KINDS = frozenset({"compact", "retain", "prune", "fill"})
# What a merge did to a table whose conflict an operator settled: kept it, or replaced it by what the source had.
KEPT, REPLACED = "kept", "replaced"


@dataclass(frozen=True)
class MergeBase:
    """The merge base of a merge.

    `source_since`: the source's version that the target has; `target_since`: the target's version that the source has,
    which a merge this way does not move. `common_version` is compared with.
    """

    source: Lineage
    target: Lineage
    child: Lineage
    common_version: int
    source_since: int
    source_head: int
    target_head: int
    target_since: int

    def turned(self) -> MergeBase:
        """The same merge base, for a merge the other way."""
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


def find_merge_base(tx: Connection, source: str, target: str) -> MergeBase:
    """The merge base of two existing branches. Invalid unless one was created from the other."""
    lineages = Lineages.read(tx)
    ours, theirs = lineages.live(target), lineages.live(source)
    if theirs.parent == ours.id:
        child, since, known = theirs, theirs.sent_version, theirs.taken_version
    elif ours.parent == theirs.id:
        child, since, known = ours, ours.taken_version, ours.sent_version
    else:
        raise Invalid(
            "a branch can be merged only with its parent, in both directions",
            source=source,
            target=target,
            advice=(
                f"{source} was made from {_parent_name(lineages, theirs)}, "
                f"{target} from {_parent_name(lineages, ours)}."
            ),
        )
    head = tables.branches
    heads = dict(tx.execute(select(head.c.name, head.c.head_version).where(head.c.name.in_((source, target)))).all())
    return MergeBase(
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
class SettledTable:
    """The newest versions (0: none) at which a merge settled a conflict of a table without a key by choice.

    kept_target: the target stayed as it was, against the source; replaced_target: it became what the source had. The
    other two are those of merges the other way, which the source got.
    """

    kept_target: int = 0
    replaced_target: int = 0
    kept_source: int = 0
    replaced_source: int = 0

    @property
    def target_after(self) -> int:
        """Up to here, what the target did conflicts with nothing of the source any more."""
        return max(self.kept_target, self.replaced_target)

    def travels(self, base: MergeBase) -> bool:
        """The source was kept against the target, and the target does not have that decision yet."""
        return self.kept_source > max(base.source_since, self.replaced_source)


def settled_tables(tx: Connection, base: MergeBase) -> dict[str, SettledTable]:
    """By table id, what merges between the two, either way, have chosen."""
    row, ids = tables.merges, (base.source.id, base.target.id)
    query = (
        select(row.c.version, row.c.target, row.c.settled)
        .where(row.c.source.in_(ids), row.c.target.in_(ids), row.c.settled != "")
        .order_by(row.c.version)
    )
    found: dict[str, dict[str, int]] = {}
    for merge in tx.execute(query):
        side = "target" if merge.target == base.target.id else "source"
        for table_id, choice in json.loads(merge.settled).items():
            found.setdefault(table_id, {})[f"{choice}_{side}"] = merge.version
    return {table_id: SettledTable(**versions) for table_id, versions in found.items()}


def own_changes(
    tx: Connection,
    base: MergeBase,
    side: Literal["source", "target"],
    after: Mapping[str, int] | None = None,
    lineages: Lineages | None = None,
) -> dict[str, OwnChanges]:
    """By table id, what a side did since the other last had it; without quiet commits and merges from the other.

    `after`: versions of tables up to which added and removed rows do not count any more.
    """
    commit, touched = tables.commits, tables.commit_tables
    if side == "source":
        lineage, other, since, upto = base.source, base.target, base.source_since, base.source_head
    else:
        lineage, other, since, upto = base.target, base.source, base.target_since, base.target_head
    lineages = lineages or Lineages.read(tx)
    known = states_on(tx, lineages.parts(lineage, since), lineage.name)
    shapes = {head.table_id: (head.schema_id, head.spec_id) for head in known}
    merged = merge_versions(tx, other, lineage)
    query = (
        select(touched, commit.c.kind)
        .join(commit, commit.c.version == touched.c.version)
        .where(on_parts(lineages.parts(lineage, upto)), commit.c.version > since)
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


def _sum(before: OwnChanges, row: SqlRow, reshaped: bool) -> OwnChanges:
    return OwnChanges(
        before.rows_added + row.rows_added,
        before.rows_updated + row.rows_updated,
        before.rows_deleted + row.rows_deleted,
        before.commits + 1,
        before.reshaped or reshaped,
    )


def merge_versions(tx: Connection, source: Lineage, target: Lineage) -> frozenset[int]:
    """The versions of `target` that are merges of `source`."""
    row = tables.merges
    query = select(row.c.version).where(row.c.source == source.id, row.c.target == target.id)
    return frozenset(tx.execute(query).scalars())


def merged_tables(tx: Connection, base: MergeBase) -> frozenset[str]:
    """The ids of the tables that some merge between the two, either way, has touched."""
    row, touched = tables.merges, tables.commit_tables
    ids = (base.source.id, base.target.id)
    query = (
        select(touched.c.table_id)
        .distinct()
        .join(row, row.c.version == touched.c.version)
        .where(row.c.source.in_(ids), row.c.target.in_(ids))
    )
    return frozenset(tx.execute(query).scalars())


def merged_sequences(tx: Connection, base: MergeBase, table_id: str) -> frozenset[int]:
    """The sequences that rows of a table have on the source because they came from the target."""
    row, touched = tables.merges, tables.commit_tables
    query = (
        select(touched.c.sequence)
        .join(row, row.c.version == touched.c.version)
        .where(row.c.source == base.target.id, row.c.target == base.source.id, touched.c.table_id == table_id)
    )
    return frozenset(tx.execute(query).scalars())


def since_sequence(tx: Connection, base: MergeBase, table_id: str, lineages: Lineages | None = None) -> int:
    """Rows of the source's table above this sequence are new to the target.

    If the source took the whole table from the target since, those rows kept the sequences that they had there: only
    later rows are new.
    """
    lineages, commit, touched = lineages or Lineages.read(tx), tables.commits, tables.commit_tables
    known = states_on(tx, lineages.parts(base.source, base.source_since), base.source.name, [table_id])
    if known:
        return known[0].sequence
    first = tx.execute(
        select(touched.c.version, touched.c.sequence)
        .join(commit, commit.c.version == touched.c.version)
        .where(on_parts(lineages.parts(base.source, base.source_head)), commit.c.version > base.source_since)
        .where(touched.c.table_id == table_id)
        .order_by(touched.c.version)
        .limit(1)
    ).first()
    taken = first is not None and first.version in merge_versions(tx, base.target, base.source)
    return int(first.sequence) if first is not None and taken else BEGINNING


def _parent_name(lineages: Lineages, lineage: Lineage) -> str:
    return "nothing" if lineage.parent is None else lineages.get(lineage.parent).name


def doubled_tables(
    tx: Connection,
    base: MergeBase,
    source_after: Mapping[str, int],
    target_after: Mapping[str, int],
    lineages: Lineages,
) -> set[str]:
    """The ids of the tables into which both sides published one batch since their last merge: it would be doubled.

    `source_after`, `target_after`: versions of tables whose rows of then do not exist any more.
    """
    theirs, ours = tables.sources.alias(), tables.sources.alias()
    brought, had = tables.commit_tables.alias(), tables.commit_tables.alias()
    from_target, from_source = (merge_versions(tx, *pair) for pair in _ways(base))
    found: set[str] = set()
    for one in _parts_after(lineages, base.source, base.source_since):
        for other in _parts_after(lineages, base.target, base.target_since):
            query = (
                select(brought.c.table_id, theirs.c.version, ours.c.version.label("ours"))
                .distinct()
                .select_from(theirs)
                .join(
                    ours, and_(ours.c.id == theirs.c.id, ours.c.scope == _renamed(theirs, one.lineage, other.lineage))
                )
                .join(brought, brought.c.version == theirs.c.version)
                .join(had, and_(had.c.version == ours.c.version, had.c.table_id == brought.c.table_id))
                .where(_came(theirs, one, base.source_since), _came(ours, other, base.target_since))
            )
            for table_id, version, there in tx.execute(query):
                # Rows that a merge brought are the other side's own.
                mine = version not in from_target and version > source_after.get(table_id, 0)
                if mine and there not in from_source and there > target_after.get(table_id, 0):
                    found.add(table_id)
    return found


def copy_batches(
    tx: Connection,
    lineages: Lineages,
    source: Lineage,
    target: Lineage,
    since: int,
    *,
    kept: Collection[str],
    operation: str,
    version: int,
) -> None:
    """Record on the target, as this version, the batches published on the source after a version.

    Not those that put rows only into `kept` tables: those rows were not merged.
    """
    row = tables.sources
    below = lineages.parts(target)
    for part in _parts_after(lineages, source, since):
        new = _came(row, part, since)
        there = row.alias()
        known = or_(
            *(and_(there.c.scope == _renamed(row, part.lineage, one.lineage), *_upto(there, one)) for one in below)
        )
        brought = select(
            _renamed(row, part.lineage, target),
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
    tx: Connection, source: Lineage, target: Lineage, since: int, kept: Collection[str], operation: str, version: int
) -> None:
    """Of a stream, the further of both positions."""
    row, there = tables.sources, tables.sources.alias()
    scope = _renamed(row, source, target)
    query = (
        select(scope.label("scope"), row.c.id, row.c.position)
        .join(there, and_(there.c.id == row.c.id, there.c.scope == scope), isouter=True)
        .where(
            _came(row, LineagePart(source, since, None), since), row.c.position.is_not(None), _brought_rows(row, kept)
        )
        .where(or_(there.c.position.is_(None), there.c.position < row.c.position))
    )
    moved = tx.execute(query).mappings().all()
    if not moved:
        return
    names = [{"a_scope": one["scope"], "an_id": one["id"]} for one in moved]
    tx.execute(delete(row).where(row.c.scope == bindparam("a_scope"), row.c.id == bindparam("an_id")), names)
    tx.execute(insert(row), [{**one, "version": version, "operation": operation} for one in moved])


def _ways(base: MergeBase) -> tuple[tuple[Lineage, Lineage], tuple[Lineage, Lineage]]:
    return (base.target, base.source), (base.source, base.target)


def _parts_after(lineages: Lineages, lineage: Lineage, since: int) -> Sequence[LineagePart]:
    """A branch's lineage, without the ancestors that it left before this version."""
    return [part for part in lineages.parts(lineage) if part.upto is None or part.upto > since]


def _prefix(lineage: Lineage) -> str:
    return lineage.scope("")


def _came(row: FromClause, part: LineagePart, since: int) -> ColumnElement[bool]:
    """A row of fm_sources that was written in this part after a version."""
    prefix = _prefix(part.lineage)
    own = row.c.scope.not_like("%/%") if part.lineage.id == MAIN else row.c.scope.like(f"{prefix}%")
    return and_(own, row.c.version > since, *_upto(row, part))


def _upto(row: FromClause, part: LineagePart) -> list[ColumnElement[bool]]:
    return [] if part.upto is None else [row.c.version <= part.upto]


def _renamed(row: FromClause, lineage: Lineage, other: Lineage) -> ColumnElement[str]:
    """A row's scope in one lineage, as another lineage names it."""
    bare = func.substr(row.c.scope, len(_prefix(lineage)) + 1)
    return literal(_prefix(other)).concat(bare) if _prefix(other) else bare


def _brought_rows(row: FromClause, kept: Collection[str]) -> ColumnElement[bool]:
    """The batch's commit touched other tables than these."""
    touched = tables.commit_tables
    if not kept:
        return true()
    of_it = select(touched.c.version).where(touched.c.version == row.c.version)
    return or_(exists(of_it.where(touched.c.table_id.not_in(kept))), not_(exists(of_it)))


@dataclass(frozen=True)
class MergeRider:
    """source, target and child are ids of lineages; the versions are those of the merge base that was planned on.

    settled: by table id, how a conflict of the table as a whole was settled (kept, replaced).
    """

    source: str
    source_name: str
    source_version: int
    target: str
    child: str
    common_version: int
    source_since: int
    settled: dict[str, str] = field(default_factory=dict)

    def check(self, tx: Connection) -> None:
        lineages = Lineages.read(tx)
        gone = [lineage for lineage in (self.source, self.target) if lineages.get(lineage).ended_version is not None]
        if gone:
            raise Conflict("the branch was deleted meanwhile", branch=lineages.get(gone[0]).name)
        branch = tables.branches
        head = tx.execute(select(branch.c.head_version).where(branch.c.name == self.source_name)).scalar_one()
        if head != self.source_version:
            raise PlanAgain(self.source_name, "the branch that is merged moved meanwhile")
        if lineages.get(self.child).common_version != self.common_version:
            raise PlanAgain(self.source_name, "the branches were merged by another meanwhile")

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        row, lineages = tables.lines, Lineages.read(tx)
        tx.execute(
            insert(tables.merges).values(
                version=version,
                source=self.source,
                source_version=self.source_version,
                target=self.target,
                settled=json.dumps(self.settled, sort_keys=True) if self.settled else "",
            )
        )
        known = "sent_version" if self.child == self.source else "taken_version"
        values = {known: self.source_version, "common_version": self.source_version}
        tx.execute(update(row).where(row.c.id == self.child).values(**values))
        copy_batches(
            tx,
            lineages,
            lineages.get(self.source),
            lineages.get(self.target),
            self.source_since,
            kept=[table_id for table_id, choice in self.settled.items() if choice == KEPT],
            operation=operation,
            version=version,
        )

    def as_dict(self) -> dict[str, Json]:
        return {"type": "branch_merge", **asdict(self)}
