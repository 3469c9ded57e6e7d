"""Every kind of store against the storage contract and the contract of faults."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from floodmark.storage import Storage, join
from floodmark.testing.fault_contract import FaultContract
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.storage_contract import StorageContract


class TestStorage(StorageContract):
    @pytest.fixture
    def storage(self, options: dict[str, str]) -> Storage:
        return Storage(options)


class TestStorageWithoutAFault(StorageContract):
    """The wrapper passes the contract too: what it adds is the fault and nothing else."""

    @pytest.fixture
    def storage(self, options: dict[str, str]) -> Storage:
        return FaultyStorage(options)


class TestFaults(FaultContract):
    pass


def test_parquet_is_written_into_a_stream_and_read_from_a_reader(options: dict[str, str], root: str) -> None:
    storage = Storage(options)
    table = pa.table({"id": list(range(5000)), "text": [f"row {number}" for number in range(5000)]})
    location = join(root, "data/x.parquet")
    with storage.writer(location) as stream, pq.ParquetWriter(stream, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=1000):
            writer.write_batch(batch)
    assert stream.tell() == storage.size(location)
    with storage.open_input(location) as reader:
        assert pq.read_table(reader).equals(table)
