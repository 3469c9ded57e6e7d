"""Columns that an expression fills: files rewritten with them.

Filling rewrites whole files: the same rows with the column added, each with its sequence if the new files are settled
(I6). Each file records which columns it lacks (commit/fills.py). An expression over a column that is to be filled
itself sees its filled value, also in a file that lacks both.

Arrow evaluates plain expressions (rows/sql/expression.py), in this process or in tasks; Spark evaluates others
(rows/rewriting/fill_query.py). Sources are never changed; a source with another row count than recorded is `Corrupt`. A
crash leaves files in the operation's own folder that nothing refers to (I3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import IcebergType

from floodmark import clock
from floodmark.commit.fills import FILL_PREFIX, Fill, absent_fields, fill_property, fills_of, lacking
from floodmark.errors import Corrupt, Invalid
from floodmark.model import FileRecord
from floodmark.rows.convert import table_shape
from floodmark.rows.misfits import Misfits
from floodmark.rows.reading.arrow_reader import read_rows
from floodmark.rows.rewriting.rewrite import InputFile
from floodmark.rows.schema import user_fields
from floodmark.rows.session import Sessions
from floodmark.rows.sql.expression import may_name, parse_plain
from floodmark.rows.staging.stage import StageTarget, stage_batches
from floodmark.rows.tasks import run_files
from floodmark.storage import Storage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "FILL_PREFIX",
    "Fill",
    "Filled",
    "absent_fields",
    "computed_anew",
    "expression_type",
    "fill_property",
    "fills_of",
    "lacking",
    "run_fill",
]


@dataclass(frozen=True)
class Filled:
    """The new files, with as many rows as the sources; `unfilled`: by column, the rows whose value is null."""

    records: tuple[FileRecord, ...] = ()
    rows: int = 0
    unfilled: dict[int, int] = field(default_factory=dict)


# ── filling files ──


@dataclass(frozen=True)
class FillPlan:
    """What is done to sources that lack the same columns; plain values, so that it can be sent to executors.

    fills: in order; also those that others need and that are not written. target: of the files to be written.
    source_schema_json: the columns that are read. row_schema_json: the columns that expressions see.
    """

    target: StageTarget
    table: str
    fills: tuple[Fill, ...]
    written: tuple[int, ...]
    source_schema_json: str
    row_schema_json: str

    @property
    def plain(self) -> bool:
        schema = table_shape(self.row_schema_json).schema
        return all(parse_plain(fill.expression, schema) is not None for fill in self.fills)


def run_fill(
    storage: Storage,
    sessions: Sessions,
    tag: str,
    target: StageTarget,
    sources: Sequence[InputFile],
    fills: Sequence[Fill],
    *,
    table: str,
    source_schema: Schema,
    tables: Callable[[str], DataFrame],
) -> tuple[Filled, bool]:
    """Write the rows of all sources to files of the target, with the fills' columns; and whether Spark was used.

    `source_schema` names the sources' columns. Columns that a source lacks by its `absent`, and that are not among the
    fills, stay absent. `tables` returns another table of the lake, for expressions that read it.
    """
    groups: dict[tuple[int, ...], list[InputFile]] = {}
    for source in sources:
        groups.setdefault(source.absent, []).append(source)
    done, used_spark = [], False
    for absent, members in groups.items():
        plan = plan_fill(target, fills, absent, table, source_schema)
        if not plan.plain:
            from floodmark.rows.rewriting.fill_query import fill_by_query

            done.append(fill_by_query(sessions.get(), tag, plan, members, tables))
            used_spark = True
            continue
        found, by_tasks = run_files(
            sessions,
            members,
            partial(_fill_here, plan, storage),
            partial(_fill_task, plan),
            tag=tag,
            message="Spark could not fill the table's files",
        )
        done += found
        used_spark |= by_tasks
    filled = _together(done)
    if filled.rows != sum(source.rows for source in sources):
        raise Corrupt(
            "filled files do not have the rows of the files they replace",
            rows=filled.rows,
            rows_expected=sum(source.rows for source in sources),
            advice="Nothing was changed. Run `floodmark doctor`.",
        )
    return filled, used_spark


def plan_fill(
    target: StageTarget, fills: Sequence[Fill], absent: Sequence[int], table: str, source_schema: Schema
) -> FillPlan:
    schema = table_shape(target.schema_json).schema
    written = tuple(fill.field_id for fill in fills)
    stays_absent = tuple(field_id for field_id in absent if field_id not in written)
    others = [fill for fill in fills_of(target.properties, schema) if fill.field_id in stays_absent]
    used = _with_needed(fills, others, schema)
    computed = {fill.column for fill in used}
    read = [one for one in source_schema.fields if one.name not in computed and one.field_id not in absent]
    columns = [column for column in user_fields(schema) if column.name not in computed]
    # In the order of their creation: an expression sees the columns that were filled before it.
    columns += [schema.find_field(fill.field_id) for fill in used]
    return FillPlan(
        target.without(stays_absent),
        table,
        used,
        written,
        Schema(*read).model_dump_json(),
        Schema(*columns).model_dump_json(),
    )


def _with_needed(fills: Sequence[Fill], others: Sequence[Fill], schema: Schema) -> tuple[Fill, ...]:
    """The fills and those of the others whose columns their expressions may name, the oldest first."""
    found = {fill.field_id: fill for fill in fills}
    for other in sorted(others, key=lambda fill: -fill.field_id):
        named = [may_name(fill.expression, other.column, schema) for fill in found.values()]
        if other.field_id < max(found, default=0) and any(named):
            found[other.field_id] = other
    return tuple(sorted(found.values(), key=lambda fill: fill.field_id))


def computed_anew(fills: Sequence[Fill], schema: Schema, given: Collection[int]) -> tuple[int, ...]:
    """Of rows that get new values in the columns `given`: which fills, the oldest first, are computed anew.

    Those with one of these columns, or one that is computed anew itself, in their expression. A literal has none, so a
    row keeps what it has in a column with a default. `given` columns are as they are given.
    """
    changed = [column.name for column in schema.fields if column.field_id in given]
    found = []
    for fill in sorted(fills, key=lambda fill: fill.field_id):
        if fill.field_id not in given and any(may_name(fill.expression, name, schema) for name in changed):
            found.append(fill.field_id)
            changed.append(fill.column)
    return tuple(found)


def _fill_here(
    plan: FillPlan, storage: Storage, sources: Sequence[InputFile], *, in_task: bool = False
) -> list[Filled]:
    with storage.batch():
        return [fill_source(plan, source, storage, in_task=in_task) for source in sources]


def _fill_task(plan: FillPlan, sources: Sequence[InputFile]) -> list[Filled]:
    return _fill_here(plan, Storage(plan.target.storage_options), sources, in_task=True)


def fill_source(plan: FillPlan, source: InputFile, storage: Storage, *, in_task: bool = False) -> Filled:
    """Fill one source by plain expressions: each source file gets files of its own."""
    nulls: Counter[int] = Counter()
    batches = _filled_batches(plan, source, storage, nulls)
    staged = stage_batches(plan.target, batches, clock.new_id(), storage=storage, in_task=in_task)
    Misfits(staged.problems).raise_invalid()
    if staged.rows != source.rows:
        raise Corrupt(
            "a data file does not have the number of rows in the catalog",
            file=source.path,
            rows=staged.rows,
            rows_expected=source.rows,
            advice="Nothing was changed. Run `floodmark doctor`.",
        )
    return Filled(staged.records, staged.rows, {field_id: nulls[field_id] for field_id in plan.written})


def _filled_batches(
    plan: FillPlan, source: InputFile, storage: Storage, nulls: Counter[int]
) -> Iterator[pa.RecordBatch]:
    read, row = table_shape(plan.source_schema_json).schema, table_shape(plan.row_schema_json).schema
    settled = plan.target.settled
    expressions = [(fill, parse_plain(fill.expression, row)) for fill in plan.fills]
    unwritten = [fill.column for fill in plan.fills if fill.field_id not in plan.written]
    for batch in read_rows(storage, source.path, read, settled, source.sequence):
        for fill, plain in expressions:
            if plain is None:
                raise ValueError(f"only Spark can evaluate this expression: {fill.expression}")
            values = plain.evaluate(batch)
            nulls[fill.field_id] += values.null_count
            batch = batch.append_column(fill.column, values)
        yield batch.drop_columns(unwritten) if unwritten else batch


def _together(parts: Sequence[Filled]) -> Filled:
    unfilled: Counter[int] = Counter()
    for part in parts:
        unfilled.update(part.unfilled)
    records = tuple(record for part in parts for record in part.records)
    return Filled(records, sum(part.rows for part in parts), dict(unfilled))


# ── the type of a column ──


def expression_type(
    sessions: Sessions,
    schema: Schema,
    table: str,
    expression: str,
    tables: Callable[[str], DataFrame],
) -> IcebergType:
    """The type of a column that is filled by this expression; `Invalid` if it cannot be evaluated. Runs no job."""
    if not isinstance(expression, str) or not expression.strip():
        raise Invalid("there is no expression", given=repr(expression), advice="Write one like: upper(country).")
    plain = parse_plain(expression, schema)
    if plain is not None:
        return plain.kind
    from floodmark.rows.rewriting.fill_query import query_type

    return query_type(sessions.get(), schema, table, expression, tables)
