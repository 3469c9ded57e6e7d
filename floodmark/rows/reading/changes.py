"""What changed in a table between two sequences: rows as upserts, and the keys that were deleted.

`plan_changes` is pure: of the files of one state and the table's deletions files it keeps those that may hold changes
of the range. The answer has every key at most once. A row of the range is always at least as new as a deletion of its
key in the range (the deletion removed the older row), so a row hides every deletion; of deletions, the newest counts. A
row above the range is not in the answer and hides nothing: a reader that follows gets it with the next range.

Spark and the caller's process return the same rows; Spark in no guaranteed order, the caller's process in that of the
plan's files, then deletions in an order of their own (I8). Neither holds them all: deletions are matched against keys
in chunks. A small DataFrame is read in the caller's process too: a job takes longer than the rows. A missing file is an
error, never fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField, PrimitiveType

from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt
from floodmark.model import BEGINNING, SEQ_COLUMN, DeletionsFile
from floodmark.rows.project import READ_BATCH_ROWS
from floodmark.rows.reading.arrow_reader import Between, arrow_batches, arrow_read_schema
from floodmark.rows.reading.scan import empty, quoted, scan_with_seq
from floodmark.rows.schema import spark_schema
from floodmark.rows.session import prepare
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGE_COLUMN = "_change"
UPSERT, DELETE = "upsert", "delete"
# A key's position among those that were read with it; no key column has this name.
_PLACE = "place"
KEY_CHUNK_ROWS = 500_000
KEY_CHUNK_BYTES = 64 * 1024 * 1024
# What is read sooner than a Spark job starts; each further file is one more round trip to object storage.
LITTLE_ROWS = 250_000
LITTLE_BYTES = 8 * 1024 * 1024
LITTLE_FILES = 32
LITTLE_ANSWER_BYTES = 32 * 1024 * 1024
# Keys that every executor can hold; bytes as they are in files.
BROADCAST_ROWS_MAX = 500_000
BROADCAST_BYTES_MAX = 8 * 1024 * 1024
# Deletions that one task reads sooner than several could exchange them.
ONE_TASK_FILES_MAX = 16


@dataclass(frozen=True)
class ChangePlan:
    """What to read for the changes of one table in (since, until]."""

    schema: Schema
    key: tuple[str, ...]
    since: int
    until: int
    files: tuple[LiveFile, ...]
    deletions: tuple[DeletionsFile, ...]

    @property
    def empty(self) -> bool:
        return not self.files and not self.deletions

    @property
    def rows_max(self) -> int:
        """An upper bound of the rows to read, and so of the answer's."""
        return sum(file.rows for file in self.files) + sum(file.rows for file in self.deletions)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files) + sum(file.size_bytes for file in self.deletions)

    @property
    def between(self) -> Between:
        return self.since, self.until


def plan_changes(
    schema: Schema, files: Iterable[LiveFile], deletions: Iterable[DeletionsFile], since: int | None, until: int
) -> ChangePlan:
    """The files of a state, and the deletions files of the table, that may hold changes in (since, until]."""
    since = BEGINNING if since is None else since
    key = _key(schema)
    return ChangePlan(
        schema,
        key,
        since,
        until,
        tuple(file for file in files if _may_hold(file, since, until)),
        tuple(file for file in deletions if key and since < file.sequence <= until),
    )


def changes_schema(plan: ChangePlan) -> pa.Schema:
    """The table's columns, then `_change` and `_seq`."""
    columns = arrow_read_schema(plan.schema, with_seq=False)
    return columns.append(pa.field(CHANGE_COLUMN, pa.string())).append(pa.field(SEQ_COLUMN, pa.int64()))


def _key(schema: Schema) -> tuple[str, ...]:
    ids = set(schema.identifier_field_ids)
    return tuple(field.name for field in schema.fields if field.field_id in ids)


def _may_hold(file: LiveFile, since: int, until: int) -> bool:
    if since >= until:
        return False
    if file.sequence is None and not file.settled:
        raise Corrupt("a file of a table's state has no sequence", file=file.path)
    bounds = file.seq_bounds()
    return bounds is None or (bounds[1] > since and bounds[0] <= until)


def _key_schema(plan: ChangePlan) -> Schema:
    """The key's columns under names that occur in no file, and `_seq`: Spark pushes conditions to files by name."""
    by_name = {field.name: field for field in plan.schema.fields}
    fields = [
        NestedField(by_name[name].field_id, f"key {number}", by_name[name].field_type, required=False)
        for number, name in enumerate(plan.key)
    ]
    return Schema(*fields, *(field for field in plan.schema.fields if field.name == SEQ_COLUMN))


