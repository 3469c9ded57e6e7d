"""Load chunks of a history again: one publish removes their rows and marks them missing, then they are loaded.

The rows of a chunk are those in its range that came with its commit: found by the range column and the sequence, which
a compaction keeps (I6). In a table without the range column the sequence alone identifies them, if no other chunk came
with the same commit. Rows of the range that others merged or added since stay, and are named; `all_rows` removes them
too. From a table with a key the rows are removed as deletions, so consumers follow; in a table without a key, a redo of
rows that a consumer has shipped is refused, unless it is forced. The publish checks all of it again (RedoRider).

Crash before the publish: nothing has happened. After it: the chunks are missing, which coverage reports, and the job is
interrupted; the process that resumes it loads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from floodmark import clock
from floodmark.backfill.chunks.frontier import Reached, Tip
from floodmark.backfill.chunks.geometry import Geometry, GivenValue, RangeValue, range_text, value_text
from floodmark.backfill.chunks.history import HistoryRun, Outlook, bound
from floodmark.backfill.chunks.prune import at_positions, inside, share_in, unit_of
from floodmark.backfill.chunks.retries import WorkerStop
from floodmark.backfill.chunks.sources import HistorySource
from floodmark.backfill.chunks.spec import HistorySpec, check_spec, has_column, spec_from_job
from floodmark.catalog import jobs as states
from floodmark.catalog.chunks import DONE, ChunkState, RedoneChunk, RedoRider, shipped, shipped_to
from floodmark.catalog.jobs import CHUNKS, HISTORY, HeldJob, Job
from floodmark.catalog.riders import Rider
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import LiveFile, live_files
from floodmark.commit.metadata import schema_of
from floodmark.commit.publication import publish
from floodmark.errors import BelowRetention, CommitUnknown, FloodmarkError, Incomplete, Invalid
from floodmark.jobs.progress import JobProgress
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import JobContext, run_job
from floodmark.json_form import Json, as_json
from floodmark.maintenance.policy import Share
from floodmark.model import BEGINNING, MAIN, SEQ_COLUMN, Commit
from floodmark.rows.project import read_file, take_rows
from floodmark.rows.rewriting.rewrite import BY_POSITIONS, Rewrite
from floodmark.rows.schema import user_fields
from floodmark.runs import DONE as RUN_DONE
from floodmark.runs import REDONE, JobCallback
from floodmark.storage import Storage
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from floodmark.write.step import RETAIN, Removed, TableState

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField

KIND = "redo"
# How many of the rows that stay are named.
NAMED_MAX = 5
# They are sealed with the operation: the maximum of chunks of a table in one redo.
CHUNKS_MAX = 1_000

Positions: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]


# ── the request ──


@dataclass(frozen=True)
class RedoneTable:
    """What one table loses: rows. Rows that came since stay; `since` names some. `shipped_to`: the consumers that have
    shipped the removed rows.
    """

    rows_out: int
    rows_since: int
    since: tuple[str, ...]
    shipped_to: tuple[str, ...]


@dataclass(frozen=True)
class RedoPlan:
    """What a redo removes and loads again."""

    job: str
    range: str
    chunks: int
    tables: Mapping[str, RedoneTable]


def whole_chunks(geometry: Geometry, first: GivenValue, last: GivenValue) -> range:
    """The chunks of [first, last), which must be whole chunks."""
    low, high = geometry.value(first), geometry.value(last)
    numbers = geometry.covering(first, last)
    if low >= high or not numbers:
        raise Invalid("no chunk lies in this range", first=first, last=last)
    ends = geometry.ends(numbers[0])[0], geometry.ends(numbers[-1])[1]
    if ends != (low, high):
        whole = "..".join(range_text(geometry.shown(ends[0]), geometry.shown(ends[1])))
        raise Invalid(
            "only whole chunks can be loaded again",
            range=f"{first}..{last}",
            advice=f"Its chunks are {whole}: use that range, or a smaller one.",
        )
    if len(numbers) > CHUNKS_MAX:
        raise Invalid("too many chunks for one redo", chunks=len(numbers), most=CHUNKS_MAX)
    return numbers


@dataclass(frozen=True)
class _Going:
    """What one table loses: its loaded chunks, with the sequence of each; None for a chunk without rows."""

    table: str
    table_id: str
    column: str | None
    keyed: bool
    chunks: tuple[ChunkState, ...]
    sequences: Mapping[int, int | None]

    @property
    def lowest(self) -> int | None:
        return min((one for one in self.sequences.values() if one is not None), default=None)

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.chunks)


@dataclass(frozen=True)
class _Found:
    """Rows to remove, by file; how many rows of others the ranges hold, how many came since, and some of
    these by name.
    """

    mine: tuple[tuple[LiveFile, Positions], ...]
    others: int
    since: int
    named: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(len(positions) for _, positions in self.mine)


@dataclass(frozen=True)
class _Asked:
    """A requested redo."""

    job: Job
    spec: HistorySpec
    numbers: range
    force: bool
    all_rows: bool

    @property
    def range(self) -> str:
        geometry = self.spec.geometry
        ends = geometry.ends(self.numbers[0])[0], geometry.ends(self.numbers[-1])[1]
        return "..".join(range_text(geometry.shown(ends[0]), geometry.shown(ends[1])))

    def going(self, context: JobContext) -> list[_Going]:
        """The tables that hold some of the chunks, as they are now."""
        loaded = [one for one in context.catalog.chunks.of(self.job.id, self.numbers) if one.state == DONE]
        found = []
        for table in self.spec.tables:
            head = context.catalog.history.head(table)
            chunks = tuple(one for one in loaded if (one.table, one.table_id) == (table, head.table_id))
            if not chunks:
                continue
            column = self.spec.column if has_column(context, table, self.spec) else None
            keyed = bool(context.engine.reader.schema(head).identifier_field_ids)
            sequences = {one.chunk: _sequence(context, one) for one in chunks}
            going = _Going(table, head.table_id, column, keyed, chunks, sequences)
            if column is None:
                _check_alone(context, self.job, going)
            found.append(going)
        return found

    def find(self, storage: Storage, going: _Going, files: Sequence[LiveFile], schema: Schema) -> _Found:
        return _Search(storage, self.spec.geometry, going, schema, self.all_rows).find(files)


def _sequence(context: JobContext, state: ChunkState) -> int | None:
    """The sequence of a chunk's rows; a chunk without rows changes no table."""
    parts = context.catalog.history.commit(state.version).tables
    return next((part.sequence for part in parts if part.table_id == state.table_id and state.rows), None)


