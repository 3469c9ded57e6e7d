"""Injected faults: a storage whose Nth call fails; a test fails the 1st, the 2nd, ... until the run passes.

Modes: `before` (no effect), `after` (the effect happened, the reply is lost), `torn` (part of the bytes were written to
a temporary name or a part upload, never to a visible name), `disk_full` (as a full disk fails: in the middle of
writing, leaving nothing; only writes fail). In no mode is half a file visible: storage promises that, so a caller is
tested only against failures that can happen.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from floodmark.clock import new_id
from floodmark.errors import FloodmarkError, Invalid, Unavailable
from floodmark.storage import TEMPORARY_PREFIX, Entry, OutputStream, RangeReader, Storage, local_path
from floodmark.storage.failures import local_failure
from floodmark.storage.held import Held
from floodmark.storage.objects import Objects

T = TypeVar("T")

MODES = ("before", "after", "torn", "disk_full")
WRITES = frozenset({"put", "put_if_absent", "writer", "finish", "end"})
VERBS = WRITES | {
    "read",
    "read_range",
    "open_input",
    "size",
    "exists",
    "delete",
    "delete_many",
    "delete_prefix",
    "list",
    "batch",
    "end",
}


class FaultyStorage(Storage):
    """A Storage whose call number `fail_at` raises Unavailable; `fired` is True once it did.

    `verbs` narrows which calls are counted. A stream is two calls: `writer` (opening and its first write) and `finish`.
    The end of an outermost `batch` is one, and each `end` of held files; torn, that ends half of them. Afterwards
    everything works, or, with `stay_broken`, no counted call does. A copy in another process has no fault: N counts the
    calls of one process.
    """

    def __init__(
        self,
        options: Mapping[str, str] | None = None,
        *,
        fail_at: int | None = None,
        mode: str = "before",
        verbs: Collection[str] | None = None,
        stay_broken: bool = False,
    ) -> None:
        super().__init__(options)
        if mode not in MODES:
            raise Invalid("unknown fault mode", mode=mode, advice=f"Known are {', '.join(MODES)}.")
        unknown = sorted(set(verbs or ()) - VERBS)
        if unknown:
            raise Invalid("unknown verbs", verbs=unknown, advice=f"Known are {', '.join(sorted(VERBS))}.")
        self.fail_at = fail_at
        self.mode = mode
        self.verbs = VERBS if verbs is None else frozenset(verbs)
        if mode == "disk_full":
            self.verbs = self.verbs & WRITES
        self.stay_broken = stay_broken
        self.calls_seen = 0
        self.fired = False
        self._fault_lock = threading.Lock()
        self._batches = threading.local()

    def __reduce__(self) -> tuple[type[Storage], tuple[dict[str, str]]]:
        return Storage, (self.options,)

    def put(self, location: str, data: bytes) -> None:
        self._write("put", location, data, lambda: super(FaultyStorage, self).put(location, data))

    def put_if_absent(self, location: str, data: bytes) -> bool:
        return self._write(
            "put_if_absent", location, data, lambda: super(FaultyStorage, self).put_if_absent(location, data)
        )

    @contextmanager
    def writer(self, location: str, held: Held | None = None) -> Iterator[OutputStream]:
        struck = self._strikes("writer")
        if struck and self.mode == "before":
            raise self._failure("writer", location)
        with super().writer(location, held) as stream:
            if struck and self.mode == "after":
                raise self._failure("writer", location)
            if struck:
                broken = _BrokenUpload(lambda data: self._fail_write("writer", location, data))
                yield OutputStream(broken, self.counters)
            else:
                yield stream
            ends = self._strikes("finish")
            if struck or (ends and self.mode != "after"):
                # Raised inside: the unfinished file is dropped, its name never appears.
                self._fail_write("finish", location, b"\0" * min(stream.tell(), 4096))
        if ends:
            raise self._failure("finish", location)

    def read(self, location: str) -> bytes:
        return self._call("read", location, lambda: super(FaultyStorage, self).read(location))

    def read_range(self, location: str, offset: int, length: int) -> bytes:
        return self._call(
            "read_range", location, lambda: super(FaultyStorage, self).read_range(location, offset, length)
        )

    def open_input(self, location: str, size_bytes: int | None = None, *, tail_bytes: int | None = None) -> RangeReader:
        if self._strikes("open_input"):
            raise self._failure("open_input", location)
        reader = super().open_input(location, size_bytes, tail_bytes=tail_bytes)
        fetch, fetch_many = reader.fetch, reader.fetch_many

        def faulty(offset: int, length: int) -> bytes:
            return self._call("read_range", location, lambda: fetch(offset, length))

        reader.fetch = faulty
        if fetch_many is not None:
            # One call, however many requests it is.
            reader.fetch_many = lambda ranges: self._call("read_range", location, lambda: fetch_many(ranges))
        return reader

    def size(self, location: str) -> int:
        return self._call("size", location, lambda: super(FaultyStorage, self).size(location))

    def exists(self, location: str) -> bool:
        return self._call("exists", location, lambda: super(FaultyStorage, self).exists(location))

    def delete(self, location: str) -> None:
        self._call("delete", location, lambda: super(FaultyStorage, self).delete(location))

    def delete_many(self, locations: Sequence[str]) -> None:
        self._call("delete_many", "", lambda: super(FaultyStorage, self).delete_many(locations))

    def delete_prefix(self, prefix: str) -> int:
        return self._call("delete_prefix", prefix, lambda: super(FaultyStorage, self).delete_prefix(prefix))

    def list(self, prefix: str, temporary: bool = False, after: str = "") -> Iterator[Entry]:
        return self._call("list", prefix, lambda: super(FaultyStorage, self).list(prefix, temporary, after))

    @contextmanager
    def batch(self) -> Iterator[None]:
        outermost = not getattr(self._batches, "open", False)
        self._batches.open = True
        struck = False
        try:
            with super().batch():
                yield
                struck = outermost and self._strikes("batch")
                if struck and self.mode != "after":
                    raise self._failure("batch", "")
        finally:
            if outermost:
                self._batches.open = False
        if struck:
            raise self._failure("batch", "")

    def end(self, held: Held) -> None:
        if not self._strikes("end"):
            super().end(held)
            return
        with held.ending() as (files, folders):
            ended = {"after": len(files), "torn": len(files) // 2}.get(self.mode, 0)
            first = Held()
            first.add(files[:ended], folders)
            super().end(first)
            for file in files[ended:]:
                file.drop()
            raise self._failure("end", "")

    def _strikes(self, verb: str) -> bool:
        with self._fault_lock:
            if verb not in self.verbs:
                return False
            self.calls_seen += 1
            if self.fired:
                return self.stay_broken
            self.fired = self.calls_seen == self.fail_at
            return self.fired

    def _call(self, verb: str, location: str, effect: Callable[[], T]) -> T:
        if not self._strikes(verb):
            return effect()
        if self.mode == "after":
            effect()
        raise self._failure(verb, location)

    def _write(self, verb: str, location: str, data: bytes, effect: Callable[[], T]) -> T:
        if not self._strikes(verb):
            return effect()
        if self.mode == "after":
            effect()
        elif self.mode == "torn":
            self._leave_part(location, data)
        raise self._failure(verb, location)

    def _fail_write(self, verb: str, location: str, data: bytes) -> None:
        if self.mode == "torn":
            self._leave_part(location, data)
        raise self._failure(verb, location)

    def _leave_part(self, location: str, data: bytes) -> None:
        """What a crash in the middle of writing leaves: half of the bytes where no reader looks."""
        half = data[: len(data) // 2]
        path = local_path(location)
        if path is not None:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(os.path.join(os.path.dirname(path), TEMPORARY_PREFIX + new_id()), "xb") as file:
                file.write(half)
            return
        files, key = self._find(location)
        if isinstance(files, Objects) and half:
            import obstore

            # The small buffer makes it a multipart upload at once; dropping the writer neither ends nor aborts it.
            obstore.open_writer(files.store, key, buffer_size=len(half)).write(data)

    def _failure(self, verb: str, location: str) -> FloodmarkError:
        if self.mode == "disk_full":
            return local_failure(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "write", location)
        return Unavailable(f"a fault on purpose: {self.mode}", verb=verb, location=location, advice="Try again.")


class _BrokenUpload:
    """An unfinished file whose first write fails."""

    def __init__(self, fail: Callable[[bytes], None]) -> None:
        self._fail = fail

    def write(self, data: memoryview) -> None:
        self._fail(bytes(data))

    def finish(self) -> None:
        """Nothing was written."""

    def abandon(self) -> None:
        """Nothing was written."""
