"""Rows that another writer left in a table: checked before they are accepted, and made the table's own.

The check writes nothing and gives the reason why the rows do not fit, if there is one. They must refer to existing
rows, and no row to a removed one: the other tables are read as they are now, on the same branch, and the publish
depends on them staying so. Files that the other writer made are named as they are; files whose rows carry sequences, or
that Floodmark itself wrote once, are staged anew, so that every row gets its sequence from the commit that accepts it
and no follower misses it (I5). Crash while staging: files in the operation's own folder, which recovery deletes (I3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
from pyiceberg.manifest import ManifestEntry
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.types import NestedField

from floodmark.commit.catalog import Catalog
from floodmark.commit.drift import REWRITTEN, Drift
from floodmark.commit.live_files import LiveFile, live_files, seq_field_id
from floodmark.commit.manifests import record_of
from floodmark.commit.metadata import schema_of
from floodmark.commit.references import references_of, referrers_of
from floodmark.commit.seal import RemovedFile
from floodmark.errors import NotFound
from floodmark.model import CurrentTable, FileRecord, Head
from floodmark.rows.arrays import Mask
from floodmark.rows.checksum import RowChecksum, row_hashes
from floodmark.rows.mixing import Hashes
from floodmark.rows.project import held_fields
from floodmark.rows.reading.arrow_reader import arrow_batches, arrow_read_schema
from floodmark.rows.reading.references import held_values, missing_values
from floodmark.rows.rewriting.rewrite import ALL, BY_KEY, InputFile, Result, Rewrite
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.schema import user_fields
from floodmark.rows.session import Sessions
from floodmark.rows.staging.duplicates import find_duplicates
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.write.prune import key_fields


@dataclass(frozen=True)
class TableFiles:
    """A table with its present or future files."""

    head: Head
    metadata: TableMetadata
    schema: Schema
    files: Sequence[LiveFile] = field(repr=False)


@dataclass(frozen=True)
class ReferenceCheck:
    """Why rows do not fit, empty if they do; and the other tables that this result depends on."""

    reason: str = ""
    others: tuple[Head, ...] = ()


def look_at_references(catalog: Catalog, after: TableFiles, came: Sequence[str], went: Sequence[str]) -> ReferenceCheck:
    """`after` is the table with the other writer's rows; `came` and `went` are the files that differ from ours."""
    others: dict[str, Head] = {}
    reason = _children(catalog, after, came, others) if came else ""
    if not reason and went and after.schema.identifier_field_ids:
        reason = _parents(catalog, after, went, others)
    return ReferenceCheck(reason, tuple(others.values()))


def _children(catalog: Catalog, child: TableFiles, came: Sequence[str], others: dict[str, Head]) -> str:
    for reference in references_of(child.metadata.properties, child.schema, child.head.table_id):
        parent = _table(catalog, child, reference.parent, reference.parent_id)
        # A branch that is older than the key is older than the reference, and does not check it.
        if parent is None or [one.field_id for one in key_fields(parent.schema)] != [reference.parent_field_id]:
            continue
        column, key = child.schema.find_field(reference.field_id), key_fields(parent.schema)[0]
        missing = missing_values(catalog.storage, came, column, parent.files, key)
        if missing.count:
            examples = ", ".join(missing.examples[:3])
            return f"{missing.count} value(s) of {column.name} are no {parent.head.table}.{key.name}: {examples}"
        _remember(child, parent, others)
    return ""


def _parents(catalog: Catalog, parent: TableFiles, went: Sequence[str], others: dict[str, Head]) -> str:
    key: NestedField = key_fields(parent.schema)[0]
    for referrer in referrers_of(parent.metadata.properties):
        child = _table(catalog, parent, referrer.table, referrer.table_id)
        known = None if child is None else {column.field_id: column for column in child.schema.fields}
        if child is None or known is None or referrer.field_id not in known:
            continue
        column = known[referrer.field_id]
        held = held_values(catalog.storage, went, key, child.files, column, stay=parent.files)
        if held.count:
            examples = ", ".join(held.examples[:3])
            return f"{held.count} key(s) were removed that {child.head.table}.{column.name} refers to: {examples}"
        _remember(parent, child, others)
    return ""


def _table(catalog: Catalog, looked_at: TableFiles, name: str, table_id: str) -> TableFiles | None:
    """The other table, which may be the same one; None if this branch does not have it."""
    if table_id == looked_at.head.table_id:
        return looked_at
    try:
        head = catalog.history.head(name, looked_at.head.branch)
    except NotFound:
        return None
    if head.table_id != table_id:
        return None
    metadata = catalog.files.metadata(head.metadata_location)
    schema = schema_of(metadata, head)
    return TableFiles(head, metadata, schema, live_files(catalog.files, head, schema))


def _remember(table: TableFiles, other: TableFiles, others: dict[str, Head]) -> None:
    if other.head.table_id != table.head.table_id:
        others[other.head.table] = other.head


