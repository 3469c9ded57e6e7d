"""`rollback` and `diff` as a person types them: what they print, as text and JSON, and the exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_commands import answer, command, environment
from tests.conftest import EVENTS, rows

THEN, NOW = 4, 8


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("versions")
    with fm.open(folder / "lake", create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        lake.create_table("events", EVENTS)
        lake.append("people", rows(1, 2, 3))
        assert lake.append("events", rows(1, 2)).version == THEN
        lake.merge("people", [{"id": 2, "name": "new"}, {"id": 4, "name": "new"}])
        lake.delete("people", "id = 3")
        lake.append("events", rows(5))
        assert lake.create_table("later", EVENTS).version == NOW
    return folder


def asked(folder: Path, *arguments: str, code: int = 0) -> Any:
    return answer(*arguments, cwd=folder, env=environment(FLOODMARK_LAKE="lake"), code=code)


def said(folder: Path, *arguments: str, code: int = 0, says: tuple[str, ...]) -> None:
    """The command ends with this code, and its output or its errors hold these words."""
    done = command(*arguments, cwd=folder, env=environment(FLOODMARK_LAKE="lake"), code=code)
    text = " ".join((done.stdout + done.stderr).split())
    assert [word for word in says if word not in text] == [], text
    assert "Traceback" not in text


def state(folder: Path, table: str) -> list[tuple[int, str]]:
    with fm.open(folder / "lake", read_only=True) as lake:
        return sorted((row["id"], row["name"]) for row in lake.read_arrow(table).read_all().to_pylist())


def test_a_diff_shows_counts_and_rows(prepared: Path) -> None:
    found = asked(prepared, "diff", str(THEN), str(NOW))
    assert (found["common_version"], found["head_version"]) == (THEN, NOW)
    counts = {
        one["table"]: (one["change"], one["rows_added"], one["rows_updated"], one["rows_deleted"])
        for one in found["tables"]
    }
    assert counts == {
        "events": ("changed", 1, 0, 0),
        "later": ("created", 0, 0, 0),
        "people": ("changed", 1, 1, 1),
    }
    (people,) = asked(prepared, "diff", str(THEN), str(NOW), "--table", "people", "--limit", "1")["tables"]
    assert len(people["samples"]) == 1
    said(
        prepared,
        "diff",
        str(THEN),
        str(NOW),
        says=(
            "people",
            "changed",
            '{"id": 4, "name": "new"}',
            "updated",
        ),
    )
    said(prepared, "diff", str(NOW), str(NOW), says=(f"versions {NOW} and {NOW} do not differ",))
    said(
        prepared,
        "diff",
        "soon",
        str(NOW),
        code=2,
        says=(
            "Invalid",
            "soon",
        ),
    )
    said(
        prepared,
        "diff",
        "1",
        "999",
        code=2,
        says=(
            "NotFound",
            "version=999",
        ),
    )
    said(
        prepared,
        "diff",
        "1",
        str(NOW),
        "--table",
        "nothing",
        code=2,
        says=(
            "NotFound",
            "nothing",
        ),
    )


def test_a_rollback_shows_its_plan_and_wants_apply(prepared: Path) -> None:
    planned = asked(prepared, "rollback", "--to", str(THEN))
    assert (planned["outcome"], planned["to_version"], planned["head_version"]) == ("planned", THEN, NOW)
    assert {one["table"] for one in planned["tables"]} == {"events", "people"}
    assert (planned["unreported"], planned["created"], planned["dropped"]) == ({"events": 1}, ["later"], [])
    said(
        prepared,
        "rollback",
        "--to",
        str(THEN),
        says=(
            "would roll back 2 table(s) to version 4",
            "events has no key: `changes` cannot report 1 row(s) that go",
            "Created since, and left as they are: later",
            "Add --apply to do it.",
        ),
    )
    said(
        prepared,
        "rollback",
        "later",
        "--to",
        str(THEN),
        code=2,
        says=(
            "NotFound",
            "did not exist at this version",
            "floodmark drop later",
        ),
    )
    said(prepared, "rollback", "people", code=2, says=("--to",))
    assert state(prepared, "events") == [(1, "row 1"), (2, "row 2"), (5, "row 5")]
    assert asked(prepared, "status")["version"] == NOW


def test_a_rollback_is_applied_by_version_time_and_batch(tmp_path: Path) -> None:
    with fm.open(tmp_path / "lake", create=True, actor="test") as lake:
        lake.create_table("people", EVENTS, key=["id"])
        then = lake.append("people", rows(1, 2))
        lake.merge("people", [{"id": 2, "name": "new"}])
        lake.create_table("gone", EVENTS)
        before = lake.append("gone", rows(1)).version
        lake.drop_table("gone")
    back = ("rollback", "people", "--to", str(then.version), "--batch", "once", "--message", "a mistake", "--apply")
    done = asked(tmp_path, *back)
    assert (done["outcome"], done["kind"], done["to_version"], done["message"]) == (
        "committed",
        "rollback",
        then.version,
        "a mistake",
    )
    assert state(tmp_path, "people") == [(1, "row 1"), (2, "row 2")]
    said(tmp_path, *back, says=("nothing to do: batch once was already committed in version 7",))
    said(tmp_path, "rollback", "people", "--to", "2026-01-01T00:00:00Z", code=2, says=("NotFound",))
    said(
        tmp_path, "rollback", "people", "--to", str(then.version), "--apply", says=("nothing to do: the contents are",)
    )
    said(
        tmp_path,
        "rollback",
        "--to",
        str(before),
        "--apply",
        says=(
            f"rolled back 1 table(s) to version {before}, as version 8: rows 0 added, 1 updated, 0 deleted",
            "`floodmark undrop gone` restores gone",
        ),
    )
    said(tmp_path, "rollback", "--to", str(before), says=("nothing to do: the contents are those of version",))
    with fm.open(tmp_path / "lake") as lake:
        lake.maintain.expire(keep="0s")
        check_lake(lake.catalog)
    said(tmp_path, "rollback", "people", "--to", str(then.version), "--apply", code=2, says=("BelowRetention",))
