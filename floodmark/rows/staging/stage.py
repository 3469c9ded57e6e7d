"""Stage rows: new data files that nothing refers to yet, and their records.

One function writes (`stage_batches`); it runs on executors for DataFrames and in the caller's process for data in
memory. Only the records that came back count (I3): a task that died, was repeated or ran twice at once leaves files in
the operation's folder that no record names, and attempts never share names. Rows that do not fit write nothing that
counts: problems come back as records too, are added up, and raised as one `Invalid`. If the driver stops waiting, the
job's tasks are stopped by their tag. A crash leaves files that recovery deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortDirection, SortOrder

from floodmark import clock, failpoints
from floodmark.errors import Corrupt, Invalid
from floodmark.model import TARGET_FILE_BYTES, FileRecord
from floodmark.rows.convert import Conformer, Shape, table_shape
from floodmark.rows.failures import spark_job
from floodmark.rows.frames import PandasFrame, RowsLike, is_dataframe
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.schema import arrow_type
from floodmark.rows.session import SharedSettings
from floodmark.rows.staging.dicts import rows_schema, rows_to_table
from floodmark.rows.staging.file_options import FileOptions
from floodmark.rows.staging.partition import Splitter, parse_spec
from floodmark.rows.staging.statistics import leaves
from floodmark.rows.staging.writer import DataWriter
from floodmark.rows.tasks import collect_tagged
from floodmark.rows.translate import struct_from_spark
from floodmark.storage import Held, OutputStream, Storage, join

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.table.metadata import TableMetadata
    from pyspark.sql import DataFrame

_BATCH_BYTES_MAX = 8 * 1024 * 1024
_BATCH_ROWS_MAX = 128 * 1024
_RESULT_SCHEMA = "part int, problem boolean, body string"
_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_SPARK_DEFAULTS = {_ROWS: "10000", _BYTES: "67108864b"}
# Spark weighs every row it packs if a batch is limited by bytes, which halves the speed of narrow rows. So rows of
# numbers are limited by count alone, text by a smaller count, and only types that may be big by their bytes.
_NUMBERS = {_ROWS: "65536", _BYTES: str(2**31 - 1)}
_TEXT = {_ROWS: "4096", _BYTES: str(2**31 - 1)}
_BIG = {_ROWS: "4096", _BYTES: str(32 * 1024 * 1024)}


@dataclass(frozen=True)
class StageTarget:
    """Where and how to stage rows of one table: plain values, so that it can be sent to executors."""

    folder: str
    schema_json: str
    spec_json: str
    sort_json: str | None = None
    properties: dict[str, str] = field(default_factory=dict)
    target_file_bytes: int = TARGET_FILE_BYTES
    storage_options: dict[str, str] = field(default_factory=dict)
    # The rows bring their sequences in a column `_seq`, and the files keep it.
    settled: bool = False
    # Optional columns that the rows do not have are null.
    fill_missing: bool = False

    @classmethod
    def of(
        cls,
        metadata: TableMetadata,
        folder: str,
        storage: Storage,
        *,
        schema: Schema | None = None,
        spec: PartitionSpec | None = None,
        sort: SortOrder | None = None,
        settled: bool = False,
        fill_missing: bool = False,
    ) -> StageTarget:
        """For a table as its metadata describes it, or with another schema, spec or order."""
        return cls(
            folder=folder,
            schema_json=(metadata.schema() if schema is None else schema).model_dump_json(),
            spec_json=(metadata.spec() if spec is None else spec).model_dump_json(),
            sort_json=(metadata.sort_order() if sort is None else sort).model_dump_json(),
            properties=dict(metadata.properties),
            storage_options=storage.options,
            settled=settled,
            fill_missing=fill_missing,
        )

    @classmethod
    def to_read(cls, schema: Schema, storage: Storage) -> StageTarget:
        """For rewrites that only look at rows: nothing is staged."""
        return cls("", schema.model_dump_json(), "", storage_options=storage.options)

    def without(self, field_ids: tuple[int, ...]) -> StageTarget:
        """The same for files without these columns."""
        return replace(self, schema_json=_schema_without(self.schema_json, field_ids)) if field_ids else self

    def shape(self) -> Shape:
        return table_shape(self.schema_json, self.settled)

    def conformer(self, source: pa.Schema) -> Conformer:
        return Conformer(self.shape(), source, self.fill_missing)

    def options(self, shape: Shape) -> FileOptions:
        sort = SortOrder.model_validate_json(self.sort_json) if self.sort_json else SortOrder()
        return FileOptions.of(
            self.properties,
            target_file_bytes=self.target_file_bytes,
            sort=_sort_keys(sort, shape),
            key=_key_columns(shape),
        )


@lru_cache(maxsize=256)
def _schema_without(schema_json: str, field_ids: tuple[int, ...]) -> str:
    schema = table_shape(schema_json).schema
    kept = [column for column in schema.fields if column.field_id not in field_ids]
    # Rows of an older file, before a column of a newer key is computed for them.
    keys = [field_id for field_id in schema.identifier_field_ids if field_id not in field_ids]
    return Schema(*kept, schema_id=schema.schema_id, identifier_field_ids=keys).model_dump_json()


@dataclass(frozen=True)
class Staged:
    """What one task staged. With problems, its records do not count."""

    records: tuple[FileRecord, ...] = ()
    problems: tuple[Problem, ...] = ()
    rows: int = 0


def _sort_keys(order: SortOrder, shape: Shape) -> tuple[tuple[str, str], ...]:
    names = {column.field_id: at for at, column in enumerate(shape.fields)}
    return tuple(
        (
            shape.file_schema.field(names[key.source_id]).name,
            "descending" if key.direction == SortDirection.DESC else "ascending",
        )
        for key in order.fields
        if key.source_id in names
    )


def _key_columns(shape: Shape) -> tuple[str, ...]:
    """The key's columns, by their names in files."""
    ids = set(shape.schema.identifier_field_ids)
    return tuple(
        column.name for column, field in zip(shape.file_schema, shape.fields, strict=True) if field.field_id in ids
    )


