"""Whether segments say what the rows of their files say: for `doctor`, and for maintenance that makes them again.

A segment must exist with its size; `deep` makes its entries again from the data files and compares them. Files that a
sweep has deleted are left out: what is said of them is never asked. Fingerprints are not compared: they are of the
columns that the table had when the segment was made, and each block of them has a checksum. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from pyiceberg.schema import Schema

from floodmark.catalog.indexes import IndexRow, SegmentRow
from floodmark.commit.catalog import Catalog
from floodmark.errors import Corrupt, NotFound
from floodmark.index.covering import form_of
from floodmark.index.writing import ROWS_PER_SEGMENT, columns_on
from floodmark.rows.index.build import build
from floodmark.rows.index.entries import Entries, joined
from floodmark.rows.index.segment import CoveredFile, IndexForm, NotCovered, Section, open_segment
from floodmark.storage import Storage

GONE = "it does not exist"
OTHER_ROWS = "it does not say what the rows of its files say"


def problem_of(catalog: Catalog, index: IndexRow | None, row: SegmentRow, *, deep: bool) -> str | None:
    """What is wrong with a segment; None: nothing, or a sweep deleted it meanwhile."""
    try:
        problem = _size_problem(catalog.storage, row)
        if problem is None and deep and index is not None:
            problem = _rows_problem(catalog, index, row)
    except (NotFound, FileNotFoundError):
        problem = GONE
    except Corrupt as error:
        problem = str(error)
    return problem if problem is not None and catalog.indexes.is_recorded(row.location) else None


def _size_problem(storage: Storage, row: SegmentRow) -> str | None:
    found = storage.size(row.location)
    return None if found == row.size_bytes else f"it has {found} bytes, not {row.size_bytes}"


def _rows_problem(catalog: Catalog, index: IndexRow, row: SegmentRow) -> str | None:
    form, schema = form_of(index), _schema(catalog, index)
    columns = None if schema is None else columns_on(schema, index.field_ids)
    if form is None or columns is None:
        return None  # of a later Floodmark, or on columns that the table has no more
    storage = catalog.storage
    opened = open_segment(
        storage, row.location, size_bytes=row.size_bytes, tail_bytes=row.tail_bytes, digest=row.digest
    )
    if isinstance(opened, NotCovered):
        return None
    with opened:
        section = opened.section(form)
        if not isinstance(section, Section):
            return None if section.reason == "encoder" else f"its section is of another {section.reason}"
        without = IndexForm(form.id, form.secret, form.wide, fingerprints=False, encoder=form.encoder)
        for numbers, files in _groups(storage, section.files):
            made = build(storage, without, files, columns, columns)
            if not _same(list(made.entries), list(_of_files(section, numbers))):
                return OTHER_ROWS
    return None


def _schema(catalog: Catalog, index: IndexRow) -> Schema | None:
    """The newest schema that has the columns of the index."""
    newest = catalog.history.newest_metadata(index.table_id)
    schemas = sorted(catalog.files.metadata(newest).schemas, key=lambda one: -one.schema_id)
    return next((one for one in schemas if columns_on(one, index.field_ids) is not None), None)


def _groups(storage: Storage, files: Sequence[CoveredFile]) -> Iterator[tuple[list[int], list[CoveredFile]]]:
    """Files that exist, with their numbers, a bounded number of rows at a time (I14)."""
    numbers: list[int] = []
    some: list[CoveredFile] = []
    for number, file in enumerate(files):
        if not storage.exists(file.path):
            continue
        if some and sum(one.rows for one in some) + file.rows > ROWS_PER_SEGMENT:
            yield numbers, some
            numbers, some = [], []
        numbers.append(number)
        some.append(file)
    if some:
        yield numbers, some


def _of_files(section: Section, numbers: Sequence[int]) -> Iterator[Entries]:
    """The entries of some files, which count from 0."""
    places = np.full(len(section.files), -1, np.int64)
    places[numbers] = np.arange(len(numbers))
    for entries in section.all(fingerprints=False):
        at = places[entries.files]
        mine = entries.take(at >= 0)
        yield Entries(mine.high, mine.low, at[at >= 0].astype(np.uint32), mine.positions, None)


def _same(expected: Sequence[Entries], found: Sequence[Entries]) -> bool:
    if sum(map(len, expected)) != sum(map(len, found)):
        return False
    if not expected or not found:
        return True
    one, other = joined(expected), joined(found)
    lows = one.low is None or other.low is None or np.array_equal(one.low, other.low)
    pairs = (one.high, other.high), (one.files, other.files), (one.positions, other.positions)
    return bool(lows and all(np.array_equal(left, right) for left, right in pairs))
