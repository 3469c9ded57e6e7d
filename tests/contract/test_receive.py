"""Rows that another system sends, into every database: each part once, whoever sends it again, and when.

What a part is, and that it is in, is committed with its rows. The same over HTTP is in test_receive_http.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf, nan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.database import SQLITE_NAME
from floodmark.ingest.receive import Sender
from floodmark.rows.json.json_lines import parse_lines
from floodmark.rows.json.ndjson import encode_lines
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows

pytestmark = pytest.mark.mostly_sqlite(3)

ANY = 1_000_000


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    prepare(place)
    with place.open(actor="test") as lake:
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    """Another server of the same lake."""
    with place.open(actor="other") as other:
        yield other


def part(first: int, last: int, unit: tuple[int, int] = (0, 5), epoch: int = 1, name: str = "a/b/c/rows") -> Sender:
    return Sender(name, epoch, *unit, first, last)


def take(lake: fm.Lake, sender: Sender, data: Any = None, table: str = "events") -> str:
    """Rows whose ids are their numbers in the unit, unless others are given; the outcome."""
    given = rows(*range(sender.first, sender.last)) if data is None else data
    return lake.receive(table, given, sender=sender).outcome


def sender_row(lake: fm.Lake) -> Any:
    with lake.catalog.database.read() as tx:
        return tx.execute(select(tables.senders)).one()


def state(lake: fm.Lake) -> dict[int, str]:
    return {row["id"]: row["name"] for row in lake.read_arrow("people").read_all().to_pylist()}


def feed(lake: fm.Lake, since: int | None = None) -> list[tuple[int, str, int]]:
    found = lake.changes("people", since).arrow().read_all().to_pylist()
    return sorted((row["id"], row["_change"], row["_seq"]) for row in found)


# ── once ──


def test_the_same_part_again_is_known_whatever_came_since(lake: fm.Lake, other: fm.Lake) -> None:
    assert take(lake, part(0, 3)) == "committed"
    version = lake.status()["version"]
    assert take(lake, part(0, 3)) == "already_committed"
    assert take(other, part(0, 3)) == "already_committed"
    assert lake.receive("events", rows(0, 1, 2), sender=part(0, 3)).version == version
    assert take(lake, part(3, 5)) == "committed"
    assert take(lake, part(0, 1, unit=(5, 9)), rows(50)) == "committed"
    assert take(lake, part(0, 1, unit=(20, 30)), rows(60)) == "committed"
    # Units of which not even the range is remembered.
    for sender in (part(0, 3), part(3, 5), part(0, 1, unit=(5, 9)), part(7, 8, unit=(9, 20))):
        assert take(lake, sender) == "already_committed"
    assert ids(lake) == [0, 1, 2, 3, 4, 50, 60]


def test_parts_of_a_unit_come_in_any_order_and_are_remembered_as_ranges(lake: fm.Lake) -> None:
    for first, last in ((4, 6), (0, 2), (8, 9), (2, 4)):
        assert take(lake, part(first, last)) == "committed"
    assert json.loads(sender_row(lake).ranges) == [[0, 6], [8, 9]]
    # Cut otherwise, it is still in.
    assert take(lake, part(1, 5)) == "already_committed"
    assert take(lake, part(6, 8)) == "committed"
    assert json.loads(sender_row(lake).ranges) == [[0, 9]]
    assert ids(lake) == list(range(9))


def test_a_part_that_is_half_in_is_refused(lake: fm.Lake) -> None:
    take(lake, part(0, 3))
    for first, last in ((2, 4), (0, 4)):
        with pytest.raises(fm.Conflict):
            take(lake, part(first, last))
    assert ids(lake) == [0, 1, 2]


def test_a_unit_that_is_not_the_next_one_is_refused(lake: fm.Lake) -> None:
    take(lake, part(0, 1, unit=(5, 9)))
    for unit in ((5, 8), (5, 12), (3, 9), (8, 12), (0, 6)):
        with pytest.raises(fm.Conflict):
            take(lake, part(1, 2, unit=unit))
    assert ids(lake) == [0]


def test_a_sender_of_an_old_epoch_is_fenced_and_a_new_epoch_begins_anew(lake: fm.Lake) -> None:
    take(lake, part(0, 2, epoch=1))
    assert take(lake, part(0, 2, epoch=2)) == "committed"
    assert take(lake, part(0, 2, epoch=2)) == "already_committed"
    for old in (part(0, 2, epoch=1), part(0, 2, unit=(5, 9), epoch=1)):
        with pytest.raises(fm.Conflict) as caught:
            take(lake, old)
        assert caught.value.facts["epoch_newest"] == 2
    assert ids(lake) == [0, 0, 1, 1]


def test_senders_and_tables_have_marks_of_their_own(lake: fm.Lake) -> None:
    lake.create_table("notes", EVENTS)
    for sender in (part(0, 1), part(0, 1, name="a/b/c/retry")):
        for table in ("events", "notes"):
            assert take(lake, sender, table=table) == "committed"
            assert take(lake, sender, table=table) == "already_committed"
    assert (ids(lake), ids(lake, "notes")) == ([0, 0], [0, 0])


def test_equal_rows_of_two_parts_are_all_stored(lake: fm.Lake) -> None:
    same = rows(7, 7)
    assert [take(lake, part(first, first + 2), same) for first in (0, 2, 4)] == ["committed"] * 3
    assert ids(lake) == [7] * 6


@pytest.mark.parametrize("table", ["events", "people"])
@pytest.mark.parametrize("point", ["staged", "sealed", "built"])
def test_the_same_part_twice_at_once_is_stored_once(lake: fm.Lake, other: fm.Lake, table: str, point: str) -> None:
    kind = "append" if table == "events" else "merge"
    met: list[str] = []
    with at(f"{kind}.{point}", lambda: met.append(take(other, part(0, 3), table=table))):
        assert take(lake, part(0, 3), table=table) == "already_committed"
    assert met == ["committed"]
    assert ids(lake, table) == [0, 1, 2]


def test_another_part_at_once_is_stored_beside_it(lake: fm.Lake, other: fm.Lake) -> None:
    with at("append.sealed", lambda: take(other, part(3, 5))):
        assert take(lake, part(0, 3)) == "committed"
    assert json.loads(sender_row(lake).ranges) == [[0, 5]]
    assert ids(lake) == [0, 1, 2, 3, 4]


def test_a_part_that_was_overtaken_by_a_newer_epoch_is_not_stored(lake: fm.Lake, other: fm.Lake) -> None:
    overtake = at("append.sealed", lambda: take(other, part(0, 2, epoch=2), rows(8, 9)))
    with overtake, pytest.raises(fm.Conflict):
        take(lake, part(0, 2, epoch=1))
    assert ids(lake) == [8, 9]


def test_a_key_of_the_client_itself_makes_rows_come_once(lake: fm.Lake) -> None:
    assert lake.receive("events", rows(1), key="k").outcome == "committed"
    assert lake.receive("events", rows(1), key="k").outcome == "already_committed"
    assert lake.receive("people", rows(1), key="k").outcome == "committed"
    assert lake.receive("events", rows(1)).outcome == "committed"
    assert ids(lake) == [1, 1]


def test_a_restored_catalog_still_knows_what_came(new_place: Callable[[str], Place], tmp_path: Path) -> None:
    place = new_place("sqlite")
    prepare(place)
    with place.open() as lake:
        take(lake, part(0, 2))
        lake.backup(tmp_path / "backup")
    os.remove(Path(place.path) / SQLITE_NAME)
    fm.restore(tmp_path / "backup", place.path)
    with place.open() as lake:
        assert take(lake, part(0, 2)) == "already_committed"
        assert take(lake, part(2, 3)) == "committed"
        assert ids(lake) == [0, 1, 2]


# ── what rows tell ──


def test_rows_and_deletions_of_a_part_are_one_version(lake: fm.Lake) -> None:
    take(lake, part(0, 3), table="people")
    mixed = [
        {"id": 1, "_change": "delete", "_seq": 9},
        {"id": 2, "name": "two", "_change": "upsert", "_seq": 8},
        {"id": 77, "name": None, "_change": "delete", "_seq": 9},
        {"id": 5, "name": "five"},
    ]
    commit = lake.receive("people", mixed, sender=part(0, 4, unit=(5, 9)))
    assert (commit.outcome, len(commit.tables)) == ("committed", 1)
    assert state(lake) == {0: "row 0", 2: "two", 5: "five"}
    assert feed(lake, 1) == [(1, "delete", 2), (2, "upsert", 2), (5, "upsert", 2)]
    # Nobody's dicts were changed.
    assert mixed[0] == {"id": 1, "_change": "delete", "_seq": 9}


def test_a_part_of_deletions_alone(lake: fm.Lake) -> None:
    take(lake, part(0, 3), table="people")
    gone = [{"id": number, "_change": "delete"} for number in (0, 2)]
    assert take(lake, part(0, 2, unit=(5, 9)), gone, "people") == "committed"
    assert state(lake) == {1: "row 1"}
    # Of keys that are not there nothing but the sender's mark is written.
    assert take(lake, part(0, 2, unit=(9, 10)), gone, "people") == "committed"
    assert take(lake, part(0, 2, unit=(9, 10)), gone, "people") == "already_committed"
    assert feed(lake, 1) == [(0, "delete", 2), (2, "delete", 2)]


def test_rows_in_arrow_tell_their_changes_too(lake: fm.Lake) -> None:
    take(lake, part(0, 3), table="people")
    columns = {"id": [1, 2], "name": [None, "two"], "_change": ["delete", None], "_seq": [4, 4]}
    assert take(lake, part(0, 2, unit=(5, 9)), pa.table(columns), "people") == "committed"
    assert state(lake) == {0: "row 0", 2: "two"}
    assert take(lake, part(0, 1), pa.table({"id": [9], "name": ["n"]}).to_reader()) == "committed"
    assert ids(lake) == [9]


def test_new_columns_come_only_if_that_is_asked_for(lake: fm.Lake) -> None:
    with pytest.raises(fm.Invalid) as caught:
        lake.receive("events", [{"id": 1, "name": "a", "age": 7}])
    assert caught.value.facts["column"] == "age"
    lake.receive("events", [{"id": 1, "name": "a", "age": 7}], evolve=True)
    assert lake.read_arrow("events").read_all().to_pylist() == [{"id": 1, "name": "a", "age": 7}]


WRONG: dict[str, tuple[str, Any]] = {
    "a deletion without a key": ("events", [{"id": 1, "_change": "delete"}]),
    "a key as row and deletion": ("people", [*rows(1, 2), {"id": 2, "_change": "delete"}]),
    "a key twice": ("people", rows(1, 1)),
    "an unknown change": ("people", [{"id": 1, "_change": "insert"}]),
    "a change that is no text": ("people", [{"id": 1, "_change": ["delete"]}]),
    "an unknown change in Arrow": ("people", pa.table({"id": [1], "name": ["a"], "_change": ["insert"]})),
    "an unknown column": ("people", [{"id": 1, "nme": "a"}]),
    "an unknown column of a deletion": ("people", [{"id": 1, "nme": "a", "_change": "delete"}]),
    "a deletion of no key": ("people", [{"name": "a", "_change": "delete"}]),
    "no dict": ("people", [1]),
    "a wrong value": ("events", [{"id": "1"}]),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_invalid_and_neither_rows_nor_marks_are_stored(lake: fm.Lake, what: str) -> None:
    table, data = WRONG[what]
    take(lake, part(0, 1), rows(100), table)
    version, marks = lake.status()["version"], sender_row(lake)
    with pytest.raises(fm.Invalid):
        take(lake, part(1, 1 + len(data)), data, table)
    assert (lake.status()["version"], sender_row(lake)) == (version, marks)
    assert take(lake, part(1, 3), rows(1, 2), table) == "committed"


def test_a_part_with_other_rows_than_it_says_is_invalid(lake: fm.Lake) -> None:
    for data in (rows(1), rows(1, 2, 3), []):
        with pytest.raises(fm.Invalid):
            take(lake, part(0, 2), data)
    assert ids(lake) == []


@pytest.mark.parametrize(
    "numbers", [("", 1, 0, 1, 0, 1), ("é", 1, 0, 1, 0, 1), ("a" * 201, 1, 0, 1, 0, 1), ("a", 1, 1, 1, 0, 1),
                ("a", 1, 0, 1, 1, 1), ("a", 1, 0, 1, -1, 1), ("a", 2**63, 0, 1, 0, 1)],
)  # fmt: skip
def test_a_sender_that_is_none_is_invalid(numbers: Any) -> None:
    with pytest.raises(fm.Invalid):
        Sender(*numbers)


def test_a_table_that_is_not_there_is_not_found(lake: fm.Lake) -> None:
    with pytest.raises(fm.NotFound):
        take(lake, part(0, 1), table="nothing")


# ── JSON ──

EVERYTHING = """
    id long not null, small int, text string, yes boolean, exact decimal(20,4), single float, double double, raw binary,
    day date, moment timestamp, local timestamp_ntz,
    nested struct<inside: binary, list: array<double>>, many array<struct<raw: binary>>, by_name map<string, double>
