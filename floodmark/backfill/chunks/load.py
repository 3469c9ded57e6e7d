"""One chunk into its tables: read, staged, checked, and published with its `done`, all at once (I2).

The chunk's identity (job, number, tables) is sealed with its rows, so a crash anywhere is finished by recovery or
leaves nothing, and a chunk whose reply was lost is found to be done. Rows that are too few, too many or outside of the
chunk are Invalid: nothing is marked, nothing is published. Other writers of the same tables are not stopped.

What is computed from a chunk's rows comes once for each output table, without reading the source twice: if a table
stores the rows unchanged, they are staged for it first, and everything else is computed from those files. So all tables
of a chunk come from one reading of the source, and look the same when a table is added later. Views are named for one
chunk of one try, and dropped with it; threads that share a session do not conflict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import pyarrow as pa
import pyarrow.compute as pc

from floodmark import clock, log
from floodmark.backfill.chunks.chunk_checks import ChunkChecks
from floodmark.backfill.chunks.done_chunks import DoneChunks
from floodmark.backfill.chunks.geometry import Chunk, PlannedChunk
from floodmark.backfill.chunks.ranges import TableRange
from floodmark.backfill.chunks.retries import WorkerStop, call_source
from floodmark.backfill.chunks.sources import ChunkRows, HistorySource, explain
from floodmark.backfill.chunks.spec import CHUNK, Definition, HistorySpec, has_column, references, table_range
from floodmark.catalog.chunks import DONE, ChunkRider, LoadedChunk, LoadedTable
from floodmark.commit.intent import Intent
from floodmark.commit.publication import publish
from floodmark.errors import Invalid
from floodmark.jobs.run import JobContext
from floodmark.model import MAIN, FileRecord, Head
from floodmark.rows.failures import spark_job
from floodmark.rows.reading.scan import scan
from floodmark.rows.schema import user_fields
from floodmark.rows.session import Sessions
from floodmark.rows.sql.query import Source, named_tables, run_query
from floodmark.rows.staging.bundle import Bundle
from floodmark.write.change import Change
from floodmark.write.options import WriteOptions
from floodmark.write.step import APPEND, MERGE

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame, SparkSession


def is_frame(data: ChunkRows) -> TypeGuard[DataFrame]:
    return hasattr(data, "mapInArrow")  # a Spark DataFrame, classic or Connect


class Outputs:
    """The rows of each table, by its definition, for one chunk. Used in a `with` block."""

    def __init__(self, definitions: Mapping[str, Definition], data: ChunkRows, sessions: Sessions, uses: int) -> None:
        """`uses`: the maximum number of reads of the rows; if more than one, they are computed once."""
        self._definitions = definitions
        self._sessions = sessions
        self._data = _reusable(data) if uses > 1 else data
        self._kept: DataFrame | None = None
        self._frames: dict[str, DataFrame] = {}
        self._views: list[str] = []
        self._token = clock.new_id().lower()
        if uses > 1 and is_frame(data):
            self._data = self._kept = data.persist()

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        for view in self._views:
            self._sessions.get().catalog.dropTempView(view)
        if self._kept is not None:
            self._kept.unpersist()

    def of(self, table: str) -> ChunkRows:
        """The rows for a table: the chunk's own in the form in which they came, else a DataFrame."""
        if self._definitions[table] is None:
            return self._data
        return self._frame(table)

    def staged(self, rows: DataFrame) -> None:
        """The chunk's rows are staged: from now on, read them from these files."""
        self._frames[CHUNK] = rows
        if is_frame(self._data):
            self._data = rows

    def count(self, column: str | None = None) -> int:
        """How many rows the chunk has; with `column`, how many different values it has."""
        if not is_frame(self._data):
            rows = to_table(self._data)
            return int(rows.num_rows if column is None else pc.count_distinct(rows[column]).as_py())
        with spark_job(self._data.sparkSession, "Spark could not count the rows of a chunk"):
            return int((self._data if column is None else self._data.select(column).dropna().distinct()).count())

    def _frame(self, table: str) -> DataFrame:
        if table not in self._frames:
            self._frames[table] = self._computed(table)
        return self._frames[table]

    def _computed(self, table: str) -> DataFrame:
        definition = CHUNK if table == CHUNK else self._definitions[table]
        if table == CHUNK:
            return self._data if is_frame(self._data) else to_frame(self._sessions.get(), self._data)
        if definition is None:
            return self._frame(CHUNK)
        if callable(definition):
            return definition(self._frame(CHUNK))
        named = references(table, definition, self._definitions, self._sessions)
        named += named_tables(definition, {CHUNK: None})
        # By position, since not every table name can be part of a view's name.
        tables = {name: Source(f"{self._token}{len(self._views) + place}", None) for place, name in enumerate(named)}
        self._views += [source.view(with_seq=False) for source in tables.values()]
        return run_query(self._sessions.get(), definition, tables, self._frame)


