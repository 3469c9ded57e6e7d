"""`floodmark backfill`: long work in small steps: years of history, a new column for old rows, and their jobs.

A run ends in a named outcome, as a sentence, in JSON and in the exit code (I12). Ctrl-C and SIGTERM end it as
cancelled: what is done stays, and the command that goes on with it is said. Dry runs and questions open the lake
read-only and change nothing (I17).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.backfill.progress import Step
from floodmark.backfill.record import CANCELLED, NOTHING_TO_DO, BackfillRun
from floodmark.catalog.job import CHUNKS, HISTORY, ROWS
from floodmark.cli.backfill_source import SourceOptions, expectations, find_functions_here, needs_functions, outputs
from floodmark.cli.backfill_text import (
    coverage_lines,
    is_complete,
    job_fields,
    job_row,
    next_step,
    plan_lines,
    progress_text,
    redo_lines,
    run_text,
)
from floodmark.cli.progress import job_progress
from floodmark.cli.sink_opening import STOPPED_CODE
from floodmark.cli.sink_settings import parse_size
from floodmark.cli.sink_text import error_text
from floodmark.errors import FloodmarkError, Incomplete, Invalid, NotFound
from floodmark.json_form import StoredError, as_json
from floodmark.report.jobs import JobReport, ack_outcome, cancel_outcome, job_report, report_of, shown_jobs
from floodmark.shown import count_of

if TYPE_CHECKING:
    from floodmark.lake import Lake

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Load history and fill columns, in small steps.")

Name = Annotated[str, typer.Argument(help="The job, by its name or id.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
_HISTORY_OPTIONS = (
    *("chunk", "first", "last", "align", "column", "order", "workers", "rows_min", "rows_max", "rows_exact"),
    *("keep", "follow", "tip_wait", "call_deadline", "retries", "forget_tip"),
)


# ── running ──


@app.command()
def history(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A name for the job; the same name goes on with it.")],
    table: Annotated[list[str], typer.Option(help='A table, or "NAME=select … from chunk"; may be repeated.')],
    first: Annotated[str, typer.Option(help="Where the range begins: a number, or a time like 2024-01-01.")],
    chunk: Annotated[str, typer.Option(help="The size of a chunk: a number, or a span of time like 1d.")],
    path: Annotated[str | None, typer.Option(help="Files, like data/{start:%Y/%m/%d}.jsonl.")] = None,
    step: Annotated[str | None, typer.Option(help="With --path: a file for every part of a chunk, like 1h.")] = None,
    format: Annotated[str | None, typer.Option(help="With --path: jsonl, csv or parquet.")] = None,
    missing: Annotated[str | None, typer.Option(help="With --path: missing files are error or empty.")] = None,
    unfinished: Annotated[
        str | None, typer.Option(help="With --path: a CSV file whose last line has no end is error or accept.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help='With --path: what the files have, like "id long".')] = None,
    from_table: Annotated[str | None, typer.Option(help="Another table of the lake.")] = None,
    range_column: Annotated[str | None, typer.Option(help="With --from-table: where a row is in the range.")] = None,
    call: Annotated[str | None, typer.Option(help="A function of a chunk, like package.module:function.")] = None,
    tip: Annotated[str | None, typer.Option(help="How far the source goes: a value, now-10m, or @FILE.")] = None,
    last: Annotated[str | None, typer.Option(help="Where the range ends, exclusive (default: at the tip).")] = None,
    align: Annotated[str | None, typer.Option(help="A value at which a chunk begins (default: 0, or 1970).")] = None,
    column: Annotated[str | None, typer.Option(help="Where a row is in the range; others are refused.")] = None,
    order: Annotated[str, typer.Option(help="newest or oldest chunks first.")] = "newest",
    workers: Annotated[int, typer.Option(min=1, help="Chunks under way at once.")] = 2,
    rows_min: Annotated[int | None, typer.Option(min=0, help="A chunk with fewer rows is refused.")] = None,
    rows_max: Annotated[int | None, typer.Option(min=0, help="A chunk with more rows is refused.")] = None,
    rows_exact: Annotated[
        bool, typer.Option("--rows-exact", help="A chunk with more or fewer rows than numbers is refused.")
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(help="What a chunk must be: rows=N, min_rows=N, every_number or manifest=FILE; may be repeated."),
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Older chunks are skipped and pruned: 90d, or a number.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new chunks until it is cancelled.")] = False,
    tip_wait: Annotated[str, typer.Option(help="How long to wait for a tip that is not there yet.")] = "0s",
    call_deadline: Annotated[str, typer.Option(help="How long one call of the source may take.")] = "60s",
    retries: Annotated[int, typer.Option(min=1, help="How often a chunk is tried, with waits that double.")] = 5,
    forget_tip: Annotated[
        bool, typer.Option("--forget-tip", help="How far the source came before was wrong: it does not count.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Load history in chunks, each once: all that is wanted and not done. Started again, it goes on."""
    given = context.params
    source = SourceOptions(**{one.name: given[one.name] for one in fields(SourceOptions)}).source()
    tables, options = outputs(table), {key: given[key] for key in _HISTORY_OPTIONS if given[key] is not None}
    options |= {"expect": expectations(expect)} if expect else {}
    if dry_run:
        _plan(context, lambda lake: lake.backfill.history_spec(name, source, tables, **options))
        return

    def load(lake: Lake, tell: Step | None) -> BackfillRun:
        give_up = context.obj.settings.jobs.give_up
        return lake.backfill.history(name, source, tables, progress=tell, give_up=give_up, **options)

    _run(context, name, CHUNKS, load, follows=follow and last is None)


