"""`if_version` on both databases: a write is published only if its tables are as they were at that version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.catalog.riders import VersionRider
from floodmark.commit.intent import Intent
from floodmark.commit.seal import rider_from_dict
from floodmark.ingest.receive import Sender
from floodmark.model import MAIN
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from floodmark.write.change import Change
from tests.conftest import Place, at, ids, rows
from tests.contract.test_foreign_cleanup import foreign_table
from tests.publishing import Behind, in_this_thread

PEOPLE = "id long not null, name string"


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    """Version 3: a keyed table and one without a key; version 4 adds a row to each of both."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.create_table("events", PEOPLE)
        lake.create_table("notes", PEOPLE)
        with lake.transaction() as tx:
            tx.append("people", rows(1, 2))
            tx.append("events", rows(1, 2))
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    with place.open(actor="other") as other:
        yield other


WRITES: dict[str, Callable[[fm.Lake, int], Any]] = {
    "append": lambda lake, n: lake.append("events", rows(7), if_version=n),
    "insert": lambda lake, n: lake.append("people", rows(7), if_version=n),
    "merge": lambda lake, n: lake.merge("people", rows(1, 7), if_version=n),
    "partial merge": lambda lake, n: lake.merge("people", [{"id": 1, "name": "z"}], partial=True, if_version=n),
    "delete": lambda lake, n: lake.delete("events", "id = 1", if_version=n),
    "delete nothing": lambda lake, n: lake.delete("events", "id = 77", if_version=n),
    "overwrite": lambda lake, n: lake.overwrite("events", rows(7), if_version=n),
    "update": lambda lake, n: lake.update("people", {"name": "'z'"}, "id = 1", if_version=n),
    "drop": lambda lake, n: lake.drop_table("events", if_version=n),
    "rename": lambda lake, n: lake.rename_table("events", "happenings", if_version=n),
    "add column": lambda lake, n: lake.add_column("events", "more", "int", if_version=n),
    "rename column": lambda lake, n: lake.rename_column("events", "name", "title", if_version=n),
    "drop column": lambda lake, n: lake.drop_column("events", "name", if_version=n),
    "apply": lambda lake, n: lake.apply({"events": {"comment": "things"}}, if_version=n),
}


def touch(lake: fm.Lake) -> None:
    with lake.transaction() as tx:
        tx.append("people", rows(50))
        tx.append("events", rows(50))


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_done_if_its_table_is_as_it_was_whatever_happened_to_others(lake: fm.Lake, write: str) -> None:
    lake.append("notes", rows(1))
    outcome = WRITES[write](lake, 4).outcome
    assert outcome == ("nothing_to_do" if write == "delete nothing" else "committed")


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_if_its_table_moved_and_nothing_is_changed(lake: fm.Lake, write: str) -> None:
    touch(lake)
    shapes = {head.table: head for head in lake.heads()}
    with pytest.raises(fm.Conflict) as caught:
        WRITES[write](lake, 4)
    assert (caught.value.facts["expected"], caught.value.facts["actual"]) == (4, 5)
    assert caught.value.facts["table"] in ("people", "events")
    assert lake.status()["version"] == 5
    assert {head.table: head for head in lake.heads()} == shapes


def test_an_apply_that_has_nothing_to_do_still_checks_it(lake: fm.Lake, other: fm.Lake) -> None:
    wanted = {"events": {"comment": "things"}}
    assert lake.apply(wanted, if_version=4).outcome == "committed"
    lake.append("notes", rows(1))
    assert lake.apply(wanted, if_version=5).outcome == "nothing_to_do"
    with pytest.raises(fm.Conflict) as caught:
        lake.apply(wanted, if_version=4)
    assert (caught.value.facts["table"], caught.value.facts["actual"]) == ("events", 5)
    with pytest.raises(fm.NotFound):
        lake.apply(wanted, if_version=99)
    # Another process does it in the middle of this one: then the table is not as it was.
    more = {"events": {"comment": "more things"}}
    with pytest.raises(fm.Conflict), at("apply.begun", lambda: other.apply(more)):
        lake.apply(more, if_version=5)


