"""Creating a catalog, checking its format, and migrating an older one.

The format stamp is in fm_lake. Newer than this code, or from before the first release: refused, for reading too, and
left as it is. Older: migrated when opened for writing, under the database's lock, so that of two processes one migrates
and the other finds it done; a read-only open serves it as it is. Crash model: a migration is one transaction; a crash
leaves the old format, and the next open migrates again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, event, insert, inspect, select, text
from sqlalchemy.engine.interfaces import DBAPICursor

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database
from floodmark.catalog.leases import living_processes
from floodmark.errors import Busy, Corrupt, NotFound, TooNew, TooOld
from floodmark.failpoints import hit
from floodmark.model import MAIN

MIGRATION_LOCK = 0x466C6F6F  # any constant: PostgreSQL's advisory lock for processes that create or migrate
# Alembic's scripts. A test sets a folder with one more script, to run a migration; nothing else sets this.
SCRIPTS = Path(__file__).parent / "migrations"
# Per kind of database and folder of scripts: the statements that turned an empty database into a catalog.
_STATEMENTS: dict[tuple[str, Path], tuple[str, ...]] = {}


def stored_format(database: Database) -> int | None:
    """The format of the lake in this database, or None if it holds no lake yet."""
    with database.read() as tx:
        return _stored_format(tx)


def create_catalog(database: Database, location: str) -> None:
    """Create the tables and the lake's row, unless another process was quicker."""
    with _maker(database) as tx:
        found = _stored_format(tx)
        if found is not None:
            # Before anything is created beside it: a refused database stays as it is.
            check_format(found)
            return
        _make_tables(tx)
        hit("init.tables_made")
        now = database.now_ms(tx)
        register(tx, location, now)
        hit("init.registered")


def register(tx: Connection, location: str, now_ms: int) -> None:
    tx.execute(
        insert(tables.lake).values(
            id=1, format=tables.FORMAT, version=0, incarnation=clock.new_id(), location=location, created_ms=now_ms
        )
    )
    tx.execute(
        insert(tables.branches).values(name=MAIN, parent=None, base_version=0, head_version=0, created_ms=now_ms)
    )
    tx.execute(
        insert(tables.iceberg_namespace_properties).values(
            catalog_name=tables.CATALOG_NAME, namespace=tables.NAMESPACE, property_key="exists", property_value="true"
        )
    )


def open_catalog(database: Database, location: str) -> None:
    """Check that this database holds the lake at `location` in a format that can be served; migrate an older one."""
    found = stored_format(database)
    if found is None:
        raise NotFound("there is no lake here", location=location, advice="Create one with `floodmark init`.")
    check_format(found)
    if found < tables.FORMAT and not database.read_only:
        _migrate(database)
    with database.read() as tx:
        stored = tx.execute(select(tables.lake.c.location)).scalar_one()
    if stored != location:
        raise Corrupt(
            "this catalog belongs to another lake",
            location=location,
            catalog_location=stored,
            advice="Open the lake where it was made: its paths are absolute, so it cannot be moved by copying.",
        )


def check_format(found: int) -> None:
    """Refuse a lake whose format this code can neither serve nor migrate."""
    if found > tables.FORMAT:
        raise TooNew(
            "this lake was made by a newer Floodmark",
            format=found,
            format_known=tables.FORMAT,
            advice="Upgrade Floodmark on this machine; nothing was changed.",
        )
    if found < tables.OLDEST_FORMAT:
        raise TooOld(
            "this lake was made by a Floodmark from before the first release",
            format=found,
            format_known=tables.FORMAT,
            advice="Open it with the Floodmark that made it, export its rows, and load them into a new lake; "
            "nothing was changed.",
        )


def _make_tables(tx: Connection) -> None:
    """Run all migrations on an empty database.

    Alembic takes eight times as long as the statements that it runs: for the next lake, this process runs only those.
    """
    made = tx.dialect.name, SCRIPTS
    if made in _STATEMENTS:
        for statement in _STATEMENTS[made]:
            tx.exec_driver_sql(statement)
        return
    with _changes_of(tx) as run:
        upgrade(tx, "head")
    _STATEMENTS[made] = tuple(run)


@contextmanager
def _changes_of(tx: Connection) -> Iterator[list[str]]:
    """The statements that run on this connection inside the block, without those that only read."""
    run: list[str] = []

    @event.listens_for(tx, "before_cursor_execute")
    def note(_tx: Connection, _cursor: DBAPICursor, statement: str, values: Sized, *_: object) -> None:
        if not statement.lstrip().startswith(("SELECT", "PRAGMA")):
            if values:
                raise AssertionError(f"values of a migration that makes tables are not kept: {statement}")
            run.append(statement)

    try:
        yield run
    finally:
        event.remove(tx, "before_cursor_execute", note)


def upgrade(tx: Connection, revision: str) -> None:
    """Run Alembic's scripts up to `revision` inside this transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = tx
    command.upgrade(config, revision)


def _migrate(database: Database) -> None:
    with _maker(database) as tx:
        hit("migrate.locked")
        # Another process may have migrated while this one waited for the lock.
        found = _stored_format(tx)
        if found is not None and found < tables.FORMAT:
            _check_no_writers(tx, database.now_ms(tx))
            upgrade(tx, "head")
            hit("migrate.migrated")  # Crash here: the transaction is undone, the old format exists as it was.


def _check_no_writers(tx: Connection, now_ms: int) -> None:
    """Refuse while writers of the old format run: they would go on by the old rules."""
    for process in living_processes(tx, now_ms):
        raise Busy(
            "another process writes to this lake with an older Floodmark",
            holder=f"{process.host}:{process.pid}",
            advice="Stop it first: the lake's catalog must be migrated. You can still open the lake read-only.",
        )


@contextmanager
def _maker(database: Database) -> Iterator[Connection]:
    with database.write() as tx:
        if database.dialect == "postgresql":
            tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
        yield tx


def _stored_format(tx: Connection) -> int | None:
    if not inspect(tx).has_table("fm_lake"):
        return None
    found = tx.execute(select(tables.lake.c.format)).scalar()
    return None if found is None else int(found)