def stage_batches(
    target: StageTarget,
    batches: Iterable[pa.RecordBatch],
    task_name: str,
    *,
    storage: Storage | None = None,
    in_task: bool = False,
    held: Held | None = None,
) -> Staged:
    """Write the batches as data files of the target. When this returns, all of them are durable, or in `held`."""
    storage = storage or Storage(target.storage_options)
    shape = target.shape()
    problems = Misfits()
    names = (f"{task_name}-{number:05d}.parquet" for number in range(1_000_000))
    # One barrier for all files.
    own = Held()
    writer = DataWriter(
        _HeldFiles(storage, own),
        shape,
        Splitter(parse_spec(target.spec_json), shape),
        target.options(shape),
        leaves(target.schema_json, target.settled),
        lambda: join(target.folder, next(names)),
    )
    try:
        for batch in _conformed(target, batches, problems):
            if problems:
                writer.abandon()
            elif batch is not None:
                writer.write(batch)
        records = [] if problems else writer.finish()
    except BaseException:
        writer.abandon()
        own.drop()
        raise
    if held is not None:
        held.add(*own.take())
    if held is None or held.is_full:
        storage.end(held or own)
    for _ in records if in_task else ():
        # Crash here, in a task: whole files that no record names.
        failpoints.hit("task.file_written")
    if not problems and sum(record.rows for record in records) != writer.rows:
        raise Corrupt("the staged files do not have the rows that were written", rows=writer.rows, folder=target.folder)
    return Staged(tuple(records), problems.all(), writer.rows)


@dataclass(frozen=True)
class _HeldFiles:
    """A store for a writer: its files wait in `held`."""

    storage: Storage
    held: Held

    def writer(self, location: str) -> AbstractContextManager[OutputStream]:
        return self.storage.writer(location, self.held)


def _conformed(
    target: StageTarget, batches: Iterable[pa.RecordBatch], problems: Misfits
) -> Iterator[pa.RecordBatch | None]:
    conformer: Conformer | None = None
    for batch in batches:
        if conformer is None or not batch.schema.equals(conformer.source):
            conformer = target.conformer(batch.schema)
        if len(batch) or conformer.problems:
            yield conformer.conform(batch, problems)


def stage_in_process(
    target: StageTarget, data: RowsLike, storage: Storage, held: Held | None = None
) -> list[FileRecord]:
    """Stage an Arrow table, batch or reader, a pandas DataFrame or a list of dicts, without Spark."""
    schema, batches = in_memory_batches(data, target.shape())
    # An input without rows is still checked: an error about a wrong column must not wait for the first row.
    target.conformer(schema).problems.raise_invalid()
    staged = stage_batches(target, _cut(batches), clock.new_id(), storage=storage, held=held)
    Misfits(staged.problems).raise_invalid()
    return list(staged.records)


def incoming_schema(data: RowsLike, shape: Shape) -> tuple[pa.Schema, RowsLike]:
    """The columns of rows in any form that can be staged, and the rows: stage these, the given ones may be used up.

    Only data in memory is read. Rows without types (dicts) get the table's, and their own where they are new; pandas'
    nanoseconds count as microseconds, which staging then checks value by value.
    """
    if is_dataframe(data):
        return _dataframe_schema(data), data
    if isinstance(data, list | tuple):
        return rows_schema(data, shape), data
    rows = _arrow(data)
    if _is_pandas(data):
        return pa.schema([pa.field(column.name, _in_microseconds(column.type)) for column in rows.schema]), rows
    return rows.schema, rows


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", tz=kind.tz) if pa.types.is_timestamp(kind) else kind


def in_memory_batches(data: RowsLike, shape: Shape) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    rows = _arrow(rows_to_table(data, shape) if isinstance(data, list | tuple) else data)
    if isinstance(rows, pa.RecordBatch):
        return rows.schema, [rows]
    return rows.schema, rows.to_batches() if isinstance(rows, pa.Table) else rows


def _is_pandas(data: RowsLike) -> TypeGuard[PandasFrame]:
    return type(data).__module__.split(".")[0] == "pandas" and hasattr(data, "columns")


