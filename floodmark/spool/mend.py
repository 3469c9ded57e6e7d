"""Acknowledged bytes of a spool that cannot be read: found as an opening finds them, and gone on without on an
operator's word.

A damaged segment is written anew: every record that can be read as it is, and in the place of each that cannot an empty
one, so that numbers have no gap and neighbours are fed. Damaged keys are begun anew. The damaged file keeps a name of
its own, NAME.damaged-ID, for good: nothing here deletes acknowledged bytes. An empty record that was not fed forgets
its key, so that its client may send it again; one that was fed keeps it, if it can be read, so that he cannot.

A crash before the new file has its name leaves the damaged one in place, and one more name for it: planned again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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
from floodmark.spool.frame import HEADER_BYTES, SegmentHeader, parse_header, segment_header
from floodmark.spool.keys import keys_bytes, parse_keys, raised
from floodmark.spool.salvage import Blank, salvage
from floodmark.spool.segment import damaged, find

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
        what = f"{rows} {'row' if rows == 1 else 'rows'} that came in and were not fed"
        return f"{_ranges([blank.number for blank in gone])}: {what}" if gone else "nothing"

    @property
    def twice(self) -> str:
        told = []
        unkeyed = [blank.number for blank in self.blanks if blank.number < self.position and not blank.keeps_key]
        if unkeyed:
            told.append(f"rows of clients who repeat what was taken in {_ranges(unkeyed)}")
        if self.keys and self.first:
            told.append(f"rows of clients who repeat with their key what was taken before record {self.first}")
        return "; ".join(told) or "nothing"

    def is_same(self, other: Damage | None) -> bool:
        return other is not None and (self.segments, self.keys, self.blanks) == (
            other.segments,
            other.keys,
            other.blanks,
        )


def find_damage(folder: Path, position: int) -> Damage | None:
    """What keeps a spool from being opened, if it can be gone on without; records below `position` are fed. Reads all
    of it, and changes nothing. None also of a spool whose own header or last segment is missing."""
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
        pass  # nothing was let go of yet
    except Corrupt as error:
        return error
    return damaged(segment_path(folder, until), "a segment is missing", record=until) if until < first else None


def mend(folder: Path, planned: Damage) -> None:
    """Go on without what was found. Conflict if it is another damage by now; Busy if a process has the spool open."""
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
    # Crash here: the damaged file has a second name, and is as damaged as before; it is planned again.
    hit("accept.kept")
    local_files().put(str(path), data)
    # Crash here: one of the damaged files is mended; the others are planned again.
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
