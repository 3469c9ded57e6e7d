"""What can still be read of a damaged segment: its whole frames as they are, and an empty record for each other one.

Pure: bytes in, bytes out. Frames carry their number, and the checksum of each begins with a number that only the spool
knows: so what looks like a frame among damaged bytes is one of ours, and says how many records are missing before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from floodmark.spool.frame import (
    COUNT_MAX,
    HEADER_BYTES,
    MAGIC,
    NO_DIGEST,
    Draft,
    Frame,
    Placed,
    frame_at,
    frame_head,
    pack,
    parse_head,
)


@dataclass(frozen=True)
class Blank:
    """A record that cannot be read. Of several in a row the last has all rows of those that do not tell theirs."""

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
    """`rows_before`: those before the segment, if its header tells; `until`: the first record of the next segment, if
    there is one, and the rows before that. Records below `position` are fed: they keep their key."""
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
    """The next whole frame from there on; of records whose head alone can be read, that is noted."""

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
        # What had no key could not be repeated by it in the first place.
        kept = keyed or (head is not None and not head.is_keyed)
        at_ms = received_ms if head is None else head.received_ms
        found.append((Blank(place, own, kept), Draft(pack(b""), own, at_ms, key=key, body=body)))
    return found
