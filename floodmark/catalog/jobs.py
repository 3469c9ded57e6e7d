"""Jobs in the catalog: long work that anyone can watch, stop and go on with.

A job is made once, under its name, with what it is for good (`pinned`); a start that means something else is refused.
One run holds it at a time, by a lease that lives as long as its process: whoever finds a dead holder takes over, and
the audit says so, once for every run that died (I16). What is done is not told by `processed`, which is for people, but
by the tables and fm_chunks: so a crash anywhere leaves a job that its next run goes on with from the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential_jitter

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.job import CANCELLED, FAILED, PENDING, RUNNING, UNKNOWN, Job
from floodmark.catalog.job_rows import LOOKING, check_job, find_id, no_job, to_job
from floodmark.catalog.processes import Heartbeat, is_dead
from floodmark.catalog.riders import AuditRider
from floodmark.errors import Busy, Conflict, Corrupt, Invalid, Unavailable
from floodmark.failpoints import hit

NAME_CHARACTERS_MAX = 200
END_TRIES_MAX = 5


@dataclass(frozen=True)
class Held:
    """A job that a run holds. `resumed`: an earlier run of it was there.

    `processed`: how far that came; `failing_since_ms`: since when it failed for a reason that may pass, if it did.
    """

    id: str
    name: str
    run: str
    resumed: bool
    pinned: Mapping[str, Any]
    processed: int = 0
    failing_since_ms: int | None = None


class Jobs:
    def __init__(self, database: Database, heartbeat: Heartbeat) -> None:
        self._database = database
        self._heartbeat = heartbeat
        # Runs of this process: its heartbeat vouches for no other.
        self._running: set[str] = set()

    # ── looking ──

    def all(self) -> list[Job]:
        """Every job, newest first."""
        with self._database.read() as tx:
            now = self._database.now_ms(tx)
            return [self._to_job(row, now) for row in tx.execute(LOOKING)]

    def find(self, name: str) -> Job:
        """A job by its name or, if none is called so, by its id."""
        with self._database.read() as tx:
            known = find_id(tx, name)
            if known is None:
                raise no_job(tx, name)
            return self._to_job(tx.execute(LOOKING.where(tables.jobs.c.id == known)).one(), self._database.now_ms(tx))

    # ── one run at a time ──

    def start(
        self,
        name: str,
        kind: str,
        table_names: Sequence[str],
        pinned: Mapping[str, Any],
        settings: Mapping[str, Any],
        unit: str,
        actor: str,
        *,
        anew: bool = False,
    ) -> Held:
        """Hold a job for a new run; it is made if there is none of this name. Busy if a living run has it.

        Invalid if it is not the same job: `pinned` must be what it was made with, unless it begins `anew` and no row is
        done yet. `settings` are those of this start.
        """
        _check_name(name)
        ended_ms = self._make(name, kind, table_names, pinned, settings, unit, actor)
        # Crash here: a job that is pending; the next start takes it.
        hit("job.made")
        run = clock.new_id()
        # Before it is true: another thread of this process must not take it for a dead one.
        self._running.add(run)
        try:
            held = self._take(name, kind, table_names, pinned, settings, run, anew, ended_ms)
        except BaseException:
            self.disown(run)
            raise
        self._heartbeat.start()
        # Crash here: a job that is running and whose owner is dead: interrupted; the next start goes on with it.
        hit("job.held")
        return held

    def _make(
        self, name: str, kind: str, table_names: Sequence[str], pinned: Mapping[str, Any],
        settings: Mapping[str, Any], unit: str, actor: str,
    ) -> int | None:  # fmt: skip
        """Make the job if there is none of this name; when its last run ended, None if none has."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            known = tx.execute(select(tables.jobs.c.ended_ms).where(tables.jobs.c.name == name)).first()
            if known is not None:
                return known.ended_ms  # type: ignore[no-any-return]
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
        self, name: str, kind: str, table_names: Sequence[str], pinned: Mapping[str, Any],
        settings: Mapping[str, Any], run: str, anew: bool, ended_ms: int | None,
    ) -> Held:  # fmt: skip
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
                self._audit(tx, job, "resumed", "its run died; the next one goes on from what is done", now)
            tx.execute(
                update(tables.jobs)
                .where(tables.jobs.c.id == job.id)
                .values(
                    table_names=json.dumps(list(table_names)),
                    spec=_spec(pinned, settings),
                    state=RUNNING,
                    # What an earlier run did is not this one's pace.
                    resumed_from=tables.jobs.c.processed,
                    started_ms=now,
                    updated_ms=now,
                    ended_ms=None,
                    error=None,
                    acknowledged_ms=None,
                    cancel_ms=None,
                    owner_process=self._heartbeat.id,
                    owner_run=run,
                )
            )
        since_ms = job.failing_since_ms if job.failed_passing else None
        return Held(job.id, name, run, job.started_ms is not None, dict(pinned), job.processed, since_ms)

    def disown(self, run: str) -> None:
        """This run is over, whatever the catalog says: the heartbeat writes that down as soon as it can."""
        self._running.discard(run)
        self._heartbeat.disown(run)
        self._heartbeat.start()

    # ── progress and the end ──

    def progress(self, held: Held, processed: int, total: int | None, *, first: bool = False) -> bool:
        """Write down how far the run is; False if somebody asked to cancel it. `first`: this run begins there."""
        values: dict[str, Any] = {"processed": processed, "total": total}
        if first:
            values["resumed_from"] = processed
        with self._database.write() as tx:
            return self._update(tx, held, values).cancel_ms is None

    def keep(self, held: Held, settings: Mapping[str, Any]) -> None:
        """Write down other settings of the job than its start did: what a run has found out, say."""
        with self._database.write() as tx:
            self._update(tx, held, {"spec": _spec(held.pinned, settings)})
        # Crash here: the next run finds it, and does the rest.
        hit("job.kept")

    def waits(self, held: Held, error: Mapping[str, Any] | None) -> None:
        """Write down what a run at work waits for, or that it waits no more: people see it with the job."""
        with self._database.write() as tx:
            self._update(tx, held, {"error": None if error is None else json.dumps(error)})

    def touch(self, held: Held) -> bool:
        """Write down that the run goes on, though its figures stay; False if somebody asked to cancel it."""
        with self._database.write() as tx:
            return self._update(tx, held, {}).cancel_ms is None

    def wants_cancel(self, held: Held) -> bool:
        """Whether somebody asked to cancel this run. Fenced if another run has the job."""
        with self._database.read() as tx:
            return self._held_row(tx, held, lock=False).cancel_ms is not None

    def end(
        self, held: Held, state: str, processed: int | None, total: int | None, error: Mapping[str, Any] | None = None
    ) -> Job:
        """The run is over; `processed` is None if it never said how far it is: then the figures stay as they are.

        Asked again if the reply was lost: a job whose end is not written is not at its end. The job is given as its end
        was written: nobody has to ask for it afterwards.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_attempt(END_TRIES_MAX),
            wait=wait_exponential_jitter(multiplier=0.05, max=1, jitter=0.05),
            reraise=True,
        )
        values: dict[str, Any] = {"state": state, "error": None if error is None else json.dumps(error)}
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

    def ended(self, held: Held) -> None:
        """The end of the run is written, by `end` or by a publish of it (job_end.py)."""
        self._running.discard(held.run)
        hit("job.ended")

    def _end(self, held: Held, values: dict[str, Any], *, again: bool) -> Job:
        with self._database.write() as tx:
            mine = select(tables.jobs).where(tables.jobs.c.id == held.id)
            row = tx.execute(mine.with_for_update()).first()
            # Asked again, an earlier try may have got through.
            if not again or row is None or (row.owner_run, row.state) != (None, values["state"]):
                free = dict.fromkeys(("owner_process", "owner_run", "cancel_ms"))
                self._update(tx, held, {**values, **free}, ended=True)
            return self._to_job(tx.execute(LOOKING.where(tables.jobs.c.id == held.id)).one(), self._database.now_ms(tx))

    def _update(self, tx: Connection, held: Held, values: dict[str, Any], *, ended: bool = False) -> Any:
        row = self._held_row(tx, held)
        # A clock that was set back must not make a run end before it began.
        now = max(self._database.now_ms(tx), row.started_ms or 0)
        values |= {"updated_ms": now} | ({"ended_ms": now} if ended else {})
        tx.execute(update(tables.jobs).where(tables.jobs.c.id == held.id).values(values))
        return row

    def _held_row(self, tx: Connection, held: Held, *, lock: bool = True) -> Any:
        return check_job(tx, held.id, held.run, name=held.name, lock=lock)

    # ── what people ask for ──

    def cancel(self, name: str) -> Job:
        """Ask the run to stop after its batch; a job that nobody is at is cancelled at once. What is done stays."""
        return self._change(name, self._cancel)

    def _cancel(self, tx: Connection, job: Job, now: int) -> dict[str, Any]:
        _check_known(job)
        if job.is_over:
            return {}
        if job.alive:
            return {"cancel_ms": now}
        if job.state == RUNNING and job.run is not None:
            self._audit(tx, job, CANCELLED, "its run died, and somebody cancelled it", now)
        ended_ms = max(now, job.started_ms or 0)
        return {"state": CANCELLED, "ended_ms": ended_ms, "owner_process": None, "owner_run": None}

    def acknowledge(self, name: str) -> Job:
        """Somebody has seen that the job failed: it needs no attention any more."""

        def acknowledged(tx: Connection, job: Job, now: int) -> dict[str, Any]:
            return {"acknowledged_ms": now} if job.state == FAILED and job.acknowledged_ms is None else {}

        return self._change(name, acknowledged)

    def _change(self, name: str, change: Callable[[Connection, Job, int], dict[str, Any]]) -> Job:
        with self._database.write() as tx:
            now = self._database.now_ms(tx)
            job = self._locked(tx, name, now)
            values = change(tx, job, now)
            if values:
                tx.execute(update(tables.jobs).where(tables.jobs.c.id == job.id).values(updated_ms=now, **values))
        return self.find(job.id)

    # ── inside ──

    def _locked(self, tx: Connection, name: str, now_ms: int) -> Job:
        """The job of this name or id, as it is for as long as this transaction lasts."""
        known = find_id(tx, name)
        mine = tables.jobs.c.id == known
        if known is None or tx.execute(select(tables.jobs.c.id).where(mine).with_for_update()).first() is None:
            raise no_job(tx, name)
        return self._to_job(tx.execute(LOOKING.where(mine)).one(), now_ms)

    def _audit(self, tx: Connection, job: Job, outcome: str, detail: str, now: int) -> None:
        AuditRider("job", job.state, outcome, f"{job.name}: {detail}").apply(tx, job.run or job.id, None, now)

    def _is_alive(self, row: Any, now_ms: int) -> bool:
        if row.owner_run is None:
            return False
        if row.owner_process == self._heartbeat.id:
            return row.owner_run in self._running
        return not is_dead(row, now_ms)

    def _to_job(self, row: Any, now_ms: int) -> Job:
        return to_job(row, self._is_alive(row, now_ms), now_ms)


def _spec(pinned: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    return json.dumps({"pinned": dict(pinned), "settings": dict(settings)}, sort_keys=True)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= NAME_CHARACTERS_MAX or any(sign < " " or "\ud800" <= sign <= "\udfff" for sign in name):
        raise Invalid(f"a job's name is a text of 1 to {NAME_CHARACTERS_MAX} characters", name=repr(name)[:80])


def _check_known(job: Job) -> None:
    if job.status == UNKNOWN:
        raise Corrupt(
            "the job is in an unknown state", job=job.name, state=job.state, advice="It is kept. Upgrade Floodmark."
        )


def _check_same(job: Job, kind: str, pinned: Mapping[str, Any]) -> None:
    """The same job means the same work: what is done would otherwise be taken for something else."""
    known = {"kind": job.kind, **json.loads(job.spec)["pinned"]}
    wanted = {"kind": kind, **json.loads(json.dumps(dict(pinned)))}
    # What is not said is the same as nothing.
    different = sorted(name for name in {*known, *wanted} if known.get(name) != wanted.get(name))
    if not different:
        return
    raise Invalid(
        "there is a job of this name, and it is another one",
        job=job.name,
        different="; ".join(f"{name}: {wanted.get(name)!r}, was {known.get(name)!r}" for name in different),
        advice="What a job is does not change once it was started. Choose another name.",
    )
