"""The segment files of a spool: records are added at the end of the last one, read anywhere, and deleted with whole
segments from the front.

One thread adds (the writer); others read and delete. A failed write is undone before the next one; a failed sync stops
the spool, as it is then unknown which bytes are on the disk (I4).

A crash leaves a torn tail, or a segment without a header. Opening cuts off a frame of the last segment that it cannot
read, unless a later frame vouches that it was acknowledged. Everything before the last segment was acknowledged, as a
segment is begun only when all before it is durable; so was the header of a segment that has more than a header. Damage
there is Corrupt, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from floodmark.clock import now_ms
from floodmark.errors import BelowRetention, Conflict, Corrupt, FloodmarkError, Unavailable
from floodmark.failpoints import hit
from floodmark.spool.folder import About, Calls, failing, list_segments, segment_path, sync_folder
from floodmark.spool.frame import (
    FRAME_BYTES,
    HEADER_BYTES,
    Draft,
    Frame,
    Placed,
    Read,
    SegmentHeader,
    frame_head,
    frames,
    mark,
    name_of,
    parse_head,
    parse_header,
    segment_header,
    unpack,
    vouched,
)
from floodmark.storage.failures import local_failure

_BLOCK_BYTES = 256 * 1024
_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Record:
    """Rows that came in with one request. Numbers count from 0, without gaps."""

    number: int
    rows: int
    text: bytes
    evolve: bool
    received_ms: int
    actor: str = ""  # the name of the client's token, if the lake has tokens


@dataclass(frozen=True)
class Waiting:
    """What is durable and not fed; `bytes` on disk, `oldest_ms`: when the first of them came in."""

    records: int
    rows: int
    bytes: int
    oldest_ms: int | None


class Segment:
    """Where the records of a file are. 24 bytes for each."""

    def __init__(self, path: Path, first: int, rows_before: int) -> None:
        self.path = path
        self.first = first
        self.size = HEADER_BYTES  # up to here all bytes are whole
        self.rows_end = rows_before
        self._offsets = array("Q")
        self._rows_before = array("Q")
        self._received_ms = array("q")

    @property
    def end(self) -> int:
        return self.first + len(self._offsets)

    def add(self, offset: int, size_bytes: int, rows: int, received_ms: int) -> None:
        self._offsets.append(offset)
        self._rows_before.append(self.rows_end)
        self._received_ms.append(received_ms)
        self.rows_end += rows
        self.size = offset + size_bytes

    def offset(self, number: int) -> int:
        """Where the record begins; of the one that comes next: the end of the file."""
        return self.size if number == self.end else self._offsets[number - self.first]

    def rows_before(self, number: int) -> int:
        return self.rows_end if number == self.end else self._rows_before[number - self.first]

    def received_ms(self, number: int) -> int:
        return self._received_ms[number - self.first]


def find_segment(segments: list[Segment], number: int) -> int:
    """The index of the segment that has this record."""
    return bisect_right([segment.first for segment in segments], number) - 1


def waiting_from(segments: list[Segment], position: int) -> Waiting:
    """What waits from this record on; only the segment that has it, and the last one, need to know their records."""
    place, last = find_segment(segments, position), segments[-1]
    if position == last.end:
        return Waiting(0, 0, 0, None)
    here = segments[place]
    size = sum(segment.size for segment in segments[place:]) - here.offset(position)
    return Waiting(last.end - position, last.rows_end - here.rows_before(position), size, here.received_ms(position))


def block_reader(fd: int) -> Read:
    """Reads a file by blocks: the heads of small records come many at a time."""
    begin, block = 0, b""

    def read(offset: int, length: int) -> bytes:
        nonlocal begin, block
        if length > _BLOCK_BYTES:
            return os.pread(fd, length, offset)
        if offset < begin or offset + length > begin + len(block):
            begin, block = offset, os.pread(fd, _BLOCK_BYTES, offset)
        return block[offset - begin : offset - begin + length]

    return read


# ── opening one ──


@dataclass(frozen=True)
class Found:
    """A segment as it is on disk, and the repairs that it needs before anything is appended."""

    segment: Segment
    size: int
    torn_header: bool = False
    proven: int = 0  # records below are certainly durable

    @property
    def cut_bytes(self) -> int:
        return max(0, self.size - self.segment.size)


def damaged(path: Path, what: str, *, record: int | None = None, offset: int | None = None) -> Corrupt:
    return Corrupt(
        f"this spool is damaged: {what}",
        file=path,
        record=record,
        offset=offset,
        advice="The file is kept as it is, and its table takes no rows over HTTP. `floodmark spool accept` shows what "
        "can be done.",
    )


def find(path: Path, first: int, about: About, *, next_first: int | None, learn: Callable[[Frame], None]) -> Found:
    """Examine a segment; `next_first` is None for the last one. Changes nothing."""
    with failing("read", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _find(fd, path, first, about, next_first, learn)
        finally:
            os.close(fd)


def _find(
    fd: int, path: Path, first: int, about: About, next_first: int | None, learn: Callable[[Frame], None]
) -> Found:
    size, read = os.fstat(fd).st_size, block_reader(fd)
    header = parse_header(read(0, HEADER_BYTES))
    if header is None and size <= HEADER_BYTES and next_first is None:
        return Found(Segment(path, first, 0), size, torn_header=True)
    if header is None:
        raise damaged(path, "the header of a segment cannot be read")
    if (header.spool, header.salt, header.first) != (about.spool, about.salt, first):
        raise damaged(path, "a segment belongs to another spool, or has another's name")
    segment, proven, end = Segment(path, first, header.rows_before), first, HEADER_BYTES
    for placed in frames(read, size, first, about.salt):
        _place(segment, placed, learn)
        proven, end = max(proven, placed.frame.synced), placed.end
    segment.size = end
    if next_first is not None:
        # Only a mark that was not synced can follow the last record: nothing relies on it.
        if segment.end != next_first:
            raise damaged(path, "records cannot be read", record=segment.end, offset=end)
        return Found(segment, segment.size, proven=segment.end)
    if end < size:
        voucher = vouched(read, size, end, segment.end, about.salt)
        if voucher is not None:
            raise damaged(path, "a record that was acknowledged cannot be read", record=segment.end, offset=end)
    return Found(segment, size, proven=min(proven, segment.end))


def _place(segment: Segment, placed: Placed, learn: Callable[[Frame], None]) -> None:
    frame = placed.frame
    if frame.is_mark:
        return
    if frame.rows_before != segment.rows_end:
        raise damaged(segment.path, "the count of rows is wrong", record=frame.number, offset=placed.offset)
    segment.add(placed.offset, frame.size_bytes, frame.rows, frame.received_ms)
    if frame.is_keyed:
        learn(frame)


# ── repairing one ──


def begin(path: Path, about: About, first: int, rows_before: int, calls: Calls) -> int:
    """Make a segment with its header, durable but for its name. An earlier file of that name was never acknowledged."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        header = segment_header(SegmentHeader(about.spool, about.salt, first, rows_before))
        write_all(fd, header, 0, calls)
        calls.fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def repair(found: Found, about: About, rows_before: int, calls: Calls) -> tuple[Segment, int]:
    """The last segment and its open file: what was torn is cut off, and what is left is durable."""
    segment = found.segment
    with failing("repair", segment.path):
        if found.torn_header:
            segment = Segment(segment.path, segment.first, rows_before)
            return segment, begin(segment.path, about, segment.first, rows_before, calls)
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if found.cut_bytes:
                calls.ftruncate(fd, segment.size)
            _write_again(fd, segment, segment.offset(found.proven), calls)
            calls.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
    return segment, fd


