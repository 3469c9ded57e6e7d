"""The data files of a manifest as columns: what planning compares, in a few bytes a file.

A manifest never changes, so its columns are made once and shared by all readers of the process; a new version of a
table shares all of them but those of its new manifests. What is remembered is bounded by its bytes. Sequences are
inherited as Iceberg has it: a new file without one has that of its manifest, and so has every file of a manifest of
sequence 0, which is what manifests of format v1 have. Files that a manifest lists as deleted are not in its columns.

A number that a manifest does not give is ABSENT, a bound null; neither proves anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from cachetools import LRUCache
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntryStatus,
    ManifestFile,
)
from pyiceberg.typedef import Record
from pyiceberg.types import DecimalType, IcebergType, NestedField, StructType, UUIDType

from floodmark.commit.manifest_rows import ManifestRows, pairs, read_manifest
from floodmark.errors import Corrupt

REMEMBERED_BYTES_MAX = 128 * 1024 * 1024
ABSENT = -1
# What one remembered manifest takes beside its arrays, and each array beside its bytes.
_OBJECT_BYTES = 1_000
_ARRAY_BYTES = 150

_Numbers: TypeAlias = npt.NDArray[np.signedinteger]

# Iceberg's ids of the fields of an entry and its data file.
_STATUS, _SEQUENCE = 0, 3
_CONTENT, _PATH, _FORMAT, _PARTITION, _ROWS, _SIZE = 134, 100, 101, 102, 103, 104
_COLUMN_SIZES, _VALUES, _NULLS, _NANS, _LOWER, _UPPER = 108, 109, 110, 137, 125, 128
# Few files have one of these, or all have the same.
_KEY, _OFFSETS, _EQUALITY, _SORT = 131, 132, 135, 140
_NEEDED = (_STATUS, _PATH, _FORMAT, _PARTITION, _ROWS, _SIZE)


@dataclass(frozen=True)
class ColumnFacts:
    """What the files say of one column. Numbers are one a file, or one for all; bounds are bytes, null if not known."""

    sizes: _Numbers
    values: _Numbers
    nulls: _Numbers
    nans: _Numbers
    lower: pa.Array | None
    upper: pa.Array | None

    def arrays(self) -> Iterator[_Numbers | pa.Array]:
        yield from (self.sizes, self.values, self.nulls, self.nans)
        yield from (bounds for bounds in (self.lower, self.upper) if bounds is not None)


@dataclass(frozen=True)
class FileColumns:
    """The live files of one manifest, in its order.

    Paths are what follows `folder`. `partition` has an array for each field of the manifest's partitions.
    `alike` are values of fields that all files have in common, by the field's id; `rare` those of single files.
    """

    count: int
    spec_id: int
    folder: str
    names: pa.Array
    partition_type: StructType
    partition: tuple[pa.Array, ...]
    rows: _Numbers
    sizes: _Numbers
    sequences: _Numbers
    columns: Mapping[int, ColumnFacts]
    counted: npt.NDArray[np.bool_]
    alike: Mapping[int, object]
    rare: Mapping[int, Mapping[int, object]]

    def path(self, at: int) -> str:
        return self.folder + str(self.names[at].as_py())

    def sequence(self, at: int) -> int | None:
        found = number(self.sequences, at)
        return None if found == ABSENT else found

    def value(self, field_id: int, at: int) -> object:
        return self.rare[field_id].get(at) if field_id in self.rare else self.alike.get(field_id)

    @property
    def size_bytes(self) -> int:
        """What it takes in memory; an array that stands for several fields counts once."""
        arrays = {id(one): one for one in self._arrays()}.values()
        rare = sum(len(values) for values in self.rare.values())
        return _OBJECT_BYTES + sum(_ARRAY_BYTES + int(one.nbytes) for one in arrays) + rare * _ARRAY_BYTES

    def _arrays(self) -> Iterator[_Numbers | npt.NDArray[np.bool_] | pa.Array]:
        yield from (self.names, *self.partition, self.rows, self.sizes, self.sequences, self.counted)
        for column in self.columns.values():
            yield from column.arrays()


class PlannedDataFile(DataFile):
    """A file of the columns as PyIceberg has it; what is asked of it is made then."""

    def __init__(self, columns: FileColumns, at: int) -> None:
        self._columns = columns
        self._at = at
        self.spec_id = columns.spec_id

    def __getattr__(self, name: str) -> list[object]:
        """PyIceberg's list of all values, which is made if a field is asked for by its position."""
        if name != "_data":
            raise AttributeError(name)
        self._data = [
            self.content,
            self.file_path,
            self.file_format,
            self.partition,
            self.record_count,
            self.file_size_in_bytes,
            self.column_sizes,
            self.value_counts,
            self.null_value_counts,
            self.nan_value_counts,
            self.lower_bounds,
            self.upper_bounds,
            *(self._columns.value(field_id, self._at) for field_id in (_KEY, _OFFSETS, _EQUALITY, _SORT)),
        ]
        return self._data

    @property
    def content(self) -> DataFileContent:
        return DataFileContent.DATA

    @property
    def file_path(self) -> str:
        return self._columns.path(self._at)

    @property
    def file_format(self) -> FileFormat:
        return FileFormat(self._columns.value(_FORMAT, self._at))

    @property
    def partition(self) -> Record:
        columns, at = self._columns, self._at
        fields = zip(columns.partition, columns.partition_type.fields, strict=True)
        return Record(*(_python(array[at].as_py(), field.field_type) for array, field in fields))

    @property
    def record_count(self) -> int:
        return number(self._columns.rows, self._at)

    @property
    def file_size_in_bytes(self) -> int:
        return number(self._columns.sizes, self._at)

    @property
    def column_sizes(self) -> dict[int, int]:
        return self._numbers({field_id: one.sizes for field_id, one in self._columns.columns.items()})

    @property
    def value_counts(self) -> dict[int, int]:
        return self._numbers({field_id: one.values for field_id, one in self._columns.columns.items()})

    @property
    def null_value_counts(self) -> dict[int, int]:
        return self._numbers({field_id: one.nulls for field_id, one in self._columns.columns.items()})

    @property
    def nan_value_counts(self) -> dict[int, int]:
        return self._numbers({field_id: one.nans for field_id, one in self._columns.columns.items()})

    @property
    def lower_bounds(self) -> dict[int, bytes]:
        return self._bounds({field_id: one.lower for field_id, one in self._columns.columns.items()})

    @property
    def upper_bounds(self) -> dict[int, bytes]:
        return self._bounds({field_id: one.upper for field_id, one in self._columns.columns.items()})

    def _numbers(self, numbers: Mapping[int, _Numbers]) -> dict[int, int]:
        found = ((field_id, number(values, self._at)) for field_id, values in numbers.items())
        return {field_id: value for field_id, value in found if value != ABSENT}

    def _bounds(self, bounds: Mapping[int, pa.Array | None]) -> dict[int, bytes]:
        found = ((field_id, values[self._at].as_py()) for field_id, values in bounds.items() if values is not None)
        return {field_id: value for field_id, value in found if value is not None}


