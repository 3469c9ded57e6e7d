"""Whether an expression gives the same value at every try, from the row and the lake alone; else it is `Invalid`.

Spark itself refuses randomness in the row. What Spark accepts is detected here: in the expression's words, and in
Spark's own plan of it, where a moment that was hidden in a text appears as a literal. Not everything can be detected: a
value that was computed from such a moment and is no time any more, an order among equals, functions of a session that
have the name of one of Spark's.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyiceberg.schema import Schema

from floodmark import clock
from floodmark.errors import Invalid
from floodmark.rows.schema import user_fields

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Text in quotes, comments.
_SILENT = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_CALLED_IN_QUOTES = re.compile(r"`([A-Za-z_]\w*)`(?=\s*\()")
_QUOTED = re.compile(r"`[^`]*`")
# A word, with or without a parenthesis behind it.
_WORDS = re.compile(r"([A-Za-z_]\w*)(\s*\(\s*\)?)?")
# The same within one query, but not in two. Some of them need no parentheses.
_BARE_MOMENTS = r"current_date|current_time|current_timestamp|current_user|session_user|user|localtime|localtimestamp"
_BARE = re.compile(_BARE_MOMENTS, re.IGNORECASE)
_CALLED = re.compile(
    rf"{_BARE_MOMENTS}|now|curdate|current_timezone|current_catalog|current_database|current_schema|version", re.I
)
_CHANCE = re.compile(
    r"rand|randn|random|uuid|shuffle|monotonically_increasing_id|spark_partition_id|input_file_\w+", re.I
)
_ORDER = re.compile(
    r"first|first_value|last|last_value|any_value|collect_list|collect_set|array_agg|listagg|string_agg", re.I
)
_ORDERED = re.compile(r"\border\s+by\b|\b(?:array_sort|sort_array)\s*\(", re.IGNORECASE)
_SPECIAL = r"'\s*(?:now|today|yesterday|tomorrow)\b[^']*'"
_MOMENTS = re.compile(
    rf"(?:\bcast\s*\(|\b(?:try_)?(?:to_)?(?:date|timestamp\w*)\b\s*\(?)\s*{_SPECIAL}|{_SPECIAL}\s*::", re.IGNORECASE
)
_EVERY_TRY = "an expression must give the same value on every try; this one"
_WRITE_IT = "Write the value itself, or send the column with the rows."
# A moment within a day or two of now: another clock, or midnight, may be near.
_DAYS_AROUND = 2


def check_text(expression: str, schema: Schema, table: str) -> None:
    """Refuse what depends on the moment, on chance, on an order or on the session, by the words for it."""
    columns = {field.name.lower() for field in user_fields(schema)}
    words = _spoken(expression)
    ordered = _ORDERED.search(words) is not None
    for found in _WORDS.finditer(words):
        word, call = found[1], found[2] or ""
        qualified = words[: found.start()].rstrip().endswith(".")
        bare = _BARE.fullmatch(word) and not qualified and word.lower() not in columns
        if (_CALLED.fullmatch(word) if call else bare) or (word.lower() == "unix_timestamp" and call.endswith(")")):
            raise _refused(f"{_EVERY_TRY} depends on the moment", table, expression, word, _WRITE_IT)
        if call and _CHANCE.fullmatch(word):
            raise _refused(f"{_EVERY_TRY} depends on chance", table, expression, word, _WRITE_IT)
        if not ordered and ((call and _ORDER.fullmatch(word)) or (word.lower() == "limit" and not call)):
            if word.lower() in columns and not call:
                continue
            advice = "Use max(…) or min(…), or add ORDER BY."
            raise _refused(f"{_EVERY_TRY} depends on the order of rows", table, expression, word, advice)
    if special := _MOMENTS.search(expression):
        raise _refused(f"{_EVERY_TRY} depends on the moment", table, expression, special[0], _WRITE_IT)
    if "${" in expression:
        raise Invalid(
            "an expression cannot use variables", table=table, expression=expression, advice="Write the value."
        )


def check_functions(spark: SparkSession, expression: str, table: str) -> None:
    """Refuse functions that were defined in this session: other writers do not have them."""
    called = {found[1].lower() for found in _WORDS.finditer(_spoken(expression)) if found[2]}
    if not called:
        return
    made = {str(row[0]).lower().rpartition(".")[2] for row in spark.sql("SHOW USER FUNCTIONS").collect()}
    if own := sorted(called & made):
        raise _functions(table, expression, ", ".join(own))


def check_plan(explained: str, expression: str, table: str) -> None:
    """Check Spark's plan of it (EXPLAIN EXTENDED): variables, functions in Python, and moments near now."""
    analysed, _, optimised = explained.partition("== Optimized Logical Plan ==")
    analysed = analysed.partition("== Analyzed Logical Plan ==")[2]
    optimised = optimised.partition("== Physical Plan ==")[0]
    if "variablereference(" in analysed:
        raise Invalid(
            "an expression cannot use variables", table=table, expression=expression, advice="Write the value."
        )
    if "EvalPython [" in optimised:
        raise _functions(table, expression, None)
    today = datetime.fromtimestamp(clock.now_ms() / 1000, UTC).date()
    for days in range(-_DAYS_AROUND, _DAYS_AROUND + 1):
        day = (today + timedelta(days=days)).isoformat()
        if day in optimised and day not in analysed:
            raise _refused(f"{_EVERY_TRY} depends on the moment", table, expression, None, _WRITE_IT)


def check_relations(names: list[str], expression: str, table: str) -> None:
    """Refuse the table itself: its content differs from batch to batch, and from write to write."""
    if table.lower() in (name.lower() for name in names):
        advice = "Fill it from the row and from other tables."
        raise _refused(f"{_EVERY_TRY} depends on the table's other rows", table, expression, None, advice)


def _spoken(expression: str) -> str:
    """The expression without its texts and comments, and without names in quotes that are not called."""
    words = _SILENT.sub(lambda found: "''" if found[0][0] in "'\"" else " ", expression)
    return _QUOTED.sub("``", _CALLED_IN_QUOTES.sub(r"\1", words))


def _functions(table: str, expression: str, names: str | None) -> Invalid:
    return Invalid(
        "an expression can use only Spark's own functions: other writers may not have any others",
        table=table,
        expression=expression,
        functions=names,
        advice=_WRITE_IT,
    )


def _refused(problem: str, table: str, expression: str, part: str | None, advice: str) -> Invalid:
    return Invalid(problem, table=table, expression=expression, part=part, advice=advice)
