"""`floodmark restore FILE`: the lost catalog of a lake, from a backup."""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.opening import restore


def run(context: typer.Context, file: Annotated[str, typer.Argument(help="The backup.")]) -> None:
    """Make the lake's catalog again from a backup. Never replaces one that is there."""
    known = context.obj
    done = restore(file, known.path, catalog=known.catalog_url, storage_options=known.settings.storage)
    text = f"version {done['version']} restored as incarnation {done['incarnation']}"
    if done["missing"]:
        text += f"; files are missing for: {', '.join(done['missing'])}"
    known.output.result(done, text=text)
