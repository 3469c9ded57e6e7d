"""Queries over several tables of one version.

The tables that a query names become temporary views whose names carry the table's identity and snapshot, and the
query sees them under their own names through a WITH clause. So two queries at two versions never share a name, also
where names are resolved late (Spark Connect), and a session's own views are left alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from floodmark.errors import Invalid
from floodmark.rows.failures import spark_failures, spark_job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_COMMENTS = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
_WORDS = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/|`([^`]+)`|([A-Za-z_]\w*)", re.DOTALL)
_TOKENS = re.compile(
    r"(?P<skipped>\s+|--[^\n]*|/\*.*?\*/)|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<quoted>`[^`]+`)|(?P<word>[A-Za-z_]\w*)|(?P<other>.)",
    re.DOTALL,
)
# Names that the query itself gives: of its WITH.
_OWN = re.compile(r"(`[^`]+`|\w+)\s*(?:\([^()]*\))?\s+as\s*\(", re.IGNORECASE)
_NO_NAMES = frozenset({"select", "values", "table", "lateral", "with", "from", "unnest", "stream", "only"})
_POSITION = re.compile(r"line (\d+)(,? )pos (\d+)")
_NO_TABLE = "TABLE_OR_VIEW_NOT_FOUND"
_STARTS = frozenset({"select", "with", "from", "values", "table", "("})


def run_query(
    spark: SparkSession,
    query: str,
    tables: Mapping[str, tuple[str, int | None]],
    read: Callable[[str], DataFrame],
    *,
    with_seq: bool = False,
) -> DataFrame:
    """Run `query`; `tables` are the known ones with their identity and snapshot, `read` gives one as a DataFrame."""
    query_body(query)
    parts = []
    for table in named_tables(query, tables):
        table_id, snapshot = tables[table]
        view = f"_floodmark_{table_id.replace('-', '')}_{snapshot or 0}{'_seq' if with_seq else ''}"
        read(table).createOrReplaceTempView(view)
        parts.append(f"`{table}` AS (SELECT * FROM `{view}`)")
    try:
        with spark_failures("Spark does not understand this query"):
            return spark.sql(_with_tables(query, parts))
    except Invalid as error:
        raise _for_user(error, 1 if parts else 0, query, list(tables)) from error.__cause__


def query_body(query: str) -> str:
    """The query without comments before it and the semicolon behind it; Invalid if it is not one. Needs no Spark."""
    body = query[_COMMENTS.match(query).end() :].rstrip().rstrip(";")  # type: ignore[union-attr]
    first = body[:1] if body.startswith("(") else (re.match(r"\w*", body) or [""])[0].lower()
    if first not in _STARTS:
        raise Invalid(
            "only a query can be run here",
            starts_with=repr(body[:20]),
            advice="Start it with SELECT or WITH; write rows with `floodmark load`.",
        )
    return body


def _with_tables(query: str, parts: list[str]) -> str:
    """The query with the tables in scope, under the names of the lake.

    What is added is one line before the user's text, which is left as it is: so a position in it is off by that line.
    """
    body = query.rstrip().rstrip(";")
    if not parts:
        return body
    tables = f"WITH {', '.join(parts)}"
    if re.match(r"with\b", query_body(query), re.IGNORECASE):
        # Its own WITH stands inside, so that a name in it may hide, or read, a table of the same name.
        return f"{tables} SELECT * FROM (\n{body}\n)"
    return f"{tables}\n{body}"


def _for_user(error: Invalid, added_lines: int, query: str, tables: Sequence[str]) -> Invalid:
    """Spark's complaint with positions in the user's own text, and with the table that was perhaps meant."""

    def moved(found: re.Match[str]) -> str:
        return f"line {int(found[1]) - added_lines}{found[2]}pos {found[3]}"

    cause = _POSITION.sub(moved, str(error.facts.get("cause", "")))
    advice = error.advice
    if _NO_TABLE in cause and (meant := misspelt_table(query, tables)) is not None:
        advice = meant.advice
    return Invalid(error.message, advice=advice, **{**error.facts, "cause": cause})


def misspelt_table(query: str, tables: Sequence[str]) -> Invalid | None:
    """A name behind FROM or JOIN that is no table but looks like one of these; needs no Spark.

    Names of the query's own WITH, functions, paths and names with a dot are not judged, nor is FROM in a function.
    """
    known = {table.lower() for table in tables} | {name.strip("`").lower() for name in _OWN.findall(query)} | _NO_NAMES
    folded = {table.lower(): table for table in tables}
    for found in _names_of_tables(query):
        name = found[0].strip("`")
        close = [] if name.lower() in known else difflib.get_close_matches(name.lower(), folded, n=1)
        if close:
            return Invalid(
                "there is no such table",
                table=name,
                line=query.count("\n", 0, found.start()) + 1,
                pos=found.start() - (query.rfind("\n", 0, found.start()) + 1),
                advice=f"Did you mean {folded[close[0]]}?",
            )
    return None


def _names_of_tables(query: str) -> Iterator[re.Match[str]]:
    """The plain names that come directly behind FROM and JOIN of a query or subquery."""
    tokens = [found for found in _TOKENS.finditer(query) if found.lastgroup != "skipped"]
    words = [token[0].lower() for token in tokens] + ["", "", ""]
    # For each open bracket whether a query began in it: `extract(day from ts)` is none.
    levels = [True]
    for at, word in enumerate(words[: len(tokens)]):
        if word == "(":
            levels.append(False)
        elif word == ")" and len(levels) > 1:
            levels.pop()
        elif word == "select":
            levels[-1] = True
        elif word in ("from", "join") and levels[-1] and (at == 0 or words[at - 1] != "distinct"):
            name = tokens[at + 1] if at + 1 < len(tokens) else None
            if name is not None and name.lastgroup in ("quoted", "word") and words[at + 2] not in ("(", "."):
                yield name


def stream(frame: DataFrame, limit: int | None) -> Iterator[Row]:
    """The rows of a query, at most so many of them; without a limit part by part, so that memory does not follow."""
    with spark_job(frame.sparkSession, "Spark could not compute this query", lake_files=True):
        if limit is not None:
            yield from frame.limit(limit).collect()
        else:
            yield from frame.toLocalIterator(prefetchPartitions=True)


def named_tables(query: str, tables: Mapping[str, object]) -> list[str]:
    """The known tables whose names occur in a query outside strings and comments; too many do no harm."""
    words = {(quoted or word).lower() for quoted, word in _WORDS.findall(query)}
    return [table for table in tables if table.lower() in words]
