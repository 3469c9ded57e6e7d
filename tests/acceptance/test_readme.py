"""The README's quickstarts, taken from its text and run as they are pasted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.conftest import ids

ROOT = Path(__file__).parents[2]
# Commands that start Java, on a machine that is busy with other tests; none of it is waited for if all is well.
WAIT_S = 840
pytestmark = pytest.mark.timeout(900)


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text().partition("## Quickstart")[2]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that is set up as a clone is: `make setup` has nothing left to do. Its page is at any free port."""
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "floodmark.toml").write_text('[serve]\nbind = "127.0.0.1:0"\n')
    return tmp_path


def started(command: list[str], folder: Path, **options: Any) -> subprocess.Popen[str]:
    clean = ("SPARK_", "PYSPARK_", "FLOODMARK_", "MAKE", "MFLAGS")
    return subprocess.Popen(
        command,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith(clean)},
        text=True,
        # As a terminal does it: a Ctrl-C reaches all of them.
        start_new_session=True,
        **options,
    )


def test_the_quickstart_of_the_command_line_runs_as_pasted(clone: Path) -> None:
    (block,) = blocks("sh")
    lines: list[str] = []
    shell = started(["bash", "-e"], clone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    stuck = threading.Timer(WAIT_S, os.killpg, (shell.pid, signal.SIGKILL))
    stuck.start()
    try:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write(block)
        shell.stdin.close()
        address = None
        for line in shell.stdout:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                address = found[0]
                break
        assert address, "".join(lines)
        assert "events" in httpx.get(address, timeout=60).text
        os.killpg(shell.pid, signal.SIGINT)
        shell.wait(WAIT_S)
    finally:
        stuck.cancel()
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    text = "".join(lines)
    assert re.search(r"^\W*3\W*$", text, flags=re.MULTILINE)  # the count
    assert "events: shipped 3 rows" in text
    with fm.open(clone / "lake", read_only=True) as lake:
        check_lake(lake.catalog)
        assert ids(lake) == [1, 2, 3]
    assert list((clone / "out").rglob("_unit.json"))


def test_make_up_leaves_the_lake_of_the_quickstart_alone_and_takes_the_rows_that_it_says(clone: Path) -> None:
    """In the same clone and the same shell: tables and sinks of the same names, in other shapes."""
    with fm.open(clone / "lake", create=True) as lake:
        lake.create_table("events", "id long, ts timestamp")
        lake.sinks.add("out", "files", tables=["events"], path=str(clone / "out"))
        before = lake.status()["version"]
    (clone / "up").mkdir()
    text = (ROOT / "examples/floodmark.toml").read_text()
    (clone / "up/floodmark.toml").write_text(text.replace('"127.0.0.1:8787"', '"127.0.0.1:0"'))
    lines: list[str] = []
    shell = started(["bash", "-e"], clone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    stuck = threading.Timer(WAIT_S, os.killpg, (shell.pid, signal.SIGKILL))
    stuck.start()
    try:
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdin.write('export FLOODMARK_LAKE="$PWD/lake"\nmake up\n')
        shell.stdin.close()
        address = None
        for line in shell.stdout:
            lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                address = found[0]
                break
        assert address, "".join(lines)
        assert not [line for line in lines if "otherwise" in line]
        commands = [line.strip() for line in lines if line.startswith("  ")]
        assert len(commands) == 2
        for one in commands:
            subprocess.run(one.replace("ADDRESS", address), shell=True, cwd=clone, check=True, capture_output=True)
        end = time.monotonic() + WAIT_S
        while ids_of(clone / "up/lake") != [1, 2]:
            assert time.monotonic() < end
            time.sleep(0.2)
        os.killpg(shell.pid, signal.SIGINT)
        shell.wait(WAIT_S)
    finally:
        stuck.cancel()
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
    with fm.open(clone / "lake", read_only=True) as lake:
        assert lake.status()["version"] == before


def ids_of(place: Path) -> list[int]:
    with fm.open(place, read_only=True) as lake:
        return ids(lake)


@pytest.mark.parametrize("way", ["script", "prompt"])
def test_the_quickstart_in_python_runs_as_pasted(clone: Path, way: str) -> None:
    """`prompt`: line by line, where a blank line ends a block."""
    (block,) = blocks("python")
    flags = ["-q", "-i"] if way == "prompt" else ["-"]
    python = started(
        [str(clone / ".venv/bin/python"), *flags],
        clone,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = python.communicate(block, timeout=WAIT_S)
    assert python.returncode == 0, errors
    assert "Error" not in errors, errors
    wanted = re.findall(r"# (committed|already_committed)$", block, flags=re.MULTILINE)
    assert [line for line in out.splitlines() if line in ("committed", "already_committed")] == wanted
    told = next(line for line in out.splitlines() if line.startswith("[{"))
    assert "'_change': 'delete'" in told
    assert "'_change': 'upsert'" in told
    with fm.open(clone / "shop", read_only=True) as lake:
        check_lake(lake.catalog)
        assert (ids(lake, "orders"), ids(lake, "customers")) == ([10, 11], [1])
