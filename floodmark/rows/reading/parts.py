"""Rows of a unit as objects: a piece becomes Parquet or JSON lines objects, written whole under names of its own.

The content of an object follows from the piece and the target alone, so a repeated task, a concurrent second one and a
later try all write the same (I8). A name is claimed, never replaced: a writer that finds it taken compares. The same
bytes, or the same rows in the same order as another Parquet writer wrote them, count as written; anything else is
Corrupt. An object is built in memory and appears whole; a crash leaves whole objects or none. Memory is bounded by an
object, a row group and a batch (I14). A piece without rows has no object.

Parquet objects end by a count of rows, from the source's bytes per row; JSON lines objects end by a count of bytes. A
change of either is a change of the encoder's number (floodmark/catalog/unit.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from floodmark.errors import Corrupt
from floodmark.rows.arrays import Numbers
from floodmark.rows.compare import same_rows
from floodmark.rows.json.ndjson import encode_lines
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE
from floodmark.rows.reading.shipment import Piece, Shipment
from floodmark.rows.schema import FIELD_ID, arrow_schema
from floodmark.rows.staging.file_options import ROW_GROUP_BYTES
from floodmark.rows.staging.writer import DICTIONARY_BYTES_MAX
from floodmark.rows.tasks import collect_tagged, run_tasks
from floodmark.storage import Storage, join

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARQUET, JSONL = "parquet", "jsonl"
# Enough pieces to keep many cores busy to the end, unless they would be too small to be worth an object. As text, rows
# are many times as long as in their source files.
PIECES_WANTED = 16
PIECE_BYTES_MIN = {PARQUET: 8 * 1024 * 1024, JSONL: 2 * 1024 * 1024}
# How much of a batch becomes text at once; text is often several times as long.
_ENCODE_BYTES = 4 * 1024 * 1024
_COMPARE_ROWS = 64 * 1024


@dataclass(frozen=True)
class PartTarget:
    """Where and how the objects of a unit are written; it can be sent to executors."""

    folder: str
    format: str
    part_bytes: int
    schema: pa.Schema
    storage_options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PartObject:
    """One object of a unit, as it is stored."""

    name: str
    rows: int
    deletions: int
    size_bytes: int
    sha256: str


def objects_to_json(objects: Sequence[PartObject]) -> str:
    """A piece's objects, and their totals."""
    return json.dumps(
        {
            "rows": sum(one.rows for one in objects),
            "deletions": sum(one.deletions for one in objects),
            "bytes": sum(one.size_bytes for one in objects),
            "objects": [asdict(one) for one in objects],
        }
    )


def objects_from_json(text: str) -> tuple[PartObject, ...]:
    try:
        return tuple(PartObject(**values) for values in json.loads(text)["objects"])
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt("the record of a unit's objects cannot be understood", cause=error) from error


