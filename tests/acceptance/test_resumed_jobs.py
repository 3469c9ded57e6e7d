"""The daemon goes on with a backfill that failed because its source was away: the real commands, a source that comes
back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import floodmark as fm
from floodmark.testing.children import run_child
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_run_command import command, prepare, running
from tests.acceptance.test_run_daemon import QUICK, status, until
from tests.conftest import ids

FEED = """
import os

def read(chunk):
    if os.path.exists("away"):
        raise OSError("no route to the source")
    return [{"id": number, "name": f"row {number}"} for number in range(chunk.start, chunk.end)]
"""
YEARS = (
    "history",
    "years",
    "--table",
    "events",
    "--call",
    "feed:read",
    "--first",
    "0",
    "--last",
    "20",
    "--chunk",
    "10",
)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run_child(prepare, str(tmp_path))
    (tmp_path / "feed.py").write_text(FEED)
    (tmp_path / "floodmark.toml").write_text(f'{QUICK}[jobs]\ngive_up = "2h"\n')
    return tmp_path


def test_the_daemon_resumes_a_job_whose_source_was_away(made: Path) -> None:
    (made / "away").touch()
    code, text = command(made, "--lake", "lake", "backfill", *YEARS, "--workers", "1", "--retries", "1")
    assert (code, "no route to the source" in text) == (4, True)
    with running(made):
        # The daemon has taken it up, and goes on trying while the source is away.
        until(lambda: any(one["name"] == "job years" for one in status(made)["daemon"]["tasks"]))
        (made / "away").unlink()
        until(lambda: job(made)["status"] == "done")
    with fm.open(made / "lake") as lake:
        assert ids(lake) == list(range(20))
        check_lake(lake.catalog)


def job(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command(folder, "--lake", "lake", "--json", "backfill", "show", "years")[1])
    return found
