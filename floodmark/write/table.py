"""What one change does to one table: steps applied to its files, as a plan, until the publish makes them true.

The working state is the table's live files at the head that was planned on, without those removed and with those staged
so far; each step works on that state, so a later step of a transaction sees an earlier one. The steps are kept with
their rows, as staged files: if the table moved in a way that matters, they are taken again on the new head, without
asking the caller for the rows a second time (protocol 1, plan again). A merge of branches, and a rollback, put files,
keys and a shape that they decided themselves into the plan directly; those cannot be planned again here, so they decide
anew.

Rows that arrive without a column which an expression fills are staged without it first, and then again with it: so the
expression is evaluated on the table's own files, whatever form the rows arrived in. A crash leaves files in the
operation's own folder that nothing refers to (I3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import VoidTransform
from pyiceberg.types import NestedField

from floodmark import clock
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import Fill, absent_fields, fills_of, lacking
from floodmark.commit.live_files import LiveFile, live_files, seq_field_id
from floodmark.commit.manifests import data_file
from floodmark.commit.metadata import (
    MetadataFiles,
    add_schema,
    has_renamed_columns,
    new_snapshot_id,
    schema_of,
    seen_from,
)
from floodmark.commit.references import referrers_of
from floodmark.commit.seal import Edit
from floodmark.errors import Conflict, Corrupt, Invalid, NotFound
from floodmark.model import MAIN, FileRecord, Head
from floodmark.rows.arrays import Numbers
from floodmark.rows.evolve import evolve_schema
from floodmark.rows.keys import KeySet, examples
from floodmark.rows.reading.selection import select_files
from floodmark.rows.rewriting.assign import Assignment, AssignPlan
from floodmark.rows.rewriting.fill import computed_anew
from floodmark.rows.rewriting.rewrite import (
    ALL,
    BY_KEY,
    BY_PLACES,
    BY_POSITIONS,
    BY_WHERE,
    NONE,
    Completed,
    InputFile,
    Result,
    Rewrite,
    pack_positions,
    unpack_positions,
)
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.rewriting.two_way import RowSet
from floodmark.rows.schema import arrow_schema, user_fields
from floodmark.rows.session import Sessions
from floodmark.rows.sql.condition import columns_by_name
from floodmark.rows.sql.where import Where
from floodmark.rows.staging.deletions import DeletionsWriter
from floodmark.rows.staging.duplicates import find_duplicates
from floodmark.rows.staging.stage import StageTarget
from floodmark.storage import Storage, join
from floodmark.write import refusals
from floodmark.write.prune import key_fields, may_hold_keys
from floodmark.write.reshape import check_condition, check_required, present_name, translated
from floodmark.write.step import (
    APPEND,
    DELETE,
    DELETE_KEYS,
    MERGE,
    OVERWRITE,
    RETAIN,
    UPDATE,
    PartialRows,
    TableState,
    WriteStep,
)

if TYPE_CHECKING:
    from floodmark.rows.frames import DataFrame

# Positions of rows that take more than this go into an object of their own.
POSITIONS_BYTES_MAX = 64 * 1024
# So many files are tested sooner than manifests are read, which the commit has as entries already.
ONE_BY_ONE_MAX = 64


def planned_on(catalog: Catalog, table: str, branch: str) -> tuple[Head, TableMetadata]:
    """A table's head, and its newest metadata as the branch sees it: ids that any branch has assigned stay reserved."""
    head, newest = catalog.history.head_and_newest(table, branch)
    return head, seen_from(catalog.files.metadata(newest), head.schema_id, head.spec_id)


def tables_at_head(catalog: Catalog, sessions: Sessions, branch: str = MAIN) -> Callable[[str], DataFrame]:
    """Returns a table as expressions of a write see it, by its name in any case; `NotFound` if it does not exist.

    It is at the head of the write's branch: what the same change has staged is not seen (I3).
    """

    def read(name: str) -> DataFrame:
        from floodmark.rows.reading.scan import scan

        heads = [head for head in catalog.history.heads(branch) if head.table.lower() == name.lower()]
        if not heads:
            raise NotFound("there is no such table", table=name, advice="`floodmark tables` lists them.")
        metadata = catalog.files.metadata(heads[0].metadata_location)
        return scan(
            sessions.get(),
            catalog.files.data_files(heads[0]),
            schema_of(metadata, heads[0]),
            storage_options=catalog.storage.options,
            # Spark matches columns by id, but pushes filters down by name.
            arrow=True if has_renamed_columns(metadata) else None,
        )

    return read


@dataclass(frozen=True)
class Means:
    """What a change needs to work on a table. `tables` gives others of the lake, for expressions that fill columns.

    `holding_keys` leaves out files of a table that certainly hold none of the keys in some staged files.
    """

    files: MetadataFiles
    storage: Storage
    runner: Runner
    tables: Callable[[str], DataFrame]
    holding_keys: Callable[[str, Sequence[LiveFile], Sequence[str], Sequence[NestedField]], list[LiveFile]]


