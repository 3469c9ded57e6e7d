"""Lakes and backups from before the first release: refused by name, for reading too, and left as they are.

Each catalog is a real one: what the migrations of its format made, kept as SQL in tests/data/formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.catalog import tables
from floodmark.catalog.database import SQLITE_NAME
from floodmark.errors import FloodmarkError
from floodmark.storage import root_location
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, ids, rows
from tests.contract.test_catalog_lifecycle import content, database_of, set_format, settle_wal

FORMATS = Path(__file__).parent.parent / "data" / "formats"
OLDER = tuple(range(1, 10))
EVERY_OLDER = pytest.mark.parametrize("number", OLDER)


def make_older(place: Place, number: int) -> None:
    """The catalog that a Floodmark of this format made, beside a file of one of its tables."""
    kept = Path(place.path) / "tables" / "events.0a1b2c3d" / "data" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("rows")
    script = (FORMATS / f"f{number:04d}.sql").read_text().replace("@LOCATION@", root_location(place.path))
    if place.catalog is None:
        with closing(sqlite3.connect(os.path.join(place.path, SQLITE_NAME))) as connection:
            connection.execute("PRAGMA journal_mode=WAL")  # as every Floodmark left it
            connection.executescript(script)
        return
    with database_of(place) as database, database.write() as tx:
        for statement in script.split(";\n"):
            # The transaction is this one; triggers are written another way there, and no matter here.
            if statement.startswith(("CREATE TABLE", "CREATE INDEX", "CREATE UNIQUE INDEX", "INSERT")):
                tx.exec_driver_sql(statement)


def everything(place: Place) -> dict[str, str]:
    """Every folder and file of the lake, files by their bytes; without SQLite's lock files, which readers make too."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "a folder"
        for path in sorted(Path(place.path).rglob("*"))
        if not path.name.startswith((f"{SQLITE_NAME}-wal", f"{SQLITE_NAME}-shm"))
    }


def check_refused(error: FloodmarkError, number: int) -> None:
    assert "from before the first release" in error.message
    assert (error.facts["format"], error.facts["format_known"]) == (number, tables.FORMAT)
    for word in ("the Floodmark that made it", "export", "new lake", "nothing was changed"):
        assert word in error.advice
    assert (error.kind, error.exit_code) == ("TooOld", 5)


def test_there_is_a_catalog_of_every_format_before_the_first_release() -> None:
    assert tuple(range(1, tables.OLDEST_FORMAT)) == OLDER
    assert sorted(path.name for path in FORMATS.iterdir()) == [f"f{number:04d}.sql" for number in OLDER]


@pytest.mark.whole
@EVERY_OLDER
def test_an_older_lake_is_refused_and_left_as_it_is(place: Place, number: int) -> None:
    make_older(place, number)
    settle_wal(place)
    before, there = content(place), everything(place)
    assert [row[1] for row in before["fm_lake"]] == [number]
    assert len(before) == (FORMATS / f"f{number:04d}.sql").read_text().count("CREATE TABLE")
    for options in ({}, {"read_only": True}, {"create": True}, {"recover": False}):
        with pytest.raises(fm.TooOld) as caught:
            place.open(**options)
        check_refused(caught.value, number)
    assert everything(place) == there
    assert content(place) == before


def make_backup(place: Place, file: Path) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
        lake.backup(file)


