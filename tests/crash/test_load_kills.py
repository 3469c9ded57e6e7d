"""Rows over HTTP from several clients while the daemon is killed again and again: what was answered 202 is in, once.

Real processes on every side. A table that is appended to, and one with a key where the last arrival wins; requests that
are sent again after a broken connection, ones that are given up, and ones that are sent again though answered.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.testing.invariants import check_lake
from tests.load.check import tally
from tests.load.clients import APPENDED, COLUMNS, KEYED, Load, Sent, body_of, finish
from tests.load.daemon import NO_KILLS, Kills, LoadDaemon, memory_of, run_load

MB = 1_000_000
LEAD_S = 1.0


def make(folder: Path) -> Path:
    path = folder / "lake"
    with fm.open(path, create=True, actor="test") as lake:
        lake.create_table("events", COLUMNS[APPENDED])
        lake.create_table("people", COLUMNS[KEYED], key=["id"])
    return path


def load_of(daemon: LoadDaemon, kind: str, seconds: float, per_s: float, rows: int) -> Load:
    table = "events" if kind == APPENDED else "people"
    start_s = time.monotonic() + LEAD_S
    return Load("127.0.0.1", daemon.port, table, kind, int(seconds * per_s), per_s, rows, start_s)


def check(path: Path, loads: list[Load], sent: dict[str, list[Sent]]) -> None:
    with fm.open(path, actor="test") as lake:
        check_lake(lake.catalog)
        for load in loads:
            found = tally(lake, load, sent[load.table])
            assert found.clean, found
            # Kills hit some requests, and hardly any was given up.
            assert found.acknowledged > 0.9 * load.requests * load.rows
        assert lake.catalog.spools.all(), "nothing went through a spool"


def kill_under_load(folder: Path, seconds: float, per_s: float, rows: int, count: int, seed: int) -> None:
    path = make(folder)
    with LoadDaemon(folder, ["--lake", str(path)]) as daemon:
        loads = [load_of(daemon, kind, seconds, per_s / 2, rows) for kind in (APPENDED, KEYED)]
        sent = run_load(daemon, loads, Kills(count, seed, 0.1 * seconds, seconds), folder)
        for load in loads:
            sent[load.table].append(finish(daemon.url, load))
        assert daemon.stop() == 0, daemon.errors.read_text()
        assert len(daemon.lives) == count + 1
    everything = [one for some in sent.values() for one in some]
    assert any(one.tries > 1 for one in everything), "no kill met a request"
    assert any(one.told_again for one in everything)
    check(path, loads, sent)


def test_what_was_acknowledged_is_in_once_whatever_is_killed_meanwhile(tmp_path: Path) -> None:
    kill_under_load(tmp_path, seconds=8, per_s=60, rows=50, count=3, seed=1)


@pytest.mark.soak
def test_a_minute_of_full_load_with_kills(tmp_path: Path) -> None:
    seed = int(os.environ.get("FLOODMARK_SOAK_SEED", "1"))
    kill_under_load(tmp_path, seconds=60, per_s=300, rows=100, count=8, seed=seed)


def check_memory(folder: Path, load: Load, share: float, more_bytes: int) -> None:
    """So much of the load is to warm up; whatever keeps what comes in with the rest would need more than is allowed."""
    path = make(folder)
    with LoadDaemon(folder, ["--lake", str(path)]) as daemon:
        load = replace(load, port=daemon.port).starting_in(LEAD_S)
        sent = run_load(daemon, [load], NO_KILLS, folder)
        answered_s = sorted(one.answered_s for one in sent[load.table])
        warm_s = answered_s[int(len(answered_s) * share)]
        memory = memory_of(daemon.samples, load.start_s, warm_s, answered_s[-1])
        sent[load.table].append(finish(daemon.url, load))
        assert daemon.stop() == 0
    assert load.requests * len(body_of(load, 0)) * (1 - share) > 2 * more_bytes
    assert memory.second_bytes < memory.first_bytes + more_bytes, memory
    check(path, [load], sent)


def test_memory_does_not_grow_with_what_came_in(tmp_path: Path) -> None:
    """Few rows of much text: six hundred megabytes within some seconds. The first commits still find their buffers."""
    load = Load("127.0.0.1", 0, "events", APPENDED, requests=400, per_s=40, rows=400, start_s=0.0, wide=3_750)
    check_memory(tmp_path, load, 0.5, 140 * MB)


@pytest.mark.soak
def test_memory_is_flat_in_a_minute_of_full_load(tmp_path: Path) -> None:
    load = Load("127.0.0.1", 0, "events", APPENDED, requests=18_000, per_s=300, rows=100, start_s=0.0, clients=4)
    check_memory(tmp_path, load, 0.2, 50 * MB)
