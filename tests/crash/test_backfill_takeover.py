"""Two processes and one job: one works and the other is told so; one that was paused too long does nothing twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

import floodmark as fm
from floodmark import failpoints
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.sources import CallSource
from floodmark.testing.children import Child, preload
from tests.conftest import Place
from tests.crash.backfill_world import (
    CHUNK_ROWS,
    COLUMN,
    COLUMN_JOB,
    COLUMN_OPTIONS,
    HISTORY_JOB,
    JOBS,
    PEOPLE,
    check_done,
    fill_column,
    history,
    is_paused,
    make_people,
    make_tables,
    pause_here,
    read_chunk,
    wait_for,
)

preload("tests.crash.test_backfill_takeover")

LEASE_MS = 1500
HELD_S_MAX = 60


# ── two at once ──


def hold_on(folder: str) -> None:
    """The run is at work, and stays so until it is let go."""
    Path(folder, f"held-{os.getpid()}").touch()
    wait_for(Path(folder, "go").exists, HELD_S_MAX)


def start_together(place: Place, folder: str, job: str) -> str:
    """Start a job when everybody is there; how that went."""
    with place.open() as lake:
        # What is imported late is there already: both come to the start at about the same time.
        lake.backfill.list()
        Path(folder, f"here-{os.getpid()}").touch()
        wait_for(lambda: len(list(Path(folder).glob("here-*"))) == 2)
        try:
            if job == COLUMN_JOB:
                options: dict[str, Any] = {**COLUMN_OPTIONS, "progress": lambda *_: hold_on(folder)}
                return lake.backfill.column(PEOPLE, COLUMN, "name", **options).outcome
            return history(lake, progress=lambda *_: hold_on(folder)).outcome
        except fm.Busy as busy:
            return f"busy: {busy.facts['job']}"


@pytest.mark.parametrize("job", JOBS)
def test_of_two_processes_that_start_a_job_one_works_and_the_other_is_busy(
    place: Place, tmp_path: Path, job: str
) -> None:
    prepare, _ = JOBS[job]
    prepare(place)
    children = [Child(start_together, place, str(tmp_path), job) for _ in range(2)]
    try:
        wait_for(lambda: sum(child.process.is_alive() for child in children) == 1)
    finally:
        Path(tmp_path, "go").touch()
    assert sorted(child.wait() for child in children) == [f"busy: {job}", "done"]
    assert len(list(tmp_path.glob("held-*"))) == 1
    with place.open() as lake:
        check_done(lake, job, [])


@contextmanager
def after_looking_for_jobs(lake: fm.Lake, act: Callable[[], object]) -> Iterator[None]:
    """Act once, right after this lake has asked its catalog for a job."""
    waiting = [act]
    engine = lake.catalog.database.engine

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM fm_jobs" in statement and waiting:
            waiting.pop()()

    event.listen(engine, "after_cursor_execute", look)
    try:
        yield
    finally:
        event.remove(engine, "after_cursor_execute", look)
    assert not waiting, "it never asked"


def test_a_job_that_another_process_starts_and_ends_under_the_eyes_of_this_one_is_the_same_job(place: Place) -> None:
    """The column is there though it was not a moment before: it is not taken for somebody else's."""
    make_people(place)
    with place.open() as lake:
        with after_looking_for_jobs(lake, lambda: Child(fill_column, place).wait()):
            done = lake.backfill.column(PEOPLE, COLUMN, "name", **COLUMN_OPTIONS)
        assert done.outcome == "nothing_to_do"
        check_done(lake, COLUMN_JOB, [])


# ── paused ──


def pause_at(lake: fm.Lake, point: str) -> None:
    """Stop this process when it passes the point, or for the nth time with `point:n`."""
    name, _, number = point.partition(":")
    left = [int(number or 1)]

    def observe(passed: str) -> None:
        left[0] -= passed == name
        if left[0] == 0:
            left[0] = -1
            pause_here(lake)

    failpoints.observer = observe


def fill_and_pause(place: Place, point: str) -> str:
    with place.open(lease_ms=LEASE_MS) as lake:
        pause_at(lake, point)
        try:
            return lake.backfill.column(PEOPLE, COLUMN, "name", **COLUMN_OPTIONS).outcome
        except fm.Fenced:
            return "fenced"


def load_and_pause(place: Place, point: str) -> str:
    """`source`: while it is asked for the second chunk."""
    with place.open(lease_ms=LEASE_MS) as lake:

        def read(chunk: Chunk) -> Any:
            if point == "source" and chunk.start == CHUNK_ROWS:
                pause_here(lake)
            return read_chunk(chunk)

        if point != "source":
            pause_at(lake, point)
        try:
            return history(lake, CallSource(read)).outcome
        except fm.Fenced:
            return "fenced"


# What healing reports of the operation that is under way then.
PAUSED: dict[str, list[tuple[str, str]]] = {
    "add_column.built": [("add_column", "rolled_back")],
    "fill.begun": [("fill", "rolled_back")],
    "fill.built:2": [("fill", "rolled_back")],
    "fill.published:2": [],
    "source": [],
    "chunk.staged:3": [("chunk", "rolled_back")],
    "chunk.built:2": [("chunk", "rolled_forward")],
    "chunk.cleaned": [],
}


def is_column(point: str) -> bool:
    return point.startswith(("add_column", "fill"))


def test_a_run_that_was_paused_past_its_lease_publishes_nothing_more(
    new_place: Callable[[str], Place], place: Place
) -> None:
    """All of them at once, because each waits for the end of a lease."""
    database = "sqlite" if place.catalog is None else "postgresql"
    places = {point: new_place(database) for point in PAUSED}
    for point, one in places.items():
        (make_people if is_column(point) else make_tables)(one)
    children = {
        point: Child(fill_and_pause if is_column(point) else load_and_pause, one, point)
        for point, one in places.items()
    }
    versions: dict[str, int] = {}
    try:
        wait_for(lambda: all(is_paused(child.pid) for child in children.values()))
        for point, one in places.items():
            versions[point] = take_over(one, point)
    finally:
        for child in children.values():
            os.kill(child.pid, signal.SIGCONT)
    assert {point: child.wait() for point, child in children.items()} == dict.fromkeys(PAUSED, "fenced")
    for point, one in places.items():
        with one.open() as lake:
            assert lake.catalog.history.resolve() == versions[point], point
            check_done(lake, COLUMN_JOB if is_column(point) else HISTORY_JOB, [*PAUSED[point], ("job", "resumed")])


def take_over(place: Place, point: str) -> int:
    """Another process ends the job when its owner's lease is over; the lake's version then."""
    with place.open(recover=False) as lake:
        job = COLUMN_JOB if is_column(point) else HISTORY_JOB
        wait_for(lambda: lake.catalog.jobs.find(job).status == "interrupted")
        done = lake.backfill.resume(job) if is_column(point) else history(lake)
        assert done.outcome == "done", (point, done.as_dict())
        return lake.catalog.history.resolve()
