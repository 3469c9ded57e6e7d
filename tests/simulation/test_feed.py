"""Keyed writes by several writers at once against a dict: rows, sequences and the change feed, exactly.

A failing seed is printed; put it into SEEDS to keep it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.testing.children import Child
from floodmark.testing.explorer import NOT_A_STOP
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.simulation import feed

SEEDS = [1, 2, 3, 4]
STEPS = 500
CHECK_EVERY = 50
# What may refuse a random operation: a key that is there, and races lost too often.
REFUSED = (fm.Invalid, fm.Conflict)


def run_feed(place: Place, seed: int, steps: int) -> int:
    """Random operations; in a third of them another writer does something in the middle. Returns how many did."""
    dice = random.Random(seed)
    raced = 0
    with place.open(create=True) as first, place.open() as second:
        feed.make(first, dice.choice([[], ["bucket(3, id)"], ["part"]]))
        rows, checked = feed.Rows(), first.status()["version"]
        for step in range(steps):
            operation, other = feed.random_operation(dice), feed.random_operation(dice)
            wanted = dice.randint(1, 6) if dice.random() < 0.35 else 0
            if wanted:
                failpoints.observer = interrupt(second, other, wanted)
            with suppress(*REFUSED):
                feed.perform(first, operation)
            raced += bool(wanted) and failpoints.observer is None
            failpoints.observer = None
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                rows = feed.check_history(first, dice, from_version=checked, rows=rows)
                checked = first.status()["version"]
        check_lake(first.catalog)
    return raced


def interrupt(lake: fm.Lake, operation: dict[str, object], wanted: int) -> Callable[[str], None]:
    """Let `lake` do its operation when the other writer passes its `wanted`-th failpoint outside a transaction."""
    passed = 0

    def observe(point: str) -> None:
        nonlocal passed
        if point.endswith(NOT_A_STOP):
            return
        passed += 1
        if passed == wanted:
            failpoints.observer = None
            with suppress(*REFUSED):
                feed.perform(lake, operation)

    return observe


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_sequences_and_changes_match_a_dict_after_every_commit(
    new_place: Callable[[str], Place], seed: int
) -> None:
    try:
        raced = run_feed(new_place("sqlite"), seed, STEPS)
    except BaseException:
        print(f"seed {seed}")
        raise
    assert raced > STEPS // 10, "hardly any operation was interrupted"


def write_alone(place: Place, seed: int, steps: int) -> int:
    """What one of the processes does; returns how many commits it made."""
    dice = random.Random(seed)
    done = 0
    with place.open() as lake:
        for _ in range(steps):
            with suppress(*REFUSED):
                done += feed.perform(lake, feed.random_operation(dice)).outcome == "committed"
    return done


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_two_processes_write_and_a_third_follows_without_missing_anything(
    new_place: Callable[[str], Place], database: str
) -> None:
    """While two processes write, a reader asks again and again what is new, and ends with exactly the rows."""
    place, dice = new_place(database), random.Random(7)
    with place.open(create=True) as lake:
        feed.make(lake, [])
        first = lake.status()["version"]
        children = [Child(write_alone, place, seed, 120) for seed in (11, 12)]
        folded, mark = feed.Rows(), -1
        asked = 0
        while any(child.process.is_alive() for child in children):
            found = lake.changes(feed.TABLE, None if mark < 0 else mark)
            feed.fold(folded, found.arrow().read_all().to_pylist(), mark, found.until)
            mark, asked = found.until, asked + 1
            assert folded == feed.read_rows(lake, found.version), "what was followed is not what is there"
        commits = sum(child.wait() for child in children)
        feed.fold(folded, feed.changes(lake, mark, None), mark, lake.changes(feed.TABLE).until)
        rows = feed.check_history(lake, dice, from_version=first)
        assert folded == rows
        assert lake.status()["version"] == first + commits
        assert commits > 100
        assert asked > 5
        check_lake(lake.catalog)


@pytest.mark.soak
def test_soak(new_place: Callable[[str], Place]) -> None:
    seed = int(os.environ.get("FLOODMARK_SOAK_SEED", "0")) or random.SystemRandom().randint(1, 10**9)
    print(f"seed {seed}")
    for number in range(10):
        run_feed(new_place("sqlite"), seed + number, 2000)
