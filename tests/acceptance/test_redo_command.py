"""`backfill redo`, as a person meets it: the plan, the lines, what is refused, and the job afterwards."""

from __future__ import annotations

from pathlib import Path

import floodmark as fm
from floodmark.catalog.maintenance_state import Consumer
from floodmark.testing.children import preload
from floodmark.testing.invariants import check_lake
from tests.acceptance.test_backfill_commands import YEARS, asked, backfill, health, loaded, made

__all__ = ["made"]
preload("floodmark.cli.main", "floodmark.backfill.chunks.redo")


def test_a_chunk_is_loaded_again_by_one_command(made: Path) -> None:
    feed = made / "feed.py"
    good = feed.read_text()
    feed.write_text(good.replace("range(chunk.start, chunk.end)]", "range(chunk.start, chunk.end - 1)]"))
    backfill(made, *YEARS)
    assert len(loaded(made)) == 45
    feed.write_text(good)
    redo = ("redo", "years", "--range", "20..30")
    assert backfill(made, *redo, "--dry-run").stdout == "would delete 9 rows of 20..30 from events\n"
    assert len(loaded(made)) == 45
    assert backfill(made, *redo).lines == [
        "deleted 9 rows of 20..30 from events",
        "redone: years, 5 of 5 chunks (100.0 %) done",
    ]
    assert len(loaded(made)) == 46
    told = asked(made, "redo", "years", "--range", "0..20")
    assert (told["outcome"], told["status"], told["rows"]) == ("redone", "done", 48)
    assert (told["redone"]["range"], told["redone"]["tables"]["events"]["rows_out"]) == ("0..20", 18)
    backfill(made, "redo", "years", "--range", "25..30", code=2).says("Invalid", "only whole chunks", "20..30")
    backfill(made, "redo", "years", "--range", "25", code=2).says("Invalid", "invalid range")
    assert health(made) == "fine"


def test_what_was_shipped_is_refused_and_names_the_consumer_and_the_way_out(made: Path) -> None:
    backfill(made, *YEARS)
    with fm.open(made / "lake") as lake:
        head = lake.catalog.history.head("events")
        lake.catalog.maintenance.put_consumer(Consumer("warehouse", head.table_id, head.sequence))
    redo = ("redo", "years", "--range", "20..30")
    refused = backfill(made, *redo, code=2)
    refused.says("Invalid", "have been shipped", "warehouse", "--force")
    assert backfill(made, *redo, "--force").lines[0] == (
        "deleted 10 rows of 20..30 from events; already shipped to warehouse"
    )
    with fm.open(made / "lake", read_only=True) as lake:
        assert [row.outcome for row in lake.audit()] == ["redone"]
        check_lake(lake.catalog)
