"""Let the calls of keyed writes fail in turn while segments are read and made: an error means that nothing changed.

Each round opens the same few segments anew, so that a fault may hit their reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark.index import covering
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.faults import fail_commits, fail_statements, fail_storage

pytestmark = pytest.mark.mostly_sqlite

FILES = 3
PEOPLE = "id string not null, round int"


def person(number: int, value: int) -> dict[str, Any]:
    return {"id": f"person {number:05}", "round": value}


class Trial:
    """One lake, round after round: a keyed write on files whose keys lie between each other."""

    def __init__(self, place: Place) -> None:
        self.lake = place.open(create=True, actor="test", storage=FaultyStorage())
        self.lake.create_table("people", PEOPLE, key=["id"])
        for number in range(FILES):
            self.lake.append("people", [person(number + FILES * at, 0) for at in range(20)])
        self.first = [row.location for row in self.lake.catalog.indexes.segments(self.index().table_id)]
        self.expected = {f"person {number:05}": 0 for number in range(FILES * 20)}
        self.number = 0

    def due(self) -> dict[str, int]:
        """The rows as this round leaves them."""
        return {**self.expected, "person 00001": self.number + 1, f"round {self.number}": self.number}

    def write(self) -> fm.Commit:
        changed = person(1, self.number + 1)
        return self.lake.merge("people", [changed, {"id": f"round {self.number}", "round": self.number}])

    def act(self) -> fm.Commit:
        for location in self.first:
            covering._OPEN.forget(location)
        return self.write()

    def rows(self) -> dict[str, int]:
        found = self.lake.read_arrow("people").read_all().to_pylist()
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: row["round"] for row in found}

    def finish(self, outcome: str) -> None:
        self.lake.recover()
        assert self.rows() == (self.due() if outcome == "committed" else self.expected), outcome
        if outcome != "committed":
            assert self.write().outcome == "committed"
        self.expected = self.due()
        assert self.rows() == self.expected
        index = self.index()
        paths = list(self.lake.catalog.files.data_files(self.lake.catalog.history.head("people")))
        # What could not be read for a moment is not marked as damaged, and what was published is covered.
        assert not [row for row in self.lake.catalog.indexes.segments(index.table_id) if row.broken]
        assert self.lake.engine.coverings.covered(index, paths) == len(paths)
        check_lake(self.lake.catalog)
        self.number += 1

    def index(self) -> Any:
        (index,) = self.lake.catalog.indexes.of_table(self.lake.catalog.history.head("people").table_id)
        return index


class Append(Trial):
    def due(self) -> dict[str, int]:
        return {**self.expected, f"person 00002 {self.number}": self.number}

    def write(self) -> fm.Commit:
        return self.lake.append("people", [{"id": f"person 00002 {self.number}", "round": self.number}])


class Compaction(Trial):
    """Two small files are put together: the appends that made them are not part of the trial."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.grow()

    def due(self) -> dict[str, int]:
        return self.expected

    def grow(self) -> None:
        for at in "ab":
            self.lake.append("people", [{"id": f"grown {self.number} {at}", "round": 0}])
            self.expected = {**self.expected, f"grown {self.number} {at}": 0}

    def write(self) -> fm.Commit:
        (record,) = self.lake.maintain.compact("people", files_min=2).records
        if record.outcome not in ("compacted", "nothing_to_do", "below_threshold"):
            raise fm.Unavailable("the compaction failed", outcome=record.outcome)
        return self.lake.history(limit=1)[0]

    def finish(self, outcome: str) -> None:
        super().finish(outcome)
        self.grow()


class Creation(Trial):
    """A table with a key, made with its first rows: its index is made as well."""

    def write(self) -> fm.Commit:
        with self.lake.transaction("new") as tx:
            tx.create_table(f"new{self.number}", PEOPLE, key=["id"])
            tx.append(f"new{self.number}", [person(number, 0) for number in range(3)])
        assert tx.commit is not None
        return tx.commit

    def due(self) -> dict[str, int]:
        return self.expected

    def finish(self, outcome: str) -> None:
        there = f"new{self.number}" in {head.table for head in self.lake.heads()}
        assert there is (outcome == "committed")
        table = f"new{self.number}"
        super().finish(outcome)
        with pytest.raises(fm.Invalid):
            self.lake.append(table, [person(1, 1)])


TRIALS: dict[str, Callable[[Place], Trial]] = {
    "merge": Trial,
    "append": Append,
    "compaction": Compaction,
    "creation": Creation,
}


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
@pytest.mark.parametrize("kind", TRIALS)
def test_whichever_call_to_storage_fails_a_keyed_write_is_undone(
    new_place: Callable[[str], Place], kind: str, mode: str
) -> None:
    outcomes = fail_storage(TRIALS[kind](new_place("sqlite")), mode)
    assert "raised" in outcomes
    assert len(outcomes) > 4, "hardly any call was counted"


@pytest.mark.whole
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kind", TRIALS)
def test_whichever_statement_fails_a_keyed_write_is_all_or_nothing(
    new_place: Callable[[str], Place], kind: str, mode: str
) -> None:
    assert len(fail_statements(TRIALS[kind](new_place("sqlite")), mode)) > 10, "hardly any statement was counted"


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kind", TRIALS)
def test_whichever_commit_fails_a_keyed_write_is_all_or_nothing(
    new_place: Callable[[str], Place], database: str, kind: str, mode: str
) -> None:
    assert fail_commits(TRIALS[kind](new_place(database)), mode)
