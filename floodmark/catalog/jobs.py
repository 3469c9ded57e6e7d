"""Jobs in the catalog: long work that anyone can watch, stop and continue.

A job is created once, under its name, with a definition that never changes (`pinned`); a start that means something
else is refused. One run holds it at a time, by a lease that lives as long as its process: a process that finds a dead
holder takes over, and the audit records it, once for every run that died (I16). `processed` is for people; the tables
and fm_chunks say what is done. So a crash anywhere leaves a job that its next run continues from the truth. The end of
a job may ride in the publish of its last step (EndRider): both become true together, or neither (I2).

Rate and time left are computed from recorded figures, by the database's clock. A state that this version does not know
is shown as unknown, never as done; a row that cannot be understood is Corrupt, by the name of its job, and kept. A
failed job stays visible until an operator acknowledges it or ten minutes after its end; one without an end time stays
for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, insert, or_, select, update
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow, SqlValue
from floodmark.catalog.leases import JOB, Heartbeat, Runs, to_holder
from floodmark.catalog.riders import AuditRider
from floodmark.errors import Busy, Conflict, Corrupt, Fenced, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.json_form import Json, StoredError

PENDING, RUNNING, DONE, FAILED, CANCELLED = "pending", "running", "done", "failed", "cancelled"
STATES = frozenset({PENDING, RUNNING, DONE, FAILED, CANCELLED})
INTERRUPTED, UNKNOWN = "interrupted", "unknown"
HISTORY, COLUMN = "history", "column"
CHUNKS, ROWS = "chunks", "rows"
SHOWN_MS = 10 * 60_000
# Kinds of errors whose reason may pass: a retry may succeed.
PASSING = frozenset({"Unavailable", "Conflict", "Busy", "CommitUnknown"})
# Among the facts of an error: since when a job failed, or waits, for such a reason, without any progress.
FAILING_SINCE = "failing_since"
# A run that works or waits records it more often than this, unless one chunk or batch takes so long.
STALLED_MS = 15 * 60_000


@dataclass(frozen=True)
class Job:
    """`processed` of `total` is for people; `rows`, `unfilled` and `publishes` are exact: publishes wrote them.

    `resumed_from` is what was processed when the present run began, so that its rate is its own. `looked_ms` is when
    the job was read, by the clock that wrote the other times.
    """

    id: str
    name: str
    kind: str
    table_names: tuple[str, ...]
    spec: str
    state: str
    processed: int
    total: int | None
    unit: str
    resumed_from: int
    rows: int
    unfilled: int
    publishes: int
    error: Mapping[str, Json] | None
    actor: str
    created_ms: int
    updated_ms: int
    started_ms: int | None = None
    ended_ms: int | None = None
    acknowledged_ms: int | None = None
    cancel_ms: int | None = None
    run: str | None = None
    alive: bool = False
    holder: str | None = None
    settings: Mapping[str, Json] = field(default_factory=dict)
    # Two reads of the same job are equal.
    looked_ms: int | None = field(default=None, compare=False)

    @property
    def status(self) -> str:
        if self.state not in STATES:
            return UNKNOWN
        return INTERRUPTED if self.state == RUNNING and not self.alive else self.state

    @property
    def is_over(self) -> bool:
        return self.state in (DONE, FAILED, CANCELLED)

    @property
    def failed_passing(self) -> bool:
        """Whether it failed for a reason that may pass."""
        return self.state == FAILED and (self.error or {}).get("kind") in PASSING

    @property
    def failing_since_ms(self) -> int | None:
        """Since when it fails, or its run waits, for a reason that may pass; None if it does neither."""
        if self.error is None or self.error.get("kind") not in PASSING:
            return None
        try:
            return clock.parse_time_ms(str(StoredError(self.error).facts.get(FAILING_SINCE)))
        except Invalid:
            return self.ended_ms

    @property
    def stalled_since_ms(self) -> int | None:
        """The last report of a run whose process lives, if that is too long ago; the run may hang."""
        if self.status != RUNNING or self.looked_ms is None or self.looked_ms - self.updated_ms < STALLED_MS:
            return None
        return self.updated_ms

    @property
    def is_caught_up(self) -> bool:
        """Whether it has everything so far of a range without an end, and follows it: it is not done, and never is."""
        follows = self.settings.get("follow") is True and self.settings.get("last") is None
        return follows and self.status == RUNNING and self.total is not None and self.processed >= self.total

    def rate(self) -> float | None:
        """Units a second in the present or last run; None before that can be computed."""
        done, ms = self.processed - self.resumed_from, self._run_ms()
        return None if done <= 0 or ms <= 0 else done * 1000 / ms

    def eta_ms(self) -> int | None:
        """The time left at the present rate; None for a job that does not run or has no known end."""
        rate = self.rate()
        if self.status != RUNNING or rate is None or self.total is None or self.is_caught_up:
            return None
        return round(max(0, self.total - self.processed) / rate * 1000)

    def is_shown(self, now_ms: int) -> bool:
        """Whether a failure is still shown. A job that runs, or cannot be understood, always is."""
        if self.status in (PENDING, RUNNING, INTERRUPTED, UNKNOWN):
            return True
        if self.state != FAILED or self.acknowledged_ms is not None:
            return False
        return self.ended_ms is None or now_ms < self.ended_ms + SHOWN_MS

    def as_dict(self) -> dict[str, Json]:
        """The same figures for --json, HTTP and the page."""
        rate, eta_ms = self.rate(), self.eta_ms()
        return {
            "job": self.name,
            "id": self.id,
            "kind": self.kind,
            "tables": list(self.table_names),
            "status": self.status,
            "processed": self.processed,
            "total": self.total,
            "unit": self.unit,
            "percent": None if self.is_caught_up else _percent(self.processed, self.total),
            "rate": None if rate is None else round(rate, 3),
            "eta_s": None if eta_ms is None else round(eta_ms / 1000, 1),
            "rows": self.rows,
            "unfilled": self.unfilled,
            "publishes": self.publishes,
            "error": None if self.error is None else dict(self.error),
            "actor": self.actor,
            "holder": self.holder if self.alive else None,
            "cancel_asked": self.cancel_ms is not None and self.state == RUNNING,
            "created": clock.format_time(self.created_ms),
            "started": _time(self.started_ms),
            "updated": clock.format_time(self.updated_ms),
            "stalled_since": _time(self.stalled_since_ms),
            "ended": _time(self.ended_ms),
            "acknowledged": _time(self.acknowledged_ms),
            "settings": dict(self.settings),
        }

    def _run_ms(self) -> int:
        """How long the run took until its figures were written: for them no time passes between two writes."""
        return 0 if self.started_ms is None else (self.ended_ms or self.updated_ms) - self.started_ms


def _percent(processed: int, total: int | None) -> float | None:
    """Below 100 until all of it is done."""
    if total is None:
        return None
    if processed >= total:
        return 100.0
    return min(99.9, round(100 * processed / total, 1))


def _time(time_ms: int | None) -> str | None:
    return None if time_ms is None else clock.format_time(time_ms)


_HISTORIES = select(tables.jobs.c.table_names).where(tables.jobs.c.kind == HISTORY)
_JOBS = JOB.select(*tables.jobs.c).order_by(tables.jobs.c.id.desc())


def _to_job(row: SqlRow, runs: Runs, now_ms: int) -> Job:
    """A row of _JOBS as a job, read now; Corrupt if it cannot be understood."""
    holder = to_holder(row)
    alive = runs.is_held(holder, now_ms)
    try:
        spec = json.loads(row.spec)
        names = tuple(str(name) for name in json.loads(row.table_names))
        error = None if row.error is None else dict(json.loads(row.error))
        settings = {**spec["pinned"], **spec["settings"]}
    except (ValueError, TypeError, KeyError) as problem:
        raise Corrupt("the record of a job cannot be parsed", job=row.name, cause=problem) from problem
    return Job(
        row.id,
        row.name,
        row.kind,
        names,
        row.spec,
        row.state,
        row.processed,
        row.total,
        row.unit,
        row.resumed_from,
        row.rows_done,
        row.unfilled,
        row.publishes,
        error,
        row.actor,
        row.created_ms,
        row.updated_ms,
        row.started_ms,
        row.ended_ms,
        row.acknowledged_ms,
        row.cancel_ms,
        row.owner_run,
        alive,
        holder.shown if alive else None,
        settings,
        now_ms,
    )


def find_id(tx: Connection, name: str) -> str | None:
    """The id of the job with this name or, if none has it, with this id."""
    job = tables.jobs
    mine = or_(job.c.name == name, job.c.id == name)
    found = {str(row.name): str(row.id) for row in tx.execute(select(job.c.name, job.c.id).where(mine))}
    return found.get(name, next(iter(found.values()), None))


def no_job(tx: Connection, name: str) -> NotFound:
    newest = select(tables.jobs.c.name).order_by(tables.jobs.c.id.desc()).limit(10)
    known = tx.execute(newest).scalars().all()
    return NotFound(
        "there is no such job", job=name, jobs=",".join(known) or "none", advice="`floodmark backfill list` shows them."
    )


@dataclass(frozen=True)
class JobHold:
    """Which run holds a job, since when, and when an operator asked to cancel it."""

    run: str | None
    cancel_ms: int | None
    started_ms: int | None


def check_job(
    tx: Connection, job: str, run: str | None = None, *, name: str | None = None, lock: bool = False
) -> JobHold:
    """The job's hold: Corrupt if the job is gone, Fenced unless `run`, if given, still has it."""
    row = tables.jobs
    query = select(row.c.owner_run, row.c.cancel_ms, row.c.started_ms).where(row.c.id == job)
    found = tx.execute(query.with_for_update() if lock else query).first()
    if found is None:
        raise vanished(name or job)
    if run is not None and found.owner_run != run:
        advice = "See `floodmark backfill show`."
        raise Fenced("another run has taken this job over", job=name or job, advice=advice)
    return JobHold(found.owner_run, found.cancel_ms, found.started_ms)


