"""Making, opening, migrating and refusing catalogs, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, inspect, select, text, update

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import tables
from floodmark.catalog.database import SQLITE_NAME, Database
from floodmark.catalog.lifecycle import MIGRATION_LOCK, register, stored_format, upgrade
from floodmark.catalog.processes import this_process
from floodmark.storage import root_location
from floodmark.testing.children import Child, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows


@contextmanager
def database_of(place: Place) -> Iterator[Database]:
    database = Database(place.catalog or f"sqlite:///{place.path}/{SQLITE_NAME}")
    try:
        yield database
    finally:
        database.close()


def content(place: Place) -> dict[str, list[Any]]:
    """Every row of every table of the catalog database."""
    with database_of(place) as database, database.read() as tx:
        names = sorted(inspect(tx).get_table_names())
        return {name: sorted(map(tuple, tx.execute(text(f"SELECT * FROM {name}"))), key=repr) for name in names}


def files(place: Place) -> dict[str, str]:
    """Every file of the lake with its hash. SQLite's own lock files come and go with readers too."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(place.path).rglob("*"))
        if path.is_file() and not path.name.startswith((f"{SQLITE_NAME}-wal", f"{SQLITE_NAME}-shm"))
    }


def settle_wal(place: Place) -> None:
    """Move what is in SQLite's log into the database file, so that the file's bytes can be compared."""
    if place.catalog is None:
        connection = sqlite3.connect(os.path.join(place.path, SQLITE_NAME))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()


def set_format(place: Place, number: int) -> None:
    with database_of(place) as database, database.write() as tx:
        tx.execute(update(tables.lake).values(format=number))


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2), batch="first")


NOT_IN_FORMAT_1 = {"fm_pins", "fm_turns", "fm_processes", "fm_deletions"} | {
    *("fm_expired", "fm_upkeep", "fm_consumers", "fm_maintenance"),
    *("fm_sinks", "fm_sink_tables", "fm_units", "fm_parts", "fm_quarantine", "fm_senders"),
    *("fm_jobs", "fm_chunks", "fm_lines", "fm_merges", "fm_sink_lines"),
    *("fm_spools", "fm_spool_quarantine", "fm_daemon"),
    "fm_sink_notes",
}


def make_format_1(place: Place) -> None:
    """A genuine catalog of format 1 with a table and rows: its own tables, filled with the rows of a newer one."""
    donor = Place(place.path, None)
    prepare(donor)
    with database_of(donor) as database, database.read() as tx:
        stored = {
            table.name: [
                {name: value for name, value in row.items() if (table.name, name) != ("fm_sources", "position")}
                for row in tx.execute(select(table)).mappings()
            ]
            for table in tables.metadata.sorted_tables
            if table.name not in NOT_IN_FORMAT_1
        }
    for left in Path(place.path).glob(f"{SQLITE_NAME}*"):
        left.unlink()
    with database_of(place) as database, database.write() as tx:
        upgrade(tx, "f0001")
        register(tx, root_location(place.path), database.now_ms(tx))
        for table in tables.metadata.sorted_tables:
            if table.name in stored:
                tx.execute(table.delete())
            if stored.get(table.name):
                tx.execute(table.insert(), stored[table.name])
        tx.execute(update(tables.lake).values(format=1))
    with database_of(place) as database, database.read() as tx:
        assert not inspect(tx).has_table("fm_pins")


# ── making and opening ──


def test_a_new_lake_is_empty_and_in_the_newest_format(place: Place) -> None:
    with place.open(create=True) as lake:
        status = lake.status()
        assert (status["format"], status["version"], status["tables"]) == (tables.FORMAT, 0, 0)
        assert status["health"] == "fine"
        assert (lake.tables(), lake.history(), lake.audit()) == ([], [], [])
        check_lake(lake.catalog)


def test_making_a_lake_twice_keeps_the_first(place: Place) -> None:
    prepare(place)
    with place.open() as lake:
        first = lake.status()
    with place.open(create=True) as lake:
        assert lake.status() == first
        assert ids(lake) == [1, 2]
        check_lake(lake.catalog)


