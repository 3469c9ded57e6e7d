"""Files that are written and have no names yet: they get their names together, all at once.

Making a file durable mostly waits for the disk, and so does a PUT for its server. So an operation of many small files
writes all of them, then ends all of them at the same time (`Storage.end`): it waits a few times, however many they are.
A held file cannot be read, and its name does not appear before its bytes are durable (I3). Crash: temporary names.

Interleaving that `ending` excludes: thread A ends the files of all threads, which takes a while. B ends too, finds that
nothing is held, and reads a file that has no name yet. So B waits for A. And if A fails, files of B are lost: an error
that A's caller may catch. So B, and every later end of these files, fails as well (I4).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from floodmark.errors import Unavailable

# Bounds of what is held: open files, and bytes in memory where the store is not a disk (I14).
FILES_MAX = 64
BYTES_MAX = 64 * 1024 * 1024
AT_ONCE_MAX = 8

T = TypeVar("T")


@dataclass(frozen=True)
class HeldFile:
    """`end` makes it durable and visible under its name, `drop` discards it."""

    size_bytes: int
    end: Callable[[], None]
    drop: Callable[[], None]


class Held:
    """Held files of one operation, and local folders to be synced with them. Threads may share it."""

    def __init__(self) -> None:
        self._files: list[HeldFile] = []
        self._folders: set[str] = set()
        self._lock = threading.Lock()
        self._one_ends = threading.Lock()
        self._lost: BaseException | None = None

    @property
    def is_full(self) -> bool:
        with self._lock:
            return len(self._files) >= FILES_MAX or sum(file.size_bytes for file in self._files) >= BYTES_MAX

    def add(self, files: Iterable[HeldFile], folders: Collection[str] = ()) -> None:
        with self._lock:
            self._files += files
            self._folders |= set(folders)

    def take(self) -> tuple[list[HeldFile], set[str]]:
        """All that is held; nothing is any more."""
        with self._lock:
            taken = self._files, self._folders
            self._files, self._folders = [], set()
        return taken

    @contextmanager
    def ending(self) -> Iterator[tuple[list[HeldFile], set[str]]]:
        """All that is held, for one thread at a time to end it. After an error files are lost: later ends fail."""
        with self._one_ends:
            if self._lost is not None:
                raise Unavailable(
                    "files of this operation could not be written", cause=self._lost, advice="Run all of it again."
                ) from self._lost
            try:
                yield self.take()
            except BaseException as error:
                self._lost = error
                raise

    def drop(self) -> None:
        files, _ = self.take()
        for file in files:
            file.drop()


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls that mostly wait, some at a time. All are made; then the first error in their order is raised.

    The caller's thread makes them too, so they are also made where no thread starts: at the interpreter's exit.
    """
    made: list[Future[T]] = [Future() for _ in calls]
    waiting = deque(zip(calls, made, strict=True))

    def work() -> None:
        with suppress(IndexError):
            while True:
                _make(*waiting.popleft())

    threads: list[threading.Thread] = []
    with suppress(RuntimeError):
        for _ in range(min(len(calls), AT_ONCE_MAX) - 1):
            thread = threading.Thread(target=work, name="floodmark-storage")
            thread.start()
            threads.append(thread)
    try:
        work()
        _join(threads)
    finally:
        # After an interrupt too: no file gets its name later than the caller goes on.
        _join(threads)
    return [one.result() for one in made]


def _make(call: Callable[[], T], made: Future[T]) -> None:
    try:
        made.set_result(call())
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        made.set_exception(error)


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
