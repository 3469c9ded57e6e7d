"""Indexes of the lake's tables, and the segments that cover data files, as the catalog records them.

A segment is a hint about data files, which never change: a row too many costs time, a row too few makes lookups scan.
So the rider that records segments never refuses a publish, and nothing here moves a table. A segment's row stays until
its file is deleted; deleting files is the sweep's.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from sqlalchemy import ColumnElement, Connection, and_, bindparam, case, delete, func, insert, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database, SqlRow
from floodmark.errors import Conflict
from floodmark.json_form import Json

KEY, VALUE = "key", "value"
LIVE, DROPPED = "live", "dropped"
SECRET_BYTES = 16


@dataclass(frozen=True)
class IndexRow:
    """An index: what it is on, and the secret of its hashes. `changes` rises with every change of its segments."""

    id: str
    table_id: str
    field_ids: tuple[int, ...]
    kind: str
    state: str
    encoder: int
    wide: bool
    secret: str = field(repr=False)
    changes: int = 0

    @property
    def is_live(self) -> bool:
        return self.state == LIVE

    @property
    def wanted(self) -> WantedIndex:
        return WantedIndex(self.kind, self.field_ids, self.wide, self.encoder)


@dataclass(frozen=True)
class WantedIndex:
    """An index as it is declared. The fields of a value index are in ascending order: (a, b) and (b, a) are one."""

    kind: str
    field_ids: tuple[int, ...]
    wide: bool
    encoder: int


@dataclass(frozen=True)
class SegmentRow:
    """A segment of one index. `retired_ms`: its live files are covered by others. `broken`: it covers nothing."""

    index_id: str
    location: str
    table_id: str
    operation: str
    size_bytes: int
    tail_bytes: int
    digest: str
    entries: int
    files: int
    broken: bool = False
    retired_ms: int | None = None


@dataclass(frozen=True)
class SegmentTotals:
    """Live indexes of a table, and the files of their segments in use."""

    indexes: int = 0
    files: int = 0
    broken: int = 0
    size_bytes: int = 0


@dataclass(frozen=True)
class IndexFigures:
    """The segments in use of a live index: how many may be folded, are damaged, and the data files in the others."""

    index_id: str
    table_id: str
    foldable: int
    broken: int
    files: int


@dataclass(frozen=True)
class SealedSegment:
    """A segment that a publish records, with the indexes that have a section in it."""

    location: str
    size_bytes: int
    tail_bytes: int
    digest: str
    entries: int
    files: int
    indexes: tuple[str, ...]


@dataclass(frozen=True)
class IndexRider:
    """Segments become true with the data files that they cover. It refuses nothing: an index may be gone meanwhile."""

    table_id: str
    segments: tuple[SealedSegment, ...]

    def check(self, tx: Connection) -> None:
        """Nothing: a segment is only a hint."""

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        add_segments(tx, self.table_id, operation, self.segments, now_ms)

    def as_dict(self) -> dict[str, Json]:
        return {"type": "index", "table_id": self.table_id, "segments": [asdict(one) for one in self.segments]}

    @classmethod
    def sealed(cls, table_id: str, segments: Sequence[Mapping[str, Json]]) -> IndexRider:
        return cls(table_id, tuple(_sealed_segment(one) for one in segments))


@dataclass(frozen=True)
class DeclareRider:
    """Indexes of a table are declared, or dropped, with a new shape of it. It refuses nothing: doing it twice is none.

    Secrets are not sealed: an index gets its own when it is recorded.
    """

    table_id: str
    declared: tuple[WantedIndex, ...]
    dropped: tuple[WantedIndex, ...]

    def check(self, tx: Connection) -> None:
        """Nothing: another process may have done it meanwhile."""

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        self.change(tx, now_ms)

    def change(self, tx: Connection, now_ms: int) -> bool:
        """Whether anything was left to do."""
        gone = [drop_index(tx, self.table_id, wanted, now_ms) for wanted in self.dropped]
        made = [declare_index(tx, self.table_id, wanted, now_ms)[1] for wanted in self.declared]
        return any([*gone, *made])

    def as_dict(self) -> dict[str, Json]:
        return {
            "type": "declare",
            "table_id": self.table_id,
            "declared": [asdict(one) for one in self.declared],
            "dropped": [asdict(one) for one in self.dropped],
        }

    @classmethod
    def sealed(
        cls, table_id: str, declared: Sequence[Mapping[str, Json]], dropped: Sequence[Mapping[str, Json]]
    ) -> DeclareRider:
        return cls(table_id, tuple(map(_sealed_wanted, declared)), tuple(map(_sealed_wanted, dropped)))


def _sealed_wanted(data: Mapping[str, Json]) -> WantedIndex:
    values = {**data, "field_ids": tuple(data["field_ids"])}  # type: ignore[arg-type]
    return WantedIndex(**values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class FoldRider:
    """Segments of an index are replaced by one that says the same. All of them must still be in use.

    Interleaving that this excludes: 1. two folds read the same segments; 2. both publish: what they say is covered
    twice, and each next fold of the two does the work again.
    """

    index_id: str
    locations: tuple[str, ...]

    def check(self, tx: Connection) -> None:
        asked = {"index": self.index_id, "locations": list(self.locations)}
        if tx.execute(_COUNT_USED, asked).scalar_one() != len(self.locations):
            raise Conflict(
                "segments of this index were replaced meanwhile", index=self.index_id, advice="Run it again."
            )

    def apply(self, tx: Connection, operation: str, version: int, now_ms: int) -> None:
        retire_segments(tx, self.index_id, self.locations, now_ms)

    def as_dict(self) -> dict[str, Json]:
        return {"type": "fold", "index_id": self.index_id, "locations": list(self.locations)}

    @classmethod
    def sealed(cls, index_id: str, locations: Sequence[str]) -> FoldRider:
        return cls(index_id, tuple(locations))


def _sealed_segment(data: Mapping[str, Json]) -> SealedSegment:
    values = {**data, "indexes": tuple(data["indexes"])}  # type: ignore[arg-type]
    return SealedSegment(**values)  # type: ignore[arg-type]


def declare_index(tx: Connection, table_id: str, wanted: WantedIndex, now_ms: int) -> tuple[IndexRow, bool]:
    """The index, and whether it is made now. One that was dropped is made anew, with a secret of its own.

    Under fm_lake's lock: two processes must not make two.
    """
    on = _on(table_id, wanted.kind, wanted.field_ids)
    row = tx.execute(_ONE, on).first()
    if row is not None and row.state != DROPPED:
        return to_index(row), False
    if row is not None:
        tx.execute(delete(tables.indexes).where(tables.indexes.c.id == row.id))
    values = {
        **on,
        "id": clock.new_id(),
        "state": LIVE,
        "encoder": wanted.encoder,
        "wide": int(wanted.wide),
        "secret": secrets.token_hex(SECRET_BYTES),
        "changes": 0,
        "created_ms": now_ms,
    }
    tx.execute(insert(tables.indexes).values(values))
    return to_index(tx.execute(_ONE, on).one()), True


def drop_index(tx: Connection, table_id: str, wanted: WantedIndex, now_ms: int) -> bool:
    """Retire all segments of an index, in one transaction with its end; sweeps delete the files. False: it is gone.

    The row of a key index stays, as dropped: writers would make it again. Under fm_lake's lock.
    """
    table, segment = tables.indexes, tables.segments
    on = _on(table_id, wanted.kind, wanted.field_ids)
    if wanted.kind == KEY and tx.execute(_ONE, on).first() is None:
        # Nothing was written to the table yet. Without a row that says so, the first write would make the index.
        declare_index(tx, table_id, wanted, now_ms)
    row = tx.execute(_ONE, on).first()
    if row is None or row.state == DROPPED:
        return False
    live = segment.c.retired_ms.is_(None)
    tx.execute(update(segment).where(segment.c.index_id == row.id, live).values(retired_ms=now_ms))
    if row.kind == KEY:
        note_changes(tx, [row.id])
        tx.execute(update(table).where(table.c.id == row.id).values(state=DROPPED))
    else:
        tx.execute(delete(table).where(table.c.id == row.id))
    return True


def add_segments(tx: Connection, table_id: str, operation: str, segments: Iterable[SealedSegment], now_ms: int) -> None:
    """Record segments. Those of an index that does not exist any more are retired at once: a sweep deletes the file."""
    wanted = sorted({index for one in segments for index in one.indexes})
    live = set(tx.execute(_LIVE_OF, {"ids": wanted}).scalars())
    rows = [
        {
            "index_id": index,
            "location": one.location,
            "table_id": table_id,
            "operation": operation,
            "size_bytes": one.size_bytes,
            "tail_bytes": one.tail_bytes,
            "digest": one.digest,
            "entries": one.entries,
            "files": one.files,
            "broken": 0,
            "retired_ms": None if index in live else now_ms,
        }
        for one in segments
        for index in one.indexes
    ]
    if rows:
        tx.execute(_ADD, rows)
    note_changes(tx, live)


def retire_segments(tx: Connection, index_id: str, locations: Collection[str], now_ms: int) -> None:
    """Readers use them no more from here on, unless a state needs a file that only they cover."""
    if locations:
        tx.execute(_RETIRE, [{"index": index_id, "place": one, "retired_ms": now_ms} for one in sorted(locations)])
        note_changes(tx, [index_id])


def forget_segments(tx: Connection, locations: Collection[str]) -> None:
    """Their files are deleted, for good."""
    known = tx.execute(_INDEXES_OF, {"locations": sorted(locations)}).scalars().all()
    tx.execute(_FORGET, [{"place": one} for one in sorted(locations)])
    note_changes(tx, known)


def note_changes(tx: Connection, indexes: Collection[str]) -> None:
    if indexes:
        tx.execute(_NOTE, {"ids": sorted(indexes)})


class Indexes:
    """What the catalog records of indexes and segments."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._has_tables: bool | None = None

    @property
    def known(self) -> bool:
        """Whether the catalog has their tables: read-only, a lake of an older format has none."""
        if self._has_tables is None:
            found = self._database.ask(_FORMAT)
            self._has_tables = bool(found) and found[0].format >= tables.INDEXES_FORMAT
        return self._has_tables

    def of_table(self, table_id: str) -> list[IndexRow]:
        """The indexes of a table, dropped key indexes too."""
        return [to_index(row) for row in self._database.ask(_OF_TABLE, {"table_id": table_id})] if self.known else []

    def of_tables(self, table_ids: Collection[str]) -> dict[str, list[IndexRow]]:
        """The same of several tables, in one query."""
        found: dict[str, list[IndexRow]] = defaultdict(list)
        if table_ids and self.known:
            for row in self._database.ask(_OF_TABLES, {"table_ids": sorted(table_ids)}):
                found[row.table_id].append(to_index(row))
        return found

    def all(self) -> list[IndexRow]:
        return [to_index(row) for row in self._database.ask(_ALL)] if self.known else []

    def segments(self, table_id: str) -> list[SegmentRow]:
        """Every segment of a table whose file exists, in the order in which they were made."""
        found = self._database.ask(_SEGMENTS_OF_TABLE, {"table_id": table_id}) if self.known else []
        return [to_segment(row) for row in found]

    def tables(self) -> list[str]:
        """The tables that have segments, also those that are dropped."""
        return [row.table_id for row in self._database.ask(_TABLES)] if self.known else []

    def usable_segments(self, index_id: str) -> list[SegmentRow]:
        """The segments of an index that are not damaged; those in use first."""
        rows = [to_segment(row) for row in self._database.ask(_SEGMENTS, {"index": index_id})]
        return sorted(rows, key=lambda row: row.retired_ms is not None)

    def segments_of(self, index_id: str) -> list[SegmentRow]:
        """Every segment of an index, in the order in which they were made; retired and damaged ones too."""
        return [to_segment(row) for row in self._database.ask(_SEGMENTS_OF_INDEX, {"index": index_id})]

    def retire(self, index_id: str, locations: Collection[str]) -> int:
        """Retire those of these segments that are in use, without others in their place; returns how many."""
        if not locations:
            return 0
        segment = tables.segments
        mine = (segment.c.index_id == index_id) & segment.c.location.in_(sorted(locations))
        with self._database.write() as tx:
            now = self._database.now_ms(tx)
            used = select(segment.c.location).where(mine, segment.c.retired_ms.is_(None))
            found = tx.execute(used).scalars().all()
            retire_segments(tx, index_id, found, now)
        return len(found)

    def figures(self, entries_max: int, files_max: int) -> list[IndexFigures]:
        """Of every live index, in one query; of larger segments than this none is folded."""
        if not self.known:
            return []
        rows = self._database.ask(_FIGURES, {"entries_max": entries_max, "files_max": files_max})
        return [
            IndexFigures(row.id, row.table_id, int(row.foldable or 0), int(row.broken or 0), int(row.files or 0))
            for row in rows
        ]

    def all_locations(self) -> set[str]:
        """The files of all segments."""
        return {row.location for row in self._database.ask(_LOCATIONS)} if self.known else set()

    def of_operation(self, operation: str) -> set[str]:
        """The files of the segments that an operation published."""
        found = self._database.ask(_OF_OPERATION, {"operation": operation}) if self.known else []
        return {row.location for row in found}

    def ensure_key(self, table_id: str, field_ids: Sequence[int], wide: bool, encoder: int) -> IndexRow:
        """The table's key index on these fields; made if it does not exist. One that was dropped stays dropped.

        A row that no commit follows costs nothing. Crash here: it is there, or not.
        """
        wanted = WantedIndex(KEY, tuple(field_ids), wide, encoder)
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            row = tx.execute(_ONE, _on(table_id, KEY, field_ids)).first()
            if row is not None:
                return to_index(row)
            return declare_index(tx, table_id, wanted, self._database.now_ms(tx))[0]

    def declare(self, table_id: str, wanted: WantedIndex) -> tuple[IndexRow, bool]:
        """The index as it is wanted, and whether this call made it. Crash here: it is there, or not."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            return declare_index(tx, table_id, wanted, self._database.now_ms(tx))

    def change(self, riders: Sequence[DeclareRider]) -> bool:
        """What riders do, in one transaction without a publish; whether anything was left to do."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            now_ms = self._database.now_ms(tx)
            changed = [rider.change(tx, now_ms) for rider in riders]
        return any(changed)

    def drop(self, table_id: str, wanted: WantedIndex) -> bool:
        """End an index; False: it had ended, or never existed. Crash here: it is there, or not."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            return drop_index(tx, table_id, wanted, self._database.now_ms(tx))

    def gone(self) -> list[str]:
        """The indexes of tables of which nothing is left: no head, and no state that could come back."""
        if not self.known:
            return []
        with self._database.read() as tx:
            return _gone(tx, self._database.now_ms(tx))

    def remove(self, indexes: Collection[str]) -> None:
        """Remove those of these indexes whose tables still do not exist. Their segments are left to a sweep."""
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            now = self._database.now_ms(tx)
            segment, wanted = tables.segments, sorted(set(indexes) & set(_gone(tx, now)))
            mine = segment.c.index_id.in_(wanted) & segment.c.retired_ms.is_(None)
            tx.execute(update(segment).where(mine).values(retired_ms=now))
            tx.execute(delete(tables.indexes).where(tables.indexes.c.id.in_(wanted)))

    def retired(self, grace_ms: int) -> dict[str, list[SegmentRow]]:
        """By table: the segments whose files a sweep may delete, since all indexes in them retired them so long ago."""
        if not self.known:
            return {}
        with self._database.read() as tx:
            over = self._database.now_ms(tx) - grace_ms
            found: dict[str, list[SegmentRow]] = defaultdict(list)
            for row in tx.execute(_RETIRED, {"over": over}):
                found[row.table_id].append(to_segment(row))
        return found

    def without_table(self) -> dict[str, list[SegmentRow]]:
        """By table: the segments of tables of which nothing is left."""
        if not self.known:
            return {}
        found: dict[str, list[SegmentRow]] = defaultdict(list)
        for row in self._database.ask(_WITHOUT_TABLE):
            found[row.table_id].append(to_segment(row))
        return found

    def forget(self, locations: Collection[str]) -> None:
        """These segments' files are deleted, durably."""
        if locations:
            with self._database.write() as tx:
                forget_segments(tx, locations)

    def mark_broken(self, location: str) -> bool:
        """A segment is damaged or gone: it covers nothing from now on. False: it is not recorded any more."""
        segment = tables.segments
        with self._database.write() as tx:
            indexes = tx.execute(_INDEXES_OF, {"locations": [location]}).scalars().all()
            tx.execute(update(segment).where(segment.c.location == location).values(broken=1))
            note_changes(tx, indexes)
        return bool(indexes)

    def is_recorded(self, location: str) -> bool:
        return bool(self._database.ask(_INDEXES_OF, {"locations": [location]}))

    def totals(self) -> dict[str, SegmentTotals]:
        """By table, its indexes that are live, and their segments in use: files, broken ones, and bytes."""
        if not self.known:
            return {}
        found: dict[str, SegmentTotals] = {}
        for row in self._database.ask(_TOTAL_INDEXES):
            found[row.table_id] = SegmentTotals(indexes=int(row.indexes))
        for row in self._database.ask(_TOTAL_SEGMENTS):
            totals = found.get(row.table_id, SegmentTotals())
            # PostgreSQL's sums are decimals.
            files, broken, size_bytes = int(row.files), int(row.broken), int(row.size_bytes)
            found[row.table_id] = replace(totals, files=files, broken=broken, size_bytes=size_bytes)
        return found

    def count(self, table_id: str) -> int:
        """How many segments of the table are in use."""
        rows = self._database.ask(_COUNT, {"table_id": table_id}) if self.known else []
        return int(rows[0].segments) if rows else 0


