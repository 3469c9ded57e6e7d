"""A lake with ways out: what is written to it, what the killed processes do, and what is at each destination.

Every change is a record that is performed on the lake and folded by plain Python: `expected` says what must be at the
other end, without asking Floodmark. The table `events` has no key and holds identical rows on purpose, so a doubled row
is seen by its count; `people` has a key, and rows of it change and go.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select

import floodmark as fm
from floodmark.catalog import tables
from floodmark.sinks.outcome import SinkRun
from floodmark.testing.children import preload
from tests.conftest import Place

# What a run of a sink imports late, before the children are forked.
preload(
    "tests.crash.sink_world",
    "floodmark.sinks.sinks",
    "floodmark.sinks.files.destination",
    "floodmark.sinks.http.destination",
    "floodmark.sinks.iceberg.destination",
    "floodmark.sinks.iceberg.clean",
    "floodmark.rows.reading.parts",
    "floodmark.maintenance.maintenance",
    "floodmark.maintenance.compact",
    "pydantic.dataclasses",
    "pyiceberg.avro.decoder_fast",
    "pyiceberg.catalog.sql",
)

SINK, TWIN = "out", "twin"
EVENTS, PEOPLE = "events", "people"
SCHEMA = "id long not null, name string, at timestamp"
# Rows whose id can be divided by four are older than that.
NOW, KEPT = "2026-02-05T00:00:00Z", "30d"

Row = tuple[int, str]


@dataclass(frozen=True)
class Change:
    """Rows to append or merge, or the ids that a delete takes out."""

    verb: str
    table: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Contents:
    """What somebody has of the two tables: how often each event, and each person once."""

    events: Counter[Row] = field(default_factory=Counter)
    people: dict[int, str] = field(default_factory=dict)

    def of(self, table: str) -> Counter[Row] | dict[int, str]:
        return self.events if table == EVENTS else self.people


def moment(number: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number % 4 * 10)


def append(table: str, numbers: Iterable[int], name: str) -> Change:
    return Change("append", table, tuple((number, name) for number in numbers))


def merge(numbers: Iterable[int], name: str) -> Change:
    return Change("merge", PEOPLE, tuple((number, name) for number in numbers))


def delete(numbers: Iterable[int]) -> Change:
    return Change("delete", PEOPLE, tuple((number, "") for number in numbers))


def called(lake: fm.Lake, table: str) -> str:
    """The table's name now; at the other end it has the one that it began with."""
    return table if any(head.table == table for head in lake.heads()) else f"{table}_now"


def rename(lake: fm.Lake, table: str) -> None:
    """Give the table its other name."""
    name = called(lake, table)
    lake.rename_table(name, f"{table}_now" if name == table else table)


def perform(lake: fm.Lake, change: Change) -> None:
    name = called(lake, change.table)
    if change.verb == "delete":
        lake.delete(name, f"id in ({', '.join(str(number) for number, _ in change.rows)})")
        return
    rows = [{"id": number, "name": name, "at": moment(number)} for number, name in change.rows]
    getattr(lake, change.verb)(name, rows)


def expected(changes: Iterable[Change]) -> Contents:
    """What these changes come to at a destination.

    Retention is no change: what it takes out of the lake stays where it was shipped to. So nobody deletes what it may
    have taken, or the lake would have nothing to tell.
    """
    found = Contents()
    for change in changes:
        for number, name in change.rows:
            assert change.verb != "delete" or number % 4, change
            if change.table == EVENTS:
                found.events[number, name] += 1
            elif change.verb == "delete":
                found.people.pop(number, None)
            else:
                found.people[number] = name
    return found


def difference(wanted: Contents, found: Contents) -> tuple[int, int]:
    """How many rows are not there as they should be, and how many are there that should not be."""
    people = [Counter(contents.people.items()) for contents in (wanted, found)]
    lost = (wanted.events - found.events) + (people[0] - people[1])
    doubled = (found.events - wanted.events) + (people[1] - people[0])
    return lost.total(), doubled.total()


def folded(table: str, rows: Iterable[dict[str, Any]]) -> Counter[Row] | dict[int, str]:
    """What rows that were shipped come to, in the order in which they are given; whole rows, or it fails here."""
    events: Counter[Row] = Counter()
    people: dict[int, str] = {}
    for row in rows:
        number, gone = row["id"], row["_change"] == "delete"
        if gone:
            assert (table, row["name"], row["at"]) == (PEOPLE, None, None), row
            people.pop(number, None)
            continue
        check_row(row)
        events[number, row["name"]] += 1
        people[number] = row["name"]
    return events if table == EVENTS else people


def check_row(row: dict[str, Any]) -> None:
    at = row["at"] if isinstance(row["at"], datetime) else datetime.fromisoformat(row["at"])
    assert at.astimezone(UTC) == moment(row["id"]), row


# ── the changes of the tests that kill at a failpoint ──

