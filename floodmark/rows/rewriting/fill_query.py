"""Columns filled by expressions that only Spark can evaluate, also ones that read other tables of the lake.

The rows are a temporary view, known in the expression by their table's name; other tables that it names are in scope
under theirs. View names are used once and dropped, so a session's own views stay unchanged; they are no tables of the
lake and cannot be read. An expression is checked before a row is read: it gives one value for each row, the same at
every try, from the row and the lake alone (rows/rewriting/fill_checks.py). Time is UTC. Any other expression is
`Invalid`, and nothing has happened.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType, NestedField

from floodmark import clock
from floodmark.errors import Corrupt, Invalid, NotFound
from floodmark.model import SEQ_COLUMN, FileRecord
from floodmark.rows.convert import table_shape
from floodmark.rows.failures import spark_failures
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.reading.scan import empty, quoted, scan, scan_with_seq
from floodmark.rows.rewriting.fill import Filled, FillPlan
from floodmark.rows.rewriting.fill_checks import check_functions, check_plan, check_relations, check_text
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.schema import spark_schema, user_fields
from floodmark.rows.session import SharedSettings
from floodmark.rows.sql.table_names import parsed_relations
from floodmark.rows.staging.stage import batch_size, check_dataframe, stage_batches
from floodmark.rows.tasks import collect_tagged
from floodmark.rows.translate import struct_from_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

Tables = Callable[[str], "DataFrame"]

_NOT_UNDERSTOOD = "Spark does not understand this expression"
_CAUSE_CHARACTERS_MAX = 200
_MANY_VALUES = "a query in the expression gives more than one value for a row"
_ONE_VALUE = "Make the query give one value: use max(…) or min(…) in it."
_IN_A_QUERY = "Put it into a query, like: (select max(o.ts) from orders o where o.user_id = users.id)."
# The message and the advice, by a word in Spark's error; the first match counts.
_KNOWN = {
    "NONDETERMINISTIC": (
        "an expression must give the same value on every try; this one does not",
        "Do not use random values, the position of a row or the current time.",
    ),
    "SUBQUERY": (_MANY_VALUES, _ONE_VALUE),
    "WINDOW FUNCTION": ("an expression cannot use window functions", "Put the window function into a query."),
    "AGGREGAT": ("an expression cannot aggregate rows", _IN_A_QUERY),
    "MISSING_GROUP_BY": ("an expression cannot aggregate rows", _IN_A_QUERY),
    "GENERATOR": ("an expression must give one value for each row", "Keep the array: an array is one value."),
}

_ZONE = "spark.sql.session.timeZone"
# Expressions are computed in UTC, whatever a session has set, so that all writers agree.
_ZONES = SharedSettings(keeps=lambda _, zone: zone == "UTC", choose=lambda zones: zones[0])


# ── filling ──


def fill_by_query(
    spark: SparkSession, tag: str, plan: FillPlan, sources: Sequence[InputFile], tables: Tables
) -> Filled:
    """The rows of all sources with the plan's columns, staged by tasks without a shuffle unless a query needs one."""
    schema = table_shape(plan.row_schema_json).schema
    expressions = "; ".join(fill.expression for fill in plan.fills)
    with _ZONES.held(spark, {_ZONE: "UTC"}), _views(spark) as view:
        rows = _rows(spark, plan, sources)
        with failures(plan.table, expressions):
            for fill in plan.fills:
                query = _Query(spark, view, plan.table, fill.expression, tables)
                rows = _with_column(query, rows, fill.expression, schema.find_field(fill.field_id))
            # Without columns that stay absent: they were null for the expressions, or computed only for them.
            written = {field.name for field in plan.target.shape().fields}
            rows = rows.select(*(quoted(name) for name in rows.columns if name in written))
        try:
            return _stage(plan, rows, tag)
        except Invalid as error:
            if "SUBQUERY" not in str(error):
                raise
            raise Invalid(_MANY_VALUES, table=plan.table, expression=expressions, advice=_ONE_VALUE) from error