def _write_again(fd: int, segment: Segment, offset: int, calls: Calls) -> None:
    """Bytes that nothing proves durable, over themselves. If a sync of them failed in a process before this one, the
    system may take them for clean though they never reached the disk; a sync alone would then do nothing."""
    while offset < segment.size:
        data = os.pread(fd, min(_COPY_BYTES, segment.size - offset), offset)
        write_all(fd, data, offset, calls)
        offset += len(data)


def write_all(fd: int, data: bytes, offset: int, calls: Calls) -> None:
    left = memoryview(data)
    while left:
        written = calls.pwrite(fd, left, offset)
        left, offset = left[written:], offset + written


class Segments:
    """All segments of a spool that is open."""

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
        self._torn = False  # bytes after the last record that must be cut off before the next one is written
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
        """Reads all of them before it changes anything."""
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
        # Crash here: whole records that were not acknowledged, or half of one; opening keeps the whole ones.
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
        """Write a mark that all records are durable, so that a damaged one is not taken for a torn one. Without a sync:
        losing the mark loses no record."""
        last = self._segments[-1]
        data = mark(last.end, rows_before=last.rows_end, received_ms=now_ms(), salt=self._about.salt)
        try:
            write_all(self._fd, data, last.size, self._calls)
        except OSError:
            self._torn = True  # no caller waits for it; the next record's write reports the disk
            return
        with self._lock:
            last.size += len(data)

    def _write(self, last: Segment, data: bytes) -> None:
        try:
            self._torn = True
            write_all(self._fd, data, last.size, self._calls)
        except OSError as error:
            self._cut_torn()
            raise local_failure(error, "write the rows to the spool", str(last.path)) from error

    def _sync(self, last: Segment) -> None:
        try:
            self._calls.fsync(self._fd)
        except OSError as error:
            # Best effort: after a failed sync nothing that is read back proves anything.
            with contextlib.suppress(OSError):
                self._calls.ftruncate(self._fd, last.size)
            raise self._stop(error) from error

    def _cut_torn(self) -> None:
        """Cut off what a failed write left. Durable: a power loss must not bring back rows that were refused."""
        if not self._torn:
            return
        last = self._segments[-1]
        try:
            self._calls.ftruncate(self._fd, last.size)
        except OSError as error:
            raise Unavailable(
                "partly written rows cannot be removed from the spool",
                location=last.path,
                reason=error.strerror,
                advice="Check the disk. Send the rows again with the same Idempotency-Key: they are stored once.",
            ) from error
        self._sync(last)
        self._torn = False

    @property
    def stopped(self) -> FloodmarkError | None:
        """Why no more is accepted, if a sync failed."""
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
        """Begin the next segment. All before it is durable: its existence proves that those were acknowledged."""
        path = segment_path(self._folder, last.end)
        try:
            fd = begin(path, self._about, last.end, last.rows_end, self._calls)
        except OSError as error:
            # If it stayed it would be an empty last segment, which does no harm.
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
            # Deleted records do not wait; the caller's position may be older than that.
            position = max(position, first)
            self._check_position(position, first, end)
            return waiting_from(self._segments, position)

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

    # ── deleting ──

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
