"""`plan` and `apply`, as a person meets them: a process each, without Java to find; text, JSON and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.children import preload
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_sink_commands import answer, command

preload("floodmark.cli.main", "floodmark.schema.apply")

FIRST = """
[tables.users]
key = ["id"]
[tables.users.columns]
id = "long"
name = "string"

[tables.orders]
schema = "id long, user long, n int"
"""
SECOND = """
[tables.users.columns]
id = "long"
title = { type = "string", renamed_from = "name" }
level = { type = "int", default = 7 }

[tables.orders]
schema = "id long, user long, n long"
key = ["id"]
references = { user = "users.id" }
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "first.toml").write_text(FIRST)
    (tmp_path / "second.toml").write_text(SECOND)
    with fm.open(tmp_path / "lake", create=True, actor="test"):
        pass
    return tmp_path


def fill(folder: Path) -> None:
    with fm.open(folder / "lake", actor="test") as lake:
        lake.append("users", [{"id": 1, "name": "one"}])
        lake.append("orders", [{"id": 1, "user": 1, "n": 1}])


def test_plan_apply_and_apply_again(made: Path) -> None:
    planned = command(made, "plan", "first.toml")
    assert "create_table" in planned.stdout
    assert "users" in planned.stdout
    assert "--expect" in planned.stderr
    done = command(made, "apply", "first.toml")
    assert done.lines[-1] == "version 1"
    assert command(made, "apply", "first.toml").lines == ["nothing to do: the tables are as declared"]
    assert command(made, "plan", "first.toml").lines == ["nothing to do: the tables are as declared"]
    fill(made)
    plan = answer(made, "plan", "second.toml")
    assert (plan["outcome"], plan["version"]) == ("planned", 3)
    assert [(step["table"], step["action"], step["kind"]) for step in plan["steps"]] == [
        ("users", "rename_column", "safe"),
        ("users", "add_column", "needs_rewrite"),
        ("orders", "widen_type", "safe"),
        ("orders", "add_key", "safe"),
        ("orders", "add_reference", "safe"),
    ]
    applied = answer(made, "apply", "second.toml", "--expect", plan["plan"], "--message", "as agreed")
    assert (applied["outcome"], applied["version"], applied["message"]) == ("committed", 4, "as agreed")
    assert applied["steps"] == plan["steps"]
    again = answer(made, "apply", "second.toml")
    assert (again["outcome"], again["version"], again["steps"]) == ("nothing_to_do", 4, [])
    with fm.open(made / "lake", read_only=True) as lake:
        check_lake(lake.catalog)
        assert lake.read_arrow("users").read_all().to_pylist() == [{"id": 1, "title": "one", "level": 7}]


def test_a_plan_that_is_not_the_expected_one_is_a_conflict(made: Path) -> None:
    command(made, "apply", "first.toml")
    plan = answer(made, "plan", "second.toml")
    fill(made)
    stale = command(made, "apply", "second.toml", "--expect", plan["plan"], code=3)
    assert stale.stdout == ""
    assert stale.stderr.startswith("floodmark: Conflict: the plan is not the expected one")
    assert answer(made, "apply", "second.toml")["outcome"] == "committed"


def test_refused_steps_are_told_with_a_way(made: Path) -> None:
    command(made, "apply", "first.toml")
    fill(made)
    (made / "wrong.toml").write_text('[tables.orders]\nschema = "id long, user long, n string"\n')
    planned = command(made, "plan", "wrong.toml", code=2)
    assert "refused: not a wider type" in planned.stderr
    assert "floodmark backfill column" in planned.stderr
    assert answer(made, "plan", "wrong.toml", code=2)["outcome"] == "refused"
    command(made, "apply", "wrong.toml", code=2).says("Invalid", "cannot be done", "not a wider type")
    (made / "wrong.toml").write_text("[tables.orders]\nkeys = ['id']\n")
    command(made, "plan", "wrong.toml", code=2).says("Invalid", "Did you mean key?")
    command(made, "plan", "nowhere.toml", code=2).says("NotFound", "there is no such file")


