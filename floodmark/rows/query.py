"""Queries over several tables of one version.

The tables that a query names become temporary views whose names carry the table's identity and snapshot, and the
query sees them under their own names through a WITH clause. So two queries at two versions never share a name, also
where names are resolved late (Spark Connect), and a session's own views are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from floodmark.errors import Invalid
from floodmark.rows.failures import spark_failures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_COMMENTS = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
_WORDS = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/|`([^`]+)`|([A-Za-z_]\w*)", re.DOTALL)
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
    body = query_body(query)
    parts = []
    for table in named_tables(body, tables):
        table_id, snapshot = tables[table]
        view = f"_floodmark_{table_id.replace('-', '')}_{snapshot or 0}{'_seq' if with_seq else ''}"
        read(table).createOrReplaceTempView(view)
        parts.append(f"`{table}` AS (SELECT * FROM `{view}`)")
    with spark_failures("Spark does not understand this query"):
        return spark.sql(_with_tables(body, parts))


def query_body(query: str) -> str:
    """The query without comments before it and the semicolon behind it; Invalid if it is not one. Needs no Spark."""
    body = query[_COMMENTS.match(query).end() :].rstrip().rstrip(";")  # type: ignore[union-attr]
    first = body[:1] if body.startswith("(") else (re.match(r"\w*", body) or [""])[0].lower()
    if first not in _STARTS:
        raise Invalid(
            "only a query can be run here",
            starts_with=repr(body[:20]),
            advice="Start it with SELECT or WITH; write rows with lake.append or `floodmark load`.",
        )
    return body


def _with_tables(body: str, parts: list[str]) -> str:
    """The query with the tables in scope, under the names of the lake."""
    if not parts:
        return body
    tables = f"WITH {', '.join(parts)}"
    if re.match(r"with\b", body, re.IGNORECASE):
        # Its own WITH stands inside, so that a name in it may hide, or read, a table of the same name.
        return f"{tables} SELECT * FROM ({body})"
    return f"{tables} {body}"


def collect(frame: DataFrame) -> list[Row]:
    """The rows of a query, all of them: for a caller that has limited it."""
    with spark_failures("Spark could not compute this query"):
        return list(frame.collect())


def named_tables(query: str, tables: Mapping[str, object]) -> list[str]:
    """The known tables whose names occur in a query outside strings and comments; too many do no harm."""
    words = {(quoted or word).lower() for quoted, word in _WORDS.findall(query)}
    return [table for table in tables if table.lower() in words]
