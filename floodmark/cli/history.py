"""`floodmark history`: who changed what, when. No Spark."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark import clock
from floodmark.model import TableCommit


def run(
    context: typer.Context,
    table: Annotated[str | None, typer.Option(help="Only commits that touched this table.")] = None,
    branch: Annotated[str | None, typer.Option(help="Only commits that this branch stands on.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
) -> None:
    """List the commits, newest first."""
    with context.obj.open() as lake:
        commits = lake.history(limit=limit, table=table, branch=branch)
    if context.obj.output.as_json:
        context.obj.output.result({"commits": [commit.as_dict() for commit in commits]})
        return
    rows = [
        {
            "version": commit.version,
            "time": clock.format_time(commit.committed_ms),
            "branch": commit.branch,
            "kind": commit.kind,
            "actor": commit.actor,
            "tables": " ".join(_counts(one) for one in commit.tables),
            "message": commit.message,
        }
        for commit in commits
    ]
    context.obj.output.rows(rows, rows[0] if rows else (), name="commits", empty="no commits yet")


def _counts(part: TableCommit) -> str:
    """A table with its rows added, updated and deleted: orders+5~2-1."""
    signs = {"+": part.rows_added, "~": part.rows_updated, "-": part.rows_deleted}
    shown = "".join(f"{sign}{count}" for sign, count in signs.items() if count)
    return f"{part.table}{shown or '+0'}"
