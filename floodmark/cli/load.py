"""`floodmark load TABLE FILE…`: rows of files into a table, in one commit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.cli.branch_option import OnBranch
from floodmark.cli.progress import staging_progress
from floodmark.errors import Invalid
from floodmark.model import MAIN, Commit

if TYPE_CHECKING:
    from floodmark.lake import Lake
    from floodmark.write.transaction import Transaction


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    files: Annotated[list[str], typer.Argument(help="JSONL, CSV or Parquet; any path that Spark reads.")],
    mode: Annotated[str, typer.Option(help="append, merge (upsert by the table's key) or overwrite.")] = "append",
    batch: Annotated[str | None, typer.Option(help="An id for these rows: the same id again is a no-op.")] = None,
    file_format: Annotated[str | None, typer.Option("--format", help="jsonl, csv or parquet.")] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the table if it is not there.")] = False,
    schema: Annotated[str | None, typer.Option(help='With --create: columns, like "id long, ts timestamp".')] = None,
    key: Annotated[list[str] | None, typer.Option(help="With --create: a key column; may be repeated.")] = None,
    partition: Annotated[list[str] | None, typer.Option(help="With --create: like day(ts); may be repeated.")] = None,
    where: Annotated[str | None, typer.Option(help="With --mode overwrite: only rows that match are replaced.")] = None,
    last_by: Annotated[
        str | None, typer.Option(help="With --mode merge: of rows with one key the highest in this column counts.")
    ] = None,
    evolve: Annotated[
        bool, typer.Option("--evolve", help="Add columns that only the files have, widen whole numbers.")
    ] = False,
    branch: OnBranch = MAIN,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Load files into a table."""
    from floodmark.ingest.files import evolved_columns, explain, format_of, infer_schema, read_files
    from floodmark.rows.schema import spark_schema, table_schema

    _check_options(mode, create, schema, key, partition, where, last_by)
    found_format = format_of(files, file_format)
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake:
        new = create and table.lower() not in {head.table.lower() for head in lake.heads(branch)}
        shape = schema or infer_schema(lake.spark, files, found_format) if new else None
        columns = spark_schema(table_schema(shape) if new else lake.schema(table, branch=branch))
        evolve = evolve and not new
        if evolve:
            columns = evolved_columns(lake.spark, files, found_format, columns)
        filled = () if new else lake.filled_columns(table, branch=branch)
        frame = read_files(lake.spark, files, found_format, columns, all_needed=not evolve, filled=filled)
        note = message or f"{mode} {len(files)} file(s)"
        try:
            with staging_progress(context.obj.output) as progress:
                choices: dict[str, Any] = {"where": where, "last_by": last_by, "evolve": evolve, "progress": progress}
                if new:
                    # In one version: rows that do not fit leave no empty table behind.
                    with lake.transaction(note, batch=batch, batch_table=table, branch=branch) as tx:
                        tx.create_table(table, shape, key=key or [], partition=partition or [])
                        _write(tx, mode, table, frame, **choices)
                    commit = tx.commit
                else:
                    commit = _write(lake, mode, table, frame, **choices, batch=batch, message=note, branch=branch)
        except Invalid as error:
            raise explain(lake.spark, files, found_format, columns) or error from error
    _tell(context, table, batch, commit, time.monotonic() - started)


def _write(
    target: Lake | Transaction,
    mode: str,
    table: str,
    frame: Any,
    where: str | None,
    last_by: str | None,
    **options: Any,
) -> Any:
    if mode == "merge":
        return target.merge(table, frame, on_duplicate="last" if last_by else None, order=last_by, **options)
    if mode == "overwrite":
        return target.overwrite(table, frame, where=where, **options)
    return target.append(table, frame, **options)


def _tell(context: typer.Context, table: str, batch: str | None, commit: Commit, seconds: float) -> None:
    done = commit.tables if commit.outcome == "committed" else ()
    added, updated, deleted = (
        sum(getattr(part, name) for part in done) for name in ("rows_added", "rows_updated", "rows_deleted")
    )
    data: dict[str, Any] = {**commit.as_dict(), "rows": added + updated, "seconds": round(seconds, 3)}
    if commit.outcome == "committed" and (updated or deleted):
        text = f"{added} rows added, {updated} updated, {deleted} deleted in {table}, version {commit.version}"
    elif commit.outcome == "committed":
        text = f"{added} rows into {table}, version {commit.version}"
    elif commit.outcome == "already_committed":
        text = f"nothing to do: batch {batch} is in {table} since version {commit.version}"
    elif commit.kind == "merge":
        text = "nothing to do: the table has all of these rows already"
    else:
        text = "nothing to do: the files have no rows"
    context.obj.output.result(data, text=text)


def _check_options(
    mode: str,
    create: bool,
    schema: str | None,
    key: list[str] | None,
    partition: list[str] | None,
    where: str | None,
    last_by: str | None,
) -> None:
    if mode not in ("append", "merge", "overwrite"):
        raise Invalid("this mode is not known", mode=mode, advice="Use append, merge or overwrite.")
    if (schema or key or partition) and not create:
        raise Invalid("--schema, --key and --partition go with --create")
    if where is not None and mode != "overwrite":
        raise Invalid("--where goes with --mode overwrite")
    if last_by is not None and mode != "merge":
        raise Invalid("--last-by goes with --mode merge")
