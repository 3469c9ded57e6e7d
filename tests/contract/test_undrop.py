"""A table that was dropped comes back as it was: the same table, its sequences, its marks, what came in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import Consumer
from floodmark.commit.dropped import DroppedTable, find_dropped
from floodmark.commit.seal import rider_from_dict
from floodmark.commit.shape_riders import UndropRider
from floodmark.commit.table_states import CONDEMNED_MS
from floodmark.model import SNAPSHOTS_KEPT
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.contract.test_dropped_tables import expire_and_sweep, files_of, location_of, waiting
from tests.foreign_writer import foreign_catalog
from tests.intake_world import SLOW, intake_of, take

pytestmark = pytest.mark.mostly_sqlite(3)


@pytest.fixture
def people(lake: fm.Lake) -> fm.Lake:
    """A keyed table with rows that came by batches, one that was changed and one that was deleted."""
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", rows(1, 2), batch="first")
    lake.merge("people", [{"id": 2, "name": "changed"}, {"id": 3, "name": "three"}], batch="second")
    lake.delete("people", "id = 1")
    return lake


def facts(lake: fm.Lake, table: str = "people") -> list[tuple[int, str, int]]:
    found = lake.read_arrow(table, with_seq=True).read_all().to_pylist()
    return sorted((row["id"], row["name"], row["_seq"]) for row in found)


def changes(lake: fm.Lake, since: int | None = None) -> Sequence[tuple[int, str, int]]:
    found = lake.changes("people", since).arrow().read_all().to_pylist()
    return sorted((row["id"], row["_change"], row["_seq"]) for row in found)


def dropped(lake: fm.Lake, table: str = "people") -> DroppedTable:
    with lake.catalog.database.read() as tx:
        return find_dropped(tx, table)


def scopes(lake: fm.Lake) -> list[str]:
    with lake.catalog.database.read() as tx:
        return sorted(tx.execute(select(tables.sources.c.scope)).scalars())


def test_a_dropped_table_comes_back_with_its_id_rows_and_sequences(people: fm.Lake, place: Place) -> None:
    before, head, fed = facts(people), people.catalog.history.head("people"), changes(people)
    people.drop_table("people")
    back = people.undrop("people", actor="me")
    assert (back.outcome, back.kind, back.actor, back.message) == ("committed", "undrop", "me", "undrop people")
    assert [(one.table, one.table_id, one.rows_total) for one in back.tables] == [("people", head.table_id, 2)]
    assert (facts(people), changes(people), changes(people, head.sequence)) == (before, fed, [])
    now = people.catalog.history.head("people")
    assert (now.table_id, now.schema_id, now.spec_id) == (head.table_id, head.schema_id, head.spec_id)
    assert now.sequence > head.sequence
    with foreign_catalog(place) as catalog:
        assert sorted(catalog.load_table("default.people").scan().to_arrow()["id"].to_pylist()) == [2, 3]
    people.merge("people", [{"id": 4, "name": "four"}])
    assert ids(people, "people") == [2, 3, 4]
    with pytest.raises(fm.Invalid):
        people.append("people", rows(2))
    check_lake(people.catalog)


def test_versions_before_and_between_read_as_they_did(people: fm.Lake) -> None:
    gone = people.drop_table("people").version
    people.append("events", rows(1))
    back = people.undrop("people").version
    assert ids(people, "people", gone - 1) == ids(people, "people", back) == [2, 3]
    for version in (gone, back - 1):
        with pytest.raises(fm.NotFound):
            people.read_arrow("people", version=version)


def test_batch_ids_go_on_and_a_table_of_the_same_name_between_does_not_meet_them(people: fm.Lake) -> None:
    people.drop_table("people")
    people.create_table("people", EVENTS)
    assert people.append("people", rows(7), batch="first").outcome == "committed"
    people.drop_table("people")
    first = people.catalog.history.tables_at(5)["people"].table_id
    assert people.undrop("people").tables[0].rows_total == 1, "the one that was dropped last"
    people.drop_table("people")
    people.undrop("people", version=6)
    assert people.catalog.history.head("people").table_id == first
    for batch in ("first", "second"):
        assert people.append("people", rows(9), batch=batch).outcome == "already_committed"
    assert people.append("people", rows(9), batch="third").outcome == "committed"
    assert ids(people, "people") == [2, 3, 9]
    check_lake(people.catalog)


def test_a_stream_and_a_sender_go_on_where_they_were(people: fm.Lake) -> None:
    from floodmark.catalog.senders import SenderRider
    from floodmark.commit.intent import stream_rider

    table_id = people.catalog.history.head("people").table_id
    sender = SenderRider("other", table_id, 1, 0, 5, 0, 3)
    stream = stream_rider("people", "query", 4)
    with people.catalog.database.write() as tx:
        for rider in (stream, sender):
            rider.apply(tx, "0" * 26, 3, 0)
    people.drop_table("people")
    people.undrop("people")
    with people.catalog.database.read() as tx:
        for known in (stream, stream_rider("people", "query", 3), sender):
            with pytest.raises(Exception, match="published before"):
                known.check(tx)
        stream_rider("people", "query", 5).check(tx)


def test_marks_go_on_and_protect_what_they_have_not_seen(people: fm.Lake) -> None:
    head = people.catalog.history.head("people")
    consumer = Consumer("reader", head.table_id, mark=1)
    people.catalog.maintenance.put_consumer(consumer)
    seen = changes(people, 1)
    assert (1, "delete", 3) in seen
    people.drop_table("people")
    people.append("events", rows(1))
    people.catalog.history.pin(dropped(people).held_version or 0, holder="test", reason="a window")
    for number in range(2):
        people.append("events", rows(number))
        expire_and_sweep(people)
    people.undrop("people")
    assert people.catalog.maintenance.consumers(head.table_id) == [consumer]
    assert changes(people, 1) == seen, "the deletion is there, though its version has expired"
    check_lake(people.catalog)


def test_retention_goes_on(people: fm.Lake) -> None:
    people.apply({"people": {"retention": "9 rows"}}, allow_destructive=True)
    people.drop_table("people")
    people.undrop("people")
    assert people.catalog.maintenance.policy(people.catalog.history.head("people").table_id).retention == "9 rows"


def test_it_comes_back_while_a_version_is_held_and_not_after(people: fm.Lake) -> None:
    people.drop_table("people")
    pin = people.catalog.history.pin(dropped(people).held_version or 0, holder="test", reason="a window")
    for number in range(3):
        people.append("events", rows(number))
        expire_and_sweep(people, deep=True)
    people.undrop("people")
    assert ids(people, "people") == [2, 3]
    people.drop_table("people")
    people.catalog.history.unpin(pin)
    people.append("events", rows(4))
    people.append("events", rows(5))
    people.maintain.expire(keep="0s")
    with pytest.raises(fm.BelowRetention, match="have expired"):
        people.undrop("people")
    check_lake(people.catalog)


def test_what_was_kept_is_forgotten_with_the_last_version_that_has_it(people: fm.Lake) -> None:
    head, location = people.catalog.history.head("people"), location_of(people, "people")
    people.catalog.maintenance.put_consumer(Consumer("reader", head.table_id, mark=1))
    people.drop_table("people")
    assert scopes(people) == [f"{head.table_id}/{scope}" for scope in ("dropped", "table:people", "table:people")]
    people.append("events", rows(1))
    people.append("events", rows(2))
    expire_and_sweep(people, deep=True)
    assert (scopes(people), people.catalog.maintenance.consumers(head.table_id)) == ([], [])
    expire_and_sweep(people, deep=True)
    assert (files_of(people, location), waiting(people, head.table_id)) == (set(), 0)


def test_a_condemned_state_is_refused(people: fm.Lake) -> None:
    """A sweep has begun to delete its files, whatever the versions say."""
    people.drop_table("people")
    state = dropped(people).state
    with people.catalog.database.write() as tx:
        row = {"version": state.version, "table_id": state.table_id, "expired_ms": CONDEMNED_MS}
        tx.execute(insert(tables.expired).values(**row))
    with pytest.raises(fm.BelowRetention):
        people.undrop("people")


@pytest.mark.parametrize("name", ["people", "People"])
def test_a_name_that_is_taken_is_refused(people: fm.Lake, name: str) -> None:
    people.drop_table("people")
    people.create_table(name, EVENTS)
    with pytest.raises(fm.Invalid, match="taken") as caught:
        people.undrop("people")
    assert caught.value.facts["taken_by"] == name
    people.drop_table(name)
    if name == "People":
        people.undrop("people")
        assert ids(people, "people") == [2, 3]


def test_a_name_that_is_taken_meanwhile_is_refused_and_leaves_nothing(people: fm.Lake) -> None:
    people.drop_table("people")
    with (
        at("undrop.built", lambda: people.create_table("people", EVENTS)),
        pytest.raises(fm.Invalid, match="there is a table of this name"),
    ):
        people.undrop("people")
    assert ids(people, "people") == []
    check_lake(people.catalog)


def test_two_undrops_at_once_bring_it_back_once(people: fm.Lake) -> None:
    people.drop_table("people")
    with at("undrop.built", lambda: people.undrop("people")), pytest.raises(fm.Conflict, match="was restored"):
        people.undrop("people")
    assert ids(people, "people") == [2, 3]
    check_lake(people.catalog)


def test_what_cannot_be_undropped_says_what_can(people: fm.Lake) -> None:
    with pytest.raises(fm.Invalid, match="not dropped"):
        people.undrop("people")
    people.drop_table("people")
    with pytest.raises(fm.NotFound) as caught:
        people.undrop("peple")
    assert caught.value.facts["dropped"] == "people"
    with pytest.raises(fm.NotFound, match="no such version"):
        people.undrop("people", version=99)
    with pytest.raises(fm.NotFound, match="no such table"):
        people.undrop("people", version=1)


def test_an_older_state_is_refused_with_the_way_to_its_rows(people: fm.Lake) -> None:
    """Rows that were deleted since would be back with sequences that everybody has passed (I5)."""
    gone = people.drop_table("people").version
    with pytest.raises(fm.Invalid, match="only as it was when it was dropped") as caught:
        people.undrop("people", version=gone - 2)
    assert f"version={gone - 2}" in caught.value.advice
    people.undrop("people", version=gone - 1)
    people.overwrite("people", people.read_arrow("people", version=gone - 2))
    assert ids(people, "people") == [1, 2, 3]


def test_files_that_came_back_outlive_every_state_before(people: fm.Lake) -> None:
    for _ in range(2):
        people.drop_table("people")
        people.undrop("people")
    for number in range(10, 10 + SNAPSHOTS_KEPT):
        people.append("people", rows(number))
    expire_and_sweep(people, deep=True)
    expire_and_sweep(people)
    assert ids(people, "people") == [2, 3, *range(10, 10 + SNAPSHOTS_KEPT)]
    people.maintain.compact("people", files_min=2)
    expire_and_sweep(people, deep=True)
    assert ids(people, "people") == [2, 3, *range(10, 10 + SNAPSHOTS_KEPT)]


def test_an_empty_table_comes_back(lake: fm.Lake) -> None:
    lake.drop_table("notes")
    lake.undrop("notes")
    lake.append("notes", rows(1))
    assert ids(lake, "notes") == [1]
    check_lake(lake.catalog)


def test_a_table_that_an_older_floodmark_dropped_is_refused(people: fm.Lake) -> None:
    """It did not keep the batch ids: a batch that is sent again would come in twice."""
    people.drop_table("people")
    with people.catalog.database.write() as tx:
        tx.execute(tables.sources.delete())
    with pytest.raises(fm.Invalid, match="older Floodmark"):
        people.undrop("people")
    with pytest.raises(fm.Invalid, match="dropped since"):
        people.branches.create("dev", version=5)


def test_references_are_let_go_and_declared_again(lake: fm.Lake) -> None:
    """While the table was gone, rows that it refers to may have gone too."""
    shop = {
        "users": {"columns": {"id": "long"}, "key": ["id"]},
        "orders": {"columns": {"id": "long", "user": "long"}, "references": {"user": "users.id"}},
    }
    lake.apply(shop)
    lake.append("users", [{"id": 1}, {"id": 2}])
    lake.append("orders", [{"id": 1, "user": 1}])
    lake.drop_table("orders")
    lake.delete("users", "id = 1")
    told: list[tuple[str, ...]] = []
    lake.undrop("orders", told=lambda back: told.append(back.references_lost))
    assert told == [("user",)]
    lake.append("orders", [{"id": 2, "user": 7}])
    with pytest.raises(fm.Invalid, match="cannot be done"):
        lake.apply(shop)
    lake.append("users", [{"id": 1}, {"id": 7}])
    assert lake.apply(shop).outcome == "committed"
    with pytest.raises(fm.Invalid):
        lake.delete("users", "id = 1")
    lake.apply({"users": {"drop": True}, "orders": {"drop": True}}, allow_destructive=True)
    lake.undrop("users")
    lake.drop_table("users")
    check_lake(lake.catalog)


def test_a_lake_that_is_read_only_refuses_both(people: fm.Lake, place: Place) -> None:
    people.drop_table("people")
    with place.open(read_only=True) as other:
        for refused in (lambda: other.undrop("people"), lambda: other.drop_table("events")):
            with pytest.raises(fm.Invalid, match="read-only"):
                refused()


def test_rows_over_http_that_were_taken_before_the_drop_come_in_once(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", *rows(1))
        assert intake.drain(60)
    lake.drop_table("events")
    lake.undrop("events")
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", *rows(2))
        assert intake.drain(60)
    assert ids(lake) == [1, 2]
    check_lake(lake.catalog)


def test_the_rider_is_sealed_whole() -> None:
    rider = UndropRider("t", "people", 4, 7)
    assert rider_from_dict(rider.as_dict()) == rider


# ── a branch from before a drop ──


def test_a_branch_is_made_from_before_a_drop_and_knows_its_batches(people: fm.Lake) -> None:
    gone = people.drop_table("people").version
    people.branches.create("dev", version=gone - 1)
    people.branches.create("older", version=gone - 2)
    for branch, there in (("dev", [2, 3]), ("older", [1, 2, 3])):
        assert [row["id"] for row in sorted_rows(people, branch)] == there
        assert people.append("people", rows(9), batch="first", branch=branch).outcome == "already_committed"
        assert people.append("people", rows(9), batch="new", branch=branch).outcome == "committed"
        check_lake(people.catalog)
    assert [head.table for head in people.heads()] == ["events", "notes"]
    with pytest.raises(fm.Invalid, match="there is a table of this name"):
        people.create_table("people", EVENTS)


def sorted_rows(lake: fm.Lake, branch: str) -> list[dict[str, int]]:
    return sorted(lake.read_arrow("people", branch=branch).read_all().to_pylist(), key=lambda row: row["id"])


def test_a_table_that_a_branch_has_is_undropped_beside_it_and_merged(people: fm.Lake) -> None:
    gone = people.drop_table("people").version
    people.branches.create("dev", version=gone - 1)
    people.merge("people", [{"id": 5, "name": "five"}], branch="dev")
    people.undrop("people")
    check_lake(people.catalog)
    assert ids(people, "people") == [2, 3]
    people.append("people", rows(6))
    assert people.branches.merge("dev").outcome == "merged"
    assert ids(people, "people") == [2, 3, 5, 6]
    check_lake(people.catalog)


def test_a_branch_from_before_a_drop_holds_the_table(people: fm.Lake) -> None:
    gone = people.drop_table("people").version
    people.branches.create("dev", version=gone - 1)
    for number in range(2):
        people.append("events", rows(number))
        expire_and_sweep(people, deep=True)
    assert [row["id"] for row in sorted_rows(people, "dev")] == [2, 3]
    people.branches.delete("dev")
    people.undrop("people")
    assert people.append("people", rows(9), batch="first").outcome == "already_committed"
    check_lake(people.catalog)


def test_a_deleted_branch_that_wrote_last_takes_nothing_along(people: fm.Lake) -> None:
    """Its metadata is the newest of the table: ids and sequences go on from there."""
    gone = people.drop_table("people").version
    people.branches.create("dev", version=gone - 1)
    people.append("people", [{"id": 8, "name": "eight", "extra": 1}], evolve=True, branch="dev")
    sequence = people.catalog.history.head("people", "dev").sequence
    people.branches.delete("dev")
    people.catalog.history.pin(gone - 1, holder="test", reason="a window")
    for number in range(2):
        people.append("events", rows(number))
        expire_and_sweep(people, deep=True)
    people.branches.create("again", version=gone - 1)
    check_lake(people.catalog)
    people.branches.delete("again")
    people.undrop("people")
    assert people.catalog.history.head("people").sequence > sequence
    assert ids(people, "people") == [2, 3]
    people.append("people", [{"id": 9, "name": "nine", "other": "x"}], evolve=True)
    check_lake(people.catalog)


def test_a_branch_from_before_a_drop_is_refused_once_the_name_is_taken(people: fm.Lake) -> None:
    gone = people.drop_table("people").version
    people.create_table("people", EVENTS)
    with pytest.raises(fm.Invalid, match="dropped since") as caught:
        people.branches.create("dev", version=gone - 1)
    assert caught.value.facts["tables"] == "people"
    check_lake(people.catalog)


def test_an_expired_version_is_not_taken_again_by_its_number(people: fm.Lake) -> None:
    gone = people.drop_table("people").version
    with people.catalog.database.write() as tx:
        tx.execute(update(tables.commits).where(tables.commits.c.version == gone - 1).values(state="expired"))
    with pytest.raises(fm.BelowRetention):
        people.undrop("people", version=gone - 1)


def test_rows_that_came_back_are_not_counted_once_more_for_a_sink(people: fm.Lake, tmp_path: Path) -> None:
    people.create_table("papers", EVENTS)
    people.append("papers", rows(*range(11)))
    people.drop_table("papers")
    people.undrop("papers")
    about = people.sinks.add("out", "files", tables="papers", path=str(tmp_path / "out"))
    assert [one["lag_rows"] for one in about["tables"]] == [11]
    assert people.sinks.run("out").rows == 11
    assert people.sinks.about("out")["tables"][0]["lag_rows"] == 0
