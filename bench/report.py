"""The result of a run: a table for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
