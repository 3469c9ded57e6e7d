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
from typing import Any

from tenacity import Retrying

from floodmark import clock, log
from floodmark.backfill.chunks.brake import RETRY_S_MAX, Brake, Outage, is_worth_a_retry, retrying
from floodmark.backfill.chunks.context import Context
from floodmark.backfill.chunks.executor import Executor
from floodmark.backfill.chunks.geometry import TIME, Geometry, PlannedChunk, gaps, plan_chunks, range_text, value_text
from floodmark.backfill.chunks.ledger import Ledger
from floodmark.backfill.chunks.load import Loader
from floodmark.backfill.chunks.prune import database_now_ms, due, floor_of, floor_start, prune
from floodmark.backfill.chunks.sources import Source, bind
from floodmark.backfill.chunks.spec import (
    HistorySpec,
    check_spec,
    is_same_definition,
    kept_definition,
    kept_parts,
    kept_units,
    spec_from_job,
)
from floodmark.backfill.chunks.tip import CLOCK, SEEN, Tip, clock_of, frontier_of, settings_with_tip
from floodmark.catalog.jobs import CHUNKS, FAILING_SINCE, HISTORY, Held, Job
from floodmark.errors import Fenced, FloodmarkError, Incomplete, Invalid, NotFound, Unavailable
from floodmark.jobs.progress import CallbackFailed, Progress, Step
from floodmark.jobs.record import BackfillRun
from floodmark.jobs.run import Room, run_job, told_of
from floodmark.model import Head

__all__ = ["HistorySpec", "plan", "run_history", "spec_from_job"]

# How many chunks are planned at a time; after them the catalog is read again.
PLANNED_MAX = 10_000
SHOWN_MAX = 10


def run_history(room: Room, spec: HistorySpec, actor: str, callback: Step | None = None) -> BackfillRun:
    """Load all that is wanted and not done. A wrong spec creates no job; Busy if a living run holds the job."""
    check_spec(room, spec)
    source = bound(room, spec)
    job = _find_job(room, spec)
    room.engine.get_ready()
    # Until this run has asked the source, the tip of the previous run counts.
    settings = settings_with_tip(spec, _kept(spec, job))
    held = room.catalog.jobs.start(spec.name, HISTORY, list(spec.tables), spec.pinned(), settings, CHUNKS, actor)
    return run_job(
        room, held, callback, lambda progress: Run(room, spec, source, held, actor, progress, settings).work()
    )


def _kept(spec: HistorySpec, job: Job | None) -> Mapping[str, Any]:
    """What earlier runs stored with the job: how far its history has come."""
    return {} if job is None or spec.forget_tip else job.settings


def plan(room: Room, spec: HistorySpec | Job) -> dict[str, Any]:
    """What a run would do now: asks the source for its tip, changes nothing."""
    if isinstance(spec, Job):
        spec = spec_from_job(spec)
    check_spec(room, spec)
    source, job = bound(room, spec), _find_job(room, spec)
    tip = Tip(source, spec, Brake(None)).ask()
    kept = _kept(spec, job)
    outlook = Outlook.look(room, spec, None if job is None else job.id, tip, kept)
    missing = gaps(outlook.complete, None, outlook.ledger.done, list(spec.tables), spec.geometry)
    return {
        "job": spec.name,
        "tables": list(spec.tables),
        "tip": None if tip is None else value_text(tip),
        "floor": outlook.floor_text,
        "chunks": outlook.total,
        "done": outlook.processed,
        "to_load": len(outlook.complete) - outlook.ledger.complete(outlook.complete),
        "not_complete_yet": len(outlook.kept) - len(outlook.complete),
        "to_prune": {table: len(found) for table, found in due(room, spec, outlook.ledger, outlook.floor).items()},
        "next": [one.chunk.name for one in outlook.planned(SHOWN_MAX)],
        "gaps": [list(range_text(start, end)) for start, end in missing[:SHOWN_MAX]],
    }


# ── outlook ──


