"""Recovery acts on what it judged: an operation that goes on in between is judged again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.commit.journal import OperationChanged
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids, rows


class Stopped:
    """A writer in a thread that stops at named points of its own until it is let go on."""

    def __init__(self, write: Callable[[], Any], points: list[str]) -> None:
        self._points = points
        self._go, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self.result: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), daemon=True)

    def _run(self, write: Callable[[], Any]) -> None:
        try:
            self.result = write()
        except Exception as error:  # noqa: BLE001 - how the writer ends is what is asserted
            self.error = error
        self._there.release()

    def observe(self, point: str) -> None:
        if threading.current_thread() is self._thread and self._points and point == self._points[0]:
            self._points.pop(0)
            self._there.release()
            self._go.acquire()

    def begin(self) -> None:
        self._thread.start()
        assert self._there.acquire(timeout=60)

    def go_on(self) -> None:
        self._go.release()
        assert self._there.acquire(timeout=60)


@pytest.fixture
def stopped() -> Any:
    yield Stopped
    failpoints.observer = None


def between(writers: list[Stopped], act: Callable[[], None]) -> list[str]:
    """Stop the writers at their points, and `act` once when the recovering process has found an operation."""
    passed: list[str] = []

    def observe(point: str) -> None:
        for writer in writers:
            writer.observe(point)
        if point == "heal.found" and point not in passed:
            passed.append(point)
            act()

    failpoints.observer = observe
    return passed


def test_a_batch_that_is_sealed_while_it_is_judged_is_not_rolled_back_as_unsealed(
    lake: fm.Lake, place: Place, stopped: Any
) -> None:
    with place.open(lease_ms=-60_000, recover=False) as slow:
        writer = stopped(lambda: slow.append("events", rows(1), batch="one"), ["append.staged", "append.sealed"])
        passed = between([writer], writer.go_on)  # it seals between the look and the fence
        writer.begin()
        report = lake.recover()
        assert passed == ["heal.found"]
        assert len(report.rolled_forward) == 1
        assert report.rolled_back == ()
        writer.go_on()
        assert writer.error is None
        assert writer.result.version == lake.history()[0].version
    assert ids(lake) == [1]
    audit = lake.audit()
    assert [(row.found, row.outcome) for row in audit] == [("staged", "rolled_forward")]
    check_lake(lake.catalog)


def test_a_plan_that_is_sealed_anew_while_it_is_judged_is_published_by_its_new_seal(place: Place, stopped: Any) -> None:
    """The old seal names files of a plan that its writer has left behind."""
    with place.open(create=True) as lake, place.open(lease_ms=-60_000, recover=False) as slow, place.open() as quick:
        lake.create_table("events", "id long not null, name string", key=["id"])
        lake.append("events", rows(1, 2))
        rival = stopped(lambda: quick.merge("events", [{"id": 1, "name": "rival"}]), ["merge.built"])
        writer = stopped(
            lambda: slow.merge("events", [{"id": 1, "name": "new"}], batch="one"),
            ["merge.sealed", "merge.planned_again", "merge.sealed"],
        )

        def move_on() -> None:
            writer.go_on()  # planned again: the rival changed its row
            writer.go_on()  # sealed anew

        passed = between([rival, writer], move_on)
        rival.begin()
        writer.begin()
        rival.go_on()
        assert rival.error is None
        report = lake.recover()
        assert passed == ["heal.found"]
        assert len(report.rolled_forward) == 1
        writer.go_on()
        assert writer.error is None
        changes = lake.changes("events", since=None).arrow().read_all().to_pylist()
        assert {row["id"]: row["name"] for row in changes} == {1: "new", 2: "row 2"}
        check_lake(lake.catalog)


def test_an_operation_is_fenced_only_in_the_state_that_was_judged(lake: fm.Lake, place: Place, stopped: Any) -> None:
    with place.open(lease_ms=-60_000, recover=False) as slow:
        writer = stopped(lambda: slow.append("events", rows(1)), ["append.staged", "append.sealed"])
        failpoints.observer = writer.observe
        writer.begin()
        rows_before, _ = lake.catalog.journal.unfinished()
        writer.go_on()
        with pytest.raises(OperationChanged):
            lake.catalog.journal.abandon(rows_before[0].id, judged=rows_before[0].judged)
        writer.go_on()
        assert writer.error is None
    assert ids(lake) == [1]


def test_the_earlier_name_of_recover_is_accepted_by_open_with_a_warning(lake: fm.Lake, place: Place) -> None:
    with pytest.warns(DeprecationWarning, match="recover="), place.open(heal=False) as other:
        assert other.tables() == lake.tables()
