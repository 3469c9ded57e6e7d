"""Settled files carry the sequence of every row; deletions files carry keys."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.conversions import from_bytes
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from floodmark import clock
from floodmark.errors import Corrupt, Invalid
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.project import read_file
from floodmark.rows.schema import FIELD_ID, table_schema
from floodmark.rows.staging.deletions import DeletionsWriter
from floodmark.rows.staging.stage import StageTarget, stage_batches, stage_in_process
from floodmark.storage import Storage

TEXT = "id long not null, x double, s struct<f:float>, `odd name` string"


def settled_target(text: str = TEXT, partition: tuple[str, ...] = (), **extra: Any) -> StageTarget:
    schema = table_schema(text)
    spec = partition_spec(schema, partition)
    folder = extra.pop("folder", f"memory://lake/{clock.new_id()}")
    return StageTarget(folder, schema.model_dump_json(), spec.model_dump_json(), **{"settled": True, **extra})


def rows_of(storage: Storage, path: str, fields: Any) -> list[dict[str, Any]]:
    return [row for batch in read_file(storage, path, fields) for row in batch.to_pylist()]


def seq_of(text: str) -> int:
    return table_schema(text).find_field("_seq").field_id


def long_bounds(record: Any, field_id: int) -> list[Any]:
    return [
        from_bytes(LongType(), base64.b64decode(bounds[field_id]))
        for bounds in (record.lower_bounds, record.upper_bounds)
    ]


def test_a_settled_file_holds_the_sequence_of_every_row_with_counts_and_bounds(tmp_path: Path) -> None:
    storage, target = Storage({}), settled_target(folder=f"file://{tmp_path}")
    # The sequence is found by its name, wherever it stands in the rows.
    kind = pa.struct([("f", pa.float64())])
    rows = pa.table(
        {
            "_seq": [7, 3, 2**40],
            "odd name": ["a", None, "c"],
            "id": [1, 2, 3],
            "x": [0.5, float("nan"), None],
            "s": pa.array([{"f": float("nan")}, None, {"f": 1.0}], kind),
        }
    )
    (record,) = stage_in_process(target, rows, storage)
    schema = table_schema(TEXT)
    seq = seq_of(TEXT)
    assert (record.value_counts[seq], record.null_counts[seq], record.rows) == (3, 0, 3)
    assert long_bounds(record, seq) == [3, 2**40]
    assert seq in record.column_sizes
    # The counts of the table's own columns are not shifted by it.
    assert record.nan_counts == {schema.find_field("x").field_id: 1, schema.find_field("s.f").field_id: 1}
    assert long_bounds(record, schema.find_field("id").field_id) == [1, 3]

    found = rows_of(storage, record.path, schema.fields)
    assert [(row["id"], row["odd name"], row["_seq"]) for row in found] == [(1, "a", 7), (2, None, 3), (3, "c", 2**40)]
    file_schema = pq.read_schema(record.path.removeprefix("file://"))
    assert file_schema.names == ["id", "x", "s", "odd_x20name", "_seq"]
    assert file_schema.field("_seq").metadata[FIELD_ID] == str(seq).encode()
    assert file_schema.field("_seq").nullable


def test_the_sequence_stays_with_its_row_through_partitions_and_sorting() -> None:
    text = "k string, id long"
    order = sort_order(table_schema(text), ["id desc"]).model_dump_json()
    storage, target = Storage({}), settled_target(text, ("k", "bucket(2, id)"), sort_json=order)
    rows = pa.table({"k": ["ab"[i % 2] for i in range(40)], "id": range(40), "_seq": [1000 + i for i in range(40)]})
    records = stage_in_process(target, rows, storage)
    assert len(records) == 4
    found = [rows_of(storage, record.path, table_schema(text).fields) for record in records]
    for record, part in zip(records, found, strict=True):
        assert [row["id"] for row in part] == sorted((row["id"] for row in part), reverse=True)
        sequences = [row["_seq"] for row in part]
        assert long_bounds(record, seq_of(text)) == [min(sequences), max(sequences)]
    assert sorted((row["id"], row["_seq"]) for part in found for row in part) == [(i, 1000 + i) for i in range(40)]


@pytest.mark.parametrize(
    "sequences", [pa.array([1, None], pa.int64()), pa.array([1, 2], pa.int32()), pa.nulls(2), None]
)
@pytest.mark.parametrize("fill_missing", [False, True])
def test_rows_without_their_sequence_are_corrupt_and_leave_no_file(sequences: Any, fill_missing: bool) -> None:
    storage, target = Storage({}), settled_target("id long", fill_missing=fill_missing)
    columns = {"id": pa.array([1, 2])} | ({} if sequences is None else {"_seq": sequences})
    with pytest.raises(Corrupt, match="sequence"):
        stage_batches(target, [pa.RecordBatch.from_pydict(columns)], "task", storage=storage)
    with pytest.raises(Corrupt, match="sequence"):
        stage_in_process(target, pa.table(columns), storage)
    assert list(storage.list(target.folder)) == []


def test_a_lost_sequence_counts_more_than_a_bad_value() -> None:
    batch = pa.RecordBatch.from_pydict({"id": pa.array(["x"]), "_seq": pa.array([None], pa.int64())})
    with pytest.raises(Corrupt) as raised:
        stage_batches(settled_target("id long"), [batch], "task", storage=Storage({}))
    assert raised.value.facts["rows"] == 1


def test_a_bad_value_beside_a_sequence_is_still_invalid() -> None:
    target = settled_target("id long not null")
    with pytest.raises(Invalid) as refused:
        stage_in_process(target, pa.table({"id": pa.array([None, 1], pa.int64()), "_seq": [1, 2]}), Storage({}))
    assert refused.value.facts == {"column": "id", "count": 1}


def test_a_fresh_file_has_no_sequence_and_rows_may_not_bring_one() -> None:
    storage, target = Storage({}), settled_target("id long", settled=False)
    with pytest.raises(Invalid, match="no such column") as refused:
        stage_in_process(target, pa.table({"id": [1], "_seq": [1]}), storage)
    assert refused.value.facts["column"] == "_seq"
    (record,) = stage_in_process(target, pa.table({"id": [1]}), storage)
    assert set(record.value_counts) == {1}
    assert rows_of(storage, record.path, table_schema("id long").fields) == [{"id": 1, "_seq": None}]


def test_a_table_without_the_hidden_column_cannot_hold_settled_rows() -> None:
    schema = Schema(NestedField(1, "id", LongType()))
    target = StageTarget("memory://lake/x", schema.model_dump_json(), '{"spec-id":0,"fields":[]}', settled=True)
    with pytest.raises(Corrupt, match="sequences"):
        stage_in_process(target, pa.table({"id": [1], "_seq": [1]}), Storage({}))


# ── deletions ──

KEYED = table_schema("v string, `the key` long, part string, n int", key=["the key", "part"])
KEY = [KEYED.find_field("part"), KEYED.find_field("the key")]


def writer_of(storage: Storage, folder: str, name: str = "op") -> DeletionsWriter:
    return DeletionsWriter(storage, folder, KEYED, KEY, name)


def test_deleted_keys_come_back_in_their_order_with_the_tables_field_ids(tmp_path: Path) -> None:
    storage = Storage({})
    writer = writer_of(storage, f"file://{tmp_path}", "0001-op")
    writer.write(pa.table({"the key": [5, 3], "part": ["b", "a"]}))
    # A narrower key, as an older file holds it, in another order of columns.
    writer.write(pa.RecordBatch.from_pydict({"part": ["c"], "the key": pa.array([1], pa.int32())}))
    assert list(storage.list(f"file://{tmp_path}")) == []
    record = writer.finish()
    assert record is not None
    assert record.path == f"file://{tmp_path}/0001-op-deletions.parquet" == writer.location
    assert rows_of(storage, record.path, KEY) == [
        {"part": "b", "the key": 5},
        {"part": "a", "the key": 3},
        {"part": "c", "the key": 1},
    ]
    assert (record.rows, writer.rows, record.size_bytes) == (3, 3, storage.size(record.path))
    parquet = pq.ParquetFile(record.path.removeprefix("file://"))
    assert parquet.schema_arrow.names == ["part", "the_x20key"]
    assert [field.metadata[FIELD_ID] for field in parquet.schema_arrow] == [b"3", b"2"]
    assert parquet.metadata.row_group(0).column(0).compression == "ZSTD"
    assert long_bounds(record, 2) == [1, 5]


def test_many_keys_are_one_file_written_as_they_come() -> None:
    storage = Storage({})
    folder = f"memory://lake/{clock.new_id()}"
    writer = writer_of(storage, folder)
    for start in range(0, 1_000_000, 100_000):
        keys = pa.array(range(start, start + 100_000))
        writer.write(pa.table({"the key": keys, "part": pa.array([""] * 100_000)}))
    record = writer.finish()
    assert record is not None
    assert [entry.location for entry in storage.list(folder)] == [record.path]
    assert record.rows == 1_000_000
    with storage.open_input(record.path) as stream:
        assert pq.read_metadata(stream).num_row_groups > 1
    found = [row for batch in read_file(storage, record.path, KEY[1:]) for row in batch.column(0).to_pylist()]
    assert found == list(range(1_000_000))


def test_without_keys_there_is_no_file() -> None:
    storage = Storage({})
    folder = f"memory://lake/{clock.new_id()}"
    writer = writer_of(storage, folder)
    writer.write(pa.table({"the key": pa.array([], pa.int64()), "part": pa.array([], pa.string())}))
    assert writer.finish() is None
    assert writer_of(storage, folder).finish() is None
    assert list(storage.list(folder)) == []


def test_abandoned_keys_leave_no_file_also_when_some_are_written() -> None:
    storage = Storage({})
    folder = f"memory://lake/{clock.new_id()}"
    writer = writer_of(storage, folder)
    for _ in range(3):
        writer.write(pa.table({"the key": range(400_000), "part": ["x"] * 400_000}))
    writer.abandon()
    writer.abandon()
    assert list(storage.list(folder)) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"the key": [1]},
        {"the key": [1], "part": ["x"], "v": ["y"]},
        {"the key": ["1"], "part": ["x"]},
        {"the key": pa.array([None], pa.int64()), "part": ["x"]},
    ],
)
def test_what_is_no_key_of_the_table_is_corrupt(keys: dict[str, Any]) -> None:
    storage = Storage({})
    folder = f"memory://lake/{clock.new_id()}"
    writer = writer_of(storage, folder)
    with pytest.raises(Corrupt, match="key"):
        writer.write(pa.table(keys))
    writer.abandon()
    assert list(storage.list(folder)) == []
