"""Adoption: a table that another Iceberg writer created, read as the first state of a table of the lake.

No data, list or manifest is written or changed: the one new file is the metadata that is returned here and written by
the caller. Every row keeps the sequence that Iceberg gave its file (0 for format v1). The lake's history begins with
the adopted head: other branches and tags are dropped, of older snapshots only a few stay for other readers, and the
table gets an identity of its own, since one foreign table may be adopted under two names. A table that the lake could
not read, or could not commit to later, is refused here, before anything exists. Left to the caller: whether the lake
supports the column types, whether a key is unique (that takes reading the rows), where new files go (`location` stays
the foreign table's), and that its old writers have stopped. Failure model: nothing is written, so a crash leaves
nothing. A file that cannot be understood is Corrupt.
"""

from __future__ import annotations

import gzip
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NotRequired, TypedDict

from pyiceberg.manifest import (
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestFile,
    read_manifest_list,
)
from pyiceberg.schema import Schema, index_by_id
from pyiceberg.table.metadata import TableMetadata, TableMetadataV1, TableMetadataV2
from pyiceberg.table.refs import SnapshotRef, SnapshotRefType
from pyiceberg.table.snapshots import MetadataLogEntry, Snapshot, SnapshotLogEntry, ancestors_of
from pyiceberg.types import DoubleType, FloatType, LongType, NestedField, PrimitiveType

from floodmark import clock
from floodmark.commit.fills import FILL_PREFIX
from floodmark.commit.metadata import GC_BEFORE, METADATA_LOG_KEPT, MetadataFiles, parse_metadata
from floodmark.commit.references import REFERENCE_PREFIX, REFERRER_PREFIX
from floodmark.errors import Corrupt, FloodmarkError, Invalid, NotFound
from floodmark.model import MAIN, RESERVED_COLUMNS, SEQ_COLUMN, SNAPSHOTS_KEPT
from floodmark.storage import Storage, join
from floodmark.storage.location import split

if TYPE_CHECKING:
    import pyarrow as pa

ADOPTED_UUID = "floodmark.adopted-uuid"
NAME_MAPPING = "schema.name-mapping.default"
# They make other engines delete metadata files or snapshots that the lake's history still needs.
_EXPIRING = ("write.metadata.delete-after-commit.", "write.metadata.previous-versions-max", "history.expire.")
# Nor is a column bound to an expression, or to another table, that was not checked here.
_LEFT_OUT = (*_EXPIRING, FILL_PREFIX, REFERENCE_PREFIX, REFERRER_PREFIX, GC_BEFORE)
_METADATA_NAME = re.compile(r"(?:v(\d+)|(\d+)-[^/]+?)(?:\.gz)?\.metadata\.json(?:\.gz)?")
_VERSION_HINT = "version-hint.text"
_GZIP = b"\x1f\x8b"
_FIELD_ID = b"PARQUET:field_id"
_NAME_IT = "Name the metadata file that the table's own catalog points to."
_COPY_IT = "Copy its rows into a new table instead."
_THERE = "with the engine that made the table, then adopt it."


@dataclass(frozen=True)
class Adopted:
    """A foreign table as the lake's first state of it; counted from its manifests."""

    metadata: TableMetadata
    snapshot: int | None
    sequence: int
    manifest_list: str | None
    rows: int
    files: int
    size_bytes: int


def read_foreign(files: MetadataFiles, location: str, key: Sequence[str] = (), *, table_id: str) -> Adopted:
    """The table at `location` (a metadata file, or a table's folder), with `table_id` as its new identity.

    In a folder the newest metadata is used: the one that version-hint.text leads to, else the highest number. Only a
    catalog records whether that one was ever committed, so naming the file is safer. `key` names required columns; the
    caller verifies by reading that their values are unique. Without it the table has no key: Iceberg's identifier
    fields promise nothing about the rows, and are not adopted. With a name mapping set, files may have been imported
    without field ids, by which the lake's readers match columns: then the footer of every data file is read, and one
    without ids is refused.
    """
    location = _find_metadata(files.io.storage, location)
    metadata = _read_metadata(files.io.storage, location)
    head = _head(metadata, location)
    schema = _with_hidden_column(metadata, key)
    sequence = _sequence(head)
    manifests = () if head is None else _manifests(files, head)
    _check_partitions(metadata, manifests)
    paths: set[str] = set()
    rows = size_bytes = 0
    for entry in _entries(files, manifests):
        _check_entry(entry, sequence, paths)
        paths.add(entry.data_file.file_path)
        rows += entry.data_file.record_count
        size_bytes += entry.data_file.file_size_in_bytes
    if NAME_MAPPING in metadata.properties:
        _check_field_ids(files.io.storage, sorted(paths))
    return Adopted(
        metadata=_taken_over(metadata, head, location, schema, table_id),
        snapshot=None if head is None else head.snapshot_id,
        sequence=sequence,
        manifest_list=None if head is None else head.manifest_list,
        rows=rows,
        files=len(paths),
        size_bytes=size_bytes,
    )


