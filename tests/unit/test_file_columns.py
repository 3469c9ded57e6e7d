"""Columns of manifests say what PyIceberg's entries say, whoever wrote the manifest; what is damaged is Corrupt."""

from __future__ import annotations

import bz2
import io
import json
import random
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
import zstandard
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    UUIDType,
)

from floodmark.commit.file_columns import ColumnsRemembered, FileColumns, PlannedDataFile, columns_of
from floodmark.commit.manifest_rows import pairs, read_manifest
from floodmark.commit.manifests import data_file, record_of, write_added, write_list, write_merged, write_rest
from floodmark.commit.metadata import MetadataFiles
from floodmark.errors import Corrupt, NotFound
from floodmark.model import FileRecord
from floodmark.storage import Storage
from floodmark.testing.faults import FaultyStorage
from tests.unit.test_adopt import State, evolved, moment  # noqa: F401
from tests.unit.test_where import CHECKED, PARTITIONS, Staged, damaged, random_rows

SNAPSHOT = 77
MAPS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")


def plain(place: int, value: Any) -> Any:
    """A value of a data file. A file without a map says as little as one with an empty map."""
    if 6 <= place < 6 + len(MAPS):
        return dict(value or {})
    return list(value) if isinstance(value, Record) else value


def same(files: MetadataFiles, manifest: ManifestFile) -> FileColumns:
    """The columns, which have been compared with PyIceberg's entries, value by value."""
    entries, columns = files.entries(manifest), files.columns(manifest)
    assert columns.count == len(entries)
    for at, entry in enumerate(entries):
        ours, theirs = PlannedDataFile(columns, at), entry.data_file
        assert columns.sequence(at) == entry.sequence_number
        assert (ours, hash(ours), ours.spec_id) == (theirs, hash(theirs), theirs.spec_id)
        assert list(map(plain, range(16), ours)) == list(map(plain, range(16), theirs))
        for name in ("content", "file_path", "file_format", "record_count", "file_size_in_bytes"):
            assert getattr(ours, name) == getattr(theirs, name)
        for name in MAPS:
            assert getattr(ours, name) == dict(getattr(theirs, name) or {})
        assert list(ours.partition) == list(theirs.partition)
        for name in ("key_metadata", "split_offsets", "equality_ids", "sort_order_id"):
            assert getattr(ours, name) == getattr(theirs, name)
    return columns


def listed(files: MetadataFiles, folder: Path, *manifests: ManifestFile) -> tuple[ManifestFile, ...]:
    """The manifests as a published list has them."""
    location = f"file://{folder}/{uuid.uuid4()}.avro"
    write_list(files.io, location, SNAPSHOT, None, 9, manifests)
    return files.manifests(location)


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda partition: "+".join(partition) or "none")
def test_our_manifests_new_merged_and_rewritten(tmp_path: Path, partition: tuple[str, ...]) -> None:
    table, chance = Staged(tmp_path, CHECKED, partition), random.Random(repr(partition))
    staged = [one for nulls in (0.0, 0.5, 1.0) for one in table.stage(random_rows(chance, 6, nulls))]
    records = [
        replace(version, path=f"{version.path}-{number}")
        for record in staged
        for number, version in enumerate(damaged(record))
    ]
    files = MetadataFiles(table.storage)
    new, _ = write_added(files.io, f"file://{tmp_path}/new.avro", table.metadata, 0, SNAPSHOT, records)
    (new,) = listed(files, tmp_path, new)
    entries = files.entries(new)
    merged = write_merged(files.io, f"file://{tmp_path}/merged.avro", table.metadata, 0, SNAPSHOT, entries)
    gone = {entry.data_file.file_path for entry in entries[::2]}
    rest = write_rest(files.io, f"file://{tmp_path}/rest.avro", table.metadata, 0, SNAPSHOT, entries, gone)
    all_gone = {entry.data_file.file_path for entry in entries}
    none = write_rest(files.io, f"file://{tmp_path}/none.avro", table.metadata, 0, SNAPSHOT, entries, all_gone)
    for manifest in (new, *listed(files, tmp_path, merged, rest, none)):
        columns = same(files, manifest)
        for at in range(columns.count):
            # As merges of branches do: the file becomes a record again, and the record an entry.
            record = record_of(PlannedDataFile(columns, at), table.metadata)
            assert record_of(data_file(record, table.metadata, 0), table.metadata) == record
            assert record == next(one for one in records if one.path == record.path)
    assert files.columns(listed(files, tmp_path, none)[0]).count == 0