def make_lake(place: Place) -> str:
    with place.open(create=True) as lake:
        return str(lake.status()["incarnation"])


def test_two_processes_that_make_one_lake_make_it_once(place: Place) -> None:
    children = [Child(make_lake, place) for _ in range(3)]
    assert len({child.wait() for child in children}) == 1
    with place.open() as lake:
        check_lake(lake.catalog)


@pytest.mark.parametrize("read_only", [False, True])
def test_opening_where_there_is_no_lake_is_not_found_and_says_what_to_do(place: Place, read_only: bool) -> None:
    with pytest.raises(fm.NotFound) as caught:
        place.open(read_only=read_only)
    assert "floodmark init" in caught.value.advice
    assert root_location(place.path) in str(caught.value)
    assert not os.path.exists(place.path), "looking for a lake made something"


def test_an_empty_database_is_no_lake(place: Place) -> None:
    os.makedirs(place.path)
    with database_of(place) as database, database.write() as tx:
        tx.execute(text("CREATE TABLE other (id integer)"))
    with pytest.raises(fm.NotFound):
        place.open()


def test_a_read_only_lake_cannot_be_made(place: Place) -> None:
    with pytest.raises(fm.Invalid, match="read-only"):
        place.open(create=True, read_only=True)
    assert not os.path.exists(place.path)


def test_a_catalog_of_another_location_is_refused(place: Place, tmp_path: Path) -> None:
    prepare(place)
    elsewhere = tmp_path / "elsewhere"
    catalog = place.catalog or f"sqlite:///{place.path}/{SQLITE_NAME}"
    before = content(place)
    for options in ({}, {"create": True}, {"read_only": True}):
        with pytest.raises(fm.Corrupt) as caught:
            fm.open(elsewhere, catalog=catalog, **options)
        assert caught.value.facts["catalog_location"] == root_location(place.path)
        assert caught.value.facts["location"] == root_location(str(elsewhere))
        assert caught.value.advice
    assert content(place) == before


def test_a_lake_lives_at_a_path_with_spaces_and_letters_of_any_script(place: Place) -> None:
    name = "my lake/Überschwemmung 水位/a'b\"c;d/plus+and&more=1"
    there = Place(os.path.join(os.path.dirname(place.path), name), place.catalog)
    prepare(there)
    with there.open() as lake:
        lake.append("events", rows(3))
        assert ids(lake) == [1, 2, 3]
        check_lake(lake.catalog)
    with there.open(read_only=True) as lake:
        assert ids(lake) == [1, 2, 3]
        assert name in lake.show("events")["location"]


# ── older formats ──


def test_the_tables_after_a_migration_are_those_of_a_new_lake(place: Place, new_place: Callable[[str], Place]) -> None:
    make_format_1(place)
    place.open().close()
    fresh = new_place("postgresql" if place.catalog else "sqlite")
    prepare(fresh)

    def shape(where: Place) -> dict[str, Any]:
        with database_of(where) as database, database.read() as tx:
            found = inspect(tx)
            return {
                name: (
                    [(column["name"], str(column["type"]), column["nullable"]) for column in found.get_columns(name)],
                    found.get_pk_constraint(name)["constrained_columns"],
                    sorted(str(index["name"]) for index in found.get_indexes(name)),
                )
                for name in found.get_table_names()
            }

    assert shape(place) == shape(fresh)


def test_an_older_format_is_migrated_when_opened_for_writing(place: Place) -> None:
    make_format_1(place)
    with place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT
        assert ids(lake) == [1, 2]
        assert lake.append("events", rows(9), batch="first").outcome == "already_committed"
        lake.append("events", rows(3))
        assert ids(lake) == [1, 2, 3]
        assert lake.status()["pins"] == 0
        check_lake(lake.catalog)


