"""Retention on every database: what goes, what stays, what it costs, and who is waited for, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark import clock, failpoints
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import Consumer, Policy
from floodmark.commit.intent import Intent
from floodmark.commit.live_files import live_files
from floodmark.maintenance.compact import Compacted, compact
from floodmark.maintenance.plan import CompactionPlan, FileGroup
from floodmark.maintenance.retain import plan_retention, retain
from floodmark.model import MAIN
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, at
from tests.without_spark import without_spark

pytestmark = pytest.mark.mostly_sqlite

NOW = clock.parse_time_ms("2026-03-10T12:00:00Z")
NOON = datetime(2026, 3, 10, 12)
EVENTS = "id long not null, t timestamp_ntz"
Row = dict[str, Any]


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        yield lake
        check_lake(lake.catalog)


@pytest.fixture
def other(lake: fm.Lake, place: Place) -> Iterator[fm.Lake]:
    """Another writer of the same lake."""
    with place.open(actor="other") as other:
        yield other


def run(
    lake: fm.Lake, retention: str, table: str = "events", *, force: bool = False, planned: bool = True
) -> tuple[str, Row]:
    """Plan, then do it. What was planned is what is done, unless the table changes meanwhile."""
    head, policy = lake.catalog.history.head(table), Policy(retention)
    intent = Intent("retain", MAIN, "test", "")
    plan = plan_retention(without_spark(lake), head, policy, now_ms=NOW, force=force)
    assert lake.catalog.history.head(table) == head, "a plan changes nothing"
    outcome, detail = retain(without_spark(lake), intent, head, policy, now_ms=NOW, force=force)
    if planned:
        assert detail == {**plan.as_dict(), "version": detail["version"], "rows_removed": plan.rows_going}
    assert detail["rows_due"] == detail["rows_going"] + detail["rows_protected"]
    after = lake.catalog.history.head(table)
    assert after.version == detail["version"]
    if outcome == "retained":
        assert lake.history(limit=1)[0].kind == "retain"
        assert lake.history(limit=1)[0].table(table).rows_deleted == detail["rows_removed"] > 0
    else:
        assert after.rows == head.rows or not planned
        assert detail["rows_removed"] == detail["files_dropped"] == detail["files_rewritten"] == 0
    return outcome, detail


def ages(*hours: int | None, first: int = 1) -> list[Row]:
    """Rows that are so many hours old, numbered from `first`; None is a row without a time."""
    return [
        {"id": first + at, "t": None if hour is None else NOON - timedelta(hours=hour)} for at, hour in enumerate(hours)
    ]


def numbered(*ids: int) -> list[Row]:
    return [{"id": number, "t": NOON} for number in ids]


def state(lake: fm.Lake, table: str = "events") -> dict[int, int]:
    """Every row's sequence by its id."""
    rows = lake.read_arrow(table, with_seq=True).read_all().to_pylist()
    found = {row["id"]: row["_seq"] for row in rows}
    assert len(found) == len(rows)
    return found


def feed(lake: fm.Lake, since: int | None = None, table: str = "events") -> list[tuple[int, str, int]]:
    rows = lake.changes(table, since).arrow().read_all().to_pylist()
    return sorted((row["id"], row["_change"], row["_seq"]) for row in rows)


def follow(lake: fm.Lake, name: str, mark: int, *, protected: bool = True, epoch: int = 0) -> None:
    table_id = lake.catalog.history.head("events").table_id
    lake.catalog.maintenance.put_consumer(Consumer(name, table_id, mark, protected, epoch))


def fresh_files(lake: fm.Lake, table: str = "events") -> list[bool]:
    head = lake.catalog.history.head(table)
    return [file.fresh for file in live_files(lake.catalog.files, head, lake.schema(table))]


# ── ages ──


