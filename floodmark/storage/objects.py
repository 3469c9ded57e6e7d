"""Files in an object store (S3, memory), through obstore.

One PUT makes a name visible, whole and durable; a claim is a conditional PUT. The client may repeat a request when its
reply is lost, and then a claim that won is answered "exists". So a claim carries an id of its own: after "exists", the
claimer reads the id of the existing file. A large file is a multipart upload, invisible until completed; a crash leaves
an incomplete upload, which no listing shows: the bucket's lifecycle rule ends those. obstore is imported on first use,
since a local lake does not need it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from floodmark.clock import new_id
from floodmark.errors import NotFound, Unavailable
from floodmark.storage.failures import object_failure
from floodmark.storage.options import check_credentials, s3_arguments
from floodmark.storage.streams import Opened, Range

if TYPE_CHECKING:
    from obstore import ObjectMeta, SuffixRange, WritableFile
    from obstore.store import MemoryStore, S3Store

READ_AHEAD_BYTES = 256 * 1024
# An upload holds at most (concurrency + 1) parts in memory; S3 allows 10,000 parts, so 80 GB a file.
PART_BYTES = 8 * 1024 * 1024
PART_CONCURRENCY = 3
_SINGLE_PUT_BYTES_MAX = 64 * 1024 * 1024
_DELETE_KEYS_MAX = 1000
_LIST_CHUNK = 1000
# The end of a file comes with opening it: larger files have larger footers, and what is missing is one more request.
TAIL_BYTES_MIN = 64 * 1024
_TAIL_BYTES_MAX = 1024 * 1024
_TAIL_SHARE = 128
_CLAIM = "floodmark-claim"
_CLAIM_TRIES_MAX = 5

# A memory store is shared by its name in the whole process, like a bucket; otherwise it could not be opened twice.
_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_objects(scheme: str, bucket: str, options: Mapping[str, str]) -> Objects:
    root = f"{scheme}://{bucket}"
    with _failing("open", root):
        if scheme == "memory":
            from obstore.store import MemoryStore

            with _memory_lock:
                return Objects(_memory_stores.setdefault(bucket, MemoryStore()), root)
        from obstore.store import S3Store

        check_credentials(bucket, options)
        return Objects(S3Store(bucket, **s3_arguments(options)), root)


def _tail_bytes(size_bytes: int | None) -> int:
    return (
        TAIL_BYTES_MIN if size_bytes is None else min(max(TAIL_BYTES_MIN, size_bytes // _TAIL_SHARE), _TAIL_BYTES_MAX)
    )


@contextlib.contextmanager
def _failing(doing: str, location: str) -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise object_failure(error, doing, location) from error


class Objects:
    """Files by key in one bucket."""

    read_ahead_bytes = READ_AHEAD_BYTES

    def __init__(self, store: S3Store | MemoryStore, root: str) -> None:
        self.store = store
        self.root = root

    def put(self, key: str, data: bytes) -> None:
        import obstore

        with self._failing("write", key):
            obstore.put(self.store, key, data, chunk_size=_SINGLE_PUT_BYTES_MAX, max_concurrency=PART_CONCURRENCY)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        claim = new_id()
        for _ in range(_CLAIM_TRIES_MAX):
            with self._failing("write", key):
                try:
                    obstore.put(self.store, key, data, mode="create", attributes={_CLAIM: claim})
                except AlreadyExistsError:
                    holder = self._claim_of(key)
                    if holder is not None:
                        return holder == claim
                    # No file has the name: it was deleted since, or a rival's request made ours fail and failed too.
                else:
                    return True
        raise Unavailable("cannot claim a name that comes and goes", location=self._at(key), advice="Try again.")

    def prepare(self, key: str, data: bytes) -> PreparedObject:
        """A whole object that has no name yet."""
        return PreparedObject(self, key, data)

    def upload(self, key: str) -> ObjectUpload:
        return ObjectUpload(self, key)

    def read(self, key: str) -> bytes:
        import obstore

        with self._failing("read", key):
            return bytes(obstore.get(self.store, key).bytes())

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        import obstore
        from obstore.exceptions import BaseError

        if not length:
            self.size(key)
            return b""
        with self._failing("read", key):
            try:
                return bytes(obstore.get_range(self.store, key, start=offset, length=length))
            except BaseError:
                # Stores answer a range that starts at or behind the end with an error, each with its own.
                if offset < obstore.head(self.store, key)["size"]:
                    raise
                return b""

    def reader(self, key: str, size_bytes: int | None = None, tail_bytes: int | None = None) -> Opened:
        """One object: opening it is one request, which brings its size and its end, where Parquet's footer is."""
        found, tail = self._end(key, size_bytes, tail_bytes or _tail_bytes(size_bytes))
        return Opened(
            found,
            lambda offset, length: self.read_range(key, offset, length),
            lambda: None,
            partial(self._read_ranges, key),
            tail,
        )

    def _end(self, key: str, size_bytes: int | None, tail_bytes: int) -> tuple[int, bytes]:
        """The object's size and its last bytes. With a known size by a plain range: not every store knows suffixes."""
        import obstore
        from obstore.exceptions import BaseError

        start = 0 if size_bytes is None else max(0, size_bytes - tail_bytes)
        wanted: tuple[int, int] | SuffixRange = {"suffix": tail_bytes} if size_bytes is None else (start, size_bytes)
        if size_bytes == 0:
            return self.size(key), b""
        with self._failing("read", key):
            try:
                reply = obstore.get(self.store, key, options={"range": wanted})
                return int(reply.meta["size"]), bytes(reply.bytes())
            except BaseError:
                # An empty object has no such range, nor has one that ends before it; each store has its own error.
                found = int(obstore.head(self.store, key)["size"])
                if start < found:
                    raise
                return found, b""

    def _read_ranges(self, key: str, ranges: Sequence[Range]) -> list[bytes]:
        import obstore
        from obstore.exceptions import BaseError

        starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
        with self._failing("read", key):
            try:
                # As many requests as ranges: the caller has merged them.
                found = obstore.get_ranges(self.store, key, starts=starts, lengths=lengths, coalesce=0)
                return [bytes(one) for one in found]
            except BaseError:
                # As in `read_range`: an object that ends before one of them is answered with an error.
                if max(map(sum, ranges)) <= obstore.head(self.store, key)["size"]:
                    raise
                return [b"" for _ in ranges]

    def size(self, key: str) -> int:
        import obstore

        with self._failing("read", key):
            return int(obstore.head(self.store, key)["size"])

    def list(self, prefix: str, temporary: bool, after: str = "") -> Iterator[tuple[str, int, int]]:
        """Name below `prefix`, size and time in ms. Objects never have a temporary name."""
        if temporary:
            return
        folder = prefix.strip("/")
        for about in self._list(folder, after):
            name = about["path"][len(folder) + 1 if folder else 0 :]
            yield name, int(about["size"]), int(about["last_modified"].timestamp() * 1000)

    def delete(self, key: str) -> None:
        import obstore

        # An absent file is already deleted.
        with self._failing("delete", key), contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, key)

    def delete_many(self, keys: Iterable[str]) -> int:
        import obstore

        waiting = iter(keys)
        removed = 0
        # As many at a time as one request takes: memory does not grow with their number.
        while chunk := [*itertools.islice(waiting, _DELETE_KEYS_MAX)]:
            try:
                with self._failing("delete", chunk[0]):
                    obstore.delete(self.store, chunk)
            except NotFound:
                # Not every store skips absent names: such a store stops there, so the others are deleted one by one.
                for key in chunk:
                    self.delete(key)
            removed += len(chunk)
        return removed

    def delete_prefix(self, prefix: str) -> int:
        return self.delete_many(about["path"] for about in self._list(prefix.strip("/")))

    def _list(self, folder: str, after: str = "") -> Iterator[ObjectMeta]:
        import obstore

        offset = None if not after else f"{folder}/{after}" if folder else after
        with self._failing("list", folder):
            chunks = iter(obstore.list(self.store, prefix=folder or None, offset=offset, chunk_size=_LIST_CHUNK))
        while True:
            with self._failing("list", folder):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield from chunk

    def _claim_of(self, key: str) -> str | None:
        """The claim id of the existing file ("" if it has none); None if no file exists."""
        import obstore

        try:
            return str(obstore.get(self.store, key).attributes.get(_CLAIM, ""))
        except FileNotFoundError:
            return None

    def _at(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _failing(self, doing: str, key: str) -> contextlib.AbstractContextManager[None]:
        return _failing(doing, self._at(key))


@dataclass(frozen=True)
class PreparedObject:
    """A small object in memory, which takes one PUT."""

    objects: Objects
    key: str
    data: bytes

    def finish(self) -> None:
        self.objects.put(self.key, self.data)

    def claim(self) -> bool:
        return self.objects.put_if_absent(self.key, self.data)

    def abandon(self) -> None:
        """Nothing was written."""


class ObjectUpload:
    """An unfinished upload to an object store: parts in the background, visible when completed."""

    def __init__(self, objects: Objects, key: str) -> None:
        import obstore

        self._location = f"{objects.root}/{key}"
        with _failing("write", self._location):
            self._writer: WritableFile = obstore.open_writer(
                objects.store, key, buffer_size=PART_BYTES, max_concurrency=PART_CONCURRENCY
            )

    def write(self, data: memoryview) -> None:
        with _failing("write", self._location):
            # In pieces, so that one big buffer is not copied whole.
            for start in range(0, data.nbytes, PART_BYTES):
                self._writer.write(data[start : start + PART_BYTES])

    def finish(self) -> None:
        with _failing("write", self._location):
            self._writer.close()

    def abandon(self) -> None:
        # Leaving its context with an error makes obstore's writer drop the parts that were sent. If that fails too,
        # they stay invisible, for the bucket's lifecycle rule; the error that led here is the one to raise.
        from obstore.exceptions import BaseError

        with contextlib.suppress(BaseError, OSError, ValueError):
            self._writer.__exit__(RuntimeError, RuntimeError("abandoned"), None)
