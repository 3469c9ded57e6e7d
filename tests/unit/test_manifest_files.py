"""Manifests and their lists, written with parts that are made once, are what PyIceberg itself writes, to the byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pyiceberg.manifest import ManifestEntry, ManifestFile, ManifestWriter, write_manifest, write_manifest_list
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate, update_table_metadata
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import ListType, LongType, NestedField, StringType, TimestampType

from floodmark.commit.manifests import write_added, write_list, write_merged, write_rest
from floodmark.commit.metadata import add_schema, add_snapshot, new_metadata
from floodmark.model import SNAPSHOTS_KEPT, FileRecord
from floodmark.storage import Storage
from floodmark.storage.fileio import LakeFileIO

Step = Callable[[ManifestWriter, ManifestEntry], object]

SNAPSHOT, PARENT = 77, 76
COLUMNS = (
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=False),
    NestedField(3, "at", TimestampType(), required=False),
    NestedField(4, "tags", ListType(5, StringType(), element_required=False), required=False),
)
PLAIN = PartitionSpec(spec_id=0)
BY_DAY = PartitionSpec(
    PartitionField(3, 1000, DayTransform(), "day"),
    PartitionField(1, 1001, BucketTransform(8), "bucket"),
    PartitionField(2, 1002, IdentityTransform(), "name"),
    spec_id=0,
)
# As a file's writer stores them: base64 of Iceberg's bytes of a day, a bucket and a name; null is a value too.
PARTITIONS: dict[str, tuple[str | None, ...]] = {"plain": (), "by day": ("MFAAAA==", "AwAAAA==", None)}
SPECS = {"plain": PLAIN, "by day": BY_DAY}


@pytest.fixture(autouse=True)
def same_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker between blocks is random."""
    monkeypatch.setattr(os, "urandom", lambda size: bytes(size))


def table(tmp_path: Path, layout: str) -> TableMetadata:
    metadata = new_metadata(
        f"file://{tmp_path}/t", "0b2c6a4e-3a94-4a7c-8c1a-5d6f7e8a9b0c", Schema(*COLUMNS), SPECS[layout],
        UNSORTED_SORT_ORDER, {},
    )  # fmt: skip
    assert metadata.specs()[0].fields == SPECS[layout].fields
    return metadata


def records(layout: str, count: int) -> list[FileRecord]:
    return [
        FileRecord(
            path=f"s3://bucket/t/data/{number}.parquet",
            rows=10 + number,
            size_bytes=1_000 + number,
            partition=PARTITIONS[layout],
            column_sizes={1: 80, 2: 90},
            value_counts={1: 10, 2: 10},
            null_counts={1: 0, 2: 3},
            nan_counts={},
            lower_bounds={1: "AAAAAAAAAAA=", 2: "YQ=="},
            upper_bounds={1: "CQAAAAAAAAA=", 2: "eg=="},
            split_offsets=(4,),
        )
        for number in range(count)
    ]


def theirs(
    io: LakeFileIO, location: str, metadata: TableMetadata, *steps: tuple[Step, Iterable[ManifestEntry]]
) -> tuple[ManifestFile, bytes]:
    output = io.new_output(location)
    with write_manifest(2, metadata.specs()[0], metadata.schema(), output, SNAPSHOT, "deflate") as writer:
        for step, entries in steps:
            for entry in entries:
                step(writer, entry)
    return writer.to_manifest_file(), io.storage.read(location)


def published(entries: list[ManifestEntry]) -> list[ManifestEntry]:
    """As a reader of a published manifest gets them."""
    return [
        ManifestEntry.from_args(
            status=entry.status,
            snapshot_id=PARENT,
            sequence_number=5,
            file_sequence_number=5,
            data_file=entry.data_file,
        )
        for entry in entries
    ]


