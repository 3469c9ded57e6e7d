"""Parquet data files written from conformed batches: bounded memory, real file sizes, exact records.

Batches wait in a buffer per partition until it is full; then they are written, as row groups of a few thousand rows
(file_options.py). A file is closed when the bytes written reach the target. Waiting rows and open files are bounded
over all partitions of a task (I14): the largest is written first. A file's name appears when it is closed and not
before; an abandoned writer leaves no name behind. A crash leaves whole files in the operation's folder that nothing
refers to (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from floodmark.model import FileRecord
from floodmark.rows.convert import Shape
from floodmark.rows.staging.file_options import ROW_GROUP_BYTES, FileOptions, groups_max
from floodmark.rows.staging.partition import PartitionKey, Splitter
from floodmark.rows.staging.statistics import Leaf, count_nans, file_record
from floodmark.storage.streams import OutputStream

BUFFER_BYTES_MAX = 128 * 1024 * 1024
OPEN_FILES_MAX = 32
DICTIONARY_BYTES_MAX = 512 * 1024
_BATCHES_WAITING_MAX = 64
# A dictionary is a gain if values repeat: looked at in so many rows of a file's first buffer.
_SAMPLE_ROWS_MAX = 64 * 1024
_REPEATED_MIN = 0.5


class FileStore(Protocol):
    """The part of storage that writing needs."""

    def writer(self, location: str) -> AbstractContextManager[OutputStream]: ...


class _Abandoned(Exception):
    """Signals a storage writer that its file must not appear."""


class _OpenFile:
    """One data file being written."""

    def __init__(
        self,
        location: str,
        storage: FileStore,
        shape: Shape,
        options: FileOptions,
        columns: tuple[Leaf, ...],
        first: pa.Table,
    ) -> None:
        """`first`: the rows that will be written first, to see which columns repeat their values."""
        self.location = location
        self.nan_counts: dict[int, int] = {}
        self._fields = shape.fields
        self._options = options
        self._columns = columns
        self._groups_left = groups_max(len(columns))
        self._context = storage.writer(location)
        self._stream = self._context.__enter__()
        try:
            self._parquet = pq.ParquetWriter(
                self._stream,
                shape.file_schema,
                compression=options.codec,
                compression_level=options.level,
                store_schema=False,
                use_dictionary=dictionary_columns(first, options),
                # A dictionary that grows past this is no gain: stop early instead of building it to the end.
                dictionary_pagesize_limit=DICTIONARY_BYTES_MAX,
                store_decimal_as_integer=True,
                write_page_checksum=True,
            )
        except BaseException:
            self.abandon()
            raise

    @property
    def size_bytes(self) -> int:
        return int(self._stream.tell())

    def write(self, table: pa.Table, size_bytes: int) -> None:
        rows = self._options.rows_per_group(len(table), size_bytes, len(self._columns), self._groups_left)
        self._parquet.write_table(table, row_group_size=rows)
        self._groups_left -= -(-len(table) // rows)
        count_nans(table, self._fields, self.nan_counts)

    def close(self, partition: PartitionKey) -> FileRecord:
        self._parquet.close()
        size_bytes = self.size_bytes
        self._context.__exit__(None, None, None)
        metadata = self._parquet.writer.metadata
        return file_record(
            self.location, metadata, size_bytes, self._columns, partition=partition, nan_counts=self.nan_counts
        )

    def abandon(self) -> None:
        with suppress(_Abandoned):
            self._context.__exit__(_Abandoned, _Abandoned(), None)


class _Waiting:
    """The rows of one partition that are not in a file yet, and its open file."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.size_bytes = 0
        self.file: _OpenFile | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)
        self.size_bytes += batch.nbytes
        if len(self.batches) >= _BATCHES_WAITING_MAX and self.size_bytes < ROW_GROUP_BYTES // _BATCHES_WAITING_MAX:
            # Many small batches cost more than their bytes.
            self.batches = pa.Table.from_batches(self.batches).combine_chunks().to_batches()

    def take(self) -> tuple[pa.Table, int]:
        """The waiting rows and their bytes."""
        table, size_bytes = pa.Table.from_batches(self.batches), self.size_bytes
        self.batches, self.size_bytes = [], 0
        return table, size_bytes


