"""What branches hold: expiry and sweep in a tree of lines, dropped tables, what healing and doctor say of branches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, select, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.commit.expiry import deletions_floor
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.repair.examine import examine_lake
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows

FOREVER_MS = 2**60


def on(lake: fm.Lake, branch: str, table: str = "events") -> list[int]:
    return sorted(lake.read_arrow(table, branch=branch).read_all()["id"].to_pylist())


def expire_and_sweep(lake: fm.Lake, *, deep: bool = True) -> None:
    lake.maintain.expire(keep="0s")
    done = lake.maintain.sweep(grace="0s", deep=deep)
    assert done.outcome in ("swept", "nothing_to_do"), done.as_dict()
    check_lake(lake.catalog)


def commit_often(lake: fm.Lake, branch: str = "main", first: int = 1000, table: str = "events") -> list[int]:
    """So many commits that none before them is among the newest few of the table."""
    numbers = list(range(first, first + SNAPSHOTS_KEPT))
    for number in numbers:
        lake.append(table, rows(number), branch=branch)
    return numbers


def data_files(lake: fm.Lake) -> set[str]:
    return {str(path) for path in Path(lake.location.removeprefix("file://")).rglob("*.parquet")}


# ── which versions and states are held ──


def test_a_state_of_main_that_a_later_version_of_main_sees_is_kept_though_a_branch_committed_between(
    lake: fm.Lake,
) -> None:
    lake.append("events", rows(1))
    lake.branches.create("dev")
    lake.append("events", rows(2))
    on_dev = commit_often(lake, "dev")  # newer states of the table, none of which main sees
    seen = lake.append("notes", rows(3)).version  # sees events as main left them, five states ago
    lake.overwrite("events", rows(4))
    commit_often(lake, first=2000)
    pin = lake.catalog.history.pin(seen, holder="test", reason="a look back")
    expire_and_sweep(lake)
    assert ids(lake, version=seen) == [1, 2]
    assert on(lake, "dev") == [1, *on_dev]
    lake.catalog.history.unpin(pin)
    expire_and_sweep(lake)
    with pytest.raises(fm.BelowRetention):
        ids(lake, version=seen)
    assert on(lake, "dev") == [1, *on_dev]


def test_a_branch_that_never_wrote_keeps_what_it_was_made_from(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    lake.branches.create("dev")
    lake.branches.create("sub", source="dev")
    lake.overwrite("events", rows(3))
    lake.maintain.compact(files_min=2)
    numbers = commit_often(lake)
    expire_and_sweep(lake)
    assert (on(lake, "dev"), on(lake, "sub"), on(lake, "main")) == ([1, 2], [1, 2], [3, *numbers])
    # Its first write comes long after the state that it stands on left the table's metadata.
    lake.append("events", rows(5), branch="sub")
    expire_and_sweep(lake)
    assert (on(lake, "dev"), on(lake, "sub")) == ([1, 2], [1, 2, 5])


def test_the_versions_that_the_next_merge_starts_from_are_held_and_let_go_with_the_branch(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(1, 2, 3))
    lake.branches.create("dev")
    lake.merge("people", [{"id": 1, "name": "dev"}], branch="dev")
    lake.merge("people", [{"id": 2, "name": "main"}])
    assert lake.branches.merge("dev").outcome == "merged"
    common = lake.catalog.branches.merge_base("dev", "main").common_version
    for number in range(SNAPSHOTS_KEPT + 1):
        lake.merge("people", [{"id": 3, "name": f"dev {number}"}], branch="dev")
        lake.merge("people", [{"id": 9, "name": f"main {number}"}])
    expire_and_sweep(lake)
    assert not lake.catalog.history.is_expired(common)
    assert lake.branches.merge("dev").outcome == "merged"
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    found = {row["id"]: row["name"] for row in lake.read_arrow("people", branch="dev").read_all().to_pylist()}
    assert found == {1: "dev", 2: "main", 3: f"dev {SNAPSHOTS_KEPT}", 9: f"main {SNAPSHOTS_KEPT}"}
    lake.branches.delete("dev")
    lake.catalog.expiry.expire(FOREVER_MS)
    assert lake.catalog.history.is_expired(common)
    expire_and_sweep(lake)


def test_the_newest_old_version_stays_for_every_branch_that_lives_and_for_none_that_ended(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.branches.create("old")
    on_old = [lake.append("events", rows(number), branch="old").version for number in range(2)]
    on_dev = [lake.append("events", rows(number), branch="dev").version for number in range(3)]
    on_main = [lake.append("events", rows(number)).version for number in range(3)]
    middle = lake.catalog.history.commit(on_main[1]).committed_ms
    with lake.catalog.database.write() as tx:  # so that the window begins between two versions of each branch
        for version in (on_dev[2], on_main[2]):
            commit = tables.commits
            tx.execute(update(commit).where(commit.c.version == version).values(committed_ms=middle + 10_000))
    lake.branches.delete("old")
    gone = set(lake.catalog.expiry.expire(middle + 5_000))
    assert {*on_old, on_dev[0], on_main[0]} <= gone
    assert gone.isdisjoint({on_dev[1], on_dev[2], on_main[1], on_main[2]})


def test_deletions_that_a_branch_has_not_merged_yet_are_kept(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(*range(6)))
    lake.branches.create("dev")
    lake.delete("people", "id = 1")
    lake.delete("people", "id = 2", branch="dev")
    lake.append("people", rows(10), branch="dev")
    lake.append("people", rows(11))
    table_id = lake.catalog.history.head("people").table_id
    before = deletions_floor(lake.catalog.database, table_id)
    expire_and_sweep(lake)
    assert deletions_floor(lake.catalog.database, table_id) == before
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert lake.branches.merge("dev").outcome == "merged"
    assert on(lake, "dev", "people") == on(lake, "main", "people") == [0, 3, 4, 5, 10, 11]
    lake.branches.delete("dev")
    lake.append("people", rows(12))
    expire_and_sweep(lake)
    assert deletions_floor(lake.catalog.database, table_id) > before, "nobody needs them any more"
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(tables.deletions)).all() == []


# ── files ──


def test_a_file_that_a_merge_added_again_outlives_its_branch(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    lake.branches.create("dev")
    lake.append("events", rows(2, 3), branch="dev")
    (file,) = data_files(lake) - {
        path.removeprefix("file://") for path in lake.catalog.files.data_files(lake.catalog.history.head("events"))
    }
    assert lake.branches.merge("dev").outcome == "merged"
    named = lake.catalog.files.data_files(lake.catalog.history.head("events"))
    assert f"file://{file}" in named, "not copied"
    lake.branches.delete("dev")
    numbers = commit_often(lake)
    expire_and_sweep(lake)
    assert Path(file).exists()
    assert ids(lake) == [1, 2, 3, *numbers]
    lake.maintain.compact(files_min=2)
    commit_often(lake, first=2000)
    expire_and_sweep(lake)
    assert not Path(file).exists(), "nothing names it any more"
    assert ids(lake) == sorted([1, 2, 3, *numbers, *range(2000, 2000 + SNAPSHOTS_KEPT)])


def test_what_only_a_deleted_branch_had_goes_and_nothing_else(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    before = data_files(lake)
    lake.branches.create("dev")
    lake.create_table("side", EVENTS, branch="dev")
    lake.append("side", rows(7), branch="dev")
    lake.delete("events", "id = 1", branch="dev")
    lake.append("events", rows(8), branch="dev")
    last = lake.catalog.history.resolve(branch="dev")
    assert len(data_files(lake)) > len(before)
    lake.branches.delete("dev")
    assert sorted(lake.read_arrow("events", version=last).read_all()["id"].to_pylist()) == [2, 8], "until it expires"
    numbers = commit_often(lake)
    expire_and_sweep(lake)
    left = {path.removeprefix("file://") for path in lake.catalog.files.data_files(lake.catalog.history.head("events"))}
    assert before <= left == data_files(lake)
    assert ids(lake) == [1, 2, *numbers]
    assert lake.catalog.expiry.count_dead(0) == 0
    with lake.catalog.database.read() as tx:
        gone = lake.catalog.history.commit(last).table("events").table_id
        waiting = set(tx.execute(select(tables.expired.c.table_id)).scalars())
    assert waiting <= {gone, lake.catalog.history.head("notes").table_id}, "nothing waits of the table that is gone"


def test_a_table_made_again_on_a_branch_of_the_same_name_is_another_one(lake: fm.Lake) -> None:
    for number in range(3):
        lake.branches.create("dev")
        lake.create_table("side", EVENTS, branch="dev")
        lake.append("side", rows(number), branch="dev")
        expire_and_sweep(lake)
        assert on(lake, "dev", "side") == [number]
        lake.branches.delete("dev")
    expire_and_sweep(lake)
    assert data_files(lake) == set()


def test_a_sweep_that_is_killed_in_a_tree_is_ended_by_the_next(place: Place) -> None:
    for point in ("sweep.planned", "sweep.data_deleted", "sweep.metadata_deleted", "sweep.marked"):
        run_child(prepare_tree, place, point)
        assert run_killed(sweep_all, place, failpoint=point)
        with place.open() as lake:
            expire_and_sweep(lake)
            assert on(lake, "dev") == [1, 2, 3]


def prepare_tree(place: Place, name: str) -> None:
    with place.open(create=True) as lake:
        if "events" not in {head.table for head in lake.heads()}:
            lake.create_table("events", EVENTS)
            lake.append("events", rows(1, 2))
            lake.branches.create("dev")
            lake.append("events", rows(3), branch="dev")
        lake.branches.create(name, source="dev")
        lake.overwrite("events", rows(4), branch=name)
        commit_often(lake, name)
        commit_often(lake)
        lake.branches.delete(name)


def sweep_all(place: Place) -> None:
    with place.open() as lake:
        lake.maintain.expire(keep="0s")
        lake.maintain.sweep(grace="0s")


def test_a_sweep_beside_a_merge_leaves_what_it_brings(lake: fm.Lake, place: Place) -> None:
    """The branch's commit is old, the merge is at work, and everything that nothing holds goes meanwhile."""
    lake.append("events", rows(1))
    lake.branches.create("dev")
    lake.append("events", rows(2, 3), branch="dev")
    with place.open() as other:

        def sweep() -> None:
            other.maintain.expire(keep="0s")
            assert other.maintain.sweep(grace="0s", deep=True).outcome in ("swept", "nothing_to_do")

        for point in ("branch_merge.begun", "branch_merge.sealed", "branch_merge.built", "branch_merge.published"):
            lake.append("events", rows(10), branch="dev")
            with at(point, sweep):
                assert lake.branches.merge("dev").outcome == "merged"
            assert ids(lake) == on(lake, "dev")
    check_lake(lake.catalog)


