"""Merges after merges: what one side did stands until the other knows it, choices are kept, and nothing comes twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, insert

import floodmark as fm
from floodmark.catalog import tables
from floodmark.commit.journal import all_files
from floodmark.testing.invariants import check_lake
from tests.without_spark import without_spark

SHAPE = "id long not null, name string"


@pytest.fixture
def lake(lake: fm.Lake) -> fm.Lake:
    """Events without a key, one row; another table beside it; and a branch dev of it."""
    lake.create_table("beside", SHAPE)
    lake.append("events", people(1))
    lake.branches.create("dev")
    return lake


def people(*ids: int, name: str = "old") -> list[dict[str, Any]]:
    return [{"id": one, "name": name} for one in ids]


def ids(lake: fm.Lake, branch: str = "main", table: str = "events") -> list[int]:
    return sorted(row["id"] for row in lake.read_arrow(table, branch=branch).read_all().to_pylist())


def reasons(merged: fm.Merged) -> list[tuple[str, str]]:
    return [(one.table, one.reason) for one in merged.conflicts]


def merge_beside(lake: fm.Lake) -> None:
    """A merge that has nothing to do with events."""
    lake.append("beside", people(1), branch="dev")
    assert lake.branches.merge("dev").outcome == "merged"


@contextmanager
def followed(lake: fm.Lake, branch: str = "main") -> Iterator[list[int]]:
    """Who follows the events of a branch gets these ids while the block runs, once each."""
    mark, got = lake.catalog.history.head("events", branch).sequence, list[int]()
    yield got
    news = lake.changes("events", since=mark, branch=branch).arrow().read_all().to_pylist()
    got += sorted(row["id"] for row in news)


@contextmanager
def queries(lake: fm.Lake) -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()

    def count(*args: Any) -> None:
        counted["all"] += 1

    engine = lake.catalog.database.engine
    event.listen(engine, "before_cursor_execute", count)
    try:
        yield counted
    finally:
        event.remove(engine, "before_cursor_execute", count)


# ── what a merge this way does not teach ──


def test_a_batch_is_found_on_both_sides_after_a_merge_of_other_things(lake: fm.Lake) -> None:
    lake.append("events", people(5), batch="b1")
    merge_beside(lake)
    assert lake.append("events", people(5), batch="b1", branch="dev").outcome == "committed"
    assert reasons(lake.branches.merge("dev", on_conflict="return")) == [("events", "batch")]
    assert ids(lake) == [1, 5]


def test_an_overwrite_stands_after_a_merge_of_other_things(lake: fm.Lake) -> None:
    lake.overwrite("events", people(7))
    merge_beside(lake)
    lake.append("events", people(2), branch="dev")
    assert reasons(lake.branches.merge("dev", on_conflict="return")) == [("events", "overwritten")]
    assert ids(lake) == [7]


def test_a_stream_goes_on_after_a_merge(lake: fm.Lake) -> None:
    """Its position on main came from dev itself: that is not the same rows twice."""
    for number in (1, 2):
        _stream(lake, number, "dev")
        assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake) == [1, 1, 2]
    check_lake(lake.catalog)


def _stream(lake: fm.Lake, number: int, branch: str) -> None:
    from floodmark.commit.intent import Intent, stream_rider
    from floodmark.write.change import Change
    from floodmark.write.step import APPEND

    intent = Intent("append", branch, "test", "", stream_rider("events", "query", number, branch))
    change = Change.begin(without_spark(lake), intent)
    change.write(APPEND, "events", people(number))
    change.publish()


# ── one batch, several tables ──


def test_a_batch_of_a_transaction_is_found_in_each_of_its_tables(lake: fm.Lake) -> None:
    lake.create_table("orders", SHAPE, key=["id"])
    lake.branches.create("more")
    for branch in ("main", "more"):
        with lake.transaction(batch="b1", batch_table="orders", branch=branch) as tx:
            tx.merge("orders", people(5))
            tx.append("events", people(5))
    lake.append("beside", people(3), branch="more")
    assert reasons(lake.branches.merge("more", on_conflict="return")) == [("events", "batch")]
    assert lake.branches.merge("more", prefer="ours").outcome == "merged"
    assert (ids(lake), ids(lake, table="orders"), ids(lake, table="beside")) == ([1, 5], [5], [3])


def test_a_batch_of_other_tables_is_no_conflict(lake: fm.Lake) -> None:
    for branch, table in (("main", "beside"), ("dev", "events")):
        with lake.transaction(batch="b1", branch=branch) as tx:
            tx.append(table, people(5))
    lake.append("events", people(9))
    assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake) == [1, 5, 9]


def test_batches_come_from_below_the_branch_that_is_merged(lake: fm.Lake) -> None:
    before = lake.catalog.history.resolve()
    lake.append("events", people(5), batch="b1")
    lake.branches.create("later")
    lake.branches.create("child", source="later", version=before)
    lake.append("events", people(6), batch="b2", branch="later")
    assert lake.branches.merge("later", into="child").outcome == "merged"
    assert ids(lake, "child") == [1, 5, 6]
    for batch in ("b1", "b2"):
        assert lake.append("events", people(9), batch=batch, branch="child").outcome == "already_committed"


# ── followers ──


def test_a_row_that_is_new_to_main_is_new_to_who_follows_it(lake: fm.Lake) -> None:
    lake.append("events", people(3))
    lake.append("events", people(4))
    lake.branches.create("other")
    lake.append("events", people(2), branch="other")
    assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
    lake.append("beside", people(1))
    assert lake.branches.merge("main", into="other").outcome == "merged"
    lake.delete("events", "id = 1", branch="other")
    with followed(lake) as got:
        merged = lake.branches.merge("other")
    assert [(one.table, one.rows_added, one.rows_deleted) for one in merged.tables] == [("events", 1, 1)]
    assert (ids(lake), got) == ([2, 3, 4], [2])
    check_lake(lake.catalog)


# ── choices ──


@pytest.mark.parametrize("ours", ["append", "overwrite"])
def test_what_was_kept_comes_to_the_other_side(lake: fm.Lake, ours: str) -> None:
    if ours == "append":
        lake.append("events", people(2), branch="dev")
        lake.overwrite("events", people(7))
    else:
        lake.overwrite("events", people(2), branch="dev")
        lake.append("events", people(7))
    kept = ids(lake, "dev")
    assert reasons(lake.branches.merge("main", into="dev", on_conflict="return")) == [("events", "overwritten")]
    assert lake.branches.merge("main", into="dev", prefer="ours").outcome == "merged"
    lake.append("events", people(9), branch="dev")
    with followed(lake) as got:
        assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake) == ids(lake, "dev") == got == [*kept, 9]
    assert lake.branches.merge("dev").outcome == "up_to_date"
    assert lake.branches.merge("main", into="dev").outcome == "up_to_date"
    check_lake(lake.catalog)


def test_what_was_kept_stands_against_what_the_other_side_did_then(lake: fm.Lake) -> None:
    lake.append("events", people(2), branch="dev")
    lake.overwrite("events", people(7))
    lake.branches.merge("main", into="dev", prefer="ours")
    lake.append("events", people(8))
    assert reasons(lake.branches.merge("dev", on_conflict="return")) == [("events", "overwritten")]
    assert ids(lake) == [7, 8]
    # New rows of the side that lost come, as they would to anybody.
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert ids(lake, "dev") == [1, 2, 8]
    assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake) == [1, 2, 8]


def test_what_was_replaced_is_not_asked_again(lake: fm.Lake) -> None:
    lake.append("events", people(2), branch="dev")
    lake.delete("events", "id = 1")
    assert lake.branches.merge("dev", prefer="theirs").outcome == "merged"
    assert ids(lake) == ids(lake, "dev") == [1, 2]
    assert lake.branches.merge("main", into="dev").outcome == "up_to_date"
    lake.append("events", people(3))
    lake.append("events", people(4), branch="dev")
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake) == ids(lake, "dev") == [1, 2, 3, 4]


def test_a_batch_whose_rows_were_thrown_away_may_come(lake: fm.Lake) -> None:
    lake.append("events", people(2), branch="dev", batch="b1")
    lake.append("beside", people(2), branch="dev", batch="b2")
    lake.overwrite("events", people(7))
    assert lake.branches.merge("dev", prefer="ours").outcome == "merged"
    assert lake.append("events", people(2), batch="b1").outcome == "committed"
    assert lake.append("beside", people(2), batch="b2").outcome == "already_committed"
    assert (ids(lake), ids(lake, table="beside")) == ([2, 7], [2])


def test_a_kept_batch_is_not_doubled_later(lake: fm.Lake) -> None:
    for branch in ("main", "dev"):
        lake.append("events", people(5), batch="b1", branch=branch)
    assert lake.branches.merge("main", into="dev", prefer="ours").outcome == "merged"
    assert lake.branches.merge("dev").outcome == "merged"
    assert ids(lake) == ids(lake, "dev") == [1, 5]


# ── cost ──


def test_many_batches_are_copied_at_once(lake: fm.Lake) -> None:
    def merged_queries(batches: int, branch: str) -> int:
        lake.branches.create(branch)
        version = lake.append("events", people(2)).version
        found = [
            {"scope": "table:events", "id": f"{branch}{number}", "version": version, "operation": "x" * 26}
            for number in range(batches)
        ]
        with lake.catalog.database.write() as tx:
            tx.execute(insert(tables.sources), found)
        with queries(lake) as counted:
            assert lake.branches.merge("main", into=branch).outcome == "merged"
        last = lake.append("events", people(3), batch=f"{branch}{batches - 1}", branch=branch)
        assert last.outcome == "already_committed"
        return counted["all"]

    assert merged_queries(200, "many") < merged_queries(2, "few") + 10


def test_up_to_date_is_told_at_once(lake: fm.Lake) -> None:
    with lake.transaction() as tx:
        for number in range(20):
            tx.create_table(f"t{number}", SHAPE)
    lake.branches.create("other")
    lake.append("events", people(2))
    with queries(lake) as counted:
        assert lake.branches.merge("other").outcome == "up_to_date"
    assert counted["all"] < 60


# ── shapes ──


def required(lake: fm.Lake, **columns: Any) -> None:
    lake.apply({"t": {"columns": {"id": "long", "n": {"type": "int", "required": True}, **columns}}})


@pytest.fixture
def nulls(lake: fm.Lake, request: pytest.FixtureRequest) -> fm.Lake:
    """A table whose column is required on main now, while a branch has a row without a value of it."""
    lake.create_table("t", "id long, n int", key=getattr(request, "param", ()))
    lake.append("t", [{"id": 1, "n": 1}])
    lake.branches.create("other")
    lake.append("t", [{"id": 2, "n": None}], branch="other")
    required(lake)
    return lake


KEYS = pytest.mark.parametrize("nulls", [(), ("id",)], ids=["plain", "keyed"], indirect=True)


@pytest.mark.mostly_sqlite
@KEYS
def test_a_null_does_not_come_into_a_required_column(nulls: fm.Lake) -> None:
    with pytest.raises(fm.Invalid):
        nulls.branches.merge("other")
    nulls.delete("t", "id = 2", branch="other")
    nulls.append("t", [{"id": 2, "n": 2}], branch="other")
    assert nulls.branches.merge("other", prefer="theirs").outcome == "merged"
    assert ids(nulls, table="t") == [1, 2]
    check_lake(nulls.catalog)


@pytest.mark.mostly_sqlite
@KEYS
def test_a_column_does_not_become_required_over_nulls(nulls: fm.Lake) -> None:
    if nulls.catalog.files.metadata(nulls.catalog.history.head("t").metadata_location).schema().identifier_field_ids:
        # The branch's rows in one file: the one without a value is carried when the other one is updated.
        nulls.overwrite("t", [{"id": 1, "n": 1}, {"id": 2, "n": None}], branch="other")
        nulls.merge("t", [{"id": 1, "n": 9}])
    nulls.append("t", [{"id": 5, "n": 5}])
    assert reasons(nulls.branches.merge("main", into="other", on_conflict="return")) == [("t", "schema")]
    assert ids(nulls, "other", "t") == [1, 2]
    nulls.delete("t", "id = 2", branch="other")
    nulls.append("t", [{"id": 3, "n": 3}], branch="other")
    again = nulls.branches.merge("main", into="other", prefer="theirs", on_conflict="return")
    assert again.outcome == "merged"
    assert set(ids(nulls, "other", "t")) >= {1, 5}
    check_lake(nulls.catalog)


# ── words ──


def test_a_version_of_another_line_is_not_a_branchs(lake: fm.Lake) -> None:
    before = lake.catalog.history.resolve()
    other = lake.append("events", people(2)).version
    with pytest.raises(fm.Invalid):
        lake.read_arrow("events", version=other, branch="dev")
    assert lake.read_arrow("events", version=before, branch="dev").read_all().num_rows == 1
    assert lake.read_arrow("events", version=other).read_all().num_rows == 2


# ── what a deleted branch leaves ──


def data_files(lake: fm.Lake) -> set[str]:
    found = all_files(lake.catalog.storage, f"{lake.catalog.location}/tables")
    return {entry.location for entry in found if entry.location.endswith(".parquet")}


def sweep(lake: fm.Lake, *, deep: bool = False) -> str:
    lake.catalog.expiry.expire(before_ms=2**60)
    return lake.maintain.sweep(grace="0s", deep=deep).outcome


def test_files_of_a_deleted_branch_go_from_a_quiet_table(lake: fm.Lake) -> None:
    before = data_files(lake)
    for number in (5, 6):
        lake.append("events", people(number), branch="dev")
    lake.append("events", people(7), branch="dev")
    lake.branches.delete("dev")
    assert sweep(lake) == "swept"
    assert data_files(lake) == before
    assert sweep(lake) == "nothing_to_do"
    assert sweep(lake, deep=True) == "nothing_to_do"
    assert ids(lake) == [1]
    check_lake(lake.catalog)
    # The table goes on from the metadata that the branch wrote, and then that may go.
    lake.append("events", people(8))
    known = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)
    lists = [one.manifest_list for one in known.snapshots]
    assert all(lake.catalog.storage.exists(one) for one in lists)
    assert sweep(lake) == "swept"
    assert sweep(lake) == "nothing_to_do"
    assert ids(lake) == [1, 8]
    check_lake(lake.catalog)


def test_files_that_were_merged_stay_when_their_branch_goes(lake: fm.Lake) -> None:
    lake.append("events", people(5), branch="dev")
    assert lake.branches.merge("dev").outcome == "merged"
    lake.append("events", people(6), branch="dev")
    lake.branches.delete("dev")
    sweep(lake)
    assert ids(lake) == [1, 5]
    check_lake(lake.catalog)
