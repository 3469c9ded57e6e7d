"""A condition on rows in Spark SQL (`country = 'XX'`): which files may hold matching rows, and which rows match.

A condition is plain if Arrow can evaluate it with exactly Spark's meaning, nulls included (`rows/sql/condition.py`).
Spark evaluates all others (`rows/sql/positions.py`); what they certainly imply, such as a plain conjunct or the range
of days of a timestamp (`rows/sql/moments.py`), still prunes files. A file is pruned only if its partition or statistics
prove that no row of it matches. A missing or unreadable value proves nothing. A column that a file does not have reads
as null, also if the table now requires it.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg import expressions as ex
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, Not, Or, visitors
from pyiceberg.manifest import ManifestFile, PartitionFieldSummary
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import HourTransform, MonthTransform, TruncateTransform, YearTransform
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField, StringType

from floodmark.commit.file_columns import FileColumns, PlannedDataFile
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Invalid
from floodmark.model import Scalar
from floodmark.rows.schema import nearest, user_fields
from floodmark.rows.sql import file_test
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
from floodmark.rows.sql.groups import group_spans
from floodmark.rows.sql.positions import (
    Searched,
    check_where,
    collect_positions,
    count_positions,
    mentioned,
    spark_positions,
)

__all__ = ["Searched", "Where", "check_where", "collect_positions", "count_positions", "mentioned", "spark_positions"]

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

    def may_match(self, file: LiveFile, metadata: TableMetadata | None = None) -> bool:
        """False only if it is proven that no row of the file matches; without metadata, by its statistics alone."""
        meaning = self._meaning
        if isinstance(meaning.implied, AlwaysTrue):
            return True
        spec = None if metadata is None else metadata.specs().get(file.spec_id)
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
        may = file_test.test(self._meaning.inclusive.expr, group_spans(metadata, names)).may
        found: list[bool] = np.broadcast_to(may, metadata.num_row_groups).tolist()
        return found

    def which_may_match(self, columns: FileColumns, metadata: TableMetadata) -> file_test.Mask:
        """Where `may_match` is true, of all files of a manifest at once; or not even there, if that is proven."""
        meaning, everywhere = self._meaning, np.ones(columns.count, np.bool_)
        if isinstance(meaning.implied, AlwaysTrue):
            return everywhere
        by_bounds = file_test.test(meaning.inclusive.expr, file_test.file_spans(columns))
        known = (columns.rows != 0) & (by_bounds.may | (columns.rows < 0))
        by_partition = self._partitions_may_match(columns, metadata.specs().get(columns.spec_id))
        may: file_test.Mask = everywhere & known & by_partition.may
        if not (by_bounds.complete and by_partition.complete):
            for at in np.flatnonzero(may).tolist():
                may[at] = self.may_match(LiveFile(PlannedDataFile(columns, at), None, None), metadata)
        return may

    def which_may_hold(self, manifests: Sequence[ManifestFile], metadata: TableMetadata) -> list[bool]:
        """False for a manifest only if its partitions' summary proves that no row of its files matches."""
        found = [True] * len(manifests)
        if isinstance(self._meaning.implied, AlwaysTrue):
            return found
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for at, manifest in enumerate(manifests):
            spec = metadata.specs().get(manifest.partition_spec_id)
            if spec is not None and len(manifest.partitions or ()) == len(spec.fields):
                alike[spec.spec_id, self._trusted_summaries(spec, manifest.partitions or [])].append(at)
        for (spec_id, trusted), places in alike.items():
            partition = _partition(self.text, self.schema_json, metadata.specs()[spec_id], trusted)
            summaries = [manifests[at].partitions or [] for at in places]
            verdict = file_test.test(partition.bound, file_test.summary_spans(summaries, partition.values.fields))
            for at, may in zip(places, np.broadcast_to(verdict.may, len(places)).tolist(), strict=True):
                found[at] = may
        return found

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
        return _partition(self.text, self.schema_json, spec, tuple(trusted)).may_match(values)

    def _partitions_may_match(self, columns: FileColumns, spec: PartitionSpec | None) -> file_test.Verdict:
        everywhere = np.ones(columns.count, np.bool_)
        if spec is None:
            return file_test.Verdict(everywhere, True)
        if len(columns.partition) != len(spec.fields):
            return file_test.Verdict(everywhere, False)
        may, complete = np.zeros(columns.count, np.bool_), True
        for trusted, places in self._by_trust(columns, spec).items():
            partition = _partition(self.text, self.schema_json, spec, trusted)
            verdict = file_test.test(partition.bound, file_test.partition_spans(columns, partition.values.fields))
            may |= places & verdict.may
            complete = complete and verdict.complete
        return file_test.Verdict(may, complete)

    def _by_trust(self, columns: FileColumns, spec: PartitionSpec) -> dict[tuple[int, ...], file_test.Mask]:
        """Where which of the partition's values are trusted."""
        schema = self._meaning.schema
        groups: dict[tuple[int, ...], file_test.Mask] = {(): np.ones(columns.count, np.bool_)}
        for place, field in enumerate(spec.fields):
            match _trust(field, schema):
                case _Trust.ALWAYS:
                    trusted = np.ones(columns.count, np.bool_)
                case _Trust.NEVER:
                    trusted = np.zeros(columns.count, np.bool_)
                case trust:
                    values = columns.partition[place].to_pylist()
                    trusted = np.array([_is_trusted(trust, value) for value in values], np.bool_)
            split = (
                (one, part)
                for places, mask in groups.items()
                for one, part in (((*places, place), mask & trusted), (places, mask & ~trusted))
            )
            groups = {one: part for one, part in split if part.any()}
        return groups

    def _trusted_summaries(self, spec: PartitionSpec, summaries: Sequence[PartitionFieldSummary]) -> tuple[int, ...]:
        """The places whose values are trusted in all files of a manifest."""
        schema = self._meaning.schema
        return tuple(
            place
            for place, (field, summary) in enumerate(zip(spec.fields, summaries, strict=True))
            if (trust := _trust(field, schema)) is _Trust.ALWAYS
            or (
                trust is not _Trust.NEVER
                and not summary.contains_null
                and all(_is_trusted(trust, _number(raw)) for raw in (summary.lower_bound, summary.upper_bound))
            )
        )

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
    tree = read(text, columns)
    if tree is not None:
        unknown = next((column_name(p) for p in predicates(tree) if column_name(p).lower() not in columns), None)
        names = {name.lower() for name in schema.column_names}
        if unknown is not None and unknown.lower() not in names:
            return _Meaning(schema, False, AlwaysTrue(), unknown)
        return _Meaning(schema, is_certain(tree, columns), implied(tree, columns))
    known: BooleanExpression = AlwaysTrue()
    for part in conjuncts(text, schema):
        tree = read(part, columns)
        if tree is not None:
            known = And(known, implied(tree, columns))
    return _Meaning(schema, False, known)


