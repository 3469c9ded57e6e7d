"""A new column for old rows: every row filled once, nobody blocked, sequences kept; beside any other writer."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import delete, func, select, update

import floodmark as fm
from floodmark import failpoints
from floodmark.backfill.columns import column as column_backfill
from floodmark.backfill.columns import plan as column_plan
from floodmark.catalog import tables
from floodmark.errors import Busy, CommitUnknown, Fenced, Invalid, NotFound, Unavailable
from floodmark.jobs.record import BackfillRun
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, ids, rows

pytestmark = pytest.mark.mostly_sqlite

State = dict[int, tuple[Any, ...]]
Steps = list[tuple[int, int | None]]


def backfill(
    lake: fm.Lake, table: str = "events", column: str = "nick", expression: str = "name", **options: Any
) -> BackfillRun:
    return lake.backfill.column(table, column, expression, **{"pause": "0ms", **options})


def told(steps: Steps) -> Callable[[int, int | None], None]:
    return lambda processed, total: steps.append((processed, total))


def content(lake: fm.Lake, table: str = "events", **options: Any) -> list[dict[str, Any]]:
    found = lake.read_arrow(table, with_seq=True, **options).read_all().to_pylist()
    return sorted(found, key=lambda row: row["id"])


def without(found: list[dict[str, Any]], *columns: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in columns} for row in found]


def feed(lake: fm.Lake, since: int, table: str = "events") -> list[tuple[str, int]]:
    found = lake.changes(table, since).arrow().read_all().to_pylist()
    return sorted((row["_change"], row["id"]) for row in found)


def sequence(lake: fm.Lake, table: str = "events") -> int:
    return lake.catalog.history.head(table).sequence


def data_files(lake: fm.Lake, table: str = "events") -> list[str]:
    return lake.catalog.files.data_files(lake.catalog.history.head(table))


def local(location: str) -> Path:
    return Path(location.removeprefix("file://"))


def kinds(lake: fm.Lake) -> list[str]:
    """What was published, the newest first."""
    return [commit.kind for commit in lake.history(limit=1000)]


def operations(lake: fm.Lake) -> int:
    with lake.catalog.database.read() as tx:
        return int(tx.execute(select(func.count()).select_from(tables.operations)).scalar_one())


@pytest.fixture
def sqlite_lake(new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """For what does not depend on the database."""
    with new_place("sqlite").open(create=True) as lake:
        lake.create_table("events", EVENTS)
        yield lake


# ── rows, sequences, progress ──


def test_twelve_thousand_rows_of_one_file_come_in_batches_of_five_thousand(lake: fm.Lake) -> None:
    lake.append("events", rows(*range(12_000)))
    before, newest = content(lake), sequence(lake)
    steps: Steps = []
    done = backfill(lake, batch_rows=5000, progress=told(steps))
    assert (done.outcome, done.exit_code) == ("done", 0)
    assert steps == [(0, 12_000), (5000, 12_000), (10_000, 12_000), (12_000, 12_000)]
    job = lake.backfill.show("events.nick")
    assert (job["status"], job["kind"], job["unit"], job["tables"]) == ("done", "column", "rows", ["events"])
    assert (job["processed"], job["total"], job["rows"], job["unfilled"]) == (12_000, 12_000, 12_000, 0)
    after = content(lake)
    assert without(after, "nick") == before
    assert all(row["nick"] == row["name"] for row in after)
    assert feed(lake, newest) == []
    # The file is cut first: no publish brings more than a batch.
    assert kinds(lake)[:5] == ["fill", "fill", "fill", "fill", "add_column"]
    check_lake(lake.catalog)


def test_whole_files_make_batches_oldest_first(lake: fm.Lake) -> None:
    counts, start = (5000, 1000, 4000, 2000), 0
    for count in counts:
        lake.append("events", rows(*range(start, start + count)))
        start += count
    before, newest = content(lake), sequence(lake)
    steps: Steps = []
    assert backfill(lake, batch_rows=5000, progress=told(steps)).outcome == "done"
    assert steps == [(0, 12_000), (5000, 12_000), (10_000, 12_000), (12_000, 12_000)]
    assert len(data_files(lake)) == len(counts), "one file in, one file out"
    assert without(content(lake), "nick") == before
    assert feed(lake, newest) == []
    check_lake(lake.catalog)


def test_a_second_run_has_nothing_to_do_and_starts_nothing(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2, 3))
    assert backfill(lake).outcome == "done"
    version, begun, job = lake.status()["version"], operations(lake), lake.backfill.show("events.nick")
    steps: Steps = []
    again = backfill(lake, progress=told(steps))
    assert (again.outcome, again.exit_code, steps) == ("nothing_to_do", 0, [])
    assert (lake.status()["version"], operations(lake), lake.backfill.show("events.nick")) == (version, begun, job)


def test_rows_that_cannot_be_filled_are_counted_once(lake: fm.Lake) -> None:
    lake.append("events", [*rows(1, 2), {"id": 3, "name": None}])
    lake.append("events", [{"id": 4, "name": None}, *rows(5)])
    done = backfill(lake, batch_rows=3)
    assert done.outcome == "done"
    assert (done.job["rows"], done.job["unfilled"]) == (5, 2)
    assert backfill(lake).outcome == "nothing_to_do"
    assert lake.backfill.show("events.nick")["unfilled"] == 2
    assert [row["nick"] for row in content(lake)] == ["row 1", "row 2", None, None, "row 5"]


@pytest.mark.parametrize(
    ("expression", "value", "kind"),
    [("7", 7, "int"), ("'x'", "x", "string"), ("true", True, "boolean"), ("id", 1, "long")],
    ids=["number", "text", "boolean", "column"],
)
def test_a_literal_or_a_column_needs_no_spark(sqlite_lake: fm.Lake, expression: str, value: Any, kind: str) -> None:
    sqlite_lake.append("events", rows(1))
    spec = sqlite_lake.backfill.column_spec("events", "more", expression)
    assert sqlite_lake.backfill.plan(spec)["type"] == kind
    assert backfill(sqlite_lake, column="more", expression=expression).outcome == "done"
    assert [row["more"] for row in content(sqlite_lake)] == [value]
    sqlite_lake.append("events", [*rows(2), {"id": 3, "name": "brings it", "more": value}])
    sqlite_lake.append("events", [{"id": 4, "name": "brings a null", "more": None}])
    expected = 2 if expression == "id" else value
    assert [row["more"] for row in content(sqlite_lake)][1] == expected
    assert content(sqlite_lake)[3]["more"] is None
    check_lake(sqlite_lake.catalog)


def test_a_table_without_rows_gets_its_column(lake: fm.Lake) -> None:
    steps: Steps = []
    assert backfill(lake, progress=told(steps)).outcome == "done"
    assert steps == [(0, 0)]
    lake.append("events", rows(1))
    assert content(lake) == [{"id": 1, "name": "row 1", "nick": "row 1", "_seq": sequence(lake)}]


def test_announced_rows_come_to_consumers_once(lake: fm.Lake) -> None:
    for start in (0, 10, 20):
        lake.append("events", rows(*range(start, start + 10)))
    newest = sequence(lake)
    done = backfill(lake, batch_rows=15, announce=True)
    assert done.outcome == "done"
    after = content(lake)
    assert [row["id"] for row in after] == list(range(30))
    assert all(row["nick"] == row["name"] and row["_seq"] > newest for row in after)
    assert feed(lake, newest) == [("upsert", number) for number in range(30)]
    changed = [commit.tables[0].rows_updated for commit in lake.history() if commit.kind == "fill"]
    assert changed == [10, 10, 10]
    check_lake(lake.catalog)


def test_an_announced_file_that_is_cut_is_announced_when_it_is_filled(sqlite_lake: fm.Lake) -> None:
    sqlite_lake.append("events", rows(*range(25)))
    newest = sequence(sqlite_lake)
    assert backfill(sqlite_lake, batch_rows=10, announce=True).outcome == "done"
    assert feed(sqlite_lake, newest) == [("upsert", number) for number in range(25)]
    changed = [commit.tables[0].rows_updated for commit in sqlite_lake.history() if commit.kind == "fill"]
    assert changed == [5, 10, 10, 0], "the cut, the oldest, changes no row"
    assert len({row["_seq"] for row in content(sqlite_lake)}) == 3
    check_lake(sqlite_lake.catalog)


def test_older_versions_stay_as_they_were(lake: fm.Lake) -> None:
    lake.append("events", rows(1, 2))
    version, before = lake.status()["version"], content(lake)
    assert backfill(lake).outcome == "done"
    assert content(lake, version=version) == before


# ── how files are cut ──


def test_many_large_files_of_one_commit_are_cut_one_by_one(
    sqlite_lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut fills nothing: more of them in a row would look like a table that keeps changing."""
    monkeypatch.setattr(column_backfill, "LOST_MAX", 2)
    sqlite_lake.create_table("parts", "id long not null, part int", partition=["part"])
    sqlite_lake.append("parts", [{"id": number, "part": number % 4} for number in range(40)])
    before = content(sqlite_lake, "parts")
    steps: Steps = []
    assert backfill(sqlite_lake, "parts", expression="id", batch_rows=8, progress=told(steps)).outcome == "done"
    assert steps == [(0, 40), (8, 40), (10, 40), (18, 40), (20, 40), (28, 40), (30, 40), (38, 40), (40, 40)]
    assert without(content(sqlite_lake, "parts"), "nick") == before
    check_lake(sqlite_lake.catalog)


