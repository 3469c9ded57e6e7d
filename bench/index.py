"""Segments of indexes alone: how fast they are made, how large they are, how long a value is looked for, and folding.

Random keys of 45 characters, hashes of 128 bits and fingerprints, in one local segment, in 40 and in 8. No catalog
and no data files are part of a probe: it returns candidates. Rates are rows per second of CPU time, so of one core; a
probe is repeated until its time can be told from that of the clock. All files are in the system's cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from bench.measure import Goal, Line, Samples, rate, timed, took
from bench.workshop import SCHEMA, Workshop
from floodmark.rows.index.build import build
from floodmark.rows.index.entries import Entries, make_entries, sort_entries
from floodmark.rows.index.fingerprint import fingerprints
from floodmark.rows.index.fold import fold
from floodmark.rows.index.hashing import Secret, ValueHashes, hash_values
from floodmark.rows.index.probe import probe
from floodmark.rows.index.segment import (
    CoveredFile,
    IndexForm,
    IndexSegment,
    Section,
    SectionPlan,
    SegmentRecord,
    open_segment,
    write_segment,
)
from floodmark.rows.schema import table_schema, user_fields
from floodmark.rows.staging.stage import StageTarget, stage_in_process
from floodmark.storage import Storage, join, root_location

KEY_CHARACTERS = 45
FILES = 4
FOLDED = 8
MANY = 40
ASKED = 100_000
PROBES = 500
MILLION = 1_000_000
SECRET = Secret("00112233445566778899aabbccddeeff")
FORM = IndexForm("bench", SECRET, wide=True, fingerprints=True)
NUMBERS = IndexForm("bench", SECRET, wide=False, fingerprints=False)
LETTERS = np.frombuffer(b"0123456789abcdef", np.uint8)


def run(shop: Workshop) -> Iterator[Line]:
    yield from _Bench(shop).lines()


class _Bench:
    def __init__(self, shop: Workshop) -> None:
        self._rows = shop.sizes.keyed_rows
        self._repeats = shop.sizes.read_repeats
        self._storage = Storage({})
        self._root = root_location(str(shop.new_path("index")))
        self._segments: list[IndexSegment] = []
        shop.say(f"{self._rows:,} random keys")
        chance = np.random.default_rng(21)
        letters = LETTERS[chance.integers(0, len(LETTERS), self._rows * KEY_CHARACTERS, np.uint8)]
        offsets = np.arange(self._rows + 1, dtype=np.int32) * np.int32(KEY_CHARACTERS)
        self._keys = pa.StringArray.from_buffers(self._rows, pa.py_buffer(offsets), pa.py_buffer(letters))
        ids = pa.array(np.arange(self._rows))
        amounts = pa.array(chance.random(self._rows))
        times = ids.cast(pa.timestamp("us", "UTC"))
        self._table = pa.table(
            [ids, times, self._keys, amounts, ids.cast(pa.int32())], ["id", "ts", "k", "amount", "n"]
        )
        self._asked = chance.choice(self._rows, min(ASKED, self._rows), replace=False)

    def lines(self) -> Iterator[Line]:
        yield from self._making()
        entries = make_entries([self._keys], SECRET, file=0, position=0, fingerprints=self._marks())
        whole = self._write("whole", FORM, entries)
        yield Line("bytes a row, text key and fingerprints", " B", whole.size_bytes / self._rows, goal=Goal(32.0))
        ids = make_entries([self._table["id"]], SECRET, file=0, position=0)
        small = self._write("numbers", NUMBERS, ids)
        yield Line("bytes a row, whole numbers", " B", small.size_bytes / self._rows, goal=Goal(16.0))
        hashes = ValueHashes(entries.high, entries.low)
        yield from self._probes(whole, entries, hashes)
        yield from self._folds(entries)
        for segment in self._segments:
            segment.close()

    def _making(self) -> Iterator[Line]:
        keys, fields = self._keys, user_fields(table_schema(SCHEMA))
        yield self._rate("hashes of text keys", lambda: hash_values([keys], SECRET), Goal(2500.0, at_least=True))
        yield self._rate("hashes of whole numbers", lambda: hash_values([self._table["id"]], SECRET))
        yield self._rate("fingerprints of 5 columns", self._marks)

        def make() -> None:
            made = make_entries([keys], SECRET, file=0, position=0, fingerprints=self._marks())
            self._write("made", FORM, made)

        yield self._rate("made from rows in memory, durable", make, Goal(1000.0, at_least=True))
        target = StageTarget(join(self._root, "data"), table_schema(SCHEMA, ["k"]).model_dump_json(), "{}")
        staged = []
        for start in range(0, self._rows, self._rows // FILES):
            staged += stage_in_process(target, self._table.slice(start, self._rows // FILES), self._storage)
        files = [CoveredFile(one.path, one.rows, one.size_bytes) for one in staged]
        columns = [field for field in fields if field.name == "k"]

        def read() -> None:
            plan = build(self._storage, FORM, files, columns, fields)
            write_segment(self._storage, join(self._root, "built.seg"), [plan])

        yield self._rate("made from data files, durable", read, Goal(1000.0, at_least=True), repeats=3)

    def _marks(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return fingerprints(self._table, user_fields(table_schema(SCHEMA)), SECRET)

    def _probes(self, whole: SegmentRecord, entries: Entries, hashes: ValueHashes) -> Iterator[Line]:
        opened = Samples(tuple(timed(lambda: self._open(whole)) for _ in range(self._repeats)))
        yield took("open a segment", opened, note=f"{whole.tail_bytes / MILLION:.1f} MB of tail")
        section = self._open(whole)
        picked = [_chosen(hashes, slice(at, at + 1)) for at in self._asked[:PROBES].tolist()]
        absent = [ValueHashes(~one.high, one.low) for one in picked]
        yield took("a key in one segment", self._each([section], picked, 1), goal=Goal(0.05))
        yield took("a key that is not there", self._each([section], absent, 0), goal=Goal(0.02))
        many = _chosen(hashes, self._asked)
        yield took(f"{len(self._asked):,} keys at once", self._all([section], many), goal=Goal(50.0))
        missing = ValueHashes(~many.high, many.low)
        yield took(f"{len(self._asked):,} keys that are not there", self._all([section], missing, 0), goal=Goal(50.0))
        sections = [self._open(self._write(f"part-{at}", FORM, part)) for at, part in enumerate(_parts(entries, MANY))]
        yield took(f"a key in {MANY} segments", self._each(sections, picked, 1), goal=Goal(0.2))
        yield took(f"{len(self._asked):,} keys at once in {MANY} segments", self._all(sections, many))

    def _folds(self, entries: Entries) -> Iterator[Line]:
        sections = [self._open(self._write(f"run-{at}", FORM, part)) for at, part in enumerate(_parts(entries, FOLDED))]

        def go() -> None:
            plan = fold(FORM, sections, lambda path: True)
            found = write_segment(self._storage, join(self._root, "folded.seg"), [plan])
            if found.entries != self._rows:
                raise RuntimeError("a fold lost entries")

        yield self._rate(f"folded from {FOLDED} segments, durable", go, Goal(10_000.0, at_least=True))

    def _write(self, name: str, form: IndexForm, entries: Entries) -> SegmentRecord:
        plan = SectionPlan(form, [CoveredFile(name, self._rows, 1)], [sort_entries(entries)])
        return write_segment(self._storage, join(self._root, f"{name}.seg"), [plan])

    def _open(self, record: SegmentRecord) -> Section:
        segment = open_segment(
            self._storage,
            record.location,
            size_bytes=record.size_bytes,
            tail_bytes=record.tail_bytes,
            digest=record.digest,
        )
        if not isinstance(segment, IndexSegment):
            raise RuntimeError("a segment was not understood")
        self._segments.append(segment)
        section = segment.section(FORM)
        if not isinstance(section, Section):
            raise RuntimeError("a section was not understood")
        return section

    def _rate(self, name: str, action: Callable[[], object], goal: Goal | None = None, repeats: int = 5) -> Line:
        samples = Samples(tuple(_cpu(action) for _ in range(min(repeats, self._repeats))))
        return rate(name, samples, self._rows, note="of CPU time", goal=goal)

    def _each(self, sections: Sequence[Section], asked: Sequence[ValueHashes], found: int) -> Samples:
        """Seconds of one probe: the mean of some hundred, several times."""

        def go() -> None:
            if sum(len(probe(sections, one)) for one in asked) != found * len(asked):
                raise RuntimeError("a probe did not return its rows")

        go()
        return Samples(tuple(timed(go) / len(asked) for _ in range(self._repeats)))

    def _all(self, sections: Sequence[Section], asked: ValueHashes, found: int = 1) -> Samples:
        def go() -> None:
            if len(probe(sections, asked)) != found * len(asked):
                raise RuntimeError("a probe did not return its rows")

        go()
        return Samples(tuple(timed(go) for _ in range(self._repeats)))


def _chosen(hashes: ValueHashes, chosen: slice | np.ndarray[tuple[int], np.dtype[np.int64]]) -> ValueHashes:
    return ValueHashes(hashes.high[chosen], None if hashes.low is None else hashes.low[chosen])


def _parts(entries: Entries, count: int) -> Iterator[Entries]:
    step = -(-len(entries) // count)
    yield from (entries.take(slice(start, start + step)) for start in range(0, len(entries), step))


def _cpu(action: Callable[[], object]) -> float:
    started = time.process_time()
    action()
    return time.process_time() - started
