"""`floodmark show TABLE`: one table. No Spark."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.model import MAIN


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    branch: OnBranch = MAIN,
) -> None:
    """Show a table's columns, layout, size and health."""
    with context.obj.open() as lake:
        details = lake.show(table, branch=branch, keeping=context.obj.settings.maintain)
    output = context.obj.output
    if output.as_json:
        output.result(details)
        return
    columns, consumers = details.pop("columns"), details.pop("consumers")
    details["last_maintenance"] = [
        f"{verb} {run['outcome']} {run['at']}" for verb, run in details["last_maintenance"].items()
    ]
    output.result(details)
    output.rows(
        columns, ("name", "type", "required", "refers_to", "filled", "comment"), name="columns", empty="no columns"
    )
    if consumers:
        output.rows(consumers, ("name", "mark", "lag", "protected"), name="consumers", empty="")
