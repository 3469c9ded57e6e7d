"""Rewrite data files by row positions: some rows are removed, the others are carried over as they were.

Copy-on-write, file by file, in Arrow batches, so that memory follows the batch and not the table (I14). A carried row
keeps its sequence: it goes into a settled file with its `_seq` written out (I6). Each source file gets files of its
own, never mixed with another's: otherwise a few new rows would make a big old file look new to readers of changes. Rows
that this very change has staged have no sequence yet, and stay in fresh files.

The same functions run in the caller's process and in Spark tasks. A crash leaves files in the operation's own folder
that nothing refers to (I3).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.types import NestedField

from floodmark import clock
from floodmark.commit.live_files import LiveFile
from floodmark.errors import Corrupt
from floodmark.model import SEQ_COLUMN, FileRecord
from floodmark.rows.arrays import Mask, Numbers
from floodmark.rows.compare import same_rows
from floodmark.rows.convert import table_shape
from floodmark.rows.keys import KeySet, Matches, examples, read_keys
from floodmark.rows.project import GroupTest, read_file, read_numbered, row_bytes, take_rows
from floodmark.rows.schema import user_fields
from floodmark.rows.sql.where import Where
from floodmark.rows.staging.deletions import DeletionsWriter
from floodmark.rows.staging.stage import StageTarget, stage_batches
from floodmark.storage import Storage

# How the rows to remove are found.
BY_KEY, BY_WHERE, BY_POSITIONS, BY_TIME, ALL, NONE = "key", "where", "positions", "time", "all", "none"
# As positions, each with the place of the row's new values in a staged file (rows/rewriting/assign.py).
BY_PLACES = "places"
# Above every sequence: for rows whose commit is still to come.
_NOT_YET = 2**63 - 1
# How many bytes of existing rows are held at once to be compared with incoming ones.
_COMPARE_BYTES_MAX = 64 * 1024 * 1024
_COMPARE_ROWS_MIN = 1024

_Judge = Callable[[pa.Table, pa.Table], Mask]


@dataclass(frozen=True)
class InputFile:
    """A file to read. `sequence` is None if this change staged it.

    Positions that were found before come packed: in `packed` themselves, or in the objects that `positions` names.
    `absent`: columns that wait to be filled (rows/rewriting/fill.py); carried rows are written without them too.
    """

    path: str
    rows: int
    size_bytes: int
    sequence: int | None
    fresh: bool
    packed: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    absent: tuple[int, ...] = ()

    @classmethod
    def of(cls, file: LiveFile, positions: Sequence[str] = (), absent: Sequence[int] = ()) -> InputFile:
        places, ids = tuple(positions), tuple(absent)
        return cls(file.path, file.rows, file.size_bytes, file.sequence, file.fresh, positions=places, absent=ids)

    @property
    def stays_fresh(self) -> bool:
        return self.fresh and self.sequence is None

    @property
    def settled(self) -> bool:
        """Unknown: some row may have no sequence of its own."""
        return False


@dataclass(frozen=True)
class Rewrite:
    """What is done to each source; plain values, so that it can be sent to executors.

    incoming: staged files whose keys replace rows of the table. compare: existing rows that equal the incoming ones
    stay. newest_by: so do rows that are no older than the incoming ones, by this column; if it is an empty name, all
    existing rows stay. deletions: keys of rows that are removed, and do not come in again, are recorded; of rows that
    this change has staged only those whose key is in one of the files `existed_in`. look_only: count, give examples,
    write nothing. source_schema_json: the schema that names the sources' columns, if it is not the target's. time: a
    date or timestamp column, by its field id, and the day or microsecond before which rows are found BY_TIME. seq_max:
    rows found with a sequence above it stay. marks: ascending; rows above each are counted. held: of a partial merge,
    for each incoming file the ids of its columns; a row that it replaces keeps its other columns, without those that
    its own file lacks and those in `refilled` (for each incoming file too), which the caller computes from the
    completed row.
    """

    target: StageTarget
    find: str
    key: tuple[str, ...] = ()
    incoming: tuple[str, ...] = ()
    where: str = ""
    compare: bool = False
    newest_by: str | None = None
    deletions: bool = False
    existed_in: tuple[str, ...] = ()
    look_only: bool = False
    source_schema_json: str | None = None
    time: tuple[int, int] | None = None
    seq_max: int | None = None
    marks: tuple[int, ...] = ()
    held: tuple[tuple[int, ...], ...] = ()
    refilled: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Rewritten:
    """The result for one source. `removed` rows were removed; `replaced` of them come in again under the same key.

    `unchanged` rows matched and stayed; `places` has their places among the incoming rows: (file, packed rows). Of a
    partial merge `places` has all rows that matched: those that changed were completed (`Completed`). `found` rows were
    found at first, `above` of them have a sequence above each of the rewrite's marks.
    """

    path: str
    removed: int = 0
    replaced: int = 0
    unchanged: int = 0
    records: tuple[FileRecord, ...] = ()
    places: tuple[tuple[int, str], ...] = ()
    examples: tuple[str, ...] = ()
    found: int = 0
    above: tuple[int, ...] = ()

    @property
    def matched(self) -> int:
        return self.removed + self.unchanged


@dataclass(frozen=True)
class Completed:
    """Files of rows that a partial merge changed, with the columns that they kept; without those of `lacking`."""

    lacking: tuple[int, ...]
    records: tuple[FileRecord, ...]


@dataclass(frozen=True)
class _Update:
    """Rows of a source, and the rows of one incoming file with new values for some columns, in the same order."""

    source: InputFile
    file: int
    positions: Numbers
    places: Numbers


@dataclass
class Result:
    """The result for all sources of a rewrite."""

    files: list[Rewritten] = field(default_factory=list)
    deletions: list[FileRecord] = field(default_factory=list)
    completed: list[Completed] = field(default_factory=list)

    def __iadd__(self, other: Result) -> Result:
        self.files += other.files
        self.deletions += other.deletions
        self.completed += other.completed
        return self

    @property
    def matched(self) -> int:
        return sum(file.matched for file in self.files)

    def examples(self) -> str:
        return "; ".join([text for file in self.files for text in file.examples][:3])


class Rewriter:
    """Processes sources one after the other; the incoming keys are loaded once."""

    def __init__(self, rewrite: Rewrite, storage: Storage, *, in_task: bool = False) -> None:
        self._rewrite = rewrite
        self._storage = storage
        self._in_task = in_task
        self._schema = table_shape(rewrite.source_schema_json or rewrite.target.schema_json).schema
        by_name = {field.name: field for field in self._schema.fields}
        self._key = [by_name[name] for name in rewrite.key]
        self._seq = by_name.get(SEQ_COLUMN)
        self._writer: DeletionsWriter | None = None
        self._updates: list[_Update] = []

    @cached_property
    def _incoming(self) -> KeySet:
        return KeySet(self._storage, self._rewrite.incoming, self._key)

    @cached_property
    def _existed(self) -> KeySet:
        return KeySet(self._storage, self._rewrite.existed_in, self._key)

    @cached_property
    def _where(self) -> Where:
        return Where.parse(self._rewrite.where, self._schema)

    def rewrite(self, source: InputFile) -> Rewritten:
        positions, matches = self._find(source)
        found = len(positions)
        positions, above = self._by_sequence(source, positions)
        if self._rewrite.look_only:
            return replace(self._look(source, positions), found=found, above=above)
        unchanged: tuple[tuple[int, str], ...] = ()
        before = len(positions)
        if before and matches is not None:
            stay = self._staying(source, matches)
            partial_merge = bool(self._rewrite.held)
            positions = positions[~stay]
            if self._rewrite.find == BY_KEY:
                unchanged = _pack(matches, stay | partial_merge)
            if partial_merge:
                self._updates += _updates(source, matches, ~stay)
        if not len(positions) and self._rewrite.find != NONE:
            return Rewritten(source.path, unchanged=before, places=unchanged, found=found, above=above)
        replaced = len(positions) if matches is not None else self._write_deletions(source, positions)
        records = () if len(positions) == source.rows else self._carry(source, positions)
        return Rewritten(
            source.path,
            removed=len(positions),
            replaced=replaced,
            unchanged=before - len(positions),
            records=records,
            places=unchanged,
            found=found,
            above=above,
        )

    def look_at_all(self, sources: Sequence[InputFile], at_once: int) -> list[Rewritten]:
        """Look only, at many sources at once if the keys fit into memory: the check mostly waits for storage."""
        looked = [self.rewrite(source) for source in sources[:1]]
        if not self._incoming.held:
            return looked + [self.rewrite(source) for source in sources[1:]]
        with ThreadPoolExecutor(at_once, thread_name_prefix="floodmark-look") as pool:
            return looked + list(pool.map(self.rewrite, sources[1:]))

    def complete(self) -> list[Completed]:
        """Write the rows that a partial merge changed: the incoming columns, beside the columns that the rows keep."""
        lacking: dict[tuple[int, ...], list[_Update]] = {}
        for update in self._updates:
            lacks = {*self._rewrite.refilled[update.file], *update.source.absent}
            absent = tuple(sorted(lacks.difference(self._rewrite.held[update.file])))
            lacking.setdefault(absent, []).append(update)
        completed = []
        for absent, updates in lacking.items():
            target = replace(self._rewrite.target, settled=False).without(absent)
            batches = (batch for update in updates for batch in self._completed(update, absent))
            staged = stage_batches(target, batches, clock.new_id(), storage=self._storage, in_task=self._in_task)
            rows = sum(len(update.positions) for update in updates)
            if staged.problems or staged.rows != rows:
                raise Corrupt(
                    "rows of a partial merge could not be completed",
                    rows=staged.rows,
                    rows_expected=rows,
                    cause=staged.problems[0] if staged.problems else None,
                )
            completed.append(Completed(absent, staged.records))
        self._updates = []
        return completed

    def _completed(self, update: _Update, absent: tuple[int, ...]) -> Iterator[pa.RecordBatch]:
        held = self._rewrite.held[update.file]
        own = [field for field in user_fields(self._schema) if field.field_id not in absent]
        come = [field for field in own if field.field_id in held]
        kept = [field for field in own if field.field_id not in held]
        yield from _completed_rows(
            self._storage,
            (update.source.path, kept, update.positions),
            (self._rewrite.incoming[update.file], come, update.places),
        )

    def finish(self) -> FileRecord | None:
        """Close the deletions file, if there are any; its record."""
        return None if self._writer is None else self._writer.finish()

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()

    # ── which rows ──

    def _find(self, source: InputFile) -> tuple[Numbers, Matches | None]:
        """The positions of the rows that match, ascending; with their places among the incoming rows if by key."""
        find = self._rewrite.find
        if find == BY_KEY:
            matches = self._incoming.match(self._storage, source.path)
            return matches.positions, matches
        if find == BY_PLACES:
            texts = (*source.packed, *(self._storage.read(location).decode() for location in source.positions))
            matches = _unpack_places(texts, self._rewrite.incoming)
            return matches.positions, matches
        if find == BY_WHERE:
            where = self._where
            return self._masked(source, where.fields or self._schema.fields[:1], where.mask, [where.group_test]), None
        if find == BY_TIME and (time := self._rewrite.time) is not None:
            return self._masked(source, [self._schema.find_field(time[0])], partial(_is_before, time[1])), None
        if find == BY_POSITIONS:
            stored = [self._storage.read(location).decode() for location in source.positions]
            parts = [unpack_positions(text) for text in (*source.packed, *stored)]
            return np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64), None
        return np.arange(source.rows if find == ALL else 0, dtype=np.int64), None

    def _masked(
        self,
        source: InputFile,
        fields: Sequence[NestedField],
        mask: Callable[[pa.RecordBatch], pa.BooleanArray],
        tests: Sequence[GroupTest] = (),
    ) -> Numbers:
        found = [np.empty(0, np.int64)]
        for start, batch in read_numbered(self._storage, source.path, fields, tests=tests):
            found.append(np.flatnonzero(mask(batch).to_numpy(zero_copy_only=False)).astype(np.int64) + start)
        return np.concatenate(found)

    def _by_sequence(self, source: InputFile, positions: Numbers) -> tuple[Numbers, tuple[int, ...]]:
        """The positions whose sequence is not above `seq_max`, and how many of all are above each mark."""
        seq_max, marks = self._rewrite.seq_max, self._rewrite.marks
        if not len(positions) or (seq_max is None and not marks):
            return positions, (0,) * len(marks)
        sequences = self._sequences(source)[positions]
        between = np.bincount(np.searchsorted(marks, sequences), minlength=len(marks) + 1)
        above = tuple(int(rows) for rows in between[:0:-1].cumsum()[::-1])
        return (positions if seq_max is None else positions[sequences <= seq_max]), above

    def _sequences(self, source: InputFile) -> Numbers:
        """The sequence of every row of the source. Rows that this change has staged are newer than all others."""
        inherited = _NOT_YET if source.sequence is None else source.sequence
        if source.fresh or self._seq is None:
            return np.full(source.rows, inherited, dtype=np.int64)
        parts = [np.empty(0, np.int64)]
        for batch in read_file(self._storage, source.path, [self._seq]):
            parts.append(batch.column(0).fill_null(inherited).to_numpy(zero_copy_only=False))
        found = np.concatenate(parts)
        if len(found) != source.rows:
            raise _other_rows(source, len(found))
        return found

    def _look(self, source: InputFile, positions: Numbers) -> Rewritten:
        shown: Sequence[str] = ()
        if len(positions) and self._key:
            shown = examples(self._storage, source.path, self._key, positions[:3])
        return Rewritten(source.path, removed=len(positions), examples=tuple(shown))

    def _staying(self, source: InputFile, matches: Matches) -> Mask:
        """For each match, whether the existing row stays: the incoming one is the same, or not newer.

        A row is never the same in a column that waits to be filled in its file: it reads as null, but a null that comes
        in is a value, which has to be written before the fill passes by.
        """
        rewrite, stay = self._rewrite, np.zeros(len(matches.positions), dtype=bool)
        if rewrite.newest_by == "":
            return ~stay
        compared = partial(_judged, self._storage, source.path, rewrite.incoming)
        if rewrite.compare and rewrite.held:
            stay |= self._same_as_held(source, matches)
        elif rewrite.compare and not source.absent:
            stay |= compared(user_fields(self._schema), matches, same_rows)
        if rewrite.newest_by is not None:
            stay |= compared([self._schema.find_field(rewrite.newest_by)], matches, _not_newer)
        return stay

    def _same_as_held(self, source: InputFile, matches: Matches) -> Mask:
        """Of a partial merge: whether the existing row already has the incoming values; other columns do not matter."""
        same = np.zeros(len(matches.positions), dtype=bool)
        for number in np.unique(matches.files):
            if not set(source.absent).isdisjoint(self._rewrite.held[number]):
                continue
            of_file = matches.files == number
            some = Matches(matches.positions[of_file], matches.files[of_file], matches.places[of_file])
            held = [field for field in user_fields(self._schema) if field.field_id in self._rewrite.held[number]]
            same[of_file] = _judged(self._storage, source.path, self._rewrite.incoming, held, some, same_rows)
        return same

    # ── what is written ──

    def _write_deletions(self, source: InputFile, positions: Numbers) -> int:
        """Record the keys of rows that are deleted for good; returns how many of the rows come in again."""
        if not self._key or not (self._rewrite.deletions or self._rewrite.incoming):
            return 0
        keys = read_keys(self._storage, source.path, self._key).take(pa.array(positions))
        gone = np.ones(len(positions), dtype=bool)
        if self._rewrite.incoming:
            gone[self._incoming.match_table(keys).positions] = False
        replaced = len(positions) - int(gone.sum())
        if source.stays_fresh:
            # No reader has seen these rows. If one replaced an existing row, that row's key is deleted now.
            existed = np.zeros(len(positions), dtype=bool)
            existed[self._existed.match_table(keys).positions] = True
            gone &= existed
        if self._rewrite.deletions and gone.any():
            if self._writer is None:
                target = self._rewrite.target
                name = f"{clock.new_id()}"
                self._writer = DeletionsWriter(self._storage, target.folder, self._schema, self._key, name)
            self._writer.write(keys.filter(pa.array(gone)))
        return replaced

    def _carry(self, source: InputFile, positions: Numbers) -> tuple[FileRecord, ...]:
        """Write the source's other rows to files of their own."""
        settled = not source.stays_fresh
        if settled and self._seq is None:
            raise Corrupt("the table has no column for its rows' sequences", file=source.path)
        own = [field for field in user_fields(self._schema) if field.field_id not in source.absent]
        fields = [*own, *([self._seq] if settled and self._seq else [])]
        target = replace(self._rewrite.target, settled=settled).without(source.absent)
        batches = self._rest(source, fields, positions)
        staged = stage_batches(target, batches, clock.new_id(), storage=self._storage, in_task=self._in_task)
        if staged.problems:
            raise Corrupt("a data file has rows that do not fit its table", file=source.path, cause=staged.problems[0])
        if staged.rows + len(positions) != source.rows:
            raise _other_rows(source, staged.rows + len(positions))
        return staged.records

    def _rest(self, source: InputFile, fields: Sequence[NestedField], positions: Numbers) -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in read_file(self._storage, source.path, fields):
            first, last = np.searchsorted(positions, [start, start + len(batch)])
            keep = np.ones(len(batch), dtype=bool)
            keep[positions[first:last] - start] = False
            start += len(batch)
            if fields[-1] is self._seq:
                place = len(fields) - 1
                filled = batch.column(place).fill_null(source.sequence) if source.sequence is not None else None
                batch = batch if filled is None else batch.set_column(place, batch.schema.field(place), filled)
            yield batch if last == first else batch.filter(pa.array(keep))


