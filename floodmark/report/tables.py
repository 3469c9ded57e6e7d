"""The state of the lake's tables: each in one line, and one in full, from the catalog and metadata alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from sqlalchemy import select

from floodmark import clock
from floodmark.catalog import tables
from floodmark.catalog.maintenance_state import Policy
from floodmark.commit.catalog import Catalog
from floodmark.engine import Engine
from floodmark.errors import Corrupt, NotFound
from floodmark.index.records import IndexStatus
from floodmark.json_form import Reported
from floodmark.model import MAIN, Head
from floodmark.report.health import FINE
from floodmark.report.indexes import IndexTotals, totals_of
from floodmark.report.maintenance import (
    DEFAULTS,
    MaintenanceOverview,
    Outcome,
    database_ms,
    due_of_table,
    outcome_of,
    ratio,
    read_maintenance,
)
from floodmark.report.spools import REFUSED, SpoolReport
from floodmark.settings.settings import MaintainSettings
from floodmark.shown import count_of

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionField
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata

VERSIONS_PER_STATEMENT = 500


@dataclass(frozen=True)
class TableLine(Reported):
    """A table in one line; `changed` is when its last commit was, `due` what maintenance would do to it."""

    table: str
    rows: int
    files: int
    bytes: int
    sequence: int
    version: int
    changed: str | None
    small_files: int | None
    small_file_ratio: float | None
    waiting_rows: int | None
    quarantined: int
    indexes: IndexTotals
    due: tuple[str, ...]
    health: str


@dataclass(frozen=True)
class ColumnLine(Reported):
    name: str
    type: str
    required: bool
    refers_to: str | None
    # The default for rows that do not bring it, or an expression.
    filled: str | None
    comment: str


@dataclass(frozen=True)
class ConsumerLine(Reported):
    name: str
    mark: int
    lag: int
    protected: bool


@dataclass(frozen=True)
class TableDetails(Reported):
    """One table, as `floodmark show TABLE --json`."""

    table: str
    table_id: str
    location: str
    rows: int
    files: int
    bytes: int
    sequence: int
    version: int
    snapshot: int | None
    columns: tuple[ColumnLine, ...]
    key: tuple[str, ...]
    partition: tuple[str, ...]
    sort: tuple[str, ...]
    comment: str
    metadata_location: str
    small_files: int | None
    small_file_ratio: float | None
    snapshots: int
    orphan_files: int | None
    orphan_bytes: int | None
    retention: str | None
    retention_column: str | None
    # None: what they cover is unknown, because a file that this version needs is gone.
    indexes: tuple[IndexStatus, ...] | None
    consumers: tuple[ConsumerLine, ...]
    last_maintenance: Mapping[str, Outcome]
    due: tuple[str, ...]


@dataclass(frozen=True)
class PartitionLine(Reported):
    partition: str
    rows: int
    files: int
    bytes: int


@dataclass(frozen=True)
class FileLine(Reported):
    file: str
    partition: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class TableContents(Reported):
    """What a table is made of: some of its partitions and files, and how many there are."""

    partitions: tuple[PartitionLine, ...]
    partitions_count: int
    files: tuple[FileLine, ...]
    files_count: int


def table_lines(
    catalog: Catalog,
    heads: Sequence[Head],
    upkeep: MaintenanceOverview,
    spools: Sequence[SpoolReport],
    drifted: Collection[str],
    keeping: MaintainSettings = DEFAULTS,
) -> list[TableLine]:
    """Tables in one line each. Maintenance is known for main alone: on other branches its fields are None."""
    indexes = catalog.indexes.totals()
    now_ms, changed = database_ms(catalog), _committed_ms(catalog, {head.version for head in heads})
    by_table = {spool.table: spool for spool in spools}
    found = []
    for head in heads:
        on_main = head.branch == MAIN
        small = upkeep.small_files.get(head.table_id) if on_main else None
        spool = by_table.get(head.table) if on_main else None
        found.append(
            TableLine(
                table=head.table,
                rows=head.rows,
                files=head.files,
                bytes=head.size_bytes,
                sequence=head.sequence,
                version=head.version,
                changed=clock.format_time(changed[head.version]) if head.version in changed else None,
                small_files=small,
                small_file_ratio=ratio(small, head.files),
                waiting_rows=0 if spool is None else spool.waiting_rows,
                quarantined=0 if spool is None else spool.quarantined,
                indexes=totals_of(indexes.get(head.table_id)),
                due=tuple(due_of_table(head, upkeep, keeping, now_ms)) if on_main else (),
                health=_health(head.table in drifted and on_main, spool),
            )
        )
    return found


def _health(drifted: bool, spool: SpoolReport | None) -> str:
    """The state of a table in words, as the lake's health reports it."""
    parts = ["refused: changed by another writer; see `floodmark repair`"] if drifted else []
    if spool is not None and spool.state == REFUSED:
        parts.append("refused: its spool; see `floodmark spool list`")
    elif spool is not None and spool.quarantined:
        see = f"see `floodmark spool quarantine list {spool.table}`"
        parts.append(f"attention: {count_of(spool.quarantined, 'row')} in quarantine; {see}")
    return "; ".join(parts) or FINE


def _committed_ms(catalog: Catalog, versions: Collection[int]) -> dict[int, int]:
    commit, wanted = tables.commits, sorted(versions)
    found: dict[int, int] = {}
    with catalog.database.read() as tx:
        for start in range(0, len(wanted), VERSIONS_PER_STATEMENT):
            some = commit.c.version.in_(wanted[start : start + VERSIONS_PER_STATEMENT])
            rows = tx.execute(select(commit.c.version, commit.c.committed_ms).where(some))
            found |= {row.version: row.committed_ms for row in rows}
    return found


