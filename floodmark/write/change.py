"""One change of the lake, from begin to publish: the steps of the protocol in a straight line.

Used by every verb and by a transaction over several tables alike. Nothing that it does is visible before its publish
(I3), all of it is visible after (I2), and an error at any step leaves nothing (undo.py).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from floodmark import clock, log
from floodmark.catalog.adopt import Adopted
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import Operation
from floodmark.catalog.metadata import new_metadata
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.catalog.seal import CREATE, Edit, Seal
from floodmark.errors import Conflict, Invalid
from floodmark.failpoints import hit
from floodmark.model import Commit, FileRecord, Head
from floodmark.rows.bundle import Bundle
from floodmark.rows.incoming import by_columns, by_lacking, check_whole, last_of
from floodmark.rows.runner import Runner
from floodmark.rows.stage import StageTarget, incoming_schema, stage_dataframe, stage_in_process
from floodmark.storage import join
from floodmark.write.intent import Intent
from floodmark.write.other_tables import tables_at_head
from floodmark.write.references import ReferenceChecks
from floodmark.write.shape import TableShape
from floodmark.write.shaped import Means, planned_metadata
from floodmark.write.step import APPEND, DELETE, DELETE_KEYS, MERGE, RETAIN, Part, Remover, Step
from floodmark.write.table import TableChange
from floodmark.write.undo import delete_files, undo
from floodmark.write.watch import watched

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLANS_MAX = 12
PLANS_BEFORE_TURN = 2
# Planning again reads files, which takes longer than building; a healer ends the turn of a dead holder sooner.
PLAN_TURN_MS = 60_000


class Change:
    def __init__(
        self, catalog: Catalog, intent: Intent, operation: Operation, get_spark: Callable[[], SparkSession]
    ) -> None:
        self._catalog = catalog
        self._intent = intent
        self.operation = operation
        self._runner = Runner(catalog.storage, get_spark, operation.id)
        others = tables_at_head(catalog, get_spark, intent.branch)
        self._means = Means(catalog.files, catalog.storage, self._runner, others)
        self._tables: dict[str, TableChange] = {}
        self._given: list[Edit] = []
        self._riders: list[Rider] = []
        self._references = ReferenceChecks(self._look_at, catalog.files, catalog.storage)
        self._staged: dict[str, list[FileRecord]] = {}
        self._leftovers = False
        # A transaction may be filled by several threads.
        self._lock = threading.RLock()
        self._log = log.get(operation.id, kind=intent.kind)

    @classmethod
    def begin(
        cls,
        catalog: Catalog,
        intent: Intent,
        get_spark: Callable[[], SparkSession],
        tables: Sequence[str] = (),
        *,
        held_version: int | None = None,
    ) -> Change:
        """Write the change down before its first byte. Raises AlreadyCommitted for a batch that is there.

        `held_version`: an older version that it will read, and that must not expire meanwhile.
        """
        locations = [
            catalog.at_head(table, lambda head: catalog.files.metadata(head.metadata_location).location, intent.branch)
            for table in tables
        ]
        operation = catalog.journal.begin(
            intent.kind,
            branch=intent.branch,
            actor=intent.actor,
            message=intent.message,
            batch=intent.batch,
            table_locations=locations,
            held_version=held_version,
        )
        # Crash here: a row in the journal, no file; healing rolls it back.
        hit(f"{intent.kind}.begun")
        return cls(catalog, intent, operation, get_spark)

    # ── stage ──

    def write(
        self,
        verb: str,
        table: str,
        data: Any = None,
        *,
        where: str | None = None,
        order: str | None = None,
        skip_unchanged: bool = True,
        newest_by: str | None = None,
        evolve: bool = False,
        partial: bool = False,
        whole_rows: bool = True,
        remover: Remover | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Stage rows for a table and what they replace; returns how many rows came. Nothing refers to the files yet.

        `order`: of rows with one key the last in this column's order counts; without it they are Invalid. `newest_by`:
        of a merge, rows that are there and no older by this column stay. `remover`: which rows retention takes out.
        `partial`: a merge updates only the columns that its rows bring. `whole_rows=False`: the sender's rows are whole
        by contract, and a column that dicts leave out is null; else a merge refuses them.
        """
        change = self.table(table)
        change.check_verb(verb)
        step = Step(
            verb,
            where=where,
            skip_unchanged=skip_unchanged,
            newest_by=newest_by,
            evolve=evolve,
            partial=partial,
            remover=remover,
            spec_id=change.spec_id,
            planned=change.own,
        )
        try:
            with watched(self._catalog.storage, change.folder, progress):
                if partial:
                    step = self._stage_parts(change, step, data, order)
                elif verb not in (DELETE, RETAIN):
                    step = self._stage(change, step, data, order, whole_rows=whole_rows)
                with self._lock:
                    change.take(step)
                    self._staged.setdefault(table, []).extend(step.incoming)
        except BaseException:
            # A caller may catch this and still publish the rest: whole files of this part may be there.
            self._leftovers = True
            raise
        self._log.info("staged", table=table, verb=verb, files=len(step.incoming), rows=step.rows)
        if verb != APPEND:
            # Crash here: what the rows replace is rewritten, in the operation's own folder; healing deletes it.
            hit(f"{self._intent.kind}.rewritten")
        return step.rows

    def staged(self, table: str) -> tuple[FileRecord, ...]:
        """The files of the rows that came in for a table, as they were staged."""
        return tuple(self._staged.get(table, ()))

    def identify(self, rider: Rider) -> None:
        """Give the change its identity anew: what is only known now that its rows are staged is sealed with it."""
        self._intent = replace(self._intent, batch=rider)

    def ride(self, rider: Rider) -> None:
        """Let this become true in the same publish, or not at all."""
        self._riders.append(rider)

    def _stage(self, change: TableChange, step: Step, data: Any, order: str | None, *, whole_rows: bool) -> Step:
        """Stage the rows that come in as files of their own: evaluated once, whatever is planned with them."""
        if order is not None:
            data = last_of(data, change.key, order, change.target())
        if step.verb == MERGE and whole_rows and not isinstance(data, Bundle):
            filled = [fill.column for fill in change.fills]
            data = check_whole(data, change.target().shape(), filled, evolve=step.evolve)
        with self._lock:
            # Keys have no shape that could be brought to the table's later: they are looked for as they are.
            schema = None if step.verb == DELETE_KEYS else change.schema
            if step.evolve:
                incoming, data = incoming_schema(data, change.target().shape())
                # For these rows alone: the table gets it when the step is taken.
                schema = change.evolved(incoming)
            target = change.keys_target() if schema is None else change.target(schema, fill_missing=step.evolve)
            fills = () if schema is None else change.fills
        records: list[FileRecord] = []
        for rows, missing in by_lacking(data, fills, target):
            staged = self._stage_rows(target.without(tuple(fill.field_id for fill in missing)), rows)
            if missing and staged and schema is not None:
                self._leftovers = True
                staged = list(change.staged_again(staged, schema, target, missing))
            records += staged
        # Crash here: files in the operation's own folder; healing deletes them (I3, I10).
        hit(f"{self._intent.kind}.staged")
        return replace(step, incoming=tuple(records), schema=schema)

    def _stage_parts(self, change: TableChange, step: Step, data: Any, order: str | None) -> Step:
        """Stage the rows of a partial merge with the columns that they bring; what they replace completes them later.

        Files of these columns alone are never published: planning writes whole rows, each time that it is done.
        """
        if order is not None:
            data = last_of(data, change.key, order, change.target(), partial=True)
        with self._lock:
            incoming, rows_by_names = by_columns(data, change.target().shape(), evolve=step.evolve)
            # For these rows alone: the table gets it when the step is taken.
            schema = change.evolved(incoming) if step.evolve else change.schema
        parts = []
        for names, rows in rows_by_names:
            target, part_schema = change.part_target(schema, names)
            staged = tuple(self._stage_rows(target, rows))
            parts += [Part(part_schema, staged)] if staged else []
        # Crash here: files in the operation's own folder; recovery deletes them (I3, I10).
        hit(f"{self._intent.kind}.staged")
        incoming_files = tuple(record for part in parts for record in part.records)
        return replace(step, incoming=incoming_files, parts=tuple(parts))

    def _stage_rows(self, target: StageTarget, data: Any) -> list[FileRecord]:
        if isinstance(data, Bundle):
            self._runner.used_spark = True
            return data.stage(target, self.operation.id)
        if hasattr(data, "mapInArrow"):  # a Spark DataFrame, classic or Connect
            self._runner.used_spark = True
            return stage_dataframe(target, data, self.operation.id)
        return stage_in_process(target, data, self._catalog.storage)

    def table(self, table: str) -> TableChange:
        """The working state of a table; planned on its head when it is first touched."""
        with self._lock:
            found = self._look_at(table)
            self._claim(found.metadata.location)
            return found

    def _look_at(self, table: str) -> TableChange:
        """The same for a table that may only be depended on: nothing is written for it."""
        with self._lock:
            if table not in self._tables:
                head = _head(self._catalog, table, self._intent)
                self._tables[table] = self._table_change(table, planned_metadata(self._catalog, head), head)
            return self._tables[table]

    def table_id(self, table: str) -> str:
        """Which table this change is planned on under this name."""
        head = self.table(table).head
        if head is None:
            raise Invalid("this transaction is about to make this table", table=table)
        return head.table_id

    def _table_change(self, name: str, metadata: Any, head: Head | None) -> TableChange:
        return TableChange(name, metadata, head, self.operation.folder(metadata.location, "data"), self._means)

    def _claim(self, table_location: str) -> None:
        if self.operation.folder(table_location, "data") not in self.operation.folders:
            self.operation = self._catalog.journal.add_table(self.operation, table_location)

    def create_table(self, shape: TableShape) -> None:
        """Plan a new table; its first metadata is part of the seal."""
        table_id = str(uuid.uuid4())
        location = join(self._catalog.location, "tables", f"{shape.name}.{table_id[:8]}")
        with self._lock:
            if shape.name in self._tables:
                raise Invalid("this transaction has a table of this name already", table=shape.name)
            self._claim(location)
            metadata = new_metadata(location, table_id, shape.schema, shape.spec, shape.sort, dict(shape.properties))
            self._tables[shape.name] = self._table_change(shape.name, metadata, None)

    def adopt(self, name: str, adopted: Adopted) -> None:
        """Plan to take a foreign table over as it is: one metadata file of ours, its own files untouched."""
        metadata = adopted.metadata
        self.give(
            Edit(
                CREATE,
                name,
                str(metadata.table_uuid),
                metadata.location,
                metadata.current_schema_id,
                metadata.default_spec_id,
                metadata=metadata.model_dump_json(exclude_none=True),
                rows_added=adopted.rows,
                adopted_files=adopted.files,
                adopted_bytes=adopted.size_bytes,
            )
        )

    def give(self, edit: Edit, *, taken: Head | None = None) -> None:
        """Let the door do this to a table, as it is: no rows are staged for it, and it is not planned again.

        `taken`: where the table is on another branch, of an edit that brings it from there.
        """
        self._claim(edit.location)
        if taken is not None:
            self._references.take(taken)
        self._given.append(edit)

    # ── seal and publish ──

    def check(self) -> None:
        """Refuse now what a publish would be refused for, as far as it depends on the rows of other tables."""
        self._references.check(self._tables)

    def publish(self, *, replan: bool = True) -> Commit:
        """Seal, then through the door; planned again if what it depends on changed meanwhile, so many times.

        Without changed rows and without an identity to record there is nothing to publish. `replan=False`: it is right
        only where it was planned; PlanAgain is raised if a table moved, and nothing has happened then.
        """
        batch: tuple[Rider, ...] = () if self._intent.batch is None else (self._intent.batch,)
        for plans in range(1, PLANS_MAX + 1):
            self._references.check(self._tables)
            planned = (change.edit() for change in self._tables.values())
            edits = (*(edit for edit in planned if edit is not None), *self._given)
            riders = (*batch, *self._riders, *(rider for change in self._tables.values() for rider in change.riders()))
            if not riders and not any(edit.changes_table for edit in edits):
                return self._nothing_to_do()
            seal = Seal(edits, riders, repeatable=self._intent.batch is not None)
            sealed_apart = self._catalog.journal.seal(self.operation, seal)
            # Crash here: a repeatable operation is finished by a healer, any other is undone.
            hit(f"{self._intent.kind}.sealed")
            # Task attempts that the driver never heard of may have left files that the seal does not name.
            leftovers = self._runner.used_spark or self._leftovers or sealed_apart or plans > 1
            leftovers = leftovers or any(change.leftovers for change in self._tables.values())
            recheck = self._recheck if replan else None
            try:
                commit = self._catalog.door.publish(
                    self.operation, seal, points=self._intent.kind, leftovers=leftovers, recheck=recheck
                )
            except PlanAgain as again:
                if not replan:
                    raise
                self._log.info("planning again", table=again.table, reason=again.reason, plans=plans)
                self._plan_again(edits, plans)
                continue
            self._catalog.journal.active.discard(self.operation.id)
            self._log.info("published", version=commit.version, rows=commit.rows_added)
            return commit
        raise Conflict(
            "the rows that this change depends on kept changing",
            plans=PLANS_MAX,
            tables=",".join(self._tables),
            advice="Run it again when there are fewer writers.",
        )

    def _recheck(self, edit: Edit, head: Head) -> None:
        self._tables[edit.table].recheck(head)
        self._references.recheck(self._tables[edit.table], head)

    def _plan_again(self, edits: Sequence[Edit], plans: int) -> None:
        """Take the steps again on the tables' new heads, from the same staged rows."""
        if plans >= PLANS_BEFORE_TURN:
            table_ids = [edit.table_id for edit in edits]
            self._catalog.door.turns.take(self.operation.id, table_ids, PLAN_TURN_MS)
        for edit in edits:
            if edit.action == CREATE:
                continue
            if edit.table not in self._tables:
                raise Conflict("the table moved meanwhile", table=edit.table, advice="Run it again.")
            head = _head(self._catalog, edit.table, self._intent)
            if head.table_id != edit.table_id:
                raise Conflict("the table was dropped or made again meanwhile", table=edit.table)
            self._tables[edit.table].plan_again(head, planned_metadata(self._catalog, head))
        # Crash here: files of both plans, and the old plan's seal; no healer publishes that on the new heads.
        hit(f"{self._intent.kind}.planned_again")

    def _nothing_to_do(self) -> Commit:
        operation, _ = self._catalog.journal.abandon(self.operation.id)
        if operation is not None:
            delete_files(self._catalog, operation, certain=not self._runner.used_spark)
        self._catalog.journal.active.discard(self.operation.id)
        version = self._catalog.history.resolve(branch=self._intent.branch)
        return Commit(
            version=version,
            outcome="nothing_to_do",
            operation=None,
            kind=self._intent.kind,
            branch=self._intent.branch,
            actor=self._intent.actor,
            message=self._intent.message,
            committed_ms=clock.now_ms(),
        )

    def undo(self, error: BaseException) -> Commit:
        """Abandon the change and raise `error`; return the commit if it turns out to be true already."""
        try:
            return undo(self._catalog, self.operation, error, certain=not self._runner.used_spark)
        finally:
            self._catalog.journal.active.discard(self.operation.id)


def _head(catalog: Catalog, table: str, intent: Intent) -> Head:
    return catalog.history.head(table, intent.branch)
