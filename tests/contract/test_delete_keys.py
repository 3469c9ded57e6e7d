"""Deleting by keys in a transaction: which rows go, what the feed tells, and what others do beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import floodmark as fm
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at

PEOPLE = "id long not null, name string"


def people(**named: str) -> list[dict[str, Any]]:
    """people(k1="a") is a row with id 1."""
    return [{"id": int(key[1:]), "name": name} for key, name in named.items()]


def keys(*numbers: int) -> list[dict[str, Any]]:
    return [{"id": number} for number in numbers]


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.append("people", people(k1="a", k2="b", k3="c"))


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    prepare(place)
    with place.open(actor="test") as lake:
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    """Another writer of the same lake."""
    with place.open(actor="other") as other:
        yield other


def state(lake: fm.Lake) -> dict[int, tuple[str, int]]:
    rows = lake.read_arrow("people", with_seq=True).read_all().to_pylist()
    return {row["id"]: (row["name"], row["_seq"]) for row in rows}


def feed(lake: fm.Lake, since: int) -> list[tuple[int, str, int]]:
    rows = lake.changes("people", since).arrow().read_all().to_pylist()
    return sorted((row["id"], row["_change"], row["_seq"]) for row in rows)


def delete(lake: fm.Lake, numbers: Any, table: str = "people") -> fm.Commit:
    with lake.transaction("keys") as tx:
        tx.delete_keys(table, numbers)
    assert tx.commit is not None
    return tx.commit


# ── which rows go ──


def test_rows_with_these_keys_go_and_absent_keys_change_nothing(lake: fm.Lake) -> None:
    lake.append("people", people(k10="x", k11="y"))
    before = set(lake.catalog.files.data_files(lake.catalog.history.head("people")))
    commit = delete(lake, keys(2, 77, 2))
    assert (commit.outcome, commit.tables[0].rows_deleted, commit.tables[0].rows_added) == ("committed", 1, 0)
    assert state(lake) == {1: ("a", 1), 3: ("c", 1), 10: ("x", 2), 11: ("y", 2)}
    assert feed(lake, 2) == [(2, "delete", 3)]
    after = set(lake.catalog.files.data_files(lake.catalog.history.head("people")))
    # The file without such a key is as it was, and none of key columns is left.
    assert len(before & after) == 1


def test_keys_that_no_row_has_publish_nothing(lake: fm.Lake) -> None:
    version = lake.status()["version"]
    assert delete(lake, keys(8, 9)).outcome == "nothing_to_do"
    assert delete(lake, []).outcome == "nothing_to_do"
    assert lake.status()["version"] == version


def test_every_row_may_go(lake: fm.Lake) -> None:
    assert delete(lake, pa.table({"id": [3, 2, 1]})).tables[0].rows_total == 0
    assert state(lake) == {}
    assert feed(lake, 1) == [(key, "delete", 2) for key in (1, 2, 3)]


def test_a_merge_and_a_delete_by_keys_are_one_version(lake: fm.Lake) -> None:
    with lake.transaction("both") as tx:
        assert tx.merge("people", people(k1="A", k4="d")) == 2
        assert tx.delete_keys("people", keys(2, 3)) == 2
    assert tx.commit is not None
    part = tx.commit.tables[0]
    assert (part.rows_added, part.rows_updated, part.rows_deleted) == (1, 1, 2)
    assert state(lake) == {1: ("A", 2), 4: ("d", 2)}
    assert feed(lake, 1) == [(1, "upsert", 2), (2, "delete", 2), (3, "delete", 2), (4, "upsert", 2)]


def test_rows_of_earlier_steps_go_too_and_are_deletions_only_if_somebody_could_know_them(lake: fm.Lake) -> None:
    with lake.transaction("both") as tx:
        tx.merge("people", people(k1="A", k8="never seen", k9="stays"))
        tx.delete_keys("people", keys(1, 8))
    assert state(lake) == {2: ("b", 1), 3: ("c", 1), 9: ("stays", 2)}
    assert feed(lake, 1) == [(1, "delete", 2), (9, "upsert", 2)]


def test_a_key_of_several_columns_of_several_types(lake: fm.Lake) -> None:
    columns = "day date not null, name string not null, amount decimal(9,2) not null, note string"
    lake.create_table(
        "sums", columns, key=["day", "name", "amount"], partition=["day", "void(note)", "bucket(4, name)"]
    )
    rows = [
        {"day": date(2026, 1, day), "name": name, "amount": Decimal(amount), "note": "n"}
        for day in (1, 2)
        for name in ("x", "y")
        for amount in ("1.50", "2.00")
    ]
    lake.append("sums", rows)
    gone = [{key: row[key] for key in ("day", "name", "amount")} for row in (rows[0], rows[3], rows[6])]
    # The same day and name with another amount is another key.
    absent = {"day": date(2026, 1, 2), "name": "x", "amount": Decimal("7.00")}
    assert delete(lake, [*gone, absent], "sums").tables[0].rows_deleted == 3
    left = lake.read_arrow("sums").read_all().to_pylist()
    assert sorted(map(str, left)) == sorted(map(str, [rows[at] for at in (1, 2, 4, 5, 7)]))


@pytest.mark.parametrize(
    ("kind", "values", "layouts"),
    [
        ("int", [-(2**31), 0, 2**31 - 1], ["k", "bucket(3, k)"]),
        ("long", [-(2**63), -1, 2**63 - 1], ["k", "truncate(10, k)"]),
        ("boolean", [True, False], ["k"]),
        ("string", ["", "ä", "a" * 40, "a" * 40 + "b", "\U0010ffff" * 20], ["k", "bucket(3, k)", "truncate(3, k)"]),
        ("binary", [b"", b"\x00", b"\xff" * 20, b"\xff" * 20 + b"\x00"], ["bucket(3, k)", "part"]),
        ("date", [date(1, 1, 1), date(2026, 11, 15)], ["month(k)"]),
        ("decimal(20,4)", [Decimal("-1.5"), Decimal("9999999999999999.9999")], ["k"]),
        ("timestamp_ntz", [datetime(1969, 12, 31, 23, 59, 59, 999999), datetime(2026, 11, 15)], ["hour(k)"]),
        ("timestamp", [datetime(1969, 12, 31, 23, tzinfo=UTC), datetime(2026, 11, 15, tzinfo=UTC)], ["day(k)"]),
    ],
)
def test_keys_of_every_type_are_found_in_every_partition(
    new_place: Callable[[str], Place], kind: str, values: list[Any], layouts: list[str]
) -> None:
    with new_place("sqlite").open(create=True) as lake:
        for number, layout in enumerate([None, *layouts]):
            partition = [] if layout is None else [layout]
            lake.create_table(f"t{number}", f"k {kind} not null, part string", key=["k"], partition=partition)
            for value in values:  # a file each, so that pruning has something to leave out
                lake.append(f"t{number}", [{"k": value, "part": "x"}])
            for gone in values:
                assert delete(lake, [{"k": gone}], f"t{number}").tables[0].rows_deleted == 1
                left = {row["k"] for row in lake.read_arrow(f"t{number}").read_all().to_pylist()}
                assert left == set(values[values.index(gone) + 1 :])
        check_lake(lake.catalog)


def test_keys_are_found_in_partitions_that_another_column_decides(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("parts", "k long not null, part string", key=["k"], partition=["part"])
        for part in "ab":
            lake.append("parts", [{"k": ord(part) + number, "part": part} for number in (0, 10)])
        assert delete(lake, [{"k": ord("a")}, {"k": ord("b") + 10}], "parts").tables[0].rows_deleted == 2
        left = {row["k"]: row["part"] for row in lake.read_arrow("parts").read_all().to_pylist()}
        assert left == {ord("a") + 10: "a", ord("b"): "b"}
        check_lake(lake.catalog)


def test_what_is_no_key_is_invalid_and_changes_nothing(lake: fm.Lake) -> None:
    lake.create_table("notes", PEOPLE)
    version = lake.status()["version"]
    for table, wrong in (
        ("people", [{"id": 1, "name": "a"}]),
        ("people", [{"id": None}]),
        ("people", [{}]),
        ("people", [{"id": "1"}]),
        ("people", None),
        ("notes", keys(1)),
    ):
        with pytest.raises(fm.Invalid):
            delete(lake, wrong, table)
    assert lake.status()["version"] == version


# ── beside others ──


def test_a_row_that_comes_meanwhile_with_one_of_the_keys_goes_too(lake: fm.Lake, other: fm.Lake) -> None:
    with at("transaction.sealed", lambda: other.append("people", people(k7="came"))):
        delete(lake, keys(1, 7))
    assert state(lake) == {2: ("b", 1), 3: ("c", 1)}
    assert feed(lake, 2) == [(1, "delete", 3), (7, "delete", 3)]


def test_a_row_that_goes_meanwhile_is_not_deleted_twice(lake: fm.Lake, other: fm.Lake) -> None:
    with at("transaction.sealed", lambda: other.delete("people", "id = 1")):
        assert delete(lake, keys(1, 2)).tables[0].rows_deleted == 1
    assert feed(lake, 1) == [(1, "delete", 2), (2, "delete", 3)]


def test_rows_of_other_keys_that_come_meanwhile_stay(lake: fm.Lake, other: fm.Lake) -> None:
    with at("transaction.sealed", lambda: other.append("people", people(k7="stays"))):
        delete(lake, keys(2))
    assert state(lake) == {1: ("a", 1), 3: ("c", 1), 7: ("stays", 2)}


def test_a_column_that_comes_meanwhile_does_not_matter(lake: fm.Lake, other: fm.Lake) -> None:
    def evolve() -> None:
        other.append("people", [{"id": 9, "name": "i", "age": 3}], evolve=True)

    with at("transaction.sealed", evolve):
        delete(lake, keys(2, 9))
    assert set(state(lake)) == {1, 3}


# ── killed ──


def killed_writer(place: Place, batch: str | None) -> str:
    with place.open() as lake, lake.transaction("both", batch=batch) as tx:
        tx.merge("people", people(k1="A"))
        tx.delete_keys("people", keys(2, 77))
    assert tx.commit is not None
    return tx.commit.outcome


@pytest.mark.parametrize("batch", [None, "monday"])
@pytest.mark.parametrize("step", ["staged:2", "rewritten:2", "sealed", "built", "moved", "published"])
def test_killed_it_happens_whole_or_not_at_all(new_place: Callable[[str], Place], step: str, batch: str | None) -> None:
    place = new_place("sqlite")
    run_child(prepare, place)
    assert run_killed(killed_writer, place, batch, failpoint=f"transaction.{step}")
    happened = step == "published" or (batch is not None and step in ("sealed", "built", "moved"))
    with place.open() as lake:
        check_lake(lake.catalog)
        assert state(lake) == ({1: ("A", 2), 3: ("c", 1)} if happened else {1: ("a", 1), 2: ("b", 1), 3: ("c", 1)})
        assert feed(lake, 1) == ([(1, "upsert", 2), (2, "delete", 2)] if happened else [])
    if batch is not None:
        assert run_child(killed_writer, place, batch) == ("already_committed" if happened else "committed")
