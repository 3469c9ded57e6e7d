"""`floodmark status`: is it fine, and if not, what is wrong. No Spark."""

from __future__ import annotations

import typer


def run(context: typer.Context) -> None:
    """Show the lake's state and health."""
    with context.obj.open() as lake:
        context.obj.output.result(lake.status())
