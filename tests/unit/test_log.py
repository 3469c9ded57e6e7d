"""Logs: a failure has its trace in one line, and a log that cannot be written harms nobody. In real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from floodmark import log
try:
    1 / 0
except ZeroDivisionError:
    log.get(task="t").exception("a task failed")
print("went on")
"""


def run(redirect: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = f'"{sys.executable}" -c "$PROGRAM" {redirect}'
    known = {**os.environ, "PROGRAM": PROGRAM, **environment}
    return subprocess.run(["sh", "-c", command], env=known, capture_output=True, text=True, check=True)


def test_a_failure_is_one_line_with_its_trace() -> None:
    (line,) = run().stderr.splitlines()
    assert "ZeroDivisionError" in line
    assert 'event="a task failed"' in line
    (told,) = map(json.loads, run(FLOODMARK_LOG_FORMAT="json").stderr.splitlines())
    assert (told["event"], told["level"], told["task"]) == ("a task failed", "error", "t")
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    for redirect in ("2>/dev/full", "2>&-"):
        assert run(redirect).stdout == "went on\n"


def test_a_command_without_streams_ends_as_it_would_with_them(tmp_path: Path) -> None:
    def code(redirect: str) -> int:
        command = f'"{sys.executable}" -m floodmark.cli.main --lake "{tmp_path}/lake" status {redirect}'
        return subprocess.run(["sh", "-c", command], capture_output=True, check=False, cwd=tmp_path).returncode

    assert code("") == code("2>&-") == code("<&- >&- 2>&-") == 2
