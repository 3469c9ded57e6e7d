"""`floodmark backfill`: long work in small steps: years of history, a new column for old rows, and their jobs.

A run ends in a named outcome, as a sentence, in JSON and in the exit code (I12). Ctrl-C and SIGTERM end it as
cancelled: what is done stays, and the command names the one that continues it. Dry runs and questions open the lake
read-only and change nothing (I17). A history comes from files by a path template, another table, or a function.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.catalog.jobs import CHUNKS, COLUMN, HISTORY, INTERRUPTED, PENDING, ROWS, RUNNING
from floodmark.cli.context import STOPPED_CODE
from floodmark.cli.output import size_text
from floodmark.cli.progress import job_progress
from floodmark.cli.sink_text import age_text, error_text
from floodmark.errors import FloodmarkError, Incomplete, Invalid, NotFound
from floodmark.jobs.record import BackfillRun
from floodmark.json_form import Json, StoredError, as_json
from floodmark.report.jobs import (
    JobLine,
    JobReport,
    ack_outcome,
    cancel_outcome,
    job_report,
    progress_of,
    rate_of,
    report_of,
    shown_jobs,
)
from floodmark.runs import CANCELLED, DONE, NOTHING_TO_DO, REDONE, TIMED_OUT, JobCallback
from floodmark.shown import count_of
from floodmark.sinks.settings import parse_size

if TYPE_CHECKING:
    from floodmark.backfill.chunks.coverage import Coverage
    from floodmark.backfill.chunks.sources import CallSource, PathSource, TableSource
    from floodmark.backfill.chunks.spec import HistorySpec
    from floodmark.backfill.columns.column import ColumnSpec
    from floodmark.lake import Lake


_OF_PATHS = ("step", "format", "missing", "unfinished", "columns")


@dataclass(frozen=True)
class SourceOptions:
    path: str | None = None
    step: str | None = None
    format: str | None = None
    missing: str | None = None
    unfinished: str | None = None
    columns: str | None = None
    from_table: str | None = None
    range_column: str | None = None
    call: str | None = None
    tip: str | None = None

    def source(self) -> PathSource | TableSource | CallSource:
        """The source; Invalid if the options name none, several, or do not go together."""
        from floodmark.backfill.chunks.sources import CallSource, PathSource, TableSource

        self._check()
        if self.path is not None:
            given = {name: getattr(self, name) for name in (*_OF_PATHS, "tip")}
            return PathSource(self.path, **{name: value for name, value in given.items() if value is not None})
        if self.from_table is not None:
            return TableSource(self.from_table, self.range_column or "", tip=self.tip)
        find_functions_here()
        return CallSource(self.call or "", self.tip)

    def _check(self) -> None:
        if sum(one is not None for one in (self.path, self.from_table, self.call)) != 1:
            raise Invalid(
                "a history needs exactly one source",
                advice="Use --path TEMPLATE, --from-table TABLE or --call module:function.",
            )
        for name in _OF_PATHS:
            if getattr(self, name) is not None and self.path is None:
                raise Invalid(f"--{name} needs --path")
        if (self.range_column is None) != (self.from_table is None):
            raise Invalid("--from-table and --range-column need each other")


def find_functions_here() -> None:
    """Find functions in the current folder too, as a user expects."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def needs_functions(settings: Mapping[str, Json]) -> bool:
    """Whether a job's kept source is a function."""
    source = settings.get("source")
    return isinstance(source, Mapping) and source.get("kind") == "call"


def outputs(tables: Sequence[str]) -> dict[str, str | None]:
    """The tables and what comes into each: a name alone, or NAME=query over `chunk`."""
    found: dict[str, str | None] = {}
    for given in tables:
        name, has_query, query = given.partition("=")
        name = name.strip()
        if not name or (has_query and not query.strip()):
            raise Invalid("invalid table", table=given, advice='Write NAME, or "NAME=select … from chunk".')
        if name in found:
            raise Invalid("this table is given twice", table=name)
        found[name] = query.strip() if has_query else None
    return found


def expectations(given: Sequence[str]) -> dict[str, str | int]:
    """What a chunk must be, as options say it: every_number, or NAME=VALUE."""
    found: dict[str, str | int] = {}
    for one in given:
        name, has_value, value = one.partition("=")
        if has_value and name in ("rows", "min_rows") and not value.isdecimal():
            raise Invalid("an expected number of rows must be a whole number", given=one)
        found[name] = (int(value) if name in ("rows", "min_rows") else value) if has_value else True
    return found


