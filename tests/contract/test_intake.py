"""From 202 to the table: each row that was taken is there once, whatever the table became meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import floodmark as fm
from floodmark.catalog.spools import DROPPED, HELD, RETRIED
from floodmark.ingest.intake import Intake, IntakeLimits
from floodmark.ingest.quarantine import drop, read_aside, retry
from floodmark.json_form import as_json
from floodmark.report.spools import read_spools
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.intake_world import QUICK, SLOW, bring, folder_of, intake_of, lines, rows_of, state_of, table_id, take

PEOPLE = "id long not null, name string"


@pytest.fixture
def people(lake: fm.Lake) -> Iterator[Intake]:
    """An intake of a lake that has a table with a key, too."""
    lake.create_table("people", PEOPLE, key=["id"])
    with intake_of(lake) as intake:
        yield intake


def test_what_was_taken_comes_in_once_and_is_told_with_its_version(lake: fm.Lake, people: Intake) -> None:
    landed = bring(lake, people, "events", *rows(1, 2), key="first")
    assert (landed.rows, landed.quarantined, landed.version) == (2, 0, lake.status()["version"])
    again = take(lake, people, "events", *rows(1, 2), key="first")
    assert (again.outcome, again.record) == ("already_taken", 0)
    assert people.wait(table_id(lake, "events"), again.record, 5) == landed
    with pytest.raises(fm.Invalid, match="Idempotency-Key"):
        take(lake, people, "events", *rows(3), key="first")
    assert ids(lake) == [1, 2]
    [state] = [as_json(one) for one in read_spools(lake.catalog)]
    mine = state_of(people, "events")
    assert state == {name: mine[name] for name in state}
    assert (state["state"], state["fed_records"], state["fed_rows"], state["version"]) == ("ok", 1, 2, landed.version)
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_records_that_wait_together_are_one_publish(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake:
        for number in range(20):
            take(lake, intake, "events", *rows(number))
        take(lake, intake, "notes", *rows(7))
        assert state_of(intake, "events")["state"] == "waiting"
        [events, _] = read_spools(lake.catalog)
        assert (events.state, events.waiting_records, events.waiting_rows) == ("waiting", 20, 20)
        before = lake.status()["version"]
        assert intake.drain(20)
        assert lake.status()["version"] == before + 2
        with pytest.raises(fm.Unavailable, match="stopping"):
            take(lake, intake, "events", *rows(21))
    assert (ids(lake), ids(lake, "notes")) == (list(range(20)), [7])
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_a_group_is_fed_when_it_has_so_many_rows(lake: fm.Lake) -> None:
    with intake_of(lake, replace(SLOW, group_rows_max=4)) as intake:
        first = take(lake, intake, "events", *rows(1, 2, 3))
        take(lake, intake, "events", *rows(4))
        assert intake.wait(table_id(lake, "events"), first.record, 20).rows == 3


def test_by_key_the_last_arrival_wins_and_deletions_count(lake: fm.Lake, people: Intake) -> None:
    bring(lake, people, "people", {"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1, "name": "c"})
    bring(
        lake, people, "people", {"_change": "delete", "id": 1}, {"id": 3, "name": "d"}, {"_change": "delete", "id": 9}
    )
    landed = bring(lake, people, "people", {"_change": "delete", "id": 2}, {"id": 2, "name": "e"})
    assert rows_of(lake, "people") == [{"id": 2, "name": "e"}, {"id": 3, "name": "d"}]
    assert landed.rows == 2
    # What is there already just so is a feed too: the position moves.
    assert bring(lake, people, "people", {"id": 3, "name": "d"}).rows == 1
    assert lake.catalog.spools.get(table_id(lake, "people")).position == 4  # type: ignore[union-attr]
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_a_row_that_does_not_bring_a_column_gets_its_default_and_one_that_brings_null_keeps_it(lake: fm.Lake) -> None:
    with intake_of(lake) as intake:
        bring(lake, intake, "events", {"id": 0})
        kind = {"type": "string", "default": "plain"}
        lake.apply({"events": {"columns": {"id": "long", "name": "string", "kind": kind}}})
        bring(
            lake, intake, "events", {"id": 1, "kind": "x"}, {"id": 2}, {"id": 3, "kind": None}, {"id": 4, "name": "n"}
        )
    assert rows_of(lake, "events") == [
        {"id": 0, "kind": "plain"},
        {"id": 1, "kind": "x"},
        {"id": 2, "kind": "plain"},
        {"id": 3},
        {"id": 4, "kind": "plain", "name": "n"},
    ]


@pytest.mark.mostly_sqlite
def test_a_record_that_may_add_columns_does_and_its_neighbours_may_not(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", {"id": 1})
        take(lake, intake, "events", {"id": 2, "colour": "red"}, evolve=True)
        take(lake, intake, "events", {"id": 3, "shape": "round"})
        intake.drain(20)
    assert rows_of(lake, "events") == [{"id": 1}, {"id": 2, "colour": "red"}]
    [aside] = lake.catalog.spools.quarantine()
    assert (aside.record, aside.rows) == (2, 1)
    check_lake(lake.catalog)


# ── rows that do not fit any more ──


def test_rows_that_do_not_fit_any_more_are_put_aside_and_passed(lake: fm.Lake, people: Intake) -> None:
    landed = bring(lake, people, "events", {"id": 1}, {"id": "x"}, {"id": 3, "gone": 1}, {"id": 4})
    assert (landed.rows, landed.quarantined) == (2, 2)
    assert ids(lake) == [1, 4]
    # A record with nothing else moves the position too.
    assert bring(lake, people, "events", b"{").quarantined == 1
    bring(lake, people, "events", *rows(5))
    assert ids(lake) == [1, 4, 5]
    row = lake.catalog.spools.get(table_id(lake, "events"))
    assert row is not None
    assert (row.position, row.rows, row.quarantined) == (3, 3, 3)
    assert [(one.record, one.rows, one.bad) for one in lake.catalog.spools.quarantine()] == [
        *((0, 2, {0: 2}), (1, 1, {1: 1}))
    ]
    assert lake.status()["quarantined"] == 3
    check_lake(lake.catalog)


def test_put_aside_rows_come_in_once_when_they_fit_or_are_given_up(lake: fm.Lake, people: Intake) -> None:
    bring(lake, people, "events", {"id": 1, "colour": "red"}, {"id": 2})
    bring(lake, people, "events", {"id": "never"})
    first, second = lake.catalog.spools.quarantine()
    with pytest.raises(fm.Invalid, match="colour"):
        retry(lake.engine, first.id)
    assert lake.catalog.spools.put_aside(first.id).state == HELD
    commit = retry(lake.engine, first.id, evolve=True).commit
    assert (commit.outcome, retry(lake.engine, first.id).commit.outcome) == ("committed", "already_committed")
    assert retry(lake.engine, first.id).commit.version == commit.version
    assert rows_of(lake, "events") == [{"id": 1, "colour": "red"}, {"id": 2}]
    with pytest.raises(fm.Conflict):
        drop(lake.catalog, first.id)
    assert drop(lake.catalog, second.id).state == DROPPED == drop(lake.catalog, second.id).state
    with pytest.raises(fm.Conflict):
        retry(lake.engine, second.id)
    assert {one.state for one in lake.catalog.spools.quarantine(state=None)} == {RETRIED, DROPPED}
    assert lake.catalog.spools.all()[0].quarantined == 0
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_what_another_table_refuses_is_found_row_by_row_and_the_rest_comes_in(lake: fm.Lake) -> None:
    lake.apply(
        {
            "customers": {"columns": {"id": "long"}, "key": ["id"]},
            "orders": {"columns": {"id": "long", "customer": "long"}, "references": {"customer": "customers.id"}},
        }
    )
    lake.append("customers", [{"id": number} for number in (1, 2, 3)])
    lake.append("orders", [{"id": 1, "customer": 1}])
    with intake_of(lake, SLOW) as intake:
        for record in ([1, 2, 9], [3, 8, 7], [2], [6]):
            take(lake, intake, "orders", *({"id": number, "customer": number} for number in record))
        take(lake, intake, "customers", {"_change": "delete", "id": 1}, {"id": 4})
        assert intake.drain(60)
        assert [row["id"] for row in rows_of(lake, "orders")] == [1, 1, 2, 2, 3]
        assert [row["id"] for row in rows_of(lake, "customers")] == [1, 2, 3, 4]
        asides = lake.catalog.spools.quarantine(table_id(lake, "orders"))
        assert sum(one.rows for one in asides) == 4
        [kept] = lake.catalog.spools.quarantine(table_id(lake, "customers"))
        assert (kept.rows, kept.error["kind"]) == (1, "Invalid")
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
@pytest.mark.parametrize("choice", ["keep_newer", "overwrite"])
def test_a_retry_does_not_undo_what_came_after_its_rows_unless_it_is_told_to(
    lake: fm.Lake, people: Intake, choice: str
) -> None:
    bring(lake, people, "people", {"id": 2, "name": "before"})
    bring(lake, people, "people", *({"id": number, "name": "old", "colour": "red"} for number in (1, 2, 3)))
    bring(lake, people, "people", {"id": 1, "name": "new"}, {"_change": "delete", "id": 3})
    bring(lake, people, "people", {"id": 3, "name": "new"})
    bring(lake, people, "people", {"_change": "delete", "id": 3})
    [held] = lake.catalog.spools.quarantine()
    before = rows_of(lake, "people")
    with pytest.raises(fm.Conflict, match="since they were set aside") as told:
        retry(lake.engine, held.id, evolve=True)
    assert told.value.facts["rows"] == 2
    assert rows_of(lake, "people") == before
    retried = retry(lake.engine, held.id, evolve=True, **{choice: True})
    old = [{"id": number, "name": "old", "colour": "red"} for number in (1, 2, 3)]
    if choice == "overwrite":
        assert (rows_of(lake, "people"), retried.left_out) == (old, 0)
    else:
        assert (rows_of(lake, "people"), retried.left_out) == ([{"id": 1, "name": "new"}, old[1]], 2)
    assert lake.status()["quarantined"] == 0
    check_lake(lake.catalog)


SHOP = {
    "customers": {"columns": {"id": "long"}, "key": ["id"]},
    "orders": {"columns": {"id": "long", "customer": "long"}, "references": {"customer": "customers.id"}},
}


@pytest.mark.mostly_sqlite
def test_few_rows_that_another_table_refuses_take_no_good_ones_with_them(lake: fm.Lake) -> None:
    lake.apply(SHOP)
    lake.append("customers", [{"id": 1}])
    wrong = set(range(7, 1000, 50))
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "orders", *({"id": n, "customer": -n if n in wrong else 1} for n in range(1000)))
        for n in range(1000, 1100):
            take(lake, intake, "orders", {"id": n, "customer": 1 if n % 2 else 2})
        before = lake.status()["version"]
        assert intake.drain(60)
        assert lake.status()["version"] == before + 1
    wrong |= set(range(1000, 1100, 2))
    assert {row["id"] for row in rows_of(lake, "orders")} == set(range(1100)) - wrong
    [aside] = lake.catalog.spools.quarantine()
    assert aside.rows == len(wrong)
    lines = read_aside(lake.catalog.storage, aside.location)
    assert (lines[0].line, lines[0].error["facts"]["examples"]) == (8, "customer=-7")
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_an_older_row_of_a_key_comes_in_if_the_newer_one_is_refused(lake: fm.Lake) -> None:
    lake.apply({**SHOP, "orders": {**SHOP["orders"], "key": ["id"]}})
    lake.append("customers", [{"id": 1}])
    with intake_of(lake) as intake:
        landed = bring(lake, intake, "orders", *({"id": 1, "customer": n} for n in (8, 1, 9, 8)))
        assert (landed.rows, landed.quarantined) == (2, 2)
        assert bring(lake, intake, "customers", {"_change": "delete", "id": 1}, {"id": 1}).quarantined == 0
        assert bring(lake, intake, "customers", {"id": 2}, {"_change": "delete", "id": 1}).quarantined == 1
    assert rows_of(lake, "orders") == [{"id": 1, "customer": 1}]
    assert rows_of(lake, "customers") == [{"id": 1}, {"id": 2}]
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_rows_wait_for_those_of_another_table_that_came_before_them(lake: fm.Lake) -> None:
    """The parent was acknowledged first, and its feed has time; its child's has not."""
    lake.apply(SHOP)
    with intake_of(lake, replace(SLOW, group_rows_max=10)) as intake:
        take(lake, intake, "customers", {"id": 1})
        landed = bring(lake, intake, "orders", *({"id": number, "customer": 1} for number in range(10)))
        assert (landed.rows, landed.quarantined) == (10, 0)
        assert bring(lake, intake, "orders", *({"id": n, "customer": n} for n in range(10))).quarantined == 9
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_rows_that_widen_the_key_of_their_table_all_come_in(lake: fm.Lake) -> None:
    lake.create_table("parts", "id int not null, name string", key=["id"])
    with intake_of(lake) as intake:
        assert bring(lake, intake, "parts", {"id": 2**40}, {"id": 5}, {"id": 2**40}, evolve=True).quarantined == 0
    assert rows_of(lake, "parts") == [{"id": 5}, {"id": 2**40}]


