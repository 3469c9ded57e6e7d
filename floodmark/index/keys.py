"""Which data files may hold some keys, by the key's index: the others need not be opened.

A file that the index does not cover stays among them. The caller still compares the keys themselves, so a hash that two
keys share, or an entry of a row that is gone, costs a look into a file and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
from pyiceberg.types import NestedField

from floodmark.catalog.indexes import KEY, Indexes, IndexRow
from floodmark.commit.live_files import LiveFile
from floodmark.index.covering import Coverings, form_of
from floodmark.rows.index.hashing import hash_values
from floodmark.rows.project import read_file
from floodmark.storage import Storage

# Keys whose hashes are in memory at once.
KEYS_AT_ONCE = 500_000


def key_index(indexes: Indexes, table_id: str, fields: Sequence[NestedField]) -> IndexRow | None:
    """The index on these key columns, if it is in use and this Floodmark can read it."""
    on = tuple(field.field_id for field in fields)
    for index in indexes.of_table(table_id):
        if index.kind == KEY and index.field_ids == on and index.is_live and form_of(index) is not None:
            return index
    return None


def column_index(indexes: Indexes, table_id: str, field: NestedField) -> IndexRow | None:
    """An index on this column alone, of either kind, if it is in use and this Floodmark can read it."""
    for index in indexes.of_table(table_id):
        if index.field_ids == (field.field_id,) and index.is_live and form_of(index) is not None:
            return index
    return None


def files_holding_keys(
    coverings: Coverings,
    index: IndexRow | None,
    storage: Storage,
    files: Sequence[LiveFile],
    staged: Sequence[str],
    fields: Sequence[NestedField],
) -> list[LiveFile]:
    """Those of the files that may hold one of the keys in some staged files."""
    return files_holding(coverings, index, files, _keys(storage, staged, fields))


def files_holding(
    coverings: Coverings, index: IndexRow | None, files: Sequence[LiveFile], keys: Iterable[Sequence[pa.ChunkedArray]]
) -> list[LiveFile]:
    """The same for keys given as the key's columns, in their order, some rows at a time."""
    form = None if index is None else form_of(index)
    if index is None or form is None or not files:
        return list(files)
    paths = [file.path for file in files]
    found: set[int] = set()
    for columns in keys:
        hits = coverings.find(index, paths, hash_values(columns, form.secret, form.encoder))
        found.update(hits.files.tolist(), hits.uncovered)
        if len(found) == len(paths):
            break
    return [file for place, file in enumerate(files) if place in found]


def _keys(storage: Storage, staged: Sequence[str], fields: Sequence[NestedField]) -> Iterator[list[pa.ChunkedArray]]:
    """The key columns of staged files, a bounded number of rows at a time."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for location in staged:
        for batch in read_file(storage, location, fields):
            held.append(batch)
            rows += len(batch)
            if rows >= KEYS_AT_ONCE:
                yield pa.Table.from_batches(held).columns
                held, rows = [], 0
    if held:
        yield pa.Table.from_batches(held).columns
