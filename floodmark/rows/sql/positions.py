"""Which rows match a condition that only Spark can evaluate: their files and their positions in them.

The condition sees the table's columns and nothing else. Spark's own reader reports each row's file and position. It
names a file by its last part only: where that is not enough, or Spark cannot reach the files, Arrow tasks read them and
count. A condition is checked before any row is read: an error in it is `Invalid`, and nothing has happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.errors import Invalid
from floodmark.rows.arrays import Numbers
from floodmark.rows.convert import table_shape
from floodmark.rows.failures import spark_failures, spark_job
from floodmark.rows.project import GroupTest, read_numbered
from floodmark.rows.reading.scan import SCAN_TASKS_MAX, by_tasks, quoted, scan
from floodmark.rows.schema import spark_schema, user_fields
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from floodmark.rows.sql.where import Where

_FILE, _POS = "_file", "_pos"
_NOT_UNDERSTOOD = "Spark does not understand this condition"
# Spark ignores files whose names start otherwise, and encodes other characters.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Searched:
    """The files of a table to look for rows in, and how. `arrow` forces or forbids Arrow tasks, if possible."""

    files: Sequence[str]
    schema: Schema
    storage_options: Mapping[str, str] = field(default_factory=dict)
    arrow: bool | None = None

    def by_tasks(self, spark: SparkSession) -> bool:
        """Whether Arrow tasks read the files, and count their rows."""
        return by_tasks(spark, self.files, self.arrow) or not _have_distinct_names(self.files)


def spark_positions(spark: SparkSession, where: Where, searched: Searched) -> DataFrame:
    """`file` and `pos` of all rows that match."""
    check_where(spark, where, searched.schema)
    if not searched.files:
        return spark.range(0).selectExpr("cast(null as string) file", "id pos")
    if searched.by_tasks(spark):
        return _read_positions(spark, where, searched)
    return _scan_positions(spark, where, searched)


def count_positions(spark: SparkSession, where: Where, searched: Searched) -> dict[str, int]:
    """How many rows of each file match; files without any are left out."""
    found = spark_positions(spark, where, searched)
    with spark_job(spark, "Spark could not evaluate this condition", lake_files=True):
        return {row["file"]: row["count"] for row in found.groupBy("file").count().collect()}


def collect_positions(spark: SparkSession, where: Where, searched: Searched) -> dict[str, Numbers]:
    """The ascending positions of the rows that match, by file; files without any are left out."""
    from pyspark.sql import functions as F

    found = spark_positions(spark, where, searched)
    by_file = found.groupBy("file").agg(F.sort_array(F.collect_list("pos")).alias("pos"))
    with spark_job(spark, "Spark could not evaluate this condition", lake_files=True):
        rows = by_file.toArrow()
    listed = zip(rows.column("file").to_pylist(), rows.column("pos"), strict=True)
    return {file: positions.values.to_numpy(zero_copy_only=False) for file, positions in listed}


def check_where(spark: SparkSession, where: Where, schema: Schema) -> None:
    """`Invalid` if the text is no condition on a table of this schema. Runs no job."""
    if where.plain:
        return
    rows = scan(spark, [], schema)
    with spark_failures(_NOT_UNDERSTOOD):
        # As a column first: a filter may also read columns below the table's own.
        kinds = [field.dataType.typeName() for field in rows.selectExpr(where.text).schema.fields]
        if kinds != ["boolean"]:
            raise Invalid(
                "not a condition",
                where=where.text,
                type=", ".join(kinds),
                advice="Write an expression that is true or false for every row, like: country = 'XX'.",
            )
        # In parentheses it cannot end with a name, as in `id = 5 x`, which Spark would read as an alias.
        rows.selectExpr(f"({where.text}\n)").schema  # noqa: B018
        rows.where(where.text).schema  # noqa: B018
    if has_subquery(rows, where.text):
        raise Invalid(
            "a condition cannot hold a query",
            where=where.text,
            advice="Run the query first, and write its values into the condition.",
        )
    if has_star(rows, where.text, schema):
        raise Invalid("a condition cannot use a star", where=where.text, advice="List the columns instead of the star.")


def has_subquery(rows: DataFrame, text: str) -> bool:
    """Whether it contains a query. Spark itself detects it: it allows none in a function on an array's elements."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    try:
        rows.select(F.exists(F.array(F.lit(1)), lambda _: F.expr(text))).schema  # noqa: B018
    except AnalysisException as error:
        # Other errors only concern this test, such as Python functions, which are not allowed there either.
        return "SUBQUERY" in (error.getCondition() or "")
    return False


def has_star(rows: DataFrame, text: str, schema: Schema) -> bool:
    """Whether a `*` in it stands for all columns: then one more column would change its meaning."""
    if "*" not in text:
        return False
    other = _unused(_POS, schema)
    return bool(rows.selectExpr("*", f"0 {other}").selectExpr(text).columns != rows.selectExpr(text).columns)


def _unused(name: str, schema: Schema) -> str:
    """The name, made longer until no column has it."""
    taken = {field.name.lower() for field in schema.fields}
    while name in taken:
        name += "_"
    return name


def _have_distinct_names(files: Sequence[str]) -> bool:
    names = {_last_part(file) for file in files}
    return len(names) == len(files) and all(_SAFE_NAME.fullmatch(name) for name in names)


