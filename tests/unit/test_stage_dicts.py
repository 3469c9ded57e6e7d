"""Lists of dicts, the form JSON comes in."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from floodmark.errors import Invalid
from floodmark.rows.dicts import rows_to_arrow
from floodmark.rows.schema import table_schema


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
