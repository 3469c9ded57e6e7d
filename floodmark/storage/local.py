"""Files on the local disk, durable: temporary name, fsync, link or rename, fsync of the folder and its parent.

System calls instead of obstore, whose local put does not fsync (and whose read of a small file takes 20 to 30 times as
long). A crash before the link or rename leaves a file under a temporary name, which is listed only on request, for a
sweep; after it, the file is whole. Its name is durable once the folder is synced, which the caller waits for: at once,
or at the end of the batch. A removed name is made durable the same way: a file that returned after a power loss would
be one that no record names (I10). The parent of a new file's folder is synced too, always: another process may have
made the folder a moment ago and not synced it yet, and an acknowledged file in a lost folder is lost (I4).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from floodmark.clock import new_id
from floodmark.errors import Invalid, Unavailable
from floodmark.storage.counters import Counters
from floodmark.storage.failures import local_failure, not_found
from floodmark.storage.held import at_once
from floodmark.storage.streams import Opened

TEMPORARY_PREFIX = ".tmp-"
READ_AHEAD_BYTES = 64 * 1024
_BUFFER_BYTES = 256 * 1024
# How often a folder that another process keeps removing is made again, before giving up.
_TRIES_MAX = 5


@contextlib.contextmanager
def _failing(doing: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise local_failure(error, doing, path) from error


class LocalFiles:
    """Files by absolute path. `batch` collects the folders to sync, per thread."""

    read_ahead_bytes = READ_AHEAD_BYTES

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._thread = threading.local()

    def put(self, path: str, data: bytes) -> None:
        self.prepare(path, data).finish()

    def put_if_absent(self, path: str, data: bytes) -> bool:
        # Checking first saves a loser the writing; the link decides.
        return False if self._settle_existing(path) else self.prepare(path, data).claim()

    def upload(self, path: str) -> LocalUpload:
        if os.path.basename(path).startswith(TEMPORARY_PREFIX) or not os.path.basename(path):
            raise Invalid("invalid file name", location=path, advice="Choose another name.")
        folder = os.path.dirname(path)
        made: set[str] = set()
        with _failing("write", path):
            for _ in range(_TRIES_MAX):
                temporary = os.path.join(folder, TEMPORARY_PREFIX + new_id())
                try:
                    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                except FileNotFoundError:
                    made |= _make_folder(folder)
                else:
                    return LocalUpload(self, self._counters, fd, temporary, path, made)
        raise Unavailable("cannot write: the folder is being removed", location=path, advice="Try again.")

    def read(self, path: str) -> bytes:
        with _failing("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read_at(fd, 0, os.fstat(fd).st_size)
            finally:
                os.close(fd)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with _failing("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # The size bounds the memory that is allocated for a length far beyond the end.
                return _read_at(fd, offset, min(length, max(0, os.fstat(fd).st_size - offset)))
            finally:
                os.close(fd)

    def reader(self, path: str, size_bytes: int | None = None, tail_bytes: int | None = None) -> Opened:
        """One open file: it stays readable while it is open, also once deleted. Known sizes save nothing here."""
        with _failing("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                about = os.fstat(fd)
                if stat.S_ISDIR(about.st_mode):
                    raise not_found(path)
            except BaseException:
                os.close(fd)
                raise

        def fetch(offset: int, length: int) -> bytes:
            with _failing("read", path):
                return _read_at(fd, offset, length)

        return Opened(about.st_size, fetch, lambda: os.close(fd))

    def size(self, path: str) -> int:
        with _failing("read", path):
            about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            raise not_found(path)
        return about.st_size

    def list(self, folder: str, temporary: bool, after: str = "") -> Iterator[tuple[str, int, int]]:
        """Name below `folder`, size and time in ms of every file. Links to folders are not followed: no escape."""
        waiting = [""]
        while waiting:
            below = waiting.pop()
            for entry in _scan(os.path.join(folder, below)):
                if entry.is_dir(follow_symlinks=False):
                    inside = below + entry.name + "/"
                    # A folder that sorts before is skipped without reading it.
                    if inside >= after[: len(inside)]:
                        waiting.append(inside)
                elif entry.name.startswith(TEMPORARY_PREFIX) == temporary and below + entry.name > after:
                    try:
                        about = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # Gone since, by a delete or by the rename that ends a write.
                    yield below + entry.name, about.st_size, about.st_mtime_ns // 1_000_000

    def delete(self, path: str) -> None:
        self.delete_many([path])

    def delete_many(self, paths: Sequence[str]) -> None:
        for path in paths:
            with (
                _failing("delete", path),
                contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            ):
                os.unlink(path)
        # An absent file counts too: a process that died after its unlink has not synced it, and the file would return.
        self.settle({_nearest(os.path.dirname(path)) for path in paths})

    def drop_empty_folder(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(folder)

    def delete_prefix(self, folder: str) -> int:
        stayed: set[str] = set()
        removed = _remove_all(folder, stayed)
        self.settle(stayed | {_nearest(os.path.dirname(folder))})
        return removed

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        with self.collected() as folders:
            yield
        # Only after a clean end: the end of a failed batch was not acknowledged as durable. A batch inside another is
        # durable at its own end: what it wrote may be acknowledged before the outer one ends.
        self.sync_folders(folders)

    @contextlib.contextmanager
    def collected(self) -> Iterator[set[str]]:
        """The folders that must be synced for what this thread does inside."""
        outer = self._pending()
        folders: set[str] = set()
        self._thread.folders = folders
        try:
            yield folders
        finally:
            self._thread.folders = outer

    def sync_folders(self, folders: Iterable[str]) -> None:
        at_once([partial(self._sync_folder, folder) for folder in sorted(folders)])

    def make_folder(self, folder: str) -> None:
        """Make a folder durable, and the names that it holds now."""
        with _failing("make a folder", folder):
            made = _make_folder(folder)
        self.settle({folder, os.path.dirname(folder)} | made)

    def settle(self, folders: set[str]) -> None:
        """Make new names in `folders` durable: now, or at the end of this thread's batch."""
        pending = self._pending()
        if pending is not None:
            pending |= folders
            return
        self.sync_folders(folders)

    def prepare(self, path: str, data: bytes) -> LocalUpload:
        """A whole file that has no name yet."""
        upload = self.upload(path)
        upload.write(memoryview(data))
        return upload

    def _settle_existing(self, path: str) -> bool:
        if not os.path.lexists(path):
            return False
        # The loser may continue as if the name were permanent, so it must be, even if its writer died.
        self.settle({os.path.dirname(path), os.path.dirname(os.path.dirname(path))})
        return True

    def _pending(self) -> set[str] | None:
        return getattr(self._thread, "folders", None)

    def _sync_folder(self, folder: str) -> None:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return  # Removed since, with what was in it: nothing is left to be made durable.
        except OSError as error:
            # Some file systems cannot sync a folder. In a folder that we may not write to, no process of this user made
            # a name.
            if error.errno == errno.EINVAL or (error.errno == errno.EACCES and not os.access(folder, os.W_OK)):
                return
            raise local_failure(error, "make a name durable", folder) from error
        self._counters.count("fsync_dir")


