"""`repair --apply` in JSON: it says whether operations still wait for a table that is not repaired."""

from __future__ import annotations

from pathlib import Path

import floodmark as fm
from floodmark.testing.children import preload, run_child, run_killed
from tests.acceptance.test_sink_commands import answer
from tests.conftest import Place
from tests.foreign_writer import by_another, theirs

preload("floodmark.cli.main", "floodmark.recover.repair")


def make(folder: str) -> None:
    with fm.open(folder, create=True, actor="test") as lake:
        for table in ("people", "events"):
            lake.create_table(table, "id long not null, name string")


def append_a_batch(folder: str) -> None:
    with fm.open(folder) as lake:
        lake.append("people", [{"id": 7, "name": "g"}], batch="b")


def test_the_answer_says_that_healing_still_refuses(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    run_child(make, folder)
    assert run_killed(append_a_batch, folder, failpoint="append.sealed")
    for table in ("people", "events"):
        by_another(Place(folder, None), table, lambda one: one.append(theirs(k8="h")))
    first = answer(tmp_path, "repair", "events", "--apply")
    assert first["outcome"] == "taken_in"
    assert "people" in first["healing"]
    second = answer(tmp_path, "repair", "people", "--apply")
    assert (second["outcome"], second["healing"]) == ("taken_in", None)