def test_without_a_file_the_settings_declare_the_tables(made: Path) -> None:
    command(made, "plan", code=2).says("Invalid", "no tables are declared")
    (made / "floodmark.toml").write_text(FIRST)
    assert answer(made, "apply")["outcome"] == "committed"
    assert command(made, "plan").lines == ["nothing to do: the tables are as declared"]


def test_fill_later_says_how(made: Path) -> None:
    command(made, "apply", "first.toml")
    fill(made)
    done = command(made, "apply", "second.toml", "--fill-later")
    assert 'floodmark backfill column users level "7"' in done.stderr
    assert command(made, "backfill", "column", "users", "level", "7").code == 0
    with fm.open(made / "lake", read_only=True) as lake:
        assert lake.read_arrow("users").read_all()["level"].to_pylist() == [7]


def test_steps_that_lose_data_are_named_and_want_allow_destructive(made: Path) -> None:
    command(made, "apply", "first.toml")
    fill(made)
    (made / "less.toml").write_text('[tables.users]\nschema = "id long"\n')
    planned = command(made, "plan", "less.toml")
    assert "destructive" in planned.stdout
    assert "this loses data" in planned.stderr
    assert "`floodmark apply less.toml --allow-destructive`" in planned.stderr
    assert [step["kind"] for step in answer(made, "plan", "less.toml")["steps"]] == ["destructive"]
    command(made, "apply", "less.toml", code=2).says(
        "Invalid", "loses data", "`floodmark apply less.toml --allow-destructive`"
    )
    named = command(made, "--config", "less.toml", "--lake", "lake", "plan")
    assert "`floodmark --config less.toml apply --allow-destructive`" in named.stderr
    refused = command(made, "--config", "less.toml", "--lake", "lake", "apply", code=2)
    refused.says("Invalid", "--allow-destructive with the command")
    assert answer(made, "apply", "less.toml", "--allow-destructive")["outcome"] == "committed"


def test_drop_shows_the_plan_and_wants_apply(made: Path) -> None:
    command(made, "apply", "first.toml")
    fill(made)
    planned = command(made, "drop", "orders")
    assert "drop_table" in planned.stdout
    assert "--apply" in planned.stderr
    assert answer(made, "drop", "orders")["outcome"] == "planned"
    with fm.open(made / "lake", read_only=True) as lake:
        assert {head.table for head in lake.heads()} == {"users", "orders"}
        lake_version = lake.status()["version"]
    assert command(made, "drop", "orders", "--apply").lines == [f"orders dropped, version {lake_version + 1}"]
    command(made, "drop", "orders", code=2).says("NotFound", "users")


def test_undrop_brings_a_dropped_table_back_and_says_what_it_left_out(made: Path) -> None:
    command(made, "apply", "first.toml")
    fill(made)
    command(made, "apply", "second.toml")
    command(made, "drop", "orders", "--apply")
    gone = answer(made, "status")["version"]
    done = command(made, "undrop", "orders")
    assert done.lines == [f"orders restored with 1 rows, as of version {gone - 1}; version {gone + 1}"]
    assert "References are not checked any more: user." in done.stderr
    assert "floodmark apply" in done.stderr
    command(made, "undrop", "orders", code=2).says("Invalid", "not dropped")
    command(made, "undrop", "nothing", code=2).says("NotFound", "dropped=none")
    command(made, "drop", "orders", "--apply")
    back = answer(made, "undrop", "orders", "--version", str(gone + 1), "--message", "mistake")
    assert (back["kind"], back["message"], back["from_version"], back["references_lost"]) == (
        "undrop",
        "mistake",
        gone + 1,
        [],
    )
    with fm.open(made / "lake", read_only=True) as lake:
        assert [row["id"] for row in lake.read_arrow("orders").read_all().to_pylist()] == [1]
        check_lake(lake.catalog)
