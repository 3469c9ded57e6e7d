"""What `branch merge` and `branch delete` advise: only what helps, in words that can be typed again."""

from __future__ import annotations

from pathlib import Path

import pytest

import floodmark as fm
from tests.acceptance.test_branch_commands import PEOPLE, said, write


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A lake in ./lake with one empty table that has a key."""
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("people", PEOPLE, key=["id"])
    return tmp_path


def test_advice_says_where_the_rows_go(made: Path) -> None:
    said(made, "branch", "create", "dev")
    write(made, "dev", k1="dev")
    write(made, "main", k1="main")
    done = said(made, "branch", "merge", "main", "--into", "dev", code=3)
    assert "`floodmark branch merge main --into dev --prefer ours`" in done.stdout + done.stderr


def test_no_side_is_preferred_where_that_decides_nothing(made: Path) -> None:
    with fm.open(made / "lake", actor="test") as lake:
        lake.create_table("plain", "id long not null, name string")
        lake.branches.create("dev")
        lake.append("plain", [{"id": 1, "name": "a"}], branch="dev")
        lake.apply({"plain": {"key": ["id"]}})
    done = said(made, "branch", "merge", "dev", code=3)
    text = done.stdout + done.stderr
    assert "key" in text
    assert "--prefer cannot resolve" in text
    assert "--prefer ours" not in text


def test_rows_that_came_from_a_branch_of_the_branch_are_not_said_to_be_merged(made: Path) -> None:
    with fm.open(made / "lake", actor="test") as lake:
        lake.create_table("plain", "id long not null, name string")
        lake.branches.create("dev")
        lake.branches.create("child", source="dev")
        lake.append("plain", [{"id": 1, "name": "a"}], branch="child")
        lake.branches.merge("child")
        lake.branches.delete("child")
    assert "1 of its commits are not merged" in said(made, "branch", "delete", "dev").stdout
    with fm.open(made / "lake", actor="test") as lake:
        lake.branches.merge("dev")
        lake.append("plain", [{"id": 2, "name": "b"}])
        lake.branches.merge("main", into="dev")
    assert "all of its commits are merged" in said(made, "branch", "delete", "dev").stdout


def test_a_branch_with_branches_is_not_said_to_go(made: Path) -> None:
    with fm.open(made / "lake", actor="test") as lake:
        lake.branches.create("dev")
        lake.branches.create("child", source="dev")
    said(made, "branch", "delete", "dev", code=2)
    said(made, "branch", "delete", "main", code=2)
    assert "would delete" in said(made, "branch", "delete", "child").stdout
