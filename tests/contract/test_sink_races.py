"""Sinks under interleavings, lost replies and strange answers: nothing is doubled, lost, wedged or shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark.errors import Conflict, Invalid
from floodmark.sinks.settings import parse_settings
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Receiver, answers
from tests.conftest import EVENTS, Place, at, rows
from tests.contract.test_sinks import Lost, add_http, folded, keyed, lose, mark, ran

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


# ── refused rows that are sent again ──


def test_a_retry_never_overtakes_a_newer_state_of_its_key(place: Place, lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    add_http(lake, receiver, table="users")
    receiver.refuses = lambda row: row["name"] == "bad"
    lake.merge("users", [{"id": 1, "name": "bad"}])
    ran(lake)
    receiver.refuses = None

    def meanwhile() -> None:
        with place.open() as other:
            other.merge("users", [{"id": 1, "name": "new"}])
            assert other.sinks.run("out").outcome == "busy"

    with at("unit.opened", meanwhile):
        assert lake.sinks.retry("out").rows == 1
    ran(lake)
    assert [row["name"] for row in receiver.rows] == ["bad", "new"]


def test_a_replay_sends_refused_rows_by_itself_and_not_twice(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.refuses = lambda row: row["id"] == 3
    lake.append("events", rows(1, 2))
    lake.append("events", rows(3))
    ran(lake)
    receiver.refuses = None
    lake.sinks.replay("out", start=1)
    ran(lake)
    assert lake.sinks.retry("out").outcome == "nothing_to_do"
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2, 3])


def test_refused_rows_below_the_start_of_a_replay_stay_to_be_sent(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.refuses = lambda row: row["id"] == 1
    lake.append("events", rows(1))
    lake.append("events", rows(2))
    ran(lake)
    receiver.refuses = None
    lake.sinks.replay("out", start="head")
    assert lake.sinks.retry("out").rows == 1
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2])


def test_rows_that_stay_bad_do_not_block_new_ones_however_many_they_are(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver, quarantine_max=2)
    receiver.refuses = lambda row: row["id"] < 10
    for number in (1, 3, 5):
        lake.append("events", rows(number, number + 1))
        ran(lake)
    assert lake.sinks.retry("out").tables[0].quarantined == 6
    lake.append("events", rows(10, 11))
    assert ran(lake).rows == 2
    assert lake.sinks.drop("out") == 6


def test_a_paused_sink_sends_no_refused_rows_either(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.refuses = lambda row: True
    lake.append("events", rows(1))
    ran(lake)
    lake.sinks.pause("out")
    receiver.refuses = None
    assert lake.sinks.retry("out").outcome == "paused"
    assert receiver.rows == []


# ── what is delivered is written down ──


@pytest.mark.parametrize("how", ["pause", "stop"])
def test_parts_that_arrived_are_not_sent_again_after_a_pause_or_a_stop(
    lake: fm.Lake, receiver: Receiver, how: str
) -> None:
    import threading

    add_http(lake, receiver, part_rows=1, parallel=2)
    lake.append("events", rows(*range(12)))
    stop = threading.Event()
    with at("unit.sent", lambda: lake.sinks.pause("out") if how == "pause" else stop.set()):
        lake.sinks.run("out", stop=stop)
    lake.sinks.resume("out")
    ran(lake)
    delivered = {request.key for request in receiver.requests if receiver.statuses.get(request.number) == 200}
    assert len(delivered) == len(receiver.rows) == 12
    again = [key for key, tries in receiver.tries.items() if tries > 1]
    # What was under way when it ended is nobody's to know; what was answered before is.
    assert len(again) <= 2


def test_somebody_who_does_not_say_who_they_are_delivered_nothing(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.destination = "the lake"
    lake.append("events", rows(1))
    ran(lake)
    receiver.destination = None  # a proxy that says 200 to everything
    lake.append("events", rows(2))
    before = mark(lake)
    done = lake.sinks.run("out")
    assert (done.outcome, mark(lake)) == ("refused", before)
    receiver.destination = "the lake"
    ran(lake)
    assert mark(lake) != before


def test_an_answer_with_signs_that_no_database_takes_is_kept_without_them(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    receiver.script(answers(422, text="no\x00t th\x1bis"))
    ran(lake)
    assert lake.sinks.quarantine("out")[0]["reason"] == "422: no\ufffdt th\ufffdis"


# ── one after the other ──


def test_a_replay_from_the_mark_means_the_mark_when_it_happens(place: Place, lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    ran(lake)
    lake.append("events", rows(2))
    real = lake.catalog.history.head

    def slow(*arguments: Any) -> Any:
        found = real(*arguments)
        with place.open() as other:
            ran(other)
        return found

    lake.catalog.history.head = slow  # type: ignore[method-assign]
    try:
        lake.sinks.replay("out", start="mark")
    finally:
        lake.catalog.history.head = real  # type: ignore[method-assign]
    assert ran(lake).outcome == "nothing_to_do"
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2])


def test_two_changes_of_settings_at_once_are_not_mixed(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    sink = lake.catalog.sinks.find("out")
    lake.sinks.set("out", part_rows=7)
    with pytest.raises(Conflict, match="meanwhile"):
        lake.catalog.sinks.set("out", sink.settings, sink.settings, True)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_lost_reply_anywhere_leaves_a_sink_that_another_process_can_run(
    place: Place, lake: fm.Lake, receiver: Receiver, mode: str
) -> None:
    add_http(lake, receiver)
    for number in range(1, 40):
        lake.append("events", rows(number))
        with place.open(lease_ms=2_000) as broken:
            faults = DatabaseFaults(broken.catalog.database, fail_at=number, mode=mode)
            try:
                broken.sinks.run("out")
            except fm.FloodmarkError:
                pass
            finally:
                faults.remove()
            if not faults.fired:
                break
    ran(lake)
    assert Counter(row["id"] for row in receiver.rows) == Counter(range(1, number + 1))
    assert receiver.ledger.mismatched == []
    check_lake(lake.catalog)


def test_the_units_that_are_remembered_are_the_newest_whatever_the_clock_says(
    lake: fm.Lake, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from floodmark import clock

    add_http(lake, receiver)
    for number in range(25):
        lake.append("events", rows(number))
        ran(lake)
    # From here on ids sort before all earlier ones.
    real = clock.new_id
    monkeypatch.setattr(clock, "new_id", lambda after=None: "0" + real()[1:])
    lake.append("events", rows(100))
    ran(lake)
    sink = lake.catalog.sinks.find("out")
    lake.append("events", rows(101))
    with at("unit.opened", lose), pytest.raises(Lost):
        lake.sinks.run("out")
    opened = lake.catalog.sinks.find("out").tables[0].open_unit
    assert opened is not None
    unit = lake.catalog.units.read(opened)
    assert lake.catalog.units.log(unit, "nobody").settled_until() == sink.tables[0].mark


# ── what cannot be ──


def test_a_unit_that_the_format_cannot_hold_is_not_opened(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    ran(lake)
    import pyarrow as pa

    wide = pa.table({"id": [2], "name": ["x"], "m": pa.array([[(1, 2)]], pa.map_(pa.int64(), pa.int64()))})
    lake.append("events", wide, evolve=True)
    done = lake.sinks.run("out")
    assert (done.outcome, done.error and done.error.facts["column"]) == ("failed", "m")
    assert lake.catalog.pin_count() == 0
    lake.sinks.set("out", columns=["id"])
    ran(lake)
    assert [row["id"] for row in receiver.rows] == [1, 2]


def test_a_read_only_lake_moves_no_mark(place: Place, lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    for number in range(4):
        lake.append("events", rows(number))
    ran(lake)
    lake.maintain.compact("events", files_min=2)
    with place.open(read_only=True) as reader, pytest.raises(Invalid, match="read-only"):
        reader.sinks.run("out")


def test_a_table_with_another_key_at_the_other_end_is_refused_before_a_row_is_taken(
    new_place: Callable[[str], Place],
) -> None:
    from tests.contract.test_receive_http import served

    with new_place("sqlite").open(create=True) as source, new_place("sqlite").open(create=True) as target:
        source.create_table("events", EVENTS)
        target.create_table("events", EVENTS, key=["id"])
        source.append("events", [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}])
        with served(target) as client:
            url = f"{str(client.base_url).rstrip('/')}/api/tables/events/rows"
            source.sinks.add("out", "http", tables="events", url=url)
            done = source.sinks.run("out")
        assert (done.outcome, done.error and done.error.facts["status"]) == ("failed", 412)
        assert "another key" in str(done.error)
        assert source.sinks.quarantine("out") == []
        assert target.read_arrow("events").read_all().num_rows == 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("http", {"url": "https://host/rows?api_key=hunter2"}),
        ("iceberg", {"catalog": {"uri": "https://host", "header.Authorization": "hunter2"}}),
        ("iceberg", {"catalog": {"uri": "https://host", "adls.account-key": "hunter2"}}),
        ("iceberg", {"catalog": {"uri": "postgresql://host/db?password=hunter2"}}),
    ],
)
def test_secrets_are_not_settings(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        parse_settings(kind, settings)
    assert "hunter2" not in json.dumps(caught.value.as_dict())


def test_who_is_below_the_known_deletions_is_not_told_to_go_on_at_the_mark(lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    lake.merge("users", rows(1, 2, 3))
    add_http(lake, receiver, table="users", protected=False)
    ran(lake)
    lake.delete("users", "id = 2")
    for number in range(10, 20):
        lake.merge("users", rows(number))
    lake.maintain.expire(keep="0s")
    error = lake.sinks.run("out").error
    assert error is not None
    assert "--from mark" not in error.advice
    assert "empty the destination first" in error.advice
    lake.sinks.replay("out", start="beginning")
    ran(lake)
    assert set(folded(receiver.rows)) >= {1, 3, *range(10, 20)}