RANGES_MAX = 10
# An error on a screen; names and paths stay whole, to be copied.
_WRAPPER = TextWrapper(90, break_long_words=False, break_on_hyphens=False)


# ── jobs ──


def progress_text(job: JobLine) -> str:
    """How far a job is: 3 of 9 chunks (33.3 %)."""
    known = job.total is not None and job.percent is not None
    return f"{progress_of(job)} ({job.percent:.1f} %)" if known else progress_of(job)


def pace_text(job: JobLine) -> str:
    """The rate of a job, and how long it will take; empty if that is unknown."""
    left = None if job.eta_s is None else f"{age_text(round(job.eta_s * 1000))} left"
    return ", ".join(part for part in (rate_of(job), left) if part is not None)


def job_line(job: JobLine) -> str:
    """A job in a list of the lake's state."""
    parts = [f"{job.job} {job.status}", progress_text(job)]
    parts += [pace_text(job)] if job.status == RUNNING and pace_text(job) else []
    parts += [f"no progress since {job.stalled_since}"] if job.stalled_since else []
    parts += [error_text(job.error)] if job.error else []
    return ", ".join(parts)


def job_row(job: JobReport) -> dict[str, Json]:
    return {
        "job": job.job,
        "kind": job.kind,
        "status": _status(job),
        "progress": progress_text(job),
        "pace": pace_text(job) or None,
        "rows": job.rows,
        "updated": job.updated,
        "error": None if job.error is None else f"{job.error.kind}: {job.error.message}",
    }


def _status(job: JobReport) -> str:
    if job.stalled_since or job.cancel_asked:
        return "stalled" if job.stalled_since else "stopping"
    # It tries again by itself; the error says what it waits for.
    return "waiting" if job.status == RUNNING and job.error else job.status


def job_fields(job: JobReport, coverage: Mapping[str, Any] | None) -> dict[str, Json]:
    """One job on a screen: figures, settings, and how it failed."""
    whole = as_json(job)
    shown = {name: whole[name] for name in ("job", "id", "kind", "tables", "status")}
    shown |= {"progress": progress_text(job), "pace": pace_text(job) or None}
    shown |= {name: whole[name] for name in ("rows", *(["unfilled"] if job.kind == COLUMN else []), "publishes")}
    shown |= {name: whole[name] for name in ("actor", "holder", "created", "started", "updated", "ended")}
    shown |= {name: whole[name] for name in ("stalled_since", "acknowledged") if whole[name]}
    shown |= {"error": _WRAPPER.fill(error_text(job.error))} if job.error else {}
    settings = {**job.settings, **_history_settings(job.settings, coverage)}
    return shown | {name: value for name, value in settings.items() if name not in shown and value not in (None, False)}


