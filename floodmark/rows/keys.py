"""Which rows of a file hold one of a set of keys? The set is the key columns of other files.

A set may be larger than memory: it is read in chunks that are bounded in rows and in bytes (I14), and only a set of one
chunk is kept between searches. Of the searched file only the key columns are read. A key consists of required plain
columns that are not float; a null, which only a foreign file can hold there, matches nothing. Nothing is written;
reading the same files again gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import acero, types
from pyiceberg.types import NestedField

from floodmark.rows.arrays import Numbers
from floodmark.rows.project import read_file, read_schema
from floodmark.storage import Storage

KEYS_PER_CHUNK = 2_000_000
KEY_BYTES_PER_CHUNK = 256 * 1024 * 1024
# Keys may be long texts: one read is small beside a chunk even then.
KEY_BATCH_ROWS = 8192
TEXT_SHOWN_MAX = 60


@dataclass(frozen=True)
class Matches:
    """Row positions in a file whose key is in the set, and for each the place of that key in the set."""

    positions: Numbers  # ascending, in the looked-at file
    files: npt.NDArray[np.int32]  # which file of the set
    places: Numbers  # row position in that file


@dataclass(frozen=True)
class _Chunk:
    """Some keys of the set, and where each of them is."""

    keys: pa.Table
    files: npt.NDArray[np.int32]
    places: Numbers


class KeySet:
    """The keys of some files, to be searched for in others."""

    def __init__(
        self, storage: Storage, files: Sequence[str], fields: Sequence[NestedField], chunk_rows: int = KEYS_PER_CHUNK
    ) -> None:
        self._storage = storage
        self._files = list(files)
        self._fields = list(fields)
        self._chunk_rows = max(1, chunk_rows)
        # Many files are searched with one set: a small set is read once.
        self._kept: list[_Chunk] | None = None

    @property
    def held(self) -> bool:
        """Whether the whole set is in memory, so that many threads may search it at once."""
        return self._kept is not None

    def match(self, storage: Storage, location: str) -> Matches:
        """The rows of a data file that have a key of the set."""
        return self.match_table(read_keys(storage, location, self._fields)) if self._files else _merged([])

    def match_table(self, keys: pa.Table) -> Matches:
        """The rows of these key columns, given in the order of the key, that have a key of the set."""
        looked_at = _comparable(keys, self._fields)
        if not looked_at.num_rows:
            return _merged([])
        return _merged([_match(looked_at, chunk) for chunk in self._chunks()])

    def _chunks(self) -> Iterator[_Chunk]:
        if self._kept is not None:
            yield from self._kept
            return
        last: list[_Chunk] = []
        count = 0
        for chunk in self._read_chunks():
            yield chunk
            last, count = [chunk], count + 1
        if count <= 1:
            self._kept = last

    def _read_chunks(self) -> Iterator[_Chunk]:
        held: list[tuple[int, int, pa.RecordBatch]] = []
        rows = size_bytes = 0
        for file, location in enumerate(self._files):
            place = 0
            for batch in read_file(self._storage, location, self._fields, KEY_BATCH_ROWS):
                for piece in _cut(batch, self._chunk_rows):
                    full = rows + len(piece) > self._chunk_rows or size_bytes + piece.nbytes > KEY_BYTES_PER_CHUNK
                    if held and full:
                        yield self._chunk(held)
                        held, rows, size_bytes = [], 0, 0
                    held.append((file, place, piece))
                    rows, size_bytes, place = rows + len(piece), size_bytes + piece.nbytes, place + len(piece)
        if held:
            yield self._chunk(held)

    def _chunk(self, held: Sequence[tuple[int, int, pa.RecordBatch]]) -> _Chunk:
        keys = pa.Table.from_batches([piece for _, _, piece in held])
        files = np.concatenate([np.full(len(piece), file, np.int32) for file, _, piece in held])
        places = np.concatenate([np.arange(place, place + len(piece), dtype=np.int64) for _, place, piece in held])
        return _Chunk(_comparable(keys, self._fields), files, places)


def match_keys(looked_at: pa.Table, keys: pa.Table, fields: Sequence[NestedField]) -> tuple[Numbers, Numbers]:
    """The row numbers, in the first and in the second table, of each pair with the same key; by the first's order.

    Both hold the key's columns alone, in the order of `fields`, under whatever names. A null matches nothing.
    """
    if not looked_at.num_rows or not keys.num_rows:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    left, right = _join(_comparable(looked_at, fields), _comparable(keys, fields))
    order = np.lexsort((right, left))
    return left[order], right[order]


def read_keys(storage: Storage, location: str, fields: Sequence[NestedField]) -> pa.Table:
    """The key columns of one file, whole."""
    return pa.Table.from_batches(read_file(storage, location, fields), schema=read_schema(fields))


def examples(
    storage: Storage, location: str, fields: Sequence[NestedField], positions: Numbers, limit: int = 3
) -> list[str]:
    """The keys of the first of these rows, for an error message."""
    wanted = sorted(int(position) for position in positions[:limit])
    found: list[str] = []
    start = 0
    for batch in read_file(storage, location, fields):
        if len(found) == len(wanted):
            break
        here = [position - start for position in wanted if start <= position < start + len(batch)]
        found += render_keys(batch.take(pa.array(here, pa.int64())))
        start += len(batch)
    return found


def render_keys(keys: pa.Table | pa.RecordBatch) -> list[str]:
    """One text for each row, like `id=5, day=2026-11-15`; long texts are cut."""
    names = keys.schema.names
    columns = [_texts(keys.column(at)) for at in range(len(names))]
    rows = zip(*columns, strict=True)
    return [", ".join(f"{name}={text}" for name, text in zip(names, row, strict=True)) for row in rows]


def _texts(column: pa.Array | pa.ChunkedArray) -> list[str]:
    if types.is_binary(column.type):
        texts = [None if value is None else f"0x{value[:TEXT_SHOWN_MAX].hex()}" for value in column.to_pylist()]
    elif types.is_string(column.type):
        # Through bytes: a foreign file may hold text that is not UTF-8, and the message must still be built.
        raw = column.cast(pa.binary()).to_pylist()
        texts = [None if value is None else _readable(value.decode(errors="replace")) for value in raw]
    elif types.is_temporal(column.type):
        texts = [value and value.replace(".000000", "") for value in column.cast(pa.string()).to_pylist()]
    else:
        texts = column.cast(pa.string()).to_pylist()
    return [_shortened(text) if text is not None else "null" for text in texts]


def _readable(text: str) -> str:
    return text if text and text.isprintable() and text == text.strip() else repr(text)


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN_MAX else f"{text[: TEXT_SHOWN_MAX - 1]}…"


def _cut(batch: pa.RecordBatch, rows_max: int) -> Iterator[pa.RecordBatch]:
    """The same rows in pieces that fit into a chunk, without copying."""
    pieces = max(1, -(-len(batch) // rows_max), -(-batch.nbytes // KEY_BYTES_PER_CHUNK))
    step = max(1, -(-len(batch) // pieces))
    for start in range(0, len(batch), step):
        yield batch.slice(start, step)


def _comparable(keys: pa.Table, fields: Sequence[NestedField]) -> pa.Table:
    """The key columns under names and types of ours, and the number of each row."""
    columns = []
    for column, goal in zip(keys.columns, read_schema(fields), strict=True):
        columns.append(column if column.type.equals(goal.type) else column.cast(goal.type))
    numbers = pa.array(np.arange(keys.num_rows, dtype=np.int64))
    return pa.table([*columns, numbers], names=[*_names(len(fields)), "row"])


def _names(columns: int) -> list[str]:
    return [f"k{at}" for at in range(columns)]


def _match(looked_at: pa.Table, chunk: _Chunk) -> Matches:
    # The right side is built into a hash table, which costs ten times as much as a lookup: the smaller one.
    swapped = looked_at.nbytes < chunk.keys.nbytes
    pair = (chunk.keys, looked_at) if swapped else (looked_at, chunk.keys)
    left, right = _join(*pair)
    positions, found = (right, left) if swapped else (left, right)
    return Matches(positions, chunk.files[found], chunk.places[found])


def _join(left: pa.Table, right: pa.Table) -> tuple[Numbers, Numbers]:
    """The row numbers, left and right, of each pair of rows with equal keys, in no order."""
    names = _names(left.num_columns - 1)
    options = acero.HashJoinNodeOptions(
        "inner", names, names, ["row"], ["row"], output_suffix_for_left="_left", output_suffix_for_right="_right"
    )
    sides = [acero.Declaration("table_source", acero.TableSourceNodeOptions(side)) for side in (left, right)]
    # Without threads of its own: it runs in tasks, of which there are as many as cores.
    pairs = acero.Declaration("hashjoin", options, inputs=sides).to_table(use_threads=False)
    return pairs.column(0).to_numpy(), pairs.column(1).to_numpy()


def _merged(parts: Sequence[Matches]) -> Matches:
    """All of them by ascending position; of a position that matched twice, the first place in the set."""
    positions = np.concatenate([np.empty(0, np.int64), *(part.positions for part in parts)])
    files = np.concatenate([np.empty(0, np.int32), *(part.files for part in parts)])
    places = np.concatenate([np.empty(0, np.int64), *(part.places for part in parts)])
    order = np.lexsort((places, files, positions))
    positions, files, places = positions[order], files[order], places[order]
    first = np.ones(len(positions), np.bool_)
    first[1:] = positions[1:] != positions[:-1]
    return Matches(positions[first], files[first], places[first])
