"""Expiry and sweep: what nothing can refer to goes, what anything may still refer to stays; on every database."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import event, func, select, update

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import Consumer
from floodmark.commit.expiry import deletions_floor
from floodmark.commit.journal import CLEANED, LOOK_ONCE_MORE
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.storage.fileio import LakeFileIO
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from floodmark.testing.s3 import S3Server
from tests.conftest import EVENTS, Place, ids, rows

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite


def on_disk(lake: fm.Lake) -> set[str]:
    """Every file of the lake that is not the database's."""
    root = Path(lake.location.removeprefix("file://"))
    return {str(path) for path in root.rglob("*") if path.is_file() and not path.name.startswith("catalog.db")}


def path_of(location: str) -> str:
    return location.removeprefix("file://")


def commit_often(lake: fm.Lake, table: str = "events", first: int = 1000, count: int = SNAPSHOTS_KEPT) -> None:
    """Some more versions: the newest few of a table are never dead."""
    for number in range(first, first + count):
        lake.append(table, rows(number))


def expire_and_sweep(lake: fm.Lake, **options: Any) -> fm.Lake:
    assert lake.maintain.expire(keep="0s").outcome in ("expired", "nothing_to_do")
    assert lake.maintain.sweep(grace="0s", **options).outcome in ("swept", "nothing_to_do")
    return lake


def count_of(lake: fm.Lake, table: Any, *where: Any) -> int:
    with lake.catalog.database.read() as tx:
        return int(tx.execute(select(func.count()).select_from(table).where(*where)).scalar_one())


# ── what goes, what stays ──


def test_only_what_dead_versions_alone_name_goes(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(*range(10)))
    for number in range(8):
        lake.append("events", rows(number))
        lake.merge("people", [{"id": number, "name": "new"}])
    lake.delete("people", "id = 9")
    lake.maintain.compact(files_min=2)
    commit_often(lake)
    commit_often(lake, "people", count=6)
    before = {table: (ids(lake, table), on_disk(lake)) for table in ("events", "people")}
    assert lake.maintain.sweep(grace="0s").outcome == "nothing_to_do", "nothing has expired"
    live = {
        path_of(file) for table in before for file in lake.catalog.files.data_files(lake.catalog.history.head(table))
    }
    lake.maintain.expire(keep="0s")
    planned = lake.maintain.sweep(grace="0s", dry_run=True)
    listed = [path_of(file["file"]) for record in planned.records for file in record.detail["listing"]]
    assert planned.outcome == "planned"
    assert on_disk(lake) == before["events"][1], "a plan deletes nothing"
    done = lake.maintain.sweep(grace="0s")
    assert done.outcome == "swept"
    assert before["events"][1] - on_disk(lake) == set(listed), "what was planned, and nothing else"
    assert sum(record.detail["files"] for record in done.records) == len(listed) == len(set(listed))
    assert live <= on_disk(lake)
    assert {table: ids(lake, table) for table in before} == {table: found for table, (found, _) in before.items()}
    check_lake(lake.catalog)
    deep = lake.maintain.sweep(grace="0s", deep=True)
    assert (deep.outcome, on_disk(lake) & live) == ("nothing_to_do", live)
    assert [record.detail["unknown_files"] for record in deep.records] == [0] * len(deep.records)


def test_a_reader_has_its_grace_and_then_is_told(lake: fm.Lake) -> None:
    for number in range(4):
        lake.append("events", rows(number))
    version = lake.status()["version"]
    reader, slow = lake.read_arrow("events"), lake.changes("events", 1)
    lake.maintain.compact("events", files_min=2)
    commit_often(lake)
    lake.maintain.expire(keep="0s")
    there = on_disk(lake)
    assert lake.maintain.sweep(grace="1h").outcome == "nothing_to_do"
    assert on_disk(lake) == there
    assert sorted(reader.read_all()["id"].to_pylist()) == [0, 1, 2, 3], "begun before it expired, and within the grace"
    late = slow.arrow()
    lake.maintain.sweep(grace="0s")
    with pytest.raises(fm.BelowRetention):
        late.read_all()
    with pytest.raises(fm.BelowRetention):
        lake.read_arrow("events", version=version)


