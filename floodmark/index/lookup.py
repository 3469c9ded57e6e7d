"""Rows found by a key or by values: by an index where one covers the files, exactly by reading where none does.

An index names candidates; every row is compared with the values before it counts. Files that no segment covers are left
out by their bounds, or else their columns are read and compared. So lag, damage and a missing index make a lookup
slower, never wrong (I11), at every version and on every branch, and a file that cannot be read is an error, never "not
found". Nothing is written, and Spark is never started.

What planning needs of a state (its schema, its files) is remembered by the manifest list, which never changes; bounded
by the number of files (I14). A lookup asks the catalog for the head first and for the indexes after it: segments that
cover the head's files were published with it or before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain, product
from math import prod
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cachetools import LRUCache
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, NestedField

from floodmark.catalog.indexes import KEY, VALUE, IndexRow
from floodmark.commit.catalog import Catalog
from floodmark.commit.live_files import LiveFile
from floodmark.commit.metadata import schema_of
from floodmark.errors import Invalid
from floodmark.index.covering import Coverings, form_of
from floodmark.index.matching import Key, Keys, Match, match_key, match_keys, match_values
from floodmark.index.ranking import Best, Cursor, Order, Ranking, query_text
from floodmark.index.writing import key_columns
from floodmark.json_form import Json
from floodmark.model import Head, Row, Value
from floodmark.rows.arrays import Numbers
from floodmark.rows.convert import Shape, columns_of
from floodmark.rows.index.hashing import hash_values
from floodmark.rows.json.ndjson import dicts
from floodmark.rows.project import GroupTest, read_numbered, read_schema
from floodmark.rows.reading.row_fetch import fetch_rows
from floodmark.rows.reading.selection import select_files
from floodmark.rows.schema import nearest, user_fields
from floodmark.shown import count_of

# Files of all states that are remembered.
FILES_REMEMBERED = 200_000
# Combinations of values that an index of several columns is asked for; beyond it, one of fewer columns is used.
PROBES_MAX = 10_000
LIMIT, LIMIT_MAX = 100, 100_000

# Raises `Incomplete` if rows of the table may still come at this version: then "not found" would be a guess.
CheckComplete: TypeAlias = Callable[[Head, int], None]


@dataclass(frozen=True)
class LookupExplanation:
    """What a lookup used: the index, how many of its segments, and what it read.

    `candidates`: rows that the index named; `files_uncovered`: files of the state that it says nothing about, of which
    `files_scanned` could not be left out by their bounds. `row_groups`: of all files that were opened.
    """

    table: str
    version: int
    index: str | None
    segments: int
    candidates: int
    files: int
    files_uncovered: int
    files_scanned: int
    files_opened: int
    row_groups: int
    rows: int

    def as_dict(self) -> dict[str, Json]:
        return asdict(self)

    def __str__(self) -> str:
        used = f"{count_of(self.segments, 'segment')}, {count_of(self.candidates, 'candidate')}"
        by = f"{self.index}, {used}" if self.index else "none"
        return "\n".join(
            [
                f"lookup in {self.table} at version {self.version}: {count_of(self.rows, 'row')}",
                f"  index       {by}",
                f"  not covered {self.files_uncovered:,} of {self.files:,} files, {self.files_scanned:,} scanned",
                f"  opened      {self.files_opened:,} files, {self.row_groups:,} row groups",
            ]
        )


@dataclass(frozen=True)
class Page:
    """Rows of a lookup, in order, of one version. `next` is the cursor of the following page; None: these are the last.

    to_arrow() is the rows as an Arrow table, `rows` as dicts; a page can also be iterated.
    """

    table: str
    version: int
    arrow: pa.Table = field(repr=False)
    next: str | None
    explanation: LookupExplanation = field(repr=False)

    def to_arrow(self) -> pa.Table:
        return self.arrow

    @property
    def rows(self) -> list[dict[str, Value]]:
        return [row for batch in self.arrow.to_batches() for row in dicts(batch)]

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.arrow)


@dataclass(frozen=True)
class Asked:
    """What a lookup by values asks for."""

    values: Mapping[str, Value]
    limit: int | None = None
    order: Order | None = None
    columns: Sequence[str] | None = None


class _State:
    """A table at one state: its columns and files."""

    def __init__(self, catalog: Catalog, head: Head) -> None:
        self.schema: Schema = schema_of(catalog.files.metadata(head.metadata_location), head)
        self.fields = user_fields(self.schema)
        self.key = key_columns(self.schema)
        self.files: list[LiveFile] = list(select_files(catalog.files, head, self.schema).files)
        self.paths = [file.path for file in self.files]

    @cached_property
    def key_shape(self) -> Shape:
        columns = columns_of(self.schema, self.key)
        return Shape(self.schema, self.key, columns, pa.schema([column.field for column in columns]))

    @cached_property
    def by_path(self) -> list[int]:
        """The places of the files in the order of their paths."""
        return sorted(range(len(self.paths)), key=self.paths.__getitem__)

    def named(self, name: str) -> NestedField:
        for one in self.fields:
            if one.name == name:
                return one
        raise Invalid("there is no such column", column=name, advice=nearest(name, [one.name for one in self.fields]))


@dataclass
class _Used:
    """What one lookup has used so far."""

    index: str | None = None
    segments: int = 0
    candidates: int = 0
    uncovered: int = 0
    scanned: int = 0
    opened: set[int] = field(default_factory=set)
    row_groups: int = 0

    def explanation(self, head: Head, version: int, state: _State, rows: int) -> LookupExplanation:
        files = len(state.files)
        return LookupExplanation(
            head.table,
            version,
            self.index,
            self.segments,
            self.candidates,
            files,
            self.uncovered,
            self.scanned,
            len(self.opened),
            self.row_groups,
            rows,
        )


@dataclass(frozen=True)
class _Candidates:
    """Positions that an index names, by the place of their file, and the places of files that it does not cover."""

    by_place: Mapping[int, Numbers]
    uncovered: Sequence[int]


@dataclass(frozen=True)
class _Hits:
    """Rows that have the values: `found` is for each the place of its values in the first match."""

    place: int
    positions: Numbers
    found: Numbers
    rows: pa.RecordBatch


class Lookups:
    """Lookups in the tables of one lake."""

    def __init__(self, catalog: Catalog, coverings: Coverings) -> None:
        self._catalog = catalog
        self._coverings = coverings
        self._lock = threading.Lock()
        self._states: LRUCache[tuple[str, int, str | None], _State] = LRUCache(
            FILES_REMEMBERED, getsizeof=lambda state: 1 + len(state.files)
        )

    def get(
        self, head: Head, version: int, key: Key, check_complete: CheckComplete
    ) -> tuple[Row | None, LookupExplanation]:
        """The row with a key, or None."""
        state, used = self._state(head), _Used()
        match = match_key(head.table, self._key_shape(head, state), key)
        candidates = self._candidates(head, state, [match], used)
        for place in chain(candidates.by_place, self._held(state, candidates, [match])):
            for hits in self._hits(state, place, candidates, [match], state.fields, used):
                (row,) = dicts(hits.rows.slice(0, 1))  # the key is among all columns, so no other one was read
                return row, used.explanation(head, version, state, 1)
        check_complete(head, version)
        return None, used.explanation(head, version, state, 0)

    def get_many(
        self, head: Head, version: int, keys: Keys, check_complete: CheckComplete
    ) -> tuple[pa.Table, LookupExplanation]:
        """The rows with some keys, in the order of the keys; a key that is not found has no row."""
        state, used = self._state(head), _Used()
        match = match_keys(head.table, self._key_shape(head, state), keys)
        places: Numbers = np.full(len(match), -1)
        batches: list[pa.RecordBatch] = []
        count = 0
        candidates = self._candidates(head, state, [match], used)
        for place in chain(candidates.by_place, self._held(state, candidates, [match])):
            if (places >= 0).all():
                break
            for hits in self._hits(state, place, candidates, [match], state.fields, used):
                places[hits.found] = np.arange(count, count + len(hits.found))
                batches.append(hits.rows)
                count += len(hits.rows)
        if (places < 0).any():
            check_complete(head, version)
        chosen = places[match.asked]
        rows = pa.Table.from_batches(batches, read_schema(state.fields)).take(pa.array(chosen[chosen >= 0]))
        return rows, used.explanation(head, version, state, len(rows))

    def lookup(
        self, head: Head, version: int, asked: Asked, after: Cursor | None, check_complete: CheckComplete
    ) -> Page:
        """A page of the rows whose columns have some values, all of them; `after` is of the same version."""
        state, used = self._state(head), _Used()
        matches = self._matches(state, asked.values)
        limit = _checked_limit(asked.limit)
        ranking = Ranking.of(asked.order, state.fields, state.key)
        fields = state.fields if asked.columns is None else _chosen(state, asked.columns)
        names = [one.name for one in fields]
        query = query_text([head.table_id, ranking.text, *_texts(matches)])
        start = None if after is None else after.scalars(ranking.kinds, query)
        # One row more shows whether a page follows.
        best = Best(ranking, limit + 1, start)
        candidates = self._candidates(head, state, matches, used)
        held = {*candidates.by_place, *self._held(state, candidates, matches)}
        first = str(start[0].as_py()) if start is not None and ranking.by_place else ""
        for place in state.by_path:
            if place not in held or (ranking.by_place and state.paths[place] < first):
                continue
            if ranking.by_place and best.count > limit:
                break
            for hits in self._hits(state, place, candidates, matches, [*fields, *ranking.fields], used):
                best.add(ranking.ranks(hits.rows, state.paths[place], hits.positions), hits.rows.select(names))
                if ranking.by_place and best.count > limit:
                    break
        found = best.sorted()
        if found is None:
            if after is None and _are_key(state, matches):
                check_complete(head, version)
            rows = read_schema(fields).empty_table()
            return Page(head.table, version, rows, None, used.explanation(head, version, state, 0))
        ranks, rows = found
        more = len(rows) > limit
        rows = rows.slice(0, limit)
        text = Cursor.of(version, query, ranks.slice(limit - 1, 1)).text if more else None
        return Page(head.table, version, rows, text, used.explanation(head, version, state, len(rows)))

    # ── inside ──

    def _state(self, head: Head) -> _State:
        key = head.table_id, head.schema_id, head.manifest_list
        with self._lock:
            found = self._states.get(key)
        if found is None:
            found = _State(self._catalog, head)
            with self._lock:
                if len(found.files) < FILES_REMEMBERED:
                    self._states[key] = found
        return found

    def _key_shape(self, head: Head, state: _State) -> Shape:
        if not state.key:
            raise Invalid(
                "this table has no key",
                table=head.table,
                advice="Look rows up by a column: lake.lookup(table, column=value).",
            )
        return state.key_shape

    def _matches(self, state: _State, values: Mapping[str, Value]) -> list[Match]:
        if not values:
            raise Invalid("no value to look for", advice='Name a column and its value: lake.lookup("t", column=value).')
        fields = [state.named(name) for name in values]
        columns = columns_of(state.schema, fields)
        given = zip(columns, fields, values.values(), strict=True)
        return [match_values(column, field, value) for column, field, value in given]

    def _candidates(self, head: Head, state: _State, matches: Sequence[Match], used: _Used) -> _Candidates:
        """What the best index says; without an index, every file is uncovered."""
        chosen = _best_index(self._catalog.indexes.of_table(head.table_id), matches)
        if chosen is None or (form := form_of(chosen)) is None:
            used.uncovered = len(state.files)
            return _Candidates({}, range(len(state.files)))
        hashes = hash_values(_probes(chosen, matches), form.secret, form.encoder)
        found = self._coverings.find(chosen, state.paths, hashes, state=head.manifest_list)
        names = {one.field_id: one.name for one in state.fields}
        used.index = f"{chosen.kind} ({', '.join(names[one] for one in chosen.field_ids)})"
        used.segments, used.candidates, used.uncovered = found.segments, len(found), len(found.uncovered)
        return _Candidates(_by_place(found.files, found.positions), found.uncovered)

    def _held(self, state: _State, candidates: _Candidates, matches: Sequence[Match]) -> Iterator[int]:
        """The uncovered files that may hold such a row, found when they are needed."""
        places = list(candidates.uncovered)
        if not places:
            return
        files = [state.files[place] for place in places]
        held = np.ones(len(files), np.bool_)
        for match in matches:
            held &= match.files(files)
        yield from (places[at] for at in np.flatnonzero(held).tolist())

    def _hits(
        self,
        state: _State,
        place: int,
        candidates: _Candidates,
        matches: Sequence[Match],
        fields: Sequence[NestedField],
        used: _Used,
    ) -> Iterator[_Hits]:
        """The rows of one file that have the values, in the order of their positions.

        They have these columns, which come first, and those that were compared.
        """
        positions = candidates.by_place.get(place)
        if positions is None:
            positions = self._scan(state, place, matches, used)
        if not len(positions):
            return
        file, read = state.files[place], _distinct([*fields, *_compared(matches)])
        used.opened.add(place)
        for part in fetch_rows(self._catalog.storage, file.path, file.size_bytes, read, positions):
            used.row_groups += part.groups
            found = _matching(matches, part.rows)
            here = np.flatnonzero(found >= 0)
            if len(here):
                rows = part.rows if len(here) == len(part.rows) else part.rows.take(pa.array(here))
                yield _Hits(place, part.positions[here], found[here], rows)

    def _scan(self, state: _State, place: int, matches: Sequence[Match], used: _Used) -> Numbers:
        """Where an uncovered file has such rows, by reading the columns that are compared."""
        file, fields = state.files[place], _distinct(_compared(matches))
        used.scanned += 1
        used.opened.add(place)
        tests = [test for match in matches if (test := match.group_test) is not None]
        positions: list[Numbers] = [np.empty(0, np.int64)]
        kept = partial(_counted, used, tests)
        for start, batch in read_numbered(
            self._catalog.storage, file.path, fields, tests=[kept], size_bytes=file.size_bytes
        ):
            positions.append(np.flatnonzero(_matching(matches, batch) >= 0) + start)
        return np.concatenate(positions)


def _counted(
    used: _Used, tests: Sequence[GroupTest], metadata: pq.FileMetaData, names: Mapping[int, str]
) -> Sequence[bool]:
    """The row groups that pass all tests; they are opened, so they count."""
    answers = [test(metadata, names) for test in tests]
    kept = [all(answer[number] for answer in answers) for number in range(metadata.num_row_groups)]
    used.row_groups += sum(kept)
    return kept


def _compared(matches: Sequence[Match]) -> list[NestedField]:
    return [field for match in matches for field in match.fields]


def _distinct(fields: Sequence[NestedField]) -> list[NestedField]:
    return list({field.field_id: field for field in fields}.values())


def _matching(matches: Sequence[Match], rows: pa.RecordBatch) -> Numbers:
    """For each row the place of its values in the first match, or -1 if it fails one."""
    first, *others = (match.which([rows.column(field.name) for field in match.fields]) for match in matches)
    for other in others:
        first = np.where(other >= 0, first, -1)
    return first


def _by_place(files: Numbers, positions: Numbers) -> dict[int, Numbers]:
    """The positions of each file, ascending, each once."""
    if len(files) <= 1:
        return {int(place): positions for place in files}
    order = np.lexsort((positions, files))
    files, positions = files[order], positions[order]
    places, starts = np.unique(files, return_index=True)
    parts = np.split(positions, starts[1:])
    return {int(place): np.unique(part) for place, part in zip(places, parts, strict=True)}


def _best_index(indexes: Sequence[IndexRow], matches: Sequence[Match]) -> IndexRow | None:
    """The index that names the fewest candidates: the key's, else the one of the most columns."""
    counts = {field.field_id: len(match) for match in matches for field in match.fields if len(match.fields) == 1}
    lists = {match.fields[0].field_id for match in matches if match.is_list}
    whole = tuple(field.field_id for field in matches[0].fields)

    def is_usable(index: IndexRow) -> bool:
        if not index.is_live or index.kind not in (KEY, VALUE) or form_of(index) is None:
            return False
        if index.field_ids == whole:
            return True
        ids = index.field_ids
        if not all(one in counts for one in ids) or (len(ids) > 1 and lists.intersection(ids)):
            return False
        return prod(counts[one] for one in ids) <= PROBES_MAX

    usable = [index for index in indexes if is_usable(index)]
    return max(usable, key=lambda index: (index.kind == KEY, len(index.field_ids), index.id), default=None)