def _arrow(data: RowsLike) -> pa.Table | pa.RecordBatch | pa.RecordBatchReader:
    """The same rows as an Arrow table, batch or reader."""
    if _is_pandas(data):
        return _from_pandas(data)
    if isinstance(data, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return data
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data)
    raise Invalid(
        "unsupported data type",
        given=type(data).__name__,
        advice="Send a Spark DataFrame, an Arrow table or reader, a pandas DataFrame or a list of dicts.",
    )


def _from_pandas(frame: PandasFrame) -> pa.Table:
    """The frame's columns as Arrow; its index is not a column. Missing values of pandas (NaN too) are null."""
    arrays, names = [], []
    for name, column in frame.items():
        names.append(str(name))
        try:
            arrays.append(pa.Array.from_pandas(column))
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise Invalid(
                "this pandas column mixes types", column=name, cause=error, advice="Give its values one type."
            ) from error
    return pa.table(arrays, names=names)


def _cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in pieces of bounded size, without copying."""
    for batch in batches:
        pieces = max(1, -(-len(batch) // _BATCH_ROWS_MAX), -(-batch.nbytes // _BATCH_BYTES_MAX))
        rows = max(1, -(-len(batch) // pieces))
        for start in range(0, max(1, len(batch)), rows):
            yield batch.slice(start, rows)


def stage_dataframe(target: StageTarget, df: DataFrame, operation_id: str) -> list[FileRecord]:
    """Stage a Spark DataFrame with tasks on its executors; the driver keeps the records only."""
    names = check_dataframe(target, df)
    # By position from here on: a name may hold a dot, or differ from another only in its case.
    plain = df.toDF(*(f"c{position}" for position in range(len(names))))

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _stage_task(target, names, batches)

    return [record for _, record in run_stage_tasks(target, plain, stage, operation_id)]


def run_stage_tasks(
    target: StageTarget,
    rows: DataFrame,
    stage: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    operation_id: str,
) -> list[tuple[int, FileRecord]]:
    """Run tasks that end in `task_report`: the files that they staged, by path, each with the number of its part."""
    with batch_size(rows):
        found = collect_tagged(
            rows.mapInArrow(stage, _RESULT_SCHEMA), f"floodmark-{operation_id}", "Spark could not stage the rows"
        )
    Misfits(Problem.from_json(row["body"]) for row in found if row["problem"]).raise_invalid()
    records = [(int(row["part"]), FileRecord.from_json(row["body"])) for row in found]
    if len({record.path for _, record in records}) != len(records):
        raise Corrupt("two tasks wrote a file of the same name", folder=target.folder)
    return sorted(records, key=lambda one: one[1].path)


def check_dataframe(target: StageTarget, df: DataFrame) -> list[str]:
    """The DataFrame's column names, or `Invalid` if its columns cannot fit the table; runs no job."""
    source = _dataframe_schema(df)
    target.conformer(source).problems.raise_invalid()
    return list(source.names)


def _dataframe_schema(df: DataFrame) -> pa.Schema:
    struct = struct_from_spark(df.schema.jsonValue())
    return pa.schema([pa.field(column.name, arrow_type(column.field_type)) for column in struct.fields])


def _stage_task(target: StageTarget, names: list[str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    named = (batch.rename_columns(names) for batch in batches)
    staged = stage_batches(target, named, f"{task_name()}{clock.new_id()}", in_task=True)
    yield from task_report(0, staged)


def task_report(part: int, staged: Staged) -> Iterator[pa.RecordBatch]:
    """The report of a task on a part: its problems, or else its files; empty if it had no rows."""
    bodies = [one.to_json() for one in staged.problems or staged.records]
    count, problem = len(bodies), bool(staged.problems)
    if bodies:
        yield pa.RecordBatch.from_arrays(
            [pa.array([part] * count, pa.int32()), pa.array([problem] * count), pa.array(bodies, pa.string())],
            names=["part", "problem", "body"],
        )


def task_name() -> str:
    """The prefix of file names in a task: it leads from a file to its task in Spark's log."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return f"{context.partitionId():05d}-{context.taskAttemptId()}-" if context is not None else ""


@contextmanager
def batch_size(df: DataFrame) -> Iterator[None]:
    """Set sizes of Arrow batches that suit the DataFrame's columns, unless the user set them; restored at the end."""
    spark = df.sparkSession
    # Before the job begins already: an unreachable Connect server does not answer queries of settings either.
    with spark_job(spark, "Spark could not stage the rows"), _BATCH_SIZES.held(spark, _sizes_for(df)):
        yield


def _sizes_for(df: DataFrame) -> dict[str, str]:
    kinds = [field.dataType for field in df.schema.fields]
    if any(kind.typeName() in ("binary", "array", "map", "struct") for kind in kinds):
        return _BIG
    return _TEXT if any(kind.typeName() == "string" for kind in kinds) else _NUMBERS


# While jobs of different kinds run, the smallest limit of any of them applies to all. A value that the user set stays.
_BATCH_SIZES = SharedSettings(
    keeps=lambda key, value: value != _SPARK_DEFAULTS[key], choose=lambda limits: min(limits, key=int)
)
