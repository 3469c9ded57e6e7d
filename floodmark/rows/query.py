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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMMENTS = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
_WORDS = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/|`([^`]+)`|([A-Za-z_]\w*)", re.DOTALL)
_STARTS = frozenset({"select", "with", "from", "values", "table", "("})


def run_query(
    spark: SparkSession,
    query: str,
    tables: Mapping[str, tuple[str, int | None]],
    read: Callable[[str], DataFrame],
) -> DataFrame:
    """Run `query`; `tables` are the known ones with their identity and snapshot, `read` gives one as a DataFrame."""
    body = query[_COMMENTS.match(query).end() :].rstrip().rstrip(";")  # type: ignore[union-attr]
    first = body[:1] if body.startswith("(") else (re.match(r"\w*", body) or [""])[0].lower()
    if first not in _STARTS:
        raise Invalid(
            "only a query can be run here",
            starts_with=repr(body[:20]),
            advice="Write rows with append, merge, overwrite or delete.",
        )
    parts = []
    for table in named_tables(body, tables):
        table_id, snapshot = tables[table]
        view = f"_floodmark_{table_id.replace('-', '')}_{snapshot or 0}"
        read(table).createOrReplaceTempView(view)
        parts.append(f"`{table}` AS (SELECT * FROM `{view}`)")
    if not parts:
        return spark.sql(body)
    own = re.match(r"with\s+(recursive\s+)?", body, re.IGNORECASE)
    if own is None:
        return spark.sql(f"WITH {', '.join(parts)} {body}")
    return spark.sql(f"WITH {own.group(1) or ''}{', '.join(parts)}, {body[own.end() :]}")


def named_tables(query: str, tables: Mapping[str, object]) -> list[str]:
    """The known tables whose names occur in a query outside strings and comments; too many do no harm."""
    words = {(quoted or word).lower() for quoted, word in _WORDS.findall(query)}
    return [table for table in tables if table.lower() in words]
