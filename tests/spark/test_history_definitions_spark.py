"""What definitions of a history may read: the chunk and the job's other tables, by Spark's own parser, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark.rows.sql.table_names import parsed_relations
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, ids
from tests.history_world import Numbers, history, number_rows, room_of, run
from tests.spark.test_history_spark import run as run_with_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    with fm.open(tmp_path / "lake", create=True, actor="test", spark=spark) as lake:
        for name in ("events", "other", "name", "id"):
            lake.create_table(name, EVENTS)
        spark.range(3).selectExpr("id", "'of the session' name").createOrReplaceTempView("mine")
        yield lake
        spark.catalog.dropTempView("mine")
        check_lake(lake.catalog)


STRANGE = {
    "select * from mine": "mine",
    "select c.* from chunk c, mine": "mine",
    "select * from other": "other",
    "with mine as (select * from mine) select * from mine": "mine",
    "with x as (select * from chunk) select * from x where id in (select id from MINE)": "MINE",
    "select * from identifier('mine' || '')": "identifier(…)",
    "select * from global_temp.mine": "global_temp, mine",
    "select * from parquet.`/tmp/x`": "parquet, /tmp/x",
}


@pytest.mark.parametrize("query", STRANGE)
def test_what_is_neither_the_chunk_nor_a_table_of_the_job_is_refused(lake: fm.Lake, query: str) -> None:
    source = Numbers()
    with pytest.raises(fm.Invalid, match="other than the chunk") as caught:
        run_with_spark(lake, history(source, {"name": None, "events": query}, column=None))
    assert (caught.value.facts["table"], caught.value.facts["reads"]) == ("events", STRANGE[query])
    assert (lake.catalog.jobs.all(), source.order) == ([], [])


def test_a_query_that_is_none_is_refused_too(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="does not understand"):
        run_with_spark(lake, history(Numbers(), {"events": "with x as select * from chunk"}, column=None))
    assert lake.catalog.jobs.all() == []


def test_columns_that_are_called_like_tables_of_the_job_are_columns(lake: fm.Lake) -> None:
    """Each names the other, as a column."""
    tables: dict[str, Any] = {
        "name": "select id, upper(name) name from chunk",
        "id": "with c as (select id, name from chunk) select id, name from c where trim(both 'x' from name) <> ''",
    }
    assert run_with_spark(lake, history(Numbers(), tables, column=None, last=20)).outcome == "done"
    assert ids(lake, "name") == ids(lake, "id") == list(range(20))
    # What was checked once needs no Spark for a start that finds nothing to do.
    assert run(lake, history(Numbers(), tables, column=None, last=20)).outcome == "nothing_to_do"


@pytest.mark.parametrize(
    "tables",
    [
        {"events": "with e as (select * from events) select * from e"},
        {"events": "with n as (select * from name) select * from n", "name": "select * from events"},
    ],
    ids=["itself", "through others"],
)
def test_a_definition_does_not_need_itself(lake: fm.Lake, tables: dict[str, Any]) -> None:
    with pytest.raises(fm.Invalid, match="refers to itself"):
        run_with_spark(lake, history(Numbers(), tables, column=None))
    assert lake.catalog.jobs.all() == []


def test_tables_of_the_job_are_read_under_any_name(lake: fm.Lake) -> None:
    source = Numbers(rows=lambda chunk: number_rows(chunk)[:3])
    tables: dict[str, Any] = {
        "events": None,
        "name": "select * from Events where id % 10 = 0",
        "other": "with events as (select * from events where id % 10 > 0), n as (select * from name) "
        "select * from events union all select * from n",
    }
    assert run_with_spark(lake, history(source, tables, last=20)).outcome == "done"
    assert (ids(lake, "name"), ids(lake, "other")) == ([0, 10], [0, 1, 2, 10, 11, 12])


def test_spark_tells_what_a_query_reads(spark: SparkSession) -> None:
    recursive = "with recursive r as (select 1 n union all select n + 1 from r where n < 3) select * from r, x"
    assert parsed_relations(spark, recursive) == ["x"]
    nested = "with x as (with y as (select * from v) select * from y) select (select max(id) from x) from chunk, y"
    assert parsed_relations(spark, nested) == ["chunk", "v", "y"]


def test_a_dry_run_refuses_it_as_well(lake: fm.Lake) -> None:
    from floodmark.backfill.chunks.history import plan

    spec = history(Numbers(), {"events": "select * from mine"}, column=None)
    with pytest.raises(fm.Invalid, match="other than the chunk"):
        plan(room_of(lake, lake.sessions), spec)
