"""`floodmark spool`: rows on their way in over HTTP: what waits, what was put aside, and what is to be settled.

Questions and plans open the lake read-only and change nothing (I17); what cannot be undone wants --apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark import clock
from floodmark.catalog.spools import HELD, PutAside
from floodmark.errors import Invalid
from floodmark.json_form import Json, as_json
from floodmark.shown import count_of
from floodmark.spool.accept import BEGIN_ANEW, GIVE_UP, GO_ON, MEND, NOTHING, Acceptance

if TYPE_CHECKING:
    from floodmark.lake import Lake

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Rows on their way in over HTTP.")
quarantine = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Rows that were taken, and then did not fit."
)
app.add_typer(quarantine, name="quarantine")

Table = Annotated[str, typer.Argument(help="The table.")]
Id = Annotated[str, typer.Argument(help="The id, as `list` shows it.")]
Apply = Annotated[bool, typer.Option("--apply", help="Really do it.")]
COLUMNS = ("table", "state", "waiting_records", "waiting_rows", "waiting_bytes", "fed_rows", "quarantined", "version")
SHOWN = ("id", "record", "rows", "at", "reason")
DOING = {
    GO_ON: "go on with spool {spool} from record {position}",
    MEND: "keep what is damaged aside, in the same folder, and go on with all of spool {spool} that can be read",
    BEGIN_ANEW: "begin a new spool with the next rows",
    GIVE_UP: "give the spool up, and delete its folder",
}


def _open(context: typer.Context, *, read_only: bool = True) -> Lake:
    opened: Lake = context.obj.open(read_only=read_only, heal=False)
    return opened


@app.command("list")
def list_spools(context: typer.Context) -> None:
    """Show each table's spool: what waits in it, what came in by it, and what is wrong with it."""
    from floodmark.report.spools import see_spools

    with _open(context) as lake:
        found = see_spools(lake.catalog, thorough=True)
    output = context.obj.output
    output.rows([as_json(one) for one in found], COLUMNS, name="spools", empty="no table took rows over HTTP")
    if not output.as_json:
        for one in found:
            if one.error is not None:
                output.note(f"{one.table}: {one.error.message}. {one.error.advice}")


@app.command()
def accept(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table; one that is gone by its id.")],
    spools: Annotated[
        Path | None, typer.Option(help="The folder of all spools, if it is not known (default: beside the lake).")
    ] = None,
    apply: Apply = False,
) -> None:
    """Settle a refused spool: replaced, lost, damaged, put back, of before a restore, or of a table that is gone.

    Shows first what may be lost and what may come twice. A running daemon goes on by itself afterwards.
    """
    from floodmark.ingest.intake import default_folder
    from floodmark.spool.accept import accept as accept_spool
    from floodmark.spool.accept import plan

    with _open(context, read_only=not apply) as lake:
        configured = context.obj.settings.serve.spool
        root = spools or (Path(configured) if configured else default_folder(lake.location))
        planned = plan(lake.catalog, table, root)
        if apply:
            accept_spool(lake.catalog, planned)
    outcome = NOTHING if planned.action == NOTHING else "accepted" if apply else "planned"
    output = context.obj.output
    output.result({**planned.as_dict(), "outcome": outcome}, text="\n".join(_acceptance(planned, applied=apply)))
    if outcome == "planned":
        output.note("Add --apply to do it.")


def _acceptance(planned: Acceptance, *, applied: bool) -> list[str]:
    if planned.action == NOTHING:
        return [f"nothing to do: the spool of {planned.table} is not refused"]
    doing = DOING[planned.action].format(spool=planned.spool_id, position=planned.position)
    rows = "unknown" if planned.rows is None else str(planned.rows)
    return [
        f"{planned.table}: {planned.why}",
        f"{'accepted' if applied else 'would'}: {doing}",
        f"rows that wait in it: {rows}",
        f"may be lost: {planned.lost}",
        f"may come twice: {planned.twice}",
    ]


# ── quarantine ──


