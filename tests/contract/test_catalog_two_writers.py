"""Two processes write, a third reads all the time: nothing lost, nothing half seen, no gap; on both databases."""

from __future__ import annotations

import os
import time
from pathlib import Path

from floodmark.testing.children import Child
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows

COMMITS = 50
WRITERS = ("left", "right")


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        for table in ("shared", "debit", "credit", *WRITERS):
            lake.create_table(table, EVENTS)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.002)


def write(place: Place, who: str, start: str) -> list[int]:
    """In turn: the table that both write, one of its own, and two tables in one transaction. Returns the versions."""
    first = WRITERS.index(who) * 1000
    versions = []
    with place.open(actor=who) as lake:
        wait_for(start)
        for number in range(COMMITS):
            row = rows(first + number)
            if number % 3 == 2:
                with lake.transaction() as tx:
                    tx.append("debit", row)
                    tx.append("credit", row)
                commit = tx.commit
            else:
                commit = lake.append("shared" if number % 3 == 0 else who, row)
            assert commit is not None
            assert commit.outcome == "committed"
            versions.append(commit.version)
    return versions


def read(place: Place, start: str, stop: str) -> list[int]:
    """Read both tables of the transactions at one version, over and over. Returns the versions seen."""
    seen = [0]
    debits: set[int] = set()
    with place.open(read_only=True) as lake:
        Path(start).touch()
        ended = False
        while not ended:
            ended = os.path.exists(stop)
            version = lake.catalog.history.resolve()
            assert version >= seen[-1], "the lake's version went back"
            if version == seen[-1]:
                continue
            debit, credit = ids(lake, "debit", version), ids(lake, "credit", version)
            assert debit == credit, f"half a transaction at version {version}"
            assert len(set(debit)) == len(debit), "a row is there twice"
            assert debits <= set(debit), f"rows that were there are gone at version {version}"
            debits = set(debit)
            newest = [commit.version for commit in lake.history(limit=10)]
            assert newest == list(range(newest[0], newest[0] - len(newest), -1)), "versions have a gap"
            seen.append(version)
    return seen[1:]


def test_two_writers_and_a_reader_lose_nothing_and_see_nothing_half(place: Place, tmp_path: Path) -> None:
    prepare(place)
    start, stop = str(tmp_path / "start"), str(tmp_path / "stop")
    writers = [Child(write, place, who, start) for who in WRITERS]
    reader = Child(read, place, start, stop)
    try:
        left, right = (writer.wait(120) for writer in writers)
    finally:
        Path(stop).touch()
    seen = reader.wait()

    made = 5
    assert sorted(left + right) == list(range(made + 1, made + 2 * COMMITS + 1)), (
        "a version is missing or was told twice"
    )
    assert left == sorted(left)
    assert right == sorted(right)
    assert left[0] < right[-1], "they did not write at the same time"
    assert right[0] < left[-1], "they did not write at the same time"
    assert seen[-1] == made + 2 * COMMITS
    assert len(seen) > 20, "the reader hardly read"

    with place.open() as lake:
        for table, turn in (("shared", 0), ("debit", 2), ("credit", 2)):
            expected = [first + number for first in (0, 1000) for number in range(turn, COMMITS, 3)]
            assert ids(lake, table) == expected, table
        for who, first in zip(WRITERS, (0, 1000), strict=True):
            assert ids(lake, who) == [first + number for number in range(1, COMMITS, 3)]
        facts = check_lake(lake.catalog)
        assert facts.audit == {}
        assert {commit.version: commit.actor for commit in lake.history(limit=1000)} == {
            **dict.fromkeys(range(1, made + 1), "test"),
            **dict.fromkeys(left, "left"),
            **dict.fromkeys(right, "right"),
        }