def test_manifests_of_pyiceberg_of_both_formats(moment: State) -> None:  # noqa: F811
    files = MetadataFiles(Storage())
    for manifest in files.manifests(moment.head.manifest_list):
        same(files, manifest)


KINDS: list[tuple[PrimitiveType, list[Any]]] = [
    (BooleanType(), [True, False]),
    (IntegerType(), [-(2**31), 0, 2**31 - 1]),
    (LongType(), [-(2**63), 0, 2**63 - 1]),
    (FloatType(), [-1.5, 0.0, float("inf")]),
    (DoubleType(), [-1.5, 0.0, float("inf")]),
    (DateType(), [-719162, 0, 2932896]),
    (TimestampType(), [-1, 0, 2**60]),
    (StringType(), ["", "é", "😀" * 20]),
    (BinaryType(), [b"", b"\xff\x00"]),
    (FixedType(3), [b"abc", b"\xff\x00\x01"]),
    (DecimalType(9, 2), [Decimal("-3.50"), Decimal("9999999.99")]),
    (DecimalType(38, 10), [Decimal(f"-{'9' * 28}.{'9' * 10}"), Decimal("0E-10")]),
    (UUIDType(), [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)]),
]


def partitioned(folder: Path, kind: PrimitiveType, values: Sequence[Any], version: int) -> ManifestFile:
    """A manifest of files with these partition values, and a bucket each."""
    schema = Schema(NestedField(1, "c", kind, required=False), NestedField(2, "id", LongType(), required=False))
    spec = PartitionSpec(
        PartitionField(1, 1000, IdentityTransform(), "p"), PartitionField(2, 1001, BucketTransform(4), "b"), spec_id=3
    )
    entries = [
        ManifestEntry.from_args(
            status=ManifestEntryStatus.ADDED, snapshot_id=SNAPSHOT, sequence_number=None, file_sequence_number=None,
            data_file=DataFile.from_args(
                content=DataFileContent.DATA, file_path=f"file:///t/{number}.parquet", file_format=FileFormat.PARQUET,
                partition=Record(value, number % 4), record_count=1, file_size_in_bytes=10, column_sizes={},
                value_counts={}, null_value_counts={}, nan_value_counts={}, lower_bounds={}, upper_bounds={},
                block_size_in_bytes=1,
            ),
        )
        for number, value in enumerate(values)
    ]  # fmt: skip
    output = MetadataFiles(Storage()).io.new_output(f"file://{folder}/m.avro")
    with write_manifest(1 if version == 1 else 2, spec, schema, output, SNAPSHOT, "deflate") as writer:
        for entry in entries:
            writer.add_entry(entry)
    manifest = writer.to_manifest_file()
    manifest.sequence_number = 0 if version == 1 else 4
    return manifest


def buckets_and_values(columns: FileColumns) -> list[list[Any]]:
    return [list(PlannedDataFile(columns, at).partition) for at in range(columns.count)]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=lambda one: str(one) if isinstance(one, PrimitiveType) else "")
@pytest.mark.parametrize("version", [1, 2])
def test_partition_values_of_every_type(tmp_path: Path, kind: PrimitiveType, values: list[Any], version: int) -> None:
    columns = same(MetadataFiles(Storage()), partitioned(tmp_path, kind, [*values, None], version))
    assert buckets_and_values(columns) == [[value, at % 4] for at, value in enumerate([*values, None])]


def test_partition_values_keep_the_precision_that_pyiceberg_loses(tmp_path: Path) -> None:
    """PyIceberg's compiled decoder returns doubles with the precision of floats."""
    columns = MetadataFiles(Storage()).columns(partitioned(tmp_path, DoubleType(), [0.1, 1e300], 2))
    assert buckets_and_values(columns) == [[0.1, 0], [1e300, 1]]


# ── manifests of other engines ──


def container(meta: dict[str, bytes], blocks: Sequence[tuple[int, bytes]]) -> bytes:
    sync = bytes(range(16))
    head = b"".join(raw(key.encode()) + raw(value) for key, value in meta.items())
    body = b"".join(number(count) + raw(block) + sync for count, block in blocks)
    return b"Obj\x01" + number(len(meta)) + head + number(0) + sync + body


