"""`floodmark show TABLE`: one table. No Spark."""

from __future__ import annotations

from typing import Annotated

import typer


def run(context: typer.Context, table: Annotated[str, typer.Argument(help="The table.")]) -> None:
    """Show a table's columns, layout and size."""
    with context.obj.open() as lake:
        details = lake.show(table)
    if context.obj.output.as_json:
        context.obj.output.result(details)
        return
    columns = details.pop("columns")
    context.obj.output.result(details)
    context.obj.output.rows(columns, ("name", "type", "required", "comment"), name="columns", empty="no columns")
