"""`branch`, `--branch` and `repair` as a person types them: what they print, as text and JSON, and the exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_commands import Done, answer, command, environment
from tests.conftest import Place
from tests.foreign_writer import by_another, theirs

PEOPLE = "id long not null, name string"
BRANCH_KEYS = {"name", "id", "parent", "base_version", "head_version", "created_ms", "tables_changed", "commits"}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A lake in ./lake with one keyed table of three rows."""
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
        lake.append("people", named(k1="a", k2="b", k3="c"))
    return tmp_path


def named(**names: str) -> list[dict[str, Any]]:
    return [{"id": int(key[1:]), "name": name} for key, name in names.items()]


def write(folder: Path, branch: str, **names: str) -> None:
    with fm.open(folder / "lake") as lake:
        lake.merge("people", named(**names), branch=branch)


def state(folder: Path, branch: str = "main") -> dict[int, str]:
    with fm.open(folder / "lake", read_only=True) as lake:
        rows = lake.read_arrow("people", branch=branch).read_all().to_pylist()
    return {row["id"]: row["name"] for row in rows}


def asked(folder: Path, *arguments: str, code: int = 0) -> Any:
    return answer(*arguments, cwd=folder, env=environment(FLOODMARK_LAKE="lake"), code=code)


def said(folder: Path, *arguments: str, code: int = 0) -> Done:
    return command(*arguments, cwd=folder, env=environment(FLOODMARK_LAKE="lake"), code=code)


def test_a_branch_is_made_looked_at_merged_and_deleted(made: Path) -> None:
    created = asked(made, "branch", "create", "dev")
    assert created["outcome"] == "created"
    assert set(created) == {"outcome", *BRANCH_KEYS}
    assert (created["parent"], created["base_version"]) == ("main", 2)
    write(made, "dev", k2="bee", k9="i")
    listed = asked(made, "branch", "list")["branches"]
    assert [(one["name"], one["commits"], one["tables_changed"]) for one in listed][1] == ("dev", 1, 1)

    found = asked(made, "branch", "diff", "dev")
    assert (found["branch"], found["parent"], found["common_version"], found["head_version"]) == ("dev", "main", 2, 3)
    (table,) = found["tables"]
    assert (table["table"], table["change"]) == ("people", "changed")
    assert (table["rows_added"], table["rows_updated"], table["rows_deleted"]) == (1, 1, 0)
    samples = sorted(table["samples"], key=lambda one: one["row"]["id"])
    assert samples[0] == {"change": "updated", "row": {"id": 2, "name": "bee"}, "before": {"id": 2, "name": "b"}}

    planned = asked(made, "branch", "merge", "dev", "--dry-run")
    assert (planned["outcome"], planned["commit"]) == ("planned", None)
    assert state(made) == {1: "a", 2: "b", 3: "c"}
    kept = asked(made, "branch", "delete", "dev")
    assert (kept["outcome"], kept["unmerged"]) == ("planned", 1)

    merged = asked(made, "branch", "merge", "dev", "--message", "the news")
    assert (merged["outcome"], merged["source"], merged["target"]) == ("merged", "dev", "main")
    assert (merged["commit"]["kind"], merged["commit"]["message"]) == ("branch_merge", "the news")
    assert state(made) == {1: "a", 2: "bee", 3: "c", 9: "i"}
    assert asked(made, "branch", "merge", "dev")["outcome"] == "up_to_date"

    deleted = asked(made, "branch", "delete", "dev", "--apply")
    assert (deleted["outcome"], deleted["name"], deleted["unmerged"]) == ("deleted", "dev", 0)
    assert [one["name"] for one in asked(made, "branch", "list")["branches"]] == ["main"]
    assert "no such branch" in said(made, "branch", "diff", "dev", code=2).stderr
    with fm.open(made / "lake") as lake:
        check_lake(lake.catalog)


def test_conflicts_are_data_and_a_choice_settles_them(made: Path) -> None:
    asked(made, "branch", "create", "dev")
    write(made, "dev", k2="theirs", k9="i")
    write(made, "main", k2="ours")
    found = asked(made, "branch", "merge", "dev", code=3)
    assert (found["outcome"], found["commit"], found["conflicts_total"]) == ("conflict", None, 1)
    assert found["conflicts"] == [
        {
            "table": "people",
            "reason": "changed",
            "key": {"id": 2},
            "base": {"id": 2, "name": "b"},
            "ours": {"id": 2, "name": "ours"},
            "theirs": {"id": 2, "name": "theirs"},
        }
    ]
    assert state(made)[2] == "ours"
    text = said(made, "branch", "merge", "dev", code=3)
    assert "people" in text.stdout
    assert "--prefer" in text.stderr
    assert asked(made, "branch", "merge", "dev", "--prefer", "theirs")["outcome"] == "merged"
    assert state(made) == {1: "a", 2: "theirs", 3: "c", 9: "i"}