@pytest.mark.parametrize("layout", SPECS)
def test_manifests_are_those_of_pyiceberg(tmp_path: Path, layout: str) -> None:
    io, metadata = LakeFileIO.over(Storage()), table(tmp_path, layout)
    location, other = f"file://{tmp_path}/ours.avro", f"file://{tmp_path}/theirs.avro"
    # Twice: the second time by the parts that the first one made.
    for _ in range(2):
        ours, entries = write_added(io, location, metadata, 0, SNAPSHOT, records(layout, 3))
        expected, data = theirs(io, other, metadata, (ManifestWriter.add_entry, entries))
        assert io.storage.read(location) == data
        assert ours._data[1:] == expected._data[1:]
        known = published(entries)
        write_merged(io, location, metadata, 0, SNAPSHOT, known)
        expected, data = theirs(io, other, metadata, (ManifestWriter.existing, known))
        assert io.storage.read(location) == data
        write_rest(io, location, metadata, 0, SNAPSHOT, known, [known[0].data_file.file_path])
        rest = (ManifestWriter.delete, known[:1]), (ManifestWriter.existing, known[1:])
        assert io.storage.read(location) == theirs(io, other, metadata, *rest)[1]


def test_a_table_with_another_schema_has_manifests_of_that_schema(tmp_path: Path) -> None:
    """The parts that are kept belong to a schema and a spec, not to a table."""
    io, metadata = LakeFileIO.over(Storage()), table(tmp_path, "by day")
    wider = add_schema(
        metadata, Schema(*metadata.schema().fields, NestedField(9, "more", LongType(), required=False), schema_id=1)
    )
    location, other = f"file://{tmp_path}/ours.avro", f"file://{tmp_path}/theirs.avro"
    for state in (metadata, wider, metadata):
        _, entries = write_added(io, location, state, 0, SNAPSHOT, records("by day", 1))
        _, data = theirs(io, other, state, (ManifestWriter.add_entry, entries))
        assert io.storage.read(location) == data
        assert (b'"more"' in data) is (state is wider)


@pytest.mark.parametrize("parent", [None, PARENT])
def test_lists_are_those_of_pyiceberg(tmp_path: Path, parent: int | None) -> None:
    io, metadata = LakeFileIO.over(Storage()), table(tmp_path, "by day")
    fresh, _ = write_added(io, f"file://{tmp_path}/m.avro", metadata, 0, SNAPSHOT, records("by day", 2))
    location, other = f"file://{tmp_path}/ours.avro", f"file://{tmp_path}/theirs.avro"
    for sequence in (6, 7):
        listed = write_list(io, location, SNAPSHOT, parent, sequence, [fresh])
        assert (listed[0].sequence_number, fresh.sequence_number) == (sequence, -1)
        copied = ManifestFile(*fresh._data)
        with write_manifest_list(2, io.new_output(other), SNAPSHOT, parent, sequence, "deflate") as writer:
            writer.add_manifests([copied])
        assert io.storage.read(location) == io.storage.read(other)


def test_metadata_after_commits_is_that_of_pyiceberg(tmp_path: Path) -> None:
    """Made from its parts; what an append adds to it, and its JSON."""
    ours = theirs = table(tmp_path, "by day")
    for number in range(1, SNAPSHOTS_KEPT + 1):
        snapshot = Snapshot(
            snapshot_id=number,
            parent_snapshot_id=number - 1 or None,
            sequence_number=number,
            timestamp_ms=ours.last_updated_ms + 1,
            manifest_list=f"file://{tmp_path}/{number}.avro",
            summary=Summary(Operation.APPEND, **{"total-records": str(number)}),
            schema_id=0,
        )
        location = f"file://{tmp_path}/{number}.metadata.json"
        head = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=number)  # type: ignore[call-arg]
        ours = add_snapshot(ours, snapshot, branch="main", previous_location=location)
        theirs = update_table_metadata(theirs, (AddSnapshotUpdate(snapshot=snapshot), head), metadata_location=location)
        assert ours.model_dump_json(exclude_none=True) == theirs.model_dump_json(exclude_none=True)
