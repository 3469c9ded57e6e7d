"""The segment files of a spool that is open: records are added at the end of the last one, read anywhere, and go with
whole segments from the front.

One thread adds (the writer); others read and drop. A write that fails is undone before anything else is written; a
sync that fails stops the spool, as nobody can say any more which bytes are on the disk (I4). A crash leaves what the
opening repairs: a torn tail, or a segment without a header.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from floodmark.clock import now_ms
from floodmark.errors import BelowRetention, Conflict, FloodmarkError, Unavailable
from floodmark.failpoints import hit
from floodmark.spool.folder import About, Calls, failing, list_segments, segment_path, sync_folder
from floodmark.spool.frame import FRAME_BYTES, Draft, Frame, frame_head, mark, name_of, parse_head, unpack
from floodmark.spool.record import Record, Waiting
from floodmark.spool.segment import (
    Found,
    Segment,
    begin,
    block_reader,
    damaged,
    find,
    find_segment,
    repair,
    write_all,
)
from floodmark.storage.failures import local_failure


class Segments:
    def __init__(
        self, folder: Path, about: About, segments: list[Segment], fd: int, segment_bytes: int, calls: Calls
    ) -> None:
        self._folder = folder
        self._about = about
        self._segments = segments
        self._fd = fd
        self._segment_bytes = segment_bytes
        self._calls = calls
        self._lock = threading.Lock()
        self._torn = False  # bytes after the last record that have to go before the next one is written
        self._stop_reason: str | None = None
        self.cut_bytes = 0
        # Called before a segment gets a successor; if it fails nothing is begun.
        self.around_roll: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    @classmethod
    def make(cls, folder: Path, about: About, segment_bytes: int, calls: Calls) -> Segments:
        path = segment_path(folder, 0)
        with failing("make", path):
            fd = begin(path, about, 0, 0, calls)
        return cls(folder, about, [Segment(path, 0, 0)], fd, segment_bytes, calls)

    @classmethod
    def open(
        cls, folder: Path, about: About, segment_bytes: int, calls: Calls, learn: Callable[[Frame], None]
    ) -> Segments:
        """Look at all of them before anything is changed."""
        paths = list_segments(folder)
        if not paths:
            raise damaged(folder, "it has no segments")
        found: list[Found] = []
        for place, (first, path) in enumerate(paths):
            next_first = paths[place + 1][0] if place + 1 < len(paths) else None
            found.append(find(path, first, about, next_first=next_first, learn=learn))
        rows_before = found[-2].segment.rows_end if len(found) > 1 else 0
        with failing("make a name durable", folder):
            sync_folder(folder, calls)
        last, fd = repair(found[-1], about, rows_before, calls)
        opened = cls(folder, about, [*(one.segment for one in found[:-1]), last], fd, segment_bytes, calls)
        opened.cut_bytes = found[-1].cut_bytes
        if found[-1].proven < last.end:
            opened.say_durable()
        return opened

    @property
    def first(self) -> int:
        with self._lock:
            return self._segments[0].first

    @property
    def end(self) -> int:
        with self._lock:
            return self._segments[-1].end

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._segments)

    # ── adding, by one thread ──

    def add(self, drafts: Sequence[Draft]) -> int:
        """Write records with one write and make them durable with one sync; the number of the first of them."""
        if (stopped := self.stopped) is not None:
            raise stopped
        self._cut_torn()
        last = self._segments[-1]
        if last.size >= self._segment_bytes and last.end > last.first:
            last = self._roll(last)
        first, rows = last.end, last.rows_end
        pieces: list[bytes] = []
        for number, draft in enumerate(drafts, first):
            pieces.append(frame_head(draft, number, synced=first, rows_before=rows, salt=self._about.salt))
            pieces.append(draft.payload.data)
            rows += draft.rows
        self._write(last, b"".join(pieces))
        hit("spool.written")
        # Crash here: whole records that nobody was told of, or half of one; opening keeps the whole ones.
        self._sync(last)
        hit("spool.synced")
        with self._lock:
            offset = last.size
            for draft in drafts:
                last.add(offset, draft.size_bytes, draft.rows, draft.received_ms)
                offset += draft.size_bytes
        self._torn = False
        return first

    def say_durable(self) -> None:
        """Leave word that all records are durable, so that a damaged one is not taken for a torn one. Without a sync:
        if the word is lost, no record is."""
        last = self._segments[-1]
        data = mark(last.end, rows_before=last.rows_end, received_ms=now_ms(), salt=self._about.salt)
        try:
            write_all(self._fd, data, last.size, self._calls)
        except OSError:
            self._torn = True  # nobody waits for it; the next record's write tells of the disk
            return
        with self._lock:
            last.size += len(data)

    def _write(self, last: Segment, data: bytes) -> None:
        try:
            self._torn = True
            write_all(self._fd, data, last.size, self._calls)
        except OSError as error:
            self._cut_torn()
            raise local_failure(error, "take the rows into the spool", str(last.path)) from error

    def _sync(self, last: Segment) -> None:
        try:
            self._calls.fsync(self._fd)
        except OSError as error:
            # Best effort: after a failed sync nothing that is read back proves anything.
            with contextlib.suppress(OSError):
                self._calls.ftruncate(self._fd, last.size)
            raise self._stop(error) from error

    def _cut_torn(self) -> None:
        """Take off what a failed write left. Durable: a power loss must not bring back rows that were refused."""
        if not self._torn:
            return
        last = self._segments[-1]
        try:
            self._calls.ftruncate(self._fd, last.size)
        except OSError as error:
            raise Unavailable(
                "half written rows cannot be cut off the spool",
                location=last.path,
                reason=error.strerror,
                advice="Check the disk. Send the rows again with the same Idempotency-Key: they come in once.",
            ) from error
        self._sync(last)
        self._torn = False

    @property
    def stopped(self) -> FloodmarkError | None:
        """Why nothing more is taken, if a sync failed."""
        return None if self._stop_reason is None else self._stop_error(self._stop_reason)

    def _stop(self, error: OSError) -> FloodmarkError:
        self._stop_reason = error.strerror or str(error)
        return self._stop_error(self._stop_reason)

    def _stop_error(self, reason: str) -> FloodmarkError:
        return Unavailable(
            "the spool has stopped: the disk did not confirm what was written",
            folder=self._folder,
            reason=reason,
            advice="Check the disk and restart. Rows that got no good answer: send them again with the same "
            "Idempotency-Key, they come in once.",
        )

    def _roll(self, last: Segment) -> Segment:
        with self.around_roll():
            return self._begin_next(last)

    def _begin_next(self, last: Segment) -> Segment:
        """Begin the next segment. All before it is durable, so whoever finds it knows that they were acknowledged."""
        path = segment_path(self._folder, last.end)
        try:
            fd = begin(path, self._about, last.end, last.rows_end, self._calls)
        except OSError as error:
            # Left behind it would be an empty last segment, which does no harm.
            with contextlib.suppress(OSError):
                path.unlink()
            raise local_failure(error, "begin a segment of the spool", str(path)) from error
        new = Segment(path, last.end, last.rows_end)
        try:
            sync_folder(self._folder, self._calls)
        except OSError as error:
            os.close(fd)
            raise self._stop(error) from error
        hit("spool.rolled")
        with self._lock:
            os.close(self._fd)
            self._fd = fd
            self._segments.append(new)
        return new

    # ── reading ──

    def read(self, start: int, *, rows_max: int, bytes_max: int) -> list[Record]:
        with self._lock:
            segments, end = list(self._segments), self._segments[-1].end
        self._check_position(start, segments[0].first, end)
        found: list[Record] = []
        rows = size = 0
        for segment in segments[find_segment(segments, start) :]:
            with _open(segment.path) as fd:
                read = block_reader(fd)
                for number in range(max(start, segment.first), min(segment.end, end)):
                    offset = segment.offset(number)
                    frame = _head(read(offset, FRAME_BYTES), segment, number, self._about.salt)
                    rows, size = rows + frame.rows, size + frame.text_bytes
                    if found and (rows > rows_max or size > bytes_max):
                        return found
                    found.append(_record(frame, read(offset + FRAME_BYTES, frame.payload_bytes), segment))
        return found

    def waiting(self, position: int) -> Waiting:
        with self._lock:
            first, end = self._segments[0].first, self._segments[-1].end
            # What is forgotten does not wait; who asks may not have heard of it yet.
            position = max(position, first)
            self._check_position(position, first, end)
            if position == end:
                return Waiting(0, 0, 0, None)
            place = find_segment(self._segments, position)
            here, last = self._segments[place], self._segments[-1]
            size = sum(segment.size for segment in self._segments[place:]) - here.offset(position)
            rows = last.rows_end - here.rows_before(position)
            return Waiting(end - position, rows, size, here.received_ms(position))

    def _check_position(self, position: int, first: int, end: int) -> None:
        if position < first:
            raise BelowRetention(
                "these records are not in the spool any more",
                folder=self._folder,
                record=position,
                first=first,
                advice="They were fed to the table.",
            )
        if position > end:
            raise Conflict(
                "this spool is older than what was fed from it",
                folder=self._folder,
                position=position,
                end=end,
                advice="`floodmark spool accept` shows what can be done.",
            )

    # ── going ──

    def fed(self, position: int) -> list[Segment]:
        """Segments with nothing but records below; never the last one, which is written to."""
        with self._lock:
            first, end = self._segments[0].first, self._segments[-1].end
            self._check_position(max(position, first), first, end)
            return [segment for segment in self._segments[:-1] if segment.end <= position]

    def drop(self, segment: Segment) -> None:
        """Delete the first one. Durable before the next goes: a gap between segments would look like a loss."""
        with failing("delete", segment.path):
            segment.path.unlink(missing_ok=True)
            sync_folder(self._folder, self._calls)
        with self._lock:
            self._segments.remove(segment)

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[int]:
    with failing("read", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


def _head(data: bytes, segment: Segment, number: int, salt: int) -> Frame:
    frame = parse_head(data, salt)
    if frame is None or frame.number != number:
        raise damaged(segment.path, "a record cannot be read", record=number, offset=segment.offset(number))
    return frame


def _record(frame: Frame, payload: bytes, segment: Segment) -> Record:
    text = unpack(frame, payload)
    if text is None:
        offset = segment.offset(frame.number)
        raise damaged(segment.path, "a record cannot be read", record=frame.number, offset=offset)
    return Record(frame.number, frame.rows, text, frame.evolve, frame.received_ms, name_of(frame, payload))
