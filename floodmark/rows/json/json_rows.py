"""JSON lines as rows with their line numbers; every error in a line has its line and position. Pure.

The same reader as `rows/json/json_lines.py`, which stops at the first line that is not an object; this one continues,
so that the error lists the first of them and their count. The table's judge checks the lines that are rows
(ingest/judge.py), not this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from floodmark.errors import Invalid
from floodmark.rows.json.json_lines import NotJson, TooManyRows, parse_line

# How many of the wrong lines an error lists.
PROBLEMS_MAX = 20
_BOM = "\ufeff"


@dataclass(frozen=True)
class LineProblem:
    """What is wrong with one line: in a column of the table, or at a character of the line. All count from 1."""

    line: int
    column: str | None
    character: int | None
    problem: str
    advice: str = ""

    def __str__(self) -> str:
        place = f", column {self.column}" if self.column is not None else ""
        place += f", character {self.character}" if self.character is not None else ""
        return f"line {self.line}{place}: {self.problem}"

    def told(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "advice"}


@dataclass(frozen=True)
class Lines:
    """The rows, and the line number of each."""

    rows: list[dict[str, Any]]
    numbers: Sequence[int]


class WrongLines(NotJson):
    """Lines that are not objects. `problems` are the first of `count`."""

    def __init__(self, problems: Sequence[LineProblem], count: int) -> None:
        first = problems[0]
        super().__init__(first.line, first.problem, first.character)
        self.problems = tuple(problems)
        self.facts["count"] = count

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "problems": [problem.told() for problem in self.problems]}


class WrongRows(Invalid):
    """Rows that do not fit their table. `problems` are the first of `count`; nothing of the rows was taken."""

    def __init__(self, problems: Sequence[LineProblem], count: int) -> None:
        first = problems[0]
        advice = " ".join(dict.fromkeys(problem.advice for problem in problems if problem.advice))
        super().__init__(
            f"the rows do not fit the table: {first}" + (f"; and {count - 1} more" if count > 1 else ""),
            line=first.line,
            column=first.column,
            count=count,
            advice=advice,
        )
        self.problems = tuple(problems)

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "problems": [problem.told() for problem in self.problems]}


def read_lines(data: bytes, rows_max: int) -> Lines:
    """The objects of the lines, in their order. `WrongLines` if some are not objects, `TooManyRows` if too many."""
    text = _text(data)
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    problems: list[LineProblem] = []
    wrong = 0
    for number, line in enumerate(text.split("\n"), start=1):
        given = line.strip(" \t\r")
        if not given:
            continue
        if len(rows) + wrong == rows_max:
            raise TooManyRows("these are more rows than may come at once", rows_max=rows_max, advice="Send fewer.")
        try:
            rows.append(parse_line(given, number))
            numbers.append(number)
        except NotJson as error:
            wrong += 1
            if len(problems) < PROBLEMS_MAX:
                indent = len(line) - len(line.lstrip(" \t\r"))
                at = None if error.character is None else error.character + indent
                problems.append(LineProblem(number, None, at, error.problem))
    if problems:
        raise WrongLines(problems, wrong)
    return Lines(rows, numbers)


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        start = data.rfind(b"\n", 0, error.start) + 1
        character = len(data[start : error.start].decode(errors="replace")) + 1
        raise WrongLines([LineProblem(line, None, character, "it is not UTF-8")], 1) from error
    if text.startswith(_BOM):
        raise WrongLines([LineProblem(1, None, 1, "it begins with a byte order mark")], 1)
    return text
