"""The rows of a unit as data files of another table that nothing refers to yet, and the deleted keys as files of keys.

Few rows are staged in the caller's process, many as Spark tasks, piece by piece; both run the same function. Only
returned records count (I3): a task that died or ran twice leaves files in the attempt's own folder, which are deleted
once the unit is committed. Rows that the table cannot hold are Invalid, by column. Memory follows the batch (I14).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema

from floodmark import clock
from floodmark.catalog.unit import Watch
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Invalid
from floodmark.model import SEQ_COLUMN, FileRecord
from floodmark.rows.misfits import Misfits
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE
from floodmark.rows.reading.shipment import Piece, Shipment
from floodmark.rows.rewriting.rewrite import BY_KEY, InputFile, Rewrite
from floodmark.rows.rewriting.runner import Runner
from floodmark.rows.session import Sessions
from floodmark.rows.staging.deletions import DeletionsWriter
from floodmark.rows.staging.stage import StageTarget, stage_batches
from floodmark.rows.tasks import run_tasks
from floodmark.storage import Storage
from floodmark.write.prune import may_hold_keys

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata

# The approximate size of one task.
PIECE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class StagedUnit:
    """`records` hold rows, `keys` the deleted keys; `rows` counts both."""

    records: tuple[FileRecord, ...] = ()
    keys: tuple[FileRecord, ...] = ()
    rows: int = 0
    deletions: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.records)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(record.path for record in (*self.records, *self.keys))

    def __add__(self, other: StagedUnit) -> StagedUnit:
        return StagedUnit(
            (*self.records, *other.records),
            (*self.keys, *other.keys),
            self.rows + other.rows,
            self.deletions + other.deletions,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StagedUnit:
        values = json.loads(text)
        records, keys = (tuple(map(FileRecord.from_dict, values[name])) for name in ("records", "keys"))
        return cls(records, keys, values["rows"], values["deletions"])


def shipped_columns(shipment: Shipment) -> pa.Schema:
    """The columns of a unit's rows, without those that describe the change."""
    return pa.schema([field for field in shipment.schema if field.name not in (CHANGE_COLUMN, SEQ_COLUMN)])


def stage_unit(
    shipment: Shipment,
    source: Storage,
    target: StageTarget,
    storage: Storage,
    sessions: Sessions,
    tag: str,
    watch: Watch,
) -> StagedUnit:
    """Stage the rows of a unit for the target's table; every file is durable when this returns."""
    target.conformer(shipped_columns(shipment)).problems.raise_invalid()
    key = shipment.key
    if shipment.is_little:
        return _stage_here(shipment.batches(source), target, key, storage, watch)
    pieces = shipment.pieces(PIECE_BYTES)
    options = source.options

    def work(task: str) -> Iterator[str]:
        batches = Piece.from_json(task).batches(Storage(options))
        yield _stage(batches, target, key, Storage(target.storage_options), in_task=True).to_json()

    # The largest first: the last task to start should not be the longest.
    rows = sorted((piece for piece in pieces if not piece.has_deletions), key=lambda piece: -piece.size_bytes)
    tasks = [piece.to_json() for piece in rows]
    staged = StagedUnit()
    for text in run_tasks(sessions.get(), work, tasks, tag=tag, message="Spark could not stage the unit's rows"):
        staged += StagedUnit.from_json(text)
    watch.progress(staged.rows, staged.size_bytes)
    for piece in pieces:
        if piece.has_deletions:
            staged += _stage_here(piece.batches(source), target, key, storage, watch)
    return staged


def _stage_here(
    batches: Iterable[pa.RecordBatch], target: StageTarget, key: Sequence[str], storage: Storage, watch: Watch
) -> StagedUnit:
    def watched() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            watch.check()
            yield batch
            watch.progress(len(batch), batch.nbytes)

    return _stage(watched(), target, key, storage)


def _stage(
    batches: Iterable[pa.RecordBatch],
    target: StageTarget,
    key: Sequence[str],
    storage: Storage,
    *,
    in_task: bool = False,
) -> StagedUnit:
    schema = Schema.model_validate_json(target.schema_json)
    fields = [schema.find_field(name) for name in key]
    name = clock.new_id()
    keys = DeletionsWriter(storage, target.folder, schema, fields, name) if fields else None
    counted = 0

    def upserts() -> Iterator[pa.RecordBatch]:
        nonlocal counted
        for batch in batches:
            counted += len(batch)
            deleted = pc.equal(batch.column(CHANGE_COLUMN), DELETE)
            if keys is not None and pc.any(deleted).as_py():
                keys.write(batch.filter(deleted).select(list(key)))
                batch = batch.filter(pc.invert(deleted))
            yield batch.drop_columns([CHANGE_COLUMN, SEQ_COLUMN])

    try:
        staged = stage_batches(target, upserts(), name, storage=storage, in_task=in_task)
        Misfits(staged.problems).raise_invalid()
        deleted = keys.finish() if keys is not None else None
    except BaseException:
        if keys is not None:
            keys.abandon()
        raise
    gone = () if deleted is None else (deleted,)
    return StagedUnit(staged.records, gone, counted, sum(record.rows for record in gone))


def merge_by_key(
    staged: StagedUnit,
    files: Sequence[LiveFile],
    metadata: TableMetadata,
    target: StageTarget,
    key: Sequence[str],
    runner: Runner,
) -> tuple[tuple[FileRecord, ...], tuple[LiveFile, ...]]:
    """The files that hold one of the unit's keys, and the files that replace them.

    `metadata` has the schema that the rows were staged for. Rows that stay are copied unchanged.
    """
    schema = metadata.schema()
    ids = [schema.find_field(name).field_id for name in key]
    # By the lake's key, whatever key the table declares.
    keyed = schema.model_copy(update={"identifier_field_ids": ids})
    # Files of keys have no partition.
    unparted = metadata.model_copy(update={"partition_specs": [UNPARTITIONED_PARTITION_SPEC]})
    found = {
        file.path: file
        for file in (
            *may_hold_keys(files, staged.records, metadata, keyed, metadata.default_spec_id),
            *may_hold_keys(files, staged.keys, unparted, keyed, UNPARTITIONED_PARTITION_SPEC.spec_id),
        )
    }
    check_parquet(found.values())
    # Without a sequence: a table outside a lake has no column for those of its rows.
    sources = [InputFile(file.path, file.rows, file.size_bytes, None, True) for file in found.values()]
    result = runner.run(Rewrite(target, BY_KEY, tuple(key), incoming=staged.paths), sources)
    carried = tuple(record for file in result.files for record in file.records)
    return carried, tuple(found[file.path] for file in result.files if file.removed)


def check_parquet(files: Iterable[LiveFile]) -> None:
    for file in files:
        if str(file.data_file.file_format).upper().rpartition(".")[2] != "PARQUET":
            raise Invalid(
                "a file of the destination's table is not Parquet",
                file=file.path,
                advice="Rewrite it as Parquet with the engine that wrote it, then run the sink again.",
            )