def vanished(job: str) -> Corrupt:
    return Corrupt("the job vanished from the catalog", job=job, advice="Start it again: finished work stays.")


NAME_CHARACTERS_MAX = 200
END_TRIES_MAX = 5
# A job that no run holds: nothing of it is left to cancel.
_FREE = {**JOB.held_by(None, None), "cancel_ms": None}


@dataclass(frozen=True)
class HeldJob:
    """A job that a run holds. `resumed`: an earlier run of it exists.

    `processed`: how far that run got; `failing_since_ms`: since when it failed for a reason that may pass, if it did.
    """

    id: str
    name: str
    run: str
    resumed: bool
    pinned: Mapping[str, Json]
    processed: int = 0
    failing_since_ms: int | None = None


class Jobs:
    def __init__(self, database: Database, heartbeat: Heartbeat) -> None:
        self._database = database
        self._heartbeat = heartbeat
        self._runs = Runs(JOB, heartbeat)

    # ── looking ──

    def all(self) -> list[Job]:
        """Every job, newest first."""
        with self._database.read() as tx:
            now = self._database.now_ms(tx)
            return [_to_job(row, self._runs, now) for row in tx.execute(_JOBS)]

    def histories_of(self, table: str) -> list[Job]:
        """The jobs that load a history into a table, whatever became of them; in most lakes one quick query."""
        if not any(table in json.loads(row.table_names) for row in self._database.ask(_HISTORIES)):
            return []
        return [job for job in self.all() if job.kind == HISTORY and table in job.table_names]

    def find(self, name: str) -> Job:
        """The job with this name or, if none has it, with this id."""
        with self._database.read() as tx:
            known = find_id(tx, name)
            if known is None:
                raise no_job(tx, name)
            return self._read(tx, known, self._database.now_ms(tx))

    # ── one run at a time ──

    def start(
        self,
        name: str,
        kind: str,
        table_names: Sequence[str],
        pinned: Mapping[str, Json],
        settings: Mapping[str, Json],
        unit: str,
        actor: str,
        *,
        anew: bool = False,
    ) -> HeldJob:
        """Hold a job for a new run; create it if none has this name. Busy if a living run has it.

        Invalid if it is not the same job: `pinned` must be what it was created with, unless it begins `anew` and no row
        is done yet. `settings` are those of this start.
        """
        _check_name(name)
        ended_ms = self._make(name, kind, table_names, pinned, settings, unit, actor)
        # Crash here: a job that is pending; the next start takes it.
        hit("job.made")
        run = clock.new_id()
        with self._runs.taking(run):
            held = self._take(name, kind, table_names, pinned, settings, run, anew, ended_ms)
        # Crash here: a running job whose owner is dead: interrupted; the next start continues it.
        hit("job.held")
        return held

    def _make(
        self, name: str, kind: str, table_names: Sequence[str], pinned: Mapping[str, Json],
        settings: Mapping[str, Json], unit: str, actor: str,
    ) -> int | None:  # fmt: skip
        """Create the job if none has this name; returns when its last run ended, None if none has."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            known = tx.execute(select(tables.jobs.c.ended_ms).where(tables.jobs.c.name == name)).first()
            if known is not None:
                ended_ms: int | None = known.ended_ms
                return ended_ms
            now = self._database.now_ms(tx)
            tx.execute(
                insert(tables.jobs).values(
                    id=clock.new_id(),
                    name=name,
                    kind=kind,
                    table_names=json.dumps(list(table_names)),
                    spec=_spec(pinned, settings),
                    state=PENDING,
                    unit=unit,
                    actor=actor,
                    created_ms=now,
                    updated_ms=now,
                    **dict.fromkeys(("processed", "resumed_from", "rows_done", "unfilled", "publishes"), 0),
                )
            )
        return None

    def _take(
        self, name: str, kind: str, table_names: Sequence[str], pinned: Mapping[str, Json],
        settings: Mapping[str, Json], run: str, anew: bool, ended_ms: int | None,
    ) -> HeldJob:  # fmt: skip
        with self._database.write() as tx:
            now = self._database.now_ms(tx)
            self._heartbeat.beat(tx, now)
            job = self._locked(tx, name, now)
            _check_known(job)
            if not anew or job.rows or job.alive or job.kind != kind:
                _check_same(job, kind, pinned)
            if job.alive:
                raise Busy("another run of this job is at work", job=name, holder=job.holder, advice="Try later.")
            if job.state == CANCELLED and job.ended_ms != ended_ms:
                raise Conflict("the job was cancelled while it was started", job=name, advice="Start it again.")
            if job.state == RUNNING and job.run is not None:
                self._audit(tx, job, "resumed", "its process died; the next run continues", now)
            tx.execute(
                update(tables.jobs)
                .where(tables.jobs.c.id == job.id)
                .values(
                    table_names=json.dumps(list(table_names)),
                    spec=_spec(pinned, settings),
                    state=RUNNING,
                    # An earlier run's work does not count in this run's rate.
                    resumed_from=tables.jobs.c.processed,
                    started_ms=now,
                    updated_ms=now,
                    ended_ms=None,
                    error=None,
                    acknowledged_ms=None,
                    cancel_ms=None,
                    **self._runs.held_by(run),
                )
            )
        since_ms = job.failing_since_ms if job.failed_passing else None
        return HeldJob(job.id, name, run, job.started_ms is not None, dict(pinned), job.processed, since_ms)

    def disown(self, run: str) -> None:
        """This run is over, whatever the catalog records."""
        self._runs.disown(run)

    # ── progress and the end ──

    def progress(self, held: HeldJob, processed: int, total: int | None, *, first: bool = False) -> bool:
        """Record how far the run is; False if an operator asked to cancel it. `first`: this run begins there."""
        values: dict[str, SqlValue] = {"processed": processed, "total": total}
        if first:
            values["resumed_from"] = processed
        with self._database.write() as tx:
            return self._update(tx, held, values).cancel_ms is None

    def keep(self, held: HeldJob, settings: Mapping[str, Json]) -> None:
        """Record other settings of the job than its start did: what a run has found out, for example."""
        with self._database.write() as tx:
            self._update(tx, held, {"spec": _spec(held.pinned, settings)})
        # Crash here: the next run finds it, and does the rest.
        hit("job.kept")

    def waits(self, held: HeldJob, error: Mapping[str, Json] | None) -> None:
        """Record what a run waits for, or that it does not wait any more: people see it with the job."""
        with self._database.write() as tx:
            self._update(tx, held, {"error": None if error is None else json.dumps(error)})

    def touch(self, held: HeldJob) -> bool:
        """Record that the run goes on, though its figures stay; False if an operator asked to cancel it."""
        with self._database.write() as tx:
            return self._update(tx, held, {}).cancel_ms is None

    def wants_cancel(self, held: HeldJob) -> bool:
        """Whether an operator asked to cancel this run. Fenced if another run has the job."""
        with self._database.read() as tx:
            return self._held_row(tx, held, lock=False).cancel_ms is not None

    def end(
        self,
        held: HeldJob,
        state: str,
        processed: int | None,
        total: int | None,
        error: Mapping[str, Json] | None = None,
    ) -> Job:
        """End the run; `processed` is None if it never reported progress: then the figures stay as they are.

        Tried again if the reply was lost: a job whose end is not recorded has not ended. Returns the job as its end was
        recorded, so the caller need not read it again.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_attempt(END_TRIES_MAX),
            wait=wait_exponential_jitter(multiplier=0.05, max=1, jitter=0.05),
            reraise=True,
        )
        values: dict[str, SqlValue] = {"state": state, "error": None if error is None else json.dumps(error)}
        if processed is not None:
            values |= {"processed": processed, "total": total}
        try:
            for attempt in retrying:
                with attempt:
                    job = self._end(held, values, again=attempt.retry_state.attempt_number > 1)
        except BaseException:
            self.disown(held.run)
            raise
        self.ended(held)
        return job

    def ended(self, held: HeldJob) -> None:
        """The end of the run is recorded, by `end` or by a publish of it (EndRider)."""
        self._runs.ended(held.run)
        hit("job.ended")

    def _end(self, held: HeldJob, values: dict[str, SqlValue], *, again: bool) -> Job:
        with self._database.write() as tx:
            mine = select(tables.jobs).where(tables.jobs.c.id == held.id)
            row = tx.execute(mine.with_for_update()).first()
            # This is a retry: an earlier try may have succeeded.
            if not again or row is None or (row.owner_run, row.state) != (None, values["state"]):
                self._update(tx, held, {**values, **_FREE}, ended=True)
            return self._read(tx, held.id, self._database.now_ms(tx))

    def _update(self, tx: Connection, held: HeldJob, values: dict[str, SqlValue], *, ended: bool = False) -> JobHold:
        row = self._held_row(tx, held)
        # A clock that was set back must not make a run end before it began.
        now = max(self._database.now_ms(tx), row.started_ms or 0)
        values |= {"updated_ms": now} | ({"ended_ms": now} if ended else {})
        tx.execute(update(tables.jobs).where(tables.jobs.c.id == held.id).values(values))
        return row

    def _held_row(self, tx: Connection, held: HeldJob, *, lock: bool = True) -> JobHold:
        return check_job(tx, held.id, held.run, name=held.name, lock=lock)

    # ── what people ask for ──

    def cancel(self, name: str) -> Job:
        """Ask the run to stop after its batch; a job that no process runs is cancelled at once. Finished work stays."""
        return self._change(name, self._cancel)

    def _cancel(self, tx: Connection, job: Job, now: int) -> dict[str, SqlValue]:
        _check_known(job)
        if job.is_over:
            return {}
        if job.alive:
            return {"cancel_ms": now}
        if job.state == RUNNING and job.run is not None:
            self._audit(tx, job, CANCELLED, "its process died, and an operator cancelled it", now)
        ended_ms = max(now, job.started_ms or 0)
        return {"state": CANCELLED, "ended_ms": ended_ms, **JOB.held_by(None, None)}

    def acknowledge(self, name: str) -> Job:
        """An operator has seen that the job failed: it needs no attention any more."""

        def acknowledged(tx: Connection, job: Job, now: int) -> dict[str, SqlValue]:
            return {"acknowledged_ms": now} if job.state == FAILED and job.acknowledged_ms is None else {}

        return self._change(name, acknowledged)

    def _change(self, name: str, change: Callable[[Connection, Job, int], dict[str, SqlValue]]) -> Job:
        with self._database.write() as tx:
            now = self._database.now_ms(tx)
            job = self._locked(tx, name, now)
            values = change(tx, job, now)
            if values:
                tx.execute(update(tables.jobs).where(tables.jobs.c.id == job.id).values(updated_ms=now, **values))
        return self.find(job.id)

    # ── inside ──

    def _locked(self, tx: Connection, name: str, now_ms: int) -> Job:
        """The job with this name or id, unchanged for as long as this transaction lasts."""
        known = find_id(tx, name)
        mine = tables.jobs.c.id == known
        if known is None or tx.execute(select(tables.jobs.c.id).where(mine).with_for_update()).first() is None:
            raise no_job(tx, name)
        return self._read(tx, known, now_ms)

    def _audit(self, tx: Connection, job: Job, outcome: str, detail: str, now: int) -> None:
        AuditRider("job", job.state, outcome, f"{job.name}: {detail}").apply(tx, job.run or job.id, None, now)

    def _read(self, tx: Connection, job: str, now_ms: int) -> Job:
        return _to_job(tx.execute(_JOBS.where(tables.jobs.c.id == job)).one(), self._runs, now_ms)


