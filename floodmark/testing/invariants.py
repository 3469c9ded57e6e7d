"""Invariants of every lake at rest: checked from the catalog and the files themselves, not from what code reports.

Used by crash, fault and model tests after every step. Raises AssertionError with all broken rules, not only the first.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import Connection, select

from floodmark.catalog import tables
from floodmark.catalog.history import EXPIRED
from floodmark.catalog.spools import HELD
from floodmark.catalog.witness import FOLDER as WITNESSES
from floodmark.commit.catalog import Catalog
from floodmark.commit.journal import ABANDONED, PUBLISHED, STAGING, all_files
from floodmark.commit.metadata import MetadataFiles, small_file_bytes
from floodmark.commit.table_states import CONDEMNED_MS
from floodmark.errors import FloodmarkError
from floodmark.ingest.quarantine import FOLDER as QUARANTINE
from floodmark.ingest.quarantine import leftovers, read_aside
from floodmark.maintenance.record import INDEX
from floodmark.model import MAIN, SEQ_COLUMN, Value
from floodmark.storage import join
from floodmark.testing.catalog_rows import CatalogRows, HeadRow, StateRow
from floodmark.testing.index_invariants import check_indexes
from floodmark.testing.lineage_invariants import (
    check_heads,
    check_lineages,
    check_refs,
    check_seen,
    check_totals,
    seen_by_versions,
)
from floodmark.testing.sink_invariants import check_sinks, check_witnesses

_READERS: dict[str, MetadataFiles] = {}
# Outcomes in the audit of operations that were published; all others were abandoned.
_PUBLISHED_OUTCOMES = {"rolled_forward", "accepted", "reverted"}
# Another engine's file: directly in a table's folder. Ours are in those of operations.
_FOREIGN = re.compile(r"/(?:data|metadata)/[^/]+$")
_NOT_IN_THE_JOURNAL = {
    *(("unit", "resumed"), ("job", "resumed"), ("job", "cancelled")),
    *(("repair", "given_up"), ("redo", "redone")),
}


@dataclass(frozen=True)
class LakeFacts:
    """The findings: for tests that compare them with what they expect."""

    version: int
    operations: dict[str, str]
    audit: dict[str, str]
    files: frozenset[str]


def check_lake(catalog: Catalog, *, settled: bool = True) -> LakeFacts:
    """Check a lake that no process writes to. `settled`: recovery has run, so nothing may be unfinished or
    left over.
    """
    broken: list[str] = []
    with catalog.database.read() as tx:
        rows = CatalogRows.read(tx)
        check_sinks(tx, broken)
        _check_turns(tx, broken)
    condemned = {(row.version, row.table_id) for row in rows.expired if row.expired_ms == CONDEMNED_MS}
    swept = _swept(rows) | condemned
    _check_history(rows, broken)
    seen = seen_by_versions(rows.commits, rows.states)
    check_lineages(rows.commits, rows.branches, rows.lines, broken)
    check_heads(seen, rows.branches, rows.heads, broken)
    check_totals(seen, rows.commits, rows.states, broken)
    check_seen(seen, rows.commits, swept, broken)
    _check_states(catalog, rows.states, swept, broken)
    _check_pointers(catalog, rows, broken)
    _check_small_files(catalog, rows, broken)
    _check_journal(rows, settled, broken)
    _check_rows(catalog, rows.heads, broken)
    _check_deletions(catalog, rows, broken)
    segments = check_indexes(catalog, broken)
    files = _check_files(catalog, rows, swept, condemned, settled, segments, broken)
    _check_spools(catalog, rows.version, broken)
    check_witnesses(catalog, broken)
    if broken:
        raise AssertionError("broken rules:\n- " + "\n- ".join(broken))
    return LakeFacts(
        version=rows.version,
        operations={row.id: row.state for row in rows.operations},
        audit={row.operation: row.outcome for row in rows.audit},
        files=frozenset(files),
    )


def _check_turns(tx: Connection, broken: list[str]) -> None:
    """An operation that has ended has no turn and waits for none: others would wait for it."""
    ended = select(tables.operations.c.id).where(tables.operations.c.state.in_((PUBLISHED, ABANDONED)))
    for table in (tables.turns, tables.waiting):
        left = tx.execute(select(table.c.operation).where(table.c.operation.in_(ended))).scalars().all()
        broken.extend(f"{table.name} has the operation {operation}, which has ended" for operation in left)


def _swept(rows: CatalogRows) -> set[tuple[int, str]]:
    """The states of tables whose files a sweep has deleted: expired, and no row marks them as waiting for it."""
    gone = {row.version for row in rows.commits if row.state == EXPIRED}
    waiting = {(row.version, row.table_id) for row in rows.expired}
    return {row.id for row in rows.states if row.version in gone and row.id not in waiting}


def _check_history(rows: CatalogRows, broken: list[str]) -> None:
    versions = [row.version for row in rows.commits]
    if versions != list(range(1, rows.version + 1)):
        broken.append(f"versions have a gap: {versions} up to {rows.version}")
    if any(later.committed_ms < earlier.committed_ms for earlier, later in pairwise(rows.commits)):
        broken.append("commit times go back")
    by_id = {row.id: row for row in rows.operations}
    for commit in rows.commits:
        operation = by_id.get(commit.operation)
        if operation is None or operation.state != PUBLISHED or operation.version != commit.version:
            broken.append(f"version {commit.version} has no published operation")
    ended = [row for row in rows.operations if row.state == PUBLISHED]
    # Segments alone make no version.
    published = Counter(row.version or 0 for row in ended if row.version is not None or row.kind != INDEX)
    if any(count != 1 for count in published.values()) or set(published) != set(versions):
        broken.append(f"published operations {sorted(published)} are not the versions {versions}")
    for batch in rows.batches:
        if batch.version not in published:
            broken.append(f"batch {batch.id} names version {batch.version}, which does not exist")


def _check_states(catalog: Catalog, states: list[StateRow], swept: set[tuple[int, str]], broken: list[str]) -> None:
    """Every existing state: its files match the count in its row, and have their sequences."""
    files = _reader(catalog)
    for row in states:
        if row.id in swept or not row.metadata_location:
            continue
        entries = [entry for manifest in files.manifests(row.manifest_list) for entry in files.entries(manifest)]
        rows = sum(entry.data_file.record_count for entry in entries)
        if (rows, len(entries)) != (row.rows_total, row.files_total):
            broken.append(f"{row.table_name}@{row.version}: {rows} rows in {len(entries)} files, not {row.rows_total}")
        if len({entry.data_file.file_path for entry in entries}) != len(entries):
            broken.append(f"{row.table_name}@{row.version}: it lists a file twice")
        for entry in entries:
            sequence = entry.sequence_number
            if sequence is None or sequence > row.sequence:
                broken.append(f"{row.table_name}@{row.version}: a file's sequence {sequence} is above the commit's")
            elif entry.snapshot_id == row.snapshot and sequence != row.sequence:
                broken.append(f"{row.table_name}@{row.version}: new rows have sequence {sequence}, not {row.sequence}")


def _check_pointers(catalog: Catalog, rows: CatalogRows, broken: list[str]) -> None:
    """Iceberg's pointers: one for every table that some branch has, at the newest commit of any branch."""
    pointers, bases = rows.pointers, {row.name: row.base_version for row in rows.branches}
    by_table: dict[str, list[HeadRow]] = {}
    for head in rows.heads:
        by_table.setdefault(head.table_id, []).append(head)
    names = sorted(found[0].table_name for found in by_table.values())
    if names != sorted(pointers):
        broken.append(f"heads {names} are not the pointers {sorted(pointers)}")
    files = _reader(catalog)
    newest = {row.table_id: row.metadata_location for row in rows.states if row.metadata_location}
    for table_id, found in by_table.items():
        name = found[0].table_name
        if pointers.get(name) != newest[table_id]:
            broken.append(f"pointer of {name} is not its newest commit")
        check_refs(files.metadata(newest[table_id]), found, bases, broken)
    for head in rows.heads:
        for manifest in files.manifests(head.manifest_list):
            seen = [(one.data_file.file_path, one.sequence_number) for one in files.entries(manifest)]
            known = [(one.data_file.file_path, one.sequence_number) for one in catalog.files.entries(manifest)]
            if seen != known:
                broken.append(f"{head.table_name}: this process remembers {known}, on disk is {seen}")


