"""Rows as JSON lines: byte for byte what `json.dumps` makes of their Python values, for every type, in any batches."""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from math import inf, isfinite, nan, nextafter
from typing import Any

import pyarrow as pa
import pytest

from floodmark.errors import Corrupt, Invalid
from floodmark.rows.json.ndjson import encode_lines, encode_text
from floodmark.rows.json.text_files import write_file
from floodmark.storage import Storage

ROWS = 400
CONTROLS = "".join(map(chr, range(0x20)))
TEXTS = ["", '"', "\\", '\\"', "\\n", "a\nb\tc\r\b\f", CONTROLS, "\0", "\x7f", "\u2028\u2029", "é", "𝄞😀", "null", "/"]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.1, 1e-4, 1e-5, 1e15, 1e16, 1e17, 1e22, 2.0**53, 5e-324, 1.7976931348623157e308]
AROUND = [nextafter(number, to) for number in SPECIAL for to in (-inf, inf)]
FIRST, LAST = datetime.min, datetime.max


def told(value: Any) -> Any:
    """What stands in JSON for a value."""
    match value:
        case dict():
            return {key: told(item) for key, item in value.items()}
        case list():
            return [told(item) for item in value]
        case float() if not isfinite(value):
            return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
        case datetime() | date():
            return value.isoformat()
        case Decimal():
            return f"{value:f}"
        case bytes():
            return base64.b64encode(value).decode()
    return value


def plain_lines(batch: pa.RecordBatch) -> list[bytes]:
    rows = batch.to_pylist(maps_as_pydicts="strict")
    return [f"{json.dumps(told(row), ensure_ascii=False, allow_nan=False)}\n".encode() for row in rows]


def a_text(chance: random.Random) -> str:
    if chance.random() < 0.3:
        return chance.choice(TEXTS)
    ranges = [(0, 0x7F), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF)]
    return "".join(chr(chance.randint(*chance.choice(ranges))) for _ in range(chance.randint(0, 12)))


def a_float(chance: random.Random) -> float:
    kind = chance.randrange(5)
    if kind == 0:
        return chance.choice([*SPECIAL, *AROUND, nan, inf, -inf])
    if kind == 1:
        return float(struct.unpack("<d", chance.randbytes(8))[0])
    if kind == 2:
        return float(chance.randint(-(10**17), 10**17))
    if kind == 3:
        return round(chance.uniform(-1e6, 1e6), chance.randint(0, 6))
    return chance.choice([-1, 1]) * 10 ** chance.uniform(-8, 18)


def a_narrow_float(chance: random.Random) -> float:
    return float(struct.unpack("<f", chance.randbytes(4))[0])


def a_moment(chance: random.Random) -> datetime:
    if chance.random() < 0.1:
        return chance.choice([FIRST, LAST, datetime(1970, 1, 1), datetime(1969, 12, 31, 23, 59, 59, 1)])
    moment = FIRST + timedelta(seconds=chance.randrange(int((LAST - FIRST).total_seconds())))
    return moment + timedelta(microseconds=chance.choice([0, 1, 10, 500_000, 999_999, chance.randrange(10**6)]))


def a_modern_moment(chance: random.Random) -> datetime:
    """One that every zone and unit can say."""
    return datetime(2000, 1, 1) + timedelta(microseconds=chance.randrange(10**15), seconds=chance.randrange(10**8))


def a_decimal(precision: int, scale: int) -> Callable[[random.Random], Decimal]:
    def make(chance: random.Random) -> Decimal:
        digits = chance.randint(0, precision)
        number = chance.choice([0, 1, 10**digits - 1, chance.randrange(10**digits)])
        return Decimal((chance.choice([0, 1]) if number else 0, tuple(map(int, str(number))), -scale))

    return make


