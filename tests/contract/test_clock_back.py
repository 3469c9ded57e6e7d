"""A clock that goes back a day: no time in Iceberg's metadata falls, in the lake and at a destination.

The first commits are made by a clock that is a day ahead, so that for all later ones time went back; PyIceberg, which
fills in times of its own, has the real clock throughout.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyiceberg.table.metadata import TableMetadata

import floodmark as fm
from floodmark.catalog.riders import AuditRider
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, rows
from tests.contract.test_iceberg_sink import Elsewhere

DAY_NS = 24 * 3600 * 10**9


@contextmanager
def a_day_ahead() -> Iterator[None]:
    real = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: real() + DAY_NS)
        yield


def check_times(metadata: TableMetadata) -> None:
    """What Iceberg Java asks of a metadata file when it reads it, without its tolerance of a minute."""
    log = [entry.timestamp_ms for entry in metadata.snapshot_log]
    files = [entry.timestamp_ms for entry in metadata.metadata_log]
    snapshots = [snapshot.timestamp_ms for snapshot in sorted(metadata.snapshots, key=lambda one: one.sequence_number)]
    for times in (log, files, snapshots):
        assert times == sorted(times)
        assert metadata.last_updated_ms >= max(times, default=0)


def test_times_of_the_lakes_tables_never_fall(place: Place) -> None:
    with place.open(create=True) as lake:
        with a_day_ahead():
            lake.create_table("events", "id long not null, name string", key=["id"])
            lake.append("events", rows(1))
        ahead = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location).last_updated_ms
        lake.branches.create("dev")
        lake.append("events", rows(5), branch="dev")
        lake.append("events", rows(2))
        lake.merge("events", rows(1, 3))
        shape = {"columns": {"id": "long not null", "name": "string", "more": "string"}, "key": ["id"]}
        lake.apply({"events": shape})
        lake.branches.merge("dev")
        lake.delete("events", "id = 3")
        lake.maintain.compact("events", files_min=2)
        metadata = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)
        assert metadata.last_updated_ms >= ahead
        check_times(metadata)
        commits = [commit.committed_ms for commit in lake.history()]
        assert commits == sorted(commits, reverse=True)
        check_lake(lake.catalog)


@pytest.mark.mostly_sqlite
def test_times_at_an_iceberg_destination_never_fall(lake: fm.Lake, tmp_path: Path) -> None:
    there = Elsewhere(tmp_path)
    lake.sinks.add("out", kind="iceberg", tables=["events"], catalog=there.properties)
    with a_day_ahead():
        lake.append("events", rows(1))
        lake.sinks.run("out")
    ahead = there.table("events").metadata.last_updated_ms
    for number in (2, 3, 4):
        lake.append("events", rows(number))
        lake.sinks.run("out")
        check_times(there.table("events").metadata)
    assert there.table("events").metadata.last_updated_ms > ahead
    assert [row["id"] for row in there.rows("events")] == [1, 2, 3, 4]


def test_what_recovery_reported_is_in_the_order_in_which_it_happened(place: Place) -> None:
    """Two reports of one millisecond, and one of a clock that went back."""
    with place.open(create=True) as lake:
        for number, now_ms in enumerate((2_000, 2_000, 1_000, 3_000)):
            with lake.catalog.database.write() as tx:
                AuditRider("job", "running", "resumed", str(number)).apply(tx, f"run {9 - number}", None, now_ms)
        assert [(row.detail, row.at_ms) for row in reversed(lake.audit())] == [
            ("0", 2_000),
            ("1", 2_001),
            ("2", 2_002),
            ("3", 3_000),
        ]
