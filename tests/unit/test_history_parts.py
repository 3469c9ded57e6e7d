"""The pure parts of a history backfill: the floor, what is done, what is worth a retry, and what may be kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.chunk_workers import BundleSize, ChunkWorkers
from floodmark.backfill.chunks.done_chunks import DoneChunks, joined
from floodmark.backfill.chunks.geometry import Chunk, Geometry, PlannedChunk
from floodmark.backfill.chunks.load import order_of
from floodmark.backfill.chunks.prune import floor_of, floor_start
from floodmark.backfill.chunks.retries import OtherFailed, WorkerStop, call_source, is_worth_a_retry, retrying
from floodmark.backfill.chunks.spec import kept_units, references
from floodmark.jobs.progress import Cancelled
from tests.without_spark import NO_SPARK

NUMBERS = Geometry.of(5, 95, 10)
DAYS = Geometry.of("2024-01-01", None, "1d")
NOON = datetime(2024, 1, 10, 12, tzinfo=UTC)
NOON_MS = int(NOON.timestamp() * 1000)


# ── the floor ──


@pytest.mark.parametrize(
    ("keep", "tip", "floor", "start"),
    [
        (None, 80, None, None),
        (75, 80, None, None),
        (74, 80, 6, 5),  # in the first chunk, which stays
        (70, 80, 10, 10),
        (65, 80, 15, 10),
        (1, 96, 95, 95),  # all of it
        (5, None, 90, 90),  # without a tip, from the end
    ],
    ids=str,
)
def test_the_floor_of_numbers_is_counted_from_the_tip(
    keep: int | None, tip: int | None, floor: int | None, start: int | None
) -> None:
    found = floor_of(NUMBERS, keep, tip, NOON_MS)
    assert found == floor
    assert (None if found is None else floor_start(NUMBERS, found)) == start


def test_the_floor_of_time_is_counted_from_now() -> None:
    found = floor_of(DAYS, kept_units(DAYS, "36h"), None, NOON_MS)
    assert found is not None
    assert DAYS.shown(found) == datetime(2024, 1, 9, tzinfo=UTC)
    assert DAYS.shown(floor_start(DAYS, found)) == datetime(2024, 1, 9, tzinfo=UTC)
    in_the_day = floor_of(DAYS, kept_units(DAYS, "24h"), None, NOON_MS)
    assert in_the_day is not None
    assert DAYS.shown(floor_start(DAYS, in_the_day)) == datetime(2024, 1, 9, tzinfo=UTC)
    assert floor_of(DAYS, kept_units(DAYS, "52w"), None, NOON_MS) is None


# ── what is done ──


def test_a_chunk_is_complete_when_every_table_has_it() -> None:
    done_chunks = DoneChunks({"a": "a-1", "b": "b-1"}, {"a": {0, 1, 2}, "b": {0, 2, 7}})
    assert done_chunks.complete(range(10)) == 2
    assert done_chunks.complete(range(1, 10)) == 1
    assert done_chunks.missing(1) == ("b",)
    assert done_chunks.missing(9) == ("a", "b")
    assert done_chunks.loaded_below("a", 2) == [0, 1]
    done_chunks.add(1, ["b"])
    done_chunks.take("a", [0])
    assert (done_chunks.complete(range(10)), done_chunks.missing(0)) == (2, ("a",))


def test_neighbours_are_joined() -> None:
    assert joined([]) == []
    assert joined([4, -1, 0, 7, 3]) == [(-1, 1), (3, 5), (7, 8)]


def test_tables_that_take_the_rows_come_first() -> None:
    definitions: dict[str, Any] = {"sums": "select 1", "raw": None, "more": len, "copy": None}
    assert order_of(["sums", "more", "copy", "raw"], definitions) == ["copy", "raw", "sums", "more"]
    assert references("sums", "select * from raw join `copy` -- more", definitions, NO_SPARK) == ["raw", "copy"]
    assert references("sums", "select sums.x, raw, 'raw' from chunk", definitions, NO_SPARK) == []


# ── tries ──


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (fm.Unavailable("x"), True),
        (fm.Conflict("x"), True),
        (fm.Busy("x"), True),
        (fm.CommitUnknown("x", operation="1"), True),
        (OSError("x"), True),
        (fm.Invalid("x"), False),
        (fm.Corrupt("x"), False),
        (fm.NotFound("x"), False),
        (fm.Fenced("x"), False),
        (fm.BelowRetention("x"), False),
        (Cancelled(), False),
        (OtherFailed(), False),
        (KeyboardInterrupt(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_what_is_worth_a_retry(error: BaseException, again: bool) -> None:
    assert is_worth_a_retry(error) is again


def test_waits_double_up_to_a_limit() -> None:
    waited: list[float] = []

    class Clock(WorkerStop):
        def wait(self, wait_s: float) -> None:
            waited.append(wait_s)

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        retrying(Clock(None), 8, 1.0, "it")(fail)
    assert waited == [1, 2, 4, 8, 16, 30, 30]


def test_a_call_of_the_source_gives_its_answer_or_an_error_that_names_it() -> None:
    worker_stop = WorkerStop(None)
    assert call_source("read(1..2)", 5, worker_stop, lambda: [1]) == [1]
    for error, kind in (
        (fm.Invalid("x"), fm.Invalid),
        (KeyError("x"), fm.Unavailable),
        (SystemExit(3), fm.Unavailable),
    ):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(kind) as caught:
            call_source("read(1..2)", 5, worker_stop, fail)
        assert caught.value is error or caught.value.facts["call"] == "read(1..2)"


# ── workers ──


class Steps:
    """What is used of a run's progress."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def step(self, processed: int, total: int) -> None:
        self.told.append((processed, total))

    def check(self) -> None: ...