def test_what_is_wrong_is_said_and_changes_nothing(made: Path) -> None:
    asked(made, "branch", "create", "dev")
    for arguments, words in (
        (("branch", "create", "dev"), "dev"),
        (("branch", "create", "no/slash"), "no/slash"),
        (("branch", "create", "x", "--version", "99"), "99"),
        (("branch", "merge", "dev", "--prefer", "mine"), "prefer"),
        (("branch", "merge", "nobody"), "nobody"),
        (("branch", "delete", "main", "--apply"), "main"),
        (("tables", "--branch", "nobody"), "nobody"),
        (("history", "--branch", "nobody"), "nobody"),
        (("changes", "people", "--branch", "nobody"), "nobody"),
        (("show", "people", "--branch", "nobody"), "nobody"),
    ):
        assert words in said(made, *arguments, code=2).stderr
    assert [one["name"] for one in asked(made, "branch", "list")["branches"]] == ["main", "dev"]


def test_every_command_that_reads_takes_a_branch(made: Path) -> None:
    asked(made, "branch", "create", "dev", "--from", "main")
    write(made, "dev", k9="i")
    on_dev = ("--branch", "dev")
    assert asked(made, "tables", *on_dev)["tables"][0]["rows"] == 4
    assert asked(made, "tables")["tables"][0]["rows"] == 3
    assert asked(made, "show", "people", *on_dev)["rows"] == 4
    assert [one["branch"] for one in asked(made, "history", *on_dev)["commits"]] == ["dev", "main", "main"]
    assert [one["branch"] for one in asked(made, "history", "--branch", "main")["commits"]] == ["main", "main"]
    assert len(asked(made, "changes", "people", *on_dev)["changes"]) == 4
    assert len(asked(made, "changes", "people")["changes"]) == 3
    exported = asked(made, "export", "people", "out.jsonl", *on_dev)
    assert (exported["rows"], len((made / "out.jsonl").read_text().splitlines())) == (4, 4)
    planned = asked(made, "delete", "people", "--where", "id > 2", *on_dev)
    assert (planned["outcome"], planned["rows"]) == ("planned", 2)
    done = asked(made, "delete", "people", "--where", "id > 2", *on_dev, "--apply")
    assert (done["branch"], done["rows"]) == ("dev", 2)
    assert (len(state(made)), len(state(made, "dev"))) == (3, 2)


def test_lists_and_differences_as_text(made: Path) -> None:
    assert "branch dev starts from version 2 of main" in said(made, "branch", "create", "dev").stdout
    write(made, "dev", k2="bee")
    lines = said(made, "branch", "list").stdout.splitlines()
    assert lines[0].split() == ["branch", "parent", "base", "head", "commits", "tables", "created"]
    assert [line.split()[0] for line in lines[1:]] == ["main", "dev"]
    assert '{"id": 2, "name": "bee"}' in said(made, "branch", "diff", "dev").stdout
    assert "would delete branch dev: 1 of its commits are not merged" in said(made, "branch", "delete", "dev").stdout
    assert "merged dev into main, version 4" in said(made, "branch", "merge", "dev").stdout
    assert "up to date" in said(made, "branch", "merge", "dev").stdout


def test_repair_shows_what_happened_and_acts_with_apply(made: Path) -> None:
    place = Place(str(made / "lake"), None)
    assert asked(made, "repair") == {"outcome": "nothing_to_do", "repairs": [], "recovery": None}
    by_another(place, "people", lambda table: table.append(theirs(k9="i")))
    assert "floodmark repair people" in said(made, "changes", "people", code=5).stderr
    assert "floodmark repair people" in " ".join(said(made, "doctor", code=1).stdout.split())
    planned = asked(made, "repair", "people")
    assert planned["outcome"] == "planned"
    (one,) = planned["repairs"]
    assert (one["happened"], one["choice"], one["rows_added"], len(one["ways"])) == ("appended", "accept", 1, 2)
    text = said(made, "repair")
    assert "another writer appended: 1 row(s)" in text.stdout
    assert "--apply" in text.stderr
    done = asked(made, "repair", "people", "--apply")
    assert (done["outcome"], done["repairs"][0]["version"]) == ("accepted", 3)
    assert state(made) == {1: "a", 2: "b", 3: "c", 9: "i"}
    assert asked(made, "repair", "people")["outcome"] == "nothing_to_do"
    assert [row["outcome"] for row in asked(made, "audit")["audit"]] == ["accepted"]


def test_repair_of_what_is_not_clear_wants_a_choice(made: Path) -> None:
    place = Place(str(made / "lake"), None)
    by_another(place, "people", lambda table: table.append(theirs(k2="double")))
    unclear = asked(made, "repair")
    assert (unclear["outcome"], unclear["repairs"][0]["choice"]) == ("unclear", None)
    assert "key" in unclear["repairs"][0]["detail"]
    assert "--revert" in said(made, "repair", "people", "--apply", code=2).stderr
    said(made, "repair", "people", "--accept", "--revert", code=2)
    assert asked(made, "repair", "people", "--revert", "--apply")["outcome"] == "reverted"
    assert state(made) == {1: "a", 2: "b", 3: "c"}
