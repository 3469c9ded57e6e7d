"""How records lie in a segment file of a spool: bytes in, records out; nothing here touches a file.

A segment is a header and then frames. A frame is a record, or a mark, which only says what is durable. Each carries
`synced`: records below that number were durable when it was written. So a later frame proves that an earlier one was
acknowledged. A frame that cannot be read is torn if no later frame vouches for it: it was never acknowledged, and may
be cut off. Else it is damaged: keep it, refuse the spool. Checksums begin with a number that only the spool knows, so
that bytes of another spool, or of a client that writes frames into its rows, are never taken for ours; and no UTF-8
text holds the first byte of a frame.

The name of the client's token follows the compressed text in the payload, with its length at the end. Such a text is
always compressed: a reader that does not know names stops at the end of the compressed text and reads the same rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from zlib import crc32

import zstandard

MAGIC = b"\xf5FM\x01"
SEGMENT_MAGIC = b"FMSPOOL1"
# magic, checksum of what follows, of the payload, lengths of payload and text, rows, number, synced, rows_before,
# received_ms, flags, digests of key and body
_FRAME = struct.Struct("<4sIIIIIQQQqI16s16s")
_CHECKED_FROM = 8
# magic, spool id, salt, first record, rows before it, checksum
_SEGMENT = struct.Struct("<8s26sIQQI")
HEADER_BYTES = _SEGMENT.size
FRAME_BYTES = _FRAME.size
DIGEST_BYTES = 16
COUNT_MAX = 2**32 - 1  # of rows, and of bytes of text
NO_DIGEST = bytes(DIGEST_BYTES)

_EVOLVE, _PACKED, _KEYED, _MARK, _NAMED = 1, 2, 4, 8, 16
_NAME_LENGTH = struct.Struct("<H")
NAME_BYTES_MAX = 1000
_PACK_FROM_BYTES = 128
_ZSTD_LEVEL = 1

Read = Callable[[int, int], bytes]  # offset, length; shorter at the end of the file


@dataclass(frozen=True)
class Payload:
    """The text of a record as it is written."""

    data: bytes
    crc: int
    text_bytes: int
    packed: bool
    named: bool = False


@dataclass(frozen=True)
class Draft:
    """A record that has no number yet."""

    payload: Payload
    rows: int
    received_ms: int
    evolve: bool = False
    key: bytes | None = None
    body: bytes = NO_DIGEST

    @property
    def size_bytes(self) -> int:
        return FRAME_BYTES + len(self.payload.data)


@dataclass(frozen=True)
class Frame:
    """What the head of a frame says. A mark has the number of the next record."""

    number: int
    synced: int
    rows: int
    rows_before: int
    received_ms: int
    payload_bytes: int
    payload_crc: int
    text_bytes: int
    flags: int
    key: bytes
    body: bytes

    @property
    def is_mark(self) -> bool:
        return bool(self.flags & _MARK)

    @property
    def evolve(self) -> bool:
        return bool(self.flags & _EVOLVE)

    @property
    def is_keyed(self) -> bool:
        return bool(self.flags & _KEYED)

    @property
    def size_bytes(self) -> int:
        return FRAME_BYTES + self.payload_bytes


@dataclass(frozen=True)
class Placed:
    """A frame and where it begins."""

    offset: int
    frame: Frame

    @property
    def end(self) -> int:
        return self.offset + self.frame.size_bytes


@dataclass(frozen=True)
class SegmentHeader:
    spool: str
    salt: int
    first: int
    rows_before: int


# ── writing ──


def pack(text: bytes, name: str = "") -> Payload:
    """Compressed if that makes it shorter by more than a little, or if the name of a token follows it."""
    data = text
    if name:
        called = name.encode(errors="replace")[:NAME_BYTES_MAX]
        packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)
        data = packed + called + _NAME_LENGTH.pack(len(called))
        return Payload(data, crc32(data), len(text), packed=True, named=True)
    if len(text) >= _PACK_FROM_BYTES:
        packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(text)
        if len(packed) < len(text) * 0.9:
            data = packed
    return Payload(data, crc32(data), len(text), data is not text)


def frame_head(draft: Draft, number: int, *, synced: int, rows_before: int, salt: int) -> bytes:
    """The head of a record's frame; its payload comes right after it."""
    flags = _EVOLVE * draft.evolve + _PACKED * draft.payload.packed + _KEYED * (draft.key is not None)
    flags += _NAMED * draft.payload.named
    return _seal(
        salt,
        (draft.payload.crc, len(draft.payload.data), draft.payload.text_bytes, draft.rows, number, synced),
        (rows_before, draft.received_ms, flags, draft.key or NO_DIGEST, draft.body),
    )


def mark(number: int, *, rows_before: int, received_ms: int, salt: int) -> bytes:
    """A mark: all records below `number` are durable."""
    return _seal(salt, (0, 0, 0, 0, number, number), (rows_before, received_ms, _MARK, NO_DIGEST, NO_DIGEST))


