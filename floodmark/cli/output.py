"""Results to stdout, progress and errors to stderr; with --json, one object to stdout and nothing else.

Nothing here knows a command; every command hands over plain data and says how a person should see it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from itertools import chain, islice
from typing import TypeAlias

from floodmark.errors import FloodmarkError

# What a row of a table may hold, besides JSON.
Cell: TypeAlias = "str | int | float | bool | date | Decimal | bytes | Sequence[Cell] | Mapping[str, Cell] | None"
# So many rows are shown at once where their number has no limit: all columns are as wide as the first of them need.
_PAGE_ROWS = 1000


@dataclass(frozen=True)
class Output:
    as_json: bool = False

    def result(self, data: Mapping[str, Cell] | None, *, text: str | None = None) -> None:
        """One result: as JSON, or as `text` (by default its fields, a line each)."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, default=_plain) + "\n")
        elif text is not None:
            sys.stdout.write(text + "\n")
        else:
            self._fields(data or {})

    def rows(self, rows: Sequence[Mapping[str, Cell]], columns: Iterable[str], *, name: str, empty: str) -> None:
        """A list: as one JSON object, or as a table; `empty` says what to do when there is nothing to see."""
        if self.as_json:
            sys.stdout.write(json.dumps({name: list(rows)}, default=_plain) + "\n")
            return
        if not rows:
            sys.stdout.write(empty + "\n")
            return
        self._table(rows, list(columns))

    def stream(
        self, rows: Iterable[Mapping[str, Cell]], columns: Iterable[str], *, name: str, empty: str, limit: int | None
    ) -> bool:
        """Rows as they come, however many: memory follows a page. Whether there were more than `limit` of them.

        As JSON it is one object, written bit by bit; with a limit it tells whether rows were left out (`truncated`). An
        error before the first row is raised. One after it ends the object, under `error`, and is raised as `Cut`.
        """
        cut = _Limited(iter(rows), limit)
        first = list(islice(cut, 1))
        if self.as_json:
            self._stream_json(first, cut, name)
        elif not first:
            sys.stdout.write(empty + "\n")
        else:
            shown = list(columns)
            page = [*first, *islice(cut, _PAGE_ROWS - 1)]
            widths = self._table(page, shown)
            while page := list(islice(cut, _PAGE_ROWS)):
                self._table(page, shown, widths)
        return cut.truncated

    def _stream_json(self, first: list[Mapping[str, Cell]], rest: _Limited, name: str) -> None:
        sys.stdout.write(f"{{{json.dumps(name)}: [")
        failure: FloodmarkError | None = None
        try:
            for number, row in enumerate(chain(first, rest)):
                sys.stdout.write((", " if number else "") + json.dumps(row, default=_plain))
        except FloodmarkError as error:
            failure = error
        ending = "" if rest.limit is None else f', "truncated": {json.dumps(rest.truncated)}'
        ending += "" if failure is None else f', "error": {json.dumps(failure.as_dict())}'
        sys.stdout.write(f"]{ending}}}\n")
        if failure is not None:
            raise Cut(failure) from failure

    def _table(
        self, rows: Sequence[Mapping[str, Cell]], shown: list[str], widths: Sequence[int] | None = None
    ) -> list[int]:
        """Print a table; with the widths of an earlier one, as its continuation. The widths of its columns."""
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold", show_header=widths is None)
        needed = []
        for number, column in enumerate(shown):
            numeric = all(isinstance(row.get(column), int | float) or row.get(column) is None for row in rows)
            least = None if widths is None else widths[number]
            needed.append(max((len(_text(row.get(column))) for row in rows), default=0) if least is None else least)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold", min_width=least)
        for row in rows:
            table.add_row(*(_text(row.get(column)) for column in shown))
        # Piped output is not cut at the width of a terminal that is not there.
        width = None if sys.stdout.isatty() else 200
        # What people stored is shown as it is: `[x]` is no markup of ours, `:x:` no picture.
        Console(width=width, highlight=False, markup=False, emoji=False).print(table)
        return [max(len(column), width) for column, width in zip(shown, needed, strict=True)]

    def error(self, error: FloodmarkError) -> None:
        shown = error.failure if isinstance(error, Cut) else error
        sys.stderr.write(f"floodmark: {shown.kind}: {shown}\n")
        if self.as_json and shown is error:  # of one that was cut, the JSON object has it already
            sys.stdout.write(json.dumps({"error": error.as_dict()}) + "\n")

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        if not self.as_json:
            sys.stderr.write(text + "\n")

    def _fields(self, data: Mapping[str, Cell]) -> None:
        width = max((len(name) for name in data), default=0)
        for name, value in data.items():
            # Further lines of a value stand below its first.
            text = _text(value).replace("\n", "\n" + " " * (width + 2))
            sys.stdout.write(f"{name:<{width}}  {text}\n")


class Cut(FloodmarkError):
    """The command failed after a part of its result was written; that part ends with the error too."""

    def __init__(self, failure: FloodmarkError) -> None:
        self.failure = failure
        self.exit_code = failure.exit_code  # type: ignore[misc]
        super().__init__(failure.message, advice=failure.advice, **failure.facts)


class _Limited(Iterator[Mapping[str, Cell]]):
    """At most so many rows; `truncated` says, at their end, whether there were more."""

    def __init__(self, rows: Iterator[Mapping[str, Cell]], limit: int | None) -> None:
        self._rows = rows
        self.limit = limit
        self._count = 0
        self.truncated = False

    def __next__(self) -> Mapping[str, Cell]:
        if self.truncated:
            raise StopIteration
        row = next(self._rows)
        if self.limit is not None and self._count >= self.limit:
            self.truncated = True
            raise StopIteration
        self._count += 1
        return row


def size_text(size_bytes: int) -> str:
    """Bytes as people say them: 512 bytes, 33.6 kB, 1.2 GB."""
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    size, units = float(size_bytes), iter(("kB", "MB", "GB", "TB", "PB"))
    unit = ""
    while size >= 1000 and (larger := next(units, None)) is not None:
        size, unit = size / 1000, larger
    return f"{size:,.1f} {unit}"


def _text(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "-"
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(one)}" for key, one in value.items()) or "-"
    return str(value)


def _plain(value: Cell) -> str:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return str(value)