def _reusable(data: ChunkRows) -> ChunkRows:
    """Rows that can be read more than once; other Arrow sources may allow only one read."""
    known = is_frame(data) or isinstance(data, list | tuple | pa.Table | pa.RecordBatch) or hasattr(data, "iloc")
    return data if known else to_table(data)


def to_table(data: ChunkRows) -> pa.Table:
    """Rows in memory as an Arrow table; the values determine the types."""
    if isinstance(data, list | tuple):
        return pa.Table.from_pylist(list(data))
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data).read_all()
    raise Invalid(
        "unsupported data type",
        given=type(data).__name__,
        advice="Return a Spark DataFrame, an Arrow table or reader, a pandas DataFrame or a list of dicts.",
    )


def to_frame(spark: SparkSession, data: ChunkRows) -> DataFrame:
    table = to_table(data)
    if not table.num_columns:
        raise Invalid(
            "an empty list of rows has no columns to compute from",
            advice="Return an Arrow table or a DataFrame, or let a table take the rows as they are.",
        )
    return spark.createDataFrame(table)


def order_of(tables: Sequence[str], definitions: Mapping[str, Definition]) -> list[str]:
    """The tables that store the rows unchanged come first: the others are computed from the files staged for them."""
    return sorted(tables, key=lambda table: definitions[table] is not None)


KIND = "chunk"