def _updates(source: InputFile, matches: Matches, changed: Mask) -> Iterator[_Update]:
    """The rows that change, by the incoming file that changes them."""
    for number in np.unique(matches.files[changed]):
        some = changed & (matches.files == number)
        yield _Update(source, int(number), matches.positions[some], matches.places[some])


def _is_before(before: int, batch: pa.RecordBatch) -> pa.BooleanArray:
    """Whether the time in the only column is before a day or a microsecond; a row without a time is not."""
    times = batch.column(0)
    numbers = times.view(pa.int32() if pa.types.is_date32(times.type) else pa.int64())
    return pc.fill_null(pc.less(numbers, pa.scalar(before, numbers.type)), False)


def _other_rows(source: InputFile, rows: int) -> Corrupt:
    return Corrupt(
        "a data file does not have the number of rows in the catalog",
        file=source.path,
        rows=rows,
        rows_expected=source.rows,
        advice="Nothing was changed. Run `floodmark doctor`.",
    )


def _pack(matches: Matches, same: Mask) -> tuple[tuple[int, str], ...]:
    """The places of unchanged rows among the incoming ones, by file, small enough to send."""
    return tuple(
        (int(number), pack_positions(np.sort(matches.places[same & (matches.files == number)])))
        for number in np.unique(matches.files[same])
    )


