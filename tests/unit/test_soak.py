"""The runner of `make soak`: a piece counts as passed only if it ran and every case of it passed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests import soak
from tests.soak import Ended, passed_pieces, pieces, read_report

REPORT = """<testsuites><testsuite>
<testcase classname="tests.crash.test_a" name="test_one[x]"/>
<testcase classname="tests.crash.test_a" name="test_two"><skipped message="no Java"/></testcase>
<testcase classname="tests.crash.test_a" name="test_three"><failure message="1 != 2"/></testcase>
<testcase classname="tests.crash.test_a" name="test_four"><error message="no database"/></testcase>
</testsuite></testsuites>"""


def test_an_interrupted_piece_is_not_green(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its report has only the cases that ended before."""
    passes = "@pytest.mark.soak\ndef test_a(): pass\n"
    interrupts = "@pytest.mark.soak\ndef test_b(): os.kill(os.getpid(), 2)\n"
    test = f"import os, pytest\n{passes}{interrupts}"
    (tmp_path / "test_it.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = soak\n")
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    ended, _ = soak.run_piece("test_it.py", "c1")
    assert ended.failed == ("pytest ended with 2",)
    assert not ended.is_green


def test_a_piece_is_a_file_and_in_the_simulation_a_test() -> None:
    ids = ["tests/crash/test_a.py::test_x[1]", "tests/crash/test_a.py::test_x[2]"]
    long = ["tests/simulation/test_model.py::test_run[0-sqlite]", "tests/simulation/test_model.py::test_run[1-sqlite]"]

    assert pieces([*ids, *long]) == ["tests/crash/test_a.py", "tests/simulation/test_model.py::test_run"]


def test_a_report_with_a_failure_or_an_error_is_not_green() -> None:
    ended = read_report(REPORT, commit="c1", piece="tests/crash/test_a.py", seconds=3)

    assert (ended.cases, ended.passed, ended.skipped) == (4, 1, 1)
    assert ended.failed == ("tests.crash.test_a.test_three", "tests.crash.test_a.test_four")
    assert not ended.is_green


def test_pieces_that_passed_at_this_commit_are_not_run_again(tmp_path: Path) -> None:
    log = tmp_path / "soak.log"
    lines = [
        Ended("c1", "green", 2, 2, 0, (), 1),
        Ended("c1", "mended", 2, 1, 0, ("test_x",), 1),
        Ended("c1", "mended", 2, 2, 0, (), 1),
        Ended("c1", "broken again", 2, 2, 0, (), 1),
        Ended("c1", "broken again", 2, 1, 0, ("test_x",), 1),
        Ended("c1", "ran nothing", 0, 0, 0, (), 1),
        Ended("c1", "skipped all", 2, 0, 2, (), 1),
        Ended("c0", "of another commit", 2, 2, 0, (), 1),
    ]
    log.write_text("".join(json.dumps(asdict(one)) + "\n" for one in lines))

    assert passed_pieces(log, {"c1"}) == {"green", "mended"}
    assert passed_pieces(log, {"c1234"}) == {"green", "mended"}
    assert passed_pieces(log, {"c1", "c0"}) == {"green", "mended", "of another commit"}
    assert passed_pieces(tmp_path / "missing.log", {"c1"}) == set()