# The maximum of rows compared one by one in memory, to tell new rows from rewritten ones.
COMPARED_ROWS_MAX = 1_000_000
# A folder that an operation of ours staged into.
_OWN_FOLDER = re.compile(r"/data/[0-9A-HJKMNP-TV-Z]{26}/")


@dataclass(frozen=True)
class TakenIn:
    """The result of accepting the rows, for the publisher."""

    added: tuple[FileRecord, ...]
    removed: tuple[RemovedFile, ...]
    deletions: tuple[FileRecord, ...]
    rows_added: int
    rows_updated: int
    rows_deleted: int


class _Hashes:
    """Hashes of rows, each as often as its row occurs."""

    def __init__(self) -> None:
        self._parts: list[Hashes] = []

    def add(self, hashes: Hashes) -> None:
        self._parts.append(hashes)

    def matcher(self) -> Callable[[Hashes], Mask]:
        """Finds the rows of batch after batch that are among these; each of these is matched once."""
        everything = np.concatenate([np.empty(0, np.uint64), *self._parts])
        known, left = np.unique(everything, return_counts=True)

        def matched(hashes: Hashes) -> Mask:
            taken: Mask = np.isin(hashes, known)
            place = np.searchsorted(known, hashes[taken])
            # How many rows of this batch with the same hash come before each.
            order = np.argsort(place, kind="stable")
            rank = np.empty(len(place), np.int64)
            rank[order] = np.arange(len(place)) - np.searchsorted(place[order], place[order])
            left_over = rank < left[place]
            np.subtract.at(left, place[left_over], 1)
            taken[taken] = left_over
            return taken

        return matched


