"""A condition on rows in Spark SQL (`country = 'XX'`): which files may hold matching rows, and which rows match.

A condition is plain if Arrow can evaluate it with exactly Spark's meaning, nulls included (`rows/sql/condition.py`).
Spark evaluates all others (`rows/sql/positions.py`); what they certainly imply, such as a plain conjunct or the range
of days of a timestamp (`rows/sql/moments.py`), still prunes files. A file is pruned only if its partition or statistics
prove that no row of it matches. A missing or unreadable value proves nothing. A column that a file does not have reads
as null, also if the table now requires it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg import expressions as ex
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, Not, Or, visitors
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import HourTransform, MonthTransform, TruncateTransform, YearTransform
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField, StringType

from floodmark.commit.live_files import LiveFile
from floodmark.errors import Invalid
from floodmark.model import Scalar
from floodmark.rows.schema import nearest, user_fields
from floodmark.rows.sql.condition import (
    column_name,
    columns_by_name,
    conjuncts,
    implied,
    is_certain,
    predicates,
    read,
    text_of,
)
from floodmark.rows.sql.groups import group_statistics
from floodmark.rows.sql.positions import (
    check_where,
    collect_positions,
    count_positions,
    mentioned,
    spark_positions,
)

__all__ = ["Where", "check_where", "collect_positions", "count_positions", "mentioned", "spark_positions"]

_COMPARE: dict[type[ex.BoundPredicate], Callable[[pa.Array, pa.Scalar], pa.BooleanArray]] = {
    ex.BoundEqualTo: pc.equal,
    ex.BoundNotEqualTo: pc.not_equal,
    ex.BoundLessThan: pc.less,
    ex.BoundLessThanOrEqual: pc.less_equal,
    ex.BoundGreaterThan: pc.greater,
    ex.BoundGreaterThanOrEqual: pc.greater_equal,
}
# Values that are missing or not of their column's type, and days outside Python's calendar.
_UNREADABLE = (ValueError, TypeError, OverflowError, IndexError, struct.error)
# More than there are up to the year 9999, fewer than an overflow leaves.
_HOURS_MAX = 10**9


@dataclass(frozen=True)
class Where:
    """A condition on the rows of one table: two texts, so that it can be sent to executors."""

    text: str
    schema_json: str

    @classmethod
    def parse(cls, text: str, schema: Schema) -> Where:
        """The condition; `Invalid` if it is empty, or if it certainly names a column that does not exist."""
        if not isinstance(text, str) or not text.strip():
            raise Invalid("there is no condition", given=repr(text), advice="Write one like: country = 'XX'.")
        where = cls(text, schema.model_dump_json())
        unknown = where._meaning.unknown
        if unknown is not None:
            names = [field.name for field in user_fields(schema)]
            raise Invalid("there is no such column for the condition", column=unknown, advice=nearest(unknown, names))
        return where

    @classmethod
    def everything(cls) -> Where:
        """All rows, of any table."""
        return cls("true", Schema().model_dump_json())

    @property
    def plain(self) -> bool:
        """Whether Arrow alone can evaluate it, with exactly Spark's meaning."""
        return self._meaning.plain

    @property
    def prunes(self) -> str | None:
        """What of it is compared with partitions and statistics; None if nothing is."""
        implied = self._meaning.implied
        return None if isinstance(implied, AlwaysTrue) else text_of(implied)

    @property
    def fields(self) -> list[NestedField]:
        """The table's columns that a plain condition reads; always at least one, so that rows can be counted."""
        self._require_plain()
        return list(self._meaning.fields)

    def mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        """Which rows match; the batch has the columns of `fields` by name. Without nulls: unknown is no match."""
        self._require_plain()
        return pc.fill_null(_evaluate(self._meaning.bound, batch), False)

    def may_match(self, file: LiveFile, metadata: TableMetadata) -> bool:
        """False only if it is proven that no row of the file matches."""
        meaning = self._meaning
        if isinstance(meaning.implied, AlwaysTrue):
            return True
        spec = metadata.specs().get(file.spec_id)
        try:
            if spec is not None and not self._partition_may_match(spec, file.data_file.partition):
                return False
        except _UNREADABLE:
            pass  # the statistics are checked next
        try:
            return bool(meaning.inclusive.eval(file.data_file))
        except _UNREADABLE:
            return True

    def group_test(self, metadata: pq.FileMetaData, names: Mapping[int, str]) -> Sequence[bool]:
        """For each row group of a file: false only if it is proven that no row of it matches (rows/project.py)."""
        meaning = self._meaning
        if isinstance(meaning.implied, AlwaysTrue):
            return [True] * metadata.num_row_groups
        try:
            return [bool(meaning.inclusive.eval(one)) for one in group_statistics(metadata, names, meaning.fields)]
        except _UNREADABLE:
            return [True] * metadata.num_row_groups

    def must_match(self, file: LiveFile, metadata: TableMetadata) -> bool:
        """True only if the file's statistics prove that every row of it matches."""
        meaning = self._meaning
        if not meaning.plain:
            return False
        if isinstance(meaning.implied, AlwaysTrue):
            return True
        # Where values are compared, PyIceberg treats a null as a match of != and a missing count as no nulls. So it is
        # used only for columns that are known to have a value in every row.
        values, nulls = file.data_file.value_counts or {}, file.data_file.null_value_counts or {}
        for predicate in predicates(meaning.implied):
            field_id = meaning.columns[column_name(predicate).lower()].field_id
            compared = not isinstance(predicate, ex.IsNull | ex.NotNull)
            if values.get(field_id) != file.rows or (compared and nulls.get(field_id) != 0):
                return False
        try:
            return bool(meaning.strict.eval(file.data_file))
        except _UNREADABLE:
            return False

    def _partition_may_match(self, spec: PartitionSpec, values: Record) -> bool:
        schema = self._meaning.schema
        trusted = (place for place, field in enumerate(spec.fields) if _trusted(field, schema, values[place]))
        return _partition_test(self.text, self.schema_json, spec, tuple(trusted))(values)

    @property
    def _meaning(self) -> _Meaning:
        return _meaning(self.text, self.schema_json)

    def _require_plain(self) -> None:
        if not self.plain:
            raise ValueError(f"only Spark can evaluate this condition: {self.text}")


