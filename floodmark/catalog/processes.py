"""Live processes: one heartbeat row per open lake, compared by the database's clock only.

A process is dead when its row is gone, when its lease has expired, or, at once, when it ran on this machine and its pid
does not exist any more. The last counts only when boot, pid namespace, pid and start time all match the row: another
process may reuse a pid. A process that was only suspended is dead too once its lease has expired: it finds out at its
next step, because every step reads the operation's state (fencing).
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from floodmark import clock, log
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.errors import Unavailable

LEASE_MS = 60_000  # long against the busy timeout of 10 s
BEAT_S_MIN = 0.5
FORGET_MS = 60 * 60_000


@dataclass(frozen=True)
class ProcessIdentity:
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: str


def this_process() -> ProcessIdentity:
    return ProcessIdentity(socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), _started(os.getpid()) or "")


def is_dead(row: Any, now_ms: int) -> bool:
    """Whether the holder of this row (fm_processes, or all None without one) has certainly stopped working."""
    if row.pid is None:
        return True
    if now_ms > row.beat_ms + row.lease_ms:
        return True
    here = this_process()
    same_machine = bool(here.boot_id) and (row.boot_id, row.pid_namespace) == (here.boot_id, here.pid_namespace)
    return same_machine and _is_gone(row.pid, row.started)


class Heartbeat:
    """This process's row: created with the first operation, renewed by a thread, removed on close."""

    def __init__(self, database: Database, lease_ms: int = LEASE_MS) -> None:
        self.id = clock.new_id()
        self._database = database
        self._lease_ms = lease_ms
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._known = False
        self._identity = this_process()
        self._disowned: set[str] = set()

    def beat(self, tx: Connection, now_ms: int) -> None:
        """Renew the lease inside a transaction that is written anyway; create the row if it is missing."""
        if not self._renewed(tx, now_ms):
            # An operation that begins and the thread may both find no row: under the lake's lock, one creates it.
            self._database.lock_lake(tx)
        if not self._renewed(tx, now_ms):
            # Rows of processes that are long dead: without a row they are as dead as with one.
            ended = tables.processes.c.beat_ms + tables.processes.c.lease_ms < now_ms - FORGET_MS
            tx.execute(delete(tables.processes).where(ended))
            identity = self._identity
            tx.execute(
                insert(tables.processes).values(
                    id=self.id,
                    host=identity.host,
                    boot_id=identity.boot_id,
                    pid_namespace=identity.pid_namespace,
                    pid=identity.pid,
                    started=identity.started,
                    beat_ms=now_ms,
                    lease_ms=self._lease_ms,
                )
            )
        self._known = True

    def _renewed(self, tx: Connection, now_ms: int) -> bool:
        mine = tables.processes.c.id == self.id
        return tx.execute(update(tables.processes).where(mine).values(beat_ms=now_ms)).rowcount == 1

    def disown(self, operation: str) -> None:
        """Stop vouching for an operation, or a run of a sink, job or daemon, whose outcome is not known."""
        self._disowned.add(operation)

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
                    if disowned:
                        theirs = tables.operations.c.id.in_(disowned)
                        tx.execute(update(tables.operations).where(theirs).values(process=""))
                        runs = tables.sinks.c.runner_run.in_(disowned)
                        tx.execute(update(tables.sinks).where(runs).values(runner_process=""))
                        jobs = tables.jobs.c.owner_run.in_(disowned)
                        tx.execute(update(tables.jobs).where(jobs).values(owner_process=""))
                        daemons = tables.daemon.c.run.in_(disowned)
                        tx.execute(update(tables.daemon).where(daemons).values(process=""))
                self._disowned -= disowned
            except Exception as error:  # noqa: BLE001 - a thread that ends would let live operations be fenced
                # Keep trying: if the lease expires meanwhile, recovery fences us and our publish finds that out.
                log.get().warning("a heartbeat failed", cause=str(error))


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
