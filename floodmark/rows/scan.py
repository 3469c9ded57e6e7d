"""Read data files as a DataFrame: the planned list, matched by field id, nothing found by looking.

Spark's own Parquet reader where Spark can reach the files; Arrow tasks over the same list where it cannot (object
storage without Hadoop's connector). Both give the table's columns in the table's order, all of them nullable, since
files older than a column do not have it. A file of the list that is missing or damaged is an error, never fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.schema import Schema

from floodmark.rows.convert import table_shape
from floodmark.rows.project import read_file
from floodmark.rows.schema import spark_schema, user_fields
from floodmark.rows.session import prepare
from floodmark.storage import Storage, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCAN_TASKS_MAX = 256
_READ_OPTIONS = {
    "mergeSchema": "false",
    # Paths are names, not patterns, and folder names like day=3 are not columns.
    "__globPaths__": "false",
    "recursiveFileLookup": "true",
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    # Files say what they mean: days and microseconds of the Gregorian calendar.
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
}


def scan(
    spark: SparkSession,
    files: Sequence[str],
    schema: Schema,
    with_seq: bool = False,
    *,
    storage_options: Mapping[str, str] | None = None,
    arrow: bool | None = None,
) -> DataFrame:
    """The rows of these data files. `arrow` forces or forbids Arrow tasks; by default the locations decide."""
    prepare(spark)
    if not files:
        return _empty(spark, schema, with_seq)
    if arrow is None:
        arrow = any(local_path(file) is None for file in files) and not _has_connector(spark)
    if arrow:
        return _scan_arrow(spark, files, schema, with_seq, dict(storage_options or {}))
    columns = spark_schema(schema, with_seq, all_nullable=True)
    return spark.read.schema(columns).options(**_READ_OPTIONS).parquet(*files)


def _has_connector(spark: SparkSession) -> bool:
    return spark.conf.get("spark.hadoop.fs.s3.impl", None) is not None


def _empty(spark: SparkSession, schema: Schema, with_seq: bool) -> DataFrame:
    from pyspark.sql import functions as F

    columns = spark_schema(schema, with_seq, all_nullable=True)
    return spark.range(0).select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in columns))


def _scan_arrow(
    spark: SparkSession, files: Sequence[str], schema: Schema, with_seq: bool, storage_options: dict[str, str]
) -> DataFrame:
    schema_json = schema.model_dump_json()

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _read_task(schema_json, with_seq, storage_options, batches)

    listed = spark.createDataFrame([(file,) for file in files], "file string")
    spread = listed.repartition(min(len(files), SCAN_TASKS_MAX))
    return spread.mapInArrow(read, spark_schema(schema, with_seq, all_nullable=True))


def _read_task(
    schema_json: str, with_seq: bool, storage_options: dict[str, str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    schema = table_shape(schema_json).schema
    fields = list(schema.fields) if with_seq else user_fields(schema)
    storage = Storage(storage_options)
    for batch in batches:
        for file in batch.column(0).to_pylist():
            yield from read_file(storage, file, fields)
