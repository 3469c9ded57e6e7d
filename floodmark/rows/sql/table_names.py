"""The tables that a query reads: found by its words where they leave no doubt, else by Spark's parser.

Nothing is resolved, so a session's own views do not matter, and no row is read. Words are enough for a plain SELECT
only, and only if all that it reads is known: everything else is left to Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from floodmark.rows.failures import spark_failures
from floodmark.rows.session import Sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Comments, texts, quoted names, words, and single characters.
_TOKENS = re.compile(
    r"--[^\n]*|/\*.*?\*/|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\")"
    r"|`(?P<quoted>[^`]+)`|(?P<word>[^\W\d]\w*)|(?P<sign>[^\s\w])|\d\w*",
    re.DOTALL,
)
# If a query has one of these, its words alone do not show what it reads.
_DOUBTFUL = frozenset(
    {"with", "table", "lateral", "identifier", "values", "pivot", "unpivot", "tablesample", "stream", "insert"}
)
# The words that end a FROM clause at its own level.
_CLAUSES = frozenset(
    {"select", "where", "group", "having", "window", "qualify", "order", "sort", "cluster", "distribute", "limit"}
    | {"offset", "union", "intersect", "except", "minus"}
)
_NODE = re.compile(r"([\s:+-]*)(.*)")
_RELATION = re.compile(r"'UnresolvedRelation \[(.*?)\], \[")
_OWN_NAMES = re.compile(r"CTE \[(.*?)\]$")
# A computed name: unknown before the query runs.
_COMPUTED = "PlanWithUnresolvedIdentifier"


def relations(query: str, known: Iterable[str], sessions: Sessions) -> list[str]:
    """The names that a query reads from, as it writes them, without those that its WITH defines.

    Spark parses the query only if the words leave a doubt, or the query may read a table that is not `known`.
    """
    found = _named_by_words(query, {name.lower() for name in known})
    if found is not None:
        return found
    with spark_failures("Spark does not understand this query"):
        return parsed_relations(sessions.get(), query)


def parsed_relations(spark: SparkSession, query: str) -> list[str]:
    """The same as Spark parses it. Commas separate the parts of a longer name."""
    text = str(spark.sql(f"EXPLAIN EXTENDED {query}").collect()[0][0])
    parsed = text.partition("== Analyzed Logical Plan ==")[0]
    recursive = re.search(r"\brecursive\b", query, re.IGNORECASE) is not None
    return sorted(set(_foreign(parsed, recursive)))


# ── by its words ──


@dataclass
class _Level:
    """What is known of one pair of parentheses."""

    selects: bool = False
    in_from: bool = False


def _named_by_words(query: str, known: set[str]) -> list[str] | None:
    """None if the words leave a doubt, or the query may read a table that is not known."""
    tokens = [match for match in _TOKENS.finditer(query) if match.lastgroup or match[0][0].isdigit()]
    levels, found = [_Level()], set()
    for place, token in enumerate(tokens):
        word, sign, level = (token["word"] or "").lower(), token["sign"], levels[-1]
        if word in _DOUBTFUL or sign == "$" or query.startswith("|>", token.start()):
            return None
        if sign == "(":
            levels.append(_Level())
        elif sign == ")":
            if len(levels) == 1:
                return None
            levels.pop()
        elif sign == "," and level.in_from:
            return None
        elif word in ("from", "join"):
            name = _name_after(tokens, place)
            if name is None or (name and name.lower() not in known) or not level.selects:
                return None
            found |= {name} if name else set()
            level.in_from = True
        elif word in _CLAUSES:
            level.in_from = False
            level.selects = level.selects or word == "select"
    return sorted(found)


def _name_after(tokens: list[re.Match[str]], place: int) -> str | None:
    """The one name after FROM or JOIN; empty if it is a query in parentheses, None if it is neither."""
    before = tokens[place - 1] if place else None
    if before is not None and ((before["word"] or "").lower() == "distinct" or before["sign"] == "."):
        return None
    behind = tokens[place + 1 : place + 3]
    if not behind:
        return None
    if behind[0]["sign"] == "(":
        return "" if len(behind) == 2 and (behind[1]["word"] or "").lower() == "select" else None
    name = behind[0]["quoted"] or behind[0]["word"]
    return None if len(behind) == 2 and behind[1]["sign"] in (".", "(", "@", "`") else name


# ── by Spark ──


@dataclass
class _Node:
    """A line of a plan: its depth, and for a WITH the names that it defines."""

    depth: int
    names: tuple[str, ...] = ()
    children: int = 0

    def visible(self, recursive: bool) -> tuple[str, ...]:
        """The names in scope at this place of the plan: a definition sees those before it, the query all."""
        return self.names[: max(0, self.children - (0 if recursive else 1))]


def _foreign(plan: str, recursive: bool) -> Iterator[str]:
    """The relations of a parsed plan that no WITH above them defines."""
    above: list[_Node] = []
    for line in plan.splitlines():
        indent, text = _NODE.fullmatch(line).groups()  # type: ignore[union-attr]  # it matches every line
        while above and above[-1].depth >= len(indent):
            above.pop()
        if above:
            above[-1].children += 1
        if _COMPUTED in text:
            yield "identifier(…)"
        for name in _RELATION.findall(text):
            if not any(name.lower() in one.visible(recursive) for one in above):
                yield name
        own = _OWN_NAMES.match(text)
        above.append(_Node(len(indent), tuple(own[1].lower().split(", ")) if own else ()))
