"""Workers that load the chunks of a plan: bounded threads, or the caller's own thread if one is enough.

The first chunk that cannot be loaded fails the run, by its name; the others stop after their current chunk, and
finished chunks stay. A cancel, an interrupt and an error of the caller's callback stop all of them in the same way. No
worker waits for another. Quick chunks are loaded several at once, as many as take some seconds; if such a bundle fails,
whatever the reason, its chunks are loaded one by one, so the error names the wrong one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from floodmark import log
from floodmark.backfill.chunks.geometry import PlannedChunk
from floodmark.backfill.chunks.retries import OtherFailed, WorkerStop, retrying
from floodmark.errors import Fenced, FloodmarkError, Unavailable
from floodmark.jobs.progress import JobProgress
from floodmark.runs import Stopped

BUNDLE_S = 8.0
BUNDLE_MAX = 16
GROWTH_MAX = 8
# Loads one chunk; the number is that of the try, from 1.
Load = Callable[[PlannedChunk, int], None]


class LoadBundle(Protocol):
    """Loads several chunks at once."""

    def is_possible(self) -> bool:
        """Whether a bundle is worth a try, judging by the chunks before."""

    def load(self, planned: Sequence[PlannedChunk]) -> bool:
        """False if these chunks must be loaded one by one; a failed bundle leaves nothing behind."""


@dataclass
class BundleSize:
    """How many chunks are loaded at once: more while they are quick, fewer if a cancel would have to wait."""

    size: int = 1

    def took(self, chunks: int, seconds: float) -> None:
        wanted = int(chunks * BUNDLE_S / max(seconds, 0.001))
        self.size = max(1, min(wanted, GROWTH_MAX * self.size, BUNDLE_MAX))

    def failed(self) -> None:
        self.size = 1


class ChunkWorkers:
    def __init__(
        self,
        load: Load,
        progress: JobProgress,
        worker_stop: WorkerStop,
        *,
        workers: int,
        tries: int,
        retry_s: float,
        bundle: LoadBundle | None = None,
    ) -> None:
        self._load = load
        self._progress = progress
        self._worker_stop = worker_stop
        self._workers = workers
        self._tries = tries
        self._retry_s = retry_s
        self._bundle = bundle
        self._bundle_size = BundleSize()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._processed = 0

    def run(self, planned: Sequence[PlannedChunk], processed: int, total: int) -> None:
        """Load all of them, and report each; `processed` of `total` were done before."""
        self._processed = processed
        waiting = deque(planned)
        workers = min(self._workers, len(planned))
        if workers == 1:
            while some := self._next(waiting):
                self._load_some(some, total)
            return

        def work() -> None:
            try:
                while some := self._next(waiting):
                    self._load_some(some, total)
            except BaseException as error:  # noqa: BLE001 - the first one is raised where the workers are waited for
                self._stop(error)

        with ThreadPoolExecutor(workers, thread_name_prefix="floodmark-chunk") as pool:
            try:
                wait([pool.submit(work) for _ in range(workers)])
            except BaseException:
                # Ctrl-C. A running publish finishes: the pool waits for it.
                self._worker_stop.set()
                raise
        if self._error is not None:
            raise self._error

    def _next(self, waiting: deque[PlannedChunk]) -> list[PlannedChunk]:
        """The next chunks for a worker; of the last ones only as many as leave some for the others."""
        possible = self._bundle is not None and self._bundle.is_possible()
        with self._lock:
            count = min(self._bundle_size.size if possible else 1, -(-len(waiting) // self._workers))
            return [waiting.popleft() for _ in range(count)]

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None and not isinstance(error, OtherFailed):
                self._error = error
        self._worker_stop.set()

    def _load_some(self, some: Sequence[PlannedChunk], total: int) -> None:
        started_s, failed = time.monotonic(), False
        if len(some) > 1:
            self._worker_stop.check()
            try:
                together = self._bundle is not None and self._bundle.load(some)
            except (Stopped, Fenced):
                raise
            except Exception as error:  # noqa: BLE001 - one by one, the chunk that is wrong is found and named
                log.get().warning("chunks are loaded one by one", chunks=len(some), cause=str(error))
                together, failed = False, True
            if together:
                self._tell(len(some), total)
            else:
                for one in some:
                    self._load_one(one, total, again=failed)
        else:
            self._load_one(some[0], total)
        with self._lock:
            if failed:
                self._bundle_size.failed()
            else:
                self._bundle_size.took(len(some), time.monotonic() - started_s)

    def _load_one(self, one: PlannedChunk, total: int, *, again: bool = False) -> None:
        """Load a chunk; `again` if an earlier try exists whose outcome may be unknown."""
        self._worker_stop.check()
        try:
            for attempt in retrying(self._worker_stop, self._tries, self._retry_s, f"chunk {one.chunk.name}"):
                with attempt:
                    self._load(one, attempt.retry_state.attempt_number + again)
        except (Stopped, Fenced):
            raise
        except FloodmarkError as error:
            error.facts["chunk"] = one.chunk.name
            raise
        except Exception as error:
            raise Unavailable("a chunk could not be loaded", chunk=one.chunk.name, cause=error) from error
        self._tell(1, total)

    def _tell(self, chunks: int, total: int) -> None:
        with self._lock:
            self._processed += chunks
            self._progress.step(self._processed, total)
