"""`floodmark sink`: add, change, run and show sinks; refused rows in their quarantine.

A run ends in a named outcome per table, as a sentence, in JSON and in the exit code (I12). Dry runs, plans and
questions open the lake read-only and change nothing (I17); what cannot be undone needs --apply. Ctrl-C and SIGTERM end
a run at its next step; the next run continues from there.

The settings of a sink come from options, or from [sinks.NAME] in floodmark.toml. Texts become what sinks/settings.py
checks. A relative path refers to the folder in which it was given, so it is made absolute here.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from floodmark.cli.context import STOPPED_CODE, open_without_recovery
from floodmark.cli.progress import units_progress
from floodmark.cli.sink_text import (
    check_lines,
    list_row,
    place_text,
    removal_lines,
    replay_lines,
    retry_lines,
    run_lines,
    set_text,
    status_fields,
    status_problems,
    status_rows,
)
from floodmark.errors import Invalid
from floodmark.json_form import Json, as_json
from floodmark.model import MAIN
from floodmark.runs import NOTHING_TO_DO, PLANNED, REFUSED, STOPPED
from floodmark.shown import count_of
from floodmark.sinks.outcome import SinkRun, worst
from floodmark.sinks.settings import Setting, read_section, read_values
from floodmark.sinks.status import SinkReport, sink_report, sink_reports

if TYPE_CHECKING:
    from floodmark.lake import Lake


app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Sinks: ship each row exactly once to other systems."
)
quarantine = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Rows that a sink's destination refused for good."
)
app.add_typer(quarantine, name="quarantine")

Name = Annotated[str, typer.Argument(help="The sink.")]
Apply = Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")]
Url = Annotated[str | None, typer.Option(help="http: URL of the endpoint; {table} is replaced by the table's name.")]
Path = Annotated[str | None, typer.Option(help="files: a folder, or s3://bucket/prefix.")]
Format = Annotated[str | None, typer.Option(help="files: parquet (default) or jsonl.")]
Column = Annotated[
    list[str] | None, typer.Option(help="Only this column; may be repeated. Key columns are always sent.")
]
Where = Annotated[str | None, typer.Option(help="Only rows that match this Spark SQL condition: \"country = 'XX'\".")]
TokenEnv = Annotated[str | None, typer.Option(help="http: environment variable with the bearer token.")]
TokenFile = Annotated[str | None, typer.Option(help="http: file with the bearer token.")]
Compression = Annotated[str | None, typer.Option(help="http: gzip (default), zstd or none.")]
PartRows = Annotated[int | None, typer.Option(help="http: maximum rows per request.")]
PartBytes = Annotated[str | None, typer.Option(help="http, files: maximum bytes per request or object, like 4MiB.")]
Parallel = Annotated[int | None, typer.Option(help="http: maximum number of concurrent requests.")]
CatalogProperty = Annotated[
    list[str] | None,
    typer.Option(
        "--catalog", metavar="KEY=VALUE", help="iceberg: property of the destination catalog; may be repeated."
    ),
]
Namespace = Annotated[str | None, typer.Option(help="iceberg: destination namespace (default: default).")]
Into = Annotated[
    str | None, typer.Option(help="iceberg: destination table; {table} (the default) is the table's name.")
]
Partition = Annotated[
    list[str] | None, typer.Option(help='iceberg: partition field, like "day(ts)"; may be repeated; "" for none.')
]
FileCount = Annotated[int | None, typer.Option(help="iceberg: compact a partition with this many small files.")]
Protected = Annotated[
    bool | None, typer.Option("--protected/--unprotected", help="Whether retention keeps rows until they are sent.")
]
Extra = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; KEY= resets it to its default."),
]


# The options of `add` and `set`, by their settings; a command reads them from context.params.
SETTINGS = {
    "url": Url,
    "path": Path,
    "format": Format,
    "column": Column,
    "where": Where,
    "token_env": TokenEnv,
    "token_file": TokenFile,
    "compression": Compression,
    "part_rows": PartRows,
    "part_bytes": PartBytes,
    "parallel": Parallel,
    "catalog": CatalogProperty,
    "namespace": Namespace,
    "into": Into,
    "partition": Partition,
    "compact_file_count": FileCount,
    "protected": Protected,
    "set_": Extra,
}


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of a sink's settings after its own."""
    own = inspect.signature(command, eval_str=True).parameters

    @wraps(command)
    def run_command(**given: Given) -> None:
        command(**{name: given[name] for name in own})

    settings = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in SETTINGS.items()
    ]
    run_command.__dict__["__signature__"] = inspect.Signature([*own.values(), *settings])
    run_command.__annotations__ = {name: one.annotation for name, one in own.items()} | SETTINGS
    return run_command


