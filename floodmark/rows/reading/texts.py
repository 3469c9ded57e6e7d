"""The rows of a unit cut into bodies of NDJSON text.

Recorded boundaries are kept, whatever the rules are now; after them the rules cut. Both depend on the rows alone, not
on how they are read, so a part that is built again has the same bytes (I8). Rows that end before the last recorded
boundary are an error, never a shorter part. A row with a value that JSON has no text for is alone in its body, which
has the reason, and has null in place of that value: it is set aside, never sent. Memory is bounded by one body, and by
the text of a few megabytes of rows (I14).
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from floodmark.errors import Corrupt, Invalid
from floodmark.json_form import Json
from floodmark.rows.json.ndjson import encode_lines, holds
from floodmark.rows.reading.changes import CHANGE_COLUMN, DELETE
from floodmark.storage import Storage

if TYPE_CHECKING:
    from floodmark.rows.reading.shipment import Shipment

# Row numbers of a unit: from the first, inclusive, to the second, exclusive.
Range = tuple[int, int]
# How much of a batch becomes text at once; text is often several times as long.
ENCODE_BYTES = 4 * 1024 * 1024
# In a row that was set aside because of them: the columns whose values have no text.
UNENCODABLE = "_unencodable"


@dataclass(frozen=True)
class Body:
    """The rows [first, last) of a unit as NDJSON; `deletions` of them are deletions."""

    first: int
    last: int
    deletions: int
    data: bytes
    # Why its only row cannot be sent: a value of it has no text, and `data` is the row without that value.
    problem: str | None = None

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def bodies(
    shipment: Shipment,
    storage: Storage,
    part_rows: int,
    part_bytes: int,
    known: Sequence[Range] = (),
    skip: Collection[Range] = (),
) -> Iterator[Body]:
    """The rows cut into parts: at the boundaries of `known` first, whatever the rules are now, then by the rules.

    `known` is ascending and without gaps from row 0 on. The parts in `skip`, some of `known`, are left out. A row that
    is larger than `part_bytes` is alone in its part.
    """
    _check_known(known, skip)
    skipped = set(skip)
    waiting = deque(part for part in known if part not in skipped)
    making: _Making | None = None
    for number, rows in _runs(shipment, storage, skipped):
        for start, lines in _encoded(number, rows):
            if isinstance(lines, _Unencodable):
                if making is not None:
                    if waiting:
                        raise _fewer(waiting[0])
                    yield making.body()
                    making = None
                if waiting and waiting.popleft() != (start, start + 1):
                    raise _fewer((start, start + 1))
                yield Body(start, start + 1, 0, lines.data, lines.problem)
                continue
            while lines.left:
                if making is None and waiting:
                    making = _Making(start + lines.at, waiting[0][1] - waiting[0][0], None)
                elif making is None:
                    making = _Making(start + lines.at, part_rows, part_bytes)
                making.take(lines)
                if making.full or lines.left:
                    if waiting:
                        waiting.popleft()
                    yield making.body()
                    making = None
    if waiting:
        raise _fewer(waiting[0])
    if making is not None:
        yield making.body()


def _check_known(known: Sequence[Range], skip: Collection[Range]) -> None:
    at = 0
    for first, last in known:
        if first != at or last <= first:
            raise Corrupt("the parts of a unit have a gap or are not in order", part=f"{first}-{last}", expected=at)
        at = last
    if strange := set(skip).difference(known):
        first, last = min(strange)
        raise Corrupt("a part that is done is none of the unit's parts", part=f"{first}-{last}")


def _fewer(part: Range) -> Corrupt:
    return Corrupt(
        "a unit has fewer rows than its recorded parts",
        part=f"{part[0]}-{part[1]}",
        advice="Run `floodmark doctor`: a file that the unit's version names was changed or is not whole.",
    )


def _runs(shipment: Shipment, storage: Storage, skip: Collection[Range]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """All rows but those of `skip`, with the number of the first of each batch."""
    passed = _joined(skip)
    for at, batch in shipment.numbered(storage, passed):
        done = 0
        for first, last in [*passed, (at + len(batch), at + len(batch))]:
            if done < first - at and done < len(batch):
                yield at + done, batch.slice(done, min(first - at, len(batch)) - done)
            done = max(done, last - at)


def _joined(parts: Iterable[Range]) -> list[Range]:
    """Adjacent ranges joined."""
    joined: list[Range] = []
    for first, last in sorted(parts):
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return joined


class _Lines:
    """The texts of some rows; those before `at` are consumed."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        texts = encode_lines(rows)
        _, offsets, data = texts.buffers()
        self.at = 0
        self._offsets = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        self._data = memoryview(data)
        deleted = pc.equal(rows.column(CHANGE_COLUMN), DELETE).to_numpy(zero_copy_only=False)
        self._deleted = np.concatenate([[0], np.cumsum(deleted)])

    @property
    def left(self) -> int:
        return len(self._offsets) - 1 - self.at

    def fitting(self, size_bytes: int) -> int:
        """How many of the next rows fit into so many bytes."""
        limit = self._offsets[self.at] + size_bytes
        return int(np.searchsorted(self._offsets, limit, side="right")) - 1 - self.at

    def take(self, rows: int) -> tuple[memoryview, int]:
        """The text of the next rows, and how many of them are deletions."""
        start, stop = self.at, self.at + rows
        self.at = stop
        data = self._data[self._offsets[start] : self._offsets[stop]]
        return data, int(self._deleted[stop] - self._deleted[start])


