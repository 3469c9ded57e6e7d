"""Columns and tables of a branch on both databases: added, renamed, dropped there, and brought to others by merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import floodmark as fm
from floodmark.commit.seal import rider_from_dict
from floodmark.commit.shape_riders import NamesRider
from floodmark.ingest.receive import Sender
from floodmark.model import MAIN
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.foreign_writer import foreign_catalog

TABLES = {"keyed": "people", "plain": "events"}


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    """A keyed table and one without a key, two rows each, and a branch."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        lake.create_table("events", EVENTS)
        for table in ("people", "events"):
            lake.append(table, rows(1, 2))
        lake.branches.create("dev")
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


@pytest.fixture(params=list(TABLES))
def table(request: pytest.FixtureRequest) -> str:
    return TABLES[request.param]


def columns(lake: fm.Lake, table: str, branch: str = MAIN) -> list[str]:
    return [name for name in lake.schema(table, branch=branch).column_names if name != "_seq"]


def read(lake: fm.Lake, table: str, branch: str = MAIN) -> list[dict[str, Any]]:
    found = lake.read_arrow(table, branch=branch).read_all().to_pylist()
    return sorted(found, key=lambda row: int(row["id"]))


def conflicts(lake: fm.Lake, source: str = "dev", into: str | None = None, **options: Any) -> list[fm.RowConflict]:
    version = lake.status()["version"]
    merged = lake.branches.merge(source, into=into, on_conflict="return", **options)
    assert merged.outcome == "conflict"
    assert lake.status()["version"] == version
    planned = lake.branches.merge(source, into=into, dry_run=True, **options)
    assert planned.conflicts == merged.conflicts
    return list(merged.conflicts)


# ── on the branch ──


def test_a_branch_gets_its_own_columns_and_main_keeps_its(lake: fm.Lake, place: Place, table: str) -> None:
    lake.add_column(table, "level", "int", default=7, branch="dev")
    lake.add_column(table, "note", "string", comment="what they said", branch="dev")
    commit = lake.rename_column(table, "name", "title", branch="dev", message="better")
    assert (commit.kind, commit.branch, commit.message) == ("apply", "dev", "better")
    lake.append(table, [{"id": 3, "title": "c", "note": "x"}], branch="dev")
    lake.append(table, rows(4))
    assert columns(lake, table) == ["id", "name"]
    assert read(lake, table) == rows(1, 2, 4)
    assert read(lake, table, "dev") == [
        {"id": 1, "title": "row 1", "level": 7, "note": None},
        {"id": 2, "title": "row 2", "level": 7, "note": None},
        {"id": 3, "title": "c", "level": 7, "note": "x"},
    ]
    with pytest.raises(fm.Invalid):
        lake.append(table, [{"id": 5, "level": 1}])
    with foreign_catalog(place) as catalog:
        theirs = catalog.load_table(f"default.{table}")
        assert theirs.schema().column_names == ["id", "name", "_seq"]
        assert sorted(theirs.scan().to_arrow()["id"].to_pylist()) == [1, 2, 4]
    lake.drop_column(table, "level", branch="dev")
    assert columns(lake, table, "dev") == ["id", "title", "note"]
    # Its own versions have what they had.
    assert lake.read_arrow(table, version=commit.version).read_all().column_names == ["id", "title", "level", "note"]


def test_the_first_change_of_a_branch_may_be_one_of_columns(lake: fm.Lake, table: str) -> None:
    before = lake.catalog.history.head(table)
    lake.drop_column(table, "name", branch="dev")
    assert lake.catalog.history.head(table) == before
    assert read(lake, table, "dev") == [{"id": 1}, {"id": 2}]
    # Rows keep their sequences: a consumer of the branch gets nothing again.
    assert lake.changes(table, before.sequence, branch="dev").arrow().read_all().num_rows == 0


def test_a_plan_of_a_branch_is_applied_there(lake: fm.Lake) -> None:
    plan = lake.plan_drop_column("events", "name", branch="dev")
    assert (plan.branch, plan.as_dict()["branch"], plan.outcome) == ("dev", "dev", "planned")
    assert plan.id != lake.plan_drop_column("events", "name").id
    assert lake.apply(plan, allow_destructive=True).branch == "dev"
    assert (columns(lake, "events"), columns(lake, "events", "dev")) == (["id", "name"], ["id"])
    with pytest.raises(fm.Conflict, match="changed since"):
        lake.apply(plan, allow_destructive=True)


