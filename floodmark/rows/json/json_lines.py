"""Rows from JSON lines: text to dicts, and JSON's forms of values to Python's.

The reverse of `rows/json/ndjson.py`: bytes come as base64, the numbers that JSON does not have as the texts NaN,
Infinity and -Infinity. Everything else (times, decimals, nulls, values that do not fit) is checked where all dicts are,
in `rows/staging/dicts.py`. A line is one object; any other line is refused with its number, before any row counts.
Blank lines are no rows. A number too large for a double is refused, not read as infinity.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isinf, nan
from typing import Any

from pyarrow import types

from floodmark.errors import Invalid
from floodmark.rows.convert import Column
from floodmark.rows.misfits import Problem, Problems

Decode = Callable[[Any], Any]

_NUMBERS = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
_ADVICE = {
    "base64": "In JSON, bytes are base64 text.",
    "double": "In JSON, a number that is none, or is infinite, is the text NaN, Infinity or -Infinity.",
}


class WrongLines(Invalid):
    """The text cannot be read as rows, whatever table they are for."""

    @property
    def kind(self) -> str:
        return Invalid.__name__  # the name that callers know


class NotJson(WrongLines):
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


class TooManyRows(WrongLines):
    """More rows than may come at once."""


def parse_lines(data: bytes, rows_max: int) -> list[dict[str, Any]]:
    """The objects of the lines, in their order."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise NotJson(data.count(b"\n", 0, error.start) + 1, "it is not UTF-8") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip(" \t\r")
        if line:
            if len(rows) == rows_max:
                raise TooManyRows("these are more rows than may come at once", rows_max=rows_max, advice="Send fewer.")
            rows.append(parse_line(line, number))
    return rows


def parse_line(line: str, number: int) -> dict[str, Any]:
    """The object of one line, which has no blanks around it."""
    try:
        row, end = _DECODER.raw_decode(line)
    except json.JSONDecodeError as error:
        raise NotJson(number, error.msg, error.pos + 1) from error
    except (ValueError, RecursionError) as error:
        raise NotJson(number, str(error)) from error
    if end != len(line):
        raise NotJson(number, "more after its end", end + 1)
    if not isinstance(row, dict):
        raise NotJson(number, f"it is a {type(row).__name__}")
    return row


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number in JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def python_values(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> None:
    """Replace JSON's values by Python's, in these very dicts; `Invalid` naming the columns of values without one."""
    decoders = {column.name: decode for column in columns if (decode := _decoder(column)) is not None}
    problems = Problems()
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


def _inside(decode: Decode, value: Any) -> Any:
    return None if value is None else decode(value)


def _struct(inside: Mapping[str, Decode], value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _inside(inside[name], one) if name in inside else one for name, one in value.items()}


def _list(decode: Decode, value: Any) -> Any:
    return [_inside(decode, one) for one in value] if isinstance(value, list) else value


def _map(decode: Decode, value: Any) -> Any:
    return {key: _inside(decode, one) for key, one in value.items()} if isinstance(value, dict) else value


def _bytes(path: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Wrong(path, "base64") from error


def _number(path: str, value: Any) -> Any:
    if isinstance(value, str):
        return _NUMBERS.get(value, value)
    if isinstance(value, float) and isinf(value):
        raise _Wrong(path, "double")
    return value
