"""Expiry: which versions can still be read, and which states of tables only expired versions name.

Files are deleted in two steps (protocol 6). First, under fm_lake's lock, versions that nothing holds become `expired`:
no window, no branch (its head, its base, what its next merge compares with), no pin, no running operation. Taking a
pin, creating a branch and beginning take the same lock, so a version is either held or gone, never both, and gone is
for ever. The same step deletes what is kept of dropped tables that no version has any more (dropped.py). Second, after
a reader's grace, a sweep deletes the files of states that no version sees any more (table_states.py). Crash: each step
is one transaction; the next run finds what it left undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

from sqlalchemy import Connection, delete, func, insert, literal, select, update

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.database import Database, ReplyLost
from floodmark.catalog.history import EXPIRED, LIVE, of_name, tables_at_in, to_head
from floodmark.catalog.lineage import Lineage, Lineages
from floodmark.commit.dropped import forget_dropped
from floodmark.commit.journal import STAGED, STAGING
from floodmark.commit.table_states import CONDEMNED_MS, HeldVersions, Looking, Place, TableStates, by_lineage, place_of
from floodmark.failpoints import hit
from floodmark.model import BEGINNING, Head, Scalar

T = TypeVar("T")

# A version that touched no table has this in the place of a table: it too has a grace.
NO_TABLE = ""
ROWS_PER_STATEMENT = 500
# Later than every commit: whatever its age.
ANY_AGE_MS = 2**63 - 1


@dataclass(frozen=True)
class Readable:
    """The states of one table that some readable version sees. `heads`: the present heads of branches."""

    table_id: str
    table: str
    states: tuple[Head, ...]
    heads: frozenset[int]
    # The state of this table that a version sees, for all readable versions.
    look: Callable[[], Mapping[int, int | None]] = field(default=dict, repr=False)

    def versions(self, states: Collection[int]) -> set[int]:
        """The versions that see one of these states."""
        return {version for version, seen in self.look().items() if seen in states} if states else set()


class Expiry:
    def __init__(self, database: Database) -> None:
        self._database = database
        # By grace: the catalog state behind the result, when it was computed, and the result.
        self._counted: dict[int, tuple[tuple[Scalar, ...], float, int]] = {}

    def expirable(self, before_ms: int) -> list[int]:
        """The versions that `expire` would mark now."""
        with self._database.read() as tx:
            return _unheld(tx, before_ms)

    def expire(self, before_ms: int) -> list[int]:
        """Mark the versions from before a moment that nothing holds as expired. Deletes no file.

        The newest of them stays: it is the lake's state at that moment.
        """
        gone: list[int] = []
        try:
            with self._database.write() as tx:
                gone += self._mark_expired(tx, before_ms)
        except ReplyLost:
            # Neither done nor undone until the catalog was read (I13): all of it is one transaction.
            if not gone or not self._are_expired(gone):
                raise
        # Crash here: the versions are expired, all their files exist.
        hit("expire.marked")
        return gone

    def _mark_expired(self, tx: Connection, before_ms: int, only: Collection[int] | None = None) -> list[int]:
        commit, touched = tables.commits, tables.commit_tables
        self._database.lock_lake(tx)
        gone = [version for version in _unheld(tx, before_ms) if only is None or version in only]
        now = self._database.now_ms(tx)
        for part in _parts(gone):
            tx.execute(update(commit).where(commit.c.version.in_(part)).values(state=EXPIRED))
            names = select(touched.c.version, touched.c.table_id, literal(now)).where(touched.c.version.in_(part))
            tx.execute(insert(tables.expired).from_select(["version", "table_id", "expired_ms"], names))
            with_tables = set(tx.execute(select(touched.c.version).where(touched.c.version.in_(part))).scalars())
            bare = [{"version": one, "table_id": NO_TABLE, "expired_ms": now} for one in part]
            bare = [row for row in bare if row["version"] not in with_tables]
            if bare:
                tx.execute(insert(tables.expired), bare)
        forget_dropped(tx)
        _raise_floors(tx, now)
        return gone

    def _are_expired(self, versions: list[int]) -> bool:
        """Read under the lake's lock, which waits for a server that is still committing."""
        commit = tables.commits
        with self._database.write() as tx:
            self._database.lock_lake(tx)
            return tx.execute(select(commit.c.state).where(commit.c.version == versions[-1])).scalar() == EXPIRED

    def unheld(self, versions: Collection[int]) -> list[int]:
        """Those of these versions that only their time window holds."""
        with self._database.read() as tx:
            return [version for version in _unheld(tx, ANY_AGE_MS) if version in set(versions)]

    def give_up(self, versions: Collection[int], detail: str) -> list[int]:
        """Mark those of these versions that nothing holds as expired, whatever their age, with one audit row."""
        # Imported late: queries of state do not load Iceberg's code.
        from floodmark.catalog.riders import AuditRider

        gone: list[int] = []
        try:
            with self._database.write() as tx:
                gone += self._mark_expired(tx, ANY_AGE_MS, only=set(versions))
                if gone:
                    audit = AuditRider("repair", "unreadable", "given_up", detail)
                    audit.apply(tx, clock.new_id(), None, self._database.now_ms(tx))
        except ReplyLost:
            if not gone or not self._are_expired(gone):
                raise
        # Crash here: the versions are expired, with the audit row; what is left of their files still exists.
        hit("give_up.marked")
        return gone

    # ── what a sweep may take ──

    def states(self, grace_ms: int, table: str | None = None) -> list[TableStates]:
        """The tables with a state whose files may go."""
        return [one for one in self.all_states(grace_ms, table) if one.dead or one.deletions]

    def all_states(self, grace_ms: int, table: str | None = None) -> list[TableStates]:
        """Every table with every state whose files may exist.

        Dead is a state that is expired, whose reader's grace is over, and that no held version sees, nor one whose
        operation may still be writing; and a state that a sweep has begun to delete, whatever grace is given now.
        """
        touched = tables.commit_tables
        with self._database.read() as tx:
            over = self._database.now_ms(tx) - grace_ms
            looking = Looking(tx, over)
            names = select(touched.c.table_id).distinct().order_by(touched.c.table_id)
            names = names if table is None else names.where(touched.c.table_name == table)
            found = [looking.states_of(table_id) for table_id in tx.execute(names).scalars().all()]
        return [one for one in found if one is not None]

    def condemn(self, table: TableStates) -> None:
        """Record that the files of the dead states are deleted from now on: no later sweep may take them for whole."""
        row, file = tables.expired, tables.deletions
        with self._database.write() as tx:
            for part in _parts(sorted(table.dead)):
                mine = (row.c.table_id == table.table_id) & row.c.version.in_(part)
                tx.execute(update(row).where(mine).values(expired_ms=CONDEMNED_MS))
            for locations in _parts([one.location for one in table.deletions]):
                going = (file.c.table_id == table.table_id) & file.c.location.in_(locations)
                tx.execute(update(file).where(going).values(below_ms=CONDEMNED_MS))

    def mark_swept(self, table: TableStates, versions: Iterable[int]) -> None:
        """The files of these states, and the deletions files of the table that may go, are gone."""
        row, file = tables.expired, tables.deletions
        with self._database.write() as tx:
            for part in _parts(sorted(versions)):
                tx.execute(delete(row).where(row.c.table_id == table.table_id, row.c.version.in_(part)))
            for locations in _parts([one.location for one in table.deletions]):
                tx.execute(delete(file).where(file.c.table_id == table.table_id, file.c.location.in_(locations)))

    def forget_bare(self, grace_ms: int) -> None:
        """Delete the rows of versions without tables whose grace is over."""
        row = tables.expired
        with self._database.write() as tx:
            over = self._database.now_ms(tx) - grace_ms
            tx.execute(delete(row).where(row.c.table_id == NO_TABLE, row.c.expired_ms <= over))

    # ── figures ──

    def count_live(self) -> int:
        """How many versions can be read."""
        commit = tables.commits
        with self._database.read() as tx:
            return int(tx.execute(select(func.count()).where(commit.c.state == LIVE)).scalar_one())

    def readable(self, table: str | None = None) -> list[Readable]:
        """Every table that has readable states, with these. `table`: only those that ever had this name."""
        touched, commit = tables.commit_tables, tables.commits
        with self._database.read() as tx:
            lineages = Lineages.read(tx)
            live = tx.execute(select(commit.c.version, commit.c.branch).where(commit.c.state == LIVE))
            places = [place_of(lineages, row.branch, row.version) for row in live]
            held = HeldVersions(lineages.all(), places)
            head = tables.heads
            heads = {(row.table_id, row.version) for row in tx.execute(select(head.c.table_id, head.c.version))}
            query = (
                select(touched, commit.c.branch)
                .join(commit, commit.c.version == touched.c.version)
                .order_by(touched.c.table_id, touched.c.version)
            )
            # All rows of the tables: a state is seen up to the next one, under whichever name.
            ids = select(touched.c.table_id).where(of_name(table)).correlate(None) if table is not None else None
            rows = list(tx.execute(query if ids is None else query.where(touched.c.table_id.in_(ids))))
        found = []
        for table_id, some in groupby(rows, key=lambda row: str(row.table_id)):
            states = {row.version: to_head(row, row.branch) for row in some}
            starts = by_lineage([place_of(lineages, state.branch, state.version) for state in states.values()])
            seen = [states[version] for version in sorted(held.seen(starts)) if states[version].metadata_location]
            now = frozenset(version for one, version in heads if one == table_id)
            if seen:
                look = partial(_look_from, held, starts, places)
                found.append(Readable(table_id, seen[-1].table, tuple(seen), now, look))
        return found

    def count_readable(self, table_id: str) -> int:
        """How many states of a table readable versions see."""
        touched, commit = tables.commit_tables, tables.commits
        with self._database.read() as tx:
            lineages = Lineages.read(tx)
            live = tx.execute(select(commit.c.version, commit.c.branch).where(commit.c.state == LIVE))
            held = HeldVersions(lineages.all(), [place_of(lineages, row.branch, row.version) for row in live])
            query = (
                select(touched.c.version, touched.c.metadata_location, commit.c.branch)
                .join(commit, commit.c.version == touched.c.version)
                .where(touched.c.table_id == table_id)
                .order_by(touched.c.version)
            )
            rows = list(tx.execute(query))
            seen = held.seen(by_lineage([place_of(lineages, row.branch, row.version) for row in rows]))
        return sum(row.version in seen and row.metadata_location != "" for row in rows)

    def count_dead(self, grace_ms: int, *, age_s_max: float = 0.0) -> int:
        """How many states a sweep would settle now; tables with nothing expired are skipped.

        This walks through all readable versions. A caller that asks repeatedly accepts a result of some age: as long as
        no version expired and nothing was swept, it only misses states that newer ones replaced since.
        """
        row = tables.expired
        figures = select(func.count().label("rows"), func.max(row.c.expired_ms).label("newest"))
        with self._database.read() as tx:
            over = self._database.now_ms(tx) - grace_ms
            found = tuple(tx.execute(figures.where(row.c.expired_ms <= over)).one())
            if not found[0]:
                return 0
            known = self._counted.get(grace_ms)
            if known is not None and known[0] == found and time.monotonic() - known[1] < age_s_max:
                return known[2]
            looking = Looking(tx, over)
            some = [looking.states_of(table_id) for table_id in sorted(looking.gone) if table_id != NO_TABLE]
        dead = sum(len(one.dead) for one in some if one is not None)
        self._counted[grace_ms] = (found, time.monotonic(), dead)
        return dead