_INDEX, _SEGMENT = tables.indexes, tables.segments
_FORMAT = select(tables.lake.c.format).where(tables.lake.c.id == 1)
_ALL = select(_INDEX).order_by(_INDEX.c.id)
_OF_TABLE = _ALL.where(_INDEX.c.table_id == bindparam("table_id"))
_OF_TABLES = _ALL.where(_INDEX.c.table_id.in_(bindparam("table_ids", expanding=True)))
_ONE = select(_INDEX).where(
    _INDEX.c.table_id == bindparam("table_id"),
    _INDEX.c.kind == bindparam("kind"),
    _INDEX.c.field_ids == bindparam("field_ids"),
)
_LIVE_OF = select(_INDEX.c.id).where(_INDEX.c.id.in_(bindparam("ids", expanding=True)), _INDEX.c.state == LIVE)
_NOTE = update(_INDEX).where(_INDEX.c.id.in_(bindparam("ids", expanding=True))).values(changes=_INDEX.c.changes + 1)
_ADD = insert(_SEGMENT)
_RETIRE = update(_SEGMENT).where(_SEGMENT.c.index_id == bindparam("index"), _SEGMENT.c.location == bindparam("place"))
_FORGET = delete(_SEGMENT).where(_SEGMENT.c.location == bindparam("place"))
_IN_ORDER = select(_SEGMENT).order_by(_SEGMENT.c.location)
_SEGMENTS_OF_INDEX = _IN_ORDER.where(_SEGMENT.c.index_id == bindparam("index"))
_SEGMENTS = _SEGMENTS_OF_INDEX.where(_SEGMENT.c.broken == 0)
_SEGMENTS_OF_TABLE = _IN_ORDER.where(_SEGMENT.c.table_id == bindparam("table_id"))
_TABLES = select(_SEGMENT.c.table_id).distinct().order_by(_SEGMENT.c.table_id)
_LOCATIONS = select(_SEGMENT.c.location).distinct()
_OF_OPERATION = _LOCATIONS.where(_SEGMENT.c.operation == bindparam("operation"))
_COUNT_USED = select(func.count()).where(
    _SEGMENT.c.index_id == bindparam("index"),
    _SEGMENT.c.location.in_(bindparam("locations", expanding=True)),
    _SEGMENT.c.retired_ms.is_(None),
    _SEGMENT.c.broken == 0,
)
_INDEXES_OF = select(_SEGMENT.c.index_id).where(_SEGMENT.c.location.in_(bindparam("locations", expanding=True)))
_USED_TOO = _SEGMENT.alias("used")
_RETIRED = _IN_ORDER.where(
    _SEGMENT.c.retired_ms <= bindparam("over"),
    # One file may have sections of several indexes.
    ~select(_USED_TOO.c.location)
    .where(
        _USED_TOO.c.location == _SEGMENT.c.location,
        _USED_TOO.c.retired_ms.is_(None) | (_USED_TOO.c.retired_ms > bindparam("over")),
    )
    .exists(),
)
_HEADS, _TOUCHED, _COMMIT, _EXPIRED = tables.heads, tables.commit_tables, tables.commits, tables.expired


