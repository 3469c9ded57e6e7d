"""What once lost, doubled or stopped rows on their way through a spool, each as it was found."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark import log
from floodmark.ingest.intake import Intake
from floodmark.ingest.quarantine import drop
from floodmark.serve.http.rows import REMEMBERED_S
from floodmark.spool.accept import accept, plan
from floodmark.spool.keys import KeyWindow, Known
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place
from tests.contract.test_receive_http import lines as body
from tests.contract.test_receive_http import served
from tests.intake_world import bring, folder_of, intake_of, rows_of, state_of, table_id, take

WAIT_S = 20


@pytest.fixture
def lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    with new_place("sqlite").open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        yield lake


def until(is_so: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := is_so()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
    return found


def ids_of(lake: fm.Lake) -> list[int]:
    return sorted(row["id"] for row in rows_of(lake, "events"))


def test_a_spool_that_was_given_up_and_comes_back_is_refused(lake: fm.Lake, tmp_path: Path) -> None:
    with intake_of(lake) as intake:
        for number in range(3):
            bring(lake, intake, "events", {"id": number})
    there = folder_of(lake) / table_id(lake, "events")
    there.rename(tmp_path / "away")
    accept(lake.catalog, plan(lake.catalog, "events", folder_of(lake)))
    (tmp_path / "away").rename(there)
    with intake_of(lake) as intake:
        error = until(lambda: state_of(intake, "events")["error"])
        assert error["kind"] == "Conflict"
        with pytest.raises(fm.Conflict):
            take(lake, intake, "events", {"id": 9})
    assert ids_of(lake) == [0, 1, 2]


def test_an_operator_beside_a_feed_deletes_nothing_that_was_just_put_aside(lake: fm.Lake) -> None:
    with intake_of(lake) as intake, fm.open(lake.location, actor="operator") as other:
        bring(lake, intake, "events", {"id": "old"})
        [old] = lake.catalog.spools.quarantine()
        put, read, written, go = (
            lake.catalog.storage.put,
            other.catalog.spools.get,
            threading.Event(),
            threading.Event(),
        )

        def put_and_wait(location: str, *arguments: Any, **options: Any) -> Any:
            done = put(location, *arguments, **options)
            if "/quarantine/" in location:
                written.set()
                assert go.wait(WAIT_S)
            return done

        lake.catalog.storage.put = put_and_wait  # type: ignore[method-assign]
        taken = take(lake, intake, "events", {"id": "new"})
        assert written.wait(WAIT_S)

        def read_after_the_publish(table: str) -> Any:
            # Whatever of the two is read last sees the publish: an object is listed that the other one does not know.
            go.set()
            intake.wait(table_id(lake, "events"), taken.record, WAIT_S)
            return read(table)

        other.catalog.spools.get = read_after_the_publish  # type: ignore[method-assign]
        drop(other.catalog, old.id)
        lake.catalog.storage.put = put  # type: ignore[method-assign]
        [held] = lake.catalog.spools.quarantine()
        assert lake.catalog.storage.exists(held.location)
        check_lake(lake.catalog)


def test_a_spool_whose_folder_is_gone_takes_nothing_more_until_the_operator_says_so(lake: fm.Lake) -> None:
    with intake_of(lake) as intake:
        bring(lake, intake, "events", {"id": 1})
        shutil.rmtree(folder_of(lake) / table_id(lake, "events"))
        take(lake, intake, "events", {"id": 2})  # nobody could know yet
        until(lambda: state_of(intake, "events")["error"])
        assert isinstance(until(lambda: _refusal(lake, intake)), fm.NotFound | fm.Conflict)
        accept(lake.catalog, plan(lake.catalog, "events", folder_of(lake)))
        until(lambda: _taken(lake, intake, 4))
        until(lambda: 4 in ids_of(lake))


def _refusal(lake: fm.Lake, intake: Intake) -> fm.FloodmarkError | None:
    """Why nothing is taken; not that the spool is being closed just now."""
    try:
        take(lake, intake, "events", {"id": 3})
    except fm.Unavailable:
        return None
    except fm.FloodmarkError as error:
        return error
    return None


def _taken(lake: fm.Lake, intake: Intake, number: int) -> bool:
    try:
        take(lake, intake, "events", {"id": number})
    except fm.FloodmarkError:
        return False
    return True


def test_a_folder_of_the_disk_itself_is_no_spool(lake: fm.Lake) -> None:
    (folder_of(lake) / "lost+found").mkdir(parents=True)
    with intake_of(lake) as intake:
        bring(lake, intake, "events", {"id": 1})
        assert [state["table"] for state in intake.states()] == ["events"]
        assert state_of(intake, "events")["error"] is None


def test_a_key_whose_rows_are_in_is_known_although_the_table_has_changed(lake: fm.Lake) -> None:
    headers = {"Idempotency-Key": "once"}
    rows = body([{"id": 1, "name": "a"}])
    with intake_of(lake) as intake, served(lake, intake=intake) as client:
        assert client.post("/api/tables/events/rows?wait=committed", content=rows, headers=headers).status_code == 200
        lake.apply({"events": {"columns": {"id": {"type": "long", "required": True}}}}, allow_destructive=True)
        again = client.post("/api/tables/events/rows?wait=committed", content=rows, headers=headers)
        assert (again.status_code, again.json()["outcome"]) == (200, "already_committed")
        # Without the key it is judged by the table as it is, once nobody remembers how it was.
        time.sleep(2 * REMEMBERED_S)
        assert client.post("/api/tables/events/rows", content=rows).status_code == 422
    assert ids_of(lake) == [1]


def test_a_column_that_was_just_added_is_known_at_once(lake: fm.Lake) -> None:
    """The door remembers a table for a moment; what is refused by that is judged anew."""
    with intake_of(lake) as intake, served(lake, intake=intake) as client:
        assert client.post("/api/tables/events/rows", content=body([{"id": 1}])).status_code == 202
        lake.apply({"events": {"columns": {"id": {"type": "long", "required": True}, "name": "string", "new": "int"}}})
        answer = client.post("/api/tables/events/rows?wait=committed", content=body([{"id": 2, "new": 7}]))
        assert (answer.status_code, answer.json()["quarantined"]) == (200, 0)
    assert [row.get("new") for row in rows_of(lake, "events")] == [None, 7]


@pytest.mark.parametrize("row", [b'{"id": 1, "a\\ud800": 1}', b'{"id": 1, "v": ' + b'{"a":' * 70 + b"1" + b"}" * 71])
def test_columns_that_no_table_can_have_are_refused(lake: fm.Lake, row: bytes) -> None:
    with intake_of(lake) as intake, served(lake, intake=intake) as client:
        answer = client.post("/api/tables/events/rows?evolve=true", content=row)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "Invalid")
        assert not any(state["waiting_records"] or state["fed_records"] for state in intake.states())


def test_a_clock_that_is_put_forward_and_back_forgets_no_key() -> None:
    window, day_ms = KeyWindow(keys_max=10, window_ms=100), 1_000_000
    known = Known(b"b" * 16, 0, 1, at_ms=50)
    window.add(b"a" * 16, known)
    window.add(b"c" * 16, Known(b"b" * 16, 1, 1, at_ms=day_ms))
    assert window.find(b"a" * 16, day_ms) is None
    assert window.find(b"a" * 16, 60) == known


def test_a_log_that_cannot_be_written_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import structlog

    with open("/dev/full", "w", buffering=1) as full:
        with pytest.raises(OSError, match="space"):
            full.write("nothing is ever written here\n")
        monkeypatch.setattr("sys.stderr", full)
        structlog.reset_defaults()
        try:
            log.get(operation="01X").warning("nobody hears it")
        finally:
            structlog.reset_defaults()
            # What a file still holds it would try to write when it is closed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
