"""The rows of the catalog that the invariants compare, one record per table, read by column names.

Not the records of catalog/: a mistake in how those are read must not hide here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Column, Connection, Table, select

from floodmark.catalog import tables
from floodmark.catalog.lineage import Lineage, Lineages
from floodmark.model import MAIN, Head

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


@dataclass(frozen=True)
class CommitRow:
    version: int
    parent: int
    branch: str
    operation: str
    committed_ms: int
    state: str


@dataclass(frozen=True)
class StateRow:
    """A table as one commit left it. Without a metadata location it is a tombstone."""

    version: int
    table_id: str
    table_name: str
    snapshot: int | None
    sequence: int
    schema_id: int
    spec_id: int
    manifest_list: str | None
    metadata_location: str
    rows_total: int
    files_total: int
    rows_added: int
    rows_deleted: int

    @property
    def id(self) -> tuple[int, str]:
        return self.version, self.table_id

    @property
    def head(self) -> Head:
        """As far as readers of files need it."""
        return Head(
            branch=MAIN,
            table=self.table_name,
            table_id=self.table_id,
            snapshot=self.snapshot,
            sequence=self.sequence,
            schema_id=self.schema_id,
            spec_id=self.spec_id,
            manifest_list=self.manifest_list,
            metadata_location=self.metadata_location,
            version=self.version,
            rows=0,
            files=0,
            size_bytes=0,
        )


@dataclass(frozen=True)
class HeadRow:
    branch: str
    table_id: str
    table_name: str
    snapshot: int | None
    sequence: int
    schema_id: int
    manifest_list: str | None
    metadata_location: str
    version: int


@dataclass(frozen=True)
class BranchRow:
    name: str
    parent: str | None
    base_version: int
    head_version: int


@dataclass(frozen=True)
class OperationRow:
    id: str
    kind: str
    state: str
    seal_hash: str | None
    version: int | None


@dataclass(frozen=True)
class RecoveredRow:
    """What the audit says of one operation."""

    operation: str
    kind: str
    found: str
    outcome: str


@dataclass(frozen=True)
class BatchRow:
    id: str
    version: int


@dataclass(frozen=True)
class DeletionsRow:
    table_id: str
    sequence: int
    location: str
    version: int
    rows_total: int


@dataclass(frozen=True)
class ExpiredRow:
    version: int
    table_id: str
    expired_ms: int


@dataclass(frozen=True)
class MaintenanceRow:
    table_id: str
    small_files: int | None
    deletions_floor: int


@dataclass(frozen=True)
class SinkRow:
    id: str
    name: str


@dataclass(frozen=True)
class FollowedRow:
    """A table that a sink follows."""

    sink: str
    table_name: str
    table_id: str


@dataclass(frozen=True)
class MarkRow:
    name: str
    table_id: str
    epoch: int
    mark: int


@dataclass(frozen=True)
class UnitRow:
    id: str
    sink: str
    table_id: str
    lane: str
    epoch: int
    since: int
    until: int
    pin: str | None
    record: str
    state: str


@dataclass(frozen=True)
class PartRow:
    unit: str
    first: int
    last: int


@dataclass(frozen=True)
class RefusedRow:
    """A row in a sink's quarantine."""

    id: str
    sink: str
    retry_unit: str | None
    retry_position: int | None


@dataclass(frozen=True)
class CatalogRows:
    """What one transaction saw. Commits and states are in the order of versions."""

    version: int
    commits: list[CommitRow]
    states: list[StateRow]
    heads: list[HeadRow]
    branches: list[BranchRow]
    lines: list[Lineage]
    # By table name, Iceberg's metadata location.
    pointers: dict[str, str]
    operations: list[OperationRow]
    audit: list[RecoveredRow]
    batches: list[BatchRow]
    deletions: list[DeletionsRow]
    expired: list[ExpiredRow]
    # By table id.
    maintenance: dict[str, MaintenanceRow]

    @classmethod
    def read(cls, tx: Connection) -> CatalogRows:
        return cls(
            version=tx.execute(select(tables.lake.c.version)).scalar_one(),
            commits=read_rows(tx, tables.commits, CommitRow, tables.commits.c.version),
            states=read_rows(tx, tables.commit_tables, StateRow, tables.commit_tables.c.version),
            heads=read_rows(tx, tables.heads, HeadRow),
            branches=read_rows(tx, tables.branches, BranchRow),
            lines=Lineages.read(tx).all(),
            pointers={row.table_name: row.metadata_location for row in tx.execute(select(tables.iceberg_tables))},
            operations=read_rows(tx, tables.operations, OperationRow),
            audit=read_rows(tx, tables.audit, RecoveredRow),
            batches=read_rows(tx, tables.sources, BatchRow),
            deletions=read_rows(tx, tables.deletions, DeletionsRow),
            expired=read_rows(tx, tables.expired, ExpiredRow),
            maintenance={row.table_id: row for row in read_rows(tx, tables.upkeep, MaintenanceRow)},
        )


def read_rows(tx: Connection, table: Table, record: type[R], *order: Column[int] | Column[str]) -> list[R]:
    """All rows of a table as records, whose fields name the columns."""
    make: Callable[..., R] = record
    columns = [table.c[field.name] for field in fields(record)]
    return [make(*row) for row in tx.execute(select(*columns).order_by(*order))]
