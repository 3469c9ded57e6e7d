"""Branches in the catalog: made, listed, deleted; whose commit is whose; what a table's metadata says of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import delete, select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.riders import AlreadyCommitted, StreamRider
from floodmark.commit.seal import Seal
from floodmark.model import MAIN, SNAPSHOTS_KEPT
from floodmark.testing.database_faults import DatabaseFaults
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows
from tests.foreign_writer import foreign_catalog


def create(lake: fm.Lake, name: str = "dev", **options: Any) -> Any:
    return lake.catalog.branches.create(name, actor="test", **options)


def delete_branch(lake: fm.Lake, name: str = "dev") -> Any:
    return lake.catalog.branches.delete(name)


def ids(lake: fm.Lake, table: str = "events", **where: Any) -> list[int]:
    return sorted(row["id"] for row in lake.read_arrow(table, **where).read_all().to_pylist())


def names(lake: fm.Lake) -> list[str]:
    return [branch.name for branch in lake.catalog.branches.list()]


def metadata(lake: fm.Lake, table: str = "events", branch: str = MAIN) -> Any:
    catalog = lake.catalog
    return catalog.files.metadata(catalog.history.newest_metadata(catalog.history.head(table, branch).table_id))


# ── making ──


def test_a_branch_is_made_without_a_version_and_without_a_file(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    before = {entry.location for entry in lake.catalog.storage.list(lake.catalog.location)}
    made = create(lake)
    assert (made.name, made.parent, made.base_version, made.head_version) == ("dev", MAIN, 3, 3)
    assert (made.commits, made.tables_changed) == (0, 0)
    assert lake.catalog.lake_row().version == 3
    assert {entry.location for entry in lake.catalog.storage.list(lake.catalog.location)} == before
    assert ids(lake, branch="dev") == [1, 2]
    assert names(lake) == [MAIN, "dev"]
    assert lake.catalog.branches.get("dev") == made
    check_lake(lake.catalog)


def test_what_is_written_on_one_branch_is_not_seen_on_another(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    create(lake)
    lake.append("events", rows(2), branch="dev")
    lake.append("events", rows(3))
    lake.append("notes", rows(4), branch="dev")
    assert (ids(lake), ids(lake, branch="dev")) == ([1, 3], [1, 2])
    assert (ids(lake, "notes"), ids(lake, "notes", branch="dev")) == ([], [4])
    assert [ids(lake, version=version) for version in (3, 4, 5, 6)] == [[1], [1, 2], [1, 3], [1, 2]]
    dev = lake.catalog.branches.get("dev")
    assert (dev.commits, dev.tables_changed, dev.head_version) == (2, 2, 6)
    assert [commit.version for commit in lake.catalog.history.commits(branch="dev")] == [6, 4, 3, 2, 1]
    assert [commit.version for commit in lake.catalog.history.commits(branch=MAIN)] == [5, 3, 2, 1]
    check_lake(lake.catalog)


def test_a_branch_begins_at_a_version_a_moment_another_branch_or_nothing(lake: fm.Lake) -> None:
    first = lake.append("events", rows(1))
    lake.append("events", rows(2))
    assert (create(lake, "old", version=first.version).base_version, ids(lake, branch="old")) == (3, [1])
    lake.append("events", rows(3), branch="old")
    child = create(lake, "child", source="old")
    assert (child.parent, child.base_version, ids(lake, branch="child")) == ("old", 5, [1, 3])
    assert create(lake, "by_owner", version=5).parent == "old"
    moment = lake.catalog.history.commit(4).committed_ms
    at_moment = create(lake, "moment", at_ms=moment)
    assert at_moment.base_version in (3, 4)  # two commits may share a millisecond
    assert create(lake, "empty", version=0).base_version == 0
    assert lake.catalog.history.heads("empty") == []
    lower = create(lake, "lower", source="child", version=first.version)
    assert (lower.parent, ids(lake, branch="lower")) == ("child", [1])
    check_lake(lake.catalog)


@pytest.mark.parametrize("name", ["", "main", "-dev", "a/b", "a b", "x" * 101, "é"])
def test_a_name_that_no_branch_can_have_is_invalid(place: Place, name: str) -> None:
    with place.open(create=True) as lake:
        with pytest.raises(fm.Invalid):
            create(lake, name)
        assert names(lake) == [MAIN]


def test_a_base_that_is_not_there_is_refused_and_nothing_is_made(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    create(lake, "dev")
    lake.append("events", rows(2), branch="dev")
    with pytest.raises(fm.Invalid):
        create(lake, "dev")
    with pytest.raises(fm.NotFound):
        create(lake, "other", source="nobody")
    with pytest.raises(fm.NotFound):
        create(lake, "other", version=99)
    with pytest.raises(fm.NotFound):
        create(lake, "other", at_ms=1)
    with pytest.raises(fm.Invalid) as caught:
        create(lake, "other", source=MAIN, version=4)
    assert caught.value.facts["made_on"] == "dev"
    with pytest.raises(fm.Invalid):
        create(lake, "other", version=3, at_ms=1)
    delete_branch(lake)
    with pytest.raises(fm.Invalid):
        create(lake, "other", version=4)
    assert names(lake) == [MAIN]


def test_a_base_that_has_expired_is_below_retention(lake: fm.Lake) -> None:
    for number in range(3):
        lake.append("events", rows(number))
    lake.catalog.expiry.expire(2**60)
    with pytest.raises(fm.BelowRetention):
        create(lake, version=3)
    assert names(lake) == [MAIN]


def test_the_base_of_a_branch_is_not_expired_while_it_lives(lake: fm.Lake) -> None:
    for number in range(3):
        lake.append("events", rows(number))
    create(lake, version=3)
    lake.catalog.expiry.expire(2**60)
    assert ids(lake, branch="dev") == [0]
    check_lake(lake.catalog)


# ── deleting, and a name that is given again ──


def test_a_deleted_branch_is_gone_and_its_versions_still_read(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    create(lake)
    lake.append("events", rows(2), branch="dev")
    gone = delete_branch(lake)
    assert (gone.name, gone.commits, gone.head_version) == ("dev", 1, 4)
    assert names(lake) == [MAIN]
    assert ids(lake, version=4) == [1, 2]
    for ask in (
        lambda: ids(lake, branch="dev"),
        lambda: lake.catalog.history.heads("dev"),
        lambda: lake.append("events", rows(3), branch="dev"),
        lambda: delete_branch(lake),
    ):
        with pytest.raises(fm.NotFound):
            ask()
    check_lake(lake.catalog)


def test_a_branch_that_was_made_again_inherits_nothing(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    create(lake)
    lake.append("events", rows(2), branch="dev")
    delete_branch(lake)
    lake.append("events", rows(3))
    create(lake)
    assert ids(lake, branch="dev") == [1, 3]
    lake.append("events", rows(4), branch="dev")
    assert (ids(lake, branch="dev"), ids(lake, version=4)) == ([1, 3, 4], [1, 2])
    # The old one's ref went with the first commit that the table got since.
    refs = metadata(lake).refs
    assert {name: ref.snapshot_id for name, ref in refs.items()} == {
        name: lake.catalog.history.head("events", name).snapshot for name in (MAIN, "dev")
    }
    check_lake(lake.catalog)


def test_a_stale_ref_of_a_name_that_was_given_again_is_not_taken_for_the_new_branch(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    create(lake)
    lake.append("events", rows(2), branch="dev")
    delete_branch(lake)
    create(lake)
    lake.append("events", rows(3))
    assert set(metadata(lake).refs) == {MAIN}
    check_lake(lake.catalog)


def test_a_name_is_busy_while_an_operation_of_the_deleted_branch_is_unfinished(lake: fm.Lake) -> None:
    create(lake)
    operation = lake.catalog.journal.begin("append", branch="dev", actor="test", message="")
    delete_branch(lake)
    with pytest.raises(fm.Busy) as caught:
        create(lake)
    assert caught.value.facts["operation"] == operation.id
    lake.catalog.journal.abandon(operation.id)
    assert create(lake).name == "dev"


def test_a_writer_whose_branch_is_deleted_under_it_gets_a_conflict_and_leaves_nothing(lake: fm.Lake) -> None:
    create(lake)
    with pytest.raises(fm.Conflict), at("append.built", lambda: delete_branch(lake)):
        lake.append("events", rows(1), branch="dev")
    assert lake.catalog.lake_row().version == 2
    check_lake(lake.catalog)


def test_main_and_a_branch_with_children_are_not_deleted(lake: fm.Lake) -> None:
    create(lake)
    create(lake, "child", source="dev")
    with pytest.raises(fm.Invalid):
        delete_branch(lake, MAIN)
    with pytest.raises(fm.Invalid) as caught:
        delete_branch(lake)
    assert caught.value.facts["branches"] == "child"
    delete_branch(lake, "child")
    delete_branch(lake)
    assert names(lake) == [MAIN]


def test_a_branch_whose_rows_disagree_is_corrupt_never_gone(lake: fm.Lake) -> None:
    create(lake)
    operation = lake.catalog.journal.begin("append", branch="dev", actor="test", message="")
    lake.catalog.journal.seal(operation, Seal(()))
    with lake.catalog.database.write() as tx:
        tx.execute(delete(tables.branches).where(tables.branches.c.name == "dev"))
    with lake.catalog.database.read() as tx:
        lines = Lineages.read(tx)
    for ask in (lambda: lines.live("dev"), lambda: lines.state("dev"), lambda: lines.state("never_made")):
        with pytest.raises(fm.Corrupt):
            ask()
    with pytest.raises(fm.Corrupt):
        lake.catalog.publisher.publish(operation, Seal(()), points="append")


def test_a_branch_made_and_deleted_in_an_empty_lake_owns_no_later_commit(place: Place) -> None:
    with place.open(create=True) as lake:
        create(lake)
        delete_branch(lake)
        create(lake)
        lake.create_table("events", EVENTS, branch="dev")
        assert [head.table for head in lake.catalog.history.tables_at(1).values()] == ["events"]
        assert lake.catalog.history.heads() == []
        check_lake(lake.catalog)


@pytest.mark.parametrize("mode", ["before", "after"])
def test_every_lost_call_leaves_a_branch_made_once_or_not_at_all(place: Place, mode: str) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        for number in range(1, 100):
            _try_with_fault(lake, number, mode, lambda: create(lake), there=True)
            if "dev" not in names(lake):
                create(lake)
            fired = _try_with_fault(lake, number, mode, lambda: delete_branch(lake), there=False)
            if "dev" in names(lake):
                delete_branch(lake)
            if not fired:
                break
        else:
            pytest.fail("the run never got past its faults")
        check_lake(lake.catalog)


def _try_with_fault(lake: fm.Lake, number: int, mode: str, act: Callable[[], object], there: bool) -> bool:
    """The call fails with an error and nothing has happened, or it returns and all of it has."""
    faults = DatabaseFaults(lake.catalog.database, fail_at=number, mode=mode)
    try:
        act()
        done = True
    except fm.Unavailable:
        done = False
    finally:
        faults.remove()
    assert ("dev" in names(lake)) is (done is there)
    return faults.fired


# ── tables and their metadata ──


def test_a_table_made_on_a_branch_is_there_alone_and_its_name_is_taken(lake: fm.Lake) -> None:
    create(lake)
    lake.create_table("drafts", EVENTS, branch="dev")
    lake.append("drafts", rows(1), branch="dev")
    assert [head.table for head in lake.catalog.history.heads()] == ["events", "notes"]
    with pytest.raises(fm.NotFound):
        ids(lake, "drafts")
    with pytest.raises(fm.Invalid) as caught:
        lake.create_table("Drafts", EVENTS)
    assert (caught.value.facts["table"], caught.value.facts["branches"]) == ("drafts", "dev")
    check_lake(lake.catalog)
    delete_branch(lake)
    with lake.catalog.database.read() as tx:
        assert set(tx.execute(select(tables.iceberg_tables.c.table_name)).scalars()) == {"events", "notes"}
    lake.create_table("drafts", EVENTS)
    check_lake(lake.catalog)


def test_other_engines_see_main_as_it_is_and_a_branch_by_its_ref(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1))
        create(lake)
        lake.append("events", [{"id": 2, "name": "b", "more": 7}], evolve=True, branch="dev")
        head = lake.catalog.history.head("events")
        known = metadata(lake)
        assert (known.current_snapshot_id, known.current_schema_id) == (head.snapshot, head.schema_id)
    with foreign_catalog(place) as catalog:
        table = catalog.load_table("default.events")
        assert [field.name for field in table.schema().fields] == ["id", "name", "_seq"]
        assert table.scan().to_arrow()["id"].to_pylist() == [1]
        on_dev = table.scan().use_ref("dev").to_arrow()
        assert sorted(on_dev["id"].to_pylist()) == [1, 2]
        assert sorted(on_dev["more"].to_pylist(), key=str) == [7, None]


def test_two_branches_that_add_columns_give_them_different_ids(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    create(lake)

    def on_main() -> None:
        lake.append("events", [{"id": 3, "name": "c", "theirs": 3}], evolve=True)

    with at("append.built", on_main):
        lake.append("events", [{"id": 2, "name": "b", "ours": 2}], evolve=True, branch="dev")
    known = metadata(lake)
    assert len({schema.schema_id for schema in known.schemas}) == len(known.schemas) == 3
    added = {field.name: field.field_id for schema in known.schemas for field in schema.fields}
    assert added["ours"] != added["theirs"]
    assert lake.read_arrow("events", branch="dev").read_all().column_names == ["id", "name", "ours"]
    assert lake.read_arrow("events").read_all().column_names == ["id", "name", "theirs"]
    check_lake(lake.catalog)


def test_a_branch_from_a_snapshot_that_was_forgotten_gets_it_back(lake: fm.Lake) -> None:
    first = lake.append("events", rows(0))
    for number in range(1, SNAPSHOTS_KEPT + 3):
        lake.append("events", rows(number))
    base = lake.catalog.history.tables_at(first.version)["events"]
    assert metadata(lake).snapshot_by_id(base.snapshot) is None
    create(lake, version=first.version)
    lake.append("events", rows(100), branch="dev")
    known = metadata(lake)
    assert known.snapshot_by_id(base.snapshot) is not None
    assert known.snapshot_by_name("dev").parent_snapshot_id == base.snapshot
    assert known.current_snapshot_id == lake.catalog.history.head("events").snapshot
    for number in range(SNAPSHOTS_KEPT + 3):
        lake.append("events", rows(200 + number))
    assert metadata(lake).snapshot_by_id(base.snapshot) is not None
    assert ids(lake, branch="dev") == [0, 100]
    check_lake(lake.catalog)


def test_sequences_of_a_table_rise_over_all_branches(lake: fm.Lake) -> None:
    create(lake)
    commits = [lake.append("events", rows(number), branch=("dev", MAIN)[number % 2]) for number in range(4)]
    assert [commit.table("events").sequence for commit in commits] == [1, 2, 3, 4]
    assert lake.catalog.history.head("events", "dev").sequence == 3


def test_writers_of_two_branches_contend_on_the_pointer_and_lose_nothing(lake: fm.Lake) -> None:
    lake.append("events", rows(0))
    create(lake)

    def write(branch: str) -> list[int]:
        first = 100 if branch == MAIN else 200
        return [
            lake.append("events", rows(first + number), branch=branch).table("events").sequence for number in range(8)
        ]

    with ThreadPoolExecutor(2) as threads:
        given = list(threads.map(write, (MAIN, "dev")))
    assert sorted(given[0] + given[1]) == list(range(2, 18))
    assert ids(lake) == [0, *range(100, 108)]
    assert ids(lake, branch="dev") == [0, *range(200, 208)]
    check_lake(lake.catalog)


# ── identities ──


def test_a_batch_is_known_where_its_rows_are(lake: fm.Lake) -> None:
    lake.append("events", rows(1), batch="before")
    create(lake)
    assert lake.append("events", rows(1), batch="before", branch="dev").outcome == "already_committed"
    assert lake.append("events", rows(2), batch="later", branch="dev").outcome == "committed"
    assert lake.append("events", rows(2), batch="later", branch="dev").outcome == "already_committed"
    assert lake.append("events", rows(2), batch="later").outcome == "committed"
    child = create(lake, "child", source="dev")
    assert lake.append("events", rows(2), batch="later", branch=child.name).outcome == "already_committed"
    assert lake.append("events", rows(9), batch="mine", branch=child.name).outcome == "committed"
    assert lake.append("events", rows(9), batch="mine", branch="dev").outcome == "committed"
    delete_branch(lake, "child")
    delete_branch(lake)
    create(lake)
    assert lake.append("events", rows(9), batch="mine", branch="dev").outcome == "committed"
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(tables.sources.c.id).order_by(tables.sources.c.id)).scalars().all() == [
            *("before", "later", "mine")
        ]


def test_a_stream_goes_on_on_a_branch_from_where_it_was(lake: fm.Lake) -> None:
    def publish(position: int, branch: str) -> bool:
        rider = StreamRider("stream:events", "query", position, branch)
        try:
            operation = lake.catalog.journal.begin("append", branch=branch, actor="test", message="", batch=rider)
        except AlreadyCommitted:
            return False
        publish_sealed(lake, operation, Seal((), (rider,)))
        return True

    assert publish(5, MAIN)
    create(lake)
    assert publish(7, MAIN)
    assert [publish(position, "dev") for position in (5, 6, 6)] == [False, True, False]
    assert not publish(7, MAIN)


def publish_sealed(lake: fm.Lake, operation: Any, seal: Seal) -> fm.Commit:
    lake.catalog.journal.seal(operation, seal)
    try:
        return lake.catalog.publisher.publish(operation, seal, points=operation.kind)
    finally:
        lake.catalog.journal.active.discard(operation.id)
