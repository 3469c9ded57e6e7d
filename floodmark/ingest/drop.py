"""A drop folder as a source: each complete file is loaded once, a bad one is moved aside with the reason (I9).

The steps of a file, each followed by its failpoint: found (complete, nothing done), loaded (its rows are committed, and
its identity with them; the file is still in the folder), moved (it is in `.loaded`). The identity is the name of the
source, the file's path below the folder and the digest of its content. So after a crash between the commit and the move
the next run finds it committed, and only moves it; the same file dropped again is a no-op; the same rows under another
name, or other rows under the same name, are another file.

A file that is refused (`Invalid`) goes to `.failed` with the reason, and the next one follows; nothing of it is loaded.
Other errors of Floodmark (the catalog is unreachable, the table is gone) are not the file's fault: it stays, and the
run ends; the next run tries again. A file that cannot be read or moved, or that fails in an unforeseen way, stays too;
those after it are loaded, and then the run fails with the error of the first of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from floodmark import clock, log
from floodmark.errors import CommitUnknown, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.files import escaped, explain, format_of, read_files
from floodmark.ingest.small_files import NeedsSpark, read_rows
from floodmark.json_form import Json, JsonObject
from floodmark.model import Commit
from floodmark.write.prune import key_fields

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyspark.sql import DataFrame, SparkSession

MIB = 1024 * 1024
# Larger files go through Spark, which reads them in parts.
SMALL_BYTES = 64 * MIB
# What a small file may be once it is unpacked.
TEXT_BYTES_MAX = 256 * MIB
APPEND, MERGE = "append", "merge"
BAD_FILES_MAX = 10

LOADED, FAILED = ".loaded", ".failed"
REASON = ".reason.json"
REASON_CHARACTERS_MAX = 500
HIDDEN = (".", "_")
UNFINISHED = (".tmp", ".part", ".crdownload")
_PIECE_BYTES = 1024 * 1024

Stat = tuple[int, int, int]  # size, time of the last change, inode
Explain = Callable[[], Invalid | None]


class LoadingLake(Protocol):
    """The lake that files are loaded into, as far as this module needs it."""

    @property
    def spark(self) -> SparkSession: ...

    def schema(self, table: str) -> Schema: ...

    def filled_columns(self, table: str) -> Collection[str]: ...

    def append(self, table: str, data: pa.Table | DataFrame, *, batch: str, message: str) -> Commit: ...

    def merge(self, table: str, data: pa.Table | DataFrame, *, batch: str, message: str) -> Commit: ...

    def resolve(self, operation: str) -> Commit | None:
        """After CommitUnknown: the operation's commit, or None if it never happened and never will."""


@dataclass(frozen=True)
class DropFile:
    """A file in the folder: its path below it, and its state."""

    name: str
    look: Stat

    @property
    def shown(self) -> str:
        """The name for people and databases, which may not support every file name."""
        return self.name.encode(errors="backslashreplace").decode()

    @property
    def size_bytes(self) -> int:
        return self.look[0]


