"""Streams over files: for Parquet writers, and for Parquet and Avro readers.

Memory is bounded (I14): an upload holds a few parts at most, a reader one block. Closing an OutputStream only ends the
writing; the context that opened it decides whether the name appears, so a writer library that closes its sink on an
error cannot make half a file visible (I3). Where a read is a round trip, opening a file brings its end, and a caller
that knows what it will read can have it fetched in few requests. A file that ends early is Corrupt, never a short read.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from floodmark.errors import Corrupt, Invalid
from floodmark.storage.counters import Counters

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Offset and length.
Range = tuple[int, int]
# Requests of one call run about ten at once, so one more takes as long as reading so much.
_GAP_BYTES_MAX = 256 * 1024
_MERGED_BYTES_MAX = 8 * 1024 * 1024
_ADVICE = "Run `floodmark doctor`; restore the file."


class Upload(Protocol):
    """An unfinished file: invisible until `finish`; gone after `abandon`."""

    def write(self, data: memoryview) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


class UnnamedFile(Protocol):
    """A whole file that has no name yet; False: its name is taken."""

    def claim(self) -> bool: ...


class OutputStream:
    """The output of an unfinished file; suitable for pyarrow's ParquetWriter."""

    mode = "wb"

    def __init__(self, upload: Upload, counters: Counters) -> None:
        self._upload = upload
        self._counters = counters
        self._position = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._closed:
            raise ValueError("write to a closed stream")
        view = memoryview(data).cast("B")
        if view.nbytes:
            self._upload.write(view)
        self._position += view.nbytes
        self._counters.count("writer", written=view.nbytes, calls=0)
        return view.nbytes

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Nothing to do: bytes become durable, and visible, together at the end."""

    def close(self) -> None:
        self._closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


@dataclass(frozen=True)
class Opened:
    """An open file: its size, ranged reads, and what came with opening it. `fetch_many` if a read is a round trip."""

    size_bytes: int
    fetch: Callable[[int, int], bytes]
    release: Callable[[], None]
    fetch_many: Callable[[Sequence[Range]], list[bytes]] | None = None
    tail: bytes = b""


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in few ranges, in order: those that touch become one, and small ones that are close together."""
    found: list[Range] = []
    for offset, length in sorted(one for one in ranges if one[1]):
        first, first_length = found[-1] if found else (offset, 0)
        last_end = first + first_length
        end = max(last_end, offset + length)
        near = offset - last_end <= _GAP_BYTES_MAX and end - first <= _MERGED_BYTES_MAX
        if found and (offset <= last_end or near):
            found[-1] = first, end - first
        else:
            found.append((offset, length))
    return found


class RangeReader(io.RawIOBase):
    """A seekable reader over ranged reads. Small reads are served from one block that was read ahead."""

    def __init__(self, location: str, opened: Opened, *, read_ahead_bytes: int) -> None:
        super().__init__()
        self.location = location
        self.size_bytes = opened.size_bytes
        self.fetch = opened.fetch
        self.fetch_many = opened.fetch_many
        self._release = opened.release
        self._read_ahead_bytes = read_ahead_bytes
        self._position = 0
        self._block = b""
        self._block_start = 0
        self._tail = (self.size_bytes - len(opened.tail), opened.tail)
        # In order, the file's end last.
        self._held = [self._tail]

    @property
    def is_remote(self) -> bool:
        """Whether a read is a round trip, so that `prefetch` is worth its call."""
        return self.fetch_many is not None

    def prefetch(self, ranges: Sequence[Range]) -> None:
        """Fetch ranges that will be read next, in few requests, several at once; replaces those of the last call.

        The caller bounds them: they are held in memory (I14).
        """
        if self.fetch_many is None:
            return
        self._held = [self._tail]
        tail_start = self._tail[0]
        wanted = merged([(start, min(length, tail_start - start)) for start, length in ranges if start < tail_start])
        if not wanted:
            return
        parts = self.fetch_many(wanted)
        for (start, length), part in zip(wanted, parts, strict=True):
            self._check_whole(start, length, part)
        self._held = [*((start, part) for (start, _), part in zip(wanted, parts, strict=True)), self._tail]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def size(self) -> int:
        return self.size_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check_open()
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if start + offset < 0:
            raise Invalid("cannot seek before the start of a file", offset=start + offset)
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        self._check_open()
        left = max(0, self.size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        piece = self._held_bytes(wanted)
        if piece is None:
            piece = self._read(wanted, left)
        self._position += len(piece)
        return piece

    def _read(self, wanted: int, left: int) -> bytes:
        at = self._position - self._block_start
        if not (at >= 0 and at + wanted <= len(self._block)):
            length = max(wanted, min(self._read_ahead_bytes, left))
            data = self.fetch(self._position, length)
            self._check_whole(self._position, length, data)
            if wanted >= self._read_ahead_bytes:
                return data
            self._block, self._block_start, at = data, self._position, 0
        return self._block[at : at + wanted]

    def _held_bytes(self, wanted: int) -> bytes | None:
        """The next bytes from what is held; None if a part of them is not."""
        at, end = self._position, self._position + wanted
        parts = []
        for start, data in self._held:
            if start <= at < start + len(data):
                parts.append(data[at - start : end - start])
                at += len(parts[-1])
        if at < end:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_whole(self, start: int, length: int, data: bytes) -> None:
        if len(data) < length:
            raise Corrupt(
                "a file became shorter while it was read",
                file=self.location,
                offset=start,
                bytes=len(data),
                bytes_expected=length,
                advice=_ADVICE,
            )

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._block, self._held = b"", []
            self._release()
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O on a closed reader")
