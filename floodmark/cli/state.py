"""The commands that show the state of a lake: `status`, `doctor`, `tables`, `show`, `history` and `audit`.

They read the catalog and change nothing (I17). None of them starts Spark, except `doctor --deep`, which runs a task on
every executor.
"""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark import __version__, clock
from floodmark.cli.backfill import job_line
from floodmark.cli.context import OnBranch
from floodmark.cli.index import COLUMNS as INDEX_COLUMNS
from floodmark.cli.index import index_row, show_advice
from floodmark.cli.output import Output, size_text
from floodmark.cli.sink_text import age_text, sink_line
from floodmark.errors import FloodmarkError
from floodmark.json_form import Json, JsonObject, as_json
from floodmark.model import MAIN, TableCommit
from floodmark.repair.examine import Check, examine_executors, examine_lake, examine_machine, examine_store
from floodmark.report.daemon import DaemonReport, TaskReport
from floodmark.report.indexes import IndexTotals
from floodmark.report.maintenance import LastRun
from floodmark.report.spools import SpoolReport
from floodmark.report.status import Status, WaitingLine, audit_line, lake_status
from floodmark.report.tables import table_details
from floodmark.shown import count_of
from floodmark.storage import root_location

# ── status ──


def status(context: typer.Context) -> None:
    """Show the lake's state and health, spools, sinks, jobs, and due maintenance."""
    with context.obj.open() as lake:
        status = lake_status(lake.catalog, context.obj.settings.maintain)
    context.obj.output.result(as_json(status) if context.obj.output.as_json else _for_people(status))


def _for_people(status: Status) -> dict[str, Json]:
    """The same fields, each a line; what blocks is the first part of health."""
    shown = {name: value for name, value in as_json(status).items() if name != "blocking"}
    shown["last_maintenance"] = [_last(verb, run) for verb, run in status.last_maintenance.items()]
    # What it says of tasks and files is a line of its own here.
    shown["health"] = status.health.replace("see `floodmark status`", "see below")
    shown["waiting"] = [_waiting_line(one) for one in status.waiting]
    shown["sinks"] = [sink_line(sink) for sink in status.sinks]
    shown["spools"] = [_spool_line(spool) for spool in status.spools]
    shown["indexes"] = _indexes_text(status.indexes)
    shown["daemon"] = None if status.daemon is None else _daemon_text(status.daemon)
    if status.jobs is not None:
        shown["jobs"] = [job_line(job) for job in status.jobs]
    return shown


def _last(verb: str, run: LastRun | None) -> str:
    if run is None:
        return f"{verb} never"
    failed = f" (FAILED: {'; '.join(run.failed)})" if run.failed else ""
    return f"{verb} {run.outcome} {run.at}{failed}"


def _waiting_line(one: WaitingLine) -> str:
    """A writer that waits for others to publish to its tables."""
    behind = f", behind {', '.join(one.behind)}" if one.behind else ""
    return f"{one.operation} ({one.kind} by {one.actor}) for {', '.join(one.tables)} since {one.since}{behind}"


def _spool_line(spool: SpoolReport) -> str:
    """Rows of one table that are on their way in."""
    rows, oldest, bad, error = spool.waiting_rows, spool.oldest_ms, spool.quarantined, spool.error
    waiting = f", {count_of(rows, 'row')} waiting" if rows else ""
    waiting += f", the oldest for {age_text(oldest)}" if rows and oldest is not None else ""
    aside = f", {bad} in quarantine" if bad else ""
    refused = "" if error is None else f" (REFUSED: {error.kind}: {error.message})"
    return f"{spool.table} {spool.state}{waiting}{aside}{refused}"


def _indexes_text(indexes: IndexTotals) -> str | None:
    if not indexes.indexes:
        return None
    broken = f", {indexes.broken} broken" if indexes.broken else ""
    segments = f"{count_of(indexes.segments, 'segment')}, {size_text(indexes.bytes)}{broken}"
    return f"{indexes.indexes} ({segments}); `floodmark index list` shows what they cover"


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


# ── doctor ──


def doctor(
    context: typer.Context,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Check every file of every readable version, not a sample, and run a task on each executor."
        ),
    ] = False,
) -> None:
    """Check Java, Python, storage, catalog, journal, files and jobs, and suggest fixes."""
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


# ── tables and their past ──


def tables(context: typer.Context, branch: OnBranch = MAIN) -> None:
    """List the tables."""
    with context.obj.open() as lake:
        context.obj.output.rows(
            lake.tables(branch=branch, keeping=context.obj.settings.maintain),
            ("table", "rows", "files", "bytes", "sequence", "version"),
            name="tables",
            empty="no tables yet; `floodmark load TABLE FILE --create` creates one from a file",
        )


def show(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    branch: OnBranch = MAIN,
) -> None:
    """Show a table's columns, layout, size and health."""
    with context.obj.open() as lake:
        head = lake.catalog.history.head(table, branch)
        found = table_details(lake.engine, head, context.obj.settings.maintain)
    output = context.obj.output
    if output.as_json:
        output.result(as_json(found))
        return
    lists = ("columns", "indexes", "consumers")
    fields = {name: value for name, value in as_json(found).items() if name not in lists}
    fields["last_maintenance"] = [f"{verb} {run.outcome} {run.at}" for verb, run in found.last_maintenance.items()]
    output.result(fields)
    columns = [as_json(one) for one in found.columns]
    output.rows(
        columns, ("name", "type", "required", "refers_to", "filled", "comment"), name="columns", empty="no columns"
    )
    if found.indexes is None:
        output.note("What the indexes cover is unknown: a file is missing, see `floodmark doctor`.")
    elif found.indexes:
        output.rows(list(map(index_row, found.indexes)), INDEX_COLUMNS, name="indexes", empty="")
        show_advice(output, found.indexes)
    if found.consumers:
        consumers = [as_json(one) for one in found.consumers]
        output.rows(consumers, ("name", "mark", "lag", "protected"), name="consumers", empty="")


def history(
    context: typer.Context,
    table: Annotated[str | None, typer.Option(help="Only commits that touched this table.")] = None,
    branch: Annotated[str | None, typer.Option(help="Only commits in the history of this branch.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of results, newest first.")] = 20,
) -> None:
    """List the commits, newest first."""
    with context.obj.open() as lake:
        commits = lake.history(limit=limit, table=table, branch=branch)
    if context.obj.output.as_json:
        context.obj.output.result({"commits": [commit.as_dict() for commit in commits]})
        return
    rows = [
        {
            "version": commit.version,
            "time": clock.format_time(commit.committed_ms),
            "branch": commit.branch,
            "kind": commit.kind,
            "actor": commit.actor,
            "tables": " ".join(_counts(one) for one in commit.tables),
            "message": commit.message,
        }
        for commit in commits
    ]
    context.obj.output.rows(rows, rows[0] if rows else (), name="commits", empty="no commits yet")


def _counts(part: TableCommit) -> str:
    """A table with its rows added, updated and deleted: orders+5~2-1."""
    signs = {"+": part.rows_added, "~": part.rows_updated, "-": part.rows_deleted}
    shown = "".join(f"{sign}{count}" for sign, count in signs.items() if count)
    return f"{part.table}{shown or '+0'}"


def audit(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of results, newest first.")] = 50,
) -> None:
    """List what recovery and repairs did."""
    with context.obj.open() as lake:
        rows = [as_json(audit_line(row)) for row in lake.audit(limit)]
    context.obj.output.rows(rows, rows[0] if rows else (), name="audit", empty="no recovery or repair yet")
