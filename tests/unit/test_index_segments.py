"""Segments of indexes: what was written is found and folded, and damage is noticed; against dicts and brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.types import NestedField

from floodmark import clock
from floodmark.errors import Corrupt, Invalid
from floodmark.rows.index import entries as entries_module
from floodmark.rows.index import filter as filter_module
from floodmark.rows.index import probe as probe_module
from floodmark.rows.index import segment as segment_module
from floodmark.rows.index.build import build
from floodmark.rows.index.entries import Entries, joined, make_entries, sort_entries
from floodmark.rows.index.filter import make_filter, mask_of, may_hold, word_of
from floodmark.rows.index.fingerprint import fingerprints
from floodmark.rows.index.fold import fold
from floodmark.rows.index.hashing import ENCODER, Encoder, Secret, hash_values, is_wide
from floodmark.rows.index.probe import Candidates, probe, probe_section
from floodmark.rows.index.segment import (
    BLOCK_ENTRIES,
    FILES_MAX,
    TRAILER_BYTES,
    CoveredFile,
    IndexForm,
    IndexSegment,
    NotCovered,
    Section,
    SectionPlan,
    SegmentRecord,
    open_segment,
    write_segment,
)
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.translate import is_list
from floodmark.storage import Storage
from tests.unit.test_keys import Files

SECRET = Secret("00112233445566778899aabbccddeeff")
FOUR_BITS = Encoder(200, bits=4)
STORAGE = Storage({})
Row = tuple[int, int]  # the number of a file, and a position in it


def place() -> str:
    return f"memory://index/{clock.new_id()}"


def form_of(
    kind: pa.DataType, encoder: Encoder = ENCODER, fingerprints: bool = False, name: str = "by_key"
) -> IndexForm:
    kind = kind.value_type if is_list(kind) else kind
    return IndexForm(name, SECRET, is_wide([kind]), fingerprints, encoder)


def covered(sizes: Sequence[int], first: int = 0) -> list[CoveredFile]:
    return [CoveredFile(f"s3://lake/é/{first + at}", rows, 10 * rows) for at, rows in enumerate(sizes)]


def marks(rows: int, start: int = 0) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.arange(start, start + rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def plan(form: IndexForm, files: Sequence[pa.Array], first: int = 0, cut: int = 7) -> SectionPlan:
    """A section of these files, each the values of its rows, which come some at a time."""
    parts = []
    for number, values in enumerate(files):
        for start in range(0, len(values), cut):
            piece = values.slice(start, cut)
            given_marks = marks(len(piece), start) if form.fingerprints else None
            parts.append(
                make_entries(
                    [piece], SECRET, file=number, position=start, fingerprints=given_marks, encoder=form.encoder
                )
            )
    entries = [sort_entries(joined(parts))] if parts else []
    return SectionPlan(form, covered([len(values) for values in files], first), entries)


def open_whole(record: SegmentRecord, storage: Storage = STORAGE) -> IndexSegment:
    found = open_segment(
        storage,
        record.location,
        size_bytes=record.size_bytes,
        tail_bytes=record.tail_bytes,
        digest=record.digest,
    )
    assert isinstance(found, IndexSegment)
    return found


def section_of(*plans: SectionPlan, which: int = 0) -> Section:
    found = open_whole(write_segment(STORAGE, place(), plans)).section(plans[which].form)
    assert isinstance(found, Section)
    return found


def listed(found: Candidates) -> list[tuple[int, int, int, int]]:
    parts = (found.values, found.sections, found.files, found.positions)
    return list(zip(*(part.tolist() for part in parts), strict=True))


def hold(value: Any, asked: Any) -> bool:
    return value is asked or value == asked or (isinstance(value, list) and asked in value)


# ── build and probe against brute force ──

VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-9, 9)),
    (pa.string(), st.text("ab", max_size=3)),
    (pa.list_(pa.int32()), st.lists(st.none() | st.integers(0, 4), max_size=4)),
    (pa.list_(pa.string()), st.lists(st.text("ab", max_size=2), max_size=4)),
]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.DataType, list[list[list[Any]]]]:
    """Values of rows of files of sections."""
    kind, values = draw(st.sampled_from(VALUES))
    files = st.lists(st.lists(st.none() | values, max_size=12), min_size=1, max_size=3)
    return kind, draw(st.lists(files, min_size=1, max_size=4))


@pytest.mark.parametrize("encoder", [ENCODER, FOUR_BITS], ids=["", "4-bits"])
@settings(max_examples=60, deadline=None)
@given(given_tables=tables(), one_by_one=st.booleans())
def test_every_row_of_a_value_is_a_candidate(
    encoder: Encoder, given_tables: tuple[pa.DataType, list[list[list[Any]]]], one_by_one: bool
) -> None:
    kind, rows = given_tables
    form = form_of(kind, encoder, fingerprints=True)
    sections = [section_of(plan(form, [pa.array(values, kind) for values in files])) for files in rows]
    flat = [value for files in rows for values in files for value in values]
    inside = [one for value in flat if isinstance(value, list) for one in value]
    asked = [*{*inside, *(value for value in flat if not isinstance(value, list)), None}]
    hashes = hash_values([pa.array(asked, kind.value_type if is_list(kind) else kind)], SECRET, encoder)
    if one_by_one:
        found = []
        for at in range(len(asked)):
            single = hash_values(
                [pa.array(asked[at : at + 1], kind.value_type if is_list(kind) else kind)], SECRET, encoder
            )
            found += [(at, *rest) for _, *rest in listed(probe(sections, single))]
    else:
        found = listed(probe(sections, hashes))
    expected = [
        (at, section, file, position)
        for at, value in enumerate(asked)
        for section, files in enumerate(rows)
        for file, values in enumerate(files)
        for position, held in enumerate(values)
        if hold(held, value)
    ]
    verified = [
        (at, section, file, position)
        for at, section, file, position in found
        if hold(rows[section][file][position], asked[at])
    ]
    assert verified == expected
    assert len(set(found)) == len(found)
    if encoder is ENCODER:
        # A null inside a list has the hash of a null, and `hold` compares by value: other candidates are for nulls.
        assert [one for one in found if asked[one[0]] is not None] == [
            one for one in expected if asked[one[0]] is not None
        ]


def below_a_null() -> pa.Array:
    """Lists of which one that is null has values below it: Parquet never gives such ones, rows of a caller may be."""
    offsets, nulls = pa.array([0, 2, 4, 6], pa.int32()), pa.array([False, True, False])
    return pa.ListArray.from_arrays(offsets, pa.array(range(6)), mask=nulls)


@pytest.mark.parametrize(
    "lists",
    [
        below_a_null(),
        below_a_null().slice(1),
        pa.chunked_array([below_a_null(), below_a_null().slice(1)]),
        pa.array([[0, 1], None, [2, 3]], pa.list_(pa.int64(), 2)).slice(1),
        pa.array([[0], None, [1, 2], []], pa.large_list(pa.int64())).slice(1),
        pa.array([[0], None, [1, 2], []], pa.list_view(pa.int64())).slice(1),
    ],
    ids=lambda lists: str(lists.type),
)
def test_values_in_lists_have_their_own_rows_however_the_lists_are_laid_out(lists: pa.Array) -> None:
    def pairs(column: pa.Array) -> list[Row]:
        entries = make_entries([column], SECRET, file=0, position=7)
        return sorted(zip(entries.high.tolist(), entries.positions.tolist(), strict=True))

    assert pairs(lists) == pairs(pa.array(lists.to_pylist(), pa.list_(pa.int64())))


@pytest.mark.parametrize("encoder", [ENCODER, FOUR_BITS], ids=["", "4-bits"])
@pytest.mark.parametrize("wide", [False, True], ids=["numbers", "texts"])
def test_many_blocks_against_a_dict(encoder: Encoder, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(f"blocks {wide} {encoder.bits}")
    count = 3 * BLOCK_ENTRIES + 5
    numbers = [chance.randrange(2 * count) for _ in range(count)]
    values = pa.array([f"key {n}" for n in numbers] if wide else numbers)
    form = form_of(values.type, encoder, fingerprints=True)
    files = [values.slice(0, 1000), values.slice(1000)]
    section = section_of(plan(form, files, cut=500))
    places: dict[Any, list[Row]] = {}
    for file, part in enumerate(files):
        for position, value in enumerate(part.to_pylist()):
            places.setdefault(value, []).append((file, position))
    # With four bits each value has hundreds of candidates.
    chosen = range(0, 2 * count, 1 if encoder is ENCODER else 60)
    asked = [f"key {n}" for n in chosen] if wide else list(chosen)
    hashes = hash_values([pa.array(asked)], SECRET, encoder)
    for at_once in (1, 2, 32):
        monkeypatch.setattr(probe_module, "_BLOCKS_AT_ONCE", at_once)
        found = probe([section], hashes, fingerprints=True)
        kept: dict[Any, list[Row]] = {}
        assert found.fingerprints is not None
        for (at, _, file, position), mark in zip(listed(found), found.fingerprints.tolist(), strict=True):
            start = position // 500 * 500
            expected = marks(1, start + position % 500)
            assert mark == int(encoder.cut(expected)[0])
            if files[file][position].as_py() == asked[at]:
                kept.setdefault(asked[at], []).append((file, position))
        assert kept == {value: rows for value, rows in places.items() if value in asked}
        if encoder is ENCODER:
            assert len(found) == count


def test_a_value_that_most_rows_have_comes_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_BLOCKS_AT_ONCE", 2)
    values = pa.array(["often"] * 7000 + ["rare"] * 10 + [None] * 5000)
    section = section_of(plan(form_of(values.type), [values], cut=6000))
    for asked, start, end in (("often", 0, 7000), ("rare", 7000, 7010), (None, 7010, 12010)):
        hashes = hash_values([pa.array([asked], pa.string())], SECRET)
        pieces = list(probe_section(0, section, hashes))
        assert all(len(piece) <= 2 * BLOCK_ENTRIES for piece in pieces)
        assert [position for piece in pieces for position in piece.positions.tolist()] == list(range(start, end))
        assert probe([section], hashes).positions.tolist() == list(range(start, end))
    every = probe([section, section], hash_values([pa.array(["rare", "often", "never"])], SECRET))
    assert np.bincount(every.values).tolist() == [20, 14000]


def test_nothing_is_found_where_nothing_is() -> None:
    form = form_of(pa.int64(), fingerprints=True)
    empty = section_of(SectionPlan(form, [], []))
    lists = section_of(plan(form_of(pa.list_(pa.int64())), [pa.array([[], []], pa.list_(pa.int64()))]))
    for values in ([1], [1, 2], []):
        hashes = hash_values([pa.array(values, pa.int64())], SECRET)
        for sections in ([], [empty], [lists, empty]):
            found = probe(sections, hashes, fingerprints=True)
            assert len(found) == 0
            assert (found.fingerprints is None) is (lists in sections)
    assert list(empty.all()) == []
    assert lists.files[0].rows == 2


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("ok boolean", [{"ok": True}, {"ok": False}]),
        ("n int", [{"n": n} for n in range(50)]),
        ("d decimal(9,2)", [{"d": n} for n in range(5)]),
        ("day date, k string", [{"day": "2026-11-19", "k": "a"}, {"day": "2026-11-20", "k": "a"}]),
        ("ts timestamp, b binary", [{"ts": f"2026-11-19T00:00:0{n}Z", "b": bytes([n])} for n in range(9)]),
    ],
)
def test_a_section_made_from_data_files_finds_each_of_their_keys(text: str, rows: list[dict[str, Any]]) -> None:
    names = [part.split()[0] for part in text.split(", ")]
    place = Files(f"{text}, other string", names)
    paths = [place.write([{**row, "other": f"{file}"} for row in rows]) for file in range(2)]
    files = [CoveredFile(path, len(rows), place.storage.size(path)) for path in paths]
    fields: list[NestedField] = list(place.schema.fields)
    columns = [place.schema.find_field(name) for name in names]
    keys = place.key_set(paths)
    table = next(keys._chunks()).keys.slice(0, len(rows)).drop_columns(["row"])
    hashes = hash_values(table.columns, SECRET)
    form = IndexForm("by_key", SECRET, hashes.low is not None, True)
    section = section_of(build(place.storage, form, files, columns, fields))
    found = probe([section], hashes, fingerprints=True)
    assert listed(found) == [(at, 0, file, at) for at in range(len(rows)) for file in range(2)]
    assert found.fingerprints is not None
    assert len(set(found.fingerprints.tolist())) == 2 * len(rows)
    with pytest.raises(Corrupt, match="rows in the catalog"):
        build(place.storage, form, [replace(files[0], rows=len(rows) + 1)], columns, fields)


# ── order and format ──


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.integers(0, 3)), max_size=40))
def test_entries_are_sorted_as_tuples_are_and_each_comes_once(rows: list[tuple[int, int, int, int]]) -> None:
    def entries(spread: int) -> Entries:
        columns = np.array(rows, np.uint64).reshape(-1, 4)
        high = columns[:, 0] << np.uint64(spread)
        files, positions = columns[:, 2].astype(np.uint32), columns[:, 3].astype(np.uint32)
        return Entries(high, columns[:, 1].copy(), files, positions, marks(len(rows)))

    # Hashes that differ in their first bits, or in those only whose place the numbers of rows take.
    for spread in (60, 30, 0):
        found = sort_entries(entries(spread))
        assert found.low is not None
        arrays = (found.high >> np.uint64(spread), found.low, found.files, found.positions)
        assert list(zip(*(array.tolist() for array in arrays), strict=True)) == sorted(set(rows))


def test_the_same_entries_give_the_same_bytes_in_pieces_of_any_size() -> None:
    values = pa.array([f"k{n}" for n in range(5000)])
    form = form_of(values.type, fingerprints=True)
    whole = plan(form, [values])
    (entries,) = whole.entries

    def pieces(size: int) -> Iterator[Entries]:
        yield from (entries.take(slice(at, at + size)) for at in range(0, 5000, size))
        yield entries.take(slice(0, 0))

    locations = [place() for _ in range(4)]
    records = [write_segment(STORAGE, locations[0], [whole])]
    for location, size in zip(locations[1:], (1, 700, 2048), strict=True):
        records.append(write_segment(STORAGE, location, [SectionPlan(form, whole.files, pieces(size))]))
    assert len({STORAGE.read(location) for location in locations}) == 1
    assert {record.digest for record in records} == {records[0].digest}
    assert records[0].size_bytes == len(STORAGE.read(locations[0]))


def test_what_version_1_and_encoder_1_write_never_changes() -> None:
    """Segments outlive the code that wrote them: another digest needs another version, or another encoder's number."""
    fields = user_fields(table_schema("id long, k string, d decimal(9,2), ts timestamp, x double, l array<int>"))
    rows = 3000
    table = pa.table(
        {
            "id": pa.array(range(rows)),
            "k": pa.array([None if n % 50 == 7 else f"key {n % 997}" * (n % 90 // 3) for n in range(rows)]),
            "d": pa.array(range(rows)).cast(pa.decimal128(38, 2)).cast(pa.decimal128(9, 2)),
            "ts": pa.array(range(rows)).cast(pa.timestamp("us", "UTC")),
            "x": pa.array([n / 8 for n in range(rows)]),
            "l": pa.array(
                [None if n % 9 == 4 else [n % 5, None, n][: n % 4] for n in range(rows)], pa.list_(pa.int32())
            ),
        }
    )
    made = fingerprints(table, fields, SECRET)
    plans = []
    for name, columns, own in (
        ("key", ["k", "id"], made),
        ("d", ["d"], None),
        ("ts", ["ts"], None),
        ("l", ["l"], None),
    ):
        chosen = [table[column] for column in columns]
        entries = sort_entries(make_entries(chosen, SECRET, file=0, position=0, fingerprints=own))
        form = IndexForm(name, SECRET, entries.low is not None, own is not None)
        plans.append(SectionPlan(form, [CoveredFile("s3://lake/a", rows, 7)], [entries]))
    assert write_segment(STORAGE, place(), plans).digest == "372d3151a3476753f7572ee5981f0e72"


def test_a_row_takes_at_most_32_bytes_with_everything() -> None:
    values = pa.array([f"{n:045}" for n in range(50_000)])
    for kind, marked, files, most in (
        (pa.string(), True, 300, 32),
        (pa.string(), False, 1, 24),
        (pa.int64(), False, 1, 16),
    ):
        form = form_of(kind, fingerprints=marked)
        column = values if kind == pa.string() else values.cast(kind)
        each = len(column) // files
        made = plan(form, [column.slice(at * each, each) for at in range(files)], cut=each)
        record = write_segment(STORAGE, place(), [replace(made, files=[CoveredFile("f", each, 1)] * files)])
        assert record.size_bytes < most * record.entries
        assert record.entries == files * each


def test_a_file_has_a_section_for_each_index() -> None:
    texts, numbers = pa.array([f"k{n}" for n in range(3000)]), pa.array(range(3000))
    plans = [
        plan(form_of(pa.string(), fingerprints=True, name="a"), [texts]),
        plan(form_of(pa.int64(), name="b"), [numbers]),
        plan(form_of(pa.list_(pa.int64()), name="c"), [pa.array([[], []], pa.list_(pa.int64()))]),
    ]
    segment = open_whole(write_segment(STORAGE, place(), plans))
    for made, asked in ((plans[0], texts), (plans[1], numbers)):
        section = segment.section(made.form)
        assert isinstance(section, Section)
        assert listed(probe([section], hash_values([asked], SECRET))) == [(n, 0, 0, n) for n in range(3000)]
        assert section.files == tuple(made.files)
    assert segment.section(form_of(pa.int64(), name="d")) == NotCovered("index")
    segment.close()


def test_what_could_not_be_found_again_is_not_written() -> None:
    form = form_of(pa.int64())
    made = plan(form, [pa.array(range(2000))])
    (entries,) = made.entries
    location = place()
    wrong: list[tuple[SectionPlan, type[Exception], str]] = [
        (replace(made, entries=[entries.take(slice(None, None, -1))]), ValueError, "order"),
        (replace(made, entries=[entries, entries]), ValueError, "order"),
        (replace(made, files=covered([1999])), ValueError, "does not cover"),
        (replace(made, files=[]), ValueError, "does not cover"),
        (replace(made, form=form_of(pa.string())), TypeError, "another form"),
        (replace(made, form=form_of(pa.int64(), fingerprints=True)), TypeError, "another form"),
        (replace(made, files=covered([2000]) * (FILES_MAX + 1)), Invalid, "too many files"),
    ]
    for one, kind, message in wrong:
        with pytest.raises(kind, match=message):
            write_segment(STORAGE, location, [one])
        assert not STORAGE.exists(location)
    with pytest.raises(Invalid, match="too many rows"):
        make_entries([pa.array([1, 2])], SECRET, file=0, position=2**32 - 1)
    with pytest.raises(TypeError, match="different kinds"):
        joined([entries, replace(entries, low=entries.high)])


# ── the filter ──


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200), st.integers(1, 50))
def test_a_filter_passes_every_hash_that_is_held(values: list[int], cut: int) -> None:
    held = np.unique(np.array(values, np.uint64))
    words = make_filter([held[at : at + cut] for at in range(0, len(held), cut)])
    assert may_hold(words, held).all()
    for high in values:
        mask = mask_of(high)
        assert int(words[word_of(high, len(words))]) & mask == mask


def test_a_filter_stops_most_hashes_that_are_not_held_and_asks_one_as_it_asks_many() -> None:
    chance = np.random.default_rng(7)
    held, others = (np.sort(chance.integers(0, 2**64, 50_000, np.uint64)) for _ in range(2))
    words = make_filter([held])
    passed = may_hold(words, others)
    assert 0 < passed.sum() < 1000
    for high, expected in zip(others[:500].tolist(), passed[:500].tolist(), strict=True):
        assert (int(words[word_of(high, len(words))]) & mask_of(high) == mask_of(high)) is expected


def test_a_large_section_has_no_filter_and_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filter_module, "ENTRIES_MAX", 2500)
    values = pa.array(range(3000))
    small, large = (section_of(plan(form_of(values.type), [values.slice(0, count)])) for count in (2500, 2501))
    assert len(small.words) == 500
    assert len(large.words) == 0
    hashes = hash_values([values], SECRET)
    assert len(probe([small, large], hashes)) == 5001
    assert len(probe([large], hash_values([values.slice(2500, 1)], SECRET))) == 1


