"""Rows as Python dicts, the form of JSON, as an Arrow table of a table's columns.

JSON's rules: an absent key is null, times and dates are ISO text, whole numbers and text may be decimals. Python's
leniency does not apply: a bool is not a number, a float is no decimal and no whole number, a number is no text. Values
that do not fit are counted per column with an example, and raised once for all rows. `rows_schema` returns the columns
that the rows have beyond the table's, by their values; it checks none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence, Sized
from datetime import date, datetime
from decimal import Decimal, InvalidOperation, localcontext
from itertools import accumulate, chain
from math import isfinite
from typing import TypeGuard, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from floodmark.errors import Invalid
from floodmark.model import Row, Value
from floodmark.rows.convert import Column, Shape
from floodmark.rows.misfits import Misfits, Problem
from floodmark.rows.schema import nearest

Wanted = TypeVar("Wanted")

_NONE = type(None)
# What may become a decimal, a timestamp or a date.
_DECIMALS: tuple[type[Decimal | int | str], ...] = (Decimal, int, str)
_TIMES: tuple[type[datetime | str], ...] = (datetime, str)
_DAYS: tuple[type[date | str], ...] = (date, str)
_EXAMPLE_CHARS_MAX = 60
_FLOAT_MAX = (2 - 2**-23) * 2.0**127
_YEAR_ONE_US, _DAY_US = -62_135_596_800_000_000, 86_400_000_000
_TOO_FINE = re.compile(r"[.,]\d{6}\d*[1-9]")


def rows_to_table(rows: Sequence[Row], shape: Shape) -> pa.Table:
    """The rows as an Arrow table with the table's columns, or `Invalid` naming keys, columns and counts."""
    _check_dicts(rows)
    problems = Misfits()
    arrays = _fields(rows, shape.columns, "", problems)
    problems.raise_invalid()
    return pa.table(arrays, names=[column.name for column in shape.columns])


def values_to_array(values: Sequence[Value], column: Column, what: str) -> pa.Array:
    """Single values as those of a column, or `Invalid`, whose message begins with `what`."""
    problems = Misfits()
    array = _array(list(values), column, problems)
    problems.raise_invalid(what=what)
    return array


def rows_schema(rows: Sequence[Row], shape: Shape) -> pa.Schema:
    """The table's columns, wider where a number needs it, and the rows' new ones, also inside structs.

    A value that is no value of its column changes nothing here: `rows_to_table` refuses it.
    """
    _check_dicts(rows)
    return pa.schema(_incoming_fields(rows, shape.columns, ""))


def _check_dicts(rows: Sequence[Row]) -> None:
    for row in rows:
        if not isinstance(row, dict):
            raise Invalid("a row is not a dict", given=type(row).__name__, advice="Send a list of dicts.")


def _incoming_fields(rows: Sequence[Row], columns: tuple[Column, ...], path: str) -> list[pa.Field]:
    kinds = {column.name: _incoming_type([row.get(column.name) for row in rows], column) for column in columns}
    names = {column.name for column in columns}
    for name in dict.fromkeys(key for row in rows if not row.keys() <= names for key in row if key not in names):
        # A key that is not text is no name: it stays an unknown one.
        if isinstance(name, str):
            kinds[name] = _inferred([row.get(name) for row in rows], f"{path}{name}")
    return [pa.field(name, kind) for name, kind in kinds.items()]


def _incoming_type(values: Sequence[Value], column: Column) -> pa.DataType:
    kind = column.field.type
    if types.is_struct(kind):
        dicts = [value for value in values if isinstance(value, dict)]
        return pa.struct(_incoming_fields(dicts, column.children, f"{column.path}."))
    if types.is_map(kind):
        items = [item for value in values if isinstance(value, dict) for item in value.values()]
        return pa.map_(_incoming_type([], column.children[0]), _incoming_type(items, column.children[1]))
    if types.is_list(kind):
        elements = [element for value in values if isinstance(value, list | tuple) for element in value]
        return pa.list_(_incoming_type(elements, column.children[0]))
    if types.is_int32(kind):
        return pa.int64() if any(_needs_long(value) for value in values if value is not None) else kind
    if types.is_decimal(kind):
        digits = [_digits(value, kind.scale) for value in values if value is not None]
        return pa.decimal128(max([kind.precision, *digits]), kind.scale)
    return kind


def _needs_long(value: Value) -> bool:
    try:
        _integer(value, 1 << 31)
    except OverflowError:
        return True
    except TypeError:
        pass  # it is not a whole number: the conversion reports it
    return False


