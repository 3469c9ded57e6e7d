"""Small files read in this process: nothing guessed, nothing filled in; what is wrong is named by line and column."""

from __future__ import annotations

import gzip
import io
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import floodmark as fm
from floodmark.ingest.small_files import NeedsSpark, read_rows
from floodmark.rows.schema import table_schema

SCHEMA = table_schema(
    "id long not null, name string, at timestamp, plain timestamp_ntz, day date, price decimal(6,2), ok boolean, "
    "small int, part float, whole double, raw binary"
)
HEADER = "id,name,at,plain,day,price,ok,small,part,whole,raw"


def rows(name: str, data: bytes, file_format: str = "csv", **options: Any) -> list[dict[str, Any]]:
    found = read_rows(name, data, file_format, SCHEMA, options.get("filled", ()), bytes_max=options.get("max", 10**6))
    return found.to_pylist()


def csv(*lines: str, header: str = HEADER) -> bytes:
    return "\n".join([header, *lines, ""]).encode()


ONE = '1,"a ""b"",\nc",2026-01-02T03:04:05.5+02:00,2026-01-02 03:04:05,2026-01-02,1.5,TRUE,7,0.5,1e3,xy'


def test_csv_is_read_by_the_types_of_the_table() -> None:
    (row,) = rows("a.csv", csv(ONE))
    assert row == {
        "id": 1,
        "name": 'a "b",\nc',
        "at": datetime(2026, 1, 2, 1, 4, 5, 500_000, UTC),
        "plain": datetime(2026, 1, 2, 3, 4, 5),
        "day": date(2026, 1, 2),
        "price": Decimal("1.50"),
        "ok": True,
        "small": 7,
        "part": 0.5,
        "whole": 1000.0,
        "raw": b"xy",
    }


def test_empty_text_is_null_and_a_time_without_a_zone_is_utc() -> None:
    found = rows("a.csv", csv('1,"",2026-01-02 03:04:05,,,,,,,,', "2,,2026-01-02,,,,,,,,"))
    assert [row["name"] for row in found] == [None, None]
    assert [row["at"] for row in found] == [datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)]


def test_columns_come_in_any_order_and_filled_ones_need_not() -> None:
    names = [name for name in HEADER.split(",") if name != "small"]
    line = ",".join("9" if name == "id" else "" for name in reversed(names))
    data = csv(line, header=",".join(reversed(names)))
    assert [row["id"] for row in rows("a.csv", data, filled=("small",))] == [9]
    with pytest.raises(fm.Invalid, match="lack columns") as refused:
        rows("a.csv", data)
    assert refused.value.facts["columns"] == "small"


VALUES = {
    "id": ("1.0", " 1", "x", str(2**63)),
    "at": ("yesterday", "2026-13-01"),
    "plain": ("2026-01-02T03:04:05Z",),
    "day": ("2.1.2026",),
    "price": ("1.555", "99999"),
    "ok": ("1", "yes"),
    "small": (str(2**31),),
    "part": ("1e300",),
    "whole": ("1e999", "1,5"),
}


@pytest.mark.parametrize(("column", "value"), [(name, value) for name, some in VALUES.items() for value in some])
def test_a_value_that_does_not_fit_is_named_by_line_and_column(column: str, value: str) -> None:
    good = {"id": "1", "name": '"two\nlines"'}
    bad = ",".join(f'"{value}"' if name == column else good.get(name, "") for name in HEADER.split(","))
    with pytest.raises(fm.Invalid, match="is not the table's") as refused:
        rows("a.csv", csv(",".join(good.get(name, "") for name in HEADER.split(",")), "", bad, ONE))
    # The header, a row of two lines, and an empty line come before it.
    assert (refused.value.facts["column"], refused.value.facts["line"]) == (column, 5)
    assert repr(value)[1:-1] in refused.value.facts["value"]


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (csv("1", ONE), 2, "more or fewer values"),
        (csv(ONE, ONE + ",more"), 4, "more or fewer values"),
        (csv(ONE).replace(b"name", b"nmae"), 1, "Did you mean name"),
        (csv(ONE).replace(b"name", b"id"), 1, "twice"),
        (csv(ONE).replace(b"xy", b"\xff"), 3, "UTF-8"),
        (b"", 1, "lack columns"),
    ],
)
def test_a_file_that_is_no_csv_of_the_table_is_refused(data: bytes, line: int, words: str) -> None:
    with pytest.raises(fm.Invalid) as refused:
        rows("a.csv", data)
    assert words in str(refused.value)
    assert refused.value.facts["line"] == line


