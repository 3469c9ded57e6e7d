"""Reading a lake: tables as they are or were, queries over one version, and what changed since.

A version is resolved once per query, and every table of the query is read at it (I2). Readers take no pin: one that
outlasts the grace of expired versions gets BelowRetention. Planning reads the catalog and metadata only; Spark starts
when rows must move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from floodmark import clock
from floodmark.commit.catalog import Catalog
from floodmark.commit.dropped import find_dropped
from floodmark.commit.expiry import deletions_floor
from floodmark.errors import BelowRetention, Corrupt, FloodmarkError, Invalid, NotFound
from floodmark.model import BEGINNING, MAIN, Head, Row
from floodmark.rows.session import Sessions
from floodmark.scan import Scan, by_arrow, dataframe, in_time, readable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema

    from floodmark.index.lookup import Asked, CheckComplete, LookupExplanation, Lookups, Page
    from floodmark.index.matching import Key, Keys
    from floodmark.rows.frames import DataFrame, SparkSession
    from floodmark.rows.reading.arrow_reader import RowsWanted
    from floodmark.rows.reading.changes import ChangePlan
    from floodmark.rows.reading.selection import Selection


@dataclass(frozen=True)
class ReadMoment:
    """The state that a reader requests: a version, a time, or the head of a branch."""

    version: int | None = None
    at: str | datetime | None = None
    branch: str = MAIN

    @property
    def is_head(self) -> bool:
        return self.version is None and self.at is None


@dataclass(frozen=True)
class Changes:
    """What changed in a table: rows and deletions with a sequence in (since, until], at one version.

    `df` is a Spark DataFrame, `arrow()` the same without Spark; both have the table's columns, `_change` (upsert or
    delete; a deleted row has only its key) and `_seq`. Checking for changes starts nothing: see `empty`.
    """

    table: str
    since: int | None
    until: int
    version: int
    table_id: str = field(repr=False)
    _head: Head = field(repr=False)
    _find: Callable[[], ChangePlan] = field(repr=False)
    _catalog: Catalog = field(repr=False)
    _sessions: Sessions = field(repr=False)

    @property
    def empty(self) -> bool:
        """True if no file can hold anything of this range. False does not promise a row."""
        return self.since == self.until or self.plan.empty

    @cached_property
    def plan(self) -> ChangePlan:
        """What to read. With nothing new, only its reader needs the table's metadata."""
        return self._find()

    @cached_property
    def df(self) -> DataFrame:
        from floodmark.rows.reading.changes import changes_dataframe

        options, arrow = self._catalog.storage.options, by_arrow(self._catalog, self._head)
        return changes_dataframe(self._sessions.get(), self.plan, storage_options=options, arrow=arrow)

    def arrow(self) -> pa.RecordBatchReader:
        """The changes as a stream of Arrow batches, in this process."""
        import pyarrow as pa

        from floodmark.rows.reading.changes import changes_batches, changes_schema

        batches = changes_batches(self._catalog.storage, self.plan)
        return pa.RecordBatchReader.from_batches(
            changes_schema(self.plan), in_time(self._catalog, self.version, self._deletions_there(batches))
        )

    def _deletions_there(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A sweep may delete deletions while they are read: then the error is BelowRetention."""
        try:
            yield from batches
        except (Corrupt, NotFound, FileNotFoundError) as error:
            _check_floor(self._catalog, self.table, self.table_id, self.since, error)
            raise


def _check_floor(
    catalog: Catalog, table: str, table_id: str, since: int | None, cause: Exception | None = None
) -> None:
    """Refuse a read of deletions that are gone. A read from the beginning does not need them."""
    floor = deletions_floor(catalog.database, table_id)
    if since is not None and BEGINNING < since < floor:
        raise BelowRetention(
            "deletions from this table since then are not known any more",
            table=table,
            since=since,
            oldest=floor,
            advice="Read the whole table again: changes without since.",
        ) from cause


def _part(wanted: RowsWanted, selection: Selection) -> str:
    """A name for what is read of a table, such that two different parts have two; empty if it is all of it."""
    facts = [] if len(selection.files) == selection.all_files else [file.path for file in selection.files]
    facts += [] if wanted.columns is None else ["columns", *wanted.columns]
    facts += [] if wanted.where is None else ["where", wanted.where.text]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32] if facts else ""


class Reader:
    def __init__(self, catalog: Catalog, sessions: Sessions, lookups: Callable[[], Lookups]) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._lookups = lookups

    def scan(
        self,
        table: str,
        moment: ReadMoment,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        with_seq: bool = False,
    ) -> Scan:
        version = self._resolve(moment)
        with readable(self._catalog, version):
            head = self._head_at(table, version, moment)
            return Scan(
                self._catalog,
                self._sessions,
                head,
                version,
                where=where,
                columns=columns,
                limit=limit,
                with_seq=with_seq,
            )

    def get(
        self, table: str, key: Key, moment: ReadMoment, check_complete: CheckComplete
    ) -> tuple[Row | None, LookupExplanation]:
        """The row with a key, or None. `check_complete` decides whether None would be a guess."""
        version, head = self._state(table, moment)
        with readable(self._catalog, version):
            return self._lookups().get(head, version, key, check_complete)

    def get_many(
        self, table: str, keys: Keys, moment: ReadMoment, check_complete: CheckComplete
    ) -> tuple[pa.Table, LookupExplanation]:
        version, head = self._state(table, moment)
        with readable(self._catalog, version):
            return self._lookups().get_many(head, version, keys, check_complete)

    def lookup(
        self, table: str, asked: Asked, after: str | None, moment: ReadMoment, check_complete: CheckComplete
    ) -> Page:
        """A page of rows. A cursor has the version to read; `BelowRetention` once that has expired."""
        from floodmark.index.ranking import Cursor

        cursor = None if after is None else Cursor.parse(after)
        if cursor is not None:
            if moment.at is not None or moment.version not in (None, cursor.version):
                raise Invalid(
                    "a cursor continues at the version of its first page",
                    version=cursor.version,
                    advice="Give no version and no time with it.",
                )
            moment = replace(moment, version=cursor.version)
        version, head = self._state(table, moment)
        with readable(self._catalog, version):
            return self._lookups().lookup(head, version, asked, cursor, check_complete)

    def _state(self, table: str, moment: ReadMoment) -> tuple[int, Head]:
        """The version to read, and the table at it; at a branch's head, one query."""
        if moment.is_head:
            return self._catalog.history.head_now(table, moment.branch)
        version = self._resolve(moment)
        return version, self._head_at(table, version, moment)

    def sql(self, query: str, moment: ReadMoment, *, with_seq: bool) -> DataFrame:
        from floodmark.rows.session import is_spark_running
        from floodmark.rows.sql.query import Source, missing_table, misspelt_table, query_body, run_query

        query_body(query)  # refused before it starts a JVM
        version = self._resolve(moment)
        state = self._catalog.history.tables_at(version)

        def hint(name: str) -> str | None:
            return self._dropped_hint(name) if moment == ReadMoment() else None

        # A running session may have a view of this name: then Spark decides, and a clearer error follows afterwards.
        misspelt = None if is_spark_running() else misspelt_table(query, list(state))
        if misspelt is not None:
            if dropped := hint(misspelt.facts["table"]):
                raise NotFound(misspelt.message, advice=dropped, **misspelt.facts)
            raise misspelt
        missing = missing_table(query, list(state), hint) if self._sessions.starts_empty() else None
        if missing is not None:
            raise missing
        with readable(self._catalog, version):
            spark = self._sessions.get()
            needed = self._needed(spark, query, state, with_seq)
            parts = {name: _part(*found) for name, found in needed.items()}
            return run_query(
                spark,
                query,
                {name: Source(head.table_id, head.snapshot, parts.get(name, "")) for name, head in state.items()},
                lambda table: dataframe(self._catalog, self._sessions, state[table], *needed[table]),
                with_seq=with_seq,
                hint=hint,
            )

    def _needed(
        self, spark: SparkSession, query: str, state: Mapping[str, Head], with_seq: bool
    ) -> dict[str, tuple[RowsWanted, Selection]]:
        """What a query needs of each table that it names, for the tasks that read files, and its files."""
        from floodmark.rows.reading.arrow_reader import RowsWanted
        from floodmark.rows.reading.scan import by_tasks
        from floodmark.rows.reading.selection import select_files
        from floodmark.rows.sql.pushdown import Need, needs
        from floodmark.rows.sql.query import named_tables, reads_as_usual
        from floodmark.rows.stall import is_connect

        schemas = {name: self.schema(state[name]) for name in named_tables(query, state)}
        found = needs(query, schemas) if reads_as_usual(spark) else {}
        needed = {}
        for name, schema in schemas.items():
            need = found.get(name, Need())
            selection = select_files(self._catalog.files, state[name], schema, need.where)
            wanted = RowsWanted(with_seq=with_seq)
            if by_tasks(spark, [file.path for file in selection.files], by_arrow(self._catalog, state[name])):
                # On Connect a view stays, so that there it must not be one for each value that a condition may have.
                where = None if is_connect(spark) else need.where
                wanted = replace(wanted, columns=need.columns, where=where)
            needed[name] = (wanted, selection)
        return needed

    def _dropped_hint(self, table: str) -> str | None:
        try:
            with self._catalog.database.read() as tx:
                find_dropped(tx, table)
        except FloodmarkError:
            return None  # it never existed, or it cannot come back
        return f"It was dropped: `floodmark undrop {table}` restores it."

    def changes(self, table: str, since: int | None, until: int | None, moment: ReadMoment) -> Changes:
        version, head = self._head_of_changes(table, moment)
        since_number = BEGINNING if since is None else since
        last = head.sequence if until is None else until
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (since_number, last))
        if not whole or not BEGINNING <= since_number <= last <= head.sequence:
            raise Invalid(
                "invalid range of sequences",
                table=table,
                since=since,
                until=until,
                newest=head.sequence,
                advice="since is your last sequence, until at most the newest; leave until out to get all new changes.",
            )
        plan = self._plan_changes(version, head, since_number, last) if since_number < last else None
        # After they were read: a floor that rises from here on removes nothing from the list.
        _check_floor(self._catalog, table, head.table_id, since)

        def find() -> ChangePlan:
            return plan or self._plan_changes(version, head, since_number, last)

        return Changes(table, since, last, version, head.table_id, head, find, self._catalog, self._sessions)

    def _plan_changes(self, version: int, head: Head, since: int, until: int) -> ChangePlan:
        from floodmark.rows.reading.changes import plan_changes
        from floodmark.rows.reading.selection import select_newer

        with readable(self._catalog, version):
            schema = self.schema(head)
            files = select_newer(self._catalog.files, head, schema, since, until) if since < until else []
        deletions = self._catalog.history.deletions(head, since, until) if since < until else []
        return plan_changes(schema, files, deletions, since, until)

    def _head_of_changes(self, table: str, moment: ReadMoment) -> tuple[int, Head]:
        """The version to read, and the table at it; at a branch's head, one question to the catalog answers both."""
        from floodmark.commit.drift import check_not_drifted

        if not moment.is_head:
            version = self._resolve(moment)
            return version, self._head_at(table, version, moment)
        version, current = self._catalog.history.current_table(table, moment.branch)
        if current is None:
            return version, self._head_at(table, version, moment)
        check_not_drifted(self._catalog.files, current)
        return version, current.head

    def schema(self, head: Head) -> Schema:
        from floodmark.commit.metadata import schema_of

        return schema_of(self._catalog.files.metadata(head.metadata_location), head)

    def filled_columns(self, head: Head) -> tuple[str, ...]:
        """The columns that the table fills by an expression where rows lack them."""
        from floodmark.commit.fills import fills_of

        properties = self._catalog.files.metadata(head.metadata_location).properties
        return tuple(fill.column for fill in fills_of(properties, self.schema(head)))

    def _head_at(self, table: str, version: int, moment: ReadMoment) -> Head:
        head = self._catalog.history.tables_at(version).get(table)
        if head is None:
            raise NotFound(
                "there is no such table" if moment.is_head else "there was no such table at this version",
                table=table,
                advice="`floodmark tables` lists them.",
            )
        return head

    def _resolve(self, moment: ReadMoment) -> int:
        if moment.version is not None and moment.at is not None:
            raise Invalid("give a version or a time, not both")
        at_ms = None if moment.at is None else clock.parse_time_ms(moment.at)
        return self._catalog.history.resolve(version=moment.version, at_ms=at_ms, branch=moment.branch)