def _digits(value: Value, scale: int) -> int:
    try:
        return len(_decimal(value, pa.decimal128(38, scale)).as_tuple().digits)
    except (TypeError, ValueError, InvalidOperation):
        return 0


def _inferred(values: Sequence[Value], column: str) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise Invalid(
            "the values of a new column have no type in common that a table can hold",
            column=column,
            cause=error,
            advice="Give its values one type, or add the column to the table first.",
        ) from error


def _fields(rows: Sequence[Row | None], columns: tuple[Column, ...], path: str, problems: Misfits) -> list[pa.Array]:
    names = {column.name for column in columns}
    for row in rows:
        if row is not None and not row.keys() <= names:
            for key in row.keys() - names:
                advice = nearest(str(key), sorted(names)) + " Leave it out, or add the column to the table first."
                problems.add(Problem(f"{path}{key}", "the table has no such column", 1, advice))
    return [
        _array([None if row is None else row.get(column.name) for row in rows], column, problems) for column in columns
    ]


def _array(values: list[Value], column: Column, problems: Misfits) -> pa.Array:
    kind = column.field.type
    if types.is_struct(kind):
        structs = _only(values, dict, column, problems)
        children = _fields(structs, column.children, f"{column.path}.", problems)
        fields = [pa.field(child.name, array.type) for child, array in zip(column.children, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=_nulls(structs))
    if types.is_map(kind):
        maps = _only(values, dict, column, problems)
        entries = [list(value.items()) if value is not None else [] for value in maps]
        keys = _array([key for entry in entries for key, _ in entry], column.children[0], problems)
        items = _array([item for entry in entries for _, item in entry], column.children[1], problems)
        map_type = pa.map_(keys.type, items.type)
        return pa.MapArray.from_arrays(_offsets(entries), keys, items, type=map_type, mask=_nulls(maps))
    if types.is_list(kind):
        found = _only(values, (list, tuple), column, problems)
        lists = [value or () for value in found]
        elements = _array(list(chain.from_iterable(lists)), column.children[0], problems)
        list_type = pa.list_(elements.type)
        return pa.ListArray.from_arrays(_offsets(lists), elements, type=list_type, mask=_nulls(found))
    return _leaf(values, column, problems)


def _nulls(values: Sequence[Value]) -> pa.Array | None:
    return pa.array([value is None for value in values], pa.bool_()) if None in values else None


def _offsets(lists: Iterable[Sized]) -> pa.Array:
    return pa.array(accumulate((len(value) for value in lists), initial=0), pa.int32())


def _wrong(column: Column, values: Sequence[Value], problems: Misfits) -> None:
    example = repr(values[0])
    if len(example) > _EXAMPLE_CHARS_MAX:
        example = example[:_EXAMPLE_CHARS_MAX] + "…"
    given = type(values[0]).__name__
    problem = f"a value is not the table's {column.field.type}, for example {given} {example}"
    problems.add(Problem(column.path, problem, len(values), _advice(column.field.type)))


def _only(
    values: list[Value], wanted: type[Wanted] | tuple[type[Wanted], ...], column: Column, problems: Misfits
) -> Sequence[Wanted | None]:
    if _are(values, wanted):
        return values
    _wrong(column, [value for value in values if value is not None and not isinstance(value, wanted)], problems)
    return [value if isinstance(value, wanted) else None for value in values]


def _are(values: list[Value], wanted: type[Wanted] | tuple[type[Wanted], ...]) -> TypeGuard[list[Wanted | None]]:
    return not [value for value in values if value is not None and not isinstance(value, wanted)]


def _advice(kind: pa.DataType) -> str:
    if types.is_timestamp(kind):
        zone = "with a zone, like 2026-11-15T10:00:00Z" if kind.tz else "without a zone, like 2026-11-15T10:00:00"
        return f"Send a datetime, or ISO text, {zone}, with at most microseconds."
    if types.is_date(kind):
        return "Send a date, or ISO text like 2026-11-15."
    if types.is_decimal(kind):
        return "Send a Decimal, a whole number or text like '1.25' that fits the type exactly."
    if types.is_binary(kind):
        return "Send bytes."
    return "Convert the value first."


def _leaf(values: list[Value], column: Column, problems: Misfits) -> pa.Array:
    kind = column.field.type
    if set(map(type, values)) <= _exact(kind):
        try:
            return pa.array(values, kind)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
            pass  # some value is out of range: the slow path below finds which
    if types.is_timestamp(kind) and (moments := _timestamps(values, kind)) is not None:
        return moments
    convert = _converter(kind)
    converted, wrong = [], []
    for value in values:
        try:
            converted.append(None if value is None else convert(value))
        except (TypeError, ValueError, OverflowError, InvalidOperation):
            wrong.append(value)
    if wrong:
        _wrong(column, wrong, problems)
        return pa.nulls(len(values), kind)
    return pa.array(converted, kind)


def _timestamps(values: list[Value], kind: pa.DataType) -> pa.Array | None:
    """ISO texts read by Arrow, several times as fast; None if it does not take them all. It is stricter than we are.

    With one exception: it accepts a year 0, and zones may lift its last day into the first year.
    """
    if not set(map(type, values)) <= {str, _NONE}:
        return None
    try:
        moments = pa.array(values, pa.string()).cast(kind)
    except (pa.ArrowInvalid, UnicodeEncodeError):
        return None
    return moments if pc.min(moments).value >= _YEAR_ONE_US + _DAY_US else None


def _exact(kind: pa.DataType) -> frozenset[type]:
    """Python types whose values Arrow takes as this type without a check of ours."""
    if types.is_integer(kind):
        return frozenset({int, _NONE})
    if types.is_float64(kind):
        return frozenset({float, _NONE})
    if types.is_string(kind):
        return frozenset({str, _NONE})
    if types.is_binary(kind):
        return frozenset({bytes, _NONE})
    if types.is_boolean(kind):
        return frozenset({bool, _NONE})
    if types.is_date(kind):
        return frozenset({date, _NONE})
    return frozenset({_NONE})


def _converter(kind: pa.DataType) -> Callable[[Value], Value]:
    if types.is_integer(kind):
        limit = 1 << (kind.bit_width - 1)
        return lambda value: _integer(value, limit)
    if types.is_floating(kind):
        return lambda value: _float(value, kind)
    if types.is_decimal(kind):
        return lambda value: _decimal(value, kind)
    if types.is_timestamp(kind):
        return lambda value: _timestamp(value, kind.tz is not None)
    if types.is_date(kind):
        return _date
    if types.is_string(kind):
        return lambda value: _instance(value, str).encode().decode()
    if types.is_binary(kind):
        return lambda value: bytes(_instance(value, bytes, bytearray, memoryview))
    return lambda value: _instance(value, bool)


def _instance(value: Value, *wanted: type[Wanted]) -> Wanted:
    # numpy's scalars become Python's own; nothing else is converted.
    if type(value).__module__ == "numpy":
        value = getattr(value, "item", lambda: value)()
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise TypeError(type(value).__name__)
    return value


def _integer(value: Value, limit: int) -> int:
    number = int(_instance(value, int))
    if not -limit <= number < limit:
        raise OverflowError(number)
    return number


def _float(value: Value, kind: pa.DataType) -> float:
    given: float | int = _instance(value, float, int)
    number = float(given)
    if isinstance(given, int) and (number != given or pa.scalar(number, pa.float64()).cast(kind).as_py() != given):
        raise ValueError(given)
    # A column of floats has a known precision, so rounding is intended; turning a number into infinity is not.
    if types.is_float32(kind) and isfinite(number) and abs(number) > _FLOAT_MAX:
        raise OverflowError(given)
    return number


def _decimal(value: Value, kind: pa.DataType) -> Decimal:
    number = Decimal(_instance(value, *_DECIMALS))
    with localcontext(prec=100) as context:
        context.traps[InvalidOperation] = True
        scaled = number.quantize(Decimal(1).scaleb(-kind.scale))
        if not number.is_finite() or scaled != number or abs(scaled.scaleb(kind.scale)) >= 10**kind.precision:
            raise ValueError(value)
    return scaled


def _timestamp(value: Value, zoned: bool) -> datetime:
    moment = _instance(value, *_TIMES)
    if isinstance(moment, str):
        if _TOO_FINE.search(moment):
            raise ValueError("finer than microseconds")
        moment = datetime.fromisoformat(moment)
    if getattr(moment, "nanosecond", 0):
        raise ValueError("finer than microseconds")
    if (moment.utcoffset() is not None) != zoned:
        raise ValueError("zone")
    return moment


def _date(value: Value) -> date:
    day = _instance(value, *_DAYS)
    if isinstance(day, datetime):
        raise TypeError("a time is not a date")
    return date.fromisoformat(day) if isinstance(day, str) else day
