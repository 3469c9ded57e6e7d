"""Kill a real process at every failpoint of every operation; heal; check rows, files, journal and audit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import floodmark as fm
from floodmark.failpoints import FAILPOINTS, WRITE_STEPS
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import LakeFacts, check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids, rows

# Writes that only add rows; those that replace some, or are planned again, are in test_keyed_kills.py.
NOT_HERE = ("rewritten", "planned_again")
WRITE_POINTS = {
    kind: [f"{kind}.{step}" for step in WRITE_STEPS if f"{kind}.{step}" in FAILPOINTS and step not in NOT_HERE]
    for kind in ("create_table", "append", "transaction")
}
BEFORE_SEAL = ("begun", "staged", "rewritten", "written")
BEFORE_COMMIT = ("sealed", "built", "locked", "moved")


# ── what the killed processes do ──


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.create_table("notes", EVENTS)
        lake.append("events", rows(1, 2))


def create_table(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.create_table("more", EVENTS, if_not_exists=True).outcome


def append(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        return lake.append("events", rows(3, 4), batch=batch).outcome


def transaction(place: Place, batch: str | None) -> str:
    with place.open() as lake:
        with lake.transaction("both", batch=batch) as tx:
            tx.append("events", rows(3, 4))
            tx.append("notes", rows(5))
        assert tx.commit is not None
        return tx.commit.outcome


WRITERS: dict[str, Callable[[Place, str | None], str]] = {
    "create_table": create_table,
    "append": append,
    "transaction": transaction,
}


def heal(place: Place) -> None:
    place.open().close()


# ── what must be there afterwards ──


def happened(lake: fm.Lake, kind: str) -> bool:
    """Did the operation happen? All of it or nothing: anything else fails here."""
    events, notes = ids(lake, "events"), ids(lake, "notes")
    tables = {table["table"] for table in lake.tables()}
    if kind == "create_table":
        assert (events, notes) == ([1, 2], [])
        return "more" in tables
    assert tables == {"events", "notes"}
    if kind == "append":
        assert notes == []
        assert events in ([1, 2], [1, 2, 3, 4])
    else:
        assert (events, notes) in (([1, 2], []), ([1, 2, 3, 4], [5]))
    return len(events) == 4


def expected_outcome(kind: str, point: str, batch: str | None) -> str | None:
    """What healing must report of an operation killed at this point; None: it had happened."""
    step = point.rpartition(".")[2]
    if step in BEFORE_SEAL:
        return "rolled_back"
    if step in BEFORE_COMMIT:
        return "rolled_forward" if batch is not None and kind != "create_table" else "rolled_back"
    return None


def check_healed(place: Place, kind: str, outcome: str | None) -> LakeFacts:
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert sorted(facts.audit.values()) == ([outcome] if outcome else [])
        assert happened(lake, kind) is (outcome != "rolled_back")
        assert lake.status()["health"] == "fine"
        return facts


@pytest.mark.mostly_sqlite(4)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("batch", [None, "monday"])
@pytest.mark.parametrize(
    ("kind", "point"), [(kind, point) for kind, points in WRITE_POINTS.items() for point in points]
)
def test_killed_write_happens_whole_or_not_at_all(
    new_place: Callable[[str], Place], database: str, kind: str, point: str, batch: str | None
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(WRITERS[kind], place, batch, failpoint=point), f"{point} was never passed"
    outcome = expected_outcome(kind, point, batch)

    first = check_healed(place, kind, outcome)
    second = check_healed(place, kind, outcome)
    assert second == first, "healing twice changed something"

    # The caller's retry: with an identity it never doubles; without one, only what was undone is sent again.
    if batch is not None or outcome == "rolled_back":
        again = run_child(WRITERS[kind], place, batch)
        if kind != "create_table":
            assert again == ("committed" if outcome == "rolled_back" else "already_committed")
    with place.open() as lake:
        assert happened(lake, kind)
        check_lake(lake.catalog)


# Which way through healing passes the point: what the first process left behind.
HEAL_POINTS = {
    "heal.found": "append.staged",
    "heal.fenced": "append.staged",
    "heal.files_deleted": "append.sealed",
    "heal.built": "transaction.sealed",
    "heal.locked": "transaction.built",
    "heal.moved": "transaction.sealed",
    "heal.published": "transaction.built",
    "heal.cleaned": "transaction.built",
}


@pytest.mark.mostly_sqlite(2)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize(("heal_point", "left_by"), HEAL_POINTS.items())
def test_killed_healer_is_healed_by_the_next(
    new_place: Callable[[str], Place], database: str, heal_point: str, left_by: str
) -> None:
    place = new_place(database)
    kind = left_by.partition(".")[0]
    batch = "monday" if kind == "transaction" else None
    run_child(prepare, place)
    assert run_killed(WRITERS[kind], place, batch, failpoint=left_by)
    assert run_killed(heal, place, failpoint=heal_point), f"{heal_point} was never passed"
    outcome = expected_outcome(kind, left_by, batch)
    first = check_healed(place, kind, outcome)
    assert check_healed(place, kind, outcome) == first


def append_bad(place: Place) -> None:
    with place.open() as lake, pytest.raises(fm.Invalid):
        lake.append("events", [{"id": None, "name": "no id"}])


@pytest.mark.parametrize("point", ["abandon.fenced", "abandon.files_deleted"])
def test_killed_while_undoing_an_error_leaves_nothing(place: Place, point: str) -> None:
    run_child(prepare, place)
    assert run_killed(append_bad, place, failpoint=point)
    with place.open() as lake:
        facts = check_lake(lake.catalog)
        assert ids(lake) == [1, 2]
        # The writer fenced it by itself: no healer's report.
        assert facts.audit == {}


def expire_all(place: Place) -> None:
    with place.open() as lake:
        lake.catalog.expiry.expire(before_ms=2**60)


def test_killed_after_expiring_keeps_the_head(place: Place) -> None:
    run_child(prepare, place)
    assert run_killed(expire_all, place, failpoint="expire.marked")
    with place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [1, 2]
        with pytest.raises(fm.BelowRetention):
            ids(lake, version=1)


@pytest.mark.parametrize("point", [name for name in FAILPOINTS if name.startswith("init.")])
def test_killed_while_making_a_lake_can_be_made_again(place: Place, point: str) -> None:
    assert run_killed(prepare, place, failpoint=point)
    run_child(prepare, place)
    with place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [1, 2]


def back_up(place: Place, file: str) -> None:
    with place.open() as lake:
        lake.backup(file)


@pytest.mark.parametrize("point", ["backup.copied", "backup.written"])
def test_killed_backup_is_whole_or_absent(place: Place, tmp_path_factory: pytest.TempPathFactory, point: str) -> None:
    file = tmp_path_factory.mktemp("backups") / "lake.backup"
    run_child(prepare, place)
    assert run_killed(back_up, place, str(file), failpoint=point)
    assert file.exists() is (point == "backup.written")
    if file.exists():
        assert file.read_bytes().endswith(b"}\n")
    with place.open() as lake:
        check_lake(lake.catalog)


def lose_and_restore(place: Place, file: str, into: str | None) -> None:
    fm.restore(file, place.path, catalog=into)


@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("point", [name for name in FAILPOINTS if name.startswith("restore.")])
def test_killed_restore_can_be_run_again(
    new_place: Callable[[str], Place], tmp_path: object, database: str, point: str
) -> None:
    from pathlib import Path

    place = new_place(database)
    file = str(Path(place.path).parent / "lake.backup")
    run_child(prepare, place)
    run_child(back_up, place, file)
    lost = Place(place.path, new_place(database).catalog)
    if lost.catalog is None:
        for name in Path(place.path).glob("catalog.db*"):
            name.unlink()
    assert run_killed(lose_and_restore, lost, file, lost.catalog, failpoint=point)
    run_child(lose_and_restore, lost, file, lost.catalog)
    with lost.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [1, 2]


def test_every_failpoint_is_killed_somewhere_in_this_suite() -> None:
    """A new failpoint must come with a test that dies there."""
    covered = {
        *(point for points in WRITE_POINTS.values() for point in points),
        *(name for name, kind in FAILPOINTS.items() if kind in ("merge", "delete", "overwrite", "update", "adopt")),
        "transaction.rewritten",  # tests/crash/test_keyed_kills.py, like those above and the next
        # tests/crash/test_maintain_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind in ("compact", "retain", "sweep", "maintain")),
        *(name for name in FAILPOINTS if name.endswith(".planned_again")),
        "destination.expired",  # tests/contract/test_iceberg_maintenance.py
        "destination.swept",
        *(name for name, kind in FAILPOINTS.items() if kind == "unit"),  # tests/crash/test_sink_kills.py
        "check.put",  # tests/contract/test_sink_check.py
        # tests/crash/test_branch_kills.py, test_apply_kills.py, test_repair_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind in ("branch", "branch_merge", "apply", "repair")),
        *(name for name, kind in FAILPOINTS.items() if kind == "undrop"),  # tests/crash/test_undrop_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind == "rollback"),  # tests/crash/test_rollback_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind == "redo"),  # tests/crash/test_redo_kills.py
        # tests/crash/test_backfill_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind in ("job", "add_column", "fill", "chunk", "prune")),
        *(name for name, kind in FAILPOINTS.items() if kind == "spool"),  # tests/crash/test_spool_kills.py
        # tests/crash/test_feed_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind in ("feed", "accept", "spool_quarantine")),
        *(name for name, kind in FAILPOINTS.items() if kind == "drop"),  # tests/crash/test_drop_kills.py
        "load.set_aside",  # tests/crash/test_load_aside_kills.py
        *HEAL_POINTS,
        *(name for name, kind in FAILPOINTS.items() if kind == "turn"),  # tests/crash/test_group_kills.py
        # tests/crash/test_index_kills.py, test_index_maintain_kills.py
        *(name for name, kind in FAILPOINTS.items() if kind == "index"),
        "abandon.fenced",
        "abandon.files_deleted",
        "expire.marked",
        "give_up.marked",  # tests/crash/test_give_up_kills.py
        "backup.copied",
        "backup.written",
        *(name for name in FAILPOINTS if name.startswith(("init.", "restore."))),
        "migrate.locked",  # tests/contract/test_catalog_lifecycle.py
        "migrate.migrated",
        "task.file_written",  # tests/spark
    }
    assert covered == set(FAILPOINTS)


def create_and_fill(place: Place, batch: str | None) -> str:
    """A table and its first rows in one version, like `load --create` does."""
    with place.open() as lake:
        with lake.transaction("first rows", batch=batch, batch_table="more") as tx:
            tx.create_table("more", EVENTS)
            tx.append("more", rows(7, 8))
        assert tx.commit is not None
        return tx.commit.outcome


@pytest.mark.mostly_sqlite(4)
@pytest.mark.parametrize("database", DATABASES)
@pytest.mark.parametrize("batch", [None, "monday"])
@pytest.mark.parametrize("point", WRITE_POINTS["transaction"])
def test_a_killed_maker_of_a_table_leaves_it_with_its_rows_or_not_at_all(
    new_place: Callable[[str], Place], database: str, point: str, batch: str | None
) -> None:
    place = new_place(database)
    run_child(prepare, place)
    assert run_killed(create_and_fill, place, batch, failpoint=point), f"{point} was never passed"
    outcome = expected_outcome("transaction", point, batch)
    for _ in range(2):
        with place.open() as lake:
            facts = check_lake(lake.catalog)
            assert sorted(facts.audit.values()) == ([outcome] if outcome else [])
            made = "more" in {table["table"] for table in lake.tables()}
            assert made is (outcome != "rolled_back")
            if made:
                assert ids(lake, "more") == [7, 8]
    if not made:
        assert run_child(create_and_fill, place, batch) == "committed"
    elif batch is not None:
        assert run_child(create_and_fill, place, batch) == "already_committed"
    with place.open() as lake:
        assert ids(lake, "more") == [7, 8]
        check_lake(lake.catalog)