def append_and_tell(place: Place, number: int, ready: str) -> list[str]:
    """Open, append one row, and tell which migration steps this process passed."""
    passed: list[str] = []
    failpoints.observer = passed.append
    Path(ready).touch()
    with place.open() as lake:
        lake.append("events", rows(number))
    return [name for name in passed if name.startswith("migrate.")]


def test_two_processes_that_migrate_at_once_migrate_once(place: Place, tmp_path: Path) -> None:
    make_format_1(place)
    ready = [tmp_path / "ready1", tmp_path / "ready2"]
    with database_of(place) as database:
        with database.write() as tx:
            if place.catalog is not None:
                tx.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
            children = [Child(append_and_tell, place, 3 + n, str(ready[n])) for n in range(2)]
            while not all(path.exists() for path in ready):
                time.sleep(0.01)
            time.sleep(1)  # both have seen the old format by now, and wait for this lock
        passed = sorted((child.wait() for child in children), key=len)
    assert passed == [["migrate.locked"], ["migrate.locked", "migrate.migrated"]]
    with place.open() as lake:
        assert ids(lake) == [1, 2, 3, 4]
        check_lake(lake.catalog)


def open_for_writing(place: Place) -> None:
    place.open().close()


@pytest.mark.parametrize("point", ["migrate.locked", "migrate.migrated"])
def test_a_migration_that_is_killed_leaves_the_old_format_and_runs_again(place: Place, point: str) -> None:
    make_format_1(place)
    before = content(place)
    assert run_killed(open_for_writing, place, failpoint=point)
    assert content(place) == before
    with place.open(read_only=True) as lake:
        assert lake.status()["format"] == 1
        assert ids(lake) == [1, 2]
    run_child(open_for_writing, place)
    with place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT
        assert ids(lake) == [1, 2]
        lake.append("events", rows(3))
        check_lake(lake.catalog)


def test_an_older_format_is_served_read_only_as_it_is(place: Place) -> None:
    make_format_1(place)
    before, files_before = content(place), files(place)
    with place.open(read_only=True) as lake:
        status = lake.status()
        assert (status["format"], status["pins"], status["health"]) == (1, 0, "fine")
        assert ids(lake) == ids(lake, version=2) == [1, 2]
        assert [commit.version for commit in lake.history()] == [2, 1]
        assert lake.tables()[0]["rows"] == 2
        assert lake.audit() == []
    assert content(place) == before
    assert files(place) == files_before


SPOOLS = (tables.spools, tables.spool_quarantine, tables.daemon)
# Columns that format 9 brought.
NEWER = {"fm_sink_tables": ("epoch_seen",), "fm_senders": ("unit",), "fm_units": ("passed",)}


def drop_newer(tx: Connection) -> None:
    for table, columns in NEWER.items():
        for column in columns:
            tx.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))


def take_out_format_9(tx: Connection) -> None:
    """What format 9 added to the catalog, so that an older one is as it was."""
    tables.sink_notes.drop(tx)
    tx.execute(text("ALTER TABLE fm_senders DROP COLUMN skipped"))


def test_a_lake_from_before_spools_has_none_and_no_daemon_until_it_is_migrated(place: Place) -> None:
    prepare(place)
    with database_of(place) as database, database.write() as tx:
        take_out_format_9(tx)
        for table in SPOOLS:
            table.drop(tx)
        drop_newer(tx)
        tx.execute(text("UPDATE fm_migrations SET version_num = 'f0007'"))
        tx.execute(update(tables.lake).values(format=7))
    with place.open(read_only=True) as lake:
        assert (lake.catalog.spools.all(), lake.catalog.spools.quarantine()) == ([], [])
        assert (lake.catalog.spools.get("none"), lake.catalog.daemon.seen()) == (None, None)
        assert (lake.status()["format"], lake.status()["health"], ids(lake)) == (7, "fine", [1, 2])
    with place.open() as lake:
        lake.catalog.daemon.take("http://127.0.0.1:1")
        seen = lake.catalog.daemon.seen()
        assert seen is not None
        assert seen["alive"]
        assert lake.catalog.spools.all() == []
        check_lake(lake.catalog)


