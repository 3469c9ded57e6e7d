"""Maintenance of what an Iceberg sink ships to: bounded metadata, other writers' files untouched, recorded outcomes.

The destination is a real SQL catalog of PyIceberg in another folder, with another writer beside the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table

import floodmark as fm
from floodmark import clock, failpoints
from floodmark.maintenance.record import SINK_VERBS
from floodmark.sinks.iceberg.maintain import Owner, plan_expiry
from floodmark.testing.children import preload, run_killed
from tests.conftest import EVENTS, Place, at, rows
from tests.contract.test_clock_back import a_day_ahead
from tests.contract.test_iceberg_sink import Elsewhere

preload("tests.contract.test_iceberg_maintenance")

ARROW = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
COMPACT, EXPIRE, SWEEP = SINK_VERBS


@pytest.fixture
def there(tmp_path: Path) -> Elsewhere:
    (tmp_path / "elsewhere").mkdir()
    return Elsewhere(tmp_path / "elsewhere")


@pytest.fixture
def lake(new_place: Any, there: Elsewhere) -> Iterator[fm.Lake]:
    place: Place = new_place("sqlite")
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.sinks.add("out", "iceberg", tables="events", catalog=there.properties, keep_snapshots="0s")
        yield lake


def ship(lake: fm.Lake, *numbers: int) -> None:
    for number in numbers:
        lake.append("events", rows(number))
        assert lake.sinks.run("out").outcome == "shipped"


def ids(table: Table) -> list[int]:
    return sorted(table.scan().to_arrow()["id"].to_pylist())


def files(there: Elsewhere) -> set[str]:
    return {str(path) for path in (there.folder / "files").rglob("*") if path.is_file()}


def strip(location: str) -> str:
    return location.removeprefix("file://")


def named(table: Table) -> set[str]:
    """Every file that the table needs, on any ref."""
    found = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
    for snapshot in table.metadata.snapshots:
        found.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(table.io):
            found.add(manifest.manifest_path)
            found |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return {strip(one) for one in found}


def outcomes(done: Any) -> dict[str, str]:
    return {record.verb: record.outcome for record in done.records}


def test_many_small_units_leave_few_files_and_all_rows(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, *range(40))
    before = files(there)
    done = lake.sinks.maintain("out", files_min=2)
    assert outcomes(done) == {COMPACT: "compacted", EXPIRE: "expired", SWEEP: "swept"}
    table = there.table("events")
    assert ids(table) == list(range(40))
    assert len(table.metadata.snapshots) == 1
    after = files(there)
    assert named(table) <= after
    assert len(after) < len(before) / 3
    ship(lake, 40)
    assert ids(there.table("events")) == list(range(41))


def test_metadata_files_are_bounded_by_the_tables_own_rule(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, *range(30))
    lake.sinks.maintain("out", verbs=[SWEEP])
    # The current one, those of its log, and the one that made the table.
    assert sum(path.endswith(".metadata.json") for path in files(there)) <= 22


def test_metadata_files_of_a_table_without_that_rule_are_swept(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 0)
    with there.catalog() as catalog, catalog.load_table("default.events").transaction() as change:
        change.set_properties({"write.metadata.delete-after-commit.enabled": "false"})
        change.set_properties({"write.metadata.previous-versions-max": "2"})
    kept = {path for path in files(there) if path.endswith(".metadata.json")}
    ship(lake, *range(1, 9))
    lake.sinks.maintain("out", verbs=[EXPIRE, SWEEP])
    left = {path for path in files(there) if path.endswith(".metadata.json")}
    table = there.table("events")
    assert left - kept <= named(table), "files of this sink's own commits that nothing names are gone"
    someone_elses = strip(next(iter(sorted(kept)[-1:])))
    assert someone_elses in left, "the metadata file of another writer's commit stays"


def test_another_writers_files_and_snapshots_are_never_touched(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1)
    there.table("events").append(pa.Table.from_pylist(rows(100), schema=ARROW))
    theirs = there.table("events").metadata.current_snapshot_id
    orphan = there.folder / "files" / "default.db" / "events" / "data" / "theirs.parquet"
    orphan.parent.mkdir(parents=True, exist_ok=True)
    orphan.write_bytes(b"a file of another writer that nothing names yet")
    ship(lake, 2, 3)
    assert outcomes(lake.sinks.maintain("out", verbs=[EXPIRE, SWEEP])) == {EXPIRE: "expired", SWEEP: "swept"}
    table = there.table("events")
    assert table.metadata.snapshot_by_id(theirs) is not None
    assert orphan.exists()
    assert ids(table) == [1, 2, 3, 100]
    assert named(table) <= files(there), "also what the other writer's snapshot names is there"


def test_tags_and_branches_keep_what_they_name(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1, 2, 3)
    table = there.table("events")
    first, second, _ = [one.snapshot_id for one in table.metadata.snapshots]
    with table.manage_snapshots() as change:
        change.create_tag(first, "monday")
    with there.table("events").manage_snapshots() as change:
        change.create_branch(second, "side")
    ship(lake, 4)
    lake.sinks.maintain("out", verbs=[EXPIRE, SWEEP])
    table = there.table("events")
    assert {first, second, table.metadata.current_snapshot_id} == {one.snapshot_id for one in table.metadata.snapshots}
    assert sorted(table.scan(snapshot_id=first).to_arrow()["id"].to_pylist()) == [1]
    assert sorted(table.scan(snapshot_id=second).to_arrow()["id"].to_pylist()) == [1, 2]


@pytest.mark.parametrize(
    ("properties", "expired"),
    [
        ({"gc.enabled": "false"}, 0),
        ({"history.expire.max-snapshot-age-ms": str(10**9)}, 0),
        ({"history.expire.min-snapshots-to-keep": "3"}, 1),
        ({}, 3),
    ],
)
def test_the_tables_own_rules_are_honoured(
    lake: fm.Lake, there: Elsewhere, properties: dict[str, str], expired: int
) -> None:
    ship(lake, 1, 2, 3, 4)
    if properties:
        with there.table("events").transaction() as change:
            change.set_properties(properties)
    before = files(there)
    done = lake.sinks.maintain("out", verbs=[EXPIRE, SWEEP])
    assert len(there.table("events").metadata.snapshots) == 4 - expired
    if "gc.enabled" in properties:
        assert outcomes(done) == {EXPIRE: "protected", SWEEP: "protected"}
        assert files(there) == before


def test_keep_is_what_a_person_asked_for(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1, 2)
    assert outcomes(lake.sinks.maintain("out", verbs=[EXPIRE], keep="1d")) == {EXPIRE: "nothing_to_do"}
    assert outcomes(lake.sinks.maintain("out", verbs=[EXPIRE], keep="0s")) == {EXPIRE: "expired"}


def test_a_dry_run_changes_nothing_and_says_what_would_go(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1, 2, 3)
    before = files(there)
    done = lake.sinks.maintain("out", files_min=2, dry_run=True)
    assert outcomes(done) == {COMPACT: "planned", EXPIRE: "planned", SWEEP: "nothing_to_do"}
    assert files(there) == before
    assert lake.maintain.history() == []


def run_sink(place: Place) -> None:
    with place.open() as lake:
        lake.append("events", rows(50))
        lake.sinks.run("out")


@pytest.mark.parametrize("first_clock", [nullcontext, a_day_ahead], ids=["", "clock_went_back"])
def test_files_of_a_unit_that_was_given_up_go_once_a_later_one_is_there(
    new_place: Any, there: Elsewhere, first_clock: Callable[[], AbstractContextManager[None]]
) -> None:
    place: Place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.sinks.add("out", "iceberg", tables="events", catalog=there.properties, keep_snapshots="1d")
        with first_clock():
            ship(lake, 1)
        known = files(there)
        assert run_killed(run_sink, place, failpoint="unit.staged")
        left = files(there) - known
        assert any(path.endswith(".parquet") for path in left)
        assert outcomes(lake.sinks.maintain("out", verbs=[SWEEP])) == {SWEEP: "nothing_to_do"}, "it is open"
        lake.sinks.replay("out", start="mark")
        assert outcomes(lake.sinks.maintain("out", verbs=[SWEEP])) == {SWEEP: "nothing_to_do"}, "it is not fenced yet"
        assert left <= files(there)
        ship(lake, 51)
        assert outcomes(lake.sinks.maintain("out", verbs=[SWEEP])) == {SWEEP: "swept"}
        assert files(there).isdisjoint(left)
        assert ids(there.table("events")) == [1, 50, 51]
        assert named(there.table("events")) <= files(there)


@pytest.mark.whole
@pytest.mark.parametrize(
    "point", ["compact.rewritten", "compact.published", "destination.expired", "destination.swept"]
)
def test_killed_at_any_step_the_next_maintenance_ends_it(new_place: Any, there: Elsewhere, point: str) -> None:
    place: Place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.sinks.add("out", "iceberg", tables="events", catalog=there.properties, keep_snapshots="0s")
        ship(lake, 1, 2, 3)
        assert run_killed(maintain, place, failpoint=point)
        assert ids(there.table("events")) == [1, 2, 3]
        assert named(there.table("events")) <= files(there)
        lake.sinks.maintain("out", files_min=2)
        ship(lake, 4)
        lake.sinks.maintain("out", files_min=2)
        table = there.table("events")
        assert ids(table) == [1, 2, 3, 4]
        assert {path for path in files(there) if not path.endswith(".metadata.json")} <= named(table)
        assert len(table.metadata.snapshots) == 1


def maintain(place: Place) -> None:
    with place.open() as lake:
        lake.sinks.maintain("out", files_min=2)


def test_a_ship_between_judging_and_expiring_is_kept(lake: fm.Lake, there: Elsewhere) -> None:
    """The expiry is made on the refs that were judged."""
    ship(lake, 1, 2)
    with at("destination.expired", lambda: ship(lake, 3)):
        lake.sinks.maintain("out")
    assert ids(there.table("events")) == [1, 2, 3]
    assert named(there.table("events")) <= files(there)


def test_each_run_has_a_record_and_is_in_the_history_and_the_status(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1, 2, 3)
    lake.sinks.maintain("out", files_min=2)
    records = {record.verb: record for record in lake.maintain.history()}
    assert set(records) == set(SINK_VERBS)
    assert {record.table for record in records.values()} == {"default.events"}
    assert {record.detail["sink"] for record in records.values()} == {"out"}
    (line,) = lake.status()["sinks"]
    assert {one["verb"]: one["outcome"] for one in line["maintenance"]} == {
        COMPACT: "compacted",
        EXPIRE: "expired",
        SWEEP: "swept",
    }


def test_a_failure_is_a_record_and_in_the_health(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1)
    location = there.table("events").metadata_location
    Path(strip(location)).rename(strip(location) + ".away")
    done = lake.sinks.maintain("out", verbs=[EXPIRE])
    assert outcomes(done) == {EXPIRE: "failed"}
    assert done.exit_code != 0
    assert "sink_expire default.events failed" in lake.status()["health"]
    Path(strip(location) + ".away").rename(strip(location))
    lake.sinks.maintain("out", verbs=[EXPIRE])
    assert "sink_expire" not in lake.status()["health"]


def test_groups_that_cannot_be_improved_are_remembered(lake: fm.Lake, there: Elsewhere) -> None:
    """One file cannot hold them: each is tried once."""
    ship(lake, 1)
    with there.table("events").transaction() as change:
        change.set_properties({"write.target-file-size-bytes": "1"})
    ship(lake, 2, 3)
    first = lake.sinks.maintain("out", verbs=[COMPACT], files_min=2).records[0]
    again = lake.sinks.maintain("out", verbs=[COMPACT], files_min=2).records[0]
    if first.detail.get("hopeless"):
        assert again.detail["could_not_improve"] == len(first.detail["hopeless"])
    assert again.outcome in ("nothing_to_do", "below_threshold")


def test_only_iceberg_sinks_have_tables_to_maintain(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("plain", "files", tables="events", path=str(tmp_path / "plain"))
    with pytest.raises(fm.Invalid, match="kind iceberg"):
        lake.sinks.maintain("plain")


# ── how large a unit is ──


def test_a_unit_ends_before_the_commit_that_makes_it_too_large(lake: fm.Lake, there: Elsewhere) -> None:
    lake.sinks.set("out", unit_rows=5)
    for start in range(0, 12, 2):
        lake.append("events", rows(start, start + 1))
    assert lake.sinks.run("out").outcome == "shipped"
    assert ids(there.table("events")) == [0, 1, 2, 3]
    lake.sinks.run("out", until_empty=True)
    assert ids(there.table("events")) == list(range(12))
    assert len(there.table("events").metadata.snapshots) == 3


def test_one_large_commit_is_one_unit(lake: fm.Lake, there: Elsewhere) -> None:
    lake.sinks.set("out", unit_rows=1, unit_bytes=1)
    lake.append("events", rows(*range(10)))
    lake.append("events", rows(10))
    lake.sinks.run("out", until_empty=True)
    assert ids(there.table("events")) == list(range(11))
    assert len(there.table("events").metadata.snapshots) == 2


def test_a_keyed_row_that_changed_between_two_units_arrives_as_it_is(new_place: Any, there: Elsewhere) -> None:
    place: Place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("users", EVENTS, key=["id"])
        lake.sinks.add("out", "iceberg", tables="users", catalog=there.properties, unit_rows=2)
        lake.merge("users", rows(1, 2))
        lake.merge("users", [{"id": 1, "name": "new"}])
        lake.delete("users", "id = 2")
        lake.sinks.run("out", until_empty=True)
        assert there.rows("users") == [{"id": 1, "name": "new"}]


def test_expiry_is_planned_without_touching_what_a_branch_keeps(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1, 2, 3)
    metadata = there.table("events").metadata
    sink = lake.catalog.sinks.find("out")
    mine = Owner("out", sink.id, sink.tables[0].table_id)
    now = clock.now_ms() + 10
    assert len(plan_expiry(metadata, mine, now, 0)) == 2
    assert plan_expiry(metadata, mine, now, 0, at_least_ms=10**9) == []
    assert plan_expiry(metadata, Owner("other", "other", "t"), now, 0) == []
    assert "destination.expired" in failpoints.FAILPOINTS


def test_a_folder_that_is_written_otherwise_loses_no_file(lake: fm.Lake, there: Elsewhere) -> None:
    """Another engine writes the table's folder as file:/… or s3a://…: it is the same place."""
    ship(lake, 1, 2)
    table = there.table("events")
    respelled = table.location().replace("file:///", "file:/") + "/data"
    with table.transaction() as change:
        change.set_properties({"write.data.path": respelled})
    ship(lake, 3)
    lake.sinks.maintain("out", verbs=[SWEEP])
    lake.sinks.maintain("out", verbs=[COMPACT, SWEEP], files_min=2)
    assert ids(there.table("events")) == [1, 2, 3]


