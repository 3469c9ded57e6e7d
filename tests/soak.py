"""`make soak`: what `make test` leaves out, in pieces that can be run in several sittings. Hours of work in all.

A piece is a test file; in tests/simulation, where one may take an hour, a test with all its cases: which cases are
left to a soak is decided among all of a test. Each piece is a pytest of its own, two at a time. The log has one line of
JSON for each piece that ended: commit, counts, seconds. A piece that passed at this commit is not run again, so a soak
that was interrupted goes on where it stopped.

    make soak                                     all of it
    make soak ONLY="tests/crash tests/simulation/test_model.py"
    make soak SOAK="--log bench/soak.log --since 1a2b3c4"     pieces that passed at that commit count too

Failed tests print their output, and their names are in the log. The exit code is 1 if a piece failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
PYTEST = (sys.executable, "-m", "pytest", "-m", "soak", "--timeout=0", "-q")


@dataclass(frozen=True)
class Ended:
    """A line of the log."""

    commit: str
    piece: str
    cases: int
    passed: int
    skipped: int
    failed: tuple[str, ...]
    seconds: int

    @property
    def is_green(self) -> bool:
        return not self.failed and self.passed > 0


def pieces(node_ids: Iterable[str]) -> list[str]:
    """What is run at once, in the order found: the file of a test, or the test itself."""
    found: dict[str, None] = {}
    for node_id in node_ids:
        file = node_id.partition("::")[0]
        found[node_id.partition("[")[0] if file.startswith("tests/simulation/") else file] = None
    return list(found)


def passed_pieces(log: Path, commits: Iterable[str]) -> set[str]:
    """Pieces whose newest line of one of these commits is green."""
    green: dict[str, bool] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        ended = json.loads(line)
        if any(one.startswith(ended["commit"]) for one in commits):
            green[ended["piece"]] = Ended(**{**ended, "failed": tuple(ended["failed"])}).is_green
    return {piece for piece, is_green in green.items() if is_green}


def read_report(report: str, *, commit: str, piece: str, seconds: int) -> Ended:
    """The line of a piece, from pytest's JUnit report."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    failed = tuple(dict.fromkeys(f"{case.get('classname')}.{case.get('name')}" for case in bad))
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(bad)
    return Ended(commit, piece, len(cases), passed, skipped, failed, seconds)


def main() -> int:
    asked = _arguments()
    commit = _commit()
    done = passed_pieces(asked.log, {commit, *asked.since})
    wanted = [piece for piece in pieces(_collect(asked.paths)) if piece not in done]
    print(f"{len(wanted)} pieces to run, {len(done)} passed before; log: {asked.log}", flush=True)
    asked.log.parent.mkdir(parents=True, exist_ok=True)
    lock, failed = Lock(), []

    def run(piece: str) -> None:
        ended, output = run_piece(piece, commit)
        with lock:
            with asked.log.open("a") as log:
                log.write(json.dumps(asdict(ended)) + "\n")
            print(f"{ended.passed} of {ended.cases} passed in {ended.seconds} s: {piece}", flush=True)
            if not ended.is_green:
                failed.append(piece)
                print(output, flush=True)

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(run, wanted))
    print(f"{len(wanted)} pieces run, {len(failed)} of them failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Run what `make test` leaves out.")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files, folders or tests; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="pieces at a time")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "soak.log")
    parser.add_argument("--since", action="append", default=[], help="a commit whose green pieces are not run again")
    return parser.parse_args()


def _commit() -> str:
    """The commit of this tree; with a + if it has changes: what passes then counts for nothing later."""
    commit = _output("git", "rev-parse", "--short", "HEAD").strip()
    return commit if not _output("git", "status", "--porcelain") else f"{commit}+{int(time.time())}"


def _collect(paths: list[str]) -> list[str]:
    return [line for line in _output(*PYTEST, "--collect-only", *paths).splitlines() if "::" in line]


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def run_piece(piece: str, commit: str) -> tuple[Ended, str]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="floodmark-soak-", dir=os.environ.get("SCRATCH")) as folder:
        report = Path(folder) / "report.xml"
        command = (*PYTEST, f"--basetemp={folder}/pytest", f"--junitxml={report}", piece)
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = round(time.monotonic() - began)
        if report.exists():
            ended = read_report(report.read_text(), commit=commit, piece=piece, seconds=seconds)
        else:
            ended = Ended(commit, piece, 0, 0, 0, ("no report",), seconds)
        if ran.returncode and not ended.failed:
            # Interrupted, or killed: the report has the cases that ran before.
            ended = replace(ended, failed=(f"pytest ended with {ran.returncode}",))
    return ended, ran.stdout + ran.stderr


if __name__ == "__main__":
    sys.exit(main())
