"""New values for some columns of the rows that match a condition: what they are, and for which row of which file.

Nothing is replaced here. The values are staged in files of the assigned columns alone, which no commit names; for every
matching row its position in its source and the place of its values in those files are kept. The rewriter puts both
together (rows/rewriting/rewrite.py, BY_PLACES), and leaves rows alone that have these values already.

Condition and expressions see the row as it was, so `a = b, b = a` swaps. Arrow evaluates plain ones
(rows/sql/expression.py), in this process or in tasks, Spark any others (rows/rewriting/assign_query.py). A value that
does not fit its column is `Invalid`. A crash leaves files in the operation's own folder that nothing refers to (I3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, NestedField

from floodmark import clock
from floodmark.model import FileRecord
from floodmark.rows.arrays import Numbers
from floodmark.rows.convert import table_shape
from floodmark.rows.misfits import Misfits
from floodmark.rows.project import read_file
from floodmark.rows.rewriting.rewrite import InputFile, pack_places
from floodmark.rows.schema import arrow_type
from floodmark.rows.session import Sessions
from floodmark.rows.sql.expression import Plain, parse_plain
from floodmark.rows.sql.where import Where
from floodmark.rows.staging.stage import Staged, StageTarget, stage_batches
from floodmark.rows.tasks import run_files
from floodmark.storage import Storage

# Some rows of a source, in a batch of new values: their positions in it.
Numbered = tuple[str, Numbers, pa.RecordBatch]


@dataclass(frozen=True)
class Assignment:
    """A column, and the expression whose value it gets."""

    column: str
    expression: str


@dataclass(frozen=True)
class AssignPlan:
    """What is evaluated on each source; plain values, so that it can be sent to executors.

    target: of the files of new values, neither partitioned nor sorted. schema_json: the columns of the sources.
    """

    target: StageTarget
    table: str
    where: str
    assignments: tuple[Assignment, ...]
    schema_json: str

    @property
    def schema(self) -> Schema:
        return table_shape(self.schema_json).schema

    @property
    def condition(self) -> Where:
        return Where.parse(self.where, self.schema)

    @property
    def columns(self) -> tuple[NestedField, ...]:
        return table_shape(self.target.schema_json).fields

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.columns]

    @property
    def values(self) -> list[Plain | None]:
        """The assigned expressions as plain ones, in the order of the columns; None for one that only Spark knows."""
        return [plain_value(one.expression, self.schema.find_field(one.column), self.schema) for one in self.ordered]

    @property
    def ordered(self) -> list[Assignment]:
        by_name = {one.column: one for one in self.assignments}
        return [by_name[field.name] for field in self.columns]

    @property
    def plain(self) -> bool:
        return self.condition.plain and None not in self.values


@dataclass(frozen=True)
class Assigned:
    """Files of new values, and by source the rows that get them: as a text, or in an object of this location."""

    records: tuple[FileRecord, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    locations: tuple[tuple[str, str], ...] = ()

    def __add__(self, other: Assigned) -> Assigned:
        return Assigned(self.records + other.records, self.texts + other.texts, self.locations + other.locations)

    def placed(self, sources: Sequence[InputFile]) -> list[InputFile]:
        """Those of the sources that have a row which gets new values, with its place."""
        texts, locations = (_by_source(pairs) for pairs in (self.texts, self.locations))
        found = (replace(one, packed=texts.get(one.path, ()), positions=locations.get(one.path, ())) for one in sources)
        return [one for one in found if one.packed or one.positions]


def _by_source(pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for source, text in pairs:
        found[source] = (*found.get(source, ()), text)
    return found


def plain_value(expression: str, column: NestedField, schema: Schema) -> Plain | None:
    """The expression, if Arrow can evaluate it and stage its value for this column as Spark would."""
    if expression.strip().lower() == "null":
        return Plain(column.field_type)
    plain = parse_plain(expression, schema)
    is_number = plain is not None and isinstance(plain.value, int) and not isinstance(plain.value, bool)
    # Only Spark turns a whole number into a decimal one.
    return None if is_number and isinstance(column.field_type, DecimalType) else plain


def run_assign(
    storage: Storage,
    sessions: Sessions,
    tag: str,
    plan: AssignPlan,
    sources: Sequence[InputFile],
    *,
    arrow: bool | None = None,
) -> tuple[Assigned, bool]:
    """Stage the new values of all rows of the sources that match; and whether Spark was used."""
    if not plan.plain:
        from floodmark.rows.rewriting.assign_query import assign_by_query

        return assign_by_query(sessions.get(), tag, plan, [source.path for source in sources], arrow=arrow), True
    kinds = [pa.null() if one.column is one.value is None else arrow_type(one.kind) for one in plan.values if one]
    plan.target.conformer(pa.schema(list(zip(plan.names, kinds, strict=True)))).problems.raise_invalid()
    found, used_spark = run_files(
        sessions,
        sources,
        partial(_assign_here, plan, storage),
        partial(_assign_task, plan),
        tag=tag,
        message="Spark could not compute the new values",
    )
    return sum(found, Assigned()), used_spark


def _assign_here(
    plan: AssignPlan, storage: Storage, sources: Sequence[InputFile], *, in_task: bool = False
) -> list[Assigned]:
    with storage.batch():
        numbered = (one for source in sources for one in _numbered_values(plan, source, storage))
        staged, texts = stage_values(plan.target, numbered, clock.new_id(), storage, in_task=in_task)
    Misfits(staged.problems).raise_invalid()
    return [Assigned(staged.records, tuple(texts.items()))]


def _assign_task(plan: AssignPlan, sources: Sequence[InputFile]) -> list[Assigned]:
    return _assign_here(plan, Storage(plan.target.storage_options), sources, in_task=True)


def _numbered_values(plan: AssignPlan, source: InputFile, storage: Storage) -> Iterator[Numbered]:
    schema, where, names = plan.schema, plan.condition, plan.names
    values = [value for value in plan.values if value is not None]
    read = {field.field_id: field for field in where.fields}
    for value in values:
        if value.column is not None:
            field = schema.find_field(value.column)
            read[field.field_id] = field
    start = 0
    for batch in read_file(storage, source.path, list(read.values())):
        mask = where.mask(batch)
        positions = np.flatnonzero(mask.to_numpy(zero_copy_only=False)).astype(np.int64) + start
        start += len(batch)
        if len(positions):
            rows = batch.filter(mask)
            yield source.path, positions, pa.RecordBatch.from_arrays([one.evaluate(rows) for one in values], names)


def stage_values(
    target: StageTarget, numbered: Iterable[Numbered], name: str, storage: Storage, *, in_task: bool
) -> tuple[Staged, dict[str, str]]:
    """Stage the values, in the order in which they come; and for each source the places of its rows' values."""
    rows: dict[str, list[tuple[Numbers, int]]] = defaultdict(list)

    def values() -> Iterator[pa.RecordBatch]:
        start = 0
        for source, positions, batch in numbered:
            rows[source].append((positions, start))
            start += len(batch)
            yield batch

    staged = stage_batches(target, values(), name, storage=storage, in_task=in_task)
    if staged.problems:
        return staged, {}
    starts = np.cumsum([0, *(record.rows for record in staged.records)])
    paths = [record.path for record in staged.records]
    texts = {}
    for source, parts in rows.items():
        positions = np.concatenate([some for some, _ in parts])
        at = np.concatenate([np.arange(start, start + len(some), dtype=np.int64) for some, start in parts])
        files = np.searchsorted(starts, at, side="right") - 1
        texts[source] = pack_places(paths, positions, files, at - starts[files])
    return staged, texts
