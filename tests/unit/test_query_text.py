"""What is read from a query's text before Spark sees it: a misspelt table, and where the user's text stands."""

from __future__ import annotations

import pytest

from floodmark.rows.session import without_noise
from floodmark.rows.sql.query import missing_table, misspelt_table

TABLES = ["events", "customers"]


@pytest.mark.parametrize(
    ("query", "table", "line", "pos", "meant"),
    [
        ("select * from evnts", "evnts", 1, 14, "events"),
        ("-- all\nselect *\n  from Event e join customers c on true", "Event", 3, 7, "events"),
        ("select * from events join `custmers` using (id)", "`custmers`", 1, 26, "customers"),
        ("with a as (select * from evnts) select * from a", "evnts", 1, 25, "events"),
        ("select (select max(id) from evnts)", "evnts", 1, 28, "events"),
        ("from evnts select id", "evnts", 1, 5, "events"),
    ],
)
def test_a_table_that_is_misspelt_is_found_with_its_place_and_the_one_meant(
    query: str, table: str, line: int, pos: int, meant: str
) -> None:
    found = misspelt_table(query, TABLES)
    assert found is not None
    assert (found.facts["table"], found.facts["line"], found.facts["pos"]) == (table.strip("`"), line, pos)
    assert meant in found.advice


@pytest.mark.parametrize(
    "query",
    [
        "select * from events",
        "select * from EVENTS, customers",
        "select extract(day from event) from events",
        "select trim(both ' ' from event), substring(evnts from 2) from events",
        "select id is distinct from event from events",
        "with evnts as (select 1) select * from evnts",
        "with event(a, b) as (select 1, 2), evnts as (select 2) select * from event join evnts",
        "select * from event(10)",
        "select * from other.evnts",
        "select 'from evnts' /* from evnts */ -- from evnts",
        "select * from something_else",
        "select * from values (1) as evnts",
        "with recursive evnts(n) max recursion level 5 as (select 1 union all select n from evnts) select * from evnts",
    ],
)
def test_what_may_be_no_table_is_left_to_spark(query: str) -> None:
    assert misspelt_table(query, TABLES) is None


NO_HINT = {"gone": "It was dropped."}.get


@pytest.mark.parametrize(
    ("query", "table", "line", "pos"),
    [
        ("select count(*) from something_else", "something_else", 1, 21),
        ("select o.id\nfrom events e join `other_one` o using (id)", "other_one", 2, 19),
        ("with a as (select * from nowhere) select * from a", "nowhere", 1, 25),
        ("select nowhere.id from nowhere", "nowhere", 1, 23),
    ],
)
def test_a_table_that_is_like_none_is_found_with_the_tables_that_are_there(
    query: str, table: str, line: int, pos: int
) -> None:
    found = missing_table(query, TABLES, NO_HINT)
    assert found is not None
    assert found.facts == {"table": table, "line": line, "pos": pos}
    assert found.advice == "The tables are: customers, events."


def test_what_is_known_of_a_missing_table_comes_first_and_the_list_has_an_end() -> None:
    found = missing_table("select * from gone", TABLES, NO_HINT)
    assert found is not None
    assert found.advice == "It was dropped."
    found = missing_table("select * from nowhere", [f"t{number:03}" for number in range(500)], NO_HINT)
    assert found is not None
    assert found.advice.endswith("t019, and 480 more: `floodmark tables`.")


@pytest.mark.parametrize(
    "query",
    [
        "select * from EVENTS, customers",
        "with x as (select 1), `y z` (a) as (select 2) select * from x join `y z`",
        "with recursive t(n) max recursion level 5 as (select 1 union all select n + 1 from t) select * from t",
        "select * from (with deep as (select 1) select * from deep)",
        "select * from range(3) join explode(array(1)) join lateral (select 1)",
        "select * from spark_catalog.default.t join other.t join parquet.`/a/b`",
        "select * from values (1), (2)",
        "select * from ${name}",
        "select * from pre${name}",
        "select extract(day from ts), trim(both 'x' from nowhere) from events",
        "select id is distinct from nowhere, e.from x, join y from events e",
        "select 'from nowhere' /* from nowhere */ -- from nowhere",
        "table events",
        "values (1)",
        "select 1",
    ],
)
def test_no_query_is_refused_that_spark_could_answer(query: str) -> None:
    assert missing_table(query, TABLES, NO_HINT) is None


def test_noise_of_the_jvm_is_left_out_and_all_else_is_passed_on() -> None:
    noise = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
    bar = b"\r[Stage 3:=======>                                  (12 + 2) / 64]\r" + b" " * 70 + b"\r"
    assert without_noise(noise) == b""
    assert without_noise(b"a\n" + noise + b"java.lang.OutOfMemoryError\n") == b"a\njava.lang.OutOfMemoryError\n"
    assert without_noise(bar + b"kept\n") == b"kept\n"
    assert without_noise(b"WARNING: something else\n") == b"WARNING: something else\n"
