"""`floodmark export TABLE FILE`: rows or changes of a table as one file, whole or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from floodmark.cli.context import OnBranch
from floodmark.cli.progress import rows_progress
from floodmark.errors import Invalid
from floodmark.json_form import Json
from floodmark.model import MAIN


def run(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="The table.")],
    file: Annotated[str, typer.Argument(help="A file to write: .jsonl, .csv or .parquet; also s3://….")],
    changes: Annotated[bool, typer.Option("--changes", help="What changed, instead of the rows.")] = False,
    since: Annotated[int | None, typer.Option(help="With --changes: after this sequence.")] = None,
    until: Annotated[int | None, typer.Option(help="With --changes: up to this sequence.")] = None,
    version: Annotated[int | None, typer.Option(help="Read this version.")] = None,
    branch: OnBranch = MAIN,
    with_seq: Annotated[bool, typer.Option("--with-seq", help="With the column _seq.")] = False,
    file_format: Annotated[str | None, typer.Option("--format", help="jsonl, csv or parquet.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Write a table, or its changes, to a file that `load` takes; only CSV does not tell empty text from none."""
    from floodmark.rows.json.text_files import format_for, write_file
    from floodmark.storage import local_path, root_location

    if not changes and (since is not None or until is not None):
        raise Invalid("--since and --until go with --changes")
    found = format_for(file, file_format)
    location = root_location(file)
    on_disk = local_path(location)
    if on_disk is not None and Path(on_disk).is_dir():
        raise Invalid("this is a folder", path=file, advice="Name a file in it.")
    started = time.monotonic()
    with context.obj.open() as lake:
        storage = lake.catalog.storage
        if f"{location}/".startswith(f"{lake.location}/"):
            raise Invalid("this is inside the lake", path=file, advice="Name a file outside of it.")
        if not overwrite and storage.exists(location):
            raise Invalid("there is a file of this name", path=file, advice="Add --overwrite to replace it.")
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
