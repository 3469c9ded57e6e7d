"""`update` with expressions and conditions that only Spark evaluates, and with tasks on executors: the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.rows import tasks
from floodmark.testing.invariants import check_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERYTHING = "id long not null, name string, n int, price decimal(10,2), w double, tags array<string>, at timestamp"


@pytest.fixture(params=[[], ["bucket(2, id)"]], ids=["plain", "partitioned"])
def lake(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[fm.Lake]:
    """Two files, or two in each of two partitions; one row of a third file has all values but its key null."""
    with fm.open(tmp_path / "lake", create=True, spark=spark) as lake:
        lake.create_table("t", EVERYTHING, key=["id"], partition=request.param)
        for start in (0, 4):
            lake.append("t", [row(number) for number in range(start, start + 4)])
        lake.append("t", [{**dict.fromkeys(row(0)), "id": 8}])
        yield lake
        check_lake(lake.catalog)


@pytest.fixture(params=["in process", "on executors"])
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "on executors":
        monkeypatch.setattr(tasks, "IN_PROCESS_BYTES_MAX", 0)


def row(number: int) -> dict[str, Any]:
    at = datetime(2026, 1, 1 + number, tzinfo=UTC)
    price = Decimal(number).quantize(Decimal("0.01"))
    return {
        "id": number,
        "name": f"n{number}",
        "n": number,
        "price": price,
        "w": number / 2,
        "tags": ["a"],
        "at": at,
    }


def state(lake: fm.Lake) -> dict[int, dict[str, Any]]:
    found = lake.read_arrow("t", with_seq=True).read_all().to_pylist()
    assert len({one["id"] for one in found}) == len(found) == 9
    return {one["id"]: one for one in found}


def sequences(lake: fm.Lake) -> dict[int, int]:
    return {key: one["_seq"] for key, one in state(lake).items()}


@pytest.mark.usefixtures("everywhere")
def test_values_and_conditions_may_be_any_expression(lake: fm.Lake) -> None:
    before = state(lake)
    commit = lake.update("t", {"name": "upper(name)", "n": "n * 10"}, "id % 2 = 1")
    # 0 * 10 and null are what they were.
    assert commit.tables[0].rows_updated == 4
    after = state(lake)
    for key, had in before.items():
        changed = {"name": f"N{key}", "n": key * 10, "_seq": 4} if key % 2 == 1 else {}
        assert after[key] == {**had, **changed}
    assert lake.update("t", {"name": "upper(name)"}, "id % 2 = 1").outcome == "nothing_to_do"
    assert lake.update("t", {"n": "abs(n)"}, "true").outcome == "nothing_to_do"
    found = lake.changes("t", 3).arrow().read_all().to_pylist()
    assert sorted(one["id"] for one in found) == [1, 3, 5, 7]


@pytest.mark.usefixtures("everywhere")
def test_plain_ones_are_the_same_by_tasks(lake: fm.Lake) -> None:
    lake.update("t", {"name": "'x'", "tags": "null", "w": "w"}, "id < 6")
    assert {key: (one["name"], one["tags"], one["_seq"] == 4) for key, one in state(lake).items()} == {
        **dict.fromkeys(range(6), ("x", None, True)),
        6: ("n6", ["a"], False),
        7: ("n7", ["a"], False),
        8: (None, None, False),
    }


def test_each_type_gets_values_that_fit_it(lake: fm.Lake) -> None:
    values = {
        "price": "10",
        "w": "2.5",
        "n": "id",
        "tags": "array(name, 'z')",
        "at": "timestamp '2026-05-05 00:00:00 UTC'",
    }
    lake.update("t", values, "length(name) = 2 and id = 3")
    assert state(lake)[3] == {
        **row(3),
        "price": Decimal("10.00"),
        "w": 2.5,
        "n": 3,
        "tags": ["n3", "z"],
        "at": datetime(2026, 5, 5, tzinfo=UTC),
        "_seq": 4,
    }
    lake.update(
        "t", {"at": "current_timestamp()", "price": "round(price / 4, 2)", "name": "coalesce(null, null)"}, "id = 3"
    )
    after = state(lake)[3]
    assert after["at"] > datetime(2026, 5, 5, tzinfo=UTC)
    assert (after["name"], after["price"]) == (None, Decimal("2.50"))
    with pytest.raises(fm.Invalid, match="price"):
        lake.update("t", {"price": "price / 3"}, "id = 3")


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"n": "count(id)"}, "true"),
        ({"n": "explode(array(1, 2))"}, "true"),
        ({"n": "(select 1)"}, "true"),
        ({"n": "(select max(n) from t)"}, "true"),
        ({"n": "*"}, "true"),
        ({"n": "nosuch"}, "true"),
        ({"n": "id more"}, "true"),
        ({"n": "_pos"}, "true"),
        ({"n": "rand()"}, "true"),
        ({"n": "row_number() over (order by id)"}, "true"),
        ({"n": "upper(name)"}, "true"),
        ({"n": "cast(name as int)"}, "true"),
        ({"n": "id * 10000000000"}, "id = 7"),
        ({"price": "1e12 * id"}, "id = 7"),
        ({"n": "1"}, "upper(nosuch) = 'X'"),
        ({"n": "1"}, "id in (select 1)"),
        ({"n": "1"}, "upper(name)"),
    ],
)
def test_what_is_no_value_of_a_row_is_invalid_and_changes_nothing(
    lake: fm.Lake, values: dict[str, str], where: str
) -> None:
    version, before = lake.status()["version"], state(lake)
    with pytest.raises(fm.Invalid):
        lake.update("t", values, where)
    assert (lake.status()["version"], state(lake)) == (version, before)


def test_an_expression_is_evaluated_only_for_rows_that_match(lake: fm.Lake) -> None:
    lake.update("t", {"n": "cast(substr(name, 2) as int) + 100"}, "name like 'n%' and id > 5")
    assert [state(lake)[key]["n"] for key in (5, 6, 7, 8)] == [5, 106, 107, None]


def test_a_row_that_comes_meanwhile_is_looked_at_too(lake: fm.Lake) -> None:
    def meddle(name: str) -> None:
        if name == "update.sealed":
            failpoints.observer = None
            lake.merge("t", [{**row(1), "name": "other"}])

    failpoints.observer = meddle
    try:
        lake.update("t", {"name": "concat(name, '!')"}, "id % 2 = 1")
    finally:
        failpoints.observer = None
    assert [state(lake)[key]["name"] for key in (1, 3, 5, 7)] == ["other!", "n3!", "n5!", "n7!"]
    assert {sequences(lake)[key] for key in (1, 3, 5, 7)} == {5}


def test_in_a_transaction_with_columns_that_were_renamed(lake: fm.Lake) -> None:
    """Spark matches columns by id, but pushes filters down by name."""
    lake.rename_column("t", "name", "title")
    lake.rename_column("t", "n", "name")
    with lake.transaction() as tx:
        tx.merge("t", [{"id": 0, "title": "zero"}], partial=True)
        tx.update("t", {"title": "concat(title, name)", "name": "name + 1"}, "abs(name) < 2")
        tx.update("t", {"name": "77"}, "title = 'zero0'")
    found = {one["id"]: (one["title"], one["name"]) for one in lake.read_arrow("t").read_all().to_pylist()}
    assert {key: found[key] for key in (0, 1, 2)} == {0: ("zero0", 77), 1: ("n11", 2), 2: ("n2", 2)}


def test_filled_columns_are_computed_again_by_spark_too(lake: fm.Lake) -> None:
    lake.backfill.column("t", "label", "concat(name, '/', n)")
    lake.update("t", {"name": "lower(concat('X', name))"}, "id = 2")
    found = {one["id"]: one["label"] for one in lake.read_arrow("t").read_all().to_pylist()}
    assert (found[1], found[2], found[8]) == ("n1/1", "xn2/2", None)