class DropFolder:
    """The folder on disk: which files are complete, and where they go when they are done.

    Names that begin with a dot or an underscore, or end like an unfinished download, are ignored. A file is complete
    once neither its size nor its time has changed for `settle_s`, as seen by this process. Loaded files go to
    `.loaded`, refused ones to `.failed`, under the same name below it, beside a file with the reason. Nothing is ever
    deleted or overwritten: a name that is taken gets a number. Every move is durable before it counts.

    Crash between a reason and its file's move: the reason stands alone; the file is refused again, and both move
    together.
    """

    def __init__(self, path: Path, settle_s: float) -> None:
        self.path = path
        self._settle_s = settle_s
        # Since when each file has its current state.
        self._seen: dict[str, tuple[Stat, float]] = {}

    def complete(self, now_s: float) -> tuple[list[DropFile], int]:
        """The files that are complete, the oldest first, and the number of files that may not be."""
        seen, ready = {}, []
        for found in self._files():
            look, since_s = self._seen.get(found.name, (found.look, now_s))
            since_s = since_s if look == found.look else now_s
            seen[found.name] = (found.look, since_s)
            if now_s - since_s >= self._settle_s:
                ready.append(found)
        self._seen = seen
        ready.sort(key=lambda found: (found.look[1], found.name))
        return ready, len(seen) - len(ready)

    def _files(self) -> Iterator[DropFile]:
        for folder, folders, names in os.walk(self.path):
            folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
            for name in sorted(names):
                path = Path(folder, name)
                if name.startswith(HIDDEN) or name.lower().endswith(UNFINISHED) or path.is_symlink():
                    continue
                look = look_at(path)
                if look is not None and path.is_file():
                    yield DropFile(str(path.relative_to(self.path)), look)

    def read(self, found: DropFile, bytes_max: int) -> tuple[str, bytes | None] | None:
        """The digest of a file, and its content if that is small; None if it changed meanwhile."""
        digest, pieces = hashlib.sha256(), []
        with open(self.path / found.name, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                if found.size_bytes <= bytes_max:
                    pieces.append(piece)
        if look_at(self.path / found.name) != found.look:
            return None
        return digest.hexdigest(), b"".join(pieces) if found.size_bytes <= bytes_max else None

    def set_aside(self) -> int:
        """How many refused files are still in the folder."""
        found = os.walk(self.path / FAILED)
        return sum(1 for _, _, names in found for name in names if f"{name}{REASON}" in names)

    def bad_files(self, limit: int) -> list[JsonObject]:
        """The newest of them: which file, the line if one is known, why, and where it is now."""
        found = []
        for folder, _, names in os.walk(self.path / FAILED):
            reasons = [Path(folder, name + REASON) for name in names if f"{name}{REASON}" in names]
            found += [(look, path) for path in reasons if (look := look_at(path)) is not None]
        newest = sorted(found, key=lambda one: (one[0][1], one[1]), reverse=True)[:limit]
        return [_bad_file(path) for _, path in newest]

    def put_loaded(self, found: DropFile) -> Path:
        return self._move(found, LOADED, None)

    def put_failed(self, found: DropFile, reason: Mapping[str, Json]) -> Path:
        return self._move(found, FAILED, reason)

    def _move(self, found: DropFile, into: str, reason: Mapping[str, Json] | None) -> Path:
        wanted = self.path / into / found.name
        _make_folders(wanted.parent, self.path)
        target = next(path for path in _numbered(wanted) if not os.path.lexists(path))
        if reason is not None:
            _write(target.with_name(target.name + REASON), {**reason, "moved_to": str(target)})
        source = self.path / found.name
        os.rename(source, target)
        for folder in {target.parent, source.parent}:
            _sync(folder)
        self._seen.pop(found.name, None)
        return target


def _bad_file(reason: Path) -> JsonObject:
    """The content of a file with a reason; if it cannot be read, that is the reason shown."""
    path = str(reason).removesuffix(REASON).encode(errors="backslashreplace").decode()
    unknown = "the reason cannot be read"
    shown = JsonObject({"file": Path(path).name, "line": None, "reason": unknown, "advice": "", "path": path})
    try:
        data = json.loads(reason.read_text(encoding="utf-8"))
        error = data["error"]
        line = error["facts"].get("line")
        facts = {name: value for name, value in error["facts"].items() if name not in ("line", "count")}
        listed = f" [{' '.join(f'{name}={value}' for name, value in facts.items())}]" if facts else ""
        shown |= {"file": data["file"], "line": None if line is None else int(line), "at": data["at"]}
        shown |= {"reason": f"{error['message']}{listed}"[:REASON_CHARACTERS_MAX], "advice": error["advice"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return shown
    return shown


def look_at(path: Path) -> Stat | None:
    try:
        state = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ino


def _numbered(path: Path) -> Iterator[Path]:
    """The path, then numbered variants of it; the caller takes the first that is free."""
    yield path
    for number in count(1):
        yield path.with_name(f"{path.name}.{number}")


def _make_folders(folder: Path, root: Path) -> None:
    """The folder and those above it up to the root, each durable in the one above it."""
    if folder == root or folder.is_dir():
        return
    _make_folders(folder.parent, root)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _write(path: Path, reason: Mapping[str, Json]) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(reason, file, ensure_ascii=False, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class DropRun:
    """What a run did: how many files and rows it loaded, how many files were moved aside, and how many wait.

    `set_aside` counts also those that earlier runs refused, for as long as they stay in the folder.
    """

    loaded: int = 0
    rows: int = 0
    failed: int = 0
    waiting: int = 0
    set_aside: int = 0
    # The newest of those: file, line, reason, advice, path. For people: what a run did is in the counts.
    bad_files: tuple[JsonObject, ...] = field(default=(), compare=False)


class Drop:
    """One source of kind files."""

    def __init__(
        self,
        lake: LoadingLake,
        name: str,
        path: Path,
        table: str,
        *,
        settle_s: float,
        file_format: str | None = None,
        mode: str | None = None,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        self._lake = lake
        self._name = name
        self._table = table
        self._format = file_format
        self._mode = mode
        self._small_bytes = small_bytes
        self._folder = DropFolder(path, settle_s)

    @property
    def about(self) -> dict[str, str]:
        """The folder for dropped files, and the table that they are loaded into."""
        return {"path": str(self._folder.path), "table": self._table}

    def run(self, is_stopped: Callable[[], bool] = lambda: False) -> DropRun:
        """Load the complete files, one after the other, each in a commit of its own."""
        if not self._folder.path.is_dir():
            raise NotFound("the drop folder does not exist", path=self._folder.path, source=self._name)
        ready, waiting = self._folder.complete(time.monotonic())
        loaded = rows = failed = 0
        trouble: FloodmarkError | None = None
        if ready:
            mode = self._chosen_mode()
        for number, found in enumerate(ready):
            if is_stopped():
                return DropRun(loaded, rows, failed, waiting + len(ready) - number)
            try:
                commit = self._take(found, mode)
            except FloodmarkError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of a file: other files do not wait, and the run fails
                trouble = trouble or self._trouble(found, error)
                continue
            if isinstance(commit, Commit):
                loaded += 1
                rows += _rows(commit)
            elif commit is None:
                waiting += 1
            else:
                failed += 1
        if trouble is not None:
            raise trouble
        aside = self._folder.set_aside()
        bad = tuple(self._folder.bad_files(BAD_FILES_MAX)) if aside else ()
        return DropRun(loaded, rows, failed, waiting, aside, bad)

    def _trouble(self, found: DropFile, error: Exception) -> FloodmarkError:
        if isinstance(error, OSError):
            return Unavailable("a file cannot be read or moved", file=found.shown, cause=error)
        log.get(source=self._name, file=found.shown).error("a file could not be loaded", exc_info=error)
        return FloodmarkError(
            "a file could not be loaded, and stays where it is",
            file=found.shown,
            cause=error,
            advice="The log has more. Remove it from the folder, or correct it; the others were loaded.",
        )

    def _chosen_mode(self) -> str:
        """Checked before any file is read: a wrong mode is no file's fault."""
        key = key_fields(self._lake.schema(self._table))
        if self._mode == MERGE and not key:
            raise Invalid("only a table with a key can be merged into", table=self._table, source=self._name)
        return self._mode or (MERGE if key else APPEND)

    def _take(self, found: DropFile, mode: str) -> Commit | Invalid | None:
        """One file: its commit, or why it was refused; None if it is not complete after all."""
        read = self._folder.read(found, self._small_bytes)
        if read is None:
            return None
        digest, data = read
        hit("drop.found")
        batch = batch_of(self._name, found.name, digest)
        try:
            commit = self._load(found, data, mode, batch)
        except Invalid as refusal:
            self._refuse(found, digest, refusal)
            return refusal
        hit("drop.loaded")
        # Crash here: the rows are in, and so is their identity; the next run finds that out and moves the file.
        target = self._folder.put_loaded(found)
        hit("drop.moved")
        loaded = log.get(source=self._name, file=found.shown)
        loaded.info("a file was loaded", outcome=commit.outcome, version=commit.version, moved_to=str(target))
        return commit

    def _refuse(self, found: DropFile, digest: str, refusal: Invalid) -> None:
        # Crash before the move: the next run refuses the file again, in the same way.
        hit("drop.refused")
        reason: dict[str, Json] = {
            "file": found.shown,
            "source": self._name,
            "table": self._table,
            "sha256": digest,
            "at": clock.format_time(clock.now_ms()),
            "text": f"{refusal.kind}: {refusal}",
            "error": refusal.as_dict(),
        }
        target = self._folder.put_failed(found, reason)
        hit("drop.set_aside")
        refused = log.get(source=self._name, file=found.shown)
        refused.warning("a file was refused", cause=str(refusal), moved_to=str(target))

    def _load(self, found: DropFile, data: bytes | None, mode: str, batch: str) -> Commit:
        rows, explained = self._rows(found, data, merged=mode == MERGE)
        write = self._lake.merge if mode == MERGE else self._lake.append
        try:
            return write(self._table, rows, batch=batch, message=f"{mode} {found.shown} of {self._name}")
        except Invalid as refusal:
            raise explained() or refusal from refusal
        except CommitUnknown as unknown:
            commit = self._lake.resolve(unknown.operation)
            if commit is None:
                raise Unavailable("the file was not loaded", file=found.shown, cause=unknown) from unknown
            return commit

    def _rows(self, found: DropFile, data: bytes | None, *, merged: bool) -> tuple[pa.Table | DataFrame, Explain]:
        """The rows of a file, read here if it is small, else by Spark; and a function that explains a refusal."""
        file_format = format_of([found.name], self._format)
        schema, filled = self._lake.schema(self._table), self._lake.filled_columns(self._table)
        if data is not None:
            try:
                rows = read_rows(found.name, data, file_format, schema, filled, bytes_max=TEXT_BYTES_MAX, merged=merged)
                return rows, lambda: None
            except NeedsSpark:
                log.get(source=self._name, file=found.shown).info("a file is left to Spark")
        from floodmark.rows.schema import spark_schema

        # Missing, or failed to start: no file's fault, and not Invalid.
        spark = self._lake.spark
        path = escaped(str(self._folder.path / found.name))
        columns = spark_schema(schema)
        every = columns.names if merged else ()
        rows = read_files(spark, [path], file_format, columns, filled=filled, merged=every)
        return rows, lambda: explain(spark, [path], file_format, columns)


def batch_of(source: str, name: str, digest: str) -> str:
    """The identity of a file: its source, its path, and its content. Of fixed length, whatever the name is."""
    whole = hashlib.sha256(f"{source}\0{name}\0{digest}".encode(errors="surrogateescape")).hexdigest()
    return f"file {whole}"


def _rows(commit: Commit) -> int:
    """How many rows this commit added; none if they were in the table already."""
    done = commit.tables if commit.outcome == "committed" else ()
    return sum(part.rows_added + part.rows_updated for part in done)
