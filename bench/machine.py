"""What a figure depends on besides the code: processor, memory, disk, versions, and what else was running."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench.measure import in_turns

PACKAGES = ("floodmark", "pyspark", "pyiceberg", "pyarrow", "sqlalchemy", "obstore")
# With more of the machine than this at work for others, times say little; ratios still do.
QUIET_SHARE = 0.1


def facts(folder: Path) -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "file_system": _file_system(folder),
        "fsync_ms": round(_fsync_s(folder) * 1000, 3),
        "python": platform.python_version(),
        "java": _java(),
        **{package: version(package) for package in PACKAGES},
    }


class Others:
    """How many cores are busy with what is not this run, since the last time it was asked.

    All that the machine did, less what this process and those below it did. A load average would count our own work.
    """

    def __init__(self) -> None:
        self._all_s, self._own_s, self._at_s = _all_busy_s(), own_busy_s(), time.monotonic()

    def busy_cores(self) -> float:
        before = self._all_s, self._own_s, self._at_s
        self._all_s, self._own_s, self._at_s = _all_busy_s(), own_busy_s(), time.monotonic()
        others_s = (self._all_s - before[0]) - (self._own_s - before[1])
        return round(max(0.0, others_s / (self._at_s - before[2])), 2)


def is_quiet(busy_cores: float) -> bool:
    return busy_cores <= QUIET_SHARE * (os.cpu_count() or 1)


def _all_busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + getattr(times, "irq", 0) + getattr(times, "softirq", 0))


def own_busy_s() -> float:
    """With those that have ended: a process keeps the time of its children."""
    total = 0.0
    for process in (this := psutil.Process(), *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown"


def _file_system(folder: Path) -> str:
    parts = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    return max(parts, key=lambda part: len(part.mountpoint)).fstype if parts else "unknown"


def _fsync_s(folder: Path) -> float:
    """A small write made durable: the floor under every commit."""
    path = folder / "fsync"

    def write() -> None:
        with path.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())

    return in_turns(21, write)[0].median


def _java() -> str:
    try:
        answer = subprocess.run(["java", "-version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    found = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    return found[1] if found else "unknown"
