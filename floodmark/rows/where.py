"""A condition on rows in Spark SQL (`country = 'XX'`): which files may hold matching rows, and which rows match.

A condition is plain if Arrow can evaluate it with exactly Spark's meaning, nulls included. PyIceberg's parser reads it,
and only what is certain passes: whole numbers, text, booleans and days compared with literals of their own kind. All
other conditions are evaluated by Spark (`rows/positions.py`); of those, the conjuncts that are plain still prune files.
A file is pruned only if its partition or statistics prove that no row of it matches. What is missing or cannot be read
proves nothing. A column that a file does not have reads as null, also if the table now requires it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import expressions as ex
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, Not, Or, UnboundPredicate, visitors
from pyiceberg.expressions.literals import BooleanLiteral, LongLiteral, StringLiteral
from pyiceberg.expressions.parser import parse as parse_iceberg
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import TruncateTransform
from pyiceberg.types import (
    BooleanType,
    DateType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
)
from pyparsing import ParseBaseException

from floodmark.catalog.live import LiveFile
from floodmark.errors import Invalid
from floodmark.rows.positions import check_where, count_positions, spark_positions
from floodmark.rows.schema import nearest, user_fields

__all__ = ["Where", "check_where", "count_positions", "spark_positions"]

_NESTING_MAX = 40
# What both readers, PyIceberg's and Spark's, take apart in the same way. Text in quotes holds no quote, no backslash
# and no control character.
_TOKEN = re.compile(
    r"""[ \t\r\n]*(?:
      (?P<word>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>-?[0-9]+)(?![A-Za-z0-9_.])
    | (?P<text>'[^'\\\x00-\x1f\x7f\ud800-\udfff]*')
    | (?P<sign>[<>=!]+|[(),])
    )""",
    re.VERBOSE,
)
_SIGNS = frozenset({"=", "==", "!=", "<>", "<", "<=", ">", ">=", "(", ")", ","})
_PREFIX = re.compile(r"'[^%_]*%?'")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# For PyIceberg these could be columns. For Spark they are operators, literals, functions, or begin a query.
_NO_COLUMN = re.compile(
    r"and|or|not|is|in|like|between|null|true|false|nan|case|when|then|else|end|exists|any|all|some|distinct|interval"
    r"|cast|select|from|with|values|table|map|reduce|user|\w+_user|current_\w+|localtime\w*",
    re.IGNORECASE,
)
# A part of a condition as far as its top level is concerned.
_PART = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\w+|.", re.DOTALL)
# Escapes, raw text, comments and variables: with them, where a quote ends is not certain.
_UNCERTAIN = re.compile(r"\\|\$|--|/\*|[{};]")
_EQUALITY = (ex.EqualTo, ex.NotEqualTo, ex.In, ex.NotIn)
_COMPARE: dict[type[Any], Callable[..., Any]] = {
    ex.BoundEqualTo: pc.equal,
    ex.BoundNotEqualTo: pc.not_equal,
    ex.BoundLessThan: pc.less,
    ex.BoundLessThanOrEqual: pc.less_equal,
    ex.BoundGreaterThan: pc.greater,
    ex.BoundGreaterThanOrEqual: pc.greater_equal,
}
# Values that are not of their column's type or are missing, and days that Python cannot say.
_UNREADABLE = (ValueError, TypeError, OverflowError, IndexError, struct.error)


@dataclass(frozen=True)
class Where:
    """A condition on the rows of one table: two texts, so that it travels to executors."""

    text: str
    schema_json: str

    @classmethod
    def parse(cls, text: str, schema: Schema) -> Where:
        """The condition; `Invalid` if there is none, or if it certainly names a column that is not there."""
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
        """Arrow alone can evaluate it, with exactly Spark's meaning."""
        return self._meaning.plain

    @property
    def fields(self) -> list[NestedField]:
        """The table's columns that a plain condition reads; always one at least, for the rows to be counted."""
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
            if spec is not None and not _partition_test(self.text, self.schema_json, spec)(file.data_file.partition):
                return False
        except _UNREADABLE:
            pass  # the statistics are asked next
        try:
            return bool(meaning.inclusive.eval(file.data_file))
        except _UNREADABLE:
            return True

    def must_match(self, file: LiveFile, metadata: TableMetadata) -> bool:
        """True only if the file's statistics prove that every row of it matches."""
        meaning = self._meaning
        if not meaning.plain:
            return False
        if isinstance(meaning.implied, AlwaysTrue):
            return True
        # Where values are compared, PyIceberg takes a null for a match of != and a missing count for no nulls. So it
        # is asked only about columns that are known to have a value in every row.
        values, nulls = file.data_file.value_counts or {}, file.data_file.null_value_counts or {}
        for predicate in _predicates(meaning.implied):
            field_id = meaning.columns[_name(predicate).lower()].field_id
            compared = not isinstance(predicate, ex.IsNull | ex.NotNull)
            if values.get(field_id) != file.rows or (compared and nulls.get(field_id) != 0):
                return False
        try:
            return bool(meaning.strict.eval(file.data_file))
        except _UNREADABLE:
            return False

    @property
    def _meaning(self) -> _Meaning:
        return _meaning(self.text, self.schema_json)

    def _require_plain(self) -> None:
        if not self.plain:
            raise ValueError(f"only Spark can evaluate this condition: {self.text}")


