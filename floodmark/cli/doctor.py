"""`floodmark doctor`: every part that a lake needs, checked one by one. Starts no JVM."""

from __future__ import annotations

import typer

from floodmark.cli.output import Output
from floodmark.errors import FloodmarkError
from floodmark.recover.examine import Check, examine_lake, examine_machine


def run(context: typer.Context) -> None:
    """Check Java, Python, the catalog, the journal, the tables' files and the jobs, and say what to do."""
    checks = examine_machine()
    try:
        with context.obj.open() as lake:
            checks += examine_lake(lake.catalog)
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
