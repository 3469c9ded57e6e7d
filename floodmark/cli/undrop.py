"""`floodmark undrop TABLE [--version N]`: bring a dropped table back, as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from floodmark.write.undrop import Undropped


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table that was dropped.")],
    version: Annotated[
        int | None, typer.Option(help="A version that had it, if several tables had this name (default: the last).")
    ] = None,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Bring a dropped table back while a version that has it can be read."""
    output = context.obj.output
    found: list[Undropped] = []
    with context.obj.open(read_only=False) as lake:
        commit = lake.undrop(table, version=version, message=message, told=found.append)
    back = found[-1]
    text = f"{table} is back with {back.rows} rows, as of version {back.dropped_version - 1}; version {commit.version}"
    data = {"from_version": back.dropped_version - 1, "references_lost": list(back.references_lost)}
    output.result({**commit.as_dict(), **data}, text=text)
    if back.references_lost:
        columns = ", ".join(back.references_lost)
        output.note(f"References are not checked any more: {columns}. Declare them again with `floodmark apply`.")
