"""Row groups: few enough rows to be skipped, few enough groups for a footer, and rows that repeat in dictionaries."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from floodmark import clock
from floodmark.errors import Invalid
from floodmark.model import FileRecord
from floodmark.rows.layout import partition_spec, sort_order
from floodmark.rows.project import read_file
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.staging.file_options import (
    CHUNK_BYTES_MIN,
    CHUNKS_MAX,
    GROUP_BYTES_MAX,
    GROUP_ROWS,
    GROUP_ROWS_MAX,
    KEYED_GROUP_ROWS_MAX,
    FileOptions,
    groups_max,
)
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.rows.staging.statistics import SPLIT_BYTES, split_offsets
from floodmark.storage import Storage
from floodmark.write.shape import plan_table

NARROW = "id long, n int"


def staged(text: str, rows: pa.Table, *, key: tuple[str, ...] = (), sort: tuple[str, ...] = (), **properties: str):
    schema = table_schema(text, key)
    target = StageTarget(
        f"memory://lake/{clock.new_id()}",
        schema.model_dump_json(),
        partition_spec(schema, []).model_dump_json(),
        sort_order(schema, sort).model_dump_json(),
        properties=properties,
    )
    storage = Storage({})
    (record,) = stage_in_process(target, rows, storage)
    return record, footer(storage, record), rows_of(storage, record, text)


def footer(storage: Storage, record: FileRecord) -> pq.FileMetaData:
    with storage.open_input(record.path) as stream:
        return pq.read_metadata(stream)


def rows_of(storage: Storage, record: FileRecord, text: str) -> pa.Table:
    return pa.Table.from_batches(list(read_file(storage, record.path, user_fields(table_schema(text)))))


def narrow(rows: int) -> pa.Table:
    return pa.table(
        {"id": pa.array(range(rows), pa.int64()), "n": pa.array([at % 7 for at in range(rows)], pa.int32())}
    )


def group_rows(metadata: pq.FileMetaData) -> list[int]:
    return [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]


def dictionaries(metadata: pq.FileMetaData) -> dict[str, bool]:
    group = metadata.row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    return {column.path_in_schema: "RLE_DICTIONARY" in column.encodings for column in columns}


@pytest.mark.parametrize(("key", "rows_max"), [((), GROUP_ROWS_MAX), (("id",), KEYED_GROUP_ROWS_MAX)])
def test_a_group_has_few_rows_fewer_in_a_table_with_a_key(key: tuple[str, ...], rows_max: int) -> None:
    record, metadata, rows = staged("id long not null, n int", narrow(100_000), key=key)
    assert max(group_rows(metadata)) <= rows_max
    assert metadata.num_row_groups == -(-100_000 // rows_max)
    assert max(group_rows(metadata)) - min(group_rows(metadata)) <= metadata.num_row_groups
    assert rows["id"].to_pylist() == list(range(100_000))
    assert (record.rows, record.value_counts, record.split_offsets) == (100_000, {1: 100_000, 2: 100_000}, (4,))


def test_every_group_has_statistics_that_tell_it_from_the_others() -> None:
    chance = pa.table({"id": [at * 7919 % 50_021 for at in range(50_000)], "n": pa.array([1] * 50_000, pa.int32())})
    _, metadata, _ = staged("id long not null, n int", chance, key=("id",), sort=("id",))
    found = [metadata.row_group(at).column(0).statistics for at in range(metadata.num_row_groups)]
    assert len(found) > 1
    assert all(one.has_min_max and one.null_count == 0 for one in found)
    assert all(one.max < other.min for one, other in pairwise(found)), "sorted over all groups"
    all_columns = [metadata.row_group(at).column(1) for at in range(metadata.num_row_groups)]
    assert all(column.is_stats_set and column.statistics.has_min_max for column in all_columns)


def test_a_table_property_sets_the_rows_of_a_group_however_small() -> None:
    _, metadata, rows = staged(NARROW, narrow(10), **{GROUP_ROWS: "3"})
    assert group_rows(metadata) == [3, 3, 3, 1]
    assert rows["id"].to_pylist() == list(range(10))


def test_rows_that_are_short_make_groups_of_more_rows_and_large_ones_of_fewer() -> None:
    # Bits: so few as usual would not be worth a group.
    _, metadata, _ = staged("ok boolean", pa.table({"ok": [True, False] * 100_000}))
    assert metadata.num_row_groups == 1
    large = pa.table({"id": range(2_000), "text": [f"{at}" * 5_000 for at in range(2_000)]})
    _, metadata, _ = staged("id long, text string", large)
    assert metadata.num_row_groups == -(-large.nbytes // GROUP_BYTES_MAX) > 1


@pytest.mark.parametrize("key", [(), ("id",)])
@pytest.mark.parametrize("columns", [1, 5, 200])
@pytest.mark.parametrize("row_bytes", [1, 40, 1_600, 100_000])
def test_groups_have_few_rows_but_not_too_few_bytes_in_a_column(
    key: tuple[str, ...], columns: int, row_bytes: int
) -> None:
    options = FileOptions.of({}, key=key)
    size_bytes = 64 * 1024 * 1024
    rows = options.rows_per_group(size_bytes // row_bytes, size_bytes, columns, 1_000_000)
    if rows * row_bytes > 2 * CHUNK_BYTES_MIN * columns:
        assert rows <= (KEYED_GROUP_ROWS_MAX if key else GROUP_ROWS_MAX)
        assert (rows - 1) * row_bytes <= GROUP_BYTES_MAX
    assert rows * row_bytes >= CHUNK_BYTES_MIN * columns // 2


@pytest.mark.parametrize("columns", [1, 3, 200, 5_000, 100_000])
def test_the_number_of_groups_of_a_file_is_limited_by_its_columns(columns: int) -> None:
    options = FileOptions.of({GROUP_ROWS: "10"})
    left, groups, buffers = groups_max(columns), 0, 200
    assert left * columns <= max(CHUNKS_MAX, columns)
    for _ in range(buffers):
        rows = options.rows_per_group(100_000, 64 << 20, columns, left)
        made = -(-100_000 // rows)
        left, groups = left - made, groups + made
    # At the end each buffer is one group.
    assert groups <= groups_max(columns) + buffers


def test_a_buffer_is_cut_into_even_groups() -> None:
    options = FileOptions.of({}, key=["id"])
    assert options.rows_per_group(KEYED_GROUP_ROWS_MAX, 1 << 20, 3, 1000) == KEYED_GROUP_ROWS_MAX
    assert options.rows_per_group(KEYED_GROUP_ROWS_MAX + 2, 1 << 20, 3, 1000) == KEYED_GROUP_ROWS_MAX // 2 + 1
    assert options.rows_per_group(0, 0, 3, 1000) == 1
    # Deletions files go by bytes alone.
    assert FileOptions(1 << 30).rows_per_group(1_000_000, 1 << 20, 3, 1000) == 1_000_000


def test_columns_whose_values_repeat_have_dictionaries_others_and_keys_have_none() -> None:
    text = "id long not null, unique double, few string, s struct<a:int,l:array<string>>, m map<string,int>"
    count = 20_000
    rows = pa.Table.from_pylist(
        [
            {"id": 5 * at, "unique": at / 3, "few": f"one of {at % 40}", "s": {"a": at, "l": ["x"]}}
            for at in range(count)
        ],
        pa.schema(
            [
                pa.field("id", pa.int64(), nullable=False),
                ("unique", pa.float64()),
                ("few", pa.string()),
                ("s", pa.struct([("a", pa.int32()), ("l", pa.list_(pa.string()))])),
                ("m", pa.map_(pa.string(), pa.int32())),
            ]
        ),
    )
    plain, keyed = staged(text, rows), staged(text, rows, key=("id",))
    for _, metadata, found in (plain, keyed):
        assert dictionaries(metadata) == {
            "id": False,
            "unique": False,
            "few": True,
            "s.a": True,
            "s.l.list.element": True,
            "m.key_value.key": True,
            "m.key_value.value": True,
        }
        assert found["s"].to_pylist() == rows["s"].to_pylist()


def test_a_key_has_no_dictionary_but_the_columns_of_a_longer_key_may_repeat() -> None:
    rows = pa.table({"id": [1] * 100, "n": pa.array(range(100), pa.int32())})
    assert dictionaries(staged("id long not null, n int not null", rows, key=("id",))[1]) == {"id": False, "n": False}
    both = staged("id long not null, n int not null", rows, key=("id", "n"))[1]
    assert dictionaries(both) == {"id": True, "n": False}


def test_small_groups_of_unique_values_take_no_more_room() -> None:
    chance = random.Random(1)
    ids = pa.array([chance.getrandbits(60) for _ in range(50_000)])
    small, large = (staged("id long", pa.table({"id": ids}), **{GROUP_ROWS: count})[0] for count in ("8192", "50000"))
    assert small.size_bytes < 1.02 * large.size_bytes


def test_files_can_be_split_only_where_it_is_worth_a_task() -> None:
    quarter = SPLIT_BYTES // 4
    assert split_offsets([4 + quarter * at for at in range(10)]) == (4, 4 + 4 * quarter, 4 + 8 * quarter)
    assert split_offsets([4]) == (4,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write.parquet.row-group-limit", "0"),
        ("write.parquet.row-group-limit", "many"),
        ("write.parquet.row-group-size-bytes", "-1"),
        ("write.parquet.row-group-size-bytes", "64 MB"),
        ("write.target-file-size-bytes", "1e9"),
        ("write.parquet.compression-level", "high"),
        ("write.parquet.compression-codec", "zip"),
    ],
)
def test_a_property_that_no_writer_understands_is_refused_when_the_table_is_made(name: str, value: Any) -> None:
    with pytest.raises(Invalid) as caught:
        plan_table("events", NARROW, properties={name: value})
    assert value in str(caught.value)
    assert caught.value.advice
