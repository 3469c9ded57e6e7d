"""Which live files may hold one of the incoming keys: by partition and bounds, without opening a file. Pure.

A file is left out only when that is certain: its partition, or the range of one of its key columns, cannot hold any of
the keys. Ranges are compared by the test that conditions use (rows/sql/file_test.py): a bound that is missing, or that
another engine cut inside a character, rules nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import VoidTransform
from pyiceberg.types import NestedField

from floodmark.commit.live_files import LiveFile
from floodmark.commit.manifests import data_file
from floodmark.model import FileRecord, Scalar


def key_fields(schema: Schema) -> list[NestedField]:
    """The columns of the table's key, in the table's order."""
    return [field for field in schema.fields if field.field_id in schema.identifier_field_ids]


def may_hold_keys(
    files: Sequence[LiveFile], incoming: Sequence[FileRecord], metadata: TableMetadata, schema: Schema, spec_id: int
) -> list[LiveFile]:
    """Those of `files` that may hold a key of the incoming files, which were staged for this schema and spec."""
    # Imported late, here and below: a caller that only wants to know the key does not wait for what conditions need.
    from floodmark.rows.reading.selection import select_overlapping
    from floodmark.rows.sql.file_test import listed_span

    by_partition = _key_decides_partition(metadata, schema, spec_id)
    # Keys, and rows without some columns, are staged in no partition that other columns decide: only bounds count.
    nowhere = (None,) * len(metadata.specs()[spec_id].fields)
    records = incoming if by_partition else [replace(record, partition=nowhere) for record in incoming]
    staged = [data_file(record, metadata, spec_id) for record in records]
    if by_partition:
        partitions = set(map(_partition, staged))
        files = [file for file in files if file.spec_id != spec_id or _partition(file.data_file) in partitions]
    key = key_fields(schema)
    return select_overlapping(files, key, [listed_span(staged, field) for field in key], len(staged))


def may_hold_range(files: Sequence[LiveFile], keys: pa.Table, schema: Schema) -> list[LiveFile]:
    """Those of `files` that may hold one of these keys, given as the key's columns in the table's order."""
    from floodmark.rows.reading.selection import select_overlapping
    from floodmark.rows.sql.file_test import column_span

    key = key_fields(schema)
    ranges = [column_span(column, field) for column, field in zip(keys.columns, key, strict=True)]
    return select_overlapping(files, key, ranges, min(1, keys.num_rows))


def _key_decides_partition(metadata: TableMetadata, schema: Schema, spec_id: int) -> bool:
    fields = metadata.specs()[spec_id].fields
    sources = {field.source_id for field in fields if not isinstance(field.transform, VoidTransform)}
    return bool(sources) and sources.issubset(schema.identifier_field_ids)


def _partition(file: DataFile) -> tuple[Scalar, ...]:
    return tuple(file.partition._data)