@dataclass(frozen=True)
class _Meaning:
    """The parsed part of a condition.

    `implied` is true for every row that matches; for a plain condition it is the condition itself. `unknown` is a
    column in it that the table does not have.
    """

    schema: Schema
    plain: bool
    implied: BooleanExpression
    unknown: str | None = None

    @cached_property
    def columns(self) -> dict[str, NestedField]:
        return columns_by_name(self.schema)

    @cached_property
    def fields(self) -> tuple[NestedField, ...]:
        used = {column_name(predicate).lower() for predicate in predicates(self.implied)}
        return tuple(field for name, field in self.columns.items() if name in used) or self.schema.fields[:1]

    @cached_property
    def bound(self) -> BooleanExpression:
        return visitors.bind(self.schema, self.implied, case_sensitive=False)

    @cached_property
    def inclusive(self) -> visitors._InclusiveMetricsEvaluator:
        return visitors._InclusiveMetricsEvaluator(self.schema, self.implied, case_sensitive=False)

    @cached_property
    def strict(self) -> visitors._StrictMetricsEvaluator:
        return visitors._StrictMetricsEvaluator(self.schema, self.implied, case_sensitive=False)


@lru_cache(maxsize=64)
def _meaning(text: str, schema_json: str) -> _Meaning:
    # All optional: PyIceberg assumes that a required column has no nulls, but a file may not have the column at all.
    fields = user_fields(Schema.model_validate_json(schema_json))
    schema = Schema(*(field.model_copy(update={"required": False}) for field in fields))
    columns = columns_by_name(schema)
    tree = read(text)
    if tree is not None:
        unknown = next((column_name(p) for p in predicates(tree) if column_name(p).lower() not in columns), None)
        names = {name.lower() for name in schema.column_names}
        if unknown is not None and unknown.lower() not in names:
            return _Meaning(schema, False, AlwaysTrue(), unknown)
        return _Meaning(schema, is_certain(tree, columns), implied(tree, columns))
    known: BooleanExpression = AlwaysTrue()
    for part in conjuncts(text, schema):
        tree = read(part)
        if tree is not None:
            known = And(known, implied(tree, columns))
    return _Meaning(schema, False, known)


@lru_cache(maxsize=256)
def _partition_test(
    text: str, schema_json: str, spec: PartitionSpec, trusted: tuple[int, ...]
) -> Callable[[Record], bool]:
    """Whether rows may match in a partition of these values, as far as the values at the trusted places show."""
    meaning = _meaning(text, schema_json)
    telling = PartitionSpec(*(spec.fields[place] for place in trusted), spec_id=spec.spec_id)
    projected = visitors.inclusive_projection(meaning.schema, telling, case_sensitive=False)(meaning.implied)
    values = Schema(*spec.partition_type(meaning.schema).fields)
    return visitors.expression_evaluator(values, projected, case_sensitive=True)


def _trusted(field: PartitionField, schema: Schema, value: Scalar) -> bool:
    """Whether a partition's value is what its rows have, and not the result of an overflow in the transform.

    The lowest numbers, truncated, overflow to the highest, and so do hours. Years and months far off become null.
    """
    match field.transform:
        case TruncateTransform():
            source = next((column.field_type for column in schema.fields if column.field_id == field.source_id), None)
            return isinstance(source, StringType)
        case YearTransform() | MonthTransform():
            return value is not None
        case HourTransform():
            return isinstance(value, int) and abs(value) < _HOURS_MAX
    return True


def _evaluate(tree: BooleanExpression, batch: pa.RecordBatch) -> pa.BooleanArray:
    """True, false or null (unknown) for every row, by SQL's logic."""
    match tree:
        case And():
            return pc.and_kleene(_evaluate(tree.left, batch), _evaluate(tree.right, batch))
        case Or():
            return pc.or_kleene(_evaluate(tree.left, batch), _evaluate(tree.right, batch))
        case Not():
            return pc.invert(_evaluate(tree.child, batch))
        case ex.BoundPredicate():
            return _evaluate_predicate(tree, batch.column(tree.term.ref().field.name))
    return pa.repeat(pa.scalar(isinstance(tree, AlwaysTrue)), len(batch))


def _evaluate_predicate(predicate: ex.BoundPredicate, values: pa.Array) -> pa.BooleanArray:
    match predicate:
        case ex.BoundIsNull():
            return pc.is_null(values)
        case ex.BoundNotNull():
            return pc.is_valid(values)
        case ex.BoundStartsWith():
            return pc.starts_with(values, predicate.literal.value)
        case ex.BoundNotStartsWith():
            return pc.invert(pc.starts_with(values, predicate.literal.value))
        case ex.BoundIn() | ex.BoundNotIn():
            # Arrow finds a null in no set; in SQL the result is unknown.
            among = pc.is_in(values, pa.array(list(predicate.value_set), values.type))
            found = pc.if_else(pc.is_valid(values), among, pa.scalar(None, pa.bool_()))
            return pc.invert(found) if isinstance(predicate, ex.BoundNotIn) else found
        case ex.BoundLiteralPredicate() if type(predicate) in _COMPARE:
            return _COMPARE[type(predicate)](values, pa.scalar(predicate.literal.value, values.type))
    raise ValueError(f"not a plain comparison: {predicate}")
