"""`floodmark tables`: what is in the lake. No Spark."""

from __future__ import annotations

import typer

from floodmark.cli.context import OnBranch
from floodmark.model import MAIN


def run(context: typer.Context, branch: OnBranch = MAIN) -> None:
    """List the tables."""
    with context.obj.open() as lake:
        context.obj.output.rows(
            lake.tables(branch=branch, keeping=context.obj.settings.maintain),
            ("table", "rows", "files", "bytes", "sequence", "version"),
            name="tables",
            empty="no tables yet; `floodmark load TABLE FILE --create` makes one from a file",
        )
