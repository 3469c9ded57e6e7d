"""`floodmark adopt TABLE LOCATION`: an Iceberg table of another engine into the lake, without rewriting a file."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="Its name in the lake.")],
    location: Annotated[str, typer.Argument(help="Its folder, or one of its metadata.json files.")],
    key: Annotated[list[str] | None, typer.Option(help="A key column; may be repeated. Checked to be unique.")] = None,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Adopt an Iceberg table; its files stay where they are, and its old catalog must not be written to any more."""
    with context.obj.open(read_only=False) as lake:
        commit = lake.adopt(table, location, key=key or [], message=message)
    adopted = commit.table(table)
    text = f"{table} adopted: {adopted.rows_total} rows in {adopted.files_total} files, version {commit.version}"
    context.obj.output.result(commit.as_dict(), text=text)
