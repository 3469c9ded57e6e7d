"""Manifests: the files of a commit, and how lists of them stay short.

Many small manifests are merged by size class: as soon as MERGE_AT of one class exist, they become one of the next
class. So a table of n commits has O(log n) manifests, and each file's entry is rewritten O(log n) times, whatever the
order. Entries keep their sequence numbers; only manifests of adds and carried files are merged.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Final, TypeVar

from cachetools import LRUCache, cached
from pyiceberg.avro.codecs import AVRO_CODEC_KEY
from pyiceberg.avro.codecs.deflate import DeflateCodec
from pyiceberg.avro.encoder import BinaryEncoder
from pyiceberg.avro.file import (
    _SCHEMA_KEY,
    MAGIC,
    META_SCHEMA,
    SYNC_SIZE,
    AvroFileHeader,
    AvroOutputFile,
)
from pyiceberg.avro.resolver import construct_writer, resolve_writer
from pyiceberg.avro.writer import Writer
from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.io import FileIO, OutputFile
from pyiceberg.manifest import (
    DEFAULT_READ_VERSION,
    MANIFEST_LIST_FILE_SCHEMAS,
    UNASSIGNED_SEQ,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestListWriterV2,
    ManifestWriterV2,
)
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import L, Record, StructProtocol
from pyiceberg.types import PrimitiveType
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

from floodmark.errors import Corrupt
from floodmark.model import FileRecord

MERGE_AT = 16
COMPRESSION: Final = "deflate"
FORMS_KEPT = 512
# Of lists, about 400 bytes each.
ENTRIES_KEPT = 4_096

D = TypeVar("D", bound=StructProtocol)


# ── Avro, by PyIceberg's writers ──


@dataclass(frozen=True)
class _AvroForm:
    """How records of one schema are written. PyIceberg makes this for each file, which takes longer than its records.

    Writers have no state: threads share them.
    """

    writer: Writer
    schema_text: str

    @classmethod
    def of(cls, records: Schema, file: Schema, name: str) -> _AvroForm:
        text = json.dumps(AvroSchemaConversion().iceberg_to_avro(file, schema_name=name))
        return cls(resolve_writer(record_schema=records, file_schema=file), text)


class _AvroFile(AvroOutputFile[D]):
    """PyIceberg's Avro file, with a form that is made already."""

    def __init__(self, output_file: OutputFile, form: _AvroForm, metadata: dict[str, str]) -> None:
        self.output_file = output_file
        self.sync_bytes = os.urandom(SYNC_SIZE)
        self.writer = form.writer
        self.metadata = {**metadata, _SCHEMA_KEY: form.schema_text, AVRO_CODEC_KEY: COMPRESSION}

    def _write_header(self) -> None:
        _header_writer().write(self.encoder, AvroFileHeader(MAGIC, self.metadata, self.sync_bytes))


@cache
def _header_writer() -> Writer:
    return construct_writer(META_SCHEMA)


class _Manifest(ManifestWriterV2):
    def __init__(self, io: FileIO, location: str, metadata: TableMetadata, spec_id: int, snapshot: int) -> None:
        spec, output = metadata.specs()[spec_id], io.new_output(location)
        super().__init__(spec, metadata.schema(), output, snapshot, COMPRESSION)

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        form = _manifest_form(self._schema, self._spec, self)
        return _AvroFile(self._output_file, form.avro, form.meta)

    def new_form(self) -> _ManifestForm:
        avro = _AvroForm.of(self._with_partition(DEFAULT_READ_VERSION), self._with_partition(2), "manifest_entry")
        return _ManifestForm(avro, self._meta, self._schema, self._spec)


@dataclass(frozen=True)
class _ManifestForm:
    """What all manifests of a schema and a spec have in common. It holds both: the cache knows them by their ids."""

    avro: _AvroForm
    meta: dict[str, str]
    schema: Schema
    spec: PartitionSpec


@cached(LRUCache(maxsize=FORMS_KEPT), key=lambda schema, spec, _: (id(schema), id(spec)), lock=threading.Lock())
def _manifest_form(schema: Schema, spec: PartitionSpec, manifest: _Manifest) -> _ManifestForm:
    return manifest.new_form()


