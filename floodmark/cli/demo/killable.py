"""Work of the demo that is done in a process of its own, so that it can be killed: jobs and maintenance."""

from __future__ import annotations

import sys
from datetime import datetime

from floodmark.cli.demo import rows as demo_rows
from floodmark.errors import Unavailable
from floodmark.lake import Lake
from floodmark.opening import open as open_lake

HISTORY, COLUMN = "history", "column"


def load_history(lake: Lake, today: datetime) -> None:
    first, last = demo_rows.history_range(today)
    run = lake.backfill.history(
        HISTORY, "floodmark.cli.demo.rows:history", "orders",
        chunk="1d", first=first.isoformat(), last=last.isoformat(), column="ts", rows_min=demo_rows.ORDERS_PER_DAY,
    )  # fmt: skip
    _check(HISTORY, run.outcome, {"done", "nothing_to_do"})


def fill_column(lake: Lake, _today: datetime) -> None:
    run = lake.backfill.column("orders", "buyer", "customer", batch_rows=2_000, pause="1ms")
    _check(COLUMN, run.outcome, {"done", "nothing_to_do"})


def compact(lake: Lake, _today: datetime) -> None:
    lake.maintain.compact(files_min=2)


def retain(lake: Lake, today: datetime) -> None:
    lake.maintain.set_policy("orders", f"{demo_rows.KEEP_DAYS}d", column="ts")
    lake.maintain.retain("orders", now=demo_rows.retention_time(today))


def _check(what: str, outcome: str, good: set[str]) -> None:
    if outcome not in good:
        raise Unavailable("a job did not finish", job=what, outcome=outcome)


WORK = {HISTORY: load_history, COLUMN: fill_column, "compaction": compact, "retention": retain}

if __name__ == "__main__":
    with open_lake(sys.argv[1], actor="demo") as opened:
        WORK[sys.argv[2]](opened, datetime.fromisoformat(sys.argv[3]))
