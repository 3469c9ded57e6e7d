"""Kill runs of sinks at every failpoint and at random; whatever happens meanwhile, each row is there once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import floodmark as fm
from floodmark import failpoints
from floodmark.testing.children import run_child, run_killed
from floodmark.testing.invariants import check_lake
from tests.conftest import DATABASES, Place
from tests.crash.sink_ends import End, FilesEnd, HttpEnd, IcebergEnd, LakeEnd, NewEnd, ends
from tests.crash.sink_world import (
    EVENTS,
    FIRST,
    LATER,
    MEANWHILE,
    PEOPLE,
    SINK,
    TWIN,
    Change,
    as_text,
    check_at_rest,
    disturb,
    expected,
    forget,
    make,
    open_units,
    perform,
    retry,
    ship,
)

# Killed there, no unit is open: it is not yet, or not any more.
NOT_OPEN = ("unit.held", "unit.settled")


@pytest.fixture
def new_end(tmp_path: Path) -> Iterator[NewEnd]:
    with ends(tmp_path) as make_end:
        yield make_end


@dataclass(frozen=True)
class Case:
    """Which unit is under way when the process is killed: the `number`-th of `table`."""

    tables: tuple[str, ...]
    before: tuple[Change, ...]
    killed: tuple[Change, ...]
    table: str
    number: int


CASES = {
    "events_from_the_beginning": Case((EVENTS, PEOPLE), (), tuple(FIRST), EVENTS, 0),
    "people_from_the_beginning": Case((PEOPLE,), (), tuple(FIRST), PEOPLE, 0),
    "people_later": Case((EVENTS, PEOPLE), tuple(FIRST), tuple(LATER), PEOPLE, 1),
}
ENDS: tuple[type[End], ...] = (FilesEnd, HttpEnd, IcebergEnd, LakeEnd)
# Which unit it is matters to the catalog, not to the destination: each is killed at every point with files, and with
# the others the one that has both rows and deletions; the rest with `-m soak`.
KILLS = [
    *(
        pytest.param(
            end.name,
            point,
            case,
            marks=() if end is FilesEnd or case == "people_later" else pytest.mark.soak,
        )
        for end in ENDS
        for point in sorted(end.points)
        for case in CASES
        if end is FilesEnd or case != "people_from_the_beginning"
    ),
    # Some parts are there and some are not.
    *(
        (end, f"unit.{step}", "events_from_the_beginning")
        for end in ("http", "lake")
        for step in ("sealed:2", "sent:2", "sent:3", "acknowledged:2")
    ),
]


def prepare(place: Place, case: Case, end: End, twin: End) -> None:
    """The sink, and its twin that is a run ahead: what it shipped is what the killed one has to ship."""
    with place.open(create=True, actor="test") as lake:
        make(lake)
        for name, other in ((SINK, end), (TWIN, twin)):
            lake.sinks.add(name, other.kind, tables=case.tables, **other.settings)
        for change in case.before:
            perform(lake, change)
        if case.before:
            run(lake, SINK)
            run(lake, TWIN)
        for change in case.killed:
            perform(lake, change)
        run(lake, TWIN)
        lake.sinks.remove(TWIN)


def run(lake: fm.Lake, sink: str = SINK) -> int:
    """Run it until nothing is new; how many open units it resumed."""
    done = lake.sinks.run(sink, until_empty=True)
    assert done.outcome in ("shipped", "nothing_to_do"), as_text(done)
    assert lake.sinks.run(sink).outcome == "nothing_to_do"
    return sum(table.resumed for table in done.tables)


def kill_and_finish(place: Place, case: Case, end: End, twin: End, point: str) -> None:
    prepare(place, case, end, twin)
    assert run_killed(ship, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        left = open_units(lake)
        assert len(left) == (0 if point in NOT_OPEN else 1)
        disturb(lake)
        check_lake(lake.catalog)
        lake.sinks.set(SINK, **end.other_settings)
        assert run(lake) == len(left)
        if point != "unit.held" and end.name == twin.name:
            assert end.unit(case.table, case.number) == twin.unit(case.table, case.number)
        check_contents(case, end)
        # What retention waited for may go now; nobody is told, and nothing is sent.
        forget(lake)
        run(lake)
        check_contents(case, end)
        assert [(row.operation, row.kind, row.outcome) for row in lake.audit()] == [
            (unit, "unit", "resumed") for unit in left
        ]
        check_at_rest(lake)
        end.check_clean()
        check_lake(lake.catalog)


def check_contents(case: Case, end: End) -> None:
    wanted, found = expected([*case.before, *case.killed, *MEANWHILE]), end.contents()
    for table in case.tables:
        assert found.of(table) == wanted.of(table)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "point", "case"), KILLS)
def test_a_killed_run_is_finished_by_the_next_one_and_each_row_is_there_once(
    new_place: Callable[[str], Place], new_end: NewEnd, name: str, point: str, case: str
) -> None:
    twin = new_end("http" if name == "lake" else name)
    kill_and_finish(new_place("sqlite"), CASES[case], new_end(name), twin, point)


@pytest.mark.parametrize("case", ["people_from_the_beginning", "people_later"])
def test_an_open_unit_holds_what_it_reads_though_nobody_waits_for_its_sink(
    new_place: Callable[[str], Place], new_end: NewEnd, case: str
) -> None:
    """Deletions of the unit's range stay until it is settled, not only those that a protected mark holds."""
    end, twin = new_end("files"), new_end("files")
    end.settings["protected"] = twin.settings["protected"] = False
    kill_and_finish(new_place("sqlite"), CASES[case], end, twin, "unit.opened")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("point", sorted(HttpEnd.points))
