"""`floodmark query "select …"`: every table named is read at one version."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.cli.branch_option import OnBranch
from floodmark.model import MAIN
from floodmark.rows.query import collect


def run(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="A Spark SQL query.")],
    version: Annotated[int | None, typer.Option(help="Read this version.")] = None,
    at: Annotated[str | None, typer.Option(help="Read as it was then, like 2026-11-15T10:00:00Z.")] = None,
    branch: OnBranch = MAIN,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many rows.")] = 100,
) -> None:
    """Run a query."""
    with context.obj.open() as lake:
        frame = lake.sql(query, version=version, at=at, branch=branch)
        rows = [row.asDict(recursive=True) for row in collect(frame.limit(limit + 1))]
        context.obj.output.rows(rows[:limit], frame.columns, name="rows", empty="no rows")
        if len(rows) > limit:
            context.obj.output.note(f"(more than {limit} rows; --limit shows more)")
