"""Rules about indexes: a segment that is in use says exactly what the rows of its files say (I11)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pyiceberg.schema import Schema

from floodmark.catalog.indexes import IndexRow, SegmentRow
from floodmark.commit.catalog import Catalog
from floodmark.commit.metadata import MetadataFiles
from floodmark.errors import Corrupt, NotFound
from floodmark.index.covering import form_of
from floodmark.index.writing import columns_on
from floodmark.rows.index.build import build
from floodmark.rows.index.entries import Entries, joined
from floodmark.rows.index.segment import NotCovered, Section, open_segment
from floodmark.rows.schema import user_fields


def check_indexes(catalog: Catalog, broken: list[str]) -> set[str]:
    """The files of all segments, which must exist unless the catalog says that they are damaged."""
    found: set[str] = set()
    indexes = {index.id: index for index in catalog.indexes.all()}
    # Also of an index that is forgotten: its files wait for a sweep.
    for table_id in catalog.indexes.tables():
        schemas = _schemas(catalog, table_id)
        for row in catalog.indexes.segments(table_id):
            if row.broken:
                continue
            found.add(row.location)
            index = indexes.get(row.index_id)
            if index is None or not index.is_live:
                if row.retired_ms is None:
                    broken.append(f"segment {row.location} is in use, but its index is not")
            elif not catalog.storage.exists(row.location):
                broken.append(f"segment {row.location} is gone")
            else:
                try:
                    _check_segment(catalog, index, row, schemas, broken)
                except Corrupt as error:
                    # Of a retired one it is noticed when an old version needs it.
                    broken += [] if row.retired_ms is not None else [f"segment {row.location} is damaged: {error}"]
    return found


def _schemas(catalog: Catalog, table_id: str) -> Sequence[Schema]:
    """All schemas that the table had, the newest first; none once it was dropped and swept."""
    try:
        metadata = MetadataFiles(catalog.storage).metadata(catalog.history.newest_metadata(table_id))
    except (Corrupt, NotFound):
        return ()
    return sorted(metadata.schemas, key=lambda one: -one.schema_id)


def _check_segment(
    catalog: Catalog, index: IndexRow, row: SegmentRow, schemas: Sequence[Schema], broken: list[str]
) -> None:
    form = form_of(index)
    schema = next((one for one in schemas if columns_on(one, index.field_ids) is not None), None)
    columns = None if schema is None else columns_on(schema, index.field_ids)
    if form is None or schema is None or columns is None:
        return
    opened = open_segment(
        catalog.storage, row.location, size_bytes=row.size_bytes, tail_bytes=row.tail_bytes, digest=row.digest
    )
    section = opened if isinstance(opened, NotCovered) else opened.section(form)
    if not isinstance(section, Section):
        broken.append(f"segment {row.location} does not cover its index: {section}")
        return
    if len(section.files) != row.files:
        broken.append(f"segment {row.location} covers {len(section.files)} files, and its row says {row.files}")
    if not all(catalog.storage.exists(file.path) for file in section.files):
        return  # swept: entries of files that no state names are ignored
    try:
        plan = build(catalog.storage, form, section.files, columns, user_fields(schema))
    except Corrupt:
        return  # a damaged data file, which other rules report
    expected, actual = list(plan.entries), list(section.all(fingerprints=False))
    if not _same(expected, actual):
        broken.append(f"segment {row.location} does not say what the rows of its files say")


def _same(expected: list[Entries], actual: list[Entries]) -> bool:
    if not expected or not actual:
        return sum(map(len, expected)) == sum(map(len, actual))
    one, other = joined(expected), joined(actual)
    lows = one.low is None or other.low is None or bool(np.array_equal(one.low, other.low))
    same = np.array_equal(one.high, other.high) and np.array_equal(one.files, other.files)
    return bool(lows and same and np.array_equal(one.positions, other.positions))
