"""The floor of a history: chunks below it are not loaded, and the rows of loaded ones are removed.

The floor is now minus `keep` by the database's clock, or the tip minus `keep` for numbers; a chunk is below it if it
ends at or before it. Per table a publish of kind `prune` removes the rows in the ranges of chunks that the job has
loaded, and marks these chunks as pruned: rows of others in such a range are removed too, all other rows stay. No
deletion is recorded, rows that stay keep their sequences (I6), whole files are dropped by their statistics, unopened.
If a protected consumer has not seen a due row, nothing of that table is removed and nothing is marked (I15): the next
run tries again. Crash anywhere: the old files or the new, with their chunks' states.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from floodmark import log
from floodmark.backfill.chunks.done_chunks import DoneChunks, joined
from floodmark.backfill.chunks.geometry import NUMBER, Geometry, GivenValue, value_text
from floodmark.backfill.chunks.spec import HistorySpec, has_column
from floodmark.catalog.chunks import PruneRider
from floodmark.catalog.riders import MarksRider, Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile
from floodmark.commit.publication import publish
from floodmark.errors import Conflict
from floodmark.jobs.run import JobContext
from floodmark.maintenance.policy import Share, share_up_to, span
from floodmark.model import BEGINNING, MAIN
from floodmark.rows.project import read_file
from floodmark.rows.rewriting.rewrite import ALL, BY_POSITIONS, InputFile, Result, Rewrite, pack_positions
from floodmark.rows.schema import user_fields
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from floodmark.write.step import RETAIN, Removed, TableState

if TYPE_CHECKING:
    from pyiceberg.types import NestedField

KIND = "prune"
# The maximum of chunk ranges in one publish, so that the seal stays small.
RANGES_MAX = 1_000

# Ranges of inner values that do not touch each other, in order; the upper ends are exclusive.
Ranges = Sequence[tuple[int, int]]
DAY_US = 86_400_000_000


class Waits(Exception):
    """Due rows wait for a consumer."""


# ── the floor ──


def floor_of(geometry: Geometry, keep: int | None, tip: GivenValue | None, now_ms: int) -> int | None:
    """Chunks that end at or before this inner value are below the floor; None if the history has no floor."""
    if keep is None:
        return None
    if geometry.unit != NUMBER:
        top: int | None = now_ms * 1000
    else:
        top = geometry.last if tip is None else geometry.value(tip)
    return None if top is None or top - keep <= geometry.first else top - keep


def floor_start(geometry: Geometry, floor: int) -> int:
    """The first inner value that stays: the start of the first chunk that is not below the floor, or the end."""
    start = max(geometry.origin + geometry.below(floor) * geometry.size, geometry.first)
    return start if geometry.last is None else min(start, geometry.last)


def database_now_ms(catalog: Catalog) -> int:
    with catalog.database.read() as tx:
        return catalog.database.now_ms(tx)


# ── pruning ──


def due(context: JobContext, spec: HistorySpec, done_chunks: DoneChunks, floor: int | None) -> dict[str, list[int]]:
    """The loaded chunks below the floor, by table; only of tables with the range column."""
    if floor is None:
        return {}
    below = spec.geometry.below(floor)
    found = {table: done_chunks.loaded_below(table, below) for table in spec.tables}
    return {table: chunks for table, chunks in found.items() if chunks and has_column(context, table, spec)}


def prune(
    context: JobContext,
    spec: HistorySpec,
    job: str,
    actor: str,
    done_chunks: DoneChunks,
    floor: int | None,
    check: Callable[[], None],
) -> int:
    """Remove what is below the floor; returns how many tables lost rows."""
    pruned = 0
    for table, chunks in due(context, spec, done_chunks, floor).items():
        assert floor is not None
        start = value_text(spec.geometry.shown(floor_start(spec.geometry, floor)))
        intent = Intent(KIND, MAIN, actor, f"{spec.name}: rows of {table} below {start}")
        ranges = joined(chunks)
        try:
            for place in range(0, len(ranges), RANGES_MAX):
                check()
                part = tuple(ranges[place : place + RANGES_MAX])
                _prune_table(context, spec, intent, PruneRider(job, table, done_chunks.table_ids[table], 0, part))
                done_chunks.take(table, (number for one in part for number in range(*one)))
        except Waits as waits:
            log.get().warning("rows below the floor wait for a consumer", table=table, consumer=str(waits))
        else:
            pruned += 1
            log.get().info("pruned", job=spec.name, table=table, chunks=len(chunks))
    return pruned


def _prune_table(context: JobContext, spec: HistorySpec, intent: Intent, rider: PruneRider) -> None:
    geometry, table = spec.geometry, rider.table
    # Before the table is read: a chunk that is loaded later is not mistaken for one to remove.
    rider = replace(rider, version=context.catalog.history.resolve())
    intent = replace(intent, batch=rider)

    def fill(change: Change) -> None:
        if change.table_id(table) != rider.table_id:
            raise Conflict("the table was dropped and created again", table=table)
        ends = [(geometry.ends(low)[0], geometry.ends(high - 1)[1]) for low, high in rider.chunks]
        change.write(RETAIN, table, options=WriteOptions(remover=Pruning(context.catalog, str(spec.column), ends)))

    publish(context.catalog, intent, Change(context.engine, intent, fill, [table]))


@dataclass(frozen=True)
class _Found:
    """Files of a table that hold due rows: all their rows, or some at these positions."""

    whole: tuple[LiveFile, ...] = ()
    part: tuple[tuple[LiveFile, npt.NDArray[np.int64]], ...] = ()

    @property
    def files(self) -> list[LiveFile]:
        return [*self.whole, *(file for file, _ in self.part)]


class Pruning:
    """Removes the rows of some ranges from a table: a remover of one operation (write/step.py)."""

    def __init__(self, catalog: Catalog, column: str, ranges: Ranges) -> None:
        self._catalog = catalog
        self._column = column
        self._ranges = ranges
        self._rider: MarksRider | None = None

    def remove(self, table: TableState) -> Removed:
        found = self._find(table)
        # Asked for every plan: a consumer may have been added since the last one.
        consumers = self._catalog.maintenance.consumers(table.head.table_id)
        first = min((one for one in consumers if one.protected), key=lambda one: one.mark, default=None)
        if first is not None and self._is_unseen(table, found, first.mark):
            raise Waits(first.name)
        # No removed row has a sequence above this.
        reach = max((span(file)[1] for file in found.files), default=BEGINNING)
        reach = reach if first is None else min(reach, first.mark)
        counted = sorted((consumer.name, consumer.mark) for consumer in consumers)
        self._rider = MarksRider(table.head.table_id, reach, counted=tuple(counted))
        sources = [at_positions(table.source(file), positions) for file, positions in found.part]
        return Removed(found.whole, (table.runner.run(Rewrite(table.target, BY_POSITIONS), sources),))

    def recheck(self, table: TableState) -> None:
        """Rows that were added meanwhile do not belong to this job: they stay."""

    def riders(self) -> tuple[Rider, ...]:
        return () if self._rider is None else (self._rider,)

    def _find(self, table: TableState) -> _Found:
        column = next(one for one in user_fields(table.schema) if one.name == self._column)
        whole, part = [], []
        for file in table.files:
            share, ranges = share_in(file, column, self._ranges)
            if share is Share.ALL:
                whole.append(file)
            elif share is Share.SOME:
                positions = self._positions(file, column, ranges)
                if len(positions) == file.rows:
                    whole.append(file)
                elif len(positions):
                    part.append((file, positions))
        return _Found(tuple(whole), tuple(part))

    def _positions(self, file: LiveFile, column: NestedField, ranges: Ranges) -> npt.NDArray[np.int64]:
        """Where rows of these ranges are; for a file across an end of a range, this reads its one column."""
        ends = [(-(-low // unit_of(column)), -(-high // unit_of(column))) for low, high in ranges]
        found, start = [np.empty(0, np.int64)], 0
        for batch in read_file(self._catalog.storage, file.path, [column]):
            due = np.zeros(len(batch), np.bool_)
            for low, high in ends:
                due |= inside(batch.column(0), low, high)
            found.append(np.flatnonzero(due) + start)
            start += len(batch)
        return np.concatenate(found)

    def _is_unseen(self, table: TableState, found: _Found, mark: int) -> bool:
        """Whether a consumer at this mark has not seen a row to be removed."""
        shares = {file.path: share_up_to(file, mark) for file in found.files}
        if any(shares[file.path] is Share.NONE for file in found.files):
            return True
        rewrite = Rewrite(table.target, ALL, look_only=True, marks=(mark,))
        unclear = [table.source(file) for file in found.whole if shares[file.path] is Share.SOME]
        parts = [
            at_positions(table.source(file), where) for file, where in found.part if shares[file.path] is Share.SOME
        ]
        return _above(table.runner.run(rewrite, unclear), table.runner.run(replace(rewrite, find=BY_POSITIONS), parts))


def _above(*results: Result) -> bool:
    return any(file.above[0] for result in results for file in result.files)


def at_positions(source: InputFile, positions: npt.NDArray[np.int64]) -> InputFile:
    return replace(source, packed=(pack_positions(positions),))


def inside(values: pa.Array, low: int, high: int) -> npt.NDArray[np.bool_]:
    """Which values are in [low, high), in the column's unit; a null is in no range."""
    kind = pa.int32() if values.type.bit_width == 32 else pa.int64()
    numbers = values.view(kind).cast(pa.int64())
    found = pc.and_(pc.greater_equal(numbers, low), pc.less(numbers, high))
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False))


