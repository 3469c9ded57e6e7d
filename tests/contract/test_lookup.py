"""Rows found by key and by value: exact whatever the index covers, at every version and branch, in pages, in order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.indexes import VALUE, SealedSegment, WantedIndex
from floodmark.errors import BelowRetention, Corrupt, Incomplete, Invalid, NotFound
from floodmark.index.writing import columns_on, is_wide_on, write_segments
from floodmark.rows.index.hashing import ENCODER, ENCODERS, Encoder
from floodmark.rows.reading.selection import select_files
from floodmark.rows.session import is_spark_running
from floodmark.scan import readable
from floodmark.storage import join, local_path
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.history_world import Numbers, history, run

Row = dict[str, Any]


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    running = is_spark_running()
    with place.open(create=True) as lake:
        yield lake
    assert is_spark_running() == running


def index(lake: fm.Lake, table: str, *columns: str, files: Callable[[int], bool] = lambda at: True) -> None:
    """A value index on these columns, which covers some of the table's files."""
    catalog, head = lake.catalog, lake.catalog.history.head(table)
    schema = lake.schema(table)
    ids = [schema.find_field(name).field_id for name in columns]
    found = columns_on(schema, ids)
    assert found is not None
    wanted = WantedIndex(VALUE, tuple(sorted(ids)), is_wide_on(found), ENCODER.number)
    row, _ = catalog.indexes.declare(head.table_id, wanted)
    every = select_files(catalog.files, head, schema).files
    some = [file for at, file in enumerate(every) if files(at)]
    folder = join(catalog.files.metadata(head.metadata_location).location, "data", "01TEST")
    made, _ = write_segments(catalog.storage, lake.sessions, folder, schema, [row], some, tag="test")
    record(lake, head.table_id, made)


def record(lake: fm.Lake, table_id: str, made: Sequence[SealedSegment]) -> None:
    from floodmark.catalog.indexes import IndexRider

    with lake.catalog.database.write() as tx:
        IndexRider(table_id, tuple(made)).apply(tx, "01TEST", 1, 1)


def uncover(lake: fm.Lake, table: str, which: Callable[[int], bool] = lambda at: True) -> int:
    """Let segments of the table cover nothing."""
    head = lake.catalog.history.head(table)
    gone = [row for at, row in enumerate(lake.catalog.indexes.segments(head.table_id)) if which(at)]
    for row in gone:
        lake.catalog.indexes.mark_broken(row.location)
    return len(gone)


KEYS: dict[str, tuple[str, list[Any]]] = {
    "long": ("long", [0, -1, 7, 2**62]),
    "int": ("int", [0, -1, 7, 2**31 - 1]),
    "string": ("string", ["", "a", "A", "ä\u0000b", "x" * 40, "0b8a0e2c-6f36-4b7e-9d53-1f7f3f0f8a10"]),
    "binary": ("binary", [b"", b"\x00", b"\x00\x00", bytes(16)]),
    "date": ("date", [date(1969, 12, 31), date(1970, 1, 1), date(9999, 12, 31)]),
    "timestamp": ("timestamp", [datetime(2026, 11, 15, 10, 0, 0, 1, tzinfo=UTC), datetime(1901, 1, 1, tzinfo=UTC)]),
    "timestamp_ntz": ("timestamp_ntz", [datetime(2026, 11, 15, 10), datetime(2026, 11, 15, 10, 0, 0, 1)]),
    "decimal": ("decimal(12,3)", [Decimal("0.000"), Decimal("-1.500"), Decimal("123456789.125")]),
    "boolean": ("boolean", [True, False]),
}


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("covered", [True, False])
def test_a_row_is_found_by_a_key_of_any_type(lake: fm.Lake, kind: str, covered: bool) -> None:
    declared, values = KEYS[kind]
    lake.create_table("t", f"k {declared}, n long", key=["k"])
    for number, value in enumerate(values[:-1]):
        lake.append("t", [{"k": value, "n": number}])
    if not covered:
        assert uncover(lake, "t") == len(values) - 1
    for number, value in enumerate(values[:-1]):
        expected = {"k": value, "n": number}
        assert lake.get("t", value) == lake.get("t", (value,)) == lake.get("t", {"k": value}) == expected
        assert lake.lookup("t", k=value).rows == [expected]
    assert lake.get("t", values[-1]) is None
    assert lake.lookup("t", k=values[-1]).rows == []
    asked = [values[-1], *reversed(values[:-1]), values[0]]
    assert lake.get_many("t", asked).column("k").to_pylist() == [*reversed(values[:-1]), values[0]]
    keys = pa.table(
        {"other": range(len(asked)), "k": pa.array(asked, lake.get_many("t", asked).schema.field("k").type)}
    )
    assert lake.get_many("t", keys).equals(lake.get_many("t", asked))
    used = lake.get("t", values[0], explain=True)
    assert used.index == "key (k)"
    assert (used.segments, used.files_uncovered) == ((len(values) - 1, 0) if covered else (0, len(values) - 1))