# ── what they are ──


@app.command()
@takes_settings
def add(
    context: typer.Context,
    name: Name,
    kind: Annotated[str | None, typer.Option(help="http, files or iceberg (default: from [sinks.NAME]).")] = None,
    table: Annotated[list[str] | None, typer.Option(help="A table to follow; may be repeated.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            help="beginning (default): existing rows too; head: only new changes; or the sequence to start after."
        ),
    ] = None,
    branch: Annotated[str | None, typer.Option(help="The branch to follow (default: main).")] = None,
) -> None:
    """Add a sink, from options or its section in floodmark.toml. Nothing is sent before its first run."""
    # The options are named like the settings that they are for.
    wanted = wanted_sink(name, kind, table or (), branch, context.params, context.obj.settings.sinks)
    with open_without_recovery(context, read_only=False) as lake:
        about = lake.sinks.add(
            name,
            wanted.kind,
            tables=wanted.tables,
            start=None if start is None else start_of(start),
            branch=wanted.branch,
            **wanted.settings,
        )
        added = sink_report(lake.catalog, lake.catalog.sinks.find(name))
    waiting = ", ".join(f"{one.table} from {place_text(one.mark)}" for one in added.tables)
    rows = sum(one.lag_rows for one in added.tables)
    # A row that was changed several times goes out once.
    most = f"{'up to ' if rows else ''}{count_of(rows, 'change')}"
    text = f"added {name}: {added.kind}, {waiting}; {most} to send with `floodmark sink run {name}`"
    context.obj.output.result({"outcome": "added", **about}, text=text)


@app.command("set")
@takes_settings
def set_settings(context: typer.Context, name: Name) -> None:
    """Change settings of a sink. An open unit keeps its rows and parts. The destination cannot change."""
    changed_settings(context.params, {})
    with open_without_recovery(context, read_only=False) as lake:
        changed = changed_settings(context.params, json.loads(lake.catalog.sinks.find(name).settings))
        about = lake.sinks.set(name, **changed)
        known = json.loads(lake.catalog.sinks.find(name).settings)
    shown = ", ".join(f"{key}={known.get(key, 'default')}" for key in changed)
    context.obj.output.result({"outcome": "set", **about}, text=f"set {name}: {shown}; {set_text(changed)}")


@app.command()
def pause(context: typer.Context, name: Name) -> None:
    """Pause a sink until it is resumed; a current run stops at its next step."""
    with open_without_recovery(context, read_only=False) as lake:
        changed = lake.sinks.pause(name)
    _tell_state(context, name, "paused", changed)


@app.command()
def resume(context: typer.Context, name: Name) -> None:
    """Resume a paused sink; it finishes an open unit first."""
    with open_without_recovery(context, read_only=False) as lake:
        changed = lake.sinks.resume(name)
    _tell_state(context, name, "active", changed)


def _tell_state(context: typer.Context, name: str, state: str, changed: bool) -> None:
    done = "resumed" if state == "active" else state
    data = {"sink": name, "state": state, "outcome": done if changed else NOTHING_TO_DO}
    context.obj.output.result(data, text=f"{done} {name}" if changed else f"nothing to do: {name} is {state}")