# ── existing rows beside incoming rows of the same key ──
# Compared piece by piece, so that memory follows the piece and not the match (I14).


def _judged(
    storage: Storage,
    path: str,
    incoming: Sequence[str],
    fields: Sequence[NestedField],
    matches: Matches,
    judge: _Judge,
) -> Mask:
    """For each match the result of `judge` for the existing row and the incoming one, by these columns."""
    found = np.zeros(len(matches.positions), dtype=bool)
    piece = max(_COMPARE_ROWS_MIN, _COMPARE_BYTES_MAX // row_bytes(storage, path, fields))
    for start in range(0, len(found), piece):
        end = min(start + piece, len(found))
        there = take_rows(storage, path, fields, matches.positions[start:end])
        for number in np.unique(matches.files[start:end]):
            which = np.flatnonzero(matches.files[start:end] == number)
            places = matches.places[start:end][which]
            order = np.argsort(places, kind="stable")
            come = take_rows(storage, incoming[number], fields, places[order])
            found[start + which[order]] = judge(there.take(pa.array(which[order])), come)
    return found


_Rows = tuple[str, Sequence[NestedField], Numbers]


def _completed_rows(storage: Storage, kept: _Rows, come: _Rows) -> Iterator[pa.RecordBatch]:
    """Rows with some columns of one file and the others of another: (file, columns, positions) of both, row by row.

    The positions of `kept` ascend, those of `come` need not.
    """
    kept_path, kept_fields, positions = kept
    come_path, come_fields, places = come
    row = row_bytes(storage, come_path, come_fields)
    row += row_bytes(storage, kept_path, kept_fields) if kept_fields else 0
    piece = max(_COMPARE_ROWS_MIN, _COMPARE_BYTES_MAX // row)
    for start in range(0, len(positions), piece):
        some = places[start : start + piece]
        order = np.argsort(some, kind="stable")
        new = take_rows(storage, come_path, come_fields, some[order]).take(pa.array(np.argsort(order)))
        old = take_rows(storage, kept_path, kept_fields, positions[start : start + piece]) if kept_fields else None
        whole = new if old is None else pa.table([*old.columns, *new.columns], [*old.column_names, *new.column_names])
        yield from whole.combine_chunks().to_batches()


def _not_newer(there: pa.Table, come: pa.Table) -> Mask:
    """For each row whether the incoming one is not newer, by the only column; any value is newer than null."""
    old, new = there.column(0), come.column(0)
    newer = pc.if_else(pc.is_null(old), pc.is_valid(new), pc.fill_null(pc.greater(new, old), False))
    return ~np.asarray(newer.to_numpy())


# ── positions as text, to send between processes and to store in small objects ──


def pack_positions(positions: Numbers) -> str:
    """Ascending positions as a short text."""
    return base64.b85encode(zlib.compress(np.diff(positions, prepend=0).astype(np.int64).tobytes())).decode()


def unpack_positions(text: str) -> Numbers:
    return np.cumsum(np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype=np.int64))


def pack_places(paths: Sequence[str], positions: Numbers, files: Numbers, places: Numbers) -> str:
    """Rows by their positions, each with the place of its new values: a row of one of the files `paths`."""
    used, files = np.unique(files, return_inverse=True)
    packed = {"positions": pack_positions(positions), "files": pack_positions(files), "places": pack_positions(places)}
    return json.dumps({"paths": [paths[number] for number in used], **packed})


def _unpack_places(texts: Sequence[str], incoming: Sequence[str]) -> Matches:
    """The places of some texts, by position; files by their number among the incoming ones."""
    numbers = {path: number for number, path in enumerate(incoming)}
    parts: list[tuple[Numbers, Numbers, Numbers]] = []
    for text in texts:
        packed = json.loads(text)
        own = np.array([numbers[path] for path in packed["paths"]], np.int64)
        positions, files, places = (unpack_positions(packed[name]) for name in ("positions", "files", "places"))
        parts.append((positions, own[files], places))
    positions, files, places = (np.concatenate([part[at] for part in parts]) for at in range(3))
    order = np.argsort(positions)
    return Matches(positions[order], files[order].astype(np.int32), places[order])