# ── fold ──


@pytest.mark.parametrize("encoder", [ENCODER, FOUR_BITS], ids=["", "4-bits"])
@settings(max_examples=50, deadline=None)
@given(given_tables=tables(), chance=st.randoms(use_true_random=False))
def test_a_fold_is_the_same_file_as_building_anew(
    encoder: Encoder, given_tables: tuple[pa.DataType, list[list[list[Any]]]], chance: random.Random
) -> None:
    kind, rows = given_tables
    form = form_of(kind, encoder, fingerprints=True)
    plans, kept, names, first = [], [], [], 0
    for files in rows:
        plans.append(plan(form, [pa.array(values, kind) for values in files], first))
        first += len(files)
        for values, file in zip(files, plans[-1].files, strict=True):
            if chance.random() < 0.7:
                kept.append(pa.array(values, kind))
                names.append(file)
    folded, anew = place(), place()
    live = {file.path for file in names}
    write_segment(STORAGE, folded, [fold(form, [section_of(one) for one in plans], live.__contains__)])
    write_segment(STORAGE, anew, [replace(plan(form, kept), files=names)])
    assert STORAGE.read(folded) == STORAGE.read(anew)


@pytest.mark.parametrize("encoder", [ENCODER, FOUR_BITS], ids=["", "4-bits"])
def test_large_sections_are_folded_a_window_at_a_time(encoder: Encoder) -> None:
    chance = random.Random("fold")
    form = form_of(pa.string(), encoder, fingerprints=True)
    # One value is in most rows, so it fills many windows of every section.
    files = [
        pa.array([f"k{chance.randrange(9000)}" if chance.random() < 0.4 else "often" for _ in range(count)])
        for count in (9000, 100, 5000, 7000, 1)
    ]
    sections = [section_of(plan(form, [values], at, cut=1000)) for at, values in enumerate(files)]
    anew = place()
    write_segment(STORAGE, anew, [plan(form, files, cut=1000)])
    for window in (1, 8 * BLOCK_ENTRIES, 100 * BLOCK_ENTRIES):
        folded = place()
        made = fold(form, sections, lambda path: True, window)
        sizes: list[int] = []

        def seen(made: SectionPlan = made, sizes: list[int] = sizes) -> Iterator[Entries]:
            for piece in made.entries:
                sizes.append(len(piece))
                yield piece

        write_segment(STORAGE, folded, [replace(made, entries=seen())])
        assert STORAGE.read(folded) == STORAGE.read(anew)
        assert max(sizes) <= max(window, len(files) * BLOCK_ENTRIES)


