"""What tests of the intake share: taking rows as a client would, and knowing what has to be in the table then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import floodmark as fm
from floodmark.ingest.intake import Intake, IntakeLimits, Landed, Taken

QUICK = IntakeLimits(group_wait_ms=20)
# A group is fed only when it is asked for: what waits stays together.
SLOW = IntakeLimits(group_wait_ms=3_600_000)
WAIT_S = 30.0


def folder_of(lake: fm.Lake) -> Path:
    return Path(lake.location.removeprefix("file://")) / "spool"


def table_id(lake: fm.Lake, table: str) -> str:
    return lake.catalog.history.head(table).table_id


@contextmanager
def intake_of(lake: fm.Lake, limits: IntakeLimits = QUICK) -> Iterator[Intake]:
    intake = Intake(lake.engine, folder_of(lake), limits)
    intake.start()
    try:
        yield intake
    finally:
        intake.close()


def lines(*rows: Any) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def take(lake: fm.Lake, intake: Intake, table: str, *rows: Any, **options: Any) -> Taken:
    taken = intake.take(table, table_id(lake, table), lines(*rows), len(rows), **options)
    return taken.result(WAIT_S)


def bring(lake: fm.Lake, intake: Intake, table: str, *rows: Any, **options: Any) -> Landed:
    """Take rows and wait until they are fed."""
    taken = take(lake, intake, table, *rows, **options)
    return intake.wait(table_id(lake, table), taken.record, WAIT_S)


def rows_of(lake: fm.Lake, table: str) -> list[dict[str, Any]]:
    """What is in a table, without nulls, in an order that does not depend on files."""
    found = lake.read_arrow(table).read_all().to_pylist()
    plain = [{name: value for name, value in row.items() if value is not None} for row in found]
    return sorted(plain, key=lambda row: (row["id"], json.dumps(row, sort_keys=True)))


def state_of(intake: Intake, table: str) -> dict[str, Any]:
    return next(one for one in intake.states() if one["table"] == table)
