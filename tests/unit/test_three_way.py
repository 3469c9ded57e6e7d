"""Rows of two branches against what both once had: every combination of the three, and how they are found."""

from __future__ import annotations

import random
from datetime import date
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.schema import Schema
from pyiceberg.typedef import Record

from floodmark import clock
from floodmark.commit.live_files import LiveFile, seq_field_id
from floodmark.commit.manifests import data_file
from floodmark.commit.metadata import new_metadata
from floodmark.model import SEQ_COLUMN, FileRecord
from floodmark.rows.keys import match_keys
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.rewriting.three_way import (
    Side,
    changed_rows,
    chunks,
    decide,
    deleted_keys,
    keys_of,
    new_rows,
    row_schema,
    rows_by_key,
)
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage
from floodmark.write.prune import key_fields, may_hold_range

SCHEMA = table_schema("id long not null, name string, tags array<string>", ["id"])


def table(rows: list[dict[str, Any]], schema: Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=row_schema(schema))


def side(values: list[str | None]) -> Side:
    """For each key a row with this text, or none."""
    rows = [{"id": at, "name": text, "tags": [text]} for at, text in enumerate(values) if text is not None]
    return Side.at(np.array([row["id"] for row in rows], np.int64), table(rows), len(values))


# Every way in which three sides can have a row a, b, c or none, told apart only by what is the same.
CASES = {
    (source, common, target): "same"
    if source in (common, target)
    else ("delete" if source is None else "take")
    if target == common
    else "conflict"
    for source, common, target in product((None, "a", "b", "c"), repeat=3)
}


@pytest.mark.parametrize(("rows", "expected"), CASES.items(), ids=lambda one: str(one))
def test_each_row_is_decided_by_itself(rows: tuple[str | None, ...], expected: str) -> None:
    found = decide(*(side([one]) for one in rows))
    decided = {name: getattr(found, name).tolist() for name in ("take", "delete", "same", "conflict")}
    assert decided == {name: [0] if name == expected else [] for name in decided}


def test_rows_are_decided_together_as_they_are_one_by_one() -> None:
    cases = list(CASES)
    found = decide(*(side([case[at] for case in cases]) for at in range(3)))
    for name in ("take", "delete", "same", "conflict"):
        assert [cases[place] for place in getattr(found, name)] == [one for one in cases if CASES[one] == name]


def test_a_column_that_is_ignored_makes_no_difference() -> None:
    theirs = Side.of(table([{"id": 1, "name": "new", "tags": None}]))
    common = Side.of(table([{"id": 1, "name": "old", "tags": None}]))
    ours = Side.of(table([{"id": 1, "name": "old", "tags": ["filled"]}]))
    assert decide(theirs, common, ours).conflict.tolist() == [0]
    assert decide(theirs, common, ours, ["tags"]).take.tolist() == [0]


def test_null_is_a_value_and_no_row_is_none() -> None:
    null = Side.of(table([{"id": 0, "name": None, "tags": None}]))
    absent = Side.absent(1, SCHEMA)
    assert not null.same(absent)[0]
    assert null.same(null)[0]
    assert absent.same(absent)[0]
    assert decide(null, absent, absent).take.tolist() == [0]


# ── files ──


class Files:
    """Data files of one table, in memory, with sequences."""

    def __init__(self, schema: Schema = SCHEMA) -> None:
        self.storage, self.schema = Storage({}), schema
        self.fields = key_fields(schema)
        spec, order = partition_spec(schema, []), sort_order(schema, [])
        self._metadata = new_metadata("memory://lake", "0" * 32, schema, spec, order, {})
        self._spec = spec.model_dump_json()

    def fresh(self, sequence: int, rows: list[dict[str, Any]]) -> LiveFile:
        return self._write(rows, sequence, settled=False)

    def settled(self, sequence: int, rows: list[tuple[int, dict[str, Any]]]) -> LiveFile:
        return self._write([{**row, SEQ_COLUMN: seq} for seq, row in rows], sequence, settled=True)

    def _write(self, rows: list[dict[str, Any]], sequence: int, *, settled: bool) -> LiveFile:
        folder = f"memory://lake/{clock.new_id()}"
        target = StageTarget(folder, self.schema.model_dump_json(), self._spec, settled=settled)
        columns = row_schema(self.schema)
        columns = columns.append(pa.field(SEQ_COLUMN, pa.int64())) if settled else columns
        (record,) = stage_in_process(target, pa.Table.from_pylist(rows, schema=columns), self.storage)
        return self._live(record, sequence)

    def _live(self, record: FileRecord, sequence: int) -> LiveFile:
        return LiveFile(data_file(record, self._metadata, 0), sequence, seq_field_id(self.schema))


def row(number: int, name: str = "x") -> dict[str, Any]:
    return {"id": number, "name": name, "tags": [name]}


