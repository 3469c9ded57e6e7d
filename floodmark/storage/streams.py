"""Streams over files: for Parquet writers, and for Parquet and Avro readers.

Memory is bounded (I14): an upload holds a few parts at most, a reader one block. Closing an OutputStream only ends the
writing; the context that opened it decides whether the name appears, so a writer library that closes its sink on an
error cannot make half a file visible (I3).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from floodmark.errors import Invalid
from floodmark.storage.counters import Counters

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Upload(Protocol):
    """An unfinished file: invisible until `finish`; gone after `abandon`."""

    def write(self, data: memoryview) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


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


class RangeReader(io.RawIOBase):
    """A seekable reader over ranged reads. Small reads are served from one block that was read ahead."""

    def __init__(
        self,
        size_bytes: int,
        fetch: Callable[[int, int], bytes],
        release: Callable[[], None],
        *,
        read_ahead_bytes: int,
    ) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.fetch = fetch
        self._release = release
        self._read_ahead_bytes = read_ahead_bytes
        self._position = 0
        self._block = b""
        self._block_start = 0

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
        at = self._position - self._block_start
        if not (at >= 0 and at + wanted <= len(self._block)):
            data = self.fetch(self._position, max(wanted, min(self._read_ahead_bytes, left)))
            if wanted >= self._read_ahead_bytes:
                self._position += len(data)
                return data
            self._block, self._block_start, at = data, self._position, 0
        piece = self._block[at : at + wanted]
        self._position += len(piece)
        return piece

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._block = b""
            self._release()
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O on a closed reader")
