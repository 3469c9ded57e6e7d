"""The rows of one table that a merge or a difference compares: judged chunk by chunk, and what happens to each.

Rows that the source has come first, then keys that it deleted; the two never share a key. Nothing is written, memory
follows the chunk (I14); of conflicts a limited number is kept as data, all are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.branches.plan import CHANGED, COLUMN, DELETED, THEIRS
from floodmark.branches.records import ADDED, REMOVED, UPDATED, RowConflict, RowDiff
from floodmark.branches.view import SideFiles
from floodmark.commit.live_files import LiveFile
from floodmark.model import Head, Row
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.compare import same_rows
from floodmark.rows.json.ndjson import dicts
from floodmark.rows.reading.changes import plan_changes
from floodmark.rows.rewriting.three_way import (
    Decisions,
    Side,
    changed_rows,
    decide,
    deleted_keys,
    keys_of,
    new_rows,
    rows_by_key,
    sequences_by_key,
)
from floodmark.storage import Storage
from floodmark.write.prune import key_fields, may_hold_range


@dataclass(frozen=True)
class ComparedRows:
    """Some keys, what the three sides have for each, and what to do."""

    keys: pa.Table
    source: Side
    common: Side
    target: Side
    decisions: Decisions


@dataclass(frozen=True)
class Unseen:
    """Columns that the target fills by an expression and the source does not have.

    A filled value is no difference, and is filled again; a value that the target's own writers wrote is one. A fill
    leaves a row its sequence, so the sequence distinguishes them: newer than `since`, and not `merged` from the source.
    """

    columns: tuple[str, ...]
    since: int
    merged: frozenset[int]


class KeyedRows:
    """The keys that the source changed and the target does not have.

    against_common: the common state is used as the target. unseen: columns of the target that the source lacks.
    """

    def __init__(
        self, storage: Storage, files: SideFiles, *, against_common: bool = False, unseen: Unseen | None = None
    ) -> None:
        self._storage = storage
        self._files = files
        self._against_common = against_common
        self._unseen = unseen
        self.fields: list[NestedField] = key_fields(files.schema)
        head = files.head
        self._plan = plan_changes(files.schema, files.source, files.deletions(), files.sides.since, head.sequence)

    def rows(self) -> Iterator[ComparedRows]:
        """The rows that the source has."""
        for rows in changed_rows(self._storage, self._plan):
            yield self._judge(keys_of(rows, self.fields), Side.of(rows))

    def deleted(self) -> Iterator[ComparedRows]:
        """The rows that the source deleted."""
        for keys in deleted_keys(self._storage, self._plan, self.fields):
            yield self._judge(keys, Side.absent(keys.num_rows, self._files.schema))

    def _judge(self, keys: pa.Table, source: Side) -> ComparedRows:
        common = self._look_up(self._files.common, keys)
        alike = self._against_common or self._files.target_is_common
        target = common if alike else self._look_up(self._files.target, keys)
        if self._unseen is None:
            return ComparedRows(keys, source, common, target, decide(source, common, target))
        touched = self._touched(self._unseen, keys)
        return ComparedRows(keys, source, common, target, decide(source, common, target, self._unseen.columns, touched))

    def _touched(self, unseen: Unseen, keys: pa.Table) -> Mask:
        """Whether the target wrote its row itself since the source last had it."""
        schema = self._files.schema
        files = self._files.holding(self._files.target, keys)
        sequences = sequences_by_key(self._storage, files, schema, keys, self.fields)
        return (sequences > unseen.since) & ~np.isin(sequences, sorted(unseen.merged))

    def _look_up(self, files: Sequence[LiveFile], keys: pa.Table) -> Side:
        schema = self._files.schema
        return rows_by_key(self._storage, self._files.holding(files, keys), schema, keys, self.fields)


@dataclass(frozen=True)
class Writer:
    """The side that wrote rows of a table since the other last had it, with a schema that has dropped columns too."""

    head: Head
    schema: Schema
    since: int
    merged: frozenset[int]


def written_values(
    storage: Storage, writer: Writer, own: Sequence[LiveFile], common: Sequence[LiveFile], lost: Sequence[str]
) -> Iterator[tuple[pa.Table, Side]]:
    """Rows whose values in the `lost` columns the writer wrote itself, and what the common state has for their keys.

    With a key these are rows whose value has changed; without a key, new rows with a value.
    """
    if not writer.schema.identifier_field_ids:
        between = (writer.since, writer.head.sequence)
        for batch in new_rows(storage, own, writer.schema, between, writer.merged):
            rows = pa.Table.from_batches([batch])
            valued = np.any([rows.column(name).is_valid().to_numpy() for name in lost], axis=0)
            found = rows.filter(pa.array(valued))
            yield found, Side.absent(found.num_rows, writer.schema)
        return
    fields = key_fields(writer.schema)
    plan = plan_changes(writer.schema, own, (), writer.since, writer.head.sequence)
    for rows in changed_rows(storage, plan):
        keys = keys_of(rows, fields)
        before = rows_by_key(storage, may_hold_range(common, keys, writer.schema), writer.schema, keys, fields)
        places = np.flatnonzero(~same_rows(rows.select(lost), before.rows.select(lost)))
        yield rows.take(pa.array(places)), Side(before.there[places], before.take(places))


@dataclass
class Conflicts:
    """Conflicts found so far: the first `limit` as data."""

    limit: int
    found: list[RowConflict] = field(default_factory=list)
    total: int = 0

    def add(self, conflict: RowConflict) -> None:
        self.total += 1
        if len(self.found) < self.limit:
            self.found.append(conflict)

    def add_rows(self, table: str, judged: ComparedRows, places: Numbers) -> None:
        self.total += len(places)
        places = places[: max(0, self.limit - len(self.found))]
        sides = (judged.common, judged.target, judged.source)
        rows = [_dicts_at(side, places) for side in sides]
        for key, base, ours, theirs in zip(_dicts(judged.keys.take(pa.array(places))), *rows, strict=True):
            reason = DELETED if ours is None or theirs is None else CHANGED
            self.found.append(RowConflict(table, reason, key, base, ours, theirs))

    def add_column(
        self, table: str, column: str, key: Sequence[str], rows: pa.Table, base: Side, *, ours: bool
    ) -> None:
        """Rows of the side that wrote into a column which the other dropped."""
        self.total += rows.num_rows
        places = np.arange(min(rows.num_rows, max(0, self.limit - len(self.found))))
        for row, before in zip(_dicts(rows.take(pa.array(places))), _dicts_at(base, places), strict=True):
            sides = {"ours" if ours else "theirs": row}
            named = {name: row[name] for name in key} or None
            self.found.append(RowConflict(table, COLUMN, named, before, about=column, **sides))


@dataclass
class Counted:
    """Rows of one table that the target gets."""

    added: int = 0
    updated: int = 0
    deleted: int = 0

    def __bool__(self) -> bool:
        return bool(self.added or self.updated or self.deleted)


class KeyedMerge:
    """The rows that go into a keyed table, as streams: each is read once, and judged while it is read.

    Without `prefer`, conflicts are collected, and after the first no more rows are returned: nothing will be published.
    With it they are settled. Rows that `ours` keeps are written again, so that the decision has a sequence of its own
    and reaches the other side with the next merge there.
    """

    def __init__(self, table: str, rows: KeyedRows, prefer: str | None, conflicts: Conflicts) -> None:
        self._table = table
        self._rows = rows
        self._prefer = prefer
        self._conflicts = conflicts
        self.counted = Counted()

    def upserts(self) -> Iterator[pa.Table]:
        """Rows to be merged into the target."""
        for judged in self._rows.rows():
            take, conflict = judged.decisions.take, judged.decisions.conflict
            if self._prefer == THEIRS:
                take = np.sort(np.concatenate([take, conflict]))
            elif self._prefer is None and len(conflict):
                self._conflicts.add_rows(self._table, judged, conflict)
            self.counted.updated += int(judged.target.there[take].sum())
            self.counted.added += int((~judged.target.there[take]).sum())
            if not self._conflicts.total:
                yield judged.source.take(take)

    def deletions(self) -> Iterator[pa.Table]:
        """Keys to be deleted from the target."""
        for judged in self._rows.deleted():
            gone, conflict = judged.decisions.delete, judged.decisions.conflict
            if self._prefer == THEIRS:
                gone = np.sort(np.concatenate([gone, conflict]))
            elif self._prefer is None and len(conflict):
                self._conflicts.add_rows(self._table, judged, conflict)
            self.counted.deleted += len(gone)
            if not self._conflicts.total:
                yield judged.keys.take(pa.array(gone))

    def kept(self, tell: Callable[[pa.Table], None]) -> Iterator[pa.Table]:
        """Rows of the target that `ours` keeps, to be written again; `tell` gets the keys that stay without a row."""
        for judged in chain(self._rows.rows(), self._rows.deleted()):
            conflict = judged.decisions.conflict
            there = judged.target.there[conflict]
            if not there.all():
                tell(judged.keys.take(pa.array(conflict[~there])))
            yield judged.target.take(conflict[there])


def samples(judged: ComparedRows, limit: int) -> Iterator[RowDiff]:
    """The first differences as data: what changed, the row now, and the row before."""
    take, gone = judged.decisions.take[:limit], judged.decisions.delete[:limit]
    for row, before in zip(_dicts_at(judged.source, take), _dicts_at(judged.common, take), strict=True):
        yield {"change": ADDED if before is None else UPDATED, "row": row, "before": before}
    for before in _dicts_at(judged.common, gone):
        yield {"change": REMOVED, "row": None, "before": before}


def _dicts_at(side: Side, places: Numbers) -> list[Row | None]:
    rows = _dicts(side.take(places))
    return [row if there else None for row, there in zip(rows, side.there[places], strict=True)]


def _dicts(rows: pa.Table) -> list[Row]:
    return list(chain.from_iterable(dicts(batch) for batch in rows.to_batches()))
