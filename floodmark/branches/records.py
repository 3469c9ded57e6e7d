"""What the verbs of branches and versions return: differences, conflicts, merges and rollbacks, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from floodmark.json_form import Json
from floodmark.model import Commit, Row
from floodmark.rows.json.ndjson import json_value

MERGED, UP_TO_DATE, IN_CONFLICT, PLANNED = "merged", "up_to_date", "conflict", "planned"
CREATED, GONE, RESHAPED, CHANGED = "created", "dropped", "reshaped", "changed"
ADDED, UPDATED, REMOVED = "added", "updated", "deleted"


@dataclass(frozen=True)
class RowConflict:
    """What both branches changed, each in its own way. Ours is the branch merged into, theirs the one merged.

    reason: of a row `changed` (both changed it) or `deleted` (one side deleted what the other changed), with its key
    and the three rows, None where there is none. Of a whole table (no key): `schema`, `key`, `overwritten`, `batch`
    or `dropped`. `column`: one side dropped a column (`about`) into which the other wrote this row's value.
    `reference`: `key` holds a value that rows would refer to and that no row would have any more; `about` is the other
    table of the reference. `needed`: a column would go, or get another name, that something on our side uses: `about`
    says what, and what to do.
    """

    table: str
    reason: str
    key: Row | None = None
    base: Row | None = None
    ours: Row | None = None
    theirs: Row | None = None
    about: str | None = None

    def as_dict(self) -> dict[str, Json]:
        rows = {"key": self.key, "base": self.base, "ours": self.ours, "theirs": self.theirs}
        shown = {"table": self.table, "reason": self.reason, **{name: json_value(row) for name, row in rows.items()}}
        return shown if self.about is None else {**shown, "about": self.about}


class RowDiff(TypedDict):
    """What differs in one row. change: added, updated, deleted."""

    change: str
    row: Row | None
    before: Row | None


@dataclass(frozen=True)
class TableDiff:
    """What differs in one table. change: created, dropped, reshaped, changed. samples: the first of its rows.

    columns: how the columns, the key and the partitions differ, a sentence for each change.
    """

    table: str
    change: str
    rows_added: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    samples: tuple[RowDiff, ...] = ()
    columns: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Json]:
        return {
            "table": self.table,
            "change": self.change,
            "rows_added": self.rows_added,
            "rows_updated": self.rows_updated,
            "rows_deleted": self.rows_deleted,
            "columns": list(self.columns),
            "samples": [
                {"change": one["change"], "row": json_value(one["row"]), "before": json_value(one["before"])}
                for one in self.samples
            ],
        }


@dataclass(frozen=True)
class BranchDiff:
    """What a branch has and its parent does not have yet: its head against the last state that both had.

    Of two versions (`lake.diff`): what the later one, `head_version`, has of its branch and the earlier one, of
    `parent`, does not. Here any two versions can be compared, also backwards.
    """

    branch: str
    parent: str
    common_version: int
    head_version: int
    tables: tuple[TableDiff, ...] = ()

    def as_dict(self) -> dict[str, Json]:
        return {
            "branch": self.branch,
            "parent": self.parent,
            "common_version": self.common_version,
            "head_version": self.head_version,
            "tables": [table.as_dict() for table in self.tables],
        }


@dataclass(frozen=True)
class Merged:
    """How a merge ended. outcome: merged, up_to_date (nothing new), conflict (nothing was changed), planned.

    tables: what the target got, by table. conflicts: the first of them; conflicts_total: their number.
    """

    outcome: str
    source: str
    target: str
    commit: Commit | None = None
    tables: tuple[TableDiff, ...] = ()
    conflicts: tuple[RowConflict, ...] = ()
    conflicts_total: int = 0

    def as_dict(self) -> dict[str, Json]:
        return {
            "outcome": self.outcome,
            "source": self.source,
            "target": self.target,
            "commit": None if self.commit is None else self.commit.as_dict(),
            "tables": [table.as_dict() for table in self.tables],
            "conflicts": [conflict.as_dict() for conflict in self.conflicts],
            "conflicts_total": self.conflicts_total,
        }


@dataclass(frozen=True)
class RollbackPlan:
    """What a rollback would do now. tables: what changes, by table.

    unreported: of tables without a key, how many rows would go; `changes` cannot report these to followers. created:
    tables that did not exist at that version; they stay as they are. dropped: tables that existed then and do not now;
    they stay dropped.
    """

    branch: str
    to_version: int
    head_version: int
    tables: tuple[TableDiff, ...] = ()
    unreported: Mapping[str, int] = field(default_factory=dict)
    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Json]:
        return {
            "branch": self.branch,
            "to_version": self.to_version,
            "head_version": self.head_version,
            "tables": [table.as_dict() for table in self.tables],
            "unreported": dict(self.unreported),
            "created": list(self.created),
            "dropped": list(self.dropped),
        }


@dataclass(frozen=True, repr=False)
class RolledBack(Commit):
    """The commit of a rollback: a new version with the contents of `to_version`.

    unreported: of tables without a key, how many rows went; `changes` cannot report these, so followers keep them.
    created: tables that did not exist at that version; they are as they were. dropped: tables that existed then and do
    not now; `undrop` restores one.
    """

    to_version: int = 0
    unreported: Mapping[str, int] = field(default_factory=dict)
    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
