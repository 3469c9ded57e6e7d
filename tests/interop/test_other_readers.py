"""Other engines read the same lake: PyIceberg from the same catalog database, DuckDB from the metadata files.

They are told nothing by Floodmark: what they find must be what was appended, value by value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import create_engine, inspect

import floodmark as fm
from floodmark.catalog.database import SQLITE_NAME
from floodmark.repair.examine import examine_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows

EVERYTHING = """
    id long not null, small int, flag boolean, ratio double, single float, amount decimal(20,4),
    at timestamp, local timestamp_ntz, day date, name string, raw binary,
    tags array<string>, prices map<string, decimal(8,2)>,
    who struct<name: string, spoken: array<string>, home: struct<city: string, zip: int>>,
    visits array<struct<place: string, hours: map<string, int>>>
"""
START = datetime(2026, 11, 14, 22, 30, tzinfo=UTC)


def everything(number: int) -> dict[str, Any]:
    at = START + timedelta(hours=number, microseconds=number)
    return {
        "id": number,
        "small": -number,
        "flag": number % 2 == 0,
        "ratio": number / 7,
        "single": number / 4,
        "amount": Decimal(number) * Decimal("1234567.0089"),
        "at": at,
        "local": at.replace(tzinfo=None),
        "day": at.date(),
        "name": f"Zeile {number} 水",
        "raw": bytes([number % 256, 0, 255]),
        "tags": ["a", None, f"tag {number}"],
        "prices": {"low": Decimal("1.25"), "high": Decimal(number)},
        "who": {"name": "Ada", "spoken": ["en", "fr"], "home": {"city": "Ulm", "zip": number}},
        "visits": [{"place": "here", "hours": {"mon": 8, "tue": number}}, {"place": "there", "hours": {}}],
    }


def empty(number: int) -> dict[str, Any]:
    return {**dict.fromkeys(everything(0)), "id": number}


APPENDED = [*(everything(number) for number in range(40)), empty(40), {**empty(41), "tags": [], "prices": {}}]


def fill(place: Place) -> None:
    """Tables of every kind of column and layout, from enough commits that manifests were merged."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("everything", EVERYTHING)
        lake.create_table("parted", EVERYTHING, partition=["day(at)", "bucket(4, id)"])
        lake.create_table("named", EVERYTHING, partition=["flag", "truncate(2, name)"])
        lake.create_table("nothing", EVENTS)
        for start in range(0, len(APPENDED), 2):
            with lake.transaction() as tx:
                tx.append("everything", APPENDED[start : start + 2])
                if start % 6 == 0:
                    tx.append("parted", APPENDED[start : start + 6])
                    tx.append("named", APPENDED[start : start + 6])


@pytest.fixture(scope="module", params=DATABASES)
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("interop") / "a lake ü"
    catalog = None
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        catalog = server.url(server.new_database())
    place = Place(str(folder), catalog)
    fill(place)
    return place


def as_arrow(row: dict[str, Any]) -> dict[str, Any]:
    """An appended row as Arrow gives it back: maps are lists of pairs."""
    visits = row["visits"] and [{**visit, "hours": list(visit["hours"].items())} for visit in row["visits"]]
    prices = None if row["prices"] is None else list(row["prices"].items())
    return {**row, "prices": prices, "visits": visits}


def check_rows(found: pa.Table, expected: list[dict[str, Any]]) -> None:
    by_id = sorted(found.to_pylist(), key=lambda row: row["id"])
    # A fresh file carries no sequence of its own: its rows inherit the commit's.
    assert by_id == [{**as_arrow(row), "_seq": None} for row in expected]
    zones = {field.name: field.type.tz for field in found.schema if pa.types.is_timestamp(field.type)}
    assert zones["local"] is None
    assert zones["at"] is not None


# ── PyIceberg, by its own catalog ──


def uri(place: Place) -> str:
    return place.catalog or f"sqlite:///{place.path}/{SQLITE_NAME}"


@pytest.fixture
def pyiceberg(filled: Place) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog("floodmark", uri=uri(filled), warehouse=f"file://{filled.path}")
    yield catalog
    catalog.engine.dispose()


def test_pyiceberg_lists_the_tables(pyiceberg: SqlCatalog) -> None:
    assert pyiceberg.list_namespaces() == [("default",)]
    assert sorted(name for _, name in pyiceberg.list_tables("default")) == ["everything", "named", "nothing", "parted"]
    assert pyiceberg.table_exists("default.parted")
    assert not pyiceberg.table_exists("default.missing")


@pytest.mark.parametrize("table", ["everything", "parted", "named"])
def test_pyiceberg_reads_what_was_appended(pyiceberg: SqlCatalog, table: str) -> None:
    found = pyiceberg.load_table(f"default.{table}").scan().to_arrow()
    # PyIceberg 0.12 gives a null list of structs back as an empty one; the files say null, as DuckDB shows.
    check_rows(found, [{**row, "visits": row["visits"] or []} for row in APPENDED])


def test_pyiceberg_reads_an_empty_table(pyiceberg: SqlCatalog) -> None:
    table = pyiceberg.load_table("default.nothing")
    assert table.scan().to_arrow().num_rows == 0
    assert table.current_snapshot() is None


