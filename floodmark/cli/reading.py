"""The commands that read rows: `query`, `scan`, `head`, `changes` and `export`.

An answer is never cut silently: as JSON, and where stdout is no terminal, a query writes all rows, as they come. A
terminal shows the first hundred, and stderr says so; `--limit` cuts anywhere, and JSON then has `truncated`. An export
is one file, written completely or not at all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.cli.output import Output
from floodmark.cli.progress import AnswerProgress, answer_progress, rows_progress
from floodmark.errors import Invalid, NotFound
from floodmark.json_form import Json
from floodmark.model import MAIN
from floodmark.rows.sql.query import arrow_rows, stream

if TYPE_CHECKING:
    import pyarrow as pa

    from floodmark.lake import Lake
    from floodmark.rows.frames import DataFrame
    from floodmark.scan import Scan

SHOWN_ROWS = 100
TO_STDOUT = ("table", "json", "jsonl", "csv")
Shown = Annotated[
    str | None, typer.Option("--format", help="table, json, jsonl or csv; with --output also parquet or arrow.")
]
ToFile = Annotated[str | None, typer.Option("--output", "-o", help="Write a file instead; also s3://….")]
Replacing = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


# ── query ──


def query(
    context: typer.Context,
    query: Annotated[str | None, typer.Argument(help="A Spark SQL query; - reads it from stdin.")] = None,
    file: Annotated[str | None, typer.Option("--file", "-f", help="Read the query from this file; - is stdin.")] = None,
    version: Annotated[int | None, typer.Option(help="Read this version.")] = None,
    at: Annotated[str | None, typer.Option(help="Read the version at this time, like 2026-11-15T10:00:00Z.")] = None,
    branch: OnBranch = MAIN,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows (default: 100 on a terminal, else all).")
    ] = None,
    file_format: Shown = None,
    output: ToFile = None,
    overwrite: Replacing = False,
) -> None:
    """Run a Spark SQL query; show its rows, or write them to a file."""
    text = _query_text(query, file)
    if output is None:
        _check_shown(file_format)
    with context.obj.open() as lake:
        target = None if output is None else _Target.of(lake, output, file_format, overwrite)
        with answer_progress("query") as progress:
            frame = lake.sql(text, version=version, at=at, branch=branch)
            if target is not None:
                progress.stop()
                target.write(context.obj.output, lake, arrow_rows(frame, limit), {}, "rows")
            else:
                _show_query(context.obj.output, frame, file_format, limit, progress)


def _query_text(query: str | None, file: str | None) -> str:
    if (query is None) == (file is None):
        advice = "Give a query, or --file FILE; with - it is read from stdin."
        raise Invalid("there is no query" if query is None else "give one query: as text or in a file", advice=advice)
    source = "-" if query == "-" else file
    if source is None:
        return str(query)
    try:
        return (sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise NotFound("there is no such file", path=source) from error
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid("the query cannot be read", path=source, cause=str(error)) from error


def _show_query(
    output: Output, frame: DataFrame, file_format: str | None, limit: int | None, progress: AnswerProgress
) -> None:
    from floodmark.rows.json.text_files import write_text

    if file_format in ("jsonl", "csv"):
        reader = arrow_rows(frame, limit)
        write_text(sys.stdout.buffer, reader.schema, progress.rows(reader, len), file_format)
        return
    output = output if file_format is None else Output(as_json=file_format == "json")
    most = limit
    if limit is None and not output.as_json and sys.stdout.isatty():
        most = SHOWN_ROWS
    found = progress.rows(stream(frame, None if most is None else most + 1))
    rows = (row.asDict(recursive=True) for row in found)
    more = output.stream(rows, frame.columns, name="rows", empty="no rows", limit=most)
    progress.stop()
    if more:
        output.note(f"(more than {most} rows; --limit shows more, --json all of them)")


# ── scan and head ──


def scan(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    where: Annotated[str | None, typer.Option(help="Only rows that match this condition (Spark SQL).")] = None,
    columns: Annotated[str | None, typer.Option(help="Only these columns, in this order: id,name.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows (default: 100 on a terminal, else all).")
    ] = None,
    version: Annotated[int | None, typer.Option(help="Read this version.")] = None,
    at: Annotated[str | None, typer.Option(help="Read the version at this time, like 2026-11-15T10:00:00Z.")] = None,
    branch: OnBranch = MAIN,
    with_seq: Annotated[bool, typer.Option("--with-seq", help="Include the column _seq.")] = False,
    file_format: Shown = None,
    output: ToFile = None,
    overwrite: Replacing = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show what would be read, and why; read no rows.")] = False,
) -> None:
    """Show or write rows of a table. Opens only files that can match; starts Spark only if the condition needs it."""
    lake: Lake
    with context.obj.open() as lake:
        chosen = None if columns is None else [name.strip() for name in columns.split(",")]

        def rows(most: int | None) -> Scan:
            return lake.scan(
                table,
                where=where,
                columns=chosen,
                limit=most,
                version=version,
                at=at,
                branch=branch,
                with_seq=with_seq,
            )

        found = rows(limit)
        if explain:
            explained = found.explain()
            context.obj.output.result(explained.as_dict(), text=str(explained))
        elif output is not None:
            target = _Target.of(lake, output, file_format, overwrite)
            facts: dict[str, Json] = {"table": found.table, "version": found.version}
            target.write(context.obj.output, lake, found.to_batches(), facts, f"rows of version {found.version}")
        else:
            with answer_progress("scan") as progress:
                _show_scan(context.obj.output, rows, limit, file_format, progress)


def head(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    rows: Annotated[int, typer.Option("-n", "--rows", min=1, help="How many rows.")] = 20,
    branch: OnBranch = MAIN,
) -> None:
    """Show a few rows of a table, whichever come first. Starts no Spark."""
    lake: Lake
    with context.obj.open() as lake:

        def first(most: int | None) -> Scan:
            return lake.scan(table, limit=most, branch=branch)

        with answer_progress("head") as progress:
            _show_scan(context.obj.output, first, rows, None, progress, notes=False)


def _show_scan(
    output: Output,
    rows: Callable[[int | None], Scan],
    limit: int | None,
    file_format: str | None,
    progress: AnswerProgress,
    *,
    notes: bool = True,
) -> None:
    """Print rows, at most `limit`; `rows` scans for at most so many: one more shows whether there are more."""
    from floodmark.rows.json.text_files import dicts, json_value, write_text

    _check_shown(file_format)
    shown = file_format or ("json" if output.as_json else "table")
    if shown in ("jsonl", "csv"):
        scan = rows(limit)
        write_text(sys.stdout.buffer, scan.schema, progress.rows(scan.to_batches(), len), shown)
        return
    output = Output(as_json=shown == "json")
    most = limit
    if limit is None and not output.as_json and sys.stdout.isatty():
        most = SHOWN_ROWS
    found = rows(None if most is None else most + 1)
    # As JSON has them: also where a terminal shows them, a number that JSON does not have is text.
    plain = (
        {name: json_value(value) for name, value in row.items()}
        for batch in progress.rows(found.to_batches(), len)
        for row in dicts(batch)
    )
    more = output.stream(plain, found.schema.names, name="rows", empty="no rows", limit=most)
    progress.stop()
    if more and notes:
        output.note(f"(more than {most} rows; --limit shows more, --json all of them)")


def _check_shown(file_format: str | None) -> None:
    if file_format is not None and file_format not in TO_STDOUT:
        raise Invalid("this format needs a file", format=file_format, advice="Add --output FILE.")


@dataclass(frozen=True)
class _Target:
    """A file that rows are written to."""

    file: str
    location: str
    file_format: str

    @classmethod
    def of(cls, lake: Lake, file: str, file_format: str | None, overwrite: bool) -> _Target:
        from floodmark.rows.json.text_files import format_for

        return cls(file, _new_file(lake, file, overwrite), format_for(file, file_format, loadable=False))

    def write(self, output: Output, lake: Lake, rows: pa.RecordBatchReader, facts: dict[str, Json], what: str) -> None:
        from floodmark.rows.json.text_files import write_file

        started = time.monotonic()
        with rows_progress(output) as progress:
            count = write_file(lake.catalog.storage, self.location, rows, self.file_format, progress)
        data: dict[str, Json] = {**facts, "file": self.file, "format": self.file_format, "rows": count}
        data["seconds"] = round(time.monotonic() - started, 3)
        output.result(data, text=f"{count} {what} into {self.file}")


def _new_file(lake: Lake, file: str, overwrite: bool) -> str:
    """The location of a file to write; `Invalid` if it is a folder, inside the lake, or exists already."""
    from floodmark.storage import local_path, root_location

    location = root_location(file)
    on_disk = local_path(location)
    if on_disk is not None and Path(on_disk).is_dir():
        raise Invalid("the path is a folder", path=file, advice="Name a file in it.")
    if f"{location}/".startswith(f"{lake.location}/"):
        raise Invalid("the file would be inside the lake", path=file, advice="Name a file outside of it.")
    if not overwrite and lake.catalog.storage.exists(location):
        raise Invalid("the file exists already", path=file, advice="Add --overwrite to replace it.")
    return location


# ── changes ──


def changes(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    since: Annotated[
        int | None, typer.Option(help="Changes after this sequence (default: from the beginning).")
    ] = None,
    until: Annotated[int | None, typer.Option(help="Changes up to this sequence (default: the newest).")] = None,
    version: Annotated[int | None, typer.Option(help="Read at this version.")] = None,
    branch: OnBranch = MAIN,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of changes to show.")] = 100,
) -> None:
    """Show the changes of a table: rows added or changed, and keys deleted."""
    from floodmark.rows.json.text_files import dicts, json_value

    with context.obj.open() as lake:
        changes = lake.changes(table, since, until, version=version, branch=branch)
        reader = changes.arrow()
        rows = list(islice((row for batch in reader for row in dicts(batch)), limit + 1))
        names = ["_seq", "_change", *(name for name in reader.schema.names if name not in ("_seq", "_change"))]
    output = context.obj.output
    if output.as_json:
        facts = {"table": table, "since": since, "until": changes.until, "version": changes.version}
        output.result({**facts, "more": len(rows) > limit, "changes": json_value(rows[:limit])})
        return
    output.rows(rows[:limit], names, name="changes", empty="no changes")
    if len(rows) > limit:
        output.note(f"(more than {limit} changes; --limit shows more, `floodmark export --changes` writes all)")
        return
    output.note(f"up to sequence {changes.until}; continue with --since {changes.until}")


# ── export ──


def export(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    file: Annotated[str, typer.Argument(help="A file to write: .jsonl, .csv or .parquet; also s3://….")],
    changes: Annotated[bool, typer.Option("--changes", help="Export the changes instead of the rows.")] = False,
    since: Annotated[int | None, typer.Option(help="With --changes: after this sequence.")] = None,
    until: Annotated[int | None, typer.Option(help="With --changes: up to this sequence.")] = None,
    version: Annotated[int | None, typer.Option(help="Read this version.")] = None,
    branch: OnBranch = MAIN,
    with_seq: Annotated[bool, typer.Option("--with-seq", help="Include the column _seq.")] = False,
    file_format: Annotated[str | None, typer.Option("--format", help="jsonl, csv or parquet.")] = None,
    overwrite: Replacing = False,
) -> None:
    """Write a table or its changes to a file that `load` can read. CSV does not distinguish empty text from null."""
    from floodmark.rows.json.text_files import format_for, write_file

    if not changes and (since is not None or until is not None):
        raise Invalid("--since and --until need --changes")
    found = format_for(file, file_format)
    started = time.monotonic()
    with context.obj.open() as lake:
        storage = lake.catalog.storage
        location = _new_file(lake, file, overwrite)
        data: dict[str, Json] = {"table": table, "file": file, "format": found}
        if changes:
            asked = lake.changes(table, since, until, version=version, branch=branch)
            reader = asked.arrow()
            data |= {"since": since, "until": asked.until, "version": asked.version}
        else:
            if version is None:
                version = lake.catalog.history.resolve(branch=branch)
                lake.catalog.history.head(table, branch)  # one that is not there is not missing at a version
            reader = lake.read_arrow(table, version=version, with_seq=with_seq)
            data["version"] = version
        with rows_progress(context.obj.output) as progress:
            data["rows"] = write_file(storage, location, reader, found, progress)
    data["seconds"] = round(time.monotonic() - started, 3)
    what = f"changes up to sequence {data['until']}" if changes else f"rows of version {data['version']}"
    context.obj.output.result(data, text=f"{data['rows']} {what} into {file}")
