"""`floodmark sink quarantine`: rows that a destination refused for good: look at them, send them again, let them go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.sink_opening import exit_with, open_sinks
from floodmark.cli.sink_text import retry_lines
from floodmark.errors import Invalid
from floodmark.json_form import Json
from floodmark.shown import count_of
from floodmark.sinks.record import NOTHING_TO_DO, PLANNED

if TYPE_CHECKING:
    from floodmark.lake import Lake

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Rows that a sink's destination refused for good.")

Name = Annotated[str, typer.Argument(help="The sink.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only the row with this id; may be repeated.")]
SHOWN = ("id", "table", "reason", "tries", "first", "last", "line")


@app.command("list")
def list_rows(
    context: typer.Context,
    name: Name,
    table: Annotated[str | None, typer.Option(help="Only of this table.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many, oldest first.")] = 100,
) -> None:
    """List refused rows, oldest first: what was sent, and why it was refused."""
    with open_sinks(context) as lake:
        if table is not None:
            lake.catalog.sinks.find(name).table(table)  # a name that is not there is not an empty quarantine
        total = lake.sinks.about(name)["quarantined"]
        found = lake.sinks.quarantine(name, table=table, limit=limit)
    output = context.obj.output
    if output.as_json:
        output.result({"sink": name, "quarantined": total, "rows": found})
        return
    rows = [{**entry, "line": entry["line"].strip()} for entry in found]
    output.rows(rows, SHOWN, name="rows", empty="no row is in quarantine")
    if len(found) == limit and total > limit and table is None:
        output.note(f"{total - limit} more; --limit shows them.")


@app.command()
def add(
    context: typer.Context,
    name: Name,
    part: Annotated[str, typer.Option(metavar="FIRST-LAST", help="The part, as the last error of the sink names it.")],
    table: Annotated[str | None, typer.Option(help="Its table, if units of several are open.")] = None,
    reason: Annotated[str, typer.Option(help="Why; kept with the rows.")] = "",
) -> None:
    """Set the rows of a part aside that fails at every try, so that the sink goes on behind it."""
    first, last = _rows_of(part)
    with open_sinks(context, read_only=False) as lake:
        count = lake.sinks.set_aside(name, first=first, last=last, table=table, reason=reason)
    rows = count_of(count, "row")
    data = {"sink": name, "part": part, "rows": count, "outcome": "set_aside" if count else NOTHING_TO_DO}
    done = f"set aside {rows} of {name}; `floodmark sink run {name}` goes on"
    context.obj.output.result(data, text=done if count else "nothing to do: the other lake has these rows")


def _rows_of(part: str) -> tuple[int, int]:
    first, _, last = part.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise Invalid("a part is written FIRST-LAST", part=part, advice="Like 0-5000: see the last error.")
    return int(first), int(last)


@app.command()
def retry(context: typer.Context, name: Name, ids: Ids = None) -> None:
    """Send refused rows again, as they are now; those that something newer replaced are let go."""
    with open_sinks(context, read_only=False) as lake:
        run = lake.sinks.retry(name, ids=ids or None)
    context.obj.output.result(run.as_dict(), text="\n".join(retry_lines(run)))
    exit_with([run])


@app.command()
def drop(
    context: typer.Context,
    name: Name,
    ids: Ids = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Really do it.")] = False,
) -> None:
    """Let refused rows go for good: they are at no destination, and will not be sent again."""
    if bool(ids) == every:
        raise Invalid("name rows with --id, or use --all", advice="`floodmark sink quarantine list` shows them.")
    chosen = None if every else ids
    with open_sinks(context, read_only=not apply) as lake:
        count = lake.sinks.drop(name, ids=chosen) if apply else _count(lake, name, chosen)
    data: dict[str, Json] = {"sink": name, "rows": count}
    rows = count_of(count, "refused row")
    if not count:
        context.obj.output.result({**data, "outcome": NOTHING_TO_DO}, text="nothing to do: no row is in quarantine")
    elif apply:
        context.obj.output.result({**data, "outcome": "dropped"}, text=f"dropped {rows} of {name}")
    else:
        context.obj.output.result({**data, "outcome": PLANNED}, text=f"would drop {rows} of {name}")
        context.obj.output.note("Add --apply to do it.")


def _count(lake: Lake, name: str, ids: list[str] | None) -> int:
    """How many would go: those that are being sent again stay."""
    found = {entry["id"]: entry for entry in lake.sinks.quarantine(name)}
    unknown = sorted(set(ids or ()) - set(found))
    if unknown:
        raise Invalid("no refused row has this id", sink=name, id=unknown[0])
    chosen = found.values() if ids is None else [found[one] for one in set(ids)]
    return sum(entry["retry_unit"] is None for entry in chosen)
