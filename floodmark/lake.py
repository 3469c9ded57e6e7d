"""The lake: what a user holds. Thin: every verb is one call into a room below.

Opening for writing heals first, and so does every write (I13, I16); a read-only lake writes nothing (I17). Questions
of state touch the catalog only: no JVM, no table files.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from floodmark import clock, failpoints
from floodmark.catalog.backup import backup as backup_catalog
from floodmark.catalog.backup import restore as restore_catalog
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.database import SQLITE_NAME, Database
from floodmark.catalog.journal import ABANDONED, PUBLISHED
from floodmark.catalog.lifecycle import create_catalog, open_catalog
from floodmark.catalog.processes import LEASE_MS
from floodmark.catalog.riders import AlreadyCommitted, BatchRider
from floodmark.errors import Corrupt, Incomplete, Invalid, NotFound
from floodmark.failpoints import hit
from floodmark.model import MAIN, AuditRow, Commit, Head, HealReport
from floodmark.recover.heal import Healer
from floodmark.report import lake_status, table_details
from floodmark.rows.session import Sessions
from floodmark.storage import Storage, join, local_path, root_location
from floodmark.write.intent import Intent, batch_rider

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyspark.sql import DataFrame, SparkSession

    from floodmark.write.transaction import Transaction


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


class Lake:
    def __init__(self, catalog: Catalog, sessions: Sessions, actor: str, read_only: bool) -> None:
        self.catalog = catalog
        self.sessions = sessions
        self.actor = actor
        self.read_only = read_only
        self._healer = Healer(catalog)

    @property
    def location(self) -> str:
        return self.catalog.location

    @property
    def spark(self) -> SparkSession:
        """The Spark session that rows move through; starts one if there is none."""
        return self.sessions.get()

    # ── tables ──

    def create_table(
        self,
        name: str,
        schema: Any,
        *,
        key: Sequence[str] = (),
        partition: Sequence[str] = (),
        sort: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        if_not_exists: bool = False,
        actor: str | None = None,
        message: str = "",
    ) -> Commit:
        """Make a table. `schema`: Spark StructType, Arrow schema, PyIceberg schema, or Spark DDL text."""
        from floodmark.write.change import Change
        from floodmark.write.shape import plan_table

        shape = plan_table(name, schema, key=key, partition=partition, sort=sort, properties=properties or {})
        self._ready_to_write()
        existing = {head.table.lower(): head.table for head in self.heads()}
        if name.lower() in existing:
            if if_not_exists:
                return self._unchanged("create_table")
            raise Invalid(
                "there is a table of this name",
                table=existing[name.lower()],
                advice="Use if_not_exists=True to keep it. Names do not differ by case only.",
            )
        change = Change.begin(self.catalog, self._intent("create_table", actor, message or f"create {name}"))
        try:
            change.create_table(shape)
            return change.publish()
        except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
            try:
                return change.undo(error)
            except Invalid:
                if if_not_exists and name.lower() in {head.table.lower() for head in self.heads()}:
                    return self._unchanged("create_table")  # another process was quicker
                raise

    def append(
        self,
        table: str,
        data: Any,
        *,
        batch: str | None = None,
        actor: str | None = None,
        message: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Commit:
        """Append rows: a Spark DataFrame, an Arrow table or reader, a pandas DataFrame, or a list of dicts.

        With `batch`, the id is committed with the rows, and the same id for the same table again is a no-op whose
        outcome says `already_committed`. `progress(files, bytes)` is called now and then while rows are staged.
        """
        from floodmark.write.change import Change

        intent = self._intent("append", actor, message, batch_rider(table, batch))
        self._ready_to_write()
        try:
            change = Change.begin(self.catalog, intent, [table])
        except AlreadyCommitted as already:
            return self.catalog.history.commit(already.version, outcome="already_committed")
        try:
            change.append(table, data, progress)
            return change.publish()
        except BaseException as error:  # noqa: BLE001 - undo raises it again, or knows better
            return change.undo(error)

    def transaction(
        self,
        message: str = "",
        *,
        actor: str | None = None,
        batch: str | None = None,
        batch_table: str = "",
    ) -> Transaction:
        """Several tables, one version: all of it becomes visible at the end of the `with` block, or nothing.

        `batch` identifies the transaction; with `batch_table` it is the same id as that of an append to this table.
        """
        from floodmark.write.transaction import Transaction

        intent = self._intent("transaction", actor, message, batch_rider(batch_table, batch))
        return Transaction(self.catalog, intent, self._ready_to_write)

    # ── reading ──

    def read(
        self,
        table: str,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
    ) -> DataFrame:
        """A table as a Spark DataFrame: at the head, at a version, or as it was at a moment."""
        head = self._state(version, at, branch).get(table)
        if head is None:
            raise NotFound(
                "there was no such table at this version" if version or at else "there is no such table",
                table=table,
                advice="`floodmark tables` lists them.",
            )
        return self._scan(head)

    def sql(
        self, query: str, *, version: int | None = None, at: str | datetime | None = None, branch: str = MAIN
    ) -> DataFrame:
        """Run a query; every table that it names is read at one and the same version."""
        from floodmark.rows.query import query_body, run_query

        query_body(query)  # refused before a JVM is started for it
        state = self._state(version, at, branch)
        return run_query(
            self.spark,
            query,
            {name: (head.table_id, head.snapshot) for name, head in state.items()},
            lambda table: self._scan(state[table]),
        )

    def schema(self, table: str) -> Schema:
        """The table's Iceberg schema at the head."""
        return self._schema(self.catalog.history.head(table))

    def _schema(self, head: Head) -> Schema:
        schema = self.catalog.files.metadata(head.metadata_location).schema_by_id(head.schema_id)
        if schema is None:
            raise Corrupt("the table's schema is not in its metadata", table=head.table, schema_id=head.schema_id)
        return schema

    def _scan(self, head: Head) -> DataFrame:
        from floodmark.rows.scan import scan

        return scan(
            self.spark,
            self.catalog.files.data_files(head),
            self._schema(head),
            storage_options=self.catalog.storage.options,
        )

    def _state(self, version: int | None, at: str | datetime | None, branch: str) -> dict[str, Head]:
        if version is not None and at is not None:
            raise Invalid("give a version or a time, not both")
        at_ms = None if at is None else clock.parse_time_ms(at)
        return self.catalog.history.tables_at(self.catalog.history.resolve(version=version, at_ms=at_ms, branch=branch))

    # ── questions of state: no Spark ──

    def heads(self) -> list[Head]:
        return self.catalog.history.heads()

    def tables(self) -> list[dict[str, Any]]:
        return [
            {
                "table": head.table,
                "rows": head.rows,
                "files": head.files,
                "bytes": head.size_bytes,
                "sequence": head.sequence,
                "version": head.version,
            }
            for head in self.heads()
        ]

    def show(self, table: str) -> dict[str, Any]:
        """One table: its columns, layout, size and place."""
        return table_details(self.catalog, self.catalog.history.head(table))

    def history(self, *, limit: int = 20, table: str | None = None) -> list[Commit]:
        """Commits, newest first."""
        if table is not None:
            self.catalog.history.head(table)
        return self.catalog.history.commits(limit=limit, table=table)

    def status(self) -> dict[str, Any]:
        return lake_status(self.catalog)

    # ── recovery ──

    def recover(self, *, discard: Sequence[str] = ()) -> HealReport:
        """Settle what dead processes left. Opening and every write do this anyway."""
        self._writable()
        return self._healer.heal(look_again=True, discard=discard)

    def audit(self, limit: int = 1000) -> list[AuditRow]:
        """What healing did, ever; newest first."""
        return self.catalog.history.audit(limit)

    def resolve(self, operation: str) -> Commit | None:
        """After CommitUnknown: the operation's commit, or None if it never happened and never will."""
        found = self.catalog.journal.find(operation)
        if found is not None and found.state not in (PUBLISHED, ABANDONED) and not self.read_only:
            self._healer.heal()
            found = self.catalog.journal.find(operation)
        if found is None or found.state == ABANDONED:
            return None
        if found.state == PUBLISHED and found.version is not None:
            return self.catalog.history.commit(found.version)
        raise Incomplete(
            "the operation is still under way",
            operation=operation,
            state=found.state,
            advice="Ask again when its process has ended.",
        )

    # ── the catalog ──

    def backup(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Write the catalog to a file, consistent, while writers go on."""
        return backup_catalog(self.catalog.database, self.catalog.storage, root_location(os.fspath(path)))

    def close(self) -> None:
        self.catalog.close()

    def __enter__(self) -> Lake:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── inside ──

    def _writable(self) -> None:
        if self.read_only:
            raise Invalid("this lake was opened read-only", location=self.location, advice="Open it for writing.")

    def _ready_to_write(self) -> None:
        """What every write does first: heal what dead processes left."""
        self._writable()
        self._healer.heal()

    def _intent(self, kind: str, actor: str | None, message: str, batch: BatchRider | None = None) -> Intent:
        return Intent(kind, MAIN, actor or self.actor, message, batch)

    def _unchanged(self, kind: str) -> Commit:
        version = self.catalog.history.resolve()
        return Commit(version, "nothing_to_do", None, kind, MAIN, self.actor, "", clock.now_ms())