def make_format_6(place: Place) -> None:
    """A catalog of format 6 with a table and rows: branches were what came next."""
    prepare(place)
    with place.open() as lake:
        lake.sinks.add("out", "files", tables="events", path=f"{place.path}-out")
    with database_of(place) as database, database.write() as tx:
        take_out_format_9(tx)
        for table in (tables.lines, tables.merges, tables.sink_lines, *SPOOLS):
            table.drop(tx)
        drop_newer(tx)
        tx.execute(text("UPDATE fm_migrations SET version_num = 'f0006'"))
        tx.execute(update(tables.lake).values(format=6))


def test_a_lake_from_before_branches_has_main_and_gets_branches_when_it_is_migrated(place: Place) -> None:
    make_format_6(place)
    with place.open(read_only=True) as lake:
        assert [branch.name for branch in lake.catalog.branches.list()] == ["main"]
        assert ids(lake) == ids(lake, version=2) == [1, 2]
        assert [commit.version for commit in lake.catalog.history.commits(branch="main")] == [2, 1]
        assert [(sink["branch"], sink["tables"][0]["lag_rows"]) for sink in lake.sinks.status()] == [("main", 2)]
        with pytest.raises(fm.NotFound):
            lake.catalog.branches.get("dev")
    with place.open() as lake:
        assert lake.sinks.about("out")["branch"] == "main"
        lake.catalog.branches.create("dev", actor="test")
        assert lake.append("events", rows(1, 2), batch="first", branch="dev").outcome == "already_committed"
        lake.append("events", rows(3), branch="dev")
        assert (ids(lake), ids(lake, version=3)) == ([1, 2], [1, 2, 3])
        check_lake(lake.catalog)


def test_nothing_is_migrated_under_a_writer_that_is_at_work(place: Place) -> None:
    make_format_1(place)
    me = this_process()
    with database_of(place) as database:
        row = {**asdict(me), "id": "01OLD", "lease_ms": 60_000}
        with database.write() as tx:
            tx.execute(insert(tables.processes).values(**row, beat_ms=database.now_ms(tx)))
        before = content(place)
        with pytest.raises(fm.Busy, match="older Floodmark") as caught:
            place.open()
        assert caught.value.facts["holder"] == f"{me.host}:{me.pid}"
        assert content(place) == before
        with database.write() as tx:
            tx.execute(update(tables.processes).values(started="another process of this pid"))
    with place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT
        check_lake(lake.catalog)


# ── newer formats ──


def test_a_writer_whose_lake_was_migrated_meanwhile_writes_nothing_more(place: Place) -> None:
    prepare(place)
    with place.open() as lake:
        lake.append("events", rows(3))
        set_format(place, tables.FORMAT + 1)
        before, files_before = content(place), files(place)
        with pytest.raises(fm.TooNew, match="meanwhile"):
            lake.append("events", rows(4))
        set_format(place, tables.FORMAT)
        assert ids(lake) == [1, 2, 3]
        after = content(place)
        assert {**after, "fm_processes": None} == {**before, "fm_lake": after["fm_lake"], "fm_processes": None}
        data = [
            {path: digest for path, digest in found.items() if SQLITE_NAME not in path}
            for found in (files(place), files_before)
        ]
        assert data[0] == data[1]


def test_a_newer_format_is_refused_with_advice_and_nothing_changes(place: Place) -> None:
    prepare(place)
    set_format(place, tables.FORMAT + 1)
    settle_wal(place)
    before, files_before = content(place), files(place)
    for options in ({}, {"read_only": True}, {"create": True}, {"heal": False}):
        with pytest.raises(fm.TooNew) as caught:
            place.open(**options)
        assert "Upgrade" in caught.value.advice
        assert caught.value.facts == {"format": tables.FORMAT + 1, "format_known": tables.FORMAT}
    assert content(place) == before
    assert files(place) == files_before