@pytest.mark.parametrize("kind", ["timestamp_ntz", "timestamp", "date"])
def test_rows_before_the_age_go_and_the_others_keep_their_sequence(lake: fm.Lake, kind: str) -> None:
    def as_kind(row: Row) -> Row:
        time = row["t"]
        if time is not None and kind == "timestamp":
            time = f"{time.isoformat()}Z"
        return {**row, "t": time.date() if time is not None and kind == "date" else time}

    lake.create_table("events", f"id long not null, t {kind}")
    lake.append("events", [as_kind(row) for row in ages(80, 1, None, 49, 47)])
    lake.append("events", [as_kind(row) for row in ages(99, 98, first=10)])
    lake.append("events", [as_kind(row) for row in ages(0, first=20)])
    outcome, detail = run(lake, "2d")
    assert outcome == "retained"
    # The cut is at noon two days ago, so that day is not past as a whole.
    stay = {2: 1, 3: 1, 5: 1, 20: 3} | ({4: 1} if kind == "date" else {})
    assert state(lake) == stay
    assert detail["rows_removed"] == 8 - len(stay)
    assert detail["cut"] == ("2026-03-08" if kind == "date" else "2026-03-08T12:00:00.000Z")
    assert (detail["policy"], detail["column"], detail["kept_without_time"]) == ("2d", "t", 1)
    assert (detail["files_dropped"], detail["files_rewritten"]) == (1, 1)
    assert sorted(fresh_files(lake)) == [False, True]
    assert run(lake, "2d")[0] == "nothing_to_do"


def test_the_border_stays(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    micro = timedelta(microseconds=1)
    border = NOON - timedelta(hours=1)
    lake.append("events", [{"id": 1, "t": border - micro}, {"id": 2, "t": border}, {"id": 3, "t": border + micro}])
    run(lake, "1h")
    assert state(lake) == {2: 1, 3: 1}


def test_whole_partitions_go_without_a_look_into_them(lake: fm.Lake, place: Place) -> None:
    lake.create_table("events", EVENTS, partition=["day(t)"])
    for first in (1, 11):
        lake.append("events", ages(24, 25, 48, 72, 96, first=first))
    # The rows of one day are rewritten: settled files go in the same way.
    lake.delete("events", "id = 15")
    before = lake.catalog.history.head("events")
    plan_retention(without_spark(lake), before, Policy("36h"), now_ms=NOW)  # from here on all metadata is remembered
    plain = lake.catalog.storage.counters.snapshot()
    policy, intent = Policy("36h"), Intent("retain", MAIN, "test", "")
    plan = plan_retention(without_spark(lake), before, policy, now_ms=NOW)
    assert lake.catalog.storage.counters.snapshot() == plain, "the plan needs no file at all"
    assert (plan.rows_going, plan.files_dropped, plan.files_rewritten) == (5, 5, 0)
    outcome, detail = retain(without_spark(lake), intent, before, policy, now_ms=NOW)
    counters = lake.catalog.storage.counters
    opened = {verb: counters.calls.get(verb, 0) - plain.calls.get(verb, 0) for verb in ("open_input", "read")}
    assert opened == {"open_input": 0, "read": 0}, "and no file was opened to do it"
    assert (outcome, detail["rows_removed"]) == ("retained", 5)
    assert detail["bytes_going"] == before.size_bytes - lake.catalog.history.head("events").size_bytes > 0
    assert state(lake) == {1: 1, 2: 1, 11: 2, 12: 2}


def test_a_partition_on_the_border_is_rewritten_alone(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS, partition=["day(t)"])
    lake.append("events", ages(1, 38, 44, 70, None))
    outcome, detail = run(lake, "42h")
    assert (outcome, detail["files_dropped"], detail["files_rewritten"]) == ("retained", 1, 1)
    assert state(lake) == {1: 1, 2: 1, 5: 1}
    assert sorted(fresh_files(lake)) == [False, True, True]


def test_nothing_due_leaves_no_trace(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    assert run(lake, "1d")[0] == "nothing_to_do"
    lake.append("events", ages(1, 2, None))
    before = check_lake(lake.catalog)
    for retention in ("3h", "3 rows", "99 rows", "1 GB"):
        outcome, detail = run(lake, retention)
        assert (outcome, detail["rows_due"], detail["lost"]) == ("nothing_to_do", 0, {})
    assert check_lake(lake.catalog) == before, "no operation was begun"
    # Statistics alone do not tell here; then it is looked into, and given up.
    lake.append("events", ages(5, None, 5, first=10))
    lake.delete("events", "id = 10 or id = 12")
    assert run(lake, "3h")[0] == "nothing_to_do"


def test_the_moment_is_that_of_the_database(lake: fm.Lake) -> None:
    lake.create_table("events", "id long not null, d date")
    lake.append("events", [{"id": 1, "d": date(2001, 1, 1)}, {"id": 2, "d": date(9999, 1, 1)}])
    head, intent = lake.catalog.history.head("events"), Intent("retain", MAIN, "test", "")
    assert plan_retention(without_spark(lake), head, Policy("1d")).rows_going == 1
    outcome, detail = retain(without_spark(lake), intent, head, Policy("1d"))
    assert (outcome, detail["rows_removed"]) == ("retained", 1)
    assert state(lake) == {2: 1}


def test_a_table_made_before_its_time_column_keeps_the_rows_without_it(lake: fm.Lake) -> None:
    lake.create_table("events", "id long not null")
    lake.append("events", [{"id": 1}, {"id": 2}])
    lake.append("events", ages(1, 50, first=3), evolve=True)
    outcome, detail = run(lake, "1d")
    assert (outcome, detail["rows_removed"]) == ("retained", 1)
    assert state(lake) == {1: 1, 2: 1, 3: 2}


def test_an_adopted_table_is_kept_like_any_other(lake: fm.Lake, tmp_path: Path) -> None:
    """Its files have no sequences of their own, and its partitions were written by another engine."""
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.transforms import DayTransform

    (tmp_path / "foreign").mkdir()
    catalog = SqlCatalog("x", uri=f"sqlite:///{tmp_path}/foreign/x.db", warehouse=f"file://{tmp_path}/foreign")
    catalog.create_namespace("default")
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("t", pa.timestamp("us"))])
    table = catalog.create_table("default.old", schema)
    table.append(pa.Table.from_pylist(ages(90, 1, None), schema=schema))
    with table.update_spec() as change:
        change.add_field("t", DayTransform(), "t_day")
    table.append(pa.Table.from_pylist(ages(1, 26, 90, 91, None, first=11), schema=schema))
    lake.adopt("events", table.metadata_location)
    catalog.engine.dispose()
    outcome, detail = run(lake, "25h")
    assert (outcome, detail["rows_removed"], detail["files_rewritten"]) == ("retained", 4, 1)
    assert state(lake) == {2: 1, 3: 1, 11: 2, 15: 2}


