"""Hashes of an index: the same value, the same hash, whatever way it came; and hashes that a stranger cannot aim at."""

from __future__ import annotations

import math
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from floodmark.errors import Invalid
from floodmark.rows.index import siphash
from floodmark.rows.index.hashing import Encoder, Secret, ValueHashes, hash_values, is_wide
from floodmark.rows.index.siphash import LENGTH_MAX, hash_texts, hash_words

SECRET = Secret("00112233445566778899aabbccddeeff")
# The key of the reference implementation's own test vectors: bytes 0 to 15.
KEY = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
# SipHash-2-4 with 16 bytes of output, of the first n bytes of 0, 1, 2, …; computed by OpenSSL.
VECTORS = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    9: "264499060ad9baabc47f8b02bb6d71ed",
    63: "5150d1772f50834a503e069a973fbd7c",
}


def hashes(values: list[Any], kind: pa.DataType) -> list[tuple[int, int]]:
    return pairs(hash_values([pa.array(values, kind)], SECRET))


def pairs(found: ValueHashes) -> list[tuple[int, int]]:
    low = np.zeros(len(found), np.uint64) if found.low is None else found.low
    return list(zip(found.high.tolist(), low.tolist(), strict=True))


def sip(values: list[bytes], key: tuple[int, int] = KEY) -> list[str]:
    lengths = np.array([len(value) for value in values], np.int64)
    data = np.frombuffer(b"".join(values), np.uint8)
    first, second = hash_texts(data, np.cumsum(lengths) - lengths, lengths, key)
    return [word(a) + word(b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]


def word(number: int) -> str:
    return number.to_bytes(8, "little").hex()


# ── SipHash ──


@pytest.mark.parametrize("length", VECTORS)
@pytest.mark.parametrize("others", [0, 100])
def test_siphash_is_that_of_the_reference(length: int, others: int) -> None:
    assert sip([bytes(range(length)), *[b"other"] * others])[0] == VECTORS[length]


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=60), st.integers(0, 2**64 - 1))
def test_many_values_have_the_hashes_of_each_alone(values: list[bytes], key: int) -> None:
    assert sip(values, (key, 1)) == [sip([value], (key, 1))[0] for value in values]


def test_blocks_and_long_values_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [bytes([n % 251]) * (n * 37 % (LENGTH_MAX + 90)) for n in range(700)]
    whole = sip(values)
    assert max(map(len, values)) > LENGTH_MAX
    monkeypatch.setattr(siphash, "_BLOCK_ROWS", 7)
    assert sip(values) == whole
    monkeypatch.setattr(siphash, "_FEW", 10_000)
    assert sip(values) == whole
    assert len(set(whole)) == len(set(values))


def test_a_long_value_has_a_keyed_hash_too() -> None:
    value = b"x" * (LENGTH_MAX + 1)
    assert sip([value]) == [blake2b(value, digest_size=16, key=bytes(range(16))).hexdigest()]
    assert sip([value], (1, 2)) != sip([value])


def test_rows_of_words_have_the_hash_of_their_bytes() -> None:
    rows = np.arange(100, dtype=np.uint64)
    for count in (3, 100):
        first, second = hash_words([rows[:count], rows[:count] * np.uint64(7)], KEY)
        texts = [int(row).to_bytes(8, "little") + (int(row) * 7).to_bytes(8, "little") for row in rows[:count]]
        assert [word(a) + word(b) for a, b in zip(first.tolist(), second.tolist(), strict=True)] == sip(texts)


# ── the same value ──


SAME: list[tuple[str, list[Any], list[pa.DataType]]] = [
    ("whole numbers", [0, 1, -1, 127, None], [pa.int8(), pa.int16(), pa.int32(), pa.int64()]),
    ("floats", [0.0, 1.5, -2.25, math.inf, math.nan, None], [pa.float32(), pa.float64()]),
    (
        "decimals",
        [Decimal("0"), Decimal("-1.5"), Decimal("99.25"), None],
        [pa.decimal128(5, 2), pa.decimal128(38, 2), pa.decimal128(20, 7), pa.decimal256(40, 3)],
    ),
    ("dates", [date(1, 1, 1), date(2026, 11, 19), None], [pa.date32(), pa.date64()]),
    ("times", [datetime(1900, 1, 1), datetime(2026, 11, 19), None], [pa.timestamp(u) for u in ("s", "ms", "us")]),
    (
        "texts",
        ["", "a", "é東", "x" * 60, None],
        [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
    ),
    (
        "bytes",
        [b"", b"\0", b"\xff" * 700, None],
        [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.large_binary())],
    ),
]