def _key_names(plan: ChangePlan) -> list[str]:
    return [f"key {number}" for number in range(len(plan.key))]


def _files_of_keys(plan: ChangePlan) -> list[LiveFile]:
    """The files of the range, to read keys from: all rows of fresh ones are in it, whatever their sequences are."""
    return [replace(file, sequence=plan.until) if file.fresh else file for file in plan.files]


def _files_of_deletions(plan: ChangePlan) -> list[LiveFile]:
    """Deletions files as fresh data files with the sequence of their commit, newest first, then by location."""
    newest_first = sorted(plan.deletions, key=lambda file: (-file.sequence, file.location))
    return [
        LiveFile(
            DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=file.location,
                file_format=FileFormat.PARQUET,
                partition=Record(),
                record_count=file.rows,
                file_size_in_bytes=file.size_bytes,
            ),
            file.sequence,
            seq_id=None,
        )
        for file in newest_first
    ]


# ── in the caller's process ──


def changes_batches(storage: Storage, plan: ChangePlan, chunk_rows: int = KEY_CHUNK_ROWS) -> Iterator[pa.RecordBatch]:
    """The changes without Spark, batch by batch."""
    target = changes_schema(plan)
    for batch in arrow_batches(storage, plan.files, plan.schema, True, plan.between):
        change = pa.repeat(pa.scalar(UPSERT), len(batch))
        yield pa.RecordBatch.from_arrays([*batch.columns[:-1], change, batch.columns[-1]], schema=target)
    yield from deletions_batches(storage, plan, chunk_rows)


def deletions_batches(storage: Storage, plan: ChangePlan, chunk_rows: int = KEY_CHUNK_ROWS) -> Iterator[pa.RecordBatch]:
    """Only the deletions of the changes, in the same order every time, however they are read.

    The newest file first, files of one sequence by location, keys by their position: each where it comes first.
    """
    if plan.deletions:
        for keys in _deleted_keys(storage, plan, chunk_rows):
            yield from _as_deletions(keys, plan).to_batches(READ_BATCH_ROWS)


def _deleted_keys(storage: Storage, plan: ChangePlan, chunk_rows: int) -> Iterator[pa.Table]:
    """The keys whose newest change in the range is a deletion, each once, with its sequence, in their order."""
    names = _key_names(plan)
    keys = _key_schema(plan)

    def deletions() -> Iterator[pa.Table]:
        return _chunks(arrow_batches(storage, _files_of_deletions(plan), keys, True), chunk_rows)

    def rows() -> Iterator[pa.Table]:
        return _chunks(arrow_batches(storage, _files_of_keys(plan), keys, False, plan.between), chunk_rows)

    for number, chunk in enumerate(deletions()):
        # Chunks come newest first: what an earlier one has is newer, or the same.
        placed = chunk.append_column(_PLACE, pa.array(np.arange(len(chunk))))
        found = placed.group_by(names).aggregate([(SEQ_COLUMN, "max"), (_PLACE, "min")])
        found = found.rename_columns([*names, SEQ_COLUMN, _PLACE])
        for newer in chain(rows(), islice(deletions(), number)):
            if len(found):
                found = found.join(newer.select(names), keys=names, join_type="left anti")
        # Groups and joins keep no order.
        yield found.sort_by(_PLACE).drop_columns(_PLACE)


def _chunks(batches: Iterable[pa.RecordBatch], chunk_rows: int) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    rows, size_bytes = 0, 0
    for batch in batches:
        waiting.append(batch)
        rows, size_bytes = rows + len(batch), size_bytes + batch.nbytes
        if rows >= chunk_rows or size_bytes >= KEY_CHUNK_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size_bytes = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _as_deletions(keys: pa.Table, plan: ChangePlan) -> pa.Table:
    columns = dict(zip(plan.key, keys.columns, strict=False))
    columns[CHANGE_COLUMN] = pa.repeat(pa.scalar(DELETE), len(keys))
    columns[SEQ_COLUMN] = keys.column(SEQ_COLUMN)
    target = changes_schema(plan)
    arrays = [columns[field.name] if field.name in columns else pa.nulls(len(keys), field.type) for field in target]
    return pa.table(arrays, schema=target)


# ── in Spark ──


