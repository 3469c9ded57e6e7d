"""Watching a stage from outside: how much is in the operation's folder so far.

Reads the storage, not Spark, so it works the same in every mode of Spark, and an error in it never harms the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from floodmark.commit.journal import all_files
from floodmark.errors import Unavailable
from floodmark.storage import Storage

INTERVAL_S = 0.5


@contextmanager
def watched(storage: Storage, folder: str, progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """Call progress(files, bytes) about twice a second while the block runs, and once at its end."""
    if progress is None:
        yield
        return
    stop = threading.Event()

    def look() -> None:
        try:
            entries = list(all_files(storage, folder))
        except Unavailable:
            return
        progress(len(entries), sum(entry.size_bytes for entry in entries))

    def watch() -> None:
        while not stop.wait(INTERVAL_S):
            look()

    thread = threading.Thread(target=watch, name="floodmark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    look()