@pytest.mark.parametrize(("values", "kinds"), [row[1:] for row in SAME], ids=[row[0] for row in SAME])
def test_a_hash_does_not_depend_on_the_type_that_holds_the_value(values: list[Any], kinds: list[pa.DataType]) -> None:
    expected = hashes(values, kinds[0])
    assert len(set(expected)) == len(values)
    for kind in kinds:
        array = pa.array(values, kinds[0]).cast(kind) if pa.types.is_decimal(kind) else pa.array(values, kind)
        assert hash_values([array], SECRET).low is None or is_wide([kind])
        assert pairs(hash_values([array], SECRET)) == expected
        chunked = pa.chunked_array([array.slice(0, 1), array.slice(1, 0), array.slice(1)])
        assert pairs(hash_values([chunked], SECRET)) == expected
        assert pairs(hash_values([array.slice(2)], SECRET)) == expected[2:]


def test_a_moment_has_one_hash_in_every_time_zone() -> None:
    moment = [datetime(2026, 11, 19, 12, tzinfo=UTC)]
    assert len({*hashes(moment, pa.timestamp("us", "UTC")), *hashes(moment, pa.timestamp("ms", "Asia/Tokyo"))}) == 1


def test_zeros_are_one_value_and_so_is_every_nan() -> None:
    odd = np.array([0xFFF8000000000001, 0x7FF8000000000000], np.uint64).view(np.float64)
    found = pairs(hash_values([pa.array([0.0, -0.0, *odd])], SECRET))
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


def test_null_is_a_value_whatever_lies_below_it() -> None:
    for kind, values in ((pa.int64(), [1, 2, 3]), (pa.string(), ["a", "b", "c"]), (pa.uuid(), [uuid.uuid4()] * 3)):
        full = pa.array([value.bytes if isinstance(value, uuid.UUID) else value for value in values], kind)
        storage = full.storage if isinstance(full, pa.ExtensionArray) else full
        hiding = pa.Array.from_buffers(storage.type, 3, [pa.py_buffer(bytes([0b001])), *storage.buffers()[1:]])
        found = pairs(hash_values([hiding], SECRET))
        assert found[1] == found[2] == pairs(hash_values([pa.nulls(1, storage.type)], SECRET))[0]
        assert found[0] == pairs(hash_values([full], SECRET))[0] != found[1]


def test_numbers_and_uuids_never_share_a_hash_and_neighbours_lie_apart() -> None:
    found = hash_values([pa.array(np.arange(-50_000, 50_000))], SECRET)
    assert found.low is None
    assert len(np.unique(found.high)) == 100_000
    # Fences split the whole range: as many values in each part of it.
    counts, _ = np.histogram(found.high.astype(np.float64), bins=50, range=(0, 2.0**64))
    assert counts.min() > 1700
    ids = pa.array([n.to_bytes(16, "big") for n in range(1000)] + [n.to_bytes(16, "little") for n in range(1, 1000)])
    found = hash_values([ids.cast(pa.binary(16))], SECRET)
    assert len(np.unique(found.high)) == 1999
    assert pairs(hash_values([ids.cast(pa.binary(16)).cast(pa.uuid())], SECRET)) == pairs(found)