@dataclass(frozen=True)
class Outlook:
    """The wanted and the done chunks, at one moment.

    `kept`: chunks of the range that are not below the floor; of an open range, as far as it has ever come (tip.py).
    `complete`: those of them that the source has now. `seen`: what to store with the job.
    """

    geometry: Geometry
    newest_first: bool
    ledger: Ledger
    floor: int | None
    kept: range
    complete: range
    seen: Mapping[str, Any]

    @classmethod
    def look(
        cls, room: Room, spec: HistorySpec, job: str | None, tip: Any, before: Mapping[str, Any],
        known: Ledger | None = None,
    ) -> Outlook:  # fmt: skip
        """`before`: settings that hold what was seen earlier. `known`: the chunks that the run knows to be done, so
        that not all of them are read for every look.
        """
        geometry, keep = spec.geometry, kept_units(spec.geometry, spec.keep)
        is_known = known is not None and known.is_current(room.catalog)
        ledger = known if known is not None and is_known else Ledger.read(room.catalog, job, list(spec.tables))
        frontier = frontier_of(geometry, tip, before, ledger.newest)
        now_ms = clock_of(before, database_now_ms(room.catalog))
        floor = floor_of(geometry, keep, frontier, now_ms)
        complete = geometry.wanted(tip)
        goal = geometry.wanted(frontier if geometry.last is None else None)
        first = goal.start if floor is None else min(max(goal.start, geometry.below(floor)), goal.stop)
        kept, complete = range(first, goal.stop), range(first, min(max(first, complete.stop), goal.stop))
        seen = {SEEN: frontier, CLOCK: now_ms}
        if CLOCK in before and floor_of(geometry, keep, frontier, int(before[CLOCK])) == floor:
            seen[CLOCK] = before[CLOCK]  # the floor is the same with it: not worth a write
        return cls(geometry, spec.newest_first, ledger, floor, kept, complete, seen)

    @property
    def is_done(self) -> bool:
        """Whether no chunk is missing, as far as the history has ever come: a history with a gap is never done."""
        return self.processed == self.total

    def missing(self) -> list[int]:
        """The chunks that the source has not reached yet."""
        return [number for number in range(self.complete.stop, self.kept.stop) if self.ledger.missing(number)]

    @property
    def total(self) -> int:
        return len(self.kept)

    @property
    def processed(self) -> int:
        return self.ledger.complete(self.kept)

    @property
    def floor_text(self) -> str | None:
        geometry = self.geometry
        return None if self.floor is None else value_text(geometry.shown(floor_start(geometry, self.floor)))

    def planned(self, limit: int = PLANNED_MAX) -> list[PlannedChunk]:
        done, tables = self.ledger.done, list(self.ledger.done)
        return plan_chunks(self.complete, None, done, tables, self.newest_first, self.geometry, limit=limit)


