"""The one thread that writes to a spool: all appends that wait are written together, synced once, then answered.

While a sync runs the next appends gather, so the slower the disk, the larger the groups. Nobody is answered before
the sync of his group has come back (I4). If it fails, all of the group are told so, in their order, and none is kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from floodmark.errors import Busy, FloodmarkError, Unavailable
from floodmark.spool.frame import Draft
from floodmark.spool.limits import Taken


@dataclass
class Append:
    """One that waits, and those who sent the same key meanwhile: the digest of their rows, and their answer."""

    draft: Draft
    future: Future[Taken]
    followers: list[tuple[bytes, Future[Taken]]] = field(default_factory=list)


class GroupWriter:
    """`write` makes a group durable and returns its first number; `ended` is told first number or error of each group,
    and answers; `idle` is called when a group was written and nothing waits."""

    def __init__(
        self,
        write: Callable[[Sequence[Draft]], int],
        ended: Callable[[list[Append], int | FloodmarkError], None],
        idle: Callable[[], None],
        queued_bytes_max: int,
    ) -> None:
        self._write = write
        self._ended = ended
        self._idle = idle
        self._queued_bytes_max = queued_bytes_max
        self._wake = threading.Condition()
        self._queue: deque[Append] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spool-writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def put(self, append: Append) -> None:
        size = append.draft.size_bytes
        with self._wake:
            if self._closed:
                raise Unavailable("this spool is closed", advice="Try again.")
            if self._queue and self._queued_bytes + size > self._queued_bytes_max:
                raise Busy(
                    "more rows come in than the disk of the spool takes",
                    waiting_bytes=self._queued_bytes,
                    advice="Try again a little later.",
                )
            self._queue.append(append)
            self._queued_bytes += size
            self._wake.notify()

    def close(self) -> None:
        """No more; what waits is written first."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while group := self._take():
                ended = self._write_group(group)
                self._ended(group, ended)
                if isinstance(ended, int) and not self._queue:
                    self._idle()
        finally:
            # Without this thread nobody would ever be answered.
            with self._wake:
                self._closed = True
                left = list(self._queue)
                self._queue.clear()
            if left:
                self._ended(left, Unavailable("the rows were not taken into the spool", advice="Try again."))

    def _write_group(self, group: list[Append]) -> int | FloodmarkError:
        try:
            return self._write([append.draft for append in group])
        except FloodmarkError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            return Unavailable("the rows were not taken into the spool", reason=repr(error), advice="Try again.")

    def _take(self) -> list[Append]:
        """All that waits; nothing only once it is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closed)
            group = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            return group
