"""The commands that find rows by key or by value: `get` and `lookup`. They start no Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.cli.output import Output
from floodmark.errors import Invalid
from floodmark.json_form import as_json
from floodmark.model import MAIN

if TYPE_CHECKING:
    from floodmark.lookups import FoundRows

OfTable = Annotated[str, typer.Argument(help="The table.")]
AtVersion = Annotated[int | None, typer.Option("--version", help="Read this version.")]
AtTime = Annotated[str | None, typer.Option("--at", help="Read the version at this time, like 2026-11-15T10:00:00Z.")]
Explained = Annotated[bool, typer.Option("--explain", help="Show what the lookup uses, in place of the rows.")]


def get(
    context: typer.Context,
    table: OfTable,
    key: Annotated[
        list[str],
        typer.Argument(help="The key: a value for each of its columns, in the table's order. Further keys may follow."),
    ],
    version: AtVersion = None,
    at: AtTime = None,
    branch: OnBranch = MAIN,
    explain: Explained = False,
) -> None:
    """Show the rows with these keys. Exits with 1 if a key has no row."""
    from floodmark.lookups import Moment, cut_keys, explain_key, find_keys

    moment, output = Moment(version, at, branch), context.obj.output
    with context.obj.open() as lake:
        keys = cut_keys(lake, table, key, moment)
        if explain:
            used = explain_key(lake, table, keys[0], moment)
            output.result(used.as_dict(), text=str(used))
            return
        found = find_keys(lake, table, keys, moment)
    _show(output, found, empty="")
    if found.not_found:
        for one in found.not_found:
            output.note(f"not found in {table} at version {found.version}: {', '.join(one)}")
        raise typer.Exit(1)


def lookup(
    context: typer.Context,
    table: OfTable,
    values: Annotated[
        list[str] | None,
        typer.Argument(help="column=value; the same column again: one of the values. A list column: it contains it."),
    ] = None,
    null: Annotated[list[str] | None, typer.Option("--null", help="A column that is null; can be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 100,
    order: Annotated[
        list[str] | None, typer.Option("--order", help='Order by this column, or "column desc"; can be repeated.')
    ] = None,
    after: Annotated[str | None, typer.Option(help="The cursor of the page before: continue after it.")] = None,
    columns: Annotated[str | None, typer.Option(help="Only these columns, in this order: id,name.")] = None,
    version: AtVersion = None,
    at: AtTime = None,
    branch: OnBranch = MAIN,
    explain: Explained = False,
) -> None:
    """Show rows whose columns have these values, a page at a time. An index makes it quick; without one it scans."""
    from floodmark.lookups import Moment, as_values, find_values

    asked, moment, output = _values(values or (), null or ()), Moment(version, at, branch), context.obj.output
    chosen = None if columns is None else [name.strip() for name in columns.split(",")]
    with context.obj.open() as lake:
        if explain:
            options = {"limit": limit, "order": order, "after": after, "columns": chosen}
            place = {"version": version, "at": at, "branch": branch}
            used = lake.lookup(table, as_values(asked), explain=True, **options, **place)
            output.result(used.as_dict(), text=str(used))
            return
        found = find_values(lake, table, asked, moment, limit=limit, order=order, after=after, columns=chosen)
    _show(output, found, empty="no rows")
    if found.next is not None:
        output.note(f"(more rows; the next page: --after {found.next})")


def _values(texts: Sequence[str], nulls: Sequence[str]) -> Mapping[str, Sequence[str | None]]:
    found: dict[str, list[str | None]] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise Invalid("this is not column=value", given=text, advice="Write it like customer=7.")
        found.setdefault(name, []).append(value)
    for name in nulls:
        found.setdefault(name, []).append(None)
    return found


def _show(output: Output, found: FoundRows, *, empty: str) -> None:
    if output.as_json:
        output.result(as_json(found))
    elif found.rows:
        output.rows(found.rows, list(found.rows[0]), name="rows", empty=empty)
    elif empty:
        output.result(None, text=empty)
