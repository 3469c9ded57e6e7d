"""Acknowledged bytes of a spool that cannot be read: `find_damage` finds them as an opening does, and `mend` continues
without them once an operator accepts the loss.

A damaged segment is rewritten: every readable record as it is, and an empty record in place of each other one, so that
numbers have no gap and neighbours are fed. A damaged file of keys is replaced by a new one. The damaged file keeps a
name of its own, NAME.damaged-ID, for good: nothing here deletes acknowledged bytes. An empty record that was not fed
loses its key, so that its client can send it again; one that was fed keeps its key if that is readable, so that the
client cannot.

A crash before the new file has its name leaves the damaged one in place, with one more name; the plan is made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from floodmark.clock import new_id
from floodmark.errors import Conflict, Corrupt, FloodmarkError, NotFound
from floodmark.failpoints import hit
from floodmark.spool.folder import (
    KEYS,
    SYSTEM,
    About,
    failing,
    list_segments,
    local_files,
    read_about,
    segment_path,
    sync_folder,
    take_lock,
)
from floodmark.spool.frame import (
    COUNT_MAX,
    HEADER_BYTES,
    MAGIC,
    NO_DIGEST,
    Draft,
    Frame,
    Placed,
    SegmentHeader,
    frame_at,
    frame_head,
    pack,
    parse_head,
    parse_header,
    segment_header,
)
from floodmark.spool.keys import keys_bytes, parse_keys, raised
from floodmark.spool.segments import damaged, find

_SHOWN_MAX = 20


@dataclass(frozen=True)
class Damage:
    """What cannot be read: segments by their first record, the keys, and records that are lost with them."""

    error: Corrupt
    segments: tuple[int, ...]
    keys: bool
    first: int
    position: int
    blanks: tuple[Blank, ...]

    @property
    def lost(self) -> str:
        gone = [blank for blank in self.blanks if blank.number >= self.position]
        rows = sum(blank.rows for blank in gone)
        what = f"{rows} {'row' if rows == 1 else 'rows'} that were received and not fed"
        return f"{_ranges([blank.number for blank in gone])}: {what}" if gone else "nothing"

    @property
    def twice(self) -> str:
        repeated = []
        unkeyed = [blank.number for blank in self.blanks if blank.number < self.position and not blank.keeps_key]
        if unkeyed:
            repeated.append(f"rows of clients who repeat what was taken in {_ranges(unkeyed)}")
        if self.keys and self.first:
            repeated.append(f"rows of clients who repeat with their key what was taken before record {self.first}")
        return "; ".join(repeated) or "nothing"

    def is_same(self, other: Damage | None) -> bool:
        return other is not None and (self.segments, self.keys, self.blanks) == (
            other.segments,
            other.keys,
            other.blanks,
        )


def find_damage(folder: Path, position: int) -> Damage | None:
    """The damage that keeps a spool from being opened, if the spool can continue without it; records below `position`
    are fed. Reads all of it, and changes nothing. None also for a spool whose own header or last segment is missing."""
    try:
        about = read_about(folder)
        paths = [] if about is None else list_segments(folder)
        if about is None or not paths:
            return None
        errors = [error for error in (_judge_keys(folder, about, paths[0][0]),) if error is not None]
    except FloodmarkError:
        return None
    keys, segments, blanks = bool(errors), list[int](), list[Blank]()
    for place, (first, path) in enumerate(paths):
        try:
            next_first = paths[place + 1][0] if place + 1 < len(paths) else None
            find(path, first, about, next_first=next_first, learn=lambda _: None)
        except Corrupt as error:
            errors.append(error)
            segments.append(first)
            blanks += _salvaged(folder, about, paths, place, position)[1]
    if not errors:
        return None
    return Damage(errors[0], tuple(segments), keys, paths[0][0], position, tuple(blanks))


def _judge_keys(folder: Path, about: About, first: int) -> Corrupt | None:
    path, until = folder / KEYS, 0
    try:
        kept = parse_keys(local_files().read(str(path)), str(path))
        if kept.spool != about.spool:
            return damaged(path, "its keys are those of another spool")
        until = kept.until
    except NotFound:
        pass  # no segment was deleted yet
    except Corrupt as error:
        return error
    return damaged(segment_path(folder, until), "a segment is missing", record=until) if until < first else None


def mend(folder: Path, planned: Damage) -> None:
    """Continue without the found damage. Conflict if the damage changed; Busy if a process has the spool open."""
    lock = take_lock(folder)
    try:
        about = read_about(folder)
        if about is None or not planned.is_same(find_damage(folder, planned.position)):
            raise Conflict("the spool is not as it was when this was planned", folder=folder, advice="Look again.")
        paths = list_segments(folder)
        for place, (first, path) in enumerate(paths):
            if first in planned.segments:
                data, _ = _salvaged(folder, about, paths, place, planned.position)
                _replace(path, data)
        if planned.keys:
            _replace(folder / KEYS, _keys_anew(folder, about, paths[0][0]))
    finally:
        os.close(lock)


def _salvaged(
    folder: Path, about: About, paths: Sequence[tuple[int, Path]], place: int, position: int
) -> tuple[bytes, list[Blank]]:
    first, path = paths[place]
    data = local_files().read(str(path))
    header = parse_header(data)
    rows = None if header is None or (header.salt, header.first) != (about.salt, first) else header.rows_before
    until = rows_until = None
    if place + 1 < len(paths):
        until, after = paths[place + 1]
        following = parse_header(local_files().read_range(str(after), 0, HEADER_BYTES))
        rows_until = None if following is None else following.rows_before
    found = salvage(data, first, about.salt, rows_before=rows, until=until, rows_until=rows_until, position=position)
    begin = segment_header(SegmentHeader(about.spool, about.salt, first, found.rows_before))
    return begin + found.data, list(found.blanks)


def _keys_anew(folder: Path, about: About, first: int) -> bytes:
    """Those that can be read, or none; they cover all records before the first segment."""
    with suppress(FloodmarkError):
        data = local_files().read(str(folder / KEYS))
        if parse_keys(data, KEYS).spool == about.spool:
            return raised(data, first)
    return keys_bytes(about.spool, first, [])


def _replace(path: Path, data: bytes) -> None:
    """The damaged file keeps another name, durable before its own is given to the new one."""
    with failing("keep", path):
        if path.exists():
            os.link(path, path.with_name(f"{path.name}.damaged-{new_id()}"))
            sync_folder(path.parent, SYSTEM)
    # Crash here: the damaged file has a second name, and is as damaged as before; the next plan covers it.
    hit("accept.kept")
    local_files().put(str(path), data)
    # Crash here: one of the damaged files is mended; the next plan covers the others.
    hit("accept.mended")


def _ranges(numbers: Sequence[int]) -> str:
    """Records in words, neighbours together."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans]
    shown = ", ".join(words[:_SHOWN_MAX]) + (" and more" if len(words) > _SHOWN_MAX else "")
    return f"{'record' if len(numbers) == 1 else 'records'} {shown}"


