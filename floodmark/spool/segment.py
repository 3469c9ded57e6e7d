"""One segment file of a spool: where its records are, and how it is found when the spool is opened.

A frame of the last segment that cannot be read is torn and cut off, unless a later frame vouches that it was
acknowledged. Everything before the last segment was acknowledged, as a segment is begun only when all before it is
durable; so was the header of a segment that has more than a header. Damage there is Corrupt, and nothing is changed.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from floodmark.errors import Corrupt
from floodmark.spool.folder import About, Calls, failing
from floodmark.spool.frame import (
    HEADER_BYTES,
    Frame,
    Placed,
    Read,
    SegmentHeader,
    frames,
    parse_header,
    segment_header,
    vouched,
)

_BLOCK_BYTES = 256 * 1024
_COPY_BYTES = 1024 * 1024


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
    """The place of the segment that has this record."""
    return bisect_right([segment.first for segment in segments], number) - 1


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


# ── as it is found ──


@dataclass(frozen=True)
class Found:
    """A segment as it is on disk, and what has to be done to it before anything is appended."""

    segment: Segment
    size: int
    torn_header: bool = False
    proven: int = 0  # records below are surely durable

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
    """Look at a segment; `next_first` is None for the last one. Changes nothing."""
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
        # What follows the last record can only be a mark that was not synced: nobody relies on it.
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
        raise damaged(segment.path, "rows are counted wrong", record=frame.number, offset=placed.offset)
    segment.add(placed.offset, frame.size_bytes, frame.rows, frame.received_ms)
    if frame.is_keyed:
        learn(frame)


# ── made fit for appending ──


def begin(path: Path, about: About, first: int, rows_before: int, calls: Calls) -> int:
    """Make a segment with its header, durable but for its name. What had that name was never acknowledged."""
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
