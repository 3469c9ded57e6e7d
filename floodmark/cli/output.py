"""Results to stdout, progress and errors to stderr; with --json, one object to stdout and nothing else.

Nothing here knows a command; every command hands over plain data and says how a person should see it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from floodmark.errors import FloodmarkError


@dataclass(frozen=True)
class Output:
    as_json: bool = False

    def result(self, data: Any, *, text: str | None = None) -> None:
        """One result: as JSON, or as `text` (by default its fields, a line each)."""
        if self.as_json:
            sys.stdout.write(json.dumps(data, default=_plain) + "\n")
        elif text is not None:
            sys.stdout.write(text + "\n")
        else:
            self._fields(data)

    def rows(self, rows: Sequence[Mapping[str, Any]], columns: Iterable[str], *, name: str, empty: str) -> None:
        """A list: as one JSON object, or as a table; `empty` says what to do when there is nothing to see."""
        if self.as_json:
            sys.stdout.write(json.dumps({name: list(rows)}, default=_plain) + "\n")
            return
        if not rows:
            sys.stdout.write(empty + "\n")
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        shown = list(columns)
        for column in shown:
            numeric = all(isinstance(row.get(column), int | float) or row.get(column) is None for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_text(row.get(column)) for column in shown))
        # Piped output is not cut at the width of a terminal that is not there.
        Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)

    def error(self, error: FloodmarkError) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps({"error": error.as_dict()}) + "\n")
        sys.stderr.write(f"floodmark: {error.kind}: {error}\n")

    def note(self, text: str) -> None:
        """Something worth knowing that is not the result."""
        if not self.as_json:
            sys.stderr.write(text + "\n")

    def _fields(self, data: Mapping[str, Any]) -> None:
        width = max((len(name) for name in data), default=0)
        for name, value in data.items():
            # Further lines of a value stand below its first.
            text = _text(value).replace("\n", "\n" + " " * (width + 2))
            sys.stdout.write(f"{name:<{width}}  {text}\n")


def size_text(size_bytes: int) -> str:
    """Bytes as people say them: 512 bytes, 33.6 kB, 1.2 GB."""
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    size, units = float(size_bytes), iter(("kB", "MB", "GB", "TB", "PB"))
    unit = ""
    while size >= 1000 and (larger := next(units, None)) is not None:
        size, unit = size / 1000, larger
    return f"{size:,.1f} {unit}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "-"
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(one)}" for key, one in value.items()) or "-"
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return str(value)
