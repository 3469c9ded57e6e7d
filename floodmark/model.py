"""The records that packages pass to each other. Frozen, plain, no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

from floodmark.json_form import Json
from floodmark.shown import html_table

# A value of a row, as Python holds it; a datetime is a date.
Scalar: TypeAlias = bool | int | float | str | bytes | Decimal | date | time | UUID | None
Value: TypeAlias = "Scalar | Sequence[Value] | Mapping[str, Value]"
Row: TypeAlias = Mapping[str, Value]

MAIN = "main"
# The outcome of an apply that changed indexes and nothing else.
DECLARED = "declared"
TARGET_FILE_BYTES = 128 * 1024 * 1024
# How many snapshots a table's metadata names besides the heads of branches.
SNAPSHOTS_KEPT = 5
# Below every sequence: files of Iceberg's format v1 have sequence 0.
BEGINNING = -1
SEQ_COLUMN = "_seq"
# Names that Floodmark reserves in every table, and in the change feed.
RESERVED_COLUMNS = frozenset({SEQ_COLUMN, "_change", "_file", "_pos"})


@dataclass(frozen=True)
class FileRecord:
    """One data file as its writer describes it: what an Iceberg manifest needs, in plain JSON-able values.

    Partition values and bounds are base64 of Iceberg's single-value serialisation (None: null).
    """

    path: str
    rows: int
    size_bytes: int
    partition: tuple[str | None, ...] = ()
    column_sizes: dict[int, int] = field(default_factory=dict)
    value_counts: dict[int, int] = field(default_factory=dict)
    null_counts: dict[int, int] = field(default_factory=dict)
    nan_counts: dict[int, int] = field(default_factory=dict)
    lower_bounds: dict[int, str] = field(default_factory=dict)
    upper_bounds: dict[int, str] = field(default_factory=dict)
    split_offsets: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> FileRecord:
        by_id = ("column_sizes", "value_counts", "null_counts", "nan_counts", "lower_bounds", "upper_bounds")
        values = dict(data)
        for name in by_id:
            values[name] = {int(field_id): value for field_id, value in data.get(name, {}).items()}
        values["partition"] = tuple(data.get("partition", ()))
        values["split_offsets"] = tuple(data.get("split_offsets", ()))
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> FileRecord:
        return cls.from_dict(json.loads(text))


@dataclass(frozen=True)
class DeletionsFile:
    """The keys that one commit deleted from a table: a file of key columns, with the commit's own sequence."""

    location: str
    sequence: int
    rows: int
    size_bytes: int


@dataclass(frozen=True, repr=False)
class TableCommit:
    """What one commit did to one table."""

    table: str
    table_id: str
    snapshot: int | None
    sequence: int
    rows_added: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    rows_total: int = 0
    files_total: int = 0

    def __repr__(self) -> str:
        return f"<TableCommit {self.table} {self.change} rows={self.rows_total:,} sequence={self.sequence}>"

    @property
    def change(self) -> str:
        """Rows added, updated and deleted, in short: +2 ~1 -3."""
        counts = (("+", self.rows_added), ("~", self.rows_updated), ("-", self.rows_deleted))
        return " ".join(f"{sign}{count:,}" for sign, count in counts if count) or "+0"


@dataclass(frozen=True, repr=False)
class Commit:
    """One version of the lake and how it came to be. `outcome` never confuses new work with none:

    committed: this call made the version; already_committed: an earlier call with the same identity did;
    nothing_to_do: no rows, so no new version (`version` is the head). declared: an apply changed indexes and nothing
    else, which makes no version.
    """

    version: int
    outcome: str
    operation: str | None
    kind: str
    branch: str
    actor: str
    message: str
    committed_ms: int
    tables: tuple[TableCommit, ...] = ()

    def __repr__(self) -> str:
        tables = "; ".join(f"{one.table} {one.change}" for one in self.tables)
        branch = "" if self.branch == MAIN else f" on {self.branch}"
        changed_tables = f" ({tables})" if tables else ""
        return f"<Commit version={self.version} {self.outcome}: {self.kind} by {self.actor}{branch}{changed_tables}>"

    def _repr_html_(self) -> str:
        rows = [(one.table, one.rows_added, one.rows_updated, one.rows_deleted, one.rows_total) for one in self.tables]
        title = f"version {self.version}, {self.outcome}: {self.kind} by {self.actor} {self.message}".strip()
        return html_table(title, ("table", "added", "updated", "deleted", "rows now"), rows)

    @property
    def rows_added(self) -> int:
        return sum(table.rows_added for table in self.tables)

    @property
    def rows_updated(self) -> int:
        return sum(table.rows_updated for table in self.tables)

    @property
    def rows_deleted(self) -> int:
        return sum(table.rows_deleted for table in self.tables)

    def table(self, name: str) -> TableCommit:
        return next(table for table in self.tables if table.table == name)

    def as_dict(self) -> dict[str, Json]:
        return asdict(self)


@dataclass(frozen=True)
class Head:
    """The newest state of one table on one branch, as the catalog has it."""

    branch: str
    table: str
    table_id: str
    snapshot: int | None
    sequence: int
    schema_id: int
    spec_id: int
    manifest_list: str | None
    metadata_location: str
    version: int
    rows: int
    files: int
    size_bytes: int


@dataclass(frozen=True)
class CurrentTable:
    """A table as a builder found it: its head on the branch, where Iceberg's pointer is, and where we put it last.

    Without a pointer, another writer dropped it. kept_snapshots are the heads of all branches, their bases and what
    they compare with: the table's metadata must keep them. refs are the snapshots of the existing branches.
    """

    head: Head
    pointer: str | None
    pointer_known: str
    kept_snapshots: frozenset[int] = frozenset()
    refs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditRow:
    """What recovery did to one dead operation."""

    operation: str
    kind: str
    found: str
    outcome: str
    detail: str
    at_ms: int
    version: int | None = None


@dataclass(frozen=True)
class RecoveryReport:
    """What one recovery did.

    `refused` names what it could not understand and therefore kept; `waiting` what needs a table to be repaired first
    (`floodmark repair`).
    """

    rolled_forward: tuple[str, ...] = ()
    rolled_back: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    files_deleted: int = 0
    waiting: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        if self.refused:
            return "refused"
        if self.rolled_forward or self.rolled_back or self.discarded or self.files_deleted:
            return "recovered"
        return "nothing_to_do"
