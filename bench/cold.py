"""Processes that are asked about state and start no Spark: status, nothing new, open.

Cold is a new process with warm file caches. Bytecode is kept in a folder of the run's own, whatever the environment
says about it, and the first, unmeasured call fills it: an installed command has its bytecode too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.measure import Goal, Line, Samples, in_turns, took
from bench.workshop import SCHEMA, TABLE, Workshop

HEAVY = ("pyspark", "pyarrow", "pyiceberg")
BATCH = "batch-of-before"
ROOT = Path(__file__).parent.parent


def run(shop: Workshop) -> Iterator[Line]:
    lake = shop.new_lake("cold")
    lake.create_table(TABLE, SCHEMA)
    for number in range(shop.sizes.early_at):
        lake.append(TABLE, shop.batch, batch=BATCH if number == 0 else None)
    path = lake.location.removeprefix("file://")
    lake.close()
    yield from _status(shop, path)
    yield from _children(shop, path)


def _status(shop: Workshop, path: str) -> Iterator[Line]:
    environment = _environment(shop)
    # The real command; `-m` only if it was not installed beside this Python.
    installed = Path(sys.executable).with_name("floodmark")
    command = [str(installed)] if installed.exists() else [sys.executable, "-m", "floodmark.cli.main"]

    def status() -> None:
        subprocess.run([*command, "--lake", path, "status"], env=environment, check=True, capture_output=True)

    def bare() -> None:
        subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)

    imported = _imported_by_status(path, environment)
    samples, python = in_turns(shop.sizes.cold_repeats, status, bare)
    note = f"imports {', '.join(imported)}" if imported else f"without {', '.join(HEAVY)}"
    yield took("floodmark status, cold process", samples, unit=" s", goal=Goal(0.8), note=note)
    yield Line("heavy libraries imported by status", "", len(imported), goal=Goal(0), note=", ".join(HEAVY))
    yield took("python alone, cold process", python, unit=" s", note="part of it")


def _imported_by_status(path: str, environment: dict[str, str]) -> list[str]:
    program = (
        "import json, sys\n"
        "from floodmark.cli.main import main\n"
        "try:\n"
        f"    main(['--lake', {path!r}, '--json', 'status'])\n"
        "finally:\n"
        f"    sys.stderr.write(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return found


def _children(shop: Workshop, path: str) -> Iterator[Line]:
    _child(shop, path)
    answers = [_child(shop, path) for _ in range(shop.sizes.cold_repeats)]
    if any(answer["outcome"] != "already_committed" for answer in answers):
        raise RuntimeError(f"a known batch was not reported: {answers}")
    spark = sum(answer["spark"] for answer in answers)
    yield took("open, cold process", _samples(answers, "import_s", "open_s"), unit=" s", note="import floodmark, open")
    yield took("open, warm process", _samples(answers, "open_again_s"), note="nothing to recover")
    yield took("recovery, nothing to recover", _samples(answers, "heal_s"), note="warm; at every write")
    yield took("known batch, cold process", _samples(answers, "first_s"), unit=" s", note="Iceberg comes in")
    yield took("known batch, warm process", _samples(answers, "again_s"))
    yield Line("of these processes, with pyspark imported", "", spark, repeats=len(answers), goal=Goal(0))


def _child(shop: Workshop, path: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.child", path, TABLE, BATCH],
        env=_environment(shop),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _samples(answers: list[dict[str, Any]], *names: str) -> Samples:
    return Samples(tuple(sum(answer[name] for name in names) for answer in answers))


def _environment(shop: Workshop) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(shop.folder / "bytecode")}
