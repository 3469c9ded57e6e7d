"""What the commands of sinks begin and end with: the lake, and the exit code of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from floodmark.sinks.record import REFUSED, STOPPED, SinkRun, worst

if TYPE_CHECKING:
    from floodmark.lake import Lake

# Like a command that a person interrupted.
STOPPED_CODE = 130
REFUSED_CODE = 5


def open_sinks(context: typer.Context, *, read_only: bool = True) -> Lake:
    """The lake; every verb of sinks that writes heals by itself first."""
    opened: Lake = context.obj.open(read_only=read_only, heal=False)
    return opened


def exit_with(runs: Sequence[SinkRun]) -> None:
    """End with the exit code of the run that asks for most attention; 0 goes on."""
    outcome = worst(one.outcome for one in runs)
    codes = [one.exit_code for one in runs if one.outcome == outcome]
    code = {STOPPED: STOPPED_CODE, REFUSED: REFUSED_CODE}.get(outcome, max(codes, default=0))
    if code:
        raise typer.Exit(code)
