"""The states of a table whose files may exist: which can still be read, and which a sweep may delete.

A version sees, of every table, the newest state in its own lineage up to there; if the branch has none so early, the
state that its parent had where the branch left it, and so on to main. So version numbers alone decide nothing. A state
that no held version sees never becomes visible again: new commits see what the head of their branch sees, new branches
begin at a version that is held.

Decided from the catalog alone, in one transaction, so that every table is judged by the same view. Dead is what is
expired, past its readers' grace, and seen by no held version; not what an operation may still be writing, and not the
newest few states of live branches, which the table's metadata names to other engines. The metadata file that a deleted
branch wrote last stays, since it is the table's. A dropped table's last state is a tombstone: it names no file, and
goes with, never before, the states that it hides. The newest state of such a table stays as long as any other: undrop
may bring it back (dropped.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection, and_, func, select

from floodmark.catalog import tables
from floodmark.catalog.history import DELETIONS_FILE, LIVE, to_deletions, to_head
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.tables import CLEANED
from floodmark.model import MAIN, SNAPSHOTS_KEPT, DeletionsFile, Head

# Lineage of a version, and the version.
Place = tuple[str, int]
# Beyond every version: what a lineage sees now.
NOW = 2**63 - 1


class LineageShape(Protocol):
    """What is needed of a lineage: its parent, and where it left it. Main has no parent."""

    @property
    def id(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def base_version(self) -> int: ...


class HeldVersions:
    """All held versions, as places in lineages: built once, used for every table."""

    def __init__(self, lineages: Iterable[LineageShape], held: Iterable[Place]) -> None:
        self._lines = {lineage.id: lineage for lineage in lineages}
        # Children before their parents: a state that a lineage lacks is looked up in its parent.
        self._order = sorted(self._lines, key=self._depth, reverse=True)
        by_lineage: dict[str, set[int]] = defaultdict(set)
        for lineage, version in held:
            # An unknown lineage must not hide a version: looking it up raises KeyError.
            by_lineage[self._lines[lineage].id].add(version)
        self._held = {lineage: sorted(versions) for lineage, versions in by_lineage.items()}

    def _depth(self, lineage: str) -> int:
        depth, parent = 0, self._lines[lineage].parent
        while parent is not None:
            depth, parent = depth + 1, self._lines[parent].parent
        return depth

    def seen(self, states: Mapping[str, Sequence[int]]) -> set[int]:
        """Of a table's states, by lineage and ascending in each, those that a held version sees."""
        if unknown := set(states) - set(self._lines):
            raise KeyError(f"states of unknown lineages: {sorted(unknown)}")
        found: set[int] = set()
        asked: dict[str, set[int]] = defaultdict(set)
        for lineage in self._order:
            starts = states.get(lineage, ())
            places = self._held.get(lineage, [])
            if asked[lineage]:
                places = sorted({*places, *asked[lineage]})
            found.update(_between(starts, places))
            # Places before the lineage's first state see what its parent had.
            early = places if not starts else places[: bisect_left(places, starts[0])]
            parent, base = self._lines[lineage].parent, self._lines[lineage].base_version
            if parent is not None:
                asked[parent].update(min(place, base) for place in early)
        return found

    def look(self, states: Mapping[str, Sequence[int]], place: Place) -> int | None:
        """The state of a table that one place sees; None if the table does not exist yet."""
        lineage, version = place
        while True:
            starts = states.get(lineage, ())
            at = bisect_right(starts, version)
            if at:
                return starts[at - 1]
            shape = self._lines[lineage]
            if shape.parent is None:
                return None
            lineage, version = shape.parent, min(version, shape.base_version)


def _between(starts: Sequence[int], places: Sequence[int]) -> Iterable[int]:
    """The states with a place between them and the next one."""
    for at, start in enumerate(starts):
        first = bisect_left(places, start)
        if first < len(places) and (at + 1 == len(starts) or places[first] < starts[at + 1]):
            yield start