def _history_settings(settings: Mapping[str, Any], coverage: Mapping[str, Any] | None) -> dict[str, Json]:
    """A history's range as people write it; nothing for other jobs."""
    if coverage is None:
        return {}
    size = settings["size"]
    queries = {table: query for table, query in settings["tables"].items() if query is not None}
    return {
        "range": f"{coverage['first']}..{coverage['last'] or 'open'}",
        "chunk": age_text(size // 1000) if settings["unit"] == "time" else size,
        "definitions": queries or None,
        **dict.fromkeys(("first", "last", "size", "origin", "unit")),
    }


def next_step(job: JobReport) -> str | None:
    """What an operator can do about a job that is neither running nor done."""
    if job.status in (PENDING, INTERRUPTED, CANCELLED, "failed"):
        return f"continue with `{resume_command(job.job)}`"
    if job.stalled_since:
        return f"no progress since {job.stalled_since}: check {job.holder}; if it hangs, kill it, then resume"
    return None


def resume_command(name: str) -> str:
    return f"floodmark backfill resume {shlex.quote(name)}"


# ── runs ──


def run_text(run: BackfillRun) -> str:
    """One run, and what of its job is done."""
    job = report_of(run.job)
    if run.outcome == DONE:
        return f"done: {job.job}, {_counts(job)}"
    if run.outcome == REDONE:
        rest = "" if job.status == DONE else f"; more is missing: {next_step(job) or 'it continues'}"
        return f"redone: {job.job}, {progress_text(job)} done{rest}"
    if run.outcome == NOTHING_TO_DO:
        return f"nothing to do: {job.job} is complete, {_counts(job)}"
    word = "timed out" if run.outcome == TIMED_OUT else run.outcome
    return f"{word}: {job.job}, {progress_text(job)} done; finished work is kept; {next_step(job) or 'it continues'}"


def _counts(job: JobReport) -> str:
    if job.kind == COLUMN:
        parts = [f"{count_of(job.rows, 'row')} filled"]
        parts += [f"{job.unfilled} of them with null"] if job.unfilled else []
    else:
        parts = [count_of(job.processed, "chunk"), count_of(job.rows, "row")]
    return ", ".join([*parts, f"{count_of(job.publishes, 'commit')} in all"])


# ── plans ──


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    return _column_plan(plan) if plan.get("kind") == COLUMN else _history_plan(plan)


def _column_plan(plan: Mapping[str, Any]) -> list[str]:
    name = f"{plan['table']}.{plan['column']}"
    added = [f"would add {name} {plan['type']}: {plan['expression']}"] if plan["adds_column"] else []
    if not plan["files"]:
        return [*added, f"nothing to do: every row has {name}"]
    where = f"{count_of(plan['files'], 'file')} of {size_text(plan['bytes'])}"
    how = "1 batch" if plan["batches"] == 1 else f"{plan['batches']} batches"
    cuts = f", {count_of(plan['cuts'], 'file')} split first" if plan["cuts"] else ""
    announced = "; consumers will see them as changes" if plan["announce"] else ""
    return [*added, f"would fill {count_of(plan['rows'], 'row')} in {where}, in {how}{cuts}{announced}"]


def _history_plan(plan: Mapping[str, Any]) -> list[str]:
    chunks = f"{count_of(plan['to_load'], 'chunk')} into {', '.join(plan['tables'])}"
    lines = [f"would load {chunks}" if plan["to_load"] else "nothing to load now"]
    lines[0] += f"; {plan['done']:,} of {plan['chunks']:,} are done"
    if plan["next"]:
        more = ", …" if plan["to_load"] > len(plan["next"]) else ""
        lines.append(f"first {', '.join(plan['next'])}{more}")
    if plan["not_complete_yet"]:
        lines.append(f"{count_of(plan['not_complete_yet'], 'chunk')} not complete yet: tip {plan['tip'] or 'unknown'}")
    pruned = {table: count for table, count in plan["to_prune"].items() if count}
    return lines + [f"would prune {count_of(count, 'chunk')} of {table}" for table, count in pruned.items()]


def redo_lines(redone: Mapping[str, Any], *, would: bool = False) -> list[str]:
    """What a redo took out, or would; and the rows of others in its range."""
    lines = []
    for table, one in redone["tables"].items():
        verb, rows = "would delete" if would else "deleted", count_of(one["rows_out"], "row")
        went = f"{verb} {rows} of {redone['range']} from {table}"
        if one["rows_since"]:
            more = ", …" if one["rows_since"] > len(one["since"]) else ""
            went += f"; {count_of(one['rows_since'], 'row')} added since: {'; '.join(one['since'])}{more}"
        lines.append(went + (f"; already shipped to {', '.join(one['shipped_to'])}" if one["shipped_to"] else ""))
    return lines or [f"nothing of {redone['range']} is loaded"]


# ── coverage ──


def is_complete(coverage: Mapping[str, Any]) -> bool:
    """Whether every table has all of the known history; a table without any chunk has no known history.

    Unless all of it is below the floor: then there is nothing to load.
    """
    tables, floor = coverage["tables"].values(), coverage["floor"]
    nothing_wanted = floor is not None and floor == coverage["last"]
    return all((one["chunks"] or nothing_wanted) and not one["gaps"] for one in tables)


def coverage_lines(coverage: Mapping[str, Any]) -> list[str]:
    lines = []
    for table, one in coverage["tables"].items():
        parts = [f"{count_of(one['chunks'], 'chunk')}, {count_of(one['rows'], 'row')}"]
        for word in ("loaded", "gaps", "pruned"):
            parts += [f"{word} {_ranges(one[word])}"] if one[word] else []
        if "indexed" in one:
            covered = one["indexed"]
            parts.append("no index" if covered is None else f"indexed {_ranges(covered) if covered else 'nothing'}")
        lines.append(f"{table}: {'; '.join(parts)}")
    return lines + ([f"floor {coverage['floor']}"] if coverage["floor"] is not None else [])


def _ranges(ranges: Sequence[Sequence[str]]) -> str:
    shown = [f"{start}..{end}" for start, end in ranges[:RANGES_MAX]]
    left = len(ranges) - len(shown)
    return ", ".join(shown) + (f" and {left} more" if left else "")


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Load history and fill columns, in small steps.")

Name = Annotated[str, typer.Argument(help="The job, by its name or id.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]
_HISTORY_OPTIONS = (
    *("chunk", "first", "last", "align", "column", "order", "workers", "rows_min", "rows_max", "rows_exact"),
    *("keep", "follow", "tip_wait", "call_deadline", "retries", "forget_tip"),
)


# ── running ──


@app.command()
def history(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the job; use the same name to continue it.")],
    table: Annotated[list[str], typer.Option(help='A table, or "NAME=select … from chunk"; may be repeated.')],
    first: Annotated[str, typer.Option(help="Start of the range: a number, or a time like 2024-01-01.")],
    chunk: Annotated[str, typer.Option(help="Size of a chunk: a number, or a duration like 1d.")],
    path: Annotated[str | None, typer.Option(help="Files, like data/{start:%Y/%m/%d}.jsonl.")] = None,
    step: Annotated[str | None, typer.Option(help="With --path: a chunk has one file per step, like 1h.")] = None,
    format: Annotated[str | None, typer.Option(help="With --path: jsonl, csv or parquet.")] = None,
    missing: Annotated[str | None, typer.Option(help="With --path: treat missing files as error or empty.")] = None,
    unfinished: Annotated[
        str | None, typer.Option(help="With --path: error or accept for a CSV file whose last line has no line break.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help='With --path: columns of the files, like "id long".')] = None,
    from_table: Annotated[str | None, typer.Option(help="Load from this table of the lake.")] = None,
    range_column: Annotated[str | None, typer.Option(help="With --from-table: column with a row's position.")] = None,
    call: Annotated[
        str | None, typer.Option(help="Function that returns a chunk's rows, like package:function.")
    ] = None,
    tip: Annotated[str | None, typer.Option(help="How far the source is complete: a value, now-10m, or @FILE.")] = None,
    last: Annotated[str | None, typer.Option(help="End of the range, exclusive (default: the tip).")] = None,
    align: Annotated[str | None, typer.Option(help="A value at which a chunk starts (default: 0, or 1970).")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column with the position of a row; rows outside of their chunk are refused.")
    ] = None,
    order: Annotated[str, typer.Option(help="Order: newest or oldest chunks first.")] = "newest",
    workers: Annotated[int, typer.Option(min=1, help="Number of chunks to load in parallel.")] = 2,
    rows_min: Annotated[int | None, typer.Option(min=0, help="Refuse a chunk with fewer rows.")] = None,
    rows_max: Annotated[int | None, typer.Option(min=0, help="Refuse a chunk with more rows.")] = None,
    rows_exact: Annotated[
        bool, typer.Option("--rows-exact", help="Refuse a chunk that does not have one row per number.")
    ] = False,
    expect: Annotated[
        list[str] | None,
        typer.Option(help="Check of a chunk: rows=N, min_rows=N, every_number or manifest=FILE; may be repeated."),
    ] = None,
    keep: Annotated[str | None, typer.Option(help="Skip and prune older chunks: 90d, or a number.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Keep loading new chunks until cancelled.")] = False,
    tip_wait: Annotated[str, typer.Option(help="How long to wait until the source has a tip.")] = "0s",
    call_deadline: Annotated[str, typer.Option(help="Timeout of one call of the source.")] = "60s",
    retries: Annotated[int, typer.Option(min=1, help="Attempts per chunk, with exponential backoff.")] = 5,
    forget_tip: Annotated[
        bool, typer.Option("--forget-tip", help="Ignore the recorded tip of earlier runs: it was wrong.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Load history in chunks, each exactly once. Run it again to continue."""
    given = context.params
    source = SourceOptions(**{one.name: given[one.name] for one in fields(SourceOptions)}).source()
    tables, options = outputs(table), {key: given[key] for key in _HISTORY_OPTIONS if given[key] is not None}
    options |= {"expect": expectations(expect)} if expect else {}
    if dry_run:
        _plan(context, lambda lake: lake.backfill.history_spec(name, source, tables, **options))
        return

    def load(lake: Lake, tell: JobCallback | None) -> BackfillRun:
        give_up = context.obj.settings.jobs.give_up
        return lake.backfill.history(name, source, tables, progress=tell, give_up=give_up, **options)

    _run(context, name, CHUNKS, load, follows=follow and last is None)


@app.command()
def column(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    column: Annotated[str, typer.Argument(help="The new column.")],
    expression: Annotated[str, typer.Argument(help="Its value: a Spark SQL expression over the row.")],
    join: Annotated[str | None, typer.Option(help='Join another table, like "orders o".')] = None,
    on: Annotated[
        str | None, typer.Option(help='With --join: the join condition, like "o.user_id = users.id".')
    ] = None,
    announce: Annotated[
        bool, typer.Option("--announce", help="Report the filled rows to consumers as changed.")
    ] = False,
    batch_rows: Annotated[int | None, typer.Option(min=1, help="Maximum rows per batch (default: 2000000).")] = None,
    batch_bytes: Annotated[str | None, typer.Option(help="Maximum bytes per batch, like 256MB.")] = None,
    pause: Annotated[str, typer.Option(help="How long to wait between two batches.")] = "100ms",
    dry_run: DryRun = False,
) -> None:
    """Add a column and fill it for existing rows, batch by batch. Run it again to continue."""
    options: dict[str, Any] = {"join": join, "on": on, "announce": announce, "pause": pause}
    options |= {} if batch_rows is None else {"batch_rows": batch_rows}
    options |= {} if batch_bytes is None else {"batch_bytes": parse_size("batch_bytes", batch_bytes)}
    if dry_run:
        _plan(context, lambda lake: lake.backfill.column_spec(table, column, expression, **options))
        return

    def fill(lake: Lake, tell: JobCallback | None) -> BackfillRun:
        return lake.backfill.column(table, column, expression, progress=tell, **options)

    _run(context, f"{table}.{column}", ROWS, fill)


@app.command()
def resume(context: typer.Context, name: Name) -> None:
    """Continue a job that was cancelled, failed, or whose process died, with the same options."""
    with context.obj.open() as lake:
        job = lake.backfill.show(name)
    if needs_functions(job["settings"]):
        find_functions_here()
    follows = job["settings"].get("follow") is True and job["settings"].get("last") is None

    def go_on(lake: Lake, tell: JobCallback | None) -> BackfillRun:
        return lake.backfill.resume(job["id"], progress=tell, give_up=context.obj.settings.jobs.give_up)

    _run(context, job["job"], job["unit"], go_on, follows=follows)


@app.command()
def redo(
    context: typer.Context,
    name: Name,
    range: Annotated[str, typer.Option(help="Range of whole chunks, like 1000..2000 or 2024-01-01..2024-01-03.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also if a consumer has already shipped rows of a table without a key.")
    ] = False,
    all_rows: Annotated[
        bool, typer.Option("--all-rows", help="Delete all rows of the range, also rows that others wrote.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Load chunks again: one commit deletes their rows, then they are loaded. Rows merged since stay and are listed."""
    first, dots, last = range.partition("..")
    if not (first and dots and last):
        raise Invalid("invalid range", range=range, advice="Write it like 1000..2000 or 2024-01-01..2024-01-03.")
    with context.obj.open() as lake:
        job = lake.backfill.show(name)
        if needs_functions(job["settings"]):
            find_functions_here()
        if dry_run:
            plan = lake.backfill.redo_plan(job["id"], first, last, force=force, all_rows=all_rows)
            context.obj.output.result({"outcome": "planned", **plan}, text="\n".join(redo_lines(plan, would=True)))
            return

    def again(lake: Lake, tell: JobCallback | None) -> BackfillRun:
        return lake.backfill.redo(job["id"], first, last, progress=tell, force=force, all_rows=all_rows)

    _run(context, job["job"], job["unit"], again)


def _plan(context: typer.Context, make: Callable[[Lake], HistorySpec | ColumnSpec]) -> None:
    with context.obj.open() as lake:
        plan = lake.backfill.plan(make(lake))
    context.obj.output.result({"outcome": "planned", **plan}, text="\n".join(plan_lines(plan)))


def _run(
    context: typer.Context,
    name: str,
    unit: str,
    act: Callable[[Lake, JobCallback | None], BackfillRun],
    *,
    follows: bool = False,
) -> None:
    output = context.obj.output
    # Every run recovers first.
    with context.obj.open(read_only=False, recover=False) as lake, _interruptible():
        try:
            with job_progress(output, name, unit, follows=follows) as tell:
                run = act(lake, tell)
        except KeyboardInterrupt:
            run = _interrupted(lake, name)
    redone = [] if run.redone is None else redo_lines(run.redone)
    output.result(run.as_dict(), text="\n".join([*redone, run_text(run)]))
    if run.error is not None:
        sys.stderr.write(f"floodmark: {error_text(StoredError(run.error))}\n")
    # A stopped job is not done: a script must be able to tell them apart.
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
    context: typer.Context, every: Annotated[bool, typer.Option("--all", help="Also finished jobs.")] = False
) -> None:
    """List jobs that run, were interrupted, or failed and are not acknowledged."""
    output = context.obj.output
    with context.obj.open() as lake:
        known = lake.catalog.jobs.all()
        shown = [job_report(job) for job in (known if every else shown_jobs(lake.catalog, known))]
    if output.as_json:
        output.result({"jobs": [as_json(job) for job in shown]})
        return
    rows = [job_row(job) for job in shown]
    output.rows(rows, rows[0] if rows else (), name="jobs", empty="no jobs" if every or not known else "no active jobs")
    if len(known) > len(shown):
        output.note(f"{count_of(len(known) - len(shown), 'job')} more with --all")


@app.command()
def show(context: typer.Context, name: Name) -> None:
    """Show a job: progress, settings, last error, and the coverage of a history."""
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


def _coverage(lake: Lake, job: JobReport) -> tuple[Coverage | None, str | None]:
    """What a history has, or why that is unknown: the job itself can still be shown."""
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
    first: Annotated[str | None, typer.Option(help="With --last: check only this range.")] = None,
    last: Annotated[str | None, typer.Option(help="With --first: end of the range, exclusive.")] = None,
    table: Annotated[str | None, typer.Option(help="With a range: only this table.")] = None,
    index: Annotated[bool, typer.Option("--index", help="Also show which loaded parts the indexes cover.")] = False,
) -> None:
    """Show which parts of a history are loaded. Fails with Incomplete or BelowRetention if a part is missing."""
    if (first is None) != (last is None) or (table is not None and first is None):
        raise Invalid("a range needs both ends", advice="Use --first and --last together.")
    output = context.obj.output
    with context.obj.open() as lake:
        if first is not None:
            lake.backfill.check_range(name, first, last, table=table)
        found = lake.backfill.coverage(name, index=index)
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
    """Stop a job after its current batch or chunk. Finished work is kept; `resume` continues the job."""
    with context.obj.open(read_only=False, recover=False) as lake:
        before = job_report(lake.catalog.jobs.find(name))
        job = report_of(lake.backfill.cancel(before.id))
    outcome = cancel_outcome(before, job)
    text = {
        "asked": f"asked {job.job} to stop; {job.holder} stops after its current step",
        CANCELLED: f"cancelled {job.job}: {progress_text(job)} done",
    }.get(outcome, f"nothing to do: {job.job} is {job.status}")
    context.obj.output.result({"outcome": outcome, **as_json(job)}, text=text)


@app.command()
def ack(context: typer.Context, name: Name) -> None:
    """Acknowledge a failed job: it needs no attention any more."""
    with context.obj.open(read_only=False, recover=False) as lake:
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
    """Stop filling a column by its expression. Writers leave it out, and unfilled rows stay null."""
    with context.obj.open(read_only=False, recover=False) as lake:
        commit = lake.backfill.unbind(table, column)
    text = f"unbound {table}.{column}: writers leave it out; filled values stay"
    context.obj.output.result(
        {"outcome": "unbound", "table": table, "column": column, "version": commit.version}, text=text
    )
