"""`floodmark maintain`: maintenance of tables. Alone it does everything in order; each part is also a command.

Every run ends in a named outcome per table, as a sentence, in JSON and in the exit code (I12). A dry run opens the lake
read-only and changes nothing (I17). A run that recovery refuses is recorded as refused, so recovery is a part of
the run here, not of the opening. What a forced retention takes from consumers is shown before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer

from floodmark.catalog.maintenance_state import Maintenance, Policy
from floodmark.cli.context import open_without_recovery
from floodmark.cli.output import size_text
from floodmark.cli.progress import maintenance_progress
from floodmark.errors import Invalid
from floodmark.maintenance.maintenance import LakeMaintenance
from floodmark.maintenance.record import (
    COMPACT,
    EXPIRE,
    INDEX,
    RETAIN,
    SINK_COMPACT,
    SINK_EXPIRE,
    SINK_VERBS,
    MaintenanceRun,
)
from floodmark.report.maintenance import DEFAULTS
from floodmark.runs import (
    BELOW_THRESHOLD,
    CONFLICT,
    FAILED,
    FORCED,
    NOTHING_TO_DO,
    PARTIAL,
    PLANNED,
    PROTECTED,
    REFUSED,
)
from floodmark.shown import count_of

T = TypeVar("T")

app = typer.Typer(invoke_without_command=True, no_args_is_help=False, rich_markup_mode=None)

Table = Annotated[str | None, typer.Argument(help="Only this table.")]
Files = Annotated[
    int | None,
    typer.Option(min=2, help=f"Compact a partition with this many small files (default: {DEFAULTS.compact_files})."),
]
Keep = Annotated[str | None, typer.Option(help=f"Keep versions younger than this (default: {DEFAULTS.keep_versions}).")]
Grace = Annotated[
    str | None,
    typer.Option(help=f"How long to keep files of expired versions for running readers (default: {DEFAULTS.grace})."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]


@app.callback()
def everything(
    context: typer.Context,
    table: Annotated[str | None, typer.Option(help="Only this table; versions always expire for all tables.")] = None,
    files: Files = None,
    keep: Keep = None,
    grace: Grace = None,
    sink: Annotated[
        str | None, typer.Option(help="Maintain the destination tables of this Iceberg sink instead.")
    ] = None,
    compact_sink: Annotated[bool, typer.Option("--compact", help="With --sink: only compact.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Maintain tables: retain, compact, index, expire and sweep, in this order, or only one of them."""
    if context.invoked_subcommand is not None:
        if dry_run or compact_sink or any(option is not None for option in (table, files, keep, grace, sink)):
            raise Invalid(
                "options must follow the subcommand",
                advice=f"Write: floodmark maintain {context.invoked_subcommand} …",
            )
        return
    if sink is not None or compact_sink:
        if sink is None or grace is not None or (compact_sink and keep is not None):
            raise Invalid(
                "--sink takes --table, --files, --keep and --dry-run; with --compact not --keep",
                advice="The lake's own tables: floodmark maintain, or floodmark maintain compact.",
            )
        _maintain_destinations(context, sink, table, files, keep, dry_run, only_compact=compact_sink)
        return
    chosen = context.obj.settings.maintain
    files_min = _given(files, chosen.compact_files)
    with _maintenance(context, dry_run) as maintenance, maintenance_progress(context.obj.output) as progress:
        done = maintenance.run(
            table,
            files_min=files_min,
            keep=_given(keep, chosen.keep_versions),
            grace=_given(grace, chosen.grace),
            dry_run=dry_run,
            progress=progress,
        )
    lines = [f"{record.verb:<8} {sentence(record, files_min)}" for record in done.records]
    _end(context, done, [*lines, _summary(done)])


@app.command()
def compact(context: typer.Context, table: Table = None, files: Files = None, dry_run: DryRun = False) -> None:
    """Compact small files into larger ones; rows and sequences do not change."""
    files_min = _given(files, context.obj.settings.maintain.compact_files)
    with _maintenance(context, dry_run) as maintenance, maintenance_progress(context.obj.output) as progress:
        done = maintenance.compact(table, files_min=files_min, dry_run=dry_run, progress=progress)
    _end(context, done, [sentence(record, files_min) for record in done.records])