STEPS = {
    "append": ("begun", "staged", "sealed", "built"),
    "insert": ("begun", "staged", "sealed", "built"),
    "merge": ("begun", "staged", "rewritten", "sealed", "built"),
    "delete": ("begun", "rewritten", "sealed", "built"),
    "overwrite": ("begun", "staged", "sealed", "built"),
    "update": ("begun", "rewritten", "sealed", "built"),
    "drop": ("begun", "rewritten", "sealed", "built"),
    "rename": ("begun", "rewritten", "sealed", "built"),
    "add column": ("begun", "rewritten", "sealed", "built"),
}
POINTS = [(write, step) for write, steps in STEPS.items() for step in steps]


@pytest.mark.parametrize(("write", "step"), POINTS)
def test_it_holds_in_the_publish_whenever_another_writer_comes(
    lake: fm.Lake, other: fm.Lake, write: str, step: str
) -> None:
    """Also where the write would fit the newer table, as an append does."""
    kinds = ("append", "merge", "delete", "overwrite", "update")
    kind = "append" if write == "insert" else write if write in kinds else "apply"

    def meddle() -> None:
        other.merge("people", rows(50))
        other.delete("events", "id = 2")

    with pytest.raises(fm.Conflict) as caught, at(f"{kind}.{step}", meddle):
        WRITES[write](lake, 4)
    assert caught.value.facts["expected"] == 4
    assert [commit.actor for commit in lake.history(limit=2)] == ["other", "other"]
    # With the version that it names, the same write is done.
    assert WRITES[write](lake, int(caught.value.facts["actual"])).outcome == "committed"


def test_a_compaction_counts_too(lake: fm.Lake) -> None:
    lake.append("events", rows(3, 4))
    assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
    with pytest.raises(fm.Conflict):
        lake.append("events", rows(5), if_version=5)
    lake.append("events", rows(5), if_version=6)


def test_all_tables_of_a_transaction_count_and_no_other(lake: fm.Lake, other: fm.Lake) -> None:
    other.append("events", rows(3))

    def write(version: int, first: str, second: str | None = None) -> fm.Commit | None:
        with lake.transaction(if_version=version) as tx:
            tx.append(first, rows(9))
            if second is None:
                tx.create_table("more", PEOPLE)
                tx.append("more", rows(1))
            else:
                tx.delete(second, "id = 77")
        return tx.commit

    with pytest.raises(fm.Conflict) as caught:
        write(4, "notes", "events")
    assert caught.value.facts["table"] == "events"
    with pytest.raises(fm.Conflict), at("transaction.sealed", lambda: other.append("notes", rows(2))):
        write(5, "people", "notes")
    assert (ids(lake, "people"), ids(lake, "notes")) == ([1, 2], [2])
    with at("transaction.sealed", lambda: other.append("notes", rows(3))):
        commit = write(6, "people")
    assert commit is not None
    assert commit.outcome == "committed"


def test_a_table_that_is_only_referred_to_may_move(lake: fm.Lake, other: fm.Lake) -> None:
    lake.apply({"orders": {"columns": {"id": "long", "who": "long"}, "references": {"who": "people.id"}}})
    version = lake.status()["version"]
    with at("append.sealed", lambda: other.merge("people", rows(3))):
        commit = lake.append("orders", [{"id": 1, "who": 1}], if_version=version)
    assert commit.outcome == "committed"
    assert (ids(lake, "orders"), ids(lake, "people")) == ([1], [1, 2, 3])


def test_a_batch_that_is_in_is_still_answered(lake: fm.Lake, other: fm.Lake) -> None:
    first = lake.merge("people", rows(7), batch="b", if_version=4)
    assert (first.outcome, first.version) == ("committed", 5)
    for version in (4, 5, 0):
        again = lake.merge("people", rows(7), batch="b", if_version=version)
        assert (again.outcome, again.version) == ("already_committed", 5)
    with lake.transaction(batch="b", batch_table="people", if_version=1) as tx:
        tx.append("people", rows(8))
    assert tx.commit is not None
    assert tx.commit.outcome == "already_committed"
    # The same batch, by another process, in the middle of this one: that is why the table moved.
    with at("append.sealed", lambda: other.append("events", rows(8), batch="c")):
        again = lake.append("events", rows(8), batch="c", if_version=5)
    assert again.outcome == "already_committed"
    assert ids(lake, "events") == [1, 2, 8]


