"""Kill maintenance at every failpoint; heal, sweep once; check rows, sequences, the feed, files, journal and audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.commit.journal import LOOK_ONCE_MORE
from floodmark.failpoints import FAILPOINTS, WRITE_STEPS
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place
from tests.crash.test_kill_at_every_step import BEFORE_COMMIT, BEFORE_SEAL

# What these show does not depend on the database; the door that they pass is shown on both elsewhere.
pytestmark = pytest.mark.mostly_sqlite

# What maintenance imports late, before the children are forked.
preload(
    "tests.conftest",
    "tests.crash.test_kill_at_every_step",
    "floodmark.maintenance.maintenance",
    "floodmark.maintenance.compact",
    "floodmark.maintenance.sweep",
    "floodmark.maintenance.retain",
)

PEOPLE = "id long not null, name string, part string, at timestamp"
State = dict[int, tuple[str, int]]


def person(number: int, name: str) -> dict[str, Any]:
    from datetime import UTC, datetime, timedelta

    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number)
    return {"id": number, "name": name, "part": "ab"[number % 2], "at": at}


def prepare(place: Place) -> None:
    """Two groups of small files, deletions, a policy, dead versions, and a folder that wants a last look."""
    with place.open(create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"], partition=["part"])
        for start in (0, 2, 4):
            lake.append("people", [person(start, "first"), person(start + 1, "first")])
        lake.merge("people", [person(3, "second"), person(6, "second")])
        lake.delete("people", "id = 5")
        lake.maintain.set_policy("people", "30d", column="at")
        for number in (10, 11, 12):
            lake.append("people", [person(number, "later")])
        lake.catalog.expiry.expire(before_ms=2**60)
        with lake.catalog.database.write() as tx:
            operation = tx.execute(select(tables.operations).where(tables.operations.c.version == 9)).one()
            tx.execute(tables.operations.update().where(tables.operations.c.id == operation.id).values(cleaned=2))
        lake.catalog.storage.put(late_file(lake), b"of an executor that outlived its driver")


def late_file(lake: fm.Lake) -> str:
    import json

    with lake.catalog.database.read() as tx:
        operation = tx.execute(select(tables.operations).where(tables.operations.c.version == 9)).one()
    return f"{json.loads(operation.folders)[1]}/late.parquet"


BEFORE: State = {
    0: ("first", 1),
    1: ("first", 1),
    2: ("first", 2),
    3: ("second", 4),
    4: ("first", 3),
    6: ("second", 4),
    10: ("later", 6),
    11: ("later", 7),
    12: ("later", 8),
}
# What is not older than 30 days at that time.
NOW = "2026-02-04T12:00:00Z"
RETAINED = {key: row for key, row in BEFORE.items() if key > 4}


# ── what the killed processes do ──


def compact(place: Place) -> str:
    with place.open() as lake:
        return lake.maintain.compact("people", files_min=2).outcome


def compact_meddled(place: Place) -> str:
    """A compaction beside which another writer takes a row out of one of its groups, after it was sealed."""

    def observe(point: str) -> None:
        if point == "compact.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.delete("people", "id = 0")

    with place.open() as lake:
        failpoints.observer = observe
        return lake.maintain.compact("people", files_min=2).outcome


def retain(place: Place) -> str:
    with place.open() as lake:
        return lake.maintain.retain("people", now=NOW).outcome


def retain_meddled(place: Place) -> str:
    def observe(point: str) -> None:
        if point == "retain.sealed":
            failpoints.observer = None
            with place.open(recover=False) as other:
                other.delete("people", "id = 0")

    with place.open() as lake:
        failpoints.observer = observe
        return lake.maintain.retain("people", now=NOW).outcome


def expire(place: Place) -> str:
    with place.open() as lake:
        lake.append("people", [person(13, "later")])
        return lake.maintain.expire(keep="0s").outcome


def sweep(place: Place) -> str:
    with place.open() as lake:
        return lake.maintain.sweep(grace="0s").outcome


def run_all(place: Place) -> str:
    with place.open() as lake:
        lake.maintain.set_policy("people", None)
        return lake.maintain.run(files_min=2, keep="0s", grace="0s").outcome


# ── what must be there afterwards ──


def state(lake: fm.Lake) -> State:
    found = lake.read_arrow("people", with_seq=True).read_all().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: (row["name"], row["_seq"]) for row in found}


def from_changes(lake: fm.Lake) -> State:
    """The rows as somebody has them who was told everything from the beginning, in one go."""
    found = lake.changes("people").arrow().read_all().to_pylist()
    return {row["id"]: (row["name"], row["_seq"]) for row in found if row["_change"] == "upsert"}


def check(place: Place, rows: State, audit: list[str]) -> None:
    """Healed: one sweep ends all that is left; nothing is lost, nothing is over, and healing again changes nothing."""
    with place.open() as lake:
        assert [row.outcome for row in lake.audit()] == audit
        assert state(lake) == from_changes(lake) == rows
        done = lake.maintain.sweep(grace="0s")
        assert done.outcome in ("swept", "nothing_to_do"), done.as_dict()
        facts = check_lake(lake.catalog)
        assert sorted(facts.audit.values()) == audit
        assert not lake.catalog.storage.exists(late_file(lake))
        with lake.catalog.database.read() as tx:
            assert LOOK_ONCE_MORE not in tx.execute(select(tables.operations.c.cleaned)).scalars().all()
        deep = lake.maintain.sweep(grace="0s", deep=True)
        assert deep.outcome == "nothing_to_do", deep.as_dict()
        assert [record.detail["unknown_files"] for record in deep.records if "unknown_files" in record.detail][-1] == 0
        assert state(lake) == from_changes(lake) == rows
    with place.open() as lake:
        assert check_lake(lake.catalog) == facts
        assert lake.status()["health"] == "fine"


def outcome_of(point: str) -> list[str]:
    """What healing reports of an operation that was killed there."""
    return ["rolled_back"] if point.rpartition(".")[2] in (*BEFORE_SEAL, *BEFORE_COMMIT, "planned_again") else []


def points_of(kind: str) -> list[str]:
    return [f"{kind}.{step}" for step in WRITE_STEPS if f"{kind}.{step}" in FAILPOINTS and step != "planned_again"]


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", points_of("compact"))
def test_killed_compaction_leaves_the_old_files_or_the_new(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(compact, place, failpoint=point), f"{point} was never passed"
    check(place, BEFORE, outcome_of(point))
    with place.open() as lake:
        files = lake.catalog.history.head("people").files
        assert files == (2 if outcome_of(point) == [] else 9)
        assert lake.maintain.compact("people", files_min=2).outcome == ("nothing_to_do" if files == 2 else "compacted")
        assert state(lake) == BEFORE
        check_lake(lake.catalog)


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", points_of("retain"))
def test_killed_retention_takes_all_due_rows_or_none(
    new_place: Callable[[str], Place], database: str, point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(retain, place, failpoint=point), f"{point} was never passed"
    undone = outcome_of(point) != []
    check(place, BEFORE if undone else RETAINED, outcome_of(point))
    with place.open() as lake:
        again = lake.maintain.retain("people", now=NOW)
        assert again.outcome == ("retained" if undone else "nothing_to_do")
        assert state(lake) == RETAINED
        check_lake(lake.catalog)


@pytest.mark.parametrize(
    ("meddled", "point"),
    [
        (compact_meddled, "compact.planned_again"),
        (compact_meddled, "compact.sealed:2"),
        (compact_meddled, "compact.published"),
        (retain_meddled, "retain.planned_again"),
    ],
)
def test_killed_after_planning_again_the_old_plan_is_not_published(
    place: Place, meddled: Callable[[Place], str], point: str
) -> None:
    run_child(prepare, place)
    assert run_killed(meddled, place, failpoint=point), f"{point} was never passed"
    rows = {key: row for key, row in BEFORE.items() if key != 0}
    check(place, rows, outcome_of(point.partition(":")[0]))
    with place.open() as lake:
        if point == "compact.published":
            files = lake.catalog.history.head("people").files
            assert files == 1 + 5, "the group that nobody touched was published alone"
        if point.startswith("compact"):
            assert lake.maintain.compact("people", files_min=2).outcome == "compacted"
        assert state(lake) == rows


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize(
    ("verb", "point"),
    [
        *((sweep, f"sweep.{step}") for step in ("planned", "data_deleted", "metadata_deleted", "marked")),
        # Of the last look, and of the table.
        *((sweep, f"maintain.recorded:{number}") for number in (1, 2)),
        (expire, "expire.marked"),
        (expire, "maintain.recorded"),
    ],
)
def test_killed_sweep_or_expiry_is_ended_by_the_next(
    new_place: Callable[[str], Place], database: str, verb: Callable[[Place], str], point: str
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(verb, place, failpoint=point), f"{point} was never passed"
    check(place, {**BEFORE, 13: ("later", 9)} if verb is expire else BEFORE, [])


@pytest.mark.parametrize("number", range(1, 6))
def test_killed_between_the_verbs_of_a_run_the_next_run_does_the_rest(place: Place, number: int) -> None:
    run_child(prepare, place)
    assert run_killed(run_all, place, failpoint=f"maintain.recorded:{number}")
    assert run_child(run_all, place) in ("compacted", "indexed", "expired", "swept", "nothing_to_do")
    check(place, BEFORE, [])
    with place.open() as lake:
        assert lake.catalog.history.head("people").files == 2
        assert {record.outcome for record in lake.maintain.history(limit=100)} <= {
            *("compacted", "nothing_to_do", "below_threshold", "indexed", "expired", "swept")
        }


def heal(place: Place) -> None:
    place.open().close()


@pytest.mark.parametrize("point", ["heal.found", "heal.fenced", "heal.files_deleted"])
def test_a_healer_of_maintenance_that_is_killed_too_is_healed_by_the_next(place: Place, point: str) -> None:
    run_child(prepare, place)
    assert run_killed(compact, place, failpoint="compact.built")
    assert run_killed(heal, place, failpoint=point)
    check(place, BEFORE, ["rolled_back"])