@app.command()
def column(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    column: Annotated[str, typer.Argument(help="The new column.")],
    expression: Annotated[str, typer.Argument(help="Its value, in Spark SQL over the row.")],
    join: Annotated[str | None, typer.Option(help='From rows of another table that match, like "orders o".')] = None,
    on: Annotated[str | None, typer.Option(help='With --join: which match, like "o.user_id = users.id".')] = None,
    announce: Annotated[bool, typer.Option("--announce", help="Consumers see the filled rows as changed.")] = False,
    batch_rows: Annotated[int | None, typer.Option(min=1, help="Rows of one batch (default: 2000000).")] = None,
    batch_bytes: Annotated[str | None, typer.Option(help="Bytes of one batch, like 256MB.")] = None,
    pause: Annotated[str, typer.Option(help="How long to wait between two batches.")] = "100ms",
    dry_run: DryRun = False,
) -> None:
    """Add a column and fill it for the rows that are there, batch by batch. Started again, it goes on."""
    options: dict[str, Any] = {"join": join, "on": on, "announce": announce, "pause": pause}
    options |= {} if batch_rows is None else {"batch_rows": batch_rows}
    options |= {} if batch_bytes is None else {"batch_bytes": parse_size("batch_bytes", batch_bytes)}
    if dry_run:
        _plan(context, lambda lake: lake.backfill.column_spec(table, column, expression, **options))
        return

    def fill(lake: Lake, tell: Step | None) -> BackfillRun:
        return lake.backfill.column(table, column, expression, progress=tell, **options)

    _run(context, f"{table}.{column}", ROWS, fill)


@app.command()
def resume(context: typer.Context, name: Name) -> None:
    """Go on with a job that was cancelled, failed, or whose process died, as it was started."""
    with context.obj.open() as lake:
        job = lake.backfill.show(name)
    if needs_functions(job["settings"]):
        find_functions_here()
    follows = job["settings"].get("follow") is True and job["settings"].get("last") is None

    def go_on(lake: Lake, tell: Step | None) -> BackfillRun:
        return lake.backfill.resume(job["id"], progress=tell, give_up=context.obj.settings.jobs.give_up)

    _run(context, job["job"], job["unit"], go_on, follows=follows)