def test_a_file_that_two_sections_cover_is_taken_from_the_first() -> None:
    form = form_of(pa.int64())
    values = [pa.array([1, 2, 3]), pa.array([4, 5]), pa.array([6])]
    one, other = section_of(plan(form, values[:2])), section_of(plan(form, values[1:], 1))
    folded = section_of(fold(form, [one, other], lambda path: True))
    assert [file.path for file in folded.files] == [file.path for file in covered([3, 2, 1])]
    hashes = hash_values([pa.array(range(8))], SECRET)
    assert listed(probe([folded], hashes)) == [
        (1, 0, 0, 0),
        (2, 0, 0, 1),
        (3, 0, 0, 2),
        (4, 0, 1, 0),
        (5, 0, 1, 1),
        (6, 0, 2, 0),
    ]


def test_a_fold_of_nothing_is_empty() -> None:
    form = form_of(pa.int64(), fingerprints=True)
    section = section_of(plan(form, [pa.array(range(3000))]))
    for sections in ([], [section]):
        made = section_of(fold(form, sections, lambda path: False))
        assert (made.entries, made.files) == (0, ())


def test_a_section_is_folded_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes for a filter are held while a section is written, and given up when it gets none."""
    monkeypatch.setattr(filter_module, "ENTRIES_MAX", 2000)
    form = form_of(pa.int64())
    section = section_of(plan(form, [pa.array(range(5000))], cut=1000))
    folded = section_of(fold(form, [section], lambda path: True, 1))
    assert len(folded.words) == 0
    assert folded.entries == 5000


# ── damage ──


def damaged_plans() -> list[SectionPlan]:
    texts = pa.array([f"k{n}" for n in range(9)])
    return [
        plan(form_of(pa.string(), fingerprints=True, name="a"), [texts.slice(0, 4), texts.slice(4)]),
        plan(form_of(pa.int64(), name="b"), [pa.array(range(5))]),
    ]


def read_everything(storage: Storage, location: str, plans: Sequence[SectionPlan], **known: Any) -> list[Any]:
    """All that a reader may ask of a segment."""
    answers: list[Any] = []
    opened = open_segment(storage, location, **known)
    assert isinstance(opened, IndexSegment)
    with opened:
        for made, asked in zip(plans, (pa.array([f"k{n}" for n in range(12)]), pa.array(range(12))), strict=True):
            section = opened.section(made.form)
            assert isinstance(section, Section)
            found = probe([section], hash_values([asked], SECRET), fingerprints=True)
            answers += [listed(found), section.files]
            for entries in section.all():
                answers.append([array.tolist() for array in entries.arrays()])
    return answers


def test_any_flipped_bit_is_noticed_with_the_file_and_the_part() -> None:
    plans, location = damaged_plans(), place()
    record = write_segment(STORAGE, location, plans)
    data = STORAGE.read(location)
    read_everything(STORAGE, location, plans)
    parts: set[str] = set()
    for at in range(len(data)):
        STORAGE.put(location, data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        for known in ({}, {"size_bytes": record.size_bytes, "tail_bytes": record.tail_bytes, "digest": record.digest}):
            with pytest.raises(Corrupt) as caught:
                read_everything(STORAGE, location, plans, **known)
            assert caught.value.facts["file"] == location
            parts.add(str(caught.value.facts["part"]))
    expected = {f"{part} of index {name}" for part in ("header", "fences", "filter", "block 0") for name in "ab"}
    assert parts == {*expected, "directory", "trailer"}


def test_a_file_that_was_cut_or_grew_is_noticed() -> None:
    plans, location = damaged_plans(), place()
    record = write_segment(STORAGE, location, plans)
    data = STORAGE.read(location)
    for end in range(len(data)):
        for changed in (data[:end], data[len(data) - end :]):
            STORAGE.put(location, changed)
            with pytest.raises(Corrupt) as caught:
                read_everything(STORAGE, location, plans)
            assert caught.value.facts["file"] == location
            with pytest.raises(Corrupt, match="size in the catalog"):
                read_everything(STORAGE, location, plans, size_bytes=record.size_bytes, digest=record.digest)
    STORAGE.put(location, data + b"\0")
    with pytest.raises(Corrupt):
        read_everything(STORAGE, location, plans)


def test_a_segment_in_the_place_of_another_is_noticed() -> None:
    plans, location, other = damaged_plans(), place(), place()
    record = write_segment(STORAGE, location, plans)
    write_segment(STORAGE, other, [plan(form_of(pa.string(), fingerprints=True, name="a"), [pa.array(["x"] * 20)])])
    STORAGE.put(location, STORAGE.read(other))
    with pytest.raises(Corrupt, match="not the file that was written"):
        open_segment(STORAGE, location, digest=record.digest)


def test_a_block_in_the_place_of_another_is_noticed() -> None:
    values = pa.array(range(3 * BLOCK_ENTRIES))
    made, location = plan(form_of(values.type), [values]), place()
    write_segment(STORAGE, location, [made])
    data = STORAGE.read(location)
    size = BLOCK_ENTRIES * 13
    STORAGE.put(location, data[size : 2 * size] + data[:size] + data[2 * size :])
    opened = open_segment(STORAGE, location)
    assert isinstance(opened, IndexSegment)
    section = opened.section(made.form)
    assert isinstance(section, Section)
    noticed = 0
    for value in range(0, len(values), 50):
        hashes = hash_values([values.slice(value, 1)], SECRET)
        try:
            assert listed(probe([section], hashes)) == [(0, 0, 0, value)]
        except Corrupt:
            noticed += 1
    assert 10 < noticed < len(values) // 50
    with pytest.raises(Corrupt, match=r"block 0 of index by_key"):
        probe([section], hash_values([values], SECRET))


def test_a_fold_of_a_damaged_section_writes_nothing() -> None:
    made, location, folded = plan(form_of(pa.int64()), [pa.array(range(3000))]), place(), place()
    write_segment(STORAGE, location, [made])
    data = STORAGE.read(location)
    STORAGE.put(location, data[:20_000] + bytes([data[20_000] ^ 4]) + data[20_001:])
    opened = open_segment(STORAGE, location)
    assert isinstance(opened, IndexSegment)
    section = opened.section(made.form)
    assert isinstance(section, Section)
    with pytest.raises(Corrupt, match=location):
        write_segment(STORAGE, folded, [fold(made.form, [section], lambda path: True)])
    assert not STORAGE.exists(folded)


# ── what is not covered ──


def test_another_index_secret_encoder_or_form_is_not_covered() -> None:
    form = form_of(pa.string(), fingerprints=True)
    segment = open_whole(write_segment(STORAGE, place(), [plan(form, [pa.array(["a"])])]))
    assert isinstance(segment.section(form), Section)
    assert segment.section(replace(form, id="another")) == NotCovered("index")
    assert segment.section(replace(form, secret=Secret("00" * 16))) == NotCovered("secret")
    assert segment.section(replace(form, encoder=Encoder(2))) == NotCovered("encoder")
    assert segment.section(replace(form, wide=False)) == NotCovered("form")
    assert segment.section(replace(form, fingerprints=False)) == NotCovered("form")


def test_a_segment_of_a_later_version_is_not_covered_and_no_damage() -> None:
    location = place()
    write_segment(STORAGE, location, damaged_plans())
    data = STORAGE.read(location)
    numbers = bytearray(data[-TRAILER_BYTES:-12])
    numbers[-4:] = (segment_module.VERSION + 1).to_bytes(4, "little")
    later = data[:-TRAILER_BYTES] + bytes(numbers) + crc32(numbers).to_bytes(4, "little") + data[-8:]
    STORAGE.put(location, later)
    assert open_segment(STORAGE, location) == NotCovered("version")


def test_no_secret_is_in_a_segment() -> None:
    location = place()
    write_segment(STORAGE, location, damaged_plans())
    data = STORAGE.read(location)
    assert SECRET.text.encode() not in data
    assert bytes.fromhex(SECRET.text) not in data
    assert SECRET.text not in repr(damaged_plans()[0].form)


def test_sorting_many_rows_is_the_same_as_sorting_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of rows that take the place of all but a few bits of a hash."""
    rows = sort_entries(joined([*plan(form_of(pa.string()), [pa.array([f"k{n % 700}" for n in range(3000)])]).entries]))
    shuffled = rows.take(np.random.default_rng(3).permutation(len(rows)))
    monkeypatch.setattr(entries_module, "_low_bits", lambda count: 61)
    again = sort_entries(shuffled)
    assert all((one == other).all() for one, other in zip(rows.arrays(), again.arrays(), strict=True))
