"""Lineages: whose commit is whose, and what a branch stands on, told from the rows alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import floodmark
from floodmark.catalog.lineage import ENDED, LIVING, MAIN_LINEAGE, Lineage, Lineages
from floodmark.errors import Corrupt, NotFound
from floodmark.model import MAIN


def line(id: str, name: str, parent: str, base: int, born: int, ended: int | None = None) -> Lineage:
    return Lineage(id, name, parent, base, born, base, base, base, 0, "test", ended, ended)


# dev left main at 2, was made at 4 and deleted at 6; dev again left main at 6; child left that one at 8, low at 3.
OLD = line("A", "dev", MAIN, 2, 4, ended=6)
NEW = line("B", "dev", MAIN, 6, 6)
CHILD = line("C", "child", "B", 8, 9)
LOW = line("D", "low", "B", 3, 9)
LINES = Lineages([OLD, NEW, CHILD, LOW], frozenset({MAIN, "dev", "child", "low"}))


def shown(line: Lineage, upto: int | None = None) -> list[tuple[str, int, int | None]]:
    return [(part.lineage.id, part.after, part.upto) for part in LINES.parts(line, upto)]


@pytest.mark.parametrize(
    ("name", "version", "owner"),
    [
        ("dev", 5, OLD),
        ("dev", 6, OLD),
        ("dev", 7, NEW),
        ("dev", 80, NEW),
        (MAIN, 1, MAIN_LINEAGE),
        (MAIN, 99, MAIN_LINEAGE),
    ],
)
def test_a_commit_belongs_to_the_line_that_had_the_name_then(name: str, version: int, owner: Lineage) -> None:
    assert LINES.owner(name, version) == owner


@pytest.mark.parametrize(("name", "version"), [("dev", 4), ("child", 9), ("nobody", 1)])
def test_a_commit_from_when_nobody_had_the_name_is_corrupt(name: str, version: int) -> None:
    with pytest.raises(Corrupt):
        LINES.owner(name, version)


def test_a_line_ended_before_the_first_commit_owns_nothing() -> None:
    lines = Lineages([line("A", "dev", MAIN, 0, 0, ended=0), line("B", "dev", MAIN, 0, 0)])
    assert lines.owner("dev", 1).id == "B"


def test_a_line_is_its_own_commits_and_below_them_its_ancestors() -> None:
    assert shown(MAIN_LINEAGE) == [("main", -1, None)]
    assert shown(NEW) == [("B", 6, None), ("main", -1, 6)]
    assert shown(OLD) == [("A", 4, 6), ("main", -1, 2)]
    assert shown(CHILD) == [("C", 9, None), ("B", 6, 8), ("main", -1, 6)]
    assert shown(LOW) == [("D", 9, None), ("B", 6, 3), ("main", -1, 3)]
    assert shown(CHILD, 7) == [("C", 9, 7), ("B", 6, 7), ("main", -1, 6)]


def test_a_branch_stands_on_a_commit_or_does_not() -> None:
    assert all(LINES.holds(CHILD, name, version) for name, version in (("child", 10), ("dev", 8), (MAIN, 6)))
    assert not any(LINES.holds(CHILD, name, version) for name, version in (("dev", 5), ("dev", 9), (MAIN, 7)))
    assert not LINES.holds(LOW, MAIN, 4)


def test_a_branch_is_gone_only_if_its_row_says_so() -> None:
    lines = Lineages([OLD], frozenset({MAIN}))
    assert (lines.state("dev"), lines.state(MAIN), LINES.state("dev")) == (ENDED, LIVING, LIVING)
    with pytest.raises(NotFound):
        lines.live("dev")
    for broken in (
        Lineages([OLD], frozenset({MAIN, "dev"})),
        Lineages([NEW], frozenset({MAIN})),
        Lineages([], frozenset()),
    ):
        with pytest.raises(Corrupt):
            broken.state("dev")
    with pytest.raises(Corrupt):
        Lineages([], frozenset()).live(MAIN)


def test_lines_that_live_and_children() -> None:
    assert [one.id for one in LINES.all()] == [MAIN, "A", "B", "C", "D"]
    assert [one.id for one in LINES.living()] == [MAIN, "B", "C", "D"]
    assert [one.id for one in LINES.children(NEW)] == ["C", "D"]
    assert [one.id for one in LINES.children(MAIN_LINEAGE)] == ["B"]
    assert (MAIN_LINEAGE.scope("table:t"), NEW.scope("table:t")) == ("table:t", "B/table:t")


def test_only_the_door_and_branches_change_pointers() -> None:
    package = Path(floodmark.__file__).parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "floodmark.catalog.pointers" in path.read_text()
    }
    assert users == {"commit/publisher.py", "commit/branches.py"}