def _check_rows(catalog: Catalog, heads: list[HeadRow], broken: list[str]) -> None:
    """The rows of every head, from the files themselves: sequences fresh or settled, never mixed; keys unique."""
    files = _reader(catalog)
    for head in {one.metadata_location: one for one in heads}.values():
        schema = files.metadata(head.metadata_location).schema_by_id(head.schema_id)
        assert schema is not None
        key = schema.identifier_field_ids
        keys: Counter[tuple[Value, ...]] = Counter()
        for manifest in files.manifests(head.manifest_list):
            for entry in files.entries(manifest):
                path = entry.data_file.file_path
                table = _parquet(catalog, path)
                if table.num_rows != entry.data_file.record_count:
                    broken.append(f"{path} has {table.num_rows} rows, not {entry.data_file.record_count}")
                # A file of another engine has the column, with nulls only: as fresh as one without.
                if SEQ_COLUMN in table.column_names and table[SEQ_COLUMN].null_count < table.num_rows:
                    values = table[SEQ_COLUMN].to_pylist()
                    if None in values or max(values) >= entry.sequence_number:
                        broken.append(f"{path} is not settled below its commit {entry.sequence_number}: {values[:9]}")
                by_id = {int(field.metadata[b"PARQUET:field_id"]): field.name for field in table.schema}
                for field in schema.fields:
                    held = by_id.get(field.field_id)
                    if field.required and table.num_rows and (held is None or table[held].null_count):
                        broken.append(f"{head.table_name}: {path} has no value of {field.name}, which is required")
                if key:
                    keys.update(zip(*(table[by_id[field_id]].to_pylist() for field_id in key), strict=True))
        if twice := [values for values, count in keys.items() if count > 1]:
            broken.append(f"{head.table_name}: keys are not unique: {twice[:5]}")


