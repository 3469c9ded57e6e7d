"""Storage: every byte of a lake goes through here, by full location.

Promises, for every kind of store (floodmark/testing/storage_contract.py is the executable form): a name appears whole
or not at all (I3); a write or a delete that returned is durable (I4; inside `batch`, when the batch ends); of any
number of rivals for one name exactly one wins; a listing never includes files of a sibling folder; deletes may be
repeated. Failure model: a call that raises Unavailable may or may not have had its effect; the name is whole or absent
either way. A crash leaves temporary names (local) or incomplete uploads (S3), never a visible part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from floodmark.errors import Corrupt, Invalid, NotFound
from floodmark.storage.counters import Counters
from floodmark.storage.held import Held, HeldFile, at_once
from floodmark.storage.local import LocalFiles
from floodmark.storage.location import join, split
from floodmark.storage.objects import Objects, open_objects
from floodmark.storage.options import checked
from floodmark.storage.streams import Opened, OutputStream, Range, RangeReader, UnnamedFile


@dataclass(frozen=True)
class Entry:
    """One file of a listing."""

    location: str
    size_bytes: int
    modified_ms: int


class Storage:
    """Files by location. Safe to share between threads; pickles to its options alone, so it can go into tasks."""

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = checked(options)
        self.counters = Counters()
        self._local = LocalFiles(self.counters)
        self._buckets: dict[tuple[str, str], Objects] = {}
        self._lock = threading.Lock()
        # `held` while this thread holds what it writes.
        self._thread = threading.local()

    @property
    def options(self) -> dict[str, str]:
        return dict(self._options)

    def __reduce__(self) -> tuple[type[Storage], tuple[dict[str, str]]]:
        return type(self), (self.options,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._options!r})"

    def put(self, location: str, data: bytes) -> None:
        """Write a file whole, replacing an existing one."""
        files, key = self._find(location)
        self.counters.count("put")
        if (held := self._held()) is None:
            files.put(key, data)
        else:
            upload = files.prepare(key, data)
            self._hold(held, HeldFile(len(data), upload.finish, upload.abandon))
        self.counters.count("put", written=len(data), calls=0)

    def put_if_absent(self, location: str, data: bytes) -> bool:
        """Write a file whole if the name is free. True: this call wrote it; False: the name exists.

        Inside `together` it is True; if the name exists at the end of that, the end raises FileExistsError.
        """
        files, key = self._find(location)
        self.counters.count("put_if_absent")
        if (held := self._held()) is None:
            won = files.put_if_absent(key, data)
        else:
            won, upload = True, files.prepare(key, data)
            self._hold(held, HeldFile(len(data), partial(_claim, upload, location), upload.abandon))
        self.counters.count("put_if_absent", written=len(data) if won else 0, calls=0)
        return won

    @contextmanager
    def writer(self, location: str, held: Held | None = None) -> Iterator[OutputStream]:
        """Stream a file of any size. Its name appears, whole, when the block ends cleanly; after an error never.

        With `held` it appears when that is ended.
        """
        held = self._held() if held is None else held
        files, key = self._find(location)
        self.counters.count("writer")
        upload = files.upload(key)
        stream = OutputStream(upload, self.counters)
        try:
            yield stream
        except BaseException:
            stream.close()
            upload.abandon()
            raise
        stream.close()
        if held is None:
            upload.finish()
        else:
            self._hold(held, HeldFile(stream.tell(), upload.finish, upload.abandon))

    def read(self, location: str) -> bytes:
        files, key = self._find(location)
        self.counters.count("read")
        data = files.read(key)
        self.counters.count("read", read=len(data), calls=0)
        return data

    def read_range(self, location: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset`: fewer at the end of the file, none behind it."""
        if offset < 0 or length < 0:
            raise Invalid("a range must not be negative", location=location, offset=offset, length=length)
        files, key = self._find(location)
        self.counters.count("read_range")
        data = files.read_range(key, offset, length)
        self.counters.count("read_range", read=len(data), calls=0)
        return data

    def open_input(self, location: str, size_bytes: int | None = None, *, tail_bytes: int | None = None) -> RangeReader:
        """A seekable reader with bounded memory, for Parquet readers; close it.

        With the size that a manifest records, a file of another size is `Corrupt`: it was cut or replaced. Where a read
        is a round trip, so many bytes of its end come with opening it, by default as many as a Parquet footer may have.
        """
        files, key = self._find(location)
        self.counters.count("open_input")
        opened = files.reader(key, size_bytes, tail_bytes)
        self.counters.count("open_input", read=len(opened.tail), calls=0)
        if size_bytes is not None and opened.size_bytes != size_bytes:
            opened.release()
            raise Corrupt(
                "a file does not have the size in the catalog",
                file=location,
                size_bytes=opened.size_bytes,
                size_bytes_expected=size_bytes,
                advice="Run `floodmark doctor`; restore the file.",
            )
        return RangeReader(location, self._counted(opened), read_ahead_bytes=files.read_ahead_bytes)

    def _counted(self, opened: Opened) -> Opened:
        plain, plain_many = opened.fetch, opened.fetch_many

        def fetch(offset: int, length: int) -> bytes:
            data = plain(offset, length)
            self.counters.count("read_range", read=len(data))
            return data

        if plain_many is None:
            return replace(opened, fetch=fetch)

        def fetch_many(ranges: Sequence[Range]) -> list[bytes]:
            found = plain_many(ranges)
            self.counters.count("read_range", read=sum(map(len, found)), calls=len(ranges))
            return found

        return replace(opened, fetch=fetch, fetch_many=fetch_many)

    def size(self, location: str) -> int:
        files, key = self._find(location)
        self.counters.count("size")
        return files.size(key)

    def exists(self, location: str) -> bool:
        files, key = self._find(location)
        self.counters.count("exists")
        try:
            files.size(key)
        except NotFound:
            return False
        return True

    def delete(self, location: str) -> None:
        """Delete a file; one that does not exist is deleted already."""
        files, key = self._find(location)
        self.counters.count("delete")
        files.delete(key)

    def delete_many(self, locations: Sequence[str]) -> None:
        """Delete files, many in one request where the store supports it. An error may leave some of them deleted."""
        by_place: dict[int, tuple[LocalFiles | Objects, list[str]]] = {}
        for location in locations:
            files, key = self._find(location)
            by_place.setdefault(id(files), (files, []))[1].append(key)
        self.counters.count("delete_many", calls=1 if by_place else 0)
        for files, keys in by_place.values():
            files.delete_many(keys)

    def drop_empty_folder(self, location: str) -> None:
        """Remove a local folder if it is empty; otherwise it stays. Object stores have no folders."""
        files, key = self._find(location)
        if isinstance(files, LocalFiles):
            files.drop_empty_folder(key)

    def delete_prefix(self, prefix: str) -> int:
        """Delete everything below a folder, also remains of crashed writes; returns the number of files deleted."""
        files, key = self._find(prefix)
        if not key.strip("/"):
            raise Invalid("a whole bucket or disk is never deleted", location=prefix, advice="Name a folder in it.")
        self.counters.count("delete_prefix")
        return files.delete_prefix(key)

    def list(self, prefix: str, temporary: bool = False, after: str = "") -> Iterator[Entry]:
        """Every file below a folder, in no promised order; with `temporary`, the remains of crashed writes instead.

        `after`: only those whose names below the folder sort after this one; the others cost nothing.
        """
        files, key = self._find(prefix)
        self.counters.count("list")
        return (Entry(join(prefix, name), size, ms) for name, size, ms in files.list(key, temporary, after))

    def make_folder(self, location: str) -> None:
        """Make a folder durable with the names in it; object stores have no folders and do nothing."""
        files, key = self._find(location)
        if isinstance(files, LocalFiles):
            files.make_folder(key)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Names made or removed by this thread inside become durable together at the clean end: one sync per folder."""
        outer, self._thread.held = self._held(), None
        try:
            with self._local.batch():
                yield
        finally:
            self._thread.held = outer

    @contextmanager
    def together(self) -> Iterator[None]:
        """Files that this thread writes inside appear at the clean end, all at once: one barrier, however many.

        Until then they cannot be read. After an error none of them appears, except so many that they were too much to
        hold. No code of a caller may run inside: what it writes would not be durable when its call returns.
        """
        outer, held = self._held(), Held()
        self._thread.held = held
        try:
            with self._local.collected() as folders:
                yield
        except BaseException:
            held.drop()
            raise
        finally:
            self._thread.held = outer
        held.add([], folders)
        self.end(held)

    def end(self, held: Held) -> None:
        """Give held files their names, durable and all at once. After an error each of them is whole or absent.

        When it returns, what another thread began to end is durable too.
        """
        with held.ending() as (files, folders):
            self._local.sync_folders(folders.union(*at_once([partial(self._end, file) for file in files])))

    def _held(self) -> Held | None:
        return getattr(self._thread, "held", None)

    def _hold(self, held: Held, file: HeldFile) -> None:
        held.add([file])
        if held.is_full:
            self.end(held)

    def _end(self, file: HeldFile) -> set[str]:
        with self._local.collected() as folders:
            file.end()
        return folders

    def _find(self, location: str) -> tuple[LocalFiles | Objects, str]:
        scheme, bucket, key = split(location)
        if scheme == "file":
            return self._local, key
        with self._lock:
            if (scheme, bucket) not in self._buckets:
                self._buckets[scheme, bucket] = open_objects(scheme, bucket, self._options)
            return self._buckets[scheme, bucket], key


def _claim(upload: UnnamedFile, location: str) -> None:
    if not upload.claim():
        raise FileExistsError(f"a file of this name exists: {location}")