class LocalUpload:
    """A file under its temporary name. Any failure removes it; a crash leaves it for a sweep."""

    def __init__(
        self, files: LocalFiles, counters: Counters, fd: int, temporary: str, path: str, made: set[str]
    ) -> None:
        self._files = files
        self._counters = counters
        self._file = io.BufferedWriter(io.FileIO(fd, "wb"), _BUFFER_BYTES)
        self._temporary = temporary
        self._path = path
        # Folders that got a new subfolder for this file.
        self._made = made

    def write(self, data: memoryview) -> None:
        with self._abandoned_on_failure():
            self._file.write(data)

    def finish(self) -> None:
        """Make the name visible, or replace it."""
        with self._abandoned_on_failure():
            self._sync()
            os.replace(self._temporary, self._path)
        self._settle()

    def claim(self) -> bool:
        """Make the name visible unless it exists; False if it does."""
        with self._abandoned_on_failure():
            self._sync()
            won = True
            try:
                os.link(self._temporary, self._path)
            except FileExistsError:
                won = False
            except FileNotFoundError:
                # Another process found the existing name and has swept what others were still writing for it.
                if not os.path.lexists(self._path):
                    raise
                won = False
            # Crash here: the file has two names; the temporary one is listed for a sweep, which may delete it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)
        self._settle()
        return won

    def abandon(self) -> None:
        # Buffered bytes are dropped with the file: closing the raw file first keeps them from being written.
        with contextlib.suppress(OSError):
            self._file.raw.close()
        with contextlib.suppress(OSError, ValueError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._counters.count("fsync_file")
        self._file.close()

    def _settle(self) -> None:
        folder = os.path.dirname(self._path)
        self._files.settle({folder, os.path.dirname(folder)} | self._made)

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            with _failing("write", self._path):
                yield
        except BaseException:
            self.abandon()
            raise


def _make_folder(folder: str) -> set[str]:
    """Make `folder` and the missing ones above it; return the folders that got a new name by this."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        # Another process may make it at the same time; its name is synced anyway.
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
    return {os.path.dirname(path) for path in missing}


def _nearest(folder: str) -> str:
    """The folder, or the nearest one above it that exists: syncing it makes the removal of what was below durable."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def _remove_all(folder: str, stayed: set[str]) -> int:
    """Remove the files below a folder and the folder; `stayed` gets the folders that others still write into."""
    removed = 0
    for entry in _scan(folder):
        if entry.is_dir(follow_symlinks=False):
            removed += _remove_all(entry.path, stayed)
        else:
            with _failing("delete", entry.path), contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
                removed += 1
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        # A writer has added a file meanwhile: the folder stays, with that file.
        stayed.add(folder)
    return removed


def _scan(folder: str) -> list[os.DirEntry[str]]:
    with _failing("list", folder):
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []


def _read_at(fd: int, offset: int, length: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    # One pread stops at 2 GiB, and may be interrupted.
    pieces = [data]
    while length > (done := sum(map(len, pieces))) and (piece := os.pread(fd, length - done, offset + done)):
        pieces.append(piece)
    return b"".join(pieces)
