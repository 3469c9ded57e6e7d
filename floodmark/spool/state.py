"""The state of a spool, and whether it is the spool that the catalog expects, with all records that were not fed.

Any process may look at a spool: without a lock, beside a live writer, changing nothing. A look reads only heads of
frames, only in the segment of the position and in the last one, so it is quick. What a writer is just writing, cutting
or deleting is no damage: `look` returns a problem only if it finds it twice.

The intake that opens a spool, the status that only looks and the operator who accepts it share one judgement of why a
spool is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from floodmark.catalog.spools import SpoolRow, replaced
from floodmark.errors import Conflict, FloodmarkError, NotFound
from floodmark.spool.folder import LOCK, About, failing, holder_pid, list_segments, read_about
from floodmark.spool.frame import HEADER_BYTES, heads, parse_header, vouched
from floodmark.spool.segments import Segment, Waiting, block_reader, damaged, waiting_from
from floodmark.spool.spool import Spool

_TRIES_MAX = 4
_PAUSE_S = 0.02

# Spools that this process has open, by folder.
_open: dict[Path, Spool] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class SpoolLook:
    """What is in a spool; without `id` no spool can be read. `pid` has it open now."""

    id: str | None = None
    table_id: str | None = None
    incarnation: str | None = None
    first: int = 0
    end: int = 0
    waiting: Waiting | None = None
    pid: int | None = None
    problem: FloodmarkError | None = None


def look(folder: Path, position: int) -> SpoolLook:
    """What waits from `position` on, or the problem."""
    seen: str | None = None
    for _ in range(_TRIES_MAX):
        found = _look(folder, position)
        if found.problem is None or str(found.problem) == seen:
            return found
        seen = str(found.problem)
        time.sleep(_PAUSE_S)
    return found


def _look(folder: Path, position: int) -> SpoolLook:
    about: About | None = None
    pid = _pid(folder)
    try:
        about = read_about(folder)
        if about is None:
            raise NotFound("this folder has no spool", folder=folder)
        segments = _heads(folder, about, position)
        found = SpoolLook(about.spool, about.table_id, about.incarnation, segments[0].first, segments[-1].end, pid=pid)
    except FloodmarkError as error:
        if about is None:
            return SpoolLook(pid=pid, problem=error)
        return SpoolLook(about.spool, about.table_id, about.incarnation, pid=pid, problem=error)
    if found.first <= position <= found.end:
        return replace(found, waiting=waiting_from(segments, position))
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
    return replace(found, problem=problem)


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
    """The process that has it open now: tries the lock, shared and for a moment."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder_pid(folder)
        finally:
            os.close(fd)
    return None


# ── spools that this process has open ──


def note_opened(spool: Spool) -> None:
    """`look_here` asks this spool, not its files."""
    with _lock:
        _open[spool.folder] = spool


def note_closed(spool: Spool) -> None:
    with _lock:
        if _open.get(spool.folder) is spool:
            del _open[spool.folder]


def look_here(folder: Path, position: int) -> SpoolLook:
    """What is in a spool: from memory if this process has it open, else from its files. Both answers are the same."""
    with _lock:
        spool = _open.get(folder)
    if spool is None or not spool.first <= position <= spool.end:
        return look(folder, position)
    about = spool.about
    return SpoolLook(about.spool, about.table_id, about.incarnation, spool.first, spool.end, spool.waiting(position))


# ── whether it is the spool that the catalog expects ──


def missing(row: SpoolRow, folder: Path, host: str) -> Conflict:
    """The table has a spool, and its folder is missing."""
    elsewhere = row.host != host
    return Conflict(
        "the spool of this table is on another machine" if elsewhere else "the spool of this table is missing",
        table=row.table,
        spool=row.spool_id,
        host=row.host,
        folder=row.folder if elsewhere else folder,
        position=row.position,
        advice=f"Restore it, or see `floodmark spool accept {row.table}`: rows in it that were not fed are missing.",
    )


def missing_row(table: str) -> Conflict:
    return Conflict("the catalog has no record of the spool of this table", table=table)


def misfit(row: SpoolRow | None, table: str, spool_id: str, first: int, end: int) -> Conflict | None:
    """Why this spool does not continue at the catalog's position; None if it does."""
    if row is not None and row.spool_id != spool_id and (row.spool_id or end):
        # Also a spool that reappears after an operator gave it up: its rows may be in the table already.
        return replaced(row, spool_id)
    position = row.position if row is not None and row.spool_id else 0
    if first <= position <= end:
        return None
    return Conflict(
        "this spool is older than what was fed from it"
        if end < position
        else "records that were not fed are not in this spool",
        table=table,
        spool=spool_id,
        position=position,
        first=first,
        end=end,
        advice=f"Restore the newer one, or see `floodmark spool accept {table}`.",
    )


def stranger(row: SpoolRow, found: SpoolLook, incarnation: str) -> Conflict | None:
    """Why this spool does not belong to the table; None if it is."""
    for what, is_it, wanted in (
        ("another table", found.table_id, row.table_id),
        ("another incarnation of the lake", found.incarnation, incarnation),
    ):
        if is_it != wanted:
            return Conflict(
                f"this spool belongs to {what}",
                table=row.table,
                spool=found.id,
                found=is_it,
                wanted=wanted,
                advice=f"See `floodmark spool accept {row.table}`.",
            )
    return None


def is_fed(found: SpoolLook) -> bool:
    """Whether nothing waits in it: then a missing table does not matter."""
    return found.problem is None and found.waiting is not None and not found.waiting.records


def why_refused(row: SpoolRow, found: SpoolLook, incarnation: str, *, table_exists: bool) -> FloodmarkError | None:
    """Why a spool on this machine is refused, by a look at it; None if it can be fed."""
    if not table_exists and is_fed(found):
        return None
    if not table_exists:
        return Conflict(
            "the table of this spool is gone",
            table=row.table,
            table_id=row.table_id,
            advice=f"Its rows are kept. See `floodmark spool accept {row.table_id}`.",
        )
    if found.id is None:
        return found.problem if row.spool_id else None
    if (other := stranger(row, found, incarnation)) is not None:
        return other
    if (other := misfit(row, row.table, found.id, found.first, found.end)) is not None and found.end:
        return other
    return found.problem