def _nothing_left(table_id: ColumnElement[str]) -> ColumnElement[bool]:
    """No branch has the table, and the files of all its states are deleted."""
    state = (
        select(_TOUCHED.c.version)
        .join(_COMMIT, _COMMIT.c.version == _TOUCHED.c.version)
        .join(
            _EXPIRED,
            and_(_EXPIRED.c.version == _TOUCHED.c.version, _EXPIRED.c.table_id == _TOUCHED.c.table_id),
            isouter=True,
        )
        .where(_TOUCHED.c.table_id == table_id, (_COMMIT.c.state == "live") | _EXPIRED.c.version.is_not(None))
    )
    return ~select(_HEADS.c.table_id).where(_HEADS.c.table_id == table_id).exists() & ~state.exists()


_WITHOUT_TABLE = _IN_ORDER.where(_nothing_left(_SEGMENT.c.table_id))
_GONE = (
    select(_INDEX.c.id)
    .where(
        _nothing_left(_INDEX.c.table_id),
        # An index may be made shortly before its table.
        select(_TOUCHED.c.version).where(_TOUCHED.c.table_id == _INDEX.c.table_id).exists()
        | (_INDEX.c.created_ms <= bindparam("before")),
    )
    .order_by(_INDEX.c.id)
)
# A table that was begun with an index and does not exist after so long never will.
NEVER_MADE_MS = 24 * 3_600_000


