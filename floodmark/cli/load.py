"""`floodmark load TABLE FILE…`: rows of files into a table, in one commit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from floodmark.cli.progress import staging_progress
from floodmark.errors import Invalid, NotFound

if TYPE_CHECKING:
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
    from floodmark.ingest.files import explain, format_of, read_files
    from floodmark.rows.schema import spark_schema

    if mode != "append":
        raise Invalid("this mode is not known", mode=mode, advice="Use append.")
    if (schema or partition) and not create:
        raise Invalid("--schema and --partition go with --create")
    found_format = format_of(files, file_format)
    started = time.monotonic()
    with context.obj.open(read_only=False) as lake:
        if create:
            _create(lake, table, files, found_format, schema, partition or [])
        columns = spark_schema(lake.schema(table))
        frame = read_files(lake.spark, files, found_format, columns)
        try:
            with staging_progress(context.obj.output) as progress:
                commit = lake.append(
                    table, frame, batch=batch, message=message or f"load {len(files)} file(s)", progress=progress
                )
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


def _create(
    lake: Lake, table: str, files: list[str], found_format: str, schema: str | None, partition: list[str]
) -> None:
    from floodmark.ingest.files import infer_schema

    try:
        lake.catalog.history.head(table)
    except NotFound:
        columns = schema if schema is not None else infer_schema(lake.spark, files, found_format)
        lake.create_table(table, columns, partition=partition, if_not_exists=True)
