"""A rollback: tables get the contents of an earlier version as a new one, and followers get exactly the difference."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import floodmark as fm
from floodmark.catalog import tables
from floodmark.failpoints import FAILPOINTS
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.testing.invariants import check_lake
from floodmark.write import table as write_table
from tests.conftest import EVENTS, Place, at, ids, rows

pytestmark = pytest.mark.mostly_sqlite(3)

POINTS = [point for point, kind in FAILPOINTS.items() if kind == "rollback"]
# Passed before the rollback is true, and while no transaction is open.
BEFORE = [point for point in POINTS if point.endswith((".begun", ".staged", ".rewritten", ".sealed", ".built"))]

Fact = tuple[Any, ...]


def named(*numbers: int, name: str) -> list[dict[str, Any]]:
    return [{"id": number, "name": name} for number in numbers]


def facts(lake: fm.Lake, table: str, version: int | None = None, branch: str = "main") -> list[Fact]:
    """The rows with their sequences."""
    found = lake.read_arrow(table, version=version, branch=branch, with_seq=True).read_all().to_pylist()
    return sorted((tuple(row.values()) for row in found), key=repr)


def contents(lake: fm.Lake, table: str, version: int | None = None, branch: str = "main") -> list[Fact]:
    return [fact[:-1] for fact in facts(lake, table, version, branch)]


def newest(lake: fm.Lake, branch: str = "main") -> int:
    return lake.catalog.history.resolve(branch=branch)


@dataclass
class Follower:
    """What a follower of a keyed table knows at every version that it looked at, by folding the changes."""

    lake: fm.Lake
    table: str = "people"
    branch: str = "main"
    known: list[tuple[int, dict[int, Fact]]] = field(default_factory=list)

    def look(self) -> None:
        """Remember the table as it is now, with the mark up to which it was followed."""
        state = {fact[0]: fact for fact in facts(self.lake, self.table, branch=self.branch)}
        self.known.append((self.lake.changes(self.table, branch=self.branch).until, state))

    def check(self) -> None:
        """From every mark on, and from the beginning, the changes lead to the table as it is."""
        expected = {fact[0]: fact for fact in facts(self.lake, self.table, branch=self.branch)}
        for since, state in [(None, {}), *self.known]:
            folded = dict(state)
            found = self.lake.changes(self.table, since, branch=self.branch).arrow().read_all().to_pylist()
            for row in found:
                change, sequence = row.pop("_change"), row.pop("_seq")
                assert since is None or sequence > since
                folded.pop(row["id"], None)
                if change == "upsert":
                    folded[row["id"]] = (*row.values(), sequence)
            assert folded == expected, f"since {since}"


@pytest.fixture
def people(lake: fm.Lake) -> fm.Lake:
    """Beside events, a keyed table whose rows were added, changed and deleted since its third version."""
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", named(1, 2, 3, name="old"))
    return lake


def change(lake: fm.Lake, branch: str = "main") -> None:
    lake.merge("people", named(2, 4, name="new"), branch=branch)
    lake.delete("people", "id = 3", branch=branch)


# ── rows, sequences, the change feed ──


@pytest.mark.parametrize("compacted", [False, True])
def test_a_keyed_table_returns_and_followers_get_exactly_the_difference(people: fm.Lake, compacted: bool) -> None:
    for number in (11, 12, 13):
        people.append("people", named(number, name="old"))
    follower, then = Follower(people), newest(people)
    follower.look()
    old = {fact[0]: fact for fact in facts(people, "people")}
    people.merge("people", named(2, 4, name="new"))
    follower.look()
    people.delete("people", "id = 3")
    follower.look()
    if compacted:
        assert people.maintain.compact("people", files_min=2).records[0].outcome == "compacted"
        follower.look()
    done = people.rollback("people", to=then, actor="me")
    assert (done.outcome, done.kind, done.actor) == ("committed", "rollback", "me")
    assert (done.to_version, done.message) == (then, f"roll back people to version {then}")
    touched = done.table("people")
    assert (touched.rows_added, touched.rows_updated, touched.rows_deleted, touched.rows_total) == (1, 1, 1, 6)
    assert contents(people, "people") == contents(people, "people", then)
    # The row that never changed keeps its sequence; those that return have that of this commit.
    sequences = {fact[0]: fact[-1] for fact in facts(people, "people")}
    kept = {number: old[number][-1] for number in (1, 11, 12, 13)}
    assert sequences == {**kept, 2: touched.sequence, 3: touched.sequence}
    assert done.unreported == {}
    follower.check()
    check_lake(people.catalog)


def test_a_row_that_changed_and_changed_back_keeps_its_newer_sequence(people: fm.Lake) -> None:
    then = newest(people)
    people.merge("people", named(1, 2, name="new"))
    people.merge("people", named(1, name="old"))
    before = facts(people, "people")[0]
    done = people.rollback("people", to=then).table("people")
    assert (done.rows_added, done.rows_updated, done.rows_deleted) == (0, 1, 0)
    assert facts(people, "people")[0] == before
    assert contents(people, "people") == contents(people, "people", then)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_table_without_a_key_returns_and_the_result_says_what_followers_miss(lake: fm.Lake, compacted: bool) -> None:
    lake.append("events", rows(1, 2, 2, 3))
    for _ in range(3):
        lake.append("events", rows(2))
    then, before = newest(lake), facts(lake, "events")
    lake.append("events", rows(2, 7, 8))
    lake.delete("events", "id = 3")
    if compacted:
        assert lake.maintain.compact("events", files_min=2).records[0].outcome == "compacted"
    done = lake.rollback("events", to=then)
    touched = done.table("events")
    assert (touched.rows_added, touched.rows_updated, touched.rows_deleted) == (1, 0, 3)
    assert done.unreported == {"events": 3}
    assert contents(lake, "events") == contents(lake, "events", then)
    # Of equal rows the newest goes: those that were there keep their sequences.
    returned = (3, "row 3", touched.sequence)
    assert facts(lake, "events") == sorted([fact for fact in before if fact[0] != 3] + [returned], key=repr)
    assert [row["id"] for row in lake.changes("events", touched.sequence - 1).arrow().read_all().to_pylist()] == [3]
    check_lake(lake.catalog)


def test_only_the_difference_is_written_and_files_of_both_states_stay(people: fm.Lake) -> None:
    people.append("people", named(*range(10, 500), name="many"))
    then = newest(people)
    files = set(people.catalog.files.data_files(people.catalog.history.head("people")))
    people.append("people", named(500, name="more"))
    people.rollback("people", to=then)
    assert set(people.catalog.files.data_files(people.catalog.history.head("people"))) == files
    people.delete("people", "id = 1")
    people.rollback("people", to=then)
    head = people.catalog.history.head("people")
    written = [file for file in people.catalog.files.data_files(head) if file not in files]
    assert head.rows == 493
    # One row came back; the two others of its file were carried when it was deleted.
    assert len(written) == 2
    check_lake(people.catalog)


def test_an_empty_state_and_a_time_to_return_to(people: fm.Lake) -> None:
    (empty,) = [one.version for one in people.history(table="people") if one.kind == "create_table"]
    then = newest(people)
    follower = Follower(people)
    follower.look()
    assert people.rollback("people", to=empty).table("people").rows_deleted == 3
    assert facts(people, "people") == []
    follower.look()
    moment = people.catalog.history.commit(newest(people)).committed_ms
    change(people)
    people.rollback("people", to=then)
    assert contents(people, "people") == [(1, "old"), (2, "old"), (3, "old")]
    follower.check()
    assert newest(people) > 0 < moment
    stamp = fm_time(moment)
    done = people.rollback("people", to=stamp)
    assert contents(people, "people") == contents(people, "people", done.to_version)
    follower.check()
    check_lake(people.catalog)


def fm_time(time_ms: int) -> str:
    from floodmark.clock import format_time

    return format_time(time_ms)


def test_the_same_contents_are_nothing_to_do_unless_a_batch_is_to_be_remembered(people: fm.Lake) -> None:
    then = newest(people)
    people.append("events", rows(1))
    last = newest(people)
    done = people.rollback("people", to=then)
    assert (done.outcome, done.version, done.tables) == ("nothing_to_do", last, ())
    assert newest(people) == last
    first = people.rollback("people", to=then, batch="back")
    again = people.rollback("people", to=then, batch="back")
    assert (first.outcome, again.outcome, again.version) == ("committed", "already_committed", first.version)
    change(people)
    # By its id, whatever has changed since.
    assert people.rollback("people", to=then, batch="back").outcome == "already_committed"
    check_lake(people.catalog)


def test_a_rollback_can_be_rolled_back(people: fm.Lake) -> None:
    follower, then = Follower(people), newest(people)
    follower.look()
    change(people)
    follower.look()
    changed = newest(people)
    people.rollback("people", to=then)
    follower.look()
    people.rollback("people", to=changed)
    assert contents(people, "people") == [(1, "old"), (2, "new"), (4, "new")]
    follower.check()
    check_lake(people.catalog)


@pytest.mark.parametrize("partition", [[], ["bucket(3, id)"]])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_changes_and_rollbacks_match_every_version(
    new_place: Callable[[str], Place], partition: Sequence[str], seed: int
) -> None:
    """Keyed and not, beside each other: after each rollback the contents are those of its version."""
    dice = random.Random(seed)
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("people", EVENTS, key=["id"], partition=partition)
        lake.create_table("events", EVENTS, partition=partition)
        lake.append("events", rows(0))
        start, follower = newest(lake), Follower(lake)
        for _ in range(25):
            follower.look()
            verb = dice.choice(["merge", "merge", "delete", "append", "append", "compact", "rollback", "rollback"])
            numbers = dice.sample(range(12), dice.randint(1, 5))
            if verb == "merge":
                lake.merge("people", named(*numbers, name=dice.choice("ab")))
            elif verb == "append":
                lake.append("events", named(*numbers, name=dice.choice("ab")))
            elif verb == "delete":
                lake.delete(dice.choice(["people", "events"]), f"id < {dice.randint(0, 6)}")
            elif verb == "compact":
                lake.maintain.compact(files_min=2)
            else:
                roll_back_randomly(lake, dice, start)
        follower.check()
        check_lake(lake.catalog)


def roll_back_randomly(lake: fm.Lake, dice: random.Random, start: int) -> None:
    then, table = dice.randint(start, newest(lake)), dice.choice(["people", "events", None])
    before = {name: Counter(facts(lake, name)) for name in ("people", "events")}
    planned = lake.plan_rollback(table, to=then)
    done = lake.rollback(table, to=then)
    for name in ("people", "events"):
        after = Counter(facts(lake, name))
        if table not in (name, None):
            assert after == before[name]
            continue
        assert contents(lake, name) == contents(lake, name, then)
        # What is not new has its sequence from before.
        new = list((after - before[name]).elements())
        mine = [one for one in done.tables if one.table == name]
        assert {fact[-1] for fact in new} <= {one.sequence for one in mine}
        assert sum(one.rows_added + one.rows_updated for one in mine) == len(new)
    shown = {one.table: (one.rows_added, one.rows_updated, one.rows_deleted) for one in planned.tables}
    assert shown == {one.table: (one.rows_added, one.rows_updated, one.rows_deleted) for one in done.tables}
    assert planned.unreported == done.unreported


def test_positions_of_many_rows_are_kept_in_objects_of_the_operation(
    people: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_table, "POSITIONS_BYTES_MAX", 0)
    people.append("people", named(*range(10, 60), name="old"))
    then = newest(people)
    people.merge("people", named(*range(10, 60, 3), name="new"))
    people.delete("people", "id % 7 = 0")
    done = people.rollback("people", to=then).table("people")
    assert (done.rows_updated, done.rows_deleted) == (15, 0)
    assert contents(people, "people") == contents(people, "people", then)
    # Nothing but what the commit names is left in the folders.
    check_lake(people.catalog)


def test_a_rollback_can_expect_the_version_that_it_was_made_for(people: fm.Lake) -> None:
    then = newest(people)
    seen = people.append("people", named(9, name="later")).version
    people.append("people", named(10, name="meanwhile"))
    with pytest.raises(fm.Conflict) as raised:
        people.rollback("people", to=then, if_version=seen)
    assert (raised.value.facts["expected"], raised.value.facts["actual"]) == (seen, newest(people))
    assert people.rollback("people", to=then, if_version=newest(people)).outcome == "committed"
    check_lake(people.catalog)


# ── every table at once ──


def test_every_table_returns_in_one_version_and_the_others_are_listed(people: fm.Lake) -> None:
    people.append("events", rows(1))
    then = newest(people)
    change(people)
    people.append("events", rows(2))
    people.create_table("later", EVENTS)
    people.append("later", rows(1))
    people.drop_table("notes")
    before = newest(people)
    planned = people.plan_rollback(to=then)
    done = people.rollback(to=then)
    assert done.version == before + 1
    assert done.message == f"roll back all tables to version {then}"
    assert sorted(one.table for one in done.tables) == ["events", "people"]
    assert (done.created, done.dropped, done.unreported) == (("later",), ("notes",), {"events": 1})
    assert (planned.created, planned.dropped, planned.unreported) == (done.created, done.dropped, done.unreported)
    for table in ("people", "events"):
        assert contents(people, table) == contents(people, table, then)
    assert ids(people, "later") == [1]
    people.undrop("notes")
    assert people.rollback(to=then).outcome == "nothing_to_do"
    check_lake(people.catalog)


def test_a_table_that_did_not_change_still_must_not_move(people: fm.Lake) -> None:
    """Of a rollback of every table: a row that comes meanwhile goes too, whichever table it is in."""
    then = newest(people)
    change(people)
    with at("rollback.sealed", lambda: people.append("events", rows(1))):
        done = people.rollback(to=then)
    assert (done.outcome, ids(people, "events")) == ("committed", [])
    assert done.unreported == {"events": 1}


# ── what is refused ──


def refused(kind: type[fm.FloodmarkError], call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(kind) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)


def test_tables_that_were_not_there_then_are_refused_by_name(people: fm.Lake, place: Place) -> None:
    then = newest(people)
    people.create_table("later", EVENTS)
    refused(fm.NotFound, lambda: people.rollback("later", to=then), "did not exist", "lake.history")
    refused(fm.NotFound, lambda: people.rollback("nothing", to=then), "no such table")
    people.drop_table("notes")
    refused(fm.NotFound, lambda: people.rollback("notes", to=then), "dropped since", 'lake.undrop("notes")')
    people.create_table("notes", EVENTS)
    refused(fm.Invalid, lambda: people.rollback("notes", to=then), "created again", f"version={then}")
    refused(fm.NotFound, lambda: people.rollback("people", to=999), "no such version")
    for wrong in (True, None, 1.5):
        refused(fm.Invalid, lambda wrong=wrong: people.rollback("people", to=wrong), "a number or a time")
    refused(fm.Invalid, lambda: people.rollback("people", to="soon"), "time")
    with place.open(read_only=True) as reader:
        refused(fm.Invalid, lambda: reader.rollback("people", to=then), "read-only")
        assert reader.plan_rollback("people", to=then).tables == ()
    check_lake(people.catalog)


def test_a_plan_writes_nothing_and_shows_rows(people: fm.Lake, place: Place) -> None:
    then = newest(people)
    change(people)
    last, audit = newest(people), people.audit()
    with place.open(read_only=True) as reader:
        (found,) = reader.plan_rollback("people", to=then).tables
    shown = {(one["change"], (one["row"] or one["before"])["id"]) for one in found.samples}  # type: ignore[index]
    assert shown == {("updated", 2), ("added", 3), ("deleted", 4)}
    assert len(people.plan_rollback("people", to=then, limit=2).tables[0].samples) == 2
    assert (newest(people), people.audit()) == (last, audit)
    refused(fm.Invalid, lambda: people.plan_rollback("people", to=then, limit=-1), "limit")


def test_references_are_checked_on_the_result(people: fm.Lake) -> None:
    then = newest(people)
    people.append("people", named(9, name="later"))
    wanted = {
        "people": {"columns": {"id": {"type": "long", "required": True}, "name": "string"}, "key": ["id"]},
        "orders": {"columns": {"id": "long", "person": "long"}, "references": {"person": "people.id"}},
    }
    people.apply(wanted)
    after = newest(people)
    people.append("orders", [{"id": 1, "person": 9}])
    refused(fm.Invalid, lambda: people.rollback("people", to=then), "orders")
    # Together with the rows that refer to it, it goes.
    people.rollback(to=after)
    assert ids(people, "orders") == []
    people.rollback("people", to=then)
    assert contents(people, "people") == contents(people, "people", then)
    check_lake(people.catalog)


# ── another shape since ──


@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
def test_columns_that_came_went_or_changed_their_name_since(lake: fm.Lake, key: list[str]) -> None:
    lake.create_table("shaped", "id int not null, name string, gone string", key=key)
    lake.append("shaped", [{"id": one, "name": f"n{one}", "gone": "x"} for one in (1, 2, 3)])
    then = newest(lake)
    kept = {fact[0]: fact[-1] for fact in facts(lake, "shaped")}
    columns = {
        "id": {"type": "long", "required": True},
        "label": {"type": "string", "renamed_from": "name"},
        "extra": "int",
    }
    lake.apply({"shaped": {"columns": columns, "dropped": ["gone"]}}, allow_destructive=True)
    lake.append("shaped", [{"id": 4, "label": "n4", "extra": 4}])
    lake.delete("shaped", "id = 2")
    done = lake.rollback("shaped", to=then).table("shaped")
    assert (done.rows_added, done.rows_updated, done.rows_deleted) == (1, 0, 1)
    expected = [(one, f"n{one}", None, done.sequence if one == 2 else kept[one]) for one in (1, 2, 3)]
    assert facts(lake, "shaped") == expected
    assert [name for name in lake.schema("shaped").column_names if name != "_seq"] == ["id", "label", "extra"]
    # A value in a column that the rows did not have then was not there then.
    if key:
        lake.merge("shaped", [{"id": 1, "label": "n1", "extra": 5}])
        assert lake.rollback("shaped", to=then).table("shaped").rows_updated == 1
        assert contents(lake, "shaped") == [fact[:-1] for fact in expected]
    check_lake(lake.catalog)


@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
def test_filled_columns_are_filled_in_rows_that_return_and_count_as_no_change(lake: fm.Lake, key: list[str]) -> None:
    lake.create_table("filled", EVENTS, key=key)
    lake.append("filled", rows(1, 2, 3))
    then, kept = newest(lake), {fact[0]: fact[-1] for fact in facts(lake, "filled")}
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    extra = {"type": "int", "required": True, "default": 7}
    lake.apply({"filled": {"columns": {**columns, "extra": extra}}})
    lake.delete("filled", "id = 2")
    lake.append("filled", [{"id": 9, "name": "nine", "extra": 9}])
    done = lake.rollback("filled", to=then).table("filled")
    assert (done.rows_added, done.rows_updated, done.rows_deleted) == (1, 0, 1)
    assert facts(lake, "filled") == [
        (one, f"row {one}", 7, done.sequence if one == 2 else kept[one]) for one in (1, 2, 3)
    ]
    check_lake(lake.catalog)


@pytest.mark.parametrize("filled", ["at once", "later", "by a backfill"])
@pytest.mark.parametrize("key", [["id"], []], ids=["keyed", "unkeyed"])
def test_values_written_into_a_filled_column_go_and_filled_ones_stay(
    lake: fm.Lake, key: list[str], filled: str
) -> None:
    lake.create_table("filled", EVENTS, key=key)
    lake.append("filled", rows(1, 2, 3))
    then = newest(lake)
    lake.add_column("filled", "extra", "string", default="open", fill_later=filled != "at once")
    if filled == "later":
        # A version that has the column, and no values of it.
        then = newest(lake)
    if filled == "by a backfill":
        assert lake.backfill.column("filled", "extra", "'open'").outcome == "done"
    assert lake.plan_rollback("filled", to=then).tables == ()
    assert lake.rollback("filled", to=then).outcome == "nothing_to_do"
    before = facts(lake, "filled")
    lake.update("filled", {"extra": "'closed'"}, "id < 3")
    (planned,) = lake.plan_rollback("filled", to=then).tables
    done = lake.rollback("filled", to=then).table("filled")
    counts = (0, 2, 0) if key else (2, 0, 2)
    assert (planned.rows_added, planned.rows_updated, planned.rows_deleted) == counts
    assert (done.rows_added, done.rows_updated, done.rows_deleted) == counts
    expected = [(one, f"row {one}", "open", done.sequence) for one in (1, 2)]
    assert facts(lake, "filled") == [*expected, before[2]]
    # The returned rows have the values of a fill under another sequence.
    assert lake.rollback("filled", to=then).outcome == "nothing_to_do"
    check_lake(lake.catalog)


def test_a_row_that_was_written_again_with_the_value_of_the_fill_stays(people: fm.Lake) -> None:
    then = newest(people)
    people.add_column("people", "extra", "string", default="open")
    people.merge("people", [{"id": 1, "name": "old", "extra": "open"}], skip_unchanged=False)
    people.merge("people", [{"id": 2, "name": "old", "extra": None}])
    before = facts(people, "people")
    done = people.rollback("people", to=then).table("people")
    assert (done.rows_added, done.rows_updated, done.rows_deleted) == (0, 1, 0)
    assert facts(people, "people") == [before[0], (2, "old", "open", done.sequence), before[2]]
    check_lake(people.catalog)


def test_a_column_that_is_filled_by_another_one_has_its_values_in_rows_that_return(people: fm.Lake) -> None:
    then = newest(people)
    assert people.backfill.column("people", "label", "name", announce=True).outcome == "done"
    assert people.plan_rollback("people", to=then).tables == ()
    people.update("people", {"label": "'wrong'"}, "id = 2")
    assert people.rollback("people", to=then).table("people").rows_updated == 1
    assert contents(people, "people") == [(one, "old", "old") for one in (1, 2, 3)]
    check_lake(people.catalog)


def test_what_only_spark_computes_returns_where_a_row_has_another_sequence(people: fm.Lake) -> None:
    then, kept = newest(people), facts(people, "people")
    assert people.backfill.column("people", "label", "upper(name)").outcome == "done"
    assert people.plan_rollback("people", to=then).tables == ()
    people.update("people", {"label": "'wrong'"}, "id = 2")
    for _ in range(2):
        # The second time it cannot be seen that the row has the expression's value.
        done = people.rollback("people", to=then).table("people")
        assert (done.rows_added, done.rows_updated, done.rows_deleted) == (0, 1, 0)
        assert facts(people, "people") == [
            (one, "old", "OLD", kept[one - 1][-1] if one != 2 else done.sequence) for one in (1, 2, 3)
        ]
    check_lake(people.catalog)


def test_a_column_of_a_newer_key_that_only_spark_computes_is_refused(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    then = newest(lake)
    assert lake.backfill.column("events", "label", "upper(name)").outcome == "done"
    label = {"type": "string", "required": True}
    columns = {"id": {"type": "long", "required": True}, "name": "string", "label": label}
    lake.apply({"events": {"columns": columns, "key": ["id", "label"]}}, allow_destructive=True)
    last = newest(lake)
    words = ("only Spark", "table=events", "column=label")
    refused(fm.Invalid, lambda: lake.rollback("events", to=then), *words)
    refused(fm.Invalid, lambda: lake.plan_rollback("events", to=then), *words)
    assert newest(lake) == last
    check_lake(lake.catalog)


@pytest.mark.parametrize("layout", [{}, {"partition": ["extra"], "sort": ["extra"]}], ids=["plain", "laid out by it"])
def test_a_filled_column_of_a_newer_key_identifies_the_rows_that_lack_it(lake: fm.Lake, layout: dict[str, Any]) -> None:
    lake.append("events", rows(*range(20)))
    then, kept = newest(lake), facts(lake, "events")
    extra = {"extra": {"type": "int", "required": True, "default": 5}}
    columns = {"id": {"type": "long", "required": True}, "name": "string", **extra}
    lake.apply({"events": {"columns": columns}})
    lake.apply({"events": {"columns": columns, "key": ["id", "extra"], **layout}}, allow_destructive=True)
    lake.append("events", [{**row, "extra": 6} for row in rows(*range(20))])
    lake.delete("events", "id = 7 and extra = 5")
    lake.merge("events", [{"id": 8, "name": "new", "extra": 5}])
    done = lake.rollback("events", to=then).table("events")
    assert (done.rows_added, done.rows_updated, done.rows_deleted) == (1, 1, 20)
    expected = [(*fact[:2], 5, done.sequence if fact[0] in (7, 8) else fact[2]) for fact in kept]
    assert facts(lake, "events") == sorted(expected, key=repr)
    check_lake(lake.catalog)


def test_a_rollback_that_has_nothing_to_do_still_checks_what_its_caller_expects(people: fm.Lake) -> None:
    seen = newest(people)
    people.append("people", named(9, name="meanwhile"))
    now = newest(people)
    for table in ("people", None):
        with pytest.raises(fm.Conflict) as raised:
            people.rollback(table, to=now, if_version=seen)
        assert (raised.value.facts["expected"], raised.value.facts["actual"]) == (seen, now)
        refused(fm.NotFound, lambda table=table: people.rollback(table, to=now, if_version=now + 1), "no such version")
        assert people.rollback(table, to=now, if_version=now).outcome == "nothing_to_do"
    people.append("events", rows(1))
    assert people.rollback("people", to=now, if_version=now).outcome == "nothing_to_do"
    check_lake(people.catalog)


def test_rows_without_a_value_of_a_column_that_is_required_now_are_refused(people: fm.Lake) -> None:
    people.merge("people", [{"id": 3, "name": None}])
    then = newest(people)
    people.merge("people", named(3, name="now"))
    columns = {"id": {"type": "long", "required": True}, "name": {"type": "string", "required": True}}
    people.apply({"people": {"columns": columns, "key": ["id"]}}, allow_destructive=True)
    last = newest(people)
    refused(fm.Invalid, lambda: people.rollback("people", to=then), "required now", "column=name", "rows=1")
    refused(fm.Invalid, lambda: people.plan_rollback("people", to=then), "required now")
    assert newest(people) == last
    # Rows that stay as they are need no value from then.
    people.delete("people", "id = 1")
    people.rollback("people", to=last)
    assert len(facts(people, "people")) == 3
    check_lake(people.catalog)


def test_a_key_that_came_since_must_be_one_in_the_rows_that_return(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    fits = newest(lake)
    lake.append("events", rows(2))
    twice = newest(lake)
    lake.delete("events", "id = 2")
    columns = {"id": {"type": "long", "required": True}, "name": "string"}
    lake.apply({"events": {"columns": columns, "key": ["id"]}}, allow_destructive=True)
    refused(fm.Invalid, lambda: lake.rollback("events", to=twice), "same key", "rows=1")
    lake.delete("events", "id = 1")
    refused(fm.Invalid, lambda: lake.rollback("events", to=twice), "same key")
    lake.rollback("events", to=fits)
    assert contents(lake, "events") == [(1, "row 1"), (2, "row 2")]
    check_lake(lake.catalog)


# ── branches ──


def test_a_branch_rolls_back_by_itself_and_merges_it(people: fm.Lake) -> None:
    then = newest(people)
    change(people)
    people.branches.create("dev")
    follower = Follower(people, branch="dev")
    follower.look()
    people.merge("people", named(1, name="dev"), branch="dev")
    follower.look()
    made_on_dev = newest(people, "dev")
    assert people.rollback("people", to=then, branch="dev").branch == "dev"
    assert contents(people, "people", branch="dev") == [(1, "old"), (2, "old"), (3, "old")]
    assert contents(people, "people") == [(1, "old"), (2, "new"), (4, "new")]
    follower.check()
    refused(fm.Invalid, lambda: people.rollback("people", to=made_on_dev), "never was", "made_on=dev")
    assert people.branches.merge("dev").outcome == "merged"
    assert contents(people, "people") == contents(people, "people", then)
    check_lake(people.catalog)


# ── sinks ──


def test_a_files_sink_has_the_table_afterwards(people: fm.Lake, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    people.sinks.add("out", "files", tables=["people"], path=out)
    then = newest(people)

    def shipped() -> dict[int, str]:
        assert people.sinks.run("out", until_empty=True).outcome in ("shipped", "nothing_to_do")
        state: dict[int, str] = {}
        for unit in read_units(out, table="people"):
            for batch in read_rows(unit):
                for row in batch.to_pylist():
                    state.pop(row["id"], None)
                    if row["_change"] == "upsert":
                        state[row["id"]] = row["name"]
        return state

    shipped()
    change(people)
    people.maintain.compact("people", files_min=2)
    assert shipped() == {1: "old", 2: "new", 4: "new"}
    people.rollback("people", to=then)
    assert shipped() == dict(contents(people, "people")) == {1: "old", 2: "old", 3: "old"}
    check_lake(people.catalog)


# ── beside others ──


@pytest.mark.parametrize("point", BEFORE)
@pytest.mark.parametrize("write", ["append", "merge", "delete", "compact"])
def test_whatever_comes_meanwhile_the_contents_are_those_of_the_version(
    people: fm.Lake, place: Place, point: str, write: str
) -> None:
    follower, then = Follower(people), newest(people)
    follower.look()
    people.append("people", named(6, 7, name="more"))
    change(people)
    follower.look()

    def meanwhile() -> None:
        with place.open() as other:
            if write == "append":
                other.append("people", named(20, name="meanwhile"))
            elif write == "merge":
                other.merge("people", named(1, 3, name="meanwhile"))
            elif write == "delete":
                other.delete("people", "id = 1")
            else:
                other.maintain.compact("people", files_min=2)

    with at(point, meanwhile):
        done = people.rollback("people", to=then)
    assert done.outcome == "committed"
    assert contents(people, "people") == contents(people, "people", then)
    follower.check()
    check_lake(people.catalog)


def test_a_table_that_keeps_moving_ends_in_conflict(people: fm.Lake) -> None:
    then = newest(people)
    change(people)
    from floodmark import failpoints

    waiting = iter(range(100, 200))

    def observe(point: str) -> None:
        # A table whose turn the rollback has lets no other writer pass: its turn is broken here.
        if point == "rollback.begun":
            with people.catalog.database.write() as tx:
                tx.execute(update(tables.turns).values(until_ms=0))
        if point == "rollback.built":
            failpoints.observer = None
            with people.catalog.database.write() as tx:
                tx.execute(update(tables.turns).values(until_ms=0))
            people.append("people", named(next(waiting), name="again"))
            failpoints.observer = observe

    failpoints.observer = observe
    try:
        refused(fm.Conflict, lambda: people.rollback("people", to=then), "kept changing", "tries=5")
    finally:
        failpoints.observer = None
    check_lake(people.catalog)


def test_a_version_is_held_from_begin_on_and_refused_before(people: fm.Lake) -> None:
    then = newest(people)
    change(people)

    def forget() -> None:
        people.maintain.expire(keep="0s")
        assert people.maintain.sweep(grace="0s", deep=True).outcome in ("swept", "nothing_to_do")

    with at("rollback.begun", forget):
        people.rollback("people", to=then)
    assert contents(people, "people") == [(1, "old"), (2, "old"), (3, "old")]
    check_lake(people.catalog)
    change(people)
    forget()
    refused(fm.BelowRetention, lambda: people.rollback("people", to=then), "window has ended")
    refused(fm.BelowRetention, lambda: people.plan_rollback("people", to=then), "window has ended")
    check_lake(people.catalog)


def test_a_version_that_expires_before_begin_is_refused_and_nothing_is_left(people: fm.Lake) -> None:
    from floodmark.branches.rollback import request_of, rollback
    from floodmark.commit.intent import Intent

    then = newest(people)
    change(people)
    request = request_of(people.catalog, "people", then, "main")
    people.maintain.expire(keep="0s")
    people.maintain.sweep(grace="0s")
    intent = Intent("rollback", "main", "test", "too late")
    refused(fm.BelowRetention, lambda: rollback(people.engine, request, intent), "window has ended")
    check_lake(people.catalog)
