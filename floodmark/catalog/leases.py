"""Leases: which process holds what, whether that process lives, and how a hold is taken, checked and ended.

A process that writes has one heartbeat row per open lake (fm_processes), renewed by the database's clock: its lease.
Operations, jobs, sinks and the daemon have no time of their own. Their row names the process and the run that holds
them (`Lease`), so they are held as long as that process lives and vouches for the run.

A process is dead when its row is gone, when its lease has expired, or, at once, when it ran on this machine and its pid
does not exist any more. The last counts only when boot, pid namespace, pid and start time all match the row: another
process may reuse a pid. A process that was only suspended is dead too once its lease has expired: it finds out at its
next step, because every step is conditional on the run that holds the row (fencing).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from sqlalchemy import Column, ColumnElement, Connection, Select, bindparam, delete, insert, select, update

from floodmark import clock, log
from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow
from floodmark.errors import Unavailable
from floodmark.model import Scalar

LEASE_MS = 60_000  # long against the busy timeout of 10 s
BEAT_S_MIN = 0.5
FORGET_MS = 60 * 60_000


# ── is a holder dead? ──


@dataclass(frozen=True)
class ProcessIdentity:
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: str


@dataclass(frozen=True)
class ProcessRow(ProcessIdentity):
    """A row of fm_processes: a process and its lease."""

    beat_ms: int
    lease_ms: int


@dataclass(frozen=True)
class Holder:
    """The process and the run that hold a row, if any do. `row` is None if the process has no heartbeat row."""

    process: str | None
    run: str | None
    row: ProcessRow | None

    @property
    def shown(self) -> str:
        return "this process" if self.row is None else f"{self.row.host}:{self.row.pid}"


def this_process() -> ProcessIdentity:
    return ProcessIdentity(socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid()) or "")


def is_dead(process: ProcessRow | None, now_ms: int) -> bool:
    """Whether a process has certainly stopped working; `now_ms` is the database's time. None: it has no row."""
    if process is None or now_ms > process.beat_ms + process.lease_ms:
        return True
    here = this_process()
    same_machine = bool(here.boot_id) and (process.boot_id, process.pid_namespace) == (here.boot_id, here.pid_namespace)
    return same_machine and _is_gone(process.pid, process.started)


def living_processes(tx: Connection, now_ms: int) -> list[ProcessRow]:
    """The processes that have this lake open for writing."""
    found = (_to_process(row) for row in tx.execute(select(*_PROCESS_COLUMNS)))
    return [process for process in found if process is not None and not is_dead(process, now_ms)]


# Labelled: the row that is held may have columns of these names.
_PROCESS_COLUMNS = tuple(
    tables.processes.c[name].label(f"process_{name}")
    for name in ("host", "boot_id", "pid_namespace", "pid", "started", "beat_ms", "lease_ms")
)


def _to_process(row: SqlRow) -> ProcessRow | None:
    if row.process_pid is None:
        return None
    return ProcessRow(
        row.process_host,
        row.process_boot_id,
        row.process_pid_namespace,
        row.process_pid,
        row.process_started,
        row.process_beat_ms,
        row.process_lease_ms,
    )


# ── what a process holds ──


@dataclass(frozen=True)
class Lease:
    """The columns of a catalog table that name a row's holder.

    Every write of a holder is conditional on its run. What follows if another run has the row differs by what is held:
    a write of a sink's unit, a job's progress and end, and a report of the daemon are Fenced; releasing a sink does
    nothing; a daemon that ends deletes its row, since a lake without a daemon has none. Of an operation the journal
    checks the state instead (commit/journal.py).
    """

    process: Column[str]
    run: Column[str]

    def select(self, *columns: ColumnElement[Scalar]) -> Select[*tuple[Scalar, ...]]:
        """These columns of the rows, with what `to_holder` reads: one query for a row, its holder and its heartbeat."""
        process = tables.processes
        return select(
            *columns, self.process.label("holder_process"), self.run.label("holder_run"), *_PROCESS_COLUMNS
        ).join_from(self.run.table, process, process.c.id == self.process, isouter=True)

    def held_by(self, process: str | None, run: str | None) -> dict[str, str | None]:
        """The values of the columns; both None: free."""
        return {self.process.name: process, self.run.name: run}


def to_holder(row: SqlRow) -> Holder:
    return Holder(row.holder_process, row.holder_run, _to_process(row))


# An operation is its own run: it is never taken over, only settled by recovery.
OPERATION = Lease(tables.operations.c.process, tables.operations.c.id)
JOB = Lease(tables.jobs.c.owner_process, tables.jobs.c.owner_run)
SINK = Lease(tables.sinks.c.runner_process, tables.sinks.c.runner_run)
DAEMON = Lease(tables.daemon.c.process, tables.daemon.c.run)
_LEASES = (OPERATION, SINK, JOB, DAEMON)


_RENEW = update(tables.processes).where(tables.processes.c.id == bindparam("process"))


