"""A look at a spool from outside: by any process, without a lock, changing nothing, beside a live writer.

Only the heads of frames are read, and only in the segment of the position and in the last one, so a look is quick.
What a writer is just writing, cutting or deleting is no damage: a problem is told only if it is there a second time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from floodmark.errors import Conflict, FloodmarkError, NotFound
from floodmark.spool.folder import LOCK, About, failing, holder_pid, list_segments, read_about
from floodmark.spool.frame import HEADER_BYTES, heads, parse_header, vouched
from floodmark.spool.record import Waiting
from floodmark.spool.segment import Segment, block_reader, damaged, find_segment

_TRIES_MAX = 4
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Look:
    """What is in a spool; without `id` there is none that can be read. `pid` has it open now."""

    id: str | None = None
    table_id: str | None = None
    incarnation: str | None = None
    first: int = 0
    end: int = 0
    waiting: Waiting | None = None
    pid: int | None = None
    problem: FloodmarkError | None = None


def look(folder: Path, position: int) -> Look:
    """What waits from `position` on, or the problem."""
    seen: str | None = None
    for _ in range(_TRIES_MAX):
        found = _look(folder, position)
        if found.problem is None or str(found.problem) == seen:
            return found
        seen = str(found.problem)
        time.sleep(_PAUSE_S)
    return found


def _look(folder: Path, position: int) -> Look:
    about: About | None = None
    pid = _pid(folder)
    try:
        about = read_about(folder)
        if about is None:
            raise NotFound("there is no spool in this folder", folder=folder)
        segments = _heads(folder, about, position)
        found = Look(about.spool, about.table_id, about.incarnation, segments[0].first, segments[-1].end, pid=pid)
    except FloodmarkError as error:
        if about is None:
            return Look(pid=pid, problem=error)
        return Look(about.spool, about.table_id, about.incarnation, pid=pid, problem=error)
    return _with_waiting(found, segments, position, folder)


def _with_waiting(found: Look, segments: list[Segment], position: int, folder: Path) -> Look:
    facts = {name: getattr(found, name) for name in ("id", "table_id", "incarnation", "first", "end", "pid")}
    if not found.first <= position <= found.end:
        problem = Conflict(
            "this spool is older than what was fed from it"
            if position > found.end
            else "records that were not fed are not in this spool",
            folder=folder,
            position=position,
            first=found.first,
            end=found.end,
            advice="`floodmark spool accept` shows what can be done.",
        )
        return Look(**facts, problem=problem)
    return Look(**facts, waiting=_waiting(segments, position))


def _waiting(segments: list[Segment], position: int) -> Waiting:
    here, last = segments[find_segment(segments, position)], segments[-1]
    if position == last.end:
        return Waiting(0, 0, 0, None)
    size = sum(one.size for one in segments if one.first >= here.first) - here.offset(position)
    rows = last.rows_end - here.rows_before(position)
    return Waiting(last.end - position, rows, size, here.received_ms(position))


def _heads(folder: Path, about: About, position: int) -> list[Segment]:
    """All segments; records only of the one that has the position, and of the last."""
    paths = list_segments(folder)
    if not paths:
        raise damaged(folder, "it has no segments")
    here = max((first for first, _ in paths if first <= position), default=paths[0][0])
    segments = []
    for first, path in paths:
        segment = Segment(path, first, 0)
        with failing("read", path):
            if first in (here, paths[-1][0]):
                _read_heads(segment, about, is_last=first == paths[-1][0])
            else:
                segment.size = path.stat().st_size
        segments.append(segment)
    return segments


def _read_heads(segment: Segment, about: About, *, is_last: bool) -> None:
    fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, read = os.fstat(fd).st_size, block_reader(fd)
        header = parse_header(read(0, HEADER_BYTES))
        if header is None and size <= HEADER_BYTES and is_last:
            return  # just begun, or torn
        if header is None or (header.spool, header.salt) != (about.spool, about.salt):
            raise damaged(segment.path, "the header of a segment cannot be read")
        segment.rows_end = header.rows_before
        end = HEADER_BYTES
        for placed in heads(read, size, segment.first, about.salt):
            if not placed.frame.is_mark:
                segment.add(placed.offset, placed.frame.size_bytes, placed.frame.rows, placed.frame.received_ms)
            end = placed.end
        segment.size = end
        if is_last and end < size and vouched(read, size, end, segment.end, about.salt) is not None:
            what = "a record that was acknowledged cannot be read"
            raise damaged(segment.path, what, record=segment.end, offset=end)
    finally:
        os.close(fd)


def _pid(folder: Path) -> int | None:
    """Who has it open now: the lock is tried, shared and for a moment."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder_pid(folder)
        finally:
            os.close(fd)
    return None
