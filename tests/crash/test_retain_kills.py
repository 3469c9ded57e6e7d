"""Kill retention at every failpoint; heal; check rows, sequences, the feed, files, journal and audit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

import floodmark as fm
from floodmark import clock, failpoints
from floodmark.catalog.maintenance_state import Consumer, Policy
from floodmark.commit.intent import Intent
from floodmark.failpoints import FAILPOINTS, WRITE_STEPS
from floodmark.maintenance.retain import retain
from floodmark.model import MAIN
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place
from tests.crash.test_kill_at_every_step import expected_outcome

NOON = datetime(2026, 3, 10, 12)
NOW = clock.parse_time_ms("2026-03-10T12:00:00Z")


def aged(**hours: int) -> list[dict[str, object]]:
    return [{"id": int(key[1:]), "t": NOON - timedelta(hours=hour)} for key, hour in hours.items()]


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, t timestamp_ntz", key=["id"])
        lake.append("events", aged(k1=90, k2=91))  # goes as a whole
        lake.append("events", aged(k3=92, k4=1))  # is rewritten
        lake.append("events", aged(k5=93, k6=2))  # waits for the consumer
        table_id = lake.catalog.history.head("events").table_id
        lake.catalog.maintenance.put_consumer(Consumer("sink", table_id, 2))


BEFORE = {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3}
AFTER = {4: 2, 5: 3, 6: 3}


def retain_table(place: Place) -> str:
    with place.open() as lake:
        head = lake.catalog.history.head("events")
        intent = Intent("retain", MAIN, "test", "")
        return retain(lake.engine, intent, head, Policy("2d"), now_ms=NOW)[0]


def retain_meddled(place: Place) -> str:
    """Beside another writer that deletes a row of the rewritten file, after the seal: it is planned again."""

    def observe(point: str) -> None:
        if point == "retain.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.delete("events", "id = 4")

    failpoints.observer = observe
    return retain_table(place)


def state(lake: fm.Lake) -> dict[int, int]:
    return {row["id"]: row["_seq"] for row in lake.read_arrow("events", with_seq=True).read_all().to_pylist()}


def changed(lake: fm.Lake, since: int | None = None) -> set[tuple[int, str]]:
    return {(row["id"], row["_change"]) for row in lake.changes("events", since).arrow().read_all().to_pylist()}


POINTS = [f"retain.{step}" for step in WRITE_STEPS if f"retain.{step}" in FAILPOINTS and step != "planned_again"]


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", POINTS)
def test_killed_retention_happens_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(retain_table, place, failpoint=point), f"{point} was never passed"
    outcome = expected_outcome("retain", point, None)
    for _ in range(2):
        with place.open() as lake:
            facts = check_lake(lake.catalog)
            assert list(facts.audit.values()) == ([outcome] if outcome else [])
            rows = BEFORE if outcome else AFTER
            assert state(lake) == rows
            assert changed(lake) == {(key, "upsert") for key in rows}
            assert changed(lake, 3) == set()
    assert run_child(retain_table, place) == ("retained" if outcome else "protected")
    with place.open() as lake:
        assert state(lake) == AFTER
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["planned_again", "sealed:2", "built", "moved", "published"])
def test_killed_after_planning_again_the_old_plan_is_never_published(place: Place, point: str) -> None:
    run_child(prepare, place)
    assert run_killed(retain_meddled, place, failpoint=f"retain.{point}")
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert list(facts.audit.values()) == ([] if point == "published" else ["rolled_back"])
        expected = BEFORE if point != "published" else AFTER
        assert state(lake) == {key: sequence for key, sequence in expected.items() if key != 4}
    assert run_child(retain_table, place) == ("protected" if point == "published" else "retained")
    with place.open() as lake:
        assert state(lake) == {5: 3, 6: 3}
        assert changed(lake, 3) == {(4, "delete")}
        check_lake(lake.catalog)


def retain_forced(place: Place) -> str:
    with place.open() as lake:
        head = lake.catalog.history.head("events")
        intent = Intent("retain", MAIN, "test", "")
        return retain(lake.engine, intent, head, Policy("2d"), now_ms=NOW, force=True)[0]


@pytest.mark.parametrize("point", ["moved", "published"])
def test_a_forced_loss_is_known_also_if_its_maker_is_killed(place: Place, point: str) -> None:
    run_child(prepare, place)
    assert run_killed(retain_forced, place, failpoint=f"retain.{point}")
    with place.open() as lake:
        found = [(one.outcome, one.detail["lost"]) for one in lake.maintain.history("events")]
        assert found == ([] if point == "moved" else [("forced", {"sink": 1})])
        assert state(lake) == (BEFORE if point == "moved" else {4: 2, 6: 3})
        check_lake(lake.catalog)