@dataclass(frozen=True)
class _Partition:
    """What a condition means for the partition values of a spec, as far as those at the trusted places show."""

    values: Schema
    projected: BooleanExpression

    @cached_property
    def bound(self) -> BooleanExpression:
        return visitors.bind(self.values, visitors.rewrite_not(self.projected), case_sensitive=True)

    @cached_property
    def may_match(self) -> Callable[[Record], bool]:
        return visitors.expression_evaluator(self.values, self.projected, case_sensitive=True)


@lru_cache(maxsize=256)
def _partition(text: str, schema_json: str, spec: PartitionSpec, trusted: tuple[int, ...]) -> _Partition:
    meaning = _meaning(text, schema_json)
    telling = PartitionSpec(*(spec.fields[place] for place in trusted), spec_id=spec.spec_id)
    values = Schema(*spec.partition_type(meaning.schema).fields)
    try:
        projected = visitors.inclusive_projection(meaning.schema, telling, case_sensitive=False)(meaning.implied)
        found = _Partition(values, projected)
        found.bound  # noqa: B018
    except _UNREADABLE:
        return _Partition(values, AlwaysTrue())  # proves nothing, as after the last day of Python's calendar
    return found


class _Trust(Enum):
    """When a partition's value is what its rows have, and not the result of an overflow in the transform.

    The lowest numbers, truncated, overflow to the highest, and so do hours. Years and months far off become null.
    """

    ALWAYS = "always"
    NEVER = "never"
    IF_VALUE = "if it is not null"
    IF_NEAR = "if it is near"


def _trust(field: PartitionField, schema: Schema) -> _Trust:
    match field.transform:
        case TruncateTransform():
            source = next((column.field_type for column in schema.fields if column.field_id == field.source_id), None)
            return _Trust.ALWAYS if isinstance(source, StringType) else _Trust.NEVER
        case YearTransform() | MonthTransform():
            return _Trust.IF_VALUE
        case HourTransform():
            return _Trust.IF_NEAR
    return _Trust.ALWAYS


def _is_trusted(trust: _Trust, value: Scalar) -> bool:
    match trust:
        case _Trust.IF_VALUE:
            return value is not None
        case _Trust.IF_NEAR:
            return isinstance(value, int) and abs(value) < _HOURS_MAX
    return trust is _Trust.ALWAYS


def _trusted(field: PartitionField, schema: Schema, value: Scalar) -> bool:
    return _is_trusted(_trust(field, schema), value)


def _number(raw: bytes | None) -> int | None:
    """A bound of years, months or hours."""
    return int.from_bytes(raw, "little", signed=True) if raw is not None and len(raw) == 4 else None


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