@contextmanager
def _reading(location: str) -> Iterator[None]:
    """Errors of a file that the table's metadata names: it must exist and be valid."""
    try:
        yield
    except NotFound as error:
        raise Corrupt("a file of the table is gone", file=location, advice=f"Repair it {_THERE}") from error
    except FloodmarkError:
        raise
    except Exception as error:
        # Broad, because decoders may raise any error on bytes of another writer.
        raise Corrupt(
            "a file of the table cannot be parsed",
            file=location,
            reason=(str(error).splitlines() or [""])[0][:300] or type(error).__name__,
            advice=f"Repair it {_THERE}",
        ) from error


def _find_metadata(storage: Storage, location: str) -> str:
    if location.endswith((".json", ".json.gz")):
        return location
    folder = join(location, "metadata")
    names = sorted(entry.location[len(folder) + 1 :] for entry in storage.list(folder))
    numbers = {name: int(found[1] or found[2]) for name in names if (found := _METADATA_NAME.fullmatch(name))}
    if _VERSION_HINT in names:
        hint = join(folder, _VERSION_HINT)
        with _reading(hint):
            text = storage.read(hint).decode().strip()
        chosen = _hinted(text, names, numbers)
    else:
        newest = max(numbers.values(), default=0)
        chosen = [name for name in numbers if numbers[name] == newest]
    if not chosen:
        raise NotFound("there is no table metadata here", location=folder, advice=_NAME_IT)
    if len(chosen) > 1:
        candidates = ", ".join(chosen)
        raise Invalid("several metadata files are the newest", location=folder, files=candidates, advice=_NAME_IT)
    return join(folder, chosen[0])


def _hinted(text: str, names: Sequence[str], numbers: dict[str, int]) -> list[str]:
    """The metadata file that a version hint leads to. A number may lag behind: the next version's file commits it."""
    if not text.isdecimal():
        return [name for name in names if name in (text, f"{text}.metadata.json")]
    versions = {name: number for name, number in numbers.items() if name.startswith("v")}
    newest = int(text)
    while newest + 1 in versions.values():
        newest += 1
    return [name for name in versions if versions[name] == newest]


def _read_metadata(storage: Storage, location: str) -> TableMetadataV2:
    """The metadata as format v2. Not through the cache: another writer may reuse a name."""
    try:
        data = storage.read(location)
    except NotFound as error:
        raise NotFound("there is no such table metadata", location=location, advice=_NAME_IT) from error
    with _reading(location):
        raw = json.loads(gzip.decompress(data) if data.startswith(_GZIP) else data)
        version = int(raw["format-version"])
        if version > 2:
            raise Invalid("only tables of format 1 and 2 are supported", format_version=version, advice=_COPY_IT)
        metadata = parse_metadata(json.dumps({**raw, "snapshots": _listed_snapshots(raw, location)}))
        if "table-uuid" in raw:
            properties = {**metadata.properties, ADOPTED_UUID: str(metadata.table_uuid)}
            metadata = metadata.model_copy(update={"properties": properties})
        if isinstance(metadata, TableMetadataV1):
            metadata = metadata.to_v2()
        return TableMetadataV2.model_validate(metadata)


_Snapshot = TypedDict("_Snapshot", {"snapshot-id": int, "manifest-list": NotRequired[str]})
_Metadata = TypedDict(
    "_Metadata", {"snapshots": NotRequired[list[_Snapshot] | None], "current-snapshot-id": NotRequired[int | None]}
)


def _listed_snapshots(raw: _Metadata, location: str) -> list[_Snapshot]:
    """The snapshots that have a manifest list; early v1 writers named manifests in the metadata itself."""
    snapshots = raw.get("snapshots") or []
    unlisted = {snapshot["snapshot-id"] for snapshot in snapshots if not snapshot.get("manifest-list")}
    if raw.get("current-snapshot-id") in unlisted:
        raise Invalid(
            "the table's current snapshot has no manifest list",
            location=location,
            advice="Commit to the table once with a newer Iceberg, which writes one, then adopt it.",
        )
    return [snapshot for snapshot in snapshots if snapshot["snapshot-id"] not in unlisted]