def test_what_cannot_be_done_is_refused_there_too(lake: fm.Lake) -> None:
    for act in (
        lambda: lake.add_column("events", "NAME", "int", branch="dev"),
        lambda: lake.rename_column("events", "nmae", "x", branch="dev"),
        lambda: lake.drop_column("people", "id", branch="dev"),
        lambda: lake.add_column("events", "more", "int", required=True, branch="dev"),
    ):
        with pytest.raises(fm.Invalid):
            act()
    with pytest.raises(fm.NotFound):
        lake.add_column("nowhere", "x", "int", branch="dev")
    with pytest.raises(fm.NotFound):
        lake.add_column("events", "x", "int", branch="nowhere")


def test_two_branches_give_no_id_twice(lake: fm.Lake, other: fm.Lake) -> None:
    for step in ("begun", "rewritten", "sealed", "built"):
        with at(f"apply.{step}", lambda step=step: other.add_column("events", f"main_{step}", "int")):
            lake.add_column("events", f"dev_{step}", "string", branch="dev")
    mine, theirs = (lake.schema("events", branch=branch) for branch in (MAIN, "dev"))
    shared = {field.field_id for field in mine.fields} & {field.field_id for field in theirs.fields}
    assert {mine.find_column_name(field_id) for field_id in shared} == {"id", "name", "_seq"}
    assert mine.schema_id != theirs.schema_id
    lake.append("events", [{"id": 3, "dev_begun": "x"}], branch="dev")
    lake.append("events", [{"id": 3, "main_begun": 5}])
    assert read(lake, "events", "dev")[-1]["dev_begun"] == "x"
    assert read(lake, "events")[-1]["main_begun"] == 5


def test_the_default_of_a_column_outlives_its_drop_on_another_branch(lake: fm.Lake) -> None:
    lake.branches.delete("dev")
    lake.add_column("events", "level", "int", default=7)
    for here, there in ((MAIN, "dev"), ("dev", MAIN)):
        lake.branches.create("dev")
        lake.drop_column("events", "level", branch=here)
        lake.append("events", rows(3), branch=there)
        assert read(lake, "events", there)[-1]["level"] == 7
        assert columns(lake, "events", here) == ["id", "name"]
        lake.branches.delete("dev")
        if here == MAIN:
            lake.add_column("events", "level", "int", default=7)


def test_writers_of_the_branch_go_on(lake: fm.Lake, other: fm.Lake, table: str) -> None:
    """Rows that were staged for the old columns are staged again for the new ones."""
    with at("append.staged", lambda: other.add_column(table, "level", "int", default=7, branch="dev")):
        lake.append(table, rows(3), branch="dev")
    with at("append.staged", lambda: other.rename_column(table, "name", "title", branch="dev")):
        lake.append(table, [{"id": 4, "name": "row 4"}], branch="dev")
    assert read(lake, table, "dev")[2:] == [
        {"id": 3, "title": "row 3", "level": 7},
        {"id": 4, "title": "row 4", "level": 7},
    ]
    # What happens on main does not disturb it.
    with at("apply.sealed", lambda: other.append(table, rows(9))):
        assert lake.drop_column(table, "level", branch="dev").outcome == "committed"


def test_main_sorts_by_a_column_that_the_branch_does_not_have(lake: fm.Lake) -> None:
    lake.drop_column("events", "name", branch="dev")
    lake.apply({"events": {"sort": ["name"]}})
    lake.append("events", [{"id": 3}, {"id": 0}], branch="dev")
    assert [row["id"] for row in read(lake, "events", "dev")] == [0, 1, 2, 3]


# ── merged ──


