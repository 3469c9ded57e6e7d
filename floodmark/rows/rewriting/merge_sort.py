"""Rows in order, however many there are: sorted in memory if they fit, else in runs on disk that are then merged.

The order is that of pyarrow's `sort_by`: nulls last, NaN before them, equal rows as they came in. Pyarrow also decides
where runs are cut, so that there is one definition of the order. Memory stays at about twice `bytes_max` however many
rows there are (I14), and open files are few: too many runs are merged into one at once.

Runs are anonymous files in the folder for temporary ones: a crash leaves nothing. They are closed when all rows are
consumed, when the caller stops early, and when something fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from floodmark.storage.failures import local_failure

# More runs than this are merged in several passes: each of them must have a buffer that is worth a read.
FAN_IN_MAX = 32
_BATCH_ROWS_MAX = 64 * 1024
_BATCH_BYTES_MAX = 8 * 1024 * 1024
# Text in one array cannot be more than 2 GiB.
_HELD_BYTES_MAX = 1024 * 1024 * 1024
_PROBES = 64

Keys = Sequence[tuple[str, str]]


def sorted_batches(
    batches: Iterable[pa.RecordBatch], keys: Keys, bytes_max: int
) -> Generator[pa.RecordBatch, None, None]:
    """All rows of the batches by these (column, ascending or descending), in batches of bounded size."""
    if not keys:
        yield from batches
        return
    bytes_max = min(bytes_max, _HELD_BYTES_MAX)
    held: list[pa.RecordBatch] = []
    size_bytes = 0
    with closing(_Runs(keys, bytes_max)) as runs:
        for batch in batches:
            if not len(batch):
                continue
            if held and size_bytes + batch.nbytes > bytes_max:
                runs.spill(held)
                held, size_bytes = [], 0
            held.append(batch)
            size_bytes += batch.nbytes
        if held and not runs.some:
            yield from _in_order(held, keys, _BATCH_BYTES_MAX)
            return
        if held:
            runs.spill(held)
        yield from runs.merged()


def _in_order(parts: list[pa.RecordBatch], keys: Keys, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The rows of all parts in order; empties the parts, so that rows are not held twice."""
    rows = _joined(parts)
    parts.clear()
    order = _order(_key_columns(rows, keys), keys)
    ordered = bool((order == np.arange(len(order), dtype=order.dtype)).all())
    yield from _pieces(rows, None if ordered else order, bytes_max)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _key_columns(rows: pa.RecordBatch, keys: Keys) -> pa.RecordBatch:
    # By number: a name that starts with a dot would be read as a path.
    columns = [rows.column(rows.schema.get_field_index(name)) for name, _ in keys]
    return pa.RecordBatch.from_arrays(columns, names=[str(at) for at in range(len(keys))])


