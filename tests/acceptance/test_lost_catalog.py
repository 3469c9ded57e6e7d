"""A catalog that is gone beside the files of its lake: `init` makes no empty lake over them; each command says what to
do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.catalog.database import SQLITE_NAME
from floodmark.cli.main import main
from floodmark.testing.postgres import PostgresServer
from tests.conftest import EVENTS, ids, rows


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """A lake without its catalog, and a backup of that catalog."""
    folder = tmp_path / "lake"
    with fm.open(folder, create=True) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
        lake.backup(tmp_path / "backup")
    for name in list(os.listdir(folder)):
        if name.startswith(SQLITE_NAME):
            os.unlink(folder / name)
    return folder


def test_init_refuses_names_what_it_found_and_points_to_restore(lost: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = everything(lost)
    with pytest.raises(SystemExit) as ended:
        main(["--lake", str(lost), "init"])
    assert ended.value.code == 5
    said = capfd.readouterr().err
    assert "events" in said
    assert "floodmark restore" in said
    assert everything(lost) == before, "nothing is made or changed, also no empty database"


@pytest.mark.parametrize("verb", [("status",), ("doctor",), ("load", "events", "rows.jsonl"), ("run", "--check")])
def test_commands_say_the_same(lost: Path, verb: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    before = everything(lost)
    (lost.parent / "rows.jsonl").write_text('{"id": 3}\n')
    given = [str(lost.parent / one) if one == "rows.jsonl" else one for one in verb]
    with pytest.raises(SystemExit) as ended:
        main(["--lake", str(lost), *given])
    assert ended.value.code == (1 if verb == ("doctor",) else 5)  # its own answer: a check failed
    streams = capfd.readouterr()
    said = " ".join((streams.err + streams.out).split())
    assert "found=events" in said
    assert "floodmark restore" in said
    assert "floodmark init" not in said
    assert everything(lost) == before


@pytest.mark.parametrize("read_only", [True, False])
def test_a_database_without_a_lake_beside_its_files_is_a_lost_one(lost: Path, read_only: bool) -> None:
    (lost / SQLITE_NAME).touch()
    with pytest.raises(fm.Corrupt, match="but no catalog for them"):
        fm.open(lost, read_only=read_only)


def test_where_no_files_are_there_is_no_lake(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(fm.NotFound, match="there is no lake here"):
            fm.open(place)


def test_open_with_create_refuses_too(lost: Path) -> None:
    with pytest.raises(fm.Corrupt, match="but no catalog for them"):
        fm.open(lost, create=True)


def test_a_wrong_catalog_url_is_not_taken_for_a_new_lake(tmp_path: Path, postgres: PostgresServer) -> None:
    right, wrong = (postgres.url(postgres.new_database()) for _ in range(2))
    with fm.open(tmp_path / "lake", catalog=right, create=True) as lake:
        lake.create_table("events", EVENTS)
    with pytest.raises(fm.Corrupt, match="events"):
        fm.open(tmp_path / "lake", catalog=wrong, create=True)
    with fm.open(tmp_path / "lake", catalog=right, create=True) as lake:
        assert [table["table"] for table in lake.tables()] == ["events"]


def test_the_advice_leads_out(lost: Path) -> None:
    fm.restore(lost.parent / "backup", lost)
    with fm.open(lost, create=True) as lake:
        assert ids(lake) == [1, 2]


def test_folders_without_a_file_are_a_place_for_a_lake(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "operations").mkdir()
    with fm.open(tmp_path, create=True) as lake:
        assert lake.tables() == []