@dataclass
class WorkingFiles:
    """`needed` were read and stay; `deletions` hold deleted keys. Counts are the sums over the steps."""

    folder: str
    base: dict[str, LiveFile] | None = None
    added: dict[str, FileRecord] = field(default_factory=dict)
    removed: dict[str, LiveFile] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)
    deletions: list[FileRecord] = field(default_factory=list)
    rows_added: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    # The table gets another shape, also if no row comes or goes.
    reshaped: bool = False
    # Files were staged that will not be published.
    leftovers: bool = False

    def copy(self) -> WorkingFiles:
        return replace(
            self,
            added=dict(self.added),
            removed=dict(self.removed),
            needed=set(self.needed),
            deletions=list(self.deletions),
        )

    @property
    def changed(self) -> bool:
        return bool(self.added or self.removed or self.deletions or self.reshaped)

    def add(self, records: Sequence[FileRecord]) -> None:
        check_records(records, self.folder)
        self.added.update({record.path: record for record in records})

    def add_again(self, records: Sequence[FileRecord]) -> None:
        """Files that another operation published, on another branch: under their own paths, in its folder."""
        twice = [record.path for record in records if record.path in self.added or record.path in (self.base or {})]
        if twice or len({record.path for record in records}) != len(records):
            raise Corrupt("a file of the table would be named twice", files=", ".join(twice[:3]))
        self.added.update({record.path: record for record in records})

    def add_deletions(self, records: Sequence[FileRecord]) -> None:
        check_records(records, self.folder)
        self.deletions += records

    def edit(
        self,
        table: str,
        head: Head | None,
        metadata: TableMetadata,
        schema: Schema,
        spec_id: int,
        snapshot: int,
        *,
        checked: bool,
    ) -> Edit:
        """What the publisher has to do; without a head it creates the table, with this metadata."""
        if head is None:
            edit = replace(Edit.create(table, metadata), schema_id=schema.schema_id, spec_id=spec_id)
        else:
            evolved = self.changed and schema.schema_id != head.schema_id
            edit = Edit.at(head, metadata.location, checked=checked).reshape(
                schema if evolved else None, spec=metadata.specs()[spec_id] if spec_id != head.spec_id else None
            )
        return replace(
            edit.exchange(self.added.values(), self.removed.values()),
            snapshot=snapshot if self.changed else None,
            needed=tuple(sorted(self.needed - set(self.removed))),
            deletions=tuple(self.deletions),
            rows_added=self.rows_added,
            rows_updated=self.rows_updated,
            rows_deleted=self.rows_deleted,
        )

    def drop(self, file: LiveFile) -> None:
        if self.added.pop(file.path, None) is None:
            self.removed[file.path] = file
        else:
            self.leftovers = True  # staged by an earlier step, and not to be published


def staged_files(
    records: Iterable[FileRecord], metadata: TableMetadata, schema: Schema, spec_id: int
) -> list[LiveFile]:
    """Files that this change has staged, as planning sees them: without a sequence."""
    seq_id = seq_field_id(schema)
    return [LiveFile(data_file(record, metadata, spec_id), None, seq_id) for record in records]


def check_records(records: Sequence[FileRecord], folder: str) -> None:
    """A file is published once, and only from the folder that this operation owns."""
    paths = [record.path for record in records]
    foreign = [path for path in paths if not path.startswith(folder + "/")]
    if foreign or len(set(paths)) != len(paths) or any(record.rows <= 0 for record in records):
        raise Corrupt("staging reported files that are not this operation's own, each once, with rows", folder=folder)


