"""Let the calls of a backfill fail in turn: it ends in a named outcome, the next run goes on, and all is there once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.history import HistorySpec, plan, run_history
from floodmark.backfill.columns import column as column_backfill
from floodmark.jobs.record import BackfillRun
from floodmark.testing.children import preload
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import WRITES, FaultyStorage
from tests.conftest import Place
from tests.crash.backfill_world import (
    EVENTS,
    PEOPLE,
    SCHEMA,
    audited,
    check_at_rest,
    person,
)
from tests.crash.test_sink_faults import CommitFaults

preload("tests.crash.test_backfill_faults")

# A new lake now and then: with every round of an old one there is more to read.
ROUNDS_PER_LAKE = 12
NUMBERS = ((1, 2), (5, 6))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_backfill, "BACKOFF_S", 0.001)


# ── what is tried ──


class Trial:
    """A lake on which one backfill after another meets a fault."""

    def __init__(self, place: Place, tries: int) -> None:
        self._place = place
        self._tries = tries
        self.lake = place.open(create=True, actor="test", storage=FaultyStorage())
        self.lake.create_table(EVENTS, SCHEMA)
        self.lake.create_table(PEOPLE, SCHEMA, key=["id"])
        for numbers in NUMBERS:
            self.lake.append(PEOPLE, [person(number, f"row {number}") for number in numbers])

    def job(self, number: int) -> str:
        raise NotImplementedError

    def prepare(self, number: int) -> None:
        """What has to be there before the run that meets a fault."""

    def start(self, number: int) -> BackfillRun:
        raise NotImplementedError

    def check(self, number: int) -> None:
        raise NotImplementedError

    def run(self, number: int) -> str:
        """A run that may fail: how it ended. Whatever it says is what the catalog says, when it can be asked again."""
        try:
            done = self.start(number)
        except (fm.Unavailable, fm.CommitUnknown):
            return "raised"
        assert done.outcome in ("done", "failed"), done.as_dict()
        assert done.job["status"] == done.outcome
        if done.outcome == "failed":
            assert done.error is not None
            assert done.error["kind"] in ("Unavailable", "CommitUnknown"), done.error
        return done.outcome

    def finish(self, number: int, *, whole: bool) -> None:
        """Nothing is broken any more: one run ends it, now and then that of another process."""
        if number % 2:
            self.lake.close()
            self.lake = self._place.open(actor="test", storage=FaultyStorage())
        done = self.go_on(number)
        assert done.outcome in ("done", "nothing_to_do"), f"after fault {number}: {done.as_dict()}"
        self.check(number)
        job = self.lake.backfill.show(self.job(number))
        assert (job["status"], job["error"]) == ("done", None)
        assert job["processed"] == job["total"]
        audited(self.lake)
        if whole:
            check_at_rest(self.lake)

    def go_on(self, number: int) -> BackfillRun:
        known = self.job(number) in {job.name for job in self.lake.catalog.jobs.all()}
        return self.lake.backfill.resume(self.job(number)) if known else self.start(number)


class ColumnTrial(Trial):
    """Two batches for a new column of the same table."""

    def job(self, number: int) -> str:
        return f"{PEOPLE}.c{number}"

    def start(self, number: int) -> BackfillRun:
        return self.lake.backfill.column(PEOPLE, f"c{number}", "name", batch_rows=2, pause="0ms")

    def check(self, number: int) -> None:
        found = self.lake.read_arrow(PEOPLE, with_seq=True).read_all().to_pylist()
        for sequence, numbers in enumerate(NUMBERS, 1):
            rows = {row["id"]: row for row in found if row["id"] in numbers}
            assert {row[f"c{number}"] == row["name"] for row in rows.values()} == {True}, f"after fault {number}"
            assert [rows[one]["_seq"] for one in numbers] == [sequence] * 2, f"after fault {number}"
        assert len(found) == 4
        job = self.lake.backfill.show(self.job(number))
        assert (job["rows"], job["unfilled"], job["publishes"]) == (4, 1, 3), f"after fault {number}"
        spec = self.lake.backfill.column_spec(PEOPLE, f"c{number}", "name")
        assert self.lake.backfill.plan(spec)["files"] == 0


def read_two(chunk: Chunk) -> list[dict[str, Any]]:
    assert isinstance(chunk.start, int)
    return [person(number, "history", number) for number in (chunk.start, chunk.start + 1)]


class HistoryTrial(Trial):
    """Two chunks for two tables, of a new history."""

    def __init__(self, place: Place, tries: int) -> None:
        super().__init__(place, tries)
        self._ids = Counter(number for numbers in NUMBERS for number in numbers)
        self._events: Counter[int] = Counter()

    def job(self, number: int) -> str:
        return f"years {number}"

    def spec(self, number: int) -> HistorySpec:
        spec = self.lake.backfill.history_spec(
            self.job(number),
            "tests.crash.test_backfill_faults:read_two",
            [EVENTS, PEOPLE],
            chunk=2,
            first=number * 10,
            last=number * 10 + 4,
            column="at",
            workers=1,
            retries=self._tries,
        )
        return replace(spec, retry_s=0.001)

    def start(self, number: int) -> BackfillRun:
        return run_history(self.lake.backfill._context, self.spec(number), "test")

    def check(self, number: int) -> None:
        numbers = range(number * 10, number * 10 + 4)
        self._events.update(numbers)
        self._ids.update(numbers)
        found = [Counter(self.lake.read_arrow(table).read_all()["id"].to_pylist()) for table in (EVENTS, PEOPLE)]
        assert found == [self._events, self._ids], f"after fault {number}"
        job = self.lake.catalog.jobs.find(self.job(number))
        assert (job.rows, job.publishes) == (8, 2), f"after fault {number}"
        states = [(one.table, one.state, one.rows) for one in self.lake.catalog.chunks.of(job.id)]
        assert sorted(states) == [(table, "done", 2) for table in (EVENTS, PEOPLE) for _ in range(2)]
        assert plan(self.lake.backfill._context, self.spec(number))["to_load"] == 0


class PruneTrial(HistoryTrial):
    """A floor above the first of two chunks that are loaded: their rows go from both tables."""

    def prepare(self, number: int) -> None:
        assert run_history(self.lake.backfill._context, super().spec(number), "test").outcome == "done"

    def spec(self, number: int) -> HistorySpec:
        return replace(super().spec(number), keep=2)

    def go_on(self, number: int) -> BackfillRun:
        # A fault before the job was held leaves it with the settings of the start before, without a floor.
        return self.start(number)

    def check(self, number: int) -> None:
        numbers = range(number * 10 + 2, number * 10 + 4)
        self._events.update(numbers)
        self._ids.update(numbers)
        found = [Counter(self.lake.read_arrow(table).read_all()["id"].to_pylist()) for table in (EVENTS, PEOPLE)]
        assert found == [self._events, self._ids], f"after fault {number}"
        job = self.lake.catalog.jobs.find(self.job(number))
        assert (job.rows, job.publishes, job.total) == (8, 2, 1), f"after fault {number}: nothing was loaded again"
        states = [(one.table, one.chunk, one.state) for one in self.lake.catalog.chunks.of(job.id)]
        low = number * 5
        assert sorted(states) == [
            (table, chunk, state) for table in (EVENTS, PEOPLE) for chunk, state in ((low, "pruned"), (low + 1, "done"))
        ]
        pruned = [
            one
            for one in self.lake.history(limit=1000)
            if one.kind == "prune" and self.job(number) + ":" in one.message
        ]
        assert len(pruned) == 2, f"after fault {number}: each table once"
        left = plan(self.lake.backfill._context, self.spec(number))
        assert (left["to_load"], left["to_prune"]) == (0, {})


TRIALS: dict[str, type[Trial]] = {"column": ColumnTrial, "history": HistoryTrial, "prune": PruneTrial}
# A batch of a column is always tried several times; a chunk as often as it is told.
TRIES = {"column": (1,), "history": (1, 3), "prune": (1, 3)}


def fail_in_turn(
    new_trial: Callable[[], Trial],
    lay: Callable[[fm.Lake, int], Any],
    mend: Callable[[Any], None],
    first: int = 1,
    step: int = 1,
) -> list[str]:
    """Let call number `first`, `first` + step, … of a run fail, until there is none of that number: how they ended."""
    outcomes: list[str] = []
    trial, fired, number = new_trial(), True, first
    while fired:
        trial.prepare(number)
        faults = lay(trial.lake, number)
        try:
            outcomes.append(trial.run(number))
        finally:
            fired = faults.fired
            mend(faults)
        last = not fired or len(outcomes) % ROUNDS_PER_LAKE == 0
        trial.finish(number, whole=last or len(outcomes) % 4 == 0)
        if last:
            trial.lake.close()
        if last and fired:
            trial = new_trial()
        number += step
    assert outcomes[-1] == "done"
    return outcomes


# ── the catalog ──


def fail_database_calls(
    new_trial: Callable[[], Trial], mode: str, kind: type[DatabaseFaults], first: int = 1, step: int = 1
) -> list[str]:
    return fail_in_turn(
        new_trial,
        lambda lake, number: kind(lake.catalog.database, fail_at=number, mode=mode),
        lambda faults: faults.remove(),
        first,
        step,
    )


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kind", TRIALS)
def test_whichever_commit_fails_or_its_reply_is_lost_all_is_there_once(
    new_place: Callable[[str], Place], kind: str, mode: str
) -> None:
    outcomes = fail_database_calls(lambda: TRIALS[kind](new_place("sqlite"), 1), mode, CommitFaults)
    assert len(outcomes) > 8, "hardly any COMMIT was counted"


@pytest.mark.parametrize("kind", ["column", "history"])
def test_whichever_reply_of_a_shared_database_is_lost_all_is_there_once(
    new_place: Callable[[str], Place], kind: str
) -> None:
    outcomes = fail_database_calls(lambda: TRIALS[kind](new_place("postgresql"), 3), "after", CommitFaults)
    assert len(outcomes) > 8, "hardly any COMMIT was counted"


# The first call that fails, and how far it is to the next one; `make soak` lets every one fail.
DATABASE_CALLS = [("before", 1, 17), ("after", 9, 17)]


@pytest.mark.parametrize(("mode", "first", "step"), DATABASE_CALLS)
@pytest.mark.parametrize("kind", TRIALS)
def test_whichever_database_call_fails_all_is_there_once(
    new_place: Callable[[str], Place], kind: str, mode: str, first: int, step: int
) -> None:
    tries = 1 if mode == "before" else 3
    outcomes = fail_database_calls(
        lambda: TRIALS[kind](new_place("sqlite"), tries), mode, DatabaseFaults, first=first, step=step
    )
    assert len(outcomes) * step > 100, "hardly any call was counted"


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("kind", TRIALS)
def test_soak_every_database_call(place: Place, new_place: Callable[[str], Place], kind: str, mode: str) -> None:
    database = "sqlite" if place.catalog is None else "postgresql"
    for tries in TRIES[kind]:
        fail_database_calls(lambda tries=tries: TRIALS[kind](new_place(database), tries), mode, DatabaseFaults)


# ── the files ──


def fail_storage_calls(new_trial: Callable[[], Trial], mode: str, step: int, *, writes: bool) -> list[str]:
    def lay(lake: fm.Lake, number: int) -> FaultyStorage:
        storage = lake.catalog.storage
        assert isinstance(storage, FaultyStorage)
        storage.mode = mode
        storage.verbs = WRITES if writes else storage.verbs
        storage.fail_at = storage.calls_seen + number
        return storage

    def mend(storage: FaultyStorage) -> None:
        storage.fired, storage.fail_at = False, None

    return fail_in_turn(new_trial, lay, mend, step=step)


@pytest.mark.parametrize(("mode", "step"), [("before", 3), ("after", 4), ("torn", 4), ("disk_full", 4)])
@pytest.mark.parametrize("kind", TRIALS)
def test_whichever_storage_call_fails_all_is_there_once(
    new_place: Callable[[str], Place], kind: str, mode: str, step: int
) -> None:
    tries = 3 if mode == "after" else 1
    outcomes = fail_storage_calls(lambda: TRIALS[kind](new_place("sqlite"), tries), mode, step, writes=mode != "before")
    assert len(outcomes) > 2, "hardly any call was counted"


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["before", "after", "torn", "disk_full"])
@pytest.mark.parametrize("kind", TRIALS)
def test_soak_every_storage_call(new_place: Callable[[str], Place], kind: str, mode: str) -> None:
    for tries in TRIES[kind]:
        fail_storage_calls(
            lambda tries=tries: TRIALS[kind](new_place("sqlite"), tries), mode, 1, writes=mode in ("torn", "disk_full")
        )
