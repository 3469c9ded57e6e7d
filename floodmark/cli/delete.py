"""`floodmark delete TABLE --where …`: copy-on-write delete; shows what would go, and does it with --apply."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.cli.progress import staging_progress
from floodmark.model import MAIN

NOTHING = "nothing to do: no row matches"


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    where: Annotated[str, typer.Option(help="Which rows, in Spark SQL, like \"country = 'XX'\".")],
    apply: Annotated[bool, typer.Option("--apply", help="Really delete.")] = False,
    batch: Annotated[str | None, typer.Option(help="An id for this delete: the same id again is a no-op.")] = None,
    branch: OnBranch = MAIN,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Delete the rows that a condition matches."""
    output = context.obj.output
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_delete(table, where, branch=branch)
        text = (
            f"would delete {plan['rows']} of {plan['rows_total']} rows of {table}, "
            f"which are in {plan['files']} of {plan['files_total']} files"
        )
        output.result({"outcome": "planned", **plan}, text=text if plan["rows"] else NOTHING)
        if plan["rows"]:
            output.note("Add --apply to do it.")
        return
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake, staging_progress(output) as progress:
        note = message or f"delete where {where}"
        commit = lake.delete(table, where, batch=batch, message=note, branch=branch, progress=progress)
    rows = sum(part.rows_deleted for part in commit.tables) if commit.outcome == "committed" else 0
    data = {**commit.as_dict(), "rows": rows, "seconds": round(time.monotonic() - started, 3)}
    if commit.outcome == "committed":
        text = f"{rows} rows deleted from {table}, version {commit.version}"
    elif commit.outcome == "already_committed":
        text = f"nothing to do: batch {batch} is in {table} since version {commit.version}"
    else:
        text = NOTHING
    output.result(data, text=text)