# The end of the grace of a state that a sweep has begun to delete: long ago, for every process.
CONDEMNED_MS = 0
# Kinds of commits on main that may name a file which another state had, and the one before did not.
TANGLING = ("branch_merge", "repair", "undrop")


@dataclass(frozen=True)
class TableStates:
    """Every state of a table whose files may exist, by version; `dead` are those that nothing can read any more.

    `tangled`: a branch has committed to the table, a repair accepted another engine's state, or the table was dropped
    and came back. So its states are not one sequence, or a deleted file came back: the states that name a file are not
    one unbroken run. `pointed`: the metadata file that the table's pointer names, if the state that it came with is
    dead: the file stays until the pointer has moved on, and the row of the state with it. Once the rest is gone the
    state is none of `states`.
    """

    table_id: str
    table: str
    states: tuple[Head, ...]
    dead: frozenset[int]
    deletions: tuple[DeletionsFile, ...] = ()
    tangled: bool = False
    pointed: str | None = None

    @property
    def settled(self) -> frozenset[int]:
        """The dead states of which nothing is left once a sweep has ended."""
        return frozenset(state.version for state in self._dead() if state.metadata_location != self.pointed)

    def _dead(self) -> list[Head]:
        return [state for state in self.states if state.version in self.dead]

    @property
    def head(self) -> Head:
        return self.states[-1]


class Looking:
    """One view of what may be deleted, in one transaction: the same view for every table."""

    def __init__(self, tx: Connection, over_ms: int) -> None:
        self._tx = tx
        self._over_ms = over_ms
        self._lines = Lineages.read(tx)
        # Per table the versions whose grace is over.
        self.gone: dict[str, set[int]] = defaultdict(set)
        commit, row, operation = tables.commits, tables.expired, tables.operations
        live = tx.execute(select(commit.c.version, commit.c.branch).where(commit.c.state == LIVE))
        held = {place_of(self._lines, one.branch, one.version) for one in live}
        waiting = select(row, commit.c.branch).join(commit, commit.c.version == row.c.version)
        for one in tx.execute(waiting):
            if one.expired_ms <= over_ms:
                self.gone[one.table_id].add(one.version)
            else:
                held.add(place_of(self._lines, one.branch, one.version))
        # What existing branches see now, and what they began with, is needed whatever the rows of versions record.
        for lineage in self._lines.living():
            held.add((lineage.id, NOW))
            if lineage.parent is not None:
                held.add((lineage.parent, lineage.base_version))
        self._held = HeldVersions(self._lines.all(), held)
        self._condemned = _condemned(tx)
        self._busy = set(tx.execute(select(operation.c.version).where(operation.c.cleaned != CLEANED)).scalars())
        if tx.execute(select(tables.lake.c.format)).scalar_one() >= tables.TOGETHER_FORMAT:
            # Cleaning a leader's folders compares them with what the versions that it published name.
            led = select(tables.led.c.version).join(operation, operation.c.id == tables.led.c.leader)
            self._busy |= set(tx.execute(led.where(operation.c.cleaned != CLEANED)).scalars())
        self._with_heads = set(tx.execute(select(tables.heads.c.table_id)).scalars())

    def states_of(self, table_id: str) -> TableStates | None:
        """None if nothing of the table is left: it was dropped, and all of it is swept."""
        states = _states(self._tx, table_id)
        if not states:
            return None
        condemned, gone = self._condemned.get(table_id, set()), self.gone.get(table_id, set()) - self._busy
        places = [(self._lines.owner(state.branch, state.version).id, state.version) for state in states]
        unseen = {state.version for state in states} - self._held.seen(by_lineage(places))
        deletions = _deletions(self._tx, table_id, self._over_ms)
        pointed = None
        if table_id in self._with_heads:
            living = {lineage.id for lineage in self._lines.living()}
            dead = unseen & gone - _newest_few(states, {version for lineage, version in places if lineage in living})
            newest = max((state for state in states if state.metadata_location), key=lambda state: state.version)
            if newest.version in dead | condemned:
                pointed = newest.metadata_location
            if newest.version in condemned:
                # Operations that were published together share their metadata file.
                sharing = {one.version for one in states if one.metadata_location == newest.metadata_location}
                hidden = sharing & condemned
                states = tuple(state for state in states if state.version not in hidden)
                dead, condemned = dead - hidden, condemned - hidden
        else:
            known = select(func.count()).where(tables.deletions.c.table_id == table_id)
            all_go = self._tx.execute(known).scalar_one() == len(deletions)
            dead = _dead_of_dropped(states, unseen, gone, all_go=all_go)
        return TableStates(
            table_id,
            states[-1].table,
            states,
            frozenset(dead | condemned),
            deletions,
            tangled=_is_tangled(self._tx, table_id),
            pointed=pointed,
        )


