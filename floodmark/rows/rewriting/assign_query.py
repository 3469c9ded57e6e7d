"""New values that only Spark can evaluate, or of rows that only Spark can find: both in one query over the files.

The session's time zone counts, as in conditions and in `sql`. An expression is checked before a row is read: one value
for each row, from the row alone. Rows need not be in the order of their files: each brings its file and its position.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, DoubleType, FloatType, NestedField

from floodmark import clock
from floodmark.errors import Invalid
from floodmark.model import FileRecord
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.reading.scan import scan
from floodmark.rows.rewriting.assign import Assigned, AssignPlan, Numbered, stage_values
from floodmark.rows.rewriting.fill_query import failures
from floodmark.rows.schema import spark_schema
from floodmark.rows.sql.positions import Searched, check_where, has_star, has_subquery, mentioned, numbered_rows
from floodmark.rows.staging.stage import batch_size, check_dataframe, task_name
from floodmark.rows.tasks import collect_tagged
from floodmark.storage import Storage, join

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructField

_ROWS_AT_ONCE = 4_000_000
_INSTEAD = "Use the row's columns, and functions that give one value for one row, the same at every try."


def assign_by_query(
    spark: SparkSession, tag: str, plan: AssignPlan, files: Sequence[str], *, arrow: bool | None
) -> Assigned:
    """Stage the new values of all rows of these files that match, by tasks without a shuffle."""
    from pyspark.sql import functions as F

    options, schema = plan.target.storage_options, plan.schema
    check_where(spark, plan.condition, schema)
    values = _checked(spark, plan)
    if not files:
        return Assigned()
    texts = [plan.where, *(one.expression for one in plan.assignments)]
    searched = Searched(files, schema, options, arrow)
    rows, file, pos = numbered_rows(spark, searched, mentioned(" ".join(texts), schema))
    found = rows.where(plan.where).select(F.col(file).alias("file"), F.col(pos).alias("pos"), *values)
    target, names = plan.target, plan.names

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        storage = Storage(options)
        for batch in batches:
            numbered = _numbered(itertools.chain([batch], _some(batches, _ROWS_AT_ONCE - len(batch))), names)
            staged, places = stage_values(target, numbered, f"{task_name()}{clock.new_id()}", storage, in_task=True)
            reported = [("problem", problem.to_json(), "") for problem in staged.problems]
            reported += [("record", record.to_json(), "") for record in staged.records if not staged.problems]
            with storage.batch():
                for source, text in places.items():
                    location = join(target.folder, f"{clock.new_id()}.positions")
                    storage.put(location, text.encode())
                    reported.append(("places", source, location))
            columns = [pa.array(part, pa.string()) for part in zip(*reported, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, ["kind", "body", "location"])

    with batch_size(found):
        results = collect_tagged(
            found.mapInArrow(stage, "kind string, body string, location string"),
            tag,
            "Spark could not compute the new values",
        )
    Misfits(Problem.from_json(row["body"]) for row in results if row["kind"] == "problem").raise_invalid()
    records = [FileRecord.from_json(row["body"]) for row in results if row["kind"] == "record"]
    places = tuple((row["body"], row["location"]) for row in results if row["kind"] == "places")
    return Assigned(tuple(sorted(records, key=lambda record: record.path)), locations=places)


def _some(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The next of these batches, until they have so many rows."""
    while rows > 0 and (batch := next(batches, None)) is not None:
        rows -= len(batch)
        yield batch


def _numbered(batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> Iterator[Numbered]:
    for batch in batches:
        files = batch.column(0).dictionary_encode()
        for code, file in enumerate(files.dictionary.to_pylist()):
            some = batch.filter(pc.equal(files.indices, code))
            positions = some.column(1).to_numpy(zero_copy_only=False)
            yield file, positions, pa.RecordBatch.from_arrays(some.columns[2:], names)


# ── checking ──


def _checked(spark: SparkSession, plan: AssignPlan) -> list[Column]:
    """The new values as columns of a query; `Invalid` if one is no value of the row, or none of its column's type."""
    from pyspark.sql import functions as F

    schema = plan.schema
    rows = scan(spark, [], schema)
    found = []
    for one in plan.ordered:
        field = schema.find_field(one.column)
        with failures(plan.table, one.expression, _INSTEAD):
            _check_value(rows, one.expression, plan)
            (given,) = rows.selectExpr(f"(\n{one.expression}\n) AS value").schema.fields
            (kind,) = spark_schema(Schema(field), all_nullable=True)
            value = F.expr(f"(\n{one.expression}\n)")
            found.append((value.cast(kind.dataType) if _is_cast(given, field) else value).alias(field.name))
    check_dataframe(plan.target, rows.select(*found))
    return found


def _check_value(rows: DataFrame, expression: str, plan: AssignPlan) -> None:
    # As one expression first: it is put between parentheses later.
    rows.selectExpr(expression).schema  # noqa: B018
    if has_subquery(rows, expression):
        raise Invalid(
            "an update cannot hold a query",
            table=plan.table,
            expression=expression,
            advice="Merge the rows of the query, with partial=True.",
        )
    # Only one value for each row can be counted, the same at every try.
    rows.selectExpr(f"count((\n{expression}\n))").schema  # noqa: B018
    if has_star(rows, expression, plan.schema):
        raise Invalid(
            "an expression cannot use a star", expression=expression, advice="List the columns instead of the star."
        )


def _is_cast(given: StructField, column: NestedField) -> bool:
    """Whether Spark turns the value into one of the column's type; staging does what else loses nothing."""
    from pyspark.sql import types as spark_types

    if isinstance(given.dataType, spark_types.NullType):
        return True
    if isinstance(given.dataType, spark_types.DecimalType):
        return isinstance(column.field_type, FloatType | DoubleType)
    return isinstance(given.dataType, spark_types.IntegralType) and isinstance(column.field_type, DecimalType)