def with_format(whole: bytes, number: int) -> bytes:
    """The backup as one of this format would be: whole, with its own hash."""
    header, *lines = whole.splitlines(keepends=True)[:-1]
    lines = [json.dumps({**json.loads(header), "format": number}).encode() + b"\n", *lines]
    end = {"rows": len(lines) - 1, "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
    return b"".join([*lines, json.dumps(end).encode() + b"\n"])


def names_of(place: Place) -> list[str]:
    """The tables in the catalog database of a place; none if there is not even a file."""
    if place.catalog is None and not os.path.exists(os.path.join(place.path, SQLITE_NAME)):
        return []
    return sorted(content(place))


def test_an_older_backup_is_refused_and_nothing_is_made(
    place: Place, new_place: Callable[[str], Place], tmp_path: Path
) -> None:
    file = tmp_path / "lake.backup"
    make_backup(place, file)
    lost = Place(str(tmp_path / "nowhere" / "lake"), new_place("postgresql").catalog if place.catalog else None)
    # Of the lake that is to be restored, so that nothing but its format is in the way.
    moved = file.read_bytes().replace(root_location(place.path).encode(), root_location(lost.path).encode())
    for number in OLDER:
        before = with_format(moved, number)
        file.write_bytes(before)
        with pytest.raises(fm.TooOld) as caught:
            fm.restore(file, lost.path, catalog=lost.catalog)
        check_refused(caught.value, number)
        assert caught.value.facts["source"] == root_location(str(file))
        assert not (tmp_path / "nowhere").exists()
        assert (names_of(lost), file.read_bytes()) == ([], before)
    # The same backup, of the format of today, is restored there.
    file.write_bytes(with_format(moved, tables.FORMAT))
    assert fm.restore(file, lost.path, catalog=lost.catalog)["format"] == tables.FORMAT


# What each migration adds.
ADDED = {11: ("fm_waiting", "fm_led"), 12: ("fm_segments", "fm_indexes")}


def back_to(place: Place, number: int) -> None:
    """The lake as a Floodmark of this format left it: without what later migrations add."""
    with database_of(place) as database, database.write() as tx:
        for table in (name for made, names in ADDED.items() if made > number for name in names):
            tx.exec_driver_sql(f"DROP TABLE {table}")
        tx.exec_driver_sql(f"UPDATE fm_migrations SET version_num = 'f{number:04d}'")
    set_format(place, number)


@pytest.mark.whole
@pytest.mark.parametrize("number", [10, 11])
def test_a_lake_of_an_older_format_is_read_as_it_is_and_migrated_when_it_is_written_to(
    place: Place, number: int
) -> None:
    with place.open(create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1), batch="first")
        lake.create_table("people", EVENTS, key=["id"])
        lake.append("people", rows(1, 2))
        # Nor has it segments.
        lake.catalog.storage.delete_many(sorted(lake.catalog.indexes.all_locations()))
    back_to(place, number)
    settle_wal(place)
    before = content(place)
    with place.open(read_only=True) as lake:
        assert (ids(lake), lake.status()["format"], lake.status()["waiting"]) == ([1], number, [])
        assert ids(lake, "people") == [1, 2]
    assert content(place) == before
    with place.open() as lake:
        assert lake.append("events", rows(1), batch="first").outcome == "already_committed"
        lake.append("events", rows(2))
        assert (ids(lake), lake.status()["format"]) == ([1, 2], tables.FORMAT)
        # No segment covers the older rows: they are looked at all the same.
        with pytest.raises(fm.Invalid):
            lake.append("people", rows(2))
        assert lake.merge("people", [{"id": 1, "name": "new"}, {"id": 3, "name": "new"}]).tables[0].rows_updated == 1
        assert ids(lake, "people") == [1, 2, 3]
        check_lake(lake.catalog)


def opened(place: Place, **options: Any) -> str:
    """How a lake opens: its ids, or the kind of the error."""
    try:
        with place.open(**options) as lake:
            return str(ids(lake))
    except FloodmarkError as error:
        return error.kind


@pytest.mark.parametrize("read_only", [False, True])
def test_the_first_format_that_opens_is_10_and_13_is_too_new(place: Place, tmp_path: Path, read_only: bool) -> None:
    make_backup(place, tmp_path / "lake.backup")
    found = {}
    back_to(place, 10)
    for number in (0, 9, 10, 13):
        set_format(place, number)
        found[number] = opened(place, read_only=read_only)
    assert found == {0: "TooOld", 9: "TooOld", 10: "[1, 2]", 13: "TooNew"}
