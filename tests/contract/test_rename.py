"""A table under another name on both databases: what follows it, what refuses, and who was at work meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark.backfill.chunks.geometry import Chunk
from floodmark.backfill.chunks.sources import CallSource
from floodmark.catalog import tables
from floodmark.catalog.riders import BatchRider
from floodmark.commit.seal import RENAME, Edit, rider_from_dict
from floodmark.commit.shape_riders import RenameRider
from floodmark.testing.children import run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.foreign_writer import foreign_catalog
from tests.intake_world import SLOW, intake_of, state_of, take


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


def names(lake: fm.Lake, branch: str = "main") -> list[str]:
    return sorted(head.table for head in lake.heads(branch))


# ── what follows ──


def test_it_is_the_same_table_under_another_name(lake: fm.Lake, place: Place) -> None:
    lake.append("events", rows(1, 2), batch="b")
    before = lake.catalog.history.head("events")
    commit = lake.rename_table("events", "happenings", message="better", actor="me")
    assert (commit.kind, commit.message, commit.actor) == ("apply", "better", "me")
    (touched,) = commit.tables
    assert (touched.table, touched.table_id, touched.change, touched.rows_total) == (
        "happenings",
        before.table_id,
        "+0",
        2,
    )
    assert names(lake) == ["happenings", "notes"]
    assert ids(lake, "happenings") == [1, 2]
    found = lake.read_arrow("happenings", with_seq=True).read_all().to_pylist()
    assert {row["_seq"] for row in found} == {before.sequence}
    assert lake.changes("happenings", before.sequence).arrow().read_all().num_rows == 0
    assert lake.append("happenings", rows(1, 2), batch="b").outcome == "already_committed"
    with pytest.raises(fm.NotFound):
        lake.append("events", rows(3))
    lake.append("happenings", rows(3))
    with foreign_catalog(place) as catalog:
        assert {name for _, name in catalog.list_tables("default")} == {"happenings", "notes"}
        assert catalog.load_table("default.happenings").scan().to_arrow().num_rows == 3
    check_lake(lake.catalog)


def test_older_versions_have_it_under_its_old_name(lake: fm.Lake) -> None:
    version = lake.append("events", rows(1)).version
    renamed = lake.rename_table("events", "happenings").version
    assert ids(lake, "events", version) == [1]
    assert ids(lake, "happenings", renamed) == [1]
    for table, moment in (("events", renamed), ("happenings", version)):
        with pytest.raises(fm.NotFound):
            lake.read_arrow(table, version=moment)
    assert set(lake.catalog.history.tables_at(renamed)) == {"happenings", "notes"}


def test_its_history_begins_before_the_rename(lake: fm.Lake) -> None:
    made = lake.history(table="events")[-1].version
    first = lake.append("events", rows(1)).version
    renamed = lake.rename_table("events", "happenings").version
    lake.append("notes", rows(1))
    last = lake.append("happenings", rows(2)).version
    assert [commit.version for commit in lake.history(table="happenings")] == [last, renamed, first, made]
    # By a name that it had: the commits under that one.
    assert [commit.version for commit in lake.history(table="events")] == [first, made]
    for name in ("events", "happenings"):
        (found,) = lake.catalog.expiry.readable(name)
        assert [(state.table, state.version) for state in found.states] == [
            ("events", made),
            ("events", first),
            ("happenings", renamed),
            ("happenings", last),
        ]


def test_the_old_name_is_free_and_means_another_table(lake: fm.Lake) -> None:
    lake.append("events", rows(1), batch="b")
    lake.rename_table("events", "happenings")
    lake.create_table("events", EVENTS)
    assert lake.append("events", rows(1), batch="b").outcome == "committed"
    assert lake.append("happenings", rows(1), batch="b").outcome == "already_committed"
    lake.drop_table("happenings")
    lake.rename_table("events", "happenings")
    lake.rename_table("happenings", "events")
    with pytest.raises(fm.Invalid):
        lake.undrop("events")
    assert ids(lake, "events") == [1]
    lake.undrop("happenings")
    assert lake.append("happenings", rows(1), batch="b").outcome == "already_committed"
    check_lake(lake.catalog)


def test_it_may_differ_in_case_alone(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    lake.rename_table("events", "Events")
    assert names(lake) == ["Events", "notes"]
    assert ids(lake, "Events") == [1]
    check_lake(lake.catalog)


def test_a_dropped_table_comes_back_under_its_last_name(lake: fm.Lake) -> None:
    lake.append("events", rows(1), batch="b")
    lake.rename_table("events", "happenings")
    lake.drop_table("happenings")
    with pytest.raises(fm.NotFound):
        lake.undrop("events")
    lake.undrop("happenings")
    assert lake.append("happenings", rows(1), batch="b").outcome == "already_committed"
    check_lake(lake.catalog)


def test_references_on_both_sides_follow(lake: fm.Lake) -> None:
    lake.apply(
        {
            "users": {"columns": {"id": "long", "boss": "long"}, "key": ["id"], "references": {"boss": "users.id"}},
            "orders": {"columns": {"id": "long", "user": "long"}, "key": ["id"], "references": {"user": "users.id"}},
            "items": {"columns": {"id": "long", "order": "long"}, "references": {"order": "orders.id"}},
        }
    )
    lake.append("users", [{"id": 1, "boss": None}, {"id": 2, "boss": 1}])
    lake.append("orders", [{"id": 1, "user": 2}])
    lake.append("items", [{"id": 1, "order": 1}])
    lake.rename_table("users", "people")
    lake.rename_table("orders", "purchases")
    for table, row in (
        ("people", {"id": 3, "boss": 99}),
        ("purchases", {"id": 3, "user": 99}),
        ("items", {"id": 3, "order": 99}),
    ):
        with pytest.raises(fm.Invalid, match="refer to keys"):
            lake.append(table, [row])
    for table, key in (("people", 1), ("people", 2), ("purchases", 1)):
        with pytest.raises(fm.Invalid, match="refer to keys"):
            lake.delete(table, f"id = {key}")
    assert {one["name"]: one["refers_to"] for one in lake.show("items")["columns"]}["order"] == "purchases"
    with pytest.raises(fm.Invalid):
        lake.drop_table("people")
    lake.delete("items", "true")
    lake.delete("purchases", "true")
    # What is declared under the new names is as it is.
    assert lake.plan({"purchases": {"references": {"user": "people.id"}}}).outcome == "nothing_to_do"
    check_lake(lake.catalog)


def test_rows_that_wait_in_a_spool_land_in_it(lake: fm.Lake) -> None:
    with intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", {"id": 1, "name": "row 1"})
        lake.rename_table("events", "happenings")
        take(lake, intake, "happenings", {"id": 2, "name": "row 2"})
        assert intake.drain(30)
        assert state_of(intake, "happenings")["waiting_records"] == 0
    assert ids(lake, "happenings") == [1, 2]
    with lake.catalog.database.read() as tx:
        assert tx.execute(select(tables.spools.c.table_name)).scalars().all() == ["happenings"]


def test_maintenance_and_policies_go_on(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    lake.append("events", rows(2))
    lake.maintain.set_policy("events", "1000000 rows")
    lake.rename_table("events", "happenings")
    assert lake.maintain.compact("happenings", files_min=2).outcome == "compacted"
    assert lake.show("happenings")["retention"] == "1000000 rows"
    assert lake.maintain.expire(keep="0s").outcome == "expired"
    assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")
    assert ids(lake, "happenings") == [1, 2]
    check_lake(lake.catalog)


# ── branches ──


def check_no_branch(lake: fm.Lake, version: int, table: str, now: str, renamed: int) -> None:
    """Refused with what a caller needs; nothing is left of it, and from the rename on there may be one."""
    with pytest.raises(fm.Invalid, match="renamed after this version") as caught:
        lake.branches.create("dev", version=version)
    assert caught.value.facts == {"table": table, "name_now": now, "version": version, "renamed_version": renamed}
    assert f"from version {renamed} or later" in caught.value.advice
    assert [branch.name for branch in lake.branches.list()] == ["main"]
    lake.branches.create("dev", version=renamed)
    check_lake(lake.catalog)


def check_branch(lake: fm.Lake, branch: str, expected: dict[str, list[int]]) -> None:
    """A branch knows its tables by one name, whether they are listed, read, written or read at a version of it."""
    for again in (False, True):
        assert names(lake, branch) == sorted(expected)
        assert set(lake.catalog.history.tables_at(lake.branches.get(branch).head_version)) == set(expected)
        for table, numbers in expected.items():
            found = lake.read_arrow(table, branch=branch).read_all().to_pylist()
            assert sorted(row["id"] for row in found) == numbers
            assert lake.schema(table, branch=branch).column_names == ["id", "name", "_seq"]
            if not again:
                lake.append(table, rows(9), branch=branch)
                lake.delete(table, "id = 9", branch=branch)
    check_lake(lake.catalog)


def test_a_branch_begins_at_the_rename_or_later(lake: fm.Lake) -> None:
    version = lake.append("events", rows(1), batch="b").version
    renamed = lake.rename_table("events", "happenings").version
    lake.append("happenings", rows(2))
    check_no_branch(lake, version, "events", "happenings", renamed)
    assert lake.append("happenings", rows(1), batch="b", branch="dev").outcome == "already_committed"
    check_branch(lake, "dev", {"happenings": [1], "notes": []})
    # What a branch deleted of a table without a key is a conflict: another one, that only adds.
    lake.branches.delete("dev")
    lake.branches.create("dev", version=renamed)
    lake.append("happenings", rows(3), branch="dev")
    lake.branches.merge("dev")
    assert ids(lake, "happenings") == [1, 2, 3]
    check_lake(lake.catalog)


def test_so_it_does_after_two_tables_swapped_names(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    version = lake.append("notes", rows(2)).version
    lake.rename_table("events", "aside")
    lake.rename_table("notes", "events")
    last = lake.rename_table("aside", "notes").version
    check_no_branch(lake, version, "events", "notes", last)
    check_branch(lake, "dev", {"events": [2], "notes": [1]})


def test_so_it_does_if_the_table_was_dropped_since(lake: fm.Lake) -> None:
    version = lake.append("events", rows(1), batch="b").version
    renamed = lake.rename_table("events", "happenings").version
    lake.drop_table("happenings")
    check_no_branch(lake, version, "events", "happenings", renamed)
    assert lake.append("happenings", rows(1), batch="b", branch="dev").outcome == "already_committed"
    check_branch(lake, "dev", {"happenings": [1], "notes": []})


def test_a_table_that_has_its_old_name_again_stops_no_branch(lake: fm.Lake) -> None:
    version = lake.append("events", rows(1)).version
    lake.rename_table("events", "happenings")
    lake.rename_table("happenings", "events")
    lake.branches.create("dev", version=version)
    check_branch(lake, "dev", {"events": [1], "notes": []})


def test_a_table_that_main_has_too_gets_no_other_name_on_a_branch(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    for act in (
        lambda: lake.rename_table("events", "x", branch="dev"),
        lambda: lake.drop_table("events", branch="dev"),
    ):
        with pytest.raises(fm.Invalid, match="cannot be done") as caught:
            act()
        assert "other branches have it: main" in str(caught.value.facts["steps"])
        assert "one name in the lake" in caught.value.advice
    assert names(lake, "dev") == names(lake) == ["events", "notes"]


# ── what is refused ──


@pytest.mark.parametrize("name", ["notes", "Notes", "NOTES"])
def test_a_name_that_is_taken_is_refused_in_any_case(lake: fm.Lake, name: str) -> None:
    with pytest.raises(fm.Invalid, match="a table notes exists"):
        lake.rename_table("events", name)


def test_so_is_one_that_only_a_branch_has(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.create_table("drafts", EVENTS, branch="dev")
    lake.create_table("late", EVENTS)
    with pytest.raises(fm.Invalid, match="there is a table of this name"):
        lake.rename_table("late", "Drafts")
    check_lake(lake.catalog)


@pytest.mark.parametrize(
    ("table", "name", "kind"),
    [
        ("events", "events", fm.Invalid),
        ("events", "9x", fm.Invalid),
        ("events", "a-b", fm.Invalid),
        ("events", "", fm.Invalid),
        ("nowhere", "x", fm.NotFound),
    ],
)
def test_other_wrong_names_change_nothing(lake: fm.Lake, table: str, name: str, kind: type[Exception]) -> None:
    version = lake.status()["version"]
    with pytest.raises(kind):
        lake.rename_table(table, name)
    assert lake.status()["version"] == version


def test_what_cannot_follow_refuses_with_advice(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    with pytest.raises(fm.Invalid, match="branches have it: dev"):
        lake.rename_table("events", "x")
    lake.branches.delete("dev")

    held = lake.catalog.jobs.start("years", "history", ["events"], {}, {}, "chunks", "test")
    with pytest.raises(fm.Invalid, match="backfills have not ended: years"):
        lake.rename_table("events", "x")
    lake.catalog.jobs.end(held, "done", 0, 0)
    lake.rename_table("events", "x")


def read_chunk(chunk: Chunk) -> list[dict[str, Any]]:
    assert isinstance(chunk.start, int)
    return rows(chunk.start)


def test_a_history_keeps_the_name_of_its_table(lake: fm.Lake) -> None:
    """Its chunks are recorded by name: under another name they would be loaded a second time."""
    source = CallSource("tests.contract.test_rename:read_chunk", tip=4)
    assert lake.backfill.history("years", source, ["events"], chunk=2, first=0, workers=1).outcome == "done"
    with pytest.raises(fm.Invalid, match="histories recorded its chunks by its name: years"):
        lake.rename_table("events", "x")
    lake.rename_table("notes", "y")


# ── beside others ──


def take_name(lake: fm.Lake) -> None:
    lake.create_table("Happenings", EVENTS)


def begin_job(lake: fm.Lake) -> None:
    lake.catalog.jobs.start("years", "history", ["events"], {}, {}, "chunks", "test")


@pytest.mark.parametrize("point", ["apply.begun", "apply.sealed", "apply.built"])
@pytest.mark.parametrize(
    ("meddle", "kind"),
    [
        (take_name, fm.Invalid),
        (begin_job, fm.FloodmarkError),
        (lambda lake: lake.branches.create("dev"), fm.FloodmarkError),
        (lambda lake: lake.drop_table("events"), fm.FloodmarkError),
        (lambda lake: lake.rename_table("events", "other"), fm.FloodmarkError),
    ],
    ids=["name", "job", "branch", "drop", "rename"],
)
def test_what_comes_meanwhile_and_cannot_follow_refuses_it_too(
    lake: fm.Lake, other: fm.Lake, point: str, meddle: Callable[[fm.Lake], Any], kind: type[fm.FloodmarkError]
) -> None:
    with pytest.raises(kind) as caught, at(point, lambda: meddle(other)):
        lake.rename_table("events", "happenings")
    assert isinstance(caught.value, fm.Invalid | fm.Conflict | fm.NotFound), repr(caught.value)
    assert "happenings" not in names(lake)
    check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["apply.begun", "apply.sealed", "apply.built"])
def test_rows_and_columns_that_come_meanwhile_are_kept(lake: fm.Lake, other: fm.Lake, point: str) -> None:
    def meddle() -> None:
        other.append("events", rows(1), batch="b")
        other.append("events", [{"id": 2, "name": "row 2", "more": 1}], evolve=True)

    with at(point, meddle):
        lake.rename_table("events", "happenings")
    assert ids(lake, "happenings") == [1, 2]
    assert "more" in lake.schema("happenings").column_names
    assert lake.append("happenings", rows(1), batch="b").outcome == "already_committed"
    check_lake(lake.catalog)


WRITES: dict[str, Callable[[fm.Lake], Any]] = {
    "append": lambda lake: lake.append("events", rows(3), batch="c"),
    "delete": lambda lake: lake.delete("events", "id = 1"),
    "update": lambda lake: lake.update("events", {"name": "'z'"}, "id = 1"),
    "overwrite": lambda lake: lake.overwrite("events", rows(3)),
}


@pytest.mark.parametrize("step", ["begun", "sealed", "built"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_whose_table_gets_another_name_is_a_conflict(
    lake: fm.Lake, other: fm.Lake, write: str, step: str
) -> None:
    lake.append("events", rows(1))
    with (
        pytest.raises((fm.Conflict, fm.NotFound)),
        at(f"{write}.{step}", lambda: other.rename_table("events", "happenings")),
    ):
        WRITES[write](lake)
    assert ids(lake, "happenings") == [1]
    check_lake(lake.catalog)


@pytest.mark.parametrize("step", ["begun", "sealed", "built"])
@pytest.mark.parametrize("again", ["", "new", "notes"], ids=["name is free", "made again", "swapped"])
def test_a_batch_of_a_table_that_gets_another_name_is_no_commit_of_the_old_one(
    lake: fm.Lake, other: fm.Lake, step: str, again: str
) -> None:
    """It writes to another table only, so no head of the named one shows the rename."""
    lake.create_table("target", EVENTS)

    def load(table: str) -> fm.Commit | None:
        with lake.transaction(batch="b", batch_table=table) as tx:
            tx.append("target", rows(1))
        return tx.commit

    def meddle() -> None:
        other.rename_table("events", "happenings")
        if again == "new":
            other.create_table("events", EVENTS)
        elif again:
            other.rename_table("notes", "events")

    with pytest.raises(fm.Conflict, match="renamed or dropped meanwhile"), at(f"transaction.{step}", meddle):
        load("events")
    assert ids(lake, "target") == []
    for outcome in ("committed", "already_committed"):
        commit = load("happenings")
        assert commit is not None
        assert commit.outcome == outcome
    assert ids(lake, "target") == [1]
    check_lake(lake.catalog)


def load_beside_a_rename(place: Place) -> None:
    """Dies behind a rename that another process did since it was sealed."""
    with place.open(actor="child") as lake, place.open(actor="other") as other:
        act = at("transaction.built", lambda: other.rename_table("events", "happenings"))
        with act, lake.transaction(batch="b", batch_table="events") as tx:
            tx.append("notes", rows(1))


def test_nor_does_recovery_publish_it(lake: fm.Lake, place: Place) -> None:
    assert run_killed(load_beside_a_rename, place, failpoint="transaction.locked")
    with place.open() as lake:
        assert names(lake) == ["happenings", "notes"]
        assert ids(lake, "notes") == []
        assert [row.outcome for row in lake.audit() if row.kind == "transaction"] == ["rolled_back"]
        for outcome in ("committed", "already_committed"):
            with lake.transaction(batch="b", batch_table="happenings") as tx:
                tx.append("notes", rows(1))
            assert tx.commit is not None
            assert tx.commit.outcome == outcome
        assert ids(lake, "notes") == [1]
        check_lake(lake.catalog)


def test_a_batch_named_for_no_table_yet_is_published(lake: fm.Lake, other: fm.Lake) -> None:
    """There was nothing to take along, and what comes under the name meanwhile is found by it."""
    with (
        at("transaction.sealed", lambda: other.rename_table("events", "happenings")),
        lake.transaction(batch="b", batch_table="happenings") as tx,
    ):
        tx.append("notes", rows(1))
    with lake.transaction(batch="b", batch_table="happenings") as second:
        second.append("notes", rows(1))
    assert second.commit is not None
    assert second.commit.outcome == "already_committed"
    rider = BatchRider("table:events", "b", table_id="t")
    assert rider_from_dict(rider.as_dict()) == rider
    check_lake(lake.catalog)


def refer(lake: fm.Lake) -> None:
    lake.apply(
        {
            "users": {"columns": {"id": "long"}, "key": ["id"]},
            "orders": {"columns": {"id": "long", "user": "long"}, "references": {"user": "users.id"}},
        }
    )
    lake.append("users", [{"id": 1}, {"id": 2}])


@pytest.mark.parametrize("step", ["staged", "sealed", "built"])
def test_rows_that_refer_to_a_table_that_gets_another_name_are_checked_again(
    lake: fm.Lake, other: fm.Lake, step: str
) -> None:
    refer(lake)
    version = lake.status()["version"]
    with at(f"append.{step}", lambda: other.rename_table("users", "people")):
        lake.append("orders", [{"id": 1, "user": 1}])
    assert lake.status()["version"] == version + 2
    with at("delete.rewritten", lambda: other.rename_table("orders", "purchases")):
        lake.delete("people", "id = 2")
    with pytest.raises(fm.Invalid, match="refer to keys"):
        lake.delete("people", "id = 1")
    check_lake(lake.catalog)


def test_rows_that_refer_to_nothing_are_refused_under_either_name(lake: fm.Lake, other: fm.Lake) -> None:
    refer(lake)
    meddle = at("append.staged", lambda: other.rename_table("users", "people"))
    with pytest.raises(fm.Invalid, match="refer to keys"), meddle:
        lake.append("orders", [{"id": 1, "user": 99}])
    assert ids(lake, "orders") == []


def test_a_read_only_lake_renames_nothing(lake: fm.Lake, place: Place) -> None:
    with place.open(read_only=True) as reader:
        for verb in (
            lambda: reader.rename_table("events", "x"),
            lambda: reader.add_column("events", "x", "int"),
            lambda: reader.rename_column("events", "name", "x"),
            lambda: reader.drop_column("events", "name"),
        ):
            with pytest.raises(fm.Invalid):
                verb()
        assert reader.plan_drop_column("events", "name").destructive


def test_a_rename_is_sealed_whole(lake: fm.Lake) -> None:
    rider = RenameRider("t", "events", "happenings", "main")
    assert rider_from_dict(rider.as_dict()) == rider
    head = lake.catalog.history.head("events")
    edit = Edit(RENAME, "events", head.table_id, "here", 0, 0, snapshot=1, renamed_to="happenings")
    assert Edit.from_dict(edit.as_dict()) == edit  # type: ignore[arg-type]


# ── columns ──


def columns(lake: fm.Lake, table: str = "events") -> list[tuple[str, str, bool]]:
    return [(one["name"], one["type"], one["required"]) for one in lake.show(table)["columns"]]


def test_columns_come_get_other_names_and_go(lake: fm.Lake) -> None:
    first = lake.append("events", rows(1, 2))
    added = lake.add_column("events", "score", "decimal(10,2)", comment="of the game")
    assert (added.kind, added.message) == ("apply", "add events.score")
    assert columns(lake) == [("id", "long", True), ("name", "string", False), ("score", "decimal(10, 2)", False)]
    assert lake.show("events")["columns"][2]["comment"] == "of the game"
    lake.add_column("events", "level", "int", default=7, required=True)
    assert [row["level"] for row in lake.read_arrow("events").read_all().to_pylist()] == [7, 7]
    lake.append("events", rows(3))
    assert {row["level"] for row in lake.read_arrow("events").read_all().to_pylist()} == {7}
    lake.rename_column("events", "name", "title")
    assert {row["title"] for row in lake.read_arrow("events").read_all().to_pylist()} == {"row 1", "row 2", "row 3"}
    lake.rename_column("events", "title", "Title")
    lake.drop_column("events", "score")
    assert [one[0] for one in columns(lake)] == ["id", "Title", "level"]
    found = lake.read_arrow("events", version=first.version).read_all().to_pylist()
    assert {row["name"] for row in found} == {"row 1", "row 2"}
    # A dropped name is free, and nothing of the old column comes back.
    lake.add_column("events", "score", "string")
    assert {row["score"] for row in lake.read_arrow("events").read_all().to_pylist()} == {None}
    check_lake(lake.catalog)


def test_a_default_may_be_filled_later(lake: fm.Lake) -> None:
    lake.append("events", rows(1))
    before = set(lake.catalog.files.data_files(lake.catalog.history.head("events")))
    lake.add_column("events", "level", "string", default="low", fill_later=True)
    assert set(lake.catalog.files.data_files(lake.catalog.history.head("events"))) == before
    lake.append("events", rows(2))
    assert lake.backfill.column("events", "level", "'low'").outcome == "done"
    assert {row["level"] for row in lake.read_arrow("events").read_all().to_pylist()} == {"low"}


def cancelled_fill(lake: fm.Lake) -> None:
    """A column that is there, of which no row is filled."""
    lake.append("events", rows(1, 2))

    def cancel(processed: int, total: int | None) -> None:
        lake.backfill.cancel("events.nick")

    assert lake.backfill.column("events", "nick", "name", pause="0ms", progress=cancel).outcome == "cancelled"


def check_filled(lake: fm.Lake, table: str, column: str) -> None:
    """The rest is filled under the new name, as the refusal advises; no second column came."""
    assert lake.backfill.column(table, column, "name", pause="0ms").outcome == "done"
    found = lake.read_arrow(table).read_all().to_pylist()
    assert [(row["name"], row[column]) for row in found] == [("row 1", "row 1"), ("row 2", "row 2")]
    assert [one[0] for one in columns(lake, table)] == ["id", "name", column]
    check_lake(lake.catalog)


def test_a_fill_is_not_resumed_into_a_second_column(lake: fm.Lake) -> None:
    cancelled_fill(lake)
    lake.rename_column("events", "nick", "alias")
    with pytest.raises(fm.Invalid, match="column of this job was renamed or dropped") as caught:
        lake.backfill.resume("events.nick")
    assert "floodmark backfill column" in caught.value.advice
    assert lake.backfill.show("events.nick")["status"] == "cancelled"
    check_filled(lake, "events", "alias")


def test_nor_behind_a_rename_between_its_look_and_its_start(lake: fm.Lake, other: fm.Lake) -> None:
    cancelled_fill(lake)
    with at("job.made", lambda: other.rename_column("events", "nick", "alias")):
        done = lake.backfill.resume("events.nick")
    assert (done.outcome, done.error["kind"] if done.error else None) == ("failed", "Invalid")
    check_filled(lake, "events", "alias")


def fill_level(place: Place) -> None:
    with place.open(actor="child") as lake:
        lake.backfill.column("events", "level", "'low'")


def test_nor_one_of_a_column_that_was_there_before_it(lake: fm.Lake, place: Place) -> None:
    lake.append("events", rows(1))
    lake.add_column("events", "level", "string", default="low", fill_later=True)
    assert run_killed(fill_level, place, failpoint="job.held")
    lake.backfill.cancel("events.level")
    lake.rename_column("events", "level", "grade")
    with pytest.raises(fm.Invalid, match="column of this job was renamed or dropped"):
        lake.backfill.resume("events.level")
    assert [one[0] for one in columns(lake)] == ["id", "name", "grade"]


def test_nor_into_another_table_of_the_name(lake: fm.Lake) -> None:
    cancelled_fill(lake)
    lake.rename_table("events", "happenings")
    with pytest.raises(fm.NotFound):
        lake.backfill.resume("events.nick")
    lake.rename_table("notes", "events")
    with pytest.raises(fm.Invalid, match="another one has its name now"):
        lake.backfill.resume("events.nick")
    assert [one[0] for one in columns(lake)] == ["id", "name"]
    check_filled(lake, "happenings", "nick")


def test_a_dropped_column_comes_back_by_a_new_call_only(lake: fm.Lake) -> None:
    cancelled_fill(lake)
    lake.drop_column("events", "nick")
    with pytest.raises(fm.Invalid, match="column of this job was renamed or dropped"):
        lake.backfill.resume("events.nick")
    check_filled(lake, "events", "nick")


@pytest.mark.parametrize(
    ("verb", "word"),
    [
        (lambda lake: lake.add_column("events", "name", "int"), "column of this name"),
        (lambda lake: lake.add_column("events", "NAME", "int"), "column of this name"),
        (lambda lake: lake.add_column("events", "_seq", "int"), "reserved"),
        (lambda lake: lake.add_column("events", "x", "nonsense"), "nonsense"),
        (lambda lake: lake.add_column("events", "x", "int", default="y"), "default"),
        (lambda lake: lake.add_column("events", "x", "int", required=True), "no value"),
        (lambda lake: lake.rename_column("events", "nmae", "x"), "name"),
        (lambda lake: lake.rename_column("events", "name", "id"), "column of this name"),
        (lambda lake: lake.rename_column("events", "name", "name"), "column of this name"),
        (lambda lake: lake.rename_column("events", "name", "_pos"), "reserved"),
        (lambda lake: lake.drop_column("events", "nmae"), "name"),
        (lambda lake: lake.drop_column("keyed", "id"), "part of the key"),
        (lambda lake: lake.drop_column("single", "id"), "at least one column"),
    ],
)
def test_a_column_that_cannot_change_is_invalid_and_nothing_happens(
    lake: fm.Lake, verb: Callable[[fm.Lake], Any], word: str
) -> None:
    lake.create_table("keyed", EVENTS, key=["id"])
    lake.create_table("single", "id long")
    lake.append("events", rows(1))
    version = lake.status()["version"]
    with pytest.raises(fm.Invalid, match=word):
        verb(lake)
    assert lake.status()["version"] == version


COLUMN_VERBS: dict[str, Callable[[fm.Lake], Any]] = {
    "add": lambda lake: lake.add_column("events", "level", "int", default=7),
    "rename": lambda lake: lake.rename_column("events", "name", "title"),
    "drop": lambda lake: lake.drop_column("events", "name"),
}


@pytest.mark.parametrize("verb", COLUMN_VERBS)
@pytest.mark.parametrize("point", ["apply.begun", "apply.rewritten", "apply.sealed", "apply.built"])
def test_a_column_that_another_writer_brings_meanwhile_stays(
    lake: fm.Lake, other: fm.Lake, verb: str, point: str
) -> None:
    lake.append("events", rows(1))
    more = [{"id": 2, "name": "row 2", "more": 5}]
    with at(point, lambda: other.append("events", more, evolve=True)):
        COLUMN_VERBS[verb](lake)
    found = {row["id"]: row for row in lake.read_arrow("events").read_all().to_pylist()}
    assert {key: row["more"] for key, row in found.items()} == {1: None, 2: 5}
    if verb == "add":
        assert {row["level"] for row in found.values()} == {7}
    else:
        assert "name" not in found[1]
    check_lake(lake.catalog)


@pytest.mark.parametrize("verb", COLUMN_VERBS)
def test_the_same_change_by_another_writer_is_invalid_or_a_conflict(lake: fm.Lake, other: fm.Lake, verb: str) -> None:
    with pytest.raises((fm.Invalid, fm.Conflict)), at("apply.sealed", lambda: COLUMN_VERBS[verb](other)):
        COLUMN_VERBS[verb](lake)
    assert lake.history(limit=1)[0].actor == "other"
    check_lake(lake.catalog)
