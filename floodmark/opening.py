"""Opening a lake, making one, and restoring one from a backup.

Opening for writing recovers first (I13, I16), and notices a catalog that was rolled back; a read-only open writes
nothing (I17). A crash while a lake is made leaves a
folder without a registered catalog, which the next `create=True` finishes.
"""

from __future__ import annotations

import getpass
import os
import warnings
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from floodmark import failpoints
from floodmark.catalog.backup import read_backup
from floodmark.catalog.backup import restore as restore_catalog
from floodmark.catalog.database import SQLITE_NAME, Database
from floodmark.catalog.leases import LEASE_MS
from floodmark.catalog.lifecycle import create_catalog, open_catalog, stored_format
from floodmark.commit.catalog import Catalog
from floodmark.errors import Corrupt, Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.lake import Lake
from floodmark.rows.session import Sessions
from floodmark.settings.settings import Settings, find_catalog, find_lake, is_settings_file, load_settings
from floodmark.storage import Storage, join, local_path, root_location
from floodmark.storage.probe import is_remote, probe_bucket

if TYPE_CHECKING:
    from floodmark.rows.frames import SparkSession

# Enough of a lost lake's files to name its tables.
FILES_LOOKED_AT = 1000


def open(
    path: str | os.PathLike[str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    create: bool = False,
    read_only: bool = False,
    catalog: str | None = None,
    actor: str | None = None,
    spark: SparkSession | None = None,
    settings: Mapping[str, str] | None = None,
    storage: Storage | None = None,
    storage_options: Mapping[str, str] | None = None,
    lease_ms: int = LEASE_MS,
    recover: bool = True,
    heal: bool | None = None,
) -> Lake:
    """Open the lake at `path` (a folder or s3://bucket/prefix); make it with create=True.

    `path` may also be a settings file (its name ends in .toml), and so may `config`: then lake, catalog, Spark, storage
    and maintenance are as that file says, and as the commands would use it with --config: what is given here comes
    first, then the file, then FLOODMARK_LAKE and FLOODMARK_CATALOG. Relative paths start at the working folder.

    catalog: a database URL; without one, SQLite in the lake's folder. spark: a session to use; without one, Floodmark
    starts one when rows must move, with `settings` (master and spark.* keys). Opening for writing recovers what dead
    processes left, unless recover=False (`heal` is its earlier name, and goes with the next version).
    """
    if heal is not None:
        warnings.warn("fm.open(heal=...) is now recover=...", DeprecationWarning, stacklevel=2)
        recover = heal
    place, catalog, chosen = _chosen(path, config, catalog)
    location = root_location(place)
    failpoints.armed()  # a misspelt crash point must not look like a process that survived it
    if create and read_only:
        raise Invalid("a lake cannot be created read-only", path=place)
    storage = storage or Storage({**chosen.storage, **(storage_options or {})})
    if create:
        _make_folder(storage, location, catalog)
    else:
        _check_nothing_lost(storage, location, lambda: _is_new_file(location, catalog))
    database = _database(location, catalog, create=create, read_only=read_only)
    try:
        if create:
            _check_nothing_lost(storage, location, lambda: stored_format(database) is None)
            create_catalog(database, location)
            for part in ("tables", "operations"):
                storage.make_folder(join(location, part))
            storage.make_folder(location)  # the database's own name in it is durable too
        _open_catalog(database, storage, location)
        parts = Catalog(database, storage, location, lease_ms)
        sessions = Sessions({**chosen.spark, **(settings or {})}, spark)
        lake = Lake(parts, sessions, actor or _user(), read_only, chosen.maintain)
        if recover and not read_only:
            lake.recover(pass_drifted=True)
            parts.note_rollback()
    except BaseException:
        database.close()
        raise
    return lake


def _open_catalog(database: Database, storage: Storage, location: str) -> None:
    try:
        open_catalog(database, location)
    except NotFound:
        # A database that knows no lake, beside the files of one: it is lost, not yet to be made.
        _check_nothing_lost(storage, location, lambda: stored_format(database) is None)
        raise


def _make_folder(storage: Storage, location: str, catalog: str | None) -> None:
    if is_remote(location) and catalog is not None:
        # First of all: a bucket that cannot be used leaves no catalog behind that says otherwise.
        probe_bucket(storage.options, location)
    # Before SQLite makes its file; and again for one that holds nothing yet, and for other databases.
    _check_nothing_lost(storage, location, lambda: _is_new_file(location, catalog))
    storage.make_folder(location)
    hit("init.folder_made")


def _chosen(
    path: str | os.PathLike[str] | None, config: str | os.PathLike[str] | None, catalog: str | None
) -> tuple[str, str | None, Settings]:
    """Where the lake is, its catalog, and the settings that a file gives it."""
    if config is None and path is not None and is_settings_file(path):
        path, config = None, path
    chosen = Settings()
    if config is not None:
        chosen = load_settings(Path(config))
        path = find_lake(None if path is None else os.fspath(path), chosen, named=True)
        catalog = find_catalog(catalog, chosen, named=True)
    if path is None:
        raise Invalid("no lake was named", advice='Give its path, or config="floodmark.toml".')
    return os.fspath(path), catalog, chosen


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
    # Before anything is made: a backup that is refused leaves nothing behind.
    backup = read_backup(storage, source, location)
    storage.make_folder(location)
    database = _database(location, catalog, create=True, read_only=False)
    try:
        restored = restore_catalog(database, backup)
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
        raise NotFound("there is no lake here", location=location, advice="Create one with `floodmark init`.")
    return Database(f"sqlite:///{database_path}", read_only=read_only)


def _is_new_file(location: str, catalog: str | None) -> bool:
    folder = local_path(location)
    return catalog is None and folder is not None and not os.path.exists(os.path.join(folder, SQLITE_NAME))


def _check_nothing_lost(storage: Storage, location: str, is_missing: Callable[[], bool]) -> None:
    """A catalog is made only where no files of a lake are: beside them it would be an empty lake over lost tables.

    An open that finds no catalog says so too: "make one" would be the wrong advice to a person who has lost it.
    """
    if not is_missing():
        return
    parts = [join(location, part) for part in ("tables", "operations")]
    found = [entry.location for part in parts for entry in islice(storage.list(part), FILES_LOOKED_AT)]
    # Asked again: another process may have made the lake, and its first table, between the two looks.
    if found and is_missing():
        names = {file.removeprefix(parts[0] + "/").partition("/")[0] for file in found if file.startswith(parts[0])}
        raise Corrupt(
            "this folder has files of a lake, but no catalog for them",
            location=location,
            found=",".join(sorted(names)) or found[0],
            advice="Restore the catalog with `floodmark restore BACKUP` (Python: floodmark.restore), restore its "
            "database, or give the right `catalog` URL. Choose an empty folder for a new lake. Nothing was changed.",
        )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
