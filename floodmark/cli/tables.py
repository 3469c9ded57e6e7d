"""`floodmark tables`: what is in the lake. No Spark."""

from __future__ import annotations

import typer


def run(context: typer.Context) -> None:
    """List the tables."""
    with context.obj.open() as lake:
        context.obj.output.rows(
            lake.tables(),
            ("table", "rows", "files", "bytes", "sequence", "version"),
            name="tables",
            empty="no tables yet; `floodmark load TABLE FILE --create` makes one from a file",
        )