def _rows(spark: SparkSession, plan: FillPlan, sources: Sequence[InputFile]) -> DataFrame:
    """The rows of the sources with the columns that expressions see, without those to be computed; `_seq` last."""
    from pyspark.sql import functions as F

    read, options = table_shape(plan.source_schema_json).schema, plan.target.storage_options
    if plan.target.settled:
        found = scan_with_seq(spark, sources, read, storage_options=options)
    else:
        found = scan(spark, [source.path for source in sources], read, storage_options=options)
    computed = {fill.column for fill in plan.fills}
    names = {field.name for field in user_fields(read)}
    columns = []
    for field in spark_schema(table_shape(plan.row_schema_json).schema, all_nullable=True):
        if field.name in names:
            columns.append(F.col(quoted(field.name)))
        elif field.name not in computed:
            columns.append(F.lit(None).cast(field.dataType).alias(field.name))
    return found.select(*columns, *([F.col(SEQ_COLUMN)] if plan.target.settled else []))


def _with_column(query: _Query, rows: DataFrame, expression: str, column: NestedField) -> DataFrame:
    """The rows with one column more, of its type in the table."""
    from pyspark.sql import functions as F

    (kind,) = spark_schema(Schema(column), all_nullable=True)
    before = [F.col(quoted(name)) for name in rows.columns]
    found = query.select(rows, f"*, (\n{expression}\n) AS {quoted(column.name)}")
    return found.select(*before, F.col(quoted(column.name)).cast(kind.dataType).alias(column.name))


class _Query:
    """Asks Spark about rows of a table by an expression, with the other tables that it names in scope."""

    def __init__(
        self, spark: SparkSession, view: Callable[[DataFrame], str], table: str, expression: str, tables: Tables
    ) -> None:
        self._spark = spark
        self._view = view
        self._table = table
        others = _other_tables(spark, expression, tables)
        parts = [f"{quoted(name)} AS (SELECT * FROM {quoted(view(frame))})" for name, frame in others.items()]
        self._scope = f"WITH {', '.join(parts)} " if parts else ""

    def select(self, rows: DataFrame, what: str) -> DataFrame:
        return self._spark.sql(self._text(rows, what))

    def explain(self, rows: DataFrame, what: str) -> str:
        """Spark's plan of it, as text."""
        return str(self._spark.sql(f"EXPLAIN EXTENDED {self._text(rows, what)}").collect()[0][0])

    def _text(self, rows: DataFrame, what: str) -> str:
        return f"{self._scope}SELECT {what} FROM {quoted(self._view(rows))} AS {quoted(self._table)}"


@contextmanager
def _views(spark: SparkSession) -> Iterator[Callable[[DataFrame], str]]:
    """Register DataFrames under names that are used once; the names end with the block."""
    made: list[str] = []

    def view(frame: DataFrame) -> str:
        made.append(f"_floodmark_{clock.new_id().lower()}")
        frame.createOrReplaceTempView(made[-1])
        return made[-1]

    try:
        yield view
    finally:
        for name in made:
            spark.catalog.dropTempView(name)


