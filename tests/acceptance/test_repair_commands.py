"""`repair --apply` in JSON: it says whether operations still wait for a table that is not repaired."""

from __future__ import annotations

from pathlib import Path

import floodmark as fm
from floodmark.repair.examine import examine_lake
from floodmark.testing.children import preload, run_child, run_killed
from tests.acceptance.test_sink_commands import answer, command
from tests.conftest import Place
from tests.foreign_writer import by_another, theirs

preload("floodmark.cli.main", "floodmark.repair.repair")


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
    assert first["outcome"] == "accepted"
    assert "people" in first["recovery"]
    second = answer(tmp_path, "repair", "people", "--apply")
    assert (second["outcome"], second["recovery"]) == ("accepted", None)


def test_earlier_option_names_still_work_and_are_not_shown(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    run_child(make, folder)
    for table, option, outcome in (("people", "--take-in", "accepted"), ("events", "--put-back", "reverted")):
        by_another(Place(folder, None), table, lambda one: one.append(theirs(k8="h")))
        assert answer(tmp_path, "repair", table, option, "--apply")["outcome"] == outcome
    assert "--take-in" not in command(tmp_path, "repair", "--help").stdout


def overwrite_often(folder: str) -> None:
    with fm.open(folder) as lake:
        for number in (1, 2, 3):
            lake.overwrite("people", [{"id": number, "name": "x"}])
        (gone,) = lake.catalog.files.data_files(lake.catalog.history.tables_at(4)["people"])
        lake.catalog.storage.delete(gone)


def test_doctor_and_repair_name_versions_that_cannot_be_read_and_give_them_up(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    run_child(make, folder)
    run_child(overwrite_often, folder)
    for flags in ([], ["--deep"]):
        checks = answer(tmp_path, "doctor", *flags, code=1)["checks"]
        (failed,) = (one for one in checks if one["check"] == "versions")
        assert failed["result"] == "FAILED"
        assert "version(s) 4 cannot be read" in failed["detail"]
    (listed,) = answer(tmp_path, "repair")["repairs"]
    assert (listed["table"], listed["outcome"], listed["unreadable"]) == ("people", "unclear", [4])
    assert answer(tmp_path, "repair", "--apply", code=1)["outcome"] == "unclear"
    assert answer(tmp_path, "repair", "--give-up")["versions"] == [4]
    done = answer(tmp_path, "repair", "--give-up", "--apply")
    assert (done["outcome"], done["versions"], done["held"]) == ("given_up", [4], [])
    with fm.open(folder) as lake:
        assert all(check.passed for check in examine_lake(lake.catalog, deep=True))
    assert answer(tmp_path, "repair", "--give-up", "--apply")["outcome"] == "nothing_to_do"
