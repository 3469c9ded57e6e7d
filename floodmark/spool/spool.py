"""A spool: rows that came in over HTTP for one table, durable on a local disk until they are in the table.

One thread writes. It takes all appends that wait, writes them together, syncs once, then answers them in the order in
which they came (I4). While a sync runs the next appends gather, so a slower disk gets larger groups. If a group fails,
all of its appends fail, and none of its records is kept.

A client's Idempotency-Key brings its rows in once, within the window of keys. Opening repairs what a kill or a power
loss leaves: it cuts off bytes that were never acknowledged, and keeps acknowledged ones that it cannot read (Corrupt).
A second process that opens the spool gets Busy. The spool knows no catalog: its caller passes in the fed position.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from floodmark.clock import now_ms
from floodmark.errors import Busy, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.spool.folder import (
    ABOUT,
    KEYS,
    SYSTEM,
    About,
    Calls,
    check_about,
    delete_temporary,
    list_segments,
    local_files,
    read_about,
    segment_path,
    sync_folder,
    take_lock,
    write_about,
)
from floodmark.spool.frame import COUNT_MAX, HEADER_BYTES, Draft, Frame, pack
from floodmark.spool.keys import KeysReserve, KeyWindow, Known, digest, keys_bytes, keys_size, parse_keys
from floodmark.spool.segments import Record, Segments, Waiting, damaged

MIB = 1024 * 1024
_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True)
class IntakeLimits:
    """Of one table's intake. Bytes that wait are bytes on disk; those of a group are bytes of text."""

    waiting_bytes_max: int = 256 * MIB
    group_rows_max: int = 50_000
    group_bytes_max: int = 16 * MIB
    group_wait_ms: int = 1_000
    # A client's Idempotency-Key is known for this long, and as one of this many: whichever ends first.
    key_window_ms: int = _DAY_MS
    keys_max: int = 100_000
    # A segment of this size gets a successor.
    segment_bytes: int = 64 * MIB
    # Rows in memory that are not on disk yet: if the disk is too slow, callers get Busy before memory grows.
    queued_bytes_max: int = 32 * MIB


@dataclass(frozen=True)
class Taken:
    """Rows that are durable in the spool."""

    outcome: str  # taken, already_taken
    record: int
    rows: int


@dataclass
class Append:
    """A waiting append, and others that came with the same key: the digest of their rows, and their answer."""

    draft: Draft
    future: Future[Taken]
    followers: list[tuple[bytes, Future[Taken]]] = field(default_factory=list)


class GroupWriter:
    """The thread that writes. `write` makes a group durable and returns its first number; `ended` gets the first number
    or the error of each group, and answers; `idle` is called when a group was written and nothing waits."""

    def __init__(
        self,
        write: Callable[[Sequence[Draft]], int],
        ended: Callable[[list[Append], int | FloodmarkError], None],
        idle: Callable[[], None],
        queued_bytes_max: int,
    ) -> None:
        self._write = write
        self._ended = ended
        self._idle = idle
        self._queued_bytes_max = queued_bytes_max
        self._wake = threading.Condition()
        self._queue: deque[Append] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spool-writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def put(self, append: Append) -> None:
        size = append.draft.size_bytes
        with self._wake:
            if self._closed:
                raise Unavailable("this spool is closed", advice="Try again.")
            if self._queue and self._queued_bytes + size > self._queued_bytes_max:
                raise Busy(
                    "rows arrive faster than the disk of the spool writes them",
                    waiting_bytes=self._queued_bytes,
                    advice="Try again a little later.",
                )
            self._queue.append(append)
            self._queued_bytes += size
            self._wake.notify()

    def close(self) -> None:
        """Accept no more appends; those that wait are written first."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while group := self._take():
                ended = self._write_group(group)
                self._ended(group, ended)
                if isinstance(ended, int) and not self._queue:
                    self._idle()
        finally:
            # Without this thread no append would ever be answered.
            with self._wake:
                self._closed = True
                left = list(self._queue)
                self._queue.clear()
            if left:
                self._ended(left, Unavailable("the rows were not stored in the spool", advice="Try again."))

    def _write_group(self, group: list[Append]) -> int | FloodmarkError:
        try:
            return self._write([append.draft for append in group])
        except FloodmarkError as error:
            return error
        except Exception as error:  # noqa: BLE001 - every failure is the answer of the waiting appends
            return Unavailable("the rows were not stored in the spool", reason=repr(error), advice="Try again.")

    def _take(self) -> list[Append]:
        """All waiting appends; empty only once it is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closed)
            group = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            return group