def test_a_file_of_too_many_bytes_is_cut(sqlite_lake: fm.Lake) -> None:
    dice = random.Random(1)
    sqlite_lake.append("events", [{"id": n, "name": dice.randbytes(2000).hex()} for n in range(200)])
    (path,) = data_files(sqlite_lake)
    batch_bytes = local(path).stat().st_size // 3
    assert batch_bytes > column_plan.CUT_BYTES_MIN
    before = content(sqlite_lake)
    steps: Steps = []
    assert backfill(sqlite_lake, expression="1", batch_bytes=batch_bytes, progress=told(steps)).outcome == "done"
    assert len(steps) >= 4
    assert all(local(path).stat().st_size <= batch_bytes for path in data_files(sqlite_lake))
    assert without(content(sqlite_lake), "nick") == before
    assert kinds(sqlite_lake).count("fill") == len(data_files(sqlite_lake)) + 1, "it is cut once"
    check_lake(sqlite_lake.catalog)


def test_a_sorted_table_stays_in_order_within_its_files(sqlite_lake: fm.Lake) -> None:
    sqlite_lake.create_table("sorted", EVENTS, sort=["name desc", "id"])
    dice = random.Random(1)
    sqlite_lake.append("sorted", [{"id": n, "name": dice.choice("abc")} for n in range(60)])
    sqlite_lake.append("sorted", [{"id": n, "name": dice.choice("abc")} for n in range(60, 70)])
    assert backfill(sqlite_lake, "sorted", batch_rows=25).outcome == "done"
    paths = data_files(sqlite_lake, "sorted")
    assert len(paths) == 4
    for path in paths:
        found = [(row["name"], row["id"]) for row in pq.ParquetFile(local(path)).read().to_pylist()]
        assert found == sorted(found, key=lambda row: (-ord(row[0]), row[1]))


