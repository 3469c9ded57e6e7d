"""The feed of one table: a thread that publishes the records of its spool, group by group, for as long as it runs.

The catalog's position is the truth (catalog/spools.py): the feed reads it when it opens the spool and after every
group, whatever its outcome. A failure never ends the thread: `state` reports it, the feed waits longer each time, and
tries again from the catalog's position. It tries to open a refused spool again now and then, so that `floodmark spool
accept` is enough. After an unknown outcome nothing is fed before the outcome is known (I13).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import TypedDict

from floodmark import clock, log
from floodmark.catalog.spools import SpoolRow
from floodmark.commit.recovery import resolve
from floodmark.engine import Engine
from floodmark.errors import Busy, CommitUnknown, Conflict, Corrupt, FloodmarkError, NotFound, TooNew, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.feed_group import Memory, same_kind, table_gone
from floodmark.ingest.feed_publish import Fed, Feeder, Landed, await_others, landed_before
from floodmark.ingest.judge import JudgedRows
from floodmark.ingest.quarantine import clean
from floodmark.json_form import Json
from floodmark.spool.segments import Record
from floodmark.spool.spool import IntakeLimits, Spool, Taken
from floodmark.spool.state import is_fed, look, misfit, missing, missing_row, note_closed, note_opened

BACKOFF_S_MIN, BACKOFF_S_MAX = 0.2, 30.0
# After so long without rows the feed reads the catalog's position again.
IDLE_S = 5.0
LANDED_KEPT = 20_000
# Only an operator's action ends these; everything else may pass by itself.
REFUSALS = (Conflict, Corrupt, NotFound, TooNew, Busy)


class FeedState(TypedDict):
    """A spool, as the process that feeds its table knows it. Counts are None while the spool cannot be read."""

    table: str
    spool: str | None
    host: str
    folder: str
    state: str
    waiting_records: int | None
    waiting_rows: int | None
    waiting_bytes: int | None
    oldest_ms: int | None
    fed_records: int
    fed_rows: int
    quarantined: int
    version: int | None
    fed_at: str | None
    error: dict[str, Json] | None
    failures: int


class Feed:
    def __init__(
        self,
        engine: Engine,
        folder: Path,
        table_id: str,
        table: str,
        limits: IntakeLimits,
        older_waits: Callable[[str, int], bool] = lambda table, received_ms: False,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._table_id = table_id
        self._table = table
        self._limits = limits
        self._older_waits = older_waits
        self._opening = threading.Lock()
        self._changed = threading.Condition()
        self._spool: Spool | None = None
        self._feeder: Feeder | None = None
        self._memory = Memory()
        self._row: SpoolRow | None = None
        self._position = 0
        self._landed: OrderedDict[int, Landed] = OrderedDict()
        self._error: FloodmarkError | None = None
        self._failures = 0
        self._unknown: str | None = None
        self._unforgotten: FloodmarkError | None = None
        self._stale = False
        self._hurried = False
        self._draining = False
        self._stopped = False
        self._woken = False
        self._thread: threading.Thread | None = None
        self._log = log.get(table=table, table_id=table_id)

    # ── opening ──

    def open(self, *, create: bool) -> Spool | None:
        """The spool, opened and known to the catalog; None if the table has none and none is to be created."""
        with self._opening:
            if self._spool is not None:
                return self._spool
            try:
                self._spool = self._open(create)
            except FloodmarkError as error:
                self._error = error
                raise
            self._error = None
            return self._spool

    def _open(self, create: bool) -> Spool | None:
        catalog, host = self._engine.catalog, socket.gethostname()
        names = {head.table_id: head.table for head in catalog.history.heads()}
        row = self._row = catalog.spools.get(self._table_id)
        if self._table_id not in names:
            if is_fed(look(self._folder, 0 if row is None else row.position)):
                return None
            raise table_gone(self._table_id)
        self._table = names[self._table_id]
        incarnation, may_make = catalog.lake_row().incarnation, row is None or not row.spool_id
        try:
            spool = Spool.open(
                self._folder,
                table_id=self._table_id,
                incarnation=incarnation,
                limits=self._limits,
                create=create and may_make,
            )
        except NotFound:
            if row is None or may_make:
                return None
            raise missing(row, self._folder, host) from None
        try:
            if (problem := misfit(row, self._table, spool.id, spool.first, spool.end)) is not None:
                raise problem
            # Nothing is taken before this: no acknowledged row is in a spool that the catalog does not know.
            known = catalog.spools.register(self._table_id, self._table, spool.id, host, str(self._folder))
            hit("feed.registered")
            # Delete leftovers of a feed that died, as far as nothing can refer to them any more.
            clean(catalog, self._table_id)
        except BaseException:
            spool.close()
            raise
        if spool.repaired:
            self._log.warning("a torn tail was cut off: its rows were never acknowledged", cut_bytes=spool.repaired)
        self._row, self._position = known, known.position
        self._feeder = Feeder(self._engine, self._table_id, spool.id, self._memory, self._await_older)
        note_opened(spool)
        return spool

    def _shut(self) -> None:
        """Close the spool: it is not the table's any more, or takes nothing until it is opened again."""
        with self._opening:
            if self._spool is not None:
                note_closed(self._spool)
                self._spool.close()
                self._spool = None

    # ── in ──

    def take(
        self,
        text: bytes,
        rows: int,
        *,
        key: str | None,
        evolve: bool,
        judged: JudgedRows | None = None,
        actor: str = "",
    ) -> Future[Taken]:
        if self._draining or self._stopped:
            raise Unavailable("the server is stopping, and accepts no more rows", advice="Retry in a moment.")
        spool = self._spool
        if spool is None:
            if isinstance(self._error, REFUSALS):
                self._wake()
                # A new error for each caller: an error that is raised again and again grows with every time.
                raise type(self._error)(self._error.message, advice=self._error.advice, **self._error.facts)
            spool = self.open(create=True)
            if spool is None:
                raise table_gone(self._table_id)
        waiting = spool.waiting(self._position).bytes
        if waiting > self._limits.waiting_bytes_max:
            raise Busy(
                "too many rows of this table wait to be fed",
                table=self._table,
                waiting_bytes=waiting,
                waiting_bytes_max=self._limits.waiting_bytes_max,
                cause=None if self._error is None else self._error.message,
                advice="Send more slowly, and retry.",
            )
        future = spool.append(text, rows, key=key, evolve=evolve, actor=actor)
        future.add_done_callback(lambda done: self._taken(spool.id, judged, done))
        return future

    def _taken(self, spool: str, judged: JudgedRows | None, done: Future[Taken]) -> None:
        if judged is not None and done.exception() is None and done.result().outcome == "taken":
            self._memory.put(spool, done.result().record, judged)
        self._wake()

    @property
    def spool(self) -> Spool | None:
        """If it is open."""
        return self._spool

    def wait(self, record: int, timeout_s: float) -> Landed:
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._position <= record:
                left = end - time.monotonic()
                if left <= 0 or self._stopped:
                    raise Unavailable(
                        "the rows are stored, but not yet in their table",
                        table=self._table,
                        record=record,
                        cause=None if self._error is None else self._error.message,
                        advice="They will be committed. Send the request again with the same Idempotency-Key.",
                    )
                self._changed.wait(left)
            found = self._landed.get(record)
        return found if found is not None else landed_before(self._engine.catalog, self._table_id, record)

    # ── the thread ──

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"floodmark-feed-{self._table}", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stopped:
            self._woken = False
            try:
                pause = self._round()
                self._failures = 0
                if self._spool is not None:
                    self._error = None
            except Exception as error:  # noqa: BLE001 - a thread that ends would leave rows in the spool for ever
                pause = self._failed(error)
            with self._changed:
                # The round may not have seen rows that came since it began.
                if pause > 0 and not self._woken and not self._stopped:
                    self._changed.wait(pause)
            if self._failures and not self._draining and not self._stopped:
                # New rows wake the thread; they do not make it retry a failure more often.
                time.sleep(min(pause, 1.0))

    def _failed(self, error: Exception) -> float:
        self._failures += 1
        self._stale = True
        if isinstance(error, CommitUnknown):
            self._unknown = error.operation
        if isinstance(error, FloodmarkError):
            self._error = error
        else:
            self._error = Unavailable("the feed failed unexpectedly", cause=error)
        if isinstance(error, Corrupt | NotFound):
            # A spool that cannot be read, or is gone, takes nothing more: it is refused until it can be opened again.
            self._shut()
        pause: float = min(BACKOFF_S_MIN * 2 ** min(self._failures - 1, 10), BACKOFF_S_MAX)
        self._log.warning("a feed failed", cause=str(error), failures=self._failures, again_in_s=pause)
        return min(pause, 1.0) if self._draining else pause

    def _round(self) -> float:
        """One group, or a check whether one exists. Returns how long to wait until the next round."""
        if self._spool is not None and self._spool.stopped is not None:
            self._shut()
        spool = self.open(create=False)
        if spool is None:
            return IDLE_S
        if self._unknown is not None:
            resolve(self._engine.catalog, self._engine.recovery, self._unknown)
            self._unknown = None
        if self._stale:
            self._learn(spool)
        pause = self._due(spool)
        if pause > 0:
            return pause
        limits = self._limits
        read = spool.read(self._position, rows_max=limits.group_rows_max, bytes_max=limits.group_bytes_max)
        records = same_kind(read)
        # Crash here, and anywhere before the publish: the records are in the spool, and are read again.
        hit("feed.grouped")
        assert self._feeder is not None
        self._hurried = False
        self._feeder.feed(records, lambda fed: self._fed(records, fed))
        self._learn(spool)
        # Crash here: whole segments of records that are in the table; the next opening deletes them.
        hit("feed.forgotten")
        self._feeder.clean()
        return 0.0

    def _due(self, spool: Spool) -> float:
        """0 if a group is to be fed now; else how long it can wait."""
        waiting = spool.waiting(self._position)
        if not waiting.records:
            return IDLE_S
        limits, is_full = self._limits, waiting.rows >= self._limits.group_rows_max
        if self._draining or self._hurried or is_full or waiting.bytes >= limits.group_bytes_max:
            return 0.0
        age_ms = clock.now_ms() - (waiting.oldest_ms or 0)
        # A clock that was set back must not delay rows for as long.
        left_ms: int = limits.group_wait_ms - max(0, age_ms)
        return max(0.0, left_ms / 1000)

    def _learn(self, spool: Spool) -> None:
        """Read the spool's position from the catalog; the spool may delete records below it."""
        row = self._engine.catalog.spools.get(self._table_id)
        problem = (
            missing_row(self._table) if row is None else misfit(row, self._table, spool.id, spool.first, spool.end)
        )
        if problem is not None or row is None:
            self._shut()
            raise problem or missing_row(self._table)
        with self._changed:
            self._row, self._position, self._stale = row, row.position, False
            self._table = row.table  # it may have been renamed
            self._changed.notify_all()
        self._memory.forget(spool.id, row.position)
        self._forget(spool, row.position)

    def _forget(self, spool: Spool, position: int) -> None:
        """Best effort: rows are fed whether or not the spool can delete its files. `state` reports it; tried again."""
        try:
            spool.forget(position)
        except Unavailable as error:
            if self._unforgotten is None:
                self._log.warning("fed rows stay in the spool for now", cause=str(error))
            self._unforgotten, self._stale = error, True
        else:
            self._unforgotten = None

    # ── in the order of tables ──

    @property
    def table(self) -> str:
        return self._table

    def older_waits(self, received_ms: int) -> bool:
        """Whether rows that came by then wait here and can be fed: then they are fed, without waiting for others."""
        spool, oldest_ms = self._spool, None
        if spool is None or isinstance(self._error, REFUSALS):
            return False
        with contextlib.suppress(FloodmarkError):
            oldest_ms = spool.waiting(self._position).oldest_ms
        if oldest_ms is None or oldest_ms > received_ms:
            return False
        if not self._hurried:
            self._hurried = True
            self._wake()
        return True

    def _await_older(self, tables: Collection[str], received_ms: int) -> bool:
        others = [table for table in tables if table != self._table]
        return await_others(
            lambda: any(self._older_waits(table, received_ms) for table in others), lambda: self._stopped
        )

    def _fed(self, records: list[Record], fed: Fed) -> None:
        with self._changed:
            for record in records:
                if fed.since <= record.number < fed.until:
                    bad = fed.bad.get(record.number, 0)
                    self._landed[record.number] = Landed(fed.version, record.rows - bad, bad)
            while len(self._landed) > LANDED_KEPT:
                self._landed.popitem(last=False)
            self._position = fed.until
            self._changed.notify_all()

    # ── the end ──

    def drain(self) -> None:
        self._draining = True
        self._wake()

    def is_empty(self) -> bool:
        """Whether nothing waits, or nothing of what waits can be fed now."""
        spool = self._spool
        return spool is None or isinstance(self._error, REFUSALS) or not spool.waiting(self._position).records

    def close(self, within_s: float) -> None:
        self._stopped = True
        self._wake()
        if self._thread is not None:
            self._thread.join(within_s)
        self._shut()

    # ── state ──

    def state(self) -> FeedState:
        spool, row, error = self._spool, self._row, self._error or self._unforgotten
        waiting = None
        with contextlib.suppress(FloodmarkError):
            waiting = None if spool is None else spool.waiting(self._position)
        refused = isinstance(error, REFUSALS)
        oldest = None if waiting is None or waiting.oldest_ms is None else max(0, clock.now_ms() - waiting.oldest_ms)
        return {
            "table": self._table,
            "spool": None if row is None else row.spool_id or None,
            "host": socket.gethostname(),
            "folder": str(self._folder),
            "state": "refused" if refused else "waiting" if waiting is not None and waiting.records else "ok",
            "waiting_records": None if waiting is None else waiting.records,
            "waiting_rows": None if waiting is None else waiting.rows,
            "waiting_bytes": None if waiting is None else waiting.bytes,
            "oldest_ms": oldest,
            "fed_records": self._position,
            "fed_rows": 0 if row is None else row.rows,
            "quarantined": 0 if row is None else row.quarantined,
            "version": None if row is None else row.version,
            # By the catalog: it includes what an earlier process fed.
            "fed_at": clock.format_time(row.updated_ms) if row is not None and self._position else None,
            "error": None if error is None else error.as_dict(),
            "failures": self._failures,
        }