class Spool:
    """The spool of one table, open in this process. Several threads may call all its methods."""

    def __init__(
        self,
        folder: Path,
        about: About,
        lock_fd: int,
        segments: Segments,
        keys: KeyWindow,
        limits: IntakeLimits,
        calls: Calls,
    ) -> None:
        self.folder = folder
        self.about = about
        self._lock_fd = lock_fd
        self._segments = segments
        self._keys = keys
        self._under_way: dict[bytes, Append] = {}
        self._lock = threading.Lock()
        self._forgetting = threading.Lock()
        self._closed = False
        self._reserve = KeysReserve(folder, calls)
        segments.around_roll = self._room_for_keys
        self._try_hold_room()  # a crash may have come after it was spent
        self._writer = GroupWriter(segments.add, self._ended, segments.say_durable, limits.queued_bytes_max)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        table_id: str,
        incarnation: str,
        limits: IntakeLimits,
        create: bool,
        calls: Calls = SYSTEM,
    ) -> Spool:
        """Busy: another process has it open. Conflict: it belongs to another table or incarnation. Corrupt: rows that
        were acknowledged cannot be read. NotFound: there is none, and `create` is False."""
        if not create and not (folder / ABOUT).exists():
            _refuse_headless(folder)
            raise NotFound("this folder has no spool", folder=folder)
        local_files().make_folder(str(folder.absolute()))
        lock_fd = take_lock(folder)
        try:
            delete_temporary(folder)
            about = read_about(folder)
            keys = KeyWindow(limits.keys_max, limits.key_window_ms)
            if about is None:
                _refuse_headless(folder)
                about, segments = _make(folder, table_id, incarnation, limits, calls)
            else:
                check_about(about, folder, table_id, incarnation)
                segments = _open_segments(folder, about, limits, calls, keys)
            return cls(folder, about, lock_fd, segments, keys, limits, calls)
        except BaseException:
            os.close(lock_fd)
            raise

    @property
    def id(self) -> str:
        return self.about.spool

    @property
    def first(self) -> int:
        """The first record that is kept."""
        return self._segments.first

    @property
    def end(self) -> int:
        """One past the last durable record."""
        return self._segments.end

    @property
    def repaired(self) -> int:
        """Torn bytes that were cut off when it was opened."""
        return self._segments.cut_bytes

    @property
    def stopped(self) -> FloodmarkError | None:
        """Why it takes nothing more until it is opened again: a sync failed."""
        return self._segments.stopped

    @property
    def queued_bytes(self) -> int:
        """Bytes in memory that are not written yet."""
        return self._writer.queued_bytes

    # ── in ──

    def append(self, text: bytes, rows: int, *, key: str | None, evolve: bool, actor: str = "") -> Future[Taken]:
        """Take rows in, under the name of their sender; the answer comes when they are durable. Invalid, at once or as
        the answer: the key was used for other rows. Busy: the disk does not keep up. Unavailable: the rows were not
        taken, and the key is free again."""
        if not 0 <= rows <= COUNT_MAX or len(text) > COUNT_MAX:
            raise Invalid("the record is too large", rows=rows, bytes=len(text), advice="Send fewer rows.")
        name = None if key is None else digest(key.encode())
        body = digest(text)
        future: Future[Taken] = Future()
        # It cannot be cancelled any more: waiting appends are written, whether or not the caller still listens.
        future.set_running_or_notify_cancel()
        if name is not None and self._answer_known(name, body, future):
            return future
        draft = Draft(pack(text, actor), rows, now_ms(), evolve, name, body)
        with self._lock:
            # Another append with this key may have come while this one was packed.
            if name is not None and self._answer_known_held(name, body, future):
                return future
            if (stopped := self.stopped) is not None:
                raise stopped
            append = Append(draft, future)
            self._writer.put(append)
            if name is not None:
                self._under_way[name] = append
        return future

    def known(self, text: bytes, key: str) -> Taken | None:
        """The result of these rows with this key, if they are in the spool, or were, within the window."""
        with self._lock:
            known = self._keys.find(digest(key.encode()), now_ms())
        same = known is not None and known.body == digest(text)
        return Taken("already_taken", known.record, known.rows) if known is not None and same else None

    def _answer_known(self, name: bytes, body: bytes, future: Future[Taken]) -> bool:
        with self._lock:
            return self._answer_known_held(name, body, future)

    def _answer_known_held(self, name: bytes, body: bytes, future: Future[Taken]) -> bool:
        """If the key is known, or on its way, the answer is that of the first append."""
        under_way = self._under_way.get(name)
        if under_way is not None:
            under_way.followers.append((body, future))
            return True
        known = self._keys.find(name, now_ms())
        if known is None:
            return False
        if known.body != body:
            raise _key_used(known.record)
        future.set_result(Taken("already_taken", known.record, known.rows))
        return True

    def _ended(self, group: list[Append], ended: int | FloodmarkError) -> None:
        """A group is durable from this number on, or failed: remember its keys, then answer its appends."""
        with self._lock:
            for place, append in enumerate(group):
                draft = append.draft
                if draft.key is None:
                    continue
                del self._under_way[draft.key]
                if isinstance(ended, int):
                    known = Known(draft.body, ended + place, draft.rows, draft.received_ms)
                    self._keys.add(draft.key, known)
        for place, append in enumerate(group):
            if isinstance(ended, int):
                _answer(append, ended + place)
            else:
                for future in (append.future, *(follower for _, follower in append.followers)):
                    future.set_exception(ended)

    # ── out ──

    def read(self, start: int, *, rows_max: int, bytes_max: int) -> list[Record]:
        """Durable records from `start` on: so many rows and bytes of text, but at least one record if one exists."""
        return self._segments.read(start, rows_max=rows_max, bytes_max=bytes_max)

    def waiting(self, position: int) -> Waiting:
        """What is durable from this record on."""
        return self._segments.waiting(position)

    def forget(self, position: int) -> None:
        """Records below are in the table: delete whole segments of them; their keys stay for the window."""
        with self._forgetting:
            fed = self._segments.fed(position)
            if not fed:
                return
            until = fed[-1].end
            with self._lock:
                entries = self._keys.copy_below(until)
            self._reserve.put(keys_bytes(self.id, until, entries))
            hit("spool.keys_kept")
            for segment in fed:
                self._segments.drop(segment)
                hit("spool.forgotten")
            # Reserve again what was spent, now that there is room; if there is none, before the next segment.
            self._try_hold_room()

    def _try_hold_room(self) -> None:
        if self._segments.count > 1:
            with contextlib.suppress(FloodmarkError), self._room_for_keys():
                pass

    @contextlib.contextmanager
    def _room_for_keys(self) -> Iterator[None]:
        """Reserve room for the keys of all records: no segment gets a successor before its keys could be written."""
        with self._lock:
            count = len(self._keys)
        with self._reserve.held(keys_size(count)):
            yield

    def close(self) -> None:
        """Waiting appends are written and answered first; then another process may open the spool."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._writer.close()
        self._segments.close()
        os.close(self._lock_fd)


def _answer(append: Append, record: int) -> None:
    rows = append.draft.rows
    append.future.set_result(Taken("taken", record, rows))
    for body, future in append.followers:
        if body == append.draft.body:
            future.set_result(Taken("already_taken", record, rows))
        else:
            future.set_exception(_key_used(record))


def _key_used(record: int) -> Invalid:
    return Invalid(
        "this Idempotency-Key was used for other rows",
        record=record,
        advice="Give each request its own key; send it again with the same key only if its rows are the same.",
    )


# ── making and opening ──


def _make(folder: Path, table_id: str, incarnation: str, limits: IntakeLimits, calls: Calls) -> tuple[About, Segments]:
    about = About.new(table_id, incarnation)
    segments = Segments.make(folder, about, limits.segment_bytes, calls)
    try:
        # Crash here: a folder without spool.json; the next opening creates the spool again.
        sync_folder(folder, calls)
        # A killed process may have created folders above this one and not synced them.
        local_files().settle({str(above) for above in folder.absolute().parents})
        write_about(folder, about)
        hit("spool.made")
    except BaseException:
        segments.close()
        raise
    return about, segments


def _refuse_headless(folder: Path) -> None:
    """An interrupted creation leaves no spool.json, and at most an empty first segment. Records without spool.json have
    lost their header, and must not be overwritten."""
    if not folder.is_dir():
        return
    for first, path in list_segments(folder):
        if first > 0 or path.stat().st_size > HEADER_BYTES:
            raise damaged(folder / ABOUT, "it has records, and no header")
    if (folder / KEYS).exists():
        raise damaged(folder / ABOUT, "it has keys, and no header")


def _open_segments(folder: Path, about: About, limits: IntakeLimits, calls: Calls, keys: KeyWindow) -> Segments:
    path, until = folder / KEYS, 0
    if path.exists():
        kept = parse_keys(local_files().read(str(path)), str(path))
        if kept.spool != about.spool:
            raise damaged(path, "its keys are those of another spool")
        until = kept.until
        for key, known in kept.entries:
            keys.add(key, known)
    paths = list_segments(folder)
    if paths and not paths[0][0] <= until <= paths[-1][0]:
        raise damaged(segment_path(folder, until), "a segment is missing", record=until)

    def learn(frame: Frame) -> None:
        if frame.number >= until:
            keys.add(frame.key, Known(frame.body, frame.number, frame.rows, frame.received_ms))

    return Segments.open(folder, about, limits.segment_bytes, calls, learn)