def dictionary_columns(rows: pa.Table, options: FileOptions) -> list[str]:
    """The Parquet columns that get a dictionary: those whose values repeat within a row group, and all nested ones.

    A small group's dictionary never grows past its limit, so a column of unique values would be written as a dictionary
    of all of them and an index of each: up to twice as long, and slower.
    """
    count = min(len(rows), options.row_group_rows or len(rows), _SAMPLE_ROWS_MAX)
    sample = rows.slice((len(rows) - count) // 2, count)
    return [
        path
        for field, values in zip(rows.schema, sample.columns, strict=True)
        for path in _parquet_paths(field.name, field.type)
        if path != field.name or (field.name not in options.unique and _repeats(values))
    ]


def _repeats(values: pa.ChunkedArray) -> bool:
    return int(pc.count_distinct(values, mode="all").as_py()) <= len(values) * _REPEATED_MIN


def _parquet_paths(path: str, kind: pa.DataType) -> Iterator[str]:
    if types.is_struct(kind):
        for child in kind:
            yield from _parquet_paths(f"{path}.{child.name}", child.type)
    elif types.is_list(kind):
        yield from _parquet_paths(f"{path}.list.element", kind.value_type)
    elif types.is_map(kind):
        yield from _parquet_paths(f"{path}.key_value.key", kind.key_type)
        yield from _parquet_paths(f"{path}.key_value.value", kind.item_type)
    else:
        yield path


class DataWriter:
    """Writes conformed batches of one task into data files of one table."""

    def __init__(
        self,
        storage: FileStore,
        shape: Shape,
        splitter: Splitter,
        options: FileOptions,
        columns: tuple[Leaf, ...],
        next_location: Callable[[], str],
    ) -> None:
        self._storage = storage
        self._shape = shape
        self._splitter = splitter
        self._options = options
        self._columns = columns
        self._next_location = next_location
        self._waiting: dict[PartitionKey, _Waiting] = {}
        self._total_bytes = 0
        self.records: list[FileRecord] = []
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += len(batch)
        for key, part in self._splitter.split(batch):
            waiting = self._waiting.setdefault(key, _Waiting())
            before = waiting.size_bytes
            waiting.add(part)
            self._total_bytes += waiting.size_bytes - before
            if waiting.size_bytes >= self._options.row_group_bytes:
                self._flush(key)
        while self._total_bytes > BUFFER_BYTES_MAX:
            self._flush(max(self._waiting, key=lambda key: self._waiting[key].size_bytes))

    def finish(self) -> list[FileRecord]:
        """Write the waiting rows and close every file; the records of all files."""
        while self._waiting:
            key = next(iter(self._waiting))
            if self._waiting[key].batches:
                self._flush(key)
            self._close(key)
        return self.records

    def abandon(self) -> None:
        """Discard the open files: their names never appear. Closed files stay; nothing refers to them."""
        for waiting in self._waiting.values():
            if waiting.file is not None:
                waiting.file.abandon()
        self._waiting = {}
        self._total_bytes = 0

    def _flush(self, key: PartitionKey) -> None:
        waiting = self._waiting[key]
        rows, size_bytes = waiting.take()
        self._total_bytes -= size_bytes
        if self._options.sort:
            rows = rows.sort_by(list(self._options.sort))
        if waiting.file is None:
            self._make_room()
            location = self._next_location()
            waiting.file = _OpenFile(location, self._storage, self._shape, self._options, self._columns, rows)
        waiting.file.write(rows, size_bytes)
        if waiting.file.size_bytes >= self._options.target_file_bytes:
            self._close(key)

    def _make_room(self) -> None:
        opened = {key: waiting.file for key, waiting in self._waiting.items() if waiting.file is not None}
        if len(opened) >= OPEN_FILES_MAX:
            self._close(max(opened, key=lambda key: opened[key].size_bytes))

    def _close(self, key: PartitionKey) -> None:
        waiting = self._waiting.get(key)
        if waiting is None:
            return
        if waiting.file is not None:
            self.records.append(waiting.file.close(key))
            waiting.file = None
        if not waiting.batches:
            del self._waiting[key]
