"""The one daemon of a lake: which process runs its tasks, and the state of the tasks, for every reader.

The daemon's process holds it by a lease, as a run holds a sink: a second daemon gets Busy, with the holder; a dead one
is taken over. A daemon that was only suspended, and finds that another took over, is Fenced at its next write. A daemon
that ends normally leaves no row; one that died leaves its last report, until the next one starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from sqlalchemy import delete, insert, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.leases import DAEMON, Heartbeat, Runs, this_process, to_holder
from floodmark.errors import Busy, Fenced
from floodmark.json_form import Json

THE_ONE = 1


class SeenDaemon(TypedDict):
    """The daemon's row. A task has what its daemon reported, which may be of a later version."""

    host: str
    pid: int
    since: str
    address: str | None
    alive: bool
    told: str
    tasks: list[dict[str, Any]]


class DaemonHold:
    def __init__(self, database: Database, heartbeat: Heartbeat) -> None:
        self._database = database
        self._heartbeat = heartbeat
        self._runs = Runs(DAEMON, heartbeat)
        self._run: str | None = None

    def take(self, address: str | None) -> None:
        """Become the lake's daemon; Busy, with the holder, if another is. A dead one is taken over."""
        if self._run is not None:
            raise Busy("this process is the daemon of the lake already", run=self._run)
        run, me = clock.new_id(), this_process()
        with self._runs.taking(run), self._database.write() as tx:
            # A missing row cannot be locked: of two daemons that start at once, one waits here.
            self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            self._heartbeat.beat(tx, now)
            found = tx.execute(_DAEMON).first()
            if found is not None and self._runs.is_held(to_holder(found), now):
                raise Busy(
                    "another daemon runs this lake",
                    host=found.host,
                    pid=found.pid,
                    since=clock.format_time(found.started_ms),
                    address=found.address,
                    advice="Stop it first, or let it do the work.",
                )
            tx.execute(delete(tables.daemon))
            tx.execute(
                insert(tables.daemon).values(
                    id=THE_ONE,
                    host=me.host,
                    pid=me.pid,
                    address=address,
                    started_ms=now,
                    updated_ms=now,
                    tasks="[]",
                    **self._runs.held_by(run),
                )
            )
        self._run = run

    def report(self, address: str | None = None, tasks: Sequence[Mapping[str, Json]] | None = None) -> None:
        """Record where the daemon listens, or the state of its tasks. Fenced if another daemon took over."""
        row = tables.daemon
        values = {} if address is None else {"address": address}
        if tasks is not None:
            values["tasks"] = json.dumps(tasks)
        with self._database.write() as tx:
            mine = update(row).where(row.c.run == (self._run or ""))
            updated = tx.execute(mine.values(**values, updated_ms=self._database.now_ms(tx))).rowcount
        if updated != 1:
            raise Fenced("another daemon has taken over this lake", run=self._run, advice="Stop this one.")

    def release(self) -> None:
        """Stop being the daemon. No-op if another one took over meanwhile."""
        if self._run is None:
            return
        run, self._run = self._run, None
        # If the row cannot be deleted now, it must not look as if a process still held it.
        self._runs.disown(run)
        with self._database.write() as tx:
            tx.execute(delete(tables.daemon).where(tables.daemon.c.run == run))

    def seen(self) -> SeenDaemon | None:
        """The daemon as any process sees it, or None if none runs. `alive` is False for one that died."""
        with self._database.read() as tx:
            row = tx.execute(_DAEMON).first()
            if row is None:
                return None
            alive = self._runs.is_held(to_holder(row), self._database.now_ms(tx))
        return {
            "host": row.host,
            "pid": row.pid,
            "since": clock.format_time(row.started_ms),
            "address": row.address,
            "alive": alive,
            "told": clock.format_time(row.updated_ms),
            "tasks": json.loads(row.tasks),
        }


_DAEMON = DAEMON.select(
    *(tables.daemon.c[name] for name in ("host", "pid", "address", "started_ms", "updated_ms", "tasks"))
)
