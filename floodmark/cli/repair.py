"""`floodmark repair [TABLE]`: tables that another writer moved past the door. A preview; with --apply it acts.

It opens the lake without healing, which refuses while such a table is waited for, and heals afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from floodmark.repair.repair import Repair

DONE = {"taken_in": "taken in as a commit of `external`", "put_back": "put back as Floodmark left it"}


def run(
    context: typer.Context,
    table: Annotated[str | None, typer.Argument(help="Only this table.")] = None,
    take_in: Annotated[
        bool, typer.Option("--take-in", help="Make the other writer's rows a commit of the actor `external`.")
    ] = False,
    put_back: Annotated[bool, typer.Option("--put-back", help="Put the table back as Floodmark left it.")] = False,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Let versions expire now whose files are missing or damaged.")
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Really do it.")] = False,
) -> None:
    """Say what another writer did to a table, past Floodmark's door, and take it in or put the table back."""
    if give_up:
        if table is not None or take_in or put_back:
            raise Invalid(
                "--give-up is of the whole lake and stands alone", advice="Use it without TABLE, or without it."
            )
        _give_up(context, apply=apply)
        return
    if take_in and put_back:
        raise Invalid("--take-in and --put-back exclude each other", advice="Choose one.")
    choice = "take_in" if take_in else "put_back" if put_back else None
    output = context.obj.output
    with context.obj.open(read_only=not apply, heal=False) as lake:
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
        # `healing`: why operations that wait for a table cannot be healed yet; null if there is nothing of the kind.
        output.result({"outcome": outcome, "repairs": [one.as_dict() for one in repairs], "healing": waiting})
        _end(repairs, apply=apply)
        return
    for one in repairs:
        output.result({}, text=_text(one))
    if not repairs:
        output.result({}, text="nothing to do: no table was changed by another writer")
    if "planned" in outcomes:
        output.note("Have whoever commits to this catalog directly stop; then add --apply.")
    if waiting is not None:
        output.note(f"healing still refuses: {waiting}")
    _end(repairs, apply=apply)


def _end(repairs: list[Repair], *, apply: bool) -> None:
    """What was asked for is done only if nothing is left to decide."""
    if apply and any(one.outcome == "unclear" for one in repairs):
        raise typer.Exit(1)


def _give_up(context: typer.Context, *, apply: bool) -> None:
    from floodmark.repair.history_files import versions_text

    with context.obj.open(read_only=not apply, heal=False) as lake:
        done = lake.give_up_unreadable(apply=apply)
    output = context.obj.output
    if output.as_json:
        output.result(done.as_dict())
        return
    if done.outcome == "nothing_to_do" and not done.held:
        output.result({}, text="nothing to do: every version that is kept can be read")
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
        lines.append(f"  would {'take it in' if one.choice == 'take_in' else 'put the table back'}")
    return "\n".join([*lines, *(f"  {way}" for way in one.ways)])
