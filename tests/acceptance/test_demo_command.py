"""`floodmark demo` as a new user runs it: the whole story, its verdict, and what its exit code says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.cli import demo
from floodmark.cli.demo import rows as demo_rows
from floodmark.cli.demo.story import WHILE_FILES_COME, WHILE_SENDING
from floodmark.testing.invariants import check_lake

COMMAND = [sys.executable, "-m", "floodmark.cli.main"]


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("FLOODMARK_")}
    return subprocess.run(
        [*COMMAND, *arguments, "demo", "--path", str(folder)],
        env=given,
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(900)
def test_the_whole_story_ends_with_nothing_lost_and_nothing_doubled(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = run_demo(folder, "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    wanted = demo_rows.wanted(demo_rows.today())
    everything = len(wanted.orders) + len(wanted.customers)
    assert told["rows_in"] == everything
    assert told["ends"] == [
        {"where": "the lake", "rows_out": everything - len(wanted.retired), "lost": 0, "doubled": 0},
        {"where": "the files", "rows_out": everything, "lost": 0, "doubled": 0},
        {"where": "the second lake", "rows_out": everything, "lost": 0, "doubled": 0},
    ]
    # Each failpoint, a plain kill of each daemon, two jobs, and two pieces of maintenance.
    assert told["kills"] == len(WHILE_SENDING) + len(WHILE_FILES_COME) + 2 + 4
    assert told["recovered"] > 0
    for name in ("lake", "copy"):
        with fm.open(folder / name) as lake:
            check_lake(lake.catalog)
            assert lake.status()["health"] == "fine"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    done = run_demo(folder)
    assert done.returncode == 2
    assert "empty folder" in done.stderr
    assert [one.name for one in folder.iterdir()] == ["letter.txt"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("orders", "customers", "lost", "doubled"),
    [
        ([1, 2, 3], [(7, 5)], 0, 0),
        ([1, 3], [(7, 5)], 1, 0),
        ([1, 2, 3, 3], [(7, 5)], 0, 1),
        ([1, 2, 3, 9], [(7, 5)], 0, 1),
        ([1, 2, 3], [(7, 4)], 1, 0),
        ([1, 2, 3], [(7, 5), (7, 5)], 0, 1),
        ([], [], 4, 0),
    ],
)
def test_the_verdict_sees_what_is_lost_and_what_is_doubled(
    orders: list[int], customers: list[tuple[int, int]], lost: int, doubled: int
) -> None:
    end = demo.count_end("an end", orders, customers, frozenset({1, 2, 3}), {7: 5})
    assert (end["lost"], end["doubled"]) == (lost, doubled)
    assert demo.exit_code([end]) == (1 if lost or doubled else 0)


@pytest.mark.parametrize(
    ("started", "found", "named"),
    [
        (".venv/bin/floodmark", None, ".venv/bin/floodmark"),
        (".venv/bin/floodmark", "/usr/bin/floodmark", "floodmark"),
        ("/x/floodmark/cli/main.py", None, "floodmark"),
    ],
)
def test_its_last_lines_name_a_program_that_a_shell_finds(
    started: str, found: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "demo"])
    monkeypatch.setattr("shutil.which", lambda _: found)
    assert demo.program() == named
