"""Segments for the data files of an operation: written when it is planned, and published with them.

They are made from the files themselves, so every verb, and a build for old files, makes them in the same way: little in
this process, much by Spark tasks. They lie in the operation's own folder. Crash before the seal: files that nothing
refers to, which recovery deletes with the folder (I3, I10). Crash after it: they are published with the rows, or go
with them. Files that another operation staged are not covered again.

A table without a key has no index unless one was declared, and that is asked for once in a while, not at each commit:
files that come in between are not covered until maintenance builds it (I11).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pyiceberg.schema import Schema
from pyiceberg.types import ListType, NestedField, PrimitiveType

from floodmark import clock
from floodmark.catalog.indexes import KEY, Indexes, IndexRider, IndexRow, SealedSegment
from floodmark.catalog.riders import Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.journal import Operation
from floodmark.commit.live_files import LiveFile
from floodmark.commit.metadata import parse_metadata
from floodmark.commit.seal import CREATE, WRITE, Edit
from floodmark.errors import Corrupt
from floodmark.failpoints import hit
from floodmark.index.covering import form_of
from floodmark.model import FileRecord
from floodmark.rows.index.build import build_sections
from floodmark.rows.index.hashing import ENCODER, is_wide
from floodmark.rows.index.segment import CoveredFile, IndexForm, write_segment
from floodmark.rows.project import read_schema
from floodmark.rows.schema import user_fields
from floodmark.rows.session import Sessions
from floodmark.rows.tasks import run_files
from floodmark.storage import Storage, join

# How long it is remembered which indexes a table has.
REMEMBERED_S = 5.0
# The entries of one segment are in memory while it is made.
ROWS_PER_SEGMENT = 2_000_000
FILES_PER_SEGMENT = 4_096
SUFFIX = ".index"


@dataclass(frozen=True)
class IndexOn:
    """An index of a table, and its columns in a schema of the table."""

    form: IndexForm
    columns: tuple[NestedField, ...]


@dataclass(frozen=True)
class CoveredGroup:
    """Data files that one segment will cover."""

    files: tuple[CoveredFile, ...]

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)


@dataclass(frozen=True)
class SegmentPlan:
    """What to make of some data files: plain values, so that it can be sent to executors."""

    folder: str
    indexes: tuple[IndexOn, ...]
    fields: tuple[NestedField, ...]
    storage_options: dict[str, str]


def key_columns(schema: Schema) -> tuple[NestedField, ...]:
    return tuple(field for field in schema.fields if field.field_id in schema.identifier_field_ids)


def is_wide_on(columns: Sequence[NestedField]) -> bool:
    """Whether the hashes of these columns have 128 bits; those of a list are of its elements."""
    kinds = [column.field_type for column in columns]
    plain = [kind.element_type if isinstance(kind, ListType) else kind for kind in kinds]
    fields = [
        NestedField(column.field_id, column.name, kind, required=False)
        for column, kind in zip(columns, plain, strict=True)
    ]
    return is_wide([one.type for one in read_schema(fields)])


def ensure_key(indexes: Indexes, table_id: str, schema: Schema) -> IndexRow | None:
    """The index on the key of this schema, made if it does not exist; None if the schema has no key."""
    columns = key_columns(schema)
    if not columns:
        return None
    on = tuple(column.field_id for column in columns)
    return indexes.ensure_key(table_id, on, is_wide_on(columns), ENCODER.number)


def columns_on(schema: Schema, field_ids: Sequence[int]) -> tuple[NestedField, ...] | None:
    """The columns of an index in this schema; None if it lacks one."""
    by_id = {field.field_id: field for field in schema.fields}
    found = tuple(by_id[one] for one in field_ids if one in by_id)
    return found if len(found) == len(field_ids) else None


def holds(file: LiveFile | FileRecord, columns: Sequence[NestedField]) -> bool:
    """Whether the file has these columns itself. One that it lacks may be filled later, so nothing is said of its rows.

    Files of our writers have counts of every column.
    """
    counts = (file.data_file if isinstance(file, LiveFile) else file).value_counts or {}
    return all(_leaf(column) in counts for column in columns)


def _leaf(column: NestedField) -> int:
    kind = column.field_type
    if isinstance(kind, ListType) and isinstance(kind.element_type, PrimitiveType):
        return kind.element_id
    return column.field_id


class SegmentWriter:
    """Segments for what operations publish."""

    def __init__(self, catalog: Catalog, sessions: Sessions) -> None:
        self._catalog = catalog
        self._sessions = sessions
        # By table: what it had at that time. By table and schema: schemas that commits named, which never change.
        self._indexes: dict[str, tuple[float, list[IndexRow]]] = {}
        self._schemas: dict[tuple[str, int], Schema] = {}

    def forget(self, table_id: str) -> None:
        """The table has other indexes now."""
        self._indexes.pop(table_id, None)

    def riders(self, operation: Operation, edits: Iterable[Edit], *, spark: bool) -> list[Rider]:
        """Segments for the files that these edits add, as riders of their publish.

        Without `spark` all are made in this process, as the files were: it may have no Spark.
        """
        sessions = self._sessions if spark else None
        riders: list[Rider] = []
        # One barrier for the segments of all tables.
        with self._catalog.storage.together():
            for edit in edits:
                if edit.action not in (WRITE, CREATE) or not edit.added or not self._catalog.indexes.known:
                    continue
                folder = operation.folder(edit.location, "data")
                # Files that another operation published are covered by its segments, or by maintenance.
                own = [file for file in edit.added if file.path.startswith(folder + "/")]
                wanted = self._wanted(edit) if own else None
                if wanted is None:
                    continue
                schema, indexes = wanted
                made, _ = write_segments(
                    self._catalog.storage, sessions, folder, schema, indexes, own, tag=f"floodmark-{operation.id}"
                )
                riders += [IndexRider(edit.table_id, tuple(made))] if made else []
        if riders:
            # Crash here: segments in the operation's own folder; recovery deletes them.
            hit("index.written")
        return riders

    def _wanted(self, edit: Edit) -> tuple[Schema, list[IndexRow]] | None:
        """The table's schema and its indexes, if it has any."""
        known = self._known(edit.table_id)
        schema = self._schema(edit)
        on = tuple(column.field_id for column in key_columns(schema))
        if on and not any(one.kind == KEY and one.field_ids == on for one in known):
            made = ensure_key(self._catalog.indexes, edit.table_id, schema)
            known = [*known, *([made] if made is not None else [])]
            self._indexes[edit.table_id] = (time.monotonic(), known)
        live = [one for one in known if one.is_live]
        return (schema, live) if live else None

    def _known(self, table_id: str) -> list[IndexRow]:
        asked, found = self._indexes.get(table_id, (0.0, []))
        if not asked or time.monotonic() - asked > REMEMBERED_S:
            found = self._catalog.indexes.of_table(table_id)
            self._indexes[table_id] = (time.monotonic(), found)
        return found

    def _schema(self, edit: Edit) -> Schema:
        if edit.action == CREATE:
            metadata = parse_metadata(edit.metadata or "")
            return metadata.schema_by_id(edit.schema_id) or metadata.schema()
        if edit.schema is not None:
            return Schema.model_validate_json(edit.schema)
        place = (edit.table_id, edit.schema_id)
        if place not in self._schemas:
            # Not by its name: another table may have it by now.
            newest = self._catalog.files.metadata(self._catalog.history.newest_metadata(edit.table_id))
            found = newest.schema_by_id(edit.schema_id)
            if found is None:
                raise Corrupt("the table's metadata lacks a schema", table=edit.table, schema_id=edit.schema_id)
            self._schemas[place] = found
        return self._schemas[place]