def test_a_key_of_several_columns_has_the_order_of_the_table(lake: fm.Lake) -> None:
    lake.create_table("t", "b string, n long, a long", key=["a", "b"])
    rows = [{"a": a, "b": b, "n": a * 10} for a in range(4) for b in ("x", "y")]
    lake.append("t", rows[:4])
    lake.append("t", rows[4:])
    for uncovered in (0, 1, 2):
        assert lake.get("t", ("y", 3)) == lake.get("t", {"a": 3, "b": "y"}) == {"a": 3, "b": "y", "n": 30}
        assert lake.get("t", ("z", 3)) is None
        found = lake.get_many("t", [("y", 3), {"a": 9, "b": "x"}, ["x", 0], ("y", 3), ("x", 3)])
        assert [(row["a"], row["b"]) for row in found.to_pylist()] == [(3, "y"), (0, "x"), (3, "y"), (3, "x")]
        assert [row["n"] for row in lake.lookup("t", b="x", a=[1, 3])] == [10, 30]
        uncover(lake, "t", lambda at, uncovered=uncovered: at == uncovered)


def test_what_is_no_key_is_refused_and_says_what_one_is(lake: fm.Lake) -> None:
    lake.create_table("one", "id long, n long", key=["id"])
    lake.create_table("two", "a long, b string", key=["a", "b"])
    lake.create_table("none", "id long")
    for key in ("7", 7.0, True, 2**63, b"7", object()):
        with pytest.raises(Invalid, match="a key does not fit the table"):
            lake.get("one", key)  # type: ignore[arg-type]
    for key in ((1, 2), (), {"n": 1}, {"id": 1, "n": 2}):
        with pytest.raises(Invalid, match="this is not a key of the table"):
            lake.get("one", key)
    with pytest.raises(Invalid, match="Give a tuple in this order, or a dict: a, b"):
        lake.get("two", 1)
    for none in (None, (None,), {"id": None}):
        with pytest.raises(Invalid, match="never null"):
            lake.get("one", none)
    with pytest.raises(Invalid, match=r"lake\.lookup\(table, column=value\)"):
        lake.get("none", 1)
    for keys in ("7", 7, {"id": 1}):
        with pytest.raises(Invalid, match="keys must be a list"):
            lake.get_many("one", keys)
    with pytest.raises(Invalid, match="not a key"):
        lake.get_many("one", pa.table({"n": [1]}))
    with pytest.raises(Invalid, match="does not fit"):
        lake.get_many("one", pa.table({"id": ["1"]}))
    with pytest.raises(Invalid, match="null"):
        lake.get_many("one", pa.table({"id": pa.array([1, None])}))
    with pytest.raises(NotFound):
        lake.get("other", 1)
    with pytest.raises(NotFound):
        lake.get("one", 1, branch="other")
    assert lake.get("one", 1) is None
    assert lake.get_many("one", []).num_rows == 0
    assert lake.get_many("one", iter([1])).schema.names == ["id", "n"]


# ── by value ──

EVENTS = "id long, customer long, kind string, v double, tags array<string>, note struct<a: long>"


def event(number: int) -> Row:
    tags = None if number % 6 == 0 else [f"t{number % 4}", f"t{number % 3}"] if number % 5 else []
    v = None if number % 7 == 0 else float("nan") if number % 11 == 0 else (-0.0 if number % 3 else 0.0)
    customer = None if number % 9 == 0 else number % 5
    return {"id": number, "customer": customer, "kind": f"k{number % 3}", "v": v, "tags": tags, "note": None}


