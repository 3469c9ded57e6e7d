"""`floodmark apply [FILE]`: give the lake the tables that a file declares, all of it in one version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.plan import FILE_HELP, NOTHING, declared, show_steps

if TYPE_CHECKING:
    from floodmark.schema.plan import Plan


def run(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help=FILE_HELP)] = None,
    expect: Annotated[
        str | None, typer.Option(help="Only if the plan is this one, as `floodmark plan` showed it.")
    ] = None,
    fill_later: Annotated[
        bool, typer.Option("--fill-later", help="Leave older rows without the defaults of new columns.")
    ] = False,
    allow_destructive: Annotated[
        bool, typer.Option("--allow-destructive", help="Also steps that lose data: `floodmark plan` names them.")
    ] = False,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Give the lake the tables that a file declares."""
    output = context.obj.output
    source = declared(context.obj, file)
    plans: list[Plan] = []
    with context.obj.open(read_only=False) as lake:
        commit = lake.apply(
            source,
            expect=expect,
            fill_later=fill_later,
            allow_destructive=allow_destructive,
            message=message,
            told=plans.append,
        )
    plan = plans[-1]
    done = commit.outcome == "committed"
    if done and not output.as_json:
        show_steps(output, plan)
    steps = [step.as_dict() for step in plan.steps] if done else []
    text = f"version {commit.version}" if done else NOTHING
    output.result({**commit.as_dict(), "plan": plan.id, "steps": steps}, text=text)
    if fill_later and done:
        for table in plan.tables:
            for fill in table.fills:
                output.note(
                    f'Fill the older rows: floodmark backfill column {table.name} {fill.column} "{fill.expression}"'
                )
