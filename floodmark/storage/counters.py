"""What a storage did: calls by verb, and bytes. Exact under threads; kept per storage, never global."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

# Parts of a call, not calls: they are counted to prove that writes are durable, and left out of the total.
FSYNCS = ("fsync_file", "fsync_dir")


@dataclass
class Counters:
    """Calls by verb (and fsyncs of files and folders), bytes read and bytes written."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @property
    def total(self) -> int:
        """All calls, without fsyncs."""
        with self._lock:
            return sum(count for verb, count in self.calls.items() if verb not in FSYNCS)

    def count(self, verb: str, *, read: int = 0, written: int = 0, calls: int = 1) -> None:
        with self._lock:
            if calls:
                self.calls[verb] = self.calls.get(verb, 0) + calls
            self.bytes_read += read
            self.bytes_written += written

    def snapshot(self) -> Counters:
        """A copy that does not change any more."""
        with self._lock:
            return Counters(dict(self.calls), self.bytes_read, self.bytes_written)

    def difference(self, earlier: Counters) -> Counters:
        """What happened since `earlier`, a snapshot of these counters."""
        now = self.snapshot()
        calls = {verb: count - earlier.calls.get(verb, 0) for verb, count in now.calls.items()}
        return Counters(
            {verb: count for verb, count in calls.items() if count},
            now.bytes_read - earlier.bytes_read,
            now.bytes_written - earlier.bytes_written,
        )

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        now = self.snapshot()
        return {"calls": now.calls, "bytes_read": now.bytes_read, "bytes_written": now.bytes_written}
