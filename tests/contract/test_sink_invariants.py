"""The checks of sinks at rest see what they are for: one row of the catalog is made wrong at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, insert, update

import floodmark as fm
from floodmark import clock
from floodmark.catalog import tables
from floodmark.testing.faults import FaultyStorage
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, rows


@pytest.fixture
def lake(new_place: Callable[[str], Place], tmp_path: Path) -> Iterator[fm.Lake]:
    """A lake whose sink has an open unit with a sealed part: what it ships to broke."""
    storage = FaultyStorage(verbs=["put_if_absent"])
    with new_place("sqlite").open(create=True, storage=storage) as lake:
        lake.create_table("events", EVENTS)
        lake.append("events", rows(1, 2))
        lake.sinks.add("out", "files", tables="events", path=str(tmp_path / "out"))
        # The first object is the unit's witness, the second one its part.
        storage.fail_at = storage.calls_seen + 2
        assert lake.sinks.run("out").outcome == "failed"
        with lake.catalog.database.read() as tx:
            assert tx.execute(tables.parts.select()).one().state == "sealed"
        check_lake(lake.catalog)
        yield lake


def a_bad_row(lake: fm.Lake, **values: Any) -> Any:
    about = lake.catalog.sinks.find("out")
    texts = {"line": "{}", "reason": "bad", "unit": clock.new_id(), "table_id": about.tables[0].table_id}
    numbers = dict.fromkeys(("position", "tries", "first_ms", "last_ms"), 1)
    return insert(tables.quarantine).values(id=clock.new_id(), **{"sink": about.id, **texts, **numbers, **values})


BROKEN: dict[str, tuple[Callable[[fm.Lake], Any], str]] = {
    "pin_gone": (lambda lake: delete(tables.pins), "has no pin"),
    "pin_of_another_version": (lambda lake: update(tables.pins).values(version=1), "its pin holds 1"),
    "version_expired": (lambda lake: update(tables.commits).values(state="expired"), r"its pin holds \d+ \(expired\)"),
    "mark_gone": (lambda lake: delete(tables.consumers), "has no mark"),
    "mark_too_high": (lambda lake: update(tables.consumers).values(mark=99), "is at 99 of events"),
    "mark_moved": (lambda lake: update(tables.consumers).values(mark=0), "does not begin at its sink's mark"),
    "mark_of_nobody": (lambda lake: delete(tables.sink_tables), "is of no sink that follows"),
    "sink_gone": (lambda lake: delete(tables.sinks), "belongs to a sink that does not exist"),
    "unit_settled_with_all_it_had": (lambda lake: update(tables.units).values(state="settled"), "has ended and names"),
    "unit_gone": (lambda lake: delete(tables.units), "is of no open unit"),
    "unit_is_another": (lambda lake: update(tables.units).values(until=77), "is another by its record"),
    "parts_overlap": (
        lambda lake: insert(tables.parts).from_select(
            ["unit", "first", "last", "digest", "state", "detail"],
            tables.parts.select().with_only_columns(
                tables.parts.c.unit, tables.parts.c.first - 1, tables.parts.c.last, tables.parts.c.digest,
                tables.parts.c.state, tables.parts.c.detail,
            ),
        ),
        "overlap",
    ),
    "parts_of_nobody": (lambda lake: update(tables.parts).values(unit=clock.new_id()), "which is not open"),
    "bad_row_of_nobody": (lambda lake: a_bad_row(lake, sink=clock.new_id()), "in quarantine belongs to a sink"),
    "bad_row_sent_by_nobody": (lambda lake: a_bad_row(lake, retry_unit=clock.new_id()), "which is no open retry"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_of_sinks_is_told(lake: fm.Lake, what: str) -> None:
    breaks, told = BROKEN[what]
    with lake.catalog.database.write() as tx:
        tx.execute(breaks(lake))
    with pytest.raises(AssertionError, match=told):
        check_lake(lake.catalog)


def test_a_bad_row_that_waits_breaks_no_rule(lake: fm.Lake) -> None:
    with lake.catalog.database.write() as tx:
        tx.execute(a_bad_row(lake))
    check_lake(lake.catalog)