def number(values: _Numbers, at: int) -> int:
    """The number of one file, of numbers that are one a file or one for all."""
    return int(values[at] if len(values) > 1 else values[0])


def _python(value: object, kind: IcebergType) -> object:
    return UUID(bytes=value) if isinstance(kind, UUIDType) and isinstance(value, bytes) else value


# ── from a manifest ──


def columns_of(data: bytes, manifest: ManifestFile) -> FileColumns:
    """The columns of a manifest file, with what its files inherit from its entry in the manifest list."""
    found = read_manifest(data, manifest.manifest_path)
    missing = [field_id for field_id in _NEEDED if field_id not in found.types]
    if missing:
        raise Corrupt("a manifest lacks fields that it must have", file=manifest.manifest_path, fields=missing)
    live = [at for at, status in enumerate(found.values[_STATUS]) if status != ManifestEntryStatus.DELETED.value]
    if len(live) < found.count:
        values = {field_id: [column[at] for at in live] for field_id, column in found.values.items()}
        found = ManifestRows(len(live), values, found.types)
    if any(found.values.get(_CONTENT, ())):
        raise Corrupt("a manifest of data files lists delete files", file=manifest.manifest_path)
    return _columns(found, manifest)


def _whole(data: bytes, manifest: ManifestFile) -> bytes:
    """A manifest that was cut may end where a block ends: fewer files would be fewer rows, without an error."""
    if len(data) != manifest.manifest_length:
        raise Corrupt(
            "a manifest of the lake does not have the size in its list",
            file=manifest.manifest_path,
            size_bytes=len(data),
            size_bytes_expected=manifest.manifest_length,
            advice="Run `floodmark doctor`; restore the file from a copy.",
        )
    return data


