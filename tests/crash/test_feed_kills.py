"""Kill the intake at every step from the answer to the table: each row that was acknowledged is there once."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.spools import DROPPED, HELD, RETRIED
from floodmark.failpoints import NOT_PASSED, OTHER, WRITE_STEPS
from floodmark.ingest.intake import IntakeLimits
from floodmark.ingest.quarantine import drop, retry
from floodmark.spool.accept import accept, plan
from floodmark.testing.children import Child, preload, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place
from tests.intake_world import SLOW, bring, folder_of, intake_of, lines, rows_of, table_id, take

preload("tests.intake_world", "floodmark.ingest.intake", "floodmark.ingest.quarantine")

TABLES = {"events": (), "people": ("id",)}
# What is sent, record by record. Rows with a text as id fit no table: they are for the quarantine.
FIRST: list[list[dict[str, Any]]] = [[{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]]
SENT: list[list[dict[str, Any]]] = [
    [{"id": 3, "name": "b"}],
    [{"id": "x", "name": "bad"}, {"id": 4, "name": "b"}],
    [{"id": 2, "name": "c"}, {"id": 5, "name": "c"}],
]
STEPS = [step for step in WRITE_STEPS if step != "planned_again"]
APPEND = [f"append.{step}" for step in STEPS if f"append.{step}" not in NOT_PASSED]
MERGE = [f"merge.{step}" for step in STEPS]
FEED = [f"feed.{step}" for step in OTHER["feed"]]


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        for table, key in TABLES.items():
            lake.create_table(table, "id long not null, name string", key=list(key))


def send(place: Place, table: str, records: list[list[dict[str, Any]]], told: str) -> None:
    """Take records, write down what was acknowledged, and feed what waits; killed on its way, or not."""
    with place.open(actor="test") as lake, intake_of(lake, SLOW) as intake, open(told, "a") as file:
        for record in records:
            taken = take(lake, intake, table, *record)
            file.write(json.dumps([taken.record, record]) + "\n")
            file.flush()
        assert intake.drain(30)


def acknowledged(told: Path) -> list[list[dict[str, Any]]]:
    found = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    assert [number for number, _ in found] == list(range(len(found)))
    return [record for _, record in found]


def expected(table: str, records: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = [row for record in records for row in record if isinstance(row["id"], int)]
    if TABLES[table]:
        rows = list({row["id"]: row for row in rows}.values())
    return sorted(rows, key=lambda row: (row["id"], json.dumps(row, sort_keys=True)))


def check_settled(place: Place, table: str, records: list[list[dict[str, Any]]]) -> None:
    """After a restart: every record once, nothing else; the position, the quarantine and the files are right."""
    with place.open(actor="test") as lake:
        with intake_of(lake, SLOW) as intake:
            assert intake.drain(30)
        assert rows_of(lake, table) == expected(table, records)
        row = lake.catalog.spools.get(table_id(lake, table))
        bad = sum(not isinstance(row["id"], int) for record in records for row in record)
        assert row is not None
        assert (row.position, row.quarantined) == (len(records), bad)
        assert row.rows == sum(map(len, records)) - bad
        assert sum(one.rows for one in lake.catalog.spools.quarantine()) == bad
        if records:
            assert row.version is not None
            commit = lake.catalog.history.commit(row.version)
            assert commit.kind in ("append", "merge")
        lake.recover()
        check_lake(lake.catalog)


def kill(place: Place, table: str, point: str, tmp_path: Path) -> None:
    prepare(place)
    told = tmp_path / "told"
    if point != "feed.registered":
        run_child(send, place, table, FIRST, str(told))
    assert run_killed(send, place, table, SENT, str(told), failpoint=point), f"{point} was never passed"
    records = acknowledged(told)
    if point != "feed.registered":
        assert records == FIRST + SENT
    check_settled(place, table, records)
    run_child(send, place, table, [[{"id": 99, "name": "z"}]], str(told))
    check_settled(place, table, [*records, [{"id": 99, "name": "z"}]])


@pytest.mark.whole
@pytest.mark.parametrize("point", [*FEED, *APPEND])
def test_an_intake_killed_at_any_step_of_a_feed_loses_and_doubles_nothing(
    new_place: Callable[[str], Place], tmp_path: Path, point: str
) -> None:
    kill(new_place("sqlite"), "events", point, tmp_path)


@pytest.mark.parametrize("point", ["feed.quarantined", "feed.fed", *MERGE])
def test_so_it_is_by_key(new_place: Callable[[str], Place], tmp_path: Path, point: str) -> None:
    kill(new_place("sqlite"), "people", point, tmp_path)


@pytest.mark.parametrize("point", ["feed.fed", "append.sealed", "append.moved", "merge.published"])
def test_so_it_is_on_postgresql(new_place: Callable[[str], Place], tmp_path: Path, point: str) -> None:
    table = "people" if point.startswith("merge") else "events"
    kill(new_place("postgresql"), table, point, tmp_path)


def flood(place: Place, first: int, told: str) -> None:
    """Take rows for as long as it lives, and write down what was acknowledged."""
    with place.open(actor="test") as lake, intake_of(lake, IntakeLimits(group_wait_ms=10)) as intake:
        there = table_id(lake, "events")
        with open(told, "a", buffering=1) as file:
            for number in range(first, first + 100_000):
                taken = intake.take("events", there, lines({"id": number}), 1, key=str(number)).result(30)
                file.write(f"{taken.outcome} {number}\n")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_kills_at_any_moment_under_load_lose_and_double_nothing(
    new_place: Callable[[str], Place], tmp_path: Path, kills: int
) -> None:
    place, told = new_place("sqlite"), tmp_path / "told"
    prepare(place)
    chance = random.Random(kills)
    for life in range(kills):
        before = os.path.getsize(told) if told.exists() else 0
        child = Child(flood, place, life * 100_000, str(told))
        while not told.exists() or os.path.getsize(told) < before + 200:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)
        child.process.kill()
        child.wait()
    with place.open() as lake:
        with intake_of(lake, SLOW) as intake:
            # A client that heard nothing asks again, with its key: it is in once, whether or not it was before.
            last = max(int(line.split()[1]) for line in told.read_text().splitlines()) + 1
            for _ in range(2):
                take(lake, intake, "events", {"id": last}, key=str(last))
            assert intake.drain(30)
        found = [row["id"] for row in rows_of(lake, "events")]
        told_of = [int(line.split()[1]) for line in told.read_text().splitlines()]
        assert len(set(found)) == len(found)
        missed = set(told_of) - set(found)
        assert missed == set()
        # Taken, and killed before the answer: at most the one that was under way in each life.
        assert len(set(found) - set(told_of)) <= kills + 1
        lake.recover()
        check_lake(lake.catalog)


# ── what an operator does ──


def retry_it(place: Place) -> None:
    with place.open(actor="test") as lake:
        [aside] = lake.catalog.spools.quarantine(state=None)
        retry(lake.engine, aside.id, evolve=True)


def drop_it(place: Place) -> None:
    with place.open(actor="test") as lake:
        [aside] = lake.catalog.spools.quarantine(state=None)
        drop(lake.catalog, aside.id)


@pytest.mark.parametrize("point", ["append.sealed", "append.published", "spool_quarantine.retried"])
def test_a_retry_that_is_killed_brings_the_rows_in_once(new_place: Callable[[str], Place], point: str) -> None:
    place = new_place("sqlite")
    prepare(place)
    with place.open(actor="test") as lake, intake_of(lake) as intake:
        bring(lake, intake, "events", {"id": 1}, {"id": 2, "colour": "red"})
    assert run_killed(retry_it, place, failpoint=point)
    run_child(retry_it, place)
    with place.open() as lake:
        assert [row["id"] for row in rows_of(lake, "events")] == [1, 2]
        assert [one.state for one in lake.catalog.spools.quarantine(state=None)] == [RETRIED]
        check_lake(lake.catalog)


def test_a_drop_that_is_killed_is_done_and_its_object_goes_with_the_next_look(
    new_place: Callable[[str], Place],
) -> None:
    place = new_place("sqlite")
    prepare(place)
    with place.open(actor="test") as lake, intake_of(lake) as intake:
        bring(lake, intake, "events", {"id": "x"})
        [aside] = lake.catalog.spools.quarantine()
        assert aside.state == HELD
    assert run_killed(drop_it, place, failpoint="spool_quarantine.dropped")
    with place.open() as lake:
        assert lake.catalog.spools.put_aside(aside.id).state == DROPPED
        assert lake.catalog.storage.exists(aside.location)
        with intake_of(lake):
            pass
        check_lake(lake.catalog)
        assert not lake.catalog.storage.exists(aside.location)


def accept_it(place: Place) -> None:
    with place.open(actor="test") as lake:
        accept(lake.catalog, plan(lake.catalog, "events", folder_of(lake)))


@pytest.mark.parametrize("point", ["accept.stamped", "accept.accepted"])
def test_an_acceptance_that_is_killed_is_planned_again(
    new_place: Callable[[str], Place], tmp_path: Path, point: str
) -> None:
    place = new_place("sqlite")
    prepare(place)
    run_child(send, place, "events", FIRST, str(tmp_path / "told"))
    with place.open() as lake, intake_of(lake, SLOW) as intake:
        take(lake, intake, "events", {"id": 3})
    with place.open() as lake, lake.catalog.database.write() as tx:
        tx.execute(update(tables.lake).values(incarnation="I" * 26))
    assert run_killed(accept_it, place, failpoint=point)
    run_child(accept_it, place)
    with place.open() as lake:
        with intake_of(lake, SLOW) as intake:
            assert intake.drain(20)
        assert [row["id"] for row in rows_of(lake, "events")] == [1, 2, 3]
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["accept.kept", "accept.mended", "accept.kept:2"])
def test_a_mending_that_is_killed_is_planned_again_and_loses_nothing_more(
    new_place: Callable[[str], Place], point: str
) -> None:
    place = new_place("sqlite")
    prepare(place)
    with place.open() as lake:
        with intake_of(lake, IntakeLimits(group_wait_ms=3_600_000, segment_bytes=300)) as intake:
            for number in range(6):
                take(lake, intake, "events", {"id": number, "name": f"name {number} " + "x" * 100})
        folder = folder_of(lake) / table_id(lake, "events")
    paths = sorted(folder.glob("*.segment"))
    assert len(paths) > 2
    for path in (paths[0], paths[1]):
        path.write_bytes(path.read_bytes().replace(b"name", b"NAME", 1))
    damaged = [path.read_bytes() for path in paths[:2]]
    assert run_killed(accept_it, place, failpoint=point)
    run_child(accept_it, place)
    with place.open() as lake:
        with intake_of(lake, SLOW) as intake:
            assert intake.drain(20)
        found = [row["id"] for row in rows_of(lake, "events")]
        assert len(found) == 4
        check_lake(lake.catalog)
    assert {path.read_bytes() for path in folder.glob("*.damaged-*")} == set(damaged)


def test_an_object_that_nothing_refers_to_is_kept_while_a_healer_may_need_it(
    new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    """Killed after the seal: the healer publishes the feed, and the rows that it put aside are there."""
    place = new_place("sqlite")
    prepare(place)
    told = tmp_path / "told"
    assert run_killed(send, place, "events", SENT, str(told), failpoint="append.sealed")
    with place.open() as lake:  # heals
        assert lake.catalog.spools.all()[0].position == len(SENT)
        [aside] = lake.catalog.spools.quarantine()
        assert lake.catalog.storage.exists(aside.location)
    check_settled(place, "events", SENT)


def test_every_step_of_the_intake_has_a_kill() -> None:
    tried = {
        *FEED,
        *(f"accept.{step}" for step in OTHER["accept"]),
        "spool_quarantine.retried",
        "spool_quarantine.dropped",
    }
    assert {
        name for name, kind in failpoints.FAILPOINTS.items() if kind in ("feed", "accept", "spool_quarantine")
    } == tried
