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
from sqlalchemy import UniqueConstraint, insert, inspect, text, update

import floodmark as fm
from floodmark import failpoints
from floodmark.catalog import lifecycle, tables
from floodmark.catalog.database import SQLITE_NAME, Database
from floodmark.catalog.leases import this_process
from floodmark.catalog.lifecycle import MIGRATION_LOCK, stored_format
from floodmark.storage import root_location
from floodmark.testing.children import Child, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.later_floodmark import later_floodmark, later_scripts


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


# ── the tables ──


def test_the_tables_of_a_new_lake_are_those_that_the_code_names(place: Place) -> None:
    """What a migration makes, and what tables.py says of it: written twice, since a migration is never changed."""
    prepare(place)
    with database_of(place) as database, database.read() as tx:
        found = inspect(tx)
        assert set(found.get_table_names()) == {*tables.metadata.tables, "fm_migrations"}
        for name, table in tables.metadata.tables.items():
            dialect = database.engine.dialect
            wanted = [(one.name, one.type.compile(dialect), one.nullable) for one in table.columns]
            there = found.get_columns(name)
            assert [(one["name"], one["type"].compile(dialect), one["nullable"]) for one in there] == wanted, name
            key = [column.name for column in table.primary_key]
            assert found.get_pk_constraint(name)["constrained_columns"] == key, name
            once = [one for one in table.constraints if isinstance(one, UniqueConstraint)]
            unique = sorted(one["column_names"] for one in found.get_unique_constraints(name))
            assert unique == sorted([column.name for column in one.columns] for one in once), name
            indexes = {str(one["name"]): one["column_names"] for one in found.get_indexes(name)}
            named = {str(one.name): [column.name for column in one.columns] for one in table.indexes}
            assert {index: indexes.get(index) for index in named} == named, name


