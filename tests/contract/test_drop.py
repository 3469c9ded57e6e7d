"""A table that is dropped: gone from the head, there in older versions, and nothing of it meets one made again."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.riders import PlanAgain, Rider
from floodmark.commit.metadata import new_snapshot_id
from floodmark.commit.seal import DROP, WRITE, Edit, Seal, rider_from_dict
from floodmark.commit.shape_riders import DropRider, NamesRider, PolicyRider
from floodmark.model import MAIN
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.foreign_writer import foreign_catalog


def drop_edit(lake: fm.Lake, table: str = "events", branch: str = MAIN) -> Edit:
    head = lake.catalog.history.head(table, branch)
    location = lake.catalog.files.metadata(head.metadata_location).location
    return Edit(DROP, table, head.table_id, location, head.schema_id, head.spec_id, rows_deleted=head.rows)


def publish(lake: fm.Lake, *edits: Edit, riders: tuple[Rider, ...] = (), branch: str = MAIN) -> fm.Commit:
    journal = lake.catalog.journal
    locations = [edit.location for edit in edits]
    operation = journal.begin("apply", branch=branch, actor="test", message="", table_locations=locations)
    seal = Seal(edits, riders)
    try:
        journal.seal(operation, seal)
        return lake.catalog.publisher.publish(operation, seal, points="apply")
    except BaseException:
        journal.abandon(operation.id)
        journal.delete_files(operation)
        journal.mark_cleaned(operation.id)
        raise
    finally:
        journal.active.discard(operation.id)


def drop(lake: fm.Lake, table: str = "events", branch: str = MAIN) -> fm.Commit:
    edit = drop_edit(lake, table, branch)
    return publish(lake, edit, riders=(DropRider(edit.table_id, table, branch),), branch=branch)


def test_a_dropped_table_is_gone_from_the_head_and_read_at_older_versions(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    commit = drop(lake)
    assert [(one.table, one.rows_deleted, one.rows_total) for one in commit.tables] == [("events", 2, 0)]
    assert [head.table for head in lake.catalog.history.heads()] == ["notes"]
    assert set(lake.catalog.history.tables_at(commit.version)) == {"notes"}
    assert ids(lake, version=3) == [1, 2]
    with pytest.raises(fm.NotFound):
        lake.append("events", rows(3))
    with pytest.raises(fm.NotFound):
        lake.read_arrow("events", version=commit.version)
    lake.append("notes", rows(4))
    assert set(lake.catalog.history.tables_at(commit.version + 1)) == {"notes"}
    check_lake(lake.catalog)


def test_other_engines_find_no_dropped_table(place: Place) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1))
        drop(lake)
    with foreign_catalog(place) as catalog:
        assert catalog.list_tables("default") == []


def test_a_table_made_again_is_another_one_and_takes_the_same_batch(lake: fm.Lake) -> None:
    lake.append("events", rows(1), batch="b")
    before = lake.catalog.history.head("events")
    drop(lake)
    lake.create_table("events", EVENTS)
    assert lake.append("events", rows(1), batch="b").outcome == "committed"
    after = lake.catalog.history.head("events")
    assert before.table_id != after.table_id
    assert (ids(lake), ids(lake, version=3)) == ([1], [1])
    assert lake.catalog.history.tables_at(3)["events"].table_id == before.table_id
    check_lake(lake.catalog)


def test_a_writer_whose_table_is_dropped_under_it_gets_a_conflict(lake: fm.Lake) -> None:
    with pytest.raises(fm.Conflict), at("append.built", lambda: drop(lake)):
        lake.append("events", rows(1))
    check_lake(lake.catalog)


def test_rows_that_came_while_a_drop_was_built_are_dropped_too(lake: fm.Lake) -> None:
    with at("apply.built", lambda: lake.append("events", rows(1))):
        commit = drop(lake)
    assert ids(lake, version=commit.version - 1) == [1]
    assert [head.table for head in lake.catalog.history.heads()] == ["notes"]
    check_lake(lake.catalog)


def test_a_drop_that_was_checked_is_planned_again_when_rows_came(lake: fm.Lake) -> None:
    edit = drop_edit(lake)
    checked = Edit(**{**edit.__dict__, "checked": True, "base_snapshot": None})
    lake.append("events", rows(1))
    with pytest.raises(PlanAgain):
        publish(lake, checked)
    assert ids(lake) == [1]


def test_a_table_that_somebody_needs_is_not_dropped(lake: fm.Lake) -> None:
    table_id = lake.catalog.history.head("events").table_id
    sinks = {"name": "out", "id": "S" * 26, "kind": "files", "table_names": '["events"]', "settings": "{}"}
    counts = dict.fromkeys(("units", "rows_sent", "deletions_sent", "bytes_sent", "replays", "retries"), 0)
    with lake.catalog.database.write() as tx:
        tx.execute(insert(tables.sinks).values(**sinks, state="active", created_ms=1, updated_ms=1))
        row = {"sink": "S" * 26, "table_name": "events", "table_id": table_id, "incarnation": "i"}
        tx.execute(insert(tables.sink_tables).values(**row, **counts))
    with pytest.raises(fm.Conflict) as caught:
        drop(lake)
    assert caught.value.facts["sinks"] == "out"
    with lake.catalog.database.write() as tx:
        tx.execute(tables.sink_tables.delete())
        tx.execute(tables.sinks.delete())

    held = lake.catalog.jobs.start("years", "history", ["events"], {}, {}, "chunks", "test")
    with pytest.raises(fm.Conflict) as caught:
        drop(lake)
    assert caught.value.facts["jobs"] == "years"
    lake.catalog.jobs.end(held, "done", 0, 0)

    lake.catalog.branches.create("dev", actor="test")
    for branch, other in ((MAIN, "dev"), ("dev", MAIN)):
        with pytest.raises(fm.Conflict) as caught:
            drop(lake, branch=branch)
        assert caught.value.facts["branches"] == other
    lake.catalog.branches.delete("dev")
    drop(lake)
    check_lake(lake.catalog)


def test_a_table_that_only_a_branch_has_is_dropped_there(lake: fm.Lake) -> None:
    lake.catalog.branches.create("dev", actor="test")
    lake.create_table("drafts", EVENTS, branch="dev")
    lake.append("drafts", rows(1), batch="b", branch="dev")
    drop(lake, "drafts", "dev")
    lake.create_table("drafts", EVENTS)
    lake.append("drafts", rows(1), batch="b")
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(tables.sources.c.scope)).scalars().all() == ["table:drafts"]
    check_lake(lake.catalog)


# ── new shapes through the door ──


def test_a_policy_changes_with_its_publish_and_only_from_what_was_seen(lake: fm.Lake) -> None:
    head = lake.catalog.history.head("events")
    location = lake.catalog.files.metadata(head.metadata_location).location
    depends = Edit(WRITE, "events", head.table_id, location, head.schema_id, head.spec_id)
    commit = publish(lake, depends, riders=(PolicyRider(head.table_id, "90d", "ts", (None, None)),))
    assert commit.tables == ()
    with pytest.raises(PlanAgain):
        publish(lake, depends, riders=(PolicyRider(head.table_id, None, None, (None, None)),))
    publish(lake, depends, riders=(PolicyRider(head.table_id, None, None, ("90d", "ts")),))
    with lake.catalog.database.read() as tx:
        row = tx.execute(select(tables.upkeep).where(tables.upkeep.c.table_id == head.table_id)).one()
    assert (row.retention, row.retention_column) == (None, None)
    check_lake(lake.catalog)


def test_a_spec_and_a_sort_order_change_for_new_data(lake: fm.Lake) -> None:
    from pyiceberg.partitioning import PartitionField, PartitionSpec
    from pyiceberg.table.sorting import SortField, SortOrder
    from pyiceberg.transforms import BucketTransform, IdentityTransform

    lake.append("events", rows(1))
    head = lake.catalog.history.head("events")
    location = lake.catalog.files.metadata(head.metadata_location).location
    spec = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "id_bucket"), spec_id=1)
    order = SortOrder(SortField(source_id=1, transform=IdentityTransform()), order_id=1)
    edit = Edit(
        WRITE,
        "events",
        head.table_id,
        location,
        head.schema_id,
        spec.spec_id,
        base_spec_id=head.spec_id,
        spec=spec.model_dump_json(),
        sort=order.model_dump_json(),
        snapshot=new_snapshot_id(),
    )
    publish(lake, edit)
    with pytest.raises(PlanAgain):
        publish(lake, edit)
    metadata = lake.catalog.files.metadata(lake.catalog.history.head("events").metadata_location)
    assert (metadata.default_spec_id, metadata.default_sort_order_id, metadata.last_partition_id) == (1, 1, 1000)
    assert lake.catalog.history.head("events").spec_id == 1
    lake.append("events", rows(2, 3, 4))
    assert ids(lake) == [1, 2, 3, 4]
    check_lake(lake.catalog)


@pytest.mark.parametrize(
    "rider",
    [
        PolicyRider("t", "90d", None, (None, "ts")),
        DropRider("t", "events", "dev"),
        NamesRider("t", "events", ("90d", "ts"), (("files", "0a"), ("other", "0b"))),
    ],
    ids=["policy", "drop", "names"],
)
def test_riders_of_shapes_are_sealed_whole(rider: Rider) -> None:
    assert rider_from_dict(rider.as_dict()) == rider
