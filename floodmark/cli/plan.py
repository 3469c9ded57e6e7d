"""`floodmark plan [FILE]`: what it takes to give the lake the tables that a file declares. Changes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.errors import Invalid

if TYPE_CHECKING:
    from floodmark.cli.context import Context
    from floodmark.cli.output import Output
    from floodmark.schema.plan import Plan

FILE_HELP = "A file that declares tables (default: [tables.…] of floodmark.toml)."
NOTHING = "nothing to do: the tables are as declared"
_COLUMNS = ("table", "action", "column", "kind", "text")


def run(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help=FILE_HELP)] = None,
) -> None:
    """Show the steps from the lake as it is to the tables that a file declares."""
    output = context.obj.output
    with context.obj.open() as lake:
        plan = lake.plan(declared(context.obj, file))
    if output.as_json:
        output.result(plan.as_dict())
    else:
        show_steps(output, plan)
        if plan.outcome == "planned":
            command = _apply(context.obj, file, allow=bool(plan.destructive))
            output.note(f"plan {plan.id}: `{command}` does it; --expect {plan.id} does this one or nothing.")
    if plan.refused:
        raise typer.Exit(2)


def _apply(context: Context, file: Path | None, *, allow: bool) -> str:
    """The command for the same tables: without the file's name it would apply others."""
    where = [] if context.config is None else ["--config", str(context.config)]
    named = [] if file is None else [str(file)]
    return shlex.join(["floodmark", *where, "apply", *named, *(["--allow-destructive"] if allow else [])])


def declared(context: Context, file: Path | None) -> Path | Mapping[str, Any]:
    """The file; without one, the tables of the settings."""
    if file is not None:
        return file
    if not context.settings.tables:
        raise Invalid("no tables are declared", advice="Name a file, or write [tables.NAME] into floodmark.toml.")
    return context.settings.tables


def show_steps(output: Output, plan: Plan) -> None:
    """The steps as a table, then why those that are refused are, and what to do about it."""
    output.rows([step.as_dict() for step in plan.steps], _COLUMNS, name="steps", empty=NOTHING)
    for step in plan.destructive:
        output.note(f"{step.table}: {step.text}\n  this loses data")
    for step in plan.refused:
        output.note(f"{step.table}: {step.text}\n  refused: {step.reason}\n  {step.way}")
