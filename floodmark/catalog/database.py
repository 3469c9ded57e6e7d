"""The connection to the catalog database: SQLite for one machine, PostgreSQL for several.

`read` gives one consistent view; `write` is one transaction that takes the database's write lock at once (SQLite) or
row by row (PostgreSQL). Failure model: an error before COMMIT means that nothing happened; an error in COMMIT is
ReplyLost, and only reading shows the outcome (I13). SQLite runs in WAL with synchronous=FULL, PostgreSQL with
synchronous_commit=on, so that an acknowledged COMMIT survives power loss (I4).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote

from sqlalchemy import Compiled, Connection, Dialect, Engine, Transaction, create_engine, event, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    NoSuchModuleError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from floodmark.catalog import tables
from floodmark.errors import Corrupt, Invalid, TooNew, Unavailable, cause_text
from floodmark.model import Scalar

if TYPE_CHECKING:
    import psycopg
    from sqlalchemy import ColumnElement, Executable, Row
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

BUSY_TIMEOUT_MS = 10_000
# A connection that was used so recently is taken as alive.
FRESH_S = 0.1
SQLITE_NAME = "catalog.db"
# The parts of a URL's query that may be shown: anything else may be a secret.
SHOWN_QUERY = frozenset({"host", "port", "dbname", "sslmode"})


# A row of a query, read by the names of its columns. It becomes a record in the module that runs the query.
SqlRow: TypeAlias = "Row[*tuple[Scalar, ...]]"
# A new value of a column: a plain one, or an expression of the row's columns.
SqlValue: TypeAlias = "Scalar | ColumnElement[Scalar]"


@dataclass(frozen=True)
class LakeRow:
    """The one row of fm_lake."""

    format: int
    version: int
    incarnation: str
    location: str
    created_ms: int


# Far more than the catalog has: a bound for statements whose text depends on their values.
STATEMENTS_KEPT_MAX = 2_000

_StatementKey = tuple[Dialect, Hashable]


class CompiledStatements(MutableMapping[_StatementKey, Compiled]):
    """SQLAlchemy's `compiled_cache`, kept for every catalog that this process opens. Threads may share it.

    SQLAlchemy keeps compiled statements with an engine, and each open of a lake makes an engine: a short one would
    mostly compile.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, Compiled] = {}

    def __getitem__(self, key: _StatementKey) -> Compiled:
        return self._kept[_without_engine(key)]

    def __setitem__(self, key: _StatementKey, compiled: Compiled) -> None:
        if len(self._kept) >= STATEMENTS_KEPT_MAX:
            self._kept.clear()
        self._kept[_without_engine(key)] = compiled

    def __delitem__(self, key: _StatementKey) -> None:
        del self._kept[_without_engine(key)]

    def __iter__(self) -> Iterator[_StatementKey]:
        raise NotImplementedError("the engines that statements were compiled for are not kept")

    def __len__(self) -> int:
        return len(self._kept)


def _without_engine(key: _StatementKey) -> Hashable:
    """The first part of a key is the engine's own dialect object: what counts of it is its kind, and the server's."""
    dialect, *statement = key
    return (type(dialect), getattr(dialect, "server_version_info", None), *statement)


STATEMENTS = CompiledStatements()
# Parameters may be secrets (of an index, of a sink): SQLAlchemy's errors, and so traces, must not show them (I18).
HIDE_PARAMETERS = True


class ReplyLost(Unavailable):
    """COMMIT was sent and its reply did not come: neither done nor undone until the catalog was read."""

    @property
    def kind(self) -> str:
        return Unavailable.__name__  # the name that a caller knows


def _is_at_rest(path: str) -> bool:
    """Whether it is on a read-only file system, without a log beside it.

    A log would hold the last commits, from before a crash or from another process that may write to the same disk.
    """
    if not os.path.exists(path) or not os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    log = f"{path}-wal"
    return not os.path.exists(log) or os.path.getsize(log) == 0