def test_rows_are_found_by_key_in_whatever_file() -> None:
    files = Files()
    live = [files.fresh(1, [row(1), row(2)]), files.settled(5, [(2, row(7, "y"))]), files.fresh(3, [row(9)])]
    keys = keys_of(table([row(9), row(4), row(7), row(2)]), files.fields)
    found = rows_by_key(files.storage, live, SCHEMA, keys, files.fields)
    assert found.there.tolist() == [True, False, True, True]
    named = [(one["id"], one["name"]) for one in found.rows.to_pylist()]
    assert named == [(9, "x"), (None, None), (7, "y"), (2, "x")]
    assert found.take(np.array([2, 0])).column("tags").to_pylist() == [["y"], ["x"]]


def test_rows_by_key_of_no_files_are_absent() -> None:
    files = Files()
    keys = keys_of(table([row(1)]), files.fields)
    found = rows_by_key(files.storage, [], SCHEMA, keys, files.fields)
    assert found.there.tolist() == [False]
    assert found.rows.num_rows == 1


def test_new_rows_are_told_by_their_sequences() -> None:
    files = Files()
    live = [
        files.fresh(2, [row(1)]),
        files.fresh(5, [row(2), row(3)]),
        files.fresh(6, [row(4)]),
        files.settled(9, [(1, row(5)), (4, row(6)), (6, row(7)), (8, row(8))]),
    ]
    found = new_rows(files.storage, live, SCHEMA, (3, 8), excluded={6})
    assert sorted(one["id"] for batch in found for one in batch.to_pylist()) == [2, 3, 6, 8]


def test_changes_are_cut_into_chunks() -> None:
    from floodmark.model import DeletionsFile
    from floodmark.rows.reading.changes import plan_changes

    files = Files()
    live = [files.fresh(5, [row(number) for number in range(10)]), files.fresh(2, [row(50)])]
    key_schema = table_schema("id long not null", ["id"])
    gone = Files(key_schema)
    gone.storage = files.storage
    named = gone.fresh(5, [{"id": number} for number in (3, 70, 71)])
    deletions = [DeletionsFile(named.path, 4, 3, named.size_bytes)]
    plan = plan_changes(SCHEMA, live, deletions, 3, 5)
    parts = list(changed_rows(files.storage, plan, rows_max=4))
    assert [part.num_rows for part in parts] == [4, 4, 2]
    assert sorted(number for part in parts for number in part.column("id").to_pylist()) == list(range(10))
    # A row hides the deletion of its key.
    keys = list(deleted_keys(files.storage, plan, files.fields, rows_max=1))
    assert [part.to_pylist() for part in keys] == [[{"id": 70}], [{"id": 71}]]


@pytest.mark.parametrize(("rows_max", "bytes_max"), [(1, 10**9), (7, 10**9), (10**6, 1), (10**6, 10**9)])
def test_chunks_hold_the_same_rows(rows_max: int, bytes_max: int) -> None:
    batches = [pa.record_batch({"n": list(range(start, start + 5))}) for start in range(0, 50, 5)]
    found = list(chunks(batches, rows_max, bytes_max))
    assert [number for part in found for number in part.column("n").to_pylist()] == list(range(50))
    assert all(part.num_rows <= max(rows_max, 1) for part in found)


def test_keys_match_in_pairs() -> None:
    schema = table_schema("a long not null, b string not null", ["a", "b"])
    fields = key_fields(schema)
    rng = random.Random(7)
    left = [(rng.randrange(5), rng.choice("xyz")) for _ in range(40)]
    right = [(rng.randrange(5), rng.choice("xyz")) for _ in range(30)]
    sides = [pa.table({"a": [one for one, _ in part], "b": [two for _, two in part]}) for part in (left, right)]
    found = match_keys(*sides, fields)
    expected = [(i, j) for i, one in enumerate(left) for j, two in enumerate(right) if one == two]
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected
    assert [len(part) for part in match_keys(sides[0].slice(0, 0), sides[1], fields)] == [0, 0]


@pytest.mark.parametrize(
    ("kind", "low", "high", "inside", "outside"),
    [
        ("long", 10, 20, 15, 21),
        ("string", "b", "d", "c", "e"),
        ("date", date(2026, 1, 1), date(2026, 2, 1), date(2026, 1, 15), date(2025, 1, 1)),
        ("boolean", False, False, False, True),
        ("binary", b"b", b"d", b"c", None),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_files_are_left_out_only_if_no_key_can_be_in_them(
    kind: str, low: Any, high: Any, inside: Any, outside: Any
) -> None:
    schema = table_schema(f"k {kind} not null", ["k"])
    files = Files(schema)
    live = [files.fresh(1, [{"k": low}, {"k": high}] if low != high else [{"k": low}])]

    def held(*keys: Any) -> int:
        return len(may_hold_range(live, pa.Table.from_pylist([{"k": key} for key in keys], row_schema(schema)), schema))

    assert held(inside) == 1
    assert held(low, high) == 1
    assert outside is None or held(outside) == 0
    assert held() == 0


def test_a_file_without_bounds_may_hold_anything() -> None:
    bare = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path="memory://lake/foreign.parquet",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=1,
    )
    keys = keys_of(table([row(1)]), key_fields(SCHEMA))
    assert len(may_hold_range([LiveFile(bare, 1, None)], keys, SCHEMA)) == 1
