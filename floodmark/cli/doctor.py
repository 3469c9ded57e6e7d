"""`floodmark doctor`: every part that a lake needs, checked one by one. Starts no JVM, unless `--deep` asks Spark."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark import __version__
from floodmark.cli.output import Output
from floodmark.errors import FloodmarkError
from floodmark.repair.examine import Check, examine_executors, examine_lake, examine_machine, examine_store
from floodmark.storage import root_location


def run(
    context: typer.Context,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Every file of every readable version, not a sample, and a task on each executor."),
    ] = False,
) -> None:
    """Check Java, Python, the store, the catalog, the journal, the files and the jobs, and say what to do."""
    checks = examine_machine()
    try:
        # Before the lake is opened: what a catalog says of files is no help when the store is away.
        stores = examine_store(root_location(context.obj.path), context.obj.settings.storage)
        checks += stores
        with context.obj.open() as lake:
            if all(check.passed for check in stores):
                checks += examine_lake(lake.catalog, deep=deep)
            if deep:
                checks += examine_executors(lake.sessions, __version__, lake.location, lake.catalog.storage.options)
    except FloodmarkError as error:
        checks.append(Check("lake", False, str(error)))
    _show(context.obj.output, checks)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _show(output: Output, checks: list[Check]) -> None:
    rows = [
        {"check": check.name, "result": "ok" if check.passed else "FAILED", "detail": check.detail} for check in checks
    ]
    output.rows(rows, ("check", "result", "detail"), name="checks", empty="")
