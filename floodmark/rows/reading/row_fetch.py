"""Rows of a data file by their positions, as quickly as a lookup needs them: of one row, a part of one row group.

A data file never changes, so what its footer says is remembered, bounded by its bytes (I14): parsing it takes longer
than reading a row. The file's size is compared at each opening, and pages with their checksums, so a file that was cut
or replaced is `Corrupt`, never other rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cachetools import LRUCache
from pyiceberg.types import NestedField

from floodmark.errors import Corrupt
from floodmark.rows.arrays import Numbers
from floodmark.rows.column_chunks import prefetch
from floodmark.rows.project import RUN_BYTES, by_id, damaged, opened, project, read_schema
from floodmark.storage import Storage

# Of all footers in memory, as bytes of the files; in memory they take some times as much.
FOOTERS_BYTES_MAX = 16 * 1024 * 1024
# Of a row group that holds few wanted rows, so many are decoded at once: what follows the last wanted one is not.
_FEW_ROWS, _FEW_BATCH_ROWS, _BATCH_ROWS = 4, 1024, 16_384


@dataclass(frozen=True)
class _Footer:
    metadata: pq.FileMetaData
    columns: dict[int, pa.Field]  # by field id
    ends: Numbers  # the position after the last row of each row group
    sizes: Numbers  # the bytes of each row group
    dotted: bool  # a dot in a name would be read as a path into a struct


class _Footers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: LRUCache[tuple[str, int], _Footer] = LRUCache(
            FOOTERS_BYTES_MAX, getsizeof=lambda one: int(one.metadata.serialized_size)
        )

    def of(self, storage: Storage, location: str, size_bytes: int) -> _Footer:
        key = location, size_bytes
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = _read_footer(storage, location, size_bytes)
            if found.metadata.serialized_size <= FOOTERS_BYTES_MAX:
                with self._lock:
                    self._kept[key] = found
        return found


_FOOTERS = _Footers()


def _read_footer(storage: Storage, location: str, size_bytes: int) -> _Footer:
    with opened(storage, location, size_bytes) as stream, pq.ParquetFile(stream, pre_buffer=False) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
    columns = by_id(schema)
    if len(columns) < len(schema):
        raise Corrupt("a data file has columns without a field id", file=location)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    ends: Numbers = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
    sizes = np.array([group.total_byte_size for group in groups], np.int64)
    return _Footer(metadata, columns, ends, sizes, any("." in name for name in schema.names))


@dataclass(frozen=True)
class Fetched:
    """Some of the wanted rows: their positions, and their columns. `groups`: row groups that were opened for them."""

    positions: Numbers
    rows: pa.RecordBatch
    groups: int


def fetch_rows(
    storage: Storage, location: str, size_bytes: int, fields: Sequence[NestedField], positions: Numbers
) -> Iterator[Fetched]:
    """The rows at these ascending positions, in parts, with these columns of their table."""
    with damaged(location):
        footer = _FOOTERS.of(storage, location, size_bytes)
        if len(positions) and not 0 <= positions[0] <= positions[-1] < footer.metadata.num_rows:
            raise Corrupt(
                "an index names a row that its file does not have", file=location, rows=footer.metadata.num_rows
            )
        target = read_schema(fields)
        sources = [footer.columns.get(field.field_id) for field in fields]
        columns = None if footer.dotted else [source.name for source in sources if source is not None]
        with (
            opened(storage, location, size_bytes) as stream,
            pq.ParquetFile(
                stream, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True
            ) as parquet,
        ):
            for groups, wanted in _runs(footer, positions):
                start = int(footer.ends[groups[0] - 1]) if groups[0] else 0
                prefetch(stream, footer.metadata, groups, columns)
                few = len(wanted) <= _FEW_ROWS
                opened_groups = len(groups)
                for batch in parquet.iter_batches(
                    batch_size=_FEW_BATCH_ROWS if few else _BATCH_ROWS,
                    row_groups=groups,
                    columns=columns,
                    use_threads=not few,
                ):
                    first, last = np.searchsorted(wanted, [start, start + len(batch)])
                    if last > first:
                        # A copy: a slice would keep the whole batch in memory.
                        rows = batch.take(pa.array(wanted[first:last] - start))
                        arrays = [
                            project(
                                None if source is None else rows.column(rows.schema.get_field_index(source.name)),
                                source,
                                field,
                                goal.type,
                                len(rows),
                            )
                            for source, field, goal in zip(sources, fields, target, strict=True)
                        ]
                        found = pa.RecordBatch.from_arrays(arrays, schema=target)
                        yield Fetched(wanted[first:last], found, opened_groups)
                        opened_groups = 0
                    if last == len(wanted):
                        break
                    start += len(batch)


def _runs(footer: _Footer, positions: Numbers) -> Iterator[tuple[list[int], Numbers]]:
    """Row groups that hold these positions and follow each other, of bounded size together; and the positions."""
    if not len(positions):
        return
    if len(positions) == 1:
        yield [int(footer.ends.searchsorted(positions[0], "right"))], positions
        return
    held = footer.ends.searchsorted(positions, "right")
    groups = np.unique(held)
    size = np.cumsum(footer.sizes[groups])
    breaks, before = [0], 0
    for at in range(1, len(groups)):
        if groups[at] != groups[at - 1] + 1 or size[at] - before > RUN_BYTES:
            breaks.append(at)
            before = int(size[at - 1])
    for first, last in pairwise([*breaks, len(groups)]):
        run = groups[first:last].tolist()
        begin, end = np.searchsorted(held, [run[0], run[-1] + 1])
        yield run, positions[begin:end]
