"""The window of Idempotency-Keys of a spool: which keys brought which rows, the newest of them, for a while.

Keys of records whose segments are still there are read from these; before a segment is deleted, those of its records
are written to the file `keys`, whole under its name or not at all. So a key is known as long as the window says,
through any crash. Only digests are kept: memory and file are bounded by the number of keys.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from zlib import crc32

from floodmark.errors import Corrupt
from floodmark.spool.frame import DIGEST_BYTES

_MAGIC = b"FMKEYS01"
_HEADER = struct.Struct("<8s26sQI")  # magic, spool, records below this are covered, how many keys
_KEPT = struct.Struct(f"<{DIGEST_BYTES}sQIq")  # digest of the body, record, rows, when
_ENTRY_BYTES = DIGEST_BYTES + _KEPT.size
_CRC_BYTES = 4


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
    """Keys by digest, the oldest first. Not for several threads: the spool's lock is held around it."""

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
        # Only their number makes keys go: a clock that was put forward, and back, must not forget any.
        if len(self._kept) > self._keys_max:
            self._kept.popitem(last=False)

    def copy_below(self, record: int) -> list[bytes]:
        """Entries of the file for keys of records below this one: quick, as nobody can append meanwhile."""
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
    """The same file of keys, said to cover records up to a later one."""
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
            "the keys of this spool cannot be read: a request that is sent again could bring its rows twice",
            file=path,
            advice="It is kept as it is. Restore the file, or accept the loss with `floodmark spool accept`.",
        )
    places = range(_HEADER.size, len(data) - _CRC_BYTES, _ENTRY_BYTES)
    entries = [(data[at : at + DIGEST_BYTES], Known(*_KEPT.unpack_from(data, at + DIGEST_BYTES))) for at in places]
    return KeysFile(header[1].decode("ascii", "replace"), header[2], entries)
