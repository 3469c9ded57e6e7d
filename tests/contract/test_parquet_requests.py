"""What reading a part of a Parquet file costs: real requests to S3, counted by a server in between."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from floodmark.errors import Corrupt
from floodmark.rows.column_chunks import chunk_start, prefetch
from floodmark.storage import RangeReader, Storage, join
from floodmark.testing.s3 import S3Server
from tests.counting import Counting, counting

COLUMNS = [f"c{number}" for number in range(10)]
GROUPS = 20
GROUP_ROWS = 8192


@pytest.fixture
def between(s3_server: S3Server) -> Iterator[Counting]:
    with counting(s3_server) as server:
        yield server


def put_file(storage: Storage, location: str) -> tuple[pa.Table, int]:
    """A file of `GROUPS` row groups; its rows and size."""
    chance = np.random.default_rng(1)
    rows = pa.table({name: chance.integers(0, 2**60, GROUPS * GROUP_ROWS) for name in COLUMNS})
    with storage.writer(location) as stream:
        pq.write_table(rows, stream, row_group_size=GROUP_ROWS, compression="none", use_dictionary=False)
    return rows, stream.tell()


def read_groups(stream: RangeReader, groups: list[int], columns: list[str] | None) -> pa.Table:
    with pq.ParquetFile(stream) as parquet:
        prefetch(stream, parquet.metadata, groups, columns)
        return pa.Table.from_batches(parquet.iter_batches(row_groups=groups, columns=columns, batch_size=GROUP_ROWS))


@pytest.mark.parametrize(("columns", "requests"), [(["c2", "c5"], 2), (["c0", "c9"], 3)])
def test_two_columns_of_one_row_group_are_two_or_three_requests(
    s3_server: S3Server, between: Counting, columns: list[str], requests: int
) -> None:
    location = f"s3://{s3_server.make_bucket()}/x.parquet"
    rows, size_bytes = put_file(Storage(s3_server.options), location)
    storage = Storage(between.options)
    with storage.open_input(location, size_bytes) as stream:
        found = read_groups(stream, [7], columns)
    assert found.equals(rows.slice(7 * GROUP_ROWS, GROUP_ROWS).select(columns))
    # The end with the footer, and both columns, with what is between them if that is little; no HEAD.
    assert between.seen == {"GET": requests}
    assert storage.counters.total == requests
    assert storage.counters.bytes_read < 0.1 * size_bytes


def test_one_column_of_all_row_groups_is_read_without_the_others(s3_server: S3Server) -> None:
    location = f"s3://{s3_server.make_bucket()}/x.parquet"
    storage = Storage(s3_server.options)
    rows, size_bytes = put_file(storage, location)
    with storage.open_input(location, size_bytes) as stream:
        assert read_groups(stream, list(range(GROUPS)), ["c3"]).equals(rows.select(["c3"]))
    assert storage.counters.bytes_read < 0.2 * size_bytes


def test_an_unknown_size_costs_no_request(s3_server: S3Server, between: Counting) -> None:
    location = f"s3://{s3_server.make_bucket()}/x.parquet"
    rows, _ = put_file(Storage(s3_server.options), location)
    storage = Storage(between.options)
    with storage.open_input(location) as stream:
        assert read_groups(stream, [0], None).equals(rows.slice(0, GROUP_ROWS))
    assert between.seen == {"GET": 2}


def test_groups_far_apart_are_fetched_once_each(s3_server: S3Server, between: Counting) -> None:
    location = f"s3://{s3_server.make_bucket()}/x.parquet"
    rows, size_bytes = put_file(Storage(s3_server.options), location)
    storage = Storage(between.options)
    with storage.open_input(location, size_bytes) as stream:
        found = read_groups(stream, [0, 10, 19], ["c0"])
    assert found["c0"].to_pylist() == [
        value for group in (0, 10, 19) for value in rows["c0"].slice(group * GROUP_ROWS, GROUP_ROWS).to_pylist()
    ]
    assert between.seen == {"GET": 4}


def test_a_chunk_begins_at_its_dictionary() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"few": ["a", "b"] * 500, "n": range(1000)}), sink, use_dictionary=["few"])
    group = pq.read_metadata(pa.BufferReader(sink.getvalue())).row_group(0)
    assert chunk_start(group.column(0)) == 4
    assert chunk_start(group.column(0)) + group.column(0).total_compressed_size == chunk_start(group.column(1))


def test_nested_columns_are_fetched_whole(options: dict[str, str], root: str) -> None:
    storage, location = Storage(options), join(root, "nested.parquet")
    count = 200_000
    rows = pa.table(
        {
            "a": pa.array(range(count)),
            "s": pa.array([{"x": at, "y": [str(at)]} for at in range(count)]),
            "z": pa.array([b"12345678"] * count),
        }
    )
    with storage.writer(location) as stream:
        pq.write_table(rows, stream, row_group_size=count // 4)
    with storage.open_input(location, stream.tell()) as reader:
        with pq.ParquetFile(reader) as parquet:
            prefetch(reader, parquet.metadata, [0, 2], ["s"])
            before = storage.counters.snapshot()
            found = pa.Table.from_batches(parquet.iter_batches(row_groups=[0, 2], columns=["s"]))
        # On a local disk nothing is fetched before.
        assert not reader.is_remote or storage.counters.difference(before).total == 0
    quarter = count // 4
    assert found["s"].to_pylist() == [
        *rows["s"].slice(0, quarter).to_pylist(),
        *rows["s"].slice(2 * quarter, quarter).to_pylist(),
    ]


@pytest.mark.parametrize("change", ["cut", "longer", "another"])
def test_a_data_file_of_another_size_is_corrupt_before_it_is_read(
    options: dict[str, str], root: str, change: str
) -> None:
    storage, location = Storage(options), join(root, "x.parquet")
    _, size_bytes = put_file(storage, location)
    data = storage.read(location)
    storage.put(location, {"cut": data[:-1], "longer": data + data[-8:], "another": data[: len(data) // 2]}[change])
    with pytest.raises(Corrupt, match="size"):
        storage.open_input(location, size_bytes)