def unit_of(column: NestedField) -> int:
    """How many inner values one unit of the column is."""
    return DAY_US if str(column.field_type) == "date" else 1


def share_in(file: LiveFile, column: NestedField, ranges: Ranges) -> tuple[Share, Ranges]:
    """How many of a file's rows are in these ranges, if its statistics prove it, and the ranges that may hold some."""
    field = column.field_id
    nulls = (file.data_file.null_value_counts or {}).get(field)
    if nulls == file.rows:
        return Share.NONE, ()
    bounds = list(_bounds(file, column))
    if len(bounds) < 2:
        return Share.SOME, ranges
    lowest, highest = bounds
    first = bisect_right(ranges, lowest, key=lambda one: one[1])
    touched = ranges[first : bisect_right(ranges, highest, key=lambda one: one[0])]
    if not touched:
        return Share.NONE, ()
    complete = (file.data_file.value_counts or {}).get(field) == file.rows and nulls == 0
    is_inside = touched[0][0] <= lowest and highest < touched[0][1]
    return Share.ALL if complete and is_inside else Share.SOME, touched


def _bounds(file: LiveFile, column: NestedField) -> Iterator[int]:
    # A column that was widened since has narrower bounds in older files.
    for bounds in (file.data_file.lower_bounds, file.data_file.upper_bounds):
        raw = (bounds or {}).get(column.field_id)
        if raw is not None:
            yield int.from_bytes(raw, "little", signed=True) * unit_of(column)
