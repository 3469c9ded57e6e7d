"""Sinks that follow a branch: what changes there is shipped once, and main's sinks hear of it when it is merged."""

from __future__ import annotations

from pathlib import Path

import pytest

import floodmark as fm
from floodmark.errors import NotFound
from floodmark.testing.invariants import check_lake
from tests.conftest import rows
from tests.contract.test_sinks import add_files, folded, keyed, ran, shipped


def test_a_sink_follows_main_unless_it_is_told_otherwise(lake: fm.Lake, tmp_path: Path) -> None:
    keyed(lake)
    lake.append("users", rows(1, 2))
    lake.branches.create("dev")
    add_files(lake, tmp_path / "main", table="users")
    add_files(lake, tmp_path / "dev", name="trial", table="users", branch="dev")
    lake.merge("users", [{"id": 2, "name": "tried"}, {"id": 3, "name": "new"}], branch="dev")
    lake.delete("users", "id = 1", branch="dev")
    assert [lake.sinks.about(name)["branch"] for name in ("out", "trial")] == ["main", "dev"]
    assert (ran(lake).outcome, ran(lake, "trial").outcome) == ("shipped", "shipped")
    assert sorted(folded(shipped(tmp_path / "main", "users"))) == [1, 2]
    assert {key: row["name"] for key, row in folded(shipped(tmp_path / "dev", "users")).items()} == {
        2: "tried",
        3: "new",
    }
    # Of what happens on the other branch neither hears anything.
    lake.append("users", rows(7))
    assert ran(lake, "trial").outcome == "nothing_to_do"
    assert ran(lake).outcome == "shipped"
    lake.branches.merge("dev")
    assert ran(lake).outcome == "shipped"
    assert {key: row["name"] for key, row in folded(shipped(tmp_path / "main", "users")).items()} == {
        2: "tried",
        3: "new",
        7: "row 7",
    }
    assert ran(lake, "trial").outcome == "nothing_to_do"
    check_lake(lake.catalog)


def test_what_a_branch_takes_from_main_is_shipped_by_its_sink(lake: fm.Lake, tmp_path: Path) -> None:
    lake.append("events", rows(1))
    lake.branches.create("dev")
    add_files(lake, tmp_path / "dev", branch="dev", start="head")
    lake.append("events", rows(2))
    lake.append("events", rows(3), branch="dev")
    about = lake.sinks.about("out")["tables"][0]
    assert (about["lag_rows"], about["mark"]) == (1, 1), "main's row is not waited for"
    assert ran(lake).outcome == "shipped"
    assert lake.branches.merge("main", into="dev").outcome == "merged"
    assert lake.sinks.about("out")["tables"][0]["lag_rows"] == 1
    assert ran(lake).outcome == "shipped"
    assert [row["id"] for row in shipped(tmp_path / "dev")] == [3, 2]


def test_a_sink_of_a_branch_that_was_deleted_ships_nothing_also_if_the_name_comes_again(
    lake: fm.Lake, tmp_path: Path
) -> None:
    lake.append("events", rows(1))
    lake.branches.create("dev")
    add_files(lake, tmp_path / "dev", branch="dev")
    ran(lake)
    lake.branches.delete("dev")
    for again in (False, True):
        if again:
            lake.branches.create("dev")
            lake.append("events", rows(2), branch="dev")
        done = lake.sinks.run("out")
        assert done.outcome == "failed"
        assert isinstance(done.error, NotFound)
        assert "deleted" in str(done.error)
        about = lake.sinks.about("out")
        assert (about["branch"], about["tables"][0]["lag_rows"]) == (None, 0)
        assert "sink out failed" in lake.status()["health"]
        with pytest.raises(NotFound, match="deleted"):
            lake.sinks.replay("out", start="beginning")
    assert [row["id"] for row in shipped(tmp_path / "dev")] == [1]
    lake.sinks.remove("out")
    add_files(lake, tmp_path / "anew", branch="dev")
    ran(lake)
    assert [row["id"] for row in shipped(tmp_path / "anew")] == [1, 2]
    check_lake(lake.catalog)


def test_a_sink_of_a_branch_that_is_not_there_is_not_added(lake: fm.Lake, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        add_files(lake, tmp_path / "dev", branch="dev")
    assert lake.sinks.status() == []
