"""The folder of a spool: its table, the process that holds it, the names of its files.

    spool.json   the spool's id, its table, the lake's incarnation; written last when a spool is made
    lock         held by the process that has the spool open (flock: it dies with the process), with its pid
    N.segment    records from number N on
    keys         keys of records whose segments are deleted
    reserve      room for the next `keys`, for the day when the disk is full
    *.damaged-*  files that an operator went on without (salvage.py); nothing reads or deletes them

A folder without spool.json is one whose making was interrupted: nothing in it was ever acknowledged.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from zlib import crc32

from floodmark.clock import new_id, now_ms
from floodmark.errors import Busy, Conflict, Corrupt, NotFound, TooNew
from floodmark.json_form import Json
from floodmark.storage.counters import Counters
from floodmark.storage.failures import local_failure
from floodmark.storage.local import TEMPORARY_PREFIX, LocalFiles

FORMAT = 1
ABOUT = "spool.json"
LOCK = "lock"
KEYS = "keys"
RESERVE = "reserve"
_SEGMENT = re.compile(r"(\d{20})\.segment")
# A process that looks at a spool from outside holds its lock for a moment.
_TRIES_MAX = 5
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Calls:
    """The system calls that make records durable; a test hands in ones that fail."""

    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    fsync: Callable[[int], None] = os.fsync
    ftruncate: Callable[[int, int], None] = os.ftruncate
    allocate: Callable[[int, int, int], None] = os.posix_fallocate
    put: Callable[[str, bytes], None] = field(default_factory=lambda: local_files().put)


@dataclass(frozen=True)
class About:
    """Which spool this is."""

    spool: str
    table_id: str
    incarnation: str
    salt: int
    made_ms: int

    @classmethod
    def new(cls, table_id: str, incarnation: str) -> About:
        return cls(new_id(), table_id, incarnation, secrets.randbits(32), now_ms())


@contextlib.contextmanager
def failing(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise local_failure(error, doing, str(path)) from error


def local_files() -> LocalFiles:
    return LocalFiles(Counters())


SYSTEM = Calls()


def sync_folder(folder: Path, calls: Calls) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        calls.fsync(fd)
    finally:
        os.close(fd)


# ── segments ──


def segment_path(folder: Path, first: int) -> Path:
    return folder / f"{first:020d}.segment"


def list_segments(folder: Path) -> list[tuple[int, Path]]:
    """First record and path of each, in order."""
    with failing("list", folder):
        found = [(match, name) for name in os.listdir(folder) if (match := _SEGMENT.fullmatch(name))]
    return sorted((int(match[1]), folder / name) for match, name in found)


def is_spool(folder: Path) -> bool:
    """Whether this looks like the folder of a spool: a disk has folders of its own, like lost+found."""
    with failing("list", folder):
        return folder.is_dir() and ((folder / ABOUT).exists() or bool(list_segments(folder)))


def delete_temporary(folder: Path) -> None:
    """Delete what a killed process was writing under a temporary name; only for the holder of the lock."""
    with failing("delete", folder):
        for name in os.listdir(folder):
            if name.startswith(TEMPORARY_PREFIX):
                (folder / name).unlink(missing_ok=True)


# ── the header ──


def write_about(folder: Path, about: About) -> None:
    """The last step of creating a spool: durable, with the folder and those above it."""
    plain = {"format": FORMAT, **asdict(about)}
    text = json.dumps({**plain, "crc": _crc(plain)}, indent=1) + "\n"
    local_files().put(str(folder / ABOUT), text.encode())


def read_about(folder: Path) -> About | None:
    """The header of a spool; None if the folder has none."""
    path = folder / ABOUT
    try:
        data = local_files().read(str(path))
    except NotFound:
        return None
    try:
        plain = json.loads(data)
        if plain["format"] > FORMAT:
            raise TooNew("this spool was made by a newer Floodmark", file=path, advice="Upgrade Floodmark.")
        crc = plain.pop("crc")
        if crc != _crc(plain):
            raise ValueError("checksum")
        del plain["format"]
        return About(**plain)
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            "the header of this spool cannot be read", file=path, advice="It is kept as it is. Restore the file."
        ) from error


def check_about(about: About, folder: Path, table_id: str, incarnation: str) -> None:
    for what, found, wanted in (
        ("another table", about.table_id, table_id),
        ("another incarnation of the lake", about.incarnation, incarnation),
    ):
        if found != wanted:
            raise Conflict(
                f"this spool belongs to {what}",
                folder=folder,
                spool=about.spool,
                found=found,
                wanted=wanted,
                advice="Its rows are kept, and not used. `floodmark spool accept` shows what can be done.",
            )


def _crc(plain: Mapping[str, Json]) -> int:
    return crc32(json.dumps(plain, sort_keys=True).encode())


# ── the lock ──


def take_lock(folder: Path) -> int:
    """An open file that holds the folder for this process; Busy if another one does."""
    path = folder / LOCK
    for _ in range(_TRIES_MAX):
        with failing("lock", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The folder may have been moved aside between the two calls; then this is not its lock.
                if _is_same(fd, path):
                    _write_pid(fd)
                    return fd
            except BlockingIOError:
                time.sleep(_PAUSE_S)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    raise Busy(
        "another process has this spool open",
        folder=folder,
        pid=holder_pid(folder),
        advice="Stop that process first.",
    )


def _write_pid(fd: int) -> None:
    # Only information for other processes: a full disk must not keep a spool from being opened, and emptied.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def holder_pid(folder: Path) -> int | None:
    """The process that holds the lock, or held it last."""
    try:
        return int((folder / LOCK).read_text())
    except (OSError, ValueError):
        return None


def _is_same(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