def _head(metadata: TableMetadataV2, location: str) -> Snapshot | None:
    head = metadata.current_snapshot()
    main = metadata.refs.get(MAIN)
    named = {metadata.current_snapshot_id, None if main is None else main.snapshot_id}
    if named != {None if head is None else head.snapshot_id}:
        raise Corrupt(
            "the table's metadata contradicts itself about the current snapshot",
            location=location,
            current=metadata.current_snapshot_id,
            main=None if main is None else main.snapshot_id,
            advice=f"Repair it {_THERE}",
        )
    if _sequence(head) > metadata.last_sequence_number:
        raise Corrupt("the table's last sequence number is below that of its current snapshot", location=location)
    return head


def _sequence(head: Snapshot | None) -> int:
    return 0 if head is None else head.sequence_number or 0


def _with_hidden_column(metadata: TableMetadataV2, key: Sequence[str]) -> Schema:
    """The current schema with `_seq` at its end: a new schema, with ids that no older one has."""
    current = metadata.schema()
    for field in current.fields:
        _check_name(field)
    # Files may have statistics of columns long gone: their ids must not be assigned again.
    seq_id = max(metadata.last_column_id, *(schema.highest_field_id for schema in metadata.schemas)) + 1
    return Schema(
        *current.fields,
        NestedField(field_id=seq_id, name=SEQ_COLUMN, field_type=LongType(), required=False),
        schema_id=max(schema.schema_id for schema in metadata.schemas) + 1,
        identifier_field_ids=_key_ids(current, key),
    )


def _check_name(field: NestedField) -> None:
    if field.name == SEQ_COLUMN and isinstance(field.field_type, LongType) and not field.required:
        raise Invalid("this table's hidden column has another lake's order", column=field.name, advice=_COPY_IT)
    if field.name.lower() in RESERVED_COLUMNS:
        raise Invalid("this column name is reserved", column=field.name, advice=f"Rename the column {_THERE}")


def _key_ids(schema: Schema, key: Sequence[str]) -> list[int]:
    if isinstance(key, str):
        raise Invalid("a key must be a list of columns", key=key, advice=f'Write key=["{key}"].')
    if len(set(key)) != len(key):
        raise Invalid("a key names a column twice", key=", ".join(key), advice="Name each column once.")
    fields = {field.name: field for field in schema.fields}
    for name in key:
        field = fields.get(name)
        if field is None:
            advice = f"The columns are: {', '.join(fields)}."
            raise Invalid("there is no such column for the key", column=name, advice=advice)
        if not isinstance(field.field_type, PrimitiveType) or isinstance(field.field_type, FloatType | DoubleType):
            advice = "A key is made of plain columns that are not float or double."
            raise Invalid("this column cannot be part of a key", column=name, type=field.field_type, advice=advice)
        if not field.required:
            advice = "Adopt the table without a key, or copy its rows into a new table with one."
            raise Invalid("a column of the key may hold nulls", column=name, advice=advice)
    return [field.field_id for field in schema.fields if field.name in key]


def _manifests(files: MetadataFiles, head: Snapshot) -> tuple[ManifestFile, ...]:
    with _reading(head.manifest_list):
        manifests = tuple(read_manifest_list(files.io.new_input(head.manifest_list)))
    for manifest in manifests:
        if manifest.content != ManifestContent.DATA:
            raise _has_deletes(manifest.manifest_path)
        if manifest.key_metadata:
            raise _is_encrypted(manifest.manifest_path)
        files_counts = (manifest.added_files_count, manifest.existing_files_count, manifest.deleted_files_count)
        rows_counts = (manifest.added_rows_count, manifest.existing_rows_count, manifest.deleted_rows_count)
        # Optional in a list of format v1; the lake's lists are of v2, which needs them.
        if None in files_counts + rows_counts:
            raise Invalid(
                "the table's manifest list does not count what is in its manifests",
                list=head.manifest_list,
                advice=f"Upgrade the table to format v2 and rewrite its manifests {_THERE}",
            )
    files.remember_manifests(head.manifest_list, manifests)
    return manifests


def _check_partitions(metadata: TableMetadataV2, manifests: Iterable[ManifestFile]) -> None:
    """A manifest can be written only if the columns of its partition spec exist and give their types."""
    columns = index_by_id(metadata.schema())
    for spec_id in {metadata.default_spec_id, *(manifest.partition_spec_id for manifest in manifests)}:
        spec = metadata.specs().get(spec_id)
        if spec is None:
            raise Corrupt("files of the table have a partition spec that its metadata does not know", spec_id=spec_id)
        for field in spec.fields:
            if field.source_id not in columns:
                raise Invalid("files are partitioned by a column that was dropped", field=field.name, advice=_COPY_IT)