def number(value: int) -> bytes:
    bits, found = (value << 1) ^ (value >> 63), b""
    while bits > 0x7F:
        found += bytes([bits & 0x7F | 0x80])
        bits >>= 7
    return found + bytes([bits])


def raw(value: bytes) -> bytes:
    return number(len(value)) + value


def deflate(data: bytes) -> bytes:
    making = zlib.compressobj(wbits=-15)
    return making.compress(data) + making.flush()


def snappy(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="snappy", asbytes=True)) + struct.pack(">I", zlib.crc32(data))


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "null": bytes,
    "deflate": deflate,
    "snappy": snappy,
    "zstandard": zstandard.ZstdCompressor().compress,
    "bzip2": bz2.compress,
}


class Manifest:
    """A manifest of ours, to be written again in other ways."""

    def __init__(self, folder: Path, files: int = 7) -> None:
        self.folder, self.table = folder, Staged(folder, CHECKED, ("s", "bucket(3, id)"))
        chance = random.Random(files)
        records = [one for _ in range(files) for one in self.table.stage(random_rows(chance, 1, 0.2))]
        self.files = MetadataFiles(self.table.storage)
        location = f"file://{folder}/ours.avro"
        manifest, _ = write_added(self.files.io, location, self.table.metadata, 0, SNAPSHOT, records)
        (self.manifest,) = listed(self.files, folder, manifest)
        self.data = self.table.storage.read(location)
        reader = fastavro.reader(io.BytesIO(self.data))
        self.meta = {key: value.encode() for key, value in reader.metadata.items()}
        self.schema: dict[str, Any] = json.loads(reader.metadata["avro.schema"])
        self.rows = [dict(one) for one in reader if isinstance(one, dict)]
        blocks = fastavro.block_reader(io.BytesIO(self.data))
        self.blocks = [bytes(block.bytes_.getvalue()) for block in blocks]

    def put(self, data: bytes) -> ManifestFile:
        location = f"file://{self.folder}/{uuid.uuid4()}.avro"
        self.table.storage.put(location, data)
        moved = ManifestFile(*self.manifest._data)
        moved._data[:2] = [location, len(data)]
        return moved

    def written(self, rows: Sequence[dict[str, Any]], schema: dict[str, Any]) -> bytes:
        stream = io.BytesIO()
        fastavro.writer(stream, fastavro.parse_schema(schema), list(rows), codec="deflate")
        return stream.getvalue()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("together", [1, 3, 100])
def test_every_codec_and_any_number_of_entries_in_a_block(tmp_path: Path, codec: str, together: int) -> None:
    ours = Manifest(tmp_path)
    groups = [ours.blocks[start : start + together] for start in range(0, len(ours.blocks), together)]
    blocks = [(len(group), CODECS[codec](b"".join(group))) for group in groups]
    data = container({**ours.meta, "avro.codec": codec.encode()}, blocks)
    manifest = ours.put(data)
    if codec == "snappy":  # PyIceberg needs a package for it
        assert read_manifest(data, "theirs") == read_manifest(ours.data, "ours")
    else:
        same(ours.files, manifest)


def fields_of(schema: dict[str, Any]) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = next(one for one in schema["fields"] if one["field-id"] == 2)["type"]["fields"]
    return fields