LOOKUPS: list[tuple[Row, Callable[[Row], bool]]] = [
    ({"customer": 3}, lambda row: row["customer"] == 3),
    ({"customer": [3, 4, None]}, lambda row: row["customer"] in (3, 4, None)),
    ({"customer": None}, lambda row: row["customer"] is None),
    ({"customer": 3, "kind": ["k0", "k2"]}, lambda row: row["customer"] == 3 and row["kind"] != "k1"),
    ({"customer": 77}, lambda row: False),
    ({"customer": []}, lambda row: False),
    ({"v": 0.0}, lambda row: row["v"] == 0.0),
    ({"v": -0.0}, lambda row: row["v"] == 0.0),
    ({"v": float("nan")}, lambda row: row["v"] is not None and row["v"] != row["v"]),
    ({"tags": "t1"}, lambda row: "t1" in (row["tags"] or [])),
    ({"tags": ["t1", "t2"], "kind": "k1"}, lambda row: {"t1", "t2"} & {*(row["tags"] or [])} and row["kind"] == "k1"),
    ({"tags": None}, lambda row: row["tags"] is None),
    ({"id": [3, 5, 5, 300]}, lambda row: row["id"] in (3, 5)),
]


@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
def test_values_find_the_rows_that_have_them_and_no_others(lake: fm.Lake, key: list[str]) -> None:
    lake.create_table("t", EVENTS, key=key)
    rows = [event(number) for number in range(120)]
    for start in range(0, 120, 30):
        lake.append("t", rows[start : start + 30])
    ways = (
        lambda: None,
        lambda: index(lake, "t", "customer", files=lambda at: at % 2 == 0),
        lambda: index(lake, "t", "customer", "kind"),
        lambda: index(lake, "t", "v", files=lambda at: at != 1),
        lambda: index(lake, "t", "tags", files=lambda at: at < 3),
    )
    for way in ways:
        way()
        for values, matches in LOOKUPS:
            expected = [row["id"] for row in rows if matches(row)]
            for limit in (200, 7):
                found, after = [], None
                while True:
                    page = lake.lookup("t", values, limit=limit, after=after)
                    assert len(page) <= limit
                    found += [row["id"] for row in page]
                    after = page.next
                    if after is None:
                        break
                assert (found if key else sorted(found)) == expected, values
    explained = lake.lookup("t", customer=3, kind="k1", explain=True)
    assert explained.index == "value (customer, kind)"
    assert explained.files_scanned == 0
    assert lake.lookup("t", customer=3, explain=True).files_uncovered == 2
    whole = lake.lookup("t", {"customer": 3}, id=13, columns=["kind", "id"])
    assert whole.rows == [{"kind": "k1", "id": 13}]
    assert whole.to_arrow().schema.names == ["kind", "id"]


@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
@pytest.mark.parametrize("order", ["v", "v desc", ["kind desc", "v"], ["customer", "kind desc"], "id desc"])
def test_rows_come_in_the_order_that_was_asked_for(lake: fm.Lake, key: list[str], order: str | list[str]) -> None:
    lake.create_table("t", EVENTS, key=key)
    rows = [event(number) for number in range(60)]
    lake.append("t", rows[:30])
    lake.append("t", rows[30:])
    asked = [order] if isinstance(order, str) else order

    def place(row: Row, column: str) -> tuple[int, Any]:
        value = row[column]
        if value is None:
            return 0, 0
        return (2, 0) if value != value else (1, value)

    for one in reversed([*asked, "id"]):
        name, _, down = one.partition(" ")
        rows.sort(key=lambda row, name=name: place(row, name), reverse=bool(down))
    found, after = [], None
    while True:
        page = lake.lookup("t", kind=["k0", "k1", "k2"], order=order, limit=7, after=after)
        found += [row["id"] for row in page]
        after = page.next
        if after is None:
            break
    assert found == [row["id"] for row in rows]


def test_pages_of_one_lookup_are_of_one_version(lake: fm.Lake) -> None:
    lake.create_table("t", "id long, c long", key=["id"])
    lake.append("t", [{"id": n, "c": 1} for n in range(10)])
    first = lake.lookup("t", c=1, limit=4)
    assert [row["id"] for row in first] == [0, 1, 2, 3]
    lake.merge("t", [{"id": n, "c": 2} for n in range(6)])
    lake.append("t", [{"id": 99, "c": 1}])
    lake.maintain.compact("t", files_min=2)
    second = lake.lookup("t", c=1, limit=4, after=first.next)
    assert [row["id"] for row in second] == [4, 5, 6, 7]
    assert second.version == first.version
    last = lake.lookup("t", c=1, limit=4, after=second.next)
    assert [row["id"] for row in last] == [8, 9]
    assert last.next is None
    assert [row["id"] for row in lake.lookup("t", c=1)] == [6, 7, 8, 9, 99]
    for wrong in ({"c": 2}, {"id": 1}, {"c": 1, "order": "c"}):
        with pytest.raises(Invalid, match="another lookup"):
            lake.lookup("t", after=first.next, **wrong)  # type: ignore[call-overload]
    with pytest.raises(Invalid, match="at the version of its first page"):
        lake.lookup("t", c=1, after=first.next, version=1)
    for text in ("", "x", "é", "e30", first.next[:-3] if first.next else "", "A" * 20_000):
        with pytest.raises(Invalid, match="cursor"):
            lake.lookup("t", c=1, after=text)


