"""`floodmark drop TABLE`: take a table out of the lake; shows the plan, and does it with --apply."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.cli.plan import show_steps


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    apply: Annotated[bool, typer.Option("--apply", help="Really drop it.")] = False,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Drop a table; `undrop` brings it back until its versions expire."""
    output = context.obj.output
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_drop(table)
        if output.as_json:
            output.result(plan.as_dict())
        else:
            show_steps(output, plan)
        if plan.refused:
            raise typer.Exit(2)
        output.note("Add --apply to do it.")
        return
    with context.obj.open(read_only=False) as lake:
        commit = lake.drop_table(table, message=message)
    output.result(commit.as_dict(), text=f"{table} dropped, version {commit.version}")