def _probes(index: IndexRow, matches: Sequence[Match]) -> list[pa.ChunkedArray]:
    """The values to look for in an index, in its order; of columns that were asked for apart, all combinations."""
    if index.field_ids == tuple(field.field_id for field in matches[0].fields):
        return list(matches[0].values.columns)
    own = {match.fields[0].field_id: match.values.column(0) for match in matches}
    columns = [own[one] for one in index.field_ids]
    if len(columns) == 1:
        return columns
    places = np.array(list(product(*(range(len(column)) for column in columns))), np.int64).reshape(-1, len(columns))
    return [column.take(pa.array(places[:, at])) for at, column in enumerate(columns)]


def _are_key(state: _State, matches: Sequence[Match]) -> bool:
    asked = {field.field_id for match in matches for field in match.fields}
    return bool(state.key) and asked.issuperset(field.field_id for field in state.key)


def _chosen(state: _State, columns: Sequence[str]) -> list[NestedField]:
    if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
        raise Invalid(
            "invalid list of columns",
            columns=repr(columns),
            advice='Give at least one name, each once, like columns=["id"].',
        )
    return [state.named(name) for name in columns]


def _checked_limit(limit: int | None) -> int:
    if limit is None:
        return LIMIT
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= LIMIT_MAX:
        raise Invalid(
            "invalid limit",
            limit=limit,
            limit_max=LIMIT_MAX,
            advice="A page has at least one row; after= continues with the next page.",
        )
    return limit


def _texts(matches: Sequence[Match]) -> list[str]:
    """What was asked for, in an order that does not depend on how it was given."""
    found = []
    for match in sorted(matches, key=lambda match: match.fields[0].field_id):
        ids = ",".join(str(field.field_id) for field in match.fields)
        values = sorted(map(repr, match.values.column(0).to_pylist()))
        found.append(f"{ids}:{isinstance(match.fields[0].field_type, ListType)}:{values}")
    return found