def _columns(found: ManifestRows, manifest: ManifestFile) -> FileColumns:
    paths = [str(path) for path in found.values[_PATH]]
    folder = _beginning(min(paths), max(paths)) if paths else ""
    rows = _numbers(found.values[_ROWS])
    alike, rare = _others(found)
    columns = dict(sorted(_facts(found, rows).items()))
    partition_type = found.types[_PARTITION]
    if not isinstance(partition_type, StructType):
        raise Corrupt("the partitions of a manifest are no records", file=manifest.manifest_path)
    counted = np.zeros(1, np.bool_)
    for column in columns.values():
        counted = counted | (column.values != ABSENT)
    return FileColumns(
        count=found.count,
        spec_id=manifest.partition_spec_id,
        folder=folder,
        names=pa.array([path[len(folder) :] for path in paths], pa.string()),
        partition_type=partition_type,
        partition=_partition(found.values[_PARTITION], partition_type.fields),
        rows=rows,
        sizes=_numbers(found.values[_SIZE]),
        sequences=_numbers(_sequences(found, manifest)),
        columns=columns,
        counted=counted,
        alike=alike,
        rare=rare,
    )


def _beginning(one: str, other: str) -> str:
    """What both texts begin with."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _sequences(found: ManifestRows, manifest: ManifestFile) -> list[object]:
    own = found.values.get(_SEQUENCE, [None] * found.count)
    inherited = manifest.sequence_number
    return [
        inherited if one is None and (inherited == 0 or status == ManifestEntryStatus.ADDED.value) else one
        for one, status in zip(own, found.values[_STATUS], strict=True)
    ]


def _partition(records: Sequence[object], fields: Sequence[NestedField]) -> tuple[pa.Array, ...]:
    values = [one for one in records if isinstance(one, tuple)]
    return tuple(_partition_values([one[place] for one in values], field) for place, field in enumerate(fields))


def _partition_values(values: Sequence[object], field: NestedField) -> pa.Array:
    """As plain values: days and moments are numbers, as in Iceberg's transforms."""
    kind = field.field_type
    if isinstance(kind, UUIDType):
        return pa.array([one.bytes if isinstance(one, UUID) else one for one in values], pa.binary())
    if isinstance(kind, DecimalType):
        return pa.array(values, pa.decimal128(kind.precision, kind.scale))
    if any(isinstance(one, Decimal) for one in values):
        raise TypeError(f"unexpected decimals in partition field {field.name}")
    return pa.array(values)


def _others(found: ManifestRows) -> tuple[dict[int, object], dict[int, dict[int, object]]]:
    """Values that files mostly have in common, or lack."""
    alike: dict[int, object] = {}
    rare: dict[int, dict[int, object]] = {}
    for field_id in (_FORMAT, _KEY, _OFFSETS, _EQUALITY, _SORT):
        values = found.values.get(field_id, [])
        if not values or values.count(values[0]) == len(values):
            alike[field_id] = values[0] if values else None
        else:
            rare[field_id] = {at: value for at, value in enumerate(values) if value is not None}
    return alike, rare


