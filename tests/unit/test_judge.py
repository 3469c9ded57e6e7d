"""The judge of JSON lines: what fits comes out as it is; what does not is told by line and place, all of it or nothing.

Lines do not know of each other: a text is judged as its lines are one by one, whichever of the two passes found it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema

from floodmark.errors import Invalid
from floodmark.ingest.judge import Judge
from floodmark.rows.convert import conform, table_shape
from floodmark.rows.json.json_lines import PROBLEMS_MAX, NotJson, TooManyRows, WrongLines, WrongRows
from floodmark.write.shape import plan_table

ALL = (
    "id long not null, small int, amount double, short float, price decimal(9,2), name string, raw binary, yes boolean,"
    "at timestamp, local timestamp_ntz, day date, tags array<string>, counts map<string,int>,"
    "place struct<lat: double, city: struct<code: int>>"
)


def schema(ddl: str, key: tuple[str, ...] = ()) -> Schema:
    return plan_table("t", ddl, key=key).schema


EVENTS = Judge(schema("id long not null, name string"))
PEOPLE = Judge(schema("id long not null, name string, age int not null", key=("id",)))
WIDE = Judge(schema(ALL))


def lines(*rows: Any) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def read(judge: Judge, *rows: Any, **options: Any) -> list[dict[str, Any]]:
    judged = judge.read(lines(*rows), 1000, **options)
    found: list[dict[str, Any]] = judged.table.to_pylist()
    assert judged.rows == len(found)
    return found


def refused(judge: Judge, *rows: Any, **options: Any) -> list[tuple[int, str | None, str]]:
    """Line, column and problem of all that is told."""
    with pytest.raises(Invalid) as error:
        judge.read(lines(*rows), 1000, **options)
    assert isinstance(error.value, WrongRows), error.value
    told = error.value.as_dict()
    first = told["problems"][0]
    assert (told["kind"], told["facts"]["line"], told["facts"]["count"]) == (
        "Invalid",
        str(first["line"]),
        str(len(told["problems"])),
    )
    assert f"line {first['line']}, column {first['column']}: " in told["message"]
    return [(one["line"], one["column"], one["problem"]) for one in told["problems"]]


# ── what fits ──


def test_columns_that_no_line_brings_are_left_out_and_others_are_null_where_they_are_not() -> None:
    assert read(EVENTS, {"id": 1}, {"id": 2}) == [{"id": 1}, {"id": 2}]
    assert read(EVENTS, {"id": 1}, {"name": None, "id": 2}) == [{"id": 1, "name": None}, {"id": 2, "name": None}]
    assert all(field.nullable for field in EVENTS.read(lines({"id": 1, "name": "a"}), 9).table.schema)


def test_blank_lines_and_both_kinds_of_ends_are_no_matter() -> None:
    text = b'\r\n  {"id": 1}\r\n\n\t{"id": 2}  \n\n{"id": 3}'
    assert EVENTS.read(text, 3).table.to_pylist() == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert EVENTS.read(b"\n \n", 3).rows == 0


def test_of_a_name_that_comes_twice_in_a_line_the_last_counts() -> None:
    assert read(EVENTS, '{"id": "x", "id": 2}') == [{"id": 2}]


def test_changes_are_told_in_every_row_if_in_any() -> None:
    rows = [{"id": 1, "age": 2, "_seq": "anything"}, {"id": 2, "_change": "delete", "name": 5}, {"id": 3, "age": 1}]
    told = [(row["id"], row["age"], row["_change"]) for row in read(PEOPLE, *rows)]
    assert told == [(1, 2, "upsert"), (2, None, "delete"), (3, 1, "upsert")]
    assert read(EVENTS, {"id": 1, "_change": "upsert"}, {"id": 2, "_change": None}) == [
        {"id": 1, "_change": "upsert"},
        {"id": 2, "_change": "upsert"},
    ]
    assert read(EVENTS, {"id": 1, "_seq": 4}) == [{"id": 1}]


def test_one_key_may_come_more_than_once_and_as_a_deletion_too() -> None:
    assert len(read(PEOPLE, {"id": 1, "age": 1}, {"id": 1, "_change": "delete"}, {"id": 1, "age": 2})) == 3


def test_json_forms_of_values_are_understood() -> None:
    row = {
        "id": 1,
        "amount": "-Infinity",
        "raw": "AAE=",
        "price": "1.25",
        "at": "2026-11-15T10:00:00Z",
        "day": "2026-01-02",
    }
    (found,) = read(WIDE, row)
    assert (found["amount"], found["raw"], str(found["price"]), str(found["day"])) == (
        float("-inf"),
        b"\x00\x01",
        "1.25",
        "2026-01-02",
    )


def test_columns_that_the_table_fills_need_not_come_but_must_not_be_null_if_required() -> None:
    judge = Judge(schema("id long not null, kind string not null"), filled=["kind"])
    assert read(judge, {"id": 1}) == [{"id": 1}]
    assert read(judge, {"id": 1}, {"id": 2, "kind": "a"})[1] == {"id": 2, "kind": "a"}
    assert refused(judge, {"id": 1}, {"id": 2, "kind": None}) == [(2, "kind", "null in a required column")]


def test_new_columns_come_with_evolve_and_numbers_widen() -> None:
    judge = Judge(schema("id int not null, name string"))
    table = judge.read(lines({"id": 2**40, "age": 7}, {"id": 2, "tags": ["a"]}), 9, evolve=True).table
    assert table.schema.field("id").type == pa.int64()
    assert table.to_pylist() == [{"id": 2**40, "age": 7, "tags": None}, {"id": 2, "age": None, "tags": ["a"]}]
    assert refused(judge, {"id": "x", "age": 7}, evolve=True)[0][:2] == (1, "id")
    for wrong in ({"id": 1, "_seq_no": 1, "age": None}, {"id": 1, "Name": "case"}):
        with pytest.raises(Invalid):
            judge.read(lines(wrong), 9, evolve=True)


# ── what does not ──


@pytest.mark.parametrize(
    ("line", "character"),
    [
        ("{'id': 1}", 2),
        ('{"id": 1', 9),
        ('{"id": 1}}', 10),
        ('  {"id": 1} {"id": 2}', 12),
        ('{"id": nul}', 8),
        ('{"id" 1}', 7),
        ("[1]", None),
        ("7", None),
        ('{"id": NaN}', None),
        ('{"id": ' + "1" * 5000 + "}", None),
        ('{"a":' * 5000, None),
        ("\ufeff{}", 1),
    ],
)
def test_a_line_that_is_no_object_is_told_with_line_and_character(line: str, character: int | None) -> None:
    with pytest.raises(NotJson) as error:
        EVENTS.read(f'{{"id": 1}}\n\n{line}\n'.encode(), 10)
    (problem,) = error.value.as_dict()["problems"]
    assert (problem["line"], problem["column"]) == (3, None)
    assert error.value.facts["line"] == 3
    if character is not None:
        assert problem["character"] == character


def test_all_lines_that_are_no_objects_are_counted_and_the_first_are_named() -> None:
    with pytest.raises(WrongLines) as error:
        EVENTS.read(b"x\n" * 50 + b'{"id": 1}\n', 100)
    told = error.value.as_dict()
    assert (told["facts"]["count"], len(told["problems"])) == ("50", PROBLEMS_MAX)
    assert [one["line"] for one in told["problems"]] == list(range(1, PROBLEMS_MAX + 1))


def test_bytes_that_are_no_text_are_told_with_line_and_character() -> None:
    with pytest.raises(NotJson) as error:
        EVENTS.read(b'{"id": 1}\n{"name": "\xc3\xa4\xff"}\n', 10)
    assert (error.value.facts["line"], error.value.facts["character"]) == (2, 12)


def test_more_rows_than_may_come_are_refused() -> None:
    assert EVENTS.read(b'{"id": 1}\n' * 5, 5).rows == 5
    for more in (b'{"id": 1}\n', b"x\n"):
        with pytest.raises(TooManyRows):
            EVENTS.read(b'{"id": 1}\n' * 5 + more, 5)


def test_each_wrong_value_is_told_with_its_line_and_column() -> None:
    found = refused(EVENTS, {"id": 1}, {"id": "x", "name": 5}, {"name": "a"}, {"id": None}, {"id": 2, "nmae": "b"})
    assert [(line, column) for line, column, _ in found] == [(2, "id"), (2, "name"), (3, "id"), (4, "id"), (5, "nmae")]
    assert found[2][2] == "a required column is missing"
    assert found[3][2] == "null in a required column"
    with pytest.raises(Invalid) as error:
        EVENTS.read(lines({"id": 2, "nmae": "b"}), 9)
    assert "Did you mean name?" in error.value.advice


def test_of_many_wrong_rows_the_first_are_told_and_all_are_counted() -> None:
    with pytest.raises(WrongRows) as error:
        EVENTS.read(lines(*({"id": "x"} for _ in range(500))), 1000)
    assert (error.value.facts["count"], len(error.value.problems)) == (500, PROBLEMS_MAX)


def test_wrong_values_inside_are_told_by_their_path() -> None:
    rows = [{"id": 1, "place": {"city": {"code": "x"}}}, {"id": 2, "place": {"lon": 1.0}}, {"id": 3, "tags": [1]}]
    found = refused(WIDE, *rows, {"id": 4, "counts": {"a": 1.5}})
    assert [(line, column) for line, column, _ in found] == [
        (1, "place.city.code"),
        (2, "place.lon"),
        (3, "tags.element"),
        (4, "counts.value"),
    ]


def test_a_null_in_a_required_field_inside_is_told_by_its_path() -> None:
    judge = Judge(schema("id long, place struct<lat: double not null, name: string>", key=()))
    assert len(read(judge, {"place": None}, {"place": {"lat": 1.0}})) == 2
    assert refused(judge, {"id": 1}, {"place": {"name": "a"}}) == [(2, "place.lat", "null in a required column")]


def test_a_change_that_is_none_and_a_deletion_without_its_key_are_told() -> None:
    assert [one[:2] for one in refused(PEOPLE, {"id": 1, "_change": "insert"}, {"_change": 7})] == [
        (1, "_change"),
        (2, "_change"),
    ]
    assert refused(PEOPLE, {"_change": "delete"}, {"id": None, "_change": "delete"}) == [
        (1, "id", "a required column is missing"),
        (2, "id", "null in a required column"),
    ]
    assert [one[:2] for one in refused(PEOPLE, {"id": 1, "_change": "delete", "nmae": 1})] == [(1, "nmae")]
    assert [one[:2] for one in refused(EVENTS, {"id": 1, "_change": "delete"})] == [(1, "_change")]


def test_what_is_wrong_elsewhere_does_not_spoil_what_is_right() -> None:
    """Values are read again to be told of: those with a form of their own in JSON are right the second time too."""
    row = {"id": 1, "amount": "Infinity", "raw": "AAE="}
    assert [one[:2] for one in refused(WIDE, row, {**row, "small": "x"})] == [(2, "small")]


@pytest.mark.parametrize("evolve", [False, True])
def test_values_that_are_nested_however_deeply_are_refused(evolve: bool) -> None:
    for depth in range(30, 1000, 13):
        with pytest.raises(Invalid):
            EVENTS.read(lines('{"id": ' + "[" * depth + "]" * depth + "}"), 9, evolve=evolve)


# ── any rows ──

TEXTS = st.text(max_size=6)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False), st.just(2**31)
)
MOMENTS = st.sampled_from(
    ["2026-11-15T10:00:00Z", "2026-11-15T10:00:00", "2026-11-15", "2026-02-30", "2026-11-15T10:00:00.1234567Z", "x"]
)
WORDS = st.sampled_from(["1.25", "1.255", "NaN", "Infinity", "AAE=", "AA", "\ud800", "12345678901", "true", ""])
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, MOMENTS, WORDS)
VALUES = st.one_of(
    LEAVES,
    st.lists(LEAVES, max_size=3),
    st.dictionaries(st.sampled_from(["lat", "city", "a", "b"]), LEAVES, max_size=2),
    st.fixed_dictionaries({"city": st.fixed_dictionaries({}, optional={"code": LEAVES, "x": LEAVES})}),
)
FITTING: dict[str, st.SearchStrategy[Any]] = {
    "small": st.integers(-(2**31), 2**31 - 1),
    "amount": st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.just("NaN"), st.integers(-5, 5)),
    "short": st.floats(width=32, allow_nan=False, allow_infinity=False),
    "price": st.sampled_from(["1.25", 7, "-0.1", "9999999.99"]),
    "name": TEXTS,
    "raw": st.just("AAE="),
    "yes": st.booleans(),
    "at": st.just("2026-11-15T10:00:00.5+02:00"),
    "local": st.just("2026-11-15T10:00:00"),
    "day": st.just("2026-11-15"),
    "tags": st.lists(st.one_of(st.none(), TEXTS), max_size=3),
    "counts": st.dictionaries(TEXTS, st.one_of(st.none(), st.integers(-5, 5)), max_size=2),
    "place": st.fixed_dictionaries({}, optional={"lat": st.floats(0, 9), "city": st.just({"code": 1})}),
}
RIGHT = st.fixed_dictionaries(
    {"id": st.integers(-(2**63), 2**63 - 1)},
    optional={name: st.one_of(st.none(), value) for name, value in FITTING.items()},
)
ANY = st.fixed_dictionaries({}, optional=dict.fromkeys(("id", *FITTING, "nmae", "_change", "_seq"), VALUES))
SOME = st.lists(st.one_of(RIGHT, RIGHT, RIGHT, ANY), min_size=1, max_size=6)


def judged(*rows: Any) -> pa.Table | WrongRows:
    try:
        return WIDE.read(lines(*rows), 1000).table
    except WrongRows as error:
        return error


def as_told(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Rows in words, for a NaN is not equal to itself; with the columns that their neighbours bring."""
    filled = [{name: row.get(name, "upsert" if name == "_change" else None) for name in names} for row in rows]
    return [repr(row) for row in filled]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(SOME)