def test_adopted_files_are_filled_with_the_sequences_that_their_rows_had(sqlite_lake: fm.Lake, tmp_path: Path) -> None:
    from tests.contract.test_compact import foreign_table

    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    batches = [pa.table({"id": list(range(start, start + 4))}) for start in (0, 4)]
    made_with = {"format-version": "1", "write.metadata.metrics.default": "none"}
    sqlite_lake.adopt("old", foreign_table(tmp_path, schema, batches, made_with, {}))
    sqlite_lake.append("old", [{"id": 9}])
    before = content(sqlite_lake, "old")
    assert backfill(sqlite_lake, "old", expression="id", batch_rows=3).outcome == "done"
    after = content(sqlite_lake, "old")
    assert without(after, "nick") == before
    assert [row["nick"] for row in after] == [row["id"] for row in after]
    check_lake(sqlite_lake.catalog)


# ── beside other writers ──

PEOPLE = "id long not null, name string, part string, at timestamp"
START = datetime(2026, 1, 1, tzinfo=UTC)
POINTS = ("begun", "rewritten", "sealed", "built", "published")


def person(number: int, name: str) -> dict[str, Any]:
    return {"id": number, "name": name, "part": "ab"[number % 2], "at": START + timedelta(days=number)}


def settle_people(lake: fm.Lake, table: str) -> State:
    """Two partitions with three files of two rows each."""
    lake.create_table(table, PEOPLE, key=["id"], partition=["part"])
    lake.maintain.set_policy(table, "30d", column="at")
    for start in (0, 4, 8):
        lake.append(table, [person(number, f"old {number}") for number in range(start, start + 4)])
    return people(lake, table)