def test_pins_and_operations_at_work_hold_what_they_see(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    lake.append("events", rows(3))
    lake.delete("events", "id = 2")
    # A version that did not touch the table sees it as an older one left it, which may expire.
    pinned = lake.append("notes", rows(1)).version
    pin = lake.catalog.history.pin(pinned, holder="test", reason="a long read")
    lake.delete("events", "id = 1")
    held = lake.append("events", rows(4)).version
    operation = lake.catalog.journal.begin("append", branch="main", actor="test", message="slow")
    lake.maintain.compact("events", files_min=2)
    lake.delete("events", "id = 3")
    for _ in range(2):
        commit_often(lake)
        commit_often(lake, "notes")
        expire_and_sweep(lake, deep=True)
        assert ids(lake, version=pinned) == [1, 3]
        assert ids(lake, version=held) == [3, 4]
        check_lake(lake.catalog, settled=False)
    lake.catalog.journal.abandon(operation.id)
    lake.catalog.journal.mark_cleaned(operation.id)
    expire_and_sweep(lake)
    with pytest.raises(fm.BelowRetention):
        ids(lake, version=held)
    assert ids(lake, version=pinned) == [1, 3]
    lake.catalog.history.unpin(pin)
    before = on_disk(lake)
    expire_and_sweep(lake)
    assert len(on_disk(lake)) < len(before)
    check_lake(lake.catalog)
    with pytest.raises(fm.BelowRetention):
        lake.catalog.history.pin(pinned, holder="test", reason="too late")


def test_a_table_that_is_not_written_keeps_its_files_while_others_move_on(lake: fm.Lake) -> None:
    lake.append("notes", rows(1, 2, 3))
    lake.delete("notes", "id = 2")
    for _ in range(3):
        commit_often(lake, count=8)
        expire_and_sweep(lake, deep=True)
    assert ids(lake, "notes") == [1, 3]
    check_lake(lake.catalog)


# ── deletions and those who follow ──


def test_deletions_stay_for_a_consumer_and_go_when_it_has_passed(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(*range(6)))
    head = lake.catalog.history.head("people")
    mark = head.sequence
    lake.catalog.maintenance.put_consumer(Consumer("sink", head.table_id, mark))
    lake.catalog.maintenance.put_consumer(Consumer("careless", head.table_id, 0, protected=False))
    lake.delete("people", "id = 3")
    lake.delete("people", "id = 4")
    commit_often(lake, "people", first=50, count=8)
    expire_and_sweep(lake)
    expire_and_sweep(lake)
    assert deletions_floor(lake.catalog.database, head.table_id) <= mark
    changed = lake.changes("people", mark).arrow().read_all().to_pylist()
    assert sorted(row["id"] for row in changed if row["_change"] == "delete") == [3, 4]
    assert count_of(lake, tables.deletions) == 2
    # It goes on: half-way, then to the end.
    lake.catalog.maintenance.put_consumer(Consumer("sink", head.table_id, mark + 1))
    expire_and_sweep(lake)
    assert count_of(lake, tables.deletions) == 1
    with pytest.raises(fm.BelowRetention):
        lake.changes("people", mark)
    assert [row["id"] for row in deleted(lake, mark + 1)] == [4]
    lake.catalog.maintenance.put_consumer(Consumer("sink", head.table_id, mark + 2))
    expire_and_sweep(lake)
    assert count_of(lake, tables.deletions) == 0
    with pytest.raises(fm.BelowRetention):
        lake.changes("people", mark + 1)
    assert deleted(lake, mark + 2) == deleted(lake, None) == []
    check_lake(lake.catalog)
    assert lake.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
    assert not [path for path in on_disk(lake) if "deletions" in Path(path).name]


def test_deletions_stay_as_long_as_their_version_can_be_read(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(*range(6)))
    lake.delete("people", "id = 3")
    version = lake.delete("people", "id = 4").version
    pin = lake.catalog.history.pin(version, holder="test", reason="it may be asked what it deleted")
    commit_often(lake, "people", first=50, count=8)
    expire_and_sweep(lake)
    # The first went with its version; the second is held, and so is what comes after it.
    assert [row["id"] for row in deleted(lake, 2)] == [4]
    with pytest.raises(fm.BelowRetention):
        deleted(lake, 1)
    lake.catalog.history.unpin(pin)
    expire_and_sweep(lake)
    with pytest.raises(fm.BelowRetention):
        deleted(lake, 2)
    check_lake(lake.catalog)


def deleted(lake: fm.Lake, since: int | None) -> list[dict[str, Any]]:
    found = lake.changes("people", since).arrow().read_all().to_pylist()
    return [row for row in found if row["_change"] == "delete"]


def test_a_floor_that_rises_while_changes_are_asked_for_never_hides_a_deletion(lake: fm.Lake, place: Place) -> None:
    """The question is about deletions that are swept in its middle: it is refused, or answered in full."""
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(*range(6)))
    lake.delete("people", "id = 3")
    commit_often(lake, "people", first=50, count=8)
    engine = lake.catalog.database.engine
    with place.open() as other:
        waiting = [lambda: expire_and_sweep(other)]

        def between(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if "deletions_floor" in statement and waiting:
                waiting.pop()()

        event.listen(engine, "after_cursor_execute", between)
        try:
            found = deleted(lake, 1)
        except fm.BelowRetention:
            found = [{"id": 3}]
        finally:
            event.remove(engine, "after_cursor_execute", between)
        assert not waiting
    assert [row["id"] for row in found] == [3]


def test_a_slow_reader_of_deletions_that_are_swept_is_told_so(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(*range(6)))
    lake.delete("people", "id = 3")
    commit_often(lake, "people", first=50, count=8)
    slow = lake.changes("people", 1)
    expire_and_sweep(lake)
    with pytest.raises(fm.BelowRetention):
        slow.arrow().read_all()


# ── what executors leave ──


def operation_of(lake: fm.Lake, version: int) -> tuple[str, list[str]]:
    import json

    with lake.catalog.database.read() as tx:
        row = tx.execute(select(tables.operations).where(tables.operations.c.version == version)).one()
    return row.id, json.loads(row.folders)


def abandon_one(lake: fm.Lake) -> tuple[str, list[str]]:
    """An operation that was undone; its id and its folders."""
    location = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location).location
    operation = lake.catalog.journal.begin(
        "append", branch="main", actor="test", message="", table_locations=[location]
    )
    lake.catalog.storage.put(f"{operation.folders[1]}/first.parquet", b"of an executor")
    lake.catalog.journal.active.discard(operation.id)
    assert operation.id in lake.recover().rolled_back
    return operation.id, list(operation.folders)