def test_a_lookup_that_makes_no_sense_is_refused(lake: fm.Lake) -> None:
    lake.create_table("t", EVENTS, key=["id"])
    for call, message in (
        ({}, "no value"),
        ({"customr": 1}, "Did you mean customer"),
        ({"_seq": 1}, "no such column"),
        ({"customer": "x"}, "does not fit the column"),
        ({"tags": 1}, "does not fit the column"),
        ({"note": 1}, "column of this type"),
        ({"id": 1, "limit": 0}, "invalid limit"),
        ({"id": 1, "limit": 10**9}, "invalid limit"),
        ({"id": 1, "order": "x desc"}, "to order by"),
        ({"id": 1, "order": "tags"}, "cannot be ordered"),
        ({"id": 1, "columns": []}, "invalid list of columns"),
        ({"id": 1, "columns": ["ID"]}, "no such column"),
        ({"id": 1, "version": 1, "at": "2026-01-01T00:00:00Z"}, "not both"),
    ):
        with pytest.raises(Invalid, match=message):
            lake.lookup("t", **call)  # type: ignore[call-overload]


# ── histories ──


def test_a_key_that_is_not_there_is_unknown_while_a_history_has_gaps(lake: fm.Lake) -> None:
    lake.create_table("events", "id long, name string", key=["id"])
    empty = lake.catalog.lake_row().version
    source = Numbers(act={"20..30": lambda chunk: 1 / 0}, tip=50)
    assert run(lake, history(source, retries=1, order="oldest")).outcome == "failed"
    assert lake.get("events", 5) == {"id": 5, "name": "row 5"}
    for ask in (
        lambda: lake.get("events", 25),
        lambda: lake.get_many("events", [5, 25]),
        lambda: lake.lookup("events", id=25),
    ):
        with pytest.raises(Incomplete) as raised:
            ask()
        assert raised.value.facts["gaps"] == "20 to 50"
    with pytest.raises(Incomplete, match="gaps=0 to 50"):
        lake.get("events", 5, version=empty)
    assert lake.get_many("events", [5, 6]).num_rows == 2
    assert lake.lookup("events", name="no").rows == []
    lake.branches.create("early")
    run(lake, history(Numbers()))
    assert lake.get("events", 25) == {"id": 25, "name": "row 25"}
    assert lake.get("events", 1000) is None
    with pytest.raises(Incomplete):
        lake.get("events", 25, branch="early")


def test_below_the_floor_of_a_history_a_key_is_not_found(lake: fm.Lake) -> None:
    lake.create_table("events", "id long, name string", key=["id"])
    run(lake, history(Numbers(tip=50), last=None, keep=20))
    assert lake.get("events", 35) == {"id": 35, "name": "row 35"}
    assert lake.get("events", 5) is None


# ── against a dict ──


