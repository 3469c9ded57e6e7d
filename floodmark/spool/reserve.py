"""Room on the disk that is kept for the keys of a spool, so that a full disk can be emptied by feeding it.

Fed segments go only once their keys are durable elsewhere. On a full disk nothing can be written for that, and nothing
would ever go: so a file of zeros with allocated room, `reserve`, is as large as the keys of all segments but the last.
It is made before a segment gets a successor (a disk that has no room for it takes no more rows). When the keys cannot
be written as usual, they are written over it, and it becomes the file `keys` in one rename; the segments that then go
give the room for the next one. The room is not spent while a segment gets its successor. Without that: W finds the
room; F spends it and sees one segment; W adds a second, whose keys then have no room. A crash leaves a reserve with
half of the keys in it, which no one reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from floodmark.errors import Unavailable
from floodmark.failpoints import hit
from floodmark.spool.folder import KEYS, RESERVE, Calls, failing, sync_folder
from floodmark.spool.segment import write_all

# It grows in steps of this many bytes.
_STEP_BYTES = 64 * 1024


class KeysReserve:
    """Of one spool. May be used by several threads."""

    def __init__(self, folder: Path, calls: Calls) -> None:
        self._folder = folder
        self._path = folder / RESERVE
        self._calls = calls
        self._lock = threading.Lock()

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Keep room for keys of this size, and do not spend it inside; Unavailable if the disk has not got it."""
        with self._lock:
            self._hold(size_bytes)
            yield

    def _hold(self, size_bytes: int) -> None:
        with failing("keep room for keys", self._path):
            if self._path.exists() and self._path.stat().st_size >= size_bytes:
                return
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._calls.allocate(fd, 0, -(-size_bytes // _STEP_BYTES) * _STEP_BYTES)
            finally:
                os.close(fd)

    def put(self, data: bytes) -> None:
        """Write the keys: as any file, or into the room that was kept for them."""
        try:
            self._calls.put(str(self._folder / KEYS), data)
        except Unavailable as error:
            if not self._spend(data):
                raise error

    def _spend(self, data: bytes) -> bool:
        with self._lock, failing("write", self._path):
            if not self._path.exists() or self._path.stat().st_size < len(data):
                return False
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                write_all(fd, data, 0, self._calls)
                self._calls.ftruncate(fd, len(data))
                self._calls.fsync(fd)
            finally:
                os.close(fd)
            # Crash here: the keys before these are still the spool's, and so are the segments.
            hit("spool.keys_written")
            os.replace(self._path, self._folder / KEYS)
            sync_folder(self._folder, self._calls)
        return True