def test_hashes_are_those_of_the_documented_format() -> None:
    def key(purpose: str) -> int:
        digest = blake2b(purpose.encode(), digest_size=8, key=bytes.fromhex(SECRET.text)).digest()
        return int.from_bytes(digest, "little")

    def mix(number: int) -> int:
        number %= 2**64
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        return number ^ number >> 31

    def siphash(words: list[int], purpose: str) -> tuple[int, int]:
        text = b"".join((one % 2**64).to_bytes(8, "little") for one in words)
        found = sip([text], (key(purpose), key(f"{purpose}, second word")))[0]
        return int.from_bytes(bytes.fromhex(found[:16]), "little"), int.from_bytes(bytes.fromhex(found[16:]), "little")

    assert hashes([-5], pa.int32()) == [(mix(-5 + key("numbers")), 0)]
    assert hashes([-0.0, 1.0], pa.float32()) == [(mix(key("numbers")), 0), (mix((1023 << 52) + key("numbers")), 0)]
    assert hashes([date(1970, 1, 3)], pa.date32()) == [(mix(2 + key("numbers")), 0)]
    assert hashes([datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("s")) == [(mix(10**6 + key("numbers")), 0)]
    assert hashes([True], pa.bool_()) == [(mix(1 + key("numbers")), 0)]
    assert hashes([None], pa.int64()) == [(mix(key("null") + key("numbers")), 0)]
    assert hashes([None], pa.string()) == [(mix(key("null") + key("numbers")), key("null"))]
    low = mix(2 + key("numbers, second word"))
    assert hashes([(2**64 + 2).to_bytes(16, "big")], pa.binary(16)) == [(mix((1 ^ low) + key("numbers")), low)]
    number = int(Decimal("-1.5") * 10**38)
    words = [(number >> shift) % 2**64 for shift in (0, 64, 128, 192)]
    assert hashes([Decimal("-1.5")], pa.decimal128(5, 2)) == [siphash(words, "rows")]
    (text,) = hashes(["abc"], pa.string())
    both = hash_values([pa.array(["abc", None]), pa.array([7, 7])], SECRET)
    assert pairs(both) == [siphash([*text, 7, 0], "rows"), siphash([0, 0, 7, 1], "rows")]
    assert SECRET.check == f"{key('check'):016x}"


# ── several columns ──


def test_a_key_of_several_columns_is_all_of_them_in_their_order() -> None:
    rows = [(1, "a"), (1, "b"), (2, "a"), (None, "a"), (0, "a"), (1, None), (1, ""), (None, None)]
    columns = [pa.array([row[0] for row in rows], pa.int32()), pa.array([row[1] for row in rows])]
    found = pairs(hash_values(columns, SECRET))
    assert len(set(found)) == len(rows)
    wide = [columns[0].cast(pa.int64()), columns[1].cast(pa.large_string()).dictionary_encode()]
    assert pairs(hash_values([pa.chunked_array([column]) for column in wide], SECRET)) == found
    assert pairs(hash_values([column.slice(3) for column in columns], SECRET)) == found[3:]
    # A row of nulls only is the same in any order.
    assert set(pairs(hash_values(columns[::-1], SECRET))) & set(found) == {found[-1]}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(["", "a", "ab"]), st.none() | st.booleans()), min_size=1))
def test_equal_rows_and_only_they_have_equal_hashes(rows: list[tuple[int, str, bool | None]]) -> None:
    columns = [
        pa.array([row[at] for row in rows], kind) for at, kind in enumerate((pa.int64(), pa.string(), pa.bool_()))
    ]
    found = pairs(hash_values(columns, SECRET))
    assert len(set(found)) == len(set(rows))
    assert len(set(zip(found, rows, strict=True))) == len(set(rows))


# ── secrets and encoders ──


def test_another_secret_gives_other_hashes_and_no_secret_is_shown() -> None:
    other = Secret("00112233445566778899aabbccddeefe")
    for values, kind in (([1, 2], pa.int64()), (["a", "b"], pa.string()), ([Decimal(1), None], pa.decimal128(3, 0))):
        array = pa.array(values, kind)
        assert not set(pairs(hash_values([array], SECRET))) & set(pairs(hash_values([array], other)))
    assert SECRET.check != other.check
    assert SECRET.text not in f"{SECRET!r} {SECRET} {SECRET.check}"


@pytest.mark.parametrize("text", ["", "00", "zz" * 16, "00" * 17])
def test_a_secret_is_16_bytes(text: str) -> None:
    with pytest.raises(Invalid, match="16 bytes"):
        Secret(text)


def test_an_encoder_of_4_bits_forces_collisions() -> None:
    encoder = Encoder(200, bits=4)
    for column in (pa.array(range(1000)), pa.array([str(n) for n in range(1000)])):
        found = hash_values([column], SECRET, encoder)
        full = hash_values([column], SECRET)
        assert (found.high == full.high >> np.uint64(60) << np.uint64(60)).all()
        assert len(set(pairs(found))) == 16


@pytest.mark.parametrize("kind", [pa.uint64(), pa.time32("s"), pa.duration("s"), pa.binary(5), pa.list_(pa.int8())])
def test_what_no_table_holds_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(TypeError, match="not indexed"):
        hash_values([pa.nulls(2, kind)], SECRET)


def test_no_rows_have_no_hashes() -> None:
    for kind in (pa.int64(), pa.string(), pa.decimal128(5, 2)):
        assert len(hash_values([pa.array([], kind)], SECRET)) == 0
        assert len(hash_values([pa.chunked_array([], kind)], SECRET)) == 0
        assert len(hash_values([pa.chunked_array([], kind), pa.chunked_array([], kind)], SECRET)) == 0
    with pytest.raises(TypeError, match="at least one"):
        hash_values([], SECRET)