def test_the_next_lake_of_a_process_has_the_same_tables(
    place: Place, new_place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alembic makes the first one, and its statements the others: indexes, triggers and the stamp as well."""
    monkeypatch.setattr(lifecycle, "_STATEMENTS", {})
    prepare(place)
    next_one = new_place("postgresql" if place.catalog else "sqlite")
    monkeypatch.setattr(lifecycle, "upgrade", None)
    prepare(next_one)

    def shape(where: Place) -> list[list[Any]]:
        asked = (
            ("SELECT type, name, tbl_name, sql FROM sqlite_master",)
            if where.catalog is None
            else (
                "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'",
                "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal",
                "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
                "WHERE connamespace = 'public'::regnamespace",
                "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
                "SELECT table_name, ordinal_position, column_name, data_type, character_maximum_length, is_nullable, "
                "column_default FROM information_schema.columns WHERE table_schema = 'public'",
            )
        )
        with database_of(where) as database, database.read() as tx:
            found = [sorted(map(tuple, tx.execute(text(one))), key=repr) for one in asked]
            return [*found, list(map(tuple, tx.execute(text("SELECT * FROM fm_migrations"))))]

    assert shape(next_one) == shape(place)
    assert all(shape(place))


# ── older formats ──


@pytest.fixture
def scripts(tmp_path: Path) -> str:
    """Of a later Floodmark, which has one migration more: to it, the lakes of these tests are older ones."""
    return later_scripts(tmp_path / "scripts")


def test_the_tables_after_a_migration_are_those_of_a_new_lake(
    place: Place, new_place: Callable[[str], Place], scripts: str
) -> None:
    prepare(place)
    fresh = new_place("postgresql" if place.catalog else "sqlite")
    with later_floodmark(scripts):
        place.open().close()
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
    assert "fm_later" in shape(place)


def test_an_older_format_is_migrated_when_opened_for_writing(place: Place, scripts: str) -> None:
    prepare(place)
    with later_floodmark(scripts), place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT
        assert ids(lake) == [1, 2]
        assert lake.append("events", rows(9), batch="first").outcome == "already_committed"
        lake.append("events", rows(3))
        assert ids(lake) == [1, 2, 3]
        assert lake.status()["pins"] == 0
        check_lake(lake.catalog)
    # From what was there before the open.
    assert [rows_total for _, rows_total in content(place)["fm_later"]] == [2]


def append_and_tell(place: Place, number: int, ready: str, scripts: str) -> list[str]:
    """Open, append one row, and tell which migration steps this process passed."""
    passed: list[str] = []
    failpoints.observer = passed.append
    Path(ready).touch()
    with later_floodmark(scripts), place.open() as lake:
        lake.append("events", rows(number))
    return [name for name in passed if name.startswith("migrate.")]


def test_two_processes_that_migrate_at_once_migrate_once(place: Place, tmp_path: Path, scripts: str) -> None:
    prepare(place)
    ready = [tmp_path / "ready1", tmp_path / "ready2"]
    with database_of(place) as database:
        with database.write() as tx:
            if place.catalog is not None:
                tx.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
            children = [Child(append_and_tell, place, 3 + n, str(ready[n]), scripts) for n in range(2)]
            while not all(path.exists() for path in ready):
                time.sleep(0.01)
            time.sleep(1)  # both have seen the old format by now, and wait for this lock
        passed = sorted((child.wait() for child in children), key=len)
    assert passed == [["migrate.locked"], ["migrate.locked", "migrate.migrated"]]
    with later_floodmark(scripts), place.open() as lake:
        assert ids(lake) == [1, 2, 3, 4]
        check_lake(lake.catalog)


def open_for_writing(place: Place, scripts: str) -> None:
    with later_floodmark(scripts):
        place.open().close()


@pytest.mark.parametrize("point", ["migrate.locked", "migrate.migrated"])
def test_a_migration_that_is_killed_leaves_the_old_format_and_runs_again(
    place: Place, point: str, scripts: str
) -> None:
    prepare(place)
    before, older = content(place), tables.FORMAT
    assert run_killed(open_for_writing, place, scripts, failpoint=point)
    assert content(place) == before
    with later_floodmark(scripts), place.open(read_only=True) as lake:
        assert lake.status()["format"] == older
        assert ids(lake) == [1, 2]
    run_child(open_for_writing, place, scripts)
    with later_floodmark(scripts), place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT == older + 1
        assert ids(lake) == [1, 2]
        lake.append("events", rows(3))
        check_lake(lake.catalog)


def test_an_older_format_is_served_read_only_as_it_is(place: Place, scripts: str) -> None:
    prepare(place)
    settle_wal(place)
    before, files_before, older = content(place), files(place), tables.FORMAT
    with later_floodmark(scripts), place.open(read_only=True) as lake:
        status = lake.status()
        assert (status["format"], status["pins"], status["health"]) == (older, 0, "fine")
        assert ids(lake) == ids(lake, version=2) == [1, 2]
        assert [commit.version for commit in lake.history()] == [2, 1]
        assert lake.tables()[0]["rows"] == 2
        assert lake.audit() == []
    assert content(place) == before
    assert files(place) == files_before


def test_nothing_is_migrated_under_a_writer_that_is_at_work(place: Place, scripts: str) -> None:
    prepare(place)
    me = this_process()
    with database_of(place) as database:
        row = {**asdict(me), "id": "01OLD", "lease_ms": 60_000}
        with database.write() as tx:
            tx.execute(insert(tables.processes).values(**row, beat_ms=database.now_ms(tx)))
        before = content(place)
        with later_floodmark(scripts), pytest.raises(fm.Busy, match="older Floodmark") as caught:
            place.open()
        assert caught.value.facts["holder"] == f"{me.host}:{me.pid}"
        assert content(place) == before
        with database.write() as tx:
            tx.execute(update(tables.processes).values(started="another process of this pid"))
    with later_floodmark(scripts), place.open() as lake:
        assert lake.status()["format"] == tables.FORMAT
        check_lake(lake.catalog)


def test_a_backup_of_an_older_format_is_restored_as_it_is_and_migrated_when_opened_for_writing(
    place: Place, new_place: Callable[[str], Place], tmp_path: Path, scripts: str
) -> None:
    prepare(place)
    older = tables.FORMAT
    with place.open() as lake:
        lake.backup(tmp_path / "older.backup")
    for left in Path(place.path).glob(f"{SQLITE_NAME}*"):
        left.unlink()
    lost = Place(place.path, new_place("postgresql").catalog if place.catalog else None)
    with later_floodmark(scripts):
        assert fm.restore(tmp_path / "older.backup", lost.path, catalog=lost.catalog)["format"] == older
        with lost.open(read_only=True) as lake:
            assert (lake.status()["format"], ids(lake)) == (older, [1, 2])
        with lost.open() as lake:
            assert (lake.status()["format"], ids(lake)) == (tables.FORMAT, [1, 2])
            assert lake.append("events", rows(9), batch="first").outcome == "already_committed"
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
    for options in ({}, {"read_only": True}, {"create": True}, {"recover": False}):
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
