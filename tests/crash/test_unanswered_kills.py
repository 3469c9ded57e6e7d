"""Kill a run while it looks for a row that gets no answer: whatever was noted then, each row ends where it belongs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import floodmark as fm
from floodmark.serve.http.body import RequestLimits
from floodmark.testing.children import preload, run_killed
from floodmark.testing.invariants import check_lake
from floodmark.testing.receiver import Fault, Receiver, holds
from tests.between import Between, between
from tests.conftest import Place, rows
from tests.contract.test_receive_http import served

preload("tests.crash.test_unanswered_kills", "floodmark.sinks.sinks", "floodmark.sinks.http.destination")

BAD = 7
QUICK: dict[str, Any] = {"part_rows": 4, "backoff_s_max": 0.01, "tries": 2, "parallel": 2, "compression": "none"}
RUNS_MAX = 6


def ship(place: Place) -> None:
    with place.open() as lake:
        for _ in range(RUNS_MAX):
            lake.sinks.run("web")


def set_aside(place: Place, first: int, last: int) -> None:
    with place.open() as lake:
        lake.sinks.set_aside("web", first=first, last=last)


def make(place: Place, url: str, **settings: Any) -> None:
    with place.open(create=True, actor="test") as lake:
        lake.create_table("events", "id long not null, name string")
        lake.append("events", rows(*range(10)))
        lake.sinks.add("web", "http", tables="events", url=url, **{**QUICK, **settings})


def finish(lake: fm.Lake) -> bool:
    """Run until all is shipped; False if one row is left that nothing can be compared with."""
    return any(lake.sinks.run("web").outcome in ("shipped", "nothing_to_do") for _ in range(RUNS_MAX))


def aside(lake: fm.Lake) -> list[int]:
    return [json.loads(entry["line"])["id"] for entry in lake.sinks.quarantine("web")]


@pytest.fixture
def to_lake(new_place: Callable[[str], Place]) -> Iterator[tuple[Place, fm.Lake, Between]]:
    """A sending lake, and one behind a proxy that takes its rows."""
    place = new_place("sqlite")
    with new_place("sqlite").open(create=True) as target, ExitStack() as stack:
        target.create_table("events", "id long not null, name string")
        client = stack.enter_context(served(target, limits=RequestLimits()))
        proxy = stack.enter_context(between(str(client.base_url)))
        make(place, proxy.url + "/api/tables/{table}/rows?wait=committed")
        yield place, target, proxy
        stack.close()
        check_lake(target.catalog)


def there(lake: fm.Lake) -> list[int]:
    return sorted(row["id"] for row in lake.read_arrow("events").read_all().to_pylist())


def has_bad(found: list[dict[str, Any]]) -> bool:
    return any(row["id"] == BAD for row in found)


@pytest.mark.parametrize("passes_on", [False, True], ids=["never_arrives", "arrives_unanswered"])
@pytest.mark.parametrize(
    "point", ["unit.sealed:2", "unit.sealed:3", "unit.sealed:4", "unit.sent:3", "unit.acknowledged:3"]
)
def test_killed_while_a_row_without_an_answer_is_looked_for_another_lake_has_every_row_once(
    to_lake: tuple[Place, fm.Lake, Between], point: str, passes_on: bool
) -> None:
    place, target, proxy = to_lake
    proxy.fails, proxy.passes_on = has_bad, passes_on
    assert run_killed(ship, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        assert finish(lake)
        assert aside(lake) == ([] if passes_on else [BAD])
        proxy.fails = lambda found: False
        if not passes_on:
            assert lake.sinks.retry("web").rows == 1
        assert (there(target), aside(lake)) == (list(range(10)), [])
        assert len(lake.audit()) == 1
        check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["unit.sealed:2", "unit.sealed:3", "unit.sealed:4", "unit.acknowledged:3"])
def test_killed_while_a_row_without_an_answer_is_looked_for_a_foreign_endpoint_has_the_others(
    new_place: Callable[[str], Place], point: str
) -> None:
    place = new_place("sqlite")
    with Receiver() as receiver:
        make(place, receiver.url, split_unanswered=True)
        receiver.script(Fault(500, when=holds("id", BAD)))
        assert run_killed(ship, place, failpoint=point), f"{point} was never passed"
        with place.open() as lake:
            if not finish(lake):
                # The row is all that is left, and nothing can be compared with it: the error says what to do.
                error = lake.sinks.about("web")["error"]
                first, last = (int(number) for number in error["facts"]["part"].split("-"))
                assert f"--part {first}-{last}" in error["advice"]
                assert lake.sinks.set_aside("web", first=first, last=last) == 1
                assert finish(lake)
            assert aside(lake) == [BAD]
            assert Counter(row["id"] for row in receiver.rows) == Counter(set(range(10)) - {BAD})
            check_lake(lake.catalog)
        assert receiver.ledger.mismatched == []


def test_killed_while_a_part_is_set_aside_by_hand_the_next_run_finishes_it(
    to_lake: tuple[Place, fm.Lake, Between],
) -> None:
    place, target, proxy = to_lake
    with place.open() as lake:
        lake.sinks.run("web")  # it says who it is
        lake.append("events", rows(10, 11))
        proxy.fails = lambda found: bool(found)
        assert lake.sinks.run("web").outcome == "failed"
    assert run_killed(set_aside, place, 0, 2, failpoint="unit.sealed")
    with place.open() as lake:
        assert finish(lake)
        assert aside(lake) == [10, 11]
        proxy.fails = lambda found: False
        assert lake.sinks.retry("web").rows == 2
        assert there(target) == list(range(12))
        check_lake(lake.catalog)
