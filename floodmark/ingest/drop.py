"""A drop folder as a way in: each complete file comes in once, a bad one is moved aside with the reason (I9).

The steps of a file, each followed by its failpoint: found (complete, nothing done), loaded (its rows are committed, and
its identity with them; the file is still there), moved (it is in `.loaded`). The identity is the name of the source,
the file's path below the folder and the digest of what is in it. So after a crash between the commit and the move the
next run finds it committed, and only moves it; the same file dropped again is a no-op; the same rows under another
name, or other rows under the same name, are another file.

A file that is refused (`Invalid`) goes to `.failed` with the reason, all of it or nothing was loaded, and the next one
follows. What else Floodmark says (the catalog is away, the table is gone) is not the file's fault: it stays, and the
run ends; the next one tries again. One that cannot be read or moved, or that fails as nobody foresaw, stays too, those
behind it are loaded, and then the run fails with what the first of them said.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodmark import clock, log
from floodmark.errors import CommitUnknown, FloodmarkError, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.ingest.drop_files import DropFolder, Found
from floodmark.ingest.file_rows import NeedsSpark, read_rows
from floodmark.ingest.files import format_of
from floodmark.model import Commit
from floodmark.write.prune import key_fields

if TYPE_CHECKING:
    from floodmark.lake import Lake

MIB = 1024 * 1024
# Larger files go through Spark, which reads them in parts.
SMALL_BYTES = 64 * MIB
# What a small file may be once it is unpacked.
TEXT_BYTES_MAX = 256 * MIB
APPEND, MERGE = "append", "merge"
BAD_FILES_MAX = 10
_PATTERN = re.compile(r"[][{}*?\\]")


@dataclass(frozen=True)
class Dropped:
    """What a run did: how many files and rows came in, how many files were moved aside, and how many wait.

    `set_aside` counts also those that earlier runs refused, for as long as they lie there.
    """

    loaded: int = 0
    rows: int = 0
    failed: int = 0
    waiting: int = 0
    set_aside: int = 0
    # The newest of those: file, line, reason, advice, path. For people: what a run did is in the counts.
    bad_files: tuple[dict[str, Any], ...] = field(default=(), compare=False)


class Drop:
    """One source of kind files."""

    def __init__(
        self,
        lake: Lake,
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
    def about(self) -> dict[str, Any]:
        """Where files are dropped, and which table they come into."""
        return {"path": str(self._folder.path), "table": self._table}

    def run(self, is_stopped: Callable[[], bool] = lambda: False) -> Dropped:
        """Load what is complete, one file after the other, each in a commit of its own."""
        if not self._folder.path.is_dir():
            raise NotFound("the drop folder is not there", path=self._folder.path, source=self._name)
        ready, waiting = self._folder.complete(time.monotonic())
        loaded = rows = failed = 0
        trouble: FloodmarkError | None = None
        if ready:
            mode = self._chosen_mode()
        for number, found in enumerate(ready):
            if is_stopped():
                return Dropped(loaded, rows, failed, waiting + len(ready) - number)
            try:
                commit = self._take(found, mode)
            except FloodmarkError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of a file: no other waits for it, and the run fails
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
        return Dropped(loaded, rows, failed, waiting, aside, bad)

    def _trouble(self, found: Found, error: Exception) -> FloodmarkError:
        if isinstance(error, OSError):
            return Unavailable("a file cannot be read or moved", file=found.shown, cause=error)
        log.get(source=self._name, file=found.shown).error("a file could not be loaded", exc_info=error)
        return FloodmarkError(
            "a file could not be loaded, and stays where it is",
            file=found.shown,
            cause=error,
            advice="The log has more. Take it out of the folder, or mend it; the others were loaded.",
        )

    def _chosen_mode(self) -> str:
        """Said before any file is judged by it: a wrong mode is no file's fault."""
        key = key_fields(self._lake.schema(self._table))
        if self._mode == MERGE and not key:
            raise Invalid("only a table with a key can be merged into", table=self._table, source=self._name)
        return self._mode or (MERGE if key else APPEND)

    def _take(self, found: Found, mode: str) -> Commit | Invalid | None:
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
        told = log.get(source=self._name, file=found.shown)
        told.info("a file was loaded", outcome=commit.outcome, version=commit.version, moved_to=str(target))
        return commit

    def _refuse(self, found: Found, digest: str, refusal: Invalid) -> None:
        # Crash before the move: the file is judged again, in the same way.
        hit("drop.refused")
        reason = {
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
        told = log.get(source=self._name, file=found.shown)
        told.warning("a file was refused", cause=str(refusal), moved_to=str(target))

    def _load(self, found: Found, data: bytes | None, mode: str, batch: str) -> Commit:
        rows, explained = self._rows(found, data, merged=mode == MERGE)
        write = self._lake.merge if mode == MERGE else self._lake.append
        try:
            return write(self._table, rows, batch=batch, message=f"{mode} {found.shown} of {self._name}")
        except Invalid as refusal:
            raise explained() or refusal from refusal
        except CommitUnknown as unknown:
            commit = self._lake.resolve(unknown.operation)
            if commit is None:
                raise Unavailable("the file did not come in", file=found.shown, cause=unknown) from unknown
            return commit

    def _rows(self, found: Found, data: bytes | None, *, merged: bool) -> tuple[Any, Callable[[], Invalid | None]]:
        """The rows of a file, read here if it is small, else by Spark; and who says more if they do not fit."""
        file_format = format_of([found.name], self._format)
        schema, filled = self._lake.schema(self._table), self._lake.filled_columns(self._table)
        if data is not None:
            try:
                rows = read_rows(found.name, data, file_format, schema, filled, bytes_max=TEXT_BYTES_MAX, merged=merged)
                return rows, lambda: None
            except NeedsSpark:
                log.get(source=self._name, file=found.shown).info("a file is left to Spark")
        from floodmark.ingest.files import explain, read_files
        from floodmark.rows.schema import spark_schema

        # Not there, or not to be started: no file's fault, and no Invalid.
        spark = self._lake.spark
        # What is a pattern for Spark is a name here.
        path = _PATTERN.sub(r"\\\g<0>", str(self._folder.path / found.name))
        columns = spark_schema(schema)
        every = columns.names if merged else ()
        rows = read_files(spark, [path], file_format, columns, filled=filled, merged=every)
        return rows, lambda: explain(spark, [path], file_format, columns)


def batch_of(source: str, name: str, digest: str) -> str:
    """The identity of a file: whose it is, which one, and what is in it. As long as any other, whatever the name is."""
    whole = hashlib.sha256(f"{source}\0{name}\0{digest}".encode(errors="surrogateescape")).hexdigest()
    return f"file {whole}"


def _rows(commit: Commit) -> int:
    """How many rows came in by this commit; none if they were there already."""
    done = commit.tables if commit.outcome == "committed" else ()
    return sum(part.rows_added + part.rows_updated for part in done)