def _facts(found: ManifestRows, rows: _Numbers) -> dict[int, ColumnFacts]:
    counts = {which: _by_column(found, which, rows) for which in (_COLUMN_SIZES, _VALUES, _NULLS, _NANS)}
    bounds = {which: _bounds(found.values.get(which, [])) for which in (_LOWER, _UPPER)}
    absent = np.full(1, ABSENT, np.int8)
    ids = {field_id for one in (*counts.values(), *bounds.values()) for field_id in one}
    facts = {}
    for field_id in ids:
        sizes, values, nulls, nans = (one.get(field_id, absent) for one in counts.values())
        lower, upper = bounds[_LOWER].get(field_id), bounds[_UPPER].get(field_id)
        # Of a partition's value, and of files of a row, both bounds are the same.
        same = lower is not None and upper is not None and lower.equals(upper)
        facts[field_id] = ColumnFacts(sizes, values, nulls, nans, lower, lower if same else upper)
    return facts


def _by_column(found: ManifestRows, which: int, rows: _Numbers) -> dict[int, _Numbers]:
    """The numbers of each column, of maps by column."""
    maps = found.values.get(which, [])
    places, ids, values = pairs(maps)
    by_column: dict[int, _Numbers] = {}
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=ABSENT)).tolist()
    for start, end in pairwise([*starts, len(order)]):
        at = order[start:end]
        numbers = np.full(found.count, ABSENT, np.int64)
        numbers[places[at]] = values[at]
        # Of a column that no list or map holds, a file has as many values as rows.
        same = len(rows) == found.count and np.array_equal(numbers, rows)
        by_column[int(ids[order[start]])] = rows if same else _packed(numbers)
    return by_column


def _bounds(maps: Sequence[object]) -> dict[int, pa.Array]:
    known = [one if isinstance(one, dict) else {} for one in maps]
    ids = {field_id for one in known for field_id in one}
    return {field_id: raw_bytes([one.get(field_id) for one in known]) for field_id in ids}


def raw_bytes(values: Sequence[bytes | None]) -> pa.Array:
    """Bytes; if all are of one length, as numbers are, without where each of them begins."""
    widths = {len(one) for one in values if one is not None}
    width = widths.pop() if len(widths) == 1 else 0
    return pa.array(values, pa.binary(width) if width else pa.binary())


def _numbers(values: Sequence[object]) -> _Numbers:
    plain = [ABSENT if one is None else one for one in values]
    return _packed(np.array(plain, np.int64))


def _packed(values: npt.NDArray[np.int64]) -> _Numbers:
    """In the fewest bytes a number, and only one number if they are all the same."""
    if not len(values):
        return np.full(1, ABSENT, np.int8)
    low, high = int(values.min()), int(values.max())
    if low == high:
        values = values[:1]
    kind = next(
        kind
        for kind in (np.int8, np.int16, np.int32, np.int64)
        if np.iinfo(kind).min <= low <= high <= np.iinfo(kind).max
    )
    return values.astype(kind)


# ── what the process remembers ──


class ColumnsRemembered:
    """The columns of manifests, up to a number of bytes; those that were not asked for the longest are dropped."""

    def __init__(self, bytes_max: int = REMEMBERED_BYTES_MAX) -> None:
        self._lock = threading.Lock()
        self._columns: LRUCache[object, FileColumns] = LRUCache(bytes_max, getsizeof=lambda columns: columns.size_bytes)

    def of(self, key: object, manifest: ManifestFile, read: Callable[[str], bytes]) -> FileColumns:
        with self._lock:
            found = self._columns.get(key)
        if found is None:
            found = columns_of(_whole(read(manifest.manifest_path), manifest), manifest)
            with self._lock:
                if found.size_bytes <= self._columns.maxsize:
                    self._columns[key] = found
        return found

    def clear(self) -> None:
        with self._lock:
            self._columns.clear()

    @property
    def size_bytes(self) -> int:
        return int(self._columns.currsize)


REMEMBERED = ColumnsRemembered()
