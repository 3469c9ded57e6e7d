"""The commands for earlier versions: `diff` shows what differs between two; `rollback` returns tables to one.

`rollback` shows what would change, and what followers of the tables would not learn; `--apply` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.branch import show_tables
from floodmark.cli.context import IfVersion, OnBranch
from floodmark.model import MAIN

if TYPE_CHECKING:
    from floodmark.branches.records import RollbackPlan, RolledBack

_MOMENT = "A version, or a time like 2026-11-15T10:00:00Z."


def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(help=_MOMENT)],
    after: Annotated[str, typer.Argument(help=_MOMENT)],
    table: Annotated[str | None, typer.Option("--table", help="Only this table.")] = None,
    branch: Annotated[str, typer.Option("--branch", help="The branch whose versions times mean.")] = MAIN,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows to show per table.")] = 20,
) -> None:
    """Show what differs between two versions: per table, rows added, updated and deleted, and columns."""
    with context.obj.open() as lake:
        found = lake.diff(_moment(before), _moment(after), table, branch=branch, limit=limit)
    output = context.obj.output
    if output.as_json:
        output.result(found.as_dict())
        return
    empty = f"versions {found.common_version} and {found.head_version} do not differ"
    show_tables(output, found.tables, empty=empty)


def rollback(
    context: typer.Context,
    to: Annotated[str, typer.Option(help=_MOMENT)],
    table: Annotated[str | None, typer.Argument(help="The table (default: every table, in one version).")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
    batch: Annotated[
        str | None, typer.Option(help="Id of this rollback: a rollback with the same id is a no-op.")
    ] = None,
    branch: OnBranch = MAIN,
    if_version: IfVersion = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of rows to show per table.")] = 20,
) -> None:
    """Give tables the contents that they had at a version, as a new version."""
    output = context.obj.output
    moment = _moment(to)
    if not apply:
        with context.obj.open() as lake:
            plan = lake.plan_rollback(table, to=moment, branch=branch, limit=limit)
        if output.as_json:
            output.result({"outcome": "planned", **plan.as_dict()})
            return
        show_tables(output, plan.tables, empty=f"nothing to do: the contents are those of version {plan.to_version}")
        for line in _left(plan):
            output.note(line)
        if plan.tables:
            output.result({}, text=f"would roll back {len(plan.tables)} table(s) to version {plan.to_version}")
            output.note("Add --apply to do it.")
        return
    with context.obj.open(read_only=False) as lake:
        done = lake.rollback(table, to=moment, batch=batch, branch=branch, message=message, if_version=if_version)
    output.result(done.as_dict(), text=_done_text(done, batch))
    for line in _left(done):
        output.note(line)


def _moment(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _done_text(done: RolledBack, batch: str | None) -> str:
    if done.outcome == "nothing_to_do":
        return f"nothing to do: the contents are those of version {done.to_version}"
    if done.outcome == "already_committed":
        return f"nothing to do: batch {batch} was already committed in version {done.version}"
    counts = ", ".join(
        f"{sum(getattr(one, f'rows_{what}') for one in done.tables)} {what}" for what in ("added", "updated", "deleted")
    )
    back = f"{len(done.tables)} table(s) to version {done.to_version}"
    return f"rolled back {back}, as version {done.version}: rows {counts}"


def _left(found: RollbackPlan | RolledBack) -> Iterator[str]:
    """What a rollback leaves as it is, and what followers do not learn from it."""
    for table, rows in found.unreported.items():
        yield f"{table} has no key: `changes` cannot report {rows} row(s) that go; sinks and other followers keep them."
    if found.created:
        yield f"Created since, and left as they are: {', '.join(found.created)}"
    for table in found.dropped:
        yield f"Dropped since, and left so: `floodmark undrop {table}` restores {table} as it was last."
