"""Which files of a table are filled next: pure planning, from records of files that lack the column.

A batch is whole files, of bounded rows, bytes and number. They are ordered partition by partition, the oldest rows
first, so that one batch rewrites rows of about one age and one place. A file that is larger than a batch is not filled
but cut into files of at most a batch, once nothing else is left; these are filled before the next one is cut. So no
publish fills more than a batch, whatever others wrote, and a cut is followed by a batch unless another writer undid it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from floodmark.commit.live_files import LiveFile
from floodmark.model import Scalar

# The seal records what a publish names: many tiny files are many batches.
FILES_MAX = 256
# A file of a few rows is mostly its frame: below this size, fewer rows would not make it smaller.
CUT_BYTES_MIN = 64 * 1024


@dataclass(frozen=True)
class BatchLimits:
    """The limits of one batch."""

    rows_max: int
    bytes_max: int
    files_max: int = FILES_MAX

    def piece_rows(self, file: LiveFile) -> int | None:
        """Maximum rows of the files that this one is to be cut into; None if it fits into a batch."""
        rows = self.rows_max
        if file.size_bytes > max(self.bytes_max, CUT_BYTES_MIN):
            # With a margin: a file of fewer rows needs somewhat more bytes for each.
            rows = min(rows, file.rows * self.bytes_max * 3 // (file.size_bytes * 4))
        rows = max(1, rows)
        return rows if rows < file.rows else None


@dataclass(frozen=True)
class Batch:
    """Files that one publish replaces. With `piece_rows` it is one file, to be cut and not to be filled."""

    files: tuple[LiveFile, ...]
    piece_rows: int | None = None

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def pieces(self) -> int:
        """How many files a cut makes of it."""
        return 0 if self.piece_rows is None else -(-self.rows // self.piece_rows)

    def units(self, count: int) -> list[tuple[LiveFile, ...]]:
        """Its files, in order, in so many parts of about equal rows: each part is rewritten, or lost, together."""
        parts: list[list[LiveFile]] = [[]]
        rows, share = 0, self.rows / max(1, count)
        for file in self.files:
            if parts[-1] and rows >= share * len(parts):
                parts.append([])
            parts[-1].append(file)
            rows += file.rows
        return [tuple(part) for part in parts if part]


def plan_batches(files: Sequence[LiveFile], limits: BatchLimits) -> Iterator[Batch]:
    """All batches that these files make: those that fill, then the cuts."""
    waiting: list[LiveFile] = []
    cuts: list[Batch] = []
    rows = size_bytes = 0
    for file in in_order(files):
        piece_rows = limits.piece_rows(file)
        if piece_rows is not None:
            cuts.append(Batch((file,), piece_rows))
            continue
        full = rows + file.rows > limits.rows_max or size_bytes + file.size_bytes > limits.bytes_max
        if waiting and (full or len(waiting) == limits.files_max):
            yield Batch(tuple(waiting))
            waiting, rows, size_bytes = [], 0, 0
        waiting.append(file)
        rows += file.rows
        size_bytes += file.size_bytes
    if waiting:
        yield Batch(tuple(waiting))
    yield from cuts


def in_order(files: Sequence[LiveFile]) -> list[LiveFile]:
    """Partition by partition, the one with the oldest rows first; the oldest first in each."""
    oldest: dict[tuple[Scalar, ...], tuple[int, str]] = {}
    for file in files:
        place, age = _place(file), _age(file)
        oldest[place] = min(oldest.get(place, age), age)
    return sorted(files, key=lambda file: (oldest[_place(file)], _age(file)))


def _place(file: LiveFile) -> tuple[Scalar, ...]:
    record = file.data_file.partition
    return (file.spec_id, *(record[place] for place in range(len(record))))


def _age(file: LiveFile) -> tuple[int, str]:
    """By the oldest row; files whose sequences are not known come first."""
    bounds = file.seq_bounds()
    return (-1 if bounds is None else bounds[0], file.path)
