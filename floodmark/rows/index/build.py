"""Sections made from the data files that they cover: for files that were just staged, and for older ones.

The files are read once for all indexes: their columns only, and for fingerprints all columns of the table. All entries
are in memory at once, so the caller gives so many files as fit; `fold` joins what was made.
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
    return build_sections(storage, [(form, columns)], files, fields)[0]


def build_sections(
    storage: Storage,
    indexes: Sequence[tuple[IndexForm, Sequence[NestedField]]],
    files: Sequence[CoveredFile],
    fields: Sequence[NestedField],
) -> list[SectionPlan]:
    """The sections of these files for several indexes of a table, each given with its columns, in their order."""
    parts: list[list[Entries]] = [[] for _ in indexes]
    every = any(form.fingerprints for form, _ in indexes)
    columns = {column.field_id: column for _, some in indexes for column in some}
    wanted = list(fields) if every else list(columns.values())
    ids = [field.field_id for field in wanted]
    for number, file in enumerate(files):
        rows = 0
        for start, batch in read_numbered(storage, file.path, wanted, size_bytes=file.size_bytes):
            for (form, some), part in zip(indexes, parts, strict=True):
                part.append(
                    make_entries(
                        [batch.column(ids.index(column.field_id)) for column in some],
                        form.secret,
                        file=number,
                        position=start,
                        fingerprints=fingerprints(batch, wanted, form.secret) if form.fingerprints else None,
                        encoder=form.encoder,
                    )
                )
            rows += len(batch)
        if rows != file.rows:
            raise Corrupt("a data file does not have the rows in the catalog", file=file.path, rows=rows)
    return [
        SectionPlan(form, files, [sort_entries(joined(part))] if part else [])
        for (form, _), part in zip(indexes, parts, strict=True)
    ]
