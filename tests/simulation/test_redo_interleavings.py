"""A redo beside a sink, other writers, a compaction and another run: all orders of their steps, up to a bound.

Whatever the order was: each row of the history is in the table once, no chunk is called done that is not, and what a
sink shipped is what the table has, each row once; unless the redo was refused, and then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.sources import CallSource
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.testing.explorer import ExploredRun, explore
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows

LAKES_LAST = 5
CHUNK_ROWS = 2


def read_chunk(chunk: Chunk) -> list[dict[str, Any]]:
    assert isinstance(chunk.start, int)
    return rows(chunk.start, chunk.start + 1)


def load(lake: fm.Lake, name: str, first: int) -> Any:
    source = CallSource("tests.simulation.test_redo_interleavings:read_chunk")
    settings = {"chunk": CHUNK_ROWS, "first": first, "last": first + 2 * CHUNK_ROWS, "column": "id"}
    return lake.backfill.history(name, source, "events", workers=1, retries=1, **settings)


class World:
    """A lake whose every run has a history of its own: two chunks, of which the first is loaded again."""

    def __init__(self, new_place: Callable[[], Place], scenario: tuple[str, ...]) -> None:
        self._new_place = new_place
        self._scenario = scenario
        self._runs = 0
        self._lakes: dict[str, fm.Lake] = {}
        self._wanted: list[int] = []

    def make(self) -> Mapping[str, Callable[[], Any]]:
        if self._runs % LAKES_LAST == 0:
            self.close()
            place = self._new_place()
            self._out = f"{place.path}-out"
            with place.open(create=True) as lake:
                lake.create_table("events", EVENTS)
                lake.sinks.add("out", "files", tables=["events"], path=self._out)
            self._lakes = {name: place.open(recover=False) for name in (*self._scenario, "judge")}
            self._wanted = []
        self._runs += 1
        self._first = 10 * self._runs
        judge = self._lakes["judge"]
        if "ship" in self._scenario:
            assert judge.sinks.run("out", until_empty=True).outcome in ("shipped", "nothing_to_do")
        assert load(judge, self._job, self._first).outcome == "done"
        self._wanted += range(self._first, self._first + 2 * CHUNK_ROWS)
        return {name: getattr(self, name) for name in self._scenario}

    @property
    def _job(self) -> str:
        return f"years {self._runs}"

    def close(self) -> None:
        for lake in self._lakes.values():
            lake.close()
        self._lakes = {}

    # ── actors ──

    def redo(self) -> str:
        return self._lakes["redo"].backfill.redo(self._job, self._first, self._first + CHUNK_ROWS).outcome

    def ship(self) -> str:
        return self._lakes["ship"].sinks.run("out").outcome

    def compact(self) -> str:
        return self._lakes["compact"].maintain.compact("events", files_min=2).outcome

    def append(self) -> str:
        """A row of another writer, in the range of the chunk."""
        return self._lakes["append"].append("events", rows(self._first)).outcome

    def again(self) -> str:
        """Another run of the same history."""
        return load(self._lakes["again"], self._job, self._first).outcome

    # ── what must hold, whatever the order was ──

    def check(self, run: ExploredRun) -> None:
        judge = self._lakes["judge"]
        refused = self._check_redo(run.actors["redo"].error)
        for name, actor in run.actors.items():
            if name == "again" and isinstance(actor.error, fm.Busy):
                continue
            assert name == "redo" or actor.error is None, f"{name}: {actor.error!r}"
        if "append" in run.actors:
            self._wanted.append(self._first)
        if run.actors["redo"].error is None:
            assert run.actors["redo"].result == "redone"
        assert ids(judge) == sorted(self._wanted)
        job = judge.catalog.jobs.find(self._job)
        assert (job.status, job.rows) == ("done", 2 * CHUNK_ROWS)
        assert judge.backfill.coverage(self._job)["tables"]["events"]["gaps"] == []
        redone = [row for row in judge.audit(limit=1000) if self._job in row.detail.partition(":")[0]]
        assert [row.outcome for row in redone] == ([] if refused else ["redone"])
        if "ship" in self._scenario:
            self._check_shipped(judge)
        if self._runs % LAKES_LAST == 0:
            check_lake(judge.catalog)

    def _check_shipped(self, judge: fm.Lake) -> None:
        assert judge.sinks.run("out", until_empty=True).outcome in ("shipped", "nothing_to_do")
        batches = [batch for unit in read_units(self._out, table="events") for batch in read_rows(unit)]
        shipped = [number for batch in batches for number in batch["id"].to_pylist()]
        assert sorted(shipped) == sorted(self._wanted), "each row is shipped once"

    def _check_redo(self, error: BaseException | None) -> bool:
        if error is None:
            return False
        if isinstance(error, fm.Invalid):
            assert "ship" in self._scenario, repr(error)
            assert "have been shipped" in error.message
        else:
            assert isinstance(error, fm.Busy), repr(error)
            assert "again" in self._scenario, repr(error)
        return True


# Actors, how many times one may be stopped for another although it could go on, and how many orders there must be.
SCENARIOS = [
    (("redo", "ship"), 1, 15),
    (("redo", "compact"), 1, 10),
    (("redo", "append"), 1, 10),
    (("redo", "again"), 1, 5),
]


@pytest.mark.parametrize(("scenario", "bound", "at_least"), SCENARIOS)
def test_every_order_of_a_redo_and_others_keeps_each_row_once(
    new_place: Callable[[str], Place], scenario: tuple[str, ...], bound: int, at_least: int
) -> None:
    assert explored(lambda: new_place("sqlite"), scenario, bound) >= at_least


@pytest.mark.soak
@pytest.mark.parametrize(("scenario", "bound"), [(scenario, bound + 1) for scenario, bound, _ in SCENARIOS])
def test_soak_more_orders_of_a_redo(new_place: Callable[[str], Place], scenario: tuple[str, ...], bound: int) -> None:
    assert explored(lambda: new_place("sqlite"), scenario, bound) > 20


def explored(new_place: Callable[[], Place], scenario: tuple[str, ...], bound: int) -> int:
    world = World(new_place, scenario)
    count = explore(world.make, preemptions=bound, check=world.check)
    world.close()
    print(f"{'+'.join(scenario)}: {count} orders within {bound} preemptions")
    return count