@pytest.mark.parametrize("into", [MAIN, "dev"])
def test_a_merge_brings_the_columns_and_rows_of_both_sides_fit(
    lake: fm.Lake, place: Place, table: str, into: str
) -> None:
    source = "dev" if into == MAIN else MAIN
    lake.add_column(table, "level", "int", default=7, branch=source)
    lake.rename_column(table, "name", "title", branch=source)
    lake.append(table, [{"id": 3, "title": "c", "level": 1}], branch=source)
    lake.append(table, rows(4), branch=into)
    merged = lake.branches.merge(source, into=into)
    assert [(one.table, one.change) for one in merged.tables] == [(table, "reshaped")]
    assert read(lake, table, into) == [
        {"id": 1, "title": "row 1", "level": 7},
        {"id": 2, "title": "row 2", "level": 7},
        {"id": 3, "title": "c", "level": 1},
        {"id": 4, "title": "row 4", "level": 7},
    ]
    assert lake.branches.merge(source, into=into).outcome == "up_to_date"
    # And back: the other side's rows, in the columns that both have now.
    lake.append(table, [{"id": 5, "title": "e", "level": 2}], branch=into)
    lake.branches.merge(into, into=source)
    assert read(lake, table, source) == read(lake, table, into)
    with foreign_catalog(place) as catalog:
        theirs = catalog.load_table(f"default.{table}").schema().column_names
        assert [name for name in theirs if name != "_seq"] == columns(lake, table) == ["id", "title", "level"]


def test_a_change_of_columns_alone_is_merged(lake: fm.Lake, place: Place, table: str) -> None:
    lake.rename_column(table, "name", "title", branch="dev")
    lake.append("people" if table == "events" else "events", rows(8))
    merged = lake.branches.merge("dev")
    assert [(one.table, one.change, one.rows_added) for one in merged.tables] == [(table, "reshaped", 0)]
    assert columns(lake, table) == ["id", "title"]
    with foreign_catalog(place) as catalog:
        assert catalog.load_table(f"default.{table}").schema().column_names[:2] == ["id", "title"]
    lake.drop_column(table, "title", branch="dev")
    assert lake.branches.merge("dev").outcome == "merged"
    assert read(lake, table) == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("into", [MAIN, "dev"])
def test_a_column_of_the_key_gets_another_name(lake: fm.Lake, into: str) -> None:
    source = "dev" if into == MAIN else MAIN
    lake.delete("people", "id = 2", branch=into)
    lake.rename_column("people", "id", "nr", branch=source)
    lake.merge("people", [{"nr": 1, "name": "new"}, {"nr": 3, "name": "c"}], branch=source)
    lake.delete("people", "nr = 3", branch=source)
    lake.append("people", rows(4), branch=into)
    lake.branches.merge(source, into=into)
    found = lake.read_arrow("people", branch=into).read_all().to_pylist()
    assert sorted(found, key=lambda row: int(row["nr"])) == [{"nr": 1, "name": "new"}, {"nr": 4, "name": "row 4"}]


@pytest.mark.parametrize("dropped_on", [MAIN, "dev"])
def test_values_for_a_column_that_the_other_side_dropped_are_conflicts(
    lake: fm.Lake, table: str, dropped_on: str
) -> None:
    wrote_on = "dev" if dropped_on == MAIN else MAIN
    lake.drop_column(table, "name", branch=dropped_on)
    if table == "people":
        lake.merge(table, [{"id": 1, "name": "new"}], branch=wrote_on)
    else:
        lake.append(table, [{"id": 3, "name": "new"}], branch=wrote_on)
    (found,) = conflicts(lake)
    assert (found.table, found.reason, found.about) == (table, "column", "name")
    assert (found.ours or found.theirs or {})["name"] == "new"
    keeps = "ours" if dropped_on == MAIN else "theirs"
    assert conflicts(lake, prefer="theirs" if keeps == "ours" else "ours")
    lake.branches.merge("dev", prefer=keeps)
    assert columns(lake, table) == ["id"]


def test_a_name_that_is_given_to_another_column_does_not_move_values(lake: fm.Lake, table: str) -> None:
    lake.rename_column(table, "name", "title", branch="dev")
    lake.add_column(table, "name", "string", branch="dev")
    lake.append(table, [{"id": 3, "title": "t", "name": "n"}], branch="dev")
    lake.append(table, rows(4))
    lake.branches.merge("dev")
    assert [(row["title"], row["name"]) for row in read(lake, table)] == [
        ("row 1", None),
        ("row 2", None),
        ("t", "n"),
        ("row 4", None),
    ]


def test_both_sides_changed_the_columns(lake: fm.Lake, table: str) -> None:
    lake.add_column(table, "mine", "int")
    lake.rename_column(table, "name", "title", branch="dev")
    lake.append(table, [{"id": 3, "title": "c"}], branch="dev")
    (found,) = conflicts(lake)
    assert (found.table, found.reason) == (table, "schema")
    lake.branches.merge("dev", prefer="theirs")
    assert columns(lake, table) == ["id", "title"]
    assert [row["title"] for row in read(lake, table)] == ["row 1", "row 2", "c"]


