"""Which states of a table are needed, against a slow oracle that follows every commit's parent; random trees."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from floodmark.commit.table_states import NOW, HeldVersions, Place


@dataclass
class Line:
    id: str
    parent: str | None
    base_version: int
    head: int
    ended: bool = False


@dataclass
class Tree:
    """A lake as the oracle knows it: for every version the version before it, and whether it touched the table."""

    random: random.Random
    lines: dict[str, Line] = field(default_factory=lambda: {"main": Line("main", None, 0, 0)})
    before: dict[int, int] = field(default_factory=dict)
    owner: dict[int, str] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)

    @property
    def version(self) -> int:
        return len(self.before)

    def live(self) -> list[Line]:
        return [line for line in self.lines.values() if not line.ended]

    def commit(self) -> None:
        line, version = self.random.choice(self.live()), self.version + 1
        self.before[version], self.owner[version], line.head = line.head, line.id, version
        if self.random.random() < 0.6:
            self.touched.add(version)

    def along(self, line: Line) -> list[int]:
        """Every version that the line's head stands on, newest first, down to the empty lake."""
        found = [line.head]
        while found[-1] != 0:
            found.append(self.before[found[-1]])
        return found

    def fork(self, held: set[int]) -> None:
        """From the head of a line, or from an older version of it that is still held; also one of an ancestor's."""
        parent = self.random.choice(self.live())
        bases = [version for version in self.along(parent) if version == parent.head or version in held]
        base = parent.head if self.random.random() < 0.5 else self.random.choice(bases)
        name = f"line{len(self.lines)}"
        self.lines[name] = Line(name, parent.id, base, base)

    def end(self) -> None:
        parents = {line.parent for line in self.live()}
        may = [line for line in self.live() if line.parent is not None and line.id not in parents]
        if may:
            self.random.choice(may).ended = True

    def states(self, there: set[int]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for version in sorted(there):
            found.setdefault(self.owner[version], []).append(version)
        return found

    def seen_by(self, version: int) -> int | None:
        """The oracle: back through every parent until one has touched the table."""
        while version != 0 and version not in self.touched:
            version = self.before[version]
        return version or None

    def places(self, held: set[int]) -> list[Place]:
        return [(self.owner[version], version) for version in sorted(held) if version]

    def must_hold(self) -> set[int]:
        """What expiry never gives up: heads and bases of live lines."""
        return {one for line in self.live() for one in (line.head, line.base_version)} - {0}


def step(tree: Tree, held: set[int]) -> None:
    what = tree.random.random()
    if what < 0.75:
        tree.commit()
    elif what < 0.9 and len(tree.live()) < 6:
        tree.fork(held)
    else:
        tree.end()


@pytest.mark.parametrize("seed", range(60))
def test_the_states_that_are_seen_are_those_that_every_parent_leads_to(seed: int) -> None:
    tree = Tree(random.Random(seed))
    for _ in range(80):
        step(tree, set(tree.before))
    for share in (0.0, 0.05, 0.3, 1.0):
        held = {version for version in tree.before if tree.random.random() < share}
        asked = HeldVersions(tree.lines.values(), tree.places(held))
        states = tree.states(tree.touched)
        assert asked.seen(states) == {tree.seen_by(version) for version in held} - {None}
        for line, version in tree.places(held):
            assert asked.look(states, (line, version)) == tree.seen_by(version)
        for one in tree.live():
            assert asked.look(states, (one.id, NOW)) == tree.seen_by(one.head)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_taken_away_step_by_step_is_never_missed(seed: int) -> None:
    """Versions are let go for ever, and states with them, while lines come and go: who holds sees the same."""
    tree = Tree(random.Random(1000 + seed))
    held: set[int] = set()
    there: set[int] = set()
    known = 0
    for _ in range(120):
        step(tree, held)
        new = set(range(known + 1, tree.version + 1))
        held, there, known = held | new, there | (new & tree.touched), tree.version
        if tree.random.random() < 0.2:
            held -= {one for one in held - tree.must_hold() if tree.random.random() < 0.7}
            there &= HeldVersions(tree.lines.values(), tree.places(held)).seen(tree.states(there))
        asked, states = HeldVersions(tree.lines.values(), tree.places(held)), tree.states(there)
        for version in sorted(held):
            seen = asked.look(states, (tree.owner[version], version))
            assert seen == tree.seen_by(version), f"version {version} sees {seen}"
        for line in tree.live():
            assert asked.look(states, (line.id, NOW)) == tree.seen_by(line.head), line


def test_a_state_of_main_is_not_out_of_sight_because_a_branch_has_a_newer_one() -> None:
    lines = [Line("main", None, 0, 6), Line("dev", "main", 3, 5)]
    # main touched the table at 4, dev at 5; main's version 6 touched another one and sees 4.
    held = HeldVersions(lines, [("main", 6)])
    assert held.seen({"main": [1, 4], "dev": [5]}) == {4}


def test_a_branch_that_never_wrote_sees_its_base_and_not_what_its_parent_did_since() -> None:
    lines = [Line("main", None, 0, 9), Line("dev", "main", 3, 8), Line("sub", "dev", 8, 10)]
    held = HeldVersions(lines, [("sub", 10)])
    assert held.seen({"main": [1, 3, 4, 9]}) == {3}
    assert held.seen({"main": [1, 9], "dev": [7, 12]}) == {7}
    assert held.seen({"main": [4, 9]}) == set()


@pytest.mark.parametrize("what", ["held", "state"])
def test_a_line_that_nobody_knows_is_an_error_and_never_nothing(what: str) -> None:
    lines = [Line("main", None, 0, 1)]
    with pytest.raises(KeyError):
        HeldVersions(lines, [("gone", 1)] if what == "held" else []).seen({"gone": [1]})
