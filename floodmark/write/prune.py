"""Which live files may hold one of the incoming keys: by partition and statistics, without opening a file. Pure.

A file is left out only when that is certain: its partition, or the range of one of its key columns, cannot hold any of
the keys. Bounds of text may be cut short, but never in a way that makes the range narrower.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import VoidTransform
from pyiceberg.types import NestedField, PrimitiveType

from floodmark.commit.live_files import LiveFile
from floodmark.commit.manifests import data_file
from floodmark.model import FileRecord, Scalar

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

# A value of a key column, compared with others of that column only; None is without limit.
_Bound: TypeAlias = "SupportsRichComparison | None"

# Ranges are compared file by file; with more incoming files than this, their common range is.
RANGES_MAX = 32


def key_fields(schema: Schema) -> list[NestedField]:
    """The columns of the table's key, in the table's order."""
    return [field for field in schema.fields if field.field_id in schema.identifier_field_ids]


def may_hold_keys(
    files: Sequence[LiveFile], incoming: Sequence[FileRecord], metadata: TableMetadata, schema: Schema, spec_id: int
) -> list[LiveFile]:
    """Those of `files` that may hold a key of the incoming files, which were staged for this schema and spec."""
    if not incoming:
        return []
    key = key_fields(schema)
    ranges = [_Range.of_record(record, key) for record in incoming]
    if len(ranges) > RANGES_MAX:
        ranges = [_Range.around(ranges, key)]
    partitions = _partitions(incoming, metadata, schema, spec_id)
    found = []
    for file in files:
        if partitions is not None and file.spec_id == spec_id and _values(file) not in partitions:
            continue
        own = _Range.of_bounds(file.data_file.lower_bounds or {}, file.data_file.upper_bounds or {}, key)
        if any(own.overlaps(other) for other in ranges):
            found.append(file)
    return found


def may_hold_range(files: Sequence[LiveFile], keys: pa.Table, schema: Schema) -> list[LiveFile]:
    """Those of `files` that may hold one of these keys, given as the key's columns in the table's order."""
    if not keys.num_rows:
        return []
    fields = key_fields(schema)
    wanted = _Range.of_columns(keys)
    bounds = ((file, file.data_file.lower_bounds or {}, file.data_file.upper_bounds or {}) for file in files)
    return [file for file, lows, highs in bounds if _Range.of_bounds(lows, highs, fields).overlaps(wanted)]


def _partitions(
    incoming: Sequence[FileRecord], metadata: TableMetadata, schema: Schema, spec_id: int
) -> set[tuple[Scalar, ...]] | None:
    """The partitions of the incoming files, if a key alone decides its partition; else None."""
    spec = metadata.specs()[spec_id]
    sources = {field.source_id for field in spec.fields if not isinstance(field.transform, VoidTransform)}
    if not sources or not sources.issubset(schema.identifier_field_ids):
        return None
    return {tuple(data_file(record, metadata, spec_id).partition._data) for record in incoming}


def _values(file: LiveFile) -> tuple[Scalar, ...]:
    return tuple(file.data_file.partition._data)


@dataclass(frozen=True)
class _Range:
    """Per key column the lowest and highest value; None is without limit."""

    lows: tuple[_Bound, ...]
    highs: tuple[_Bound, ...]

    @classmethod
    def of_record(cls, record: FileRecord, key: Sequence[NestedField]) -> _Range:
        lows = {field_id: base64.b64decode(text) for field_id, text in record.lower_bounds.items()}
        highs = {field_id: base64.b64decode(text) for field_id, text in record.upper_bounds.items()}
        return cls.of_bounds(lows, highs, key)

    @classmethod
    def of_bounds(cls, lows: Mapping[int, bytes], highs: Mapping[int, bytes], key: Sequence[NestedField]) -> _Range:
        return cls(tuple(_decoded(lows, key)), tuple(_decoded(highs, key)))

    @classmethod
    def of_columns(cls, keys: pa.Table) -> _Range:
        ends = [_ends(column) for column in keys.columns]
        return cls(tuple(low for low, _ in ends), tuple(high for _, high in ends))

    @classmethod
    def around(cls, ranges: Sequence[_Range], key: Sequence[NestedField]) -> _Range:
        lows, highs = [], []
        for at in range(len(key)):
            low = [bound for bound in (one.lows[at] for one in ranges) if bound is not None]
            high = [bound for bound in (one.highs[at] for one in ranges) if bound is not None]
            lows.append(min(low) if len(low) == len(ranges) else None)
            highs.append(max(high) if len(high) == len(ranges) else None)
        return cls(tuple(lows), tuple(highs))

    def overlaps(self, other: _Range) -> bool:
        return all(
            _is_at_most(low, other_high) and _is_at_most(other_low, high)
            for low, high, other_low, other_high in zip(self.lows, self.highs, other.lows, other.highs, strict=True)
        )


def _is_at_most(low: _Bound, high: _Bound) -> bool:
    return low is None or high is None or max(low, high) == high


def _ends(column: pa.ChunkedArray) -> tuple[_Bound, _Bound]:
    """The lowest and highest value as Iceberg's bounds give them: of days and times their numbers."""
    kind = column.type
    if pa.types.is_date32(kind):
        column = column.cast(pa.int32())
    elif pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        column = column.cast(pa.int64())
    elif pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind):
        return None, None  # as bytes, as text or as UUID: not worth distinguishing
    ends = pc.min_max(column).as_py()
    return ends["min"], ends["max"]


def _decoded(bounds: Mapping[int, bytes], key: Sequence[NestedField]) -> Iterator[_Bound]:
    for field in key:
        raw = bounds.get(field.field_id)
        value: _Bound = None
        if raw is not None and isinstance(field.field_type, PrimitiveType):
            # Another engine may have cut a text inside a character: a bound that cannot be read is none.
            with suppress(ValueError, struct.error):
                value = from_bytes(field.field_type, raw)
        yield value