def an_int(bits: int, signed: bool = True) -> Callable[[random.Random], int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return lambda chance: chance.choice([low, high, 0, 1, max(low, -1), chance.randint(low, high)])


def a_day(chance: random.Random) -> date:
    return a_moment(chance).date()


def some_bytes(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randint(0, 9))


def some(make: Callable[[random.Random], Any]) -> Callable[[random.Random], list[Any]]:
    return lambda chance: [None if chance.random() < 0.2 else make(chance) for _ in range(chance.randint(0, 4))]


def parts(**members: Callable[[random.Random], Any]) -> Callable[[random.Random], dict[str, Any]]:
    return lambda chance: {
        name: None if chance.random() < 0.2 else make(chance) for name, make in members.items()
    }  # fmt: skip


def entries(make: Callable[[random.Random], Any]) -> Callable[[random.Random], list[tuple[str, Any]]]:
    return lambda chance: list({a_text(chance): make(chance) for _ in range(chance.randint(0, 3))}.items())


INNER = pa.struct([pa.field('na"me', pa.string()), pa.field("x", pa.float64()), pa.field("l", pa.list_(pa.int64()))])
inner = parts(**{'na"me': a_text, "x": a_float, "l": some(an_int(64))})
KINDS: dict[str, tuple[pa.DataType, Callable[[random.Random], Any]]] = {
    "text": (pa.string(), a_text),
    "large text": (pa.large_string(), a_text),
    "text by number": (pa.dictionary(pa.int32(), pa.string()), a_text),
    "bool": (pa.bool_(), lambda chance: chance.random() < 0.5),
    "int8": (pa.int8(), an_int(8)),
    "int32": (pa.int32(), an_int(32)),
    "int64": (pa.int64(), an_int(64)),
    "uint64": (pa.uint64(), an_int(64, signed=False)),
    "float": (pa.float32(), a_narrow_float),
    "double": (pa.float64(), a_float),
    "moment": (pa.timestamp("us"), a_moment),
    "moment in UTC": (pa.timestamp("us", "UTC"), a_moment),
    "moment in a zone": (pa.timestamp("us", "Europe/Berlin"), a_modern_moment),
    "milliseconds": (pa.timestamp("ms", "UTC"), lambda chance: a_modern_moment(chance).replace(microsecond=7000)),
    "nanoseconds": (pa.timestamp("ns"), a_modern_moment),
    "date": (pa.date32(), a_day),
    "date in milliseconds": (pa.date64(), a_day),
    "decimal": (pa.decimal128(20, 2), a_decimal(20, 2)),
    "decimal near zero": (pa.decimal128(38, 20), a_decimal(38, 20)),
    "decimal of whole numbers": (pa.decimal128(38, 0), a_decimal(38, 0)),
    "large decimal": (pa.decimal256(60, 9), a_decimal(60, 9)),
    "bytes": (pa.binary(), some_bytes),
    "fixed bytes": (pa.binary(4), lambda chance: chance.randbytes(4)),
    "nothing": (pa.null(), lambda chance: None),
    "struct": (INNER, inner),
    "struct of nothing": (pa.struct([]), lambda chance: {}),
    "list": (pa.list_(pa.timestamp("us", "UTC")), some(a_moment)),
    "list of lists": (pa.list_(pa.list_(pa.string())), some(some(a_text))),
    "list of structs": (pa.list_(INNER), some(inner)),
    "large list": (pa.large_list(pa.float32()), some(a_narrow_float)),
    "map": (pa.map_(pa.string(), pa.decimal128(12, 10)), entries(a_decimal(12, 10))),
    "struct of maps": (pa.struct({"m": pa.map_(pa.string(), INNER)}), parts(m=entries(inner))),
}


def a_column(kind: str, seed: int, nulls: float) -> pa.Array:
    chance = random.Random(f"{kind} {seed}")
    arrow, make = KINDS[kind]
    return pa.array([None if chance.random() < nulls else make(chance) for _ in range(ROWS)], arrow)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nulls", [0.0, 0.2, 1.0])
def test_a_column_of_any_type_has_the_plain_text(kind: str, nulls: float) -> None:
    batch = pa.RecordBatch.from_arrays([a_column(kind, 1, nulls)], ["c"])
    assert encode_lines(batch).to_pylist() == plain_lines(batch)
    # What was cut off, at either end, is in the same buffers.
    part = batch.slice(7, 90)
    assert encode_lines(part).to_pylist() == plain_lines(part)


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_many_columns_have_the_plain_text_in_any_batches(seed: int) -> None:
    chance = random.Random(seed)
    kinds = chance.sample(list(KINDS), chance.randint(1, 12))
    columns = [a_column(kind, seed, chance.choice([0.0, 0.1])) for kind in kinds]
    names = [f"{kind} {a_text(chance)}" for kind in kinds]
    batch = pa.RecordBatch.from_arrays(columns, names)
    whole = encode_lines(batch).to_pylist()
    assert whole == plain_lines(batch)
    assert encode_text(batch) == b"".join(whole)
    cuts = [0, *sorted(chance.sample(range(ROWS), 5)), ROWS]
    for start, stop in pairwise(cuts):
        assert encode_lines(batch.slice(start, stop - start)).to_pylist() == whole[start:stop]


def test_every_character_that_json_escapes_is_escaped_alone_and_among_others() -> None:
    for texts in ([chr(code) for code in range(0x250)], [CONTROLS + '\\"', "\\u0041", '\\\\""']):
        for column in (texts, *([text] for text in texts)):
            batch = pa.RecordBatch.from_arrays([pa.array(column)], ["v"])
            assert encode_lines(batch).to_pylist() == plain_lines(batch)


def test_floats_of_all_sizes_are_as_python_writes_them() -> None:
    chance = random.Random(5)
    numbers = [a_float(chance) for _ in range(30_000)]
    batch = pa.RecordBatch.from_arrays([pa.array(numbers)], ["x"])
    assert encode_lines(batch).to_pylist() == plain_lines(batch)


def test_a_line_is_what_people_expect_of_json() -> None:
    moment = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    row = {"id": 1, "né": 'a "b"\n', "ts": moment, "x": nan, "d": Decimal("1.50"), "b": b"\0\1", "none": None}
    line = (
        '{"id": 1, "né": "a \\"b\\"\\n", "ts": "2026-03-01T12:30:00+00:00", "x": "NaN", "d": "1.50", '
        '"b": "AAE=", "none": null}\n'
    )
    assert encode_lines(pa.RecordBatch.from_pylist([row])).to_pylist() == [line.encode()]


def test_no_rows_are_no_lines_and_rows_without_columns_are_empty_objects() -> None:
    for kind, (arrow, _) in KINDS.items():
        empty = pa.RecordBatch.from_arrays([pa.array([], arrow)], [kind])
        assert (encode_lines(empty).to_pylist(), encode_text(empty)) == ([], b"")
    rows = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    assert encode_lines(rows).to_pylist() == [b"{}\n", b"{}\n"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([None, 2**62]).cast(pa.timestamp("us")),
        pa.array([-(2**62), 0]).cast(pa.timestamp("us", "UTC")),
        pa.array([2**30], pa.int32()).cast(pa.date32()),
        pa.array([-(2**30)], pa.int32()).cast(pa.date32()),
        pa.array([[2**62]], pa.list_(pa.timestamp("us"))),
        pa.array([[("a", 2**62)]], pa.map_(pa.string(), pa.timestamp("us"))),
    ],
)
def test_a_time_beyond_the_calendar_is_invalid(column: pa.Array) -> None:
    with pytest.raises(Invalid, match="years 1 to 9999"):
        encode_lines(pa.RecordBatch.from_arrays([column], ["t"]))