@pytest.mark.parametrize(
    ("table", "where", "expected"),
    [
        ("parted", "at >= '2026-11-15T00:00:00+00:00' and at < '2026-11-16T00:00:00+00:00'", range(2, 26)),
        ("parted", "id = 17", [17]),
        ("named", "flag = true", range(0, 40, 2)),
        ("everything", "id > 37 and id < 41", [38, 39, 40]),
        ("everything", "amount is null", [40, 41]),
    ],
)
def test_pyiceberg_prunes_by_our_partitions_and_statistics_without_losing_rows(
    pyiceberg: SqlCatalog, filled: Place, table: str, where: str, expected: Any
) -> None:
    scan = pyiceberg.load_table(f"default.{table}").scan(row_filter=where)
    assert sorted(scan.to_arrow()["id"].to_pylist()) == list(expected)
    with filled.open(read_only=True) as lake:
        files = next(one for one in lake.tables() if one["table"] == table)["files"]
    assert len(list(scan.plan_files())) < files, "nothing was pruned"


def test_pyiceberg_counts_from_our_summaries_and_statistics(pyiceberg: SqlCatalog) -> None:
    table = pyiceberg.load_table("default.parted")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary["total-records"] == str(len(APPENDED))
    assert table.scan().count() == len(APPENDED)
    files = table.inspect.files().to_pylist()
    assert sum(file["record_count"] for file in files) == len(APPENDED)
    assert all(
        os.path.getsize(file["file_path"].removeprefix("file://")) == file["file_size_in_bytes"] for file in files
    )
    assert table.format_version == 2


@pytest.mark.parametrize("database", DATABASES)
def test_the_iceberg_tables_have_the_shape_that_pyiceberg_makes(
    new_place: Callable[[str], Place], database: str, tmp_path: Path
) -> None:
    ours = new_place(database)
    ours.open(create=True).close()
    theirs = new_place(database).catalog or f"sqlite:///{tmp_path}/fresh.db"
    SqlCatalog("floodmark", uri=theirs, warehouse=f"file://{tmp_path}").engine.dispose()

    def shape(url: str) -> dict[str, Any]:
        engine = create_engine(url)
        found = inspect(engine)
        shapes = {
            table: (
                [(column["name"], str(column["type"]), column["nullable"]) for column in found.get_columns(table)],
                found.get_pk_constraint(table)["constrained_columns"],
            )
            for table in ("iceberg_tables", "iceberg_namespace_properties")
        }
        engine.dispose()
        return shapes

    assert shape(uri(ours)) == shape(theirs)


def test_a_commit_past_the_door_is_noticed_by_the_next_write_and_by_doctor(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        lake.append("events", rows(1, 2))
    catalog = SqlCatalog("floodmark", uri=uri(place), warehouse=f"file://{place.path}")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
    catalog.load_table("default.events").append(pa.table({"id": [9], "name": ["theirs"]}, schema=schema))
    catalog.engine.dispose()

    with place.open() as lake:
        before = set(Path(place.path, "tables").rglob("*.*"))
        for write in (
            lambda: lake.append("events", rows(3)),
            lambda: lake.append("events", rows(3), batch="monday"),
            lambda: _both(lake),
        ):
            with pytest.raises(fm.Corrupt) as caught:
                write()
            assert caught.value.facts["table"] == "events"
            assert caught.value.facts["pointer"] != caught.value.facts["pointer_expected"]
            assert caught.value.advice
        assert set(Path(place.path, "tables").rglob("*.*")) == before, "something was written"
        assert (ids(lake), ids(lake, "notes"), lake.status()["version"]) == ([1, 2], [], 3)
        # Only this table is shut; the others go on.
        assert lake.append("notes", rows(5)).outcome == "committed"
        failed = {check.name: check.detail for check in examine_lake(lake.catalog) if not check.passed}
        assert list(failed) == ["table events"]
        assert "another writer" in failed["table events"]
    with place.open() as lake:
        assert (ids(lake), ids(lake, "notes")) == ([1, 2], [5])


def _both(lake: fm.Lake) -> None:
    with lake.transaction() as tx:
        tx.append("events", rows(3))
        tx.append("notes", rows(4))


# ── DuckDB, by the metadata files ──


def scan(place: Place, table: str) -> str:
    with place.open(read_only=True) as lake:
        location = lake.show(table)["metadata_location"]
    return f"iceberg_scan('{location}')"


@pytest.mark.parametrize("table", ["everything", "parted", "named"])
def test_duckdb_reads_what_was_appended(duck: duckdb.DuckDBPyConnection, filled: Place, table: str) -> None:
    check_rows(duck.execute(f"SELECT * FROM {scan(filled, table)}").to_arrow_table(), APPENDED)


def test_duckdb_and_pyiceberg_agree(duck: duckdb.DuckDBPyConnection, filled: Place, pyiceberg: SqlCatalog) -> None:
    columns = ("id", "amount", "at", "local", "day", "who", "prices")
    theirs = pyiceberg.load_table("default.parted").scan(selected_fields=columns).to_arrow().select(columns)
    query = "SELECT {} FROM {} ORDER BY id".format(", ".join(f'"{one}"' for one in columns), scan(filled, "parted"))
    assert duck.execute(query).to_arrow_table().to_pylist() == theirs.sort_by("id").to_pylist()


def test_duckdb_prunes_by_our_partitions_without_losing_rows(duck: duckdb.DuckDBPyConnection, filled: Place) -> None:
    table = scan(filled, "parted")
    day = date(2026, 11, 15)
    days = f"\"at\" >= '{day}' AND \"at\" < '{day + timedelta(days=1)}'"
    query = f"SELECT count(*), min(id), max(id) FROM {table} WHERE {days}"
    assert duck.execute(query).fetchone() == (24, 2, 25)
    assert duck.execute(f"SELECT sum(amount) FROM {table}").fetchone() == (
        sum(row["amount"] for row in APPENDED if row["amount"] is not None),
    )


def test_duckdb_reads_an_empty_table(duck: duckdb.DuckDBPyConnection, filled: Place) -> None:
    assert duck.execute(f"SELECT count(*) FROM {scan(filled, 'nothing')}").fetchone() == (0,)