def _spec(pinned: Mapping[str, Json], settings: Mapping[str, Json]) -> str:
    return json.dumps({"pinned": dict(pinned), "settings": dict(settings)}, sort_keys=True)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or any(sign < " " or "\ud800" <= sign <= "\udfff" for sign in name):
        raise Invalid(f"a job's name is a text of 1 to {NAME_CHARACTERS_MAX} characters", name=repr(name)[:80])


def _check_known(job: Job) -> None:
    if job.status == UNKNOWN:
        raise Corrupt(
            "the job is in an unknown state", job=job.name, state=job.state, advice="It is kept. Upgrade Floodmark."
        )


def _check_same(job: Job, kind: str, pinned: Mapping[str, Json]) -> None:
    """The same job means the same work: otherwise finished work would be taken for other work."""
    known = {"kind": job.kind, **json.loads(job.spec)["pinned"]}
    wanted = {"kind": kind, **json.loads(json.dumps(dict(pinned)))}
    # A setting that is not given equals None.
    different = sorted(name for name in {*known, *wanted} if known.get(name) != wanted.get(name))
    if not different:
        return
    raise Invalid(
        "another job has this name",
        job=job.name,
        different="; ".join(f"{name}: {wanted.get(name)!r}, was {known.get(name)!r}" for name in different),
        advice="The definition of a started job cannot change. Choose another name.",
    )


@dataclass(frozen=True)
class EndRider:
    """A run of a job ends in this state; `error` is what the job reports to people."""

    job: str
    run: str
    state: str
    error: Mapping[str, Json] | None = None

    def check(self, tx: Connection) -> None:
        check_job(tx, self.job, self.run)

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        job = tables.jobs
        started_ms = tx.execute(select(job.c.started_ms).where(job.c.id == self.job)).scalar()
        # A clock that was set back must not make a run end before it began.
        ended_ms = max(now_ms, started_ms or 0)
        values: dict[str, SqlValue] = {
            "state": self.state,
            "error": None if self.error is None else json.dumps(dict(self.error)),
            "publishes": job.c.publishes + 1,
            "updated_ms": ended_ms,
            "ended_ms": ended_ms,
            **_FREE,
        }
        tx.execute(update(job).where(job.c.id == self.job).values(values))

    def as_dict(self) -> dict[str, Json]:
        error = None if self.error is None else dict(self.error)
        return {"type": "job_end", "job": self.job, "run": self.run, "state": self.state, "error": error}
