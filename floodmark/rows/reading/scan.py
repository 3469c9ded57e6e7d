"""Read data files as a DataFrame: the planned list, matched by field id, without listing folders.

Spark's own Parquet reader where Spark can reach the files; Arrow tasks over the same list where it cannot (object
storage without Hadoop's connector). Both give the table's columns in the table's order, all of them nullable, since
files older than a column do not have it. A missing or damaged file of the list is an error, never fewer rows.

With sequences, a settled file has its own, so that filters on them reach its row groups; the rows of other files get
their file's, by the file's name if there is more than one. A condition and columns go to where the rows are read: Spark
pushes them into its own scan, and Arrow tasks get them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
from pyiceberg.schema import Schema

from floodmark.errors import Corrupt
from floodmark.model import SEQ_COLUMN
from floodmark.rows.convert import table_shape
from floodmark.rows.failures import spark_failures
from floodmark.rows.reading.arrow_reader import Between, RowsWanted, read_wanted
from floodmark.rows.schema import spark_schema, user_fields
from floodmark.rows.session import LISTED_BY_DRIVER, SharedSettings, prepare
from floodmark.rows.stall import is_connect
from floodmark.storage import Storage, local_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

SCAN_TASKS_MAX = 256
LOOKUP_BY_VALUE_MAX = 32
# A file's name as Spark reports it is the one in the list only if it has no character that could be encoded.
_SAFE_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LISTING = SharedSettings(keeps=lambda key, value: value == LISTED_BY_DRIVER[key], choose=lambda values: values[0])
# Columns of the lookup; no table has these names.
_FILE, _INHERITED = "_file", "_pos"
_READ_OPTIONS = {
    "mergeSchema": "false",
    # Paths are names, not patterns, and folder names like day=3 are not columns.
    "__globPaths__": "false",
    "recursiveFileLookup": "true",
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    # Files mean what they contain: days and microseconds of the Gregorian calendar.
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}


class Sequenced(Protocol):
    """A file whose rows have sequences: none of them its own (fresh), all of them (settled), or unknown."""

    @property
    def path(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def sequence(self) -> int | None: ...

    @property
    def fresh(self) -> bool: ...

    @property
    def settled(self) -> bool: ...


def scan(
    spark: SparkSession,
    files: Sequence[str],
    schema: Schema,
    with_seq: bool = False,
    *,
    wanted: RowsWanted | None = None,
    sizes: Mapping[str, int] | None = None,
    storage_options: Mapping[str, str] | None = None,
    arrow: bool | None = None,
) -> DataFrame:
    """The rows of these data files. `arrow` forces or forbids Arrow tasks; by default the locations decide.

    `with_seq` adds `_seq` as the files have it: null where a row inherits it. Of `wanted`, tasks read what they can do
    without; the caller selects rows and columns all the same. `sizes` of files, where known, save a request for each.
    """
    prepare(spark)
    columns = _columns(schema, with_seq)
    if not files:
        return empty(spark, columns)
    if by_tasks(spark, files, arrow):
        found = replace(wanted or RowsWanted(), with_seq=with_seq)
        listed = [(file, None, (sizes or {}).get(file)) for file in files]
        return _scan_arrow(spark, listed, schema, columns, storage_options, found)
    return _read(spark, files, columns)


def scan_with_seq(
    spark: SparkSession,
    files: Sequence[Sequenced],
    schema: Schema,
    *,
    between: Between | None = None,
    wanted: RowsWanted | None = None,
    storage_options: Mapping[str, str] | None = None,
    arrow: bool | None = None,
) -> DataFrame:
    """The rows of these files and, last, the sequence of each: its own, else its file's.

    With `between`, only rows of that range; fresh files outside of it must not be in the list. Arrow tasks are also
    used where Spark cannot distinguish the files by their names. `wanted`: as of `scan`.
    """
    prepare(spark)
    columns = _columns(schema, with_seq=True, always=True)
    if not files:
        return empty(spark, columns)
    settled = [file for file in files if file.settled]
    inheriting = [file for file in files if not file.settled]
    if by_tasks(spark, [file.path for file in files], arrow) or not _distinct(inheriting):
        listed = [(file.path, file.sequence, file.size_bytes) for file in files]
        found = replace(wanted or RowsWanted(), with_seq=True, between=between)
        return _scan_arrow(spark, listed, schema, columns, storage_options, found)
    frames = []
    if settled:
        # The filter is on the column of the file, so that Spark skips row groups by it.
        rows = _read(spark, [file.path for file in settled], columns)
        frames.append(rows if between is None else rows.filter(_in_range(between)))
    if inheriting:
        frames.append(_scan_inheriting(spark, inheriting, schema, between))
    return frames[0] if len(frames) == 1 else frames[0].union(frames[1])


def empty(spark: SparkSession, columns: StructType) -> DataFrame:
    """No rows of these columns; reading them runs no job."""
    from pyspark.sql import functions as F

    nothing = spark.range(0).filter(F.lit(False))
    return nothing.select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in columns))


def quoted(name: str) -> str:
    """A column's name as Spark takes it, whatever characters it has."""
    return "`{}`".format(name.replace("`", "``"))


def _columns(schema: Schema, with_seq: bool, always: bool = False) -> StructType:
    """The table's columns for Spark, `_seq` last; `always` also in a table that does not have it yet."""
    from pyspark.sql import types as spark

    columns = spark_schema(schema, all_nullable=True)
    if not with_seq:
        return columns
    own = [field for field in spark_schema(schema, True, all_nullable=True) if field.name == SEQ_COLUMN]
    if always and not own:
        own = [spark.StructField(SEQ_COLUMN, spark.LongType())]
    return spark.StructType([*columns, *own])


