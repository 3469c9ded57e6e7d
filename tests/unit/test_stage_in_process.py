"""Staging in the caller's process: the right rows in files that others can read, without Spark."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan, PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.typedef import Record

from floodmark import clock
from floodmark.errors import Invalid
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.project import read_file
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage


def target_of(text: str, folder: str | None = None, **extra: Any) -> StageTarget:
    schema = table_schema(text)
    folder = folder or f"memory://lake/{clock.new_id()}"
    return StageTarget(folder, schema.model_dump_json(), partition_spec(schema, []).model_dump_json(), **extra)


def read_all(storage: Storage, target: StageTarget, records: list[Any], text: str) -> list[dict[str, Any]]:
    fields = user_fields(table_schema(text))
    return [
        row
        for record in records
        for batch in read_file(storage, record.path, fields)
        for row in batch.to_pylist(maps_as_pydicts="strict")
    ]


EVERYTHING = (
    "id long not null, n int, f float, x double, d decimal(10,2), big decimal(38,6), s string, b binary, ok boolean, "
    "day date, ts timestamp, ntz timestamp_ntz, l array<array<int>>, "
    "m map<string,struct<a:int not null,b:array<string>>>, "
    "st struct<x:struct<y:long not null> not null,z:string>, `odd name.with dot` string"
)
ROWS: list[dict[str, Any]] = [
    {
        "id": 1,
        "n": -5,
        "f": 0.5,
        "x": 1e300,
        "d": Decimal("1.25"),
        "big": Decimal("-12345678901234567890123456789012.123456"),
        "s": "é東",
        "b": b"\x00\xff" * 1_000_000,
        "ok": True,
        "day": datetime(1969, 12, 31).date(),
        "ts": datetime(2026, 11, 15, 10, 0, 0, 123456, tzinfo=UTC),
        "ntz": datetime(1900, 1, 1, 0, 0, 0, 1),
        "l": [[1, None], None, []],
        "m": {"k": {"a": 1, "b": ["x", None]}, "none": None},
        "st": {"x": {"y": 5}, "z": None},
        "odd name.with dot": "dot",
    },
    {"id": 2},
    {"id": 3, "l": [], "m": {}, "st": {"x": {"y": 0}, "z": "z"}},
]
FULL = [{field.name: row.get(field.name) for field in user_fields(table_schema(EVERYTHING))} for row in ROWS]


def test_rows_of_every_type_come_back_as_they_were() -> None:
    storage, target = Storage({}), target_of(EVERYTHING)
    records = stage_in_process(target, ROWS, storage)
    assert sum(record.rows for record in records) == 3
    assert read_all(storage, target, records, EVERYTHING) == FULL


def test_rows_in_memory_are_staged_merged_and_read_without_importing_spark(tmp_path: Path) -> None:
    # In a process of its own: this one may have run tests that did.
    code = f"""
import sys
import floodmark as fm
with fm.open({str(tmp_path / "lake")!r}, create=True) as lake:
    lake.create_table("t", "id long", key=["id"])
    lake.merge("t", [{{"id": 1, "more": "x"}}], evolve=True)
    lake.delete("t", "id = 2")
    assert lake.changes("t").arrow().read_all().num_rows == 1
assert "pyspark" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_pyiceberg_reads_staged_files_by_field_id(tmp_path: Path) -> None:
    schema = table_schema(EVERYTHING)
    spec = partition_spec(schema, [])
    target = target_of(EVERYTHING, f"file://{tmp_path}/data")
    (record,) = stage_in_process(target, ROWS, Storage({}))
    metadata = new_table_metadata(schema, spec, UNSORTED_SORT_ORDER, f"file://{tmp_path}", {})
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=record.path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=record.rows,
        file_size_in_bytes=record.size_bytes,
    )
    file.spec_id = 0
    found = ArrowScan(metadata, PyArrowFileIO(), schema, AlwaysTrue()).to_table([FileScanTask(file)])
    # PyIceberg 0.12 shows a null map as an empty one; the file itself holds the null.
    expected = [{**row, "m": row["m"] or {}, "_seq": None} for row in FULL]
    assert found.to_pylist(maps_as_pydicts="strict") == expected
    assert (tmp_path / "data" / record.path.rsplit("/", 1)[1]).stat().st_size == record.size_bytes


