"""`floodmark query "select …"`: every table named is read at one version.

The answer is never cut without a word: as JSON, and where stdout is no terminal, all rows are written, as they come. A
terminal shows the first hundred, and stderr says so; `--limit` cuts anywhere, and JSON then tells `truncated`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.model import MAIN
from floodmark.rows.sql.query import stream

SHOWN_ROWS = 100


def run(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="A Spark SQL query.")],
    version: Annotated[int | None, typer.Option(help="Read this version.")] = None,
    at: Annotated[str | None, typer.Option(help="Read as it was then, like 2026-11-15T10:00:00Z.")] = None,
    branch: OnBranch = MAIN,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many rows (default: 100 on a terminal, else all).")
    ] = None,
) -> None:
    """Run a query."""
    output = context.obj.output
    with context.obj.open() as lake:
        frame = lake.sql(query, version=version, at=at, branch=branch)
        most = limit
        if limit is None and not output.as_json and sys.stdout.isatty():
            most = SHOWN_ROWS
        rows = (row.asDict(recursive=True) for row in stream(frame, None if most is None else most + 1))
        if output.stream(rows, frame.columns, name="rows", empty="no rows", limit=most):
            output.note(f"(more than {most} rows; --limit shows more, --json all of them)")
