"""The lake: what a user holds. Thin: every verb is one call into a room below.

Opening for writing recovers first, and so does every write (I13, I16); a read-only lake writes nothing (I17). Questions
of state touch the catalog only: no JVM, no table files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from sqlalchemy.exc import SQLAlchemyError

from floodmark.catalog.backup import backup as backup_catalog
from floodmark.catalog.riders import Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.intent import Intent, batch_rider, stream_rider
from floodmark.commit.publication import check_riders, unchanged
from floodmark.commit.recovery import resolve
from floodmark.engine import Engine
from floodmark.errors import Conflict, FloodmarkError, Invalid
from floodmark.json_form import Json, as_json
from floodmark.model import MAIN, AuditRow, Commit, Head, RecoveryReport, Row, Value
from floodmark.reading import Changes, ReadMoment
from floodmark.report.health import Health
from floodmark.report.maintenance import DEFAULTS
from floodmark.report.status import lake_health, lake_status, lake_tables
from floodmark.report.tables import table_contents, table_details
from floodmark.rows.session import Sessions
from floodmark.runs import WriteCallback
from floodmark.settings.settings import MaintainSettings
from floodmark.shown import Listing, TableFacts, html_table
from floodmark.storage import root_location
from floodmark.write.options import WriteOptions

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa
    from pyiceberg.schema import Schema

    from floodmark.backfill.backfills import LakeBackfills
    from floodmark.branches.branches import LakeBranches
    from floodmark.branches.records import BranchDiff, RollbackPlan, RolledBack
    from floodmark.index.lookup import LookupExplanation, Page
    from floodmark.index.matching import Key, Keys
    from floodmark.ingest.receive import Sender
    from floodmark.ingest.stream import StreamWriter
    from floodmark.maintenance.maintenance import LakeMaintenance
    from floodmark.repair.history_files import GivenUp
    from floodmark.repair.repair import Repair
    from floodmark.rows.frames import DataFrame, SparkSession, StructType
    from floodmark.scan import Scan
    from floodmark.schema.file import WantedTable
    from floodmark.schema.indexes import LakeIndexes
    from floodmark.schema.plan import Plan
    from floodmark.sinks.sinks import LakeSinks
    from floodmark.write.transaction import Transaction
    from floodmark.write.undrop import Undropped

# Rows to write.
Data: TypeAlias = "DataFrame | pa.Table | pa.RecordBatchReader | pandas.DataFrame | Sequence[Row]"
# A file that declares tables, what tomllib reads from it, or what it holds under `tables`.
Source = str | os.PathLike[str] | Mapping[str, Json]


class Lake:
    """A lake that is open. `floodmark.open` opens one; close it, or use it in a `with` block.

    Tables     create_table, drop_table, undrop, rename_table, adopt, plan, apply, tables, show, schema
    Columns    add_column, rename_column, drop_column
    Write      append, merge, update, delete, overwrite, transaction (several tables, one version)
    Go back    rollback, plan_rollback, diff (two versions)
    Read       scan (rows by a condition, for Arrow, pandas, Polars, DuckDB, Spark), read, read_arrow, sql, changes
    Find       get, get_many (rows by key), lookup (rows by values, in pages); through indexes, without Spark
    Ask        status, health, history, audit
    Indexes    indexes.create, .drop, .list, .status
    Branches   branches.create, .merge, .diff, .list, .delete
    Sinks      sinks.add, .run, .status, .pause, .resume, .quarantine
    Backfills  backfill.history, .column, .list, .show, .cancel, .resume
    Upkeep     maintain.run, .compact, .retain, .index, .expire, .sweep; recover, repair, resolve, backup

    Every write returns a Commit, and with `if_version` is published only if its tables are as they were at that
    version. Errors are kinds of FloodmarkError: each says what failed, the facts, and what to do.
    """

    def __init__(
        self,
        catalog: Catalog,
        sessions: Sessions,
        actor: str,
        read_only: bool,
        keeping: MaintainSettings = DEFAULTS,
    ) -> None:
        self.engine = Engine(catalog, sessions, actor, read_only)
        self.catalog = catalog
        self.sessions = sessions
        self.actor = actor
        self.read_only = read_only
        self.keeping = keeping
        self._reader = self.engine.reader
        # Where the tables are that the last transaction wrote (write/transaction.py).
        self._expected: list[str] = []

    def __repr__(self) -> str:
        # Without a question to the catalog: a debugger, a log line or a lake that is closed must not wait or fail.
        mode = "read-only" if self.read_only else "for writing"
        return f"<Lake {self.location} {mode} as {self.actor}, catalog {self.catalog.database.shown_url}>"

    def _repr_html_(self) -> str:
        try:
            heads, version = self.heads(), self.catalog.lake_row().version
        except (FloodmarkError, SQLAlchemyError):
            return f"<p>{escape(repr(self))}</p>"  # closed, or its catalog does not answer
        rows = [(head.table, head.rows, head.files, head.size_bytes, head.version) for head in heads]
        return html_table(f"{self.location}, version {version}", ("table", "rows", "files", "bytes", "version"), rows)

    @property
    def location(self) -> str:
        """Where the lake's files are."""
        return self.catalog.location

    @property
    def spark(self) -> SparkSession:
        """The Spark session that rows move through; starts one if there is none."""
        return self.sessions.get()

    # ── tables ──

    def create_table(
        self,
        name: str,
        schema: str | StructType | pa.Schema | Schema,
        *,
        key: Sequence[str] = (),
        partition: Sequence[str] = (),
        sort: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        if_not_exists: bool = False,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Create a table. `schema`: Spark StructType, Arrow schema, PyIceberg schema, or Spark DDL text.

        With `if_version`: `Conflict` if the branch has had a table of this name since that version; with
        `if_not_exists`, if it has changed one since.
        """
        from floodmark.write.shape import plan_table
        from floodmark.write.verbs import create

        shape = plan_table(name, schema, key=key, partition=partition, sort=sort, properties=properties or {})
        self.engine.get_ready()
        existing = {head.table.lower(): head.table for head in self.heads(branch)}
        intent = self._intent("create_table", actor, message or f"create {name}", None, branch, if_version)
        if name.lower() in existing:
            check_riders(self.catalog, intent, intent.expecting((), free=[name]))
            if if_not_exists:
                return unchanged(self.catalog, self._intent("create_table", None, "", branch=branch))
            raise Invalid(
                "there is a table of this name",
                table=existing[name.lower()],
                advice="Use if_not_exists=True to keep it. Table names are not case-sensitive.",
            )
        try:
            return create(self.engine, intent, shape)
        except Invalid:
            if if_not_exists and name.lower() in {head.table.lower() for head in self.heads(branch)}:
                return unchanged(
                    self.catalog, self._intent("create_table", None, "", branch=branch)
                )  # another process was quicker
            raise

    def adopt(
        self,
        name: str,
        location: str,
        *,
        key: Sequence[str] = (),
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Adopt an Iceberg table of another engine into the lake; no data file is rewritten or moved.

        `location` is its folder or, better, the metadata.json that its catalog points to. From then on only this lake
        may write to it. `key` is checked to be unique by reading. `if_version`: as for `create_table`.
        """
        from floodmark.write.verbs import adopt

        self.engine.get_ready()
        intent = self._intent("adopt", actor, message or f"adopt {location}", if_version=if_version)
        return adopt(self.engine, intent, name, root_location(location), key)

    # ── their shape, as code ──

    def plan(self, source: Source, *, check: bool = True) -> Plan:
        """The steps that change the tables of main to what a file declares. Changes nothing.

        Each step is safe, needs a rewrite, is destructive (loses data), or is refused. `check` also reads rows where a
        step depends on them: keys, nulls, references.
        """
        from floodmark.schema.plan import make_plan
        from floodmark.schema.row_checks import checked_plan

        wanted, origin = _read(source)
        plan = make_plan(self.catalog, wanted, origin)
        return checked_plan(self.catalog, plan) if check else plan

    def apply(
        self,
        source: Source | Plan,
        *,
        expect: str | None = None,
        fill_later: bool = False,
        allow_destructive: bool = False,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        told: Callable[[Plan], None] | None = None,
    ) -> Commit:
        """Change the tables to what a file declares, in one version; `nothing_to_do` if they already match.

        A Plan is applied exactly: `Conflict` if a table that it read has changed since. A file is planned now;
        `expect` is the id that the plan must have. `fill_later`: existing rows stay without the defaults of new
        columns until a backfill fills them. `allow_destructive`: also apply steps that lose data (dropped tables and
        columns, a retention that deletes more rows); without it they are `Invalid`. `if_version`: every table that it
        changes must be as it was at that version, and if it changes none, all that it names; else `Conflict`. `told` is
        called with the plan that was applied: for a file, it is planned again if tables changed meanwhile.
        """
        from floodmark.schema.apply import apply_plan
        from floodmark.schema.plan import Plan, make_plan

        self.engine.get_ready()
        again: Callable[[], Plan] | None = None
        if isinstance(source, Plan):
            plan = source
        else:
            wanted, origin = _read(source)
            plan = make_plan(self.catalog, wanted, origin)
            if expect is None:
                again = lambda: make_plan(self.catalog, wanted, origin)  # noqa: E731
        if expect is not None and plan.id != expect:
            raise Conflict(
                "the plan is not the expected one",
                plan=plan.id,
                expected=expect,
                advice="The file or the lake has changed: create the plan again and check it.",
            )
        intent = self._intent("apply", actor, message or f"apply {plan.origin}", None, plan.branch, if_version)
        return apply_plan(
            self.engine,
            intent,
            plan,
            again=again,
            fill_later=fill_later,
            allow_destructive=allow_destructive,
            on_plan=told,
        )

    def plan_drop(self, table: str, *, branch: str = MAIN) -> Plan:
        """The plan of drop_table; its one step is refused if something needs the table. Changes nothing."""
        from floodmark.schema.file import WantedTable

        return self._plan_one(WantedTable(table, drop=True), branch)

    def drop_table(
        self,
        table: str,
        *,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Drop a table. Older versions keep it until they expire; till then `undrop` restores one that main had.

        Refused while a sink follows it, a backfill works on it, another branch has it, or a table refers to it.
        """
        from floodmark.schema.file import WantedTable

        intent = self._intent("apply", actor, message or f"drop {table}", None, branch, if_version)
        return self._reshape(intent, WantedTable(table, drop=True), loses_data=True)

    def rename_table(
        self,
        table: str,
        new_name: str,
        *,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Give a table another name. It keeps its id, rows, sequences, marks, batch ids, references and sinks.

        Older versions have it under its old name, and sinks ship it under the one that it had when they were added.
        Refused if the new name is taken, also in other case, and while a backfill works on it or has loaded a history
        into it, or another branch has it: a table has one name in the lake.
        """
        from floodmark.schema.file import WantedTable
        from floodmark.write.shape import check_name

        check_name(new_name)
        if table == new_name:
            raise Invalid("the table has this name", table=table, advice="Give rename_table another one.")
        intent = self._intent("apply", actor, message or f"rename {table} to {new_name}", None, branch, if_version)
        return self._reshape(intent, WantedTable(table, rename_to=new_name))

    def add_column(
        self,
        table: str,
        name: str,
        type: str,
        *,
        comment: str | None = None,
        default: str | int | bool | None = None,
        required: bool = False,
        fill_later: bool = False,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Add a column to a table; `type` is Spark's, like "decimal(10,2)". Existing rows are null in it.

        With a `default` existing rows get it too, in this version, or with `fill_later` by a backfill; so do rows that
        do not bring the column.
        """
        from floodmark.schema.file import added_column
        from floodmark.schema.plan import GIVEN

        entry: dict[str, Json] = {"type": type, "required": required}
        entry |= {} if default is None else {"default": default}
        entry |= {} if comment is None else {"comment": comment}
        intent = self._intent("apply", actor, message or f"add {table}.{name}", None, branch, if_version)
        return self._reshape(intent, added_column(table, name, entry, GIVEN), fill_later=fill_later)

    def rename_column(
        self,
        table: str,
        column: str,
        new_name: str,
        *,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Give a column another name; no file is rewritten, and older versions have the old one.

        Refused while an expression, a sink of the branch or a backfill uses the old name.
        """
        from floodmark.schema.file import ColumnChange, WantedTable

        note = message or f"rename {table}.{column} to {new_name}"
        wanted = WantedTable(table, change=ColumnChange(rename=(column, new_name)))
        return self._reshape(self._intent("apply", actor, note, None, branch, if_version), wanted)

    def drop_column(
        self,
        table: str,
        column: str,
        *,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Drop a column, with its values, from a table. Only older versions keep it, until they expire.

        Refused for a column of the key, of the layout, of a reference or of retention, and while an expression, a sink
        of the branch or a backfill uses it.
        """
        intent = self._intent("apply", actor, message or f"drop {table}.{column}", None, branch, if_version)
        return self._reshape(intent, _without(table, column), loses_data=True)

    def plan_drop_column(self, table: str, column: str, *, branch: str = MAIN) -> Plan:
        """The plan of drop_column; its one step is refused if something needs the column. Changes nothing."""
        return self._plan_one(_without(table, column), branch)

    def _plan_one(self, wanted: WantedTable, branch: str) -> Plan:
        """The plan of one change of one table, which exists."""
        from floodmark.schema.plan import GIVEN, make_plan

        self.catalog.history.head(wanted.name, branch)
        return make_plan(self.catalog, [wanted], GIVEN, branch)

    def _reshape(
        self, intent: Intent, wanted: WantedTable, *, loses_data: bool = False, fill_later: bool = False
    ) -> Commit:
        """Apply one change of one table; planned again if the table changed meanwhile."""
        from floodmark.schema.apply import apply_plan
        from floodmark.schema.plan import GIVEN, make_plan

        self.engine.get_ready()
        first = self._plan_one(wanted, intent.branch)

        def again() -> Plan:
            return make_plan(self.catalog, [wanted], GIVEN, intent.branch)

        return apply_plan(self.engine, intent, first, again=again, fill_later=fill_later, allow_destructive=loses_data)

    def undrop(
        self,
        table: str,
        *,
        version: int | None = None,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        told: Callable[[Undropped], None] | None = None,
    ) -> Commit:
        """Restore a dropped table as it was, with its table id, sequences, marks and batch ids.

        `BelowRetention` once no version that has it can be read; `Invalid` if its name is taken. `version`: one that
        has the table, if several had this name. Its references to other tables are not checked any more, until `apply`
        declares them again. With `if_version` it must have been dropped at that version already, and not again since.
        `told` is called with what was restored.
        """
        from floodmark.write.undrop import undrop

        self.engine.get_ready()
        intent = self._intent("undrop", actor, message or f"undrop {table}", if_version=if_version)
        return undrop(self.catalog, intent, table, version, told)

    # ── writing ──

    def append(
        self,
        table: str,
        data: Data,
        *,
        batch: str | None = None,
        evolve: bool = False,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        progress: WriteCallback | None = None,
    ) -> Commit:
        """Append rows: a Spark DataFrame, an Arrow table or reader, a pandas DataFrame, or a list of dicts.

        Into a table with a key this inserts: an existing key is Invalid. With `batch`, the id is committed with the
        rows, and a second append with the same id to the same table is a no-op with the outcome `already_committed`.
        With `evolve`, columns that the table does not have are added to it, numbers are widened, and columns that the
        rows do not have are null. `progress(files, bytes)` is called from time to time while rows are staged.

        With `if_version`, as for every write: `Conflict`, and nothing is changed, unless the table is still as it was
        at that version of the branch. Any commit on the table counts, also a compaction. A batch that is committed
        already is still `already_committed`.
        """
        intent = self._intent("append", actor, message, batch_rider(table, batch, branch), branch, if_version)
        return self._write(intent, table, data, WriteOptions(evolve=evolve, progress=progress))

    def merge(
        self,
        table: str,
        data: Data,
        *,
        batch: str | None = None,
        on_duplicate: str | None = None,
        order: str | None = None,
        skip_unchanged: bool = True,
        evolve: bool = False,
        partial: bool = False,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        progress: WriteCallback | None = None,
    ) -> Commit:
        """Upsert rows by the table's key: a row with the same key is replaced, others are added.

        Unchanged rows keep their sequence, unless skip_unchanged=False; if all rows are unchanged, nothing is published
        (outcome `nothing_to_do`). A duplicate key is Invalid, unless on_duplicate="last" and `order` names the
        column whose highest value counts. Rows that leave out a column are Invalid, whatever kind of data they are;
        with `partial`, only the columns that they have are updated, and new rows need the required ones.
        """
        from floodmark.write.verbs import check_order

        intent = self._intent("merge", actor, message, batch_rider(table, batch, branch), branch, if_version)
        options = WriteOptions(
            order=check_order(on_duplicate, order),
            skip_unchanged=skip_unchanged,
            evolve=evolve,
            partial=partial,
            progress=progress,
        )
        return self._write(intent, table, data, options)

    def delete(
        self,
        table: str,
        where: str,
        *,
        batch: str | None = None,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        progress: WriteCallback | None = None,
    ) -> Commit:
        """Delete the rows that a condition (Spark SQL) matches; files without such a row are left as they are."""
        intent = self._intent("delete", actor, message, batch_rider(table, batch, branch), branch, if_version)
        return self._write(intent, table, None, WriteOptions(where=where, progress=progress))

    def update(
        self,
        table: str,
        set: Mapping[str, str],
        where: str | None = None,
        *,
        batch: str | None = None,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        progress: WriteCallback | None = None,
    ) -> Commit:
        """Give the rows that a condition (Spark SQL) matches new values: `set={"country": "'NL'"}, where="id = 7"`.

        Values are Spark SQL expressions over the row as it was. `where="true"` updates all rows; without a condition
        it is Invalid. Rows that have these values already keep their sequence; if all of them do, nothing is published.
        A column of the key cannot be updated.
        """
        options = WriteOptions.of_update(table, set, where, progress)
        intent = self._intent("update", actor, message, batch_rider(table, batch, branch), branch, if_version)
        return self._write(intent, table, None, options)

    def overwrite(
        self,
        table: str,
        data: Data,
        *,
        where: str | None = None,
        batch: str | None = None,
        evolve: bool = False,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
        progress: WriteCallback | None = None,
    ) -> Commit:
        """Replace all rows, or the rows that match `where`, by these rows, which must match it too."""
        intent = self._intent("overwrite", actor, message, batch_rider(table, batch, branch), branch, if_version)
        return self._write(intent, table, data, WriteOptions(where=where, evolve=evolve, progress=progress))

    def plan_delete(self, table: str, where: str, *, branch: str = MAIN) -> dict[str, Json]:
        """The rows that delete would remove now, and the files to rewrite. Changes nothing."""
        from floodmark.write.verbs import count_where

        return count_where(self.engine, self._head(table, branch), where)

    def plan_update(
        self, table: str, set: Mapping[str, str], where: str | None = None, *, branch: str = MAIN
    ) -> dict[str, Json]:
        """The rows that an update would give these values now, and the files to rewrite. Changes nothing."""
        from floodmark.write.verbs import count_update

        return count_update(self.engine, self._head(table, branch), WriteOptions.of_update(table, set, where))

    def stream_writer(
        self,
        table: str,
        *,
        mode: str = "append",
        query: str | None = None,
        branch: str = MAIN,
        if_version: int | None = None,
        **options: Any,
    ) -> StreamWriter:
        """A function for Structured Streaming's foreachBatch: each micro-batch is committed exactly once.

        (query, batch id) is committed with the rows, so a batch that Spark replays is a no-op. `query` is the id of the
        stream, by default Spark's own, which a checkpoint keeps. `options` are those of the mode's verb. With
        `if_version` the first batch must find the table as it was at that version, and each later one as the one before
        left it: `Conflict` ends the stream as soon as another writer has changed the table.
        """
        from floodmark.ingest.stream import StreamWriter

        def write(data: DataFrame, query_id: str, batch_id: int, expected: int | None) -> Commit:
            rider = stream_rider(table, query_id, batch_id, branch)
            intent = self._intent(mode, None, f"stream batch {batch_id}", rider, branch, expected)
            return self._write(intent, table, data, WriteOptions(**options))

        self._head(table, branch)
        self._intent(mode, None, "", None, branch, if_version)  # what cannot be a version is Invalid now
        return StreamWriter(write, mode, query, options, if_version)

    def receive(
        self,
        table: str,
        rows: Sequence[Row] | pa.Table,
        *,
        actor: str | None = None,
        sender: Sender | None = None,
        key: str | None = None,
        table_id: str | None = None,
        evolve: bool = False,
        from_json: bool = False,
        message: str = "",
        if_version: int | None = None,
    ) -> Commit:
        """Receive rows of another system, with their changes (`_change`), exactly once by their `sender` or `key`.

        With `if_version` the table must be as it was at that version (see `append`).
        """
        from floodmark.ingest.receive import receive

        return receive(
            self.engine,
            actor or self.actor,
            table,
            rows,
            sender=sender,
            key=key,
            table_id=table_id,
            evolve=evolve,
            from_json=from_json,
            message=message,
            if_version=if_version,
        )

    def _write(self, intent: Intent, table: str, data: Data | None, options: WriteOptions) -> Commit:
        from floodmark.write.verbs import write

        self.engine.get_ready()
        return write(self.engine, intent, table, data, options)

    def transaction(
        self,
        message: str = "",
        *,
        actor: str | None = None,
        batch: str | None = None,
        batch_table: str = "",
        branch: str = MAIN,
        if_version: int | None = None,
    ) -> Transaction:
        """Several tables, one version: all of it becomes visible at the end of the `with` block, or nothing.

        `batch` identifies the transaction; with `batch_table` it is the same id as that of an append to this table.
        With `if_version`, all tables that it writes to must be as they were at that version (see `append`).
        """
        from floodmark.write.transaction import Transaction

        batch_id = batch_rider(batch_table, batch, branch)
        intent = self._intent("transaction", actor, message, batch_id, branch, if_version)
        return Transaction(self.engine, intent, self._expected)

    # ── going back ──

    def rollback(
        self,
        table: str | None = None,
        *,
        to: int | str | datetime,
        batch: str | None = None,
        branch: str = MAIN,
        actor: str | None = None,
        message: str = "",
        if_version: int | None = None,
    ) -> RolledBack:
        """Give a table, or without one every table, the contents that it had at a version or time, as a new version.

        Only the difference is written: rows that return are new and get the commit's sequence, rows that are still
        there keep theirs, and keys that go are deletions, so `changes` reports all of it. Of a table without a key
        `changes` cannot report rows that go: the result has their number (`unreported`). Columns, key, partitions and
        properties stay as they are now. Of every table: those created since stay as they are (`created`), those dropped
        since stay dropped (`dropped`; `undrop` restores one). Batch ids stay used. `BelowRetention` if the version has
        expired.
        """
        from floodmark.branches.rollback import KIND, request_of, rollback

        self.engine.get_ready()
        request = request_of(self.catalog, table, to, branch)
        note = message or f"roll back {table or 'all tables'} to version {request.to_version}"
        intent = self._intent(KIND, actor, note, batch_rider(table or "", batch, branch), branch, if_version)
        return rollback(self.engine, request, intent)

    def plan_rollback(
        self, table: str | None = None, *, to: int | str | datetime, branch: str = MAIN, limit: int = 20
    ) -> RollbackPlan:
        """What a rollback would do now: per table counts, and at most `limit` rows. Changes nothing.

        Whether rows of other tables refer to keys that would go, only the rollback itself checks.
        """
        from floodmark.branches.branches import check_limit
        from floodmark.branches.rollback import plan_rollback, request_of

        check_limit(limit)
        return plan_rollback(self.catalog, request_of(self.catalog, table, to, branch), limit)

    def diff(
        self,
        before: int | str | datetime,
        after: int | str | datetime,
        table: str | None = None,
        *,
        branch: str = MAIN,
        limit: int = 20,
    ) -> BranchDiff:
        """What differs between two versions or times: per table counts of rows, at most `limit` of them, and columns.

        In a table without a key a row that differs is another row: one deleted, one added. Times are those of `branch`.
        Tables that do not differ are left out; in the result `common_version` and `head_version` are the two versions.
        """
        from floodmark.branches.branches import check_limit
        from floodmark.branches.versions import diff

        check_limit(limit)
        return diff(self.catalog, before, after, table=table, branch=branch, limit=limit)

    # ── reading ──

    def scan(
        self,
        table: str,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        with_seq: bool = False,
    ) -> Scan:
        """Rows of a table that match a condition (Spark SQL, as `delete` takes it), with these columns.

        Nothing is read yet: call to_arrow, to_batches, to_pandas, to_polars, to_duckdb, df, count or explain. Only
        files and row groups that may hold matching rows are opened. The version is chosen now: all of these read it.
        with_seq adds the column `_seq`: the sequence of the commit that last wrote the row.
        """
        moment = ReadMoment(version, at, branch)
        return self._reader.scan(table, moment, where=where, columns=columns, limit=limit, with_seq=with_seq)

    @overload
    def get(
        self,
        table: str,
        key: Key,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: Literal[False] = False,
    ) -> Row | None: ...

    @overload
    def get(
        self,
        table: str,
        key: Key,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: Literal[True],
    ) -> LookupExplanation: ...

    def get(
        self,
        table: str,
        key: Key,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: bool = False,
    ) -> Row | LookupExplanation | None:
        """The row of a table with this key, as a dict, or None.

        A key is a value, a tuple of values in the table's order, or a dict by column. `Incomplete` if the key is not
        there, but a history fills the table and some of its chunks are missing. `explain`: do it, and return what was
        used: index, segments, files, row groups.
        """
        row, used = self._reader.get(table, key, ReadMoment(version, at, branch), self._check_complete)
        return used if explain else row

    @overload
    def get_many(
        self,
        table: str,
        keys: Keys,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: Literal[False] = False,
    ) -> pa.Table: ...

    @overload
    def get_many(
        self,
        table: str,
        keys: Keys,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: Literal[True],
    ) -> LookupExplanation: ...

    def get_many(
        self,
        table: str,
        keys: Keys,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: bool = False,
    ) -> pa.Table | LookupExplanation:
        """The rows with these keys as an Arrow table, in the order of the keys.

        A key that is not found has no row: every row of the result is one of the table. A key that comes twice has its
        row twice. `keys`: a list of keys as `get` takes them, or an Arrow table with the key's columns. `Incomplete`
        and `explain` as for `get`.
        """
        rows, used = self._reader.get_many(table, keys, ReadMoment(version, at, branch), self._check_complete)
        return used if explain else rows

    @overload
    def lookup(
        self,
        table: str,
        values: Mapping[str, Value] | None = None,
        /,
        *,
        limit: int | None = None,
        order: str | Sequence[str] | None = None,
        after: str | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: Literal[False] = False,
        **equals: Value,
    ) -> Page: ...

    @overload
    def lookup(
        self,
        table: str,
        values: Mapping[str, Value] | None = None,
        /,
        *,
        limit: int | None = None,
        order: str | Sequence[str] | None = None,
        after: str | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: Literal[True],
        **equals: Value,
    ) -> LookupExplanation: ...

    def lookup(
        self,
        table: str,
        values: Mapping[str, Value] | None = None,
        /,
        *,
        limit: int | None = None,
        order: str | Sequence[str] | None = None,
        after: str | None = None,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        explain: bool = False,
        **equals: Value,
    ) -> Page | LookupExplanation:
        """Rows whose columns have these values, in pages: lake.lookup("events", customer=7, kind=["a", "b"]).

        A list of values: any of them. A list column is asked what it contains. None finds nulls. `values` is the same
        as a dict, for columns whose names are taken here. Rows come in `order` ("ts", "ts desc", or a list of these),
        ties and rows without an order by the key, or in a table without one as they lie in its files. A page has
        `limit` rows (by default 100), and `page.next`, the cursor of the next page: give it as `after`. Pages of one
        lookup are of one version, and `BelowRetention` once that has expired. An index on the columns makes it quick;
        without one it scans. `explain` as for `get`.
        """
        from floodmark.index.lookup import Asked

        asked = Asked({**(values or {}), **equals}, limit, order, columns)
        page = self._reader.lookup(table, asked, after, ReadMoment(version, at, branch), self._check_complete)
        return page.explanation if explain else page

    def read(
        self,
        table: str,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        with_seq: bool = False,
    ) -> DataFrame:
        """A table as a Spark DataFrame: at the head, at a version, or as it was at a moment; else as `scan`."""
        moment = ReadMoment(version, at, branch)
        return self._reader.scan(table, moment, where=where, columns=columns, limit=limit, with_seq=with_seq).df

    def read_arrow(
        self,
        table: str,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        with_seq: bool = False,
    ) -> pa.RecordBatchReader:
        """The same as a stream of Arrow batches in this process, without Spark if Arrow can evaluate the condition."""
        moment = ReadMoment(version, at, branch)
        found = self._reader.scan(table, moment, where=where, columns=columns, limit=limit, with_seq=with_seq)
        return found.to_batches()

    def sql(
        self,
        query: str,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
        with_seq: bool = False,
    ) -> DataFrame:
        """Run a query; every table that it names is read at one and the same version."""
        return self._reader.sql(query, ReadMoment(version, at, branch), with_seq=with_seq)

    def changes(
        self,
        table: str,
        since: int | None = None,
        until: int | None = None,
        *,
        version: int | None = None,
        at: str | datetime | None = None,
        branch: str = MAIN,
    ) -> Changes:
        """What changed in a table after sequence `since` (None: ever) and up to `until` (None: the newest)."""
        return self._reader.changes(table, since, until, ReadMoment(version, at, branch))

    # ── questions of state: from the catalog and metadata alone, no JVM, nothing written (I17) ──

    def heads(self, branch: str = MAIN) -> list[Head]:
        """The newest state of every table of a branch, as the catalog has it."""
        return self.catalog.history.heads(branch)

    def tables(self, *, branch: str = MAIN, keeping: MaintainSettings | None = None) -> list[TableFacts]:
        """Every table in one line. `keeping`: from when on maintenance is due; by default as the settings say."""
        lines = lake_tables(self.catalog, keeping or self.keeping, branch)
        return Listing(TableFacts(as_json(line)) for line in lines)

    def show(self, table: str, *, branch: str = MAIN, keeping: MaintainSettings | None = None) -> TableFacts:
        """One table: its columns, layout, size and place. `keeping`: from when on maintenance is due."""
        return TableFacts(as_json(table_details(self.engine, self._head(table, branch), keeping or self.keeping)))

    def contents(self, table: str, *, branch: str = MAIN, limit: int = 50) -> dict[str, Json]:
        """What a table is made of: its partitions and its largest files, so many of each, and how many there are."""
        return as_json(self.catalog.at_head(table, lambda head: table_contents(self.catalog, head, limit), branch))

    def sample(self, table: str, *, rows: int = 20) -> list[dict[str, Value]]:
        """A few rows of a table, whichever come first; without Spark."""
        found: list[dict[str, Value]] = self.scan(table, limit=rows).to_arrow().to_pylist()
        return found

    def schema(self, table: str, *, branch: str = MAIN) -> Schema:
        """The table's Iceberg schema at the head."""
        return self._reader.schema(self._head(table, branch))

    def filled_columns(self, table: str, *, branch: str = MAIN) -> tuple[str, ...]:
        """The columns that the table fills by an expression: rows can leave them out."""
        return self._reader.filled_columns(self._head(table, branch))

    def history(
        self, *, limit: int = 20, table: str | None = None, branch: str | None = None, before: int | None = None
    ) -> list[Commit]:
        """Commits, newest first: of all branches, or in the history of one branch; only versions `before` one.

        `table`: of the table that has this name, also from before it was renamed, and of earlier ones of the name.
        """
        commits = self.catalog.history.commits(limit=limit, table=table, branch=branch, before=before)
        if table is not None and not commits and before is None:
            self._head(table, branch or MAIN)  # an unknown name is an error, not an empty history
        return Listing(commits)

    def status(self) -> dict[str, Json]:
        """The lake on one screen: version, tables, rows, sinks, jobs, and whether all is well."""
        return as_json(lake_status(self.catalog, self.keeping))

    def health(self) -> Health:
        """Whether the lake is fine, and if not, what is wrong: as in `status`, but quicker."""
        return lake_health(self.catalog)

    def audit(self, limit: int = 1000) -> list[AuditRow]:
        """Everything that recovery and repairs did, newest first."""
        return self.catalog.history.audit(limit)

    # ── indexes ──

    @cached_property
    def indexes(self) -> LakeIndexes:
        """Declare, drop and list indexes, which say in which files and rows a value is."""
        from floodmark.schema.indexes import LakeIndexes

        return LakeIndexes(self.engine)

    # ── branches ──

    @cached_property
    def branches(self) -> LakeBranches:
        """Create, list, diff, merge and delete branches of the whole lake."""
        from floodmark.branches.branches import LakeBranches

        return LakeBranches(self.engine)

    # ── table health ──

    @cached_property
    def maintain(self) -> LakeMaintenance:
        """Compaction, retention, expiry and sweep; each call returns its records, with a named outcome."""
        from floodmark.maintenance.maintenance import LakeMaintenance

        return LakeMaintenance(self.engine, self.keeping)

    @cached_property
    def sinks(self) -> LakeSinks:
        """Sinks: ship each row exactly once to other systems."""
        from floodmark.sinks.sinks import LakeSinks

        return LakeSinks(self.engine)

    @cached_property
    def backfill(self) -> LakeBackfills:
        """Load years of history and fill new columns for old rows, in small steps; and their jobs."""
        from floodmark.backfill.backfills import LakeBackfills

        return LakeBackfills(self.engine)

    # ── recovery ──

    def recover(self, *, discard: Sequence[str] = (), pass_drifted: bool = False) -> RecoveryReport:
        """Finish or undo the operations of dead processes. Opening and every write do this too.

        An operation that waits for the repair of a table is Corrupt here, unless `pass_drifted`.
        """
        self.engine.check_writable()
        return self.engine.recovery.recover(look_again=True, discard=discard, pass_drifted=pass_drifted)

    def repair(self, table: str | None = None, *, choice: str | None = None, apply: bool = False) -> list[Repair]:
        """Tables that another writer changed: what happened, and with `apply`, accept or revert it.

        `choice`: "accept" (their rows become a commit of `external`) or "revert"; by default what is clear, and of
        all tables the rest is returned as `unclear`. Needs no recovery first: open the lake with recover=False if that
        refuses.
        """
        from floodmark.repair.repair import preview, repair_all

        if not apply:
            return preview(self.engine, table, choice)
        self.engine.check_writable()
        return repair_all(self.engine, table, choice)

    def give_up_unreadable(self, *, apply: bool = False) -> GivenUp:
        """Versions whose files are missing or damaged: which they are, and with `apply`, let them expire now.

        A version that a branch, a pin or a run holds stays. No file is deleted.
        """
        from floodmark.repair.history_files import give_up

        if apply:
            self.engine.check_writable()
        return give_up(self.catalog, self.actor, apply=apply)

    def resolve(self, operation: str) -> Commit | None:
        """After CommitUnknown: the operation's commit, or None if it never happened and never will."""
        return resolve(self.catalog, None if self.read_only else self.engine.recovery, operation)

    # ── the catalog ──

    def backup(self, path: str | os.PathLike[str]) -> dict[str, Json]:
        """Write a consistent copy of the catalog to a file, while writers continue."""
        return backup_catalog(self.catalog.database, self.catalog.storage, root_location(os.fspath(path)))

    def close(self) -> None:
        """Close the catalog. A Spark session that was started stays open: other code may use it."""
        self.catalog.close()

    def __enter__(self) -> Lake:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── inside ──

    def _head(self, table: str, branch: str) -> Head:
        return self.catalog.history.head(table, branch)

    def _check_complete(self, head: Head, version: int) -> None:
        """`Incomplete` if a history still fills the table at this version: then a key that is not there may come."""
        from floodmark.backfill.chunks.missing import check_complete

        check_complete(self.catalog, head, version)

    def _intent(
        self,
        kind: str,
        actor: str | None,
        message: str,
        batch: Rider | None = None,
        branch: str = MAIN,
        if_version: int | None = None,
    ) -> Intent:
        return Intent(kind, branch, actor or self.actor, message, batch, if_version)


def _without(table: str, column: str) -> WantedTable:
    from floodmark.schema.file import ColumnChange, WantedTable

    return WantedTable(table, change=ColumnChange(drop=column))


def _read(source: Source) -> tuple[tuple[WantedTable, ...], str]:
    from floodmark.schema.file import read_wanted, tables_of, wanted_tables
    from floodmark.schema.plan import GIVEN

    if isinstance(source, Mapping):
        origin = GIVEN
        return wanted_tables(tables_of(source, origin), origin), origin
    return read_wanted(source), os.fspath(source)
