"""Rows as JSON lines, column by column.

The text of a row is `json.dumps(row, ensure_ascii=False)` of its Python values. It depends on that row alone, not on
its batch: a body that is built again has the same bytes (I8). JSON is strict: a number that JSON does not have (NaN,
Infinity) is text, and so are times (ISO 8601), decimals (in full) and bytes (base64). Where Arrow writes the same text,
Arrow writes whole columns at once; Python writes all else, value by value.

A type or value without such a text is Invalid, never approximated. Text that is not UTF-8 is Corrupt.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from math import isfinite, isnan

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from floodmark.errors import Corrupt, Invalid
from floodmark.json_form import Json
from floodmark.model import Value
from floodmark.rows.arrays import list_of

_AS_PARQUET = "`floodmark export` writes it as Parquet."
_TEXT = pa.large_string()
# The range in which Python writes a number without an exponent.
_FLOAT_MIN, _FLOAT_MAX = 1e-4, 1e16
# The first and the last moment, and the days, of the years 1 to 9999.
_MOMENTS = [pa.scalar(moment, pa.timestamp("us")).value for moment in (datetime.min, datetime.max)]
_DAYS = [pa.scalar(day, pa.date32()).value for day in (date.min, date.max)]
_MOMENT_BYTES, _SECOND_BYTES = len("0001-01-01 00:00:00.000000"), len("0001-01-01 00:00:00")
_ESCAPED = np.array([code < 0x20 or code in b'"\\' for code in range(256)])


def encode_lines(batch: pa.RecordBatch) -> pa.Array:
    """The text of every row, ended by a newline, as large_binary."""
    for field in batch.schema:
        if not holds(field.type):
            advice = "Leave it out, or write Parquet, which holds everything."
            raise Invalid("JSON lines cannot hold this column", column=field.name, type=field.type, advice=advice)
    # As in a dict, the last of several columns with one name counts.
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if not columns:
        return pa.array([b"{}\n"] * len(batch), pa.large_binary())
    return _object(columns, "}\n").cast(pa.large_binary())


def encode_text(batch: pa.RecordBatch) -> bytes:
    """The lines of all rows as one text."""
    return _bytes(encode_lines(batch)).tobytes()


def holds(kind: pa.DataType) -> bool:
    """Whether values of the type have a text in JSON: the keys of its objects are text, a time has a day."""
    if types.is_map(kind) and not (types.is_string(kind.key_type) or types.is_large_string(kind.key_type)):
        return False
    if types.is_time(kind) or types.is_duration(kind):
        return False
    return all(holds(kind.field(at).type) for at in range(kind.num_fields))


def dicts(batch: pa.RecordBatch) -> list[dict[str, Value]]:
    """Rows as dicts of Python's values; maps are dicts too."""
    with _readable():
        rows: list[dict[str, Value]] = batch.to_pylist(maps_as_pydicts="strict")
    return rows


def json_value(value: Value) -> Json:
    """A value with all that JSON does not have as text, at any depth."""
    if isinstance(value, dict):
        return {str(json_value(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else plain_text(value)
    return value if value is None or isinstance(value, str | int) else plain_text(value)


def json_text(value: Value) -> str:
    """One value, or one row as a dict, as JSON: the reference that all other functions here must equal."""
    try:
        return json.dumps(value, default=plain_text, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(json_value(value), ensure_ascii=False)


def plain_text(value: Value) -> str:
    """A value as text: times in ISO 8601, bytes in base64, decimals in full, floats as Java and Python read them."""
    if isinstance(value, float):
        return repr(value) if isfinite(value) else "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} has no form as text")


@contextmanager
def _readable() -> Iterator[None]:
    """Around everything that turns Arrow's values into Python's: `Invalid` for those that Python does not have."""
    try:
        yield
    except OverflowError as error:
        raise _beyond_years(error) from error
    except KeyError as error:
        raise Invalid("a map has a key twice", cause=error, advice=_AS_PARQUET) from error


def _beyond_years(cause: Exception | None = None) -> Invalid:
    return Invalid("a time is beyond the years 1 to 9999", cause=cause, advice=_AS_PARQUET)


# ── whole columns: null stands for the text null until texts are joined ──


def _object(columns: dict[str, pa.Array], end: str) -> pa.Array:
    """The texts of objects with these members."""
    parts: list[str | pa.Array] = []
    for name, column in columns.items():
        parts += [("{" if not parts else ", ") + json.dumps(name, ensure_ascii=False) + ": ", _texts(column, name)]
    return _joined(*parts, end, nulls="replace")


def _joined(*parts: str | pa.Array, nulls: str = "emit_null") -> pa.Array:
    whole = [pa.scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*whole, pa.scalar("", _TEXT), null_handling=nulls, null_replacement="null")


def _texts(column: pa.Array, name: str) -> pa.Array:
    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind):
        return _quoted(_escaped(column, name))
    if types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind):
        return column.cast(_TEXT)
    if types.is_float32(kind) or types.is_float64(kind):
        return _floats(column.cast(pa.float64()))
    if kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        return _moments(column, "+00:00" if kind.tz else "")
    if types.is_date32(kind):
        return _quoted(_within(column, pa.int32(), _DAYS).cast(_TEXT))
    if types.is_decimal(kind):
        return _decimals(column)
    if types.is_struct(kind) and kind.num_fields:
        members = dict(zip([field.name for field in kind], column.flatten(), strict=True))
        return _where_valid(column, _object(members, "}"))
    if types.is_list(kind):
        values = _texts(column.flatten(), name).fill_null("null")
        return _joined("[", pc.binary_join(list_of(column, values, pa.list_(_TEXT)), pa.scalar(", ", _TEXT)), "]")
    return _one_by_one(column)


def _one_by_one(column: pa.Array) -> pa.Array:
    with _readable():
        values = column.to_pylist(maps_as_pydicts="strict")
    return pa.array([json_text(value) for value in values], _TEXT)


def _replaced(texts: pa.Array, values: pa.Array, strange: pa.Array) -> pa.Array:
    """The texts, but those of unusual values written by Python."""
    if not pc.any(strange).as_py():
        return texts
    return pc.replace_with_mask(texts, strange, _one_by_one(values.filter(strange)))


def _where_valid(column: pa.Array, texts: pa.Array) -> pa.Array:
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, _TEXT)) if column.null_count else texts