def test_a_killed_run_is_finished_by_the_next_one_on_a_shared_database(
    new_place: Callable[[str], Place], new_end: NewEnd, point: str
) -> None:
    case = CASES["people_later"]
    kill_and_finish(new_place("postgresql"), case, new_end("http"), new_end("http"), point)


def passed(place: Place) -> set[str]:
    found: set[str] = set()
    failpoints.observer = found.add
    ship(place)
    return {point for point in found if point.startswith("unit.")}


@pytest.mark.parametrize("kind", ENDS)
def test_every_failpoint_that_a_run_passes_is_killed_here(
    new_place: Callable[[str], Place], new_end: NewEnd, kind: type[End]
) -> None:
    place, end = new_place(DATABASES[0]), new_end(kind.name)
    prepare(place, CASES["people_later"], end, new_end(kind.name))
    assert run_child(passed, place) == kind.points


def test_every_failpoint_of_units_is_passed_by_some_sink() -> None:
    known = {name for name, kind in failpoints.FAILPOINTS.items() if kind == "unit"}
    assert frozenset().union(*(end.points for end in ENDS)) == known


# ── rows that are refused ──

REFUSED = (3, 5)


def prepare_refusing(place: Place, end: HttpEnd) -> None:
    with place.open(create=True, actor="test") as lake:
        make(lake)
        lake.sinks.add(SINK, end.kind, tables=[EVENTS, PEOPLE], **end.settings)
        for change in FIRST:
            perform(lake, change)
    end.receiver.refuses = lambda row: row["id"] in REFUSED and row["_change"] == "upsert"


def check_refused(lake: fm.Lake, end: HttpEnd) -> None:
    """What was refused is kept aside, each row once, and everything else is there."""
    rows = lake.sinks.quarantine(SINK)
    kept = Counter((row["table"].removesuffix("_now"), json.loads(row["line"])["id"]) for row in rows)
    wanted, found = expected(FIRST), end.contents()
    assert found.events == Counter({row: count for row, count in wanted.events.items() if row[0] not in REFUSED})
    assert found.people == {number: name for number, name in wanted.people.items() if number not in REFUSED}
    events = {(EVENTS, number): wanted.events[number, "first"] for number in REFUSED}
    assert kept == {**events, **{(PEOPLE, number): 1 for number in REFUSED}}
    check_lake(lake.catalog)


@pytest.mark.parametrize("point", ["unit.sealed:2", "unit.sealed:4", "unit.sealed:7", "unit.sent:2", "unit.shipped"])
def test_killed_while_refused_rows_are_found_each_is_kept_aside_once(
    new_place: Callable[[str], Place], new_end: NewEnd, point: str
) -> None:
    place, end = new_place(DATABASES[0]), new_end("http")
    assert isinstance(end, HttpEnd)
    prepare_refusing(place, end)
    assert run_killed(ship, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        disturb(lake, ())
        assert run(lake) == 1
        check_refused(lake, end)


@pytest.mark.parametrize("point", [f"unit.{step}" for step in ("opened", "sealed", "sent", "acknowledged", "shipped")])
def test_a_killed_retry_of_refused_rows_is_finished_by_the_next_run(
    new_place: Callable[[str], Place], new_end: NewEnd, point: str
) -> None:
    place, end = new_place(DATABASES[0]), new_end("http")
    assert isinstance(end, HttpEnd)
    prepare_refusing(place, end)
    with place.open() as lake:
        run(lake)
        check_refused(lake, end)
    end.receiver.refuses = None
    assert run_killed(retry, place, failpoint=point), f"{point} was never passed"
    with place.open() as lake:
        left = open_units(lake)
        check_lake(lake.catalog)
        assert run(lake) == len(left) == 1
        assert {table.table: table.outcome for table in lake.sinks.retry(SINK).tables} == {PEOPLE: "shipped"}
        assert lake.sinks.quarantine(SINK) == []
        assert end.contents() == expected(FIRST)
        assert [row.operation for row in lake.audit()] == left
        check_at_rest(lake)
        end.check_clean()
        check_lake(lake.catalog)