@dataclass(frozen=True)
class _Unencodable:
    """A row with a value that has no text: what is left of it, and why."""

    data: bytes
    problem: str


def _encoded(number: int, rows: pa.RecordBatch) -> Iterator[tuple[int, _Lines | _Unencodable]]:
    step = max(1, ENCODE_BYTES * len(rows) // max(1, rows.nbytes))
    for start in range(0, len(rows), step):
        yield from _halved_to_bad(number + start, rows.slice(start, step))


def _halved_to_bad(number: int, rows: pa.RecordBatch) -> Iterator[tuple[int, _Lines | _Unencodable]]:
    """The texts of rows; those that cannot be written are found by halving, and are alone."""
    try:
        lines = _Lines(rows)
    except (Invalid, Corrupt) as error:
        if not all(holds(field.type) for field in rows.schema):
            raise  # the column cannot be written, not a row of it
        if len(rows) == 1:
            yield number, _Unencodable(_stand_in(rows), f"this row has no form as JSON: {error}")
            return
        middle = len(rows) // 2
        yield from _halved_to_bad(number, rows.slice(0, middle))
        yield from _halved_to_bad(number + middle, rows.slice(middle))
        return
    yield number, lines


def _stand_in(row: pa.RecordBatch) -> bytes:
    """A row without the values that have no text, and with their names."""
    found: dict[str, Json] = {}
    missing = []
    for field_, column in zip(row.schema, row.columns, strict=True):
        try:
            lines = encode_lines(pa.RecordBatch.from_arrays([column], schema=pa.schema([field_])))
            found |= json.loads(lines[0].as_py())
        except (Invalid, Corrupt):
            found[field_.name] = None
            missing.append(field_.name)
    return json.dumps({**found, UNENCODABLE: missing}, ensure_ascii=False).encode() + b"\n"


@dataclass
class _Making:
    """A body being built; without `bytes_max` its end is known."""

    first: int
    rows_max: int
    bytes_max: int | None
    rows: int = 0
    deletions: int = 0
    size_bytes: int = 0
    texts: list[memoryview] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return self.rows == self.rows_max

    def take(self, lines: _Lines) -> None:
        """As many of the rows as fit; the first of all always does."""
        rows = min(lines.left, self.rows_max - self.rows)
        if self.bytes_max is not None:
            rows = min(rows, max(lines.fitting(self.bytes_max - self.size_bytes), 0 if self.rows else 1))
        text, deletions = lines.take(rows)
        self.rows += rows
        self.deletions += deletions
        self.size_bytes += len(text)
        self.texts.append(text)

    def body(self) -> Body:
        return Body(self.first, self.first + self.rows, self.deletions, b"".join(self.texts))