# ── read-only ──


def append_batch(place: Place) -> None:
    with place.open() as lake:
        lake.append("events", rows(7), batch="late")


def test_read_only_writes_nothing_and_heals_nothing(place: Place, tmp_path: Path) -> None:
    prepare(place)
    assert run_killed(append_batch, place, failpoint="append.sealed")
    settle_wal(place)
    before, files_before = content(place), files(place)
    with place.open(read_only=True) as lake:
        status = lake.status()
        assert len(status["pending"]) == 1
        assert "recovery pending" in status["health"]
        assert ids(lake) == [1, 2]
        lake.show("events")
        lake.schema("events")
        lake.history(table="events")
        lake.audit()
        lake.backup(tmp_path / "copy.backup")
    assert content(place) == before
    assert files(place) == files_before


def test_every_write_verb_is_refused_read_only(place: Place) -> None:
    prepare(place)
    settle_wal(place)
    before, files_before = content(place), files(place)
    with place.open(read_only=True) as lake:
        verbs: dict[str, Callable[[], Any]] = {
            "create_table": lambda: lake.create_table("more", EVENTS),
            "create_table again": lambda: lake.create_table("events", EVENTS, if_not_exists=True),
            "append": lambda: lake.append("events", rows(3)),
            "append again": lambda: lake.append("events", rows(1, 2), batch="first"),
            "transaction": lambda: lake.transaction().__enter__(),
            "recover": lambda: lake.recover(),
            "discard": lambda: lake.recover(discard=["x"]),
            "maintain": lambda: lake.maintain.run(),
            "compact": lambda: lake.maintain.compact("events"),
            "retain": lambda: lake.maintain.retain(),
            "expire": lambda: lake.maintain.expire(keep="0s"),
            "sweep": lambda: lake.maintain.sweep(grace="0s", deep=True),
            "policy": lambda: lake.maintain.set_policy("events", None),
        }
        for name, verb in verbs.items():
            with pytest.raises(fm.Invalid, match="read-only"):
                verb()
            assert lake.status()["version"] == 2, name
        # Plans are made without writing anything.
        lake.maintain.run(keep="0s", grace="0s", dry_run=True)
        lake.maintain.sweep(grace="0s", deep=True, dry_run=True)
    assert content(place) == before
    assert files(place) == files_before


def test_read_only_the_database_itself_refuses_writes(place: Place) -> None:
    prepare(place)
    before = content(place)
    with place.open(read_only=True) as lake:
        with pytest.raises(Exception, match=r"(?i)read.?only"), lake.catalog.database.write() as tx:
            tx.execute(update(tables.lake).values(version=99))
        with pytest.raises(Exception, match=r"(?i)read.?only"):
            lake.catalog.expiry.expire(2**60)
    assert content(place) == before


def test_read_only_resolve_tells_what_became_of_an_operation(place: Place) -> None:
    prepare(place)
    assert run_killed(append_batch, place, failpoint="append.sealed")
    with place.open(read_only=True) as lake:
        published = lake.history(limit=1)[0]
        assert published.operation is not None
        assert lake.resolve(published.operation) == published
        assert lake.resolve("01ARZ3NDEKTSV4RRFFQ69G5FAV") is None
        with pytest.raises(fm.Incomplete):
            lake.resolve(lake.status()["pending"][0])
    with place.open(read_only=True) as lake:
        assert len(lake.status()["pending"]) == 1


def test_a_lake_in_a_folder_that_cannot_be_written_is_read(new_place: Callable[[str], Place]) -> None:
    place = new_place("sqlite")
    prepare(place)
    settle_wal(place)
    os.chmod(place.path, 0o500)
    try:
        with place.open(read_only=True) as lake:
            assert ids(lake) == [1, 2]
    finally:
        os.chmod(place.path, 0o700)


def test_the_format_is_none_where_there_is_no_catalog(place: Place) -> None:
    os.makedirs(place.path)
    with database_of(place) as database:
        assert stored_format(database) is None