def _check_alone(context: JobContext, job: Job, going: _Going) -> None:
    """Without a range column the sequence identifies a chunk's rows only if no other chunk came with it."""
    mine = {one.chunk for one in going.chunks}
    versions = {one.version for one in going.chunks if one.rows}
    same = [
        one for one in context.catalog.chunks.of(job.id) if one.table_id == going.table_id and one.version in versions
    ]
    others = [one.chunk for one in same if one.chunk not in mine and one.rows]
    if others:
        raise Invalid(
            "the rows of this chunk cannot be distinguished from rows of other chunks in the same commit",
            job=job.name,
            table=going.table,
            advice="The table has no range column: redo all chunks of that commit, or load into a new table.",
        )


# ── which rows ──


@dataclass(frozen=True)
class _Search:
    storage: Storage
    geometry: Geometry
    going: _Going
    schema: Schema
    all_rows: bool

    def find(self, files: Sequence[LiveFile]) -> _Found:
        mine, others, since, named = [], 0, 0, list[str]()
        for file in files:
            positions, rest, newer = self._look(file)
            if len(positions):
                mine.append((file, positions))
            others, since = others + len(rest), since + len(newer)
            named += self._names(file, newer[: NAMED_MAX - len(named)])
        return _Found(tuple(mine), others, since, tuple(named))

    def _look(self, file: LiveFile) -> tuple[Positions, Positions, Positions]:
        """Positions of rows to remove, of others in the ranges, and of those among the others that came since."""
        nothing = np.empty(0, np.int64)
        column = next((one for one in user_fields(self.schema) if one.name == self.going.column), None)
        ranges = [self.geometry.ends(one.chunk) for one in self.going.chunks]
        if column is not None and share_in(file, column, ranges)[0] is Share.NONE:
            return nothing, nothing, nothing
        if column is None and file.seq_bounds() is not None and not self._may_hold(file):
            return nothing, nothing, nothing
        found: list[list[Positions]] = [[], [], []]
        seq = None if file.fresh else self.schema.find_field(SEQ_COLUMN)
        fields = [one for one in (column, seq) if one is not None] or list(user_fields(self.schema))[:1]
        inherited, start = BEGINNING if file.sequence is None else file.sequence, 0
        for batch in read_file(self.storage, file.path, fields):
            sequences = np.full(len(batch), inherited, np.int64)
            if seq is not None:
                sequences = batch.column(len(fields) - 1).fill_null(inherited).to_numpy(zero_copy_only=False)
            for kind, mask in enumerate(self._masks(None if column is None else batch.column(0), column, sequences)):
                found[kind].append(np.flatnonzero(mask) + start)
            start += len(batch)
        go, rest, newer = (np.concatenate([nothing, *parts]) for parts in found)
        return go, rest, newer

    def _may_hold(self, file: LiveFile) -> bool:
        low, high = file.seq_bounds() or (BEGINNING, BEGINNING)
        return any(one is not None and low <= one <= high for one in self.going.sequences.values())

    def _masks(
        self, values: pa.Array | None, column: NestedField | None, sequences: Positions
    ) -> tuple[Mask, Mask, Mask]:
        go, rest, newer = (np.zeros(len(sequences), np.bool_) for _ in range(3))
        for one in self.going.chunks:
            sequence = self.going.sequences[one.chunk]
            here = np.ones(len(sequences), np.bool_)
            if column is not None:
                unit = unit_of(column)
                low, high = self.geometry.ends(one.chunk)
                here = inside(values, -(-low // unit), -(-high // unit))
            own = here & (sequences == sequence) if sequence is not None else np.zeros(len(sequences), np.bool_)
            go |= here if self.all_rows and column is not None else own
            if column is not None:
                rest |= here & ~own
                newer |= here & ~own & (sequences > (BEGINNING if sequence is None else sequence))
        return go, rest, newer

    def _names(self, file: LiveFile, positions: Positions) -> list[str]:
        """Rows by their key; without one, by their position in the range."""
        if not len(positions):
            return []
        ids = set(self.schema.identifier_field_ids)
        fields = [one for one in user_fields(self.schema) if one.field_id in ids or one.name == self.going.column]
        fields = [one for one in fields if one.field_id in ids] or fields
        rows = take_rows(self.storage, file.path, fields, positions).to_pylist()
        return [", ".join(f"{name}={value}" for name, value in row.items()) for row in rows]


class _Redoing:
    """Removes the rows of chunks from one table: a remover of one operation (write/step.py)."""

    def __init__(self, asked: _Asked, going: _Going, storage: Storage) -> None:
        self._asked = asked
        self._going = going
        self._storage = storage
        self.found = _Found((), 0, 0, ())

    def remove(self, table: TableState) -> Removed:
        self.found = found = self._asked.find(self._storage, self._going, table.files, table.schema)
        _check_all_found(self._asked, self._going, found)
        ids = table.schema.identifier_field_ids
        key = tuple(one.name for one in user_fields(table.schema) if one.field_id in ids)
        # With a key, the deletions are recorded: consumers delete the rows, and the reloaded rows replace them.
        rewrite = Rewrite(table.target, BY_POSITIONS, key, deletions=bool(key))
        sources = [at_positions(table.source(file), positions) for file, positions in found.mine]
        return Removed((), (table.runner.run(rewrite, sources),))

    def recheck(self, table: TableState) -> None:
        """Rows that were added meanwhile have sequences of their own: they stay."""

    def riders(self) -> tuple[Rider, ...]:
        return ()


# ── what is refused ──


def _check_all_found(asked: _Asked, going: _Going, found: _Found) -> None:
    """Refuse a table without a key in which rows got a new sequence: a reload would duplicate them."""
    if going.keyed or found.rows >= going.rows:
        return
    if going.column is None:
        raise Invalid(
            "rows of this chunk were changed since, and cannot be found without a key or the range column",
            job=asked.job.name,
            table=going.table,
            range=asked.range,
            rows=going.rows,
            rows_as_loaded=found.rows,
            advice="Delete the chunk's rows by a condition of your own, or load the history into a new table.",
        )
    if asked.all_rows or not found.others:
        return
    raise Invalid(
        "rows of this chunk were changed since, and the table has no key to distinguish them from other rows",
        job=asked.job.name,
        table=going.table,
        range=asked.range,
        rows=going.rows,
        rows_as_loaded=found.rows,
        rows_of_others=found.others,
        advice="--all-rows (all_rows=True) deletes every row of the range, also rows that others wrote.",
    )


def _check_there(asked: _Asked, outlook: Outlook, tip: RangeValue | None) -> None:
    """Check that every removed chunk can be loaded again: the source has it now, and it is not below the floor."""
    geometry = asked.spec.geometry
    for number in asked.numbers:
        name = geometry.chunk(number).name
        if number < outlook.kept.start:
            raise BelowRetention("this chunk is below the history's floor", chunk=name, oldest=outlook.floor_text)
        if number not in outlook.complete:
            raise Incomplete(
                "the source does not have this chunk now: it could not be loaded again",
                chunk=name,
                tip=None if tip is None else value_text(tip),
            )


def _unshipped(asked: _Asked, going: Sequence[_Going]) -> tuple[tuple[str, int], ...]:
    """Tables without a key, and the lowest sequence of the removed rows: no consumer may have shipped it."""
    if asked.force:
        return ()
    return tuple((one.table_id, one.lowest) for one in going if not one.keyed and one.lowest is not None)


def _shipped_to(context: JobContext, one: _Going) -> list[str]:
    with context.catalog.database.read() as tx:
        return [] if one.lowest is None else shipped_to(tx, one.table_id, one.lowest)


# ── the plan ──


def plan(
    context: JobContext,
    job: Job,
    first: GivenValue,
    last: GivenValue,
    *,
    source: HistorySource | None = None,
    force: bool = False,
    all_rows: bool = False,
) -> dict[str, Json]:
    """What a redo would remove and load; changes nothing, and refuses what a redo would."""
    asked, _ = _ask(context, job, first, last, source, force, all_rows)
    return as_json(_plan(context, asked))


def _plan(context: JobContext, asked: _Asked) -> RedoPlan:
    tables: dict[str, RedoneTable] = {}
    for one in asked.going(context):
        head = context.catalog.history.head(one.table)
        schema = schema_of(context.catalog.files.metadata(head.metadata_location), head)
        found = asked.find(context.catalog.storage, one, live_files(context.catalog.files, head, schema), schema)
        names = _shipped_to(context, one)
        if names and _unshipped(asked, [one]):
            raise shipped(one.table, names)
        _check_all_found(asked, one, found)
        tables[one.table] = _redone_table(found, names)
    return RedoPlan(asked.job.name, asked.range, len(asked.numbers), tables)


def _redone_table(found: _Found, names: Sequence[str]) -> RedoneTable:
    return RedoneTable(found.rows, found.since, found.named, tuple(names))


def _ask(
    context: JobContext,
    job: Job,
    first: GivenValue,
    last: GivenValue,
    source: HistorySource | None,
    force: bool,
    all_rows: bool,
) -> tuple[_Asked, HistorySource]:
    spec = spec_from_job(job, source)
    check_spec(context, spec)
    at_work = bound(context, spec)
    asked = _Asked(job, spec, whole_chunks(spec.geometry, first, last), force, all_rows)
    tip = Tip(at_work, spec, WorkerStop(None)).ask()
    _check_there(asked, Outlook.look(context, spec, job.id, tip, Reached.of(job.settings)), tip)
    return asked, at_work


# ── the redo ──


def redo(
    context: JobContext,
    job: Job,
    first: GivenValue,
    last: GivenValue,
    actor: str,
    progress: JobCallback | None = None,
    *,
    source: HistorySource | None = None,
    force: bool = False,
    all_rows: bool = False,
) -> BackfillRun:
    """Remove the chunks of [first, last) and load them again. If refused, nothing changes. Busy if a run
    holds the job.
    """
    context.engine.get_ready()
    asked, at_work = _ask(context, job, first, last, source, force, all_rows)
    planned = _plan(context, asked)
    kept = json.loads(job.spec)
    held = context.catalog.jobs.start(
        job.name, HISTORY, list(asked.spec.tables), kept["pinned"], kept["settings"], CHUNKS, actor
    )
    try:
        redone, commit = _take_out(context, asked, held, actor, planned)
    except CommitUnknown:
        # The chunk may be missing now: the job is interrupted, not done, and `resume` loads what is missing.
        context.catalog.jobs.disown(held.run)
        raise
    except BaseException:
        with suppress(FloodmarkError):
            _give_back(context, held, job, None)
        raise
    looked: list[Outlook] = []

    def load(progress: JobProgress) -> bool:
        run = HistoryRun(context, asked.spec, at_work, held, actor, progress, kept["settings"])
        outlook, chunks = run.load_again(asked.numbers)
        looked.append(outlook)
        return commit is not None or chunks > 0

    def end(progress: JobProgress) -> dict[str, Json]:
        return _give_back(context, held, job, looked[0], progress)

    run = run_job(context, held, progress, load, end)
    # Not `done`: other chunks may be missing.
    return replace(run, outcome=REDONE if run.outcome == RUN_DONE else run.outcome, redone=redone)


def _take_out(
    context: JobContext, asked: _Asked, held: HeldJob, actor: str, planned: RedoPlan
) -> tuple[dict[str, Json], Commit | None]:
    """One publish: removes the rows and marks their chunks missing. None if nothing of the range is loaded."""
    going = asked.going(context)
    if not going:
        return {**as_json(planned), "version": None}, None
    redone = [
        RedoneChunk(state.chunk, one.table, one.table_id, state.version, state.rows)
        for one in going
        for state in one.chunks
    ]
    rider = RedoRider(clock.new_id(), asked.job.id, held.run, tuple(redone), _unshipped(asked, going))
    intent = Intent(KIND, MAIN, actor, f"{asked.job.name}: redo {asked.range}", rider)
    redone_tables: dict[str, RedoneTable] = {}

    def fill(change: Change) -> None:
        for one in going:
            remover = _Redoing(asked, one, context.catalog.storage)
            change.write(RETAIN, one.table, options=WriteOptions(remover=remover))
            redone_tables[one.table] = _redone_table(remover.found, _shipped_to(context, one))
        change.identify(replace(rider, detail=_audit_text(asked, actor, redone_tables)))

    commit = publish(context.catalog, intent, Change(context.engine, intent, fill, [one.table for one in going]))
    return {**as_json(replace(planned, tables=redone_tables)), "version": commit.version}, commit


def _audit_text(asked: _Asked, actor: str, tables: Mapping[str, RedoneTable]) -> str:
    parts = []
    for table, one in tables.items():
        text = f"{one.rows_out} rows of {table} deleted"
        text += f", {one.rows_since} added since ({'; '.join(one.since)})" if one.rows_since else ""
        text += f", already shipped to {', '.join(one.shipped_to)}" if one.shipped_to else ""
        parts.append(text)
    return f"{asked.job.name}: {asked.range} by {actor}: {'; '.join(parts)}"


def _give_back(
    context: JobContext, held: HeldJob, job: Job, outlook: Outlook | None, progress: JobProgress | None = None
) -> dict[str, Json]:
    """End the run. The job is done if nothing is missing now; else it returns to its state before this run.

    A done job whose source has more chunks now is stopped: `resume` loads those too.
    """
    jobs = context.catalog.jobs
    figures = (None, None) if progress is None else (progress.processed, progress.total)
    if outlook is not None and outlook.is_done:
        return jobs.end(held, states.DONE, *figures).as_dict()
    if not job.is_over:
        jobs.disown(held.run)
        return jobs.find(held.name).as_dict()
    state = states.CANCELLED if outlook is not None and job.state == states.DONE else job.state
    return jobs.end(held, state, *figures, job.error).as_dict()
