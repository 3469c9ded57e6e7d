"""What a query reads from, by its words: what is certain is told without Spark, and nothing is guessed."""

from __future__ import annotations

import pytest

from floodmark.rows.sql.table_names import _foreign, _named_by_words, relations
from tests.without_spark import NO_SPARK

KNOWN = {"chunk", "events", "a b"}

CERTAIN = {
    "select id, events, 'from x' from chunk -- from y": ["chunk"],
    "select * from Chunk c join `a b` on c.id = `a b`.id where c.id in (1, 2) order by 1, 2": ["Chunk", "a b"],
    "select * from (select id, name from events) e left join chunk using (id, name)": ["chunk", "events"],
    "select id || name, count(*) n from chunk group by id, name union all select 1, 2": ["chunk"],
    "select (select max(id) from events) top, f(1, 2) from chunk": ["chunk", "events"],
    "select 1": [],
}


@pytest.mark.parametrize("query", CERTAIN)
def test_a_plain_select_tells_itself(query: str) -> None:
    assert relations(query, KNOWN, NO_SPARK) == CERTAIN[query]


@pytest.mark.parametrize(
    "query",
    [
        "select * from other",
        "select * from chunk, other",
        "select * from chunk c join events on true, other",
        "select * from session.chunk",
        "select * from chunk('x')",
        "select * from chunk@v1",
        "select * from (chunk)",
        "select * from 'chunk'",
        "select extract(year from events) from chunk",
        "select a is distinct from events from chunk",
        "from chunk select *",
        "select * from chunk |> join other",
        "with events as (select 1) select * from events",
        "table chunk",
        "select * from chunk lateral view explode(x) t as y, z",
        "select * from identifier('chunk')",
        "select * from chunk where x = ${y}",
        "select 1) from chunk",
        "select * from",
    ],
)
def test_of_everything_else_the_words_tell_nothing(query: str) -> None:
    assert _named_by_words(query, KNOWN) is None


def test_a_definition_of_with_sees_those_before_it() -> None:
    plan = """== Parsed Logical Plan ==
CTE [a, b]
:  :- 'SubqueryAlias a
:  :  +- 'Project [*]
:  :     +- 'UnresolvedRelation [b], [], false
:  +- 'SubqueryAlias b
:     +- 'Join Inner
:        :- 'UnresolvedRelation [A], [], false
:        +- 'UnresolvedRelation [b], [], false
+- 'Join Inner
   :- 'UnresolvedRelation [a], [], false
   +- 'UnresolvedRelation [global_temp, b], [], false
"""
    assert list(_foreign(plan, recursive=False)) == ["b", "b", "global_temp, b"]
    assert list(_foreign(plan, recursive=True)) == ["b", "global_temp, b"]