def _quoted(texts: pa.Array) -> pa.Array:
    return _joined('"', texts, '"')


def _escaped(column: pa.Array, name: str) -> pa.Array:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise Corrupt("a text is not UTF-8", column=name, cause=error) from error
    texts = column.cast(_TEXT)
    codes = np.unique(_bytes(texts)[_ESCAPED[_bytes(texts)]])
    # The backslash first: the escapes of the others contain one.
    for code in sorted(codes, key=lambda code: code != ord("\\")):
        text = chr(code)
        texts = pc.replace_substring(texts, pattern=text, replacement=json.dumps(text)[1:-1])
    return texts


def _bytes(texts: pa.Array) -> npt.NDArray[np.uint8]:
    """The bytes of all texts, one after the other."""
    _, offsets, data = texts.buffers()
    if data is None or not len(texts):
        return np.zeros(0, np.uint8)
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]


def _floats(column: pa.Array) -> pa.Array:
    size = pc.abs(column)
    texts = column.cast(_TEXT)
    simple = pc.or_(pc.equal(size, 0.0), pc.and_(pc.greater_equal(size, _FLOAT_MIN), pc.less(size, _FLOAT_MAX)))
    # Arrow writes exponents sooner.
    simple = pc.and_not(simple, pc.match_substring(texts, "e"))
    texts = pc.if_else(pc.equal(column, pc.floor(column)), _joined(texts, ".0"), texts)
    return _replaced(texts, column, pc.invert(simple).fill_null(False))


def _decimals(column: pa.Array) -> pa.Array:
    texts = column.cast(_TEXT)
    # Numbers near to zero, and scales below zero: Arrow writes an exponent.
    return _replaced(_quoted(texts), column, pc.match_substring(texts, "E").fill_null(False))


def _within(column: pa.Array, kind: pa.DataType, bounds: list[int]) -> pa.Array:
    found = pc.min_max(column.cast(kind)).as_py()
    if found["min"] is not None and not bounds[0] <= found["min"] <= found["max"] <= bounds[1]:
        raise _beyond_years()
    return column


def _moments(column: pa.Array, zone: str) -> pa.Array:
    """Microseconds are written only if not zero. All texts of Arrow's are equally long, so it is one matrix."""
    numbers = _within(column, pa.int64(), _MOMENTS).cast(pa.int64()).fill_null(0)
    written = _bytes(numbers.cast(pa.timestamp("us")).cast(_TEXT)).reshape(len(column), _MOMENT_BYTES)
    whole = np.asarray(numbers) % 1_000_000 == 0
    if whole.all():
        texts = _matrix(written[:, :_SECOND_BYTES], zone)
    elif whole.any():
        texts = pc.if_else(pa.array(whole), _matrix(written[:, :_SECOND_BYTES], zone), _matrix(written, zone))
    else:
        texts = _matrix(written, zone)
    return _where_valid(column, texts)


def _matrix(written: npt.NDArray[np.uint8], zone: str) -> pa.Array:
    rows, width = written.shape
    end = np.frombuffer(f'{zone}"'.encode(), np.uint8)
    text = np.empty((rows, 1 + width + len(end)), np.uint8)
    text[:, 0] = ord('"')
    text[:, 1 : 1 + width] = written
    text[:, len('"0001-01-01')] = ord("T")
    text[:, 1 + width :] = end
    offsets = np.arange(rows + 1, dtype=np.int64) * text.shape[1]
    return pa.LargeStringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(text))
