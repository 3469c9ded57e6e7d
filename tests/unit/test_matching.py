"""Values that a lookup asks for: which rows have them, and texts that are read as the type of a column."""

from __future__ import annotations

from decimal import Decimal
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.types import DoubleType, ListType, LongType, NestedField, StringType

from floodmark.errors import Invalid
from floodmark.index.matching import Match, Text, match_values
from floodmark.index.ranking import Cursor, Ranking
from floodmark.rows.convert import columns_of
from floodmark.rows.schema import table_schema

LONG = NestedField(1, "a", LongType(), required=False)
TEXT = NestedField(2, "b", StringType(), required=False)


def test_combinations_are_compared_whole() -> None:
    asked = pa.table({"a": [1, 2, None, 1], "b": ["x", "y", "x", "x"]})
    match = Match([LONG, TEXT], asked)
    assert len(match) == 3
    assert match.values.take(pa.array(match.asked)).to_pylist() == asked.to_pylist()
    rows = list(product([1, 2, 3, None], ["x", "y", None]))
    found = match.which([pa.array([a for a, _ in rows], pa.int64()), pa.array([b for _, b in rows])])
    hits = [None if at < 0 else tuple(match.values.slice(at, 1).to_pylist()[0].values()) for at in found.tolist()]
    assert hits == [row if row in [(1, "x"), (2, "y"), (None, "x")] else None for row in rows]


@pytest.mark.parametrize("several", [False, True])
def test_zeros_are_one_value_and_so_are_nans(several: bool) -> None:
    field = NestedField(1, "v", DoubleType(), required=False)
    column = pa.array([0.0, -0.0, float("nan"), None, 1.0])
    for value, expected in ((0.0, [0, 1]), (-0.0, [0, 1]), (float("nan"), [2]), (None, [3]), (2.0, [])):
        match = Match([field], pa.table({"v": pa.array([value, *([7.0] if several else [])], pa.float64())}))
        assert [at for at, code in enumerate(match.which([column]).tolist()) if code >= 0] == expected


@pytest.mark.parametrize("several", [False, True])
def test_a_list_is_asked_what_it_contains(several: bool) -> None:
    field = NestedField(1, "t", ListType(2, LongType(), element_required=False), required=False)
    column = pa.array([[1, 2], [], None, [None], [2, 2], [3]], pa.list_(pa.int64()))
    for value, expected in ((2, [0, 4]), (None, [2, 3]), (9, [])):
        match = Match([field], pa.table({"t": pa.array([value, *([7] if several else [])], pa.int64())}))
        assert [at for at, code in enumerate(match.which([column]).tolist()) if code >= 0] == expected
        assert [at - 1 for at, code in enumerate(match.which([column.slice(1)]).tolist()) if code >= 0] == [
            at - 2 for at in expected if at
        ]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("long", "-7", -7),
        ("long", "07", 7),
        ("string", "7", "7"),
        ("string", "null", "null"),
        ("double", "1e3", 1000.0),
        ("boolean", "True", True),
        ("binary", "AAE=", b"\x00\x01"),
        ("decimal(5,2)", "1.5", Decimal("1.50")),
        ("date", "2026-11-15", "2026-11-15"),
        ("timestamp", "2026-11-15T10:00:00Z", "2026-11-15T10:00:00Z"),
        ("long", "7.0", None),
        ("long", "", None),
        ("long", "9" * 19, None),
        ("boolean", "1", None),
        ("binary", "?", None),
        ("decimal(5,2)", "1.555", None),
        ("timestamp", "2026-11-15T10:00:00", None),
    ],
)
def test_a_text_is_read_as_the_type_of_its_column(kind: str, text: str, value: Any) -> None:
    schema = table_schema(f"c {kind}")
    field = schema.fields[0]
    (column,) = columns_of(schema, [field])
    if value is None:
        with pytest.raises(Invalid, match="does not fit the column"):
            match_values(column, field, Text(text))
    else:
        assert match_values(column, field, Text(text)).values.equals(match_values(column, field, value).values)


def test_a_cursor_gives_back_the_values_of_every_type() -> None:
    schema = table_schema(
        "k long, i int, s string, d double, x binary, day date, at timestamp, b boolean, m decimal(9,3)", key=["k", "x"]
    )
    fields = list(schema.fields[:-1])
    names = [field.name for field in fields]
    ranking = Ranking.of([f"{name} desc" for name in names], fields, [fields[0], fields[4]])
    rows: dict[str, list[Any]] = {
        "k": [2**62],
        "i": [-1],
        "s": ["ä\u0000"],
        "d": [0.1],
        "x": [b"\xff\x00"],
        "day": [20_000],
        "at": [-1],
        "b": [False],
        "m": [Decimal("-1.500")],
    }
    columns = columns_of(schema, fields)
    for none in (False, True):
        arrays = [
            pa.nulls(1, column.field.type)
            if none and column.name not in ("k", "x")
            else pa.array(rows[column.name], column.field.type)
            for column in columns
        ]
        ranks = ranking.ranks(pa.RecordBatch.from_arrays(arrays, names=names), "", pa.array([0]).to_numpy())
        cursor = Cursor.parse(Cursor.of(7, "q", ranks).text)
        assert cursor.version == 7
        assert [one.as_py() for one in cursor.scalars(ranking.kinds, "q")] == [one[0].as_py() for one in ranks.columns]
        with pytest.raises(Invalid, match="another lookup"):
            cursor.scalars(ranking.kinds, "other")