def test_files_are_zstd_with_microseconds_ids_everywhere_and_no_seq(tmp_path: Path) -> None:
    target = target_of(EVERYTHING, f"file://{tmp_path}")
    (record,) = stage_in_process(target, ROWS, Storage({}))
    parquet = pq.ParquetFile(record.path.removeprefix("file://"))
    group = parquet.metadata.row_group(0)
    assert {group.column(at).compression for at in range(group.num_columns)} == {"ZSTD"}
    assert {group.column(at).physical_type for at in range(group.num_columns)}.isdisjoint({"INT96"})
    schema = parquet.schema_arrow
    assert "_seq" not in schema.names
    assert schema.field("ts").type == pa.timestamp("us", tz="UTC")
    assert schema.field("ntz").type == pa.timestamp("us")
    nested = schema.field("m").type
    levels = [*schema, nested.key_field, nested.item_field, *nested.item_type, schema.field("l").type.value_field]
    ids = [field.metadata[b"PARQUET:field_id"] for field in levels]
    assert len(set(ids)) == len(levels)


@pytest.mark.parametrize("form", ["table", "batch", "reader", "pandas", "stream", "chunks"])
def test_every_form_of_rows_is_taken(form: str) -> None:
    table = pa.table({"s": ["a", None, "c"], "id": [1, 2, 3]})
    data: Any = {
        "table": table,
        "batch": table.to_batches()[0],
        "reader": table.to_reader(),
        "pandas": pd.DataFrame({"s": ["a", None, "c"], "id": [1, 2, 3]}, index=[7, 8, 9]),
        "stream": type("Stream", (), {"__arrow_c_stream__": table.__arrow_c_stream__})(),
        "chunks": pa.concat_tables([table.slice(0, 1), table.slice(1)]),
    }[form]
    text = "id long, s string"
    storage, target = Storage({}), target_of(text)
    records = stage_in_process(target, data, storage)
    rows = [{"id": 1, "s": "a"}, {"id": 2, "s": None}, {"id": 3, "s": "c"}]
    assert read_all(storage, target, records, text) == rows


def test_no_rows_make_no_file_but_are_checked() -> None:
    storage, target = Storage({}), target_of("id long")
    assert stage_in_process(target, pa.table({"id": pa.array([], pa.int64())}), storage) == []
    assert stage_in_process(target, [], storage) == []
    with pytest.raises(Invalid, match="no such column"):
        stage_in_process(target, pa.table({"idd": pa.array([], pa.int64()), "id": pa.array([], pa.int64())}), storage)
    assert list(storage.list(target.folder)) == []


def test_what_are_no_rows_is_refused() -> None:
    with pytest.raises(Invalid, match="unsupported data type"):
        stage_in_process(target_of("id long"), 42, Storage({}))


def test_a_mixed_pandas_column_is_named() -> None:
    with pytest.raises(Invalid) as refused:
        stage_in_process(target_of("a long"), pd.DataFrame({"a": [1, "x"]}, dtype=object), Storage({}))
    assert refused.value.facts["column"] == "a"


def test_bad_rows_are_counted_to_the_end_and_leave_no_file() -> None:
    storage, target = Storage({}), target_of("id long not null", target_file_bytes=1)
    good, bad = pa.table({"id": [1, 2]}), pa.table({"id": pa.array([None, 3, None], pa.int64())})
    with pytest.raises(Invalid) as refused:
        stage_in_process(target, pa.concat_tables([bad, good, bad]), storage)
    assert refused.value.facts == {"column": "id", "count": 4}
    assert list(storage.list(target.folder)) == []


