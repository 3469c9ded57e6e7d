"""Official Iceberg Java reads our tables, and what it would do to them is refused or recognised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from floodmark.commit.metadata import MetadataFiles
from floodmark.repair.examine import examine_lake
from floodmark.storage import Storage
from tests.conftest import EVENTS, Place, ids, rows
from tests.contract.test_clock_back import a_day_ahead
from tests.contract.test_iceberg_sink import Elsewhere
from tests.interop.iceberg_java import IcebergJava
from tests.unit.test_file_columns import same


@pytest.fixture
def place(new_place: Callable[[str], Place]) -> Place:
    return new_place("sqlite")


def test_iceberg_java_reads_our_rows_and_metadata(place: Place, iceberg_java: IcebergJava) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
        lake.append("events", rows(3))
        location = lake.show("events")["metadata_location"]
    assert sorted(row["id"] for row in iceberg_java.rows(location)) == [1, 2, 3]
    found = iceberg_java.describe(location)
    times = [one["timestamp_ms"] for one in found["snapshots"]]
    assert times == sorted(times)
    assert found["last_updated_ms"] >= times[-1]
    assert [one["operation"] for one in found["snapshots"]] == ["append", "append"]


def files_of(place: Place) -> set[Path]:
    return set(Path(place.path, "tables").rglob("*.*"))


def test_iceberg_java_may_not_expire_snapshots_of_our_tables(place: Place, iceberg_java: IcebergJava) -> None:
    """Without the property it would: then files of versions that can be read go, and `doctor` names the versions."""
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        for number in (1, 2, 3):
            lake.overwrite("events", rows(number))
    before = files_of(place)
    refused = iceberg_java.commit("expire", place, "events")
    assert refused["error"] == "ValidationException", refused
    assert "GC is disabled" in refused["message"]
    assert files_of(place) == before
    with place.open() as lake:
        assert [ids(lake, version=version) for version in (2, 3, 4)] == [[1], [2], [3]]

    iceberg_java.commit("set", place, "events", "gc.enabled", "true")
    assert "error" not in iceberg_java.commit("expire", place, "events")
    assert before - files_of(place), "the reader's clean-up deletes, where it may"
    with place.open(recover=False) as lake:
        (planned,) = lake.repair()
        assert planned.unreadable == (2, 3)
        assert "lost" not in " ".join(planned.ways)
        assert not all(check.passed for check in examine_lake(lake.catalog))
        lake.repair(apply=True)
        assert lake.give_up_unreadable(apply=True).versions == (2, 3)
        assert all(check.passed for check in examine_lake(lake.catalog))
        assert ids(lake) == [3]
    assert "error" in iceberg_java.commit("expire", place, "events"), "switched off again"


@pytest.mark.parametrize("starting_sequence", ["true", "false"])
def test_files_and_manifests_that_iceberg_java_rewrites_are_recognised(
    place: Place, iceberg_java: IcebergJava, starting_sequence: str
) -> None:
    """rewrite_data_files gives files the sequence of its start, or a new one: either way rows keep their own."""
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        for number in (1, 2, 3):
            lake.append("events", rows(number))
    for command, arguments, happened in (
        ("rewrite-data", [starting_sequence], "rewritten"),
        ("rewrite-manifests", [], "changed"),
    ):
        answer = iceberg_java.commit(command, place, "events", *arguments)
        assert answer.get("operation") == "replace", answer
        with place.open() as lake:
            (planned,) = lake.repair()
            assert (planned.happened, planned.choice) == (happened, "revert")
            assert "rewrote" in planned.detail
            lake.repair(apply=True)
            found = lake.changes("events").arrow().read_all().to_pylist()
            assert sorted((row["id"], row["_seq"]) for row in found) == [(1, 1), (2, 2), (3, 3)]
            assert lake.changes("events", 3).arrow().read_all().num_rows == 0
            location = lake.show("events")["metadata_location"]
    assert sorted(row["id"] for row in iceberg_java.rows(location)) == [1, 2, 3]


def test_manifests_that_iceberg_java_wrote_are_planned_like_our_own(place: Place, iceberg_java: IcebergJava) -> None:
    """Its entries, with and without sequences of their own, as columns and as PyIceberg's objects."""
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        for number in (1, 2, 3):
            lake.append("events", rows(number))
    compared = 0
    for command, *arguments in (("rewrite-data", "true"), ("rewrite-manifests",)):
        answer = iceberg_java.commit(command, place, "events", *arguments)
        assert answer.get("operation") == "replace", answer
        with place.open(recover=False) as lake:
            current = lake.catalog.history.current_tables("main", ["events"])["events"]
            files = MetadataFiles(Storage())
            snapshot = files.metadata(current.pointer or "").current_snapshot()
            assert snapshot is not None
            compared += sum(same(files, manifest).count for manifest in files.manifests(snapshot.manifest_list))
            lake.repair(apply=True)
    assert compared >= 2


def test_iceberg_java_reads_tables_and_destinations_after_the_clock_went_back_a_day(
    place: Place, iceberg_java: IcebergJava, tmp_path: Path
) -> None:
    """Its parser tolerates a minute: a commit by a clock that is a day behind must not go below the one before."""
    (tmp_path / "elsewhere").mkdir()
    there = Elsewhere(tmp_path / "elsewhere")
    with place.open(create=True) as lake:
        with a_day_ahead():
            lake.create_table("events", EVENTS)
            lake.sinks.add("out", "iceberg", tables="events", catalog=there.properties)
            lake.append("events", rows(1))
            lake.sinks.run("out")
        for number in (2, 3):
            lake.append("events", rows(number))
            lake.sinks.run("out")
        ours = lake.catalog.history.head("events").metadata_location
    for location in (ours, there.table("events").metadata_location):
        assert sorted(row["id"] for row in iceberg_java.rows(location)) == [1, 2, 3]