class Database:
    """One catalog database. Threads may share it; every transaction has a connection of its own."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            # Without its cause: that would show parts of a password with an unescaped sign in it (I18).
            raise Invalid(
                "this is not a database URL",
                advice="Use postgresql+psycopg://user:password@host/database, with signs in the password escaped.",
            ) from None
        self.dialect = parsed.get_backend_name()
        if self.dialect not in ("sqlite", "postgresql"):
            raise Invalid(
                "this database cannot hold a lake's catalog",
                database=self.dialect,
                advice="Use SQLite (a local folder) or PostgreSQL.",
            )
        self.read_only = read_only
        self._pid = os.getpid()
        shown = {key: value for key, value in parsed.query.items() if key in SHOWN_QUERY}
        self.shown_url = parsed.set(query=shown).render_as_string(hide_password=True)
        self.engine = self._sqlite(parsed.database or "") if self.dialect == "sqlite" else self._postgresql(url)

    # ── connections ──

    def _sqlite(self, path: str) -> Engine:
        mode = "ro" if self.read_only else "rwc"
        address = f"file:{quote(path)}?mode={mode}&uri=true"
        if self.read_only and _is_at_rest(path):
            # SQLite cannot make its lock files on a read-only file system.
            address += "&immutable=1"
        engine = create_engine(
            f"sqlite+pysqlite:///{address}",
            poolclass=QueuePool,
            execution_options={"compiled_cache": STATEMENTS},
            hide_parameters=HIDE_PARAMETERS,
            connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_MS / 1000},
        )

        @event.listens_for(engine, "connect")
        def _configure(connection: sqlite3.Connection, _record: ConnectionPoolEntry) -> None:
            connection.isolation_level = None  # BEGIN is ours
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
            if not self.read_only:
                _use_wal(cursor)
                cursor.execute("PRAGMA synchronous=FULL")
                cursor.execute("PRAGMA foreign_keys=ON")
            cursor.close()

        @event.listens_for(engine, "handle_error")
        def _interrupted(context: ExceptionContext) -> None:
            # An interrupt is not a lost connection: dropping it unclosed would keep the write lock until it is
            # collected. It is rolled back instead, like after any error.
            if not isinstance(context.original_exception, Exception):
                context.is_disconnect = False

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            options = connection.get_execution_options()
            if not options.get("floodmark_single"):
                connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("floodmark_write") else "BEGIN")

        return engine

    def _postgresql(self, url: str) -> Engine:
        try:
            engine = create_engine(
                url, execution_options={"compiled_cache": STATEMENTS}, hide_parameters=HIDE_PARAMETERS
            )
        except (NoSuchModuleError, ImportError) as error:
            raise Invalid("this PostgreSQL driver is not installed", advice="Use postgresql+psycopg://…") from error
        from psycopg import Error

        @event.listens_for(engine, "connect")
        def _configure(connection: psycopg.Connection, _record: ConnectionPoolEntry) -> None:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SET synchronous_commit=on")
                cursor.execute(f"SET lock_timeout={BUSY_TIMEOUT_MS * 3}")
                cursor.execute("SET idle_in_transaction_session_timeout=60000")
                if self.read_only:
                    cursor.execute("SET default_transaction_read_only=on")
            connection.autocommit = False

        @event.listens_for(engine, "checkin")
        def _used(_connection: psycopg.Connection | None, record: ConnectionPoolEntry) -> None:
            record.info["used_s"] = time.monotonic()

        @event.listens_for(engine, "checkout")
        def _check(connection: psycopg.Connection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection) -> None:
            # One that was used a moment ago is not asked whether it lives: that would be a third of all round trips.
            if time.monotonic() - record.info.get("used_s", 0.0) < FRESH_S:
                return
            try:
                connection.autocommit = True
                connection.execute("SELECT 1")
                connection.autocommit = False
            except Error as error:
                # The pool connects anew, and closes its other connections of before.
                raise DisconnectionError("the server closed the connection") from error

        return engine

    def close(self) -> None:
        # A forked child lets go of its parent's connections without touching them.
        self.engine.dispose(close=not self.is_foreign)

    @property
    def is_foreign(self) -> bool:
        """Whether another process opened this, and this one is its fork."""
        return os.getpid() != self._pid

    # ── transactions ──

    def _check_process(self) -> None:
        """A forked child shares its parent's connections and heartbeat: using them would break both processes."""
        if self.is_foreign:
            raise Invalid("this lake was opened by another process", advice="Open it again after the fork.")

    def ask(self, statement: Executable, values: Mapping[str, Scalar | Sequence[Scalar]] | None = None) -> list[SqlRow]:
        """The rows of one query. It is one consistent view by itself: no BEGIN and no end, so one round trip."""
        self._check_process()
        options: dict[str, str | bool] = {"floodmark_single": True}
        if self.dialect == "postgresql":
            options["isolation_level"] = "AUTOCOMMIT"
        with _translated(), self.engine.connect().execution_options(**options) as connection:
            return list(connection.execute(statement, values or {}))

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view of the catalog; writes nothing."""
        self._check_process()
        with _translated():
            connection = self.engine.connect()
        try:
            with _translated():
                if self.dialect == "postgresql":
                    connection = connection.execution_options(isolation_level="REPEATABLE READ")
                transaction = connection.begin()
            try:
                with _translated():
                    yield connection
            finally:
                if transaction.is_active and not connection.invalidated:
                    transaction.rollback()
        finally:
            connection.close()

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction. Leaving it commits; an error inside undoes it; an error in COMMIT is ReplyLost."""
        self._check_process()
        with _translated():
            connection = self.engine.connect().execution_options(floodmark_write=True)
        try:
            with _translated():
                transaction = connection.begin()
            try:
                with _translated():
                    yield connection
            except BaseException:
                if not connection.invalidated:
                    _undo(transaction)
                raise
            try:
                transaction.commit()
            except DBAPIError as error:
                connection.invalidate()
                raise ReplyLost("the reply to COMMIT was lost", database=self.shown_url, cause=_cause(error)) from error
            except BaseException:
                # Interrupted around COMMIT: the connection may still have its transaction, so it is not used again.
                connection.invalidate()
                raise
        finally:
            connection.close()

    def lock_lake(self, tx: Connection) -> LakeRow:
        """Take the total order: until this transaction ends, no other one changes the lake. Returns fm_lake's row."""
        row = tx.execute(_LAKE).first()
        if row is None:
            raise Corrupt("the catalog has no lake row", database=self.shown_url, advice="Restore it from a backup.")
        if row.format > tables.FORMAT:
            # Migrated while this process had it open: its writes may be wrong by rules that it does not know.
            raise TooNew(
                "this lake was migrated by a newer Floodmark meanwhile",
                format=row.format,
                format_known=tables.FORMAT,
                advice="Nothing was changed. Upgrade Floodmark here and open the lake again.",
            )
        return to_lake(row)

    def now_ms(self, tx: Connection) -> int:
        """The database's clock: leases and commit times are compared by this one only."""
        return int(tx.execute(_NOW_MS[self.dialect]).scalar_one())


