"""Deletions files: the keys that one commit deletes from a keyed table, in one Parquet file of its key columns.

Written like data files: field ids, the names that data files have, zstd. Rows come in any order and stay in it. Memory
is bounded by one small row group (I14). The name appears when the file is closed and not before; without a key there is
no file. Keys come from rows that the table holds, so a key that does not fit is `Corrupt`, not bad input. A crash
leaves at most a whole file in the operation's folder that nothing refers to (I3).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.errors import Corrupt
from floodmark.model import FileRecord
from floodmark.rows.convert import Conformer, Shape, table_shape
from floodmark.rows.misfits import Misfits
from floodmark.rows.staging.file_options import FileOptions
from floodmark.rows.staging.partition import Splitter
from floodmark.rows.staging.statistics import field_leaves
from floodmark.rows.staging.writer import DataWriter, FileStore
from floodmark.storage import join

BUFFER_BYTES_MAX = 4 * 1024 * 1024
# A commit has one deletions file for a table, however many keys it deletes.
_OPTIONS = FileOptions(target_file_bytes=2**63 - 1, row_group_bytes=BUFFER_BYTES_MAX)


class DeletionsWriter:
    """Writes `<folder>/<name>-deletions.parquet`; end with `finish`, or with `abandon` after any error."""

    def __init__(
        self, storage: FileStore, folder: str, schema: Schema, key_fields: Sequence[NestedField], name: str
    ) -> None:
        self.location = join(folder, f"{name}-deletions.parquet")
        self._shape = _key_shape(schema, key_fields)
        self._writer = DataWriter(
            storage,
            self._shape,
            Splitter(UNPARTITIONED_PARTITION_SPEC, self._shape),
            _OPTIONS,
            tuple(leaf for field in self._shape.fields for leaf in field_leaves(field)),
            lambda: self.location,
        )

    @property
    def rows(self) -> int:
        return self._writer.rows

    def write(self, keys: pa.RecordBatch | pa.Table) -> None:
        """Add keys, in columns that have the names of the table's key columns."""
        conformer = Conformer(self._shape, keys.schema)
        for batch in keys.to_batches() if isinstance(keys, pa.Table) else [keys]:
            problems = Misfits()
            conformed = conformer.conform(batch, problems)
            if conformed is None:
                wrong = "; ".join(f"{problem.column}: {problem.problem}" for problem in problems.all())
                raise Corrupt("the keys to delete do not fit the table's key", file=self.location, problems=wrong)
            if len(conformed):
                self._writer.write(conformed)

    def finish(self) -> FileRecord | None:
        """Close the file, which is durable then; None if no key was added."""
        records = self._writer.finish()
        if sum(record.rows for record in records) != self.rows or len(records) > 1:
            raise Corrupt("a deletions file does not hold the keys that were written", file=self.location)
        return records[0] if records else None

    def abandon(self) -> None:
        """Discard the file: its name never appears. After `finish` there is nothing to discard."""
        self._writer.abandon()


def _key_shape(schema: Schema, key_fields: Sequence[NestedField]) -> Shape:
    whole = table_shape(schema.model_dump_json())
    ids = [field.field_id for field in whole.fields]
    positions = [ids.index(field.field_id) for field in key_fields]
    return Shape(
        whole.schema,
        tuple(whole.fields[at] for at in positions),
        tuple(whole.columns[at] for at in positions),
        pa.schema([whole.file_schema.field(at) for at in positions]),
    )
