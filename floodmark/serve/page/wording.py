"""The words of the page: figures, spans of time, health, and what commits and jobs did. Pure.

A text of the lake keeps its words; text in backticks is a command that the reader can run. Whatever is not known to be
well gets a level of its own: an unknown text never counts as a good one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from floodmark import clock
from floodmark.json_form import StoredError
from floodmark.report.health import FINE
from floodmark.report.jobs import NOT_READY, JobLine, rate_of

# Levels, from good to bad; they are class names of the page too.
GOOD, BUSY, WARN, BAD, QUIET = "good", "busy", "warn", "bad", "quiet"
_SPANS = (("d", 86_400), ("h", 3_600), ("min", 60))
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")
_SEE = re.compile(r"; see `[^`]*`(?: and `[^`]*`)*")
# The verb for each kind of commit.
_VERBS = {
    "append": "appended",
    "merge": "merged",
    "receive": "received",
    "feed": "loaded",
    "delete": "deleted",
    "overwrite": "overwrote",
    "create_table": "created",
    "drop_table": "dropped",
    "adopt": "adopted",
    "transaction": "changed",
    "compact": "compacted",
    "retain": "deleted old rows",
    "add_column": "added a column",
    "fill": "filled a column",
    "chunk": "loaded history",
    "prune": "pruned history",
    "redo": "deleted a chunk to load it again",
    "branch_merge": "merged a branch",
    "apply": "applied a schema",
    "repair": "repaired",
    "undrop": "restored",
    "rollback": "rolled back",
}


# ── figures ──


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def count_text(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def short_text(number: float | None) -> str:
    """A number in few characters: 950, 12.3 k, 4.56 M."""
    if number is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size * (10 if unit == "k" else 1):
            return f"{_three(number / size)} {unit}"
    return f"{number:,.0f}" if abs(number) >= 10 or number == int(number) else f"{number:.1f}"


def size_text(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "–"
    size, unit = float(size_bytes), 0
    while size >= 1000 and unit < len(_SIZES) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{_three(size)} {_SIZES[unit]}"


def _three(number: float) -> str:
    """Three significant digits: 1.23, 12.3, 123."""
    return f"{number:.0f}" if abs(number) >= 99.95 else f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def span_text(span_ms: float | None) -> str:
    """A span of time for people: 4 s, 5 min, 3.2 h, 2.0 d."""
    if span_ms is None:
        return "–"
    seconds = max(0.0, span_ms / 1000)
    for unit, size in _SPANS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}" if unit == "min" else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class ShownTime:
    """A time: for machines, for people, and how long ago it was, or how soon it will be."""

    iso: str
    full: str
    text: str


def moment(time: str | int | None, now_ms: int) -> ShownTime | None:
    """A time, from an ISO 8601 text or from milliseconds."""
    if time is None:
        return None
    time_ms = time if isinstance(time, int) else clock.parse_time_ms(time)
    iso = clock.format_time(time_ms)
    away = now_ms - time_ms
    text = f"{span_text(away)} ago" if away >= 1000 else "now" if away > -1000 else f"in {span_text(-away)}"
    return ShownTime(iso, f"{iso[:10]} {iso[11:19]} UTC", text)


# ── health ──


@dataclass(frozen=True)
class ShownHealth:
    """How the lake is: one word, a sentence, and the commands that the sentence names."""

    level: str
    word: str
    sentence: str
    commands: tuple[str, ...] = ()


def health_of(text: str) -> ShownHealth:
    """The health text of `floodmark status`; its beginning gives the level."""
    if text == FINE:
        return ShownHealth(GOOD, "Fine", "")
    level, word = BAD, "Unhealthy"
    for start, found_level, found_word in (
        (NOT_READY, BAD, "Not ready"),
        ("refused", BAD, "Writes are refused"),
        ("recovery pending", WARN, "Recovery pending"),
        ("attention", WARN, "Needs attention"),
    ):
        if text.startswith(start):
            level, word = found_level, found_word
            text = text[len(start) :].removeprefix(":").lstrip()
            break
    # The page lists the commands below the sentence, so the sentence does not repeat them.
    return ShownHealth(level, word, _SEE.sub("", text), tuple(dict.fromkeys(commands_in(text))))


def commands_in(text: str) -> list[str]:
    return [part for is_code, part in pieces(text) if is_code]


def pieces(text: str) -> list[tuple[bool, str]]:
    """A text in parts: whether the part stood in backticks, and its text."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner is an ordinary character
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    return [(place % 2 == 1, part) for place, part in enumerate(parts) if part]


# ── what happened ──


def commit_verb(kind: str) -> str:
    return _VERBS.get(kind, kind.replace("_", " "))


def outcome_text(outcome: str) -> str:
    return outcome.replace("_", " ")


def error_line(error: StoredError | None) -> str:
    """An error as the catalog stores it: its kind, its message and the facts."""
    if error is None:
        return ""
    said = f" ({', '.join(f'{name} {value}' for name, value in error.facts.items())})" if error.facts else ""
    return f"{error.kind}: {error.message}{said}"


def pace_text(job: JobLine) -> str:
    """The rate of a job, and how long it will take; empty if that is unknown."""
    left = None if job.eta_s is None else f"{span_text(job.eta_s * 1000)} left"
    return " · ".join(part for part in (rate_of(job), left) if part is not None)


def backfill_command(verb: str, name: str) -> str:
    return f"floodmark backfill {verb} {shlex.quote(name)}"


def join_text(names: Sequence[str], shown_max: int = 4) -> str:
    """Names in one line: at most the first few."""
    left = len(names) - shown_max
    return ", ".join(names[:shown_max]) + (f" and {left} more" if left > 0 else "")
