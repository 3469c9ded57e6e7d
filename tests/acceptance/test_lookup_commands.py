"""`get` and `lookup`: what they print, how they end, and that they start no JVM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import floodmark as fm
from tests.acceptance.test_scan_command import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup")
    with fm.open(folder / "lake", create=True) as lake:
        lake.create_table("users", "id long, name string, at timestamp", key=["id"])
        lake.create_table("lines", "n long, id string, tags array<string>, v decimal(5,2)", key=["id", "n"])
        lake.append(
            "users", [{"id": n, "name": f"name {n % 3}", "at": f"2026-11-{n + 1:02}T00:00:00Z"} for n in range(9)]
        )
        lake.append("lines", [{"id": "a=b", "n": 1, "tags": ["x", "y"], "v": "1.50"}, {"id": "c", "n": 2}])
        lake.merge("users", [{"id": 1, "name": "new"}], partial=True)
    return folder


def test_get_prints_the_rows_of_its_keys(folder: Path) -> None:
    shown, _ = run(folder, "get", "users", "1")
    assert [line.split() for line in shown.splitlines()] == [
        ["id", "name", "at"],
        ["1", "new", "2026-11-02T00:00:00+00:00"],
    ]
    found = json.loads(run(folder, "get", "users", "4", "0", "--json")[0])
    assert found == {
        "table": "users",
        "version": 5,
        "rows": [
            {"id": 4, "name": "name 1", "at": "2026-11-05T00:00:00+00:00"},
            {"id": 0, "name": "name 0", "at": "2026-11-01T00:00:00+00:00"},
        ],
        "not_found": [],
        "next": None,
    }
    # The key's columns have the table's order: n, id.
    assert json.loads(run(folder, "get", "lines", "1", "a=b", "--json")[0])["rows"] == [
        {"n": 1, "id": "a=b", "tags": ["x", "y"], "v": "1.50"}
    ]
    assert json.loads(run(folder, "get", "users", "1", "--version", "4", "--json")[0])["rows"][0]["name"] == "name 1"


def test_get_ends_with_1_if_a_key_has_no_row(folder: Path) -> None:
    shown, problem = run(folder, "get", "users", "77", code=1)
    assert shown == ""
    assert problem == "not found in users at version 5: 77\n"
    found = json.loads(run(folder, "get", "users", "3", "77", "--json", code=1)[0])
    assert [row["id"] for row in found["rows"]] == [3]
    assert found["not_found"] == [["77"]]
    for wrong in (("users", "x"), ("lines", "1"), ("nothing", "1")):
        _, problem = run(folder, "get", *wrong, code=2)
        assert problem.startswith("floodmark: ")


def test_lookup_prints_pages(folder: Path) -> None:
    ask = ("lookup", "users", "name=name 0", "name=name 2", "--columns", "id", "--order", "at desc", "--limit", "4")
    first = json.loads(run(folder, *ask, "--json")[0])
    assert [row["id"] for row in first["rows"]] == [8, 6, 5, 3]
    _, note = run(folder, *ask)
    assert first["next"] in note
    second = json.loads(run(folder, *ask, "--after", first["next"], "--json")[0])
    assert [row["id"] for row in second["rows"]] == [2, 0]
    assert second["next"] is None
    assert run(folder, "lookup", "users", "name=nobody")[0] == "no rows\n"
    assert json.loads(run(folder, "lookup", "lines", "tags=y", "--json")[0])["rows"][0]["n"] == 1
    assert json.loads(run(folder, "lookup", "lines", "--null", "tags", "--json")[0])["rows"][0]["id"] == "c"
    assert json.loads(run(folder, "lookup", "lines", "id=a=b", "v=1.5", "--json")[0])["rows"][0]["n"] == 1
    for wrong in (("name",), (), ("surname=1",), ("id=1", "--after", "x")):
        run(folder, "lookup", "users", *wrong, code=2)


def test_explain_shows_what_is_used(folder: Path) -> None:
    used = json.loads(run(folder, "get", "users", "1", "--explain", "--json")[0])
    assert (used["index"], used["rows"], used["files_scanned"]) == ("key (id)", 1, 0)
    shown, _ = run(folder, "lookup", "users", "name=new", "--explain")
    assert shown.splitlines()[0] == "lookup in users at version 5: 1 row"