def set_cleaned(lake: fm.Lake, operation: str, cleaned: int) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(update(tables.operations).where(tables.operations.c.id == operation).values(cleaned=cleaned))


def test_what_executors_write_after_the_end_of_their_operation_goes(lake: fm.Lake) -> None:
    """Healing has ended its looking; a sweep looks once more, and a deep one whenever it is asked to."""
    published = lake.append("events", rows(1, 2)).version
    for operation, folders in (abandon_one(lake), operation_of(lake, published)):
        live, late = on_disk(lake), f"{folders[1]}/late-00000.parquet"
        set_cleaned(lake, operation, LOOK_ONCE_MORE)
        lake.catalog.storage.put(late, b"of an executor that outlived its driver")
        lake.catalog.storage.put(f"{folders[2]}/late.avro", b"another one")
        assert lake.maintain.sweep(grace="1h").outcome == "nothing_to_do", "it may still be writing"
        assert on_disk(lake) - live == {path_of(late), path_of(f"{folders[2]}/late.avro")}
        assert lake.maintain.sweep(grace="0s", dry_run=True).records[0].detail["files"] == 2
        done = lake.maintain.sweep(grace="0s")
        assert (done.outcome, done.records[0].detail["leftovers"]) == ("swept", 2)
        assert on_disk(lake) == live
        assert count_of(lake, tables.operations, tables.operations.c.cleaned == LOOK_ONCE_MORE) == 0
        # Even later: no record leads there any more.
        lake.catalog.storage.put(late, b"an executor that slept for a week")
        assert lake.maintain.sweep(grace="0s").outcome == "nothing_to_do"
        assert lake.maintain.sweep(grace="0s", deep=True).outcome == "swept"
        assert on_disk(lake) == live
        check_lake(lake.catalog)
    assert ids(lake) == [1, 2]


