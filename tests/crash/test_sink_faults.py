"""Let the calls of a sink's run fail in turn: the run says so, the next one goes on, and each row is there once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import MODES, WRITES, FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at
from tests.crash.sink_ends import End, HttpEnd, NewEnd, ends
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
    perform,
)

# A new lake now and then: with every round of an old one there is more to read.
ROUNDS_PER_LAKE = 20


@pytest.fixture
def new_end(tmp_path: Path) -> Iterator[NewEnd]:
    with ends(tmp_path) as make_end:
        yield make_end


class Trial:
    """A lake and a sink that is at its head."""

    def __init__(self, place: Place, end: End) -> None:
        self.lake = place.open(create=True, storage=FaultyStorage())
        self.end = end
        make(self.lake)
        self.lake.sinks.add(SINK, end.kind, tables=[EVENTS, PEOPLE], **end.settings)
        self._writer = Writer(self.lake, seed=0)
        self.write(0)
        self.finish(0)

    def write(self, number: int) -> None:
        """Something new in both tables."""
        name = f"fault {number}"
        self._writer.write(append(EVENTS, [1, 1, 2, 3, number % 4], name))
        self._writer.write(merge([1, 2, 3, 5 + number % 3], name))
        self._writer.write(delete([2, 5 + (number + 1) % 3]))

    def run(self) -> str:
        """A run that may fail: how it ended. Only the catalog or the storage may be the reason."""
        try:
            done = self.lake.sinks.run(SINK)
        except fm.Unavailable:
            return "raised"
        assert done.outcome in ("shipped", "nothing_to_do", "failed"), as_text(done)
        for table in done.tables:
            assert (table.outcome == "failed") is (table.error is not None), as_text(done)
            assert table.error is None or isinstance(table.error, fm.Unavailable), as_text(done)
        return done.outcome

    def finish(self, number: int, *, whole: bool = False) -> None:
        """Nothing is broken any more: one run brings everything that is not there yet."""
        done = self.lake.sinks.run(SINK, until_empty=True)
        assert done.outcome in ("shipped", "nothing_to_do"), f"after fault {number}: {as_text(done)}"
        assert self.end.contents() == expected(self._writer.changes), f"after fault {number}"
        check_at_rest(self.lake, released=False)
        if whole:
            self.end.check_clean(temporary=False)
            check_lake(self.lake.catalog)


def fail_in_turn(
    new_trial: Callable[[], Trial], lay: Callable[[Trial, int], Any], mend: Callable[[Any], None], step: int = 1
) -> list[str]:
    """Let call number 1, 1 + step, … of a run fail, until there is none of that number: how the runs ended."""
    outcomes: list[str] = []
    trial = new_trial()
    fired = True
    while fired:
        number = 1 + step * len(outcomes)
        if len(outcomes) % ROUNDS_PER_LAKE == ROUNDS_PER_LAKE - 1:
            trial.finish(number, whole=True)
            trial.lake.close()
            trial = new_trial()
        trial.write(number)
        faults = lay(trial, number)
        try:
            outcomes.append(trial.run())
        finally:
            fired = faults.fired
            mend(faults)
        trial.finish(number, whole=not fired)
    trial.lake.close()
    return outcomes


# ── the catalog ──


class CommitFaults(DatabaseFaults):
    """Only COMMIT fails: `before`, nothing of the transaction is there; `after`, all of it is."""

    def _wrapped(self, name: str) -> Any:
        return super()._wrapped(name) if name == "do_commit" else self._real[name]


def fail_database_calls(
    new_trial: Callable[[], Trial],
    mode: str,
    *,
    kind: type[DatabaseFaults] = DatabaseFaults,
    step: int = 1,
    stay_broken: bool = False,
) -> list[str]:
    def lay(trial: Trial, number: int) -> DatabaseFaults:
        return kind(trial.lake.catalog.database, fail_at=number, mode=mode, stay_broken=stay_broken)

    return fail_in_turn(new_trial, lay, lambda faults: faults.remove(), step)


@pytest.mark.parametrize("stay_broken", [False, True], ids=["once", "for_long"])
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("name", ["files", "http"])
def test_whichever_commit_of_a_run_fails_or_its_reply_is_lost_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd, name: str, mode: str, stay_broken: bool
) -> None:
    outcomes = fail_database_calls(
        lambda: Trial(new_place("sqlite"), new_end(name)), mode, kind=CommitFaults, stay_broken=stay_broken
    )
    assert len(outcomes) > 9, "hardly any COMMIT was counted"


def test_whichever_reply_of_a_shared_database_is_lost_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd
) -> None:
    outcomes = fail_database_calls(lambda: Trial(new_place("postgresql"), new_end("http")), "after", kind=CommitFaults)
    assert len(outcomes) > 9, "hardly any COMMIT was counted"


# The distance between two calls that fail; `make soak` lets every one fail.
STEP, RETRY_STEP = 11, 4


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("name", ["files", "http"])
def test_whichever_database_call_of_a_run_fails_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd, name: str, mode: str
) -> None:
    outcomes = fail_database_calls(lambda: Trial(new_place("sqlite"), new_end(name)), mode, step=STEP)
    assert len(outcomes) * STEP > 100, "hardly any call was counted"


@pytest.mark.parametrize("point", ["unit.held", "unit.opened", "unit.shipped", "unit.settled"])
def test_a_run_whose_catalog_fails_in_the_middle_ends_in_a_named_outcome(
    new_place: Callable[[str], Place], new_end: NewEnd, point: str
) -> None:
    """One call after the sink was taken fails: the run tells of both tables, and ships what the failure left alone."""
    trial = Trial(new_place("sqlite"), new_end("files"))
    trial.write(1)
    faults: list[DatabaseFaults] = []

    def lay() -> None:
        faults.append(DatabaseFaults(trial.lake.catalog.database, fail_at=1, mode="before"))

    with at(point, lay):
        done = trial.lake.sinks.run(SINK)
    faults[0].remove()
    assert faults[0].fired
    assert [table.table for table in done.tables] == [EVENTS, PEOPLE]
    assert {table.outcome for table in done.tables} <= {"shipped", "failed"}, as_text(done)
    assert point == "unit.held" or done.tables[1].outcome == "shipped", as_text(done)
    trial.finish(1)
    trial.lake.close()


# ── the files of the lake, and those of the other end ──


def fail_storage_calls(new_trial: Callable[[], Trial], mode: str, *, stay_broken: bool = False) -> list[str]:
    def lay(trial: Trial, number: int) -> FaultyStorage:
        storage = trial.lake.catalog.storage
        assert isinstance(storage, FaultyStorage)
        storage.mode, storage.stay_broken = mode, stay_broken
        storage.verbs = WRITES if mode == "disk_full" else storage.verbs
        storage.fail_at = storage.calls_seen + number
        return storage

    def mend(storage: FaultyStorage) -> None:
        storage.fired, storage.stay_broken, storage.fail_at = False, False, None

    return fail_in_turn(new_trial, lay, mend)


@pytest.mark.parametrize(
    ("mode", "stay_broken"), [*((mode, False) for mode in MODES), ("before", True)], ids=[*MODES, "before_for_long"]
)
def test_whichever_storage_call_of_a_run_fails_each_row_is_shipped_once(
    new_place: Callable[[str], Place], new_end: NewEnd, mode: str, stay_broken: bool
) -> None:
    outcomes = fail_storage_calls(lambda: Trial(new_place("sqlite"), new_end("files")), mode, stay_broken=stay_broken)
    assert set(outcomes) == {"failed", "shipped"}
    assert outcomes.count("failed") > 3


def test_what_a_broken_write_left_at_the_other_end_is_gone_when_the_unit_is_there(
    new_place: Callable[[str], Place], new_end: NewEnd
) -> None:
    trial = Trial(new_place("sqlite"), new_end("files"))
    storage = trial.lake.catalog.storage
    assert isinstance(storage, FaultyStorage)
    trial.write(1)
    storage.mode, storage.verbs, storage.fail_at = "torn", frozenset({"put_if_absent"}), storage.calls_seen + 1
    assert trial.run() == "failed"
    assert storage.fired
    trial.finish(1)
    trial.end.check_clean(temporary=True)
    trial.lake.close()


# ── who holds a sink after a failure ──


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_run_that_has_ended_does_not_hold_its_sink_whatever_failed(
    new_place: Callable[[str], Place], new_end: NewEnd, mode: str
) -> None:
    """The last COMMIT of a run lets go of the sink. If it fails, another process must not wait for ever."""
    place = new_place("sqlite")
    trial = Trial(place, new_end("files"))
    commits = len(fail_database_calls(lambda: Trial(new_place("sqlite"), new_end("files")), mode, kind=CommitFaults))
    trial.write(1)
    faults = CommitFaults(trial.lake.catalog.database, fail_at=commits - 1, mode=mode)
    assert trial.run() == "shipped"
    assert faults.fired
    faults.remove()
    trial.finish(1)
    check_at_rest(trial.lake)
    with place.open() as other:
        assert other.sinks.about(SINK)["running"] is None
        perform(other, append(EVENTS, [1], "more"))
        assert other.sinks.run(SINK).outcome == "shipped"
    trial.lake.close()


def test_an_error_is_not_told_any_more_once_everything_is_shipped(
    new_place: Callable[[str], Place], new_end: NewEnd
) -> None:
    """The reply to a settlement is lost: the run failed as far as it knows, and the next one has nothing to do."""
    trial = Trial(new_place("sqlite"), new_end("files"))
    fired, number = True, 0
    while fired:
        number += 1
        trial.write(number)
        faults = CommitFaults(trial.lake.catalog.database, fail_at=number, mode="after")
        trial.run()
        fired = faults.fired
        faults.remove()
        trial.finish(number)
        assert trial.lake.sinks.about(SINK)["error"] is None, f"after fault {number}"
    trial.lake.close()


@pytest.mark.parametrize("mode", ["before", "after"])
def test_whichever_database_call_of_a_retry_fails_the_sink_is_free_and_each_row_is_there_once(
    new_place: Callable[[str], Place], new_end: NewEnd, mode: str
) -> None:
    end = new_end("http")
    assert isinstance(end, HttpEnd)
    written = []
    fired, number = True, 1 - RETRY_STEP
    with new_place("sqlite").open(create=True) as lake:
        make(lake)
        lake.sinks.add(SINK, end.kind, tables=[EVENTS], **end.settings)
        while fired:
            number += RETRY_STEP
            end.receiver.refuses = lambda row: row["id"] == 3
            written.append(append(EVENTS, [1, 3, 3], f"fault {number}"))
            perform(lake, written[-1])
            assert lake.sinks.run(SINK).outcome == "shipped"
            end.receiver.refuses = None
            faults = DatabaseFaults(lake.catalog.database, fail_at=number, mode=mode)
            with suppress(fm.Unavailable):
                assert lake.sinks.retry(SINK).outcome in ("shipped", "failed")
            fired = faults.fired
            faults.remove()
            again = [lake.sinks.run(SINK), lake.sinks.retry(SINK)]
            assert {done.outcome for done in again} <= {"shipped", "nothing_to_do"}, [as_text(done) for done in again]
            assert lake.sinks.quarantine(SINK) == []
            assert end.contents() == expected(written), f"after fault {number}"
        check_at_rest(lake, released=False)
        check_lake(lake.catalog)
    assert number > 30, "hardly any call was counted"
