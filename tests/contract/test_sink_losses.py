"""Rows that retention took before an unprotected sink had them: counted where they went, and said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import floodmark as fm
from floodmark.catalog import tables
from floodmark.cli.sink_text import run_lines, status_rows
from floodmark.sinks.status import sink_report
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place

NOW = "2026-02-01T00:00:00Z"


@pytest.fixture(params=DATABASES)
def lake(request: pytest.FixtureRequest, new_place: Callable[[str], Place]) -> Iterator[fm.Lake]:
    """A table that keeps ten days, with three old rows and one new."""
    with new_place(request.param).open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, at timestamp")
        lake.maintain.set_policy("events", "10d", column="at")
        lake.append("events", [{"id": number, "at": datetime(2026, 1, 1, tzinfo=UTC)} for number in range(3)])
        lake.append("events", [{"id": 9, "at": datetime(2026, 1, 31, tzinfo=UTC)}])
        yield lake
        check_lake(lake.catalog)


def test_rows_that_an_unprotected_sink_lost_are_in_its_status_the_history_and_the_next_run(
    lake: fm.Lake, tmp_path: Path
) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"), protected=False)
    assert lake.maintain.retain(now=NOW).outcome == "retained"
    about = lake.sinks.about("out")
    assert about["tables"][0]["rows_lost"] == 3
    assert status_rows(sink_report(lake.catalog, lake.catalog.sinks.find("out")))[0]["lost"] == 3
    assert "up to 3 not sent by sink out" in lake.history(limit=1)[0].message
    done = lake.sinks.run("out")
    assert (done.outcome, done.rows, done.as_dict()["tables"][0]["rows_lost"]) == ("shipped", 1, 3)
    assert "retention deleted up to 3 rows before they were sent" in run_lines(done)[0]
    # It is said once; the status keeps it.
    lake.append("events", [{"id": 10, "at": datetime(2026, 1, 31, tzinfo=UTC)}])
    assert "rows_lost" not in lake.sinks.run("out").as_dict()["tables"][0]
    assert lake.sinks.about("out")["tables"][0]["rows_lost"] == 3


def test_a_run_that_finds_nothing_left_says_what_was_lost(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"), protected=False)
    lake.maintain.retain(now="2027-01-01T00:00:00Z")
    done = lake.sinks.run("out")
    assert (done.outcome, done.rows, done.tables[0].detail["rows_lost"]) == ("nothing_to_do", 0, 4)


def test_what_a_sink_had_before_retention_is_not_lost(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"), protected=False)
    assert lake.sinks.run("out").rows == 4
    lake.maintain.retain(now=NOW)
    assert lake.sinks.about("out")["tables"][0]["rows_lost"] == 0
    assert "not sent" not in lake.history(limit=1)[0].message


def test_a_protected_sink_that_retention_was_forced_past_is_told_too(lake: fm.Lake, tmp_path: Path) -> None:
    lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
    assert lake.maintain.retain(now=NOW).outcome == "protected"
    lake.maintain.retain(now=NOW, force=True)
    assert lake.sinks.about("out")["tables"][0]["rows_lost"] == 3
    lake.sinks.remove("out")
    with lake.catalog.database.read() as tx:
        assert tx.execute(tables.sink_notes.select()).all() == []