# ── the table goes, or is another one ──


@pytest.mark.mostly_sqlite
def test_a_table_that_is_gone_keeps_its_rows_in_the_spool_and_stops_no_other(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", *rows(1))
        take(lake, intake, "notes", *rows(2))
        lake.apply({"events": {"drop": True}}, allow_destructive=True)
        lake.create_table("events", EVENTS)
        intake.drain(20)
        old = next(one for one in intake.states() if one["error"])
        assert (old["state"], old["waiting_rows"]) == ("refused", 1)
        assert ids(lake, "notes") == [2]
        assert ids(lake) == []
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(3))
        assert sorted(one.state for one in read_spools(lake.catalog)) == ["ok", "ok", "refused"]
    assert ids(lake) == [3]


# ── back-pressure and failures ──


@pytest.mark.mostly_sqlite
def test_when_too_much_waits_nothing_more_is_taken(lake: fm.Lake) -> None:
    with intake_of(lake, replace(SLOW, waiting_bytes_max=2_000)) as intake:
        taken: list[int] = []

        def flood() -> None:
            for number in range(1000):
                take(lake, intake, "events", *rows(number))
                taken.append(number)

        with pytest.raises(fm.Busy, match="wait to be fed") as caught:
            flood()
        assert caught.value.advice
        assert intake.drain(20)
    assert ids(lake) == taken


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_lost_reply_of_the_publish_is_resolved_and_nothing_comes_twice(place: Place, mode: str) -> None:
    """Whichever call of the feed's publish fails, before its effect or after it, rows are in once and all of them."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        expected = []
        with intake_of(lake) as intake:
            bring(lake, intake, "events", *rows(0))
            there = table_id(lake, "events")
            for number, fail_at in enumerate(range(1, 90, 8), start=1):
                faults = DatabaseFaults(lake.catalog.database, fail_at=fail_at, mode=mode)
                try:
                    taken = intake.take("events", there, lines(*rows(number)), 1).result(20)
                    assert intake.wait(there, taken.record, 30).rows == 1
                finally:
                    faults.remove()
                expected.append(number)
            assert intake.drain(30)
        lake.recover()
        assert ids(lake) == [0, *expected]
        check_lake(lake.catalog)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_storage_call_that_fails_loses_and_doubles_nothing(new_place: Callable[[str], Place], mode: str) -> None:
    """Whichever call of a feed fails, also that which writes what is put aside: all is fed in the end, once."""
    place, number, fired = new_place("sqlite"), 0, True
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
    while fired:
        number += 1
        storage = FaultyStorage(fail_at=2 * number, mode=mode)
        with place.open(storage=storage, recover=False) as lake, intake_of(lake, SLOW) as intake:
            with suppress(fm.Unavailable):
                take(lake, intake, "events", {"id": number}, {"id": f"bad {number}"}, key=str(number))
            # Refused because of the fault: the client sends it again.
            take(lake, intake, "events", {"id": number}, {"id": f"bad {number}"}, key=str(number))
            assert intake.drain(30)
        fired = storage.fired
    assert number > 3
    with place.open() as lake:
        assert ids(lake) == list(range(1, number + 1))
        assert sum(one.rows for one in lake.catalog.spools.quarantine()) == number
        with intake_of(lake):
            pass
        check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_a_catalog_that_does_not_answer_is_waited_for_and_shown(lake: fm.Lake) -> None:
    with intake_of(lake) as intake:
        bring(lake, intake, "events", *rows(0))
        there = table_id(lake, "events")
        faults = DatabaseFaults(lake.catalog.database, fail_at=1, mode="before", stay_broken=True)
        try:
            assert intake.take("events", there, lines(*rows(1)), 1).result(10).outcome == "taken"
            with pytest.raises(fm.Unavailable, match="not yet"):
                intake.wait(there, 1, 0.5)
            _until(lambda: state_of(intake, "events")["error"] is not None)
            assert state_of(intake, "events")["state"] == "waiting"
        finally:
            faults.remove()
        assert intake.wait(there, 1, 30).rows == 1
        _until(lambda: state_of(intake, "events")["error"] is None)
    assert ids(lake) == [0, 1]


@pytest.mark.mostly_sqlite
def test_a_spool_that_cannot_let_go_of_its_files_is_fed_all_the_same_and_shown(lake: fm.Lake) -> None:
    with intake_of(lake, replace(QUICK, segment_bytes=300)) as intake:
        bring(lake, intake, "events", {"id": 0, "name": "x" * 300})
        folder = folder_of(lake) / table_id(lake, "events")
        (folder / "keys").mkdir()  # no file can have that name now
        for number in range(1, 5):
            assert bring(lake, intake, "events", {"id": number, "name": "x" * 300}, key=str(number)).rows == 1
        _until(lambda: state_of(intake, "events")["error"] is not None)
        assert len(list(folder.glob("*.segment"))) > 2
        (folder / "keys").rmdir()
        bring(lake, intake, "events", {"id": 5})
        _until(lambda: len(list(folder.glob("*.segment"))) == 1)
        assert state_of(intake, "events")["error"] is None
    assert ids(lake) == list(range(6))


def _until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.mostly_sqlite
def test_many_clients_at_once_lose_and_double_nothing_beside_other_writers(lake: fm.Lake) -> None:
    lake.create_table("people", PEOPLE, key=["id"])
    with intake_of(lake, IntakeLimits(group_wait_ms=20)) as intake:

        def client(first: int) -> None:
            for number in range(first, first + 40):
                take(lake, intake, "events", *rows(number), key=str(number))
                take(lake, intake, "people", *rows(number % 7))

        clients = [threading.Thread(target=client, args=(1000 * place,)) for place in range(4)]
        for one in clients:
            one.start()
        for number in range(5):
            lake.append("events", rows(90_000 + number))
        for one in clients:
            one.join()
        assert intake.drain(30)
    wanted = [1000 * place + number for place in range(4) for number in range(40)]
    assert ids(lake) == sorted([*wanted, *range(90_000, 90_005)])
    assert [row["id"] for row in rows_of(lake, "people")] == list(range(7))
    check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_a_read_only_lake_takes_no_rows(place: Place) -> None:
    place.open(create=True).close()
    with place.open(read_only=True) as lake, pytest.raises(fm.Invalid, match="read-only"):
        Intake(lake.engine, folder_of(lake), QUICK)
