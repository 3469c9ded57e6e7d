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
class Line:
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


MAIN_LINE = Line(MAIN, MAIN, None, 0, -1, 0, 0, 0, 0, "", None, None)


@dataclass(frozen=True)
class Part:
    """Commits of `line.name` with after < version <= upto; without `upto`, all after."""

    line: Line
    after: int
    upto: int | None


class Lines:
    """All lineages, as one transaction saw them."""

    def __init__(self, lines: Sequence[Line], live_names: frozenset[str] = frozenset({MAIN})) -> None:
        self._by_id = {MAIN: MAIN_LINE, **{line.id: line for line in lines}}
        self._live_names = live_names
        self._by_name: dict[str, list[Line]] = {}
        for line in self._by_id.values():
            self._by_name.setdefault(line.name, []).append(line)

    @classmethod
    def read(cls, tx: Connection) -> Lines:
        row = tables.lines
        found = tx.execute(select(row).order_by(row.c.born_version, row.c.id)).mappings()
        lines = [Line(**{field.name: one[field.name] for field in fields(Line)}) for one in found]
        return cls(lines, frozenset(tx.execute(select(tables.branches.c.name)).scalars()))

    def live(self, name: str) -> Line:
        """The lineage of the branch that has this name now."""
        line = next((one for one in self._by_name.get(name, ()) if one.ended_version is None), None)
        if (line is None) is not (name not in self._live_names):
            raise Corrupt(
                "the catalog's rows of this branch disagree",
                branch=name,
                advice="Nothing was changed. Restore the catalog from a backup, or ask for help.",
            )
        if line is None:
            raise NotFound("there is no such branch", branch=name, branches=",".join(sorted(self._live_names)))
        return line

    def state(self, name: str) -> str:
        """`live` or `ended`; Corrupt if no row has the name, because then its state is unknown."""
        if name in self._live_names or name in self._by_name:
            try:
                self.live(name)
            except NotFound:
                return ENDED
            return LIVING
        raise Corrupt("no row of the catalog knows this branch", branch=name, advice="It is kept as it is.")

    def get(self, line_id: str) -> Line:
        line = self._by_id.get(line_id)
        if line is None:
            raise Corrupt("the catalog has no row of a branch's parent", line=line_id)
        return line

    def owner(self, name: str, version: int) -> Line:
        """The lineage that had the branch's name at this version."""
        for line in self._by_name.get(name, ()):
            lived = line.ended_version is None or version <= line.ended_version
            if line.born_version < version and lived:
                return line
        raise Corrupt("no branch had this name when the version was made", branch=name, version=version)

    def parts(self, line: Line, upto: int | None = None) -> list[Part]:
        """The commits of a lineage (up to a version): its own, and its ancestors' up to where it left them."""
        found: list[Part] = []
        while True:
            if line.ended_version is not None:
                upto = line.ended_version if upto is None else min(upto, line.ended_version)
            found.append(Part(line, line.born_version, upto))
            if line.parent is None:
                return found
            upto = line.base_version if upto is None else min(upto, line.base_version)
            line = self.get(line.parent)

    def holds(self, line: Line, name: str, version: int) -> bool:
        """Whether this commit of the branch `name` is in the lineage."""
        return any(
            part.line.name == name and part.after < version and (part.upto is None or version <= part.upto)
            for part in self.parts(line)
        )

    def children(self, line: Line) -> list[Line]:
        """The existing branches that were created from this one."""
        return [one for one in self._by_id.values() if one.parent == line.id and one.ended_version is None]

    def living(self) -> list[Line]:
        """The lineages of all existing branches; main first."""
        return [one for one in self._by_id.values() if one.ended_version is None]

    def all(self) -> list[Line]:
        """Every lineage, main first, then by creation: a parent comes before its children."""
        return list(self._by_id.values())


def on_parts(parts: Sequence[Part]) -> ColumnElement[bool]:
    """The condition that a row of fm_commits is one of these parts'."""
    commit = tables.commits
    return or_(
        *(
            and_(
                commit.c.branch == part.line.name,
                commit.c.version > part.after,
                *(() if part.upto is None else (commit.c.version <= part.upto,)),
            )
            for part in parts
        )
    )
