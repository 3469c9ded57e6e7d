"""Many processes append to one table: none fails, none starves, and what was acknowledged is there once.

Some are killed at random moments; the others go on. What a killed one wrote is there up to the last row that it had
acknowledged, and perhaps one more.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.catalog.turns import TURN_MS
from floodmark.testing.children import Child, preload
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows

preload("tests.simulation.test_many_writers")

# A writer's rows begin with its number.
EACH = 1_000_000
# No writer gets less than this part of the mean.
FAIR = 1 / 3


def write(place: Place, number: int, folder: str, seconds: float) -> list[str]:
    """Append one row after the other until the time is over; each is noted after its acknowledgement."""
    errors: list[str] = []
    with place.open(actor=f"writer {number}") as lake, open(f"{folder}/{number}.acknowledged", "w") as noted:
        Path(f"{folder}/{number}.ready").touch()
        while not os.path.exists(f"{folder}/start"):
            time.sleep(0.005)
        end, row = time.monotonic() + seconds, number * EACH
        while time.monotonic() < end:
            try:
                lake.append("events", rows(row))
            except fm.FloodmarkError as error:
                errors.append(f"{type(error).__name__}: {error}")
            else:
                noted.write(f"{row} {time.monotonic()}\n")
                noted.flush()
            row += 1
    return errors


def run(place: Place, folder: Path, writers: int, seconds: float, kills: int, seed: int = 7) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
    children = [Child(write, place, number, str(folder), seconds) for number in range(1, writers + 1)]
    end = time.monotonic() + 120
    while not all((folder / f"{number}.ready").exists() for number in range(1, writers + 1)):
        assert time.monotonic() < end, "not all writers started"
        time.sleep(0.01)
    (folder / "start").touch()
    chance, killed = random.Random(seed), dict[int, float]()
    for number in chance.sample(range(1, writers + 1), kills):
        time.sleep(chance.uniform(0.1, 0.8) * seconds / (kills + 1))
        children[number - 1].process.kill()
        killed[number] = time.monotonic()
    acknowledged_at_last_kill = {number: noted(folder, number) for number in range(1, writers + 1)}
    failed = {number: child.wait(seconds + 120) for number, child in enumerate(children, 1) if number not in killed}
    assert {number: errors for number, errors in failed.items() if errors} == {}
    check(place, folder, writers, killed, acknowledged_at_last_kill)


def noted(folder: Path, number: int) -> list[int]:
    path = folder / f"{number}.acknowledged"
    return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def noted_at(folder: Path, number: int) -> list[float]:
    """When the rows of a writer that was not killed were acknowledged."""
    return [float(line.split()[1]) for line in (folder / f"{number}.acknowledged").read_text().splitlines()]


def check(place: Place, folder: Path, writers: int, killed: dict[int, float], before: dict[int, list[int]]) -> None:
    acknowledged = {number: noted(folder, number) for number in range(1, writers + 1)}
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        found = ids(lake)
        assert len(found) == len(set(found)), "a row is doubled"
        by_writer = {number: [one for one in found if one // EACH == number] for number in acknowledged}
        for number, rows_of in acknowledged.items():
            extra = set(by_writer[number]) - set(rows_of)
            assert set(rows_of) <= set(by_writer[number]), f"acknowledged rows of writer {number} are lost"
            assert len(extra) <= (1 if number in killed else 0), f"rows that writer {number} does not know: {extra}"
        assert facts.version == 1 + len(found), "each append has its own version"
        assert set(facts.audit.values()) <= {"rolled_back"}
        assert lake.status()["health"] == "fine"
        assert list(lake.status()["waiting"]) == []
    alive = [number for number in acknowledged if number not in killed]
    counts = {number: len(acknowledged[number]) for number in alive}
    mean = sum(counts.values()) / len(counts)
    assert min(counts.values()) >= FAIR * mean, f"a writer starves: {counts}"
    if killed:
        for number in alive:
            assert len(acknowledged[number]) > len(before[number]), f"writer {number} stopped with a killed one"
    moments = sorted(moment for number in alive for moment in noted_at(folder, number))
    for number, died in killed.items():
        pause_s = min(moment for moment in moments if moment > died) - died
        assert pause_s < TURN_MS / 1000, f"for {pause_s} s after the death of writer {number} nobody went on"


@pytest.mark.parametrize("database", DATABASES)
def test_six_writers_of_one_table_share_it_and_two_that_die_stop_nobody(
    new_place: Callable[[str], Place], tmp_path: Path, database: str
) -> None:
    run(new_place(database), tmp_path, writers=6, seconds=4, kills=2)


@pytest.mark.soak
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("kills", [0, 10])
def test_soak_32_writers_for_a_minute(
    new_place: Callable[[str], Place], tmp_path: Path, database: str, kills: int
) -> None:
    run(new_place(database), tmp_path, writers=32, seconds=60, kills=kills)
