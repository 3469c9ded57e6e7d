"""`floodmark status`: is it fine, and if not, what is wrong. No Spark."""

from __future__ import annotations

from typing import Any

import typer

from floodmark.cli.backfill_text import job_line
from floodmark.cli.sink_text import sink_line
from floodmark.report import lake_status


def run(context: typer.Context) -> None:
    """Show the lake's state and health, and what maintenance is due."""
    with context.obj.open() as lake:
        status = lake_status(lake.catalog, context.obj.settings.maintain)
    if not context.obj.output.as_json:
        if status["last_maintenance"] is not None:
            status["last_maintenance"] = [_last(verb, run) for verb, run in status["last_maintenance"].items()]
        status["sinks"] = [sink_line(sink) for sink in status["sinks"]]
        if status["jobs"] is not None:
            status["jobs"] = [job_line(job) for job in status["jobs"]]
    context.obj.output.result(status)


def _last(verb: str, run: dict[str, Any] | None) -> str:
    if run is None:
        return f"{verb} never"
    failed = f" (FAILED: {'; '.join(run['failed'])})" if run["failed"] else ""
    return f"{verb} {run['outcome']} {run['at']}{failed}"
