"""Rows from JSON lines: text to dicts, and JSON's forms of values to Python's.

The reverse of `rows/json/ndjson.py`: bytes come as base64, the numbers that JSON does not have as the texts NaN,
Infinity and -Infinity. Everything else (times, decimals, nulls, values that do not fit) is checked where all dicts are,
in `rows/staging/dicts.py`. A line is one object; any other line is refused with its number, before any row counts.
Blank lines are no rows. A number too large for a double is refused, not read as infinity.

Two readers: `parse_lines` stops at the first line that is not an object; `read_lines` continues, so that its error
lists the first of them and their count, each with its line and position. The table's judge checks the lines that are
rows (ingest/judge.py).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf, isinf, nan
from typing import NoReturn

from pyarrow import types

from floodmark.errors import Invalid
from floodmark.json_form import Json
from floodmark.model import Value
from floodmark.rows.convert import Column
from floodmark.rows.misfits import Misfits, Problem

Decode = Callable[[Value], Value]

# How many of the wrong lines an error lists.
PROBLEMS_MAX = 20
_BOM = "\ufeff"
_NUMBERS = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
_ADVICE = {
    "base64": "In JSON, bytes are base64 text.",
    "double": "In JSON, write NaN and infinite numbers as the text NaN, Infinity or -Infinity.",
}


class Unreadable(Invalid):
    """The text cannot be read as rows, whatever table they are for."""

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know


class NotJson(Unreadable):
    """A line is not one JSON object. `line`, and `character` if the place is known, count from 1."""

    def __init__(self, line: int, problem: str, character: int | None = None) -> None:
        self.problem = problem
        self.character = character
        super().__init__(
            "a line is not a JSON object",
            line=line,
            character=character,
            problem=problem,
            advice="Send one JSON object in each line.",
        )


class TooManyRows(Unreadable):
    """More rows than may come at once."""


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

    def as_dict(self) -> dict[str, Json]:
        return {name: value for name, value in asdict(self).items() if name != "advice"}


@dataclass(frozen=True)
class NumberedRows:
    """The rows, and the line number of each."""

    rows: list[dict[str, Value]]
    numbers: Sequence[int]


class WrongLines(NotJson):
    """Rows that are not objects. `problems` are the first of `count`."""

    def __init__(self, problems: Sequence[LineProblem], count: int) -> None:
        first = problems[0]
        super().__init__(first.line, first.problem, first.character)
        self.problems = tuple(problems)
        self.facts["count"] = count

    def as_dict(self) -> dict[str, Json]:
        return {**super().as_dict(), "problems": [problem.as_dict() for problem in self.problems]}


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

    def as_dict(self) -> dict[str, Json]:
        return {**super().as_dict(), "problems": [problem.as_dict() for problem in self.problems]}


def parse_lines(data: bytes, rows_max: int) -> list[dict[str, Value]]:
    """The objects of the lines, in their order."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NotJson(data.count(b"\n", 0, error.start) + 1, "it is not UTF-8") from error
    rows: list[dict[str, Value]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip(" \t\r")
        if line:
            if len(rows) == rows_max:
                raise TooManyRows("too many rows at once", rows_max=rows_max, advice="Send fewer.")
            rows.append(parse_line(line, number))
    return rows


def read_lines(data: bytes, rows_max: int) -> NumberedRows:
    """The objects of the lines, in their order. `WrongLines` if some are not objects, `TooManyRows` if too many."""
    text = _text(data)
    rows: list[dict[str, Value]] = []
    numbers: list[int] = []
    problems: list[LineProblem] = []
    wrong = 0
    for number, line in enumerate(text.split("\n"), start=1):
        given = line.strip(" \t\r")
        if not given:
            continue
        if len(rows) + wrong == rows_max:
            raise TooManyRows("too many rows at once", rows_max=rows_max, advice="Send fewer.")
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
    return NumberedRows(rows, numbers)


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


def parse_line(line: str, number: int) -> dict[str, Value]:
    """The object of one line, which has no blanks around it."""
    try:
        row, end = _DECODER.raw_decode(line)
    except json.JSONDecodeError as error:
        raise NotJson(number, error.msg, error.pos + 1) from error
    except (ValueError, RecursionError) as error:
        raise NotJson(number, str(error)) from error
    if end != len(line):
        raise NotJson(number, "there is text after its end", end + 1)
    if not isinstance(row, dict):
        raise NotJson(number, f"it is a {type(row).__name__}")
    return row


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def python_values(rows: Sequence[dict[str, Value]], columns: Sequence[Column]) -> None:
    """Replace JSON's values by Python's, in these very dicts; `Invalid` naming the columns of values without one."""
    decoders = {column.name: decode for column in columns if (decode := _decoder(column)) is not None}
    problems = Misfits()
    for name, decode in decoders.items():
        for row in rows:
            value = row.get(name)
            if value is not None:
                try:
                    row[name] = decode(value)
                except _Wrong as wrong:
                    problem = f"a value is not the {wrong.wanted} that it should be"
                    problems.add(Problem(wrong.path, problem, 1, _ADVICE[wrong.wanted]))
    problems.raise_invalid()


class _Wrong(Exception):
    def __init__(self, path: str, wanted: str) -> None:
        self.path = path
        self.wanted = wanted


def _decoder(column: Column) -> Decode | None:
    """How a column's values become Python's; None if they stay as they are."""
    kind = column.field.type
    if types.is_binary(kind):
        return partial(_bytes, column.path)
    if types.is_floating(kind):
        return partial(_number, column.path)
    if types.is_struct(kind):
        return _struct_decoder(column)
    if types.is_list(kind) or types.is_map(kind):
        # Of a map only the values: its keys are text, in JSON and in the table.
        inside = _decoder(column.children[-1])
        return None if inside is None else partial(_list if types.is_list(kind) else _map, inside)
    return None


def _struct_decoder(column: Column) -> Decode | None:
    inside = {child.name: found for child in column.children if (found := _decoder(child)) is not None}
    return partial(_struct, inside) if inside else None


# A value of an unexpected form stays as it is: all such values are refused together, later.


def _inside(decode: Decode, value: Value) -> Value:
    return None if value is None else decode(value)


def _struct(inside: Mapping[str, Decode], value: Value) -> Value:
    if not isinstance(value, dict):
        return value
    return {name: _inside(inside[name], one) if name in inside else one for name, one in value.items()}


def _list(decode: Decode, value: Value) -> Value:
    return [_inside(decode, one) for one in value] if isinstance(value, list) else value


def _map(decode: Decode, value: Value) -> Value:
    return {key: _inside(decode, one) for key, one in value.items()} if isinstance(value, dict) else value


def _bytes(path: str, value: Value) -> Value:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Wrong(path, "base64") from error


def _number(path: str, value: Value) -> Value:
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, float) and isinf(value):
        raise _Wrong(path, "double")
    return value