@pytest.mark.parametrize("seed", range(3))
def test_whatever_was_written_lookups_equal_a_scan(lake: fm.Lake, seed: int) -> None:
    """Random writes, indexes of a part of the files, damage, compaction, changed columns, branches, old versions."""
    chance = random.Random(seed)
    lake.create_table("t", "k int, b string, c int, v float, tags array<int>", key=["k", "b"])
    names = {"k": "k", "b": "b", "c": "c", "v": "v", "tags": "tags"}
    known: list[tuple[int, str]] = []
    branches = ["main"]

    def row(number: int) -> Row:
        tags = None if chance.random() < 0.2 else [chance.randrange(4) for _ in range(chance.randrange(3))]
        c = None if chance.random() < 0.2 else chance.randrange(4)
        values = {"k": number, "b": chance.choice("xy"), "c": c, "v": chance.choice([0.0, -0.0, 1.5]), "tags": tags}
        return {names[name]: value for name, value in values.items()}

    def rows() -> list[Row]:
        return [row(number) for number in chance.sample(range(40), chance.randrange(1, 15))]

    def step() -> str:
        branch = chance.choice(branches)
        act = chance.choice([*["merge"] * 3, "delete", "compact", "index", "break", "widen", "rename", "branch"])
        if act == "merge":
            lake.merge("t", rows(), branch=branch)
        elif act == "delete":
            lake.delete("t", f"{names['k']} in ({chance.randrange(40)}, {chance.randrange(40)})", branch=branch)
        elif act == "compact":
            lake.maintain.compact("t", files_min=2)
        elif act == "index":
            on = chance.choice([["c"], ["tags"], ["c", "b"], ["v"]])
            index(lake, "t", *(names[one] for one in on), files=lambda at: chance.random() < 0.6)
        elif act == "break":
            uncover(lake, "t", lambda at: chance.random() < 0.4)
        elif len(branches) == 1:
            if act == "branch":
                lake.branches.create("dev")
                branches.append("dev")
            elif act == "rename":
                lake.rename_column("t", names["c"], names["c"] + "c")
                names["c"] += "c"
            elif act == "widen":
                wide = f"k long, b string, {names['c']} long, v double, tags array<int>"
                lake.apply({"t": {"schema": wide, "key": ["k", "b"]}})
        return branch

    past: list[tuple[int, str]] = []
    for _ in range(14):
        branch = step()
        past.append((lake.catalog.history.resolve(branch=branch), branch))
        for version, name in {past[-1], chance.choice(past)}:
            scanned = lake.scan("t", version=version, branch=name).to_arrow().to_pylist()
            check(lake, scanned, version, name, chance)
            known = sorted({*known, *((one["k"], one["b"]) for one in scanned)})
            by_key = {(one["k"], one["b"]): one for one in scanned}
            for key in chance.sample(known, min(5, len(known))):
                assert lake.get("t", key, version=version, branch=name) == by_key.get(key)
            asked = [chance.choice(known) for _ in range(10)] if known else []
            found = lake.get_many("t", asked, version=version, branch=name).to_pylist()
            assert found == [by_key[key] for key in asked if key in by_key]
    check_lake(lake.catalog)


def check(lake: fm.Lake, scanned: list[Row], version: int, branch: str, chance: random.Random) -> None:
    names = list(scanned[0]) if scanned else []
    for name in names:
        value = chance.choice(scanned)[name]
        wanted: Any = value
        if isinstance(value, list):
            wanted = value[0] if value and value[0] is not None else 2
            expected = [one for one in scanned if wanted in (one[name] or [])]
        else:
            expected = [one for one in scanned if one[name] == value]
        found, after = [], None
        while True:
            page = lake.lookup("t", {name: wanted}, version=version, branch=branch, limit=3, after=after)
            found += page.rows
            after = page.next
            if after is None:
                break
        assert found == sorted(expected, key=lambda one: (one["k"], one["b"])), (name, wanted)


# ── damage, collisions, expiry ──


def test_hashes_that_many_values_share_cost_time_and_no_answer(lake: fm.Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, 99, Encoder(99, bits=4))
    lake.create_table("t", "k string, n long", key=["k"])
    head = lake.catalog.history.head("t")
    lake.catalog.indexes.ensure_key(head.table_id, [lake.schema("t").find_field("k").field_id], True, 99)
    for start in range(0, 200, 50):
        lake.append("t", [{"k": f"k{n}", "n": n} for n in range(start, start + 50)])
    used = lake.get("t", "k7", explain=True)
    assert used.candidates > 1
    assert used.files_uncovered == 0
    assert all(lake.get("t", f"k{n}") == {"k": f"k{n}", "n": n} for n in range(0, 200, 7))
    assert lake.get("t", "k200") is None
    asked = [f"k{n}" for n in range(250, -1, -3)]
    assert lake.get_many("t", asked).column("k").to_pylist() == [key for key in asked if int(key[1:]) < 200]
    assert [row["n"] for row in lake.lookup("t", k=["k9", "k10", "kx"])] == [10, 9]


