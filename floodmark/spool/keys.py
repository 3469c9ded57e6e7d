"""The Idempotency-Keys of a spool: which keys brought which rows, the newest of them, within a window of time.

Opening reads the keys of existing segments from these. Before a segment is deleted, the keys of its records go into the
file `keys`, which is replaced as a whole or not at all. So a key stays known for the window, through any crash. Only
digests are kept: the number of keys bounds memory and file.

A full disk must not keep fed segments from being deleted, so room for the next `keys` is allocated ahead: the file
`reserve` (class KeysReserve).
"""

from __future__ import annotations

import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

from floodmark.errors import Corrupt, Unavailable
from floodmark.failpoints import hit
from floodmark.spool.folder import KEYS, RESERVE, Calls, failing, sync_folder
from floodmark.spool.frame import DIGEST_BYTES
from floodmark.spool.segments import write_all

_MAGIC = b"FMKEYS01"
_HEADER = struct.Struct("<8s26sQI")  # magic, spool, records below this are covered, how many keys
_KEPT = struct.Struct(f"<{DIGEST_BYTES}sQIq")  # digest of the body, record, rows, when
_ENTRY_BYTES = DIGEST_BYTES + _KEPT.size
_CRC_BYTES = 4
# The reserve grows in steps of this many bytes.
_STEP_BYTES = 64 * 1024


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Known:
    """What a key brought."""

    body: bytes
    record: int
    rows: int
    at_ms: int


class KeyWindow:
    """Keys by digest, the oldest first. Not thread-safe: callers hold the spool's lock."""

    def __init__(self, keys_max: int, window_ms: int) -> None:
        self._keys_max = keys_max
        self._window_ms = window_ms
        # Packed: a tuple of Python objects would take three times the memory.
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes, now_ms: int) -> Known | None:
        kept = self._kept.get(key)
        known = None if kept is None else Known(*_KEPT.unpack(kept))
        return known if known is not None and not self._is_over(known.at_ms, now_ms) else None

    def add(self, key: bytes, known: Known) -> None:
        self._kept.pop(key, None)  # a key that is used anew, after its window, is the newest
        self._kept[key] = _KEPT.pack(known.body, known.record, known.rows, known.at_ms)
        # Keys are dropped by their number only: a clock that was set forward, and back, must not forget any.
        if len(self._kept) > self._keys_max:
            self._kept.popitem(last=False)

    def copy_below(self, record: int) -> list[bytes]:
        """Entries of the file for keys of records below this one: quick, as it blocks every append."""
        found = []
        for key, kept in self._kept.items():
            if int.from_bytes(kept[DIGEST_BYTES : DIGEST_BYTES + 8], "little") < record:
                found.append(key + kept)
        return found

    def _is_over(self, at_ms: int, now_ms: int) -> bool:
        return at_ms <= now_ms - self._window_ms


@dataclass(frozen=True)
class KeysFile:
    """What the file `keys` holds: all keys in the window of records below `until`."""

    spool: str
    until: int
    entries: list[tuple[bytes, Known]]


def keys_size(count: int) -> int:
    """How long the file of so many keys is."""
    return _HEADER.size + count * _ENTRY_BYTES + _CRC_BYTES


def keys_bytes(spool: str, until: int, entries: list[bytes]) -> bytes:
    data = b"".join([_HEADER.pack(_MAGIC, spool.encode("ascii"), until, len(entries)), *entries])
    return data + struct.pack("<I", crc32(data))


def raised(data: bytes, until: int) -> bytes:
    """The same file of keys, which now covers records up to a later one."""
    header = _HEADER.unpack_from(data)
    entries = [data[at : at + _ENTRY_BYTES] for at in range(_HEADER.size, len(data) - _CRC_BYTES, _ENTRY_BYTES)]
    return keys_bytes(header[1].decode("ascii"), until, entries)


def parse_keys(data: bytes, path: str) -> KeysFile:
    header = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else None
    whole = (
        header is not None
        and header[0] == _MAGIC
        and len(data) == _HEADER.size + header[3] * _ENTRY_BYTES + _CRC_BYTES
        and crc32(data[:-_CRC_BYTES]) == struct.unpack("<I", data[-_CRC_BYTES:])[0]
    )
    if header is None or not whole:
        raise Corrupt(
            "the keys of this spool cannot be read: a request that is sent again could store its rows twice",
            file=path,
            advice="It is kept as it is. Restore the file, or accept the loss with `floodmark spool accept`.",
        )
    places = range(_HEADER.size, len(data) - _CRC_BYTES, _ENTRY_BYTES)
    entries = [(data[at : at + DIGEST_BYTES], Known(*_KEPT.unpack_from(data, at + DIGEST_BYTES))) for at in places]
    return KeysFile(header[1].decode("ascii", "replace"), header[2], entries)


# ── room on the disk for the file of keys ──


class KeysReserve:
    """Room on the disk for the keys of one spool, so that a full disk can be emptied by feeding it.

    Fed segments are deleted only once their keys are durable elsewhere. A full disk has no room for these keys, and
    nothing would ever be deleted. So `reserve`, a file of zeros with allocated room, is as large as the keys of all
    segments but the last. It is made before a segment gets a successor; without room for it the disk takes no more
    rows. If the keys cannot be written as usual, they are written over it, and one rename makes it the file `keys`;
    the segments that then go give the room for the next one. The room is not spent while a segment gets its successor.
    Without that rule: W finds the room; F spends it and sees one segment; W adds a second, whose keys then have no
    room. A crash leaves a reserve with half of the keys in it, which no one reads. Several threads may use it.
    """

    def __init__(self, folder: Path, calls: Calls) -> None:
        self._folder = folder
        self._path = folder / RESERVE
        self._calls = calls
        self._lock = threading.Lock()

    @contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Reserve room for keys of this size, and do not spend it inside; Unavailable if the disk has none."""
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
        """Write the keys: as any file, or into the room that was reserved for them."""
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
            # Crash here: the previous keys are still the spool's, and so are the segments.
            hit("spool.keys_written")
            os.replace(self._path, self._folder / KEYS)
            sync_folder(self._folder, self._calls)
        return True