def _stage(plan: FillPlan, rows: DataFrame, tag: str) -> Filled:
    target = plan.target
    names = check_dataframe(target, rows)
    counted = {fill.field_id: names.index(fill.column) for fill in plan.fills if fill.field_id in plan.written}
    # By position from here on: a name may hold a dot, or differ from another only in its case.
    numbered = rows.toDF(*(f"c{position}" for position in range(len(names))))

    def stage(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        nulls: Counter[int] = Counter()
        staged = stage_batches(target, _named(batches, names, counted, nulls), clock.new_id(), in_task=True)
        found = [("problem", problem.to_json()) for problem in staged.problems]
        found += [("record", record.to_json()) for record in staged.records if not staged.problems]
        found += [(f"nulls {field_id}", str(nulls[field_id])) for field_id in counted]
        kinds, bodies = zip(*found, strict=True) if found else ((), ())
        yield pa.RecordBatch.from_arrays(
            [pa.array(kinds, pa.string()), pa.array(bodies, pa.string())], ["kind", "body"]
        )

    with batch_size(numbered):
        results = collect_tagged(
            numbered.mapInArrow(stage, "kind string, body string"), tag, "Spark could not fill the table's rows"
        )
    Misfits(Problem.from_json(row["body"]) for row in results if row["kind"] == "problem").raise_invalid()
    records = sorted(
        (FileRecord.from_json(row["body"]) for row in results if row["kind"] == "record"),
        key=lambda record: record.path,
    )
    if len({record.path for record in records}) != len(records):
        raise Corrupt("two tasks wrote a file of the same name", folder=target.folder)
    unfilled = {
        field_id: sum(int(row["body"]) for row in results if row["kind"] == f"nulls {field_id}") for field_id in counted
    }
    return Filled(tuple(records), sum(record.rows for record in records), unfilled)


def _named(
    batches: Iterator[pa.RecordBatch], names: list[str], counted: dict[int, int], nulls: Counter[int]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for field_id, place in counted.items():
            nulls[field_id] += batch.column(place).null_count
        yield batch.rename_columns(names)


# ── checking ──


def query_type(spark: SparkSession, schema: Schema, table: str, expression: str, tables: Tables) -> IcebergType:
    """The type of the expression over rows of this schema; `Invalid` if it cannot fill a column."""
    check_text(expression, schema, table)
    rows = empty(spark, spark_schema(schema, all_nullable=True))
    value = f"(\n{expression}\n)"
    with _ZONES.held(spark, {_ZONE: "UTC"}), failures(table, expression), _views(spark) as view:
        _check_one(rows, expression)
        check_relations(_relations(spark, expression), expression, table)
        query = _Query(spark, view, table, expression, tables)
        (found,) = struct_from_spark(query.select(rows, f"{value} AS value").schema.jsonValue()).fields
        # Spark itself checks that it is one value of one row, the same at every try: only such a value can be counted.
        query.select(rows, f"count({value})").schema  # noqa: B018
        wider = rows.selectExpr("*", f"0 AS {_unused(schema)}")
        if "*" in expression and query.select(rows, value).columns != query.select(wider, value).columns:
            raise Invalid(
                "an expression cannot use a star", expression=expression, advice="List the columns instead of the star."
            )
        check_functions(spark, expression, table)
        unknown = _Query(spark, view, table, expression, lambda name: _unknown(spark, tables(name).schema))
        plan = unknown.explain(_unknown(spark, spark_schema(schema, all_nullable=True)), f"{value} AS value")
        check_plan(plan, expression, table)
    return found.field_type


def _unknown(spark: SparkSession, columns: StructType) -> DataFrame:
    """Rows that Spark cannot evaluate while it plans: what the plan still has of an expression is computed per row."""

    def untouched(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return spark.range(0).mapInArrow(untouched, columns)


def _unused(schema: Schema) -> str:
    name, taken = "more", {field.name.lower() for field in schema.fields}
    while name in taken:
        name += "_"
    return name


def _check_one(rows: DataFrame, expression: str) -> None:
    """Check that it is one expression as a whole, before it is put into a query."""
    from pyspark.errors import AnalysisException, ParseException

    try:
        rows.selectExpr(expression).schema  # noqa: B018
    except ParseException:
        raise
    except AnalysisException:
        pass  # other tables are not in scope here


def _other_tables(spark: SparkSession, expression: str, tables: Tables) -> dict[str, DataFrame]:
    """The tables that the expression reads; `Invalid` if one is not in the lake."""
    found = {}
    for name in _relations(spark, expression):
        try:
            found[name] = tables(name)
        except NotFound as error:
            raise Invalid(
                "an expression reads a table that the lake does not have",
                other=name,
                expression=expression,
                advice="Name a table of this lake; `floodmark tables` lists them.",
            ) from error
    return found


def _relations(spark: SparkSession, expression: str) -> list[str]:
    """What the expression reads from, as Spark parses it, without the names that its WITH defines."""
    if not re.search(r"\b(?:from|table)\b", expression, re.IGNORECASE):
        return []
    return parsed_relations(spark, f"SELECT (\n{expression}\n)")


@contextmanager
def failures(table: str, expression: str, instead: str = "") -> Iterator[None]:
    """Spark's error about an expression, in short, and the advice; `instead`, where queries are no way out."""
    from pyspark.errors import AnalysisException

    with spark_failures(_NOT_UNDERSTOOD):
        try:
            yield
        except AnalysisException as error:
            said = _in_short(str(error))
            searched = f"{error.getCondition()} {said}".upper()
            problem, advice = next((known for word, known in _KNOWN.items() if word in searched), (None, "Correct it."))
            cause, advice = (said, advice) if problem is None else (None, instead or advice)
            raise Invalid(
                problem or _NOT_UNDERSTOOD, table=table, expression=expression, cause=cause, advice=advice
            ) from error


def _in_short(said: str) -> str:
    text = re.sub(r"^\[[\w.]+\] ", "", " ".join(said.split()))
    text = re.split(r" SQLSTATE: | == SQL|; line \d+ pos ", text)[0]
    return text if len(text) <= _CAUSE_CHARACTERS_MAX else text[:_CAUSE_CHARACTERS_MAX] + "…"
