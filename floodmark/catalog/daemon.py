"""The one daemon of a lake: which process runs its tasks, and the state of the tasks, for every reader.

The daemon's process holds it by a lease, as a run holds a sink: a second daemon gets Busy, with the holder; a dead one
is taken over. A daemon that was only suspended, and finds that another took over, is Fenced at its next write. A daemon
that ends normally leaves no row; one that died leaves its last report, until the next one starts.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import delete, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.processes import Heartbeat, is_dead, this_process
from floodmark.errors import Busy, Fenced

THE_ONE = 1


class DaemonHold:
    def __init__(self, database: Database, heartbeat: Heartbeat) -> None:
        self._database = database
        self._heartbeat = heartbeat
        self._run: str | None = None

    def take(self, address: str | None) -> None:
        """Become the lake's daemon; Busy, with the holder, if another is. A dead one is taken over."""
        if self._run is not None:
            raise Busy("this process is the daemon of the lake already", run=self._run)
        run, me = clock.new_id(), this_process()
        try:
            with self._database.write() as tx:
                # A missing row cannot be locked: of two daemons that start at once, one waits here.
                self._database.lock_lake(tx)
                now = self._database.now_ms(tx)
                self._heartbeat.beat(tx, now)
                found = tx.execute(_LOOKING).first()
                if found is not None and self._is_alive(found, now):
                    raise _held(found)
                tx.execute(delete(tables.daemon))
                tx.execute(
                    insert(tables.daemon).values(
                        id=THE_ONE,
                        process=self._heartbeat.id,
                        run=run,
                        host=me.host,
                        pid=me.pid,
                        address=address,
                        started_ms=now,
                        updated_ms=now,
                        tasks="[]",
                    )
                )
        except BaseException:
            # If only the reply was lost, the row exists and no process stands behind it.
            self._heartbeat.disown(run)
            self._heartbeat.start()
            raise
        self._run = run
        self._heartbeat.start()

    def tell(self, address: str | None = None, tasks: list[dict[str, Any]] | None = None) -> None:
        """Record where the daemon listens, or the state of its tasks. Fenced if another daemon took over."""
        row = tables.daemon
        values: dict[str, Any] = {} if address is None else {"address": address}
        if tasks is not None:
            values["tasks"] = json.dumps(tasks)
        with self._database.write() as tx:
            values["updated_ms"] = self._database.now_ms(tx)
            told = tx.execute(update(row).where(row.c.run == (self._run or "")).values(**values)).rowcount
        if told != 1:
            raise Fenced("another daemon has taken over this lake", run=self._run, advice="Stop this one.")

    def release(self) -> None:
        """Stop being the daemon. No-op if another one took over meanwhile."""
        if self._run is None:
            return
        run, self._run = self._run, None
        # If the row cannot be deleted now, it must not look as if a process still held it.
        self._heartbeat.disown(run)
        with self._database.write() as tx:
            tx.execute(delete(tables.daemon).where(tables.daemon.c.run == run))

    def seen(self) -> dict[str, Any] | None:
        """The daemon as any process sees it, or None if none runs. `alive` is False for one that died."""
        with self._database.read() as tx:
            row = tx.execute(_LOOKING).first()
            if row is None:
                return None
            alive = self._is_alive(row, self._database.now_ms(tx))
        return {
            "host": row.daemon_host,
            "pid": row.daemon_pid,
            "since": clock.format_time(row.started_ms),
            "address": row.address,
            "alive": alive,
            "told": clock.format_time(row.updated_ms),
            "tasks": json.loads(row.tasks),
        }

    def _is_alive(self, row: Any, now_ms: int) -> bool:
        if row.process == self._heartbeat.id:
            return bool(row.run == self._run)  # this process has the best information
        return not is_dead(row, now_ms)


_DAEMON, _PROCESS = tables.daemon, tables.processes
_LOOKING = select(
    *(_DAEMON.c[name] for name in ("process", "run", "address", "started_ms", "updated_ms", "tasks")),
    _DAEMON.c.host.label("daemon_host"),
    _DAEMON.c.pid.label("daemon_pid"),
    # The names that `is_dead` needs: all None if the process has no row any more.
    *(_PROCESS.c[name] for name in ("boot_id", "pid_namespace", "pid", "started", "beat_ms", "lease_ms")),
).join(_PROCESS, _PROCESS.c.id == _DAEMON.c.process, isouter=True)


def _held(row: Any) -> Busy:
    return Busy(
        "another daemon runs this lake",
        host=row.daemon_host,
        pid=row.daemon_pid,
        since=clock.format_time(row.started_ms),
        address=row.address,
        advice="Stop it first, or leave the work to it.",
    )