def test_a_refused_batch_may_be_sent_again(lake: fm.Lake) -> None:
    with pytest.raises(fm.Conflict):
        lake.append("events", rows(7), batch="b", if_version=2)
    assert lake.append("events", rows(7), batch="b", if_version=4).outcome == "committed"


@pytest.mark.parametrize("wrong", [-1, "4", 4.0, True])
def test_what_is_no_version_is_invalid(lake: fm.Lake, wrong: Any) -> None:
    with pytest.raises(fm.Invalid):
        lake.append("events", rows(7), if_version=wrong)
    assert lake.status()["version"] == 4


def test_a_version_that_does_not_exist_yet_is_not_found(lake: fm.Lake) -> None:
    with pytest.raises(fm.NotFound) as caught:
        lake.append("events", rows(7), if_version=5)
    assert (caught.value.facts["newest"], lake.status()["version"]) == (4, 4)


def test_a_table_that_was_made_again_or_dropped_is_another_one(lake: fm.Lake, other: fm.Lake) -> None:
    other.drop_table("events")
    other.create_table("events", PEOPLE)
    with pytest.raises(fm.Conflict) as caught:
        lake.append("events", rows(7), if_version=4)
    assert caught.value.facts["actual"] == 6
    with pytest.raises(fm.Conflict), at("append.sealed", lambda: other.drop_table("events")):
        lake.append("events", rows(7), if_version=6)


