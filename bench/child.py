"""A process of its own that opens a lake and sends a batch again; prints the times as JSON.

Nothing but the standard library is imported before the clock runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

REPEATS = 9


def main(path: str, table: str, batch: str) -> None:
    times = {}
    started = time.perf_counter()
    import floodmark

    times["import_s"] = time.perf_counter() - started
    started = time.perf_counter()
    lake = floodmark.open(path)
    times["open_s"] = time.perf_counter() - started
    times["open_again_s"] = _median_s(lambda: floodmark.open(path).close())
    times["heal_s"] = _median_s(lake.recover)
    rows = [{"id": 1, "k": "never written: the batch is known"}]
    started = time.perf_counter()
    commit = lake.append(table, rows, batch=batch)
    times["first_s"] = time.perf_counter() - started
    times["again_s"] = _median_s(lambda: lake.append(table, rows, batch=batch))
    lake.close()
    sys.stdout.write(json.dumps({**times, "outcome": commit.outcome, "spark": "pyspark" in sys.modules}) + "\n")


def _median_s(action: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return median(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