"""


def test_rows_that_a_sink_writes_as_json_come_in_as_they_were(new_place: Callable[[str], Place]) -> None:
    values: dict[str, Any] = {
        "small": -5,
        "text": 'ä "quoted"\n\u2028 line',
        "yes": False,
        "exact": Decimal("-123456789012.3400"),
        "single": 0.1,
        "double": -0.0,
        "raw": b"\x00\xff",
        "day": date(1, 1, 1),
        "moment": datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
        "local": datetime(2026, 11, 15),
        "nested": {"inside": b"", "list": [nan, None, -inf]},
        "many": [{"raw": b"a"}, None, {"raw": None}],
        "by_name": {"": 1e300, "x": inf, "y": None},
    }
    with new_place("sqlite").open(create=True) as lake:
        for table in ("sent", "received"):
            lake.create_table(table, EVERYTHING, key=["id"])
        floats = {"id": 3, "single": -inf, "double": nan}
        lake.append("sent", [{"id": 1, **values}, {"id": 2}, floats])
        text = b"".join(encode_lines(lake.read_arrow("sent").read_all().combine_chunks().to_batches()[0]).to_pylist())
        lake.receive("received", parse_lines(text, ANY), from_json=True)
        sent, received = (lake.read_arrow(table).read_all().sort_by("id").to_pylist() for table in ("sent", "received"))
        assert repr(sent) == repr(received)


@pytest.mark.parametrize(
    ("column", "value"),
    [("raw", "?"), ("raw", "é"), ("double", "nan"), ("double", 1e400), ("nested", {"inside": "?"}), ("raw", 5)],
)
def test_a_value_that_json_cannot_mean_is_invalid_by_its_column(
    new_place: Callable[[str], Place], column: str, value: Any
) -> None:
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("received", EVERYTHING)
        with pytest.raises(fm.Invalid) as caught:
            lake.receive("received", [{"id": 1, column: value}], from_json=True)
        assert column in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b'{"a":1}\n{"a":', 2),
        (b'{"a":1}\n\n[1]\n', 3),
        (b'{"a":1}{"b":2}\n', 1),
        (b'{"a":1},\n', 1),
        (b'{"a":\n1}\n', 1),
        (b'{"a":NaN}\n', 1),
        (b'{"a":1}\r\n{"a":"\xff"}\n', 2),
        (b'{"a":1}\n' + b"[" * 100_000, 2),
        (b'{"a":' + b"1" * 5000 + b"}", 1),
        (b"null\n", 1),
    ],
)
def test_a_line_that_is_no_object_is_named_by_its_number(text: bytes, line: int) -> None:
    with pytest.raises(fm.Invalid) as caught:
        parse_lines(text, ANY)
    assert caught.value.facts["line"] == line


def test_lines_are_ended_by_newlines_alone_and_blank_ones_are_no_rows() -> None:
    assert parse_lines('\n{"a":"\u2028\u0085"}\r\n  \n{"b":2}'.encode(), 2) == [{"a": "\u2028\u0085"}, {"b": 2}]
    with pytest.raises(fm.Invalid):
        parse_lines(b"{}\n{}\n{}\n", 2)


# ── killed ──


def receive_part(place: Place, table: str) -> str:
    mixed = rows(1, 2)
    if table == "people":
        mixed[1] = {"id": 0, "_change": "delete"}
    with place.open() as lake:
        return take(lake, part(0, 2, unit=(5, 9)), mixed, table)


POINTS = [
    (table, f"{kind}.{step}")
    for table, kind in (("events", "append"), ("people", "merge"))
    for step in ("begun", "staged", "rewritten", "sealed", "built", "locked", "moved", "published")
    if not (kind == "append" and step == "rewritten")
]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize(("table", "point"), POINTS)
def test_a_part_whose_receiver_was_killed_is_stored_once_when_it_is_sent_again(
    new_place: Callable[[str], Place], database: str, table: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    with place.open() as lake:
        take(lake, part(0, 1), table=table)
    assert run_killed(receive_part, place, table, failpoint=point)
    sealed = point.partition(".")[2] in ("sealed", "built", "locked", "moved", "published")
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        healed = [] if point.endswith("published") else ["rolled_forward" if sealed else "rolled_back"]
        assert list(facts.audit.values()) == healed
    assert run_child(receive_part, place, table) == ("already_committed" if sealed else "committed")
    with place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake, table) == ([0, 1, 2] if table == "events" else [1])
        row = sender_row(lake)
        assert (row.since, row.until, row.mark, json.loads(row.ranges)) == (5, 9, 5, [[0, 2]])
