"""Records of a spool as rows: the last change of a key counts, absent is not null, what does not fit is told."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.schema import Schema
from pyiceberg.types import DecimalType, IntegerType, LongType, NestedField, StringType, TimestamptzType

import floodmark as fm
from floodmark.ingest.feed_group import Memory, RecordReader, SpooledRows, last_of_each, lines_of, same_kind, taken
from floodmark.ingest.judge import Judge
from floodmark.spool.segments import Record

FIELDS = (
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "note", StringType(), required=False),
)
KEYED = Schema(*FIELDS, identifier_field_ids=[1])
PLAIN = Schema(*FIELDS)


def text(*rows: Any) -> bytes:
    return b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)


def record(number: int, *rows: Any, evolve: bool = False) -> Record:
    return Record(number, len(rows), text(*rows), evolve, 0)


def dicts(rows: SpooledRows) -> list[dict[str, Any]]:
    found = rows.data if rows.from_json else rows.data.to_pylist()  # type: ignore[union-attr]
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def read(group: RecordReader, *texts: bytes, evolve: bool = False) -> list[dict[str, Any]]:
    return dicts(group.read(texts, 1000, evolve=evolve))


@pytest.mark.parametrize("filled", [(), ("note",)])
def test_the_last_change_of_a_key_is_left_alone_across_records_and_within_one(filled: tuple[str, ...]) -> None:
    rows = RecordReader(Judge(KEYED, filled)).read(
        [
            text({"id": 1, "name": "a"}, {"id": 2, "name": "a"}, {"id": 1, "name": "b"}),
            text({"id": 3, "name": "c"}, {"_change": "delete", "id": 2}),
            text({"_change": "delete", "id": 3}, {"id": 3, "name": "d"}),
        ],
        100,
        evolve=False,
    )
    assert rows.count == 7
    last = {row["id"]: (row.get("_change", "upsert"), row.get("name")) for row in dicts(rows)}
    assert last == {1: ("upsert", "b"), 2: ("delete", None), 3: ("upsert", "d")}
    assert len(dicts(rows)) == 3


def test_without_a_key_every_row_stays() -> None:
    assert read(RecordReader(Judge(PLAIN, ())), text({"id": 1}, {"id": 1}), text({"id": 1})) == [{"id": 1}] * 3


def test_one_key_in_two_spellings_is_one_key() -> None:
    schema = Schema(
        NestedField(1, "at", TimestamptzType(), required=True),
        NestedField(2, "price", DecimalType(9, 2), required=True),
        NestedField(3, "name", StringType(), required=False),
        identifier_field_ids=[1, 2],
    )
    one = text({"at": "2026-01-01T00:00:00Z", "price": "1.5", "name": "a"})
    two = text({"at": "2026-01-01T01:00:00+01:00", "price": "1.50", "name": "b"})
    for filled in ((), ("name",)):
        assert [row["name"] for row in read(RecordReader(Judge(schema, filled)), one, two)] == ["b"]


def test_a_column_with_a_default_keeps_null_and_absent_apart_row_by_row() -> None:
    rows = RecordReader(Judge(PLAIN, ("note",))).read(
        [text({"id": 1}, {"id": 2, "note": None}, {"id": 3, "note": "x"})], 9, evolve=False
    )
    assert rows.data == [{"id": 1}, {"id": 2, "note": None}, {"id": 3, "note": "x"}]


def test_records_that_may_add_columns_are_a_group_of_their_own() -> None:
    records = [record(0, {"id": 1}), record(1, {"id": 2}), record(2, {"id": 3, "new": 1}, evolve=True), record(3)]
    assert [one.number for one in same_kind(records)] == [0, 1]
    assert [one.number for one in same_kind(records[2:])] == [2]
    assert read(RecordReader(Judge(PLAIN, ())), records[2].text, evolve=True) == [{"id": 3, "new": 1}]
    with pytest.raises(fm.Invalid, match="new"):
        read(RecordReader(Judge(PLAIN, ())), records[2].text)


def test_lines_that_do_not_fit_are_told_apart_with_their_numbers_and_as_they_were_sent() -> None:
    group = RecordReader(Judge(KEYED, ()))
    wrong = record(4, {"id": 1}, b"", {"id": "x"}, b"not json", {"name": "no key"}, b"\xff", {"id": 5, "name": "e"})
    with pytest.raises(fm.Invalid):
        group.read([wrong.text], 100, evolve=False)
    good, bad = group.sift(wrong)
    assert [number for number, _ in good] == [1, 7]
    assert [(one.record, one.line) for one in bad] == [(4, 3), (4, 4), (4, 5), (4, 6)]
    assert all(one.error["kind"] == "Invalid" for one in bad)
    assert [one.text.encode(errors="surrogateescape") for one in bad] == [
        *(text({"id": "x"}), b"not json", text({"name": "no key"}), b"\xff")
    ]
    assert lines_of(b"\r\n \n{}\n") == [(3, "{}")]


def test_nothing_is_folded_away_that_has_no_key() -> None:
    group = RecordReader(Judge(KEYED, ()))
    rows = [{"name": "a"}, {"name": "b"}, {"id": 1, "name": "c"}, {"id": 1, "name": "d"}]
    keys = pa.table({"id": [row.get("id") for row in rows]})
    assert [row["name"] for row in taken(rows, last_of_each(keys, group.key))] == ["a", "b", "d"]


def test_rows_that_widen_their_key_are_folded_by_what_they_widen_it_to() -> None:
    narrow = Schema(NestedField(1, "id", IntegerType(), required=True), *FIELDS[1:], identifier_field_ids=[1])
    wide = text({"id": 2**40, "name": "a"}, {"id": 5, "name": "b"}, {"id": 2**40, "name": "c"})
    assert read(RecordReader(Judge(narrow, ())), wide, evolve=True) == [
        {"id": 5, "name": "b"},
        {"id": 2**40, "name": "c"},
    ]


CHANGE = st.tuples(st.integers(0, 5), st.one_of(st.none(), st.sampled_from("abc")))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.lists(st.lists(CHANGE, min_size=1, max_size=6), min_size=1, max_size=5))
def test_folding_leaves_what_one_change_after_another_would(records: list[list[tuple[int, str | None]]]) -> None:
    table: dict[int, str] = {}
    texts = []
    for changes in records:
        for key, name in changes:
            table.pop(key, None)
            if name is not None:
                table[key] = name
        texts.append(text(*({"id": k, "name": n} if n else {"_change": "delete", "id": k} for k, n in changes)))
    for filled in ((), ("note",)):
        found = read(RecordReader(Judge(KEYED, filled)), *texts)
        assert len({row["id"] for row in found}) == len(found)
        assert {row["id"]: row["name"] for row in found if row.get("_change", "upsert") == "upsert"} == table


ROWS = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(1, 4)},
        optional={
            "name": st.none() | st.text(max_size=2),
            "note": st.text(max_size=2),
            "_change": st.sampled_from(["upsert", "delete"]),
        },
    ),
    min_size=1,
    max_size=4,
)


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_rows_that_were_judged_before_are_those_that_are_read(records: list[list[dict[str, Any]]]) -> None:
    group, judge = RecordReader(Judge(KEYED, ())), Judge(KEYED)
    assert group.is_judged_by(judge)
    texts = [text(*rows) for rows in records]
    joined, found = group.join([judge.read(one, 100).table for one in texts]), group.read(texts, 100, evolve=False)
    assert (dicts(joined), joined.kept, joined.count) == (dicts(found), found.kept, found.count)


def test_what_another_shape_or_a_default_was_judged_by_is_read_again() -> None:
    assert not RecordReader(Judge(KEYED, ())).is_judged_by(Judge(PLAIN))
    assert not RecordReader(Judge(KEYED, ("note",))).is_judged_by(Judge(KEYED))
    assert not RecordReader(Judge(KEYED, ())).is_judged_by(Judge(KEYED, ("note",)))


def test_what_is_remembered_is_bounded_and_known_by_its_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    seen = Judge(PLAIN).read(text({"id": 1, "name": "a"}), 9)
    monkeypatch.setattr("floodmark.ingest.feed_group.MEMORY_BYTES_MAX", 2 * seen.table.nbytes)
    for number in range(3):
        memory.put("one", number, seen)
    first, second, third = (record(number, {"id": 1}) for number in range(3))
    assert memory.find("one", [first, second]) == [seen, seen]
    assert memory.find("one", [second, third]) is None
    assert memory.find("another", [first]) is None
    memory.forget("one", 1)
    assert memory.find("one", [first]) is None
    memory.put("one", 2, seen)
    assert memory.find("one", [second, third]) == [seen, seen]