def long_csv(size: int, last: str) -> bytes:
    rest = "," * (HEADER.count(",") - 1)
    return csv(f'1,"{"x" * size}"{rest}', f"{last},y{rest}")


@pytest.mark.parametrize("size", [200_000, 5_000_000])
def test_a_long_value_is_read_and_what_is_wrong_behind_it_has_its_line(size: int) -> None:
    assert [len(row["name"]) for row in rows("a.csv", long_csv(size, "2"), max=10**8)] == [size, 1]
    with pytest.raises(fm.Invalid, match="is not the table's") as refused:
        rows("a.csv", long_csv(size, "foo"), max=10**8)
    assert (refused.value.facts["column"], refused.value.facts["line"]) == ("id", 3)


def test_a_value_beyond_all_bounds_refuses_the_file() -> None:
    with pytest.raises(fm.Invalid, match="too long"):
        rows("a.csv", long_csv(40 * 2**20, "2"), max=10**8)
    # Arrow reads this one, Python does not: there is no line, and the reason all the same.
    with pytest.raises(fm.Invalid, match="is not the table's") as refused:
        rows("a.csv", long_csv(17 * 2**20, "foo"), max=10**8)
    assert "line" not in refused.value.facts
    with pytest.raises(fm.Invalid, match="header cannot be read"):
        rows("a.csv", b"x" * (17 * 2**20), max=10**8)


def test_json_lines_are_judged_as_over_http() -> None:
    found = rows("a.jsonl", b'{"id": 1, "price": "1.5"}\n\n{"id": 2}\n', "json", filled=("small",))
    assert [(row["id"], row["price"]) for row in found] == [(1, Decimal("1.50")), (2, None)]
    assert "small" not in found[0]
    assert "name" in found[0]
    for line in (b'{"id": "x"}', b'{"id": 3, "nmae": 1}', b"{", b'{"id": 3, "_change": "delete"}'):
        with pytest.raises(fm.Invalid):
            rows("a.jsonl", b'{"id": 1}\n' + line, "json")


def test_packed_files_are_unpacked_by_their_names_and_within_bounds() -> None:
    text = csv(ONE, ONE)
    for name, data in (
        ("a.csv.gz", gzip.compress(text[:50]) + gzip.compress(text[50:])),
        ("a.CSV.ZST", zstandard.compress(text[:50]) + zstandard.compress(text[50:])),
    ):
        assert [row["id"] for row in rows(name, data)] == [1, 1]
        with pytest.raises(fm.Invalid, match="unpacked"):
            rows(name, data[:-9])
        with pytest.raises(NeedsSpark):
            rows(name, data, max=100)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.csv.zst"])
def test_a_file_that_unpacks_into_too_much_is_stopped_on_the_way(name: str) -> None:
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    with pytest.raises(NeedsSpark):
        rows(name, pack(bytes(30 * 2**20)), max=2**20)


def test_what_is_packed_otherwise_is_left_to_spark() -> None:
    with pytest.raises(NeedsSpark):
        rows("a.csv.bz2", b"BZh9")


def test_parquet_is_read_and_damaged_parquet_refused() -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2]}), buffer)
    assert rows("a.parquet", buffer.getvalue(), "parquet") == [{"id": 1}, {"id": 2}]
    for data in (b"", b"PAR1", buffer.getvalue()[:-20]):
        with pytest.raises(fm.Invalid, match="not Parquet"):
            rows("a.parquet", data, "parquet")
