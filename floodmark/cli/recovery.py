"""The commands that recover and repair: `recover` finishes or undoes the operations of dead processes, `repair` is for
tables that another writer changed.

`repair` is a preview; with `--apply` it acts. It opens the lake without recovery, which refuses while an operation
waits for such a table, and recovers afterwards.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from floodmark.repair.repair import Repair


# ── recover ──


def recover(
    context: typer.Context,
    discard: Annotated[
        list[str] | None, typer.Option(help="Discard an unreadable operation (its id) and its files; may be repeated.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Required with --discard.")] = False,
) -> None:
    """Recover now: finish or undo the operations of dead processes."""
    if discard and not apply:
        raise Invalid(
            "this would discard operations for good",
            operations=",".join(discard),
            advice="Their staged files would be deleted. Add --apply to do it.",
        )
    with context.obj.open(read_only=False, recover=False) as lake:
        report = lake.recover(discard=discard or ())
    data = {"outcome": report.outcome, **asdict(report)}
    counts = ", ".join(
        f"{len(data[name])} {name.replace('_', ' ')}"
        for name in ("rolled_forward", "rolled_back", "discarded")
        if data[name]
    )
    done = counts or "nothing to do"
    context.obj.output.result(data, text=f"{report.outcome}: {done}; {report.files_deleted} files deleted")


# ── repair ──


DONE = {"accepted": "accepted as a commit of `external`", "reverted": "reverted to the state that Floodmark left"}


def repair(
    context: typer.Context,
    table: Annotated[str | None, typer.Argument(help="Only this table.")] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Accept the other writer's rows as a commit of the actor `external`.")
    ] = False,
    revert: Annotated[
        bool, typer.Option("--revert", help="Revert the table to the state that Floodmark left.")
    ] = False,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Expire versions now whose files are missing or damaged.")
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")] = False,
    # Earlier names of --accept and --revert; gone with the next version.
    take_in: Annotated[bool, typer.Option("--take-in", hidden=True)] = False,
    put_back: Annotated[bool, typer.Option("--put-back", hidden=True)] = False,
) -> None:
    """Show what another writer did to a table; accept its rows, or revert the table."""
    accept, revert = accept or take_in, revert or put_back
    if give_up:
        if table is not None or accept or revert:
            raise Invalid("--give-up concerns the whole lake and excludes other options", advice="Use --give-up alone.")
        _give_up(context, apply=apply)
        return
    if accept and revert:
        raise Invalid("--accept and --revert exclude each other", advice="Choose one.")
    choice = "accept" if accept else "revert" if revert else None
    output = context.obj.output
    with context.obj.open(read_only=not apply, recover=False) as lake:
        repairs = lake.repair(table, choice=choice, apply=apply)
        waiting = None
        if apply:
            try:
                lake.recover()
            except Corrupt as error:
                waiting = str(error)
    outcomes = {one.outcome for one in repairs}
    outcome = next((one for one in ("unclear", "planned", *DONE) if one in outcomes), "nothing_to_do")
    if output.as_json:
        # `recovery`: why operations that wait for a table cannot be recovered yet; null if none waits.
        output.result({"outcome": outcome, "repairs": [one.as_dict() for one in repairs], "recovery": waiting})
        _end(repairs, apply=apply)
        return
    for one in repairs:
        output.result({}, text=_text(one))
    if not repairs:
        output.result({}, text="nothing to do: no table was changed by another writer")
    if "planned" in outcomes:
        output.note("Stop the process that commits to this catalog directly; then add --apply.")
    if waiting is not None:
        output.note(f"recovery still refuses: {waiting}")
    _end(repairs, apply=apply)


def _end(repairs: list[Repair], *, apply: bool) -> None:
    """What was asked for is done only if nothing is left to decide."""
    if apply and any(one.outcome == "unclear" for one in repairs):
        raise typer.Exit(1)


def _give_up(context: typer.Context, *, apply: bool) -> None:
    from floodmark.repair.history_files import versions_text

    with context.obj.open(read_only=not apply, recover=False) as lake:
        done = lake.give_up_unreadable(apply=apply)
    output = context.obj.output
    if output.as_json:
        output.result(done.as_dict())
        return
    if done.outcome == "nothing_to_do" and not done.held:
        output.result({}, text="nothing to do: every kept version can be read")
        return
    for fault in done.faults:
        output.note(fault)
    would = "would be given up" if done.outcome == "planned" else "were given up"
    if done.versions:
        output.result({}, text=f"version(s) {versions_text(done.versions)} {would}: they cannot be read")
    if done.held:
        held = f"version(s) {versions_text(done.held)} cannot be read and are held by a branch, a pin or a run"
        output.result({}, text=f"{held}: restore their files from a copy")
    if done.outcome == "planned" and done.versions:
        output.note("Restore the files if you can; else add --apply.")


def _text(one: Repair) -> str:
    if one.outcome == "nothing_to_do":
        return f"nothing to do: {one.table} is as Floodmark left it"
    if one.outcome in DONE:
        return f"{one.table}: {DONE[one.outcome]}, version {one.version}"
    lines = [f"{one.table}: {one.detail}"]
    if one.choice is not None:
        lines.append(f"  would {'accept it' if one.choice == 'accept' else 'revert the table'}")
    return "\n".join([*lines, *(f"  {way}" for way in one.ways)])
