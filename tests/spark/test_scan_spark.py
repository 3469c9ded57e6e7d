"""Scans whose condition only Spark can evaluate, and scans as DataFrames: they have the rows of an unpruned filter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import floodmark as fm
from floodmark.testing.s3 import S3Server, s3_stand_in
from tests.conftest import Place
from tests.counting import counting
from tests.spark.test_changes_spark import jobs_of
from tests.spark.test_pushdown_spark import settings

LISTING = "spark.sql.sources.parallelPartitionDiscovery.threshold"
COLUMNS = "id long not null, day date, ts timestamp, amount decimal(10,2), x double, name string, tags array<string>"
CONDITIONS = 3
START = datetime(2026, 1, 1, tzinfo=UTC)


def row(number: int, chance: random.Random) -> dict[str, Any]:
    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.2 else value

    return {
        "id": number,
        "day": maybe(date(2026, 1, 1) + timedelta(number % 6)),
        "ts": maybe(START + timedelta(hours=7 * number)),
        "amount": maybe(Decimal(number * 37 % 900) / 100),
        "x": maybe(float("nan") if number % 17 == 0 else number / 8),
        "name": maybe(f"name {number % 9}"),
        "tags": maybe(["a", f"t{number % 3}"]),
    }


@pytest.fixture(scope="module")
def lake(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Iterator[fm.Lake]:
    folder = tmp_path_factory.mktemp("scan")
    if request.param == "local":
        with fm.open(folder / "lake", create=True, spark=spark) as lake:
            yield filled(lake)
        return
    with s3_stand_in() as server:
        yield from on_s3(server, folder, spark)


def on_s3(server: S3Server, folder: Path, spark: SparkSession) -> Iterator[fm.Lake]:
    catalog = f"sqlite:///{folder}/catalog.db"
    place = f"s3://{server.make_bucket()}/lake"
    with fm.open(place, create=True, catalog=catalog, storage_options=server.options, spark=spark) as lake:
        yield filled(lake)


def filled(lake: fm.Lake) -> fm.Lake:
    """Partitions, fresh and settled files, and columns that came later or were renamed since."""
    chance = random.Random(5)
    lake.create_table("plain", COLUMNS, partition=["day"], sort=["id"])
    lake.create_table("evolved", COLUMNS, partition=["day"])
    for table in ("plain", "evolved"):
        for start in range(0, 60, 20):
            lake.append(table, [row(number, chance) for number in range(start, start + 20)])
        lake.maintain.compact(table, files_min=2)
        lake.append(table, [row(number, chance) for number in range(60, 75)])
    lake.add_column("evolved", "late", "int")
    lake.rename_column("evolved", "name", "label")
    lake.append("evolved", [{"id": 900 + number, "late": number, "label": f"name {number}"} for number in range(5)])
    return lake


def conditions(chance: random.Random, table: str) -> Iterator[str]:
    name = "name" if table == "plain" else "label"
    leaves = [
        "id % 7 = 3",
        f"id between {chance.randint(0, 30)} and {chance.randint(30, 70)}",
        "day >= date '2026-01-03'",
        "day in ('2026-01-02', '2026-01-05')",
        "ts > timestamp '2026-01-08 00:00:00Z'",
        "ts is null",
        f"amount > {chance.randint(0, 8)}.5",
        "x > 3",
        "isnan(x)",
        f"{name} like '%{chance.randint(0, 8)}'",
        f"upper({name}) = 'NAME 4'",
        f"length({name}) > 100",
        "array_contains(tags, 't1')",
        "size(tags) = 2",
        *(["late is null", "late > 2"] if table == "evolved" else []),
    ]
    for _ in range(CONDITIONS):
        one, other = chance.sample(leaves, 2)
        yield chance.choice([one, f"({one}) and ({other})", f"({one}) or ({other})", f"not ({one}) and {other}"])


def comparable(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(list(one.values())) for one in rows)


# Renamed columns are read by tasks, as files in S3 are: both at once are left to `make soak`.
CASES = [
    ("local", "plain"),
    ("local", "evolved"),
    ("s3", "plain"),
    pytest.param("s3", "evolved", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("lake", "table"), CASES, indirect=["lake"])
def test_every_way_to_read_a_scan_has_the_rows_of_an_unpruned_filter(lake: fm.Lake, table: str) -> None:
    whole = lake.read(table, with_seq=True)
    columns = ["x", "id", "tags"]
    pruned = 0
    for text in conditions(random.Random(table), table):
        expected = comparable([one.asDict() for one in whole.where(text).select(*columns, "_seq").collect()])
        scan = lake.scan(table, where=text, columns=columns, with_seq=True)
        assert comparable(scan.to_arrow().to_pylist()) == expected, text
        assert comparable([one.asDict() for one in scan.df.collect()]) == expected, text
        assert scan.df.columns == scan.schema.names == [*columns, "_seq"]
        assert scan.count() == len(expected), text
        explained = scan.explain()
        pruned += explained.files < explained.files_total
    few = lake.scan(table, where="id % 7 = 3", limit=3)
    assert few.to_arrow().num_rows == few.df.count() == 3
    # The check would be blind if nothing were ever left out.
    assert pruned > 0


@pytest.mark.parametrize("lake", ["local"], indirect=True)
def test_a_condition_that_spark_refuses_is_invalid(lake: fm.Lake) -> None:
    for text in ("id +", "id + 1", "id in (select 1)", "nothing(id) = 1", "_seq + 1 > 5"):
        for act in (lambda scan: scan.to_arrow(), lambda scan: scan.df, lambda scan: scan.count()):
            with pytest.raises(fm.Invalid):
                act(lake.scan("plain", where=text))


@pytest.mark.parametrize("lake", ["local"], indirect=True)
def test_a_dataframe_of_a_partition_reads_its_files_only(lake: fm.Lake) -> None:
    found = lake.read("plain", where="day = '2026-01-02'", columns=["id"])
    files = {one.file for one in found.selectExpr("input_file_name() as file").distinct().collect()}
    assert 1 <= lake.scan("plain", where="day = '2026-01-02'").explain().files < lake.heads()[-1].files
    assert len(files) <= 2
    assert found.columns == ["id"]


def test_of_a_thousand_files_a_condition_on_the_partition_opens_ten(
    new_place: Callable[[str], Place], spark: SparkSession
) -> None:
    with new_place("sqlite").open(create=True, spark=spark) as lake:
        lake.create_table("events", "id long, part int, v long", partition=["part"], sort=["id"])
        for number in range(10):
            lake.append("events", [{"id": number * 100 + part, "part": part, "v": number} for part in range(100)])
        assert len(lake.read("events").inputFiles()) == 1000
        # A session of someone else, which would list more than 32 paths by a job.
        with settings(spark, {LISTING: "32"}):
            assert jobs_of(spark, "listing", lambda: lake.read("events", with_seq=True).schema) == []
            assert jobs_of(spark, "listing", lambda: lake.sql("select v from events").schema) == []
            assert spark.conf.get(LISTING) == "32"
        assert len(lake.read("events", where="part = 42").inputFiles()) == 10
        assert len(lake.read("events", where="part = 42 and upper(v) = '3'").inputFiles()) == 10
        assert len(lake.sql("select v from events where part = 42 and v > 2").inputFiles()) == 7
        found = lake.sql("select e.v from events e join events o on e.id = o.id where e.part = 42 and o.part = 42")
        assert len(found.inputFiles()) == 10
        assert sorted(row.v for row in found.collect()) == list(range(10))


def test_on_s3_a_condition_on_the_partition_requests_ten_files(tmp_path: Path, spark: SparkSession) -> None:
    """Counted between the storage and all its clients: tasks of Spark have storages of their own."""
    with s3_stand_in() as server, counting(server) as between:
        place, catalog = f"s3://{server.make_bucket()}/lake", f"sqlite:///{tmp_path}/catalog.db"
        with fm.open(place, create=True, catalog=catalog, storage_options=server.options) as lake:
            lake.create_table("events", "id long, part int, v long", partition=["part"], sort=["id"])
            for number in range(10):
                lake.append("events", [{"id": number * 100 + part, "part": part, "v": number} for part in range(100)])
        with fm.open(place, catalog=catalog, storage_options=between.options, spark=spark) as lake:
            assert lake.heads()[0].files == 1000

            def requested(act: Callable[[], list[int]], rows: list[int]) -> int:
                between.read.clear()
                assert sorted(act()) == rows
                return sum(path.endswith(".parquet") for path in between.read)

            def values(frame: DataFrame) -> list[int]:
                return [row.v for row in frame.collect()]

            everything = list(range(10))
            assert requested(lambda: values(lake.sql("select v from events where part = 42")), everything) == 10
            assert requested(lambda: values(lake.sql("select v from events where part = 42 and v > 6")), [7, 8, 9]) == 3
            joined = "select v from events join (select id from events where part = 42) using (id) where id = 342"
            assert requested(lambda: values(lake.sql(joined)), [3]) == 1
            assert requested(lambda: values(lake.read("events", where="part = 42")), everything) == 10
            assert requested(lambda: values(lake.read("events", where="part = 42 and upper(v) = '3'")), [3]) == 10
            scan = lake.scan("events", where="part = 42")
            assert requested(lambda: scan.to_arrow()["v"].to_pylist(), everything) == 10
            deleted = requested(lambda: [lake.delete("events", "part = 42 and v < 3").tables[0].rows_deleted], [3])
            assert deleted == 0, "each holds one row, which the condition matches by the file's statistics"
            left = lake.delete("events", "part = 42 and upper(v) = '5'")
            assert (left.tables[0].rows_deleted, lake.heads()[0].files) == (1, 996)


def test_on_s3_a_condition_on_a_sorted_column_fetches_its_row_group_however_it_is_asked(
    tmp_path: Path, spark: SparkSession
) -> None:
    """By the bytes that left S3, whichever process got them: one row group of fifty, and the footer."""
    with s3_stand_in() as server, counting(server) as between:
        place, catalog = f"s3://{server.make_bucket()}/lake", f"sqlite:///{tmp_path}/catalog.db"
        with fm.open(place, create=True, catalog=catalog, storage_options=server.options) as lake:
            groups = {"write.parquet.row-group-limit": "1000"}
            lake.create_table("long", "id long, name string", sort=["id"], properties=groups)
            chance = random.Random(1)
            lake.append("long", [{"id": number, "name": f"{chance.getrandbits(400):x}"} for number in range(50_000)])
            (head,) = lake.heads()
        with fm.open(place, catalog=catalog, storage_options=between.options, spark=spark) as lake:

            def fetched(act: Callable[[], int]) -> int:
                between.bytes_read = 0
                assert act() == 1
                return between.bytes_read

            assert (head.files, lake.scan("long").explain().row_groups) == (1, 50)
            bound = head.size_bytes / 5
            assert fetched(lambda: lake.scan("long", where="id = 4242").to_arrow().num_rows) < bound
            assert (
                fetched(lambda: lake.scan("long", where="id = 4242 and upper(name) != ''").to_arrow().num_rows) < bound
            )
            assert fetched(lambda: len(lake.read("long", where="id = 4242").collect())) < bound
            assert fetched(lambda: len(lake.sql("select name from long where id = 4242").collect())) < bound
            assert fetched(lambda: int(lake.plan_delete("long", "id = 4242")["rows"])) < bound
            # The check would be blind if all rows were as cheap.
            assert fetched(lambda: lake.scan("long").to_arrow().num_rows // 50_000) > bound


# A connector that comes with Spark: it reads s3://bucket/a/b from the file /a/b.
CONNECTOR = "org.apache.hadoop.fs.ProxyLocalFileSystem"


def test_a_session_with_a_connector_for_s3_reads_by_it(tmp_path: Path, spark: SparkSession) -> None:
    with s3_stand_in() as server, counting(server) as between:
        place, catalog = f"s3://{server.make_bucket()}{tmp_path}/lake", f"sqlite:///{tmp_path}/catalog.db"
        with fm.open(place, create=True, catalog=catalog, storage_options=server.options) as lake:
            lake.create_table("events", "id long, part int", partition=["part"])
            lake.append("events", [{"id": number, "part": number % 3} for number in range(9)])
            for path in lake.catalog.files.data_files(lake.heads()[0]):
                there = Path(path.removeprefix(place.removesuffix(f"{tmp_path}/lake")))
                there.parent.mkdir(parents=True, exist_ok=True)
                there.write_bytes(lake.catalog.storage.read(path))
        with fm.open(place, catalog=catalog, storage_options=between.options, spark=spark) as lake:

            def by_tasks() -> bool:
                """Whether Arrow tasks read it, whose requests the server in between sees."""
                between.read.clear()
                assert sorted(row.id for row in lake.sql("select id from events where part = 1").collect()) == [1, 4, 7]
                assert sorted(row.id for row in lake.read("events", where="id > 6", with_seq=True).collect()) == [7, 8]
                return any(path.endswith(".parquet") for path in between.read)

            assert by_tasks()
            with settings(spark, {"spark.hadoop.fs.s3.impl": CONNECTOR, "fs.s3.impl": CONNECTOR}):
                assert not by_tasks()
            assert by_tasks()