def people(lake: fm.Lake, table: str) -> State:
    return {row["id"]: (row["name"], row["_seq"]) for row in content(lake, table)}


# What another writer does meanwhile; which rows it writes; which it takes away; which deletions consumers hear of.
Meddler = tuple[Callable[[fm.Lake, str], object], dict[int, str], set[int], set[int]]
MEDDLERS: dict[str, Meddler] = {
    "append": (lambda lake, table: lake.append(table, [person(20, "new")]), {20: "new"}, set(), set()),
    "merge": (
        lambda lake, table: lake.merge(table, [person(2, "new"), person(21, "new")]),
        {2: "new", 21: "new"},
        set(),
        set(),
    ),
    "delete": (lambda lake, table: lake.delete(table, "id in (1, 8)"), {}, {1, 8}, {1, 8}),
    "overwrite of one partition": (
        lambda lake, table: lake.overwrite(table, [person(0, "new")], where="part = 'a'"),
        {0: "new"},
        {2, 4, 6, 8, 10},
        {2, 4, 6, 8, 10},
    ),
    "overwrite of everything": (
        lambda lake, table: lake.overwrite(table, [person(3, "new")]),
        {3: "new"},
        {*range(12)} - {3},
        {*range(12)} - {3},
    ),
    "compaction": (lambda lake, table: lake.maintain.compact(table, files_min=2), {}, set(), set()),
    "retention": (
        lambda lake, table: lake.maintain.retain(table, now="2026-02-03T12:00:00Z"),
        {},
        {0, 1, 2, 3},
        set(),
    ),
    "a new column": (
        lambda lake, table: lake.append(table, [{**person(22, "new"), "more": 1}], evolve=True),
        {22: "new"},
        set(),
        set(),
    ),
    "another column backfill": (
        lambda lake, table: backfill(lake, table, "twin", "id", batch_rows=5),
        {},
        set(),
        set(),
    ),
}


@pytest.mark.parametrize("meddler", MEDDLERS)
def test_beside_another_writer_every_row_is_filled_and_none_is_lost(lake: fm.Lake, place: Place, meddler: str) -> None:
    act, written, gone, deletions = MEDDLERS[meddler]
    with place.open() as other:
        for number, point in enumerate(POINTS if place.catalog is None else ("rewritten", "built")):
            table = f"people{number}"
            before, newest = settle_people(lake, table), sequence(lake, table)
            with at(f"fill.{point}", partial(act, other, table)):
                done = backfill(lake, table, batch_rows=5)
            assert (done.outcome, done.error) == ("done", None), point
            assert done.job["processed"] == done.job["total"] == done.job["rows"], point
            after = {row["id"]: row for row in content(lake, table)}
            assert set(after) == (set(before) | set(written)) - gone, point
            assert all(row["nick"] == row["name"] for row in after.values()), point
            assert all("twin" not in row or row["twin"] == row["id"] for row in after.values()), point
            for key, row in after.items():
                if key in written:
                    assert (row["name"], row["_seq"] > newest) == (written[key], True), point
                else:
                    assert (row["name"], row["_seq"]) == before[key], point
            heard = [("upsert", key) for key in written] + [("delete", key) for key in deletions]
            assert feed(lake, newest, table) == sorted(heard), point
            assert backfill(lake, table, batch_rows=5).outcome == "nothing_to_do", point
            if number % 2:
                check_lake(lake.catalog)


def test_a_file_that_went_waits_for_the_next_round_and_the_others_are_published(lake: fm.Lake, place: Place) -> None:
    settle_people(lake, "people")
    steps: Steps = []
    with place.open() as other, at("fill.sealed", lambda: other.delete("people", "id = 1")):
        assert backfill(lake, "people", progress=told(steps)).outcome == "done"
    assert steps == [(0, 12), (10, 11), (11, 11)]
    assert lake.backfill.show("people.nick")["rows"] == 11
    assert kinds(lake)[:4] == ["fill", "fill", "delete", "add_column"]
    check_lake(lake.catalog)


