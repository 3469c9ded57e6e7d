"""What the commands of sinks begin and end with: a lake that knows sinks, and the exit code of their runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from floodmark.errors import Invalid
from floodmark.export.record import REFUSED, STOPPED, SinkRun, worst
from floodmark.report import SINKS_FORMAT

if TYPE_CHECKING:
    from floodmark.lake import Lake

# Like a command that a person interrupted.
STOPPED_CODE = 130
REFUSED_CODE = 5


@contextmanager
def open_sinks(context: typer.Context, *, read_only: bool = True) -> Iterator[Lake]:
    """The lake; every verb of sinks that writes heals by itself first."""
    with context.obj.open(read_only=read_only, heal=False) as lake:
        stored = lake.catalog.lake_row().format
        if stored < SINKS_FORMAT:
            raise Invalid(
                "the lake's format is older than sinks",
                format=stored,
                advice="Any write brings it up to date, and so does `floodmark recover`.",
            )
        yield lake


def exit_with(runs: Sequence[SinkRun]) -> None:
    """End with the exit code of the run that asks for most attention; 0 goes on."""
    outcome = worst(one.outcome for one in runs)
    codes = [one.exit_code for one in runs if one.outcome == outcome]
    code = {STOPPED: STOPPED_CODE, REFUSED: REFUSED_CODE}.get(outcome, max(codes, default=0))
    if code:
        raise typer.Exit(code)