def _last_part(file: str) -> str:
    return file.rpartition("/")[2]


def _matching(rows: DataFrame, text: str, file: Column, pos: Column) -> DataFrame:
    """The condition is a column like any other, so that it sees those of `rows` under their own names only."""
    from pyspark.sql import functions as F

    answers = rows.select(F.expr(text).alias("match"), file.alias("file"), pos.alias("pos"))
    return answers.where("match").select("file", "pos")


def _scan_positions(spark: SparkSession, where: Where, searched: Searched) -> DataFrame:
    rows = scan(spark, searched.files, searched.schema, arrow=False)
    known = rows.metadataColumn("_metadata")
    found = _matching(rows, where.text, known.getField("file_name"), known.getField("row_index"))
    return _located(spark, found, searched.files, "file", "location").select("file", "pos")


def _located(spark: SparkSession, rows: DataFrame, files: Sequence[str], file: str, location: str) -> DataFrame:
    """The rows with the location of their file in the column `file`, which has its name. No column is `location`."""
    from pyspark.sql import functions as F

    listed = pa.table({file: [_last_part(one) for one in files], location: list(files)})
    found = rows.join(F.broadcast(spark.createDataFrame(listed)), file, "left")
    # A row that lost its file would silently not be changed.
    lost = F.raise_error(F.concat(F.lit("a file of the scan is not in its list: "), F.col(file)))
    return found.withColumn(file, F.coalesce(F.col(location), lost.cast("string"))).drop(location)


def _read_positions(spark: SparkSession, where: Where, searched: Searched) -> DataFrame:
    from pyspark.sql import functions as F

    fields, names = mentioned(where.text, searched.schema), _added_names(searched.schema)
    rows = _read_numbered(spark, searched, fields, names, where)
    return _matching(rows, where.text, F.col(names[0]), F.col(names[1]))


def numbered_rows(spark: SparkSession, searched: Searched, fields: Sequence[NestedField]) -> tuple[DataFrame, str, str]:
    """All rows with these columns, each with its file and its position in it: the names of both."""
    from pyspark.sql import functions as F

    files, schema = searched.files, searched.schema
    file, pos = _added_names(schema)
    if searched.by_tasks(spark):
        return _read_numbered(spark, searched, fields, (file, pos)), file, pos
    rows = scan(spark, files, schema, arrow=False)
    known = rows.metadataColumn("_metadata")
    own = [F.col(quoted(field.name)) for field in fields]
    found = rows.select(*own, known.getField("file_name").alias(file), known.getField("row_index").alias(pos))
    return _located(spark, found, files, file, _unused("_location", schema)), file, pos


def _added_names(schema: Schema) -> tuple[str, str]:
    return _unused(_FILE, schema), _unused(_POS, schema)


def _read_numbered(
    spark: SparkSession,
    searched: Searched,
    fields: Sequence[NestedField],
    names: tuple[str, str],
    where: Where | None = None,
) -> DataFrame:
    """All rows of the files; without the row groups in which none can match `where`."""
    from pyspark.sql import types as spark_types

    ids = [field.field_id for field in fields]
    schema_json, storage_options = searched.schema.model_dump_json(), dict(searched.storage_options)
    listed = list(searched.files)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _read_task(schema_json, ids, names, listed, storage_options, where, batches)

    columns = [
        *spark_schema(Schema(*fields), all_nullable=True),
        spark_types.StructField(names[0], spark_types.StringType()),
        spark_types.StructField(names[1], spark_types.LongType()),
    ]
    numbers = spark.range(0, len(listed), 1, min(len(listed), SCAN_TASKS_MAX))
    return numbers.mapInArrow(read, spark_types.StructType(columns))


def mentioned(text: str, schema: Schema) -> list[NestedField]:
    """The columns that a condition or an expression may read: those whose names occur in it, and at least one.

    With a variable in it all columns count; a name with a backtick or a letter beyond ASCII always counts.
    """
    fields = user_fields(schema)
    if "$" in text:
        return fields
    lower = text.lower()
    return [
        field for field in fields if field.name.lower() in lower or "`" in field.name or not field.name.isascii()
    ] or fields[:1]


def _read_task(
    schema_json: str,
    ids: list[int],
    names: tuple[str, str],
    files: list[str],
    storage_options: dict[str, str],
    where: Where | None,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    schema = table_shape(schema_json).schema
    tests = [] if where is None else [where.group_test]
    fields = [schema.find_field(field_id) for field_id in ids]
    storage = Storage(storage_options)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from _numbered(storage, files[number], fields, names, tests)


def _numbered(
    storage: Storage, file: str, fields: Sequence[NestedField], names: tuple[str, str], tests: Sequence[GroupTest]
) -> Iterator[pa.RecordBatch]:
    """The rows of a file with its location and their positions."""
    for start, batch in read_numbered(storage, file, fields, tests=tests):
        places = pa.array(np.arange(start, start + len(batch), dtype=np.int64))
        own = [pa.repeat(pa.scalar(file, pa.string()), len(batch)), places]
        yield pa.RecordBatch.from_arrays([*batch.columns, *own], names=[*batch.schema.names, *names])