def test_a_writer_whose_files_are_filled_under_it_plans_again(lake: fm.Lake, place: Place) -> None:
    for number, point in enumerate(("merge.staged", "merge.rewritten", "merge.sealed", "merge.built")):
        table = f"people{number}"
        before = settle_people(lake, table)
        with place.open() as other, at(point, partial(backfill, other, table)):
            lake.merge(table, [person(2, "new"), person(20, "new")])
        after = {row["id"]: row for row in content(lake, table)}
        assert all(row["nick"] == row["name"] for row in after.values()), point
        assert set(after) == {*before, 20}
        assert (after[2]["name"], after[20]["name"]) == ("new", "new")
        assert all((after[key]["name"], after[key]["_seq"]) == before[key] for key in before if key != 2), point
    check_lake(lake.catalog)


def test_a_busy_table_is_filled_while_it_is_written_to(lake: fm.Lake, place: Place) -> None:
    """A writer that does not rest until the job has ended; both go on, and neither loses a row."""
    before = settle_people(lake, "people")
    newest = sequence(lake, "people")
    touched: dict[int, str | None] = {}
    ended, problems, dice = threading.Event(), [], random.Random(3)

    def write() -> None:
        try:
            with place.open() as other:
                number = 100
                while not ended.is_set() and number < 1000:
                    key = dice.randrange(12)
                    number += 1
                    other.append("people", [person(number, f"new {number}")])
                    other.merge("people", [person(key, f"merged {number}")])
                    touched.update({number: f"new {number}", key: f"merged {number}"})
                    if number % 3 == 0:
                        other.delete("people", f"id = {number}")
                        touched[number] = None
        except BaseException as error:  # noqa: BLE001 - shown below
            problems.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        done = backfill(lake, "people", batch_rows=3, pause="1ms")
    finally:
        ended.set()
        writer.join()
    assert problems == []
    assert (done.outcome, done.error) == ("done", None)
    after = {row["id"]: row for row in content(lake, "people")}
    assert all(row["nick"] == row["name"] for row in after.values())
    expected = {key: name for key, (name, _) in before.items()} | touched
    assert {key: row["name"] for key, row in after.items()} == {key: name for key, name in expected.items() if name}
    assert all((after[key]["name"], after[key]["_seq"]) == before[key] for key in before if key not in touched)
    assert {key for change, key in feed(lake, newest, "people") if change == "upsert"} == {
        key for key, name in touched.items() if name
    }
    check_lake(lake.catalog)


# ── lost rounds ──


def lose_rounds(lake: fm.Lake, table: str, count: int, seen: list[int]) -> Callable[[str], None]:
    """Replaces every file of the table whenever a batch is rewritten, so many times; then looks at the turns."""
    left = [count]

    def observe(point: str) -> None:
        if point != "fill.rewritten":
            return
        with lake.catalog.database.read() as tx:
            seen.append(int(tx.execute(select(func.count()).select_from(tables.turns)).scalar_one()))
        if left[0]:
            left[0] -= 1
            failpoints.observer = None
            try:
                lake.delete(table, f"id in ({left[0]}, {left[0] + 100}, {left[0] + 200})")
            finally:
                failpoints.observer = observe

    return observe


def three_files(lake: fm.Lake) -> None:
    for start in (0, 100, 200):
        lake.append("events", rows(*range(start, start + 30)))


def test_after_lost_rounds_the_next_one_has_the_tables_turn(lake: fm.Lake, place: Place) -> None:
    three_files(lake)
    seen: list[int] = []
    with place.open() as other:
        failpoints.observer = lose_rounds(other, "events", column_backfill.LOST_BEFORE_TURN, seen)
        try:
            done = backfill(lake)
        finally:
            failpoints.observer = None
    assert done.outcome == "done"
    # Three rounds without, one file in its turn, then the rest as always.
    assert seen == [0, 0, 0, 1, 0]
    assert (done.job["rows"], done.job["total"]) == (81, 81)
    assert all(row["nick"] == row["name"] for row in content(lake))
    check_lake(lake.catalog)