def _order(key_columns: pa.RecordBatch, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The places of the rows in order; equal ones stay as they are."""
    sort_keys = [(str(at), direction) for at, (_, direction) in enumerate(keys)]
    order: np.ndarray[tuple[int], np.dtype[np.uint64]] = pc.sort_indices(key_columns, sort_keys=sort_keys).to_numpy()
    return order


def _pieces(
    rows: pa.RecordBatch, order: np.ndarray[tuple[int], np.dtype[np.uint64]] | None, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """The rows, in this order, as batches of about so many bytes; they are copied piece by piece."""
    count = max(1, min(_BATCH_ROWS_MAX, bytes_max * len(rows) // max(1, rows.nbytes)))
    for start in range(0, len(rows), count):
        piece = rows.slice(start, count) if order is None else rows.take(pa.array(order[start : start + count]))
        yield from _halved(piece, bytes_max)


def _halved(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The batch cut until no part is too large: a few large rows may stand together."""
    if len(batch) <= 1 or batch.nbytes <= bytes_max:
        yield batch
        return
    half = len(batch) // 2
    yield from _halved(batch.slice(0, half), bytes_max)
    yield from _halved(batch.slice(half), bytes_max)


class _Run:
    """Rows in order in a file without a name, to be read once."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        with _failing("write"):
            self._file = tempfile.TemporaryFile(prefix="floodmark-sort-")  # noqa: SIM115 - `close` does
        try:
            self._write(batches)
            with _failing("read"):
                self._file.seek(0)
                self._reader = ipc.open_stream(self._file)
        except BaseException:
            self._file.close()
            raise

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
        writer = None
        for batch in batches:
            with _failing("write"):
                if writer is None:
                    options = ipc.IpcWriteOptions(compression="lz4")
                    writer = ipc.new_stream(self._file, batch.schema, options=options)
                writer.write_batch(batch)
        with _failing("write"):
            if writer is not None:
                writer.close()
            self._file.flush()

    def next(self) -> pa.RecordBatch | None:
        with _failing("read"):
            try:
                return self._reader.read_next_batch()
            except StopIteration:
                return None

    def close(self) -> None:
        self._file.close()


@contextmanager
def _failing(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise local_failure(error, f"{doing} sorted rows", tempfile.gettempdir()) from error


class _Runs:
    """All runs of one sort, by how often their rows were merged: those of a higher level are older."""

    def __init__(self, keys: Keys, bytes_max: int) -> None:
        self._keys = keys
        self._bytes_max = bytes_max
        self._piece_bytes = max(1, bytes_max // (2 * FAN_IN_MAX))
        self._levels: list[list[_Run]] = [[]]

    @property
    def some(self) -> bool:
        return any(self._levels)

    def spill(self, held: list[pa.RecordBatch]) -> None:
        """Put these rows into a run, after all others; empties the list."""
        self._levels[0].append(_Run(_in_order(held, self._keys, self._piece_bytes)))
        for level, runs in enumerate(self._levels):
            if len(runs) < FAN_IN_MAX:
                break
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append(self._merge(runs))
            _close(runs)

    def merged(self) -> Iterator[pa.RecordBatch]:
        """The rows of all runs in order."""
        runs = [run for level in reversed(self._levels) for run in level]
        self._levels = [runs]
        if not runs:
            return
        while len(runs) > FAN_IN_MAX:
            # The youngest are the smallest.
            young = runs[-FAN_IN_MAX:]
            runs.append(self._merge(young))
            del runs[-FAN_IN_MAX - 1 : -1]
            _close(young)
        for rows in _merge(runs, self._keys, self._bytes_max):
            yield from _pieces(rows, None, _BATCH_BYTES_MAX)

    def close(self) -> None:
        for level in self._levels:
            _close(level)

    def _merge(self, runs: Sequence[_Run]) -> _Run:
        merged = _merge(runs, self._keys, self._bytes_max)
        return _Run(piece for rows in merged for piece in _pieces(rows, None, self._piece_bytes))


def _close(runs: list[_Run]) -> None:
    for run in runs:
        run.close()
    runs.clear()


class _Cursor:
    """The position of the merge in a run: its next rows are loaded, at least one unless the run is at its end."""

    def __init__(self, run: _Run, keys: Keys, quota_bytes: int) -> None:
        self._run = run
        self._keys = keys
        self._quota_bytes = quota_bytes
        self._size_bytes = 0
        self._rows = self.key_columns = pa.RecordBatch.from_arrays([], names=[])
        self.ended = False

    def __len__(self) -> int:
        return len(self._rows)

    def fill(self) -> None:
        """Load more if less than half of the limit is loaded: then each round has rows of every run."""
        if self.ended or self._size_bytes * 2 >= self._quota_bytes > 0:
            return
        parts, size_bytes = [self._rows] if len(self) else [], self._size_bytes
        while size_bytes < self._quota_bytes or not parts:
            piece = self._run.next()
            if piece is None:
                self.ended = True
                break
            parts.append(piece)
            size_bytes += piece.nbytes
        if parts:
            self._hold(_joined(parts))

    def take(self, count: int) -> pa.RecordBatch:
        """The next so many rows."""
        rows = self._rows
        self._hold(rows.slice(count))
        return rows.slice(0, count)

    def _hold(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._size_bytes = rows.nbytes
        self.key_columns = _key_columns(rows, self._keys)


def _merge(runs: Sequence[_Run], keys: Keys, bytes_max: int) -> Iterator[pa.RecordBatch]:
    """The rows of all runs in order; of equal ones those of earlier runs first.

    Each round returns the loaded rows that no row not yet loaded can precede: those up to the lowest last loaded row of
    an unfinished run. Runs that begin after it are not touched: those that do not overlap cost one check per round.
    """
    cursors = [_Cursor(run, keys, bytes_max // (2 * len(runs))) for run in runs]
    while True:
        for cursor in cursors:
            cursor.fill()
        cursors = [cursor for cursor in cursors if len(cursor)]
        if not cursors:
            return
        going_on = [at for at, cursor in enumerate(cursors) if not cursor.ended]
        if going_on:
            lasts = [cursors[at].key_columns.slice(len(cursors[at]) - 1) for at in going_on]
            # Of equal ones the first: an earlier run may have more of them, which come before those of later runs.
            lowest = int(_order(_joined(lasts), keys)[0])
            counts = _counts_up_to(cursors, going_on[lowest], lasts[lowest], keys)
        else:
            counts = {at: len(cursor) for at, cursor in enumerate(cursors)}
        parts = [cursors[at].take(count) for at, count in sorted(counts.items())]
        if len(parts) == 1:
            yield parts[0]
        else:
            yield from _in_order(parts, keys, _BATCH_BYTES_MAX)


def _counts_up_to(cursors: list[_Cursor], last_of: int, limit: pa.RecordBatch, keys: Keys) -> dict[int, int]:
    """How many rows of each cursor come up to the limit, the last loaded row of one cursor; those without are left out.

    Rows that are equal to the limit come before it in earlier runs, and after it in later ones.
    """
    firsts = [cursor.key_columns.slice(0, 1) for cursor in cursors]
    # In its place among the first rows: of equal ones those of later runs are then after it.
    order = _order(_joined([*firsts[:last_of], limit, *firsts[last_of + 1 :]]), keys)
    begun = order[: np.flatnonzero(order == last_of)[0]].tolist()
    counts = {at: _count_up_to(cursors[at].key_columns, limit, keys, with_equal=at < last_of) for at in begun}
    return {**counts, last_of: len(cursors[last_of])}


def _count_up_to(rows: pa.RecordBatch, limit: pa.RecordBatch, keys: Keys, *, with_equal: bool) -> int:
    """How many of these sorted rows come before the limit; with those that are equal to it, or without.

    A few rows at a time are sorted together with the limit, and the search continues between two of them.
    """
    low, high = 0, len(rows)
    while low < high:
        probes = np.arange(low, high, -(-(high - low) // _PROBES))
        some = rows.take(pa.array(probes))
        order = _order(_joined([some, limit] if with_equal else [limit, some]), keys)
        found = int(np.flatnonzero(order == (len(probes) if with_equal else 0))[0])
        if found < len(probes):
            high = int(probes[found])
        low = low if found == 0 else int(probes[found - 1]) + 1
    return low
