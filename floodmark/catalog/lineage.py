"""Lineages: the commits that a branch is based on, for every branch that exists or ever existed.

A lineage is a branch's own commits, from its creation to its deletion, and below them its parent's up to where it left
the parent. Commits carry the branch's name; a name may be used again, so a commit belongs to the lineage that had the
name then. Main is the lineage that all others come from; it has no row. A branch is gone only if the row of its lineage
records that it ended: a name without a row is Corrupt, never gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from sqlalchemy import Connection, and_, or_, select
from sqlalchemy.sql.elements import ColumnElement

from floodmark.catalog import tables
from floodmark.errors import Corrupt, NotFound
from floodmark.model import MAIN

LIVING, ENDED = "live", "ended"


@dataclass(frozen=True)
class Lineage:
    """One branch from creation to deletion. `parent` is the id of its parent's lineage; main's id is its name."""

    id: str
    name: str
    parent: str | None
    base_version: int
    born_version: int
    common_version: int
    sent_version: int
    taken_version: int
    created_ms: int
    actor: str
    ended_version: int | None
    ended_ms: int | None

    def scope(self, scope: str) -> str:
        """The scope under which this branch records the batches of `scope` that were published on it."""
        return scope if self.id == MAIN else f"{self.id}/{scope}"


MAIN_LINEAGE = Lineage(MAIN, MAIN, None, 0, -1, 0, 0, 0, 0, "", None, None)


@dataclass(frozen=True)
class LineagePart:
    """Commits of `lineage.name` with after < version <= upto; without `upto`, all after."""

    lineage: Lineage
    after: int
    upto: int | None


class Lineages:
    """All lineages, as one transaction saw them."""

    def __init__(self, lineages: Sequence[Lineage], live_names: frozenset[str] = frozenset({MAIN})) -> None:
        self._by_id = {MAIN: MAIN_LINEAGE, **{lineage.id: lineage for lineage in lineages}}
        self._live_names = live_names
        self._by_name: dict[str, list[Lineage]] = {}
        for lineage in self._by_id.values():
            self._by_name.setdefault(lineage.name, []).append(lineage)

    @classmethod
    def read(cls, tx: Connection) -> Lineages:
        row = tables.lines
        found = tx.execute(select(row).order_by(row.c.born_version, row.c.id)).mappings()
        lineages = [Lineage(**{field.name: one[field.name] for field in fields(Lineage)}) for one in found]
        return cls(lineages, frozenset(tx.execute(select(tables.branches.c.name)).scalars()))

    def live(self, name: str) -> Lineage:
        """The lineage of the branch that has this name now."""
        lineage = next((one for one in self._by_name.get(name, ()) if one.ended_version is None), None)
        if (lineage is None) is not (name not in self._live_names):
            raise Corrupt(
                "the catalog's rows of this branch disagree",
                branch=name,
                advice="Nothing was changed. Restore the catalog from a backup, or ask for help.",
            )
        if lineage is None:
            raise NotFound("there is no such branch", branch=name, branches=",".join(sorted(self._live_names)))
        return lineage

    def state(self, name: str) -> str:
        """`live` or `ended`; Corrupt if no row has the name, because then its state is unknown."""
        if name in self._live_names or name in self._by_name:
            try:
                self.live(name)
            except NotFound:
                return ENDED
            return LIVING
        raise Corrupt("the catalog has no row of this branch", branch=name, advice="It is kept as it is.")

    def get(self, line_id: str) -> Lineage:
        lineage = self._by_id.get(line_id)
        if lineage is None:
            raise Corrupt("the catalog has no row of a branch's parent", line=line_id)
        return lineage

    def owner(self, name: str, version: int) -> Lineage:
        """The lineage that had the branch's name at this version."""
        for lineage in self._by_name.get(name, ()):
            lived = lineage.ended_version is None or version <= lineage.ended_version
            if lineage.born_version < version and lived:
                return lineage
        raise Corrupt("no branch had this name when the version was made", branch=name, version=version)

    def parts(self, lineage: Lineage, upto: int | None = None) -> list[LineagePart]:
        """The commits of a lineage (up to a version): its own, and its ancestors' up to where it left them."""
        found: list[LineagePart] = []
        while True:
            if lineage.ended_version is not None:
                upto = lineage.ended_version if upto is None else min(upto, lineage.ended_version)
            found.append(LineagePart(lineage, lineage.born_version, upto))
            if lineage.parent is None:
                return found
            upto = lineage.base_version if upto is None else min(upto, lineage.base_version)
            lineage = self.get(lineage.parent)

    def holds(self, lineage: Lineage, name: str, version: int) -> bool:
        """Whether this commit of the branch `name` is in the lineage."""
        return any(
            part.lineage.name == name and part.after < version and (part.upto is None or version <= part.upto)
            for part in self.parts(lineage)
        )

    def children(self, lineage: Lineage) -> list[Lineage]:
        """The existing branches that were created from this one."""
        return [one for one in self._by_id.values() if one.parent == lineage.id and one.ended_version is None]

    def living(self) -> list[Lineage]:
        """The lineages of all existing branches; main first."""
        return [one for one in self._by_id.values() if one.ended_version is None]

    def all(self) -> list[Lineage]:
        """Every lineage, main first, then by creation: a parent comes before its children."""
        return list(self._by_id.values())


def on_parts(parts: Sequence[LineagePart]) -> ColumnElement[bool]:
    """The condition that a row of fm_commits is one of these parts'."""
    commit = tables.commits
    return or_(
        *(
            and_(
                commit.c.branch == part.lineage.name,
                commit.c.version > part.after,
                *(() if part.upto is None else (commit.c.version <= part.upto,)),
            )
            for part in parts
        )
    )