def _gone(tx: Connection, now_ms: int) -> list[str]:
    return list(tx.execute(_GONE, {"before": now_ms - NEVER_MADE_MS}).scalars())


_SMALL = (_SEGMENT.c.entries <= bindparam("entries_max")) & (_SEGMENT.c.files <= bindparam("files_max"))
_FIGURES = (
    select(
        _INDEX.c.id,
        _INDEX.c.table_id,
        func.sum(case((_SMALL & (_SEGMENT.c.broken == 0), 1), else_=0)).label("foldable"),
        func.sum(_SEGMENT.c.broken).label("broken"),
        func.sum(_SEGMENT.c.files * (1 - _SEGMENT.c.broken)).label("files"),
    )
    .join_from(
        _INDEX, _SEGMENT, and_(_SEGMENT.c.index_id == _INDEX.c.id, _SEGMENT.c.retired_ms.is_(None)), isouter=True
    )
    .where(_INDEX.c.state == LIVE)
    .group_by(_INDEX.c.id, _INDEX.c.table_id)
    .order_by(_INDEX.c.id)
)
_COUNT = select(func.count().label("segments")).where(
    _SEGMENT.c.table_id == bindparam("table_id"), _SEGMENT.c.retired_ms.is_(None)
)


_TOTAL_INDEXES = (
    select(_INDEX.c.table_id, func.count().label("indexes")).where(_INDEX.c.state == LIVE).group_by(_INDEX.c.table_id)
)
# A file has a row for each index with a section in it, and counts once.
_FILES = (
    select(
        _SEGMENT.c.table_id,
        _SEGMENT.c.location,
        func.max(_SEGMENT.c.size_bytes).label("size_bytes"),
        func.max(_SEGMENT.c.broken).label("broken"),
    )
    .where(_SEGMENT.c.retired_ms.is_(None))
    .group_by(_SEGMENT.c.table_id, _SEGMENT.c.location)
    .subquery()
)
_TOTAL_SEGMENTS = select(
    _FILES.c.table_id,
    (func.count() - func.sum(_FILES.c.broken)).label("files"),
    func.sum(_FILES.c.broken).label("broken"),
    func.sum(_FILES.c.size_bytes * (1 - _FILES.c.broken)).label("size_bytes"),
).group_by(_FILES.c.table_id)


def _on(table_id: str, kind: str, field_ids: Sequence[int]) -> dict[str, str]:
    return {"table_id": table_id, "kind": kind, "field_ids": json.dumps(list(field_ids))}


def to_index(row: SqlRow) -> IndexRow:
    ids = tuple(int(one) for one in json.loads(row.field_ids))
    return IndexRow(
        row.id, row.table_id, ids, row.kind, row.state, row.encoder, bool(row.wide), row.secret, row.changes
    )


def to_segment(row: SqlRow) -> SegmentRow:
    return SegmentRow(
        row.index_id,
        row.location,
        row.table_id,
        row.operation,
        row.size_bytes,
        row.tail_bytes,
        row.digest,
        row.entries,
        row.files,
        bool(row.broken),
        row.retired_ms,
    )
