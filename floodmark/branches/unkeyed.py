"""Merges rows of a table without a key from one branch into another: only their sequences distinguish them.

New to the target are the rows whose sequence on the source is above what the target has, and not that of a merge that
brought them from the target itself. A file that holds such rows only is added again under its path, without a copy, and
gets the target's next sequence (protocol 3); of other files the new rows are staged again. Rows that the target has
keep their sequences, whatever file they are in (I6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from floodmark import clock
from floodmark.branches.fit import check_comes
from floodmark.branches.rows import Counted
from floodmark.branches.view import SideFiles
from floodmark.commit.catalog import Catalog
from floodmark.commit.fills import absent_fields
from floodmark.commit.live_files import LiveFile
from floodmark.commit.manifests import record_of
from floodmark.errors import Corrupt
from floodmark.model import BEGINNING, SEQ_COLUMN, FileRecord
from floodmark.rows.reading.arrow_reader import arrow_batches, arrow_read_schema, read_rows
from floodmark.rows.rewriting.three_way import new_rows, row_schema
from floodmark.rows.staging.stage import stage_batches
from floodmark.write.change import Change
from floodmark.write.step import APPEND, OVERWRITE
from floodmark.write.table import TableChange


@dataclass(frozen=True)
class NewRows:
    """Files of the source whose rows are all new to the target, and files that hold some that are."""

    whole: tuple[LiveFile, ...]
    mixed: tuple[LiveFile, ...]


def find_new(files: SideFiles) -> NewRows:
    since, until, excluded = files.sides.since, files.head.sequence, files.sides.excluded
    whole, mixed = [], []
    for file in files.source:
        bounds = file.seq_bounds()
        if bounds is not None and (bounds[1] <= since or bounds[0] > until):
            continue
        if not file.fresh:
            mixed.append(file)
        elif file.sequence not in excluded:
            whole.append(file)
    return NewRows(tuple(whole), tuple(mixed))


def count_new(catalog: Catalog, files: SideFiles) -> int:
    found = find_new(files)
    return sum(file.rows for file in found.whole) + sum(len(batch) for batch in rows_of(catalog, files, found.mixed))


def rows_of(catalog: Catalog, files: SideFiles, some: Sequence[LiveFile]) -> Iterator[pa.RecordBatch]:
    between = (files.sides.since, files.head.sequence)
    return new_rows(catalog.storage, some, files.schema, between, files.sides.excluded)


def append_rows(catalog: Catalog, files: SideFiles, change: Change | None, table: TableChange | None) -> Counted:
    """Add the source's new rows to the target's."""
    if table is None or change is None:
        check_comes(catalog, files, find_new(files).whole)
        return Counted(added=count_new(catalog, files))
    found = find_new(files)
    check_comes(catalog, files, found.whole)
    again = [file for file in found.whole if _fits(file, table)]
    added = {file.path for file in again}
    table.add_again(_records(catalog, files, again))
    copied = [file for file in (*found.whole, *found.mixed) if file.path not in added]
    rows = sum(file.rows for file in again)
    # Columns that a file lacks and the target fills are filled here: so files that lack the same columns go together.
    for lacks, some in _by_absent(copied, table).items():
        names = [field.name for field in table.schema.fields if field.field_id not in lacks]
        rows += change.write(APPEND, table.name, _reader(catalog, files, some, names))
    return Counted(added=rows)


def _reader(catalog: Catalog, files: SideFiles, some: Sequence[LiveFile], names: list[str]) -> pa.RecordBatchReader:
    schema = row_schema(files.schema)
    kept = [name for name in schema.names if name in names]
    batches = (batch.select(kept) for batch in rows_of(catalog, files, some))
    return pa.RecordBatchReader.from_batches(pa.schema([schema.field(name) for name in kept]), batches)


def _by_absent(some: Sequence[LiveFile], table: TableChange) -> dict[tuple[int, ...], list[LiveFile]]:
    groups: dict[tuple[int, ...], list[LiveFile]] = defaultdict(list)
    for file in some:
        groups[absent_fields(file, table.fills, table.schema)].append(file)
    return groups


def _fits(file: LiveFile, table: TableChange) -> bool:
    """The target may name the file as it is: its partitions are the table's, and it lacks no column that is filled."""
    return file.spec_id == table.spec_id and not absent_fields(file, table.fills, table.schema)


