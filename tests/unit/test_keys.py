"""Keys looked up in files: every row that has one of them, whatever the types and the sizes of the chunks."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.types import NestedField

from floodmark import clock
from floodmark.rows import keys
from floodmark.rows.keys import KeySet, Matches, examples, read_keys, render_keys
from floodmark.rows.layout import partition_spec
from floodmark.rows.schema import table_schema
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage


class Files:
    """Data files of one table, in memory."""

    def __init__(self, text: str, key: list[str]) -> None:
        self.storage = Storage({})
        self.schema = table_schema(text, key)
        self.fields: list[NestedField] = [self.schema.find_field(name) for name in key]

    def write(self, rows: list[dict[str, Any]] | pa.Table) -> str:
        spec = partition_spec(self.schema, []).model_dump_json()
        target = StageTarget(f"memory://lake/{clock.new_id()}", self.schema.model_dump_json(), spec)
        (record,) = stage_in_process(target, rows, self.storage)
        return record.path

    def write_empty(self) -> str:
        """A file without rows, which staging never makes, from another writer."""
        import pyarrow.parquet as pq

        from floodmark.rows.schema import arrow_schema

        location = f"memory://lake/{clock.new_id()}/empty.parquet"
        with self.storage.writer(location) as sink:
            pq.write_table(arrow_schema(self.schema).empty_table(), sink)
        return location

    def key_set(self, files: list[str], chunk_rows: int = keys.KEYS_PER_CHUNK) -> KeySet:
        return KeySet(self.storage, files, self.fields, chunk_rows)


def listed(matches: Matches) -> list[tuple[int, int, int]]:
    assert matches.positions.dtype == np.int64
    assert matches.files.dtype == np.int32
    assert matches.places.dtype == np.int64
    parts = (matches.positions.tolist(), matches.files.tolist(), matches.places.tolist())
    return list(zip(*parts, strict=True))


EACH_TYPE: list[tuple[str, list[Any]]] = [
    ("boolean", [True, False]),
    ("int", [-(2**31), 0, 2**31 - 1]),
    ("long", [-(2**63), 0, 2**63 - 1]),
    ("decimal(9,2)", [Decimal("-1.25"), Decimal("0.00"), Decimal("1.25")]),
    ("decimal(38,6)", [Decimal("12345678901234567890123456789012.123456"), Decimal("-0.000001"), Decimal(0)]),
    ("string", ["", "é", "e\u0301", "東京", "a" * 5000]),
    ("binary", [b"", b"\x00", b"\x00\x00", b"\xff"]),
    ("date", [date(1, 1, 1), date(1969, 12, 31), date(9999, 12, 31)]),
    ("timestamp_ntz", [datetime(1900, 1, 1), datetime(2026, 11, 15, 10, 0, 0, 1), datetime(2026, 11, 15, 10)]),
    ("timestamp", [datetime(1900, 1, 1, tzinfo=UTC), datetime(2026, 11, 15, 10, 0, 0, 1, tzinfo=UTC)]),
]


@pytest.mark.parametrize(("kind", "values"), EACH_TYPE)
@pytest.mark.parametrize("chunk_rows", [1, 100])
def test_keys_of_every_type_are_found_where_they_are(kind: str, values: list[Any], chunk_rows: int) -> None:
    files = Files(f"k {kind} not null, v int", ["k"])
    location = files.write([{"k": value, "v": 1} for value in values])
    absent, *wanted = values
    found = files.key_set([files.write([{"k": value, "v": 2} for value in reversed(wanted)])], chunk_rows)
    count = len(wanted)
    assert listed(found.match(files.storage, location)) == [(at + 1, 0, count - 1 - at) for at in range(count)]
    assert listed(files.key_set([files.write([{"k": absent, "v": 2}])]).match(files.storage, location)) == [(0, 0, 0)]


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 1000])
def test_chunks_of_any_size_give_the_same_answer(chunk_rows: int) -> None:
    chance = random.Random(chunk_rows)
    files = Files("v int, day date not null, id long not null", ["id", "day"])
    space = [(number, date(2026, 1, 1 + day)) for number in range(30) for day in range(3)]
    wanted = chance.sample(space, 40)
    parts = [wanted[:17], wanted[17:18], wanted[18:]]
    locations = [files.write([{"v": 0, "day": day, "id": number} for number, day in part]) for part in parts]
    where = {key: (file, place) for file, part in enumerate(parts) for place, key in enumerate(part)}
    rows = [chance.choice(space) for _ in range(60)]
    looked_at = files.write([{"v": 1, "day": day, "id": number} for number, day in rows])
    expected = [(at, *where[key]) for at, key in enumerate(rows) if key in where]
    assert len(expected) > 10
    found = files.key_set(locations, chunk_rows)
    assert listed(found.match(files.storage, looked_at)) == expected
    # Asked again, and by columns in memory: the same.
    assert listed(found.match(files.storage, looked_at)) == expected
    assert listed(found.match_table(read_keys(files.storage, looked_at, files.fields))) == expected


def test_a_key_must_match_in_all_its_columns() -> None:
    files = Files("a string not null, b string not null", ["a", "b"])
    location = files.write([{"a": "x", "b": "yz"}, {"a": "xy", "b": "z"}, {"a": "z", "b": "xy"}])
    found = files.key_set([files.write([{"a": "xy", "b": "z"}, {"a": "x", "b": "z"}])])
    assert listed(found.match(files.storage, location)) == [(1, 0, 0)]


@pytest.mark.parametrize("chunk_rows", [1, 10])
def test_a_row_counts_once_if_its_key_is_in_the_set_twice(chunk_rows: int) -> None:
    files = Files("id long not null", ["id"])
    twice = [files.write([{"id": 9}, {"id": 5}]), files.write([{"id": 5}, {"id": 5}])]
    location = files.write([{"id": 5}, {"id": 1}, {"id": 5}])
    assert listed(files.key_set(twice, chunk_rows).match(files.storage, location)) == [(0, 0, 1), (2, 0, 1)]


def test_nothing_matches_an_empty_set_or_an_empty_file() -> None:
    files = Files("id long not null", ["id"])
    full, empty = files.write([{"id": 1}]), files.write_empty()
    for found in (files.key_set([]), files.key_set([empty]), files.key_set([empty, empty], 1)):
        assert listed(found.match(files.storage, full)) == []
        assert listed(found.match(files.storage, empty)) == []
    assert listed(files.key_set([full]).match(files.storage, empty)) == []
    assert listed(files.key_set([empty, full]).match(files.storage, full)) == [(0, 1, 0)]
    # Without keys there is nothing to look for: the file is not even opened.
    assert listed(files.key_set([]).match(files.storage, "memory://lake/missing.parquet")) == []


def test_a_small_set_is_read_once_and_a_large_one_in_chunks_each_time() -> None:
    files = Files("id long not null", ["id"])
    location, other = files.write([{"id": number} for number in range(10)]), files.write([{"id": 3}])

    def opened(found: KeySet) -> list[int]:
        counts = []
        for _ in range(3):
            before = files.storage.counters.snapshot()
            assert listed(found.match(files.storage, other)) == [(0, 0, 3)]
            counts.append(files.storage.counters.difference(before).calls["open_input"])
        return counts

    assert opened(files.key_set([location])) == [2, 1, 1]
    assert opened(files.key_set([location], 4)) == [2, 2, 2]


def test_a_chunk_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files("k string not null", ["k"])
    values = [f"{number:05d}" + "x" * 1000 for number in range(200)]
    location = files.write([{"k": value} for value in values])
    monkeypatch.setattr(keys, "KEY_BYTES_PER_CHUNK", 20_000)
    found = files.key_set([location])
    chunks = list(found._read_chunks())
    assert [place for chunk in chunks for place in chunk.places.tolist()] == list(range(200))
    assert max(chunk.keys.nbytes for chunk in chunks) < 25_000
    matches = found.match_table(pa.table({"k": values[::-1]}))
    assert listed(matches) == [(at, 0, 199 - at) for at in range(200)]


def test_columns_in_memory_may_be_chunked_or_encoded_and_may_hold_null() -> None:
    files = Files("k string not null, n long not null", ["k", "n"])
    found = files.key_set([files.write([{"k": "a", "n": 1}, {"k": "", "n": 0}])])
    text = pa.chunked_array([pa.array(["b", "a"]).dictionary_encode(), pa.array([None, "a"]).dictionary_encode()])
    numbers = pa.chunked_array([pa.array([1], pa.int32()), pa.array([1, 0, None], pa.int32())])
    assert listed(found.match_table(pa.table({"any": text, "name": numbers}))) == [(1, 0, 0)]
    large = pa.table({"k": pa.array(["a"], pa.large_string()), "n": [1]})
    assert listed(found.match_table(large)) == [(0, 0, 0)]
    assert listed(found.match_table(large.slice(0, 0))) == []


def test_old_files_match_by_field_id_with_the_type_of_today() -> None:
    old = Files("was int not null, v int", ["was"])
    location = old.write([{"was": 1, "v": 1}, {"was": 2, "v": 2}])
    now = Files("id long not null", ["id"])
    now.storage = old.storage
    assert listed(now.key_set([now.write([{"id": 2}])]).match(now.storage, location)) == [(1, 0, 0)]
    assert read_keys(now.storage, location, now.fields).to_pydict() == {"id": [1, 2]}


def test_positions_count_over_row_groups_and_batches() -> None:
    files = Files("id long not null", ["id"])
    count = 150_000
    location = files.write(pa.table({"id": np.arange(count)}))
    wanted = [0, 65_535, 65_536, 131_072, count - 1]
    matches = files.key_set([files.write([{"id": number} for number in wanted])]).match(files.storage, location)
    assert matches.positions.tolist() == wanted
    # And in the other direction: the larger side is the set.
    matches = files.key_set([location], 60_000).match_table(pa.table({"id": wanted}))
    assert matches.places.tolist() == wanted


def test_only_the_key_columns_of_a_file_are_read() -> None:
    files = Files("id long not null, payload binary", ["id"])
    chance = random.Random(1)
    location = files.write([{"id": number, "payload": chance.randbytes(100_000)} for number in range(20)])
    found = files.key_set([files.write([{"id": 7, "payload": None}])])
    before = files.storage.counters.snapshot()
    assert listed(found.match(files.storage, location)) == [(7, 0, 0)]
    assert files.storage.counters.difference(before).bytes_read < 500_000


def test_examples_name_the_keys_at_positions() -> None:
    files = Files("id long not null, day date not null, v int", ["id", "day"])
    location = files.write([{"id": number, "day": date(2026, 11, 15), "v": 0} for number in range(9)])
    positions = np.array([5, 2, 8, 7])
    assert examples(files.storage, location, files.fields, positions) == [
        "id=2, day=2026-11-15",
        "id=5, day=2026-11-15",
        "id=8, day=2026-11-15",
    ]
    assert examples(files.storage, location, files.fields[:1], positions, limit=1) == ["id=5"]
    assert examples(files.storage, location, files.fields, positions[:0]) == []


def test_examples_come_from_any_part_of_a_long_file() -> None:
    files = Files("id long not null", ["id"])
    location = files.write(pa.table({"id": np.arange(150_000) * 2}))
    found = examples(files.storage, location, files.fields, np.array([1, 70_000, 149_999]))
    assert found == ["id=2", "id=140000", "id=299998"]


def test_every_type_has_a_text_that_can_be_read() -> None:
    table = pa.table(
        {
            "ok": [True, None],
            "d": [Decimal("1.50"), Decimal("-0.01")],
            "s": ["東京", " x\n"],
            "b": [b"\x00\xff", b""],
            "ts": pa.array([datetime(2026, 11, 15, 10), datetime(1, 1, 1)], pa.timestamp("us")),
            "tz": pa.array([datetime(2026, 11, 15, 10, 0, 0, 5), datetime(1900, 1, 1)], pa.timestamp("us", tz="UTC")),
        }
    )
    assert render_keys(table) == [
        "ok=true, d=1.50, s=東京, b=0x00ff, ts=2026-11-15 10:00:00, tz=2026-11-15 10:00:00.000005Z",
        r"ok=null, d=-0.01, s=' x\n', b=0x, ts=0001-01-01 00:00:00, tz=1900-01-01 00:00:00Z",
    ]


def test_long_and_broken_texts_are_shown_in_part() -> None:
    (shown,) = render_keys(pa.table({"s": ["é" * 500]}))
    assert shown == "s=" + "é" * 59 + "…"
    (shown,) = render_keys(pa.table({"b": [b"\x01" * 500]}))
    assert len(shown) < 70
    broken = pa.array([b"a\xff"]).view(pa.string())
    assert render_keys(pa.table({"s": broken})) == ["s=a\ufffd"]


def test_decimals_are_told_as_they_are() -> None:
    keys = pa.table({"p": pa.array([Decimal("9.0000000000"), Decimal("-3.0000005000")], pa.decimal128(38, 10))})
    assert render_keys(keys) == ["p=9.0000000000", "p=-3.0000005000"]