@dataclass(frozen=True)
class ForeignRows:
    catalog: Catalog
    sessions: Sessions = field(repr=False)
    current: CurrentTable
    drift: Drift

    @cached_property
    def metadata(self) -> TableMetadata:
        """Of our own newest state: the other writer's metadata is not used."""
        return self.catalog.files.metadata(self.current.pointer_known)

    @cached_property
    def schema(self) -> Schema:
        return schema_of(self.metadata, self.current.head)

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in key_fields(self.schema))

    # ── looking ──

    def misfit(self) -> str:
        """Why the rows do not fit the table, with examples; empty if they do."""
        return self._gone() or self._nulls() or self._keys() or self.references.reason

    def _gone(self) -> str:
        gone = [path for path in self._paths() if not self.catalog.storage.exists(path)]
        return f"a file that it lists is gone: {gone[0]}" if gone else ""

    def _nulls(self) -> str:
        for column in user_fields(self.schema):
            for entry in self.drift.added if column.required else ():
                values = (entry.data_file.value_counts or {}).get(column.field_id)
                nulls = (entry.data_file.null_value_counts or {}).get(column.field_id)
                if values is None or nulls is None or nulls:
                    return f"the column {column.name} is required, and may be null in {entry.data_file.file_path}"
        return ""

    def _keys(self) -> str:
        if not self.key or not self.drift.added:
            return ""
        twice = find_duplicates(self.catalog.storage, self._paths(), key_fields(self.schema))
        if twice:
            return f"it added a key more than once: {'; '.join(twice)}"
        rewrite = Rewrite(self._target(""), BY_KEY, self.key, incoming=tuple(self._paths()), look_only=True)
        found = self._run(rewrite, self._stays())
        return f"it added {found.matched} key(s) that the table has: {found.examples()}" if found.matched else ""

    @cached_property
    def references(self) -> ReferenceCheck:
        head = self.current.head
        after = TableFiles(head, self.metadata, self.schema, [*self._stays(), *self._files(self.drift.added)])
        went = [entry.data_file.file_path for entry in self.drift.removed]
        return look_at_references(self.catalog, after, self._paths(), went)

    # ── rows that were only rewritten ──

    @cached_property
    def new_rows(self) -> pa.Table | None:
        """Of a state that another writer rewrote: the rows that are not in our files; None if that is not certain.

        A checksum makes it certain: our rows and the new ones together equal theirs. If one of our rows was removed, or
        there are more rows than are compared in memory, this cannot decide: then all added rows count as new.
        """
        if not self.drift.rewrote or not self.drift.removed or not self.drift.added:
            return None
        if self.drift.happened != REWRITTEN and self.drift.rows_added > COMPARED_ROWS_MAX:
            return None
        if any(not self.catalog.storage.exists(entry.data_file.file_path) for entry in self.drift.removed):
            return None
        if self.drift.happened == REWRITTEN:
            same = self._checksum(self.drift.removed) == self._checksum(self.drift.added)
            return arrow_read_schema(self.schema, False).empty_table() if same else None
        return self._rows_beyond_ours()

    def _rows_beyond_ours(self) -> pa.Table | None:
        ours, before = _Hashes(), RowChecksum()
        for batch in self._batches(self.drift.removed):
            ours.add(row_hashes(batch))
            before.add(batch)
        after, new = RowChecksum(), [arrow_read_schema(self.schema, False).empty_table()]
        matched = ours.matcher()
        for batch in self._batches(self.drift.added):
            after.add(batch)
            new.append(pa.Table.from_batches([batch]).filter(pa.array(~matched(row_hashes(batch)))))
        found = pa.concat_tables(new)
        for batch in found.to_batches():
            before.add(batch)
        return found if before == after else None

    def _checksum(self, entries: Sequence[ManifestEntry]) -> RowChecksum:
        total = RowChecksum()
        for batch in self._batches(entries):
            total.add(batch)
        return total

    def _batches(self, entries: Sequence[ManifestEntry]) -> Iterator[pa.RecordBatch]:
        """The rows as users see them: sequences that another writer gave them do not count."""
        return arrow_batches(self.catalog.storage, self._files(entries), self.schema, False)

    # ── accepting ──

    def take(self, folder: str) -> TakenIn:
        """The difference as records; writes rows that need a sequence of this commit, and removed keys.

        Where our rows were only rewritten, our files stay in their place: their rows keep their sequences (I6).
        """
        if self.new_rows is not None:
            staged = stage_in_process(self._target(folder), self.new_rows, self.catalog.storage)
            return TakenIn(tuple(staged), (), (), self.new_rows.num_rows, 0, 0)
        as_they_are: list[ManifestEntry] = []
        anew: list[ManifestEntry] = []
        for entry in self.drift.added:
            (as_they_are if self._may_stay(entry) else anew).append(entry)
        records = [record_of(entry.data_file, self.metadata) for entry in as_they_are]
        records += self._staged(anew, folder)
        deletions, replaced = self._deletions(folder)
        rows, gone = self.drift.rows_added, self.drift.rows_removed
        return TakenIn(
            tuple(records),
            tuple(RemovedFile(file.path, file.rows, file.size_bytes) for file in self._files(self.drift.removed)),
            deletions,
            rows_added=rows - replaced,
            rows_updated=replaced,
            rows_deleted=gone - replaced,
        )

    def _may_stay(self, entry: ManifestEntry) -> bool:
        file = self._files([entry])[0]
        if self.drift.unclear or _OWN_FOLDER.search(file.path):
            return False
        return file.fresh and self._has_no_sequence(file)

    def _has_no_sequence(self, file: LiveFile) -> bool:
        """Whether it is certain that no row has a sequence: another writer may omit the counts of a column."""
        if file.seq_id is None:
            return True
        values = (file.data_file.value_counts or {}).get(file.seq_id)
        nulls = (file.data_file.null_value_counts or {}).get(file.seq_id)
        if values is not None:
            return values == nulls == file.rows
        return file.seq_id not in held_fields(self.catalog.storage, file.path)

    def _staged(self, entries: Sequence[ManifestEntry], folder: str) -> list[FileRecord]:
        if not entries:
            return []

        def batches() -> Iterator[pa.RecordBatch]:
            yield from arrow_batches(self.catalog.storage, self._files(entries), self.schema, False)

        rows = pa.RecordBatchReader.from_batches(arrow_read_schema(self.schema, False), batches())
        return stage_in_process(self._target(folder), rows, self.catalog.storage)

    def _deletions(self, folder: str) -> tuple[tuple[FileRecord, ...], int]:
        """The keys that were removed for good, as files; and how many rows were added again under their key."""
        if not self.key or not self.drift.removed:
            return (), 0
        rewrite = Rewrite(self._target(folder), ALL, self.key, incoming=tuple(self._paths()), deletions=True)
        result = self._run(rewrite, self._files(self.drift.removed))
        return tuple(result.deletions), sum(file.replaced for file in result.files)

    # ── files ──

    @cached_property
    def _runner(self) -> Runner:
        return Runner(self.catalog.storage, self.sessions, f"repair-{self.current.head.table_id}")

    @property
    def used_spark(self) -> bool:
        return self._runner.used_spark

    def _run(self, rewrite: Rewrite, files: Sequence[LiveFile]) -> Result:
        return self._runner.run(rewrite, [InputFile.of(file) for file in files])

    def _target(self, folder: str) -> StageTarget:
        spec = self.metadata.specs()[self.current.head.spec_id]
        return StageTarget.of(self.metadata, folder, self.catalog.storage, schema=self.schema, spec=spec)

    def _stays(self) -> list[LiveFile]:
        """Our files that the other writer left in the table."""
        gone = {entry.data_file.file_path for entry in self.drift.removed}
        ours = live_files(self.catalog.files, self.current.head, self.schema)
        return [file for file in ours if file.path not in gone]

    def _files(self, entries: Sequence[ManifestEntry]) -> list[LiveFile]:
        seq_id = seq_field_id(self.schema)
        return [LiveFile(entry.data_file, entry.sequence_number, seq_id) for entry in entries]

    def _paths(self) -> list[str]:
        return [entry.data_file.file_path for entry in self.drift.added]
