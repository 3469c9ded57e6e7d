"""What a merge of branches does to one table: decided from the catalog's records of both sides, before a row is read.

Pure. `source` is the branch that is merged, `target` the one that gets its changes ("theirs" and "ours"); the common
state is the last one that both had. Rows of a keyed table are judged one by one later; here only its shape can
conflict. A table without a key cannot distinguish rows: appends of both sides are combined, an overwrite or a delete
conflicts with any change, unless the target is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from floodmark.catalog.merge_base import KEPT, REPLACED
from floodmark.model import Head

OURS, THEIRS = "ours", "theirs"

# Kinds of plans. take: the target gets the table as it is on the source; append: the source's new rows are added;
# by_key: three-way, row by row; replace: the target, unchanged itself, gets what the source has; overwrite: the same by
# force, all rows new; reshape: the shape alone; keep: a conflict is settled by what the target has, which is recorded.
NOTHING, TAKE_TABLE, APPEND_ROWS, BY_KEY = "nothing", "take", "append", "by_key"
REPLACE, OVERWRITE_ALL, RESHAPE, KEEP, CONFLICT = "replace", "overwrite", "reshape", "keep", "conflict"
# Reasons of conflicts that concern a table as a whole, and of those of rows.
DROPPED, SCHEMA, KEY, OVERWRITTEN, BATCH = "dropped", "schema", "key", "overwritten", "batch"
CHANGED, DELETED = "changed", "deleted"
# One side dropped a column that the other wrote into; rows refer to keys that would not exist; a column goes, or gets
# another name, that something on the target uses by its name.
COLUMN, REFERENCE, NEEDED = "column", "reference", "needed"


class Counts(Protocol):
    """What one side did by itself to a table since the other last had it."""

    @property
    def rows_added(self) -> int: ...
    @property
    def rows_updated(self) -> int: ...
    @property
    def rows_deleted(self) -> int: ...


@dataclass(frozen=True)
class MergeFacts:
    """A table on both sides and in the common state, each None where the table does not exist.

    own_source, own_target: what each side did by itself; None is nothing. `key`s: the field ids of each side's key.
    batch_twice: rows of one batch id were published on both sides. target_still: the target did nothing to it that the
    source does not have, and no merge of the two ever touched it. travels: a conflict was settled on the source by what
    it had, and the target does not have that decision yet.
    """

    table: str
    common: Head | None
    source: Head | None
    target: Head | None
    own_source: Counts | None = None
    own_target: Counts | None = None
    source_key: tuple[int, ...] = ()
    target_key: tuple[int, ...] = ()
    batch_twice: bool = False
    target_still: bool = False
    travels: bool = False

    @property
    def is_quiet(self) -> bool:
        """The source has no change of it."""
        return self.own_source is None and not self.travels


@dataclass(frozen=True)
class TableMerge:
    """`reason` is that of a conflict. `theirs_shape`: the target takes the source's schema and partitions.

    settled: this settles a conflict of the table as a whole: the target's rows are kept, or replaced by the source's.
    """

    table: str
    kind: str
    reason: str = ""
    theirs_shape: bool = False
    settled: str = ""


def plan_table(facts: MergeFacts, prefer: str | None = None) -> TableMerge:
    """What a merge does to this table. With `prefer`, whole-table conflicts are settled where that can be done."""
    table = facts.table
    if facts.source is None:
        if facts.common is None or facts.target is None:
            return TableMerge(table, NOTHING)
        return TableMerge(table, KEEP) if prefer == OURS else TableMerge(table, CONFLICT, DROPPED)
    if facts.is_quiet:
        return TableMerge(table, NOTHING)
    if facts.target is None:
        if facts.common is None:
            return TableMerge(table, TAKE_TABLE)
        # Its rows stay behind, so its batch ids do too: else a retry on the target would count as already published.
        return TableMerge(table, KEEP, settled=KEPT) if prefer == OURS else TableMerge(table, CONFLICT, DROPPED)
    if facts.source_key != facts.target_key:
        # The key decides which rows are one row: no side can be preferred before the keys agree.
        return TableMerge(table, CONFLICT, KEY)
    theirs_shape = _takes_shape(facts, prefer)
    if theirs_shape is None:
        return TableMerge(table, CONFLICT, SCHEMA)
    if facts.source_key:
        return TableMerge(table, BY_KEY, theirs_shape=theirs_shape)
    return _plan_unkeyed(facts, prefer, theirs_shape)


def _takes_shape(facts: MergeFacts, prefer: str | None) -> bool | None:
    """Whether the target takes the source's shape; None if both changed it, each in its own way."""
    ours, theirs, common = _shape(facts.target), _shape(facts.source), _shape(facts.common)
    if ours == theirs or theirs == common:
        return False
    if ours == common:
        return True
    return None if prefer is None else prefer == THEIRS


def _plan_unkeyed(facts: MergeFacts, prefer: str | None, theirs_shape: bool) -> TableMerge:
    table, source, target = facts.table, facts.own_source, facts.own_target
    still = RESHAPE if theirs_shape else NOTHING
    reason = ""
    if facts.travels:
        # The source was chosen over the target: all of it is merged, unless the target changed since.
        if not _changed(target):
            return TableMerge(table, OVERWRITE_ALL, theirs_shape=theirs_shape, settled=REPLACED)
        reason = OVERWRITTEN
    elif not _changed(source):
        return TableMerge(table, still, theirs_shape=theirs_shape)
    elif facts.batch_twice:
        reason = BATCH
    elif _only_added(source):
        if _only_added(target):
            return TableMerge(table, APPEND_ROWS, theirs_shape=theirs_shape)
        reason = OVERWRITTEN
    elif facts.target_still and not _changed(target) and _same_count(facts):
        return TableMerge(table, REPLACE, theirs_shape=theirs_shape)
    else:
        reason = OVERWRITTEN
    if prefer == OURS:
        return TableMerge(table, RESHAPE if theirs_shape else KEEP, theirs_shape=theirs_shape, settled=KEPT)
    if prefer == THEIRS:
        return TableMerge(table, OVERWRITE_ALL, theirs_shape=theirs_shape, settled=REPLACED)
    return TableMerge(table, CONFLICT, reason)


def _shape(head: Head | None) -> tuple[int, int] | None:
    return None if head is None else (head.schema_id, head.spec_id)


def _changed(own: Counts | None) -> bool:
    return own is not None and bool(own.rows_added or own.rows_updated or own.rows_deleted)


def _only_added(own: Counts | None) -> bool:
    return own is None or not (own.rows_updated or own.rows_deleted)


def _same_count(facts: MergeFacts) -> bool:
    """The target has as many rows as the common state: maintenance, which counts as no change, removed none."""
    return facts.common is not None and facts.target is not None and facts.common.rows == facts.target.rows
