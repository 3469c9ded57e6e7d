"""Expiry and what it leaves for a sweep: grace, floors of deletions, marks of consumers, records of maintenance."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import RECORDS_KEPT, Consumer, Maintenance
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows

FOREVER_MS = 2**60


def dead(lake: fm.Lake, grace_ms: int = 0) -> dict[str, list[int]]:
    return {one.table: sorted(one.dead) for one in lake.catalog.expiry.states(grace_ms)}


def test_states_wait_for_the_grace_and_the_newest_few_stay(lake: fm.Lake) -> None:
    versions = [lake.append("events", rows(number)).version for number in range(SNAPSHOTS_KEPT + 3)]
    assert dead(lake) == {}
    lake.catalog.expiry.expire(FOREVER_MS)
    assert dead(lake, grace_ms=60_000) == {}
    assert dead(lake) == {"events": [1, *versions[:3]]}
    # What engines that read the table's metadata by themselves find in it is there.
    metadata = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)
    gone = set(dead(lake)["events"])
    named = {state.snapshot for state in lake.catalog.expiry.all_states(0)[0].states if state.version in gone}
    assert named.isdisjoint(one.snapshot_id for one in metadata.snapshots)
    check_lake(lake.catalog)


def test_a_state_that_a_held_version_of_another_table_still_sees_is_not_dead(lake: fm.Lake) -> None:
    for number in range(3):
        lake.append("events", rows(number))
    seen = lake.append("notes", rows(1)).version  # sees events as they are now
    for number in range(3, 5 + SNAPSHOTS_KEPT):
        lake.append("events", rows(number))
    pin = lake.catalog.history.pin(seen, holder="test", reason="a look back")
    lake.catalog.expiry.expire(FOREVER_MS)
    assert seen - 1 not in dead(lake)["events"]
    assert lake.maintain.sweep(grace="0s").outcome == "swept"
    assert ids(lake, version=seen) == [0, 1, 2]
    lake.catalog.history.unpin(pin)
    lake.catalog.expiry.expire(FOREVER_MS)
    assert seen - 1 in dead(lake)["events"]
    lake.maintain.sweep(grace="0s")
    check_lake(lake.catalog)


def test_a_version_that_touched_no_table_has_its_grace_too(lake: fm.Lake) -> None:
    for number in range(2 + SNAPSHOTS_KEPT):
        lake.append("events", rows(number))
    lake.append("events", [], batch="empty")  # only its id is recorded
    for number in range(10, 12 + SNAPSHOTS_KEPT):
        lake.append("events", rows(number))
    lake.catalog.expiry.expire(FOREVER_MS)
    assert dead(lake, grace_ms=60_000) == {}
    assert dead(lake)["events"]
    lake.maintain.sweep(grace="0s")
    lake.maintain.sweep(grace="0s", deep=True)
    with lake.catalog.database.read() as tx:
        assert "" not in set(tx.execute(select(tables.expired.c.table_id)).scalars())
    check_lake(lake.catalog)


# ── deletions ──


@pytest.fixture
def keyed(place: Place) -> fm.Lake:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("users", EVENTS, key=["id"])
        lake.append("users", rows(*range(10)))
        for number in range(4):
            lake.delete("users", f"id = {number}")
        lake.append("users", rows(99))
        yield lake


def deleted(lake: fm.Lake, since: int | None) -> list[int]:
    found = lake.changes("users", since).arrow().read_all().to_pylist()
    return sorted(row["id"] for row in found if row["_change"] == "delete")


def test_deletions_go_with_their_versions_and_a_since_below_is_refused(keyed: fm.Lake) -> None:
    assert deleted(keyed, 2) == [1, 2, 3]
    keyed.catalog.expiry.expire(FOREVER_MS)
    with pytest.raises(fm.BelowRetention) as caught:
        keyed.changes("users", since=2)
    assert caught.value.facts["oldest"] == 5
    # Files stay for the grace: a reader that planned before still reads them.
    with keyed.catalog.database.read() as tx:
        kept = tx.execute(select(tables.deletions.c.location)).scalars().all()
    assert len(kept) == 4
    assert all(map(keyed.catalog.storage.exists, kept))
    keyed.maintain.sweep(grace="60s")
    assert all(map(keyed.catalog.storage.exists, kept))
    keyed.maintain.sweep(grace="0s")
    assert not any(map(keyed.catalog.storage.exists, kept))
    assert deleted(keyed, 5) == []
    assert deleted(keyed, None) == []
    assert sorted(row["id"] for row in keyed.changes("users").arrow().read_all().to_pylist()) == ids(keyed, "users")
    check_lake(keyed.catalog)


def test_deletions_wait_for_every_protected_consumer(keyed: fm.Lake) -> None:
    table_id = keyed.catalog.history.head("users").table_id
    keyed.catalog.maintenance.put_consumer(Consumer("slow", table_id, 3))
    keyed.catalog.maintenance.put_consumer(Consumer("quick", table_id, 6))
    keyed.catalog.maintenance.put_consumer(Consumer("careless", table_id, 0, protected=False))
    keyed.catalog.expiry.expire(FOREVER_MS)
    assert deleted(keyed, 3) == [2, 3]
    with pytest.raises(fm.BelowRetention):
        keyed.changes("users", since=1)
    keyed.maintain.sweep(grace="0s")
    assert deleted(keyed, 3) == [2, 3]
    # The consumer went on; its versions were swept long ago, its deletions follow.
    keyed.catalog.maintenance.put_consumer(Consumer("slow", table_id, 6))
    keyed.catalog.expiry.expire(FOREVER_MS)
    keyed.maintain.sweep(grace="0s")
    with keyed.catalog.database.read() as tx:
        assert tx.execute(select(tables.deletions)).all() == []
    check_lake(keyed.catalog)


def test_a_mark_never_goes_down_within_an_epoch(keyed: fm.Lake) -> None:
    table_id = keyed.catalog.history.head("users").table_id
    upkeep = keyed.catalog.maintenance
    upkeep.put_consumer(Consumer("sink", table_id, 5))
    upkeep.put_consumer(Consumer("sink", table_id, 3))
    assert [one.mark for one in upkeep.consumers(table_id)] == [5]
    upkeep.put_consumer(Consumer("sink", table_id, 3, epoch=1))
    assert [(one.mark, one.epoch) for one in upkeep.consumers(table_id)] == [(3, 1)]


# ── readers that are too slow ──


def test_a_reader_that_outlasts_the_grace_is_told_so(lake: fm.Lake) -> None:
    lake.append("events", rows(*range(5)))
    old = lake.append("events", rows(7)).version
    slow = lake.read_arrow("events")
    at_old = lake.read_arrow("events", version=old)
    for number in range(10, 12 + SNAPSHOTS_KEPT):
        lake.append("events", rows(number))
    lake.maintain.compact("events", files_min=2)
    for number in range(30, 32 + SNAPSHOTS_KEPT):
        lake.append("events", rows(number))
    lake.maintain.expire(keep="0s")
    lake.maintain.sweep(grace="0s")
    for reader in (slow, at_old):
        with pytest.raises(fm.BelowRetention, match="ended while it was read"):
            reader.read_all()
    check_lake(lake.catalog)


# ── records ──


def test_the_record_of_maintenance_is_bounded_and_newest_first(lake: fm.Lake) -> None:
    upkeep = lake.catalog.maintenance
    for number in range(RECORDS_KEPT + 5):
        upkeep.record(Maintenance("compact", "events", f"outcome {number}", {"number": number}, "table-1"))
        if number % 20 == 0:
            time.sleep(0.002)
    upkeep.record(Maintenance("sweep", "", "swept"))
    found = upkeep.records(table_id="table-1", limit=1000)
    assert len(found) == RECORDS_KEPT
    assert {one.detail["number"] for one in found} <= set(range(RECORDS_KEPT + 5))
    assert {(one.verb, one.table_id) for one in upkeep.newest()} == {("compact", "table-1"), ("sweep", "")}


# ── files that are not ours ──


def test_files_that_came_with_an_adopted_table_are_never_deleted(lake: fm.Lake, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    foreign = SqlCatalog("f", uri=f"sqlite:///{tmp_path}/foreign/f.db", warehouse=f"file://{tmp_path}/foreign")
    foreign.create_namespace("default")
    data = pa.table({"id": pa.array([1, 2], pa.int64())})
    table = foreign.create_table("default.old", data.schema, properties={"format-version": "2"})
    for _ in range(3):
        table.append(data)
    location = foreign.load_table("default.old").metadata_location
    lake.adopt("one", location)
    lake.adopt("two", location)
    assert lake.maintain.compact("one", files_min=2).outcome == "compacted"
    for number in range(2 + SNAPSHOTS_KEPT):
        lake.append("one", [{"id": number}])
    lake.maintain.expire(keep="0s")
    report = lake.maintain.sweep("one", grace="0s")
    # Three data files, three manifests and a list were there before.
    assert (report.outcome, sum(record.detail["foreign_files"] for record in report.records)) == ("swept", 7)
    lake.maintain.sweep(grace="0s", deep=True)
    assert ids(lake, "two") == [1, 1, 1, 2, 2, 2]
    assert foreign.load_table("default.old").scan().to_arrow().num_rows == 6
    assert ids(lake, "one") == sorted([1, 1, 1, 2, 2, 2, *range(2 + SNAPSHOTS_KEPT)])
    check_lake(lake.catalog)


# ── lost replies ──


@pytest.mark.parametrize("mode", ["before", "after"])
def test_an_expiry_is_said_to_have_happened_if_and_only_if_it_has(lake: fm.Lake, mode: str) -> None:
    fired, number = True, 0
    while fired:
        number += 1
        wanted = [lake.append("events", rows(number)).version - 1, *lake.catalog.expiry.expirable(FOREVER_MS)]
        faults = DatabaseFaults(lake.catalog.database, fail_at=number, mode=mode)
        try:
            gone = lake.catalog.expiry.expire(FOREVER_MS)
        except fm.Unavailable:
            gone = []
        finally:
            faults.remove()
        fired = faults.fired
        assert all(lake.catalog.history.is_expired(version) for version in gone)
        assert gone or not any(map(lake.catalog.history.is_expired, wanted)), (
            f"fault {number} ({mode}) was told as none"
        )
        lake.catalog.expiry.expire(FOREVER_MS)
    assert number > 5
    check_lake(lake.catalog)
