"""The one daemon of a lake: who runs its tasks, and how they are, for anybody who asks.

Held by the lease of its process, as a sink is by its run: a second one is Busy and told who holds it; one that died is
taken over. A daemon that was only paused, and finds that another took over, is Fenced at its next word. A daemon that
ends in order leaves no row; one that died leaves its last word, until the next one comes.
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
        """Become the lake's daemon, or Busy with who is. One that is dead is taken over."""
        if self._run is not None:
            raise Busy("this process is the daemon of the lake already", run=self._run)
        run, me = clock.new_id(), this_process()
        try:
            with self._database.write() as tx:
                # A row that is not there cannot be locked: of two daemons that start at once, one waits here.
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
            # If only the reply was lost, the row is there and nobody is behind it.
            self._heartbeat.disown(run)
            self._heartbeat.start()
            raise
        self._run = run
        self._heartbeat.start()

    def tell(self, address: str | None = None, tasks: list[dict[str, Any]] | None = None) -> None:
        """Write down where the daemon listens, or how its tasks are. Fenced if another daemon took over."""
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
        """Be the daemon no longer. Nothing is done if another one took over meanwhile."""
        if self._run is None:
            return
        run, self._run = self._run, None
        # If the row cannot be deleted now, it must not look as if somebody were behind it.
        self._heartbeat.disown(run)
        with self._database.write() as tx:
            tx.execute(delete(tables.daemon).where(tables.daemon.c.run == run))

    def seen(self) -> dict[str, Any] | None:
        """The daemon as anybody sees it, or None if there is none. `alive` is False for one that died."""
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
            return bool(row.run == self._run)  # this process knows best
        return not is_dead(row, now_ms)


_DAEMON, _PROCESS = tables.daemon, tables.processes
_LOOKING = select(
    *(_DAEMON.c[name] for name in ("process", "run", "address", "started_ms", "updated_ms", "tasks")),
    _DAEMON.c.host.label("daemon_host"),
    _DAEMON.c.pid.label("daemon_pid"),
    # The names that `is_dead` asks for: all None if the process has no row any more.
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