class Heartbeat:
    """This process's row: created with the first operation, renewed by a thread, removed on close."""

    def __init__(self, database: Database, lease_ms: int = LEASE_MS) -> None:
        self.id = clock.new_id()
        self._database = database
        self._lease_ms = lease_ms
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._known = False
        self._beat_ms: int | None = None
        self._identity = this_process()
        self._disowned: set[str] = set()

    def beat(self, tx: Connection, now_ms: int) -> None:
        """Renew the lease inside a transaction that is written anyway; create the row if it is missing.

        One that was renewed a moment ago is not renewed again: the thread does it four times in a lease.
        """
        if self._beat_ms is not None and now_ms - self._beat_ms < self._lease_ms // 16:
            return
        if self._renewed(tx, now_ms):
            self._known = True
            return
        # An operation that begins and the thread may both find no row: under the lake's lock, one creates it.
        self._database.lock_lake(tx)
        if not self._renewed(tx, now_ms):
            # Rows of processes that are long dead: without a row they are as dead as with one.
            ended = tables.processes.c.beat_ms + tables.processes.c.lease_ms < now_ms - FORGET_MS
            tx.execute(delete(tables.processes).where(ended))
            mine = {**asdict(self._identity), "beat_ms": now_ms, "lease_ms": self._lease_ms}
            tx.execute(insert(tables.processes).values(id=self.id, **mine))
        self._known = True

    def _renewed(self, tx: Connection, now_ms: int) -> bool:
        found = tx.execute(_RENEW, {"process": self.id, "beat_ms": now_ms}).rowcount == 1
        # None: the row is created in this transaction, which may be undone, so the next one looks again.
        self._beat_ms = now_ms if found else None
        return found

    def disown(self, run: str) -> None:
        """Stop vouching for an operation, or a run of a sink, job or daemon, whose outcome is not known."""
        self._disowned.add(run)

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="floodmark-heartbeat", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if not self._known or self._database.is_foreign:
            return
        try:
            with self._database.write() as tx:
                tx.execute(delete(tables.processes).where(tables.processes.c.id == self.id))
        except Unavailable:
            return  # the row expires with its lease

    def _run(self) -> None:
        while not self._stop.wait(max(self._lease_ms / 4000, BEAT_S_MIN)):
            try:
                with self._database.write() as tx:
                    self.beat(tx, self._database.now_ms(tx))
                    disowned = set(self._disowned)
                    for lease in _LEASES if disowned else ():
                        theirs = update(lease.run.table).where(lease.run.in_(disowned))
                        tx.execute(theirs.values({lease.process.name: ""}))
                self._disowned -= disowned
            except Exception as error:  # noqa: BLE001 - a thread that ends would let live operations be fenced
                # Keep trying: if the lease expires meanwhile, recovery fences us and our publish finds that out.
                log.get().warning("a heartbeat failed", cause=str(error))


class Runs:
    """The runs of this process that hold rows by one lease: its heartbeat vouches for no other."""

    def __init__(self, lease: Lease, heartbeat: Heartbeat) -> None:
        self._lease = lease
        self._heartbeat = heartbeat
        # A run of this process that is missing here ended without an answer: it is as dead as one of a killed process.
        self.active: set[str] = set()

    def is_own(self, holder: Holder) -> bool:
        return holder.process == self._heartbeat.id

    def is_held(self, holder: Holder, now_ms: int) -> bool:
        """Whether the holder is still at work. Of its own runs this process has the best information."""
        if holder.run is None:
            return False
        return holder.run in self.active if self.is_own(holder) else not is_dead(holder.row, now_ms)

    @contextmanager
    def taking(self, run: str) -> Iterator[None]:
        """Around the transaction that takes a row for a run.

        If that fails, the run is disowned: its reply may be lost, and then the row is held by a run that never begins.
        """
        # Before it is true: another thread of this process must not take it for a dead one.
        self.active.add(run)
        try:
            yield
        except BaseException:
            self.disown(run)
            raise
        self._heartbeat.start()

    def held_by(self, run: str) -> dict[str, str | None]:
        """The columns of a row that this run holds; the caller locked the row, and found no living holder."""
        return self._lease.held_by(self._heartbeat.id, run)

    def disown(self, run: str) -> None:
        """This run is over, whatever the catalog records: the heartbeat writes that as soon as it can."""
        self.active.discard(run)
        self._heartbeat.disown(run)
        self._heartbeat.start()

    def ended(self, run: str) -> None:
        """The end of the run is recorded."""
        self.active.discard(run)


# ── processes of this machine ──


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_gone(pid: int, started: str) -> bool:
    """Whether the process of this machine with this start time has certainly ended. A zombie has."""
    fields = _stat(pid)
    if fields is not None:
        return fields[0] == "Z" or fields[19] != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False  # it exists, but is hidden from us


def _started(pid: int) -> str | None:
    """The start time of a process of this machine, if it can be seen."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