def table_details(engine: Engine, head: Head, keeping: MaintainSettings = DEFAULTS) -> TableDetails:
    """A table: its columns, layout, size and location, its indexes and what they cover, and its maintenance."""
    from floodmark.commit.metadata import schema_of

    catalog = engine.catalog
    metadata = catalog.files.metadata(head.metadata_location)
    schema, spec = schema_of(metadata, head), metadata.specs()[head.spec_id]
    upkeep = read_maintenance(catalog)
    small = upkeep.small_files.get(head.table_id)
    policy = upkeep.policies.get(head.table_id, Policy())
    orphans = _orphans(catalog, head)
    return TableDetails(
        table=head.table,
        table_id=head.table_id,
        location=metadata.location,
        rows=head.rows,
        files=head.files,
        bytes=head.size_bytes,
        sequence=head.sequence,
        version=head.version,
        snapshot=head.snapshot,
        columns=_columns(metadata, schema, head),
        key=tuple(_column_name(schema, field_id) for field_id in schema.identifier_field_ids),
        partition=tuple(_partition_text(schema, field) for field in spec.fields),
        sort=tuple(
            f"{_column_name(schema, field.source_id)} {field.direction.name.lower()}"
            for field in metadata.sort_order().fields
        ),
        comment=metadata.properties.get("comment", ""),
        metadata_location=head.metadata_location,
        small_files=small,
        small_file_ratio=ratio(small, head.files),
        snapshots=catalog.expiry.count_readable(head.table_id),
        orphan_files=None if orphans is None else orphans[0],
        orphan_bytes=None if orphans is None else orphans[1],
        retention=policy.retention,
        retention_column=policy.column,
        indexes=_indexes(engine, head),
        consumers=tuple(
            ConsumerLine(one.name, one.mark, max(0, head.sequence - one.mark), one.protected)
            for one in catalog.maintenance.consumers(head.table_id)
        ),
        last_maintenance={one.verb: outcome_of(one) for one in upkeep.newest if one.table_id == head.table_id},
        due=tuple(due_of_table(head, upkeep, keeping, database_ms(catalog))),
    )


def _columns(metadata: TableMetadata, schema: Schema, head: Head) -> tuple[ColumnLine, ...]:
    from floodmark.commit.fills import fills_of
    from floodmark.commit.references import references_of

    refers = {one.field_id: one.parent for one in references_of(metadata.properties, schema, head.table_id)}
    filled = {one.field_id: one.expression for one in fills_of(metadata.properties, schema)}
    return tuple(
        ColumnLine(
            name=field.name,
            type=str(field.field_type),
            required=field.required,
            refers_to=refers.get(field.field_id),
            filled=filled.get(field.field_id),
            comment=field.doc or "",
        )
        for field in schema.fields
        if not field.name.startswith("_")
    )


def _indexes(engine: Engine, head: Head) -> tuple[IndexStatus, ...] | None:
    """The table's indexes and what they cover. None as above: `floodmark doctor` says which file it is."""
    from floodmark.index.status import index_status

    try:
        return tuple(index_status(engine.catalog, engine.coverings, head))
    except (Corrupt, NotFound, FileNotFoundError):
        return None


def _orphans(catalog: Catalog, head: Head) -> tuple[int, int] | None:
    """Files and bytes that only expired versions of the table name, whether their grace is over or not.

    None if that is unknown, because a file that versions need is gone: `floodmark doctor` says which.
    """
    from floodmark.maintenance.sweep import plan_sweep, with_sizes

    try:
        mine = [states for states in catalog.expiry.states(0, head.table) if states.table_id == head.table_id]
        files = [file for states in mine for file in with_sizes(catalog, plan_sweep(catalog, states).doomed)]
    except Corrupt:
        return None
    return len(files), sum(file.size_bytes or 0 for file in files)


def _column_name(schema: Schema, field_id: int) -> str:
    return str(schema.find_column_name(field_id))


def _partition_text(schema: Schema, field: PartitionField) -> str:
    column = _column_name(schema, field.source_id)
    transform = str(field.transform)
    if transform == "identity":
        return column
    name, _, rest = transform.partition("[")
    return f"{name}({rest.rstrip(']') + ', ' if rest else ''}{column})"


# ── partitions and files of a table ──


def table_contents(catalog: Catalog, head: Head, lines_max: int) -> TableContents:
    """The partitions and files of a table: the first partitions by name, the largest files, and the number of each."""
    from pyiceberg.manifest import DataFileContent

    from floodmark.commit.metadata import schema_of

    metadata = catalog.files.metadata(head.metadata_location)
    schema, specs = schema_of(metadata, head), metadata.specs()
    parts: defaultdict[str, list[FileLine]] = defaultdict(list)
    for manifest in catalog.files.manifests(head.manifest_list) if head.manifest_list else ():
        for entry in catalog.files.entries(manifest):
            file = entry.data_file
            if file.content != DataFileContent.DATA:
                continue
            spec = specs[manifest.partition_spec_id]
            name = unquote(spec.partition_to_path(file.partition, schema)) if spec.fields else ""
            path = file.file_path.removeprefix(metadata.location).lstrip("/")
            parts[name].append(FileLine(path, name, file.record_count, file.file_size_in_bytes))
    files = sorted((one for some in parts.values() for one in some), key=lambda one: (-one.bytes, one.file))
    return TableContents(
        partitions=tuple(
            PartitionLine(name, sum(one.rows for one in some), len(some), sum(one.bytes for one in some))
            for name, some in sorted(parts.items())[:lines_max]
        ),
        partitions_count=len(parts),
        files=tuple(files[:lines_max]),
        files_count=len(files),
    )
