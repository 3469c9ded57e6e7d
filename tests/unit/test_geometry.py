"""The geometry of a history: chunks cover it without overlap, names and numbers are stable, plans are differences."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest

from floodmark.backfill.chunks.geometry import CHUNKS_MAX, Chunk, Geometry, gaps, plan_chunks
from floodmark.errors import Corrupt, Invalid

DAY = 86_400_000_000


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def geometries(seed: int, count: int) -> Iterator[tuple[Geometry, random.Random]]:
    """Closed and open histories of numbers and of time, on both sides of their origin."""
    rng = random.Random(seed)
    for _ in range(count):
        first, length = rng.randint(-300, 300), rng.randint(1, 200)
        last = None if rng.random() < 0.3 else first + length
        size, align = rng.randint(1, 60), rng.choice([None, rng.randint(-100, 100)])
        if rng.random() < 0.5:
            yield Geometry.of(first, last, size, align), rng
        else:
            ends = [None if number is None else minute(number) for number in (first, last)]
            yield Geometry.of(*ends, f"{size}m", None if align is None else minute(align)), rng


def minute(number: int) -> datetime:
    return datetime(2024, 2, 29, 23, 0, tzinfo=UTC) + timedelta(minutes=number)


def step(geometry: Geometry) -> int:
    return 1 if geometry.unit == "number" else 60_000_000


# ── chunks ──


def test_every_value_is_in_exactly_one_chunk_and_chunks_are_as_said() -> None:
    for geometry, _ in geometries(1, 400):
        end = geometry.last if geometry.last is not None else geometry.first + 150 * step(geometry)
        owners: dict[int, int] = {}
        for number in geometry.covering(geometry.shown(geometry.first), geometry.shown(end)):
            start, stop = geometry.ends(number)
            assert start < stop
            assert start == max(geometry.first, geometry.origin + number * geometry.size)
            whole_end = geometry.origin + (number + 1) * geometry.size
            assert stop == (whole_end if geometry.last is None else min(geometry.last, whole_end))
            chunk = geometry.chunk(number)
            assert (geometry.value(chunk.start), geometry.value(chunk.end)) == (start, stop)
            for value in range(start, min(stop, end), step(geometry)):
                assert owners.setdefault(value, number) == number
                assert geometry.number_of_inner(geometry.value(geometry.shown(value))) == number
        if geometry.unit == "number":
            assert sorted(owners) == list(range(geometry.first, end))


def test_a_chunk_is_wanted_when_the_tip_has_passed_its_end_or_the_end_of_all() -> None:
    for geometry, rng in geometries(2, 400):
        tip = geometry.first + rng.randint(-50, 250) * step(geometry) + rng.choice([0, 0, 1])
        wanted = geometry.wanted(geometry.shown(tip))
        end = geometry.last if geometry.last is not None else geometry.first + 400 * step(geometry)
        known = geometry.covering(geometry.shown(geometry.first), geometry.shown(end))
        assert list(wanted) == [number for number in known if geometry.ends(number)[1] <= tip]
        # The same cut tells what a floor leaves behind.
        assert [number for number in known if number < geometry.below(tip)] == list(wanted)


def test_without_a_tip_a_closed_history_is_complete_and_an_open_one_is_not() -> None:
    for geometry, _ in geometries(3, 50):
        whole = (
            range(0)
            if geometry.last is None
            else geometry.covering(geometry.shown(geometry.first), geometry.shown(geometry.last))
        )
        assert list(geometry.wanted(None)) == list(whole)


def test_covering_is_what_overlaps() -> None:
    for geometry, rng in geometries(4, 400):
        low = geometry.first + rng.randint(-80, 220) * step(geometry)
        high = low + rng.randint(-10, 120) * step(geometry)
        end = geometry.last if geometry.last is not None else geometry.first + 400 * step(geometry)
        known = geometry.covering(geometry.shown(geometry.first), geometry.shown(end))
        overlapping = [
            number for number in known if max(geometry.ends(number)[0], low) < min(geometry.ends(number)[1], high)
        ]
        assert list(geometry.covering(geometry.shown(low), geometry.shown(high))) == overlapping


def test_outside_of_the_range_there_are_no_chunks() -> None:
    geometry = Geometry.of(150, 450, 100)
    assert [geometry.chunk(number) for number in geometry.wanted(None)] == [
        Chunk(1, 150, 200),
        Chunk(2, 200, 300),
        Chunk(3, 300, 400),
        Chunk(4, 400, 450),
    ]
    for number in (0, 5):
        with pytest.raises(Invalid, match="chunk does not exist"):
            geometry.chunk(number)


def test_numbers_reach_to_the_ends_of_64_bits() -> None:
    geometry = Geometry.of(-(2**63), None, 2**62)
    assert list(geometry.wanted(2**63 - 1)) == [-2, -1, 0]
    assert geometry.chunk(-2) == Chunk(-2, -(2**63), -(2**62))
    assert geometry.chunk(1).end == 2**63 - 1


# ── names and texts ──


def test_names_are_readable_and_differ() -> None:
    for geometry, _ in geometries(5, 100):
        end = geometry.last if geometry.last is not None else geometry.first + 150 * step(geometry)
        names = [
            geometry.chunk(number).name
            for number in geometry.covering(geometry.shown(geometry.first), geometry.shown(end))
        ]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("geometry", "names"),
    [
        (Geometry.of(-1500, 1000, 1000), ["-1500..-1000", "-1000..0", "0..1000"]),
        (Geometry.of("2024-01-01", "2024-01-03", "1d"), ["2024-01-01..2024-01-02", "2024-01-02..2024-01-03"]),
        (
            Geometry.of("2024-01-01", "2024-01-02", "12h"),
            ["2024-01-01T00:00:00Z..2024-01-01T12:00:00Z", "2024-01-01T12:00:00Z..2024-01-02T00:00:00Z"],
        ),
        (
            Geometry.of("1969-12-31T23:59:59.5Z", "1970-01-01T00:00:01Z", timedelta(seconds=1)),
            ["1969-12-31T23:59:59.500000Z..1970-01-01T00:00:00Z", "1970-01-01T00:00:00Z..1970-01-01T00:00:01Z"],
        ),
    ],
    ids=["numbers", "days", "half-days", "before-1970"],
)
def test_names(geometry: Geometry, names: list[str]) -> None:
    assert [geometry.chunk(number).name for number in geometry.wanted(None)] == names


@pytest.mark.parametrize(
    "given",
    [
        date(2024, 1, 1),
        datetime(2024, 1, 1),
        datetime(2024, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))),
        "2024-01-01",
        "2024-01-01T00:00:00Z",
        "2024-01-01T02:00:00+02:00",
        " 2023-12-31 19:00:00-05:00",
    ],
    ids=str,
)
def test_a_time_may_be_given_in_many_forms(given: Any) -> None:
    geometry = Geometry.of(given, None, "1d")
    assert geometry.chunk(geometry.number_of_inner(geometry.value(given))) == Chunk(
        19723, moment("2024-01-01"), moment("2024-01-02")
    )


def test_numbers_may_be_texts() -> None:
    assert Geometry.of("-10", "+20", "5", align="1") == Geometry("number", 5, 1, -10, 20)


def test_chunks_of_weeks_start_on_mondays_unless_aligned_otherwise() -> None:
    monday = Geometry.of("2024-01-01", "2024-02-01", "2w")
    assert {monday.chunk(number).start.weekday() for number in monday.wanted(None)[1:]} == {0}
    sunday = Geometry.of("2024-01-07", "2024-02-01", "1w", align="2023-12-31")
    assert sunday.chunk(1) == Chunk(1, moment("2024-01-07"), moment("2024-01-14"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((0, 10, 0), "above zero"),
        ((0, 10, -5), "above zero"),
        ((5, 5, 1), "empty"),
        ((0, 10, "1h"), "must be a whole number"),
        ((0, 10, timedelta(hours=1)), "must be a whole number"),
        ((0, 10, 1.5), "not a whole number"),
        ((True, 10, 1), "not a whole number"),
        ((0, "2024-01-01", 1), "not a whole number"),
        ((0, 2**63, 1), "64 bits"),
        ((0, CHUNKS_MAX + 1, 1), "too many chunks"),
        (("2024-01-01", 7, "1d"), "invalid timestamp"),
        (("2024-13-01", None, "1d"), "invalid timestamp"),
        (("0001-01-01T00:00:00+10:00", None, "1d"), "years 1 to 9999"),
        (("2024-01-01", None, 3600), "invalid duration"),
        (("2024-01-01", None, "1 fortnight"), "invalid duration"),
        (("2024-01-01", None, "1mo"), "no fixed length"),
        (("2024-01-01", None, "1M"), "no fixed length"),
        (("2024-01-01", None, "2 years"), "no fixed length"),
        (("2024-01-01", None, "9999999w"), "out of range"),
        (("2024-01-01", None, "0d"), "above zero"),
        (("2024-01-01", None, "1d", 0), "invalid timestamp"),
    ],
    ids=str,
)
def test_nonsense_is_refused(given: tuple[Any, ...], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        Geometry.of(*given)


def test_an_open_history_is_refused_when_it_has_grown_too_many_chunks() -> None:
    geometry = Geometry.of(0, None, 1)
    assert len(geometry.wanted(CHUNKS_MAX)) == CHUNKS_MAX
    with pytest.raises(Invalid, match="too many chunks"):
        geometry.wanted(CHUNKS_MAX + 1)


# ── as it is kept ──


def test_a_geometry_comes_back_from_json() -> None:
    for geometry, _ in geometries(6, 100):
        kept = json.loads(json.dumps(geometry.as_dict()))
        assert Geometry.from_dict(kept) == geometry
        assert geometry.differences(Geometry.from_dict(kept)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "month"},
        {"unit": ["time"]},
        {"size": 0},
        {"size": "5"},
        {"size": None},
        {"first": True},
        {"first": 1.0},
        {"last": -1},
        {"origin": 2**63},
        {"more": 1},
    ],
    ids=str,
)
def test_a_kept_geometry_that_makes_no_sense_is_corrupt(change: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        Geometry.from_dict(Geometry.of(0, 10, 1).as_dict() | change)
    with pytest.raises(Corrupt):
        Geometry.from_dict([change])


def test_differences_are_told_in_words() -> None:
    days = Geometry.of("2024-01-01", "2024-02-01", "1d")
    assert replace(days, size=DAY // 24).differences(days) == ["chunk size 3600s, was 86400s"]
    assert Geometry.of("2024-01-02", None, "1d", align="1970-01-01T06:00").differences(days) == [
        "alignment 1970-01-01T06:00:00Z, was 1970-01-01T00:00:00Z",
        "first 2024-01-02T00:00:00Z, was 2024-01-01T00:00:00Z",
        "last open, was 2024-02-01T00:00:00Z",
    ]
    assert Geometry.of(0, 1, 1).differences(days) == ["a range of numbers, was of time"]
    assert Geometry.of(0, 9, 3).differences(Geometry.of(0, 9, 2)) == ["chunk size 3, was 2"]


# ── plans ──


def test_a_plan_is_wanted_minus_done_for_each_table_above_the_floor() -> None:
    tables = ["a", "b"]
    for geometry, rng in geometries(7, 300):
        tip = geometry.first + rng.randint(0, 200) * step(geometry)
        wanted = geometry.wanted(geometry.shown(tip))
        done = {table: {number for number in wanted if rng.random() < 0.5} for table in tables if rng.random() < 0.9}
        floor = rng.choice([None, geometry.first + rng.randint(-20, 250) * step(geometry)])
        newest_first = rng.random() < 0.5
        plan = plan_chunks(wanted, floor, done, tables, newest_first, geometry)
        expected = {
            number: missing
            for number in wanted
            if (floor is None or geometry.ends(number)[1] > floor)
            and (missing := tuple(table for table in tables if number not in done.get(table, ())))
        }
        assert {one.chunk.number: one.tables for one in plan} == expected
        numbers = [one.chunk.number for one in plan]
        assert numbers == sorted(expected, reverse=newest_first)
        assert all(one.chunk == geometry.chunk(one.chunk.number) for one in plan)
        assert plan_chunks(wanted, floor, done, tables, newest_first, geometry, limit=3) == plan[:3]

        shown = gaps(wanted, floor, done, tables, geometry)
        assert [number for low, high in shown for number in geometry.covering(low, high)] == sorted(expected)
        assert all(before[1] < after[0] for before, after in pairwise(shown)), "neighbours joined"


def test_gaps_are_shown_joined_in_the_users_values() -> None:
    geometry = Geometry.of("2024-01-01", "2024-01-06T12:00", "1d")
    wanted = geometry.wanted(None)
    first = wanted.start
    done = {"a": [first, first + 1, first + 4], "b": [first, first + 4]}
    assert gaps(wanted, None, done, ["a", "b"], geometry) == [
        (moment("2024-01-02"), moment("2024-01-05")),
        (moment("2024-01-06"), moment("2024-01-06T12:00")),
    ]
    assert gaps(wanted, geometry.value("2024-01-04"), done, ["a", "b"], geometry)[0] == (
        moment("2024-01-04"),
        moment("2024-01-05"),
    )
    assert gaps(wanted, geometry.value("2025-01-01"), done, ["a", "b"], geometry) == []
