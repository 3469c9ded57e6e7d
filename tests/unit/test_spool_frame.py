"""Frames of a spool: what is written is read, and what cannot be read is told apart: torn, or damaged."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodmark.spool.frame import (
    FRAME_BYTES,
    HEADER_BYTES,
    MAGIC,
    Draft,
    Placed,
    Read,
    SegmentHeader,
    frame_head,
    frames,
    heads,
    mark,
    pack,
    parse_head,
    parse_header,
    segment_header,
    unpack,
    vouched,
)

SALT = 0x1234ABCD
HEADER = SegmentHeader("01" + "A" * 24, SALT, first=7, rows_before=70)


@dataclass(frozen=True)
class Laid:
    """A frame that was written: where, and what it says."""

    begin: int
    end: int
    number: int
    synced: int
    text: bytes | None  # None: a mark


def lay(groups: list[list[bytes]], *, marks: bool = True, first: int = 7) -> tuple[bytes, list[Laid]]:
    """A segment with these groups of records, each followed by a mark."""
    data, laid, number, rows = segment_header(HEADER), [], first, 70
    for group in groups:
        synced = number
        for text in group:
            draft = Draft(pack(text), 3, 1_000 + number)
            frame = frame_head(draft, number, synced=synced, rows_before=rows, salt=SALT) + draft.payload.data
            laid.append(Laid(len(data), len(data) + len(frame), number, synced, text))
            data, number, rows = data + frame, number + 1, rows + 3
        if marks:
            laid.append(Laid(len(data), len(data) + FRAME_BYTES, number, number, None))
            data += mark(number, rows_before=rows, received_ms=0, salt=SALT)
    return data, laid


def reader(data: bytes) -> Read:
    return lambda offset, length: data[offset : offset + length]


def read(data: bytes, salt: int = SALT) -> list[Placed]:
    return list(frames(reader(data), len(data), HEADER.first, salt))


def test_what_is_written_is_read() -> None:
    text, key, body = b'{"id": 1}\n' * 500, b"k" * 16, b"b" * 16
    draft = Draft(pack(text), 500, 123, evolve=True, key=key, body=body)
    head = frame_head(draft, 9, synced=8, rows_before=1_000, salt=SALT)
    frame = parse_head(head, SALT)
    assert frame is not None
    assert (frame.number, frame.synced, frame.rows, frame.rows_before, frame.received_ms) == (9, 8, 500, 1_000, 123)
    assert (frame.evolve, frame.is_keyed, frame.is_mark, frame.key, frame.body) == (True, True, False, key, body)
    assert frame.payload_bytes < len(text) / 10
    assert unpack(frame, draft.payload.data) == text
    assert unpack(frame, draft.payload.data[:-1]) is None
    assert unpack(frame, draft.payload.data[:-1] + b"\0") is None


@pytest.mark.parametrize("text", [b"", b"{}", os.urandom(1000), b"x" * 127, b"x" * 128])
def test_texts_of_any_size_come_back(text: bytes) -> None:
    draft = Draft(pack(text), 1, 0)
    frame = parse_head(frame_head(draft, 0, synced=0, rows_before=0, salt=SALT), SALT)
    assert frame is not None
    assert len(draft.payload.data) <= len(text)
    assert unpack(frame, draft.payload.data) == text


def test_a_segments_header_is_whole_or_none() -> None:
    data = segment_header(HEADER)
    assert len(data) == HEADER_BYTES
    assert parse_header(data) == HEADER
    assert parse_header(data[:-1]) is None
    for at in range(HEADER_BYTES):
        assert parse_header(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) is None


def test_frames_come_in_order_with_their_places() -> None:
    data, laid = lay([[b"a", b"bb"], [b"ccc"]])
    assert [(one.offset, one.end, one.frame.number) for one in read(data)] == [
        (one.begin, one.end, one.number) for one in laid
    ]
    assert list(heads(reader(data), len(data), HEADER.first, SALT)) == read(data)


def test_a_cut_at_any_byte_leaves_the_whole_frames_before_it_and_vouches_for_nothing() -> None:
    data, laid = lay([[b"a"], [b"b" * 200, os.urandom(60)]])
    for size in range(HEADER_BYTES, len(data)):
        whole = [one for one in laid if one.end <= size]
        found = read(data[:size])
        assert [one.end for one in found] == [one.end for one in whole]
        end = found[-1].end if found else HEADER_BYTES
        number = 7 + sum(not one.frame.is_mark for one in found)
        assert vouched(reader(data[:size]), size, end, number, SALT) is None


def test_frames_of_another_spool_or_out_of_turn_are_not_read() -> None:
    data, _ = lay([[b"a", b"b"]])
    assert read(data, SALT + 1) == []
    assert list(frames(reader(data), len(data), 8, SALT)) == []
    # The same frames once more, as an older state of the disk could have them.
    assert len(read(data + data[HEADER_BYTES:])) == 3


def test_a_frame_that_a_client_writes_into_its_rows_is_never_found() -> None:
    forged, _ = lay([[b"x"], [b"y"]], first=8)
    data, laid = lay([[forged[HEADER_BYTES:] + os.urandom(3_000), b"after"]], marks=False)
    first = laid[0]
    assert MAGIC in data[first.begin + FRAME_BYTES : first.end], "it is compressed: the check is blind"
    # Its payload is damaged at the very end; its head can be read, so what is inside is not searched.
    torn = data[: first.end - 1] + b"\0" + data[first.end :]
    assert vouched(reader(torn), len(torn), first.begin, 7, SALT) is None
    # Its head cannot be read either: frames of one who does not know the salt are nothing.
    draft = Draft(pack(b"x"), 1, 0)
    wrong = frame_head(draft, 9, synced=9, rows_before=0, salt=SALT ^ 1) + draft.payload.data
    right = frame_head(draft, 9, synced=9, rows_before=0, salt=SALT) + draft.payload.data
    for frame, found in ((wrong, False), (right, True)):
        headless = segment_header(HEADER) + b"\0" * 50 + frame
        assert (vouched(reader(headless), len(headless), HEADER_BYTES, 7, SALT) is not None) is found


GROUPS = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, database=None)
@given(GROUPS, st.booleans(), st.data())
def test_damage_is_told_by_what_later_frames_say(groups: list[list[bytes]], marks: bool, draw: st.DataObject) -> None:
    data, laid = lay(groups, marks=marks)
    begin = draw.draw(st.integers(HEADER_BYTES, len(data) - 1))
    end = draw.draw(st.integers(begin + 1, len(data)))
    junk = draw.draw(st.sampled_from([b"\0", b"\xff", MAGIC, b""]))
    new = (junk * (end - begin))[: end - begin]
    broken = data[:begin] + new + (data[end:] if junk else b"")
    whole = [one for one in laid if broken[one.begin : one.end] == data[one.begin : one.end]]
    before = [one for one in laid if all(other in whole for other in laid[: laid.index(one) + 1])]
    found = read(broken)
    assert [one.end for one in found] == [one.end for one in before]
    texts = [unpack(one.frame, broken[one.offset + FRAME_BYTES : one.end]) for one in found if not one.frame.is_mark]
    assert texts == [one.text for one in before if one.text is not None]
    if len(before) == len(laid):
        return
    lost = laid[len(before)]
    proof = [one for one in whole if one.begin > lost.begin and one.synced > lost.number]
    voucher = vouched(reader(broken), len(broken), lost.begin, lost.number, SALT)
    assert (voucher is None) == (not proof)
    if voucher is not None:
        assert voucher.offset in [one.begin for one in proof]
