"""One change of the lake, from begin to publish: the steps of the protocol in a straight line.

Used by append, by create_table and by a transaction over several tables alike. Nothing that it does is visible before
its publish (I3), all of it is visible after (I2), and an error at any step leaves nothing (undo.py).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from floodmark import clock, log
from floodmark.catalog.catalog import Catalog
from floodmark.catalog.journal import Operation
from floodmark.catalog.metadata import new_metadata, new_snapshot_id, parse_metadata
from floodmark.catalog.riders import Rider
from floodmark.catalog.seal import APPEND, CREATE, Edit, Seal
from floodmark.errors import Corrupt, Invalid
from floodmark.failpoints import hit
from floodmark.model import Commit, FileRecord, Head
from floodmark.storage import join
from floodmark.write.intent import Intent
from floodmark.write.shape import TableShape
from floodmark.write.undo import delete_files, undo
from floodmark.write.watch import watched


class Change:
    def __init__(self, catalog: Catalog, intent: Intent, operation: Operation) -> None:
        self._catalog = catalog
        self._intent = intent
        self.operation = operation
        self._edits: dict[str, Edit] = {}
        self._used_spark = False
        self._leftovers = False
        # A transaction may be filled by several threads.
        self._lock = threading.Lock()
        self._log = log.get(operation.id, kind=intent.kind)

    @classmethod
    def begin(cls, catalog: Catalog, intent: Intent, tables: Sequence[str] = ()) -> Change:
        """Write the change down before its first byte. Raises AlreadyCommitted for a batch that is there."""
        locations = [
            catalog.files.metadata(_head(catalog, table, intent).metadata_location).location for table in tables
        ]
        operation = catalog.journal.begin(
            intent.kind,
            branch=intent.branch,
            actor=intent.actor,
            message=intent.message,
            batch=intent.batch,
            table_locations=locations,
        )
        # Crash here: a row in the journal, no file; healing rolls it back.
        hit(f"{intent.kind}.begun")
        return cls(catalog, intent, operation)

    # ── stage ──

    def append(self, table: str, data: Any, progress: Callable[[int, int], None] | None = None) -> int:
        """Stage rows for a table; returns how many. Nothing refers to the files yet."""
        edit, metadata = self._plan(table)
        schema = metadata.schema_by_id(edit.schema_id)
        if schema is None:
            raise Corrupt("the table's schema is not in its metadata", table=table, schema_id=edit.schema_id)
        if schema.identifier_field_ids:
            raise Invalid(
                "rows cannot be appended to a table with a key yet", table=table, advice="Make the table without a key."
            )
        with self._lock:
            self._claim(metadata.location)
        folder = self.operation.folder(metadata.location, "data")
        try:
            with watched(self._catalog.storage, folder, progress):
                records = self._stage(edit, metadata, folder, data)
        except BaseException:
            # A caller may catch this and still publish the rest: whole files of this part may be there.
            self._leftovers = True
            raise
        _check_records(records, folder)
        with self._lock:
            edit = self._edits.get(table, edit)
            snapshot = edit.snapshot or new_snapshot_id()
            self._edits[table] = replace(edit, snapshot=snapshot, added=(*edit.added, *records))
        self._log.info("staged", table=table, files=len(records), rows=sum(record.rows for record in records))
        # Crash here: files in the operation's own folder; healing deletes them (I3, I10).
        hit(f"{self._intent.kind}.staged")
        return sum(record.rows for record in records)

    def _plan(self, table: str) -> tuple[Edit, Any]:
        """What is known of a table before rows are staged for it: of one that this change makes, from its plan."""
        with self._lock:
            known = self._edits.get(table)
        if known is not None and known.metadata is not None:
            return known, parse_metadata(known.metadata)
        head = _head(self._catalog, table, self._intent)
        metadata = self._catalog.files.metadata(head.metadata_location)
        return Edit(APPEND, table, head.table_id, metadata.location, head.schema_id, head.spec_id), metadata

    def _claim(self, table_location: str) -> None:
        if self.operation.folder(table_location, "data") not in self.operation.folders:
            self.operation = self._catalog.journal.add_table(self.operation, table_location)

    def _stage(self, edit: Edit, metadata: Any, folder: str, data: Any) -> list[FileRecord]:
        from floodmark.rows.stage import StageTarget, stage_dataframe, stage_in_process

        target = StageTarget(
            folder=folder,
            schema_json=metadata.schema_by_id(edit.schema_id).model_dump_json(),
            spec_json=metadata.specs()[edit.spec_id].model_dump_json(),
            sort_json=metadata.sort_order().model_dump_json(),
            properties=dict(metadata.properties),
            storage_options=self._catalog.storage.options,
        )
        if hasattr(data, "mapInArrow"):  # a Spark DataFrame, classic or Connect
            self._used_spark = True
            return stage_dataframe(target, data, self.operation.id)
        return stage_in_process(target, data, self._catalog.storage)

    def create_table(self, shape: TableShape) -> None:
        """Plan a new table; its first metadata is part of the seal."""
        table_id = str(uuid.uuid4())
        location = join(self._catalog.location, "tables", f"{shape.name}.{table_id[:8]}")
        self._claim(location)
        metadata = new_metadata(location, table_id, shape.schema, shape.spec, shape.sort, dict(shape.properties))
        self._edits[shape.name] = Edit(
            CREATE,
            shape.name,
            table_id,
            location,
            metadata.current_schema_id,
            metadata.default_spec_id,
            metadata=metadata.model_dump_json(exclude_none=True),
        )

    # ── seal and publish ──

    def publish(self) -> Commit:
        """Seal, then through the door. Without rows and without an identity to record there is nothing to publish."""
        edits = tuple(edit for edit in self._edits.values() if edit.added or edit.action == CREATE)
        riders: tuple[Rider, ...] = () if self._intent.batch is None else (self._intent.batch,)
        if not edits and not riders:
            return self._nothing_to_do()
        seal = Seal(edits, riders, repeatable=self._intent.batch is not None)
        sealed_apart = self._catalog.journal.seal(self.operation, seal)
        # Crash here: a repeatable operation is finished by a healer, any other is undone.
        hit(f"{self._intent.kind}.sealed")
        # Task attempts that the driver never heard of may have left files that the seal does not name.
        leftovers = self._used_spark or self._leftovers or sealed_apart
        commit = self._catalog.door.publish(self.operation, seal, points=self._intent.kind, leftovers=leftovers)
        self._catalog.journal.active.discard(self.operation.id)
        self._log.info("published", version=commit.version, rows=commit.rows_added)
        return commit

    def _nothing_to_do(self) -> Commit:
        operation, _ = self._catalog.journal.abandon(self.operation.id)
        if operation is not None:
            delete_files(self._catalog, operation, certain=not self._used_spark)
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
            return undo(self._catalog, self.operation, error, certain=not self._used_spark)
        finally:
            self._catalog.journal.active.discard(self.operation.id)


def _head(catalog: Catalog, table: str, intent: Intent) -> Head:
    return catalog.history.head(table, intent.branch)


def _check_records(records: list[FileRecord], folder: str) -> None:
    """A file is published once, and only from the folder that this operation owns."""
    paths = [record.path for record in records]
    foreign = [path for path in paths if not path.startswith(folder + "/")]
    if foreign or len(set(paths)) != len(paths) or any(record.rows <= 0 for record in records):
        raise Corrupt("staging reported files that are not this operation's own, each once, with rows", folder=folder)
