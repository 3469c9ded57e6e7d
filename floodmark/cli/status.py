"""`floodmark status`: is it fine, and if not, what is wrong. No Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from floodmark.cli.backfill_text import job_line
from floodmark.cli.sink_text import age_text, sink_line
from floodmark.report.status import lake_status
from floodmark.shown import count_of


def run(context: typer.Context) -> None:
    """Show the lake's state and health, what is on its way in and out, and what maintenance is due."""
    with context.obj.open() as lake:
        status = lake_status(lake.catalog, context.obj.settings.maintain)
    context.obj.output.result(status if context.obj.output.as_json else _for_people(status))


def _for_people(status: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields, each a line; what blocks is the first part of health."""
    shown = {name: value for name, value in status.items() if name != "blocking"}
    shown["last_maintenance"] = [_last(verb, run) for verb, run in status["last_maintenance"].items()]
    # What it says of tasks and files is a line of its own here.
    shown["health"] = status["health"].replace("see `floodmark status`", "see below")
    shown["sinks"] = [sink_line(sink) for sink in status["sinks"]]
    shown["spools"] = [_spool_line(spool) for spool in status["spools"]]
    shown["daemon"] = None if status["daemon"] is None else _daemon_text(status["daemon"])
    if status["jobs"] is not None:
        shown["jobs"] = [job_line(job) for job in status["jobs"]]
    return shown


def _last(verb: str, run: dict[str, Any] | None) -> str:
    if run is None:
        return f"{verb} never"
    failed = f" (FAILED: {'; '.join(run['failed'])})" if run["failed"] else ""
    return f"{verb} {run['outcome']} {run['at']}{failed}"


def _spool_line(spool: Mapping[str, Any]) -> str:
    """Rows of one table that are on their way in."""
    rows, oldest, bad = spool["waiting_rows"], spool["oldest_ms"], spool["quarantined"]
    waiting = f", {count_of(rows, 'row')} waiting" if rows else ""
    waiting += f", the oldest for {age_text(oldest)}" if rows and oldest is not None else ""
    aside = f", {bad} in quarantine" if bad else ""
    error = spool["error"]
    refused = "" if error is None else f" (REFUSED: {error['kind']}: {error['message']})"
    return f"{spool['table']} {spool['state']}{waiting}{aside}{refused}"


def _daemon_text(daemon: Mapping[str, Any]) -> str:
    """Who it is, and below that a line for each task."""
    where = f" at {daemon['address']}" if daemon["address"] else ""
    state = "running" if daemon["alive"] else "died"
    who = f"{state} on {daemon['host']} (pid {daemon['pid']}){where} since {daemon['since']}"
    return "\n".join([who, *(_task_line(task) for task in daemon["tasks"])])


def _task_line(task: Mapping[str, Any]) -> str:
    last = f", last {task['last_outcome']} {task['last_ended']}" if task["last_ended"] else ""
    error = task["last_error"]
    failed = (
        "" if error is None else f" (FAILED {count_of(task['failures'], 'time')}: {error['kind']}: {error['message']})"
    )
    lines = [f"{task['name']} {task['state']}{last}{failed}", *map(_bad_file, task.get("bad_files") or ())]
    left = task.get("set_aside", 0) - len(lines) + 1
    return "\n".join([*lines, *([f"  and {count_of(left, 'more bad file')}"] if left > 0 else [])])


def _bad_file(bad: Mapping[str, Any]) -> str:
    """A file that was refused: which line, why, and where it lies."""
    line = "" if bad["line"] is None else f", line {bad['line']}"
    return f"  bad file {bad['file']}{line}: {bad['reason']} (in {bad['path']})"
