"""`floodmark load TABLE FILE…`: rows of files into a table, in one commit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.cli.progress import staging_progress
from floodmark.errors import Invalid
from floodmark.model import Commit

if TYPE_CHECKING:
    from collections.abc import Callable

    from floodmark.lake import Lake


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    files: Annotated[list[str], typer.Argument(help="JSONL, CSV or Parquet; any path that Spark reads.")],
    mode: Annotated[str, typer.Option(help="append.")] = "append",
    batch: Annotated[str | None, typer.Option(help="An id for these rows: the same id again is a no-op.")] = None,
    file_format: Annotated[str | None, typer.Option("--format", help="jsonl, csv or parquet.")] = None,
    create: Annotated[bool, typer.Option("--create", help="Make the table if it is not there.")] = False,
    schema: Annotated[str | None, typer.Option(help='With --create: columns, like "id long, ts timestamp".')] = None,
    partition: Annotated[list[str] | None, typer.Option(help="With --create: like day(ts); may be repeated.")] = None,
    message: Annotated[str, typer.Option(help="What the history will say.")] = "",
) -> None:
    """Load files into a table."""
    from floodmark.ingest.files import explain, format_of, infer_schema, read_files
    from floodmark.rows.schema import spark_schema, table_schema

    if mode != "append":
        raise Invalid("this mode is not known", mode=mode, advice="Use append.")
    if (schema or partition) and not create:
        raise Invalid("--schema and --partition go with --create")
    found_format = format_of(files, file_format)
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake:
        new = create and table.lower() not in {head.table.lower() for head in lake.heads()}
        shape = schema or infer_schema(lake.spark, files, found_format) if new else None
        columns = spark_schema(table_schema(shape) if new else lake.schema(table))
        frame = read_files(lake.spark, files, found_format, columns)
        note = message or f"load {len(files)} file(s)"
        try:
            with staging_progress(context.obj.output) as progress:
                if new:
                    commit = _create_and_append(lake, table, shape, partition or [], frame, batch, note, progress)
                else:
                    commit = lake.append(table, frame, batch=batch, message=note, progress=progress)
        except Invalid as error:
            raise explain(lake.spark, files, found_format, columns) or error from error
    rows = commit.rows_added if commit.outcome == "committed" else 0
    data: dict[str, Any] = {**commit.as_dict(), "rows": rows, "seconds": round(time.monotonic() - started, 3)}
    if commit.outcome == "committed":
        text = f"{rows} rows into {table}, version {commit.version}"
    elif commit.outcome == "already_committed":
        text = f"nothing to do: batch {batch} is in {table} since version {commit.version}"
    else:
        text = "nothing to do: the files have no rows"
    context.obj.output.result(data, text=text)


def _create_and_append(
    lake: Lake,
    table: str,
    shape: Any,
    partition: list[str],
    frame: Any,
    batch: str | None,
    message: str,
    progress: Callable[[int, int], None] | None,
) -> Commit:
    """The table and its first rows in one version: rows that do not fit leave no empty table behind."""
    with lake.transaction(message, batch=batch, batch_table=table) as tx:
        tx.create_table(table, shape, partition=partition)
        tx.append(table, frame, progress=progress)
    assert tx.commit is not None
    return tx.commit
