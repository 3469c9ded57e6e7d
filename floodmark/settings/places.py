"""The place of every key and value in a TOML text: line and column. Pure.

Python's reader returns values without their places, and an error in a setting should show where it was written. This
module walks a text that the reader has accepted, so it checks nothing; for a text that is not TOML it only returns
where the reader stopped. Lines and columns count from 1, columns in characters, as editors do.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

# Names, and the number of an entry in an array.
Path = tuple[str | int, ...]
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
# Also over the ends of lines and comments, as between the tables of a text and inside an array.
_BETWEEN = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_LONG_BASIC = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}(?!")', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''.*?'{3,5}(?!')", re.DOTALL)
_PLAIN = re.compile(r"[^,\]}#\r\n]+")
_STOPPED = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)


@dataclass(frozen=True)
class TextPosition:
    line: int
    column: int


@dataclass(frozen=True)
class TomlText:
    """A text and the name of its file; NO_TEXT is that of settings that were never written down."""

    text: str = ""
    file: str = ""

    def where(self, path: str | Sequence[str | int], *, value: bool = False) -> str:
        """`file:line:column` of a key, or of its value; for a missing key, of the nearest existing one around it.

        A path as one text, like serve.bind, is found whatever dots the names in it have.
        """
        place = self.find(path, value=value)
        return self.file if place is None else f"{self.file}:{place.line}:{place.column}"

    def find(self, path: str | Sequence[str | int], *, value: bool = False) -> TextPosition | None:
        known = self._walk.values if value else self._walk.keys
        if isinstance(path, str):
            found = self._by_name(path)
            return None if found is None else known.get(found) or self._walk.keys.get(found)
        for end in range(len(path), 0, -1):
            place = known.get(tuple(path[:end])) or self._walk.keys.get(tuple(path[:end]))
            if place is not None:
                return place
        return None

    def _by_name(self, name: str) -> Path | None:
        within = [path for path in self._walk.keys if f"{name}.".startswith(".".join(map(str, path)) + ".")]
        return max(within, key=lambda path: len(".".join(map(str, path))), default=None)

    @cached_property
    def _walk(self) -> _Walk:
        walk = _Walk(self.text)
        walk.run()
        return walk


NO_TEXT = TomlText()


def where_stopped(error: tomllib.TOMLDecodeError, text: str) -> tuple[TextPosition, str]:
    """Where the reader stopped, and its reason."""
    found = _STOPPED.fullmatch(str(error))
    if found is None:
        return TextPosition(1, 1), str(error)
    if found[2] is None:
        return _place(text, len(text)), f"{found[1]} at the end"
    return TextPosition(int(found[2]), int(found[3])), found[1]


def _place(text: str, at: int) -> TextPosition:
    return TextPosition(text.count("\n", 0, at) + 1, at - (text.rfind("\n", 0, at) + 1) + 1)


@dataclass
class _Walk:
    text: str
    at: int = 0
    keys: dict[Path, TextPosition] = field(default_factory=dict)
    values: dict[Path, TextPosition] = field(default_factory=dict)
    # How many entries each array of tables has so far.
    entries: dict[Path, int] = field(default_factory=dict)

    def run(self) -> None:
        table: Path = ()
        self._skip(_BETWEEN)
        while self.at < len(self.text):
            if self.text.startswith("[", self.at):
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BETWEEN)

    def _header(self) -> Path:
        start, is_array = self.at, self.text.startswith("[[", self.at)
        self.at += 2 if is_array else 1
        path: Path = ()
        names = self._names()
        for number, (name, at) in enumerate(names, start=1):
            path += (name,)
            self._see(path, at)
            if is_array and number == len(names):
                self.entries[path] = self.entries.get(path, 0) + 1
            if path in self.entries:
                path += (self.entries[path] - 1,)
        self._skip(_BLANK)
        self.at += 2 if is_array else 1
        self._see(path, names[-1][1])
        self.values.setdefault(path, _place(self.text, start))
        return path

    def _pair(self, table: Path) -> None:
        path = table
        for name, at in self._names():
            path += (name,)
            self._see(path, at)
        self._skip(_BLANK)
        self.at += 1  # the equals sign
        self._value(path)

    def _names(self) -> list[tuple[str, int]]:
        """The parts of a dotted key, and where each stands."""
        names: list[tuple[str, int]] = []
        while True:
            self._skip(_BLANK)
            start = self.at
            quoted = {'"': _BASIC, "'": _LITERAL}.get(self.text[start])
            self._skip(quoted or _BARE)
            raw = self.text[start : self.at]
            # The reader handles its escapes.
            names.append((tomllib.loads(f"x = {raw}")["x"] if quoted else raw, start))
            self._skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return names
            self.at += 1

    def _value(self, path: Path) -> None:
        self._skip(_BLANK)
        self.values.setdefault(path, _place(self.text, self.at))
        first = self.text[self.at]
        if first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        elif first == '"':
            self._skip(_LONG_BASIC if self.text.startswith('"""', self.at) else _BASIC)
        elif first == "'":
            self._skip(_LONG_LITERAL if self.text.startswith("'''", self.at) else _LITERAL)
        else:
            self._skip(_PLAIN)

    def _array(self, path: Path) -> None:
        self.at += 1
        number = 0
        self._skip(_BETWEEN)
        while self.text[self.at] != "]":
            self._see((*path, number), self.at)
            self._value((*path, number))
            number += 1
            self._skip(_BETWEEN)
            if self.text[self.at] == ",":
                self.at += 1
                self._skip(_BETWEEN)
        self.at += 1

    def _inline_table(self, path: Path) -> None:
        self.at += 1
        self._skip(_BETWEEN)
        while self.text[self.at] != "}":
            self._pair(path)
            self._skip(_BETWEEN)
            if self.text[self.at] == ",":
                self.at += 1
                self._skip(_BETWEEN)
        self.at += 1

    def _see(self, path: Path, at: int) -> None:
        self.keys.setdefault(path, _place(self.text, at))

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
