"""`floodmark index`, and the other commands that show indexes, as a person meets them: text, JSON and exit codes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.children import preload
from tests.acceptance.test_sink_commands import answer, command

preload("floodmark.cli.main", "floodmark.schema.apply", "floodmark.schema.indexes")

SHAPE = """
[tables.events]
index = ["customer", ["country", "n"]]
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "shape.toml").write_text(SHAPE)
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("events", "id long, customer string, country string, n int")
        lake.append("events", [{"id": 1, "customer": "a", "country": "DE", "n": 1}])
    return tmp_path


def append(folder: Path, number: int) -> None:
    with fm.open(folder / "lake") as lake:
        lake.append("events", [{"id": number, "customer": "b", "country": "FR", "n": number}])


def test_create_list_and_drop(made: Path) -> None:
    assert command(made, "index", "list").lines == ["no indexes; `floodmark index create TABLE --on COLUMN` makes one"]
    done = command(made, "index", "create", "events", "--on", "customer")
    assert done.lines == ["created: events has an index on customer"]
    assert "`floodmark maintain index events` covers the other files" in done.stderr
    again = command(made, "index", "create", "events", "--on", "customer")
    assert again.lines == ["nothing to do: events has an index on customer"]
    append(made, 2)
    listed = command(made, "index", "list", "events")
    assert listed.lines[0].split() == ["table", "on", "kind", "state", "segments", "broken", "size", "files", "rows"]
    assert listed.lines[1].split()[:6] == ["events", "customer", "value", "live", "1", "0"]
    assert listed.lines[1].split()[8:] == ["1", "of", "2", "1", "of", "2"]
    would = command(made, "index", "drop", "events", "--on", "customer")
    assert would.stdout.startswith("would drop the value index on customer of events: 1 segment, ")
    assert "Add --apply to do it." in would.stderr
    dropped = command(made, "index", "drop", "events", "--on", "customer", "--apply")
    assert dropped.stdout.startswith("dropped the value index on customer of events: 1 segment, ")
    assert command(made, "index", "list").lines == ["no indexes; `floodmark index create TABLE --on COLUMN` makes one"]


def test_the_same_as_json(made: Path) -> None:
    created = answer(made, "index", "create", "events", "--on", "country,n")
    assert {name: created[name] for name in ("table", "on", "kind", "outcome")} == {
        "table": "events",
        "on": ["country", "n"],
        "kind": "value",
        "outcome": "created",
    }
    append(made, 2)
    (listed,) = answer(made, "index", "list")["indexes"]
    assert listed.pop("bytes") > 0
    assert listed == {
        "table": "events",
        "on": ["country", "n"],
        "kind": "value",
        "state": "live",
        "reason": None,
        "segments": 1,
        "broken": 0,
        "files": 2,
        "files_covered": 1,
        "rows": 2,
        "rows_covered": 1,
        "advice": "`floodmark maintain index events` covers the other files; until then lookups scan them.",
    }
    assert answer(made, "show", "events")["indexes"] == answer(made, "index", "list", "events")["indexes"]
    status = answer(made, "status")["indexes"]
    assert (status["indexes"], status["segments"], status["broken"]) == (1, 1, 0)
    assert answer(made, "tables")["tables"][0]["indexes"] == status
    assert answer(made, "index", "drop", "events", "--on", "n,country")["outcome"] == "planned"
    assert answer(made, "index", "drop", "events", "--on", "n,country", "--apply")["outcome"] == "dropped"
    error = answer(made, "index", "drop", "events", "--on", "n", "--apply", code=2)["error"]
    assert (error["kind"], error["message"]) == ("NotFound", "there is no such index")
    assert answer(made, "index", "create", "events", "--on", "nope", code=2)["error"]["kind"] == "Invalid"


def test_people_see_indexes_in_show_and_status(made: Path) -> None:
    assert ["indexes", "-"] in [line.split() for line in command(made, "status").lines]
    command(made, "index", "create", "events", "--on", "customer")
    append(made, 2)
    (line,) = (line for line in command(made, "status").lines if line.startswith("indexes "))
    assert line.split(maxsplit=1)[1].startswith("1 (1 segment, ")
    assert line.endswith("`floodmark index list` shows what they cover")
    shown = command(made, "show", "events")
    assert any(line.split()[:3] == ["events", "customer", "value"] for line in shown.lines)


def test_apply_of_a_file_declares_indexes(made: Path) -> None:
    planned = command(made, "plan", "shape.toml")
    assert "index on country, n" in planned.stdout
    done = command(made, "apply", "shape.toml")
    assert done.lines[-1] == "indexes changed; still version 2"
    assert "add_index" in done.stdout
    assert command(made, "apply", "shape.toml").lines == ["nothing to do: the tables are as declared"]
    assert [one["on"] for one in answer(made, "index", "list")["indexes"]] == [["country", "n"], ["customer"]]
    (made / "shape.toml").write_text("[tables.events]\nindex = []\n")
    applied = answer(made, "apply", "shape.toml")
    assert (applied["outcome"], [step["action"] for step in applied["steps"]]) == ("declared", ["drop_index"] * 2)


def test_no_command_shows_the_secret_of_an_index(made: Path) -> None:
    command(made, "index", "create", "events", "--on", "customer")
    append(made, 2)
    with closing(sqlite3.connect(made / "lake" / "catalog.db")) as connection:
        secrets = [row[0] for row in connection.execute("SELECT secret FROM fm_indexes")]
    assert len(secrets) == 1
    commands = [["status"], ["show", "events"], ["index", "list"], ["tables"], ["history"], ["plan", "shape.toml"]]
    commands += [["index", "drop", "events", "--on", "customer"], ["index", "create", "events", "--on", "n"]]
    for one in commands:
        for more in ([], ["--json"]):
            done = command(made, *one, *more)
            assert not any(secret in done.stdout + done.stderr for secret in secrets), one
