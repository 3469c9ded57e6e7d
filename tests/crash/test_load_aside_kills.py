"""A load that sets bad rows aside is killed when they are in their file: nothing is loaded, and the next does all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from floodmark.cli.main import main
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import Place, ids

pytestmark = pytest.mark.mostly_sqlite


def prepare(place: Place) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")


def load(place: Place, file: str, batch: str) -> None:
    catalog = () if place.catalog is None else ("--catalog", place.catalog)
    os.environ["FLOODMARK_LAKE"] = place.path
    with pytest.raises(SystemExit) as ended:
        main([*catalog, "load", "events", file, "--bad-rows", "set-aside", "--batch", batch])
    assert not ended.value.code


@pytest.mark.parametrize("point", ["load.set_aside", "append.staged", "append.published"])
def test_bad_rows_are_in_their_file_before_the_others_are_in_the_table(
    place: Place, tmp_path: Path, point: str
) -> None:
    file, aside = tmp_path / "rows.csv", tmp_path / "_bad-rows/rows.csv"
    file.write_text("id,name\n1,a\nx,b\n3,c\n")
    run_child(prepare, place)
    assert run_killed(load, place, str(file), "one", failpoint=point)
    assert aside.read_text() == "id,name\nx,b\n"
    with place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == ([1, 3] if point == "append.published" else [])
    run_child(load, place, str(file), "one")
    with place.open() as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [1, 3]
    assert aside.read_text() == "id,name\nx,b\n"
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("rows*")) == [
        "_bad-rows/rows.csv",
        "_bad-rows/rows.reasons.jsonl",
        "rows.csv",
    ]
