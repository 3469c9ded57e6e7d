"""The edge between a branch and its parent: what is new on each side, what a merge stands on, a table that is taken."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection

import floodmark as fm
from floodmark.catalog.lineage import Lineages
from floodmark.catalog.merge_base import (
    MergeBase,
    MergeRider,
    doubled_tables,
    find_merge_base,
    merged_sequences,
    own_changes,
    since_sequence,
)
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.commit.live_files import live_files
from floodmark.commit.metadata import new_snapshot_id
from floodmark.commit.seal import TAKE, WRITE, Edit, Seal
from floodmark.model import BEGINNING, MAIN
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows
from tests.contract.test_branches import create, delete_branch, ids, metadata, publish_sealed
from tests.foreign_writer import foreign_catalog


def merge_rider(lake: fm.Lake, source: str, target: str) -> MergeRider:
    edge = lake.catalog.branches.merge_base(source, target)
    return MergeRider(
        edge.source.id,
        edge.source.name,
        edge.source_head,
        edge.target.id,
        edge.child.id,
        edge.common_version,
        edge.source_since,
    )


def publish_merge(lake: fm.Lake, target: str, rider: Rider, *edits: Edit) -> fm.Commit:
    operation = lake.catalog.journal.begin(
        "branch_merge",
        branch=target,
        actor="test",
        message="",
        table_locations=[edit.location for edit in edits],
        held_version=1,
    )
    assert operation.base_version == 1
    try:
        return publish_sealed(lake, operation, Seal(edits, (rider,)))
    except BaseException:
        lake.catalog.journal.abandon(operation.id)
        lake.catalog.journal.delete_files(operation)
        lake.catalog.journal.mark_cleaned(operation.id)
        raise


def take_edit(lake: fm.Lake, table: str, source: str) -> Edit:
    head = lake.catalog.history.head(table, source)
    return Edit(
        TAKE,
        table,
        head.table_id,
        lake.catalog.files.metadata(head.metadata_location).location,
        head.schema_id,
        head.spec_id,
        snapshot=new_snapshot_id(),
        base_snapshot=head.snapshot,
        source_branch=source,
        rows_added=head.rows,
        checked=True,
    )


@pytest.mark.parametrize("filled", [True, False], ids=["rows", "empty"])
def test_a_table_is_taken_from_another_branch_with_the_sequences_of_its_rows(place: Place, filled: bool) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        create(lake)
        lake.create_table("drafts", EVENTS, branch="dev")
        if filled:
            lake.append("drafts", rows(1, 2), branch="dev")
            lake.append("drafts", [{"id": 3, "name": "c", "more": 1}], evolve=True, branch="dev")
        before = {} if not filled else _sequences(lake, "drafts", "dev")
        commit = publish_merge(lake, MAIN, merge_rider(lake, "dev", MAIN), take_edit(lake, "drafts", "dev"))
        assert (commit.branch, commit.table("drafts").rows_total) == (MAIN, 3 * filled)
        assert ids(lake, "drafts") == [1, 2, 3] * filled == ids(lake, "drafts", branch="dev")
        if filled:
            assert _sequences(lake, "drafts", MAIN) == before
        head, known = lake.catalog.history.head("drafts"), metadata(lake, "drafts")
        assert (known.current_snapshot_id, known.current_schema_id) == (head.snapshot, head.schema_id)
        check_lake(lake.catalog)
        lake.append("drafts", rows(9))
        lake.append("drafts", rows(8), branch="dev")
        check_lake(lake.catalog)
    with foreign_catalog(place) as catalog:
        found = catalog.load_table("default.drafts").scan().to_arrow()["id"].to_pylist()
        assert sorted(found) == [*([1, 2, 3] * filled), 9]


def _sequences(lake: fm.Lake, table: str, branch: str) -> dict[int, int]:
    head = lake.catalog.history.head(table, branch)
    schema = lake.catalog.files.metadata(head.metadata_location).schema_by_id(head.schema_id)
    return {file.path: file.sequence for file in live_files(lake.catalog.files, head, schema)}


def test_a_table_that_moved_or_came_meanwhile_is_not_taken(lake: fm.Lake) -> None:
    create(lake)
    lake.create_table("drafts", EVENTS, branch="dev")
    lake.append("drafts", rows(1), branch="dev")
    edit = take_edit(lake, "drafts", "dev")
    lake.append("drafts", rows(2), branch="dev")
    with pytest.raises(PlanAgain):
        publish_merge(lake, MAIN, merge_rider(lake, "dev", MAIN), edit)
    rider, edit, other = (
        merge_rider(lake, "dev", MAIN),
        take_edit(lake, "drafts", "dev"),
        take_edit(lake, "drafts", "dev"),
    )

    def take_first() -> None:
        publish_merge(lake, MAIN, merge_rider(lake, "dev", MAIN), other)

    with pytest.raises(PlanAgain), at("branch_merge.built", take_first):
        publish_merge(lake, MAIN, rider, edit)
    assert ids(lake, "drafts") == [1, 2]
    check_lake(lake.catalog)


def test_a_merge_stands_on_an_unmoved_source_and_edge(lake: fm.Lake) -> None:
    create(lake)
    lake.append("events", rows(1), branch="dev")
    planned = merge_rider(lake, "dev", MAIN)
    lake.append("events", rows(2), branch="dev")
    with pytest.raises(PlanAgain):
        publish_merge(lake, MAIN, planned)
    planned = merge_rider(lake, "dev", MAIN)
    merged = publish_merge(lake, MAIN, planned)
    with pytest.raises(PlanAgain):
        publish_merge(lake, MAIN, planned)
    edge = lake.catalog.branches.merge_base("dev", MAIN)
    assert (edge.common_version, edge.source_since, edge.source_head) == (4, 4, 4)
    # What the source knows of the target: a merge this way does not teach it anything.
    assert (edge.target_since, edge.target_head) == (2, merged.version)
    back = lake.catalog.branches.merge_base(MAIN, "dev")
    assert (back.common_version, back.source_since, back.target_since) == (4, 2, 4)
    assert back.child == edge.child == edge.source == back.target
    planned = merge_rider(lake, MAIN, "dev")
    delete_branch(lake)
    with pytest.raises(fm.NotFound):
        lake.catalog.branches.merge_base("dev", MAIN)
    with lake.catalog.database.read() as tx, pytest.raises(fm.Conflict):
        planned.check(tx)
    check_lake(lake.catalog)


def test_a_merge_of_a_branch_that_is_deleted_meanwhile_is_a_conflict(lake: fm.Lake) -> None:
    create(lake)
    lake.append("events", rows(1), branch="dev")
    planned = merge_rider(lake, "dev", MAIN)
    with pytest.raises(fm.Conflict), at("branch_merge.built", lambda: delete_branch(lake)):
        publish_merge(lake, MAIN, planned)
    assert lake.catalog.branches.get(MAIN).head_version == 2
    check_lake(lake.catalog)


def test_branches_merge_along_their_edge_only(lake: fm.Lake) -> None:
    create(lake)
    create(lake, "child", source="dev")
    create(lake, "other")
    assert lake.catalog.branches.merge_base("child", "dev").child.name == "child"
    for source, target in (("child", MAIN), ("other", "dev"), (MAIN, "child"), ("dev", "dev")):
        with pytest.raises(fm.Invalid):
            lake.catalog.branches.merge_base(source, target)


def test_an_edge_tells_what_is_new_on_each_side(lake: fm.Lake) -> None:
    lake.append("events", rows(1), batch="old")
    create(lake)
    lake.append("events", rows(2), batch="both", branch="dev")
    lake.append("events", [{"id": 3, "name": "c", "more": 1}], evolve=True, branch="dev")
    lake.append("notes", rows(4), batch="both")
    lake.append("events", rows(5), batch="both")
    event_id, note_id = (lake.catalog.history.head(name).table_id for name in ("events", "notes"))
    edge = lake.catalog.branches.merge_base("dev", MAIN)
    with lake.catalog.database.read() as tx:
        ours, theirs = own_changes(tx, edge, "target"), own_changes(tx, edge, "source")
        assert _doubled(tx, edge) == {event_id}
        assert since_sequence(tx, edge, event_id) == 1
        assert since_sequence(tx, edge, "no table") == BEGINNING
    assert set(theirs) == {event_id}
    assert set(ours) == {event_id, note_id}
    assert (theirs[event_id].rows_added, theirs[event_id].commits, theirs[event_id].reshaped) == (2, 2, True)
    assert (ours[event_id].rows_added, ours[event_id].reshaped) == (1, False)

    publish_merge(lake, MAIN, merge_rider(lake, "dev", MAIN))
    edge = lake.catalog.branches.merge_base("dev", MAIN)
    with lake.catalog.database.read() as tx:
        assert own_changes(tx, edge, "source") == {}
        assert set(own_changes(tx, edge, "target")) == {event_id, note_id}
        assert own_changes(tx, edge, "target", {event_id: edge.target_head, note_id: edge.target_head}) == {}
        assert set(own_changes(tx, lake.catalog.branches.merge_base(MAIN, "dev"), "source")) == {event_id, note_id}
        assert _doubled(tx, edge) == set()


def _doubled(tx: Connection, edge: MergeBase) -> set[str]:
    return doubled_tables(tx, edge, {}, {}, Lineages.read(tx))


def test_a_merge_brings_the_identities_and_counts_as_no_change_of_its_own(lake: fm.Lake) -> None:
    create(lake)
    lake.append("events", rows(1), batch="one", branch="dev")
    head = lake.catalog.history.head("events")
    edit = Edit(
        WRITE,
        "events",
        head.table_id,
        lake.catalog.files.metadata(head.metadata_location).location,
        head.schema_id,
        head.spec_id,
        snapshot=new_snapshot_id(),
        properties={"merged": "yes"},
    )
    commit = publish_merge(lake, MAIN, merge_rider(lake, "dev", MAIN), edit)
    assert lake.append("events", rows(1), batch="one").outcome == "already_committed"
    with lake.catalog.database.read() as tx:
        back = find_merge_base(tx, MAIN, "dev")
        assert own_changes(tx, back, "source") == {}
        assert merged_sequences(tx, back, head.table_id) == {commit.table("events").sequence}
        assert merged_sequences(tx, find_merge_base(tx, "dev", MAIN), head.table_id) == frozenset()
