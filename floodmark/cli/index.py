"""`floodmark index`: declare indexes on columns, see what they cover, drop them.

Creating one reads no rows and waits for nothing. A drop loses no row, but a large index takes long to build again: so
it shows first what it would do, and wants --apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.output import size_text
from floodmark.json_form import Json, as_json
from floodmark.runs import NOTHING_TO_DO
from floodmark.shown import count_of

if TYPE_CHECKING:
    from floodmark.cli.output import Output
    from floodmark.index.records import IndexStatus

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Indexes: find the rows that have a value without a scan."
)

Table = Annotated[str, typer.Argument(help="The table.")]
On = Annotated[list[str], typer.Option("--on", help="The columns, like customer or country,city.")]
Kind = Annotated[str | None, typer.Option(help="key or value (default: what the columns are).")]
COLUMNS = ("table", "on", "kind", "state", "segments", "broken", "size", "files", "rows")


@app.command()
def create(context: typer.Context, table: Table, on: On, kind: Kind = None) -> None:
    """Create an index on columns (no-op if it exists). Rows are not read; `maintain` covers existing files."""
    with context.obj.open(read_only=False) as lake:
        done = lake.indexes.create(table, on=_names(on), kind=kind)
        found = [one for one in lake.indexes.status(table) if (one.on, one.kind) == (done.on, done.kind)]
    output = context.obj.output
    about = f"{table} has an index on {', '.join(done.on)}"
    text = f"nothing to do: {about}" if done.outcome == NOTHING_TO_DO else f"created: {about}"
    output.result({**as_json(done), "index": as_json(found[0]) if found else None}, text=text)
    show_advice(output, found)


@app.command("list")
def list_indexes(
    context: typer.Context, table: Annotated[str | None, typer.Argument(help="Only this table.")] = None
) -> None:
    """List the indexes: their state, their size, and the files and rows that they cover."""
    with context.obj.open() as lake:
        found = lake.indexes.status(table)
    output = context.obj.output
    rows = [as_json(one) for one in found] if output.as_json else list(map(index_row, found))
    output.rows(rows, COLUMNS, name="indexes", empty="no indexes; `floodmark index create TABLE --on COLUMN` makes one")
    show_advice(output, found)


@app.command()
def drop(
    context: typer.Context,
    table: Table,
    on: On,
    kind: Kind = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
) -> None:
    """Drop an index. No row is lost; lookups and keyed writes work without it, slower."""
    with context.obj.open(read_only=not apply) as lake:
        found = lake.indexes.list(table)
        done = lake.indexes.drop(table, on=_names(on), kind=kind, dry_run=not apply)
    one = next((line for line in found if (line.on, line.kind) == (done.on, done.kind)), None)
    segments, size = (0, 0) if one is None else (one.segments, one.bytes)
    about = f"the {done.kind} index on {', '.join(done.on)} of {table}"
    output = context.obj.output
    if done.outcome == NOTHING_TO_DO:
        text = f"nothing to do: {about} is dropped"
    else:
        verb = "dropped" if apply else "would drop"
        text = f"{verb} {about}: {count_of(segments, 'segment')}, {size_text(size)}"
    output.result({**as_json(done), "segments": segments, "bytes": size}, text=text)
    if not apply and done.outcome != NOTHING_TO_DO:
        output.note("Add --apply to do it.")


def index_row(one: IndexStatus) -> dict[str, Json]:
    """An index in one line of a table."""
    return {
        **as_json(one),
        "state": one.state if one.reason is None else f"{one.state}: {one.reason}",
        "size": size_text(one.bytes),
        "files": f"{one.files_covered} of {one.files}",
        "rows": f"{one.rows_covered} of {one.rows}",
    }


def show_advice(output: Output, found: Sequence[IndexStatus]) -> None:
    for one in found:
        if one.advice:
            output.note(f"{one.table} on {', '.join(one.on)}: {one.advice}")


def _names(on: Sequence[str]) -> list[str]:
    return [name.strip() for one in on for name in one.split(",")]
