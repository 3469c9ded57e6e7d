"""`floodmark init`: make a lake."""

from __future__ import annotations

import typer


def run(context: typer.Context) -> None:
    """Make a lake, or say that it is there."""
    known = context.obj
    with known.open(create=True, read_only=False) as lake:
        status = lake.status()
    data = {
        "lake": status["lake"],
        "catalog": status["catalog"],
        "format": status["format"],
        "version": status["version"],
    }
    known.output.result(data, text=f"lake ready at {status['lake']} (version {status['version']})")