PLANNED = [PlannedChunk(Chunk(number, number, number + 1), ("a",)) for number in range(20)]


@pytest.mark.parametrize("workers", [1, 2, 8, 50])
def test_every_chunk_is_loaded_by_one_worker(workers: int) -> None:
    progress: Any = Steps()
    loaded: list[int] = []
    executor = ChunkWorkers(
        lambda one, tries: loaded.append(one.chunk.number),
        progress,
        WorkerStop(progress),
        workers=workers,
        tries=1,
        retry_s=0.01,
    )
    executor.run(PLANNED, 3, 23)
    assert sorted(loaded) == list(range(20))
    assert progress.told == [(done, 23) for done in range(4, 24)]


@pytest.mark.parametrize("workers", [1, 4])
def test_the_first_failure_stops_the_others_after_their_chunk(workers: int) -> None:
    progress: Any = Steps()
    loaded: list[int] = []

    def load(one: PlannedChunk, tries: int) -> None:
        if one.chunk.number >= 3:
            raise ValueError(f"no {one.chunk.number}")
        loaded.append(one.chunk.number)

    executor = ChunkWorkers(load, progress, WorkerStop(progress), workers=workers, tries=2, retry_s=0.01)
    with pytest.raises(fm.Unavailable) as caught:
        executor.run(PLANNED, 0, 20)
    assert caught.value.facts["chunk"] in [one.chunk.name for one in PLANNED[3 : 3 + workers]]
    assert sorted(loaded) == [0, 1, 2]
    assert len(progress.told) == 3


class Bundles:
    """Loads what is given; the nth bundle may fail, or say that it cannot be."""

    def __init__(self, loaded: list[int], act: Mapping[int, Exception | bool] | None = None) -> None:
        self._loaded = loaded
        self._act = act or {}
        self.sizes: list[int] = []

    def is_possible(self) -> bool:
        return bool(self._loaded)

    def load(self, planned: Sequence[PlannedChunk]) -> bool:
        self.sizes.append(len(planned))
        act = self._act.get(len(self.sizes), True)
        if isinstance(act, Exception):
            raise act
        if act:
            self._loaded.extend(one.chunk.number for one in planned)
        return act


@pytest.mark.parametrize("workers", [1, 3])
def test_quick_chunks_are_loaded_together_and_each_once(workers: int) -> None:
    progress: Any = Steps()
    loaded: list[int] = []
    bundles = Bundles(loaded)
    executor = ChunkWorkers(
        lambda one, tries: loaded.append(one.chunk.number),
        progress, WorkerStop(progress), workers=workers, tries=1, retry_s=0.01, bundle=bundles,
    )  # fmt: skip
    executor.run(PLANNED * 3, 0, 60)
    assert sorted(loaded) == sorted(3 * list(range(20)))
    assert max(bundles.sizes) > 1
    assert [done for done, _ in progress.told] == sorted({done for done, _ in progress.told})
    assert progress.told[-1] == (60, 60)


@pytest.mark.parametrize("act", [False, fm.Invalid("x"), fm.CommitUnknown("x", operation="1"), OSError("x")], ids=repr)
def test_a_bundle_that_fails_is_loaded_one_by_one(act: Exception | bool) -> None:
    progress: Any = Steps()
    tries: dict[int, int] = {}
    loaded: list[int] = []

    def load(one: PlannedChunk, number: int) -> None:
        tries[one.chunk.number] = number
        loaded.append(one.chunk.number)

    bundles = Bundles(loaded, {1: act})
    ChunkWorkers(load, progress, WorkerStop(progress), workers=1, tries=1, retry_s=0.01, bundle=bundles).run(
        PLANNED, 0, 20
    )
    assert loaded == list(range(20))
    first = range(1, 1 + bundles.sizes[0])
    # What came of a try that failed may not be known: whoever tries again asks first.
    assert {tries[number] for number in first} == {1 if act is False else 2}


@pytest.mark.parametrize("error", [Cancelled(), OtherFailed(), fm.Fenced("x")], ids=repr)
def test_a_bundle_that_is_to_stop_stops(error: Exception) -> None:
    progress: Any = Steps()
    loaded: list[int] = []
    bundles = Bundles(loaded, {1: error})
    load = partial(_append_to, loaded)
    with pytest.raises(type(error)):
        ChunkWorkers(load, progress, WorkerStop(progress), workers=1, tries=1, retry_s=0.01, bundle=bundles).run(
            PLANNED, 0, 20
        )
    assert loaded == [0]


def _append_to(loaded: list[int], one: PlannedChunk, _: int) -> None:
    loaded.append(one.chunk.number)


def test_the_pace_follows_the_time_that_chunks_take() -> None:
    pace = BundleSize()
    for seconds, size in [(0.01, 8), (0.01, 16), (0.01, 16), (16, 8), (15.6, 4), (240, 1), (3.6, 2), (7.6, 2)]:
        pace.took(pace.size, seconds)
        assert pace.size == size, (seconds, size)
    pace.failed()
    assert pace.size == 1
