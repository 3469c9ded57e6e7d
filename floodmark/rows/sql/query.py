"""Queries over several tables of one version.

The tables that a query names become temporary views whose names carry the table's identity and snapshot, and which part
of it the query needs. The query sees them under their own names through a WITH clause. So two queries at two versions
never share a name, nor do two that need different parts, also where names are resolved late (Spark Connect), and a
session's own views are left alone. A view of a part goes when Spark has resolved the query, except on Spark Connect.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING

from floodmark.errors import Invalid, NotFound
from floodmark.rows.failures import spark_failures, spark_job
from floodmark.rows.stall import is_connect

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession

_COMMENTS = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*", re.DOTALL)
_WORDS = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|--[^\n]*|/\*.*?\*/|`([^`]+)`|([A-Za-z_]\w*)", re.DOTALL)
_TOKENS = re.compile(
    r"(?P<skipped>\s+|--[^\n]*|/\*.*?\*/)|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<quoted>`[^`]+`)|(?P<word>[A-Za-z_]\w*)|(?P<other>.)",
    re.DOTALL,
)
# Names that the query itself defines, in its WITH.
_OWN = re.compile(r"(`[^`]+`|\w+)\s*(?:\([^()]*\))?\s+as\s*\(", re.IGNORECASE)
_NO_NAMES = frozenset({"select", "values", "table", "lateral", "with", "from", "unnest", "stream", "only"})
# After these, `from` and `join` are no keywords, or not those of a query: `is distinct from`, `t.from`, `select join`.
_BEFORE_COLUMNS = frozenset({"distinct", "select", ",", "."})
_POSITION = re.compile(r"line (\d+)(,? )pos (\d+)")
_NO_TABLE = "TABLE_OR_VIEW_NOT_FOUND"
# An error about an unknown table lists at most this many tables.
_TABLES_SHOWN = 20
# With one of these, a query may mean something else than it seems: names differ by case, a WITH does not hide what it
# names, a comma joins later than JOIN, a quoted name is a pattern for several columns.
_UNUSUAL = {
    "spark.sql.caseSensitive": "true",
    "spark.sql.legacy.ctePrecedencePolicy": "legacy",
    "spark.sql.ansi.relationPrecedence": "true",
    "spark.sql.parser.quotedRegexColumnNames": "true",
}
_PLAIN = re.compile(r"\w+")
_STARTS = frozenset({"select", "with", "from", "values", "table", "("})


@dataclass(frozen=True)
class Source:
    """The rows that a query sees as a table: two equal ones are the same rows. `part` names a part of the table."""

    table_id: str
    snapshot: int | None
    part: str = ""

    def view(self, with_seq: bool) -> str:
        part = f"_{self.part}" if self.part else ""
        return f"_floodmark_{self.table_id.replace('-', '')}_{self.snapshot or 0}{part}{'_seq' if with_seq else ''}"


def run_query(
    spark: SparkSession,
    query: str,
    tables: Mapping[str, Source],
    read: Callable[[str], DataFrame],
    *,
    with_seq: bool = False,
    hint: Callable[[str], str | None] = lambda _: None,
) -> DataFrame:
    """Run `query`; `tables` are the known ones, `read` returns the source of one as a DataFrame.

    `hint` returns the advice for the name of a table that does not exist.
    """
    query_body(query)
    frames, parts = {}, []
    for table in named_tables(query, tables):
        frames[tables[table]] = read(table)
        parts.append(f"`{table}` AS (SELECT * FROM `{tables[table].view(with_seq)}`)")
    try:
        with spark_failures("Spark does not understand this query"), _views(spark, frames, with_seq):
            return spark.sql(_with_tables(query, parts))
    except Invalid as error:
        raise _for_user(error, 1 if parts else 0, query, list(tables), hint) from error.__cause__


# How many queries are being resolved with a view of a part, by session and view; several threads may be at it.
_using: Counter[tuple[int, str]] = Counter()
# The views that stay, by session, the longest unused first. Their number is bounded (I14).
_staying: dict[int, dict[str, None]] = {}
_STAYING_MAX = 1000
_using_lock = Lock()


@contextmanager
def _views(spark: SparkSession, frames: Mapping[Source, DataFrame], with_seq: bool) -> Iterator[None]:
    """The sources as temporary views. Those of parts are many: they are dropped, unless names are resolved later."""
    passing = [source.view(with_seq) for source in frames if source.part and not is_connect(spark)]
    with _using_lock:
        _using.update((id(spark), view) for view in passing)
    try:
        with _using_lock:
            for source, frame in frames.items():
                frame.createOrReplaceTempView(source.view(with_seq))
            _keep(spark, [view for source in frames if (view := source.view(with_seq)) not in passing])
        yield
    finally:
        with _using_lock:
            _using.subtract((id(spark), view) for view in passing)
            for view in passing:
                if not _using[id(spark), view]:
                    del _using[id(spark), view]
                    spark.catalog.dropTempView(view)


def _keep(spark: SparkSession, views: Sequence[str]) -> None:
    """Note views that stay; the one that was not used for the longest goes for each that is too many."""
    known = _staying.setdefault(id(spark), {})
    for view in views:
        known.pop(view, None)
        known[view] = None
    while len(known) > _STAYING_MAX:
        oldest = next(iter(known))
        del known[oldest]
        spark.catalog.dropTempView(oldest)


def reads_as_usual(spark: SparkSession) -> bool:
    """Whether the session's settings leave the text of a query its usual meaning."""
    return all((spark.conf.get(name, None) or "").lower() != value for name, value in _UNUSUAL.items())