# ── healing ──


def append_to(place: Place, branch: str, batch: str | None) -> None:
    with place.open() as lake:
        lake.append("events", rows(9), branch=branch, batch=batch)


@pytest.mark.parametrize("batch", [None, "monday"])
@pytest.mark.parametrize("point", ["append.begun", "append.staged", "append.sealed", "append.built", "append.moved"])
def test_what_was_meant_for_a_deleted_branch_is_discarded_once(
    new_place: Callable[[str], Place], point: str, batch: str | None
) -> None:
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.branches.create("dev")
    assert run_killed(append_to, place, "dev", batch, failpoint=point)
    with place.open(recover=False) as lake:
        lake.catalog.branches.delete("dev")
        with pytest.raises(fm.Busy):
            lake.catalog.branches.create("dev", actor="test")
    for _ in range(2):
        with place.open() as lake:
            assert [(row.outcome, row.detail) for row in lake.audit()] == [("discarded", "its branch is gone")]
            check_lake(lake.catalog)
            assert data_files(lake) == set()
    with place.open() as lake:
        lake.branches.create("dev")
        assert on(lake, "dev") == []


def test_a_branch_that_goes_while_a_healer_publishes_for_it_is_gone(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.branches.create("dev")
    assert run_killed(append_to, place, "dev", "monday", failpoint="append.sealed")
    with place.open(recover=False) as lake, place.open(recover=False) as other:
        with at("heal.built", lambda: other.catalog.branches.delete("dev")):
            report = lake.recover()
        assert len(report.discarded) == 1
        assert [row.outcome for row in lake.audit()] == ["discarded"]
        check_lake(lake.catalog)


@pytest.mark.parametrize("broken", ["no line", "no branch"])
@pytest.mark.parametrize("point", ["append.begun", "append.sealed"])
def test_a_branch_of_which_nobody_can_tell_is_an_error_and_never_gone(
    new_place: Callable[[str], Place], point: str, broken: str
) -> None:
    place = new_place("sqlite")
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.branches.create("dev")
    assert run_killed(append_to, place, "dev", None, failpoint=point)
    with place.open(recover=False) as lake:
        row = tables.lines if broken == "no line" else tables.branches
        with lake.catalog.database.write() as tx:
            kept = [dict(one) for one in tx.execute(select(row).where(row.c.name == "dev")).mappings()]
            tx.execute(delete(row).where(row.c.name == "dev"))
        with pytest.raises(fm.Corrupt, match="does not show whether the branch"):
            lake.recover()
        assert lake.audit() == []
        assert not all(check.passed for check in examine_lake(lake.catalog))
        assert lake.status()["pending"] != []
        with lake.catalog.database.write() as tx:
            tx.execute(row.insert(), kept)
        assert lake.recover().outcome == "recovered"
        assert [row.outcome for row in lake.audit()] == ["rolled_back"]
        check_lake(lake.catalog)


def test_versions_of_a_line_that_nobody_knows_stop_expiry_and_sweep(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    for number in range(SNAPSHOTS_KEPT + 3):
        lake.append("events", rows(number), branch="dev")
        lake.append("events", rows(number))
    before = data_files(lake)
    with lake.catalog.database.write() as tx:
        tx.execute(delete(tables.lines))
    with pytest.raises(fm.Corrupt):
        lake.catalog.expiry.expire(FOREVER_MS)
    with pytest.raises(fm.Corrupt):
        lake.catalog.expiry.all_states(0)
    assert data_files(lake) == before


# ── doctor ──


def test_doctor_looks_at_every_branch(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    lake.branches.create("dev")
    lake.append("events", rows(2), branch="dev")
    lake.branches.create("idle")
    checks = {check.name: check for check in examine_lake(lake.catalog)}
    assert all(check.passed for check in checks.values()), checks
    assert checks["branch dev"].detail.endswith("1 not as on main")
    assert checks["branch idle"].detail.endswith("0 not as on main")
    (file,) = set(lake.catalog.files.data_files(lake.catalog.history.head("events", "dev"))) - set(
        lake.catalog.files.data_files(lake.catalog.history.head("events"))
    )
    lake.catalog.storage.delete(file)
    checks = {check.name: check for check in examine_lake(lake.catalog)}
    failed = [name for name, check in checks.items() if not check.passed]
    assert sorted(failed) == ["branch dev", "table events on dev", "versions"]
    assert file in checks["table events on dev"].detail
