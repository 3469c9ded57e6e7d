"""Workers that load the chunks of a plan: bounded threads, or the caller's own thread if one is enough.

The first chunk that cannot be loaded fails the run, by its name; the others stop after their present chunk, and what
they finished stays. A cancel, an interrupt and an error of the caller's callback stop all of them in the same way. Each
worker holds one chunk at a time, and none waits for another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from floodmark.backfill.brake import Brake, Stopped, retrying
from floodmark.backfill.geometry import PlannedChunk
from floodmark.backfill.progress import Cancelled, Progress
from floodmark.errors import Fenced, FloodmarkError, Unavailable

# Loads one chunk; the number tells which try it is, from 1.
Load = Callable[[PlannedChunk, int], None]


class Executor:
    def __init__(self, load: Load, progress: Progress, brake: Brake, *, workers: int, tries: int, retry_s: float):
        self._load = load
        self._progress = progress
        self._brake = brake
        self._workers = workers
        self._tries = tries
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._processed = 0

    def run(self, planned: Sequence[PlannedChunk], processed: int, total: int) -> None:
        """Load all of them, and tell each; `processed` of `total` were done before."""
        self._processed = processed
        waiting = iter(planned)
        workers = min(self._workers, len(planned))
        if workers == 1:
            for one in waiting:
                self._load_one(one, total)
            return

        def work() -> None:
            try:
                while (one := self._next(waiting)) is not None:
                    self._load_one(one, total)
            except BaseException as error:  # noqa: BLE001 - the first one is raised where the workers are waited for
                self._stop(error)

        with ThreadPoolExecutor(workers, thread_name_prefix="floodmark-chunk") as pool:
            try:
                wait([pool.submit(work) for _ in range(workers)])
            except BaseException:
                # Somebody pressed Ctrl-C. What is in a publish is finished: the pool waits for it.
                self._brake.pull()
                raise
        if self._error is not None:
            raise self._error

    def _next(self, waiting: object) -> PlannedChunk | None:
        with self._lock:
            return next(waiting, None)  # type: ignore[call-overload,no-any-return]

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None and not isinstance(error, Stopped):
                self._error = error
        self._brake.pull()

    def _load_one(self, one: PlannedChunk, total: int) -> None:
        self._brake.check()
        try:
            for attempt in retrying(self._brake, self._tries, self._retry_s, f"chunk {one.chunk.name}"):
                with attempt:
                    self._load(one, attempt.retry_state.attempt_number)
        except (Cancelled, Stopped, Fenced):
            raise
        except FloodmarkError as error:
            error.facts["chunk"] = one.chunk.name
            raise
        except Exception as error:
            raise Unavailable(
                "a chunk could not be loaded", chunk=one.chunk.name, cause=f"{type(error).__name__}: {error}"
            ) from error
        with self._lock:
            self._processed += 1
            self._progress.step(self._processed, total)