def changes_dataframe(
    spark: SparkSession,
    plan: ChangePlan,
    *,
    storage_options: Mapping[str, str] | None = None,
    arrow: bool | None = None,
) -> DataFrame:
    """The changes as a DataFrame.

    `arrow` forces or forbids Arrow tasks; by default the locations decide, and few changes are read here and now.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types

    table = spark_schema(plan.schema, all_nullable=True)
    extra = [types.StructField(CHANGE_COLUMN, types.StringType()), types.StructField(SEQ_COLUMN, types.LongType())]
    columns = types.StructType([*table, *extra])
    if plan.empty:
        return empty(spark, columns)
    if arrow is None and (found := _read_little(plan, storage_options)) is not None:
        prepare(spark)
        return spark.createDataFrame(found, columns)
    frames = []
    if plan.files:
        rows = scan_with_seq(
            spark, plan.files, plan.schema, between=plan.between, storage_options=storage_options, arrow=arrow
        )
        change = F.lit(UPSERT).alias(CHANGE_COLUMN)
        frames.append(rows.select(*(F.col(quoted(field.name)) for field in table), change, F.col(SEQ_COLUMN)))
    if plan.deletions:
        deleted = _deleted(spark, plan, storage_options, arrow)
        found = dict(zip(plan.key, map(F.col, _key_names(plan)), strict=True))
        found |= {CHANGE_COLUMN: F.lit(DELETE), SEQ_COLUMN: F.col(SEQ_COLUMN)}
        frames.append(
            deleted.select(
                *(found.get(field.name, F.lit(None).cast(field.dataType)).alias(field.name) for field in columns)
            )
        )
    return frames[0] if len(frames) == 1 else frames[0].union(frames[1])


def _read_little(plan: ChangePlan, storage_options: Mapping[str, str] | None) -> pa.Table | None:
    """The changes, if there is little to read and the result is small."""
    # PySpark takes plain columns from Arrow as they are, but converts nested ones in ways that lose some values.
    plain = all(isinstance(field.field_type, PrimitiveType) for field in plan.schema.fields)
    files = len(plan.files) + len(plan.deletions)
    if not plain or plan.rows_max > LITTLE_ROWS or plan.size_bytes > LITTLE_BYTES or files > LITTLE_FILES:
        return None
    batches, size_bytes = [], 0
    for batch in changes_batches(Storage(storage_options), plan):
        batches.append(batch)
        size_bytes += batch.nbytes
        if size_bytes > LITTLE_ANSWER_BYTES:
            return None
    return pa.Table.from_batches(batches, changes_schema(plan))


def _deleted(
    spark: SparkSession, plan: ChangePlan, storage_options: Mapping[str, str] | None, arrow: bool | None
) -> DataFrame:
    """The keys whose newest change in the range is a deletion, each once, with its sequence."""
    from pyspark.sql import functions as F

    names = _key_names(plan)
    keys = _key_schema(plan)
    files = _files_of_deletions(plan)
    deletions = scan_with_seq(spark, files, keys, storage_options=storage_options, arrow=arrow)
    few = _broadcastable(sum(file.rows for file in plan.deletions), sum(file.size_bytes for file in plan.deletions))
    together = deletions.coalesce(1) if few and len(files) <= ONE_TASK_FILES_MAX else deletions
    newest = together.groupBy(*names).agg(F.max(SEQ_COLUMN).alias(SEQ_COLUMN))
    if not plan.files:
        return newest
    rows = scan_with_seq(
        spark, _files_of_keys(plan), keys, between=plan.between, storage_options=storage_options, arrow=arrow
    ).select(*names)
    if _broadcastable(sum(file.rows for file in plan.files), _key_bytes(plan)):
        return newest.join(F.broadcast(rows), names, "left_anti")
    if few:
        # Many rows, few deletions: no row but those of deleted keys leaves its task.
        hits = rows.join(F.broadcast(deletions.select(*names)), names, "left_semi")
        return newest.join(F.broadcast(hits), names, "left_anti")
    return newest.join(rows, names, "left_anti")


def _broadcastable(rows: int, size_bytes: int) -> bool:
    return rows <= BROADCAST_ROWS_MAX and size_bytes <= BROADCAST_BYTES_MAX


def _key_bytes(plan: ChangePlan) -> int:
    ids = [field.field_id for field in plan.schema.fields if field.name in plan.key]
    total = 0
    for file in plan.files:
        sizes = file.data_file.column_sizes or {}
        total += sum(sizes[at] for at in ids) if all(at in sizes for at in ids) else file.size_bytes
    return total
