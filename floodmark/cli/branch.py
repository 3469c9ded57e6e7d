"""`floodmark branch`: try a change on the side, look at it, bring it in or throw it away.

A merge that finds conflicts changes nothing, lists them as data and exits 3; up to date is done, so it exits 0 (I12).
Deleting shows first what was never merged, and wants --apply.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark import clock
from floodmark.cli.context import IfVersion
from floodmark.cli.output import Output
from floodmark.json_form import Json
from floodmark.model import Row

if TYPE_CHECKING:
    from floodmark.branches.records import Merged, TableDiff
    from floodmark.commit.branches import Branch
    from floodmark.lake import Lake

CONFLICT_CODE = 3

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Branches of the whole lake.")

Name = Annotated[str, typer.Argument(help="The branch.")]


@app.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The new branch.")],
    source: Annotated[str | None, typer.Option("--from", help="The branch to start from (default: main).")] = None,
    version: Annotated[int | None, typer.Option(help="Start from this version.")] = None,
    at: Annotated[
        str | None, typer.Option(help="Start from the version at this time, like 2026-11-15T10:00:00Z.")
    ] = None,
) -> None:
    """Create a branch of the whole lake; no data is copied."""
    with context.obj.open(read_only=False) as lake:
        branch = lake.branches.create(name, source=source, version=version, at=at)
    text = f"branch {branch.name} starts from version {branch.base_version} of {branch.parent}"
    context.obj.output.result({"outcome": "created", **branch.as_dict()}, text=text)


@app.command("list")
def list_branches(context: typer.Context) -> None:
    """List the branches and how much each of them changed."""
    with context.obj.open() as lake:
        branches = lake.branches.list()
    output = context.obj.output
    if output.as_json:
        output.result({"branches": [branch.as_dict() for branch in branches]})
        return
    rows = [_row(branch) for branch in branches]
    output.rows(rows, rows[0] if rows else (), name="branches", empty="no branches")


@app.command()
def diff(
    context: typer.Context,
    name: Name,
    table: Annotated[str | None, typer.Option(help="Only this table.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of sample rows per table.")] = 20,
) -> None:
    """Show what a branch changed since its merge base with its parent: per table, with sample rows."""
    with context.obj.open() as lake:
        found = lake.branches.diff(name, table=table, limit=limit)
    output = context.obj.output
    if output.as_json:
        output.result(found.as_dict())
        return
    output.note(f"{found.branch} at version {found.head_version}, against version {found.common_version}")
    show_tables(output, found.tables, empty="no difference")


@app.command()
def merge(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The branch to merge.")],
    into: Annotated[str | None, typer.Option(help="The branch to merge into (default: its parent).")] = None,
    prefer: Annotated[
        str | None, typer.Option(help="Resolve conflicts with ours (the branch merged into) or theirs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")] = False,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
    if_version: IfVersion = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of conflicts to list.")] = 1000,
) -> None:
    """Merge a branch as one version. If there are conflicts, list them and change nothing (exit code 3)."""
    with context.obj.open(read_only=dry_run) as lake:
        merged = lake.branches.merge(
            name,
            into=into,
            prefer=prefer,
            dry_run=dry_run,
            message=message,
            limit=limit,
            on_conflict="return",
            if_version=if_version,
        )
    output = context.obj.output
    if output.as_json:
        output.result(merged.as_dict())
    else:
        _show_merged(output, merged, into, prefer)
    if merged.outcome == "conflict":
        raise typer.Exit(CONFLICT_CODE)


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
) -> None:
    """Delete a branch. Data that only it has is deleted after its versions expire."""
    output = context.obj.output
    with context.obj.open(read_only=not apply) as lake:
        unmerged = _unmerged(lake, name)
        branch = lake.branches.delete(name) if apply else lake.catalog.branches.check_delete(name)
    lost = f"{unmerged} of its commits are not merged" if unmerged else "all of its commits are merged"
    data = {"outcome": "deleted" if apply else "planned", **branch.as_dict(), "unmerged": unmerged}
    output.result(data, text=f"{'deleted' if apply else 'would delete'} branch {name}: {lost}")
    if not apply:
        output.note("Add --apply to do it.")


def _unmerged(lake: Lake, name: str) -> int:
    """The branch's own commits that its parent does not have; those that only took the parent's news do not count."""
    branch = lake.catalog.branches.get(name)
    if branch.parent is None:
        return 0
    edge = lake.catalog.branches.merge_base(name, branch.parent)
    taken = lake.catalog.branches.taken_versions(edge)
    own = lake.history(limit=max(1, branch.commits), branch=name)
    return sum(1 for one in own if one.branch == name and one.version > edge.source_since and one.version not in taken)


def _row(branch: Branch) -> dict[str, Json]:
    return {
        "branch": branch.name,
        "parent": branch.parent,
        "base": branch.base_version,
        "head": branch.head_version,
        "commits": branch.commits,
        "tables": branch.tables_changed,
        "created": clock.format_time(branch.created_ms),
    }


def _advice(merged: Merged, into: str | None, prefer: str | None) -> Iterator[str]:
    """What can be done about conflicts; that a side is preferred only where that would settle them all."""
    reasons = {one.reason for one in merged.conflicts}
    if "reference" in reasons:
        yield "Rows would refer to keys that one side deleted; --prefer cannot resolve this."
        yield "On one side, restore these keys or delete the rows that refer to them, then merge again."
    elif "column" in reasons:
        yield "A column that one side dropped has new values on the other."
        yield "--prefer with the side that dropped it discards these values; or drop or copy the column on both sides."
    elif "needed" in reasons:
        yield f"A column that is dropped or renamed is in use on {merged.target}; --prefer cannot resolve this."
    elif "key" in reasons:
        yield "A table has a key on one side only; --prefer cannot resolve this."
    elif "dropped" in reasons and prefer is None:
        yield "A table exists on one side only: `--prefer ours` keeps it as it is on the branch merged into."
    elif prefer is not None:
        yield "--prefer cannot resolve these: change the rows or columns on one side, then merge again."
    else:
        command = f"floodmark branch merge {merged.source}" + ("" if into is None else f" --into {into}")
        yield f"`{command} --prefer ours` or `--prefer theirs` resolves all of them."


def _show_merged(output: Output, merged: Merged, into: str | None, prefer: str | None) -> None:
    way = f"{merged.source} into {merged.target}"
    if merged.outcome == "up_to_date":
        output.result({}, text=f"up to date: {merged.target} already has all changes of {merged.source}")
        return
    if merged.outcome == "conflict":
        conflicts = [
            {
                "table": one.table,
                "reason": one.reason,
                "key": _text(one.key),
                "base": _text(one.base),
                "ours": _text(one.ours),
                "theirs": _text(one.theirs),
                **({"about": one.about} if any(other.about for other in merged.conflicts) else {}),
            }
            for one in merged.conflicts
        ]
        output.rows(conflicts, conflicts[0] if conflicts else (), name="conflicts", empty="")
        output.note(f"{merged.conflicts_total} conflict(s) merging {way}; nothing was changed.")
        for line in _advice(merged, into, prefer):
            output.note(line)
        return
    show_tables(output, merged.tables, empty="no table changes")
    if merged.commit is not None:
        output.result({}, text=f"merged {way}, version {merged.commit.version}")
    else:
        output.result({}, text=f"would merge {way}")


def show_tables(output: Output, tables: Iterable[TableDiff], *, empty: str) -> None:
    """What differs in each table: a line of counts; then changes of its columns, and rows."""
    tables = list(tables)
    rows: list[dict[str, Json]] = [
        {
            "table": one.table,
            "change": one.change,
            "added": one.rows_added,
            "updated": one.rows_updated,
            "deleted": one.rows_deleted,
        }
        for one in tables
    ]
    output.rows(rows, rows[0] if rows else (), name="tables", empty=empty)
    for one in tables:
        for line in one.columns:
            output.note(f"{one.table}: {line}")
        if one.samples:
            samples = [
                {"change": sample["change"], "row": _text(sample.get("row")), "before": _text(sample.get("before"))}
                for sample in one.samples
            ]
            output.note(f"\n{one.table}")
            output.rows(samples, samples[0], name="samples", empty="")


def _text(row: Row | None) -> str | None:
    from floodmark.rows.json.text_files import json_value

    return None if row is None else json.dumps(json_value(row), ensure_ascii=False)
