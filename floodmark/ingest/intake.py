"""The intake: rows go into the spools of their tables, durable before the answer, and are fed from there.

One feed for each table that ever took rows (feed.py). A refused spool stops only its own table; `states` reports it.
One process at a time has a spool open; nothing here depends on the memory of an earlier process.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path

from floodmark import log
from floodmark.engine import Engine
from floodmark.errors import FloodmarkError, NotFound, Unavailable
from floodmark.ingest.feed import Feed, FeedState
from floodmark.ingest.feed_publish import Landed
from floodmark.ingest.judge import JudgedRows
from floodmark.spool.folder import is_spool
from floodmark.spool.spool import IntakeLimits, Taken
from floodmark.storage.location import split

__all__ = ["Intake", "IntakeLimits", "Landed", "Taken", "default_folder"]

DEFAULTS = IntakeLimits()
DRAIN_LOOK_S = 0.05
CLOSE_S_MAX = 30.0


def default_folder(location: str) -> Path | None:
    """Where the spools of a lake are by default: beside it, if it is on a local disk."""
    scheme, _, key = split(location)
    return Path(key) / "spool" if scheme == "file" else None


class Intake:
    """`folder`: on a local disk; each table has a folder of its own in it. May be used by several threads."""

    def __init__(self, engine: Engine, folder: Path, limits: IntakeLimits = DEFAULTS) -> None:
        engine.check_writable()
        self._engine = engine
        self._folder = folder.absolute()
        self._limits = limits
        self._feeds: dict[str, Feed] = {}
        self._lock = threading.Lock()
        self._draining = False
        self._closed = False

    @property
    def folder(self) -> Path:
        return self._folder

    def start(self) -> None:
        """Open the spools that the catalog or the folder has, and feed what waits in them."""
        known = {row.table_id: row.table for row in self._engine.catalog.spools.all() if self._is_here(row.folder)}
        there = [path.name for path in self._folder.iterdir() if is_spool(path)] if self._folder.is_dir() else []
        for table_id in sorted({*known, *there}):
            feed = self._feed(table_id, known.get(table_id, table_id))
            try:
                feed.open(create=False)
            except FloodmarkError as error:
                # Refused, or unavailable now: its thread tries again; the others continue.
                log.get(table_id=table_id).warning("a spool cannot be opened", cause=str(error))

    def _is_here(self, folder: str) -> bool:
        return Path(folder).parent == self._folder

    def _feed(self, table_id: str, table: str) -> Feed:
        with self._lock:
            if self._draining or self._closed:
                raise Unavailable("the server is stopping, and accepts no more rows", advice="Retry in a moment.")
            if table_id not in self._feeds:
                feed = Feed(self._engine, self._folder / table_id, table_id, table, self._limits, self._older_waits)
                self._feeds[table_id] = feed
                feed.start()
            return self._feeds[table_id]

    def _older_waits(self, table: str, received_ms: int) -> bool:
        """Whether rows of a table that came by then are still in its spool: rows that refer to them wait for them."""
        return any(feed.older_waits(received_ms) for feed in list(self._feeds.values()) if feed.table == table)

    def take(
        self,
        table: str,
        table_id: str,
        text: bytes,
        rows: int,
        *,
        key: str | None = None,
        evolve: bool = False,
        judged: JudgedRows | None = None,
        actor: str = "",
    ) -> Future[Taken]:
        """Take rows, which fit their table now, as JSON lines; the answer comes when they are durable.

        Busy: too much waits already. Conflict or Corrupt: the table's spool is refused. Invalid: the key was used for
        other rows. Then nothing was taken. `judged`: these rows as they were judged, if they were. `actor`: who sends
        them; the lake's own actor if empty.
        """
        return self._feed(table_id, table).take(text, rows, key=key, evolve=evolve, judged=judged, actor=actor)

    def is_open(self, table_id: str) -> bool:
        """Whether taking rows of this table waits only for its own disk."""
        feed = self._feeds.get(table_id)
        return feed is not None and feed.spool is not None

    def known(self, table_id: str, text: bytes, key: str) -> Taken | None:
        """Whether these rows were taken with this key before, whatever the table's schema is now."""
        feed = self._feeds.get(table_id)
        return None if feed is None or feed.spool is None else feed.spool.known(text, key)

    def wait(self, table_id: str, record: int, timeout_s: float) -> Landed:
        """Wait until a record is in its table, or in quarantine; Unavailable if that takes too long."""
        feed = self._feeds.get(table_id)
        if feed is None:
            raise NotFound("no rows were accepted for this table", table_id=table_id)
        return feed.wait(record, timeout_s)

    def states(self) -> list[FeedState]:
        """Each spool, as this process knows it."""
        return sorted((feed.state() for feed in list(self._feeds.values())), key=lambda one: str(one["table"]))

    def drain(self, within_s: float) -> bool:
        """Take no more rows, and feed those that wait. False if some still wait after this time."""
        with self._lock:
            self._draining = True
            feeds = list(self._feeds.values())
        for feed in feeds:
            feed.drain()
        end = time.monotonic() + within_s
        while time.monotonic() < end and not all(feed.is_empty() for feed in feeds):
            time.sleep(DRAIN_LOOK_S)
        return not any(state["waiting_records"] for state in self.states())

    def close(self) -> None:
        """Stop; a publish under way ends first. Waiting rows stay in the spools."""
        with self._lock:
            self._closed = True
            feeds = list(self._feeds.values())
        for feed in feeds:
            feed.close(CLOSE_S_MAX)