def _look_from(held: HeldVersions, starts: Mapping[str, list[int]], places: Iterable[Place]) -> dict[int, int | None]:
    return {place[1]: held.look(starts, place) for place in places}


def _unheld(tx: Connection, before_ms: int) -> list[int]:
    commit, operation = tables.commits, tables.operations
    lineages = Lineages.read(tx)
    held = {
        *tx.execute(select(tables.branches.c.head_version)).scalars(),
        *tx.execute(select(tables.branches.c.base_version)).scalars(),
        *tx.execute(select(tables.pins.c.version)).scalars(),
        *(version for lineage in lineages.living() for version in _needed_to_merge(lineage)),
    }
    # A running operation plans on the head that it finds, and again on newer ones: it holds its base and all since.
    at_work = tx.execute(
        select(func.min(operation.c.base_version)).where(tables.unfinished, operation.c.state.in_((STAGING, STAGED)))
    ).scalar()
    old = tx.execute(
        select(commit.c.version, commit.c.branch)
        .where(commit.c.committed_ms < before_ms, commit.c.state == LIVE)
        .order_by(commit.c.version)
    ).all()
    # Without the newest of every existing branch: the branch was in that state when the window began.
    newest = {lineages.owner(row.branch, row.version).id: row.version for row in old}
    held |= {newest[lineage.id] for lineage in lineages.living() if lineage.id in newest}
    return [row.version for row in old if row.version not in held and (at_work is None or row.version < at_work)]