def segment_header(header: SegmentHeader) -> bytes:
    spool = header.spool.encode("ascii")
    checked = _SEGMENT.pack(SEGMENT_MAGIC, spool, header.salt, header.first, header.rows_before, 0)[:-4]
    return checked + struct.pack("<I", crc32(checked))


def _seal(salt: int, first: tuple[int, ...], rest: tuple[int | bytes, ...]) -> bytes:
    plain = _FRAME.pack(MAGIC, 0, *first, *rest)
    return MAGIC + struct.pack("<I", crc32(plain[_CHECKED_FROM:], salt)) + plain[_CHECKED_FROM:]


# ── reading ──


def parse_header(data: bytes) -> SegmentHeader | None:
    """None if this is not the header of a segment, or not all of it."""
    if len(data) < HEADER_BYTES:
        return None
    magic, spool, salt, first, rows_before, crc = _SEGMENT.unpack_from(data)
    if magic != SEGMENT_MAGIC or crc32(data[: HEADER_BYTES - 4]) != crc:
        return None
    return SegmentHeader(spool.decode("ascii", "replace"), salt, first, rows_before)


def parse_head(data: bytes, salt: int, at: int = 0) -> Frame | None:
    """The head of a frame that begins there; None if there is no whole one."""
    if len(data) < at + FRAME_BYTES or data[at : at + 4] != MAGIC:
        return None
    _, crc, *fields = _FRAME.unpack_from(data, at)
    if crc32(memoryview(data)[at + _CHECKED_FROM : at + FRAME_BYTES], salt) != crc:
        return None
    payload_crc, payload_bytes, text_bytes, rows, number, synced, rows_before, received_ms, flags, key, body = fields
    return Frame(
        number, synced, rows, rows_before, received_ms, payload_bytes, payload_crc, text_bytes, flags, key, body
    )


def unpack(frame: Frame, payload: bytes) -> bytes | None:
    """The text of a record; None if the payload is not what the frame says."""
    if len(payload) != frame.payload_bytes or crc32(payload) != frame.payload_crc:
        return None
    if frame.flags & _PACKED:
        try:
            payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=frame.text_bytes)
        except zstandard.ZstdError:
            return None
    return payload if len(payload) == frame.text_bytes else None


def name_of(frame: Frame, payload: bytes) -> str:
    """The name that a record's rows were sent under; empty if it has none. Of a payload that `unpack` understood."""
    if not frame.flags & _NAMED:
        return ""
    (length,) = _NAME_LENGTH.unpack_from(payload, len(payload) - _NAME_LENGTH.size)
    return payload[-_NAME_LENGTH.size - length : -_NAME_LENGTH.size].decode(errors="replace")


def frames(read: Read, size: int, number: int, salt: int, *, offset: int = HEADER_BYTES) -> Iterator[Placed]:
    """Whole frames one after another, records in order from `number` on, up to the first place that has none."""
    while (placed := frame_at(read, size, offset, salt)) is not None:
        if placed.frame.number != number:
            return
        yield placed
        offset = placed.end
        number += not placed.frame.is_mark


def heads(read: Read, size: int, number: int, salt: int) -> Iterator[Placed]:
    """Like `frames`, without reading the payloads: quick, but it is unknown whether they are whole."""
    offset = HEADER_BYTES
    while (frame := parse_head(read(offset, FRAME_BYTES), salt)) is not None:
        if frame.number != number or offset + frame.size_bytes > size:
            return
        yield Placed(offset, frame)
        offset += frame.size_bytes
        number += not frame.is_mark


def vouched(read: Read, size: int, offset: int, number: int, salt: int) -> Placed | None:
    """At `offset` no frame can be read, where record `number` should be: a later frame that proves that this record had
    been acknowledged. None: nothing after it does, so it is torn, with all that follows."""
    head = parse_head(read(offset, FRAME_BYTES), salt)
    # A head that can be read says where the next frame begins; what looks like one inside the payload is no frame.
    start = offset + (head.size_bytes if head is not None else 1)
    if start >= size:
        return None
    data = read(start, size - start)
    at = data.find(MAGIC)
    while at >= 0:
        found = frame_at(lambda begin, length: data[begin : begin + length], len(data), at, salt)
        if found is not None and found.frame.number >= number and found.frame.synced > number:
            return Placed(start + at, found.frame)
        at = data.find(MAGIC, found.end if found is not None else at + 1)
    return None


def frame_at(read: Read, size: int, offset: int, salt: int) -> Placed | None:
    """The whole frame that begins there."""
    frame = parse_head(read(offset, FRAME_BYTES), salt)
    if frame is None or offset + frame.size_bytes > size:
        return None
    payload = read(offset + FRAME_BYTES, frame.payload_bytes)
    if len(payload) != frame.payload_bytes or crc32(payload) != frame.payload_crc:
        return None
    return Placed(offset, frame)