def write_segments(
    storage: Storage,
    sessions: Sessions | None,
    folder: str,
    schema: Schema,
    indexes: Sequence[IndexRow],
    files: Sequence[LiveFile | FileRecord],
    *,
    tag: str,
) -> tuple[list[SealedSegment], bool]:
    """Write segments of these indexes for these data files; and whether Spark tasks did: with sessions, if it is much.

    A file that lacks the columns of some of the indexes is covered for the others only.
    """
    made: list[SealedSegment] = []
    used_spark = False
    for indexed, some in _by_indexes(schema, indexes, files):
        plan = SegmentPlan(folder, indexed, tuple(user_fields(schema)), dict(storage.options))
        if sessions is None:
            made += [_write_group(storage, plan, one) for one in _groups(some)]
            continue
        found, tasks = run_files(
            sessions,
            _groups(some),
            lambda groups, plan=plan: [_write_group(storage, plan, one) for one in groups],  # type: ignore[misc]
            partial(_write_groups, plan),
            tag=tag,
            message="Spark could not index the data files",
        )
        made += sorted(found, key=lambda one: one.location)
        used_spark |= tasks
    return made, used_spark


def _by_indexes(
    schema: Schema, indexes: Sequence[IndexRow], files: Sequence[LiveFile | FileRecord]
) -> Iterator[tuple[tuple[IndexOn, ...], list[CoveredFile]]]:
    """The files by the indexes that can cover them."""
    on = []
    for index in indexes:
        form, columns = form_of(index), columns_on(schema, index.field_ids)
        if form is not None and columns is not None:
            on.append(IndexOn(form, columns))
    by_indexes: dict[tuple[int, ...], list[CoveredFile]] = {}
    for file in files:
        held = tuple(at for at, one in enumerate(on) if holds(file, one.columns))
        by_indexes.setdefault(held, []).append(CoveredFile(file.path, file.rows, file.size_bytes))
    for held, some in by_indexes.items():
        if held:
            yield tuple(on[at] for at in held), some


def _groups(files: Sequence[CoveredFile]) -> list[CoveredGroup]:
    """The files in groups of bounded size, in their order; a file is never cut."""
    groups: list[CoveredGroup] = []
    some: list[CoveredFile] = []
    for file in files:
        if some and (sum(one.rows for one in some) + file.rows > ROWS_PER_SEGMENT or len(some) >= FILES_PER_SEGMENT):
            groups.append(CoveredGroup(tuple(some)))
            some = []
        some.append(file)
    return [*groups, CoveredGroup(tuple(some))] if some else groups


def _write_groups(plan: SegmentPlan, groups: Sequence[CoveredGroup]) -> list[SealedSegment]:
    """In a task of Spark."""
    storage = Storage(plan.storage_options)
    with storage.batch():
        return [_write_group(storage, plan, one) for one in groups]


def _write_group(storage: Storage, plan: SegmentPlan, group: CoveredGroup) -> SealedSegment:
    sections = build_sections(storage, [(one.form, one.columns) for one in plan.indexes], group.files, plan.fields)
    # A name of its own for each attempt.
    record = write_segment(storage, join(plan.folder, f"{clock.new_id()}{SUFFIX}"), sections)
    return SealedSegment(
        record.location,
        record.size_bytes,
        record.tail_bytes,
        record.digest,
        record.entries,
        len(group.files),
        tuple(one.form.id for one in plan.indexes),
    )
