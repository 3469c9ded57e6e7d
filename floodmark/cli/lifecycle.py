"""The commands that create and restore: `init` a lake, `adopt` a table of another engine, `backup` and `restore` the
catalog.

A backup is consistent while writers continue. Adopting a table rewrites none of its files.
"""

from __future__ import annotations

from typing import Annotated

import typer

from floodmark.opening import restore as restore_lake


def init(context: typer.Context) -> None:
    """Create a lake (no-op if it exists)."""
    known = context.obj
    with known.open(create=True, read_only=False) as lake:
        status = lake.status()
    data = {
        "lake": status["lake"],
        "catalog": status["catalog"],
        "format": status["format"],
        "version": status["version"],
    }
    known.output.result(data, text=f"lake ready at {status['lake']} (version {status['version']})")


def adopt(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="Name of the table in the lake.")],
    location: Annotated[str, typer.Argument(help="Folder of the table, or one of its metadata.json files.")],
    key: Annotated[list[str] | None, typer.Option(help="Key column; may be repeated. The key must be unique.")] = None,
    if_version: Annotated[
        int | None, typer.Option("--if-version", help="Adopt it only if no table had its name since; else exit code 3.")
    ] = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
) -> None:
    """Adopt an existing Iceberg table without copying its files. Stop all writers of its old catalog first."""
    with context.obj.open(read_only=False) as lake:
        commit = lake.adopt(table, location, key=key or [], message=message, if_version=if_version)
    adopted = commit.table(table)
    text = f"{table} adopted: {adopted.rows_total} rows in {adopted.files_total} files, version {commit.version}"
    context.obj.output.result(commit.as_dict(), text=text)


def backup(context: typer.Context, file: Annotated[str, typer.Argument(help="File to write.")]) -> None:
    """Write a backup of the catalog. Table files are not copied."""
    with context.obj.open() as lake:
        done = lake.backup(file)
    context.obj.output.result(
        {**done, "file": file}, text=f"version {done['version']} backed up to {file} ({done['rows']} rows)"
    )


def restore(context: typer.Context, file: Annotated[str, typer.Argument(help="The backup.")]) -> None:
    """Restore the lake's catalog from a backup. Never replaces an existing catalog."""
    known = context.obj
    done = restore_lake(file, known.path, catalog=known.catalog_url, storage_options=known.settings.storage)
    text = f"version {done['version']} restored as incarnation {done['incarnation']}"
    if done["missing"]:
        text += f"; files are missing for: {', '.join(done['missing'])}"
    known.output.result(done, text=text)