def test_a_last_look_that_failed_is_made_again(place: Place) -> None:
    """Until it is made, the files of that operation's commit are kept: by them it is known what is left over."""
    storage = FaultyStorage(verbs=["list"])
    with place.open(create=True, storage=storage) as lake:
        lake.create_table("events", EVENTS)
        operation, folders = operation_of(lake, lake.append("events", rows(1)).version)
        lake.delete("events", "id = 1")
        set_cleaned(lake, operation, LOOK_ONCE_MORE)
        late = f"{folders[1]}/late.parquet"
        lake.catalog.storage.put(late, b"of an executor that outlived its driver")
        commit_often(lake, count=8)
        lake.maintain.expire(keep="0s")
        storage.fail_at = storage.calls_seen + 1
        failed = lake.maintain.sweep(grace="0s")
        assert storage.fired
        assert failed.exit_code == 4
        assert lake.catalog.storage.exists(late)
    with place.open() as lake:
        done = lake.maintain.sweep(grace="0s")
        assert done.outcome == "swept", done.as_dict()
        assert not lake.catalog.storage.exists(late)
        assert lake.maintain.sweep(grace="0s", deep=True).outcome == "nothing_to_do"
        check_lake(lake.catalog)


def test_a_deep_sweep_touches_neither_work_in_hand_nor_what_nobody_knows(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    location = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location).location
    operation = lake.catalog.journal.begin(
        "append", branch="main", actor="test", message="", table_locations=[location]
    )
    files = {
        f"{operation.folders[0]}/seal.json",
        f"{operation.folders[1]}/staged.parquet",
        f"{operation.folders[2]}/built.avro",
        f"{location}/data/readme.txt",
        f"{location}/data/01ARZ3NDEKTSV4RRFFQ69G5FAV/of-no-operation.parquet",
    }
    for file in files:
        lake.catalog.storage.put(file, b"somebody's")
    done = lake.maintain.sweep(grace="0s", deep=True)
    assert done.outcome == "nothing_to_do"
    assert done.records[-1].detail["unknown_files"] == 2
    assert {path_of(file) for file in files} <= on_disk(lake)
    lake.catalog.journal.active.discard(operation.id)
    lake.recover()
    lake.maintain.sweep(grace="0s", deep=True)
    assert {path_of(file) for file in files if operation.id in file}.isdisjoint(on_disk(lake))
    assert ids(lake) == [1]


@pytest.mark.parametrize("deep", [False, True])
def test_a_plan_writes_nothing_at_all(lake: fm.Lake, place: Place, deep: bool) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(1))
    lake.merge("people", rows(1), batch="nothing new")  # a version without a table
    commit_often(lake, count=8)
    lake.maintain.expire(keep="0s")
    before = database_content(lake), on_disk(lake)
    with place.open(read_only=True) as reader:
        planned = reader.maintain.sweep(grace="0s", deep=deep, dry_run=True)
        assert planned.outcome == "planned", planned.as_dict()
        assert reader.maintain.compact(files_min=2, dry_run=True).outcome == "planned"
        assert reader.maintain.expire(keep="0s", dry_run=True).outcome == "nothing_to_do"
    lake.maintain.sweep(grace="0s", deep=deep, dry_run=True)
    assert (database_content(lake), on_disk(lake)) == before


def database_content(lake: fm.Lake) -> dict[str, list[tuple[Any, ...]]]:
    with lake.catalog.database.read() as tx:
        return {
            table.name: sorted(map(tuple, tx.execute(select(table))), key=repr)
            for table in tables.metadata.sorted_tables
            if table.name != "fm_processes"
        }


# ── interrupted ──