def _flip(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[10] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-30]), _flip],
    ids=["gone", "cut", "flipped"],
)
def test_a_damaged_segment_makes_a_lookup_slower_and_not_wrong(lake: fm.Lake, damage: Callable[[Path], object]) -> None:
    lake.create_table("t", "k string, n long", key=["k"])
    # The segment of the first append stays unopened: it has no other one to ask.
    lake.append("t", [{"k": f"k{n}", "n": n} for n in range(50)])
    table_id = lake.catalog.history.head("t").table_id
    (segment,) = lake.catalog.indexes.segments(table_id)
    damage(Path(local_path(segment.location) or ""))
    assert lake.get("t", "k7") == {"k": "k7", "n": 7}
    assert lake.get_many("t", ["k8", "none", "k7"]).column("n").to_pylist() == [8, 7]
    assert lake.get("t", "none") is None
    assert lake.get("t", "k7", explain=True).files_uncovered == 1
    assert [row.broken for row in lake.catalog.indexes.segments(table_id)] == [True]


def test_a_file_that_cannot_be_read_is_an_error_and_never_not_found(lake: fm.Lake) -> None:
    lake.create_table("t", "k long, n long", key=["k"])
    old = lake.append("t", [{"k": 2 * n, "n": n} for n in range(50)]).version
    path = lake.catalog.files.data_files(lake.catalog.history.head("t"))[0]
    uncover(lake, "t")
    lake.delete("t", "k >= 0")
    file = Path(local_path(path) or "")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    for ask in (lambda: lake.get("t", 4, version=old), lambda: lake.get("t", 5, version=old)):
        with pytest.raises(Corrupt):
            ask()
    assert lake.get("t", 1000, version=old) is None  # by its bounds, this file does not hold it
    file.unlink()
    with pytest.raises(Corrupt):
        lake.lookup("t", n=4, version=old)
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.commits).where(tables.commits.c.version == old).values(state="expired"))
    for late in (lambda: lake.get("t", 4, version=old), lambda: lake.get_many("t", [4], version=old)):
        with pytest.raises(BelowRetention):
            late()
    assert lake.get("t", 4) is None


def test_a_version_that_expires_while_it_is_read_is_below_retention(lake: fm.Lake) -> None:
    lake.create_table("t", "k long, n long", key=["k"])
    old = lake.append("t", [{"k": n, "n": n} for n in range(50)]).version
    assert lake.get("t", 4, version=old) == {"k": 4, "n": 4}
    head = lake.catalog.history.tables_at(old)["t"]
    path = lake.catalog.files.data_files(head)[0]
    lake.delete("t", "k >= 0")
    # As a sweep leaves it for a reader that resolved its version before.
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.commits).where(tables.commits.c.version == old).values(state="expired"))
    Path(local_path(path) or "").unlink()
    with pytest.raises(BelowRetention), readable(lake.catalog, old):
        lake.engine.lookups.get(head, old, 4, lambda head, version: None)


def test_a_read_only_lake_finds_rows_and_writes_nothing(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("t", "k long, n long", key=["k"])
        lake.append("t", [{"k": n, "n": n} for n in range(50)])
        for row in lake.catalog.indexes.segments(lake.catalog.history.head("t").table_id):
            Path(local_path(row.location) or "").write_bytes(b"x")
    with place.open(read_only=True) as lake:
        assert lake.get("t", 4) == {"k": 4, "n": 4}
        assert lake.get("t", 4, explain=True).files_uncovered == 1
        assert lake.lookup("t", n=4).rows == [{"k": 4, "n": 4}]
        assert not any(row.broken for row in lake.catalog.indexes.segments(lake.catalog.history.head("t").table_id))


def test_only_what_may_hold_a_row_is_opened(lake: fm.Lake) -> None:
    lake.create_table("t", "k long, n long", key=["k"], properties={"write.parquet.row-group-limit": "100"})
    for start in range(0, 4000, 1000):
        lake.append("t", [{"k": n, "n": n % 7} for n in range(start, start + 1000)])
    counters = lake.catalog.storage.counters
    lake.get("t", 1234)
    before = counters.snapshot()
    assert lake.get("t", 1500) == {"k": 1500, "n": 2}
    assert counters.difference(before).calls["open_input"] == 1
    used = lake.get("t", 2345, explain=True)
    assert (used.files_opened, used.row_groups, used.candidates, used.files_scanned) == (1, 1, 1, 0)
    before = counters.snapshot()
    assert lake.get("t", -1) is None
    assert "open_input" not in counters.difference(before).calls
    uncover(lake, "t")
    used = lake.get("t", 2345, explain=True)
    # One group is read for the key, and once more for the row.
    assert (used.files_uncovered, used.files_scanned, used.files_opened, used.row_groups) == (4, 1, 1, 2)
    assert lake.get("t", -1, explain=True).files_opened == 0
    page = lake.lookup("t", {"n": 3}, limit=2, explain=True)
    assert page.files_scanned == 4
