"""What the page says and draws, without a browser: what is not known does not look known, nor bad things good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from floodmark.report.daemon import TaskReport
from floodmark.report.indexes import IndexTotals
from floodmark.report.spools import SpoolReport
from floodmark.report.tables import TableLine
from floodmark.serve.http.timeseries import RecentFigures
from floodmark.serve.page import charts, wording
from floodmark.serve.page.content import (
    LINES_MAX,
    ShownState,
    rates_of,
    shown_first,
    spool_state,
    table_state,
    task_state,
)


@pytest.mark.parametrize(
    ("text", "level", "word", "sentence", "commands"),
    [
        ("fine", "good", "Fine", "", ()),
        (
            "attention: sink out failed (Busy), job a failed (Invalid); see `floodmark sink status` and `floodmark x`",
            "warn",
            "Needs attention",
            "sink out failed (Busy), job a failed (Invalid)",
            ("floodmark sink status", "floodmark x"),
        ),
        ("not ready: jobs cannot be read (x)", "bad", "Not ready", "jobs cannot be read (x)", ()),
        ("refused: t changed; see `floodmark repair`", "bad", "Writes are refused", "t changed", ("floodmark repair",)),
        ("a text of a newer version", "bad", "Unhealthy", "a text of a newer version", ()),
        ("", "bad", "Unhealthy", "", ()),
        ("fine; attention: x", "bad", "Unhealthy", "fine; attention: x", ()),
    ],
)
@pytest.mark.whole
def test_health_in_words(text: str, level: str, word: str, sentence: str, commands: tuple[str, ...]) -> None:
    assert wording.health_of(text) == wording.ShownHealth(level, word, sentence, commands)


def test_a_backtick_that_is_not_closed_is_a_sign_like_others() -> None:
    assert wording.pieces("see `floodmark x` or `y") == [(False, "see "), (True, "floodmark x"), (False, " or `y")]


def test_figures_are_short_and_what_is_not_known_is_no_number() -> None:
    assert [wording.short_text(number) for number in (None, 0, 7.25, 950, 9_999, 12_345, 4_560_000, 999_999_999)] == [
        *("–", "0", "7.2", "950", "9,999", "12.3 k", "4.56 M", "1000 M"),
    ]
    assert [wording.size_text(size) for size in (None, 0, 999, 1_500, 25_200_000)] == [
        *("–", "0 B", "999 B", "1.50 kB", "25.2 MB"),
    ]


def test_a_moment_is_told_from_now() -> None:
    now_ms = 1_800_000_000_000
    told = [wording.moment(now_ms + away, now_ms) for away in (-90_000, -3_000, 0, 41_000)]
    assert [one.text for one in told if one] == ["2 min ago", "3 s ago", "now", "in 41 s"]
    assert wording.moment("2027-01-15T08:00:00Z", now_ms) == wording.moment(now_ms, now_ms)
    assert wording.moment(None, now_ms) is None


def test_a_missing_figure_is_a_gap_in_the_line_and_no_zero() -> None:
    series = charts.Series((0, 1000, 2000, 3000), {"out": [None, 4000.0, None, 2000.0]})
    chart = charts.sink_lag(series, has_sinks=True)
    assert chart.lines[0].path == "M333.3 0M1000 50"
    assert (chart.top, chart.middle, chart.lines[0].now) == ("4 s", "2 s", "2 s")
    assert [row[1] for row in chart.rows] == ["2 s", "–", "4 s", "–"]
    assert charts.sink_lag(charts.Series((0, 1), {"out": [None, None]}), has_sinks=True).empty
    assert charts.throughput(charts.Series((), {})).empty


@pytest.mark.parametrize(("number", "top"), [(0, 1), (1, 1), (3, 5), (700, 1000), (1001, 2000)])
@pytest.mark.whole
def test_a_plot_ends_at_a_round_number(number: float, top: float) -> None:
    assert charts.round_up(number) == top


def test_figures_of_the_last_minutes_become_series() -> None:
    assert rates_of(None).is_empty
    found = rates_of(RecentFigures(5, (0, 5000), {"events": (1.0, None)}, {}, {}, {}))
    assert (found.times_ms, found.values) == ((0, 5000), {"events": (1.0, None)})


def test_states_that_nobody_knows_are_not_good() -> None:
    assert task_state(TaskReport("t", "sink", "dreaming")).level == "bad"
    assert task_state(TaskReport("t", "sink", "waiting", failures=2)).level == "warn"
    spool = SpoolReport("t", "id", "here", "/spool", "ok", 0, 0, 0, None, 0, 0, 0, None, None)
    assert spool_state(spool).level == "good"
    assert spool_state(replace(spool, state="refused")).level == "bad"
    assert spool_state(replace(spool, state="frozen")).level == "bad"
    assert spool_state(replace(spool, waiting_records=None)).level != "good"
    table = TableLine(
        "t", 0, 0, 0, 1, 1, None, 0, 0.0, 0, 2, IndexTotals(0, 0, 0, 0), (), "attention: 2 rows in quarantine"
    )
    assert (table_state(table).level, table_state(table).text) == ("warn", "2 rows in quarantine")
    assert table_state(replace(table, health="fine", due=("compact t: 40 small files",))).text == "compact due"


def test_of_very_many_lines_none_that_is_not_well_is_left_out() -> None:
    lines = [ShownState("good", f"t{number}") for number in range(LINES_MAX + 7)]
    lines[-1] = ShownState("bad", "ill")
    shown, left = shown_first(lines, lambda line: line)
    assert (shown[0], shown[1], len(shown), left) == (lines[-1], lines[0], LINES_MAX + 1, 6)
    assert shown_first(lines[:5], lambda line: line) == (tuple(lines[:5]), 0)
