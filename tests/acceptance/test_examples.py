"""The examples, as a user runs them: a process of their own, a new folder, and what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import ids

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_quickstart_does_what_it_says(tmp_path: Path) -> None:
    folder = str(tmp_path / "lake")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py"), folder],
        cwd=tmp_path,
        # A session of this process must not be taken for the example's own.
        env={name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[:2] == ["committed", "already_committed"]
    assert "3 transaction first import 2" in lines
    # The head has both orders, the first version one of them.
    assert [line.split("|")[2].strip() for line in lines if "Ada" in line] == ["12.75", "9.50"]
    with fm.open(folder, read_only=True) as lake:
        check_lake(lake.catalog)
        assert (ids(lake, "orders"), ids(lake, "customers")) == ([10, 11], [1])
        assert [commit.kind for commit in lake.history()] == ["append", "transaction", "create_table", "create_table"]


def test_every_example_is_run_by_a_test() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == ["quickstart.py"]
