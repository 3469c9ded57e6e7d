"""Which states of a table somebody can still read, in a tree of lines. Pure: what it answers decides what is deleted.

A version sees, of every table, the newest state on its own line up to there; if the line has none so early, what the
line's parent had where the line left it, and so on to main. So version numbers alone say nothing: a state of main is
not out of sight because a branch has a newer one. A state that no held version sees never comes into sight again: new
commits see what the head of their line sees, new lines begin at a version that is held.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

# Line of a version, and the version.
Place = tuple[str, int]
# Beyond every version: what a line sees now.
NOW = 2**63 - 1


class LineShape(Protocol):
    """What is asked of a line: where it left which other one. Main has no parent."""

    @property
    def id(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def base_version(self) -> int: ...


class Held:
    """Everything that is held, as places on lines: made once, asked for every table."""

    def __init__(self, lines: Iterable[LineShape], held: Iterable[Place]) -> None:
        self._lines = {line.id: line for line in lines}
        # Children before their parents: what a line does not have itself is asked of its parent.
        self._order = sorted(self._lines, key=self._depth, reverse=True)
        by_line: dict[str, set[int]] = defaultdict(set)
        for line, version in held:
            # A line that nobody knows must not let a version go unseen: looking for it raises KeyError.
            by_line[self._lines[line].id].add(version)
        self._held = {line: sorted(versions) for line, versions in by_line.items()}

    def _depth(self, line: str) -> int:
        depth, parent = 0, self._lines[line].parent
        while parent is not None:
            depth, parent = depth + 1, self._lines[parent].parent
        return depth

    def seen(self, states: Mapping[str, Sequence[int]]) -> set[int]:
        """Of a table's states, by line and each line's in ascending order, those that something held sees."""
        if unknown := set(states) - set(self._lines):
            raise KeyError(f"states of lines that nobody knows: {sorted(unknown)}")
        found: set[int] = set()
        asked: dict[str, set[int]] = defaultdict(set)
        for line in self._order:
            starts = states.get(line, ())
            places = self._held.get(line, [])
            if asked[line]:
                places = sorted({*places, *asked[line]})
            found.update(_between(starts, places))
            # Places before the line's first state see what its parent had.
            early = places if not starts else places[: bisect_left(places, starts[0])]
            parent, base = self._lines[line].parent, self._lines[line].base_version
            if parent is not None:
                asked[parent].update(min(place, base) for place in early)
        return found

    def look(self, states: Mapping[str, Sequence[int]], place: Place) -> int | None:
        """The state of a table that one place sees; None if the table is not there yet."""
        line, version = place
        while True:
            starts = states.get(line, ())
            at = bisect_right(starts, version)
            if at:
                return starts[at - 1]
            shape = self._lines[line]
            if shape.parent is None:
                return None
            line, version = shape.parent, min(version, shape.base_version)


def _between(starts: Sequence[int], places: Sequence[int]) -> Iterable[int]:
    """The states with a place between them and the next one."""
    for at, start in enumerate(starts):
        first = bisect_left(places, start)
        if first < len(places) and (at + 1 == len(starts) or places[first] < starts[at + 1]):
            yield start
