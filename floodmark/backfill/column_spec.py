"""What a column backfill is: the part that stays for good, and the settings of a run. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from floodmark.backfill.column_plan import Limits
from floodmark.catalog.job import COLUMN, Job
from floodmark.errors import Corrupt, Invalid


@dataclass(frozen=True)
class ColumnSpec:
    """What a column backfill is. `announce`: filled rows get new sequences, so that consumers see them."""

    table: str
    column: str
    expression: str
    announce: bool
    batch_rows: int
    batch_bytes: int
    pause_s: float

    @property
    def name(self) -> str:
        return f"{self.table}.{self.column}"

    @property
    def limits(self) -> Limits:
        return Limits(self.batch_rows, self.batch_bytes)

    def pinned(self, table_id: str) -> dict[str, Any]:
        """What the job is for good."""
        return {
            "table": self.table,
            "table_id": table_id,
            "column": self.column,
            "expression": self.expression,
            "announce": self.announce,
        }

    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name in ("batch_rows", "batch_bytes", "pause_s")}


def fold(expression: str, join: str | None, on: str | None) -> str:
    """The expression over the row alone: from rows of another table that match, it becomes a query over these."""
    if (join is None) != (on is None):
        raise Invalid("join and on go together", advice='Like: --join "orders o" --on "o.user_id = users.id".')
    if join is None or on is None:
        return expression.strip()
    parts = {"expression": expression, "join": join, "on": on}
    if empty := [name for name, text in parts.items() if not text.strip()]:
        raise Invalid("this text is empty", role=", ".join(empty))
    return f"(select {expression.strip()} from {join.strip()} where {on.strip()})"


def spec_from_job(job: Job) -> ColumnSpec:
    """What a job was started as last."""
    if job.kind != COLUMN:
        raise Invalid("this is no column backfill", job=job.name, kind=job.kind)
    try:
        names = ("table", "column", "expression", "announce", "batch_rows", "batch_bytes", "pause_s")
        return ColumnSpec(**{name: job.settings[name] for name in names})
    except KeyError as error:
        raise Corrupt("a job's record cannot be understood", job=job.name, cause=error) from error