@app.command()
def remove(context: typer.Context, name: Name, apply: Apply = False) -> None:
    """Remove a sink with its marks, open units and quarantine. Shows what is lost; --apply removes it."""
    output = context.obj.output
    with open_without_recovery(context, read_only=not apply) as lake:
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
    start: Annotated[str, typer.Option("--from", help="beginning, mark, head, or the sequence to start after.")],
    table: Annotated[str | None, typer.Option(help="Only this table.")] = None,
    apply: Apply = False,
) -> None:
    """Start a new epoch: send all rows after a position, also rows that were sent before."""
    output = context.obj.output
    with open_without_recovery(context, read_only=not apply) as lake:
        plans = lake.sinks.plan_replay(name, start=start_of(start), table=table)
        if apply:
            lake.sinks.replay(name, start=start_of(start), table=table)
    data = {"sink": name, "outcome": "replayed" if apply else PLANNED, "tables": plans}
    output.result(data, text="\n".join(replay_lines(plans, done=apply)))
    if any(plan["again"] for plan in plans):
        output.note("Rows that are sent again appear twice at destinations that append; with keys, they replace.")
    if not apply:
        output.note("Add --apply to do it.")


# ── how they are ──


@app.command("list")
def list_sinks(context: typer.Context) -> None:
    """List all sinks: their tables, lag and problems."""
    sinks = _all(context)
    if context.obj.output.as_json:
        context.obj.output.result({"sinks": [as_json(about) for about in sinks]})
        return
    rows = [list_row(about) for about in sinks]
    empty = "no sinks; add one with `floodmark sink add`"
    context.obj.output.rows(rows, rows[0] if rows else (), name="sinks", empty=empty)


@app.command()
def status(context: typer.Context, name: Annotated[str | None, typer.Argument(help="Only this sink.")] = None) -> None:
    """Show the state of sinks: mark, head, lag, last unit, errors, quarantine."""
    output = context.obj.output
    if name is None:
        sinks = _all(context)
    else:
        with open_without_recovery(context) as lake:
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
        output.result(None, text="no sinks; add one with `floodmark sink add`")


def _all(context: typer.Context) -> list[SinkReport]:
    with context.obj.open() as lake:
        return sink_reports(lake.catalog)


# ── running ──