# Statements of every commit are made once: SQLAlchemy takes longer to make one than the database to run it.
_LAKE = select(tables.lake).where(tables.lake.c.id == 1).with_for_update()
# The database's clock as an expression of its dialect.
NOW_MS = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)",
}
_NOW_MS = {dialect: text(f"SELECT {now}") for dialect, now in NOW_MS.items()}


def to_lake(row: SqlRow) -> LakeRow:
    return LakeRow(row.format, row.version, row.incarnation, row.location, row.created_ms)


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Two processes may open a new database at once: the change to WAL does not wait for the other by itself."""
    end = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)


def _undo(transaction: Transaction) -> None:
    try:
        transaction.rollback()
    except DBAPIError:
        # The connection is gone, and with it the transaction: the database undoes it by itself.
        return


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (IntegrityError, DataError, ProgrammingError):
        raise  # a defect of ours or of the input, not of the connection
    except PoolTimeout as error:
        raise Unavailable("no connection to the catalog was free", cause=error, advice="Retry.") from error
    except DBAPIError as error:
        if "locked" in str(error.orig) or "lock timeout" in str(error.orig):
            raise Unavailable("the catalog is held by another process", cause=_cause(error), advice="Retry.") from error
        raise Unavailable("the catalog did not answer", cause=_cause(error), advice="Retry.") from error


def _cause(error: DBAPIError) -> str:
    return cause_text(error if error.orig is None else error.orig)