def test_snapshots_that_prove_that_the_table_was_set_back_are_kept(lake: fm.Lake, there: Elsewhere) -> None:
    ship(lake, 1, 2, 3)
    table = there.table("events")
    first = table.metadata.snapshots[0].snapshot_id
    with table.manage_snapshots() as change:
        change.set_current_snapshot(snapshot_id=first)
    there.table("events").append(pa.Table.from_pylist(rows(100), schema=ARROW))
    lake.append("events", rows(4))
    assert lake.sinks.run("out").outcome == "refused"
    assert outcomes(lake.sinks.maintain("out", verbs=[EXPIRE])) == {EXPIRE: "protected"}
    assert lake.sinks.run("out").outcome == "refused"


def test_a_metadata_file_of_a_commit_that_is_under_way_stays(
    lake: fm.Lake, there: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written, and the catalog's pointer is not moved yet."""
    ship(lake, 1)
    from pyiceberg.catalog.sql import SqlCatalog

    write = SqlCatalog._write_metadata
    swept: list[str] = []

    def and_then_sweep(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        if not swept:
            swept.append("")
            swept[0] = outcomes(lake.sinks.maintain("out", verbs=[SWEEP]))[SWEEP]

    monkeypatch.setattr(SqlCatalog, "_write_metadata", staticmethod(and_then_sweep))
    ship(lake, 2)
    assert swept == ["nothing_to_do"]
    assert ids(there.table("events")) == [1, 2]


def test_two_tables_in_one_destination_have_folders_of_their_own(lake: fm.Lake, there: Elsewhere) -> None:
    lake.create_table("notes", EVENTS)
    lake.sinks.add("both", "iceberg", tables=["events", "notes"], catalog=there.properties, table="all")
    lake.append("events", rows(1))
    lake.append("notes", rows(2))
    lake.sinks.run("both")
    folders = {path.name for path in there.folder.rglob("floodmark-*") if path.parent.name == "data"}
    assert len(folders) == 2
