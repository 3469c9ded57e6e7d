"""A number of 64 bits for each row, kept in key indexes: rows with different ones differ in some column.

It is made of (field id, value) of the columns that are not null, whatever their order and names, so that a column that
is added later changes nothing. A value counts as its widest type, every NaN is one, 0.0 and -0.0 differ, and so do maps
with the same entries in another order: what `floodmark.rows.compare` calls the same has the same fingerprint. The
column `_seq` is left out. Equal fingerprints are a hint, to be confirmed by reading both rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import types
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from floodmark.model import SEQ_COLUMN
from floodmark.rows.arrays import map_parts
from floodmark.rows.index.hashing import Secret
from floodmark.rows.index.values import is_text, numbers, plain, texts, valid, words
from floodmark.rows.mixing import Hashes, hash_bytes, inner, mix, places, salted, sums

_BLOCK_ROWS = 32 * 1024
_BLOCK_BYTES = 2 * 1024 * 1024


def fingerprints(rows: pa.RecordBatch | pa.Table, fields: Sequence[NestedField], secret: Secret) -> Hashes:
    """The fingerprint of each row; its columns are those of these fields of the table, in their order."""
    if rows.num_columns != len(fields):
        raise TypeError(f"{rows.num_columns} columns are not {len(fields)} fields")
    ids = [field.field_id for field in fields if field.name != SEQ_COLUMN]
    kinds = [field.field_type for field in fields if field.name != SEQ_COLUMN]
    rows = rows.select([at for at, field in enumerate(fields) if field.name != SEQ_COLUMN])
    hasher = _Hasher(*secret.fingerprints)
    found = [np.empty(0, np.uint64)]
    for batch in rows.to_batches() if isinstance(rows, pa.Table) else [rows]:
        block = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES * len(batch) // max(1, batch.nbytes)))
        for start in range(0, len(batch), block):
            columns = [column.slice(start, block) for column in batch.columns]
            found.append(hasher.combined(columns, ids, kinds, min(block, len(batch) - start), hasher.salt))
    return np.concatenate(found)


class _Hasher:
    """Hashes of values under one secret."""

    def __init__(self, salt: int, step: int) -> None:
        self.salt = salt
        self._step = step

    def combined(
        self, columns: Sequence[pa.Array], ids: Sequence[int], kinds: Sequence[IcebergType], rows: int, salt: int
    ) -> Hashes:
        """The hashes of rows, or structs: of those of their fields that are not null."""
        hashes = np.full(rows, salt, np.uint64)
        for column, field_id, kind in zip(columns, ids, kinds, strict=True):
            found = self._hash(plain(column), kind, inner(salt, field_id))
            if column.null_count:
                found[~valid(column)] = 0
            hashes += found
        return mix(hashes)

    def _hash(self, array: pa.Array, kind: IcebergType, salt: int) -> Hashes:
        """A hash for each value; those of nulls mean nothing."""
        if array.null_count == len(array):
            return np.zeros(len(array), np.uint64)
        match kind:
            case StructType():
                columns = [array.field(at) for at in range(array.type.num_fields)]
                ids, kinds = [one.field_id for one in kind.fields], [one.field_type for one in kind.fields]
                return self.combined(columns, ids, kinds, len(array), salt)
            case ListType():
                elements = array.flatten()
                return self._lists(
                    array, self._elements([elements], [kind.element_id], [kind.element_type], salt), salt
                )
            case MapType():
                ids, kinds = [kind.key_id, kind.value_id], [kind.key_type, kind.value_type]
                return self._lists(array, self._elements(map_parts(array), ids, kinds, salt), salt)
        if is_text(array.type):
            return hash_bytes(*texts(array), salt, self._step)
        if types.is_decimal(array.type):
            low, high = words(array.cast(pa.decimal128(38, array.type.scale)))
            return salted(mix(high + np.uint64(self._step)) + low, salt)
        return salted(numbers(array, one_zero=False), salt)

    def _elements(
        self, parts: Sequence[pa.Array], ids: Sequence[int], kinds: Sequence[IcebergType], salt: int
    ) -> Hashes:
        """The hashes of all elements of lists, or entries of maps; one that is null has a hash too, that of nothing."""
        return self.combined(parts, ids, kinds, len(parts[0]), inner(salt, 0))

    def _lists(self, array: pa.Array, elements: Hashes, salt: int) -> Hashes:
        """The hashes of lists: of their elements, each with its place, and their length."""
        offsets = array.offsets.to_numpy().astype(np.int64)
        counts = np.diff(offsets)
        if array.null_count:
            counts[~valid(array)] = 0
        elements += (places(counts) + 1).astype(np.uint64) * np.uint64(self._step)
        return salted(sums(mix(elements), counts) + counts.view(np.uint64), salt)