def _needed_to_merge(lineage: Lineage) -> set[int]:
    """The versions that a branch's next merge with its parent, either way, starts from."""
    return {lineage.base_version, lineage.common_version, lineage.sent_version, lineage.taken_version}


def _raise_floors(tx: Connection, now_ms: int) -> None:
    """Deletions expire with their versions, oldest first, and not before every protected consumer has passed them."""
    file, commit, upkeep, consumer = tables.deletions, tables.commits, tables.upkeep, tables.consumers
    lowest = (
        select(consumer.c.table_id, func.min(consumer.c.mark).label("mark"))
        .where(consumer.c.protected == 1)
        .group_by(consumer.c.table_id)
    )
    marks: dict[str, int] = {row.table_id: row.mark for row in tx.execute(lowest)}
    # An open unit is read again until it is settled, whatever sink it is for.
    unit = tables.units
    opened = select(unit.c.table_id, func.min(unit.c.since).label("since")).where(unit.c.state == "open")
    for one in tx.execute(opened.where(unit.c.lane == "rows").group_by(unit.c.table_id)):
        marks[one.table_id] = min(marks.get(one.table_id, one.since), one.since)
    # A branch's next merge reads what was deleted since the last one.
    for table_id, sequence in _merge_marks(tx):
        marks[table_id] = min(marks.get(table_id, sequence), sequence)
    floors: dict[str, int] = {}
    closed: set[str] = set()
    query = (
        select(file.c.table_id, file.c.sequence, commit.c.state, upkeep.c.deletions_floor)
        .join(commit, commit.c.version == file.c.version)
        .join(upkeep, upkeep.c.table_id == file.c.table_id)
        .where(file.c.sequence > upkeep.c.deletions_floor)
        .order_by(file.c.table_id, file.c.sequence)
    )
    for row in tx.execute(query):
        passed = row.table_id not in marks or row.sequence <= marks[row.table_id]
        if row.state != EXPIRED or not passed:
            closed.add(row.table_id)
        elif row.table_id not in closed:
            floors[row.table_id] = row.sequence
    for table_id, floor in floors.items():
        tx.execute(update(upkeep).where(upkeep.c.table_id == table_id).values(deletions_floor=floor))
        below = (file.c.table_id == table_id) & (file.c.sequence <= floor) & file.c.below_ms.is_(None)
        tx.execute(update(file).where(below).values(below_ms=now_ms))


def _merge_marks(tx: Connection) -> Iterable[tuple[str, int]]:
    """Tables and their sequences at the versions that merges of branches start from."""
    lineages = [lineage for lineage in Lineages.read(tx).living() if lineage.parent is not None]
    for version in {version for lineage in lineages for version in _needed_to_merge(lineage)}:
        yield from ((head.table_id, head.sequence) for head in tables_at_in(tx, version))


def deletions_floor(database: Database, table_id: str) -> int:
    """Deletions at or below this sequence are gone: a reader that is further behind cannot learn what was deleted."""
    with database.read() as tx:
        floor = tx.execute(select(tables.upkeep.c.deletions_floor).where(tables.upkeep.c.table_id == table_id)).scalar()
    return BEGINNING if floor is None else int(floor)


def _parts(values: list[T]) -> Iterable[list[T]]:
    return (values[start : start + ROWS_PER_STATEMENT] for start in range(0, len(values), ROWS_PER_STATEMENT))