# ── what uses a column by its name ──


def sink_on(lake: fm.Lake, place: Place, branch: str = MAIN) -> None:
    lake.sinks.add("out", "files", tables=["events"], path=f"{place.path}-out", columns=["id", "name"], branch=branch)


def test_a_sink_that_names_the_column_on_main_stops_the_merge_not_the_branch(lake: fm.Lake, place: Place) -> None:
    sink_on(lake, place)
    lake.rename_column("events", "name", "title", branch="dev")
    lake.append("events", [{"id": 3, "title": "c"}], branch="dev")
    for prefer in (None, "ours", "theirs"):
        (found,) = conflicts(lake, prefer=prefer)
        assert (found.table, found.reason) == ("events", "needed")
        assert found.about is not None
        assert found.about.startswith("name: the sink out names it")
    with pytest.raises(fm.MergeConflict):
        lake.branches.merge("dev")
    lake.sinks.set("out", columns=["id"])
    assert lake.branches.merge("dev").outcome == "merged"
    assert lake.sinks.run("out").outcome == "shipped"


def test_a_sink_of_the_branch_stops_both(lake: fm.Lake, place: Place) -> None:
    sink_on(lake, place, "dev")
    with pytest.raises(fm.Invalid, match="cannot be done"):
        lake.rename_column("events", "name", "title", branch="dev")
    # Main's columns are not those that it names.
    lake.rename_column("events", "name", "title")
    (found,) = conflicts(lake, MAIN, "dev")
    assert found.reason == "needed"


def test_mains_retention_follows_a_rename_and_stops_a_drop(lake: fm.Lake) -> None:
    lake.add_column("events", "ts", "timestamp")
    lake.branches.merge(MAIN, into="dev")
    lake.apply({"events": {"retention": "90d", "retention_column": "ts"}}, allow_destructive=True)
    lake.rename_column("events", "ts", "moment", branch="dev")
    assert lake.catalog.maintenance.policies()[lake.catalog.history.head("events").table_id].column == "ts"
    lake.branches.merge("dev")
    assert lake.catalog.maintenance.policies()[lake.catalog.history.head("events").table_id].column == "moment"
    assert lake.maintain.retain("events").outcome in ("nothing_to_do", "retained")
    lake.drop_column("events", "moment", branch="dev")
    (found,) = conflicts(lake)
    assert "retention" in (found.about or "")
    lake.apply({"events": {"retention": "none"}})
    assert lake.branches.merge("dev").outcome == "merged"
    assert columns(lake, "events") == ["id", "name"]


def test_what_main_uses_since_stops_a_drop(lake: fm.Lake) -> None:
    lake.drop_column("events", "name", branch="dev")
    lake.apply({"events": {"sort": ["name"]}})
    (found,) = conflicts(lake)
    assert "sorted" in (found.about or "")
    lake.apply({"events": {"sort": []}})
    assert lake.branches.merge("dev").outcome == "merged"


def test_so_does_a_reference_that_main_has_since(lake: fm.Lake) -> None:
    lake.create_table("orders", "id long, who long")
    lake.branches.delete("dev")
    lake.branches.create("dev")
    lake.drop_column("orders", "who", branch="dev")
    lake.apply({"orders": {"references": {"who": "people.id"}}})
    found = conflicts(lake)
    assert [one.reason for one in found] == ["schema"]
    (found_by_force,) = conflicts(lake, prefer="theirs")
    assert "refers" in (found_by_force.about or "")


@pytest.mark.parametrize("step", ["rewritten", "sealed", "built"])
def test_a_sink_that_comes_during_the_merge_is_seen(lake: fm.Lake, other: fm.Lake, place: Place, step: str) -> None:
    lake.rename_column("events", "name", "title", branch="dev")
    lake.append("events", [{"id": 3, "title": "c"}], branch="dev")
    with at(f"branch_merge.{step}", lambda: sink_on(other, place)):
        merged = lake.branches.merge("dev", on_conflict="return")
    assert [one.reason for one in merged.conflicts] == ["needed"]
    assert columns(lake, "events") == ["id", "name"]


def test_the_rider_is_sealed_whole() -> None:
    for branch in (MAIN, "dev"):
        rider = NamesRider("t", "events", ("90d", "ts"), (("out", "digest"),), branch)
        assert rider_from_dict(rider.as_dict()) == rider


# ── tables ──


