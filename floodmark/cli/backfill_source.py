"""Where a history comes from, as options say it: files by a path template, another table, or a function."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from floodmark.errors import Invalid

_OF_PATHS = ("step", "format", "missing", "unfinished", "columns")


@dataclass(frozen=True)
class SourceOptions:
    path: str | None = None
    step: str | None = None
    format: str | None = None
    missing: str | None = None
    unfinished: str | None = None
    columns: str | None = None
    from_table: str | None = None
    range_column: str | None = None
    call: str | None = None
    tip: str | None = None

    def source(self) -> Any:
        """The source; Invalid if the options name none, several, or do not go together."""
        from floodmark.backfill.sources import CallSource, PathSource, TableSource

        self._check()
        if self.path is not None:
            given = {name: getattr(self, name) for name in (*_OF_PATHS, "tip")}
            return PathSource(self.path, **{name: value for name, value in given.items() if value is not None})
        if self.from_table is not None:
            return TableSource(self.from_table, self.range_column or "", tip=self.tip)
        find_functions_here()
        return CallSource(self.call or "", self.tip)

    def _check(self) -> None:
        if sum(one is not None for one in (self.path, self.from_table, self.call)) != 1:
            raise Invalid(
                "a history has one source", advice="Use --path TEMPLATE, --from-table TABLE or --call module:function."
            )
        for name in _OF_PATHS:
            if getattr(self, name) is not None and self.path is None:
                raise Invalid(f"--{name} goes with --path")
        if (self.range_column is None) != (self.from_table is None):
            raise Invalid("--from-table and --range-column go together")


def find_functions_here() -> None:
    """Functions are looked for in the present folder too, as a person expects it."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def needs_functions(settings: Mapping[str, Any]) -> bool:
    """Whether a job's kept source is a function."""
    source = settings.get("source")
    return isinstance(source, Mapping) and source.get("kind") == "call"


def outputs(tables: Sequence[str]) -> dict[str, str | None]:
    """The tables and what comes into each: a name alone, or NAME=query over `chunk`."""
    found: dict[str, str | None] = {}
    for given in tables:
        name, has_query, query = given.partition("=")
        name = name.strip()
        if not name or (has_query and not query.strip()):
            raise Invalid("this is no table", table=given, advice='Write NAME, or "NAME=select … from chunk".')
        if name in found:
            raise Invalid("this table is named twice", table=name)
        found[name] = query.strip() if has_query else None
    return found


def expectations(given: Sequence[str]) -> dict[str, Any]:
    """What a chunk must be, as options say it: every_number, or NAME=VALUE."""
    found: dict[str, Any] = {}
    for one in given:
        name, has_value, value = one.partition("=")
        if has_value and name in ("rows", "min_rows") and not value.isdecimal():
            raise Invalid("an expectation of rows is a whole number", given=one)
        found[name] = (int(value) if name in ("rows", "min_rows") else value) if has_value else True
    return found
