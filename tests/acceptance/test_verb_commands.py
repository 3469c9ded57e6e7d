"""`update`, `rename`, `column` and `--if-version` as a person meets them: a process each, without Java to find."""

from __future__ import annotations

from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.children import preload
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_keyed_commands import Done, command, make_lake

preload("floodmark.cli.main", "floodmark.schema.apply", "floodmark.write.verbs")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_lake(tmp_path)


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake that no test changes."""
    return make_lake(tmp_path_factory.mktemp("still"))


# ── update ──

UPDATE = ("update", "users", "--set", "country = 'NL'", "--where", "country = 'XX'")


def test_an_update_shows_its_plan_and_is_done_only_with_apply(made: Path) -> None:
    planned = command(made, *UPDATE)
    assert planned == Done(
        0, "would update up to 3 of 10 rows of users, which are in 2 of 3 files\n", "Add --apply to do it.\n", 9
    )
    data = command(made, *UPDATE, "--json").data
    assert (data["outcome"], data["rows"], data["version"], data["set"]) == ("planned", 3, 9, {"country": "'NL'"})

    done = command(made, *UPDATE, "--apply", "--batch", "monday", "--json")
    assert (done.code, done.stderr, done.data["outcome"], done.data["rows"]) == (0, "", "committed", 3)
    assert done.data["tables"][0]["rows_updated"] == 3
    assert done.data["message"] == "update country = 'NL' where country = 'XX'"
    again = command(made, *UPDATE, "--apply", "--batch", "monday")
    assert (again.code, again.stdout) == (
        0,
        "nothing to do: batch monday was already committed to users in version 10\n",
    )
    assert command(made, *UPDATE) == Done(0, "nothing to do: no row matches\n", "", 10)
    same = ("update", "users", "--set", "country='NL'", "--where", "country = 'NL'", "--apply")
    assert command(made, *same) == Done(0, "nothing to do: all rows that match have these values\n", "", 10)
    two = ("--set", "name = country", "--set", "`country`=name", "--where", "id = 1", "--apply")
    text = command(made, "update", "users", *two)
    assert text.stdout == "1 rows updated in users, version 11\n"
    with fm.open(made / "lake") as lake:
        found = {row["id"]: row for row in lake.read_arrow("users").read_all().to_pylist()}
        assert (found[1]["name"], found[1]["country"]) == ("DE", "user 1")
        check_lake(lake.catalog)


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        (("--set", "cuntry = 'XX'", "--where", "true"), "Invalid", "country"),
        (("--set", "cuntry = 'XX'", "--where", "true", "--apply"), "Invalid", "country"),
        (("--set", "id = 7", "--where", "true", "--apply"), "Invalid", "key"),
        (("--set", "country", "--where", "true", "--apply"), "Invalid", "--set"),
        (("--set", "= 7", "--where", "true", "--apply"), "Invalid", "--set"),
        (("--set", "age = 7", "--set", "age = 8", "--where", "true"), "Invalid", "two new values"),
        (("--set", "age =", "--where", "true", "--apply"), "Invalid", "expression"),
        (("--set", "age = 'x'", "--where", "true", "--apply"), "Invalid", "age"),
        (("--set", "age = 7", "--where", " ", "--apply"), "Invalid", "condition"),
    ],
)
def test_a_wrong_update_is_named_and_changes_nothing(
    still: Path, arguments: tuple[str, ...], kind: str, word: str
) -> None:
    done = command(still, "update", "users", *arguments, "--json")
    done.says(kind, word)
    assert done.version == 9


def test_an_update_without_a_condition_is_wrong_usage(still: Path) -> None:
    done = command(still, "update", "users", "--set", "age = 7", "--apply")
    assert (done.code, done.version) == (2, 9)
    assert "--where" in done.stderr


def test_an_update_that_needs_spark_says_so_before_anything_happens(still: Path) -> None:
    update = ("update", "users", "--set", "name = upper(name)", "--where", "true", "--apply", "--json")
    done = command(still, *update)
    assert (done.code, done.error["kind"], done.version) == (4, "Unavailable", 9)


def test_an_update_on_a_branch(made: Path) -> None:
    assert command(made, "branch", "create", "dev").code == 0
    assert command(made, *UPDATE, "--branch", "dev", "--apply").stdout == "3 rows updated in users, version 10\n"
    assert command(made, *UPDATE).stdout.startswith("would update up to 3 of 10")
    assert command(made, *UPDATE, "--branch", "dev").stdout == "nothing to do: no row matches\n"


# ── rename ──


def test_a_table_gets_another_name(made: Path) -> None:
    done = command(made, "rename", "notes", "remarks")
    assert done == Done(0, "notes renamed to remarks, version 10\n", "", 10)
    data = command(made, "rename", "remarks", "notes", "--message", "back", "--json").data
    assert (data["outcome"], data["kind"], data["message"]) == ("committed", "apply", "back")
    assert data["tables"][0]["table"] == "notes"
    command(made, "rename", "notes", "Users", "--json").says("Invalid", "users")
    command(made, "rename", "notes", "a-b", "--json").says("Invalid", "letters")
    command(made, "rename", "nowhere", "x", "--json").says("NotFound", "users")
    assert command(made, "rename", "notes").code == 2


def test_a_sink_follows_a_renamed_table(made: Path) -> None:
    out = made / "out"
    (made / "floodmark.toml").write_text(f'[sinks.out]\ntype = "files"\ntables = ["notes"]\npath = "{out}"\n')
    assert command(made, "sink", "add", "out").code == 0
    assert command(made, "sink", "run", "out").code == 0
    done = command(made, "rename", "notes", "remarks")
    assert (done.code, done.version) == (0, 10)
    assert "[sinks.out]" in done.stderr
    assert "remarks (as notes)" in command(made, "sink", "status", "out").stdout
    (table,) = command(made, "sink", "status", "out", "--json").data["tables"]
    assert (table["table"], table["shipped_as"]) == ("remarks", "notes")
    replay = command(made, "sink", "replay", "out", "--from", "beginning", "--table", "notes", "--apply")
    assert replay.code == 0
    assert command(made, "sink", "run", "out").stdout.startswith("remarks: shipped 2 rows")
    refused = command(made, "drop", "remarks")
    assert refused.code == 2
    assert "sinks follow it: out" in refused.stderr


def test_a_declared_table_is_to_be_renamed_in_the_settings_too(made: Path) -> None:
    (made / "floodmark.toml").write_text('[tables.notes]\nschema = "id long not null, name string"\n')
    done = command(made, "rename", "notes", "remarks")
    assert done.code == 0
    assert "[tables.notes]" in done.stderr
    assert "floodmark apply" in done.stderr


# ── column ──


def test_columns_come_get_other_names_and_go(made: Path) -> None:
    added = command(made, "column", "add", "notes", "level", "int", "--default", "7", "--comment", "how high")
    assert added == Done(0, "notes has the column level, version 10\n", "", 10)
    assert command(made, "column", "add", "notes", "kind", "string", "--default", "7", "--json").code == 0
    assert command(made, "column", "add", "notes", "seen", "boolean", "--default", "true", "--required").code == 0
    renamed = command(made, "column", "rename", "notes", "name", "title")
    assert renamed == Done(0, "notes.name renamed to title, version 13\n", "", 13)
    with fm.open(made / "lake") as lake:
        row = lake.read_arrow("notes").read_all().to_pylist()[0]
        assert row == {"id": 1, "title": "twice", "level": 7, "kind": "7", "seen": True}

    planned = command(made, "column", "drop", "notes", "level")
    assert "destructive" in planned.stdout
    assert "this loses data" in planned.stderr
    assert planned.stderr.endswith("Add --apply to do it.\n")
    plan = command(made, "column", "drop", "notes", "level", "--json").data
    assert (plan["outcome"], plan["steps"][0]["kind"]) == ("planned", "destructive")
    assert command(made, "status", "--json").version == 13
    dropped = command(made, "column", "drop", "notes", "level", "--apply")
    assert dropped == Done(0, "notes.level dropped, version 14\n", "", 14)
    with fm.open(made / "lake") as lake:
        check_lake(lake.catalog)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("add", "users", "AGE", "int"), "column of this name"),
        (("add", "users", "more", "intt"), "intt"),
        (("add", "users", "more", "int", "--default", "x"), "whole number"),
        (("add", "users", "more", "double", "--default", "1"), "default"),
        (("rename", "users", "nmae", "x"), "name"),
        (("drop", "users", "nmae"), "name"),
        (("drop", "users", "id", "--apply"), "key"),
    ],
)
def test_a_wrong_column_is_named_and_changes_nothing(still: Path, arguments: tuple[str, ...], word: str) -> None:
    done = command(still, "column", *arguments, "--json")
    done.says("Invalid", word)
    assert done.version == 9


def test_a_column_that_is_needed_is_refused_in_the_plan_too(still: Path) -> None:
    done = command(still, "column", "drop", "users", "id")
    assert done.code == 2
    assert "refused: it is part of the key" in done.stderr
    assert "--apply" not in done.stderr


# ── --if-version ──


@pytest.mark.parametrize(
    "arguments",
    [
        ("delete", "users", "--where", "id = 1", "--apply"),
        (*UPDATE, "--apply"),
        ("drop", "users", "--apply"),
        ("rename", "users", "people"),
        ("column", "add", "users", "more", "int"),
        ("column", "rename", "users", "name", "title"),
        ("column", "drop", "users", "name", "--apply"),
        ("load", "users", "more.csv", "--mode", "merge", "--bad-rows", "set-aside"),
        ("apply", "shape.toml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_expects_a_version_and_ends_with_3_if_its_table_moved(made: Path, arguments: tuple[str, ...]) -> None:
    (made / "more.csv").write_text("id,name,country,age\n1,new,PL,7\n")
    (made / "shape.toml").write_text('[tables.users]\ncomment = "people"\n')
    done = command(made, *arguments, "--if-version", "4", "--json")
    assert (done.code, done.version) == (3, 9)
    facts = done.error["facts"]
    assert (done.error["kind"], facts["table"], facts["expected"], facts["actual"]) == ("Conflict", "users", "4", "5")
    # Since then only other tables have changed.
    done = command(made, *arguments, "--if-version", "5", "--json")
    assert (done.code, done.data["outcome"], done.version) == (0, "committed", 10)


def test_so_do_an_undrop_and_a_merge_of_branches(made: Path) -> None:
    assert command(made, "drop", "users", "--apply").version == 10
    assert command(made, "branch", "create", "dev").code == 0
    delete = ("delete", "notes", "--where", "id = 1", "--branch", "dev", "--apply")
    assert command(made, *delete).version == 11
    for arguments, table, early in ((("undrop", "users"), "users", 9), (("branch", "merge", "dev"), "notes", 10)):
        before = command(made, "status", "--json").version
        done = command(made, *arguments, "--if-version", str(early), "--json")
        facts = done.error["facts"]
        assert (done.code, done.version, facts["table"]) == (3, before, table)
        assert (facts["expected"], facts["actual"]) == (str(early), str(early + 1))
        done = command(made, *arguments, "--if-version", str(early + 1))
        assert (done.code, done.version) == (0, before + 1)


def test_columns_of_a_branch_reach_main_with_a_merge(made: Path) -> None:
    assert command(made, "branch", "create", "dev").code == 0
    on_dev = ("--branch", "dev")
    assert command(made, "column", "add", "notes", "level", "int", "--default", "7", *on_dev).version == 10
    assert command(made, "column", "rename", "notes", "name", "title", *on_dev).version == 11
    planned = command(made, "column", "drop", "notes", "title", *on_dev, "--json")
    assert (planned.data["branch"], planned.data["outcome"], planned.version) == ("dev", "planned", 11)
    assert command(made, "column", "drop", "notes", "title").code == 2  # main has no such column
    refused = command(made, "rename", "notes", "remarks", *on_dev)
    assert refused.code == 2
    assert "main" in refused.stderr
    refused = command(made, "drop", "notes", *on_dev)
    assert (refused.code, refused.version) == (2, 11)
    assert "other branches have it" in refused.stderr
    with fm.open(made / "lake") as lake:
        assert lake.schema("notes").column_names == ["id", "name", "_seq"]
        lake.sinks.add("out", "files", tables=["notes"], path=str(made / "out"), columns=["name"])
    conflict = command(made, "branch", "merge", "dev")
    assert conflict.code == 3
    assert "the sink out names it" in conflict.stdout
    assert "--prefer cannot resolve this" in conflict.stderr
    assert command(made, "sink", "remove", "out", "--apply").code == 0
    assert command(made, "branch", "merge", "dev").code == 0
    with fm.open(made / "lake") as lake:
        assert lake.read_arrow("notes").read_all().to_pylist()[0] == {"id": 1, "title": "twice", "level": 7}
        lake.create_table("drafts", "id long", branch="dev")
    renamed = command(made, "rename", "drafts", "plans", *on_dev)
    assert renamed.stdout == "drafts renamed to plans, version 14\n"
    assert command(made, "drop", "plans", *on_dev, "--apply").version == 15