class Run:
    """One run of a history, which holds its job."""

    def __init__(
        self, room: Room, spec: HistorySpec, source: Source, held: Held, actor: str, progress: Progress,
        settings: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._room = room
        self._spec = spec
        self._held = held
        self._actor = actor
        self._progress = progress
        self._brake = Brake(progress)
        self._tip = Tip(source, spec, self._brake)
        self._loader = Loader(room, spec, source, held.id, actor, self._brake)
        self._ledger: Ledger | None = None
        self._settings = settings
        self._busy = False
        self._outage = Outage(room.give_up_s, min(RETRY_S_MAX, spec.retry_s * 2.0 ** min(spec.retries, 10)))
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
        facts = error.facts if isinstance(error, FloodmarkError) else {}
        facts[FAILING_SINCE] = self._away_since
        if pause_s is None:
            facts["gave_up_after_s"] = round(self._outage.away_s(now_s))
            raise error
        next_try = clock.format_time(now_ms + round(1000 * pause_s))
        told = told_of(error)
        told["facts"] |= {FAILING_SINCE: self._away_since, "tries": str(self._outage.tries), "next_try": next_try}
        log.get(job=self._held.name).warning("waiting for the source", cause=str(error), pause_s=round(pause_s, 1))
        with suppress(Unavailable):  # the catalog itself may not answer
            self._room.catalog.jobs.waits(self._held, told)
        self._brake.release()
        self._brake.wait(pause_s)
        # The catalog has the outcome of the last try.
        self._ledger = None
        with suppress(Unavailable):
            self._room.engine.get_ready()

    def _is_back(self) -> None:
        if self._away_since:
            self._room.catalog.jobs.waits(self._held, None)
            log.get(job=self._held.name).info("the source is back", since=self._away_since)
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
        missing = [number for number in numbers if number in outlook.kept and outlook.ledger.missing(number)]
        if lost := [number for number in missing if number not in outlook.complete]:
            raise Incomplete(
                "the source does not reach a chunk that is to be loaded again",
                chunk=self._spec.geometry.chunk(lost[0]).name,
                tip=None if tip is None else value_text(tip),
                advice="The chunk is missing until a run loads it: `floodmark backfill resume`.",
            )
        geometry, ledger = self._spec.geometry, outlook.ledger
        planned = [PlannedChunk(geometry.chunk(number), ledger.missing(number)) for number in missing]
        if planned:
            self._load(planned, outlook)
        return outlook, len(planned)

    def _look(self, tip: Any) -> Outlook:
        found = None
        for attempt in self._tries("the plan"):
            with attempt:
                found = Outlook.look(self._room, self._spec, self._held.id, tip, self._settings, self._ledger)
                self._keep_seen(found.seen)
        assert found is not None  # the last try raises
        self._ledger = found.ledger
        return found

    def _keep_seen(self, seen: Mapping[str, Any]) -> None:
        """Store it before anything is pruned: the floor is computed from it."""
        settings = settings_with_tip(self._spec, seen)
        if settings != self._settings:
            self._room.catalog.jobs.keep(self._held, settings)
            self._settings = settings

    def _is_floor_above(self, number: int) -> bool:
        """Whether the floor of a range of time has risen above a chunk, while no new chunk came."""
        geometry, keep = self._spec.geometry, kept_units(self._spec.geometry, self._spec.keep)
        if keep is None or geometry.unit != TIME:
            return False
        try:
            floor = floor_of(geometry, keep, None, database_now_ms(self._room.catalog))
        except Unavailable:
            return False
        return floor is not None and geometry.below(floor) > number

    def _prune(self, tip: Any, outlook: Outlook) -> bool:
        room, spec, pruned = self._room, self._spec, 0
        for attempt in self._tries("pruning"):
            with attempt:
                if attempt.retry_state.attempt_number > 1:
                    room.engine.get_ready()
                    outlook = Outlook.look(room, spec, self._held.id, tip, self._settings)
                    self._ledger = outlook.ledger
                pruned = prune(room, spec, self._held.id, self._actor, outlook.ledger, outlook.floor, self._brake.check)
        return pruned > 0

    def _tries(self, what: str) -> Retrying:
        return retrying(self._brake, self._spec.retries, self._spec.retry_s, what)

    def _load(self, planned: Sequence[PlannedChunk], outlook: Outlook) -> None:
        spec = self._spec
        executor = Executor(
            lambda one, tries: self._load_one(one, tries, outlook.ledger),
            self._progress,
            self._brake,
            workers=spec.workers,
            tries=spec.retries,
            retry_s=spec.retry_s,
            bundle=_Bundles(self._loader, outlook.ledger, self._still_held),
        )
        executor.run(planned, outlook.processed, outlook.total)

    def _load_one(self, one: PlannedChunk, tries: int, ledger: Ledger) -> None:
        with self._still_held(one):
            self._loader.load(one, tries, ledger)

    @contextmanager
    def _still_held(self, one: PlannedChunk) -> Iterator[None]:
        try:
            yield
        except Fenced as error:
            # A recovering process took the chunk's operation for a dead one's. Fenced again if the job itself was taken
            # over.
            self._room.catalog.jobs.wants_cancel(self._held)
            raise Unavailable("the operation of a chunk was taken over", chunk=one.chunk.name, cause=error) from error


@dataclass(frozen=True)
class _Bundles:
    loader: Loader
    ledger: Ledger
    still_held: Callable[[PlannedChunk], AbstractContextManager[None]]

    def is_possible(self) -> bool:
        return self.loader.bundles

    def load(self, planned: Sequence[PlannedChunk]) -> bool:
        with self.still_held(planned[0]):
            return self.loader.load_bundle(planned, self.ledger)


# ── before a job is created ──


def bound(room: Room, spec: HistorySpec) -> Source:
    """The source bound to this lake: path templates, for example, get the columns of the table."""

    def head() -> Head | None:
        return next((room.catalog.history.head(table) for table in spec.plain_tables), None)

    def schema() -> Any:
        found = head()
        return None if found is None else room.engine.reader.schema(found)

    def filled() -> Sequence[str]:
        found = head()
        return () if found is None else room.engine.reader.filled_columns(found)

    return bind(spec.source, Context(room.catalog, room.engine.sessions, spec.geometry, schema, filled))


def _find_job(room: Room, spec: HistorySpec) -> Job | None:
    """The job of this name, if it exists. `Invalid` if it is a different one; the error says how."""
    try:
        job = room.catalog.jobs.find(spec.name)
    except NotFound:
        _check_name(spec.name)
        return None
    if job.kind != HISTORY:
        raise Invalid("there is a job of this name, and it is another one", job=spec.name, kind=job.kind)
    geometry, column, _ = kept_parts(job)
    different = spec.geometry.differences(geometry)
    if column != spec.column:
        different.append(f"column {spec.column}, was {column}")
    if different:
        raise Invalid(
            "there is a job of this name, and it is another one",
            job=spec.name,
            different="; ".join(different),
            advice="What a job is does not change once it was started. Choose another name.",
        )
    _check_definitions(room, spec, job)
    return job


def _check_name(name: str) -> None:
    """The job of a column is named TABLE.COLUMN: a history of such a name would block the fill of that column."""
    if "." in name:
        raise Invalid(
            "a history's name has no dot: with one it would be the job of a column, TABLE.COLUMN",
            job=name,
            advice=f"Call it {name.replace('.', '-')!r}, say.",
        )


def _definition_text(kept: Any) -> str:
    """A definition as users know it; two functions of one name by the fingerprints of their code."""
    if isinstance(kept, Mapping):
        return f"the function {kept.get('function')}, code {kept.get('code', 'not known')}"
    return "the chunk's rows" if kept is None else str(kept)


def _check_definitions(room: Room, spec: HistorySpec, job: Job) -> None:
    """A table has all its chunks by one definition: those that are done would not be computed again."""
    kept = kept_parts(job)[2]["tables"]
    for table, definition in spec.tables.items():
        if table not in kept or is_same_definition(kept[table], definition):
            continue
        if room.catalog.chunks.has_done(job.id, table, room.catalog.history.head(table).table_id):
            raise Invalid(
                "chunks of this table were made by another definition",
                job=spec.name,
                table=table,
                definition=_definition_text(kept_definition(definition)),
                was=_definition_text(kept[table]),
                advice="Load into a new table, or choose another name for the job.",
            )