@dataclass(frozen=True)
class _Meaning:
    """What is understood of a condition.

    `implied` is true for every row that matches; for a plain condition it is the condition itself. `unknown` is a
    column in it that the table does not have.
    """

    schema: Schema
    plain: bool
    implied: BooleanExpression
    unknown: str | None = None

    @cached_property
    def columns(self) -> dict[str, NestedField]:
        return _columns(self.schema)

    @cached_property
    def fields(self) -> tuple[NestedField, ...]:
        used = {_name(predicate).lower() for predicate in _predicates(self.implied)}
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
    # All optional: PyIceberg takes a required column for one without nulls, but a file may not have it at all.
    fields = user_fields(Schema.model_validate_json(schema_json))
    schema = Schema(*(field.model_copy(update={"required": False}) for field in fields))
    columns = _columns(schema)
    tree = _read(text)
    if tree is not None:
        unknown = next((_name(p) for p in _predicates(tree) if _name(p).lower() not in columns), None)
        names = {name.lower() for name in schema.column_names}
        if unknown is not None and unknown.lower() not in names:
            return _Meaning(schema, False, AlwaysTrue(), unknown)
        if _certain(tree, columns):
            return _Meaning(schema, True, tree)
    implied: BooleanExpression = AlwaysTrue()
    for part in _conjuncts(text, schema):
        tree = _read(part)
        if tree is not None and _certain(tree, columns):
            implied = And(implied, tree)
    return _Meaning(schema, False, implied)


def _columns(schema: Schema) -> dict[str, NestedField]:
    """The columns by their name in lower case, without those that differ in case only."""
    counts = Counter(field.name.lower() for field in schema.fields)
    return {field.name.lower(): field for field in schema.fields if counts[field.name.lower()] == 1}


def _read(text: str) -> BooleanExpression | None:
    """The condition as PyIceberg reads it; None if it is not certain that Spark reads the same."""
    tokens: list[str] = []
    position, depth = 0, 0
    body = text.rstrip(" \t\r\n")
    while position < len(body):
        found = _TOKEN.match(body, position)
        if found is None or (found["sign"] and found["sign"] not in _SIGNS):
            return None
        token = str(found[found.lastgroup or 0])
        if tokens and tokens[-1].lower() == "like" and not _PREFIX.fullmatch(token):
            return None
        depth += (token == "(") - (token == ")")
        if depth > _NESTING_MAX:
            return None
        tokens.append(token)
        position = found.end()
    if "${" in body:
        return None  # Spark puts a variable there, also inside text
    try:
        tree = parse_iceberg(" ".join(tokens))
    except (ParseBaseException, ValueError, TypeError, RecursionError):
        return None
    return None if any(_NO_COLUMN.fullmatch(_name(predicate)) for predicate in _predicates(tree)) else tree


def _predicates(tree: BooleanExpression) -> Iterator[UnboundPredicate]:
    if isinstance(tree, And | Or):
        yield from _predicates(tree.left)
        yield from _predicates(tree.right)
    elif isinstance(tree, Not):
        yield from _predicates(tree.child)
    elif isinstance(tree, UnboundPredicate):
        yield tree


def _name(predicate: UnboundPredicate) -> str:
    term: Any = predicate.term
    return str(term.name)


