"""Rows of two branches against their common state: what changed on one side, and what of it the other can take.

Rows are identified by key. For every key with changes of the source that the target does not have yet, three rows are
compared, all in one shape and by field id: the source's, that of the common state, and the target's; each may be
absent. The source changed nothing: skip. The target still has the common row: take the source's, or its absence. Both
have the same: skip. Else it is a conflict. Keys that only the target changed are never read.

Rows of a table without a key have no such history: only those count that the source has and the target has not seen, by
their sequences. Rows come in chunks that are bounded in rows and bytes (I14). Nothing is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.commit.live_files import LiveFile
from floodmark.model import BEGINNING, SEQ_COLUMN
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.compare import same_rows
from floodmark.rows.keys import match_keys, read_keys
from floodmark.rows.project import read_schema, take_rows
from floodmark.rows.reading.arrow_reader import Between, arrow_read_schema, read_rows
from floodmark.rows.reading.changes import ChangePlan, deletions_batches
from floodmark.rows.schema import user_fields
from floodmark.storage import Storage

ROWS_MAX = 100_000
BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True)
class Side:
    """The rows of one side for some keys: where `there` is true the side has the key, and `rows` holds its row."""

    there: Mask
    rows: pa.Table

    @classmethod
    def of(cls, rows: pa.Table) -> Side:
        """A side that has all of these rows, each at its own place."""
        return cls(np.ones(rows.num_rows, np.bool_), rows)

    @classmethod
    def absent(cls, count: int, schema: Schema) -> Side:
        return cls.at(np.empty(0, np.int64), row_schema(schema).empty_table(), count)

    @classmethod
    def at(cls, places: Numbers, rows: pa.Table, count: int) -> Side:
        """A side that has these rows at these places among so many."""
        there = np.zeros(count, np.bool_)
        there[places] = True
        found = np.zeros(count, np.int64)
        found[places] = np.arange(len(places))
        if not rows.num_rows:
            nulls = [pa.nulls(count, column.type) for column in rows.schema]
            return cls(there, pa.table(nulls, schema=rows.schema))
        return cls(there, rows.take(pa.array(found, mask=~there)))

    def same(self, other: Side, ignored: Sequence[str] = ()) -> Mask:
        """Whether both have the same row, or neither has one; `ignored` columns are not compared."""
        both = self.there & other.there
        names = [name for name in self.rows.column_names if name not in ignored]
        alike = same_rows(self.rows.select(names), other.rows.select(names))
        return np.where(both, alike, self.there == other.there)

    def take(self, places: Numbers) -> pa.Table:
        return self.rows.take(pa.array(places))


@dataclass(frozen=True)
class Decisions:
    """What happens to some keys, as places among them, ascending.

    take: the source's row replaces the target's; delete: the target's row is deleted; same: nothing to do; conflict:
    both sides changed the row, each in its own way.
    """

    take: Numbers
    delete: Numbers
    same: Numbers
    conflict: Numbers


def decide(
    source: Side, common: Side, target: Side, ignored: Sequence[str] = (), touched: Mask | None = None
) -> Decisions:
    """`touched`: rows that the target is known to have written itself, even if the compared columns are equal."""
    nothing = source.same(common, ignored) | source.same(target, ignored)
    free = ~nothing & target.same(common, ignored)
    if touched is not None:
        free &= ~touched
    return Decisions(
        take=np.flatnonzero(free & source.there),
        delete=np.flatnonzero(free & ~source.there),
        same=np.flatnonzero(nothing),
        conflict=np.flatnonzero(~nothing & ~free),
    )


def row_schema(schema: Schema) -> pa.Schema:
    """The columns of the compared rows: the table's own, all nullable."""
    return arrow_read_schema(schema, with_seq=False)


def keys_of(rows: pa.Table, fields: Sequence[NestedField]) -> pa.Table:
    """The key's columns alone, in the table's order."""
    return rows.select([field.name for field in fields])