# Two files of events, of more than one part each, with rows that are the same. Deletions are not in the last commit of
# a unit: that one is pinned, those before it expire.
FIRST: Sequence[Change] = (
    append(EVENTS, [*range(20), 3, 3], "first"),
    append(EVENTS, [*range(20), 3], "first"),
    append(PEOPLE, range(12), "first"),
    delete([1, 7]),
    merge(range(8, 18), "second"),
)
LATER: Sequence[Change] = (
    append(PEOPLE, [20, 21, 22], "third"),
    delete([2, 22]),
    merge([0, 7, 8], "third"),
)
MEANWHILE: Sequence[Change] = (
    append(EVENTS, [3, 3, 30], "first"),
    merge([1, 5, 9], "fourth"),
    delete([3, 21]),
)


def make(lake: fm.Lake) -> None:
    lake.create_table(EVENTS, SCHEMA)
    lake.create_table(PEOPLE, SCHEMA, key=["id"])
    for table in (EVENTS, PEOPLE):
        lake.maintain.set_policy(table, KEPT, column="at")


def disturb(lake: fm.Lake, changes: Iterable[Change] = MEANWHILE) -> None:
    """All that may happen between two tries: other names, new rows, compaction, retention, expiry, sweep, at once."""
    for table in (EVENTS, PEOPLE):
        rename(lake, table)
    for change in changes:
        perform(lake, change)
    for table in (EVENTS, PEOPLE):
        assert lake.maintain.compact(called(lake, table), files_min=2).outcome in ("compacted", "nothing_to_do")
    forget(lake)


def forget(lake: fm.Lake) -> None:
    assert lake.maintain.retain(now=NOW).outcome in ("retained", "protected", "nothing_to_do")
    assert lake.maintain.expire(keep="0s").outcome in ("expired", "nothing_to_do")
    assert lake.maintain.sweep(grace="0s").outcome in ("swept", "nothing_to_do")


# ── what the killed processes do ──


def ship(place: Place) -> str:
    with place.open() as lake:
        done = lake.sinks.run(SINK, until_empty=True)
    assert done.outcome in ("shipped", "nothing_to_do"), as_text(done)
    return done.outcome


def ship_for_ever(place: Place) -> None:
    """Run the sink again and again, until somebody kills this process. The other end may be away for a while."""
    with place.open() as lake:
        while True:
            done = lake.sinks.run(SINK)
            away = all(isinstance(table.error, fm.Unavailable | None) for table in done.tables)
            assert done.outcome in ("shipped", "nothing_to_do") or (done.outcome == "failed" and away), as_text(done)
            time.sleep(0.002)


def retry(place: Place) -> str:
    with place.open() as lake:
        return lake.sinks.retry(SINK).outcome


def as_text(done: SinkRun) -> str:
    return json.dumps(done.as_dict(), default=str)


# ── what the catalog says ──


def open_units(lake: fm.Lake) -> list[str]:
    with lake.catalog.database.read() as tx:
        return list(tx.execute(select(tables.units.c.id).where(tables.units.c.state == "open")).scalars())


def check_at_rest(lake: fm.Lake, *, released: bool = True) -> None:
    """Nothing is open, pinned or sealed any more, the marks are at the heads, and nobody holds the sink."""
    with lake.catalog.database.read() as tx:
        for rows in (tables.pins, tables.parts, tables.quarantine):
            left = tx.execute(select(rows)).all()
            assert not left, f"{rows.name}: {left}"
        states = set(tx.execute(select(tables.units.c.state)).scalars())
        assert states <= {"settled"}, states
    about = lake.sinks.about(SINK)
    # A dead process that held it at the end does not count.
    assert not released or (about["running"], about["error"]) == (None, None), about
    for table in about["tables"]:
        assert (table["mark"], table["lag_rows"], table["open_unit"]) == (table["head"], 0, None), table


# ── a random writer ──


class Writer:
    """Changes the lake at random, and remembers what it did."""

    def __init__(self, lake: fm.Lake, seed: int) -> None:
        self.changes: list[Change] = []
        self._lake = lake
        self._dice = random.Random(seed)
        self._number = 0

    def step(self) -> None:
        dice = self._dice
        self._number += 1
        verb = dice.choice(["append", "append", "merge", "merge", "delete", "compact", "forget", "rename"])
        name = f"change {self._number % 5}"
        if verb == "append":
            # The same few rows again and again.
            self.write(append(EVENTS, (dice.randrange(8) for _ in range(dice.randint(1, 12))), name))
        elif verb == "merge":
            self.write(merge(dice.sample(range(40), dice.randint(1, 8)), name))
        elif verb == "delete":
            self.write(delete(dice.sample([one for one in range(40) if one % 4], dice.randint(1, 4))))
        elif verb == "rename":
            rename(self._lake, dice.choice([EVENTS, PEOPLE]))
        elif verb == "compact":
            done = self._lake.maintain.compact(called(self._lake, dice.choice([EVENTS, PEOPLE])), files_min=3)
            assert done.outcome in ("compacted", "nothing_to_do", "below_threshold"), done.as_dict()
        elif self._number % 3 == 0:
            forget(self._lake)

    def write(self, change: Change) -> None:
        perform(self._lake, change)
        self.changes.append(change)