def test_too_many_lost_rounds_are_a_conflict_and_the_job_can_go_on(
    lake: fm.Lake, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_backfill, "LOST_MAX", 2)
    three_files(lake)
    with place.open() as other:
        failpoints.observer = lose_rounds(other, "events", 2, [])
        try:
            done = backfill(lake)
        finally:
            failpoints.observer = None
    assert (done.outcome, done.exit_code) == ("failed", 3)
    assert done.error is not None
    assert done.error["kind"] == "Conflict"
    assert lake.backfill.show("events.nick")["status"] == "failed"
    assert [row["nick"] for row in content(lake)] == [None] * 84
    check_lake(lake.catalog)
    assert backfill(lake).outcome == "done"
    assert all(row["nick"] == row["name"] for row in content(lake))


# ── what does not answer, and damage ──


DOWN, UNKNOWN = Unavailable("gone for a moment"), CommitUnknown("who knows", operation="x")


@pytest.mark.parametrize(
    ("point", "error"),
    [("add_column.sealed", DOWN), ("fill.rewritten", DOWN), ("fill.sealed", DOWN), ("fill.sealed", UNKNOWN)],
    ids=["add_column.sealed-down", "fill.rewritten-down", "fill.sealed-down", "fill.sealed-unknown"],
)
def test_what_does_not_answer_is_asked_again(
    lake: fm.Lake, monkeypatch: pytest.MonkeyPatch, point: str, error: Exception
) -> None:
    monkeypatch.setattr(column_backfill, "BACKOFF_S", 0.01)
    lake.append("events", rows(*range(10)))
    steps: Steps = []
    with at(point, partial(_raise, error)):
        done = backfill(lake, batch_rows=5, progress=told(steps))
    assert (done.outcome, done.job["rows"]) == ("done", 10)
    assert steps == [(0, 10), (5, 10), (10, 10)]
    assert all(row["nick"] == row["name"] for row in content(lake))
    lake.recover()
    check_lake(lake.catalog)


def _raise(error: BaseException) -> None:
    raise error


def test_what_never_answers_fails_the_job_after_some_tries(
    sqlite_lake: fm.Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_backfill, "BACKOFF_S", 0.01)
    sqlite_lake.append("events", rows(1))
    tries = 0

    def observe(point: str) -> None:
        nonlocal tries
        if point == "fill.rewritten":
            tries += 1
            raise Unavailable("gone for good")

    failpoints.observer = observe
    try:
        done = backfill(sqlite_lake)
    finally:
        failpoints.observer = None
    assert (done.outcome, done.exit_code, tries) == ("failed", 4, column_backfill.TRIES_MAX)
    check_lake(sqlite_lake.catalog)
    assert backfill(sqlite_lake).outcome == "done"


def lose_a_row(path: Path) -> None:
    pq.write_table(pq.ParquetFile(path).read().slice(1), path)


def lose_a_value(path: Path) -> None:
    found = pq.ParquetFile(path).read()
    nulls = pa.array([None] * len(found), pa.string())
    pq.write_table(found.set_column(1, found.schema.field(1), nulls), path)


@pytest.mark.parametrize("batch_rows", [100, 3], ids=["filled", "cut"])
@pytest.mark.parametrize("spoil", [lose_a_row, lose_a_value, Path.unlink], ids=lambda spoil: spoil.__name__)
def test_a_damaged_file_is_refused_and_nothing_changes(
    sqlite_lake: fm.Lake, spoil: Callable[[Path], None], batch_rows: int
) -> None:
    sqlite_lake.append("events", rows(*range(10)))
    (path,) = data_files(sqlite_lake)
    whole = local(path).read_bytes()
    spoil(local(path))
    done = backfill(sqlite_lake, expression="id", batch_rows=batch_rows)
    assert (done.outcome, done.exit_code) == ("failed", 5)
    assert done.error is not None
    assert done.error["kind"] == "Corrupt"
    assert data_files(sqlite_lake) == [path]
    local(path).write_bytes(whole)
    check_lake(sqlite_lake.catalog)
    assert backfill(sqlite_lake, expression="id", batch_rows=batch_rows).outcome == "done"
    assert [row["nick"] for row in content(sqlite_lake)] == list(range(10))


# ── one run at a time ──


def test_of_two_runs_at_once_one_is_busy(lake: fm.Lake, place: Place) -> None:
    lake.append("events", rows(*range(10)))
    found: list[Exception] = []

    def start(other: fm.Lake) -> None:
        with pytest.raises(Busy) as busy:
            backfill(other, batch_rows=5)
        found.append(busy.value)

    with place.open() as other, at("fill.rewritten", partial(start, other)):
        done = backfill(lake, batch_rows=5)
    assert len(found) == 1
    assert (done.outcome, done.job["rows"]) == ("done", 10)
    check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["add_column.sealed", "fill.rewritten", "fill.sealed", "fill.built"])
