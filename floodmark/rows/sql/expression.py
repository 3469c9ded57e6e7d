"""Plain expressions over a row: one literal, or one column; evaluated by Arrow with exactly Spark's value and type.

The parser is strict. An expression is plain only if Spark certainly reads it in the same way. These are left to Spark:
text with a quote, a backslash, a dollar or a control character in it, numbers that are not whole or do not fit 64 bits,
words that are operators, literals or functions for Spark, fields of structs, names that differ in case only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import BooleanType, IcebergType, IntegerType, LongType, NestedField, StringType

from floodmark.rows.schema import arrow_type, user_fields
from floodmark.rows.sql.condition import NO_COLUMN, columns_by_name

_BLANKS = " \t\r\n"
_TEXT = re.compile(r"'([^'\\$\x00-\x1f\x7f\ud800-\udfff]*)'")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUOTED = re.compile(r"`([^`$\x00-\x1f\x7f\ud800-\udfff]+)`")
# Literals that are not plain, but name no column: a number, and a text that may say its type first.
_CONSTANT = re.compile(
    r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?(?:l|s|y|f|d|bd)?|(?:date|timestamp\w*)?\s*'(?:[^'\\]|\\.|'')*'",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Plain:
    """A plain expression: the column `column`, or the literal `value`; of the type `kind`. With neither, it is null."""

    kind: IcebergType
    column: str | None = None
    value: str | int | bool | None = None

    def evaluate(self, batch: pa.RecordBatch) -> pa.Array:
        """Its value for every row; a column that the rows do not have is null."""
        if self.column is None and self.value is None:
            return pa.nulls(len(batch))
        if self.column is None:
            return pa.repeat(pa.scalar(self.value, arrow_type(self.kind)), len(batch))
        place = batch.schema.get_field_index(self.column)
        return pa.nulls(len(batch)) if place < 0 else batch.column(place)


def parse_plain(text: str, schema: Schema) -> Plain | None:
    """The expression over rows of this schema, if it is plain; else None."""
    body = text.strip(_BLANKS)
    if found := _TEXT.fullmatch(body):
        return Plain(StringType(), value=found[1])
    if _NUMBER.fullmatch(body):
        return _number(int(body))
    if body.lower() in ("true", "false"):
        return Plain(BooleanType(), value=body.lower() == "true")
    field = _column(body, schema)
    return None if field is None else Plain(field.field_type, column=field.name)


def may_name(expression: str, column: str, schema: Schema) -> bool:
    """Whether an expression over rows of this schema may use this column.

    A literal uses none. In what is not plain a word of that name in a text counts, to be safe.
    """
    plain = parse_plain(expression, schema)
    if plain is not None:
        return plain.column == column
    if _CONSTANT.fullmatch(expression.strip(_BLANKS)):
        return False
    # Within quotes a backtick is written twice.
    name = "|".join(re.escape(text) for text in (column, column.replace("`", "``")))
    return re.search(rf"(?<!\w)(?:{name})(?!\w)", expression, re.IGNORECASE) is not None


def _number(value: int) -> Plain | None:
    if -(2**31) <= value < 2**31:
        return Plain(IntegerType(), value=value)
    return Plain(LongType(), value=value) if -(2**63) <= value < 2**63 else None


def _column(body: str, schema: Schema) -> NestedField | None:
    quoted = _QUOTED.fullmatch(body)
    if quoted is None and (not _WORD.fullmatch(body) or NO_COLUMN.fullmatch(body)):
        return None
    name = quoted[1] if quoted else body
    # Python and Spark may disagree on which other letters are equal but for their case.
    exact = [field for field in user_fields(schema) if field.name == name]
    found = columns_by_name(Schema(*user_fields(schema))).get(name.lower())
    return found if found is not None and (exact or name.isascii()) else None
