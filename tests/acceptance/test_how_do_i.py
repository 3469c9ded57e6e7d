"""The page of questions: its blocks, run as they stand there, print what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-do-i.md"
# Questions that the page must answer, by a word of their heading.
ASKED = (
    *(
        "Create a table",
        "Insert or update",
        "few rows",
        "rows and columns that I need",
        "Find one row",
        "Count",
        "would open",
        "Query",
        "Change some",
        "Declare an index",
    ),
    *(
        "Delete",
        "Replace",
        "several tables in one version",
        "only if",
        "differs",
        "as it was",
        "Undo",
        "Add, rename and drop a column",
    ),
    *("Rename, drop and restore a table", "Follow", "without touching", "healthy"),
)
# A process that is fed one block after the other, so that they share what they import and open; commands in between.
RUNNER = """
import os, subprocess, sys
for kind, block in __import__("json").load(sys.stdin):
    if kind == "python":
        exec(compile(block, "page", "exec"), globals())
        sys.stdout.flush()
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", block], check=True, stdout=sys.stderr)
"""


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def expected() -> list[str]:
    lines = [line for kind, block in blocks() if kind == "python" for line in block.splitlines()]
    return [line.rpartition("  # ")[2] for line in lines if line.lstrip().startswith("print(")]


def test_the_page_answers_what_people_ask() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert [word for word in ASKED if not any(word in heading for heading in headings)] == []
    assert len(headings) == len(ASKED)


@pytest.mark.timeout(900)
def test_every_block_runs_as_written_and_prints_what_the_page_says(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "FLOODMARK_"))}
    environment |= {
        "FLOODMARK_LAKE": str(tmp_path / "shop"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(blocks()),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected()
    with fm.open(tmp_path / "shop") as lake:
        check_lake(lake.catalog)