# ── what can still be read of a damaged segment ──


@dataclass(frozen=True)
class Blank:
    """A record that cannot be read. Of several in a row the last counts the rows of those whose own count is lost."""

    number: int
    rows: int
    keeps_key: bool


@dataclass(frozen=True)
class Salvaged:
    """Frames of a new segment, after its header."""

    data: bytes
    rows_before: int
    blanks: tuple[Blank, ...]


def salvage(
    data: bytes,
    first: int,
    salt: int,
    *,
    rows_before: int | None,
    until: int | None,
    rows_until: int | None,
    position: int,
) -> Salvaged:
    """Whole frames as they are, and an empty record for each other one. Pure: bytes in, bytes out. Frames carry their
    number, and their checksums begin with a number that only the spool knows: so bytes that look like a frame among
    damaged ones are one of ours, and show how many records are missing before it.

    `rows_before`: those before the segment, if its header is readable; `until`, `rows_until`: the first record of the
    next segment, if there is one, and the rows before that. Records below `position` are fed: they keep their key.
    """
    heads: dict[int, Frame] = {}
    pieces, blanks = list[bytes](), list[Blank]()
    number, rows, offset, received_ms = first, rows_before, HEADER_BYTES, 0

    def fill(end: int, rows_end: int | None) -> None:
        nonlocal rows
        for blank, draft in _blanks(number, end, max(0, (rows_end or 0) - (rows or 0)), heads, position, received_ms):
            pieces.append(frame_head(draft, blank.number, synced=number, rows_before=rows or 0, salt=salt))
            pieces.append(draft.payload.data)
            blanks.append(blank)
            rows = (rows or 0) + blank.rows

    def fits(frame: Frame) -> bool:
        inside = until is None or frame.number + (not frame.is_mark) <= until
        return inside and frame.number >= number and (rows is None or frame.rows_before >= rows)

    while (placed := _next(data, offset, salt, fits, heads)) is not None:
        frame = placed.frame
        if rows is None:
            rows = rows_before = frame.rows_before
        received_ms = frame.received_ms
        fill(frame.number, frame.rows_before)
        pieces.append(data[placed.offset : placed.end])
        number, rows, offset = frame.number + (not frame.is_mark), frame.rows_before + frame.rows, placed.end
    if until is not None:
        fill(until, rows_until)
    return Salvaged(b"".join(pieces), rows_before or 0, tuple(blanks))


def _next(data: bytes, offset: int, salt: int, fits: Callable[[Frame], bool], heads: dict[int, Frame]) -> Placed | None:
    """The next whole frame from there on; records of which only the head can be read are noted."""

    def read(begin: int, length: int) -> bytes:
        return data[begin : begin + length]

    while 0 <= offset < len(data):
        placed = frame_at(read, len(data), offset, salt)
        if placed is not None and fits(placed.frame):
            return placed
        head = parse_head(read(offset, 256), salt)
        if head is not None and fits(head) and not head.is_mark:
            heads[head.number] = head
        offset = data.find(MAGIC, offset + (1 if head is None else head.size_bytes))
    return None


def _blanks(
    number: int, end: int, rows: int, heads: dict[int, Frame], position: int, received_ms: int
) -> list[tuple[Blank, Draft]]:
    found = []
    for place in range(number, end):
        head = heads.get(place)
        own = min(rows, head.rows if head is not None else rows if place == end - 1 else 0, COUNT_MAX)
        rows -= own
        keyed = head is not None and head.is_keyed and place < position
        key, body = (head.key, head.body) if head is not None and keyed else (None, NO_DIGEST)
        # A record without a key could not be repeated by it in the first place.
        kept = keyed or (head is not None and not head.is_keyed)
        at_ms = received_ms if head is None else head.received_ms
        found.append((Blank(place, own, kept), Draft(pack(b""), own, at_ms, key=key, body=body)))
    return found
