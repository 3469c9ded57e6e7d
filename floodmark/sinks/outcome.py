"""What a run of a sink did: one record per table and one for the run, each with a named outcome (I12)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from floodmark.errors import BelowRetention, Corrupt, FloodmarkError
from floodmark.json_form import Json
from floodmark.runs import BUSY, FAILED, NOTHING_TO_DO, PAUSED, PLANNED, REFUSED, SHIPPED, STOPPED, WAITING
from floodmark.shown import html_table

# The run gets the outcome of the table that needs most attention.
_BY_ATTENTION = (FAILED, REFUSED, BUSY, WAITING, STOPPED, PAUSED, SHIPPED, PLANNED, NOTHING_TO_DO)


@dataclass(frozen=True)
class TableRun:
    """One table of a run: what was shipped, or why not. `since` and `until` are the mark before and after."""

    table: str
    outcome: str
    units: int = 0
    resumed: int = 0
    rows: int = 0
    deletions: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    since: int | None = None
    until: int | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    error: FloodmarkError | None = None

    def as_dict(self) -> dict[str, Json]:
        return {
            "table": self.table,
            "outcome": self.outcome,
            "units": self.units,
            "resumed": self.resumed,
            "rows": self.rows,
            "deletions": self.deletions,
            "bytes": self.size_bytes,
            "quarantined": self.quarantined,
            "since": self.since,
            "until": self.until,
            **self.detail,
            "error": None if self.error is None else self.error.as_dict(),
        }


@dataclass(frozen=True, repr=False)
class SinkRun:
    """One run of one sink."""

    sink: str
    tables: tuple[TableRun, ...]

    def __repr__(self) -> str:
        return f"<SinkRun {self.sink} {self.outcome} rows={self.rows:,}>"

    def _repr_html_(self) -> str:
        columns = ("table", "outcome", "rows", "deletions", "quarantined", "since", "until")
        rows = [[getattr(one, name) for name in columns] for one in self.tables]
        return html_table(f"sink {self.sink}: {self.outcome}", columns, rows)

    @property
    def outcome(self) -> str:
        return worst(table.outcome for table in self.tables)

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def error(self) -> FloodmarkError | None:
        return next((table.error for table in self.tables if table.outcome == self.outcome and table.error), None)

    @property
    def exit_code(self) -> int:
        if self.outcome == REFUSED:
            return Corrupt.exit_code
        return 0 if self.error is None else self.error.exit_code

    def as_dict(self) -> dict[str, Json]:
        return {
            "sink": self.sink,
            "outcome": self.outcome,
            "rows": self.rows,
            "tables": [table.as_dict() for table in self.tables],
        }


def worst(outcomes: Iterable[str]) -> str:
    found = set(outcomes)
    return next((outcome for outcome in _BY_ATTENTION if outcome in found), NOTHING_TO_DO)


def outcome_of(error: FloodmarkError) -> str:
    """Refused: nothing is sent until an operator chooses or corrects something. Failed: the next run tries again."""
    return REFUSED if isinstance(error, Corrupt | BelowRetention) else FAILED
