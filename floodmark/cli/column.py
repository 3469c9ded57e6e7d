"""The commands for one column of a table: `column add`, `rename` and `drop`. Each is one version.

`drop` loses data: it shows its plan; `--apply` does it. Several changes at once are declared in a file (`apply`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.cli.context import IfVersion, OnBranch
from floodmark.cli.schema import show_plan
from floodmark.errors import Invalid
from floodmark.model import MAIN

app = typer.Typer(help="Add, rename and drop columns.", no_args_is_help=True)

Table = Annotated[str, typer.Argument(help="The table.")]
Message = Annotated[str, typer.Option(help="Commit message.")]
_WHOLE = ("int", "integer", "long", "bigint")


@app.command("add")
def add(
    context: typer.Context,
    table: Table,
    name: Annotated[str, typer.Argument(help="The new column.")],
    kind: Annotated[str, typer.Argument(metavar="TYPE", help='Its type in Spark\'s words, like "decimal(10,2)".')],
    default: Annotated[
        str | None, typer.Option(help="Value of all rows that do not bring the column, existing rows included.")
    ] = None,
    required: Annotated[bool, typer.Option("--required", help="The column is never null.")] = False,
    comment: Annotated[str | None, typer.Option(help="What it means.")] = None,
    fill_later: Annotated[
        bool, typer.Option("--fill-later", help="Do not fill existing rows with the default.")
    ] = False,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Message = "",
) -> None:
    """Add a column. Existing rows are null in it, or have its default."""
    value = None if default is None else _value(default, kind)
    with context.obj.open(read_only=False) as lake:
        commit = lake.add_column(
            table,
            name,
            kind,
            default=value,
            required=required,
            comment=comment,
            fill_later=fill_later,
            branch=branch,
            message=message,
            if_version=if_version,
        )
    context.obj.output.result(commit.as_dict(), text=f"{table} has the column {name}, version {commit.version}")


def _value(text: str, kind: str) -> str | int | bool:
    """A default as the column's type has it; the lake checks whether the type can have one."""
    if kind.strip().lower() == "boolean" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind.strip().lower() in _WHOLE:
        try:
            return int(text)
        except ValueError:
            advice = "Give a whole number."
            raise Invalid("the default is not of the column's type", default=text, type=kind, advice=advice) from None
    return text


@app.command("rename")
def rename(
    context: typer.Context,
    table: Table,
    column: Annotated[str, typer.Argument(help="The column.")],
    new_name: Annotated[str, typer.Argument(help="Its new name.")],
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Message = "",
) -> None:
    """Rename a column; no file is rewritten."""
    with context.obj.open(read_only=False) as lake:
        commit = lake.rename_column(table, column, new_name, branch=branch, message=message, if_version=if_version)
    text = f"{table}.{column} renamed to {new_name}, version {commit.version}"
    context.obj.output.result(commit.as_dict(), text=text)


@app.command("drop")
def drop(
    context: typer.Context,
    table: Table,
    column: Annotated[str, typer.Argument(help="The column.")],
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Message = "",
) -> None:
    """Drop a column, with its values. Only older versions keep them."""
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_drop_column(table, column, branch=branch)
        show_plan(context.obj.output, plan)
        return
    with context.obj.open(read_only=False) as lake:
        commit = lake.drop_column(table, column, branch=branch, message=message, if_version=if_version)
    context.obj.output.result(commit.as_dict(), text=f"{table}.{column} dropped, version {commit.version}")