@quarantine.command("list")
def list_aside(
    context: typer.Context,
    table: Table,
    every: Annotated[bool, typer.Option("--all", help="Also those that were retried or dropped.")] = False,
) -> None:
    """List what was put aside, oldest first: how many rows, and why the first of them did not fit."""
    with _open(context) as lake:
        ids = {head.table_id for head in lake.catalog.history.heads() if head.table == table}
        found = [
            one
            for one in lake.catalog.spools.quarantine(state=None if every else HELD)
            if one.table_id in ids or one.table == table
        ]
        if not found:
            lake.catalog.history.head(table)  # a name that is not there is not an empty quarantine
    output = context.obj.output
    if output.as_json:
        output.result(
            {"table": table, "rows": sum(one.rows for one in found), "entries": [_told(one) for one in found]}
        )
        return
    lines = [{**_told(one), "reason": one.error.get("message", "")} for one in found]
    output.rows(lines, (*SHOWN, "state") if every else SHOWN, name="entries", empty="no row is in quarantine")


def _told(one: PutAside) -> dict[str, Json]:
    return {
        "id": one.id,
        "table": one.table,
        "record": one.record,
        "rows": one.rows,
        "at": clock.format_time(one.at_ms),
        "state": one.state,
        "version": one.version,
        "reason": one.error,
        "location": one.location,
    }


@quarantine.command()
def show(context: typer.Context, id: Id) -> None:
    """Show the rows of one entry as they were sent, each with its reason."""
    from floodmark.ingest.quarantine import read_aside

    with _open(context) as lake:
        aside = lake.catalog.spools.put_aside(id)
        if aside.state != HELD:
            raise Invalid("these rows are not in quarantine any more", id=id, state=aside.state, version=aside.version)
        lines = read_aside(lake.catalog.storage, aside.location)
    output = context.obj.output
    rows = [
        {"record": one.record, "line": one.line, "row": one.text.strip(), "reason": one.error["message"]}
        for one in lines
    ]
    if output.as_json:
        output.result({**_told(aside), "lines": rows})
        return
    output.rows(rows, ("record", "line", "reason", "row"), name="lines", empty="it holds no row")


@quarantine.command()
def retry(
    context: typer.Context,
    ids: Annotated[list[str], typer.Argument(help="The ids, as `list` shows them.")],
    evolve: Annotated[bool, typer.Option("--evolve", help="Add columns that the table does not have.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also rows whose key was written or deleted since.")
    ] = False,
    keep_newer: Annotated[
        bool, typer.Option("--keep-newer", help="Leave rows out, for good, whose key was written or deleted since.")
    ] = False,
) -> None:
    """Bring rows into their table after all: all rows of an entry, or none. Doing it twice brings them in once.

    If a key of them was written or deleted since they were put aside, it is refused: say which shall count.
    """
    from floodmark.ingest.quarantine import retry as retry_entry

    if overwrite and keep_newer:
        raise Invalid("these two say the opposite", options="--overwrite, --keep-newer", advice="Give one of them.")
    output = context.obj.output
    done: list[dict[str, Any]] = []
    with _open(context, read_only=False) as lake:
        for entry in ids:
            retried = retry_entry(lake.engine, entry, evolve=evolve, overwrite=overwrite, keep_newer=keep_newer)
            commit = retried.commit
            told = {"outcome": commit.outcome, "version": commit.version, "rows": commit.rows_added}
            done.append({"id": entry, **told, "left_out": retried.left_out})
    words = [
        f"{one['id']}: {one['outcome']} in version {one['version']}"
        + (f", {count_of(one['left_out'], 'row')} left out for newer ones" if one["left_out"] else "")
        for one in done
    ]
    output.result({"retried": done}, text="\n".join(words))


@quarantine.command()
def drop(
    context: typer.Context, ids: Annotated[list[str], typer.Argument(help="The ids.")], apply: Apply = False
) -> None:
    """Give rows up for good: they are in no table, and nowhere else."""
    from floodmark.ingest.quarantine import drop as drop_entry

    with _open(context, read_only=not apply) as lake:
        found = [lake.catalog.spools.put_aside(entry) for entry in ids]
        held = [one for one in found if one.state == HELD]
        if apply:
            for entry in ids:
                drop_entry(lake.catalog, entry)
    rows = count_of(sum(one.rows for one in held), "row")
    data: dict[str, Json] = {"ids": ids, "rows": sum(one.rows for one in held)}
    output = context.obj.output
    if not held:
        output.result({**data, "outcome": NOTHING}, text="nothing to do: none of them is in quarantine any more")
    elif apply:
        output.result({**data, "outcome": "dropped"}, text=f"dropped {rows}")
    else:
        output.result({**data, "outcome": "planned"}, text=f"would drop {rows}")
        output.note("Add --apply to do it.")
