"""Charts as paths: series of figures in, shapes for the page's SVG out. Pure.

A plot is 1000 wide and 100 high, and is stretched to the place it gets; its labels stand beside it as text. Every chart
has a sentence and a table with the same figures, for readers who cannot see it. A missing figure is a gap, never a
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from floodmark import clock
from floodmark.serve.page.wording import short_text, span_text

WIDTH, HEIGHT = 1000, 100
# This many lines have a colour of their own; the table has the others.
LINES_MAX = 6
# Rows of the table beside a chart.
TABLE_ROWS_MAX = 12
_SPAN_STEPS_S = (1, 2, 4, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
_RATES = ((" G", 1e9), (" M", 1e6), (" k", 1e3))
_TICKS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))

Values = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """Figures at the same moments, by the name of what they are of."""

    times_ms: tuple[int, ...]
    values: Mapping[str, Values]

    @property
    def is_empty(self) -> bool:
        return len(self.times_ms) < 2 or not any(one is not None for some in self.values.values() for one in some)


@dataclass(frozen=True)
class ChartLine:
    name: str
    tone: int
    path: str
    area: str
    now: str


@dataclass(frozen=True)
class Point:
    """A place to point at: a strip of the plot, and what it says."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    summary: str
    lines: tuple[ChartLine, ...] = ()
    points: tuple[Point, ...] = ()
    # Labels of the top and the middle of the plot; its bottom is zero.
    top: str = ""
    middle: str = ""
    first_ms: int = 0
    last_ms: int = 0
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    # Shown in place of a chart that has no figures.
    empty: str = ""


def draw(
    id: str,
    title: str,
    series: Series,
    text: Callable[[float | None], str],
    ceiling: Callable[[float], float],
    tick: Callable[[float, float], str],
    *,
    filled: bool,
    empty: str,
) -> Chart:
    """`text` formats a figure; `ceiling` is the round number at the plot's top; `tick` labels the axis."""
    if series.is_empty:
        return Chart(id, title, empty, empty=empty)
    names = list(series.values)[:LINES_MAX]
    highest = max((one for some in series.values.values() for one in some if one is not None), default=0.0)
    top = ceiling(highest)
    lines = tuple(_line(name, tone, series, top, text, filled) for tone, name in enumerate(names))
    now = ", ".join(f"{line.name} {line.now}" for line in lines)
    span = span_text(series.times_ms[-1] - series.times_ms[0])
    return Chart(
        id,
        title,
        f"The last {span}. Now: {now}. Highest: {text(highest)}.",
        lines,
        _points(series, names, text),
        tick(top, top),
        tick(top / 2, top),
        series.times_ms[0],
        series.times_ms[-1],
        ("time", *names),
        _rows(series, names, text),
    )


def throughput(series: Series) -> Chart:
    return draw(
        "throughput",
        "Rows committed per second",
        series,
        lambda rate: "–" if rate is None else f"{short_text(rate)}/s",
        round_up,
        rate_tick,
        filled=True,
        empty="No figures yet: they are collected while the server runs, and kept for ten minutes.",
    )


def sink_lag(series: Series, has_sinks: bool) -> Chart:
    empty = "No figures yet: they are collected with the next check of the sinks." if has_sinks else "No sinks."
    return draw("sink-lag", "Lag of sinks", series, span_text, round_span_up, span_tick, filled=False, empty=empty)


# ── shapes ──


def round_up(number: float) -> float:
    """The next of 1, 2, 5, 10, 20, …; a plot of nothing but zeros has a top of 1."""
    size = 1.0
    while True:
        for step in (1, 2, 5):
            if number <= size * step:
                return size * step
        size *= 10


def round_span_up(span_ms: float) -> float:
    for step in _SPAN_STEPS_S:
        if span_ms <= step * 1000:
            return step * 1000
    return round_up(span_ms / 86_400_000) * 86_400_000


def rate_tick(rate: float, top: float) -> str:
    """A label of an axis up to `top`: exact, without trailing zeros, all labels in the unit of the top."""
    unit, size = next(((unit, size) for unit, size in _RATES if top >= size), ("", 1.0))
    return f"{rate / size:g}{unit}/s"


def span_tick(span_ms: float, _top_ms: float) -> str:
    """The same for spans of time, in the usual unit: 30 min below 1 h, 2.5 min below 5 min."""
    seconds = span_ms / 1000
    unit, size = next(((unit, size) for unit, size in _TICKS if seconds >= size), _TICKS[-1])
    return f"{seconds / size:g} {unit}"


def spark(series: Series, name: str) -> str:
    """A small line without labels: the path of one series; empty if the series was zero all the time."""
    values = series.values.get(name, ())
    highest = max((one for one in values if one is not None), default=0.0)
    return "" if highest <= 0 or series.is_empty else _path(series.times_ms, values, highest)


def _line(
    name: str, tone: int, series: Series, top: float, text: Callable[[float | None], str], filled: bool
) -> ChartLine:
    values = series.values[name]
    path = _path(series.times_ms, values, top)
    known = [place for place, value in enumerate(values) if value is not None]
    area = ""
    if filled and known:
        first, last = (_x(series.times_ms, series.times_ms[place]) for place in (known[0], known[-1]))
        whole = _path(series.times_ms, [0.0 if value is None else value for value in values], top)
        area = f"{whole}L{last:g} {HEIGHT}L{first:g} {HEIGHT}Z"
    return ChartLine(name, tone, path, area, text(values[-1]))


def _path(times_ms: Sequence[int], values: Values, top: float) -> str:
    parts, lifted = [], True
    for time_ms, value in zip(times_ms, values, strict=True):
        if value is None:
            lifted = True
            continue
        y = HEIGHT - HEIGHT * min(1.0, max(0.0, value / top))
        parts.append(f"{'M' if lifted else 'L'}{_x(times_ms, time_ms):g} {round(y, 1):g}")
        lifted = False
    return "".join(parts)


def _x(times_ms: Sequence[int], time_ms: int) -> float:
    span = times_ms[-1] - times_ms[0]
    return round(WIDTH * (time_ms - times_ms[0]) / span, 1) if span else 0.0


def _points(series: Series, names: Sequence[str], text: Callable[[float | None], str]) -> tuple[Point, ...]:
    found = []
    for place, time_ms in enumerate(series.times_ms):
        x = _x(series.times_ms, time_ms)
        before = _x(series.times_ms, series.times_ms[max(0, place - 1)])
        after = _x(series.times_ms, series.times_ms[min(len(series.times_ms) - 1, place + 1)])
        left, right = (before + x) / 2, (x + after) / 2
        said = "\n".join(f"{name}: {text(series.values[name][place])}" for name in names)
        found.append(Point(round(left, 1), round(right - left, 1), f"{_clock(time_ms)}\n{said}"))
    return tuple(found)


def _rows(series: Series, names: Sequence[str], text: Callable[[float | None], str]) -> tuple[tuple[str, ...], ...]:
    """Some of the moments, newest first; the newest is always included."""
    each = max(1, -(-len(series.times_ms) // TABLE_ROWS_MAX))
    places = range(len(series.times_ms) - 1, -1, -each)
    return tuple(
        (_clock(series.times_ms[place]), *(text(series.values[name][place]) for name in names)) for place in places
    )


def _clock(time_ms: int) -> str:
    return clock.format_time(time_ms)[11:19]