def query_body(query: str) -> str:
    """The query without leading comments and trailing semicolon; Invalid if it is not a query. Needs no Spark."""
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

    One line is added before the user's text, which stays as it is: so a position in it is off by that line.
    """
    body = query.rstrip().rstrip(";")
    if not parts:
        return body
    tables = f"WITH {', '.join(parts)}"
    if re.match(r"with\b", query_body(query), re.IGNORECASE):
        # The query's own WITH stands inside, so that a name in it may hide, or read, a table of the same name.
        return f"{tables} SELECT * FROM (\n{body}\n)"
    return f"{tables}\n{body}"


def _for_user(
    error: Invalid, added_lines: int, query: str, tables: Sequence[str], hint: Callable[[str], str | None]
) -> Invalid:
    """Spark's error with positions in the user's own text, and with a table of a similar name."""

    def moved(found: re.Match[str]) -> str:
        return f"line {int(found[1]) - added_lines}{found[2]}pos {found[3]}"

    cause = _POSITION.sub(moved, str(error.facts.get("cause", "")))
    advice = error.advice
    if _NO_TABLE in cause:
        meant = misspelt_table(query, tables) or missing_table(query, tables, hint)
        advice = advice if meant is None else meant.advice
    return Invalid(error.message, advice=advice, **{**error.facts, "cause": cause})


def misspelt_table(query: str, tables: Sequence[str]) -> Invalid | None:
    """A name after FROM or JOIN that is no table but is similar to one of these; needs no Spark.

    Names of the query's own WITH, functions, paths and names with a dot are not checked, nor is FROM in a function.
    """
    folded = {table.lower(): table for table in tables}
    for found in _unknown(query, tables):
        name = found[0].strip("`")
        close = difflib.get_close_matches(name.lower(), folded, n=1)
        if close:
            return Invalid(
                "there is no such table", table=name, **_place(query, found), advice=f"Did you mean {folded[close[0]]}?"
            )
    return None


def missing_table(query: str, tables: Sequence[str], hint: Callable[[str], str | None]) -> NotFound | None:
    """A name after FROM or JOIN that is no table and is similar to none of these; needs no Spark.

    Only for a session that has no tables and views of its own yet. `hint`: as of `run_query`.
    """
    return next((_no_table(found, query, tables, hint) for found in _unknown(query, tables)), None)


def _no_table(found: re.Match[str], query: str, tables: Sequence[str], hint: Callable[[str], str | None]) -> NotFound:
    name = found[0].strip("`")
    shown = ", ".join(sorted(tables)[:_TABLES_SHOWN])
    more = len(tables) - _TABLES_SHOWN
    there = f"The tables are: {shown}{f', and {more} more: `floodmark tables`' if more > 0 else ''}."
    advice = hint(name) or (there if tables else "There are no tables yet.")
    return NotFound("there is no such table", table=name, **_place(query, found), advice=advice)


def _place(query: str, found: re.Match[str]) -> dict[str, int]:
    before = query[: found.start()]
    return {"line": before.count("\n") + 1, "pos": found.start() - (before.rfind("\n") + 1)}


def _unknown(query: str, tables: Sequence[str]) -> Iterator[re.Match[str]]:
    """The names of tables in a query that are none of these, and that the query does not define itself.

    In doubt a name is left to Spark: a query that Spark could answer is never refused here.
    """
    if "${" in query:
        return  # Spark substitutes variables before it reads the names
    known = {table.lower() for table in tables} | {name.strip("`").lower() for name in _OWN.findall(query)} | _NO_NAMES
    tokens = [found for found in _TOKENS.finditer(query) if found.lastgroup != "skipped"]
    words = [token[0].strip("`").lower() for token in tokens]
    # With a WITH, any other occurrence of a name may define it; before a dot it is only used.
    gives_names = "with" in words
    places = Counter(word for word, after in pairwise([*words, ""]) if after != ".")
    for found in _names_of_tables(query):
        name = found[0].strip("`").lower()
        if name not in known and _PLAIN.fullmatch(name) and (not gives_names or places[name] == 1):
            yield found


def _names_of_tables(query: str) -> Iterator[re.Match[str]]:
    """The plain names directly after FROM and JOIN of a query or subquery."""
    tokens = [found for found in _TOKENS.finditer(query) if found.lastgroup != "skipped"]
    words = [token[0].lower() for token in tokens] + ["", "", ""]
    # For each open bracket, whether a query began in it: in `extract(day from ts)` none did.
    levels = [True]
    for at, word in enumerate(words[: len(tokens)]):
        if word == "(":
            levels.append(False)
        elif word == ")" and len(levels) > 1:
            levels.pop()
        elif word == "select":
            levels[-1] = True
        elif word in ("from", "join") and levels[-1] and (at == 0 or words[at - 1] not in _BEFORE_COLUMNS):
            name = tokens[at + 1] if at + 1 < len(tokens) else None
            if name is not None and name.lastgroup in ("quoted", "word") and words[at + 2] not in ("(", "."):
                yield name


def stream(frame: DataFrame, limit: int | None) -> Iterator[Row]:
    """The rows of a query, at most so many of them; without a limit part by part, so that memory stays bounded."""
    with spark_job(frame.sparkSession, "Spark could not compute this query", lake_files=True):
        if limit is not None:
            yield from frame.limit(limit).collect()
        else:
            yield from frame.toLocalIterator(prefetchPartitions=True)


def arrow_rows(frame: DataFrame, limit: int | None) -> pa.RecordBatchReader:
    """The rows of a query as Arrow batches, at most so many rows; part by part, so that memory stays bounded.

    Tasks send them as bytes: Arrow's types are exact, and Spark's own ways to collect them take all at once.
    """
    import pyarrow as pa

    names = Counter(name.lower() for name in frame.columns)
    twice = [name for name in frame.columns if names[name.lower()] > 1]
    if twice:
        advice = "Give each column its own name: `… AS name`."
        raise Invalid("two columns of the query have one name", column=twice[0], advice=advice)
    frame = frame if limit is None else frame.limit(limit)
    with spark_failures("Spark does not understand this query"):
        schema: pa.Schema = frame.limit(0).toArrow().schema
        packed = frame.mapInArrow(_packed, "body binary")

    def batches() -> Iterator[pa.RecordBatch]:
        with spark_job(frame.sparkSession, "Spark could not compute this query", lake_files=True):
            for row in packed.toLocalIterator(prefetchPartitions=True):
                table = pa.ipc.open_stream(row.body).read_all()
                yield from table.cast(schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each batch as the one value of another."""
    import pyarrow as pa

    for batch in batches:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["body"])


def named_tables(query: str, tables: Mapping[str, object]) -> list[str]:
    """The known tables whose names occur in a query outside strings and comments; too many do no harm."""
    words = {(quoted or word).lower() for quoted, word in _WORDS.findall(query)}
    return [table for table in tables if table.lower() in words]