def _certain(tree: BooleanExpression, columns: dict[str, NestedField]) -> bool:
    """Every comparison in it means the same for Arrow and for Spark, whatever the session's settings."""
    return all(
        (column := columns.get(_name(predicate).lower())) is not None and _comparable(predicate, column.field_type)
        for predicate in _predicates(tree)
    )


def _comparable(predicate: UnboundPredicate, kind: IcebergType) -> bool:
    if isinstance(predicate, ex.IsNull | ex.NotNull):
        return isinstance(kind, PrimitiveType)
    if isinstance(predicate, ex.StartsWith | ex.NotStartsWith):
        return isinstance(kind, StringType)
    if isinstance(predicate, ex.SetPredicate):
        literals = list(predicate.literals)
    elif isinstance(predicate, ex.LiteralPredicate):
        literals = [predicate.literal]
    else:
        return False
    if isinstance(kind, BooleanType) and not isinstance(predicate, _EQUALITY):
        return False
    return all(_of_kind(literal, kind) for literal in literals)


def _of_kind(literal: Any, kind: IcebergType) -> bool:
    value = literal.value
    match kind:
        case IntegerType() | LongType():
            # Beyond the range, PyIceberg answers without looking at nulls.
            return isinstance(literal, LongLiteral) and kind.min <= value <= kind.max
        case StringType():
            return isinstance(literal, StringLiteral)
        case BooleanType():
            return isinstance(literal, BooleanLiteral)
        case DateType():
            return isinstance(literal, StringLiteral) and _is_day(value)
    return False


def _is_day(text: str) -> bool:
    try:
        return _DAY.fullmatch(text) is not None and date.fromisoformat(text) is not None
    except ValueError:
        return False


def _conjuncts(text: str, schema: Schema) -> list[str]:
    """The parts of a condition that AND joins at its top level; none if that is not certain.

    AND binds weaker than all else but OR, so a part ends where the next one begins. The AND of BETWEEN is none; CASE
    may hold some. A column may be named like one of these words: then nothing is certain.
    """
    joining = {"and", "or", "between", "case"}
    names = {part.lower() for name in schema.column_names for part in name.split(".")}
    if _UNCERTAIN.search(text) or names & joining:
        return []
    parts, depth, between = [""], 0, 0
    for token in _PART.findall(text):
        word = token.lower()
        depth += (token in "([") - (token in ")]")
        if depth < 0 or token in "'\"`" or (depth == 0 and word in ("or", "case")):
            return []
        if word in joining and parts[-1].rstrip().endswith((".", ":")):
            return []  # the name of a key in a map
        between += depth == 0 and word == "between"
        if depth == 0 and word == "and" and not between:
            parts.append("")
            continue
        between -= depth == 0 and word == "and"
        parts[-1] += token
    if depth or not all(part.strip() for part in parts):
        return []
    return parts


@lru_cache(maxsize=256)
def _partition_test(text: str, schema_json: str, spec: PartitionSpec) -> Callable[[Any], bool]:
    meaning = _meaning(text, schema_json)
    trusted = PartitionSpec(*(field for field in spec.fields if _trusted(field, meaning.schema)), spec_id=spec.spec_id)
    projected = visitors.inclusive_projection(meaning.schema, trusted, case_sensitive=False)(meaning.implied)
    values = Schema(*spec.partition_type(meaning.schema).fields)
    return visitors.expression_evaluator(values, projected, case_sensitive=True)


def _trusted(field: PartitionField, schema: Schema) -> bool:
    """The lowest numbers, truncated, overflow to the highest: such a partition is not where the number belongs."""
    source = next((column.field_type for column in schema.fields if column.field_id == field.source_id), None)
    return isinstance(source, StringType) or not isinstance(field.transform, TruncateTransform)


def _evaluate(tree: BooleanExpression, batch: pa.RecordBatch) -> Any:
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


def _evaluate_predicate(predicate: ex.BoundPredicate, values: Any) -> Any:
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
            # Arrow finds a null in no set; SQL does not know.
            among = pc.is_in(values, pa.array(list(predicate.value_set), values.type))
            found = pc.if_else(pc.is_valid(values), among, pa.scalar(None, pa.bool_()))
            return pc.invert(found) if isinstance(predicate, ex.BoundNotIn) else found
        case ex.BoundLiteralPredicate() if type(predicate) in _COMPARE:
            return _COMPARE[type(predicate)](values, pa.scalar(predicate.literal.value, values.type))
    raise ValueError(f"not a plain comparison: {predicate}")