@app.command()
def retain(
    context: typer.Context,
    table: Table = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also delete rows that a protected consumer has not read; it never gets them."),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="With --force: apply the change (default: only show it).")
    ] = False,
    dry_run: DryRun = False,
    now: Annotated[str | None, typer.Option(help="Use this as the current time, like 2026-11-15T10:00:00Z.")] = None,
) -> None:
    """Delete rows by the tables' retention policies. Rows that a protected consumer has not read stay."""
    if apply and dry_run:
        raise Invalid("--apply and --dry-run exclude each other")
    output = context.obj.output
    only_shown = dry_run or (force and not apply)
    with _maintenance(context, only_shown) as maintenance, maintenance_progress(output) as progress:
        if force and apply:
            for record in maintenance.retain(table, force=True, dry_run=True, now=now).records:
                for line in _losses(record):
                    output.note(line)
        done = maintenance.retain(table, force=force, dry_run=only_shown, now=now, progress=progress)
    lines = [line for record in done.records for line in (sentence(record), *_losses(record))]
    if force and not apply and any(record.outcome == PLANNED for record in done.records):
        output.note("Add --apply to do it.")
    _end(context, done, lines or ["nothing to do: no table has a retention policy"])


@app.command()
def index(
    context: typer.Context,
    table: Table = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare all segments with the rows first; make wrong ones again.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Cover files that no segment of an index covers, fold small segments, retire those that are not needed."""
    with _maintenance(context, dry_run) as maintenance, maintenance_progress(context.obj.output) as progress:
        done = maintenance.index(table, verify=verify, dry_run=dry_run, progress=progress)
    _end(context, done, [sentence(record) for record in done.records] or ["nothing to do: no table has an index"])


@app.command()
def expire(context: typer.Context, keep: Keep = None, dry_run: DryRun = False) -> None:
    """Expire versions older than the window that nothing holds; a sweep deletes their files later."""
    with _maintenance(context, dry_run) as maintenance:
        done = maintenance.expire(keep=_given(keep, context.obj.settings.maintain.keep_versions), dry_run=dry_run)
    _end(context, done, [sentence(record) for record in done.records])


@app.command()
def sweep(
    context: typer.Context,
    table: Table = None,
    grace: Grace = None,
    deep: Annotated[bool, typer.Option("--deep", help="Also list the storage to find files without a record.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete files that no version refers to any more."""
    chosen = _given(grace, context.obj.settings.maintain.grace)
    with _maintenance(context, dry_run) as maintenance, maintenance_progress(context.obj.output) as progress:
        done = maintenance.sweep(table, grace=chosen, deep=deep, dry_run=dry_run, progress=progress)
    lines = [line for record in done.records for line in (sentence(record), *_listing(record))]
    if dry_run:
        files, size = (sum(int(record.detail.get(name, 0)) for record in done.records) for name in ("files", "bytes"))
        lines.append(f"total: {count_of(files, 'file')}, {size_text(size)}")
    _end(context, done, lines or ["nothing to do: no file of an expired version is left"])


@app.command()
def policy(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    retention: Annotated[
        str | None, typer.Option(help='An age (90d, also m, h, w, y), a count ("1000000 rows") or a size ("10 GB").')
    ] = None,
    column: Annotated[str | None, typer.Option(help="For an age: the time column.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Keep everything.")] = False,
) -> None:
    """Show or set the retention policy of a table."""
    if none and retention is not None:
        raise Invalid("--none and --retention exclude each other")
    if column is not None and retention is None:
        raise Invalid("--column needs --retention")
    with _maintenance(context, retention is None and not none) as maintenance:
        if retention is None and not none:
            found = maintenance.policy(table)
        else:
            found = maintenance.set_policy(table, retention, column=column)
    data = {"table": table, "retention": found.retention, "column": found.column}
    context.obj.output.result(data, text=_policy_text(table, found))


@app.command()
def history(
    context: typer.Context,
    table: Table = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of results, newest first.")] = 20,
) -> None:
    """List maintenance runs, newest first."""
    with _maintenance(context, read_only=True) as maintenance:
        records = maintenance.history(table, limit=limit)
    if context.obj.output.as_json:
        context.obj.output.result({"records": [record.as_dict() for record in records]})
        return
    rows = [
        {
            "time": record.as_dict()["at"],
            "verb": record.verb,
            "outcome": record.outcome,
            "actor": record.actor,
            "what": sentence(record),
        }
        for record in records
    ]
    context.obj.output.rows(rows, rows[0] if rows else (), name="records", empty="no maintenance yet")


def _maintain_destinations(
    context: typer.Context,
    name: str,
    table: str | None,
    files: int | None,
    keep: str | None,
    dry_run: bool,
    *,
    only_compact: bool,
) -> None:
    """Maintain what an Iceberg sink ships to. Rows of the lake are not changed, and a run of the sink may go on."""
    with (
        open_without_recovery(context, read_only=dry_run) as lake,
        maintenance_progress(context.obj.output) as progress,
    ):
        done = lake.sinks.maintain(
            name,
            table=table,
            verbs=(SINK_COMPACT,) if only_compact else SINK_VERBS,
            files_min=files,
            keep=keep,
            dry_run=dry_run,
            progress=progress,
        )
    _end(context, done, [sentence(record, made="snapshot") for record in done.records])


# ── opening and ending ──


@contextmanager
def _maintenance(context: typer.Context, read_only: bool) -> Iterator[LakeMaintenance]:
    with context.obj.open(read_only=read_only, recover=False) as lake:
        yield lake.maintain


def _given(option: T | None, setting: T) -> T:
    return setting if option is None else option


def _end(context: typer.Context, done: MaintenanceRun, lines: Sequence[str]) -> None:
    """Show what was done, and end with the exit code of the gravest record."""
    context.obj.output.result(done.as_dict(), text="\n".join(lines) or "nothing to do: no tables yet")
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def _summary(done: MaintenanceRun) -> str:
    """The overall outcome, and how many records have which, unless nothing was to do at all."""
    if done.outcome == NOTHING_TO_DO:
        return "nothing to do"
    counts = Counter(record.outcome.replace("_", " ") for record in done.records)
    return f"{done.outcome}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"


# ── sentences ──


def sentence(record: Maintenance, files_min: int | None = None, *, made: str = "version") -> str:
    """A record as a person reads it. `files_min`: how many small files were asked for; `made`: what a rewrite makes."""
    detail = record.detail
    if record.outcome in (FAILED, REFUSED):
        text = f"{record.outcome}: {detail.get('error')}: {detail.get('message')}"
    elif record.outcome == CONFLICT and "message" in detail:
        text = f"conflict: {detail['message']}"
    elif record.verb in (COMPACT, SINK_COMPACT):
        text = _compacted(record, files_min, "snapshot" if record.verb == SINK_COMPACT else made)
    elif record.verb in SINK_VERBS:
        text = _at_destination(record)
    else:
        text = {RETAIN: _retained, INDEX: _indexed, EXPIRE: _expired}.get(record.verb, _swept)(record)
    unrecorded = f" (this run could not be recorded: {detail['unrecorded']})" if "unrecorded" in detail else ""
    return f"{record.table}: {text}{unrecorded}" if record.table else f"{text}{unrecorded}"


def _compacted(record: Maintenance, files_min: int | None, made: str) -> str:
    detail = record.detail
    if not detail.keys() - {"sink"}:
        return "nothing to do: the table does not exist yet"
    if record.outcome == PLANNED:
        size = size_text(detail["bytes_in"])
        return (
            f"would compact {count_of(detail['files_in'], 'file')} in {count_of(detail['groups'], 'group')} "
            f"({size}, {count_of(detail['rows_in'], 'row')})"
        )
    if record.outcome == BELOW_THRESHOLD:
        files_min = detail.get("files_min", files_min)
        enough = "" if files_min is None else f", compaction starts at {files_min}"
        return f"below threshold: {count_of(detail['below_threshold'], 'small file')}{enough}"
    conflict = f"{count_of(detail.get('conflicts', 0), 'group')} of files changed meanwhile; run it again"
    if record.outcome == CONFLICT:
        return f"conflict: {conflict}"
    if record.outcome == NOTHING_TO_DO:
        hopeless = detail.get("could_not_improve", 0)
        tried = f", {count_of(hopeless, 'group')} could not be improved" if hopeless else ""
        return f"nothing to do: {count_of(detail['small_files'], 'small file')} of {detail['files']}{tried}"
    versions = ", ".join(map(str, detail["versions"]))
    text = (
        f"compacted {count_of(detail['files_in'], 'file')} into {detail['files_out']} "
        f"({size_text(detail['bytes_in'])} -> {size_text(detail['bytes_out'])}), "
        f"{count_of(detail['rows'], 'row')}, {made} {versions}"
    )
    return f"partial: {text}; {conflict}" if record.outcome == PARTIAL else text


def _at_destination(record: Maintenance) -> str:
    """Snapshots that expired, or files that went, of a table that a sink ships to."""
    detail = record.detail
    if record.outcome == PROTECTED:
        return f"protected: {detail['reason']}"
    planned = record.outcome == PLANNED
    if not {"snapshots", "files"} & detail.keys():
        return "nothing to do: the table does not exist yet"
    if record.verb == SINK_EXPIRE:
        if record.outcome == NOTHING_TO_DO:
            reason = detail.get("reason", "no snapshot of this sink is older than its window")
            return f"nothing to do: {reason}"
        gone, kept = count_of(detail["snapshots"], "snapshot"), detail["snapshots_kept"]
        return f"{'would expire' if planned else 'expired'} {gone}, kept {kept}"
    if record.outcome == NOTHING_TO_DO:
        return "nothing to do: no files of this sink to delete"
    verb = "would delete" if planned else "deleted"
    return f"{verb} {count_of(detail['files'], 'file')} ({size_text(detail['bytes'])})"


def _retained(record: Maintenance) -> str:
    detail = record.detail
    if record.outcome == FORCED:
        return f"forced, version {detail['version']}: {'; '.join(_losses(record))}"
    policy = f"policy {detail['policy']}" + (f" by {detail['column']}" if detail.get("column") else "")
    waiting = f"{count_of(detail['rows_protected'], 'due row')} stay: a protected consumer has not read them"
    if record.outcome == NOTHING_TO_DO:
        return f"nothing to do: no row is due ({policy})"
    if record.outcome == PROTECTED:
        return f"protected: {waiting} ({policy})"
    files = f"{count_of(detail['files_dropped'], 'file')} dropped, {detail['files_rewritten']} rewritten"
    kept = f"; {waiting}" if detail["rows_protected"] else ""
    if record.outcome == PLANNED:
        return f"would delete {count_of(detail['rows_going'], 'row')} ({policy}): {files}{kept}"
    return f"deleted {count_of(detail['rows_removed'], 'row')} ({policy}): {files}, version {detail['version']}{kept}"


def _losses(record: Maintenance) -> list[str]:
    """What a forced retention takes away, a line for each consumer that has not had all of it."""
    verb = "will lose" if record.outcome == PLANNED else "has lost"
    return [
        f"{record.table}: {consumer} {verb} {count_of(rows, 'row')} that it has not read"
        for consumer, rows in record.detail.get("lost", {}).items()
        if rows
    ]


def _indexed(record: Maintenance) -> str:
    detail = record.detail
    planned = record.outcome == PLANNED
    if not record.table:
        verb = "would remove" if planned else "removed"
        count = detail["indexes"]
        return f"{verb} {count} {'index' if count == 1 else 'indexes'} of tables that do not exist any more"
    if record.outcome == NOTHING_TO_DO:
        return "nothing to do: segments cover what they can"
    conflict = "files or segments changed meanwhile; run it again"
    if record.outcome == CONFLICT:
        return f"conflict: {conflict}"
    covered, folded, retired = (
        (detail["files"], detail["folding"], detail["retiring"])
        if planned
        else (detail["files"], detail["folded"], detail["retired"])
    )
    parts = [
        f"{verb} {count_of(count, noun)}"
        for verb, count, noun in (
            ("cover" if planned else "covered", covered, "file"),
            ("fold" if planned else "folded", folded, "segment"),
            ("retire" if planned else "retired", retired, "segment"),
        )
        if count
    ]
    text = f"{'would ' if planned else ''}{', '.join(parts)}"
    if detail.get("damaged"):
        text = f"{count_of(detail['damaged'], 'damaged segment')} found; {text}"
    return f"partial: {text}; {conflict}" if record.outcome == PARTIAL else text


def _expired(record: Maintenance) -> str:
    detail = record.detail
    if record.outcome == NOTHING_TO_DO:
        return f"nothing to do: no version before {detail['before']} can expire"
    verb = "would expire" if record.outcome == PLANNED else "expired"
    span = f"{detail['first']} to {detail['last']}" if detail["versions"] > 1 else str(detail["first"])
    return f"{verb} {count_of(detail['versions'], 'version')} ({span})"


def _swept(record: Maintenance) -> str:
    detail = record.detail
    kept = detail.get("unknown_files", 0)
    unknown = f"; {count_of(kept, 'file')} of unknown origin kept" if kept else ""
    if record.outcome == NOTHING_TO_DO:
        return f"nothing to do: no files to delete{unknown}"
    verb = "would delete" if record.outcome == PLANNED else "deleted"
    states = f" of {count_of(detail['states'], 'expired state')}" if detail["states"] else ""
    what = count_of(detail["files"], "file" if record.table else "leftover file")
    return f"{verb} {what} ({size_text(detail['bytes'])}){states}{unknown}"


def _listing(record: Maintenance) -> list[str]:
    """Of a dry run every file: its size, what it is, why it goes."""
    return [
        f"  {size_text(file['bytes']):>12}  {file['kind']:<9}  {file['file']}  {file['reason']}"
        for file in record.detail.get("listing", ())
    ]


def _policy_text(table: str, found: Policy) -> str:
    if found.retention is None:
        return f"{table} keeps everything"
    return f"{table} keeps {found.retention}" + (f" by {found.column}" if found.column else "")
