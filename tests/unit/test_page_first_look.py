"""Labels of axes, example commands, and what a wheel has of the page."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from floodmark.serve.page import charts
from floodmark.serve.page.content import ExampleColumn, example_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("highest", "labels"),
    [
        (0, ("1/s", "0.5/s")),
        (3, ("5/s", "2.5/s")),
        (700, ("1 k/s", "0.5 k/s")),
        (9_000, ("10 k/s", "5 k/s")),
        (40_000, ("50 k/s", "25 k/s")),
        (3e6, ("5 M/s", "2.5 M/s")),
    ],
)
def test_ticks_of_rates_are_exact_and_in_one_unit(highest: float, labels: tuple[str, str]) -> None:
    top = charts.round_up(highest)
    assert (charts.rate_tick(top, top), charts.rate_tick(top / 2, top)) == labels


@pytest.mark.parametrize(
    ("highest_s", "labels"),
    [
        (0.5, ("1 s", "0.5 s")),
        (55, ("1 min", "30 s")),
        (290, ("5 min", "2.5 min")),
        (3_000, ("1 h", "30 min")),
        (40_000, ("12 h", "6 h")),
        (80_000, ("1 d", "12 h")),
        (400_000, ("5 d", "2.5 d")),
    ],
)
def test_ticks_of_spans_are_exact(highest_s: float, labels: tuple[str, str]) -> None:
    top = charts.round_span_up(highest_s * 1000)
    assert (charts.span_tick(top, top), charts.span_tick(top / 2, top)) == labels


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"id": "long", "at": "timestamptz"}, ("day", "date(at)")),
        ({"id": "long", "day": "date"}, ("day_2", "date(day)")),
        ({"id": "long", "full name": "string"}, ("short", "substring(`full name`, 1, 3)")),
        ({"id": "long"}, ("double", "id * 2")),
        ({}, ("loaded", "current_date()")),
    ],
)
def test_an_example_names_a_column_that_is_there_and_one_that_is_not(
    columns: dict[str, str], wanted: tuple[str, str]
) -> None:
    assert example_of([ExampleColumn(name, kind) for name, kind in columns.items()]) == wanted


def test_a_wheel_has_every_file_of_the_page() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["floodmark"]
    package = ROOT / "floodmark"
    have = {path for pattern in packed for path in package.glob(pattern)}
    for folder in ("serve/page/templates", "serve/page/static"):
        files = {path for path in (package / folder).rglob("*") if path.is_file()}
        assert files
        assert files <= have
