"""A section made from the data files that it covers: of an index that was declared later, or to compare with one.

Only the columns of the index are read, and for fingerprints all columns of the table. All entries are in memory
at once, so the caller gives so many files as fit; `fold` joins what was made.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyiceberg.types import NestedField

from floodmark.errors import Corrupt
from floodmark.rows.index.entries import Entries, joined, make_entries, sort_entries
from floodmark.rows.index.fingerprint import fingerprints
from floodmark.rows.index.segment import CoveredFile, IndexForm, SectionPlan
from floodmark.rows.project import read_numbered
from floodmark.storage import Storage


def build(
    storage: Storage,
    form: IndexForm,
    files: Sequence[CoveredFile],
    columns: Sequence[NestedField],
    fields: Sequence[NestedField],
) -> SectionPlan:
    """The section of these files: `columns` are those of the index, in its order, `fields` all of the table."""
    parts: list[Entries] = []
    wanted = list(fields) if form.fingerprints else list(columns)
    at = [[field.field_id for field in wanted].index(column.field_id) for column in columns]
    for number, file in enumerate(files):
        rows = 0
        for start, batch in read_numbered(storage, file.path, wanted, size_bytes=file.size_bytes):
            marks = fingerprints(batch, wanted, form.secret) if form.fingerprints else None
            parts.append(
                make_entries(
                    [batch.column(one) for one in at],
                    form.secret,
                    file=number,
                    position=start,
                    fingerprints=marks,
                    encoder=form.encoder,
                )
            )
            rows += len(batch)
        if rows != file.rows:
            raise Corrupt("a data file does not have the rows in the catalog", file=file.path, rows=rows)
    return SectionPlan(form, files, [sort_entries(joined(parts))] if parts else [])
