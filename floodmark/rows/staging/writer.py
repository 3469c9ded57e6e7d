"""Parquet data files written from conformed batches: bounded memory, real file sizes, exact records.

Batches wait in a buffer per partition until they fill a row group. A file is closed when the bytes written reach the
target. Waiting rows and open files are bounded over all partitions of a task (I14): the largest is written first. A
file's name appears when it is closed and not before; an abandoned writer leaves no name behind. A crash leaves whole
files in the operation's folder that nothing refers to (I3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from floodmark.errors import Invalid
from floodmark.model import FileRecord
from floodmark.rows.convert import Shape
from floodmark.rows.staging.partition import PartitionKey, Splitter
from floodmark.rows.staging.statistics import Leaf, count_nans, file_record
from floodmark.storage.streams import OutputStream

ROW_GROUP_BYTES = 64 * 1024 * 1024
BUFFER_BYTES_MAX = 128 * 1024 * 1024
OPEN_FILES_MAX = 32
DICTIONARY_BYTES_MAX = 512 * 1024
_BATCHES_WAITING_MAX = 64
_CODECS = ("zstd", "snappy", "gzip", "lz4", "none")


class FileStore(Protocol):
    """The part of storage that writing needs."""

    def writer(self, location: str) -> AbstractContextManager[OutputStream]: ...


@dataclass(frozen=True)
class FileOptions:
    target_file_bytes: int
    row_group_bytes: int = ROW_GROUP_BYTES
    codec: str = "zstd"
    level: int | None = 1
    sort: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls, properties: Mapping[str, str], target_file_bytes: int, sort: tuple[tuple[str, str], ...]
    ) -> FileOptions:
        """The table properties that Iceberg's writers know; our default for each that is not set."""
        codec = properties.get("write.parquet.compression-codec", "zstd").lower()
        codec = "none" if codec == "uncompressed" else codec
        if codec not in _CODECS:
            raise Invalid("unknown Parquet codec", codec=codec, advice=f"Use one of: {', '.join(_CODECS)}.")
        level = properties.get("write.parquet.compression-level", "1" if codec == "zstd" else None)
        group = int(properties.get("write.parquet.row-group-size-bytes", ROW_GROUP_BYTES))
        # A row group is the grain at which files can end: small files need small groups.
        group = max(1, min(group, target_file_bytes))
        return cls(target_file_bytes, group, codec, int(level) if level else None, sort)


class _Abandoned(Exception):
    """Signals a storage writer that its file must not appear."""


class _OpenFile:
    """One data file being written."""

    def __init__(self, location: str, storage: FileStore, shape: Shape, options: FileOptions) -> None:
        self.location = location
        self.nan_counts: dict[int, int] = {}
        self._fields = shape.fields
        self._options = options
        self._context = storage.writer(location)
        self._stream = self._context.__enter__()
        try:
            self._parquet = pq.ParquetWriter(
                self._stream,
                shape.file_schema,
                compression=options.codec,
                compression_level=options.level,
                store_schema=False,
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

    def write_group(self, table: pa.Table) -> None:
        if self._options.sort:
            table = table.sort_by(list(self._options.sort))
        self._parquet.write_table(table, row_group_size=max(1, len(table)))
        count_nans(table, self._fields, self.nan_counts)

    def close(self, columns: tuple[Leaf, ...], partition: PartitionKey) -> FileRecord:
        self._parquet.close()
        size_bytes = self.size_bytes
        self._context.__exit__(None, None, None)
        metadata = self._parquet.writer.metadata
        return file_record(
            self.location, metadata, size_bytes, columns, partition=partition, nan_counts=self.nan_counts
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

    def take(self) -> pa.Table:
        table = pa.Table.from_batches(self.batches)
        self.batches, self.size_bytes = [], 0
        return table


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
        on_file: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._shape = shape
        self._splitter = splitter
        self._options = options
        self._columns = columns
        self._next_location = next_location
        self._on_file = on_file
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
        if waiting.file is None:
            self._make_room()
            waiting.file = _OpenFile(self._next_location(), self._storage, self._shape, self._options)
        self._total_bytes -= waiting.size_bytes
        waiting.file.write_group(waiting.take())
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
            self.records.append(waiting.file.close(self._columns, key))
            waiting.file = None
            self._on_file()
        if not waiting.batches:
            del self._waiting[key]