def test_a_table_of_the_branch_alone_gets_another_name_and_goes(lake: fm.Lake) -> None:
    lake.create_table("drafts", EVENTS, branch="dev")
    made = lake.append("drafts", rows(1), batch="b", branch="dev").version
    renamed = lake.rename_table("drafts", "plans", branch="dev").version
    assert lake.append("plans", rows(1), batch="b", branch="dev").outcome == "already_committed"
    assert ids_on(lake, "plans") == [1]
    assert ids(lake, "drafts", made) == [1]
    with pytest.raises(fm.Invalid, match="renamed after"):
        lake.branches.create("try", version=made)
    lake.branches.create("try", version=renamed)
    with pytest.raises(fm.Invalid, match="cannot be done"):
        lake.rename_table("plans", "more", branch="dev")
    lake.branches.delete("try")
    lake.branches.merge("dev")
    assert ids(lake, "plans") == [1]
    assert lake.append("plans", rows(1), batch="b").outcome == "already_committed"
    for act in (lake.drop_table, lambda name, **on: lake.rename_table(name, "more", **on)):
        for branch in (MAIN, "dev"):
            with pytest.raises(fm.Invalid, match="cannot be done") as caught:
                act("plans", branch=branch)
            assert ("one name in the lake" in caught.value.advice) is (branch == "dev")


def test_a_dropped_table_of_a_branch_is_not_merged_and_its_name_is_free(lake: fm.Lake) -> None:
    lake.create_table("drafts", EVENTS, branch="dev")
    version = lake.append("drafts", rows(1), batch="b", branch="dev").version
    plan = lake.plan_drop("drafts", branch="dev")
    assert "older versions of dev keep it" in plan.steps[0].text
    lake.drop_table("drafts", branch="dev")
    assert ids(lake, "drafts", version) == [1]
    with pytest.raises(fm.NotFound):
        lake.undrop("drafts")
    lake.create_table("drafts", EVENTS)
    lake.append("drafts", rows(2), batch="b")
    assert lake.branches.merge("dev").outcome == "up_to_date"
    with pytest.raises(fm.Invalid, match="dropped since"):
        lake.branches.create("try", version=version)
    lake.branches.delete("dev")
    lake.catalog.expiry.expire(before_ms=2**60)
    assert lake.maintain.sweep(grace="0s").outcome == "swept"
    assert ids(lake, "drafts") == [2]


def ids_on(lake: fm.Lake, table: str, branch: str = "dev") -> list[int]:
    return [row["id"] for row in read(lake, table, branch)]


# ── old versions, drops and sweeps ──


def test_columns_of_a_branch_outlive_expiry_and_the_other_branch(lake: fm.Lake, table: str) -> None:
    lake.add_column(table, "level", "int", default=7, branch="dev")
    lake.rename_column(table, "name", "title", branch="dev")
    lake.append(table, [{"id": 3, "title": "c", "level": 1}], branch="dev")
    for _ in range(2):
        lake.catalog.expiry.expire(before_ms=2**60)
        lake.maintain.sweep(grace="0s", deep=True)
        lake.append(table, rows(4 + _))
    assert read(lake, table, "dev")[-1] == {"id": 3, "title": "c", "level": 1}
    lake.branches.merge("dev")
    lake.branches.delete("dev")
    lake.catalog.expiry.expire(before_ms=2**60)
    lake.maintain.sweep(grace="0s", deep=True)
    assert [row["title"] for row in read(lake, table)] == ["row 1", "row 2", "c", "row 4", "row 5"]
    assert lake.maintain.compact(table, files_min=2).outcome == "compacted"
    assert [row["level"] for row in read(lake, table)] == [7, 7, 1, 7, 7]


def test_a_table_comes_back_in_mains_columns_whatever_a_branch_did(lake: fm.Lake) -> None:
    lake.branches.delete("dev")
    version = lake.status()["version"]
    lake.drop_table("events")
    lake.branches.create("dev", version=version)
    lake.rename_column("events", "name", "title", branch="dev")
    lake.drop_column("people", "name", branch="dev")
    lake.undrop("events")
    assert read(lake, "events") == rows(1, 2)
    assert columns(lake, "events", "dev") == ["id", "title"]
    lake.branches.merge("dev")
    assert (columns(lake, "events"), columns(lake, "people")) == (["id", "title"], ["id"])