def _entries(files: MetadataFiles, manifests: Iterable[ManifestFile]) -> Iterator[ManifestEntry]:
    for manifest in manifests:
        with _reading(manifest.manifest_path):
            entries = files.entries(manifest)
        yield from entries


def _check_entry(entry: ManifestEntry, head_sequence: int, seen: set[str]) -> None:
    file = entry.data_file
    if file.content != DataFileContent.DATA:
        raise _has_deletes(file.file_path)
    if file.key_metadata:
        raise _is_encrypted(file.file_path)
    if file.file_format != FileFormat.PARQUET:
        raise Invalid("this file is not Parquet", file=file.file_path, advice=f"Rewrite it as Parquet {_THERE}")
    if file.file_path in seen:
        raise Invalid("this table lists a data file twice", file=file.file_path, advice=f"Rewrite it {_THERE}")
    # Rows above the head's sequence would be missing from every change feed.
    if entry.sequence_number is None or entry.sequence_number > head_sequence:
        raise Corrupt("a data file has a sequence number that its table never assigned", file=file.file_path)
    # Refuses a location that no storage of ours can reach.
    split(file.file_path)


def _has_deletes(location: str) -> Invalid:
    return Invalid("this table has delete files", file=location, advice=f"Rewrite it as copy-on-write {_THERE}")


def _is_encrypted(location: str) -> Invalid:
    return Invalid("this table is encrypted", file=location, advice=_COPY_IT)


def _check_field_ids(storage: Storage, paths: Iterable[str]) -> None:
    import pyarrow.parquet as pq

    for path in paths:
        with _reading(path), storage.open_input(path) as stream:
            columns = list(pq.read_schema(stream))
        for column in columns:
            if not _has_ids(column):
                raise Invalid(
                    "a data file has columns without field ids, which are matched by name only",
                    file=path,
                    column=column.name,
                    advice=f"Rewrite the file {_THERE}",
                )


def _has_ids(field: pa.Field) -> bool:
    """Whether a column and everything in it has a field id."""
    from pyarrow import types

    kind = field.type
    # A map's only field is the pair, which has no id of its own.
    inner = [kind.key_field, kind.item_field] if types.is_map(kind) else map(kind.field, range(kind.num_fields))
    return _FIELD_ID in (field.metadata or {}) and all(map(_has_ids, inner))


def _taken_over(
    metadata: TableMetadataV2, head: Snapshot | None, location: str, schema: Schema, table_id: str
) -> TableMetadata:
    """The metadata with all changes that make it the lake's. Pure but for its creation time."""
    line = list(islice(ancestors_of(head, metadata), SNAPSHOTS_KEPT))[::-1]
    kept = [one.model_copy(update={"parent_snapshot_id": None}) for one in line[:1]] + line[1:]
    ids = {one.snapshot_id for one in kept}
    refs = {}
    if head is not None:
        refs[MAIN] = SnapshotRef.model_validate({"snapshot-id": head.snapshot_id, "type": SnapshotRefType.BRANCH})
    previous = MetadataLogEntry(metadata_file=location, timestamp_ms=metadata.last_updated_ms)
    return metadata.model_copy(
        update={
            "table_uuid": uuid.UUID(table_id),
            "last_updated_ms": max(clock.now_ms(), metadata.last_updated_ms),
            "last_column_id": schema.highest_field_id,
            "schemas": [*metadata.schemas, schema],
            "current_schema_id": schema.schema_id,
            "properties": {
                name: value for name, value in metadata.properties.items() if not name.startswith(_LEFT_OUT)
            },
            "snapshots": kept,
            "snapshot_log": _snapshot_log(metadata, head, ids),
            "metadata_log": [*metadata.metadata_log[1 - METADATA_LOG_KEPT :], previous],
            "refs": refs,
            "statistics": [one for one in metadata.statistics if one.snapshot_id in ids],
            "partition_statistics": [one for one in metadata.partition_statistics if one.snapshot_id in ids],
        }
    )


def _snapshot_log(metadata: TableMetadataV2, head: Snapshot | None, ids: set[int]) -> list[SnapshotLogEntry]:
    """The log's end that names only snapshots which are kept, as Iceberg demands; its last entry is the head."""
    log: list[SnapshotLogEntry] = []
    for entry in metadata.snapshot_log:
        log = [*log, entry] if entry.snapshot_id in ids else []
    if head is not None and (not log or log[-1].snapshot_id != head.snapshot_id):
        at_ms = max([head.timestamp_ms, *(entry.timestamp_ms for entry in log)])
        log.append(SnapshotLogEntry(snapshot_id=head.snapshot_id, timestamp_ms=at_ms))
    return log
