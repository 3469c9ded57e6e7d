"""Opening a lake, making one, and restoring one from a backup.

Opening for writing heals first (I13, I16); a read-only open writes nothing (I17). A crash while a lake is made leaves a
folder without a registered catalog, which the next `create=True` finishes.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from floodmark import failpoints
from floodmark.catalog.backup import restore as restore_catalog
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.database import SQLITE_NAME, Database
from floodmark.catalog.lifecycle import create_catalog, open_catalog
from floodmark.catalog.processes import LEASE_MS
from floodmark.errors import Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.lake import Lake
from floodmark.rows.session import Sessions
from floodmark.storage import Storage, join, local_path, root_location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def open(
    path: str | os.PathLike[str],
    *,
    create: bool = False,
    read_only: bool = False,
    catalog: str | None = None,
    actor: str | None = None,
    spark: SparkSession | None = None,
    settings: Mapping[str, str] | None = None,
    storage: Storage | None = None,
    storage_options: Mapping[str, str] | None = None,
    lease_ms: int = LEASE_MS,
    heal: bool = True,
) -> Lake:
    """Open the lake at `path` (a folder or s3://bucket/prefix); make it with create=True.

    catalog: a database URL; without one, SQLite in the lake's folder. spark: a session to use; without one, Floodmark
    starts one when rows must move, with `settings` (master and spark.* keys). Opening for writing heals what dead
    processes left, unless heal=False.
    """
    location = root_location(os.fspath(path))
    failpoints.armed()  # a misspelt crash point must not look like a process that survived it
    if create and read_only:
        raise Invalid("a read-only lake cannot be made", path=path)
    storage = storage or Storage(storage_options)
    if create:
        storage.make_folder(location)
        hit("init.folder_made")
    database = _database(location, catalog, create=create, read_only=read_only)
    try:
        if create:
            create_catalog(database, location)
            for part in ("tables", "operations"):
                storage.make_folder(join(location, part))
            storage.make_folder(location)  # the database's own name in it is durable too
        open_catalog(database, location)
        parts = Catalog(database, storage, location, lease_ms)
        lake = Lake(parts, Sessions(settings or {}, spark), actor or _user(), read_only)
        if heal and not read_only:
            lake.recover()
    except BaseException:
        database.close()
        raise
    return lake


def restore(
    path: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    catalog: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Make the lost catalog of the lake at `into` again from a backup: a new incarnation of the same lake."""
    location = root_location(os.fspath(into))
    storage = Storage(storage_options)
    source = root_location(os.fspath(path))
    if not storage.exists(source):
        raise NotFound("there is no such backup", path=path)
    storage.make_folder(location)
    database = _database(location, catalog, create=True, read_only=False)
    try:
        restored = restore_catalog(database, storage, source, location)
    finally:
        database.close()
    with open(into, read_only=True, catalog=catalog, storage_options=storage_options) as lake:
        restored["missing"] = [
            head.table for head in lake.heads() if not lake.catalog.storage.exists(head.metadata_location)
        ]
    return restored


def _database(location: str, catalog: str | None, *, create: bool, read_only: bool) -> Database:
    if catalog is not None:
        return Database(catalog, read_only=read_only)
    folder = local_path(location)
    if folder is None:
        raise Invalid(
            "a lake outside this machine needs a shared catalog",
            location=location,
            advice='Give catalog="postgresql+psycopg://user@host/database".',
        )
    database_path = os.path.join(folder, SQLITE_NAME)
    if not create and not os.path.exists(database_path):
        raise NotFound(
            "there is no lake here", location=location, advice="Make one with `floodmark init` or open(…, create=True)."
        )
    return Database(f"sqlite:///{database_path}", read_only=read_only)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
