"""The result of a run: a table for people, JSON for programs, and curves of what went on for long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from bench.measure import Line

Sections = dict[str, list[Line]]


def show(console: Console, section: str, lines: list[Line]) -> None:
    """Print one section's table."""
    table = Table(title=section, title_justify="left", title_style="bold", expand=False)
    for heading, justify in (
        ("what", "left"),
        ("figure", "right"),
        ("min..max", "right"),
        ("n", "right"),
        ("goal", "right"),
        ("met", "left"),
        ("note", "left"),
    ):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for line in lines:
        spread = "" if line.low is None or line.high is None else f"{number(line.low)}..{number(line.high)}"
        table.add_row(
            line.name,
            "–" if line.figure is None else number(line.figure) + line.unit,
            spread,
            str(line.repeats or ""),
            "" if line.goal is None else line.goal.shown(line.unit),
            {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[line.met],
            line.note,
        )
    console.print(table)


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


BARS = "▁▂▃▄▅▆▇█"
SPARKS_MAX = 40
# Of a curve in pixels: what is drawn, what its name takes above it, and what is free to its left and below.
CURVE_WIDTH, CURVE_HEIGHT, CURVE_NAME, CURVE_LEFT, CURVE_GAP = 640, 68, 16, 70, 34
TITLE_HEIGHT = 34


def sparkline(values: Sequence[float]) -> str:
    """A curve from 0 in one line of text; many values are put together, each bar as high as the highest of its own."""
    size = -(-len(values) // SPARKS_MAX)
    parts = [max(values[start : start + size]) for start in range(0, len(values), size)]
    highest = max(parts, default=0)
    return "".join(BARS[round(part / highest * (len(BARS) - 1))] if highest > 0 else BARS[0] for part in parts)


def curves_svg(title: str, across: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Curves one below the other over the same axis, each from 0 to its highest value."""
    furthest = max(at for points in curves.values() for at, _ in points)
    parts = [_text(CURVE_LEFT, 18, title, size=13)]
    bottom = TITLE_HEIGHT - CURVE_GAP
    for name, points in curves.items():
        bottom += CURVE_GAP + CURVE_NAME + CURVE_HEIGHT
        parts += _curve(bottom, name, points, furthest)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = CURVE_LEFT + share * CURVE_WIDTH
        parts.append(_text(x, bottom + 16, f"{share * furthest:,.0f}", anchor="middle"))
    parts.append(_text(CURVE_LEFT + CURVE_WIDTH / 2, bottom + 32, across, anchor="middle"))
    width, height = CURVE_LEFT + CURVE_WIDTH + 30, bottom + 44
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    style = "<style>text{font-family:sans-serif;fill:#333}</style>"
    return "\n".join([head, style, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def _curve(bottom: float, name: str, points: Sequence[tuple[float, float]], furthest: float) -> list[str]:
    highest, top = max(value for _, value in points) or 1.0, bottom - CURVE_HEIGHT

    def place(at: float, value: float) -> str:
        return f"{CURVE_LEFT + at / furthest * CURVE_WIDTH:.1f},{bottom - value / highest * CURVE_HEIGHT:.1f}"

    line = " ".join(place(at, value) for at, value in points)
    return [
        _text(CURVE_LEFT, top - 6, name),
        f'<path d="M{CURVE_LEFT} {top}V{bottom}H{CURVE_LEFT + CURVE_WIDTH}" fill="none" stroke="#999"/>',
        _text(CURVE_LEFT - 6, top + 8, number(highest), anchor="end"),
        _text(CURVE_LEFT - 6, bottom, "0", anchor="end"),
        f'<polyline points="{line}" fill="none" stroke="#1f6fb4" stroke-width="1.5"/>',
    ]


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def write(folder: Path, started: str, run: dict[str, Any], sections: Sections) -> Path:
    """Write the run as JSON; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{started.replace(':', '').replace('-', '')}.json"
    lines = [line.as_dict(section) for section, found in sections.items() for line in found]
    goals = [line for line in lines if line["goal"] is not None]
    content = {
        **run,
        "goals": len(goals),
        "goals_met": sum(line["met"] is True for line in goals),
        "not_measured": [line["name"] for line in lines if line["figure"] is None],
        "lines": lines,
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path
