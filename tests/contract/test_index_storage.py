"""Segments of indexes in every kind of store: how many requests they take, and files that change under a reader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pytest

from floodmark.errors import Corrupt, NotFound
from floodmark.rows.index.entries import joined, make_entries, sort_entries
from floodmark.rows.index.fold import fold
from floodmark.rows.index.hashing import Secret, ValueHashes, hash_values
from floodmark.rows.index.probe import Candidates, probe
from floodmark.rows.index.segment import (
    BLOCK_ENTRIES,
    CoveredFile,
    IndexForm,
    IndexSegment,
    Section,
    SectionPlan,
    SegmentRecord,
    open_segment,
    write_segment,
)
from floodmark.storage import Storage, join, local_path

FORM = IndexForm("by_key", Secret("00112233445566778899aabbccddeeff"), wide=True, fingerprints=False)
ROWS = 40 * BLOCK_ENTRIES


def keys(start: int, end: int) -> pa.Array:
    return pa.array([f"key-{n:08}" for n in range(start, end)])


def asked(*numbers: int) -> ValueHashes:
    return hash_values([pa.array([f"key-{n:08}" for n in numbers])], FORM.secret)


def plan(files: Sequence[pa.Array]) -> SectionPlan:
    parts = [make_entries([values], FORM.secret, file=at, position=0) for at, values in enumerate(files)]
    covered = [CoveredFile(f"file-{values[0]}", len(values), 1) for values in files]
    return SectionPlan(FORM, covered, [sort_entries(joined(parts))])


def opened(storage: Storage, record: SegmentRecord) -> tuple[IndexSegment, Section]:
    segment = open_segment(
        storage, record.location, size_bytes=record.size_bytes, tail_bytes=record.tail_bytes, digest=record.digest
    )
    assert isinstance(segment, IndexSegment)
    section = segment.section(FORM)
    assert isinstance(section, Section)
    return segment, section


def rows(found: Candidates) -> list[tuple[int, int, int]]:
    return list(zip(found.values.tolist(), found.files.tolist(), found.positions.tolist(), strict=True))


@pytest.fixture
def storage(options: dict[str, str]) -> Storage:
    return Storage(options)


def test_a_value_is_one_request_once_the_tail_is_there_and_a_missing_one_is_none(storage: Storage, root: str) -> None:
    record = write_segment(storage, join(root, "index/a.seg"), [plan([keys(0, 30_000), keys(30_000, ROWS)])])
    before = storage.counters.snapshot()
    segment, section = opened(storage, record)
    spent = storage.counters.difference(before)
    # Locally opening reads nothing, and the tail is a read.
    assert spent.calls == {"open_input": 1, **({"read_range": 1} if local_path(root) else {})}
    assert spent.bytes_read == record.tail_bytes
    for number in (0, 29_999, 30_000, ROWS - 1):
        before = storage.counters.snapshot()
        assert rows(probe([section], asked(number))) == [(0, number // 30_000, number % 30_000)]
        spent = storage.counters.difference(before)
        assert spent.calls == {"read_range": 1}
        assert spent.bytes_read <= BLOCK_ENTRIES * 24
    before = storage.counters.snapshot()
    missing = [n for n in range(ROWS, ROWS + 200) if rows(probe([section], asked(n)))]
    assert missing == []
    assert storage.counters.difference(before).total < 20
    segment.close()


def test_many_values_of_several_segments_and_their_fold(storage: Storage, root: str) -> None:
    cuts = [0, 5000, 5001, 20_000, ROWS]
    plans = [plan([keys(start, end)]) for start, end in pairwise(cuts)]
    sections = []
    for at, made in enumerate(plans):
        sections.append(opened(storage, write_segment(storage, join(root, f"index/{at}.seg"), [made]))[1])
    every = asked(*range(ROWS + 1000))
    found = probe(sections, every)
    expected = [(n, max(at for at, cut in enumerate(cuts) if cut <= n)) for n in range(ROWS)]
    assert list(zip(found.values.tolist(), found.sections.tolist(), strict=True)) == expected
    assert [
        position + cuts[section] for (_, section), position in zip(expected, found.positions.tolist(), strict=True)
    ] == [*range(ROWS)]
    folded = write_segment(storage, join(root, "index/folded.seg"), [fold(FORM, sections, lambda path: True)])
    anew = write_segment(
        storage,
        join(root, "index/anew.seg"),
        [plan([keys(start, end) for start, end in pairwise(cuts)])],
    )
    assert storage.read(folded.location) == storage.read(anew.location)
    assert (folded.digest, folded.entries) == (anew.digest, ROWS)
    assert [(n, cuts[file] + at) for n, file, at in rows(probe([opened(storage, folded)[1]], every))] == [
        (n, n) for n in range(ROWS)
    ]


def test_a_reader_that_knows_nothing_of_a_segment_finds_its_tail(storage: Storage, root: str) -> None:
    record = write_segment(storage, join(root, "index/a.seg"), [plan([keys(0, ROWS)])])
    short = write_segment(storage, join(root, "index/b.seg"), [plan([keys(0, 10)])])
    for one, count in ((record, ROWS), (short, 10)):
        for known in ({}, {"tail_bytes": 1}, {"tail_bytes": 10 * one.size_bytes}, {"size_bytes": one.size_bytes}):
            segment = open_segment(storage, one.location, **known)
            assert isinstance(segment, IndexSegment)
            section = segment.section(FORM)
            assert isinstance(section, Section)
            assert len(section) == count
            assert rows(probe([section], asked(9))) == [(0, 0, 9)]


def test_a_segment_that_is_gone_cut_or_replaced_is_named(storage: Storage, root: str) -> None:
    location = join(root, "index/a.seg")
    record = write_segment(storage, location, [plan([keys(0, ROWS)])])
    data = storage.read(location)
    for other in (data[:-1], data[1:], data[: len(data) // 2], b"", data + b"\0"):
        storage.put(location, other)
        with pytest.raises(Corrupt) as caught:
            opened(storage, record)
        assert caught.value.facts["file"] == location
        with pytest.raises(Corrupt):
            open_segment(storage, location)
    other = write_segment(storage, join(root, "index/b.seg"), [plan([keys(ROWS, 2 * ROWS)])])
    assert other.size_bytes == record.size_bytes
    storage.put(location, storage.read(other.location))
    with pytest.raises(Corrupt, match="not the file that was written"):
        opened(storage, record)
    storage.delete(location)
    with pytest.raises(NotFound):
        opened(storage, record)


def test_a_file_that_is_cut_under_its_reader_is_damage_and_no_crash(storage: Storage, root: str) -> None:
    location = join(root, "index/a.seg")
    record = write_segment(storage, location, [plan([keys(0, ROWS)])])
    segment, section = opened(storage, record)
    path = local_path(location)
    if path is not None:
        os.truncate(path, 1000)
    else:
        storage.put(location, storage.read(location)[:1000])
    # The first block alone is longer than what is left.
    for number in range(100):
        with pytest.raises(Corrupt) as caught:
            probe([section], asked(number))
        assert caught.value.facts["file"] == location
    segment.close()