def test_any_rows_are_judged_together_as_they_are_alone(rows: list[Any]) -> None:
    alone = [judged(row) for row in rows]
    together = judged(*rows)
    wrong = [line for line, found in enumerate(alone, start=1) if isinstance(found, WrongRows)]
    if isinstance(together, WrongRows):
        lines_told = sorted({problem.line for problem in together.problems})
        # Only the first so many problems are told: later lines may be missing then, and only then.
        is_cut = len(together.problems) >= PROBLEMS_MAX
        assert lines_told == (wrong[: len(lines_told)] if is_cut else wrong)
        return
    assert wrong == []
    names = together.column_names
    assert as_told(together.to_pylist(), names) == as_told([row for one in alone for row in one.to_pylist()], names)
    # What it takes, a write takes.
    columns = table_shape(WIDE.schema.model_dump_json()).columns
    arrays = [
        together[column.name] if column.name in names else pa.nulls(len(together), column.field.type)
        for column in columns
    ]
    whole = pa.table(arrays, names=[column.name for column in columns])
    assert conform(whole.combine_chunks().to_batches()[0], WIDE.schema).num_rows == len(rows)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(RIGHT, min_size=1, max_size=6))
def test_right_rows_are_taken(rows: list[Any]) -> None:
    assert [row["id"] for row in read(WIDE, *rows)] == [row["id"] for row in rows]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(st.binary(max_size=60), st.text('{}[]":, \n\r\t1e.-naul\\u', max_size=60).map(str.encode)))
def test_any_bytes_are_rows_or_refused(text: bytes) -> None:
    with suppress(Invalid):
        assert WIDE.read(text, 100).rows >= 0