def test_on_a_branch_its_own_tables_count(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.append("events", rows(3))
    lake.append("events", rows(4), branch="dev", if_version=4)
    with pytest.raises(fm.Conflict) as caught:
        lake.append("events", rows(5), branch="dev", if_version=5)
    assert caught.value.facts["actual"] == 6
    lake.append("events", rows(5), branch="dev", if_version=6)
    with pytest.raises(fm.Conflict):
        lake.append("events", rows(5), if_version=4)
    lake.append("events", rows(5), if_version=5)


def test_it_is_sealed_whole() -> None:
    for branch in ("main", "dev"):
        for dropped, free in (((), ()), ((("v", "notes"),), ("more", "most"))):
            rider = VersionRider(branch, 7, (("t", "events"), ("u", "people")), dropped, free)
            assert rider_from_dict(rider.as_dict()) == rider


# ── a new table ──

CREATES: dict[str, Callable[[fm.Lake, str, int], Any]] = {
    "create_table": lambda lake, _, n: lake.create_table("more", PEOPLE, if_version=n),
    "adopt": lambda lake, theirs, n: lake.adopt("more", theirs, if_version=n),
    "apply": lambda lake, _, n: lake.apply({"more": {"schema": PEOPLE}}, if_version=n),
    "transaction": lambda lake, _, n: create_in_transaction(lake, n),
}


def create_in_transaction(lake: fm.Lake, version: int) -> fm.Commit | None:
    with lake.transaction(if_version=version) as tx:
        tx.create_table("more", PEOPLE)
    return tx.commit


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    return foreign_table(tmp_path / "theirs")


@pytest.mark.parametrize("verb", CREATES)
def test_a_new_table_expects_that_none_has_had_its_name_since(lake: fm.Lake, theirs: str, verb: str) -> None:
    lake.create_table("MORE", PEOPLE)  # version 5
    lake.drop_table("MORE")
    lake.rename_table("notes", "more")
    lake.rename_table("more", "notes")  # version 8
    lake.append("notes", rows(1))
    for version, last in ((4, 7), (5, 7), (6, 7), (7, 9)):
        with pytest.raises(fm.Conflict) as caught:
            CREATES[verb](lake, theirs, version)
        facts = caught.value.facts
        assert (facts["table"], facts["expected"], facts["actual"]) == ("more", version, last)
    with pytest.raises(fm.NotFound):
        CREATES[verb](lake, theirs, 99)
    assert lake.status()["version"] == 9
    # The table that had the name has another one since, and may change.
    assert CREATES[verb](lake, theirs, 8).outcome == "committed"


@pytest.mark.parametrize("verb", CREATES)
@pytest.mark.parametrize("step", ["begun", "built"])
def test_a_name_that_was_used_meanwhile_and_is_free_again_is_found_in_the_publish(
    lake: fm.Lake, other: fm.Lake, theirs: str, verb: str, step: str
) -> None:
    def meddle() -> None:
        other.create_table("more", PEOPLE)
        other.drop_table("more")

    with pytest.raises(fm.Conflict) as caught, at(f"{verb}.{step}", meddle):
        CREATES[verb](lake, theirs, 4)
    assert (caught.value.facts["table"], caught.value.facts["actual"]) == ("more", 6)
    assert [commit.actor for commit in lake.history(limit=2)] == ["other", "other"]


@pytest.mark.parametrize("verb", ["create_table", "adopt"])
def test_a_name_that_is_taken_meanwhile_is_a_conflict_for_who_expects_a_version(
    lake: fm.Lake, other: fm.Lake, theirs: str, verb: str
) -> None:
    with pytest.raises(fm.Conflict) as caught, at(f"{verb}.begun", lambda: other.create_table("more", PEOPLE)):
        CREATES[verb](lake, theirs, 4)
    assert (caught.value.facts["table"], caught.value.facts["actual"]) == ("more", 5)


def test_a_table_that_need_not_be_new_is_as_it_was(lake: fm.Lake) -> None:
    assert lake.create_table("events", PEOPLE, if_not_exists=True, if_version=4).outcome == "nothing_to_do"
    with pytest.raises(fm.Invalid):
        lake.create_table("Events", PEOPLE, if_version=4)
    for choice in (True, False):
        with pytest.raises(fm.Conflict) as caught:
            lake.create_table("events", PEOPLE, if_not_exists=choice, if_version=3)
        assert (caught.value.facts["expected"], caught.value.facts["actual"]) == (3, 4)


def test_names_of_other_branches_do_not_count(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.create_table("more", PEOPLE, branch="dev")
    lake.drop_table("more", branch="dev")
    assert lake.create_table("more", PEOPLE, if_version=4).outcome == "committed"


# ── a dropped table ──


def test_an_undrop_expects_that_the_table_had_been_dropped_then(lake: fm.Lake) -> None:
    dropped = lake.drop_table("events").version
    lake.append("notes", rows(1))
    with pytest.raises(fm.Conflict) as caught:
        lake.undrop("events", if_version=dropped - 1)
    facts = caught.value.facts
    assert (facts["table"], facts["expected"], facts["actual"]) == ("events", dropped - 1, dropped)
    assert "events" not in {head.table for head in lake.heads()}
    with pytest.raises(fm.NotFound):
        lake.undrop("events", if_version=99)
    assert lake.undrop("events", if_version=dropped).outcome == "committed"
    # It was back meanwhile: it is dropped again, but not as it was.
    again = lake.drop_table("events").version
    with pytest.raises(fm.Conflict):
        lake.undrop("events", if_version=dropped)
    lake.undrop("events", if_version=again)
    assert ids(lake, "events") == [1, 2]


@pytest.mark.parametrize("step", ["begun", "sealed", "built"])
def test_an_undrop_whose_table_was_back_meanwhile_is_refused(lake: fm.Lake, other: fm.Lake, step: str) -> None:
    dropped = lake.drop_table("events").version

    def meddle() -> None:
        other.undrop("events")
        other.append("events", rows(8))
        other.drop_table("events")

    with pytest.raises(fm.Conflict), at(f"undrop.{step}", meddle):
        lake.undrop("events", if_version=dropped)
    assert "events" not in {head.table for head in lake.heads()}
    lake.undrop("events", if_version=dropped + 3)
    assert ids(lake, "events") == [1, 2, 8]


# ── a merge of branches ──


def on_dev(lake: fm.Lake) -> int:
    """A branch that changed both tables; returns the version."""
    lake.branches.create("dev")
    lake.merge("people", rows(7), branch="dev")
    return lake.append("events", rows(7), branch="dev").version


def test_a_merge_expects_both_branches_to_be_as_they_were(lake: fm.Lake) -> None:
    version = on_dev(lake)
    lake.append("notes", rows(1))  # a table that the merge does nothing about
    lake.append("events", rows(8))
    with pytest.raises(fm.Conflict) as caught:
        lake.branches.merge("dev", if_version=version)
    facts = caught.value.facts
    assert (facts["table"], facts["expected"], facts["actual"]) == ("events", version, version + 2)
    assert "branch" not in facts
    version = lake.merge("people", rows(9), branch="dev").version
    for dry_run in (True, False):
        with pytest.raises(fm.Conflict) as caught:
            lake.branches.merge("dev", if_version=version - 1, dry_run=dry_run)
        facts = caught.value.facts
        assert (facts["table"], facts["branch"], facts["actual"]) == ("people", "dev", version)
    assert lake.branches.merge("dev", if_version=version, dry_run=True).outcome == "planned"
    assert lake.branches.merge("dev", if_version=version).outcome == "merged"
    assert (ids(lake, "people"), ids(lake, "events")) == ([1, 2, 7, 9], [1, 2, 7, 8])
    assert lake.branches.merge("dev", if_version=0).outcome == "up_to_date"
    with pytest.raises(fm.NotFound):
        lake.branches.merge("dev", if_version=99)


def test_a_merge_that_only_settles_counts_too(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.overwrite("events", rows(7), branch="dev")
    seen = lake.append("events", rows(8)).version
    assert lake.branches.merge("dev", if_version=seen, on_conflict="return").outcome == "conflict"
    lake.append("events", rows(9))
    with pytest.raises(fm.Conflict) as caught:
        lake.branches.merge("dev", prefer="ours", if_version=seen, on_conflict="return")
    assert caught.value.facts["actual"] == seen + 1
    assert lake.branches.merge("dev", prefer="ours", if_version=seen + 1).outcome == "merged"


def test_a_table_that_a_merge_brings_need_not_exist_on_the_other_side(lake: fm.Lake) -> None:
    lake.branches.create("dev")
    lake.create_table("more", PEOPLE, branch="dev")
    version = lake.append("more", rows(1), branch="dev").version
    with pytest.raises(fm.Conflict):
        lake.branches.merge("dev", if_version=version - 1)
    assert lake.branches.merge("dev", if_version=version).outcome == "merged"
    assert ids(lake, "more") == [1]


@pytest.mark.parametrize("side", ["main", "dev"])
@pytest.mark.parametrize("step", ["begun", "staged", "sealed", "built"])
def test_a_merge_finds_out_whenever_a_side_moves(lake: fm.Lake, other: fm.Lake, step: str, side: str) -> None:
    version = on_dev(lake)
    with (
        pytest.raises(fm.Conflict) as caught,
        at(f"branch_merge.{step}", lambda: other.append("events", rows(50), branch=side)),
    ):
        lake.branches.merge("dev", if_version=version)
    assert (caught.value.facts["expected"], caught.value.facts["actual"]) == (version, version + 1)
    assert [commit.actor for commit in lake.history(limit=1)] == ["other"]
    assert lake.branches.merge("dev", if_version=version + 1).outcome == "merged"


# ── rows of other systems, and streams ──


def test_received_rows_expect_it_and_their_identity_comes_first(lake: fm.Lake, other: fm.Lake) -> None:
    assert lake.receive("people", rows(7), key="k", if_version=4).outcome == "committed"
    assert lake.receive("people", rows(7), key="k", if_version=4).outcome == "already_committed"
    sender = Sender("lab", 0, 0, 5, 0, 1)
    with pytest.raises(fm.Conflict) as caught:
        lake.receive("people", rows(8), sender=sender, if_version=4)
    assert (caught.value.facts["expected"], caught.value.facts["actual"]) == (4, 5)
    with pytest.raises(fm.Conflict), at("merge.sealed", lambda: other.append("people", rows(9))):
        lake.receive("people", rows(8), sender=sender, if_version=5)
    # The mark of a sender whose rows were refused has not moved.
    assert lake.receive("people", rows(8), sender=sender, if_version=6).outcome == "committed"
    assert lake.receive("people", rows(8), sender=sender, if_version=0).outcome == "already_committed"
    assert ids(lake, "people") == [1, 2, 7, 8, 9]


def test_a_stream_expects_the_table_as_its_last_batch_left_it(lake: fm.Lake, other: fm.Lake) -> None:
    writer = lake.stream_writer("events", query="q", if_version=4)
    batches: Any = [rows(10), rows(11), rows(12), rows(13)]
    writer(batches[0], 0)
    writer(batches[1], 1)
    writer(batches[1], 1)
    assert writer.last is not None
    assert (writer.last.outcome, writer.last.version) == ("already_committed", 6)
    other.append("events", rows(50))
    with pytest.raises(fm.Conflict) as caught:
        writer(batches[2], 2)
    assert (caught.value.facts["expected"], caught.value.facts["actual"]) == (6, 7)
    # A batch that Spark replays after the restart lets nothing through: others may have written since.
    again = lake.stream_writer("events", query="q", if_version=5)
    again(batches[1], 1)
    with pytest.raises(fm.Conflict):
        again(batches[2], 2)
    again = lake.stream_writer("events", query="q", if_version=7)
    again(batches[2], 2)
    again(batches[3], 3)
    assert ids(lake, "events") == [1, 2, 10, 11, 12, 13, 50]
    with pytest.raises(fm.Invalid):
        lake.stream_writer("events", query="q", if_version=-1)
    with pytest.raises(fm.NotFound):
        lake.stream_writer("events", query="q", if_version=99)(batches[3], 4)


# ── others who publish it ──


def append_in_child(place: Place, version: int) -> str:
    with place.open() as lake:
        return lake.append("events", rows(7), batch="b", if_version=version).outcome


@pytest.mark.parametrize("moved", [False, True])
def test_recovery_publishes_it_only_if_its_table_is_still_as_it_was(place: Place, moved: bool) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", PEOPLE)
        lake.append("events", rows(1))
    assert run_killed(append_in_child, place, 2, failpoint="append.sealed")
    if moved:
        with place.open(recover=False) as lake:
            # By its own rows alone it would fit: an append fits every head.
            append_without_recovery(lake)
    with place.open() as lake:
        assert [row.outcome for row in lake.audit()] == ["rolled_back" if moved else "rolled_forward"]
        assert ids(lake) == ([1, 9] if moved else [1, 7])
        check_lake(lake.catalog)
    if moved:
        with place.open() as lake, pytest.raises(fm.Conflict):
            lake.append("events", rows(7), batch="b", if_version=2)
    else:
        assert run_child(append_in_child, place, 2) == "already_committed"


def append_without_recovery(lake: fm.Lake) -> None:
    change = Change.begin(lake.engine, Intent("append", MAIN, "test", ""))
    change.write("append", "events", rows(9))
    change.publish()


def test_a_leader_leaves_out_an_append_whose_table_moved_by_its_own_rows(place: Place) -> None:
    """Published together, the second of two appends finds the first one's rows: it expected none."""
    with place.open(create=True) as first, place.open() as second, place.open() as third:
        first.create_table("events", PEOPLE)
        behind = Behind(
            first,
            [
                lambda: second.append("events", rows(2), if_version=1),
                lambda: third.append("events", rows(3)),
            ],
        )
        with in_this_thread("append.sealed", behind.begin):
            first.append("events", rows(1), if_version=1)
        outcomes = behind.wait()
        assert isinstance(outcomes[0], fm.Conflict)
        assert outcomes[1].outcome == "committed"
        assert ids(first) == [1, 3]
        check_lake(first.catalog)
