"""Measured values and what is said about them: medians with their spread, ratios within one run.

Two things are compared only if they were measured in turns (A B A B …): what else the machine did meanwhile then hits
both. A ratio is that of the medians; its spread is that of the single pairs. Nothing here judges by absolute time:
a goal that is missed is said, never raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Samples:
    """What one thing took, each time it was measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)


def timed(action: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def in_turns(repeats: int, *actions: Callable[[], object]) -> tuple[Samples, ...]:
    """Seconds of each action, measured in turns."""
    return times_in_turns(repeats, *((lambda action=action: timed(action)) for action in actions))


def times_in_turns(repeats: int, *measures: Callable[[], float]) -> tuple[Samples, ...]:
    """What each measure returns, asked in turns; the order turns round every time, so that none is always first."""
    found: list[list[float]] = [[] for _ in measures]
    for repeat in range(repeats):
        order = range(len(measures)) if repeat % 2 == 0 else range(len(measures) - 1, -1, -1)
        for at in order:
            found[at].append(measures[at]())
    return tuple(Samples(tuple(values)) for values in found)


@dataclass(frozen=True)
class Goal:
    """At most the limit, or at least; with `low`, between the two."""

    limit: float
    at_least: bool = False
    low: float | None = None

    def met(self, figure: float) -> bool:
        if self.low is not None:
            return self.low <= figure <= self.limit
        return figure >= self.limit if self.at_least else figure <= self.limit

    def shown(self, unit: str) -> str:
        if self.low is not None:
            return f"{self.low:g}..{self.limit:g}{unit}"
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{unit}"


@dataclass(frozen=True)
class Line:
    """One line of the result: a figure with its spread, and the goal if there is one.

    A line without a figure says in `note` why it was not measured.
    """

    name: str
    unit: str
    figure: float | None
    low: float | None = None
    high: float | None = None
    repeats: int = 0
    goal: Goal | None = None
    note: str = ""
    details: Any = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None or self.figure is None else self.goal.met(self.figure)

    def as_dict(self, section: str) -> dict[str, Any]:
        return {
            "section": section,
            "name": self.name,
            "unit": self.unit.strip(),
            "figure": self.figure,
            "min": self.low,
            "max": self.high,
            "repeats": self.repeats,
            "goal": None if self.goal is None else self.goal.shown(self.unit),
            "met": self.met,
            "note": self.note,
            "details": self.details,
        }


def took(name: str, samples: Samples, *, unit: str = " ms", goal: Goal | None = None, note: str = "") -> Line:
    """The median time; samples are in seconds."""
    scale = {" s": 1.0, " ms": 1000.0}[unit]
    values = [value * scale for value in samples.values]
    return Line(name, unit, median(values), min(values), max(values), len(values), goal, note, _rounded(values))


def rate(name: str, samples: Samples, rows: int, note: str = "", goal: Goal | None = None) -> Line:
    """Rows in a second, in thousands."""
    values = [rows / value / 1000 for value in samples.values]
    return Line(name, " k rows/s", median(values), min(values), max(values), len(values), goal, note, _rounded(values))


def ratio(name: str, over: Samples, under: Samples, *, goal: Goal | None = None, note: str = "") -> Line:
    """How many times `over` is `under`: of the medians, with the spread of the pairs."""
    pairs = [one / other for one, other in zip(over.values, under.values, strict=True)]
    figure = over.median / under.median
    return Line(name, "x", figure, min(pairs), max(pairs), len(pairs), goal, note, _rounded(pairs))


def not_measured(name: str, reason: str) -> Line:
    return Line(name, "", None, note=f"not measured: {reason}")


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
