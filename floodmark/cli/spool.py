"""`floodmark spool`: rows on their way in over HTTP: what waits, what was put aside, and what is to be settled.

Questions and plans open the lake read-only and change nothing (I17); what cannot be undone wants --apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark import clock
from floodmark.catalog.spools import HELD, PutAside
from floodmark.cli.context import open_without_recovery
from floodmark.errors import Invalid
from floodmark.json_form import Json, as_json
from floodmark.shown import count_of
from floodmark.spool.accept import BEGIN_ANEW, GIVE_UP, GO_ON, MEND, NOTHING, Acceptance

if TYPE_CHECKING:
    from floodmark.ingest.quarantine import Retried

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Rows received over HTTP that wait for their table."
)
quarantine = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Received rows that did not fit their table."
)
app.add_typer(quarantine, name="quarantine")

Table = Annotated[str, typer.Argument(help="The table.")]
Id = Annotated[str, typer.Argument(help="The id, as `list` shows it.")]
Apply = Annotated[bool, typer.Option("--apply", help="Apply the change (default: only show it).")]
COLUMNS = ("table", "state", "waiting_records", "waiting_rows", "waiting_bytes", "fed_rows", "quarantined", "version")
SHOWN = ("id", "record", "rows", "at", "reason")
DOING = {
    GO_ON: "continue with spool {spool} from record {position}",
    MEND: "move damaged files aside in the same folder, and continue with all readable records of spool {spool}",
    BEGIN_ANEW: "start a new spool with the next rows",
    GIVE_UP: "discard the spool and delete its folder",
}


@app.command("list")
def list_spools(context: typer.Context) -> None:
    """Show each table's spool: rows waiting, rows loaded, and problems."""
    from floodmark.report.spools import read_spools

    with open_without_recovery(context) as lake:
        found = read_spools(lake.catalog, thorough=True)
    output = context.obj.output
    output.rows([as_json(one) for one in found], COLUMNS, name="spools", empty="no rows received over HTTP yet")
    if not output.as_json:
        for one in found:
            if one.error is not None:
                output.note(f"{one.table}: {one.error.message}. {one.error.advice}")


@app.command()
def accept(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table; a dropped table by its id.")],
    spools: Annotated[
        Path | None, typer.Option(help="Folder of all spools, if it is not recorded (default: next to the lake).")
    ] = None,
    apply: Apply = False,
) -> None:
    """Accept a refused spool: replaced, lost, damaged, rolled back, older than a restore, or of a dropped table.

    First shows what may be lost or duplicated. A running daemon continues by itself afterwards.
    """
    from floodmark.ingest.intake import default_folder
    from floodmark.spool.accept import accept as accept_spool
    from floodmark.spool.accept import plan

    with open_without_recovery(context, read_only=not apply) as lake:
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
        f"rows waiting: {rows}",
        f"may be lost: {planned.lost}",
        f"may be duplicated: {planned.twice}",
    ]


# ── quarantine ──


@quarantine.command("list")
def list_aside(
    context: typer.Context,
    table: Table,
    every: Annotated[bool, typer.Option("--all", help="Also entries that were retried or dropped.")] = False,
) -> None:
    """List entries in quarantine, oldest first: number of rows, and why the first row did not fit."""
    with open_without_recovery(context) as lake:
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
            {"table": table, "rows": sum(one.rows for one in found), "entries": [_entry(one) for one in found]}
        )
        return
    lines = [{**_entry(one), "reason": one.error.get("message", "")} for one in found]
    output.rows(lines, (*SHOWN, "state") if every else SHOWN, name="entries", empty="no row is in quarantine")


def _entry(one: PutAside) -> dict[str, Json]:
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

    with open_without_recovery(context) as lake:
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
        output.result({**_entry(aside), "lines": rows})
        return
    output.rows(rows, ("record", "line", "reason", "row"), name="lines", empty="no rows")


@quarantine.command()
def retry(
    context: typer.Context,
    ids: Annotated[list[str], typer.Argument(help="The ids, as `list` shows them.")],
    evolve: Annotated[bool, typer.Option("--evolve", help="Add columns that the table does not have.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also write rows whose key was written or deleted since.")
    ] = False,
    keep_newer: Annotated[
        bool, typer.Option("--keep-newer", help="Discard rows whose key was written or deleted since.")
    ] = False,
) -> None:
    """Load quarantined rows into their table: all rows of an entry, or none. Repeating it loads them once.

    If a key was written or deleted since, the retry is refused: choose --overwrite or --keep-newer.
    """
    from floodmark.ingest.quarantine import retry as retry_entry

    if overwrite and keep_newer:
        raise Invalid("these options exclude each other", options="--overwrite, --keep-newer", advice="Choose one.")
    output = context.obj.output
    done: list[tuple[str, Retried]] = []
    with open_without_recovery(context, read_only=False) as lake:
        for entry in ids:
            retried = retry_entry(lake.engine, entry, evolve=evolve, overwrite=overwrite, keep_newer=keep_newer)
            done.append((entry, retried))
    entries = [
        {
            "id": entry,
            "outcome": one.commit.outcome,
            "version": one.commit.version,
            "rows": one.commit.rows_added,
            "left_out": one.left_out,
        }
        for entry, one in done
    ]
    lines = [
        f"{entry}: {one.commit.outcome} in version {one.commit.version}"
        + (f", {count_of(one.left_out, 'row')} discarded for newer ones" if one.left_out else "")
        for entry, one in done
    ]
    output.result({"retried": entries}, text="\n".join(lines))


@quarantine.command()
def drop(
    context: typer.Context, ids: Annotated[list[str], typer.Argument(help="The ids.")], apply: Apply = False
) -> None:
    """Delete quarantined rows for good. No other copy exists."""
    from floodmark.ingest.quarantine import drop as drop_entry

    with open_without_recovery(context, read_only=not apply) as lake:
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