def _newest_few(states: Collection[Head], living: set[int]) -> set[int]:
    """Existing branches keep them: the table's metadata names them to other engines. Tombstones stay too."""
    real = [state for state in states if state.metadata_location and state.version in living]
    # Metadata of operations that were published together names all of their snapshots.
    named = {state.metadata_location for state in real[-SNAPSHOTS_KEPT:]}
    kept = {state.version for state in real if state.metadata_location in named}
    return kept | {state.version for state in states if not state.metadata_location}


def _dead_of_dropped(states: Collection[Head], unseen: set[int], gone: set[int], *, all_go: bool) -> set[int]:
    """The dead states of a table that no branch has any more.

    Its last row goes with all the others and with its deletions files. A tombstone that went before the states that it
    hides would make them visible again, for ever.
    """
    tombstones = {state.version for state in states if not state.metadata_location}
    real = {state.version for state in states} - tombstones
    dead = unseen & gone & real
    if dead != real:
        # An undrop or a branch may bring it back; it then continues from its newest metadata, whichever writer wrote
        # that.
        return dead - {max(real)}
    if all_go:
        return dead | (tombstones & gone)
    # While work is left, a row must lead to it.
    return dead if tombstones else dead - {max(real)}


def _is_tangled(tx: Connection, table_id: str) -> bool:
    touched, commit = tables.commit_tables, tables.commits
    query = (
        select(commit.c.version)
        .join(touched, touched.c.version == commit.c.version)
        .where(touched.c.table_id == table_id, (commit.c.branch != MAIN) | commit.c.kind.in_(TANGLING))
        .limit(1)
    )
    return tx.execute(query).first() is not None


def place_of(lineages: Lineages, branch: str, version: int) -> Place:
    """Where a commit is, by its version and the name of its branch."""
    return lineages.owner(branch, version).id, version


def by_lineage(places: Iterable[Place]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for lineage, version in places:
        found[lineage].append(version)
    return found


def _condemned(tx: Connection) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for row in tx.execute(select(tables.expired).where(tables.expired.c.expired_ms == CONDEMNED_MS)):
        found[row.table_id].add(row.version)
    return found


def _states(tx: Connection, table_id: str) -> tuple[Head, ...]:
    touched, commit, row = tables.commit_tables, tables.commits, tables.expired
    query = (
        select(touched, commit.c.branch)
        .join(commit, commit.c.version == touched.c.version)
        .join(row, and_(row.c.version == touched.c.version, row.c.table_id == touched.c.table_id), isouter=True)
        .where(touched.c.table_id == table_id)
        .where((commit.c.state == LIVE) | row.c.version.is_not(None))
        .order_by(touched.c.version)
    )
    return tuple(to_head(found, found.branch) for found in tx.execute(query))


def _deletions(tx: Connection, table_id: str, over_ms: int) -> tuple[DeletionsFile, ...]:
    """Deletions files that no reader could request since before the grace."""
    file = tables.deletions
    query = select(*DELETIONS_FILE).where(file.c.table_id == table_id, file.c.below_ms <= over_ms)
    return tuple(to_deletions(tx.execute(query)))
