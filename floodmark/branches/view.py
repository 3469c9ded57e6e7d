"""Two branches side by side, as the catalog has them: a merge or a difference is planned from this. Reads no rows.

Everything is read while the source does not move: the merge base of the two is read before the heads and after. The
target may be busy: its own changes are read after its heads, so that every change that these heads hold is included. A
publish on these heads, and on no others, publishes what was planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
from pyiceberg.schema import Schema

from floodmark.branches.plan import MergeFacts
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.merge_base import (
    MergeBase,
    SettledTable,
    doubled_tables,
    merged_sequences,
    merged_tables,
    own_changes,
    settled_tables,
    since_sequence,
)
from floodmark.commit.catalog import Catalog
from floodmark.commit.expiry import deletions_floor
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import schema_of
from floodmark.errors import BelowRetention, Conflict
from floodmark.index.covering import Coverings
from floodmark.index.keys import files_holding, key_index
from floodmark.model import BEGINNING, DeletionsFile, Head
from floodmark.write.prune import key_fields, may_hold_range

LOOKS_MAX = 20


@dataclass(frozen=True)
class TableSides:
    """One table on both sides and in the common state.

    since: the source's sequence that the target has; excluded: sequences of the source at which it took rows from the
    target.
    """

    facts: MergeFacts
    since: int
    excluded: frozenset[int]


@dataclass(frozen=True)
class BranchView:
    """Both branches at one moment. `tables` are those of the source and of the common state, by name."""

    edge: MergeBase
    tables: tuple[TableSides, ...]


def look(catalog: Catalog, source: str, target: str) -> BranchView:
    """Read all of it; again while the source moves meanwhile, a limited number of times."""
    edge = catalog.branches.merge_base(source, target)
    for _ in range(LOOKS_MAX):
        theirs, ours = catalog.history.heads(source), catalog.history.heads(target)
        before, edge = edge, catalog.branches.merge_base(source, target)
        if same_ground(before, edge):
            return _read(catalog, edge, theirs, ours)
    raise Conflict("the branch that is merged kept changing", source=source, target=target, advice="Run it again.")


def same_ground(one: MergeBase, other: MergeBase) -> bool:
    """Neither has the source moved nor was anything merged between the two."""
    ids = [(edge.source.id, edge.target.id, edge.source_head, edge.common_version) for edge in (one, other)]
    return ids[0] == ids[1]


def _read(catalog: Catalog, edge: MergeBase, source: Sequence[Head], target: Sequence[Head]) -> BranchView:
    if edge.source_head == edge.source_since:
        return BranchView(edge, ())  # nothing is new
    theirs, ours = ({head.table_id: head for head in heads} for heads in (source, target))
    common = {head.table_id: head for head in catalog.history.tables_at(edge.common_version).values()}
    sides = []
    with catalog.database.read() as tx:
        lines, settled = Lineages.read(tx), settled_tables(tx, edge)
        replaced = {table_id: one.replaced_source for table_id, one in settled.items()}
        own_source = own_changes(tx, edge, "source", replaced, lines)
        # All that the target did and the source does not have, and what of it still conflicts with the source.
        unknown = own_changes(tx, edge, "target", lineages=lines)
        after = {table_id: one.target_after for table_id, one in settled.items()}
        own_target = own_changes(tx, edge, "target", after, lines) if after else unknown
        overwritten = {table_id: one.replaced_target for table_id, one in settled.items()}
        merged, doubled = merged_tables(tx, edge), doubled_tables(tx, edge, replaced, overwritten, lines)
        for table_id in sorted({*theirs, *common}, key=lambda one: (theirs.get(one) or common[one]).table):
            facts = MergeFacts(
                (theirs.get(table_id) or common[table_id]).table,
                common.get(table_id),
                theirs.get(table_id),
                ours.get(table_id),
                own_source.get(table_id),
                own_target.get(table_id),
                batch_twice=table_id in doubled,
                target_still=table_id not in merged and table_id not in unknown,
                travels=settled.get(table_id, SettledTable()).travels(edge),
            )
            asked = table_id in theirs and not facts.is_quiet
            since = since_sequence(tx, edge, table_id, lines) if asked else BEGINNING
            excluded = merged_sequences(tx, edge, table_id) if asked else frozenset()
            sides.append(TableSides(facts, since, excluded))
    return BranchView(edge, tuple(_with_keys(catalog, one) for one in sides))


def _with_keys(catalog: Catalog, sides: TableSides) -> TableSides:
    facts = sides.facts
    if facts.source is None or facts.target is None or facts.is_quiet:
        return sides  # not needed
    keys = (_key(catalog, facts.source), _key(catalog, facts.target))
    return replace(sides, facts=replace(facts, source_key=keys[0], target_key=keys[1]))


def _key(catalog: Catalog, head: Head) -> tuple[int, ...]:
    return tuple(sorted(schema_at(catalog, head).identifier_field_ids))


def schema_at(catalog: Catalog, head: Head) -> Schema:
    return schema_of(catalog.files.metadata(head.metadata_location), head)


class SideFiles:
    """The files of a table on both sides and in the common state; each list is read once, when it is needed."""

    def __init__(self, catalog: Catalog, edge: MergeBase, sides: TableSides, schema: Schema) -> None:
        """`schema` is the one that all rows are read in."""
        self._catalog = catalog
        self._edge = edge
        self.sides = sides
        self.schema = schema

    @property
    def head(self) -> Head:
        assert self.sides.facts.source is not None
        return self.sides.facts.source

    def holding(self, files: Sequence[LiveFile], keys: pa.Table) -> list[LiveFile]:
        """Those of the files that may hold one of these keys: by bounds, then by the key's index."""
        some = may_hold_range(files, keys, self.schema)
        fields = key_fields(self.schema)
        index = key_index(self._catalog.indexes, self.head.table_id, fields)
        return files_holding(self._coverings, index, some, [keys.columns])

    @cached_property
    def _coverings(self) -> Coverings:
        return Coverings(self._catalog)

    @cached_property
    def source(self) -> list[LiveFile]:
        """Only manifests that may hold new rows."""
        return live_files(self._catalog.files, self.head, self.schema, self.sides.since)

    @cached_property
    def whole_source(self) -> list[LiveFile]:
        return live_files(self._catalog.files, self.head, self.schema)

    @cached_property
    def common(self) -> list[LiveFile]:
        head = self.sides.facts.common
        return [] if head is None else live_files(self._catalog.files, head, self.schema)

    @cached_property
    def target(self) -> list[LiveFile]:
        head = self.sides.facts.target
        return [] if head is None else live_files(self._catalog.files, head, self.schema)

    @property
    def target_is_common(self) -> bool:
        facts = self.sides.facts
        both = (facts.common, facts.target)
        snapshots = [None if head is None else head.snapshot for head in both]
        return (both[0] is None) is (both[1] is None) and snapshots[0] == snapshots[1]

    def deletions(self) -> list[DeletionsFile]:
        """The source's deletions that the target does not have. Refused if some of them have expired.

        Those of a child are all present: its own are newer than the floor, which its base holds in place.
        """
        since = self.sides.since
        found = self._catalog.history.deletions(self.head, since, self.head.sequence)
        if self._edge.source.id != self._edge.child.id:
            floor = deletions_floor(self._catalog.database, self.head.table_id)
            if BEGINNING < since < floor:
                raise BelowRetention(
                    "deletions from this table since then are not known any more",
                    table=self.head.table,
                    branch=self._edge.source.name,
                    since=since,
                    oldest=floor,
                    advice="Create a new branch and copy the rows of the old one into it.",
                )
        return found
