"""The body of a request, within limits: as it was sent, and as it is once it is unpacked.

Bytes are counted before they are kept (I14): a body that declares too large a size is refused before it is read, one
that declares none when it has become too large, and a small one that unpacks into a large one (a bomb) when it does.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zstandard

from floodmark.errors import Busy, Invalid

MIB = 1024 * 1024
GZIP_BITS = 16 + zlib.MAX_WBITS
PIECE_BYTES = 64 * 1024
MEMBERS_MAX = 1_000
# A block of zstd is at least 4 bytes and at most 128 KiB of text: this bounds what is unpacked before it is counted.
ZSTD_PIECE_BYTES = 512
# The largest window that a frame of zstd may ask for; the highest usual level takes 8 MiB.
ZSTD_WINDOW_BYTES_MAX = 32 * MIB


@dataclass(frozen=True)
class RequestLimits:
    """What one request may take, and how many may be under way at once."""

    body_bytes_max: int = 16 * MIB
    text_bytes_max: int = 64 * MIB
    rows_max: int = 100_000
    body_s_max: float = 60.0
    workers: int = 4
    requests_max: int = 32
    # Of all bodies at once, as sent and unpacked; two of the largest fit.
    bytes_max: int = 160 * MIB
    # How long `wait=committed` waits, and how many may wait at once: their rows are durable, and no longer take memory.
    wait_s_max: float = 30.0
    waiters_max: int = 64


class MemoryBudget:
    """The memory that bodies may take, all together. For any thread."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._used = 0
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[HeldMemory]:
        """A part of the memory, as large as it becomes; all of it is returned at the end."""
        held = HeldMemory(self)
        try:
            yield held
        finally:
            self._give(held.size)

    def _take(self, size: int) -> None:
        with self._lock:
            if self._used + size > self._bytes_max:
                raise Busy("the current requests are too large together", bytes_max=self._bytes_max, advice="Retry.")
            self._used += size

    def _give(self, size: int) -> None:
        with self._lock:
            self._used -= size


class HeldMemory:
    def __init__(self, room: MemoryBudget) -> None:
        self._room = room
        self.size = 0

    def grow(self, size: int) -> None:
        """Call before so much more is kept; `Busy` if there is no room for it."""
        self._room._take(size)
        self.size += size


class WrongBody(Invalid):
    """The body cannot be taken, whatever is in it."""

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know


class TooLarge(WrongBody):
    """As it was sent, or unpacked."""


class TooSlow(WrongBody):
    """The body did not end in time."""


class Undecodable(WrongBody):
    """It is not in the encoding that it is said to be in."""


class UnknownEncoding(WrongBody):
    """It is in an encoding that is not known here."""


async def read_body(
    chunks: AsyncIterator[bytes], declared: str | None, limits: RequestLimits, held: HeldMemory
) -> bytes:
    if declared is not None and declared.isascii() and declared.isdigit() and int(declared) > limits.body_bytes_max:
        raise _too_large("body_bytes_max", limits.body_bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s_max):
            async for chunk in chunks:
                if len(body) + len(chunk) > limits.body_bytes_max:
                    raise _too_large("body_bytes_max", limits.body_bytes_max)
                held.grow(len(chunk))
                body += chunk
    except TimeoutError as error:
        raise TooSlow(
            "timeout while reading the body", seconds_max=limits.body_s_max, advice="Send it again."
        ) from error
    return bytes(body)


def unpack(body: bytes, encoding: str | None, text_bytes_max: int, held: HeldMemory) -> bytes:
    """The body's text."""
    name = (encoding or "identity").strip().lower()
    if name not in _UNPACK:
        raise UnknownEncoding(
            "unknown Content-Encoding", encoding=name[:40], advice="Use gzip, zstd, or no Content-Encoding."
        )
    if name == "identity" and len(body) <= text_bytes_max:
        return body
    text = bytearray()
    try:
        for piece in _UNPACK[name](body):
            if len(text) + len(piece) > text_bytes_max:
                raise _too_large("text_bytes_max", text_bytes_max)
            held.grow(len(piece))
            text += piece
    except (zlib.error, zstandard.ZstdError) as error:
        raise Undecodable("the body cannot be decompressed", encoding=name, cause=error) from error
    return bytes(text)


def _too_large(limit: str, size_bytes: int) -> TooLarge:
    return TooLarge("the body is too large", **{limit: size_bytes}, advice="Send the rows in smaller parts.")


def _plain(body: bytes) -> Iterator[bytes]:
    yield body


def _gzip(body: bytes) -> Iterator[bytes]:
    """All members of the body, one after the other; no piece is larger than allowed."""
    view, start, members = memoryview(body), 0, 0
    while start < len(body):
        members = _one_more(members)
        member = zlib.decompressobj(GZIP_BITS)
        while not member.eof:
            given = view[start : start + PIECE_BYTES]
            start += len(given)
            piece = member.decompress(given, PIECE_BYTES)
            if not (piece or given or member.eof):
                raise zlib.error("it is truncated")
            yield piece
            while member.unconsumed_tail:
                yield member.decompress(member.unconsumed_tail, PIECE_BYTES)
        start -= len(member.unused_data)


def _zstd(body: bytes) -> Iterator[bytes]:
    view, start, frames = memoryview(body), 0, 0
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
    while start < len(body):
        frames = _one_more(frames)
        frame = unpacker.decompressobj()
        while not frame.eof:
            given = view[start : start + ZSTD_PIECE_BYTES]
            if not given:
                raise zstandard.ZstdError("it is truncated")
            start += len(given)
            yield frame.decompress(given)
        start -= len(frame.unused_data)


def _one_more(members: int) -> int:
    """Count the members of a body: each costs time, however small it is."""
    if members == MEMBERS_MAX:
        raise _too_large("members_max", MEMBERS_MAX)
    return members + 1


_UNPACK = {"identity": _plain, "gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