def _check_small_files(catalog: Catalog, rows: CatalogRows, broken: list[str]) -> None:
    """The count that publishes keep is the number of small files that the manifests of main's head name."""
    files = _reader(catalog)
    small = {table_id: row.small_files for table_id, row in rows.maintenance.items()}
    for head in rows.heads:
        if head.table_id not in small:
            broken.append(f"{head.table_name} has no row for its maintenance")
        if head.branch != MAIN:
            continue
        limit = small_file_bytes(files.metadata(head.metadata_location))
        manifests = files.manifests(head.manifest_list)
        sizes = [entry.data_file.file_size_in_bytes for one in manifests for entry in files.entries(one)]
        if small.get(head.table_id) not in (None, found := sum(size < limit for size in sizes)):
            broken.append(f"{head.table_name}: {small[head.table_id]} small files by its count, {found} really")


def _check_deletions(catalog: Catalog, rows: CatalogRows, broken: list[str]) -> None:
    commits = {(row.table_id, row.version): row for row in rows.states}
    for file in rows.deletions:
        floor = rows.maintenance[file.table_id].deletions_floor
        commit = commits.get((file.table_id, file.version))
        if commit is None or commit.sequence != file.sequence:
            broken.append(f"{file.location} is not of a commit of its table with its sequence {file.sequence}")
        elif file.sequence <= floor and not catalog.storage.exists(file.location):
            continue  # an interrupted sweep had deleted it; its row still exists
        elif _parquet(catalog, file.location).num_rows != file.rows_total:
            broken.append(f"{file.location} does not hold {file.rows_total} keys")


def _parquet(catalog: Catalog, location: str) -> pa.Table:
    with catalog.storage.open_input(location) as stream:
        # As a file, not a dataset of one: for a small file that takes a quarter of the time.
        return pq.ParquetFile(stream).read(use_threads=False)


def _reader(catalog: Catalog) -> MetadataFiles:
    """Reads metadata from disk itself: caches of the lake under test must not confirm themselves."""
    if catalog.location not in _READERS:
        _READERS[catalog.location] = MetadataFiles(catalog.storage)
    return _READERS[catalog.location]


def _check_journal(rows: CatalogRows, settled: bool, broken: list[str]) -> None:
    states = {row.id: row.state for row in rows.operations}
    sealed = {row.id: row.seal_hash is not None for row in rows.operations}
    if settled and any(state not in (PUBLISHED, ABANDONED) for state in states.values()):
        broken.append(f"unfinished operations: {states}")
    for row in rows.audit:
        if (row.kind, row.outcome) in _NOT_IN_THE_JOURNAL:
            continue  # of a unit of a sink, of a run of a job, of versions, or of what a person asked for
        expected = PUBLISHED if row.outcome in _PUBLISHED_OUTCOMES else ABANDONED
        if states.get(row.operation) != expected:
            broken.append(f"audit says {row.outcome} of {row.operation}, the journal {states.get(row.operation)}")
        if row.found == STAGING and sealed.get(row.operation):
            broken.append(f"audit says that {row.operation} was not sealed, and it was")


