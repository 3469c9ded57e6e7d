"""Whether a store can be used at all, tested on the store itself before rows depend on it. Starts no JVM.

A probe is one small object under `_probe/` in the lake's root, claimed, claimed again in vain, read, listed and
deleted: everything that a lake needs of a bucket. A crash in between leaves that object, which a later probe deletes;
nothing ever refers to it. A store that does not answer is reported after seconds; other work on the lake retries
longer.
"""

from __future__ import annotations

from collections.abc import Mapping

from floodmark import clock
from floodmark.errors import Corrupt, Invalid, Unavailable
from floodmark.storage.location import join, split
from floodmark.storage.store import Storage

FOLDER = "_probe"
_RETRY_S, _TIMEOUT_S = 5, 10
# A probe takes seconds: an older object was left by a crash.
_LEFT_OVER_MS = 60 * 60 * 1000


def is_remote(root: str) -> bool:
    """Whether the lake's files are in a bucket."""
    return split(root)[0] == "s3"


def impatient(options: Mapping[str, str], retry_s: int = _RETRY_S, timeout_s: int = _TIMEOUT_S) -> Storage:
    """A storage with these options that gives up after seconds. Shorter limits stay."""
    found = dict(options)
    for name, most in (("retry_s", retry_s), ("timeout_s", timeout_s)):
        found[name] = str(min(int(found.get(name, most)), most))
    return Storage(found)


def probe_bucket(options: Mapping[str, str], root: str) -> None:
    """Write, claim, read, list and delete below the root. Raises the error of the step that fails."""
    storage = impatient(options)
    folder = join(root, FOLDER)
    location, content = join(folder, clock.new_id()), b"floodmark"
    try:
        _claim(storage, location, content)
        if storage.read(location) != content:
            raise Corrupt("the bucket returned other bytes than were written", location=location)
        listed = list(storage.list(folder))
        if location not in (entry.location for entry in listed):
            raise Corrupt("the bucket does not list an object that was written", location=location)
    except (Invalid, Corrupt):
        storage.delete(location)
        raise
    storage.delete(location)
    old_ms = clock.now_ms() - _LEFT_OVER_MS
    storage.delete_many([entry.location for entry in listed if entry.modified_ms < old_ms])


def probe_writing(storage: Storage, root: str) -> None:
    """Write and delete one object below the root; raises the reason if it cannot. For any kind of store."""
    folder = join(root, FOLDER)
    location = join(folder, clock.new_id())
    storage.put(location, b"floodmark")
    storage.delete(location)
    storage.drop_empty_folder(folder)


def _claim(storage: Storage, location: str, content: bytes) -> None:
    """Two rivals for one name: exactly one may win, or two writers of the lake would overwrite each other."""
    try:
        won = storage.put_if_absent(location, content), storage.put_if_absent(location, content)
    except Unavailable as error:
        if "NotImplemented" in str(error.__cause__):
            raise _unconditional(location) from error
        raise
    if won != (True, False):
        raise _unconditional(location)


def _unconditional(location: str) -> Invalid:
    return Invalid(
        "the bucket does not honour conditional puts (If-None-Match: *)",
        location=location,
        advice="Use a store that does (AWS S3, MinIO, R2, Ceph), or a newer version of this one.",
    )