def test_fields_are_known_by_their_ids_whatever_their_names_and_order(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    schema, rows = ours.schema, ours.rows
    fields_of(schema).reverse()
    schema["fields"].reverse()
    for field in fields_of(schema):
        field["name"] = f"field_{field['field-id']}"
    names = {one["field-id"]: one["name"] for one in fields_of(json.loads(ours.meta["avro.schema"]))}
    for row in rows:
        row["data_file"] = {f"field_{key}": row["data_file"][name] for key, name in names.items()}
    columns = same(ours.files, ours.put(ours.written(rows, schema)))
    assert columns.count == len(rows)


@pytest.mark.parametrize(
    "left_out",
    [[name] for name in MAPS]
    + [["split_offsets", "sort_order_id", "key_metadata", "equality_ids"], ["content"], list(MAPS)],
    ids=" ".join,
)
def test_fields_that_another_engine_leaves_out(tmp_path: Path, left_out: list[str]) -> None:
    ours = Manifest(tmp_path)
    fields_of(ours.schema)[:] = [one for one in fields_of(ours.schema) if one["name"] not in left_out]
    same(ours.files, ours.put(ours.written(ours.rows, ours.schema)))
    # The field exists, and single files have no value in it.
    again = Manifest(tmp_path)
    for row in again.rows[::2]:
        row["data_file"].update({name: None for name in left_out if name != "content"})
    same(again.files, again.put(again.written(again.rows, again.schema)))


def test_values_that_only_some_files_have(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    for at, row in enumerate(ours.rows):
        row["data_file"]["split_offsets"] = [4, 10**12] if at == 1 else None if at == 2 else [4]
        row["data_file"]["sort_order_id"] = at % 2
        row["data_file"]["key_metadata"] = b"key" if at == 3 else None
        row["data_file"]["record_count"] = 10**12 if at == 4 else at
        row["data_file"]["value_counts"] = [{"key": 10**9 + at, "value": 2**62}, {"key": 1, "value": at}]
        row["data_file"]["lower_bounds"] = [{"key": 1, "value": b"x" * (at * 100)}, {"key": 10**9, "value": b""}]
    same(ours.files, ours.put(ours.written(ours.rows, ours.schema)))


def test_sequences_are_inherited_as_iceberg_says(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    statuses = (ManifestEntryStatus.ADDED, ManifestEntryStatus.EXISTING, ManifestEntryStatus.DELETED)
    for at, row in enumerate(ours.rows):
        row["status"] = statuses[at % 3].value
        row["sequence_number"] = None if at < 3 else at
    data = ours.written(ours.rows, ours.schema)
    for own, expected in ((9, [9, None, 3, 4, 6]), (0, [0, 0, 3, 4, 6])):
        manifest = ours.put(data)
        manifest.sequence_number = own
        columns = same(ours.files, manifest)
        assert [columns.sequence(at) for at in range(columns.count)] == expected


def test_maps_in_several_blocks_and_with_their_length(tmp_path: Path) -> None:
    """Avro may cut an array into blocks, and may say of each how many bytes it has. None of our libraries does."""
    one = number(1) + number(3) + number(-4)  # counts are not negative, but nothing here depends on it
    other = number(2) + number(10**9) + number(2**62) + number(7) + number(8)
    sized = number(-1) + number(len(number(-9) + number(300))) + number(-9) + number(300)
    ours = Manifest(tmp_path, 1)
    (field,) = (one for one in fields_of(ours.schema) if one["name"] == "value_counts")
    schema = {"type": "record", "name": "manifest_entry", "fields": [{**field, "type": field["type"][1]}] * 1}
    meta = {"avro.schema": json.dumps(schema).encode()}
    entries = [one + other + sized + number(0), number(0), sized + number(0)]
    found = read_manifest(container(meta, [(2, entries[0] + entries[1]), (1, entries[2])]), "made by hand")
    places, keys, values = pairs(found.values[109])
    assert list(zip(places.tolist(), keys.tolist(), values.tolist(), strict=True)) == [
        (0, 3, -4), (0, 10**9, 2**62), (0, 7, 8), (0, -9, 300), (2, -9, 300),
    ]  # fmt: skip


# ── damage ──


def spoilt(chance: random.Random, data: bytes) -> Iterator[bytes]:
    for _ in range(400):
        found = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 6])):
            found[chance.randrange(len(found))] = chance.randrange(256)
        yield bytes(found[: chance.randrange(len(found))] if chance.random() < 0.2 else found)


@pytest.mark.parametrize("codec", ["null", "deflate", "snappy"])
def test_a_damaged_manifest_is_corrupt_and_nothing_else(tmp_path: Path, codec: str) -> None:
    ours = Manifest(tmp_path)
    data = container({**ours.meta, "avro.codec": codec.encode()}, [(7, CODECS[codec](b"".join(ours.blocks)))])
    assert read_manifest(data, "whole").count == 7
    refused = 0
    for damaged_data in spoilt(random.Random(codec), data):
        with suppress(Corrupt):
            columns_of(damaged_data, ours.manifest)
            continue
        refused += 1
    assert refused > 300


