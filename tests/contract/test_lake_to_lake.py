"""From lake to lake over HTTP: what arrives is what was there, once, along a chain of lakes, for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

import floodmark as fm
from floodmark.serve.http.body import RequestLimits
from floodmark.testing.invariants import check_lake
from tests.conftest import EVENTS, Place, at, rows
from tests.contract.test_receive_http import served

ZOO = (
    "id long not null, i int, d double, f float, b boolean, s string, day date, ts timestamp, tsn timestamp_ntz,"
    " amount decimal(20, 4), bin binary, tags array<string>, attrs map<string, long>,"
    " place struct<x: double, y: array<int>>"
)


class Lost(Exception):
    """The process did not get further."""


def lose() -> None:
    raise Lost


class Chain:
    """Lakes that send to each other, each one to the next; all of them in this process, at real sockets."""

    def __init__(self, new_place: Callable[[str], Place], stack: ExitStack, length: int) -> None:
        self.lakes = [stack.enter_context(new_place("sqlite").open(create=True)) for _ in range(length)]
        self._stack = stack

    def connect(self, tables: list[str], **settings: Any) -> None:
        for source, target in zip(self.lakes, self.lakes[1:], strict=False):
            client = self._stack.enter_context(served(target, limits=RequestLimits()))
            url = f"{str(client.base_url).rstrip('/')}/api/tables/{{table}}/rows?wait=committed"
            source.sinks.add("next", "http", tables=tables, url=url, backoff_s_max=0.01, **settings)

    def flow(self) -> None:
        for lake in self.lakes[:-1]:
            done = lake.sinks.run("next", until_empty=True)
            assert done.error is None, done.error


@pytest.fixture
def new_chain(new_place: Callable[[str], Place]) -> Iterator[Callable[[int], Chain]]:
    with ExitStack() as stack:
        yield lambda length: Chain(new_place, stack, length)


def content(lake: fm.Lake, table: str) -> list[str]:
    return sorted(repr(row) for row in lake.read_arrow(table).read_all().to_pylist())


def test_a_chain_of_lakes_replicates_whatever_is_lost_on_the_way(new_chain: Callable[[int], Chain]) -> None:
    chain = new_chain(3)
    first, middle, last = chain.lakes
    for lake in chain.lakes:
        lake.create_table("events", EVENTS)
        lake.create_table("people", EVENTS, key=["id"])
    chain.connect(["events", "people"], part_rows=3)
    first.append("events", [{"id": 1, "name": "same"}] * 8)
    first.merge("people", rows(*range(10)))
    for lake, point in ((first, "unit.sent"), (middle, "unit.shipped"), (first, "unit.shipped")):
        first.append("events", rows(*range(5)))
        first.merge("people", [{"id": 3, "name": point}, {"id": 11, "name": point}])
        first.delete("people", "id = 4 or id = 11")
        if lake is middle:
            first.sinks.run("next", until_empty=True)
        with at(point, lose), pytest.raises(Lost):
            lake.sinks.run("next")
        for one in chain.lakes:
            one.maintain.compact(files_min=2)
        chain.flow()
    for lake in (middle, last):
        assert content(lake, "events") == content(first, "events")
        assert content(lake, "people") == content(first, "people")
        check_lake(lake.catalog)
    assert Counter(row["id"] for row in last.read_arrow("events").read_all().to_pylist())[1] == 8 + 3


def test_values_of_every_type_arrive_as_they_are(new_chain: Callable[[int], Chain]) -> None:
    chain = new_chain(2)
    for lake in chain.lakes:
        lake.create_table("zoo", ZOO, key=["id"])
    chain.connect(["zoo"])
    source, target = chain.lakes
    source.append(
        "zoo",
        [
            {
                "id": 1,
                "i": -(2**31),
                "d": 0.1 + 0.2,
                "f": 1.5,
                "b": True,
                "s": 'quotes " and \\ and \n and 𝄞 and \u2028',
                "day": date(1, 1, 1),
                "ts": datetime(2026, 11, 15, 10, 0, 0, 123456, tzinfo=UTC),
                "tsn": datetime(9999, 12, 31, 23, 59, 59, 999999),
                "amount": Decimal("-1234567890123456.7891"),
                "bin": b"\x00\xff\n",
                "tags": ["", None, "ü"],
                "attrs": {"k": 2**62, "": None},
                "place": {"x": float("inf"), "y": [1, None]},
            },
            {"id": 2, "d": float("nan"), "s": "", "tags": [], "attrs": {}, "place": {"x": None, "y": None}},
            {"id": 3},
        ],
    )
    chain.flow()
    assert content(target, "zoo") == content(source, "zoo")
    source.delete("zoo", "id = 1")
    chain.flow()
    assert content(target, "zoo") == content(source, "zoo")


def test_a_replay_into_a_table_with_a_key_changes_nothing_there(new_chain: Callable[[int], Chain]) -> None:
    chain = new_chain(2)
    for lake in chain.lakes:
        lake.create_table("people", EVENTS, key=["id"])
    chain.connect(["people"])
    source, target = chain.lakes
    source.merge("people", rows(1, 2, 3))
    chain.flow()
    before = target.catalog.history.head("people").sequence
    source.sinks.replay("next", start="beginning")
    done = source.sinks.run("next")
    assert (done.outcome, done.rows) == ("shipped", 3)
    changed = target.changes("people", since=before).arrow().read_all()
    assert (changed.num_rows, content(target, "people")) == (0, content(source, "people"))


def test_a_receiver_whose_table_is_another_one_is_refused(new_chain: Callable[[int], Chain]) -> None:
    from tests.contract.test_sinks import drop_by_hand

    chain = new_chain(2)
    for lake in chain.lakes:
        lake.create_table("events", EVENTS)
    chain.connect(["events"])
    source, target = chain.lakes
    source.append("events", rows(1))
    chain.flow()
    drop_by_hand(target, "events")
    target.create_table("events", EVENTS)
    source.append("events", rows(2))
    done = source.sinks.run("next")
    assert (done.outcome, done.exit_code, content(target, "events")) == ("refused", 5, [])
    source.sinks.replay("next", start="beginning")
    chain.flow()
    # The stranger was told whom the sender expects, and took nothing before somebody chose.
    assert Counter(row["id"] for row in target.read_arrow("events").read_all().to_pylist()) == {1: 1, 2: 1}


def test_a_table_of_another_shape_stops_the_run_before_everything_is_set_aside(
    new_chain: Callable[[int], Chain],
) -> None:
    chain = new_chain(2)
    source, target = chain.lakes
    source.create_table("events", EVENTS)
    target.create_table("events", "id long not null")
    chain.connect(["events"], quarantine_max=4, part_rows=50)
    source.append("events", rows(*range(100)))
    done = source.sinks.run("next")
    assert (done.outcome, done.error and done.error.kind) == ("failed", "Invalid")
    assert len(source.sinks.quarantine("next")) == 4
    assert content(target, "events") == []
    target.append("events", [{"id": 1, "name": "x"}], evolve=True)
    chain.flow()
    assert source.sinks.retry("next").rows == 4
    assert len(content(target, "events")) == 101
