"""How what a lake returns looks at a prompt and in a notebook: one line of text, or a small HTML table. Pure.

Records that are plain dicts and lists for a program stay that: `Facts` and `Listing` only look better. Every value is
escaped: what stands in a table's name, a message or an error is shown, never interpreted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Generic, TypeVar

from floodmark.json_form import Json

ROWS_MAX = 50
TEXT_CHARACTERS_MAX = 200
T = TypeVar("T")


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Json]]) -> str:
    """A table with a caption; of many rows the first, and how many there are besides."""
    found = list(rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = ["".join(f"<td>{escape(value_text(one))}</td>" for one in row) for row in found[:ROWS_MAX]]
    if len(found) > ROWS_MAX:
        lines.append(f'<td colspan="{len(columns)}">and {len(found) - ROWS_MAX} more</td>')
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def value_text(value: Json) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        text = ", ".join(f"{name}={value_text(one)}" for name, one in value.items())
    elif isinstance(value, list | tuple):
        text = ", ".join(map(value_text, value))
    else:
        text = str(value)
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Facts(dict[str, Json]):
    """What is known of one thing. `KIND`: what it is, and the key of its name; `SHORT`: what one line shows."""

    KIND: tuple[str, str] = ("", "")
    SHORT: tuple[str, ...] = ()

    def __repr__(self) -> str:
        kind, name = self.KIND
        shown = [f"{key}={value_text(self[key])}" for key in self.SHORT if self.get(key) not in (None, [], "")]
        return f"<{' '.join([kind, str(self.get(name)), *shown])}>"

    def _repr_html_(self) -> str:
        kind, name = self.KIND
        return html_table(f"{kind} {self.get(name)}", ("", ""), [(k, v) for k, v in self.items() if k != name])


class TableFacts(Facts):
    KIND = ("Table", "table")
    SHORT = ("rows", "files", "bytes", "version", "key", "partition")


class SinkFacts(Facts):
    KIND = ("Sink", "sink")
    SHORT = ("kind", "state", "quarantined")


class JobFacts(Facts):
    KIND = ("Job", "job")
    SHORT = ("kind", "status", "processed", "total", "unit", "rows")


class Listing(list[T], Generic[T]):
    """A list that a prompt shows line by line, and a notebook as one table."""

    def __repr__(self) -> str:
        return "[" + ",\n ".join(map(repr, self)) + "]"

    def _repr_html_(self) -> str:
        if not self:
            return "<p>none</p>"
        first = self[0]
        if isinstance(first, Facts):
            kind, name = first.KIND
            columns = [name, *(key for key in first.SHORT if key in first)]
            rows: list[Sequence[Json]] = [[one.get(key) for key in columns] for one in self if isinstance(one, Facts)]
            return html_table(f"{len(self)} of {kind}", columns, rows)
        return "".join(one._repr_html_() if hasattr(one, "_repr_html_") else escape(repr(one)) for one in self)