def test_a_run_that_was_taken_over_publishes_nothing(lake: fm.Lake, point: str) -> None:
    lake.append("events", rows(*range(10)))

    def take_over() -> None:
        with lake.catalog.database.write() as tx:
            tx.execute(update(tables.jobs).values(owner_run="another run"))

    with at(point, take_over), pytest.raises(Fenced):
        backfill(lake)
    assert "fill" not in kinds(lake)
    assert ("add_column" in kinds(lake)) == point.startswith("fill.")
    job = lake.catalog.jobs.find("events.nick")
    assert (job.state, job.rows, job.run) == ("running", 0, "another run")
    lake.recover()
    check_lake(lake.catalog)


def test_an_operation_that_a_healer_took_for_dead_is_done_again(
    lake: fm.Lake, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_backfill, "BACKOFF_S", 0.01)
    lake.append("events", rows(*range(10)))

    def heal() -> None:
        with lake.catalog.database.read() as tx:
            query = select(tables.operations.c.id).where(tables.operations.c.kind == "fill")
            operation = tx.execute(query).scalar_one()
        lake.catalog.journal.abandon(operation)

    with at("fill.rewritten", heal):
        done = backfill(lake)
    assert (done.outcome, done.job["rows"]) == ("done", 10)
    lake.recover()
    check_lake(lake.catalog)


def test_a_job_that_vanished_is_an_error(lake: fm.Lake) -> None:
    lake.append("events", rows(*range(10)))

    def vanish() -> None:
        with lake.catalog.database.write() as tx:
            tx.execute(delete(tables.jobs))

    with at("fill.sealed", vanish), pytest.raises(fm.errors.Corrupt, match="vanished"):
        backfill(lake)
    assert "fill" not in kinds(lake)
    check_lake(lake.catalog)


# ── cancel, resume ──


@pytest.mark.parametrize("point", ["fill.rewritten", "fill.published"])
def test_a_cancelled_job_keeps_what_is_done_and_goes_on_from_there(lake: fm.Lake, place: Place, point: str) -> None:
    three_files(lake)
    before, newest = content(lake), sequence(lake)
    steps: Steps = []
    with place.open() as other, at(point, lambda: other.backfill.cancel("events.nick")):
        done = backfill(lake, batch_rows=30, progress=told(steps))
    assert (done.outcome, done.exit_code) == ("cancelled", 0)
    assert steps == [(0, 90), (30, 90)], "it ends with the batch"
    job = lake.backfill.show("events.nick")
    assert (job["status"], job["rows"]) == ("cancelled", 30)
    # Readers are right: what is not filled is null, what comes anew is filled.
    assert {row["nick"] in (None, row["name"]) for row in content(lake)} == {True}
    assert sum(row["nick"] is None for row in content(lake)) == 60
    lake.append("events", rows(300))
    assert content(lake)[-1]["nick"] == "row 300"
    check_lake(lake.catalog)

    steps.clear()
    done = lake.backfill.resume("events.nick", progress=told(steps))
    assert done.outcome == "done"
    assert steps == [(30, 90), (60, 90), (90, 90)], "it goes on from what is done"
    assert done.job["rows"] == 90
    assert without(content(lake), "nick")[:-1] == before
    assert feed(lake, newest) == [("upsert", 300)]
    check_lake(lake.catalog)


def test_the_settings_may_change_from_run_to_run_the_meaning_may_not(lake: fm.Lake, place: Place) -> None:
    three_files(lake)
    with place.open() as other, at("fill.published", lambda: other.backfill.cancel("events.nick")):
        assert backfill(lake, batch_rows=30).outcome == "cancelled"
    with pytest.raises(Invalid, match="another job has"):
        backfill(lake, announce=True)
    with pytest.raises(Invalid, match="a column of this name"):
        backfill(lake, expression="id")
    done = backfill(lake, batch_rows=1000)
    assert (done.outcome, done.job["settings"]["batch_rows"]) == ("done", 1000)
    assert column_backfill.spec_from_job(lake.catalog.jobs.find("events.nick")).batch_rows == 1000