@app.command()
def redo(
    context: typer.Context,
    name: Name,
    range: Annotated[str, typer.Option(help="Whole chunks, like 1000..2000 or 2024-01-01..2024-01-03.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also if a consumer has shipped rows of a table without a key.")
    ] = False,
    all_rows: Annotated[
        bool, typer.Option("--all-rows", help="Take out all rows of the range, also what others wrote there.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Load chunks again: one commit takes their rows out, then they come anew. Rows merged since stay and are named."""
    first, dots, last = range.partition("..")
    if not (first and dots and last):
        raise Invalid("a range has two ends", range=range, advice="Write it like 1000..2000 or 2024-01-01..2024-01-03.")
    options: dict[str, Any] = {"force": force, "all_rows": all_rows}
    with context.obj.open() as lake:
        job = lake.backfill.show(name)
        if needs_functions(job["settings"]):
            find_functions_here()
        if dry_run:
            plan = lake.backfill.redo_plan(job["id"], first, last, **options)
            context.obj.output.result({"outcome": "planned", **plan}, text="\n".join(redo_lines(plan, would=True)))
            return

    def again(lake: Lake, tell: Step | None) -> BackfillRun:
        return lake.backfill.redo(job["id"], first, last, progress=tell, **options)

    _run(context, job["job"], job["unit"], again)


def _plan(context: typer.Context, make: Callable[[Lake], Any]) -> None:
    with context.obj.open() as lake:
        plan = lake.backfill.plan(make(lake))
    context.obj.output.result({"outcome": "planned", **plan}, text="\n".join(plan_lines(plan)))


def _run(
    context: typer.Context,
    name: str,
    unit: str,
    act: Callable[[Lake, Step | None], BackfillRun],
    *,
    follows: bool = False,
) -> None:
    output = context.obj.output
    # Every run heals by itself first.
    with context.obj.open(read_only=False, heal=False) as lake, _interruptible():
        try:
            with job_progress(output, name, unit, follows=follows) as tell:
                run = act(lake, tell)
        except KeyboardInterrupt:
            run = _interrupted(lake, name)
    redone = [] if run.redone is None else redo_lines(run.redone)
    output.result(run.as_dict(), text="\n".join([*redone, run_text(run)]))
    if run.error is not None:
        sys.stderr.write(f"floodmark: {error_text(StoredError(run.error))}\n")
    # One that somebody stopped is not done: a script that goes on must not take it for that.
    code = STOPPED_CODE if run.outcome == CANCELLED else run.exit_code
    if code:
        raise typer.Exit(code)


def _interrupted(lake: Lake, name: str) -> BackfillRun:
    """What became of the run that was interrupted; if there was none yet, the command ends as any other."""
    try:
        job = lake.backfill.show(name)
    except NotFound:
        raise KeyboardInterrupt from None
    if job["status"] != CANCELLED:
        raise KeyboardInterrupt
    return BackfillRun(CANCELLED, job)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread alone
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ── looking ──


@app.command("list")
def list_jobs(
    context: typer.Context, every: Annotated[bool, typer.Option("--all", help="Also those that are over.")] = False
) -> None:
    """List jobs: those at work, those that died, and failures that nobody has seen yet."""
    output = context.obj.output
    with context.obj.open() as lake:
        known = lake.catalog.jobs.all()
        shown = [job_report(job) for job in (known if every else shown_jobs(lake.catalog, known))]
    if output.as_json:
        output.result({"jobs": [as_json(job) for job in shown]})
        return
    rows = [job_row(job) for job in shown]
    output.rows(rows, rows[0] if rows else (), name="jobs", empty="no jobs" if every or not known else "no jobs now")
    if len(known) > len(shown):
        output.note(f"{count_of(len(known) - len(shown), 'job')} more with --all")


@app.command()
def show(context: typer.Context, name: Name) -> None:
    """Show a job: how far it is, its settings, how it failed, and what a history has and lacks."""
    output = context.obj.output
    with context.obj.open() as lake:
        job = job_report(lake.catalog.jobs.find(name))
        coverage, problem = _coverage(lake, job)
    if output.as_json:
        output.result({**as_json(job), "coverage": coverage, "coverage_error": problem})
        return
    output.result(job_fields(job, coverage))
    for line in [*([] if coverage is None else coverage_lines(coverage)), *([problem] if problem else [])]:
        output.result(None, text=line)
    if (step := next_step(job)) is not None:
        output.note(step)


def _coverage(lake: Lake, job: JobReport) -> tuple[dict[str, Any] | None, str | None]:
    """What a history has; if that cannot be told, why not: the job itself can still be shown."""
    if job.kind != HISTORY:
        return None, None
    try:
        return lake.backfill.coverage(job.id), None
    except FloodmarkError as error:
        return None, f"coverage unknown: {error.kind}: {error}"


@app.command()
def coverage(
    context: typer.Context,
    name: Name,
    first: Annotated[str | None, typer.Option(help="With --last: only this range has to be there.")] = None,
    last: Annotated[str | None, typer.Option(help="With --first: where the range ends, exclusive.")] = None,
    table: Annotated[str | None, typer.Option(help="With a range: only this table.")] = None,
) -> None:
    """Say what a history has and lacks. Ends well only if nothing is missing: else Incomplete or BelowRetention."""
    if (first is None) != (last is None) or (table is not None and first is None):
        raise Invalid("a range has both ends", advice="Use --first and --last together.")
    output = context.obj.output
    with context.obj.open() as lake:
        if first is not None:
            lake.backfill.check_range(name, first, last, table=table)
        found = lake.backfill.coverage(name)
    complete = first is not None or is_complete(found)
    asked = {"range": [first, last]} if first is not None else {}
    lines = coverage_lines(found) if first is None else [f"complete: {first}..{last}"]
    output.result({"complete": complete, **asked, **found}, text="\n".join(lines))
    if not complete:
        missing = Incomplete("a part of this history is not loaded yet", job=found["job"])
        sys.stderr.write(f"floodmark: {missing.kind}: {missing}\n")
        raise typer.Exit(missing.exit_code)


# ── what people ask for ──


@app.command()
def cancel(context: typer.Context, name: Name) -> None:
    """Ask a job to stop after its batch or chunk; what is done stays, and `resume` goes on with it."""
    with context.obj.open(read_only=False, heal=False) as lake:
        before = job_report(lake.catalog.jobs.find(name))
        job = report_of(lake.backfill.cancel(before.id))
    outcome = cancel_outcome(before, job)
    text = {
        "asked": f"asked {job.job} to stop; {job.holder} does after what it is at",
        CANCELLED: f"cancelled {job.job}: {progress_text(job)} done",
    }.get(outcome, f"nothing to do: {job.job} is {job.status}")
    context.obj.output.result({"outcome": outcome, **as_json(job)}, text=text)


@app.command()
def ack(context: typer.Context, name: Name) -> None:
    """Say that a failure was seen: the job needs no attention any more."""
    with context.obj.open(read_only=False, heal=False) as lake:
        before = job_report(lake.catalog.jobs.find(name))
        job = report_of(lake.backfill.ack(before.id))
    outcome = ack_outcome(before, job)
    text = f"nothing to do: {job.job} is {job.status}" if outcome == NOTHING_TO_DO else f"acknowledged {job.job}"
    context.obj.output.result({"outcome": outcome, **as_json(job)}, text=text)


@app.command()
def unbind(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    column: Annotated[str, typer.Argument(help="The column that an expression fills.")],
) -> None:
    """Let a column be filled by its expression no more: writers compute nothing, and what is unfilled stays null."""
    with context.obj.open(read_only=False, heal=False) as lake:
        commit = lake.backfill.unbind(table, column)
    text = f"unbound {table}.{column}: writers leave it out, and what is filled stays"
    context.obj.output.result(
        {"outcome": "unbound", "table": table, "column": column, "version": commit.version}, text=text
    )
