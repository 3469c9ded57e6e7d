"""Lists of dicts, the form JSON comes in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from pyiceberg.schema import Schema

from floodmark.errors import Invalid
from floodmark.model import Row
from floodmark.rows.convert import table_shape
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.dicts import rows_to_table


def rows_to_arrow(rows: Sequence[Row], schema: Schema) -> pa.Table:
    return rows_to_table(rows, table_shape(schema.model_dump_json()))


@pytest.mark.parametrize(
    ("text", "given", "stored"),
    [
        ("int", 5, 5),
        ("double", 5, 5.0),
        ("float", 0.5, 0.5),
        ("decimal(10,2)", 3, Decimal("3.00")),
        ("decimal(10,2)", "1.5", Decimal("1.50")),
        ("decimal(38,0)", 10**38 - 1, Decimal(10**38 - 1)),
        ("decimal(10,2)", Decimal("1.500"), Decimal("1.50")),
        ("date", "2026-11-15", date(2026, 11, 15)),
        ("date", date(2026, 11, 15), date(2026, 11, 15)),
        ("timestamp", "2026-11-15T10:00:00Z", datetime(2026, 11, 15, 10, tzinfo=UTC)),
        ("timestamp", "2026-11-15T10:00:00.5+02:00", datetime(2026, 11, 15, 8, 0, 0, 500000, tzinfo=UTC)),
        (
            "timestamp",
            datetime(2026, 11, 15, 10, tzinfo=timezone(timedelta(hours=1))),
            datetime(2026, 11, 15, 9, tzinfo=UTC),
        ),
        ("timestamp_ntz", "2026-11-15T10:00:00", datetime(2026, 11, 15, 10)),
        ("binary", b"\x00\xff", b"\x00\xff"),
        ("binary", bytearray(b"x"), b"x"),
        ("boolean", True, True),
        ("array<int>", [1, None], [1, None]),
        ("array<int>", (1,), [1]),
        ("map<string,int>", {"a": 1}, [("a", 1)]),
        ("struct<a:int,b:string>", {"b": "x"}, {"a": None, "b": "x"}),
    ],
)
def test_a_value_is_taken_as_json_means_it(text: str, given: Any, stored: Any) -> None:
    table = rows_to_arrow([{"c": given}, {}, {"c": None}], table_schema(f"c {text}"))
    assert table.column("c").to_pylist() == [stored, None, None]


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("int", True),
        ("int", 1.0),
        ("int", "1"),
        ("int", 2**31),
        ("long", 2**63),
        ("double", True),
        ("double", "1"),
        ("double", 2**53 + 1),
        ("float", 1e300),
        ("decimal(10,2)", 1.5),
        ("decimal(10,2)", "1.255"),
        ("decimal(10,2)", "NaN"),
        ("decimal(4,2)", 100),
        ("decimal(10,2)", "abc"),
        ("string", 1),
        ("string", b"x"),
        ("string", "\ud800"),
        ("binary", "x"),
        ("boolean", 1),
        ("date", "15.11.2026"),
        ("date", datetime(2026, 11, 15)),
        ("timestamp", "2026-11-15T10:00:00"),
        ("timestamp", datetime(2026, 11, 15)),
        ("timestamp", "2026-11-15T10:00:00.1234567Z"),
        ("timestamp", 1700000000),
        ("timestamp_ntz", "2026-11-15T10:00:00Z"),
        ("array<int>", "abc"),
        ("map<string,int>", [1]),
        ("struct<a:int>", [1]),
    ],
)
def test_a_value_of_another_kind_is_refused_with_column_count_and_example(text: str, given: Any) -> None:
    with pytest.raises(Invalid) as refused:
        rows_to_arrow([{"c": given}, {"c": None}, {"c": given}], table_schema(f"c {text}"))
    assert refused.value.facts == {"column": "c", "count": 2}
    assert type(given).__name__ in refused.value.message


def _moment(kind: str, values: list[Any]) -> int | str:
    try:
        found: int = rows_to_arrow([{"v": value} for value in values], table_schema(f"v {kind}")).column("v")[0].value
    except Invalid:
        return "refused"
    return found


def _digits(low: int, high: int, width: int) -> st.SearchStrategy[str]:
    return st.integers(low, high).map(lambda number: f"{number:0{width}}")


DAYS = st.one_of(
    st.tuples(_digits(0, 9999, 4), _digits(0, 13, 2), _digits(0, 32, 2)).map("-".join),
    st.dates().map(str),
    st.sampled_from(["20261115", "2026-W46-1", "2026-320", "12026-01-01", "-2026-01-01", "0000-01-01", "0001-01-01"]),
)
CLOCKS = st.tuples(_digits(0, 25, 2), _digits(0, 60, 2), _digits(0, 60, 2)).flatmap(
    lambda parts: st.integers(0, 3).map(lambda count: ":".join(parts[:count]))
)
FRACTIONS = st.one_of(st.just(""), st.from_regex(r"[.,][0-9]{0,10}", fullmatch=True))
ZONES = st.one_of(
    st.sampled_from(["", "Z", "z", " Z", "+00", "-0000", "+24:00", "+23:59", "-23:59:59", "+00:60", "UTC", "+1"]),
    st.tuples(st.sampled_from("+-"), _digits(0, 25, 2), st.sampled_from(["", ":"]), _digits(0, 61, 2)).map("".join),
)
ISO_TEXTS = st.tuples(
    st.sampled_from(["", " "]), DAYS, st.sampled_from(["T", " ", "t", "x", ""]), CLOCKS, FRACTIONS, ZONES
)


@settings(max_examples=600, deadline=None)
@example("timestamp", "0000-06-01T00:00:00Z")
@example("timestamp_ntz", "0000-06-01T00:00:00")
@example("timestamp", "0000-12-31T23:59:59-23:59")
@example("timestamp", "0001-01-01T00:00:00+01:00")
@drawn(st.sampled_from(["timestamp", "timestamp_ntz"]), ISO_TEXTS.map("".join))
def test_a_time_is_read_the_same_alone_and_beside_others(kind: str, text: str) -> None:
    """Texts alone are read by Arrow where it can; beside a value of Python's one by one."""
    beside = datetime(2026, 11, 15, tzinfo=UTC if kind == "timestamp" else None)
    assert _moment(kind, [text]) == _moment(kind, [text, None]) == _moment(kind, [text, beside])


def test_unknown_keys_are_counted_by_rows() -> None:
    with pytest.raises(Invalid) as refused:
        rows_to_arrow([{"id": 1, "nme": "x"}, {"id": 2}, {"id": 3, "nme": "y"}], table_schema("id long, name string"))
    assert refused.value.facts == {"column": "nme", "count": 2}
    assert "Did you mean name?" in refused.value.advice


def test_an_unknown_key_inside_a_struct_has_its_full_name() -> None:
    with pytest.raises(Invalid) as refused:
        rows_to_arrow([{"s": {"b": 1}}], table_schema("s struct<a:int>"))
    assert refused.value.facts["column"] == "s.b"


def test_a_wrong_element_of_a_list_is_found() -> None:
    with pytest.raises(Invalid) as refused:
        rows_to_arrow([{"l": [1, "x"]}, {"l": ["y"]}], table_schema("l array<int>"))
    assert refused.value.facts == {"column": "l.element", "count": 2}


def test_what_is_no_dict_is_refused() -> None:
    with pytest.raises(Invalid, match="not a dict"):
        rows_to_arrow([[1, 2]], table_schema("id long"))  # type: ignore[list-item]
