"""Which partition a row belongs to, and a batch split by it.

Iceberg's own transforms compute partition values over whole Arrow columns. A value's name is its single-value
serialisation in base64 (None: null), so that equal values have equal names in every task and process.
"""

from __future__ import annotations

import base64
from functools import lru_cache

import numpy as np
import pyarrow as pa
from pyarrow import types
from pyiceberg.conversions import to_bytes
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import VoidTransform
from pyiceberg.types import PrimitiveType

from floodmark.model import Scalar
from floodmark.rows.arrays import Numbers
from floodmark.rows.convert import Shape

PartitionKey = tuple[str | None, ...]


def encode_value(kind: PrimitiveType, value: Scalar) -> str | None:
    """A value as records carry it: base64 of Iceberg's single-value serialisation."""
    return None if value is None else base64.b64encode(to_bytes(kind, value)).decode("ascii")


@lru_cache(maxsize=256)
def parse_spec(spec_json: str) -> PartitionSpec:
    return PartitionSpec.model_validate_json(spec_json)


class Splitter:
    """Splits batches of one table by partition."""

    def __init__(self, spec: PartitionSpec, shape: Shape) -> None:
        self.spec = spec
        self._fields = [_PartitionColumn(field, shape.schema) for field in spec.fields]

    def split(self, batch: pa.RecordBatch) -> list[tuple[PartitionKey, pa.RecordBatch]]:
        """The batch by partition. Every part owns its memory: a small part does not keep the whole batch alive."""
        if not self._fields:
            return [((), batch)]
        columns = [field.encode(batch) for field in self._fields]
        codes = columns[0][0]
        for more, values in columns[1:]:
            # Made dense at every step, so that many columns of many values cannot overflow.
            codes = np.unique(codes * len(values) + more, return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
        if len(starts) == 1:
            return [(_key(columns, 0), batch)]
        ends = np.append(starts[1:], len(order))
        return [
            (_key(columns, order[start]), batch.take(pa.array(order[start:end])))
            for start, end in zip(starts, ends, strict=True)
        ]


def _key(columns: list[tuple[Numbers, list[str | None]]], row: int) -> PartitionKey:
    return tuple(values[codes[row]] for codes, values in columns)


class _PartitionColumn:
    def __init__(self, field: PartitionField, schema: Schema) -> None:
        self.source_id = field.source_id
        source = schema.find_field(field.source_id)
        if not isinstance(source.field_type, PrimitiveType):
            raise TypeError(f"partition field {field.name} has no plain source column")
        self.position = [column.field_id for column in schema.fields].index(field.source_id)
        self.void = isinstance(field.transform, VoidTransform)
        self.transform = field.transform.pyarrow_transform(source.field_type)
        kind = field.transform.result_type(source.field_type)
        self.kind = kind if isinstance(kind, PrimitiveType) else source.field_type

    def encode(self, batch: pa.RecordBatch) -> tuple[Numbers, list[str | None]]:
        """Per row a code, and per code the partition value."""
        if self.void:
            return np.zeros(len(batch), np.int64), [None]
        values = self.transform(batch.column(self.position))
        encoded = values.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return codes, [encode_value(self.kind, value) for value in _plain(encoded.dictionary)]


def _plain(values: pa.Array) -> list[Scalar]:
    # Dates and times as whole numbers: Python's own have a smaller range than Spark's.
    if types.is_timestamp(values.type):
        values = values.view(pa.int64())
    elif types.is_date32(values.type):
        values = values.view(pa.int32())
    return list(values.to_pylist())
