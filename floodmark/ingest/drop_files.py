"""A drop folder on disk: which files are complete, and where they go when they are done.

What begins with a dot or an underscore, or ends like a download that goes on, is not looked at; a file is complete once
neither its size nor its time has changed for a while, as seen by this process. Files that were loaded go to `.loaded`,
those that were refused to `.failed`, under the same name below it, beside a file with the reason. Nothing is ever
deleted or overwritten: a name that is taken gets a number. Every move is durable before it counts.

Crash between a reason and its file's move: the reason stands alone; the file is refused again, and both go together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

LOADED, FAILED = ".loaded", ".failed"
REASON = ".reason.json"
REASON_CHARACTERS_MAX = 500
HIDDEN = (".", "_")
UNFINISHED = (".tmp", ".part", ".crdownload")
_PIECE_BYTES = 1024 * 1024

Look = tuple[int, int, int]  # size, time of the last change, inode


@dataclass(frozen=True)
class Found:
    """A file in the folder: its path below it, and how it looked."""

    name: str
    look: Look

    @property
    def shown(self) -> str:
        """The name for people and databases, which need not be able to hold every name."""
        return self.name.encode(errors="backslashreplace").decode()

    @property
    def size_bytes(self) -> int:
        return self.look[0]


class DropFolder:
    def __init__(self, path: Path, settle_s: float) -> None:
        self.path = path
        self._settle_s = settle_s
        # Since when each file looks as it does.
        self._seen: dict[str, tuple[Look, float]] = {}

    def complete(self, now_s: float) -> tuple[list[Found], int]:
        """The files that are complete, the oldest first, and how many are there that may not be."""
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

    def _files(self) -> Iterator[Found]:
        for folder, folders, names in os.walk(self.path):
            folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
            for name in sorted(names):
                path = Path(folder, name)
                if name.startswith(HIDDEN) or name.lower().endswith(UNFINISHED) or path.is_symlink():
                    continue
                look = look_at(path)
                if look is not None and path.is_file():
                    yield Found(str(path.relative_to(self.path)), look)

    def read(self, found: Found, bytes_max: int) -> tuple[str, bytes | None] | None:
        """The digest of a file, and what is in it if that is little; None if it changed meanwhile."""
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
        """How many files were refused and still lie there."""
        found = os.walk(self.path / FAILED)
        return sum(1 for _, _, names in found for name in names if f"{name}{REASON}" in names)

    def bad_files(self, limit: int) -> list[dict[str, Any]]:
        """The newest of them: which file, the line if one is known, why, and where it lies now."""
        found = []
        for folder, _, names in os.walk(self.path / FAILED):
            told = [Path(folder, name + REASON) for name in names if f"{name}{REASON}" in names]
            found += [(look, path) for path in told if (look := look_at(path)) is not None]
        newest = sorted(found, key=lambda one: (one[0][1], one[1]), reverse=True)[:limit]
        return [_bad_file(path) for _, path in newest]

    def put_loaded(self, found: Found) -> Path:
        return self._move(found, LOADED, None)

    def put_failed(self, found: Found, reason: Mapping[str, Any]) -> Path:
        return self._move(found, FAILED, reason)

    def _move(self, found: Found, into: str, reason: Mapping[str, Any] | None) -> Path:
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


def _bad_file(reason: Path) -> dict[str, Any]:
    """What a file with a reason says; one that cannot be read says so."""
    path = str(reason).removesuffix(REASON).encode(errors="backslashreplace").decode()
    told: dict[str, Any] = {
        "file": Path(path).name,
        "line": None,
        "reason": "the reason cannot be read",
        "advice": "",
        "path": path,
    }
    try:
        data = json.loads(reason.read_text(encoding="utf-8"))
        error = data["error"]
        line = error["facts"].get("line")
        facts = {name: value for name, value in error["facts"].items() if name not in ("line", "count")}
        said = f" [{' '.join(f'{name}={value}' for name, value in facts.items())}]" if facts else ""
        told |= {"file": data["file"], "line": None if line is None else int(line), "at": data["at"]}
        return told | {"reason": f"{error['message']}{said}"[:REASON_CHARACTERS_MAX], "advice": error["advice"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return told


def look_at(path: Path) -> Look | None:
    try:
        state = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ino


def _numbered(path: Path) -> Iterator[Path]:
    """The path, and the same with a number, for as long as one is taken."""
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


def _write(path: Path, reason: Mapping[str, Any]) -> None:
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
