"""The commands for tables as code and for whole tables: `plan`, `apply`, `drop`, `undrop` and `rename`.

`apply` changes the tables to match a file, all in one version; `plan` shows the steps and changes nothing (I17). `drop`
shows its plan; `--apply` does it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.context import IfVersion, OnBranch
from floodmark.errors import Invalid
from floodmark.json_form import JsonObject
from floodmark.model import DECLARED, MAIN

if TYPE_CHECKING:
    from floodmark.cli.context import CommandContext
    from floodmark.cli.output import Output
    from floodmark.schema.plan import Plan
    from floodmark.write.undrop import Undropped


# ── plan ──


FILE_HELP = "A file that declares tables (default: [tables.…] of floodmark.toml)."
NOTHING = "nothing to do: the tables are as declared"
_COLUMNS = ("table", "action", "column", "kind", "text")


def plan(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help=FILE_HELP)] = None,
) -> None:
    """Show what `floodmark apply` would change to match a file. Changes nothing."""
    output = context.obj.output
    with context.obj.open() as lake:
        plan = lake.plan(declared(context.obj, file))
    if output.as_json:
        output.result(plan.as_dict())
    else:
        show_steps(output, plan)
        if plan.outcome == "planned":
            command = _apply(context.obj, file, allow=bool(plan.destructive))
            output.note(f"plan {plan.id}: `{command}` applies it; add --expect {plan.id} to apply exactly this plan.")
    if plan.refused:
        raise typer.Exit(2)


def _apply(context: CommandContext, file: Path | None, *, allow: bool) -> str:
    """The command for the same tables: without the file's name it would apply others."""
    where = [] if context.config is None else ["--config", str(context.config)]
    named = [] if file is None else [str(file)]
    return shlex.join(["floodmark", *where, "apply", *named, *(["--allow-destructive"] if allow else [])])


def declared(context: CommandContext, file: Path | None) -> Path | Mapping[str, JsonObject]:
    """The file; without one, the tables of the settings."""
    if file is not None:
        return file
    if not context.settings.tables:
        raise Invalid("no tables are declared", advice="Give a file, or add [tables.NAME] to floodmark.toml.")
    return context.settings.tables


def show_steps(output: Output, plan: Plan) -> None:
    """The steps as a table, then why those that are refused are, and what to do about it."""
    output.rows([step.as_dict() for step in plan.steps], _COLUMNS, name="steps", empty=NOTHING)
    for step in plan.destructive:
        output.note(f"{step.table}: {step.text}\n  this loses data")
    for step in plan.refused:
        output.note(f"{step.table}: {step.text}\n  refused: {step.reason}\n  {step.way}")


def show_plan(output: Output, plan: Plan) -> None:
    """The plan of a command that loses data, and how to do it; exit code 2 if it is refused."""
    if output.as_json:
        output.result(plan.as_dict())
    else:
        show_steps(output, plan)
    if plan.refused:
        raise typer.Exit(2)
    output.note("Add --apply to do it.")


# ── apply ──


def apply(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help=FILE_HELP)] = None,
    expect: Annotated[
        str | None, typer.Option(help="Apply only if the plan has this id, as shown by `floodmark plan`.")
    ] = None,
    fill_later: Annotated[
        bool, typer.Option("--fill-later", help="Do not fill existing rows with the defaults of new columns.")
    ] = False,
    allow_destructive: Annotated[
        bool, typer.Option("--allow-destructive", help="Also apply steps that lose data (`floodmark plan` lists them).")
    ] = False,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Change the tables of the lake to match a file, in one version."""
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
            if_version=if_version,
            told=plans.append,
        )
    plan = plans[-1]
    done = commit.outcome in ("committed", DECLARED)
    if done and not output.as_json:
        show_steps(output, plan)
    steps = [step.as_dict() for step in plan.steps] if done else []
    texts = {"committed": f"version {commit.version}", DECLARED: f"indexes changed; still version {commit.version}"}
    text = texts.get(commit.outcome, NOTHING)
    output.result({**commit.as_dict(), "plan": plan.id, "steps": steps}, text=text)
    if fill_later and done:
        for table in plan.tables:
            for fill in table.fills:
                output.note(
                    f'Fill the older rows: floodmark backfill column {table.name} {fill.column} "{fill.expression}"'
                )


# ── drop, undrop and rename ──


def drop(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Drop a table. `undrop` restores it until its versions expire."""
    output = context.obj.output
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_drop(table, branch=branch)
        show_plan(output, plan)
        return
    with context.obj.open(read_only=False) as lake:
        commit = lake.drop_table(table, branch=branch, message=message, if_version=if_version)
    output.result(commit.as_dict(), text=f"{table} dropped, version {commit.version}")


def undrop(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table that was dropped.")],
    version: Annotated[
        int | None,
        typer.Option(help="A version that has the table, if several tables had this name (default: the last)."),
    ] = None,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Restore a dropped table, while a version that has it can be read."""
    output = context.obj.output
    found: list[Undropped] = []
    with context.obj.open(read_only=False) as lake:
        commit = lake.undrop(table, version=version, message=message, if_version=if_version, told=found.append)
    back = found[-1]
    text = f"{table} restored with {back.rows} rows, as of version {back.dropped_version - 1}; version {commit.version}"
    data = {"from_version": back.dropped_version - 1, "references_lost": list(back.references_lost)}
    output.result({**commit.as_dict(), **data}, text=text)
    if back.references_lost:
        columns = ", ".join(back.references_lost)
        output.note(f"References are not checked any more: {columns}. Declare them again with `floodmark apply`.")


def rename(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    new_name: Annotated[str, typer.Argument(help="Its new name.")],
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Rename a table. Older versions have it under its old name."""
    output = context.obj.output
    with context.obj.open(read_only=False) as lake:
        commit = lake.rename_table(table, new_name, branch=branch, message=message, if_version=if_version)
    output.result(commit.as_dict(), text=f"{table} renamed to {new_name}, version {commit.version}")
    settings = context.obj.settings
    if branch == MAIN and table in settings.tables:
        output.note(f"Rename [tables.{table}] in the settings too: `floodmark apply` would create the table again.")
    for sink, section in settings.sinks.items():
        if table in (named := section.get("tables", ()), *(named if isinstance(named, list) else ())):
            output.note(f"Rename it in [sinks.{sink}] of the settings too; the sink follows it in any case.")