def _records(catalog: Catalog, files: SideFiles, some: Sequence[LiveFile]) -> list[FileRecord]:
    metadata = catalog.files.metadata(files.head.metadata_location)
    return [record_of(file.data_file, metadata) for file in some]


def overwrite_rows(catalog: Catalog, files: SideFiles, change: Change | None) -> Counted:
    """Remove all rows of the target, and add all of the source's as new ones."""
    target = files.sides.facts.target
    gone = 0 if target is None else target.rows
    if change is not None:
        batches = arrow_batches(catalog.storage, files.whole_source, files.schema, with_seq=False)
        reader = pa.RecordBatchReader.from_batches(row_schema(files.schema), batches)
        change.write(OVERWRITE, files.head.table, reader)
    return Counted(added=files.head.rows, deleted=gone)


def replace_rows(catalog: Catalog, files: SideFiles, table: TableChange | None) -> Counted:
    """Give the unchanged target what the source has. Files that are live on both stay."""
    common, target = files.sides.facts.common, files.sides.facts.target
    if common is None or target is None:
        raise Corrupt("a table without a common state cannot be replaced", table=files.head.table)
    # The target has the source's rows up to here, whatever the common state's sequence is: it may be another lineage's.
    known = files.sides.since
    ours = {file.path for file in files.target}
    came = [file for file in files.whole_source if file.path not in ours]
    check_comes(catalog, files, came)
    above = (known, files.head.sequence)
    if table is None:
        mixed = [file for file in came if not _is_new(file, known)]
        added = sum(file.rows for file in came if _is_new(file, known))
        added += sum(len(batch) for batch in new_rows(catalog.storage, mixed, files.schema, above))
        return Counted(added=added, deleted=target.rows + added - files.head.rows)
    table.replace_all(keep={file.path for file in files.whole_source})
    again = [file for file in came if _fits(file, table) and _is_new(file, known)]
    carried = [file for file in came if _fits(file, table) and _is_known(file, known)]
    table.add_again(_records(catalog, files, again))
    table.add_again(_records(catalog, files, carried), carried=True)
    done = {file.path for file in (*again, *carried)}
    rest = [file for file in came if file.path not in done]
    new = _stage(catalog, files, table, rest, above, settled=False)
    table.add_staged(new)
    table.add_staged(_stage(catalog, files, table, rest, (BEGINNING, known), settled=True), carried=True)
    added = sum(file.rows for file in again) + sum(record.rows for record in new)
    return Counted(added=added, deleted=target.rows + added - files.head.rows)


def _is_new(file: LiveFile, known: int) -> bool:
    return file.fresh and file.sequence is not None and file.sequence > known


def _is_known(file: LiveFile, known: int) -> bool:
    """All rows are older than the branch, and carry a sequence: a fresh file would get the target's next one."""
    bounds = file.seq_bounds()
    return file.settled and bounds is not None and bounds[1] <= known


def _stage(
    catalog: Catalog,
    files: SideFiles,
    table: TableChange,
    some: Sequence[LiveFile],
    between: tuple[int, int],
    *,
    settled: bool,
) -> list[FileRecord]:
    """Stage the rows of some files whose sequences are in a range for the target; settled ones keep theirs."""
    records: list[FileRecord] = []
    for lacks, group in _by_absent(some, table).items():
        target = replace(table.target(), settled=settled).without(lacks)
        kept = set(target.shape().schema.column_names)
        schema = arrow_read_schema(files.schema, with_seq=settled)
        names = [name for name in schema.names if name in kept or name == SEQ_COLUMN]
        batches = (
            batch.select(names)
            for file in group
            for batch in read_rows(catalog.storage, file.path, files.schema, settled, file.sequence, between)
        )
        staged = stage_batches(target, batches, clock.new_id(), storage=catalog.storage)
        if staged.problems:
            raise Corrupt("a data file has rows that do not fit its table", table=table.name, cause=staged.problems[0])
        records += staged.records
    return records