# ── counts and sizes ──


def test_the_newest_rows_stay_by_whole_commits(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21, 31):
        lake.append("events", numbered(first, first + 1, first + 2))
    outcome, detail = run(lake, "4 rows")
    assert (outcome, detail["cut"], detail["files_dropped"], detail["files_rewritten"]) == ("retained", 2, 2, 0)
    assert state(lake) == {21: 3, 22: 3, 23: 3, 31: 4, 32: 4, 33: 4}
    assert run(lake, "4 rows")[0] == "nothing_to_do"
    assert run(lake, "3 rows")[1]["rows_removed"] == 3
    assert run(lake, "1 rows")[0] == "nothing_to_do", "a commit's rows stay together"


def together(lake: fm.Lake, table: str = "events") -> None:
    """Put all files of the table into one: rows of many commits, each with its own sequence."""
    head = lake.catalog.history.head(table)
    intent = Intent("compact", MAIN, "test", "")
    everything = FileGroup(tuple(live_files(lake.catalog.files, head, lake.schema(table))))
    compact(without_spark(lake), intent, head, CompactionPlan((everything,)), Compacted())
    assert fresh_files(lake, table) == [False]


def test_the_newest_rows_are_told_apart_inside_files_of_many_commits(lake: fm.Lake) -> None:
    lake.create_table("people", EVENTS, key=["id"])
    lake.append("people", numbered(*range(8)))
    for number in range(3):
        lake.merge("people", [{"id": 5 + number, "t": NOON - timedelta(hours=number + 1)}])
    together(lake, "people")
    with lake.transaction("more") as tx:
        tx.delete("people", "id = 0")
        tx.append("people", numbered(10, 11))
    assert state(lake, "people") == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 3, 7: 4, 10: 6, 11: 6}
    outcome, detail = run(lake, "4 rows", "people")
    assert (outcome, detail["cut"], detail["rows_removed"]) == ("retained", 2, 5)
    assert (detail["files_dropped"], detail["files_rewritten"]) == (0, 1)
    assert state(lake, "people") == {6: 3, 7: 4, 10: 6, 11: 6}


