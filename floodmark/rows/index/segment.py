"""A segment: one immutable file with a section for each index, which covers data files. docs/index-format.md.

A section's entries lie in blocks of 1,024, ascending. Behind all blocks is the tail: what a reader keeps in memory.
No file is mapped into memory: one that is cut would end the process. Every byte that is used was compared with a
checksum before, from the trailer on, so that a flipped bit, a file that was cut and a file in the place of another are
`Corrupt`, with the file and the part, and never an answer. What a later Floodmark wrote, or another index or secret, is
`NotCovered`: nothing is wrong, and the rows are found without it.

The same entries give the same bytes. A crash while writing leaves no file (I3).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt

from floodmark.errors import Corrupt, Invalid
from floodmark.json_form import Json
from floodmark.rows.index.entries import Entries, joined, out_of_order
from floodmark.rows.index.filter import filter_words, make_filter
from floodmark.rows.index.hashing import ENCODER, Encoder, Secret
from floodmark.rows.mixing import Hashes
from floodmark.storage import OutputStream, RangeReader, Storage
from floodmark.storage.streams import Opened

VERSION = 1
BLOCK_ENTRIES = 1024
FILES_MAX = 65_536
# How many blocks are read, or written, in one go.
BLOCKS_AT_ONCE = 128
# Read with the first request by who does not know how long the tail is.
TAIL_BYTES = 64 * 1024
_MAGIC = b"FMINDEX\n"
# Bytes of the file and of its tail, bytes and checksum of the directory, version; a checksum of these, and the magic.
_TRAILER = struct.Struct("<QQIII")
_TRAILER_END = struct.Struct("<I8s")
TRAILER_BYTES = _TRAILER.size + _TRAILER_END.size
_FENCE = np.dtype([("first", "<u8"), ("rows_crc", "<u4"), ("fingerprints_crc", "<u4")])
_ADVICE = "Run `floodmark doctor`. The index is made from the data files, so no rows are lost."


@dataclass(frozen=True)
class IndexForm:
    """An index as its segments store it. `wide`: hashes of 128 bits."""

    id: str
    secret: Secret
    wide: bool
    fingerprints: bool
    encoder: Encoder = ENCODER


@dataclass(frozen=True)
class CoveredFile:
    """A data file of which a section has every row."""

    path: str
    rows: int
    size_bytes: int


@dataclass(frozen=True)
class SegmentRecord:
    """What the catalog keeps of a segment. The digest is that of the directory, which has a checksum of each part."""

    location: str
    size_bytes: int
    tail_bytes: int
    digest: str
    entries: int


@dataclass(frozen=True)
class NotCovered:
    """Why a segment says nothing of an index."""

    reason: Literal["version", "index", "encoder", "secret", "form"]


@dataclass(frozen=True)
class SectionPlan:
    """A section to be written: its index, the files that it covers, and its entries in order, in any pieces."""

    form: IndexForm
    files: Sequence[CoveredFile]
    entries: Iterable[Entries]


@dataclass(frozen=True)
class _Layout:
    """How a block lies in the file: hashes, positions, file numbers; then fingerprints, with their own checksum."""

    wide: bool
    file_bytes: int
    fingerprints: bool

    @classmethod
    def of(cls, form: IndexForm, files: int) -> _Layout:
        return cls(form.wide, 1 if files <= 256 else 2, form.fingerprints)

    @property
    def row_bytes(self) -> int:
        return (16 if self.wide else 8) + 4 + self.file_bytes

    @property
    def entry_bytes(self) -> int:
        return self.row_bytes + (8 if self.fingerprints else 0)

    def columns(self, entries: Entries) -> list[npt.NDArray[np.unsignedinteger]]:
        lows = [] if entries.low is None else [entries.low]
        fingerprints = [] if entries.fingerprints is None else [entries.fingerprints]
        return [entries.high, *lows, entries.positions, entries.files.astype(self._file_type), *fingerprints]

    def pack(self, entries: Entries, blocks: int) -> npt.NDArray[np.uint8]:
        """So many blocks of equal length, a row each."""
        packed = np.empty((blocks, len(entries) // blocks * self.entry_bytes), np.uint8)
        at = 0
        for column in self.columns(entries):
            raw = np.ascontiguousarray(column).view(np.uint8).reshape(blocks, -1)
            packed[:, at : at + raw.shape[1]] = raw
            at += raw.shape[1]
        return packed

    def unpack(self, packed: npt.NDArray[np.uint8], count: int, with_fingerprints: bool) -> Entries:
        """The entries of blocks of so many entries each, a row each."""
        at = 0

        def column(kind: npt.DTypeLike) -> npt.NDArray[np.unsignedinteger]:
            nonlocal at
            size = np.dtype(kind).itemsize * count
            at += size
            found: npt.NDArray[np.unsignedinteger] = np.ascontiguousarray(packed[:, at - size : at]).view(kind)
            return found.reshape(-1)

        high = column(np.uint64)
        low = column(np.uint64) if self.wide else None
        positions, files = column(np.uint32), column(self._file_type)
        fingerprints = column(np.uint64) if with_fingerprints else None
        return Entries(high, low, files.astype(np.uint32), positions, fingerprints)

    @property
    def _file_type(self) -> type[np.uint8 | np.uint16]:
        return np.uint8 if self.file_bytes == 1 else np.uint16


# ── writing ──


def write_segment(storage: Storage, location: str, plans: Sequence[SectionPlan]) -> SegmentRecord:
    """Write the sections of some indexes into one file; entries are consumed as they are written."""
    with storage.writer(location) as stream:
        written = [_write_blocks(stream, plan) for plan in plans]
        tail_at = stream.tell()
        sections = [_write_parts(stream, section) for section in written]
        directory = _json_bytes({"sections": sections})
        stream.write(directory)
        size_bytes = stream.tell() + TRAILER_BYTES
        tail_bytes = size_bytes - tail_at
        trailer = _TRAILER.pack(size_bytes, tail_bytes, len(directory), crc32(directory), VERSION)
        stream.write(trailer + _TRAILER_END.pack(crc32(trailer), _MAGIC))
    # Crash before the writer ended: the file does not exist.
    entries = sum(section.entries for section in written)
    return SegmentRecord(location, size_bytes, tail_bytes, _digest(directory), entries)


def _digest(directory: bytes) -> str:
    return blake2b(directory, digest_size=16).hexdigest()


def _json_bytes(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@dataclass
class _Blocks:
    """The blocks of a section as they are written, and what its tail will say of them."""

    plan: SectionPlan
    layout: _Layout
    start: int
    end: int = 0
    entries: int = 0
    fences: list[npt.NDArray[np.void]] = field(default_factory=list)
    # What a filter is made of; None once there are too many entries for one (I14).
    hashes: list[Hashes] | None = field(default_factory=list)


def _write_blocks(stream: OutputStream, plan: SectionPlan) -> _Blocks:
    if len(plan.files) > FILES_MAX:
        raise Invalid("a section covers too many files", files=len(plan.files), files_max=FILES_MAX)
    done = _Blocks(plan, _Layout.of(plan.form, len(plan.files)), stream.tell())
    rows = np.array([one.rows for one in plan.files], np.uint64)
    left: Entries | None = None
    last: Entries | None = None
    for piece in plan.entries:
        if not len(piece):
            continue
        _check(piece, plan.form, rows)
        if last is not None and out_of_order(joined([last, piece.take(slice(0, 1))])).any():
            raise ValueError("entries are not in order")
        last = piece.take(slice(len(piece) - 1, None))
        if left is not None and len(left):
            # Only the block that was begun is copied.
            missing = BLOCK_ENTRIES - len(left)
            left, piece = joined([left, piece.take(slice(0, missing))]), piece.take(slice(missing, None))
            if len(left) < BLOCK_ENTRIES:
                continue
            _put(stream, done, left, 1)
        whole = len(piece) // BLOCK_ENTRIES * BLOCK_ENTRIES
        for at in range(0, whole, BLOCK_ENTRIES * BLOCKS_AT_ONCE):
            end = min(whole, at + BLOCK_ENTRIES * BLOCKS_AT_ONCE)
            _put(stream, done, piece.take(slice(at, end)), (end - at) // BLOCK_ENTRIES)
        left = piece.take(slice(whole, None))
    if left is not None and len(left):
        _put(stream, done, left, 1)
    done.end = stream.tell()
    return done


def _check(entries: Entries, form: IndexForm, rows: npt.NDArray[np.uint64]) -> None:
    """An entry that is out of place could not be found: that would be a wrong answer."""
    if (entries.low is not None) != form.wide or (entries.fingerprints is not None) != form.fingerprints:
        raise TypeError("entries of another form than that of their index")
    if entries.files.max() >= len(rows) or (entries.positions >= rows[entries.files]).any():
        raise ValueError("an entry names a row that its section does not cover")
    if out_of_order(entries).any():
        raise ValueError("entries are not in order")


def _put(stream: OutputStream, done: _Blocks, entries: Entries, blocks: int) -> None:
    count = len(entries) // blocks
    packed = done.layout.pack(entries, blocks)
    cut = count * done.layout.row_bytes
    fences = np.empty(blocks, _FENCE)
    fences["first"] = entries.high[::count]
    fences["rows_crc"] = [crc32(block[:cut]) for block in packed]
    fences["fingerprints_crc"] = [crc32(block[cut:]) for block in packed]
    stream.write(packed.data)
    done.fences.append(fences)
    done.entries += len(entries)
    if done.hashes is not None:
        done.hashes.append(entries.high)
        if not filter_words(done.entries):
            done.hashes = None


def _write_parts(stream: OutputStream, done: _Blocks) -> Json:
    """The header, fences and filter of a section; returns its entry of the directory."""
    form = done.plan.form
    header = _json_bytes(
        {
            "check": form.secret.check,
            "encoder": form.encoder.number,
            "entries": done.entries,
            "files": [[one.path, one.rows, one.size_bytes] for one in done.plan.files],
            "fingerprints": form.fingerprints,
            "index": form.id,
            "wide": form.wide,
        }
    )
    fences = np.concatenate([np.empty(0, _FENCE), *done.fences]).tobytes()
    words = make_filter(done.hashes).tobytes() if done.hashes else b""
    return {
        "blocks": [done.start, done.end - done.start],
        "fences": _write_part(stream, fences),
        "filter": _write_part(stream, words),
        "header": _write_part(stream, header),
        "index": form.id,
    }


def _write_part(stream: OutputStream, data: bytes) -> Json:
    place: list[Json] = [stream.tell(), len(data), crc32(data)]
    stream.write(data)
    return place


# ── reading ──


@dataclass(frozen=True)
class _Parts:
    """A section in the directory: where its parts are, and their checksums."""

    index: str
    blocks: tuple[int, int]
    header: tuple[int, int, int]
    fences: tuple[int, int, int]
    filter: tuple[int, int, int]


def open_segment(
    storage: Storage,
    location: str,
    *,
    size_bytes: int | None = None,
    tail_bytes: int | None = None,
    digest: str | None = None,
) -> IndexSegment | NotCovered:
    """Open a segment, with what its record says of it. One request brings the tail if its length is known."""
    reader = storage.open_input(location, size_bytes, tail_bytes=tail_bytes or TAIL_BYTES)
    try:
        found = _open(reader, tail_bytes or TAIL_BYTES, digest)
    except BaseException:
        reader.close()
        raise
    if isinstance(found, NotCovered):
        reader.close()
    return found


def open_whole(location: str, data: bytes, size_bytes: int, digest: str | None = None) -> IndexSegment | NotCovered:
    """Open a small segment that was read whole: it holds no file open."""
    if len(data) != size_bytes:
        raise _damaged(location, "trailer", "the file does not have the size in the catalog")
    opened = Opened(len(data), lambda offset, length: data[offset : offset + length], lambda: None)
    return _open(RangeReader(location, opened, read_ahead_bytes=1), len(data), digest)


def _open(reader: RangeReader, tail_bytes: int, digest: str | None) -> IndexSegment | NotCovered:
    tail = _end_of(reader, max(TRAILER_BYTES, tail_bytes))
    if len(tail) < TRAILER_BYTES:
        raise _damaged(reader.location, "trailer", "it is shorter than that")
    numbers = tail[-TRAILER_BYTES : -_TRAILER_END.size]
    crc, magic = _TRAILER_END.unpack(tail[-_TRAILER_END.size :])
    if magic != _MAGIC or crc32(numbers) != crc:
        raise _damaged(reader.location, "trailer")
    size_bytes, tail_bytes, directory_bytes, directory_crc, version = _TRAILER.unpack(numbers)
    if version != VERSION:
        return NotCovered("version")
    if size_bytes != reader.size_bytes:
        raise _damaged(reader.location, "trailer", "the file does not have the size that it was written with")
    if tail_bytes > len(tail):
        tail = _end_of(reader, tail_bytes)
    directory = tail[-TRAILER_BYTES - directory_bytes : -TRAILER_BYTES]
    if crc32(directory) != directory_crc:
        raise _damaged(reader.location, "directory")
    if digest is not None and _digest(directory) != digest:
        raise _damaged(reader.location, "directory", "it is not the file that was written here")
    return IndexSegment(reader, tail, [_Parts(**parts) for parts in json.loads(directory)["sections"]])


def _end_of(reader: RangeReader, size_bytes: int) -> bytes:
    reader.seek(max(0, reader.size_bytes - size_bytes))
    return reader.read(size_bytes)


def _damaged(location: str, part: str, why: str | None = None) -> Corrupt:
    return Corrupt("a segment of an index is damaged", file=location, part=part, why=why, advice=_ADVICE)


class IndexSegment:
    """An open segment: its directory was checked. Close it; its sections are then of no use."""

    def __init__(self, reader: RangeReader, tail: bytes, sections: Sequence[_Parts]) -> None:
        self._reader = reader
        self._tail = memoryview(tail)
        self._sections = sections
        self.location = reader.location

    def section(self, form: IndexForm) -> Section | NotCovered:
        """The section of an index; its header, fences and filter are checked."""
        for found in self._sections:
            if found.index == form.id:
                return self._section(form, found)
        return NotCovered("index")

    def _section(self, form: IndexForm, found: _Parts) -> Section | NotCovered:
        header = json.loads(bytes(self._part(form, "header", *found.header)))
        if header["encoder"] != form.encoder.number:
            return NotCovered("encoder")
        if header["check"] != form.secret.check:
            return NotCovered("secret")
        if (header["index"], header["wide"], header["fingerprints"]) != (form.id, form.wide, form.fingerprints):
            return NotCovered("form")
        files = tuple(CoveredFile(path, rows, size) for path, rows, size in header["files"])
        fences = np.frombuffer(self._part(form, "fences", *found.fences), _FENCE)
        words = self._part(form, "filter", *found.filter)
        return Section(
            self._reader, form, files, header["entries"], fences, words.cast("Q"), found.blocks[0], len(self._tail)
        )

    def _part(self, form: IndexForm, name: str, offset: int, size: int, crc: int) -> memoryview:
        at = offset - (self._reader.size_bytes - len(self._tail))
        part = self._tail[at : at + size]
        if crc32(part) != crc:
            raise _damaged(self.location, f"{name} of index {form.id}")
        return part

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> IndexSegment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Section:
    """What a segment says of one index. Fences and filter are in memory; blocks are read as they are needed.

    Threads may share it.
    """

    def __init__(
        self,
        reader: RangeReader,
        form: IndexForm,
        files: tuple[CoveredFile, ...],
        entries: int,
        fences: npt.NDArray[np.void],
        words: memoryview,
        start: int,
        tail_bytes: int,
    ) -> None:
        self._reader = reader
        self._layout = _Layout.of(form, len(files))
        self._start = start
        self._crcs = fences["rows_crc"].tolist(), fences["fingerprints_crc"].tolist()
        self.form = form
        self.files = files
        self.entries = entries
        self.firsts: Hashes = np.ascontiguousarray(fences["first"])
        # The filter's words, for one hash and for many.
        self.words = words
        self.location = reader.location
        # What it keeps in memory.
        self.tail_bytes = tail_bytes

    def __len__(self) -> int:
        return self.entries

    @property
    def blocks(self) -> int:
        return len(self.firsts)

    @property
    def is_remote(self) -> bool:
        """Whether a read is a round trip."""
        return self._reader.is_remote

    @cached_property
    def filter(self) -> Hashes:
        return np.frombuffer(self.words, np.uint64)

    def read(self, blocks: Sequence[int], *, fingerprints: bool) -> Entries:
        """The entries of ascending blocks; the caller bounds their number (I14)."""
        fingerprints = fingerprints and self.form.fingerprints
        cuts = [0, *(at for at, (one, other) in enumerate(pairwise(blocks), 1) if other != one + 1), len(blocks)]
        runs = [(blocks[start], end - start) for start, end in pairwise(cuts)]
        ranges = [self._range(first, count) for first, count in runs]
        many = self._reader.fetch_many
        found = many(ranges) if many is not None else [self._reader.fetch(*one) for one in ranges]
        parts: list[Entries] = []
        for (first, count), (_, size), data in zip(runs, ranges, found, strict=True):
            if len(data) != size:
                raise _damaged(self.location, f"block {first} of index {self.form.id}", "it ends early")
            parts += self._unpack(first, count, data, fingerprints)
        return joined(parts)

    def all(self, *, fingerprints: bool = True) -> Iterator[Entries]:
        """All entries, some blocks at a time."""
        for start in range(0, self.blocks, BLOCKS_AT_ONCE):
            yield self.read(range(start, min(self.blocks, start + BLOCKS_AT_ONCE)), fingerprints=fingerprints)

    def _range(self, first: int, count: int) -> tuple[int, int]:
        size = self._layout.entry_bytes
        end = min(self.entries, (first + count) * BLOCK_ENTRIES)
        return self._start + first * BLOCK_ENTRIES * size, (end - first * BLOCK_ENTRIES) * size

    def _unpack(self, first: int, count: int, data: bytes, fingerprints: bool) -> Iterator[Entries]:
        """The entries of blocks that follow each other: the whole ones together, and the last of a section alone."""
        whole = min(count, self.entries // BLOCK_ENTRIES - first)
        cut = whole * BLOCK_ENTRIES * self._layout.entry_bytes
        raw = np.frombuffer(data, np.uint8)
        for start, blocks, part in ((first, whole, raw[:cut]), (first + whole, count - whole, raw[cut:])):
            if blocks:
                rows = part.reshape(blocks, -1)
                entries = rows.shape[1] // self._layout.entry_bytes
                self._check(start, rows, entries, fingerprints)
                yield self._layout.unpack(rows, entries, fingerprints)

    def _check(self, first: int, rows: npt.NDArray[np.uint8], entries: int, fingerprints: bool) -> None:
        cut = entries * self._layout.row_bytes
        for block, row in enumerate(rows, first):
            wrong = crc32(row[:cut]) != self._crcs[0][block]
            if wrong or (fingerprints and crc32(row[cut:]) != self._crcs[1][block]):
                raise _damaged(self.location, f"block {block} of index {self.form.id}")
