"""A table on paper: the files that a change has planned for it, and what it will ask the door to do with them.

Besides the verbs of a caller (table.py), whoever brings a table to a state that was decided elsewhere (a merge of
branches) puts files, keys and a shape on this paper directly. What was put so cannot be planned again by itself: if the
table moved, the one who decided decides anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata

from floodmark import clock
from floodmark.catalog.fills import absent_fields
from floodmark.catalog.live import LiveFile, live_files
from floodmark.catalog.metadata import add_schema, new_snapshot_id
from floodmark.catalog.seal import Edit
from floodmark.errors import Corrupt
from floodmark.model import FileRecord, Head
from floodmark.rows.deletions import DeletionsWriter
from floodmark.rows.rewrite import Result, Source
from floodmark.write.prune import key_fields
from floodmark.write.shaped import Means, ShapedTable
from floodmark.write.working import WorkingFiles, staged_files

if TYPE_CHECKING:
    pass


class PlannedTable(ShapedTable):
    def __init__(self, name: str, metadata: TableMetadata, head: Head | None, folder: str, means: Means) -> None:
        super().__init__(name, metadata, head, folder, means)
        self._snapshot = new_snapshot_id()
        self._state = WorkingFiles(self.folder)
        # The publish demands that the table is just where it was planned, whatever is done to it.
        self.strict = False
        # Another table of the change is right only beside this one's rows; looked at again if it moved.
        self.depended = False
        # Something was put on paper that is no step, and cannot be taken again.
        self._decided = False

    @property
    def leftovers(self) -> bool:
        return self._state.leftovers

    # ── decided elsewhere ──

    def add_again(self, records: Sequence[FileRecord], *, carried: bool = False) -> None:
        """Add files that are published already, on another branch: no copy, and a sequence of this commit.

        `carried`: their rows went with `replace_all` and come back as they were; they are not counted as new.
        """
        self._decided = True
        self._base()  # to know what is live
        self._state.add_again(records)
        self._count(records, carried=carried)

    def add_staged(self, records: Sequence[FileRecord], *, carried: bool = False) -> None:
        """Add files that were staged in this operation's folder for the table's shape, fresh or settled."""
        self._decided = True
        self._state.add(records)
        self._count(records, carried=carried)

    def _count(self, records: Sequence[FileRecord], *, carried: bool) -> None:
        rows = sum(record.rows for record in records)
        if carried:
            self._state.rows_deleted -= rows
        else:
            self._state.rows_added += rows

    def fill_files(self, files: Iterable[LiveFile]) -> None:
        """Write files again that lack columns which the table's shape fills; their rows keep their sequences (I6)."""
        self._decided = True
        lacking: dict[tuple[int, ...], list[LiveFile]] = {}
        for file in files:
            lacking.setdefault(absent_fields(file, self.fills, self.schema), []).append(file)
        for absent, some in lacking.items():
            if not absent:
                continue
            records = self._runner.fill(
                replace(self.target(), settled=True),
                [Source.of(file, absent=absent) for file in some],
                [fill for fill in self.fills if fill.field_id in absent],
                table=self.name,
                source_schema=self.schema,
                tables=self._tables,
            )
            for file in some:
                self._state.drop(file)
                self._state.rows_deleted += file.rows
            self.add_staged(records, carried=True)

    def replace_all(self, keep: Collection[str] = ()) -> int:
        """Take out every file but those with these paths; returns how many rows go. No deletion is written down."""
        self._decided = True
        going = [file for file in self.working_files() if file.path not in keep]
        for file in going:
            self._state.drop(file)
        rows = sum(file.rows for file in going)
        self._state.rows_deleted += rows
        return rows

    def tell_deleted(self, keys: pa.Table) -> None:
        """Write these keys down as deleted by this commit, though no row of them is there any more."""
        self._decided = True
        writer = DeletionsWriter(self._storage, self.folder, self.schema, key_fields(self.schema), clock.new_id())
        try:
            # Crash here: at most a whole file in the operation's own folder; healing deletes it.
            with self._storage.batch():
                writer.write(keys)
                record = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        if record is not None:
            self._state.add_deletions([record])

    def reshape(self, schema: Schema, spec_id: int | None = None) -> None:
        """Give the table a schema and a partition spec that its metadata knows, whether rows come or not."""
        self._decided = True
        if spec_id is not None and spec_id not in self.metadata.specs():
            raise Corrupt("the table's metadata does not know this partition spec", table=self.name, spec_id=spec_id)
        if self.metadata.schema_by_id(schema.schema_id) is None:
            raise Corrupt("the table's metadata does not know this schema", table=self.name, schema=schema.schema_id)
        self.schema = schema
        self.metadata = self.metadata.model_copy(update={"current_schema_id": schema.schema_id})
        self._new_spec_id = self.spec_id if spec_id is None else spec_id
        self._state.reshaped = True

    # ── files ──

    def working_files(self) -> list[LiveFile]:
        """The files that the table has once this change is true, as far as it is planned."""
        base = [file for path, file in self._base().items() if path not in self._state.removed]
        return [*base, *self._staged(self._state.added.values())]

    def came_files(self) -> list[LiveFile]:
        """The files of rows that are new to the table, or that were not looked at before they were put here.

        All of them, if the table gets a shape that it did not have when they were: a reference may come with it.
        """
        if self._state.reshaped:
            return self.working_files()
        staged = self._staged(self._state.added.values())
        return [file for file in staged if self._decided or file.fresh]

    def deleted_keys(self) -> list[str]:
        """The files of the keys that some step took out; a later one may have brought them again."""
        return [record.path for record in self._state.deletions]

    def base_paths(self) -> set[str]:
        """The files at the head that was planned on."""
        return set(self._base())

    def came_meanwhile(self, head: Head) -> list[LiveFile]:
        """The files of a newer head that were not there at the one that was planned on."""
        return [file for file in live_files(self._files, head, self.schema) if file.path not in self._base()]

    def _base(self) -> dict[str, LiveFile]:
        if self._state.base is None:
            found = [] if self.head is None else live_files(self._files, self.head, self.schema)
            self._state.base = {file.path: file for file in found}
        return self._state.base

    def _staged(self, records: Iterable[FileRecord]) -> list[LiveFile]:
        return staged_files(records, self.metadata, self.schema, self.spec_id)

    def _replace(self, result: Result) -> None:
        """Put a rewrite's outcome on paper."""
        live = {file.path: file for file in self.working_files()}
        for file in result.files:
            if file.removed:
                self._state.drop(live[file.path])
                self._state.add(file.records)
            elif file.unchanged and file.path in self._base():
                self._state.needed.add(file.path)
        self._state.add_deletions(result.deletions)

    def _evolve(self, schema: Schema) -> None:
        """The table's shape, from this step on, is the one that its rows bring."""
        if schema is not self.schema:
            self.schema, self.metadata = schema, add_schema(self.metadata, schema)

    def _edit(self, *, checked: bool) -> Edit:
        return self._state.edit(
            self.name, self.head, self.metadata, self.schema, self.spec_id, self._snapshot, checked=checked
        )
