"""`floodmark status`: is it fine, and if not, what is wrong. No Spark."""

from __future__ import annotations

import typer

from floodmark.cli.backfill import job_line
from floodmark.cli.sink_text import age_text, sink_line
from floodmark.json_form import Json, JsonObject, as_json
from floodmark.report.daemon import DaemonReport, TaskReport
from floodmark.report.maintenance import LastRun
from floodmark.report.spools import SpoolReport
from floodmark.report.status import Status, lake_status
from floodmark.shown import count_of


def run(context: typer.Context) -> None:
    """Show the lake's state and health, what is on its way in and out, and what maintenance is due."""
    with context.obj.open() as lake:
        status = lake_status(lake.catalog, context.obj.settings.maintain)
    context.obj.output.result(as_json(status) if context.obj.output.as_json else _for_people(status))


def _for_people(status: Status) -> dict[str, Json]:
    """The same fields, each a line; what blocks is the first part of health."""
    shown = {name: value for name, value in as_json(status).items() if name != "blocking"}
    shown["last_maintenance"] = [_last(verb, run) for verb, run in status.last_maintenance.items()]
    # What it says of tasks and files is a line of its own here.
    shown["health"] = status.health.replace("see `floodmark status`", "see below")
    shown["sinks"] = [sink_line(sink) for sink in status.sinks]
    shown["spools"] = [_spool_line(spool) for spool in status.spools]
    shown["daemon"] = None if status.daemon is None else _daemon_text(status.daemon)
    if status.jobs is not None:
        shown["jobs"] = [job_line(job) for job in status.jobs]
    return shown


def _last(verb: str, run: LastRun | None) -> str:
    if run is None:
        return f"{verb} never"
    failed = f" (FAILED: {'; '.join(run.failed)})" if run.failed else ""
    return f"{verb} {run.outcome} {run.at}{failed}"


def _spool_line(spool: SpoolReport) -> str:
    """Rows of one table that are on their way in."""
    rows, oldest, bad, error = spool.waiting_rows, spool.oldest_ms, spool.quarantined, spool.error
    waiting = f", {count_of(rows, 'row')} waiting" if rows else ""
    waiting += f", the oldest for {age_text(oldest)}" if rows and oldest is not None else ""
    aside = f", {bad} in quarantine" if bad else ""
    refused = "" if error is None else f" (REFUSED: {error.kind}: {error.message})"
    return f"{spool.table} {spool.state}{waiting}{aside}{refused}"


def _daemon_text(daemon: DaemonReport) -> str:
    """Who it is, and below that a line for each task."""
    where = f" at {daemon.address}" if daemon.address else ""
    state = "running" if daemon.alive else "died"
    who = f"{state} on {daemon.host} (pid {daemon.pid}){where} since {daemon.since}"
    return "\n".join([who, *(_task_line(task) for task in daemon.tasks)])


def _task_line(task: TaskReport) -> str:
    last = f", last {task.last_outcome} {task.last_ended}" if task.last_ended else ""
    error = task.last_error
    failed = "" if error is None else f" (FAILED {count_of(task.failures, 'time')}: {error.kind}: {error.message})"
    lines = [f"{task.name} {task.state}{last}{failed}", *map(_bad_file, task.bad_files)]
    left = task.set_aside - len(task.bad_files)
    return "\n".join([*lines, *([f"  and {count_of(left, 'more bad file')}"] if left > 0 else [])])


def _bad_file(bad: JsonObject) -> str:
    """A file that was refused: which line, why, and where it lies."""
    line = "" if bad["line"] is None else f", line {bad['line']}"
    return f"  bad file {bad['file']}{line}: {bad['reason']} (in {bad['path']})"
