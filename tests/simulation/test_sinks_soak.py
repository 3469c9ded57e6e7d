"""A process that ships for ever is killed at random moments while others write; each row arrives once.

The killed process begins anew each time; of two lakes the receiving one is killed now and then too. A writer in this
process appends, merges, deletes, compacts and lets old versions go meanwhile. `make soak` kills a thousand times per
kind of sink (or FLOODMARK_SOAK_KILLS times), and writes a line per fifty kills into the file that FLOODMARK_SOAK_LOG
names.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.children import Child, run_child
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.crash.sink_ends import End, LakeEnd, NewEnd, ends
from tests.crash.sink_world import (
    EVENTS,
    PEOPLE,
    SINK,
    Writer,
    append,
    as_text,
    check_at_rest,
    difference,
    expected,
    make,
    merge,
    ship,
    ship_for_ever,
)
from tests.crash.test_sink_faults import Trial, fail_database_calls

ENDS = ("files", "http", "iceberg", "lake")
KILLS, KILLS_SOAK, KILLS_PER_LINE = 20, 1000, 50


@pytest.fixture
def new_end(tmp_path: Path) -> Iterator[NewEnd]:
    with ends(tmp_path) as make_end:
        yield make_end


class Storm:
    """A lake, a writer, a sink whose process is killed again and again, and what all that must come to."""

    def __init__(self, lake: fm.Lake, place: Place, end: End, seed: int) -> None:
        make(lake)
        lake.sinks.add(SINK, end.kind, tables=[EVENTS, PEOPLE], **end.settings)
        self.writer = Writer(lake, seed)
        self._lake = lake
        self._place = place
        self._end = end
        self._dice = random.Random(seed)
        self.kills = self.lost = self.doubled = 0
        # How long a process takes from its start to its end: most kills come in the middle of that.
        self._typical_s = min(self._ship() for _ in range(3))

    def _ship(self) -> float:
        for change in (append(EVENTS, range(9), "before"), merge(range(9), "before")):
            self.writer.write(change)
        started = time.monotonic()
        run_child(ship, self._place)
        return time.monotonic() - started

    def kill(self) -> None:
        child = Child(ship_for_ever, self._place)
        until = time.monotonic() + self._typical_s * self._dice.uniform(0.3, 2)
        if isinstance(self._end, LakeEnd) and self._dice.random() < 0.25:
            self._end.restart()
        while time.monotonic() < until:
            self.writer.step()
        child.process.kill()
        assert child.wait() is None
        assert child.killed
        self.kills += 1

    @property
    def resumed(self) -> int:
        return len(self._lake.audit())

    def check(self) -> None:
        """What is open is finished; then the other end has what was written, each row once, and nothing is left."""
        done = self._lake.sinks.run(SINK, until_empty=True)
        assert done.outcome in ("shipped", "nothing_to_do"), as_text(done)
        self.lost, self.doubled = difference(expected(self.writer.changes), self._end.contents())
        assert (self.lost, self.doubled) == (0, 0)
        check_at_rest(self._lake)
        self._end.check_clean()
        check_lake(self._lake.catalog)
        assert {(row.kind, row.outcome) for row in self._lake.audit()} <= {("unit", "resumed")}

    def line(self) -> str:
        """For people who look at a soak: what was checked until now."""
        tables = self._lake.sinks.about(SINK)["tables"]
        told = {
            "end": self._end.name,
            "kills": self.kills,
            "resumed": self.resumed,
            "version": self._lake.status()["version"],
            "units": sum(table["units"] for table in tables),
            "rows": sum(table["rows"] for table in tables),
            "lost": self.lost,
            "doubled": self.doubled,
        }
        return json.dumps(told)


@pytest.mark.parametrize("name", ENDS)
def test_killed_at_random_moments_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd, name: str
) -> None:
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        storm = Storm(lake, place, new_end(name), seed=7)
        for _ in range(KILLS):
            storm.kill()
        storm.check()
        assert storm.resumed, "no kill met an open unit"


@pytest.mark.soak
@pytest.mark.parametrize("name", ENDS)
def test_soak(new_place: Callable[[str], Place], new_end: NewEnd, name: str) -> None:
    seed = int(os.environ.get("FLOODMARK_SOAK_SEED", "0")) or random.SystemRandom().randint(1, 10**9)
    print(f"seed {seed}")
    kills, log = (
        int(os.environ.get("FLOODMARK_SOAK_KILLS", KILLS_SOAK)),
        os.environ.get("FLOODMARK_SOAK_LOG", os.devnull),
    )
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        storm = Storm(lake, place, new_end(name), seed)
        while storm.kills < kills:
            storm.kill()
            if storm.kills % KILLS_PER_LINE == 0:
                storm.check()
                with open(log, "a") as file:
                    file.write(storm.line() + "\n")


@pytest.mark.soak
@pytest.mark.parametrize("stay_broken", [False, True], ids=["once", "for_long"])
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("name", ["files", "http"])
def test_soak_every_database_call_of_a_run(
    new_place: Callable[[str], Place], new_end: NewEnd, name: str, mode: str, stay_broken: bool
) -> None:
    def new_trial() -> Trial:
        return Trial(new_place("sqlite"), new_end(name))

    assert len(fail_database_calls(new_trial, mode, stay_broken=stay_broken)) > 100