@pytest.fixture
def dropped(lake: fm.Lake) -> fm.Lake:
    """Main has dropped events, and dev, from before, has it."""
    lake.branches.delete("dev")
    version = lake.status()["version"]
    lake.drop_table("events")
    lake.branches.create("dev", version=version)
    return lake


def test_a_table_comes_back_only_under_the_name_that_it_has_on_a_branch(dropped: fm.Lake) -> None:
    dropped.rename_table("events", "plans", branch="dev")
    dropped.append("plans", rows(3), branch="dev")
    for again in (False, True):
        with pytest.raises(fm.Invalid, match="another name on a branch") as caught:
            dropped.undrop("events")
        assert (caught.value.facts["branch"], caught.value.facts["name_now"]) == ("dev", "plans")
        if not again:
            dropped.create_table("events", EVENTS)
            dropped.drop_table("events")
            # That one is another table: it comes back.
            dropped.undrop("events")
            dropped.rename_table("events", "newer")
    dropped.rename_table("plans", "events", branch="dev")
    dropped.undrop("events")
    dropped.append("events", rows(4))
    dropped.append("events", rows(5), branch="dev")
    assert (ids(dropped), ids_on(dropped, "events")) == ([1, 2, 4], [1, 2, 3, 5])
    dropped.branches.merge("dev")
    assert ids(dropped) == [1, 2, 3, 4, 5]


def test_main_has_its_marks_and_batches_after_a_branch_dropped_the_table_too(lake: fm.Lake) -> None:
    lake.branches.delete("dev")
    sender = Sender("lab", 0, 0, 5, 0, 2)
    assert lake.receive("events", rows(3, 4), sender=sender).outcome == "committed"
    version = lake.append("events", rows(5), batch="b").version
    lake.append("events", rows(6))
    lake.drop_table("events")
    lake.branches.create("dev", version=version)
    lake.drop_table("events", branch="dev")
    lake.undrop("events")
    assert lake.receive("events", rows(3, 4), sender=sender).outcome == "already_committed"
    assert lake.append("events", rows(5), batch="b").outcome == "already_committed"
    assert ids(lake) == [1, 2, 3, 4, 5, 6]


def test_it_comes_back_once_the_branch_that_renamed_it_is_deleted(dropped: fm.Lake) -> None:
    dropped.rename_table("events", "plans", branch="dev")
    dropped.branches.delete("dev")
    dropped.undrop("events")
    dropped.append("events", rows(3))
    assert ids(dropped) == [1, 2, 3]


@pytest.mark.parametrize("step", ["begun", "sealed", "built"])
def test_a_branch_that_renames_it_during_the_undrop_is_seen(dropped: fm.Lake, other: fm.Lake, step: str) -> None:
    with (
        pytest.raises(fm.Invalid, match="another name on a branch"),
        at(f"undrop.{step}", lambda: other.rename_table("events", "plans", branch="dev")),
    ):
        dropped.undrop("events")
    assert "events" not in {head.table for head in dropped.heads()}
    assert ids_on(dropped, "plans") == [1, 2]


def test_a_sink_of_the_branch_ships_on_through_a_rename(lake: fm.Lake, place: Place) -> None:
    lake.sinks.add("out", "files", tables=["events"], path=f"{place.path}-out", branch="dev", start="head")
    lake.rename_column("events", "name", "title", branch="dev")
    lake.append("events", [{"id": 3, "title": "c"}], branch="dev")
    run = lake.sinks.run("out", until_empty=True)
    assert (run.outcome, run.rows) == ("shipped", 1)
    lake.drop_column("events", "title", branch="dev")
    assert lake.sinks.run("out").outcome == "nothing_to_do"


DONE: dict[str, Callable[[fm.Lake], fm.Commit]] = {
    "add": lambda lake: lake.add_column("events", "level", "int", default=7, branch="dev", if_version=4),
    "rename": lambda lake: lake.rename_column("events", "name", "title", branch="dev", if_version=4),
    "drop": lambda lake: lake.drop_column("events", "name", branch="dev", if_version=4),
}


@pytest.mark.parametrize("verb", DONE)
def test_an_expected_version_is_that_of_the_branch(lake: fm.Lake, verb: str) -> None:
    lake.append("events", rows(3))
    assert DONE[verb](lake).outcome == "committed"
    with pytest.raises(fm.Conflict) as caught:
        lake.add_column("events", "more", "int", branch="dev", if_version=4)
    assert caught.value.facts["branch"] == "dev"
