"""The text of a condition, parsed as far as Spark certainly parses it in the same way.

PyIceberg's parser reads it, and gets only a text whose every part means the same to both. A tree is certain if each
comparison in it also gives the same answer in Arrow as in Spark, nulls included: whole numbers, text, booleans and days
compared with literals of their own kind. Of any other tree, and of the conjuncts of a text without a tree, only what is
true for every matching row is known. A part that is not understood is true for all rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import date

from pyiceberg import expressions as ex
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, Not, Or, Reference, UnboundPredicate
from pyiceberg.expressions.literals import BooleanLiteral, LongLiteral, StringLiteral, TimestampLiteral
from pyiceberg.expressions.parser import parse as parse_iceberg
from pyiceberg.schema import Schema
from pyiceberg.typedef import LiteralValue
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
from pyiceberg.utils.datetime import micros_to_timestamp
from pyparsing import ParseBaseException

from floodmark.rows.sql.moments import TYPE_WORDS, is_typed, typed_text, untyped_day, widened

_NESTING_MAX = 40
# What PyIceberg and Spark parse in the same way. Quoted text holds no quote, no backslash and no control character.
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
# PyIceberg could read these as columns. For Spark they are operators, literals, functions, or begin a query.
NO_COLUMN = re.compile(
    r"and|or|not|is|in|like|between|null|true|false|nan|case|when|then|else|end|exists|any|all|some|distinct|interval"
    r"|cast|select|from|with|values|table|map|reduce|user|\w+_user|current_\w+|localtime\w*",
    re.IGNORECASE,
)
# A part of a condition as far as its top level is concerned.
_PART = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\w+|.", re.DOTALL)
# Escapes, raw text, comments and variables: with them, where a quote ends is not certain.
_UNCERTAIN = re.compile(r"\\|\$|--|/\*|[{};]")
_EQUALITY = (ex.EqualTo, ex.NotEqualTo, ex.In, ex.NotIn)


def columns_by_name(schema: Schema) -> dict[str, NestedField]:
    """The columns by their name in lower case, without those that differ in case only."""
    counts = Counter(field.name.lower() for field in schema.fields)
    return {field.name.lower(): field for field in schema.fields if counts[field.name.lower()] == 1}


def read(text: str, columns: dict[str, NestedField]) -> BooleanExpression | None:
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
        if found["text"] and tokens and tokens[-1].lower() in TYPE_WORDS:
            token = typed_text(tokens.pop(), token)
        depth += (token == "(") - (token == ")")
        if depth > _NESTING_MAX:
            return None
        tokens.append(token)
        position = found.end()
    if "${" in body:
        return None  # Spark substitutes a variable there, also inside text
    try:
        tree = parse_iceberg(" ".join(tokens))
    except (ParseBaseException, ValueError, TypeError, RecursionError):
        return None
    if any(NO_COLUMN.fullmatch(column_name(predicate)) for predicate in predicates(tree)):
        return None
    return _with_days(tree, columns)


def _with_days(tree: BooleanExpression, columns: dict[str, NestedField]) -> BooleanExpression:
    """The tree with `day = DATE '2024-01-01'` as `day = '2024-01-01'`, which is the same for a column of days."""
    match tree:
        case And():
            return And(_with_days(tree.left, columns), _with_days(tree.right, columns))
        case Or():
            return Or(_with_days(tree.left, columns), _with_days(tree.right, columns))
        case Not():
            return Not(_with_days(tree.child, columns))
        case ex.LiteralPredicate() | ex.SetPredicate():
            column = columns.get(column_name(tree).lower())
            if column is None or not isinstance(column.field_type, DateType):
                return tree
            if isinstance(tree, ex.SetPredicate):
                return type(tree)(tree.term, {_bare(literal) for literal in tree.literals})
            return type(tree)(tree.term, _bare(tree.literal))
    return tree


def _bare(literal: LiteralValue) -> LiteralValue:
    """A literal of type DATE as bare text; any other as it is."""
    return StringLiteral(untyped_day(literal.value)) if isinstance(literal, StringLiteral) else literal


def predicates(tree: BooleanExpression) -> Iterator[UnboundPredicate]:
    if isinstance(tree, And | Or):
        yield from predicates(tree.left)
        yield from predicates(tree.right)
    elif isinstance(tree, Not):
        yield from predicates(tree.child)
    elif isinstance(tree, UnboundPredicate):
        yield tree


_SHOWN: dict[type[object], str] = {
    ex.EqualTo: "=",
    ex.NotEqualTo: "!=",
    ex.LessThan: "<",
    ex.LessThanOrEqual: "<=",
    ex.GreaterThan: ">",
    ex.GreaterThanOrEqual: ">=",
    ex.StartsWith: "starts with",
    ex.NotStartsWith: "does not start with",
    ex.In: "in",
    ex.NotIn: "not in",
    ex.IsNull: "is null",
    ex.NotNull: "is not null",
}
_VALUES_SHOWN = 5


def text_of(tree: BooleanExpression) -> str:
    """A tree for people to read; what is true for all rows is left out."""
    match tree:
        case And():
            return " and ".join(text for side in (tree.left, tree.right) if (text := text_of(side)))
        case Or():
            return f"({text_of(tree.left)} or {text_of(tree.right)})"
        case Not():
            return f"not ({text_of(tree.child)})"
        case UnboundPredicate():
            return f"{column_name(tree)} {_SHOWN[type(tree)]}{_values_text(tree)}"
    return ""


def _values_text(predicate: UnboundPredicate) -> str:
    if isinstance(predicate, ex.LiteralPredicate):
        return f" {_value_text(predicate.literal)}"
    if isinstance(predicate, ex.SetPredicate):
        values = sorted(map(_value_text, predicate.literals))
        more = ", …" if len(values) > _VALUES_SHOWN else ""
        return f" ({', '.join(values[:_VALUES_SHOWN])}{more})"
    return ""


def _value_text(literal: LiteralValue) -> str:
    if isinstance(literal, TimestampLiteral):
        with suppress(OverflowError, ValueError):  # outside Python's calendar: as a number
            return f"'{micros_to_timestamp(literal.value).isoformat(sep=' ')}'"
    return repr(literal.value)


def column_name(predicate: UnboundPredicate) -> str:
    if not isinstance(predicate.term, Reference):
        raise TypeError(f"not a column: {predicate.term}")
    return predicate.term.name


def is_certain(tree: BooleanExpression, columns: dict[str, NestedField]) -> bool:
    """Whether every comparison in it means the same for Arrow and for Spark, whatever the session's settings."""
    return all(
        (column := columns.get(column_name(predicate).lower())) is not None
        and _comparable(predicate, column.field_type)
        for predicate in predicates(tree)
    )