class Stopped(BaseException):
    """As a signal that ends the process, which is told before it goes."""


@pytest.mark.parametrize(
    "point",
    ["add_column.sealed", "add_column.published", "fill.rewritten", "fill.sealed", "fill.published"],
)
def test_a_run_that_is_stopped_anywhere_is_gone_on_with(lake: fm.Lake, point: str) -> None:
    lake.append("events", rows(*range(10)))
    before = content(lake)
    with at(point, partial(_raise, Stopped())), pytest.raises(Stopped):
        backfill(lake, batch_rows=4)
    assert lake.backfill.show("events.nick")["status"] == "cancelled"
    done = backfill(lake, batch_rows=4)
    assert (done.outcome, done.job["rows"], done.job["processed"]) == ("done", 10, 10)
    assert without(content(lake), "nick") == before
    assert all(row["nick"] == row["name"] for row in content(lake))
    lake.recover()
    check_lake(lake.catalog)


def test_an_error_of_the_callback_fails_the_job_and_keeps_what_is_done(lake: fm.Lake) -> None:
    three_files(lake)

    def progress(processed: int, total: int | None) -> None:
        if processed:
            raise RuntimeError("the bar is broken")

    done = backfill(lake, batch_rows=30, progress=progress)
    assert (done.outcome, done.exit_code, done.job["rows"]) == ("failed", 1, 30)
    assert done.error is not None
    assert done.error["message"] == "the bar is broken"
    assert backfill(lake).job["rows"] == 90


# ── what is refused, what is planned ──


def refused(lake: fm.Lake, **options: Any) -> Any:
    """Try it; nothing may have changed. The error."""
    version, begun = lake.status()["version"], operations(lake)
    with pytest.raises((Invalid, NotFound)) as error:
        backfill(lake, **options)
    assert lake.backfill.list() == []
    assert (lake.status()["version"], operations(lake)) == (version, begun)
    return error.value


@pytest.mark.parametrize(
    "options",
    [
        {"table": "nobody"},
        {"column": "name"},
        {"column": "NAME"},
        {"column": ""},
        {"column": "_seq"},
        {"column": "_Change"},
        {"expression": ""},
        {"batch_rows": 0},
        {"pause": "soon"},
        {"join": "notes n"},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_wrong_input_makes_no_job(sqlite_lake: fm.Lake, options: dict[str, Any]) -> None:
    sqlite_lake.append("events", rows(1))
    refused(sqlite_lake, **options)


def test_a_column_that_is_there_is_not_backfilled(lake: fm.Lake) -> None:
    lake.append("events", [{"id": 1, "name": "x", "nick": "y"}], evolve=True)
    error = refused(lake)
    assert "merge" in error.advice
    assert (error.facts["column"], ids(lake)) == ("nick", [1])


def test_a_column_that_somebody_else_adds_meanwhile_fails_the_job(lake: fm.Lake, place: Place) -> None:
    lake.append("events", rows(1))
    with (
        place.open() as other,
        at("job.held", lambda: other.append("events", [{"id": 2, "name": "x", "nick": "y"}], evolve=True)),
    ):
        done = backfill(lake)
    assert (done.outcome, done.exit_code) == ("failed", 2)
    assert [row["nick"] for row in content(lake)] == [None, "y"]
    check_lake(lake.catalog)


def test_a_plan_changes_nothing(lake: fm.Lake) -> None:
    lake.append("events", rows(*range(25)))
    lake.append("events", rows(*range(25, 30)))
    version, begun = lake.status()["version"], operations(lake)
    spec = lake.backfill.column_spec("events", "nick", "name", batch_rows=10)
    found = lake.backfill.plan(spec)
    assert {name: found[name] for name in ("rows", "files", "batches", "cuts", "type", "adds_column")} == {
        "rows": 30,
        "files": 2,
        "batches": 4,
        "cuts": 1,
        "type": "string",
        "adds_column": True,
    }
    assert json.loads(json.dumps(found)) == found
    assert (lake.status()["version"], operations(lake), lake.backfill.list()) == (version, begun, [])
    assert backfill(lake, batch_rows=10).outcome == "done"
    found = lake.backfill.plan(spec)
    assert (found["rows"], found["files"], found["batches"], found["adds_column"]) == (0, 0, 0, False)
