"""Two states of one table compared by their rows: which rows only one of them has, and which have changed.

Rows with a key are the same row if their keys are equal; without a key, if all their columns are. Of several equal rows
without a key the one that came first, by its sequence, is paired with the one that came first in the other state: so
the newest of them are those too many. Files that both states have are left out by the caller: their rows are equal.

Of a column that an expression fills a file may lack the values. Its rows have the expression's values, where Arrow can
evaluate it. Where only Spark can, they equal a row that has a value only if both have one sequence: a fill keeps the
sequence, a write does not. So a written value is never taken for a filled one; a filled one may be for a written one.

Both states are read once, in the same shape, and each row becomes 128 bits of its key and of its values, hashed with
numbers drawn for this comparison: senders of rows cannot prepare two that look alike. These are sorted, on disk if they
do not fit into memory, and read side by side. Memory holds a bit for each row beside that (I14). Nothing is written.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from floodmark.commit.fills import Fill, absent_fields
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt, Invalid
from floodmark.model import SEQ_COLUMN
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.checksum import row_hashes
from floodmark.rows.mixing import Hashes
from floodmark.rows.reading.arrow_reader import read_rows
from floodmark.rows.rewriting.merge_sort import sorted_batches
from floodmark.rows.schema import arrow_type, user_fields
from floodmark.rows.sql.expression import Plain, parse_plain
from floodmark.storage import Storage

SORT_BYTES_MAX = 64 * 1024 * 1024
_BITS_PER_BYTE = 8
# A row as it is compared: two hashes of what identifies it, its rank among rows of the same, two hashes of its other
# values, and its number. Its sequence and hashes of columns that some files lack come after these.
_ROW = [("high", "<u8"), ("low", "<u8"), ("rank", "<i8"), ("one", "<u8"), ("two", "<u8"), ("row", "<i8")]
_IDENTITY = ("high", "low", "rank")

Entries = npt.NDArray[np.void]


class RowSet:
    """Some rows of some files, a bit for each row that the files have."""

    def __init__(self, files: Sequence[LiveFile]) -> None:
        self.files = tuple(files)
        sizes = [-(-file.rows // _BITS_PER_BYTE) for file in self.files]
        # A row's number: those of a file begin at a whole byte.
        self.starts: Numbers = np.cumsum([0, *sizes], dtype=np.int64) * _BITS_PER_BYTE
        self._bits = np.zeros(sum(sizes), np.uint8)

    def add(self, rows: Numbers) -> None:
        """Add rows by their numbers."""
        np.bitwise_or.at(self._bits, rows >> 3, np.left_shift(1, rows & 7).astype(np.uint8))

    def add_all(self) -> None:
        for at, file in enumerate(self.files):
            first, end = self._bytes_of(at)
            self._bits[first:end] = np.packbits(np.ones(file.rows, np.uint8), bitorder="little")

    @property
    def count(self) -> int:
        return int(np.bitwise_count(self._bits).sum())

    def by_file(self) -> Iterator[tuple[LiveFile, Numbers]]:
        """The files that hold some of the rows, each with their positions, ascending."""
        for at, file in enumerate(self.files):
            first, end = self._bytes_of(at)
            found = np.flatnonzero(np.unpackbits(self._bits[first:end], bitorder="little", count=file.rows))
            if len(found):
                yield file, found.astype(np.int64)

    def place(self, row: int) -> tuple[LiveFile, int]:
        """The file and the position of a row."""
        at = int(self.places(np.array([row]))[0])
        return self.files[at], row - int(self.starts[at])

    def places(self, rows: Numbers) -> Numbers:
        """For each row, which of the files has it."""
        return np.asarray(np.searchsorted(self.starts, rows, side="right") - 1, np.int64)

    def lowest(self, count: int) -> Numbers:
        """The first of the rows, by their numbers."""
        found = np.empty(0, np.int64)
        starts = {file.path: start for file, start in zip(self.files, self.starts, strict=False)}
        for file, positions in self.by_file():
            if len(found) >= count:
                break
            found = np.concatenate([found, starts[file.path] + positions[:count]])
        return found[:count]

    def _bytes_of(self, at: int) -> tuple[int, int]:
        return int(self.starts[at]) // _BITS_PER_BYTE, int(self.starts[at + 1]) // _BITS_PER_BYTE


@dataclass
class TwoStates:
    """What a comparison found. `only_before` and `only_after` hold changed rows too, each as it is in that state.

    updated: how many rows changed. came, went, changed: the first rows of each kind, by their numbers. shared_after:
    how many rows have the key of another row of that state.
    """

    only_before: RowSet
    only_after: RowSet
    updated: int = 0
    came: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    went: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    changed: Numbers = field(default_factory=lambda: np.empty((0, 2), np.int64))
    shared_after: int = 0

    @property
    def added(self) -> int:
        return self.only_after.count - self.updated

    @property
    def deleted(self) -> int:
        return self.only_before.count - self.updated


def compare(
    storage: Storage,
    before: Sequence[LiveFile],
    after: Sequence[LiveFile],
    schema: Schema,
    fills: Sequence[Fill] = (),
    *,
    table: str,
    keyed: bool,
    first: int = 0,
    look_for_shared: bool = False,
    sort_bytes: int = SORT_BYTES_MAX,
) -> TwoStates:
    """Compare the rows of two lists of files, read with this schema; `first` rows of each kind are named.

    `fills`: the columns that files may lack. look_for_shared: rows are read for `shared_after` even if one list is
    empty. `Invalid` if a file lacks a column of the key, and only Spark can compute it.
    """
    found = TwoStates(RowSet(before), RowSet(after))
    if (not before or not after) and not look_for_shared:
        # Without the other side there is nothing to compare with, and nothing to read.
        found.only_before.add_all()
        found.only_after.add_all()
        found.went, found.came = found.only_before.lowest(first), found.only_after.lowest(first)
        return found
    columns = _Columns.of(before, after, schema, fills, table=table, keyed=keyed)
    sides = [_Side(storage, rows, columns, sort_bytes) for rows in (found.only_before, found.only_after)]
    with closing(sides[0].entries()) as ours, closing(sides[1].entries()) as theirs:
        for one, other, paired in _side_by_side(ours, theirs):
            _judge(found, sides, one, other, paired, first)
    found.shared_after = sides[1].shared
    return found


# ── rows as hashes ──


@dataclass(frozen=True)
class _Columns:
    """What is hashed of a row. `some`: columns that some files lack, and that do not identify a row.

    computed: the columns that Arrow computes where a file lacks them, by their field ids, the oldest first.
    """

    schema: Schema
    fills: tuple[Fill, ...]
    identity: tuple[str, ...]
    values: tuple[str, ...]
    some: tuple[Fill, ...]
    computed: dict[int, tuple[NestedField, Plain]]
    salts: tuple[int, int]
    keyed: bool

    @classmethod
    def of(
        cls,
        before: Sequence[LiveFile],
        after: Sequence[LiveFile],
        schema: Schema,
        fills: Sequence[Fill],
        *,
        table: str,
        keyed: bool,
    ) -> _Columns:
        absent = {field_id for file in (*before, *after) for field_id in absent_fields(file, fills, schema)}
        lacked = [fill for fill in fills if fill.field_id in absent]
        computed = _computed(lacked, schema)
        key = schema.identifier_field_ids if keyed else ()
        for fill in lacked:
            if fill.field_id in key and fill.field_id not in computed:
                raise Invalid(
                    "earlier rows have no value of this column of the key, and only Spark can compute it",
                    table=table,
                    column=fill.column,
                    expression=fill.expression,
                    advice="Read that version, compute the column, and merge the rows.",
                )
        held = [column for column in user_fields(schema) if column.field_id not in absent]
        names = tuple(column.name for column in held)
        return cls(
            schema,
            tuple(fills),
            identity=tuple(column.name for column in user_fields(schema) if column.field_id in key) if keyed else names,
            values=names if keyed else (),
            some=tuple(fill for fill in lacked if fill.field_id not in key),
            computed=computed,
            salts=(secrets.randbits(64), secrets.randbits(64)),
            keyed=keyed,
        )

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        return np.dtype([*_ROW, *([("seq", "<i8")] if self.some else []), *((name, "<u8") for name in self.some_names)])

    @cached_property
    def some_names(self) -> tuple[str, ...]:
        return tuple(f"some{at}" for at in range(len(self.some)))

    @cached_property
    def order(self) -> tuple[tuple[str, str], ...]:
        """Rows without a key in the order in which they came."""
        names = ("high", "low") if self.keyed else ("high", "low", "seq")
        return tuple((name, "ascending") for name in names)

    def hashed(self, batch: pa.RecordBatch, numbers: Numbers, absent: Sequence[int]) -> pa.RecordBatch:
        """`absent`: the columns that the file of these rows lacks."""
        for field_id, (column, plain) in self.computed.items():
            if field_id in absent:
                values = plain.evaluate(batch).cast(arrow_type(column.field_type))
                batch = batch.set_column(batch.schema.get_field_index(column.name), column.name, values)
        arrays: dict[str, npt.NDArray[np.generic]] = {"row": numbers}
        arrays["high"], arrays["low"] = self._hashes(batch, self.identity)
        if self.keyed:
            arrays["one"], arrays["two"] = self._hashes(batch, self.values)
        if self.some or not self.keyed:
            arrays["seq"] = batch.column(SEQ_COLUMN).to_numpy(zero_copy_only=False)
        for name, fill in zip(self.some_names, self.some, strict=True):
            arrays[name] = self._hashes(batch, (fill.column,))[0]
        return pa.RecordBatch.from_arrays([pa.array(array) for array in arrays.values()], names=list(arrays))

    def _hashes(self, batch: pa.RecordBatch, names: Sequence[str]) -> tuple[Hashes, Hashes]:
        if not names:
            return np.zeros(len(batch), np.uint64), np.zeros(len(batch), np.uint64)
        columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
        part = pa.RecordBatch.from_arrays(columns, names=[str(at) for at in range(len(columns))])
        return row_hashes(part, self.salts[0]), row_hashes(part, self.salts[1])


def _computed(lacked: Sequence[Fill], schema: Schema) -> dict[int, tuple[NestedField, Plain]]:
    """Those of the lacked columns that Arrow can compute, also where a file lacks all of these."""
    found: dict[int, tuple[NestedField, Plain]] = {}
    spark = set()
    for fill in lacked:
        plain = parse_plain(fill.expression, schema)
        if plain is None or plain.column in spark:
            spark.add(fill.column)
        else:
            found[fill.field_id] = schema.find_field(fill.field_id), plain
    return found


class _Side:
    """The rows of one state, as entries in the order of what identifies them."""

    def __init__(self, storage: Storage, rows: RowSet, columns: _Columns, sort_bytes: int) -> None:
        self._storage = storage
        self._rows = rows
        self._columns = columns
        self._sort_bytes = sort_bytes
        self._absent = [absent_fields(file, columns.fills, columns.schema) for file in rows.files]
        # For each file, whether it lacks each of the columns that some files lack.
        lacks = [[fill.field_id in ids for fill in columns.some] for ids in self._absent]
        self._lacks = np.array(lacks, np.bool_).reshape(len(rows.files), len(columns.some))
        self.shared = 0

    @property
    def keyed(self) -> bool:
        return self._columns.keyed

    @property
    def computed(self) -> list[bool]:
        """For each of the columns that some files lack, whether its hashes are right there too."""
        return [fill.field_id in self._columns.computed for fill in self._columns.some]

    def entries(self) -> Generator[Entries, None, None]:
        previous: tuple[int, int, int] | None = None
        with closing(sorted_batches(self._hashed(), self._columns.order, self._sort_bytes)) as batches:
            for batch in batches:
                if not len(batch):
                    continue
                found = np.zeros(len(batch), self._columns.dtype)
                for name in batch.schema.names:
                    if name != "seq" or self._columns.some:
                        found[name] = batch.column(name).to_numpy(zero_copy_only=False)
                found["rank"] = _ranks(found, previous)
                previous = _identity(found[-1])
                if self._columns.keyed:
                    self.shared += int((found["rank"] > 0).sum())
                yield found

    def lacking(self, numbers: Numbers) -> Mask:
        """For each row, which of the columns that some files lack its file lacks."""
        lacks: Mask = self._lacks[self._rows.places(numbers)]
        return lacks

    def _hashed(self) -> Iterator[pa.RecordBatch]:
        for start, file, absent in zip(self._rows.starts, self._rows.files, self._absent, strict=False):
            count = 0
            for batch in read_rows(self._storage, file.path, self._columns.schema, True, file.sequence):
                yield self._columns.hashed(batch, int(start) + count + np.arange(len(batch), dtype=np.int64), absent)
                count += len(batch)
            if count != file.rows:
                raise Corrupt(
                    "a data file does not have the number of rows in the catalog",
                    file=file.path,
                    rows=count,
                    rows_expected=file.rows,
                    advice="Nothing was changed. Run `floodmark doctor`.",
                )


def _ranks(entries: Entries, previous: tuple[int, int, int] | None) -> Numbers:
    """How many rows of the same identity come before each; `previous` is the entry before the first."""
    new = np.ones(len(entries), np.bool_)
    new[1:] = (entries["high"][1:] != entries["high"][:-1]) | (entries["low"][1:] != entries["low"][:-1])
    starts = np.flatnonzero(new)
    ranks = np.arange(len(entries)) - np.repeat(starts, np.diff(starts, append=len(entries)))
    if previous is not None and previous[:2] == _identity(entries[0])[:2]:
        end = starts[1] if len(starts) > 1 else len(entries)
        ranks[:end] += previous[2] + 1
    return np.asarray(ranks, np.int64)


def _identity(entry: np.void) -> tuple[int, int, int]:
    high, low, rank = (int(entry[name]) for name in _IDENTITY)
    return high, low, rank


# ── side by side ──

_Pairs = tuple[Numbers, Numbers]


def _side_by_side(left: Iterator[Entries], right: Iterator[Entries]) -> Iterator[tuple[Entries, Entries, _Pairs]]:
    """Parts of both that hold the same range of identities, and which of their entries have the same one.

    Both ascend, and no identity comes twice on a side: the rank is part of it.
    """
    one, other = next(left, None), next(right, None)
    while one is not None and other is not None:
        limit = min(_identity(one[-1]), _identity(other[-1]))
        ends = _count_up_to(one, limit), _count_up_to(other, limit)
        yield one[: ends[0]], other[: ends[1]], _paired(one[: ends[0]], other[: ends[1]])
        one = one[ends[0] :] if ends[0] < len(one) else next(left, None)
        other = other[ends[1] :] if ends[1] < len(other) else next(right, None)
    none = np.empty(0, np.int64), np.empty(0, np.int64)
    while one is not None:
        yield one, one[:0], none
        one = next(left, None)
    while other is not None:
        yield other[:0], other, none
        other = next(right, None)


def _count_up_to(entries: Entries, limit: tuple[int, int, int]) -> int:
    high, low, rank = (np.asarray(value, entries.dtype[name]) for name, value in zip(_IDENTITY, limit, strict=True))
    same = entries["high"] == high
    before = (entries["high"] < high) | (same & (entries["low"] < low))
    return int((before | (same & (entries["low"] == low) & (entries["rank"] <= rank))).sum())


def _paired(one: Entries, other: Entries) -> _Pairs:
    """The places of the entries that both have."""
    both = {name: np.concatenate([one[name], other[name]]) for name in _IDENTITY}
    side = np.arange(len(one) + len(other)) >= len(one)
    order = np.lexsort((side, both["rank"], both["low"], both["high"]))
    same = np.ones(max(0, len(order) - 1), np.bool_)
    for values in both.values():
        same &= values[order][1:] == values[order][:-1]
    places = np.flatnonzero(same)
    return order[places], order[places + 1] - len(one)


def _judge(found: TwoStates, sides: Sequence[_Side], one: Entries, other: Entries, paired: _Pairs, first: int) -> None:
    ours, theirs = one[paired[0]], other[paired[1]]
    same = (ours["one"] == theirs["one"]) & (ours["two"] == theirs["two"])
    if sides[0].computed and len(ours):
        same &= _same_filled(sides, ours, theirs)
    changed = np.stack([ours["row"][~same], theirs["row"][~same]], axis=1)
    went, came = _without(one, paired[0])["row"], _without(other, paired[1])["row"]
    found.only_before.add(np.concatenate([went, changed[:, 0]]))
    found.only_after.add(np.concatenate([came, changed[:, 1]]))
    keyed = sides[0].keyed
    if keyed:
        found.updated += len(changed)
    else:
        # Without a key no row is another one's new state.
        went, came = np.concatenate([went, changed[:, 0]]), np.concatenate([came, changed[:, 1]])
    if first:
        found.went, found.came = _lowest(found.went, went, first), _lowest(found.came, came, first)
        if keyed:
            merged = np.concatenate([found.changed, changed])
            found.changed = merged[np.argsort(merged[:, 1], kind="stable")[:first]]


def _same_filled(sides: Sequence[_Side], ours: Entries, theirs: Entries) -> Mask:
    """Which pairs have the same values, or none, in the columns that some files lack; if all their others are equal."""
    lacks = [side.lacking(rows["row"]) for side, rows in zip(sides, (ours, theirs), strict=True)]
    same = np.ones(len(ours), np.bool_)
    for at, computed in enumerate(sides[0].computed):
        one, other = (some[:, at] for some in lacks)
        # Filled since: the same row under the same sequence. A write would have given it another one.
        filled = (one != other) & (ours["seq"] == theirs["seq"])
        values = ours[f"some{at}"] == theirs[f"some{at}"]
        same &= (one & other) | filled | (values if computed else values & ~one & ~other)
    return same


def _without(entries: Entries, places: Numbers) -> Entries:
    rest = np.ones(len(entries), np.bool_)
    rest[places] = False
    left: Entries = entries[rest]
    return left


def _lowest(known: Numbers, more: Numbers, count: int) -> Numbers:
    return np.sort(np.concatenate([known, more]))[:count]
