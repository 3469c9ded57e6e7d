"""Sinks: what is new is shipped once, a unit stays what it was, and where a choice is needed nothing is sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, event, select, update
from sqlalchemy.exc import IntegrityError

import floodmark as fm
from floodmark.catalog import tables
from floodmark.errors import Invalid, NotFound
from floodmark.sinks.files.units import read_rows, read_units
from floodmark.sinks.outcome import SinkRun
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Receiver, answers
from tests.conftest import EVENTS, Place, at, rows

pytestmark = pytest.mark.mostly_sqlite(3)


class Lost(Exception):
    """The process did not get further."""


def lose() -> None:
    raise Lost


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def add_http(lake: fm.Lake, receiver: Receiver, name: str = "out", table: str = "events", **settings: Any) -> None:
    lake.sinks.add(name, "http", tables=table, url=receiver.url, backoff_s_max=0.01, **settings)


def add_files(lake: fm.Lake, folder: Path, name: str = "out", table: str = "events", **settings: Any) -> None:
    lake.sinks.add(name, "files", tables=table, path=str(folder), **settings)


def ran(lake: fm.Lake, name: str = "out", **options: Any) -> SinkRun:
    done = lake.sinks.run(name, **options)
    assert done.error is None, done.error
    return done


def shipped(folder: Path, table: str = "events") -> list[dict[str, Any]]:
    return [
        row for unit in read_units(str(folder), table=table) for batch in read_rows(unit) for row in batch.to_pylist()
    ]


def folded(changes: list[dict[str, Any]], key: str = "id") -> dict[int, dict[str, Any]]:
    """What a destination with a key holds after these changes, in order."""
    state: dict[int, dict[str, Any]] = {}
    for change in changes:
        state.pop(change[key], None)
        if change["_change"] == "upsert":
            state[change[key]] = {name: value for name, value in change.items() if not name.startswith("_")}
    return state


def keyed(lake: fm.Lake) -> None:
    lake.create_table("users", EVENTS, key=["id"])


def mark(lake: fm.Lake, name: str = "out") -> int | None:
    return lake.catalog.sinks.find(name).tables[0].mark


@contextmanager
def write_count(lake: fm.Lake) -> Iterator[list[int]]:
    """How many transactions that write were begun."""
    begun: list[int] = []

    def note(connection: Any) -> None:
        if connection.get_execution_options().get("floodmark_write"):
            begun.append(1)

    event.listen(lake.catalog.database.engine, "begin", note)
    try:
        yield begun
    finally:
        event.remove(lake.catalog.database.engine, "begin", note)


def change_catalog(lake: fm.Lake, *statements: Any) -> None:
    with lake.catalog.database.write() as tx:
        for statement in statements:
            tx.execute(statement)


# ── nothing new, and little new ──


def test_a_run_with_nothing_new_sends_reads_and_writes_nothing(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(*range(20)))
    assert ran(lake).outcome == "shipped"
    requests, before = receiver.request_count, lake.catalog.storage.counters.snapshot()
    with write_count(lake) as begun:
        assert ran(lake).outcome == "nothing_to_do"
    assert (receiver.request_count, begun) == (requests, [])
    assert lake.catalog.storage.counters.difference(before).total == 0
    assert lake.sessions._spark is None


def test_after_a_compaction_the_mark_moves_and_nothing_is_sent(
    lake: fm.Lake, receiver: Receiver, tmp_path: Path
) -> None:
    add_http(lake, receiver)
    add_files(lake, tmp_path / "files", "files")
    for number in range(4):
        lake.append("events", rows(number))
    ran(lake), ran(lake, "files")
    requests, objects = receiver.request_count, sorted(tmp_path.glob("files/**/*"))
    before = mark(lake)
    assert lake.maintain.compact("events", files_min=2).outcome == "compacted"
    for name in ("out", "files"):
        assert ran(lake, name).outcome == "nothing_to_do"
        assert mark(lake, name) == lake.catalog.history.head("events").sequence != before
    assert receiver.request_count == requests
    assert sorted(tmp_path.glob("files/**/*")) == objects
    assert lake.sessions._spark is None


def test_as_many_rows_are_read_as_are_new(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(*range(5_000)))
    ran(lake)
    lake.append("events", rows(*range(7_000, 7_007)))
    planned = lake.sinks.run("out", dry_run=True).tables[0]
    assert (planned.outcome, planned.detail["rows_max"], planned.detail["files"]) == ("planned", 7, 1)
    receiver.script()
    assert ran(lake).rows == 7
    assert [row["id"] for request in receiver.requests for row in request.rows] == [*range(7_000, 7_007)]


def test_a_dry_run_needs_no_right_to_write_and_a_run_does(place: Place, lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    with place.open(read_only=True) as reader:
        assert reader.sinks.run("out", dry_run=True).outcome == "planned"
        assert reader.sinks.status()[0]["tables"][0]["lag_rows"] == 1
        with pytest.raises(Invalid, match="read-only"):
            reader.sinks.run("out")
    assert receiver.request_count == 0


# ── a unit stays what it was ──


@pytest.mark.parametrize("point", ["unit.sent", "unit.shipped"])
def test_a_unit_that_was_sent_but_not_settled_is_reproduced_whatever_happened_since(
    lake: fm.Lake, receiver: Receiver, point: str
) -> None:
    lake.create_table("logs", "id long not null, name string, ts timestamp")
    old = [{"id": number, "name": "x" * 50, "ts": "2020-01-01T00:00:00Z"} for number in range(30)]
    for start in range(0, 30, 10):
        lake.append("logs", old[start : start + 10])
    add_http(lake, receiver, table="logs", part_rows=7, protected=False, parallel=1)
    with at(point, lose), pytest.raises(Lost):
        lake.sinks.run("out")
    first = {request.key: request.digest for request in receiver.requests}
    # The next part may be on its way before the first one's arrival is written down.
    assert len(first) in ([5] if point == "unit.shipped" else [1, 2])
    lake.append("logs", [{"id": 100, "name": "new", "ts": "2026-11-15T00:00:00Z"}])
    assert lake.maintain.compact("logs", files_min=2).outcome == "compacted"
    lake.maintain.set_policy("logs", "30d", column="ts")
    assert lake.maintain.retain("logs", now="2026-11-15T00:00:00Z").outcome == "retained"
    lake.maintain.expire(keep="0s")
    lake.maintain.sweep(grace="0s")
    lake.sinks.set("out", part_rows=3)
    receiver.script(answers(500, nth=(1,)))
    done = ran(lake)
    assert (done.tables[0].resumed, done.tables[0].units, done.outcome) == (1, 2, "shipped")
    assert receiver.ledger.mismatched == []
    again = {request.key: request.digest for request in receiver.requests if request.key in first}
    assert again.items() <= first.items()
    parts = {request.key: [row["id"] for row in request.rows] for request in receiver.requests}
    new = [part for key, part in parts.items() if key not in first]
    assert new[-1] == [100]
    assert all(len(part) in (7, 2) for part in new[:-1]), "the rest of the unit is cut as it was meant to be"
    assert Counter(row["id"] for row in receiver.rows) == Counter([*range(30), 100])
    check_lake(lake.catalog)
    assert lake.catalog.pin_count() == 0


def test_an_unsettled_unit_keeps_its_deletions_although_nothing_protects_the_sink(
    lake: fm.Lake, receiver: Receiver
) -> None:
    keyed(lake)
    lake.merge("users", rows(1, 2, 3))
    add_http(lake, receiver, table="users", protected=False)
    ran(lake)
    lake.delete("users", "id = 2")
    with at("unit.opened", lose), pytest.raises(Lost):
        lake.sinks.run("out")
    for number in range(10, 20):
        lake.merge("users", rows(number))
    lake.maintain.expire(keep="0s")
    lake.maintain.sweep(grace="0s")
    ran(lake)
    assert set(folded(receiver.rows)) == {1, 3, *range(10, 20)}


def test_a_part_that_fails_after_the_highest_sequence_was_sent_skips_nothing(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver, part_rows=2, parallel=1, tries=1)
    for number in range(6):
        lake.append("events", rows(number))
    receiver.script(answers(500, nth=(2,)))
    done = lake.sinks.run("out")
    assert (done.outcome, mark(lake)) == ("failed", -1)
    receiver.script()
    assert ran(lake).outcome == "shipped"
    assert Counter(row["id"] for row in receiver.rows) == Counter(range(6))
    assert mark(lake) == lake.catalog.history.head("events").sequence


def test_identical_rows_in_identical_parts_are_all_there(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver, part_rows=2)
    lake.append("events", [{"id": 1, "name": "same"}] * 10)
    ran(lake)
    assert len({request.digest for request in receiver.requests}) == 1
    assert len(receiver.rows) == 10


def test_sinks_of_one_kind_on_one_table_are_all_complete(lake: fm.Lake, receiver: Receiver, tmp_path: Path) -> None:
    for name in ("Same", "same", "sa me", "sa/me", "../same", "säme"):
        add_http(lake, receiver, name)
        add_files(lake, tmp_path / "shared", f"{name} to files")
    lake.append("events", rows(1, 2))
    for name in [sink["sink"] for sink in lake.sinks.status()]:
        ran(lake, name)
    assert Counter(row["id"] for row in receiver.rows) == {1: 6, 2: 6}
    assert Counter(row["id"] for row in shipped(tmp_path / "shared")) == {1: 6, 2: 6}


# ── what a follower with a key gets ──


def test_a_row_that_changed_twice_arrives_once_as_it_is_now(lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    add_http(lake, receiver, table="users")
    lake.merge("users", [{"id": 1, "name": "a"}, {"id": 2, "name": "a"}, {"id": 3, "name": "a"}])
    lake.merge("users", [{"id": 1, "name": "b"}])
    lake.merge("users", [{"id": 1, "name": "c"}])
    lake.delete("users", "id = 2")
    ran(lake)
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2, 3])
    assert folded(receiver.rows) == {1: {"id": 1, "name": "c"}, 3: {"id": 3, "name": "a"}}


def test_a_row_that_leaves_the_filter_arrives_as_a_deletion(lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    add_http(lake, receiver, table="users", where="name = 'in'", columns=("id",))
    lake.merge("users", [{"id": 1, "name": "in"}, {"id": 2, "name": "in"}])
    ran(lake)
    assert receiver.rows[0].keys() == {"id", "_change", "_seq"}
    lake.merge("users", [{"id": 1, "name": "out"}])
    receiver.ledger.rows.clear()
    assert ran(lake).tables[0].deletions == 1
    assert [(row["id"], row["_change"]) for row in receiver.rows] == [(1, "delete")]


def test_rows_that_are_filtered_out_move_the_mark(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver, where="id > 100")
    lake.append("events", rows(1, 2, 3))
    ran(lake)
    assert receiver.request_count == 0
    assert mark(lake) == lake.catalog.history.head("events").sequence
    assert ran(lake).outcome == "nothing_to_do"


# ── one run at a time, marks that only rise ──


def test_while_one_run_works_another_says_busy(place: Place, lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    with place.open() as other:
        found: list[SinkRun] = []

        def meanwhile() -> None:
            found.append(other.sinks.run("out"))
            found.append(lake.sinks.run("out"))

        with at("unit.opened", meanwhile):
            assert ran(lake).outcome == "shipped"
        assert [run.outcome for run in found] == ["busy", "busy"]
        assert all("holder" in run.error.facts for run in found if run.error)
        assert other.sinks.run("out").outcome == "nothing_to_do"
    assert len(receiver.rows) == 1


def test_a_run_whose_sink_was_taken_over_stops(place: Place, lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))

    def take_over() -> None:
        change_catalog(lake, update(tables.sinks).values(runner_run=None, runner_process=None))
        with place.open() as other:
            assert ran(other).outcome == "shipped"

    with at("unit.shipped", take_over):
        done = lake.sinks.run("out")
    assert (done.outcome, done.error and done.error.kind) == ("failed", "Fenced")
    assert (len(receiver.rows), mark(lake)) == (1, lake.catalog.history.head("events").sequence)
    check_lake(lake.catalog)


def test_the_database_refuses_a_mark_that_goes_down(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    ran(lake)
    for values in ({"mark": 0}, {"epoch": -1}):
        with pytest.raises(IntegrityError, match="never goes down"):
            change_catalog(lake, update(tables.consumers).values(**values))
    change_catalog(lake, update(tables.consumers).values(mark=0, epoch=1))


def test_a_paused_sink_sends_nothing_and_a_run_under_way_stops(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver, part_rows=1, parallel=1)
    lake.append("events", rows(1, 2, 3, 4))
    with at("unit.sent", lambda: lake.sinks.pause("out")):
        assert lake.sinks.run("out").outcome == "paused"
    sent = receiver.request_count
    assert sent < 4
    assert lake.sinks.run("out").outcome == "paused"
    assert receiver.request_count == sent
    assert lake.sinks.resume("out")
    ran(lake)
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2, 3, 4])


# ── rows that are refused ──


def test_a_bad_row_is_alone_in_quarantine_and_arrives_once_after_the_fix(lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    add_http(lake, receiver, table="users", part_rows=8)
    receiver.refuses = lambda row: row["name"] == "bad"
    lake.merge("users", [*rows(*range(20)), {"id": 77, "name": "bad"}])
    done = ran(lake)
    assert (done.outcome, done.tables[0].quarantined, done.rows) == ("shipped", 1, 20)
    lake.merge("users", rows(21))
    assert ran(lake).rows == 1  # later rows flow
    found = lake.sinks.quarantine("out")
    assert [json.loads(entry["line"])["id"] for entry in found] == [77]
    assert lake.sinks.about("out")["quarantined"] == 1
    assert lake.sinks.retry("out").tables[0].quarantined == 1  # still bad
    assert [entry["tries"] for entry in lake.sinks.quarantine("out")] == [2]
    receiver.refuses = None
    assert lake.sinks.retry("out").tables[0].rows == 1
    assert lake.sinks.quarantine("out") == []
    assert lake.sinks.retry("out").outcome == "nothing_to_do"
    assert Counter(row["id"] for row in receiver.rows) == Counter([*range(20), 21, 77])
    check_lake(lake.catalog)


def test_a_bad_row_that_was_mended_at_the_source_is_not_sent_again(lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    add_http(lake, receiver, table="users")
    receiver.refuses = lambda row: row["name"] == "bad"
    lake.merge("users", [{"id": 1, "name": "bad"}, {"id": 2, "name": "bad"}])
    ran(lake)
    lake.merge("users", [{"id": 1, "name": "good"}])
    ran(lake)
    lake.delete("users", "id = 2")
    ran(lake)
    receiver.refuses = None
    done = lake.sinks.retry("out")
    assert (done.outcome, done.tables[0].detail["replaced"]) == ("nothing_to_do", 2)
    assert folded(receiver.rows) == {1: {"id": 1, "name": "good"}}
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2])


def test_a_retry_that_died_is_finished_by_the_next_run(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.refuses = lambda row: row["id"] in (3, 4)
    lake.append("events", rows(1, 2, 3, 4))
    ran(lake)
    receiver.refuses = None
    with at("unit.shipped", lose), pytest.raises(Lost):
        lake.sinks.retry("out")
    assert ran(lake).tables[0].resumed == 1
    assert lake.sinks.quarantine("out") == []
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2, 3, 4])
    assert receiver.ledger.mismatched == []


def test_refused_rows_can_be_let_go(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.refuses = lambda row: True
    lake.append("events", rows(1, 2))
    ran(lake)
    one, _ = lake.sinks.quarantine("out")
    assert lake.sinks.drop("out", ids=[one["id"]]) == 1
    with pytest.raises(Invalid, match="no refused row"):
        lake.sinks.drop("out", ids=[one["id"]])
    assert lake.sinks.drop("out") == 1
    assert receiver.rows == []


# ── where somebody has to choose ──


def refused(lake: fm.Lake, receiver: Receiver, match: str, table: str = "events") -> None:
    requests = receiver.request_count
    done = lake.sinks.run("out")
    assert done.outcome == "refused", done
    error = next(one.error for one in done.tables if one.table == table)
    assert error is not None
    assert match in error.message
    assert "--from beginning" in error.advice
    assert done.exit_code == 5
    assert receiver.request_count == requests
    assert match in json.dumps(lake.sinks.about("out")) or lake.sinks.about("out")["lost"]


def drop_by_hand(lake: fm.Lake, table: str) -> None:
    pointer = tables.iceberg_tables
    change_catalog(
        lake,
        delete(tables.heads).where(tables.heads.c.table_name == table),
        delete(pointer).where(pointer.c.table_name == table),
    )


def test_a_table_that_was_made_again_is_not_taken_for_the_old_one(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    ran(lake)
    drop_by_hand(lake, "events")
    assert lake.sinks.run("out").outcome == "failed"  # nothing of this name is there
    lake.create_table("events", EVENTS)
    lake.append("events", rows(1, 2))
    lake.append("events", rows(3))
    refused(lake, receiver, "created again")
    lake.sinks.replay("out", start="beginning", table="events")
    assert ran(lake).rows == 3
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 1, 2, 3])
    about = lake.sinks.about("out")["tables"][0]
    assert (about["replays"], about["epoch"]) == (1, 1)


def test_a_restored_catalog_asks_before_it_sends(
    new_place: Callable[[str], Place], receiver: Receiver, tmp_path: Path
) -> None:
    place = new_place("sqlite")
    lake = place.open(create=True)
    lake.create_table("events", EVENTS)
    add_http(lake, receiver)
    lake.append("events", rows(1))
    ran(lake)
    lake.backup(tmp_path / "backup")
    lake.append("events", rows(2))
    ran(lake)  # sent, and then forgotten by the restore
    lake.close()
    for file in Path(place.path).glob("*.db*"):
        file.unlink()
    fm.restore(tmp_path / "backup", place.path)
    with place.open() as restored:
        refused(restored, receiver, "restored from a backup")
        restored.append("events", rows(3))
        refused(restored, receiver, "restored from a backup")
        restored.sinks.replay("out", start="mark")
        assert ran(restored).rows == 1
        assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2, 3])


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda: delete(tables.consumers), "lost"),
        (lambda: delete(tables.sink_tables), "lost"),
        (lambda: update(tables.consumers).values(mark=99), "not a sequence"),
        (lambda: update(tables.units).values(record="{}"), "cannot be understood"),
    ],
    ids=["mark lost", "state lost", "mark beyond the table", "unit unreadable"],
)
def test_lost_or_damaged_state_is_refused_and_never_a_silent_full_send(
    lake: fm.Lake, receiver: Receiver, damage: Any, match: str
) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    ran(lake)
    lake.append("events", rows(2))
    with at("unit.opened", lose), pytest.raises(Lost):
        lake.sinks.run("out")
    change_catalog(lake, damage())
    requests = receiver.request_count
    done = lake.sinks.run("out")
    assert (done.outcome, receiver.request_count) == ("refused", requests)
    assert done.error is not None
    assert match in done.error.message
    assert "--from beginning" in done.error.advice
    lake.sinks.replay("out", start=1)
    assert ran(lake).rows == 1
    assert Counter(row["id"] for row in receiver.rows) == Counter([1, 2])
    assert lake.catalog.pin_count() == 0


def test_a_stranger_at_the_other_end_is_refused(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    receiver.destination = "lake A"
    lake.append("events", rows(1))
    ran(lake)
    receiver.destination = "lake B"
    lake.append("events", rows(2))
    done = lake.sinks.run("out")
    assert (done.outcome, done.error and done.error.facts["known"]) == ("refused", "lake A")
    lake.sinks.replay("out", start="beginning")
    assert ran(lake).rows == 2


def test_who_fell_behind_the_known_deletions_has_to_choose(lake: fm.Lake, receiver: Receiver) -> None:
    keyed(lake)
    lake.merge("users", rows(1, 2, 3))
    add_http(lake, receiver, table="users", protected=False)
    ran(lake)
    lake.delete("users", "id = 2")
    for number in range(10, 20):
        lake.merge("users", rows(number))
    lake.maintain.expire(keep="0s")
    refused(lake, receiver, "not known any more", "users")


# ── settings ──


def test_a_replay_is_a_new_epoch_with_other_keys_and_is_counted(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    lake.append("events", rows(2))
    ran(lake)
    keys = set(receiver.ledger.digests)
    lake.sinks.replay("out", start=1)
    assert ran(lake).rows == 1
    assert Counter(row["id"] for row in receiver.rows) == {1: 1, 2: 2}
    assert len(set(receiver.ledger.digests) - keys) == 1
    with pytest.raises(Invalid, match="invalid start"):
        lake.sinks.replay("out", start=99)


def test_a_sink_that_is_made_again_shares_nothing_with_the_old_one(lake: fm.Lake, receiver: Receiver) -> None:
    lake.append("events", rows(1))
    for _ in range(2):
        add_http(lake, receiver, start="beginning")
        ran(lake)
        lake.sinks.remove("out")
    assert len(receiver.rows) == 2
    with pytest.raises(NotFound, match="no such sink"):
        lake.sinks.run("out")
    with lake.catalog.database.read() as tx:
        for table in (tables.consumers, tables.units, tables.sink_tables, tables.pins, tables.parts):
            assert tx.execute(select(table)).all() == []


def test_a_sink_can_begin_at_the_head(lake: fm.Lake, receiver: Receiver) -> None:
    lake.append("events", rows(1))
    add_http(lake, receiver, start="head")
    assert ran(lake).outcome == "nothing_to_do"
    lake.append("events", rows(2))
    ran(lake)
    assert [row["id"] for row in receiver.rows] == [2]


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        ("htpt", {}, "unknown kind"),
        ("http", {}, "url"),
        ("http", {"url": "http://user:hunter2@host/"}, "token_env"),
        ("http", {"url": "http://host/", "part_rowss": 1}, "part_rows"),
        ("http", {"url": "http://host/", "part_rows": 0}, "at least"),
        ("http", {"url": "http://host/", "columns": ["nope"]}, "nope"),
        ("http", {"url": "http://host/", "where": "nope = 1"}, "nope"),
        ("http", {"url": "http://host/", "where": "rand() > 0.5"}, "filter"),
        ("files", {}, "path"),
        ("files", {"path": "x", "format": "csv"}, "jsonl"),
        ("iceberg", {}, "catalog"),
        ("iceberg", {"catalog": {"uri": "postgresql://u:hunter2@h/d"}}, "env:"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_there(
    lake: fm.Lake, kind: str, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(Invalid) as caught:
        lake.sinks.add("out", kind, tables="events", **settings)
    assert match in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert lake.sinks.status() == []


def test_another_place_is_another_sink(lake: fm.Lake, tmp_path: Path) -> None:
    add_files(lake, tmp_path / "here")
    with pytest.raises(Invalid, match="the location of a sink cannot change"):
        lake.sinks.set("out", path=str(tmp_path / "there"))
    lake.sinks.set("out", part_bytes=4096)
    assert lake.sinks.about("out")["settings"]["part_bytes"] == 4096
    with pytest.raises(Invalid, match="of this name"):
        add_files(lake, tmp_path / "here")
    with pytest.raises(NotFound, match="no such table"):
        add_files(lake, tmp_path / "here", "other", table="nope")


def test_status_tells_lag_last_unit_errors_and_totals(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver, tries=1)
    lake.append("events", rows(1, 2, 3))
    ran(lake)
    lake.append("events", rows(4, 5))
    lake.maintain.compact("events", files_min=2)
    receiver.script(answers(503))
    assert lake.sinks.run("out").outcome == "failed"
    about = lake.sinks.about("out")
    assert about["error"]["kind"] == "Unavailable"
    table = about["tables"][0]
    assert (table["mark"], table["lag_rows"], table["units"], table["rows"]) == (1, 2, 1, 3)
    assert (table["last_unit"]["until"], table["open_unit"] is not None) == (1, True)
    receiver.script()
    ran(lake)
    about = lake.sinks.about("out")
    assert (about["error"], about["tables"][0]["lag_rows"], about["tables"][0]["lag_ms"]) == (None, 0, 0)


def test_until_empty_goes_on_with_what_came_meanwhile(lake: fm.Lake, receiver: Receiver) -> None:
    add_http(lake, receiver)
    lake.append("events", rows(1))
    with at("unit.settled", lambda: lake.append("events", rows(2))):
        assert ran(lake, until_empty=True).tables[0].units == 2
    assert [row["id"] for row in receiver.rows] == [1, 2]
