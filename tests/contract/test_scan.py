"""Scans without Spark: what they return, which files and row groups they open, and what they refuse."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.commit.file_columns import REMEMBERED
from floodmark.errors import BelowRetention, Corrupt, Invalid, NotFound
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.rows.session import is_spark_running
from floodmark.storage import local_path
from tests.conftest import Place

FIRST = date(2026, 1, 1)
COLUMNS = "id long not null, day date, name string, v double"


def row(number: int, days: int = 5) -> dict[str, Any]:
    day = None if number % 11 == 0 else FIRST + timedelta(number % days)
    name = None if number % 7 == 0 else f"name {number % 13}"
    return {"id": number, "day": day, "name": name, "v": number / 8}


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("events", COLUMNS, partition=["day"], sort=["id"])
        yield lake


def opened(lake: fm.Lake, act: Callable[[], object]) -> int:
    """How many files were opened meanwhile; metadata is read before."""
    act()
    before = lake.catalog.storage.counters.snapshot()
    act()
    return lake.catalog.storage.counters.difference(before).calls.get("open_input", 0)


CONDITIONS: list[tuple[str | None, Callable[[dict[str, Any]], bool]]] = [
    (None, lambda row: True),
    ("id = 17", lambda row: row["id"] == 17),
    ("id between 20 and 29 or id = 3", lambda row: 20 <= row["id"] <= 29 or row["id"] == 3),
    ("day = '2026-01-02'", lambda row: row["day"] == date(2026, 1, 2)),
    ("day = date '2026-01-02'", lambda row: row["day"] == date(2026, 1, 2)),
    ("day is null", lambda row: row["day"] is None),
    ("day != '2026-01-02'", lambda row: row["day"] not in (None, date(2026, 1, 2))),
    ("name in ('name 1', 'name 2') and id < 40", lambda row: row["name"] in ("name 1", "name 2") and row["id"] < 40),
    ("not (name = 'name 1')", lambda row: row["name"] not in (None, "name 1")),
    ("false", lambda row: False),
]


@pytest.mark.parametrize(("where", "matches"), CONDITIONS, ids=[str(one) for one, _ in CONDITIONS])
def test_a_scan_returns_the_rows_that_match_and_no_others(
    lake: fm.Lake, where: str | None, matches: Callable[[dict[str, Any]], bool]
) -> None:
    running = is_spark_running()
    rows = [row(number) for number in range(90)]
    for start in range(0, 90, 30):
        lake.append("events", rows[start : start + 30])
    expected = [one for one in rows if matches(one)]
    scan = lake.scan("events", where=where)
    assert sorted(scan.to_arrow().to_pylist(), key=lambda one: one["id"]) == expected
    assert scan.count() == len(expected)
    narrow = lake.scan("events", where=where, columns=["v", "id"])
    assert narrow.schema.names == ["v", "id"]
    assert sorted(one["id"] for one in narrow.to_arrow().to_pylist()) == [one["id"] for one in expected]
    assert {tuple(one) for one in narrow.to_arrow().to_pylist()} <= {("v", "id")}
    few = lake.scan("events", where=where, limit=4)
    assert len(few.to_arrow()) == few.count() == min(4, len(expected))
    with lake.read_arrow("events", where=where, columns=["id"]) as reader:
        assert len(reader.read_all()) == len(expected)
    assert is_spark_running() == running


def test_sequences_come_with_the_rows_of_fresh_and_of_carried_files(lake: fm.Lake) -> None:
    for number in range(4):
        lake.append("events", [row(number * 10 + 1), row(number * 10 + 2)])
    lake.maintain.compact("events", files_min=2)
    lake.append("events", [row(100)])
    found = lake.scan("events", where="id in (2, 31, 100)", columns=["id"], with_seq=True).to_arrow().to_pylist()
    assert sorted((one["id"], one["_seq"]) for one in found) == [(2, 1), (31, 4), (100, 6)]


def test_every_kind_of_table_has_the_same_rows(lake: fm.Lake) -> None:
    lake.append("events", [row(number) for number in range(20)])
    scan = lake.scan("events", where="id < 9", columns=["id", "name"])
    rows = scan.to_arrow().to_pylist()
    assert [batch.num_rows for batch in scan.to_batches()] != []
    assert scan.to_pandas()["id"].tolist() == [one["id"] for one in rows]
    assert scan.to_polars().to_dicts() == rows
    assert isinstance(scan.to_polars(), polars.DataFrame)
    assert scan.to_duckdb().aggregate("sum(id)").fetchall() == [(sum(range(9)),)]


@pytest.mark.parametrize(("package", "method"), [("polars", "to_polars"), ("duckdb", "to_duckdb")])
def test_a_package_that_is_not_installed_is_named(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch, package: str, method: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Invalid, match=f"pip install {package}"):
        getattr(lake.scan("events"), method)()


def test_a_scan_reads_the_version_that_it_was_made_at(lake: fm.Lake) -> None:
    first = lake.append("events", [row(1)])
    scan = lake.scan("events")
    lake.append("events", [row(2)])
    assert [one["id"] for one in scan.to_arrow().to_pylist()] == [1]
    assert scan.count() == 1
    assert lake.scan("events").count() == 2
    assert lake.scan("events", version=first.version).count() == 1
    lake.branches.create("dev")
    lake.append("events", [row(3)], branch="dev")
    assert lake.scan("events", branch="dev", where="id = 3").count() == 1
    assert lake.scan("events", where="id = 3").count() == 0


def test_a_version_that_has_expired_is_below_retention(lake: fm.Lake) -> None:
    lake.append("events", [row(1)])
    scan = lake.scan("events", where="id = 1")
    # In a process that has read nothing of the table yet.
    slow = fm.open(lake.location.removeprefix("file://"), read_only=True)
    bare = slow.scan("events")
    lake.overwrite("events", [row(2)])
    for number in range(2 + SNAPSHOTS_KEPT):
        lake.append("events", [row(10 + number)])
    lake.maintain.expire(keep="0s")
    lake.maintain.sweep(grace="0s")
    fresh = fm.open(lake.location.removeprefix("file://"))
    with fresh, pytest.raises(BelowRetention):
        fresh.scan("events", version=scan.version).to_arrow()
    with pytest.raises(BelowRetention):
        scan.to_arrow()
    with slow, pytest.raises(BelowRetention):
        bare.to_arrow()


def test_what_cannot_be_scanned_is_refused_before_anything_is_read(lake: fm.Lake) -> None:
    with pytest.raises(NotFound):
        lake.scan("event")
    for options, text in (
        ({"where": "idd = 3"}, "Did you mean id"),
        ({"where": ""}, "there is no condition"),
        ({"columns": ["nam"]}, "Did you mean name"),
        ({"columns": ["_seq"]}, "there is no such column"),
        ({"columns": []}, "invalid list of columns"),
        ({"columns": "id"}, "invalid list of columns"),
        ({"columns": ["id", "id"]}, "invalid list of columns"),
        ({"limit": -1}, "a limit cannot be negative"),
        ({"version": 1, "at": "2026-01-01"}, "give a version or a time"),
    ):
        with pytest.raises(Invalid, match=text):
            lake.scan("events", **options)  # type: ignore[arg-type]


def test_a_scan_of_a_new_table_and_of_no_matching_file_is_empty(lake: fm.Lake) -> None:
    assert lake.scan("events").to_arrow().schema.names == ["id", "day", "name", "v"]
    assert lake.scan("events", where="id = 1").count() == 0
    lake.append("events", [row(1)])
    assert lake.scan("events", where="id = 2").to_arrow().num_rows == 0
    assert opened(lake, lambda: lake.scan("events", where="id = 2").to_arrow()) == 0


def test_a_damaged_file_is_an_error_and_never_fewer_rows(lake: fm.Lake) -> None:
    lake.append("events", [row(1)])
    (path,) = lake.catalog.files.data_files(lake.heads()[0])
    file = Path(str(local_path(path)))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(Corrupt):
        lake.scan("events").to_arrow()
    with pytest.raises(Corrupt):
        lake.scan("events", where="id = 1").explain()
    file.unlink()
    with pytest.raises(Corrupt):
        lake.scan("events", where="id = 1").to_arrow()


@pytest.mark.parametrize("partition", ["year(day)", "month(day)", "day(day)", "day"])
@pytest.mark.parametrize("where", ["day > '9999-12-31'", "day < '0001-01-01'", "day = '9999-12-31' and id % 2 = 0"])
def test_days_at_the_ends_of_the_calendar_match_nothing(lake: fm.Lake, partition: str, where: str) -> None:
    lake.create_table("by", COLUMNS, partition=[partition])
    lake.append("by", [row(number) for number in range(1, 9)])
    scan = lake.scan("by", where=where)
    assert scan.explain().files <= scan.explain().files_total
    if "%" not in where:
        assert scan.to_arrow().num_rows == scan.count() == 0


def test_a_manifest_that_was_cut_is_corrupt_and_never_fewer_rows(lake: fm.Lake) -> None:
    lake.append("events", [row(1)])
    lake.append("events", [row(2), row(3)])
    (manifest, *_) = lake.catalog.files.manifests(lake.heads()[0].manifest_list)
    path = Path(str(local_path(manifest.manifest_path)))
    whole = path.read_bytes()
    for length in (*range(len(whole) - 60, len(whole)), len(whole) // 2, 40):
        path.write_bytes(whole[:length])
        REMEMBERED.clear()
        with pytest.raises(Corrupt):
            lake.scan("events").count()
    path.write_bytes(whole)
    assert lake.scan("events").count() == 3


def test_counts_come_from_metadata_where_that_is_enough(lake: fm.Lake) -> None:
    lake.append("events", [row(number) for number in range(1, 40)])
    assert opened(lake, lambda: lake.scan("events").count()) == 0
    assert opened(lake, lambda: lake.scan("events", where="day = '2026-01-03'").count()) == 0
    assert opened(lake, lambda: lake.scan("events", where="day = DATE'2026-01-03'").count()) == 0
    assert opened(lake, lambda: lake.plan_delete("events", "day = date '2027-01-01'")) == 0
    assert opened(lake, lambda: lake.scan("events", where="name = 'name 3'").count()) > 0
    assert opened(lake, lambda: lake.scan("events", limit=3).to_arrow()) == 1


# ── what is opened ──


@pytest.fixture(params=["local", "s3"])
def big(request: pytest.FixtureRequest, new_place: Callable[[str], Place], tmp_path: Path) -> Iterator[fm.Lake]:
    """1,000 files in 100 partitions."""
    options: dict[str, Any] = {}
    place = new_place("sqlite")
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        options = {"storage_options": server.options}
        place = Place(f"s3://{server.make_bucket()}/lake", f"sqlite:///{tmp_path}/catalog.db")
    with place.open(create=True, **options) as lake:
        lake.create_table("events", "id long, part int, v long", partition=["part"], sort=["id"])
        for number in range(10):
            lake.append("events", [{"id": number * 100 + part, "part": part, "v": number} for part in range(100)])
        yield lake


@pytest.mark.timeout(600)
def test_a_condition_opens_only_the_files_that_can_match(big: fm.Lake) -> None:
    head = big.heads()[0]
    assert head.files == 1000
    assert opened(big, lambda: big.scan("events", where="part = 42").to_arrow()) == 10
    assert opened(big, lambda: big.scan("events", where="part in (1, 2) and v >= 5").to_arrow()) == 10
    assert opened(big, lambda: big.scan("events", where="id = 345").to_arrow()) == 1
    assert opened(big, lambda: big.read_arrow("events", where="part = 7 and v = 3").read_all()) == 1
    assert big.scan("events", where="part = 42").count() == 10
    assert opened(big, lambda: big.plan_delete("events", "part = 42 and v < 3")) == 3
    found = big.scan("events", where="part = 42 and v < 3", columns=["v"]).explain()
    assert (found.files, found.files_total, found.row_groups) == (3, 1000, 3)
    assert 0 < found.bytes < found.bytes_total
    assert (found.evaluated_by, found.pruned_by) == ("Arrow", "part = 42 and v < 3")
    assert "3 of 1,000" in str(found)
    before = big.catalog.storage.counters.snapshot()
    big.delete("events", "part = 42 and id = 342")
    assert big.catalog.storage.counters.difference(before).calls.get("open_input", 0) < 15


def test_a_condition_on_a_sorted_column_reads_only_its_row_groups(lake: fm.Lake) -> None:
    lake.create_table("long", "id long, name string", sort=["id"], properties={"write.parquet.row-group-limit": "1000"})
    numbers = list(range(50_000))
    random.Random(1).shuffle(numbers)
    names = [f"{number * 7919:0>12x}{number:0>40}{random.Random(number).getrandbits(160):x}" for number in numbers]
    lake.append("long", pa.table({"id": numbers, "name": names}))
    found = lake.scan("long", where="id = 4242").explain()
    whole = lake.scan("long").explain()
    assert found.files == whole.files == 1
    assert (found.row_groups, found.row_groups_total, whole.row_groups, whole.row_groups_total) == (1, 50, 50, 50)
    assert "1 of 50 in these files" in str(found)
    assert lake.scan("long", where="id = 4242").to_arrow()["name"].to_pylist() == [names[numbers.index(4242)]]
    storage = lake.catalog.storage.counters

    def bytes_of(act: Callable[[], object]) -> int:
        before = storage.snapshot()
        act()
        return storage.difference(before).bytes_read

    some = bytes_of(lambda: lake.scan("long", where="id = 4242").to_arrow())
    assert some < bytes_of(lambda: lake.scan("long").to_arrow()) / 4
    assert lake.plan_delete("long", "id between 10 and 19")["rows"] == 10
    lake.delete("long", "id between 10 and 19")
    assert lake.scan("long", where="id < 30").count() == 20
