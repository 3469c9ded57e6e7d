"""Let every call of a sink's run fail in turn: the run says so, the next one goes on, and each row is there once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.export.record import SinkRun
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import MODES, WRITES, FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place
from tests.crash.sink_ends import End, NewEnd, ends
from tests.crash.sink_world import (
    EVENTS,
    PEOPLE,
    SINK,
    Writer,
    append,
    as_text,
    check_at_rest,
    delete,
    expected,
    make,
    merge,
)

CHECK_EVERY = 10


@pytest.fixture
def new_end(tmp_path: Path) -> Iterator[NewEnd]:
    with ends(tmp_path) as make_end:
        yield make_end


class Trial:
    """A lake and a sink; something new in both tables before each run that goes wrong."""

    def __init__(self, place: Place, end: End) -> None:
        self.lake = place.open(create=True, storage=FaultyStorage())
        self.failed = 0
        self._end = end
        make(self.lake)
        self.lake.sinks.add(SINK, end.kind, tables=[EVENTS, PEOPLE], **end.settings)
        self._writer = Writer(self.lake, seed=0)

    def write(self, number: int) -> None:
        name = f"fault {number % 3}"
        self._writer.write(append(EVENTS, [1, 1, 2, 3, number % 4], name))
        self._writer.write(merge([1, 2, 3, 5 + number % 3], name))
        self._writer.write(delete([2, 5 + (number + 1) % 3]))

    def run(self) -> None:
        """A run that may fail, in which case it says so and does not raise."""
        try:
            done = self.lake.sinks.run(SINK)
        except fm.Unavailable as error:
            import traceback
            fr=[f"{f.filename.rpartition('/')[2]}:{f.lineno}:{f.name}" for f in traceback.extract_tb(error.__traceback__) if "/floodmark/" in f.filename]
            print("RAISED", fr[1:-2])
            self.failed += 1
            return
        self._count(done)

    def _count(self, done: SinkRun) -> None:
        assert done.outcome in ("shipped", "nothing_to_do", "failed"), as_text(done)
        for table in done.tables:
            assert (table.outcome == "failed") is (table.error is not None), as_text(done)
            assert table.error is None or isinstance(table.error, fm.Unavailable), as_text(done)
        self.failed += done.outcome == "failed"

    def check(self, number: int, *, whole: bool) -> None:
        """Nothing is broken any more: one run brings everything that is not there yet."""
        done = self.lake.sinks.run(SINK, until_empty=True)
        assert done.outcome in ("shipped", "nothing_to_do"), f"after fault {number}: {as_text(done)}"
        assert self._end.contents() == expected(self._writer.changes), f"after fault {number}"
        check_at_rest(self.lake)
        if whole:
            self._end.check_clean()
            check_lake(self.lake.catalog)

    def fail_in_turn(self, lay: Callable[[int], Any], mend: Callable[[], None], calls_min: int) -> None:
        fired, number = True, 0
        while fired:
            number += 1
            self.write(number)
            faults = lay(number)
            try:
                self.run()
            finally:
                fired = faults.fired
                mend()
            self.check(number, whole=not fired or number % CHECK_EVERY == 0)
        self.lake.close()
        assert number > calls_min, "hardly any call was counted"
        assert self.failed >= 5


# ── the catalog ──


def fail_database_calls(trial: Trial, mode: str, *, stay_broken: bool) -> None:
    faults: list[DatabaseFaults] = []

    def lay(number: int) -> DatabaseFaults:
        found = DatabaseFaults(trial.lake.catalog.database, fail_at=number, mode=mode, stay_broken=stay_broken)
        faults.append(found)
        return found

    trial.fail_in_turn(lay, lambda: faults[-1].remove(), calls_min=60)


@pytest.mark.parametrize("stay_broken", [False, True], ids=["once", "for_long"])
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("name", ["files", "http"])
def test_whichever_database_call_of_a_run_fails_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd, name: str, mode: str, stay_broken: bool
) -> None:
    fail_database_calls(Trial(new_place(DATABASES[0]), new_end(name)), mode, stay_broken=stay_broken)


def test_whichever_reply_of_a_shared_database_is_lost_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd
) -> None:
    fail_database_calls(Trial(new_place(DATABASES[1]), new_end("http")), "after", stay_broken=False)


# ── the files of the lake, and those of the other end ──


@pytest.mark.parametrize("stay_broken", [False, True], ids=["once", "for_long"])
@pytest.mark.parametrize("mode", MODES)
def test_whichever_storage_call_of_a_run_fails_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd, mode: str, stay_broken: bool
) -> None:
    trial = Trial(new_place(DATABASES[0]), new_end("files"))
    storage = trial.lake.catalog.storage
    assert isinstance(storage, FaultyStorage)
    all_verbs = storage.verbs

    def lay(number: int) -> FaultyStorage:
        storage.mode, storage.stay_broken, storage.fired = mode, stay_broken, False
        storage.verbs = WRITES if mode == "disk_full" else all_verbs
        storage.fail_at = storage.calls_seen + number
        return storage

    def mend() -> None:
        storage.fired, storage.stay_broken, storage.fail_at = False, False, None

    trial.fail_in_turn(lay, mend, calls_min=3)
