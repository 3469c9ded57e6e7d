"""What takes long in the first lake of a process, done once in the fork server: imported there, and nowhere else.

A lake is made, recovered, checked and listed without a row: the statements of the catalog are compiled, and each child
has them. Children are forked afterwards, so nothing here may leave a thread: no row is written, as Arrow starts some.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import structlog

import floodmark as fm
from floodmark.testing.invariants import check_lake

_TASKS = Path("/proc/self/task")


def _count_threads() -> int:
    return len(os.listdir(_TASKS)) if _TASKS.exists() else 1


def _use_a_lake(path: str) -> None:
    with fm.open(path, create=True) as lake:
        lake.create_table("events", "id long not null, name string", key=["id"])
        lake.recover()
        check_lake(lake.catalog)
    with fm.open(path) as lake:
        lake.tables()


_before = _count_threads()
with TemporaryDirectory() as _folder:
    _use_a_lake(f"{_folder}/lake")
# Logs of this process go to the stream that it had then; each child has its own.
structlog.reset_defaults()
_deadline = time.monotonic() + 10
while _count_threads() > _before:
    assert time.monotonic() < _deadline, "a thread was left: what is forked beside one may wait for it for ever"
    time.sleep(0.01)