def test_only_a_file_that_straddles_the_cut_is_read_for_it(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", numbered(first, first + 1))
    together(lake)
    lake.append("events", numbered(31, 32))
    lake.append("events", numbered(41, 42, 43))
    lake.delete("events", "id = 43")  # settled as well, but all of one commit
    lake.read_arrow("events").read_all()  # from here on all metadata is remembered
    head, storage = lake.catalog.history.head("events"), lake.catalog.storage

    def opened(retention: str, rows_going: int) -> int:
        before = storage.counters.snapshot()
        plan = plan_retention(without_spark(lake), head, Policy(retention), now_ms=NOW)
        assert plan.rows_going == rows_going
        return storage.counters.calls.get("open_input", 0) - before.calls.get("open_input", 0)

    assert opened("2 rows", 8) == 0
    assert opened("4 rows", 6) == 0
    assert opened("6 rows", 4) == 2, "once to find the cut, once to count what goes"
    assert run(lake, "6 rows")[1]["rows_removed"] == 4


def test_the_oldest_files_go_while_enough_bytes_stay(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", numbered(first, first + 1))
    lake.delete("events", "id = 1")
    head = lake.catalog.history.head("events")
    files = {file.sequence: file for file in live_files(lake.catalog.files, head, lake.schema("events"))}
    # The carried row 2 is in the newest file, and is the oldest all the same.
    rest = head.size_bytes - files[4].size_bytes
    assert run(lake, f"{rest + 1} B")[0] == "nothing_to_do"
    outcome, detail = run(lake, f"{rest} B")
    assert (outcome, detail["files_dropped"], detail["files_rewritten"], detail["cut"]) == ("retained", 1, 0, 1)
    assert detail["bytes_going"] == files[4].size_bytes
    assert state(lake) == {11: 2, 12: 2, 21: 3, 22: 3}
    assert run(lake, "1 B")[1]["rows_removed"] == 2, "one file is more than a byte"
    assert state(lake) == {21: 3, 22: 3}


def test_a_file_of_many_commits_is_as_old_as_its_newest_row(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", numbered(first, first + 1))
    together(lake)
    lake.append("events", numbered(31))
    assert run(lake, "1 KiB")[0] in ("retained", "nothing_to_do")
    lake.append("events", numbered(41))
    outcome, detail = run(lake, "1 B")
    assert outcome == "retained"
    assert state(lake) == {41: 6}
    assert detail["files_rewritten"] == 0


# ── tables with a key, and their feed ──


def test_what_retention_takes_is_no_deletion(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS, key=["id"])
    lake.append("events", ages(80, 81, 1, 2))
    lake.merge("events", ages(3, first=4))  # row 4 again, by a newer commit
    lake.delete("events", "id = 2")
    mark = lake.changes("events").until
    outcome, detail = run(lake, "2d")
    assert (outcome, detail["rows_removed"]) == ("retained", 1)
    assert state(lake) == {3: 1, 4: 2}
    assert feed(lake, mark) == [], "who was there sees nothing new"
    assert feed(lake) == [(2, "delete", 3), (3, "upsert", 1), (4, "upsert", 2)], "deletions that were there stay"
    with lake.catalog.database.read() as tx:
        assert [row.sequence for row in tx.execute(select(tables.deletions))] == [3]
    # The key is free again, and its row is new.
    lake.append("events", ages(0))
    assert feed(lake, mark) == [(1, "upsert", 5)]
    folded = {key: sequence for key, change, sequence in feed(lake) if change == "upsert"}
    assert folded == state(lake) == {1: 5, 3: 1, 4: 2}


# ── consumers ──


@pytest.mark.parametrize("retention", ["2d", "1 rows", "1 B"])
def test_no_row_that_a_protected_consumer_has_not_seen_goes(lake: fm.Lake, retention: str) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21, 31):
        lake.append("events", ages(90, 91, first=first))
    lake.append("events", ages(0, first=41))
    follow(lake, "ahead", 4)
    follow(lake, "behind", 2)
    follow(lake, "careless", 0, protected=False)
    outcome, detail = run(lake, retention)
    assert outcome == "retained"
    assert (detail["rows_due"], detail["rows_going"], detail["rows_protected"]) == (8, 4, 4)
    assert detail["lost"] == {"careless": 4}, "whom nobody protects is told all the same"
    assert state(lake) == {21: 3, 22: 3, 31: 4, 32: 4, 41: 5}
    outcome, detail = run(lake, retention)
    assert (outcome, detail["rows_due"], detail["rows_protected"]) == ("protected", 4, 4)
    follow(lake, "behind", 3)
    assert run(lake, retention)[1]["rows_removed"] == 2
    assert state(lake) == {31: 4, 32: 4, 41: 5}
    follow(lake, "behind", 5)
    assert run(lake, retention)[1]["rows_removed"] == 2
    assert state(lake) == {41: 5}


@pytest.mark.parametrize("retention", ["2d", "1 rows"])
def test_a_file_of_many_commits_is_cut_at_the_mark(lake: fm.Lake, retention: str) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", ages(90, 91, first=first))
    together(lake)
    lake.append("events", ages(0, first=31))
    follow(lake, "behind", 2)
    follow(lake, "careless", 1, protected=False)
    outcome, detail = run(lake, retention)
    assert (outcome, detail["rows_due"], detail["rows_going"], detail["files_rewritten"]) == ("retained", 6, 4, 1)
    assert detail["lost"] == {"careless": 2}, "of its four, two stay for somebody else"
    assert state(lake) == {21: 3, 22: 3, 31: 5}
    assert run(lake, retention)[0] == "protected"


def test_due_rows_in_a_file_that_is_protected_are_counted_and_stay(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    lake.append("events", ages(90, 1, None))
    follow(lake, "behind", 0)
    version = lake.status()["version"]
    outcome, detail = run(lake, "2d")
    assert (outcome, detail["rows_due"], detail["rows_protected"]) == ("protected", 1, 1)
    assert lake.status()["version"] == version
    follow(lake, "behind", 1)
    assert run(lake, "2d")[0] == "retained"


def test_a_size_waits_for_the_newest_row_of_a_file(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", numbered(first))
    together(lake)
    lake.append("events", numbered(31))
    follow(lake, "behind", 2)
    outcome, detail = run(lake, "1 B")
    assert (outcome, detail["rows_due"], detail["rows_protected"]) == ("protected", 3, 3)
    follow(lake, "behind", 3)
    assert run(lake, "1 B")[1]["rows_removed"] == 3


@pytest.mark.parametrize("retention", ["2d", "1 rows", "1 B"])
@pytest.mark.parametrize("gathered", [False, True])
def test_forced_all_that_is_due_goes_and_every_loss_is_counted(lake: fm.Lake, retention: str, gathered: bool) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21, 31):
        lake.append("events", ages(90, 91, 92, first=first))
    if gathered:
        together(lake)
    lake.append("events", ages(0, first=41))
    for name, mark, protected in (("one", 1, True), ("three", 3, True), ("lazy", 2, False), ("done", 4, True)):
        follow(lake, name, mark, protected=protected)
    outcome, detail = run(lake, retention, force=True)
    assert (outcome, detail["rows_due"], detail["rows_removed"], detail["rows_protected"]) == ("retained", 12, 12, 0)
    assert detail["lost"] == {"one": 9, "three": 3, "lazy": 6}
    assert list(state(lake)) == [41]


def test_forced_losses_are_counted_in_files_that_are_rewritten(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", ages(90, 91, 1, None, first=first))
    together(lake)
    for name, mark in (("none", 0), ("one", 1), ("two", 2), ("all", 3)):
        follow(lake, name, mark)
    outcome, detail = run(lake, "2d", force=True)
    assert (outcome, detail["rows_removed"], detail["files_rewritten"]) == ("retained", 6, 1)
    assert detail["lost"] == {"none": 6, "one": 4, "two": 2}
    assert state(lake) == {3: 1, 4: 1, 13: 2, 14: 2, 23: 3, 24: 3}


@pytest.mark.parametrize("point", ["rewritten", "sealed", "built"])
@pytest.mark.parametrize("known", [False, True])
def test_a_consumer_that_comes_while_it_runs_is_waited_for(
    lake: fm.Lake, other: fm.Lake, point: str, known: bool
) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", ages(90, 1, first=first))
    if known:
        follow(lake, "late", 3)
    # A new one, or one that begins anew.
    with at(f"retain.{point}", lambda: follow(other, "late", 1, epoch=1)):
        outcome, detail = run(lake, "2d", planned=False)
    assert (outcome, detail["rows_due"], detail["rows_removed"]) == ("retained", 3, 1)
    assert state(lake) == {2: 1, 11: 2, 12: 2, 21: 3, 22: 3}
    assert feed(lake, 1) == [(11, "upsert", 2), (12, "upsert", 2), (21, "upsert", 3), (22, "upsert", 3)]


def test_a_consumer_that_is_protected_while_it_runs_is_waited_for(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11):
        lake.append("events", ages(90, 1, first=first))
    follow(lake, "careless", 1, protected=False)
    with at("retain.built", lambda: follow(other, "careless", 1, protected=True)):
        outcome, detail = run(lake, "2d", planned=False)
    assert (outcome, detail["rows_removed"], detail["lost"]) == ("retained", 1, {})
    assert state(lake) == {2: 1, 11: 2, 12: 2}


def test_if_all_of_it_is_protected_meanwhile_nothing_happens(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    lake.append("events", ages(90, 1))
    version = lake.status()["version"]
    with at("retain.built", lambda: follow(other, "late", 0)):
        outcome, detail = run(lake, "2d", planned=False)
    assert (outcome, detail["rows_due"], detail["rows_removed"], detail["lost"]) == ("protected", 1, 0, {})
    assert lake.status()["version"] == version
    assert state(lake) == {1: 1, 2: 1}


def test_a_consumer_that_is_not_touched_does_not_disturb(lake: fm.Lake, other: fm.Lake) -> None:
    """Rows up to its mark go: it is planned once."""
    lake.create_table("events", EVENTS)
    lake.append("events", ages(90, 1))
    lake.append("events", ages(1, first=11))
    plans: list[str] = []

    def observe(name: str) -> None:
        plans.append(name)
        if name == "retain.sealed":
            follow(other, "new", 1)

    failpoints.observer = observe
    try:
        outcome, _ = run(lake, "2d")
    finally:
        failpoints.observer = None
    assert outcome == "retained"
    assert "retain.planned_again" not in plans


def test_a_forced_loss_is_counted_also_for_who_comes_while_it_runs(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11):
        lake.append("events", ages(90, 1, first=first))
    follow(lake, "here", 1)
    with at("retain.built", lambda: follow(other, "late", 0)):
        outcome, detail = run(lake, "2d", force=True, planned=False)
    assert (outcome, detail["rows_removed"], detail["lost"]) == ("retained", 2, {"here": 1, "late": 2})


# ── beside others ──


MEDDLING: dict[str, tuple[Callable[[fm.Lake], Any], dict[int, int]]] = {
    # Row 1 and row 11 are due. What comes in late and is due may stay for the next run.
    "append": (lambda other: other.append("events", ages(90, 1, first=31)), {31: 3, 32: 3}),
    "merge into the rewritten": (lambda other: other.merge("events", ages(0, first=12)), {12: 3}),
    "merge of a due row": (lambda other: other.merge("events", ages(0, first=11)), {11: 3}),
    "delete from the rewritten": (lambda other: other.delete("events", "id = 12"), {12: 0}),
    "delete of a due row": (lambda other: other.delete("events", "id = 11"), {}),
    "delete elsewhere": (lambda other: other.delete("events", "id = 21"), {21: 0}),
}


@pytest.mark.parametrize("point", ["rewritten", "sealed", "built"])
@pytest.mark.parametrize("meddling", MEDDLING)
def test_writers_beside_it_lose_nothing_and_get_nothing_back(
    lake: fm.Lake, other: fm.Lake, point: str, meddling: str
) -> None:
    lake.create_table("events", EVENTS, key=["id"])
    with lake.transaction("two files") as tx:
        tx.append("events", ages(90, first=1))
        tx.append("events", ages(91, 1, 2, first=11))
    lake.append("events", ages(1, 2, first=21))
    act, changed = MEDDLING[meddling]
    # The second commit of this table is that of rows 21 and 22; the third is the other writer's.
    with at(f"retain.{point}", lambda: act(other)):
        outcome, detail = run(lake, "2d", planned=False)
    expected = {12: 1, 13: 1, 21: 2, 22: 2} | changed
    due = [key for key in (1, 11) if not (key == 11 and meddling.endswith("due row"))]
    came = [key for key in (31,) if meddling == "append" and 31 not in state(lake)]
    assert (outcome, detail["rows_removed"]) == ("retained", len(due) + len(came))
    assert state(lake) == {key: sequence for key, sequence in expected.items() if sequence and key not in came}
    folded = {key: sequence for key, change, sequence in feed(lake) if change == "upsert"}
    assert folded == state(lake)
    # Only the deletions of the other writer are told.
    deleted = {key for key, change, _ in feed(lake) if change == "delete"}
    assert deleted == {"delete from the rewritten": {12}, "delete of a due row": {11}, "delete elsewhere": {21}}.get(
        meddling, set()
    )
    run(lake, "2d")
    assert not {1, 31} & set(state(lake))


@pytest.mark.parametrize("point", ["rewritten", "sealed", "built"])
def test_a_write_beside_it_is_planned_again_on_what_is_left(lake: fm.Lake, other: fm.Lake, point: str) -> None:
    """The other way round: retention is published in the middle of a merge and of a delete."""
    lake.create_table("events", EVENTS, key=["id"])
    lake.append("events", ages(90, 91, 1, 2))
    with at(f"merge.{point}", lambda: run(other, "2d")):
        lake.merge("events", ages(0, 0, first=2))
    assert state(lake) == {2: 3, 3: 3, 4: 1}
    lake.append("events", ages(95, 96, first=11))
    with at(f"delete.{point}", lambda: run(other, "2d")):
        lake.delete("events", "id = 11 or id = 4")
    assert state(lake) == {2: 3, 3: 3}


def test_rows_that_were_to_stay_and_went_are_made_up_for(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21, 31):
        lake.append("events", numbered(first, first + 1))
    with at("retain.sealed", lambda: other.delete("events", "id >= 31")):
        outcome, detail = run(lake, "4 rows", planned=False)
    assert (outcome, detail["rows_removed"], detail["cut"]) == ("retained", 2, 1)
    assert state(lake) == {11: 2, 12: 2, 21: 3, 22: 3}
    with at("retain.sealed", lambda: other.append("events", numbered(41, 42))):
        outcome, detail = run(lake, "2 rows", planned=False)
    assert detail["rows_removed"] >= 2
    assert {41: 7, 42: 7}.items() <= state(lake).items()


def test_bytes_that_were_to_stay_and_went_are_made_up_for(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    for first in (1, 11, 21):
        lake.append("events", numbered(first, first + 1))
    size = lake.catalog.history.head("events").size_bytes // 3
    with at("retain.built", lambda: other.delete("events", "id >= 21")):
        outcome, detail = run(lake, f"{size * 3 // 2} B", planned=False)
    assert (outcome, detail["rows_removed"]) == ("nothing_to_do", 0)
    assert state(lake) == {1: 1, 2: 1, 11: 2, 12: 2}


def test_a_column_that_comes_meanwhile_is_kept(lake: fm.Lake, other: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    lake.append("events", ages(90, 1))

    def widen() -> None:
        other.append("events", [{"id": 11, "t": NOON, "more": "x"}], evolve=True)

    with at("retain.sealed", widen):
        outcome, detail = run(lake, "2d", planned=False)
    assert (outcome, detail["rows_removed"]) == ("retained", 1)
    rows = sorted(lake.read_arrow("events").read_all().to_pylist(), key=lambda row: row["id"])
    assert [(row["id"], row["more"]) for row in rows] == [(2, None), (11, "x")]


def test_an_error_leaves_everything_as_it_was(lake: fm.Lake) -> None:
    lake.create_table("events", EVENTS)
    lake.append("events", ages(90, 1))
    before = state(lake)

    def fail() -> NoReturn:
        raise OSError("no more")

    with at("retain.sealed", fail), pytest.raises(OSError, match="no more"):
        run(lake, "2d")
    assert state(lake) == before
    check_lake(lake.catalog)
    with pytest.raises(fm.Invalid):
        run(lake, "2 weeks")
    assert run(lake, "2d")[0] == "retained"