def rows_by_key(
    storage: Storage, files: Iterable[LiveFile], schema: Schema, keys: pa.Table, fields: Sequence[NestedField]
) -> Side:
    """The rows that some files have for these keys. Only their key columns are read whole."""
    columns = user_fields(schema)
    places, parts = [np.empty(0, np.int64)], [read_schema(columns).empty_table()]
    for file in files:
        positions, found = match_keys(read_keys(storage, file.path, fields), keys, fields)
        if len(positions):
            places.append(found)
            parts.append(take_rows(storage, file.path, columns, positions))
    return Side.at(np.concatenate(places), pa.concat_tables(parts), keys.num_rows)


def sequences_by_key(
    storage: Storage, files: Iterable[LiveFile], schema: Schema, keys: pa.Table, fields: Sequence[NestedField]
) -> Numbers:
    """The sequence of the row that some files have for each of these keys; below all sequences where they have none."""
    found = np.full(keys.num_rows, BEGINNING, np.int64)
    for file in files:
        positions, places = match_keys(read_keys(storage, file.path, fields), keys, fields)
        if not len(positions):
            continue
        found[places] = BEGINNING if file.sequence is None else file.sequence
        if not file.fresh:
            column = take_rows(storage, file.path, [schema.find_field(SEQ_COLUMN)], positions).column(0)
            own = column.is_valid().to_numpy()
            found[places[own]] = column.drop_null().to_numpy()
    return found


# ── what changed, in chunks ──


def changed_rows(
    storage: Storage, plan: ChangePlan, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
) -> Iterator[pa.Table]:
    """The rows of a table's changes, each key once, without their sequences."""
    batches = (
        batch
        for file in plan.files
        for batch in read_rows(storage, file.path, plan.schema, False, file.sequence, plan.between)
    )
    return chunks(batches, rows_max, bytes_max)


def deleted_keys(
    storage: Storage,
    plan: ChangePlan,
    fields: Sequence[NestedField],
    rows_max: int = ROWS_MAX,
    bytes_max: int = BYTES_MAX,
) -> Iterator[pa.Table]:
    """The keys whose newest change is a deletion, each once: the key's columns alone."""
    names = [field.name for field in fields]
    return chunks((batch.select(names) for batch in deletions_batches(storage, plan)), rows_max, bytes_max)


def new_rows(
    storage: Storage, files: Iterable[LiveFile], schema: Schema, between: Between, excluded: Collection[int] = ()
) -> Iterator[pa.RecordBatch]:
    """The rows of some files whose sequence is in a range and not one of `excluded`, as `row_schema` says."""
    gone = pa.array(sorted(excluded), pa.int64())
    for file in files:
        for batch in read_rows(storage, file.path, schema, True, file.sequence, between):
            sequences = batch.column(SEQ_COLUMN)
            kept = np.isin(sequences.to_numpy(zero_copy_only=False), gone.to_numpy(), invert=True)
            rows = batch.drop_columns([SEQ_COLUMN])
            rows = rows if kept.all() else rows.filter(pa.array(kept))
            if len(rows):
                yield rows


def chunks(
    batches: Iterable[pa.RecordBatch], rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX
) -> Iterator[pa.Table]:
    """The same rows in tables of at most about so many rows and bytes."""
    waiting: list[pa.RecordBatch] = []
    rows, size_bytes = 0, 0
    for batch in batches:
        for start in range(0, len(batch), rows_max):
            piece = batch.slice(start, rows_max)
            if waiting and (rows + len(piece) > rows_max or size_bytes + piece.nbytes > bytes_max):
                yield pa.Table.from_batches(waiting)
                waiting, rows, size_bytes = [], 0, 0
            waiting.append(piece)
            rows, size_bytes = rows + len(piece), size_bytes + piece.nbytes
    if waiting:
        yield pa.Table.from_batches(waiting)