class Loader:
    """Loads chunks of one job; its threads share it."""

    def __init__(
        self,
        context: JobContext,
        spec: HistorySpec,
        source: HistorySource,
        job: str,
        actor: str,
        worker_stop: WorkerStop,
    ) -> None:
        self._context = context
        self._spec = spec
        self._source = source
        self._job = job
        self._actor = actor
        self._worker_stop = worker_stop
        self._checks = ChunkChecks(context, spec)
        # Whether the last chunk could have been loaded together with others.
        self.bundles = False

    def load(self, planned: PlannedChunk, tries: int, done_chunks: DoneChunks) -> None:
        """Load a chunk into the tables that lack it. Later tries first ask the catalog for earlier outcomes."""
        number, tables, now = planned.chunk.number, planned.tables, done_chunks
        if tries > 1:
            self._context.engine.get_ready()
            now = DoneChunks.read(self._context.catalog, self._job, list(self._spec.tables), number)
            tables = now.missing(number)
        if tables:
            self._load(planned.chunk, order_of(tables, self._spec.tables), now)
        done_chunks.add(number, planned.tables)

    def _load(self, chunk: Chunk, tables: Sequence[str], done_chunks: DoneChunks) -> None:
        data = self._from_lake(chunk, tables, done_chunks)
        if data is not None:
            try:
                self._publish_one(chunk, tables, data, done_chunks, from_source=False)
            except Invalid as error:
                # For example, the table has columns that the source never had.
                log.get().warning("the chunk is read from the source instead", chunk=chunk.name, cause=str(error))
            else:
                return
        self._load_from_source(chunk, tables, done_chunks)

    def _load_from_source(self, chunk: Chunk, tables: Sequence[str], done_chunks: DoneChunks) -> None:
        data = self._read(chunk)
        try:
            self._publish_one(chunk, tables, data, done_chunks, from_source=True)
            self.bundles = is_frame(data) and self._can_bundle()
        except Invalid as error:
            # Spark reports that a record does not fit, not which one: the source may know. The try has left nothing
            # behind.
            known = explain(self._source, chunk) if "chunk" not in error.facts else None
            raise (known or error) from error

    def _read(self, chunk: Chunk) -> ChunkRows:
        self._checks.digest(chunk, self._source)
        what = f"read({chunk.name})"
        return call_source(what, self._spec.call_deadline_s, self._worker_stop, lambda: self._source.read(chunk))

    def _publish_one(
        self, chunk: Chunk, tables: Sequence[str], data: ChunkRows, done_chunks: DoneChunks, *, from_source: bool
    ) -> None:
        def stage(change: Change) -> list[dict[str, int]]:
            return [self._stage(change, chunk, tables, data, from_source=from_source)]

        self._publish([chunk], tables, done_chunks, stage)

    def _publish(
        self,
        chunks: Sequence[Chunk],
        tables: Sequence[str],
        done_chunks: DoneChunks,
        stage: Callable[[Change], Sequence[Mapping[str, int]]],
    ) -> None:
        """Publish chunks with their `done`. `stage` stages and checks their rows; it returns how many, by table."""

        def rider(ids: Mapping[str, str], rows: Sequence[Mapping[str, int]]) -> ChunkRider:
            into = [tuple(LoadedTable(table, ids[table], each[table]) for table in tables) for each in rows]
            numbers = [chunk.number for chunk in chunks]
            return ChunkRider(self._job, tuple(LoadedChunk(*one) for one in zip(numbers, into, strict=True)))

        names = chunks[0].name if len(chunks) == 1 else f"{len(chunks)} chunks, {chunks[0].name} to {chunks[-1].name}"
        message = f"{self._spec.name}: {'chunk ' if len(chunks) == 1 else ''}{names}"
        known = rider(done_chunks.table_ids, [dict.fromkeys(tables, 0)] * len(chunks))
        intent = Intent(KIND, MAIN, self._actor, message, known)

        def fill(change: Change) -> None:
            rows = stage(change)
            change.identify(rider({table: change.table_id(table) for table in tables}, rows))

        publish(self._context.catalog, intent, Change(self._context.engine, intent, fill, tables))

    # ── several at once ──

    def load_bundle(self, planned: Sequence[PlannedChunk], done_chunks: DoneChunks) -> bool:
        """Load chunks in one publish; False if they must be loaded one by one. An error leaves nothing behind.

        A Spark job costs as much as some ten thousand rows, so small chunks share one. Each has files of its own.
        """
        tables = {table for one in planned for table in one.tables}
        frames = [self._read(one.chunk) for one in planned] if len(tables) == 1 and self._can_bundle() else []
        if not frames or not Bundle.is_possible(frames):
            return False
        (table,) = tables
        chunks, bundle = [one.chunk for one in planned], Bundle(frames)
        self._publish(chunks, [table], done_chunks, lambda change: self._stage_bundle(change, chunks, table, bundle))
        for one in planned:
            done_chunks.add(one.chunk.number, one.tables)
        return True

    def _can_bundle(self) -> bool:
        """Whether a chunk only adds its rows, unchanged, to one table."""
        tables = list(self._spec.tables)
        if len(tables) != 1 or self._spec.tables[tables[0]] is not None:
            return False
        head = self._context.catalog.history.head(tables[0])
        return not self._is_keyed(tables[0]) and not self._context.engine.reader.filled_columns(head)

    def _stage_bundle(
        self, change: Change, chunks: Sequence[Chunk], table: str, bundle: Bundle
    ) -> list[dict[str, int]]:
        """Stage the rows of all chunks; returns how many each has. Each is checked separately."""
        change.write(APPEND, table, bundle)
        for chunk, records in zip(chunks, bundle.records, strict=True):
            self._checks.within(chunk, table, records)
            self._checks.rows(chunk, sum(record.rows for record in records))
            self._checks.distinct(chunk, table, records)
        return [{table: sum(record.rows for record in records)} for records in bundle.records]

    # ── where the rows come from ──

    def _from_lake(self, chunk: Chunk, tables: Sequence[str], done_chunks: DoneChunks) -> DataFrame | None:
        """The chunk's rows from a table that stores them unchanged, if all of them still exist; else None.

        Otherwise, rows that others added to the chunk's range, or removed from it, would count as the source's. A table
        with a key has only the newest row of each key.
        """
        spec = self._spec
        start, end = spec.geometry.ends(chunk.number)
        for table in spec.plain_tables:
            if table in tables or chunk.number not in done_chunks.done[table] or spec.column is None:
                continue
            if self._is_keyed(table) or not has_column(self._context, table, spec):
                continue
            now = table_range(self._context, spec.geometry, table, spec.column)
            if self._is_as_loaded(now, chunk.number):
                rows = now.rows(start, end)
                return rows.drop(*self._not_brought(now.head, tables))
        return None

    def _not_brought(self, head: Head, tables: Sequence[str]) -> list[str]:
        """Columns that a table fills by itself and that others, which store the rows unchanged, do not have."""
        schema = self._context.engine.reader.schema
        known = [
            schema(self._context.catalog.history.head(table)) for table in tables if table in self._spec.plain_tables
        ]
        others = [{column.name for column in user_fields(one)} for one in known]
        filled = self._context.engine.reader.filled_columns(head)
        return [name for name in filled if any(name not in columns for columns in others)]

    def _is_as_loaded(self, now: TableRange, number: int) -> bool:
        """Whether a table has the rows of a chunk as they were loaded: the same number, and no others."""
        states = self._context.catalog.chunks.of(self._job, range(number, number + 1))
        mine = (now.head.table, now.head.table_id)
        loaded = next((one for one in states if one.state == DONE and (one.table, one.table_id) == mine), None)
        start, end = self._spec.geometry.ends(number)
        if loaded is None or now.count(start, end) != loaded.rows:
            return False
        touched = {part.table_id: part for part in self._context.catalog.history.commit(loaded.version).tables}
        part = touched.get(loaded.table_id)
        # A chunk without rows changes no table.
        return not loaded.rows or (part is not None and not now.has_others(start, end, part.sequence))

    # ── stage and check ──

    def _stage(
        self, change: Change, chunk: Chunk, tables: Sequence[str], data: ChunkRows, *, from_source: bool
    ) -> dict[str, int]:
        """Stage the rows of each table; returns how many rows each has."""
        spec = self._spec
        plain = [table for table in tables if spec.tables[table] is None]
        # These get all rows; a table with a key may get fewer, so it is not used to count or compute.
        whole = [table for table in plain if not self._is_keyed(table)]
        counted = from_source and not whole and self._checks.are_counted
        # Once staged for a table unchanged, the rows are computed only once anyway.
        uses = 1 if whole and is_frame(data) else len(tables) + counted
        rows: dict[str, int] = {}
        with Outputs(spec.tables, data, self._context.engine.sessions, uses) as outputs:
            if counted:
                self._checks.rows(chunk, outputs.count())
                if spec.rows_exact and spec.column is not None:
                    # A table with a key may keep fewer rows: the numbers are counted before.
                    self._checks.every(chunk, outputs.count(spec.column))
            for table in [*whole, *(table for table in tables if table not in whole)]:
                verb, options = self._verb(table)
                rows[table] = change.write(verb, table, outputs.of(table), options)
                records = change.staged(table)
                # Computed rows too, if they have the range column: the floor removes them and range reads find them by
                # it.
                if table in plain or has_column(self._context, table, spec):
                    self._checks.within(chunk, table, records)
                if table not in whole:
                    continue
                if rows[table] != rows[whole[0]]:
                    raise Invalid(
                        "tables received different numbers of rows of a chunk", chunk=chunk.name, table=table,
                        rows=rows[table], others=rows[whole[0]],
                    )  # fmt: skip
                if table == whole[0] and from_source:
                    self._checks.rows(chunk, rows[table])
                    self._checks.distinct(chunk, table, records)
                if table == whole[0] and self._is_read_again(tables, data):
                    outputs.staged(self._staged_rows(table, records))
        return rows

    def _is_keyed(self, table: str) -> bool:
        return bool(self._context.engine.reader.schema(self._context.catalog.history.head(table)).identifier_field_ids)

    def _is_read_again(self, tables: Sequence[str], data: ChunkRows) -> bool:
        """Whether others of these tables are computed from the files staged for the first."""
        computed = any(self._spec.tables[table] is not None for table in tables)
        return computed or (len(tables) > 1 and is_frame(data))

    def _staged_rows(self, table: str, records: Iterable[FileRecord]) -> DataFrame:
        catalog = self._context.catalog
        schema = self._context.engine.reader.schema(catalog.history.head(table))
        paths = [record.path for record in records]
        return scan(self._context.engine.sessions.get(), paths, schema, storage_options=catalog.storage.options)

    def _verb(self, table: str) -> tuple[str, WriteOptions]:
        """How rows are written to a table. With a key, history never replaces newer rows.

        With the range column the newest row of a key wins, in any order of loading. Without it, chunks that are loaded
        newest first keep existing rows; oldest first, they replace them. A source's rows are complete: what dicts omit
        is null.
        """
        spec = self._spec
        if not self._is_keyed(table):
            return APPEND, WriteOptions()
        if has_column(self._context, table, spec):
            return MERGE, WriteOptions(order=spec.column, newest_by=spec.column, whole_rows=False)
        return MERGE, WriteOptions(newest_by="" if spec.newest_first else None, whole_rows=False)
