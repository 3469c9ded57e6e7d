"""`floodmark changes TABLE --since N`: what came, changed and went after a sequence."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.model import MAIN


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    since: Annotated[int | None, typer.Option(help="After this sequence; without it, from the beginning.")] = None,
    until: Annotated[int | None, typer.Option(help="Up to this sequence; without it, the newest.")] = None,
    version: Annotated[int | None, typer.Option(help="Read at this version.")] = None,
    branch: OnBranch = MAIN,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 100,
) -> None:
    """Show the changes of a table: rows that came or changed, keys that were deleted."""
    from floodmark.rows.json.text_files import dicts, json_value

    with context.obj.open() as lake:
        changes = lake.changes(table, since, until, version=version, branch=branch)
        reader = changes.arrow()
        rows = list(islice((row for batch in reader for row in dicts(batch)), limit + 1))
        names = ["_seq", "_change", *(name for name in reader.schema.names if name not in ("_seq", "_change"))]
    output = context.obj.output
    if output.as_json:
        facts = {"table": table, "since": since, "until": changes.until, "version": changes.version}
        output.result({**facts, "more": len(rows) > limit, "changes": json_value(rows[:limit])})
        return
    output.rows(rows[:limit], names, name="changes", empty="nothing new")
    if len(rows) > limit:
        output.note(f"(more than {limit} changes; --limit shows more, `floodmark export --changes` writes all)")
        return
    output.note(f"up to sequence {changes.until}: the next question is --since {changes.until}")
