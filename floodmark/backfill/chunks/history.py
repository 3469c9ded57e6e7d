"""History backfill: years of rows in chunks, each of them once.

A plan is the wanted chunks minus the done ones, per output table, from the catalog alone: so gaps of earlier runs are
filled like everything else, and a run that finds nothing missing does nothing. A chunk is published whole, by itself or
with others (load.py). When every complete chunk is loaded, a run ends, waits for the source to reach the end of the
range, or follows it for ever. Crash anywhere: chunks are done or not, and the next run loads those that are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypedDict

from tenacity import Retrying

from floodmark import clock, log
from floodmark.backfill.chunks.chunk_workers import ChunkWorkers
from floodmark.backfill.chunks.done_chunks import DoneChunks
from floodmark.backfill.chunks.frontier import Reached, Tip, clock_of, frontier_of, settings_with_tip
from floodmark.backfill.chunks.geometry import (
    TIME,
    Geometry,
    PlannedChunk,
    RangeValue,
    gaps,
    plan_chunks,
    range_text,
    value_text,
)
from floodmark.backfill.chunks.load import Loader
from floodmark.backfill.chunks.prune import database_now_ms, due, floor_of, floor_start, prune
from floodmark.backfill.chunks.retries import RETRY_S_MAX, Outage, WorkerStop, is_worth_a_retry, retrying
from floodmark.backfill.chunks.sources import HistorySource, SourceContext, bind
from floodmark.backfill.chunks.spec import (
    HistorySpec,
    StoredDefinition,
    check_spec,
    is_same_definition,
    kept_units,
    spec_from_job,
    stored_definition,
    stored_history,
)
from floodmark.catalog.jobs import CHUNKS, FAILING_SINCE, HISTORY, HeldJob, Job
from floodmark.errors import Fenced, FloodmarkError, Incomplete, Invalid, NotFound, Unavailable
from floodmark.jobs.progress import CallbackFailed, JobProgress
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import JobContext, error_document, run_job
from floodmark.json_form import Json
from floodmark.model import Head
from floodmark.runs import JobCallback

if TYPE_CHECKING:
    from pyiceberg.schema import Schema

__all__ = ["HistorySpec", "plan", "run_history", "spec_from_job"]

# How many chunks are planned at a time; after them the catalog is read again.
PLANNED_MAX = 10_000
SHOWN_MAX = 10


def run_history(context: JobContext, spec: HistorySpec, actor: str, callback: JobCallback | None = None) -> BackfillRun:
    """Load all that is wanted and not done. A wrong spec creates no job; Busy if a living run holds the job."""
    check_spec(context, spec)
    source = bound(context, spec)
    job = _find_job(context, spec)
    context.engine.get_ready()
    # Until this run has asked the source, the tip of the previous run counts.
    settings = settings_with_tip(spec, _reached(spec, job))
    held = context.catalog.jobs.start(spec.name, HISTORY, list(spec.tables), spec.pinned(), settings, CHUNKS, actor)
    return run_job(
        context,
        held,
        callback,
        lambda progress: HistoryRun(context, spec, source, held, actor, progress, settings).work(),
    )


def _reached(spec: HistorySpec, job: Job | None) -> Reached:
    """What earlier runs stored with the job."""
    return Reached() if job is None or spec.forget_tip else Reached.of(job.settings)


class HistoryPlan(TypedDict):
    """What a run of a history would do now. The numbers are chunks; `next` and `gaps` are cut to a few."""

    job: str
    tables: list[str]
    tip: str | None
    floor: str | None
    chunks: int
    done: int
    to_load: int
    not_complete_yet: int
    to_prune: dict[str, int]
    next: list[str]
    gaps: list[list[str]]


def plan(context: JobContext, spec: HistorySpec | Job) -> HistoryPlan:
    """What a run would do now: asks the source for its tip, changes nothing."""
    if isinstance(spec, Job):
        spec = spec_from_job(spec)
    check_spec(context, spec)
    source, job = bound(context, spec), _find_job(context, spec)
    tip = Tip(source, spec, WorkerStop(None)).ask()
    outlook = Outlook.look(context, spec, None if job is None else job.id, tip, _reached(spec, job))
    missing = gaps(outlook.complete, None, outlook.done_chunks.done, list(spec.tables), spec.geometry)
    return {
        "job": spec.name,
        "tables": list(spec.tables),
        "tip": None if tip is None else value_text(tip),
        "floor": outlook.floor_text,
        "chunks": outlook.total,
        "done": outlook.processed,
        "to_load": len(outlook.complete) - outlook.done_chunks.complete(outlook.complete),
        "not_complete_yet": len(outlook.kept) - len(outlook.complete),
        "to_prune": {
            table: len(found) for table, found in due(context, spec, outlook.done_chunks, outlook.floor).items()
        },
        "next": [one.chunk.name for one in outlook.planned(SHOWN_MAX)],
        "gaps": [list(range_text(start, end)) for start, end in missing[:SHOWN_MAX]],
    }


# ── outlook ──


@dataclass(frozen=True)
class Outlook:
    """The wanted and the done chunks, at one moment.

    `kept`: chunks of the range that are not below the floor; of an open range, as far as it has ever come
    (frontier.py). `complete`: those of them that the source has now. `reached`: what to store with the job.
    """

    geometry: Geometry
    newest_first: bool
    done_chunks: DoneChunks
    floor: int | None
    kept: range
    complete: range
    reached: Reached

    @classmethod
    def look(
        cls, context: JobContext, spec: HistorySpec, job: str | None, tip: RangeValue | None, before: Reached,
        known: DoneChunks | None = None,
    ) -> Outlook:  # fmt: skip
        """`before`: what earlier runs stored. `known`: the chunks that the run knows to be done, so
        that not all of them are read for every look.
        """
        geometry, keep = spec.geometry, kept_units(spec.geometry, spec.keep)
        is_known = known is not None and known.is_current(context.catalog)
        done_chunks = (
            known if known is not None and is_known else DoneChunks.read(context.catalog, job, list(spec.tables))
        )
        frontier = frontier_of(geometry, tip, before, done_chunks.newest)
        now_ms = clock_of(before, database_now_ms(context.catalog))
        floor = floor_of(geometry, keep, frontier, now_ms)
        complete = geometry.wanted(tip)
        goal = geometry.wanted(frontier if geometry.last is None else None)
        first = goal.start if floor is None else min(max(goal.start, geometry.below(floor)), goal.stop)
        kept, complete = range(first, goal.stop), range(first, min(max(first, complete.stop), goal.stop))
        if before.clock_ms is not None and floor_of(geometry, keep, frontier, before.clock_ms) == floor:
            now_ms = before.clock_ms  # the floor is the same with it: not worth a write
        reached = Reached.at(frontier, now_ms)
        return cls(geometry, spec.newest_first, done_chunks, floor, kept, complete, reached)

    @property
    def is_done(self) -> bool:
        """Whether no chunk is missing, as far as the history has ever come: a history with a gap is never done."""
        return self.processed == self.total

    def missing(self) -> list[int]:
        """The chunks that the source has not reached yet."""
        return [number for number in range(self.complete.stop, self.kept.stop) if self.done_chunks.missing(number)]

    @property
    def total(self) -> int:
        return len(self.kept)

    @property
    def processed(self) -> int:
        return self.done_chunks.complete(self.kept)

    @property
    def floor_text(self) -> str | None:
        geometry = self.geometry
        return None if self.floor is None else value_text(geometry.shown(floor_start(geometry, self.floor)))

    def planned(self, limit: int = PLANNED_MAX) -> list[PlannedChunk]:
        done, tables = self.done_chunks.done, list(self.done_chunks.done)
        return plan_chunks(self.complete, None, done, tables, self.newest_first, self.geometry, limit=limit)


class HistoryRun:
    """One run of a history, which holds its job."""

    def __init__(
        self, context: JobContext, spec: HistorySpec, source: HistorySource, held: HeldJob, actor: str,
        progress: JobProgress, settings: Mapping[str, Json],
    ) -> None:  # fmt: skip
        self._context = context
        self._spec = spec
        self._held = held
        self._actor = actor
        self._progress = progress
        self._worker_stop = WorkerStop(progress)
        self._tip = Tip(source, spec, self._worker_stop)
        self._loader = Loader(context, spec, source, held.id, actor, self._worker_stop)
        self._done_chunks: DoneChunks | None = None
        self._settings = settings
        self._busy = False
        self._outage = Outage(context.give_up_s, min(RETRY_S_MAX, spec.retry_s * 2.0 ** min(spec.retries, 10)))
        self._away_since = ""

    def work(self) -> bool:
        """Plan and load until nothing is missing; returns whether there was anything to do.

        A run that follows its source survives an outage of the source, of Spark or of the catalog: it tries again with
        growing pauses, and its job records what it waits for.
        """
        while True:
            try:
                self._work()
            except Exception as error:
                passes = is_worth_a_retry(error) and not isinstance(error, CallbackFailed)
                if not (self._spec.follow and passes):
                    raise
                self._wait_out(error)
            else:
                return self._busy

    def _wait_out(self, error: Exception) -> None:
        """Wait before the next try during an outage. Raises the error when the outage lasts too long."""
        now_s, now_ms = time.monotonic(), clock.now_ms()
        pause_s = self._outage.pause_s(now_s)
        self._away_since = self._away_since or clock.format_time(now_ms)
        own = error.facts if isinstance(error, FloodmarkError) else {}
        own[FAILING_SINCE] = self._away_since
        if pause_s is None:
            own["gave_up_after_s"] = round(self._outage.away_s(now_s))
            raise error
        next_try = clock.format_time(now_ms + round(1000 * pause_s))
        facts = {FAILING_SINCE: self._away_since, "tries": str(self._outage.tries), "next_try": next_try}
        stored_error = error_document(error, facts)
        log.get(job=self._held.name).warning("waiting for the source", cause=str(error), pause_s=round(pause_s, 1))
        with suppress(Unavailable):  # the catalog itself may not answer
            self._context.catalog.jobs.waits(self._held, stored_error)
        self._worker_stop.clear()
        self._worker_stop.wait(pause_s)
        # The catalog has the outcome of the last try.
        self._done_chunks = None
        with suppress(Unavailable):
            self._context.engine.get_ready()

    def _is_back(self) -> None:
        if self._away_since:
            self._context.catalog.jobs.waits(self._held, None)
            log.get(job=self._held.name).info("the source answers again", since=self._away_since)
            self._away_since = ""
        self._outage.over()

    def _work(self) -> None:
        spec = self._spec
        tip = self._tip.ask()
        while True:
            outlook = self._look(tip)
            self._progress.step(outlook.processed, outlook.total)
            self._busy = self._prune(tip, outlook) or self._busy
            planned = outlook.planned()
            if planned:
                self._load(planned, outlook)
                self._busy = True
                self._is_back()
            elif outlook.is_done and not (spec.follow and spec.geometry.last is None):
                return
            else:
                self._is_back()
                is_due = partial(self._is_floor_above, outlook.kept.start)
                tip = self._tip.wait(outlook.complete.stop, is_due, outlook.missing)

    def load_again(self, numbers: range) -> tuple[Outlook, int]:
        """Load the missing ones among these chunks alone; returns what is done afterwards, and how many were loaded.

        Incomplete if the source lacks one.
        """
        tip = self._tip.ask()
        outlook = self._look(tip)
        self._progress.step(outlook.processed, outlook.total)
        missing = [number for number in numbers if number in outlook.kept and outlook.done_chunks.missing(number)]
        if lost := [number for number in missing if number not in outlook.complete]:
            raise Incomplete(
                "the source does not reach a chunk that is to be loaded again",
                chunk=self._spec.geometry.chunk(lost[0]).name,
                tip=None if tip is None else value_text(tip),
                advice="The chunk is missing until a run loads it: `floodmark backfill resume`.",
            )
        geometry, done_chunks = self._spec.geometry, outlook.done_chunks
        planned = [PlannedChunk(geometry.chunk(number), done_chunks.missing(number)) for number in missing]
        if planned:
            self._load(planned, outlook)
        return outlook, len(planned)

    def _look(self, tip: RangeValue | None) -> Outlook:
        found = None
        for attempt in self._tries("the plan"):
            with attempt:
                before = Reached.of(self._settings)
                found = Outlook.look(self._context, self._spec, self._held.id, tip, before, self._done_chunks)
                self._store(found.reached)
        assert found is not None  # the last try raises
        self._done_chunks = found.done_chunks
        return found

    def _store(self, reached: Reached) -> None:
        """Store it before anything is pruned: the floor is computed from it."""
        settings = settings_with_tip(self._spec, reached)
        if settings != self._settings:
            self._context.catalog.jobs.keep(self._held, settings)
            self._settings = settings

    def _is_floor_above(self, number: int) -> bool:
        """Whether the floor of a range of time has risen above a chunk, while no new chunk came."""
        geometry, keep = self._spec.geometry, kept_units(self._spec.geometry, self._spec.keep)
        if keep is None or geometry.unit != TIME:
            return False
        try:
            floor = floor_of(geometry, keep, None, database_now_ms(self._context.catalog))
        except Unavailable:
            return False
        return floor is not None and geometry.below(floor) > number

    def _prune(self, tip: RangeValue | None, outlook: Outlook) -> bool:
        context, spec, pruned = self._context, self._spec, 0
        for attempt in self._tries("pruning"):
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    context.engine.get_ready()
                    outlook = Outlook.look(context, spec, self._held.id, tip, Reached.of(self._settings))
                    self._done_chunks = outlook.done_chunks
                pruned = prune(
                    context,
                    spec,
                    self._held.id,
                    self._actor,
                    outlook.done_chunks,
                    outlook.floor,
                    self._worker_stop.check,
                )
        return pruned > 0

    def _tries(self, what: str) -> Retrying:
        return retrying(self._worker_stop, self._spec.retries, self._spec.retry_s, what)

    def _load(self, planned: Sequence[PlannedChunk], outlook: Outlook) -> None:
        spec = self._spec
        executor = ChunkWorkers(
            lambda one, tries: self._load_one(one, tries, outlook.done_chunks),
            self._progress,
            self._worker_stop,
            workers=spec.workers,
            tries=spec.retries,
            retry_s=spec.retry_s,
            bundle=_Bundles(self._loader, outlook.done_chunks, self._still_held),
        )
        executor.run(planned, outlook.processed, outlook.total)

    def _load_one(self, one: PlannedChunk, tries: int, done_chunks: DoneChunks) -> None:
        with self._still_held(one):
            self._loader.load(one, tries, done_chunks)

    @contextmanager
    def _still_held(self, one: PlannedChunk) -> Iterator[None]:
        try:
            yield
        except Fenced as error:
            # A recovering process took the chunk's operation for a dead one's. Fenced again if the job itself was taken
            # over.
            self._context.catalog.jobs.wants_cancel(self._held)
            raise Unavailable("the operation of a chunk was taken over", chunk=one.chunk.name, cause=error) from error


@dataclass(frozen=True)
class _Bundles:
    loader: Loader
    done_chunks: DoneChunks
    still_held: Callable[[PlannedChunk], AbstractContextManager[None]]

    def is_possible(self) -> bool:
        return self.loader.bundles

    def load(self, planned: Sequence[PlannedChunk]) -> bool:
        with self.still_held(planned[0]):
            return self.loader.load_bundle(planned, self.done_chunks)


# ── before a job is created ──


def bound(context: JobContext, spec: HistorySpec) -> HistorySource:
    """The source bound to this lake: path templates, for example, get the columns of the table."""

    def head() -> Head | None:
        return next((context.catalog.history.head(table) for table in spec.plain_tables), None)

    def schema() -> Schema | None:
        found = head()
        return None if found is None else context.engine.reader.schema(found)

    def filled() -> Sequence[str]:
        found = head()
        return () if found is None else context.engine.reader.filled_columns(found)

    return bind(spec.source, SourceContext(context.catalog, context.engine.sessions, spec.geometry, schema, filled))


def _find_job(context: JobContext, spec: HistorySpec) -> Job | None:
    """The job of this name, if it exists. `Invalid` if it is a different one; the error says how."""
    try:
        job = context.catalog.jobs.find(spec.name)
    except NotFound:
        _check_name(spec.name)
        return None
    if job.kind != HISTORY:
        raise Invalid("another job has this name", job=spec.name, kind=job.kind)
    stored = stored_history(job)
    different = spec.geometry.differences(stored.geometry)
    if stored.column != spec.column:
        different.append(f"column {spec.column}, was {stored.column}")
    if different:
        raise Invalid(
            "another job has this name",
            job=spec.name,
            different="; ".join(different),
            advice="The definition of a started job cannot change. Choose another name.",
        )
    _check_definitions(context, spec, job)
    return job


def _check_name(name: str) -> None:
    """The job of a column is named TABLE.COLUMN: a history of such a name would block the fill of that column."""
    if "." in name:
        raise Invalid(
            "the name of a history must not have a dot: TABLE.COLUMN is the job of a column",
            job=name,
            advice=f"Call it {name.replace('.', '-')!r}, say.",
        )


def _definition_text(stored: StoredDefinition) -> str:
    """A definition as users know it; two functions of one name by the fingerprints of their code."""
    if isinstance(stored, Mapping):
        return f"the function {stored.get('function')}, code {stored.get('code', 'not known')}"
    return "the chunk's rows" if stored is None else stored


def _check_definitions(context: JobContext, spec: HistorySpec, job: Job) -> None:
    """A table has all its chunks by one definition: those that are done would not be computed again."""
    stored = stored_history(job).tables
    for table, definition in spec.tables.items():
        if table not in stored or is_same_definition(stored[table], definition):
            continue
        if context.catalog.chunks.has_done(job.id, table, context.catalog.history.head(table).table_id):
            raise Invalid(
                "chunks of this table were loaded with another definition",
                job=spec.name,
                table=table,
                definition=_definition_text(stored_definition(definition)),
                was=_definition_text(stored[table]),
                advice="Load into a new table, or choose another name for the job.",
            )
