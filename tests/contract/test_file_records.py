"""A file that a manifest names, as the record that its writer made: nothing of it is lost either way."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

from floodmark.commit.manifests import data_file, record_of
from floodmark.model import FileRecord
from tests.conftest import Place

PARTITIONS = ["day(ts)", "bucket(4, id)", "truncate(2, name)", "amount", "born", "flag"]
SCHEMA = "id long not null, name string, ts timestamp, amount decimal(9,2), born date, flag boolean"


def test_records_of_manifest_entries_make_the_same_entries_again(place: Place) -> None:
    moment = datetime(2024, 2, 29, 12, tzinfo=UTC)
    rows = [
        {"id": 1, "name": "ähnlich", "ts": moment, "amount": Decimal("-3.50"), "born": date(1969, 7, 20), "flag": True},
        {"id": 2, "name": None, "ts": None, "amount": None, "born": None, "flag": None},
    ]
    with place.open(create=True) as lake:
        lake.create_table("people", SCHEMA, partition=PARTITIONS)
        lake.append("people", rows)
    with place.open() as lake:
        files, head = lake.catalog.files, lake.catalog.history.head("people")
        metadata = files.metadata(head.metadata_location)
        found = [one.data_file for manifest in files.manifests(head.manifest_list) for one in files.entries(manifest)]
        assert len(found) == 2
        for file in found:
            record = record_of(file, metadata)
            assert FileRecord.from_json(record.to_json()) == record
            again = data_file(record, metadata, file.spec_id)
            assert record_of(again, metadata) == record
            assert list(again.partition) == list(file.partition)
            assert (again.file_path, again.record_count) == (file.file_path, file.record_count)
            assert (again.lower_bounds, again.upper_bounds) == (file.lower_bounds, file.upper_bounds)
            assert again.null_value_counts == file.null_value_counts
