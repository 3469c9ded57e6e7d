"""Backfills: years of history in chunks, each once, and a new column for rows that are there.

Run it with `python examples/backfill.py [FOLDER]`; without a folder it works in a temporary one. Nothing here starts
Spark: the source gives rows in memory, and the new column's value is that of another column. Files, other tables, and
any expression of Spark SQL go the same way: see docs/backfills.md.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from typing import Any

import floodmark as fm

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="floodmark-backfill-") + "/lake"


class Archive:
    """A source is how far it goes, and the rows of a chunk. This one is away in the middle of its first night."""

    asked = 0

    def tip(self) -> str:
        return "2024-01-08"  # what lies before it is complete

    def read(self, chunk: Any) -> list[dict[str, Any]]:
        self.asked += 1
        if self.asked == 5:
            raise fm.Invalid("the archive is closed at night", chunk=chunk.name)
        return [{"id": chunk.number * 24 + hour, "ts": chunk.start + timedelta(hours=hour)} for hour in range(24)]


def say(done: int, total: int | None) -> None:
    print(f"  {done} of {total}")


with fm.open(folder, create=True, actor="example") as lake:
    lake.create_table("readings", "id long not null, ts timestamp")
    archive = Archive()
    days: dict[str, Any] = {"first": "2024-01-01", "last": "2024-01-08", "chunk": "1d", "column": "ts", "workers": 1}

    run = lake.backfill.history("archive", archive, "readings", rows_min=24, progress=say, **days)
    print(f"{run.outcome}: {run.error['message']}" if run.error else run.outcome)
    try:
        lake.backfill.check_range("archive", "2024-01-01", "2024-01-08")
    except fm.Incomplete as missing:
        print(f"not all of it is loaded: {missing.facts['chunk']}")

    # Goes on from where it is: what is done stays done.
    run = lake.backfill.history("archive", archive, "readings", rows_min=24, progress=say, **days)
    print(f"{run.outcome}: {run.job['rows']} rows, the source was asked {archive.asked} times")
    print(lake.backfill.history("archive", archive, "readings", rows_min=24, **days).outcome)
    print(f"loaded {lake.backfill.coverage('archive')['tables']['readings']['loaded']}")

    # A new column: old rows are filled batch by batch, new rows fill it themselves.
    run = lake.backfill.column("readings", "reading", "id", batch_rows=60, pause="1ms", progress=say)
    print(f"{run.outcome}: {run.job['rows']} rows filled")
    lake.append("readings", [{"id": 7, "ts": "2024-02-01T00:00:00Z"}])
    rows = lake.read_arrow("readings").read_all().to_pylist()
    assert all(row["reading"] == row["id"] for row in rows)
    print(f"all {len(rows)} rows have it; health: {lake.status()['health']}")
