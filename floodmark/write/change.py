"""A plan of steps on tables: rows staged as files, and what they replace planned on the tables' heads.

Every verb on rows, and a transaction over several tables, is such a plan; publication.py runs it. Planning again
applies the same steps, with the same staged rows, to the tables' new heads.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField

from floodmark import log
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.commit.adopt import Adopted
from floodmark.commit.intent import Intent
from floodmark.commit.journal import Operation, all_files
from floodmark.commit.live_files import LiveFile
from floodmark.commit.metadata import new_metadata
from floodmark.commit.publication import Planned, Publication, PublishPlan, Start, check_expected
from floodmark.commit.seal import CREATE, Edit
from floodmark.engine import Engine
from floodmark.errors import Conflict, Invalid, NotFound, Unavailable
from floodmark.failpoints import hit
from floodmark.index.keys import column_index, files_holding, files_holding_keys, key_index
from floodmark.model import Commit, FileRecord, Head
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.staging.bundle import Bundle
from floodmark.rows.staging.incoming import by_columns, by_lacking, check_whole, last_of
from floodmark.rows.staging.stage import StageTarget, incoming_schema, stage_dataframe, stage_in_process
from floodmark.runs import WriteCallback
from floodmark.storage import Held, Storage, join
from floodmark.write.options import DEFAULT, WriteOptions
from floodmark.write.references import ReferenceChecks
from floodmark.write.shape import TableShape
from floodmark.write.step import (
    APPEND,
    DELETE,
    DELETE_KEYS,
    MERGE,
    RETAIN,
    UPDATE,
    IncomingRows,
    PartialRows,
    WriteStep,
)
from floodmark.write.table import Means, TableChange, planned_on, tables_at_head

# How often the progress of staging is reported.
INTERVAL_S = 0.5


class Change(PublishPlan):
    """A plan of steps on tables: rows staged, and what they replace planned on the tables' heads.

    `fill` applies the steps. Without it the caller applies them between `begin` and `publish`, as a transaction does.
    """

    def __init__(
        self, engine: Engine, intent: Intent, fill: Callable[[Change], None] | None = None, tables: Sequence[str] = ()
    ) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._intent = intent
        self._fill = fill
        self._names = tables
        self._tables: dict[str, TableChange] = {}
        # Those that a step is taken on; others are only depended on.
        self._touched: dict[str, TableChange] = {}
        self._given: list[Edit] = []
        # Of the newest plan.
        self._edits: tuple[Edit, ...] = ()
        self._riders: list[Rider] = []
        self._references = ReferenceChecks(
            self._look_at, self._catalog.files, self._catalog.storage, self._holding_values
        )
        self._staged: dict[str, list[FileRecord]] = {}
        self._leftovers = False
        # Staged files that nothing reads before the plan: one barrier for those of all tables.
        self._held = Held()
        # A transaction may be filled by several threads.
        self._lock = threading.RLock()
        self._work: Publication
        self._runner: Runner
        self._means: Means

    @classmethod
    def begin(cls, engine: Engine, intent: Intent, expected: Sequence[str] = ()) -> Change:
        """Begin a change that its caller fills, then publishes or undoes. Raises AlreadyCommitted.

        `expected`: where tables are that it will probably write to. Others are recorded when it does.
        """
        change = cls(engine, intent)
        change.stage(Publication.begin(engine.catalog, intent, Start(tuple(expected))))
        return change

    @property
    def locations(self) -> list[str]:
        """Where the tables are that it changed, once it is published."""
        return [edit.location for edit in self._edits]

    def publish(self) -> Commit:
        """Publish what was staged since `begin`; an error is undone, then raised."""
        return self._work.publish(self)

    def undo(self, error: BaseException) -> Commit:
        """Abandon the change and raise `error`; return the commit if it turns out to be true already."""
        self._held.drop()
        return self._work.undo(self, error)

    @property
    def operation(self) -> Operation:
        return self._work.operation

    def start(self) -> Start:
        catalog, branch = self._catalog, self._intent.branch
        return Start(
            [
                catalog.at_head(table, lambda head: catalog.files.metadata(head.metadata_location).location, branch)
                for table in self._names
            ]
        )

    # ── stage ──

    def stage(self, work: Publication) -> None:
        self._work = work
        self._runner = Runner(self._catalog.storage, self._engine.sessions, work.operation.id)
        others = tables_at_head(self._catalog, self._engine.sessions, self._intent.branch)
        self._means = Means(self._catalog.files, self._catalog.storage, self._runner, others, self._holding_keys)
        if self._fill is None:
            return
        try:
            self._fill(self)
        except BaseException:
            self._held.drop()
            raise

    def write(self, verb: str, table: str, data: IncomingRows | None = None, options: WriteOptions = DEFAULT) -> int:
        """Stage rows for a table and what they replace; returns how many rows came. Nothing refers to the files yet."""
        change = self.table(table)
        change.check_verb(verb)
        step = WriteStep(verb, options, spec_id=change.spec_id, planned=change.own)
        try:
            with watched(self._catalog.storage, change.folder, options.progress):
                if options.partial:
                    step = self._stage_parts(change, step, data)
                elif verb not in (DELETE, RETAIN, UPDATE):
                    step = self._stage(change, step, data)
                with self._lock:
                    if not _waits(change, step):
                        self._end_held()
                    change.take(step)
                    self._staged.setdefault(table, []).extend(step.incoming)
        except BaseException:
            # A caller may catch this and still publish the rest: whole files of this part may exist.
            self._leftovers = True
            raise
        log.get(self.operation.id, kind=self._intent.kind).info(
            "staged", table=table, verb=verb, files=len(step.incoming), rows=step.rows
        )
        if verb != APPEND:
            # Crash here: what the rows replace is rewritten, in the operation's own folder; recovery deletes it.
            hit(f"{self._intent.kind}.rewritten")
        return step.rows

    def staged(self, table: str) -> tuple[FileRecord, ...]:
        """The files of the incoming rows of a table, as they were staged."""
        self._end_held()
        return tuple(self._staged.get(table, ()))

    def identify(self, rider: Rider) -> None:
        """Replace the change's identity: facts that are known only after its rows are staged are sealed with it."""
        self._work.identify(rider)

    def ride(self, rider: Rider) -> None:
        """Add a rider: it becomes true in the same publish, or not at all."""
        self._riders.append(rider)

    def _stage(self, change: TableChange, step: WriteStep, data: IncomingRows) -> WriteStep:
        """Stage the incoming rows as separate files: evaluated once, whatever is planned with them."""
        options = step.options
        if options.order is not None:
            data = last_of(data, change.key, options.order, change.target())
        if step.verb == MERGE and options.whole_rows and not isinstance(data, Bundle):
            filled = [fill.column for fill in change.fills]
            data = check_whole(data, change.target().shape(), filled, evolve=options.evolve)
        with self._lock:
            # Keys have no shape to convert to the table's later: they are matched as they are.
            schema = None if step.verb == DELETE_KEYS else change.schema
            if options.evolve:
                incoming, data = incoming_schema(data, change.target().shape())
                # For these rows only: the table gets it when the step is applied.
                schema = change.evolved(incoming)
            target = change.keys_target() if schema is None else change.target(schema, fill_missing=options.evolve)
            fills = () if schema is None else change.fills
        records: list[FileRecord] = []
        for rows, missing in by_lacking(data, fills, target):
            part = target.without(tuple(fill.field_id for fill in missing))
            staged = self._stage_rows(part, rows, waits=not missing and _waits(change, step))
            if missing and staged and schema is not None:
                self._leftovers = True
                staged = list(change.staged_again(staged, schema, target, missing))
            records += staged
        # Crash here: files in the operation's own folder; recovery deletes them (I3, I10).
        hit(f"{self._intent.kind}.staged")
        return replace(step, incoming=tuple(records), schema=schema)

    def _stage_parts(self, change: TableChange, step: WriteStep, data: IncomingRows) -> WriteStep:
        """Stage the rows of a partial merge with the columns that they have; the rows they replace complete them later.

        Files of these columns alone are never published: planning writes whole rows, each time it runs.
        """
        options = step.options
        if options.order is not None:
            data = last_of(data, change.key, options.order, change.target(), partial=True)
        with self._lock:
            incoming, rows_by_names = by_columns(data, change.target().shape(), evolve=options.evolve)
            # For these rows only: the table gets it when the step is applied.
            schema = change.evolved(incoming) if options.evolve else change.schema
        parts = []
        for names, rows in rows_by_names:
            target, part_schema = change.part_target(schema, names)
            staged = tuple(self._stage_rows(target, rows))
            parts += [PartialRows(part_schema, staged)] if staged else []
        # Crash here: files in the operation's own folder; recovery deletes them (I3, I10).
        hit(f"{self._intent.kind}.staged")
        incoming_files = tuple(record for part in parts for record in part.records)
        return replace(step, incoming=incoming_files, parts=tuple(parts))

    def _stage_rows(self, target: StageTarget, data: IncomingRows, *, waits: bool = False) -> list[FileRecord]:
        """`waits`: files of rows in memory are held, and durable when the change is planned."""
        if isinstance(data, Bundle):
            self._runner.used_spark = True
            return data.stage(target, self.operation.id)
        if hasattr(data, "mapInArrow"):  # a Spark DataFrame, classic or Connect
            self._runner.used_spark = True
            return stage_dataframe(target, data, self.operation.id)
        return stage_in_process(target, data, self._catalog.storage, self._held if waits else None)

    def _holding_keys(
        self, table_id: str, files: Sequence[LiveFile], staged: Sequence[str], fields: Sequence[NestedField]
    ) -> list[LiveFile]:
        """Those of a table's files that may hold one of the keys in staged files, by the key's index if it has one."""
        index = key_index(self._catalog.indexes, table_id, fields)
        return files_holding_keys(self._engine.coverings, index, self._catalog.storage, files, staged, fields)

    def _holding_values(
        self, table_id: str, field: NestedField, files: Sequence[LiveFile], values: pa.Array
    ) -> list[LiveFile]:
        """Those of a table's files that may hold one of these values in a column, by its index if it has one."""
        index = column_index(self._catalog.indexes, table_id, field)
        return files_holding(self._engine.coverings, index, files, [[values]])

    def _end_held(self) -> None:
        """Make all staged files durable: what follows may read them, or seals them."""
        self._catalog.storage.end(self._held)

    def table(self, table: str) -> TableChange:
        """The working state of a table; planned on its head when it is first touched."""
        with self._lock:
            found = self._look_at(table)
            if table not in self._touched:
                check_expected(self._catalog, self._intent, _named([found]))
                self._touched[table] = found
            self._work.claim(found.metadata.location)
            return found

    def _look_at(self, table: str) -> TableChange:
        """The same for a table that may only be depended on: nothing is written for it."""
        with self._lock:
            if table not in self._tables:
                head, metadata = planned_on(self._catalog, table, self._intent.branch)
                self._tables[table] = self._table_change(table, metadata, head)
            return self._tables[table]

    def table_id(self, table: str) -> str:
        """The id of the table that this change is planned on under this name."""
        head = self.table(table).head
        if head is None:
            raise Invalid("this transaction creates this table", table=table)
        return head.table_id

    def _table_change(self, name: str, metadata: TableMetadata, head: Head | None) -> TableChange:
        return TableChange(name, metadata, head, self.operation.folder(metadata.location, "data"), self._means)

    def create_table(self, shape: TableShape) -> None:
        """Plan a new table; its first metadata is part of the seal."""
        table_id = str(uuid.uuid4())
        location = join(self._catalog.location, "tables", f"{shape.name}.{table_id[:8]}")
        with self._lock:
            if shape.name in self._tables:
                raise Invalid("this transaction has a table of this name already", table=shape.name)
            self._work.claim(location)
            metadata = new_metadata(location, table_id, shape.schema, shape.spec, shape.sort, dict(shape.properties))
            self._tables[shape.name] = self._table_change(shape.name, metadata, None)

    def adopt(self, name: str, adopted: Adopted) -> None:
        """Plan to adopt a foreign table as it is: one metadata file of ours, its own files untouched."""
        self.give(
            replace(
                Edit.create(name, adopted.metadata),
                rows_added=adopted.rows,
                adopted_files=adopted.files,
                adopted_bytes=adopted.size_bytes,
            )
        )

    def give(self, edit: Edit, *, taken: Head | None = None) -> None:
        """Pass this edit to the publisher as it is: no rows are staged for it, and it is not planned again.

        `taken`: the table's head on the other branch, of an edit that takes it from there.
        """
        self._work.claim(edit.location)
        if taken is not None:
            self._references.take(taken)
        self._given.append(edit)

    # ── plan ──

    def check(self) -> None:
        """Refuse now what a publish would be refused for, as far as it depends on the rows of other tables."""
        self._end_held()
        self._references.check(self._tables)

    def plan(self) -> Planned:
        self.check()
        planned = (change.edit() for change in self._tables.values())
        edits = (*(edit for edit in planned if edit is not None), *self._given)
        riders = (*self._riders, *(rider for change in self._tables.values() for rider in change.riders()))
        self._edits = edits
        return Planned(edits, riders)

    def touched(self, planned: Planned) -> list[tuple[str, str]]:
        return _named(self._touched.values())

    def recheck(self, edit: Edit, head: Head) -> None:
        self._tables[edit.table].recheck(head)
        self._references.recheck(self._tables[edit.table], head)

    def plan_again(self, lost: PlanAgain) -> None:
        """Apply the steps again on the tables' new heads, from the same staged rows."""
        for edit in self._edits:
            if edit.action == CREATE:
                continue
            if edit.table not in self._tables:
                raise Conflict("the table moved meanwhile", table=edit.table, advice="Run it again.")
            if edit.table not in self._touched:
                # Only depended on: the checks look at it again, under the name that it has then.
                del self._tables[edit.table]
                continue
            try:
                head, metadata = planned_on(self._catalog, edit.table, self._intent.branch)
            except NotFound as error:
                advice = "Nothing was changed. `floodmark history` shows what happened to it."
                raise Conflict("the table was dropped or renamed meanwhile", table=edit.table, advice=advice) from error
            if head.table_id != edit.table_id:
                raise Conflict("the table was dropped or created again meanwhile", table=edit.table)
            check_expected(self._catalog, self._intent, [(head.table_id, head.table)])
            self._tables[edit.table].plan_again(head, metadata)

    def kept_changing(self) -> Conflict:
        found = super().kept_changing()
        return Conflict(found.message, **found.facts, tables=",".join(self._tables), advice=found.advice)

    @property
    def used_spark(self) -> bool:
        return self._runner.used_spark

    @property
    def leftovers(self) -> bool:
        return self._leftovers or any(change.leftovers for change in self._tables.values())


def _waits(change: TableChange, step: WriteStep) -> bool:
    """Whether nothing reads the step's rows before the change is planned. Progress is read from the storage."""
    options = step.options
    return step.verb == APPEND and not change.key and not options.evolve and options.progress is None


def _named(tables: Iterable[TableChange]) -> list[tuple[str, str]]:
    """The id and name of each table that existed before the change."""
    return [(table.head.table_id, table.name) for table in tables if table.head is not None]


@contextmanager
def watched(storage: Storage, folder: str, progress: WriteCallback | None) -> Iterator[None]:
    """Call progress(files, bytes) about twice a second while the block runs, and once at its end.

    Reads the storage, not Spark, so it works the same in every mode of Spark, and an error in it never harms the work.
    """
    if progress is None:
        yield
        return
    stop = threading.Event()

    def look() -> None:
        try:
            entries = list(all_files(storage, folder))
        except Unavailable:
            return
        progress(len(entries), sum(entry.size_bytes for entry in entries))

    def watch() -> None:
        while not stop.wait(INTERVAL_S):
            look()

    thread = threading.Thread(target=watch, name="floodmark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    look()
