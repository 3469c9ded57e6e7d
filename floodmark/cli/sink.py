"""`floodmark sink`: the ways out of a lake. Adding, changing, running and asking; what cannot be undone wants --apply.

A run ends in a named outcome per table, as a sentence, in JSON and in the exit code (I12). Dry runs, plans and
questions open the lake read-only and change nothing (I17). Ctrl-C and SIGTERM end a run at its next step; the next one
goes on from there.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli import quarantine
from floodmark.cli.progress import units_progress
from floodmark.cli.sink_opening import exit_with, open_sinks
from floodmark.cli.sink_settings import changed_settings, start_of, wanted_sink
from floodmark.cli.sink_text import (
    check_lines,
    list_row,
    place_text,
    removal_lines,
    replay_lines,
    run_lines,
    set_text,
    status_fields,
    status_problems,
    status_rows,
)
from floodmark.errors import Invalid
from floodmark.json_form import as_json
from floodmark.shown import count_of
from floodmark.sinks.record import NOTHING_TO_DO, PLANNED, STOPPED, SinkRun, worst
from floodmark.sinks.status import SinkReport, sink_report, sink_reports

if TYPE_CHECKING:
    from floodmark.lake import Lake

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Ways out: ship each row once to other systems.")
app.add_typer(quarantine.app, name="quarantine")

Name = Annotated[str, typer.Argument(help="The sink.")]
Apply = Annotated[bool, typer.Option("--apply", help="Really do it.")]
Url = Annotated[str | None, typer.Option(help="http: the address; {table} in it is the table's name.")]
Path = Annotated[str | None, typer.Option(help="files: a folder, or s3://bucket/prefix.")]
Format = Annotated[str | None, typer.Option(help="files: parquet (default) or jsonl.")]
Column = Annotated[list[str] | None, typer.Option(help="Only this column; may be repeated. Keys always go along.")]
Where = Annotated[str | None, typer.Option(help="Only rows like this, in Spark SQL: \"country = 'XX'\".")]
TokenEnv = Annotated[str | None, typer.Option(help="http: the variable that holds the bearer token.")]
TokenFile = Annotated[str | None, typer.Option(help="http: the file that holds the bearer token.")]
Compression = Annotated[str | None, typer.Option(help="http: gzip (default), zstd or none.")]
PartRows = Annotated[int | None, typer.Option(help="http: rows of one request, at most.")]
PartBytes = Annotated[str | None, typer.Option(help="http, files: bytes of one request or object, like 4MiB.")]
Parallel = Annotated[int | None, typer.Option(help="http: requests under way at once.")]
CatalogProperty = Annotated[
    list[str] | None,
    typer.Option("--catalog", metavar="KEY=VALUE", help="iceberg: a property of the other catalog; may be repeated."),
]
Namespace = Annotated[str | None, typer.Option(help="iceberg: the namespace there (default: default).")]
Into = Annotated[str | None, typer.Option(help="iceberg: the table there; {table} (default) is the table's name.")]
Partition = Annotated[list[str] | None, typer.Option(help='iceberg: like "day(ts)"; may be repeated; "" for none.')]
FileCount = Annotated[int | None, typer.Option(help="iceberg: small files of a partition that are worth a rewrite.")]
Protected = Annotated[bool | None, typer.Option("--protected/--unprotected", help="Retention waits for it, or not.")]
Extra = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; KEY= is its default.")
]


# ── what they are ──


@app.command()
def add(
    context: typer.Context,
    name: Name,
    kind: Annotated[str | None, typer.Option(help="http, files or iceberg; without it [sinks.NAME] says.")] = None,
    table: Annotated[list[str] | None, typer.Option(help="A table to follow; may be repeated.")] = None,
    start: Annotated[
        str | None,
        typer.Option(help="beginning (default): what is there already too; head: from now on; or after a sequence."),
    ] = None,
    branch: Annotated[str | None, typer.Option(help="The branch that it follows (default: main).")] = None,
    url: Url = None,
    path: Path = None,
    format: Format = None,
    column: Column = None,
    where: Where = None,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    compression: Compression = None,
    part_rows: PartRows = None,
    part_bytes: PartBytes = None,
    parallel: Parallel = None,
    catalog: CatalogProperty = None,
    namespace: Namespace = None,
    into: Into = None,
    partition: Partition = None,
    compact_file_count: FileCount = None,
    protected: Protected = None,
    set_: Extra = None,
) -> None:
    """Add a sink, by options or by its section in floodmark.toml. Nothing is sent before its first run."""
    # The options are named like the settings that they are for.
    wanted = wanted_sink(name, kind, table or (), context.params, context.obj.settings.sinks)
    with open_sinks(context, read_only=False) as lake:
        about = lake.sinks.add(
            name,
            wanted.kind,
            tables=wanted.tables,
            start=None if start is None else start_of(start),
            branch=wanted.branch,
            **wanted.settings,
        )
    waiting = ", ".join(f"{one['table']} from {place_text(one['mark'])}" for one in about["tables"])
    rows = sum(one["lag_rows"] for one in about["tables"])
    # A row that was changed several times goes out once.
    most = f"{'up to ' if rows else ''}{count_of(rows, 'change')}"
    text = f"added {name}: {about['kind']}, {waiting}; {most} to send with `floodmark sink run {name}`"
    context.obj.output.result({"outcome": "added", **about}, text=text)


@app.command("set")
def set_settings(
    context: typer.Context,
    name: Name,
    url: Url = None,
    path: Path = None,
    format: Format = None,
    column: Column = None,
    where: Where = None,
    token_env: TokenEnv = None,
    token_file: TokenFile = None,
    compression: Compression = None,
    part_rows: PartRows = None,
    part_bytes: PartBytes = None,
    parallel: Parallel = None,
    catalog: CatalogProperty = None,
    namespace: Namespace = None,
    into: Into = None,
    partition: Partition = None,
    compact_file_count: FileCount = None,
    protected: Protected = None,
    set_: Extra = None,
) -> None:
    """Change settings of a sink. An open unit keeps its rows and parts. Another place is another sink."""
    changed_settings(context.params, {})
    with open_sinks(context, read_only=False) as lake:
        changed = changed_settings(context.params, lake.sinks.about(name)["settings"])
        about = lake.sinks.set(name, **changed)
    shown = ", ".join(f"{key}={about['settings'].get(key, 'default')}" for key in changed)
    context.obj.output.result({"outcome": "set", **about}, text=f"set {name}: {shown}; {set_text(changed)}")


@app.command()
def pause(context: typer.Context, name: Name) -> None:
    """Send nothing until it is resumed; a run under way stops at its next step."""
    with open_sinks(context, read_only=False) as lake:
        changed = lake.sinks.pause(name)
    _tell_state(context, name, "paused", changed)


@app.command()
def resume(context: typer.Context, name: Name) -> None:
    """Let a paused sink run again; an open unit comes first."""
    with open_sinks(context, read_only=False) as lake:
        changed = lake.sinks.resume(name)
    _tell_state(context, name, "active", changed)


def _tell_state(context: typer.Context, name: str, state: str, changed: bool) -> None:
    done = "resumed" if state == "active" else state
    data = {"sink": name, "state": state, "outcome": done if changed else NOTHING_TO_DO}
    context.obj.output.result(data, text=f"{done} {name}" if changed else f"nothing to do: {name} is {state}")


@app.command()
def remove(context: typer.Context, name: Name, apply: Apply = False) -> None:
    """Forget a sink, its marks, open units and quarantine; shows what is lost, and does it with --apply."""
    output = context.obj.output
    with open_sinks(context, read_only=not apply) as lake:
        about = sink_report(lake.catalog, lake.catalog.sinks.find(name))
        if apply:
            lake.sinks.remove(name)
    lines = [f"{'removed' if apply else 'would remove'} {name}, and with it", *removal_lines(about)]
    output.result({"outcome": "removed" if apply else PLANNED, **as_json(about)}, text="\n".join(lines))
    if not apply:
        output.note("Add --apply to do it.")


@app.command()
def replay(
    context: typer.Context,
    name: Name,
    start: Annotated[str, typer.Option("--from", help="beginning, mark, head, or after this sequence.")],
    table: Annotated[str | None, typer.Option(help="Only this table.")] = None,
    apply: Apply = False,
) -> None:
    """Open a new epoch: rows newer than a place are sent, also those that were sent before."""
    output = context.obj.output
    with open_sinks(context, read_only=not apply) as lake:
        plans = lake.sinks.plan_replay(name, start=start_of(start), table=table)
        if apply:
            lake.sinks.replay(name, start=start_of(start), table=table)
    data = {"sink": name, "outcome": "replayed" if apply else PLANNED, "tables": plans}
    output.result(data, text="\n".join(replay_lines(plans, done=apply)))
    if any(plan["again"] for plan in plans):
        output.note("What is sent again is there twice at an endpoint or in a folder that appends; keys replace.")
    if not apply:
        output.note("Add --apply to do it.")


# ── how they are ──


@app.command("list")
def list_sinks(context: typer.Context) -> None:
    """List all sinks: what they follow, how far behind they are, and what is wrong."""
    sinks = _all(context)
    if context.obj.output.as_json:
        context.obj.output.result({"sinks": [as_json(about) for about in sinks]})
        return
    rows = [list_row(about) for about in sinks]
    empty = "no sinks: `floodmark sink add` makes one"
    context.obj.output.rows(rows, rows[0] if rows else (), name="sinks", empty=empty)


@app.command()
def status(context: typer.Context, name: Annotated[str | None, typer.Argument(help="Only this sink.")] = None) -> None:
    """Show where a sink is: mark and head, lag, the last unit, errors, quarantine."""
    output = context.obj.output
    if name is None:
        sinks = _all(context)
    else:
        with open_sinks(context) as lake:
            sinks = [sink_report(lake.catalog, lake.catalog.sinks.find(name))]
    if output.as_json:
        found = [as_json(about) for about in sinks]
        output.result({"sinks": found} if name is None else found[0])
        return
    for number, about in enumerate(sinks):
        if number:
            output.result(None, text="")
        output.result(status_fields(about))
        rows = status_rows(about)
        output.rows(rows, rows[0] if rows else (), name="tables", empty="no table")
        for line in status_problems(about):
            output.result(None, text=line)
    if not sinks:
        output.result(None, text="no sinks: `floodmark sink add` makes one")


def _all(context: typer.Context) -> list[SinkReport]:
    with context.obj.open() as lake:
        return sink_reports(lake.catalog)


# ── running ──


@app.command()
def check(context: typer.Context, name: Name) -> None:
    """Try the destination of a sink, before its first run say: no row is sent, no mark moves."""
    with open_sinks(context) as lake:
        found = lake.sinks.check(name)
    context.obj.output.result(found, text="\n".join(check_lines(found)))
    codes = [one["error"]["exit_code"] for one in found["tables"] if one["error"] is not None]
    if codes:
        raise typer.Exit(max(codes))


@app.command()
def run(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The sink.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All sinks, one after the other.")] = False,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Go on until nothing is new.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Also if the destination asked to be left alone for longer.")
    ] = False,
) -> None:
    """Ship what is new: first the unit that is open, if one is, then one unit per table."""
    if (name is None) != every:
        raise Invalid("name one sink, or use --all", advice="`floodmark sink list` shows them.")
    with open_sinks(context, read_only=dry_run) as lake, stoppable() as stop:
        names = [name] if name is not None else [sink.name for sink in lake.catalog.sinks.all()]
        options = {"until_empty": until_empty, "dry_run": dry_run, "now": now}
        runs = _run_each(context, lake, names, stop, options)
    lines = [line for one in runs for line in run_lines(one, named=every)]
    whole = {"outcome": worst(one.outcome for one in runs), "sinks": [one.as_dict() for one in runs]}
    context.obj.output.result(
        whole if every else runs[0].as_dict(), text="\n".join(lines) or "nothing to do: there is no sink yet"
    )
    exit_with(runs)


def _run_each(
    context: typer.Context,
    lake: Lake,
    names: Sequence[str],
    stop: threading.Event,
    options: Mapping[str, bool],
) -> list[SinkRun]:
    """One after the other; what goes wrong with one is its outcome, and the next one follows, unless it was stopped."""
    done: list[SinkRun] = []
    for name in names:
        with units_progress(context.obj.output) as progress:
            found = lake.sinks.run(name, **options, progress=progress, stop=stop)
        done.append(found)
        if found.outcome == STOPPED:
            break
    return done


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Set by the first SIGINT or SIGTERM: the run ends at its next step, by name. A second one ends it at once."""
    stop = threading.Event()

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals come to the main thread alone
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