@app.command()
def check(context: typer.Context, name: Name) -> None:
    """Check the connection to a sink's destination. Sends no rows and moves no marks."""
    with open_without_recovery(context) as lake:
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
    until_empty: Annotated[bool, typer.Option("--until-empty", help="Repeat until no changes are left.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent; send nothing.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Do not wait as long as the destination asked for.")] = False,
) -> None:
    """Ship new changes: an open unit first, then one unit per table."""
    if (name is None) != every:
        raise Invalid("name one sink, or use --all", advice="`floodmark sink list` shows them.")
    with open_without_recovery(context, read_only=dry_run) as lake, stoppable() as stop:
        names = [name] if name is not None else [sink.name for sink in lake.catalog.sinks.all()]
        options = {"until_empty": until_empty, "dry_run": dry_run, "now": now}
        runs = _run_each(context, lake, names, stop, options)
    lines = [line for one in runs for line in run_lines(one, named=every)]
    whole = {"outcome": worst(one.outcome for one in runs), "sinks": [one.as_dict() for one in runs]}
    context.obj.output.result(
        whole if every else runs[0].as_dict(), text="\n".join(lines) or "nothing to do: no sinks yet"
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


# ── exit codes ──


REFUSED_CODE = 5


def exit_with(runs: Sequence[SinkRun]) -> None:
    """End with the exit code of the run that needs most attention; a code of 0 returns."""
    outcome = worst(one.outcome for one in runs)
    codes = [one.exit_code for one in runs if one.outcome == outcome]
    code = {STOPPED: STOPPED_CODE, REFUSED: REFUSED_CODE}.get(outcome, max(codes, default=0))
    if code:
        raise typer.Exit(code)


# ── settings ──


# The value of an option, as the command line gives it.
Given: TypeAlias = str | int | bool | Sequence[str] | None
# Options that are named like their setting.
_SAME = (
    *("url", "path", "format", "where", "token_env", "token_file", "compression", "part_rows", "part_bytes"),
    *("parallel", "namespace", "compact_file_count", "protected"),
)
_OTHER = {"into": "table", "column": "columns"}
# Settings that have keys of their own.
_NESTED = ("catalog", "storage")


@dataclass(frozen=True)
class NewSink:
    """A sink to be added."""

    kind: str
    tables: list[str]
    settings: dict[str, Setting]
    branch: str = MAIN


def wanted_sink(
    name: str,
    kind: str | None,
    tables: Iterable[str],
    branch: str | None,
    given: Mapping[str, Given],
    sections: Mapping[str, Mapping[str, Json]],
) -> NewSink:
    """With a kind: from the options. Without: from the settings file, which options override."""
    settings = given_settings(given)
    chosen = list(tables)
    if kind is None:
        section = dict(sections.get(name, {}))
        if not section:
            raise Invalid(
                "the kind of the sink is missing",
                sink=name,
                advice=f"Use --kind http, files or iceberg, or write [sinks.{name}] with type into floodmark.toml.",
            )
        declared = read_section(section)
        kind, branch, chosen = declared.kind, branch or declared.branch, chosen or declared.tables
        settings = {**declared.settings, **_merged(settings, section)}
    if not chosen:
        raise Invalid("a sink follows at least one table", sink=name, advice="Name it with --table, or as tables.")
    return NewSink(kind, chosen, {key: value for key, value in settings.items() if value is not None}, branch or MAIN)


def changed_settings(given: Mapping[str, Given], known: Mapping[str, Json]) -> dict[str, Setting]:
    """What `set` was asked to change; of settings that have keys of their own, only the keys that were named."""
    changed = given_settings(given)
    if not changed:
        raise Invalid("nothing to set", advice="Name a setting: --url, --where, …, or --set KEY=VALUE.")
    return _merged(changed, known)


def _merged(changed: Mapping[str, Setting], known: Mapping[str, Json]) -> dict[str, Setting]:
    nested = {name: {**_section(known.get(name)), **_section(changed[name])} for name in _NESTED if changed.get(name)}
    return {**changed, **nested}


def _section(value: Setting) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def given_settings(given: Mapping[str, Given]) -> dict[str, Setting]:
    """The settings among the options of a command, as they were given; None puts one back to its default."""
    found: dict[str, Setting] = {name: given[name] for name in _SAME if given.get(name) is not None}
    found |= {setting: given[option] for option, setting in _OTHER.items() if given.get(option)}
    if partition := _texts(given, "partition"):
        # An empty text means: not partitioned.
        found["partition"] = [text for text in partition if text]
    nested: dict[str, dict[str, Json]] = {}
    for text in [*(f"catalog.{text}" for text in _texts(given, "catalog")), *_texts(given, "set_")]:
        name, equals, value = text.partition("=")
        if not equals:
            raise Invalid("expected KEY=VALUE", value=repr(text), advice="Like --set timeout_s=10.")
        outer, _, inner = name.partition(".")
        if outer in _NESTED and inner:
            nested.setdefault(outer, {})[inner] = value
            found[outer] = nested[outer]
        else:
            found[name] = value or None
    return read_values(found)


def _texts(given: Mapping[str, Given], name: str) -> Sequence[str]:
    """An option that can be repeated."""
    found = given.get(name)
    return [found] if isinstance(found, str) else found if isinstance(found, Sequence) else []


def start_of(text: str) -> str | int:
    """Where a sink begins: a word, or a sequence."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


# ── quarantine: rows that the destination refused for good ──


Ids = Annotated[list[str] | None, typer.Option("--id", help="Only the row with this id; may be repeated.")]
REFUSED_COLUMNS = ("id", "table", "reason", "tries", "first", "last", "line")


@quarantine.command("list")
def list_refused(
    context: typer.Context,
    name: Name,
    table: Annotated[str | None, typer.Option(help="Only of this table.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows, oldest first.")] = 100,
) -> None:
    """List refused rows, oldest first: what was sent, and why it was refused."""
    with open_without_recovery(context) as lake:
        total = sink_report(lake.catalog, lake.catalog.sinks.find(name)).quarantined
        found = lake.sinks.quarantine(name, table=table, limit=limit)
    output = context.obj.output
    if output.as_json:
        output.result({"sink": name, "quarantined": total, "rows": found})
        return
    rows = [{**entry, "line": entry["line"].strip()} for entry in found]
    output.rows(rows, REFUSED_COLUMNS, name="rows", empty="no row is in quarantine")
    if len(found) == limit and total > limit and table is None:
        output.note(f"{total - limit} more; --limit shows them.")


@quarantine.command("add")
def add_refused(
    context: typer.Context,
    name: Name,
    part: Annotated[str, typer.Option(metavar="FIRST-LAST", help="The part, as shown in the sink's last error.")],
    table: Annotated[str | None, typer.Option(help="Its table, if several tables have open units.")] = None,
    reason: Annotated[str, typer.Option(help="Reason to store with the rows.")] = "",
) -> None:
    """Move the rows of a part that always fails to quarantine, so that the sink can continue."""
    first, last = _part_rows(part)
    with open_without_recovery(context, read_only=False) as lake:
        count = lake.sinks.set_aside(name, first=first, last=last, table=table, reason=reason)
    rows = count_of(count, "row")
    data = {"sink": name, "part": part, "rows": count, "outcome": "set_aside" if count else NOTHING_TO_DO}
    done = f"set aside {rows} of {name}; `floodmark sink run {name}` continues"
    context.obj.output.result(data, text=done if count else "nothing to do: the other lake already has these rows")


def _part_rows(part: str) -> tuple[int, int]:
    first, _, last = part.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise Invalid(
            "invalid part: expected FIRST-LAST",
            part=part,
            advice="Use the part from the sink's last error, like 0-5000.",
        )
    return int(first), int(last)


@quarantine.command("retry")
def retry_refused(context: typer.Context, name: Name, ids: Ids = None) -> None:
    """Send refused rows again with their current values; rows replaced since are removed from quarantine."""
    with open_without_recovery(context, read_only=False) as lake:
        run = lake.sinks.retry(name, ids=ids or None)
    context.obj.output.result(run.as_dict(), text="\n".join(retry_lines(run)))
    exit_with([run])


@quarantine.command("drop")
def drop_refused(
    context: typer.Context,
    name: Name,
    ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All rows in quarantine.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
) -> None:
    """Delete refused rows from quarantine for good; they are never sent."""
    if bool(ids) == every:
        raise Invalid("name rows with --id, or use --all", advice="`floodmark sink quarantine list` shows them.")
    chosen = None if every else ids
    with open_without_recovery(context, read_only=not apply) as lake:
        count = lake.sinks.drop(name, ids=chosen) if apply else _count_refused(lake, name, chosen)
    data: dict[str, Json] = {"sink": name, "rows": count}
    rows = count_of(count, "refused row")
    if not count:
        context.obj.output.result({**data, "outcome": NOTHING_TO_DO}, text="nothing to do: no row is in quarantine")
    elif apply:
        context.obj.output.result({**data, "outcome": "dropped"}, text=f"dropped {rows} of {name}")
    else:
        context.obj.output.result({**data, "outcome": PLANNED}, text=f"would drop {rows} of {name}")
        context.obj.output.note("Add --apply to do it.")


def _count_refused(lake: Lake, name: str, ids: list[str] | None) -> int:
    """How many would go: those that are being sent again stay."""
    found = {entry["id"]: entry for entry in lake.sinks.quarantine(name)}
    unknown = sorted(set(ids or ()) - set(found))
    if unknown:
        raise Invalid("no refused row has this id", sink=name, id=unknown[0])
    chosen = found.values() if ids is None else [found[one] for one in set(ids)]
    return sum(entry["retry_unit"] is None for entry in chosen)