def test_files_end_at_the_target_size() -> None:
    storage = Storage({})
    text = "id long, s string"
    target = target_of(text, target_file_bytes=200_000)
    table = pa.table({"id": range(120_000), "s": [f"{i * 2654435761 % 2**32:x}" for i in range(120_000)]})
    batches = pa.Table.from_batches(table.to_batches(max_chunksize=1000))
    records = stage_in_process(target, batches, storage)
    assert len(records) > 2
    assert all(200_000 <= record.size_bytes < 400_000 for record in records[:-1])
    assert [row["id"] for row in read_all(storage, target, records, text)] == list(range(120_000))
    assert {entry.size_bytes for entry in storage.list(target.folder)} == {record.size_bytes for record in records}


def test_rows_are_sorted_by_the_tables_order() -> None:
    text = "id long, k string"
    order = sort_order(table_schema(text), ["k desc", "id"]).model_dump_json()
    storage, target = Storage({}), target_of(text, sort_json=order)
    records = stage_in_process(target, [{"id": 3, "k": "a"}, {"id": 1, "k": "b"}, {"id": 2, "k": "a"}], storage)
    assert [row["id"] for row in read_all(storage, target, records, text)] == [1, 2, 3]


def test_an_unknown_codec_is_refused() -> None:
    target = target_of("id long", properties={"write.parquet.compression-codec": "zip"})
    with pytest.raises(Invalid, match="codec"):
        stage_in_process(target, [{"id": 1}], Storage({}))


def test_a_failing_storage_leaves_no_name() -> None:
    class Full(Storage):
        writes = 0

        def writer(self, location: str, held: Any = None) -> Any:
            Full.writes += 1
            if Full.writes == 3:
                raise OSError("disk full")
            return super().writer(location, held)

    storage = Full({})
    schema = table_schema("id long, k long")
    spec = partition_spec(schema, ["k"])
    target = StageTarget("memory://lake/full", schema.model_dump_json(), spec.model_dump_json())
    with pytest.raises(OSError, match="disk full"):
        stage_in_process(target, [{"id": i, "k": i} for i in range(5)], storage)
    assert Full.writes == 3
    # Those that were closed before have no name either: files of one call appear together.
    assert list(storage.list(target.folder)) == []


def test_a_target_travels() -> None:
    target = target_of("id long", properties={"a": "b"})
    assert pickle.loads(pickle.dumps(target)) == target


def test_old_files_read_with_the_schema_of_today() -> None:
    storage = Storage({})
    old = target_of("a int, s struct<x:int>, gone string, l array<struct<v:int>>")
    rows = [{"a": 1, "s": {"x": 2}, "gone": "g", "l": [{"v": 1}, None]}, {"a": None, "s": None, "l": None}]
    (record,) = stage_in_process(old, rows, storage)
    was = table_schema("a int, s struct<x:int>, gone string, l array<struct<v:int>>")
    now = was.model_dump_json()
    # The same ids under other names, wider types, new fields: what schema evolution leaves behind.
    for before, after in (
        ('"name":"a","type":"int"', '"name":"renamed","type":"long"'),
        ('"name":"x","type":"int"', '"name":"xx","type":"long"'),
    ):
        assert before in now
        now = now.replace(before, after)
    fields = [field for field in user_fields(type(was).model_validate_json(now)) if field.name != "gone"]
    extra = table_schema("z string, s struct<x:int>").fields[0].model_copy(update={"field_id": 99})
    batches = list(read_file(storage, record.path, [extra, *reversed(fields)]))
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {"z": None, "l": [{"v": 1}, None], "s": {"xx": 2}, "renamed": 1},
        {"z": None, "l": None, "s": None, "renamed": None},
    ]
    assert batches[0].schema.field("renamed").type == pa.int64()
