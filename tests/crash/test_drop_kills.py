"""Kill the loading of a drop folder at every step: every file comes in once, or lies aside once, and none is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from floodmark import failpoints
from floodmark.ingest.drop import Drop
from floodmark.testing.children import preload, run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, EVENTS, Place, ids

preload("floodmark.ingest.drop")

FILES = {"a.jsonl": '{"id": 1}\n{"id": 2}\n', "bad.csv": "id,name\nx,y\n", "c.csv": "id,name\n3,z\n"}
DONE = [".failed/bad.csv", ".failed/bad.csv.reason.json", ".loaded/a.jsonl", ".loaded/c.csv"]
POINTS = [
    *(f"drop.{step}" for step in failpoints.OTHER["drop"]),
    *("drop.found:2", "drop.found:3", "drop.loaded:2", "drop.moved:2"),
    *(f"append.{step}" for step in ("begun", "staged", "sealed", "moved", "published")),
]


def prepare(place: Place, folder: Path) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", EVENTS)
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)


def load(place: Place, folder: Path) -> None:
    with place.open() as lake:
        Drop(lake, "src", folder, "events", settle_s=0.0).run()


def passed(place: Place, folder: Path) -> set[str]:
    found: set[str] = set()
    failpoints.observer = found.add
    load(place, folder)
    return {point for point in found if point.startswith("drop.")}


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check(place: Place, folder: Path) -> None:
    with place.open() as lake:
        assert ids(lake) == [1, 2, 3]
        check_lake(lake.catalog)
    assert left(folder) == DONE
    assert (folder / ".failed" / "bad.csv").read_text() == FILES["bad.csv"]


@pytest.mark.whole
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_load_is_finished_by_the_next_run(
    new_place: Callable[[str], Place], tmp_path: Path, point: str
) -> None:
    place, folder = new_place(DATABASES[0]), tmp_path / "in"
    run_child(prepare, place, folder)
    assert run_killed(load, place, folder, failpoint=point), f"{point} was never passed"
    # Every file is somewhere, as a whole.
    names = {Path(name).name for name in left(folder)}
    assert set(FILES) <= names
    run_child(load, place, folder)
    check(place, folder)


@pytest.mark.parametrize("point", ["drop.loaded", "append.sealed"])
def test_a_killed_load_is_finished_on_a_shared_database_too(
    new_place: Callable[[str], Place], tmp_path: Path, point: str
) -> None:
    place, folder = new_place("postgresql"), tmp_path / "in"
    prepare(place, folder)
    assert run_killed(load, place, folder, failpoint=point)
    load(place, folder)
    check(place, folder)


def test_every_failpoint_of_a_drop_folder_is_killed_here(new_place: Callable[[str], Place], tmp_path: Path) -> None:
    place, folder = new_place(DATABASES[0]), tmp_path / "in"
    prepare(place, folder)
    known = {name for name, kind in failpoints.FAILPOINTS.items() if kind == "drop"}
    assert run_child(passed, place, folder) == known