def implied(tree: BooleanExpression, columns: dict[str, NestedField]) -> BooleanExpression:
    """What is true for every row that matches the tree; certain itself, but for timestamps compared with moments."""
    match tree:
        case And():
            return And(implied(tree.left, columns), implied(tree.right, columns))
        case Or():
            return Or(implied(tree.left, columns), implied(tree.right, columns))
        case _ if is_certain(tree, columns):
            return tree
        case UnboundPredicate() if (column := columns.get(column_name(tree).lower())) is not None:
            return widened(tree, column.field_type)
    return AlwaysTrue()


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


def _of_kind(literal: LiteralValue, kind: IcebergType) -> bool:
    value = literal.value
    match kind:
        case IntegerType() | LongType():
            # Beyond the range, PyIceberg answers without a check for nulls.
            return isinstance(literal, LongLiteral) and kind.min <= value <= kind.max
        case StringType():
            return isinstance(literal, StringLiteral) and not is_typed(value)
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


def conjuncts(text: str, schema: Schema) -> list[str]:
    """The parts of a condition that AND joins at its top level; none if that is not certain.

    AND binds weaker than all else but OR, so a part ends where the next one begins. The AND of BETWEEN does not count;
    CASE may hold some. A column may have one of these words as its name: then nothing is certain.
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