class TableChange:
    """The working state of one table in one change: its shape, its files, and the steps taken so far."""

    def __init__(self, name: str, metadata: TableMetadata, head: Head | None, folder: str, means: Means) -> None:
        """`head` is None for a table that the same change creates: then `metadata` is its first.

        `folder` is where the change stages its files.
        """
        self.name = name
        self.metadata = metadata
        self.head = head
        self._means = means
        self._files = means.files
        self._storage = means.storage
        self._runner = means.runner
        self.folder = folder
        self._tables = means.tables
        # The table's own; `schema` also has the columns that this change adds.
        self.own = metadata.schema() if head is None else schema_of(metadata, head)
        self.schema = self.own
        self._new_spec_id: int | None = None
        self._snapshot = new_snapshot_id()
        self._state = WorkingFiles(self.folder)
        # The publish requires that the table is exactly at the planned head, whatever is done to it.
        self.strict = False
        # Another table of the change is right only beside this one's rows; checked again if it moved.
        self.depended = False
        # A planned change that is no step, and cannot be repeated.
        self._decided = False
        self._steps: list[WriteStep] = []
        # Files that came after planning and were checked: none of their rows matter to the steps.
        self._looked: set[str] = set()
        # Staged files whose keys are unique; one check is enough.
        self._unique: set[tuple[str, ...]] = set()

    # ── shape ──

    @property
    def spec_id(self) -> int:
        if self._new_spec_id is not None:
            return self._new_spec_id
        return self.metadata.default_spec_id if self.head is None else self.head.spec_id

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in key_fields(self.schema))

    def evolved(self, incoming: pa.Schema) -> Schema:
        """The table's schema with what rows of this Arrow schema add: columns, wider numbers. Changes nothing yet."""
        known = [schema.schema_id for schema in self.metadata.schemas]
        found = evolve_schema(
            self.schema, incoming, last_column_id=self.metadata.last_column_id, next_schema_id=max(known) + 1
        )
        return self.schema if found is None else found

    def target(self, schema: Schema | None = None, *, fill_missing: bool = False) -> StageTarget:
        return StageTarget.of(
            self.metadata,
            self.folder,
            self._storage,
            schema=schema or self.schema,
            spec=self.metadata.specs()[self.spec_id],
            fill_missing=fill_missing,
        )

    def keys_target(self) -> StageTarget:
        return keys_target(self.target(), self.metadata, self.schema, self.spec_id)

    def part_target(self, schema: Schema, names: Sequence[str]) -> tuple[StageTarget, Schema]:
        """Where to stage rows that have these columns only, and their schema. Its files are not published.

        Names that the schema does not have are left to staging, which refuses them.
        """
        kept = [column for column in schema.fields if column.name in names]
        keys = list(schema.identifier_field_ids)
        part = Schema(*kept, schema_id=schema.schema_id, identifier_field_ids=keys)
        target = keys_target(self.target(), self.metadata, schema, self.spec_id)
        return replace(target, schema_json=part.model_dump_json()), part

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The table's columns that an expression fills."""
        return fills_of(self.metadata.properties, self.schema)

    def staged_again(
        self, records: Sequence[FileRecord], schema: Schema, target: StageTarget, fills: Sequence[Fill]
    ) -> tuple[FileRecord, ...]:
        """Stage incoming rows, staged for `schema`, again for the target, with these columns filled."""
        sources = [InputFile(record.path, record.rows, record.size_bytes, None, True) for record in records]
        if fills:
            try:
                return self._runner.fill(
                    target, sources, fills, table=self.name, source_schema=schema, tables=self._tables
                )
            except Invalid as error:
                raise _cannot_fill(error, self.name, fills) from error
        rewrite = Rewrite(target, NONE, source_schema_json=schema.model_dump_json())
        return tuple(record for file in self._runner.run(rewrite, sources).files for record in file.records)

    def _sources(self, files: Iterable[LiveFile]) -> list[InputFile]:
        fills = self.fills
        return [InputFile.of(file, absent=absent_fields(file, fills, self.schema)) for file in files]

    @property
    def leftovers(self) -> bool:
        return self._state.leftovers

    # ── decided elsewhere ──

    def add_again(self, records: Sequence[FileRecord], *, carried: bool = False) -> None:
        """Add files that are published already, on another branch: no copy, and a sequence of this commit.

        `carried`: `replace_all` removed their rows and they return unchanged; they are not counted as new.
        """
        self._decided = True
        self._base()  # loads the live files
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
        """Rewrite files that lack columns which the table's shape fills; their rows keep their sequences (I6)."""
        self._decided = True
        lacking: dict[tuple[int, ...], list[LiveFile]] = {}
        for file in files:
            lacking.setdefault(absent_fields(file, self.fills, self.schema), []).append(file)
        for absent, some in lacking.items():
            if not absent:
                continue
            records = self._runner.fill(
                replace(self.target(), settled=True),
                [InputFile.of(file, absent=absent) for file in some],
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
        """Remove every file except those with these paths; returns how many rows go. No deletion is recorded."""
        self._decided = True
        going = [file for file in self.working_files() if file.path not in keep]
        for file in going:
            self._state.drop(file)
        rows = sum(file.rows for file in going)
        self._state.rows_deleted += rows
        return rows

    def stage_again(self, rows: RowSet) -> list[FileRecord]:
        """Stage rows of an earlier state as new ones, in the table's shape; columns that they lack are filled, or null.

        `exchange` adds the files to the plan.
        """
        self._decided = True
        lacking: dict[tuple[int, ...], list[InputFile]] = {}
        for file, positions in rows.by_file():
            absent = absent_fields(file, self.fills, self.schema)
            source = InputFile(file.path, file.rows, file.size_bytes, None, True, absent=absent)
            rest = np.setdiff1d(np.arange(file.rows), positions, assume_unique=True)
            lacking.setdefault(absent, []).append(self._with_positions(source, rest) if len(rest) else source)
        records: list[FileRecord] = []
        for absent, sources in lacking.items():
            fills = [fill for fill in self.fills if fill.field_id in absent]
            target = self.target()
            if fills:
                # Not published: partitions and order may be those of the columns that are filled then.
                target = replace(target, spec_json=UNPARTITIONED_PARTITION_SPEC.model_dump_json(), sort_json=None)
            some = self._rest_of(Rewrite(target, NONE), sources)
            if fills and some:
                self._state.leftovers = True
                some = list(self.staged_again(some, self.schema, self.target(), fills))
            records += some
        return records

    def exchange(self, going: RowSet, records: Sequence[FileRecord]) -> None:
        """Remove rows of live files, and add staged files, whose rows may have the same keys."""
        self._decided = True
        incoming = tuple(record.path for record in records) if self.key else ()
        live = {file.path: file for file in self.working_files()}
        sources, dropped = [], 0
        for file, positions in going.by_file():
            if not self.key and len(positions) == file.rows:
                # No caller needs the removed rows: the file need not be opened.
                self._state.drop(live[file.path])
                dropped += file.rows
            else:
                source = InputFile.of(file, absent=absent_fields(file, self.fills, self.schema))
                sources.append(self._with_positions(source, positions))
        rewrite = Rewrite(self.target(), BY_POSITIONS, self.key, incoming=incoming, deletions=bool(self.key))
        result = self._runner.run(rewrite, sources)
        self._replace(result)
        self._state.add(records)
        replaced = sum(file.replaced for file in result.files)
        self._state.rows_added += sum(record.rows for record in records) - replaced
        self._state.rows_updated += replaced
        self._state.rows_deleted += dropped + sum(file.removed for file in result.files) - replaced

    def _with_positions(self, source: InputFile, positions: Numbers) -> InputFile:
        """The source with positions of its rows: in it if they are short, else in an object of the operation."""
        text = pack_positions(positions)
        if len(text) <= POSITIONS_BYTES_MAX:
            return replace(source, packed=(text,))
        self._state.leftovers = True
        location = join(self.folder, f"{clock.new_id()}.positions")
        # Crash here: a file in the operation's own folder; recovery deletes it.
        self._storage.put(location, text.encode())
        return replace(source, positions=(location,))

    def report_deleted(self, keys: pa.Table) -> None:
        """Record these keys as deleted by this commit, though no row has them any more."""
        self._decided = True
        writer = DeletionsWriter(self._storage, self.folder, self.schema, key_fields(self.schema), clock.new_id())
        try:
            # Crash here: at most a whole file in the operation's own folder; recovery deletes it.
            with self._storage.batch():
                writer.write(keys)
                record = writer.finish()
        except BaseException:
            writer.abandon()
            raise
        if record is not None:
            self._state.add_deletions([record])

    def reshape(self, schema: Schema, spec_id: int | None = None) -> None:
        """Give the table a schema and a partition spec that its metadata has, whether rows come or not."""
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
        """The files that the table has once this change is true, as planned so far."""
        base = [file for path, file in self._base().items() if path not in self._state.removed]
        return [*base, *self._staged(self._state.added.values())]

    def came_files(self) -> list[LiveFile]:
        """The files of rows that are new to the table, or that were not checked before they were added.

        All of them, if the table gets a shape that it did not have then: it may add a reference.
        """
        if self._state.reshaped:
            return self.working_files()
        staged = self._staged(self._state.added.values())
        return [file for file in staged if self._decided or file.fresh]

    def deleted_keys(self) -> list[str]:
        """The files of the keys that some step removed; a later step may have added them again."""
        return [record.path for record in self._state.deletions]

    def base_paths(self) -> set[str]:
        """The files at the head that was planned on."""
        return set(self._base())

    def came_meanwhile(self, head: Head) -> list[LiveFile]:
        """The files of a newer head that the planned head does not have."""
        return [file for file in live_files(self._files, head, self.schema) if file.path not in self._base()]

    def _base(self) -> dict[str, LiveFile]:
        if self._state.base is None:
            found = [] if self.head is None else live_files(self._files, self.head, self.schema)
            self._state.base = {file.path: file for file in found}
        return self._state.base

    def _staged(self, records: Iterable[FileRecord]) -> list[LiveFile]:
        return staged_files(records, self.metadata, self.schema, self.spec_id)

    def _replace(self, result: Result) -> None:
        """Add a rewrite's result to the plan."""
        live = {file.path: file for file in self.working_files()}
        for file in result.files:
            if file.removed:
                self._state.drop(live[file.path])
                self._state.add(file.records)
            elif file.unchanged and file.path in self._base():
                self._state.needed.add(file.path)
        self._state.add_deletions(result.deletions)

    def _evolve(self, schema: Schema) -> None:
        """From this step on the table has the shape of the step's rows."""
        if schema is not self.schema:
            self.schema, self.metadata = schema, add_schema(self.metadata, schema)

    def _edit(self, *, checked: bool) -> Edit:
        return self._state.edit(
            self.name, self.head, self.metadata, self.schema, self.spec_id, self._snapshot, checked=checked
        )

    # ── steps ──

    def take(self, step: WriteStep) -> None:
        """Apply a step to the working state. An error leaves the state as it was: the caller may go on without it."""
        before = self._state.copy(), self.schema, self.metadata
        try:
            step = self._shaped(step)
            self._apply(step)
        except BaseException:
            self._state, self.schema, self.metadata = before
            self._state.leftovers = True
            raise
        self._steps.append(step)

    def _shaped(self, step: WriteStep, *, anew: bool = False) -> WriteStep:
        """The step with its rows in the table's shape, extended by theirs; staged again if necessary.

        `anew`: the table's own shape may have changed since they were staged.
        """
        if step.verb == DELETE_KEYS and anew and step.spec_id != self.spec_id:
            return self._keys_again(step)
        if step.options.partial:
            return self._parts_shaped(step, anew=anew)
        # The usual case: the rows were staged for the very shape that the table has.
        if step.schema is None or (step.schema is step.planned is self.schema and step.spec_id == self.spec_id):
            return step
        source = translated(step.schema, step.planned or step.schema, self.schema)
        self._evolve(self.evolved(arrow_schema(source)) if step.options.evolve else self.schema)
        fits = step.schema == self.schema and step.spec_id == self.spec_id
        if fits or not (anew or step.options.evolve) or not step.incoming:
            return step
        # Columns that were added meanwhile are filled in rows that were sent before, or null.
        fills = lacking(self.fills, [field.name for field in source.fields])
        target = self.target(fill_missing=True)
        unfilled = target.without(tuple(fill.field_id for fill in fills))
        unfilled.conformer(arrow_schema(source)).problems.raise_invalid()
        check_required(step.incoming, source, self.schema)
        self._state.leftovers = True
        incoming = self.staged_again(step.incoming, source, target, fills)
        return replace(step, incoming=incoming, schema=self.schema, spec_id=self.spec_id, planned=self.own)

    def _parts_shaped(self, step: WriteStep, *, anew: bool) -> WriteStep:
        """The rows of a partial merge under the present ids of their columns; staged again if the ids changed."""
        sources = [translated(part.schema, step.planned or self.own, self.schema) for part in step.parts]
        for source in sources if step.options.evolve else ():
            self._evolve(self.evolved(arrow_schema(source)))
        parts = []
        for part, source in zip(step.parts, sources, strict=True):
            target, schema = self.part_target(self.schema, [column.name for column in source.fields])
            if (anew or step.options.evolve) and (part.schema != schema or step.spec_id != self.spec_id):
                target.conformer(arrow_schema(source)).problems.raise_invalid()
                check_required(part.records, source, schema)
                part = PartialRows(schema, self.staged_again(part.records, source, target, ()))
            parts.append(part)
        incoming = tuple(record for part in parts for record in part.records)
        return replace(step, incoming=incoming, parts=tuple(parts), spec_id=self.spec_id, planned=self.own)

    def _keys_again(self, step: WriteStep) -> WriteStep:
        """Keys that were staged in partitions of another spec, staged again."""
        keys = Schema(*key_fields(self.schema))
        incoming = self.staged_again(step.incoming, keys, self.keys_target(), ())
        return replace(step, incoming=incoming, spec_id=self.spec_id, planned=self.own)

    def _apply(self, step: WriteStep) -> None:
        if step.verb == MERGE:
            self._merge(step)
        elif step.verb == DELETE:
            self._remove(step)
        elif step.verb == DELETE_KEYS:
            self._delete_keys(step)
        elif step.verb == OVERWRITE:
            self._overwrite(step)
        elif step.verb == UPDATE:
            self._update(step)
        elif step.verb == RETAIN:
            self._retain(step)
        else:
            self._append(step)

    def _append(self, step: WriteStep) -> None:
        if self.key and step.incoming:
            self._check_unique(step)
            self._check_new(step)
        self._state.add(step.incoming)
        self._state.rows_added += step.rows

    def check_verb(self, verb: str) -> None:
        """Refuse what this table cannot do, before a row is staged for it."""
        if verb in (MERGE, DELETE_KEYS) and not self.key:
            raise refusals.no_key(self.name)
        referrers = referrers_of(self.metadata.properties) if verb == RETAIN else ()
        if referrers:
            raise refusals.referred_to(self.name, referrers[0].table)

    def _merge(self, step: WriteStep) -> None:
        if not step.incoming:
            return
        self._check_unique(step)
        result = self._runner.run(
            Rewrite(
                self.target(),
                BY_KEY,
                self.key,
                incoming=step.paths,
                compare=step.options.skip_unchanged,
                newest_by=step.options.newest_by,
                held=step.held,
                refilled=self._refilled(step.held),
            ),
            self._sources(self._may_hold(step, self.working_files())),
        )
        self._replace(result)
        cut: dict[int, list[str]] = {}
        for file in result.files:
            for number, packed in file.places:
                cut.setdefault(number, []).append(packed)
        if step.options.partial:
            self._add_parts(step, result, cut)
        else:
            self._state.add(self._without(step.incoming, cut))
        updated = sum(file.removed for file in result.files)
        same = sum(file.unchanged for file in result.files)
        self._state.rows_updated += updated
        self._state.rows_added += step.rows - updated - same

    def _add_parts(self, step: WriteStep, result: Result, matched: Mapping[int, Sequence[str]]) -> None:
        """Add the rows of a partial merge: the completed ones, and those that matched no row of the table."""
        # The files of the incoming columns are never published.
        self._state.leftovers = True
        lacking = _by_lacking(result.completed)
        number = 0
        for part in step.parts:
            absent = tuple(fill.field_id for fill in self.fills if fill.field_id not in part.held)
            new = self._new_rows(part, range(number, number + len(part.records)), matched)
            lacking.setdefault(absent, []).extend(self._stage_new(part, new, absent))
            number += len(part.records)
        self._add_filled(lacking)

    def _add_filled(self, lacking: Mapping[tuple[int, ...], list[FileRecord]]) -> None:
        """Add fresh files that lack some columns which expressions fill: with these columns."""
        for absent, records in lacking.items():
            fills = [fill for fill in self.fills if fill.field_id in absent]
            filled = self.staged_again(records, self.schema, self.target(), fills) if fills and records else records
            self._state.add(filled)

    def _new_rows(self, part: PartialRows, numbers: range, matched: Mapping[int, Sequence[str]]) -> list[InputFile]:
        """The files of a part that hold rows whose key the table does not have, without the others."""
        found = []
        for number, record in zip(numbers, part.records, strict=True):
            packed = tuple(matched.get(number, ()))
            if sum(len(unpack_positions(text)) for text in packed) < record.rows:
                found.append(InputFile(record.path, record.rows, record.size_bytes, None, True, packed=packed))
        return found

    def _stage_new(self, part: PartialRows, sources: Sequence[InputFile], absent: tuple[int, ...]) -> list[FileRecord]:
        """New rows of a partial merge as whole rows: columns that they lack are null, if the column allows it."""
        known = {*part.held, *absent}
        needed = [one.name for one in user_fields(self.schema) if one.required and one.field_id not in known]
        if sources and needed:
            raise refusals.new_rows_lack(self.name, needed, self._examples(sources[0]))
        target = self.target(fill_missing=True).without(absent)
        rewrite = Rewrite(target, BY_POSITIONS, source_schema_json=part.schema.model_dump_json())
        return self._rest_of(rewrite, sources)

    def _rest_of(self, rewrite: Rewrite, sources: Sequence[InputFile]) -> list[FileRecord]:
        """Stage the rows of the sources, without those at the positions that some of them name."""
        records = []
        for find in (NONE, BY_POSITIONS):
            some = [one for one in sources if bool(one.packed or one.positions) == (find == BY_POSITIONS)]
            result = self._runner.run(replace(rewrite, find=find), some)
            records += [record for file in result.files for record in file.records]
        return records

    def _examples(self, source: InputFile) -> str:
        taken = np.concatenate([np.empty(0, np.int64), *(unpack_positions(text) for text in source.packed)])
        new = np.setdiff1d(np.arange(source.rows), taken)[:3]
        return "; ".join(examples(self._storage, source.path, key_fields(self.schema), new))

    def _overwrite(self, step: WriteStep) -> None:
        if self.key and step.incoming:
            self._check_unique(step)
        self._check_inside(step)
        replaced = self._remove(step)
        if self.key and step.incoming:
            self._check_new(step)
        self._state.add(step.incoming)
        self._state.rows_added += step.rows - replaced
        self._state.rows_updated += replaced
        self._state.rows_deleted -= replaced

    def _remove(self, step: WriteStep) -> int:
        """Remove the rows that a condition matches; returns how many of them are added again under the same key."""
        where = self._where(step)
        self._runner.check(where, self.schema)
        files = self._may_match(where)
        whole = [file for file in files if where.must_match(file, self.metadata)]
        if not self.key:
            # No caller needs the removed rows: files that match as a whole need not be opened.
            for file in whole:
                self._state.drop(file)
            self._state.rows_deleted += sum(file.rows for file in whole)
        rewrite = Rewrite(
            self.target(),
            ALL,
            self.key,
            incoming=step.paths if self.key else (),
            where=where.text,
            deletions=bool(self.key),
            existed_in=tuple(self._state.removed),
        )
        results = [self._runner.run(rewrite, self._sources(whole) if self.key else [])]
        gone = {file.path for file in whole}
        rest = [file for file in files if file.path not in gone]
        results.append(self._remove_matching(replace(rewrite, find=BY_WHERE), where, rest))
        for result in results:
            self._replace(result)
        self._state.rows_deleted += sum(file.removed for result in results for file in result.files)
        return sum(file.replaced for result in results for file in result.files)

    def _may_match(self, where: Where) -> list[LiveFile]:
        """The working files that may hold a matching row. Those of the head, if many, are tested all at once."""
        base, working = self._base(), self.working_files()
        if self.head is None or len(base) <= ONE_BY_ONE_MAX:
            return [file for file in working if where.may_match(file, self.metadata)]
        selected = {file.path for file in select_files(self._files, self.head, self.schema, where).files}
        return [
            file
            for file in working
            if file.path in selected or (file.path not in base and where.may_match(file, self.metadata))
        ]

    def _update(self, step: WriteStep) -> None:
        """Give the rows that match new values; those that have them already stay as they are."""
        where, assignments = self._where(step), self.assignments(step.options.assigned)
        self._runner.check(where, self.schema)
        # The new values are files of this operation that its commit does not name.
        self._state.leftovers = True
        plan = AssignPlan(
            self._values_target([one.column for one in assignments]),
            self.name,
            where.text,
            assignments,
            self.schema.model_dump_json(),
        )
        files = self._may_match(where)
        sources = self._sources(files)
        assigned = self._runner.assign(plan, sources, arrow=True if has_renamed_columns(self.metadata) else None)
        held = (tuple(field.field_id for field in plan.columns),) * len(assigned.records)
        rewrite = Rewrite(
            self.target(),
            BY_PLACES,
            incoming=tuple(record.path for record in assigned.records),
            compare=True,
            held=held,
            refilled=self._refilled(held),
        )
        result = self._runner.run(rewrite, assigned.placed(sources))
        self._replace(result)
        self._add_filled(_by_lacking(result.completed))
        self._state.rows_updated += sum(file.removed for file in result.files)

    def _refilled(self, held: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """By incoming file with these columns: the columns whose expressions see new values. A key never changes."""
        keys = set(self.schema.identifier_field_ids)
        anew = {ids: computed_anew(self.fills, self.schema, set(ids) - keys) for ids in set(held)}
        return tuple(anew[ids] for ids in held)

    def assignments(self, assigned: Sequence[tuple[str, str]]) -> tuple[Assignment, ...]:
        """What an update assigns, by the table's own names; `Invalid` if it cannot be assigned."""
        return check_assigned(self.name, self.schema, assigned)

    def _values_target(self, names: Sequence[str]) -> StageTarget:
        """Where an update's new values are staged: these columns alone, in the order in which they are computed."""
        fields = [field.model_copy() for field in user_fields(self.schema) if field.name in names]
        return replace(
            self.target(),
            schema_json=Schema(*fields, schema_id=self.schema.schema_id).model_dump_json(),
            spec_json=UNPARTITIONED_PARTITION_SPEC.model_dump_json(),
            sort_json=None,
        )

    def _delete_keys(self, step: WriteStep) -> None:
        """Remove the rows that have one of these keys; a key that no row has changes nothing."""
        # The keys themselves are files of this operation that its commit does not name.
        self._state.leftovers = True
        held = {file.path for file in self._look_for_keys(step, self.working_files()).files if file.matched}
        files = [file for file in self.working_files() if file.path in held]
        rewrite = Rewrite(self.target(), BY_POSITIONS, self.key, deletions=True, existed_in=tuple(self._state.removed))
        result = self._runner.run(rewrite, rows_of_keys(self._storage, self._sources(files), step.paths, self.schema))
        self._replace(result)
        self._state.rows_deleted += sum(file.removed for file in result.files)

    def _where(self, step: WriteStep) -> Where:
        """The step's condition; only an overwrite may leave it out, and means everything then."""
        everything = step.options.where is None and step.verb == OVERWRITE
        return Where.everything() if everything else Where.parse(step.options.where or "", self.schema)

    def _remove_matching(self, rewrite: Rewrite, where: Where, files: Sequence[LiveFile]) -> Result:
        if where.plain or not files:
            return self._runner.run(rewrite, self._sources(files))
        found = self._find_positions(where, [file.path for file in files])
        sources = self._sources([file for file in files if file.path in found])
        sources = [replace(source, positions=tuple(found[source.path])) for source in sources]
        return self._runner.run(replace(rewrite, find=BY_POSITIONS), sources)

    def _find_positions(self, where: Where, paths: Sequence[str]) -> Mapping[str, Sequence[str]]:
        # The positions themselves are files of this operation that its commit does not name.
        self._state.leftovers = True
        arrow = True if has_renamed_columns(self.metadata) else None
        return self._runner.find_positions(where, paths, self.schema, self.folder, arrow=arrow)

    def _retain(self, step: WriteStep) -> None:
        """Remove the existing rows that the step's remover selects; no deletion is recorded for them."""
        if step.options.remover is None or self.head is None:
            raise Invalid("retention needs a rule and a table that exists", table=self.name)
        there = [file for path, file in self._base().items() if path not in self._state.removed]
        removed = step.options.remover.remove(self._at(self.head, there))
        for file in removed.dropped:
            self._state.drop(file)
        for result in removed.results:
            self._replace(result)
        self._state.rows_deleted += removed.rows

    def _at(self, head: Head, files: Sequence[LiveFile]) -> TableState:
        return TableState(head, self.metadata, self.schema, files, self._runner, self.target())

    # ── checks of what comes in ──

    def _check_unique(self, step: WriteStep) -> None:
        known = step.paths in self._unique
        twice = [] if known else find_duplicates(self._storage, step.paths, key_fields(self.schema))
        self._unique.add(step.paths)
        if twice:
            raise refusals.keys_twice(self.name, twice)

    def _check_new(self, step: WriteStep) -> None:
        """Check that no live row has an incoming key."""
        found = self._look_for_keys(step, self.working_files())
        if found.matched:
            raise refusals.keys_exist(self.name, found.matched, found.examples())

    def _look_for_keys(self, step: WriteStep, files: Sequence[LiveFile]) -> Result:
        rewrite = Rewrite(self.target(), BY_KEY, self.key, incoming=step.paths, look_only=True)
        return self._runner.run(rewrite, self._sources(self._may_hold(step, files)))

    def _check_inside(self, step: WriteStep) -> None:
        """Rows that overwrite a part of a table must belong to it: otherwise a second run would not replace them."""
        if step.options.where is None or not step.incoming:
            return
        where = Where.parse(step.options.where, self.schema)
        outside = step.rows - self._count_matching(where, self._staged(step.incoming))
        if outside:
            raise refusals.rows_outside(self.name, outside, step.options.where)

    def _count_matching(self, where: Where, files: Sequence[LiveFile]) -> int:
        rewrite = Rewrite(self.target(), BY_WHERE, where=where.text, look_only=True)
        return self._remove_matching(rewrite, where, files).matched

    # ── files of incoming rows ──

    def _may_hold(self, step: WriteStep, files: Sequence[LiveFile]) -> list[LiveFile]:
        """Those of the files that may hold an incoming key: by bounds, then by the key's index."""
        some = may_hold_keys(files, step.incoming, self.metadata, self.schema, self.spec_id)
        if self.head is None or not some:
            return some
        return self._means.holding_keys(self.head.table_id, some, step.paths, key_fields(self.schema))

    def _without(self, records: Sequence[FileRecord], unchanged: dict[int, list[str]]) -> list[FileRecord]:
        """The incoming files without the rows that the table already has unchanged."""
        kept = [record for number, record in enumerate(records) if number not in unchanged]
        if unchanged:
            self._state.leftovers = True
            cut = {records[number].path: tuple(packed) for number, packed in unchanged.items()}
            sources = self._sources([file for file in self._staged(records) if file.path in cut])
            sources = [replace(source, packed=cut[source.path]) for source in sources]
            result = self._runner.run(Rewrite(self.target(), BY_POSITIONS), sources)
            kept += [record for file in result.files for record in file.records]
        return kept

    # ── seal, look again, plan again ──

    def edit(self) -> Edit | None:
        """The edit that results from the steps; None if nothing. Steps that only read still need the check."""
        checked = self.head is not None and (bool(self.key) or any(step.verb != APPEND for step in self._steps))
        bound = self.strict or self.depended
        checked = checked or (bound and self.head is not None)
        if not (self._state.changed or self.head is None or bound or (checked and self._steps)):
            return None
        return self._edit(checked=checked)

    def riders(self) -> list[Rider]:
        """What the removers need to hold in the publish, if one follows."""
        removers = [
            step.options.remover for step in self._steps if step.options.remover is not None and self._state.changed
        ]
        return [rider for remover in removers for rider in remover.riders()]

    def recheck(self, head: Head) -> None:
        """The table is at another head than planned, with all files that were read: do the added rows matter?"""
        known = self._base()
        now = live_files(self._files, head, self.schema)
        came = [file for file in now if file.path not in known and file.path not in self._looked]
        for step in self._steps:
            if self.key and step.incoming and self._look_for_keys(step, came).matched:
                raise PlanAgain(self.name, "a row with one of these keys was added meanwhile")
            if step.verb in (DELETE, OVERWRITE, UPDATE) and self._came_inside(step, came):
                raise PlanAgain(self.name, "a row that the condition matches was added meanwhile")
            if step.options.remover is not None:
                step.options.remover.recheck(self._at(head, now))
        self._looked.update(file.path for file in came)

    def _came_inside(self, step: WriteStep, came: Sequence[LiveFile]) -> bool:
        where = self._where(step)
        files = [file for file in came if where.may_match(file, self.metadata)]
        if any(where.must_match(file, self.metadata) for file in files):
            return True
        return bool(self._count_matching(where, files))

    def plan_again(self, head: Head, metadata: TableMetadata) -> None:
        """Apply the steps again on the table's new head; rows staged for another shape are staged again first."""
        if self._decided or self.strict:
            raise Conflict("the table changed after this merge was planned", table=self.name, advice="Run it again.")
        self.head, self.metadata = head, metadata
        self.own = self.schema = schema_of(metadata, head)
        steps, self._steps, self._state, self._looked = (
            self._steps,
            [],
            WorkingFiles(self.folder, leftovers=True),
            set(),
        )
        for step in steps:
            self.take(self._again(step))

    def _again(self, step: WriteStep) -> WriteStep:
        """The step in the table's present shape. If it does not fit any more, the caller has to state it again."""
        try:
            self.check_verb(step.verb)
            planned = step.planned or self.own
            for text in (step.options.where, *itertools.chain.from_iterable(step.options.assigned)):
                if text is not None:
                    check_condition(text, planned, self.own)
            if step.options.newest_by:
                named = present_name(step.options.newest_by, planned, self.own)
                step = replace(step, options=replace(step.options, newest_by=named))
            return self._shaped(step, anew=True)
        except Invalid as error:
            if step.options.evolve:
                raise
            raise Conflict(
                "the table's shape changed during this write",
                table=self.name,
                cause=error,
                advice="Nothing was written. Run it again with rows for the table's new shape.",
            ) from error


def _by_lacking(completed: Iterable[Completed]) -> dict[tuple[int, ...], list[FileRecord]]:
    """Files of rows that were put together, by the columns that they still lack."""
    lacking: dict[tuple[int, ...], list[FileRecord]] = {}
    for one in completed:
        lacking.setdefault(one.lacking, []).extend(one.records)
    return lacking


def check_assigned(table: str, schema: Schema, assigned: Sequence[tuple[str, str]]) -> tuple[Assignment, ...]:
    """The assignments of an update by the names of the schema's columns; `Invalid` if they cannot be made."""
    if not assigned:
        raise refusals.no_assignment(table)
    columns, found = columns_by_name(Schema(*user_fields(schema))), []
    for name, expression in assigned:
        field = columns.get(name.lower())
        if field is None:
            raise refusals.no_column(table, name, [field.name for field in user_fields(schema)])
        if field.field_id in schema.identifier_field_ids:
            raise refusals.key_assigned(table, field.name)
        if not isinstance(expression, str) or not expression.strip():
            raise refusals.no_expression(table, field.name, expression)
        found.append(Assignment(field.name, expression))
    names = [one.column for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise refusals.assigned_twice(table, twice)
    return tuple(found)


def _cannot_fill(error: Invalid, table: str, fills: Sequence[Fill]) -> Invalid:
    """Rows fit the table, but a column cannot be computed for them: the error names the alternatives."""
    columns = ", ".join(fill.column for fill in fills)
    out = f"Send the column with the rows; `floodmark backfill unbind {table} COLUMN` lets all writers leave it out."
    facts = {**error.facts, "table": table, "filled": columns}
    return Invalid(error.message, advice=f"{error.advice} {out}".strip(), **facts)


# ── keys to delete ──


def keys_target(target: StageTarget, metadata: TableMetadata, schema: Schema, spec_id: int) -> StageTarget:
    """Where keys of a table are staged: its key columns alone, in its partitions if a key alone decides its own.

    These files are never named by the commit, which records as deleted only keys that existed; recovery deletes them.
    """
    fields = key_fields(schema)
    keys = Schema(*fields, identifier_field_ids=[field.field_id for field in fields])
    return replace(
        target,
        schema_json=keys.model_dump_json(),
        spec_json=_keys_spec(metadata.specs()[spec_id], schema).model_dump_json(),
        sort_json=None,
        fill_missing=False,
    )


def _keys_spec(spec: PartitionSpec, schema: Schema) -> PartitionSpec:
    key = set(schema.identifier_field_ids)
    sources = {field.source_id for field in spec.fields if not isinstance(field.transform, VoidTransform)}
    if not sources or not sources.issubset(key):
        return UNPARTITIONED_PARTITION_SPEC
    # A void field is null whatever its column is, which is not among the keys.
    fields = [
        field if field.source_id in key else field.model_copy(update={"source_id": min(key)}) for field in spec.fields
    ]
    return PartitionSpec(*fields, spec_id=spec.spec_id)


def rows_of_keys(storage: Storage, files: Sequence[InputFile], keys: Sequence[str], schema: Schema) -> list[InputFile]:
    """Those of `files` that hold one of the keys, with the positions of these rows: no more of them than keys."""
    known = KeySet(storage, keys, key_fields(schema))
    found = ((file, known.match(storage, file.path).positions) for file in files)
    return [replace(file, packed=(pack_positions(positions),)) for file, positions in found if len(positions)]