def prepare_dead(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
        lake.delete("events", "id = 1")
        commit_often(lake, count=8)
        lake.maintain.expire(keep="0s")


def sweep_now(place: Place) -> str:
    with place.open() as lake:
        return lake.maintain.sweep(grace="0s").outcome


@pytest.mark.parametrize("point", ["data_deleted", "metadata_deleted"])
def test_a_sweep_that_was_stopped_does_not_block_one_with_a_longer_grace(place: Place, point: str) -> None:
    """What the first one had begun to delete is gone for good: the second must not take that for damage."""
    run_child(prepare_dead, place)
    assert run_killed(sweep_now, place, failpoint=f"sweep.{point}")
    with place.open() as lake:
        commit_often(lake, first=2000, count=8)
        lake.maintain.expire(keep="0s")
        for deep in (False, True):
            done = lake.maintain.sweep(grace="1h", deep=deep)
            assert done.outcome in ("nothing_to_do", "swept"), done.as_dict()
        expire_and_sweep(lake, deep=True)
        check_lake(lake.catalog)
        assert set(ids(lake)) == {2, *range(1000, 1008), *range(2000, 2008)}


class Interrupted(FaultyStorage):
    """A storage that lets another process act before one of its readings."""

    def __init__(self, act_at: int, act: Callable[[], object]) -> None:
        super().__init__()
        self._left = act_at
        self._act = act

    def _strikes(self, verb: str) -> bool:
        self._left -= verb == "read"
        if self._left == 0 and verb == "read":
            self._act()
        return False


@pytest.mark.parametrize("deep", [False, True])
def test_two_sweeps_at_once_do_not_take_each_others_work_for_damage(place: Place, deep: bool) -> None:
    """One has planned on states that the other, a little later, finds dead and deletes."""
    run_child(prepare_dead, place)
    with place.open() as other:
        number, acted = 0, [0]
        while acted and number < 8:
            number, acted = number + 1, []

            def act(acted: list[int] = acted, number: int = number) -> None:
                acted.append(number)
                commit_often(other, first=10_000 * number, count=SNAPSHOTS_KEPT)
                expire_and_sweep(other)

            commit_often(other, first=10_000 * number + 5_000, count=4)
            other.maintain.expire(keep="0s")
            with place.open(storage=Interrupted(number, act), recover=False) as lake:
                done = lake.maintain.sweep(grace="0s", deep=deep)
            assert done.outcome in ("swept", "nothing_to_do"), (number, done.as_dict())
        assert number > 1, "hardly anything was read"
        expire_and_sweep(other, deep=True)
        check_lake(other.catalog)


def test_a_sweep_that_failed_is_forgotten_when_the_next_one_finds_nothing_to_do(place: Place) -> None:
    """The reply to its last transaction was lost: the table is swept, and its health must not stay in question."""
    run_child(prepare_dead, place)
    with place.open() as lake:
        done = None
        for number in range(1, 5):
            commit_often(lake, first=5_000 * number, count=SNAPSHOTS_KEPT)
            lake.maintain.expire(keep="0s")
            laid: list[DatabaseFaults] = []

            def lose(point: str, laid: list[DatabaseFaults] = laid, number: int = number) -> None:
                if point == "sweep.metadata_deleted":
                    laid.append(DatabaseFaults(lake.catalog.database, fail_at=number, mode="after"))

            failpoints.observer = lose
            try:
                done = lake.maintain.sweep(grace="0s")
            finally:
                failpoints.observer = None
                laid[0].remove()
            for record in done.records:
                assert record.detail.get("error") in (None, "Unavailable"), "a kind that callers know"
            assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
            assert lake.status()["health"] == "fine", f"after fault {number}"
        check_lake(lake.catalog)


# ── tables that other engines made ──


def test_files_that_two_tables_share_are_not_deleted_under_one_of_them(lake: fm.Lake, tmp_path: Path) -> None:
    """A table that is adopted twice: refused, or none of its files is lost when the other table lets go of them."""
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("foreign", uri=f"sqlite:///{tmp_path}/foreign.db", warehouse=f"file://{tmp_path}/warehouse")
    catalog.create_namespace("default")
    foreign = catalog.create_table("default.old", pa.schema([pa.field("id", pa.int64(), nullable=False)]))
    for number in range(3):
        foreign.append(pa.table({"id": [number]}, schema=foreign.schema().as_arrow()))
    lake.adopt("one", foreign.metadata_location)
    try:
        lake.adopt("two", foreign.metadata_location)
    except (fm.Invalid, fm.Conflict):
        return
    lake.maintain.compact("one", files_min=2)
    for number in range(10, 18):
        lake.append("one", [{"id": number}])
    expire_and_sweep(lake, deep=True)
    assert ids(lake, "two") == [0, 1, 2]


def test_every_snapshot_that_the_tables_metadata_names_can_be_read_by_other_engines(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    for number in range(9):
        lake.append("people", rows(number))
        lake.delete("people", f"id = {number - 1}")
        if number % 4 == 3:
            lake.maintain.compact("people", files_min=2)
        expire_and_sweep(lake, deep=True)
        metadata = lake.catalog.files.metadata(lake.catalog.history.head("people").metadata_location)
        for snapshot in metadata.snapshots:
            manifests = snapshot.manifests(LakeFileIO.over(lake.catalog.storage))
            entries = [
                entry
                for one in manifests
                for entry in one.fetch_manifest_entry(LakeFileIO.over(lake.catalog.storage), discard_deleted=True)
            ]
            assert {path_of(entry.data_file.file_path) for entry in entries} <= on_disk(lake)
    assert ids(lake, "people") == [8]


def test_a_lake_in_object_storage_is_maintained_in_the_same_way(s3_server: S3Server, tmp_path: Path) -> None:
    location, catalog = f"s3://{s3_server.make_bucket()}/lake", f"sqlite:///{tmp_path}/catalog.db"
    with fm.open(location, catalog=catalog, storage_options=s3_server.options, create=True) as lake:
        lake.create_table("people", EVENTS, key=["id"])
        for number in range(4):
            lake.append("people", rows(number))
        lake.delete("people", "id = 1")
        for number in range(10, 12):
            lake.merge("people", rows(number))
        before = {entry.location for entry in lake.catalog.storage.list(location)}
        done = lake.maintain.run(files_min=2, keep="0s", grace="0s")
        assert {record.verb: record.outcome for record in done.records if record.table == "people"} == {
            "compact": "compacted",
            "index": "indexed",
            "sweep": "swept",
        }
        assert len({entry.location for entry in lake.catalog.storage.list(location)} - before) > 0
        deep = lake.maintain.sweep(grace="0s", deep=True)
        assert deep.outcome == "nothing_to_do", deep.as_dict()
        check_lake(lake.catalog)
        assert ids(lake, "people") == [0, 2, 3, 10, 11]


# ── what stays bounded ──


def test_maintaining_one_table_alone_leaves_nothing_of_it_for_ever(lake: fm.Lake, place: Place) -> None:
    """Also not what belongs to operations that want a last look: those that lost a race, or ran on Spark."""
    with place.open() as other:
        for number in range(4):
            waiting = [number]

            def observe(point: str, waiting: list[int] = waiting) -> None:
                if point == "append.built" and waiting:
                    other.append("events", rows(100 + waiting.pop()))

            failpoints.observer = observe
            try:
                lake.append("events", rows(number))
            finally:
                failpoints.observer = None
    assert count_of(lake, tables.operations, tables.operations.c.cleaned == LOOK_ONCE_MORE) == 4
    commit_often(lake)
    for _ in range(2):
        assert lake.maintain.run("events", files_min=2, keep="0s", grace="0s").exit_code == 0
    head = lake.catalog.history.head("events")
    assert count_of(lake, tables.expired, tables.expired.c.table_id == head.table_id) < SNAPSHOTS_KEPT
    check_lake(lake.catalog)


def test_hundreds_of_commits_with_maintenance_leave_no_more_than_dozens(place: Place) -> None:
    commits, every = (300, 50) if place.catalog is None else (100, 25)
    with place.open(create=True) as lake:
        lake.create_table("people", EVENTS, key=["id"])
        sizes: list[tuple[int, ...]] = []
        for number in range(commits):
            if number % 10 == 9:
                lake.delete("people", f"id = {number - 5}")
            elif number % 10 == 4:
                lake.merge("people", rows(number - 4), batch=f"again {number}")  # a version without a table
            else:
                lake.append("people", rows(number))
            if number % every == every - 1:
                done = lake.maintain.run(files_min=8, keep="0s", grace="0s")
                assert done.exit_code == 0, done.as_dict()
                files = on_disk(lake)
                sizes.append(
                    (
                        lake.catalog.history.head("people").files,
                        sum(name.endswith((".avro", ".json")) for name in files),
                        len(files),
                        sum(1 for path in Path(place.path).rglob("*") if path.is_dir()),
                        count_of(lake, tables.expired) + count_of(lake, tables.deletions),
                    )
                )
        half = len(sizes) // 2
        for early, late in zip(zip(*sizes[:half], strict=True), zip(*sizes[half:], strict=True), strict=True):
            assert max(late) <= 1.5 * max(early) + 5, sizes
        gone = {number - 5 for number in range(commits) if number % 10 == 9} | set(range(4, commits, 10))
        assert ids(lake, "people") == sorted({n for n in range(commits) if n % 10 != 9} - gone)
        check_lake(lake.catalog)
        assert count_of(lake, tables.operations, tables.operations.c.cleaned != CLEANED) == 0