@pytest.mark.parametrize(
    "kind",
    [pa.map_(pa.int32(), pa.string()), pa.list_(pa.map_(pa.date32(), pa.string())), pa.time64("us"), pa.duration("s")],
)
def test_a_type_without_a_form_in_json_is_invalid_before_any_row(kind: pa.DataType) -> None:
    with pytest.raises(Invalid, match="cannot hold") as raised:
        encode_lines(pa.RecordBatch.from_arrays([pa.array([], kind)], ["odd"]))
    assert raised.value.facts["column"] == "odd"


def test_a_map_with_a_key_twice_is_invalid() -> None:
    twice = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32()))
    with pytest.raises(Invalid, match="key twice"):
        encode_lines(pa.RecordBatch.from_arrays([twice], ["m"]))


def test_text_that_is_not_utf8_is_corrupt() -> None:
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe"))
    with pytest.raises(Corrupt, match="UTF-8"):
        encode_lines(pa.RecordBatch.from_arrays([bad], ["t"]))


def test_a_file_of_json_lines_has_the_same_text() -> None:
    kinds = ["text", "double", "moment in UTC", "decimal", "list of structs", "map"]
    batch = pa.RecordBatch.from_arrays([a_column(kind, 3, 0.1) for kind in kinds], kinds)
    storage = Storage({})
    location = "memory://ndjson/rows.jsonl"
    reader = pa.RecordBatchReader.from_batches(batch.schema, [batch.slice(0, 33), batch.slice(33)])
    assert write_file(storage, location, reader, "jsonl") == ROWS
    with storage.open_input(location) as stream:
        assert stream.read() == b"".join(plain_lines(batch))