def _read(spark: SparkSession, files: Sequence[str], columns: StructType) -> DataFrame:
    for file in files:
        _check_not_empty(file)
    with spark_failures("Spark could not read the table's files", lake_files=True), _listed_by_driver(spark):
        return spark.read.schema(columns).options(**_READ_OPTIONS).parquet(*files)


@contextmanager
def _listed_by_driver(spark: SparkSession) -> Iterator[None]:
    """No Spark job lists the files, also in a session that is not ours: by default one does for more than 32."""
    if is_connect(spark):
        # There a frame lists its files whenever it is used: the setting stays.
        for key, value in LISTED_BY_DRIVER.items():
            spark.conf.set(key, value)
        yield
        return
    with _LISTING.held(spark, LISTED_BY_DRIVER):
        yield


def _check_not_empty(file: str) -> None:
    """Spark silently skips a file of no bytes, and every data file has a footer. Missing files it reports itself."""
    path = local_path(file)
    if path is not None and os.path.exists(path) and os.path.getsize(path) == 0:
        raise Corrupt(
            "a data file of the lake is missing or damaged",
            file=file,
            cause="it has no bytes",
            advice="Run `floodmark doctor --deep`; restore the file from a copy.",
        )


def by_tasks(spark: SparkSession, files: Sequence[str], arrow: bool | None) -> bool:
    """Whether Arrow tasks read these files; else Spark does."""
    if arrow is None:
        return any(local_path(file) is None for file in files) and not _has_connector(spark)
    return arrow


def _has_connector(spark: SparkSession) -> bool:
    return spark.conf.get("spark.hadoop.fs.s3.impl", None) is not None


def _name(file: Sequenced) -> str:
    return file.path.rpartition("/")[2]


def _distinct(files: Sequence[Sequenced]) -> bool:
    """Whether the sequence of every row is known from its file's name, or is the same for all."""
    if len({file.sequence for file in files}) <= 1:
        return True
    names = {_name(file) for file in files}
    return len(names) == len(files) and all(_SAFE_NAME.fullmatch(name) for name in names)


def _in_range(between: Between) -> Column:
    from pyspark.sql import functions as F

    return (F.col(SEQ_COLUMN) > between[0]) & (F.col(SEQ_COLUMN) <= between[1])


def _scan_inheriting(
    spark: SparkSession, files: Sequence[Sequenced], schema: Schema, between: Between | None
) -> DataFrame:
    """The rows of files whose rows have, all or some of them, the sequence of their file."""
    from pyspark.sql import functions as F

    mixed = not all(file.fresh for file in files)
    rows = _read(spark, [file.path for file in files], _columns(schema, with_seq=mixed))
    rows = _add_inherited(spark, rows, files)
    inherited = F.col(_INHERITED)
    seq = F.coalesce(F.col(SEQ_COLUMN), inherited) if mixed else inherited
    rows = rows.select(*(F.col(quoted(field.name)) for field in user_fields(schema)), seq.alias(SEQ_COLUMN))
    return rows.filter(_in_range(between)) if mixed and between is not None else rows


def _add_inherited(spark: SparkSession, rows: DataFrame, files: Sequence[Sequenced]) -> DataFrame:
    """The rows with one more column: the sequence of each row's file."""
    from pyspark.sql import functions as F

    sequences = {file.sequence for file in files}
    if len(sequences) == 1:
        return rows.withColumn(_INHERITED, F.lit(sequences.pop()).cast("long"))
    # Not by its name alone: a table may have a column of that name.
    rows = rows.withColumn(_FILE, rows.metadataColumn("_metadata").getField("file_name"))
    if len(files) <= LOOKUP_BY_VALUE_MAX:
        # Searched for every row, but a join would cost a job first.
        pairs = (f"'{_name(file)}', {'null' if file.sequence is None else file.sequence}" for file in files)
        return rows.withColumn(_INHERITED, F.expr(f"cast(element_at(map({', '.join(pairs)}), {_FILE}) as long)"))
    lookup = pa.table(
        [pa.array(map(_name, files), pa.string()), pa.array((file.sequence for file in files), pa.int64())],
        names=[_FILE, _INHERITED],
    )
    return rows.join(F.broadcast(spark.createDataFrame(lookup)), _FILE, "left")


def _scan_arrow(
    spark: SparkSession,
    files: Sequence[tuple[str, int | None, int | None]],
    schema: Schema,
    columns: StructType,
    storage_options: Mapping[str, str] | None,
    wanted: RowsWanted,
) -> DataFrame:
    """Files with their sequences and sizes, read by tasks: Spark spreads their numbers, without a shuffle."""
    from pyspark.sql.types import StructType

    schema_json = schema.model_dump_json()
    options = dict(storage_options or {})
    listed = list(files)
    wanted = replace(wanted, with_seq=SEQ_COLUMN in columns.names)
    if wanted.columns is not None:
        names = [*wanted.columns, *([SEQ_COLUMN] if wanted.with_seq else [])]
        columns = StructType([columns[name] for name in names])

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _read_task(schema_json, wanted, options, listed, batches)

    numbers = spark.range(0, len(listed), 1, min(len(listed), SCAN_TASKS_MAX))
    return numbers.mapInArrow(read, columns)


def _read_task(
    schema_json: str,
    wanted: RowsWanted,
    storage_options: dict[str, str],
    files: list[tuple[str, int | None, int | None]],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    schema = table_shape(schema_json).schema
    storage = Storage(storage_options)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            location, sequence, size_bytes = files[number]
            yield from read_wanted(storage, location, schema, wanted, sequence, size_bytes=size_bytes)