def cut_pieces(shipment: Shipment, file_format: str, part_bytes: int) -> list[Piece]:
    """The unit in pieces of a part's worth of source, or less, so that there are pieces for all cores."""
    if file_format not in PIECE_BYTES_MIN:
        raise Corrupt("a unit has a format that is not known", format=file_format)
    wanted = max(PIECE_BYTES_MIN[file_format], shipment.plan.size_bytes // PIECES_WANTED)
    return shipment.pieces(min(part_bytes, wanted))


def object_schema(shipment: Shipment) -> pa.Schema:
    """The unit's columns with their field ids, at every level. All may be null: a deletion has its key alone."""
    ids = {one.name: one for one in arrow_schema(shipment.reading.shipped, with_seq=True)}
    return pa.schema([_optional(ids[one.name]) if one.name in ids else one for one in shipment.schema])


def _optional(column: pa.Field) -> pa.Field:
    kind = column.type
    if types.is_struct(kind):
        kind = pa.struct([_optional(child) for child in kind])
    elif types.is_list(kind):
        kind = pa.list_(_optional(kind.value_field))
    elif types.is_map(kind):
        kind = pa.map_(kind.key_field, _optional(kind.item_field))
    return pa.field(column.name, kind, metadata={FIELD_ID: column.metadata[FIELD_ID]})


# ── where it is done ──


def write_here(
    pieces: Iterable[Piece], target: PartTarget, lake: Storage, storage: Storage
) -> dict[int, tuple[PartObject, ...]]:
    """Write the objects of these pieces, durable when this returns; returns the objects by piece."""
    with storage.batch():
        return {piece.number: _write_piece(piece, target, lake, storage) for piece in pieces}


def write_with_spark(
    spark: SparkSession, pieces: Sequence[Piece], target: PartTarget, lake_options: dict[str, str], tag: str
) -> dict[int, tuple[PartObject, ...]]:
    """The same with Spark tasks, one for each piece: rows go from file to object and pass neither JVM nor driver."""

    def work(task: str) -> Iterator[str]:
        piece = Piece.from_json(task)
        objects = write_here([piece], target, Storage(lake_options), Storage(target.storage_options))
        yield json.dumps([piece.number, objects_to_json(objects[piece.number])])

    # The largest first: the last task to start should not be the longest.
    tasks = [piece.to_json() for piece in sorted(pieces, key=lambda piece: -piece.size_bytes)]
    texts = run_tasks(spark, work, tasks, tag=tag, message="Spark could not write the unit's objects")
    found = {number: objects_from_json(objects) for number, objects in map(json.loads, texts)}
    if found.keys() != {piece.number for piece in pieces} or len(texts) != len(pieces):
        raise Corrupt("Spark did not give one result for every piece", pieces=len(pieces), results=len(texts))
    return found


def task_slots(spark: SparkSession) -> int:
    """How many tasks run at once, as Spark itself cuts what has no partitions of its own. A small job."""
    from pyspark.sql import functions as f

    numbers = spark.range(0, 1 << 16).select(f.spark_partition_id().alias("number"))
    last = collect_tagged(numbers.agg(f.max("number").alias("last")), "floodmark-slots", "Spark does not answer")
    return int(last[0]["last"]) + 1


# ── objects ──


@dataclass(frozen=True)
class _Content:
    data: bytes
    rows: int
    deletions: int


def _write_piece(piece: Piece, target: PartTarget, lake: Storage, storage: Storage) -> tuple[PartObject, ...]:
    batches = piece.batches(lake)
    if target.format == PARQUET:
        contents = _parquet(batches, target.schema, _rows_of_object(piece, target.part_bytes))
    else:
        contents = _jsonl(batches, target.part_bytes)
    return tuple(
        _put(storage, target, f"part-{piece.number:05d}-{roll:03d}.{target.format}", content)
        for roll, content in enumerate(contents)
    )


def _rows_of_object(piece: Piece, part_bytes: int) -> int:
    """A piece of one large file becomes several objects, of the same number of rows."""
    objects = max(1, -(-piece.size_bytes // part_bytes))
    return max(1, -(-piece.rows_max // objects))


def _put(storage: Storage, target: PartTarget, name: str, content: _Content) -> PartObject:
    location, data = join(target.folder, name), content.data
    if not storage.put_if_absent(location, data):
        # An earlier try whose outcome was lost, a task that runs twice, or another writer.
        stored = storage.read(location)
        if stored != data and not (target.format == PARQUET and _same_parquet(stored, data)):
            raise Corrupt(
                "something else has the name of an object of this unit",
                object=location,
                size_bytes=len(stored),
                size_bytes_expected=len(data),
                advice="Nothing was overwritten. Move it away, or give the sink a folder of its own; then run again.",
            )
        data = stored
    return PartObject(name, content.rows, content.deletions, len(data), hashlib.sha256(data).hexdigest())


def _same_parquet(stored: bytes, ours: bytes) -> bool:
    """Whether both hold the same rows in the same order; another version of the writer may write other bytes."""
    try:
        with pq.ParquetFile(pa.BufferReader(stored)) as one, pq.ParquetFile(pa.BufferReader(ours)) as other:
            if one.metadata.num_rows != other.metadata.num_rows:
                return False
            pairs = zip(_even(one), _even(other), strict=True)
            return all(bool(same_rows(left, right).all()) for left, right in pairs)
    except (pa.ArrowException, OSError, TypeError, ValueError):
        # Not Parquet, damaged, or of other columns.
        return False


def _even(parquet: pq.ParquetFile) -> Iterator[pa.Table]:
    """Tables of the same number of rows, whatever the file's row groups are; the last may have fewer."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in parquet.iter_batches(batch_size=_COMPARE_ROWS):
        while rows + len(batch) >= _COMPARE_ROWS:
            head = batch.slice(0, _COMPARE_ROWS - rows)
            yield pa.Table.from_batches([*waiting, head])
            batch, waiting, rows = batch.slice(len(head)), [], 0
        waiting, rows = [*waiting, batch], rows + len(batch)
    if rows:
        yield pa.Table.from_batches(waiting)


def _deletions(batch: pa.RecordBatch) -> int:
    return int(pc.sum(pc.equal(batch.column(CHANGE_COLUMN), DELETE)).as_py() or 0)


# ── Parquet ──


class _ParquetObject:
    """One object being written: written rows are compressed, waiting ones are less than a row group and a batch."""

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = 0
        self._deletions = 0
        self._schema = schema
        self._stream = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(
            self._stream,
            schema,
            compression="zstd",
            compression_level=1,
            store_schema=False,
            dictionary_pagesize_limit=DICTIONARY_BYTES_MAX,
            store_decimal_as_integer=True,
            write_page_checksum=True,
        )
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += len(batch)
        self._deletions += _deletions(batch)
        # The same columns, but for the field ids.
        self._waiting.append(pa.RecordBatch.from_arrays(batch.columns, schema=self._schema))
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def finish(self) -> _Content:
        if self._waiting:
            self._flush()
        self._writer.close()
        return _Content(self._stream.getvalue().to_pybytes(), self.rows, self._deletions)

    def _flush(self) -> None:
        group = pa.Table.from_batches(self._waiting)
        self._writer.write_table(group, row_group_size=len(group))
        self._waiting, self._waiting_bytes = [], 0


def _parquet(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows_max: int) -> Iterator[_Content]:
    making: _ParquetObject | None = None
    for batch in batches:
        start = 0
        while start < len(batch):
            making = making or _ParquetObject(schema)
            part = batch.slice(start, rows_max - making.rows)
            making.add(part)
            start += len(part)
            if making.rows == rows_max:
                yield making.finish()
                making = None
    if making is not None:
        yield making.finish()


# ── JSON lines ──


def _jsonl(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[_Content]:
    """Lines as long as they fit; a line that is larger is alone in its object."""
    making: list[_Content] = []
    size = 0
    for part in _cut(batches):
        lines = encode_lines(part).cast(pa.large_binary())
        ends = _ends(lines)
        start = 0
        while start < len(part):
            fit = int(np.searchsorted(ends, ends[start] + bytes_max - size, side="right")) - 1
            # An empty object takes one line, however long.
            stop = max(fit, start if making else start + 1)
            if stop > start:
                text = lines.buffers()[2][int(ends[start]) : int(ends[stop])].to_pybytes()
                making.append(_Content(text, stop - start, _deletions(part.slice(start, stop - start))))
                size, start = size + len(text), stop
            if start < len(part):
                yield _joined(making)
                making, size = [], 0
    if making:
        yield _joined(making)


def _cut(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = max(1, len(batch) * _ENCODE_BYTES // max(1, batch.nbytes))
        yield from (batch.slice(start, rows) for start in range(0, len(batch), rows))


def _ends(lines: pa.LargeBinaryArray) -> Numbers:
    """Where each line ends in the text of all, after where the first starts."""
    offsets = np.frombuffer(lines.buffers()[1], np.int64)
    return offsets[lines.offset : lines.offset + len(lines) + 1]


def _joined(parts: Sequence[_Content]) -> _Content:
    data = b"".join(part.data for part in parts)
    return _Content(data, sum(part.rows for part in parts), sum(part.deletions for part in parts))
