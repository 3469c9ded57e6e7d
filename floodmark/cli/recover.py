"""`floodmark recover`: settle what dead processes left, now instead of at the next write."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from floodmark.errors import Invalid


def run(
    context: typer.Context,
    discard: Annotated[
        list[str] | None, typer.Option(help="Give up an operation that cannot be understood (its id), with its files.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Really discard.")] = False,
) -> None:
    """Finish or undo what a dead process left, and say what was done."""
    if discard and not apply:
        raise Invalid(
            "this would give up operations for good",
            operations=",".join(discard),
            advice="Their staged files would be deleted. Add --apply to do it.",
        )
    with context.obj.open(read_only=False, heal=False) as lake:
        report = lake.recover(discard=discard or ())
    data = {"outcome": report.outcome, **asdict(report)}
    counts = ", ".join(
        f"{len(data[name])} {name.replace('_', ' ')}"
        for name in ("rolled_forward", "rolled_back", "discarded")
        if data[name]
    )
    done = counts or "nothing to do"
    context.obj.output.result(data, text=f"{report.outcome}: {done}; {report.files_deleted} files deleted")
