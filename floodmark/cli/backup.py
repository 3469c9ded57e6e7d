"""`floodmark backup FILE`: the catalog, consistent, while writers go on."""

from __future__ import annotations

from typing import Annotated

import typer


def run(context: typer.Context, file: Annotated[str, typer.Argument(help="Where to write it.")]) -> None:
    """Write a backup of the catalog. Table files are not copied."""
    with context.obj.open() as lake:
        done = lake.backup(file)
    context.obj.output.result(
        {**done, "file": file}, text=f"version {done['version']} backed up to {file} ({done['rows']} rows)"
    )
