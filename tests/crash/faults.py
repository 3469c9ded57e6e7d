"""Let each call of one operation fail in turn, round after round on one lake, until a round meets no fault any more."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import floodmark as fm
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import FaultyStorage
from tests.crash.test_sink_faults import CommitFaults


class Trial(Protocol):
    """One lake and the operation that is tried on it; its storage is a FaultyStorage."""

    lake: fm.Lake

    def act(self) -> fm.Commit:
        """The operation, as it is due in this round."""
        ...

    def finish(self, outcome: str) -> None:
        """Check what it left: an error means that nothing happened. Do it after all, and prepare the next round."""
        ...


def fail_storage(trial: Trial, mode: str, verbs: Collection[str] | None = None) -> list[str]:
    """The outcome of each round in which a call to storage failed, one of these verbs or any."""
    storage = trial.lake.catalog.storage
    assert isinstance(storage, FaultyStorage)
    storage.verbs = FaultyStorage(mode=mode, verbs=verbs).verbs

    def lay(number: int) -> FaultyStorage:
        storage.fail_at, storage.mode, storage.calls_seen, storage.fired = number, mode, 0, False
        return storage

    def lift(storage: FaultyStorage) -> bool:
        fired, storage.fail_at, storage.fired = storage.fired, None, False
        return fired

    return _fail_in_turn(trial, lay, lift)


def fail_commits(trial: Trial, mode: str) -> list[str]:
    """The outcome of each round in which a COMMIT failed (before), or its reply was lost (after)."""
    return _fail_in_turn(
        trial, lambda number: CommitFaults(trial.lake.catalog.database, fail_at=number, mode=mode), _removed
    )


def fail_statements(trial: Trial, mode: str) -> list[str]:
    """The outcome of each round in which a statement failed, or its reply was lost."""
    return _fail_in_turn(
        trial, lambda number: DatabaseFaults(trial.lake.catalog.database, fail_at=number, mode=mode), _removed
    )


def _removed(fault: CommitFaults | DatabaseFaults) -> bool:
    fault.remove()
    return fault.fired


def _fail_in_turn(trial: Trial, lay: Callable[[int], Any], lift: Callable[[Any], bool]) -> list[str]:
    outcomes: list[str] = []
    while True:
        fault = lay(len(outcomes) + 1)
        try:
            outcome = _run(trial)
        finally:
            fired = lift(fault)
        trial.finish(outcome)
        if not fired:
            assert outcome == "committed"
            trial.lake.close()
            return outcomes
        outcomes.append(outcome)


def _run(trial: Trial) -> str:
    try:
        return trial.act().outcome
    except fm.CommitUnknown as unknown:
        return "unknown" if trial.lake.resolve(unknown.operation) is None else "committed"
    except fm.Unavailable:
        return "raised"
