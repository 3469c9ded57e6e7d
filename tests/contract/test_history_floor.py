"""The floor of a history: what is skipped and what is pruned, who is waited for, and what a reader is told."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

import floodmark as fm
from floodmark.backfill.chunks.coverage import coverage, read_range
from floodmark.backfill.chunks.geometry import Chunk, Geometry
from floodmark.backfill.chunks.history import HistorySpec, plan
from floodmark.catalog.jobs import HeldJob
from floodmark.catalog.maintenance_state import Consumer
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows
from tests.history_world import Numbers, chunk_rows, history, number_rows, room_of, run

pytestmark = pytest.mark.mostly_sqlite

Row = dict[str, Any]


@pytest.fixture
def lake(place: Place) -> Iterator[fm.Lake]:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        yield lake
        check_lake(lake.catalog)


def consumer(lake: fm.Lake, mark: int, *, protected: bool = True, name: str = "follower") -> None:
    table_id = lake.catalog.history.head("events").table_id
    lake.catalog.maintenance.put_consumer(Consumer(name, table_id, mark, protected))


def states(lake: fm.Lake, table: str = "events") -> dict[int, str]:
    return {chunk: state for (name, chunk), (state, _) in chunk_rows(lake).items() if name == table}


# ── what is skipped and pruned ──


def test_what_is_below_the_floor_is_not_loaded(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    spec = history(source, last=None, keep=25)
    assert plan(room_of(lake), spec)["floor"] == "20"
    found = run(lake, spec)
    assert (found.outcome, found.job["processed"], found.job["total"]) == ("done", 3, 3)
    assert source.order == ["40..50", "30..40", "20..30"]
    assert ids(lake) == list(range(20, 50))


def test_what_sinks_below_the_floor_is_pruned(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    spec = history(source, {"events": None, "notes": None}, last=None, keep=20)
    run(lake, spec)
    assert ids(lake) == list(range(30, 50))
    since = lake.catalog.history.head("events").sequence
    source.now = 75
    assert plan(room_of(lake), spec)["to_prune"] == {"events": 2, "notes": 2}
    found = run(lake, spec)
    assert (found.outcome, found.job["total"]) == ("done", 2)
    for table in ("events", "notes"):
        assert ids(lake, table) == list(range(50, 70))
        assert states(lake, table) == {3: "pruned", 4: "pruned", 5: "done", 6: "done"}
    changed = lake.changes("events", since).arrow().read_all().to_pylist()
    assert {row["_change"] for row in changed} == {"upsert"}, "nothing tells of rows that were pruned"
    pruned = [commit for commit in lake.history(limit=10) if commit.kind == "prune"]
    assert sorted(part.table for commit in pruned for part in commit.tables) == ["events", "notes"]
    assert [part.rows_deleted for commit in pruned for part in commit.tables] == [20, 20]
    version = lake.status()["version"]
    assert run(lake, spec).outcome == "nothing_to_do"
    assert lake.status()["version"] == version


def test_rows_of_other_writers_go_by_their_place_and_keep_their_sequences(lake: fm.Lake) -> None:
    source = Numbers(tip=50)
    spec = history(source, first=10, last=None, keep=20)
    run(lake, spec)
    lake.append("events", rows(5, 25, 35, 55))
    before = {row["id"]: row["_seq"] for row in lake.read_arrow("events", with_seq=True).read_all().to_pylist()}
    source.now = 60
    assert run(lake, spec).outcome == "done"
    after = {row["id"]: row["_seq"] for row in lake.read_arrow("events", with_seq=True).read_all().to_pylist()}
    # 5 is before the history, 25 in a chunk that the job never had, 55 above the floor; a chunk brought 55 too.
    assert sorted(ids(lake)) == sorted([5, 25, 55, *range(40, 60)])
    assert {number: after[number] for number in (5, 25, *range(40, 50))} == {
        number: before[number] for number in (5, 25, *range(40, 50))
    }


def test_rows_that_are_gone_already_are_marked_all_the_same(lake: fm.Lake) -> None:
    source = Numbers(tip=40)
    spec = history(source, last=None, keep=20)
    run(lake, spec)
    lake.delete("events", "id < 30")
    source.now = 50
    assert run(lake, spec).outcome == "done"
    assert states(lake) == {2: "pruned", 3: "done", 4: "done"}
    assert ids(lake) == list(range(30, 50))


def test_a_row_without_a_place_stays(lake: fm.Lake) -> None:
    lake.create_table("loose", "n long, name string")

    def loose(chunk: Chunk) -> list[Row]:
        return [{"n": row["id"], "name": row["name"]} for row in number_rows(chunk)]

    source = Numbers(tip=40, rows=loose)
    spec = history(source, "loose", last=None, keep=20, column="n")
    run(lake, spec)
    lake.append("loose", [{"n": None, "name": "?"}, {"n": 21, "name": "old"}])
    lake.append("loose", [{"n": None, "name": "!"}])
    source.now = 50
    run(lake, spec)
    found = sorted(str(row["n"]) for row in lake.read_arrow("loose").read_all().to_pylist())
    assert found == sorted([*map(str, range(30, 50)), "None", "None"])


# ── consumers ──


def test_a_protected_consumer_is_waited_for(lake: fm.Lake) -> None:
    source = Numbers(tip=40)
    spec = history(source, last=None, keep=20)
    run(lake, spec)
    consumer(lake, lake.catalog.history.head("events").sequence - 1)
    source.now = 50
    assert run(lake, spec).outcome == "done"
    assert states(lake) == {2: "done", 3: "done", 4: "done"}
    assert ids(lake) == list(range(20, 50))
    assert run(lake, spec).outcome == "nothing_to_do"
    consumer(lake, lake.catalog.history.head("events").sequence)
    assert run(lake, spec).outcome == "done"
    assert states(lake) == {2: "pruned", 3: "done", 4: "done"}
    assert ids(lake) == list(range(30, 50))


def test_a_protected_consumer_that_has_seen_what_goes_is_not_waited_for(lake: fm.Lake) -> None:
    source = Numbers(tip=40)
    spec = history(source, last=None, keep=20)
    run(lake, spec)
    consumer(lake, lake.catalog.history.head("events").sequence)
    consumer(lake, -1, protected=False, name="somebody")
    source.now = 50
    assert run(lake, spec).outcome == "done"
    assert states(lake) == {2: "pruned", 3: "done", 4: "done"}


def test_a_consumer_that_comes_while_rows_are_rewritten_is_waited_for(lake: fm.Lake) -> None:
    source = Numbers(tip=40)
    spec = history(source, last=None, keep=20)
    run(lake, spec)
    lake.append("events", rows(25, 35))
    source.now = 50
    with at("prune.built", lambda: consumer(lake, -1)):
        assert run(lake, spec).outcome == "done"
    assert states(lake) == {2: "done", 3: "done", 4: "done"}
    assert ids(lake) == sorted([*range(20, 50), 25, 35])


def test_rows_of_a_settled_file_are_looked_at_one_by_one(lake: fm.Lake) -> None:
    """After a compaction one file holds rows that a consumer has seen and rows that it has not."""
    source = Numbers(tip=40)
    spec = history(source, last=None, keep=20, order="oldest")
    run(lake, spec)
    seen = lake.catalog.history.head("events").sequence
    lake.append("events", rows(200))
    lake.maintain.compact("events", files_min=2)
    assert len(lake.catalog.files.data_files(lake.catalog.history.head("events"))) == 1
    consumer(lake, seen)
    source.now = 50
    assert run(lake, spec).outcome == "done"
    assert states(lake) == {2: "pruned", 3: "done", 4: "done"}
    assert ids(lake) == [*range(30, 50), 200]


# ── time ──


def time_spec(source: Any, table: str, column: str, **options: Any) -> HistorySpec:
    """Days that begin twelve hours before now: no midnight is near."""
    start = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=12)
    geometry = Geometry.of(start - timedelta(days=6), None, "1d", align=start)
    return HistorySpec("years", source, {table: None}, geometry, column=column, workers=1, **options)


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz"])
def test_times_sink_below_a_floor_that_rises_with_the_clock(lake: fm.Lake, kind: str) -> None:
    lake.create_table("times", f"t {kind}, name string")

    def hourly(chunk: Chunk) -> list[Row]:
        assert isinstance(chunk.start, datetime)
        zone = UTC if kind == "timestamp" else None
        moments = [chunk.start + timedelta(hours=hour) for hour in range(0, 24, 6)]
        return [{"t": moment.replace(tzinfo=zone), "name": chunk.name} for moment in moments]

    tip = datetime.now(UTC) - timedelta(hours=13)
    spec = time_spec(Numbers(tip=tip, rows=hourly), "times", "t")
    assert run(lake, spec).job["total"] == 5
    assert run(lake, spec, keep="60h").outcome == "done"
    found = [row["t"].replace(tzinfo=UTC) for row in lake.read_arrow("times").read_all().to_pylist()]
    start = spec.geometry.shown(spec.geometry.first)
    assert isinstance(start, datetime)
    # 60 hours ago is in the middle of a chunk, which stays: of six days the first three are below.
    assert sorted(found) == [start + timedelta(days=4, hours=hour) for hour in range(0, 24, 6)]
    assert sorted(states(lake, "times").values()) == ["done", *["pruned"] * 4]


def test_dates_are_midnights(lake: fm.Lake) -> None:
    lake.create_table("days", "d date, name string")
    first = date(2024, 1, 1)

    def daily(chunk: Chunk) -> list[Row]:
        assert isinstance(chunk.start, datetime)
        return [{"d": chunk.start.date() + timedelta(days=day), "name": chunk.name} for day in range(2)]

    geometry = Geometry.of(first, first + timedelta(days=8), "2d", align=first)
    source = Numbers(rows=daily)
    spec = HistorySpec("years", source, {"days": None}, geometry, column="d", workers=1, rows_min=2)
    assert run(lake, spec).outcome == "done"
    lake.append("days", [{"d": first - timedelta(days=1), "name": "before"}, {"d": first, "name": "mine"}])
    assert run(lake, spec, keep="1d").job["total"] == 0
    left = lake.read_arrow("days").read_all().to_pylist()
    assert [row["name"] for row in left] == ["before"]
    assert set(states(lake, "days").values()) == {"pruned"}
    wrong = Numbers(rows=lambda chunk: [{"d": first + timedelta(days=8), "name": "late"}] * 2)
    assert run(lake, HistorySpec("wrong", wrong, {"days": None}, geometry, column="d")).outcome == "failed"


# ── what readers are told ──


def test_a_range_that_is_not_all_there_is_no_empty_range(lake: fm.Lake) -> None:
    assert run(lake, history(Numbers(tip=75), last=None, keep=40)).outcome == "done"
    job, room = lake.catalog.jobs.find("years"), room_of(lake)
    with pytest.raises(fm.BelowRetention, match="below the history's floor") as below:
        read_range(room, job, 20, 40)
    assert below.value.facts["oldest"] == "30"
    with pytest.raises(fm.BelowRetention, match="starts before the history"):
        read_range(room, job, -5, 40)
    with pytest.raises(fm.Incomplete) as gap:
        read_range(room, job, 60, 85)
    assert gap.value.facts["chunk"] == "70..80"
    with pytest.raises(fm.Invalid, match="empty"):
        read_range(room, job, 40, 40)
    with pytest.raises(fm.Invalid, match="not part of"):
        read_range(room, job, 40, 50, "notes")
    with pytest.raises(AssertionError, match="no Spark"):
        read_range(room, job, 35, 65)  # all of it is there


def test_a_gap_and_what_was_pruned_are_named(lake: fm.Lake) -> None:
    source = Numbers(act={("20..30", 1): lambda chunk: None})
    spec = history(source, order="oldest")
    assert run(lake, spec).outcome == "failed"
    job, room = lake.catalog.jobs.find("years"), room_of(lake)
    with pytest.raises(fm.Incomplete) as gap:
        read_range(room, job, 15, 25)
    assert gap.value.facts["chunk"] == "20..30"
    found = coverage(room, job)["tables"]["events"]
    assert (found["loaded"], found["gaps"], found["pruned"]) == ([["0", "20"]], [["20", "50"]], [])
    with pytest.raises(fm.Invalid, match="ends after the history"):
        read_range(room, job, 10, 60)
    assert run(lake, spec, keep=20).outcome == "done"
    found = coverage(room, lake.catalog.jobs.find("years"))
    assert (found["first"], found["last"], found["floor"], found["column"]) == ("0", "50", "30", "id")
    events = found["tables"]["events"]
    assert (events["loaded"], events["gaps"], events["pruned"]) == ([["30", "50"]], [], [["0", "20"]])
    assert (events["chunks"], events["rows"]) == (2, 20)
    lake.catalog.jobs.end(start_without_floor(lake, spec), "cancelled", None, None)
    job = lake.catalog.jobs.find("years")
    with pytest.raises(fm.BelowRetention, match="pruned") as pruned:
        read_range(room, job, 5, 25)
    assert pruned.value.facts["chunk"] == "0..10"
    assert coverage(room, job)["tables"]["events"]["gaps"] == [["0", "30"]], "without a floor all of it is wanted again"
    assert run(lake, spec).outcome == "done"
    assert ids(lake) == list(range(50))


def start_without_floor(lake: fm.Lake, spec: HistorySpec) -> HeldJob:
    return lake.catalog.jobs.start("years", "history", ["events"], spec.pinned(), spec.settings(), "chunks", "test")


def test_a_history_without_a_range_column_cannot_be_read_by_range(lake: fm.Lake) -> None:
    run(lake, history(Numbers(), column=None))
    with pytest.raises(fm.Invalid, match="no range column"):
        read_range(room_of(lake), lake.catalog.jobs.find("years"), 0, 10)