class _ManifestList(ManifestListWriterV2):
    def __enter__(self) -> _ManifestList:
        self._writer = _ListFile(self._output_file, _list_form(), self._meta)
        self._writer.__enter__()
        return self

    def prepare_manifest(self, manifest_file: ManifestFile) -> ManifestFile:
        """The manifest with its sequences.

        PyIceberg's shallow copy shares them with the original: without a copy of our own, a manifest that is used again
        after a lost race would keep the sequence of the attempt that lost (I5).
        """
        if UNASSIGNED_SEQ not in (manifest_file.sequence_number, manifest_file.min_sequence_number):
            return manifest_file
        return super().prepare_manifest(ManifestFile(*manifest_file._data))

    def write(self, manifests: Iterable[ManifestFile]) -> tuple[ManifestFile, ...]:
        prepared = [self.prepare_manifest(manifest) for manifest in manifests]
        self._writer.write_block(prepared)
        return tuple(prepared)


class _ListFile(_AvroFile[ManifestFile]):
    """A list repeats nearly all entries of the list before it: each is encoded once, and kept."""

    def write_block(self, objects: list[ManifestFile]) -> None:
        compressed, size_bytes = DeflateCodec.compress(b"".join(_encoded(manifest) for manifest in objects))
        self.encoder.write_int(len(objects))
        self.encoder.write_int(size_bytes)
        self.encoder.write(compressed)
        self.encoder.write(self.sync_bytes)


def _identity(manifest: ManifestFile) -> tuple[str, int, int, int]:
    """No path is used twice, and what a list says of a manifest changes only with the sequences that it is given."""
    sequences = manifest.sequence_number, manifest.min_sequence_number
    return manifest.manifest_path, manifest.manifest_length, *sequences


@cached(LRUCache(maxsize=ENTRIES_KEPT), key=_identity, lock=threading.Lock())
def _encoded(manifest: ManifestFile) -> bytes:
    stream = BytesIO()
    _list_form().writer.write(BinaryEncoder(stream), manifest)
    return stream.getvalue()


@cache
def _list_form() -> _AvroForm:
    schemas = MANIFEST_LIST_FILE_SCHEMAS
    return _AvroForm.of(schemas[DEFAULT_READ_VERSION], schemas[2], "manifest_file")


# ── files and their entries ──


def data_file(record: FileRecord, metadata: TableMetadata, spec_id: int) -> DataFile:
    """A file record as Iceberg's manifest entry."""
    partition_fields = metadata.specs()[spec_id].partition_type(metadata.schema()).fields
    if len(partition_fields) != len(record.partition):
        raise Corrupt("a file's partition does not fit its table's spec", path=record.path, spec_id=spec_id)
    file = DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=record.path,
        file_format=FileFormat.PARQUET,
        partition=Record(
            *(_value(field.field_type, value) for field, value in zip(partition_fields, record.partition, strict=True))
        ),
        record_count=record.rows,
        file_size_in_bytes=record.size_bytes,
        column_sizes=record.column_sizes,
        value_counts=record.value_counts,
        null_value_counts=record.null_counts,
        nan_value_counts=record.nan_counts,
        lower_bounds={key: base64.b64decode(value) for key, value in record.lower_bounds.items()},
        upper_bounds={key: base64.b64decode(value) for key, value in record.upper_bounds.items()},
        split_offsets=list(record.split_offsets) or None,
    )
    file.spec_id = spec_id
    return file


def _value(field_type: object, value: str | None) -> object:
    if value is None:
        return None
    if not isinstance(field_type, PrimitiveType):
        raise Corrupt("a partition value is not primitive", type=field_type)
    return from_bytes(field_type, base64.b64decode(value))