def _going(catalog: Catalog, condemned: list[StateRow]) -> set[str]:
    """What may be left of states that a sweep has begun to delete; last the metadata file that a pointer names."""
    files, found = _reader(catalog), set[str]()
    for head in (row.head for row in condemned if row.metadata_location):
        found.add(head.metadata_location)
        with suppress(FloodmarkError, FileNotFoundError):
            # As far as it can be read: a deleted file named nothing that still exists.
            found |= files.named_files([head])
            found |= set(files.data_files(head))
    return found


def _check_files(
    catalog: Catalog,
    rows: CatalogRows,
    swept: set[tuple[int, str]],
    condemned: set[tuple[int, str]],
    settled: bool,
    segments: set[str],
    broken: list[str],
) -> set[str]:
    floors = {table_id: row.deletions_floor for table_id, row in rows.maintenance.items()}
    reachable = {row.location for row in rows.deletions if row.sequence > floors[row.table_id]}
    reachable |= set(rows.pointers.values()) | segments
    going = _going(catalog, [row for row in rows.states if row.id in condemned])
    # Segments that are damaged stay until maintenance has replaced them.
    waiting = (going | {row.location for row in rows.deletions} | catalog.indexes.all_locations()) - reachable
    files = _reader(catalog)
    for row in rows.states:
        if row.id in swept or not row.metadata_location:
            continue  # its files are gone, or may go; a tombstone names none
        reachable |= files.named_files([row.head]) | set(files.data_files(row.head))
    on_disk = {
        entry.location
        for entry in all_files(catalog.storage, catalog.location)
        if not entry.location.rpartition("/")[2].startswith("catalog.db")
        # Ingested rows have rules of their own.
        and not entry.location.startswith((f"{catalog.location}/spool/", f"{catalog.location}/quarantine/"))
        and not entry.location.startswith(f"{catalog.location}/{WITNESSES}/")
    }
    # Files of an adopted table stay where they were.
    on_disk |= {
        location
        for location in reachable
        if not location.startswith(catalog.location + "/") and catalog.storage.exists(location)
    }
    if missing := reachable - on_disk:
        broken.append(f"files are gone: {sorted(missing)}")
    extra = {path for path in on_disk - reachable - waiting if not _FOREIGN.search(path)}
    if settled and extra:
        broken.append(f"files are left over: {sorted(extra)}")
    return on_disk


def _check_spools(catalog: Catalog, version: int, broken: list[str]) -> None:
    """Ingested rows: how far spools are fed, and what is in quarantine."""
    spools = {row.table_id: row for row in catalog.spools.all()}
    entries = catalog.spools.quarantine(state=None)
    for row in spools.values():
        held = sum(one.rows for one in entries if one.table_id == row.table_id and one.state == HELD)
        if held != row.quarantined:
            broken.append(f"spool of {row.table}: {row.quarantined} rows in quarantine by its row, {held} really")
        if (row.version or 0) > version:
            broken.append(f"spool of {row.table} names version {row.version} of {version}")
    for one in entries:
        mine = spools.get(one.table_id)
        if mine is not None and mine.spool_id == one.spool_id and one.record >= mine.position:
            broken.append(f"quarantine {one.id} is of record {one.record}, which is not fed")
        if one.state == HELD:
            if not catalog.storage.exists(one.location):
                broken.append(f"quarantine {one.id}: its rows are gone")
            elif len(read_aside(catalog.storage, one.location)) != one.rows:
                broken.append(f"quarantine {one.id} does not hold {one.rows} rows")
    root = join(catalog.location, QUARANTINE)
    found = {entry.location.removeprefix(root + "/").partition("/")[0] for entry in catalog.storage.list(root + "/")}
    for table_id in sorted(found):
        # What a killed feed left may exist until the next feed has passed it; nothing else.
        if gone := leftovers(catalog, table_id):
            broken.append(f"objects of the quarantine are left over: {gone}")