@pytest.mark.parametrize("size", [10**6, 2**31, 2**62])
def test_a_length_beyond_the_end_is_corrupt(tmp_path: Path, size: int) -> None:
    ours = Manifest(tmp_path, 1)
    path = ours.rows[0]["data_file"]["file_path"].encode()
    long = ours.blocks[0].replace(raw(path), number(size) + path)
    with pytest.raises(Corrupt, match="damaged"):
        read_manifest(container({**ours.meta, "avro.codec": b"null"}, [(1, long)]), "long")


def test_a_manifest_that_lacks_what_it_must_have_is_corrupt(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    fields_of(ours.schema)[:] = [one for one in fields_of(ours.schema) if one["name"] != "file_size_in_bytes"]
    with pytest.raises(Corrupt, match="lacks"):
        ours.files.columns(ours.put(ours.written(ours.rows, ours.schema)))


def test_delete_files_are_not_taken_for_data(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    ours.rows[3]["data_file"]["content"] = DataFileContent.POSITION_DELETES.value
    with pytest.raises(Corrupt, match="delete files"):
        ours.files.columns(ours.put(ours.written(ours.rows, ours.schema)))


def test_a_missing_manifest_is_missing_as_for_its_entries(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    gone = ours.put(ours.data)
    ours.table.storage.delete(gone.manifest_path)
    for ask in (ours.files.entries, ours.files.columns):
        with pytest.raises(NotFound) as refused:
            ask(gone)
        assert isinstance(refused.value, FileNotFoundError)


# ── what is remembered ──


def test_all_readers_of_the_process_share_what_one_has_read(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    first, other = MetadataFiles(Storage()), MetadataFiles(Storage())
    assert first.columns(ours.manifest) is other.columns(ours.manifest)
    assert other.io.storage.counters.bytes_read == 0
    # One with faults to inject reads for itself.
    faulty = MetadataFiles(FaultyStorage())
    assert faulty.columns(ours.manifest) is not first.columns(ours.manifest)
    assert faulty.columns(ours.manifest) is faulty.columns(ours.manifest)


def test_what_is_remembered_is_bounded_by_its_bytes(tmp_path: Path) -> None:
    ours = Manifest(tmp_path)
    size_bytes = columns_of(ours.data, ours.manifest).size_bytes
    remembered, reads = ColumnsRemembered(3 * size_bytes), list[int]()

    def ask(key: int) -> None:
        def read(_: str) -> bytes:
            reads.append(key)
            return ours.data

        remembered.of(key, ours.manifest, read)

    for key in (1, 2, 3, 1, 4, 1, 3, 4, 2):
        ask(key)
        assert remembered.size_bytes <= 3 * size_bytes
    assert reads == [1, 2, 3, 4, 2]
    little = ColumnsRemembered(size_bytes - 1)
    assert little.of(1, ours.manifest, lambda _: ours.data).count == 7
    assert little.size_bytes == 0


def test_a_file_takes_few_bytes(tmp_path: Path) -> None:
    table = Staged(tmp_path, "id long, ts timestamp, k string, amount double, n int", ("k",))
    row = {"id": 5, "k": "key-0", "amount": 1.5, "n": 3}
    records: list[FileRecord] = [
        replace(record, path=f"{record.path}-{number}", size_bytes=1000 + number % 700)
        for record in table.stage([row, {**row, "id": 9, "amount": 7.25}])
        for number in range(2000)
    ]
    files = MetadataFiles(table.storage)
    manifest, _ = write_added(files.io, f"file://{tmp_path}/m.avro", table.metadata, 0, SNAPSHOT, records)
    columns = files.columns(listed(files, tmp_path, manifest)[0])
    bounded = sum(one.lower is not None for one in columns.columns.values())
    assert bounded == 4
    assert columns.size_bytes <= columns.count * (200 + 24 * bounded)


def test_days_in_partitions_are_numbers(tmp_path: Path) -> None:
    table = Staged(tmp_path, CHECKED, ("day",))
    records = table.stage([{"day": date(1970, 1, 11)}])
    files = MetadataFiles(table.storage)
    manifest, _ = write_added(files.io, f"file://{tmp_path}/m.avro", table.metadata, 0, SNAPSHOT, records)
    (found,) = listed(files, tmp_path, manifest)
    assert list(PlannedDataFile(files.columns(found), 0).partition) == [10]