def record_of(file: DataFile, metadata: TableMetadata) -> FileRecord:
    """A manifest's file as the record that its writer would have made of it."""
    partition_fields = metadata.specs()[file.spec_id].partition_type(metadata.schema()).fields
    return FileRecord(
        path=file.file_path,
        rows=file.record_count,
        size_bytes=file.file_size_in_bytes,
        partition=tuple(_text(field.field_type, file.partition[place]) for place, field in enumerate(partition_fields)),
        column_sizes=dict(file.column_sizes or {}),
        value_counts=dict(file.value_counts or {}),
        null_counts=dict(file.null_value_counts or {}),
        nan_counts=dict(file.nan_value_counts or {}),
        lower_bounds={key: base64.b64encode(value).decode() for key, value in (file.lower_bounds or {}).items()},
        upper_bounds={key: base64.b64encode(value).decode() for key, value in (file.upper_bounds or {}).items()},
        split_offsets=tuple(file.split_offsets or ()),
    )


def _text(field_type: object, value: L | None) -> str | None:
    if value is None:
        return None
    if not isinstance(field_type, PrimitiveType):
        raise Corrupt("a partition value is not primitive", type=field_type)
    return base64.b64encode(to_bytes(field_type, value)).decode()


def write_added(
    io: FileIO, location: str, metadata: TableMetadata, spec_id: int, snapshot: int, records: Iterable[FileRecord]
) -> tuple[ManifestFile, list[ManifestEntry]]:
    """The manifest of a commit's new files. Sequences are inherited, so it serves every attempt to publish them."""
    entries = [
        ManifestEntry.from_args(
            status=ManifestEntryStatus.ADDED,
            snapshot_id=snapshot,
            sequence_number=None,
            file_sequence_number=None,
            data_file=data_file(record, metadata, spec_id),
        )
        for record in records
    ]
    with _Manifest(io, location, metadata, spec_id, snapshot) as writer:
        for entry in entries:
            writer.add_entry(entry)
    return writer.to_manifest_file(), entries


def with_sequence(entries: Iterable[ManifestEntry], sequence: int) -> list[ManifestEntry]:
    """Entries of new files as a reader will see them: with the sequence of their commit."""
    return [
        ManifestEntry.from_args(
            status=entry.status,
            snapshot_id=entry.snapshot_id,
            sequence_number=sequence,
            file_sequence_number=sequence,
            data_file=entry.data_file,
        )
        for entry in entries
    ]


def plan_merges(manifests: Sequence[ManifestFile]) -> list[list[ManifestFile]]:
    """Groups of manifests to be merged: same spec, same size class, at least MERGE_AT of them."""
    classes: dict[tuple[int, int], list[ManifestFile]] = defaultdict(list)
    for manifest in manifests:
        classes[manifest.partition_spec_id, _size_class(live_files(manifest))].append(manifest)
    return [group for group in classes.values() if len(group) >= MERGE_AT]


def live_files(manifest: ManifestFile) -> int:
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def _size_class(files: int) -> int:
    size_class = 0
    while files >= MERGE_AT:
        files //= MERGE_AT
        size_class += 1
    return size_class


def write_merged(
    io: FileIO, location: str, metadata: TableMetadata, spec_id: int, snapshot: int, entries: Iterable[ManifestEntry]
) -> ManifestFile:
    """One manifest with the live entries of several published ones."""
    with _Manifest(io, location, metadata, spec_id, snapshot) as writer:
        for entry in entries:
            writer.existing(entry)
    return writer.to_manifest_file()


def write_rest(
    io: FileIO,
    location: str,
    metadata: TableMetadata,
    spec_id: int,
    snapshot: int,
    entries: Iterable[ManifestEntry],
    removed: Collection[str],
) -> ManifestFile:
    """A published manifest again, with some of its files marked as deleted by this snapshot."""
    with _Manifest(io, location, metadata, spec_id, snapshot) as writer:
        for entry in entries:
            if entry.data_file.file_path in removed:
                writer.delete(entry)
            else:
                writer.existing(entry)
    return writer.to_manifest_file()


def write_list(
    io: FileIO,
    location: str,
    snapshot: int,
    parent: int | None,
    sequence: int,
    manifests: Sequence[ManifestFile],
) -> tuple[ManifestFile, ...]:
    """Write the manifest list of a snapshot; returns its manifests with the sequence numbers that it gives them."""
    with _ManifestList(io.new_output(location), snapshot, parent, sequence, COMPRESSION) as writer:
        return writer.write(manifests)
